//! What must survive a restart: one SQLite file, one thread that writes to it, two connections that read.
//!
//! Owns the file and its schema. A write is a typed [`Write`], answered after the commit that made it durable: whatever is
//! queued when the writer comes round (at most [`GROUP`]) is one transaction, so a lone write waits for one sync and a
//! thousand of them for a few. A failing disk ends the daemon with the reason; Sandboxes are adopted by the next one.
//! Called by Sessions and by the server's lists; nothing else knows SQL.
//!
//! ```text
//! put, end, … ─► queue (bounded) ─► writer: begin · up to GROUP writes · commit (WAL, synchronous=FULL) ─► answers
//! lists, look-ups ─► one of two read-only connections, on a blocking thread
//! ```

mod app;
mod command;
mod event;
mod key;
mod once;
mod published;
mod quota;
mod secret;
mod session;
mod token;
mod traffic;
mod usage;
mod workspace;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags, Transaction};
use tokio::sync::{mpsc, oneshot, watch};

pub use app::{AppRow, ChangedApp};
pub use command::{CommandRow, CommandSpec, EndRow};
pub use event::{Actor, Event, Keep, Looked, Name, Towards, View, Wanted};
pub(crate) use key::hex;
pub use key::{EdgeNeeds, KeyRow, KeySpec, NewKey};
pub use once::{OnceKey, OnceRow};
pub use published::{LONGEST as PUBLISHED_LONGEST, PublishedRow};
pub use secret::ChangedSecrets;
pub use session::{Claim, Filter, SandboxRow, SessionRow};
pub use token::LONGEST as TOKEN_LONGEST;
pub use traffic::Counted;
pub use usage::{GroupBy, Purpose, SLICE_MS, Sample};
pub use workspace::{Budget, WorkspaceRow};

/// Writes of one transaction at most.
const GROUP: usize = 256;

/// How long a group waits for company, unless exactly one of it is waited for.
const GATHER: Duration = Duration::from_millis(2);

