//! Firecracker on hardware virtualization: the jail its own jailer makes, what it is told over its API, how it ends.
//!
//! ```text
//! launcher of ours ──exec──▶ jailer ──exec──▶ firecracker         one process: its exit status is the keeper's to read
//!    capabilities, limits      root, nodes, user     listens on run/api.sock, takes [`configuration`], then [`start`]
//! ```
//! The root is a small tmpfs that exists in the keeper's mount namespace alone and is made anew for each Sandbox, so
//! there is never a jail of before, nothing to remove after, an end to what a VMM can write, and no host file system
//! that would have to allow device nodes. Kernel, initial ramdisk and disks are mounts in it: shared files are never
//! chowned or linked.
//!
//! What this driver leaves alone: snapshots and pausing (whose resume breaks streams in 1.16.0 and 1.16.1), metadata
//! service, streams that the guest opens, hot-plugging, PCI, huge pages, CPU templates, the metrics file.
//! Its facts are those of release [`RELEASE`]. Caller: the keeper.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use self::api::Api;
use super::closure::Closure;
use super::{Boot, GUEST_CID, Interface, Throttle};
use crate::jail::{Descriptor, Entry, Filter, Limits, Spec};
use crate::net::address::TAP;
use crate::proc;

pub mod api;

/// The release whose API and command line this module speaks.
pub const RELEASE: &str = "1.16.1";

/// Most virtual processors of a microVM, by the API.
pub const MAX_CPUS: u32 = 32;

/// What Firecracker needs beside the guest's memory, MiB: itself (5 by its specification), its copy in the root, page
/// tables, and the pages of the disks that the host's kernel caches for it.
pub const OVERHEAD_MIB: u32 = 64;

/// Threads beside one for each virtual processor: main, API, and what the kernel makes for KVM.
pub const THREADS: u64 = 16;

/// The file name of the program, which is also a component of the root's path. No version in it: each Sandbox has a base
/// directory of its own, so two releases never meet in one, and the path stays short.
pub const PROGRAM: &str = "firecracker";

/// The jailer's file name.
pub const JAILER: &str = "jailer";

/// In the root: what host and guest share a directory for. The jailer makes it the VMM's.
pub const RUN: &str = "run";
/// In [`RUN`]: the API.
pub const API_SOCKET: &str = "api.sock";
/// In [`RUN`]: where the host dials the guest. Nothing is ever bound at `stream.sock_<port>`, so a guest that dials out
/// reaches nothing, and Firecracker never waits for a listener.
pub const STREAM_SOCKET: &str = "stream.sock";
/// In the root: a pipe for the VMM's log, read by the keeper. When nobody reads, lines are dropped.
pub const LOG: &str = "log";
/// In the root: what is mounted there.
pub const KERNEL: &str = "kernel";
/// See [`KERNEL`].
pub const INITRD: &str = "initrd";
/// See [`KERNEL`].
pub const SYSTEM: &str = "system";
/// See [`KERNEL`].
pub const SCRATCH: &str = "scratch";

/// Descriptors it may hold. A guest with all its 1,023 streams open needs half.
const OPEN_FILES: u64 = 2048;

/// Seconds between two reports of the guest's memory; the keeper asks as often.
pub const STATISTICS_SECONDS: u16 = 10;

/// Console bytes a second, and at once after a quiet time: what the keeper's ring takes.
const CONSOLE_RATE: u64 = 256 << 10;
const CONSOLE_BURST: u64 = 1 << 20;

/// Random bytes a second for a guest. A kernel that boots takes less than 1 KiB.
const ENTROPY_RATE: u64 = 1 << 20;

/// The largest operation a guest's disk driver makes, bytes. A bucket must hold more, else each such operation drains it
/// and waits out of proportion.
const LARGEST_OPERATION: u64 = 4 << 20;

/// The root of a Firecracker whose jailer is given `base`: `<base>/firecracker/<id>/root`.
pub fn root(base: &Path, id: &str) -> PathBuf {
    base.join(PROGRAM).join(id).join("root")
}

