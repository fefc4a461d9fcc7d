//! One stream to the guest: how it is dialled, its reading and its writing half.
//!
//! Owns the descriptor. Reads are large and frames are cut out of them without copying; writes go out as vectors, so
//! payload is never copied either. Neither half half-closes: nothing is said by closing, and [`Wire::close`] ends both.
//!
//! Where the guest tells what it takes, no more than [`WINDOW`] bytes are under way. A writer that must wait for that
//! word reads for itself, and keeps what else comes for the reader: whoever sends need not read meanwhile.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker, ready};

use bytes::{Bytes, BytesMut};
use futures_util::task::AtomicWaker;
use pepo_proto::{AGENT_PORT, Channel, Event, Frame, Frames, MAX_DATA, Request, WINDOW, data_head};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio_util::codec::Encoder;

use super::order::Incoming;
use super::{Error, lock};

/// Room for the first read: most operations say no more than this.
const READ_FIRST: usize = 4 * 1024;

/// Room for a read once one has filled the first: four frames, fewer system calls than one frame each, and no more memory
/// than a socket holds.
const READ_ROOM: usize = 256 * 1024;

/// Slices per write: a head and a payload for each of eight frames.
const WRITE_SLICES: usize = 16;

/// Frames that a waiting writer keeps for a reader that does not come; then it waits for the reader, too.
const AHEAD: usize = 16;

/// What is taken of a stream on which nothing was told (yet): nothing is held back there.
const UNTOLD: u64 = u64::MAX;

/// The longest answer to CONNECT: `OK `, ten digits, a newline, and some.
const CONNECT_ANSWER: usize = 32;

type Dialling = Pin<Box<dyn Future<Output = io::Result<OwnedFd>> + Send>>;

/// How a stream to one guest is made.
#[derive(Clone)]
pub struct Connector(Arc<Way>);

enum Way {
    /// The agent itself listens here.
    Socket(PathBuf),
    /// A descriptor connected to the VMM's vsock socket, on which a port is then asked for.
    Vsock(Box<dyn Fn() -> Dialling + Send + Sync>),
    /// A descriptor connected to a process that answers one operation and ends.
    Alone(Box<dyn Fn() -> Dialling + Send + Sync>),
    /// A descriptor connected to the agent itself.
    #[cfg(feature = "fake")]
    Direct(Box<dyn Fn() -> Dialling + Send + Sync>),
}

impl Connector {
    /// An agent that listens on a Unix socket: a host process in place of a VMM.
    pub fn socket(path: impl Into<PathBuf>) -> Self {
        Connector(Arc::new(Way::Socket(path.into())))
    }

    /// An agent behind a VMM: `dial` returns a stream connected to the VMM's vsock socket, on which this side then
    /// asks for the agent's port (`CONNECT <port>`, answered by `OK <n>`).
    pub fn vsock<F, D>(dial: F) -> Self
    where
        F: Fn() -> D + Send + Sync + 'static,
        D: Future<Output = io::Result<OwnedFd>> + Send + 'static,
    {
        Connector(Arc::new(Way::Vsock(Box::new(move || Box::pin(dial())))))
    }

    /// No agent at all, but a process for each operation, which ends with it: `dial` returns a stream connected to a new one.
    pub fn alone<F, D>(dial: F) -> Self
    where
        F: Fn() -> D + Send + Sync + 'static,
        D: Future<Output = io::Result<OwnedFd>> + Send + 'static,
    {
        Connector(Arc::new(Way::Alone(Box::new(move || Box::pin(dial())))))
    }

    /// Whether each stream is another process: there is nobody to tell on one what becomes of another.
    pub(super) fn is_alone(&self) -> bool {
        matches!(*self.0, Way::Alone(_))
    }

    /// An agent that is a host process behind the wall: `dial` returns a stream connected to it.
    #[cfg(feature = "fake")]
    pub fn direct<F, D>(dial: F) -> Self
    where
        F: Fn() -> D + Send + Sync + 'static,
        D: Future<Output = io::Result<OwnedFd>> + Send + 'static,
    {
        Connector(Arc::new(Way::Direct(Box::new(move || Box::pin(dial())))))
    }

