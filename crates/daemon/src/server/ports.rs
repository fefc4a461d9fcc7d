//! Connections to what listens in a guest: raw bytes, or one request over HTTP.
//!
//! ```text
//! dial   caller ◄── bytes ──► program
//! ports  request, less what is ours ─► program ─► answer, less what it could do to the caller's browser
//! ```
//! Who listens there is nobody's friend. It sees neither a credential nor a header of ours; its head is bounded in size and
//! time, its body passes with backpressure, and what it says counts for nothing outside the answer itself. A browser that
//! shows the answer is told to treat it as of no origin at all: it must not speak for the API's.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, RawPathParams, Request, State};
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use pepo_api::{DIAL_UPGRADE, ErrorCode, hop, route};
use pepo_sandbox::guest::{self, Dialed};
use pepo_sandbox::proto;
use tokio_util::task::AbortOnDropHandle;

use super::files::{Lent, lend};
use super::{Call, Caller, Problem, Routes, publish};
use crate::Pepod;

/// Room of a raw connection, each way.
const BUFFER: usize = 64 * 1024;

/// The largest head of an answer.
const HEAD_BYTES: usize = 64 * 1024;

/// The most headers of an answer.
const HEADERS: usize = 100;

/// How long a program may take until the head of its answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(300);

/// What a program cannot say to the caller's browser: it would hold for the API's whole origin.
const TAKEN: &[&str] = &[
    "accept-ch",
    "alt-svc",
    "clear-site-data",
    "critical-ch",
    "nel",
    "public-key-pins",
    "report-to",
    "reporting-endpoints",
    "service-worker-allowed",
    "set-cookie",
    "set-cookie2",
    "strict-transport-security",
];

/// Families of such headers, and of those that are ours to send.
const TAKEN_FAMILIES: &[&str] = &["access-control-", "pepo-", "ratelimit-"];

/// What is the port's own to say where it has an origin of its own: who may read what it answers, and where its workers count.
const ITS_OWN: &[&str] = &["service-worker-allowed"];

/// The same as a family.
const ITS_OWN_FAMILY: &str = "access-control-";

/// How the edge was asked for a port, told by the edge.
const NAMED: &str = "pepo-named";

/// How a port was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// By a path of the API, whose origin the answer gets.
    Path,
    /// By its own host name, with a credential.
    Name,
    /// By its own host name, without: it must be published.
    Anybody,
}

impl By {
    /// Only the edge's word counts, and what a caller sends of it ends there.
    pub(super) fn of(call: &Call, headers: &HeaderMap) -> Self {
        match headers.get(NAMED).map(HeaderValue::as_bytes) {
            Some(b"anybody") if matches!(call.caller, Caller::App(_)) => By::Anybody,
            Some(_) if matches!(call.caller, Caller::App(_)) => By::Name,
            _ => By::Path,
        }
    }
}

/// Marks an answer that a program in a guest gave: whatever it is, it is passed on.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfGuest;

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::dial, dial);
    for row in [
        &route::port_get,
        &route::port_head,
        &route::port_options,
        &route::port_post,
        &route::port_put,
        &route::port_patch,
        &route::port_delete,
    ] {
        routes.route(row, pass);
    }
}

pub(super) fn number(port: &str) -> Result<u16, Problem> {
    let port = port.parse().ok().filter(|port| *port > 0);
    port.ok_or_else(|| Problem::invalid("port", "a port is a number from 1 to 65535"))
}

/// A connection to that port. A Service that this very request may have brought up gets the time to listen.
async fn connect(pepod: &Pepod, call: Call, which: &str, port: u16) -> Result<(Lent, Dialed), Problem> {
    let lent = lend(pepod, call, which).await?;
    if let Some(session) = lent.session() {
        session.services().up(port, pepod.start_within()).await;
    }
    let dialed = match lent.guest().dial(port).await {
        Err(guest::Error::Failed(failure)) if failure.code == proto::FailureCode::Refused => {
            return Err(Problem::new(ErrorCode::GuestFailed, format!("nothing listens on port {port} in the guest")));
        }
        other => lent.told(other).await?,
    };
    Ok((lent, dialed))
}

