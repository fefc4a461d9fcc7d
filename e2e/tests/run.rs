//! `pepo run`: one program in a microVM of its own, as if it ran here.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::fs;
use std::time::Duration;

use pepo_e2e::{Instance, until};
use rustix::process::Signal;

#[test]
fn the_first_line_of_the_readme() {
    let instance = Instance::new();
    let folder = tempfile::tempdir().expect("directory");
    fs::write(folder.path().join("agent.py"), "import platform; print('hello from', platform.system())\n")
        .expect("write");
    let ran = instance.pepo(["run", "--copy", ".", "--", "python3", "agent.py"]).directory(folder.path()).ok();
    assert_eq!(ran.out(), "hello from Linux\n", "{ran}");
    println!("first `pepo run`, daemon and all: {:?}", ran.took);
    let again = instance.pepo_run(["echo", "hello"]).ok();
    assert_eq!(again.out(), "hello\n", "{again}");
    println!("second `pepo run`: {:?}", again.took);
    instance.end();
}

#[test]
fn argv_reaches_the_program_untouched() {
    let instance = Instance::new();
    let odd = ["", " ", "a b", "ünïcödé ✓", "line\nbreak", "tab\there", "$HOME `id` \"'\\", "--flag", "*", "-"];
    let show = "import sys; sys.stdout.write('\\0'.join(sys.argv[1:]))";
    let ran = instance.pepo(["run", "--", "python3", "-c", show]).args(odd).ok();
    assert_eq!(ran.out().split('\0').collect::<Vec<_>>(), odd, "{ran}");
    instance.end();
}

#[test]
fn outputs_are_apart_and_binary_safe() {
    let instance = Instance::new();
    let write = "import sys\n\
        for n in range(64):\n\
        \x20sys.stdout.buffer.write(bytes(range(256)) * 16); sys.stdout.buffer.flush()\n\
        \x20sys.stderr.buffer.write(bytes(reversed(range(256)))); sys.stderr.buffer.flush()\n";
    let ran = instance.pepo(["run", "-q", "--", "python3", "-c", write]).ok();
    let up: Vec<u8> = (0..=255).collect();
    let down: Vec<u8> = (0..=255).rev().collect();
    assert!(ran.stdout == up.repeat(16 * 64), "stdout: {} bytes", ran.stdout.len());
    assert!(ran.stderr == down.repeat(64), "stderr: {} bytes", ran.stderr.len());
    instance.end();
}

#[test]
fn exit_codes_are_the_programs_or_the_documented_ones() {
    let instance = Instance::new();
    let cases: [(&[&str], i32); 5] = [
        (&["true"], 0),
        (&["sh", "-c", "exit 37"], 37),
        (&["/no/such/program"], 127),
        (&["/etc/passwd"], 126),
        (&["sh", "-c", "kill -TERM $$"], 128 + 15),
    ];
    for (argv, code) in cases {
        let ran = instance.pepo_run(argv).run();
        assert_eq!(ran.code(), Some(code), "{ran}");
    }
    let ran = instance.pepo(["run", "--timeout", "2", "--", "sh", "-c", "sleep 1000 & sleep 1000"]).run();
    assert_eq!(ran.code(), Some(124), "{ran}");
    let ran = instance.pepo(["run", "--image", "bsae", "--", "true"]).run();
    assert_eq!(ran.code(), Some(125), "{ran}");
    assert!(ran.err().contains("did you mean") && ran.err().contains("base"), "{ran}");
    instance.end();
}

#[test]
fn a_timeout_reaches_the_whole_tree() {
    let instance = Instance::new();
    let session = new_session(&instance);
    // A tree with everything that hides from its parent: a new session, an ignored signal, an orphan.
    let tree = "trap '' TERM HUP; setsid sleep 7777 & (sleep 7778 &) ; sleep 7779";
    let ran = instance.pepo(["exec", "--timeout", "2", &session, "--", "bash", "-c", tree]).run();
    assert_eq!(ran.code(), Some(124), "{ran}");
    assert_eq!(sleepers(&instance, &session, "sleep 777"), "", "the tree outlived its timeout");
    terminate(&instance, &session);
    instance.end();
}

#[test]
fn input_reaches_the_program_and_ends() {
    let instance = Instance::new();
    let bytes: Vec<u8> = (0..3_000_000u32).flat_map(|n| n.to_le_bytes()).take(3_000_001).collect();
    let ran = instance.pepo(["run", "-i", "--", "sh", "-c", "cat; echo done >&2"]).stdin(bytes.clone()).ok();
    assert!(ran.stdout == bytes, "{} of {} bytes came back", ran.stdout.len(), bytes.len());
    assert!(ran.err().contains("done"), "{ran}");
    // A program that does not read its input ends all the same.
    instance.pepo(["run", "-i", "--", "true"]).stdin(vec![b'x'; 5_000_000]).ok();
    instance.end();
}

