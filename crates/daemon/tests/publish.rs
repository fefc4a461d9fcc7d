//! Published ports of a guest that is a host process: who may publish, what the edge is told, what a stranger gets and does
//! not, and every way that it ends.

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic)]

mod daemon;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use daemon::{Daemon, Options, within};
use pepo_api::client::{Client, ClientError};
use pepo_api::query::ListEvents;
use pepo_api::{CreateApp, CreateSession, EdgeState, ErrorCode, PublishPort};

const DOMAIN: &str = "preview.example.com";

/// A program on a port that answers each request with these headers, and the requests.
fn program(headers: &'static str) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("address").port();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = asked.clone();
    // Ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("connection");
            let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
            while !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
                match stream.read(&mut piece) {
                    Ok(read) if read > 0 => bytes.extend_from_slice(&piece[..read]),
                    _ => break,
                }
            }
            seen.lock().expect("lock").push(String::from_utf8_lossy(&bytes).to_lowercase());
            let _ = stream.write_all(format!("HTTP/1.1 200 OK\r\n{headers}content-length: 5\r\n\r\nhello").as_bytes());
        }
    });
    (port, asked)
}

struct World {
    daemon: Daemon,
    client: Client,
    app: String,
    session: String,
}

async fn world(config: &str) -> World {
    let daemon = Daemon::start(Options { config: config.into(), ..Options::default() });
    let client = daemon.client();
    let made = client.session_create(&CreateSession::default()).await.expect("session");
    World { daemon, client, app: made.app_id.to_string(), session: made.id.to_string() }
}

fn with_domain() -> String {
    format!("[edge]\ndomain = \"{DOMAIN}\"\n")
}

impl World {
    /// What the edge is answered that asks for this, as it asks for a port by its own name.
    fn ask(&self, named: &str, method: &str, port: u16, more: &str) -> String {
        let (app, session) = (&self.app, &self.session);
        self.daemon.as_edge(&format!(
            "{method} /v1/sessions/{session}/ports/{port}/a HTTP/1.1\r\nHost: pepod\r\nPepo-App: {app}\r\nPepo-Named: {named}\r\n\
             Pepo-Actor: anybody:{session}:{port}\r\nConnection: close\r\n{more}\r\n"
        ))
    }

    /// What the edge is told.
    fn edge(&self) -> EdgeState {
        let answer = self.daemon.as_edge("GET /v1/edge/state HTTP/1.1\r\nHost: pepod\r\nConnection: close\r\n\r\n");
        let body = &answer[answer.find("\r\n\r\n").expect("a head") + 4..];
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }

    async fn publish(&self, port: u16, seconds: Option<u64>) -> Result<pepo_api::PublishedPort, ErrorCode> {
        let body = PublishPort { expires_seconds: seconds };
        self.client.port_publish(&self.session, port, &body).await.map_err(code)
    }
}

