//! Session tokens have no rows: what is kept is which of them do not count any more, until their time is over anyway.

use pepo_api::{EdgeVoid, SessionId};
use rusqlite::{Connection, Transaction, params};

use super::{Error, id, millis};

/// The longest life of a token, seconds.
pub const LONGEST: u64 = 3600;

pub(super) const MIGRATION: &str = "
    CREATE TABLE void_tokens (session_id TEXT PRIMARY KEY, before INTEGER NOT NULL) STRICT, WITHOUT ROWID;
";

/// Every token of that Session that was made until now ends.
pub(super) fn void(transaction: &Transaction<'_>, session: SessionId) -> Result<(), Error> {
    let now = millis(jiff::Timestamp::now());
    // One of this very millisecond counts as made before.
    transaction.execute("INSERT OR REPLACE INTO void_tokens VALUES (?1, ?2)", params![session.to_string(), now + 1])?;
    transaction.execute("DELETE FROM void_tokens WHERE before < ?1", [now - 1000 * (LONGEST as i64 + 60)])?;
    super::key::changed(transaction)
}

pub(super) fn voided(connection: &Connection) -> Result<Vec<EdgeVoid>, rusqlite::Error> {
    connection
        .prepare_cached("SELECT session_id, before FROM void_tokens WHERE before >= ?1")?
        .query_map([millis(jiff::Timestamp::now()) - 1000 * LONGEST as i64], |row| {
            Ok(EdgeVoid { session_id: id(row, "session_id")?, before: row.get("before")? })
        })?
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Store, Write};
    use super::*;

    #[tokio::test]
    async fn a_revocation_reaches_the_edge_and_is_forgotten_with_the_tokens() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let before = store.edge_state().await.expect("state");
        assert!(before.void.is_empty());
        let session = SessionId::generate();
        let made = millis(jiff::Timestamp::now());
        store.write(Write::VoidTokens(session)).await.expect("void");
        let after = store.edge_state().await.expect("state");
        assert!(after.generation > before.generation);
        assert_eq!(after.void.len(), 1);
        assert!(after.void[0].session_id == session && after.void[0].before > made);
        store.write(Write::VoidTokens(session)).await.expect("again");
        assert_eq!(store.edge_state().await.expect("state").void.len(), 1);
    }
}
