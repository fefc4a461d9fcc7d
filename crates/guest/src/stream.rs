//! One stream from the host: a connected socket and the frames on it.
//!
//! [`Stream`] is the agent's, never blocking; [`Wire`] is the same socket on a thread of its own, blocking with a
//! deadline, for the operations that move files. Both keep their end open after `End` until the host closes (a stream
//! closed first loses what the host has not read). Called by `agent`, `attach`, `dial`, `files`, `tar`.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use pepo_proto::{Channel, Error, Event, Failure, FailureCode, Frame, Frames, HEADER, MAX_DATA, Outcome};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;
use tokio_util::codec::{Decoder, Encoder};

use crate::sys;

/// How long the guest waits for the host to close after an `End`.
pub const CLOSE_WAIT: Duration = Duration::from_secs(30);

/// How long a stream of a file operation may stand still before it is given up.
const STALL: Duration = Duration::from_secs(300);

/// Bytes before the payload in a `Data` frame: header, channel, offset.
pub const DATA_HEAD: usize = HEADER + 9;

/// The bytes before a payload of `length` bytes.
pub fn data_head(channel: Channel, offset: u64, length: usize) -> [u8; DATA_HEAD] {
    const DATA: u8 = 3;
    let mut head = [0; DATA_HEAD];
    head[..4].copy_from_slice(&(length as u32 + 10).to_le_bytes());
    head[4] = DATA;
    head[5] = channel as u8;
    head[6..].copy_from_slice(&offset.to_le_bytes());
    head
}

/// A failure with its sentence.
pub fn failed(code: FailureCode, message: impl Into<String>) -> Outcome {
    let mut message = message.into();
    if message.len() > 1024 {
        let cut = (0..=1024).rev().find(|index| message.is_char_boundary(*index)).unwrap_or(0);
        message.truncate(cut);
    }
    Outcome::Failed(Failure { code, message })
}

/// A non-blocking stream.
pub struct Stream {
    socket: AsyncFd<OwnedFd>,
    input: BytesMut,
    output: BytesMut,
}

