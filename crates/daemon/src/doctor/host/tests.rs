//! Hosts as trees of files.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

const UIDS: std::ops::RangeInclusive<u32> = 0x7000_0000..=0x7FFD_FFFF;
const LOAD: Load = Load { sandboxes: 200, threads: 140, files: 256 };

/// A tree with these files in it.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new(files: &[(&str, &str)]) -> Self {
        let tree = Tree(tempfile::tempdir().unwrap());
        for (path, text) in files {
            let path = tree.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        tree
    }

    fn root(&self) -> Root {
        Root(self.0.path().to_owned())
    }
}

/// A host on which nothing is wrong.
const GOOD: &[(&str, &str)] = &[
    ("proc/sys/kernel/osrelease", "6.1.0-57-amd64"),
    ("proc/sys/kernel/pid_max", "4194304"),
    ("proc/sys/kernel/threads-max", "1000000"),
    ("proc/sys/fs/file-max", "9223372036854775807"),
    ("proc/sys/kernel/core_pattern", "core"),
    ("proc/sys/vm/overcommit_memory", "0"),
    ("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/vda quiet"),
    ("proc/cpuinfo", "processor : 0\nflags : fpu vmx"),
    ("proc/swaps", "Filename Type Size Used Priority"),
    ("proc/modules", "kvm_intel 1 0 - Live 0x0\nkvm 1 1 kvm_intel, Live 0x0"),
    ("proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,favordynmods 0 0"),
    ("proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/vda rw"),
    ("sys/devices/system/cpu/cpu0/microcode/version", "0x2b"),
    ("sys/devices/system/cpu/cpu1/microcode/version", "0x2b"),
    ("sys/devices/system/cpu/cpufreq/ignored", "x"),
    ("sys/devices/system/cpu/vulnerabilities/meltdown", "Not affected"),
    ("sys/devices/system/cpu/vulnerabilities/itlb_multihit", "KVM: Mitigation: Split huge pages"),
    ("sys/module/kvm/parameters/nx_huge_pages", "Y"),
    ("sys/devices/system/cpu/smt/active", "0"),
    ("sys/kernel/mm/ksm/run", "0"),
    ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc"),
    ("etc/subuid", "somebody:100000:65536"),
    ("etc/passwd", "root:x:0:0:root:/root:/bin/bash"),
];

fn found(changes: &[(&str, &str)], purpose: Purpose) -> Vec<Check> {
    let files: Vec<_> = GOOD.iter().chain(changes).copied().collect();
    all(&Tree::new(&files).root(), purpose, LOAD, UIDS)
}

#[test]
fn a_good_host_has_no_fault() {
    for purpose in [Purpose::Production, Purpose::Development] {
        let checks = found(&[], purpose);
        let bad: Vec<_> = checks.iter().filter(|check| check.severity != Severity::Ok).collect();
        assert!(bad.is_empty() && checks.len() >= 11, "{checks:#?}");
        let mut names: Vec<_> = checks.iter().map(|check| &check.name).collect();
        names.dedup();
        assert_eq!(names.len(), checks.len());
    }
}

