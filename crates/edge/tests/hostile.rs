//! Hostile callers: what they send, how slowly, how much of it, and as whom. Each must cost them and not the others.

#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod world;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pepo_api::{Audience, ErrorCode, ROUTES, SessionId, TokenClaims};
use pepo_edge::config::Limits;
use pepo_edge::handler::Rules;
use pepo_edge::net::Ranges;
use pepo_edge::rate::Rate;
use pepo_edge::server::Bounds;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use world::{Fixture, KEY, LONG, Options, TOKEN_KEY, exchange, key, request, start, status};

fn with_limits(limits: Limits) -> Options {
    let usual = Options::default();
    Options { rules: Rules { limits, ..usual.rules }, ..usual }
}

/// A request that is sent whole and read to its end, and how long that took.
async fn timed(f: &Fixture, credential: &str) -> (u16, Duration) {
    let began = Instant::now();
    let answer = f.get("/v1/sessions", credential, "").await;
    (status(&answer), began.elapsed())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_heads_are_cut_while_others_are_served() {
    let f = start(Options::default()).await;
    let mut slow = Vec::new();
    for _ in 0..100 {
        let mut stream = TcpStream::connect(f.address).await.expect("connect");
        stream.write_all(b"GET /v1/sessions HTTP/1.1\r\nhost: x\r\n").await.expect("write");
        slow.push(stream);
    }
    assert_eq!(timed(&f, KEY).await.0, 200, "beside a hundred slow ones");
    // Drop by drop: no drop starts the time anew.
    let began = Instant::now();
    for stream in &mut slow {
        for _ in 0..3 {
            let _ = stream.write_all(b"x: y\r\n").await;
        }
    }
    for mut stream in slow {
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(LONG, stream.read_to_end(&mut rest)).await.expect("cut");
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!(f.daemon.asked().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_are_bounded_in_every_direction() {
    let f = start(Options::default()).await;
    let bombs = [
        format!("GET /v1/sessions HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "y".repeat(64 * 1024)),
        format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "y".repeat(64 * 1024)),
        format!("GET /v1/sessions HTTP/1.1\r\nhost: x\r\n{}\r\n", "a: b\r\n".repeat(5000)),
        format!("{} /v1/sessions HTTP/1.1\r\nhost: x\r\n\r\n", "G".repeat(64 * 1024)),
    ];
    for bomb in bombs {
        let mut stream = TcpStream::connect(f.address).await.expect("connect");
        // What is refused in the middle of it may be reset.
        let _ = stream.write_all(bomb.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(LONG, stream.read_to_end(&mut answer)).await.expect("an end");
        let text = String::from_utf8_lossy(&answer);
        assert!(text.is_empty() || status(&text) >= 400, "{}", &text[..text.len().min(200)]);
    }
    // As many as may be, and a credential that is as long as may be.
    let long = "k".repeat(8000);
    assert_eq!(status(&f.get("/v1/sessions", &long, "").await), 401);
    assert!(f.daemon.asked().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_smuggled_behind_another_request() {
    let f = start(Options::default()).await;
    let inner = format!(
        "POST /v1/sessions/own/commands HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 0\r\n\r\n"
    );
    let with = |head: &str, body: &str| format!("{head}\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n{body}");
    let post = "POST /v1/sessions HTTP/1.1";
    // Each must reach the daemon as one request, or be refused and end the connection; `inner` is never one of its own.
    let attempts = [
        with(&format!("{post}\r\ncontent-length: {}\r\ncontent-length: 0", inner.len()), &inner),
        with(&format!("{post}\r\ncontent-length: 0, {}", inner.len()), &inner),
        with(&format!("{post}\r\ncontent-length: 0x10"), &inner),
        with(&format!("{post}\r\ncontent-length : 0"), &inner),
        with(
            &format!("{post}\r\ntransfer-encoding: chunked\r\ntransfer-encoding: identity"),
            &format!("0\r\n\r\n{inner}"),
        ),
        with(&format!("{post}\r\ntransfer-encoding : chunked"), &format!("0\r\n\r\n{inner}")),
        with(&format!("{post}\r\ntransfer-encoding:\x0bchunked"), &format!("0\r\n\r\n{inner}")),
        with(&format!("{post}\r\nx: a\r\n transfer-encoding: chunked"), &format!("0\r\n\r\n{inner}")),
        with("GET /v1/sessions HTTP/1.1\r\ncontent-length: 10", &inner),
        with(&format!("{post}\r\ntransfer-encoding: chunked"), &format!("-1\r\n{inner}")),
        with(&format!("{post}\r\ntransfer-encoding: chunked"), &format!("ffffffffffffffff1\r\n{inner}")),
    ];
    for attempt in &attempts {
        let mut stream = TcpStream::connect(f.address).await.expect("connect");
        stream.write_all(attempt.as_bytes()).await.expect("write");
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(LONG, stream.read_to_end(&mut answer)).await;
        let text = String::from_utf8_lossy(&answer);
        assert!(text.is_empty() || status(&text) == 400, "{attempt:?}\n{text}");
        assert_eq!(text.matches("HTTP/1.1 ").count().max(1), 1, "{attempt:?}\n{text}");
    }
    assert!(f.daemon.asked().is_empty(), "{:?}", f.daemon.asked());
    // Two that are whole are two.
    let two = request("GET /v1/sessions HTTP/1.1", "").replace("connection: close\r\n", "")
        + &request("GET /v1/sessions HTTP/1.1", "");
    assert_eq!(exchange(f.address, two).await.matches("HTTP/1.1 200").count(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_path_leads_out_of_the_table() {
    let f = start(Options::default()).await;
    for path in [
        "/v1/sessions/../edge/state",
        "/v1/sessions/%2e%2e/edge/state",
        "/v1/sessions/..%2fedge%2fstate",
        "/v1/sessions/x/..%5c..%5cdown",
        "//v1/down",
        "/v1/sessions/x/files/../../../down",
        "/v1/edge/state",
        "/v1/edge/decisions",
        "/V1/sessions",
        "/v1/sessions;x",
        "/v1/sessions%00",
        "/openapi.yaml",
    ] {
        assert_eq!(status(&f.get(path, KEY, "").await), 404, "{path}");
    }
    // Each of the operator's verbs, and the edge's own, for an App's administrator.
    let admin = key(f.app, "pepo_admin", &["app:admin"]);
    f.daemon.change(|state| state.keys.as_mut().expect("keys").push(admin)).await;
    for row in ROUTES.iter().filter(|row| matches!(row.audience, Audience::Operator | Audience::Edge)) {
        let path = row.path.replace(['{', '}'], "");
        let head = format!("{} {path} HTTP/1.1\r\ncontent-length: 0", row.method);
        let answer = exchange(f.address, request(&head, "").replace(KEY, "pepo_admin")).await;
        assert!(matches!(status(&answer), 404 | 405), "{}: {answer}", row.name);
    }
    assert!(f.daemon.asked().is_empty(), "{:?}", f.daemon.asked());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_cancelled_ends_its_request() {
    let f = start(Options::default()).await;
    for _ in 0..50 {
        let mut stream = TcpStream::connect(f.address).await.expect("connect");
        let head = format!(
            "PUT /v1/sessions/s/files?path=a HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 1000000\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.expect("write");
        stream.write_all(&[b'z'; 1000]).await.expect("write");
        drop(stream);
    }
    // None of them is left open: as many as may be at once, at once.
    let began = Instant::now();
    while began.elapsed() < LONG {
        if timed(&f, KEY).await.0 == 200 {
            break;
        }
    }
    assert!(f.daemon.asked().iter().all(|asked| asked.target == "/v1/sessions"), "a cut body is nobody's");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_in_drops_is_cut_though_no_drop_is_late() {
    let usual = Options::default();
    let rules = Rules { json_within: Duration::from_millis(500), ..usual.rules.clone() };
    let f = start(Options { rules, ..usual }).await;
    let mut stream = TcpStream::connect(f.address).await.expect("connect");
    let head = format!(
        "POST /v1/sessions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 100000\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.expect("write");
    let (mut reading, mut writing) = stream.into_split();
    let dripping = tokio::spawn(async move {
        while writing.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut answer = Vec::new();
    let began = Instant::now();
    // What is still on its way may reset the connection once the answer is out.
    let _ = tokio::time::timeout(LONG, reading.read_to_end(&mut answer)).await.expect("cut");
    let text = String::from_utf8_lossy(&answer);
    assert!(status(&text) == 400 && text.contains("not whole within"), "{text}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    dripping.abort();
    assert!(f.daemon.asked().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_has_so_many_requests_open_and_no_more() {
    let usual = Options::default();
    let f = start(Options { rules: Rules { streams: 8, ..usual.rules }, ..usual }).await;
    let other = key(f.app, "pepo_other", &["*"]);
    f.daemon.change(|state| state.keys.as_mut().expect("keys").push(other)).await;
    let mut open = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(f.address).await.expect("connect");
        let head = format!(
            "GET /v1/sessions/s/commands/c/attach HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.expect("write");
        let mut head = [0u8; 12];
        stream.read_exact(&mut head).await.expect("answer");
        assert_eq!(&head, b"HTTP/1.1 101");
        open.push(stream);
    }
    let ninth = f.get("/v1/sessions", KEY, "").await;
    assert_eq!(status(&ninth), 429, "{ninth}");
    assert!(ninth.contains("retry-after: 1") && ninth.contains(r#""name":"streams","used":8,"limit":8"#), "{ninth}");
    assert_eq!(timed(&f, "pepo_other").await.0, 200, "another key has its own");
    drop(open);
    let again = async {
        while timed(&f, KEY).await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, again).await.expect("they are given back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_through_a_websocket_does_not_hold_the_others_up() {
    let f = start(Options::default()).await;
    let mut floods = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let address = f.address;
        floods.spawn(async move {
            let mut stream = TcpStream::connect(address).await.expect("connect");
            let head = format!(
                "GET /v1/sessions/s/commands/c/attach HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).await.expect("write");
            // Nothing of the echo is read: it must come to a stand, not into memory.
            while stream.write_all(&[b'x'; 64 * 1024]).await.is_ok() {}
        });
    }
    let mut worst = Duration::ZERO;
    for _ in 0..30 {
        let (code, took) = timed(&f, KEY).await;
        assert_eq!(code, 200);
        worst = worst.max(took);
    }
    floods.abort_all();
    assert!(worst < Duration::from_secs(5), "{worst:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_noisy_key_is_told_to_wait_and_slows_nobody() {
    let rate = Rate { per_second: 20, burst: 40 };
    let f = start(with_limits(Limits { caller: Some(rate), app: None, ..Limits::default() })).await;
    let other = key(f.app, "pepo_quiet", &["*"]);
    f.daemon.change(|state| state.keys.as_mut().expect("keys").push(other)).await;
    let first = f.get("/v1/sessions", KEY, "").await;
    assert!(first.contains("ratelimit-limit: 40") && first.contains("ratelimit-remaining: 39"), "{first}");
    let mut answers = Vec::new();
    let began = Instant::now();
    for _ in 0..100 {
        answers.push(f.get("/v1/sessions", KEY, "").await);
    }
    let most = 39 + (began.elapsed().as_secs_f64() * 20.0) as usize + 1;
    let passed = answers.iter().filter(|answer| status(answer) == 200).count();
    assert!((39..=most).contains(&passed), "{passed} of at most {most}");
    let refused = answers.iter().find(|answer| status(answer) == 429).expect("refused");
    for word in [
        "retry-after: 1",
        "ratelimit-remaining: 0",
        r#""code":"too_many_requests""#,
        r#""name":"requests_per_second","used":20,"limit":20"#,
        r#""retryable":true"#,
    ] {
        assert!(refused.contains(word), "{word}: {refused}");
    }
    for _ in 0..20 {
        assert_eq!(timed(&f, "pepo_quiet").await.0, 200);
    }
    let told = f.told(|decision| decision.code == ErrorCode::TooManyRequests).await;
    assert!(told.iter().any(|decision| decision.actor == Some(f.key.to_string()) && decision.times > 1), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_app_has_its_own_rate_where_it_is_set() {
    let f = start(Options::default()).await;
    f.daemon.change(|state| state.apps[0].requests_per_second = Some(1)).await;
    let codes = [timed(&f, KEY).await.0, timed(&f, KEY).await.0, timed(&f, KEY).await.0];
    assert_eq!(codes, [200, 200, 429]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_credentials_are_counted_by_their_source_and_a_right_key_still_opens() {
    let usual = Options::default();
    let proxies = Ranges::read(["127.0.0.1"]).expect("ranges");
    let f = start(Options {
        failures: Rate { per_second: 1, burst: 5 },
        rules: Rules { proxies, ..usual.rules.clone() },
        ..usual
    })
    .await;
    let bad = |source: &str| format!("x-forwarded-for: {source}\r\n");
    let mut codes = Vec::new();
    for _ in 0..10 {
        codes.push(status(&f.get("/v1/sessions", "pepo_wrong", &bad("192.0.2.1")).await));
    }
    assert_eq!(codes[..5], [401; 5]);
    assert!(codes.contains(&429), "{codes:?}");
    assert_eq!(status(&f.get("/v1/sessions", "pepo_wrong", &bad("192.0.2.2")).await), 401, "another source");
    assert_eq!(status(&f.get("/v1/sessions", KEY, &bad("192.0.2.1")).await), 200, "the right key, from there");
    let told = f.told(|decision| decision.code == ErrorCode::Unauthenticated).await;
    let from = |source: &str| told.iter().any(|decision| decision.source == source.parse().ok());
    assert!(from("192.0.2.1") && from("192.0.2.2"), "{told:?}");
    assert!(!format!("{told:?}").contains("pepo_wrong"), "{told:?}");
    assert_eq!(f.daemon.asked()[0].headers["pepo-source"], "192.0.2.1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_apps_callers_come_from_where_it_says() {
    let usual = Options::default();
    let proxies = Ranges::read(["127.0.0.1"]).expect("ranges");
    let f = start(Options { rules: Rules { proxies, ..usual.rules.clone() }, ..usual }).await;
    f.daemon.change(|state| state.apps[0].sources = vec!["192.0.2.0/24".into()]).await;
    let code = async |from: &str| status(&f.get("/v1/sessions", KEY, &format!("x-forwarded-for: {from}\r\n")).await);
    assert_eq!(code("192.0.2.9").await, 200);
    assert_eq!(code("198.51.100.1").await, 401);
    assert_eq!(code("192.0.2.9, 198.51.100.1").await, 401, "what a stranger wrote before the proxy");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_copy_lets_nobody_in() {
    let f = start(Options::default()).await;
    assert_eq!(timed(&f, KEY).await.0, 200);
    f.daemon.mute.store(true, Ordering::Relaxed);
    let began = Instant::now();
    let code = loop {
        let (code, _) = timed(&f, KEY).await;
        if code != 200 {
            break code;
        }
        assert!(began.elapsed() < Duration::from_secs(8), "it still lets in");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!(code, 503);
    assert!(began.elapsed() > Duration::from_secs(2), "{:?}", began.elapsed());
    f.daemon.mute.store(false, Ordering::Relaxed);
    let back = async {
        while timed(&f, KEY).await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, back).await.expect("it serves again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_token_opens_its_session_and_nothing_else() {
    let f = start(Options::default()).await;
    let session = SessionId::generate();
    let now = jiff::Timestamp::now().as_millisecond();
    let scopes: Vec<_> =
        ["commands:*", "files:read", "ports:connect"].iter().map(|word| word.parse().expect("scope")).collect();
    let claims =
        TokenClaims { app: f.app, session, scopes, port: Some(80), key: Some(f.key), made: now, until: now + 60_000 };
    let token = claims.sign(&TOKEN_KEY);
    let code = async |method: &str, path: &str| {
        let head = format!("{method} {path} HTTP/1.1\r\ncontent-length: 0");
        status(&exchange(f.address, request(&head, "").replace(KEY, &token)).await)
    };
    let own = format!("/v1/sessions/{session}");
    assert_eq!(code("GET", &format!("{own}/commands")).await, 200);
    assert_eq!(code("GET", &format!("{own}/files?path=a")).await, 200);
    assert_eq!(code("PUT", &format!("{own}/files?path=a")).await, 403, "reading is not writing");
    assert_eq!(code("GET", &format!("{own}/dial/81")).await, 403);
    for (port, wanted) in [("80", 200), ("81", 403), ("080", 200), ("%38%30", 403), ("80;81", 403)] {
        assert_eq!(code("POST", &format!("{own}/ports/{port}/a/b")).await, wanted, "{port}");
    }
    for out in ["../81/", "%2e%2e/81/", "a/../../81/"] {
        assert_eq!(code("GET", &format!("{own}/ports/80/{out}")).await, 404, "{out}");
    }
    assert_eq!(code("DELETE", &own).await, 403);
    assert_eq!(code("POST", &format!("{own}/tokens")).await, 403, "a token makes no token");
    assert_eq!(code("GET", &format!("/v1/sessions/{}/commands", SessionId::generate())).await, 403);
    assert_eq!(code("GET", "/v1/sessions/web/commands").await, 403, "a name may be another's tomorrow");
    assert_eq!(code("GET", "/v1/sessions").await, 403);
    assert_eq!(code("GET", "/v1/events").await, 403);
    let asked = f.daemon.asked();
    assert_eq!(asked.len(), 4);
    assert_eq!(asked[0].headers["pepo-actor"], format!("token:{session}").as_str());
    assert!(asked[0].headers.get("pepo-key").is_none());

    // From a browser, which sends a WebSocket nothing but its protocols.
    let mut stream = TcpStream::connect(f.address).await.expect("connect");
    let head = format!(
        "GET {own}/commands/c/attach HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-protocol: pepo.attach.v1, pepo.bearer.{token}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.expect("write");
    let mut answer = [0u8; 12];
    stream.read_exact(&mut answer).await.expect("answer");
    assert_eq!(&answer, b"HTTP/1.1 101");
    let attach = f.daemon.asked().pop().expect("asked");
    assert_eq!(attach.headers["sec-websocket-protocol"], "pepo.attach.v1");
    drop(stream);
    // To a port too; where the program chose no protocol the browser is told the one that says so.
    let mut stream = TcpStream::connect(f.address).await.expect("connect");
    let head = format!(
        "GET {own}/ports/80/live?a HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-protocol: pepo.port.v1, pepo.bearer.{token}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.expect("write");
    let mut answer = vec![0u8; 1024];
    let read = stream.read(&mut answer).await.expect("answer");
    let answer = String::from_utf8_lossy(&answer[..read]).to_lowercase();
    assert!(answer.starts_with("http/1.1 101") && answer.contains("sec-websocket-protocol: pepo.port.v1"), "{answer}");
    let inside = f.daemon.asked().pop().expect("asked");
    assert_eq!(inside.target, format!("{own}/ports/80/live?a"));
    assert!(!format!("{inside:?}").contains("pepot_") && inside.headers.get("sec-websocket-protocol").is_none());
    drop(stream);

    f.daemon.change(|state| state.void = vec![pepo_api::EdgeVoid { session_id: session, before: now + 1 }]).await;
    assert_eq!(code("GET", &format!("{own}/commands")).await, 401, "revoked");
    let forged = TokenClaims { app: f.app, until: now + 600_000, ..claims }.sign(&[8; 32]);
    assert_eq!(status(&f.get(&format!("{own}/commands"), &forged, "").await), 401);
    let told = f.told(|decision| decision.actor == Some(format!("token:{session}"))).await;
    assert!(told.iter().any(|decision| decision.code == ErrorCode::Forbidden), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_known_origins_may_call_and_no_others() {
    let usual = Options::default();
    let origins = vec!["https://app.example.com".to_owned()];
    let f = start(Options { rules: Rules { origins, ..usual.rules.clone() }, ..usual }).await;
    let preflight = |origin: &str| {
        format!(
            "OPTIONS /v1/sessions HTTP/1.1\r\nhost: x\r\nconnection: close\r\norigin: {origin}\r\naccess-control-request-method: POST\r\n\r\n"
        )
    };
    let known = exchange(f.address, preflight("https://app.example.com")).await;
    assert_eq!(status(&known), 204, "{known}");
    assert!(known.contains("access-control-allow-origin: https://app.example.com") && known.contains("authorization"));
    assert!(!known.contains("allow-credentials"), "{known}");
    for stranger in ["https://evil.example", "null", "https://app.example.com.evil.example"] {
        let answer = exchange(f.address, preflight(stranger)).await;
        assert!(status(&answer) >= 400 && !answer.contains("allow-origin"), "{answer}");
        assert!(answer.contains("vary: origin"), "{answer}");
    }
    let read = f.get("/v1/sessions", KEY, "origin: https://app.example.com\r\n").await;
    assert!(read.contains("access-control-allow-origin: https://app.example.com"), "{read}");
    assert!(!f.get("/v1/sessions", KEY, "origin: https://evil.example\r\n").await.contains("allow-origin"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_source_does_not_take_every_place() {
    let bounds = Bounds { connections: 8, of_source: 4, ..Options::default().bounds };
    let f = start(Options { bounds, ..Options::default() }).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut stream = TcpStream::connect(f.address).await.expect("connect");
        stream.write_all(b"GET /").await.expect("write");
        held.push(stream);
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    // Said before anything is asked. They are on two threads, and the bound is one.
    let answer = exchange(f.address, "").await;
    assert_eq!(status(&answer), 503, "{answer}");
    drop(held.pop());
    tokio::time::sleep(Duration::from_millis(50)).await;
    let answer = f.get("/v1/sessions", KEY, "").await;
    assert_eq!(status(&answer), 200, "a place that is left is free: {answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_runs_may_finish_when_it_ends() {
    let bounds = Bounds { end_within: Duration::from_secs(20), ..Options::default().bounds };
    let mut f = start(Options { bounds, threads: 3, ..Options::default() }).await;
    let head = format!(
        "PUT /v1/sessions/s/files?path=a HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 6\r\n\r\nabc"
    );
    // More than there are threads: each has some.
    let mut all = Vec::new();
    for _ in 0..5 {
        let mut running = TcpStream::connect(f.address).await.expect("connect");
        running.write_all(head.as_bytes()).await.expect("write");
        all.push(running);
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    f.end();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(TcpStream::connect(f.address).await.is_err(), "nobody new is taken");
    for mut running in all {
        running.write_all(b"def").await.expect("write");
        let mut answer = Vec::new();
        tokio::time::timeout(LONG, running.read_to_end(&mut answer)).await.expect("an end").expect("read");
        assert_eq!(status(&String::from_utf8_lossy(&answer)), 200);
    }
    assert!(f.daemon.asked().iter().all(|asked| &asked.body[..] == b"abcdef"));
    tokio::time::timeout(LONG, f.ended.take().expect("task")).await.expect("it ends").expect("task").expect("well");
}
