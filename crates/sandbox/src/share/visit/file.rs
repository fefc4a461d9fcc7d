//! Single files and directories of a visited tree.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use pepo_proto::{EntryKind, Event, FailureCode, FileStat, Frame, Make, MakeKind, Read, Rename, Write};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::wire::Wire;
use super::{Fault, LINKS, Result, Tree, invalid, read_at, shown, text, told};
use crate::held::remove_tree;

/// How deep a tree may be: each level holds a descriptor.
pub(super) const DEPTH: usize = 1024;

/// What is gathered of a directory before it is sent, by its encoded size.
const LISTING: usize = 32 << 10;

/// Names tried for a temporary file.
const ATTEMPTS: u32 = 16;

fn describe(name: &[u8], stat: &Stat, target: Option<CString>) -> FileStat {
    FileStat {
        name: name.to_vec(),
        kind: match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => EntryKind::File,
            FileType::Directory => EntryKind::Directory,
            FileType::Symlink => EntryKind::Symlink,
            _ => EntryKind::Other,
        },
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified_unix_ns: stat.st_mtime.saturating_mul(1_000_000_000).saturating_add_unsigned(stat.st_mtime_nsec),
        target: target.map(|target| target.into_bytes().into()),
    }
}

fn described(directory: BorrowedFd<'_>, name: &std::ffi::CStr) -> Result<FileStat, Errno> {
    let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let is_link = FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
    let target = if is_link { rustix::fs::readlinkat(directory, name, Vec::new()).ok() } else { None };
    Ok(describe(name.to_bytes(), &stat, target))
}

impl Tree {
    pub(super) fn stat(&self, path: &[u8]) -> Result<FileStat> {
        match self.above(path, false)? {
            Some((directory, own)) => described(directory.as_fd(), &own).map_err(told(path)),
            None => Ok(describe(b"/", &rustix::fs::fstat(&self.root).map_err(told(path))?, None)),
        }
    }

    pub(super) fn send_file(&self, wire: &mut Wire, read: &Read) -> Result<()> {
        let path = read.path.as_bytes();
        // Without waiting: a pipe would let us wait for its writer.
        let file = self.open(path, OFlags::RDONLY | OFlags::NONBLOCK)?;
        let stat = rustix::fs::fstat(&file).map_err(told(path))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(told(path)(Errno::ISDIR)),
            _ => return Err(invalid(format!("{}: is no regular file", shown(path)))),
        }
        let own = path.rsplit(|byte| *byte == b'/').find(|part| !part.is_empty()).unwrap_or(b"/");
        wire.queue(Frame::Event(Event::Stat(describe(own, &stat, None))))?;
        let mut left = read.length.unwrap_or(u64::MAX);
        let mut offset = read.offset;
        let mut piece = vec![0; 256 << 10];
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
            let read = read_at(&file, &mut piece[..most], offset).map_err(told(path))?;
            if read == 0 {
                break;
            }
            wire.put(&piece[..read])?;
            offset += read as u64;
            left -= read as u64;
        }
        wire.eof()
    }

    /// The bytes appear whole, or not at all. Where the name is a link, what it leads to is the file that is replaced.
    pub(super) fn take_file(&self, wire: &mut Wire, write: &Write) -> Result<()> {
        let given = write.path.as_bytes();
        let mode = bits(given, write.mode)?;
        let mut path = given.to_vec();
        let mut links = 0;
        let (directory, own, before) = loop {
            let Some((directory, own)) = self.above(&path, write.parents)? else {
                return Err(told(given)(Errno::ISDIR));
            };
            let before = match rustix::fs::statat(&directory, &own, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => Some(stat),
                Err(Errno::NOENT) => None,
                Err(error) => return Err(told(given)(error)),
            };
            match before.map(|stat| FileType::from_raw_mode(stat.st_mode)) {
                None | Some(FileType::RegularFile) => break (directory, own, before),
                Some(FileType::Directory) => return Err(told(given)(Errno::ISDIR)),
                Some(FileType::Symlink) if links < LINKS => {
                    links += 1;
                    let target = rustix::fs::readlinkat(&directory, &own, Vec::new()).map_err(told(given))?;
                    path = joined(&path, target.to_bytes());
                }
                Some(_) => return Err(invalid(format!("{}: is no regular file", shown(given)))),
            }
        };
        let (name, file) = temporary(&directory, own.to_bytes()).map_err(told(given))?;
        let filled = fill(wire, given, file, mode, before.as_ref())
            .and_then(|()| rename_at(&directory, &name, &directory, &own).map_err(told(given)));
        if filled.is_err() {
            // It is hidden and its name random: left behind it takes space, nothing else.
            let _ = rustix::fs::unlinkat(&directory, &name, AtFlags::empty());
        }
        filled
    }

    pub(super) fn list(&self, wire: &mut Wire, path: &[u8]) -> Result<()> {
        let directory = self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let (mut entries, mut size) = (Vec::new(), 0);
        for entry in Dir::read_from(&directory).map_err(told(path))? {
            let entry = entry.map_err(told(path))?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            // One that is gone since it was read is not told.
            let Ok(found) = described(directory.as_fd(), name) else { continue };
            size += 80 + found.name.len() + found.target.as_ref().map_or(0, |target| target.len());
            entries.push(found);
            if size > LISTING {
                wire.queue(Frame::Event(Event::Entries(std::mem::take(&mut entries))))?;
                size = 0;
            }
        }
        if entries.is_empty() { Ok(()) } else { wire.queue(Frame::Event(Event::Entries(entries))) }
    }

    pub(super) fn make(&self, make: &Make) -> Result<()> {
        let path = make.path.as_bytes();
        let mode = bits(path, make.mode)?;
        let Some((directory, own)) = self.above(path, make.parents)? else {
            return if make.parents { Ok(()) } else { Err(told(path)(Errno::EXIST)) };
        };
        match &make.kind {
            MakeKind::Directory => match rustix::fs::mkdirat(&directory, &own, mode.unwrap_or(DIRECTORY_MODE)) {
                Err(Errno::EXIST) if make.parents && self.stat(path)?.kind == EntryKind::Directory => Ok(()),
                made => made.map_err(told(path)),
            },
            MakeKind::Symlink(target) => {
                let target = text(target.as_bytes())?;
                if target.is_empty() {
                    return Err(invalid(format!("{}: a link needs a target", shown(path))));
                }
                rustix::fs::symlinkat(&target, &directory, &own).map_err(told(path))
            }
        }
    }

    pub(super) fn rename(&self, rename: &Rename) -> Result<()> {
        let (from, to) = (rename.from.as_bytes(), rename.to.as_bytes());
        let (Some((old, old_name)), Some((new, new_name))) = (self.above(from, false)?, self.above(to, false)?) else {
            return Err(invalid("the top of a tree has no other name"));
        };
        rename_at(&old, &old_name, &new, &new_name).map_err(told(from))
    }

    pub(super) fn remove(&self, path: &[u8], recursive: bool) -> Result<()> {
        let Some((directory, own)) = self.above(path, false)? else {
            return Err(Fault::Failed(FailureCode::Denied, "the top of a tree is not removed".to_owned()));
        };
        match rustix::fs::unlinkat(&directory, &own, AtFlags::empty()) {
            Err(Errno::ISDIR | Errno::PERM) => {}
            removed => return removed.map_err(told(path)),
        }
        if !recursive {
            return rustix::fs::unlinkat(&directory, &own, AtFlags::REMOVEDIR).map_err(told(path));
        }
        let removed = remove_tree(directory.as_fd(), OsStr::from_bytes(own.to_bytes()), DEPTH as u32);
        removed.map_err(|error| told(path)(Errno::from_io_error(&error).unwrap_or(Errno::IO)))
    }
}

