//! Messages: what the host may ask, what the guest reports, how an operation ends.
//!
//! Fields and variants are numbered; numbers are only added (as `Option` or a new variant) and never used again, and
//! `wire/generation-1.txt` lists them for the test that compares. Paths in requests are UTF-8 as they are on the HTTP
//! side; names that a guest's file system reports are bytes.

use minicbor::{Decode, Encode};

use crate::op::OpId;

/// The first message of a stream.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Request {
    /// The operation's name. The same name again never starts a second run.
    #[n(0)]
    pub op: OpId,
    /// What is asked.
    #[n(1)]
    pub operation: Operation,
    /// Whether the host wants to be told what is taken of this stream ([`Event::Taken`]).
    #[n(2)]
    pub paced: Option<bool>,
}

/// What the host may ask of the guest, one per stream.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum Operation {
    /// Who are you; answered by [`Event::Hello`].
    #[n(0)]
    Hello(#[n(0)] Hello),
    /// Become this Sandbox: once in a guest's life.
    #[n(1)]
    Activate(#[n(0)] Activate),
    /// Run a program.
    #[n(2)]
    Exec(#[n(0)] Exec),
    /// Join the streams of a running or ended Exec.
    #[n(3)]
    Attach(#[n(0)] Attach),
    /// Send a signal to an Exec.
    #[n(4)]
    Signal(#[n(0)] Signal),
    /// Set the size of an Exec's terminal.
    #[n(5)]
    Resize(#[n(0)] Resize),
    /// End an operation; for an Exec, kill its tree. Answered when it has ended. Attachments are left by Leave.
    #[n(6)]
    Cancel(#[n(0)] Cancel),
    /// Which operations there are; answered by [`Event::Ops`].
    #[n(7)]
    Ops,
    /// Are you there.
    #[n(8)]
    Ping,
    /// Send a file's bytes on [`crate::Channel::Out`], after its [`Event::Stat`].
    #[n(9)]
    Read(#[n(0)] Read),
    /// Take a file's bytes from [`crate::Channel::In`] up to its `Eof`.
    #[n(10)]
    Write(#[n(0)] Write),
    /// A directory's entries, as [`Event::Entries`].
    #[n(11)]
    List(#[n(0)] List),
    /// One entry, as [`Event::Stat`].
    #[n(12)]
    Stat(#[n(0)] Stat),
    /// Make a directory or a link.
    #[n(13)]
    Make(#[n(0)] Make),
    /// Rename, replacing what is there.
    #[n(14)]
    Rename(#[n(0)] Rename),
    /// Remove an entry.
    #[n(15)]
    Remove(#[n(0)] Remove),
    /// Report changes as [`Event::Change`] until cancelled.
    #[n(16)]
    Watch(#[n(0)] Watch),
    /// Send a tree as a tar archive on [`crate::Channel::Out`].
    #[n(17)]
    TarOut(#[n(0)] TarOut),
    /// Unpack a tar archive from [`crate::Channel::In`].
    #[n(18)]
    TarIn(#[n(0)] TarIn),
    /// Connect to a TCP port on the guest's loopback and pass bytes both ways, each way ended by its `Eof`. Accepted
    /// once the connection stands, so that whoever dials learns of a refusal first.
    #[n(19)]
    Dial(#[n(0)] Dial),
    /// What the guest uses; answered by [`Event::Stats`].
    #[n(20)]
    Stats,
    /// Flush all file systems.
    #[n(21)]
    Sync,
    /// End all programs, flush, unmount, power off. Answered before the power goes.
    #[n(22)]
    Shutdown,
    /// Close the streams opened under a name, and do nothing else.
    #[n(23)]
    Leave(#[n(0)] Leave),
    /// Mount a tree of the host's. After [`crate::Frame::Accepted`] the stream is no stream of frames any more: it carries
    /// FUSE's own messages both ways, the first one from the host, until the guest unmounts or either side goes.
    #[n(24)]
    Share(#[n(0)] Share),
    /// Keep some paths in a mounted tree: each is made there where it is not, and bound over its place.
    #[n(25)]
    Keep(#[n(0)] Keep),
    /// Do now what Activate and the first command would wait for; answered when it is done.
    #[n(26)]
    Ready(#[n(0)] Ready),
    /// Change the wall clock, and say what it says; answered by [`Event::Clock`].
    #[n(27)]
    Clock(#[n(0)] Clock),
}

impl Operation {
    /// Whether the host sends more than its Request: such streams are paced.
    pub fn takes_input(&self) -> bool {
        match self {
            Operation::Exec(exec) => exec.stdin || exec.pty.is_some(),
            Operation::Attach(attach) => attach.input,
            Operation::Write(_) | Operation::TarIn(_) | Operation::Dial(_) => true,
            _ => false,
        }
    }

    /// Whether it must pass while data is stuck: such operations may use the streams kept for them.
    pub fn is_urgent(&self) -> bool {
        matches!(
            self,
            Operation::Hello(_)
                | Operation::Attach(_)
                | Operation::Signal(_)
                | Operation::Resize(_)
                | Operation::Cancel(_)
                | Operation::Leave(_)
                | Operation::Ops
                | Operation::Ping
                | Operation::Sync
                | Operation::Shutdown
        )
    }
}

/// The host introduces itself.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Hello {
    /// The oldest generation the host speaks.
    #[n(0)]
    pub oldest: u32,
    /// The newest generation the host speaks.
    #[n(1)]
    pub newest: u32,
    /// Optional features the host knows, one bit each; none is defined yet.
    #[n(2)]
    pub features: u64,
}

/// What a guest that waits for its Activate may do ahead of it.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Ready {
    /// The network that Activate will name, perhaps with another [`Network::mtu`].
    #[n(0)]
    pub network: Option<Network>,
}

/// The guest's answer to [`Hello`].
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct HelloReply {
    /// The generation the guest speaks, and both will.
    #[n(0)]
    pub generation: u32,
    /// Optional features the guest knows.
    #[n(1)]
    pub features: u64,
    /// Which build of the agent this is, for tests and for `version`.
    #[n(2)]
    pub build: String,
    /// The guest kernel's release.
    #[n(3)]
    pub kernel: String,
    /// Milliseconds from the guest kernel's start to the agent's first listen.
    #[n(4)]
    pub boot_ms: u64,
    /// Whether Activate has been done.
    #[n(5)]
    pub activated: bool,
}

/// A name and its value in an environment.
#[derive(Clone, PartialEq, Encode, Decode)]
pub struct Variable {
    /// Not empty, no `=`, no NUL.
    #[n(0)]
    pub name: String,
    /// No NUL.
    #[n(1)]
    pub value: String,
}

impl std::fmt::Debug for Variable {
    /// Values may be secret: only the name is shown.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}=…", self.name)
    }
}

/// What turns a fresh guest into this Sandbox.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Activate {
    /// A DNS label.
    #[n(0)]
    pub hostname: String,
    /// The environment that every command gets.
    #[n(1)]
    pub env: Vec<Variable>,
    /// The host's wall clock, in nanoseconds since 1970 UTC.
    #[n(2)]
    pub clock_unix_ns: u64,
    /// Fresh bytes for the guest's random generator, at most 512.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub entropy: Vec<u8>,
    /// The network; without one the guest has its loopback alone.
    #[n(4)]
    pub network: Option<Network>,
}

/// How a guest reaches the network through its one interface. Addresses are IPv4, as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Network {
    /// The guest's address.
    #[n(0)]
    pub address: u32,
    /// How many bits of it name the network, at most 32.
    #[n(1)]
    pub prefix: u8,
    /// The next hop, which is also the only resolver.
    #[n(2)]
    pub gateway: u32,
    /// Its hardware address, in the lower 48 bits. Nobody answers who asks for it.
    #[n(3)]
    pub gateway_mac: u64,
    /// The largest packet.
    #[n(4)]
    pub mtu: u32,
}

/// A terminal's size in character cells, each 1..=1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PtySize {
    /// Columns.
    #[n(0)]
    pub cols: u16,
    /// Rows.
    #[n(1)]
    pub rows: u16,
}

/// A program to run.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Exec {
    /// Program and arguments, passed on untouched; the program is looked up in `PATH` of the final environment.
    /// With `shell`, one element: the line to evaluate.
    #[n(0)]
    pub argv: Vec<String>,
    /// Added to the Sandbox's environment for this command.
    #[n(1)]
    pub env: Vec<Variable>,
    /// The working directory; the user's home where absent. In a shell: changed to first.
    #[n(2)]
    pub cwd: Option<String>,
    /// A name or `uid[:gid]`; the default user where absent.
    #[n(3)]
    pub user: Option<String>,
    /// Whether standard input is fed from [`crate::Channel::In`]; otherwise it is `/dev/null`.
    #[n(4)]
    pub stdin: bool,
    /// A terminal of this size as stdin, stdout and stderr in one.
    #[n(5)]
    pub pty: Option<PtySize>,
    /// Kill the tree after so many milliseconds; 0 is never.
    #[n(6)]
    pub timeout_ms: u64,
    /// Whether it goes on when its stream is lost beyond the lease.
    #[n(7)]
    pub detached: bool,
    /// Evaluate in the lasting bash of this name.
    #[n(8)]
    pub shell: Option<String>,
    /// What all its processes may have together. One that cannot be kept is a failure.
    #[n(9)]
    pub limits: Option<Limits>,
}

impl Exec {
    /// A program and its arguments, and nothing else said: as the default user, without input, for as long as it takes.
    pub fn new<A: Into<String>>(argv: impl IntoIterator<Item = A>) -> Self {
        Exec {
            argv: argv.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            cwd: None,
            user: None,
            stdin: false,
            pty: None,
            timeout_ms: 0,
            detached: false,
            shell: None,
            limits: None,
        }
    }
}

/// What the processes of an Exec may have together; what is absent is not limited beyond the guest's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct Limits {
    /// Memory, in bytes: past it the kernel kills in the Exec, which ends by [`Cause::OutOfMemory`].
    #[n(0)]
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    #[n(1)]
    pub pids: Option<u64>,
    /// Processor time, in microseconds for each 100 ms.
    #[n(2)]
    pub cpu_us: Option<u64>,
}

/// Joining an Exec's streams. Any attached reader holds the program back when it reads slowly.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Attach {
    /// The Exec.
    #[n(0)]
    pub target: OpId,
    /// Replay output from this offset on, then follow; absent: no output wanted, and the attachment ends
    /// with its input's `Eof`.
    #[n(1)]
    pub from: Option<u64>,
    /// Whether this side will send input. The guest answers with [`Event::Input`] first.
    #[n(2)]
    pub input: bool,
    /// With `true`, `Eof` on [`crate::Channel::In`] ends only this side's sending; with `false` the program's input.
    #[n(3)]
    pub keep_input: bool,
    /// With `true`, every other stream of the target is closed first: their host is gone (a daemon that restarted), and
    /// a stream that nobody reads any more would hold the program back.
    #[n(4)]
    pub sole: Option<bool>,
}

/// A signal for an Exec.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Signal {
    /// The Exec.
    #[n(0)]
    pub target: OpId,
    /// Its number on Linux x86-64, 1..=64.
    #[n(1)]
    pub signal: i32,
    /// Every process of the command, not only the first.
    #[n(2)]
    pub tree: bool,
}

/// A new terminal size for an Exec.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Resize {
    /// The Exec.
    #[n(0)]
    pub target: OpId,
    /// The size.
    #[n(1)]
    pub size: PtySize,
}

/// The end of another operation.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Cancel {
    /// Which one.
    #[n(0)]
    pub target: OpId,
}

/// Streams of an Exec or an Attach that nobody reads any more. The guest does not see that the host has closed one while
/// data is stuck in it, and a reader that stands still holds the program back: so it is said aloud.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Leave {
    /// The name their Request had. The program goes on, under its lease where no other stream is left.
    #[n(0)]
    pub stream: OpId,
}

/// A tree of the host's to mount.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Share {
    /// Where: absolute, made where missing.
    #[n(0)]
    pub path: String,
    /// Whether nothing may be changed there.
    #[n(1)]
    pub read_only: bool,
}

/// Paths to keep in a mounted tree.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Keep {
    /// The directory, in the tree, that keeps them; made where missing.
    #[n(0)]
    pub top: String,
    /// Each absolute, or under the user's home as `~/...`.
    #[n(1)]
    pub paths: Vec<String>,
    /// Whose they are; the default user where absent.
    #[n(2)]
    pub user: Option<String>,
}

/// A file's bytes, guest to host.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Read {
    /// Absolute, or under the user's home.
    #[n(0)]
    pub path: String,
    /// First byte wanted.
    #[n(1)]
    pub offset: u64,
    /// How many at the most; absent: to the end.
    #[n(2)]
    pub length: Option<u64>,
    /// As whom; the default user where absent.
    #[n(3)]
    pub user: Option<String>,
}

/// A file's bytes, host to guest. The file appears whole (a new file renamed over the old) or not at all.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Write {
    /// Absolute, or under the user's home.
    #[n(0)]
    pub path: String,
    /// Permission bits; absent: those of the file it replaces, else 0644.
    #[n(1)]
    pub mode: Option<u32>,
    /// Whether missing parent directories are made.
    #[n(2)]
    pub parents: bool,
    /// As whom; the default user where absent.
    #[n(3)]
    pub user: Option<String>,
}

/// A directory to list.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct List {
    /// Absolute, or under the user's home.
    #[n(0)]
    pub path: String,
    /// As whom; the default user where absent.
    #[n(1)]
    pub user: Option<String>,
}

/// An entry to look at; the last component is not followed.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Stat {
    /// Absolute, or under the user's home.
    #[n(0)]
    pub path: String,
    /// As whom; the default user where absent.
    #[n(1)]
    pub user: Option<String>,
}

/// An entry to make.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Make {
    /// Absolute, or under the user's home.
    #[n(0)]
    pub path: String,
    /// What it shall be.
    #[n(1)]
    pub kind: MakeKind,
    /// Permission bits of a directory; absent: 0755.
    #[n(2)]
    pub mode: Option<u32>,
    /// Whether missing parents are made and an existing directory is fine.
    #[n(3)]
    pub parents: bool,
    /// As whom; the default user where absent.
    #[n(4)]
    pub user: Option<String>,
}

/// What [`Make`] makes.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum MakeKind {
    /// A directory.
    #[n(0)]
    Directory,
    /// A symbolic link to this target.
    #[n(1)]
    Symlink(#[n(0)] String),
}

/// A new name for an entry.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Rename {
    /// The entry.
    #[n(0)]
    pub from: String,
    /// Its new path.
    #[n(1)]
    pub to: String,
    /// As whom; the default user where absent.
    #[n(2)]
    pub user: Option<String>,
}

/// An entry to remove.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Remove {
    /// Absolute, or under the user's home.
    #[n(0)]
    pub path: String,
    /// Whether a directory goes with what is in it. Links are never followed.
    #[n(1)]
    pub recursive: bool,
    /// As whom; the default user where absent.
    #[n(2)]
    pub user: Option<String>,
}

