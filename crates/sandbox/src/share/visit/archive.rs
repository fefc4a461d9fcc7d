//! Trees as archives: out of a visited tree, and into it.
//!
//! What comes in was made by anybody: nothing is written outside of the target, no link is followed on the way to a file,
//! no device is made, and an archive that is cut off is told from one that is whole. What was unpacked before a fault stays.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use tar::{EntryType, Header};

use super::file::DEPTH;
use super::wire::{Payload, Wire, passed_on};
use super::{Archive, Fault, Result, Tree, invalid, shown, text, told};
use crate::volume::USER;

/// How much is compressed at once: one frame of the stream each.
const FRAME: usize = 1 << 20;

/// How a compressed archive begins.
const MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];

/// The longest name, bytes.
const NAME: usize = 16 << 10;

/// Files with several names that are remembered to be sent once, and directories whose times are set at the end.
const REMEMBERED: usize = 65_536;

/// The largest list of an entry's extended attributes, bytes.
const ATTRIBUTES: usize = 64 << 10;

/// How an extended attribute is called in an archive.
const ATTRIBUTE: &str = "SCHILY.xattr.";

/// The first id that no file of a tree has.
const IDS: u64 = 65_536;

/// What a library passed on: a fault of the stream, or of the archive.
fn fault(error: &io::Error) -> Fault {
    passed_on(error).unwrap_or_else(|| invalid(format!("the archive cannot be read: {error}")))
}

// ---- out

/// Sends a directory's contents, or one file.
pub(super) fn send(tree: &Tree, wire: &mut Wire, path: &[u8]) -> Result<()> {
    let top = tree.open(path, OFlags::RDONLY | OFlags::NONBLOCK)?;
    let stat = rustix::fs::fstat(&top).map_err(told(path))?;
    if tree.archive == Archive::Whole {
        let pressed = Pressed { to: &mut *wire, gathered: Vec::with_capacity(FRAME) };
        pack(Box::new(pressed), true, path, &top, &stat)?;
    } else {
        pack(Box::new(&mut *wire), false, path, &top, &stat)?;
    }
    wire.eof()
}

fn pack(out: Box<dyn Finish + '_>, whole: bool, path: &[u8], top: &OwnedFd, stat: &Stat) -> Result<()> {
    let mut sender = Sender { tar: tar::Builder::new(out), linked: HashMap::new(), whole };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => sender.directory(top, &mut Vec::new(), DEPTH)?,
        FileType::RegularFile => {
            let own = path.rsplit(|byte| *byte == b'/').find(|part| !part.is_empty()).unwrap_or(b"file");
            sender.file(top, stat, own)?;
        }
        _ => return Err(invalid(format!("{}: is neither a file nor a directory", shown(path)))),
    }
    let out = sender.tar.into_inner().map_err(|error| fault(&error))?;
    out.finish().map_err(|error| fault(&error))
}

/// A writer with an end.
trait Finish: Write {
    fn finish(self: Box<Self>) -> io::Result<()>;
}

impl Finish for &mut Wire {
    fn finish(self: Box<Self>) -> io::Result<()> {
        Ok(())
    }
}

/// Compresses what is written to it, frame by frame.
struct Pressed<W: Write> {
    to: W,
    gathered: Vec<u8>,
}

impl<W: Write> Pressed<W> {
    fn press(&mut self) -> io::Result<()> {
        let pressed = compress_to_vec(&self.gathered[..], CompressionLevel::Fastest);
        self.gathered.clear();
        self.to.write_all(&pressed)
    }
}

impl<W: Write> Write for Pressed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let take = bytes.len().min(FRAME - self.gathered.len());
        self.gathered.extend_from_slice(&bytes[..take]);
        if self.gathered.len() == FRAME {
            self.press()?;
        }
        Ok(take)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<W: Write> Finish for Pressed<W> {
    fn finish(mut self: Box<Self>) -> io::Result<()> {
        if self.gathered.is_empty() { Ok(()) } else { self.press() }
    }
}

struct Sender<'a> {
    tar: tar::Builder<Box<dyn Finish + 'a>>,
    /// What was sent of files with more than one name.
    linked: HashMap<(u64, u64), Vec<u8>>,
    whole: bool,
}

