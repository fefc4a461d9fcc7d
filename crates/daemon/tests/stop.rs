//! How it stops: draining, a driver that panics, and commands whose callers do not come back after a restart.
//!
//! Needs the feature `fake` and the agent's file in `PEPO_GUEST` (`make test` sets it).

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr)]
#![allow(dead_code, reason = "the daemon's helper is shared with other tests")]

mod daemon;

use std::time::{Duration, Instant};

use daemon::{Daemon, Options, ended, until, within};
use pepo_api::client::{Client, ClientError};
use pepo_api::query::ShowCommand;
use pepo_api::{
    CommandState, CreateCommand, CreateSession, DrainRequest, ErrorCode, OnDisconnect, Reason, SessionState,
    SweepRequest, UpdateSession,
};

fn with(config: &str) -> Daemon {
    Daemon::start(Options { config: config.into(), ..Options::default() })
}

async fn create(client: &Client, new: CreateSession) -> String {
    within(120, client.session_create(&new)).await.expect("session").id.to_string()
}

/// A command that runs until its file is there.
async fn waits_for(
    client: &Client,
    session: &str,
    file: &std::path::Path,
    leaves: OnDisconnect,
) -> pepo_api::CommandId {
    let line = format!("until test -e {}; do sleep 0.05; done; echo went on", file.display());
    let command =
        CreateCommand { command: Some(line), wait_seconds: Some(0), on_disconnect: Some(leaves), ..Default::default() };
    within(120, client.command_create(session, &command)).await.expect("command").command.id
}

