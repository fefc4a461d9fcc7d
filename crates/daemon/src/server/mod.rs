//! HTTP on two Unix sockets, and the only place where the API's types meet our own.
//!
//! Who calls is known by the socket, never by a body: the operator's is root's and group `pepo`'s, the edge's takes the
//! edge's uid alone and lacks the operator's routes. Every route is registered once, through [`Routes::route`], by its row
//! of the API's table. Every error leaves through [`Problem`].
//!
//! ```text
//! accept ─► peer's uid ─► Call{caller, app, request id} ─► router ─► handler ─► Problem or answer ─► headers
//! ```

mod app;
mod attach;
mod audit;
mod command;
mod events;
mod extract;
mod feed;
mod files;
mod image;
mod key;
mod limits;
mod once;
mod operator;
mod ports;
mod publish;
mod session;
mod settings;
mod token;
mod usage;
mod volumes;
mod workspace;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{RawPathParams, Request};
use axum::handler::Handler;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, on};
use http::{HeaderValue, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use pepo_api::quiet::Quiet;
use pepo_api::{Answer, AppId, Audience, Error as ApiError, ErrorBody, ErrorCode, KeyId, RequestId, Route};
use pepo_sandbox::chain;
use pepo_sandbox::proto::FailureCode;
use pepo_sandbox::{guest, host};
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;
use tower_service::Service as _;

use crate::Pepod;
use crate::capacity::Full;
use crate::session::Error;
use crate::store::{self, Actor, Name};
use crate::workspace::Connection;
use volumes::Local;

pub use extract::{Json, Query};
pub use feed::Streams;
pub use once::Turns;
pub use operator::shown;

/// Connections of one socket at once. Each has a descriptor here and often one more at the guest.
const CONNECTIONS: usize = 2048;

/// How long a caller may take to send a request's head.
const HEAD_WITHIN: Duration = Duration::from_secs(30);

/// Read and write buffer of a connection; uploads and downloads pass through it.
const BUFFER: usize = 256 * 1024;

/// Who calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The operator, by uid.
    Operator {
        /// The peer's.
        uid: u32,
    },
    /// An App, through the edge.
    App(AppId),
    /// The edge itself.
    Edge,
}

/// What is known of a request besides itself.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Who calls.
    pub caller: Caller,
    /// For which App.
    pub app: AppId,
    /// Whether the caller said so, rather than meaning the default one.
    pub app_named: bool,
    /// The key it came with, through the edge.
    pub key: Option<KeyId>,
    /// Who it is, as the edge names one who came without a key of their own.
    pub name: Option<Name>,
    /// The address it came from, as the edge tells it.
    pub source: Option<std::net::IpAddr>,
    /// Its id, in answers and logs.
    pub request_id: RequestId,
    /// `If-Activation`.
    pub activation: Option<u64>,
}

impl Call {
    /// Who that is, for the audit log and events.
    pub fn actor(&self) -> Actor {
        match (self.caller, self.name, self.key) {
            (Caller::Operator { uid }, ..) => Actor::Uid(uid),
            (_, Some(name), _) => Actor::Named(name),
            (_, None, Some(key)) => Actor::Key(key),
            (Caller::App(_) | Caller::Edge, None, None) => Actor::Edge,
        }
    }

    /// The App whose things a list shows; none is all of them, which only an operator who names no App sees.
    pub fn scope(&self) -> Option<AppId> {
        match self.caller {
            Caller::Operator { .. } if !self.app_named => None,
            _ => Some(self.app),
        }
    }
}

/// Which socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    /// The operator's.
    Operator,
    /// The edge's, and the uid it must have.
    Edge {
        /// The edge's uid; without one everybody that the socket's mode admits.
        uid: Option<u32>,
    },
}

/// An error on its way out.
#[derive(Debug)]
pub struct Problem(pub Box<ApiError>);

impl From<store::Error> for Problem {
    fn from(error: store::Error) -> Self {
        Error::from(error).into()
    }
}

impl Problem {
    /// An error of this kind that says this.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Problem::from(ApiError::new(code, message))
    }

    /// A value that is not valid.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Problem::from(ApiError::new(ErrorCode::Invalid, message).param(param))
    }

    /// A setting that this release cannot do.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Problem::from(ApiError::new(ErrorCode::Unsupported, message).param(param))
    }
}

