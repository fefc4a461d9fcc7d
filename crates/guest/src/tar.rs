//! Trees as tar archives, out of the guest and into it.
//!
//! Both ways work on descriptors of directories, never on joined paths, so that a tree changed under our hands leads
//! nowhere else. What goes in is hostile: nothing is written outside of the target, no link is followed, no device is
//! made, no set-user-ID bit is set, and every length in a header is bounded before it costs memory. Called by `files`.
//!
//! ```text
//!   archive   [long name | PAX]* header, content padded to 512 | … | two empty blocks | anything, ignored
//! ```

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bytes::Bytes;
use pepo_proto::FailureCode;
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, UTIME_OMIT, fstat, openat, openat2,
    statat,
};
use rustix::io::Errno;
use tar::{EntryType, Header};

use crate::files::{MAX_DEPTH, make_directories, told};
use crate::stream::failed;
use crate::wire::{Fault, Wire};

/// The unit of an archive.
const BLOCK: usize = 512;

/// The longest name or link target taken (the kernel's own limit is 4,096).
const MAX_NAME: u64 = 16 << 10;

/// The largest extended header taken.
const MAX_EXTENDED: u64 = 256 << 10;

/// Directories whose mode and time are set at the end; of more, only the mode is set, at once.
const MAX_DIRECTORIES: usize = 65_536;

/// Files with several names that are remembered to be sent once.
const MAX_LINKED: usize = 65_536;

fn errno(path: &[u8], error: Errno) -> Fault {
    told(Path::new(OsStr::from_bytes(path)))(error.into())
}

fn invalid(message: String) -> Fault {
    Fault::Failed(failed(FailureCode::Invalid, message))
}

fn shown(name: &[u8]) -> String {
    name.escape_ascii().to_string()
}

// ---- out

/// What was sent of files with more than one name.
struct Sender<'a> {
    wire: &'a mut Wire,
    linked: HashMap<(u64, u64), Vec<u8>>,
}

/// Sends a directory's contents, or one file.
pub fn send(wire: &mut Wire, path: &Path) -> Result<(), Fault> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let top = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| told(path)(error.into()))?;
    let stat = fstat(&top).map_err(|error| told(path)(error.into()))?;
    let mut sender = Sender { wire, linked: HashMap::new() };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {
            let mut name = vec![];
            sender.directory(&top, &mut name, MAX_DEPTH)?;
        }
        FileType::RegularFile => {
            let name = path.file_name().map_or(&b"file"[..], |name| name.as_bytes());
            sender.file(&top, &stat, name)?;
        }
        _ => return Err(invalid(format!("{} is neither a file nor a directory", path.display()))),
    }
    sender.wire.put(&[0; 2 * BLOCK])?;
    sender.wire.eof()
}

