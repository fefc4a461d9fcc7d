//! Lasting shells through the real agent.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod wire;

use std::time::{Duration, Instant};

use pepo_proto::*;
use wire::*;

fn line(name: &str, text: &str) -> Exec {
    let mut exec = program(&[text]);
    exec.shell = Some(name.into());
    exec
}

#[test]
fn commands_share_directory_variables_and_functions() {
    let guest = Guest::start();
    let run = |text: &str| guest.exec(line("main", text));
    let talked = run("cd /usr; export A='a  b'; B=2; f() { echo \"f $1\"; }; echo out; echo err >&2");
    assert_eq!((talked.text().as_str(), talked.error_text().as_str()), ("out\n", "err\n"));
    let process = talked.process();
    assert_eq!((process.cause, process.code, process.cwd.as_deref()), (Cause::Exit, Some(0), Some("/usr")));
    assert!(matches!(talked.events[..], [Event::Started { .. }]));
    assert_eq!(run("pwd; sh -c 'echo \"$A\"'; echo $B; f x; (exit 9)").text(), "/usr\na  b\n2\nf x\n");
    assert_eq!(run("echo $?").text(), "9\n");
    assert_eq!(run("false").process().code, Some(1));
    let odd = run("echo 'quo\"te'; echo \"it's\"\necho second line; # comment\necho '!x' '\\n' \"$((1+1))\"");
    assert_eq!(odd.text(), "quo\"te\nit's\nsecond line\n!x \\n 2\n");
    assert_eq!(run("if then").process().code, Some(2));
    assert_eq!(run("echo still here; ls /proc/self/fd | wc -l").text().lines().next(), Some("still here"));
    // Another name is another shell.
    assert_eq!(guest.exec(line("other", "echo \"$A\"; pwd | grep -c usr")).text(), "\n0\n");
    let mut exec = line("main", "pwd; echo $C; read x; echo \"got $x\"");
    exec.cwd = Some("/etc".into());
    exec.env = vec![Variable { name: "C".into(), value: "it's $c".into() }];
    assert_eq!(guest.exec(exec).text(), "/etc\nit's $c\ngot \n");
    assert_eq!(run("pwd; echo \"$C\"").text(), "/etc\n\n");
    let mut exec = line("main", "true");
    exec.pty = Some(PtySize { cols: 80, rows: 24 });
    assert_eq!(guest.exec(exec).failure(), FailureCode::Invalid);
    let mut exec = line("main", "x");
    exec.argv.push("y".into());
    assert_eq!(guest.exec(exec).failure(), FailureCode::Invalid);
}

#[test]
fn large_lines_input_and_output_pass() {
    let guest = Guest::start();
    let text = "x'".repeat(15_000);
    let talked = guest.exec(line("main", &format!("echo \"{text}\" | wc -c")));
    assert_eq!(talked.text().trim(), "30001");
    let mut exec = line("main", "wc -c; head -c 3000000 /dev/zero");
    exec.stdin = true;
    let (_, mut talk) = guest.start_exec(exec);
    talk.input(0, &vec![b'y'; 500_000]);
    talk.eof(500_000);
    let talked = talk.finish();
    assert!(talked.out.starts_with(b"500000\n"));
    assert_eq!(talked.out.len(), 7 + 3_000_000);
    // Input that ends before anybody reads it.
    let mut exec = line("main", "sleep 0.2; cat; echo done");
    exec.stdin = true;
    let (_, mut talk) = guest.start_exec(exec);
    talk.eof(0);
    assert_eq!(talk.finish().text(), "done\n");
}

#[test]
fn one_at_a_time_in_order() {
    let guest = Guest::start();
    let (_, mut first) = guest.start_exec(line("main", "echo a; sleep 0.5; n=1"));
    first.output(2);
    let waiting: Vec<_> = (0..5).map(|_| guest.start_exec(line("main", "n=$((n+1)); echo $n")).1).collect();
    let (cancelled, talk) = guest.start_exec(line("main", "touch /tmp/must-not-be"));
    assert_eq!(guest.cancel(cancelled), Outcome::Done);
    assert_eq!(talk.finish().failure(), FailureCode::Cancelled);
    first.finish();
    let mut numbers: Vec<String> = waiting.into_iter().map(|talk| talk.finish().text()).collect();
    numbers.sort();
    assert_eq!(numbers, ["2\n", "3\n", "4\n", "5\n", "6\n"]);
}