/// A file or directory whose changes are reported.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Watch {
    /// Absolute, or under the user's home.
    #[n(0)]
    pub path: String,
    /// Whether directories below are watched too.
    #[n(1)]
    pub recursive: bool,
    /// As whom; the default user where absent.
    #[n(2)]
    pub user: Option<String>,
}

/// A tree to send as a tar archive: a directory's contents with names relative to it, or a single file under its own name.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct TarOut {
    /// Absolute, or under the user's home.
    #[n(0)]
    pub path: String,
    /// As whom; the default user where absent.
    #[n(1)]
    pub user: Option<String>,
}

/// A tar archive to unpack into a directory, which is made where missing. Nothing is written outside of it.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct TarIn {
    /// Absolute, or under the user's home.
    #[n(0)]
    pub path: String,
    /// Who will own what is unpacked, and with whose rights; the default user where absent.
    #[n(1)]
    pub user: Option<String>,
}

/// A TCP port on the guest's loopback.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Dial {
    /// 1..=65535.
    #[n(0)]
    pub port: u16,
}

/// What an operation reports while it runs.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum Event {
    /// Answers Hello.
    #[n(0)]
    Hello(#[n(0)] HelloReply),
    /// The program of an Exec runs.
    #[n(1)]
    Started {
        /// Its process id in the guest.
        #[n(0)]
        pid: u32,
    },
    /// Where the program's input stands: the next offset wanted, and whether it still takes any. Bytes before it are
    /// ignored (a resend), bytes after it end the stream with [`FailureCode::Invalid`].
    #[n(2)]
    Input {
        /// The next offset wanted.
        #[n(0)]
        next: u64,
        /// Whether more is taken.
        #[n(1)]
        open: bool,
    },
    /// One entry.
    #[n(3)]
    Stat(#[n(0)] FileStat),
    /// Some of a directory's entries, in no order; as many events as needed.
    #[n(4)]
    Entries(#[n(0)] Vec<FileStat>),
    /// Some of the operations there are; as many events as needed.
    #[n(5)]
    Ops(#[n(0)] Vec<OpSummary>),
    /// Answers Stats.
    #[n(6)]
    Stats(#[n(0)] Stats),
    /// Something under a watched path changed.
    #[n(7)]
    Change {
        /// How.
        #[n(0)]
        kind: WatchKind,
        /// Relative to the watched path; empty for the path itself.
        #[cbor(n(1), with = "minicbor::bytes")]
        path: Vec<u8>,
    },
    /// How much of this stream the guest has taken, where the Request asked for that: before Accepted, so that a host
    /// knows that it will be told, and then after [`crate::TELL`] bytes each.
    #[n(8)]
    Taken {
        /// Bytes from the stream's first one on, heads of frames included.
        #[n(0)]
        bytes: u64,
    },
    /// Answers Clock.
    #[n(9)]
    Clock {
        /// The guest's wall clock, in nanoseconds since 1970 UTC.
        #[n(0)]
        unix_ns: u64,
    },
}

/// How a watched entry changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum WatchKind {
    /// It appeared.
    #[n(0)]
    Created,
    /// Its bytes changed.
    #[n(1)]
    Modified,
    /// Its mode, owner, times or attributes changed.
    #[n(2)]
    Attributes,
    /// It went away.
    #[n(3)]
    Removed,
    /// Changes were lost: look again.
    #[n(4)]
    Overflow,
}

/// What an entry of a file system is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum EntryKind {
    /// A regular file.
    #[n(0)]
    File,
    /// A directory.
    #[n(1)]
    Directory,
    /// A symbolic link.
    #[n(2)]
    Symlink,
    /// A pipe, socket or device.
    #[n(3)]
    Other,
}

/// One entry of a file system.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct FileStat {
    /// The last component of its path.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub name: Vec<u8>,
    /// What it is.
    #[n(1)]
    pub kind: EntryKind,
    /// Bytes.
    #[n(2)]
    pub size: u64,
    /// Permission bits with setuid, setgid and sticky: 0..=0o7777.
    #[n(3)]
    pub mode: u32,
    /// Owner.
    #[n(4)]
    pub uid: u32,
    /// Group.
    #[n(5)]
    pub gid: u32,
    /// Last change of its bytes, in nanoseconds since 1970 UTC.
    #[n(6)]
    pub modified_unix_ns: i64,
    /// Where a symbolic link points.
    #[cbor(n(7), with = "minicbor::bytes")]
    pub target: Option<minicbor::bytes::ByteVec>,
}

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum OpState {
    /// It runs and someone is attached.
    #[n(0)]
    Attached,
    /// It runs and nobody is attached: a lease counts unless it is detached.
    #[n(1)]
    Unattended,
    /// It ended; its output is still kept.
    #[n(2)]
    Ended,
}

/// One Exec of this guest.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct OpSummary {
    /// Its name.
    #[n(0)]
    pub op: OpId,
    /// How far it is.
    #[n(1)]
    pub state: OpState,
    /// Whether it outlives a lost stream.
    #[n(2)]
    pub detached: bool,
    /// The oldest output offset still kept.
    #[n(3)]
    pub kept_from: u64,
    /// The next output offset.
    #[n(4)]
    pub next: u64,
    /// How it ended, where it did.
    #[n(5)]
    pub outcome: Option<Outcome>,
}

