//! The edge against a fake daemon on a Unix socket, spoken to with raw bytes, as strangers do.

#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod world;

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use pepo_edge::auth::Gate;
use pepo_edge::config::Limits;
use pepo_edge::decisions::Decisions;
use pepo_edge::handler::{Edge, Rules};
use pepo_edge::jwt::Issuers;
use pepo_edge::keys::Keys;
use pepo_edge::server::{Bounds, serve};
use pepo_edge::threads::Threads;
use pepo_edge::upstream::Upstream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use world::{Fixture, KEY, LONG, Options, exchange, request, start as start_with, status};

async fn start(bounds: Bounds) -> Fixture {
    start_with(Options { bounds, ..Options::default() }).await
}

fn bounds() -> Bounds {
    Bounds {
        head_within: Duration::from_millis(300),
        end_within: Duration::from_millis(100),
        ..Bounds::for_this_process()
    }
}

#[tokio::test]
async fn a_key_without_the_scope_is_told_so() {
    let f = start(bounds()).await;
    let answer = exchange(f.address, request("GET /v1/keys HTTP/1.1", "")).await;
    assert_eq!(status(&answer), 403, "{answer}");
    assert!(answer.contains("\"forbidden\"") && answer.contains("app:admin"), "{answer}");
    assert!(f.daemon.asked().is_empty());
}

#[tokio::test]
async fn a_request_with_a_key_reaches_the_daemon_as_its_app() {
    let f = start(bounds()).await;
    let head = "POST /v1/sessions?x=1 HTTP/1.1\r\npepo-anything: forged\r\ncontent-length: 2";
    let answer = exchange(f.address, request(head, "{}")).await;
    assert_eq!(status(&answer), 200, "{answer}");
    assert!(answer.ends_with("{\"ok\":true}"), "{answer}");
    assert!(answer.contains("pepo-activation: 3") && answer.contains("pepo-request-id: req_"), "{answer}");
    assert!(!answer.contains("x-hop"), "{answer}");
    let asked = f.daemon.asked();
    assert_eq!(asked.len(), 1);
    assert_eq!(
        (asked[0].method.as_str(), asked[0].target.as_str(), &asked[0].body[..]),
        ("POST", "/v1/sessions?x=1", &b"{}"[..])
    );
    assert_eq!(asked[0].headers["pepo-app"], f.app.to_string().as_str());
    assert!(asked[0].headers["pepo-key"].to_str().expect("text").starts_with("key_"));
    for name in ["authorization", "pepo-anything", "connection"] {
        assert!(!asked[0].headers.contains_key(name), "{name}");
    }
}

#[tokio::test]
async fn strangers_and_wrong_paths_do_not_reach_the_daemon() {
    let f = start(bounds()).await;
    let plain = |head: &str| format!("{head}\r\nhost: x\r\nconnection: close\r\n\r\n");
    let cases = [
        (plain("GET /v1/sessions HTTP/1.1"), 401, "unauthenticated"),
        (plain("GET /v1/sessions HTTP/1.1\r\nauthorization: Bearer pepo_wrong"), 401, "unauthenticated"),
        (plain("GET /v1/sessions HTTP/1.1\r\nauthorization: Basic cGVwbw=="), 401, "unauthenticated"),
        (request("GET /v1/sessions HTTP/1.1\r\npepo-app: default", ""), 422, "Pepo-App"),
        (request("GET /v1/nothing HTTP/1.1", ""), 404, "not_found"),
        (request("POST /v1/down HTTP/1.1", ""), 404, "not_found"),
        (request("GET /v1/edge/state HTTP/1.1", ""), 404, "not_found"),
        (request("GET /v1/sessions/../down HTTP/1.1", ""), 404, "not_found"),
        (request("PUT /v1/sessions HTTP/1.1", ""), 405, "allow: POST, GET"),
        (request("GET /v1/sessions HTTP/1.1\r\ncontent-length: 1", "x"), 400, "takes no body"),
    ];
    for (bytes, code, word) in cases {
        let answer = exchange(f.address, &bytes).await;
        assert_eq!(status(&answer), code, "{bytes}\n{answer}");
        assert!(answer.contains(word), "{bytes}\n{answer}");
        assert!(answer.contains("\"request_id\":\"req_"), "{answer}");
    }
    assert!(f.daemon.asked().is_empty(), "{:?}", f.daemon.asked());
}

