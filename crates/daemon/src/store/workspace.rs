//! Rows of Workspaces, and the number under which each App's are stored on the host.

use std::collections::BTreeMap;

use pepo_api::{AppId, SessionId, WorkspaceId};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, named_params, params};

use super::usage::{GroupBy, SLICE_MS};
use super::{Error, Store, id, json, millis, time, to_json};

/// The tables.
pub(super) const MIGRATION: &str = "
    CREATE TABLE workspaces (
        id TEXT PRIMARY KEY, app_id TEXT NOT NULL REFERENCES apps(id), name TEXT, size_mib INTEGER NOT NULL,
        max_files INTEGER NOT NULL, single_writer INTEGER NOT NULL, directory TEXT, session_id TEXT, keep INTEGER NOT NULL,
        labels TEXT NOT NULL, created_at INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE UNIQUE INDEX workspace_names ON workspaces(app_id, name) WHERE name IS NOT NULL;
    CREATE INDEX workspace_sessions ON workspaces(session_id) WHERE session_id IS NOT NULL;
    CREATE TABLE tree_owners (app_id TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE) STRICT, WITHOUT ROWID;
";

/// What Workspaces may fill, times how long, by App and slice of time.
pub(super) const USAGE: &str = "
    CREATE TABLE workspace_usage (
        app_id TEXT NOT NULL, slice INTEGER NOT NULL, mib_ms INTEGER NOT NULL, PRIMARY KEY (app_id, slice)
    ) STRICT, WITHOUT ROWID;
";

/// A Workspace as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkspaceRow {
    /// Its id.
    pub id: WorkspaceId,
    /// Its App.
    pub app: AppId,
    /// Unique in its App.
    pub name: Option<String>,
    /// Cap on its bytes.
    pub size_mib: u64,
    /// Cap on its files.
    pub max_files: u64,
    /// Whether one Sandbox may have it at a time.
    pub single_writer: bool,
    /// The operator's directory that it is in.
    pub directory: Option<String>,
    /// The Session whose own it is.
    pub session: Option<SessionId>,
    /// Whether it stays when that Session ends.
    pub keep: bool,
    /// For filtering.
    pub labels: BTreeMap<String, String>,
    /// When it was made.
    pub created_at: jiff::Timestamp,
}

/// What a new one needs besides its row.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// What all of them may have together; `None`: no limit.
    pub most_mib: Option<u64>,
}

/// Owners there may be: see the engine's blocks of ids.
const OWNERS: u16 = pepo_sandbox::UidBlock::TREES;

/// Whether all of them together may have so much more.
fn within(transaction: &Transaction<'_>, wanted_mib: u64, budget: Budget) -> Result<(), Error> {
    let Some(limit_mib) = budget.most_mib else { return Ok(()) };
    let used: i64 = transaction.query_row(
        "SELECT coalesce(sum(size_mib), 0) FROM workspaces WHERE directory IS NULL",
        [],
        |row| row.get(0),
    )?;
    match used as u64 {
        used_mib if used_mib.saturating_add(wanted_mib) > limit_mib => {
            Err(Error::NoRoom { wanted_mib, used_mib, limit_mib })
        }
        _ => Ok(()),
    }
}

pub(super) fn insert(transaction: &Transaction<'_>, row: &WorkspaceRow, budget: Budget) -> Result<(), Error> {
    super::quota::workspace(transaction, row.app, if row.directory.is_none() { row.size_mib } else { 0 })?;
    if row.directory.is_none() {
        within(transaction, row.size_mib, budget)?;
    }
    let app = row.app.to_string();
    let known: Option<i64> = transaction
        .query_row("SELECT number FROM tree_owners WHERE app_id = ?1", [&app], |row| row.get(0))
        .optional()?;
    if known.is_none() {
        // For ever: what is stored under an App's ids is never another's.
        let next: i64 =
            transaction.query_row("SELECT coalesce(max(number) + 1, 0) FROM tree_owners", [], |row| row.get(0))?;
        if next >= i64::from(OWNERS) {
            return Err(Error::NoOwner(OWNERS));
        }
        transaction.execute("INSERT INTO tree_owners (app_id, number) VALUES (?1, ?2)", params![app, next])?;
    }
    put(
        transaction,
        row,
        "INSERT INTO workspaces (id, app_id, name, size_mib, max_files, single_writer, directory, session_id, keep, labels, created_at)
         VALUES (:id, :app, :name, :size, :files, :single, :directory, :session, :keep, :labels, :created)",
    )
}

