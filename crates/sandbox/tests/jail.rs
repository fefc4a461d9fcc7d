//! What a process in a Sandbox's jail can really do: a probe program (`e2e/hostile/src/bin/probe.rs`) is put in the place
//! of QEMU and of the stream device, with the very specification they get, and tries everything.
//!
//! This program is its own launcher (`jail --fd N`), which is why it has no harness; it speaks the part of the harness'
//! command line that `cargo test` and nextest use. Its tests need root, and are listed as ignored without it.
#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use pepo_sandbox::jail::{self, Spec};
use pepo_sandbox::sys;
use pepo_sandbox::vmm::closure::{self, Closure, Programs, Sources};
use pepo_sandbox::vmm::{Boot, Descriptors, firecracker, qemu, vsock};
use rustix::process::{Signal, getuid};
use serde_json::Value;

type Test = fn(&House) -> Result<(), Box<dyn Error>>;

const TESTS: [(&str, Test); 7] = [
    (OFFICIAL, what_no_vmm_calls_is_refused_behind_an_official_jailer),
    ("every_forbidden_call_is_refused_to_the_vmm", every_forbidden_call_is_refused_to_the_vmm),
    ("every_forbidden_call_is_refused_to_the_stream_device", every_forbidden_call_is_refused_to_the_stream_device),
    ("the_root_holds_the_closure_and_nothing_else", the_root_holds_the_closure_and_nothing_else),
    ("the_kernel_says_from_outside_that_the_walls_stand", the_kernel_says_from_outside_that_the_walls_stand),
    ("what_is_written_and_opened_has_an_end", what_is_written_and_opened_has_an_end),
    ("the_attempts_reach_the_kernel_where_there_is_no_jail", the_attempts_reach_the_kernel_where_there_is_no_jail),
];

/// The one test that needs Firecracker's jailer (`PEPO_FIRECRACKER` names its directory): listed as ignored without it.
const OFFICIAL: &str = "what_no_vmm_calls_is_refused_behind_an_official_jailer";

fn official() -> Option<PathBuf> {
    std::env::var_os("PEPO_FIRECRACKER").map(PathBuf::from).filter(|path| path.join("jailer").exists())
}

/// Uids that nobody on a machine that runs tests has.
const VMM_UID: u32 = 0x7ffd_0001;
const VSOCK_UID: u32 = 0x7ffd_0002;

/// Attempts that end with an answer instead of death, because libraries try them and go on without.
const ABSENT: [&str; 3] = ["clone3", "io_uring_setup", "openat2"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, _, fd] = &arguments[..]
        && mode == "jail"
    {
        return enter(fd);
    }
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let root = getuid().is_root();
    if has("--list") {
        for (name, _) in TESTS {
            let can_run = root && (name != OFFICIAL || official().is_some());
            if can_run != has("--ignored") || !has("--ignored") && !has("--format") {
                println!("{name}: test");
            }
        }
        return ExitCode::SUCCESS;
    }
    let names: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with("--")).collect();
    let chosen = |test: &str| {
        names.is_empty() || names.iter().any(|name| if has("--exact") { test == *name } else { test.contains(*name) })
    };
    let mut failed = 0;
    for (name, test) in TESTS.iter().filter(|(name, _)| chosen(name)) {
        if *name == OFFICIAL && official().is_none() {
            println!("test {name} ... ignored, needs firecracker's jailer");
            continue;
        }
        let result = if root { House::build().and_then(|house| test(&house)) } else { Ok(()) };
        match result {
            Ok(()) if root => println!("test {name} ... ok"),
            Ok(()) => println!("test {name} ... ignored, needs root"),
            Err(error) => {
                println!("test {name} ... FAILED\n{error}");
                failed += 1;
            }
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(101) }
}

/// The launcher, as `pepod jail` is.
fn enter(fd: &str) -> ExitCode {
    let entered = fd.parse().ok().and_then(sys::inherited).ok_or("no specification".to_owned()).and_then(|fd| {
        let spec = jail::read_spec(fd).map_err(|error| error.to_string())?;
        jail::enter(&spec).map_err(|error| format!("{error}: {:?}", Error::source(&error).map(ToString::to_string)))
    });
    let Err(error) = entered;
    let _ = writeln!(std::io::stderr(), "{error}");
    ExitCode::from(jail::EXIT_NOT_JAILED)
}