#[test]
fn each_weakness_is_seen_weighed_and_has_a_fix() {
    use Severity::{Error, Info, Warning};
    let cpu = "sys/devices/system/cpu";
    let vulnerable = format!("{cpu}/vulnerabilities/mds");
    let multihit = format!("{cpu}/vulnerabilities/itlb_multihit");
    // Where, what is there; the probe that tells, its weight in production and in development, what the fix names.
    type Fault<'a> = (&'a str, &'a str, &'a str, Severity, Option<Severity>, &'a str);
    let faults: &[Fault<'_>] = &[
        ("proc/sys/kernel/osrelease", "5.4.0-1", "kernel", Error, Some(Error), "5.10"),
        (&vulnerable, "Vulnerable: no microcode", "cpu", Error, Some(Warning), "microcode"),
        (&vulnerable, "Mitigation: Clear; SMT vulnerable", "cpu", Warning, Some(Warning), "smt/control"),
        ("proc/cmdline", "quiet mitigations=off", "mitigations", Error, Some(Warning), "boot loader"),
        ("proc/cmdline", "quiet nopti mds=off", "mitigations", Error, Some(Warning), "boot loader"),
        ("sys/devices/system/cpu/smt/active", "1", "smt", Warning, Some(Info), "smt/control"),
        ("sys/kernel/mm/ksm/run", "1", "ksm", Error, Some(Warning), "echo 2"),
        ("proc/swaps", "Filename\n/dev/dm-1 partition 1 0 -2", "swap", Warning, Some(Warning), "swapoff"),
        ("proc/sys/kernel/core_pattern", "|/usr/bin/crash %p", "core_dumps", Warning, Some(Warning), "core_pattern"),
        ("proc/sys/vm/overcommit_memory", "2", "overcommit", Warning, Some(Warning), "vm.overcommit_memory=0"),
        ("etc/subuid", "lxd:1000000:3000000000", "uid_overlap", Error, Some(Error), "subuid"),
        ("etc/subgid", "x:1879048192:1", "uid_overlap", Error, Some(Error), "subgid"),
        ("etc/passwd", "odd:x:1879048200:0::/:/bin/sh", "uid_overlap", Error, Some(Error), "others"),
        ("proc/sys/kernel/pid_max", "32768", "limits", Warning, Some(Warning), "kernel.pid_max=38000"),
        (
            "sys/devices/system/clocksource/clocksource0/current_clocksource",
            "hpet",
            "clock_source",
            Warning,
            Some(Warning),
            "tsc",
        ),
        ("sys/devices/system/cpu/cpu1/microcode/version", "0x2a", "microcode", Warning, Some(Warning), "microcode"),
        ("proc/cpuinfo", "flags : fpu vmx hypervisor", "nested", Warning, None, "metal"),
        ("sys/module/kvm/parameters/nx_huge_pages", "never", "nx_huge_pages", Error, None, "echo auto"),
        (&multihit, "Not affected", "nx_huge_pages", Info, None, "never"),
        ("proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0", "nx_huge_pages", Info, None, "favordynmods"),
        ("proc/modules", "vboxdrv 1 0 - Live 0x0", "rivals", Error, None, "modprobe -r vboxdrv"),
        ("proc/cmdline", "console=ttyS0", "console", Info, None, "quiet"),
    ];
    for (path, text, name, production, development, fix) in faults {
        for (purpose, severity) in [(Purpose::Production, &Some(*production)), (Purpose::Development, development)] {
            let checks = found(&[(path, text)], purpose);
            let bad: Vec<_> = checks.iter().filter(|check| check.severity != Severity::Ok).collect();
            match (severity, &bad[..]) {
                (Some(severity), [one]) => {
                    assert_eq!((&*one.name, one.severity), (*name, *severity), "{path} {text}");
                    assert!(one.fix.as_ref().is_some_and(|told| told.contains(fix)), "{one:?}");
                }
                (None, []) => {}
                _ => panic!("{path} {text}: {bad:#?}"),
            }
        }
    }
}

#[test]
fn a_host_that_tells_nothing_is_no_failure_of_ours() {
    let empty = Tree::new(&[("proc/sys/kernel/osrelease", "6.12.1")]);
    let checks = all(&empty.root(), Purpose::Production, LOAD, UIDS);
    assert!(checks.iter().all(|check| check.severity < Severity::Warning), "{checks:#?}");
    let many: String = (0..200).map(|n| format!("{n} 0 8:1 / /m{n} rw - ext4 x rw\n")).collect();
    let mounts = mounts(&Tree::new(&[("proc/self/mountinfo", &many)]).root());
    assert!(mounts.severity == Severity::Warning && mounts.found.contains("200"), "{mounts:?}");
}

