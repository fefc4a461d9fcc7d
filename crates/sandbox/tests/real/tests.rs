//! The tests: what each life is used for, and what is looked at from outside.

use std::ffi::CString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use pepo_sandbox::Active;
use pepo_sandbox::guest::Output;
use pepo_sandbox::proto::{Exec, OpId};

use crate::host_is_clean::{assert_clean, traces};
use crate::lives::state_directory;

pub const ALL: &[(&str, fn())] = &[
    ("a_sandbox_boots_serves_and_is_gone", serves),
    ("a_panic_is_told", || endings("panic", "guest_panic")),
    ("the_death_of_the_agent_is_told", || endings("init", "guest_init_died")),
    ("a_guest_that_switches_itself_off_is_told", || endings("poweroff", "guest_off")),
    ("a_killed_vmm_is_told", || endings("vmm", "vmm_exit")),
    ("a_killed_vsock_device_is_told", || endings("device", "vmm_exit")),
    ("a_killed_keeper_is_told", || endings("keeper", "killed_outside")),
    ("memory_over_the_cap_is_told", || endings("memory", "out_of_memory")),
    ("whoever_hangs_up_hurts_nobody_else", || life_of_its_own("hang-up", &[])),
    ("a_sandbox_outlives_its_pepod_and_is_adopted", adopted),
    ("what_a_dead_pepod_left_is_swept", swept),
    ("the_cgroups_of_this_host_cap_count_kill_and_go", cgroups),
    ("a_host_side_killed_at_any_moment_leaves_what_can_be_swept", killed_anywhere),
    ("a_boot_can_be_cancelled_at_any_moment", cancelled),
    ("what_pepod_may_not_ask_is_refused", refused),
    ("every_process_is_jailed", jailed),
    ("four_at_once", || life_of_its_own("many", &["4"])),
    ("twenty_cycles_leave_nothing", cycles),
];

/// A test of this program.
pub struct Test {
    pub name: &'static str,
    pub run: fn(),
    /// Whether this host has what it needs.
    pub can_run: bool,
}

/// Guests under Firecracker, by the very tests of those under QEMU.
const UNDER_FIRECRACKER: &[(&str, fn())] = &[
    ("under_firecracker_a_sandbox_boots_serves_and_is_gone", || under_firecracker(serves)),
    ("under_firecracker_a_panic_is_told", || under_firecracker(|| endings("panic", "guest_panic"))),
    ("under_firecracker_the_death_of_the_agent_is_told", || under_firecracker(|| endings("init", "guest_init_died"))),
    ("under_firecracker_a_killed_keeper_is_told", || under_firecracker(|| endings("keeper", "killed_outside"))),
    ("under_firecracker_memory_over_the_cap_is_told", || under_firecracker(|| endings("memory", "out_of_memory"))),
    ("under_firecracker_a_boot_can_be_cancelled_at_any_moment", || under_firecracker(cancelled)),
    ("under_firecracker_four_at_once", || under_firecracker(|| life_of_its_own("many", &["4"]))),
    ("under_firecracker_twenty_cycles_leave_nothing", || under_firecracker(cycles)),
];

static FIRECRACKER: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

fn under_firecracker(test: fn()) {
    FIRECRACKER.store(true, std::sync::atomic::Ordering::Relaxed);
    test();
    FIRECRACKER.store(false, std::sync::atomic::Ordering::Relaxed);
}

/// Every test, and whether it can run here.
pub fn all() -> Vec<Test> {
    use crate::official;
    let installed = official::directory().is_some();
    let of = |list: &'static [(&'static str, fn())], can_run| {
        list.iter().map(move |(name, run)| Test { name, run: *run, can_run })
    };
    let guests = official::guests_run();
    of(ALL, true)
        .chain(of(official::INSTALLED, installed))
        .chain(of(UNDER_FIRECRACKER, guests))
        .chain(of(official::FIGURES, false))
        .collect()
}

/// What a program says, both channels together.
pub async fn output(active: &Active, argv: &[&str]) -> String {
    let mut exec = active.guest().exec(op(), exec(argv)).await.expect("exec");
    let mut said = Vec::new();
    while let Some(item) = exec.next().await {
        match item.expect("output") {
            Output::Data { bytes, .. } => said.extend_from_slice(&bytes),
            Output::End(process) => assert_eq!(process.code, Some(0), "{process:?} {}", String::from_utf8_lossy(&said)),
            _ => {}
        }
    }
    String::from_utf8(said).expect("text")
}

