//! Rows of Apps and the versions of their files.
//!
//! A change of settings is a new version, whoever made it and however: the file in force and the settings are the same.

use pepo_api::{AppId, AppSettings};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

use super::{Actor, Error, Store, id, json, millis, time, to_json};

/// Versions of a file that are kept, the one in force included.
const VERSIONS: i64 = 100;

pub(super) const MIGRATION: &str = "
    ALTER TABLE apps ADD COLUMN settings TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE apps ADD COLUMN version INTEGER NOT NULL DEFAULT 1;
    ALTER TABLE apps ADD COLUMN removed_at INTEGER;
    CREATE TABLE app_files (
        app_id TEXT NOT NULL, version INTEGER NOT NULL, text TEXT NOT NULL, at INTEGER NOT NULL, actor TEXT NOT NULL,
        PRIMARY KEY (app_id, version)
    ) STRICT, WITHOUT ROWID;
    INSERT INTO app_files SELECT id, 1, '', created_at, 'pepo' FROM apps;
";

/// An App as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppRow {
    /// Its id.
    pub id: AppId,
    /// Its name.
    pub name: String,
    /// What it is set to.
    pub settings: AppSettings,
    /// The version of its file.
    pub version: u64,
    /// When it was made.
    pub created_at: jiff::Timestamp,
}

/// A change of an App.
#[derive(Clone, Debug)]
pub struct ChangedApp {
    /// As it is to be; `version` is one above the one that it replaces.
    pub row: AppRow,
    /// The file's text.
    pub text: String,
    /// Who did it.
    pub actor: Actor,
}

/// Makes the App that everybody without one belongs to.
pub(super) fn default_app(connection: &Connection) -> Result<(), Error> {
    let id = AppId::generate().to_string();
    let now = millis(jiff::Timestamp::now());
    let made = connection.execute(
        "INSERT INTO apps (id, name, created_at) SELECT ?1, 'default', ?2 WHERE NOT EXISTS (SELECT 1 FROM apps WHERE name = 'default')",
        params![id, now],
    )?;
    if made == 1 {
        connection.execute("INSERT INTO app_files VALUES (?1, 1, '', ?2, 'pepo')", params![id, now])?;
    }
    Ok(())
}

fn taken(error: rusqlite::Error, name: &str) -> Error {
    match error {
        rusqlite::Error::SqliteFailure(failure, _)
            if failure.extended_code == rusqlite::ffi::SQLITE_CONSTRAINT_UNIQUE =>
        {
            Error::NameTaken(name.to_owned())
        }
        error => error.into(),
    }
}

pub(super) fn insert(transaction: &Transaction<'_>, ChangedApp { row, text, actor }: &ChangedApp) -> Result<(), Error> {
    transaction
        .execute(
            "INSERT INTO apps (id, name, settings, version, created_at) VALUES (?1, ?2, ?3, ?4, ?5)",
            params![row.id.to_string(), row.name, to_json(&row.settings)?, row.version as i64, millis(row.created_at)],
        )
        .map_err(|error| taken(error, &row.name))?;
    super::key::changed(transaction)?;
    put_file(transaction, row, text, *actor)
}

pub(super) fn update(transaction: &Transaction<'_>, ChangedApp { row, text, actor }: &ChangedApp) -> Result<(), Error> {
    let changed = transaction
        .execute(
            "UPDATE apps SET name = ?2, settings = ?3, version = ?4 WHERE id = ?1 AND version = ?4 - 1 AND removed_at IS NULL",
            params![row.id.to_string(), row.name, to_json(&row.settings)?, row.version as i64],
        )
        .map_err(|error| taken(error, &row.name))?;
    if changed == 0 {
        return Err(Error::Stale);
    }
    super::key::changed(transaction)?;
    put_file(transaction, row, text, *actor)
}

fn put_file(transaction: &Transaction<'_>, row: &AppRow, text: &str, actor: Actor) -> Result<(), Error> {
    let (id, version) = (row.id.to_string(), row.version as i64);
    transaction.execute(
        "INSERT INTO app_files VALUES (?1, ?2, ?3, ?4, ?5)",
        params![id, version, text, millis(jiff::Timestamp::now()), actor.to_string()],
    )?;
    transaction
        .execute("DELETE FROM app_files WHERE app_id = ?1 AND version <= ?2", params![id, version - VERSIONS])?;
    Ok(())
}

/// Removes an App: refused while a Session of it lives or a Workspace is there. Its name is free, its keys are none any more; records of what was
/// its go with their retention, and then its row.
pub(super) fn remove(transaction: &Transaction<'_>, app: AppId) -> Result<(), Error> {
    let (id, now) = (app.to_string(), millis(jiff::Timestamp::now()));
    let live: i64 = transaction.query_row(
        "SELECT count(*) FROM sessions WHERE app_id = ?1 AND ended_at IS NULL",
        [&id],
        |row| row.get(0),
    )?;
    if live > 0 {
        return Err(Error::InUse(live as u64));
    }
    let workspaces: i64 =
        transaction.query_row("SELECT count(*) FROM workspaces WHERE app_id = ?1", [&id], |row| row.get(0))?;
    if workspaces > 0 {
        return Err(Error::HasWorkspaces(workspaces as u64));
    }
    transaction.execute(
        "UPDATE apps SET name = 'removed ' || id, removed_at = ?2 WHERE id = ?1 AND removed_at IS NULL",
        params![id, now],
    )?;
    transaction
        .execute("UPDATE keys SET revoked_at = ?2 WHERE app_id = ?1 AND revoked_at IS NULL", params![id, now])?;
    transaction.execute("DELETE FROM app_files WHERE app_id = ?1", [&id])?;
    super::key::changed(transaction)
}

