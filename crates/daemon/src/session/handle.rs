//! The handle that everybody but its driver holds on a Session: reads copies, lends the guest, asks for changes.
//!
//! Owns nothing of a Sandbox. A request that needs the guest goes through [`Session::serving`], which counts as use.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pepo_api::{AppId, Ended, Reason, ServiceSpec, SessionId, Setup};
use pepo_sandbox::guest::Guest;
use pepo_sandbox::proto::Variable;
use tokio::sync::{mpsc, oneshot, watch};
use zeroize::Zeroizing;

use super::state::{Cause, Lives, State};
use super::{Commands, Error, Services, Spec, Ticket, activity, ended};
use crate::store::{Event, SessionRow};

/// What everybody may see of a Session: a copy, with a number that counts changes.
#[derive(Clone, Debug)]
pub struct Published {
    /// Counts changes of what is here.
    pub generation: u64,
    /// Where it is.
    pub state: State,
    /// What it was asked to be.
    pub spec: Arc<Spec>,
    /// Counts Sandboxes.
    pub activation: u64,
    /// When its Sandbox became Active.
    pub active_at: Option<jiff::Timestamp>,
    /// Its latest end.
    pub expires_at: Option<jiff::Timestamp>,
    /// When its Sandbox goes if nothing happens; none while something does.
    pub keep_until: Option<jiff::Timestamp>,
    /// The guest, while it serves.
    pub guest: Option<Guest>,
    /// How its last Sandbox that is gone ended.
    pub last_end: Option<Ended>,
    /// How it ended.
    pub ended: Option<Ended>,
}

/// A change asked of the driver.
#[derive(Debug)]
pub(super) enum Ask {
    /// The Sandbox shall go, for this reason.
    Release(Cause),
    /// A Sandbox is wanted. Answered with the number of the activation to wait for.
    Activate(oneshot::Sender<Result<u64, Error>>),
    Update(Box<Update>, oneshot::Sender<Result<(), Error>>),
    /// What it may reach shall be put in force as it is now.
    Reach(oneshot::Sender<Result<(), Error>>),
    /// What the console says, and what the host says it uses.
    Console(oneshot::Sender<Result<(Vec<u8>, u64), Error>>),
    Usage(oneshot::Sender<Result<pepo_sandbox::host::Usage, Error>>),
    Traffic(oneshot::Sender<Result<Option<pepo_sandbox::net::Traffic>, Error>>),
}

/// What an update replaces.
#[derive(Clone, Debug, Default)]
pub struct Update {
    /// A new name.
    pub name: Option<String>,
    /// All labels.
    pub labels: Option<BTreeMap<String, String>>,
    /// How long the Sandbox stays.
    pub keep_alive_seconds: Option<u64>,
    /// How long the Session lives from now.
    pub expires_seconds: Option<u64>,
    /// All environment of later activations.
    pub env: Option<BTreeMap<String, String>>,
    /// Secrets of later activations: set, or taken away.
    pub secrets: BTreeMap<String, Option<Zeroizing<String>>>,
    /// What runs first in later activations, or nothing.
    pub setup: Option<Option<Setup>>,
    /// All Services of later activations.
    pub services: Option<Vec<ServiceSpec>>,
    /// What it may reach, as it was said.
    pub network: Option<pepo_api::NetworkSpec>,
}

/// What a request may do to reach a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// Wait for one that is coming.
    Wait,
    /// Have one made.
    Activate,
}

/// Asks that may wait for a driver.
pub(super) const ASKS: usize = 64;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) id: SessionId,
    pub(super) app: AppId,
    pub(super) created_at: jiff::Timestamp,
    pub(super) published: watch::Sender<Published>,
    pub(super) activity: watch::Sender<activity::Activity>,
    /// The first one given stands.
    pub(super) terminate: watch::Sender<Option<Cause>>,
    pub(super) asks: mpsc::Sender<Ask>,
    pub(super) commands: Commands,
    pub(super) services: Services,
    /// Whether it is being taken up after a restart: what its guest runs is not known yet.
    pub(super) returning: watch::Sender<bool>,
}

/// A handle on one Session. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Session(pub(super) Arc<Shared>);

