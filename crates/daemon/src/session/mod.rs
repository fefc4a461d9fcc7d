//! Sessions: the table of those that have not ended, and the handle that everybody else holds on one.
//!
//! Owns the drivers. A handle reads copies ([`Published`]), lends the guest while a Sandbox serves ([`Session::serving`]),
//! and asks the driver for changes. Look-ups take the App, so what belongs to another is not there.
//!
//! ```text
//! server ──create──► Sessions ──spawn──► driver (one task, owns the Sandbox) ──► sandbox
//!    │                                     │ publishes
//!    └──serving──► Session ◄───────────────┘         exec, files and dial go straight to the guest
//! ```

mod activation;
mod activity;
mod command;
mod driver;
mod follow;
mod kept;
mod resume;
pub mod state;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use pepo_api::{AppId, Ended, ImageId, Reason, SandboxId, SessionId, SessionState};
use pepo_sandbox::guest::{self, Guest};
use pepo_sandbox::{Host, StatePath, Vmm};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};

use crate::capacity::{Capacity, Full};
use crate::config::SandboxConfig;
use crate::store::{self, SessionRow, Store, Write};
use state::{Cause, State};

pub use activity::Ticket;
pub use command::{Command, Commands, NewCommand, Status, shown_row};
pub use follow::{Follower, Interest, Item, Leaving};
pub use kept::Shelf;

/// What a Session was asked to be, resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Unique among its App's live ones.
    pub name: Option<String>,
    /// The Image as it was named.
    pub image: String,
    /// The Image.
    pub image_id: ImageId,
    /// Processors.
    pub cpus: u32,
    /// Memory.
    pub memory_mib: u32,
    /// Scratch disk.
    pub disk_mib: u32,
    /// How long the Sandbox stays after the last activity.
    pub keep_alive_seconds: u64,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// For filtering.
    pub labels: BTreeMap<String, String>,
}

/// An Image's files, as a Plan names them.
#[derive(Clone, Debug)]
pub struct Files {
    /// Which Image.
    pub id: ImageId,
    /// The kernel.
    pub kernel: StatePath,
    /// Modules and this release's guest agent.
    pub initramfs: StatePath,
    /// The root file system.
    pub root: StatePath,
}

/// Finds an Image by name or id.
pub type FindImage = Arc<dyn Fn(String) -> BoxFuture<'static, Result<Files, Error>> + Send + Sync>;