async fn dial(
    State(pepod): State<Pepod>,
    call: Call,
    Path((which, port)): Path<(String, String)>,
    mut request: Request,
) -> Result<Response, Problem> {
    let port = number(&port)?;
    if !hop::changes_to(request.headers(), DIAL_UPGRADE) {
        return Err(Problem::new(ErrorCode::BadRequest, format!("this route answers `Upgrade: {DIAL_UPGRADE}` only")));
    }
    let (lent, dialed) = connect(&pepod, call, &which, port).await?;
    let headers = [(header::CONNECTION, "upgrade"), (header::UPGRADE, DIAL_UPGRADE)];
    let answer = lent.with((StatusCode::SWITCHING_PROTOCOLS, headers));
    let upgrading = hyper::upgrade::on(&mut request);
    // Shared, so that the answer's task need not be this one's.
    let lent = Arc::new(lent);
    tokio::spawn(async move {
        match upgrading.await {
            Ok(upgraded) => splice(port, TokioIo::new(upgraded), dialed).await,
            Err(error) => tracing::debug!(port, %error, "a caller left before its connection stood"),
        }
        drop(lent);
    });
    Ok(answer)
}

/// Each direction ends by itself; the other goes on.
async fn splice<A, B>(port: u16, mut caller: A, mut program: B)
where
    A: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    B: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let copied = tokio::io::copy_bidirectional_with_sizes(&mut caller, &mut program, BUFFER, BUFFER).await;
    if let Err(error) = copied {
        tracing::debug!(port, %error, "a connection into the guest broke off");
    }
}

async fn pass(
    State(pepod): State<Pepod>,
    call: Call,
    params: RawPathParams,
    request: Request,
) -> Result<Response, Problem> {
    let by = By::of(&call, request.headers());
    let passed = pass_on(&pepod, call, by, params, request).await;
    match by {
        By::Anybody => publish::for_anybody(passed),
        By::Path | By::Name => passed,
    }
}

async fn pass_on(
    pepod: &Pepod,
    call: Call,
    by: By,
    params: RawPathParams,
    mut request: Request,
) -> Result<Response, Problem> {
    let param = |name: &str| params.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_owned());
    let (which, port) = (param("session").unwrap_or_default(), number(&param("port").unwrap_or_default())?);
    let target = inner_target(request.uri())?;
    let upgrading = hop::changes_to(request.headers(), WEBSOCKET).then(|| hyper::upgrade::on(&mut request));
    if by == By::Anybody {
        publish::check(pepod, call, &which, port).await?;
    }

    let (lent, dialed) = connect(pepod, call, &which, port).await?;
    let (parts, body) = request.into_parts();
    let mut onward = http::Request::new(body);
    *onward.method_mut() = parts.method;
    *onward.uri_mut() = target;
    *onward.headers_mut() = to_program(&parts.headers, port, upgrading.is_some());

    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS)
        .handshake(TokioIo::new(dialed))
        .await
        .map_err(|error| broken(port, &error))?;
    let running = AbortOnDropHandle::new(tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(port, %error, "an exchange with a program in the guest broke off");
        }
    }));
    let mut answer = match tokio::time::timeout(ANSWER_WITHIN, sender.send_request(onward)).await {
        Ok(Ok(answer)) => answer,
        // What broke it off may have been the Sandbox's end.
        Ok(Err(error)) => {
            lent.told(lent.guest().ping().await).await?;
            return Err(broken(port, &error));
        }
        Err(_) => {
            let message = format!("the program on port {port} did not answer within {} s", ANSWER_WITHIN.as_secs());
            return Err(Problem::new(ErrorCode::Timeout, message));
        }
    };

    let origin = match by {
        By::Path => Origin::Ours(prefix(&parts.uri, target_text(&parts.uri))),
        By::Name | By::Anybody => Origin::Own,
    };
    let mut headers = to_caller(answer.headers(), port, origin);
    let status = answer.status();
    if status == StatusCode::SWITCHING_PROTOCOLS {
        let Some(upgrading) = upgrading.filter(|_| hop::changes_to(answer.headers(), WEBSOCKET)) else {
            let message = format!("the program on port {port} changed the protocol to another than was asked for");
            return Err(Problem::new(ErrorCode::GuestFailed, message));
        };
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static(WEBSOCKET));
        let theirs = hyper::upgrade::on(&mut answer);
        let mut switching = lent.with(status);
        switching.headers_mut().extend(headers);
        let held = Arc::new((lent, running));
        tokio::spawn(async move {
            match tokio::try_join!(upgrading, theirs) {
                Ok((ours, theirs)) => splice(port, TokioIo::new(ours), TokioIo::new(theirs)).await,
                Err(error) => tracing::debug!(port, %error, "the protocol was not changed"),
            }
            drop(held);
        });
        return Ok(of_guest(switching));
    }
    let mut passed = lent.with(status);
    passed.headers_mut().extend(headers);
    *passed.body_mut() = Body::new(Passing { body: answer.into_body(), _held: Box::new((lent, running, sender)) });
    Ok(of_guest(passed))
}

const WEBSOCKET: &str = "websocket";

fn of_guest(mut answer: Response) -> Response {
    answer.extensions_mut().insert(OfGuest);
    answer
}