/// A state directory with the closures of the real programs, and beside each one in which the probe has its place.
struct House {
    state: tempfile::TempDir,
    probe: PathBuf,
    programs: Programs,
    system: File,
    scratch: File,
}

impl House {
    fn build() -> Result<Self, Box<dyn Error>> {
        let probe = probe()?;
        let state = tempfile::Builder::new().prefix("pepo-jail-").tempdir_in("/var/tmp")?;
        // Where `make` stages the programs; else where they are installed.
        let staged = std::env::var_os("PEPO_E2E_BIN").map(|stage| Path::new(&stage).join("vhost-device-vsock"));
        let sources = Sources { vsock_device: staged, ..Sources::default() };
        let real = closure::prepare(state.path(), &sources)?;
        let with_probe = |closure: &Closure| -> Result<Closure, Box<dyn Error>> {
            let root = state.path().join(format!("probe-{}", &closure.digest));
            let copied = Command::new("cp").arg("-al").arg(&closure.root).arg(&root).status()?;
            let program = root.join(closure.program.strip_prefix("/")?);
            fs::remove_file(&program)?;
            fs::copy(&probe, &program)?;
            if !copied.success() {
                return Err("cp failed".into());
            }
            Ok(Closure { root, ..closure.clone() })
        };
        let programs = Programs { qemu: with_probe(&real.qemu)?, vsock_device: with_probe(&real.vsock_device)? };
        for name in ["kernel", "initrd", "system", "scratch"] {
            fs::write(state.path().join(name), name)?;
        }
        fs::DirBuilder::new().mode(0o700).create(state.path().join("run"))?;
        std::os::unix::fs::chown(state.path().join("run"), Some(VSOCK_UID), Some(VSOCK_UID))?;
        let system = File::open(state.path().join("system"))?;
        let scratch = File::options().read(true).write(true).open(state.path().join("scratch"))?;
        Ok(House { state, probe, programs, system, scratch })
    }

    fn boot(&self) -> Boot {
        Boot {
            vcpus: 1,
            memory_mib: 64,
            kernel: self.state.path().join("kernel"),
            initrd: self.state.path().join("initrd"),
            arguments: Vec::new(),
            scratch_size: 16 << 20,
            throttle: None,
            uid: VMM_UID,
            interface: None,
        }
    }

    /// Runs `attempt` in the VMM's place.
    fn as_vmm(&self, attempt: &str) -> Result<Outcome, Box<dyn Error>> {
        let (log, theirs) = UnixStream::pair()?;
        let descriptors = Descriptors {
            system: self.system.as_raw_fd(),
            scratch: self.scratch.as_raw_fd(),
            console: theirs.as_raw_fd(),
            control: theirs.as_raw_fd(),
            vsock: theirs.as_raw_fd(),
            tap: None,
            log: theirs.as_raw_fd(),
            gate: None,
        };
        outcome(qemu::command(&self.programs.qemu, &self.boot(), &descriptors), attempt, log, theirs.into())
    }

    /// Runs `attempt` in the stream device's place.
    fn as_stream_device(&self, attempt: &str) -> Result<Outcome, Box<dyn Error>> {
        let (log, theirs) = UnixStream::pair()?;
        let directory = self.state.path().join("run");
        let spec = vsock::command(&self.programs.vsock_device, directory, VSOCK_UID, theirs.as_raw_fd());
        outcome(spec, attempt, log, theirs.into())
    }
}

impl Drop for House {
    fn drop(&mut self) {
        for closure in [&self.programs.qemu, &self.programs.vsock_device] {
            let _ = fs::remove_dir_all(&closure.root);
        }
        let _ = closure::remove_unused(self.state.path(), &[]);
    }
}

/// How an attempt ended.
struct Outcome {
    status: ExitStatus,
    said: String,
}

impl Outcome {
    fn killed_by(&self, signal: Signal) -> bool {
        self.status.signal() == Some(signal.as_raw())
    }

    /// What the kernel answered, if the attempt lived to say so.
    fn answer(&self) -> Option<i64> {
        serde_json::from_str::<Value>(&self.said).ok()?.get("result")?.as_i64()
    }
}

fn outcome(mut spec: Spec, attempt: &str, mut log: UnixStream, theirs: OwnedFd) -> Result<Outcome, Box<dyn Error>> {
    spec.argv = vec!["probe".to_owned(), attempt.to_owned()];
    let mut child = jail::launch(Path::new("/proc/self/exe"), &spec)?;
    drop(theirs);
    let mut said = String::new();
    log.read_to_string(&mut said)?;
    Ok(Outcome { status: child.wait()?, said })
}

