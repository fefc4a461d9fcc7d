//! TLS: both protocols over it, a certificate that changes while connections live, and callers who misuse it.

#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod world;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, StatusCode, Version};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use pepo_api::SessionId;
use pepo_edge::handler::Rules;
use pepo_edge::tls::{Files, Tls};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use world::{Fixture, KEY, LONG, Options, start};

fn certificate(directory: &Path) -> (Files, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(vec!["pepo.example".to_owned()]).expect("certificate");
    let files = Files { certificate: directory.join("cert.pem"), key: directory.join("key.pem") };
    std::fs::write(&files.certificate, made.cert.pem()).expect("write");
    std::fs::write(&files.key, made.signing_key.serialize_pem()).expect("write");
    let der = CertificateDer::from_pem_slice(made.cert.pem().as_bytes()).expect("certificate");
    (files, der)
}

async fn connect(
    f: &Fixture,
    trusted: &CertificateDer<'static>,
    protocol: &[u8],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).expect("root");
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let stream = TcpStream::connect(f.address).await?;
    TlsConnector::from(Arc::new(config)).connect(ServerName::try_from("pepo.example").expect("name"), stream).await
}

fn asking() -> Request<Empty<Bytes>> {
    let uri = "https://pepo.example/v1/sessions";
    Request::get(uri).header("authorization", format!("Bearer {KEY}")).body(Empty::new()).expect("request")
}

