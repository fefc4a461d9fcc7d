//! The one task that owns a Session's Sandbox: it turns what happens into events, asks `state.rs` what follows, and does it.
//!
//! Hands every change to the store before it is published, and waits for the disk where an end is told.
//! Decides by this priority, when several things are there at once:
//!
//! ```text
//! 1 terminate    its own channel: nothing can stand before it in a queue
//! 2 work         a boot that came to its end, a Sandbox that ended, a stop path that is through
//! 3 silence      the guest has not answered for too long
//! 4 asks         release, update, console, usage
//! 5 deadlines    expiry, lifetime, keep-alive
//! 6 activity     only moves the deadline of 5
//! ```

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use pepo_api::{Ended, Reason, SessionState};
use pepo_sandbox::{Active, Exit};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::activation::Activated;
use super::state::{self, Cause, Effect, Event, State, Tenure};
use super::table::Room;
use super::{Ask, Error, Published, Session, Sessions, Update, activation, activity, ended, sandbox_id, setup};
use crate::capacity::Place;
use crate::store::Write;

/// How often a guest is asked whether it is there.
const BEAT: Duration = Duration::from_secs(5);

/// The next look at a deadline comes no later than this, whatever the clock does.
const LOOK: Duration = Duration::from_secs(60);

/// A deadline in the store may lag behind by this much; less is not worth a write.
const COARSE: i64 = 2_000;

/// How a driver begins.
#[derive(Debug)]
pub(super) enum Start {
    /// With nothing: a Sandbox of this Image is to be made.
    New(Room),
    /// With a Sandbox that an earlier life of this daemon made.
    Adopted(Box<Active>, Tenure, Place),
    /// With a Sandbox that is gone already.
    Gone(Tenure, Cause),
    /// With none, but one is wanted: an earlier life of this daemon did not come to it.
    Again,
    /// With none, until a request wants one.
    Idle,
}

/// What is under way.
enum Work {
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

struct Driver {
    sessions: Sessions,
    session: Session,
    asks: mpsc::Receiver<Ask>,
    terminate: watch::Receiver<Option<Cause>>,
    activity: watch::Receiver<activity::Activity>,
    room: Option<Room>,
    work: Work,
    /// Events that effects brought about.
    pending: std::collections::VecDeque<Event>,
    place: Option<Place>,
    keep_stored: Option<Timestamp>,
}

/// Starts the task.
pub(super) fn spawn(sessions: Sessions, session: Session, asks: mpsc::Receiver<Ask>, start: Start) {
    let driver = Driver {
        terminate: session.0.terminate.subscribe(),
        activity: session.0.activity.subscribe(),
        sessions,
        session,
        asks,
        room: None,
        work: Work::Nothing,
        pending: Default::default(),
        place: None,
        keep_stored: None,
    };
    let (sessions, session) = (driver.sessions.clone(), driver.session.clone());
    tokio::spawn(async move {
        if let Err(error) = tokio::spawn(driver.run(start)).await
            && error.is_panic()
        {
            abandon(&sessions, &session).await;
        }
    });
}

/// A driver that panicked: nobody may wait for ever for its Session, and its Sandbox may not stay.
async fn abandon(sessions: &Sessions, session: &Session) {
    tracing::error!(session = %session.id(), "its driver ended in a panic: ending the Session");
    let cause = Cause::told(Reason::Unknown, "an internal error; see the log");
    let end = ended(&cause, Timestamp::now());
    session.services().stop();
    session.commands().sandbox_ended(&end);
    if let Some(id) = session.now().state.tenure().and_then(|tenure| super::engine_id(tenure.sandbox)) {
        sessions.bury(id).await;
    }
    session.0.published.send_modify(|published| {
        published.generation += 1;
        published.guest = None;
        published.ended = Some(end);
        published.state = State::Terminated(cause);
    });
    sessions.0.store.write_later(Write::Session(Box::new(session.row()))).await;
    sessions.leave(session.id());
}

impl Driver {
    async fn run(mut self, start: Start) {
        match start {
            Start::New(room) => match self.tenure(&room) {
                Ok(tenure) => {
                    self.room = Some(room);
                    self.pending.push_back(Event::Begin(tenure));
                }
                Err(error) => {
                    self.pending.push_back(Event::Failed(Cause::told(Reason::SetupFailed, error.to_string())))
                }
            },
            Start::Adopted(active, tenure, place) => {
                self.place = Some(place);
                // The rules have been in force all the time; the floor may be another since.
                self.sessions.reapply(&self.session, &active, &self.session.now().spec.network).await;
                let guest = active.guest().clone();
                self.serve(*active);
                self.publish(|now| {
                    now.state = State::Active(tenure);
                    now.guest = Some(guest.clone());
                })
                .await;
                self.session.services().take_up(&self.session, &guest, tenure.activation);
            }
            Start::Again => self.seek(Vec::new()),
            Start::Idle => {}
            Start::Gone(tenure, cause) => {
                self.publish(|now| now.state = State::Active(tenure)).await;
                self.pending.extend([Event::SandboxEnded(cause), Event::Stopped]);
            }
        }
        loop {
            let event = match self.pending.pop_front() {
                Some(event) => event,
                None => self.happens().await,
            };
            let now = self.session.now();
            let before = now.state;
            let (state, effects) = state::step(now.spec.lives(), before.clone(), event);
            if state != before {
                self.moved(state).await;
            }
            for effect in effects {
                self.act(effect).await;
            }
            if self.session.now().ended.is_some() {
                break;
            }
        }
        drop(self.place.take());
        self.sessions.leave(self.session.id());
    }

