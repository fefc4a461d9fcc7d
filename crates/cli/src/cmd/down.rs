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
/// How long a `pepo up` may take to go with its daemon before it is asked too: one that took over a daemon of another's
/// would start it again.
const ALONG: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub struct Down {}

impl Down {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let instance = place.local("down")?;
        // Opened before they are asked to go: a number alone could be somebody else's by then.
        let processes = processes(&instance);
        let supervisor = supervise::holder(&supervise::lock_path(&instance));
        // The daemon first, and a `pepo up` goes with it. A signal to one that is ending already would end its patience with
        // Sandboxes that still run.
        let ended = match tokio::time::timeout(LIMIT, instance.client().down()).await {
            Ok(Ok(())) => true,
            Ok(Err(ClientError::NoDaemon { .. })) if supervisor.is_none() => return nothing_runs(&instance).await,
            // It starts, or is between two starts.
            Ok(Err(ClientError::NoDaemon { .. })) | Err(_) if supervisor.is_some_and(ask_supervisor) => false,
            // It was faster than its answer, or somebody else told it to go.
            Ok(Err(ClientError::Lost(_))) => false,
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => return Err(late()),
        };
        let waited = instance.clone();
        let waiting = tokio::task::spawn_blocking(move || wait(&waited, &processes));
        waiting.await.map_err(|error| Failure::new(format!("waiting failed: {error}")))??;
        let code = if ended { 0 } else { remove_what_is_left(&instance).await? };
        render::say("stopped")?;
        Ok(code)
    }
}

/// No daemon: what a dead one may have left is removed all the same.
async fn nothing_runs(instance: &Instance) -> Outcome<u8> {
    note("no daemon runs");
    if !rustix::process::geteuid().is_root() || !instance.state_directory().exists() {
        return Ok(0);
    }
    remove_what_is_left(instance).await
}

/// Sandboxes outlive a daemon that did not say that it ended them. Whoever cannot look at the host cannot say so either.
async fn remove_what_is_left(instance: &Instance) -> Outcome<u8> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new("the daemon ended without a word: whether Sandboxes go on takes root to see")
            .hint("`sudo pepo sweep`"));
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

fn late() -> Failure {
    Failure::new(format!("it still runs after {} s", LIMIT.as_secs())).hint("`pepo session ls` shows what is left")
}

fn wait(instance: &Instance, processes: &[OwnedFd]) -> Outcome<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let deadline = Instant::now() + LIMIT;
    for process in processes {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: 0 };
        if poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) == Ok(0) {
            return Err(late());
        }
    }
    let (lock, mut goes_along) = (supervise::lock_path(instance), Some(Instant::now() + ALONG));
    loop {
        let supervisor = supervise::holder(&lock);
        if supervisor.is_none() && supervise::listener(&instance.socket()).is_none() {
            break;
        }
        if Instant::now() >= deadline {
            return Err(late());
        }
        if goes_along.take_if(|until| *until <= Instant::now()).is_some() {
            // Where that is not allowed it goes by itself, or not in time.
            supervisor.map(ask_supervisor);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
