//! Directories that a local caller lends: whose rights count, and how one is opened under them.
//!
//! Who it is says the kernel, of the connection that the request came on: nobody in between is believed. The directory is
//! opened on a thread that has that user's ids and none of our rights to files, and thrown away after it. It is kept open
//! here for as long as it is lent; what is served of it later is served by a process of that user.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::thread::{Gid, Uid};
use serde::{Deserialize, Serialize};

use crate::jail::Access;
use crate::sys;

/// Whose rights a served directory is reached with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lender {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The other groups.
    pub groups: Vec<u32>,
}

/// A directory that is lent.
#[derive(Debug)]
pub(super) struct Lent {
    pub directory: OwnedFd,
    pub lender: Lender,
    /// The most that anybody may do with it.
    pub access: Access,
}

impl Lender {
    /// Who is at the other end of a connection.
    fn of(connection: BorrowedFd<'_>) -> io::Result<Self> {
        let credentials = rustix::net::sockopt::socket_peercred(connection)?;
        let groups = sys::peer_groups(connection)?;
        Ok(Lender { uid: credentials.uid.as_raw(), gid: credentials.gid.as_raw(), groups })
    }

    /// Takes these ids for this thread's work on files, and with them leaves our own rights to files behind.
    fn act(&self) -> io::Result<()> {
        let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
        rustix::thread::set_thread_groups(&groups)?;
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        if self.uid != 0 {
            let none = rustix::thread::CapabilitySet::empty();
            let sets = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
            rustix::thread::set_capabilities(None, sets)?;
        }
        Ok(())
    }
}

/// Opens a directory with the rights of whoever is at the other end of the connection.
pub(super) fn open(connection: &OwnedFd, path: &Path, access: Access) -> io::Result<Lent> {
    let lender = Lender::of(connection.as_fd())?;
    let opened = std::thread::scope(|scope| {
        let opening = scope.spawn(|| {
            lender.act()?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = rustix::fs::open(path, flags, Mode::empty())?;
            // Whoever cannot read it here has nothing to lend.
            let readable = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::openat(&directory, ".", readable, Mode::empty())?;
            io::Result::Ok(directory)
        });
        opening.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    });
    Ok(Lent { directory: opened?, lender, access })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn whoever_connects_is_known_by_the_kernel() {
        let (one, _other) = UnixStream::pair().expect("pair");
        let lender = Lender::of(one.as_fd()).expect("peer");
        assert_eq!(lender.uid, rustix::process::geteuid().as_raw());
        let directory = tempfile::tempdir().expect("directory");
        let lent = open(&one.into(), directory.path(), Access::ReadOnly).expect("open");
        assert_eq!(lent.lender, lender);
    }

    #[test]
    fn what_is_no_directory_is_not_lent() {
        let (one, _other) = UnixStream::pair().expect("pair");
        let file = tempfile::NamedTempFile::new().expect("file");
        let refused = open(&one.into(), file.path(), Access::ReadOnly).expect_err("a file");
        assert_eq!(refused.raw_os_error(), Some(libc::ENOTDIR));
    }
}
