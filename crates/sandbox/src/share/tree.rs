//! A tree of the host as a guest's file system: each request of the guest's kernel is one or two system calls here.
//!
//! The guest's kernel has checked permissions (`default_permissions`), as a disk's would; here files are made under the ids
//! of whoever asked. Nothing is reached by a path: an entry is opened below a directory that is open, and a file is opened
//! for reading or writing through its own descriptor. Called by `serve`, on several threads at once.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{
    CreateIn, FOPEN_IN_KILL_SUIDGID, FsOptions, OpenOptions, SetattrValid, WRITE_KILL_PRIV, stat64, statvfs64,
};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, GetxattrReply, ListxattrReply, ZeroCopyReader, ZeroCopyWriter,
};
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, RawDir, RenameFlags, SeekFrom, Statx, XattrFlags};

use super::locks::{Holder, Locks, Wanted};
use super::nodes::{Nodes, errno, look, look_at, plain};
use super::{Cache, PROOF};
use crate::sys;

/// The node of the file that proves the mount. Never one of the tree's.
const PROOF_NODE: u64 = u64::MAX - 1;

/// Ids that a guest's file can have: those of its user namespace.
const IDS: u32 = 65_536;

/// The largest extended attribute, and the longest list of their names, bytes: the kernel's own bounds.
const ATTRIBUTE: usize = 64 * 1024;

/// The most of a directory that is read at once, bytes.
const DIRECTORY: usize = 64 * 1024;

/// How long names and attributes may be trusted where others change the tree too. An overwritten file is read anew when it
/// is opened, a replaced one is found after this at the latest.
const SHARED: Duration = Duration::from_secs(1);

/// The same where nobody else does: as good as for ever.
const ALONE: Duration = Duration::from_secs(86_400);

#[derive(Debug)]
struct Handle {
    file: File,
    node: u64,
    append: AtomicBool,
    directory: bool,
}

/// A tree being served.
#[derive(Debug)]
pub(super) struct Tree {
    pub nodes: Nodes,
    pub locks: Locks,
    /// `/proc/self/fd`: the way from a descriptor to another of the same file.
    files: OwnedFd,
    handles: Mutex<HashMap<u64, Arc<Handle>>>,
    next: AtomicU64,
    most: usize,
    cache: Cache,
    proof: Vec<u8>,
    begun: AtomicBool,
}

impl Tree {
    /// The tree below the root of `nodes`, with so many files open at once at the most. `proof` is what the file that
    /// proves the mount says.
    pub fn new(nodes: Nodes, files: OwnedFd, most: usize, cache: Cache, proof: Vec<u8>) -> Self {
        let (handles, locks) = (Mutex::default(), Locks::default());
        let begun = AtomicBool::new(false);
        Tree { nodes, locks, files, handles, next: AtomicU64::new(1), most, cache, proof, begun }
    }

    fn timeout(&self) -> Duration {
        match self.cache {
            Cache::Shared => SHARED,
            Cache::Alone => ALONE,
        }
    }

    fn handle(&self, id: u64, node: u64) -> io::Result<Arc<Handle>> {
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = handles.get(&id).filter(|handle| handle.node == node).ok_or(errno(libc::EBADF))?;
        Ok(handle.clone())
    }