fn refused(result: Result<impl std::fmt::Debug, ClientError>) -> (ErrorCode, String) {
    match result.expect_err("it was taken") {
        ClientError::Api(error) => (error.code, error.message),
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_refuses_what_is_new_and_waits_for_what_runs() {
    let daemon = with("[pool]\ntarget = 1\n");
    let client = daemon.client();
    let quiet = create(&client, CreateSession::default()).await;
    let back = create(&client, CreateSession { reactivate: Some(true), ..Default::default() }).await;
    let busy = create(&client, CreateSession::default()).await;
    for session in [&quiet, &back] {
        let line = CreateCommand { command: Some("true".into()), ..Default::default() };
        client.command_create(session, &line).await.expect("command");
    }
    let go = daemon.home().join("guest/go");
    let command = waits_for(&client, &busy, &go, OnDisconnect::Keep).await;

    let draining = {
        let client = client.clone();
        tokio::spawn(async move { client.drain(&DrainRequest { deadline_seconds: 600, cancel: false }).await })
    };
    assert_eq!(within(60, ended(&client, &quiet)).await.reason, Reason::Drain);
    let idle = within(60, async {
        loop {
            let shown = client.session_show(&back, &Default::default()).await.expect("show");
            if shown.state == SessionState::Idle {
                break shown;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let idle = idle.await;
    assert_eq!((idle.state, idle.last_end.map(|end| end.reason)), (SessionState::Idle, Some(Reason::Drain)));
    until("the pool and what is quiet go", || daemon.jails().len() == 1);

    // Nothing new: no Session, no second life, no command. What runs is looked at and spoken to.
    let (code, message) = refused(client.session_create(&CreateSession::default()).await);
    assert_eq!(
        (code, message.as_str()),
        (ErrorCode::Draining, "this host is being drained or stopped: it takes nothing new")
    );
    let line = CreateCommand { command: Some("true".into()), ..Default::default() };
    assert_eq!(refused(client.command_create(&busy, &line).await).0, ErrorCode::Draining);
    assert_eq!(refused(client.command_create(&back, &line).await).0, ErrorCode::Draining);
    assert_eq!(refused(client.readyz().await).0, ErrorCode::Draining);
    client.healthz().await.expect("it lives");
    let shown = client.command_show(&busy, command, &ShowCommand::default()).await.expect("show");
    assert_eq!(shown.command.state, CommandState::Running);
    assert!(!draining.is_finished());

    std::fs::write(&go, "").expect("go");
    let report = within(60, draining).await.expect("task").expect("drain");
    assert_eq!((report.released, report.cut, report.left, report.cancelled), (3, 0, 0, false));
    assert!(daemon.jails().is_empty());
    let end = client.command_show(&busy, command, &ShowCommand::default()).await.expect("show").command.end;
    assert_eq!(end.expect("end").exit_code, Some(0), "what ran was cut off");

    // Taken back, it takes work again, also that of who was idle.
    client.drain(&DrainRequest { deadline_seconds: 0, cancel: true }).await.expect("cancel");
    client.command_create(&back, &line).await.expect("command");
    create(&client, CreateSession::default()).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_has_a_deadline_and_can_be_taken_back_meanwhile() {
    let daemon = with("");
    let client = daemon.client();
    let session = create(&client, CreateSession::default()).await;
    let never = daemon.home().join("guest/never");
    let command = waits_for(&client, &session, &never, OnDisconnect::Keep).await;
    let draining = {
        let client = client.clone();
        tokio::spawn(async move { client.drain(&DrainRequest { deadline_seconds: 600, cancel: false }).await })
    };
    let began = Instant::now();
    while client.readyz().await.is_ok() {
        assert!(began.elapsed() < Duration::from_secs(30), "it does not drain");
    }
    client.drain(&DrainRequest { deadline_seconds: 0, cancel: true }).await.expect("cancel");
    let report = within(30, draining).await.expect("task").expect("drain");
    assert_eq!((report.cut, report.left, report.cancelled), (0, 1, true));
    let shown = client.command_show(&session, command, &ShowCommand::default()).await.expect("show");
    assert_eq!(shown.command.state, CommandState::Running, "it was cut off though nobody wanted that any more");

    let began = Instant::now();
    let report = within(60, client.drain(&DrainRequest { deadline_seconds: 1, cancel: false })).await.expect("drain");
    assert_eq!((report.released, report.cut, report.left), (0, 1, 0));
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(ended(&client, &session).await.reason, Reason::Drain);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_panics_ends_its_session_and_holds_nothing() {
    let daemon = with("[sandbox]\nmax = 1\nqueue = 0\n");
    let client = daemon.client();
    for state in ["active", "activating"] {
        let session = create(&client, CreateSession::default()).await;
        if state == "active" {
            let line = CreateCommand { command: Some("true".into()), ..Default::default() };
            client.command_create(&session, &line).await.expect("command");
        }
        let fault =
            UpdateSession { labels: Some([("pepo-fault".into(), "driver".into())].into()), ..Default::default() };
        within(60, client.session_update(&session, &fault)).await.expect_err("it panics");
        let end = ended(&client, &session).await;
        assert_eq!((end.reason, end.message.as_str()), (Reason::Unknown, "an internal error; see the log"));
        until("its Sandbox is gone", || daemon.jails().is_empty());
    }
    // Its place is free, and so is its slot: the only one there is.
    let next = create(&client, CreateSession::default()).await;
    let line = CreateCommand { command: Some("echo fine".into()), ..Default::default() };
    client.command_create(&next, &line).await.expect("command");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_a_command_waits_for_its_caller_as_long_as_its_lease() {
    let mut daemon = with("");
    let client = daemon.client();
    let session = create(&client, CreateSession::default()).await;
    let go = daemon.home().join("guest/go");
    let [lonely, followed] = [
        waits_for(&client, &session, &go, OnDisconnect::Kill).await,
        waits_for(&client, &session, &go, OnDisconnect::Kill).await,
    ];
    let detached = waits_for(&client, &session, &go, OnDisconnect::Keep).await;
    // All three have callers until pepod dies.
    let mut before: Vec<_> = [lonely, followed, detached].map(|id| client.command_attach(&session, id, 0)).into();
    for attached in &mut before {
        within(60, attached.next()).await.expect("start").expect("start");
    }
    daemon.kill();
    drop(before);
    daemon.restart();
    let began = Instant::now();
    let mut back = client.command_attach(&session, followed, 0);
    within(60, back.next()).await.expect("start").expect("start");

    // Looking is no following: it renews nothing. (Whoever waits for the end follows.)
    let end = loop {
        let shown = within(60, client.command_show(&session, lonely, &ShowCommand::default())).await.expect("show");
        if let Some(end) = shown.command.end {
            break end;
        }
        assert!(began.elapsed() < Duration::from_secs(90), "nobody came back, and it runs on");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let took = began.elapsed();
    assert_eq!(end.reason, Reason::Killed);
    let lease = Duration::from_secs(30);
    assert!(took > lease - Duration::from_secs(5) && took < lease + Duration::from_secs(25), "killed after {took:?}");
    for id in [followed, detached] {
        let shown = client.command_show(&session, id, &ShowCommand::default()).await.expect("show");
        assert_eq!(shown.command.state, CommandState::Running);
    }
    std::fs::write(&go, "").expect("go");
    let query = ShowCommand { wait_seconds: Some(60), ..Default::default() };
    for id in [followed, detached] {
        let end = within(60, client.command_show(&session, id, &query)).await.expect("show").command.end;
        assert_eq!(end.expect("end").exit_code, Some(0));
    }
    drop(back);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_answers_within_a_second_though_a_guest_does_not() {
    let mut daemon = with("[sandbox]\nmemory_budget = \"1t\"\ncpu_overcommit = 200\ndisk_budget = \"1t\"\n");
    let client = daemon.client();
    let sessions: Vec<_> =
        futures_util::future::join_all((0..20).map(|_| create(&client, CreateSession::default()))).await;
    for session in &sessions {
        let line = CreateCommand { command: Some("true".into()), ..Default::default() };
        within(120, client.command_create(session, &line)).await.expect("command");
    }
    // One guest stands still: whoever asks for it waits, and nobody else.
    let stopped = daemon.agents().into_iter().next().expect("an agent");
    daemon.kill();
    // After that: the kernel continues what stood still when its parent died.
    rustix::process::kill_process(stopped, rustix::process::Signal::STOP).expect("stop");
    let began = Instant::now();
    daemon.restart();
    client.healthz().await.expect("it answers");
    let ready = began.elapsed();
    let all = client.session_list(&Default::default()).await.expect("list");
    assert_eq!(all.items.len(), 20);
    let mut answered = 0;
    for session in &sessions {
        let line = CreateCommand { command: Some("true".into()), ..Default::default() };
        let asked = tokio::time::timeout(Duration::from_secs(5), client.command_create(session, &line)).await;
        answered += usize::from(asked.is_ok_and(|done| done.is_ok()));
    }
    assert_eq!(answered, 19, "one guest that stands still holds others up");
    assert!(ready < Duration::from_secs(10), "answered after {ready:?}");
    eprintln!("answered {ready:?} after its start (goal: 1 s on a quiet machine)");
    rustix::process::kill_process(stopped, rustix::process::Signal::CONT).expect("continue");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_finds_what_is_no_image_and_leaves_the_pool_alone() {
    let daemon = with("[pool]\ntarget = 1\n");
    let client = daemon.client();
    until("the pool has one", || daemon.jails().len() == 1);
    let half = daemon.home().join("state/images").join("e".repeat(64));
    std::fs::create_dir_all(&half).expect("half an Image");
    let look = client.sweep(&SweepRequest { dry_run: true, all: false }).await.expect("sweep").leftovers;
    let found: Vec<_> = look.iter().map(|left| (left.kind.as_str(), left.name.as_str(), left.removed)).collect();
    assert_eq!(found, [("image", half.display().to_string().as_str(), false)]);
    assert!(look[0].age_seconds.is_some() && !look[0].owner.is_empty(), "{look:?}");
    let swept = client.sweep(&SweepRequest { dry_run: false, all: false }).await.expect("sweep").leftovers;
    assert!(swept.len() == 1 && swept[0].removed, "{swept:?}");
    assert!(!half.exists());
    assert_eq!(daemon.jails().len(), 1, "the pool was swept");
    daemon.end().await;
}
