//! The messages between pepod and the privileged side, and how one lies in a datagram.
//!
//! JSON bodies of at most [`MAX_BYTES`], at most [`MAX_FDS`] descriptors beside them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Found, Leftover, Link, Refusal, Usage};
use crate::builder::BuildPlan;
use crate::id::{SandboxId, VolumeId};
use crate::jail::Access;
use crate::net::dns::Kind;
use crate::net::{Opened, Policy, Traffic};
use crate::plan::Plan;
use crate::share::{SharePlan, VisitPlan};
use crate::volume::{VolumePlan, VolumeUsage};

/// The longest message: below the default buffer of a Unix socket (208 KiB), so one always fits into an empty one. A list
/// of 1,700 Sandboxes has room.
pub(crate) const MAX_BYTES: usize = 192 * 1024;

/// The most descriptors in one message: a keeper's order has the most, with one door for each cgroup hierarchy.
pub(crate) const MAX_FDS: usize = 24;

/// From pepod.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Asked {
    /// Chosen by pepod; the answer carries it.
    pub seq: u64,
    /// What is asked.
    pub request: Request,
}

/// What pepod may ask.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Take what does not run: answered by `Done`.
    Prepare { plan: Box<Plan> },
    /// Start its keeper: `Done` with the keeper's pidfd.
    Start { id: SandboxId },
    /// A stream to its vsock device: `Done` with a connected socket.
    Connect { id: SandboxId },
    /// What is there: `Found`.
    Found,
    /// Take a running one over: `Plan` with the keeper's pidfd.
    Adopt { id: SandboxId },
    /// Where its end is written: `Evidence` with the descriptors it names.
    Evidence { id: SandboxId },
    /// A stream to its relay, which is started if it does not run: `Done` with it.
    Relay { id: SandboxId },
    /// New sockets connected to a resolver upstream: `Done` with at most so many.
    Upstream { kind: Kind, server: usize, most: usize },
    /// What it uses: `Usage`.
    Usage { id: SandboxId },
    /// Whether that step of the guest's may go on (tests make it fail): `Done`.
    #[cfg(feature = "fake")]
    May { step: crate::boot::Step },
    /// Serve a tree into its guest, on the stream that is handed in by what comes along: `Done` with the server's pidfd.
    Share { id: SandboxId, plan: Box<SharePlan> },
    /// Let one operation on a tree be asked on the stream that comes along: `Done`.
    Visit { plan: VisitPlan },
    /// Take a directory with the rights of whoever is at the other end of the connection that comes along: `Done`.
    Lend { volume: VolumeId, path: PathBuf, access: Access },
    /// Make a tree: `Done`.
    VolumeCreate { plan: Box<VolumePlan> },
    /// Raise a tree's cap: `Done`.
    VolumeGrow { volume: VolumeId, mib: u64 },
    /// What a tree uses: `Volume`.
    VolumeUsage { volume: VolumeId },
    /// Remove a tree with all that is in it: `Freed`.
    VolumeRemove { volume: VolumeId },
    /// Which trees there are: `Volumes`.
    Volumes,
    /// Put a network policy in force: `Link`.
    Network { id: SandboxId, policy: Box<Policy> },
    /// Open addresses that the resolver found: `Done`.
    Open { id: SandboxId, opened: Vec<Opened> },
    /// The resolver's sockets: `Done` with UDP's and TCP's.
    Resolver { id: SandboxId },
    /// What its network carried: `Traffic`.
    Traffic { id: SandboxId },
    /// Give all of it back: `Done`.
    Release { id: SandboxId },
    /// Give back what carries our tag and is not kept: `Leftovers`.
    Sweep { keep: Vec<SandboxId> },
    /// Start the builder: `Done` with the pipe of its events.
    Build { plan: Box<BuildPlan> },
    /// Wait for the builder's end and take its files over: `Done`.
    BuildEnd,
    /// Kill the builder, if one runs: `Done`.
    BuildKill,
}

/// From the privileged side.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The request's.
    pub seq: u64,
    /// What became of it.
    pub result: Result<Reply, Refusal>,
}

/// What it may answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub(crate) enum Reply {
    Done,
    Plan {
        plan: Box<Plan>,
    },
    Found {
        found: Vec<Found>,
    },
    /// Which of the three files the descriptors are, in this order.
    Evidence {
        exit: bool,
        console: bool,
        memory: bool,
    },
    Usage {
        usage: Usage,
    },
    Link {
        link: Link,
    },
    Traffic {
        traffic: Traffic,
    },
    Leftovers {
        left: Vec<Leftover>,
    },
    Volume {
        usage: VolumeUsage,
    },
    Freed {
        bytes: u64,
    },
    Volumes {
        volumes: Vec<VolumeId>,
    },
}

/// Sends one message with its descriptors. On a non-blocking socket a full buffer is `WouldBlock`.
pub(crate) fn send<T: Serialize>(socket: BorrowedFd<'_>, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    if body.len() > MAX_BYTES || fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("message of {} bytes, {} descriptors", body.len(), fds.len()),
        ));
    }
    send_bytes(socket, &body, fds)
}

/// Sends an encoded message.
pub(crate) fn send_bytes(socket: BorrowedFd<'_>, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket, &[IoSlice::new(body)], &mut ancillary, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// One received message. `None`: the other side is gone.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    buffer.resize(MAX_BYTES, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.bytes == 0 {
        return Ok(None);
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "message is too long"));
    }
    let message = serde_json::from_slice(&buffer[..got.bytes])?;
    Ok(Some((message, fds)))
}

/// Borrows each of them.
pub(crate) fn borrow(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::id::Slot;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("socketpair")
    }

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (a, b) = pair();
        let file = tempfile::tempfile().expect("file");
        let id = SandboxId::new(Slot::new(1).expect("slot"));
        send(a.as_fd(), &Asked { seq: 9, request: Request::Connect { id } }, &[file.as_fd()]).expect("send");
        let (asked, fds) = receive::<Asked>(b.as_fd(), &mut Vec::new()).expect("receive").expect("message");
        assert_eq!(asked.seq, 9);
        assert!(matches!(asked.request, Request::Connect { id: got } if got == id));
        assert_eq!(fds.len(), 1);
        assert!(rustix::io::fcntl_getfd(&fds[0]).expect("flags").contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn the_end_and_nonsense_are_told_apart() {
        let (a, b) = pair();
        send_bytes(a.as_fd(), b"{", &[]).expect("send");
        assert!(receive::<Asked>(b.as_fd(), &mut Vec::new()).is_err());
        drop(a);
        assert!(receive::<Asked>(b.as_fd(), &mut Vec::new()).expect("receive").is_none());
    }

    #[test]
    fn what_is_too_long_is_not_sent() {
        let (a, _b) = pair();
        let ids: Vec<_> = (0..6000).map(|n| SandboxId::new(Slot::new(n).expect("slot"))).collect();
        let long = Asked { seq: 1, request: Request::Sweep { keep: ids } };
        assert!(send(a.as_fd(), &long, &[]).is_err());
    }
}
