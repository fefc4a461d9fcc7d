//! The warm pool with guests that are host processes: who gets what waits ready, what gives way to what, and what is
//! replaced.
//!
//! Needs the feature `fake` and the agent's file in `PEPO_GUEST` (`make test` sets it).

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr)]
#![allow(dead_code, reason = "the daemon's helper is shared with other tests")]

mod daemon;

use std::collections::BTreeSet;
use std::time::Duration;

use daemon::{Daemon, Options, until, within};
use pepo_api::client::Client;
use pepo_api::query::ShowCommand;
use pepo_api::{CreateCommand, CreateSession, OnDisconnect, Severity};

fn with(config: &str) -> Daemon {
    Daemon::start(Options { config: config.into(), ..Options::default() })
}

/// What doctor says of the pool, one line for each shape.
async fn pool(client: &Client) -> Vec<String> {
    let report = within(60, client.doctor()).await.expect("doctor");
    let about = report.checks.into_iter().filter(|check| check.name == "pool");
    about.map(|check| format!("{:?}: {}", check.severity, check.found)).collect()
}

/// Waits until the pool says that.
async fn pool_says(client: &Client, what: &str) {
    let said = tokio::time::timeout(Duration::from_secs(60), async {
        while !pool(client).await.iter().any(|line| line.contains(what)) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    if said.await.is_err() {
        panic!("the pool does not say `{what}` but {:?}", pool(client).await);
    }
}

/// The Sandboxes that have a directory.
fn jailed(daemon: &Daemon) -> BTreeSet<String> {
    let name = |jail: std::path::PathBuf| jail.file_name().expect("name").to_string_lossy().into_owned();
    daemon.jails().into_iter().map(name).collect()
}

/// The Sandbox that a Session has once it is Active, as its directory is called.
async fn sandbox(client: &Client, session: &str) -> String {
    let ready = CreateCommand { command: Some("true".into()), ..Default::default() };
    within(120, client.command_create(session, &ready)).await.expect("command");
    let shown = client.session_show(session, &Default::default()).await.expect("show");
    let id = shown.sandbox_id.expect("a Sandbox").to_string();
    id.strip_prefix("sbx_").expect("prefix").to_owned()
}

async fn create(client: &Client, new: CreateSession) -> String {
    within(120, client.session_create(&new)).await.expect("session").id.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_claims_on_a_pool_of_ten_get_ten_and_none_twice() {
    let config = "[sandbox]\nmemory_budget = \"1t\"\ncpu_overcommit = 200\ndisk_budget = \"1t\"\nboots = 4\n[pool]\ntarget = 10\n";
    let daemon = with(config);
    let client = daemon.client();
    pool_says(&client, "10 of 10 ready").await;
    let waiting = jailed(&daemon);
    assert_eq!(waiting.len(), 10);
    let all = (0..50).map(|_| {
        let client = client.clone();
        async move {
            let session = create(&client, CreateSession::default()).await;
            sandbox(&client, &session).await
        }
    });
    let got = within(300, futures_util::future::join_all(all)).await;
    let once: BTreeSet<_> = got.iter().cloned().collect();
    assert_eq!(once.len(), 50, "a Sandbox has two Sessions");
    assert_eq!(once.intersection(&waiting).count(), 10, "not every waiting one was claimed");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_for_the_same_shape_alone_and_a_name_that_is_taken_costs_none() {
    let daemon = with("[pool]\ntarget = 1\n");
    let client = daemon.client();
    pool_says(&client, "1 of 1 ready").await;
    let waiting = jailed(&daemon);
    let larger = create(&client, CreateSession { memory_mib: Some(600), name: Some("n".into()), ..Default::default() });
    let larger = larger.await;
    assert!(!waiting.contains(&sandbox(&client, &larger).await), "another shape was claimed");
    let taken = CreateSession { name: Some("n".into()), ..Default::default() };
    client.session_create(&taken).await.expect_err("the name is taken");
    pool_says(&client, "1 of 1 ready").await;
    let same = create(&client, CreateSession::default()).await;
    assert!(waiting.contains(&sandbox(&client, &same).await), "the waiting one was not claimed");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_made_while_a_command_runs() {
    let daemon = with("[pool]\ntarget = 2\n");
    let client = daemon.client();
    pool_says(&client, "2 of 2 ready").await;
    let session = create(&client, CreateSession::default()).await;
    let endless = CreateCommand {
        command: Some("echo up; sleep 600".into()),
        wait_seconds: Some(1),
        on_disconnect: Some(OnDisconnect::Keep),
        ..Default::default()
    };
    // One may be begun between the claim and the command; that one is given room to come to its end.
    let id = within(60, client.command_create(&session, &endless)).await.expect("command").command.id;
    let busy = client.command_show(&session, id, &ShowCommand { wait_seconds: Some(2), ..Default::default() }).await;
    busy.expect("it runs");
    let second = create(&client, CreateSession::default()).await;
    sandbox(&client, &second).await;
    let third = create(&client, CreateSession::default()).await;
    sandbox(&client, &third).await;
    let before = jailed(&daemon);
    // Longer than several looks: with the command running nothing new appears.
    let looked = client.command_show(&session, id, &ShowCommand { wait_seconds: Some(3), ..Default::default() }).await;
    looked.expect("it runs");
    assert_eq!(jailed(&daemon), before, "one was made beside a running command");
    client.command_kill(&session, id).await.expect("kill");
    pool_says(&client, "2 of 2 ready").await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pool_gives_way_to_whoever_asks() {
    // Room for two of 512 MiB with what each costs beside it.
    let daemon = with("[sandbox]\nmemory_budget = 1300\nqueue_wait = \"1s\"\n[pool]\ntarget = 2\n");
    let client = daemon.client();
    pool_says(&client, "2 of 2 ready").await;
    let waiting = jailed(&daemon);
    let large = create(&client, CreateSession { memory_mib: Some(700), ..Default::default() }).await;
    let given = sandbox(&client, &large).await;
    assert!(!waiting.contains(&given));
    until("the pool has given way", || daemon.jails().len() == 1);
    let full = client.session_create(&CreateSession { memory_mib: Some(512), ..Default::default() }).await;
    let full = full.expect_err("there is no room");
    assert_eq!(full.code(), Some(pepo_api::ErrorCode::NoCapacity), "{full}");
    client.session_terminate(&large).await.expect("terminate");
    pool_says(&client, "2 of 2 ready").await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_dies_or_is_too_old_is_replaced_and_nothing_of_it_is_left() {
    let daemon = with("[pool]\ntarget = 2\nage = \"1h\"\n");
    let client = daemon.client();
    pool_says(&client, "2 of 2 ready").await;
    let first = jailed(&daemon);
    daemon.kill_agents();
    until("the dead ones are replaced", || {
        let now = jailed(&daemon);
        now.len() == 2 && now.is_disjoint(&first)
    });
    pool_says(&client, "2 of 2 ready").await;
    daemon.end().await;

    let daemon = with("[pool]\ntarget = 1\nage = \"1s\"\n");
    let client = daemon.client();
    pool_says(&client, "1 of 1 ready").await;
    let first = jailed(&daemon);
    until("the old one is replaced", || {
        let now = jailed(&daemon);
        now.len() == 1 && now.is_disjoint(&first)
    });
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_what_waited_is_swept_and_made_anew() {
    let mut daemon = with("[pool]\ntarget = 3\n");
    let client = daemon.client();
    pool_says(&client, "3 of 3 ready").await;
    let session = create(&client, CreateSession::default()).await;
    let mine = sandbox(&client, &session).await;
    pool_says(&client, "3 of 3 ready").await;
    let before = jailed(&daemon);
    daemon.kill();
    daemon.restart();
    pool_says(&client, "3 of 3 ready").await;
    until("what waited before is gone", || {
        let now = jailed(&daemon);
        let kept: Vec<_> = now.intersection(&before).collect();
        now.len() == 4 && kept == [&mine]
    });
    assert_eq!(sandbox(&client, &session).await, mine, "the Session's own was not kept");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_made_is_told_and_tried_again() {
    let daemon = with("[pool]\ntarget = 1\nshapes = \"base:cpus=2:target=1\"\n");
    let client = daemon.client();
    pool_says(&client, "base (2 cpus, 512 MiB, 2048 MiB of disk): 1 of 1 ready").await;
    pool_says(&client, "base (1 cpus, 512 MiB, 2048 MiB of disk): 1 of 1 ready").await;
    let fault = daemon.home().join("state/fault-start");
    std::fs::write(&fault, "no start today").expect("fault");
    daemon.kill_agents();
    pool_says(&client, "no start today").await;
    let told = pool(&client).await;
    assert!(told.iter().any(|line| line.starts_with(&format!("{:?}", Severity::Warning))), "{told:?}");
    std::fs::remove_file(&fault).expect("remove");
    pool_says(&client, "base (2 cpus, 512 MiB, 2048 MiB of disk): 1 of 1 ready").await;
    pool_says(&client, "base (1 cpus, 512 MiB, 2048 MiB of disk): 1 of 1 ready").await;
    daemon.end().await;

    let off = with("[pool]\ntarget = 0\n");
    assert!(pool(&off.client()).await.iter().all(|line| line.contains("off")));
    off.end().await;
}
