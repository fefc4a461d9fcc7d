//! Ports by host names of their own: where a name leads, what strangers may, and that nothing else is reachable by one.

#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod world;

use std::time::Duration;

use pepo_api::{EdgePort, EdgeState, PortName, SessionId, TokenClaims};
use pepo_edge::config::Limits;
use pepo_edge::handler::Rules;
use pepo_edge::rate::Rate;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use world::{Fixture, KEY, LONG, Options, TOKEN_KEY, exchange, key, start, status};

const DOMAIN: &str = "preview.example.com";

fn options() -> Options {
    let usual = Options::default();
    let domain = Some(DOMAIN.parse().expect("domain"));
    Options { rules: Rules { domain, ..usual.rules.clone() }, ..usual }
}

fn port(port: u16) -> PortName {
    PortName { session: SessionId::generate(), port }
}

fn host(of: PortName) -> String {
    format!("{}-{}.{DOMAIN}", of.port, of.session.hex())
}

async fn ask(f: &Fixture, method: &str, host: &str, path: &str, more: &str, body: &str) -> String {
    let head = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{more}\r\n{body}");
    exchange(f.address, head).await
}

async fn get(f: &Fixture, host: &str, path: &str) -> String {
    ask(f, "GET", host, path, "", "").await
}

fn bearer(credential: &str) -> String {
    format!("authorization: Bearer {credential}\r\n")
}

fn publish(state: &mut EdgeState, of: PortName, seconds: i64) {
    let expires_at = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds);
    let app_id = state.apps[0].id;
    state.published.push(EdgePort { app_id, session_id: of.session, port: of.port, expires_at });
}