/// A guest, lent for one request. While its ticket is held the Session counts as used.
#[derive(Debug)]
pub struct Serving {
    /// The guest.
    pub guest: Guest,
    /// Which activation.
    pub activation: u64,
    /// Counts as use until dropped. None for what is Pepo's own: Services, set-up.
    pub ticket: Option<Ticket>,
}

impl Session {
    /// Its id.
    pub fn id(&self) -> SessionId {
        self.0.id
    }

    /// Its App.
    pub fn app(&self) -> AppId {
        self.0.app
    }

    /// Returns when it is known what goes on in its Sandbox, which after a restart takes a moment.
    pub async fn is_back(&self) {
        let mut returning = self.0.returning.subscribe();
        // An error means that nobody takes it up any more: what is known is all.
        let _ = returning.wait_for(|returning| !returning).await;
    }

    /// When it was asked for.
    pub fn created_at(&self) -> jiff::Timestamp {
        self.0.created_at
    }

    /// An event about it, to be filled and recorded.
    pub fn event(&self, kind: &'static str) -> Event {
        Event::new(kind).app(self.app()).session(self.id()).labels(&self.0.published.borrow().spec.labels)
    }

    /// Its commands.
    pub fn commands(&self) -> &Commands {
        &self.0.commands
    }

    /// Its Services.
    pub fn services(&self) -> &Services {
        &self.0.services
    }

    /// The environment that goes to the guest at activation: everything of it is put together here.
    pub(super) fn environment(&self) -> Vec<Variable> {
        let spec = self.0.published.borrow().spec.clone();
        spec.env.iter().map(|(name, value)| Variable { name: name.clone(), value: value.clone() }).collect()
    }

    /// As it is now.
    pub fn now(&self) -> Published {
        self.0.published.borrow().clone()
    }

    /// The guest, if a Sandbox serves now.
    pub fn guest(&self) -> Option<Guest> {
        self.0.published.borrow().guest.clone()
    }

    /// The guest of that activation, as soon as it serves. `None`: it does not and will not.
    pub(super) async fn guest_of(&self, activation: u64, wait: Duration) -> Option<Guest> {
        let mut published = self.0.published.subscribe();
        let decided = published.wait_for(|now| {
            now.guest.is_some() || now.activation != activation || now.ended.is_some() || now.state.cause().is_some()
        });
        match tokio::time::timeout(wait, decided).await {
            Ok(Ok(now)) => now.guest.clone().filter(|_| now.activation == activation),
            _ => None,
        }
    }

    /// As it is when its generation is above `after`, or when the wait is over.
    pub async fn changed(&self, after: u64, wait: Duration) -> Published {
        let mut published = self.0.published.subscribe();
        let newer = published.wait_for(|now| now.generation > after);
        match tokio::time::timeout(wait, newer).await {
            Ok(Ok(now)) => now.clone(),
            _ => self.now(),
        }
    }

    /// Counts as use until the ticket is dropped.
    pub fn ticket(&self) -> Ticket {
        Ticket::new(self.clone())
    }

    /// The guest, once the Session is Active: waits for that, at most `wait` and what its set-up may take. An idle one
    /// gets a fresh Sandbox by this; however many ask at once, it gets one.
    ///
    /// # Errors
    /// [`Error::Terminated`], [`Error::ActivationFailed`], [`Error::SandboxEnded`], [`Error::NotActive`],
    /// [`Error::Replaced`], and what stands against a new Sandbox.
    pub async fn serving(&self, wanted: Option<u64>, wait: Duration) -> Result<Serving, Error> {
        let ticket = self.ticket();
        let (guest, activation) = self.serves(wanted, wait, Reach::Activate).await?;
        Ok(Serving { guest, activation, ticket: Some(ticket) })
    }

    /// The guest of that very activation, which is not brought back where it is gone. For what speaks to a command.
    ///
    /// # Errors
    /// [`Error::SandboxEnded`] where that activation is over, and as [`Session::serving`].
    pub async fn serving_still(&self, activation: u64, wait: Duration) -> Result<Serving, Error> {
        let ticket = self.ticket();
        match self.serves(Some(activation), wait, Reach::Wait).await {
            Ok((guest, activation)) => Ok(Serving { guest, activation, ticket: Some(ticket) }),
            Err(Error::Replaced { .. }) => Err(Error::SandboxEnded(self.last_end())),
            Err(error) => Err(error),
        }
    }

