//! The machine's face to programs: its root, its pseudo file systems, its name and end.
//!
//! Everything here acts on the machine, so it is called in a guest only (`Effects::Pid1`): by `init` before there is an
//! agent, by `agent` for Activate and Shutdown. Synchronous.
//!
//! ```text
//!   /dev/vda  erofs, read-only: the Image      -- lower --.
//!   /dev/vdb  ext4: scratch, dies with the VM  -- upper --'-> overlay, moved onto /
//!                    '-- /tmp is bound straight from it
//! ```

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_move, unmount};

use crate::clock::Clock;
use crate::sys;
use crate::tree;

/// An error with what was tried.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Error {
    what: String,
    source: io::Error,
}

fn tried<T, E: Into<io::Error>>(what: impl Into<String>, result: Result<T, E>) -> Result<T, Error> {
    result.map_err(|source| Error { what: what.into(), source: source.into() })
}

fn directory(path: &str, mode: u32) -> Result<(), Error> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => tried(format!("make {path}"), Err(error)),
        _ => tried(format!("mode of {path}"), fs::set_permissions(path, fs::Permissions::from_mode(mode))),
    }
}

fn attach(kind: &str, path: &str, flags: MountFlags, data: &str) -> Result<(), Error> {
    let data = std::ffi::CString::new(data).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let data = tried(format!("mount {path}"), data)?;
    tried(format!("mount {kind} on {path}"), mount(kind, path, kind, flags, Some(data.as_c_str())))
}

/// `/proc`, `/sys` and `/dev` of the initramfs: enough to find devices.
pub fn first() -> Result<(), Error> {
    let quiet = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    for path in ["/proc", "/sys", "/dev"] {
        directory(path, 0o755)?;
    }
    attach("devtmpfs", "/dev", MountFlags::NOSUID, "mode=0755")?;
    attach("proc", "/proc", quiet, "")?;
    attach("sysfs", "/sys", quiet, "")
}

/// Puts the overlay of scratch over Image together at `/root-new`, and the pseudo file systems into it.
pub fn root() -> Result<(), Error> {
    for path in ["/image", "/scratch", "/root-new"] {
        directory(path, 0o755)?;
    }
    let image = mount("/dev/vda", "/image", "erofs", MountFlags::RDONLY | MountFlags::NODEV, None);
    tried("mount the image /dev/vda", image)?;
    // Nothing on scratch outlives the machine: no barriers, and below no syncs.
    let scratch = mount(
        "/dev/vdb",
        "/scratch",
        "ext4",
        MountFlags::NOATIME | MountFlags::NODEV,
        Some(c"barrier=0,noauto_da_alloc"),
    );
    tried("mount scratch /dev/vdb", scratch)?;
    directory("/scratch/upper", 0o755)?;
    directory("/scratch/work", 0o755)?;
    directory("/scratch/tmp", 0o1777)?;
    let layers = "lowerdir=/image,upperdir=/scratch/upper,workdir=/scratch/work,volatile,redirect_dir=on";
    attach("overlay", "/root-new", MountFlags::NODEV, layers)?;
    for (path, mode) in [("/proc", 0o555), ("/sys", 0o555), ("/dev", 0o755), ("/run", 0o755), ("/tmp", 0o1777)] {
        let path = format!("/root-new{path}");
        if !Path::new(&path).is_dir() {
            directory(&path, mode)?;
        }
    }
    for path in ["/proc", "/sys", "/dev"] {
        tried(format!("move {path}"), mount_move(path, format!("/root-new{path}").as_str()))?;
    }
    tried("bind /tmp", mount_bind("/scratch/tmp", "/root-new/tmp"))?;
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    attach("tmpfs", "/root-new/run", plain, "mode=0755,size=25%")?;
    directory("/root-new/run/lock", 0o1777)?;
    directory("/root-new/dev/pts", 0o755)?;
    directory("/root-new/dev/shm", 0o1777)?;
    attach("devpts", "/root-new/dev/pts", MountFlags::NOSUID | MountFlags::NOEXEC, "gid=5,mode=620,ptmxmode=666")?;
    attach("tmpfs", "/root-new/dev/shm", plain, "mode=1777,size=50%")?;
    let quiet = plain | MountFlags::NOEXEC;
    attach("cgroup2", "/root-new/sys/fs/cgroup", quiet, "")
}

