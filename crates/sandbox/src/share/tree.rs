//! A tree of the host as a guest's file system: each request of the guest's kernel is one or two system calls here.
//!
//! The guest's kernel has checked permissions (`default_permissions`), as a disk's would; here files are made under the ids
//! of whoever asked. Nothing is reached by a path: an entry is opened below a directory that is open, and a file is opened
//! for reading or writing through its own descriptor. Called by `serve`, on several threads at once.

mod attributes;
mod data;
mod directory;

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{CreateIn, FsOptions, OpenOptions, SetattrValid, stat64, statvfs64};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, GetxattrReply, ListxattrReply, ZeroCopyReader, ZeroCopyWriter,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Statx};

use super::locks::{Holder, Locks, Wanted};
use super::nodes::{Nodes, errno, look, look_at, plain};
use super::{Cache, PROOF};
use crate::sys;
use crate::volume::USER;

pub(super) use data::changed;

/// The node of the file that proves the mount. Never one of the tree's.
const PROOF_NODE: u64 = u64::MAX - 1;

/// How long a guest's kernel need not ask again what kind of file that is: while it reads it.
const PROVED_WITHIN: Duration = Duration::from_secs(60);

/// Ids that a guest's file can have: those of its user namespace.
const IDS: u32 = 65_536;

/// To whom what is lent belongs, where it is not the lender's.
const NOBODY: u32 = 65_534;

/// How long names and attributes may be trusted where others change the tree too. An overwritten file is read anew when it
/// is opened, a replaced one is found after this at the latest.
const SHARED: Duration = Duration::from_secs(1);

/// The same where nobody else does: as good as for ever.
const ALONE: Duration = Duration::from_secs(86_400);

#[derive(Debug)]
struct Handle {
    file: File,
    node: u64,
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
    /// Ids of whoever lends the tree, with whose rights all is done then.
    lender: Option<(u32, u32)>,
}

impl Tree {
    /// The tree below the root of `nodes`, with so many files open at once at the most. `proof` is what the file that
    /// proves the mount says. What somebody lends (`lender`) belongs to the guest's user there, and everything else to nobody.
    pub fn new(
        nodes: Nodes,
        files: OwnedFd,
        most: usize,
        cache: Cache,
        proof: Vec<u8>,
        lender: Option<(u32, u32)>,
    ) -> Self {
        let (handles, locks) = (Mutex::default(), Locks::default());
        let begun = AtomicBool::new(false);
        Tree { nodes, locks, files, handles, next: AtomicU64::new(1), most, cache, proof, begun, lender }
    }

    /// A file's attributes as the guest is told them.
    fn shown(&self, seen: &Statx) -> stat64 {
        let mut stat = sys::stat64(seen);
        if let Some((uid, gid)) = self.lender {
            stat.st_uid = if stat.st_uid == uid { USER } else { NOBODY };
            stat.st_gid = if stat.st_gid == gid { USER } else { NOBODY };
        }
        stat
    }

    /// Takes the ids of whoever asks, for what this thread makes next. What is lent is made by whoever lends it.
    fn act_as(&self, ctx: &Context) -> io::Result<()> {
        let possible = ctx.uid < IDS && ctx.gid < IDS;
        match self.lender {
            Some(_) => Ok(()),
            None if possible && sys::file_ids(ctx.uid, ctx.gid) => Ok(()),
            None => Err(errno(libc::EINVAL)),
        }
    }

    /// The permission bits of what is made or changed. A program that whoever runs it runs as somebody else is never made of
    /// what is lent: there it would mean something on the host.
    fn mode(&self, bits: u32) -> Mode {
        mode(if self.lender.is_some() { bits & 0o1777 } else { bits })
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

    fn hold(&self, file: File, node: u64, directory: bool) -> io::Result<u64> {
        let handle = Handle { file, node, directory };
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

    /// A node's file. What others have moved away or replaced is still there for whoever has it open here.
    fn file(&self, node: u64) -> io::Result<Arc<OwnedFd>> {
        let error = match self.nodes.file(node) {
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => error,
            found => return found,
        };
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        let open = handles.values().find(|handle| handle.node == node).ok_or(error)?;
        Ok(Arc::new(open.file.try_clone()?.into()))
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
        self.again(self.file(node)?.as_fd(), flags)
    }

    /// A descriptor for a lock: one that may hold either kind where the tree can be written.
    pub fn open_for_lock(&self, wanted: &Wanted) -> io::Result<OwnedFd> {
        if wanted.by.whole && self.nodes.who(wanted.by.node)?.kind() == libc::S_IFDIR {
            return self.again(self.file(wanted.by.node)?.as_fd(), OFlags::RDONLY | OFlags::DIRECTORY);
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
            attr: self.shown(seen),
            attr_flags: 0,
            attr_timeout: timeout,
            entry_timeout: timeout,
        })
    }

    /// The entry that was just made.
    fn made(&self, parent: u64, directory: &OwnedFd, name: &CStr) -> io::Result<Entry> {
        self.entry(parent, name, &look_at(directory, name)?)
    }
}

/// A descriptor's name in `/proc/self/fd`.
fn number(fd: BorrowedFd<'_>) -> String {
    fd.as_raw_fd().to_string()
}

fn mode(bits: u32) -> Mode {
    Mode::from_raw_mode(bits & 0o7777)
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
            return Ok(Entry { inode: PROOF_NODE, attr, attr_timeout: PROVED_WITHIN, ..Entry::default() });
        }
        match look_at(&*self.file(parent)?, name) {
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
            return Ok((self.shown(&look(&handle.file)?), self.timeout()));
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
        self.change(node, &attr, handle, valid)
    }

