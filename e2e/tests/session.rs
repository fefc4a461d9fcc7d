//! Sessions and Commands through the API: what is kept, replayed, signalled, typed and copied.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::fs;
use std::time::Duration;

use pepo_api::client::{AttachEvent, Client, Input, body_from};
use pepo_api::query::{AtPath, ShowCommand, UnderPath, WriteFile, WriteStdin};
use pepo_api::{
    CommandState, CreateCommand, ErrorCode, MakeFile, OnDisconnect, Output, PtySize, Reason, RenameFile, SendSignal,
    StreamEvent, Text,
};
use pepo_e2e::{Instance, Started, bare};
use rustix::process::{Pid, Signal, kill_process};

/// An instance with a daemon, and a client of it.
struct Up {
    instance: Instance,
    daemon: Option<Started>,
    client: Client,
    session: String,
}

impl Up {
    async fn new() -> Self {
        let instance = Instance::new();
        let daemon = Some(instance.up());
        let client = instance.client();
        let session = client.session_create(&bare()).await.expect("session").id.to_string();
        Up { instance, daemon, client, session }
    }

    async fn end(mut self) {
        self.client.session_terminate(&self.session).await.expect("terminate");
        self.instance.pepo(["down"]).ok();
        let ran = self.daemon.take().expect("daemon").wait();
        assert_eq!(ran.code(), Some(0), "{ran}");
        self.instance.end();
    }

    async fn sh(&self, line: &str) -> Output {
        let command = CreateCommand { command: Some(line.into()), wait_seconds: Some(60), ..Default::default() };
        self.client.command_create(&self.session, &command).await.expect("command")
    }
}

fn text(text: &Text) -> &str {
    match text {
        Text::Utf8(text) => text,
        Text::Binary { .. } => panic!("not text"),
    }
}

#[tokio::test]
async fn a_command_answers_with_its_end_and_output() {
    let up = Up::new().await;
    let output = up.sh("echo out; echo err >&2; exit 5").await;
    assert_eq!(output.command.state, CommandState::Exited);
    let end = output.command.end.clone().expect("an end");
    assert_eq!((end.reason, end.exit_code), (Reason::Exit, Some(5)));
    assert_eq!((text(&output.stdout), text(&output.stderr)), ("out\n", "err\n"));

    let signalled = up.sh("kill -SEGV $$").await.command.end.expect("an end");
    assert_eq!((signalled.reason, signalled.signal_number), (Reason::Signal, Some(11)));

    let binary = up.sh("printf '\\377\\376'").await;
    assert!(matches!(binary.stdout, Text::Binary { ref base64 } if base64 == "//4="), "{binary:?}");

    let long = CreateCommand {
        command: Some("seq 1 100000".into()),
        max_output_bytes: Some(1000),
        wait_seconds: Some(60),
        ..Default::default()
    };
    let long = up.client.command_create(&up.session, &long).await.expect("command");
    assert!(long.truncated && long.missing_bytes > 500_000, "{long:?}");
    assert!(text(&long.stdout).starts_with("1\n2\n") && text(&long.stdout).ends_with("100000\n"), "{long:?}");
    up.end().await;
}

#[tokio::test]
async fn the_same_id_never_runs_twice() {
    let up = Up::new().await;
    let id = pepo_api::CommandId::generate();
    let command = CreateCommand {
        id: Some(id),
        command: Some("echo x >> ~/runs; cat ~/runs".into()),
        wait_seconds: Some(60),
        ..Default::default()
    };
    for _ in 0..3 {
        let output = up.client.command_create(&up.session, &command).await.expect("command");
        assert_eq!((output.command.id, text(&output.stdout)), (id, "x\n"));
    }
    up.end().await;
}

#[tokio::test]
async fn output_is_kept_and_replayed_from_any_offset() {
    let up = Up::new().await;
    let command = CreateCommand {
        command: Some("for i in 1 2 3 4 5; do echo line $i; sleep 0.2; done".into()),
        wait_seconds: Some(0),
        on_disconnect: Some(OnDisconnect::Keep),
        ..Default::default()
    };
    let started = up.client.command_create(&up.session, &command).await.expect("command");
    let id = started.command.id;
    let follow = |offset| ShowCommand { offset: Some(offset), follow: Some(true), ..Default::default() };
    for offset in [0u64, 7, 20] {
        let mut events = up.client.command_events(&up.session, id, follow(offset));
        let mut seen = String::new();
        let mut ended = false;
        while let Some(event) = events.next().await.expect("event") {
            match event {
                StreamEvent::Stdout { data, .. } => seen.push_str(text(&data)),
                StreamEvent::Exit { .. } => ended = true,
                _ => {}
            }
        }
        assert!(ended);
        let whole = "line 1\nline 2\nline 3\nline 4\nline 5\n";
        assert_eq!(seen, whole[usize::try_from(offset).expect("small")..]);
    }
    up.end().await;
}

