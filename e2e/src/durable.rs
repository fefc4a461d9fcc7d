//! Proofs that Workspaces keep what they are given, as small as a test and as long as a soak.

use std::fs;
use std::time::{Duration, Instant};

use pepo_api::client::{Client, body_from};
use pepo_api::query::{ShowCommand, ShowSession, WriteFile};
use pepo_api::{
    CreateCommand, CreateSession, CreateWorkspace, OnDisconnect, Reason, Session, SessionState, Text, Workspace,
    WorkspaceChoice,
};

use crate::instance::Instance;
use crate::program::Started;
use crate::strike::{KILL_AGENT, Moment, Victim, kill, kill_daemon};

/// Software emulation on a busy machine: a start takes seconds, and each file a few milliseconds.
pub const LIMIT: Duration = Duration::from_secs(120);

/// An instance with its daemon, for Sessions with Workspaces.
pub struct Up {
    /// The instance.
    pub instance: Instance,
    daemon: Started,
    /// Its client.
    pub client: Client,
}

impl Up {
    /// A new one.
    pub fn start() -> Self {
        let instance = Instance::new();
        let daemon = instance.up();
        Self::of(instance, daemon)
    }

    fn of(instance: Instance, daemon: Started) -> Self {
        let client = instance.client();
        Up { instance, daemon, client }
    }

    /// A Workspace.
    pub async fn workspace(&self, body: CreateWorkspace) -> Workspace {
        self.client.workspace_create(&body).await.expect("a Workspace")
    }

    /// A Session with that Workspace.
    pub async fn session(&self, workspace: WorkspaceChoice) -> Session {
        let body = CreateSession { workspace: Some(Some(workspace)), ..CreateSession::default() };
        self.client.session_create(&body).await.expect("a Session")
    }

    /// A Session that has it, and runs.
    pub async fn with(&self, workspace: &Workspace) -> String {
        let choice = WorkspaceChoice { id: Some(workspace.id), ..WorkspaceChoice::default() };
        self.session(choice).await.id.to_string()
    }

    /// What a line of shell comes to.
    pub async fn sh(&self, session: &str, line: &str) -> (i32, String) {
        let command = CreateCommand { command: Some(line.into()), wait_seconds: Some(300), ..CreateCommand::default() };
        let mut output = self.client.command_create(session, &command).await.expect("a command");
        let began = Instant::now();
        while output.command.end.is_none() {
            assert!(began.elapsed() < 10 * LIMIT, "`{line}` goes on");
            let show = ShowCommand { wait_seconds: Some(60), ..ShowCommand::default() };
            output = self.client.command_show(session, output.command.id, &show).await.expect("show");
        }
        let end = output.command.end.expect("an end");
        let text = |text: &Text| match text {
            Text::Utf8(text) => text.clone(),
            Text::Binary { base64 } => base64.clone(),
        };
        (end.exit_code.unwrap_or(-1), text(&output.stdout) + &text(&output.stderr))
    }

    /// What a line of shell prints, which must not fail.
    pub async fn ok(&self, session: &str, line: &str) -> String {
        let (code, said) = self.sh(session, line).await;
        assert_eq!(code, 0, "`{line}`: {said}");
        said
    }

