//! The guest dies in each way it can: the caller learns which, soon, and nothing is left.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::time::{Duration, Instant};

use pepo_api::client::{Client, ClientError};
use pepo_api::query::ShowSession;
use pepo_api::{CreateCommand, OnDisconnect, Reason, SessionState, StreamEvent, Text};
use pepo_e2e::{Instance, bare, until};
use rustix::process::{Pid, Signal, kill_process};

/// The goal is 2 s; the limit leaves room for a busy machine.
const GOAL: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(20);

/// Runs a line that says `now` when it is about to happen, does the deed at that moment, and returns what the stream said
/// was the cause.
async fn cause_after(client: &Client, session: &str, line: &str, deed: impl FnOnce()) -> Reason {
    let command =
        CreateCommand { command: Some(line.into()), on_disconnect: Some(OnDisconnect::Keep), ..Default::default() };
    let mut events = client.command_create_events(session, &command).await.expect("events");
    let mut deed = Some(deed);
    let mut began = None;
    loop {
        let next = tokio::time::timeout(Duration::from_secs(60), events.next()).await.expect("an event in time");
        let cause = match next {
            Ok(Some(StreamEvent::Stdout { data: Text::Utf8(text), .. })) if text.contains("now") => {
                began = Some(Instant::now());
                deed.take().expect("once")();
                continue;
            }
            Ok(Some(StreamEvent::Exit { command })) => command.end.expect("an end").reason,
            Ok(Some(StreamEvent::Error { error })) => error.ended.expect("how it ended").reason,
            Err(ClientError::Api(error)) => error.ended.expect("how it ended").reason,
            Ok(Some(_)) => continue,
            other => panic!("the stream ended without a cause: {other:?}"),
        };
        let took = began.expect("it said now").elapsed();
        println!("{cause:?}: told after {took:?} (goal {GOAL:?})");
        assert!(took < LIMIT, "{cause:?} was told after {took:?}");
        return cause;
    }
}

/// One Session's death: the cause, the same cause in the Session's record, and a clean host.
async fn dies(line: &str, deed: impl FnOnce(&Instance), causes: &[Reason]) {
    let instance = Instance::new();
    let daemon = instance.up();
    let client = instance.client();
    let bystander = client.session_create(&bare()).await.expect("session").id.to_string();
    let session = client.session_create(&bare()).await.expect("session").id.to_string();
    // Both run before anything dies.
    for id in [&bystander, &session] {
        let ready = CreateCommand { command: Some("true".into()), ..Default::default() };
        client.command_create(id, &ready).await.expect("ready");
    }
    client.session_terminate(&bystander).await.expect("terminate");
    until("the other Sandbox is gone", LIMIT, || (instance.pids("pepo-keeper").len() == 1).then_some(()));

    let cause = cause_after(&client, &session, line, || deed(&instance)).await;
    assert!(causes.contains(&cause), "{cause:?} is none of {causes:?}");
    let began = Instant::now();
    let record = loop {
        let record = client.session_show(&session, &ShowSession::default()).await.expect("the record stays");
        if record.state == SessionState::Terminated {
            break record;
        }
        assert!(began.elapsed() < LIMIT, "{record:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(record.ended.expect("an end").reason, cause);
    instance.sandboxes_gone();

    // The daemon is none the worse.
    let after = client.session_create(&bare()).await.expect("session").id.to_string();
    let alive = CreateCommand { command: Some("echo alive".into()), ..Default::default() };
    let output = client.command_create(&after, &alive).await.expect("command");
    assert_eq!(output.stdout, Text::Utf8("alive\n".into()));
    client.session_terminate(&after).await.expect("terminate");
    instance.pepo(["down"]).ok();
    daemon.wait();
    instance.end();
}

fn kill(pids: &[i32]) {
    assert_eq!(pids.len(), 1, "{pids:?}");
    kill_process(Pid::from_raw(pids[0]).expect("a pid"), Signal::KILL).expect("kill");
}

#[tokio::test]
async fn by_a_panic_of_its_kernel() {
    let line = "echo now; sudo sh -c 'echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger'; sleep 60";
    dies(line, |_| {}, &[Reason::GuestPanic]).await;
}

#[tokio::test]
async fn by_the_death_of_its_first_process() {
    // Signals do not reach PID 1 from inside, but root can break its code.
    let break_it = "import re\n\
        maps = open('/proc/1/maps').read()\n\
        memory = open('/proc/1/mem', 'r+b', buffering=0)\n\
        for a, b in re.findall(r'^([0-9a-f]+)-([0-9a-f]+) r-x', maps, re.M):\n\
        \x20a, b = int(a, 16), int(b, 16)\n\
        \x20try: memory.seek(a); memory.write(b'\\xcc' * (b - a))\n\
        \x20except (OSError, OverflowError, ValueError): pass\n";
    let line = format!(
        "echo now; sudo python3 -c \"{break_it}\"; for i in $(seq 1 100); do (true &); sleep 0.1; done; sleep 60"
    );
    dies(&line, |_| {}, &[Reason::GuestInitDied, Reason::GuestPanic]).await;
}

#[tokio::test]
async fn by_the_death_of_its_virtual_machine() {
    dies(
        "echo now; sleep 60",
        |instance| kill(&instance.pids(instance.vmm())),
        &[Reason::VmmExit, Reason::KilledOutside],
    )
    .await;
}

#[tokio::test]
async fn by_the_death_of_its_keeper() {
    dies("echo now; sleep 60", |instance| kill(&instance.pids("pepo-keeper")), &[Reason::KilledOutside]).await;
}

#[tokio::test]
async fn by_the_death_of_its_device() {
    let causes = [Reason::VmmExit, Reason::KilledOutside, Reason::GuestSilent];
    dies("echo now; sleep 60", |instance| kill(&instance.pids("vhost-device-vs")), &causes).await;
}

#[test]
fn a_command_that_takes_all_memory_is_told_from_one_that_is_killed() {
    let instance = Instance::new();
    let hog = "import time\nkept = []\nwhile True: kept.append(b'x' * (8 << 20))";
    let ran =
        instance.pepo(["run", "--memory", "256m", "--", "python3", "-c", hog]).within(Duration::from_secs(120)).run();
    assert_eq!(ran.code(), Some(137), "{ran}");
    assert!(ran.err().contains("out of memory"), "{ran}");
    assert!(ran.err().contains("--memory"), "{ran}");
    instance.end();
}
