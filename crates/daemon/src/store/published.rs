//! Ports that are published: whoever has the address reaches them. A row is one promise with an end, and goes with its Session.
//!
//! Every change counts the edge's generation up, as keys do. What is over by its time is not told to the edge, which looks at
//! the clock itself.

use pepo_api::{AppId, PortName, Quota, SessionId};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

use super::{Error, Store, id, millis, time};

/// The longest that a port is published for, seconds: a week. Whoever needs more says so again.
pub const LONGEST: u64 = 7 * 86_400;

/// Ports of one Session at once.
const OF_SESSION: u64 = 16;

/// Ports of one App at once: the edge holds all of them in memory.
const OF_APP: u64 = 1000;

pub(super) const MIGRATION: &str = "
    CREATE TABLE published (
        session_id TEXT NOT NULL, port INTEGER NOT NULL, app_id TEXT NOT NULL, published_by TEXT NOT NULL,
        published_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, PRIMARY KEY (session_id, port)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX published_of_apps ON published(app_id);
";

/// A published port as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedRow {
    /// The Session.
    pub session: SessionId,
    /// The port in it.
    pub port: u16,
    /// Whose that is.
    pub app: AppId,
    /// Who published it.
    pub published_by: String,
    /// When.
    pub published_at: jiff::Timestamp,
    /// When it ends by itself.
    pub expires_at: jiff::Timestamp,
}

/// Those that count now: of Sessions that live, and not over.
const NOW: &str = "SELECT published.* FROM published JOIN sessions ON sessions.id = published.session_id
    WHERE sessions.ended_at IS NULL AND published.expires_at > ?1";

fn read(row: &Row<'_>) -> Result<PublishedRow, rusqlite::Error> {
    Ok(PublishedRow {
        session: id(row, "session_id")?,
        port: row.get("port")?,
        app: id(row, "app_id")?,
        published_by: row.get("published_by")?,
        published_at: time(row.get("published_at")?),
        expires_at: time(row.get("expires_at")?),
    })
}

fn within(transaction: &Transaction<'_>, sql: &str, of: &str, name: &str, limit: u64) -> Result<(), Error> {
    let used = transaction.prepare_cached(sql)?.query_row([of], |row| row.get::<_, i64>(0))? as u64;
    match used >= limit {
        true => Err(Error::Quota(Quota { name: name.into(), used, limit })),
        false => Ok(()),
    }
}

