//! Workspaces: durable directories of an App, which Sandboxes of its Sessions have at `/workspace`.
//!
//! The record is made first and goes last; the tree on the host is made when it is first needed, and removed when nobody
//! has it. Who has one now is kept here, by Sandbox, from before its guest is made to after everything of it was given
//! back: so a Workspace for one writer has one, whatever ends how.
//!
//! ```text
//! record ──first activation──▶ tree ──attach (waits or is refused where one may have it)──▶ served ──settled──▶ free
//!    '── removed while nobody has it: tree, then record
//! ```
//! Called by the server (its routes), by activations and by whoever settles a Sandbox's end.

mod lent;
mod visit;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pepo_api::{AppId, IfBusy, SandboxId, SessionId, WorkspaceChoice, WorkspaceId, WorkspaceMode};
use pepo_sandbox::host::{self, Refusal, VolumeState};
use pepo_sandbox::jail::Access;
use pepo_sandbox::share::Cache;
use pepo_sandbox::volume::{Medium, VolumePlan, VolumeUsage};
use pepo_sandbox::{Host, Mount, VolumeId};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::backup;
use crate::store::{self, Budget, Store, WorkspaceRow, Write};

pub use lent::{Connection, Lent, MOST as MOST_LENT};
pub use visit::Visit;

use visit::Visits;

/// Where a guest has its Workspace.
pub const PATH: &str = "/workspace";

/// The directory in it that keeps paths of other places.
pub const KEPT: &str = "/workspace/.pepo";

/// Between two tries to remove what would not go.
const AGAIN: Duration = Duration::from_secs(5);

/// Removals of which it is remembered what they gave back.
const REMEMBERED: usize = 64;

/// Why it was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is none of that id or name.
    #[error("no Workspace `{0}`")]
    NotFound(String),
    /// A value of the request.
    #[error("{message}")]
    Invalid {
        /// Which one.
        param: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The name is taken.
    #[error("another Workspace is called `{0}`")]
    NameTaken(String),
    /// There is no room for it.
    #[error("{0}")]
    Full(String),
    /// Somebody has it.
    #[error("{0}")]
    Busy(String),
    /// The store.
    #[error("the record could not be kept")]
    Store(#[source] store::Error),
    /// The privileged side.
    #[error("the tree could not be used")]
    Host(#[source] host::Error),
    /// What a backup has of it is not in place.
    #[error("it could not be restored: {0}")]
    NotRestored(String),
}

impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        match error {
            store::Error::NameTaken(name) => Error::NameTaken(name),
            error @ (store::Error::NoRoom { .. } | store::Error::NoOwner(_)) => Error::Full(error.to_string()),
            error => Error::Store(error),
        }
    }
}

/// What the operator says about Workspaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkspaceConfig {
    /// Cap on bytes where a request names none.
    pub size_mib: u64,
    /// Cap on files where a request names none.
    pub max_files: u64,
    /// What all of them may have together; `None`: no limit.
    pub budget_mib: Option<u64>,
    /// Directories that may take the place of a file system of its own, by name.
    pub directories: BTreeMap<String, std::path::PathBuf>,
}

/// A Session's use of a Workspace, resolved and recorded with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// Which.
    pub id: WorkspaceId,
    /// Whether it was made for this Session and goes with it.
    pub own: bool,
    /// With `own`: it stays when the Session is terminated.
    pub keep: bool,
    /// What the Session may do with it.
    pub mode: WorkspaceMode,
    /// What an activation does while another Sandbox has it.
    pub if_busy: IfBusy,
    /// Whether no other Sandbox may have it at the same time.
    pub alone: bool,
}

/// What a new Workspace shall be.
#[derive(Debug)]
pub struct NewWorkspace {
    /// Its id.
    pub id: WorkspaceId,
    /// Whose.
    pub app: AppId,
    /// Unique in its App.
    pub name: Option<String>,
    /// Cap on its bytes.
    pub size_mib: Option<u64>,
    /// Cap on its files.
    pub max_files: Option<u64>,
    /// Whether one Sandbox may have it at a time.
    pub single_writer: bool,
    /// A directory of the operator's.
    pub directory: Option<String>,
    /// For filtering.
    pub labels: BTreeMap<String, String>,
    /// The Session whose own it is, and whether it stays when that ends.
    pub own: Option<(SessionId, bool)>,
}

