//! Firecracker's API as a client sees it: one connection, one call at a time, every wait with an end.
//!
//! The other end is a VMM that a guest may have taken over: heads and bodies are bounded, only the status decides, and
//! texts are shown escaped and never understood. It answers one call at a time on one thread, and takes ten connections,
//! so this one is kept. Caller: the keeper.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

use super::Call;
use crate::keeper::escape;

/// The longest head of an answer, bytes. An ordinary one has 100.
const HEAD: usize = 4096;

/// The longest body of an answer, bytes; the longest known, the statistics, has 1 KiB.
const BODY: usize = 64 * 1024;

/// The longest body of a call, by Firecracker's own limit.
pub const LONGEST_CALL: usize = 51_200;

/// Bytes of a refusal's text that are kept.
const REASON: usize = 400;

/// Why a call was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It was refused.
    #[error("{call}: the vmm refused with status {status}: {reason}")]
    Refused {
        /// Method and path.
        call: String,
        /// The HTTP status.
        status: u16,
        /// What it said, safe to show.
        reason: String,
    },
    /// No whole answer in time: the VMM hangs, or is busy with something it should not be doing.
    #[error("{call}: no answer in {} ms", within.as_millis())]
    TimedOut {
        /// Method and path.
        call: String,
        /// The deadline that passed.
        within: Duration,
    },
    /// The connection ended: the VMM has ended or is about to.
    #[error("{call}: the vmm closed its connection")]
    Closed {
        /// Method and path.
        call: String,
    },
    /// What came is not HTTP as Firecracker speaks it.
    #[error("{call}: the vmm answered what is not an answer: {what}")]
    Garbage {
        /// Method and path.
        call: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The system's answer.
    #[error("{call}")]
    Io {
        /// Method and path.
        call: String,
        /// Why not.
        source: io::Error,
    },
}

/// The connection.
#[derive(Debug)]
pub struct Api {
    stream: UnixStream,
    read: Vec<u8>,
}

/// An answer.
#[derive(Debug, PartialEq)]
struct Answer {
    status: u16,
    body: Vec<u8>,
}

impl Api {
    /// Over a connected stream.
    ///
    /// # Errors
    /// It cannot be made non-blocking.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Api { stream, read: Vec::new() })
    }

    /// The stream, to be waited for.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Makes a call and waits for its success: `204`, or `200` with a body, which is returned (`Null` where it is not JSON).
    ///
    /// # Errors
    /// [`Error`]; after anything but a refusal the connection is of no more use.
    pub fn call(&mut self, call: &Call, within: Duration) -> Result<Value, Error> {
        let deadline = Instant::now() + within;
        self.send(call, deadline, within)?;
        loop {
            if let Some(done) = self.take(call)? {
                return Ok(done);
            }
            self.wait(PollFlags::IN, call, deadline, within)?;
        }
    }

    /// Sends a call whose answer is taken later, with [`Api::take`].
    ///
    /// # Errors
    /// As [`Api::call`].
    pub fn ask(&mut self, call: &Call, within: Duration) -> Result<(), Error> {
        self.send(call, Instant::now() + within, within)
    }

    /// The answer to the call under way, if it is whole by now. Never waits.
    ///
    /// # Errors
    /// As [`Api::call`].
    pub fn take(&mut self, call: &Call) -> Result<Option<Value>, Error> {
        let mut chunk = [0; 4096];
        loop {
            if let Some((answer, length)) =
                parse(&self.read).map_err(|what| Error::Garbage { call: name(call), what })?
            {
                self.read.drain(..length);
                return success(answer, call).map(Some);
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(Error::Closed { call: name(call) }),
                Ok(count) => self.read.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                    return Err(Error::Closed { call: name(call) });
                }
                Err(source) => return Err(Error::Io { call: name(call), source }),
            }
        }
    }

    fn send(&mut self, call: &Call, deadline: Instant, within: Duration) -> Result<(), Error> {
        let bytes = encode(call);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.wait(PollFlags::OUT, call, deadline, within)?;
                }
                Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                    return Err(Error::Closed { call: name(call) });
                }
                Err(source) => return Err(Error::Io { call: name(call), source }),
            }
        }
        Ok(())
    }

    fn wait(&self, flags: PollFlags, call: &Call, deadline: Instant, within: Duration) -> Result<(), Error> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::TimedOut { call: name(call), within });
        }
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.stream, flags)], Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::Io { call: name(call), source: error.into() }),
        }
    }
}

fn name(call: &Call) -> String {
    format!("{} {}", call.method, call.path)
}

/// The call on the wire. The length is always said: Firecracker takes no other form of body.
fn encode(call: &Call) -> Vec<u8> {
    let body = call.body.as_ref().map(Value::to_string).unwrap_or_default();
    let mut text = format!("{} {} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n", call.method, call.path);
    if call.body.is_some() {
        text.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()));
    }
    text.push_str("\r\n");
    text.push_str(&body);
    text.into_bytes()
}

/// One answer at the beginning of `bytes` and its length, if it is whole. An error text that is cut short by a raw line end
/// in it (which Firecracker's own parser makes) is no matter: the length says where it ends.
fn parse(bytes: &[u8]) -> Result<Option<(Answer, usize)>, &'static str> {
    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        return if bytes.len() > HEAD { Err("its head has no end") } else { Ok(None) };
    };
    if end > HEAD {
        return Err("its head is too long");
    }
    let head = std::str::from_utf8(&bytes[..end]).map_err(|_| "its head is not text")?;
    let mut lines = head.split("\r\n");
    let first = lines.next().unwrap_or_default();
    let status = first.strip_prefix("HTTP/1.1 ").or_else(|| first.strip_prefix("HTTP/1.0 ")).ok_or("no status line")?;
    let status: u16 = status.get(..3).and_then(|code| code.parse().ok()).ok_or("no status")?;
    let mut length = 0;
    for line in lines {
        let Some((field, value)) = line.split_once(':') else { return Err("a header line without a colon") };
        if field.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().map_err(|_| "a length that is no number")?;
        }
    }
    if length > BODY {
        return Err("its body is too long");
    }
    let from = end + 4;
    match bytes.get(from..from + length) {
        // A hundred-series answer is followed by the answer proper.
        Some(_) if status < 200 => {
            Ok(parse(&bytes[from + length..])?.map(|(answer, more)| (answer, from + length + more)))
        }
        Some(body) => Ok(Some((Answer { status, body: body.to_vec() }, from + length))),
        None => Ok(None),
    }
}

fn success(answer: Answer, call: &Call) -> Result<Value, Error> {
    if matches!(answer.status, 200 | 204) {
        return Ok(serde_json::from_slice(&answer.body).unwrap_or(Value::Null));
    }
    let text = String::from_utf8_lossy(&answer.body);
    let said = serde_json::from_slice::<Value>(&answer.body).ok();
    let said = said.as_ref().and_then(|body| body.get("fault_message")?.as_str()).unwrap_or(text.trim());
    Err(Error::Refused { call: name(call), status: answer.status, reason: escape(said, REASON) })
}

#[cfg(test)]
mod tests;