/// An answer without what is each one's own.
fn plain(answer: &str) -> String {
    let lines = answer.split("\r\n").filter(|line| !line.starts_with("pepo-request-id") && !line.starts_with("date"));
    let text = lines.collect::<Vec<_>>().join("\n");
    match text.find("\"request_id\":\"") {
        Some(at) => format!("{}{}", &text[..at], &text[at + 14 + 36..]),
        None => text,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_leads_to_its_port_whatever_the_path() {
    let f = start(options()).await;
    let of = port(3000);
    let base = format!("/v1/sessions/{}/ports/3000", of.session);
    let paths =
        ["/", "/v1/sessions?x=1", "/healthz", "/readyz", "/openapi.json", "/docs", "//a//b", "/v1/keys", "/%2f"];
    for path in paths {
        let answer = ask(&f, "GET", &host(of), path, &bearer(KEY), "").await;
        assert_eq!(status(&answer), 200, "{path}: {answer}");
        let asked = f.daemon.asked().pop().expect("asked");
        assert_eq!((asked.method.as_str(), asked.target), ("GET", format!("{base}{path}")));
        assert_eq!(
            (&asked.headers["pepo-named"], &asked.headers["host"]),
            (&"credential".parse().expect("value"), &"pepod".parse().expect("value"))
        );
    }
    for (method, body) in
        [("HEAD", ""), ("OPTIONS", ""), ("POST", "hello"), ("PUT", "hello"), ("PATCH", "hello"), ("DELETE", "hello")]
    {
        let length = if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
        let given = format!("{}{length}cookie: a=b\r\npepo-named: anybody\r\nx-own: 1\r\n", bearer(KEY));
        let answer = ask(&f, method, &format!("{}:7070", host(of).to_uppercase()), "/a", &given, body).await;
        assert_eq!(status(&answer), 200, "{method}: {answer}");
        let asked = f.daemon.asked().pop().expect("asked");
        assert_eq!(
            (asked.method.as_str(), asked.target, &asked.body[..]),
            (method, format!("{base}/a"), body.as_bytes())
        );
        assert_eq!(asked.headers.get_all("pepo-named").iter().collect::<Vec<_>>(), ["credential"]);
        assert!(!asked.headers.contains_key("authorization") && !asked.headers.contains_key("cookie"));
        assert_eq!(asked.headers["x-own"], "1");
    }
    // On the API's own hosts nothing of it is said.
    let path = format!("{base}/a");
    assert_eq!(status(&f.get(&path, KEY, "pepo-named: anybody\r\n").await), 200);
    assert!(!f.daemon.asked().pop().expect("asked").headers.contains_key("pepo-named"));
    // What may be refused of a path is refused here too.
    for path in ["/a/../b", "/%2e%2e/x", "*"] {
        let method = if path == "*" { "OPTIONS" } else { "GET" };
        assert_eq!(status(&ask(&f, method, &host(of), path, &bearer(KEY), "").await), 404, "{path}");
    }
    assert_eq!(status(&ask(&f, "PROPFIND", &host(of), "/", &bearer(KEY), "").await), 405);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_ports_name_reaches_neither_a_port_nor_the_api() {
    let f = start(options()).await;
    let own = host(port(3000));
    let hex = &own[5..37];
    let nobodys = [
        format!("www.{DOMAIN}"),
        format!(".{DOMAIN}"),
        format!("{hex}.{DOMAIN}"),
        format!("03000-{hex}.{DOMAIN}"),
        format!("70000-{hex}.{DOMAIN}"),
        format!("x.{own}"),
        format!("{own}."),
        format!("{own}.:7070"),
        format!("{own}:x"),
        format!("WWW.{}", DOMAIN.to_uppercase()),
    ];
    let unknown = plain(&get(&f, &own, "/").await);
    assert!(unknown.starts_with("HTTP/1.1 401 "), "{unknown}");
    for name in &nobodys {
        for path in ["/", "/v1/sessions", "/healthz", "/openapi.json", "/docs"] {
            assert_eq!(plain(&get(&f, name, path).await), unknown, "{name}{path}");
            let with_key = ask(&f, "GET", name, path, &bearer(KEY), "").await;
            assert_eq!(status(&with_key), 404, "{name}{path}: {with_key}");
        }
    }
    assert!(f.daemon.asked().is_empty(), "{:?}", f.daemon.asked());
    // What is not below the domain is the API's, as ever.
    for name in
        [format!("{own}.evil"), format!("{own}.evil:7070"), DOMAIN.into(), format!("x{DOMAIN}"), "127.0.0.1".into()]
    {
        assert_eq!(status(&get(&f, &name, "/healthz").await), 200, "{name}");
        assert_eq!(status(&ask(&f, "GET", &name, "/v1/sessions", &bearer(KEY), "").await), 200, "{name}");
        assert_eq!(f.daemon.asked().pop().expect("asked").target, "/v1/sessions");
    }
    let two = format!("GET / HTTP/1.1\r\nhost: {own}\r\nhost: x\r\nconnection: close\r\n{}\r\n", bearer(KEY));
    assert_eq!(status(&exchange(f.address, two).await), 400);
    let proxys = format!("GET http://{own}/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{}\r\n", bearer(KEY));
    assert_eq!(status(&exchange(f.address, proxys).await), 400);
    // Without a domain such a host is any host.
    let f = start(Options::default()).await;
    assert_eq!(status(&get(&f, &own, "/healthz").await), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_that_is_not_published_takes_a_credential_that_opens_it() {
    let f = start(options()).await;
    let of = port(3000);
    let name = host(of);
    f.daemon
        .change(|state| {
            state.keys.as_mut().expect("keys").push(key(state.apps[0].id, "pepo_reads", &["sessions:read"]))
        })
        .await;
    let claims = |scope: &str, port| TokenClaims {
        app: f.app,
        session: of.session,
        scopes: vec![scope.parse().expect("scope")],
        port,
        key: Some(f.key),
        made: jiff::Timestamp::now().as_millisecond(),
        until: jiff::Timestamp::now().as_millisecond() + 60_000,
    };
    let token = claims("ports:connect", Some(3000)).sign(&TOKEN_KEY);
    let with = async |credential: &str, name: &str| status(&ask(&f, "GET", name, "/", &bearer(credential), "").await);
    assert_eq!(with(KEY, &name).await, 200);
    assert_eq!(with(&token, &name).await, 200);
    assert_eq!(with(&token, &host(PortName { port: 3001, ..of })).await, 403);
    assert_eq!(with(&token, &host(port(3000))).await, 403, "another Session");
    assert_eq!(with(&claims("ports:connect", Some(3001)).sign(&TOKEN_KEY), &name).await, 403);
    assert_eq!(with("pepo_reads", &name).await, 403);
    assert_eq!(with("pepo_wrong", &name).await, 401);
    assert_eq!(status(&ask(&f, "GET", &name, "/", &format!("cookie: token={token}\r\n"), "").await), 401);
    assert_eq!(
        status(&get(&f, &format!("3000-{}.{DOMAIN}", of.session.hex()), &format!("/?token={token}")).await),
        401
    );
    // A browser's WebSocket names it among its protocols.
    let head = format!(
        "GET /live HTTP/1.1\r\nhost: {name}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-protocol: pepo.port.v1, pepo.bearer.{token}\r\n\r\n"
    );
    let mut socket = TcpStream::connect(f.address).await.expect("connect");
    socket.write_all(head.as_bytes()).await.expect("write");
    let mut bytes = [0; 4096];
    let read = tokio::time::timeout(LONG, socket.read(&mut bytes)).await.expect("in time").expect("read");
    let answer = String::from_utf8_lossy(&bytes[..read]);
    assert!(status(&answer) == 101 && answer.contains("sec-websocket-protocol: pepo.port.v1"), "{answer}");
    let asked = f.daemon.asked().pop().expect("asked");
    assert!(!format!("{:?}", asked.headers).contains("pepot_"), "{asked:?}");
    assert_eq!(asked.target, format!("/v1/sessions/{}/ports/3000/live", of.session));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_published_port_is_anybodys_and_nothing_beside_it_is() {
    let f = start(options()).await;
    let (of, over) = (port(3000), port(4000));
    f.daemon
        .change(|state| {
            publish(state, of, 600);
            publish(state, over, -1);
        })
        .await;
    let name = host(of);
    let posted =
        ask(&f, "POST", &name, "/form?a=b", "content-length: 5\r\ncookie: session=1\r\nx-own: 1\r\n", "hello").await;
    assert_eq!(status(&posted), 200, "{posted}");
    assert!(posted.contains("ratelimit-remaining: "), "{posted}");
    let asked = f.daemon.asked().pop().expect("asked");
    assert_eq!(
        (asked.target, &asked.body[..]),
        (format!("/v1/sessions/{}/ports/3000/form?a=b", of.session), &b"hello"[..])
    );
    let mut ours: Vec<_> = asked
        .headers
        .iter()
        .filter(|(name, _)| name.as_str().starts_with("pepo-"))
        .map(|(name, value)| format!("{name}: {}", value.to_str().expect("text")))
        .collect();
    ours.retain(|line| !line.starts_with("pepo-request-id"));
    ours.sort_unstable();
    let wanted = [
        format!("pepo-actor: anybody:{}:3000", of.session),
        format!("pepo-app: {}", f.app),
        "pepo-named: anybody".to_owned(),
        "pepo-source: 127.0.0.1".to_owned(),
    ];
    assert_eq!(ours, wanted);
    assert!(!asked.headers.contains_key("cookie") && asked.headers["x-own"] == "1");

    // The API's form of it, its neighbours and all that is of others are as ever.
    let unknown = plain(&get(&f, &host(port(3000)), "/").await);
    assert!(unknown.starts_with("HTTP/1.1 401 "), "{unknown}");
    for other in [PortName { port: 3001, ..of }, PortName { session: SessionId::generate(), ..of }, over] {
        assert_eq!(plain(&get(&f, &host(other), "/").await), unknown, "{other}");
    }
    let by_path = get(&f, "x", &format!("/v1/sessions/{}/ports/3000/", of.session)).await;
    assert_eq!(status(&by_path), 401, "{by_path}");
    assert_eq!(status(&get(&f, "x", "/v1/sessions").await), 401);

    // A credential that opens it is its holder's; one that does not is no worse than none.
    let by = async |more: &str| {
        assert_eq!(status(&ask(&f, "GET", &name, "/", more, "").await), 200, "{more}");
        let asked = f.daemon.asked().pop().expect("asked");
        assert!(!asked.headers.contains_key("authorization"));
        asked.headers["pepo-named"].to_str().expect("text").to_owned()
    };
    assert_eq!(by(&bearer(KEY)).await, "credential");
    assert_eq!(by(&bearer("pepo_wrong")).await, "anybody");
    assert_eq!(by("authorization: Basic YTpi\r\n").await, "anybody");

    // Withdrawn is as never made.
    f.daemon.change(|state| state.published.clear()).await;
    assert_eq!(plain(&get(&f, &name, "/").await), unknown);
    assert_eq!(status(&ask(&f, "GET", &name, "/", &bearer(KEY), "").await), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_come_from_where_the_app_takes_callers_and_while_pepod_can_be_asked() {
    let f = start(options()).await;
    let of = port(80);
    f.daemon.change(|state| publish(state, of, 600)).await;
    assert_eq!(status(&get(&f, &host(of), "/").await), 200);
    f.daemon.change(|state| state.apps[0].sources = vec!["192.0.2.0/24".into()]).await;
    assert_eq!(status(&get(&f, &host(of), "/").await), 401);
    f.daemon.change(|state| state.apps[0].sources = vec![]).await;
    assert_eq!(status(&get(&f, &host(of), "/").await), 200);
    f.daemon.mute.store(true, std::sync::atomic::Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert_eq!(status(&get(&f, &host(of), "/").await), 401, "nobody knows whether it still is");
    assert_eq!(status(&ask(&f, "GET", &host(of), "/", &bearer(KEY), "").await), 503);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_stranger_has_open_ends_when_the_port_is_withdrawn_or_over() {
    let f = start(options()).await;
    let (of, brief) = (port(80), port(81));
    f.daemon
        .change(|state| {
            publish(state, of, 600);
            publish(state, brief, 4);
        })
        .await;
    let open = async |of: PortName, more: &str| {
        let mut socket = TcpStream::connect(f.address).await.expect("connect");
        let head = format!(
            "GET /live HTTP/1.1\r\nhost: {}\r\nconnection: upgrade\r\nupgrade: websocket\r\n{more}\r\n",
            host(of)
        );
        socket.write_all(head.as_bytes()).await.expect("write");
        let mut bytes = [0; 4096];
        let read = tokio::time::timeout(LONG, socket.read(&mut bytes)).await.expect("in time").expect("read");
        assert_eq!(status(&String::from_utf8_lossy(&bytes[..read])), 101);
        socket.write_all(b"hello").await.expect("write");
        let mut echo = [0; 5];
        tokio::time::timeout(LONG, socket.read_exact(&mut echo)).await.expect("in time").expect("read");
        assert_eq!(&echo, b"HELLO");
        socket
    };
    let ends = async |mut socket: TcpStream| {
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(LONG, socket.read_to_end(&mut rest)).await.expect("it ends");
    };
    let (mut known, stranger, over) = (open(of, &bearer(KEY)).await, open(of, "").await, open(brief, "").await);
    ends(over).await;
    let ending = tokio::spawn(async move { (ends)(stranger).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!ending.is_finished());
    f.daemon.change(|state| state.published.clear()).await;
    ending.await.expect("the stranger's ends");
    // Who has a credential needs no publication.
    known.write_all(b"again").await.expect("write");
    let mut echo = [0; 5];
    tokio::time::timeout(LONG, known.read_exact(&mut echo)).await.expect("in time").expect("read");
    assert_eq!(&echo, b"AGAIN");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_strangers_is_told_to_wait_and_callers_are_not() {
    let usual = options();
    let limits = Limits { public: Rate::of(4), ..usual.rules.limits };
    let f = start(Options { rules: Rules { limits, ..usual.rules.clone() }, ..usual }).await;
    let of = port(80);
    f.daemon.change(|state| publish(state, of, 600)).await;
    let name = host(of);
    let flood = futures_util::future::join_all((0..60).map(|_| get(&f, &name, "/"))).await;
    let passed = flood.iter().filter(|answer| status(answer) == 200).count();
    assert!((4..60).contains(&passed), "{passed}");
    let refused = flood.iter().find(|answer| status(answer) == 429).expect("refused");
    assert!(refused.contains("retry-after: ") && refused.contains("\"code\":\"too_many_requests\""), "{refused}");
    for _ in 0..10 {
        assert_eq!(status(&ask(&f, "GET", &host(of), "/", &bearer(KEY), "").await), 200);
        assert_eq!(status(&f.get("/v1/sessions", KEY, "").await), 200);
    }
    // Gathered for the log as nobody's.
    let told = f.told(|decision| decision.code == pepo_api::ErrorCode::TooManyRequests).await;
    let told = told.iter().find(|decision| decision.code == pepo_api::ErrorCode::TooManyRequests).expect("told");
    assert_eq!((told.route.as_str(), told.app_id, told.actor.as_deref()), ("port_get", None, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_have_a_part_of_what_runs_at_once() {
    let usual = options();
    let f = start(Options { rules: Rules { streams: 16, ..usual.rules.clone() }, ..usual }).await;
    let of = port(80);
    f.daemon.change(|state| publish(state, of, 600)).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(f.address).await.expect("connect");
        stream.write_all(format!("GET /hang HTTP/1.1\r\nhost: {}\r\n\r\n", host(of)).as_bytes()).await.expect("write");
        held.push(stream);
    }
    let full = async {
        while f.daemon.asked().len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, full).await.expect("both run");
    let refused = get(&f, &host(of), "/").await;
    assert!(status(&refused) == 429 && refused.contains("\"name\":\"streams\""), "{refused}");
    assert_eq!(status(&ask(&f, "GET", &host(of), "/", &bearer(KEY), "").await), 200);
    drop(held);
    let free = async {
        while status(&get(&f, &host(of), "/").await) != 200 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, free).await.expect("a place is free again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_known_origins_may_call_a_port_and_a_published_one_decides_itself() {
    let usual = options();
    let origins = vec!["https://app.example.com".to_owned()];
    let f = start(Options { rules: Rules { origins, ..usual.rules.clone() }, ..usual }).await;
    let (of, public) = (port(80), port(81));
    f.daemon.change(|state| publish(state, public, 600)).await;
    let page = "origin: https://app.example.com\r\n";
    let asks = format!("{page}access-control-request-method: POST\r\n");
    let preflight = ask(&f, "OPTIONS", &host(of), "/", &asks, "").await;
    assert_eq!(status(&preflight), 204, "{preflight}");
    let read = ask(&f, "GET", &host(of), "/", &format!("{page}{}", bearer(KEY)), "").await;
    assert!(read.contains("access-control-allow-origin: https://app.example.com"), "{read}");
    let own = ask(&f, "OPTIONS", &host(public), "/", &asks, "").await;
    assert!(status(&own) == 200 && !own.contains("allow-origin"), "its program answers: {own}");
    assert_eq!(f.daemon.asked().pop().expect("asked").method, "OPTIONS");
    let evil = ask(
        &f,
        "OPTIONS",
        &host(of),
        "/",
        "origin: https://evil.example\r\naccess-control-request-method: GET\r\n",
        "",
    )
    .await;
    assert_eq!(status(&evil), 401, "{evil}");
}
