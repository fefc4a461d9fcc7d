//! Processes of the host as `/proc` shows them: whose they are, when they started, in which cgroup.
//!
//! A process is owned here by pidfd, checked against its start time and cgroup *after* the pidfd was opened: a pid alone may
//! be anybody's by the time it is used.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::id::UidBlock;

/// What everything of a Sandbox is to the kernel's killer: it goes before anything of the host's own, and the largest of
/// it, the VMM, first.
pub const OOM_SCORE: i16 = 500;

/// Makes this process, and what it starts, one that the kernel's killer takes before the host's own, and that has none of
/// the precedence for processors which the privileged side has and would pass on.
///
/// # Errors
/// The kernel refuses.
pub fn yield_to_host() -> io::Result<()> {
    fs::write("/proc/self/oom_score_adj", OOM_SCORE.to_string())?;
    if rustix::process::getpriority_process(None)? < 0 {
        rustix::process::setpriority_process(None, 0)?;
    }
    Ok(())
}

/// What `/proc/<pid>/stat` and `status` say of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id in this process' namespace.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Its real uid.
    pub uid: u32,
}

/// The processes that run under a uid of that block. Those that end meanwhile are left out.
pub fn of_uids(block: UidBlock) -> impl Iterator<Item = Process> {
    all().filter(move |process| block.holds(process.uid))
}

/// Every process.
pub fn all() -> impl Iterator<Item = Process> {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| read(entry.file_name().to_str()?.parse().ok()?))
}

/// One process, if it is there. A zombie has no uid that counts: it holds nothing any more.
pub fn read(pid: u32) -> Option<Process> {
    // In one read: there are hundreds of processes, and the file is made anew for each piece of it.
    let mut bytes = [0; 4096];
    let length = io::Read::read(&mut fs::File::open(format!("/proc/{pid}/status")).ok()?, &mut bytes).ok()?;
    let status = String::from_utf8_lossy(&bytes[..length]);
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    if field("State:")?.starts_with(['Z', 'X']) {
        return None;
    }
    let uid = field("Uid:")?.split_whitespace().next()?.parse().ok()?;
    // A process names itself: what a jailed one calls itself may reach a terminal.
    Some(Process { pid, name: crate::keeper::escape(field("Name:")?, 64), uid })
}

/// Bytes that a process has read and written by system calls, files and sockets alike.
pub fn io(pid: u32) -> Option<(u64, u64)> {
    io_fields(pid, ["rchar:", "wchar:"])
}

/// Bytes that a process has read by system calls, and those that it has changed in files: for one that writes much that is
/// no file's.
pub fn file_io(pid: u32) -> Option<(u64, u64)> {
    io_fields(pid, ["rchar:", "write_bytes:"])
}

fn io_fields(pid: u32, names: [&str; 2]) -> Option<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Some((field(names[0])?, field(names[1])?))
}

/// When a process started, in clock ticks since the machine's boot: with its pid, its identity.
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything: fields count from after the last one.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// A descriptor on a process, whichever has that pid now. Check who it is before using it.
///
/// # Errors
/// There is none.
pub fn open(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// A descriptor on the process with that pid *and* that start time.
///
/// # Errors
/// `NotFound` if it has ended, or the pid is another's by now.
pub fn open_exact(pid: u32, start: u64) -> io::Result<OwnedFd> {
    let pidfd = open(pid).map_err(|_| io::ErrorKind::NotFound)?;
    // Read after opening: if it matches, the descriptor was opened on that very process.
    if start_time(pid) == Some(start) && !has_ended(pidfd.as_fd()) {
        Ok(pidfd)
    } else {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// Whether the process of a pidfd has ended.
pub fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    wait(pidfd, std::time::Duration::ZERO)
}

/// Waits for its end; `false` when the time is over first.
pub fn wait(pidfd: BorrowedFd<'_>, within: std::time::Duration) -> bool {
    let deadline = std::time::Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&time)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Kills it. One that has ended is killed already.
///
/// # Errors
/// The kernel does not permit it.
pub fn kill(pidfd: BorrowedFd<'_>) -> io::Result<()> {
    match rustix::process::pidfd_send_signal(pidfd.as_fd(), Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The lines of `/proc/<pid>/cgroup`: hierarchy number, controllers, path.
pub fn cgroups(pid: u32) -> io::Result<Vec<(u32, String, String)>> {
    lines(&format!("/proc/{pid}/cgroup"))
}

/// The same of this process, which need not know its number in the namespace of that `/proc`.
pub fn own_cgroups() -> io::Result<Vec<(u32, String, String)>> {
    lines("/proc/self/cgroup")
}

fn lines(path: &str) -> io::Result<Vec<(u32, String, String)>> {
    let text = fs::read_to_string(path)?;
    Ok(text
        .lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            Some((parts.next()?.parse().ok()?, parts.next()?.to_owned(), parts.next()?.to_owned()))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_process_is_known_by_pid_and_start_time() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let start = start_time(child.id()).expect("start time");
        let pidfd = open_exact(child.id(), start).expect("the process");
        assert!(open_exact(child.id(), start + 1).is_err(), "another process was taken for it");
        assert!(!has_ended(pidfd.as_fd()));
        assert!(!wait(pidfd.as_fd(), Duration::from_millis(1)));
        kill(pidfd.as_fd()).expect("kill");
        assert!(wait(pidfd.as_fd(), Duration::from_secs(20)));
        assert!(open_exact(child.id(), start).is_err(), "a zombie was taken for a process");
        child.wait().expect("wait");
        kill(pidfd.as_fd()).expect("kill again");
        assert!(start_time(child.id()).is_none());
    }

    #[test]
    fn we_are_there() {
        let us = read(std::process::id()).expect("us");
        assert_eq!(us.uid, rustix::process::getuid().as_raw());
        assert!(all().any(|process| process.pid == us.pid));
        assert!(!cgroups(us.pid).expect("cgroups").is_empty());
    }
}