async fn second(f: &Fixture, trusted: &CertificateDer<'static>) -> http2::SendRequest<Empty<Bytes>> {
    let stream = connect(f, trusted, b"h2").await.expect("TLS");
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("handshake");
    tokio::spawn(connection);
    sender
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_protocols_are_spoken_over_tls_and_plain_text_is_not() {
    let directory = tempfile::tempdir().expect("directory");
    let (files, trusted) = certificate(directory.path());
    let tls = Arc::new(Tls::open(files).expect("tls"));
    let f = start(Options { tls: Some(tls), ..Options::default() }).await;

    let stream = connect(&f, &trusted, b"http/1.1").await.expect("TLS");
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("handshake");
    tokio::spawn(connection);
    let mut plain = asking();
    *plain.uri_mut() = "/v1/sessions".parse().expect("path");
    plain.headers_mut().insert("host", "pepo.example".parse().expect("host"));
    assert_eq!(sender.send_request(plain).await.expect("answer").status(), StatusCode::OK);

    let mut sender = second(&f, &trusted).await;
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..80 {
        all.spawn(sender.send_request(asking()));
    }
    while let Some(answer) = all.join_next().await {
        let answer = answer.expect("task").expect("answer");
        assert_eq!((answer.status(), answer.version()), (StatusCode::OK, Version::HTTP_2));
        assert_eq!(answer.into_body().collect().await.expect("body").to_bytes(), "{\"ok\":true}");
    }
    let asked = f.daemon.asked();
    assert_eq!((asked.len(), asked[80].headers["host"].to_str().expect("text")), (81, "pepod"));

    let mut plain = TcpStream::connect(f.address).await.expect("connect");
    plain.write_all(b"GET /v1/sessions HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("write");
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(LONG, plain.read_to_end(&mut answer)).await.expect("cut");
    assert!(!answer.starts_with(b"HTTP/"), "{:?}", String::from_utf8_lossy(&answer));
    // One that says nothing is cut as a slow head is.
    let mut silent = TcpStream::connect(f.address).await.expect("connect");
    let began = Instant::now();
    let _ = tokio::time::timeout(LONG, silent.read_to_end(&mut answer)).await.expect("cut");
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_certificate_is_taken_without_ending_what_runs_and_a_wrong_one_is_not() {
    let directory = tempfile::tempdir().expect("directory");
    let (files, first) = certificate(directory.path());
    let tls = Arc::new(Tls::open(files.clone()).expect("tls"));
    let following = tls.clone();
    tokio::spawn(async move { following.follow().await });
    let f = start(Options { tls: Some(tls), ..Options::default() }).await;
    let mut old = second(&f, &first).await;
    assert_eq!(old.send_request(asking()).await.expect("answer").status(), StatusCode::OK);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let (_, renewed) = certificate(directory.path());
    let taken = async {
        while connect(&f, &renewed, b"http/1.1").await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(LONG, taken).await.expect("the new one is taken");
    assert!(connect(&f, &first, b"http/1.1").await.is_err(), "the old one is gone");
    assert_eq!(old.send_request(asking()).await.expect("answer").status(), StatusCode::OK, "what runs goes on");
    std::fs::write(&files.certificate, "not a certificate").expect("write");
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(connect(&f, &renewed, b"http/1.1").await.is_ok(), "the one that works stays");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_are_reset_at_once_do_not_hold_the_others_up() {
    let directory = tempfile::tempdir().expect("directory");
    let (files, trusted) = certificate(directory.path());
    let tls = Arc::new(Tls::open(files).expect("tls"));
    let f = start(Options { tls: Some(tls), ..Options::default() }).await;
    let mut resets = tokio::task::JoinSet::new();
    let mut sender = second(&f, &trusted).await;
    resets.spawn(async move {
        // Each is dropped before its answer: a reset.
        for _ in 0..5000 {
            if sender.ready().await.is_err() {
                return;
            }
            let asked = sender.send_request(asking());
            let _ = tokio::time::timeout(Duration::from_micros(50), asked).await;
        }
    });
    let mut beside = second(&f, &trusted).await;
    let mut worst = Duration::ZERO;
    for _ in 0..20 {
        let began = Instant::now();
        let answer = tokio::time::timeout(LONG, beside.send_request(asking())).await.expect("in time").expect("answer");
        assert_eq!(answer.status(), StatusCode::OK);
        worst = worst.max(began.elapsed());
    }
    resets.abort_all();
    assert!(worst < Duration::from_secs(5), "{worst:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_on_which_nothing_is_asked_ends() {
    let directory = tempfile::tempdir().expect("directory");
    let (files, trusted) = certificate(directory.path());
    let tls = Arc::new(Tls::open(files).expect("tls"));
    let f = start(Options { tls: Some(tls), ..Options::default() }).await;
    let mut sender = second(&f, &trusted).await;
    assert_eq!(sender.send_request(asking()).await.expect("answer").status(), StatusCode::OK);
    let ended = async {
        while sender.ready().await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, ended).await.expect("it ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_connection_has_the_api_and_ports_by_their_names_and_neither_is_the_other() {
    let directory = tempfile::tempdir().expect("directory");
    let (files, trusted) = certificate(directory.path());
    let tls = Arc::new(Tls::open(files).expect("tls"));
    let usual = Options::default();
    let domain = Some("preview.example.com".parse().expect("domain"));
    let rules = Rules { domain, ..usual.rules.clone() };
    let f = start(Options { tls: Some(tls), rules, ..usual }).await;
    let session = SessionId::generate();
    let mut sender = second(&f, &trusted).await;
    let mut ask = async |authority: &str, host: Option<&str>, key: bool| {
        let mut request = Request::get(format!("https://{authority}/v1/sessions?a"));
        if let Some(host) = host {
            request = request.header("host", host);
        }
        if key {
            request = request.header("authorization", format!("Bearer {KEY}"));
        }
        let request = request.body(Empty::<Bytes>::new()).expect("request");
        let status = sender.send_request(request).await.expect("answer").status().as_u16();
        (status, f.daemon.asked().pop().map(|asked| asked.target).unwrap_or_default())
    };
    let own = format!("3000-{}.preview.example.com", session.hex());
    let there = format!("/v1/sessions/{session}/ports/3000/v1/sessions?a");
    assert_eq!(ask(&own, None, false).await, (401, String::new()));
    assert_eq!(ask("x.preview.example.com", None, false).await, (401, String::new()));
    assert_eq!(ask(&own, None, true).await, (200, there.clone()));
    assert_eq!(ask("pepo.example", None, true).await, (200, "/v1/sessions?a".to_owned()));
    assert_eq!(ask(&format!("{own}:7443"), None, true).await, (200, there.clone()));
    // What a browser that has one connection for both says, and what a hostile caller may.
    assert_eq!(ask("pepo.example", Some(&own), true).await.0, 400);
    assert_eq!(ask(&own, Some("pepo.example"), true).await.0, 400);
    assert_eq!(ask(&own, Some(&own), true).await, (200, there));
}
