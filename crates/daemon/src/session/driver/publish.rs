//! Telling where a Session is: to the store first, then to everybody who looks, and in the feed.

use std::sync::Arc;

use pepo_api::{Ended, SessionState};

use super::{Driver, Work};
use crate::session::state::{State, Tenure};
use crate::session::{Published, ended};
use crate::store::Write;

/// A deadline in the store may lag behind by this much; less is not worth a write.
const COARSE: i64 = 2_000;

/// When a change has to be on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disk {
    /// Before whatever is written after it; an end, and its beginning, at once.
    InTime,
    /// At once.
    First,
}

impl Driver {
    /// Something began or ended to use it: the keep-alive's deadline is durable, its second is not.
    pub(super) async fn quieted(&mut self) {
        let keep = self.keep_until();
        self.session.0.published.send_if_modified(|now| {
            now.keep_until = keep;
            false
        });
        let moved = match (self.keep_stored, keep) {
            (Some(stored), Some(now)) => (now.as_millisecond() - stored.as_millisecond()).abs() > COARSE,
            (None, None) => false,
            // In use: what is stored is in the past by the time it matters, and adoption adds to it.
            (_, None) => false,
            (None, Some(_)) => true,
        };
        if moved && matches!(self.session.now().state, State::Active(_)) {
            self.keep_stored = keep;
            self.sessions.0.store.write_later(Write::Session(Box::new(self.session.row()))).await;
        }
    }

    /// Publishes a change that the store has, or will have before anything that comes after it.
    pub(super) async fn publish(&mut self, change: impl FnOnce(&mut Published)) {
        self.publish_on(Disk::InTime, change).await;
    }

    /// Publishes a change; where somebody is answered by it, it is on the disk first.
    pub(super) async fn publish_on(&mut self, disk: Disk, change: impl FnOnce(&mut Published)) {
        let mut next = self.session.now();
        change(&mut next);
        next.generation += 1;
        let row = crate::store::SessionRow {
            spec: (*next.spec).clone(),
            state: next.state.word(),
            generation: next.generation,
            activation: next.activation,
            active_at: next.active_at,
            expires_at: next.expires_at,
            keep_until: next.keep_until,
            last_end: next.last_end.clone(),
            ended: next.ended.clone(),
            ..self.session.row()
        };
        let write = Write::Session(Box::new(row));
        // An end that has begun goes on in the next life, once somebody has seen it or the guest has felt it.
        let ends = matches!(next.state, State::Releasing(..) | State::Terminating(..) | State::Idle(_));
        if disk == Disk::InTime && next.ended.is_none() && !ends {
            // Writes stay in order: what must be on the disk before it acts (a Sandbox's row, its claim) waits for this too.
            self.sessions.0.store.write_later(write).await;
        } else if let Err(error) = self.sessions.0.store.write(write).await {
            // The daemon is about to end for this reason; what is published is the truth all the same.
            tracing::error!(session = %self.session.id(), %error, "state could not be recorded");
        }
        self.session.0.published.send_replace(next);
    }

    /// Says in the feed where the Session is now.
    fn tell(&self, state: &State) {
        let kind = match state.word() {
            SessionState::Requested => return,
            SessionState::Activating => "session.activating",
            SessionState::Active => "session.active",
            SessionState::Releasing => "session.releasing",
            SessionState::Idle => "session.idle",
            SessionState::Terminating => "session.terminating",
            SessionState::Terminated => "session.terminated",
        };
        let mut event = self.session.event(kind);
        if let Some(tenure) = state.tenure() {
            event = event.sandbox(tenure.sandbox).detail("activation", tenure.activation);
        }
        if let Some(cause) = state.cause() {
            event = event.reason(cause.reason);
        }
        self.sessions.0.store.record(event);
    }

    /// Says in the feed how a Sandbox of it ended.
    fn tell_end(&self, tenure: Tenure, end: &Ended) {
        let event = self.session.event("sandbox.ended").sandbox(tenure.sandbox).reason(end.reason);
        let message = (!end.message.is_empty()).then_some(&end.message);
        self.sessions.0.store.record(event.detail("activation", tenure.activation).detail("message", message));
    }

    pub(super) async fn moved(&mut self, state: State) {
        let now = crate::store::now();
        tracing::info!(session = %self.session.id(), state = ?state.word(), reason = ?state.cause().map(|c| c.reason), "moved");
        let end: Option<Ended> = match &state {
            State::Terminated(cause) | State::Idle(cause) => Some(ended(cause, now)),
            _ => None,
        };
        self.tell(&state);
        if let State::Terminated(_) = &state {
            let spec = self.session.now().spec;
            self.sessions.0.workspaces.give_back(&spec.volumes).await;
            if let Some(used) = &spec.workspace {
                self.sessions.0.workspaces.session_ended(self.session.app(), used).await;
            }
        }
        if let Some(end) = &end {
            self.session.commands().sandbox_ended(end);
            if let Some(tenure) = self.session.now().state.tenure() {
                self.tell_end(tenure, end);
            }
            drop(self.place.take());
        }
        if let State::Activating(_) = &state {
            self.session.commands().begins();
        }
        let guest = match (&state, &self.work) {
            (State::Active(_), Work::Serving { active, .. }) => Some(active.guest().clone()),
            _ => None,
        };
        if guest.is_some() {
            self.session.services().announce(&self.session.now().spec.services);
            self.session.0.activity.send_modify(|activity| activity.serving(now));
        }
        let keep = guest.is_some().then(|| self.keep_until()).flatten();
        self.keep_stored = keep;
        // Whoever waits must not wait for the disk to learn that the guest is gone.
        if guest.is_none() {
            self.session.0.published.send_modify(|published| published.guest = None);
        }
        self.publish(|published| {
            if let Some(tenure) = state.tenure() {
                published.activation = tenure.activation;
            }
            if guest.is_some() {
                published.active_at = Some(now);
            }
            published.guest = guest.clone();
            published.keep_until = keep;
            match &state {
                State::Terminated(_) => published.ended = end,
                State::Idle(_) => (published.last_end, published.active_at) = (end, None),
                // A fresh Sandbox begins with what is asked for now.
                State::Activating(_) if published.spec.services_begun.is_some() => {
                    Arc::make_mut(&mut published.spec).services_begun = None;
                }
                _ => {}
            }
            published.state = state;
        })
        .await;
        match (guest, self.session.now().state) {
            (Some(guest), State::Active(tenure)) => {
                self.session.services().begin(&self.session, &guest, tenure.activation)
            }
            // All of it is on the disk by now: what waits for its next life need not be kept in memory.
            (None, State::Idle(_)) => self.session.commands().forget(),
            _ => {}
        }
    }
}
