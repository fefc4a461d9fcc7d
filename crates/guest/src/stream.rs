//! One stream from the host: a connected socket and the frames on it.
//!
//! [`Stream`] never blocks; operations on files take its socket for a thread of theirs (`wire`) and give it back. Its end
//! is kept open after `End` until the host closes: a stream closed first loses what the host has not read. Called by
//! `agent`, `attach`, `dial`.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use pepo_proto::{Error, Event, Failure, FailureCode, Frame, Frames, HEADER, MAX_BODY, MAX_DATA, Outcome, TELL};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;
use tokio_util::codec::{Decoder, Encoder};

use crate::sys;

/// How long the guest waits for the host to close after an `End`.
pub const CLOSE_WAIT: Duration = Duration::from_secs(30);

/// The most that one call writes to a stream.
///
/// The guest kernel makes one packet of each call's bytes, and from 6.12 on one of more than 32 KiB less its overhead lies
/// in several pieces of memory; the stream device of the emulated machine drops such packets, and the stream stands
/// still (measured: 6.12.118 with vhost-device-vsock 0.3.0). Below that, packets are whole on every kernel.
pub const MAX_WRITE: usize = 32_000;

/// Bytes before the payload in a `Data` frame: header, channel, offset.
pub const DATA_HEAD: usize = HEADER + MAX_BODY - MAX_DATA;

/// A failure with its sentence.
pub fn failed(code: FailureCode, message: impl Into<String>) -> Outcome {
    let mut message = message.into();
    if message.len() > 1024 {
        let cut = (0..=1024).rev().find(|index| message.is_char_boundary(*index)).unwrap_or(0);
        message.truncate(cut);
    }
    Outcome::Failed(Failure { code, message })
}

/// What was taken of a stream, and what of that the host was told.
#[derive(Default)]
pub struct Pace {
    taken: u64,
    /// `None` where the host did not ask.
    told: Option<u64>,
}

impl Pace {
    /// The host asked to be told.
    pub fn ask(&mut self) {
        self.told = Some(0);
    }

    /// The next frame in `input`, counted as taken.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, Error> {
        let before = input.len();
        let frame = Frames::new().decode(input)?;
        self.taken += (before - input.len()) as u64;
        Ok(frame)
    }

    /// What the host is to be told first, if it asked.
    pub fn first(&mut self) -> Option<Frame> {
        self.told.as_mut().map(|told| {
            *told = self.taken;
            Frame::Event(Event::Taken { bytes: self.taken })
        })
    }

    /// What the host is to be told now, if it is time.
    pub fn due(&mut self) -> Option<Frame> {
        let untold = self.taken - self.told?;
        if untold < TELL { None } else { self.first() }
    }
}

/// A non-blocking stream.
pub struct Stream {
    socket: AsyncFd<OwnedFd>,
    input: BytesMut,
    output: BytesMut,
    pace: Pace,
}

impl Stream {
    /// Takes a connected, non-blocking socket. Must be called within the runtime.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Stream {
            socket: sys::watch(socket, Interest::READABLE | Interest::WRITABLE)?,
            input: BytesMut::new(),
            output: BytesMut::new(),
            pace: Pace::default(),
        })
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }

    /// The socket itself, what was read of it already, and what was taken of that.
    pub fn into_parts(self) -> (OwnedFd, BytesMut, Pace) {
        (self.socket.into_inner(), self.input, self.pace)
    }

    /// The host asked to be told what is taken.
    pub fn pace(&mut self) {
        self.pace.ask();
    }

    /// Puts the answer to the Request behind what waits to be written.
    pub fn accept(&mut self) -> Result<(), Error> {
        self.pace.first().map_or(Ok(()), |frame| self.queue(frame))?;
        self.queue(Frame::Accepted)
    }

    /// The two directions, to be used side by side.
    pub fn halves(&mut self) -> (Receiver<'_>, Sender<'_>) {
        (
            Receiver { socket: &self.socket, input: &mut self.input, pace: &mut self.pace },
            Sender { socket: &self.socket, output: &mut self.output },
        )
    }

    /// The next frame; `None` where the host has closed between two frames. Cancel safe.
    pub async fn receive(&mut self) -> Result<Option<Frame>, Error> {
        self.halves().0.receive().await
    }

    /// Puts a frame behind what waits to be written.
    pub fn queue(&mut self, frame: Frame) -> Result<(), Error> {
        self.halves().1.queue(frame)
    }

    /// Writes everything queued.
    pub async fn flush(&mut self) -> io::Result<()> {
        self.halves().1.flush().await
    }

    /// Sends a frame and all queued before it.
    pub async fn send(&mut self, frame: Frame) -> Result<(), Error> {
        self.queue(frame)?;
        Ok(self.flush().await?)
    }

    /// Sends the `End`, then waits (bounded) for the host to close.
    pub async fn end(&mut self, outcome: Outcome) {
        let end = async {
            if self.send(Frame::End(outcome)).await.is_ok() {
                self.closed().await;
            }
        };
        // What happens to a stream after its End decides nothing any more.
        let _ = timeout(CLOSE_WAIT, end).await;
    }

    /// Reads and drops until the host closes. To be bounded by the caller.
    pub async fn closed(&mut self) {
        let (mut receiver, _) = self.halves();
        loop {
            receiver.input.clear();
            if !matches!(receiver.read_some().await, Ok(true)) {
                return;
            }
        }
    }
}