/// Writes that may wait. Beyond, the writer is so far behind that callers wait with it.
const QUEUE: usize = 4096;

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is from a release after this one.
    #[error(
        "{path} was written by a newer release (schema {found}, this one knows {known}); run that release, or put back the copy {path}.before-{found} beside it"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// The file is damaged.
    #[error("{path} is damaged ({reason}); move it away to start empty, or put a backup in its place")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        reason: String,
    },
    /// Another live thing of the App has that name.
    #[error("the name `{0}` is taken")]
    NameTaken(String),
    /// Somebody has that Sandbox, or nobody made it.
    #[error("{0} cannot be claimed")]
    NotClaimed(pepo_api::SandboxId),
    /// Another live Session of the App has that key.
    #[error("the key `{0}` is taken")]
    KeyTaken(String),
    /// There is no such App, or no longer.
    #[error("there is no such App")]
    NoApp,
    /// Something of it lives.
    #[error("{0} live Sessions")]
    InUse(u64),
    /// It has Workspaces, which are somebody's work.
    #[error("it has {0} Workspaces")]
    HasWorkspaces(u64),
    /// Somebody else changed it meanwhile.
    #[error("it was changed meanwhile")]
    Stale,
    /// A request with that key came before.
    #[error("a request with the key `{}` came before", .0.which.key)]
    Known(Box<OnceRow>),
    /// A quota of the App is used up.
    #[error("the quota `{}` is used up: {} of {}", .0.name, .0.used, .0.limit)]
    Quota(pepo_api::Quota),
    /// All Workspaces together would have more than they may.
    #[error(
        "no room for {wanted_mib} MiB of Workspace: all of them have {used_mib} of {limit_mib} MiB (workspace.budget)"
    )]
    NoRoom {
        /// What was asked for.
        wanted_mib: u64,
        /// What the others have.
        used_mib: u64,
        /// What all may have.
        limit_mib: u64,
    },
    /// No more Apps may have Workspaces.
    #[error("{0} Apps have Workspaces already, which is all that this instance has ids for")]
    NoOwner(u16),
    /// SQLite or the disk below it failed.
    #[error("store failed")]
    Sqlite(#[from] rusqlite::Error),
    /// A file operation failed.
    #[error("cannot {what} {path}")]
    File {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The writer has ended; the daemon is about to.
    #[error("store is closed")]
    Closed,
}

impl Error {
    /// Whether it refuses one write and says nothing against the store.
    pub fn is_an_answer(&self) -> bool {
        matches!(
            self,
            Error::NameTaken(_)
                | Error::KeyTaken(_)
                | Error::NotClaimed(_)
                | Error::NoApp
                | Error::InUse(_)
                | Error::HasWorkspaces(_)
                | Error::Stale
                | Error::Known(_)
                | Error::Quota(_)
                | Error::NoRoom { .. }
                | Error::NoOwner(_)
        )
    }
}

/// A change of what is stored.
#[derive(Debug)]
pub enum Write {
    /// A new Session. Refused where its name is taken.
    NewSession(Box<SessionRow>),
    /// A new Session with a Sandbox that is there already: both or neither.
    NewSessionOn(Box<SessionRow>, Claim),
    /// The Session as it is now.
    Session(Box<SessionRow>),
    /// Secrets of a Session: before it, where it is new.
    Secrets(Box<ChangedSecrets>),
    /// That Session was not made: its secrets are nobody's.
    ForgetSecrets(pepo_api::SessionId),
    /// A Sandbox about to be made; nobody's yet.
    NewSandbox(pepo_api::SandboxId),
    /// That Sandbox is a Session's from now on. Refused where it is somebody's, or not there.
    Claim(Claim),
    /// That Sandbox has given everything back.
    DropSandbox(pepo_api::SandboxId),
    /// What a Sandbox has used.
    Usage(Sample, Purpose),
    /// What a Sandbox's network carried and refused.
    Counted(pepo_api::SandboxId, Counted),
    /// A new Workspace. Refused where its name is taken or there is no room.
    NewWorkspace(Box<WorkspaceRow>, Budget),
    /// The Workspace as it is now.
    Workspace(Box<WorkspaceRow>),
    /// The Workspace, larger than it was. Refused where there is no room.
    GrowWorkspace(Box<WorkspaceRow>, Budget),
    /// Workspaces were there for so long, up to that time (milliseconds).
    WorkspaceTime {
        /// When it is.
        at: i64,
        /// How long it has been since the last time.
        milliseconds: i64,
    },
    /// That Workspace is gone.
    DropWorkspace(pepo_api::WorkspaceId),
    /// A command that was asked for.
    NewCommand(Box<CommandRow>),
    /// The same, refused where its App's quota is used up.
    CountedCommand(Box<CommandRow>),
    /// How a command ended.
    EndCommand(Box<EndRow>),
    /// An idle Session is about to get a Sandbox: refused where its App's quota is used up.
    Reactivate(pepo_api::SessionId),
    /// An App.
    NewApp(Box<ChangedApp>),
    /// An App as it is to be.
    App(Box<ChangedApp>),
    /// That App is no more. Refused while a Session of it lives.
    RemoveApp(pepo_api::AppId),
    /// A key.
    NewKey(Box<NewKey>),
    /// That key lets nobody in any more.
    RevokeKey(pepo_api::KeyId),
    /// A request that is done once. Refused where it came before.
    Once(Box<OnceRow>),
    /// What it was to make is there.
    OnceDone(OnceKey),
    /// Nothing came of it.
    OnceForget(OnceKey),
    /// No token of that Session that was made until now counts any more.
    VoidTokens(pepo_api::SessionId),
    /// A port is published, or has another end. Refused where its Session has ended or has too many.
    Publish(Box<PublishedRow>),
    /// That port is published no more.
    Withdraw(pepo_api::SessionId, u16),
    /// Something about the instance, by name.
    Fact(&'static str, String),
    /// Something that happened, or a call that was answered.
    Event(Box<Event>),
    /// A call that is about to be done.
    Asked(Box<Event>),
    /// Forget what is old.
    Prune {
        /// Records of what ended before this time (milliseconds since 1970).
        ended_before: i64,
        /// Which events stay.
        feed: Keep,
        /// What of the audit log stays.
        audit: Keep,
    },
}

struct Queued {
    write: Write,
    answer: Option<oneshot::Sender<Result<(), Error>>>,
}

/// The handle. Cloning is cheap.
#[derive(Clone)]
pub struct Store {
    queue: mpsc::Sender<Queued>,
    readers: Arc<[Mutex<Connection>; 2]>,
    failed: watch::Receiver<Option<String>>,
    feed: watch::Receiver<u64>,
    edge: watch::Receiver<u64>,
    totals: Arc<traffic::Known>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Store")
    }
}

/// Schema changes, in order; the file's `user_version` counts those that were made.
const MIGRATIONS: &[&str] = &["
    CREATE TABLE apps (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, created_at INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE keys (
        id TEXT PRIMARY KEY, app_id TEXT NOT NULL REFERENCES apps(id), sha256 TEXT NOT NULL UNIQUE, created_at INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE sessions (
        id TEXT PRIMARY KEY, app_id TEXT NOT NULL REFERENCES apps(id), name TEXT, spec TEXT NOT NULL, state TEXT NOT NULL,
        generation INTEGER NOT NULL, activation INTEGER NOT NULL, created_at INTEGER NOT NULL, active_at INTEGER,
        expires_at INTEGER, keep_until INTEGER, ended_at INTEGER, ended TEXT
    ) STRICT, WITHOUT ROWID;
    CREATE UNIQUE INDEX session_names ON sessions(app_id, name) WHERE name IS NOT NULL AND ended_at IS NULL;
    CREATE INDEX session_ends ON sessions(ended_at) WHERE ended_at IS NOT NULL;
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY, session_id TEXT NOT NULL, activation INTEGER NOT NULL, claimed INTEGER NOT NULL,
        made_at INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE commands (
        session_id TEXT NOT NULL, id TEXT NOT NULL, spec TEXT NOT NULL, activation INTEGER NOT NULL,
        started_at INTEGER NOT NULL, ended_at INTEGER, ended TEXT, stdout_bytes INTEGER NOT NULL DEFAULT 0,
        stderr_bytes INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (session_id, id)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX command_runs ON commands(session_id) WHERE ended_at IS NULL;
    CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    INSERT INTO counters VALUES ('edge_generation', 1);
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
", event::MIGRATION,
    // A Sandbox is nobody's until it is claimed, and one activation never has two.
    "
    CREATE TABLE claimable (
        id TEXT PRIMARY KEY, session_id TEXT, activation INTEGER, made_at INTEGER NOT NULL,
        CHECK ((session_id IS NULL) = (activation IS NULL))
    ) STRICT, WITHOUT ROWID;
    INSERT INTO claimable SELECT id, iif(claimed, session_id, NULL), iif(claimed, activation, NULL), made_at FROM sandboxes;
    DROP TABLE sandboxes;
    ALTER TABLE claimable RENAME TO sandboxes;
    CREATE UNIQUE INDEX sandbox_claims ON sandboxes(session_id, activation) WHERE session_id IS NOT NULL;
", "
    ALTER TABLE sessions ADD COLUMN key TEXT;
    ALTER TABLE sessions ADD COLUMN last_end TEXT;
    CREATE UNIQUE INDEX session_keys ON sessions(app_id, key) WHERE key IS NOT NULL AND ended_at IS NULL;
    CREATE INDEX session_keys_of_all ON sessions(app_id, key, id) WHERE key IS NOT NULL;
", app::MIGRATION, key::MIGRATION, event::FORGOTTEN, usage::MIGRATION, workspace::MIGRATION, secret::MIGRATION, once::MIGRATION, traffic::MIGRATION, token::MIGRATION, workspace::USAGE, published::MIGRATION];

/// The schema that this release makes.
#[allow(clippy::cast_possible_truncation, reason = "there are a few")]
pub const SCHEMA: u32 = MIGRATIONS.len() as u32;

/// The schema of a store that nobody uses, if it is sound and not from a newer release.
///
/// # Errors
/// [`Error::Newer`], [`Error::Damaged`].
pub fn inspect(path: &Path) -> Result<u32, Error> {
    let connection = connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    sound(&connection, path)?;
    let found: u32 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    match found {
        0 => Err(Error::Damaged { path: path.into(), reason: "it has no schema of ours".into() }),
        found if found > SCHEMA => Err(Error::Newer { path: path.into(), found, known: SCHEMA }),
        found => Ok(found),
    }
}

/// Prepares a store that comes from a backup: its Sandboxes are not of this boot, no copy of keys that an edge has is taken
/// for its own, and what was open to everybody then may have been withdrawn since.
///
/// # Errors
/// A disk that fails.
pub fn restored(path: &Path) -> Result<(), Error> {
    let connection = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    connection.execute("INSERT OR REPLACE INTO facts (name, value) VALUES ('boot_id', 'restored')", [])?;
    connection.execute(
        "UPDATE counters SET value = max(value + 1, ?1) WHERE name = 'edge_generation'",
        [millis(jiff::Timestamp::now())],
    )?;
    published::forget_all(&connection)?;
    // All of it into the one file that is put in place.
    connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
    connection.query_row("PRAGMA journal_mode=DELETE", [], |_| Ok(()))?;
    Ok(())
}

fn sound(connection: &Connection, path: &Path) -> Result<(), Error> {
    let damaged = |reason: String| Error::Damaged { path: path.into(), reason };
    let said: String = connection
        .query_row("PRAGMA quick_check(1)", [], |row| row.get(0))
        .map_err(|error| damaged(error.to_string()))?;
    if said == "ok" { Ok(()) } else { Err(damaged(said)) }
}

impl Store {
    /// Writes all of it, as it is at one moment, into a new file. Writers go on meanwhile.
    ///
    /// # Errors
    /// The file is there, or a disk that fails.
    pub fn copy_to(&self, path: &Path) -> Result<(), Error> {
        self.read_now(|connection| connection.execute("VACUUM INTO ?1", [path.to_string_lossy()]).map(drop))
    }

    /// Opens the file, makes or migrates its schema, starts the writer.
    ///
    /// # Errors
    /// A file of a newer release, a damaged one, a disk that fails.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).map_err(|source| Error::File {
                what: "make",
                path: directory.into(),
                source,
            })?;
        }
        let mut connection = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE)?;
        migrate(&mut connection, path, MIGRATIONS)?;
        app::default_app(&connection)?;
        event::settle(&connection)?;
        usage::settle(&connection)?;
        let reader = || connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY).map(Mutex::new);
        let readers = Arc::new([reader()?, reader()?]);
        let (queue, waiting) = mpsc::channel(QUEUE);
        let (failure, failed) = watch::channel(None);
        let newest: i64 = connection.query_row("SELECT coalesce(max(seq), 0) FROM events", [], |row| row.get(0))?;
        let (feed_moves, feed) = watch::channel(newest as u64);
        let (edge_moves, edge) = watch::channel(key::generation(&connection)?);
        let totals = Arc::new(traffic::Known::default());
        let told = Told { feed: feed_moves, edge: edge_moves, totals: totals.clone() };
        std::thread::Builder::new()
            .name("store".into())
            .spawn(move || {
                // A panic in here must end the daemon as an error does, so the sender says it either way.
                let ended =
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| write_all(connection, waiting, &told)));
                let reason = match ended {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "the store's writer panicked".into(),
                };
                failure.send_replace(Some(reason));
            })
            .map_err(|source| Error::File { what: "start a writer for", path: path.into(), source })?;
        Ok(Store { queue, readers, failed, feed, edge, totals })
    }

    /// Makes a change; returns when it is on the disk.
    ///
    /// # Errors
    /// [`Error::NameTaken`], [`Error::KeyTaken`], or a failing disk.
    pub async fn write(&self, write: Write) -> Result<(), Error> {
        let (answer, answered) = oneshot::channel();
        self.queue.send(Queued { write, answer: Some(answer) }).await.map_err(|_| Error::Closed)?;
        answered.await.map_err(|_| Error::Closed)?
    }

    /// Makes a change without waiting for the disk; waits only where thousands wait already. A failure ends the daemon.
    pub async fn write_later(&self, write: Write) {
        // An error means that the writer has ended, which the daemon learns from `failed`.
        let _ = self.queue.send(Queued { write, answer: None }).await;
    }

    /// As [`Store::write_later`], for where nothing can be waited for.
    pub fn write_soon(&self, write: Write) {
        if let Err(mpsc::error::TrySendError::Full(queued)) = self.queue.try_send(Queued { write, answer: None }) {
            let queue = self.queue.clone();
            // Thousands wait already: this one waits on a task of its own.
            tokio::spawn(async move {
                let _ = queue.send(queued).await;
            });
        }
    }

    /// The reason, once the writer has failed. Never returns while it works.
    pub async fn failed(&self) -> String {
        let mut failed = self.failed.clone();
        match failed.wait_for(Option::is_some).await.map(|reason| reason.clone()) {
            Ok(Some(reason)) => reason,
            // The writer ended because all handles are going: not a failure.
            _ => std::future::pending().await,
        }
    }

    /// What is known about the instance under that name.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn fact(&self, name: &'static str) -> Result<Option<String>, Error> {
        use rusqlite::OptionalExtension as _;
        self.read(move |connection| {
            connection.query_row("SELECT value FROM facts WHERE name = ?1", [name], |row| row.get(0)).optional()
        })
        .await
    }

    /// Runs a look-up on a blocking thread.
    async fn read<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> Result<T, Error> {
        let readers = self.readers.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let connection = match readers[0].try_lock() {
                Ok(free) => free,
                Err(_) => readers[1].lock().unwrap_or_else(PoisonError::into_inner),
            };
            look(&connection)
        });
        Ok(looked.await.map_err(|_| Error::Closed)??)
    }

    /// A look-up before there is a runtime, or in a test.
    fn read_now<T>(&self, look: impl FnOnce(&Connection) -> Result<T, rusqlite::Error>) -> Result<T, Error> {
        Ok(look(&self.readers[0].lock().unwrap_or_else(PoisonError::into_inner))?)
    }
}

