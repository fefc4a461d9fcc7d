//! One operation on a tree without a guest: a file read or written, a listing, a tree as an archive.
//!
//! Asked in the words that a guest's agent is asked in ([`pepo_proto`]), on a stream that pepod has the other end of, by a
//! process in the jail of a share server that ends with its answer. The tree is its root, so no name and no link leads
//! anywhere else; an archive is taken apart in here and nowhere else.
//!
//! ```text
//! Request ─▶ Accepted ─▶ bytes or events ─▶ End, and the process ends
//! ```

mod archive;
mod file;
mod wire;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use pepo_proto::{Event, Failure, FailureCode, Frame, Operation, Outcome};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::serve::End;
use crate::id::VolumeId;
use crate::jail::Access;
use crate::sys;
use crate::volume::USER;
use wire::Wire;

/// Links followed in the last part of a name.
const LINKS: usize = 16;

/// What pepod asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VisitPlan {
    /// The tree.
    pub volume: VolumeId,
    /// Whether it may be changed.
    pub access: Access,
    /// What archives are.
    pub archive: Archive,
}

/// What an archive of a visit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Archive {
    /// A tar of names and bytes: what is unpacked belongs to the guest's user.
    Plain,
    /// A compressed one (zstd) with owners, attributes and set-id bits: a tree as it was. One that is not compressed is
    /// taken too.
    Whole,
}

/// Why an operation ended early.
#[derive(Debug)]
enum Fault {
    /// The stream is gone: there is nobody to tell.
    Lost,
    /// What to tell.
    Failed(FailureCode, String),
}

type Result<T, F = Fault> = std::result::Result<T, F>;

/// An error about something with that name, as it is told.
fn told(name: &[u8]) -> impl Fn(Errno) -> Fault + '_ {
    move |error| {
        let code = match error {
            Errno::NOENT => FailureCode::NotFound,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => FailureCode::Denied,
            Errno::EXIST => FailureCode::Exists,
            Errno::NOTDIR => FailureCode::NotDirectory,
            Errno::ISDIR => FailureCode::IsDirectory,
            Errno::NOTEMPTY => FailureCode::NotEmpty,
            Errno::NOSPC | Errno::DQUOT => FailureCode::NoSpace,
            Errno::INVAL | Errno::NAMETOOLONG | Errno::LOOP | Errno::XDEV | Errno::MLINK => FailureCode::Invalid,
            _ => FailureCode::Io,
        };
        Fault::Failed(code, format!("{}: {}", shown(name), io::Error::from(error)))
    }
}

fn invalid(message: impl Into<String>) -> Fault {
    Fault::Failed(FailureCode::Invalid, message.into())
}

fn shown(name: &[u8]) -> String {
    name.escape_ascii().to_string()
}

/// A visit in its jail, about to be asked.
pub(super) struct Visit {
    tree: Tree,
    wire: Wire,
}

impl Visit {
    pub fn new(root: OwnedFd, stream: OwnedFd, archive: Archive) -> io::Result<Self> {
        Ok(Visit { tree: Tree { root, archive }, wire: Wire::new(stream)? })
    }

    /// Answers the one request. Returns when all of the answer is on the stream, or when nobody is there to hear it.
    pub fn run(self) -> End {
        let Visit { tree, mut wire } = self;
        let operation = match wire.request() {
            Ok(operation) => operation,
            Err(_) => return End::Broken,
        };
        // What is made belongs to the guest's user; what may be reached is all of it.
        let done = match sys::file_ids(USER, USER) {
            true => tree.act(&mut wire, operation),
            false => Err(Fault::Failed(FailureCode::Denied, "cannot act as the guest's user".to_owned())),
        };
        let outcome = match done {
            Ok(()) => Outcome::Done,
            Err(Fault::Failed(code, message)) => Outcome::Failed(Failure { code, message }),
            Err(Fault::Lost) => return End::Closed,
        };
        let told = wire.queue(Frame::End(outcome)).and_then(|()| wire.flush());
        if told.is_ok() {
            // Whatever was sent after a refusal is not left to break the connection before the refusal was read.
            wire.drain();
        }
        End::Closed
    }
}