/// Makes `/root-new` the root, and frees what the initramfs held.
pub fn switch() -> Result<(), Error> {
    // Programs' text that is in use stays until it is not: only the names go.
    for entry in fs::read_dir("/modules").into_iter().flatten().flatten() {
        // Memory not freed here is memory the guest does not have; it works all the same.
        let _ = fs::remove_file(entry.path());
    }
    let _ = fs::remove_file("/init");
    tried("enter the new root", rustix::process::chdir("/root-new"))?;
    tried("move the new root", mount_move(".", "/"))?;
    tried("change the root", rustix::process::chroot("."))?;
    tried("enter the root", rustix::process::chdir("/"))
}

/// Files that Activate changes.
const CHANGED: [&str; 2] = ["/etc/hostname", "/etc/hosts"];

/// Has the files that will be changed copied up from the Image. What fails here fails there again, and is told there.
pub fn copy_up() {
    let quiet = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    for path in CHANGED {
        drop(rustix::fs::open(path, OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW | quiet, Mode::empty()));
    }
}

/// The parts of `/dev` that programs expect, and the kernel's settings. What fails here is told and lived with.
pub fn furnish() -> Vec<Error> {
    let mut faults = vec![];
    let mut note = |result: Result<(), Error>| faults.extend(result.err());
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        match symlink(target, format!("/dev/{name}")) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                note(tried(format!("link /dev/{name}"), Err(error)));
            }
            _ => {}
        }
    }
    for device in ["/dev/fuse", "/dev/net/tun"] {
        if Path::new(device).exists() {
            note(tried(format!("mode of {device}"), fs::set_permissions(device, fs::Permissions::from_mode(0o666))));
        }
    }
    note(tried("loopback", sys::link_up("lo")));
    for (name, value) in [
        // What a desktop has: editors, bundlers, browsers.
        ("fs/inotify/max_user_watches", "1048576"),
        ("fs/inotify/max_user_instances", "1024"),
        ("fs/file-max", "1048576"),
        ("vm/max_map_count", "1048576"),
        ("net/ipv4/ping_group_range", "0 2147483647"),
        ("net/ipv4/ip_unprivileged_port_start", "0"),
        ("net/core/somaxconn", "4096"),
        // A kernel that has gone wrong ends, and its host sees it.
        ("kernel/panic_on_oops", "1"),
        ("kernel/panic", "-1"),
    ] {
        note(tried(format!("setting {name}"), fs::write(format!("/proc/sys/{name}"), value)));
    }
    // Debian's switch; other kernels always allow it.
    let switch = "/proc/sys/kernel/unprivileged_userns_clone";
    if Path::new(switch).exists() {
        note(tried("setting unprivileged_userns_clone", fs::write(switch, "1")));
    }
    faults
}

/// The commands' control group and everybody's limits: before there is an agent. What fails here is told and lived with.
pub fn limit() -> Vec<Error> {
    [groups(), limits()].into_iter().filter_map(Result::err).collect()
}

/// The group of all commands, with room left for the agent.
fn groups() -> Result<(), Error> {
    let top = "/sys/fs/cgroup";
    let offered = tried("read controllers", fs::read_to_string(format!("{top}/cgroup.controllers")))?;
    directory(tree::COMMANDS, 0o755)?;
    for controller in ["cpu", "memory", "pids"] {
        if offered.split_ascii_whitespace().any(|name| name == controller) {
            for group in [top, tree::COMMANDS] {
                let file = format!("{group}/cgroup.subtree_control");
                tried(format!("enable {controller} in {group}"), fs::write(file, format!("+{controller}")))?;
            }
        }
    }
    let number = |path: &str| fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    // What was used within the last second is not taken away: a machine that cannot keep even that has a program killed
    // at once, instead of reading its programs from disk over and over (measured: 3 s against more than a minute, in
    // which nothing else answers).
    let keeps = fs::write("/sys/kernel/mm/lru_gen/enabled", "y")
        .and_then(|()| fs::write("/sys/kernel/mm/lru_gen/min_ttl_ms", "1000"));
    if keeps.is_err() {
        // A kernel without that: a limit that leaves room for the rest.
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let free = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
        let free = free.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10;
        let most = (free - free / 4).to_string();
        tried("limit the commands' memory", fs::write(format!("{}/memory.max", tree::COMMANDS), most))?;
    }
    if let Some(threads) = number("/proc/sys/kernel/threads-max") {
        let most = (threads * 3 / 4).min(30_000).to_string();
        tried("limit the commands' processes", fs::write(format!("{}/pids.max", tree::COMMANDS), most))?;
    }
    Ok(())
}

