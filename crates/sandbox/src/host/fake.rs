//! The guest agent as a host process in the place of a VMM, and steps that fail when asked to: behind the feature `fake`,
//! which release builds lack.
//!
//! Everything else is real: the two sides, the socketpair, directories, release, adoption, sweep. It needs no rights, so a
//! privileged side without any may run such Sandboxes and no other. The agent is `$PEPO_GUEST`, or `pepo-guest` beside this
//! program, and acts on nothing outside its own processes.
//!
//! A step fails while the state directory has a file `fault-<step>`, and says what the file says.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use super::Refusal;
use super::work::{Made, Work, failed};
use crate::boot::Step;
use crate::id::{SandboxId, file};
use crate::keeper::{ExitRecord, Left};
use crate::plan::Plan;
use crate::{proc, rights};

/// The agent's socket in its Sandbox's directory.
const SOCKET: &str = "agent.sock";

/// Whether this process has no rights, and so runs nothing but host processes.
pub(super) fn is_bare() -> bool {
    !rustix::process::geteuid().is_root()
}

/// The text of a fault, if that step shall fail.
pub(super) fn fault(state: &std::path::Path, step: Step) -> Option<String> {
    let name = match step {
        Step::Prepare => "prepare",
        Step::Start => "start",
        Step::Hello => "hello",
        Step::Activate => "activate",
        Step::Shutdown => "shutdown",
        Step::Release => "release",
    };
    fs::read_to_string(state.join(format!("fault-{name}"))).ok()
}

impl Work {
    /// Fails if that step shall.
    pub fn may(&self, step: Step) -> Result<(), Refusal> {
        match fault(&self.state_path, step) {
            Some(text) => Err(failed(&step.to_string(), io::Error::other(text.trim().to_owned()))),
            None => Ok(()),
        }
    }

    pub fn prepare_fake(&self, plan: &Plan) -> Result<(), Refusal> {
        self.claim(plan)?;
        fs::create_dir(self.place.directory(plan.id).join(file::KEEP))
            .map_err(|error| failed("make a directory", error))
    }

    /// Starts the agent. A thread waits for its end and writes it down, as a keeper would.
    pub fn start_fake(&self, id: SandboxId, made: &mut Made) -> Result<OwnedFd, Refusal> {
        let directory = self.place.directory(id);
        let log = fs::File::create(directory.join("log")).map_err(|error| failed("make a log", error))?;
        let mut child = Command::new(agent())
            .arg("--listen")
            .arg(directory.join(SOCKET))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0)
            .spawn()
            .map_err(|error| failed("start the agent", error))?;
        let pid = child.id();
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let start = proc::start_time(pid).ok_or_else(gone).map_err(|error| failed("look at the agent", error))?;
        let keeper = proc::open_exact(pid, start).map_err(|error| failed("hold the agent", error))?;
        self.record(id, pid, start)?;
        let keep = directory.join(file::KEEP);
        made.recorder = Some(std::thread::spawn(move || {
            let status = child.wait().ok();
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let record = ExitRecord {
                left: Left::Vmm,
                code: status.and_then(|status| status.code()),
                signal: status.and_then(|status| status.signal()),
                oom_kills: 0,
                shutdown: None,
                stderr: String::new(),
                at_unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            };
            // A directory that is released meanwhile needs no record.
            if let Ok(text) = serde_json::to_vec(&record) {
                let new = keep.join("exit.json.new");
                let _ = fs::write(&new, text).and_then(|()| fs::rename(&new, keep.join(file::EXIT)));
            }
        }));
        Ok(keeper)
    }

    pub fn connect_fake(&self, id: SandboxId) -> Result<OwnedFd, Refusal> {
        let not_there = |error: io::Error| Refusal::NotThere { id, state: format!("cannot be reached ({error})") };
        UnixStream::connect(self.place.directory(id).join(SOCKET)).map(OwnedFd::from).map_err(not_there)
    }

    pub fn is_fake(&self, id: SandboxId) -> bool {
        self.place.directory(id).join("log").exists()
    }

    /// Ends the agent and all that it has started, which no namespace does here, and returns when nobody writes to its
    /// directory any more.
    pub fn end_fake(&self, id: SandboxId, made: &mut Made) {
        let recorded = self.place.read::<crate::held::KeeperRecord>(id, file::KEEPER);
        let unrecorded = || listening_at(&self.place.directory(id).join(SOCKET));
        let found = recorded.map(|record| (record.pid, record.start)).ok().or_else(unrecorded);
        let Some((pid, start)) = found else { return };
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let family = family(pid);
            for (pid, start) in &family {
                if let Ok(pidfd) = proc::open_exact(*pid, *start) {
                    let _ = proc::kill(pidfd.as_fd());
                    proc::wait(pidfd.as_fd(), Duration::from_secs(1));
                }
            }
            if family.is_empty() || proc::start_time(pid) != Some(start) {
                break;
            }
            if Instant::now() > deadline {
                return;
            }
        }
        // The agent is reaped by whoever writes down how it ended; a panic there is in its log.
        if let Some(recorder) = made.recorder.take() {
            let _ = recorder.join();
        }
    }
}

/// The agent that was started to listen there, where this side died before it could write down which. A keeper is born in
/// its Sandbox's cgroup; here the command line is all that leads to it.
fn listening_at(socket: &std::path::Path) -> Option<(u32, u64)> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
    let pid = pids.find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == socket.as_os_str().as_encoded_bytes())
    })?;
    Some((pid, proc::start_time(pid)?))
}

/// A process and all below it, the youngest first, so that none is orphaned before it is seen.
fn family(root: u32) -> Vec<(u32, u64)> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(parent) = found.get(next) {
        let tasks = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
        let below = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        let below: Vec<u32> = below
            .flat_map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
            .filter_map(|pid| pid.parse().ok())
            .collect();
        found.extend(below);
        next += 1;
    }
    found
        .into_iter()
        .rev()
        .filter_map(|pid| Some((pid, proc::start_time(pid)?)))
        .filter(|(pid, _)| proc::read(*pid).is_some())
        .collect()
}

fn agent() -> PathBuf {
    std::env::var_os("PEPO_GUEST").map(PathBuf::from).unwrap_or_else(|| {
        let ours = std::env::current_exe().unwrap_or_default();
        ours.with_file_name("pepo-guest")
    })
}

/// Rights of a privileged side that has none: nothing to keep, and nothing to lose but the way back.
pub(super) fn without_rights() -> io::Result<()> {
    rights::become_user(rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
}