    fn hold(&self, file: File, node: u64, flags: OFlags, directory: bool) -> io::Result<u64> {
        let handle = Handle { file, node, append: AtomicBool::new(flags.contains(OFlags::APPEND)), directory };
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        if handles.len() >= self.most {
            return Err(errno(libc::EMFILE));
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        handles.insert(id, Arc::new(handle));
        Ok(id)
    }

    fn let_go(&self, id: u64) {
        let gone = self.handles.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        drop(gone);
    }

    /// Opens the file of a descriptor anew, whatever it is called by now.
    fn again(&self, file: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
        Ok(rustix::fs::openat(&self.files, number(file), flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())?)
    }

    /// Opens a node's file for reading or writing. Only what has bytes is opened: a pipe would wait for its other end, and
    /// belongs to the guest's kernel alone.
    fn open_node(&self, node: u64, flags: OFlags) -> io::Result<OwnedFd> {
        if self.nodes.who(node)?.kind() != libc::S_IFREG {
            return Err(errno(libc::ENXIO));
        }
        self.again(self.nodes.file(node)?.as_fd(), flags)
    }

    /// A descriptor for a lock: one that may hold either kind where the tree can be written.
    pub fn open_for_lock(&self, wanted: &Wanted) -> io::Result<OwnedFd> {
        if wanted.by.whole && self.nodes.who(wanted.by.node)?.kind() == libc::S_IFDIR {
            return self.again(self.nodes.file(wanted.by.node)?.as_fd(), OFlags::RDONLY | OFlags::DIRECTORY);
        }
        match self.open_node(wanted.by.node, OFlags::RDWR) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EROFS | libc::EACCES | libc::ETXTBSY)) => {
                self.open_node(wanted.by.node, OFlags::RDONLY)
            }
            opened => opened,
        }
    }

    fn entry(&self, parent: u64, name: &CStr, seen: &Statx) -> io::Result<Entry> {
        let inode = self.nodes.found(parent, name, seen)?;
        let timeout = self.timeout();
        Ok(Entry {
            inode,
            generation: 0,
            attr: sys::stat64(seen),
            attr_flags: 0,
            attr_timeout: timeout,
            entry_timeout: timeout,
        })
    }

    /// The entry that was just made.
    fn made(&self, parent: u64, directory: &OwnedFd, name: &CStr) -> io::Result<Entry> {
        self.entry(parent, name, &look_at(directory, name)?)
    }

    fn attributes(&self, node: u64) -> io::Result<(stat64, Duration)> {
        if node == PROOF_NODE {
            return Ok((self.proof_attributes()?, Duration::ZERO));
        }
        Ok((sys::stat64(&look(&*self.nodes.file(node)?)?), self.timeout()))
    }

    fn proof_attributes(&self) -> io::Result<stat64> {
        let mut stat = sys::stat64(&look(self.nodes.root())?);
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
        self.again(self.nodes.file(node)?.as_fd(), flags).map(Some)
    }

    fn read_directory(
        &self,
        node: u64,
        handle: u64,
        (size, offset): (u32, u64),
        add: &mut dyn FnMut(&CStr, DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        let handle = self.handle(handle, node)?;
        if !handle.directory {
            return Err(errno(libc::ENOTDIR));
        }
        // A copy of the descriptor has the same position, so whoever reads one directory through one handle takes turns;
        // the kernel of a guest does.
        rustix::fs::seek(&handle.file, SeekFrom::Start(offset))?;
        let mut buffer = vec![MaybeUninit::uninit(); (size as usize).clamp(4096, DIRECTORY)];
        let mut entries = RawDir::new(&handle.file, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name();
            let kind = match entry.file_type() {
                FileType::RegularFile => libc::DT_REG,
                FileType::Directory => libc::DT_DIR,
                FileType::Symlink => libc::DT_LNK,
                FileType::Fifo => libc::DT_FIFO,
                FileType::Socket => libc::DT_SOCK,
                FileType::CharacterDevice => libc::DT_CHR,
                FileType::BlockDevice => libc::DT_BLK,
                FileType::Unknown => libc::DT_UNKNOWN,
            };
            let entry = DirEntry {
                ino: entry.ino(),
                offset: entry.next_entry_cookie(),
                type_: u32::from(kind),
                name: name.to_bytes(),
            };
            if add(name, entry)? == 0 {
                break;
            }
        }
        Ok(())
    }
}

/// A descriptor's name in `/proc/self/fd`.
fn number(fd: BorrowedFd<'_>) -> String {
    fd.as_raw_fd().to_string()
}

/// Takes the ids of whoever asks, for what this thread makes next.
fn act_as(ctx: &Context) -> io::Result<()> {
    if ctx.uid >= IDS || ctx.gid >= IDS || !sys::file_ids(ctx.uid, ctx.gid) {
        return Err(errno(libc::EINVAL));
    }
    Ok(())
}

/// How a guest may open a file here. Direct transfers are between the guest and us, and nothing is made by an open.
fn sane(flags: u32) -> OFlags {
    let kept = OFlags::ACCMODE | OFlags::TRUNC | OFlags::APPEND | OFlags::DSYNC | OFlags::SYNC | OFlags::NOATIME;
    OFlags::from_bits_retain(flags) & kept | OFlags::NONBLOCK
}

