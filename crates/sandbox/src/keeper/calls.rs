//! Calls of a guest that nobody may hang up on before they are answered.
//!
//! vhost-device-vsock 0.3.0 passes a guest's answer to its caller and takes it for impossible that the caller has gone: the
//! thread that serves its queues ends in a panic, and the guest is mute from then on. Callers do go: a request is given up,
//! pepod is killed. So the privileged side gives the keeper, which lives as long as the device, another descriptor of each
//! call. The keeper lets go of it when something was said on it, when the caller has ended it, or in time.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::id::file;

/// How long a call is held that nobody says anything on: longer than a guest may take to answer one. What is closed without
/// a word, by the death of who had it, is not over for the guest before that.
const HOLD: Duration = Duration::from_secs(30);

/// Calls held at once; the oldest goes first.
pub(super) const MOST: usize = 64;

/// The calls that are held.
pub(super) struct Calls {
    socket: OwnedFd,
    held: VecDeque<(OwnedFd, Instant)>,
}

impl Calls {
    /// A place to hold them, in a Sandbox's own directory.
    pub(super) fn bind(directory: &Path) -> io::Result<Self> {
        let socket = datagrams()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(directory.join(file::CALLS))?)?;
        Ok(Calls { socket, held: VecDeque::new() })
    }

    /// What to wait for.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.socket.as_fd()).chain(self.held.iter().map(|(call, _)| call.as_fd()))
    }

    /// Until when to wait for it at the longest.
    pub(super) fn until(&self) -> Option<Instant> {
        self.held.front().map(|(_, since)| *since + HOLD)
    }

    /// Takes what has come, and lets go of what need not be held.
    pub(super) fn tend(&mut self) {
        while let Ok(call) = receive(self.socket.as_fd()) {
            if self.held.len() == MOST {
                self.held.pop_front();
            }
            self.held.extend(call.map(|call| (call, Instant::now())));
        }
        self.held.retain(|(call, since)| since.elapsed() < HOLD && !is_over(call.as_fd()));
    }
}

/// Gives a call to the keeper of a Sandbox, whose directory this is. One without a place for it (of a release before) is
/// not given any.
pub(crate) fn give(directory: BorrowedFd<'_>, call: BorrowedFd<'_>) -> io::Result<()> {
    let socket = datagrams()?;
    let place = format!("/proc/self/fd/{}/{}", directory.as_raw_fd(), file::CALLS);
    rustix::net::connect(&socket, &SocketAddrUnix::new(place)?)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(&call)));
    rustix::net::sendmsg(&socket, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn datagrams() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?)
}

/// The descriptor of one message, if it has one.
fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut body = [0; 1];
    rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut body)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    Ok(rights.flatten().next())
}

/// Whether something was said on a call, or it was ended.
fn is_over(call: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(call, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A call that was given to the keeper and that its caller then let go of without a word; the guest's end of it.
    fn abandoned(calls: &mut Calls, directory: &File) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        give(directory.as_fd(), ours.as_fd()).expect("give");
        drop(ours);
        calls.tend();
        theirs
    }

    #[test]
    fn whoever_hangs_up_is_still_there_for_the_answer() {
        let place = tempfile::tempdir().expect("directory");
        let directory = File::open(place.path()).expect("open");
        let mut calls = Calls::bind(place.path()).expect("bind");
        let mut guest = abandoned(&mut calls, &directory);
        guest.write_all(b"OK 1\n").expect("the caller is there");
        calls.tend();
        assert!(guest.write_all(b"more").is_err(), "it was answered, and let go of");
    }

    #[test]
    fn a_call_that_its_caller_ends_is_over_at_once() {
        let place = tempfile::tempdir().expect("directory");
        let directory = File::open(place.path()).expect("open");
        let mut calls = Calls::bind(place.path()).expect("bind");
        let (ours, mut theirs) = UnixStream::pair().expect("pair");
        give(directory.as_fd(), ours.as_fd()).expect("give");
        ours.shutdown(std::net::Shutdown::Both).expect("shutdown");
        calls.tend();
        assert_eq!(calls.held.len(), 0);
        assert!(theirs.write_all(b"x").is_err());
    }

    #[test]
    fn no_more_are_held_than_there_is_room_for() {
        let place = tempfile::tempdir().expect("directory");
        let directory = File::open(place.path()).expect("open");
        let mut calls = Calls::bind(place.path()).expect("bind");
        let mut all: Vec<UnixStream> = (0..=MOST).map(|_| abandoned(&mut calls, &directory)).collect();
        assert_eq!(calls.held.len(), MOST);
        assert!(all[0].write_all(b"x").is_err(), "the oldest has gone");
        assert!(all[1].write_all(b"x").is_ok());
        assert!(calls.until().is_some_and(|until| until > Instant::now()));
    }
}