fn connect(path: &Path, flags: OpenFlags) -> Result<Connection, Error> {
    let connection = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.busy_timeout(Duration::from_secs(5))?;
    let ready = connection
        .pragma_update(None, "synchronous", "FULL")
        .and_then(|()| connection.pragma_update(None, "foreign_keys", true))
        .and_then(|()| connection.pragma_update(None, "secure_delete", true))
        .and_then(|()| connection.query_row("PRAGMA journal_mode=WAL", [], |row| row.get::<_, String>(0)));
    match ready {
        Ok(_) => Ok(connection),
        // A reader may not change the mode and need not.
        Err(_) if flags.contains(OpenFlags::SQLITE_OPEN_READ_ONLY) => Ok(connection),
        Err(error) => Err(Error::Damaged { path: path.into(), reason: error.to_string() }),
    }
}

/// Brings the schema up to date, with a copy of the file before each step.
fn migrate(connection: &mut Connection, path: &Path, migrations: &[&str]) -> Result<(), Error> {
    sound(connection, path)?;
    let found: u32 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    let known = migrations.len() as u32;
    if found > known {
        return Err(Error::Newer { path: path.into(), found, known });
    }
    for (step, sql) in migrations.iter().enumerate().skip(found as usize) {
        if step > 0 {
            let copy = PathBuf::from(format!("{}.before-{}", path.display(), step + 1));
            match std::fs::remove_file(&copy) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(source) => return Err(Error::File { what: "replace", path: copy, source }),
            }
            connection.execute("VACUUM INTO ?1", [copy.to_string_lossy()])?;
        }
        let transaction = connection.transaction()?;
        transaction.execute_batch(sql)?;
        transaction.pragma_update(None, "user_version", step as u32 + 1)?;
        transaction.commit()?;
    }
    Ok(())
}

