//! After a restart: which Sandboxes go on, and what became of the others.
//!
//! Bind first, then this, then the sweep. Which Sessions there are is known at once, and callers are let in; a request for
//! one whose Sandbox is still being looked at waits for that alone. A claimed Sandbox whose keeper lives is adopted with its commands and Services;
//! one that is not claimed may be anybody's and is swept. A Session that was still waiting for its first Sandbox gets one
//! now. One that comes back and was between two Sandboxes is idle: whoever wanted the next one has to ask again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures_util::StreamExt as _;
use pepo_api::{Ended, Reason, SessionState};
use pepo_sandbox::host::FoundState;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::driver::{self, Start};
use super::state::{Cause, Lives, State, Tenure};
use super::{Ask, Published, Session, Sessions, activation, engine_id};
use crate::capacity::Place;
use crate::store::{self, CommandRow, SessionRow, Write};

/// How long the publication of an adopted guest may take.
const SERVES_WITHIN: std::time::Duration = std::time::Duration::from_secs(10);

/// Sandboxes that are taken up, or given back, at once: each is a few requests to the privileged side.
const AT_ONCE: usize = 16;

/// Whether an activation that came to nothing has a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    Yes,
    No,
}

/// Room to come back in, added to a keep-alive that ran while pepod was away.
const GRACE_MS: i64 = 30_000;

/// What becomes of a Session that has no Sandbox it could go on in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It gets one.
    Again,
    /// It waits until somebody asks.
    Idle,
    /// It has ended, for this reason.
    Close(Reason),
}

/// Sessions that are being taken up.
#[derive(Debug)]
pub struct Returning {
    tasks: JoinSet<()>,
    /// Recorded Sandboxes that are nobody's any more.
    rest: Vec<pepo_sandbox::SandboxId>,
}

impl Returning {
    /// How many are taken up.
    pub fn count(&self) -> usize {
        self.tasks.len()
    }

    /// Returns when all are taken up, and what was nobody's is given back.
    pub async fn done(mut self, sessions: &Sessions) {
        while let Some(done) = self.tasks.join_next().await {
            if let Err(error) = done {
                tracing::error!(%error, "taking up a Session ended in a panic");
            }
        }
        let rest = futures_util::stream::iter(self.rest);
        rest.for_each_concurrent(AT_ONCE, |id| sessions.bury(id)).await;
    }
}

impl Sessions {
    /// Begins to take up every Session that had not ended. What is found of each is known when this returns, so that it can
    /// be asked for; what its guest runs is looked at meanwhile ([`Session::is_back`]).
    ///
    /// # Errors
    /// The store or the privileged side fails.
    pub async fn resume(&self, same_boot: bool) -> Result<Returning, super::Error> {
        let found = self.0.host.found().await?;
        let runs = |id: pepo_sandbox::SandboxId| found.iter().find(|one| one.id == id).map(|one| one.state);
        let sandboxes = self.0.store.sandboxes()?;
        let claims: HashMap<_, _> = sandboxes
            .iter()
            .filter_map(|row| row.claim.map(|(session, activation)| (session, Tenure { sandbox: row.id, activation })))
            .collect();
        let turns = Arc::new(Semaphore::new(AT_ONCE));
        let (mut tasks, mut kept) = (JoinSet::new(), HashSet::new());
        for row in self.0.store.live_sessions()? {
            if row.state == SessionState::Idle {
                // What it may still owe is none of its business.
                self.idle(row);
                continue;
            }
            // A set-up that was cut off is not gone on with: its Sandbox is in no state that anybody knows.
            let half = row.state == SessionState::Activating && row.spec.setup.is_some();
            let tenure = match claims.get(&row.id) {
                Some(_) if half => {
                    self.begin_again(row, Counts::Yes).await?;
                    continue;
                }
                Some(tenure) => *tenure,
                None => {
                    self.begin_again(row, Counts::No).await?;
                    continue;
                }
            };
            let Some(id) = engine_id(tenure.sandbox) else { continue };
            kept.insert(id);
            // Counted before anybody else is admitted.
            let place = self.0.capacity.adopted(row.spec.needs());
            if let Some(used) = &row.spec.workspace {
                self.0.workspaces.attached_before(tenure.sandbox, used);
            }
            let commands = self.0.store.running_commands(row.id)?;
            let (was, then, keep_until) = (row.state, then(&row), row.keep_until);
            let last = row.last_end.as_ref().map_or_else(|| Cause::plain(Reason::Unknown), super::cause);
            let (session, asks) = self.revive(row, State::Active(tenure));
            session.0.returning.send_replace(true);
            let one = Taken { session, asks, id, tenure, place, commands, was, then, last, keep_until };
            let (sessions, state, turns) = (self.clone(), runs(id), turns.clone());
            tasks.spawn(async move {
                let _turn = turns.acquire().await;
                sessions.take_up(one, state, same_boot).await;
            });
        }
        let rest = sandboxes.iter().filter_map(|row| engine_id(row.id)).filter(|id| !kept.contains(id)).collect();
        Ok(Returning { tasks, rest })
    }

