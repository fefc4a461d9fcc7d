//! The typed client: one request per row of [`ROUTES`](crate::ROUTES), over the operator's Unix socket or over HTTP.
//!
//! Each request has a connection of its own: connecting to a Unix socket costs less than finding out that a kept
//! connection is stale. Nothing waits for ever: connecting, answers and streams have idle limits. Bodies are streams
//! both ways and are never collected, except JSON, which is bounded. The end of a stream without its last event is an
//! error ([`ClientError::Lost`]), never taken for success; [`Attachment`] and [`CommandEvents`] go on where they were
//! when the daemon restarts.

mod attach;
mod methods;
mod stream;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::error::ErrorBody;
use crate::{Error, ErrorCode, Route};

pub use attach::{AttachEvent, AttachInput, Attachment, Input};
pub use methods::{Duplex, Which};
pub use stream::{ByteStream, CommandEvents, EventStream};

/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(10);
/// How long an answer or the next piece of a stream may take once nothing moves; waits that were asked for come on top.
const IDLE: Duration = Duration::from_secs(120);
/// JSON answers are smaller than this.
const MAX_JSON: usize = 16 << 20;
/// How long a lost attachment or event stream is taken up again: the lease of a command.
const LEASE: Duration = Duration::from_secs(30);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Pepo answered, with an error.
    #[error("{0}")]
    Api(Box<Error>),
    /// Nobody listens there.
    #[error("no daemon at {at}")]
    NoDaemon {
        /// The socket or address.
        at: String,
    },
    /// The caller may not use the socket.
    #[error("{}: permission denied", socket.display())]
    NotAllowed {
        /// The socket.
        socket: PathBuf,
    },
    /// Connecting or speaking failed.
    #[error("{what}")]
    Transport {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Nothing came for too long.
    #[error("{what}: nothing came for {} s", seconds)]
    Silent {
        /// What was waited for.
        what: String,
        /// How long.
        seconds: u64,
    },
    /// The stream ended without its last event, so what became of the operation is not known.
    #[error("{0}: the connection was lost before the end")]
    Lost(String),
    /// The answer was not what the route answers.
    #[error("{what}: unexpected answer: {found}")]
    Unexpected {
        /// The request.
        what: String,
        /// What came. Whoever answered may have written anything here.
        found: String,
    },
    /// The address is not one.
    #[error("PEPO_URL `{url}`: {why}")]
    BadUrl {
        /// As given.
        url: String,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl ClientError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            ClientError::Api(error) => error.hint.clone(),
            ClientError::NoDaemon { .. } => Some("start one with `pepo up`".into()),
            ClientError::NotAllowed { .. } => {
                Some("use sudo, or let an administrator add you to the group: `sudo usermod -aG pepo $USER`".into())
            }
            _ => None,
        }
    }

    /// The error code, where Pepo answered.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            ClientError::Api(error) => Some(error.code),
            _ => None,
        }
    }

    /// Whether a daemon that restarts would look like this.
    fn may_pass(&self) -> bool {
        match self {
            ClientError::Api(error) => error.code == ErrorCode::Unavailable,
            ClientError::NoDaemon { .. }
            | ClientError::Transport { .. }
            | ClientError::Silent { .. }
            | ClientError::Lost(_) => true,
            ClientError::NotAllowed { .. } | ClientError::Unexpected { .. } | ClientError::BadUrl { .. } => false,
        }
    }

    fn transport(what: impl Into<String>, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        ClientError::Transport { what: what.into(), source: source.into() }
    }
}

/// A connection that is private and known to be to whom it should be.
pub type Secured = std::pin::Pin<Box<dyn Future<Output = std::io::Result<Box<dyn Duplex>>> + Send>>;

/// Makes a connection to that host private: TLS, which is the program's to bring, so that not all that speak this link it.
#[derive(Clone)]
pub struct Secure(Arc<dyn Fn(TcpStream, String) -> Secured + Send + Sync>);

impl Secure {
    /// What does it: it gets the connection, and the name of the host, without the port.
    pub fn new(how: impl Fn(TcpStream, String) -> Secured + Send + Sync + 'static) -> Self {
        Secure(Arc::new(how))
    }
}

impl std::fmt::Debug for Secure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secure")
    }
}

