//! Workspaces in real microVMs: what a file system of theirs means, what is shared, and what outlives whom.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::fs;
use std::time::{Duration, Instant};

use pepo_api::client::{Client, body_from};
use pepo_api::query::{RemoveWorkspace, ShowSession, WriteFile};
use pepo_api::{
    CreateCommand, CreateSession, CreateWorkspace, ErrorCode, IfBusy, Reason, Session, SessionState, Text, Workspace,
    WorkspaceChoice, WorkspaceMode,
};
use pepo_e2e::{Instance, Started, until};
use rustix::process::{Pid, Signal, kill_process};

/// Software emulation on a busy machine: a start takes seconds, and each file a few milliseconds.
const LIMIT: Duration = Duration::from_secs(120);

struct Up {
    instance: Instance,
    daemon: Started,
    client: Client,
}

impl Up {
    fn new() -> Self {
        let instance = Instance::new();
        let daemon = instance.up();
        let client = instance.client();
        Up { instance, daemon, client }
    }

    async fn workspace(&self, body: CreateWorkspace) -> Workspace {
        self.client.workspace_create(&body).await.expect("a Workspace")
    }

    async fn session(&self, workspace: WorkspaceChoice) -> Session {
        let body = CreateSession { workspace: Some(Some(workspace)), ..CreateSession::default() };
        self.client.session_create(&body).await.expect("a Session")
    }

    /// A Session that has it, and runs.
    async fn with(&self, workspace: &Workspace) -> String {
        let choice = WorkspaceChoice { id: Some(workspace.id), ..WorkspaceChoice::default() };
        self.session(choice).await.id.to_string()
    }

    async fn sh(&self, session: &str, line: &str) -> (i32, String) {
        let command = CreateCommand { command: Some(line.into()), wait_seconds: Some(300), ..CreateCommand::default() };
        let output = self.client.command_create(session, &command).await.expect("a command");
        let end = output.command.end.unwrap_or_else(|| panic!("`{line}` goes on"));
        let text = |text: &Text| match text {
            Text::Utf8(text) => text.clone(),
            Text::Binary { base64 } => base64.clone(),
        };
        (end.exit_code.unwrap_or(-1), text(&output.stdout) + &text(&output.stderr))
    }

    async fn ok(&self, session: &str, line: &str) -> String {
        let (code, said) = self.sh(session, line).await;
        assert_eq!(code, 0, "`{line}`: {said}");
        said
    }

    async fn put(&self, session: &str, name: &str, text: &str) {
        let query = WriteFile { path: format!("/tmp/{name}"), ..WriteFile::default() };
        self.client.file_write(session, &query, body_from(text.as_bytes().to_vec())).await.expect("a file");
    }

    /// How its Sandbox ended. A Session with a Workspace goes on without one.
    async fn ended(&self, session: &str) -> pepo_api::Ended {
        let began = Instant::now();
        loop {
            let shown = self.client.session_show(session, &ShowSession::default()).await.expect("the record");
            match shown.state {
                SessionState::Terminated => return shown.ended.expect("an end"),
                SessionState::Idle => return shown.last_end.expect("how its Sandbox ended"),
                _ => {}
            }
            assert!(began.elapsed() < LIMIT, "{shown:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn end(self) {
        self.instance.pepo(["down"]).ok();
        let ran = self.daemon.wait();
        assert_eq!(ran.code(), Some(0), "{ran}");
        self.instance.end();
    }
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).expect("a pid"), Signal::KILL).expect("kill");
}

