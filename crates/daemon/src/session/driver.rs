//! The one task that owns a Session's Sandbox: it turns what happens into events, asks `state.rs` what follows, and does it.
//!
//! Hands every change to the store before it is published, and waits for the disk where an end begins or is told.
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

mod publish;
mod update;
mod view;
mod work;

use std::time::Duration;

use jiff::Timestamp;
use pepo_api::Reason;
use pepo_sandbox::{Active, chain};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::activation::Activated;
use super::state::{self, Cause, Effect, Event, State, Tenure};
use super::table::Room;
use super::{Ask, Error, Session, Sessions, activation, activity, ended, sandbox_id, setup};
use crate::capacity::Place;
use crate::store::Write;
use work::{Progress, Work, progress, silence};

/// The next look at a deadline comes no later than this, whatever the clock does.
const LOOK: Duration = Duration::from_secs(60);

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
            if self.sessions.0.host.is_lost() {
                // pepod is about to end. What failed failed for that: it is no end of the Session's, and nothing of it is
                // recorded. The next pepod looks what is there.
                std::future::pending::<()>().await;
            }
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
                Woken::Asked(Some(Ask::Reach(answer))) => {
                    let _ = answer.send(self.reach_again().await);
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
                    let has_network = self.sessions.reach().network().is_some();
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
                        let told = Cause::told(Reason::SetupFailed, chain(&error));
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
            Progress::Booted(Ok(Activated { active, policy })) => {
                let said = &self.session.now().spec.network;
                if let Some(policy) = policy
                    && self.sessions.reach().in_force(self.session.app(), said).as_ref() != Ok(&policy)
                {
                    // Changed while it started.
                    self.sessions.reapply(&self.session, &active, said).await;
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
        tracing::info!(session = %self.session.id(), error = chain(&error), "gets no Sandbox now");
        let mut asked = asked.into_iter();
        let first = asked.next();
        for other in asked {
            let told = match &error {
                Error::Full(full) => Error::Full(*full),
                Error::Draining => Error::Draining,
                Error::Host(pepo_sandbox::host::Error::Lost) => Error::Host(pepo_sandbox::host::Error::Lost),
                Error::NoImage { name, hint } => Error::NoImage { name: name.clone(), hint: hint.clone() },
                fault => Error::NoSandbox(chain(fault)),
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
            let Activated { active, policy } =
                activation::make(sessions.clone(), session.clone(), from, tenure, until.clone()).await?;
            let active = setup::run(&sessions, &session, active, tenure.activation, &until).await?;
            Ok(Activated { active, policy })
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
}

/// What woke the driver, in the order of its priority.
enum Woken {
    Terminate(Cause),
    Work(Progress),
    Asked(Option<Ask>),
    Time,
    Activity,
}

fn after(at: Timestamp, wait: Duration) -> Option<Timestamp> {
    at.checked_add(jiff::SignedDuration::try_from(wait).ok()?).ok()
}

fn until(at: Timestamp) -> Duration {
    Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default()
}
