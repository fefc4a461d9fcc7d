//! The system calls of a relay that relays: the last wall, built when its rights are gone and its listeners stand.
//!
//! It reads and writes descriptors that it has, accepts, makes TCP sockets of IPv4 and connects them (whereto is for the
//! kernel's tables to allow), and waits. No file, no program, no other process, no new thread, no memory that can be
//! executed. Whatever else it tries ends it.

use std::io;

use seccompiler::{BackendError, BpfProgram};

use crate::calls;

/// Calls with any argument: each works on what the process has, or on itself.
const ANY: [i64; 45] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_fstat,
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

/// Builds the wall around this process, which has one thread.
///
/// # Errors
/// The kernel has no system call filters, or there is no list for this machine.
pub(super) fn enter() -> io::Result<()> {
    calls::enter(compile())
}

fn compile() -> Result<BpfProgram, BackendError> {
    const KIND: u32 = 0xf;
    let stream_of_ipv4 =
        vec![calls::is(0, libc::AF_INET.unsigned_abs())?, calls::masked(1, KIND, libc::SOCK_STREAM.unsigned_abs())?];
    calls::compile(&ANY, vec![(libc::SYS_socket, stream_of_ipv4), calls::says_whether_it_blocks()?])
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
            libc::SYS_open,
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_fork,
            libc::SYS_socket,
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_ptrace,
            libc::SYS_kill,
            libc::SYS_mount,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_setuid,
            libc::SYS_setresuid,
            libc::SYS_capset,
            libc::SYS_bpf,
            libc::SYS_ioctl,
            libc::SYS_io_uring_setup,
            libc::SYS_process_vm_readv,
            libc::SYS_prctl,
            libc::SYS_memfd_create,
        ] {
            assert!(!ANY.contains(&call), "{call} is allowed whole");
        }
    }

    /// Set in the process that tries.
    const TRY: &str = "PEPO_TEST_RELAY_TRIES";

    #[test]
    fn what_is_not_on_the_list_ends_it() {
        use std::os::unix::process::ExitStatusExt;
        if let Ok(what) = std::env::var(TRY) {
            rustix::thread::set_no_new_privs(true).expect("no_new_privs");
            enter().expect("filter");
            match what.as_str() {
                "a TCP socket" => drop(std::net::TcpStream::connect("127.0.0.1:1")),
                "a file" => drop(std::fs::File::open("/etc/passwd")),
                "another family" => drop(std::net::TcpStream::connect("[::1]:1")),
                "a datagram socket" => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
                _ => drop(std::thread::Builder::new().spawn(|| ())),
            }
            // What this test's harness does next is not on the list; this is.
            std::process::abort();
        }
        let tried = ["a TCP socket", "a file", "another family", "a datagram socket", "a thread"];
        for what in tried {
            let name = "net::relay::filter::tests::what_is_not_on_the_list_ends_it";
            let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
            command.args([name, "--exact", "--nocapture"]).env(TRY, what);
            let status = command.stdout(std::process::Stdio::null()).status().expect("a process");
            let expected = if what == "a TCP socket" { libc::SIGABRT } else { libc::SIGSYS };
            assert_eq!(status.signal(), Some(expected), "{what}");
        }
    }
}
