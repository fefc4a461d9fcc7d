//! What the host's own files say: probes that are functions of a root directory and of nothing else, so that they are
//! tested on trees of files.
//!
//! The list is the checklist that Firecracker's makers give for production hosts, and what Pepo's own design adds to it. A
//! host on which guests are emulated serves development: there a weakness is told and is no error.

use std::fs;
use std::path::{Path, PathBuf};

use pepo_api::{Check, Severity};

use super::{check, wrong};

/// What a host is for, which decides how much a weakness matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Guests run on hardware virtualization: it is the boundary, so what weakens it is an error.
    Production,
    /// Guests are emulated.
    Development,
}

impl Purpose {
    fn error(self) -> Severity {
        match self {
            Purpose::Production => Severity::Error,
            Purpose::Development => Severity::Warning,
        }
    }
}

/// A directory that is looked at as if it were `/`.
#[derive(Clone, Debug)]
pub struct Root(pub PathBuf);

impl Root {
    /// The text of a file, without the space around it; `None` where there is none.
    pub fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_owned())
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// Names in a directory, sorted.
    fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn words(&self, path: &str) -> Vec<String> {
        self.text(path).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    }
}

/// How many Sandboxes the host is to hold, and how large: for limits that are the host's.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Sandboxes at once.
    pub sandboxes: u64,
    /// Processes and threads of each.
    pub threads: u64,
    /// Open files of each.
    pub files: u64,
}

/// Every probe of this module.
pub fn all(root: &Root, purpose: Purpose, load: Load, uids: std::ops::RangeInclusive<u32>) -> Vec<Check> {
    let mut checks = vec![kernel(root), vulnerabilities(root, purpose), mitigations(root, purpose)];
    checks.extend([smt(root, purpose), ksm(root, purpose), swap(root), core_pattern(root), overcommit(root)]);
    checks.extend([subordinate_uids(root, uids.clone()), limits(root, load), clock_source(root)]);
    checks.extend(microcode(root));
    if purpose == Purpose::Production {
        checks.extend(nested(root));
        checks.extend(nx_huge_pages(root));
        checks.extend(rivals(root));
        checks.extend(console_noise(root));
        checks.push(mounts(root));
    }
    checks.extend(running(root, uids));
    checks
}

/// Kernels below this lack what the engine needs.
const LEAST_KERNEL: (u64, u64) = (5, 10);

/// Series that Firecracker's makers test on.
const TESTED: [(u64, u64); 3] = [(5, 10), (6, 1), (6, 18)];

fn kernel(root: &Root) -> Check {
    let release = root.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u64>().unwrap_or(0));
    let series = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if series < LEAST_KERNEL {
        return wrong("kernel", Severity::Error, format!("Linux {release}"), "boot Linux 5.10 or later");
    }
    if TESTED.contains(&series) {
        return check("kernel", Severity::Ok, format!("Linux {release}"));
    }
    check("kernel", Severity::Info, format!("Linux {release}, not a series that Firecracker's makers test on"))
}

fn microcode(root: &Root) -> Option<Check> {
    let cpus = "/sys/devices/system/cpu";
    let is_cpu = |name: &String| name.strip_prefix("cpu").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let versions = root.names(cpus).into_iter().filter(is_cpu);
    let mut versions: Vec<String> =
        versions.filter_map(|name| root.text(&format!("{cpus}/{name}/microcode/version"))).collect();
    versions.sort();
    versions.dedup();
    match &versions[..] {
        [] => None,
        [one] => Some(check("microcode", Severity::Ok, format!("revision {one} on every processor"))),
        more => Some(wrong(
            "microcode",
            Severity::Warning,
            format!("processors differ in their microcode: {}", more.join(", ")),
            "install the vendor's microcode package and restart, so that it is loaded early",
        )),
    }
}

fn vulnerabilities(root: &Root, purpose: Purpose) -> Check {
    let directory = "/sys/devices/system/cpu/vulnerabilities";
    let names = root.names(directory);
    if names.is_empty() {
        return check("cpu", Severity::Info, "the kernel does not tell its processor's vulnerabilities");
    }
    let state = |name: &String| root.text(&format!("{directory}/{name}")).unwrap_or_default();
    let open: Vec<_> = names.iter().filter(|name| state(name).starts_with("Vulnerable")).cloned().collect();
    let threads: Vec<_> = names.iter().filter(|name| state(name).contains("SMT vulnerable")).cloned().collect();
    if !open.is_empty() {
        return wrong(
            "cpu",
            purpose.error(),
            format!("vulnerable without mitigation: {}", open.join(", ")),
            "update kernel and microcode, and boot without mitigations=off",
        );
    }
    if !threads.is_empty() {
        return wrong(
            "cpu",
            Severity::Warning,
            format!("vulnerable between two threads of a core: {}", threads.join(", ")),
            "echo off | sudo tee /sys/devices/system/cpu/smt/control",
        );
    }
    check("cpu", Severity::Ok, format!("{} known vulnerabilities, none open", names.len()))
}