    /// A connected stream. The caller sets the deadline.
    pub(super) async fn connect(&self) -> io::Result<UnixStream> {
        match &*self.0 {
            Way::Socket(path) => UnixStream::connect(path).await,
            Way::Alone(dial) => {
                let stream = std::os::unix::net::UnixStream::from(dial().await?);
                stream.set_nonblocking(true)?;
                UnixStream::from_std(stream)
            }
            #[cfg(feature = "fake")]
            Way::Direct(dial) => {
                let stream = std::os::unix::net::UnixStream::from(dial().await?);
                stream.set_nonblocking(true)?;
                UnixStream::from_std(stream)
            }
            Way::Vsock(dial) => {
                let stream = std::os::unix::net::UnixStream::from(dial().await?);
                stream.set_nonblocking(true)?;
                let mut stream = UnixStream::from_std(stream)?;
                stream.write_all(format!("CONNECT {AGENT_PORT}\n").as_bytes()).await?;
                answer(&mut stream).await?;
                Ok(stream)
            }
        }
    }
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &*self.0 {
            Way::Socket(path) => write!(f, "Connector({})", path.display()),
            Way::Vsock(_) => f.write_str("Connector(vsock)"),
            Way::Alone(_) => f.write_str("Connector(alone)"),
            #[cfg(feature = "fake")]
            Way::Direct(_) => f.write_str("Connector(direct)"),
        }
    }
}

/// Reads `OK <n>\n` and not one byte more than the answer may have. The agent speaks only when spoken to, so bytes
/// after the newline are refused rather than kept.
async fn answer(stream: &mut UnixStream) -> io::Result<()> {
    let refused = |text: &'static str| io::Error::new(io::ErrorKind::InvalidData, text);
    let mut answer = [0; CONNECT_ANSWER];
    let mut length = 0;
    loop {
        let read = stream.read(&mut answer[length..]).await?;
        if read == 0 {
            return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "nothing listens in the guest"));
        }
        length += read;
        match answer[..length].iter().position(|byte| *byte == b'\n') {
            Some(end) if end + 1 == length => {
                let digits = answer[..end].strip_prefix(b"OK ").ok_or(refused("no OK to CONNECT"))?;
                if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
                    return Err(refused("no port in the answer to CONNECT"));
                }
                return Ok(());
            }
            Some(_) => return Err(refused("bytes after the answer to CONNECT")),
            None if length == answer.len() => return Err(refused("answer to CONNECT is too long")),
            None => {}
        }
    }
}

/// What both halves share: the descriptor, what came on it, and how far the guest is with what was sent.
#[derive(Debug)]
pub(super) struct Wire {
    stream: UnixStream,
    closed: AtomicBool,
    inbox: Mutex<Inbox>,
    waiting: Arc<Waiting>,
    sent: AtomicU64,
    taken: AtomicU64,
}

/// What came and was not asked for yet.
#[derive(Debug)]
struct Inbox {
    buffer: BytesMut,
    room: usize,
    incoming: Incoming,
    /// Read by a writer.
    ahead: VecDeque<Frame>,
    /// How it ended, where a writer saw that.
    failed: Option<Error>,
}

/// Who waits for the stream to be read: a stream remembers one waker, and this one wakes both halves.
#[derive(Debug, Default)]
struct Waiting {
    reader: AtomicWaker,
    writer: AtomicWaker,
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        self.reader.wake();
        self.writer.wake();
    }
}

