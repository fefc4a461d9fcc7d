//! Changes under a path, told as they happen.
//!
//! One thread per watch, waiting for the kernel's events and for the host's going away. Called by `files`.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use pepo_proto::{Event, FailureCode, Frame, WatchKind};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::files::{MAX_DEPTH, told};
use crate::stream::failed;
use crate::wire::{Fault, Wire};

/// Directories watched at once by one operation.
const MAX_WATCHES: usize = 65_536;

/// Entries found in a directory that appeared are reported up to here; beyond it the host is told to look again.
const MAX_FOUND: usize = 4096;

struct Watcher<'a> {
    inotify: OwnedFd,
    root: &'a Path,
    recursive: bool,
    /// Watched directories, by the kernel's number, relative to the root.
    paths: HashMap<i32, PathBuf>,
}

/// Reports changes until the host goes, the operation is cancelled, or the watched path itself is removed.
pub fn run(wire: &mut Wire, path: &Path, recursive: bool) -> Result<(), Fault> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(|e| told(path)(e.into()))?;
    let mut watcher = Watcher { inotify, root: path, recursive, paths: HashMap::new() };
    watcher.add(Path::new(""), 0, &mut vec![]).map_err(told(path))?;
    // Only now: who has read this misses nothing.
    wire.accept()?;
    wire.flush()?;
    let mut buffer = [MaybeUninit::uninit(); 16 << 10];
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(watcher.inotify.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(wire.fd(), PollFlags::IN | PollFlags::RDHUP),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(told(path)(error.into())),
        }
        if !fds[1].revents().is_empty() {
            // The host sends nothing here: it has gone, or does not keep to the rules.
            return match wire.receive() {
                Err(fault) => Err(fault),
                Ok(_) => Err(Fault::Failed(failed(FailureCode::Invalid, "a watch takes no input"))),
            };
        }
        let mut changes: Vec<(WatchKind, PathBuf)> = vec![];
        let over = watcher.read(&mut buffer, &mut changes).map_err(told(path))?;
        changes.dedup();
        for (kind, changed) in changes {
            wire.queue(Frame::Event(Event::Change { kind, path: changed.as_os_str().as_bytes().to_vec() }))?;
        }
        wire.flush()?;
        if over {
            return Ok(());
        }
    }
}

impl Watcher<'_> {
    /// Watches a directory and, where asked, those below; tells what was found in them.
    fn add(&mut self, relative: &Path, depth: usize, found: &mut Vec<PathBuf>) -> io::Result<()> {
        if depth > MAX_DEPTH || self.paths.len() >= MAX_WATCHES {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let mut flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF;
        if depth > 0 {
            flags |= WatchFlags::DONT_FOLLOW | WatchFlags::ONLYDIR;
        }
        let path = self.root.join(relative);
        let path = if relative.as_os_str().is_empty() { self.root } else { &path };
        let number = inotify::add_watch(&self.inotify, path, flags)?;
        self.paths.insert(number, relative.to_owned());
        if !self.recursive && depth == 0 && found.is_empty() {
            return Ok(());
        }
        let Ok(entries) = fs::read_dir(path) else {
            return Ok(());
        };
        for entry in entries.flatten() {
            let below = relative.join(entry.file_name());
            if found.len() < MAX_FOUND {
                found.push(below.clone());
            }
            if self.recursive && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                match self.add(&below, depth + 1, found) {
                    Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => return Err(error),
                    // Gone, or not ours to see: as for any program of this user.
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Reads what has happened. `true` when the watched path itself has gone.
    fn read(&mut self, buffer: &mut [MaybeUninit<u8>], changes: &mut Vec<(WatchKind, PathBuf)>) -> io::Result<bool> {
        let mut happened = vec![];
        let mut reader = Reader::new(self.inotify.as_fd(), buffer);
        loop {
            match reader.next() {
                Ok(event) => happened.push((
                    event.wd(),
                    event.events(),
                    event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned()),
                )),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if reader.is_buffer_empty() {
                break;
            }
        }
        let mut over = false;
        for (number, events, name) in happened {
            if events.contains(ReadFlags::QUEUE_OVERFLOW) {
                changes.push((WatchKind::Overflow, PathBuf::new()));
                continue;
            }
            let Some(directory) = self.paths.get(&number).cloned() else {
                continue;
            };
            if events.contains(ReadFlags::IGNORED) {
                self.paths.remove(&number);
                continue;
            }
            if events.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF) {
                if directory.as_os_str().is_empty() {
                    changes.push((WatchKind::Removed, PathBuf::new()));
                    over = true;
                }
                continue;
            }
            let path = name.map_or_else(|| directory.clone(), |name| directory.join(name));
            let is_directory = events.contains(ReadFlags::ISDIR);
            if events.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
                changes.push((WatchKind::Created, path.clone()));
                if is_directory && self.recursive {
                    self.appeared(&path, changes);
                }
            } else if events.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM) {
                if is_directory {
                    self.forget(&path);
                }
                changes.push((WatchKind::Removed, path));
            } else if events.contains(ReadFlags::MODIFY) {
                changes.push((WatchKind::Modified, path));
            } else if events.contains(ReadFlags::ATTRIB) {
                changes.push((WatchKind::Attributes, path));
            }
        }
        Ok(over)
    }

    /// A directory came: watch it, and tell what came into it before it was watched.
    fn appeared(&mut self, path: &Path, changes: &mut Vec<(WatchKind, PathBuf)>) {
        let mut found = vec![];
        let depth = path.components().count();
        let result = self.add(path, depth, &mut found);
        if result.is_err_and(|error| error.raw_os_error() == Some(libc::ENOSPC)) || found.len() >= MAX_FOUND {
            changes.push((WatchKind::Overflow, PathBuf::new()));
        }
        changes.extend(found.into_iter().map(|path| (WatchKind::Created, path)));
    }

    /// A directory went elsewhere: its watches would tell wrong paths.
    fn forget(&mut self, path: &Path) {
        let gone: Vec<i32> =
            self.paths.iter().filter(|(_, watched)| watched.starts_with(path)).map(|(number, _)| *number).collect();
        for number in gone {
            // Removed with its directory already, or removed now.
            let _ = inotify::remove_watch(&self.inotify, number);
            self.paths.remove(&number);
        }
    }
}