    async fn take_up(&self, taken: Taken, state: Option<FoundState>, same_boot: bool) {
        let Taken { session, asks, id, tenure, place, commands, was, then, last, keep_until } = taken;
        // One that was being stopped goes on being stopped.
        match was {
            SessionState::Terminating => {
                session.0.terminate.send_replace(Some(Cause::plain(Reason::Operator)));
            }
            SessionState::Releasing => {
                // The channel is empty, or full of somebody else's asks: this is one of them.
                let _ = session.0.asks.try_send(Ask::Release(Cause::plain(Reason::Idle)));
            }
            _ => {}
        }
        let adopted = match state {
            Some(FoundState::Running) => match pepo_sandbox::adopt(&self.0.host, id).await {
                Ok(active) => Some(active),
                Err(error) => {
                    tracing::warn!(session = %session.id(), sandbox = %id, %error, "cannot be adopted");
                    None
                }
            },
            _ => None,
        };
        let start = match adopted {
            // Claimed and never told: as if it had not been.
            Some(active) if may_be_unaware(was) && is_unaware(&active).await => {
                tracing::info!(session = %session.id(), sandbox = %id, "was claimed and never activated; another is made");
                self.settle(&active.stop(std::time::Duration::ZERO).await).await;
                drop(place);
                let (state, start) = match then {
                    Then::Idle => (State::Idle(last), Start::Idle),
                    Then::Again | Then::Close(_) => (State::Requested, Start::Again),
                };
                session.0.published.send_modify(|published| {
                    published.state = state;
                    published.activation = tenure.activation.saturating_sub(1);
                });
                start
            }
            // Its stop path had begun, and the guest was asked for what it holds, or could not be: one that was cut off in
            // that may not answer for a long time.
            Some(active) if matches!(was, SessionState::Releasing | SessionState::Terminating) => {
                tracing::info!(session = %session.id(), sandbox = %id, "was being given back; that goes on");
                commands.into_iter().for_each(|command| session.commands().remember(command));
                self.settle(&active.stop(std::time::Duration::ZERO).await).await;
                drop(place);
                let reason = if was == SessionState::Terminating { Reason::Operator } else { Reason::Idle };
                Start::Gone(tenure, Cause::plain(reason))
            }
            Some(active) => {
                let ops = active.guest().ops().await.unwrap_or_else(|error| {
                    tracing::warn!(session = %session.id(), %error, "the guest does not tell its commands");
                    Vec::new()
                });
                for command in commands {
                    let op = pepo_sandbox::proto::OpId(command.id.uuid().into_bytes());
                    session.commands().adopt(&session, command, ops.iter().find(|known| known.op == op));
                }
                if let Some(until) = keep_until {
                    let quiet = until.as_millisecond().max(store::millis(jiff::Timestamp::now())) + GRACE_MS;
                    session.0.activity.send_modify(|activity| {
                        let keep_alive = session.now().spec.keep_alive_seconds as i64 * 1000;
                        activity.ever = true;
                        activity.quiet_since = store::time(quiet - keep_alive);
                    });
                }
                // Its callers come back as soon as the sockets answer.
                session.0.published.send_modify(|published| published.guest = Some(active.guest().clone()));
                tracing::info!(session = %session.id(), sandbox = %id, "adopted");
                Start::Adopted(Box::new(active), tenure, place)
            }
            None => {
                let cause = match state {
                    Some(_) => activation::cause_of(&pepo_sandbox::activate::gone(&self.0.host, id).await),
                    None if same_boot => {
                        Cause::told(Reason::KilledOutside, "nothing of it was left when pepod came back")
                    }
                    None => Cause::told(Reason::HostRestart, "the host was restarted"),
                };
                let cause = if same_boot { cause } else { Cause { reason: Reason::HostRestart, ..cause } };
                for command in commands {
                    session.commands().adopt(&session, command, None);
                }
                // What is left of it, if anything is, is looked for by its id.
                self.bury(id).await;
                Start::Gone(tenure, cause)
            }
        };
        let alive = matches!(start, Start::Adopted(..));
        let mut published = session.0.published.subscribe();
        driver::spawn(self.clone(), session.clone(), asks, start);
        // Callers are let in after this: one that comes back to its command at once must find the guest, or it would wait
        // for the command's end as if the Sandbox were gone.
        let serves = published.wait_for(|now| !alive || now.guest.is_some() || now.ended.is_some());
        let _ = tokio::time::timeout(SERVES_WITHIN, serves).await;
        session.0.returning.send_replace(false);
    }