/// The tree, from its top.
struct Tree {
    root: OwnedFd,
    archive: Archive,
}

impl Tree {
    fn act(&self, wire: &mut Wire, operation: Operation) -> Result<()> {
        wire.queue(Frame::Accepted)?;
        match operation {
            Operation::Read(read) => self.send_file(wire, &read),
            Operation::Write(write) => self.take_file(wire, &write),
            Operation::List(list) => self.list(wire, list.path.as_bytes()),
            Operation::Stat(stat) => {
                let found = self.stat(stat.path.as_bytes())?;
                wire.queue(Frame::Event(Event::Stat(found)))
            }
            Operation::Make(make) => self.make(&make),
            Operation::Rename(rename) => self.rename(&rename),
            Operation::Remove(remove) => self.remove(remove.path.as_bytes(), remove.recursive),
            Operation::TarOut(tar) => archive::send(self, wire, tar.path.as_bytes()),
            Operation::TarIn(tar) => archive::take(self, wire, tar.path.as_bytes()),
            _ => Err(invalid("no operation on files")),
        }
    }

    /// Opens a name. Links are followed, as from the top of a disk; none leads further up than this tree.
    fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        let name = text(if path.is_empty() { &b"/"[..] } else { path })?;
        // No flag more: openat2 takes few beside O_PATH, and no device can be opened in here.
        let flags = flags | OFlags::CLOEXEC;
        rustix::fs::openat2(&self.root, &name, flags, Mode::empty(), resolve).map_err(told(path))
    }

    /// The directory that a name is in, and what it is called there; `None`: it is the top. The directories above it are
    /// made where that is asked for.
    fn above(&self, path: &[u8], make: bool) -> Result<Option<(OwnedFd, CString)>> {
        let mut trimmed = path.trim_ascii_end_of(b'/');
        while let Some(above) = trimmed.strip_suffix(b"/.") {
            trimmed = above.trim_ascii_end_of(b'/');
        }
        let (above, own) = match trimmed.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (&trimmed[..at], &trimmed[at + 1..]),
            None => (&b""[..], trimmed),
        };
        match own {
            b"" => return Ok(None),
            b"." if above.is_empty() => return Ok(None),
            b"." | b".." => return Err(invalid(format!("{}: this name is not taken", shown(path)))),
            _ => {}
        }
        if make {
            self.make_all(above)?;
        }
        Ok(Some((self.open(above, OFlags::PATH | OFlags::DIRECTORY)?, text(own)?)))
    }

    /// Makes a directory and those above it. What is there already is fine.
    fn make_all(&self, path: &[u8]) -> Result<()> {
        let mut end = 0;
        while end < path.len() {
            end = path[end + 1..].iter().position(|byte| *byte == b'/').map_or(path.len(), |at| end + 1 + at);
            let part = path[..end].trim_ascii_end_of(b'/');
            if part.is_empty() || part.ends_with(b"/..") || part.ends_with(b"/.") || part == b".." || part == b"." {
                continue;
            }
            let Some((directory, own)) = self.above(part, false)? else { continue };
            match rustix::fs::mkdirat(&directory, &own, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(told(part)(error)),
            }
        }
        Ok(())
    }
}

trait TrimEnd {
    fn trim_ascii_end_of(&self, byte: u8) -> &Self;
}

impl TrimEnd for [u8] {
    fn trim_ascii_end_of(&self, byte: u8) -> &Self {
        let length = self.iter().rposition(|one| *one != byte).map_or(0, |at| at + 1);
        &self[..length]
    }
}

fn text(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| invalid("a name with a NUL byte"))
}

/// The bytes of a file at any offset, or how many there were.
fn read_at(file: impl AsFd, into: &mut [u8], offset: u64) -> std::result::Result<usize, Errno> {
    rustix::io::retry_on_intr(|| rustix::io::pread(&file, &mut *into, offset))
}