    /// A Sandbox for the next activation.
    fn tenure(&self, room: &Room) -> Result<Tenure, Error> {
        let id = match room.sandbox() {
            Some(waits) => waits,
            None => self.sessions.0.host.new_id()?,
        };
        Ok(Tenure { sandbox: sandbox_id(id), activation: self.session.now().activation + 1 })
    }

    /// The next thing that happens. Requests that only look are answered here.
    async fn happens(&mut self) -> Event {
        loop {
            let deadline = self.deadline();
            let wait = deadline.as_ref().map_or(LOOK, |(at, _)| until(*at)).min(LOOK);
            let may_end = !self.session.now().state.ends();
            let terminate = &mut self.terminate;
            let given = async move { terminate.wait_for(Option::is_some).await.ok().and_then(|given| given.clone()) };
            let woken = tokio::select! {
                biased;
                given = given, if may_end => Woken::Terminate(given.unwrap_or_else(|| Cause::plain(Reason::Unknown))),
                progress = progress(&mut self.work) => Woken::Work(progress),
                ask = self.asks.recv() => Woken::Asked(ask),
                () = tokio::time::sleep(wait) => Woken::Time,
                _ = self.activity.changed() => Woken::Activity,
            };
            match woken {
                Woken::Terminate(cause) => return Event::Terminate(cause),
                Woken::Work(progress) => {
                    if let Some(event) = self.progressed(progress).await {
                        return event;
                    }
                }
                Woken::Asked(Some(Ask::Release(cause))) => return Event::Release(cause),
                Woken::Asked(Some(Ask::Activate(answer))) => self.wanted(answer),
                Woken::Asked(Some(Ask::Update(update, answer))) => {
                    let done = self.update(*update).await;
                    // Whoever asked may have gone.
                    let _ = answer.send(done);
                }
                Woken::Asked(Some(Ask::Console(answer))) => {
                    self.look(answer, |view| async move {
                        let console = view.console().await?;
                        let end = console.before + console.bytes.len() as u64;
                        Ok((console.bytes, end))
                    });
                }
                Woken::Asked(Some(Ask::Usage(answer))) => {
                    self.look(answer, |view| async move { Ok(view.usage().await?) })
                }
                Woken::Asked(Some(Ask::Traffic(answer))) => {
                    let has_network = self.sessions.0.network.is_some();
                    self.look(answer, move |view| async move {
                        Ok(if has_network { Some(view.traffic().await?) } else { None })
                    })
                }
                Woken::Asked(None) => return Event::Terminate(Cause::plain(Reason::Unknown)),
                // Looked at again: somebody may have begun to use it a moment ago.
                Woken::Time => match self.deadline() {
                    Some((at, event)) if at <= Timestamp::now() => return event,
                    _ => {}
                },
                Woken::Activity => self.quieted().await,
            }
        }
    }