    /// A Session without a Sandbox that can be gone on with.
    async fn begin_again(&self, row: SessionRow, counts: Counts) -> Result<(), super::Error> {
        match then(&row) {
            Then::Again => {}
            Then::Idle => {
                self.idle(row);
                return Ok(());
            }
            Then::Close(reason) => {
                self.close(row, Ended::new(reason, jiff::Timestamp::now())).await;
                return Ok(());
            }
        }
        let cut = self.0.store.running_commands(row.id)?;
        let begun = row.state == SessionState::Activating && counts == Counts::No;
        let (session, asks) = self.revive(row, State::Requested);
        // The one that was begun and never claimed does not count.
        session
            .0
            .published
            .send_modify(|published| published.activation -= u64::from(begun && published.activation > 0));
        for command in cut {
            session.commands().adopt(&session, command, None);
        }
        driver::spawn(self.clone(), session, asks, Start::Again);
        Ok(())
    }

    /// A Session that waits for a request that wants a Sandbox.
    fn idle(&self, row: SessionRow) {
        let last = row.last_end.as_ref().map_or_else(|| Cause::plain(Reason::Unknown), super::cause);
        let (session, asks) = self.revive(row, State::Idle(last));
        driver::spawn(self.clone(), session, asks, Start::Idle);
    }

    async fn close(&self, mut row: SessionRow, ended: Ended) {
        row.state = SessionState::Terminated;
        row.generation += 1;
        row.ended = Some(ended);
        self.0.store.write_later(Write::Session(Box::new(row))).await;
    }

    fn revive(&self, row: SessionRow, state: State) -> (Session, tokio::sync::mpsc::Receiver<super::Ask>) {
        let activation = state.tenure().map_or(row.activation, |tenure| tenure.activation);
        let published = Published {
            generation: row.generation,
            state,
            spec: std::sync::Arc::new(row.spec),
            activation,
            active_at: row.active_at,
            expires_at: row.expires_at,
            keep_until: row.keep_until,
            guest: None,
            last_end: row.last_end,
            ended: None,
        };
        let (session, asks) = self.handle(row.id, row.app, row.created_at, published);
        session.commands().is_incomplete();
        self.enter(&session);
        (session, asks)
    }
}

/// A Session with a Sandbox of its own, as it is taken up.
struct Taken {
    session: Session,
    asks: tokio::sync::mpsc::Receiver<Ask>,
    id: pepo_sandbox::SandboxId,
    tenure: Tenure,
    place: Place,
    commands: Vec<CommandRow>,
    was: SessionState,
    then: Then,
    last: Cause,
    keep_until: Option<jiff::Timestamp>,
}

/// What becomes of it without its Sandbox.
fn then(row: &SessionRow) -> Then {
    match (row.state, row.spec.lives()) {
        (SessionState::Requested | SessionState::Activating, Lives::Once) => Then::Again,
        (SessionState::Requested | SessionState::Activating, Lives::Again) if row.activation <= 1 => Then::Again,
        // Its Sandbox is gone and only the last word was not written.
        (SessionState::Terminating, _) => Then::Close(Reason::Operator),
        (_, Lives::Again) => Then::Idle,
        (_, Lives::Once) => Then::Close(Reason::Idle),
    }
}

/// Whether the guest may not know yet whose it is: the claim is on the disk before it is told.
fn may_be_unaware(was: SessionState) -> bool {
    matches!(was, SessionState::Requested | SessionState::Activating)
}

async fn is_unaware(active: &pepo_sandbox::Active) -> bool {
    // One that does not answer is treated as one that was told: it may have run something.
    active.guest().hello().await.is_ok_and(|hello| !hello.activated)
}
