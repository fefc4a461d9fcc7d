//! HTTP to a port of a guest that is a host process, so that what listens there is this test: what reaches a program, and
//! what a hostile one can do with its answer.

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic)]

mod daemon;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use daemon::{Daemon, Options, within};
use pepo_api::client::Client;
use pepo_api::query::{ListEvents, ShowSession};
use pepo_api::{CreateSession, Event, SessionState};

/// A program on a port, and the requests that it was sent.
struct Program {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Program {
    /// Answers what `answer` makes of each request; then it closes.
    fn start(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let port = listener.local_addr().expect("address").port();
        let (asked, answer) = (Arc::new(Mutex::new(Vec::new())), Arc::new(answer));
        let seen = asked.clone();
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, seen, answer) = (stream.expect("connection"), seen.clone(), answer.clone());
                std::thread::spawn(move || {
                    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("time-out");
                    let request = whole(&mut stream);
                    seen.lock().expect("lock").push(request.clone());
                    answer(&request, &mut stream);
                });
            }
        });
        Program { port, asked }
    }

    /// Answers these bytes, whatever it is asked.
    fn saying(bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        Self::start(move |_, stream| {
            // A caller that has enough goes away.
            let _ = stream.write_all(&bytes);
        })
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().expect("lock").clone()
    }
}

/// A request with its body.
fn whole(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some(at) = text.find("\r\n\r\n") {
            let head = text[..at].to_lowercase();
            let length = head
                .split("content-length: ")
                .nth(1)
                .map_or(0, |rest| rest.split("\r\n").next().expect("value").parse().expect("length"));
            let chunked = head.contains("transfer-encoding: chunked");
            if (chunked && text.ends_with("0\r\n\r\n")) || (!chunked && bytes.len() >= at + 4 + length) {
                return text;
            }
        }
        match stream.read(&mut piece) {
            Ok(0) => return text,
            Ok(read) => bytes.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return text,
        }
    }
}

struct World {
    daemon: Daemon,
    client: Client,
    app: String,
    session: String,
}

async fn world() -> World {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let made = client.session_create(&CreateSession::default()).await.expect("session");
    World { daemon, client, app: made.app_id.to_string(), session: made.id.to_string() }
}

impl World {
    /// What the edge is answered for this request to a port, with these further headers.
    fn ask(&self, method: &str, port: u16, path: &str, more: &str, body: &str) -> String {
        let (app, session) = (&self.app, &self.session);
        self.daemon.as_edge(&format!(
            "{method} /v1/sessions/{session}/ports/{port}{path} HTTP/1.1\r\nHost: pepod\r\nPepo-App: {app}\r\n\
             Pepo-Source: 192.0.2.1\r\nPepo-Actor: idp:corp:me\r\nConnection: close\r\n{more}\r\n{body}"
        ))
    }

