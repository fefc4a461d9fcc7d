//! What is well and what is wrong on this host, as findings with what to do about each.
//!
//! [`host`] reads the host's files; this module asks what no file tells. Two vantage points: [`root`] sees what takes rights and is looked at once, before pepod gives its rights up; [`anybody`]
//! is looked at again each time. `pepod doctor` without a daemon does both.

use std::collections::BTreeMap;
use std::path::Path;

use pepo_api::{Check, SandboxId, SetupState, Severity};
use pepo_sandbox::cgroup::Hierarchies;
use pepo_sandbox::vmm::closure;
use pepo_sandbox::vmm::probe::{Choice, Hardware};
use pepo_sandbox::{Vmm, chain, registry, sys};

use self::host::{Purpose, Root};
use crate::capacity::{Budget, Load, OVERHEAD_MIB};
use crate::config::{Config, NetworkUse, PoolShape, SandboxConfig, VmmChoice, cores};
use crate::{accounts, pool, setup};

pub mod host;
pub mod measure;

/// Descriptors that a hundred Sandboxes with their callers need.
const NOFILE: u64 = 4096;

/// Free room below which the first full scratch disk is the end, MiB.
const ROOM_MIB: u64 = 4096;

/// Free files below which building and jails soon fail.
const ROOM_FILES: u64 = 10_000;

fn check(name: &str, severity: Severity, found: impl Into<String>) -> Check {
    Check { name: name.into(), severity, found: found.into(), fix: None }
}

fn wrong(name: &str, severity: Severity, found: impl Into<String>, fix: impl Into<String>) -> Check {
    Check { fix: Some(fix.into()), ..check(name, severity, found) }
}

/// What was found out about hardware and programs before anything is started.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Whether hardware virtualization really works.
    pub hardware: Hardware,
    /// What runs the guests, and why that.
    pub choice: Choice,
}

/// What takes rights to see.
pub fn root(config: &Config, seen: &Seen) -> Vec<Check> {
    let mut checks = vec![rights()];
    checks.extend(vmm(config, seen));
    checks.push(cgroups());
    checks.push(uids());
    let files = Root("/".into());
    let purpose = match seen.choice.vmm {
        Vmm::Firecracker => Purpose::Production,
        _ => Purpose::Development,
    };
    let threads = seen.choice.vmm.caps().threads + u64::from(config.sandbox.cpus);
    let load = host::Load { sandboxes: config.sandbox.budget.places, threads, files: FILES_EACH };
    checks.extend(host::all(&files, purpose, load, registry::FIRST_UID..=registry::LAST_UID));
    checks.push(host::place(&files, &config.places.state));
    checks.push(clock());
    checks
}

/// Open files of a Sandbox's processes together, on the host: VMM and device about 60, streams beside.
const FILES_EACH: u64 = 256;

fn clock() -> Check {
    match sys::clock_is_synchronized() {
        Ok(true) => check("clock", Severity::Ok, "kept right"),
        Ok(false) => wrong(
            "clock",
            Severity::Warning,
            "nobody keeps this host's clock right, and guests take theirs from it",
            "apt install chrony",
        ),
        Err(error) => check("clock", Severity::Info, format!("the kernel does not tell: {error}")),
    }
}

fn rights() -> Check {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask =
        status.lines().find_map(|line| line.strip_prefix("CapEff:")).map(str::trim).unwrap_or_default().to_owned();
    let held = u64::from_str_radix(&mask, 16).unwrap_or_default();
    let missing = pepo_sandbox::rights::HOST.bits() & !held;
    if rustix::process::geteuid().is_root() && missing == 0 {
        check("rights", Severity::Ok, "root, with every capability that the privileged side keeps")
    } else if rustix::process::geteuid().is_root() {
        wrong(
            "rights",
            Severity::Error,
            format!("root, but capabilities are missing (mask {missing:016x})"),
            "start pepod outside of this container, or give it the capabilities listed in SECURITY.md",
        )
    } else {
        wrong("rights", Severity::Error, "not root: Sandboxes cannot be started", "sudo pepo up")
    }
}