impl IntoResponse for Problem {
    /// The body is made by [`finish`], which knows the request's id.
    fn into_response(self) -> Response {
        let mut response = self.0.code.status().into_response();
        response.extensions_mut().insert(Arc::new(*self.0));
        response
    }
}

impl From<ApiError> for Problem {
    fn from(error: ApiError) -> Self {
        Problem(Box::new(error))
    }
}

impl From<guest::Error> for Problem {
    fn from(error: guest::Error) -> Self {
        Error::Guest(error).into()
    }
}

/// The one translation of what goes wrong inside.
impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let text = chain(&error);
        let api = match error {
            Error::NotFound { .. } => ApiError::new(ErrorCode::NotFound, text),
            Error::Terminated(ended) => {
                ApiError::new(ErrorCode::SessionTerminated, format!("the Session has ended{}", why(&ended)))
                    .ended(ended)
            }
            Error::SandboxEnded(ended) => {
                ApiError::new(ErrorCode::SandboxEnded, format!("the Sandbox ended{}", why(&ended))).ended(ended)
            }
            Error::ActivationFailed(ended) => ApiError::new(ErrorCode::ActivationFailed, text).ended(ended),
            Error::NotActive(_) => ApiError::new(ErrorCode::Timeout, text),
            Error::Replaced { .. } => ApiError::new(ErrorCode::SandboxReplaced, text),
            Error::NoImage { hint, name } => {
                ApiError::new(ErrorCode::ImageMissing, format!("there is no Image `{name}`")).hint(hint).param("image")
            }
            Error::Full(Full::TooLarge { what, .. }) => {
                ApiError::new(ErrorCode::Invalid, text).param(what.param().unwrap_or("session"))
            }
            Error::Full(Full::Now { .. }) => ApiError::new(ErrorCode::NoCapacity, text)
                .hint("end a Session (`pepo session ls`, `pepo session rm`) or ask for less memory"),
            Error::NoSandboxNow(_) => ApiError::new(ErrorCode::Conflict, text),
            Error::Differs { field, .. } => ApiError::new(ErrorCode::Conflict, text)
                .param(field)
                .hint("leave it out, change the Session (`PATCH`), or use another key"),
            Error::KeyTaken(_) => ApiError::new(ErrorCode::Conflict, text).param("key"),
            Error::Short(_) => ApiError::new(ErrorCode::NoCapacity, text)
                .hint("end Sessions, or make room on the host; `pepo doctor` says of what there is too little"),
            Error::Draining => ApiError::new(ErrorCode::Draining, text),
            Error::Invalid { param: "name", message } => ApiError::new(ErrorCode::Conflict, message).param("name"),
            Error::Invalid { param, message } => ApiError::new(ErrorCode::Invalid, message).param(param),
            Error::NotStarted { message, exit_code: 127 } => ApiError::new(ErrorCode::CommandNotFound, message),
            Error::NotStarted { message, .. } => ApiError::new(ErrorCode::CommandNotStarted, message),
            Error::OutputGone(_) => ApiError::new(ErrorCode::OutputGone, text),
            Error::Workspace(error) => return Problem::from(error),
            Error::Guest(error) => guest_error(error, text),
            Error::Secret(_) => {
                tracing::error!(error = text, "a secret cannot be used");
                ApiError::new(ErrorCode::Internal, text)
            }
            Error::Store(store::Error::Quota(quota)) => ApiError::new(ErrorCode::TooManyRequests, text)
                .hint("end what is not needed any more, or ask the operator for a larger quota")
                .quota(quota),
            Error::Store(store::Error::Known(_)) => ApiError::new(ErrorCode::Conflict, text),
            Error::Store(store::Error::NoApp) => ApiError::new(ErrorCode::NotFound, text),
            Error::Store(store::Error::InUse(_) | store::Error::HasWorkspaces(_) | store::Error::Stale) => {
                ApiError::new(ErrorCode::Conflict, text)
            }
            Error::Store(store::Error::Closed) | Error::Host(host::Error::Lost) => {
                ApiError::new(ErrorCode::Unavailable, "pepod ends, or is started again; Sandboxes go on")
            }
            Error::Store(_) | Error::Host(_) | Error::Lost(_) | Error::NoSandbox(_) => {
                tracing::error!(error = text, "a request failed by a fault of ours");
                ApiError::new(ErrorCode::Internal, text)
            }
        };
        Problem::from(api)
    }
}

