//! Commands through the real agent: output, ends, trees, input, leases, replay, bounds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod wire;

use std::time::{Duration, Instant};

use pepo_proto::*;
use wire::*;

#[test]
fn runs_a_program_and_tells_the_truth_about_its_end() {
    let guest = Guest::start();
    let talked = guest.exec(sh("echo out; echo err >&2; exit 7"));
    assert!(talked.accepted);
    assert_eq!((talked.text().as_str(), talked.error_text().as_str()), ("out\n", "err\n"));
    assert!(matches!(talked.events[..], [Event::Started { .. }]));
    assert_eq!(talked.eofs, [Channel::Out, Channel::Err]);
    let process = talked.process();
    assert_eq!((process.cause, process.code, process.signal), (Cause::Exit, Some(7), None));
    assert_eq!((process.stdout_bytes, process.stderr_bytes), (4, 4));

    let process = guest.exec(sh("kill -TERM $$")).process().clone();
    assert_eq!((process.cause, process.code, process.signal), (Cause::Signal, None, Some(15)));
    let mut exec = sh("sleep 1000 & sleep 1000");
    exec.timeout_ms = 200;
    let process = guest.exec(exec).process().clone();
    assert_eq!((process.cause, process.signal), (Cause::Timeout, Some(9)));
    assert!(process.elapsed_ms >= 200);
}

#[test]
fn a_limit_that_cannot_be_kept_is_no_command() {
    let guest = Guest::start();
    for shell in [None, Some("main".to_owned())] {
        let mut exec = if shell.is_some() { program(&["echo ran"]) } else { sh("echo ran") };
        exec.shell = shell;
        exec.limits = Some(Limits { memory_bytes: Some(64 << 20), ..Limits::default() });
        let talked = guest.exec(exec);
        assert_eq!((talked.failure(), talked.text().as_str()), (FailureCode::Invalid, ""));
    }
}

#[test]
fn passes_arguments_environment_and_directory_untouched() {
    let guest = Guest::start();
    let mut exec = program(&["printf", "%s|", "", "a b", "$HOME", "*", "'\"\\", "ü€", "line\nbreak"]);
    exec.cwd = Some("/tmp".into());
    assert_eq!(guest.exec(exec).text(), "|a b|$HOME|*|'\"\\|ü€|line\nbreak|");
    let mut exec = sh("pwd; echo $FROM_ACTIVATE $OWN $USER; cat; readlink /proc/self/fd/0");
    exec.cwd = Some("/usr".into());
    exec.env = vec![Variable { name: "OWN".into(), value: "a=b c".into() }];
    let text = guest.exec(exec).text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "/usr");
    assert!(lines[1].starts_with("yes a=b c"), "{text}");
    assert_eq!(lines[2], "/dev/null");
}

#[test]
fn tells_not_found_from_not_executable_and_from_a_bad_directory() {
    let guest = Guest::start();
    for (argv, code) in [
        (vec!["no-such-program-here"], FailureCode::ProgramNotFound),
        (vec!["/no/such/program"], FailureCode::ProgramNotFound),
        (vec!["/etc/passwd"], FailureCode::ProgramNotExecutable),
        (vec!["/tmp"], FailureCode::ProgramNotExecutable),
        (vec![""], FailureCode::Invalid),
        (vec![], FailureCode::Invalid),
        (vec!["a\0b"], FailureCode::Invalid),
    ] {
        assert_eq!(guest.exec(program(&argv)).failure(), code, "{argv:?}");
    }
    for (cwd, code) in [("/no/such", FailureCode::NotFound), ("/etc/passwd", FailureCode::NotDirectory)] {
        let mut exec = program(&["true"]);
        exec.cwd = Some(cwd.into());
        assert_eq!(guest.exec(exec).failure(), code);
    }
    let mut exec = program(&["true"]);
    exec.user = Some("nobody-of-that-name".into());
    assert_eq!(guest.exec(exec).failure(), FailureCode::NotFound);
    // A failed start is remembered like any other end.
    let (op, talk) = guest.start_exec(program(&["no-such-program-here"]));
    talk.finish();
    assert_eq!(guest.attach(op, Some(0)).finish().failure(), FailureCode::ProgramNotFound);
}