/// Where Pepo is.
#[derive(Clone, Debug)]
enum Target {
    /// A local socket; who calls is known by it.
    Unix(PathBuf),
    /// `host:port`, the key, and what makes it private.
    Tcp { authority: String, key: Option<HeaderValue>, secure: Option<Secure> },
}

/// Speaks to one Pepo. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    target: Arc<Target>,
    app: Option<HeaderValue>,
    activation: Option<u64>,
    once: Option<HeaderValue>,
}

/// A request body.
pub type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// A body that is sent while it is made. It should not hold back for more than two minutes.
pub fn body_of<S>(stream: S) -> Body
where
    S: futures_util::Stream<Item = std::io::Result<Bytes>> + Send + 'static,
{
    use futures_util::StreamExt;
    UnsyncBoxBody::new(StreamBody::new(stream.map(|piece| piece.map(Frame::data))))
}

/// A body that is there already.
pub fn body_from(bytes: impl Into<Bytes>) -> Body {
    UnsyncBoxBody::new(Full::new(bytes.into()).map_err(|never| match never {}))
}

fn no_body() -> Body {
    UnsyncBoxBody::new(Empty::new().map_err(|never| match never {}))
}

/// What both kinds of connection can do.
trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// One request before it is sent.
struct Call<'a> {
    route: &'a Route,
    path: String,
    headers: HeaderMap,
    body: Body,
    /// What the server was asked to wait, on top of the idle limit.
    patience: Duration,
}

impl Call<'_> {
    fn what(&self) -> String {
        let path = self.path.split('?').next().unwrap_or_default();
        format!("{} {path}", self.route.method)
    }
}

impl Client {
    /// Speaks to the daemon behind this socket, as its operator.
    pub fn unix(socket: impl Into<PathBuf>) -> Self {
        Client { target: Arc::new(Target::Unix(socket.into())), app: None, activation: None, once: None }
    }

    /// Speaks to an edge, `http://host[:port]`, with an API key.
    ///
    /// # Errors
    /// What is no such address, or a key with characters that no header takes.
    pub fn http(url: &str, key: Option<&str>) -> Result<Self, ClientError> {
        Self::remote(url, key, None)
    }

