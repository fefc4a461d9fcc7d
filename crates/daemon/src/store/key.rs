//! Keys: what the edge checks a caller's key against. The key itself is never stored, only its SHA-256.
//!
//! Every change counts the edge's generation up in the same transaction; [`Store::edge`] tells who waits for that.

use std::fmt::Write as _;

use pepo_api::{AppId, KeyId, Scope};
use rusqlite::{OptionalExtension, Row, Transaction, params};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::{Actor, Error, Store, id, json, millis, time, to_json};

/// Keys that an App may have at once: the edge holds all of them in memory.
pub const MOST: u64 = 1000;

/// Characters of a key's text that tell keys apart: the word before it, and 32 of its 256 bits.
const PREFIX: usize = 13;

pub(super) const MIGRATION: &str = "
    ALTER TABLE keys ADD COLUMN name TEXT;
    ALTER TABLE keys ADD COLUMN prefix TEXT NOT NULL DEFAULT 'pepo_';
    ALTER TABLE keys ADD COLUMN scopes TEXT NOT NULL DEFAULT '[\"*\"]';
    ALTER TABLE keys ADD COLUMN sources TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE keys ADD COLUMN created_by TEXT NOT NULL DEFAULT 'pepo';
    ALTER TABLE keys ADD COLUMN expires_at INTEGER;
    ALTER TABLE keys ADD COLUMN revoked_at INTEGER;
    ALTER TABLE keys ADD COLUMN replaced_by TEXT;
    CREATE INDEX keys_of_apps ON keys(app_id, id);
";

/// A key as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRow {
    /// Its id.
    pub id: KeyId,
    /// Its App.
    pub app: AppId,
    /// What it is for.
    pub name: Option<String>,
    /// SHA-256 of its text, 64 hex digits.
    pub sha256: String,
    /// How its text begins.
    pub prefix: String,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// Where it may be used from, as `address/bits`; empty: from anywhere.
    pub sources: Vec<String>,
    /// Who made it.
    pub created_by: String,
    /// When.
    pub created_at: jiff::Timestamp,
    /// When it ends by itself.
    pub expires_at: Option<jiff::Timestamp>,
    /// When it was revoked.
    pub revoked_at: Option<jiff::Timestamp>,
    /// The key that takes its place.
    pub replaced_by: Option<KeyId>,
}

impl KeyRow {
    /// Whether it lets anybody in at that time.
    pub fn is_valid(&self, now: jiff::Timestamp) -> bool {
        self.revoked_at.is_none() && self.expires_at.is_none_or(|at| at > now)
    }
}

/// What a key shall be.
#[derive(Clone, Debug)]
pub struct KeySpec {
    /// Its App.
    pub app: AppId,
    /// What it is for.
    pub name: Option<String>,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// Where it may be used from.
    pub sources: Vec<String>,
    /// When it ends by itself.
    pub expires_at: Option<jiff::Timestamp>,
    /// Who makes it.
    pub created_by: Actor,
}

/// A key about to be stored.
#[derive(Clone, Debug)]
pub struct NewKey {
    row: KeyRow,
    /// The key whose place it takes, and when that one ends at the latest.
    replaces: Option<(KeyId, jiff::Timestamp)>,
}

impl NewKey {
    /// A new key: the row, and its text, which nothing keeps. 256 random bits, so a plain digest suffices.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn generate(spec: KeySpec) -> Result<(Self, String), std::io::Error> {
        let mut bytes = [0u8; 32];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        let text = format!("pepo_{}", hex(&bytes));
        let sha256 = hex(&Sha256::digest(text.as_bytes()));
        let KeySpec { app, name, scopes, sources, expires_at, created_by } = spec;
        let row = KeyRow {
            id: KeyId::generate(),
            app,
            name,
            sha256,
            prefix: text[..PREFIX].to_owned(),
            scopes,
            sources,
            created_by: created_by.to_string(),
            created_at: time(millis(jiff::Timestamp::now())),
            expires_at: expires_at.map(|at| time(millis(at))),
            revoked_at: None,
            replaced_by: None,
        };
        Ok((NewKey { row, replaces: None }, text))
    }

    /// The same under that id.
    pub fn under(mut self, id: KeyId) -> Self {
        self.row.id = id;
        self
    }

    /// It takes the place of that key, which ends then at the latest.
    pub fn replacing(mut self, old: KeyId, until: jiff::Timestamp) -> Self {
        self.replaces = Some((old, until));
        self
    }

    /// The row.
    pub fn row(&self) -> &KeyRow {
        &self.row
    }
}