    /// The same of one that takes longer than an answer waits.
    pub async fn ok_within(&self, session: &str, line: &str, limit: Duration) -> String {
        let command = CreateCommand {
            command: Some(line.into()),
            wait_seconds: Some(0),
            timeout_seconds: Some(0),
            ..CreateCommand::default()
        };
        let command = self.client.command_create(session, &command).await.expect("a command").command.id;
        let began = Instant::now();
        loop {
            let output = self.client.command_show(session, command, &ShowCommand::default()).await.expect("show");
            if let Some(end) = output.command.end {
                assert_eq!(end.exit_code, Some(0), "`{line}`: {end:?} {:?} {:?}", output.stdout, output.stderr);
                let Text::Utf8(text) = output.stdout else { panic!("`{line}` says what is no text") };
                return text;
            }
            assert!(began.elapsed() < limit, "`{line}` goes on");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Puts a file into /tmp.
    pub async fn put(&self, session: &str, name: &str, text: &str) {
        let query = WriteFile { path: format!("/tmp/{name}"), ..WriteFile::default() };
        self.client.file_write(session, &query, body_from(text.as_bytes().to_vec())).await.expect("a file");
    }

    /// How its Sandbox ended. A Session with a Workspace goes on without one.
    pub async fn ended(&self, session: &str) -> pepo_api::Ended {
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

    /// Ends the daemon; nothing may be left.
    pub async fn end(self) {
        self.instance.pepo(["down"]).ok();
        let ran = self.daemon.wait();
        assert_eq!(ran.code(), Some(0), "{ran}");
        self.instance.end();
    }
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

/// A command in a Session that writes records.
struct Writing<'a> {
    up: &'a Up,
    session: &'a str,
    command: pepo_api::CommandId,
}

impl<'a> Writing<'a> {
    /// Starts it, and waits for the first records.
    async fn begin(up: &'a Up, session: &'a str) -> Self {
        up.put(session, "writer.py", WRITER).await;
        let command = CreateCommand {
            command: Some("python3 /tmp/writer.py".into()),
            wait_seconds: Some(0),
            on_disconnect: Some(OnDisconnect::Keep),
            ..CreateCommand::default()
        };
        let command = up.client.command_create(session, &command).await.expect("a command").command.id;
        let writing = Writing { up, session, command };
        writing.beyond(0).await;
        writing
    }

    /// How many records were acknowledged.
    async fn acknowledged(&self) -> Option<u64> {
        let output = self.up.client.command_show(self.session, self.command, &ShowCommand::default()).await.ok()?;
        let Text::Utf8(text) = output.stdout else { return None };
        text.lines().last()?.parse().ok()
    }

    /// Waits until more than so many were; how many.
    async fn beyond(&self, count: u64) -> u64 {
        let began = Instant::now();
        loop {
            match self.acknowledged().await {
                Some(now) if now > count => return now,
                _ => assert!(began.elapsed() < LIMIT, "it does not write"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Counts what is there in the Session, which must be at least what was acknowledged before, and cuts off what is no
    /// whole record.
    async fn nothing_lost(&self, victim: &str, before: u64) {
        self.up.put(self.session, "reader.py", READER).await;
        let there: u64 = self.up.ok(self.session, "python3 /tmp/reader.py").await.trim().parse().expect("a number");
        println!("{victim}: {before} acknowledged, {there} there");
        assert!(there >= before, "{victim}: {before} records were acknowledged, {there} are there");
        self.up.ok(self.session, &format!("truncate -s {} log", there * 4096)).await;
    }
}

/// Kills each process of an instance in the middle of a guest's writing, so many times: nothing acknowledged is lost.
pub async fn kills(rounds: usize) {
    for round in 1..=rounds {
        kill_each().await;
        println!("{round} of {rounds} rounds, and nothing is lost");
    }
}

/// In an instance of its own: `pepo up` takes ever longer to start again what dies often.
async fn kill_each() {
    let up = Up::start();
    let under_firecracker = up.instance.under_firecracker();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let processes = [Victim::Vmm, Victim::Device, Victim::Keeper]
        .into_iter()
        .filter(|victim| victim.can_die(Moment::Running, under_firecracker))
        .map(|victim| (victim.called(under_firecracker), victim.reasons()));
    let victims: Vec<_> = [(Some("pepo-share"), &[Reason::MountLost][..]), (None, Victim::Agent.reasons())]
        .into_iter()
        .chain(processes)
        .collect();
    let session = up.with(&workspace).await;
    for (victim, reasons) in &victims {
        let writing = Writing::begin(&up, &session).await;
        let before = writing.acknowledged().await.unwrap_or(0);
        match victim.map(|victim| up.instance.pids(victim)).as_deref() {
            Some([pid]) => kill(*pid),
            Some(pids) => panic!("{victim:?}: {pids:?}"),
            None => {
                let command = CreateCommand {
                    command: Some(KILL_AGENT.into()),
                    wait_seconds: Some(0),
                    ..CreateCommand::default()
                };
                // Whether it is answered before the guest is gone decides nothing.
                let _ = up.client.command_create(&session, &command).await;
            }
        }
        let ended = up.ended(&session).await;
        assert!(reasons.contains(&ended.reason), "{victim:?}: {ended:?}");
        up.instance.sandboxes_gone();
        // The Session itself goes on, in a fresh Sandbox with the same files.
        writing.nothing_lost(victim.unwrap_or("the guest's agent"), before).await;
    }
    // Without whom it goes on: the daemon, and its privileged half.
    let writing = Writing::begin(&up, &session).await;
    for victim in ["pepod", "pepo-host"] {
        let before = writing.acknowledged().await.unwrap_or(0);
        let pids = up.instance.pids(victim);
        let [pid] = pids[..] else { panic!("{victim}: {pids:?}") };
        kill_daemon(&up.instance, &up.client, pid).await;
        let after = writing.beyond(before).await;
        println!("{victim}: {before} acknowledged before, {after} after");
    }
    let before = writing.acknowledged().await.unwrap_or(0);
    up.ok(&session, "pkill -f '[w]riter.py'").await;
    writing.nothing_lost("the daemon", before).await;
    up.client.session_terminate(&session).await.expect("terminate");
    up.end().await;
}

/// A Workspace with so many files is known whole to a guest whose server may open `descriptors` files.
pub async fn many_files(count: usize, descriptors: u64) {
    let instance = Instance::new();
    let limited = instance.program("pepo").args(["up"]).descriptors(descriptors);
    let daemon = limited.within(Duration::from_secs(3600)).open_stdin().start();
    daemon.says("http://127.0.0.1:", Duration::from_secs(60));
    let up = Up::of(instance, daemon);
    let workspace = up.workspace(CreateWorkspace { name: Some("many".into()), ..Default::default() }).await;
    let began = Instant::now();
    up.client.workspace_import("many", body_from(files(count))).await.expect("import");
    println!("{count} files imported in {:?}", began.elapsed());
    let session = up.with(&workspace).await;
    let began = Instant::now();
    let listed = up.ok(&session, "find . -type f -size +0 | wc -l").await;
    println!("{} files listed in {:?}", listed.trim(), began.elapsed());
    assert_eq!(listed.trim(), count.to_string());
    let [server] = up.instance.pids("pepo-share")[..] else { panic!("one server") };
    let open = std::fs::read_dir(format!("/proc/{server}/fd")).expect("descriptors").count();
    assert!(open as u64 <= descriptors, "{open} descriptors are open");
    println!("{open} descriptors, {} KiB resident", resident(server) >> 10);
    // Any of them is found again, in any order, and is the one that was meant.
    let line = format!(
        "import random\nrandom.seed(7)\nfor n in random.sample(range({count}), min({count}, 2000)):\n\
         \x20   assert open(f'd{{n % 100}}/f{{n}}').read() == f'{{n}}\\n', n\nprint('same')"
    );
    up.put(&session, "scattered.py", &line).await;
    assert_eq!(up.ok(&session, "python3 /tmp/scattered.py").await, "same\n");
    up.client.session_terminate(&session).await.expect("terminate");
    up.end().await;
}

/// Bytes of memory that a process has.
fn resident(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("resident");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("KiB") << 10
}

/// What a server has in memory when nothing is known, and when its guest has looked at so many files.
pub async fn server_memory(count: usize) -> (u64, u64) {
    let up = Up::start();
    let workspace = up.workspace(CreateWorkspace { name: Some("many".into()), ..Default::default() }).await;
    let session = up.with(&workspace).await;
    up.ok(&session, "true").await;
    let [server] = up.instance.pids("pepo-share")[..] else { panic!("one server") };
    let idle = resident(server);
    up.client.workspace_import("many", body_from(files(count))).await.expect("import");
    assert_eq!(up.ok(&session, "find . -type f -size +0 | wc -l").await.trim(), count.to_string());
    let full = resident(server);
    up.client.session_terminate(&session).await.expect("terminate");
    up.end().await;
    (idle, full)
}

/// An archive of so many small files in a hundred directories.
pub fn files(count: usize) -> Vec<u8> {
    let mut tar = Vec::with_capacity(count * 1024 + 1024);
    for n in 0..count {
        let body = format!("{n}\n");
        let mut header = [0_u8; 512];
        let name = format!("d{}/f{n}", n % 100);
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..107].copy_from_slice(b"0000644");
        for field in [108, 116] {
            header[field..field + 7].copy_from_slice(b"0001750");
        }
        header[124..135].copy_from_slice(format!("{:011o}", body.len()).as_bytes());
        header[136..147].copy_from_slice(b"00000000000");
        header[156] = b'0';
        header[257..265].copy_from_slice(b"ustar  \0");
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        tar.extend_from_slice(&header);
        tar.extend_from_slice(body.as_bytes());
        tar.resize(tar.len().next_multiple_of(512), 0);
    }
    tar.resize(tar.len() + 1024, 0);
    tar
}

/// In the guest: writes or reads `real`, each of whose MiB has its number in it and bytes that no two runs have alike.
const LARGE: &str = "import os, sys\n\
    if sys.argv[1] == 'write': open('/tmp/mib', 'wb').write(os.urandom((1 << 20) - 8))\n\
    rest = open('/tmp/mib', 'rb').read()\n\
    with open('real', 'wb' if sys.argv[1] == 'write' else 'rb', buffering=0) as f:\n\
    \x20   for n in range(int(sys.argv[2])):\n\
    \x20       mib = n.to_bytes(8, 'little') + rest\n\
    \x20       if sys.argv[1] == 'write': assert f.write(mib) == len(mib)\n\
    \x20       else: assert f.read(len(mib)) == mib, n\n";

/// A file of so many MiB, real to the last byte, and one as long that is a hole.
pub async fn large_file(mib: u64) {
    let up = Up::start();
    let size = Some(mib + 512);
    let workspace = up.workspace(CreateWorkspace { size_mib: size, ..Default::default() }).await;
    let session = up.with(&workspace).await;
    up.put(&session, "large.py", LARGE).await;
    let line = format!(
        "set -e; python3 /tmp/large.py write {mib}; truncate -s {mib}M hole; echo end >> hole; sync; \
         echo 3 | sudo tee /proc/sys/vm/drop_caches >/dev/null; python3 /tmp/large.py read {mib}; tail -c 4 hole; \
         [ $(stat -c %b hole) -lt 64 ]; stat -c %s real hole"
    );
    let began = Instant::now();
    let said = up.ok_within(&session, &line, Duration::from_secs(3600)).await;
    println!("{mib} MiB written and read in {:?}", began.elapsed());
    assert_eq!(said, format!("end\n{}\n{}\n", mib << 20, (mib << 20) + 4));
    up.client.session_terminate(&session).await.expect("terminate");
    up.end().await;
}

/// Whether this host lets its root resize an ext4 that is mounted (`CAP_SYS_RESOURCE`, 24).
pub fn may_resize_mounted() -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).expect("a line");
    u64::from_str_radix(line.trim(), 16).expect("a number") & 1 << 24 != 0
}
