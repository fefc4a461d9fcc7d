//! The way in for strangers: what the edge costs beside the socket behind it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use pepo_api::client::Client;
use pepo_api::{CreateCommand, CreateKey, StreamEvent, Text};
use pepo_e2e::{Instance, Options, bare, until};

use crate::table::{Goal, MIB, Row, median, quantile, rate};

/// Callers at once, each on a connection of its own.
const CALLERS: usize = 4;
/// Requests of each in one round.
const REQUESTS: usize = 1500;
/// Starts of Sessions, each way.
const STARTS: usize = 5;
/// WebSockets that are held, and those that were there before: what is made once is made by then.
const SOCKETS: usize = 200;
const SOCKETS_BEFORE: usize = 20;
/// Output that is followed.
const OUTPUT: usize = 48 * MIB;

/// No limits of the edge stand in the way; every Session boots.
const SETTINGS: &str = "[edge]\nrequests = 0\napp_requests = 0\n[pool]\ntarget = 0\nminimum = 0\n";

/// All of them, in an instance of their own.
pub fn edge() -> Vec<Row> {
    let instance = Instance::with(Options { config: Some(SETTINGS.into()), ..Options::default() });
    let up = instance.up();
    let url_file = instance.home().join("run/url");
    let url = until("the edge answers", Duration::from_secs(30), || fs::read_to_string(&url_file).ok());
    let url = url.trim().to_owned();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    let operator = instance.client();
    let key = runtime.block_on(operator.key_create(&CreateKey::default())).expect("key").key;
    let stranger = Client::http(&url, Some(&key)).expect("client");

    let session = runtime.block_on(operator.session_create(&bare())).expect("session").id.to_string();
    let address = url.strip_prefix("http://").and_then(|rest| rest.parse().ok()).expect("address");
    let command = CreateCommand { command: Some("sleep 600".into()), wait_seconds: Some(0), ..Default::default() };
    let id = runtime.block_on(stranger.command_create(&session, &command)).expect("command").command.id;
    // First, while no memory is about that something larger has left.
    let mut rows = vec![sockets(&instance, address, &format!("/v1/sessions/{session}/commands/{id}/attach"), &key)];
    runtime.block_on(stranger.command_kill(&session, id)).expect("kill");
    rows.extend(requests(address, &format!("/v1/sessions/{session}"), &key));
    rows.push(stream(&runtime, &operator, &stranger, &session));
    runtime.block_on(operator.session_terminate(&session)).expect("end");
    rows.push(starts(&runtime, &operator, &stranger));
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
    rows
}

/// The middle of each, measured in turn.
fn in_turn(rounds: usize, ours: impl Fn() -> f64, reference: impl Fn() -> f64) -> (f64, f64) {
    let (references, own): (Vec<f64>, Vec<f64>) = (0..rounds).map(|_| (reference(), ours())).unzip();
    (median(own), median(references))
}

/// From the request for a Session to the first byte of its first command.
fn starts(runtime: &tokio::runtime::Runtime, operator: &Client, stranger: &Client) -> Row {
    let once = |client: &Client| {
        runtime.block_on(async {
            let began = Instant::now();
            let session = client.session_create(&bare()).await.expect("session").id.to_string();
            let command = CreateCommand { command: Some("echo x".into()), ..Default::default() };
            let mut events = client.command_create_events(&session, &command).await.expect("events");
            while !matches!(events.next().await.expect("event"), Some(StreamEvent::Stdout { .. })) {}
            let took = began.elapsed().as_secs_f64();
            client.session_terminate(&session).await.expect("end");
            took
        })
    };
    let (ours, reference) = in_turn(STARTS, || once(stranger), || once(operator));
    Row {
        what: "create to first byte with a key through the edge, against the operator's socket".into(),
        ours,
        unit: "s",
        goal: Goal::AtMost { reference, ratio: 1.2 },
    }
}