    /// The audit log, once something of that kind is in it: it is written down while the answer is on its way.
    async fn noted(&self, kind: &str) -> Vec<Event> {
        let noting = async {
            loop {
                let audit = self.client.audit_list(&ListEvents::default()).await.expect("audit").items;
                if audit.iter().any(|event| event.kind == kind) {
                    return audit;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        within(60, noting).await
    }

    fn get(&self, program: &Program) -> String {
        self.ask("GET", program.port, "/", "", "")
    }
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("no status in {answer:?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_is_asked_and_answers_and_neither_sees_what_is_not_its_own() {
    let w = world().await;
    let program = Program::start(|request, stream| {
        let answer = match request.split(' ').nth(1).expect("path") {
            "/missing" => {
                "HTTP/1.1 404 Nothing Here\r\ncontent-type: text/html\r\ncontent-length: 4\r\n\r\nnone".into()
            }
            "/go" => "HTTP/1.1 302 Found\r\nlocation: /there?x\r\ncontent-length: 0\r\n\r\n".into(),
            "/old" => "HTTP/1.0 200 OK\r\n\r\nuntil the end".into(),
            "/pieces" => {
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\nx-late: 1\r\n\r\n"
                    .into()
            }
            _ => format!(
                "HTTP/1.1 200 OK\r\nset-cookie: a=b\r\naccess-control-allow-origin: *\r\npepo-activation: 77\r\nx-own: 1\r\n\
                 connection: close, x-hop\r\nx-hop: 1\r\ncontent-length: {}\r\n\r\n{request}",
                request.len()
            ),
        };
        stream.write_all(answer.as_bytes()).expect("write");
    });
    let port = program.port;

    let answer = w.ask("GET", port, "/a//b%2fc?d=e&f", "Accept: text/html\r\nX-Forwarded-For: 192.0.2.1\r\n", "");
    assert_eq!(status(&answer), 200, "{answer}");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let head = head.to_lowercase();
    assert!(body.starts_with("GET /a//b%2fc?d=e&f HTTP/1.1\r\n"), "{body}");
    let told = body.to_lowercase();
    assert!(told.contains(&format!("host: localhost:{port}\r\n")) && told.contains("accept: text/html"), "{body}");
    for ours in ["pepo-", "x-forwarded", "idp:corp", "192.0.2.1", "connection: close"] {
        assert!(!told.contains(ours), "{ours}: {body}");
    }
    for theirs in ["set-cookie", "access-control", "activation: 77", "x-hop"] {
        assert!(!head.contains(theirs), "{theirs}: {head}");
    }
    for there in
        ["x-own: 1", "pepo-activation: 1", "content-security-policy: sandbox", "nosniff", "pepo-request-id: req_"]
    {
        assert!(head.contains(there), "{there}: {head}");
    }

    let posted = w.ask("POST", port, "/", "Content-Length: 5\r\n", "hello");
    assert!(status(&posted) == 200 && posted.ends_with("\r\n\r\nhello"), "{posted}");
    let pieces = w.ask("PUT", port, "/", "Transfer-Encoding: chunked\r\n", "5\r\nhello\r\n0\r\n\r\n");
    assert!(status(&pieces) == 200 && pieces.contains("5\r\nhello\r\n0\r\n"), "{pieces}");
    for method in ["HEAD", "OPTIONS", "PATCH", "DELETE"] {
        let more = if method == "PATCH" { "Content-Length: 0\r\n" } else { "" };
        assert_eq!(status(&w.ask(method, port, "/", more, "")), 200, "{method}");
        assert!(program.asked().last().expect("asked").starts_with(method));
    }

    let missing = w.ask("GET", port, "/missing", "", "");
    assert!(status(&missing) == 404 && missing.ends_with("none"), "what it answers is not ours to replace: {missing}");
    let moved = w.ask("GET", port, "/go", "", "").to_lowercase();
    assert!(moved.contains(&format!("location: /v1/sessions/{}/ports/{port}/there?x\r\n", w.session)), "{moved}");
    let old = w.ask("GET", port, "/old", "", "");
    assert!(status(&old) == 200 && old.contains("until the end"), "{old}");
    let pieces = w.ask("GET", port, "/pieces", "", "");
    assert!(pieces.contains("one") && pieces.contains("two") && !pieces.contains("x-late"), "{pieces}");

    // What changes something there is in the log, with its port and without a path; a look is not.
    let audit = w.noted("port_delete").await;
    let count = |kind: &str| audit.iter().filter(|event| event.kind == kind).count();
    assert_eq!((count("port_get"), count("port_head"), count("port_post")), (0, 0, 1), "{audit:?}");
    let noted = audit.iter().find(|event| event.kind == "port_post").expect("noted");
    assert_eq!(
        (noted.detail["port"].as_str(), noted.detail.get("rest")),
        (Some(&*port.to_string()), None),
        "{noted:?}"
    );
    w.daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hostile_answer_is_bounded_and_counts_for_nothing_else() {
    let w = world().await;
    let ok = "HTTP/1.1 200 OK\r\n";
    let refused = [
        ("no HTTP", "SSH-2.0-OpenSSH_9.2\r\n\r\n".to_owned()),
        ("nothing", String::new()),
        ("a long line", format!("HTTP/1.1 200 {}\r\n\r\n", "x".repeat(1 << 20))),
        ("a large header", format!("{ok}x: {}\r\n\r\n", "y".repeat(1 << 20))),
        ("many headers", format!("{ok}{}\r\n", "a: b\r\n".repeat(5000))),
        ("a head without an end", format!("{ok}{}", "a: b\r\n".repeat(50))),
        ("two lengths", format!("{ok}content-length: 5\r\ncontent-length: 6\r\n\r\nhello!")),
        ("a length that is none", format!("{ok}content-length: -1\r\n\r\nhello")),
        ("a folded header", format!("{ok}x: a\r\n b: c\r\ncontent-length: 0\r\n\r\n")),
        ("a bare NUL", format!("{ok}x: a\0b\r\ncontent-length: 0\r\n\r\n")),
        (
            "another protocol",
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nraw".to_owned(),
        ),
        ("HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned()),
    ];
    for (what, bytes) in refused {
        let answer = w.get(&Program::saying(bytes));
        assert_eq!(status(&answer), 502, "{what}: {}", &answer[..answer.len().min(500)]);
        assert!(answer.contains(r#""code":"guest_failed""#), "{what}: {answer}");
        assert!(answer.len() < 2000, "{what}: {answer}");
    }
    // One answer is one, whatever stands behind it.
    let two = format!("{ok}content-length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\npepo-request-id: forged\r\n\r\nsecond");
    let answer = w.get(&Program::saying(two));
    assert!(status(&answer) == 200 && answer.ends_with("\r\n\r\nhello"), "{answer}");
    // Of a length and pieces the pieces count, and the length goes no further.
    let both = format!("{ok}content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n");
    let answer = w.get(&Program::saying(both));
    assert!(status(&answer) == 502 || (answer.contains("hello") && !answer.contains("content-length: 3")), "{answer}");
    // One whose pieces nobody can tell ends with the connection, and of its length nothing is believed.
    let odd = format!("{ok}transfer-encoding: chunked, gzip\r\ncontent-length: 3\r\n\r\n5\r\nhello\r\n0\r\n\r\n");
    let answer = w.get(&Program::saying(odd));
    assert!(status(&answer) == 502 || !answer.contains("content-length: 3"), "{answer}");
    // A body that breaks off is not made to look whole.
    let short = w.get(&Program::saying(format!("{ok}content-length: 100\r\n\r\nhello")));
    assert!(short.contains("content-length: 100") && short.ends_with("hello"), "{short}");
    let short = w.get(&Program::saying(format!("{ok}transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nff")));
    assert!(short.contains("hello") && !short.ends_with("0\r\n\r\n"), "{short}");
    // Nor do such programs cost anybody else anything.
    let gone = TcpListener::bind("127.0.0.1:0").expect("bind").local_addr().expect("address").port();
    let none = w.ask("GET", gone, "/", "", "");
    assert!(status(&none) == 502 && none.contains("nothing listens on port"), "{none}");
    for (port, wanted) in [("0", 422), ("65536", 422), ("x", 422), ("%30", 422)] {
        let (app, session) = (&w.app, &w.session);
        let path = format!("/v1/sessions/{session}/ports/{port}/");
        let answer = w
            .daemon
            .as_edge(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nPepo-App: {app}\r\nConnection: close\r\n\r\n"));
        assert_eq!(status(&answer), wanted, "{port}: {answer}");
    }
    assert_eq!(status(&w.get(&Program::saying(format!("{ok}content-length: 0\r\n\r\n")))), 200);
    w.daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_reaches_the_program_that_wants_one() {
    let w = world().await;
    let echo = Program::start(|_, stream| {
        let head = "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\nsec-websocket-accept: x\r\n\
             sec-websocket-protocol: chat\r\nset-cookie: a=b\r\n\r\n";
        stream.write_all(head.as_bytes()).expect("write");
        let mut bytes = [0; 5];
        stream.read_exact(&mut bytes).expect("read");
        stream.write_all(&bytes.map(|byte| byte.to_ascii_uppercase())).expect("write");
    });
    let upgrade = |path: &str, port: u16, body: &str| {
        let (app, session) = (&w.app, &w.session);
        w.daemon.as_edge(&format!(
            "GET /v1/sessions/{session}/ports/{port}{path} HTTP/1.1\r\nHost: pepod\r\nPepo-App: {app}\r\n\
             Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: chat\r\n\r\n{body}"
        ))
    };
    let answer = upgrade("/live", echo.port, "hello").to_lowercase();
    assert_eq!(status(&answer), 101, "{answer}");
    assert!(answer.ends_with("\r\n\r\nhello") || answer.contains("hello"), "{answer}");
    assert!(answer.contains("sec-websocket-protocol: chat") && answer.contains("upgrade: websocket"), "{answer}");
    assert!(!answer.contains("set-cookie"), "{answer}");
    let asked = echo.asked()[0].to_lowercase();
    assert!(asked.starts_with("get /live http/1.1") && asked.contains("upgrade: websocket"), "{asked}");
    // One that wants none answers as it likes.
    let plain = Program::saying("HTTP/1.1 426 Upgrade Required\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno");
    let answer = w.ask("GET", plain.port, "/", "Upgrade: websocket\r\n", "");
    assert!(status(&answer) == 426 && answer.ends_with("no"), "{answer}");
    // A way in is noted, though it is a GET.
    w.noted("port_get").await;
    w.daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_whose_port_is_spoken_to_is_used() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let brief = CreateSession { keep_alive_seconds: Some(0), ..Default::default() };
    let made = client.session_create(&brief).await.expect("session");
    let w = World { client: client.clone(), app: made.app_id.to_string(), session: made.id.to_string(), daemon };
    let slow = Program::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n").expect("write");
        for byte in b"seconds..".chunks(1) {
            std::thread::sleep(Duration::from_secs(1));
            stream.write_all(byte).expect("write");
        }
    });
    let answer = w.get(&slow);
    assert!(answer.ends_with("seconds.."), "longer than it stays unused: {answer}");
    let shown = client.session_show(&w.session, &ShowSession::default()).await.expect("show");
    assert_eq!(shown.state, SessionState::Active);
    within(60, daemon::ended(&client, &w.session)).await;
    w.daemon.end().await;
}