/// The probe, built statically: it must run in any root. A path in `PEPO_PROBE` saves the build.
fn probe() -> Result<PathBuf, Box<dyn Error>> {
    if let Some(path) = std::env::var_os("PEPO_PROBE") {
        return Ok(path.into());
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probe");
    let triple = "x86_64-unknown-linux-gnu";
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--locked", "--package", "pepo-hostile", "--bin", "probe", "--target", triple])
        .arg("--target-dir")
        .arg(&target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::null())
        .status()?;
    if !built.success() {
        return Err("the probe does not build".into());
    }
    Ok(target.join(triple).join("debug/probe"))
}

fn attempts(probe: &Path) -> Result<Vec<String>, Box<dyn Error>> {
    let list = Command::new(probe).arg("list").output()?;
    let mut attempts: Vec<String> = String::from_utf8(list.stdout)?.lines().map(str::to_owned).collect();
    attempts.push("int80-getpid".to_owned());
    if attempts.len() < 100 {
        return Err(format!("the probe knows {} attempts only", attempts.len()).into());
    }
    Ok(attempts)
}

/// What is wrong with the outcome of a forbidden call, if anything.
fn complaint(attempt: &str, outcome: &Outcome) -> Option<String> {
    let expected = match attempt {
        // The first gate of `filter`: absent, and the caller lives.
        _ if ABSENT.contains(&attempt) => outcome.answer() == Some(-i64::from(rustix::io::Errno::NOSYS.raw_os_error())),
        // Allowed, and there is nothing to execute: nothing is mapped where the path would have to be.
        "execve-exec-page" => outcome.answer() == Some(-14),
        // Allowed, and refused by the limit of the address space.
        "mmap-everything" => outcome.answer() == Some(-12),
        _ => outcome.killed_by(Signal::SYS),
    };
    (!expected).then(|| format!("{attempt}: {} and it said {:?}", outcome.status, outcome.said))
}

fn none(complaints: Vec<String>) -> Result<(), Box<dyn Error>> {
    if complaints.is_empty() { Ok(()) } else { Err(complaints.join("\n").into()) }
}

fn every_forbidden_call_is_refused_to_the_vmm(house: &House) -> Result<(), Box<dyn Error>> {
    let mut complaints = Vec::new();
    for attempt in attempts(&house.probe)? {
        complaints.extend(complaint(&attempt, &house.as_vmm(&attempt)?));
    }
    none(complaints)
}

fn every_forbidden_call_is_refused_to_the_stream_device(house: &House) -> Result<(), Box<dyn Error>> {
    let mut complaints = Vec::new();
    for attempt in attempts(&house.probe)? {
        complaints.extend(complaint(&attempt, &house.as_stream_device(&attempt)?));
    }
    none(complaints)
}

/// The counterpart of the two above: a refusal proves something only if the attempt is real.
fn the_attempts_reach_the_kernel_where_there_is_no_jail(house: &House) -> Result<(), Box<dyn Error>> {
    let mut complaints = Vec::new();
    for attempt in attempts(&house.probe)? {
        let output = Command::new(&house.probe).arg(&attempt).stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        // A kernel built without something answers ENOSYS, which is an answer; a death is not.
        if serde_json::from_str::<Value>(&said).ok().and_then(|said| said.get("result").cloned()).is_none() {
            complaints.push(format!("{attempt}: {} and it said {said:?}", output.status));
        }
    }
    none(complaints)
}

/// The probe in Firecracker's place, put there by the real jailer under our launcher: what stands before the VMM has loaded
/// its own list, and what its root shows.
fn what_no_vmm_calls_is_refused_behind_an_official_jailer(house: &House) -> Result<(), Box<dyn Error>> {
    let jailer = official().ok_or("no jailer")?;
    let closure = house.state.path().join("official");
    fs::create_dir(&closure)?;
    fs::copy(jailer.join("jailer"), closure.join("jailer"))?;
    fs::copy(&house.probe, closure.join("firecracker"))?;
    let closure = Closure { digest: "0".into(), root: closure, program: "/firecracker".into(), env: Vec::new() };
    let base = house.state.path().join("base");
    fs::create_dir(&base)?;
    let run = |attempt: &str, number: usize| -> Result<Outcome, Box<dyn Error>> {
        let (log, theirs) = UnixStream::pair()?;
        let id = format!("{number:032x}");
        let mut spec =
            firecracker::command(&closure, &house.boot(), &base, &id, theirs.as_raw_fd(), theirs.as_raw_fd());
        let words = spec.argv.iter().position(|word| word == "--").ok_or("no words for the VMM")?;
        spec.argv.truncate(words + 1);
        spec.argv.push(attempt.to_owned());
        let mut child = jail::launch(Path::new("/proc/self/exe"), &spec)?;
        drop(theirs);
        let mut log = log;
        let mut said = String::new();
        log.read_to_string(&mut said)?;
        Ok(Outcome { status: child.wait()?, said })
    };
    let killed = [
        "bpf",
        "userfaultfd",
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
        "perf_event_open",
        "modify_ldt",
        "personality",
        "fanotify_init",
        "keyctl",
        "add_key",
        "request_key",
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "process_madvise",
        "pidfd_getfd",
        "kcmp",
        "socket-inet",
        "socket-inet6",
        "socket-netlink",
        "socket-vsock",
        "socket-packet",
        "socket-alg",
        "socketpair-inet",
    ];
    let known = attempts(&house.probe)?;
    let mut complaints = Vec::new();
    for (number, attempt) in killed.into_iter().enumerate() {
        if !known.iter().any(|name| name == attempt) {
            complaints.push(format!("the probe does not know {attempt}"));
        }
        let outcome = run(attempt, number)?;
        if !outcome.killed_by(Signal::SYS) {
            complaints.push(format!("{attempt}: {} and it said {:?}", outcome.status, outcome.said));
        }
    }
    let looked = run("look", 1000)?;
    let saw: BTreeMap<String, Value> =
        serde_json::from_str(&looked.said).map_err(|error| format!("{error}: {:?}", looked.said))?;
    for (what, expected) in
        [("open", "[0,1,2]"), ("seen", r#"["/dev/kvm"]"#), ("root", r#"["dev","firecracker","firecracker.pid","run"]"#)]
    {
        let found = saw.get(what).map(ToString::to_string).unwrap_or_default();
        if found != expected {
            complaints.push(format!("{what} is {found}, not {expected}"));
        }
    }
    none(complaints)
}

fn the_root_holds_the_closure_and_nothing_else(house: &House) -> Result<(), Box<dyn Error>> {
    let mut complaints = Vec::new();
    for (who, outcome, root, open, written) in [
        // Standard ones, and the five of `Descriptors` that are not the log.
        ("vmm", house.as_vmm("look")?, &house.programs.qemu.root, "[0,1,2,10,11,12,13,14]", "[]"),
        ("stream device", house.as_stream_device("look")?, &house.programs.vsock_device.root, "[0,1,2]", r#"["/run"]"#),
    ] {
        let saw: BTreeMap<String, Value> =
            serde_json::from_str(&outcome.said).map_err(|error| format!("{who}: {error}: {:?}", outcome.said))?;
        let mut names: Vec<String> = fs::read_dir(root)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into()))
            .collect::<Result<_, std::io::Error>>()?;
        names.sort();
        for (what, expected) in [
            ("open", open.to_owned()),
            ("root", serde_json::to_string(&names)?),
            ("seen", "[]".to_owned()),
            ("written", written.to_owned()),
        ] {
            let found = saw.get(what).map(ToString::to_string).unwrap_or_default();
            if found != expected {
                complaints.push(format!("{who}: {what} is {found}, not {expected}"));
            }
        }
    }
    none(complaints)
}

fn the_kernel_says_from_outside_that_the_walls_stand(house: &House) -> Result<(), Box<dyn Error>> {
    let (log, theirs) = UnixStream::pair()?;
    let (input, their_input) = UnixStream::pair()?;
    let mut spec =
        vsock::command(&house.programs.vsock_device, house.state.path().join("run"), VSOCK_UID, theirs.as_raw_fd());
    spec.argv = vec!["probe".to_owned(), "wait".to_owned()];
    spec.descriptors.push(jail::Descriptor { from: their_input.as_raw_fd(), to: 0 });
    let mut child = jail::launch(Path::new("/proc/self/exe"), &spec)?;
    drop((theirs, their_input));
    let mut ready = String::new();
    BufReader::new(&log).read_line(&mut ready)?;
    let looked = walls(child.id(), &spec);
    drop(input);
    child.wait()?;
    if ready != "ready\n" {
        return Err(format!("it said {ready:?}").into());
    }
    none(looked?)
}

/// Reads /proc about a jailed process; what is not as it has to be.
fn walls(pid: u32, spec: &Spec) -> Result<Vec<String>, Box<dyn Error>> {
    let proc = Path::new("/proc").join(pid.to_string());
    let status = fs::read_to_string(proc.join("status"))?;
    let status: BTreeMap<&str, &str> = status.lines().filter_map(|line| line.split_once(":\t")).collect();
    let mut complaints = Vec::new();
    let uid = spec.uid;
    let uids = format!("{uid}\t{uid}\t{uid}\t{uid}");
    let none = "0000000000000000";
    for (field, expected) in [
        ("Uid", uids.as_str()),
        ("Gid", uids.as_str()),
        ("Groups", ""),
        ("CapInh", none),
        ("CapPrm", none),
        ("CapEff", none),
        ("CapBnd", none),
        ("CapAmb", none),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
        ("Seccomp_filters", "2"),
    ] {
        let found = status.get(field).map(|value| value.trim());
        // Older kernels do not count filters.
        if found != Some(expected) && !(field == "Seccomp_filters" && found.is_none()) {
            complaints.push(format!("{field} is {found:?}, not {expected:?}"));
        }
    }
    let namespace = |of: &Path| fs::read_link(of.join("ns/mnt"));
    if namespace(&proc)? == namespace(Path::new("/proc/self"))? {
        complaints.push("its mount namespace is the host's".to_owned());
    }
    // mountinfo: the fifth field is the place, the sixth the options; one line for the root, one for each bind.
    let mounts = fs::read_to_string(proc.join("mountinfo"))?;
    let mounts: Vec<(&str, &str)> = mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(4);
            Some((fields.next()?, fields.next()?))
        })
        .collect();
    let (root, run) = (mounts.first().unwrap_or(&("", "")), mounts.get(1).unwrap_or(&("", "")));
    let with = |(place, options): &(&str, &str), at: &str, flags: &[&str]| {
        *place == at && flags.iter().all(|flag| options.split(',').any(|option| option == *flag))
    };
    if mounts.len() != 2
        || !with(root, "/", &["ro", "nosuid", "nodev"])
        || !with(run, "/run", &["rw", "nosuid", "nodev", "noexec"])
    {
        complaints.push(format!("its mounts are {mounts:?}"));
    }
    // The root seen through /proc is the directory that was named, and belongs to root.
    let (seen, named) = (fs::metadata(proc.join("root"))?, fs::metadata(&spec.root)?);
    if (seen.dev(), seen.ino(), named.uid()) != (named.dev(), named.ino(), 0) {
        complaints.push("its root is not the closure".to_owned());
    }
    let limits = fs::read_to_string(proc.join("limits"))?;
    for (limit, expected) in [("Max core file size", "0"), ("Max locked memory", "0"), ("Max file size", "0")] {
        let found = limits.lines().find_map(|line| line.strip_prefix(limit)).unwrap_or_default();
        if found.split_whitespace().take(2).any(|value| value != expected) {
            complaints.push(format!("{limit} is {found}"));
        }
    }
    let score = fs::read_to_string(proc.join("oom_score_adj"))?;
    if score.trim() != spec.oom_score_adj.to_string() {
        complaints.push(format!("oom_score_adj is {score}"));
    }
    let leader = rustix::process::getsid(rustix::process::Pid::from_raw(i32::try_from(pid)?))?;
    if leader.as_raw_nonzero().get().unsigned_abs() != pid {
        complaints.push("it shares a terminal's process group with its parent".to_owned());
    }
    Ok(complaints)
}

fn what_is_written_and_opened_has_an_end(house: &House) -> Result<(), Box<dyn Error>> {
    let mut complaints = Vec::new();
    // Descriptor 10 is the root file system: not to be written at all, by anyone who holds it.
    let system = house.as_vmm("fill-file")?;
    if system.answer() != Some(-9) {
        complaints.push(format!("the root file system took a write: {} {:?}", system.status, system.said));
    }
    let open = house.as_vmm("fill-descriptors")?;
    // 256 in all, of which eight are taken.
    if open.answer() != Some(248) {
        complaints.push(format!("descriptors: {} {:?}", open.status, open.said));
    }
    let beyond = house.as_vmm("fill-scratch")?;
    if !beyond.killed_by(Signal::XFSZ) {
        complaints.push(format!("a file beyond the limit: {} {:?}", beyond.status, beyond.said));
    }
    none(complaints)
}