#[tokio::test]
async fn signals_and_kill_reach_what_they_name() {
    let up = Up::new().await;
    let start = |line: &str| CreateCommand { command: Some(line.into()), wait_seconds: Some(0), ..Default::default() };
    let trap = start("trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done");
    let command = up.client.command_create(&up.session, &trap).await.expect("command").command.id;
    wait_for_output(&up, command, "ready").await;
    let interrupt = SendSignal { signal: "INT".into(), tree: false };
    up.client.command_signal(&up.session, command, &interrupt).await.expect("signal");
    let show = ShowCommand { wait_seconds: Some(30), ..Default::default() };
    let ended = up.client.command_show(&up.session, command, &show).await.expect("show");
    assert_eq!(ended.command.end.as_ref().and_then(|end| end.exit_code), Some(9), "{ended:?}");
    assert!(text(&ended.stdout).ends_with("caught\n"), "{ended:?}");

    let tree = start("trap '' TERM INT HUP; setsid sleep 4444 & echo ready; sleep 4445");
    let command = up.client.command_create(&up.session, &tree).await.expect("command").command.id;
    wait_for_output(&up, command, "ready").await;
    up.client.command_kill(&up.session, command).await.expect("kill");
    let ended = up.client.command_show(&up.session, command, &show).await.expect("show");
    assert_eq!(ended.command.end.map(|end| end.reason), Some(Reason::Killed));
    assert_eq!(text(&up.sh("ps -eo args= | grep '^sleep 444' || true").await.stdout), "");
    up.end().await;
}

async fn wait_for_output(up: &Up, command: pepo_api::CommandId, wanted: &str) {
    let mut events =
        up.client.command_events(&up.session, command, ShowCommand { follow: Some(true), ..Default::default() });
    let mut seen = String::new();
    while !seen.contains(wanted) {
        match events.next().await.expect("event").expect("it goes on") {
            StreamEvent::Stdout { data, .. } => seen.push_str(text(&data)),
            StreamEvent::Exit { command } => panic!("it ended: {command:?}"),
            _ => {}
        }
    }
}

#[tokio::test]
async fn input_with_an_offset_may_be_sent_again() {
    let up = Up::new().await;
    let cat =
        CreateCommand { argv: Some(vec!["cat".into()]), open_stdin: true, wait_seconds: Some(0), ..Default::default() };
    let command = up.client.command_create(&up.session, &cat).await.expect("command").command.id;
    let at = |offset, eof| WriteStdin { offset: Some(offset), eof: Some(eof) };
    for _ in 0..2 {
        let answer = up.client.command_stdin(&up.session, command, &at(0, false), "hello ").await.expect("stdin");
        assert_eq!(answer.next_offset, 6);
    }
    up.client.command_stdin(&up.session, command, &at(6, true), "again\n").await.expect("stdin");
    let show = ShowCommand { wait_seconds: Some(30), ..Default::default() };
    let ended = up.client.command_show(&up.session, command, &show).await.expect("show");
    assert_eq!(text(&ended.stdout), "hello again\n");
    up.end().await;
}

#[tokio::test]
async fn a_terminal_is_a_terminal() {
    let up = Up::new().await;
    let shell = CreateCommand {
        command: Some(
            "tty; stty size; while [ \"$(stty size)\" = '33 91' ]; do sleep 0.05; done; stty size; \
             trap 'echo INTERRUPTED' INT; while read line; do echo \"<$line>\"; done; echo bye"
                .into(),
        ),
        pty: Some(PtySize { cols: 91, rows: 33 }),
        open_stdin: true,
        wait_seconds: Some(0),
        ..Default::default()
    };
    let command = up.client.command_create(&up.session, &shell).await.expect("command").command.id;
    let mut attached = up.client.command_attach(&up.session, command, 0);
    let input = attached.input();
    let mut seen = String::new();
    let mut stage = 0;
    let end = tokio::time::timeout(Duration::from_secs(60), async {
        loop {
            match attached.next().await.expect("an event").expect("no error") {
                AttachEvent::Stdout(bytes) => seen.push_str(&String::from_utf8_lossy(&bytes)),
                AttachEvent::Exit(command) => return *command,
                _ => {}
            }
            let next = match stage {
                0 if seen.contains("33 91") => Input::Resize { cols: 120, rows: 40 },
                1 if seen.contains("40 120") => Input::Bytes("typed\r".into()),
                2 if seen.contains("<typed>") => Input::Bytes(b"\x03"[..].into()),
                3 if seen.contains("INTERRUPTED") => Input::Bytes(b"\x04"[..].into()),
                _ => continue,
            };
            stage += 1;
            assert!(input.send(next).await);
        }
    })
    .await
    .unwrap_or_else(|_| panic!("stage {stage}: {seen}"));
    assert!(seen.contains("/dev/pts/"), "{seen}");
    assert_eq!(end.end.and_then(|end| end.exit_code), Some(0), "{seen}");
    up.end().await;
}