fn vmm(config: &Config, seen: &Seen) -> Vec<Check> {
    #[cfg(feature = "fake")]
    if config.sandbox.vmm == VmmChoice::Fake {
        return vec![check("vmm", Severity::Error, "a test build that runs guests as host processes")];
    }
    let virtualization = match (&seen.hardware, seen.choice.vmm) {
        (Hardware::Usable, Vmm::Firecracker) => check("virtualization", Severity::Ok, seen.hardware.to_string()),
        (Hardware::Usable, _) if config.sandbox.vmm == VmmChoice::Auto => {
            wrong("virtualization", Severity::Warning, &*seen.choice.reason, "sudo pepo setup")
        }
        (Hardware::Unusable(why), Vmm::Firecracker) => wrong(
            "virtualization",
            Severity::Error,
            format!("firecracker is asked for, although {why}"),
            "use a host with hardware virtualization, or leave sandbox.vmm at auto",
        ),
        _ => check("virtualization", Severity::Info, seen.hardware.to_string()),
    };
    let mut checks = vec![virtualization];
    checks.extend(match seen.choice.vmm {
        Vmm::Firecracker => firecracker(config),
        _ => emulation(config),
    });
    checks
}

/// The release's two programs: pinned, static, root's.
fn firecracker(config: &Config) -> Vec<Check> {
    let boundary = check("boundary", Severity::Ok, "each guest has hardware's boundary, and a jail around its VMM");
    let jailable = || {
        let directory = setup::installed(config)?;
        let sources = closure::Sources { firecracker: Some(directory), ..closure::Sources::default() };
        let jails = config.places.state.join("jail");
        closure::firecracker(&jails, &sources).map_err(|error| chain(&error))
    };
    let copy = match jailable() {
        Ok(copy) => copy,
        Err(why) => return vec![wrong("vmm", Severity::Error, why, "sudo pepo setup"), boundary],
    };
    let digest: String = copy.digest.chars().take(12).collect();
    let found = format!("firecracker and its jailer, static, as copied to {digest}");
    let vmm = match (&config.firecracker, setup::look(config)) {
        (None, report) if report.state == SetupState::Installed => {
            check("vmm", Severity::Ok, format!("{found}; {}", report.found))
        }
        (None, report) => wrong("vmm", Severity::Error, report.found, "sudo pepo setup"),
        (Some(own), _) => wrong(
            "vmm",
            Severity::Warning,
            format!(
                "{found}, from {}: whether it filters system calls as the release does is not known",
                own.display()
            ),
            "sudo pepo setup, and leave sandbox.firecracker empty",
        ),
    };
    vec![vmm, boundary]
}

fn emulation(config: &Config) -> Vec<Check> {
    let boundary = wrong(
        "boundary",
        Severity::Warning,
        "guests run in software emulation, which its authors do not call a security boundary: the jail around it is what holds",
        "for code that you have reason to fear, use a host with hardware virtualization",
    );
    let vmm = match closure::prepare(&config.places.state, &closure::Sources::default()) {
        Ok(programs) => {
            let short = |digest: &str| digest.chars().take(12).collect::<String>();
            let found = format!(
                "qemu {} with its closure {}, stream device with its closure {}",
                qemu_version(),
                short(&programs.qemu.digest),
                short(&programs.vsock_device.digest)
            );
            check("vmm", Severity::Ok, found)
        }
        Err(error) => wrong(
            "vmm",
            Severity::Error,
            chain(&error),
            "apt install qemu-system-x86; `make install` brings vhost-device-vsock",
        ),
    };
    vec![vmm, boundary]
}

fn qemu_version() -> String {
    let asked = std::process::Command::new("/usr/bin/qemu-system-x86_64").arg("--version").env_clear().output();
    let text = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.split_whitespace().nth(3).unwrap_or("of unknown version").to_owned()
}

fn cgroups() -> Check {
    match Hierarchies::detect() {
        Ok(found) if found.swap_is_capped() => {
            check("cgroup", Severity::Ok, format!("{}: cpu, memory and pids can be capped", found.describe()))
        }
        Ok(found) => wrong(
            "cgroup",
            Severity::Warning,
            format!("{}: without swap accounting a guest's memory can go to swap", found.describe()),
            "swapoff -a, or boot with swapaccount=1",
        ),
        Err(error) => {
            wrong("cgroup", Severity::Error, chain(&error), "mount cgroup v2, or hand the controllers down to pepod")
        }
    }
}