/// Starts a line of shell as root and waits until it prints something.
pub async fn begin_and_hear(active: &Active, line: &str) {
    let exec = Exec { user: Some("root".into()), detached: true, ..exec(&["/bin/sh", "-c", line]) };
    let mut running = active.guest().exec(op(), exec).await.expect("exec");
    while let Some(item) = running.next().await {
        if matches!(item.expect("output"), Output::Data { .. }) {
            return;
        }
    }
    panic!("{line}: ended without a word");
}

/// Starts a line of shell as root and does not wait for it.
pub async fn begin(active: &Active, line: &str) {
    let exec = Exec { user: Some("root".into()), detached: true, ..exec(&["/bin/sh", "-c", line]) };
    // It runs when the guest says so; a guest that dies of it may not get to say it.
    if let Ok(mut running) = active.guest().exec(op(), exec).await {
        let _ = tokio::time::timeout(Duration::from_secs(20), running.next()).await;
    }
}

fn op() -> OpId {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    bytes[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    OpId(bytes)
}

fn exec(argv: &[&str]) -> Exec {
    Exec { cwd: Some("/".into()), user: Some("root".into()), ..Exec::new(argv.iter().copied()) }
}

/// A state directory that is gone afterwards.
pub struct State(tempfile::TempDir);

impl State {
    pub fn new() -> Self {
        let state = State(tempfile::tempdir().unwrap());
        state_directory(state.path());
        state
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn life(&self, name: &str, args: &[&str]) -> Life {
        let mut child = Command::new("/proc/self/exe")
            .arg("life")
            .arg(name)
            .arg(self.path())
            .args(args)
            .envs(
                FIRECRACKER
                    .load(std::sync::atomic::Ordering::Relaxed)
                    .then_some((crate::lives::UNDER_FIRECRACKER, "1")),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Life { child, out }
    }
}

impl Drop for State {
    /// A test that failed in the middle leaves nothing either.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = pepo_sandbox::sweep::sweep_stale();
        }
    }
}

pub struct Life {
    pub child: Child,
    out: BufReader<ChildStdout>,
}

impl Drop for Life {
    /// One that a failed test left alive ends; both its sides do.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut rest = String::new();
        while self.out.read_line(&mut rest).is_ok_and(|read| read > 0) {}
    }
}

impl Life {
    /// Reads lines up to one that begins so; what follows it there.
    pub fn line(&mut self, begin: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.out.read_line(&mut line).unwrap() > 0, "the life ended without {begin:?}");
            print!("  {line}");
            if let Some(rest) = line.strip_prefix(begin) {
                return rest.trim().to_owned();
            }
        }
    }

    pub fn ends_well(mut self) {
        let mut line = String::new();
        while self.out.read_line(&mut line).unwrap() > 0 {
            print!("  {line}");
            line.clear();
        }
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the life ended with {status}");
    }
}

fn life_of_its_own(name: &str, args: &[&str]) {
    let state = State::new();
    state.life(name, args).ends_well();
    assert_clean(state.path());
}

fn serves() {
    life_of_its_own("serve", &[]);
}

/// Neither side's descriptors or threads grow, and after each cycle nothing of it is on the host.
fn cycles() {
    let state = State::new();
    let mut life = state.life("cycles", &["20"]);
    let host = life.child.id();
    let count = |what: &str| {
        // Between two cycles pepod is the privileged side's only child.
        let pepod = fs::read_to_string(format!("/proc/{host}/task/{host}/children")).unwrap();
        [&host.to_string(), pepod.trim()].map(|pid| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count())
    };
    let mut first = None;
    for n in 0..20 {
        life.line(&format!("cycle {n}"));
        assert_clean(state.path());
        let now = (count("fd"), count("task"));
        println!("  descriptors and threads of both sides: {now:?}");
        // The first cycle opens what stays open.
        assert_eq!(first.get_or_insert(now).0, now.0, "descriptors grow");
        assert!(now.1.iter().zip(first.unwrap().1).all(|(now, first)| *now <= first + 2), "threads grow");
        std::io::Write::write_all(life.child.stdin.as_mut().unwrap(), b"\n").unwrap();
    }
    life.ends_well();
    assert_clean(state.path());
}

fn cancelled() {
    life_of_its_own("cancel", &[]);
}