    async fn serves(&self, wanted: Option<u64>, wait: Duration, reach: Reach) -> Result<(Guest, u64), Error> {
        let mut published = self.0.published.subscribe();
        let mut deadline = None;
        let mut was_over = None;
        // The activation that this request waits for: where the Session is idle after it, it came to nothing.
        let mut awaited = 0;
        loop {
            let now = published.borrow_and_update().clone();
            let was_over = *was_over.get_or_insert(now.ended.is_some());
            if let Some(ended) = now.ended {
                return Err(match ended.reason {
                    Reason::SetupFailed if !was_over => Error::ActivationFailed(ended),
                    _ => Error::Terminated(ended),
                });
            }
            let current = match &now.state {
                State::Requested => Some(now.activation + 1),
                State::Idle(_) => None,
                other => other.tenure().map(|tenure| tenure.activation),
            };
            if let Some(wanted) = wanted
                && current != Some(wanted)
            {
                return Err(Error::Replaced { wanted, now: now.activation });
            }
            if let Some(guest) = now.guest {
                return Ok((guest, now.activation));
            }
            match &now.state {
                State::Idle(cause) if awaited > 0 && now.activation >= awaited => {
                    let end = now.last_end.unwrap_or_else(|| ended(cause, jiff::Timestamp::now()));
                    return Err(match cause.reason {
                        Reason::SetupFailed => Error::ActivationFailed(end),
                        _ => Error::SandboxEnded(end),
                    });
                }
                State::Idle(_) if reach == Reach::Activate => {
                    awaited = self.ask(Ask::Activate).await?;
                    continue;
                }
                State::Activating(tenure) => awaited = tenure.activation,
                _ => {}
            }
            // Set-up has a time-out of its own, which is no reason to give up before it.
            let patience = || wait + Duration::from_secs(now.spec.setup.as_ref().map_or(0, Setup::timeout_seconds));
            let until = *deadline.get_or_insert_with(|| tokio::time::Instant::now() + patience());
            match tokio::time::timeout_at(until, published.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(Error::Lost(self.id())),
                Err(_) => return Err(Error::NotActive(patience())),
            }
        }
    }

    /// How its last Sandbox that is gone ended.
    pub(super) fn last_end(&self) -> Ended {
        let now = self.0.published.borrow();
        let known = now.ended.clone().or_else(|| now.last_end.clone());
        known.unwrap_or_else(|| Ended::new(Reason::Unknown, jiff::Timestamp::now()))
    }

    /// How its Sandbox ended, if it does within a moment: for a stream that broke. `None`: it still serves.
    pub async fn sandbox_end(&self, activation: u64, wait: Duration) -> Option<Ended> {
        let mut published = self.0.published.subscribe();
        let over = published
            .wait_for(|now| now.activation != activation || now.ended.is_some() || now.state.cause().is_some());
        let now = match tokio::time::timeout(wait, over).await {
            Ok(Ok(now)) => now.clone(),
            _ => return None,
        };
        Some(match (&now.state, now.ended) {
            (_, Some(ended)) => ended,
            // Its end is about to be recorded.
            (State::Releasing(_, cause) | State::Terminating(_, cause), None) => ended(cause, jiff::Timestamp::now()),
            (_, None) => now.last_end.unwrap_or_else(|| Ended::new(Reason::Unknown, jiff::Timestamp::now())),
        })
    }

    /// Whether this is the activation that a request asks for, where it asks for one.
    ///
    /// # Errors
    /// [`Error::Replaced`].
    pub fn is_still(&self, wanted: Option<u64>) -> Result<(), Error> {
        let now = self.0.published.borrow();
        match wanted {
            Some(wanted) if now.activation != wanted || matches!(now.state, State::Idle(_)) => {
                Err(Error::Replaced { wanted, now: now.activation })
            }
            _ => Ok(()),
        }
    }

    /// Ends it; done at once where it has ended. Returns when it has.
    pub async fn terminate(&self, cause: Cause) -> Published {
        self.0.terminate.send_if_modified(|given| {
            given.is_none() && {
                *given = Some(cause);
                true
            }
        });
        self.ended().await
    }

