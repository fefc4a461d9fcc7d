//! `make bench`: the figures. Each is a ratio of two things measured in turn in this one run, so that a slow or busy machine
//! makes both slower. The reference is always the same job by hand: the same VMM with the same arguments, or a raw stream.

#![allow(clippy::panic, clippy::expect_used, reason = "a bench fails by panicking")]
#![allow(clippy::print_stdout, reason = "its table is its purpose")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use pepo_e2e::{Instance, bin, until};

const ROUNDS: usize = 5;
const AGENT_PORT: u32 = 1024;
const RAW_PORT: u32 = 7001;
/// What the guest agent prints on its console when it listens.
const READY: &[u8] = b"pepo-guest: ready";
const MIB: usize = 1 << 20;
const BULK: usize = 256 * MIB;
const FILES: usize = 5000;

/// In the guest: for each connection, one line of shell with the stream as its input and output.
const RAW_SERVER: &str = r#"
import socket, subprocess
s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
s.bind((socket.VMADDR_CID_ANY, 7001)); s.listen(8)
print("ready", flush=True)
while True:
    c, _ = s.accept()
    line = b""
    while not line.endswith(b"\n"): line += c.recv(1)
    if line == b"echo\n":
        while True:
            b = c.recv(64)
            if not b: break
            c.sendall(b)
    else:
        subprocess.run(["bash", "-c", line.decode()], stdin=c.fileno(), stdout=c.fileno())
    c.close()
"#;

struct Row {
    what: String,
    ours: f64,
    reference: f64,
    unit: &'static str,
    goal: Goal,
}

enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

/// Fails when a goal is missed.
fn main() -> ExitCode {
    let only = std::env::args().nth(1).unwrap_or_default();
    assert!(["", "boot", "exec", "stdout", "cp"].contains(&only.as_str()), "figures are boot, exec, stdout, cp");
    let wanted = |name: &str| only.is_empty() || only == name;
    let instance = Instance::new();
    let up = instance.up();
    let session = instance
        .pepo(["session", "create", "-q", "--memory", "512m", "--workspace", "none"])
        .ok()
        .out()
        .trim()
        .to_owned();
    instance.pepo(["exec", &session, "--", "true"]).ok();
    let guest = Guest::find(&instance);
    let mut rows = vec![];
    memory(&guest);
    if wanted("boot") {
        rows.push(boot(&instance, &guest));
    }
    let server = instance
        .pepo(["exec", &session, "--", "python3", "-u", "-c", RAW_SERVER])
        .within(Duration::from_secs(3600))
        .start();
    server.says("ready", Duration::from_secs(60));
    if wanted("exec") {
        rows.push(exec(&instance, &session, &guest));
    }
    if wanted("stdout") {
        rows.push(stdout(&instance, &session, &guest));
    }
    if wanted("cp") {
        rows.extend(copy(&instance, &session, &guest));
    }
    server.signal(rustix::process::Signal::INT);
    server.wait();
    instance.pepo(["session", "rm", &session]).ok();
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();

    println!("\n| what | ours | by hand | ratio | goal |\n|---|---|---|---|---|");
    let mut code = ExitCode::SUCCESS;
    for row in rows {
        let (ratio, goal, met) = match row.goal {
            // Times: less is better. Rates: more is.
            Goal::AtMost(goal) => (row.ours / row.reference, format!("<= {goal}"), row.ours / row.reference <= goal),
            Goal::AtLeast(goal) => (row.ours / row.reference, format!(">= {goal}"), row.ours / row.reference >= goal),
        };
        let mark = if met { "met" } else { "missed" };
        if !met {
            code = ExitCode::FAILURE;
        }
        println!(
            "| {} | {:.2} {unit} | {:.2} {unit} | {ratio:.2} | {goal} {mark} |",
            row.what,
            row.ours,
            row.reference,
            unit = row.unit
        );
    }
    code
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The processes of the one Sandbox that runs.
struct Guest {
    vmm: i32,
    device: i32,
    keeper: i32,
    socket: PathBuf,
    /// The Image's root file system.
    image: PathBuf,
}

impl Guest {
    fn find(instance: &Instance) -> Self {
        let one = |comm: &str| {
            let pids = instance.pids(comm);
            assert_eq!(pids.len(), 1, "{comm}: {pids:?}");
            pids[0]
        };
        let jails = instance.home().join("state/jail");
        let jail = fs::read_dir(&jails)
            .expect("jails")
            .flatten()
            .find(|entry| entry.path().join("vsock/stream.sock").exists());
        let image = fs::read_dir(instance.home().join("state/images"))
            .expect("Images")
            .flatten()
            .map(|entry| entry.path().join("rootfs.erofs"))
            .find(|path| path.exists());
        Guest {
            image: image.expect("an Image"),
            vmm: one("qemu-system-x86"),
            device: one("vhost-device-vs"),
            keeper: one("pepo-keeper"),
            socket: jail.expect("the Sandbox's directory").path().join("vsock/stream.sock"),
        }
    }

    /// A raw stream to the server in the guest.
    fn raw(&self, line: &str) -> UnixStream {
        // The device gives a call up now and then while the guest is busy with the one before; a second one is taken.
        let mut stream =
            until("the server in the guest answers", Duration::from_secs(60), || connect(&self.socket, RAW_PORT));
        writeln!(stream, "{line}").expect("write");
        stream
    }
}

/// Asks the stream device for a port of the guest.
fn connect(socket: &Path, port: u32) -> Option<UnixStream> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    writeln!(stream, "CONNECT {port}").ok()?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\n") {
        let mut byte = [0u8];
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        answer.push(byte[0]);
    }
    stream.set_read_timeout(Some(Duration::from_secs(300))).ok()?;
    answer.starts_with(b"OK").then_some(stream)
}