    /// Speaks to an edge, `http://host[:port]` or, by this means, `https://host[:port]`, with an API key.
    ///
    /// # Errors
    /// As [`Client::http`].
    pub fn remote(url: &str, key: Option<&str>, secure: Option<Secure>) -> Result<Self, ClientError> {
        let bad = |why| ClientError::BadUrl { url: url.chars().take(200).collect(), why };
        let (rest, port, secure) = match (url.strip_prefix("https://"), url.strip_prefix("http://"), secure) {
            (Some(rest), _, Some(secure)) => (rest, 443, Some(secure)),
            (Some(_), _, None) => return Err(bad("this program speaks no https")),
            (None, Some(rest), _) => (rest, 80, None),
            (None, None, _) => return Err(bad("it must begin with https:// or http://")),
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let parsed: http::uri::Authority = authority.parse().map_err(|_| bad("no host and port in it"))?;
        if parsed.host().is_empty() || authority.contains('@') {
            return Err(bad("it must be https://host:port or http://host:port and nothing more"));
        }
        let authority = match parsed.port_u16() {
            Some(_) => authority.to_owned(),
            None if authority.ends_with(':') => return Err(bad("the port is missing")),
            None => format!("{authority}:{port}"),
        };
        let key = match key {
            None => None,
            Some(key) => {
                let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim()))
                    .map_err(|_| bad("PEPO_API_KEY has characters that no key has"))?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(Client { target: Arc::new(Target::Tcp { authority, key, secure }), app: None, activation: None, once: None })
    }

    /// The same for that App, by name or id: the operator's to say, since a key has its own.
    pub fn of_app(mut self, app: &str) -> Self {
        // What no header can carry names no App: the daemon says so.
        self.app = Some(HeaderValue::from_str(app).unwrap_or_else(|_| HeaderValue::from_static("-")));
        self
    }

    /// The same, but every request asks for that activation of its Session: where another Sandbox has taken its place, the
    /// answer is [`ErrorCode::SandboxReplaced`].
    pub fn if_activation(&self, activation: u64) -> Self {
        Client { activation: Some(activation), ..self.clone() }
    }

    /// The same, but what its next request makes is made once: under this key of the caller's the same request makes nothing
    /// new, and is answered with what it made. Another request takes another key.
    pub fn once(&self, key: &str) -> Self {
        // What no header can carry is no key: the daemon says so.
        let key = HeaderValue::from_str(key).unwrap_or_else(|_| HeaderValue::from_static(""));
        Client { once: Some(key), ..self.clone() }
    }

    /// The operator's socket, where that is what it speaks to.
    pub fn socket(&self) -> Option<&Path> {
        match &*self.target {
            Target::Unix(path) => Some(path),
            Target::Tcp { .. } => None,
        }
    }

    /// Its socket, or its address.
    pub fn at(&self) -> String {
        match &*self.target {
            Target::Unix(path) => path.display().to_string(),
            Target::Tcp { authority, secure: None, .. } => format!("http://{authority}"),
            Target::Tcp { authority, .. } => format!("https://{authority}"),
        }
    }

    async fn connect(&self) -> Result<Box<dyn Wire>, ClientError> {
        let connecting = async {
            match &*self.target {
                Target::Unix(path) => UnixStream::connect(path).await.map(|s| Box::new(s) as Box<dyn Wire>),
                Target::Tcp { authority, secure, .. } => {
                    let stream = TcpStream::connect(authority.as_str()).await?;
                    // Small frames of a terminal must not wait for each other.
                    stream.set_nodelay(true)?;
                    match secure {
                        None => Ok(Box::new(stream) as Box<dyn Wire>),
                        Some(Secure(how)) => {
                            let host = authority.rsplit_once(':').map_or(authority.as_str(), |(host, _)| host);
                            let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                            Ok(Box::new(how(stream, host).await?) as Box<dyn Wire>)
                        }
                    }
                }
            }
        };
        let failed = match tokio::time::timeout(CONNECT, connecting).await {
            Ok(Ok(wire)) => return Ok(wire),
            Ok(Err(error)) => error,
            Err(_) => {
                return Err(ClientError::Silent { what: format!("connecting to {}", self.at()), seconds: 10 });
            }
        };
        use std::io::ErrorKind;
        Err(match (failed.kind(), &*self.target) {
            (ErrorKind::NotFound | ErrorKind::ConnectionRefused, _) => ClientError::NoDaemon { at: self.at() },
            (ErrorKind::PermissionDenied, Target::Unix(path)) => ClientError::NotAllowed { socket: path.clone() },
            _ => ClientError::transport(format!("connecting to {}", self.at()), failed),
        })
    }

    fn request<'a>(&self, route: &'a Route, parameters: &[(&str, &str)]) -> Result<Call<'a>, ClientError> {
        let path = fill(route.path, parameters).ok_or_else(|| ClientError::Unexpected {
            what: format!("{} {}", route.method, route.path),
            found: "a parameter of the path is missing or empty".into(),
        })?;
        Ok(Call { route, path, headers: HeaderMap::new(), body: no_body(), patience: Duration::ZERO })
    }

    fn head(&self, call: &mut Call<'_>) {
        let host = match &*self.target {
            Target::Unix(_) => HeaderValue::from_static("pepo"),
            Target::Tcp { authority, key, .. } => {
                if let Some(key) = key {
                    call.headers.insert(AUTHORIZATION, key.clone());
                }
                HeaderValue::from_str(authority).unwrap_or_else(|_| HeaderValue::from_static("pepo"))
            }
        };
        call.headers.insert(HOST, host);
        if let Some(app) = &self.app {
            call.headers.insert("pepo-app", app.clone());
        }
        if let Some(once) = &self.once {
            call.headers.insert("idempotency-key", once.clone());
        }
        if let Some(activation) = self.activation {
            call.headers.insert("if-activation", HeaderValue::from(activation));
        }
    }

    /// Sends it and gives the answer if it is a success (or 101).
    async fn send(&self, mut call: Call<'_>) -> Result<Response<Incoming>, ClientError> {
        self.head(&mut call);
        let what = call.what();
        let moved = Activity::new();
        let body = std::mem::replace(&mut call.body, no_body());
        let body = UnsyncBoxBody::new(Watched { body, moved: moved.clone() });
        let mut request = Request::builder()
            .method(call.route.method.clone())
            .uri(&call.path)
            .body(body)
            .map_err(|e| ClientError::transport(what.clone(), e))?;
        *request.headers_mut() = std::mem::take(&mut call.headers);

        let wire = self.connect().await?;
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(256 << 10)
            .handshake(TokioIo::new(wire))
            .await
            .map_err(|e| ClientError::transport(what.clone(), e))?;
        // It ends by itself when the answer's body is read or dropped.
        tokio::spawn(connection.with_upgrades());

        let limit = IDLE + call.patience;
        let answer = {
            let mut answering = std::pin::pin!(sender.send_request(request));
            loop {
                match tokio::time::timeout(Duration::from_secs(5), answering.as_mut()).await {
                    Ok(done) => break done,
                    Err(_) if moved.idle() > limit => {
                        return Err(ClientError::Silent { what, seconds: limit.as_secs() });
                    }
                    Err(_) => {}
                }
            }
        };
        let answer = answer.map_err(|e| {
            // A body that could not be made is the caller's failure, not the connection's.
            if e.is_canceled() || e.is_incomplete_message() {
                ClientError::Lost(what.clone())
            } else {
                ClientError::transport(what.clone(), e)
            }
        })?;
        let status = answer.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(answer);
        }
        let body = collect(&what, answer.into_body(), Duration::ZERO).await?;
        Err(refusal(&what, status, &body))
    }

    async fn json<T: DeserializeOwned>(&self, mut call: Call<'_>) -> Result<T, ClientError> {
        call.headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        let (what, patience) = (call.what(), call.patience);
        let answer = self.send(call).await?;
        let body = collect(&what, answer.into_body(), patience).await?;
        serde_json::from_slice(&body)
            .map_err(|error| ClientError::Unexpected { what, found: format!("{error}: {}", excerpt(&body)) })
    }

    async fn empty(&self, call: Call<'_>) -> Result<(), ClientError> {
        let what = call.what();
        let answer = self.send(call).await?;
        collect(&what, answer.into_body(), Duration::ZERO).await.map(drop)
    }

    async fn bytes(&self, call: Call<'_>) -> Result<ByteStream, ClientError> {
        let what = call.what();
        let answer = self.send(call).await?;
        Ok(ByteStream::new(what, answer.into_body()))
    }

    async fn events<T: DeserializeOwned>(&self, mut call: Call<'_>) -> Result<EventStream<T>, ClientError> {
        call.headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
        let what = call.what();
        let answer = self.send(call).await?;
        let is_events = answer
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|v| v.to_str().ok())
            .is_some_and(|v| v.starts_with("text/event-stream"));
        if !is_events {
            let body = collect(&what, answer.into_body(), Duration::ZERO).await?;
            return Err(ClientError::Unexpected { what, found: excerpt(&body) });
        }
        Ok(EventStream::new(ByteStream::new(what, answer.into_body())))
    }
}

