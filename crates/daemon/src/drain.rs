//! Draining: nothing new is taken, what runs may finish, and then its Sandbox goes.
//!
//! The operator's, for an upgrade of the host or its going away. A Session is in use while a command of its own runs, a
//! stream is open or a port of it is dialled; Services are no use. One that comes back goes idle, the others end, both with
//! the reason `drain`. Asked for again it takes new work again, whatever has gone meanwhile.
//!
//! ```text
//! taking ──drain──► draining ──nothing runs any more──► drained          both: 503 `draining` to whoever wants something new
//!    ▲                 │  └──the deadline: the rest is stopped──► drained
//!    └─────cancel──────┴───────────────────────────────────────────┘
//! ```

use std::collections::HashSet;
use std::time::Duration;

use pepo_api::{DrainReport, Reason};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::session::state::Cause;
use crate::session::{Session, Sessions};

/// How often it looks who is still in use.
const LOOK: Duration = Duration::from_millis(100);

/// How long the stop paths of what was cut off may take together.
const STOPPED_WITHIN: Duration = Duration::from_secs(75);

/// Takes nothing new, waits for what runs until `deadline` is over, and returns when no Sandbox is left, or when it was
/// cancelled.
pub async fn drain(sessions: &Sessions, deadline: Duration) -> DrainReport {
    sessions.drain();
    let until = Instant::now().checked_add(deadline);
    let mut report = DrainReport { released: 0, cut: 0, left: 0, cancelled: false };
    let (mut going, mut asked) = (JoinSet::new(), HashSet::new());
    let mut stop_at = None;
    tracing::info!(seconds = deadline.as_secs(), "draining: what runs may finish");
    sessions.pool().shut();
    loop {
        let late = until.is_some_and(|until| Instant::now() >= until);
        let holding: Vec<Session> = sessions.all().into_iter().filter(Session::holds).collect();
        report.left = holding.len() as u32;
        if holding.is_empty() {
            break;
        }
        if !sessions.is_draining() {
            report.cancelled = true;
            break;
        }
        for session in holding {
            if (late || !session.is_in_use()) && asked.insert(session.id()) {
                match late {
                    true => report.cut += 1,
                    false => report.released += 1,
                }
                going.spawn(async move { session.put_away(Cause::plain(Reason::Drain)).await });
            }
        }
        let give_up = late.then(|| *stop_at.get_or_insert_with(|| Instant::now() + STOPPED_WITHIN));
        if give_up.is_some_and(|at| Instant::now() >= at) {
            tracing::error!(left = report.left, "not every Sandbox went; their stop paths go on");
            break;
        }
        tokio::time::sleep(LOOK).await;
    }
    if !report.cancelled {
        sessions.pool().emptied(STOPPED_WITHIN).await;
    }
    // What was asked to go goes, whoever waits for it.
    going.detach_all();
    tracing::info!(released = report.released, cut = report.cut, cancelled = report.cancelled, "drained");
    report
}

/// Takes new work again.
pub fn cancel(sessions: &Sessions) {
    sessions.take_again();
    sessions.pool().open();
    tracing::info!("not draining any more");
}