/// How much larger than it was it is to be.
fn more(transaction: &Transaction<'_>, row: &WorkspaceRow) -> Result<Option<u64>, Error> {
    let has: Option<i64> = transaction
        .prepare_cached("SELECT size_mib FROM workspaces WHERE id = ?1 AND directory IS NULL")?
        .query_row([row.id.to_string()], |row| row.get(0))
        .optional()?;
    Ok(has.and_then(|has| row.size_mib.checked_sub(has as u64)).filter(|more| *more > 0))
}

pub(super) fn grow(transaction: &Transaction<'_>, row: &WorkspaceRow, budget: Budget) -> Result<(), Error> {
    if let Some(more) = more(transaction, row)? {
        within(transaction, more, budget)?;
    }
    update(transaction, row)
}

pub(super) fn update(transaction: &Transaction<'_>, row: &WorkspaceRow) -> Result<(), Error> {
    if let Some(more) = more(transaction, row)? {
        super::quota::workspace(transaction, row.app, more)?;
    }
    put(
        transaction,
        row,
        "UPDATE workspaces SET name = :name, size_mib = :size, max_files = :files, single_writer = :single,
         directory = :directory, session_id = :session, keep = :keep, labels = :labels, created_at = :created
         WHERE id = :id AND app_id = :app",
    )
}

fn put(transaction: &Transaction<'_>, row: &WorkspaceRow, sql: &str) -> Result<(), Error> {
    let done = transaction.prepare_cached(sql)?.execute(named_params! {
        ":id": row.id.to_string(),
        ":app": row.app.to_string(),
        ":name": row.name,
        ":size": row.size_mib as i64,
        ":files": row.max_files as i64,
        ":single": row.single_writer,
        ":directory": row.directory,
        ":session": row.session.map(|session| session.to_string()),
        ":keep": row.keep,
        ":labels": to_json(&row.labels)?,
        ":created": millis(row.created_at),
    });
    match done {
        Ok(_) => Ok(()),
        Err(rusqlite::Error::SqliteFailure(failure, _))
            if failure.extended_code == rusqlite::ffi::SQLITE_CONSTRAINT_UNIQUE =>
        {
            Err(Error::NameTaken(row.name.clone().unwrap_or_default()))
        }
        Err(error) => Err(error.into()),
    }
}

pub(super) fn remove(transaction: &Transaction<'_>, id: WorkspaceId) -> Result<(), Error> {
    transaction.prepare_cached("DELETE FROM workspaces WHERE id = ?1")?.execute([id.to_string()])?;
    Ok(())
}

/// Adds what all of them may fill to the slice of time that `at` (milliseconds since 1970) is in, for so long as has passed.
pub(super) fn passed(transaction: &Transaction<'_>, at: i64, milliseconds: i64) -> Result<(), Error> {
    transaction
        .prepare_cached(
            "INSERT INTO workspace_usage (app_id, slice, mib_ms)
             SELECT app_id, ?1, sum(size_mib) * ?2 FROM workspaces WHERE directory IS NULL GROUP BY app_id
             ON CONFLICT (app_id, slice) DO UPDATE SET mib_ms = mib_ms + excluded.mib_ms",
        )?
        .execute(params![at - at.rem_euclid(SLICE_MS), milliseconds])?;
    Ok(())
}

pub(super) fn prune_usage(transaction: &Transaction<'_>, before: i64) -> Result<(), Error> {
    transaction.execute("DELETE FROM workspace_usage WHERE slice < ?1", [before])?;
    Ok(())
}