#[tokio::test]
async fn a_lasting_shell_remembers() {
    let up = Up::new().await;
    let line = |line: &str| CreateCommand {
        command: Some(line.into()),
        shell: Some("main".into()),
        wait_seconds: Some(60),
        ..Default::default()
    };
    let run = async |text: &str| up.client.command_create(&up.session, &line(text)).await.expect("command");
    run("cd /tmp && export COLOUR=green && greet() { echo \"$COLOUR in $PWD\"; }").await;
    let second = run("greet; (exit 6)").await;
    assert_eq!(text(&second.stdout), "green in /tmp\n");
    let end = second.command.end.expect("an end");
    assert_eq!((end.exit_code, end.cwd.as_deref()), (Some(6), Some("/tmp")));
    up.end().await;
}

#[tokio::test]
async fn files_can_be_written_listed_moved_and_removed() {
    let up = Up::new().await;
    let at = |path: &str| AtPath { path: path.into(), ..Default::default() };
    let bytes: Vec<u8> = (0..200_000u32).flat_map(|n| n.to_be_bytes()).collect();
    let make = MakeFile {
        path: "dir/deep".into(),
        kind: pepo_api::FileKind::Directory,
        target: None,
        mode: None,
        parents: true,
        user: None,
    };
    up.client.file_make(&up.session, &make).await.expect("make");
    let write = WriteFile { path: "dir/deep/ünï file".into(), mode: Some("0640".into()), ..Default::default() };
    up.client.file_write(&up.session, &write, body_from(bytes.clone())).await.expect("write");
    let stat = up.client.file_stat(&up.session, &at("dir/deep/ünï file")).await.expect("stat");
    assert_eq!((stat.size_bytes, stat.mode.as_str(), stat.uid), (bytes.len() as u64, "0640", 1000));
    let rename = RenameFile { from: "dir/deep/ünï file".into(), to: "dir/plain".into(), user: None };
    up.client.file_rename(&up.session, &rename).await.expect("rename");
    let list = up.client.file_list(&up.session, &at("dir")).await.expect("list");
    assert_eq!(list.entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["deep", "plain"]);
    let mut stream = up.client.file_read(&up.session, &at("dir/plain")).await.expect("read");
    let mut back = vec![];
    while let Some(piece) = stream.next().await.expect("piece") {
        back.extend_from_slice(&piece);
    }
    assert!(back == bytes);
    let remove = UnderPath { path: "dir".into(), recursive: Some(true), ..Default::default() };
    up.client.file_remove(&up.session, &remove).await.expect("remove");
    let error = up.client.file_stat(&up.session, &at("dir")).await.expect_err("it is gone");
    assert_eq!(error.code(), Some(ErrorCode::NotFound), "{error}");
    up.end().await;
}

#[tokio::test]
async fn cp_carries_trees_both_ways() {
    let up = Up::new().await;
    let folder = tempfile::tempdir().expect("directory");
    let tree = folder.path().join("tree");
    fs::create_dir_all(tree.join("a/b")).expect("directory");
    for n in 0..200 {
        fs::write(tree.join(format!("a/b/file {n}")), format!("{n}").repeat(100)).expect("write");
    }
    std::os::unix::fs::symlink("a/b", tree.join("link")).expect("link");
    let cp = |from: &str, to: &str| up.instance.pepo(["cp", from, to]).directory(folder.path()).ok();
    cp("tree", &format!("{}:/home/agent/tree", up.session));
    cp(&format!("{}:/home/agent/tree", up.session), "back");
    let names = |root: &str| {
        let ran = std::process::Command::new("sh")
            .args([
                "-c",
                "find . -printf '%P %y %m %l\\n' | sort; find . -type f | sort | xargs -d '\\n' cat | sha256sum",
            ])
            .current_dir(folder.path().join(root))
            .output()
            .expect("find");
        String::from_utf8_lossy(&ran.stdout).into_owned()
    };
    assert_eq!(names("tree"), names("back"));
    up.end().await;
}

