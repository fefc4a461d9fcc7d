//! How a keeper keeps: copies the console into its ring, hears what the VMM says, and writes how it ended.
//!
//! By now the process has no right at all. Everything it reads may have been made by a guest.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::calls::Calls;
use super::console::Ring;
use serde::Serialize;

use super::record::{ExitRecord, Left, Shutdown};
use super::start::Started;
use super::{Error, escape, tried};
use crate::cgroup;
use crate::id::file;
use crate::proc;
use crate::vmm::firecracker::api::{self, Api};
use crate::vmm::firecracker::{self, GuestMemory, STATISTICS_SECONDS};
use crate::vmm::qmp::{self, Qmp};

/// Bytes of a program's complaints that are kept.
const SAID: usize = 4096;

/// How long the VMM may take to greet: it has said that it has something to say.
const GREET_WITHIN: Duration = Duration::from_secs(20);

/// How long the console and the control connection are still read after the VMM's end. Both are local and closed by then.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// How much later than the device the VMM may end for its end to be the one that is told.
const BESIDE: Duration = Duration::from_millis(100);

/// How long the VMM may go on after it said that it shuts down.
const SHUT_DOWN_WITHIN: Duration = Duration::from_secs(10);

/// How long a VMM may take to start its guest: loading the kernel, and on a host with thousands of threads making a VM,
/// takes tenths of a second.
const BEGIN_WITHIN: Duration = Duration::from_secs(60);

/// How often the guest's memory is asked for.
const STATISTICS_EVERY: Duration = Duration::from_secs(STATISTICS_SECONDS as u64);

/// How long sending the question may take: it fits into an empty socket.
const ASK_WITHIN: Duration = Duration::from_millis(100);

/// How long the answer may take. The VMM answers between two things it does for its guest.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// A program that is kept.
pub(super) struct Program {
    child: Child,
    pidfd: OwnedFd,
    logs: Vec<OwnedFd>,
    said: VecDeque<u8>,
}

impl Program {
    pub(super) fn new(child: Child, logs: Vec<OwnedFd>) -> io::Result<Self> {
        let pidfd = proc::open(child.id())?;
        for log in &logs {
            rustix::io::ioctl_fionbio(log, true)?;
        }
        Ok(Program { child, pidfd, logs, said: VecDeque::new() })
    }

    /// Reads what it complained, as much as is there; a pipe's end is the end of reading it.
    fn listen(&mut self) {
        let mut buffer = [0; 4096];
        let said = &mut self.said;
        self.logs.retain(|log| {
            loop {
                match rustix::io::read(log, &mut buffer) {
                    Ok(0) => return false,
                    Ok(n) => {
                        said.extend(&buffer[..n]);
                        let over = said.len().saturating_sub(SAID);
                        said.drain(..over);
                        // One that writes without end gets a buffer a turn.
                        if n == buffer.len() {
                            return true;
                        }
                    }
                    Err(rustix::io::Errno::INTR) => {}
                    Err(rustix::io::Errno::AGAIN) => return true,
                    Err(_) => return false,
                }
            }
        });
    }

    fn text(&mut self) -> String {
        self.listen();
        let (bytes, _) = (self.said.make_contiguous(), ());
        escape(String::from_utf8_lossy(bytes).trim(), SAID)
    }

    fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }
}

/// What a program that failed to start said, without waiting for more.
pub(super) fn said(log: BorrowedFd<'_>) -> String {
    let mut text = Vec::new();
    if rustix::io::ioctl_fionbio(log, true).is_ok()
        && let Ok(log) = log.try_clone_to_owned()
    {
        // It ends with `WouldBlock` or at the pipe's end: either way, what was there has been read.
        let _ = File::from(log).take(SAID as u64).read_to_end(&mut text);
    }
    escape(String::from_utf8_lossy(&text).trim(), SAID)
}

/// The vsock device beside a VMM.
pub(super) struct Device {
    pub program: Program,
    pub calls: Calls,
}

/// The control connection before it is spoken on.
pub(super) enum Control {
    /// QEMU's, ungreeted.
    Qmp(UnixStream),
    /// Firecracker's, configured and not started.
    Api(Api),
}

/// The control connection of a running VMM.
enum Line {
    Qmp(Qmp),
    Api {
        api: Api,
        /// When the statistics are asked for next, or until when they are waited for.
        next: Instant,
        asked: bool,
    },
    /// Closed, or never heard of again.
    Gone,
}

/// A running Sandbox.
pub(super) struct Kept {
    vmm: Program,
    device: Option<Device>,
    console: Option<UnixStream>,
    control: Option<Control>,
    ring: Ring,
    keep: OwnedFd,
    oom: File,
    shutdown: Option<Shutdown>,
}

