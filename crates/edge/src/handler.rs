//! One handler for every row: path, key, head, body, then the daemon's answer as it comes.

mod visit;

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::HeaderName;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper_util::rt::TokioIo;
use pepo_api::{Answer, AppId, Body, Domain, Error, ErrorCode, RequestId, Route, allow};
use tokio::sync::OwnedSemaphorePermit;

use crate::auth::{Caller, Gate, Refused, Who};
use crate::body::{self, Any, Passing};
use crate::config::Limits;
use crate::decisions::{Decision, Decisions};
use crate::head;
use crate::named::{self, Strangers, Turn};
use crate::net::{self, Ranges};
use crate::own::{self, Refusal, refused, unavailable, used_up};
use crate::path::{Found, find};
use crate::rate::{Buckets, Level, Open, Opened, Rate};
use crate::relay;
use crate::threads::Counted;
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
    gate: Gate,
    upstream: Upstream,
    decisions: Decisions,
    rules: Rules,
    callers: Buckets<Who>,
    apps: Buckets<AppId>,
    open: Open<Who>,
    strangers: Strangers,
}

/// What it goes by, beside who calls.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Whose `X-Forwarded-For` counts.
    pub proxies: Ranges,
    /// Where pages may come from that call us from a browser.
    pub origins: Vec<String>,
    /// Below which ports have host names of their own.
    pub domain: Option<Domain>,
    /// What callers may use up.
    pub limits: Limits,
    /// Requests of one caller that run at once.
    pub streams: usize,
    /// How long a JSON body may take, all of it: drops that come just often enough are no body.
    pub json_within: Duration,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            proxies: Ranges::default(),
            origins: Vec::new(),
            domain: None,
            limits: Limits::default(),
            streams: 1,
            json_within: Duration::from_secs(60),
        }
    }
}

/// A connection's place among the bounded number of them; shared by what outlives its HTTP part.
pub type Place = Arc<(OwnedSemaphorePermit, Opened<IpAddr>, Counted)>;

impl Edge {
    /// A handler that judges by this gate, goes by these rules, forwards to this daemon, and says what it refused.
    pub fn new(gate: Gate, rules: Rules, upstream: Upstream, decisions: Decisions) -> Self {
        let (callers, apps, open, strangers) = Default::default();
        Self { gate, upstream, decisions, rules, callers, apps, open, strangers }
    }

    /// Whose `X-Forwarded-For` counts.
    pub fn proxies(&self) -> &Ranges {
        &self.rules.proxies
    }