#[test]
fn a_line_is_text_and_not_keys() {
    let guest = Guest::start();
    let text = "a\tb\u{1}\u{4}\u{12}\u{15}c";
    assert_eq!(guest.exec(line("main", &format!("printf %s '{text}'"))).text(), text);
}

#[test]
fn a_timeout_ends_the_command_and_keeps_the_shell() {
    let guest = Guest::start();
    assert_eq!(guest.exec(line("main", "K=kept; sleep 1000 & BG=$!")).process().code, Some(0));
    for text in [
        "sleep 1000; echo after",
        "sleep 1000 | cat; echo after",
        "while :; do :; done; echo after",
        "while :; do sleep 0.02; done; echo after",
        "echo $(sleep 1000) after",
        "f() { sleep 1000; echo after; }; f; echo after",
        "(trap '' INT TERM; sleep 1000; sleep 1000); echo after >/dev/null",
        "python3 -c 'import signal,time; signal.signal(2, signal.SIG_IGN); time.sleep(1000)'",
        "setsid sleep 1000 & wait; echo after",
    ] {
        let mut exec = line("main", text);
        exec.timeout_ms = 1000;
        let begun = Instant::now();
        let talked = guest.exec(exec);
        assert_eq!(talked.process().cause, Cause::Timeout, "{text}: {talked:?}");
        assert_eq!(talked.text(), "", "{text}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{text}");
        assert_eq!(guest.exec(line("main", "echo $K")).text(), "kept\n", "after {text}");
    }
    // What an earlier command left running was not this command's.
    assert_eq!(guest.exec(line("main", "kill -0 $BG && echo there; kill $BG")).text(), "there\n");
    let (op, mut talk) = guest.start_exec(line("main", "echo begun; sleep 1000; echo after"));
    talk.output(6);
    assert_eq!(guest.cancel(op), Outcome::Done);
    assert_eq!(talk.finish().process().cause, Cause::Killed);
    assert_eq!(guest.exec(line("main", "echo $K")).text(), "kept\n");
    let (op, mut talk) = guest.start_exec(line("main", "echo begun; sleep 1000; echo after"));
    talk.output(6);
    // An interrupt that comes while the shell makes a process is the program's alone, at a terminal as here.
    std::thread::sleep(Duration::from_millis(500));
    let signal = Signal { target: op, signal: 2, tree: false };
    assert_eq!(guest.ask(Operation::Signal(signal)).outcome, Outcome::Done);
    let talked = talk.finish();
    assert_eq!((talked.process().code, talked.text().as_str()), (Some(130), ""));
}

#[test]
fn a_dead_shell_is_told_and_the_next_is_fresh() {
    let guest = Guest::start();
    for text in ["exit 3", "kill -9 $$", "exec true", "set -e; false"] {
        assert_eq!(guest.exec(line("main", "V=old; echo $V")).text(), "old\n");
        assert_eq!(guest.exec(line("main", text)).failure(), FailureCode::ShellLost, "{text}");
        assert_eq!(guest.exec(line("main", "echo \"<$V>\"")).text(), "<>\n", "{text}");
    }
    // One that cannot be stopped is lost within a few seconds.
    let mut exec = line("main", "trap '' INT; while :; do :; done");
    exec.timeout_ms = 200;
    assert_eq!(guest.exec(exec).failure(), FailureCode::ShellLost);
    assert_eq!(guest.exec(line("main", "echo fresh")).text(), "fresh\n");
    let (_, mut talk) = guest.start_exec(line("main", "echo $$; sleep 1000"));
    let shell = talk.output(2);
    if !guest.is_real() {
        let pid: i32 = String::from_utf8(shell).unwrap().trim().parse().unwrap();
        assert!(std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
        assert_eq!(talk.finish().failure(), FailureCode::ShellLost);
    }
}

#[test]
fn what_runs_in_the_background_does_not_hold_a_command_up_or_write_into_the_next() {
    let guest = Guest::start();
    let begun = Instant::now();
    let talked = guest.exec(line("main", "(while sleep 0.05; do echo noise; done) & echo front"));
    assert!(talked.text().starts_with("front\n") || talked.text().contains("front\n"));
    assert!(begun.elapsed() < Duration::from_secs(20));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(guest.exec(line("main", "sleep 0.3; echo mine")).text(), "mine\n");
    assert_eq!(guest.exec(line("main", "kill $!; echo killed")).text(), "killed\n");
}
