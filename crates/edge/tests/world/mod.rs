//! An edge before a fake daemon on a Unix socket, spoken to with raw bytes, as strangers do.

#![allow(dead_code, reason = "each test program uses what it needs")]

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use pepo_api::{AppId, EdgeApp, EdgeDecision, EdgeDecisions, EdgeKey, EdgeState, KeyId, Scope, SecretText};
use pepo_edge::auth::Gate;
use pepo_edge::config::{Issuer, Limits};
use pepo_edge::decisions::Decisions;
use pepo_edge::handler::{Edge, Rules};
use pepo_edge::jwt::Issuers;
use pepo_edge::keys::Keys;
use pepo_edge::rate::Rate;
use pepo_edge::server::{Bounds, serve};
use pepo_edge::threads::Threads;
use pepo_edge::tls::Tls;
use pepo_edge::upstream::Upstream;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{Notify, oneshot};

/// The text of the key that every edge here knows, with the scope `*`.
pub const KEY: &str = "pepo_0123456789";
/// What Session tokens are signed with.
pub const TOKEN_KEY: [u8; 32] = [7; 32];
/// Longer than anything takes.
pub const LONG: Duration = Duration::from_secs(30);

/// What the daemon was asked.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: Method,
    pub target: String,
    pub headers: HeaderMap,
    pub body: Bytes,
    /// On which of the edge's connections.
    pub connection: usize,
}

/// The fake daemon.
#[derive(Default)]
pub struct Daemon {
    asked: Mutex<Vec<Asked>>,
    pub gone: Notify,
    pub state: Mutex<Option<EdgeState>>,
    pub decisions: Mutex<Vec<EdgeDecision>>,
    /// It does not answer questions about keys.
    pub mute: std::sync::atomic::AtomicBool,
}

impl Daemon {
    /// What it was asked until now.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("lock").clone()
    }

    /// Changes what it says of keys and Apps; the edge has heard of it when this returns.
    pub async fn change(&self, change: impl FnOnce(&mut EdgeState)) {
        {
            let mut state = self.state.lock().expect("lock");
            let state = state.as_mut().expect("state");
            state.generation += 1;
            change(state);
        }
        tokio::time::sleep(Duration::from_millis(1300)).await;
    }
}

/// Tells when a request's future was dropped before its end, as it is when the edge hangs up.
struct Dropped(Arc<Daemon>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.gone.notify_one();
    }
}

async fn answer(
    daemon: Arc<Daemon>,
    connection: usize,
    mut request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    if request.uri().path() == "/v1/edge/state" {
        if daemon.mute.load(std::sync::atomic::Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        let state = daemon.state.lock().expect("lock").clone().expect("state");
        return Ok(Response::new(Full::from(serde_json::to_vec(&state).expect("json"))));
    }
    if request.uri().path() == "/v1/edge/decisions" {
        let body = request.into_body().collect().await?.to_bytes();
        let told: EdgeDecisions = serde_json::from_slice(&body).expect("decisions");
        daemon.decisions.lock().expect("lock").extend(told.decisions);
        return Ok(Response::builder().status(204).body(Full::default()).expect("answer"));
    }
    let target = request.uri().to_string();
    let asked = |body| Asked {
        method: request.method().clone(),
        target: target.clone(),
        headers: request.headers().clone(),
        body,
        connection,
    };
    if let Some(protocol) = request.headers().get("upgrade").cloned() {
        daemon.asked.lock().expect("lock").push(asked(Bytes::new()));
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut io = TokioIo::new(upgraded.await.expect("upgraded"));
            let mut bytes = [0u8; 64];
            while let Ok(n) = io.read(&mut bytes).await {
                if n == 0 {
                    let _ = io.write_all(b"bye").await;
                    let _ = io.shutdown().await;
                    break;
                }
                if io.write_all(&bytes[..n].to_ascii_uppercase()).await.is_err() {
                    break;
                }
            }
        });
        let answer = Response::builder().status(101).header("connection", "upgrade").header("upgrade", protocol);
        return Ok(answer.body(Full::default()).expect("answer"));
    }
    if target.ends_with("/hang") {
        let _guard = Dropped(daemon.clone());
        daemon.asked.lock().expect("lock").push(asked(Bytes::new()));
        std::future::pending::<()>().await;
    }
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let asked = Asked { method: parts.method, target, headers: parts.headers, body, connection };
    daemon.asked.lock().expect("lock").push(asked);
    let answer = Response::builder()
        .header("pepo-activation", "3")
        .header("connection", "x-hop")
        .header("x-hop", "1")
        .header("content-type", "application/json");
    Ok(answer.body(Full::from("{\"ok\":true}")).expect("answer"))
}

fn listen(socket: &Path, daemon: Arc<Daemon>) -> impl Future<Output = ()> + use<> {
    let listener = UnixListener::bind(socket).expect("bind");
    async move {
        for connection in 0.. {
            let (stream, _) = listener.accept().await.expect("accept");
            let daemon = daemon.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| answer(daemon.clone(), connection, request));
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .with_upgrades()
                    .await;
            });
        }
    }
}