/// All Workspaces. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Workspaces(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    host: Host,
    config: WorkspaceConfig,
    /// The store's, where what was restored waits.
    directory: PathBuf,
    /// Held by the one import of what was restored.
    restoring: tokio::sync::Mutex<()>,
    holders: Mutex<Holders>,
    /// What the last removals gave back, for whoever asked for them.
    freed: Mutex<VecDeque<(WorkspaceId, u64)>>,
    left: Notify,
}

/// Who has which Workspace.
#[derive(Debug, Default)]
struct Holders {
    /// Each with whether it has it alone.
    sandboxes: HashMap<SandboxId, (WorkspaceId, bool)>,
    visits: Visits,
}

/// The engine's id of a Workspace's tree: the same 16 bytes.
fn volume(id: WorkspaceId) -> VolumeId {
    VolumeId::new(id.uuid().into_bytes())
}

impl Workspaces {
    /// Those of this store.
    pub fn new(store: Store, host: Host, config: WorkspaceConfig, directory: PathBuf) -> Self {
        Workspaces(Arc::new(Inner {
            store,
            host,
            config,
            directory,
            restoring: tokio::sync::Mutex::default(),
            holders: Mutex::default(),
            freed: Mutex::default(),
            left: Notify::new(),
        }))
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// The privileged side.
    pub fn host(&self) -> &Host {
        &self.0.host
    }

    /// What the operator says.
    pub fn config(&self) -> &WorkspaceConfig {
        &self.0.config
    }

    /// Where archives of a restored backup wait.
    pub fn restored(&self) -> PathBuf {
        self.0.directory.join("workspaces")
    }

    fn holders(&self) -> MutexGuard<'_, Holders> {
        self.0.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn budget(&self) -> Budget {
        Budget { most_mib: self.0.config.budget_mib }
    }

    /// Records a new one. Its tree is made when it is first needed.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NameTaken`], [`Error::Full`].
    pub async fn create(&self, new: NewWorkspace) -> Result<WorkspaceRow, Error> {
        let config = &self.0.config;
        let NewWorkspace { id, app, name, size_mib, max_files, single_writer, directory, labels, own } = new;
        if let Some(directory) = &directory
            && !config.directories.contains_key(directory)
        {
            let known: Vec<_> = config.directories.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let message = format!("the operator lists no directory `{}` (there is: {known})", directory.escape_debug());
            return Err(Error::Invalid { param: "directory", message });
        }
        let size_mib = size_mib.unwrap_or(config.size_mib);
        let max_files = max_files.unwrap_or_else(|| {
            // The default is for the default size: a small tree has fewer files, and smaller tables.
            config.max_files.min((size_mib.saturating_mul(256)).max(*pepo_sandbox::volume::VOLUME_FILES.start()))
        });
        within("size_mib", size_mib, &pepo_sandbox::volume::VOLUME_MIB)?;
        within("max_files", max_files, &pepo_sandbox::volume::VOLUME_FILES)?;
        let row = WorkspaceRow {
            id,
            app,
            name,
            size_mib,
            max_files,
            single_writer,
            directory,
            session: own.map(|(session, _)| session),
            keep: own.is_some_and(|(_, keep)| keep),
            labels,
            created_at: store::time(store::millis(jiff::Timestamp::now())),
        };
        self.0.store.write(Write::NewWorkspace(Box::new(row.clone()), self.budget())).await?;
        Ok(row)
    }

    /// The App's Workspace of that id or name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn find(&self, app: AppId, which: &str) -> Result<WorkspaceRow, Error> {
        let row = match which.parse::<WorkspaceId>() {
            Ok(id) => self.0.store.workspace(app, id).await?,
            Err(_) => self.0.store.workspace_named(app, which.to_owned()).await?,
        };
        row.ok_or_else(|| Error::NotFound(which.chars().take(80).collect()))
    }