fn why(ended: &pepo_api::Ended) -> String {
    let word =
        serde_json::to_value(ended.reason).ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default();
    if ended.message.is_empty() { format!(": {word}") } else { format!(": {word} ({})", ended.message) }
}

fn guest_error(error: guest::Error, text: String) -> ApiError {
    let failure = match error {
        guest::Error::Failed(failure) => failure,
        guest::Error::Busy => return ApiError::new(ErrorCode::Busy, "all streams of the Sandbox are in use"),
        guest::Error::Timeout { .. } => return ApiError::new(ErrorCode::Timeout, text),
        guest::Error::Ended => return ApiError::new(ErrorCode::Conflict, "the command takes no more input"),
        guest::Error::Unreachable(_) | guest::Error::Lost(_) | guest::Error::Protocol(_) => {
            return ApiError::new(ErrorCode::GuestFailed, text);
        }
    };
    let message = pepo_sandbox::keeper::escape(&failure.message, 300);
    let code = match failure.code {
        FailureCode::Invalid => ErrorCode::Invalid,
        FailureCode::NotFound => ErrorCode::NotFound,
        FailureCode::Denied => ErrorCode::Forbidden,
        FailureCode::Exists
        | FailureCode::NotDirectory
        | FailureCode::IsDirectory
        | FailureCode::NotEmpty
        | FailureCode::State => ErrorCode::Conflict,
        FailureCode::NoSpace => ErrorCode::DiskFull,
        FailureCode::ProgramNotFound => ErrorCode::CommandNotFound,
        FailureCode::ProgramNotExecutable => ErrorCode::CommandNotStarted,
        FailureCode::UnknownOp => ErrorCode::OutputGone,
        FailureCode::Cancelled => ErrorCode::Conflict,
        FailureCode::ShellLost => ErrorCode::ShellLost,
        FailureCode::Busy => ErrorCode::Busy,
        FailureCode::Refused => ErrorCode::GuestFailed,
        FailureCode::Generation | FailureCode::Io => ErrorCode::GuestFailed,
    };
    ApiError::new(code, message)
}

/// The two routers while they are filled.
pub struct Routes {
    operator: Router<Pepod>,
    edge: Router<Pepod>,
    registered: Vec<&'static str>,
}