fn memory(guest: &Guest) {
    println!("      memory of one Sandbox's processes (KiB, proportional; the guest's own memory apart):");
    for (name, pid) in [("keeper", guest.keeper), ("VMM", guest.vmm), ("stream device", guest.device)] {
        let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
        let (mut own, mut of_guest, mut in_guest) = (0u64, 0u64, false);
        for line in smaps.lines() {
            if line.split_whitespace().next().is_some_and(|word| word.contains('-') && !word.ends_with(':')) {
                in_guest = line.contains("memfd:");
            } else if let Some(kib) =
                line.strip_prefix("Pss:").and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
            {
                if in_guest { of_guest += kib } else { own += kib }
            }
        }
        println!("        {name:<14} {own:>8}    guest memory it has mapped and touched {of_guest:>8}");
    }
}

/// Cold `pepo run -- true` against the same VMM, kernel and initramfs by hand, to the agent's first answer.
fn boot(instance: &Instance, guest: &Guest) -> Row {
    let by_hand = ByHand::like(guest);
    let (mut ours, mut reference) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        reference.push(by_hand.boot().as_secs_f64());
        ours.push(instance.pepo(["run", "-q", "--memory", "512m", "--", "true"]).ok().took.as_secs_f64());
    }
    let row = Row {
        what: "cold `pepo run -- true`".into(),
        ours: median(ours),
        reference: median(reference),
        unit: "s",
        goal: Goal::AtMost(1.15),
    };
    println!("      {}: {:.2} s, by hand {:.2} s", row.what, row.ours, row.reference);
    row
}

/// What a running VMM was started with, for starting it again without any of us.
struct ByHand {
    arguments: Vec<String>,
    scratch: PathBuf,
    folder: tempfile::TempDir,
}

