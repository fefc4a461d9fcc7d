//! Rows of Sessions and of the Sandboxes they have.

use pepo_api::{AppId, Ended, SandboxId, SessionId, SessionState};
use rusqlite::{OptionalExtension, Row, Transaction, named_params, params};

use super::{Error, Store, id, json, millis, time, to_json};
use crate::session::Spec;

/// A Session as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionRow {
    /// Its id.
    pub id: SessionId,
    /// Its App.
    pub app: AppId,
    /// What was asked for, resolved.
    pub spec: Spec,
    /// Where it is.
    pub state: SessionState,
    /// Counts changes.
    pub generation: u64,
    /// Counts Sandboxes.
    pub activation: u64,
    /// When it was asked for.
    pub created_at: jiff::Timestamp,
    /// When its Sandbox became Active.
    pub active_at: Option<jiff::Timestamp>,
    /// Its latest end.
    pub expires_at: Option<jiff::Timestamp>,
    /// When its Sandbox goes if nothing happens.
    pub keep_until: Option<jiff::Timestamp>,
    /// How its last Sandbox that is gone ended.
    pub last_end: Option<Ended>,
    /// How it ended.
    pub ended: Option<Ended>,
}

/// A Sandbox that may hold something on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxRow {
    /// Its id.
    pub id: SandboxId,
    /// Whose it is: then it may have run what that Session wanted. Nobody's before.
    pub claim: Option<(SessionId, u64)>,
}

/// A Sandbox given to an activation of a Session: for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Which Sandbox.
    pub sandbox: SandboxId,
    /// Whose it is from now on.
    pub session: SessionId,
    /// Which activation it serves.
    pub activation: u64,
}

/// Which Sessions a list wants.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only older ones than this.
    pub before: Option<SessionId>,
    /// Only those of this key.
    pub key: Option<String>,
    /// At most so many.
    pub limit: usize,
}

pub(super) fn insert(transaction: &Transaction<'_>, row: &SessionRow) -> Result<(), Error> {
    super::quota::session(transaction, row.app, row.spec.memory_mib, row.spec.cpus)?;
    put(
        transaction,
        row,
        "INSERT INTO sessions (id, app_id, name, key, spec, state, generation, activation, created_at, active_at, expires_at,
                               keep_until, last_end, ended_at, ended)
         VALUES (:id, :app, :name, :key, :spec, :state, :generation, :activation, :created, :active, :expires,
                 :keep, :last_end, :ended_at, :ended)",
    )
}

pub(super) fn update(transaction: &Transaction<'_>, row: &SessionRow) -> Result<(), Error> {
    put(
        transaction,
        row,
        "UPDATE sessions SET name = :name, key = :key, spec = :spec, state = :state, generation = :generation,
         activation = :activation, created_at = :created, active_at = :active, expires_at = :expires, keep_until = :keep,
         last_end = :last_end, ended_at = :ended_at, ended = :ended
         WHERE id = :id AND app_id = :app",
    )
}

fn put(transaction: &Transaction<'_>, row: &SessionRow, sql: &str) -> Result<(), Error> {
    let done = transaction.prepare_cached(sql)?.execute(named_params! {
        ":id": row.id.to_string(),
        ":app": row.app.to_string(),
        ":name": row.spec.name,
        ":key": row.spec.key,
        ":spec": to_json(&row.spec)?,
        ":state": to_json(&row.state)?,
        ":generation": row.generation as i64,
        ":activation": row.activation as i64,
        ":created": millis(row.created_at),
        ":active": row.active_at.map(millis),
        ":expires": row.expires_at.map(millis),
        ":keep": row.keep_until.map(millis),
        ":last_end": row.last_end.as_ref().map(to_json).transpose()?,
        ":ended_at": row.ended.as_ref().map(|ended| millis(ended.at)),
        ":ended": row.ended.as_ref().map(to_json).transpose()?,
    });
    match done {
        Ok(_) => Ok(()),
        Err(rusqlite::Error::SqliteFailure(failure, told))
            if failure.extended_code == rusqlite::ffi::SQLITE_CONSTRAINT_UNIQUE =>
        {
            // SQLite names the columns of the index that stood against it.
            if told.is_some_and(|told| told.contains("sessions.key")) {
                return Err(Error::KeyTaken(row.spec.key.clone().unwrap_or_default()));
            }
            Err(Error::NameTaken(row.spec.name.clone().unwrap_or_default()))
        }
        Err(error) => Err(error.into()),
    }
}

