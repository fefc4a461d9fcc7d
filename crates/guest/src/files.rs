//! Files, with the rights of a user of the guest.
//!
//! Each operation has a thread, which acts as the user while it works ([`crate::user::Acting`]). Called by `agent`.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use pepo_proto::{EntryKind, Event, FailureCode, FileStat, Frame, Make, MakeKind, Operation, Outcome, Read, Write};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};

use crate::stream::failed;
use crate::user::{Acting, User};
use crate::wire::{Fault, Wire};
use crate::{tar, watch};

/// Names tried for a temporary file.
const ATTEMPTS: u32 = 16;

/// How deep a tree may be: each level holds a descriptor.
pub const MAX_DEPTH: usize = 1024;

/// What is gathered of a directory before it is sent, by its encoded size.
const LISTING: usize = 32 << 10;

/// As whom an operation on files acts; `None` where it is none.
pub fn acting_user(operation: &Operation) -> Option<Option<&str>> {
    Some(match operation {
        Operation::Read(o) => o.user.as_deref(),
        Operation::Write(o) => o.user.as_deref(),
        Operation::List(o) => o.user.as_deref(),
        Operation::Stat(o) => o.user.as_deref(),
        Operation::Make(o) => o.user.as_deref(),
        Operation::Rename(o) => o.user.as_deref(),
        Operation::Remove(o) => o.user.as_deref(),
        Operation::Watch(o) => o.user.as_deref(),
        Operation::TarOut(o) => o.user.as_deref(),
        Operation::TarIn(o) => o.user.as_deref(),
        _ => return None,
    })
}

/// Whether its answer is kept, so that a repeat is answered and not done again.
pub fn changes_something(operation: &Operation) -> bool {
    matches!(
        operation,
        Operation::Write(_) | Operation::Make(_) | Operation::Rename(_) | Operation::Remove(_) | Operation::TarIn(_)
    )
}

/// Does an operation on files. `None` where the stream was lost before its end.
pub fn run(wire: &mut Wire, operation: Operation, user: &User) -> Option<Outcome> {
    let acting = match Acting::start(user) {
        Ok(acting) => acting,
        Err(error) => return Some(failed(FailureCode::Denied, format!("cannot act as {}: {error}", user.name))),
    };
    let result = act(wire, operation, user);
    drop(acting);
    match result {
        Ok(()) => Some(Outcome::Done),
        Err(Fault::Failed(outcome)) => Some(outcome),
        Err(Fault::Lost) => None,
    }
}

fn act(wire: &mut Wire, operation: Operation, user: &User) -> Result<(), Fault> {
    let at = |path: &str| resolve(path, user);
    if !matches!(operation, Operation::Watch(_)) {
        wire.accept()?;
    }
    match operation {
        Operation::Read(read) => send_file(wire, &at(&read.path)?, &read),
        Operation::Write(write) => take_file(wire, &at(&write.path)?, &write),
        Operation::List(list) => send_list(wire, &at(&list.path)?),
        Operation::Stat(stat) => {
            let path = at(&stat.path)?;
            wire.queue(Frame::Event(Event::Stat(stat_of(&path).map_err(told(&path))?)))
        }
        Operation::Make(make) => make_entry(&at(&make.path)?, &make),
        Operation::Rename(rename) => {
            let (from, to) = (at(&rename.from)?, at(&rename.to)?);
            fs::rename(&from, &to).map_err(|error| match error.raw_os_error() {
                Some(libc::EXDEV) => Fault::Failed(failed(
                    FailureCode::Invalid,
                    format!("{} and {} are on different file systems", from.display(), to.display()),
                )),
                _ => told(&from)(error),
            })
        }
        Operation::Remove(remove) => remove_entry(&at(&remove.path)?, remove.recursive),
        Operation::Watch(watch) => watch::run(wire, &at(&watch.path)?, watch.recursive),
        Operation::TarOut(tar) => tar::send(wire, &at(&tar.path)?),
        Operation::TarIn(tar) => tar::take(wire, &at(&tar.path)?),
        _ => Err(Fault::Failed(failed(FailureCode::Invalid, "no operation on files"))),
    }
}

/// The path meant: absolute, or under the user's home.
fn resolve(path: &str, user: &User) -> Result<PathBuf, Fault> {
    if path.is_empty() || path.contains('\0') {
        return Err(Fault::Failed(failed(FailureCode::Invalid, format!("{path:?} is no path"))));
    }
    Ok(user.home.join(path))
}