/// What was added in slices that began in `from..to`, by the part of a report that it belongs to.
pub(super) fn used(
    connection: &Connection,
    app: Option<AppId>,
    (from, to): (i64, i64),
    group_by: &GroupBy,
) -> Result<Vec<(Option<String>, u64)>, rusqlite::Error> {
    let part = match group_by {
        GroupBy::App => "app_id",
        GroupBy::Day => "date(slice / 1000, 'unixepoch')",
        // No Session's, and nobody labelled.
        GroupBy::All | GroupBy::Session | GroupBy::Label(_) => "NULL",
    };
    let sql = format!(
        "SELECT {part} AS part, sum(mib_ms) FROM workspace_usage
         WHERE slice >= ?1 AND slice < ?2 AND (?3 IS NULL OR app_id = ?3) GROUP BY part"
    );
    connection
        .prepare_cached(&sql)?
        .query_map(params![from, to, app.map(|app| app.to_string())], |row| {
            Ok((row.get(0)?, row.get::<_, i64>(1)?.max(0) as u64))
        })?
        .collect()
}

fn read(row: &Row<'_>) -> Result<WorkspaceRow, rusqlite::Error> {
    let session: Option<String> = row.get("session_id")?;
    Ok(WorkspaceRow {
        id: id(row, "id")?,
        app: id(row, "app_id")?,
        name: row.get("name")?,
        size_mib: row.get::<_, i64>("size_mib")? as u64,
        max_files: row.get::<_, i64>("max_files")? as u64,
        single_writer: row.get("single_writer")?,
        directory: row.get("directory")?,
        session: session.map(|_| id(row, "session_id")).transpose()?,
        keep: row.get("keep")?,
        labels: json(row, "labels")?,
        created_at: time(row.get("created_at")?),
    })
}

