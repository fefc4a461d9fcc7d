//! pepod dies or is replaced in the middle of a command: the Sandbox is adopted, the command goes on, no output is lost.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::time::Duration;

use pepo_api::query::ShowCommand;
use pepo_api::{CreateCommand, OnDisconnect, StreamEvent, Text};
use pepo_e2e::{Instance, bare, until};
use rustix::process::{Pid, Signal, kill_process};

const LINES: u32 = 60;

fn counting() -> CreateCommand {
    CreateCommand {
        command: Some(format!("for i in $(seq 1 {LINES}); do echo line $i; sleep 0.1; done; exit 7")),
        wait_seconds: Some(0),
        on_disconnect: Some(OnDisconnect::Keep),
        ..Default::default()
    }
}

/// Kills this process of the instance while a command runs and somebody follows it.
async fn survives_the_death_of(program: &str) {
    let instance = Instance::new();
    let daemon = instance.up();
    let client = instance.client();
    let session = client.session_create(&bare()).await.expect("session").id.to_string();
    let command = client.command_create(&session, &counting()).await.expect("command").command.id;
    let mut events = client.command_events(&session, command, ShowCommand { follow: Some(true), ..Default::default() });
    let mut seen = String::new();
    let mut killed = false;
    let end = loop {
        match events.next().await.expect("the stream is taken up again").expect("it goes on") {
            StreamEvent::Stdout { data: Text::Utf8(text), .. } => seen.push_str(&text),
            StreamEvent::Gap { from, to } => panic!("{from}..{to} is missing"),
            StreamEvent::Exit { command } => break command.end.expect("an end"),
            _ => {}
        }
        if !killed && seen.contains("line 10\n") {
            killed = true;
            let before = instance.pids("pepod");
            let victims = instance.pids(program);
            assert_eq!(victims.len(), 1, "{program}: {victims:?}");
            kill_process(Pid::from_raw(victims[0]).expect("a pid"), Signal::KILL).expect("kill");
            until("pepod is started again", Duration::from_secs(30), || {
                let now = instance.pids("pepod");
                (now.len() == 1 && now != before).then_some(())
            });
        }
    };
    assert!(killed);
    let wanted: String = (1..=LINES).map(|n| format!("line {n}\n")).collect();
    assert_eq!(seen, wanted);
    assert_eq!(end.exit_code, Some(7));

    // The adopted Sandbox takes new commands.
    let after = CreateCommand { command: Some("echo still here".into()), ..Default::default() };
    let output = client.command_create(&session, &after).await.expect("command");
    assert_eq!(output.stdout, Text::Utf8("still here\n".into()));
    assert_eq!(output.command.activation, 1);
    client.session_terminate(&session).await.expect("terminate");
    instance.pepo(["down"]).ok();
    daemon.wait();
    instance.end();
}

#[tokio::test]
async fn of_the_daemon_itself() {
    survives_the_death_of("pepod").await;
}

#[tokio::test]
async fn of_its_privileged_half() {
    survives_the_death_of("pepo-host").await;
}

#[test]
fn a_client_of_the_command_line_does_not_notice() {
    let instance = Instance::new();
    let daemon = instance.up();
    let session = instance.pepo(["session", "create", "-q", "--workspace", "none"]).ok().out().trim().to_owned();
    let script = format!("for i in $(seq 1 {LINES}); do echo line $i; sleep 0.1; done");
    let running = instance.pepo(["exec", &session, "--", "bash", "-c", &script]).start();
    running.says("line 10\n", Duration::from_secs(60));
    let before = instance.pids("pepod");
    kill_process(Pid::from_raw(before[0]).expect("a pid"), Signal::KILL).expect("kill");
    let ran = running.wait();
    assert_eq!(ran.code(), Some(0), "{ran}");
    assert_eq!(ran.out(), (1..=LINES).map(|n| format!("line {n}\n")).collect::<String>(), "{ran}");
    instance.pepo(["session", "rm", &session]).ok();
    instance.pepo(["down"]).ok();
    daemon.wait();
    instance.end();
}