impl Stream {
    /// Takes a connected, non-blocking socket. Must be called within the runtime.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Stream {
            socket: sys::watch(socket, Interest::READABLE | Interest::WRITABLE)?,
            input: BytesMut::new(),
            output: BytesMut::new(),
        })
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }

    /// The socket itself and what was read of it already.
    pub fn into_parts(self) -> (OwnedFd, BytesMut) {
        (self.socket.into_inner(), self.input)
    }

    /// The two directions, to be used side by side.
    pub fn halves(&mut self) -> (Receiver<'_>, Sender<'_>) {
        (
            Receiver { socket: &self.socket, input: &mut self.input },
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
}

impl Receiver<'_> {
    /// The next frame; `None` where the host has closed between two frames. Cancel safe.
    pub async fn receive(&mut self) -> Result<Option<Frame>, Error> {
        loop {
            if let Some(frame) = Frames::new().decode(self.input)? {
                return Ok(Some(frame));
            }
            if !self.read_some().await? {
                return if self.input.is_empty() { Ok(None) } else { Err(Error::Truncated) };
            }
        }
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

    /// Writes once without waiting; `None` where the socket takes nothing now.
    pub fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::writev(self.socket.get_ref(), slices) {
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

/// A blocking stream: for a thread that moves files.
pub struct Wire {
    socket: OwnedFd,
    input: BytesMut,
    /// Frames being gathered; the first `filled` bytes are valid.
    output: Box<[u8]>,
    filled: usize,
    /// Where the head of the `Data` frame being filled lies.
    open: Option<usize>,
    offset: u64,
    received: u64,
    ended: bool,
    current: Bytes,
}

/// How much is gathered before it is written.
const GATHER: usize = 4 * (MAX_DATA + DATA_HEAD);

/// How much is read at once.
const READ: usize = 256 << 10;

impl Wire {
    /// Makes the stream blocking.
    pub fn new(stream: Stream) -> io::Result<Self> {
        let (socket, input) = stream.into_parts();
        rustix::io::ioctl_fionbio(&socket, false)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(STALL))?;
        set_socket_timeout(&socket, Timeout::Send, Some(STALL))?;
        Ok(Wire {
            socket,
            input,
            output: Box::default(),
            filled: 0,
            open: None,
            offset: 0,
            received: 0,
            ended: false,
            current: Bytes::new(),
        })
    }

    /// Back to the agent, to wait for the close there.
    pub fn into_stream(self) -> io::Result<Stream> {
        rustix::io::ioctl_fionbio(&self.socket, true)?;
        Stream::new(self.socket)
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends a frame, after all payload before it, at once.
    pub fn send(&mut self, frame: Frame) -> Result<(), Error> {
        self.flush()?;
        let mut bytes = BytesMut::new();
        Frames::new().encode(frame, &mut bytes)?;
        Ok(self.write_all(&bytes)?)
    }

    /// Sends an event.
    pub fn event(&mut self, event: Event) -> Result<(), Error> {
        self.send(Frame::Event(event))
    }

    /// Room for payload on [`Channel::Out`]; what was put there is told by [`Self::advance`]. Never empty.
    pub fn space(&mut self) -> io::Result<&mut [u8]> {
        if self.output.is_empty() {
            self.output = vec![0; GATHER].into_boxed_slice();
        }
        if self.open.is_some_and(|open| self.filled - open == DATA_HEAD + MAX_DATA) {
            self.close_frame();
        }
        if self.open.is_none() {
            if self.output.len() - self.filled < DATA_HEAD + MAX_DATA {
                self.flush()?;
            }
            self.open = Some(self.filled);
            self.filled += DATA_HEAD;
        }
        let open = self.open.unwrap_or(0);
        Ok(&mut self.output[self.filled..open + DATA_HEAD + MAX_DATA])
    }

    /// Takes the first `bytes` of [`Self::space`] as payload.
    pub fn advance(&mut self, bytes: usize) {
        self.filled += bytes;
    }

    /// Sends payload.
    pub fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let space = self.space()?;
            let take = space.len().min(bytes.len());
            space[..take].copy_from_slice(&bytes[..take]);
            self.advance(take);
            bytes = &bytes[take..];
        }
        Ok(())
    }

    fn close_frame(&mut self) {
        if let Some(open) = self.open.take() {
            let length = self.filled - open - DATA_HEAD;
            if length == 0 {
                self.filled = open;
            } else {
                self.output[open..open + DATA_HEAD].copy_from_slice(&data_head(Channel::Out, self.offset, length));
                self.offset += length as u64;
            }
        }
    }

    /// Writes all gathered payload.
    pub fn flush(&mut self) -> io::Result<()> {
        self.close_frame();
        let filled = std::mem::take(&mut self.filled);
        write_all(self.socket.as_fd(), &self.output[..filled])
    }

    fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        write_all(self.socket.as_fd(), bytes)
    }

    /// Ends the payload.
    pub fn eof(&mut self) -> Result<(), Error> {
        self.flush()?;
        let offset = self.offset;
        self.send(Frame::Eof { channel: Channel::Out, offset })
    }

    /// Some of the payload on [`Channel::In`], `None` at its `Eof`.
    ///
    /// # Errors
    /// Also when the host sends anything else, skips bytes, or closes before the `Eof`.
    pub fn receive(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            if !self.current.is_empty() {
                return Ok(Some(std::mem::take(&mut self.current)));
            }
            if self.ended {
                return Ok(None);
            }
            match self.frame()? {
                Frame::Data { channel: Channel::In, offset, mut bytes } => {
                    let end = offset + bytes.len() as u64;
                    if offset > self.received {
                        return Err(Error::Malformed("data"));
                    }
                    if end > self.received {
                        bytes.advance((self.received - offset) as usize);
                        self.received = end;
                        self.current = bytes;
                    }
                }
                Frame::Eof { channel: Channel::In, offset } if offset == self.received => self.ended = true,
                Frame::Eof { .. } => return Err(Error::Malformed("eof")),
                _ => return Err(Error::Malformed("data")),
            }
        }
    }

    /// Puts back what was received and not used.
    pub fn unread(&mut self, rest: Bytes) {
        self.current = rest;
    }

    fn frame(&mut self) -> Result<Frame, Error> {
        loop {
            if let Some(frame) = Frames::new().decode(&mut self.input)? {
                return Ok(frame);
            }
            self.input.reserve(READ);
            if sys::read_into(self.socket.as_fd(), &mut self.input)? == 0 {
                return Err(Error::Truncated);
            }
        }
    }
}

fn write_all(socket: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(socket, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