fn broken(port: u16, error: &hyper::Error) -> Problem {
    // What hyper says of an answer is of a closed set; nothing of the answer itself is in it.
    let why = if error.is_parse() || error.is_parse_too_large() {
        format!("the program on port {port} gave no answer that is HTTP ({error})")
    } else {
        format!("the program on port {port} broke off before it answered")
    };
    Problem::new(ErrorCode::GuestFailed, why)
}

/// What of the path is the program's: all from the slash behind the port on.
fn target_text(uri: &Uri) -> &str {
    // "", v1, sessions, {session}, ports, {port}, and the rest.
    let slash = uri.path().match_indices('/').nth(5);
    slash.map_or("/", |(at, _)| &uri.path()[at..])
}

/// The path before that.
fn prefix<'a>(uri: &'a Uri, target: &str) -> &'a str {
    uri.path().strip_suffix(target).unwrap_or_default()
}

fn inner_target(uri: &Uri) -> Result<Uri, Problem> {
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let target = format!("{}{query}", target_text(uri)).parse();
    target.map_err(|_| Problem::new(ErrorCode::BadRequest, "the path for the program is none"))
}

/// The headers for the program. It is asked as a caller on its own machine would ask it.
fn to_program(headers: &HeaderMap, port: u16, websocket: bool) -> HeaderMap {
    let ours = |name: &str| {
        matches!(name, "host" | "expect" | "forwarded" | "if-activation")
            || name.starts_with("pepo-")
            || name.starts_with("x-forwarded-")
    };
    let mut kept = hop::kept(headers, |name| !ours(name));
    if let Ok(host) = HeaderValue::try_from(format!("localhost:{port}")) {
        kept.insert(header::HOST, host);
    }
    if websocket {
        kept.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        kept.insert(header::UPGRADE, HeaderValue::from_static(WEBSOCKET));
    }
    kept
}

/// Whose origin an answer gets.
#[derive(Clone, Copy)]
enum Origin<'a> {
    /// The API's, below this path.
    Ours(&'a str),
    /// The port's own. Cookies are not its own even there: one can be set for all names of the domain.
    Own,
}

