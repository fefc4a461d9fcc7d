//! The agent itself: introduction, activation, limits, and what it makes of nonsense.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod wire;

use std::io::Write;

use pepo_proto::*;
use wire::*;

fn hello(oldest: u32, newest: u32) -> Operation {
    Operation::Hello(Hello { oldest, newest, features: 0 })
}

#[test]
fn introduces_itself_and_is_activated_once() {
    let guest = Guest::fresh(&["--lease-ms", "1000"]);
    let talked = guest.ask(hello(1, 1));
    let [Event::Hello(reply)] = &talked.events[..] else { panic!("{talked:?}") };
    assert_eq!((reply.generation, reply.activated), (GENERATION, false));
    assert_eq!(guest.ask(hello(7, 9)).failure(), FailureCode::Generation);
    assert_eq!(guest.exec(sh("true")).failure(), FailureCode::State);
    for bad in ["", "-a", "a-", "a.b", "a b", "ü", &"a".repeat(64)] {
        let mut activate = activation();
        activate.hostname = bad.into();
        assert_eq!(guest.ask(Operation::Activate(activate)).failure(), FailureCode::Invalid, "{bad:?}");
    }
    let mut activate = activation();
    activate.entropy = vec![0; 513];
    assert_eq!(guest.ask(Operation::Activate(activate)).failure(), FailureCode::Invalid);
    let op = new_op();
    assert_eq!(guest.request(op, Operation::Activate(activation())).finish().outcome, Outcome::Done);
    // The same request again has the same answer, another one is refused.
    assert_eq!(guest.request(op, Operation::Activate(activation())).finish().outcome, Outcome::Done);
    assert_eq!(guest.ask(Operation::Activate(activation())).failure(), FailureCode::State);
    let talked = guest.ask(hello(1, 1));
    assert!(matches!(&talked.events[..], [Event::Hello(reply)] if reply.activated));
    assert_eq!(guest.ask(Operation::Ping).outcome, Outcome::Done);
    assert_eq!(guest.ask(Operation::Sync).outcome, Outcome::Done);
    let talked = guest.ask(Operation::Stats);
    let [Event::Stats(stats)] = &talked.events[..] else { panic!("{talked:?}") };
    assert!(stats.memory_bytes > stats.memory_available_bytes && stats.processes > 0 && stats.disk_bytes > 0);
}

#[test]
fn as_a_host_process_it_changes_nothing_on_the_machine() {
    let witness = || {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let mounts = read("/proc/self/mountinfo");
        let group = read("/proc/self/cgroup");
        (
            read("/proc/sys/kernel/hostname"),
            mounts,
            group,
            read("/etc/hosts"),
            read("/etc/hostname"),
            read("/proc/sys/kernel/panic"),
        )
    };
    let before = witness();
    let clock = std::time::SystemTime::now();
    let started = std::time::Instant::now();
    let guest = Guest::fresh(&["--lease-ms", "1000"]);
    let mut activate = activation();
    activate.hostname = "must-not-be".into();
    activate.clock_unix_ns = 1_000_000_000;
    assert_eq!(guest.ask(Operation::Activate(activate)).outcome, Outcome::Done);
    let mut other = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let (_, mut talk) = guest.start_exec(sh("sleep 1000"));
    let pid = talk.started();
    assert_eq!(before, witness());
    assert_eq!(guest.ask(Operation::Shutdown).outcome, Outcome::Done);
    wait_for("its own child to be gone", || !is_alive(pid));
    wait_for("it to end", || !is_alive(guest.pid()));
    assert!(is_alive(other.id()), "a process that is not its own was killed");
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(before, witness());
    let drift = clock.elapsed().unwrap().as_secs_f64() - started.elapsed().as_secs_f64();
    assert!(drift.abs() < 5.0, "the clock moved by {drift} s");
}