    /// What the work that came to something means.
    async fn progressed(&mut self, progress: Progress) -> Option<Event> {
        match progress {
            Progress::Sought(found) => {
                let Work::Seeking { asked, .. } = std::mem::replace(&mut self.work, Work::Nothing) else { return None };
                let found = match found {
                    // Where its App's quota is decided: the row says that it has a Sandbox before it gets one.
                    Ok(room) => {
                        let counted = self.sessions.0.store.write(Write::Reactivate(self.session.id())).await;
                        counted.map(|()| room).map_err(Error::from)
                    }
                    refused => refused,
                };
                let found = found.and_then(|room| Ok((self.tenure(&room)?, room)));
                let (tenure, room) = match found {
                    Ok(found) => found,
                    Err(error) => {
                        let told = Cause::told(Reason::SetupFailed, pepo_sandbox::chain(&error));
                        self.refuse(asked, error);
                        return (self.session.now().state == State::Requested).then_some(Event::Failed(told));
                    }
                };
                self.room = Some(room);
                for asked in asked {
                    // Whoever asked may have gone: the Sandbox is made all the same, and goes when nothing uses it.
                    let _ = asked.send(Ok(tenure.activation));
                }
                Some(Event::Begin(tenure))
            }
            Progress::Booted(Ok(Activated { active, said })) => {
                let wanted = &self.session.now().spec.network;
                if *wanted != said {
                    // Changed while it started.
                    self.sessions.reapply(&self.session, &active, wanted).await;
                }
                self.serve(active);
                Some(Event::Activated)
            }
            Progress::Booted(Err(cause)) => {
                self.work = Work::Nothing;
                Some(Event::Failed(cause))
            }
            Progress::Ended => {
                self.stop(Duration::ZERO).await;
                None
            }
            Progress::Silent => {
                let seconds = self.sessions.0.config.silence.as_secs();
                Some(Event::SandboxEnded(Cause::told(
                    Reason::GuestSilent,
                    format!("the guest did not answer for {seconds} s"),
                )))
            }
            Progress::Stuck => {
                self.work = Work::Nothing;
                if let Some(tenure) = self.session.now().state.tenure()
                    && let Some(id) = super::engine_id(tenure.sandbox)
                {
                    self.sessions.bury(id).await;
                }
                self.pending.push_back(Event::Stopped);
                Some(Event::SandboxEnded(Cause::told(Reason::Unknown, "an internal error; see the log")))
            }
            Progress::Stopped(exit) => {
                self.work = Work::Nothing;
                self.sessions.settle(&exit).await;
                let why = self.session.now().state.cause().map(|cause| cause.reason);
                crate::metrics::METRICS.sandbox_ended(why.unwrap_or_else(|| activation::cause_of(&exit).reason));
                // Nobody asked for this end: how it came about is the Session's reason.
                if self.session.now().state.cause().is_none() {
                    self.pending.push_back(Event::Stopped);
                    return Some(Event::SandboxEnded(activation::cause_of(&exit)));
                }
                Some(Event::Stopped)
            }
        }
    }

