//! Locks of files, held on the host, so that every Sandbox which shares a tree sees them.
//!
//! Each owner has an open file of its own for each file it locks: ranges (`fcntl`) are locks of that open file, whole files
//! (`flock`) too, and the two kinds do not see each other, as on a local disk. Whoever has to wait is tried again until it
//! has the lock, is interrupted, or its server ends; then the host's kernel gives back whatever was held. A lock ends with
//! its owner's flush, and at the latest with the open file of the guest's through which it was taken: of locks that belong
//! to an open file (`F_OFD_SETLK`) a guest's kernel tells nothing else.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::FlockOperation;

use super::nodes::errno;
use crate::sys::{self, RangeLock};

/// Open files for locks, and waiting requests, at the most.
pub(super) const MOST: usize = 256;

/// Interruptions that came before what they interrupt.
const EARLY: usize = 64;

/// Who holds a lock on what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Holder {
    /// The file.
    pub node: u64,
    /// Whose lock it is, by the guest's kernel.
    pub owner: u64,
    /// Of the whole file, by `flock`.
    pub whole: bool,
}

/// What is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// By whom, of what.
    pub by: Holder,
    /// Through which open file of the guest's.
    pub through: u64,
    /// Kind and range.
    pub lock: RangeLock,
}

/// A request that waits for its lock.
#[derive(Debug)]
pub(super) struct Waiter {
    /// The request's number.
    pub unique: u64,
    /// What it waits for.
    pub wanted: Wanted,
}

/// All locks of one mount.
#[derive(Debug, Default)]
pub(super) struct Locks {
    held: Mutex<HashMap<Holder, Held>>,
    waiting: Mutex<Waiting>,
}

#[derive(Debug)]
struct Held {
    file: OwnedFd,
    /// The open file of the guest's through which it was taken last.
    through: u64,
}