#[test]
fn nonsense_is_an_error_and_nothing_worse() {
    let guest = Guest::start();
    let cases: Vec<Vec<u8>> = vec![
        vec![0, 0, 0, 0],
        vec![255, 255, 255, 255],
        vec![2, 0, 1, 0, 1, 2],
        vec![1, 0, 0, 0, 99],
        vec![1, 0, 0, 0, 1],
        vec![5, 0, 0, 0, 1, 0x9f, 0x9f, 0x9f, 0x9f],
        vec![6, 0, 0, 0, 1, 0x82, 0x5b, 0xff, 0xff, 0xff],
        vec![11, 0, 0, 0, 1, 0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0],
        vec![1, 0, 0, 0, 2],
        vec![11, 0, 0, 0, 3, 9, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    ];
    for case in &cases {
        let mut talk = guest.connect();
        talk.stream.write_all(case).unwrap();
        match talk.receive() {
            Some(Frame::End(Outcome::Failed(failure))) => assert_eq!(failure.code, FailureCode::Invalid, "{case:?}"),
            other => panic!("{case:?}: {other:?}"),
        }
    }
    // Cut anywhere: dropped, and the agent lives on.
    for cut in 0..20 {
        let mut bytes = bytes::BytesMut::new();
        use tokio_util::codec::Encoder;
        let request = Request { op: new_op(), operation: Operation::Exec(sh("true")), paced: None };
        Frames::new().encode(Frame::Request(request), &mut bytes).unwrap();
        guest.connect().stream.write_all(&bytes[..cut]).unwrap();
    }
    // The wrong frames in the middle of a command.
    for frame in [Frame::Accepted, Frame::Gap { from: 0, to: 1 }, Frame::End(Outcome::Done)] {
        let (op, mut talk) = guest.start_exec(sh("sleep 1000"));
        talk.started();
        talk.send(frame);
        assert_eq!(talk.finish().failure(), FailureCode::Invalid);
        assert_eq!(guest.cancel(op), Outcome::Done);
    }
    // Input that nobody asked for.
    let (op, mut talk) = guest.start_exec(sh("sleep 1000"));
    talk.input(0, b"x");
    assert_eq!(talk.finish().failure(), FailureCode::Invalid);
    assert_eq!(guest.cancel(op), Outcome::Done);
    assert_eq!(guest.ask(Operation::Ping).outcome, Outcome::Done);
}

#[test]
fn streams_are_limited_and_some_are_kept_for_what_is_urgent() {
    let guest = Guest::start();
    let mut exec = sh("sleep 1000");
    exec.detached = true;
    let (op, mut talk) = guest.start_exec(exec);
    talk.started();
    let mut held: Vec<Talk> = (0..MAX_STREAMS - URGENT_STREAMS).map(|_| guest.attach(op, None)).collect();
    for talk in &mut held {
        // Read, so that closing is seen at the other end of a stream device, too.
        talk.until(|frame| matches!(frame, Frame::Accepted).then_some(()));
    }
    wait_for("the streams to be counted", || {
        guest.exec(sh("true")).outcome != Outcome::Done && {
            matches!(guest.exec(sh("true")).outcome, Outcome::Failed(failure) if failure.code == FailureCode::Busy)
        }
    });
    assert_eq!(guest.ask(Operation::Ping).outcome, Outcome::Done);
    drop(held);
    wait_for("room again", || matches!(guest.exec(sh("true")).outcome, Outcome::Process(_)));
    assert_eq!(guest.cancel(op), Outcome::Done);
}

#[test]
fn extreme_numbers_are_numbers() {
    let guest = Guest::start();
    let mut exec = sh("echo out");
    exec.timeout_ms = u64::MAX;
    let (op, talk) = guest.start_exec(exec);
    assert_eq!(talk.finish().text(), "out\n");
    let talked = guest.attach(op, Some(u64::MAX)).finish();
    assert_eq!((talked.failure(), talked.out.len()), (FailureCode::Invalid, 0));
    let read = Read { path: "/etc/passwd".into(), offset: u64::MAX, length: Some(u64::MAX), user: None };
    assert!(matches!(guest.ask(Operation::Read(read)).outcome, Outcome::Failed(_)));
    let mut exec = program(&["cat"]);
    exec.stdin = true;
    for offset in [1, u64::MAX - 3] {
        let (op, mut talk) = guest.start_exec(exec.clone());
        talk.input(offset, b"x");
        assert_eq!(talk.finish().failure(), FailureCode::Invalid);
        assert_eq!(guest.cancel(op), Outcome::Done);
    }
    let mut exec = sh("echo x");
    exec.pty = Some(PtySize { cols: 1001, rows: 1 });
    assert_eq!(guest.exec(exec).failure(), FailureCode::Invalid);
}

#[test]
fn a_stream_that_asks_for_nothing_is_dropped() {
    let guest = Guest::start();
    let mut silent = guest.connect();
    let begun = std::time::Instant::now();
    assert!(silent.receive().is_none());
    assert!(begun.elapsed() >= std::time::Duration::from_secs(9));
}

#[test]
fn a_stream_that_was_left_does_not_hold_its_program_back() {
    let guest = Guest::start();
    let (op, mut stuck) = guest.start_exec(sh("head -c 60000000 /dev/zero"));
    stuck.started();
    let reader = guest.attach(op, Some(0));
    assert_eq!(guest.ask(Operation::Leave(Leave { stream: op })).outcome, Outcome::Done);
    let talked = reader.finish();
    assert_eq!((talked.next, talked.process().code), (60_000_000, Some(0)));
    // What was on its way is still read, and then there is an end without an End.
    let mut last = None;
    while let Some(frame) = stuck.receive() {
        last = Some(frame);
    }
    assert!(!matches!(last, Some(Frame::End(_))));
}