pub(super) fn insert_sandbox(transaction: &Transaction<'_>, id: SandboxId) -> Result<(), Error> {
    transaction
        .prepare_cached("INSERT INTO sandboxes (id, made_at) VALUES (?1, ?2)")?
        .execute(params![id.to_string(), millis(jiff::Timestamp::now())])?;
    Ok(())
}

/// Compare and set: what is somebody's stays theirs.
pub(super) fn claim(transaction: &Transaction<'_>, claim: &Claim) -> Result<(), Error> {
    let done = transaction
        .prepare_cached("UPDATE sandboxes SET session_id = ?2, activation = ?3 WHERE id = ?1 AND session_id IS NULL")?
        .execute(params![claim.sandbox.to_string(), claim.session.to_string(), claim.activation as i64]);
    match done {
        Ok(1) => Ok(()),
        Ok(_) => Err(Error::NotClaimed(claim.sandbox)),
        // The activation has another one.
        Err(rusqlite::Error::SqliteFailure(failure, _))
            if failure.extended_code == rusqlite::ffi::SQLITE_CONSTRAINT_UNIQUE =>
        {
            Err(Error::NotClaimed(claim.sandbox))
        }
        Err(error) => Err(error.into()),
    }
}

/// Takes back a claim of the same transaction.
pub(super) fn unclaim(transaction: &Transaction<'_>, id: SandboxId) -> Result<(), Error> {
    transaction
        .prepare_cached("UPDATE sandboxes SET session_id = NULL, activation = NULL WHERE id = ?1")?
        .execute([id.to_string()])?;
    Ok(())
}

pub(super) fn drop_sandbox(transaction: &Transaction<'_>, id: SandboxId) -> Result<(), Error> {
    transaction.prepare_cached("DELETE FROM sandboxes WHERE id = ?1")?.execute([id.to_string()])?;
    Ok(())
}

pub(super) fn prune(transaction: &Transaction<'_>, before: i64) -> Result<(), Error> {
    transaction.execute("DELETE FROM sessions WHERE ended_at < ?1", [before])?;
    Ok(())
}

fn read(row: &Row<'_>) -> Result<SessionRow, rusqlite::Error> {
    let (ended, last_end): (Option<String>, Option<String>) = (row.get("ended")?, row.get("last_end")?);
    Ok(SessionRow {
        id: id(row, "id")?,
        app: id(row, "app_id")?,
        spec: json(row, "spec")?,
        state: json(row, "state")?,
        generation: row.get::<_, i64>("generation")? as u64,
        activation: row.get::<_, i64>("activation")? as u64,
        created_at: time(row.get("created_at")?),
        active_at: row.get::<_, Option<i64>>("active_at")?.map(time),
        expires_at: row.get::<_, Option<i64>>("expires_at")?.map(time),
        keep_until: row.get::<_, Option<i64>>("keep_until")?.map(time),
        last_end: last_end.map(|_| json(row, "last_end")).transpose()?,
        ended: ended.map(|_| json(row, "ended")).transpose()?,
    })
}

