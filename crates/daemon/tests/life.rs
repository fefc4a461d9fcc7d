//! Sessions that outlive their Sandboxes: idle and back, keys, set-up, Services, and all of it over restarts of pepod.
//!
//! A real pepod, the real guest agent as a host process, the typed client; needs what `whole.rs` needs. What a guest writes
//! to a path of the test's own directory is seen here, because these guests are host processes.

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod daemon;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use daemon::{Daemon, Options, until, within};
use pepo_api::client::{Client, ClientError};
use pepo_api::query::{ListCommands, ListEvents, ListSessions, ShowServices, ShowSession};
use pepo_api::{
    CommandRole, CreateCommand, CreateSession, ErrorCode, IfTerminated, Output, Reason, ServiceState, Session,
    SessionId, SessionState, Text, UpdateSession,
};
use serde_json::json;

fn body(json: serde_json::Value) -> CreateSession {
    serde_json::from_value(json).expect("a Session")
}

async fn create(client: &Client, json: serde_json::Value) -> String {
    client.session_create(&body(json)).await.expect("session").id.to_string()
}

async fn show(client: &Client, session: &str) -> Session {
    client.session_show(session, &ShowSession::default()).await.expect("show")
}

/// The Session once it is in that state.
async fn reached(client: &Client, session: &str, state: SessionState) -> Session {
    let mut after = 0;
    within(120, async {
        loop {
            let query = ShowSession { after: Some(after), wait_seconds: Some(60) };
            let shown = client.session_show(session, &query).await.expect("show");
            if shown.state == state {
                return shown;
            }
            assert!(shown.ended.is_none(), "it ended: {:?}", shown.ended);
            after = shown.generation;
        }
    })
    .await
}

async fn try_run(client: &Client, session: &str, line: &str) -> Result<Output, ClientError> {
    let command = CreateCommand { command: Some(line.into()), ..Default::default() };
    within(120, client.command_create(session, &command)).await
}

/// What a command that ends well wrote, and the activation it ran in.
async fn run(client: &Client, session: &str, line: &str) -> (String, u64) {
    let output = try_run(client, session, line).await.expect("command");
    assert_eq!(output.command.end.as_ref().and_then(|end| end.exit_code), Some(0), "{line}: {output:?}");
    match output.stdout {
        Text::Utf8(text) => (text, output.command.activation),
        Text::Binary { base64 } => panic!("not text: {base64}"),
    }
}

fn problem(error: ClientError) -> pepo_api::Error {
    match error {
        ClientError::Api(error) => *error,
        other => panic!("{other}"),
    }
}

fn word(reason: Reason) -> String {
    serde_json::to_value(reason).expect("json").as_str().expect("a word").to_owned()
}

fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

