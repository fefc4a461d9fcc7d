//! One handler for every row: path, key, head, body, then the daemon's answer as it comes.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper_util::rt::TokioIo;
use pepo_api::{
    Body, Error, ErrorBody, ErrorCode, Health, OPENAPI, REFERENCE, REFERENCE_POLICY, RequestId, Route, route,
};
use tokio::sync::OwnedSemaphorePermit;

use crate::body::{self, Any, Passing};
use crate::head;
use crate::keys::{Caller, Keys, Verdict};
use crate::path::{Found, find};
use crate::upstream::{self, Upstream};

/// The most a JSON body may have.
pub const JSON_BYTES: u64 = 1024 * 1024;
/// The longest silence of a caller in the middle of its body.
pub const CALLER_IDLE: Duration = Duration::from_secs(60);
/// The longest silence of the daemon in the middle of an answer; its event streams say something every 15 s.
pub const DAEMON_IDLE: Duration = Duration::from_secs(120);
/// The longest wait for the head of an answer once the request is out; longer than any `wait_seconds`.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(3900);

/// The handler's state.
pub struct Edge {
    keys: Arc<Keys>,
    upstream: Upstream,
}

/// A connection's place among the bounded number of them; shared by what outlives its HTTP part.
pub type Place = Arc<OwnedSemaphorePermit>;

/// A refusal: an error, and what its head says beside it.
struct Refusal {
    error: Box<Error>,
    header: Option<(header::HeaderName, HeaderValue)>,
    after: After,
}

/// What becomes of the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    /// The next request may come.
    GoOn,
    /// What is left of this request cannot be told from a next one.
    Close,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal { error: Box::new(error), header: None, after: After::GoOn }
    }
}

impl Refusal {
    fn with(error: Error, name: header::HeaderName, value: &str) -> Self {
        let header = HeaderValue::from_str(value).ok().map(|value| (name, value));
        Refusal { header, ..error.into() }
    }

    fn and_close(self) -> Self {
        Refusal { after: After::Close, ..self }
    }
}

impl Edge {
    /// A handler that judges by these keys and forwards to this daemon.
    pub fn new(keys: Arc<Keys>, upstream: Upstream) -> Self {
        Self { keys, upstream }
    }

    /// Answers one request.
    ///
    /// # Errors
    /// None: every failure is an answer.
    pub async fn answer(
        &self,
        request: Request<Incoming>,
        from: IpAddr,
        place: Place,
    ) -> Result<Response<Any>, Infallible> {
        let began = Instant::now();
        let id = RequestId::generate();
        let mut seen = Seen { row: "-", caller: None };
        let answer = match self.route(request, id, from, place, &mut seen).await {
            Ok(answer) => answer,
            Err(refusal) => refused(refusal, id),
        };
        // The row's name and not the path: paths are a stranger's text.
        tracing::info!(
            request = %id,
            route = seen.row,
            status = answer.status().as_u16(),
            key = seen.caller.map(|caller| caller.key.to_string()),
            ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
        );
        Ok(answer)
    }

