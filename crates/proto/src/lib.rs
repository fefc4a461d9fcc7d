//! The contract between a host and the guest agent: frames, messages, generations.
//!
//! Owns the codec and every byte layout; opens no socket and runs no task, so that both sides and the fuzzer share one
//! reading of the wire. Bytes from the other side are hostile: every length is bounded before anything is allocated, and
//! what does not parse is an [`Error`], never a panic.
//!
//! ```text
//! stream   one operation each; the host dials, names it with an OpId, and sends Request first
//! frame    u32 LE length of what follows | u8 kind | body <= 64 KiB
//! order    Request -> Accepted -> (Data | Eof | Gap | Event)* -> End       guest's side of the talk
//!                     (Data | Eof)*                                        host's side, after its Request
//! end      `End` is last; whoever receives it closes. A stream that ends without it means "unknown"
//! refusal  `End(Failed)` may come in place of Accepted: nothing was started
//! bytes    Read, TarOut and Dial send `Eof` on Out before `End(Done)`: bytes without it are not whole; every channel of
//!          an operation counts its offsets from 0 (also a Read that begins inside its file), an Attach from `from`
//! pace     a guest that is asked to tells what it took (`Event::Taken`), first before Accepted; the host then has at most
//!          WINDOW bytes under way
//! once     Started, Stat (of Read and Stat), Hello and Stats come once; Input comes first where an Attach has input
//! ```

#![forbid(unsafe_code)]

mod frame;
pub mod measure;
mod message;
mod op;

pub use frame::{Channel, Error, Frame, Frames, HEADER, MAX_BODY, MAX_DATA, data_head};
pub use message::{
    Activate, Attach, Cancel, Cause, Clock, Dial, EntryKind, Event, Exec, Failure, FailureCode, FileStat, Hello,
    HelloReply, Keep, Leave, Limits, List, Make, MakeKind, Network, OpState, OpSummary, Operation, Outcome, Process,
    PtySize, Read, Ready, Remove, Rename, Request, Resize, Share, Signal, Stat, Stats, TarIn, TarOut, Variable, Watch,
    WatchKind, Write,
};
pub use op::OpId;

/// The vsock port on which the guest agent listens.
pub const AGENT_PORT: u32 = 1024;

/// The generation this release speaks. A host speaks this one and the one before it, a guest one.
pub const GENERATION: u32 = 1;

/// The oldest generation a host of this release speaks.
pub const OLDEST_GENERATION: u32 = 1;

/// Streams a Sandbox may have at once (Firecracker's vsock ends at 1,023; measured room for both directions).
pub const MAX_STREAMS: usize = 512;

/// Of [`MAX_STREAMS`], those kept for operations that must pass while data is stuck: see [`Operation::is_urgent`].
pub const URGENT_STREAMS: usize = 16;

/// Bytes that a host has under way to a guest on a paced stream, at most: sent, and not told as taken.
///
/// Below the 256 KiB that a guest's kernel gives a stream (`VSOCK_DEFAULT_BUFFER_SIZE` in `net/vmw_vsock/af_vsock.c`). A
/// stream device that runs out of that credit asks for more without a pause until there is some (measured:
/// vhost-device-vsock 0.3.0, 1,900 questions a second, both processors busy), and asks for ever where a program reads none.
pub const WINDOW: u64 = 192 << 10;

/// Bytes after which a guest tells what it took.
pub const TELL: u64 = 64 << 10;

/// Lines the guest's first process prints on its console, each at the beginning of a line. A guest can print them at any
/// time, so they hint and decide nothing: when to dial first, and which cause to name.
pub mod console {
    /// The agent listens. A host dials after this: a stream device that is dialled while its guest sets it up can break.
    pub const READY: &str = "pepo-guest: ready";
    /// The agent has died; how follows.
    pub const AGENT_DIED: &str = "pepo-guest: the agent died:";
    /// There can be no agent; why follows.
    pub const BOOT_FAILED: &str = "pepo-guest: the guest cannot start:";
}

/// How long a command whose stream was lost waits for an Attach before it is killed, in seconds.
pub const LEASE_SECONDS: u64 = 30;