/// Numbers that others wait for, and what is to be forgotten once there is something new.
struct Told {
    feed: watch::Sender<u64>,
    edge: watch::Sender<u64>,
    totals: Arc<traffic::Known>,
}

/// The writer: groups until every handle is gone.
fn write_all(mut connection: Connection, mut queue: mpsc::Receiver<Queued>, told: &Told) -> Result<(), Error> {
    while let Some(first) = queue.blocking_recv() {
        let mut awaited = usize::from(first.answer.is_some());
        let mut group = vec![first];
        let mut since = None;
        while group.len() < GROUP {
            match queue.try_recv() {
                Ok(next) => {
                    awaited += usize::from(next.answer.is_some());
                    group.push(next);
                }
                // One waits: commit at once. Several do, or nobody does: others are on their way.
                Err(_) if awaited == 1 => break,
                Err(_) => {
                    if since.get_or_insert_with(Instant::now).elapsed() >= GATHER {
                        break;
                    }
                    std::thread::sleep(GATHER / 8);
                }
            }
        }
        let transaction = connection.transaction()?;
        let mut answers = Vec::with_capacity(group.len());
        let mut newest = None;
        let counted = group.iter().any(|queued| matches!(queued.write, Write::Counted(..) | Write::Prune { .. }));
        for Queued { write, answer } in group {
            match apply(&transaction, &write, &mut newest) {
                Ok(()) => answers.push((answer, Ok(()))),
                Err(error) if error.is_an_answer() => answers.push((answer, Err(error))),
                Err(error) => return Err(error),
            }
        }
        let edge = key::generation(&transaction)?;
        transaction.commit()?;
        if counted {
            told.totals.forget();
        }
        if let Some(newest) = newest {
            told.feed.send_replace(newest);
        }
        told.edge.send_if_modified(|before| std::mem::replace(before, edge) != edge);
        for (answer, result) in answers {
            if let Some(answer) = answer {
                // Whoever asked may have gone.
                let _ = answer.send(result);
            }
        }
    }
    Ok(())
}

