//! The wall between pepod and the privileged side: typed requests over a `SOCK_SEQPACKET` socketpair, replies with descriptors.
//!
//! [`Host`] is pepod's handle; [`run`] is the other end, a synchronous loop in a process of its own (`pepo-host`) that keeps a
//! fixed list of capabilities and no other. It decodes what pepod sends and nothing that a guest chose.
//!
//! ```text
//! pepod                       socketpair                         pepo-host
//!   prepare(plan)  ──────────────────────────────────────────▶   directory, cgroup, disk            a thread each
//!   start(id)      ──────────────────────────────────────────▶   keeper; reply carries its pidfd    a thread each
//!   connect(id)    ──────────────────────────────────────────▶   reply carries a connected stream   inline, never waits
//!   release(id)    ──────────────────────────────────────────▶   everything back, in reverse        a thread each
//! ```
//! End of file on the socketpair ends either side at once. Keepers, and with them the Sandboxes, stay.

mod client;
mod evidence;
#[cfg(feature = "fake")]
mod fake;
mod networks;
mod relays;
mod serve;
mod split;
mod trees;
pub(crate) mod wire;
mod work;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::id::{SandboxId, VolumeId};

pub use client::{Doors, Host, Keeper};
pub use evidence::Evidence;
pub use serve::{HostConfig, run};
pub use split::{Split, split};

/// Why the privileged side did not do what was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "refusal", rename_all = "snake_case")]
pub enum Refusal {
    /// The request is not one it takes.
    #[error("{reason}")]
    Invalid {
        /// Why not.
        reason: String,
    },
    /// There is no such Sandbox, or not in the state the request needs.
    #[error("{id} {state}")]
    NotThere {
        /// The one asked for.
        id: SandboxId,
        /// What is with it.
        state: String,
    },
    /// Another Sandbox has the slot.
    #[error("slot {slot} is held by {holder}")]
    SlotTaken {
        /// The slot.
        slot: u16,
        /// Whose directory is there.
        holder: SandboxId,
    },
    /// A process of somebody else runs under a uid that is ours to lease.
    #[error("uid {uid} is in use by process {pid} ({name})")]
    UidInUse {
        /// The uid.
        uid: u32,
        /// The process.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// The file system of the jails has too little room.
    #[error("{needed_mib} MiB needed in {path}, {available_mib} MiB available")]
    NoSpace {
        /// For the scratch disk to be full once.
        needed_mib: u64,
        /// What an unprivileged writer could still use.
        available_mib: u64,
        /// Where.
        path: PathBuf,
    },
    /// A tree is not as the request needs it.
    #[error("tree {volume} {state}")]
    Volume {
        /// Which.
        volume: VolumeId,
        /// What is with it.
        state: VolumeState,
    },
    /// A program or file of the host that is needed is not there.
    #[error("{what} is missing: {hint}")]
    Missing {
        /// Which.
        what: String,
        /// What to do.
        hint: String,
    },
    /// The request was cancelled by a release.
    #[error("{id} was released meanwhile")]
    Released {
        /// The one released.
        id: SandboxId,
    },
    /// Cleaning up is not done: what is left is listed, the slot stays taken, a repeat is fine.
    #[error("{id} leaves behind: {}", left.join("; "))]
    Owed {
        /// The Sandbox.
        id: SandboxId,
        /// One sentence for each thing.
        left: Vec<String>,
    },
    /// A step failed.
    #[error("{step}: {reason}")]
    Step {
        /// What was tried.
        step: String,
        /// The whole chain of reasons.
        reason: String,
    },
}

/// What is with a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeState {
    /// There is none.
    Absent,
    /// There is one already.
    Present,
    /// A Sandbox uses it.
    InUse,
}

impl std::fmt::Display for VolumeState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            VolumeState::Absent => "is not there",
            VolumeState::Present => "is there already",
            VolumeState::InUse => "is in use",
        })
    }
}

/// Why a request has no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// It was refused or failed there.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The privileged side is gone: pepod must end.
    #[error("the privileged side is gone")]
    Lost,
    /// No answer in time; what it was about is unknown and must be released.
    #[error("no answer to {what} in {seconds} s")]
    Silent {
        /// The request.
        what: &'static str,
        /// The deadline that passed.
        seconds: u64,
    },
    /// More requests than it takes at once are waiting.
    #[error("too many requests wait for the privileged side")]
    Busy,
    /// It answered something else.
    #[error("the privileged side answered {what} with something else")]
    Confused {
        /// The request.
        what: &'static str,
    },
    /// The guest's device did not connect.
    #[error("cannot reach the guest of {id}")]
    Connect {
        /// Whose.
        id: SandboxId,
        /// Why.
        #[source]
        source: std::sync::Arc<std::io::Error>,
    },
    /// All slots are taken.
    #[error("all {0} slots are taken")]
    NoSlot(usize),
}

/// A Sandbox found on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// Which.
    pub id: SandboxId,
    /// Whether its keeper lives.
    pub state: FoundState,
    /// Seconds since its directory was made.
    pub age_seconds: u64,
}

/// How far a found Sandbox is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FoundState {
    /// Its keeper runs: it can be adopted.
    Running,
    /// Its keeper is gone and its evidence is there: release it, reading how it ended first.
    Ended,
    /// It never ran, or only parts of it are left: release it.
    Partial,
}

/// Something on the host that carries an instance's tag and belongs to no kept Sandbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Leftover {
    /// `directory`, `cgroup`, `process`, `mount` or `lease`.
    pub kind: String,
    /// Path, or process id and name.
    pub name: String,
    /// The instance's tag.
    pub tag: String,
    /// The instance's state directory, where known.
    pub owner: Option<PathBuf>,
    /// Seconds since it was made, where known.
    pub age_seconds: Option<u64>,
    /// Whether it is gone now (`None`: it was only looked at) and, if not, why.
    pub removed: Option<Result<(), String>>,
}

/// What a guest is told of its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The largest packet.
    pub mtu: u32,
}

/// What a Sandbox uses on the host, all its processes together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time since its start, in nanoseconds.
    pub cpu_ns: u64,
    /// Memory charged now, in bytes.
    pub memory_bytes: u64,
    /// The cap on it, in bytes.
    pub memory_limit_bytes: u64,
    /// Processes and threads.
    pub pids: u64,
    /// How often the host's kernel killed one of them for memory.
    pub oom_kills: u64,
    /// What the scratch disk takes on the host, in bytes.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Bytes that the VMM and the servers of its trees have read for the guest.
    #[serde(default)]
    pub read_bytes: u64,
    /// Bytes that they have written for it.
    #[serde(default)]
    pub write_bytes: u64,
}
