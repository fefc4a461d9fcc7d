//! The program that is put in the place of a VMM or a stream device, to find out what its jail lets it do.
//!
//! `probe ATTEMPT` makes one attempt and prints one JSON line: `{"attempt": …, "result": N}` with what the kernel
//! answered (0 or more: it worked; below 0: minus errno). A jail that kills instead is seen from outside, which is why
//! there is one process per attempt. `probe list` names all attempts that are one system call; `probe look` tells what
//! the process sees; `probe wait` stays until its standard input ends, to be looked at.
//!
//! Every call is made so that it does no harm where nothing forbids it: with arguments the kernel refuses after it has
//! looked at them. So it can be run without a jail as well, and the attempts that a test relies on can be shown to reach
//! the kernel there.

use std::io::Read;
use std::process::ExitCode;

use libc::*;

/// Name, system call, arguments.
type Attempt = (&'static str, c_long, [c_long; 6]);

const BAD: c_long = -1;
/// An address nothing is mapped at.
const NOWHERE: c_long = 8;
/// Where a jail's launcher maps the path of the one program that may be executed.
const EXEC_PAGE: c_long = 0x10_0000;
const X32: c_long = 0x4000_0000;

/// System calls that are one attempt each.
#[rustfmt::skip]
const CALLS: &[Attempt] = &[
    // Kernel interfaces with a history.
    ("bpf",                SYS_bpf,                [BAD, 0, 0, 0, 0, 0]),
    ("userfaultfd",        SYS_userfaultfd,        [BAD, 0, 0, 0, 0, 0]),
    ("io_uring_setup",     SYS_io_uring_setup,     [1, NOWHERE, 0, 0, 0, 0]),
    ("io_uring_enter",     SYS_io_uring_enter,     [BAD, 0, 0, 0, 0, 0]),
    ("io_uring_register",  SYS_io_uring_register,  [BAD, 0, 0, 0, 0, 0]),
    ("perf_event_open",    SYS_perf_event_open,    [NOWHERE, 0, BAD, BAD, 0, 0]),
    ("memfd_secret",       SYS_memfd_secret,       [BAD, 0, 0, 0, 0, 0]),
    ("modify_ldt",         SYS_modify_ldt,         [17, 0, 0, 0, 0, 0]),
    ("personality",        SYS_personality,        [0xffff_ffff, 0, 0, 0, 0, 0]),
    ("vmsplice",           SYS_vmsplice,           [BAD, 0, 0, 0, 0, 0]),
    ("fanotify_init",      SYS_fanotify_init,      [BAD, 0, 0, 0, 0, 0]),
    ("inotify_init",       SYS_inotify_init1,      [BAD, 0, 0, 0, 0, 0]),
    // Keys.
    ("keyctl",             SYS_keyctl,             [BAD, 0, 0, 0, 0, 0]),
    ("add_key",            SYS_add_key,            [0, 0, 0, 0, 0, 0]),
    ("request_key",        SYS_request_key,        [0, 0, 0, 0, 0, 0]),
    // Other processes.
    ("ptrace",             SYS_ptrace,             [PTRACE_ATTACH as c_long, BAD, 0, 0, 0, 0]),
    ("process_vm_readv",   SYS_process_vm_readv,   [BAD, 0, 0, 0, 0, 0]),
    ("process_vm_writev",  SYS_process_vm_writev,  [BAD, 0, 0, 0, 0, 0]),
    ("process_madvise",    SYS_process_madvise,    [BAD, 0, 0, 0, 0, 0]),
    ("pidfd_open",         SYS_pidfd_open,         [1, 0, 0, 0, 0, 0]),
    ("pidfd_getfd",        SYS_pidfd_getfd,        [BAD, 0, 0, 0, 0, 0]),
    ("pidfd_send_signal",  SYS_pidfd_send_signal,  [BAD, 0, 0, 0, 0, 0]),
    ("kcmp",               SYS_kcmp,               [1, 1, 0, 0, 0, 0]),
    ("kill-init",          SYS_kill,               [1, 0, 0, 0, 0, 0]),
    ("kill-everyone",      SYS_kill,               [-1, 0, 0, 0, 0, 0]),
    ("tgkill-other",       SYS_tgkill,             [1, 1, 0, 0, 0, 0]),
    ("tkill",              SYS_tkill,              [1, 0, 0, 0, 0, 0]),
    ("rt_sigqueueinfo",    SYS_rt_sigqueueinfo,    [1, 0, NOWHERE, 0, 0, 0]),
    ("prlimit-other",      SYS_prlimit64,          [1, 7, 0, 0, 0, 0]),
    ("setpriority",        SYS_setpriority,        [BAD, 0, 0, 0, 0, 0]),
    ("sched_setscheduler", SYS_sched_setscheduler, [BAD, 0, 0, 0, 0, 0]),
    ("sched_setaffinity",  SYS_sched_setaffinity,  [BAD, 0, 0, 0, 0, 0]),
    ("ioprio_set",         SYS_ioprio_set,         [BAD, 0, 0, 0, 0, 0]),
    // New processes and programs.
    ("clone3",             SYS_clone3,             [NOWHERE, 64, 0, 0, 0, 0]),
    ("clone-process",      SYS_clone,              [CLONE_THREAD as c_long | SIGCHLD as c_long, 0, 0, 0, 0, 0]),
    ("clone-namespace",    SYS_clone,              [CLONE_NEWUSER as c_long | CLONE_FS as c_long, 0, 0, 0, 0, 0]),
    ("execve",             SYS_execve,             [NOWHERE, 0, 0, 0, 0, 0]),
    ("execve-exec-page",   SYS_execve,             [EXEC_PAGE, 0, 0, 0, 0, 0]),
    ("execveat",           SYS_execveat,           [BAD, NOWHERE, 0, 0, 0, 0]),
    ("mmap-exec-page",     SYS_mmap,               [EXEC_PAGE, 4096, PROT_READ as c_long, (MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED) as c_long, BAD, 0]),
    ("mmap-hint-low",      SYS_mmap,               [EXEC_PAGE, 4096, PROT_READ as c_long, (MAP_PRIVATE | MAP_ANONYMOUS) as c_long, BAD, 0]),
    ("mmap-zero",          SYS_mmap,               [0, 4096, PROT_READ as c_long, (MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED) as c_long, BAD, 0]),
    ("mmap-growing",       SYS_mmap,               [0, 4096, PROT_READ as c_long, (MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN) as c_long, BAD, 0]),
    ("mmap-everything",    SYS_mmap,               [0, 1 << 46, PROT_NONE as c_long, (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE) as c_long, BAD, 0]),
    ("mremap-exec-page",   SYS_mremap,             [NOWHERE, 4096, 4096, (MREMAP_MAYMOVE | MREMAP_FIXED) as c_long, EXEC_PAGE, 0]),
    ("remap_file_pages",   SYS_remap_file_pages,   [NOWHERE, 0, 0, 0, 0, 0]),
    ("shmget",             SYS_shmget,             [0, 0, 0, 0, 0, 0]),
    ("shmat",              SYS_shmat,              [BAD, EXEC_PAGE, 0, 0, 0, 0]),
    ("msgget",             SYS_msgget,             [BAD, 0, 0, 0, 0, 0]),
    ("semget",             SYS_semget,             [BAD, BAD, 0, 0, 0, 0]),
    ("map-vdso",           SYS_arch_prctl,         [0x2003, EXEC_PAGE, 0, 0, 0, 0]),
    ("set-mm",             SYS_prctl,              [PR_SET_MM as c_long, BAD, 0, 0, 0, 0]),
    ("set-dumpable",       SYS_prctl,              [PR_SET_DUMPABLE as c_long, BAD, 0, 0, 0, 0]),
    ("set-ptracer",        SYS_prctl,              [PR_SET_PTRACER as c_long, BAD, 0, 0, 0, 0]),
    // Namespaces and mounts.
    ("unshare",            SYS_unshare,            [1, 0, 0, 0, 0, 0]),
    ("setns",              SYS_setns,              [BAD, 0, 0, 0, 0, 0]),
    ("mount",              SYS_mount,              [0, NOWHERE, 0, 0, 0, 0]),
    ("umount",             SYS_umount2,            [NOWHERE, 0, 0, 0, 0, 0]),
    ("pivot_root",         SYS_pivot_root,         [NOWHERE, NOWHERE, 0, 0, 0, 0]),
    ("chroot",             SYS_chroot,             [NOWHERE, 0, 0, 0, 0, 0]),
    ("fsopen",             SYS_fsopen,             [NOWHERE, 0, 0, 0, 0, 0]),
    ("fsmount",            SYS_fsmount,            [BAD, 0, 0, 0, 0, 0]),
    ("fspick",             SYS_fspick,             [BAD, NOWHERE, 0, 0, 0, 0]),
    ("open_tree",          SYS_open_tree,          [BAD, NOWHERE, 0, 0, 0, 0]),
    ("move_mount",         SYS_move_mount,         [BAD, NOWHERE, BAD, NOWHERE, 0, 0]),
    ("mount_setattr",      SYS_mount_setattr,      [BAD, NOWHERE, 0, 0, 0, 0]),
    ("open_by_handle_at",  SYS_open_by_handle_at,  [BAD, NOWHERE, 0, 0, 0, 0]),
    ("name_to_handle_at",  SYS_name_to_handle_at,  [BAD, NOWHERE, 0, 0, 0, 0]),
    // The kernel itself.
    ("init_module",        SYS_init_module,        [NOWHERE, 0, NOWHERE, 0, 0, 0]),
    ("finit_module",       SYS_finit_module,       [BAD, NOWHERE, 0, 0, 0, 0]),
    ("delete_module",      SYS_delete_module,      [NOWHERE, 0, 0, 0, 0, 0]),
    ("kexec_load",         SYS_kexec_load,         [0, BAD, 0, BAD, 0, 0]),
    ("kexec_file_load",    SYS_kexec_file_load,    [BAD, BAD, 0, 0, BAD, 0]),
    ("reboot",             SYS_reboot,             [0, 0, 0, 0, 0, 0]),
    ("swapon",             SYS_swapon,             [NOWHERE, BAD, 0, 0, 0, 0]),
    ("acct",               SYS_acct,               [NOWHERE, 0, 0, 0, 0, 0]),
    ("quotactl",           SYS_quotactl,           [BAD, NOWHERE, 0, 0, 0, 0]),
    ("syslog",             SYS_syslog,             [BAD, 0, 0, 0, 0, 0]),
    ("iopl",               SYS_iopl,               [4, 0, 0, 0, 0, 0]),
    ("ioperm",             SYS_ioperm,             [BAD, 1, 1, 0, 0, 0]),
    ("settimeofday",       SYS_settimeofday,       [NOWHERE, 0, 0, 0, 0, 0]),
    ("clock_settime",      SYS_clock_settime,      [0, NOWHERE, 0, 0, 0, 0]),
    ("sethostname",        SYS_sethostname,        [NOWHERE, BAD, 0, 0, 0, 0]),
    // Rights.
    ("setuid",             SYS_setuid,             [BAD, 0, 0, 0, 0, 0]),
    ("setresuid",          SYS_setresuid,          [BAD, BAD, BAD, 0, 0, 0]),
    ("setgroups",          SYS_setgroups,          [BAD, 0, 0, 0, 0, 0]),
    ("capset",             SYS_capset,             [NOWHERE, 0, 0, 0, 0, 0]),
    ("setrlimit-more",     SYS_setrlimit,          [BAD, NOWHERE, 0, 0, 0, 0]),
    // The network, and devices.
    ("socket-inet",        SYS_socket,             [AF_INET as c_long, SOCK_DGRAM as c_long, 0, 0, 0, 0]),
    ("socket-inet6",       SYS_socket,             [AF_INET6 as c_long, SOCK_DGRAM as c_long, 0, 0, 0, 0]),
    ("socket-netlink",     SYS_socket,             [AF_NETLINK as c_long, SOCK_RAW as c_long, 0, 0, 0, 0]),
    ("socket-vsock",       SYS_socket,             [AF_VSOCK as c_long, SOCK_STREAM as c_long, 0, 0, 0, 0]),
    ("socket-packet",      SYS_socket,             [AF_PACKET as c_long, SOCK_RAW as c_long, 0, 0, 0, 0]),
    ("socket-alg",         SYS_socket,             [AF_ALG as c_long, SOCK_SEQPACKET as c_long, 0, 0, 0, 0]),
    ("socketpair-inet",    SYS_socketpair,         [AF_INET as c_long, SOCK_STREAM as c_long, 0, NOWHERE, 0, 0]),
    ("ioctl-tiocsti",      SYS_ioctl,              [BAD, TIOCSTI as c_long, NOWHERE, 0, 0, 0]),
    ("ioctl-create-vm",    SYS_ioctl,              [BAD, 0xae01, 0, 0, 0, 0]),
    ("ioctl-tunsetiff",    SYS_ioctl,              [BAD, 0x4004_54ca, NOWHERE, 0, 0, 0]),
    ("ioctl-loop",         SYS_ioctl,              [BAD, 0x4c82, 0, 0, 0, 0]),
    // Changing names and modes.
    ("mknod",              SYS_mknod,              [NOWHERE, 0, 0, 0, 0, 0]),
    ("mknodat",            SYS_mknodat,            [BAD, NOWHERE, 0, 0, 0, 0]),
    ("mkdirat",            SYS_mkdirat,            [BAD, NOWHERE, 0, 0, 0, 0]),
    ("symlinkat",          SYS_symlinkat,          [NOWHERE, BAD, NOWHERE, 0, 0, 0]),
    ("linkat",             SYS_linkat,             [BAD, NOWHERE, BAD, NOWHERE, 0, 0]),
    ("renameat2",          SYS_renameat2,          [BAD, NOWHERE, BAD, NOWHERE, 0, 0]),
    ("fchmod",             SYS_fchmod,             [BAD, 0o4755, 0, 0, 0, 0]),
    ("fchown",             SYS_fchown,             [BAD, 0, 0, 0, 0, 0]),
    ("setxattr",           SYS_setxattr,           [NOWHERE, NOWHERE, NOWHERE, 0, 0, 0]),
    ("openat2",            SYS_openat2,            [BAD, NOWHERE, NOWHERE, 24, 0, 0]),
    // The other numberings of the same kernel.
    ("x32-getpid",         X32 | SYS_getpid,       [0, 0, 0, 0, 0, 0]),
];

fn main() -> ExitCode {
    // The last one: an official jailer puts its own words before those that it is told to pass on.
    let name = std::env::args().skip(1).last().unwrap_or_default();
    let result = match name.as_str() {
        "list" => {
            for (name, ..) in CALLS {
                say(name);
            }
            return ExitCode::SUCCESS;
        }
        "look" => return look(),
        "wait" => {
            say("ready");
            let _ = std::io::stdin().read(&mut [0]);
            return ExitCode::SUCCESS;
        }
        "int80-getpid" => int80_getpid(),
        "fill-file" => fill(10),
        "fill-scratch" => fill(11),
        "fill-descriptors" => fill_descriptors(),
        _ => match CALLS.iter().find(|(known, ..)| *known == name) {
            // SAFETY: the arguments of every attempt are numbers, or addresses nothing is mapped at, and no attempt
            // replaces memory in use.
            Some((_, call, [a, b, c, d, e, f])) => answer(unsafe { syscall(*call, *a, *b, *c, *d, *e, *f) }),
            None => return ExitCode::from(2),
        },
    };
    say(&format!("{{\"attempt\": \"{name}\", \"result\": {result}}}"));
    ExitCode::SUCCESS
}

/// One line, in one write, without the locks of a standard stream.
fn say(line: &str) {
    let line = format!("{line}\n");
    // SAFETY: the buffer is valid for its length.
    unsafe { write(1, line.as_ptr().cast(), line.len()) };
}

/// What the call answered, or minus errno.
fn answer(result: c_long) -> c_long {
    if result == -1 { -c_long::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { result }
}

/// `getpid` by the 32-bit door, which a filter that looks at numbers alone would let through as another call.
fn int80_getpid() -> c_long {
    let result: c_long;
    // SAFETY: call 20 of the 32-bit table takes no argument and writes nothing but rax. rbx is untouched.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("rax") 20_i64 => result, out("r8") _, out("r9") _, out("r10") _, out("r11") _)
    };
    result
}

/// Writes to descriptor `fd` far beyond every size. The file-size signal may end this process.
fn fill(fd: c_int) -> c_long {
    // SAFETY: the buffer is valid for its length.
    answer(unsafe { pwrite(fd, [1_u8].as_ptr().cast(), 1, 1 << 42) as c_long })
}

/// Opens descriptors until refused; the answer is how many there were room for.
fn fill_descriptors() -> c_long {
    let mut count = 0;
    // SAFETY: dup takes an integer.
    while unsafe { dup(1) } >= 0 && count < 1 << 20 {
        count += 1;
    }
    count
}

/// Everything this process sees: its descriptors, its root, and what paths of a host answer.
fn look() -> ExitCode {
    // SAFETY: F_GETFD takes integers and harms no descriptor.
    let open: Vec<String> =
        (0..4096).filter(|fd| unsafe { fcntl(*fd, F_GETFD) } >= 0).map(|fd| fd.to_string()).collect();
    let mut names: Vec<String> = std::fs::read_dir("/")
        .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    names.sort();
    let paths = [
        "/proc/self/status",
        "/dev/null",
        "/dev/kvm",
        "/sys/kernel",
        "/etc/passwd",
        "/tmp",
        "/var",
        "/home",
        "/root",
        "/usr/bin",
        "/bin/sh",
        "/../etc/passwd",
        "/run/pepo",
        "/proc/1/root/etc/passwd",
    ];
    let seen: Vec<&str> = paths.into_iter().filter(|path| std::fs::symlink_metadata(path).is_ok()).collect();
    let mut made: Vec<String> = Vec::new();
    for directory in names.iter().map(|name| format!("/{name}")).chain(["/".to_owned()]) {
        let path = format!("{directory}/probe-was-here");
        if std::fs::File::options().write(true).create_new(true).open(&path).is_ok() {
            let _ = std::fs::remove_file(&path);
            made.push(directory);
        }
    }
    let list = |names: &[String]| names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    let seen: Vec<String> = seen.into_iter().map(str::to_owned).collect();
    say(&format!(
        "{{\"open\": [{}], \"root\": [{}], \"seen\": [{}], \"written\": [{}]}}",
        open.join(", "),
        list(&names),
        list(&seen),
        list(&made),
    ));
    ExitCode::SUCCESS
}