/// The headers for the caller.
fn to_caller(headers: &HeaderMap, port: u16, origin: Origin<'_>) -> HeaderMap {
    let own =
        |name: &str| matches!(origin, Origin::Own) && (ITS_OWN.contains(&name) || name.starts_with(ITS_OWN_FAMILY));
    let taken = |name: &str| {
        let taken = TAKEN.contains(&name) || TAKEN_FAMILIES.iter().any(|family| name.starts_with(family));
        taken && !own(name)
    };
    let prefix = match origin {
        Origin::Ours(prefix) => prefix,
        Origin::Own => "",
    };
    let mut kept = hop::kept(headers, |name| !taken(name));
    // The length of a body that came in pieces is not known before; one that was told beside them was a lie.
    if headers.contains_key(header::TRANSFER_ENCODING) {
        kept.remove(header::CONTENT_LENGTH);
    }
    if let Some(place) = kept.get(header::LOCATION).and_then(|place| moved(place, port, prefix)) {
        kept.insert(header::LOCATION, place);
    }
    match origin {
        // Beside a policy of its own this one narrows further.
        Origin::Ours(_) => {
            kept.append(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
        }
        // The name is what opens a published port: pages that it leads to need not learn it.
        Origin::Own => {
            kept.entry(header::REFERRER_POLICY).or_insert(HeaderValue::from_static("same-origin"));
        }
    }
    kept.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    kept
}

/// Where a place on the program's own port is for the caller.
fn moved(place: &HeaderValue, port: u16, prefix: &str) -> Option<HeaderValue> {
    let place = place.to_str().ok()?;
    let own = [format!("http://localhost:{port}"), format!("http://127.0.0.1:{port}")];
    let path = own.iter().find_map(|own| place.strip_prefix(own.as_str())).unwrap_or(place);
    // Two slashes name another host.
    let within = (path.starts_with('/') && !path.starts_with("//")) || (path.is_empty() && path.len() < place.len());
    let moved = format!("{prefix}{path}");
    within.then(|| HeaderValue::try_from(if moved.is_empty() { "/".into() } else { moved }).ok())?
}

/// The body of a program's answer. What is held with it ends with it: the Session is used until then.
struct Passing {
    body: Incoming,
    _held: Box<(Lent, AbortOnDropHandle<()>, http1::SendRequest<Body>)>,
}

impl hyper::body::Body for Passing {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        loop {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                // Trailers are headers too, and nobody waits for these.
                Some(Ok(frame)) if !frame.is_data() => {}
                other => return Poll::Ready(other),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderName;

    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            let name: HeaderName = name.parse().expect("name");
            headers.append(name, HeaderValue::from_str(value).expect("value"));
        }
        headers
    }

    #[test]
    fn the_programs_part_of_a_path_is_all_behind_the_port() {
        let inner = |uri: &str| inner_target(&uri.parse().expect("uri")).map(|uri| uri.to_string()).map_err(|p| p.0);
        let own = "/v1/sessions/web/ports/80";
        for (given, wanted) in
            [("/", "/"), ("/a/b?c=d&e", "/a/b?c=d&e"), ("/?x", "/?x"), ("//a//b/", "//a//b/"), ("/%2f%20", "/%2f%20")]
        {
            let uri: Uri = format!("{own}{given}").parse().expect("uri");
            assert_eq!(inner(&format!("{own}{given}")).expect("target"), wanted);
            assert_eq!(prefix(&uri, target_text(&uri)), own, "{given}");
        }
    }

    #[test]
    fn nothing_of_ours_reaches_the_program() {
        let given = headers(&[
            ("host", "api.example.com"),
            ("pepo-app", "app_x"),
            ("pepo-actor", "uid:0"),
            ("x-forwarded-for", "192.0.2.1"),
            ("forwarded", "for=192.0.2.1"),
            ("if-activation", "1"),
            ("connection", "upgrade, x-hop"),
            ("upgrade", "websocket"),
            ("x-hop", "1"),
            ("accept", "text/html"),
        ]);
        let plain = to_program(&given, 80, false);
        assert_eq!(plain, headers(&[("accept", "text/html"), ("host", "localhost:80")]));
        let websocket = to_program(&given, 80, true);
        assert_eq!(
            (websocket["connection"].as_bytes(), websocket["upgrade"].as_bytes()),
            (&b"upgrade"[..], &b"websocket"[..])
        );
    }

    #[test]
    fn a_program_speaks_for_itself_alone() {
        let given = headers(&[
            ("set-cookie", "a=b; Domain=example.com"),
            ("clear-site-data", "\"*\""),
            ("service-worker-allowed", "/"),
            ("access-control-allow-origin", "*"),
            ("strict-transport-security", "max-age=0"),
            ("pepo-activation", "9"),
            ("pepo-request-id", "req_x"),
            ("ratelimit-remaining", "0"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("content-security-policy", "default-src 'self'"),
            ("content-type", "text/html"),
            ("x-own", "1"),
        ]);
        let told = to_caller(&given, 80, Origin::Ours("/p"));
        let policies: Vec<_> = told.get_all("content-security-policy").iter().collect();
        assert_eq!(policies, ["default-src 'self'", "sandbox"]);
        assert_eq!(
            (&told["content-type"], &told["x-own"], &told["x-content-type-options"]),
            (
                &HeaderValue::from_static("text/html"),
                &HeaderValue::from_static("1"),
                &HeaderValue::from_static("nosniff")
            )
        );
        assert_eq!(told.len(), 5, "{told:?}");
        // By a name of its own it may say who reads it, and still sets no cookie and clears nothing.
        let own = to_caller(&given, 80, Origin::Own);
        let mut names: Vec<_> = own.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "access-control-allow-origin",
                "content-security-policy",
                "content-type",
                "referrer-policy",
                "service-worker-allowed",
                "x-content-type-options",
                "x-own"
            ]
        );
        assert_eq!(own["content-security-policy"], "default-src 'self'", "its own policy alone");
        let told = to_caller(&headers(&[("referrer-policy", "origin")]), 80, Origin::Own);
        assert_eq!(told["referrer-policy"], "origin");
    }

    #[test]
    fn a_redirect_stays_on_the_port_or_leads_where_it_says() {
        let place = |place: &str| moved(&HeaderValue::from_str(place).expect("value"), 80, "/p/80");
        for (given, wanted) in [
            ("/login?a", Some("/p/80/login?a")),
            ("http://localhost:80/x", Some("/p/80/x")),
            ("http://127.0.0.1:80", Some("/p/80")),
            ("//evil.example/x", None),
            ("http://localhost:80//x", None),
            ("http://localhost:8080/x", None),
            ("https://example.com/", None),
            ("next", None),
            ("", None),
        ] {
            assert_eq!(place(given).as_ref().map(|value| value.to_str().expect("text")), wanted, "{given}");
        }
        let own = |place: &str| moved(&HeaderValue::from_str(place).expect("value"), 80, "");
        for (given, wanted) in [
            ("/login?a", Some("/login?a")),
            ("http://localhost:80/x", Some("/x")),
            ("http://127.0.0.1:80", Some("/")),
            ("//evil.example", None),
        ] {
            assert_eq!(own(given).as_ref().map(|value| value.to_str().expect("text")), wanted, "{given}");
        }
    }
}