/// How the guest's wall clock is to be changed. One that a program of the guest has set stays as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Clock {
    /// Nanoseconds to add.
    #[n(0)]
    pub add_ns: i64,
}

/// What the guest uses, by its own account.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Stats {
    /// Milliseconds since the guest kernel started.
    #[n(0)]
    pub uptime_ms: u64,
    /// Processor time used by all programs, in milliseconds.
    #[n(1)]
    pub cpu_ms: u64,
    /// Bytes of memory the guest kernel has.
    #[n(2)]
    pub memory_bytes: u64,
    /// Bytes of it that could be given out without swapping.
    #[n(3)]
    pub memory_available_bytes: u64,
    /// Bytes of the scratch disk's file system.
    #[n(4)]
    pub disk_bytes: u64,
    /// Bytes of it in use.
    #[n(5)]
    pub disk_used_bytes: u64,
    /// Processes.
    #[n(6)]
    pub processes: u32,
    /// Commands that run.
    #[n(7)]
    pub commands: u32,
}

/// How an operation ended.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum Outcome {
    /// It did what was asked.
    #[n(0)]
    Done,
    /// An Exec's program ended (or an Attach to it saw it end).
    #[n(1)]
    Process(#[n(0)] Process),
    /// It did not.
    #[n(2)]
    Failed(#[n(0)] Failure),
}

/// Why a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Cause {
    /// By itself, with a code.
    #[n(0)]
    Exit,
    /// By a signal that Pepo did not send.
    #[n(1)]
    Signal,
    /// Its time was over.
    #[n(2)]
    Timeout,
    /// Cancel, or a lease that ran out.
    #[n(3)]
    Killed,
    /// The guest kernel killed it (or a process of its tree) for memory.
    #[n(4)]
    OutOfMemory,
}