impl Sender<'_> {
    /// Sends what is in `directory`, whose own name (with its slash) is in `name`.
    fn directory(&mut self, directory: &OwnedFd, name: &mut Vec<u8>, depth: usize) -> Result<(), Fault> {
        if depth == 0 {
            return Err(invalid(format!("{}: deeper than {MAX_DEPTH} directories", shown(name))));
        }
        let base = name.len();
        for entry in Dir::read_from(directory).map_err(|error| errno(name, error))? {
            let entry = entry.map_err(|error| errno(name, error))?;
            let own = entry.file_name();
            if own == c"." || own == c".." {
                continue;
            }
            name.truncate(base);
            name.extend_from_slice(own.to_bytes());
            match entry.file_type() {
                FileType::Symlink => self.symlink(directory, own, name)?,
                // Sockets, pipes and devices mean nothing on another machine.
                FileType::Socket | FileType::Fifo | FileType::CharacterDevice | FileType::BlockDevice => {}
                _ => self.opened(directory, own, name, depth)?,
            }
        }
        name.truncate(base);
        Ok(())
    }

    fn opened(&mut self, parent: &OwnedFd, own: &CStr, name: &mut Vec<u8>, depth: usize) -> Result<(), Fault> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
        let fd = match openat(parent, own, flags, Mode::empty()) {
            Ok(fd) => fd,
            // Gone, or become something else, since it was read.
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(()),
            Err(error) => return Err(errno(name, error)),
        };
        let stat = fstat(&fd).map_err(|error| errno(name, error))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                name.push(b'/');
                self.header(name, &stat, EntryType::Directory, 0, &[])?;
                self.directory(&fd, name, depth - 1)
            }
            FileType::RegularFile => self.file(&fd, &stat, name),
            _ => Ok(()),
        }
    }

    fn symlink(&mut self, parent: &OwnedFd, own: &CStr, name: &[u8]) -> Result<(), Fault> {
        let target = match rustix::fs::readlinkat(parent, own, Vec::new()) {
            Ok(target) => target,
            Err(Errno::NOENT | Errno::INVAL) => return Ok(()),
            Err(error) => return Err(errno(name, error)),
        };
        let stat = match statat(parent, own, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(errno(name, error)),
        };
        self.header(name, &stat, EntryType::Symlink, 0, target.to_bytes())
    }

    fn file(&mut self, fd: &OwnedFd, stat: &Stat, name: &[u8]) -> Result<(), Fault> {
        if stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.linked.get(&key).cloned() {
                return self.header(name, stat, EntryType::Link, 0, &first);
            }
            if self.linked.len() < MAX_LINKED {
                self.linked.insert(key, name.to_vec());
            }
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.header(name, stat, EntryType::Regular, size, &[])?;
        let mut left = size;
        while left > 0 {
            let space = self.wire.space()?;
            let most = space.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            match rustix::io::read(fd, &mut space[..most]) {
                Ok(0) => break,
                Ok(read) => {
                    self.wire.advance(read);
                    left -= read as u64;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(errno(name, error)),
            }
        }
        // It shrank while it was read: the size is told already.
        self.zeros(left)?;
        self.zeros(padding(size))
    }

    fn zeros(&mut self, mut count: u64) -> Result<(), Fault> {
        while count > 0 {
            let take = count.min(BLOCK as u64 * 8) as usize;
            self.wire.put(&[0; BLOCK * 8][..take])?;
            count -= take as u64;
        }
        Ok(())
    }

    fn header(&mut self, name: &[u8], stat: &Stat, kind: EntryType, size: u64, link: &[u8]) -> Result<(), Fault> {
        if link.len() > 100 {
            self.long(EntryType::GNULongLink, link)?;
        }
        if name.len() > 100 {
            self.long(EntryType::GNULongName, name)?;
        }
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(stat.st_mode & 0o7777);
        header.set_uid(u64::from(stat.st_uid));
        header.set_gid(u64::from(stat.st_gid));
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header.set_size(size);
        let old = header.as_old_mut();
        fill(&mut old.name, name);
        fill(&mut old.linkname, link);
        header.set_cksum();
        self.wire.put(header.as_bytes())
    }

    /// A name that does not fit a header, as an entry before it.
    fn long(&mut self, kind: EntryType, text: &[u8]) -> Result<(), Fault> {
        let mut header = Header::new_gnu();
        let size = text.len() as u64 + 1;
        fill(&mut header.as_old_mut().name, b"././@LongLink");
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(size);
        header.set_cksum();
        self.wire.put(header.as_bytes())?;
        self.wire.put(text)?;
        self.zeros(1 + padding(size))
    }
}

fn fill(field: &mut [u8], bytes: &[u8]) {
    let take = field.len().min(bytes.len());
    field[..take].copy_from_slice(&bytes[..take]);
}

/// Zero bytes after so many of content.
fn padding(size: u64) -> u64 {
    size.next_multiple_of(BLOCK as u64) - size
}

// ---- in

/// Unpacks an archive into `path`.
pub fn take(wire: &mut Wire, path: &Path) -> Result<(), Fault> {
    make_directories(path).map_err(told(path))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| told(path)(error.into()))?;
    // The host may send before it has read this, and reads it before it waits.
    wire.flush()?;
    let mut target = Target { root, last: None, directories: vec![] };
    let mut source = Source { wire };
    let mut ahead = Ahead::default();
    let mut block = [0; BLOCK];
    while source.block(&mut block)? {
        if block.iter().all(|byte| *byte == 0) {
            break;
        }
        entry(&mut source, &mut target, &mut ahead, &block)?;
    }
    target.finish()?;
    // What follows the end is padding.
    while source.wire.receive()?.is_some() {}
    Ok(())
}

/// What entries before a header said about it.
#[derive(Default)]
struct Ahead {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    modified: Option<Timespec>,
}

struct Source<'a> {
    wire: &'a mut Wire,
}

