//! What a guest is told of a file beside its bytes, and what it may change of that: mode, ids, size, times, attributes of
//! users. Called by [`super`].

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{SetattrValid, stat64};
use fuse_backend_rs::api::filesystem::{GetxattrReply, ListxattrReply};
use rustix::fs::{AtFlags, OFlags, XattrFlags};

use super::super::nodes::{errno, look};
use super::data::{drop_set_ids, keep, to_keep};
use super::{IDS, PROOF_NODE, PROVED_WITHIN, Tree, number};

/// The largest extended attribute, and the longest list of their names, bytes: the kernel's own bounds.
const ATTRIBUTE: usize = 64 * 1024;

/// Which extended attributes are kept.
fn is_kept(name: &CStr) -> bool {
    name.to_bytes().starts_with(b"user.") || name == c"security.capability"
}

/// Why one is not: a kind that there is elsewhere is answered by `code`.
fn not_kept(name: &CStr, code: i32) -> io::Error {
    let is_roots = [&b"trusted."[..], b"security."].iter().any(|kind| name.to_bytes().starts_with(kind));
    errno(if is_roots { code } else { libc::EOPNOTSUPP })
}

fn time(seconds: i64, nanoseconds: i64, given: bool, now: bool) -> rustix::fs::Timespec {
    let nanoseconds = match (given, now) {
        (_, true) => rustix::fs::UTIME_NOW,
        (true, false) => nanoseconds,
        (false, false) => rustix::fs::UTIME_OMIT,
    };
    rustix::fs::Timespec { tv_sec: seconds, tv_nsec: nanoseconds }
}

impl Tree {
    pub(super) fn attributes(&self, node: u64) -> io::Result<(stat64, Duration)> {
        if node == PROOF_NODE {
            return Ok((self.proof_attributes()?, PROVED_WITHIN));
        }
        Ok((self.shown(&look(&*self.file(node)?)?), self.timeout()))
    }

    pub(super) fn proof_attributes(&self) -> io::Result<stat64> {
        let mut stat = self.shown(&look(self.nodes.root())?);
        stat.st_ino = PROOF_NODE;
        stat.st_mode = libc::S_IFREG | 0o444;
        stat.st_nlink = 1;
        stat.st_size = self.proof.len() as i64;
        stat.st_blocks = 0;
        Ok(stat)
    }

    /// A file for its extended attributes: only files with bytes and directories have any that we keep.
    fn for_attributes(&self, node: u64) -> io::Result<Option<OwnedFd>> {
        if node == PROOF_NODE {
            return Ok(None);
        }
        let flags = match self.nodes.who(node)?.kind() {
            libc::S_IFREG => OFlags::RDONLY | OFlags::NONBLOCK,
            libc::S_IFDIR => OFlags::RDONLY | OFlags::DIRECTORY,
            _ => return Ok(None),
        };
        self.again(self.file(node)?.as_fd(), flags).map(Some)
    }