impl ByHand {
    fn like(guest: &Guest) -> Self {
        let line = fs::read(format!("/proc/{}/cmdline", guest.vmm)).expect("cmdline");
        let given: Vec<String> = line.split(|b| *b == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        let folder = tempfile::tempdir().expect("directory");
        // The kernel and initramfs are bound into its root: its own view of them is a path we can open.
        let inside = |path: &str| format!("/proc/{}/root{path}", guest.vmm);
        let kept = |path: &str, name: &str| {
            let to = folder.path().join(name);
            fs::copy(inside(path), &to).unwrap_or_else(|error| panic!("{path}: {error}"));
            to.display().to_string()
        };
        let scratch = folder.path().join("scratch");
        let mut arguments = vec![];
        let mut rest = given.into_iter().skip(1).filter(|arg| !arg.is_empty());
        while let Some(option) = rest.next() {
            let flag =
                matches!(option.as_str(), "-nodefaults" | "-no-user-config" | "-no-reboot" | "-nographic" | "-S");
            let value = if flag { String::new() } else { rest.next().expect("a value") };
            match option.as_str() {
                "-add-fd" | "-L" => {}
                "-kernel" => arguments.extend([option, kept(&value, "kernel")]),
                "-initrd" => arguments.extend([option, kept(&value, "initrd")]),
                "-chardev" if value.contains("id=vsock") => {
                    arguments.extend([
                        option,
                        format!("socket,id=vsock,path={}", folder.path().join("vhost.sock").display()),
                    ]);
                }
                "-chardev" if value.contains("id=console") => {
                    let path = folder.path().join("console");
                    arguments.extend([option, format!("file,id=console,path={}", path.display())]);
                }
                // The disks are descriptors there; here they are files, told apart by the names of their nodes.
                "-blockdev" if value.contains("/dev/fdset/") => {
                    let file = if value.contains("node-name=scratch") { &scratch } else { &guest.image };
                    let parts = value.split(',').map(|part| match part.strip_prefix("filename=") {
                        Some(_) => format!("filename={}", file.display()),
                        None => part.to_owned(),
                    });
                    arguments.extend([option, parts.collect::<Vec<_>>().join(",")]);
                }
                "-chardev" => {
                    let id = value.split(',').find_map(|part| part.strip_prefix("id=")).expect("an id").to_owned();
                    arguments.extend([option, format!("null,id={id}")]);
                }
                _ => {
                    arguments.push(option);
                    if !flag {
                        arguments.push(value);
                    }
                }
            }
        }
        ByHand { arguments, scratch, folder }
    }

    /// From nothing to the agent's first answer.
    fn boot(&self) -> Duration {
        let began = Instant::now();
        let path = |name: &str| self.folder.path().join(name);
        for stale in ["vhost.sock", "v.sock", "console"] {
            let _ = fs::remove_file(path(stale));
        }
        let _ = fs::remove_file(&self.scratch);
        fs::File::create(&self.scratch).and_then(|file| file.set_len(2 << 30)).expect("scratch");
        run(Command::new("/usr/sbin/mkfs.ext4")
            .args(["-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"])
            .arg(&self.scratch));
        let vm =
            format!("guest-cid=4242,socket={},uds-path={}", path("vhost.sock").display(), path("v.sock").display());
        let device = Command::new(bin("vhost-device-vsock"))
            .args(["--vm", &vm])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("device");
        let device = Killed(device);
        until("the device waits for its VMM", Duration::from_secs(10), || path("vhost.sock").exists().then_some(()));
        let vmm = Command::new("qemu-system-x86_64")
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("qemu");
        let mut vmm = Killed(vmm);
        // A call before the guest listens can make the device mute: the guest says on its console when it does.
        let ready = || fs::read(path("console")).is_ok_and(|text| text.windows(READY.len()).any(|part| part == READY));
        while !ready() {
            if let Ok(Some(status)) = vmm.0.try_wait() {
                let mut text = String::new();
                let _ = vmm.0.stderr.take().expect("piped").read_to_string(&mut text);
                panic!("the VMM by hand ended with {status}: {text}\n{:?}", self.arguments);
            }
            assert!(began.elapsed() < Duration::from_secs(120), "the guest by hand never answered");
            std::thread::sleep(Duration::from_millis(2));
        }
        connect(&path("v.sock"), AGENT_PORT).expect("the agent's stream");
        let answered = Instant::now();
        drop((vmm, device));
        answered - began
    }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(command: &mut Command) {
    let output = command.output().expect("a program");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A command through the API against spawning the same in a loop in the guest, plus one echo over a raw stream.
fn exec(instance: &Instance, session: &str, guest: &Guest) -> Row {
    const TIMES: usize = 100;
    let client = instance.client();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let (mut ours, mut reference) = (vec![], vec![]);
    let loop_line = format!(
        "import os, time\nb = time.monotonic()\nfor _ in range({TIMES}): os.waitpid(os.posix_spawn('/bin/true', ['true'], {{}}), 0)\nprint((time.monotonic() - b) / {TIMES})"
    );
    for _ in 0..3 {
        let spawn: f64 = instance
            .pepo(["exec", session, "--", "python3", "-c", &loop_line])
            .ok()
            .out()
            .trim()
            .parse()
            .expect("seconds");
        let mut stream = guest.raw("echo");
        let began = Instant::now();
        let mut bytes = [7u8; 64];
        for _ in 0..TIMES {
            stream.write_all(&bytes).expect("write");
            stream.read_exact(&mut bytes).expect("read");
        }
        reference.push(spawn + began.elapsed().as_secs_f64() / TIMES as f64);
        let _ = stream.shutdown(Shutdown::Both);
        ours.push(runtime.block_on(async {
            let began = Instant::now();
            for _ in 0..TIMES {
                let command = pepo_api::CreateCommand { argv: Some(vec!["/bin/true".into()]), ..Default::default() };
                client.command_create(session, &command).await.expect("command");
            }
            began.elapsed().as_secs_f64() / TIMES as f64
        }));
    }
    let row = Row {
        what: "exec of `/bin/true`".into(),
        ours: median(ours) * 1e3,
        reference: median(reference) * 1e3,
        unit: "ms",
        goal: Goal::AtMost(1.5),
    };
    println!("      {}: {:.2} ms, by hand {:.2} ms", row.what, row.ours, row.reference);
    row
}

fn rate(bytes: usize, took: Duration) -> f64 {
    bytes as f64 / MIB as f64 / took.as_secs_f64()
}

/// Output of a command to the host against the same bytes over a raw stream.
fn stdout(instance: &Instance, session: &str, guest: &Guest) -> Row {
    let line = format!("head -c {BULK} /dev/zero");
    let (mut ours, mut reference) = (vec![], vec![]);
    for _ in 0..3 {
        let began = Instant::now();
        drained(guest.raw(&line), BULK);
        reference.push(rate(BULK, began.elapsed()));
        let ran = instance.pepo(["exec", session, "--", "bash", "-c", &line]).within(Duration::from_secs(300)).ok();
        assert_eq!(ran.stdout.len(), BULK);
        ours.push(rate(BULK, ran.took));
    }
    let row = Row {
        what: "256 MiB of stdout".into(),
        ours: median(ours),
        reference: median(reference),
        unit: "MiB/s",
        goal: Goal::AtLeast(0.9),
    };
    println!("      {}: {:.0} MiB/s, raw {:.0} MiB/s", row.what, row.ours, row.reference);
    row
}

fn drained(mut stream: UnixStream, bytes: usize) {
    let mut buffer = vec![0u8; 1 << 18];
    let mut left = bytes;
    while left > 0 {
        let n = stream.read(&mut buffer).expect("read");
        assert!(n > 0, "{left} bytes did not come");
        left -= n;
    }
}

/// `pepo cp` against tar piped through a raw stream.
fn copy(instance: &Instance, session: &str, guest: &Guest) -> Vec<Row> {
    let folder = tempfile::tempdir().expect("directory");
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("big")).expect("directory");
    fs::write(at("big/file"), vec![5u8; BULK]).expect("write");
    fs::create_dir(at("small")).expect("directory");
    for n in 0..FILES {
        fs::write(at("small").join(format!("{n}")), vec![b'x'; 1000]).expect("write");
    }
    let mut rows = vec![];
    for (name, what, amount, unit) in
        [("big", "256 MiB", (BULK / MIB) as f64, "MiB/s"), ("small", "5,000 small files", FILES as f64, "files/s")]
    {
        let fresh = || instance.pepo(["exec", session, "--", "rm", "-rf", "there", "raw"]).ok();
        let (mut ours_in, mut raw_in, mut ours_out, mut raw_out) = (vec![], vec![], vec![], vec![]);
        for _ in 0..3 {
            fresh();
            let source = at(name).display().to_string();
            let ran = instance.pepo(["cp", &source, &format!("{session}:there")]).within(Duration::from_secs(600)).ok();
            ours_in.push(amount / ran.took.as_secs_f64());

            let began = Instant::now();
            let mut stream = guest.raw("mkdir -p raw && tar -xf - -C raw && echo done");
            let mut tar = Command::new("tar")
                .args(["-cf", "-", "-C"])
                .arg(at(name))
                .arg(".")
                .stdout(Stdio::piped())
                .spawn()
                .expect("tar");
            std::io::copy(&mut tar.stdout.take().expect("piped"), &mut stream).expect("copy");
            tar.wait().expect("tar");
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).expect("read");
            assert_eq!(line, "done\n");
            raw_in.push(amount / began.elapsed().as_secs_f64());

            let _ = fs::remove_dir_all(at("back"));
            let back = at("back").display().to_string();
            let ran = instance.pepo(["cp", &format!("{session}:there"), &back]).within(Duration::from_secs(600)).ok();
            ours_out.push(amount / ran.took.as_secs_f64());

            let _ = fs::remove_dir_all(at("back"));
            fs::create_dir(at("back")).expect("directory");
            let began = Instant::now();
            let mut stream = guest.raw("tar -cf - -C raw .");
            let mut tar = Command::new("tar")
                .args(["-xf", "-", "-C"])
                .arg(at("back"))
                .stdin(Stdio::piped())
                .spawn()
                .expect("tar");
            let mut into = tar.stdin.take().expect("piped");
            // tar ends at the archive's end mark and leaves the padding after it in the pipe.
            match std::io::copy(&mut stream, &mut into) {
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
                copied => drop(copied.expect("copy")),
            }
            drop(into);
            assert!(tar.wait().expect("tar").success());
            raw_out.push(amount / began.elapsed().as_secs_f64());
        }
        for (way, ours, raw) in [("in", ours_in, raw_in), ("out", ours_out, raw_out)] {
            let row = Row {
                what: format!("`cp` of {what} {way}"),
                ours: median(ours),
                reference: median(raw),
                unit,
                goal: Goal::AtLeast(0.8),
            };
            println!(
                "      {}: {:.0} {unit}, tar through a raw stream {:.0} {unit}",
                row.what, row.ours, row.reference
            );
            rows.push(row);
        }
    }
    rows
}
