//! The handle that everybody but its driver holds on a Session: reads copies, lends the guest, asks for changes.
//!
//! Owns nothing of a Sandbox. A request that needs the guest goes through [`Session::serving`], which counts as use.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pepo_api::{AppId, Ended, Reason, SessionId, SessionState};
use pepo_sandbox::guest::Guest;
use tokio::sync::{mpsc, oneshot, watch};

use super::state::{Cause, State};
use super::{Commands, Error, Spec, Ticket, activity, ended};
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
    /// How it ended.
    pub ended: Option<Ended>,
}

/// A change asked of the driver.
#[derive(Debug)]
pub(super) enum Ask {
    Release,
    Update(Box<Update>, oneshot::Sender<Result<(), Error>>),
    /// What the console says, and what the host says it uses.
    Console(oneshot::Sender<Result<(Vec<u8>, u64), Error>>),
    Usage(oneshot::Sender<Result<pepo_sandbox::host::Usage, Error>>),
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
}

/// A handle on one Session. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Session(pub(super) Arc<Shared>);

/// A guest, lent for one request. While it is held the Session counts as used.
#[derive(Debug)]
pub struct Serving {
    /// The guest.
    pub guest: Guest,
    /// Which activation.
    pub activation: u64,
    /// Counts as use until dropped.
    pub ticket: Ticket,
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

    /// The guest, once the Session is Active: waits for that, at most `wait`.
    ///
    /// # Errors
    /// [`Error::Terminated`], [`Error::ActivationFailed`], [`Error::SandboxEnded`], [`Error::NotActive`], [`Error::Replaced`].
    pub async fn serving(&self, wanted: Option<u64>, wait: Duration) -> Result<Serving, Error> {
        let ticket = self.ticket();
        let mut published = self.0.published.subscribe();
        let was_over = published.borrow().state.word() == SessionState::Terminated;
        let waited =
            tokio::time::timeout(wait, published.wait_for(|now| now.guest.is_some() || now.ended.is_some())).await;
        let now = match waited {
            Ok(Ok(now)) => now.clone(),
            Ok(Err(_)) => return Err(Error::Lost(self.id())),
            Err(_) => return Err(Error::NotActive(wait)),
        };
        if let Some(ended) = now.ended {
            return Err(match ended.reason {
                Reason::SetupFailed if !was_over => Error::ActivationFailed(ended),
                _ => Error::Terminated(ended),
            });
        }
        if let Some(wanted) = wanted
            && wanted != now.activation
        {
            return Err(Error::Replaced { wanted, now: now.activation });
        }
        match now.guest {
            Some(guest) => Ok(Serving { guest, activation: now.activation, ticket }),
            None => Err(Error::NotActive(wait)),
        }
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
        Some(match (now.ended, now.state.cause()) {
            (Some(ended), _) => ended,
            (None, Some(cause)) => ended(cause, jiff::Timestamp::now()),
            (None, None) => Ended::new(Reason::Unknown, jiff::Timestamp::now()),
        })
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

    /// Gives its Sandbox back, which ends what has no Workspace. Returns when that is done.
    ///
    /// # Errors
    /// [`Error::Terminated`].
    pub async fn release(&self) -> Result<Published, Error> {
        if let Some(ended) = self.now().ended {
            return Err(Error::Terminated(ended));
        }
        // A closed channel means that it has just ended.
        let _ = self.0.asks.send(Ask::Release).await;
        Ok(self.ended().await)
    }

    /// Replaces some of its settings.
    ///
    /// # Errors
    /// [`Error::Terminated`], a name that is taken.
    pub async fn update(&self, update: Update) -> Result<Published, Error> {
        self.ask(|answer| Ask::Update(Box::new(update), answer)).await?;
        Ok(self.now())
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

    async fn ask<T>(&self, ask: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> Ask) -> Result<T, Error> {
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
            ended: now.ended.clone(),
        }
    }
}
