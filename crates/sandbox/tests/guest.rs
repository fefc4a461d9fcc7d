//! The host's side and the real agent together, over a Unix socket: programs, their streams and their ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is a test

mod agent;

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use agent::{AT_MOST, Agent, Run, argv, memory, noise, op, processes, sh, until};
use bytes::Bytes;
use pepo_sandbox::guest::{Error, InputEnd, Output};
use pepo_sandbox::proto::*;
use tokio_util::codec::{Decoder, Encoder};

fn failure<T: std::fmt::Debug>(result: Result<T, Error>) -> FailureCode {
    match result {
        Err(Error::Failed(failure)) => failure.code,
        other => panic!("no failure but {other:?}"),
    }
}

fn attach(target: OpId, from: u64) -> Attach {
    Attach { target, from: Some(from), input: false, keep_input: true, sole: None }
}

#[tokio::test]
async fn the_agent_introduces_itself_and_is_activated_once() {
    let agent = Agent::fresh(&[]).await;
    assert_eq!(failure(agent.guest.exec(op(), sh("true")).await), FailureCode::State);
    let hello = agent.guest.hello().await.unwrap();
    assert_eq!((hello.generation, hello.activated), (GENERATION, false));
    let env = vec![Variable { name: "FROM_ACTIVATE".into(), value: "yes it is".into() }];
    let activate = Activate { hostname: "h".into(), env, clock_unix_ns: 0, entropy: vec![1; 32], network: None };
    agent.guest.activate(activate.clone()).await.unwrap();
    assert!(agent.guest.hello().await.unwrap().activated);
    assert_eq!(failure(agent.guest.activate(activate).await), FailureCode::State);
    assert_eq!(agent.sh("echo \"$FROM_ACTIVATE\"").await.text(), "yes it is\n");
    let stats = agent.guest.stats().await.unwrap();
    assert!(stats.memory_bytes > 0 && stats.processes > 0);
    agent.guest.sync(AT_MOST).await.unwrap();
}

#[tokio::test]
async fn arguments_arrive_untouched_and_outputs_apart() {
    let agent = Agent::start().await;
    let run = Run::of(agent.exec(op(), argv(["printf", "[%s]", "a b", "", "$HOME", "ü\n'\""])).await).await.unwrap();
    assert_eq!(run.text(), "[a b][][$HOME][ü\n'\"]");
    let run = agent.sh("echo out; echo err >&2; exit 7").await;
    assert_eq!((run.text(), &run.err[..], run.code()), ("out\n", &b"err\n"[..], Some(7)));
    assert_eq!((run.end.cause, run.end.stdout_bytes, run.end.stderr_bytes), (Cause::Exit, 4, 4));
    let mut exec = sh("echo $A; pwd");
    exec.env = vec![Variable { name: "A".into(), value: "x=y z".into() }];
    exec.cwd = Some("/usr".into());
    assert_eq!(Run::of(agent.exec(op(), exec).await).await.unwrap().text(), "x=y z\n/usr\n");
}

#[tokio::test]
async fn what_cannot_be_run_says_why() {
    let agent = Agent::start().await;
    let run = async |exec| failure(async { Run::of(agent.guest.exec(op(), exec).await?).await }.await);
    assert_eq!(run(argv(["no-such-program-here"])).await, FailureCode::ProgramNotFound);
    assert_eq!(run(argv(["/etc/hostname"])).await, FailureCode::ProgramNotExecutable);
    assert_eq!(run(proto_exec_in("/no/such/place")).await, FailureCode::NotFound);
    let mut nobody = argv(["true"]);
    nobody.user = Some("no-such-user".into());
    assert_eq!(run(nobody).await, FailureCode::NotFound);
    assert_eq!(failure(agent.guest.cancel(op()).await), FailureCode::UnknownOp);
    assert_eq!(failure(agent.guest.attach(attach(op(), 0)).await), FailureCode::UnknownOp);
}