/// An error of the kernel about `path`, as it is told.
pub fn told(path: &Path) -> impl Fn(io::Error) -> Fault + '_ {
    move |error| {
        let code = match error.raw_os_error() {
            Some(libc::ENOENT) => FailureCode::NotFound,
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => FailureCode::Denied,
            Some(libc::EEXIST) => FailureCode::Exists,
            Some(libc::ENOTDIR) => FailureCode::NotDirectory,
            Some(libc::EISDIR) => FailureCode::IsDirectory,
            Some(libc::ENOTEMPTY) => FailureCode::NotEmpty,
            Some(libc::ENOSPC | libc::EDQUOT) => FailureCode::NoSpace,
            Some(libc::EINVAL | libc::ENAMETOOLONG | libc::ELOOP | libc::EXDEV) => FailureCode::Invalid,
            _ => FailureCode::Io,
        };
        Fault::Failed(failed(code, format!("{}: {error}", path.display())))
    }
}

fn refused(path: &Path, code: FailureCode, why: &str) -> Fault {
    Fault::Failed(failed(code, format!("{}: {why}", path.display())))
}

fn name_of(path: &Path) -> &OsStr {
    path.file_name().unwrap_or(path.as_os_str())
}

fn describe(name: &OsStr, metadata: &Metadata, target: Option<PathBuf>) -> FileStat {
    let kind = metadata.file_type();
    FileStat {
        name: name.as_bytes().to_vec(),
        kind: if kind.is_file() {
            EntryKind::File
        } else if kind.is_dir() {
            EntryKind::Directory
        } else if kind.is_symlink() {
            EntryKind::Symlink
        } else {
            EntryKind::Other
        },
        size: metadata.size(),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        modified_unix_ns: metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()),
        target: target.map(|target| target.as_os_str().as_bytes().to_vec().into()),
    }
}

fn stat_of(path: &Path) -> io::Result<FileStat> {
    let metadata = fs::symlink_metadata(path)?;
    let target = if metadata.is_symlink() { Some(fs::read_link(path)?) } else { None };
    Ok(describe(name_of(path), &metadata, target))
}

fn send_file(wire: &mut Wire, path: &Path, read: &Read) -> Result<(), Fault> {
    // Without waiting: a pipe would let us wait for its writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| told(path)(error.into()))?;
    let file = fs::File::from(file);
    let metadata = file.metadata().map_err(told(path))?;
    if metadata.is_dir() {
        return Err(refused(path, FailureCode::IsDirectory, "is a directory"));
    }
    if !metadata.is_file() {
        return Err(refused(path, FailureCode::Invalid, "is no regular file"));
    }
    wire.queue(Frame::Event(Event::Stat(describe(name_of(path), &metadata, None))))?;
    let mut left = read.length.unwrap_or(u64::MAX);
    let mut offset = read.offset;
    while left > 0 {
        let space = wire.space()?;
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(space.len());
        let bytes = match rustix::io::pread(&file, &mut space[..most], offset) {
            Ok(0) => break,
            Ok(bytes) => bytes,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(told(path)(error.into())),
        };
        wire.advance(bytes);
        offset += bytes as u64;
        left -= bytes as u64;
    }
    wire.eof()
}

/// Permission bits, or why not.
fn bits(path: &Path, mode: Option<u32>) -> Result<Option<u32>, Fault> {
    match mode {
        Some(mode) if mode > 0o7777 => Err(refused(path, FailureCode::Invalid, "a mode is at most 07777")),
        mode => Ok(mode),
    }
}

