//! A cold `pepo run`, and the memory of a Sandbox's processes.

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pepo_e2e::{bin, until};

use crate::room::{Guest, Room, connect};
use crate::table::{Goal, Row, median};

const ROUNDS: usize = 7;
const AGENT_PORT: u32 = 1024;
/// What the guest agent prints on its console when it listens.
const READY: &[u8] = b"pepo-guest: ready";

/// Prints what the processes of the Sandbox that runs have in memory.
pub fn memory(guest: &Guest) {
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
pub fn boot(room: &Room) -> Vec<Row> {
    let by_hand = ByHand::like(&room.guest);
    let (mut ours, mut reference) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        reference.push(by_hand.boot().as_secs_f64());
        ours.push(room.instance.pepo(["run", "-q", "--memory", "512m", "--", "true"]).ok().took.as_secs_f64());
    }
    let row = Row {
        what: "cold `pepo run -- true`".into(),
        ours: median(ours),
        unit: "s",
        goal: Goal::AtMost { reference: median(reference), ratio: 1.15 },
    };
    vec![row]
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
        // The device gives a call up now and then.
        until("the agent's stream", Duration::from_secs(60), || connect(&path("v.sock"), AGENT_PORT));
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