    async fn route(
        &self,
        request: Request<Incoming>,
        id: RequestId,
        from: IpAddr,
        place: Place,
        seen: &mut Seen,
    ) -> Result<Response<Any>, Refusal> {
        let (parts, incoming) = request.into_parts();
        head::admit(&parts)
            .map_err(|why| Refusal::from(Error::new(ErrorCode::BadRequest, why.to_string())).and_close())?;
        let row = match find(&parts.method, parts.uri.path()) {
            Found::Row(row) => row,
            Found::Healthz => return Ok(health(true, id)),
            Found::Readyz => return Ok(health(self.keys.fresh(), id)),
            Found::Description(row) => return Ok(description(row, id)),
            Found::Nothing => return Err(Error::new(ErrorCode::NotFound, "there is nothing at this path").into()),
            Found::WrongMethod(methods) => {
                let list = methods.iter().map(|method| method.as_str()).collect::<Vec<_>>().join(", ");
                let error = Error::new(ErrorCode::MethodNotAllowed, format!("this path takes {list}"));
                return Err(Refusal::with(error, header::ALLOW, &list));
            }
        };
        seen.row = row.name;
        let caller = self.caller(&parts.headers, row, from, seen)?;
        if parts.headers.contains_key(head::APP) {
            let error = Error::new(ErrorCode::Invalid, "the key has its own App").param("Pepo-App");
            return Err(error.hint("leave the header Pepo-App out; only the operator names an App").into());
        }

        let upgrade = head::upgrade(row, &parts.headers);
        let mut headers = head::to_daemon(&parts.headers, caller, id, upgrade);
        let body = body_for(row, incoming, &parts.headers, &mut headers).await?;
        let mut onward = Request::new(body);
        *onward.method_mut() = parts.method.clone();
        *onward.uri_mut() = head::target(&parts.uri);
        *onward.headers_mut() = headers;

        let sent = tokio::time::timeout(ANSWER_WITHIN, self.upstream.send(onward)).await;
        let (mut answer, running) = match sent {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Err(unanswered(&error)),
            Err(_) => return Err(Error::new(ErrorCode::Timeout, "the daemon did not answer in time").into()),
        };
        let status = answer.status();
        if status == StatusCode::SWITCHING_PROTOCOLS {
            let Some(protocol) = upgrade else {
                return Err(Error::new(ErrorCode::GuestFailed, "the daemon changed the protocol unasked").into());
            };
            let theirs = hyper::upgrade::on(&mut answer);
            let ours = hyper::upgrade::on(Request::from_parts(parts, ()));
            let mut switching = Response::new(body::nothing());
            *switching.status_mut() = status;
            *switching.headers_mut() = head::to_caller(answer.headers(), id, Some(protocol));
            tokio::spawn(splice(ours, theirs, place, running, id));
            return Ok(switching);
        }
        let headers = head::to_caller(answer.headers(), id, None);
        let mut passed = Response::new(Passing::new(answer.into_body(), None, DAEMON_IDLE, running).boxed());
        *passed.status_mut() = status;
        *passed.headers_mut() = headers;
        Ok(passed)
    }

    fn caller(&self, headers: &HeaderMap, row: &Route, from: IpAddr, seen: &mut Seen) -> Result<Caller, Refusal> {
        let refuse = |why: &str| {
            let error = Error::new(ErrorCode::Unauthenticated, why)
                .hint("send `Authorization: Bearer KEY`, KEY as `pepo up` printed it");
            Refusal::with(error, header::WWW_AUTHENTICATE, "Bearer")
        };
        let Some(presented) = head::bearer(headers) else { return Err(refuse("a key is needed")) };
        match self.keys.judge(presented, row.action, from) {
            Verdict::Known(caller) => {
                seen.caller = Some(caller);
                Ok(caller)
            }
            Verdict::Refused(caller) => {
                seen.caller = Some(caller);
                let word = row.action.word();
                let error = Error::new(ErrorCode::Forbidden, format!("this key lacks the scope {word}"));
                Err(error.hint("use a key that has it; `pepo key ls` shows the scopes").into())
            }
            Verdict::Unknown => Err(refuse("this key is not valid")),
            Verdict::Stale => Err(unavailable("the daemon cannot be asked about keys")),
        }
    }
}

struct Seen {
    row: &'static str,
    caller: Option<Caller>,
}

fn unavailable(why: &str) -> Refusal {
    Refusal::with(
        Error::new(ErrorCode::Unavailable, why).hint("is pepod running? try again soon"),
        header::RETRY_AFTER,
        "1",
    )
}

fn unanswered(error: &upstream::Error) -> Refusal {
    use std::error::Error as _;
    if let upstream::Error::Connect { .. } = error {
        return unavailable("the daemon is not reachable");
    }
    // What broke the exchange may have been the caller's own body.
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(fault) = inner.downcast_ref::<body::Error>() {
            return body_fault(fault);
        }
        cause = inner.source();
    }
    tracing::warn!(error = %error, "no answer from the daemon");
    unavailable("the daemon broke off before it answered")
}