impl Source<'_> {
    /// The next block; `false` where the archive ends before one.
    fn block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool, Fault> {
        let mut have = 0;
        while have < BLOCK {
            let Some(mut bytes) = self.wire.receive()? else {
                return if have == 0 { Ok(false) } else { Err(invalid("the archive ends inside a block".into())) };
            };
            let take = bytes.len().min(BLOCK - have);
            block[have..have + take].copy_from_slice(&bytes.split_to(take));
            have += take;
            self.wire.unread(bytes);
        }
        Ok(true)
    }

    /// Some of the next `left` bytes, at least one.
    fn some(&mut self, left: u64) -> Result<Bytes, Fault> {
        let Some(mut bytes) = self.wire.receive()? else {
            return Err(invalid("the archive ends inside an entry".into()));
        };
        let take = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let piece = bytes.split_to(take);
        self.wire.unread(bytes);
        Ok(piece)
    }

    fn skip(&mut self, mut left: u64) -> Result<(), Fault> {
        while left > 0 {
            left -= self.some(left)?.len() as u64;
        }
        Ok(())
    }

    /// A whole entry of bounded size.
    fn whole(&mut self, size: u64, most: u64) -> Result<Vec<u8>, Fault> {
        if size > most {
            return Err(invalid(format!("an extended header of {size} bytes is over {most}")));
        }
        let mut all = Vec::with_capacity(size as usize);
        while (all.len() as u64) < size {
            let left = size - all.len() as u64;
            all.extend_from_slice(&self.some(left)?);
        }
        self.skip(padding(size))?;
        Ok(all)
    }
}

fn entry(source: &mut Source<'_>, target: &mut Target, ahead: &mut Ahead, block: &[u8; BLOCK]) -> Result<(), Fault> {
    let mut header = Header::new_old();
    header.as_mut_bytes().copy_from_slice(block);
    let checksum: u32 =
        block.iter().enumerate().map(|(i, b)| if (148..156).contains(&i) { 32 } else { u32::from(*b) }).sum();
    let corrupt = |_| invalid("the archive has a broken header".to_owned());
    if header.cksum().map_err(corrupt)? != checksum {
        return Err(invalid("the archive has a header with a wrong checksum".to_owned()));
    }
    let size = header.entry_size().map_err(corrupt)?;
    match header.entry_type() {
        EntryType::GNULongName => {
            ahead.name = Some(until_nul(source.whole(size, MAX_NAME)?));
            return Ok(());
        }
        EntryType::GNULongLink => {
            ahead.link = Some(until_nul(source.whole(size, MAX_NAME)?));
            return Ok(());
        }
        EntryType::XHeader => return extended(&source.whole(size, MAX_EXTENDED)?, ahead),
        EntryType::XGlobalHeader => {
            source.whole(size, MAX_EXTENDED)?;
            return Ok(());
        }
        _ => {}
    }
    let ahead = std::mem::take(ahead);
    let size = ahead.size.unwrap_or(size);
    let name = ahead.name.unwrap_or_else(|| header.path_bytes().into_owned());
    let modified = ahead
        .modified
        .unwrap_or(Timespec { tv_sec: header.mtime().map_err(corrupt)?.min(i64::MAX as u64) as i64, tv_nsec: 0 });
    let mode = header.mode().map_err(corrupt)? & 0o777;
    let is_directory = header.entry_type() == EntryType::Directory || name.ends_with(b"/");
    let parts = components(&name)?;
    let link = || {
        let link = ahead.link.clone().or_else(|| header.link_name_bytes().map(|link| link.into_owned()));
        link.filter(|link| !link.is_empty()).ok_or_else(|| invalid(format!("{}: a link to nothing", shown(&name))))
    };
    let Some((own, above)) = parts.split_last() else {
        // The target itself.
        return source.skip(size.saturating_add(padding(size.min(u64::MAX - BLOCK as u64))));
    };
    match header.entry_type() {
        _ if is_directory && matches!(header.entry_type(), EntryType::Directory | EntryType::Regular) => {
            target.directory(&parts, mode, modified)?;
            source.skip(size)?;
            source.skip(padding(size))
        }
        EntryType::Regular | EntryType::Continuous => {
            let parent = target.parent(above)?;
            let file = create(parent, own, mode, &name)?;
            let mut left = size;
            while left > 0 {
                let piece = source.some(left)?;
                write_all(&file, &piece).map_err(|error| errno(&name, error))?;
                left -= piece.len() as u64;
            }
            finish_file(&file, mode, modified).map_err(|error| errno(&name, error))?;
            source.skip(padding(size))
        }
        EntryType::Symlink => {
            let link = c_string(&link()?, &name)?;
            let parent = target.parent(above)?;
            replacing(parent, own, || rustix::fs::symlinkat(&link, parent, own)).map_err(|e| errno(&name, e))?;
            // A link's own time matters to nobody enough to fail for it.
            let _ = rustix::fs::utimensat(parent, own, &times(modified), AtFlags::SYMLINK_NOFOLLOW);
            source.skip(size)?;
            source.skip(padding(size))
        }
        EntryType::Link => {
            let first = components(&link()?)?;
            let Some((first_own, first_above)) = first.split_last() else {
                return Err(invalid(format!("{}: a link to nothing", shown(&name))));
            };
            let first_parent = target.open(first_above).map_err(|error| errno(&name, error))?;
            let parent = target.parent(above)?;
            replacing(parent, own, || rustix::fs::linkat(&first_parent, first_own, parent, own, AtFlags::empty()))
                .map_err(|error| errno(&name, error))?;
            source.skip(size)?;
            source.skip(padding(size))
        }
        other => Err(invalid(format!("{}: entries of kind {other:?} are not taken", shown(&name)))),
    }
}