impl Call<'_> {
    fn with_json<T: Serialize>(mut self, value: &T) -> Result<Self, ClientError> {
        let body = serde_json::to_vec(value).map_err(|e| ClientError::transport(self.what(), e))?;
        self.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        self.body = body_from(body);
        Ok(self)
    }

    fn with_body(mut self, content_type: &'static str, body: Body) -> Self {
        self.headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        self.body = body;
        self
    }

    fn with_query<T: Serialize>(mut self, query: &T) -> Result<Self, ClientError> {
        let value = serde_json::to_value(query).map_err(|e| ClientError::transport(self.what(), e))?;
        let text = query_text(&value);
        if !text.is_empty() {
            self.path.push('?');
            self.path.push_str(&text);
        }
        Ok(self)
    }

    fn waiting(mut self, seconds: u64) -> Self {
        self.patience = Duration::from_secs(seconds);
        self
    }
}

fn refusal(what: &str, status: StatusCode, body: &[u8]) -> ClientError {
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(body) => ClientError::Api(Box::new(body.error)),
        Err(_) => ClientError::Unexpected { what: what.to_owned(), found: format!("{status}: {}", excerpt(body)) },
    }
}

fn excerpt(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned()
}

async fn collect(what: &str, body: Incoming, patience: Duration) -> Result<Vec<u8>, ClientError> {
    let mut stream = ByteStream::new(what.to_owned(), body);
    stream.be_patient(patience);
    let mut all = Vec::new();
    while let Some(piece) = stream.next().await? {
        if all.len() + piece.len() > MAX_JSON {
            return Err(ClientError::Unexpected { what: what.to_owned(), found: "more than 16 MiB of JSON".into() });
        }
        all.extend_from_slice(&piece);
    }
    Ok(all)
}

