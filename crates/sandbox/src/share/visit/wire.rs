//! The stream of a visit: frames of the guest's protocol, blocking, with a deadline for standing still.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use pepo_proto::{Channel, FailureCode, Frame, Frames, MAX_DATA, Operation, data_head};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio_util::codec::{Decoder, Encoder};

use super::{Fault, Result, invalid};

/// How long it may stand still.
const STALL: Duration = Duration::from_secs(120);

/// How much is read at once.
const READ: usize = 128 << 10;

/// How long what nobody reads any more is still taken off the stream.
const DRAIN: Duration = Duration::from_secs(10);

/// A blocking stream.
pub(super) struct Wire {
    stream: UnixStream,
    input: BytesMut,
    payload: Vec<u8>,
    sent: u64,
    received: u64,
    ended: bool,
    current: Bytes,
}

impl Wire {
    /// Before the last wall: settings of a socket are not changed behind it.
    pub fn new(stream: OwnedFd) -> io::Result<Self> {
        let stream = UnixStream::from(stream);
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(STALL))?;
        stream.set_write_timeout(Some(STALL))?;
        Ok(Wire {
            stream,
            input: BytesMut::new(),
            payload: Vec::with_capacity(MAX_DATA),
            sent: 0,
            received: 0,
            ended: false,
            current: Bytes::new(),
        })
    }

    /// What is asked.
    pub fn request(&mut self) -> Result<Operation> {
        match self.frame()? {
            Frame::Request(request) => Ok(request.operation),
            _ => Err(invalid("a request comes first")),
        }
    }

    /// Sends a frame, behind the payload so far.
    pub fn queue(&mut self, frame: Frame) -> Result<()> {
        self.flush()?;
        let mut bytes = BytesMut::new();
        Frames::new().encode(frame, &mut bytes).map_err(|error| invalid(error.to_string()))?;
        self.stream.write_all(&bytes).map_err(|_| Fault::Lost)
    }

    /// Sends payload.
    pub fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let take = bytes.len().min(MAX_DATA - self.payload.len());
            self.payload.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.payload.len() == MAX_DATA {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Sends what was gathered.
    pub fn flush(&mut self) -> Result<()> {
        if self.payload.is_empty() {
            return Ok(());
        }
        let length = self.payload.len();
        let head = data_head(Channel::Out, self.sent, length).map_err(|error| invalid(error.to_string()))?;
        self.sent += length as u64;
        self.stream.write_all(&head).and_then(|()| self.stream.write_all(&self.payload)).map_err(|_| Fault::Lost)?;
        self.payload.clear();
        Ok(())
    }

    /// Ends the payload.
    pub fn eof(&mut self) -> Result<()> {
        self.flush()?;
        self.queue(Frame::Eof { channel: Channel::Out, offset: self.sent })
    }

    /// Some of the payload that is sent here; `None` at its end.
    pub fn receive(&mut self) -> Result<Option<Bytes>> {
        loop {
            if !self.current.is_empty() {
                return Ok(Some(std::mem::take(&mut self.current)));
            }
            if self.ended {
                return Ok(None);
            }
            match self.frame()? {
                Frame::Data { channel: Channel::In, offset, bytes } if offset == self.received => {
                    self.received += bytes.len() as u64;
                    self.current = bytes;
                }
                Frame::Eof { channel: Channel::In, offset } if offset == self.received => self.ended = true,
                _ => return Err(invalid("no payload")),
            }
        }
    }

    /// Takes what still comes off the stream, for a while.
    pub fn drain(&mut self) {
        let began = Instant::now();
        let mut into = vec![0; READ];
        loop {
            let left = DRAIN.saturating_sub(began.elapsed());
            let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let ready = poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&wait));
            if left.is_zero() || !matches!(ready, Ok(1..)) || !matches!(self.stream.read(&mut into), Ok(1..)) {
                return;
            }
        }
    }

    fn frame(&mut self) -> Result<Frame> {
        loop {
            match Frames::new().decode(&mut self.input) {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(error) => return Err(invalid(error.to_string())),
            }
            let before = self.input.len();
            self.input.resize(before + READ, 0);
            let read = self.stream.read(&mut self.input[before..]);
            self.input.truncate(before + read.as_ref().copied().unwrap_or(0));
            match read {
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return Err(Fault::Lost),
            }
        }
    }
}

/// The payload that comes, to be read. What goes wrong with the stream itself is kept for whoever asks after.
pub(super) struct Payload<'a> {
    wire: &'a mut Wire,
    pub fault: Option<Fault>,
}

impl<'a> Payload<'a> {
    pub fn new(wire: &'a mut Wire) -> Self {
        Payload { wire, fault: None }
    }
}

impl Read for Payload<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut bytes = match self.wire.receive() {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Ok(0),
            Err(fault) => {
                self.fault = Some(fault);
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        };
        let take = bytes.len().min(into.len());
        bytes.copy_to_slice(&mut into[..take]);
        self.wire.current = bytes;
        Ok(take)
    }
}

/// The payload that goes, to be written.
impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.put(bytes).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A fault of the stream that a library passed on as an error.
pub(super) fn passed_on(error: &io::Error) -> Option<Fault> {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => Some(Fault::Lost),
        io::ErrorKind::StorageFull => Some(Fault::Failed(FailureCode::NoSpace, error.to_string())),
        _ => None,
    }
}
