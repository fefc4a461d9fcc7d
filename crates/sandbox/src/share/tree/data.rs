//! The bytes of files: opening, reading, writing, room and holes. Called by [`super`].

use std::cell::Cell;
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::os::fd::AsFd;

use fuse_backend_rs::abi::fuse_abi::{CreateIn, FOPEN_IN_KILL_SUIDGID, OpenOptions, WRITE_KILL_PRIV};
use fuse_backend_rs::api::filesystem::{Context, Entry, ZeroCopyReader, ZeroCopyWriter};
use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::io::ReadWriteFlags;

use super::super::Cache;
use super::super::nodes::{errno, look, plain};
use super::{PROOF_NODE, Tree, mode};

type Opened = (Option<u64>, OpenOptions, Option<u32>);

type Created = (Entry, Option<u64>, OpenOptions, Option<u32>);

thread_local! {
    /// The node whose mode the request at work on this thread has changed without an answer that tells.
    static CHANGED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The node whose mode the last request on this thread changed without a word: a guest's kernel asks for times and size
/// again by itself after a write, and not for the mode.
pub(in crate::share) fn changed() -> Option<u64> {
    CHANGED.take()
}

/// A file's mode and its set-id bits.
fn set_ids(file: impl AsFd) -> io::Result<(u32, u32)> {
    let bits = u32::from(look(file)?.stx_mode);
    let group = if bits & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 };
    Ok((bits, bits & (libc::S_ISUID | group)))
}

/// Takes a file's set-id bits away, as a disk does when somebody without the right to keep them changes it. The guest's
/// kernel says when. Whether there were any.
pub(super) fn drop_set_ids(file: &File) -> io::Result<bool> {
    let (bits, set) = set_ids(file)?;
    if set != 0 {
        rustix::fs::fchmod(file, mode(bits & !set))?;
    }
    Ok(set != 0)
}

/// The mode that a file is to have again after a change for which whoever asked may keep its set-id bits; `None`: it has
/// none. The host's kernel takes them away: this process has no right to keep them that it knows.
pub(super) fn to_keep(file: impl AsFd, may: bool) -> io::Result<Option<Mode>> {
    let (bits, set) = if may { set_ids(file)? } else { (0, 0) };
    Ok((set != 0).then(|| mode(bits)))
}

/// Gives a file back what [`to_keep`] said.
pub(super) fn keep(file: &File, bits: Option<Mode>) -> io::Result<()> {
    bits.map_or(Ok(()), |bits| Ok(rustix::fs::fchmod(file, bits)?))
}

/// How a guest may open a file here. Direct transfers are between the guest and us, nothing is made by an open, and each
/// write says itself whether it is one at the end.
fn sane(flags: u32) -> OFlags {
    let kept = OFlags::ACCMODE | OFlags::TRUNC | OFlags::DSYNC | OFlags::SYNC | OFlags::NOATIME;
    OFlags::from_bits_retain(flags) & kept | OFlags::NONBLOCK
}

impl Tree {
    fn kept(&self) -> OpenOptions {
        match self.cache {
            Cache::Shared => OpenOptions::empty(),
            Cache::Alone => OpenOptions::KEEP_CACHE,
        }
    }

    pub(super) fn open_data(&self, node: u64, flags: u32, fuse_flags: u32) -> io::Result<Opened> {
        if node == PROOF_NODE {
            return Ok((Some(0), OpenOptions::DIRECT_IO, None));
        }
        let flags = sane(flags);
        let kills = fuse_flags & FOPEN_IN_KILL_SUIDGID != 0;
        let bits = to_keep(&*self.file(node)?, flags.contains(OFlags::TRUNC) && !kills)?;
        let file = File::from(self.open_node(node, flags)?);
        keep(&file, bits)?;
        if kills && drop_set_ids(&file)? {
            CHANGED.set(Some(node));
        }
        let handle = self.hold(file, node, false)?;
        Ok((Some(handle), self.kept(), None))
    }