impl Sender<'_> {
    /// Sends what is in `directory`, whose own name (with its slash) is in `name`.
    fn directory(&mut self, directory: &OwnedFd, name: &mut Vec<u8>, depth: usize) -> Result<()> {
        if depth == 0 {
            return Err(invalid(format!("{}: deeper than {DEPTH} directories", shown(name))));
        }
        let base = name.len();
        for entry in Dir::read_from(directory).map_err(told(name))? {
            let entry = entry.map_err(told(name))?;
            let own = entry.file_name();
            if own == c"." || own == c".." {
                continue;
            }
            name.truncate(base);
            name.extend_from_slice(own.to_bytes());
            self.entry(directory, own, name, depth)?;
        }
        name.truncate(base);
        Ok(())
    }

    fn entry(&mut self, parent: &OwnedFd, own: &CStr, name: &mut Vec<u8>, depth: usize) -> Result<()> {
        // Whatever is gone, or something else, since it was read is not sent.
        let stat = match rustix::fs::statat(parent, own, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(told(name)(error)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => match rustix::fs::readlinkat(parent, own, Vec::new()) {
                Ok(target) => self.header(name, &stat, EntryType::Symlink, target.to_bytes()),
                Err(Errno::NOENT | Errno::INVAL) => Ok(()),
                Err(error) => Err(told(name)(error)),
            },
            FileType::Fifo if self.whole => self.header(name, &stat, EntryType::Fifo, &[]),
            kind @ (FileType::Directory | FileType::RegularFile) => {
                let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
                let file = match rustix::fs::openat(parent, own, flags, Mode::empty()) {
                    Ok(file) => file,
                    Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(()),
                    Err(error) => return Err(told(name)(error)),
                };
                let stat = rustix::fs::fstat(&file).map_err(told(name))?;
                match (kind, FileType::from_raw_mode(stat.st_mode)) {
                    (FileType::Directory, FileType::Directory) => {
                        name.push(b'/');
                        self.attributes(&file, name)?;
                        self.header(name, &stat, EntryType::Directory, &[])?;
                        self.directory(&file, name, depth - 1)
                    }
                    (FileType::RegularFile, FileType::RegularFile) => self.file(&file, &stat, name),
                    _ => Ok(()),
                }
            }
            // A socket means nothing without who listens.
            _ => Ok(()),
        }
    }

    fn file(&mut self, file: &OwnedFd, stat: &Stat, name: &[u8]) -> Result<()> {
        if stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.linked.get(&key).cloned() {
                return self.header(name, stat, EntryType::Link, &first);
            }
            if self.linked.len() < REMEMBERED {
                self.linked.insert(key, name.to_vec());
            }
        }
        self.attributes(file, name)?;
        if name.len() > 100 {
            self.long(EntryType::GNULongName, name)?;
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let mut header = header(stat, EntryType::Regular, name);
        header.set_size(size);
        header.set_cksum();
        let exact = Exact { file: file.as_fd(), offset: 0, size };
        self.tar.append(&header, exact).map_err(|error| fault(&error))
    }

    fn header(&mut self, name: &[u8], stat: &Stat, kind: EntryType, link: &[u8]) -> Result<()> {
        if link.len() > 100 {
            self.long(EntryType::GNULongLink, link)?;
        }
        if name.len() > 100 {
            self.long(EntryType::GNULongName, name)?;
        }
        let mut header = header(stat, kind, name);
        fill(&mut header.as_old_mut().linkname, link);
        header.set_cksum();
        self.tar.append(&header, io::empty()).map_err(|error| fault(&error))
    }

    /// A name that does not fit a header, as an entry before it.
    fn long(&mut self, kind: EntryType, name: &[u8]) -> Result<()> {
        let mut header = Header::new_gnu();
        fill(&mut header.as_old_mut().name, b"././@LongLink");
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(name.len() as u64 + 1);
        header.set_cksum();
        self.tar.append(&header, name.chain(&[0_u8][..])).map_err(|error| fault(&error))
    }

    /// The attributes of users, as an entry before the file's own.
    fn attributes(&mut self, file: &OwnedFd, name: &[u8]) -> Result<()> {
        if !self.whole {
            return Ok(());
        }
        let mut names = vec![0; ATTRIBUTES];
        let length = match rustix::fs::flistxattr(file, &mut names[..]) {
            Ok(length) => length,
            Err(Errno::NOTSUP) => return Ok(()),
            Err(error) => return Err(told(name)(error)),
        };
        let mut found = Vec::new();
        for attribute in names[..length].split_inclusive(|byte| *byte == 0) {
            let Some(attribute) = CStr::from_bytes_with_nul(attribute).ok().filter(|name| is_users(name.to_bytes()))
            else {
                continue;
            };
            let mut value = vec![0; ATTRIBUTES];
            let Ok(length) = rustix::fs::fgetxattr(file, attribute, &mut value[..]) else { continue };
            value.truncate(length);
            // One whose name is no text has no place in an archive.
            if let Ok(text) = attribute.to_str() {
                found.push((format!("{ATTRIBUTE}{text}"), value));
            }
        }
        if found.is_empty() {
            return Ok(());
        }
        let pairs = found.iter().map(|(name, value)| (name.as_str(), &value[..]));
        self.tar.append_pax_extensions(pairs).map_err(|error| fault(&error))
    }
}