fn apply(transaction: &Transaction<'_>, write: &Write, newest: &mut Option<u64>) -> Result<(), Error> {
    match write {
        Write::NewSession(row) => session::insert(transaction, row),
        Write::Session(row) => {
            if row.ended.is_some() {
                secret::forget(transaction, row.id)?;
                published::forget(transaction, row.id)?;
            }
            session::update(transaction, row)
        }
        Write::Secrets(changed) => secret::change(transaction, changed),
        Write::ForgetSecrets(session) => secret::forget(transaction, *session),
        Write::NewSessionOn(row, claim) => {
            session::claim(transaction, claim)?;
            match session::insert(transaction, row) {
                Ok(()) => usage::open(transaction, claim, millis(now())),
                Err(error) => {
                    // The group's other writes stay, so this one is undone by hand; where that fails the group fails.
                    session::unclaim(transaction, claim.sandbox)?;
                    Err(error)
                }
            }
        }
        Write::NewSandbox(id) => session::insert_sandbox(transaction, *id),
        Write::Claim(claim) => {
            session::claim(transaction, claim)?;
            usage::open(transaction, claim, millis(now()))
        }
        Write::DropSandbox(id) => {
            usage::close(transaction, *id)?;
            traffic::close(transaction, *id)?;
            session::drop_sandbox(transaction, *id)
        }
        Write::Usage(sample, purpose) => usage::sample(transaction, sample, *purpose),
        Write::Counted(sandbox, counted) => traffic::count(transaction, *sandbox, counted),
        Write::NewWorkspace(row, budget) => workspace::insert(transaction, row, *budget),
        Write::Workspace(row) => workspace::update(transaction, row),
        Write::GrowWorkspace(row, budget) => workspace::grow(transaction, row, *budget),
        Write::WorkspaceTime { at, milliseconds } => workspace::passed(transaction, *at, *milliseconds),
        Write::DropWorkspace(id) => workspace::remove(transaction, *id),
        Write::NewCommand(row) => command::insert(transaction, row),
        Write::CountedCommand(row) => {
            quota::command(transaction, row.session)?;
            command::insert(transaction, row)
        }
        Write::EndCommand(row) => command::end(transaction, row),
        Write::Reactivate(id) => quota::reactivate(transaction, *id),
        Write::NewApp(app) => app::insert(transaction, app),
        Write::App(app) => app::update(transaction, app),
        Write::RemoveApp(id) => app::remove(transaction, *id),
        Write::NewKey(key) => key::insert(transaction, key),
        Write::RevokeKey(id) => key::revoke(transaction, *id),
        Write::Once(row) => once::claim(transaction, row),
        Write::OnceDone(which) => once::done(transaction, which),
        Write::OnceForget(which) => once::forget(transaction, which),
        Write::VoidTokens(session) => token::void(transaction, *session),
        Write::Publish(row) => published::insert(transaction, row),
        Write::Withdraw(session, port) => published::remove(transaction, *session, *port),
        Write::Fact(name, value) => {
            transaction
                .execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?1, ?2)", [name, value.as_str()])?;
            Ok(())
        }
        Write::Event(event) => {
            *newest = Some(event::insert(transaction, event)?);
            Ok(())
        }
        Write::Asked(event) => event::asked(transaction, event),
        Write::Prune { ended_before, feed, audit } => {
            command::prune(transaction, *ended_before)?;
            session::prune(transaction, *ended_before)?;
            key::prune(transaction, *ended_before)?;
            app::prune(transaction, *ended_before)?;
            once::prune(transaction, millis(now()))?;
            published::prune(transaction, millis(now()))?;
            traffic::prune(transaction)?;
            event::prune(transaction, View::Feed, *feed)?;
            event::prune(transaction, View::Audit, *audit)?;
            // What was billed can be looked up for as long as who asked for it.
            workspace::prune_usage(transaction, audit.before)?;
            usage::prune(transaction, audit.before)
        }
    }
}