fn mitigations(root: &Root, purpose: Purpose) -> Check {
    const OFF: [&str; 10] = [
        "mitigations=off",
        "nopti",
        "nospectre_v1",
        "nospectre_v2",
        "spectre_v2=off",
        "spec_store_bypass_disable=off",
        "mds=off",
        "l1tf=off",
        "tsx_async_abort=off",
        "kvm-intel.vmentry_l1d_flush=never",
    ];
    let words = root.words("/proc/cmdline");
    let off: Vec<_> = words.iter().filter(|word| OFF.contains(&word.as_str())).cloned().collect();
    if off.is_empty() {
        return check("mitigations", Severity::Ok, "none is switched off on the kernel's command line");
    }
    let found = format!("switched off on the kernel's command line: {}", off.join(" "));
    wrong("mitigations", purpose.error(), found, "remove the words from the boot loader's configuration and restart")
}

fn smt(root: &Root, purpose: Purpose) -> Check {
    match root.text("/sys/devices/system/cpu/smt/active").as_deref() {
        Some("0") => check("smt", Severity::Ok, "one thread a core"),
        Some(_) => {
            let severity = if purpose == Purpose::Production { Severity::Warning } else { Severity::Info };
            let found = "two threads share a core: guests on both can learn of each other through it";
            wrong(
                "smt",
                severity,
                found,
                "echo off | sudo tee /sys/devices/system/cpu/smt/control; nosmt at boot keeps it so",
            )
        }
        None => check("smt", Severity::Info, "the kernel does not tell whether threads share a core"),
    }
}

fn ksm(root: &Root, purpose: Purpose) -> Check {
    match root.text("/sys/kernel/mm/ksm/run").as_deref() {
        None | Some("0" | "2") => check("ksm", Severity::Ok, "equal pages of memory are not merged"),
        Some(_) => {
            let found = "equal pages of memory are merged: a guest can tell by the time a write takes what others have";
            wrong("ksm", purpose.error(), found, "echo 2 | sudo tee /sys/kernel/mm/ksm/run")
        }
    }
}

fn swap(root: &Root) -> Check {
    let swaps = root.text("/proc/swaps").unwrap_or_default();
    let places: Vec<&str> = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    if places.is_empty() {
        return check("swap", Severity::Ok, "none");
    }
    // Device mapper is where an encrypted one would be; whether it is, is not told here.
    let found = format!("guests' memory may be written to {}", places.join(", "));
    wrong("swap", Severity::Warning, found, "sudo swapoff -a, or encrypt it")
}

fn core_pattern(root: &Root) -> Check {
    match root.text("/proc/sys/kernel/core_pattern") {
        Some(pattern) if pattern.starts_with('|') => wrong(
            "core_dumps",
            Severity::Warning,
            "a program gets the memory of whatever crashes, a guest's with it: limits do not hold for it",
            "sudo sysctl kernel.core_pattern=core",
        ),
        _ => check("core_dumps", Severity::Ok, "only to files, and none of Sandboxes"),
    }
}

fn overcommit(root: &Root) -> Check {
    match root.number("/proc/sys/vm/overcommit_memory") {
        Some(2) => wrong(
            "overcommit",
            Severity::Warning,
            "memory is not promised beyond what there is: guests take all of theirs from the promise at once",
            "sudo sysctl vm.overcommit_memory=0",
        ),
        _ => check("overcommit", Severity::Ok, "guests' memory counts when it is used"),
    }
}

fn subordinate_uids(root: &Root, ours: std::ops::RangeInclusive<u32>) -> Check {
    let mut taken = Vec::new();
    for file in ["/etc/subuid", "/etc/subgid"] {
        for line in root.text(file).unwrap_or_default().lines() {
            let mut fields = line.split(':');
            let (Some(who), Some(first), Some(count)) = (fields.next(), fields.next(), fields.next()) else { continue };
            let (Ok(first), Ok(count)) = (first.parse::<u64>(), count.parse::<u64>()) else { continue };
            let last = first.saturating_add(count).saturating_sub(1);
            if count > 0 && first <= u64::from(*ours.end()) && last >= u64::from(*ours.start()) {
                taken.push(format!("{who} ({file}: {first} to {last})"));
            }
        }
    }
    for line in root.text("/etc/passwd").unwrap_or_default().lines() {
        let mut fields = line.split(':');
        let (who, uid) = (fields.next().unwrap_or_default(), fields.nth(1).and_then(|uid| uid.parse::<u32>().ok()));
        if uid.is_some_and(|uid| ours.contains(&uid)) {
            taken.push(format!("{who} (/etc/passwd)"));
        }
    }
    let range = format!("{} to {}", ours.start(), ours.end());
    if taken.is_empty() {
        return check("uid_overlap", Severity::Ok, format!("uids {range} are nobody else's"));
    }
    wrong(
        "uid_overlap",
        Severity::Error,
        format!("uids {range} are Sandboxes', and given to {}", taken.join(", ")),
        "give them others: edit /etc/subuid and /etc/subgid (usermod --add-subuids)",
    )
}

