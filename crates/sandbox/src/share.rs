//! A share: a tree of the host served into one guest, by a jailed process of the Sandbox.
//!
//! The privileged side starts the server when a Sandbox becomes somebody's: born in the keeper's pid namespace, it joins
//! the Sandbox's cgroup, enters namespaces of its own with the tree as its root, and becomes root of a user namespace whose
//! 65,536 ids are nobody's on the host. Only then does it read what a guest chose, from a stream that it was handed.
//!
//! ```text
//! pepo-host (a thread)                       pepo-share
//!   spawns it beside the keeper ────────▶    starts
//!   mounts the tree nowhere, by descriptor
//!        ── Order + hatch, tree, doors ───▶  cgroup, namespaces, root, user namespace
//!        ◀─ Ready ────────────────────────
//!   writes uid_map and gid_map
//!        ── Mapped ───────────────────────▶  root of the namespace, few rights
//! pepod, once the guest has mounted
//!        ── the stream, by the hatch ─────▶  filter
//!        ◀─ Serving ──────────────────────   serves, until the stream or the Sandbox ends
//! ```
//! Its end is the end of the Sandbox: a tree that is not served any more is never an empty directory.

mod bucket;
mod enter;
mod filter;
mod locks;
mod nodes;
mod serve;
mod tree;
mod visit;

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use crate::cgroup::{Io, Leaf};
use crate::host::wire;
use crate::id::{UidBlock, VolumeId, process};
use crate::jail::Access;
use crate::spawn::{PidNamespace, Spawned, spawn};
use crate::volume::{Lender, Whose};

pub use enter::run;
pub use serve::HERE;
pub use visit::{Archive, VisitPlan};

/// The file that proves a mount, in the top of every served tree. It is not in the tree: the server makes it up.
pub const PROOF: &CStr = c".pepo-proof";

/// How long a server may take to serve: forty system calls, on a machine that starts twenty others.
const SERVING_WITHIN: Duration = Duration::from_secs(30);

/// Whether others change the tree at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cache {
    /// They may: names and attributes are trusted for a second.
    Shared,
    /// Nobody does: they are trusted until this guest changes them.
    Alone,
}

/// What pepod asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharePlan {
    /// The tree.
    pub volume: VolumeId,
    /// Whether the guest may change it.
    pub access: Access,
    /// Whether others may.
    pub cache: Cache,
    /// What [`PROOF`] says: printable, at most 64 bytes.
    pub proof: String,
}

impl SharePlan {
    /// Checks every bound.
    ///
    /// # Errors
    /// One sentence.
    pub fn check(&self) -> Result<(), String> {
        let printable = self.proof.bytes().all(|byte| byte.is_ascii_graphic());
        if self.proof.is_empty() || self.proof.len() > 64 || !printable {
            return Err("a proof has 1 to 64 printable bytes".to_owned());
        }
        Ok(())
    }
}

/// What a Sandbox is served, written down before its server is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareRecord {
    /// The tree.
    pub volume: VolumeId,
    /// Process id and start time of its server; `None`: it is being started.
    pub server: Option<(u32, u64)>,
}

/// What a share server is told, beside the descriptors: where its stream comes (a visit's: the stream itself), the tree's
/// mount, then the cgroup's doors.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Order {
    /// A directory over which the tree is put, in the server's own namespace.
    pub at: PathBuf,
    /// With whose rights the tree is reached; nobody: those of root of a user namespace of its own.
    pub lender: Option<Lender>,
    /// Files that may be open, as far as this host lets it.
    pub open_files: u64,
    /// What it is for.
    pub task: Task,
}

/// What a process in a share server's jail does.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "task", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Task {
    /// Serves a guest.
    Serve {
        /// The name of its cgroup in every hierarchy.
        cgroup: String,
        /// How many hierarchies there are.
        hierarchies: usize,
        /// See [`SharePlan`].
        cache: Cache,
        /// See [`SharePlan`].
        proof: String,
        /// Files that a guest's kernel may know at once.
        nodes: usize,
        /// What the guest may use of the disks below it in a second; `None`: no limit.
        io: Option<Io>,
    },
    /// Does one thing for pepod, and ends.
    Visit {
        /// See [`VisitPlan`].
        archive: Archive,
    },
}