fn take_file(wire: &mut Wire, path: &Path, write: &Write) -> Result<(), Fault> {
    let mode = bits(path, write.mode)?;
    // The file a link leads to is the one that is replaced, not the link.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(refused(path, FailureCode::IsDirectory, "is no file"));
    };
    let before = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Err(refused(path, FailureCode::IsDirectory, "is a directory")),
        Ok(metadata) if !metadata.is_file() && !metadata.is_symlink() => {
            return Err(refused(path, FailureCode::Invalid, "is no regular file"));
        }
        Ok(metadata) if metadata.is_file() => Some(metadata),
        _ => None,
    };
    if write.parents {
        make_directories(parent).map_err(told(parent))?;
    }
    let (temporary, file) = temporary(parent, name).map_err(told(path))?;
    let result =
        fill(wire, path, file, mode, before.as_ref()).and_then(|()| fs::rename(&temporary, path).map_err(told(path)));
    if result.is_err() {
        // It is hidden and its name random: left behind it takes space, nothing else.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn temporary(parent: &Path, name: &OsStr) -> io::Result<(PathBuf, fs::File)> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let short = &name.as_bytes()[..name.len().min(200)];
    for _ in 0..ATTEMPTS {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::NONBLOCK).or_else(|_| {
            // Before the generator is seeded: uniqueness is all that is needed.
            random = (rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_nsec as u64).to_le_bytes();
            Ok::<_, io::Error>(8)
        })?;
        let mut hidden = b".".to_vec();
        hidden.extend_from_slice(short);
        hidden.extend_from_slice(format!(".{:016x}", u64::from_le_bytes(random)).as_bytes());
        let path = parent.join(OsStr::from_bytes(&hidden));
        match rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600)) {
            Ok(file) => return Ok((path, file.into())),
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

fn fill(
    wire: &mut Wire,
    path: &Path,
    mut file: fs::File,
    mode: Option<u32>,
    before: Option<&Metadata>,
) -> Result<(), Fault> {
    use std::io::Write as _;
    wire.flush()?;
    while let Some(bytes) = wire.receive()? {
        file.write_all(&bytes).map_err(told(path))?;
    }
    if let Some(before) = before {
        let own = file.metadata().map_err(told(path))?;
        if (own.uid(), own.gid()) != (before.uid(), before.gid()) {
            // Root keeps another's file another's; anybody else may not, and owns what was written.
            let _ = std::os::unix::fs::fchown(&file, Some(before.uid()), Some(before.gid()));
        }
    }
    let mode = mode.unwrap_or_else(|| before.map_or(0o644, |before| before.mode() & 0o7777));
    file.set_permissions(fs::Permissions::from_mode(mode)).map_err(told(path))
}

fn send_list(wire: &mut Wire, path: &Path) -> Result<(), Fault> {
    let mut entries = vec![];
    let mut size = 0;
    for entry in fs::read_dir(path).map_err(told(path))? {
        let entry = entry.map_err(told(path))?;
        let Ok(metadata) = entry.metadata() else {
            // Gone since it was read.
            continue;
        };
        let target = if metadata.is_symlink() { fs::read_link(entry.path()).ok() } else { None };
        size += 80 + entry.file_name().len() + target.as_ref().map_or(0, |target| target.as_os_str().len());
        entries.push(describe(&entry.file_name(), &metadata, target));
        if size > LISTING {
            wire.queue(Frame::Event(Event::Entries(std::mem::take(&mut entries))))?;
            size = 0;
        }
    }
    if !entries.is_empty() {
        wire.queue(Frame::Event(Event::Entries(entries)))?;
    }
    Ok(())
}

/// Makes a directory and those above it; existing ones are fine.
pub fn make_directories(path: &Path) -> io::Result<()> {
    if path.components().any(|component| component == Component::ParentDir) {
        // "a/../b" would make "a".
        return fs::create_dir_all(path);
    }
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(parent) = path.parent() {
                make_directories(parent)?;
            }
            fs::create_dir(path)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        result => result,
    }
}

fn make_entry(path: &Path, make: &Make) -> Result<(), Fault> {
    let mode = bits(path, make.mode)?;
    if make.parents
        && let Some(parent) = path.parent()
    {
        make_directories(parent).map_err(told(parent))?;
    }
    match &make.kind {
        MakeKind::Directory => match fs::create_dir(path) {
            Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(mode.unwrap_or(0o755))).map_err(told(path)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && make.parents && path.is_dir() => Ok(()),
            Err(error) => Err(told(path)(error)),
        },
        MakeKind::Symlink(target) if target.is_empty() || target.contains('\0') => {
            Err(refused(path, FailureCode::Invalid, "a link needs a target"))
        }
        MakeKind::Symlink(target) => std::os::unix::fs::symlink(target, path).map_err(told(path)),
    }
}

fn remove_entry(path: &Path, recursive: bool) -> Result<(), Fault> {
    let metadata = fs::symlink_metadata(path).map_err(told(path))?;
    if !metadata.is_dir() {
        return fs::remove_file(path).map_err(told(path));
    }
    if recursive {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| told(path)(error.into()))?;
        empty(directory.as_fd(), MAX_DEPTH).map_err(told(path))?;
    }
    fs::remove_dir(path).map_err(told(path))
}

/// Removes what is in a directory, never following a link.
fn empty(directory: std::os::fd::BorrowedFd<'_>, depth: usize) -> io::Result<()> {
    if depth == 0 {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if entry.file_type() != FileType::Directory {
            match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => continue,
                Err(rustix::io::Errno::ISDIR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let below = rustix::fs::openat(directory, name, flags, Mode::empty())?;
        empty(below.as_fd(), depth - 1)?;
        rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR)?;
    }
    Ok(())
}