fn until_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(nul) = bytes.iter().position(|byte| *byte == 0) {
        bytes.truncate(nul);
    }
    bytes
}

/// Reads a PAX header: `length key=value\n` records.
fn extended(mut bytes: &[u8], ahead: &mut Ahead) -> Result<(), Fault> {
    let broken = || invalid("the archive has a broken extended header".to_owned());
    while !bytes.is_empty() {
        let space = bytes.iter().take(20).position(|byte| *byte == b' ').ok_or_else(broken)?;
        let length: usize = str::from_utf8(&bytes[..space]).ok().and_then(|n| n.parse().ok()).ok_or_else(broken)?;
        if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
            return Err(broken());
        }
        let record = &bytes[space + 1..length - 1];
        bytes = &bytes[length..];
        let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(broken)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        let number = || str::from_utf8(value).map_err(|_| broken());
        match key {
            b"path" => ahead.name = Some(value.to_vec()),
            b"linkpath" => ahead.link = Some(value.to_vec()),
            b"size" => ahead.size = Some(number()?.parse().map_err(|_| broken())?),
            b"mtime" => {
                let (seconds, rest) = number()?.split_once('.').unwrap_or((number()?, ""));
                let digits: String = rest.chars().chain("000000000".chars()).take(9).collect();
                ahead.modified = Some(Timespec {
                    tv_sec: seconds.parse().map_err(|_| broken())?,
                    tv_nsec: digits.parse().map_err(|_| broken())?,
                });
            }
            key if key.starts_with(b"GNU.sparse") => return Err(invalid("sparse files are not taken".to_owned())),
            _ => {}
        }
    }
    Ok(())
}

/// The parts of a name, none of which leads up or anywhere else.
fn components(name: &[u8]) -> Result<Vec<CString>, Fault> {
    let refused = || invalid(format!("{}: this name is not taken", shown(name)));
    if name.len() as u64 > MAX_NAME {
        return Err(refused());
    }
    let parts = name.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    let parts: Vec<CString> = parts
        .map(|part| if part == b".." { Err(refused()) } else { CString::new(part).map_err(|_| refused()) })
        .collect::<Result<_, _>>()?;
    if parts.len() > MAX_DEPTH { Err(refused()) } else { Ok(parts) }
}

fn c_string(bytes: &[u8], name: &[u8]) -> Result<CString, Fault> {
    CString::new(bytes).map_err(|_| invalid(format!("{}: a link with a NUL byte", shown(name))))
}

fn joined(parts: &[CString]) -> Vec<u8> {
    if parts.is_empty() {
        return b".".to_vec();
    }
    parts.iter().map(|part| part.to_bytes()).collect::<Vec<_>>().join(&b'/')
}

/// The directory that is unpacked into.
struct Target {
    root: OwnedFd,
    /// The directory of the last entry: most entries lie beside the one before.
    last: Option<(Vec<CString>, OwnedFd)>,
    directories: Vec<(Vec<CString>, u32, Timespec)>,
}

impl Target {
    /// Opens a directory below, never leaving and never following a link.
    fn open(&self, parts: &[CString]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let path = CString::new(joined(parts)).map_err(|_| Errno::INVAL)?;
        loop {
            match openat2(&self.root, &path, flags, Mode::empty(), resolve) {
                // The kernel asks for another try when something was renamed meanwhile.
                Err(Errno::AGAIN | Errno::INTR) => {}
                // A link in the way.
                Err(Errno::LOOP) => return Err(Errno::NOTDIR),
                result => return result,
            }
        }
    }