/// The jail of a Firecracker of that `id` (32 hex digits: within the jailer's alphabet and length) below `base`.
///
/// `--daemonize` and `--new-pid-ns` are not used: either would take the exit status away. No `--cgroup`, and version 1,
/// with which the jailer then touches none: the keeper is in the Sandbox's cgroup already, and so is what it starts.
pub fn command(closure: &Closure, boot: &Boot, base: &Path, id: &str, console: RawFd, log: RawFd) -> Spec {
    let inside = |name: &str| closure.root.join(name).display().to_string();
    let words = [
        JAILER.to_owned(),
        "--id".to_owned(),
        id.to_owned(),
        "--exec-file".to_owned(),
        inside(PROGRAM),
        "--uid".to_owned(),
        boot.uid.to_string(),
        "--gid".to_owned(),
        boot.uid.to_string(),
        "--chroot-base-dir".to_owned(),
        base.display().to_string(),
        "--cgroup-version".to_owned(),
        "1".to_owned(),
        "--resource-limit".to_owned(),
        format!("no-file={OPEN_FILES}"),
        "--".to_owned(),
        "--api-sock".to_owned(),
        format!("/{RUN}/{API_SOCKET}"),
        "--log-path".to_owned(),
        format!("/{LOG}"),
        "--level".to_owned(),
        "Warning".to_owned(),
    ];
    Spec {
        name: "vmm".to_owned(),
        program: PathBuf::from(inside(JAILER)),
        argv: words.to_vec(),
        env: Vec::new(),
        uid: boot.uid,
        entry: Entry::Official,
        root: closure.root.clone(),
        binds: Vec::new(),
        // Standard input stays /dev/null: a pipe or terminal there would be the guest's keyboard.
        descriptors: vec![Descriptor { from: console, to: 1 }, Descriptor { from: log, to: 2 }],
        limits: Limits { file_size: boot.scratch_size.max(16 << 20), open_files: OPEN_FILES },
        filter: Filter::Official,
        oom_score_adj: proc::OOM_SCORE,
        gate: None,
    }
}

/// One call of the API.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// `PUT`, `GET`.
    pub method: &'static str,
    /// Path.
    pub path: String,
    /// Body, where there is one.
    pub body: Option<Value>,
}

fn put(path: impl Into<String>, body: Value) -> Call {
    Call { method: "PUT", path: path.into(), body: Some(body) }
}

/// Everything that is said before the start, in order. Each call opens or binds what it names, so it fails by itself.
pub fn configuration(boot: &Boot) -> Vec<Call> {
    let mut calls = vec![
        put("/serial", json!({ "rate_limiter": bucket(CONSOLE_RATE, CONSOLE_RATE, Some(CONSOLE_BURST)) })),
        // Before the balloon, whose size is checked against it. Everything is said: a second PUT resets what it omits.
        put(
            "/machine-config",
            json!({
                "vcpu_count": boot.vcpus,
                "mem_size_mib": boot.memory_mib,
                "smt": false,
                "track_dirty_pages": false,
                "huge_pages": "None",
            }),
        ),
        put(
            "/boot-source",
            json!({
                "kernel_image_path": format!("/{KERNEL}"),
                "initrd_path": format!("/{INITRD}"),
                "boot_args": kernel_line(boot),
            }),
        ),
    ];
    // No root device: the initial ramdisk mounts. Then /dev/vda and /dev/vdb follow this order. Whether a disk may be
    // written is said each time: what is not said is "may". Nothing on either has to outlive the host.
    for (name, read_only) in [(SYSTEM, true), (SCRATCH, false)] {
        let mut drive = json!({
            "drive_id": name,
            "path_on_host": format!("/{name}"),
            "is_root_device": false,
            "is_read_only": read_only,
            "cache_type": "Unsafe",
            "io_engine": "Sync",
        });
        if let Some(throttle) = boot.throttle {
            drive["rate_limiter"] = limiter(throttle);
        }
        calls.push(put(format!("/drives/{name}"), drive));
    }
    if let Some(Interface { mac, packets_per_second }) = &boot.interface {
        // What a guest sends too fast stays in its own queue, and costs the host nothing. Bytes are the namespace's, in both
        // directions: they change with the policy.
        let packets = u64::from(*packets_per_second).max(1);
        let device = json!({
            "iface_id": "eth0",
            "host_dev_name": TAP,
            "guest_mac": mac,
            "tx_rate_limiter": { "ops": bucket(packets, packets, None) },
        });
        calls.push(put("/network-interfaces/eth0", device));
    }
    calls.push(put("/vsock", json!({ "guest_cid": GUEST_CID, "uds_path": format!("/{RUN}/{STREAM_SOCKET}") })));
    calls.push(put("/entropy", json!({ "rate_limiter": { "bandwidth": bucket(ENTROPY_RATE, ENTROPY_RATE, None) } })));
    // Never inflated: it is there to be asked how much of its memory the guest uses.
    calls.push(put(
        "/balloon",
        json!({ "amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": STATISTICS_SECONDS }),
    ));
    calls
}