/// What stands between Sandboxes and the network.
pub fn network(config: &Config, guarded: &Result<(), String>) -> Vec<Check> {
    let mut checks = Vec::new();
    match guarded {
        Err(_) if config.network.uses == NetworkUse::Off => {
            checks.push(check("network", Severity::Info, "off by network.mode: Sandboxes have no network interface"));
            return checks;
        }
        Err(reason) => {
            checks.push(wrong(
                "network",
                Severity::Warning,
                format!("Sandboxes have no network interface: {reason}"),
                "install nftables, and let pepod use /dev/net/tun; or set network.mode = \"off\"",
            ));
            return checks;
        }
        Ok(()) => checks.push(check("network", Severity::Ok, "a namespace and two walls of nftables for each Sandbox")),
    }
    let tracked = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max").unwrap_or_default();
    if let Ok(most) = tracked.trim().parse::<u64>() {
        let each = u64::from(config.network.settings.limits.connections);
        let room = most / 2 / each.max(1);
        if room < config.sandbox.budget.places {
            let wanted = 2 * each * config.sandbox.budget.places;
            checks.push(wrong(
                "connections",
                Severity::Warning,
                format!("the kernel tracks {most} connections: room for {room} Sandboxes of {each}, half of it left to the host"),
                format!("sysctl -w net.netfilter.nf_conntrack_max={wanted}"),
            ));
        }
    }
    checks.extend(crate::network::floor::finding(&config.network.settings.floor));
    match pepo_sandbox::net::dropping_forward_chains() {
        Ok(chains) => checks.extend(chains.into_iter().map(|chain| {
            wrong(
                "forwarding",
                Severity::Warning,
                format!("the chain {chain} drops what is forwarded: Sandboxes reach nothing through it"),
                pepo_sandbox::net::forward_rules(&chain),
            )
        })),
        Err(reason) => {
            checks.push(check("forwarding", Severity::Info, format!("the host's other rules cannot be read: {reason}")))
        }
    }
    checks
}

fn uids() -> Check {
    match registry::leases() {
        Ok(leases) => {
            let alive = leases.iter().filter(|(_, holder)| *holder == registry::Holder::Alive).count();
            check("uid_range", Severity::Ok, format!("{alive} instances hold a block of uids on this host"))
        }
        Err(error) => wrong("uid_range", Severity::Error, chain(&error), "look at /run/pepo/instances"),
    }
}

/// What everybody can see, and what changes.
pub fn anybody(config: &Config) -> Vec<Check> {
    let mut checks = Vec::new();
    if cfg!(feature = "fake") {
        checks.push(wrong(
            "build",
            Severity::Error,
            "a test build: it can run guests as host processes",
            "install a release",
        ));
    }
    for name in [accounts::PEPO, accounts::EDGE] {
        checks.push(match accounts::find(name) {
            Ok(Some(account)) => check("user", Severity::Ok, format!("{name} is uid {}", account.uid)),
            Ok(None) => wrong(
                "user",
                Severity::Warning,
                format!("the system user {name} does not exist"),
                "`pepo up` as root makes it",
            ),
            Err(error) => wrong("user", Severity::Error, chain(&error), "look at /etc/passwd"),
        });
    }
    checks.push(agent(config));
    checks.push(room(&config.places.state));
    checks.push(nofile());
    checks.push(tools());
    checks
}

fn agent(config: &Config) -> Check {
    match crate::guest_agent(config) {
        Ok(path) => match crate::digest_of(&path) {
            Ok(digest) => check("guest_agent", Severity::Ok, format!("{} sha256:{digest}", path.display())),
            Err(error) => wrong(
                "guest_agent",
                Severity::Error,
                format!("{}: {error}", path.display()),
                "install pepo-guest beside pepod",
            ),
        },
        Err(error) => wrong(
            "guest_agent",
            Severity::Error,
            error.to_string(),
            "install pepo-guest beside pepod, or set PEPO_GUEST",
        ),
    }
}