fn proto_exec_in(directory: &str) -> Exec {
    let mut exec = argv(["true"]);
    exec.cwd = Some(directory.into());
    exec
}

#[tokio::test]
async fn binary_input_comes_back_as_it_was() {
    let agent = Agent::start().await;
    let sent = noise(3 << 20);
    let mut cat = argv(["cat"]);
    cat.stdin = true;
    let mut exec = agent.exec(op(), cat).await;
    let mut stdin = exec.take_input().unwrap();
    let bytes = sent.clone();
    let feed = tokio::spawn(async move {
        stdin.send(0, bytes).await.unwrap();
        stdin.eof().await.unwrap();
    });
    let run = Run::of(exec).await.unwrap();
    feed.await.unwrap();
    assert!(run.out == sent, "{} of {} bytes, or others", run.out.len(), sent.len());
    assert_eq!(run.code(), Some(0));
}

#[tokio::test]
async fn a_great_output_passes_through_little_memory() {
    const BYTES: u64 = 256 << 20;
    let agent = Agent::start().await;
    let before = memory(std::process::id());
    let mut exec = agent.exec(op(), sh(&format!("head -c {BYTES} /dev/zero"))).await;
    let (mut seen, mut most_here, mut most_there) = (0, 0, 0);
    let began = Instant::now();
    while let Some(output) = exec.next().await {
        if let Output::Data { bytes, .. } = output.unwrap() {
            seen += bytes.len() as u64;
            if seen % (8 << 20) < 64 << 10 {
                most_here = most_here.max(memory(std::process::id()) - before);
                most_there = most_there.max(agent.memory());
            }
        }
    }
    eprintln!("{} MiB/s", seen as f64 / began.elapsed().as_secs_f64() / 1048576.0);
    assert_eq!(seen, BYTES);
    assert!(most_here < 16 << 20, "{most_here} bytes more here");
    assert!(most_there < 64 << 20, "{most_there} bytes in the agent");
}

#[tokio::test]
async fn a_slow_reader_holds_the_program_back_and_cancel_passes() {
    let agent = Agent::start().await;
    let name = op();
    let mut exec = agent.exec(name, sh("yes $((6000+371))")).await;
    while exec.offset() < 1 << 20 {
        exec.next().await.unwrap().unwrap();
    }
    // Nobody reads now: what was written stops growing once everything between is full.
    let written = async || {
        let ops = agent.guest.ops().await.unwrap();
        ops.into_iter().find(|summary| summary.op == name).unwrap().next
    };
    let mut last = written().await;
    let end = Instant::now() + AT_MOST;
    loop {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = written().await;
        if now == last {
            break;
        }
        last = now;
        assert!(Instant::now() < end, "the program is not held back");
    }
    assert!(last < 64 << 20, "{last} bytes were taken");
    assert!(agent.memory() < 64 << 20, "{} bytes in the agent", agent.memory());
    tokio::time::timeout(AT_MOST, exec.cancel()).await.unwrap().unwrap();
    let run = Run::of(exec).await.unwrap();
    assert_eq!(run.end.cause, Cause::Killed);
    assert!(run.gaps.is_empty(), "the one reader misses nothing: {:?}", run.gaps);
}

#[tokio::test]
async fn output_is_replayed_from_any_offset() {
    let agent = Agent::start().await;
    let name = op();
    // One output: which of two comes first at their border is the reader's luck.
    let run = Run::of(agent.exec(name, sh("seq 1 100000")).await).await.unwrap();
    let all = run.out.clone();
    let again = Run::of(agent.guest.attach(attach(name, 0)).await.unwrap()).await.unwrap();
    assert_eq!(again, run);
    for from in [1, 70_000, all.len() as u64 / 2, all.len() as u64] {
        let part = Run::of(agent.guest.attach(attach(name, from)).await.unwrap()).await.unwrap();
        assert!(part.out == all[from as usize..], "from {from}");
        assert_eq!(part.end, run.end);
    }
    let beyond = agent.guest.attach(attach(name, all.len() as u64 + 1)).await.unwrap();
    assert_eq!(failure(Run::of(beyond).await), FailureCode::Invalid);
}

