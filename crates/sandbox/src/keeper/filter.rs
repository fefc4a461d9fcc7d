//! The system calls of a keeper that keeps: the last wall, built when both programs run and every right is gone.
//!
//! It reads and writes descriptors it has, opens and renames in its own directory (there is no other below its root), waits
//! for its children, and has memory that is never executable. Whatever else it tries ends it, and with it the Sandbox.

use std::io;

use seccompiler::{BackendError, BpfProgram};

use crate::calls;

/// Calls with any argument: each works on what the process has, or on itself.
const ANY: [i64; 42] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_setsockopt,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_waitid,
    libc::SYS_wait4,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Rust ends a process that cannot go on by `abort`: a signal to itself.
    libc::SYS_tgkill,
];

/// Builds the wall around this process, which has one thread.
///
/// # Errors
/// The kernel has no system call filters, or there is no list for this machine.
pub(super) fn enter() -> io::Result<()> {
    calls::enter(compile())
}

fn compile() -> Result<BpfProgram, BackendError> {
    calls::compile(&ANY, vec![calls::says_whether_it_blocks()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_compiles_and_lacks_what_makes_a_process_dangerous() {
        assert!(!compile().expect("compiles").is_empty());
        for call in [
            libc::SYS_execve,
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_ptrace,
            libc::SYS_kill,
            libc::SYS_mount,
            libc::SYS_unshare,
            libc::SYS_setuid,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_process_vm_readv,
        ] {
            assert!(!ANY.contains(&call), "{call} is allowed");
        }
    }
}
