//! After a restart: which Sandboxes go on, and what became of the others.
//!
//! Bind first, then this, then the sweep. A claimed Sandbox whose keeper lives is adopted with its commands and Services;
//! one that is not claimed may be anybody's and is swept. A Session that was still waiting for its first Sandbox gets one
//! now. One that comes back and was between two Sandboxes is idle: whoever wanted the next one has to ask again.

use pepo_api::{Ended, Reason, SessionState};
use pepo_sandbox::host::FoundState;

use super::driver::{self, Start};
use super::state::{Cause, Lives, State, Tenure};
use super::{Ask, Published, Session, Sessions, activation, engine_id};
use crate::store::{self, SessionRow, Write};

/// How long the publication of an adopted guest may take.
const SERVES_WITHIN: std::time::Duration = std::time::Duration::from_secs(10);

/// Whether an activation that came to nothing has a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    Yes,
    No,
}

/// Room to come back in, added to a keep-alive that ran while pepod was away.
const GRACE_MS: i64 = 30_000;

impl Sessions {
    /// Takes up every Session that had not ended. Returns the Sandboxes that live on.
    ///
    /// # Errors
    /// The store or the privileged side fails.
    pub async fn resume(&self, same_boot: bool) -> Result<Vec<pepo_sandbox::SandboxId>, super::Error> {
        let found = self.0.host.found().await?;
        let runs = |id: pepo_sandbox::SandboxId| found.iter().find(|one| one.id == id).map(|one| one.state);
        let sandboxes = self.0.store.sandboxes()?;
        let mut kept = Vec::new();
        for row in self.0.store.live_sessions()? {
            if row.state == SessionState::Idle {
                // What it may still owe is none of its business.
                self.idle(row);
                continue;
            }
            // A set-up that was cut off is not gone on with: its Sandbox is in no state that anybody knows.
            let half = row.state == SessionState::Activating && row.spec.setup.is_some();
            let claimed = sandboxes.iter().rev().find_map(|sandbox| match sandbox.claim {
                Some((session, activation)) if session == row.id => Some(Tenure { sandbox: sandbox.id, activation }),
                _ => None,
            });
            match claimed {
                Some(_) if half => self.begin_again(row, Counts::Yes).await?,
                Some(tenure) => {
                    let state = engine_id(tenure.sandbox).and_then(runs);
                    if let Some(id) = self.take_up(row, tenure, state, same_boot).await? {
                        kept.push(id);
                    }
                }
                None => self.begin_again(row, Counts::No).await?,
            }
        }
        for sandbox in &sandboxes {
            // What is not kept has no Session any more, or is not its: the sweep gives it back.
            if let Some(id) = engine_id(sandbox.id)
                && !kept.contains(&id)
            {
                self.bury(id).await;
            }
        }
        Ok(kept)
    }

    async fn take_up(
        &self,
        row: SessionRow,
        tenure: Tenure,
        state: Option<FoundState>,
        same_boot: bool,
    ) -> Result<Option<pepo_sandbox::SandboxId>, super::Error> {
        let Some(id) = engine_id(tenure.sandbox) else { return Ok(None) };
        let session_id = row.id;
        let commands = self.0.store.running_commands(session_id)?;
        let needs = row.spec.needs();
        let (keep_until, was) = (row.keep_until, row.state);
        let (session, asks) = self.revive(row, State::Active(tenure));
        // One that was being stopped goes on being stopped.
        match was {
            SessionState::Terminating => {
                session.0.terminate.send_replace(Some(Cause::plain(Reason::Operator)));
            }
            SessionState::Releasing => {
                // The channel is empty: this is the first one.
                let _ = session.0.asks.try_send(Ask::Release(Cause::plain(Reason::Idle)));
            }
            _ => {}
        }
        let adopted = match state {
            Some(FoundState::Running) => match pepo_sandbox::adopt(&self.0.host, id).await {
                Ok(active) => Some(active),
                Err(error) => {
                    tracing::warn!(session = %session_id, sandbox = %id, %error, "cannot be adopted");
                    None
                }
            },
            _ => None,
        };
        let start = match adopted {
            Some(active) => {
                let ops = active.guest().ops().await.unwrap_or_else(|error| {
                    tracing::warn!(session = %session_id, %error, "the guest does not tell its commands");
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
                tracing::info!(session = %session_id, sandbox = %id, "adopted");
                Start::Adopted(Box::new(active), tenure, self.0.capacity.adopted(needs))
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
                Start::Gone(tenure, cause)
            }
        };
        let alive = matches!(start, Start::Adopted(..));
        let mut published = session.0.published.subscribe();
        driver::spawn(self.clone(), session, asks, start);
        // Callers are let in after this: one that comes back to its command at once must find the guest, or it would wait
        // for the command's end as if the Sandbox were gone.
        let serves = published.wait_for(|now| !alive || now.guest.is_some() || now.ended.is_some());
        let _ = tokio::time::timeout(SERVES_WITHIN, serves).await;
        Ok(alive.then_some(id))
    }

    /// A Session without a Sandbox that can be gone on with.
    async fn begin_again(&self, row: SessionRow, counts: Counts) -> Result<(), super::Error> {
        let first = row.activation <= 1;
        match (row.state, row.spec.lives()) {
            (SessionState::Requested | SessionState::Activating, Lives::Once) => {}
            (SessionState::Requested | SessionState::Activating, Lives::Again) if first => {}
            (SessionState::Terminating, _) => {
                // Its Sandbox is gone and only the last word was not written.
                self.close(row, Ended::new(Reason::Operator, jiff::Timestamp::now())).await;
                return Ok(());
            }
            (_, Lives::Again) => {
                self.idle(row);
                return Ok(());
            }
            (_, Lives::Once) => {
                self.close(row, Ended::new(Reason::Idle, jiff::Timestamp::now())).await;
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