/// A command's output, followed as events.
fn stream(runtime: &tokio::runtime::Runtime, operator: &Client, stranger: &Client, session: &str) -> Row {
    let once = |client: &Client| {
        runtime.block_on(async {
            let line = format!("head -c {OUTPUT} /dev/zero | tr '\\0' x");
            let command = CreateCommand { command: Some(line), ..Default::default() };
            let mut events = client.command_create_events(session, &command).await.expect("events");
            let (mut came, mut began) = (0, Instant::now());
            while let Some(event) = events.next().await.expect("event") {
                if let StreamEvent::Stdout { data, .. } = event {
                    if came == 0 {
                        began = Instant::now();
                    }
                    came += match data {
                        Text::Utf8(text) => text.len(),
                        Text::Binary { base64 } => base64.len() / 4 * 3,
                    };
                }
            }
            assert_eq!(came, OUTPUT);
            rate(came, began.elapsed())
        })
    };
    let (ours, reference) = in_turn(3, || once(stranger), || once(operator));
    Row {
        what: "output of a command as events through the edge, against the operator's socket".into(),
        ours,
        unit: "MiB/s",
        goal: Goal::AtLeast { reference, ratio: 0.9 },
    }
}

/// What the edge and pepod have in memory for a WebSocket on which nothing is said.
fn sockets(instance: &Instance, address: SocketAddr, path: &str, key: &str) -> Row {
    let resident = || -> u64 {
        let pids = instance.pids("pepo-edge").into_iter().chain(instance.pids("pepod"));
        pids.map(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or_default();
            line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap_or(0)
        })
        .sum()
    };
    let head = format!(
        "GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    let open = |many: usize| -> Vec<TcpStream> {
        let one = |_| {
            let mut stream = ask(address, &head);
            let mut status = [0; 12];
            stream.read_exact(&mut status).expect("answer");
            assert_eq!(&status, b"HTTP/1.1 101", "{}", String::from_utf8_lossy(&status));
            stream
        };
        (0..many).map(one).collect()
    };
    let settled = || std::thread::sleep(Duration::from_secs(2));
    let first = open(SOCKETS_BEFORE);
    settled();
    let before = resident();
    let held = open(SOCKETS);
    settled();
    let per_socket = resident().saturating_sub(before) as f64 / SOCKETS as f64;
    drop((first, held));
    Row {
        what: format!("memory of an idle WebSocket in edge and pepod ({SOCKETS} held)"),
        ours: per_socket,
        unit: "KiB",
        goal: Goal::Below(64.0),
    }
}

/// A GET with a key through edge and pepod, against a handler of axum that answers the same bytes and asks nobody who calls.
fn requests(edge: SocketAddr, path: &str, key: &str) -> Vec<Row> {
    let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n");
    let (body, _) = answer(&mut BufReader::new(ask(edge, &head)));
    let body = String::from_utf8(body).expect("text");
    let bare = Bare::start(&[BARE, &body]);
    let folder = tempfile::tempdir().expect("directory");
    let socket = folder.path().join("socket").to_str().expect("text").to_owned();
    let _behind = Bare::start(&[BARE, &body, &socket]);
    let proxy = Bare::start(&[PROXY, &socket]);
    let (mut ours, mut reference, mut least) = (Load::default(), Load::default(), Load::default());
    for round in 0..4 {
        let (one, two, three) = (load(bare.address(), &head), load(edge, &head), load(proxy.address(), &head));
        // The first warms all up.
        if round > 0 {
            reference.add(one);
            ours.add(two);
            least.add(three);
        }
    }
    println!(
        "      GET: p50 {:.2} ms through the edge, {:.2} ms of a bare handler, {:.2} ms of one behind a bare proxy",
        median(ours.times.clone()),
        median(reference.times.clone()),
        median(least.times.clone())
    );
    vec![
        Row {
            what: format!("GET with a key through the edge, against a bare axum handler ({CALLERS} callers)"),
            ours: median(ours.rates),
            unit: "req/s",
            goal: Goal::AtLeast { reference: median(reference.rates.clone()), ratio: 0.5 },
        },
        Row {
            what: "the same, its 99th percentile".into(),
            ours: quantile(ours.times, 0.99),
            unit: "ms",
            goal: Goal::AtMost { reference: quantile(reference.times.clone(), 0.99), ratio: 3.0 },
        },
        Row {
            what: "a bare proxy of hyper before a bare handler on a Unix socket, against that handler alone".into(),
            ours: median(least.rates),
            unit: "req/s",
            goal: Goal::Against { reference: median(reference.rates) },
        },
        Row {
            what: "the same, its 99th percentile".into(),
            ours: quantile(least.times, 0.99),
            unit: "ms",
            goal: Goal::Against { reference: quantile(reference.times, 0.99) },
        },
    ]
}

#[derive(Default)]
struct Load {
    rates: Vec<f64>,
    /// Milliseconds.
    times: Vec<f64>,
}

impl Load {
    fn add(&mut self, more: Load) {
        self.rates.extend(more.rates);
        self.times.extend(more.times);
    }
}

