//! The system calls of a share server that serves: the last wall, built when its threads run and its rights are those of
//! its own user namespace.
//!
//! It works on descriptors and on entries of directories that are open, in a root that is the tree it serves. No program,
//! no socket, no other process, no new thread, no memory that can be executed. Whatever else it tries ends it.

use std::io;

use seccompiler::{BackendError, BpfProgram};

use crate::calls;

/// Calls with any argument: each works on what the process has, below its root, or on itself.
const ANY: [i64; 75] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_getdents64,
    libc::SYS_lseek,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_readlinkat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_fsetxattr,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_fremovexattr,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Rust ends a process that cannot go on by `abort`: a signal to itself.
    libc::SYS_tgkill,
    libc::SYS_getrusage,
];

/// Builds the wall around all threads of this process.
///
/// # Errors
/// The kernel has no system call filters, or there is no list for this machine.
pub(super) fn enter() -> io::Result<()> {
    calls::enter_all_threads(compile())
}

fn compile() -> Result<BpfProgram, BackendError> {
    calls::compile(&ANY, Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_compiles_and_lacks_what_makes_a_process_dangerous() {
        assert!(!compile().expect("compiles").is_empty());
        for call in [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_fork,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_ptrace,
            libc::SYS_kill,
            libc::SYS_mount,
            libc::SYS_move_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_chroot,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_setuid,
            libc::SYS_setresuid,
            libc::SYS_capset,
            libc::SYS_bpf,
            libc::SYS_ioctl,
            libc::SYS_io_uring_setup,
            libc::SYS_process_vm_readv,
            libc::SYS_open_by_handle_at,
            libc::SYS_prctl,
        ] {
            assert!(!ANY.contains(&call), "{call} is allowed");
        }
    }
}