/// Descriptors in an [`Order`] before the doors.
pub(crate) const FIXED_FDS: usize = 2;

/// What a share server says to the privileged side.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    /// It is in its user namespace and waits for ids.
    Ready,
    /// It serves, and has no right outside of its namespace.
    Serving,
    /// It does not.
    Failed {
        /// What was tried.
        step: String,
        /// Why it failed.
        reason: String,
    },
}

/// The answer to [`Said::Ready`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Mapped {}

/// What comes to a share server once the guest has mounted: the stream, beside this.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Handed {}

/// Where a share server's stream is handed in. The server's way into its jail is longer than most: it is begun while the
/// guest still mounts, and ends where nothing is handed in.
#[derive(Debug)]
pub struct Handing(OwnedFd);

impl Handing {
    /// The place, and the end that goes to [`crate::host::Host::share`].
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<(Self, OwnedFd)> {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
        Ok((Handing(ours), theirs))
    }

    /// Hands the stream in.
    ///
    /// # Errors
    /// The server is gone.
    pub fn hand(self, stream: &OwnedFd) -> io::Result<()> {
        wire::send(self.0.as_fd(), &Handed {}, &[stream.as_fd()])
    }
}

/// A server that was started.
#[derive(Debug)]
pub(crate) struct Server(Spawned);

impl Server {
    /// Starts the process in the pid namespace of that keeper and in its Sandbox's cgroup, or as the first of a namespace of
    /// its own, and tells it nothing yet.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn spawn(sandbox: Option<(BorrowedFd<'_>, &Leaf<'_>)>) -> io::Result<Self> {
        let spawned = match sandbox {
            Some((keeper, leaf)) => spawn(process::SHARE, PidNamespace::Of(keeper), Some(leaf)),
            None => spawn(process::SHARE, PidNamespace::New, None),
        };
        spawned.map(Server)
    }

    /// Its process.
    pub fn pidfd(&self) -> &OwnedFd {
        &self.0.pidfd
    }

    /// Its process id here, and when it started, in clock ticks.
    pub fn identity(&self) -> (u32, u64) {
        (self.0.pid, self.0.start)
    }

    /// Tells it what to serve, gives it ids, and waits until it serves.
    ///
    /// # Errors
    /// What it says, or why it says nothing.
    pub fn serve(
        self,
        order: &Order,
        whose: &Whose,
        fds: &[BorrowedFd<'_>],
        cancelled: &dyn Fn() -> bool,
    ) -> io::Result<OwnedFd> {
        let deadline = Instant::now() + SERVING_WITHIN;
        wire::send(self.0.socket.as_fd(), order, fds)?;
        loop {
            match self.hear(deadline, cancelled)? {
                Said::Ready => {
                    let Whose::Owner(first_uid) = whose else {
                        return Err(io::Error::other("it asks for ids and has none to get"));
                    };
                    for file in ["uid_map", "gid_map"] {
                        let map = format!("0 {first_uid} {}\n", UidBlock::TREE);
                        fs::write(format!("/proc/{}/{file}", self.0.pid), map)?;
                    }
                    wire::send(self.0.socket.as_fd(), &Mapped {}, &[])?;
                }
                Said::Serving => return Ok(self.0.pidfd),
                Said::Failed { step, reason } => return Err(io::Error::other(format!("{step}: {reason}"))),
            }
        }
    }

    fn hear(&self, deadline: Instant, cancelled: &dyn Fn() -> bool) -> io::Result<Said> {
        let look = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        loop {
            if cancelled() {
                return Err(io::Error::other("it was released meanwhile"));
            }
            match poll(&mut [PollFd::new(&self.0.socket, PollFlags::IN)], Some(&look)) {
                Ok(0) | Err(rustix::io::Errno::INTR) if Instant::now() < deadline => {}
                Ok(0) | Err(rustix::io::Errno::INTR) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => break,
                Err(error) => return Err(error.into()),
            }
        }
        match wire::receive::<Said>(self.0.socket.as_fd(), &mut Vec::new())? {
            Some((said, _)) => Ok(said),
            None => Err(io::Error::other("it ended without a word")),
        }
    }
}