#[tokio::test]
async fn a_port_leads_into_a_session_and_ends_with_its_verb() {
    use std::io::{Read, Write};
    let up = Up::new().await;
    let server = CreateCommand {
        command: Some("mkdir w; cd w; echo inside > f; exec python3 -m http.server --bind 127.0.0.1 8000".into()),
        wait_seconds: Some(0),
        ..Default::default()
    };
    up.client.command_create(&up.session, &server).await.expect("command");
    up.sh("until curl -s 127.0.0.1:8000/f; do sleep 0.1; done").await;
    let forward = up.instance.pepo(["port-forward", &up.session, "0:8000"]).start();
    forward.says(&format!(" -> {}:8000", up.session), Duration::from_secs(30));
    let said = forward.so_far();
    let here = said.split(" -> ").next().expect("an address").to_owned();
    for _ in 0..3 {
        let mut stream = std::net::TcpStream::connect(&here).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
        stream.write_all(b"GET /f HTTP/1.0\r\n\r\n").expect("ask");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read");
        assert!(answer.ends_with("inside\n"), "{answer}");
    }
    forward.signal(rustix::process::Signal::INT);
    let ran = forward.wait();
    assert_eq!(ran.code(), Some(130), "{ran}");
    assert!(std::net::TcpStream::connect(&here).is_err(), "it still listens");
    let nobody = up.instance.pepo(["port-forward", "nobody", "8000"]).run();
    assert!(nobody.code() == Some(125) || nobody.code() == Some(1), "{nobody}");
    up.end().await;
}

#[tokio::test]
async fn a_terminated_session_says_so() {
    let up = Up::new().await;
    let other = up.client.session_create(&bare()).await.expect("session").id.to_string();
    up.client.session_terminate(&other).await.expect("terminate");
    let command = CreateCommand { command: Some("true".into()), ..Default::default() };
    let error = up.client.command_create(&other, &command).await.expect_err("refused");
    assert_eq!(error.code(), Some(ErrorCode::SessionTerminated), "{error}");
    let unknown = pepo_api::SessionId::generate().to_string();
    let error = up.client.command_create(&unknown, &command).await.expect_err("refused");
    assert_eq!(error.code(), Some(ErrorCode::NotFound), "{error}");
    up.end().await;
}

/// Processor time that a process has used, in hundredths of a second.
fn ticks(pid: i32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    let fields = stat.rsplit_once(')').expect("a name").1.split_whitespace();
    fields.skip(11).take(2).map(|field| field.parse::<u64>().expect("ticks")).sum()
}