impl Wire {
    /// Ends the stream in both directions at once, whoever still holds a half.
    pub(super) fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            // An error means that the other side closed first: closed is what was wanted.
            let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Both);
        }
    }

    /// Waits until the other side has said something, or is gone.
    pub(super) async fn heard(&self) {
        while self.stream.readable().await.is_ok() {
            let peeked = self.stream.try_io(Interest::READABLE, || {
                Ok(rustix::net::recv(&self.stream, &mut [0_u8; 1], rustix::net::RecvFlags::PEEK)?)
            });
            // Ready without anything to read is how a readiness from before shows itself; trying has taken it back.
            if !matches!(peeked, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
                return;
            }
        }
    }

    /// Another descriptor of the stream, one that blocks.
    pub(super) fn hand_over(&self) -> io::Result<OwnedFd> {
        let copy = rustix::io::fcntl_dupfd_cloexec(&self.stream, 3)?;
        rustix::io::ioctl_fionbio(&copy, false)?;
        Ok(copy)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Makes the two halves of a stream on which `request` will be sent.
pub(super) fn halves(stream: UnixStream, request: &Request) -> (Reader, Writer) {
    let inbox = Inbox {
        buffer: BytesMut::new(),
        room: READ_FIRST,
        incoming: Incoming::new(request),
        ahead: VecDeque::new(),
        failed: None,
    };
    let wire = Arc::new(Wire {
        stream,
        closed: AtomicBool::new(false),
        inbox: Mutex::new(inbox),
        waiting: Arc::default(),
        sent: AtomicU64::new(0),
        taken: AtomicU64::new(UNTOLD),
    });
    (Reader { wire: wire.clone() }, Writer { wire, queue: VecDeque::new() })
}

impl Wire {
    /// The next frame but those that tell what was taken. After `End`, and after an error, the stream is closed.
    fn poll_frame(&self, inbox: &mut Inbox) -> Poll<Result<Frame, Error>> {
        let waker = Waker::from(self.waiting.clone());
        let mut cx = Context::from_waker(&waker);
        let polled = loop {
            match ready!(self.poll_next(inbox, &mut cx)) {
                Ok(Frame::Event(Event::Taken { bytes })) => {
                    if bytes > self.sent.load(Ordering::Acquire) {
                        break Err(Error::Protocol(pepo_proto::Error::Order("more taken than was sent")));
                    }
                    self.taken.store(bytes, Ordering::Release);
                    self.waiting.writer.wake();
                }
                polled => break polled,
            }
        };
        if inbox.incoming.ended() || polled.is_err() {
            self.close();
        }
        Poll::Ready(polled)
    }

    fn poll_next(&self, inbox: &mut Inbox, cx: &mut Context<'_>) -> Poll<Result<Frame, Error>> {
        loop {
            if let Some(frame) = inbox.incoming.next(&mut inbox.buffer).map_err(Error::Protocol)? {
                return Poll::Ready(Ok(frame));
            }
            // Below a quarter a new block is taken, so that a read is never a few bytes at the end of the old one.
            if inbox.buffer.capacity() - inbox.buffer.len() < inbox.room / 4 {
                inbox.buffer.reserve(inbox.room);
            }
            let room = inbox.buffer.capacity() - inbox.buffer.len();
            ready!(self.stream.poll_read_ready(cx)).map_err(|source| Error::Lost(Some(source)))?;
            match self.stream.try_read_buf(&mut inbox.buffer) {
                Ok(0) => return Poll::Ready(Err(Error::Lost(None))),
                Ok(read) if read == room => inbox.room = READ_ROOM,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(Error::Lost(Some(error)))),
            }
        }
    }

    /// How many bytes may be sent now.
    fn allowance(&self) -> usize {
        let left = match self.taken.load(Ordering::Acquire) {
            UNTOLD => u64::MAX,
            taken => (taken + WINDOW).saturating_sub(self.sent.load(Ordering::Acquire)),
        };
        usize::try_from(left).unwrap_or(usize::MAX)
    }

    /// Waits until bytes may be sent, reading meanwhile. [`Error::Ended`] where none will be taken.
    fn poll_allowance(&self, cx: &mut Context<'_>) -> Poll<Result<usize, Error>> {
        loop {
            if self.is_closed() {
                return Poll::Ready(Err(Error::Ended));
            }
            match self.allowance() {
                0 => self.waiting.writer.register(cx.waker()),
                bytes => return Poll::Ready(Ok(bytes)),
            }
            let mut inbox = lock(&self.inbox);
            // Told before this side was on the list.
            if self.allowance() > 0 {
                continue;
            }
            if inbox.ahead.len() >= AHEAD {
                return Poll::Pending;
            }
            match self.poll_frame(&mut inbox) {
                Poll::Ready(Ok(frame)) => inbox.ahead.push_back(frame),
                Poll::Ready(Err(error)) => inbox.failed = Some(error),
                Poll::Pending if self.allowance() > 0 => continue,
                Poll::Pending => return Poll::Pending,
            }
            self.waiting.reader.wake();
        }
    }
}

/// The guest's frames, in order or not at all.
#[derive(Debug)]
pub(super) struct Reader {
    wire: Arc<Wire>,
}