    /// What a Session asked for, resolved. A Workspace of its own is recorded here.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotFound`], [`Error::Busy`], [`Error::Full`].
    pub async fn choose(&self, app: AppId, session: SessionId, choice: &WorkspaceChoice) -> Result<Use, Error> {
        let invalid = |message: &str| Error::Invalid { param: "workspace", message: message.to_owned() };
        let mode = choice.mode.unwrap_or_default();
        let if_busy = choice.if_busy.unwrap_or_default();
        let which = match (choice.own, choice.id, &choice.name) {
            (None | Some(true), None, None) => None,
            (None | Some(false), Some(id), None) => Some(id.to_string()),
            (None | Some(false), None, Some(name)) => Some(name.clone()),
            (Some(false), None, None) => {
                return Err(invalid("`own` is false, and neither `id` nor `name` says which; null is none"));
            }
            _ => return Err(invalid("one of `own`, `id` and `name` says which Workspace, not several")),
        };
        let Some(which) = which else {
            if mode == WorkspaceMode::Ro {
                return Err(invalid("a Workspace of its own that nobody may write to would stay empty"));
            }
            let keep = choice.keep.unwrap_or(false);
            let row = self
                .create(NewWorkspace {
                    id: WorkspaceId::generate(),
                    app,
                    name: None,
                    size_mib: None,
                    max_files: None,
                    single_writer: false,
                    directory: None,
                    labels: BTreeMap::new(),
                    own: Some((session, keep)),
                })
                .await?;
            return Ok(Use { id: row.id, own: true, keep, mode, if_busy, alone: true });
        };
        if choice.keep.is_some() {
            return Err(invalid("`keep` is for a Workspace of its own: any other one stays anyhow"));
        }
        let row = self.find(app, &which).await?;
        if let Some(owner) = row.session {
            return Err(Error::Busy(format!(
                "{} is {owner}'s own; it can be shared when that Session has ended",
                row.id
            )));
        }
        Ok(Use { id: row.id, own: false, keep: true, mode, if_busy, alone: row.single_writer })
    }

    /// Gives a Workspace to a Sandbox, before its guest is made; at once, or when whoever has it alone has let go.
    ///
    /// # Errors
    /// [`Error::Busy`] where it is had alone and that was asked for.
    pub async fn attach(&self, sandbox: SandboxId, wanted: &Use) -> Result<(), Error> {
        loop {
            let left = self.0.left.notified();
            tokio::pin!(left);
            left.as_mut().enable();
            {
                let mut holders = self.holders();
                let other = holders
                    .sandboxes
                    .iter()
                    .find(|(other, (id, alone))| **other != sandbox && *id == wanted.id && (*alone || wanted.alone));
                let written = wanted.alone && holders.visits.is_written(wanted.id);
                let by = match other {
                    None if !written => {
                        holders.sandboxes.insert(sandbox, (wanted.id, wanted.alone));
                        return Ok(());
                    }
                    None => "a request that writes to it".to_owned(),
                    Some((other, _)) => other.to_string(),
                };
                if wanted.if_busy == IfBusy::Refuse {
                    return Err(Error::Busy(format!("{} is in use by {by}, and one may have it at a time", wanted.id)));
                }
            }
            left.await;
        }
    }

    /// As [`Workspaces::attach`], for a Sandbox that has it since an earlier life of pepod.
    pub fn attached_before(&self, sandbox: SandboxId, used: &Use) {
        self.holders().sandboxes.insert(sandbox, (used.id, used.alone));
    }

    /// Everything of that Sandbox was given back.
    pub fn detach(&self, sandbox: SandboxId) {
        if self.holders().sandboxes.remove(&sandbox).is_some() {
            self.0.left.notify_waiters();
        }
    }

    /// Whether a Sandbox or a request has it now.
    fn is_held(&self, id: WorkspaceId) -> bool {
        let holders = self.holders();
        holders.visits.is_visited(id) || holders.sandboxes.values().any(|(attached, _)| *attached == id)
    }

    /// What an activation is to mount. The tree is made here where it is not there yet.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Host`].
    pub async fn mount(&self, app: AppId, used: &Use) -> Result<Mount, Error> {
        let row = self.find(app, &used.id.to_string()).await?;
        self.ensure(&row).await?;
        Ok(Mount {
            volume: volume(row.id),
            access: match used.mode {
                WorkspaceMode::Rw => Access::Writable,
                WorkspaceMode::Ro => Access::ReadOnly,
            },
            cache: if used.alone { Cache::Alone } else { Cache::Shared },
            path: PATH.to_owned(),
        })
    }