#[test]
fn the_place_of_jails_is_looked_at_up_to_the_root() {
    let tree = Tree::new(&[
        ("proc/self/mountinfo", "1 0 8:1 / / rw - ext4 x rw\n2 1 8:2 / /srv rw,noexec - ext4 y rw"),
        ("srv/pepo/state/x", ""),
        ("var/pepo/state/x", ""),
    ]);
    fs::set_permissions(tree.0.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let look = |path: &str| place(&tree.root(), Path::new(path));
    assert_eq!(look("/var/pepo/state").severity, Severity::Ok);
    assert_eq!(look("/var/none/yet").severity, Severity::Ok);
    let noexec = look("/srv/pepo/state");
    assert!(noexec.severity == Severity::Error && noexec.fix.unwrap().contains("remount,exec /srv"));
    fs::set_permissions(tree.0.path().join("var/pepo"), fs::Permissions::from_mode(0o777)).unwrap();
    let open = look("/var/pepo/state");
    assert!(open.severity == Severity::Error && open.fix.unwrap().contains("go-w /var/pepo"));
    fs::set_permissions(tree.0.path().join("var/pepo"), fs::Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(look("/var/pepo/state").severity, Severity::Ok, "a sticky directory lets nobody replace another's");
}

/// A VMM of that pid and its threads, as the kernel shows them.
fn vmm(tree: &Tree, pid: u32, threads: &[(&str, &str, &str, &str)], out: &str) {
    let status = |seccomp: &str, filters: &str, rights: &str| {
        format!(
            "Name:\tfirecracker\nUid:\t1879048193\t1879048193\nCapPrm:\t{rights}\nCapEff:\t{rights}\nCapBnd:\t{rights}\nNoNewPrivs:\t1\nSeccomp:\t{seccomp}\nSeccomp_filters:\t{filters}\n"
        )
    };
    let proc = tree.0.path().join(format!("proc/{pid}"));
    for (task, seccomp, filters, rights) in threads {
        let directory = proc.join("task").join(task);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("status"), status(seccomp, filters, rights)).unwrap();
        fs::write(proc.join("status"), status(seccomp, filters, rights)).unwrap();
    }
    fs::create_dir_all(proc.join("fd")).unwrap();
    symlink(out, proc.join("fd/1")).unwrap();
    symlink("pipe:[7]", proc.join("fd/2")).unwrap();
}

#[test]
fn running_vmms_are_looked_at_thread_by_thread() {
    const NONE: &str = "0000000000000000";
    let look = |threads: &[(&str, &str, &str, &str)], out: &str| {
        let tree = Tree::new(&[("proc/9/status", "Name:\tbash\nUid:\t0")]);
        vmm(&tree, 77, threads, out);
        running(&tree.root(), UIDS).unwrap()
    };
    let good = look(&[("77", "2", "2", NONE), ("78", "2", "3", NONE)], "socket:[1]");
    assert!(good.severity == Severity::Ok && good.found.starts_with("1 VMMs"), "{good:?}");
    for (threads, out, wanted) in [
        (
            &[("77", "2", "2", NONE), ("78", "0", "0", NONE)],
            "socket:[1]",
            "thread 78 of firecracker 77 lacks a system call filter",
        ),
        (&[("77", "2", "2", NONE), ("78", "2", "1", NONE)], "socket:[1]", "thread 78 of firecracker 77 lacks"),
        (
            &[("77", "2", "2", "0000000000000001"), ("78", "2", "2", NONE)],
            "socket:[1]",
            "thread 77 of firecracker 77 has rights",
        ),
        (&[("77", "2", "2", NONE), ("78", "2", "2", NONE)], "/var/log/vmm", "writes to /var/log/vmm without end"),
    ] {
        let bad = look(threads, out);
        assert!(bad.severity == Severity::Error && bad.found.contains(wanted), "{bad:?}");
    }
    assert!(running(&Tree::new(&[("proc/9/status", "Name:\tfirecracker\nUid:\t0")]).root(), UIDS).is_none());
}
