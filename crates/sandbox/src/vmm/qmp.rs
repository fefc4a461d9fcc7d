//! The control connection to a running QEMU: JSON lines over an inherited socket.
//!
//! Synchronous and small: greet, ask for the state, ask it to quit, read events. The other end is the VMM, which a guest
//! may have taken over, so lines are bounded, waits have deadlines, and what it says is a hint for the cause of an end,
//! never a reason to trust. Caller: the keeper, once it holds no capability.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest line QEMU may send, bytes. Its longest ordinary one, the greeting, has about 200.
const MAX_LINE: usize = 64 * 1024;

/// Events kept until somebody asks. More are dropped: only the first few matter.
const MAX_EVENTS: usize = 64;

/// The control connection.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    read: Vec<u8>,
    events: VecDeque<Event>,
}

/// What QEMU said unasked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It is about to exit.
    Shutdown(Reason),
    /// The guest's kernel reported a panic.
    Panicked,
}

/// Why QEMU shuts down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The guest asked to be powered off.
    GuestShutdown,
    /// The guest asked to be reset, or its kernel panicked: both look the same from here, the console tells.
    GuestReset,
    /// The guest's kernel panicked and said so through a panic device.
    GuestPanic,
    /// Somebody on the host: a signal, or [`Qmp::quit`].
    Host,
    /// Something newer than this list.
    Other,
}

/// Whether the guest runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Its CPUs execute.
    Running,
    /// They do not.
    Stopped,
}

/// Why the control connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The VMM has closed it: it has ended or is about to.
    #[error("the vmm closed its control connection")]
    Closed,
    /// No answer in time.
    #[error("the vmm did not answer on its control connection in time")]
    TimedOut,
    /// Something that is not the protocol.
    #[error("the vmm does not speak the control protocol: {0}")]
    Garbage(&'static str),
    /// It refused a command.
    #[error("the vmm refused {command}")]
    Refused {
        /// The command.
        command: &'static str,
    },
    /// The system's answer.
    #[error("control connection")]
    Io(#[from] io::Error),
}

impl Qmp {
    /// Greets the QEMU at the other end of `stream` and leaves its negotiation mode.
    ///
    /// # Errors
    /// Any [`Error`]; the connection is then useless.
    pub fn greet(stream: UnixStream, patience: Duration) -> Result<Self, Error> {
        let deadline = Instant::now() + patience;
        let mut qmp = Qmp { stream, read: Vec::new(), events: VecDeque::new() };
        if qmp.message(Some(deadline))?.is_none_or(|greeting| greeting.get("QMP").is_none()) {
            return Err(Error::Garbage("no greeting"));
        }
        qmp.execute("qmp_capabilities", deadline)?;
        Ok(qmp)
    }

    /// Whether the guest runs.
    pub fn status(&mut self, patience: Duration) -> Result<Status, Error> {
        let answer = self.execute("query-status", Instant::now() + patience)?;
        match answer.get("running").and_then(Value::as_bool) {
            Some(true) => Ok(Status::Running),
            Some(false) => Ok(Status::Stopped),
            None => Err(Error::Garbage("query-status without running")),
        }
    }

    /// Asks QEMU to end at once. Its answer may be lost with it: [`Error::Closed`] is a success then.
    pub fn quit(&mut self, patience: Duration) -> Result<(), Error> {
        match self.execute("quit", Instant::now() + patience) {
            Ok(_) | Err(Error::Closed) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The next event, without waiting. `None` if there is none now; [`Error::Closed`] once all have been taken and the
    /// VMM has gone.
    pub fn next_event(&mut self) -> Result<Option<Event>, Error> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            match self.message(None)? {
                Some(message) => self.note(&message),
                None => return Ok(None),
            }
        }
    }

    /// The descriptor to poll for reading before [`Qmp::next_event`].
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    fn execute(&mut self, command: &'static str, deadline: Instant) -> Result<Value, Error> {
        let mut line = json!({ "execute": command }).to_string();
        line.push('\n');
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.stream.set_nonblocking(false)?;
        self.stream.set_write_timeout(Some(left))?;
        self.stream.write_all(line.as_bytes()).map_err(closed)?;
        loop {
            let Some(mut message) = self.message(Some(deadline))? else { return Err(Error::TimedOut) };
            if message.get("error").is_some() {
                return Err(Error::Refused { command });
            }
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Value) {
        let event = match message.get("event").and_then(Value::as_str) {
            Some("SHUTDOWN") => Event::Shutdown(match message.pointer("/data/reason").and_then(Value::as_str) {
                Some("guest-shutdown") => Reason::GuestShutdown,
                Some("guest-reset" | "subsystem-reset") => Reason::GuestReset,
                Some("guest-panic") => Reason::GuestPanic,
                Some(reason) if reason.starts_with("host-") => Reason::Host,
                _ => Reason::Other,
            }),
            Some("GUEST_PANICKED" | "GUEST_CRASHLOADED") => Event::Panicked,
            _ => return,
        };
        if self.events.len() < MAX_EVENTS {
            self.events.push_back(event);
        }
    }

    /// One message: waits for it until `deadline`, or not at all.
    fn message(&mut self, deadline: Option<Instant>) -> Result<Option<Value>, Error> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                let message = serde_json::from_slice(&line).map_err(|_| Error::Garbage("a line that is not JSON"))?;
                return Ok(Some(message));
            }
            if self.read.len() > MAX_LINE {
                return Err(Error::Garbage("a line without end"));
            }
            match deadline {
                None => self.stream.set_nonblocking(true)?,
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(Error::TimedOut);
                    }
                    self.stream.set_nonblocking(false)?;
                    self.stream.set_read_timeout(Some(left))?;
                }
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(Error::Closed),
                Ok(count) => self.read.extend(chunk.iter().take(count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => match deadline {
                    None => return Ok(None),
                    Some(_) => return Err(Error::TimedOut),
                },
                Err(error) => return Err(closed(error)),
            }
        }
    }
}