fn limits(root: &Root, load: Load) -> Check {
    let mut short = Vec::new();
    let needs = [
        ("kernel.pid_max", "/proc/sys/kernel/pid_max", load.sandboxes * load.threads),
        ("kernel.threads-max", "/proc/sys/kernel/threads-max", load.sandboxes * load.threads),
        ("fs.file-max", "/proc/sys/fs/file-max", load.sandboxes * load.files),
    ];
    for (name, path, needed) in needs {
        // What the kernel chose leaves room for the host itself.
        let needed = needed.saturating_add(10_000);
        if root.number(path).is_some_and(|there| there < needed) {
            short.push(format!("{name}={needed}"));
        }
    }
    if short.is_empty() {
        return check("limits", Severity::Ok, format!("processes and files for {} Sandboxes", load.sandboxes));
    }
    let found = format!("too few processes or files for {} Sandboxes", load.sandboxes);
    wrong("limits", Severity::Warning, found, format!("sudo sysctl {}", short.join(" ")))
}

fn clock_source(root: &Root) -> Check {
    match root.text("/sys/devices/system/clocksource/clocksource0/current_clocksource") {
        Some(source) if ["tsc", "kvm-clock", "arch_sys_counter"].contains(&source.as_str()) => {
            check("clock_source", Severity::Ok, source)
        }
        Some(source) => wrong(
            "clock_source",
            Severity::Warning,
            format!("{source}: reading the time is slow, and guests' clocks follow it"),
            "echo tsc | sudo tee /sys/devices/system/clocksource/clocksource0/current_clocksource",
        ),
        None => check("clock_source", Severity::Info, "the kernel does not tell"),
    }
}

fn nested(root: &Root) -> Option<Check> {
    let cpuinfo = root.text("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "hypervisor").then(|| {
        wrong(
            "nested",
            Severity::Warning,
            "this host is a virtual machine: guests in it are slow, and Firecracker's makers do not support that for isolation",
            "use a machine of metal for strangers' code",
        )
    })
}

fn nx_huge_pages(root: &Root) -> Option<Check> {
    let affected = root.text("/sys/devices/system/cpu/vulnerabilities/itlb_multihit")?;
    let setting = root.text("/sys/module/kvm/parameters/nx_huge_pages")?;
    let on = ["Y", "1", "auto", "force", "on"].contains(&setting.as_str());
    match (affected.starts_with("Not affected"), on) {
        (true, true) => Some(wrong(
            "nx_huge_pages",
            Severity::Info,
            "guests pay for a mitigation that this processor does not need: each start takes tens of milliseconds more",
            "options kvm nx_huge_pages=never in /etc/modprobe.d/kvm.conf",
        )),
        (false, false) => Some(wrong(
            "nx_huge_pages",
            Severity::Error,
            "a guest can stop this processor: large executable pages are not split",
            "echo auto | sudo tee /sys/module/kvm/parameters/nx_huge_pages",
        )),
        (false, true) if !favours_moves(root) => Some(wrong(
            "nx_huge_pages",
            Severity::Info,
            "needed here, and it makes each start wait for control groups",
            "mount cgroup v2 with favordynmods (Linux 6.0 and later)",
        )),
        _ => Some(check("nx_huge_pages", Severity::Ok, format!("{setting}, as this processor needs"))),
    }
}

fn favours_moves(root: &Root) -> bool {
    let mounts = root.text("/proc/mounts").unwrap_or_default();
    mounts.lines().any(|line| {
        let fields: Vec<&str> = line.split(' ').collect();
        fields.get(2) == Some(&"cgroup2") && fields.get(3).is_some_and(|options| options.contains("favordynmods"))
    })
}

fn rivals(root: &Root) -> Option<Check> {
    let modules = root.text("/proc/modules").unwrap_or_default();
    let found: Vec<&str> = modules
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| ["vboxdrv", "vmmon", "kvm_pvm"].contains(name))
        .collect();
    (!found.is_empty()).then(|| {
        let what = format!("another hypervisor's driver is loaded: {}", found.join(", "));
        wrong("rivals", Severity::Error, what, format!("sudo modprobe -r {}", found.join(" ")))
    })
}

