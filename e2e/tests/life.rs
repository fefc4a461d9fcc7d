//! Sessions that outlive their Sandboxes, on real microVMs: what is fresh after an activation, and what is the same.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use pepo_api::client::Client;
use pepo_api::query::{ShowServices, ShowSession};
use pepo_api::{CreateCommand, CreateSession, ErrorCode, Reason, ServiceState, SessionState, Text};
use pepo_e2e::Instance;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn sh(client: &Client, session: &str, line: &str) -> (String, u64) {
    let command = CreateCommand { command: Some(line.into()), wait_seconds: Some(120), ..Default::default() };
    let output = client.command_create(session, &command).await.expect("command");
    match output.stdout {
        Text::Utf8(text) => (text, output.command.activation),
        Text::Binary { .. } => panic!("not text"),
    }
}

async fn reached(client: &Client, session: &str, state: SessionState) -> pepo_api::Session {
    let mut after = 0;
    let waiting = async {
        loop {
            let query = ShowSession { after: Some(after), wait_seconds: Some(60) };
            let shown = client.session_show(session, &query).await.expect("show");
            if shown.state == state {
                return shown;
            }
            assert!(shown.ended.is_none(), "{shown:?}");
            after = shown.generation;
        }
    };
    tokio::time::timeout(Duration::from_secs(300), waiting).await.expect("in time")
}

#[tokio::test]
async fn an_idle_session_comes_back_in_a_fresh_machine_as_itself() {
    let instance = Instance::new();
    let daemon = instance.up();
    let client = instance.client();
    let body = serde_json::json!({
        "reactivate": true, "env": {"A": "b"},
        "setup": {"command": "echo set up > ~/setup"},
        "services": [{"name": "web", "command": "cd ~ && exec python3 -m http.server 8000", "port": 8000, "ready": {"http": "/"}}]
    });
    let body: CreateSession = serde_json::from_value(body).expect("body");
    let opened = client.session_open("it", &body).await.expect("open");
    let session = opened.id.to_string();
    let look =
        "cat /proc/sys/kernel/random/boot_id; hostname; echo $A; cat ~/setup; ls ~/left 2>/dev/null; touch ~/left";
    let (first, activation) = sh(&client, &session, look).await;
    assert_eq!(activation, 1);
    let first: Vec<_> = first.lines().collect();
    let [boot, same @ ..] = &first[..] else { panic!("{first:?}") };
    assert_eq!(same, [opened.id.hex().as_str(), "b", "set up"]);

    let sandbox = client.session_show(&session, &ShowSession::default()).await.expect("show").sandbox_id;
    let hex = sandbox.expect("a Sandbox").hex();
    // The pool's own are there too.
    let on_host = || {
        let jails = std::fs::read_dir(instance.home().join("state/jail")).expect("jails");
        jails.flatten().any(|jail| jail.file_name().to_string_lossy().contains(&hex))
    };
    assert!(on_host());
    let released = client.session_release(&session).await.expect("release");
    assert_eq!((released.state, on_host()), (SessionState::Idle, false));

    // A connection to the Service's port brings up machine and Service, and reaches it.
    let mut web = client.dial(&session, 8000).await.expect("dial");
    web.write_all(b"GET /setup HTTP/1.0\r\n\r\n").await.expect("request");
    let mut answer = String::new();
    web.read_to_string(&mut answer).await.expect("answer");
    assert!(answer.starts_with("HTTP/1.0 200") && answer.ends_with("set up\n"), "{answer}");
    let services = client.session_services(&session, &ShowServices { wait_seconds: Some(60) }).await.expect("services");
    assert_eq!(services.items[0].state, ServiceState::Ready);

    let (second, activation) = sh(&client, &session, look).await;
    assert_eq!(activation, 2);
    let second: Vec<_> = second.lines().collect();
    let [other, same_again @ ..] = &second[..] else { panic!("{second:?}") };
    assert_eq!(same_again, same, "not itself, or not fresh");
    assert_ne!(other, boot, "the same kernel");
    let replaced = client.if_activation(1).session_release(&session).await.expect_err("it is another one");
    assert_eq!(replaced.code(), Some(ErrorCode::SandboxReplaced));

    // A machine that panics takes its Sandbox with it, and not the Session.
    let panic = CreateCommand {
        command: Some("sudo sh -c 'echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger'; sleep 60".into()),
        wait_seconds: Some(120),
        ..Default::default()
    };
    let cut = client.command_create(&session, &panic).await;
    if let Ok(output) = &cut {
        assert_eq!(output.command.end.as_ref().map(|end| end.reason), Some(Reason::GuestPanic), "{output:?}");
    }
    let idle = reached(&client, &session, SessionState::Idle).await;
    let end = idle.last_end.expect("an end");
    assert_eq!(end.reason, Reason::GuestPanic, "{end:?}");
    assert!(end.last_console_lines.iter().any(|line| line.contains("Kernel Offset")), "{end:?}");
    assert_eq!(sh(&client, &session, "cat ~/setup").await, ("set up\n".into(), 3));

    // The command line says all of it.
    let shown = instance.pepo(["session", "show", &session]).ok();
    for told in ["active", "reactivate", "kernel panicked", "web"] {
        assert!(shown.out().contains(told), "{told}: {shown}");
    }
    client.session_terminate(&session).await.expect("terminate");
    instance.pepo(["down"]).ok();
    let ran = daemon.wait();
    assert_eq!(ran.code(), Some(0), "{ran}");
    instance.end();
}
