//! The system call lists of jailed processes, as data, and their translation to BPF.
//!
//! Two programs are stacked, and the kernel applies the stricter answer. The first turns calls that a newer library
//! tries and can do without (`clone3`, `io_uring_setup`, …) into ENOSYS, so that the caller falls back. The second is
//! the boundary: an allow-list whose default kills the process. Both are loaded by [`super::enter`] after every other
//! wall stands, right before exec.
//!
//! **Exec happens once.** A filter loaded before exec has to allow `execve`, which is one call more than the program
//! needs afterwards. So `execve` is allowed with one pointer only: [`PATH_ADDRESS`], a page the launcher maps. Exec
//! throws that page away, and nothing can be mapped there again: `mmap` is refused for hints below [`LOWEST_HINT`],
//! `mremap` for fixed targets, `shmat` and `remap_file_pages` altogether; the kernel's own choice goes down from the
//! top of 128 TiB and RLIMIT_AS ([`super::ADDRESS_SPACE`]) ends far above; a stack cannot grow down that far from the
//! lowest hint because RLIMIT_STACK is smaller than the gap. A second `execve` therefore reads an unmapped path, and
//! the kernel answers EFAULT.
//!
//! The lists were recorded with strace over boot, disk and stream load and shutdown (QEMU 7.2, vhost-device-vsock
//! 0.3.0), then widened by the variants that other releases of QEMU (up to 10), glibc and glib use for the same thing.

use std::collections::BTreeMap;
use std::fmt;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use serde::{Deserialize, Serialize};

/// Where the launcher puts the path of the program, and the only pointer `execve` may be given.
pub const PATH_ADDRESS: usize = 0x10_0000;

/// Lowest address a jailed process may ask `mmap` for. More than RLIMIT_STACK above [`PATH_ADDRESS`].
pub const LOWEST_HINT: u64 = 0x1000_0000;

/// Which list a jailed process runs under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Filter {
    /// QEMU 7.2 to 10, software emulation.
    Qemu,
    /// vhost-device-vsock.
    VsockDevice,
    /// An official jailer and the VMM it becomes: the boundary is the VMM's own list, which it loads before its guest
    /// runs. This one stands from the start, and is of what neither ever calls.
    Official,
}

/// The programs a list was made for, for `doctor`.
impl fmt::Display for Filter {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Filter::Qemu => "QEMU 7.2 to 10, software emulation",
            Filter::VsockDevice => "vhost-device-vsock 0.3",
            Filter::Official => "the release's own list, behind ours of what no jailer or VMM calls",
        })
    }
}

/// What a call's arguments must be.
enum Allow {
    /// Anything.
    Any,
    /// One of these; each a conjunction of tests on arguments.
    When(Vec<Vec<Test>>),
}

/// One test of one argument.
#[derive(Clone, Copy)]
enum Test {
    /// The low 32 bits are exactly this (flags, commands, ioctl requests).
    Is(u8, u32),
    /// All 64 bits are exactly this (pointers).
    IsPointer(u8, u64),
    /// At least this, 64 bits.
    AtLeast(u8, u64),
    /// None of these bits, low 32.
    Without(u8, u32),
}

use Test::{AtLeast, Is, IsPointer, Without};

impl Test {
    fn condition(self) -> Result<SeccompCondition, seccompiler::BackendError> {
        match self {
            Is(arg, value) => SeccompCondition::new(arg, Len::Dword, Op::Eq, u64::from(value)),
            IsPointer(arg, value) => SeccompCondition::new(arg, Len::Qword, Op::Eq, value),
            AtLeast(arg, value) => SeccompCondition::new(arg, Len::Qword, Op::Ge, value),
            Without(arg, bits) => SeccompCondition::new(arg, Len::Dword, Op::MaskedEq(u64::from(bits)), 0),
        }
    }
}

/// The flags glibc gives `clone` for a thread, and nothing that makes a process or a namespace.
const THREAD: u32 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID) as u32;

const ARCH_SET_FS: u32 = 0x1002;
/// glibc asks for shadow stacks and goes on without: the kernel's own refusal is enough.
const ARCH_CET_STATUS: u32 = 0x3001;

/// Calls newer than the libc crate's list of names.
const SYS_MAP_SHADOW_STACK: i64 = 453;
const SYS_MSEAL: i64 = 462;

