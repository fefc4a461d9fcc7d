//! A stream on a thread of its own: blocking, with a deadline, for the operations that move files.
//!
//! Payload is read into and written from where it lies; many small pieces go out in one call. Called by `files`, `tar`
//! and `watch`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use pepo_proto::{Channel, Error, FailureCode, Frame, Frames, MAX_DATA, Outcome, data_head};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use tokio_util::codec::Encoder;

use crate::agent::explain;
use crate::stream::{DATA_HEAD, MAX_WRITE, Pace, Stream, failed};
use crate::sys;

/// How long it may stand still before it is given up: the host cannot always tell that it has gone.
const STALL: Duration = Duration::from_secs(300);

/// How much is gathered before it is written.
const GATHER: usize = 4 * (MAX_DATA + DATA_HEAD);

/// How much is read at once.
const READ: usize = 256 << 10;

/// Why an operation on files ended early.
pub enum Fault {
    /// The stream is gone: there is nobody to tell.
    Lost,
    /// What to tell.
    Failed(Outcome),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        match error {
            Error::Io(_) | Error::Truncated => Fault::Lost,
            error => Fault::Failed(failed(FailureCode::Invalid, explain(&error))),
        }
    }
}

/// A blocking stream.
pub struct Wire {
    socket: OwnedFd,
    input: BytesMut,
    pace: Pace,
    /// Frames being gathered; the first `filled` bytes are valid.
    output: Vec<u8>,
    filled: usize,
    /// Where the head of the `Data` frame being filled lies.
    open: Option<usize>,
    offset: u64,
    received: u64,
    ended: bool,
    current: Bytes,
}

impl Wire {
    /// Makes the stream blocking.
    pub fn new(stream: Stream) -> io::Result<Self> {
        let (socket, input, pace) = stream.into_parts();
        rustix::io::ioctl_fionbio(&socket, false)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(STALL))?;
        set_socket_timeout(&socket, Timeout::Send, Some(STALL))?;
        Ok(Wire {
            socket,
            input,
            pace,
            output: Vec::new(),
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

    /// Answers the Request; it goes out with the next flush.
    pub fn accept(&mut self) -> Result<(), Fault> {
        self.pace.first().map_or(Ok(()), |frame| self.queue(frame))?;
        self.queue(Frame::Accepted)
    }

    /// Puts a frame behind the payload so far; it goes out with the next flush.
    pub fn queue(&mut self, frame: Frame) -> Result<(), Fault> {
        self.close_frame()?;
        let mut bytes = BytesMut::new();
        Frames::new().encode(frame, &mut bytes)?;
        if self.filled + bytes.len() > GATHER {
            self.flush()?;
        }
        if self.output.len() < self.filled + bytes.len() {
            self.output.resize(self.filled + bytes.len(), 0);
        }
        self.output[self.filled..self.filled + bytes.len()].copy_from_slice(&bytes);
        self.filled += bytes.len();
        Ok(())
    }

    /// Room for payload on [`Channel::Out`]; what was put there is told by [`Self::advance`]. Never empty.
    pub fn space(&mut self) -> Result<&mut [u8], Fault> {
        if self.open.is_some_and(|open| self.filled - open == DATA_HEAD + MAX_DATA) {
            self.close_frame()?;
        }
        let open = match self.open {
            Some(open) => open,
            None => {
                if self.filled + DATA_HEAD + MAX_DATA > GATHER {
                    self.flush()?;
                }
                if self.output.len() < GATHER {
                    self.output.resize(GATHER, 0);
                }
                let open = self.filled;
                self.open = Some(open);
                self.filled += DATA_HEAD;
                open
            }
        };
        Ok(&mut self.output[self.filled..open + DATA_HEAD + MAX_DATA])
    }

    /// Takes the first `bytes` of [`Self::space`] as payload.
    pub fn advance(&mut self, bytes: usize) {
        self.filled += bytes;
    }

    /// Sends payload.
    pub fn put(&mut self, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let space = self.space()?;
            let take = space.len().min(bytes.len());
            space[..take].copy_from_slice(&bytes[..take]);
            self.advance(take);
            bytes = &bytes[take..];
        }
        Ok(())
    }

    fn close_frame(&mut self) -> Result<(), Fault> {
        if let Some(open) = self.open.take() {
            let length = self.filled - open - DATA_HEAD;
            if length == 0 {
                self.filled = open;
            } else {
                self.output[open..open + DATA_HEAD].copy_from_slice(&data_head(Channel::Out, self.offset, length)?);
                self.offset += length as u64;
            }
        }
        Ok(())
    }

    /// Writes everything gathered.
    pub fn flush(&mut self) -> Result<(), Fault> {
        self.close_frame()?;
        let filled = std::mem::take(&mut self.filled);
        let mut bytes = &self.output[..filled];
        while !bytes.is_empty() {
            match rustix::io::write(&self.socket, &bytes[..bytes.len().min(MAX_WRITE)]) {
                Ok(0) => return Err(Fault::Lost),
                Ok(written) => bytes = &bytes[written..],
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(Fault::Lost),
            }
        }
        Ok(())
    }

    /// Ends the payload.
    pub fn eof(&mut self) -> Result<(), Fault> {
        self.close_frame()?;
        let offset = self.offset;
        self.queue(Frame::Eof { channel: Channel::Out, offset })
    }

    /// Some of the payload on [`Channel::In`], `None` at its `Eof`.
    ///
    /// # Errors
    /// Also when the host sends anything else, skips bytes, or closes before the `Eof`.
    pub fn receive(&mut self) -> Result<Option<Bytes>, Fault> {
        loop {
            if !self.current.is_empty() {
                return Ok(Some(std::mem::take(&mut self.current)));
            }
            if self.ended {
                return Ok(None);
            }
            let frame = self.frame()?;
            if let Some(told) = self.pace.due() {
                self.queue(told)?;
                self.flush()?;
            }
            match frame {
                Frame::Data { channel: Channel::In, offset, mut bytes } => {
                    let end = offset.saturating_add(bytes.len() as u64);
                    if offset > self.received {
                        return Err(Error::Malformed("data").into());
                    }
                    if end > self.received {
                        bytes.advance((self.received - offset) as usize);
                        self.received = end;
                        self.current = bytes;
                    }
                }
                Frame::Eof { channel: Channel::In, offset } if offset == self.received => self.ended = true,
                Frame::Eof { .. } => return Err(Error::Malformed("eof").into()),
                _ => return Err(Error::Malformed("data").into()),
            }
        }
    }

    /// Puts back what was received and not used.
    pub fn unread(&mut self, rest: Bytes) {
        self.current = rest;
    }

    fn frame(&mut self) -> Result<Frame, Error> {
        loop {
            if let Some(frame) = self.pace.decode(&mut self.input)? {
                return Ok(frame);
            }
            self.input.reserve(READ);
            if sys::read_into(self.socket.as_fd(), &mut self.input)? == 0 {
                return Err(Error::Truncated);
            }
        }
    }
}
