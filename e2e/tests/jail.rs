//! The processes of a live Sandbox, looked at through /proc: what the kernel says they may do.
//!
//! That the walls hold when something pushes against them is tested with a probe in the programs' place
//! (`crates/sandbox/tests/jail.rs`); this is the proof that the real ones stand behind them.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pepo_api::CreateCommand;
use pepo_e2e::{Instance, SANDBOX_UIDS, bare, until};

const NONE: &str = "0000000000000000";

/// The entries of a program's root.
const VMM_ROOT: [&str; 6] = ["initrd", "kernel", "lib", "lib64", "qemu-system-x86_64", "share"];
const OFFICIAL_ROOT: [&str; 9] =
    ["dev", "firecracker", "firecracker.pid", "initrd", "kernel", "log", "run", "scratch", "system"];
const DEVICE_ROOT: [&str; 4] = ["lib", "lib64", "run", "vhost-device-vsock"];

struct Process {
    name: &'static str,
    proc: PathBuf,
    status: BTreeMap<String, String>,
}

impl Process {
    /// The one process of this instance with that command name.
    fn of(instance: &Instance, name: &'static str) -> Self {
        let pid = until(name, Duration::from_secs(60), || match instance.pids(name)[..] {
            [pid] => Some(pid),
            _ => None,
        });
        let proc = Path::new("/proc").join(pid.to_string());
        let status = fs::read_to_string(proc.join("status")).expect("status");
        let field = |line: &str| line.split_once(':').map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
        Process { name, proc, status: status.lines().filter_map(field).collect() }
    }

    fn says(&self, field: &str, expected: &str) {
        assert_eq!(self.status.get(field).map(String::as_str), Some(expected), "{field} of {}", self.name);
    }

    /// Its uid, which has to be the only one it has, and its group.
    fn uid(&self) -> u32 {
        let ids = |field: &str| -> BTreeSet<u32> {
            self.status.get(field).expect("ids").split_whitespace().map(|id| id.parse().expect("an id")).collect()
        };
        let uids = ids("Uid");
        assert_eq!(uids.len(), 1, "{}: {uids:?}", self.name);
        assert_eq!(ids("Gid"), uids, "{}", self.name);
        self.says("Groups", "");
        *uids.first().expect("a uid")
    }

    fn namespace(&self, kind: &str) -> PathBuf {
        fs::read_link(self.proc.join("ns").join(kind)).expect("namespace")
    }

    fn root(&self) -> Vec<String> {
        let entries = fs::read_dir(self.proc.join("root")).expect("root");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

#[tokio::test]
async fn every_process_of_a_sandbox_stands_behind_the_walls() {
    let instance = Instance::new();
    let daemon = instance.up();
    let client = instance.client();
    let session = client.session_create(&bare()).await.expect("session").id.to_string();
    // Its answer says that the Sandbox is complete: a keeper has rights until both programs run.
    let command = CreateCommand { command: Some("true".into()), wait_seconds: Some(60), ..Default::default() };
    client.command_create(&session, &command).await.expect("command");

    let firecracker = instance.under_firecracker();
    let vmm = Process::of(&instance, instance.vmm());
    let device = (!firecracker).then(|| Process::of(&instance, "vhost-device-vs"));
    let keeper = Process::of(&instance, "pepo-keeper");
    for process in [&vmm, &keeper].into_iter().chain(&device) {
        for set in ["CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            process.says(set, NONE);
        }
        // What an official jailer was lent stays inheritable in what it becomes, and is worth nothing there.
        if !firecracker || process.name != vmm.name {
            process.says("CapInh", NONE);
        }
        process.says("NoNewPrivs", "1");
        for kind in ["mnt", "net", "pid", "ipc", "uts"] {
            let host = fs::read_link(Path::new("/proc/self/ns").join(kind)).expect("namespace");
            assert_ne!(process.namespace(kind), host, "{} shares its {kind} namespace with the host", process.name);
        }
        // Nothing to reach anybody through, whatever it may send.
        let interfaces = fs::read_to_string(process.proc.join("net/dev")).expect("interfaces");
        let names: Vec<&str> = interfaces.lines().skip(2).filter_map(|line| line.split(':').next()).collect();
        assert!(names.iter().all(|name| name.trim() == "lo"), "{}: {names:?}", process.name);
    }
    vmm.says("Seccomp", "2");
    let all: Vec<&Process> = [&vmm, &keeper].into_iter().chain(&device).collect();
    let uids: BTreeSet<u32> = all.iter().map(|process| process.uid()).collect();
    assert!(uids.len() == all.len() && uids.iter().all(|uid| SANDBOX_UIDS.contains(uid)), "{uids:?}");
    match &device {
        Some(device) => {
            device.says("Seccomp", "2");
            assert_eq!(vmm.root(), VMM_ROOT);
            assert_eq!(device.root(), DEVICE_ROOT);
        }
        None => assert_eq!(vmm.root(), OFFICIAL_ROOT),
    }

    client.session_terminate(&session).await.expect("terminate");
    instance.pepo(["down"]).ok();
    let ran = daemon.wait();
    assert_eq!(ran.code(), Some(0), "{ran}");
    instance.end();
}