impl Reader {
    /// The next frame. After `End`, and after an error, the stream is closed.
    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Result<Frame, Error>> {
        let wire = &*self.wire;
        let mut inbox = lock(&wire.inbox);
        if let Some(frame) = inbox.ahead.pop_front() {
            // There is room again for what a writer reads.
            wire.waiting.writer.wake();
            return Poll::Ready(Ok(frame));
        }
        if let Some(error) = inbox.failed.take() {
            return Poll::Ready(Err(error));
        }
        wire.waiting.reader.register(cx.waker());
        wire.poll_frame(&mut inbox)
    }

    /// Whether the guest has said its last.
    pub(super) fn ended(&self) -> bool {
        lock(&self.wire.inbox).incoming.ended()
    }

    /// The next output offset.
    pub(super) fn offset(&self) -> u64 {
        lock(&self.wire.inbox).incoming.offset()
    }

    /// Whether bytes came that no frame has taken.
    pub(super) fn has_more(&self) -> bool {
        !lock(&self.wire.inbox).buffer.is_empty()
    }

    pub(super) fn wire(&self) -> &Arc<Wire> {
        &self.wire
    }
}

/// Our frames. What was queued is sent whole even when the future that queued it is dropped half-way.
#[derive(Debug)]
pub(super) struct Writer {
    wire: Arc<Wire>,
    queue: VecDeque<Bytes>,
}

impl Writer {
    /// A writer of the same stream with a queue of its own. Only one of them may have anything queued at a time.
    pub(super) fn another(&self) -> Self {
        Writer { wire: self.wire.clone(), queue: VecDeque::new() }
    }

    /// Bytes queued and not yet taken by the stream.
    pub(super) fn queued(&self) -> usize {
        self.queue.iter().map(Bytes::len).sum()
    }

    /// Queues a frame that is not payload.
    pub(super) fn queue(&mut self, frame: Frame) -> Result<(), Error> {
        let mut encoded = BytesMut::new();
        Frames::new().encode(frame, &mut encoded).map_err(Error::Protocol)?;
        self.queue.push_back(encoded.freeze());
        Ok(())
    }

    /// Queues payload, cut into frames where it is longer than one holds.
    pub(super) fn queue_data(&mut self, channel: Channel, mut offset: u64, mut bytes: Bytes) -> Result<(), Error> {
        while !bytes.is_empty() {
            let part = bytes.split_to(bytes.len().min(MAX_DATA));
            let head = data_head(channel, offset, part.len()).map_err(Error::Protocol)?;
            offset += part.len() as u64;
            self.queue.push_back(Bytes::copy_from_slice(&head));
            self.queue.push_back(part);
        }
        Ok(())
    }

    /// Sends what was queued. [`Error::Ended`] where this side has closed the stream.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        while !self.queue.is_empty() {
            let allowance = ready!(self.wire.poll_allowance(cx))?;
            ready!(self.wire.stream.poll_write_ready(cx)).map_err(|source| Error::Lost(Some(source)))?;
            let mut slices = [IoSlice::new(&[]); WRITE_SLICES];
            let (mut used, mut offered) = (0, 0);
            for (slice, bytes) in slices.iter_mut().zip(&self.queue) {
                let bytes = &bytes[..bytes.len().min(allowance - offered)];
                offered += bytes.len();
                *slice = IoSlice::new(bytes);
                used += 1;
            }
            // Counted before: the guest may tell of them before this returns.
            self.wire.sent.fetch_add(offered as u64, Ordering::AcqRel);
            let written = self.wire.stream.try_write_vectored(&slices[..used]);
            let unsent = offered - written.as_ref().map_or(0, |sent| *sent);
            self.wire.sent.fetch_sub(unsent as u64, Ordering::AcqRel);
            match written {
                Ok(sent) => self.sent(sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) if self.wire.is_closed() => return Poll::Ready(Err(Error::Ended)),
                Err(error) => return Poll::Ready(Err(Error::Lost(Some(error)))),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn sent(&mut self, mut bytes: usize) {
        while let Some(first) = self.queue.front_mut() {
            if first.len() > bytes {
                let _ = first.split_to(bytes);
                return;
            }
            bytes -= first.len();
            self.queue.pop_front();
        }
    }
}