#[test]
fn is_binary_safe_and_complete() {
    let guest = Guest::start();
    let script = "import sys,os\nfor i in range(64):\n os.write(1,bytes(range(256))*512); os.write(2,bytes([i])*1000)";
    let talked = guest.exec(program(&["python3", "-c", script]));
    assert_eq!(talked.out.len(), 64 * 256 * 512);
    assert!(talked.out.chunks(256).all(|chunk| chunk.iter().enumerate().all(|(i, byte)| i as u8 == *byte)));
    assert_eq!(talked.err, (0..64).flat_map(|i| vec![i; 1000]).collect::<Vec<u8>>());
    assert_eq!(talked.process().stdout_bytes, talked.out.len() as u64);
}

#[test]
fn tells_what_it_took_of_a_stream_where_that_was_asked() {
    fn taken(talk: &mut Talk) -> u64 {
        talk.until(|frame| if let Frame::Event(Event::Taken { bytes }) = frame { Some(*bytes) } else { None })
    }
    let guest = Guest::start();
    let directory = tempfile::tempdir().unwrap();
    let go = directory.path().join("go");
    let mut exec = sh(&format!("until [ -e {} ]; do sleep 0.05; done; exec cat >/dev/null", go.display()));
    exec.stdin = true;
    let mut talk = guest.connect();
    let operation = Operation::Exec(exec.clone());
    talk.send(Frame::Request(Request { op: new_op(), operation, paced: Some(true) }));
    let request = taken(&mut talk);
    assert!((20..300).contains(&request), "{request} bytes of request");
    let head = (HEADER + MAX_BODY - MAX_DATA) as u64;
    let sent = |frames: u64| request + frames * (60_000 + head);
    talk.input(0, &[b'x'; 60_000]);
    talk.input(60_000, &[b'x'; 60_000]);
    assert_eq!(taken(&mut talk), sent(2), "a pipe and the agent's room hold this much");
    talk.input(120_000, &[b'x'; 60_000]);
    talk.input(180_000, &[b'x'; 60_000]);
    std::fs::write(go, "").unwrap();
    assert_eq!(taken(&mut talk), sent(4));
    talk.eof(240_000);
    assert_eq!(talk.finish().process().code, Some(0));

    let (_, mut talk) = guest.start_exec(exec);
    talk.input(0, &[b'x'; 200_000]);
    talk.eof(200_000);
    let events = talk.finish().events;
    assert!(!events.iter().any(|event| matches!(event, Event::Taken { .. })), "nobody asked: {events:?}");
}

#[test]
fn feeds_input_by_offset_and_ignores_resends() {
    let guest = Guest::start();
    let mut exec = program(&["cat"]);
    exec.stdin = true;
    let (_, mut talk) = guest.start_exec(exec.clone());
    let position = talk.until(|frame| match frame {
        Frame::Event(Event::Input { next, open }) => Some((*next, *open)),
        _ => None,
    });
    assert_eq!(position, (0, true));
    talk.input(0, b"hello ");
    talk.input(3, b"lo wor");
    talk.input(0, b"hello");
    talk.input(9, b"ld");
    talk.eof(11);
    let talked = talk.finish();
    assert_eq!(talked.text(), "hello world");
    assert_eq!(talked.process().code, Some(0));

    let (_, mut talk) = guest.start_exec(exec);
    talk.input(5, b"late");
    assert_eq!(talk.finish().failure(), FailureCode::Invalid);
}

