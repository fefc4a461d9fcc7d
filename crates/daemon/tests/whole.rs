//! The whole path without a VMM: a real pepod, the real guest agent as a host process, the typed client.
//!
//! Needs the feature `fake` and the agent's file in `PEPO_GUEST` (`make test` sets it). After every test nothing of its
//! instance is left: no process, no jail.

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod daemon;

use std::time::{Duration, Instant};

use daemon::{Daemon, Options, within};
use pepo_api::client::{AttachEvent, Client, ClientError, Input, body_from};
use pepo_api::query::{AtPath, ListSessions, ShowCommand, ShowSession, UnderPath, WriteFile, WriteStdin};
use pepo_api::{
    CommandId, CommandState, CreateCommand, CreateSession, ErrorCode, OnDisconnect, Output, Reason, SessionState,
    StreamEvent, Text,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn line(command: &str) -> CreateCommand {
    CreateCommand { command: Some(command.into()), ..Default::default() }
}

fn text(text: &Text) -> &str {
    match text {
        Text::Utf8(text) => text,
        Text::Binary { base64 } => panic!("not text: {base64}"),
    }
}

async fn session(client: &Client) -> String {
    client.session_create(&CreateSession::default()).await.expect("session").id.to_string()
}

async fn run(client: &Client, session: &str, command: &str) -> Output {
    client.command_create(session, &line(command)).await.expect("command")
}

fn code(error: &ClientError) -> Option<ErrorCode> {
    error.code()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_answers_with_its_end_and_its_output() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let output = run(&client, &session, "echo out; echo err >&2; exit 7").await;
    assert_eq!((text(&output.stdout), text(&output.stderr)), ("out\n", "err\n"));
    let end = output.command.end.expect("end");
    assert_eq!((end.reason, end.exit_code), (Reason::Exit, Some(7)));
    assert_eq!((output.command.stdout_bytes, output.command.stderr_bytes), (4, 4));

    let output = run(&client, &session, "printf '\\377\\376'").await;
    assert_eq!(output.stdout, Text::Binary { base64: "//4=".into() });

    let big = CreateCommand { max_output_bytes: Some(100), ..line("seq 1 5000; echo end") };
    let output = client.command_create(&session, &big).await.expect("command");
    assert!(
        output.truncated && text(&output.stdout).starts_with("1\n2\n") && text(&output.stdout).ends_with("5000\nend\n")
    );
    assert_eq!(output.missing_bytes + text(&output.stdout).len() as u64, output.command.stdout_bytes);

    let killed = run(&client, &session, "kill -9 $$").await.command.end.expect("end");
    assert_eq!((killed.reason, killed.signal.as_deref()), (Reason::Signal, Some("SIGKILL")));
    let late = CreateCommand { timeout_seconds: Some(1), ..line("sleep 600") };
    let late = client.command_create(&session, &late).await.expect("command").command.end.expect("end");
    assert_eq!(late.reason, Reason::Timeout);

    let input = CreateCommand { argv: Some(vec!["cat".into()]), stdin: Some("häl\0lo".into()), ..Default::default() };
    let output = client.command_create(&session, &input).await.expect("command");
    assert_eq!(text(&output.stdout), "häl\0lo");
    let env =
        CreateCommand { env: [("A".into(), "b c".into())].into(), cwd: Some("/".into()), ..line("echo \"$A\"; pwd") };
    assert_eq!(text(&client.command_create(&session, &env).await.expect("command").stdout), "b c\n/\n");

    let missing = CreateCommand { argv: Some(vec!["no-such-program".into()]), ..Default::default() };
    let error = client.command_create(&session, &missing).await.expect_err("refused");
    assert_eq!(code(&error), Some(ErrorCode::CommandNotFound), "{error}");
    let refused = CreateCommand { argv: Some(vec!["/etc/passwd".into()]), ..Default::default() };
    let error = client.command_create(&session, &refused).await.expect_err("refused");
    assert_eq!(code(&error), Some(ErrorCode::CommandNotStarted), "{error}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_is_over_goes_on_where_it_was() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let slow = CreateCommand { wait_seconds: Some(1), ..line("printf 'a\\303'; sleep 2; printf '\\244z'; exit 3") };
    let first = client.command_create(&session, &slow).await.expect("command");
    assert_eq!(first.command.state, CommandState::Running);
    // The first half of the character is left to the next look.
    assert_eq!((text(&first.stdout), first.next_offset), ("a", 1));
    let query = ShowCommand { wait_seconds: Some(60), offset: Some(first.next_offset), ..Default::default() };
    let second = client.command_show(&session, first.command.id, &query).await.expect("look");
    assert_eq!((text(&second.stdout), second.next_offset), ("äz", 4));
    assert_eq!(second.command.end.expect("end").exit_code, Some(3));
    // Looking again brings the same.
    let whole = client.command_show(&session, first.command.id, &ShowCommand::default()).await.expect("look");
    assert_eq!(text(&whole.stdout), "aäz");
    let listed = client.command_list(&session, &Default::default()).await.expect("list");
    assert_eq!(listed.items.len(), 1);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_id_never_runs_twice() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let file = daemon.home().join("runs").display().to_string();
    let id = CommandId::generate();
    let once = CreateCommand { id: Some(id), ..line(&format!("echo x >> {file}; sleep 1; echo done")) };
    let both = tokio::join!(client.command_create(&session, &once), client.command_create(&session, &once));
    for output in [both.0, both.1] {
        let output = output.expect("command");
        assert_eq!((output.command.id, text(&output.stdout)), (id, "done\n"));
    }
    let again = client.command_create(&session, &once).await.expect("command");
    assert_eq!(text(&again.stdout), "done\n");
    assert_eq!(std::fs::read_to_string(&file).expect("file"), "x\n");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_come_in_order_and_resume() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let request = line("for i in 1 2 3; do echo $i; echo e$i >&2; sleep 0.05; done; exit 5");
    let mut events = client.command_create_events(&session, &request).await.expect("events");
    let (mut out, mut err, mut id, mut end) = (String::new(), String::new(), None, None);
    while let Some(event) = events.next().await.expect("event") {
        match event {
            StreamEvent::Start { command } => id = Some(command.id),
            StreamEvent::Stdout { data, .. } => out.push_str(text(&data)),
            StreamEvent::Stderr { data, .. } => err.push_str(text(&data)),
            StreamEvent::Exit { command } => end = command.end,
            StreamEvent::Gap { .. } | StreamEvent::Error { .. } => panic!("{event:?}"),
        }
    }
    assert_eq!((out.as_str(), err.as_str()), ("1\n2\n3\n", "e1\ne2\ne3\n"));
    assert_eq!(end.expect("end").exit_code, Some(5));
    let query = ShowCommand { offset: Some(5), ..Default::default() };
    let mut again = client.command_events(&session, id.expect("id"), query);
    let mut rest = Vec::new();
    while let Some(event) = again.next().await.expect("event") {
        match event {
            StreamEvent::Stdout { offset, data } | StreamEvent::Stderr { offset, data } => {
                rest.push((offset, text(&data).to_owned()))
            }
            _ => {}
        }
    }
    assert_eq!(rest.first().map(|(offset, _)| *offset), Some(5));
    assert_eq!(rest.iter().map(|(_, data)| data.len()).sum::<usize>(), 15 - 5);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attachment_carries_input_signals_and_the_end() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let interactive = CreateCommand {
        open_stdin: true,
        wait_seconds: Some(0),
        on_disconnect: Some(OnDisconnect::Kill),
        ..line("cat; echo over")
    };
    let started = client.command_create(&session, &interactive).await.expect("command");
    let mut attached = client.command_attach(&session, started.command.id, 0);
    let input = attached.input();
    let big = vec![b'x'; 3 << 20];
    let sent = big.clone();
    tokio::spawn(async move {
        input.send(Input::Bytes(sent.into())).await;
        input.send(Input::Eof).await;
    });
    let (mut out, mut end) = (Vec::new(), None);
    while let Some(event) = attached.next().await {
        match event.expect("event") {
            AttachEvent::Stdout(bytes) => out.extend_from_slice(&bytes),
            AttachEvent::Exit(command) => end = command.end,
            AttachEvent::Start(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(out.len(), big.len() + 5);
    assert_eq!(end.expect("end").exit_code, Some(0));

    let trapped = CreateCommand {
        wait_seconds: Some(0),
        ..line("trap 'echo got; exit 9' INT; echo ready; while :; do sleep 0.05; done")
    };
    let started = client.command_create(&session, &trapped).await.expect("command");
    let mut attached = client.command_attach(&session, started.command.id, 0);
    let (mut out, mut end) = (String::new(), None);
    while let Some(event) = attached.next().await {
        match event.expect("event") {
            AttachEvent::Stdout(bytes) => {
                out.push_str(std::str::from_utf8(&bytes).expect("utf-8"));
                if out == "ready\n" {
                    attached.input().send(Input::Signal("SIGINT".into())).await;
                }
            }
            AttachEvent::Exit(command) => end = command.end,
            _ => {}
        }
    }
    assert_eq!((out.as_str(), end.expect("end").exit_code), ("ready\ngot\n", Some(9)));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_leaves_takes_its_command_along_if_it_said_so() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    for (on_disconnect, survives) in [(OnDisconnect::Kill, false), (OnDisconnect::Keep, true)] {
        let endless =
            CreateCommand { wait_seconds: Some(0), on_disconnect: Some(on_disconnect), ..line("echo up; sleep 600") };
        let id = client.command_create(&session, &endless).await.expect("command").command.id;
        let mut attached = client.command_attach(&session, id, 0);
        while !matches!(attached.next().await, Some(Ok(AttachEvent::Stdout(_)))) {}
        drop(attached);
        if survives {
            // Long enough for a kill to have come.
            let query = ShowCommand { wait_seconds: Some(2), ..Default::default() };
            assert_eq!(
                client.command_show(&session, id, &query).await.expect("look").command.state,
                CommandState::Running
            );
            let killed = client.command_kill(&session, id).await.expect("kill");
            assert_eq!(killed.end.expect("end").reason, Reason::Killed);
        } else {
            // Looking is no calling: the look that comes between does not keep it alive.
            let began = Instant::now();
            let end = loop {
                let shown = client.command_show(&session, id, &ShowCommand::default()).await.expect("look").command;
                if let Some(end) = shown.end {
                    break end;
                }
                assert!(began.elapsed() < Duration::from_secs(20), "it went on");
                tokio::time::sleep(Duration::from_millis(20)).await;
            };
            assert_eq!(end.reason, Reason::Killed);
        }
    }
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn input_by_requests_is_safe_to_send_again() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let reader = CreateCommand { open_stdin: true, wait_seconds: Some(0), ..line("cat") };
    let id = client.command_create(&session, &reader).await.expect("command").command.id;
    let at = |offset, eof| WriteStdin { offset: Some(offset), eof: Some(eof) };
    let first = client.command_stdin(&session, id, &at(0, false), "hello ").await.expect("stdin");
    assert_eq!((first.next_offset, first.open), (6, true));
    let again = client.command_stdin(&session, id, &at(0, false), "hello wor").await.expect("stdin");
    assert_eq!(again.next_offset, 9);
    let hole = client.command_stdin(&session, id, &at(50, false), "x").await.expect_err("a hole");
    assert_eq!(code(&hole), Some(ErrorCode::Invalid), "{hole}");
    let last = client.command_stdin(&session, id, &at(9, true), "ld").await.expect("stdin");
    assert!(!last.open);
    let query = ShowCommand { wait_seconds: Some(60), ..Default::default() };
    assert_eq!(text(&client.command_show(&session, id, &query).await.expect("look").stdout), "hello world");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shell_lives_on_between_commands() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let shell = |command: &str| CreateCommand { shell: Some("main".into()), ..line(command) };
    let first = client.command_create(&session, &shell("cd /usr; export X=5")).await.expect("command");
    assert_eq!(first.command.end.expect("end").cwd.as_deref(), Some("/usr"));
    let second = client.command_create(&session, &shell("echo $X $PWD; false")).await.expect("command");
    assert_eq!(text(&second.stdout), "5 /usr\n");
    assert_eq!(second.command.end.expect("end").exit_code, Some(1));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_trees_and_connections_pass_both_ways() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let home = daemon.home().join("guest").display().to_string();
    let path = |name: &str| format!("{home}/{name}");
    let at = |name: &str| AtPath { path: path(name), user: None };
    let bytes: Vec<u8> = (0..2_000_000u32).map(|n| (n % 251) as u8).collect();
    let write = WriteFile { path: path("a/b"), user: None, mode: Some("0640".into()), parents: None };
    client.file_write(&session, &write, body_from(bytes.clone())).await.expect("write");
    let stat = client.file_stat(&session, &at("a/b")).await.expect("stat");
    assert_eq!((stat.size_bytes, stat.mode.as_str()), (bytes.len() as u64, "0640"));
    let mut back = Vec::new();
    let mut reading = client.file_read(&session, &at("a/b")).await.expect("read");
    while let Some(piece) = reading.next().await.expect("piece") {
        back.extend_from_slice(&piece);
    }
    assert!(back == bytes, "the file came back different");
    let listed = client.file_list(&session, &at("a")).await.expect("list");
    assert_eq!(listed.entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["b"]);
    let missing = client.file_stat(&session, &at("nothing")).await.expect_err("missing");
    assert_eq!(code(&missing), Some(ErrorCode::NotFound), "{missing}");

    let mut archive = Vec::new();
    let mut reading = client.tar_read(&session, &at("a")).await.expect("tar");
    while let Some(piece) = reading.next().await.expect("piece") {
        archive.extend_from_slice(&piece);
    }
    client.tar_write(&session, &at("copy"), body_from(archive)).await.expect("tar");
    assert_eq!(client.file_stat(&session, &at("copy/b")).await.expect("stat").size_bytes, bytes.len() as u64);
    let remove = UnderPath { path: path("copy"), user: None, recursive: Some(true) };
    client.file_remove(&session, &remove).await.expect("remove");
    assert!(client.file_stat(&session, &at("copy")).await.is_err());

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("listener");
    let port = listener.local_addr().expect("address").port();
    let echo = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("accept");
        let mut all = Vec::new();
        // The caller's half-close is the end here, and the other half still carries the answer.
        stream.read_to_end(&mut all).await.expect("read");
        stream.write_all(&all).await.expect("write");
    });
    let mut dialed = client.dial(&session, port).await.expect("dial");
    dialed.write_all(b"through the wall").await.expect("write");
    dialed.shutdown().await.expect("half-close");
    let mut answer = Vec::new();
    within(60, dialed.read_to_end(&mut answer)).await.expect("read");
    assert_eq!(answer, b"through the wall");
    echo.await.expect("echo");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_that_nobody_reads_is_bounded_and_its_holes_are_told() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    // Nobody follows: the guest keeps the end of it.
    let loud = CreateCommand { wait_seconds: Some(0), ..line("head -c 40000000 /dev/zero; echo end >&2") };
    let id = client.command_create(&session, &loud).await.expect("command").command.id;
    let began = Instant::now();
    while client
        .command_show(&session, id, &ShowCommand { max_output_bytes: Some(0), ..ShowCommand::default() })
        .await
        .expect("look")
        .command
        .end
        .is_none()
    {
        assert!(began.elapsed() < Duration::from_secs(60), "a command that nobody reads stands still");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut events = client.command_events(&session, id, ShowCommand::default());
    let (mut gap, mut got, mut end) = (0, 0, false);
    while let Some(event) = within(60, events.next()).await.expect("event") {
        match event {
            StreamEvent::Gap { from, to } => gap += to - from,
            StreamEvent::Stdout { data, .. } => got += text(&data).len() as u64,
            StreamEvent::Exit { command } => {
                end = true;
                assert_eq!(command.stdout_bytes, 40_000_000);
            }
            _ => {}
        }
    }
    assert!(end && gap > 0 && got > 0);
    assert_eq!(gap + got, 40_000_000);

    // A caller that stands still holds the program back, and pepod keeps none of it.
    let before = daemon.resident_kib();
    let endless = CreateCommand {
        wait_seconds: Some(0),
        on_disconnect: Some(OnDisconnect::Kill),
        ..line("head -c 300000000 /dev/zero")
    };
    let id = client.command_create(&session, &endless).await.expect("command").command.id;
    let mut attached = client.command_attach(&session, id, 0);
    while !matches!(within(60, attached.next()).await, Some(Ok(AttachEvent::Stdout(_)))) {}
    // Time enough for all of it, if something took it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let grown = daemon.resident_kib().saturating_sub(before);
    assert!(grown < 32 * 1024, "pepod grew by {grown} KiB");
    drop(attached);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_are_filtered_and_paged() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let mut made = Vec::new();
    for n in 0..5 {
        let body = CreateSession { labels: [("n".into(), format!("{}", n % 2))].into(), ..Default::default() };
        made.push(client.session_create(&body).await.expect("session").id);
    }
    client.session_terminate(&made[0].to_string()).await.expect("terminate");
    let list = |query: ListSessions| {
        let client = client.clone();
        async move { client.session_list(&query).await.expect("list") }
    };
    let first = list(ListSessions { limit: Some(3), ..Default::default() }).await;
    let second = list(ListSessions { limit: Some(3), cursor: first.next_cursor.clone(), ..Default::default() }).await;
    let mut ids: Vec<_> = first.items.iter().chain(&second.items).map(|session| session.id).collect();
    ids.reverse();
    assert_eq!(ids, made);
    assert!(second.next_cursor.is_none());
    let odd = list(ListSessions { label: vec!["n=1".into()], limit: Some(1), ..Default::default() }).await;
    assert_eq!(odd.items.iter().map(|session| session.id).collect::<Vec<_>>(), [made[3]]);
    let rest = list(ListSessions { label: vec!["n=1".into()], cursor: odd.next_cursor, ..Default::default() }).await;
    assert_eq!(rest.items.iter().map(|session| session.id).collect::<Vec<_>>(), [made[1]]);
    let over = list(ListSessions { state: Some(SessionState::Terminated), ..Default::default() }).await;
    assert_eq!(over.items.iter().map(|session| session.id).collect::<Vec<_>>(), [made[0]]);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_loses_neither_the_sandbox_nor_a_byte() {
    let mut daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let counting = CreateCommand {
        wait_seconds: Some(0),
        on_disconnect: Some(OnDisconnect::Kill),
        ..line("for i in $(seq 1 80); do echo $i; sleep 0.05; done; exit 4")
    };
    let id = client.command_create(&session, &counting).await.expect("command").command.id;
    let mut attached = client.command_attach(&session, id, 0);
    let (mut out, mut end, mut restarted) = (String::new(), None, false);
    while let Some(event) = attached.next().await {
        match event.expect("event") {
            AttachEvent::Stdout(bytes) => out.push_str(std::str::from_utf8(&bytes).expect("utf-8")),
            AttachEvent::Exit(command) => end = command.end,
            _ => {}
        }
        if !restarted && out.contains("10\n") {
            restarted = true;
            daemon.kill();
            daemon.restart();
        }
    }
    let all: String = (1..=80).map(|n| format!("{n}\n")).collect();
    assert_eq!(out, all);
    assert_eq!(end.expect("end").exit_code, Some(4));
    let shown = client.session_show(&session, &ShowSession::default()).await.expect("show");
    assert_eq!((shown.state, shown.activation), (SessionState::Active, 1));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_fails_leaves_nothing_and_is_told() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    for step in ["prepare", "start", "hello", "activate"] {
        let fault = daemon.home().join(format!("state/fault-{step}"));
        std::fs::write(&fault, "told to fail").expect("fault");
        let session = session(&client).await;
        let error = client.command_create(&session, &line("true")).await.expect_err("it started");
        assert_eq!(code(&error), Some(ErrorCode::ActivationFailed), "{step}: {error}");
        let shown = client.session_show(&session, &ShowSession::default()).await.expect("show");
        let ended = shown.ended.expect("ended");
        assert_eq!((shown.state, ended.reason), (SessionState::Terminated, Reason::SetupFailed), "{step}");
        assert!(ended.message.contains("told to fail"), "{step}: {}", ended.message);
        assert!(daemon.jails().is_empty(), "{step} left {:?}", daemon.jails());
        let later = client.command_create(&session, &line("true")).await.expect_err("it has ended");
        assert_eq!(code(&later), Some(ErrorCode::SessionTerminated));
        std::fs::remove_file(&fault).expect("remove");
    }
    // A release that fails is owed, shown, and made good once it can be.
    let fault = daemon.home().join("state/fault-release");
    std::fs::write(&fault, "told to stay").expect("fault");
    let session = session(&client).await;
    run(&client, &session, "true").await;
    client.session_terminate(&session).await.expect("terminate");
    let owed = |report: pepo_api::DoctorReport| {
        report.checks.into_iter().find(|check| check.name == "leftovers").expect("check")
    };
    assert!(owed(client.doctor().await.expect("doctor")).found.contains("sbx_"));
    std::fs::remove_file(&fault).expect("remove");
    daemon::until("the debt is paid", || daemon.jails().is_empty());
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_dies_is_told_at_once_and_in_words() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let endless = CreateCommand { wait_seconds: Some(0), ..line("echo up; sleep 600") };
    let id = client.command_create(&session, &endless).await.expect("command").command.id;
    let mut attached = client.command_attach(&session, id, 0);
    while !matches!(attached.next().await, Some(Ok(AttachEvent::Stdout(_)))) {}
    let began = Instant::now();
    daemon.kill_agents();
    let end = loop {
        match attached.next().await.expect("an end").expect("event") {
            AttachEvent::Exit(command) => break command.end.expect("end"),
            AttachEvent::Gap(_) => {}
            other => panic!("{other:?}"),
        }
    };
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    // Which of the two depends on who is first: the agent's end, or the note of it, which no keeper takes here.
    let told = [Reason::VmmExit, Reason::KilledOutside];
    assert!(told.contains(&end.reason), "{:?}", end.reason);
    assert_eq!(daemon::ended(&client, &session).await.reason, end.reason);
    let error = client.command_create(&session, &line("true")).await.expect_err("it has ended");
    assert_eq!(code(&error), Some(ErrorCode::SessionTerminated));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_outlives_its_sandbox_for_a_while() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = session(&client).await;
    let small = run(&client, &session, "echo kept").await.command.id;
    let big = CreateCommand { wait_seconds: Some(60), max_output_bytes: Some(10), ..line("yes | head -c 5000000") };
    let big = client.command_create(&session, &big).await.expect("command").command.id;
    let first = client.session_terminate(&session).await.expect("terminate");
    assert_eq!(first.ended.as_ref().map(|ended| ended.reason), Some(Reason::Operator));
    // Again is the same.
    assert_eq!(client.session_terminate(&session).await.expect("terminate").ended, first.ended);
    let shown = client.command_show(&session, small, &ShowCommand::default()).await.expect("look");
    assert_eq!(text(&shown.stdout), "kept\n");
    let query = ShowCommand { max_output_bytes: Some(8 << 20), ..ShowCommand::default() };
    let shown = client.command_show(&session, big, &query).await.expect("look");
    assert_eq!(text(&shown.stdout).len(), 2 << 20);
    assert_eq!(shown.missing_bytes, 5_000_000 - (2 << 20));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_this_release_cannot_do_is_named() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let refused = |body: serde_json::Value| {
        let client = client.clone();
        async move {
            let body: CreateSession = serde_json::from_value(body).expect("body");
            match client.session_create(&body).await {
                Err(ClientError::Api(error)) => (error.code, error.param.unwrap_or_default()),
                other => panic!("{other:?}"),
            }
        }
    };
    use serde_json::json;
    for (body, code, param) in [
        (json!({"network": {"mode": "public"}}), ErrorCode::Invalid, "network.mode"),
        (json!({"workspace": {"own": true}}), ErrorCode::Unsupported, "workspace"),
        (json!({"secrets": {"A=": "b"}}), ErrorCode::Invalid, "secrets"),
        (json!({"persist": ["~/.x"]}), ErrorCode::Invalid, "persist"),
        (json!({"setup": {"command": ""}}), ErrorCode::Invalid, "setup.command"),
        (json!({"setup": {"command": "x", "timeout_seconds": 0}}), ErrorCode::Invalid, "setup.timeout_seconds"),
        (json!({"if_terminated": "refuse"}), ErrorCode::Invalid, "if_terminated"),
        (json!({"memory_mib": 1}), ErrorCode::Invalid, "memory_mib"),
        (json!({"cpus": 0}), ErrorCode::Invalid, "cpus"),
        (json!({"name": "No"}), ErrorCode::Invalid, "name"),
        (json!({"memory_mib": 1_000_000}), ErrorCode::Invalid, "memory_mib"),
    ] {
        assert_eq!(refused(body.clone()).await, (code, param.to_owned()), "{body}");
    }
    let named =
        CreateSession { name: Some("one".into()), labels: [("a".into(), "b".into())].into(), ..Default::default() };
    client.session_create(&named).await.expect("session");
    let again = client.session_create(&named).await.expect_err("the name is taken");
    assert_eq!(code(&again), Some(ErrorCode::Conflict));
    assert_eq!(text(&run(&client, "one", "echo hi").await.stdout), "hi\n");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_edge_has_no_operator_routes() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let app = client.session_create(&CreateSession::default()).await.expect("session").app_id.to_string();
    let edge = |head: String| daemon.as_edge(&head);
    let ask = |method: &str, path: &str| {
        format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nPepo-App: {app}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
    };
    for route in pepo_api::ROUTES {
        let path = route
            .path
            .replace("{session}", "s")
            .replace("{key}", "k")
            .replace("{command}", "c")
            .replace("{image}", "i")
            .replace("{port}", "1")
            .replace("{rest}", "x");
        let answer = edge(ask(route.method.as_str(), &path));
        let refused = answer.starts_with("HTTP/1.1 404") || answer.starts_with("HTTP/1.1 405");
        let told = refused && (answer.contains("no route") || answer.contains("method_not_allowed"));
        assert_eq!(told, route.audience == pepo_api::Audience::Operator, "{}: {answer}", route.name);
    }
    let foreign = edge(format!(
        "GET /v1/sessions HTTP/1.1\r\nHost: x\r\nPepo-App: {}\r\nConnection: close\r\n\r\n",
        pepo_api::AppId::generate()
    ));
    assert!(foreign.starts_with("HTTP/1.1 404"), "{foreign}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_has_a_name_wherever_one_is_named() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let refused = |error: ClientError, param: &str| match error {
        ClientError::Api(error) => assert_eq!((error.code, error.param.as_deref()), (ErrorCode::Invalid, Some(param))),
        other => panic!("{other}"),
    };
    for name in ["", "a\u{1b}[2J", &"x".repeat(129)] {
        let asked = CreateSession { image: Some(name.into()), ..Default::default() };
        refused(client.session_create(&asked).await.expect_err(name), "image");
        refused(client.session_open("key", &asked).await.expect_err(name), "image");
        let defaults = pepo_api::AppDefaults { image: Some(name.into()), ..Default::default() };
        let app = pepo_api::CreateApp { name: "shop".into(), defaults: defaults.clone(), ..Default::default() };
        refused(client.app_create(&app).await.expect_err(name), "defaults.image");
        let change = pepo_api::UpdateApp { defaults: Some(defaults), ..Default::default() };
        refused(client.app_update("default", &change).await.expect_err(name), "defaults.image");
    }
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unused_session_ends_and_an_idle_daemon_too() {
    let daemon = Daemon::start(Options { flags: vec!["--exit-when-idle".into(), "1".into()], ..Options::default() });
    let client = daemon.client();
    let short = CreateSession { keep_alive_seconds: Some(0), ..Default::default() };
    let session = client.session_create(&short).await.expect("session").id.to_string();
    run(&client, &session, "true").await;
    assert_eq!(daemon::ended(&client, &session).await.reason, Reason::Idle);
    daemon.ended_by_itself();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_sessions_at_once() {
    let config = "[sandbox]\nmax = 200\nmemory_budget = \"1t\"\ncpu_overcommit = 200\ndisk_budget = \"1t\"\nboots = 8\nqueue = 0\n";
    let daemon = Daemon::start(Options { config: config.into(), ..Options::default() });
    let client = daemon.client();
    let all = (0..200).map(|n| {
        let client = client.clone();
        async move {
            let session = session(&client).await;
            let output = run(&client, &session, &format!("echo {n}")).await;
            assert_eq!(text(&output.stdout), format!("{n}\n"));
            session
        }
    });
    let sessions = within(300, futures_util::future::join_all(all)).await;
    let full = client.session_create(&CreateSession::default()).await.expect_err("the 201st was admitted");
    assert_eq!(code(&full), Some(ErrorCode::NoCapacity), "{full}");
    assert_eq!(daemon.jails().len(), 200);
    let ending = sessions.iter().map(|session| client.session_terminate(session));
    for ended in within(300, futures_util::future::join_all(ending)).await {
        assert_eq!(ended.expect("terminate").state, SessionState::Terminated);
    }
    // What could not be given back at once, with a process of a guest still at its end, is given back a moment later.
    daemon::until("all is given back", || daemon.jails().is_empty());
    daemon.end().await;
}