pub(super) fn all(connection: &Connection) -> Result<Vec<AppRow>, rusqlite::Error> {
    connection.prepare_cached("SELECT * FROM apps WHERE removed_at IS NULL ORDER BY id")?.query_map([], read)?.collect()
}

/// Forgets removed Apps that nothing points to any more.
pub(super) fn prune(transaction: &Transaction<'_>, before: i64) -> Result<(), Error> {
    transaction.execute(
        "DELETE FROM apps WHERE removed_at < ?1 AND NOT EXISTS (SELECT 1 FROM sessions WHERE app_id = apps.id)
         AND NOT EXISTS (SELECT 1 FROM keys WHERE app_id = apps.id)
         AND NOT EXISTS (SELECT 1 FROM workspaces WHERE app_id = apps.id)",
        [before],
    )?;
    Ok(())
}

/// The settings of a live App, inside a write.
pub(super) fn settings(connection: &Connection, app: AppId) -> Result<Option<AppSettings>, Error> {
    Ok(connection
        .prepare_cached("SELECT settings FROM apps WHERE id = ?1 AND removed_at IS NULL")?
        .query_row([app.to_string()], |row| json(row, "settings"))
        .optional()?)
}

fn read(row: &Row<'_>) -> Result<AppRow, rusqlite::Error> {
    Ok(AppRow {
        id: id(row, "id")?,
        name: row.get("name")?,
        settings: json(row, "settings")?,
        version: row.get::<_, i64>("version")? as u64,
        created_at: time(row.get("created_at")?),
    })
}

impl Store {
    /// The App that everybody without one belongs to.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn default_app(&self) -> Result<AppId, Error> {
        self.read_now(|connection| {
            connection.query_row("SELECT id FROM apps WHERE name = 'default'", [], |row| id(row, "id"))
        })
    }

    /// All Apps, oldest first.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn apps(&self) -> Result<Vec<AppRow>, Error> {
        self.read_now(all)
    }

    /// The text of a version of an App's file.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn app_file(&self, app: AppId, version: u64) -> Result<Option<String>, Error> {
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT text FROM app_files WHERE app_id = ?1 AND version = ?2")?
                .query_row(params![app.to_string(), i64::try_from(version).unwrap_or(-1)], |row| row.get(0))
                .optional()
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::super::Write;
    use super::*;

    fn changed(name: &str, version: u64) -> ChangedApp {
        let row = AppRow {
            id: AppId::generate(),
            name: name.into(),
            settings: AppSettings::default(),
            version,
            created_at: time(7),
        };
        ChangedApp { row, text: format!("# {version}\n"), actor: Actor::Uid(0) }
    }

    #[tokio::test]
    async fn versions_count_up_and_the_slower_of_two_is_refused() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = changed("shop", 1);
        store.write(Write::NewApp(Box::new(app.clone()))).await.expect("new");
        let again = store.write(Write::NewApp(Box::new(changed("shop", 1)))).await;
        assert!(matches!(again, Err(Error::NameTaken(name)) if name == "shop"));
        let mut next = app.clone();
        next.row.version = 2;
        next.row.settings.quota.sessions = Some(3);
        store.write(Write::App(Box::new(next.clone()))).await.expect("update");
        assert!(matches!(store.write(Write::App(Box::new(next.clone()))).await, Err(Error::Stale)));
        let apps = store.apps().expect("apps");
        assert_eq!(apps.iter().map(|app| app.name.as_str()).collect::<Vec<_>>(), ["default", "shop"]);
        assert_eq!(apps[1], next.row);
        assert_eq!(store.app_file(app.row.id, 1).await.expect("read").as_deref(), Some("# 1\n"));
        assert_eq!(store.app_file(apps[0].id, 1).await.expect("read").as_deref(), Some(""));
        assert_eq!(store.app_file(app.row.id, 3).await.expect("read"), None);
    }

    #[tokio::test]
    async fn an_app_with_a_live_session_stays_and_a_removed_one_frees_its_name() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = changed("shop", 1);
        let id = app.row.id;
        store.write(Write::NewApp(Box::new(app))).await.expect("new");
        let mut session = super::super::session::tests::row(id, None);
        store.write(Write::NewSession(Box::new(session.clone()))).await.expect("session");
        assert!(matches!(store.write(Write::RemoveApp(id)).await, Err(Error::InUse(1))));
        session.ended = Some(pepo_api::Ended::new(pepo_api::Reason::Operator, time(9)));
        store.write(Write::Session(Box::new(session.clone()))).await.expect("ended");
        store.write(Write::RemoveApp(id)).await.expect("removed");
        store.write(Write::NewApp(Box::new(changed("shop", 1)))).await.expect("the name is free");
        let late = super::super::session::tests::row(id, None);
        assert!(matches!(store.write(Write::NewSession(Box::new(late))).await, Err(Error::NoApp)));
    }
}
