//! The loop of a share server: requests of a guest's kernel off the stream, answers onto it.
//!
//! Every byte that comes was chosen by a guest. A message that is no message ends the server, and with it the Sandbox: a
//! guest can only ever break its own mount. A few threads take turns at the stream, so that a flush holds up nobody else.
//!
//! ```text
//! stream ─▶ one message (a thread at a time) ─▶ tree, on that thread ─▶ answer (a thread at a time) ─▶ stream
//!                  locks that must wait ─▶ tried again by the timer ─▶ answer
//!                  nothing heard for a while ─▶ the timer asks ─▶ nothing for a long while ─▶ end
//! ```
//! Messages are FUSE's own, each with its length first. What is ours: an answer to request 0 of 16 bytes with error 0 asks
//! whether anybody is there, a request of 40 bytes with operation [`HERE`] says so. The first such question tells the
//! guest to begin. A request numbered 0 is one that the guest's agent has answered itself: it is done, and nobody is told.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fuse_backend_rs::api::server::Server;
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader};

use super::bucket::{Bucket, Cost};
use super::locks::{Holder, Waiter, Wanted};
use super::tree::{self, Tree};
use crate::sys::RangeLock;

/// Threads that serve.
pub(super) const WORKERS: usize = 4;

/// Bytes before a request's own: length, operation, number, node, ids.
const REQUEST_HEAD: usize = 40;

/// Bytes before an answer's own: length, error, number.
const ANSWER_HEAD: usize = 16;

/// Bytes of a notice about a file's attributes.
const NOTICE: usize = ANSWER_HEAD + 24;

/// The longest message either way: what a FUSE kernel ends at.
pub(super) const MESSAGE: usize = (1 << 20) + 4096;

/// The operation of the answer to "are you there".
pub const HERE: u32 = u32::MAX;

/// The number of a request that was answered where it came from.
const ANSWERED: u64 = 0;

/// How long a guest is waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// How often it is asked whether anybody is there, where nothing is heard.
    pub ask: Duration,
    /// How long nothing may be heard.
    pub silence: Duration,
}

/// What a guest is given. One in software emulation on a busy machine was seen to stand still for ten seconds.
pub(super) const PATIENCE: Patience = Patience { ask: Duration::from_secs(5), silence: Duration::from_secs(60) };

/// Between two tries for a lock that is another's.
const RETRY: Duration = Duration::from_millis(10);

/// How long a guest may leave an answer lying.
const UNREAD: Duration = Duration::from_secs(60);

/// Operations of which this module knows more than their number.
mod operation {
    pub const FORGET: u32 = 2;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const FSYNC: u32 = 20;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const READDIR: u32 = 28;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
    pub const READDIRPLUS: u32 = 44;
}

/// The notice by which a guest's kernel forgets a file's attributes.
const INVALID_INODE: i32 = 2;

/// Why a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The stream is closed.
    Closed,
    /// The guest sent what is no message, or left answers lying.
    Broken,
    /// Nothing was heard for too long.
    Silent,
    /// A fault of ours.
    Fault,
}

impl End {
    /// The process' exit code.
    pub fn code(self) -> u8 {
        match self {
            End::Closed => 0,
            End::Broken => 2,
            End::Silent => 3,
            End::Fault => 4,
        }
    }
}

/// What the threads share.
struct Serving {
    tree: Arc<Tree>,
    server: Server<Arc<Tree>>,
    /// What its guest may use in a second; `None`: no limit.
    bucket: Option<Bucket>,
    /// Where the library writes what we send ourselves.
    null: OwnedFd,
    incoming: Mutex<Incoming>,
    outgoing: Mutex<UnixStream>,
    begun: Instant,
    patience: Patience,
    heard_ms: AtomicU64,
    /// Threads that serve a request now, and so listen to nobody.
    busy: AtomicUsize,
    wake: SyncSender<()>,
    over: SyncSender<End>,
}

/// The reading side: what was read and not taken yet.
struct Incoming {
    stream: UnixStream,
    buffer: Vec<u8>,
    from: usize,
    to: usize,
}

