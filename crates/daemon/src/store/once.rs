//! Rows of requests that are done once: what each made, so that the same request again makes nothing.
//!
//! A row is written before anything is made and has the id that it will have: whatever happens in between, a repeat finds
//! out by that id how far the first one came.

use pepo_api::AppId;
use rusqlite::{OptionalExtension, Transaction, params};

use super::Error;

pub(super) const MIGRATION: &str = "
    CREATE TABLE once (
        app_id TEXT NOT NULL, of TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, made TEXT NOT NULL,
        done INTEGER NOT NULL DEFAULT 0, at INTEGER NOT NULL, PRIMARY KEY (app_id, of, key)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX once_age ON once(at);
";

/// How long a key is known, in milliseconds: a day.
pub const KNOWN_FOR_MS: i64 = 86_400_000;

/// Which request: whose, of what, under which key of the caller's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OnceKey {
    /// Whose.
    pub app: AppId,
    /// What is made, and of what.
    pub of: String,
    /// The caller's word for it.
    pub key: String,
}

/// A request that is done once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OnceRow {
    /// Which.
    pub which: OnceKey,
    /// A keyed digest of its body.
    pub digest: String,
    /// The id of what it makes.
    pub made: String,
    /// Whether that was made, as far as is known.
    pub done: bool,
    /// When it came, in milliseconds since 1970.
    pub at: i64,
}

/// Claims the key. Where it is known, [`Error::Known`] says what it stands for.
pub(super) fn claim(transaction: &Transaction<'_>, row: &OnceRow) -> Result<(), Error> {
    let OnceKey { app, of, key } = &row.which;
    let app_id = app.to_string();
    let known = transaction
        .prepare_cached(
            "SELECT digest, made, done, at FROM once WHERE app_id = ?1 AND of = ?2 AND key = ?3 AND at > ?4",
        )?
        .query_row(params![app_id, of, key, row.at - KNOWN_FOR_MS], |found| {
            Ok(OnceRow {
                which: row.which.clone(),
                digest: found.get(0)?,
                made: found.get(1)?,
                done: found.get(2)?,
                at: found.get(3)?,
            })
        })
        .optional()?;
    if let Some(known) = known {
        return Err(Error::Known(Box::new(known)));
    }
    transaction
        .prepare_cached(
            "INSERT OR REPLACE INTO once (app_id, of, key, digest, made, at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?
        .execute(params![app_id, of, key, row.digest, row.made, row.at])?;
    Ok(())
}

/// It was made.
pub(super) fn done(transaction: &Transaction<'_>, which: &OnceKey) -> Result<(), Error> {
    transaction
        .prepare_cached("UPDATE once SET done = 1 WHERE app_id = ?1 AND of = ?2 AND key = ?3")?
        .execute(params![which.app.to_string(), which.of, which.key])?;
    Ok(())
}

/// Nothing came of it: the key is free again.
pub(super) fn forget(transaction: &Transaction<'_>, which: &OnceKey) -> Result<(), Error> {
    transaction.prepare_cached("DELETE FROM once WHERE app_id = ?1 AND of = ?2 AND key = ?3")?.execute(params![
        which.app.to_string(),
        which.of,
        which.key
    ])?;
    Ok(())
}

pub(super) fn prune(transaction: &Transaction<'_>, now: i64) -> Result<(), Error> {
    transaction.execute("DELETE FROM once WHERE at <= ?1", [now - KNOWN_FOR_MS])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Store, Write};
    use super::*;

    fn row(app: AppId, key: &str, at: i64) -> OnceRow {
        let which = OnceKey { app, of: "session_create".into(), key: key.into() };
        OnceRow { which, digest: "d".into(), made: format!("ses_{at}"), done: false, at }
    }

    #[tokio::test]
    async fn a_key_stands_for_what_it_made_for_a_day_and_per_app() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("s.db");
        let store = Store::open(&path).expect("store");
        let app = AppId::generate();
        let claim = |row: OnceRow| store.write(Write::Once(Box::new(row)));
        claim(row(app, "a", 10)).await.expect("free");
        claim(row(app, "b", 10)).await.expect("another key");
        claim(row(AppId::generate(), "a", 10)).await.expect("another App");
        let known = claim(row(app, "a", 20)).await.expect_err("known");
        let Error::Known(known) = known else { panic!("{known}") };
        assert_eq!((known.made.as_str(), known.done), ("ses_10", false));
        store.write(Write::OnceDone(known.which.clone())).await.expect("done");
        drop(store);
        let store = Store::open(&path).expect("again");
        let claim = |row: OnceRow| store.write(Write::Once(Box::new(row)));
        let known = claim(row(app, "a", KNOWN_FOR_MS + 9)).await.expect_err("known over a restart");
        assert!(matches!(known, Error::Known(row) if row.done && row.made == "ses_10"));
        claim(row(app, "a", KNOWN_FOR_MS + 10)).await.expect("a day later it is free");
        store.write(Write::OnceForget(row(app, "b", 0).which)).await.expect("forget");
        claim(row(app, "b", 30)).await.expect("free again");
    }
}