/// Lower-case hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Counts the edge's generation up.
pub(super) fn changed(transaction: &Transaction<'_>) -> Result<(), Error> {
    transaction.execute("UPDATE counters SET value = value + 1 WHERE name = 'edge_generation'", [])?;
    Ok(())
}

/// The edge's generation.
pub(super) fn generation(connection: &rusqlite::Connection) -> Result<u64, rusqlite::Error> {
    connection
        .prepare_cached("SELECT value FROM counters WHERE name = 'edge_generation'")?
        .query_row([], |row| row.get::<_, i64>(0))
        .map(|value| value as u64)
}

/// What the edge needs.
#[derive(Debug)]
pub struct EdgeNeeds {
    /// The count of its changes.
    pub generation: u64,
    /// Every key that is valid.
    pub keys: Vec<KeyRow>,
    /// Every App.
    pub apps: Vec<super::AppRow>,
    /// Session tokens that are revoked.
    pub void: Vec<pepo_api::EdgeVoid>,
    /// Ports that are published.
    pub published: Vec<super::PublishedRow>,
}

const VALID: &str = "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?2)";

pub(super) fn insert(transaction: &Transaction<'_>, NewKey { row, replaces }: &NewKey) -> Result<(), Error> {
    let (app, now) = (row.app.to_string(), millis(row.created_at));
    if super::app::settings(transaction, row.app)?.is_none() {
        return Err(Error::NoApp);
    }
    let valid: i64 = transaction.query_row(
        &format!("SELECT count(*) FROM keys WHERE app_id = ?1 AND {VALID}"),
        params![app, now],
        |row| row.get(0),
    )?;
    if valid as u64 >= MOST {
        return Err(Error::Quota(pepo_api::Quota { name: "keys".into(), used: valid as u64, limit: MOST }));
    }
    if let Some((old, until)) = replaces {
        let ended = transaction.execute(
            "UPDATE keys SET replaced_by = ?2, name = NULL, expires_at = min(coalesce(expires_at, ?3), ?3)
             WHERE id = ?1 AND replaced_by IS NULL AND revoked_at IS NULL",
            params![old.to_string(), row.id.to_string(), millis(*until)],
        )?;
        if ended == 0 {
            return Err(Error::Stale);
        }
    } else if let Some(name) = &row.name {
        let taken = transaction
            .query_row(
                &format!("SELECT 1 FROM keys WHERE app_id = ?1 AND name = ?3 AND {VALID}"),
                params![app, now, name],
                |_| Ok(()),
            )
            .optional()?;
        if taken.is_some() {
            return Err(Error::NameTaken(name.clone()));
        }
    }
    transaction.execute(
        "INSERT INTO keys (id, app_id, sha256, created_at, name, prefix, scopes, sources, created_by, expires_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        params![
            row.id.to_string(),
            app,
            row.sha256,
            now,
            row.name,
            row.prefix,
            to_json(&row.scopes)?,
            to_json(&row.sources)?,
            row.created_by,
            row.expires_at.map(millis)
        ],
    )?;
    changed(transaction)
}

pub(super) fn revoke(transaction: &Transaction<'_>, key: KeyId) -> Result<(), Error> {
    let revoked = transaction.execute(
        "UPDATE keys SET revoked_at = ?2 WHERE id = ?1 AND revoked_at IS NULL",
        params![key.to_string(), millis(jiff::Timestamp::now())],
    )?;
    if revoked > 0 { changed(transaction) } else { Ok(()) }
}

pub(super) fn prune(transaction: &Transaction<'_>, before: i64) -> Result<(), Error> {
    transaction.execute("DELETE FROM keys WHERE revoked_at < ?1 OR expires_at < ?1", [before])?;
    Ok(())
}

fn read(row: &Row<'_>) -> Result<KeyRow, rusqlite::Error> {
    let replaced: Option<String> = row.get("replaced_by")?;
    Ok(KeyRow {
        id: id(row, "id")?,
        app: id(row, "app_id")?,
        name: row.get("name")?,
        sha256: row.get("sha256")?,
        prefix: row.get("prefix")?,
        scopes: json(row, "scopes")?,
        sources: json(row, "sources")?,
        created_by: row.get("created_by")?,
        created_at: time(row.get("created_at")?),
        expires_at: row.get::<_, Option<i64>>("expires_at")?.map(time),
        revoked_at: row.get::<_, Option<i64>>("revoked_at")?.map(time),
        replaced_by: replaced.map(|_| id(row, "replaced_by")).transpose()?,
    })
}

impl Store {
    /// The count of changes of what the edge needs, as it moves.
    pub fn edge(&self) -> watch::Receiver<u64> {
        self.edge.clone()
    }