#[tokio::test]
async fn what_two_readers_could_read_differently_is_refused() {
    let f = start(bounds()).await;
    let cases = [
        request("POST /v1/sessions HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2", "{}"),
        request("POST /v1/sessions HTTP/1.1\r\ncontent-length: +2", "{}"),
        request("POST /v1/sessions HTTP/1.1\r\ntransfer-encoding: xchunked", "{}"),
        request("POST /v1/sessions HTTP/1.1\r\ntransfer-encoding: gzip, chunked", "0\r\n\r\n"),
        request("POST /v1/sessions HTTP/1.1\r\nhost: y\r\ncontent-length: 2", "{}"),
        request("GET http://other/v1/sessions HTTP/1.1", ""),
        request("POST /v1/sessions HTTP/1.0\r\ntransfer-encoding: chunked", "0\r\n\r\n"),
        request("GET /v1/sessions HTTP/1.1\r\nbad header: x", ""),
        "GET /v1/sessions HTTP/1.1\r\nconnection: close\r\n\r\n".to_owned(),
    ];
    for bytes in cases {
        let answer = exchange(f.address, &bytes).await;
        assert_eq!(status(&answer), 400, "{bytes}\n{answer}");
    }
    assert!(f.daemon.asked().is_empty(), "{:?}", f.daemon.asked());

    // Both lengths: chunked is what counts, and what the daemon gets has one length, ours.
    let both = "POST /v1/sessions HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked";
    let answer = exchange(f.address, request(both, "2\r\n{}\r\n0\r\n\r\n")).await;
    assert_eq!(status(&answer), 200, "{answer}");
    let asked = f.daemon.asked();
    assert_eq!(&asked[0].body[..], b"{}");
    assert!(!asked[0].headers.contains_key("transfer-encoding"));
    assert_eq!(asked[0].headers["content-length"], "2");
}

#[tokio::test]
async fn sizes_are_bounded() {
    let f = start(bounds()).await;
    let told = exchange(f.address, request("POST /v1/sessions HTTP/1.1\r\ncontent-length: 1048577", "")).await;
    assert_eq!(status(&told), 413, "{told}");
    let mut chunks = String::new();
    for _ in 0..16 {
        chunks.push_str(&format!("10000\r\n{}\r\n", "x".repeat(0x10000)));
    }
    // One byte too many, and nothing unread after it: the answer would else be lost in a reset.
    chunks.push_str("1\r\nx\r\n");
    let untold =
        exchange(f.address, request("POST /v1/sessions HTTP/1.1\r\ntransfer-encoding: chunked", &chunks)).await;
    assert_eq!(status(&untold), 413, "{untold}");
    let long = format!("GET /v1/sessions HTTP/1.1\r\nx: {}", "y".repeat(16_350));
    assert_eq!(status(&exchange(f.address, request(&long, "")).await), 431);
    let many: String = (0..200).map(|n| format!("\r\nx{n}: y")).collect();
    assert_eq!(status(&exchange(f.address, request(&format!("GET /v1/sessions HTTP/1.1{many}"), "")).await), 431);
    assert!(f.daemon.asked().is_empty());

    // A raw body has no bound here: it passes as it comes.
    let body = "z".repeat(3 * 1024 * 1024);
    let head = format!("PUT /v1/sessions/s/files?path=a HTTP/1.1\r\ncontent-length: {}", body.len());
    assert_eq!(status(&exchange(f.address, request(&head, &body)).await), 200);
    assert_eq!(f.daemon.asked()[0].body.len(), body.len());
}