fn endings(how: &str, cause: &str) {
    let state = State::new();
    let mut life = state.life("endings", &[how]);
    let hex = life.line("victim ");
    let killed = Instant::now();
    match how {
        "vmm" => kill(&process_of(&hex, |name, _| name.starts_with("qemu"))),
        "device" => kill(&process_of(&hex, |name, _| name.starts_with("vhost-device"))),
        "memory" => {
            // The cap is far above what a guest can use; here it is brought down to what this one uses already.
            let (usage, limit) = memory_files(&hex);
            let used: u64 = fs::read_to_string(usage).unwrap().trim().parse().unwrap();
            fs::write(limit, (used + (4 << 20)).to_string()).unwrap();
            std::io::Write::write_all(life.child.stdin.as_mut().unwrap(), b"\n").unwrap();
        }
        "keeper" => kill(&process_of(&hex, |name, _| name == "pepo-keeper")),
        _ => {}
    }
    let noticed = life.line(&format!("{how}: noticed after "));
    // The guest's own kernel has to die first; a process of the host's is dead at once.
    if matches!(how, "vmm" | "device" | "keeper") {
        assert!(killed.elapsed() < Duration::from_secs(4), "{noticed}");
    }
    assert_eq!(life.line("cause "), cause);
    life.ends_well();
    assert_clean(state.path());
}

/// The files of a Sandbox's cgroup that say what memory it uses and may use.
fn memory_files(hex: &str) -> (std::path::PathBuf, std::path::PathBuf) {
    let cgroup =
        fs::read_to_string(format!("/proc/{}/cgroup", process_of(hex, |name, _| name == "pepo-keeper"))).unwrap();
    let path = |controller: &str| {
        cgroup.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            (parts.next()? == controller).then(|| parts.next().unwrap().trim_start_matches('/').to_owned())
        })
    };
    match path("memory") {
        Some(path) => {
            let leaf = Path::new("/sys/fs/cgroup/memory").join(path);
            (leaf.join("memory.usage_in_bytes"), leaf.join("memory.limit_in_bytes"))
        }
        None => {
            let leaf = Path::new("/sys/fs/cgroup").join(path("").unwrap());
            (leaf.join("memory.current"), leaf.join("memory.max"))
        }
    }
}

/// Process ids in the Sandbox's cgroup whose name fits.
pub fn process_of(hex: &str, fits: impl Fn(&str, u32) -> bool) -> String {
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        let Ok(cgroup) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else { continue };
        let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim().to_owned();
        let uid = field("Uid:").split_whitespace().next().unwrap_or("0").parse().unwrap_or(0);
        if cgroup.contains(hex) && fits(&field("Name:"), uid) {
            return pid;
        }
    }
    panic!("no such process of {hex}");
}