    pub(super) fn change(
        &self,
        node: u64,
        attr: &stat64,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(stat64, Duration)> {
        if node == PROOF_NODE {
            return Err(errno(libc::EPERM));
        }
        let handle = handle.and_then(|handle| self.handle(handle, node).ok());
        let file = self.file(node)?;
        if valid.contains(SetattrValid::MODE) {
            rustix::fs::chmodat(&self.files, number(file.as_fd()), self.mode(attr.st_mode), AtFlags::empty())?;
        }
        if valid.intersects(SetattrValid::UID | SetattrValid::GID) {
            let id = |given: bool, id: u32| match (given, id) {
                (false, _) => Ok(None),
                (true, id) if id < IDS => Ok(Some(id)),
                (true, _) => Err(errno(libc::EINVAL)),
            };
            let uid = id(valid.contains(SetattrValid::UID), attr.st_uid)?;
            let gid = id(valid.contains(SetattrValid::GID), attr.st_gid)?;
            if self.lender.is_some() {
                // Nobody gives away what is lent; that it is the guest's user's already is fine.
                let now = self.shown(&look(&*file)?);
                if uid.is_some_and(|uid| uid != now.st_uid) || gid.is_some_and(|gid| gid != now.st_gid) {
                    return Err(errno(libc::EPERM));
                }
            } else {
                let (uid, gid) = (uid.map(rustix::fs::Uid::from_raw), gid.map(rustix::fs::Gid::from_raw));
                rustix::fs::chownat(&*file, c"", uid, gid, AtFlags::EMPTY_PATH)?;
            }
        }
        if valid.contains(SetattrValid::SIZE) {
            let size = u64::try_from(attr.st_size).map_err(|_| errno(libc::EINVAL))?;
            let opened;
            let file = match &handle {
                Some(handle) if !handle.directory => &handle.file,
                _ => {
                    opened = File::from(self.open_node(node, OFlags::WRONLY | OFlags::NONBLOCK)?);
                    &opened
                }
            };
            let bits = to_keep(file, !valid.contains(SetattrValid::KILL_SUIDGID))?;
            rustix::fs::ftruncate(file, size)?;
            keep(file, bits)?;
        }
        if valid.contains(SetattrValid::KILL_SUIDGID) && self.nodes.who(node)?.kind() == libc::S_IFREG {
            drop_set_ids(&File::from(self.open_node(node, OFlags::RDONLY | OFlags::NONBLOCK)?))?;
        }
        if valid.intersects(SetattrValid::ATIME | SetattrValid::MTIME) {
            let atime = valid.contains(SetattrValid::ATIME);
            let mtime = valid.contains(SetattrValid::MTIME);
            let times = rustix::fs::Timestamps {
                last_access: time(
                    attr.st_atime,
                    attr.st_atime_nsec,
                    atime,
                    atime && valid.contains(SetattrValid::ATIME_NOW),
                ),
                last_modification: time(
                    attr.st_mtime,
                    attr.st_mtime_nsec,
                    mtime,
                    mtime && valid.contains(SetattrValid::MTIME_NOW),
                ),
            };
            rustix::fs::utimensat(&self.files, number(file.as_fd()), &times, AtFlags::empty())?;
        }
        match handle {
            Some(handle) => Ok((self.shown(&look(&handle.file)?), self.timeout())),
            None => self.attributes(node),
        }
    }

    pub(super) fn set_attribute(&self, node: u64, name: &CStr, value: &[u8], flags: u32) -> io::Result<()> {
        if !is_kept(name) {
            return Err(not_kept(name, libc::EPERM));
        }
        let file = self.for_attributes(node)?.ok_or(errno(libc::EPERM))?;
        let flags = XattrFlags::from_bits(flags).ok_or(errno(libc::EINVAL))?;
        Ok(rustix::fs::fsetxattr(file, name, value, flags)?)
    }

    pub(super) fn attribute(&self, node: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        if !is_kept(name) {
            return Err(not_kept(name, libc::ENODATA));
        }
        let file = self.for_attributes(node)?.ok_or(errno(libc::ENODATA))?;
        if size == 0 {
            return Ok(GetxattrReply::Count(rustix::fs::fgetxattr_query(file, name)? as u32));
        }
        let mut value = vec![0; (size as usize).min(ATTRIBUTE)];
        let length = rustix::fs::fgetxattr(file, name, &mut value[..])?;
        value.truncate(length);
        Ok(GetxattrReply::Value(value))
    }

    pub(super) fn attribute_names(&self, node: u64, size: u32) -> io::Result<ListxattrReply> {
        let mut names = Vec::new();
        if let Some(file) = self.for_attributes(node)? {
            let mut all = vec![0; ATTRIBUTE];
            let length = rustix::fs::flistxattr(file, &mut all[..])?;
            for name in all[..length].split_inclusive(|byte| *byte == 0) {
                if CStr::from_bytes_with_nul(name).is_ok_and(is_kept) {
                    names.extend_from_slice(name);
                }
            }
        }
        match size as usize {
            0 => Ok(ListxattrReply::Count(names.len() as u32)),
            size if size < names.len() => Err(errno(libc::ERANGE)),
            _ => Ok(ListxattrReply::Names(names)),
        }
    }

    pub(super) fn remove_attribute(&self, node: u64, name: &CStr) -> io::Result<()> {
        if !is_kept(name) {
            return Err(not_kept(name, libc::ENODATA));
        }
        let file = self.for_attributes(node)?.ok_or(errno(libc::ENODATA))?;
        Ok(rustix::fs::fremovexattr(file, name)?)
    }
}
