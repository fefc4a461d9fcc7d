//! Keys: what the edge checks a caller's key against. The key itself is never stored, only its SHA-256.

use std::fmt::Write as _;

use pepo_api::{AppId, KeyId};
use rusqlite::{Transaction, params};
use sha2::{Digest, Sha256};

use super::{Error, Store, id, millis};

/// A key as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRow {
    /// Its id.
    pub id: KeyId,
    /// Its App.
    pub app: AppId,
    /// SHA-256 of its text, 64 hex digits.
    pub sha256: String,
}

/// A key about to be stored.
#[derive(Clone, Debug)]
pub struct NewKey(KeyRow);

impl NewKey {
    /// A new key of that App: the row, and its text, which nothing keeps. 256 random bits, so a plain digest suffices.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn generate(app: AppId) -> Result<(Self, String), std::io::Error> {
        let mut bytes = [0u8; 32];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        let text = format!("pepo_{}", hex(&bytes));
        let sha256 = hex(&Sha256::digest(text.as_bytes()));
        Ok((NewKey(KeyRow { id: KeyId::generate(), app, sha256 }), text))
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

pub(super) fn insert(transaction: &Transaction<'_>, NewKey(key): &NewKey) -> Result<(), Error> {
    transaction.execute(
        "INSERT INTO keys (id, app_id, sha256, created_at) VALUES (?1, ?2, ?3, ?4)",
        params![key.id.to_string(), key.app.to_string(), key.sha256, millis(jiff::Timestamp::now())],
    )?;
    transaction.execute("UPDATE counters SET value = value + 1 WHERE name = 'edge_generation'", [])?;
    Ok(())
}

impl Store {
    /// Every key that is valid, and the count of changes of what the edge needs.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn edge_state(&self) -> Result<(u64, Vec<KeyRow>), Error> {
        self.read(|connection| {
            let transaction = connection.unchecked_transaction()?;
            let generation: i64 =
                transaction
                    .query_row("SELECT value FROM counters WHERE name = 'edge_generation'", [], |row| row.get(0))?;
            let keys = transaction
                .prepare("SELECT * FROM keys ORDER BY id")?
                .query_map([], |row| {
                    Ok(KeyRow { id: id(row, "id")?, app: id(row, "app_id")?, sha256: row.get("sha256")? })
                })?
                .collect::<Result<_, _>>()?;
            Ok((generation as u64, keys))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::super::Write;
    use super::*;

    #[tokio::test]
    async fn only_the_digest_is_kept() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("s.db");
        let store = Store::open(&path).expect("store");
        let (key, text) = NewKey::generate(store.default_app().expect("app")).expect("key");
        let (before, none) = store.edge_state().await.expect("state");
        assert!(none.is_empty());
        store.write(Write::NewKey(key)).await.expect("written");
        let (after, keys) = store.edge_state().await.expect("state");
        assert!(after > before);
        assert_eq!(keys[0].sha256, hex(&Sha256::digest(text.as_bytes())));
        assert_eq!(text.len(), 5 + 64);
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
}