#[tokio::test]
async fn what_is_no_longer_kept_is_a_gap() {
    const BYTES: usize = 40 << 20;
    let agent = Agent::start().await;
    let name = op();
    let run = Run::of(agent.exec(name, sh(&format!("head -c {BYTES} /dev/zero; echo the end"))).await).await.unwrap();
    assert_eq!(run.out.len(), BYTES + 8);
    let late = Run::of(agent.guest.attach(attach(name, 5)).await.unwrap()).await.unwrap();
    let [(5, kept_from)] = late.gaps[..] else { panic!("{:?}", late.gaps) };
    assert_eq!(kept_from as usize + late.out.len(), BYTES + 8);
    assert!(late.out.len() >= 1 << 20 && late.out.len() <= 17 << 20, "{} bytes kept", late.out.len());
    assert!(late.out.ends_with(b"the end\n"));
    let ops = agent.guest.ops().await.unwrap();
    let summary = ops.iter().find(|summary| summary.op == name).unwrap();
    assert_eq!((summary.state, summary.kept_from, summary.next), (OpState::Ended, kept_from, BYTES as u64 + 8));
}

#[tokio::test]
async fn the_same_name_never_runs_twice() {
    let agent = Agent::start().await;
    let name = op();
    let line = format!("echo ran >> {}; echo told; sleep 0.2", agent.path("witness"));
    let first = agent.exec(name, sh(&line)).await;
    let second = agent.exec(name, sh(&line)).await;
    let (first, second) = tokio::join!(Run::of(first), Run::of(second));
    let third = Run::of(agent.exec(name, sh(&line)).await).await;
    for run in [first, second, third] {
        assert_eq!(run.unwrap().text(), "told\n");
    }
    assert_eq!(std::fs::read_to_string(agent.path("witness")).unwrap(), "ran\n");
}

#[tokio::test]
async fn a_detached_program_outlives_its_streams() {
    let agent = Agent::start_with(&["--lease-ms", "100"]).await;
    let name = op();
    let mut exec = sh("sleep 1; echo done");
    exec.detached = true;
    drop(agent.exec(name, exec).await);
    let run = Run::of(agent.guest.attach(attach(name, 0)).await.unwrap()).await.unwrap();
    assert_eq!((run.text(), run.end.cause), ("done\n", Cause::Exit));
}

#[tokio::test]
async fn a_lost_stream_starts_a_lease_that_an_attachment_renews() {
    let agent = Agent::start_with(&["--lease-ms", "1000"]).await;
    let (kept, lost) = (op(), op());
    drop(agent.exec(kept, sh("sleep 3; echo kept")).await);
    let attached = agent.guest.attach(attach(kept, 0)).await.unwrap();
    drop(agent.exec(lost, sh("sleep 60; echo lost")).await);
    let summary =
        async |name: OpId| agent.guest.ops().await.unwrap().into_iter().find(|summary| summary.op == name).unwrap();
    until("the lease is over", async || summary(lost).await.state == OpState::Ended).await;
    let run = Run::of(agent.guest.attach(attach(lost, 0)).await.unwrap()).await.unwrap();
    assert_eq!(run.end.cause, Cause::Killed);
    assert_eq!(Run::of(attached).await.unwrap().text(), "kept\n");
}