fn body_fault(fault: &body::Error) -> Refusal {
    let error = match fault {
        body::Error::TooLarge(_) => Error::new(ErrorCode::PayloadTooLarge, fault.to_string()),
        body::Error::Idle(_) | body::Error::Broken(_) => Error::new(ErrorCode::BadRequest, fault.to_string()),
    };
    Refusal::from(error).and_close()
}

/// The body as its row takes it, and the headers that tell its length.
async fn body_for(row: &Route, incoming: Incoming, given: &HeaderMap, headers: &mut HeaderMap) -> Result<Any, Refusal> {
    let length = given.get(header::CONTENT_LENGTH).cloned();
    match row.body {
        Body::None if incoming.is_end_stream() => Ok(body::nothing()),
        Body::None => Err(Refusal::from(Error::new(ErrorCode::BadRequest, "this route takes no body")).and_close()),
        Body::Json => {
            let told = incoming.size_hint().lower();
            if told > JSON_BYTES {
                return Err(body_fault(&body::Error::TooLarge(JSON_BYTES)));
            }
            let passing = Passing::new(incoming, Some(JSON_BYTES), CALLER_IDLE, ());
            let whole = passing.collect().await.map_err(|fault| body_fault(&fault))?;
            Ok(body::bytes(whole.to_bytes()))
        }
        Body::Raw => {
            if let Some(length) = length {
                headers.insert(header::CONTENT_LENGTH, length);
            }
            Ok(Passing::new(incoming, None, CALLER_IDLE, ()).boxed())
        }
    }
}

/// Copies both ways until both have ended.
async fn splice(
    ours: hyper::upgrade::OnUpgrade,
    theirs: hyper::upgrade::OnUpgrade,
    place: Place,
    running: upstream::Running,
    id: RequestId,
) {
    let (ours, theirs) = match tokio::try_join!(ours, theirs) {
        Ok(both) => both,
        Err(error) => {
            tracing::debug!(request = %id, %error, "the protocol was not changed");
            return;
        }
    };
    if let Err(error) = tokio::io::copy_bidirectional(&mut TokioIo::new(ours), &mut TokioIo::new(theirs)).await {
        tracing::debug!(request = %id, %error, "a raw stream broke off");
    }
    drop((place, running));
}

fn health(well: bool, id: RequestId) -> Response<Any> {
    let status = if well { "ok" } else { "the daemon cannot be asked about keys" };
    let code = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(code, HeaderMap::new(), &Health { status: status.into() }, id)
}

/// The API's own description: the same for everybody, so nobody is asked for a key.
fn description(row: &Route, id: RequestId) -> Response<Any> {
    let (kind, text) = match row.path == route::openapi.path {
        true => ("application/json", OPENAPI),
        false => ("text/html; charset=utf-8", REFERENCE),
    };
    let mut answer = Response::new(body::bytes(text));
    let mut headers = head::to_caller(&HeaderMap::new(), id, None);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(REFERENCE_POLICY));
    *answer.headers_mut() = headers;
    answer
}

fn refused(refusal: Refusal, id: RequestId) -> Response<Any> {
    let Refusal { mut error, header, after } = refusal;
    error.request_id = Some(id);
    let mut headers: HeaderMap = header.into_iter().collect();
    if after == After::Close {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    json(error.code.status(), headers, &ErrorBody { error: *error }, id)
}

fn json(status: StatusCode, more: HeaderMap, value: &impl serde::Serialize, id: RequestId) -> Response<Any> {
    // Plain structs of text: they always serialize.
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mut answer = Response::new(body::bytes(text));
    *answer.status_mut() = status;
    let mut headers = head::to_caller(&HeaderMap::new(), id, None);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.extend(more);
    *answer.headers_mut() = headers;
    answer
}