impl Kept {
    pub(super) fn new(started: Started, ring: File, keep: OwnedFd, oom: File) -> Result<Self, Error> {
        let Started { vmm, device, console, control } = started;
        console.set_nonblocking(true).map_err(tried("ready the console"))?;
        let ring = Ring::new(ring, Instant::now()).map_err(tried("ready the console ring"))?;
        Ok(Kept { vmm, device, console: Some(console), control: Some(control), ring, keep, oom, shutdown: None })
    }

    /// Starts a guest that has not begun by itself.
    pub(super) fn begin(&mut self) -> Result<(), Error> {
        let Some(Control::Api(api)) = &mut self.control else { return Ok(()) };
        let Err(refused) = api.call(&firecracker::start(), BEGIN_WITHIN) else { return Ok(()) };
        proc::wait(self.vmm.pidfd.as_fd(), LAST_WORDS);
        let (why, said) = (crate::chain(&refused), self.vmm.text());
        let ended = self.vmm.status().map(|status| format!("; {status}")).unwrap_or_default();
        Err(Error::new("start the guest", io::Error::other(format!("{why}{ended}; {said}"))))
    }

    /// Keeps until something ends, writes how, and returns this process' exit code.
    pub(super) fn keep(mut self) -> u8 {
        let record = match self.control.take() {
            Some(Control::Qmp(control)) => match Qmp::greet(control, GREET_WITHIN) {
                Ok(qmp) => self.watch(Line::Qmp(qmp)),
                Err(why) => self.ended_early(&why.to_string()),
            },
            Some(Control::Api(api)) => {
                let next = Instant::now() + STATISTICS_EVERY;
                self.watch(Line::Api { api, next, asked: false })
            }
            None => self.ended_early(""),
        };
        match self.write(&record, file::EXIT) {
            Ok(()) => 0,
            Err(_) => 1,
        }
    }

    /// The loop: whatever ends first ends the Sandbox.
    fn watch(&mut self, mut line: Line) -> ExitRecord {
        let mut give_up: Option<Instant> = None;
        loop {
            let asks = match &line {
                Line::Api { next, .. } => Some(*next),
                Line::Qmp(_) | Line::Gone => None,
            };
            let calls = self.device.as_ref().and_then(|device| device.calls.until());
            let until = [asks, give_up, calls].into_iter().flatten().min();
            let ready = self.wait(line.stream(), until);
            self.copy_console();
            self.vmm.listen();
            if let Some(device) = &mut self.device {
                device.program.listen();
                device.calls.tend();
            }
            self.hear(&mut line);
            if self.shutdown.is_some() && give_up.is_none() {
                give_up = Some(Instant::now() + SHUT_DOWN_WITHIN);
            }
            if let Some(status) = self.vmm.status() {
                self.last_words(&mut line);
                return self.record(Left::Vmm, Some(status));
            }
            if let Some(status) = self.device.as_mut().and_then(|device| device.program.status()) {
                // Without it no one reaches the guest again. If the VMM ends at the same time, its end says more.
                proc::wait(self.vmm.pidfd.as_fd(), BESIDE);
                return match self.vmm.status() {
                    Some(vmm) => {
                        self.last_words(&mut line);
                        self.record(Left::Vmm, Some(vmm))
                    }
                    None => self.record(Left::Device, Some(status)),
                };
            }
            if give_up.is_some_and(|at| Instant::now() >= at) {
                return self.record(Left::Vmm, None);
            }
            if let Err(error) = ready {
                return ExitRecord { stderr: error.to_string(), ..self.record(Left::Keeper, None) };
            }
        }
    }

    fn ended_early(&mut self, why: &str) -> ExitRecord {
        proc::wait(self.vmm.pidfd.as_fd(), LAST_WORDS);
        self.copy_console();
        match self.vmm.status() {
            Some(status) => self.record(Left::Vmm, Some(status)),
            None => ExitRecord { stderr: why.to_owned(), ..self.record(Left::Keeper, None) },
        }
    }