#[test]
fn input_beyond_what_the_program_reads_is_held_back() {
    let guest = Guest::start();
    let mut exec = program(&["sleep", "1000"]);
    exec.stdin = true;
    let (op, mut talk) = guest.start_exec(exec);
    talk.started();
    let before = rss(&guest);
    talk.stream.set_nonblocking(true).unwrap();
    use std::io::Write;
    let mut bytes = bytes::BytesMut::new();
    use tokio_util::codec::Encoder;
    let mut offset = 0;
    for _ in 0..512 {
        let piece = bytes::Bytes::from(vec![1; 60_000]);
        Frames::new().encode(Frame::Data { channel: Channel::In, offset, bytes: piece }, &mut bytes).unwrap();
        offset += 60_000;
    }
    let mut sent = 0;
    let until = Instant::now() + Duration::from_secs(2);
    while sent < bytes.len() && Instant::now() < until {
        match talk.stream.write(&bytes[sent..]) {
            Ok(written) => sent += written,
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    assert!(sent < 4 << 20, "{sent} bytes were taken for a program that reads none");
    assert!(rss(&guest) < before + (4 << 20));
    assert_eq!(guest.cancel(op), Outcome::Done);
}

/// The agent's resident bytes.
fn rss(guest: &Guest) -> u64 {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{}/statm", guest.pid())) else {
        return 0;
    };
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn a_slow_reader_holds_the_program_back_and_costs_bounded_memory() {
    let guest = Guest::start();
    let before = rss(&guest);
    let (op, mut talk) = guest.start_exec(sh("head -c 200000000 /dev/zero; echo -n end"));
    talk.started();
    // Nothing is read here: the program must come to a stop.
    let mut last = 0;
    wait_for("the program to be held back", || {
        std::thread::sleep(Duration::from_millis(300));
        let next = guest.ops().into_iter().find(|summary| summary.op == op).unwrap().next;
        std::mem::replace(&mut last, next) == next && next > 0
    });
    assert!(last <= 17 << 20, "{last}");
    assert!(rss(&guest) < before + (24 << 20), "{} from {before}", rss(&guest));
    let talked = talk.finish();
    assert_eq!(talked.out.len(), 200_000_003);
    assert!(talked.gaps.is_empty());
    assert!(rss(&guest) < before + (24 << 20), "{} from {before}", rss(&guest));
}

#[test]
fn a_repeated_request_attaches_and_never_runs_twice() {
    let guest = Guest::start();
    let directory = tempfile::tempdir().unwrap();
    let file = if guest.is_real() { "/tmp/once".to_owned() } else { format!("{}/once", directory.path().display()) };
    let (op, talk) = guest.start_exec(sh(&format!("rm -f {file}.x; echo ran >> {file}; cat {file}; sleep 0.2")));
    let again = guest.request(op, Operation::Exec(sh("echo another")));
    let (first, second) = (talk.finish(), again.finish());
    assert_eq!(first.text(), "ran\n");
    assert_eq!(second.text(), "ran\n");
    let third = guest.request(op, Operation::Exec(sh("echo another"))).finish();
    assert_eq!(third.text(), "ran\n");
    assert_eq!(third.process(), first.process());
    assert_eq!(guest.attach(op, Some(2)).finish().text(), "n\n");
    assert_eq!(guest.attach(new_op(), Some(0)).finish().failure(), FailureCode::UnknownOp);
}

#[test]
fn the_lease_of_a_lost_stream_kills_unless_detached_or_taken_up() {
    let guest = Guest::start_with(&["--lease-ms", "400"]);
    let (lost, mut talk) = guest.start_exec(sh("sleep 1000"));
    let pid = talk.started();
    drop(talk);
    let mut detached = sh("sleep 1000");
    detached.detached = true;
    let (kept, mut talk) = guest.start_exec(detached);
    let kept_pid = talk.started();
    drop(talk);
    let (renewed, mut talk) = guest.start_exec(sh("sleep 1000"));
    talk.started();
    drop(talk);
    let renewal = guest.attach(renewed, Some(0));
    wait_for("the lease to end", || guest.state(lost) == Some(OpState::Ended));
    assert!(!is_alive(pid));
    assert_eq!(guest.attach(lost, Some(0)).finish().process().cause, Cause::Killed);
    assert!(is_alive(kept_pid));
    assert_eq!(guest.state(kept), Some(OpState::Unattended));
    assert_eq!(guest.state(renewed), Some(OpState::Attached));
    assert_eq!(guest.cancel(renewed), Outcome::Done);
    assert_eq!(renewal.finish().process().cause, Cause::Killed);
    assert_eq!(guest.cancel(kept), Outcome::Done);
    assert!(!is_alive(kept_pid));
}

#[test]
fn detached_output_overwrites_its_oldest_and_the_gap_is_told() {
    let guest = Guest::start();
    let mut exec = sh("head -c 40000000 /dev/zero; echo -n end");
    exec.detached = true;
    let (op, mut talk) = guest.start_exec(exec);
    talk.started();
    drop(talk);
    wait_for("the end", || guest.state(op) == Some(OpState::Ended));
    let talked = guest.attach(op, Some(0)).finish();
    assert_eq!(talked.next, 40_000_003);
    assert_eq!(talked.gaps.len(), 1);
    assert_eq!(talked.gaps[0].0, 0);
    assert_eq!(talked.out.len() as u64, 40_000_003 - talked.gaps[0].1);
    assert!(talked.out.len() > 1 << 20 && talked.out.len() <= 16 << 20, "{}", talked.out.len());
    assert!(talked.out.ends_with(b"end"));
}

#[test]
fn cancel_reaches_everything_a_command_started() {
    let guest = Guest::start();
    // A daemon: own session, forked twice, nobody's child.
    let line = "(setsid sh -c 'sleep 1000 & echo $!; sleep 1000' &) ; sleep 0.3; sleep 1000 & echo $!; wait";
    let (op, mut talk) = guest.start_exec(sh(line));
    let mut text = vec![];
    while text.iter().filter(|byte| **byte == b'\n').count() < 2 {
        text.extend(talk.output(1));
    }
    let pids: Vec<u32> = String::from_utf8(text).unwrap().lines().map(|line| line.parse().unwrap()).collect();
    assert!(guest.is_real() || pids.iter().all(|pid| is_alive(*pid)));
    assert_eq!(guest.cancel(op), Outcome::Done);
    assert_eq!(talk.finish().process().cause, Cause::Killed);
    wait_for("the tree to be gone", || pids.iter().all(|pid| !is_alive(*pid)));
    // Again is fine, and an unknown one is told.
    assert_eq!(guest.cancel(op), Outcome::Done);
    assert!(matches!(guest.cancel(new_op()), Outcome::Failed(failure) if failure.code == FailureCode::UnknownOp));
}

#[test]
fn what_a_command_leaves_behind_goes_on_and_does_not_delay_its_end() {
    let guest = Guest::start();
    let begun = Instant::now();
    let line = "(while sleep 0.05; do echo still here || exit; done) & echo $!";
    let (op, talk) = guest.start_exec(sh(line));
    let talked = talk.finish();
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(talked.process().code, Some(0));
    if !guest.is_real() {
        let pid: u32 = talked.text().lines().next().unwrap().parse().unwrap();
        // Longer than the pipe would need to break it.
        std::thread::sleep(Duration::from_millis(500));
        assert!(is_alive(pid), "it was killed by its output");
        assert_eq!(guest.cancel(op), Outcome::Done);
        wait_for("the leftover to be gone", || !is_alive(pid));
    }
}

#[test]
fn output_that_waits_at_the_end_is_not_lost() {
    let guest = Guest::start();
    for _ in 0..20 {
        let (_, mut talk) = guest.start_exec(sh("head -c 300000 /dev/zero | tr '\\0' x; echo -n end >&2"));
        talk.started();
        std::thread::sleep(Duration::from_millis(5));
        let talked = talk.finish();
        assert_eq!(talked.out.len(), 300_000);
        assert_eq!(talked.error_text(), "end");
    }
}

#[test]
fn a_terminal_is_one() {
    let guest = Guest::start();
    let mut exec = program(&["bash", "--norc", "-i"]);
    exec.pty = Some(PtySize { cols: 91, rows: 31 });
    exec.env = vec![Variable { name: "PS1".into(), value: "$ ".into() }];
    let (op, mut talk) = guest.start_exec(exec);
    let mut offset = 0;
    let mut seen = String::new();
    let mut type_in = |talk: &mut Talk, text: &str| {
        talk.input(offset, text.as_bytes());
        offset += text.len() as u64;
    };
    let mut expect = |talk: &mut Talk, what: &str| {
        while !seen.contains(what) {
            seen.push_str(&String::from_utf8_lossy(&talk.output(1)));
        }
        seen.clear();
    };
    type_in(&mut talk, "stty size; tty\n");
    expect(&mut talk, "31 91");
    expect(&mut talk, "/dev/pts/");
    let resize = Resize { target: op, size: PtySize { cols: 50, rows: 20 } };
    assert_eq!(guest.ask(Operation::Resize(resize)).outcome, Outcome::Done);
    type_in(&mut talk, "stty size\n");
    expect(&mut talk, "20 50");
    type_in(&mut talk, "echo sleeping; sleep 1000\n");
    expect(&mut talk, "sleeping\r\n");
    std::thread::sleep(Duration::from_millis(200));
    type_in(&mut talk, "\x03");
    type_in(&mut talk, "echo status $?\n");
    expect(&mut talk, "status 130");
    type_in(&mut talk, "exit 5\n");
    let talked = talk.finish();
    assert_eq!(talked.process().code, Some(5));
    assert_eq!(talked.eofs, [Channel::Out]);
    let bad = Resize { target: op, size: PtySize { cols: 0, rows: 20 } };
    assert_eq!(guest.ask(Operation::Resize(bad)).failure(), FailureCode::Invalid);
}

#[test]
fn the_end_of_a_terminal_s_input_is_control_d() {
    let guest = Guest::start();
    let mut exec = program(&["cat"]);
    exec.pty = Some(PtySize { cols: 80, rows: 24 });
    let (_, mut talk) = guest.start_exec(exec);
    talk.input(0, b"line\n");
    talk.eof(5);
    let talked = talk.finish();
    assert_eq!(talked.process().code, Some(0));
    assert_eq!(talked.text(), "line\r\nline\r\n");
}

#[test]
fn signals_go_to_the_first_process_or_to_all() {
    let guest = Guest::start();
    let (op, mut talk) = guest.start_exec(sh("trap 'echo got; exit 3' USR1; echo ready; while :; do sleep 0.05; done"));
    assert_eq!(talk.output(6), b"ready\n");
    let signal = |signal, tree| guest.ask(Operation::Signal(Signal { target: op, signal, tree })).outcome;
    assert!(matches!(signal(0, false), Outcome::Failed(_)));
    assert!(matches!(signal(65, false), Outcome::Failed(_)));
    assert_eq!(signal(10, false), Outcome::Done);
    let talked = talk.finish();
    assert_eq!((talked.text().as_str(), talked.process().code), ("got\n", Some(3)));
    let (op, mut talk) = guest.start_exec(sh("sleep 1000; echo after"));
    talk.started();
    std::thread::sleep(Duration::from_millis(200));
    let signal = Signal { target: op, signal: 15, tree: true };
    assert_eq!(guest.ask(Operation::Signal(signal)).outcome, Outcome::Done);
    assert_eq!(talk.finish().process().signal, Some(15));
}

#[test]
fn several_readers_see_the_same_and_one_may_take_over() {
    let guest = Guest::start();
    let (op, mut first) = guest.start_exec(sh("echo one; sleep 0.3; echo two; sleep 0.3; echo three"));
    first.started();
    let second = guest.attach(op, Some(0));
    let third = guest.attach(op, Some(4));
    assert_eq!(second.finish().text(), "one\ntwo\nthree\n");
    assert_eq!(third.finish().text(), "two\nthree\n");
    assert_eq!(first.finish().text(), "one\ntwo\nthree\n");

    let (op, mut stuck) = guest.start_exec(sh("head -c 60000000 /dev/zero"));
    stuck.started();
    let sole = Attach { target: op, from: Some(0), input: false, keep_input: false, sole: Some(true) };
    let talked = guest.request(new_op(), Operation::Attach(sole)).finish();
    assert_eq!(talked.next, 60_000_000, "the stuck reader held it back");
    assert!(matches!(talked.process().cause, Cause::Exit));
}

#[test]
fn input_can_be_sent_by_another_stream() {
    let guest = Guest::start();
    let mut exec = program(&["cat"]);
    exec.stdin = true;
    let (op, mut talk) = guest.start_exec(exec);
    talk.started();
    let attach = |keep| Attach { target: op, from: None, input: true, keep_input: keep, sole: None };
    let mut sender = guest.request(new_op(), Operation::Attach(attach(true)));
    sender.input(0, b"abc");
    sender.eof(3);
    assert_eq!(sender.finish().outcome, Outcome::Done);
    let mut sender = guest.request(new_op(), Operation::Attach(attach(false)));
    let position = sender.until(|frame| match frame {
        Frame::Event(Event::Input { next, open }) => Some((*next, *open)),
        _ => None,
    });
    assert_eq!(position, (3, true));
    sender.input(3, b"def");
    sender.eof(6);
    sender.finish();
    assert_eq!(talk.finish().text(), "abcdef");
}