impl Routes {
    /// Registers a handler for a row of the table, on the sockets that its audience has.
    pub fn route<H, T>(&mut self, route: &'static Route, handler: H)
    where
        H: Handler<T, Pepod>,
        T: 'static,
    {
        self.registered.push(route.name);
        // Every method of the table has a filter; a test registers them all.
        let Ok(filter) = MethodFilter::try_from(route.method.clone()) else { return };
        let name = route.name;
        let measured = move |request: Request, next: axum::middleware::Next| async move {
            let began = std::time::Instant::now();
            let response = next.run(request).await;
            crate::metrics::METRICS.answered(name, response.status(), began.elapsed());
            response
        };
        let add = |router: &mut Router<Pepod>| {
            let mut method = on(filter, handler.clone());
            if route.changes() || route.answer == Answer::Guest {
                method = method.layer(axum::middleware::from_fn(
                    move |params: RawPathParams, request: Request, next: Next| {
                        audit::layer(route, params, request, next)
                    },
                ));
            }
            method = method.layer(axum::middleware::from_fn(measured));
            *router = match route.before_rest() {
                // A pattern that takes the rest takes no empty one.
                Some(before) => {
                    let rest = format!("{before}{{*rest}}");
                    std::mem::take(router).route(before, method.clone()).route(&rest, method)
                }
                None => std::mem::take(router).route(route.path, method),
            };
        };
        match route.audience {
            Audience::Operator => add(&mut self.operator),
            Audience::Edge => add(&mut self.edge),
            Audience::Tenant | Audience::Anyone => {
                add(&mut self.operator);
                add(&mut self.edge);
            }
        }
    }
}

fn routes() -> Routes {
    let mut routes = Routes { operator: Router::new(), edge: Router::new(), registered: Vec::new() };
    session::register(&mut routes);
    command::register(&mut routes);
    attach::register(&mut routes);
    files::register(&mut routes);
    ports::register(&mut routes);
    publish::register(&mut routes);
    workspace::register(&mut routes);
    image::register(&mut routes);
    feed::register(&mut routes);
    app::register(&mut routes);
    key::register(&mut routes);
    operator::register(&mut routes);
    usage::register(&mut routes);
    token::register(&mut routes);
    routes
}

/// The router of a socket.
pub fn router(pepod: &Pepod, listener: Listener) -> Router {
    let routes = routes();
    let router = match listener {
        Listener::Operator => routes.operator,
        Listener::Edge { .. } => routes.edge,
    };
    router
        .fallback(async |request: Request| {
            Problem::new(ErrorCode::NotFound, format!("no route {} {}", request.method(), request.uri().path()))
        })
        .method_not_allowed_fallback(async |request: Request| {
            Problem::new(
                ErrorCode::MethodNotAllowed,
                format!("{} does not take {}", request.uri().path(), request.method()),
            )
        })
        .with_state(pepod.clone())
}

/// Takes connections until the daemon stops. The descriptor is bound and listening already.
pub async fn serve(pepod: Pepod, listener: Listener, socket: UnixListener) {
    let router = router(&pepod, listener);
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let (stream, _) = match socket.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors: those in use must come back first.
                tracing::warn!(%error, "cannot take a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let peer = match stream.peer_cred() {
            Ok(credentials) => credentials.uid(),
            Err(_) => continue,
        };
        if let Listener::Edge { uid: Some(uid) } = listener
            && peer != uid
        {
            tracing::warn!(peer, wanted = uid, "a stranger on the edge's socket");
            continue;
        }
        // Whose rights a directory of the host is lent with is asked of the caller's own connection.
        let local = Local(match listener {
            Listener::Operator => Connection::of(&stream).ok(),
            Listener::Edge { .. } => None,
        });
        let Ok(stream) = stream.into_std().and_then(Quiet::new) else { continue };
        let (pepod, router) = (pepod.clone(), router.clone());
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
                let (pepod, router) = (pepod.clone(), router.clone());
                let mut request = request.map(Body::new);
                request.extensions_mut().insert(local.clone());
                async move { Ok::<_, std::convert::Infallible>(answer(pepod, router, listener, peer, request).await) }
            });
            let served = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_WITHIN)
                .max_buf_size(BUFFER)
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades();
            if let Err(error) = served.await {
                tracing::debug!(%error, "a connection ended");
            }
            drop(place);
        });
    }
}

/// Answers one request.
async fn answer(pepod: Pepod, mut router: Router, listener: Listener, peer: u32, mut request: Request) -> Response {
    let request_id = match listener {
        Listener::Edge { .. } => request.headers().get("pepo-request-id").and_then(|id| id.to_str().ok()?.parse().ok()),
        Listener::Operator => None,
    }
    .unwrap_or_else(RequestId::generate);
    let response = match identify(&pepod, listener, peer, &request, request_id) {
        Ok(call) => {
            let changes = !request.method().is_safe();
            request.extensions_mut().insert(call);
            request.extensions_mut().insert(pepod.clone());
            let answering = router.call(request);
            let answered = match listener {
                // What it starts stays when its connection is gone: it belongs among all that runs, not on this thread.
                Listener::Edge { .. } if changes => AbortOnDropHandle::new(pepod.runtime().spawn(answering)).await,
                Listener::Edge { .. } | Listener::Operator => Ok(answering.await),
            };
            match answered {
                Ok(Ok(response)) => response,
                Ok(Err(never)) => match never {},
                Err(error) => {
                    tracing::error!(%error, request = %request_id, "a request broke off");
                    Problem::new(ErrorCode::Internal, "the request broke off").into_response()
                }
            }
        }
        Err(problem) => problem.into_response(),
    };
    finish(response, request_id)
}