    /// Waits until something can be read or has ended.
    fn wait(&self, control: Option<&UnixStream>, until: Option<Instant>) -> io::Result<()> {
        let device = self.device.as_ref();
        let programs = || std::iter::once(&self.vmm).chain(device.map(|device| &device.program));
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds: Vec<PollFd<'_>> = programs().map(|one| readable(one.pidfd.as_fd())).collect();
        fds.extend(self.console.as_ref().map(|fd| readable(fd.as_fd())));
        fds.extend(control.map(|fd| readable(fd.as_fd())));
        fds.extend(programs().flat_map(|one| &one.logs).map(|fd| readable(fd.as_fd())));
        fds.extend(device.into_iter().flat_map(|device| device.calls.fds()).map(readable));
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let time = left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
        match poll(&mut fds, time.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Copies what the console has now. A guest that writes without end gets one buffer a turn, so that an end is noticed.
    fn copy_console(&mut self) {
        let mut buffer = [0; 64 * 1024];
        let Some(console) = &mut self.console else { return };
        match console.read(&mut buffer) {
            Ok(0) => self.console = None,
            // A full disk of the host loses console, not the Sandbox.
            Ok(n) => drop(self.ring.take(&buffer[..n], Instant::now())),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => self.console = None,
        }
    }

    /// Takes what the VMM says.
    fn hear(&mut self, line: &mut Line) {
        let open = match line {
            Line::Qmp(qmp) => self.hear_events(qmp),
            Line::Api { api, next, asked } => self.hear_statistics(api, next, asked),
            Line::Gone => return,
        };
        if !open {
            *line = Line::Gone;
        }
    }

    /// Whether it can say more.
    fn hear_events(&mut self, qmp: &mut Qmp) -> bool {
        loop {
            match qmp.next_event() {
                Ok(Some(qmp::Event::Shutdown(reason))) => {
                    self.shutdown.get_or_insert(reason.into());
                }
                Ok(Some(qmp::Event::Panicked)) => self.shutdown = Some(Shutdown::GuestPanic),
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Asks for the guest's memory now and then, and writes down what is said. One that does not answer is asked no more;
    /// whether the guest lives is not told from this.
    fn hear_statistics(&mut self, api: &mut Api, next: &mut Instant, asked: &mut bool) -> bool {
        let call = firecracker::statistics();
        if *asked {
            let answer = match api.take(&call) {
                Ok(Some(answer)) => Some(answer),
                Ok(None) => return Instant::now() < *next,
                // No driver in the guest yet, or none at all.
                Err(api::Error::Refused { .. }) => None,
                Err(_) => return false,
            };
            if let Some(memory) = answer.and_then(|answer| GuestMemory::read(&answer)) {
                // A full disk of the host loses a number, not the Sandbox.
                let _ = self.write(&memory, file::MEMORY);
            }
            *asked = false;
            *next = Instant::now() + STATISTICS_EVERY;
        } else if Instant::now() >= *next {
            if api.ask(&call, ASK_WITHIN).is_err() {
                return false;
            }
            *asked = true;
            *next = Instant::now() + ANSWER_WITHIN;
        }
        true
    }

    /// What was on its way when the VMM ended.
    fn last_words(&mut self, line: &mut Line) {
        let until = Instant::now() + LAST_WORDS;
        self.hear(line);
        while self.console.is_some() && Instant::now() < until {
            self.copy_console();
            if self.console.is_some() && self.wait(None, Some(until)).is_err() {
                return;
            }
        }
    }

    fn record(&mut self, left: Left, status: Option<ExitStatus>) -> ExitRecord {
        use std::os::unix::process::ExitStatusExt;
        let mut stderr = match (left, &mut self.device) {
            (Left::Device, Some(device)) => device.program.text(),
            _ => self.vmm.text(),
        };
        let code = status.and_then(|status| status.code());
        if self.device.is_none() && left == Left::Vmm {
            // A VMM that has no events ends well when its guest restarts, and only then: it is never asked to.
            if code == Some(0) {
                self.shutdown.get_or_insert(Shutdown::GuestReset);
            }
            if let Some(meaning) = code.and_then(firecracker::meaning) {
                stderr = format!("{meaning}; {stderr}");
            }
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        ExitRecord {
            left,
            code,
            signal: status.and_then(|status| status.signal()),
            oom_kills: cgroup::oom_kills(&self.oom).unwrap_or(0),
            shutdown: self.shutdown,
            stderr,
            at_unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn write<T: Serialize>(&self, record: &T, name: &str) -> io::Result<()> {
        let new = format!("{name}.new");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(&self.keep, &new, flags, Mode::from_raw_mode(0o600))?);
        file.write_all(&serde_json::to_vec(record)?)?;
        Ok(rustix::fs::renameat(&self.keep, new, &self.keep, name)?)
    }
}

impl Line {
    fn stream(&self) -> Option<&UnixStream> {
        match self {
            Line::Qmp(qmp) => Some(qmp.stream()),
            Line::Api { api, asked: true, .. } => Some(api.stream()),
            Line::Api { .. } | Line::Gone => None,
        }
    }
}
