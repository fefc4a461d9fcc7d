//! What becomes of pool, idle Sessions and new ones while the host runs short: by readings that a test tells the daemon, with
//! guests that are host processes.
//!
//! Needs the feature `fake` and the agent's file in `PEPO_GUEST` (`make test` sets it).

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic)]
#![allow(dead_code, reason = "the daemon's helper is shared with other tests")]

mod daemon;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

use daemon::{Daemon, Options, within};
use pepo_api::client::{Client, ClientError};
use pepo_api::query::{ShowCommand, ShowSession};
use pepo_api::{
    CommandId, CommandState, CreateCommand, CreateSession, ErrorCode, OnDisconnect, Reason, Session, SessionState,
};

/// What the daemon is told of its host.
struct Host(PathBuf);

impl Host {
    /// Enough of everything.
    fn of(daemon: &Daemon) -> Self {
        let host = Host(daemon.home().join("state/told-proc"));
        std::fs::create_dir_all(host.0.join("pressure")).expect("directory");
        host.tell(60, 60, 0);
        host
    }

    /// Percent of memory and of the disk that are left, and percent of the time in which everything waits for memory.
    fn tell(&self, memory: u64, disk: u64, still: u64) {
        let write = |name: &str, text: String| {
            // Whole or not at all: the daemon may look at any time.
            let (new, place) = (self.0.join("new"), self.0.join(name));
            std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &place)).expect("write");
        };
        write("meminfo", format!("MemTotal: 16000000 kB\nMemAvailable: {} kB\n", 160_000 * memory));
        write("disk", format!("{} {}", 200_u64 << 30, disk * (2 << 30)));
        write("pressure/memory", format!("some avg10=50.00 avg60=0.00\nfull avg10={still}.00 avg60=0.00 total=1\n"));
    }
}

async fn create(client: &Client) -> Result<String, ClientError> {
    let new = CreateSession { workspace: Some(None), reactivate: Some(true), ..Default::default() };
    within(120, client.session_create(&new)).await.map(|session| session.id.to_string())
}

async fn run(client: &Client, session: &str, line: &str, wait_seconds: u64) -> CommandId {
    let command = CreateCommand {
        command: Some(line.into()),
        wait_seconds: Some(wait_seconds),
        on_disconnect: Some(OnDisconnect::Keep),
        ..Default::default()
    };
    within(120, client.command_create(session, &command)).await.expect("command").command.id
}

async fn show(client: &Client, session: &str) -> Session {
    client.session_show(session, &ShowSession::default()).await.expect("show")
}

/// Waits until something that has to be asked for holds.
async fn comes<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    assert!(waited.await.is_ok(), "not in a minute: {what}");
}

/// Waits until the daemon stands at that level, as its metrics say.
async fn stands_at(daemon: &Daemon, level: u8) {
    let url = std::fs::read_to_string(daemon.home().join("run/metrics")).expect("the address of metrics");
    let address = url.trim().trim_start_matches("http://").trim_end_matches("/metrics").to_owned();
    let wanted = format!("pepo_pressure_level {level}\n");
    comes(&wanted, async || {
        let mut stream = TcpStream::connect(&address).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("time-out");
        write!(stream, "GET /metrics HTTP/1.1\r\nhost: pepo\r\nconnection: close\r\n\r\n").expect("write");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("read");
        text.contains(&wanted)
    })
    .await;
}

async fn pool_has(client: &Client, what: &str) -> bool {
    let report = within(60, client.doctor()).await.expect("doctor");
    report.checks.iter().any(|check| check.name == "pool" && check.found.contains(what))
}

async fn runs(client: &Client, session: &str, command: CommandId) -> bool {
    let shown = client.command_show(session, command, &ShowCommand::default()).await.expect("show");
    shown.command.state == CommandState::Running
}

fn refused(error: ClientError) -> pepo_api::Error {
    match error {
        ClientError::Api(error) => *error,
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pool_goes_first_then_what_nobody_uses_then_nothing_new_begins_and_what_is_in_use_stays() {
    let daemon = Daemon::start(Options { config: "[pool]\ntarget = 1\nminimum = 1\n".into(), ..Default::default() });
    let (client, host) = (daemon.client(), Host::of(&daemon));
    let unused = create(&client).await.expect("session");
    run(&client, &unused, "true", 30).await;
    let used = create(&client).await.expect("session");
    let endless = run(&client, &used, "sleep 600", 0).await;
    comes("a pool", || pool_has(&client, "1 of 1 ready")).await;

    host.tell(8, 60, 0);
    comes("the pool goes", || pool_has(&client, "0 of 1 ready")).await;
    let during = create(&client).await.expect("something new may begin");
    client.session_terminate(&during).await.expect("terminate");
    assert_eq!(show(&client, &unused).await.state, SessionState::Active, "it went with the pool");

    host.tell(5, 60, 0);
    comes("the unused one goes", async || show(&client, &unused).await.state == SessionState::Idle).await;
    let end = show(&client, &unused).await.last_end.expect("an end");
    assert_eq!(end.reason, Reason::Idle);
    assert!(end.message.contains("of memory are left"), "{}", end.message);
    let during = create(&client).await.expect("something new may begin");
    run(&client, &during, "true", 30).await;
    client.session_terminate(&during).await.expect("terminate");

    host.tell(2, 60, 0);
    stands_at(&daemon, 3).await;
    let error = refused(create(&client).await.expect_err("refused"));
    assert_eq!(error.code, ErrorCode::NoCapacity);
    assert!(error.message.contains("312 of 15625 MiB of memory are left"), "{}", error.message);
    let back = CreateCommand { command: Some("true".into()), ..Default::default() };
    let error = refused(client.command_create(&unused, &back).await.expect_err("it needs a Sandbox"));
    assert_eq!(error.code, ErrorCode::NoCapacity);
    assert!(runs(&client, &used, endless).await && daemon.jails().len() == 1, "what is in use was touched");

    host.tell(60, 60, 0);
    stands_at(&daemon, 0).await;
    create(&client).await.expect("new ones begin again");
    comes("the pool is back", || pool_has(&client, "1 of 1 ready")).await;
    run(&client, &unused, "true", 30).await;
    assert!(runs(&client, &used, endless).await);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_fills_and_memory_that_is_waited_for_count_as_well() {
    let daemon = Daemon::start(Options::default());
    let (client, host) = (daemon.client(), Host::of(&daemon));
    let unused = create(&client).await.expect("session");
    run(&client, &unused, "true", 30).await;
    host.tell(60, 0, 0);
    stands_at(&daemon, 3).await;
    let error = refused(create(&client).await.expect_err("refused"));
    assert!(error.message.contains("0 of 204800 MiB of the disk are left"), "{}", error.message);
    // What nobody uses goes there, too, however far it went at once.
    comes("the unused one goes", async || show(&client, &unused).await.state == SessionState::Idle).await;
    host.tell(60, 60, 45);
    comes("everything waits", async || {
        let error = refused(create(&client).await.expect_err("refused"));
        error.message.contains("for 45 % of the time everything waits for memory")
    })
    .await;
    host.tell(60, 60, 0);
    stands_at(&daemon, 0).await;
    create(&client).await.expect("new ones begin again");
    daemon.end().await;
}