    /// Answers one request.
    ///
    /// # Errors
    /// None: every failure is an answer.
    pub async fn answer(
        &self,
        request: Request<Incoming>,
        peer: IpAddr,
        place: Place,
    ) -> Result<Response<Any>, Infallible> {
        let began = Instant::now();
        let id = RequestId::generate();
        let from = net::client(peer, request.headers(), &self.rules.proxies);
        let page = self.page(request.headers());
        let mut seen = Seen { row: "-", caller: None, level: None, public: false };
        let mut answer = match self.route(request, id, from, place, page.as_ref(), &mut seen).await {
            Ok(answer) => answer,
            Err(refusal) => {
                self.note(&refusal, id, from, &seen);
                refused(refusal, id)
            }
        };
        levels(answer.headers_mut(), seen.level);
        // Who may read what a published port says to anybody, its program says itself.
        if !seen.public {
            self.shared(answer.headers_mut(), page);
        }
        // The row's name and not the path: paths are a stranger's text.
        tracing::info!(
            request = %id,
            route = seen.row,
            status = answer.status().as_u16(),
            caller = seen.caller.as_ref().map(|caller| tracing::field::display(&caller.who)),
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
        page: Option<&HeaderValue>,
        seen: &mut Seen,
    ) -> Result<Response<Any>, Refusal> {
        let (mut parts, incoming) = request.into_parts();
        head::admit(&parts)
            .map_err(|why| Refusal::from(Error::new(ErrorCode::BadRequest, why.to_string())).and_close())?;
        let port = self.port(&parts, from)?;
        let published = port.and_then(|of| self.gate.keys().current()?.published(of, from));
        if let Some(of) = port {
            let nothing = || Error::new(ErrorCode::NotFound, "there is nothing at this path");
            parts.uri = named::target(of, &parts.uri).ok_or_else(nothing)?;
        }
        if page.is_some()
            && published.is_none()
            && parts.method == Method::OPTIONS
            && parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
        {
            return Ok(own::preflight(id));
        }
        let row = match find(&parts.method, parts.uri.path()) {
            Found::Row(row) => row,
            Found::Healthz => return Ok(own::health(true, id)),
            Found::Readyz => return Ok(own::health(self.gate.keys().fresh(), id)),
            Found::Description(row) => return Ok(own::description(row, id)),
            Found::Nothing => return Err(Error::new(ErrorCode::NotFound, "there is nothing at this path").into()),
            Found::WrongMethod(methods) => {
                let list = methods.iter().map(|method| method.as_str()).collect::<Vec<_>>().join(", ");
                let error = Error::new(ErrorCode::MethodNotAllowed, format!("this path takes {list}"));
                return Err(Refusal::with(error, header::ALLOW, &list));
            }
        };
        seen.row = row.name;
        let caller = match port.zip(published) {
            Some((of, app)) => self.visitor(&parts, row, from, seen, (of, app)).await?,
            None => self.caller(&parts, row, from, seen).await?,
        };
        if parts.headers.contains_key(head::APP) {
            let error = Error::new(ErrorCode::Invalid, "the key has its own App").param("Pepo-App");
            return Err(error.hint("leave the header Pepo-App out; only the operator names an App").into());
        }

        let open = self.turn(&caller, from)?;
        let upgrade = head::upgrade(row, &parts.headers);
        let mut headers = head::to_daemon(&parts.headers, row, &caller, from, id, upgrade);
        if port.is_some() {
            let by = if seen.public { "anybody" } else { "credential" };
            headers.insert(head::NAMED, HeaderValue::from_static(by));
        }
        let body = self.body_for(row, incoming, &parts.headers, &mut headers).await?;
        let mut onward = Request::new(body);
        *onward.method_mut() = parts.method.clone();
        *onward.uri_mut() = head::target(&parts.uri);
        *onward.headers_mut() = headers;

        let sent = tokio::time::timeout(ANSWER_WITHIN, self.upstream.send(&caller.who, onward)).await;
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
            let asked = parts.headers.clone();
            let ours = hyper::upgrade::on(Request::from_parts(parts, ()));
            let mut switching = Response::new(body::nothing());
            *switching.status_mut() = status;
            *switching.headers_mut() = head::to_switching(&asked, answer.headers(), id, protocol);
            let closed = port.filter(|_| seen.public).map(|of| named::closed(self.gate.keys().clone(), of));
            tokio::spawn(splice(ours, theirs, (place, running, open), id, closed));
            return Ok(switching);
        }
        let headers = head::to_caller(answer.headers(), id, None);
        let body = Passing::new(answer.into_body(), None, DAEMON_IDLE, (running, open)).boxed();
        let body = match port.filter(|_| seen.public) {
            Some(of) => named::while_published(body, self.gate.keys().clone(), of),
            None => body,
        };
        let mut passed = Response::new(body);
        *passed.status_mut() = status;
        *passed.headers_mut() = headers;
        Ok(passed)
    }

    /// Who calls, and whether they may, by their credential, their rate and their scopes, in this order.
    async fn caller(&self, parts: &Parts, row: &Route, from: IpAddr, seen: &mut Seen) -> Result<Caller, Refusal> {
        let Some(presented) = presented(parts, row) else {
            self.gate.failed(from);
            return Err(refuse(NO_KEY));
        };
        let caller = self.gate.who(presented, from).await.map_err(|refused| match refused {
            Refused::Unknown => refuse("this key is not valid"),
            Refused::Token(wrong) => refuse(&format!("this token is not valid: {wrong}")),
            Refused::Stale => unavailable("the daemon cannot be asked about keys"),
            Refused::IssuerAway => unavailable("the keys of this token's issuer cannot be got"),
            Refused::TooMany { wait } => {
                let limit = self.rules.limits.failures.burst;
                used_up("failures", limit, "too many wrong credentials came from this address".into(), wait)
            }
        })?;
        seen.caller = Some(caller.clone());
        self.rates(&caller, seen)?;
        match allow(caller.principal(), row.action, row.resource(parts.uri.path())) {
            Ok(_) => Ok(caller),
            Err(denied) => {
                let error = Error::new(ErrorCode::Forbidden, format!("this credential does not allow it: {denied}"));
                Err(error.hint("use one that does; `pepo key can KEY ACTION` explains a key's").into())
            }
        }
    }

    /// Takes one request out of the caller's share and out of its App's.
    fn rates(&self, caller: &Caller, seen: &mut Seen) -> Result<(), Refusal> {
        let over = |whose: &str, rate: Rate, level: Level| {
            let message = format!(
                "{whose} may make {} requests a second, {} at once, and made them",
                rate.per_second, rate.burst
            );
            used_up("requests_per_second", rate.per_second, message, level.reset_seconds)
        };
        if let Some(rate) = self.rules.limits.caller {
            let taken = self.callers.take(caller.who.clone(), rate);
            seen.level = Some(taken.unwrap_or_else(|level| level));
            taken.map_err(|level| over("this caller", rate, level))?;
        }
        let own = self.gate.keys().current().and_then(|copy| copy.app_limit(caller.app)).map(Rate::of);
        if let Some(rate) = own.or(self.rules.limits.app) {
            let taken = self.apps.take(caller.app, rate);
            let level = taken.unwrap_or_else(|level| level);
            // What is told is what is nearest to its end.
            seen.level = seen.level.filter(|known| known.left <= level.left).or(Some(level));
            taken.map_err(|level| over("this App", rate, level))?;
        }
        Ok(())
    }

