//! Rows of secrets: sealed before they come here, gone with their Session's end.

use pepo_api::SessionId;
use rusqlite::{Transaction, params};

use super::{Error, Store};

pub(super) const MIGRATION: &str = "
    CREATE TABLE secrets (
        session_id TEXT NOT NULL, name TEXT NOT NULL, sealed BLOB NOT NULL, PRIMARY KEY (session_id, name)
    ) STRICT, WITHOUT ROWID;
";

/// A change of a Session's secrets: a name is set to what is sealed, or taken away.
#[derive(Clone, Debug)]
pub struct ChangedSecrets {
    /// Whose.
    pub session: SessionId,
    /// What of them.
    pub changes: Vec<(String, Option<Vec<u8>>)>,
}

pub(super) fn change(transaction: &Transaction<'_>, changed: &ChangedSecrets) -> Result<(), Error> {
    let session = changed.session.to_string();
    for (name, sealed) in &changed.changes {
        match sealed {
            Some(sealed) => transaction
                .prepare_cached("INSERT OR REPLACE INTO secrets (session_id, name, sealed) VALUES (?1, ?2, ?3)")?
                .execute(params![session, name, sealed])?,
            None => transaction
                .prepare_cached("DELETE FROM secrets WHERE session_id = ?1 AND name = ?2")?
                .execute([&session, name])?,
        };
    }
    Ok(())
}

/// A Session has ended, or was never made.
pub(super) fn forget(transaction: &Transaction<'_>, session: SessionId) -> Result<(), Error> {
    transaction.prepare_cached("DELETE FROM secrets WHERE session_id = ?1")?.execute([session.to_string()])?;
    Ok(())
}

impl Store {
    /// Secrets of that Session, sealed.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn secrets(&self, session: SessionId) -> Result<Vec<(String, Vec<u8>)>, Error> {
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT name, sealed FROM secrets WHERE session_id = ?1 ORDER BY name")?
                .query_map([session.to_string()], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect()
        })
        .await
    }

    /// Whether anything is sealed.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn has_secrets(&self) -> Result<bool, Error> {
        self.read_now(|connection| connection.query_row("SELECT EXISTS (SELECT 1 FROM secrets)", [], |row| row.get(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Write;
    use super::*;

    #[tokio::test]
    async fn secrets_go_with_their_session() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let mut row = super::super::session::tests::row(store.default_app().expect("app"), None);
        let set = |name: &str, sealed: Option<&[u8]>| {
            let changes = vec![(name.to_owned(), sealed.map(<[u8]>::to_vec))];
            Write::Secrets(Box::new(ChangedSecrets { session: row.id, changes }))
        };
        let (a, b, again, gone) = (set("A", Some(b"1")), set("B", Some(b"2")), set("A", Some(b"3")), set("B", None));
        assert!(!store.has_secrets().expect("read"));
        for write in [a, b, again, gone] {
            store.write(write).await.expect("write");
        }
        assert_eq!(store.secrets(row.id).await.expect("read"), [("A".to_owned(), b"3".to_vec())]);
        store.write(Write::NewSession(Box::new(row.clone()))).await.expect("session");
        row.ended = Some(pepo_api::Ended::new(pepo_api::Reason::Idle, super::super::time(9)));
        store.write(Write::Session(Box::new(row.clone()))).await.expect("ended");
        assert!(store.secrets(row.id).await.expect("read").is_empty());
    }
}