fn console_noise(root: &Root) -> Option<Check> {
    let words = root.words("/proc/cmdline");
    let serial = words.iter().any(|word| word.starts_with("console=ttyS"));
    let quiet = words.iter().any(|word| word == "quiet" || word.starts_with("loglevel="));
    (serial && !quiet).then(|| {
        let found = "the kernel writes each new network device to a serial console: starts take longer";
        wrong("console", Severity::Info, found, "boot with quiet loglevel=1")
    })
}

/// Mounts from which on jailers take noticeably longer.
const MANY_MOUNTS: usize = 100;

fn mounts(root: &Root) -> Check {
    let count = root.text("/proc/self/mountinfo").unwrap_or_default().lines().count();
    if count <= MANY_MOUNTS {
        return check("mounts", Severity::Ok, format!("{count}"));
    }
    let found = format!("{count} mounts: each start copies all of them");
    wrong("mounts", Severity::Warning, found, "run Pepo on a host of its own, or unmount what nobody needs (findmnt)")
}

/// Whether the place of jails is one in which they can be: nobody else's to replace, and programs run in it.
pub fn place(root: &Root, state: &Path) -> Check {
    use std::os::unix::fs::MetadataExt;
    let shown = state.display();
    for above in state.ancestors() {
        let Ok(stat) = fs::metadata(root.path(&above.to_string_lossy())) else { continue };
        let others = stat.mode() & 0o022 != 0 && stat.mode() & 0o1000 == 0;
        if others {
            let fix = format!("sudo chmod go-w {}", above.display());
            return wrong(
                "place",
                Severity::Error,
                format!("others may replace {shown}: {} is open", above.display()),
                fix,
            );
        }
    }
    let mountinfo = root.text("/proc/self/mountinfo").unwrap_or_default();
    let mount = mountinfo
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            Some((*fields.get(4)?, *fields.get(5)?))
        })
        .filter(|(place, _)| state.starts_with(place))
        .max_by_key(|(place, _)| place.len());
    match mount {
        Some((place, options)) if options.split(',').any(|option| option == "noexec") => wrong(
            "place",
            Severity::Error,
            format!("programs below {shown} cannot run: {place} is mounted noexec"),
            format!("sudo mount -o remount,exec {place}"),
        ),
        _ => check("place", Severity::Ok, format!("{shown} is root's alone, and programs run in it")),
    }
}

/// Every VMM that runs, by the kernel's account: system call filters live, no rights, nothing of the host's that its words
/// could fill.
fn running(root: &Root, uids: std::ops::RangeInclusive<u32>) -> Option<Check> {
    let mut seen = 0;
    let mut faults = Vec::new();
    for pid in root.names("/proc").into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) {
        let Some(status) = root.text(&format!("/proc/{pid}/status")) else { continue };
        let name = field(&status, "Name");
        let uid = field(&status, "Uid").split_whitespace().next().and_then(|uid| uid.parse::<u32>().ok());
        let vmm = name == "firecracker" || name.starts_with("qemu-system");
        if !vmm || !uid.is_some_and(|uid| uids.contains(&uid)) {
            continue;
        }
        seen += 1;
        faults.extend(root.names(&format!("/proc/{pid}/task")).into_iter().filter_map(|task| {
            let status = root.text(&format!("/proc/{pid}/task/{task}/status"))?;
            // Ours and its own: one alone proves nothing of the other.
            let filters = field(&status, "Seccomp_filters").parse::<u32>().unwrap_or(2);
            let good = field(&status, "Seccomp") == "2" && filters >= 2 && field(&status, "NoNewPrivs") == "1";
            let none = |set: &str| field(&status, set).bytes().all(|digit| digit == b'0');
            let fault = match (good, none("CapEff") && none("CapPrm") && none("CapBnd")) {
                (true, true) => return None,
                (false, _) => "lacks a system call filter",
                (true, false) => "has rights",
            };
            Some(format!("thread {task} of {name} {pid} {fault}"))
        }));
        for fd in ["1", "2"] {
            let to = fs::read_link(root.path(&format!("/proc/{pid}/fd/{fd}"))).unwrap_or_default();
            if to.is_absolute() && !to.ends_with("null") {
                faults.push(format!("{name} {pid} writes to {} without end", to.display()));
            }
        }
    }
    match (seen, &faults[..]) {
        (0, _) => None,
        (_, []) => Some(check(
            "running",
            Severity::Ok,
            format!("{seen} VMMs run, each thread behind two system call filters and without rights"),
        )),
        (_, faults) => Some(wrong(
            "running",
            Severity::Error,
            faults.iter().take(5).cloned().collect::<Vec<_>>().join("; "),
            "end those Sandboxes; install the release as `pepo setup` does",
        )),
    }
}

fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let named = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':').map(str::trim);
    status.lines().find_map(named).unwrap_or_default()
}

#[cfg(test)]
mod tests;