/// Says everything there is to say before the start, each call within `within`.
///
/// # Errors
/// The first call that was not done. The process is still one that could be told otherwise, but it is given up.
pub fn configure(api: &mut Api, boot: &Boot, within: Duration) -> Result<(), api::Error> {
    configuration(boot).iter().try_for_each(|call| api.call(call, within).map(drop))
}

/// Starts the guest. The last call that is made before anything of a guest's choosing exists.
pub fn start() -> Call {
    put("/actions", json!({ "action_type": "InstanceStart" }))
}

/// Asks what the balloon's driver said last.
pub fn statistics() -> Call {
    Call { method: "GET", path: "/balloon/statistics".to_owned(), body: None }
}

/// A bucket that lets through `rate` tokens a second and holds `size`.
fn bucket(size: u64, rate: u64, burst: Option<u64>) -> Value {
    let refill = (size.saturating_mul(1000) / rate.max(1)).max(1);
    let mut bucket = json!({ "size": size, "refill_time": refill });
    if let Some(burst) = burst {
        bucket["one_time_burst"] = burst.into();
    }
    bucket
}

/// The limiter of a disk. Firecracker's buckets count both directions together, as [`Throttle`] does.
fn limiter(throttle: Throttle) -> Value {
    json!({
        "bandwidth": bucket(throttle.bytes.max(LARGEST_OPERATION), throttle.bytes, None),
        "ops": bucket(throttle.operations.max(1), throttle.operations, None),
    })
}

/// Words every kernel is started with, each for a reason: `console` is where the keeper listens, `quiet` because each
/// character is an exit; `panic=-1` and `reboot=k` make a panic and a restart the end of the process; the keyboard
/// controller's words spare its probing, tens of milliseconds; no bounce buffers, no self-tests of ciphers. `nomodule`,
/// which Firecracker puts into its own default line, is not here: the guest's drivers are modules.
const KERNEL_WORDS: [&str; 9] = [
    "console=ttyS0",
    "quiet",
    "panic=-1",
    "reboot=k",
    "i8042.noaux",
    "i8042.nomux",
    "i8042.dumbkbd",
    "swiotlb=noforce",
    "cryptomgr.notests",
];

/// The kernel's command line. Never a secret in it: Firecracker logs bodies.
fn kernel_line(boot: &Boot) -> String {
    let words = KERNEL_WORDS.iter().copied().chain(boot.arguments.iter().map(String::as_str));
    words.collect::<Vec<_>>().join(" ")
}

/// What an exit code means where it is not plain.
pub fn meaning(code: i32) -> Option<&'static str> {
    Some(match code {
        148 => "a system call that its filter forbids",
        149 => "a bus error: host memory or a file's end",
        150 => "a segmentation fault",
        151 => "a file over its size limit",
        152 => "a bad configuration file",
        153 => "bad arguments",
        154 => "processor time over its limit",
        156 => "a hang-up",
        157 => "an illegal instruction",
        _ => return None,
    })
}

/// The guest's memory, as its balloon driver reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct GuestMemory {
    /// All of it, bytes.
    pub total_bytes: u64,
    /// Used for nothing, bytes.
    pub free_bytes: u64,
    /// What programs could have without swapping, bytes.
    pub available_bytes: u64,
    /// Of files, bytes.
    pub cached_bytes: u64,
    /// Programs the guest's kernel killed for memory.
    pub oom_kills: u64,
}

impl GuestMemory {
    /// Out of an answer to [`statistics`]. `None` until the guest's driver has reported once. Its numbers are the guest's
    /// claims.
    pub fn read(answer: &Value) -> Option<Self> {
        let number = |name: &str| answer.get(name).and_then(Value::as_u64);
        Some(GuestMemory {
            total_bytes: number("total_memory")?,
            free_bytes: number("free_memory").unwrap_or(0),
            available_bytes: number("available_memory").unwrap_or(0),
            cached_bytes: number("disk_caches").unwrap_or(0),
            oom_kills: number("oom_kill").unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests;