    fn readlink(&self, _ctx: &Context, node: u64) -> io::Result<Vec<u8>> {
        Ok(rustix::fs::readlinkat(&*self.file(node)?, c"", Vec::new())?.into_bytes())
    }

    fn symlink(&self, ctx: &Context, target: &CStr, parent: u64, name: &CStr) -> io::Result<Entry> {
        let (name, directory) = (plain(name)?, self.file(parent)?);
        self.act_as(ctx)?;
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
        let (name, directory) = (plain(name)?, self.file(parent)?);
        self.act_as(ctx)?;
        rustix::fs::mknodat(&*directory, name, kind, self.mode(bits), 0)?;
        self.made(parent, &directory, name)
    }

    fn mkdir(&self, ctx: &Context, parent: u64, name: &CStr, bits: u32, _umask: u32) -> io::Result<Entry> {
        let (name, directory) = (plain(name)?, self.file(parent)?);
        self.act_as(ctx)?;
        rustix::fs::mkdirat(&*directory, name, self.mode(bits))?;
        self.made(parent, &directory, name)
    }

    fn unlink(&self, _ctx: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        let (name, directory) = (plain(name)?, self.file(parent)?);
        let known = self.nodes.before_loss(&directory, parent, name);
        rustix::fs::unlinkat(&*directory, name, AtFlags::empty())?;
        known.into_iter().for_each(|node| self.nodes.lost(node));
        Ok(())
    }

    fn rmdir(&self, _ctx: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        let (name, directory) = (plain(name)?, self.file(parent)?);
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
        let (from_file, to_file) = (self.file(from)?, self.file(to)?);
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
        let (name, directory) = (plain(name)?, self.file(parent)?);
        let file = self.file(node)?;
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
        self.open_data(node, flags, fuse_flags)
    }

    fn create(
        &self,
        ctx: &Context,
        parent: u64,
        name: &CStr,
        args: CreateIn,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions, Option<u32>)> {
        self.create_data(ctx, parent, name, args)
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
        self.read_data(node, handle, w, size, offset)
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
        self.write_data(node, handle, r, (size, offset), flags, fuse_flags)
    }

    fn flush(&self, _ctx: &Context, node: u64, _handle: u64, lock_owner: u64) -> io::Result<()> {
        self.locks.leave(Holder { node, owner: lock_owner, whole: false });
        Ok(())
    }

    fn fsync(&self, _ctx: &Context, node: u64, datasync: bool, handle: u64) -> io::Result<()> {
        self.flush_data(node, datasync, handle)
    }

    fn fallocate(&self, ctx: &Context, node: u64, handle: u64, bits: u32, offset: u64, length: u64) -> io::Result<()> {
        self.allocate(ctx, node, handle, bits, (offset, length))
    }

    fn release(
        &self,
        _ctx: &Context,
        _node: u64,
        _flags: u32,
        handle: u64,
        _flush: bool,
        _flock_release: bool,
        _lock_owner: Option<u64>,
    ) -> io::Result<()> {
        self.locks.closed(handle);
        self.let_go(handle);
        Ok(())
    }

    fn statfs(&self, _ctx: &Context, _node: u64) -> io::Result<statvfs64> {
        sys::file_system(self.nodes.root().as_fd())
    }

    fn setxattr(&self, _ctx: &Context, node: u64, name: &CStr, value: &[u8], flags: u32) -> io::Result<()> {
        self.set_attribute(node, name, value, flags)
    }

    fn getxattr(&self, _ctx: &Context, node: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        self.attribute(node, name, size)
    }

    fn listxattr(&self, _ctx: &Context, node: u64, size: u32) -> io::Result<ListxattrReply> {
        self.attribute_names(node, size)
    }

    fn removexattr(&self, _ctx: &Context, node: u64, name: &CStr) -> io::Result<()> {
        self.remove_attribute(node, name)
    }

    fn opendir(&self, _ctx: &Context, node: u64, _flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        self.open_directory(node)
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
        self.read_directory_and_look(node, handle, (size, offset), add)
    }

    fn fsyncdir(&self, _ctx: &Context, node: u64, datasync: bool, handle: u64) -> io::Result<()> {
        self.flush_data(node, datasync, handle)
    }

    fn releasedir(&self, _ctx: &Context, _node: u64, _flags: u32, handle: u64) -> io::Result<()> {
        self.locks.closed(handle);
        self.let_go(handle);
        Ok(())
    }

    fn lseek(&self, _ctx: &Context, node: u64, handle: u64, offset: u64, whence: u32) -> io::Result<u64> {
        self.find_data(node, handle, offset, whence)
    }
}