/// Calls that newer libraries try first and can do without: answered ENOSYS instead of death.
fn absent() -> Vec<i64> {
    vec![
        libc::SYS_clone3,
        libc::SYS_io_uring_setup,
        libc::SYS_openat2,
        libc::SYS_faccessat2,
        libc::SYS_statx,
        libc::SYS_membarrier,
        libc::SYS_epoll_pwait2,
        libc::SYS_set_mempolicy,
        libc::SYS_get_mempolicy,
        libc::SYS_mbind,
        libc::SYS_copy_file_range,
        libc::SYS_close_range,
        SYS_MAP_SHADOW_STACK,
        SYS_MSEAL,
    ]
}

/// What every dynamically linked, multi-threaded program needs, and what the launcher needs to end with an error.
fn common_calls(pid: u32, list: &mut Vec<(i64, Allow)>) {
    use libc::*;
    for call in [
        SYS_access,
        SYS_brk,
        SYS_clock_getres,
        SYS_clock_gettime,
        SYS_clock_nanosleep,
        SYS_close,
        SYS_dup,
        SYS_epoll_create1,
        SYS_epoll_ctl,
        SYS_epoll_pwait,
        SYS_epoll_wait,
        SYS_eventfd2,
        SYS_exit,
        SYS_exit_group,
        SYS_faccessat,
        SYS_fcntl,
        SYS_fstat,
        SYS_futex,
        SYS_getcwd,
        SYS_getdents64,
        SYS_getegid,
        SYS_geteuid,
        SYS_getgid,
        SYS_getpid,
        SYS_getppid,
        SYS_getrandom,
        SYS_getrusage,
        SYS_gettid,
        SYS_gettimeofday,
        SYS_getuid,
        SYS_lseek,
        SYS_madvise,
        SYS_mprotect,
        SYS_munmap,
        SYS_nanosleep,
        SYS_newfstatat,
        SYS_open,
        SYS_openat,
        SYS_poll,
        SYS_ppoll,
        SYS_pread64,
        SYS_preadv,
        SYS_preadv2,
        SYS_pwrite64,
        SYS_pwritev,
        SYS_pwritev2,
        SYS_read,
        SYS_readlink,
        SYS_readlinkat,
        SYS_readv,
        SYS_recvfrom,
        SYS_recvmsg,
        SYS_restart_syscall,
        SYS_rseq,
        SYS_rt_sigaction,
        SYS_rt_sigpending,
        SYS_rt_sigprocmask,
        SYS_rt_sigreturn,
        SYS_rt_sigsuspend,
        SYS_rt_sigtimedwait,
        SYS_sched_getaffinity,
        SYS_sched_yield,
        SYS_sendmsg,
        SYS_sendto,
        SYS_set_robust_list,
        SYS_set_tid_address,
        SYS_shutdown,
        SYS_sigaltstack,
        SYS_stat,
        SYS_lstat,
        SYS_statfs,
        SYS_fstatfs,
        SYS_sysinfo,
        SYS_timer_create,
        SYS_timer_delete,
        SYS_timer_gettime,
        SYS_timer_settime,
        SYS_timerfd_create,
        SYS_timerfd_settime,
        SYS_uname,
        SYS_write,
        SYS_writev,
    ] {
        list.push((call, Allow::Any));
    }
    list.push((SYS_execve, Allow::When(vec![vec![IsPointer(0, PATH_ADDRESS as u64)]])));
    let not_growing = MAP_GROWSDOWN as u32;
    list.push((
        SYS_mmap,
        Allow::When(vec![
            vec![IsPointer(0, 0), Without(3, not_growing | MAP_FIXED as u32 | MAP_FIXED_NOREPLACE as u32)],
            vec![AtLeast(0, LOWEST_HINT), Without(3, not_growing)],
        ]),
    ));
    list.push((SYS_mremap, Allow::When(vec![vec![Without(3, (MREMAP_FIXED | MREMAP_DONTUNMAP) as u32)]])));
    list.push((SYS_clone, Allow::When(vec![vec![Is(0, THREAD)]])));
    list.push((SYS_arch_prctl, Allow::When(vec![vec![Is(0, ARCH_SET_FS)], vec![Is(0, ARCH_CET_STATUS)]])));
    // Reading one's own limits; none can be raised anyway.
    list.push((SYS_prlimit64, Allow::When(vec![vec![Is(0, 0)], vec![Is(0, pid)]])));
    list.push((SYS_getrlimit, Allow::Any));
    // Signals to oneself: abort, and QEMU's kick of its own threads.
    list.push((SYS_tgkill, Allow::When(vec![vec![Is(0, pid)]])));
    list.push((SYS_kill, Allow::When(vec![vec![Is(0, pid)]])));
    for op in [PR_SET_NAME as u32, PR_GET_NAME as u32, PR_SET_TIMERSLACK as u32, PR_SET_VMA as u32] {
        allow_more(list, SYS_prctl, vec![Is(0, op)]);
    }
}