#[tokio::test]
async fn a_dropped_handle_with_stuck_data_lets_the_program_go_on() {
    const BYTES: u64 = 64 << 20;
    let agent = Agent::start().await;
    let name = op();
    let mut exec = sh(&format!("head -c {BYTES} /dev/zero"));
    exec.detached = true;
    let exec = agent.exec(name, exec).await;
    let summary = async || agent.guest.ops().await.unwrap().into_iter().find(|summary| summary.op == name).unwrap();
    until("the stream is full", async || {
        let before = summary().await.next;
        tokio::time::sleep(Duration::from_millis(200)).await;
        before > 0 && summary().await.next == before
    })
    .await;
    assert_ne!(summary().await.state, OpState::Ended);
    drop(exec);
    until("the program ends by itself", async || summary().await.state == OpState::Ended).await;
    let run = Run::of(agent.guest.attach(attach(name, BYTES - 10)).await.unwrap()).await.unwrap();
    assert_eq!((run.out.len(), run.end.stdout_bytes, run.code()), (10, BYTES, Some(0)));
}

/// What a vsock stream looks like to the guest when its host has closed it with data stuck: still open, never read.
#[tokio::test]
async fn a_stream_that_was_left_holds_nobody_back() {
    const BYTES: u64 = 64 << 20;
    let agent = Agent::start().await;
    let name = op();
    let say = |operation: Operation, op: OpId| {
        let mut bytes = bytes::BytesMut::new();
        Encoder::encode(&mut Frames::new(), Frame::Request(Request { op, operation, paced: None }), &mut bytes)
            .unwrap();
        let mut stream = std::os::unix::net::UnixStream::connect(&agent.socket).unwrap();
        stream.write_all(&bytes).unwrap();
        stream
    };
    let mut exec = sh(&format!("head -c {BYTES} /dev/zero"));
    exec.detached = true;
    let unread = say(Operation::Exec(exec), name);
    let summary = async || agent.guest.ops().await.unwrap().into_iter().find(|summary| summary.op == name);
    until("the stream is full", async || {
        let before = summary().await.map_or(0, |summary| summary.next);
        tokio::time::sleep(Duration::from_millis(200)).await;
        before > 0 && summary().await.is_some_and(|summary| summary.next == before)
    })
    .await;
    assert_eq!(summary().await.unwrap().state, OpState::Attached);
    drop(say(Operation::Leave(Leave { stream: op() }), op()));
    assert_eq!(summary().await.unwrap().state, OpState::Attached, "another stream was left");
    let leaving = say(Operation::Leave(Leave { stream: name }), op());
    until("the program ends by itself", async || summary().await.unwrap().state == OpState::Ended).await;
    drop((unread, leaving));
}

#[tokio::test]
async fn a_dropped_attachment_with_stuck_data_lets_the_others_go_on() {
    const BYTES: u64 = 64 << 20;
    let agent = Agent::start().await;
    let name = op();
    let exec = agent.exec(name, sh(&format!("sleep 0.3; head -c {BYTES} /dev/zero"))).await;
    let stuck = agent.guest.attach(attach(name, 0)).await.unwrap();
    let leave = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(1)).await;
        drop(stuck);
    });
    let began = Instant::now();
    let run = Run::of(exec).await.unwrap();
    leave.await.unwrap();
    assert_eq!(run.out.len() as u64, BYTES);
    assert!(began.elapsed() < Duration::from_secs(20), "it waited for the agent to give the other one up");
}