/// Milliseconds since 1970 of a time.
pub fn millis(at: jiff::Timestamp) -> i64 {
    at.as_millisecond()
}

/// Now, as finely as it is kept: what was told is what a restart finds.
pub fn now() -> jiff::Timestamp {
    time(millis(jiff::Timestamp::now()))
}

/// The time of that many milliseconds since 1970; the nearest there is where the number is none.
pub fn time(millis: i64) -> jiff::Timestamp {
    jiff::Timestamp::from_millisecond(millis).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
}

/// A column that holds JSON.
fn json<T: serde::de::DeserializeOwned>(row: &rusqlite::Row<'_>, column: &str) -> Result<T, rusqlite::Error> {
    let text: String = row.get(column)?;
    serde_json::from_str(&text).map_err(|error| wrong(row, column, error))
}

/// A column that holds an id.
fn id<T: std::str::FromStr<Err = pepo_api::IdError>>(
    row: &rusqlite::Row<'_>,
    column: &str,
) -> Result<T, rusqlite::Error> {
    let text: String = row.get(column)?;
    text.parse().map_err(|error| wrong(row, column, error))
}

fn wrong(
    row: &rusqlite::Row<'_>,
    column: &str,
    error: impl std::error::Error + Send + Sync + 'static,
) -> rusqlite::Error {
    let index = row.as_ref().column_index(column).unwrap_or_default();
    rusqlite::Error::FromSqlConversionFailure(index, rusqlite::types::Type::Text, Box::new(error))
}

