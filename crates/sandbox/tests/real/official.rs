//! Firecracker under its own jailer, as far as a host can be asked without running the guest: jail, API, configuration,
//! the start accepted, the stream socket, the end, what is left. These need the two programs (`PEPO_FIRECRACKER` names
//! their directory, else where `pepo setup` puts them); those that need a guest to run need hardware virtualization too.
//! Where that is missing they are listed as ignored, so that every run counts them as not run.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use pepo_sandbox::boot::Prepared;
use pepo_sandbox::host::{FoundState, Host};
use pepo_sandbox::vmm::probe::{Hardware, hardware};
use pepo_sandbox::{Plan, Vmm};
use tokio_util::sync::CancellationToken;

use crate::host_is_clean::assert_clean;
use crate::tests::{State, kill, process_of};

/// Those that need the programs.
pub const INSTALLED: &[(&str, fn())] = &[
    ("firecracker_starts_in_its_jail_and_is_gone", stands),
    ("firecracker_that_is_killed_is_told", killed),
    ("firecracker_is_told_what_is_wrong_by_its_api", wrong),
    ("firecracker_starts_and_stops_without_a_leak", cycles),
    ("firecracker_left_by_a_killed_host_is_swept", swept),
];

/// Figures, which are asked for by name alone: they take a release build and a quiet machine (`make bench`).
pub const FIGURES: &[(&str, fn())] = &[("figures_of_firecracker_against_by_hand", against_by_hand)];

/// Where the programs are.
pub fn directory() -> Option<PathBuf> {
    let named = std::env::var_os("PEPO_FIRECRACKER").map(PathBuf::from);
    let usual = || {
        let installed = fs::read_dir("/var/lib/pepo/firecracker").ok()?;
        installed.flatten().map(|entry| entry.path()).find(|path| path.join("firecracker").exists())
    };
    named.or_else(usual).filter(|path| path.join("jailer").exists())
}

/// Whether a guest can run under it here.
pub fn guests_run() -> bool {
    directory().is_some() && hardware() == Hardware::Usable
}

fn plan(host: &Host) -> Plan {
    Plan { vmm: Vmm::Firecracker, ..crate::lives::plan(host.new_id().unwrap()) }
}

/// Starts one, says so, and stays until it is told to go on.
pub async fn stand(host: &Host) {
    let cancel = CancellationToken::new();
    let begun = Instant::now();
    let prepared = Prepared::new(host, plan(host), &cancel).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
    let took = begun.elapsed();
    let booted = prepared.start(&cancel).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
    println!("prepared in {took:?}, started {:?} after", begun.elapsed() - took);
    let found = host.found().await.unwrap();
    assert!(found.len() == 1 && found[0].state == FoundState::Running, "{found:?}");
    let id = found[0].id;
    // The device's socket is the VMM's own and answers, whether a guest listens behind it or not.
    host.connect(id).await.expect("the stream socket");
    let usage = host.usage(id).await.unwrap();
    assert!(usage.memory_bytes > 4 << 20 && usage.pids >= 3, "{usage:?}");
    println!("ready {}", id.hex());
    assert!(std::io::stdin().read_line(&mut String::new()).unwrap() > 0, "the test is gone");
    let begun = Instant::now();
    booted.release().await.expect("release");
    println!("released in {:?}", begun.elapsed());
    assert_eq!(host.found().await.unwrap(), []);
}

/// Starts one and waits for its end.
pub async fn fall(host: &Host) {
    let cancel = CancellationToken::new();
    let prepared = Prepared::new(host, plan(host), &cancel).await.unwrap();
    let booted = prepared.start(&cancel).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
    println!("ready {}", host.found().await.unwrap()[0].id.hex());
    let error = booted.hello(&cancel).await.expect_err("a killed VMM answered");
    println!("told {}", chain(&error));
    assert_eq!(host.found().await.unwrap(), []);
}

/// What its API refuses reaches the caller with its words, and leaves nothing.
pub async fn refuse(host: &Host) {
    let cancel = CancellationToken::new();
    // Not an ELF file: a start that is refused after everything was configured.
    let root = pepo_sandbox::StatePath::new("boot/rootfs.erofs").unwrap();
    let begun = Prepared::new(host, Plan { kernel: root, ..plan(host) }, &cancel).await.unwrap();
    let error = begun.start(&cancel).await.expect_err("a kernel that is none");
    println!("told {}", chain(&error));
    assert!(chain(&error).to_lowercase().contains("elf"), "{}", chain(&error));
    // More processors than it takes: refused before anything is taken.
    let error = Prepared::new(host, Plan { cpus: 33, ..plan(host) }, &cancel).await.expect_err("33 processors");
    assert!(chain(&error).contains("cpus is 33"), "{}", chain(&error));
    assert_eq!(host.found().await.unwrap(), []);
}