#[tokio::test]
async fn files_mean_what_they_do_on_a_disk() {
    let up = Up::new();
    let workspace = up.workspace(CreateWorkspace { name: Some("code".into()), ..Default::default() }).await;
    let one = up.with(&workspace).await;
    assert_eq!(up.ok(&one, "pwd; stat -c %U .; ls -A").await, "/workspace\nagent\n");
    up.put(&one, "semantics.py", include_str!("guest/semantics.py")).await;
    let began = Instant::now();
    let (code, said) = up.sh(&one, "mkdir s; cd s; python3 /tmp/semantics.py").await;
    println!("{said}in {:?}", began.elapsed());
    assert_eq!(code, 0, "{said}");
    // What this one leaves is there for the next one, and for nobody to change who may only read.
    up.ok(&one, "rm -rf s; mkdir d; echo kept > d/f; setfattr -n user.k -v v d/f 2>/dev/null || true").await;
    up.client.session_terminate(&one).await.expect("terminate");
    let reader =
        WorkspaceChoice { name: Some("code".into()), mode: Some(WorkspaceMode::Ro), ..WorkspaceChoice::default() };
    let two = up.session(reader).await.id.to_string();
    assert_eq!(up.ok(&two, "cat d/f").await, "kept\n");
    for change in ["echo x > d/f", "touch y", "rm d/f", "mkdir e", "chmod 600 d/f", "sudo rm d/f"] {
        let (code, said) = up.sh(&two, change).await;
        assert!(code != 0 && said.contains("Read-only file system"), "{change}: {said}");
    }
    up.client.session_terminate(&two).await.expect("terminate");
    let shown = up.client.workspace_show("code").await.expect("show");
    let usage = shown.usage.expect("usage");
    assert!(shown.sessions.is_empty() && usage.bytes >= 10 << 30 && usage.files >= 1 << 20, "{shown:?}");
    let removed = up.client.workspace_remove("code", &RemoveWorkspace::default()).await.expect("remove");
    assert!(removed.freed_bytes > 0 && removed.ended_sessions.is_empty(), "{removed:?}");
    let gone = up.client.workspace_show("code").await.expect_err("gone");
    assert_eq!(gone.code(), Some(ErrorCode::NotFound));
    up.end().await;
}

#[tokio::test]
async fn the_server_is_nobody_on_the_host_and_sees_nothing_of_it() {
    let up = Up::new();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let session = up.with(&workspace).await;
    up.ok(&session, "echo in the tree > file").await;
    let [pid] = up.instance.pids("pepo-share")[..] else { panic!("{:?}", up.instance.pids("pepo-share")) };
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name} {status}"));
        line.trim().to_owned()
    };
    let uid: u32 = field("Uid:").split_whitespace().next().expect("a uid").parse().expect("a uid");
    assert!(pepo_e2e::SANDBOX_UIDS.contains(&uid), "it runs as {uid}");
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:"), field("Groups:")), ("1".into(), "2".into(), String::new()));
    assert_eq!(u64::from_str_radix(&field("CapBnd:"), 16), Ok(0));
    assert_eq!(u64::from_str_radix(&field("CapInh:"), 16), Ok(0));
    // chown, dac_override, fowner, fsetid, setgid, setuid, setfcap: of its own user namespace, and no other.
    assert_eq!(u64::from_str_radix(&field("CapEff:"), 16), Ok(0x8000_00DB));
    let link = |pid: &str, name: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).expect("a namespace");
    for name in ["user", "mnt", "net", "ipc", "uts", "pid"] {
        assert_ne!(link(&pid.to_string(), name), link("self", name), "it is in the host's {name} namespace");
    }
    let [keeper] = up.instance.pids("pepo-keeper")[..] else { panic!("one keeper") };
    assert_eq!(link(&pid.to_string(), "pid"), link(&keeper.to_string(), "pid"), "not below the keeper");
    let cgroup = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("cgroups");
    assert_eq!(cgroup(pid), cgroup(keeper), "not in the Sandbox's cgroup");
    let root: Vec<_> =
        fs::read_dir(format!("/proc/{pid}/root")).expect("root").map(|e| e.unwrap().file_name()).collect();
    assert_eq!(root, ["file"], "it sees more than the tree");
    let mounts = fs::read_to_string(format!("/proc/{pid}/mounts")).expect("mounts");
    assert!(mounts.lines().count() == 1 && mounts.contains("nosuid,nodev,noexec"), "{mounts}");
    // No file of the host is open in it but the tree's own and /dev/null.
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").flatten() {
        let to = fs::read_link(entry.path()).unwrap_or_default().display().to_string();
        let known = ["socket:", "pipe:", "anon_inode:", "/dev/null"].iter().any(|kind| to.starts_with(kind));
        assert!(known || to == "/" || to == "/file" || to.ends_with("/fd"), "it has {to} open");
    }
    up.client.session_terminate(&session).await.expect("terminate");
    up.end().await;
}