impl Store {
    /// Sessions that have not ended, oldest first.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn live_sessions(&self) -> Result<Vec<SessionRow>, Error> {
        self.read_now(|connection| {
            connection
                .prepare("SELECT * FROM sessions WHERE ended_at IS NULL ORDER BY id")?
                .query_map([], read)?
                .collect()
        })
    }

    /// Sandboxes that may hold something.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn sandboxes(&self) -> Result<Vec<SandboxRow>, Error> {
        self.read_now(|connection| {
            connection
                .prepare("SELECT * FROM sandboxes ORDER BY id")?
                .query_map([], |row| {
                    let session: Option<String> = row.get("session_id")?;
                    let claim = match session {
                        Some(_) => Some((id(row, "session_id")?, row.get::<_, i64>("activation")? as u64)),
                        None => None,
                    };
                    Ok(SandboxRow { id: id(row, "id")?, claim })
                })?
                .collect()
        })
    }

    /// A Session of that App.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn session(&self, app: AppId, session: SessionId) -> Result<Option<SessionRow>, Error> {
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT * FROM sessions WHERE id = ?1 AND app_id = ?2")?
                .query_row([session.to_string(), app.to_string()], read)
                .optional()
        })
        .await
    }

    /// The Session of that App with that name: the live one, else the one that ended last.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn session_named(&self, app: AppId, name: String) -> Result<Option<SessionRow>, Error> {
        self.read(move |connection| {
            connection
                .prepare_cached(
                    "SELECT * FROM sessions WHERE app_id = ?1 AND name = ?2 ORDER BY ended_at IS NOT NULL, ended_at DESC LIMIT 1",
                )?
                .query_row([app.to_string(), name], read)
                .optional()
        })
        .await
    }

    /// The last Session of that App with that key that has ended.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn last_of_key(&self, app: AppId, key: String) -> Result<Option<SessionRow>, Error> {
        self.read(move |connection| {
            connection
                .prepare_cached(
                    "SELECT * FROM sessions WHERE app_id = ?1 AND key = ?2 AND ended_at IS NOT NULL ORDER BY id DESC LIMIT 1",
                )?
                .query_row([app.to_string(), key], read)
                .optional()
        })
        .await
    }

    /// Sessions of that App, newest first.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn list_sessions(&self, app: AppId, filter: Filter) -> Result<Vec<SessionRow>, Error> {
        self.read(move |connection| {
            // Past every id there is: `~` comes after every letter.
            let before = filter.before.map_or_else(|| "~".to_owned(), |id| id.to_string());
            let (app, limit) = (app.to_string(), filter.limit as i64);
            match filter.key {
                None => connection
                    .prepare_cached("SELECT * FROM sessions WHERE app_id = ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3")?
                    .query_map(params![app, before, limit], read)?
                    .collect(),
                Some(key) => connection
                    .prepare_cached(
                        "SELECT * FROM sessions WHERE app_id = ?1 AND id < ?2 AND key = ?4 ORDER BY id DESC LIMIT ?3",
                    )?
                    .query_map(params![app, before, limit, key], read)?
                    .collect(),
            }
        })
        .await
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::store) fn row(app: AppId, name: Option<String>) -> SessionRow {
        SessionRow {
            id: SessionId::generate(),
            app,
            spec: Spec {
                name,
                key: None,
                image: "base".into(),
                image_id: pepo_api::ImageId::generate(),
                cpus: 1,
                memory_mib: 512,
                disk_mib: 2048,
                keep_alive_seconds: 300,
                env: [("A".to_owned(), "b".to_owned())].into(),
                secrets: Default::default(),
                labels: [("user".to_owned(), "42".to_owned())].into(),
                expires_seconds: None,
                reactivate: false,
                setup: None,
                services: Vec::new(),
                services_begun: None,
                network: pepo_api::NetworkSpec::default(),
                workspace: None,
                persist: Vec::new(),
                volumes: Vec::new(),
            },
            state: SessionState::Requested,
            generation: 1,
            activation: 0,
            created_at: time(1_764_000_000_123),
            active_at: None,
            expires_at: Some(time(1_764_000_100_000)),
            keep_until: None,
            last_end: None,
            ended: None,
        }
    }

    /// What one Session writes from its creation to its first Active, by 32 callers at once, on the disk of the temporary
    /// directory. The goal: the store is not what limits creation below 500 in a second.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "a figure: `make bench` runs it, on a release build"]
    #[allow(clippy::print_stdout, reason = "a figure is printed")]
    async fn figure_of_sessions_that_the_store_takes() {
        use super::super::{Event, Write};
        const CALLERS: usize = 32;
        const EACH: usize = 100;
        const GOAL: f64 = 500.0;
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = store.default_app().expect("app");
        let began = std::time::Instant::now();
        let callers: Vec<_> = (0..CALLERS)
            .map(|_| {
                let store = store.clone();
                tokio::spawn(async move {
                    for _ in 0..EACH {
                        let mut row = row(app, None);
                        let (session, sandbox) = (row.id, SandboxId::generate());
                        // The call's note, the row, and then what its driver and its activation write.
                        store.record(Event::new("session.create").app(app));
                        store.write(Write::NewSession(Box::new(row.clone()))).await.expect("new");
                        store.record(Event::new("session.created").app(app).session(session));
                        (row.state, row.activation) = (SessionState::Activating, 1);
                        store.record(Event::new("session.activating").app(app).session(session).sandbox(sandbox));
                        store.write_later(Write::Session(Box::new(row.clone()))).await;
                        store.write(Write::NewSandbox(sandbox)).await.expect("sandbox");
                        store.write(Write::Claim(Claim { sandbox, session, activation: 1 })).await.expect("claim");
                        row.state = SessionState::Active;
                        store.record(Event::new("session.active").app(app).session(session).sandbox(sandbox));
                        store.write_later(Write::Session(Box::new(row))).await;
                    }
                })
            })
            .collect();
        for caller in callers {
            caller.await.expect("caller");
        }
        let rate = (CALLERS * EACH) as f64 / began.elapsed().as_secs_f64();
        let mark = if rate >= GOAL { "met" } else { "missed" };
        println!("figure: Sessions that the store takes in a second: {rate:.0} (goal >= {GOAL:.0} {mark})");
        assert!(rate >= GOAL);
    }

    #[tokio::test]
    async fn names_are_free_again_after_the_end_and_lists_page() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = store.default_app().expect("app");
        let mut rows = Vec::new();
        for n in 0..5 {
            let mut row = row(app, Some("same".into()));
            store.write(super::super::Write::NewSession(Box::new(row.clone()))).await.expect("new");
            row.state = SessionState::Terminated;
            row.ended = Some(Ended::new(pepo_api::Reason::Idle, time(1_764_000_200_000 + n)));
            store.write(super::super::Write::Session(Box::new(row.clone()))).await.expect("ended");
            rows.push(row);
        }
        let named = store.session_named(app, "same".into()).await.expect("read").expect("there");
        assert_eq!(named.id, rows[4].id);
        let first = store.list_sessions(app, Filter { limit: 3, ..Filter::default() }).await.expect("list");
        let second = store
            .list_sessions(app, Filter { before: Some(first[2].id), limit: 3, ..Filter::default() })
            .await
            .expect("list");
        let mut ids: Vec<_> = first.iter().chain(&second).map(|row| row.id).collect();
        ids.reverse();
        let mut wanted: Vec<_> = rows.iter().map(|row| row.id).collect();
        wanted.sort();
        assert_eq!(ids, wanted);
        let all = super::super::Keep { before: 0, most: u64::MAX };
        let prune = super::super::Write::Prune { ended_before: 1_764_000_200_002, feed: all, audit: all };
        store.write(prune).await.expect("prune");
        assert_eq!(store.list_sessions(app, Filter { limit: 9, ..Filter::default() }).await.expect("list").len(), 3);
    }

    #[tokio::test]
    async fn a_key_has_one_live_session_and_remembers_the_one_before() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = store.default_app().expect("app");
        let keyed = || SessionRow { spec: Spec { key: Some("k".into()), ..row(app, None).spec }, ..row(app, None) };
        let (mut first, second) = (keyed(), keyed());
        store.write(super::super::Write::NewSession(Box::new(first.clone()))).await.expect("new");
        let taken = store.write(super::super::Write::NewSession(Box::new(second.clone()))).await;
        assert!(matches!(taken, Err(Error::KeyTaken(key)) if key == "k"));
        assert!(store.last_of_key(app, "k".into()).await.expect("read").is_none());
        first.ended = Some(Ended::new(pepo_api::Reason::Idle, time(1_764_000_200_000)));
        store.write(super::super::Write::Session(Box::new(first.clone()))).await.expect("ended");
        store.write(super::super::Write::NewSession(Box::new(second.clone()))).await.expect("free again");
        let last = store.last_of_key(app, "k".into()).await.expect("read").expect("there");
        assert_eq!(last.id, first.id);
        let filter = |key: &str| Filter { key: Some(key.into()), limit: 9, ..Filter::default() };
        assert_eq!(store.list_sessions(app, filter("k")).await.expect("list").len(), 2);
        assert!(store.list_sessions(app, filter("other")).await.expect("list").is_empty());
        assert!(store.last_of_key(AppId::generate(), "k".into()).await.expect("read").is_none());
    }

    #[tokio::test]
    async fn a_sandbox_is_claimed_once_and_an_activation_has_one() {
        use super::super::Write;
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = store.default_app().expect("app");
        let (first, second) = (SandboxId::generate(), SandboxId::generate());
        for id in [first, second] {
            store.write(Write::NewSandbox(id)).await.expect("new");
        }
        let claim = |sandbox, session, activation| Claim { sandbox, session, activation };
        let sessions: Vec<_> = (0..20).map(|_| SessionId::generate()).collect();
        let claims = sessions.iter().map(|session| store.write(Write::Claim(claim(first, *session, 1))));
        let done = futures_util::future::join_all(claims).await;
        assert_eq!(done.iter().filter(|done| done.is_ok()).count(), 1, "{done:?}");
        assert!(done.iter().all(|done| matches!(done, Ok(()) | Err(Error::NotClaimed(_)))), "{done:?}");
        let owner = sessions[done.iter().position(Result::is_ok).expect("one")];
        let twice = store.write(Write::Claim(claim(second, owner, 1))).await;
        assert!(matches!(twice, Err(Error::NotClaimed(_))), "an activation has two");
        let missing = store.write(Write::Claim(claim(SandboxId::generate(), owner, 2))).await;
        assert!(matches!(missing, Err(Error::NotClaimed(_))), "what nobody made was claimed");

        // With a Session: both or neither.
        store.write(Write::NewSession(Box::new(row(app, Some("taken".into()))))).await.expect("new");
        let named = row(app, Some("taken".into()));
        let on = claim(second, named.id, 1);
        let refused = store.write(Write::NewSessionOn(Box::new(named), on)).await;
        assert!(matches!(refused, Err(Error::NameTaken(_))), "{refused:?}");
        let free = store.sandboxes().expect("rows").into_iter().find(|row| row.id == second).expect("there");
        assert_eq!(free.claim, None, "the claim of a Session that there is not");
        let new = row(app, None);
        let on = claim(first, new.id, 1);
        let refused = store.write(Write::NewSessionOn(Box::new(new.clone()), on)).await;
        assert!(matches!(refused, Err(Error::NotClaimed(_))), "{refused:?}");
        assert!(store.session(app, new.id).await.expect("read").is_none(), "a Session without its Sandbox");
        let on = claim(second, new.id, 1);
        store.write(Write::NewSessionOn(Box::new(new.clone()), on)).await.expect("both");
        let rows = store.sandboxes().expect("rows");
        assert!(rows.contains(&SandboxRow { id: second, claim: Some((new.id, 1)) }), "{rows:?}");
    }
}