fn limits() -> Result<(), Error> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = |current, maximum| Rlimit { current: Some(current), maximum: Some(maximum) };
    // Hard: a desktop's. Soft: enough for nearly all, and few enough for programs that close every possible descriptor.
    tried("limit of files", setrlimit(Resource::Nofile, limit(65_536, 1 << 20)))?;
    tried("limit of locked memory", setrlimit(Resource::Memlock, limit(8 << 20, 64 << 20)))?;
    tried("limit of processes", setrlimit(Resource::Nproc, Rlimit { current: None, maximum: None }))?;
    tried("limit of core files", setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: None }))
}

/// Activate: name, clock and entropy. [`tell_name`] follows.
///
/// # Errors
/// Where one of them cannot be set.
pub fn become_sandbox(hostname: &str, clock: &Clock, unix_ns: u64, entropy: &[u8]) -> Result<(), Error> {
    tried("set the host name", rustix::system::sethostname(hostname.as_bytes()))?;
    tried("set the clock", clock.set(i64::try_from(unix_ns).unwrap_or(i64::MAX)))?;
    if !entropy.is_empty() {
        let random = tried("open /dev/random", fs::File::open("/dev/random"))?;
        tried("seed the random generator", sys::add_entropy(random.as_fd(), entropy))?;
    }
    Ok(())
}

/// Writes the name into the files that tell it. Those of the Image that cannot be written are its own affair.
pub fn tell_name(hostname: &str) {
    let _ = fs::write("/etc/hostname", format!("{hostname}\n"));
    let hosts = fs::OpenOptions::new().append(true).create(true).open("/etc/hosts");
    let _ = hosts.and_then(|mut hosts| hosts.write_all(format!("127.0.1.1 {hostname}\n").as_bytes()));
}

/// Brings the files that tell who a machine is to where only the name is missing: on the scratch disk, and not in the
/// Image, from where they would be copied first. Whether that is done; the machine's own id needs random bytes.
pub fn ready_identity() -> bool {
    let _ = fs::read("/etc/hostname").and_then(|name| fs::write("/etc/hostname", name));
    let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    let loopback = match hosts.contains("127.0.0.1") {
        true => "",
        false => "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
    };
    let _ = fs::write("/etc/hosts", format!("{loopback}{}\n", hosts.trim_end()));
    if fs::metadata("/etc/machine-id").is_ok_and(|id| id.len() >= 32) {
        return true;
    }
    let mut bytes = [0; 16];
    if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK).is_err() {
        return false;
    }
    let id: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let _ = fs::write("/etc/machine-id", format!("{id}\n"));
    true
}

/// Whether any command has a process.
pub fn has_processes() -> bool {
    fs::read_to_string(format!("{}/cgroup.events", tree::COMMANDS)).is_ok_and(|text| text.contains("populated 1"))
}

/// Flushes and unmounts the file systems that outlast the machine: all but its own root, scratch and memory.
pub fn flush() {
    const OWN: [&str; 9] = ["overlay", "ext4", "erofs", "proc", "sysfs", "devtmpfs", "tmpfs", "devpts", "cgroup2"];
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for line in mounts.lines().rev() {
        let mut fields = line.split(' ').skip(1);
        let (Some(path), Some(kind)) = (fields.next(), fields.next()) else {
            continue;
        };
        if !OWN.contains(&kind) {
            if let Ok(root) =
                rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            {
                // What cannot be flushed now has nobody left to be told.
                let _ = rustix::fs::syncfs(&root);
            }
            let _ = unmount(path, UnmountFlags::DETACH);
        }
    }
}

/// The end of the machine. Both VMMs take a restart for the end.
pub fn power_off() {
    // Where it is refused there is nothing left to try: the host has a deadline.
    let _ = rustix::system::reboot(rustix::system::RebootCommand::Restart);
}