impl Store {
    /// An App's Workspace.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn workspace(&self, app: AppId, id: WorkspaceId) -> Result<Option<WorkspaceRow>, Error> {
        self.read(move |connection| {
            connection
                .query_row(
                    "SELECT * FROM workspaces WHERE id = ?1 AND app_id = ?2",
                    [id.to_string(), app.to_string()],
                    read,
                )
                .optional()
        })
        .await
    }

    /// An App's Workspace of that name.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn workspace_named(&self, app: AppId, name: String) -> Result<Option<WorkspaceRow>, Error> {
        self.read(move |connection| {
            connection
                .query_row("SELECT * FROM workspaces WHERE name = ?1 AND app_id = ?2", [name, app.to_string()], read)
                .optional()
        })
        .await
    }

    /// An App's Workspaces, newest first: at most so many, older than that one.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn workspaces(
        &self,
        app: AppId,
        before: Option<WorkspaceId>,
        limit: usize,
    ) -> Result<Vec<WorkspaceRow>, Error> {
        self.read(move |connection| {
            let before = before.map_or_else(|| "~".to_owned(), |id| id.to_string());
            connection
                .prepare_cached("SELECT * FROM workspaces WHERE app_id = ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3")?
                .query_map(params![app.to_string(), before, limit as i64], read)?
                .collect()
        })
        .await
    }

    /// Every Workspace of every App.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn all_workspaces(&self) -> Result<Vec<WorkspaceRow>, Error> {
        self.read(|connection| connection.prepare("SELECT * FROM workspaces")?.query_map([], read)?.collect()).await
    }

    /// The number under which an App's Workspaces are stored on the host.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn tree_owner(&self, app: AppId) -> Result<Option<u16>, Error> {
        self.read(move |connection| {
            connection
                .query_row("SELECT number FROM tree_owners WHERE app_id = ?1", [app.to_string()], |row| row.get(0))
                .optional()
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Write;

    fn row(app: AppId, name: Option<&str>, size_mib: u64) -> WorkspaceRow {
        WorkspaceRow {
            id: WorkspaceId::generate(),
            app,
            name: name.map(str::to_owned),
            size_mib,
            max_files: 1 << 20,
            single_writer: false,
            directory: None,
            session: None,
            keep: false,
            labels: [("a".to_owned(), "b".to_owned())].into(),
            created_at: time(millis(jiff::Timestamp::now())),
        }
    }

    #[tokio::test]
    async fn a_row_comes_back_under_its_app_alone() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("pepo.db")).expect("store");
        let app = store.default_app().expect("app");
        let budget = Budget { most_mib: Some(100) };
        let one = row(app, Some("one"), 60);
        store.write(Write::NewWorkspace(Box::new(one.clone()), budget)).await.expect("written");
        assert_eq!(store.workspace(app, one.id).await.expect("read"), Some(one.clone()));
        assert_eq!(store.workspace_named(app, "one".to_owned()).await.expect("read"), Some(one.clone()));
        assert_eq!(store.workspace(AppId::generate(), one.id).await.expect("read"), None);
        assert_eq!(store.tree_owner(app).await.expect("read"), Some(0));
        let taken = store.write(Write::NewWorkspace(Box::new(row(app, Some("one"), 1)), budget)).await;
        assert!(matches!(taken, Err(Error::NameTaken(name)) if name == "one"));
        let over = store.write(Write::NewWorkspace(Box::new(row(app, None, 41)), budget)).await;
        assert!(matches!(over, Err(Error::NoRoom { wanted_mib: 41, used_mib: 60, limit_mib: 100 })), "{over:?}");
        let two = row(app, None, 30);
        store.write(Write::NewWorkspace(Box::new(two.clone()), budget)).await.expect("it fits");
        let grown = |size_mib| Box::new(WorkspaceRow { size_mib, ..two.clone() });
        let over = store.write(Write::GrowWorkspace(grown(41), budget)).await;
        assert!(matches!(over, Err(Error::NoRoom { wanted_mib: 11, used_mib: 90, limit_mib: 100 })), "{over:?}");
        store.write(Write::GrowWorkspace(grown(40), budget)).await.expect("it fits");
        let page = store.workspaces(app, None, 1).await.expect("list");
        assert_eq!(page.iter().map(|row| row.id).collect::<Vec<_>>(), [two.id]);
        let rest = store.workspaces(app, Some(two.id), 10).await.expect("list");
        assert_eq!(rest.iter().map(|row| row.id).collect::<Vec<_>>(), [one.id]);
        store.write(Write::DropWorkspace(one.id)).await.expect("dropped");
        assert_eq!(store.all_workspaces().await.expect("read").len(), 1);
    }

    #[tokio::test]
    async fn what_may_be_filled_is_counted_by_time_and_belongs_to_an_app() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("pepo.db")).expect("store");
        let app = store.default_app().expect("app");
        let budget = Budget { most_mib: None };
        for size_mib in [60, 40] {
            store.write(Write::NewWorkspace(Box::new(row(app, None, size_mib)), budget)).await.expect("written");
        }
        let day = 86_400_000;
        for at in [5, SLICE_MS + 5, day + 5] {
            store.write(Write::WorkspaceTime { at, milliseconds: 1000 }).await.expect("counted");
        }
        let report = async |to, by| store.usage(Some(app), 0, to, by).await.expect("report");
        let amounts = |groups: Vec<pepo_api::UsageGroup>| {
            groups.into_iter().map(|group| (group.key, group.amounts.workspace_allocated_mib_ms)).collect::<Vec<_>>()
        };
        assert_eq!(amounts(report(2 * day, GroupBy::All).await), [(None, 300_000)]);
        assert_eq!(amounts(report(SLICE_MS, GroupBy::All).await), [(None, 100_000)]);
        assert_eq!(amounts(report(2 * day, GroupBy::App).await), [(Some(app.to_string()), 300_000)]);
        let days = amounts(report(2 * day, GroupBy::Day).await);
        assert_eq!(days, [(Some("1970-01-01".into()), 200_000), (Some("1970-01-02".into()), 100_000)]);
        assert_eq!(amounts(report(2 * day, GroupBy::Session).await), [(None, 300_000)], "no Session's");
    }
}