    async fn ensure(&self, row: &WorkspaceRow) -> Result<(), Error> {
        let owner = self.0.store.tree_owner(row.app).await?;
        let owner = owner.ok_or_else(|| Error::Full("its App has no ids for files".to_owned()))?;
        let medium = match &row.directory {
            Some(name) => Medium::Directory { name: name.clone() },
            None => Medium::Disk { mib: row.size_mib, files: row.max_files },
        };
        // What a backup has of it is in place before anybody sees the tree.
        let waits = backup::workspaces::waits(self, row.id);
        let _alone = if waits { Some(self.0.restoring.lock().await) } else { None };
        let there = match self.0.host.volume_create(VolumePlan { id: volume(row.id), owner, medium }).await {
            Ok(()) => false,
            Err(host::Error::Refused(Refusal::Volume { state: VolumeState::Present, .. })) => true,
            Err(error) => return Err(Error::Host(error)),
        };
        if waits {
            self.restore(row, there).await?;
        }
        Ok(())
    }

    /// Imports what a backup has of it into its tree, unless that was there before.
    async fn restore(&self, row: &WorkspaceRow, there: bool) -> Result<(), Error> {
        let failed = |error: anyhow::Error| Error::NotRestored(format!("{}: {error:#}", row.id));
        backup::workspaces::import(self, row, there).await.map_err(failed)
    }

    /// Those that have a tree on this host.
    ///
    /// # Errors
    /// [`Error::Host`].
    pub async fn trees(&self) -> Result<HashSet<WorkspaceId>, Error> {
        let all = self.0.host.volumes().await.map_err(Error::Host)?;
        Ok(all.into_iter().filter_map(|id| format!("{}{}", WorkspaceId::PREFIX, id.hex()).parse().ok()).collect())
    }

    /// What it uses now.
    ///
    /// # Errors
    /// [`Error::Host`].
    pub async fn usage(&self, row: &WorkspaceRow) -> Result<VolumeUsage, Error> {
        self.ensure(row).await?;
        self.0.host.volume_usage(volume(row.id)).await.map_err(Error::Host)
    }

    /// Replaces what may be replaced.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Busy`], [`Error::NameTaken`], [`Error::Host`].
    pub async fn update(
        &self,
        mut row: WorkspaceRow,
        name: Option<String>,
        size_mib: Option<u64>,
        labels: Option<BTreeMap<String, String>>,
    ) -> Result<WorkspaceRow, Error> {
        let mut grown = None;
        if let Some(size_mib) = size_mib {
            within("size_mib", size_mib, &pepo_sandbox::volume::VOLUME_MIB)?;
            if row.directory.is_some() {
                let message = "the operator's directory caps it, not we".to_owned();
                return Err(Error::Invalid { param: "size_mib", message });
            }
            if size_mib < row.size_mib {
                let message = format!("it has {} MiB: a Workspace grows and does not shrink", row.size_mib);
                return Err(Error::Invalid { param: "size_mib", message });
            }
            self.ensure(&row).await?;
            grown = Some(size_mib);
        }
        let before = row.clone();
        row.name = name.or(row.name);
        row.labels = labels.unwrap_or(row.labels);
        let Some(size_mib) = grown else {
            self.0.store.write(Write::Workspace(Box::new(row.clone()))).await?;
            return Ok(row);
        };
        row.max_files = pepo_sandbox::volume::files_after(row.max_files, row.size_mib, size_mib);
        row.size_mib = size_mib;
        // What there is room for is decided with the record; the tree follows, or the record goes back.
        self.0.store.write(Write::GrowWorkspace(Box::new(row.clone()), self.budget())).await?;
        if let Err(error) = self.0.host.volume_grow(volume(row.id), size_mib).await {
            self.0.store.write(Write::Workspace(Box::new(before))).await?;
            return Err(match busy(error) {
                Error::Busy(used) => Error::Busy(format!(
                    "{used}, and this host lets pepo-host grow only what nobody uses (CAP_SYS_RESOURCE): \
                     release the Sessions that use it first"
                )),
                error => error,
            });
        }
        Ok(row)
    }

    /// Removes it with all its files; how many bytes of the host's disk came free.
    ///
    /// # Errors
    /// [`Error::Busy`] while a Sandbox has it, [`Error::Host`].
    pub async fn remove(&self, id: WorkspaceId) -> Result<u64, Error> {
        if self.is_held(id) {
            return Err(Error::Busy(format!("{id} is in use")));
        }
        let freed = self.0.host.volume_remove(volume(id)).await.map_err(busy)?;
        self.0.store.write(Write::DropWorkspace(id)).await?;
        let mut recent = self.0.freed.lock().unwrap_or_else(PoisonError::into_inner);
        recent.truncate(REMEMBERED - 1);
        recent.push_front((id, freed));
        Ok(freed)
    }