#[tokio::test]
async fn input_from_elsewhere_may_be_sent_again() {
    let agent = Agent::start().await;
    let name = op();
    let mut exec = argv(["cat"]);
    exec.stdin = true;
    let cat = agent.exec(name, exec).await;
    for (end, offset, bytes, next) in [
        (InputEnd::Keep, 0, "hello ", 6),
        (InputEnd::Keep, 0, "hello ", 6),
        (InputEnd::Keep, 3, "lo world", 11),
        (InputEnd::Close, 11, "!\n", 13),
    ] {
        let mut side = agent.guest.input(name, end).await.unwrap();
        let mut input = side.take_input().unwrap();
        input.send(offset, Bytes::from_static(bytes.as_bytes())).await.unwrap();
        assert_eq!(input.next(), next);
        input.eof().await.unwrap();
        loop {
            match side.next().await.unwrap().unwrap() {
                Output::Input { .. } => {}
                Output::Left | Output::End(_) => break,
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(Run::of(cat).await.unwrap().text(), "hello world!\n");
}

#[tokio::test]
async fn signals_reach_the_program_or_its_tree() {
    let agent = Agent::start().await;
    let name = op();
    let mut exec =
        agent.exec(name, sh("trap 'echo caught; exit 3' USR1; echo ready; while :; do sleep 0.05; done")).await;
    until("it is ready", async || exec.next().await.unwrap().is_ok_and(|o| matches!(o, Output::Data { .. }))).await;
    agent.guest.signal(Signal { target: name, signal: 10, tree: false }).await.unwrap();
    let run = Run::of(exec).await.unwrap();
    assert_eq!((run.text(), run.code()), ("caught\n", Some(3)));

    let name = op();
    let exec = agent.exec(name, sh("sleep 7113.1 & exec sleep 7113.2")).await;
    until("both run", async || processes("sleep\u{0}7113.") == 2).await;
    agent.guest.signal(Signal { target: name, signal: 15, tree: true }).await.unwrap();
    let run = Run::of(exec).await.unwrap();
    assert_eq!((run.end.cause, run.end.signal), (Cause::Signal, Some(15)));
    until("both are gone", async || processes("sleep\u{0}7113.") == 0).await;
    assert_eq!(
        failure(agent.guest.signal(Signal { target: name, signal: 99, tree: false }).await),
        FailureCode::Invalid
    );
}

#[tokio::test]
async fn a_kill_reaches_the_whole_tree() {
    let agent = Agent::start().await;
    let name = op();
    let line = "trap '' TERM INT HUP; sleep 7117.1 & (sleep 7117.2 & setsid sleep 7117.3 & wait) & wait";
    let exec = agent.exec(name, sh(line)).await;
    until("all run", async || processes("sleep\u{0}7117.") == 3).await;
    exec.cancel().await.unwrap();
    assert_eq!(Run::of(exec).await.unwrap().end.cause, Cause::Killed);
    until("all are gone", async || processes("sleep\u{0}7117.") == 0).await;
}

#[tokio::test]
async fn a_deadline_reaches_the_whole_tree() {
    let agent = Agent::start().await;
    let mut exec = sh("echo before; sleep 7119.1 & sleep 7119.2");
    exec.timeout_ms = 400;
    let run = Run::of(agent.exec(op(), exec).await).await.unwrap();
    assert_eq!((run.text(), run.end.cause), ("before\n", Cause::Timeout));
    until("all are gone", async || processes("sleep\u{0}7119.") == 0).await;
}

#[tokio::test]
async fn a_terminal_is_one_and_has_a_size() {
    let agent = Agent::start().await;
    let name = op();
    let mut exec = sh("test -t 0 && test -t 2 && stty size; read line; stty size; echo \"got $line\" >&2");
    exec.stdin = true;
    exec.pty = Some(PtySize { cols: 71, rows: 13 });
    let mut exec = agent.exec(name, exec).await;
    let mut stdin = exec.take_input().unwrap();
    let mut seen = String::new();
    until("the first size", async || {
        if let Output::Data { bytes, .. } = exec.next().await.unwrap().unwrap() {
            seen.push_str(std::str::from_utf8(&bytes).unwrap());
        }
        seen.contains("13 71")
    })
    .await;
    agent.guest.resize(name, PtySize { cols: 99, rows: 44 }).await.unwrap();
    stdin.send(0, Bytes::from_static(b"typed\n")).await.unwrap();
    let run = Run::of(exec).await.unwrap();
    assert!(run.text().contains("44 99"), "{:?}", run.text());
    assert!(run.text().contains("got typed"), "{:?}", run.text());
    assert!(run.err.is_empty());
}

#[tokio::test]
async fn a_shell_keeps_its_state_between_commands() {
    let agent = Agent::start().await;
    let line = async |line: &str| {
        let mut exec = argv([line]);
        exec.shell = Some("main".into());
        Run::of(agent.exec(op(), exec).await).await.unwrap()
    };
    let first = line("cd /usr; export A=5; b() { echo \"b $1\"; }; echo hi; false").await;
    assert_eq!((first.text(), first.code(), first.end.cwd.as_deref()), ("hi\n", Some(1), Some("/usr")));
    let second = line("echo $A $PWD; b x; echo oops >&2").await;
    assert_eq!((second.text(), &second.err[..], second.code()), ("5 /usr\nb x\n", &b"oops\n"[..], Some(0)));
    let mut slow = argv(["sleep 7121.1"]);
    slow.shell = Some("main".into());
    slow.timeout_ms = 300;
    let run = Run::of(agent.exec(op(), slow).await).await.unwrap();
    assert_eq!(run.end.cause, Cause::Timeout);
    assert_eq!(line("echo still $A").await.text(), "still 5\n");
}

/// The agent against a host that lies: it says so, stays, and takes no memory.
#[tokio::test]
async fn hostile_frames_do_not_harm_the_agent() {
    let agent = Agent::start().await;
    let before = agent.memory();
    let mut frames: Vec<Vec<u8>> = vec![
        vec![],
        vec![0xff; 4],
        vec![0, 0, 0, 0],
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![2, 0, 0, 0, 1, 0xff],
        vec![1, 0, 0, 0, 2],
        vec![1, 0, 0, 0, 250],
        vec![0, 0, 1, 0, 1],
        [vec![0, 0, 1, 0, 1], vec![0x9f; 70_000]].concat(),
        [vec![0, 0, 1, 0, 1], vec![0x81; 70_000]].concat(),
        [vec![10, 0, 0, 0, 4, 0], vec![0; 8]].concat(),
    ];
    let noise = noise(200_000);
    frames.extend((0..200).map(|n| noise[n * 1000..(n + 1) * 1000].to_vec()));
    for bytes in &frames {
        let mut stream = std::os::unix::net::UnixStream::connect(&agent.socket).unwrap();
        stream.set_read_timeout(Some(AT_MOST)).unwrap();
        // It may close while we still talk.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() < 4096, "{} bytes of answer", answer.len());
        drop(stream);
        agent.guest.ping().await.unwrap();
    }
    let grown = agent.memory().saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes more");
    assert_eq!(agent.sh("echo fine").await.text(), "fine\n");
}

#[tokio::test]
async fn input_that_skips_bytes_is_refused() {
    let agent = Agent::start().await;
    let mut exec = argv(["cat"]);
    exec.stdin = true;
    let request = Frame::Request(Request { op: op(), operation: Operation::Exec(exec), paced: None });
    let hole = Frame::Data { channel: Channel::In, offset: 5, bytes: Bytes::from_static(b"x") };
    let mut bytes = bytes::BytesMut::new();
    Frames::new().encode(request, &mut bytes).unwrap();
    Frames::new().encode(hole, &mut bytes).unwrap();
    let mut stream = std::os::unix::net::UnixStream::connect(&agent.socket).unwrap();
    stream.set_read_timeout(Some(AT_MOST)).unwrap();
    stream.write_all(&bytes).unwrap();
    let (mut seen, mut chunk) = (bytes::BytesMut::new(), [0; 4096]);
    let end = loop {
        match Decoder::decode(&mut Frames::new(), &mut seen).unwrap() {
            Some(Frame::End(outcome)) => break outcome,
            Some(_) => {}
            None => {
                let read = stream.read(&mut chunk).unwrap();
                assert_ne!(read, 0, "closed without an end");
                seen.extend_from_slice(&chunk[..read]);
            }
        }
    };
    assert!(matches!(end, Outcome::Failed(Failure { code: FailureCode::Invalid, .. })), "{end:?}");
}