thread_local! {
    /// The node whose mode the request at work on this thread has changed without an answer that tells.
    static CHANGED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The node whose mode the last request on this thread changed without a word: a guest's kernel asks for times and size
/// again by itself after a write, and not for the mode.
pub(super) fn changed() -> Option<u64> {
    CHANGED.take()
}

/// Takes a file's set-id bits away, as a disk does when somebody without the right to keep them changes it. The guest's
/// kernel says when; here the right is there for whoever may. Whether there were any.
fn drop_set_ids(file: &File) -> io::Result<bool> {
    let bits = u32::from(look(file)?.stx_mode);
    let group = if bits & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 };
    let had = bits & (libc::S_ISUID | group) != 0;
    if had {
        rustix::fs::fchmod(file, mode(bits & !(libc::S_ISUID | group)))?;
    }
    Ok(had)
}

fn mode(bits: u32) -> Mode {
    Mode::from_raw_mode(bits & 0o7777)
}

/// Which extended attributes are kept.
fn is_kept(name: &CStr) -> bool {
    name.to_bytes().starts_with(b"user.") || name == c"security.capability"
}

fn time(seconds: i64, nanoseconds: i64, given: bool, now: bool) -> rustix::fs::Timespec {
    let nanoseconds = match (given, now) {
        (_, true) => rustix::fs::UTIME_NOW,
        (true, false) => nanoseconds,
        (false, false) => rustix::fs::UTIME_OMIT,
    };
    rustix::fs::Timespec { tv_sec: seconds, tv_nsec: nanoseconds }
}