fn closed(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Error::Closed,
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::TimedOut,
        _ => Error::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A VMM that says each of `lines` after one line was read, the first unasked.
    fn vmm(lines: &'static [&'static str]) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut requests = BufReader::new(theirs.try_clone().unwrap());
            for (index, line) in lines.iter().enumerate() {
                if index > 0 && requests.read_line(&mut String::new()).unwrap_or(0) == 0 {
                    return;
                }
                if (&theirs).write_all(line.as_bytes()).is_err() {
                    return;
                }
            }
        });
        ours
    }

    #[test]
    fn events_between_answers_are_kept_in_order_and_the_end_is_told() {
        let mut qmp = Qmp::greet(
            vmm(&[
                "{\"QMP\": {}}\r\n",
                "{\"return\": {}}\r\n",
                "{\"event\": \"GUEST_PANICKED\"}\r\n{\"event\": \"NEW\"}\r\n{\"return\": {\"running\": true}}\r\n",
                "{\"event\": \"SHUTDOWN\", \"data\": {\"guest\": true, \"reason\": \"guest-reset\"}}\r\n",
            ]),
            PATIENCE,
        )
        .unwrap();
        assert_eq!(qmp.status(PATIENCE).unwrap(), Status::Running);
        assert_eq!(qmp.next_event().unwrap(), Some(Event::Panicked));
        assert_eq!(qmp.next_event().unwrap(), None);
        qmp.quit(PATIENCE).unwrap();
        assert_eq!(qmp.next_event().unwrap(), Some(Event::Shutdown(Reason::GuestReset)));
        assert!(matches!(qmp.next_event(), Err(Error::Closed)));
    }

    #[test]
    fn a_line_without_end_is_refused_and_silence_times_out() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || while (&theirs).write_all(&[b'x'; 4096]).is_ok() {});
        assert!(matches!(Qmp::greet(ours, PATIENCE), Err(Error::Garbage(_))));

        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(matches!(Qmp::greet(ours, Duration::from_millis(20)), Err(Error::TimedOut)));
    }
}