    /// Returns when it has ended.
    pub async fn ended(&self) -> Published {
        let mut published = self.0.published.subscribe();
        match published.wait_for(|now| now.ended.is_some()).await {
            Ok(now) => now.clone(),
            Err(_) => self.now(),
        }
    }

    /// Gives its Sandbox back for that reason, which ends what does not come back. Returns when that is done.
    ///
    /// # Errors
    /// [`Error::Terminated`].
    pub async fn release(&self, cause: Cause) -> Result<Published, Error> {
        let before = self.now();
        if let Some(ended) = before.ended {
            return Err(Error::Terminated(ended));
        }
        if matches!(before.state, State::Idle(_)) {
            return Ok(before);
        }
        let mut published = self.0.published.subscribe();
        // A closed channel means that it has just ended.
        let _ = self.0.asks.send(Ask::Release(cause)).await;
        // Where the next request was so fast that nobody saw it idle, the next activation tells.
        let gone = published.wait_for(|now| {
            now.ended.is_some() || matches!(now.state, State::Idle(_)) || now.activation > before.activation.max(1)
        });
        match gone.await {
            Ok(now) => Ok(now.clone()),
            Err(_) => Ok(self.now()),
        }
    }

    /// Whether it has a Sandbox, or is about to.
    pub fn holds(&self) -> bool {
        let now = self.0.published.borrow();
        now.ended.is_none() && !matches!(now.state, State::Idle(_))
    }

    /// Whether something uses it now: a command that counts, a stream, a connection. Before it is Active whoever asked for
    /// it counts.
    pub fn is_in_use(&self) -> bool {
        let coming = self.0.published.borrow().state.is_coming();
        coming || self.0.activity.borrow().open > 0
    }

    /// Gives its Sandbox back; one that does not come back ends. Returns when that is done.
    pub async fn put_away(&self, cause: Cause) {
        match self.now().spec.lives() {
            Lives::Once => drop(self.terminate(cause).await),
            // One that has ended meanwhile is what was wanted.
            Lives::Again => drop(self.release(cause).await),
        }
    }

    /// Replaces some of its settings.
    ///
    /// # Errors
    /// [`Error::Terminated`], a name that is taken.
    pub async fn update(&self, update: Update) -> Result<Published, Error> {
        self.ask(|answer| Ask::Update(Box::new(update), answer)).await?;
        Ok(self.now())
    }

    /// Puts in force what it may reach, as that is now.
    ///
    /// # Errors
    /// [`Error::Terminated`], or the privileged side cannot do it.
    pub async fn reach_again(&self) -> Result<(), Error> {
        self.ask(Ask::Reach).await
    }

    /// The last bytes of its guest's console, as the guest wrote them, and how many bytes it ever wrote.
    ///
    /// # Errors
    /// [`Error::Terminated`], or it has no Sandbox.
    pub async fn console(&self) -> Result<(Vec<u8>, u64), Error> {
        self.ask(Ask::Console).await
    }

    /// What its Sandbox uses, by the host's account.
    ///
    /// # Errors
    /// [`Error::Terminated`], or it has no Sandbox.
    pub async fn usage(&self) -> Result<pepo_sandbox::host::Usage, Error> {
        self.ask(Ask::Usage).await
    }

    /// What its Sandbox's network carried and refused; none where it has no network.
    ///
    /// # Errors
    /// [`Error::Terminated`], or it has no Sandbox.
    pub async fn traffic(&self) -> Result<Option<pepo_sandbox::net::Traffic>, Error> {
        self.ask(Ask::Traffic).await
    }

    pub(super) async fn ask<T>(&self, ask: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> Ask) -> Result<T, Error> {
        let (answer, answered) = oneshot::channel();
        let gone = || match self.now().ended {
            Some(ended) => Error::Terminated(ended),
            None => Error::Lost(self.id()),
        };
        self.0.asks.send(ask(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }

    pub(super) fn row(&self) -> SessionRow {
        let now = self.0.published.borrow();
        SessionRow {
            id: self.0.id,
            app: self.0.app,
            spec: (*now.spec).clone(),
            state: now.state.word(),
            generation: now.generation,
            activation: now.activation,
            created_at: self.0.created_at,
            active_at: now.active_at,
            expires_at: now.expires_at,
            keep_until: now.keep_until,
            last_end: now.last_end.clone(),
            ended: now.ended.clone(),
        }
    }
}