#[derive(Debug, Default)]
struct Waiting {
    waiters: Vec<Waiter>,
    early: VecDeque<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Locks {
    /// Takes, changes or gives back a lock without waiting; `WouldBlock` where it is another's. `open` opens the file.
    pub fn set(&self, wanted: Wanted, open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<()> {
        let Wanted { by, through, lock: range } = wanted;
        let mut held = lock(&self.held);
        if !held.contains_key(&by) {
            if range.kind == libc::F_UNLCK as i16 {
                return Ok(());
            }
            if held.len() >= MOST {
                return Err(errno(libc::ENOLCK));
            }
            held.insert(by, Held { file: open()?, through });
        }
        let Some(Held { file, through: last }) = held.get_mut(&by) else { return Err(errno(libc::ENOLCK)) };
        *last = through;
        if by.whole {
            let operation = match i32::from(range.kind) {
                libc::F_RDLCK => FlockOperation::NonBlockingLockShared,
                libc::F_WRLCK => FlockOperation::NonBlockingLockExclusive,
                _ => FlockOperation::NonBlockingUnlock,
            };
            Ok(rustix::fs::flock(file, operation)?)
        } else {
            sys::set_range_lock(file.as_fd(), range)
        }
    }

    /// The lock that stands in the way, or the same with `F_UNLCK`.
    pub fn get(&self, wanted: Wanted, open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<RangeLock> {
        let held = lock(&self.held);
        match held.get(&wanted.by) {
            // Through its own open file: its own locks are not in its way.
            Some(held) => sys::get_range_lock(held.file.as_fd(), wanted.lock),
            None => sys::get_range_lock(open()?.as_fd(), wanted.lock),
        }
    }

    /// Gives back what that owner holds.
    pub fn leave(&self, by: Holder) {
        let held = lock(&self.held).remove(&by);
        // The close is what gives back.
        drop(held);
    }

    /// Gives back what was taken through an open file that the guest has closed: no owner is left that could have it.
    pub fn closed(&self, through: u64) {
        let gone: Vec<Held> =
            lock(&self.held).extract_if(|_, held| held.through == through).map(|(_, held)| held).collect();
        drop(gone);
    }

    /// Lets a request wait. `Err`: it was interrupted already, or too many wait.
    pub fn wait(&self, waiter: Waiter) -> io::Result<()> {
        let mut waiting = lock(&self.waiting);
        if let Some(at) = waiting.early.iter().position(|unique| *unique == waiter.unique) {
            waiting.early.remove(at);
            return Err(errno(libc::EINTR));
        }
        if waiting.waiters.len() >= MOST {
            return Err(errno(libc::ENOLCK));
        }
        waiting.waiters.push(waiter);
        Ok(())
    }

    /// Takes a waiting request off; `false` where it does not wait (yet).
    pub fn interrupt(&self, unique: u64) -> bool {
        let mut waiting = lock(&self.waiting);
        let before = waiting.waiters.len();
        waiting.waiters.retain(|waiter| waiter.unique != unique);
        if waiting.waiters.len() < before {
            return true;
        }
        waiting.early.push_back(unique);
        if waiting.early.len() > EARLY {
            waiting.early.pop_front();
        }
        false
    }

    /// Whether anybody waits.
    pub fn has_waiters(&self) -> bool {
        !lock(&self.waiting).waiters.is_empty()
    }

    /// Tries everybody who waits, the longest waiting first; those that are through, with what became of them.
    pub fn retry(&self, open: impl Fn(&Wanted) -> io::Result<OwnedFd>) -> Vec<(Waiter, io::Result<()>)> {
        let mut through = Vec::new();
        let mut waiting = lock(&self.waiting);
        let mut at = 0;
        while at < waiting.waiters.len() {
            let wanted = waiting.waiters[at].wanted;
            match self.set(wanted, || open(&wanted)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => at += 1,
                done => through.push((waiting.waiters.remove(at), done)),
            }
        }
        through
    }

    /// Open files held for locks.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        lock(&self.held).len()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn wanted(owner: u64, whole: bool, kind: i32, start: i64, length: i64) -> Wanted {
        let lock = RangeLock { kind: kind as i16, start, length };
        Wanted { by: Holder { node: 1, owner, whole }, through: 100 + owner, lock }
    }

    #[test]
    fn owners_exclude_each_other_and_the_two_kinds_do_not_meet() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let open = || Ok(File::options().read(true).write(true).open(file.path())?.into());
        let (here, there) = (Locks::default(), Locks::default());
        here.set(wanted(1, false, libc::F_WRLCK, 0, 10), open).expect("a range");
        let blocked = |result: io::Result<()>| result.expect_err("locked").kind() == io::ErrorKind::WouldBlock;
        assert!(blocked(here.set(wanted(2, false, libc::F_RDLCK, 5, 1), open)), "another owner in the same guest");
        assert!(blocked(there.set(wanted(1, false, libc::F_RDLCK, 5, 1), open)), "the same number in another guest");
        there.set(wanted(1, false, libc::F_WRLCK, 10, 0), open).expect("beside it");
        there.set(wanted(1, true, libc::F_WRLCK, 0, 0), open).expect("the whole file is another kind");
        assert!(blocked(here.set(wanted(1, true, libc::F_RDLCK, 0, 0), open)));
        let found = there.get(wanted(3, false, libc::F_WRLCK, 0, 1), open).expect("get");
        assert_eq!((found.kind, found.start, found.length), (libc::F_WRLCK as i16, 0, 10));
        here.leave(Holder { node: 1, owner: 1, whole: false });
        there.set(wanted(1, false, libc::F_RDLCK, 0, 10), open).expect("given back");
        drop(there);
        here.set(wanted(1, true, libc::F_WRLCK, 0, 0), open).expect("ended with its holder");
    }

    #[test]
    fn a_lock_of_an_open_file_ends_with_it_and_another_owners_does_not() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let open = || Ok(File::options().read(true).write(true).open(file.path())?.into());
        let locks = Locks::default();
        locks.set(wanted(1, false, libc::F_WRLCK, 0, 10), open).expect("one range");
        locks.set(wanted(2, false, libc::F_WRLCK, 10, 10), open).expect("another");
        locks.closed(101);
        locks.set(wanted(3, false, libc::F_WRLCK, 0, 10), open).expect("given back");
        let kept = locks.set(wanted(3, false, libc::F_WRLCK, 10, 10), open).expect_err("another's");
        assert_eq!(kept.kind(), io::ErrorKind::WouldBlock);
        // Whoever takes more through another open file has all of it through that one.
        locks.set(Wanted { through: 7, ..wanted(2, false, libc::F_WRLCK, 30, 1) }, open).expect("more");
        locks.closed(102);
        let kept = locks.set(wanted(3, false, libc::F_WRLCK, 30, 1), open).expect_err("another's");
        assert_eq!(kept.kind(), io::ErrorKind::WouldBlock);
        locks.closed(7);
        locks.set(wanted(3, false, libc::F_WRLCK, 10, 30), open).expect("given back");
    }

    #[test]
    fn who_waits_is_served_or_interrupted() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let open = || Ok(File::options().read(true).write(true).open(file.path())?.into());
        let locks = Locks::default();
        locks.set(wanted(1, true, libc::F_WRLCK, 0, 0), open).expect("first");
        for unique in [7, 8] {
            locks.wait(Waiter { unique, wanted: wanted(unique, true, libc::F_WRLCK, 0, 0) }).expect("waits");
        }
        assert!(locks.retry(|_| open()).is_empty());
        assert!(locks.interrupt(8));
        assert!(!locks.interrupt(9), "that one is not here yet");
        let early = locks.wait(Waiter { unique: 9, wanted: wanted(9, true, libc::F_WRLCK, 0, 0) });
        assert_eq!(early.expect_err("interrupted").raw_os_error(), Some(libc::EINTR));
        locks.leave(Holder { node: 1, owner: 1, whole: true });
        let through = locks.retry(|_| open());
        assert!(matches!(&through[..], [(Waiter { unique: 7, .. }, Ok(()))]), "{through:?}");
        assert!(!locks.has_waiters());
    }

    #[test]
    fn a_guest_that_locks_without_end_is_told_so() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let open = || Ok(File::options().read(true).write(true).open(file.path())?.into());
        let locks = Locks::default();
        for owner in 0..MOST as u64 {
            locks.set(wanted(owner, false, libc::F_RDLCK, 0, 1), open).expect("room");
        }
        let over = locks.set(wanted(9999, false, libc::F_RDLCK, 0, 1), open);
        assert_eq!(over.expect_err("no room").raw_os_error(), Some(libc::ENOLCK));
        assert_eq!(locks.count(), MOST);
    }
}