/// The call of the two of that name that a share server makes: no visit may make the other.
fn rename_at(old: &OwnedFd, old_name: &CStr, new: &OwnedFd, new_name: &CStr) -> Result<(), Errno> {
    rustix::fs::renameat_with(old, old_name, new, new_name, RenameFlags::empty())
}

const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o755);

/// Permission bits, or why not.
fn bits(path: &[u8], mode: Option<u32>) -> Result<Option<Mode>> {
    match mode {
        Some(mode) if mode > 0o7777 => Err(invalid(format!("{}: a mode is at most 07777", shown(path)))),
        mode => Ok(mode.map(Mode::from_raw_mode)),
    }
}

/// Where a link leads that is at `path`.
fn joined(path: &[u8], target: &[u8]) -> Vec<u8> {
    if target.first() == Some(&b'/') {
        return target.to_vec();
    }
    let above = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    [&path[..above], target].concat()
}

fn temporary(directory: &OwnedFd, name: &[u8]) -> Result<(CString, File), Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for _ in 0..ATTEMPTS {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let end = format!(".{:016x}", u64::from_le_bytes(random));
        let hidden = [b".", &name[..name.len().min(200)], end.as_bytes()].concat();
        let hidden = CString::new(hidden).map_err(|_| Errno::INVAL)?;
        match rustix::fs::openat(directory, &hidden, flags, Mode::from_raw_mode(0o600)) {
            Ok(file) => return Ok((hidden, file.into())),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::EXIST)
}

fn fill(wire: &mut Wire, path: &[u8], mut file: File, mode: Option<Mode>, before: Option<&Stat>) -> Result<()> {
    while let Some(bytes) = wire.receive()? {
        let written = file.write_all(&bytes);
        written.map_err(|error| told(path)(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    }
    if let Some(before) = before {
        let (uid, gid) = (rustix::fs::Uid::from_raw(before.st_uid), rustix::fs::Gid::from_raw(before.st_gid));
        rustix::fs::chownat(&file, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH).map_err(told(path))?;
    }
    let mode = mode.unwrap_or_else(|| Mode::from_raw_mode(before.map_or(0o644, |before| before.st_mode & 0o7777)));
    rustix::fs::fchmod(&file, mode).map_err(told(path))
}
