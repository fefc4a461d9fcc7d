//! This program once more, as a process of a Sandbox: its keeper, a share server, its relay.
//!
//! Such a process is born in the Sandbox's pid namespace, and in its cgroup of the unified hierarchy, by the call that makes
//! it. The hierarchies of v1 know no such call: it joins those by its first steps, [`crate::cgroup::join`]. Neither moves a
//! whole process, for which the kernel stops all forks of the host and waits for a grace period: 10 to 20 ms were measured,
//! of 100 ms that a start takes.
//!
//! ```text
//! pepo-host (a thread that is thrown away)
//!   leaves its pid namespace for its children
//!   clone3(CLONE_INTO_CGROUP) ─▶ exec, with a socket as standard input ◀── an order: what it is to be
//! ```

use std::ffi::CString;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::thread::ThreadNameSpaceType;

use crate::cgroup::Leaf;
use crate::{proc, sys};

/// In which pid namespace a process is born.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PidNamespace<'a> {
    /// As the first of a new one.
    New,
    /// In that process'.
    Of(BorrowedFd<'a>),
}

/// A process that was started and has been told nothing yet.
#[derive(Debug)]
pub(crate) struct Spawned {
    /// Its id here.
    pub pid: u32,
    /// When it started, in clock ticks.
    pub start: u64,
    /// To wait for it, and to reap it.
    pub pidfd: OwnedFd,
    /// What it is told comes by this.
    pub socket: OwnedFd,
}

/// Starts this program as `pepo-<role>`, which is a verb of its command line too. A thread that has left the pid namespace
/// for its children can make no other thread again: one is made for this.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn spawn(name: &str, namespace: PidNamespace<'_>, leaf: Option<&Leaf<'_>>) -> io::Result<Spawned> {
    let role = name.trim_start_matches("pepo-");
    let arguments = [name, role, "--fd", "0"].map(CString::new).into_iter().collect::<Result<Vec<_>, _>>()?;
    let (socket, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let nowhere = rustix::fs::open("/dev/null", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    let birthplace = leaf.map(Leaf::birthplace).transpose().map_err(io::Error::other)?.flatten();
    let (pid, pidfd) = std::thread::scope(|scope| {
        let spawning = scope.spawn(|| {
            match namespace {
                PidNamespace::New => sys::unshare(libc::CLONE_NEWPID)?,
                PidNamespace::Of(process) => {
                    rustix::thread::move_into_thread_name_spaces(process, ThreadNameSpaceType::PROCESS_ID)?;
                }
            }
            sys::spawn(c"/proc/self/exe", &arguments, [&theirs, &nowhere, &nowhere], birthplace.as_ref())
        });
        spawning.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    })?;
    let start = proc::start_time(pid).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    Ok(Spawned { pid, start, pidfd, socket })
}
