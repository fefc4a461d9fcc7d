//! Quotas: decided in the transaction that writes the row, so that two callers at once never get past one.
//!
//! What is used is counted from the rows that are there: nothing is kept beside them that could drift. A Session counts
//! from its row to its end; its Sandbox's memory and processors while it is anything but idle.

use pepo_api::{AppId, AppUse, Quota, SessionId};
use rusqlite::{Connection, OptionalExtension, Transaction};

use super::{Error, Store, app, id};

const SESSIONS: &str = "SELECT count(*) FROM sessions WHERE app_id = ?1 AND ended_at IS NULL";
const SANDBOXES: &str = "SELECT count(*), coalesce(sum(json_extract(spec, '$.memory_mib')), 0), coalesce(sum(json_extract(spec, '$.cpus')), 0)
    FROM sessions WHERE app_id = ?1 AND ended_at IS NULL AND state != '\"idle\"'";
const COMMANDS: &str = "SELECT count(*) FROM commands WHERE ended_at IS NULL
    AND session_id IN (SELECT id FROM sessions WHERE app_id = ?1 AND ended_at IS NULL)";

const WORKSPACES: &str = "SELECT coalesce(sum(size_mib), 0) FROM workspaces WHERE app_id = ?1 AND directory IS NULL";

fn within(name: &str, used: u64, more: u64, limit: Option<u64>) -> Result<(), Error> {
    match limit {
        Some(limit) if used + more > limit => Err(Error::Quota(Quota { name: name.into(), used, limit })),
        _ => Ok(()),
    }
}

fn sandboxes(connection: &Connection, app: &str) -> Result<[u64; 3], rusqlite::Error> {
    connection.prepare_cached(SANDBOXES)?.query_row([app], |row| {
        let number = |column| row.get::<_, i64>(column).map(|number| number as u64);
        Ok([number(0)?, number(1)?, number(2)?])
    })
}

fn count(connection: &Connection, sql: &str, app: &str) -> Result<u64, rusqlite::Error> {
    connection.prepare_cached(sql)?.query_row([app], |row| row.get::<_, i64>(0)).map(|number| number as u64)
}

/// Whether the App may have one more Session, with a Sandbox of that size.
pub(super) fn session(transaction: &Connection, app: AppId, memory_mib: u32, cpus: u32) -> Result<(), Error> {
    let Some(settings) = app::settings(transaction, app)? else { return Err(Error::NoApp) };
    let quota = settings.quota;
    if quota.sessions.is_some() {
        within("sessions", count(transaction, SESSIONS, &app.to_string())?, 1, quota.sessions)?;
    }
    sandbox(transaction, app, &quota, memory_mib, cpus)
}

fn sandbox(
    transaction: &Connection,
    app: AppId,
    quota: &pepo_api::AppQuota,
    memory_mib: u32,
    cpus: u32,
) -> Result<(), Error> {
    if quota.sandboxes.is_none() && quota.memory_mib.is_none() && quota.cpus.is_none() {
        return Ok(());
    }
    let [running, memory, processors] = sandboxes(transaction, &app.to_string())?;
    within("sandboxes", running, 1, quota.sandboxes)?;
    within("memory_mib", memory, memory_mib.into(), quota.memory_mib)?;
    within("cpus", processors, cpus.into(), quota.cpus)
}

/// An idle Session is about to get a Sandbox: its row says so from here on, or the quota refuses.
pub(super) fn reactivate(transaction: &Transaction<'_>, session: SessionId) -> Result<(), Error> {
    let found = transaction
        .prepare_cached(
            "SELECT app_id, json_extract(spec, '$.memory_mib'), json_extract(spec, '$.cpus') FROM sessions
             WHERE id = ?1 AND ended_at IS NULL AND state = '\"idle\"'",
        )?
        .query_row([session.to_string()], |row| Ok((id::<AppId>(row, "app_id")?, row.get(1)?, row.get(2)?)))
        .optional()?;
    // One that is not idle is counted already.
    let Some((app, memory_mib, cpus)) = found else { return Ok(()) };
    let Some(settings) = app::settings(transaction, app)? else { return Err(Error::NoApp) };
    sandbox(transaction, app, &settings.quota, memory_mib, cpus)?;
    transaction
        .prepare_cached("UPDATE sessions SET state = '\"activating\"' WHERE id = ?1")?
        .execute([session.to_string()])?;
    Ok(())
}

/// Whether the Session's App may run one more Command.
pub(super) fn command(transaction: &Transaction<'_>, session: SessionId) -> Result<(), Error> {
    let app: Option<AppId> = transaction
        .prepare_cached("SELECT app_id FROM sessions WHERE id = ?1")?
        .query_row([session.to_string()], |row| id(row, "app_id"))
        .optional()?;
    let Some(app) = app else { return Ok(()) };
    let Some(settings) = app::settings(transaction, app)? else { return Err(Error::NoApp) };
    match settings.quota.commands {
        None => Ok(()),
        limit => within("commands", count(transaction, COMMANDS, &app.to_string())?, 1, limit),
    }
}