/// Starts and stops again and again, and says how long each took.
pub async fn turn(host: &Host, count: usize) {
    for n in 0..count {
        let cancel = CancellationToken::new();
        let begun = Instant::now();
        let prepared = Prepared::new(host, plan(host), &cancel).await.unwrap();
        let booted = prepared.start(&cancel).await.unwrap_or_else(|error| panic!("{n}: {}", chain(&error)));
        let started = begun.elapsed();
        let begun = Instant::now();
        booted.release().await.expect("release");
        println!("cycle {n} start {} us stop {} us", started.as_micros(), begun.elapsed().as_micros());
        assert!(std::io::stdin().read_line(&mut String::new()).unwrap() > 0, "the test is gone");
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    pepo_sandbox::chain(error)
}

/// Everything that the kernel says of a Firecracker that runs.
fn stands() {
    let state = State::new();
    let mut life = state.life("official", &[]);
    let hex = life.line("ready ");
    let vmm = process_of(&hex, |name, _| name == "firecracker");
    let keeper = process_of(&hex, |name, _| name == "pepo-keeper");
    let status = |path: &str| fs::read_to_string(path).unwrap();
    let field =
        |text: &str, name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim().to_owned();
    let mut filters = Vec::new();
    for task in fs::read_dir(format!("/proc/{vmm}/task")).unwrap().flatten() {
        let text = status(&task.path().join("status").display().to_string());
        let name = field(&text, "Name:");
        for set in ["CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(&text, set), "0000000000000000", "{set} of {name}");
        }
        assert_eq!(field(&text, "NoNewPrivs:"), "1", "{name}");
        assert_eq!(field(&text, "Seccomp:"), "2", "{name}");
        assert_eq!(field(&text, "Groups:"), "", "{name}");
        filters.push((name, field(&text, "Seccomp_filters:").parse::<u32>().unwrap()));
    }
    println!("  system call filters of each thread: {filters:?}");
    // Ours, and the one of the release that it loads itself: one alone proves nothing of the other.
    assert!(filters.len() >= 3 && filters.iter().all(|(_, count)| *count >= 2), "{filters:?}");
    let uids = field(&status(&format!("/proc/{vmm}/status")), "Uid:");
    let uid: u32 = uids.split_whitespace().next().unwrap().parse().unwrap();
    assert!(uid >= 0x7000_0000 && uids.split_whitespace().all(|one| one == uid.to_string()), "{uids}");
    for kind in ["mnt", "net", "pid", "ipc", "uts"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_ne!(of(&vmm), of("self"), "{kind}");
        assert!(kind == "mnt" || of(&vmm) == of(&keeper), "{kind} is not the keeper's");
    }
    let mut root: Vec<_> = fs::read_dir(format!("/proc/{vmm}/root"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    root.sort();
    let known = ["dev", "firecracker", "firecracker.pid", "initrd", "kernel", "log", "run", "scratch", "system"];
    assert_eq!(root, known);
    let mounts = status(&format!("/proc/{vmm}/mountinfo"));
    println!("{mounts}");
    for (name, may) in [("kernel", "ro,"), ("initrd", "ro,"), ("system", "ro,"), ("scratch", "rw,")] {
        let line = mounts.lines().find(|line| line.split(' ').nth(4) == Some(&format!("/{name}"))).unwrap();
        let options = line.split(' ').nth(5).unwrap();
        assert!(options.starts_with(may) && options.contains("nosuid"), "{line}");
        assert!(options.contains("noexec") && options.contains("nodev"), "{line}");
    }
    // Each mount of the root is one of the above, or its own small file system: nothing of the host can be reached.
    assert_eq!(mounts.lines().count(), 5, "{mounts}");
    let limits = status(&format!("/proc/{vmm}/limits"));
    assert!(limits.lines().any(|line| line.starts_with("Max core file size        0 ")), "{limits}");
    assert!(limits.lines().any(|line| line.starts_with("Max open files            2048 ")), "{limits}");
    assert!(status(&format!("/proc/{vmm}/oom_score_adj")).trim() == "500");
    let words = status(&format!("/proc/{vmm}/cmdline")).replace('\0', " ");
    assert!(!words.contains("seccomp"), "{words}");
    // No file of the host's can grow by it: its output is a socket and a pipe, its input nothing.
    let fd = |n: u8| fs::read_link(format!("/proc/{vmm}/fd/{n}")).unwrap().display().to_string();
    // By its name on a file system that the jail has no way to any more.
    assert!(fd(0).ends_with("/null"), "{}", fd(0));
    assert!(fd(1).starts_with("socket:") && fd(2).starts_with("pipe:"), "{} {}", fd(1), fd(2));
    // The keeper's root has the way to the sockets, read-only, and nothing else.
    let seen: Vec<_> = fs::read_dir(format!("/proc/{keeper}/root")).unwrap().flatten().collect();
    assert!(seen.len() == 1 && seen[0].file_name() == "run", "{seen:?}");
    assert!(status(&format!("/proc/{keeper}/mountinfo")).lines().all(|line| line.contains(" ro,")));
    let cgroup = status(&format!("/proc/{vmm}/cgroup"));
    assert_eq!(cgroup, status(&format!("/proc/{keeper}/cgroup")), "the jailer moved it");
    std::io::Write::write_all(life.child.stdin.as_mut().unwrap(), b"\n").unwrap();
    life.ends_well();
    assert_clean(state.path());
}

fn killed() {
    let state = State::new();
    let mut life = state.life("official-falls", &[]);
    let hex = life.line("ready ");
    kill(&process_of(&hex, |name, _| name == "firecracker"));
    let told = life.line("told ");
    assert!(told.contains("signal 9") || told.contains("ended with code"), "{told}");
    life.ends_well();
    assert_clean(state.path());
}

fn wrong() {
    let state = State::new();
    state.life("official-refuses", &[]).ends_well();
    assert_clean(state.path());
}

/// `PEPO_CYCLES` of them, 20 unless it says otherwise.
fn cycles() {
    let count: usize = std::env::var("PEPO_CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let state = State::new();
    let mut life = state.life("official-turns", &[&count.to_string()]);
    let host = life.child.id();
    let descriptors = || {
        let pepod = fs::read_to_string(format!("/proc/{host}/task/{host}/children")).unwrap();
        [&host.to_string(), pepod.trim()].map(|pid| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count())
    };
    let (mut first, mut starts, mut stops) = (None, Vec::new(), Vec::new());
    for n in 0..count {
        let line = life.line(&format!("cycle {n} "));
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        starts.push(numbers[0]);
        stops.push(numbers[1]);
        assert_clean(state.path());
        let now = descriptors();
        assert_eq!(*first.get_or_insert(now), now, "descriptors grow at cycle {n}");
        std::io::Write::write_all(life.child.stdin.as_mut().unwrap(), b"\n").unwrap();
    }
    life.ends_well();
    assert_clean(state.path());
    let of = |name: &str, mut times: Vec<u64>| {
        times.sort_unstable();
        let at = |part: usize| times[(times.len() - 1) * part / 100] as f64 / 1000.0;
        println!("  {name} of {count}: p50 {:.1} ms, p99 {:.1} ms", at(50), at(99));
    };
    of("start", starts);
    of("stop", stops);
}

fn swept() {
    let state = State::new();
    let mut life = state.life("official", &[]);
    let hex = life.line("ready ");
    kill(&life.child.id().to_string());
    life.child.wait().unwrap();
    process_of(&hex, |name, _| name == "firecracker");
    state.life("sweep", &[]).ends_well();
    assert_clean(state.path());
}

/// The host's side of a start against jailer, Firecracker and the same calls by hand: no more than this many times as long.
const RATIO: f64 = 1.3;

/// Pairs of starts, one each in turn, so that both see the same machine. `PEPO_CYCLES` of them, 1,000 unless it says otherwise.
fn against_by_hand() {
    let count: usize = std::env::var("PEPO_CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(1000);
    let state = State::new();
    let mut life = state.life("official-turns", &[&count.to_string()]);
    let (mut ours, mut stops, mut hands) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..count {
        let line = life.line(&format!("cycle {n} "));
        let numbers: Vec<f64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        ours.push(numbers[0]);
        stops.push(numbers[1]);
        hands.push(by_hand(state.path(), n));
        std::io::Write::write_all(life.child.stdin.as_mut().unwrap(), b"\n").unwrap();
    }
    life.ends_well();
    assert_clean(state.path());
    let at = |times: &mut Vec<f64>, part: usize| {
        times.sort_by(f64::total_cmp);
        times[(times.len() - 1) * part / 100] / 1000.0
    };
    let (ours, hand) = (at(&mut ours, 50), at(&mut hands, 50));
    println!("figure start {ours:.1} ms, by hand {hand:.1} ms: {:.2} of at most {RATIO}", ours / hand);
    println!("figure teardown p50 {:.1} ms, p99 {:.1} ms, 0 left of {count}", at(&mut stops, 50), at(&mut stops, 99));
    assert!(ours / hand <= RATIO, "a start takes {:.2} times as long as by hand", ours / hand);
}

/// One start as somebody would do it with the programs alone, in microseconds: directory, links, a sparse disk with a file
/// system, a control group by the jailer, the socket, the calls, the guest's start accepted.
fn by_hand(state: &std::path::Path, n: usize) -> f64 {
    use pepo_sandbox::vmm::firecracker::{self, api::Api};
    let programs = directory().unwrap();
    let (base, id, uid) = (state.join("by-hand"), format!("hand-{n}"), 0x7ffd_0009);
    let begun = Instant::now();
    let root = firecracker::root(&base, &id);
    fs::create_dir_all(root.join("run")).unwrap();
    for (from, to) in [("vmlinux", "kernel"), ("initramfs", "initrd"), ("rootfs.erofs", "system")] {
        fs::hard_link(state.join("boot").join(from), root.join(to)).unwrap();
    }
    let disk = root.join("scratch");
    let template = fs::read_dir(state.join("jail/templates")).unwrap().next().unwrap().unwrap().path();
    let copied = std::process::Command::new("cp").arg("--sparse=always").arg(template).arg(&disk).status().unwrap();
    assert!(copied.success());
    std::os::unix::fs::chown(&disk, Some(uid), Some(uid)).unwrap();
    let mut child = std::process::Command::new(programs.join("jailer"))
        .args(["--id", &id, "--exec-file"])
        .arg(programs.join("firecracker"))
        .args(["--uid", &uid.to_string(), "--gid", &uid.to_string(), "--chroot-base-dir"])
        .arg(&base)
        .args(control_group())
        .args(["--", "--api-sock", "/run/api.sock", "--level", "Error"])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let stream = loop {
        // The host's path is too long for a socket's address: from within.
        let here = fs::File::open(root.join("run")).unwrap();
        let path = format!("/proc/self/fd/{}/api.sock", std::os::fd::AsRawFd::as_raw_fd(&here));
        match std::os::unix::net::UnixStream::connect(path) {
            Ok(stream) => break stream,
            Err(_) => assert!(child.try_wait().unwrap().is_none(), "the jailer ended"),
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    let mut api = Api::new(stream).unwrap();
    let boot = pepo_sandbox::vmm::Boot {
        vcpus: 1,
        memory_mib: 256,
        kernel: PathBuf::new(),
        initrd: PathBuf::new(),
        arguments: vec!["pepo.guest=1".into()],
        scratch_size: 256 << 20,
        throttle: None,
        uid,
        interface: None,
    };
    let within = std::time::Duration::from_secs(60);
    firecracker::configure(&mut api, &boot, within).unwrap();
    api.call(&firecracker::start(), within).unwrap();
    let took = begun.elapsed().as_micros() as f64;
    child.kill().unwrap();
    child.wait().unwrap();
    let groups = fs::read_to_string("/proc/mounts").unwrap();
    for line in groups.lines().filter(|line| line.contains(" cgroup")) {
        let group = PathBuf::from(line.split(' ').nth(1).unwrap()).join(firecracker::PROGRAM);
        let _ = fs::remove_dir(group.join(&id)).and_then(|()| fs::remove_dir(group));
    }
    fs::remove_dir_all(base.join(firecracker::PROGRAM).join(id)).unwrap();
    took
}

/// What makes the jailer cap what we cap. Without any of it, it makes no control group.
fn control_group() -> Vec<&'static str> {
    let v2 = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").is_ok_and(|all| all.contains("memory"));
    let (version, caps) = match v2 {
        true => ("2", ["cpu.max=150000 100000", "memory.max=536870912", "pids.max=64"]),
        false => ("1", ["cpu.cfs_quota_us=150000", "memory.limit_in_bytes=536870912", "pids.max=64"]),
    };
    ["--cgroup-version", version].into_iter().chain(caps.into_iter().flat_map(|cap| ["--cgroup", cap])).collect()
}