fn room(state: &Path) -> Check {
    // The directory may not be there yet: the nearest one above tells the same disk.
    let there = state.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(there) {
        Ok(stat) => {
            let free_mib = stat.f_bavail.saturating_mul(stat.f_frsize) >> 20;
            let found = format!("{free_mib} MiB free for {}", state.display());
            if stat.f_files > 0 && stat.f_favail < ROOM_FILES {
                let found = format!("room for {} files below {}", stat.f_favail, state.display());
                wrong("disk", Severity::Warning, found, "remove files, or move the state to a larger file system")
            } else if free_mib < ROOM_MIB {
                let fix = format!(
                    "make room: an Image takes about 600 MiB, a scratch disk up to its size; {ROOM_MIB} MiB are advised"
                );
                wrong("disk", Severity::Warning, found, fix)
            } else {
                check("disk", Severity::Ok, found)
            }
        }
        Err(error) => wrong("disk", Severity::Error, format!("{}: {error}", there.display()), "look at the disk"),
    }
}

fn nofile() -> Check {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    match limit.maximum {
        Some(most) if most < NOFILE => wrong(
            "nofile",
            Severity::Warning,
            format!("at most {most} open files: fewer Sandboxes and callers at once"),
            format!("raise the hard limit to {NOFILE} (ulimit -Hn, or LimitNOFILE= in the unit)"),
        ),
        Some(most) => check("nofile", Severity::Ok, format!("up to {most} open files")),
        None => check("nofile", Severity::Ok, "no limit on open files"),
    }
}

fn tools() -> Check {
    let missing: Vec<_> = [("mmdebstrap", "mmdebstrap"), ("mkfs.erofs", "erofs-utils"), ("mkfs.ext4", "e2fsprogs")]
        .into_iter()
        .filter(|(program, _)| {
            !["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin"]
                .iter()
                .any(|dir| Path::new(dir).join(program).exists())
        })
        .collect();
    if missing.is_empty() {
        return check("tools", Severity::Ok, "mmdebstrap, mkfs.erofs and mkfs.ext4 are there");
    }
    let names: Vec<_> = missing.iter().map(|(program, _)| *program).collect();
    let packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
    wrong(
        "tools",
        Severity::Warning,
        format!("missing: {}", names.join(", ")),
        format!("apt install {}", packages.join(" ")),
    )
}

/// What Sandboxes use of what they may have together.
pub fn capacity(budget: &Budget, load: &Load) -> Check {
    let Load { places, memory_mib, cpus, disk_mib, spare, waiting } = load;
    let mut found = format!(
        "{places} of {} Sandboxes, {memory_mib} of {} MiB of memory, {cpus} of {} virtual processors, {disk_mib} of {} MiB of scratch disk",
        budget.places, budget.memory_mib, budget.cpus, budget.disk_mib
    );
    if *spare > 0 {
        found.push_str(&format!("; {spare} more in the pool"));
    }
    if *waiting == 0 {
        return check("capacity", Severity::Ok, found);
    }
    let fix = "end Sessions, or raise what [sandbox] gives where the host has more";
    wrong("capacity", Severity::Warning, format!("{found}; {waiting} requests wait for room"), fix)
}

/// How many Sandboxes of the usual shape there may be at once, and what keeps it from being more.
pub fn holds(sandbox: &SandboxConfig) -> Check {
    let SandboxConfig { cpus, memory_mib, disk_mib, budget, .. } = sandbox;
    let memory = u64::from(*memory_mib) + OVERHEAD_MIB;
    let each = [
        (budget.places, format!("sandbox.max, {}", budget.places)),
        (
            budget.memory_mib / memory,
            format!("sandbox.memory_budget, {} MiB, of which one takes {memory}", budget.memory_mib),
        ),
        (
            budget.cpus / u64::from(*cpus),
            format!("sandbox.cpu_overcommit, {} virtual processors on {} real ones", budget.cpus, cores()),
        ),
        (
            budget.disk_mib / u64::from(*disk_mib),
            format!("sandbox.disk_budget, {} MiB of scratch disks if all were full", budget.disk_mib),
        ),
    ];
    let shape = format!("{cpus} cpus, {memory_mib} MiB, {disk_mib} MiB of disk");
    match each.into_iter().min_by_key(|(count, _)| *count) {
        Some((count, limit)) if count > 0 => {
            check("sandboxes", Severity::Ok, format!("this host holds {count} of the usual shape ({shape}): {limit}"))
        }
        limit => wrong(
            "sandboxes",
            Severity::Error,
            format!(
                "this host holds none of the usual shape ({shape}): {}",
                limit.map(|(_, limit)| limit).unwrap_or_default()
            ),
            "make the usual shape smaller, or raise what is named",
        ),
    }
}