    /// What the removal of that one gave back, if it was among the last.
    pub fn freed(&self, id: WorkspaceId) -> Option<u64> {
        let recent = self.0.freed.lock().unwrap_or_else(PoisonError::into_inner);
        recent.iter().find(|(removed, _)| *removed == id).map(|(_, freed)| *freed)
    }

    /// A Session has ended for good: what was its own goes, or stays and is nobody's. How many bytes came free.
    pub async fn session_ended(&self, app: AppId, used: &Use) -> Option<u64> {
        if !used.own {
            return None;
        }
        if used.keep {
            match self.find(app, &used.id.to_string()).await {
                Ok(row) => {
                    let free = WorkspaceRow { session: None, ..row };
                    self.0.store.write_later(Write::Workspace(Box::new(free))).await;
                }
                Err(error) => tracing::error!(workspace = %used.id, %error, "it could not be let go"),
            }
            return None;
        }
        match self.remove(used.id).await {
            Ok(freed) => Some(freed),
            Err(error) => {
                tracing::warn!(workspace = %used.id, %error, "it could not be removed yet; trying again");
                self.remove_later(used.id);
                None
            }
        }
    }

    fn remove_later(&self, id: WorkspaceId) {
        let workspaces = self.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(AGAIN).await;
                match workspaces.remove(id).await {
                    Ok(_) | Err(Error::Host(host::Error::Lost)) => return,
                    Err(error) => tracing::debug!(workspace = %id, %error, "it could not be removed yet"),
                }
            }
        });
    }

    /// After a start: what was a Session's own and should have gone with it goes now, and what a backup has is imported.
    ///
    /// # Errors
    /// The store or the privileged side fails.
    pub async fn tidy(&self, lives: impl Fn(SessionId) -> bool) -> Result<(), Error> {
        let rows = self.0.store.all_workspaces().await?;
        for row in &rows {
            match row.session {
                Some(session) if !lives(session) && !row.keep => self.remove_later(row.id),
                Some(session) if !lives(session) => {
                    let free = WorkspaceRow { session: None, ..row.clone() };
                    self.0.store.write_later(Write::Workspace(Box::new(free))).await;
                }
                _ => {}
            }
        }
        let known: HashSet<WorkspaceId> = rows.iter().map(|row| row.id).collect();
        // A record is made before its tree and goes after it: what has none is of a store that was restored since.
        for stray in self.trees().await?.difference(&known) {
            tracing::warn!(tree = %stray.hex(), "a tree of no Workspace is left as it is");
        }
        let waiting: Vec<WorkspaceRow> =
            rows.into_iter().filter(|row| backup::workspaces::waits(self, row.id)).collect();
        let workspaces = self.clone();
        tokio::spawn(async move {
            for row in waiting {
                if let Err(error) = workspaces.ensure(&row).await {
                    tracing::error!(workspace = %row.id, error = pepo_sandbox::chain(&error), "a backup's files are not in place");
                }
            }
        });
        Ok(())
    }
}

/// How often it is counted what Workspaces may fill: what a crash loses at most.
const COUNT_EVERY: Duration = Duration::from_secs(60);

/// Counts what Workspaces may fill, until the daemon ends.
pub async fn meter(store: Store) {
    let mut before = tokio::time::Instant::now();
    loop {
        tokio::time::sleep(COUNT_EVERY).await;
        let passed = before.elapsed();
        before += passed;
        let (at, milliseconds) = (store::millis(store::now()), passed.as_millis() as i64);
        store.write_later(Write::WorkspaceTime { at, milliseconds }).await;
    }
}

fn busy(error: host::Error) -> Error {
    match error {
        host::Error::Refused(Refusal::Volume { volume, state: VolumeState::InUse }) => {
            Error::Busy(format!("wsp_{volume} is in use"))
        }
        error => Error::Host(error),
    }
}

fn within(param: &'static str, value: u64, range: &std::ops::RangeInclusive<u64>) -> Result<(), Error> {
    if range.contains(&value) {
        return Ok(());
    }
    let message = format!("{param} is {value}; it must be from {} to {}", range.start(), range.end());
    Err(Error::Invalid { param, message })
}