pub fn kill(pid: &str) {
    let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

fn adopted() {
    let state = State::new();
    for victim in ["host", "pepod", "both"] {
        let mut first = state.life("leave", &[]);
        let hex = first.line("ready ");
        let host = first.child.id().to_string();
        if victim == "host" {
            kill(&host);
        } else if victim == "both" {
            // What a service manager sends reaches pepod through the privileged side.
            let pid = rustix::process::Pid::from_raw(host.parse().unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        } else {
            let children = fs::read_to_string(format!("/proc/{host}/task/{host}/children")).unwrap();
            let pepod = children
                .split_whitespace()
                .find(|pid| !fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default().contains(&hex));
            kill(pepod.unwrap());
        }
        let status = first.child.wait().unwrap();
        assert!(victim != "both" || status.code() == Some(143), "{status}");
        let left = traces(state.path());
        assert!(left.iter().any(|trace| trace.contains("qemu")), "the VMM went with {victim}: {left:?}");
        state.life("adopt", &[]).ends_well();
        assert_clean(state.path());
    }
}

fn swept() {
    let state = State::new();
    let mut first = state.life("leave", &[]);
    first.line("ready ");
    kill(&first.child.id().to_string());
    first.child.wait().unwrap();
    state.life("sweep", &[]).ends_well();
    assert_clean(state.path());
    // The same, by somebody else who finds that nobody runs the instance.
    let mut second = state.life("leave", &[]);
    second.line("ready ");
    kill(&second.child.id().to_string());
    second.child.wait().unwrap();
    let owned =
        |left: &pepo_sandbox::host::Leftover| left.owner.as_deref() == fs::canonicalize(state.path()).ok().as_deref();
    let wait = Instant::now() + Duration::from_secs(30);
    let seen = loop {
        let seen: Vec<_> = pepo_sandbox::sweep::look().unwrap().into_iter().filter(owned).collect();
        if !seen.is_empty() || Instant::now() > wait {
            break seen;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(seen.iter().any(|one| one.kind == "process" && one.removed.is_none()), "{seen:?}");
    let gone: Vec<_> = pepo_sandbox::sweep::sweep_stale().unwrap().into_iter().filter(owned).collect();
    assert!(!gone.is_empty() && gone.iter().all(|one| one.removed == Some(Ok(()))), "{gone:?}");
    assert_clean(state.path());
}

/// The real hierarchies: a program that forks without end is capped, counted, killed whole, and its cgroup removed.
fn cgroups() {
    use pepo_sandbox::cgroup::{Hierarchies, Limits};
    let all = Hierarchies::detect().unwrap();
    all.ready().unwrap();
    println!("  {}, swap capped: {}", all.describe(), all.swap_is_capped());
    let name = format!("pepo-test-{}", std::process::id());
    let leaf = all.leaf(&name);
    leaf.create(&Limits { memory_bytes: 64 << 20, cpu_us: 50_000, pids: 20, weight_cpus: 1 }).unwrap();
    assert!(leaf.exists() && leaf.processes().is_empty());
    // It waits for a line before it begins, so that it begins inside or, where this test fails first, not at all.
    let line = ["sh", "-c", "read go && while :; do /bin/sleep 1000 & done"].map(|word| CString::new(word).unwrap());
    let (mut go, theirs) = UnixStream::pair().unwrap();
    let (theirs, nowhere) = (theirs.into(), fs::File::create("/dev/null").unwrap().into());
    let birthplace = leaf.birthplace().unwrap();
    let (bomb, pidfd) =
        pepo_sandbox::sys::spawn(c"/bin/sh", &line, [&theirs, &nowhere, &nowhere], birthplace.as_ref()).unwrap();
    let born = fs::read_to_string(format!("/proc/{bomb}/cgroup")).unwrap();
    let unified = born.lines().find_map(|line| line.strip_prefix("0::"));
    assert_eq!(unified.is_some_and(|path| path.ends_with(&name)), birthplace.is_some(), "{born}");
    leaf.put(bomb).unwrap();
    assert!(leaf.holds(bomb) && !leaf.holds(std::process::id()));
    std::io::Write::write_all(&mut go, b"go\n").unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while leaf.usage().unwrap().pids < 20 {
        assert!(Instant::now() < deadline, "{:?}", leaf.usage());
        std::thread::yield_now();
    }
    let usage = leaf.usage().unwrap();
    assert!(usage.pids == 20 && usage.cpu_ns > 0 && usage.memory_bytes > 0, "{usage:?}");
    assert_eq!(usage.memory_limit_bytes, 64 << 20);
    leaf.kill(Duration::from_secs(20)).unwrap();
    assert!(leaf.processes().is_empty());
    let (bomb, exited) = (rustix::process::WaitId::PidFd(pidfd.as_fd()), rustix::process::WaitIdOptions::EXITED);
    rustix::process::waitid(bomb, exited).unwrap();
    leaf.remove(Duration::from_secs(20)).unwrap();
    assert!(!leaf.exists());
    leaf.kill(Duration::ZERO).unwrap();
    leaf.remove(Duration::ZERO).unwrap();
}

/// The privileged side dies somewhere in a boot; the next life finds whatever there is, and gives it back.
fn killed_anywhere() {
    let state = State::new();
    for milliseconds in [20, 40, 60, 90, 130, 180, 250, 350, 500, 800, 1400] {
        let mut first = state.life("leave", &[]);
        // When it dies is the point: no level to wait for.
        std::thread::sleep(Duration::from_millis(milliseconds));
        kill(&first.child.id().to_string());
        first.child.wait().unwrap();
        state.life("tidy", &[]).ends_well();
        assert_clean(state.path());
    }
}

fn refused() {
    let state = State::new();
    std::os::unix::fs::symlink("/etc/passwd", state.path().join("link")).unwrap();
    for (name, owner, mode) in [("foreign", 1000, 0o644), ("open", 0, 0o646)] {
        let path = state.path().join(name);
        fs::write(&path, "x").unwrap();
        std::os::unix::fs::chown(&path, Some(owner), None).unwrap();
        rustix::fs::chmod(&path, rustix::fs::Mode::from_raw_mode(mode)).unwrap();
    }
    state.life("refuse", &[]).ends_well();
    assert_clean(state.path());
}

/// Every process of a running Sandbox and the two sides of pepod, by the kernel's account of each.
fn jailed() {
    let state = State::new();
    let mut life = state.life("leave", &[]);
    let hex = life.line("ready ");
    let status = |pid: &str| fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |pid: &str, name: &str| {
        let status = status(pid);
        status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim().to_owned()
    };
    let ours = |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
    let keeper = process_of(&hex, |name, _| name == "pepo-keeper");
    let vmm = process_of(&hex, |name, _| name.starts_with("qemu"));
    let device = process_of(&hex, |name, _| name.starts_with("vhost-device"));
    let mut uids = Vec::new();
    for (name, pid) in [("keeper", &keeper), ("vmm", &vmm), ("device", &device)] {
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(pid, set), "0000000000000000", "{name} has {set}");
        }
        assert_eq!(field(pid, "NoNewPrivs:"), "1", "{name}");
        assert_eq!(field(pid, "Groups:"), "", "{name}");
        assert_eq!(field(pid, "Seccomp:"), "2", "{name}");
        let uid = field(pid, "Uid:");
        let uid: u32 = uid.split_whitespace().next().unwrap().parse().unwrap();
        assert!((0x7000_0000..=0x7FFD_FFFF).contains(&uid), "{name} is uid {uid}");
        assert!(!uids.contains(&uid), "{name} shares a uid");
        uids.push(uid);
        for kind in ["pid", "mnt", "net", "ipc", "uts"] {
            let theirs = fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
            assert_ne!(theirs, ours(kind), "{name} is in the host's {kind} namespace");
        }
        // It sees nothing of the host below its root.
        for path in ["etc", "home", "proc/1", "tmp", "dev/null"] {
            assert!(!Path::new(&format!("/proc/{pid}/root/{path}")).exists(), "{name} sees /{path}");
        }
        for line in fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap().lines() {
            let controller = line.split(':').nth(1).unwrap();
            if ["cpu", "cpuacct", "memory", "pids", "freezer", ""].contains(&controller) {
                assert!(line.contains(&hex), "{name} is not in its cgroup: {line}");
            }
        }
    }
    // Nothing is bound where a guest that dials out could reach it.
    let sockets: Vec<_> = fs::read_dir(state.path().join("jail").join(&hex).join("vsock"))
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(sockets.iter().all(|name| name == "stream.sock" || name == "device.sock"), "{sockets:?}");
    let network = fs::read_to_string(format!("/proc/{vmm}/net/dev")).unwrap();
    assert_eq!(network.lines().count(), 3, "more than the loopback: {network}");

    let host = life.child.id().to_string();
    // CHOWN 0, DAC_OVERRIDE 1, FOWNER 3, KILL 5, SETGID 6, SETUID 7, SETPCAP 8, NET_BIND_SERVICE 10, NET_ADMIN 12,
    // SYS_CHROOT 18, SYS_PTRACE 19, SYS_ADMIN 21, SYS_RESOURCE 24, MKNOD 27.
    let listed: u64 = [0, 1, 3, 5, 6, 7, 8, 10, 12, 18, 19, 21, 24, 27].into_iter().map(|bit| 1u64 << bit).sum();
    // A host may not give all: the one that this test runs on may lack the one to grow what is used.
    let given = u64::from_str_radix(&field("self", "CapPrm:"), 16).unwrap();
    let listed = listed & (given | !(1 << 24));
    for set in ["CapPrm:", "CapEff:", "CapBnd:"] {
        assert_eq!(field(&host, set), format!("{listed:016x}"), "pepo-host has another {set}");
    }
    assert_eq!(field(&host, "Name:"), "pepo-host");
    let children = fs::read_to_string(format!("/proc/{host}/task/{host}/children")).unwrap();
    let pepod = children.split_whitespace().find(|pid| **pid != *keeper).unwrap();
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(field(pepod, set), "0000000000000000", "pepod has {set}");
    }
    assert_eq!(field(pepod, "NoNewPrivs:"), "1");

    // A signal for pepod goes through the privileged side, and its end is the end of both.
    kill(pepod);
    assert_eq!(life.child.wait().unwrap().code(), Some(137));
    state.life("sweep", &[]).ends_well();
    assert_clean(state.path());
}