pub(super) fn insert(transaction: &Transaction<'_>, row: &PublishedRow) -> Result<(), Error> {
    let (session, app) = (row.session.to_string(), row.app.to_string());
    let lives = transaction
        .prepare_cached("SELECT 1 FROM sessions WHERE id = ?1 AND app_id = ?2 AND ended_at IS NULL")?
        .query_row([&session, &app], |_| Ok(()))
        .optional()?;
    if lives.is_none() {
        return Err(Error::Stale);
    }
    prune(transaction, millis(row.published_at))?;
    let there = transaction
        .prepare_cached("SELECT 1 FROM published WHERE session_id = ?1 AND port = ?2")?
        .query_row(params![session, row.port], |_| Ok(()))
        .optional()?;
    if there.is_none() {
        let count = "SELECT count(*) FROM published WHERE";
        within(transaction, &format!("{count} session_id = ?1"), &session, "published_of_session", OF_SESSION)?;
        within(transaction, &format!("{count} app_id = ?1"), &app, "published", OF_APP)?;
    }
    transaction
        .prepare_cached("INSERT OR REPLACE INTO published VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
        .execute(params![session, row.port, app, row.published_by, millis(row.published_at), millis(row.expires_at)])?;
    super::key::changed(transaction)
}

pub(super) fn remove(transaction: &Transaction<'_>, session: SessionId, port: u16) -> Result<(), Error> {
    let removed = transaction
        .prepare_cached("DELETE FROM published WHERE session_id = ?1 AND port = ?2")?
        .execute(params![session.to_string(), port])?;
    if removed > 0 { super::key::changed(transaction) } else { Ok(()) }
}

/// The Session has ended: its ports are nobody's.
pub(super) fn forget(transaction: &Transaction<'_>, session: SessionId) -> Result<(), Error> {
    let removed =
        transaction.prepare_cached("DELETE FROM published WHERE session_id = ?1")?.execute([session.to_string()])?;
    if removed > 0 { super::key::changed(transaction) } else { Ok(()) }
}

/// Of a store that comes from a backup, of this release or one before it.
pub(super) fn forget_all(connection: &Connection) -> Result<(), rusqlite::Error> {
    let known = connection
        .query_row("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'published'", [], |_| Ok(()))
        .optional()?;
    if known.is_some() {
        connection.execute("DELETE FROM published", [])?;
    }
    Ok(())
}

/// What is over by its time is known to be by everybody: nothing is counted up.
pub(super) fn prune(transaction: &Transaction<'_>, now: i64) -> Result<(), Error> {
    transaction.prepare_cached("DELETE FROM published WHERE expires_at <= ?1")?.execute([now])?;
    Ok(())
}

pub(super) fn all(connection: &Connection) -> Result<Vec<PublishedRow>, rusqlite::Error> {
    connection.prepare_cached(NOW)?.query_map([millis(jiff::Timestamp::now())], read)?.collect()
}

impl Store {
    /// The published ports of that Session, by number.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn published(&self, session: SessionId) -> Result<Vec<PublishedRow>, Error> {
        self.read(move |connection| {
            connection
                .prepare_cached(&format!("{NOW} AND published.session_id = ?2 ORDER BY published.port"))?
                .query_map(params![millis(jiff::Timestamp::now()), session.to_string()], read)?
                .collect()
        })
        .await
    }

    /// Whether that port of the App's Session is published now.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn is_published(&self, app: AppId, of: PortName) -> Result<bool, Error> {
        self.read(move |connection| {
            connection
                .prepare_cached(&format!(
                    "SELECT EXISTS ({NOW} AND published.session_id = ?2 AND published.port = ?3 AND published.app_id = ?4)"
                ))?
                .query_row(
                    params![millis(jiff::Timestamp::now()), of.session.to_string(), of.port, app.to_string()],
                    |row| row.get(0),
                )
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::super::{SessionRow, Write, session::tests::row as session_row};
    use super::*;
    use pepo_api::{Ended, Reason};

    fn row(session: &SessionRow, port: u16, seconds: i64) -> PublishedRow {
        let now = super::super::now();
        PublishedRow {
            session: session.id,
            port,
            app: session.app,
            published_by: "uid:0".into(),
            published_at: now,
            expires_at: now + jiff::SignedDuration::from_secs(seconds),
        }
    }

    async fn with_session() -> (tempfile::TempDir, Store, SessionRow) {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let session = session_row(store.default_app().expect("app"), None);
        store.write(Write::NewSession(Box::new(session.clone()))).await.expect("session");
        (directory, store, session)
    }

    #[tokio::test]
    async fn a_published_port_reaches_the_edge_until_it_is_withdrawn_or_its_session_ends() {
        let (_directory, store, mut session) = with_session().await;
        let edge = async || store.edge_state().await.expect("state");
        let publish = async |row: &PublishedRow| store.write(Write::Publish(Box::new(row.clone()))).await;
        let before = edge().await;
        assert!(before.published.is_empty());
        let (web, api) = (row(&session, 3000, 60), row(&session, 8080, 60));
        publish(&web).await.expect("published");
        publish(&api).await.expect("published");
        let after = edge().await;
        assert!(after.generation >= before.generation + 2 && *store.edge().borrow() == after.generation);
        assert_eq!(after.published, [web.clone(), api.clone()]);
        assert_eq!(store.published(session.id).await.expect("read"), [web.clone(), api.clone()]);
        let is = async |app, port| store.is_published(app, PortName { session: session.id, port }).await.expect("read");
        assert!(is(session.app, 3000).await && !is(session.app, 3001).await && !is(AppId::generate(), 3000).await);
        // Another end in its place.
        let later = row(&session, 3000, 120);
        publish(&later).await.expect("again");
        assert_eq!(store.published(session.id).await.expect("read"), [later, api.clone()]);
        store.write(Write::Withdraw(session.id, 3000)).await.expect("withdrawn");
        let withdrawn = edge().await;
        assert!(withdrawn.generation > after.generation);
        assert_eq!(withdrawn.published, std::slice::from_ref(&api));
        store.write(Write::Withdraw(session.id, 3000)).await.expect("once more changes nothing");
        assert_eq!(edge().await.generation, withdrawn.generation);
        session.ended = Some(Ended::new(Reason::Idle, super::super::now()));
        store.write(Write::Session(Box::new(session.clone()))).await.expect("ended");
        let ended = edge().await;
        assert!(ended.generation > withdrawn.generation && ended.published.is_empty());
        assert!(matches!(publish(&web).await, Err(Error::Stale)), "of one that has ended");
        let foreign = PublishedRow { app: AppId::generate(), ..web };
        assert!(matches!(publish(&foreign).await, Err(Error::Stale)));
    }

    #[tokio::test]
    async fn what_is_over_counts_for_nothing_and_there_are_so_many() {
        let (_directory, store, session) = with_session().await;
        let publish = async |row: PublishedRow| store.write(Write::Publish(Box::new(row))).await;
        publish(row(&session, 1, -1)).await.expect("over at once");
        assert!(store.edge_state().await.expect("state").published.is_empty());
        assert!(store.published(session.id).await.expect("read").is_empty());
        assert!(!store.is_published(session.app, PortName { session: session.id, port: 1 }).await.expect("read"));
        for port in 2..18 {
            publish(row(&session, port, 60)).await.expect("published");
        }
        let refused = publish(row(&session, 18, 60)).await.expect_err("one too many");
        assert!(matches!(&refused, Error::Quota(quota) if quota.limit == OF_SESSION), "{refused}");
        publish(row(&session, 17, 90)).await.expect("one that is there gets another end");
    }

    #[tokio::test]
    async fn a_restored_store_opens_nothing_to_everybody() {
        let (directory, store, session) = with_session().await;
        store.write(Write::Publish(Box::new(row(&session, 80, 600)))).await.expect("published");
        let copy = directory.path().join("copy.db");
        store.copy_to(&copy).expect("copy");
        super::super::restored(&copy).expect("restored");
        let restored = Store::open(&copy).expect("store");
        assert!(restored.published(session.id).await.expect("read").is_empty());
        assert_eq!(store.published(session.id).await.expect("read").len(), 1);
    }
}