/// Where commands and the test meet.
fn meeting(daemon: &Daemon, name: &str) -> PathBuf {
    daemon.home().join("guest").join(name)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_session_holds_nothing_and_comes_back_on_the_next_request() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = create(&client, json!({"reactivate": true, "env": {"A": "b"}, "name": "it"})).await;
    assert_eq!(run(&client, &session, "echo $A").await, ("b\n".into(), 1));
    let before = run(&client, &session, "echo kept").await;
    assert_eq!(before.1, 1);

    let released = client.session_release(&session).await.expect("release");
    assert_eq!((released.state, released.activation, released.sandbox_id), (SessionState::Idle, 1, None));
    assert_eq!(released.last_end.map(|end| end.reason), Some(Reason::Idle));
    assert!(released.ended.is_none() && daemon.jails().is_empty());
    // Again is the same.
    assert_eq!(client.session_release(&session).await.expect("release").generation, released.generation);

    // Looking neither activates nor moves anything.
    let listed = client.session_list(&ListSessions::default()).await.expect("list");
    assert_eq!(listed.items[0].state, SessionState::Idle);
    assert_eq!(client.command_list(&session, &ListCommands::default()).await.expect("commands").items.len(), 2);
    let stats = problem(client.session_stats(&session).await.expect_err("stats of nothing"));
    assert_eq!(stats.code, ErrorCode::Conflict);
    assert_eq!(show(&client, "it").await.generation, released.generation);
    assert!(daemon.jails().is_empty());

    // Fifty at once: one Sandbox.
    let asking = (0..50).map(|_| run(&client, &session, "echo $A"));
    for (text, activation) in futures_util::future::join_all(asking).await {
        assert_eq!((text.as_str(), activation), ("b\n", 2));
    }
    assert_eq!(daemon.jails().len(), 1);
    let shown = show(&client, &session).await;
    assert_eq!((shown.state, shown.activation), (SessionState::Active, 2));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replaced_sandbox_is_said_aloud() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = create(&client, json!({"reactivate": true})).await;
    let id = try_run(&client, &session, "true").await.expect("command").command.id;
    let first = client.if_activation(1);
    run(&first, &session, "true").await;
    client.session_release(&session).await.expect("release");
    let replaced = |result: Result<(), ClientError>| {
        let error = problem(result.expect_err("it was answered by another Sandbox"));
        assert_eq!(error.code, ErrorCode::SandboxReplaced, "{error:?}");
    };
    // Neither while it is idle, which it stays by that, nor when another one serves.
    for _ in 0..2 {
        let at = pepo_api::query::AtPath { path: "/etc/hostname".into(), user: None };
        replaced(try_run(&first, &session, "true").await.map(drop));
        replaced(first.file_stat(&session, &at).await.map(drop));
        replaced(first.tar_read(&session, &at).await.map(drop));
        replaced(first.dial(&session, 1).await.map(drop));
        replaced(first.session_release(&session).await.map(drop));
        replaced(first.session_stats(&session).await.map(drop));
        replaced(first.session_terminate(&session).await.map(drop));
        replaced(first.command_kill(&session, id).await.map(drop));
        if show(&client, &session).await.state == SessionState::Idle {
            run(&client, &session, "true").await;
        }
    }
    assert_eq!(show(&client, &session).await.activation, 2);
    run(&client.if_activation(2), &session, "true").await;
    // A command of before is told apart, and a repeat of it is looked at, not run.
    let repeat = CreateCommand { id: Some(id), command: Some("true".into()), ..Default::default() };
    client.session_release(&session).await.expect("release");
    let again = client.command_create(&session, &repeat).await.expect("repeat");
    assert_eq!((again.command.activation, show(&client, &session).await.state), (1, SessionState::Idle));

    let app = show(&client, &session).await.app_id;
    let answer = daemon.as_edge(&format!(
        "GET /v1/sessions/{session} HTTP/1.1\r\nHost: x\r\nPepo-App: {app}\r\nConnection: close\r\n\r\n"
    ));
    assert!(answer.to_lowercase().contains("\r\npepo-activation: 2\r\n"), "{answer}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_is_held_by_sandboxes_and_not_by_sessions() {
    let config = "[sandbox]\nmax = 1\n";
    let daemon = Daemon::start(Options { config: config.into(), ..Options::default() });
    let client = daemon.client();
    let first = create(&client, json!({"reactivate": true})).await;
    run(&client, &first, "true").await;
    let full = problem(client.session_create(&CreateSession::default()).await.expect_err("there is no room"));
    assert_eq!(full.code, ErrorCode::NoCapacity);
    client.session_release(&first).await.expect("release");
    let second = create(&client, json!({"reactivate": true})).await;
    run(&client, &second, "true").await;
    // Every one that asks is told, and the Session stays as it is.
    for answer in futures_util::future::join_all((0..5).map(|_| try_run(&client, &first, "true"))).await {
        assert_eq!(problem(answer.expect_err("there is no room")).code, ErrorCode::NoCapacity);
    }
    assert_eq!(show(&client, &first).await.state, SessionState::Idle);
    client.session_release(&second).await.expect("release");
    assert_eq!(run(&client, &first, "true").await.1, 2);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_callers_of_a_key_have_one_session() {
    // Room for one alone: more would be refused.
    let config = "[sandbox]\nmax = 1\n";
    let daemon = Daemon::start(Options { config: config.into(), ..Options::default() });
    let client = daemon.client();
    let asked = body(json!({"reactivate": true, "labels": {"user": "42"}, "env": {"A": "b"}}));
    let opening = (0..200).map(|_| client.session_open("user:42.chat", &asked));
    let mut ids: Vec<_> = within(120, futures_util::future::join_all(opening))
        .await
        .into_iter()
        .map(|opened| opened.expect("open").id)
        .collect();
    ids.dedup();
    let [id] = ids[..] else { panic!("{} Sessions", ids.len()) };
    let listed = client.session_list(&ListSessions { key: Some("user:42.chat".into()), ..Default::default() }).await;
    assert_eq!(listed.expect("list").items.iter().map(|one| one.id).collect::<Vec<_>>(), [id]);
    let none = client.session_list(&ListSessions { key: Some("other".into()), ..Default::default() }).await;
    assert!(none.expect("list").items.is_empty());

    // Another App has keys of its own.
    client.app_create(&serde_json::from_value(json!({"name": "other"})).expect("app")).await.expect("app");
    let other = client.clone().of_app("other");
    let refused =
        other.session_open("user:42.chat", &asked).await.expect_err("a second one, for which there is no room");
    assert_eq!(problem(refused).code, ErrorCode::NoCapacity);
    let elsewhere = other.session_list(&ListSessions { key: Some("user:42.chat".into()), ..Default::default() }).await;
    assert!(elsewhere.expect("list").items.is_empty());

    // What is not said is not compared; what is said otherwise is named, with both values.
    let open = async |json: serde_json::Value| client.session_open("user:42.chat", &body(json)).await;
    assert_eq!(open(json!({})).await.expect("open").id, id);
    for (json, field, told) in [
        (json!({"env": {"A": "c"}}), "env", r#"env {"A":"b"}, not {"A":"c"}"#),
        (json!({"reactivate": false}), "reactivate", "reactivate true, not false"),
        (json!({"image": "other"}), "image", r#"image "base", not "other""#),
        (json!({"setup": {"command": "x"}}), "setup", r#"setup null, not {"command":"x"}"#),
    ] {
        let error = problem(open(json).await.expect_err("it is another"));
        assert_eq!((error.code, error.param.as_deref()), (ErrorCode::Conflict, Some(field)));
        assert!(error.message.contains(told), "{}", error.message);
    }

    // What has ended is replaced, or refused where that was said.
    client.session_terminate(&id.to_string()).await.expect("terminate");
    let refuse = CreateSession { if_terminated: Some(IfTerminated::Refuse), ..asked.clone() };
    let error = problem(client.session_open("user:42.chat", &refuse).await.expect_err("it has ended"));
    assert_eq!(
        (error.code, error.ended.map(|ended| ended.reason)),
        (ErrorCode::SessionTerminated, Some(Reason::Operator))
    );
    let next = client.session_open("user:42.chat", &asked).await.expect("open");
    assert!(next.id != id && next.key.as_deref() == Some("user:42.chat"));
    let listed = client.session_list(&ListSessions { key: Some("user:42.chat".into()), ..Default::default() }).await;
    assert_eq!(listed.expect("list").items.len(), 2);
    let bad = problem(client.session_open(&"k".repeat(129), &asked).await.expect_err("too long"));
    assert_eq!(bad.param.as_deref(), Some("key"));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unused_session_goes_idle_and_an_expired_one_ends() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = create(&client, json!({"reactivate": true, "keep_alive_seconds": 0})).await;
    // A command that is told not to count keeps nothing.
    let aside = CreateCommand {
        command: Some("sleep 600".into()),
        keeps_alive: Some(false),
        wait_seconds: Some(0),
        ..Default::default()
    };
    let id = client.command_create(&session, &aside).await.expect("command").command.id;
    let idle = reached(&client, &session, SessionState::Idle).await;
    assert_eq!(idle.last_end.map(|end| end.reason), Some(Reason::Idle));
    let ended = client.command_show(&session, id, &Default::default()).await.expect("look").command.end.expect("end");
    assert_eq!(ended.reason, Reason::Idle);
    let update = UpdateSession { expires_seconds: Some(1), ..Default::default() };
    client.session_update(&session, &update).await.expect("update");
    assert_eq!(daemon::ended(&client, &session).await.reason, Reason::Expired);
    let error = problem(try_run(&client, &session, "true").await.expect_err("it has ended"));
    assert_eq!(error.code, ErrorCode::SessionTerminated);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_dies_leaves_a_session_that_comes_back() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = create(&client, json!({"reactivate": true})).await;
    let endless = CreateCommand { command: Some("sleep 600".into()), wait_seconds: Some(0), ..Default::default() };
    let id = client.command_create(&session, &endless).await.expect("command").command.id;
    daemon.kill_agents();
    let idle = reached(&client, &session, SessionState::Idle).await;
    let told = [Reason::VmmExit, Reason::KilledOutside];
    let reason = idle.last_end.expect("an end").reason;
    assert!(told.contains(&reason), "{reason:?}");
    let end = client.command_show(&session, id, &Default::default()).await.expect("look").command.end.expect("end");
    assert_eq!(end.reason, reason);
    assert!(daemon.jails().is_empty());
    assert_eq!(run(&client, &session, "true").await.1, 2);
    // The feed has the end of the Sandbox, with its cause, and the Session's way to its second one.
    let query = ListEvents { session: Some(session.clone()), ..Default::default() };
    let events = client.event_list(&query).await.expect("events").items;
    let ends: Vec<_> = events.iter().filter(|event| event.kind == "sandbox.ended").collect();
    let [end] = ends[..] else { panic!("{events:?}") };
    assert_eq!((end.outcome.as_str(), &end.detail["activation"]), (word(reason).as_str(), &json!(1)));
    assert!(end.sandbox_id.is_some());
    let idle = events.iter().position(|event| event.kind == "session.idle");
    let again = events.iter().position(|event| event.kind == "session.activating" && event.detail["activation"] == 2);
    assert!(idle.is_some() && again.is_some(), "{events:?}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn setup_runs_once_per_activation_and_its_failure_is_told() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let (runs, stands) = (meeting(&daemon, "runs"), meeting(&daemon, "stands"));
    let line =
        format!("echo one line; echo $A >&2; echo x >> {}; test ! -e {} || exit 3", runs.display(), stands.display());
    let session =
        create(&client, json!({"reactivate": true, "env": {"A": "from env"}, "setup": {"command": line}})).await;
    run(&client, &session, "true").await;
    run(&client, &session, "true").await;
    assert_eq!(lines(&runs), 1);
    let listed = client.command_list(&session, &ListCommands::default()).await.expect("commands").items;
    assert_eq!(listed.iter().filter(|command| command.role == CommandRole::Setup).count(), 1);

    // One that worked before stays, and is tried again by the next request.
    client.session_release(&session).await.expect("release");
    std::fs::write(&stands, "").expect("write");
    for tries in [2, 3] {
        let error = problem(try_run(&client, &session, "true").await.expect_err("set-up fails"));
        assert_eq!(error.code, ErrorCode::ActivationFailed);
        let ended = error.ended.expect("ended");
        assert_eq!((ended.reason, ended.exit_code), (Reason::SetupFailed, Some(3)));
        assert!(ended.message.contains("the setup command exited with 3"), "{}", ended.message);
        let mut told = ended.last_output_lines;
        told.sort();
        assert_eq!(told, ["from env", "one line"]);
        assert_eq!(lines(&runs), tries);
        assert_eq!(show(&client, &session).await.state, SessionState::Idle);
        assert!(daemon.jails().is_empty());
    }
    std::fs::remove_file(&stands).expect("remove");
    assert_eq!(run(&client, &session, "true").await.1, 4);

    // What never worked has ended, and says why.
    let never =
        create(&client, json!({"reactivate": true, "setup": {"command": "sleep 600", "timeout_seconds": 1}})).await;
    let error = problem(try_run(&client, &never, "true").await.expect_err("set-up takes too long"));
    assert_eq!(error.code, ErrorCode::ActivationFailed);
    assert!(error.message.contains("ran longer than 1 s"), "{}", error.message);
    assert_eq!(show(&client, &never).await.state, SessionState::Terminated);

    // An end that is asked for does not wait for it.
    let slow = create(&client, json!({"setup": {"command": "sleep 600"}})).await;
    reached(&client, &slow, SessionState::Activating).await;
    let ended = within(60, client.session_terminate(&slow)).await.expect("terminate");
    assert_eq!(ended.ended.map(|ended| ended.reason), Some(Reason::Operator));
    daemon.end().await;
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    listener.local_addr().expect("address").port()
}

async fn services(client: &Client, session: &str, wait: u64) -> Vec<pepo_api::Service> {
    let query = ShowServices { wait_seconds: Some(wait) };
    client.session_services(session, &query).await.expect("services").items
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn services_run_at_every_activation_and_count_as_nothing() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let (starts, port, closed) = (meeting(&daemon, "starts"), free_port(), free_port());
    let web = format!(
        "echo up >> {}; echo serving; cd {}; exec python3 -m http.server {port} --bind 127.0.0.1",
        starts.display(),
        daemon.home().join("guest").display()
    );
    let session = create(
        &client,
        json!({"reactivate": true, "keep_alive_seconds": 0, "services": [
            {"name": "web", "command": web, "port": port, "ready": {"http": "/"}},
            {"name": "once", "command": "exit 0"},
            {"name": "never", "command": "exit 5", "restart": "no"},
            {"name": "crash", "command": "echo down >&2; exit 7"},
            {"name": "deaf", "command": "exec sleep 600", "port": closed}
        ]}),
    )
    .await;
    run(&client, &session, "true").await;
    let by_name = async |name: &str| {
        services(&client, &session, 0).await.into_iter().find(|one| one.spec.name == name).expect("service")
    };
    let ready = async |name: &str, state: ServiceState| {
        within(120, async {
            while by_name(name).await.state != state {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    };
    ready("web", ServiceState::Ready).await;
    ready("once", ServiceState::Exited).await;
    ready("never", ServiceState::Exited).await;
    assert_eq!(by_name("never").await.last_end.and_then(|end| end.exit_code), Some(5));
    within(120, async {
        while by_name("crash").await.restarts < 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert_eq!(by_name("crash").await.last_end.and_then(|end| end.exit_code), Some(7));
    assert_eq!(by_name("deaf").await.state, ServiceState::Starting);
    // A wait that cannot come true ends.
    let began = Instant::now();
    services(&client, &session, 1).await;
    assert!(began.elapsed() >= Duration::from_secs(1));

    // Every run is a command with its output, and none of them counts.
    let web = by_name("web").await;
    let id = web.command_id.expect("a run");
    let shown = client.command_show(&session, id, &Default::default()).await.expect("look");
    assert_eq!((shown.command.role, shown.command.service.as_deref()), (CommandRole::Service, Some("web")));
    assert!(matches!(&shown.stdout, Text::Utf8(text) if text.starts_with("serving\n")), "{:?}", shown.stdout);
    assert_eq!(show(&client, &session).await.commands_running, 0);
    let idle = reached(&client, &session, SessionState::Idle).await;
    assert_eq!(idle.last_end.map(|end| end.reason), Some(Reason::Idle));
    let stopped = services(&client, &session, 5).await;
    assert!(stopped.iter().all(|one| one.state == ServiceState::Stopped), "{stopped:?}");
    until("the Service is gone", || std::net::TcpStream::connect(("127.0.0.1", port)).is_err());

    // A connection to its port brings the Session and the Service back, and waits for it.
    assert_eq!(lines(&starts), 1);
    drop(within(120, client.dial(&session, port)).await.expect("dial"));
    assert_eq!((show(&client, &session).await.activation, lines(&starts)), (2, 2));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pepod_may_die_at_any_time() {
    let mut daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let (starts, port) = (meeting(&daemon, "starts"), free_port());
    let web = format!("echo up >> {}; exec python3 -m http.server {port} --bind 127.0.0.1", starts.display());
    let asked = body(json!({"reactivate": true, "services": [
        {"name": "web", "command": web, "port": port},
        {"name": "once", "command": "exit 0"}
    ]}));
    let opened = client.session_open("it", &asked).await.expect("open");
    let session = opened.id.to_string();
    let idle = create(&client, json!({"reactivate": true, "env": {"A": "b"}, "expires_seconds": 3600})).await;
    run(&client, &idle, "true").await;
    let released = client.session_release(&idle).await.expect("release");
    let cut = meeting(&daemon, "cut");
    let setup = format!("echo x >> {}; test $(wc -l < {}) -gt 1 || sleep 600", cut.display(), cut.display());
    let half = create(&client, json!({"reactivate": true, "setup": {"command": setup}})).await;
    until("set-up runs", || lines(&cut) == 1);
    within(120, async {
        loop {
            let shown = services(&client, &session, 60).await;
            if shown[0].state == ServiceState::Ready && shown[1].state == ServiceState::Exited {
                return;
            }
        }
    })
    .await;
    let before = services(&client, &session, 0).await;

    daemon.kill();
    daemon.restart();

    // What is idle is idle, to the letter.
    assert_eq!(show(&client, &idle).await, released);
    // What runs goes on: neither a second one, nor one that has done its work.
    let after = services(&client, &session, 60).await;
    assert_eq!(after[0].command_id, before[0].command_id);
    assert_eq!((after[1].state, lines(&starts)), (ServiceState::Exited, 1));
    assert_eq!(client.session_open("it", &asked).await.expect("open").id, opened.id);
    // A set-up that was cut off is begun anew, in a Sandbox of its own.
    let again = reached(&client, &half, SessionState::Active).await;
    assert_eq!((again.activation, lines(&cut)), (2, 2));
    assert_eq!(run(&client, &idle, "echo $A").await, ("b\n".into(), 2));

    // A Sandbox that died meanwhile is told, and its Session comes back.
    daemon.kill();
    daemon.kill_agents();
    daemon.restart();
    let gone = reached(&client, &session, SessionState::Idle).await;
    assert!(gone.last_end.is_some_and(|end| end.reason != Reason::Idle));
    assert_eq!(run(&client, &session, "true").await.1, 2);

    // The end of the daemon ends Sandboxes, and not what comes back.
    within(120, client.down()).await.expect("down");
    daemon.gone();
    assert!(daemon.jails().is_empty());
    daemon.restart();
    let shown = show(&client, &session).await;
    assert_eq!((shown.state, shown.last_end.map(|end| end.reason)), (SessionState::Idle, Some(Reason::Drain)));
    assert_eq!(client.session_open("it", &asked).await.expect("open").id, opened.id);
    assert_eq!(run(&client, &session, "true").await.1, 3);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_holds_from_the_next_activation_on() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = create(&client, json!({"reactivate": true, "env": {"A": "b"}, "setup": {"command": "true"}})).await;
    run(&client, &session, "true").await;
    let change = |json: serde_json::Value| serde_json::from_value::<UpdateSession>(json).expect("update");
    let update = change(json!({"env": {"A": "c"}, "setup": null, "labels": {"l": "m"}, "keep_alive_seconds": 7}));
    let updated = client.session_update(&session, &update).await.expect("update");
    assert_eq!((updated.setup, updated.keep_alive_seconds), (None, 7));
    assert_eq!(run(&client, &session, "echo $A").await.0, "b\n");
    client.session_release(&session).await.expect("release");
    assert_eq!(run(&client, &session, "echo $A").await, ("c\n".into(), 2));
    let update = change(json!({"services": [{"name": "No", "command": "x"}]}));
    let error = problem(client.session_update(&session, &update).await.expect_err("bad name"));
    assert_eq!(error.param.as_deref(), Some("services[0].name"));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_services_begin_with_the_next_sandbox_and_not_with_the_next_pepod() {
    let mut daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let [first, second, pid] = ["first", "second", "pid"].map(|name| meeting(&daemon, name));
    let line = |starts: &Path| format!("echo x >> {}; echo $$ > {}; exec sleep 600", starts.display(), pid.display());
    let asked = json!({"reactivate": true, "services": [{"name": "first", "command": line(&first)}]});
    let session = create(&client, asked).await;
    run(&client, &session, "true").await;
    let names = async |wait| -> Vec<_> {
        let items = services(&client, &session, wait).await.into_iter();
        items.map(|one| (one.spec.name, one.state, one.restarts)).collect()
    };
    assert_eq!(names(60).await, [("first".into(), ServiceState::Ready, 0)]);

    // What is asked for is shown at once, and what runs is what was begun, as often as one asks and over a restart.
    for name in ["other", "second"] {
        let update = json!({"services": [{"name": name, "command": line(&second)}]});
        let update = serde_json::from_value(update).expect("update");
        let updated = client.session_update(&session, &update).await.expect("update");
        assert_eq!(updated.services[0].name, name);
    }
    assert_eq!(names(0).await, [("first".into(), ServiceState::Ready, 0)]);
    daemon.kill();
    daemon.restart();
    assert_eq!(names(60).await, [("first".into(), ServiceState::Ready, 0)]);
    assert_eq!(show(&client, &session).await.services[0].name, "second");
    // It is still looked after: dead by a signal it is started again.
    run(&client, &session, &format!("kill -9 $(cat {})", pid.display())).await;
    until("it is started again", || lines(&first) == 2);
    assert_eq!(lines(&second), 0);

    client.session_release(&session).await.expect("release");
    assert_eq!(names(0).await, [("second".into(), ServiceState::Stopped, 0)]);
    run(&client, &session, "true").await;
    assert_eq!(names(60).await, [("second".into(), ServiceState::Ready, 0)]);
    assert_eq!((lines(&first), lines(&second)), (2, 1));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_idle_sessions_cost_next_to_nothing() {
    let mut daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let one = create(&client, json!({"reactivate": true, "labels": {"n": "0"}})).await;
    run(&client, &one, "true").await;
    client.session_release(&one).await.expect("release");
    daemon.kill();
    daemon.restart();
    let before = daemon.resident_kib();
    daemon.kill();
    {
        // A thousand like it, as if they had come and gone idle one after the other.
        let store = pepo_daemon::store::Store::open(&daemon.home().join("state/store/pepo.db")).expect("store");
        let like = store.live_sessions().expect("rows").pop().expect("a row");
        for _ in 0..1000 {
            let row = pepo_daemon::store::SessionRow { id: SessionId::generate(), ..like.clone() };
            store.write_later(pepo_daemon::store::Write::NewSession(Box::new(row))).await;
        }
        let last = pepo_daemon::store::SessionRow { id: SessionId::generate(), ..like };
        store.write(pepo_daemon::store::Write::NewSession(Box::new(last))).await.expect("written");
    }
    daemon.restart();
    let query = ListSessions { limit: Some(1000), state: Some(SessionState::Idle), ..Default::default() };
    assert_eq!(client.session_list(&query).await.expect("list").items.len(), 1000);
    let each = daemon.resident_kib().saturating_sub(before) as f64 / 1001.0;
    let began = (daemon.cpu_ms(), Instant::now());
    tokio::time::sleep(Duration::from_secs(5)).await;
    let used = (daemon.cpu_ms() - began.0) as f64 / began.1.elapsed().as_millis() as f64;
    eprintln!("an idle Session: {each:.1} KiB; a thousand: {:.2} % of a core", used * 100.0);
    // `make bench` limits both to a tenth of this, on a quiet machine and without a debug build's costs.
    assert!(each < 320.0, "{each:.1} KiB for each");
    assert!(used < 0.1, "{:.2} % of a core", used * 100.0);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_is_on_the_disk_before_it_is_seen_to_begin_and_is_gone_on_with() {
    let mut daemon = Daemon::start(Options::default());
    let client = daemon.client();
    for (end, state) in [("release", SessionState::Idle), ("terminate", SessionState::Terminated)] {
        let session = create(&client, json!({"reactivate": true})).await;
        // It takes its time.
        let stubborn = CreateCommand {
            command: Some("trap '' TERM; while :; do sleep 1; done".into()),
            wait_seconds: Some(0),
            on_disconnect: Some(pepo_api::OnDisconnect::Keep),
            ..Default::default()
        };
        client.command_create(&session, &stubborn).await.expect("command");
        reached(&client, &session, SessionState::Active).await;
        // Somebody else writes: nothing of ours gets to the disk meanwhile. It is waited for up to five seconds.
        let writer = rusqlite::Connection::open(daemon.home().join("state/store/pepo.db")).expect("store");
        writer.busy_timeout(Duration::from_secs(30)).expect("timeout");
        writer.execute_batch("BEGIN IMMEDIATE").expect("the disk is ours");
        let (asking, name) = (client.clone(), session.clone());
        let asked = tokio::spawn(async move {
            // Its answer dies with the daemon.
            match end {
                "release" => drop(asking.session_release(&name).await),
                _ => drop(asking.session_terminate(&name).await),
            }
        });
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(show(&client, &session).await.state, SessionState::Active, "{end}: seen and not on the disk");
        }
        writer.execute_batch("ROLLBACK").expect("the disk is theirs");
        let begins = async {
            while show(&client, &session).await.state == SessionState::Active {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        within(60, begins).await;
        daemon.kill();
        asked.await.expect("task");
        daemon.restart();
        let gone = async {
            while show(&client, &session).await.state != state {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), gone).await.unwrap_or_else(|_| panic!("{end}: it goes on"));
    }
    daemon.end().await;
}