fn is_users(attribute: &[u8]) -> bool {
    attribute.starts_with(b"user.") && attribute.len() <= 255
}

fn header(stat: &Stat, kind: EntryType, name: &[u8]) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(u64::from(stat.st_uid));
    header.set_gid(u64::from(stat.st_gid));
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    fill(&mut header.as_old_mut().name, name);
    header
}

fn fill(field: &mut [u8], bytes: &[u8]) {
    let take = field.len().min(bytes.len());
    field[..take].copy_from_slice(&bytes[..take]);
}

/// A file's bytes, as many as were promised: one that shrank meanwhile ends in zeros.
struct Exact<F> {
    file: F,
    offset: u64,
    size: u64,
}

impl<F: AsFd> Read for Exact<F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(usize::try_from(self.size - self.offset).unwrap_or(usize::MAX));
        let read = match super::read_at(&self.file, &mut into[..most], self.offset)? {
            0 => {
                into[..most].fill(0);
                most
            }
            read => read,
        };
        self.offset += read as u64;
        Ok(read)
    }
}

// ---- in

/// Unpacks an archive into `path`.
pub(super) fn take(tree: &Tree, wire: &mut Wire, path: &[u8]) -> Result<()> {
    tree.make_all(path)?;
    let root = tree.open(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    let mut payload = Payload::new(wire);
    let unpacked =
        Unpressed::new(BufReader::with_capacity(128 << 10, &mut payload)).map_err(|error| fault(&error)).and_then(
            |bytes| Target { root, whole: tree.archive == Archive::Whole, directories: Vec::new() }.unpack(bytes),
        );
    match (payload.fault.take(), unpacked) {
        (Some(fault), Err(_)) => Err(fault),
        (_, unpacked) => unpacked,
    }
}

/// An archive's bytes, whether it is compressed or not.
enum Unpressed<R: BufRead> {
    Plain(R),
    Pressed(Option<Box<StreamingDecoder<R, FrameDecoder>>>),
}

impl<R: BufRead> Unpressed<R> {
    fn new(mut from: R) -> io::Result<Self> {
        // A pipe's first piece may be short; the four bytes come with the first frame of the protocol.
        if from.fill_buf()?.starts_with(&MAGIC) {
            let decoder = StreamingDecoder::new(from).map_err(io::Error::other)?;
            return Ok(Unpressed::Pressed(Some(Box::new(decoder))));
        }
        Ok(Unpressed::Plain(from))
    }
}

impl<R: BufRead> Read for Unpressed<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let decoder = match self {
            Unpressed::Plain(from) => return from.read(into),
            Unpressed::Pressed(decoder) => decoder,
        };
        loop {
            let Some(frame) = decoder else { return Ok(0) };
            match frame.read(into)? {
                0 if into.is_empty() => return Ok(0),
                0 => {}
                read => return Ok(read),
            }
            // The next frame, if one follows.
            let Some(mut from) = decoder.take().map(|decoder| decoder.into_inner()) else { return Ok(0) };
            if !from.fill_buf()?.is_empty() {
                *decoder = Some(Box::new(StreamingDecoder::new(from).map_err(io::Error::other)?));
            }
        }
    }
}

/// Tells whether the end of the bytes was reached.
struct Watched<'a, R> {
    from: R,
    over: &'a Cell<bool>,
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(into)?;
        if read == 0 && !into.is_empty() {
            self.over.set(true);
        }
        Ok(read)
    }
}

/// A directory, for later: what is put into it changes its time.
struct Directory {
    name: Vec<u8>,
    mode: u32,
    modified: Timespec,
    owner: (Uid, Gid),
}

struct Target {
    root: OwnedFd,
    whole: bool,
    directories: Vec<Directory>,
}

