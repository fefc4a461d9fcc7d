//! What a driver has under way, and what comes of it.

use std::time::Duration;

use pepo_api::Reason;
use pepo_sandbox::{Active, Exit};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::session::Error;
use crate::session::activation::Activated;
use crate::session::state::Cause;
use crate::session::table::Room;

/// How often a guest is asked whether it is there.
const BEAT: Duration = Duration::from_secs(5);

/// What is under way.
pub(super) enum Work {
    Nothing,
    /// It looks for room for a Sandbox; whoever asked for it is answered.
    Seeking {
        task: AbortOnDropHandle<Result<Room, Error>>,
        asked: Vec<oneshot::Sender<Result<u64, Error>>>,
    },
    Booting {
        task: JoinHandle<Result<Activated, Cause>>,
        cancel: CancellationToken,
    },
    Serving {
        active: Active,
        silence: AbortOnDropHandle<()>,
    },
    Stopping(JoinHandle<Exit>),
}

pub(super) enum Progress {
    Sought(Result<Room, Error>),
    Booted(Result<Activated, Cause>),
    Ended,
    Silent,
    Stopped(Box<Exit>),
    /// The stop path itself failed: what it held is buried from outside.
    Stuck,
}

/// Returns when the work under way has come to something. Never, where there is none.
pub(super) async fn progress(work: &mut Work) -> Progress {
    match work {
        Work::Nothing => std::future::pending().await,
        Work::Seeking { task, .. } => Progress::Sought(task.await.unwrap_or_else(|error| {
            tracing::error!(%error, "looking for room ended in a panic");
            Err(Error::NoSandbox("an internal error; see the log".into()))
        })),
        Work::Booting { task, .. } => Progress::Booted(task.await.unwrap_or_else(|error| {
            tracing::error!(%error, "making a Sandbox ended in a panic");
            Err(Cause::told(Reason::SetupFailed, "an internal error; see the log"))
        })),
        Work::Serving { active, silence } => tokio::select! {
            biased;
            () = active.wait() => Progress::Ended,
            _ = silence => Progress::Silent,
        },
        Work::Stopping(task) => match task.await {
            Ok(exit) => Progress::Stopped(Box::new(exit)),
            Err(error) => {
                tracing::error!(%error, "stopping a Sandbox ended in a panic");
                Progress::Stuck
            }
        },
    }
}

/// Returns when the guest has not answered for that long. While it answers its clock is kept right.
pub(super) async fn silence(guest: pepo_sandbox::guest::Guest, most: Duration) {
    let mut heard = tokio::time::Instant::now();
    let beat = BEAT.min(most / 4).max(Duration::from_millis(10));
    // Not beside the first command, for which somebody waits.
    let mut pause = beat.min(Duration::from_secs(1));
    loop {
        tokio::time::sleep(pause).await;
        pause = beat;
        match tokio::time::timeout(most, guest.ping()).await {
            // A guest that refuses for want of streams is there.
            Ok(Ok(()) | Err(pepo_sandbox::guest::Error::Busy)) => {
                heard = tokio::time::Instant::now();
                // One that does not say what time it is, as an agent of an earlier release, is there all the same.
                if let Ok(Ok(Some(nanos))) = tokio::time::timeout(beat, guest.keep_clock()).await {
                    tracing::info!(ms = nanos / 1_000_000, "a guest's clock was put right");
                }
            }
            Ok(Err(_)) | Err(_) if heard.elapsed() >= most => return,
            Ok(Err(_)) | Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use pepo_sandbox::guest::{Connector, Guest};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_never_answers_is_found_out_when_it_may_be_silent_no_longer() {
        let guest = Guest::new(Connector::vsock(std::future::pending));
        let (most, began) = (Duration::from_secs(10), tokio::time::Instant::now());
        silence(guest, most).await;
        let took = began.elapsed();
        assert!((most..most * 3 / 2).contains(&took), "{took:?}");
    }
}