/// Whether the App may have Workspaces with so much more together.
pub(super) fn workspace(transaction: &Transaction<'_>, app: AppId, more_mib: u64) -> Result<(), Error> {
    let Some(settings) = app::settings(transaction, app)? else { return Err(Error::NoApp) };
    match settings.quota.workspace_mib {
        None => Ok(()),
        limit => within("workspace_mib", count(transaction, WORKSPACES, &app.to_string())?, more_mib, limit),
    }
}

impl Store {
    /// Whether the App may have one more Session of that size now. The write decides; this only spares a wait.
    ///
    /// # Errors
    /// [`Error::Quota`], [`Error::NoApp`], a disk that fails.
    pub async fn check_quota(&self, app: AppId, memory_mib: u32, cpus: u32) -> Result<(), Error> {
        self.read(move |connection| Ok(session(connection, app, memory_mib, cpus))).await?
    }

    /// What an App has now.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn app_use(&self, app: AppId) -> Result<AppUse, Error> {
        self.read(move |connection| {
            let app = app.to_string();
            let [running, memory_mib, cpus] = sandboxes(connection, &app)?;
            Ok(AppUse {
                sessions: count(connection, SESSIONS, &app)?,
                sandboxes: running,
                memory_mib,
                cpus,
                commands: count(connection, COMMANDS, &app)?,
                workspace_mib: count(connection, WORKSPACES, &app)?,
            })
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use pepo_api::{AppQuota, SessionState};

    use super::super::{Actor, ChangedApp, Write};
    use super::*;

    async fn with_quota(store: &Store, quota: AppQuota) -> AppId {
        let mut row = store.apps().expect("apps").remove(0);
        row.settings.quota = quota;
        row.version += 1;
        let id = row.id;
        store
            .write(Write::App(Box::new(ChangedApp { row, text: String::new(), actor: Actor::Pepo })))
            .await
            .expect("quota");
        id
    }

    fn exceeded(result: Result<(), Error>) -> Quota {
        match result {
            Err(Error::Quota(quota)) => quota,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_hundred_at_once_get_what_there_is() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = with_quota(&store, AppQuota { sessions: Some(7), ..AppQuota::default() }).await;
        let rows = (0..100).map(|_| super::super::session::tests::row(app, None));
        let written =
            futures_util::future::join_all(rows.map(|row| store.write(Write::NewSession(Box::new(row))))).await;
        assert_eq!(written.iter().filter(|result| result.is_ok()).count(), 7);
        let refused = written.into_iter().find(Result::is_err).expect("one");
        assert_eq!(exceeded(refused), Quota { name: "sessions".into(), used: 7, limit: 7 });
        assert_eq!(store.app_use(app).await.expect("use").sessions, 7);
    }

    #[tokio::test]
    async fn workspaces_are_counted_by_their_caps_and_keep_their_app() {
        use super::super::{Budget, WorkspaceRow};
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = with_quota(&store, AppQuota { workspace_mib: Some(100), ..AppQuota::default() }).await;
        let workspace = |size_mib| {
            let row = WorkspaceRow {
                id: pepo_api::WorkspaceId::generate(),
                app,
                name: None,
                size_mib,
                max_files: 10,
                single_writer: false,
                directory: None,
                session: None,
                keep: true,
                labels: Default::default(),
                created_at: super::super::time(7),
            };
            Write::NewWorkspace(Box::new(row), Budget { most_mib: None })
        };
        store.write(workspace(60)).await.expect("60 of 100");
        assert_eq!(exceeded(store.write(workspace(41)).await).used, 60);
        store.write(workspace(40)).await.expect("100 of 100");
        assert_eq!(store.app_use(app).await.expect("use").workspace_mib, 100);
        assert!(matches!(store.write(Write::RemoveApp(app)).await, Err(Error::HasWorkspaces(2))));
    }

    #[tokio::test]
    async fn an_idle_session_gives_its_sandboxs_share_back_and_takes_it_again() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = with_quota(&store, AppQuota { memory_mib: Some(1000), ..AppQuota::default() }).await;
        let mut first = super::super::session::tests::row(app, None);
        let second = super::super::session::tests::row(app, None);
        store.write(Write::NewSession(Box::new(first.clone()))).await.expect("512 of 1000");
        let refused = exceeded(store.write(Write::NewSession(Box::new(second.clone()))).await);
        assert_eq!((refused.name.as_str(), refused.used, refused.limit), ("memory_mib", 512, 1000));
        first.state = SessionState::Idle;
        store.write(Write::Session(Box::new(first.clone()))).await.expect("idle");
        store.write(Write::NewSession(Box::new(second))).await.expect("room again");
        let refused = exceeded(store.write(Write::Reactivate(first.id)).await);
        assert_eq!(refused.name, "memory_mib");
        with_quota(&store, AppQuota { memory_mib: Some(1024), sandboxes: Some(2), ..AppQuota::default() }).await;
        store.write(Write::Reactivate(first.id)).await.expect("room");
        store.write(Write::Reactivate(first.id)).await.expect("it has its share already");
        let used = store.app_use(app).await.expect("use");
        assert_eq!((used.sandboxes, used.memory_mib, used.cpus), (2, 1024, 2));
        let third = super::super::session::tests::row(app, None);
        assert_eq!(exceeded(store.write(Write::NewSession(Box::new(third))).await).name, "sandboxes");
    }
}