#[tokio::test]
async fn input_that_nobody_reads_waits_without_work() {
    let up = Up::new().await;
    let reader = CreateCommand {
        command: Some("read line; sleep 8; head -c 1048570 | sha256sum".into()),
        open_stdin: true,
        wait_seconds: Some(0),
        ..Default::default()
    };
    let command = up.client.command_create(&up.session, &reader).await.expect("command").command.id;
    let mut attached = up.client.command_attach(&up.session, command, 0);
    let input = attached.input();
    let sending = tokio::spawn(async move {
        assert!(input.send(Input::Bytes("line\n".into())).await);
        for _ in 0..256 {
            assert!(input.send(Input::Bytes(vec![b'x'; 4096].into())).await);
        }
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    let names = [up.instance.vmm(), "vhost-device-vs"];
    let pids: Vec<i32> = names.into_iter().flat_map(|name| up.instance.pids(name)).collect();
    let used = |pids: &[i32]| pids.iter().map(|pid| ticks(*pid)).sum::<u64>();
    let before = used(&pids);
    tokio::time::sleep(Duration::from_secs(4)).await;
    let busy = used(&pids) - before;
    println!("{busy} hundredths of a second of work in 4 s");
    assert!(busy < 200, "{busy} hundredths of a second of work in 4 s for input that nobody reads");
    let mut seen = String::new();
    while let Some(event) = attached.next().await {
        match event.expect("no error") {
            AttachEvent::Stdout(bytes) => seen.push_str(&String::from_utf8_lossy(&bytes)),
            AttachEvent::Exit(_) => break,
            _ => {}
        }
    }
    // `head -c 1048570 < /dev/zero | tr '\0' x | sha256sum`
    assert_eq!(
        seen.trim(),
        "95897a652f6a1f9f0cdf3a2f3dffa79173e30bad55f6ab8de2d032343ff22620  -",
        "what was held back is whole"
    );
    sending.await.expect("sent");
    up.end().await;
}

#[tokio::test]
async fn many_that_leave_at_once_are_in_nobodys_way() {
    let up = Up::new().await;
    let command = CreateCommand {
        command: Some("echo there; sleep 600".into()),
        wait_seconds: Some(0),
        ..CreateCommand::default()
    };
    let command = up.client.command_create(&up.session, &command).await.expect("command").command.id;
    let mut held = Vec::new();
    for _ in 0..220 {
        let mut attached = up.client.command_attach(&up.session, command, 0);
        while !matches!(attached.next().await.expect("an event").expect("no error"), AttachEvent::Stdout(_)) {}
        held.push(attached);
    }
    // Each is told to the guest on a stream of its own; all of them come before its agent takes the first one.
    let [vmm] = up.instance.pids(up.instance.vmm())[..] else { panic!("one VMM") };
    let vmm = Pid::from_raw(vmm).expect("a pid");
    kill_process(vmm, Signal::STOP).expect("stop");
    drop(held);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (client, session) = (up.client.clone(), up.session.clone());
    let killing = tokio::spawn(async move { client.command_kill(&session, command).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    kill_process(vmm, Signal::CONT).expect("go on");
    killing.await.expect("no panic").expect("kill");
    assert_eq!(text(&up.sh("echo on").await.stdout), "on\n");
    up.end().await;
}

/// In the guest: the wall clock, twenty times a second, for ever. What comes on the way as input is run first.
const CLOCK: &str = r#"
import os, threading, time
def lines():
    for line in iter(input, "end"): exec(line, globals())
threading.Thread(target=lines, daemon=True).start()
while True:
    print(time.time_ns(), flush=True); time.sleep(0.05)
"#;

/// In the guest, as lines to [`CLOCK`]: a tenth slower for a moment, as nothing that sets a clock does.
const SLOWER: [&str; 3] = [
    "import ctypes; libc = ctypes.CDLL(None); word = (ctypes.c_long * 26)()",
    "def tick(n): word[0] = 0x4000; word[11] = n; libc.adjtimex(word)",
    "tick(9000); time.sleep(0.8); tick(10000)",
];

#[tokio::test]
async fn a_guests_clock_is_put_right_unless_somebody_there_sets_it() {
    let up = Up::new().await;
    let command = CreateCommand {
        argv: Some(vec!["python3".into(), "-c".into(), CLOCK.into()]),
        user: Some("root".into()),
        open_stdin: true,
        wait_seconds: Some(0),
        ..Default::default()
    };
    let command = up.client.command_create(&up.session, &command).await.expect("command").command.id;
    let mut attached = up.client.command_attach(&up.session, command, 0);
    let input = attached.input();
    // How far it is behind, with the way to here: the least of some tellings. Milliseconds.
    let mut behind = async |tellings: usize| {
        let (mut least, mut told, mut rest) = (i64::MAX, 0, String::new());
        while told < tellings {
            let Some(AttachEvent::Stdout(bytes)) = attached.next().await.map(|event| event.expect("no error")) else {
                continue;
            };
            rest.push_str(std::str::from_utf8(&bytes).expect("numbers"));
            while let Some((line, after)) = rest.split_once('\n') {
                let said: i64 = line.parse().expect("a number");
                let now = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_nanos() as i64;
                least = least.min((now - said) / 1_000_000);
                told += 1;
                rest = after.to_owned();
            }
        }
        least
    };
    // As Activate set it, and put right once.
    tokio::time::sleep(Duration::from_secs(2)).await;
    behind(60).await;
    let before = behind(10).await;
    let line = |text: &str| Input::Bytes(format!("{text}\n").into());
    for part in SLOWER {
        assert!(input.send(line(part)).await);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    behind(20).await;
    let mut slow = behind(3).await;
    println!("behind by {before} ms, {slow} ms after it went slower");
    let begun = std::time::Instant::now();
    while slow > before + 30 {
        assert!(begun.elapsed() < Duration::from_secs(100), "it is behind by {slow} ms, and was by {before} ms");
        slow = behind(5).await;
    }
    assert!(input.send(line("time.clock_settime(time.CLOCK_REALTIME, time.time() - 3600)")).await);
    tokio::time::sleep(Duration::from_secs(7)).await;
    behind(150).await;
    let theirs = behind(5).await;
    assert!((3_500_000..3_700_000).contains(&theirs), "an hour that somebody took is {theirs} ms");
    up.client.command_kill(&up.session, command).await.expect("kill");
    up.end().await;
}
