//! What is counted and shown of Sessions: use as the store keeps it, metrics, and what a Session uses now as a stream.
//!
//! Needs the feature `fake` and the agent's file in `PEPO_GUEST` (`make test` sets it).

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic)]
#![allow(dead_code, reason = "the daemon's helper is shared with other tests")]

mod daemon;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use daemon::{Daemon, Options, within};
use pepo_api::client::{Client, ClientError};
use pepo_api::query::ShowUsage;
use pepo_api::{Amounts, CreateCommand, CreateSession, ErrorCode, UsageReport};

async fn ran(client: &Client, user: &str) -> String {
    let new = CreateSession { labels: [("user".to_owned(), user.to_owned())].into(), ..Default::default() };
    let session = within(120, client.session_create(&new)).await.expect("session").id.to_string();
    let command = CreateCommand { command: Some("true".into()), ..Default::default() };
    within(120, client.command_create(&session, &command)).await.expect("command");
    session
}

async fn report(client: &Client, group_by: Option<&str>) -> UsageReport {
    let query = ShowUsage { group_by: group_by.map(str::to_owned), ..Default::default() };
    within(60, client.usage(&query)).await.expect("usage")
}

fn sum(report: &UsageReport) -> Amounts {
    let mut all = Amounts::default();
    report.groups.iter().for_each(|group| all += group.amounts);
    all
}

#[tokio::test]
async fn what_was_used_adds_up_and_a_crash_loses_ten_seconds_at_the_most() {
    let mut daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let began = Instant::now();
    let (one, two, three) = (ran(&client, "a").await, ran(&client, "a").await, ran(&client, "b").await);
    let all_run = Instant::now();
    within(120, client.session_terminate(&one)).await.expect("terminate");
    within(120, client.session_terminate(&two)).await.expect("terminate");
    tokio::time::timeout(Duration::from_secs(60), async {
        // The look at the third, which goes on.
        while report(&client, None).await.total.wall_ms < 6_000 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
    .expect("it is looked at");
    let before = report(&client, Some("label:user")).await;
    assert_eq!(before.total, sum(&before));
    assert_eq!(before.total.activations, 3);
    let activations = |user: &str| {
        let group = before.groups.iter().find(|group| group.key.as_deref() == Some(user));
        group.expect("group").amounts.activations
    };
    assert_eq!((activations("a"), activations("b")), (2, 1));
    assert!(before.total.memory_allocated_mib_ms > before.total.wall_ms * 100);
    for by in ["session", "app", "day"] {
        let parts = report(&client, Some(by)).await;
        assert_eq!(parts.total, sum(&parts), "{by}");
        assert!(parts.total.wall_ms >= before.total.wall_ms, "{by}");
    }

    daemon.kill();
    let lived = all_run.elapsed();
    daemon.kill_agents();
    daemon.restart();
    let client = daemon.client();
    daemon::ended(&client, &three).await;
    let after = report(&client, None).await;
    let most = began.elapsed() * 3;
    assert!(u128::from(after.total.wall_ms) + 10_000 >= lived.as_millis(), "{after:?} of {lived:?}");
    assert!(u128::from(after.total.wall_ms) <= most.as_millis(), "{after:?} of {most:?}");

    let wrong = ShowUsage { group_by: Some("colour".into()), ..Default::default() };
    match client.usage(&wrong).await.expect_err("refused") {
        ClientError::Api(error) => {
            assert_eq!((error.code, error.param.as_deref()), (ErrorCode::Invalid, Some("group_by")))
        }
        other => panic!("{other}"),
    }
    let nobody = ShowUsage { app: Some("nobody".into()), ..Default::default() };
    match client.usage(&nobody).await.expect_err("refused") {
        ClientError::Api(error) => assert_eq!(error.code, ErrorCode::NotFound),
        other => panic!("{other}"),
    }
    daemon.end().await;
}

fn asked(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("time-out");
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").expect("write");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    text
}

#[tokio::test]
async fn metrics_are_all_set_and_bounded() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let url = std::fs::read_to_string(daemon.home().join("run/metrics")).expect("the address of metrics");
    let address =
        url.trim().strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics")).expect("url").to_owned();
    let mut sessions = Vec::new();
    for n in 0..3 {
        sessions.push(ran(&client, &format!("user{n}")).await);
    }
    within(120, client.session_terminate(&sessions[0])).await.expect("terminate");
    let answer = asked(&address, "/metrics");
    let (head, text) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 200") && head.to_lowercase().contains("openmetrics"), "{head}");
    let names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert!(names.len() >= 20, "{names:?}");
    for name in names {
        let set = text.lines().any(|line| !line.starts_with('#') && line.starts_with(name));
        assert!(set, "{name} is never set:\n{text}");
    }
    let value = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}:\n{text}"));
        line.rsplit(' ').next().expect("value").parse().expect("number")
    };
    assert_eq!(value("pepo_activations_total{outcome=\"ok\"}"), 3.0);
    assert_eq!(value("pepo_sessions{state=\"active\"}"), 2.0);
    assert_eq!(value("pepo_command_ends_total{reason=\"exit\"}"), 3.0);
    assert_eq!(value("pepo_sandbox_ends_total{cause=\"operator\"}"), 1.0);
    for step in ["sandbox", "start", "run"] {
        assert_eq!(value(&format!("pepo_command_step_seconds_count{{step=\"{step}\"}}")), 3.0, "{step}");
    }
    assert!(value("pepo_requests_total{route=\"command_create\",status=\"2xx\"}") >= 3.0);
    assert!(value("pepo_host_memory_available_bytes") > 0.0);
    // Nothing of anybody's choosing is a label, however many Sessions there are.
    assert!(text.lines().count() < 2_000 && !sessions.iter().any(|id| text.contains(&id[4..])), "{text}");
    assert!(!text.contains("user0"));
    assert!(asked(&address, "/healthz").ends_with("ok\n"));
    assert!(asked(&address, "/readyz").starts_with("HTTP/1.1 200"));
    assert!(asked(&address, "/v1/sessions").starts_with("HTTP/1.1 404"));
    daemon.end().await;
}

#[tokio::test]
async fn what_a_session_uses_now_comes_as_a_stream_until_its_sandbox_ends() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = ran(&client, "a").await;
    let (socket, path) = (daemon.home().join("run/operator.sock"), format!("/v1/sessions/{session}/stats"));
    let (seen, looks) = tokio::sync::oneshot::channel();
    let reading = std::thread::spawn(move || {
        let mut seen = Some(seen);
        let mut stream = UnixStream::connect(socket).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("time-out");
        write!(stream, "GET {path} HTTP/1.1\r\nhost: pepo\r\naccept: text/event-stream\r\nconnection: close\r\n\r\n")
            .expect("write");
        let mut events = 0;
        for line in BufReader::new(stream).lines() {
            let line = line.expect("read");
            events += usize::from(line == "event: stats");
            if events == 2
                && let Some(seen) = seen.take()
            {
                seen.send(()).expect("seen");
            }
        }
        events
    });
    within(60, looks).await.expect("two looks");
    within(120, client.session_terminate(&session)).await.expect("terminate");
    let events = tokio::task::spawn_blocking(move || reading.join().expect("thread")).await.expect("thread");
    assert!(events >= 2);
    match client.session_stats(&session).await.expect_err("gone") {
        ClientError::Api(error) => assert_eq!(error.code, ErrorCode::SessionTerminated),
        other => panic!("{other}"),
    }
    daemon.end().await;
}