fn qemu(list: &mut Vec<(i64, Allow)>) {
    use libc::*;
    for call in [
        SYS_fallocate,
        SYS_fdatasync,
        SYS_fsync,
        SYS_ftruncate,
        SYS_getcpu,
        SYS_getpeername,
        SYS_getsockname,
        SYS_getsockopt,
        SYS_memfd_create,
        SYS_pipe2,
        SYS_setsockopt,
        SYS_signalfd4,
    ] {
        list.push((call, Allow::Any));
    }
    // Its second layer, -sandbox: loads a filter of its own, which can only take away.
    for op in [SECCOMP_SET_MODE_FILTER, SECCOMP_GET_ACTION_AVAIL, SECCOMP_GET_NOTIF_SIZES, 0] {
        allow_more(list, SYS_seccomp, vec![Is(0, op)]);
    }
    for op in [PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_GET_SECCOMP, PR_MCE_KILL, PR_CAPBSET_READ] {
        allow_more(list, SYS_prctl, vec![Is(0, op as u32)]);
    }
    // A disk asks what it is, a character device whether it is a terminal: no request that changes anything.
    const BLKSSZGET: u32 = 0x1268;
    const BLKPBSZGET: u32 = 0x127b;
    const BLKGETSIZE64: u32 = 0x8008_1272;
    const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
    const XFS_IOC_DIOINFO: u32 = 0x800c_581e;
    const DKIOCGETBLOCKSIZE: u32 = 0x5331;
    const CDROM_DRIVE_STATUS: u32 = 0x5326;
    // Its tap: what it is, what of segmentation and checksums is whose, how long the header is, how much may be on its way.
    // None of them makes another link or gives this one to somebody.
    const TUNGETFEATURES: u32 = 0x8004_54cf;
    const TUNSETOFFLOAD: u32 = 0x4004_54d0;
    const TUNGETIFF: u32 = 0x8004_54d2;
    const TUNSETSNDBUF: u32 = 0x4004_54d4;
    const TUNGETVNETHDRSZ: u32 = 0x8004_54d7;
    const TUNSETVNETHDRSZ: u32 = 0x4004_54d8;
    const TUNSETVNETLE: u32 = 0x4004_54dc;
    const TUNSETVNETBE: u32 = 0x4004_54de;
    for request in [
        TCGETS as u32,
        TCGETS2 as u32,
        FIONBIO as u32,
        FIONREAD as u32,
        BLKSSZGET,
        BLKPBSZGET,
        BLKGETSIZE64,
        FS_IOC_GETFLAGS,
        XFS_IOC_DIOINFO,
        DKIOCGETBLOCKSIZE,
        CDROM_DRIVE_STATUS,
        TUNGETFEATURES,
        TUNSETOFFLOAD,
        TUNGETIFF,
        TUNSETSNDBUF,
        TUNGETVNETHDRSZ,
        TUNSETVNETHDRSZ,
        TUNSETVNETLE,
        TUNSETVNETBE,
    ] {
        allow_more(list, SYS_ioctl, vec![Is(1, request)]);
    }
}

fn vsock_device(list: &mut Vec<(i64, Allow)>) {
    use libc::*;
    for call in [
        SYS_accept,
        SYS_accept4,
        SYS_bind,
        SYS_connect,
        SYS_getpeername,
        SYS_getsockname,
        SYS_getsockopt,
        SYS_listen,
        SYS_setsockopt,
        SYS_unlink,
        SYS_unlinkat,
        SYS_pipe2,
    ] {
        list.push((call, Allow::Any));
    }
    list.push((SYS_socket, Allow::When(vec![vec![Is(0, AF_UNIX as u32)]])));
    for request in [TCGETS as u32, TCGETS2 as u32, FIONBIO as u32, FIONREAD as u32] {
        allow_more(list, SYS_ioctl, vec![Is(1, request)]);
    }
}

/// Adds one way a call may look. A call listed with [`Allow::Any`] is never narrowed by this.
fn allow_more(list: &mut Vec<(i64, Allow)>, call: i64, tests: Vec<Test>) {
    match list.iter_mut().find(|(listed, _)| *listed == call) {
        Some((_, Allow::When(ways))) => ways.push(tests),
        Some((_, Allow::Any)) => {}
        None => list.push((call, Allow::When(vec![tests]))),
    }
}

/// What a jailer (mounts, device nodes, a user) and the VMM it becomes (KVM, disks, Unix sockets) never call. Asynchronous
/// disk I/O and memory served by a handler are features of the VMM that are not used here.
const NEVER: [i64; 38] = [
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_personality,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_syslog,
    libc::SYS_vhangup,
];