impl Target {
    fn unpack(mut self, from: impl Read) -> Result<()> {
        let over = Cell::new(false);
        let mut archive = tar::Archive::new(Watched { from, over: &over });
        let broken = |error: io::Error| fault(&error);
        for entry in archive.entries().map_err(broken)? {
            self.entry(entry.map_err(broken)?)?;
        }
        if over.get() {
            return Err(invalid("the archive is cut off"));
        }
        // What follows the end is padding; it is read so that a stream that breaks off there is noticed.
        io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(broken)?;
        self.finish()
    }

    fn entry(&mut self, mut entry: tar::Entry<'_, impl Read>) -> Result<()> {
        let name = entry.path_bytes().into_owned();
        let broken = |error: io::Error| fault(&error);
        let (kind, mode) = (entry.header().entry_type(), entry.header().mode().map_err(broken)?);
        let seconds = entry.header().mtime().map_err(broken)?;
        let modified = Timespec { tv_sec: i64::try_from(seconds).unwrap_or(0), tv_nsec: 0 };
        let id = |id: io::Result<u64>| id.ok().filter(|id| self.whole && *id < IDS).map_or(USER, |id| id as u32);
        let owner = (Uid::from_raw(id(entry.header().uid())), Gid::from_raw(id(entry.header().gid())));
        let mode = mode & if self.whole { 0o7777 } else { 0o777 };
        let is_directory = kind == EntryType::Directory || (kind == EntryType::Regular && name.ends_with(b"/"));
        let parts = parts(&name)?;
        let Some((own, above)) = parts.split_last() else {
            // The target itself.
            return Ok(());
        };
        let parent = self.directory(above, &name)?;
        let failed = told(&name);
        match kind {
            _ if is_directory => {
                match rustix::fs::mkdirat(&parent, own, Mode::from_raw_mode(0o755)) {
                    Err(Errno::EXIST) => {}
                    made => made.map_err(&failed)?,
                }
                let directory = self.directory(&parts, &name)?;
                self.attributes(&mut entry, &directory, &name)?;
                if self.directories.len() < REMEMBERED {
                    self.directories.push(Directory { name: name.clone(), mode, modified, owner });
                    return Ok(());
                }
                own_and_mode(&directory, owner, mode).map_err(&failed)
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file =
                    replacing(&parent, own, || rustix::fs::openat(&parent, own, flags, Mode::from_raw_mode(0o600)))
                        .map_err(&failed)?;
                let file = File::from(file);
                pour(&mut entry, &file, &name)?;
                self.attributes(&mut entry, &file, &name)?;
                own_and_mode(&file, owner, mode).map_err(&failed)?;
                rustix::fs::futimens(&file, &times(modified)).map_err(&failed)
            }
            EntryType::Symlink => {
                let target = link(&entry, &name)?;
                replacing(&parent, own, || rustix::fs::symlinkat(&target, &parent, own)).map_err(&failed)?;
                rustix::fs::chownat(&parent, own, Some(owner.0), Some(owner.1), AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(&failed)?;
                rustix::fs::utimensat(&parent, own, &times(modified), AtFlags::SYMLINK_NOFOLLOW).map_err(&failed)
            }
            EntryType::Link => {
                let target = link(&entry, &name)?;
                let first = self::parts(target.to_bytes())?;
                let Some((first_own, first_above)) = first.split_last() else {
                    return Err(invalid(format!("{}: a link to nothing", shown(&name))));
                };
                let first_parent = self.directory(first_above, &name)?;
                replacing(&parent, own, || rustix::fs::linkat(&first_parent, first_own, &parent, own, AtFlags::empty()))
                    .map_err(&failed)
            }
            EntryType::Fifo => {
                replacing(&parent, own, || {
                    rustix::fs::mknodat(&parent, own, FileType::Fifo, Mode::from_raw_mode(mode & 0o777), 0)
                })
                .map_err(&failed)?;
                rustix::fs::chownat(&parent, own, Some(owner.0), Some(owner.1), AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(&failed)
            }
            EntryType::XGlobalHeader => Ok(()),
            EntryType::Char | EntryType::Block => Err(invalid(format!("{}: device nodes are not taken", shown(&name)))),
            other => Err(invalid(format!("{}: entries of kind {other:?} are not taken", shown(&name)))),
        }
    }

    /// A directory below the target, made where it is not there. Nothing on the way is a link.
    fn directory(&self, parts: &[CString], name: &[u8]) -> Result<OwnedFd> {
        if parts.is_empty() {
            return self.root.try_clone().map_err(|error| fault(&error));
        }
        let path = parts.iter().map(|part| part.to_bytes()).collect::<Vec<_>>().join(&b'/');
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |at: &OwnedFd, path: &OsStr| rustix::fs::openat2(at, path, flags, Mode::empty(), resolve);
        match open(&self.root, OsStr::from_bytes(&path)) {
            Err(Errno::NOENT) => {}
            Err(Errno::LOOP | Errno::NOTDIR) => {
                return Err(invalid(format!("{}: leads through what is no directory", shown(name))));
            }
            opened => return opened.map_err(told(name)),
        }
        let mut at = self.root.try_clone().map_err(|error| fault(&error))?;
        for part in parts {
            match rustix::fs::mkdirat(&at, part, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(told(name)(error)),
            }
            at = open(&at, OsStr::from_bytes(part.to_bytes())).map_err(told(name))?;
        }
        Ok(at)
    }

    fn attributes(&self, entry: &mut tar::Entry<'_, impl Read>, file: impl AsFd, name: &[u8]) -> Result<()> {
        if !self.whole {
            return Ok(());
        }
        let Some(extensions) = entry.pax_extensions().map_err(|error| fault(&error))? else { return Ok(()) };
        for extension in extensions {
            let extension = extension.map_err(|error| fault(&error))?;
            let attribute = extension.key_bytes().strip_prefix(ATTRIBUTE.as_bytes());
            let Some(attribute) = attribute.filter(|name| is_users(name)) else { continue };
            rustix::fs::fsetxattr(&file, &text(attribute)?, extension.value_bytes(), XattrFlags::empty())
                .map_err(told(name))?;
        }
        Ok(())
    }

    /// Modes and times of directories, the innermost first: nothing is put into them any more.
    fn finish(mut self) -> Result<()> {
        while let Some(Directory { name, mode, modified, owner }) = self.directories.pop() {
            let directory = self.directory(&parts(&name)?, &name)?;
            own_and_mode(&directory, owner, mode).map_err(told(&name))?;
            rustix::fs::futimens(&directory, &times(modified)).map_err(told(&name))?;
        }
        Ok(())
    }
}

fn own_and_mode(file: impl AsFd, (uid, gid): (Uid, Gid), mode: u32) -> Result<(), Errno> {
    rustix::fs::chownat(&file, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))
}

fn times(modified: Timespec) -> Timestamps {
    let unchanged = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    Timestamps { last_access: unchanged, last_modification: modified }
}

/// Makes an entry; what is there and is no directory goes first.
fn replacing<T>(parent: &OwnedFd, own: &CStr, make: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    match make() {
        Err(Errno::EXIST) => {
            rustix::fs::unlinkat(parent, own, AtFlags::empty())?;
            make()
        }
        made => made,
    }
}

/// The bytes of an entry into a file, in which what is zero stays a hole.
fn pour(entry: &mut impl Read, file: &File, name: &[u8]) -> Result<()> {
    let mut piece = vec![0; 64 << 10];
    let mut end = 0;
    loop {
        let read = match entry.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(fault(&error)),
        };
        if piece[..read].iter().any(|byte| *byte != 0) {
            let written = file.write_all_at(&piece[..read], end);
            written.map_err(|error| told(name)(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        }
        end += read as u64;
    }
    rustix::fs::ftruncate(file, end).map_err(told(name))
}

/// Where a link of the archive leads.
fn link(entry: &tar::Entry<'_, impl Read>, name: &[u8]) -> Result<CString> {
    let target = entry.link_name_bytes().filter(|target| !target.is_empty() && target.len() <= NAME);
    text(&target.ok_or_else(|| invalid(format!("{}: a link to nothing", shown(name))))?)
}

/// The parts of a name, none of which leads up or anywhere else.
fn parts(name: &[u8]) -> Result<Vec<CString>> {
    let refused = || invalid(format!("{}: this name is not taken", shown(&name[..name.len().min(200)])));
    if name.len() > NAME {
        return Err(refused());
    }
    let parts = name.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    let parts: Vec<CString> =
        parts.map(|part| if part == b".." { Err(refused()) } else { text(part) }).collect::<Result<_>>()?;
    if parts.len() > DEPTH { Err(refused()) } else { Ok(parts) }
}