/// The end of a program.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Process {
    /// Why.
    #[n(0)]
    pub cause: Cause,
    /// Its exit code, where it had one.
    #[n(1)]
    pub code: Option<i32>,
    /// The signal that ended it, where one did.
    #[n(2)]
    pub signal: Option<i32>,
    /// Bytes it wrote to standard output, kept or not.
    #[n(3)]
    pub stdout_bytes: u64,
    /// Bytes it wrote to standard error, kept or not.
    #[n(4)]
    pub stderr_bytes: u64,
    /// Milliseconds from start to end.
    #[n(5)]
    pub elapsed_ms: u64,
    /// In a shell: the working directory afterwards.
    #[n(6)]
    pub cwd: Option<String>,
}

/// An operation that did not do what was asked.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Failure {
    /// The kind.
    #[n(0)]
    pub code: FailureCode,
    /// One sentence, lower case. A guest can write anything here: escape before showing.
    #[n(1)]
    pub message: String,
}

/// Kinds of failure, each one something a caller decides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum FailureCode {
    /// The request itself is not valid.
    #[n(0)]
    Invalid,
    /// No such file, directory or user.
    #[n(1)]
    NotFound,
    /// Not permitted to that user.
    #[n(2)]
    Denied,
    /// It exists already.
    #[n(3)]
    Exists,
    /// A component is not a directory.
    #[n(4)]
    NotDirectory,
    /// It is a directory.
    #[n(5)]
    IsDirectory,
    /// The directory is not empty.
    #[n(6)]
    NotEmpty,
    /// The disk, its inodes or a quota are full.
    #[n(7)]
    NoSpace,
    /// The program is not there (a shell's 127).
    #[n(8)]
    ProgramNotFound,
    /// The program cannot be executed (a shell's 126).
    #[n(9)]
    ProgramNotExecutable,
    /// No operation of that name, or its output is no longer kept.
    #[n(10)]
    UnknownOp,
    /// The operation was cancelled.
    #[n(11)]
    Cancelled,
    /// The lasting shell of that name died, or had to be ended.
    #[n(12)]
    ShellLost,
    /// Streams, commands or memory for them are used up.
    #[n(13)]
    Busy,
    /// Nothing listens on that port.
    #[n(14)]
    Refused,
    /// The generations do not meet.
    #[n(15)]
    Generation,
    /// Not in this state (Activate twice, Exec before Activate).
    #[n(16)]
    State,
    /// Anything else the guest's kernel said.
    #[n(17)]
    Io,
}