    pub(super) fn create_data(&self, ctx: &Context, parent: u64, name: &CStr, args: CreateIn) -> io::Result<Created> {
        let (name, directory) = (plain(name)?, self.file(parent)?);
        let exclusive = OFlags::from_bits_retain(args.flags).contains(OFlags::EXCL);
        self.act_as(ctx)?;
        let how =
            sane(args.flags) | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        // Another guest made it since the guest's kernel looked, which has asked nobody whether this user may open it. At
        // ESTALE it looks once more, and opens what it finds as any file.
        let made = rustix::fs::openat(&*directory, name, how, self.mode(args.mode)).map_err(|error| match error {
            Errno::EXIST if !exclusive => Errno::STALE,
            other => other,
        })?;
        let file = File::from(made);
        let entry = self.entry(parent, name, &look(&file)?)?;
        match self.hold(file, entry.inode, false) {
            Ok(handle) => Ok((entry, Some(handle), self.kept(), None)),
            Err(error) => {
                self.nodes.forget(entry.inode, 1);
                Err(error)
            }
        }
    }

    pub(super) fn read_data(
        &self,
        node: u64,
        handle: u64,
        w: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
    ) -> io::Result<usize> {
        if node == PROOF_NODE {
            let from = usize::try_from(offset).unwrap_or(usize::MAX).min(self.proof.len());
            let part = &self.proof[from..(from + size as usize).min(self.proof.len())];
            w.write_all(part)?;
            return Ok(part.len());
        }
        let handle = self.handle(handle, node)?;
        // The trait wants the file for itself.
        let mut file = handle.file.try_clone()?;
        let mut done = 0;
        while done < size as usize {
            match w.write_from(&mut file, size as usize - done, offset + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    pub(super) fn write_data(
        &self,
        node: u64,
        handle: u64,
        r: &mut dyn ZeroCopyReader,
        (size, offset): (u32, u64),
        flags: u32,
        fuse_flags: u32,
    ) -> io::Result<usize> {
        let handle = self.handle(handle, node)?;
        let append = OFlags::from_bits_retain(flags).contains(OFlags::APPEND);
        let may = fuse_flags & WRITE_KILL_PRIV == 0;
        let bits = to_keep(&handle.file, may)?;
        if !may && drop_set_ids(&handle.file)? {
            CHANGED.set(Some(node));
        }
        let mut file = handle.file.try_clone()?;
        let mut done = 0;
        if append {
            // At the end is where the host's kernel writes then, whatever the guest believes the end to be: no other
            // Sandbox can come between. A page of a mapping, written meanwhile through the same open file, has its place.
            let mut data = Vec::new();
            r.take(u64::from(size)).read_to_end(&mut data)?;
            done = rustix::io::retry_on_intr(|| {
                rustix::io::pwritev2(&file, &[IoSlice::new(&data)], 0, ReadWriteFlags::APPEND)
            })?;
        }
        while done < size as usize && !append {
            match r.read_to(&mut file, size as usize - done, offset + done as u64) {
                Ok(0) => break,
                Ok(written) => done += written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // What was written is told; the next write tells why no more was.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        keep(&handle.file, bits)?;
        Ok(done)
    }

    pub(super) fn flush_data(&self, node: u64, datasync: bool, handle: u64) -> io::Result<()> {
        let handle = self.handle(handle, node)?;
        match datasync {
            true => Ok(rustix::fs::fdatasync(&handle.file)?),
            false => Ok(rustix::fs::fsync(&handle.file)?),
        }
    }

    pub(super) fn allocate(
        &self,
        by: &Context,
        node: u64,
        handle: u64,
        bits: u32,
        (offset, length): (u64, u64),
    ) -> io::Result<()> {
        let handle = self.handle(handle, node)?;
        let flags = FallocateFlags::from_bits(bits).ok_or(errno(libc::EOPNOTSUPP))?;
        // Here the guest's kernel does not say whether set-id bits may stay: root may keep them.
        let bits = to_keep(&handle.file, by.uid == 0)?;
        rustix::fs::fallocate(&handle.file, flags, offset, length)?;
        keep(&handle.file, bits)
    }

    pub(super) fn find_data(&self, node: u64, handle: u64, offset: u64, whence: u32) -> io::Result<u64> {
        let handle = self.handle(handle, node)?;
        if handle.directory {
            return Err(errno(libc::EINVAL));
        }
        let from = match whence as i32 {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            // The guest's kernel knows all other positions by itself.
            _ => return Err(errno(libc::EINVAL)),
        };
        Ok(rustix::fs::seek(&handle.file, from)?)
    }
}