impl FileSystem for Tree {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, _capable: FsOptions) -> io::Result<FsOptions> {
        if self.begun.swap(true, Ordering::AcqRel) {
            return Err(errno(libc::EIO));
        }
        Ok(FsOptions::ASYNC_READ
            | FsOptions::POSIX_LOCKS
            | FsOptions::FLOCK_LOCKS
            | FsOptions::ATOMIC_O_TRUNC
            | FsOptions::BIG_WRITES
            | FsOptions::AUTO_INVAL_DATA
            | FsOptions::ASYNC_DIO
            | FsOptions::DO_READDIRPLUS
            | FsOptions::READDIRPLUS_AUTO
            | FsOptions::PARALLEL_DIROPS
            | FsOptions::MAX_PAGES
            | FsOptions::CACHE_SYMLINKS
            // Capabilities of files go by the host's kernel itself, set-id bits when the guest's kernel says so.
            | FsOptions::HANDLE_KILLPRIV_V2)
    }

    fn lookup(&self, _ctx: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        let name = plain(name)?;
        if parent == super::nodes::ROOT && name == PROOF && !self.proof.is_empty() {
            let attr = self.proof_attributes()?;
            return Ok(Entry { inode: PROOF_NODE, attr, ..Entry::default() });
        }
        match look_at(&*self.nodes.file(parent)?, name) {
            Ok(seen) => self.entry(parent, name, &seen),
            // Only where nobody else can make it appear is it remembered that it is not there.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) && self.cache == Cache::Alone => {
                Ok(Entry { entry_timeout: ALONE, ..Entry::default() })
            }
            Err(error) => Err(error),
        }
    }

    fn forget(&self, _ctx: &Context, node: u64, count: u64) {
        self.nodes.forget(node, count);
    }

    fn batch_forget(&self, _ctx: &Context, requests: Vec<(u64, u64)>) {
        for (node, count) in requests {
            self.nodes.forget(node, count);
        }
    }

    fn getattr(&self, _ctx: &Context, node: u64, handle: Option<u64>) -> io::Result<(stat64, Duration)> {
        if let Some(handle) = handle.filter(|_| node != PROOF_NODE)
            && let Ok(handle) = self.handle(handle, node)
        {
            return Ok((sys::stat64(&look(&handle.file)?), self.timeout()));
        }
        self.attributes(node)
    }

    fn setattr(
        &self,
        _ctx: &Context,
        node: u64,
        attr: stat64,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(stat64, Duration)> {
        if node == PROOF_NODE {
            return Err(errno(libc::EPERM));
        }
        let handle = handle.and_then(|handle| self.handle(handle, node).ok());
        let file = self.nodes.file(node)?;
        if valid.contains(SetattrValid::MODE) {
            rustix::fs::chmodat(&self.files, number(file.as_fd()), mode(attr.st_mode), AtFlags::empty())?;
        }
        if valid.intersects(SetattrValid::UID | SetattrValid::GID) {
            let id = |given: bool, id: u32| match (given, id) {
                (false, _) => Ok(None),
                (true, id) if id < IDS => Ok(Some(id)),
                (true, _) => Err(errno(libc::EINVAL)),
            };
            let uid = id(valid.contains(SetattrValid::UID), attr.st_uid)?.map(rustix::fs::Uid::from_raw);
            let gid = id(valid.contains(SetattrValid::GID), attr.st_gid)?.map(rustix::fs::Gid::from_raw);
            rustix::fs::chownat(&*file, c"", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if valid.contains(SetattrValid::SIZE) {
            let size = u64::try_from(attr.st_size).map_err(|_| errno(libc::EINVAL))?;
            match &handle {
                Some(handle) if !handle.directory => rustix::fs::ftruncate(&handle.file, size)?,
                _ => rustix::fs::ftruncate(self.open_node(node, OFlags::WRONLY | OFlags::NONBLOCK)?, size)?,
            }
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
            Some(handle) => Ok((sys::stat64(&look(&handle.file)?), self.timeout())),
            None => self.attributes(node),
        }
    }

    fn readlink(&self, _ctx: &Context, node: u64) -> io::Result<Vec<u8>> {
        Ok(rustix::fs::readlinkat(&*self.nodes.file(node)?, c"", Vec::new())?.into_bytes())
    }

    fn symlink(&self, ctx: &Context, target: &CStr, parent: u64, name: &CStr) -> io::Result<Entry> {
        let (name, directory) = (plain(name)?, self.nodes.file(parent)?);
        act_as(ctx)?;
        rustix::fs::symlinkat(target, &*directory, name)?;
        self.made(parent, &directory, name)
    }

    fn mknod(
        &self,
        ctx: &Context,
        parent: u64,
        name: &CStr,
        bits: u32,
        _device: u32,
        _umask: u32,
    ) -> io::Result<Entry> {
        let kind = match bits & libc::S_IFMT {
            libc::S_IFREG | 0 => FileType::RegularFile,
            libc::S_IFIFO => FileType::Fifo,
            libc::S_IFSOCK => FileType::Socket,
            // A device would be the host's: it means nothing here.
            _ => return Err(errno(libc::EPERM)),
        };
        let (name, directory) = (plain(name)?, self.nodes.file(parent)?);
        act_as(ctx)?;
        rustix::fs::mknodat(&*directory, name, kind, mode(bits), 0)?;
        self.made(parent, &directory, name)
    }

    fn mkdir(&self, ctx: &Context, parent: u64, name: &CStr, bits: u32, _umask: u32) -> io::Result<Entry> {
        let (name, directory) = (plain(name)?, self.nodes.file(parent)?);
        act_as(ctx)?;
        rustix::fs::mkdirat(&*directory, name, mode(bits))?;
        self.made(parent, &directory, name)
    }

    fn unlink(&self, _ctx: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        let (name, directory) = (plain(name)?, self.nodes.file(parent)?);
        let known = self.nodes.before_loss(&directory, parent, name);
        rustix::fs::unlinkat(&*directory, name, AtFlags::empty())?;
        known.into_iter().for_each(|node| self.nodes.lost(node));
        Ok(())
    }

    fn rmdir(&self, _ctx: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        let (name, directory) = (plain(name)?, self.nodes.file(parent)?);
        let known = self.nodes.before_loss(&directory, parent, name);
        rustix::fs::unlinkat(&*directory, name, AtFlags::REMOVEDIR)?;
        known.into_iter().for_each(|node| self.nodes.lost(node));
        Ok(())
    }

    fn rename(&self, _ctx: &Context, from: u64, old: &CStr, to: u64, new: &CStr, flags: u32) -> io::Result<()> {
        let (old, new) = (plain(old)?, plain(new)?);
        let flags = RenameFlags::from_bits(flags).ok_or(errno(libc::EINVAL))?;
        if flags.contains(RenameFlags::WHITEOUT) {
            return Err(errno(libc::EINVAL));
        }
        let (from_file, to_file) = (self.nodes.file(from)?, self.nodes.file(to)?);
        let replaced = match flags.is_empty() {
            true => self.nodes.before_loss(&to_file, to, new),
            false => None,
        };
        rustix::fs::renameat_with(&*from_file, old, &*to_file, new, flags)?;
        // Two names of one file: a rename between them does nothing, and neither is lost.
        replaced.into_iter().for_each(|node| self.nodes.lost(node));
        self.nodes.renamed(to, new, &to_file);
        if flags.contains(RenameFlags::EXCHANGE) || replaced.is_some() {
            self.nodes.renamed(from, old, &from_file);
        }
        Ok(())
    }

    fn link(&self, _ctx: &Context, node: u64, parent: u64, name: &CStr) -> io::Result<Entry> {
        let (name, directory) = (plain(name)?, self.nodes.file(parent)?);
        let file = self.nodes.file(node)?;
        rustix::fs::linkat(&self.files, number(file.as_fd()), &*directory, name, AtFlags::SYMLINK_FOLLOW)?;
        self.made(parent, &directory, name)
    }

    fn open(
        &self,
        _ctx: &Context,
        node: u64,
        flags: u32,
        fuse_flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        if node == PROOF_NODE {
            return Ok((Some(0), OpenOptions::DIRECT_IO, None));
        }
        let flags = sane(flags);
        let file = File::from(self.open_node(node, flags)?);
        if fuse_flags & FOPEN_IN_KILL_SUIDGID != 0 && drop_set_ids(&file)? {
            CHANGED.set(Some(node));
        }
        let handle = self.hold(file, node, flags, false)?;
        Ok((Some(handle), self.kept(), None))
    }

    fn create(
        &self,
        ctx: &Context,
        parent: u64,
        name: &CStr,
        args: CreateIn,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions, Option<u32>)> {
        let (name, directory) = (plain(name)?, self.nodes.file(parent)?);
        let exclusive = OFlags::from_bits_retain(args.flags) & OFlags::EXCL;
        let flags = sane(args.flags);
        act_as(ctx)?;
        let how = flags | exclusive | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        // What is there already may be a pipe by now: NONBLOCK does not wait for its other end.
        let file = File::from(rustix::fs::openat(&*directory, name, how, mode(args.mode))?);
        let mut seen = look(&file)?;
        if u32::from(seen.stx_mode) & libc::S_IFMT != libc::S_IFREG {
            return Err(errno(libc::ENXIO));
        }
        if args.fuse_flags & FOPEN_IN_KILL_SUIDGID != 0 {
            drop_set_ids(&file)?;
            seen = look(&file)?;
        }
        let entry = self.entry(parent, name, &seen)?;
        match self.hold(file, entry.inode, flags, false) {
            Ok(handle) => Ok((entry, Some(handle), self.kept(), None)),
            Err(error) => {
                self.nodes.forget(entry.inode, 1);
                Err(error)
            }
        }
    }

    fn read(
        &self,
        _ctx: &Context,
        node: u64,
        handle: u64,
        w: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _lock_owner: Option<u64>,
        _flags: u32,
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

    fn write(
        &self,
        _ctx: &Context,
        node: u64,
        handle: u64,
        r: &mut dyn ZeroCopyReader,
        size: u32,
        offset: u64,
        _lock_owner: Option<u64>,
        _delayed_write: bool,
        flags: u32,
        fuse_flags: u32,
    ) -> io::Result<usize> {
        let handle = self.handle(handle, node)?;
        let append = OFlags::from_bits_retain(flags).contains(OFlags::APPEND);
        if handle.append.swap(append, Ordering::AcqRel) != append {
            // The program changed its mind by fcntl. At the end of the file is where the host's kernel writes then, which
            // no other Sandbox can come between.
            let now = rustix::fs::fcntl_getfl(&handle.file)?.difference(OFlags::APPEND);
            let add = if append { OFlags::APPEND } else { OFlags::empty() };
            rustix::fs::fcntl_setfl(&handle.file, now | add)?;
        }
        if fuse_flags & WRITE_KILL_PRIV != 0 && drop_set_ids(&handle.file)? {
            CHANGED.set(Some(node));
        }
        let mut file = handle.file.try_clone()?;
        let mut done = 0;
        while done < size as usize {
            match r.read_to(&mut file, size as usize - done, offset + done as u64) {
                Ok(0) => break,
                Ok(written) => done += written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // What was written is told; the next write tells why no more was.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn flush(&self, _ctx: &Context, node: u64, _handle: u64, lock_owner: u64) -> io::Result<()> {
        self.locks.leave(Holder { node, owner: lock_owner, whole: false });
        Ok(())
    }

    fn fsync(&self, _ctx: &Context, node: u64, datasync: bool, handle: u64) -> io::Result<()> {
        let handle = self.handle(handle, node)?;
        match datasync {
            true => Ok(rustix::fs::fdatasync(&handle.file)?),
            false => Ok(rustix::fs::fsync(&handle.file)?),
        }
    }

    fn fallocate(&self, _ctx: &Context, node: u64, handle: u64, bits: u32, offset: u64, length: u64) -> io::Result<()> {
        let handle = self.handle(handle, node)?;
        let flags = FallocateFlags::from_bits(bits).ok_or(errno(libc::EOPNOTSUPP))?;
        Ok(rustix::fs::fallocate(&handle.file, flags, offset, length)?)
    }

    fn release(
        &self,
        _ctx: &Context,
        node: u64,
        _flags: u32,
        handle: u64,
        _flush: bool,
        flock_release: bool,
        lock_owner: Option<u64>,
    ) -> io::Result<()> {
        if let Some(owner) = lock_owner {
            self.locks.leave(Holder { node, owner, whole: false });
            if flock_release {
                self.locks.leave(Holder { node, owner, whole: true });
            }
        }
        self.let_go(handle);
        Ok(())
    }

    fn statfs(&self, _ctx: &Context, _node: u64) -> io::Result<statvfs64> {
        sys::file_system(self.nodes.root().as_fd())
    }

    fn setxattr(&self, _ctx: &Context, node: u64, name: &CStr, value: &[u8], flags: u32) -> io::Result<()> {
        if !is_kept(name) {
            let is_list = name.to_bytes().starts_with(b"system.");
            return Err(errno(if is_list { libc::EOPNOTSUPP } else { libc::EPERM }));
        }
        let file = self.for_attributes(node)?.ok_or(errno(libc::EPERM))?;
        let flags = XattrFlags::from_bits(flags).ok_or(errno(libc::EINVAL))?;
        Ok(rustix::fs::fsetxattr(file, name, value, flags)?)
    }

    fn getxattr(&self, _ctx: &Context, node: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        if !is_kept(name) {
            let is_list = name.to_bytes().starts_with(b"system.");
            return Err(errno(if is_list { libc::EOPNOTSUPP } else { libc::ENODATA }));
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

    fn listxattr(&self, _ctx: &Context, node: u64, size: u32) -> io::Result<ListxattrReply> {
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

    fn removexattr(&self, _ctx: &Context, node: u64, name: &CStr) -> io::Result<()> {
        if !is_kept(name) {
            return Err(errno(libc::ENODATA));
        }
        let file = self.for_attributes(node)?.ok_or(errno(libc::ENODATA))?;
        Ok(rustix::fs::fremovexattr(file, name)?)
    }

    fn opendir(&self, _ctx: &Context, node: u64, _flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        let file = self.nodes.file(node)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let handle = self.hold(File::from(self.again(file.as_fd(), flags)?), node, flags, true)?;
        let options = match self.cache {
            Cache::Shared => OpenOptions::empty(),
            Cache::Alone => OpenOptions::KEEP_CACHE | OpenOptions::CACHE_DIR,
        };
        Ok((Some(handle), options))
    }

    fn readdir(
        &self,
        _ctx: &Context,
        node: u64,
        handle: u64,
        size: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        self.read_directory(node, handle, (size, offset), &mut |_, entry| add(entry))
    }

    fn readdirplus(
        &self,
        _ctx: &Context,
        node: u64,
        handle: u64,
        size: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>, Entry) -> io::Result<usize>,
    ) -> io::Result<()> {
        let directory = self.nodes.file(node)?;
        self.read_directory(node, handle, (size, offset), &mut |name, entry| {
            let found = match plain(name) {
                Ok(name) => look_at(&*directory, name).and_then(|seen| self.entry(node, name, &seen)),
                // The directory itself and the one above are told and not looked up.
                Err(_) => Ok(Entry::default()),
            };
            // One that went meanwhile, or for which there is no room, is told by its name alone.
            let found = found.unwrap_or_default();
            let added = add(entry, found);
            if found.inode != 0 && !matches!(added, Ok(size) if size > 0) {
                self.nodes.forget(found.inode, 1);
            }
            added
        })
    }

    fn fsyncdir(&self, ctx: &Context, node: u64, datasync: bool, handle: u64) -> io::Result<()> {
        self.fsync(ctx, node, datasync, handle)
    }

    fn releasedir(&self, _ctx: &Context, _node: u64, _flags: u32, handle: u64) -> io::Result<()> {
        self.let_go(handle);
        Ok(())
    }

    fn lseek(&self, _ctx: &Context, node: u64, handle: u64, offset: u64, whence: u32) -> io::Result<u64> {
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

impl Tree {
    fn kept(&self) -> OpenOptions {
        match self.cache {
            Cache::Shared => OpenOptions::empty(),
            Cache::Alone => OpenOptions::KEEP_CACHE,
        }
    }
}