impl Incoming {
    fn fill(&mut self, wanted: usize) -> io::Result<bool> {
        while self.to - self.from < wanted {
            if self.from > 0 {
                self.buffer.copy_within(self.from..self.to, 0);
                (self.from, self.to) = (0, self.to - self.from);
            }
            match self.stream.read(&mut self.buffer[self.to..]) {
                Ok(0) => return Ok(false),
                Ok(read) => self.to += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// The next message, whole; `false` at the stream's end.
    fn next(&mut self, into: &mut Vec<u8>) -> io::Result<bool> {
        if !self.fill(4)? {
            return Ok(false);
        }
        let head = &self.buffer[self.from..self.from + 4];
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        if !(REQUEST_HEAD..=MESSAGE).contains(&length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        into.clear();
        let there = (self.to - self.from).min(length);
        into.extend_from_slice(&self.buffer[self.from..self.from + there]);
        self.from += there;
        if there < length {
            into.resize(length, 0);
            // The rest of a long one goes where it is wanted.
            self.stream.read_exact(&mut into[there..])?;
        }
        Ok(true)
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    match bytes.get(at..at + 4) {
        Some(found) => word.copy_from_slice(found),
        None => return 0,
    }
    u32::from_le_bytes(word)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// An answer without a body.
fn answer(error: i32, unique: u64) -> [u8; ANSWER_HEAD] {
    let mut answer = [0; ANSWER_HEAD];
    answer[..4].copy_from_slice(&(ANSWER_HEAD as u32).to_le_bytes());
    answer[4..8].copy_from_slice(&error.to_le_bytes());
    answer[8..].copy_from_slice(&unique.to_le_bytes());
    answer
}

/// Tells a guest's kernel that it knows a file's attributes no more.
fn notice(node: u64) -> [u8; NOTICE] {
    let mut notice = [0; NOTICE];
    notice[..4].copy_from_slice(&(NOTICE as u32).to_le_bytes());
    notice[4..8].copy_from_slice(&INVALID_INODE.to_le_bytes());
    notice[16..24].copy_from_slice(&node.to_le_bytes());
    // No range: the attributes alone, which waits for nobody.
    notice[24..32].copy_from_slice(&(-1_i64).to_le_bytes());
    notice
}

/// A tree being served on a stream; [`Running::end`] waits for its end.
pub(super) struct Running {
    over: Receiver<End>,
}

impl Running {
    /// Starts the threads, lets `lock_down` take away what they need no more once they run, and only then lets them look at
    /// the stream.
    pub fn begin(
        tree: Tree,
        stream: OwnedFd,
        null: OwnedFd,
        bucket: Option<Bucket>,
        patience: Patience,
        lock_down: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<Self> {
        let stream = UnixStream::from(stream);
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(UNREAD))?;
        let tree = Arc::new(tree);
        let (wake, woken) = sync_channel(1);
        let (over, ended) = sync_channel(WORKERS + 1);
        // A thread's own start makes calls that it makes never again.
        let started = Arc::new(Barrier::new(WORKERS + 2));
        let go = Arc::new(Barrier::new(WORKERS + 2));
        let incoming = Incoming { stream: stream.try_clone()?, buffer: vec![0; 128 << 10], from: 0, to: 0 };
        let serving = Arc::new(Serving {
            server: Server::new(tree.clone()),
            tree,
            bucket,
            null,
            incoming: Mutex::new(incoming),
            outgoing: Mutex::new(stream),
            begun: Instant::now(),
            patience,
            heard_ms: AtomicU64::new(0),
            busy: AtomicUsize::new(0),
            wake,
            over,
        });
        for number in 0..WORKERS {
            let (serving, started, go) = (serving.clone(), started.clone(), go.clone());
            let name = format!("serve-{number}");
            std::thread::Builder::new().name(name).stack_size(256 << 10).spawn(move || {
                started.wait();
                go.wait();
                serving.thread(|serving| serving.work());
            })?;
        }
        let (timer, timer_started, timer_go) = (serving, started.clone(), go.clone());
        std::thread::Builder::new().name("timer".to_owned()).stack_size(128 << 10).spawn(move || {
            timer_started.wait();
            timer_go.wait();
            timer.thread(|serving| serving.time(&woken));
        })?;
        started.wait();
        lock_down()?;
        go.wait();
        Ok(Running { over: ended })
    }

    /// Waits for the end.
    pub fn end(self) -> End {
        self.over.recv().unwrap_or(End::Fault)
    }
}

impl Serving {
    /// Runs a thread's life. A panic is a fault of ours and the end, as every other end is.
    fn thread(&self, life: impl FnOnce(&Self) -> End) {
        let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| life(self))).unwrap_or(End::Fault);
        // The first one decides; nobody reads the others.
        let _ = self.over.try_send(end);
    }

    fn work(&self) -> End {
        let mut request = Vec::new();
        let mut reply = vec![0; MESSAGE];
        loop {
            let next = self.incoming.lock().unwrap_or_else(PoisonError::into_inner).next(&mut request);
            match next {
                Ok(true) => {}
                Ok(false) => return End::Closed,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => return End::Broken,
                Err(_) => return End::Closed,
            }
            self.heard();
            self.busy.fetch_add(1, Ordering::Relaxed);
            let answered = long(&request, 8) == ANSWERED;
            let length = self.serve(&mut request, &mut reply);
            // Told before the answer is: whoever asked looks at the file next.
            let told = tree::changed().is_none_or(|node| self.send(&notice(node)).is_ok());
            let sent = told && (length == 0 || answered || self.send(&reply[..length]).is_ok());
            self.busy.fetch_sub(1, Ordering::Relaxed);
            if !sent {
                return End::Broken;
            }
            // What a long message took is not kept for the many short ones.
            request.shrink_to(128 << 10);
        }
    }

    fn heard(&self) {
        self.heard_ms.store(self.begun.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
        io::Write::write_all(&mut *stream, bytes)
    }

    /// One request; how many bytes of `reply` are its answer. 0: it has none, or none yet.
    fn serve(&self, request: &mut [u8], reply: &mut [u8]) -> usize {
        let (kind, unique) = (word(request, 4), long(request, 8));
        let put = |reply: &mut [u8], error: i32| {
            reply[..ANSWER_HEAD].copy_from_slice(&answer(-error, unique));
            ANSWER_HEAD
        };
        if let Some(bucket) = &self.bucket {
            let wait = bucket.take(self.begun.elapsed(), cost(kind, request));
            if !wait.is_zero() {
                std::thread::sleep(wait);
            }
        }
        match kind {
            HERE => return 0,
            operation::INTERRUPT => {
                let target = long(request, REQUEST_HEAD);
                if !self.tree.locks.interrupt(target) {
                    return 0;
                }
                reply[..ANSWER_HEAD].copy_from_slice(&answer(-libc::EINTR, target));
                return ANSWER_HEAD;
            }
            operation::GETLK | operation::SETLK | operation::SETLKW => return self.lock(kind, request, reply),
            // The library makes room for as much as is asked for.
            operation::GETXATTR | operation::LISTXATTR => {
                let at = REQUEST_HEAD;
                if request.len() < at + 8 {
                    return put(reply, libc::EINVAL);
                }
                let size = word(request, at).min(64 << 10);
                request[at..at + 4].copy_from_slice(&size.to_le_bytes());
            }
            operation::READ | operation::READDIR | operation::READDIRPLUS
                if word(request, REQUEST_HEAD + 16) as usize > MESSAGE - 4096 =>
            {
                return put(reply, libc::EINVAL);
            }
            _ => {}
        }
        reply[..ANSWER_HEAD].fill(0);
        let handled = (|| {
            let reader = Reader::<()>::from_fuse_buffer(FuseBuf::new(request)).ok()?;
            let mut whole = FuseDevWriter::<()>::new(self.null.as_raw_fd(), reply).ok()?;
            let buffered = whole.split_at(0).ok()?;
            self.server.handle_message(reader, buffered.into(), None, None).ok()
        })();
        let length = word(reply, 0) as usize;
        if length >= ANSWER_HEAD && length <= reply.len() && long(reply, 8) == unique {
            return length;
        }
        if matches!(kind, operation::FORGET | operation::BATCH_FORGET) {
            return 0;
        }
        // The library gives up on some requests without a word, and whoever asked would wait for ever.
        put(reply, if handled.is_some() { libc::ENOSYS } else { libc::EIO })
    }

    /// Locks are held here: the library neither waits nor can be interrupted.
    fn lock(&self, kind: u32, request: &[u8], reply: &mut [u8]) -> usize {
        let unique = long(request, 8);
        let body = &request[REQUEST_HEAD..];
        let put = |reply: &mut [u8], error: i32| {
            reply[..ANSWER_HEAD].copy_from_slice(&answer(-error, unique));
            ANSWER_HEAD
        };
        // fh, owner, start, end: 8 each; type, pid, flags, padding: 4 each
        if body.len() < 48 {
            return put(reply, libc::EINVAL);
        }
        let (start, end) = (long(body, 16), long(body, 24));
        let lock = RangeLock {
            kind: word(body, 32) as i16,
            start: start as i64,
            length: if end >= i64::MAX as u64 { 0 } else { end.wrapping_sub(start).wrapping_add(1) as i64 },
        };
        let by = Holder { node: long(request, 16), owner: long(body, 8), whole: word(body, 40) & 1 != 0 };
        let wanted = Wanted { by, through: long(body, 0), lock };
        let known = matches!(i32::from(lock.kind), libc::F_RDLCK | libc::F_WRLCK | libc::F_UNLCK);
        if start > i64::MAX as u64 || end < start || !known {
            return put(reply, libc::EINVAL);
        }
        if kind == operation::GETLK {
            return match self.tree.locks.get(wanted, || self.tree.open_for_lock(&wanted)) {
                Ok(found) => {
                    let last = if found.length == 0 { i64::MAX } else { found.start + found.length - 1 };
                    reply[..4].copy_from_slice(&(ANSWER_HEAD as u32 + 24).to_le_bytes());
                    reply[4..8].fill(0);
                    reply[8..16].copy_from_slice(&unique.to_le_bytes());
                    reply[16..24].copy_from_slice(&(found.start as u64).to_le_bytes());
                    reply[24..32].copy_from_slice(&(last as u64).to_le_bytes());
                    reply[32..36].copy_from_slice(&(found.kind as u32).to_le_bytes());
                    // Whose it is has a number in another guest at best.
                    reply[36..40].fill(0);
                    ANSWER_HEAD + 24
                }
                Err(error) => put(reply, code(&error)),
            };
        }
        match self.tree.locks.set(wanted, || self.tree.open_for_lock(&wanted)) {
            Ok(()) => self.granted(&wanted, unique, reply),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && kind == operation::SETLKW => {
                match self.tree.locks.wait(Waiter { unique, wanted }) {
                    Ok(()) => {
                        // Full: it is awake, and looks once more before it sleeps.
                        let _ = self.wake.try_send(());
                        0
                    }
                    Err(error) => put(reply, code(&error)),
                }
            }
            Err(error) => put(reply, code(&error)),
        }
    }

    /// The answer to who has its lock now. What others did before they gave it back must be seen from here on, so the
    /// guest's kernel asks for the file's attributes again, and drops what it read if the file has changed.
    fn granted(&self, wanted: &Wanted, unique: u64, reply: &mut [u8]) -> usize {
        let mut at = 0;
        if wanted.lock.kind != libc::F_UNLCK as i16 {
            reply[..NOTICE].copy_from_slice(&notice(wanted.by.node));
            at = NOTICE;
        }
        reply[at..at + ANSWER_HEAD].copy_from_slice(&answer(0, unique));
        at + ANSWER_HEAD
    }

    fn time(&self, woken: &Receiver<()>) -> End {
        let Patience { ask, silence } = self.patience;
        let mut asked = None;
        // Whoever is there may begin.
        if self.send(&answer(0, 0)).is_err() {
            return End::Closed;
        }
        let mut reply = vec![0; 256];
        loop {
            let waits = self.tree.locks.has_waiters();
            match woken.recv_timeout(if waits { RETRY } else { ask }) {
                Ok(()) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return End::Fault,
            }
            for (waiter, done) in self.tree.locks.retry(|wanted| self.tree.open_for_lock(wanted)) {
                let length = match done {
                    Ok(()) => self.granted(&waiter.wanted, waiter.unique, &mut reply),
                    Err(error) => {
                        reply[..ANSWER_HEAD].copy_from_slice(&answer(-code(&error), waiter.unique));
                        ANSWER_HEAD
                    }
                };
                if self.send(&reply[..length]).is_err() {
                    return End::Broken;
                }
            }
            if self.busy.load(Ordering::Relaxed) >= WORKERS {
                // All flush, or wait for their share of the disks: that nobody is heard is no fault of the guest's.
                self.heard();
            }
            let now = self.begun.elapsed();
            let silent = now.saturating_sub(Duration::from_millis(self.heard_ms.load(Ordering::Relaxed)));
            if silent >= silence {
                return End::Silent;
            }
            if silent >= ask && asked.is_none_or(|at: Duration| now - at >= ask) {
                asked = Some(now);
                if self.send(&answer(0, 0)).is_err() {
                    return End::Closed;
                }
            }
        }
    }
}

/// What of this host's disks a request uses.
fn cost(kind: u32, request: &[u8]) -> Cost {
    match kind {
        operation::READ => {
            Cost { bytes: u64::from(word(request, REQUEST_HEAD + 16)).min(MESSAGE as u64), operations: 0 }
        }
        operation::WRITE => Cost { bytes: request.len() as u64, operations: 0 },
        operation::FSYNC | operation::FSYNCDIR => Cost { bytes: 0, operations: 1 },
        _ => Cost::default(),
    }
}

/// The number of an error for a guest's kernel.
fn code(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod hostile;

#[cfg(test)]
mod others;

#[cfg(test)]
pub(super) mod tests;