/// Why a request about a Session was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such thing for this App.
    #[error("no {what} `{which}`")]
    NotFound {
        /// Session, command, …
        what: &'static str,
        /// As asked for.
        which: String,
    },
    /// The Session has ended.
    #[error("the Session has ended")]
    Terminated(Ended),
    /// The Sandbox ended while this ran.
    #[error("the Sandbox ended")]
    SandboxEnded(Ended),
    /// Its Sandbox could not be started.
    #[error("the Sandbox could not be started: {}", .0.message)]
    ActivationFailed(Ended),
    /// It did not become Active in time.
    #[error("the Session was not active within {} s", .0.as_secs())]
    NotActive(Duration),
    /// `If-Activation` names another one.
    #[error("activation {wanted} is over, this is {now}")]
    Replaced {
        /// As asked for.
        wanted: u64,
        /// As it is.
        now: u64,
    },
    /// No such Image.
    #[error("no Image `{name}`")]
    NoImage {
        /// As asked for.
        name: String,
        /// What to do.
        hint: String,
    },
    /// The host has no room.
    #[error("no room for another Sandbox: {0}")]
    Full(#[from] Full),
    /// The daemon takes nothing new.
    #[error("pepod is stopping")]
    Draining,
    /// A value of the request.
    #[error("{message}")]
    Invalid {
        /// Which one.
        param: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The command's program could not be started.
    #[error("{message}")]
    NotStarted {
        /// What the guest says, escaped.
        message: String,
        /// What a shell would exit with.
        exit_code: i32,
    },
    /// The output is no longer kept.
    #[error("output of {0} is no longer kept")]
    OutputGone(pepo_api::CommandId),
    /// The guest did not do it.
    #[error("the guest did not do it")]
    Guest(#[from] guest::Error),
    /// The store.
    #[error("the record could not be kept")]
    Store(#[source] store::Error),
    /// The privileged side.
    #[error("the privileged side did not do it")]
    Host(#[from] pepo_sandbox::host::Error),
    /// The driver of this Session is gone, which is a fault of Pepo.
    #[error("nobody drives {0} any more")]
    Lost(SessionId),
}

impl Error {
    /// Whether it says only that a stream to the guest broke: the operation is not over by that, and whoever follows it
    /// may do so again from where it was.
    pub fn is_a_lost_stream(&self) -> bool {
        matches!(
            self,
            Error::Guest(guest::Error::Lost(_) | guest::Error::Unreachable(_))
                | Error::Host(pepo_sandbox::host::Error::Lost)
        )
    }
}

impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        match error {
            store::Error::NameTaken(name) => {
                Error::Invalid { param: "name", message: format!("another Session is called `{name}`") }
            }
            other => Error::Store(other),
        }
    }
}

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
enum Ask {
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
const ASKS: usize = 64;

#[derive(Debug)]
struct Shared {
    id: SessionId,
    app: AppId,
    created_at: jiff::Timestamp,
    published: watch::Sender<Published>,
    activity: watch::Sender<activity::Activity>,
    /// The first one given stands.
    terminate: watch::Sender<Option<Cause>>,
    asks: mpsc::Sender<Ask>,
    commands: Commands,
}

/// A handle on one Session. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Session(Arc<Shared>);

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
    async fn guest_of(&self, activation: u64, wait: Duration) -> Option<Guest> {
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

    fn row(&self) -> SessionRow {
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

/// A cause as it is told outside.
fn ended(cause: &Cause, at: jiff::Timestamp) -> Ended {
    Ended { message: cause.message.clone(), last_console_lines: cause.console.clone(), ..Ended::new(cause.reason, at) }
}

/// What a new Session needs to be made.
#[derive(Debug)]
pub struct NewSession {
    /// Whose it will be.
    pub app: AppId,
    /// What it shall be; the Image's id is filled in.
    pub spec: Spec,
    /// Its latest end.
    pub expires_at: Option<jiff::Timestamp>,
}

/// All Sessions that have not ended.
#[derive(Clone)]
pub struct Sessions(Arc<Inner>);

struct Inner {
    live: Mutex<HashMap<SessionId, Session>>,
    count: watch::Sender<usize>,
    draining: watch::Sender<bool>,
    store: Store,
    host: Host,
    capacity: Capacity,
    find_image: FindImage,
    config: SandboxConfig,
    vmm: Vmm,
    shelf: Shelf,
    owed: Mutex<BTreeMap<SandboxId, String>>,
}

impl std::fmt::Debug for Sessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sessions")
    }
}

impl Sessions {
    /// An empty table.
    pub fn new(store: Store, host: Host, find_image: FindImage, config: SandboxConfig, vmm: Vmm) -> Self {
        Sessions(Arc::new(Inner {
            live: Mutex::default(),
            count: watch::Sender::new(0),
            draining: watch::Sender::new(false),
            capacity: Capacity::new(config.most, config.memory_budget_mib, config.boots),
            store,
            host,
            find_image,
            config,
            vmm,
            shelf: Shelf::default(),
            owed: Mutex::default(),
        }))
    }

    fn live(&self) -> MutexGuard<'_, HashMap<SessionId, Session>> {
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// The privileged side.
    pub fn host(&self) -> &Host {
        &self.0.host
    }

    /// What Sandboxes get.
    pub fn config(&self) -> &SandboxConfig {
        &self.0.config
    }

    /// Output of commands whose Sandbox has gone.
    pub fn shelf(&self) -> &Shelf {
        &self.0.shelf
    }

    /// Makes one. Returns when it is recorded; its Sandbox is made meanwhile.
    ///
    /// # Errors
    /// [`Error::Draining`], [`Error::NoImage`], [`Error::Full`], a name that is taken.
    pub async fn create(&self, new: NewSession) -> Result<Session, Error> {
        if *self.0.draining.borrow() {
            return Err(Error::Draining);
        }
        let NewSession { app, mut spec, expires_at } = new;
        let files = (self.0.find_image)(spec.image.clone()).await?;
        spec.image_id = files.id;
        let place = self.0.capacity.admit(spec.memory_mib)?;
        let published = Published {
            generation: 1,
            state: State::Requested,
            spec: Arc::new(spec),
            activation: 0,
            active_at: None,
            expires_at,
            keep_until: None,
            guest: None,
            ended: None,
        };
        let (session, asks) = self.handle(SessionId::generate(), app, jiff::Timestamp::now(), published);
        self.0.store.write(Write::NewSession(Box::new(session.row()))).await?;
        self.enter(&session);
        driver::spawn(self.clone(), session.clone(), asks, place, driver::Start::New(files));
        Ok(session)
    }

    fn handle(
        &self,
        id: SessionId,
        app: AppId,
        created_at: jiff::Timestamp,
        published: Published,
    ) -> (Session, mpsc::Receiver<Ask>) {
        let (asks, asked) = mpsc::channel(ASKS);
        let shared = Shared {
            id,
            app,
            created_at,
            published: watch::Sender::new(published),
            activity: watch::Sender::new(activity::Activity::new(jiff::Timestamp::now())),
            terminate: watch::Sender::new(None),
            asks,
            commands: Commands::new(self.0.store.clone(), self.0.shelf.clone()),
        };
        (Session(Arc::new(shared)), asked)
    }

    fn enter(&self, session: &Session) {
        let mut live = self.live();
        live.insert(session.id(), session.clone());
        self.0.count.send_replace(live.len());
    }

    fn leave(&self, id: SessionId) {
        let mut live = self.live();
        live.remove(&id);
        self.0.count.send_replace(live.len());
    }

    /// The live Session of that App with that id or name.
    pub fn find_live(&self, app: AppId, which: &str) -> Option<Session> {
        let live = self.live();
        let found = match which.parse::<SessionId>() {
            Ok(id) => live.get(&id),
            Err(_) => live.values().find(|session| session.0.published.borrow().spec.name.as_deref() == Some(which)),
        };
        found.filter(|session| session.app() == app).cloned()
    }

    /// The live Session of that id.
    pub fn by_id(&self, id: SessionId) -> Option<Session> {
        self.live().get(&id).cloned()
    }

    /// The Session of that App with that id or name, live or ended.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn find(&self, app: AppId, which: &str) -> Result<Found, Error> {
        if let Some(session) = self.find_live(app, which) {
            return Ok(Found::Live(session));
        }
        let row = match which.parse::<SessionId>() {
            Ok(id) => self.0.store.session(app, id).await?,
            Err(_) => self.0.store.session_named(app, which.to_owned()).await?,
        };
        // It may have ended between the two looks; a row that has not is a live one again.
        match row {
            Some(row) if row.ended.is_some() => Ok(Found::Ended(Box::new(row))),
            Some(row) => match self.find_live(app, which) {
                Some(session) => Ok(Found::Live(session)),
                None => Ok(Found::Ended(Box::new(row))),
            },
            None => Err(Error::NotFound { what: "Session", which: which.chars().take(80).collect() }),
        }
    }

    /// Every live one.
    pub fn all(&self) -> Vec<Session> {
        self.live().values().cloned().collect()
    }

    /// How many are live, as it changes.
    pub fn count(&self) -> watch::Receiver<usize> {
        self.0.count.subscribe()
    }

    /// Every Sandbox that a live Session accounts for.
    pub fn sandboxes(&self) -> Vec<pepo_sandbox::SandboxId> {
        let live = self.live();
        let tenures = live.values().filter_map(|session| session.0.published.borrow().state.tenure());
        tenures.filter_map(|tenure| engine_id(tenure.sandbox)).collect()
    }

    /// Live Sessions by Image.
    pub fn images_in_use(&self) -> HashMap<ImageId, u32> {
        let mut uses = HashMap::new();
        for session in self.live().values() {
            *uses.entry(session.0.published.borrow().spec.image_id).or_insert(0) += 1;
        }
        uses
    }

    /// Sandboxes that have not given everything back, and what of.
    pub fn owed(&self) -> BTreeMap<SandboxId, String> {
        self.0.owed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes nothing new from here on.
    pub fn drain(&self) {
        self.0.draining.send_replace(true);
    }

    /// Whether it takes nothing new.
    pub fn is_draining(&self) -> bool {
        *self.0.draining.borrow()
    }

    /// Ends all of them, at most `within`.
    pub async fn end_all(&self, reason: Reason, within: Duration) {
        self.drain();
        let ending = self.all().into_iter().map(|session| async move { session.terminate(Cause::plain(reason)).await });
        let _ = tokio::time::timeout(within, futures_util::future::join_all(ending)).await;
    }

    /// Gives back everything of a Sandbox whose making failed or whose record is all there is. What is owed is remembered
    /// and tried again.
    async fn bury(&self, id: pepo_sandbox::SandboxId) {
        match self.0.host.release(id).await {
            Ok(()) => self.settled(id).await,
            Err(error) => self.owe(id, error.to_string()),
        }
    }

    async fn settled(&self, id: pepo_sandbox::SandboxId) {
        let api = sandbox_id(id);
        self.0.owed.lock().unwrap_or_else(PoisonError::into_inner).remove(&api);
        self.0.store.write_later(Write::DropSandbox(api)).await;
    }

    fn owe(&self, id: pepo_sandbox::SandboxId, what: String) {
        tracing::error!(sandbox = %id, owed = what, "not everything was given back; trying again");
        let first = self.0.owed.lock().unwrap_or_else(PoisonError::into_inner).insert(sandbox_id(id), what).is_none();
        if first {
            let sessions = self.clone();
            tokio::spawn(async move {
                let mut pause = Duration::from_secs(1);
                loop {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(60));
                    match sessions.0.host.release(id).await {
                        Ok(()) => return sessions.settled(id).await,
                        Err(pepo_sandbox::host::Error::Lost) => return,
                        Err(error) => {
                            sessions
                                .0
                                .owed
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .insert(sandbox_id(id), error.to_string());
                        }
                    }
                }
            });
        }
    }

    /// Forgets what ended longer ago than the retention, now and every hour.
    pub async fn forget(&self, retention: Duration) {
        loop {
            let before = store::millis(jiff::Timestamp::now()) - retention.as_millis() as i64;
            self.0.store.write_later(Write::Prune(before)).await;
            self.0.shelf.tidy();
            for _ in 0..60 {
                tokio::time::sleep(Duration::from_secs(60)).await;
                self.0.shelf.tidy();
            }
        }
    }
}

/// A Session that was looked for.
#[derive(Debug)]
pub enum Found {
    /// It lives.
    Live(Session),
    /// Only its record is left.
    Ended(Box<SessionRow>),
}

impl Found {
    /// The live one.
    ///
    /// # Errors
    /// [`Error::Terminated`].
    pub fn live(self) -> Result<Session, Error> {
        match self {
            Found::Live(session) => Ok(session),
            Found::Ended(row) => {
                Err(Error::Terminated(row.ended.unwrap_or_else(|| Ended::new(Reason::Unknown, row.created_at))))
            }
        }
    }
}

/// A Sandbox's id as the API has it.
pub fn sandbox_id(id: pepo_sandbox::SandboxId) -> SandboxId {
    // Both are `sbx_` and 32 hex digits of 16 bytes.
    id.to_string().parse().unwrap_or_else(|_| SandboxId::from(uuid::Uuid::nil()))
}

/// A Sandbox's id as the engine has it.
fn engine_id(id: SandboxId) -> Option<pepo_sandbox::SandboxId> {
    id.to_string().parse().ok()
}