/// How much slower a loop runs inside than outside, where it was looked at.
pub fn slowdown(measured: Result<f64, String>) -> Check {
    match measured {
        Ok(ratio) => check(
            "slowdown",
            Severity::Ok,
            format!("a loop of arithmetic takes {ratio:.1} times as long inside as outside (measured)"),
        ),
        Err(why) => {
            check("slowdown", Severity::Info, format!("how much slower a loop runs inside was not measured: {why}"))
        }
    }
}

/// How each shape of the pool stands.
pub fn pool(shapes: &[pool::Status]) -> Vec<Check> {
    if shapes.is_empty() {
        return vec![check("pool", Severity::Info, "off: every Sandbox is made when it is asked for")];
    }
    let one = |status: &pool::Status| {
        let PoolShape { image, cpus, memory_mib, disk_mib, target, .. } = &status.wanted;
        let making = if status.making == 0 { String::new() } else { format!(", {} being made", status.making) };
        let found = format!(
            "{image} ({cpus} cpus, {memory_mib} MiB, {disk_mib} MiB of disk): {} of {target} ready{making}",
            status.ready
        );
        match &status.fault {
            None => check("pool", Severity::Ok, found),
            Some(fault) => wrong(
                "pool",
                Severity::Warning,
                format!("{found}: {fault}"),
                format!("build the Image (`pepo image build {image}`), or change [pool] in pepo.toml"),
            ),
        }
    };
    shapes.iter().map(one).collect()
}

/// Sandboxes that have not given everything back.
pub fn debts(owed: &BTreeMap<SandboxId, String>) -> Check {
    if owed.is_empty() {
        return check("leftovers", Severity::Ok, "no ended Sandbox holds anything");
    }
    let list: Vec<_> = owed.iter().map(|(id, what)| format!("{id}: {what}")).collect();
    wrong("leftovers", Severity::Warning, list.join("; "), "pepod goes on trying; `pepo sweep` tries now")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Typed;

    #[test]
    fn what_limits_the_number_of_sandboxes_is_named() {
        let holds = |flags: &[(&str, &str)]| {
            let flags = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            holds(&Config::read(&Typed { flags, ..Typed::default() }).expect("settings").sandbox).found
        };
        let roomy =
            [("sandbox.memory_budget", "1t"), ("sandbox.cpu_overcommit", "1024"), ("sandbox.disk_budget", "1t")];
        let with = |more: &[(&'static str, &'static str)]| [&roomy[..], more].concat();
        assert_eq!(
            holds(&with(&[("sandbox.max", "7")])),
            "this host holds 7 of the usual shape (1 cpus, 512 MiB, 2048 MiB of disk): sandbox.max, 7"
        );
        let memory = holds(&with(&[("sandbox.memory_budget", "2000")]));
        assert!(memory.starts_with("this host holds 3 ") && memory.contains("of which one takes 640"), "{memory}");
        let disk = holds(&with(&[("sandbox.disk_budget", "5g")]));
        assert!(disk.starts_with("this host holds 2 ") && disk.contains("sandbox.disk_budget"), "{disk}");
        let cpus = holds(&with(&[("sandbox.cpu_overcommit", "1"), ("sandbox.cpus", "64"), ("sandbox.max", "9")]));
        assert!(cpus.contains("holds none") || cores() >= 64, "{cpus}");
    }

    #[test]
    fn a_slowdown_is_a_number_or_a_reason() {
        assert!(slowdown(Ok(12.34)).found.contains("12.3 times as long inside"));
        let check = slowdown(Err("no daemon runs".into()));
        assert_eq!(check.severity, Severity::Info);
        assert!(check.found.ends_with("was not measured: no daemon runs"));
    }
}