fn to_json<T: serde::Serialize>(value: &T) -> Result<String, Error> {
    serde_json::to_string(value)
        .map_err(|error| Error::Sqlite(rusqlite::Error::ToSqlConversionFailure(Box::new(error))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_file_is_refused_and_named() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("pepo.db");
        drop(Store::open(&path).expect("store"));
        Connection::open(&path).expect("open").pragma_update(None, "user_version", 99).expect("set");
        let error = Store::open(&path).expect_err("refused");
        assert!(matches!(error, Error::Newer { found: 99, .. }), "{error}");
        assert!(error.to_string().contains("newer release"), "{error}");
    }

    #[test]
    fn a_damaged_file_is_refused_and_kept() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("pepo.db");
        std::fs::write(&path, vec![7u8; 8192]).expect("write");
        let error = Store::open(&path).expect_err("refused");
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
        assert_eq!(std::fs::read(&path).expect("read").len(), 8192);
    }

    #[test]
    fn a_migration_leaves_a_copy_of_before() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("pepo.db");
        drop(Store::open(&path).expect("store"));
        let mut connection = Connection::open(&path).expect("open");
        let mut more = MIGRATIONS.to_vec();
        more.push("CREATE TABLE extra (x INTEGER) STRICT;");
        migrate(&mut connection, &path, &more).expect("migrate");
        let copy = directory.path().join(format!("pepo.db.before-{}", more.len()));
        let copy = Connection::open(copy).expect("copy");
        let version: u32 = copy.query_row("PRAGMA user_version", [], |row| row.get(0)).expect("version");
        assert_eq!(version as usize, MIGRATIONS.len());
        assert!(copy.prepare("SELECT x FROM extra").is_err());
        assert!(connection.prepare("SELECT x FROM extra").is_ok());
    }

    #[test]
    fn sandboxes_of_the_first_schema_keep_their_owners() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("pepo.db");
        let mut connection = Connection::open(&path).expect("open");
        migrate(&mut connection, &path, &MIGRATIONS[..1]).expect("the first schema");
        let session = pepo_api::SessionId::generate();
        let [mine, nobodys] = [pepo_api::SandboxId::generate(), pepo_api::SandboxId::generate()];
        for (id, claimed) in [(mine, true), (nobodys, false)] {
            connection
                .execute(
                    "INSERT INTO sandboxes (id, session_id, activation, claimed, made_at) VALUES (?1, ?2, 3, ?3, 1)",
                    rusqlite::params![id.to_string(), session.to_string(), claimed],
                )
                .expect("insert");
        }
        drop(connection);
        let rows = Store::open(&path).expect("store").sandboxes().expect("rows");
        let claim = |id| rows.iter().find(|row| row.id == id).expect("there").claim;
        assert_eq!((claim(mine), claim(nobodys)), (Some((session, 3)), None));
    }

    #[tokio::test]
    async fn what_is_written_is_there_after_reopening() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("pepo.db");
        let store = Store::open(&path).expect("store");
        let app = store.default_app().expect("app");
        let rows: Vec<_> = (0..300).map(|n| session::tests::row(app, Some(format!("s{n}")))).collect();
        let written = rows.iter().cloned().map(|row| store.write(Write::NewSession(Box::new(row))));
        for result in futures_util::future::join_all(written).await {
            result.expect("written");
        }
        let again = store.write(Write::NewSession(Box::new(session::tests::row(app, Some("s7".into()))))).await;
        assert!(matches!(again, Err(Error::NameTaken(name)) if name == "s7"));
        drop(store);
        let store = Store::open(&path).expect("store");
        assert_eq!(store.default_app().expect("app"), app);
        assert_eq!(store.live_sessions().expect("live").len(), 300);
        let found = store.session(app, rows[5].id).await.expect("read").expect("there");
        assert_eq!(found, rows[5]);
        assert!(store.session(pepo_api::AppId::generate(), rows[5].id).await.expect("read").is_none());
    }
}
