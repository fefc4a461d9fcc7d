//! How one process becomes two: `pepo-host`, which stays, and pepod, its unprivileged child.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Pid;

use crate::sys;

/// Which of the two this process is now.
#[derive(Debug)]
pub enum Split {
    /// The parent: hand both to [`super::run`].
    Host {
        /// Its end of the socketpair.
        socket: OwnedFd,
        /// pepod.
        daemon: Pid,
    },
    /// The child: give up rights with [`crate::rights::become_user`], then make a [`super::Host`].
    Daemon {
        /// Its end of the socketpair.
        socket: OwnedFd,
    },
}

/// Makes the socketpair and forks.
///
/// # Errors
/// This process has more than one thread, or the kernel refuses.
pub fn split() -> io::Result<Split> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!("cannot fork a process of {threads} threads")));
    }
    let (host, daemon) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    match sys::fork()? {
        Some(pid) => {
            drop(daemon);
            Ok(Split::Host { socket: host, daemon: pid })
        }
        None => {
            drop(host);
            Ok(Split::Daemon { socket: daemon })
        }
    }
}
