//! `pepo down`: asks for the end and waits until nothing is left.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use clap::Args;
use pepo_api::SweepReport;
use pepo_api::client::ClientError;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::fail::{Failure, Outcome, note};
use crate::place::{Instance, Place};
use crate::{render, supervise, tool};

/// Every Sandbox is ended in order before the daemon goes.
const LIMIT: Duration = Duration::from_secs(120);

#[derive(Debug, Args)]
pub struct Down {}

impl Down {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let instance = place.local("down")?;
        // Opened before they are asked to go: a number alone could be somebody else's by then.
        let processes = processes(&instance);
        let supervisor = supervise::holder(&supervise::lock_path(&instance));
        let asked = supervisor.is_some_and(ask_supervisor);
        if !asked {
            match instance.client().down().await {
                Ok(()) => {}
                Err(ClientError::NoDaemon { .. }) if supervisor.is_none() => return nothing_runs(&instance).await,
                // It was faster than its answer.
                Err(ClientError::Lost(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let waiting = tokio::task::spawn_blocking(move || wait(&instance, &processes));
        waiting.await.map_err(|error| Failure::new(format!("waiting failed: {error}")))??;
        render::say("stopped")?;
        Ok(0)
    }
}

/// No daemon: what a dead one may have left is removed all the same.
async fn nothing_runs(instance: &Instance) -> Outcome<u8> {
    note("no daemon runs");
    if !rustix::process::geteuid().is_root() || !instance.state_directory().exists() {
        return Ok(0);
    }
    let report: SweepReport = tool::ask(instance, &["sweep", "--json"]).await?;
    let (gone, stays): (Vec<_>, Vec<_>) = report.leftovers.iter().partition(|one| one.removed);
    if !gone.is_empty() {
        note(format!("removed {} things that a dead one had left", gone.len()));
    }
    if stays.is_empty() {
        return Ok(0);
    }
    Err(Failure::new(format!("{} things stay that a dead one has left", stays.len())).hint("`pepo sweep` shows them"))
}

/// The daemon's two processes, as far as one may look at them.
fn processes(instance: &Instance) -> Vec<OwnedFd> {
    let Some(daemon) = supervise::listener(&instance.socket()) else { return Vec::new() };
    let parent = std::fs::read_to_string(format!("/proc/{}/status", daemon.as_raw_nonzero()))
        .ok()
        .and_then(|status| status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse::<i32>().ok()))
        .filter(|parent| name_of(*parent).as_deref() == Some("pepo-host"))
        .and_then(Pid::from_raw);
    [Some(daemon), parent].into_iter().flatten().filter_map(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()).collect()
}

fn name_of(pid: i32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim().to_owned())
}

/// Asks a `pepo up` to end everything; false where that is not allowed, and the daemon is asked instead.
fn ask_supervisor(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
    // Looked at after opening: what is open now cannot become another.
    name_of(pid.as_raw_nonzero().get()).as_deref() == Some("pepo") && pidfd_send_signal(&fd, Signal::TERM).is_ok()
}

fn wait(instance: &Instance, processes: &[OwnedFd]) -> Outcome<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let deadline = Instant::now() + LIMIT;
    let late = || {
        Failure::new(format!("it still runs after {} s", LIMIT.as_secs())).hint("`pepo session ls` shows what is left")
    };
    for process in processes {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: 0 };
        if poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) == Ok(0) {
            return Err(late());
        }
    }
    let lock = supervise::lock_path(instance);
    while supervise::holder(&lock).is_some() || supervise::listener(&instance.socket()).is_some() {
        if Instant::now() >= deadline {
            return Err(late());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