fn ask(address: SocketAddr, head: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_nodelay(true).expect("nodelay");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("timeout");
    stream.write_all(head.as_bytes()).expect("write");
    stream
}

/// Body and status of the answer that comes.
fn answer(stream: &mut BufReader<TcpStream>) -> (Vec<u8>, bool) {
    let (mut length, mut well) = (0, None);
    loop {
        let mut line = String::new();
        assert!(stream.read_line(&mut line).expect("head") > 0, "the connection ended");
        well.get_or_insert(line.starts_with("HTTP/1.1 200"));
        let line = line.trim().to_ascii_lowercase();
        if let Some(told) = line.strip_prefix("content-length:") {
            length = told.trim().parse().expect("length");
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).expect("body");
    (body, well == Some(true))
}

/// As many as the callers get answered, one after the other each.
fn load(address: SocketAddr, head: &str) -> Load {
    let barrier = Barrier::new(CALLERS + 1);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS)
            .map(|_| {
                scope.spawn(|| {
                    let mut stream = BufReader::new(ask(address, head));
                    assert!(answer(&mut stream).1);
                    barrier.wait();
                    let mut times = Vec::with_capacity(REQUESTS);
                    for _ in 0..REQUESTS {
                        let began = Instant::now();
                        stream.get_mut().write_all(head.as_bytes()).expect("write");
                        assert!(answer(&mut stream).1, "not 200");
                        times.push(began.elapsed().as_secs_f64() * 1e3);
                    }
                    times
                })
            })
            .collect();
        barrier.wait();
        let began = Instant::now();
        let times: Vec<f64> = callers.into_iter().flat_map(|caller| caller.join().expect("caller")).collect();
        Load { rates: vec![(CALLERS * REQUESTS) as f64 / began.elapsed().as_secs_f64()], times }
    })
}

/// A reference, a process of its own as the edge is.
struct Bare {
    child: Child,
    at: String,
}

/// The word that makes this program a handler that answers one body: on TCP, or on the Unix socket named behind it.
pub const BARE: &str = "--bare-handler";

/// The word that makes this program a proxy before the Unix socket named behind it: what two hops cost that do nothing else.
pub const PROXY: &str = "--bare-proxy";

impl Bare {
    fn start(words: &[&str]) -> Self {
        let own = std::env::current_exe().expect("own path");
        let mut child =
            Command::new(own).args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("reference");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("address");
        Bare { at: line.trim().to_owned(), child }
    }

    fn address(&self) -> SocketAddr {
        self.at.parse().expect("address")
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tcp() -> tokio::net::TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    println!("{}", listener.local_addr().expect("address"));
    listener.set_nonblocking(true).expect("nonblocking");
    tokio::net::TcpListener::from_std(listener).expect("listener")
}

/// How many processors there are.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// As many threads as the edge has for connections, and pepod for the edge's: each hop of the floor has what ours have.
fn as_the_edge() -> usize {
    (processors() / 2).clamp(1, 4)
}

fn forever(threads: usize, work: impl Future<Output = ()>) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build().expect("runtime");
    runtime.block_on(work);
}

/// Serves this body at every path until it is killed, and says where.
pub fn bare_handler(body: String, socket: Option<&str>) {
    let handler = move || {
        let body = body.clone();
        async move { ([("content-type", "application/json")], body) }
    };
    let router = axum::Router::new().fallback(axum::routing::get(handler));
    forever(socket.map_or_else(processors, |_| as_the_edge()), async {
        match socket {
            None => axum::serve(tcp(), router).await,
            Some(path) => {
                let listener = tokio::net::UnixListener::bind(path).expect("bind");
                println!("{path}");
                axum::serve(listener, router).await
            }
        }
        .expect("serve");
    });
}

/// Passes every request to that socket until it is killed, each caller's on a connection of their own, and says where.
pub fn bare_proxy(socket: &str) {
    forever(as_the_edge(), async {
        let listener = tcp();
        loop {
            let (caller, _) = listener.accept().await.expect("accept");
            caller.set_nodelay(true).expect("nodelay");
            let upstream = tokio::net::UnixStream::connect(socket).await.expect("connect");
            let (sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(upstream)).await.expect("handshake");
            tokio::spawn(connection);
            let sender = std::sync::Arc::new(tokio::sync::Mutex::new(sender));
            let pass = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                let sender = sender.clone();
                async move { sender.lock().await.send_request(request).await }
            });
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(caller), pass));
        }
    });
}