fn identify(
    pepod: &Pepod,
    listener: Listener,
    peer: u32,
    request: &Request,
    request_id: RequestId,
) -> Result<Call, Problem> {
    let named = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    let app_named = named("pepo-app");
    let (caller, app) = match (listener, app_named) {
        (Listener::Operator, None) => (Caller::Operator { uid: peer }, pepod.default_app()),
        (Listener::Operator, Some(name)) => {
            let app =
                pepod.app(name).ok_or_else(|| Problem::new(ErrorCode::NotFound, "no such App").param_of("Pepo-App"))?;
            (Caller::Operator { uid: peer }, app)
        }
        (Listener::Edge { .. }, Some(id)) => {
            let app = id.parse::<AppId>().ok().filter(|_| pepod.app(id).is_some());
            let app = app.ok_or_else(|| Problem::new(ErrorCode::NotFound, "no such App").param_of("Pepo-App"))?;
            (Caller::App(app), app)
        }
        (Listener::Edge { .. }, None) => {
            let path = request.uri().path();
            let of_nobody =
                |row: &&Route| matches!(row.audience, Audience::Edge | Audience::Anyone) && row.path == path;
            let of_edge = pepo_api::ROUTES.iter().any(|row| of_nobody(&row));
            if !of_edge {
                return Err(Problem::new(ErrorCode::BadRequest, "Pepo-App is missing").param_of("Pepo-App"));
            }
            (Caller::Edge, pepod.default_app())
        }
    };
    let activation = match named("if-activation") {
        None => None,
        Some(text) => {
            Some(text.parse().map_err(|_| Problem::invalid("If-Activation", "If-Activation must be a number"))?)
        }
    };
    let told = |name: &str| named(name).filter(|_| listener != Listener::Operator);
    let key = told("pepo-key").and_then(|key| key.parse().ok());
    let name = told("pepo-actor").and_then(Name::new);
    let source = told("pepo-source").and_then(|source| source.parse().ok());
    Ok(Call { caller, app, app_named: app_named.is_some(), key, name, source, request_id, activation })
}

impl Problem {
    fn param_of(mut self, param: &str) -> Self {
        self.0.param = Some(param.to_owned());
        self
    }
}

/// Gives every answer its request's id, and every error its body.
fn finish(mut response: Response, request_id: RequestId) -> Response {
    if let Some(error) = response.extensions_mut().remove::<Arc<ApiError>>() {
        response = render((*error).clone(), request_id);
    } else if response.extensions().get::<ports::OfGuest>().is_none()
        && response.status().is_client_error()
        && response.headers().get(header::CONTENT_TYPE).is_none_or(|kind| kind != "application/json")
    {
        // A refusal of the framework's own (a WebSocket without its headers).
        let code = match response.status() {
            StatusCode::METHOD_NOT_ALLOWED => ErrorCode::MethodNotAllowed,
            StatusCode::PAYLOAD_TOO_LARGE => ErrorCode::PayloadTooLarge,
            _ => ErrorCode::BadRequest,
        };
        let said = response.status().canonical_reason().unwrap_or("refused").to_lowercase();
        response = render(ApiError::new(code, format!("the request is not what this route takes: {said}")), request_id);
    }
    if let Ok(value) = HeaderValue::try_from(request_id.to_string()) {
        response.headers_mut().insert("pepo-request-id", value);
    }
    response
}

fn render(mut error: ApiError, request_id: RequestId) -> Response {
    error.request_id = Some(request_id);
    let status = error.code.status();
    tracing::debug!(request = %request_id, code = error.code.as_str(), message = error.message, "refused");
    let mut response = (status, axum::Json(ErrorBody { error })).into_response();
    let pause = match status {
        StatusCode::TOO_MANY_REQUESTS => Some("1"),
        StatusCode::SERVICE_UNAVAILABLE => Some("5"),
        _ => None,
    };
    if let Some(seconds) = pause {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(seconds));
    }
    response
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_row_has_its_handler_and_only_one() {
        let registered = routes().registered;
        let once: BTreeSet<_> = registered.iter().copied().collect();
        assert_eq!(once.len(), registered.len(), "a row is registered twice");
        let rows: BTreeSet<_> = pepo_api::ROUTES.iter().map(|route| route.name).collect();
        let missing: Vec<_> = rows.difference(&once).collect();
        assert!(missing.is_empty(), "rows without a handler: {missing:?}");
        assert_eq!(once, rows);
        for route in pepo_api::ROUTES {
            assert!(MethodFilter::try_from(route.method.clone()).is_ok(), "{}", route.name);
        }
    }
}