/// How an edge differs from the usual one.
pub struct Options {
    pub bounds: Bounds,
    pub rules: Rules,
    pub failures: Rate,
    pub issuers: Vec<Issuer>,
    pub tls: Option<Arc<Tls>>,
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            bounds: Bounds {
                head_within: Duration::from_millis(500),
                end_within: Duration::from_millis(500),
                ..Bounds::for_this_process()
            },
            rules: Rules {
                limits: Limits { caller: None, app: None, ..Limits::default() },
                streams: 512,
                ..Rules::default()
            },
            failures: Rate { per_second: 1000, burst: 1000 },
            issuers: vec![],
            tls: None,
            threads: 2,
        }
    }
}

/// A running edge and its daemon.
pub struct Fixture {
    directory: tempfile::TempDir,
    pub daemon: Arc<Daemon>,
    pub address: SocketAddr,
    pub app: AppId,
    pub key: KeyId,
    end: Option<oneshot::Sender<()>>,
    pub ended: Option<tokio::task::JoinHandle<std::io::Result<()>>>,
}

impl Fixture {
    /// A directory of its own.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Asks the edge to end, as SIGTERM does.
    pub fn end(&mut self) {
        let _ = self.end.take().expect("not yet").send(());
    }

    /// Asks for this path with this credential and further heads.
    pub async fn get(&self, path: &str, credential: &str, more: &str) -> String {
        let head =
            format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {credential}\r\nconnection: close\r\n");
        exchange(self.address, format!("{head}{more}\r\n")).await
    }

    /// What came into the audit log, once there is something that fits.
    pub async fn told(&self, fits: impl Fn(&EdgeDecision) -> bool) -> Vec<EdgeDecision> {
        tokio::time::timeout(LONG, async {
            loop {
                let all = self.daemon.decisions.lock().expect("lock").clone();
                if all.iter().any(&fits) {
                    return all;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .expect("it is told")
    }
}

/// Hex digits.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

/// A key of that text as the daemon tells it.
pub fn key(app: AppId, text: &str, scopes: &[&str]) -> EdgeKey {
    EdgeKey {
        id: KeyId::generate(),
        app_id: app,
        sha256: hex(Sha256::digest(text)),
        scopes: scopes.iter().map(|word| word.parse::<Scope>().expect("scope")).collect(),
        sources: Vec::new(),
        expires_at: None,
    }
}

/// Starts one and waits until it has its copy.
pub async fn start(options: Options) -> Fixture {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("edge.sock");
    let fake = Arc::new(Daemon::default());
    let app = AppId::generate();
    let own = key(app, KEY, &["*"]);
    let own_id = own.id;
    let known = EdgeApp { id: app, name: "default".into(), sources: vec![], requests_per_second: None };
    *fake.state.lock().expect("lock") = Some(EdgeState {
        generation: 1,
        keys: Some(vec![own]),
        apps: vec![known],
        token_key: Some(SecretText::new(hex(TOKEN_KEY))),
        void: vec![],
        published: vec![],
    });
    tokio::spawn(listen(&socket, fake.clone()));
    let upstream = Upstream::new(socket);
    let keys = Arc::new(Keys::default());
    tokio::spawn(pepo_edge::keys::follow(keys.clone(), upstream.clone()));
    let (decisions, noted) = Decisions::new();
    tokio::spawn(pepo_edge::decisions::follow(noted, upstream.clone()));
    let issuers = Arc::new(Issuers::new(options.issuers));
    tokio::spawn(pepo_edge::jwt::follow(issuers.clone()));
    let gate = Gate::new(keys.clone(), issuers, options.failures);
    let edge = Arc::new(Edge::new(gate, options.rules, upstream, decisions));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let (end, asked) = oneshot::channel::<()>();
    let end_asked = async move {
        if asked.await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let threads = Threads::start(options.threads).expect("threads");
    let ended = tokio::spawn(serve(listener, edge, options.tls, options.bounds, threads, end_asked));
    tokio::time::timeout(LONG, async {
        while !keys.fresh() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("keys were learnt");
    Fixture { directory, daemon: fake, address, app, key: own_id, end: Some(end), ended: Some(ended) }
}

/// Sends these bytes and reads until the other side closes.
pub async fn exchange(address: SocketAddr, bytes: impl AsRef<[u8]>) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connect");
    stream.write_all(bytes.as_ref()).await.expect("write");
    let mut answer = Vec::new();
    tokio::time::timeout(LONG, stream.read_to_end(&mut answer)).await.expect("an end").expect("read");
    String::from_utf8_lossy(&answer).into_owned()
}

/// A request with the key that everybody knows.
pub fn request(head: &str, body: &str) -> String {
    format!("{head}\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n{body}")
}

/// The status of an answer.
pub fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("no status in {answer:?}"))
}