#[test]
fn settings_of_the_command_arrive() {
    let instance = Instance::new();
    let ran = instance
        .pepo(["run", "-e", "GREETING=hé llo", "-w", "/tmp", "-u", "root", "--memory", "300m", "--cpus", "1", "--"])
        .args(["sh", "-c", "echo $GREETING; pwd; id -u; awk '/MemTotal/{print $2}' /proc/meminfo; nproc"])
        .ok();
    let lines: Vec<String> = ran.out().lines().map(str::to_owned).collect();
    assert_eq!(lines[..3], ["hé llo", "/tmp", "0"], "{ran}");
    let kib: u64 = lines[3].parse().expect("a number");
    assert!((200_000..307_200).contains(&kib), "{ran}");
    assert_eq!(lines[4], "1", "{ran}");
    instance.end();
}

#[test]
fn files_go_in_and_come_out_even_after_a_failure() {
    let instance = Instance::new();
    let folder = tempfile::tempdir().expect("directory");
    fs::create_dir_all(folder.path().join("in/deep")).expect("directory");
    fs::write(folder.path().join("in/deep/a file"), "inside").expect("write");
    fs::write(folder.path().join("single"), "alone").expect("write");
    let script = "mkdir results; cat 'deep/a file' single > results/both; exit 3";
    let ran = instance
        .pepo(["run", "--copy", "in", "--copy", "single", "--out", "results", "--", "sh", "-c", script])
        .directory(folder.path())
        .run();
    assert_eq!(ran.code(), Some(3), "{ran}");
    assert_eq!(fs::read_to_string(folder.path().join("results/both")).expect("the result"), "insidealone", "{ran}");
    instance.end();
}

#[test]
fn a_long_output_arrives_whole_and_in_order() {
    let instance = Instance::new();
    // Far more than any buffer on the way, with a reader that is slow at first.
    let ran = instance.pepo_run(["bash", "-c", "seq 1 3000000; echo end >&2"]).within(Duration::from_secs(240)).ok();
    let mut wanted = 1u32;
    for line in ran.stdout.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
        assert_eq!(line, wanted.to_string().as_bytes());
        wanted += 1;
    }
    assert_eq!(wanted, 3_000_001);
    println!("{} bytes in {:?}", ran.stdout.len(), ran.took);
    instance.end();
}

#[test]
fn ctrl_c_ends_the_command_and_its_tree() {
    let instance = Instance::new();
    let running = instance.pepo_run(["bash", "-c", "echo started; sleep 5555"]).start();
    running.says("started", Duration::from_secs(60));
    running.signal_group(Signal::INT);
    let ran = running.wait();
    assert!(matches!(ran.code(), Some(130)) || ran.signal() == Some(2), "{ran}");
    instance.sandboxes_gone();
    instance.end();
}

#[test]
fn a_client_that_dies_takes_its_command_along() {
    let instance = Instance::new();
    let session = new_session(&instance);
    let running =
        instance.pepo(["exec", &session, "--", "bash", "-c", "echo started; sleep 6666 & sleep 6667"]).start();
    running.says("started", Duration::from_secs(60));
    running.signal(Signal::KILL);
    running.wait();
    until("the tree is killed", Duration::from_secs(20), || {
        sleepers(&instance, &session, "sleep 666").is_empty().then_some(())
    });
    terminate(&instance, &session);
    instance.end();
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    let instance = Instance::new();
    for (args, word) in [
        (&["run", "--net", "public", "--", "true"][..], "net"),
        (&["run", "--workspace", "w", "--", "true"][..], "workspace"),
        (&["run", "-v", "/nowhere:/data", "--", "true"][..], "/nowhere"),
    ] {
        let ran = instance.pepo(args).run();
        assert_ne!(ran.code(), Some(0), "{ran}");
        assert!(ran.err().to_lowercase().contains(word), "{ran}");
    }
    instance.end();
}

fn new_session(instance: &Instance) -> String {
    instance.pepo(["session", "create", "-q", "--workspace", "none"]).ok().out().trim().to_owned()
}

fn terminate(instance: &Instance, session: &str) {
    instance.pepo(["session", "rm", session]).ok();
}

/// Command lines in the guest that begin with this.
fn sleepers(instance: &Instance, session: &str, begin: &str) -> String {
    let ran = instance.pepo(["exec", session, "--", "sh", "-c", "ps -eo args="]).ok();
    ran.out().lines().filter(|line| line.trim_start().starts_with(begin)).collect::<Vec<_>>().join("\n")
}