    /// What the edge needs, all of one moment.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn edge_state(&self) -> Result<EdgeNeeds, Error> {
        self.read(|connection| {
            let transaction = connection.unchecked_transaction()?;
            let generation = generation(&transaction)?;
            let keys = transaction
                .prepare_cached("SELECT * FROM keys WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?1) ORDER BY id")?
                .query_map([millis(jiff::Timestamp::now())], read)?
                .collect::<Result<_, _>>()?;
            let (apps, void) = (super::app::all(&transaction)?, super::token::voided(&transaction)?);
            let published = super::published::all(&transaction)?;
            Ok(EdgeNeeds { generation, keys, apps, void, published })
        })
        .await
    }

    /// Whether a key was ever made.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn has_keys(&self) -> Result<bool, Error> {
        self.read(|connection| connection.query_row("SELECT EXISTS (SELECT 1 FROM keys)", [], |row| row.get(0))).await
    }

    /// Keys of that App, newest first.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn keys(&self, app: AppId) -> Result<Vec<KeyRow>, Error> {
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT * FROM keys WHERE app_id = ?1 ORDER BY id DESC")?
                .query_map([app.to_string()], read)?
                .collect()
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::super::Write;
    use super::*;

    fn spec(app: AppId) -> KeySpec {
        KeySpec {
            app,
            name: Some("ci".into()),
            scopes: vec![Scope::all()],
            sources: vec!["192.0.2.0/24".into()],
            expires_at: None,
            created_by: Actor::Uid(0),
        }
    }

    #[tokio::test]
    async fn only_the_digest_is_kept() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("s.db");
        let store = Store::open(&path).expect("store");
        let (key, text) = NewKey::generate(spec(store.default_app().expect("app"))).expect("key");
        let before = store.edge_state().await.expect("state");
        assert_eq!(before.apps.len(), 1);
        assert!(before.keys.is_empty() && !store.has_keys().await.expect("read"));
        let row = key.row().clone();
        store.write(Write::NewKey(Box::new(key))).await.expect("written");
        let EdgeNeeds { generation, keys, .. } = store.edge_state().await.expect("state");
        assert!(generation > before.generation && *store.edge().borrow() == generation);
        assert_eq!(keys, vec![row]);
        assert_eq!(keys[0].sha256, hex(&Sha256::digest(text.as_bytes())));
        assert!(text.len() == 5 + 64 && text.starts_with(&keys[0].prefix));
        drop(store);
        for entry in std::fs::read_dir(directory.path()).expect("list") {
            // The writer closes its files on a thread of its own: one that goes away meanwhile holds nothing any more.
            let Ok(bytes) = std::fs::read(entry.expect("entry").path()) else { continue };
            assert!(
                !bytes.windows(text.len()).any(|window| window == text.as_bytes()),
                "the key's text is on the disk"
            );
        }
    }

    #[tokio::test]
    async fn a_rotated_key_overlaps_and_a_revoked_one_is_gone_at_once() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = store.default_app().expect("app");
        let valid =
            async || store.edge_state().await.expect("state").keys.into_iter().map(|key| key.id).collect::<Vec<_>>();
        let (first, _) = NewKey::generate(spec(app)).expect("key");
        let first_id = first.row().id;
        store.write(Write::NewKey(Box::new(first))).await.expect("written");
        let (same, _) = NewKey::generate(spec(app)).expect("key");
        assert!(
            matches!(store.write(Write::NewKey(Box::new(same))).await, Err(Error::NameTaken(name)) if name == "ci")
        );

        let soon = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(1);
        let (second, _) = NewKey::generate(spec(app)).expect("key");
        let second_id = second.row().id;
        store
            .write(Write::NewKey(Box::new(second.replacing(first_id, soon))))
            .await
            .expect("rotated, under the same name");
        assert_eq!(valid().await, [first_id, second_id]);
        let (third, _) = NewKey::generate(spec(app)).expect("key");
        let twice = store.write(Write::NewKey(Box::new(third.replacing(first_id, soon)))).await;
        assert!(matches!(twice, Err(Error::Stale)), "{twice:?}");

        store.write(Write::RevokeKey(second_id)).await.expect("revoked");
        assert_eq!(valid().await, [first_id]);
        let old = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(1);
        let (third, _) = NewKey::generate(spec(app)).expect("key");
        let third_id = third.row().id;
        store.write(Write::NewKey(Box::new(third.replacing(first_id, old)))).await.expect_err("replaced once already");
        let (third, _) = NewKey::generate(KeySpec { expires_at: Some(old), ..spec(app) }).expect("key");
        store.write(Write::NewKey(Box::new(third))).await.expect("written");
        assert_eq!(valid().await, [first_id], "{third_id} is over");
        assert_eq!(store.keys(app).await.expect("keys").len(), 3);
    }
}