#[tokio::test]
async fn a_slow_head_is_cut_and_a_full_house_says_so() {
    let f = start(Bounds { connections: 1, ..bounds() }).await;
    let mut slow = TcpStream::connect(f.address).await.expect("connect");
    slow.write_all(b"GET /v1/sess").await.expect("write");
    let answer = exchange(f.address, "GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(status(&answer), 503, "{answer}");
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(LONG, slow.read_to_end(&mut rest)).await.expect("the slow one is cut");
}

#[tokio::test]
async fn an_upgrade_becomes_raw_bytes_both_ways() {
    let f = start(bounds()).await;
    for (path, protocol) in [("dial/80", "pepo-dial"), ("commands/c/attach", "websocket")] {
        let mut stream = TcpStream::connect(f.address).await.expect("connect");
        let head = format!(
            "GET /v1/sessions/s/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: Upgrade\r\nupgrade: {protocol}\r\nsec-websocket-key: k\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.expect("write");
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            answer.push(tokio::time::timeout(LONG, stream.read_u8()).await.expect("in time").expect("read"));
        }
        let text = String::from_utf8_lossy(&answer);
        assert_eq!(status(&text), 101, "{text}");
        assert!(text.contains(&format!("upgrade: {protocol}")), "{text}");
        stream.write_all(b"hello").await.expect("write");
        let mut five = [0u8; 5];
        stream.read_exact(&mut five).await.expect("echo");
        assert_eq!(&five, b"HELLO");
        // Our end closes one way; what the daemon says after that still arrives.
        stream.shutdown().await.expect("shutdown");
        let mut last = Vec::new();
        tokio::time::timeout(LONG, stream.read_to_end(&mut last)).await.expect("an end").expect("read");
        assert_eq!(last, b"bye");
    }
    assert_eq!(f.daemon.asked()[1].headers["sec-websocket-key"], "k");
}

#[tokio::test]
async fn an_upgrade_on_another_row_is_just_a_request() {
    let f = start(bounds()).await;
    let head = "GET /v1/sessions HTTP/1.1\r\nupgrade: pepo-dial";
    assert_eq!(status(&exchange(f.address, request(head, "")).await), 200);
    assert!(!f.daemon.asked()[0].headers.contains_key("upgrade"));
}

#[tokio::test]
async fn the_daemon_sees_a_caller_go() {
    let f = start(bounds()).await;
    let mut stream = TcpStream::connect(f.address).await.expect("connect");
    let head = format!("GET /v1/sessions/hang HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("write");
    tokio::time::timeout(LONG, async {
        while f.daemon.asked().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the request arrived");
    drop(stream);
    tokio::time::timeout(LONG, f.daemon.gone.notified()).await.expect("the daemon noticed");
}

#[tokio::test]
async fn without_a_daemon_nobody_is_let_in() {
    let directory = tempfile::tempdir().expect("directory");
    let upstream = Upstream::new(directory.path().join("edge.sock"));
    let issuers = Arc::new(Issuers::new(vec![]));
    let gate = Gate::new(Arc::new(Keys::default()), issuers, Limits::default().failures);
    let edge = Arc::new(Edge::new(gate, Rules { streams: 8, ..Rules::default() }, upstream, Decisions::new().0));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let threads = Threads::start(1).expect("threads");
    tokio::spawn(async move { serve(listener, edge, None, bounds(), threads, std::future::pending()).await });
    let answer = exchange(address, request("GET /v1/sessions HTTP/1.1", "")).await;
    assert_eq!(status(&answer), 503, "{answer}");
    assert!(answer.contains("retry-after: 1") && answer.contains("\"unavailable\""), "{answer}");
    assert_eq!(status(&exchange(address, request("GET /healthz HTTP/1.1", "")).await), 200);
    assert_eq!(
        status(&exchange(address, request("GET /readyz HTTP/1.1", "")).await),
        StatusCode::SERVICE_UNAVAILABLE.as_u16()
    );
}

/// Asks once more on a connection that stays.
async fn again(stream: &mut TcpStream, key: &str) {
    let head = format!("GET /v1/sessions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("write");
    let (mut answer, mut bytes) = (Vec::new(), [0; 4096]);
    while !answer.ends_with(b"{\"ok\":true}") {
        let read = tokio::time::timeout(LONG, stream.read(&mut bytes)).await.expect("an answer").expect("read");
        assert!(read > 0, "{}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&bytes[..read]);
    }
}

#[tokio::test]
async fn a_connection_to_the_daemon_serves_one_caller_and_one_thread() {
    const OTHER: &str = "pepo_9876543210";
    let f = start(bounds()).await;
    f.daemon.change(|state| state.keys.as_mut().expect("keys").push(world::key(f.app, OTHER, &["*"]))).await;
    // Each goes to the thread that has fewer.
    let mut one = TcpStream::connect(f.address).await.expect("connect");
    again(&mut one, KEY).await;
    let mut streams = [one, TcpStream::connect(f.address).await.expect("connect")];
    for (stream, key) in [(1, KEY), (0, OTHER), (1, OTHER)] {
        again(&mut streams[stream], key).await;
    }
    for _ in 0..3 {
        for (stream, key) in [(0, KEY), (1, KEY), (0, OTHER), (1, OTHER)] {
            again(&mut streams[stream], key).await;
        }
    }
    let on: Vec<usize> = f.daemon.asked().iter().map(|asked| asked.connection).collect();
    let first: std::collections::BTreeSet<_> = on[..4].iter().collect();
    assert_eq!(first.len(), 4, "two callers on two threads have four: {on:?}");
    for turn in on[4..].chunks(4) {
        assert_eq!(turn, &on[..4], "and each comes back to its own");
    }
}
