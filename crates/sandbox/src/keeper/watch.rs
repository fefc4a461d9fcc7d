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

use super::console::Ring;
use super::record::{ExitRecord, Left, Shutdown};
use super::{Error, escape, tried};
use crate::cgroup;
use crate::id::file;
use crate::proc;
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

/// A program that is kept.
pub(super) struct Program {
    child: Child,
    pidfd: OwnedFd,
    log: Option<OwnedFd>,
    said: VecDeque<u8>,
}

impl Program {
    pub(super) fn new(child: Child, log: OwnedFd) -> io::Result<Self> {
        let pidfd = proc::open(child.id())?;
        rustix::io::ioctl_fionbio(&log, true)?;
        Ok(Program { child, pidfd, log: Some(log), said: VecDeque::new() })
    }

    /// Reads what it complained, as much as is there; the pipe's end is the end of reading.
    fn listen(&mut self) {
        let mut buffer = [0; 4096];
        while let Some(log) = &self.log {
            match rustix::io::read(log, &mut buffer) {
                Ok(0) => self.log = None,
                Ok(n) => {
                    self.said.extend(&buffer[..n]);
                    let over = self.said.len().saturating_sub(SAID);
                    self.said.drain(..over);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return,
                Err(_) => self.log = None,
            }
        }
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

/// A running Sandbox.
pub(super) struct Kept {
    vmm: Program,
    device: Program,
    console: Option<UnixStream>,
    control: Option<UnixStream>,
    ring: Ring,
    keep: OwnedFd,
    oom: File,
    shutdown: Option<Shutdown>,
}

impl Kept {
    pub(super) fn new(
        vmm: Program,
        device: Program,
        console: UnixStream,
        control: UnixStream,
        ring: File,
        keep: OwnedFd,
        oom: File,
    ) -> Result<Self, Error> {
        console.set_nonblocking(true).map_err(tried("ready the console"))?;
        let ring = Ring::new(ring, Instant::now()).map_err(tried("ready the console ring"))?;
        Ok(Kept { vmm, device, console: Some(console), control: Some(control), ring, keep, oom, shutdown: None })
    }

    /// Keeps until something ends, writes how, and returns this process' exit code.
    pub(super) fn keep(mut self) -> u8 {
        let record = match self.control.take().map(|control| Qmp::greet(control, GREET_WITHIN)) {
            Some(Ok(mut qmp)) => self.watch(&mut qmp),
            greeted => {
                let why = greeted.and_then(Result::err).map(|error| error.to_string()).unwrap_or_default();
                self.ended_early(&why)
            }
        };
        match self.write(&record) {
            Ok(()) => 0,
            Err(_) => 1,
        }
    }

    /// The loop: whatever ends first ends the Sandbox.
    fn watch(&mut self, qmp: &mut Qmp) -> ExitRecord {
        let mut control_open = true;
        let mut give_up: Option<Instant> = None;
        loop {
            let ready = self.wait(control_open.then(|| qmp.stream()), give_up);
            self.copy_console();
            self.vmm.listen();
            self.device.listen();
            if control_open {
                control_open = self.hear(qmp);
            }
            if self.shutdown.is_some() && give_up.is_none() {
                give_up = Some(Instant::now() + SHUT_DOWN_WITHIN);
            }
            if let Some(status) = self.vmm.status() {
                self.last_words(qmp);
                return self.record(Left::Vmm, Some(status));
            }
            if let Some(status) = self.device.status() {
                // Without it no one reaches the guest again. If the VMM ends at the same time, its end says more.
                proc::wait(self.vmm.pidfd.as_fd(), BESIDE);
                return match self.vmm.status() {
                    Some(vmm) => {
                        self.last_words(qmp);
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
        let mut fds = vec![PollFd::new(&self.vmm.pidfd, PollFlags::IN), PollFd::new(&self.device.pidfd, PollFlags::IN)];
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        fds.extend(self.console.as_ref().map(|fd| readable(fd.as_fd())));
        fds.extend(control.map(|fd| readable(fd.as_fd())));
        fds.extend(
            [&self.vmm, &self.device].into_iter().filter_map(|one| one.log.as_ref()).map(|fd| readable(fd.as_fd())),
        );
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

    /// Takes what the VMM says; whether it can say more.
    fn hear(&mut self, qmp: &mut Qmp) -> bool {
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

    /// What was on its way when the VMM ended.
    fn last_words(&mut self, qmp: &mut Qmp) {
        let until = Instant::now() + LAST_WORDS;
        self.hear(qmp);
        while self.console.is_some() && Instant::now() < until {
            self.copy_console();
            if self.console.is_some() && self.wait(None, Some(until)).is_err() {
                return;
            }
        }
    }

    fn record(&mut self, left: Left, status: Option<ExitStatus>) -> ExitRecord {
        use std::os::unix::process::ExitStatusExt;
        let stderr = match left {
            Left::Device => self.device.text(),
            Left::Vmm | Left::Keeper => self.vmm.text(),
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        ExitRecord {
            left,
            code: status.and_then(|status| status.code()),
            signal: status.and_then(|status| status.signal()),
            oom_kills: cgroup::oom_kills(&self.oom).unwrap_or(0),
            shutdown: self.shutdown,
            stderr,
            at_unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn write(&self, record: &ExitRecord) -> io::Result<()> {
        let new = "exit.json.new";
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(&self.keep, new, flags, Mode::from_raw_mode(0o600))?);
        file.write_all(&serde_json::to_vec(record)?)?;
        Ok(rustix::fs::renameat(&self.keep, new, &self.keep, file::EXIT)?)
    }
}