    /// The body as its row takes it, and the headers that tell its length.
    async fn body_for(
        &self,
        row: &Route,
        incoming: Incoming,
        given: &HeaderMap,
        headers: &mut HeaderMap,
    ) -> Result<Any, Refusal> {
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
                let whole = tokio::time::timeout(self.rules.json_within, passing.collect()).await;
                let whole = whole.unwrap_or(Err(body::Error::Slow(self.rules.json_within)));
                let whole = whole.map_err(|fault| body_fault(&fault))?;
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

    /// Says into the audit log that somebody was refused here; what the daemon refuses, it notes itself.
    fn note(&self, refusal: &Refusal, request: RequestId, source: IpAddr, seen: &Seen) {
        let code = refusal.error.code;
        if matches!(code, ErrorCode::Unauthenticated | ErrorCode::Forbidden | ErrorCode::TooManyRequests) {
            let caller = seen.caller.as_ref().map(|caller| (caller.app, caller.who.clone()));
            self.decisions.note(Decision { route: seen.row, code, caller, source, request });
        }
    }

    /// The origin of a page that may call us.
    fn page(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        self.rules.origins.iter().any(|known| known.as_bytes() == origin.as_bytes()).then(|| origin.clone())
    }

    /// Lets such a page read the answer. Never with a browser's own credentials: there are none of ours.
    fn shared(&self, headers: &mut HeaderMap, page: Option<HeaderValue>) {
        const SHOWN: &str = "pepo-request-id, pepo-activation, retry-after, ratelimit-limit, ratelimit-remaining, ratelimit-reset, location, content-range, etag";
        if self.rules.origins.is_empty() {
            return;
        }
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        if let Some(page) = page {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, page);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(SHOWN));
        }
    }
}

struct Seen {
    row: &'static str,
    caller: Option<Caller>,
    level: Option<Level>,
    /// It is a stranger's, at a published port.
    public: bool,
}

/// Why most strangers are refused; what is unknown, over, another App's or not published is no more than that.
const NO_KEY: &str = "a key is needed";

fn refuse(why: &str) -> Refusal {
    let error = Error::new(ErrorCode::Unauthenticated, why)
        .hint("send `Authorization: Bearer KEY`, KEY as `pepo up` or `pepo key create` printed it");
    Refusal::with(error, header::WWW_AUTHENTICATE, "Bearer")
}

/// The credential of a request.
fn presented<'a>(parts: &'a Parts, row: &Route) -> Option<&'a [u8]> {
    if parts.headers.contains_key(header::AUTHORIZATION) {
        return head::bearer(&parts.headers);
    }
    let websocket = matches!(row.answer, Answer::WebSocket | Answer::Guest);
    head::bearer_protocol(&parts.headers).filter(|_| websocket && head::upgrade(row, &parts.headers).is_some())
}

/// Tells how the caller's share stands.
fn levels(headers: &mut HeaderMap, level: Option<Level>) {
    let Some(level) = level else { return };
    for (name, value) in [
        ("ratelimit-limit", level.limit),
        ("ratelimit-remaining", level.left),
        ("ratelimit-reset", level.reset_seconds),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from(value));
    }
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
        body::Error::Idle(_) | body::Error::Slow(_) | body::Error::Broken(_) | body::Error::Withdrawn => {
            Error::new(ErrorCode::BadRequest, fault.to_string())
        }
    };
    Refusal::from(error).and_close()
}

/// Copies both ways until both have ended.
async fn splice(
    ours: hyper::upgrade::OnUpgrade,
    theirs: hyper::upgrade::OnUpgrade,
    held: (Place, upstream::Lease, Turn),
    id: RequestId,
    closed: Option<impl Future<Output = ()>>,
) {
    let (ours, theirs) = match tokio::try_join!(ours, theirs) {
        Ok(both) => both,
        Err(error) => {
            tracing::debug!(request = %id, %error, "the protocol was not changed");
            return;
        }
    };
    let (mut ours, mut theirs) = (TokioIo::new(ours), TokioIo::new(theirs));
    let closed = async {
        match closed {
            Some(closed) => closed.await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        ended = relay::both(&mut ours, &mut theirs) => if let Err(error) = ended {
            tracing::debug!(request = %id, %error, "a raw stream broke off");
        },
        () = closed => tracing::debug!(request = %id, "its port is published no more"),
    }
    drop(held);
}