    /// The next deadline, and what it brings.
    fn deadline(&self) -> Option<(Timestamp, Event)> {
        let now = self.session.now();
        if now.state.ends() {
            return None;
        }
        let expiry = now.expires_at.map(|at| (at, Event::Terminate(Cause::plain(Reason::Expired))));
        let State::Active(_) = now.state else { return expiry };
        let lifetime =
            now.active_at.and_then(|at| after(at, self.sessions.0.config.lifetime)).map(|at| (at, Reason::Lifetime));
        let idle = self.keep_until().map(|at| (at, Reason::Idle));
        let [lifetime, idle] =
            [lifetime, idle].map(|end| end.map(|(at, reason)| (at, Event::Release(Cause::plain(reason)))));
        [expiry, lifetime, idle].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    fn keep_until(&self) -> Option<Timestamp> {
        let keep_alive = Duration::from_secs(self.session.now().spec.keep_alive_seconds);
        self.session.0.activity.borrow().keep_until(keep_alive)
    }

    /// Something began or ended to use it: the keep-alive's deadline is durable, its second is not.
    async fn quieted(&mut self) {
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
    async fn publish(&mut self, change: impl FnOnce(&mut Published)) {
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
        if next.ended.is_none() && !matches!(next.state, State::Idle(_)) {
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

    async fn moved(&mut self, state: State) {
        let now = crate::store::now();
        tracing::info!(session = %self.session.id(), state = ?state.word(), reason = ?state.cause().map(|c| c.reason), "moved");
        let end: Option<Ended> = match &state {
            State::Terminated(cause) | State::Idle(cause) => Some(ended(cause, now)),
            _ => None,
        };
        self.tell(&state);
        if let State::Terminated(_) = &state
            && let Some(used) = &self.session.now().spec.workspace
        {
            self.sessions.0.workspaces.session_ended(self.session.app(), used).await;
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

    /// A request wants a Sandbox.
    fn wanted(&mut self, answer: oneshot::Sender<Result<u64, Error>>) {
        let now = self.session.now();
        match (&now.state, &mut self.work) {
            (State::Idle(_), Work::Seeking { asked, .. }) => asked.push(answer),
            (State::Idle(_), _) => self.seek(vec![answer]),
            // The one that is there goes: it is the next one that is wanted.
            (State::Releasing(..), _) => drop(answer.send(Ok(now.activation + 1))),
            _ => drop(answer.send(Ok(now.activation))),
        }
    }

    /// Looks for room, on a task of its own: it may have to wait for its turn.
    fn seek(&mut self, asked: Vec<oneshot::Sender<Result<u64, Error>>>) {
        let (sessions, app, spec) = (self.sessions.clone(), self.session.app(), self.session.now().spec);
        let room = async move { sessions.room(app, spec.image_id.to_string(), &spec).await };
        self.work = Work::Seeking { task: AbortOnDropHandle::new(tokio::spawn(room)), asked };
    }

    /// There is no room: everybody who asked is told why.
    fn refuse(&self, asked: Vec<oneshot::Sender<Result<u64, Error>>>, error: Error) {
        tracing::info!(session = %self.session.id(), %error, "gets no Sandbox now");
        let mut asked = asked.into_iter();
        let first = asked.next();
        for other in asked {
            let told = match &error {
                Error::Full(full) => Error::Full(*full),
                Error::Draining => Error::Draining,
                Error::NoImage { name, hint } => Error::NoImage { name: name.clone(), hint: hint.clone() },
                fault => Error::NoSandbox(pepo_sandbox::chain(fault)),
            };
            drop(other.send(Err(told)));
        }
        if let Some(first) = first {
            drop(first.send(Err(error)));
        }
    }

    async fn act(&mut self, effect: Effect) {
        match effect {
            Effect::Boot => self.boot(),
            Effect::CancelBoot => match &self.work {
                Work::Booting { cancel, .. } => cancel.cancel(),
                _ => self.pending.push_back(Event::Failed(Cause::plain(Reason::Unknown))),
            },
            Effect::StopOrderly => self.stop(self.sessions.0.config.stop_grace).await,
            Effect::StopNow => self.stop(Duration::ZERO).await,
        }
    }

    fn boot(&mut self) {
        let (Some(room), Some(tenure)) = (self.room.take(), self.session.now().state.tenure()) else {
            let cause = Cause::told(Reason::SetupFailed, "nothing to start from");
            return self.pending.push_back(Event::Failed(cause));
        };
        let (files, shape, committed) = (room.files.clone(), room.shape, room.committed);
        let Some((place, warm)) = room.part() else {
            let cause = Cause::told(Reason::SetupFailed, "the waiting Sandbox is gone");
            return self.pending.push_back(Event::Failed(cause));
        };
        self.place = Some(place);
        let from = match warm {
            Some(warm) => activation::From::Warm { warm, committed },
            None => activation::From::Files { files, shape },
        };
        let cancel = CancellationToken::new();
        let (sessions, session, until) = (self.sessions.clone(), self.session.clone(), cancel.clone());
        let made = async move {
            let Activated { active, said } =
                activation::make(sessions.clone(), session.clone(), from, tenure, until.clone()).await?;
            let active = setup::run(&sessions, &session, active, tenure.activation, &until).await?;
            Ok(Activated { active, said })
        };
        self.work = Work::Booting { task: tokio::spawn(made), cancel };
    }

    fn serve(&mut self, active: Active) {
        let beating = silence(active.guest().clone(), self.sessions.0.config.silence);
        let silence = AbortOnDropHandle::new(tokio::spawn(beating));
        self.work = Work::Serving { active, silence };
    }

    /// Begins the stop path, where there is something to stop; else it is through already.
    async fn stop(&mut self, grace: Duration) {
        match std::mem::replace(&mut self.work, Work::Nothing) {
            Work::Serving { active, .. } => {
                let session = self.session.clone();
                // Before anything of it ends, or it would be started again.
                session.services().stop();
                let reason = session.now().state.cause().map_or(Reason::Unknown, |cause| cause.reason);
                session.0.published.send_modify(|published| published.guest = None);
                self.work = Work::Stopping(tokio::spawn(async move {
                    if grace.is_zero() {
                        return active.stop(grace).await;
                    }
                    // The guest's orderly end is for its programs and for what outlasts it. Where no command runs and nothing
                    // outlasts it there is neither, and it costs more than all the rest of the end.
                    let at_rest = session.commands().running() == 0 && !active.has_mounts();
                    session.commands().wind_up(active.guest(), reason).await;
                    active.stop(if at_rest { Duration::ZERO } else { grace }).await
                }));
            }
            busy @ (Work::Stopping(_) | Work::Booting { .. } | Work::Seeking { .. }) => self.work = busy,
            Work::Nothing => {
                if !self.pending.contains(&Event::Stopped) {
                    self.pending.push_back(Event::Stopped);
                }
            }
        }
    }

    async fn update(&mut self, update: Update) -> Result<(), Error> {
        let now = self.session.now();
        if let Some(ended) = now.ended {
            return Err(Error::Terminated(ended));
        }
        #[cfg(feature = "fake")]
        #[allow(clippy::panic, reason = "what becomes of a driver that panics is tested by one that does")]
        if update.labels.as_ref().and_then(|labels| labels.get("pepo-fault")).is_some_and(|fault| fault == "driver") {
            panic!("as a test wants it");
        }
        let mut spec = (*now.spec).clone();
        if let Some(name) = update.name {
            // The store decides whether a name is free, so it is asked before anything is published.
            spec.name = Some(name);
            let row = crate::store::SessionRow { spec: spec.clone(), ..self.session.row() };
            self.sessions.0.store.write(Write::Session(Box::new(row))).await?;
        }
        if !update.secrets.is_empty() {
            self.sessions.change_secrets(self.session.id(), &update.secrets).await?;
            for (name, value) in update.secrets {
                match value {
                    Some(_) => spec.secrets.insert(name),
                    None => spec.secrets.remove(&name),
                };
            }
        }
        if let Some(labels) = update.labels {
            spec.labels = labels;
        }
        if let Some(seconds) = update.keep_alive_seconds {
            spec.keep_alive_seconds = seconds;
        }
        if let Some(env) = update.env {
            spec.env = env;
        }
        if let Some(setup) = update.setup {
            spec.setup = setup;
        }
        if let Some(services) = update.services {
            spec.services = services;
        }
        if let Some((said, policy)) = update.network {
            // In force before it is written down: a change that is answered is one that holds. One that starts just now
            // is given what is written when it has started.
            if let Work::Serving { active, .. } = &self.work
                && self.sessions.0.network.is_some()
            {
                active.network(&policy).await?;
                self.sessions.answer(&self.session, active.id(), policy).await?;
            }
            spec.network = said;
        }
        if update.expires_seconds.is_some() {
            spec.expires_seconds = update.expires_seconds;
        }
        let expires_at = match update.expires_seconds {
            Some(seconds) => after(crate::store::now(), Duration::from_secs(seconds)),
            None => now.expires_at,
        };
        self.publish(|published| {
            published.spec = Arc::new(spec);
            published.expires_at = expires_at;
        })
        .await;
        Ok(())
    }

    /// Answers a look at the Sandbox, on a task of its own.
    fn look<T, F, Q>(&self, answer: oneshot::Sender<Result<T, Error>>, look: Q)
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
        Q: FnOnce(View) -> F,
    {
        match &self.work {
            Work::Serving { active, .. } => {
                let looked = look(View { host: self.sessions.0.host.clone(), id: active.id() });
                tokio::spawn(async move {
                    let _ = answer.send(looked.await);
                });
            }
            _ => {
                let message =
                    format!("the Session is {:?} and has no Sandbox to look at", self.session.now().state.word());
                let _ = answer.send(Err(Error::NoSandboxNow(message.to_lowercase())));
            }
        }
    }
}

/// What can be looked at of a Sandbox without owning it.
struct View {
    host: pepo_sandbox::Host,
    id: pepo_sandbox::SandboxId,
}

impl View {
    async fn console(&self) -> Result<pepo_sandbox::keeper::Console, pepo_sandbox::host::Error> {
        Ok(self.host.evidence(self.id).await?.console)
    }

    async fn usage(&self) -> Result<pepo_sandbox::host::Usage, pepo_sandbox::host::Error> {
        self.host.usage(self.id).await
    }

    async fn traffic(&self) -> Result<pepo_sandbox::net::Traffic, pepo_sandbox::host::Error> {
        self.host.traffic(self.id).await
    }
}

/// What woke the driver, in the order of its priority.
enum Woken {
    Terminate(Cause),
    Work(Progress),
    Asked(Option<Ask>),
    Time,
    Activity,
}

enum Progress {
    Sought(Result<Room, Error>),
    Booted(Result<Activated, Cause>),
    Ended,
    Silent,
    Stopped(Box<Exit>),
    /// The stop path itself failed: what it held is buried from outside.
    Stuck,
}

/// Returns when the work under way has come to something. Never, where there is none.
async fn progress(work: &mut Work) -> Progress {
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

/// Returns when the guest has not answered for that long.
async fn silence(guest: pepo_sandbox::guest::Guest, most: Duration) {
    let mut heard = tokio::time::Instant::now();
    let beat = BEAT.min(most / 4).max(Duration::from_millis(10));
    loop {
        tokio::time::sleep(beat).await;
        match tokio::time::timeout(most, guest.ping()).await {
            // A guest that refuses for want of streams is there.
            Ok(Ok(()) | Err(pepo_sandbox::guest::Error::Busy)) => heard = tokio::time::Instant::now(),
            Ok(Err(_)) | Err(_) if heard.elapsed() >= most => return,
            Ok(Err(_)) | Err(_) => {}
        }
    }
}

fn after(at: Timestamp, wait: Duration) -> Option<Timestamp> {
    at.checked_add(jiff::SignedDuration::try_from(wait).ok()?).ok()
}

fn until(at: Timestamp) -> Duration {
    Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default()
}