    /// The directory at `parts`, made where missing.
    fn parent(&mut self, parts: &[CString]) -> Result<BorrowedFd<'_>, Fault> {
        if self.last.as_ref().is_none_or(|(last, _)| last != parts) {
            let fd = match self.open(parts) {
                Err(Errno::NOENT) => {
                    for count in 1..=parts.len() {
                        let above = self.open(&parts[..count - 1]).map_err(|e| errno(&joined(parts), e))?;
                        match rustix::fs::mkdirat(&above, &parts[count - 1], Mode::from_raw_mode(0o755)) {
                            Ok(()) | Err(Errno::EXIST) => {}
                            Err(error) => return Err(errno(&joined(parts), error)),
                        }
                    }
                    self.open(parts)
                }
                result => result,
            };
            self.last = Some((parts.to_vec(), fd.map_err(|error| errno(&joined(parts), error))?));
        }
        match &self.last {
            Some((_, fd)) => Ok(fd.as_fd()),
            None => Err(errno(&joined(parts), Errno::NOENT)),
        }
    }

    /// Makes a directory. One that is there stays as it is.
    fn directory(&mut self, parts: &[CString], mode: u32, modified: Timespec) -> Result<(), Fault> {
        let Some((own, above)) = parts.split_last() else {
            return Ok(());
        };
        let name = joined(parts);
        let parent = self.parent(above)?;
        let make = || rustix::fs::mkdirat(parent, own, Mode::from_raw_mode(mode | 0o700));
        match make() {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let stat = statat(parent, own, AtFlags::SYMLINK_NOFOLLOW).map_err(|error| errno(&name, error))?;
                if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                    return Ok(());
                }
                rustix::fs::unlinkat(parent, own, AtFlags::empty()).map_err(|error| errno(&name, error))?;
                make().map_err(|error| errno(&name, error))?;
            }
            Err(error) => return Err(errno(&name, error)),
        }
        if self.directories.len() < MAX_DIRECTORIES {
            self.directories.push((parts.to_vec(), mode, modified));
        }
        Ok(())
    }

    /// Sets modes and times of the directories made, the deepest first: writing into one changes its time, and its mode
    /// may forbid it.
    fn finish(&mut self) -> Result<(), Fault> {
        self.last = None;
        while let Some((parts, mode, modified)) = self.directories.pop() {
            let fault = |error| errno(&joined(&parts), error);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            let path = CString::new(joined(&parts)).map_err(|_| fault(Errno::INVAL))?;
            match openat2(&self.root, &path, flags, Mode::empty(), resolve) {
                Ok(fd) => finish_file(&fd, mode, modified).map_err(fault)?,
                // Replaced by a later entry.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(error) => return Err(fault(error)),
            }
        }
        Ok(())
    }
}

fn create(parent: BorrowedFd<'_>, own: &CStr, mode: u32, name: &[u8]) -> Result<OwnedFd, Fault> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Readable by its owner alone until it is whole where its mode says so; the umask takes the rest.
    replacing(parent, own, || openat(parent, own, flags, Mode::from_raw_mode(mode | 0o200)))
        .map_err(|error| errno(name, error))
}

/// Does it, and where something has that name removes that (not a directory) and does it again.
fn replacing<T>(parent: BorrowedFd<'_>, own: &CStr, act: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    match act() {
        Err(Errno::EXIST) => {
            rustix::fs::unlinkat(parent, own, AtFlags::empty())?;
            act()
        }
        result => result,
    }
}

fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn times(modified: Timespec) -> Timestamps {
    Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification: modified }
}

fn finish_file(file: &OwnedFd, mode: u32, modified: Timespec) -> Result<(), Errno> {
    // The mode at creation was cut by the umask (022) and had the owner's write bit.
    if mode & 0o022 != 0 || mode & 0o200 == 0 || FileType::from_raw_mode(fstat_mode(file)?) == FileType::Directory {
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?;
    }
    match rustix::fs::futimens(file, &times(modified)) {
        // A time that this file system cannot hold.
        Err(Errno::INVAL) => Ok(()),
        result => result,
    }
}

fn fstat_mode(file: &OwnedFd) -> Result<u32, Errno> {
    Ok(fstat(file)?.st_mode)
}