#[tokio::test]
async fn sessions_share_one_and_exclude_each_other() {
    let up = Up::new();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let (one, two) = tokio::join!(up.with(&workspace), up.with(&workspace));
    up.ok(&one, "touch lock; (flock 9; echo had > held; sleep 600) 9< lock >/dev/null 2>&1 & until [ -e held ]; do sleep 0.1; done")
        .await;
    let (code, _) = up.sh(&two, "flock -n lock true").await;
    assert_eq!(code, 1, "a lock of another Session was not seen");
    // Names, appended lines and a database, from both at once.
    let race = r#"
import os, sqlite3, sys
me = sys.argv[1]
won = 0
for n in range(60):
    try:
        os.close(os.open(f"x{n}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)); won += 1
    except FileExistsError: pass
    os.rename(*[(lambda p: (open(p, "w").close(), p)[1])(f"r{me}{n}"), "target"])
    with open("lines", "a") as f: f.write(me * 40 + "\n")
base = sqlite3.connect("base", timeout=120)
for n in range(12):
    base.execute("begin immediate")
    at = base.execute("select n from t").fetchone()[0]
    base.execute("update t set n = ?", (at + 1,))
    base.commit()
print(won)
"#;
    up.put(&one, "race.py", race).await;
    up.put(&two, "race.py", race).await;
    up.ok(&one, "python3 -c \"import sqlite3; b = sqlite3.connect('base'); b.execute('create table t(n)'); b.execute('insert into t values(0)'); b.commit()\"")
        .await;
    let (won_one, won_two) = tokio::join!(up.ok(&one, "python3 /tmp/race.py a"), up.ok(&two, "python3 /tmp/race.py b"));
    let won = |text: &str| text.trim().parse::<u32>().expect("a number");
    assert_eq!(won(&won_one) + won(&won_two), 60, "a name was made twice, or not at all: {won_one} {won_two}");
    // What one did is seen by the other within the second that names and attributes are trusted.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(up.ok(&one, "sort lines | uniq -c | awk '{print $1, length($2)}'").await, "60 40\n60 40\n");
    let count = "python3 -c \"import sqlite3; b = sqlite3.connect('base'); print(b.execute('select n from t').fetchone()[0], b.execute('pragma integrity_check').fetchone()[0])\"";
    for session in [&one, &two] {
        assert_eq!(up.ok(session, count).await, "24 ok\n", "an update was lost");
    }
    // Whoever waits for a lock has it when its holder's Sandbox ends.
    let waiting = up.ok(&two, "flock lock echo got");
    let ending = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        up.client.session_terminate(&one).await.expect("terminate");
    };
    let (said, ()) = tokio::join!(waiting, ending);
    assert_eq!(said, "got\n");
    up.client.session_terminate(&two).await.expect("terminate");
    up.end().await;
}

/// Writes numbered records to a file, telling each one that was acknowledged, until it is ended.
const WRITER: &str = "import os, sys, zlib\n\
    f = os.open('log', os.O_CREAT | os.O_WRONLY | os.O_APPEND)\n\
    n = os.fstat(f).st_size // 4096\n\
    while True:\n\
    \x20   body = (b'%08d' % n) * 511\n\
    \x20   os.write(f, body + b'%08x' % zlib.crc32(body))\n\
    \x20   n += 1\n\
    \x20   if n % 16 == 0: print(n, flush=True)\n";

/// How many whole records there are; fails where one is damaged.
const READER: &str = "import os, zlib\n\
    n = 0\n\
    with open('log', 'rb') as f:\n\
    \x20   while True:\n\
    \x20       r = f.read(4096)\n\
    \x20       if len(r) < 4096: break\n\
    \x20       assert b'%08x' % zlib.crc32(r[:-8]) == r[-8:] and r[:8] == b'%08d' % n, n\n\
    \x20       n += 1\n\
    print(n)\n";

#[tokio::test]
async fn whoever_is_killed_nothing_acknowledged_is_lost() {
    let rounds: usize = std::env::var("PEPO_E2E_KILLS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1);
    let up = Up::new();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let victims = [
        ("pepo-share", Reason::MountLost),
        ("qemu-system-x86", Reason::VmmExit),
        ("vhost-device-vs", Reason::VmmExit),
        ("pepo-keeper", Reason::KilledOutside),
    ];
    for round in 0..rounds {
        for (victim, reason) in victims {
            let session = up.with(&workspace).await;
            up.put(&session, "writer.py", WRITER).await;
            let command = CreateCommand {
                command: Some("python3 /tmp/writer.py".into()),
                wait_seconds: Some(0),
                ..CreateCommand::default()
            };
            let running = up.client.command_create(&session, &command).await.expect("a command").command.id;
            let acknowledged = || async {
                let query = pepo_api::query::ShowCommand::default();
                let output = up.client.command_show(&session, running, &query).await.ok()?;
                let Text::Utf8(text) = output.stdout else { return None };
                text.lines().last()?.parse::<u64>().ok()
            };
            let began = Instant::now();
            while acknowledged().await.is_none() {
                assert!(began.elapsed() < LIMIT, "it does not write");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let before = acknowledged().await.unwrap_or(0);
            let pids = up.instance.pids(victim);
            assert_eq!(pids.len(), 1, "{victim}: {pids:?}");
            kill(pids[0]);
            let ended = up.ended(&session).await;
            assert_eq!(ended.reason, reason, "{victim}: {ended:?}");
            up.instance.sandboxes_gone();
            // The Session itself goes on, in a fresh Sandbox with the same files.
            let next = session.clone();
            up.put(&next, "reader.py", READER).await;
            let there: u64 = up.ok(&next, "python3 /tmp/reader.py").await.trim().parse().expect("a number");
            println!("round {round}, {victim}: {before} acknowledged, {there} there");
            assert!(there >= before, "{victim}: {before} records were acknowledged, {there} are there");
            up.ok(&next, "truncate -s $(( $(stat -c %s log) / 4096 * 4096 )) log").await;
            up.client.session_terminate(&next).await.expect("terminate");
        }
    }
    up.end().await;
}

#[tokio::test]
async fn a_private_one_goes_with_its_session_unless_it_is_kept() {
    let up = Up::new();
    // Nothing said: one of its own.
    let session = up.client.session_create(&CreateSession::default()).await.expect("a Session");
    let own = session.workspace.clone().expect("a Workspace of its own");
    assert!(own.own && !own.keep && own.path == "/workspace", "{own:?}");
    let id = session.id.to_string();
    up.ok(&id, "dd if=/dev/urandom of=big bs=1M count=8 status=none").await;
    let busy = up.client.workspace_remove(&own.id.to_string(), &RemoveWorkspace::default()).await;
    assert_eq!(busy.expect_err("it is used").code(), Some(ErrorCode::Conflict));
    let foreign = WorkspaceChoice { id: Some(own.id), ..WorkspaceChoice::default() };
    let body = CreateSession { workspace: Some(Some(foreign)), ..CreateSession::default() };
    let shared = up.client.session_create(&body).await.expect_err("it is another Session's own");
    assert_eq!(shared.code(), Some(ErrorCode::Conflict));
    let ended = up.client.session_terminate(&id).await.expect("terminate");
    let freed = ended.workspace.and_then(|workspace| workspace.freed_bytes).expect("how much came free");
    assert!(freed > 8 << 20, "{freed}");
    assert_eq!(
        up.client.workspace_show(&own.id.to_string()).await.expect_err("gone").code(),
        Some(ErrorCode::NotFound)
    );

    // Kept, it stays and is nobody's; what is to persist lies in it.
    let keep = WorkspaceChoice { own: Some(true), keep: Some(true), ..WorkspaceChoice::default() };
    let body = CreateSession {
        workspace: Some(Some(keep)),
        persist: Some(vec!["~/.config/tool".into(), "/opt/cache".into()]),
        ..CreateSession::default()
    };
    let session = up.client.session_create(&body).await.expect("a Session");
    let kept = session.workspace.clone().expect("a Workspace");
    let id = session.id.to_string();
    up.ok(&id, "echo mine > ~/.config/tool/settings; echo warm > /opt/cache/c; stat -c %U ~/.config/tool").await;
    up.client.session_terminate(&id).await.expect("terminate");
    let stays = up.client.workspace_show(&kept.id.to_string()).await.expect("it stays");
    assert!(stays.session_id.is_none() && stays.sessions.is_empty(), "{stays:?}");
    let body = CreateSession {
        workspace: Some(Some(WorkspaceChoice { id: Some(kept.id), ..WorkspaceChoice::default() })),
        persist: Some(vec!["~/.config/tool".into(), "/opt/cache".into()]),
        ..CreateSession::default()
    };
    let id = up.client.session_create(&body).await.expect("a Session").id.to_string();
    assert_eq!(up.ok(&id, "cat ~/.config/tool/settings /opt/cache/c").await, "mine\nwarm\n");
    // By force it goes, and its user with it.
    let force = RemoveWorkspace { force: Some(true) };
    let removed = up.client.workspace_remove(&kept.id.to_string(), &force).await.expect("by force");
    assert_eq!(removed.ended_sessions.len(), 1);
    assert_eq!(up.ended(&id).await.reason, Reason::Operator);

    // And none is none.
    let body = CreateSession { workspace: Some(None), ..CreateSession::default() };
    let id = up.client.session_create(&body).await.expect("a Session").id.to_string();
    assert_eq!(up.ok(&id, "pwd; mount | grep -c fuse || true").await, "/home/agent\n0\n");
    up.client.session_terminate(&id).await.expect("terminate");
    up.end().await;
}

#[tokio::test]
async fn one_writer_means_one_and_full_is_an_answer() {
    let up = Up::new();
    let body = CreateWorkspace { size_mib: Some(16), max_files: Some(1024), single_writer: true, ..Default::default() };
    let workspace = up.workspace(body).await;
    let one = up.with(&workspace).await;
    up.ok(&one, "echo first > a").await;
    let refusing =
        WorkspaceChoice { id: Some(workspace.id), if_busy: Some(IfBusy::Refuse), ..WorkspaceChoice::default() };
    let refused = up.session(refusing).await.id.to_string();
    let ended = up.ended(&refused).await;
    assert!(ended.reason == Reason::SetupFailed && ended.message.contains("one may have it at a time"), "{ended:?}");
    let resize = pepo_api::UpdateWorkspace { size_mib: Some(32), ..Default::default() };
    let busy = up.client.workspace_update(&workspace.id.to_string(), &resize).await.expect_err("it is used");
    assert_eq!(busy.code(), Some(ErrorCode::Conflict));
    // Bytes, then files: the answer is that there is no room, and what is there stays as it is.
    let (code, said) = up.sh(&one, "dd if=/dev/zero of=big bs=64k count=1000").await;
    assert!(code != 0 && said.contains("No space left on device"), "{said}");
    assert_eq!(
        up.ok(&one, "cat a; rm big; for i in $(seq 900); do echo > f$i; done; ls | wc -l").await,
        "first\n901\n"
    );
    let (code, said) = up.sh(&one, "for i in $(seq 901 1100); do echo > f$i || exit 7; done").await;
    assert!(code == 7 && said.contains("No space left on device"), "{said}");
    assert_eq!(up.ok(&one, "cat a").await, "first\n");
    // One that waits gets it when the first has gone.
    let waiting = up.with(&workspace).await;
    up.client.session_terminate(&one).await.expect("terminate");
    assert_eq!(up.ok(&waiting, "cat a; rm f*; ls").await, "first\na\n");
    up.client.session_terminate(&waiting).await.expect("terminate");
    let grown = up.client.workspace_update(&workspace.id.to_string(), &resize).await.expect("grow");
    assert_eq!(grown.size_mib, 32);
    let after = up.with(&workspace).await;
    up.ok(&after, "dd if=/dev/zero of=big bs=64k count=384 && cat a").await;
    up.client.session_terminate(&after).await.expect("terminate");
    up.end().await;
}

#[tokio::test]
async fn a_restart_of_pepod_ends_no_mount_and_its_loss_is_told_afterwards() {
    let up = Up::new();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let session = up.with(&workspace).await;
    up.ok(&session, "echo before > a").await;
    let [host] = up.instance.pids("pepo-host")[..] else { panic!("one privileged side") };
    kill(host);
    until("another pepod answers", LIMIT, || {
        let hosts = up.instance.pids("pepo-host");
        (hosts.len() == 1 && hosts[0] != host).then_some(())
    });
    assert_eq!(up.ok(&session, "cat a; echo after > b; cat b").await, "before\nafter\n");
    let [server] = up.instance.pids("pepo-share")[..] else { panic!("one server") };
    kill(server);
    assert_eq!(up.ended(&session).await.reason, Reason::MountLost);
    up.end().await;
}

/// In the place of the guest's own pump: garbage on every stream that the agent holds.
const LIAR: &str = "import ctypes, os, socket\n\
    libc = ctypes.CDLL(None)\n\
    agent = next(p for p in os.listdir('/proc') if p.isdigit() and p != '1' and os.path.exists(f'/proc/{p}/exe')\n\
    \x20   and os.readlink(f'/proc/{p}/exe') == os.readlink('/proc/1/exe'))\n\
    pidfd = libc.syscall(434, int(agent), 0)\n\
    for name in os.listdir(f'/proc/{agent}/fd'):\n\
    \x20   try:\n\
    \x20       if not os.readlink(f'/proc/{agent}/fd/{name}').startswith('socket:'): continue\n\
    \x20       fd = libc.syscall(438, pidfd, int(name), 0)\n\
    \x20       if fd >= 0: os.write(fd, b'\\xff' * 4096)\n\
    \x20   except OSError: pass\n";

#[tokio::test]
async fn a_guest_that_lies_to_its_server_breaks_its_own_mount_alone() {
    let up = Up::new();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let (liar, bystander) = tokio::join!(up.with(&workspace), up.with(&workspace));
    up.ok(&liar, "echo precious > a").await;
    up.put(&liar, "liar.py", LIAR).await;
    let command = CreateCommand {
        command: Some("sudo python3 /tmp/liar.py; cat a".into()),
        wait_seconds: Some(0),
        ..CreateCommand::default()
    };
    up.client.command_create(&liar, &command).await.expect("a command");
    let ended = up.ended(&liar).await;
    assert!(matches!(ended.reason, Reason::MountLost | Reason::GuestSilent), "{ended:?}");
    assert_eq!(up.ok(&bystander, "cat a; echo more >> a; cat a").await, "precious\nprecious\nmore\n");
    up.client.session_terminate(&bystander).await.expect("terminate");
    up.end().await;
}