/// The filter of [`Filter::Official`]: [`NEVER`], and no socket but a Unix one. Killed, as everywhere.
fn official(arch: TargetArch) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = NEVER.into_iter().map(|call| (call, Vec::new())).collect();
    let other = || SeccompCondition::new(0, Len::Dword, Op::Ne, u64::from(libc::AF_UNIX.unsigned_abs()));
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        rules.insert(call, vec![SeccompRule::new(vec![other()?])?]);
    }
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::KillProcess, arch)?.try_into()
}

/// The programs to load, in order, for a process whose own pid (as it sees it) is `pid`.
///
/// # Errors
/// Only on an architecture for which there is no list: the lists name x86-64 calls.
pub fn compile(filter: Filter, pid: u32) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    if filter == Filter::Official {
        return Ok(vec![official(arch)?]);
    }
    let absent = absent().into_iter().map(|call| (call, Vec::new())).collect();
    let absent = SeccompFilter::new(absent, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32), arch)?;
    let boundary = SeccompFilter::new(rules(filter, pid)?, SeccompAction::KillProcess, SeccompAction::Allow, arch)?;
    Ok(vec![absent.try_into()?, boundary.try_into()?])
}

fn rules(filter: Filter, pid: u32) -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut list = Vec::new();
    common_calls(pid, &mut list);
    match filter {
        Filter::Qemu => qemu(&mut list),
        Filter::VsockDevice => vsock_device(&mut list),
        // Has no allow-list: see `compile`.
        Filter::Official => {}
    }
    // Allowed here so that the first program's ENOSYS is the stricter answer.
    for call in absent() {
        list.push((call, Allow::Any));
    }
    let mut rules = BTreeMap::new();
    for (call, allow) in list {
        let ways = match allow {
            Allow::Any => Vec::new(),
            Allow::When(ways) => ways
                .into_iter()
                .map(|tests| SeccompRule::new(tests.into_iter().map(Test::condition).collect::<Result<_, _>>()?))
                .collect::<Result<_, _>>()?,
        };
        rules.insert(call, ways);
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_list_compiles_within_the_kernels_limit() {
        for filter in [Filter::Qemu, Filter::VsockDevice, Filter::Official] {
            for program in compile(filter, 7).unwrap() {
                assert!(!program.is_empty() && program.len() < 4096, "{filter:?}: {} instructions", program.len());
            }
        }
    }

    #[test]
    fn no_list_has_a_call_that_must_never_be_there() {
        use libc::*;
        let never = [
            SYS_bpf,
            SYS_userfaultfd,
            SYS_keyctl,
            SYS_add_key,
            SYS_request_key,
            SYS_ptrace,
            SYS_process_vm_readv,
            SYS_process_vm_writev,
            SYS_mount,
            SYS_umount2,
            SYS_unshare,
            SYS_setns,
            SYS_open_by_handle_at,
            SYS_name_to_handle_at,
            SYS_kexec_load,
            SYS_kexec_file_load,
            SYS_init_module,
            SYS_finit_module,
            SYS_pivot_root,
            SYS_chroot,
            SYS_fsopen,
            SYS_move_mount,
            SYS_open_tree,
            SYS_perf_event_open,
            SYS_execveat,
            SYS_fork,
            SYS_vfork,
            SYS_shmat,
            SYS_shmget,
            SYS_remap_file_pages,
            SYS_personality,
            SYS_io_uring_enter,
            SYS_io_uring_register,
            SYS_pidfd_getfd,
            SYS_pidfd_open,
            SYS_setuid,
            SYS_setresuid,
            SYS_capset,
            SYS_mknod,
            SYS_mknodat,
            SYS_iopl,
            SYS_ioperm,
            SYS_modify_ldt,
            SYS_swapon,
            SYS_reboot,
            SYS_quotactl,
            SYS_syslog,
            SYS_acct,
            SYS_settimeofday,
            SYS_clock_settime,
            SYS_memfd_secret,
        ];
        for filter in [Filter::Qemu, Filter::VsockDevice] {
            let rules = rules(filter, 7).unwrap();
            for call in never {
                assert!(!rules.contains_key(&call), "{filter:?} allows call {call}");
            }
            // Those with arguments that matter are never allowed whole.
            for call in [SYS_execve, SYS_mmap, SYS_mremap, SYS_clone, SYS_socket, SYS_ioctl, SYS_prctl, SYS_kill] {
                let limited = rules.get(&call).is_none_or(|ways| !ways.is_empty());
                assert!(limited, "{filter:?}: call {call} is unlimited");
            }
        }
    }
}