/// What comes from the host.
pub struct Receiver<'a> {
    socket: &'a AsyncFd<OwnedFd>,
    input: &'a mut BytesMut,
    pace: &'a mut Pace,
}

impl Receiver<'_> {
    /// The next frame; `None` where the host has closed between two frames. Cancel safe.
    pub async fn receive(&mut self) -> Result<Option<Frame>, Error> {
        loop {
            if let Some(frame) = self.pace.decode(self.input)? {
                return Ok(Some(frame));
            }
            if !self.read_some().await? {
                return if self.input.is_empty() { Ok(None) } else { Err(Error::Truncated) };
            }
        }
    }

    /// What the host is to be told of what it sent, if it is time.
    pub fn due(&mut self) -> Option<Frame> {
        self.pace.due()
    }

    async fn read_some(&mut self) -> io::Result<bool> {
        loop {
            let mut ready = self.socket.readable().await?;
            self.input.reserve(4096);
            let input = &mut *self.input;
            match ready.try_io(|socket| sys::read_into(socket.as_fd(), input)) {
                Ok(result) => return result.map(|read| read > 0),
                Err(_would_block) => {}
            }
        }
    }
}

/// What goes to the host.
pub struct Sender<'a> {
    socket: &'a AsyncFd<OwnedFd>,
    output: &'a mut BytesMut,
}

impl Sender<'_> {
    /// Puts a frame behind what waits to be written.
    pub fn queue(&mut self, frame: Frame) -> Result<(), Error> {
        Frames::new().encode(frame, self.output)
    }

    /// Puts bytes of encoded frames behind what waits to be written.
    pub fn queue_bytes(&mut self, bytes: &[u8]) {
        self.output.extend_from_slice(bytes);
    }

    /// What waits to be written.
    pub fn queued(&self) -> &[u8] {
        self.output
    }

    /// Takes the first `bytes` of [`Self::queued`] as written.
    pub fn wrote(&mut self, bytes: usize) {
        self.output.advance(bytes);
    }

    /// Writes queued bytes until all are written (`true`) or the socket takes no more for now.
    pub fn try_flush(&mut self) -> io::Result<bool> {
        while !self.output.is_empty() {
            match self.try_write(&[IoSlice::new(self.output)])? {
                Some(written) => self.output.advance(written),
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Writes once without waiting, at most [`MAX_WRITE`] bytes; `None` where the socket takes nothing now.
    pub fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        let mut left = MAX_WRITE;
        let mut few = Vec::with_capacity(slices.len());
        for slice in slices.iter().filter(|slice| !slice.is_empty()) {
            let take = slice.len().min(left);
            few.push(IoSlice::new(&slice[..take]));
            left -= take;
            if left == 0 {
                break;
            }
        }
        loop {
            match rustix::io::writev(self.socket.get_ref(), &few) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => return Ok(Some(written)),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes everything queued.
    pub async fn flush(&mut self) -> io::Result<()> {
        while !self.try_flush()? {
            self.writable().await?;
        }
        Ok(())
    }

    /// Waits until the socket takes bytes again, after a write that it refused. Cancel safe.
    pub async fn writable(&self) -> io::Result<()> {
        loop {
            let mut ready = self.socket.writable().await?;
            // The writes above do not go through the runtime, so its knowledge may be old: ask the socket.
            let mut poll = [rustix::event::PollFd::new(self.socket.get_ref(), rustix::event::PollFlags::OUT)];
            if rustix::event::poll(&mut poll, Some(&rustix::event::Timespec::default()))? > 0 {
                return Ok(());
            }
            ready.clear_ready();
        }
    }
}