/// The path with its parameters filled in; nothing when one is missing or empty, or names a directory step.
fn fill(template: &str, parameters: &[(&str, &str)]) -> Option<String> {
    let mut path = String::with_capacity(template.len() + 64);
    for (index, segment) in template.split('/').enumerate() {
        if index > 0 {
            path.push('/');
        }
        match segment.strip_prefix('{').and_then(|s| s.strip_suffix('}')) {
            Some(name) => {
                let value = parameters.iter().find(|(n, _)| *n == name)?.1;
                if value.is_empty() || value == "." || value == ".." {
                    return None;
                }
                encode(value, &mut path);
            }
            None => path.push_str(segment),
        }
    }
    Some(path)
}

/// Percent-encoding: everything but the unreserved characters.
fn encode(text: &str, into: &mut String) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            into.push(byte as char);
        } else {
            into.push('%');
            into.push(HEX[usize::from(byte >> 4)] as char);
            into.push(HEX[usize::from(byte & 15)] as char);
        }
    }
}

fn query_text(value: &serde_json::Value) -> String {
    use serde_json::Value;
    let mut text = String::new();
    let mut pair = |name: &str, value: &Value| {
        let plain = match value {
            Value::String(s) => s.clone(),
            Value::Null => return,
            other => other.to_string(),
        };
        if !text.is_empty() {
            text.push('&');
        }
        encode(name, &mut text);
        text.push('=');
        encode(&plain, &mut text);
    };
    if let Value::Object(fields) = value {
        for (name, value) in fields {
            match value {
                Value::Array(values) => values.iter().for_each(|v| pair(name, v)),
                one => pair(name, one),
            }
        }
    }
    text
}

/// When something last moved.
#[derive(Clone)]
struct Activity {
    start: Instant,
    last_ms: Arc<AtomicU64>,
}

impl Activity {
    fn new() -> Self {
        Activity { start: Instant::now(), last_ms: Arc::default() }
    }

    fn note(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(now, Ordering::Relaxed);
    }

    fn idle(&self) -> Duration {
        self.start.elapsed().saturating_sub(Duration::from_millis(self.last_ms.load(Ordering::Relaxed)))
    }
}

/// A body that notes when it is asked for more: an upload that moves is not idle.
struct Watched {
    body: Body,
    moved: Activity,
}

impl hyper::body::Body for Watched {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        self.moved.note();
        std::pin::Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod forms {
    use super::*;
    use crate::{ROUTES, query};

    #[test]
    fn every_template_is_filled() {
        let all = [
            ("session", "ses"),
            ("key", "user:42"),
            ("command", "cmd"),
            ("port", "80"),
            ("rest", "index.html"),
            ("image", "base"),
            ("app", "shop"),
            ("workspace", "wsp"),
        ];
        for route in ROUTES {
            let path = fill(route.path, &all).unwrap_or_else(|| panic!("{}", route.path));
            assert!(!path.contains(['{', '}']), "{path}");
        }
    }

    #[test]
    fn a_parameter_stays_one_segment() {
        let path = |v| fill("/v1/sessions/{session}", &[("session", v)]);
        assert_eq!(path("a/b?c#d%").as_deref(), Some("/v1/sessions/a%2Fb%3Fc%23d%25"));
        assert_eq!(path("größe").as_deref(), Some("/v1/sessions/gr%C3%B6%C3%9Fe"));
        assert_eq!(path(""), None);
        assert_eq!(path(".."), None);
        assert_eq!(fill("/v1/{other}", &[("session", "x")]), None);
    }

    #[test]
    fn a_query_repeats_what_is_a_list() {
        let list =
            query::ListSessions { limit: Some(5), label: vec!["a=b c".into(), "d=&".into()], ..Default::default() };
        let text = query_text(&serde_json::to_value(&list).unwrap());
        assert_eq!(text, "label=a%3Db%20c&label=d%3D%26&limit=5");
    }

    #[test]
    fn addresses_are_checked() {
        let ok = Client::http("http://127.0.0.1:7070/", Some("pepo_x")).unwrap();
        assert_eq!(ok.at(), "http://127.0.0.1:7070");
        assert_eq!(Client::http("http://host", None).unwrap().at(), "http://host:80");
        for bad in
            ["https://host", "ftp://host", "host:80", "http://", "http://host:80/path", "http://u@host", "http://h:"]
        {
            assert!(matches!(Client::http(bad, None), Err(ClientError::BadUrl { .. })), "{bad}");
        }
    }
}