fn code(error: ClientError) -> ErrorCode {
    match error {
        ClientError::Api(error) => error.code,
        other => panic!("{other}"),
    }
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("no status in {answer:?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_is_published_withdrawn_and_gone_with_its_session() {
    let w = world(&with_domain()).await;
    let (port, asked) = program("set-cookie: a=b\r\nclear-site-data: \"*\"\r\naccess-control-allow-origin: *\r\n");
    let refused = |answer: String| {
        assert_eq!(status(&answer), 401, "{answer}");
        assert!(answer.contains("a key is needed") && !answer.contains("ses_"), "{answer}");
    };
    refused(w.ask("anybody", "GET", port, ""));
    assert!(w.client.port_list(&w.session).await.expect("list").items.is_empty());

    let published = w.publish(port, None).await.expect("published");
    let hex = w.session.strip_prefix("ses_").expect("id");
    assert_eq!(published.host, format!("{port}-{hex}.{DOMAIN}"));
    assert_eq!(published.expires_at.duration_since(published.published_at).as_secs(), 3600);
    assert!(published.published_by.starts_with("uid:"), "{published:?}");
    assert_eq!(w.client.port_list(&w.session).await.expect("list").items, std::slice::from_ref(&published));
    let told = w.edge().published;
    assert_eq!((told.len(), told[0].port, told[0].expires_at), (1, port, published.expires_at));
    assert_eq!((told[0].session_id.to_string(), told[0].app_id.to_string()), (w.session.clone(), w.app.clone()));
    assert_eq!(w.client.version().await.expect("version").domain.as_deref(), Some(DOMAIN));

    // By its own name, whoever asks: the origin is its own, and cookies are nobody's all the same.
    for named in ["anybody", "credential"] {
        let answer = w.ask(named, "POST", port, "Content-Length: 0\r\n").to_lowercase();
        assert!(status(&answer) == 200 && answer.ends_with("hello"), "{answer}");
        for there in ["access-control-allow-origin: *", "referrer-policy: same-origin", "nosniff"] {
            assert!(answer.contains(there), "{there}: {answer}");
        }
        for gone in ["set-cookie", "clear-site-data", "content-security-policy"] {
            assert!(!answer.contains(gone), "{gone}: {answer}");
        }
        assert_eq!(answer.contains("pepo-activation"), named == "credential", "{answer}");
        let asked = asked.lock().expect("lock").pop().expect("asked");
        assert!(asked.contains(&format!("host: localhost:{port}\r\n")) && !asked.contains("pepo-"), "{asked}");
    }
    // Strangers are told what failed, and no more.
    let other = w.publish(port.wrapping_add(1).max(1), Some(60)).await.expect("published").port;
    let nothing = w.ask("anybody", "GET", other, "");
    assert!(status(&nothing) == 502 && !nothing.contains("listens"), "{nothing}");
    refused(w.ask("anybody", "GET", 9, ""));

    w.client.port_withdraw(&w.session, port).await.expect("withdrawn");
    refused(w.ask("anybody", "GET", port, ""));
    assert_eq!(status(&w.ask("credential", "GET", port, "")), 200);
    w.client.port_withdraw(&w.session, port).await.expect("once more");
    assert_eq!(w.edge().published.len(), 1);

    w.publish(port, Some(60)).await.expect("again");
    w.client.session_terminate(&w.session).await.expect("terminated");
    refused(w.ask("anybody", "GET", port, ""));
    let ended = w.ask("credential", "GET", port, "");
    assert_eq!(status(&ended), 410, "{ended}");
    assert!(w.edge().published.is_empty());
    assert_eq!(w.publish(port, None).await, Err(ErrorCode::SessionTerminated));

    // Who published and withdrew is in both views; what strangers asked is not.
    let audit = w.client.audit_list(&ListEvents::default()).await.expect("audit").items;
    let count = |kind: &str| audit.iter().filter(|event| event.kind == kind && event.outcome == "ok").count();
    assert_eq!((count("port_publish"), count("port_withdraw")), (3, 2), "{audit:?}");
    let noted = audit.iter().find(|event| event.kind == "port_publish").expect("noted");
    assert!(noted.actor.starts_with("uid:") && noted.session_id.is_some(), "{noted:?}");
    assert_eq!(count("port_post"), 1, "the stranger's is not noted, the caller's is");
    let events = w.client.event_list(&ListEvents::default()).await.expect("events").items;
    let count = |kind: &str| events.iter().filter(|event| event.kind == kind).count();
    assert_eq!((count("port.published"), count("port.withdrawn")), (3, 1), "{events:?}");
    w.daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_published_is_refused_and_a_restart_forgets_nothing() {
    let mut w = world(&with_domain()).await;
    let (port, _) = program("");
    for seconds in [0, 604_801] {
        assert_eq!(w.publish(port, Some(seconds)).await, Err(ErrorCode::Invalid), "{seconds}");
    }
    assert_eq!(w.publish(0, None).await, Err(ErrorCode::Invalid));
    assert_eq!(
        w.client.port_publish("nobody", port, &PublishPort::default()).await.map_err(code),
        Err(ErrorCode::NotFound)
    );
    let shop = w.client.app_create(&CreateApp { name: "shop".into(), ..CreateApp::default() }).await.expect("app");
    let shop = w.client.clone().of_app(&shop.name);
    let foreign = shop.port_publish(&w.session, port, &PublishPort::default()).await;
    assert_eq!(foreign.map_err(code), Err(ErrorCode::NotFound));
    assert_eq!(shop.port_list(&w.session).await.map_err(code).map(drop), Err(ErrorCode::NotFound));

    w.publish(port, Some(3)).await.expect("published");
    assert_eq!(status(&w.ask("anybody", "GET", port, "")), 200);
    let over = async {
        while status(&w.ask("anybody", "GET", port, "")) == 200 {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    within(60, over).await;
    assert!(w.client.port_list(&w.session).await.expect("list").items.is_empty() && w.edge().published.is_empty());

    let lasting = w.publish(port, Some(604_800)).await.expect("published");
    w.daemon.kill();
    w.daemon.restart();
    w.client = w.daemon.client();
    assert_eq!(w.client.port_list(&w.session).await.expect("list").items, [lasting]);
    assert_eq!(w.edge().published.len(), 1);
    assert_eq!(status(&w.ask("anybody", "GET", port, "")), 200);
    w.daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_domain_nothing_is_published_and_it_says_what_to_set() {
    let w = world("").await;
    let refused = w.client.port_publish(&w.session, 80, &PublishPort::default()).await.expect_err("refused");
    let ClientError::Api(error) = refused else { panic!("{refused}") };
    assert_eq!(error.code, ErrorCode::Unsupported);
    assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("edge.domain")), "{error:?}");
    assert!(w.client.port_list(&w.session).await.expect("list").items.is_empty());
    assert_eq!(w.client.version().await.expect("version").domain, None);
    w.client.port_withdraw(&w.session, 80).await.expect("nothing to withdraw");
    w.daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_session_that_is_published_comes_back_for_a_stranger() {
    let w = world(&with_domain()).await;
    let idle = CreateSession { reactivate: Some(true), ..CreateSession::default() };
    let session = w.client.session_create(&idle).await.expect("session").id.to_string();
    let w = World { session, ..w };
    let (port, _) = program("");
    w.publish(port, Some(600)).await.expect("published");
    assert_eq!(status(&w.ask("anybody", "GET", port, "")), 200);
    w.client.session_release(&w.session).await.expect("released");
    assert_eq!(status(&w.ask("anybody", "GET", port, "")), 200);
    w.daemon.end().await;
}
