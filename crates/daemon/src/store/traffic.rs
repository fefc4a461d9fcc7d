//! What the networks of a Session's Sandboxes carried and refused, all its activations together.
//!
//! The kernel counts for a Sandbox from its making on, through any restart of ours; so a mark beside each Sandbox says how
//! far its counts are in the totals already. Counts of names come as what is more, since pepod itself counts them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use pepo_api::{SandboxId, SessionId};
use rusqlite::{OptionalExtension, Transaction, params};

use super::{Error, Store, to_json};
use crate::metrics::METRICS;
use crate::network::Counts;

pub(super) const MIGRATION: &str = "
    CREATE TABLE network_totals (session_id TEXT PRIMARY KEY, counts TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE network_marks (sandbox_id TEXT PRIMARY KEY, counts TEXT NOT NULL) STRICT, WITHOUT ROWID;
";

const TOTAL: &str = "SELECT counts FROM network_totals WHERE session_id = ?1";
const MARK: &str = "SELECT counts FROM network_marks WHERE sandbox_id = ?1";

/// What was counted of one Sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counted {
    /// So much since it was made.
    SinceItsMaking(Counts),
    /// So much more than was told before.
    More(Counts),
}

/// Totals as they were read last: a Session that is looked at again and again asks no disk. What counts more forgets all.
#[derive(Default)]
pub(super) struct Known(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    /// Times that all was forgotten: what was read before the last time is not kept after it.
    age: u64,
    totals: HashMap<SessionId, Option<Counts>>,
}

/// Totals that are kept; beyond that all are forgotten.
const KEPT: usize = 4096;

impl Known {
    /// The total, or the age at which it is looked for elsewhere.
    fn get(&self, session: SessionId) -> Result<Option<Counts>, u64> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.totals.get(&session).cloned().ok_or(kept.age)
    }

    fn keep(&self, age: u64, session: SessionId, total: Option<Counts>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.age == age {
            if kept.totals.len() >= KEPT {
                kept.totals.clear();
            }
            kept.totals.insert(session, total);
        }
    }

    /// For when the totals on the disk have changed, before anybody is told so.
    pub(super) fn forget(&self) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.age += 1;
        kept.totals.clear();
    }
}

fn read(transaction: &Transaction<'_>, sql: &str, id: &str) -> Result<Option<Counts>, Error> {
    let text: Option<String> = transaction.prepare_cached(sql)?.query_row([id], |row| row.get(0)).optional()?;
    // What cannot be read any more is counted anew.
    Ok(text.map(|text| serde_json::from_str(&text).unwrap_or_default()))
}

/// Adds what is new of it to the totals of the Session that the Sandbox is; nobody's is not counted.
pub(super) fn count(transaction: &Transaction<'_>, sandbox: SandboxId, counted: &Counted) -> Result<(), Error> {
    let sandbox = sandbox.to_string();
    let session: Option<String> = transaction
        .prepare_cached("SELECT session_id FROM sandboxes WHERE id = ?1 AND session_id IS NOT NULL")?
        .query_row([&sandbox], |row| row.get(0))
        .optional()?;
    let Some(session) = session else { return Ok(()) };
    let more = match counted {
        Counted::More(more) => more.clone(),
        Counted::SinceItsMaking(now) => {
            let mut mark = read(transaction, MARK, &sandbox)?.unwrap_or_default();
            let more = now.since(&mark);
            mark.raise(now);
            transaction
                .prepare_cached("INSERT OR REPLACE INTO network_marks (sandbox_id, counts) VALUES (?1, ?2)")?
                .execute(params![sandbox, to_json(&mark)?])?;
            more
        }
    };
    if more.is_zero() {
        return Ok(());
    }
    let mut total = read(transaction, TOTAL, &session)?.unwrap_or_default();
    total.add(&more);
    transaction
        .prepare_cached("INSERT OR REPLACE INTO network_totals (session_id, counts) VALUES (?1, ?2)")?
        .execute(params![session, to_json(&total)?])?;
    // Counted here, where it is known what is new: a restart counts nothing twice.
    METRICS.carried(&more);
    Ok(())
}

/// That Sandbox is gone.
pub(super) fn close(transaction: &Transaction<'_>, sandbox: SandboxId) -> Result<(), Error> {
    transaction.prepare_cached("DELETE FROM network_marks WHERE sandbox_id = ?1")?.execute([sandbox.to_string()])?;
    Ok(())
}

/// Forgets those of Sessions that are forgotten.
pub(super) fn prune(transaction: &Transaction<'_>) -> Result<(), Error> {
    transaction.execute("DELETE FROM network_totals WHERE session_id NOT IN (SELECT id FROM sessions)", [])?;
    Ok(())
}

impl Store {
    /// What the networks of a Session's Sandboxes carried and refused, with what the kernel counts of the `present` one now;
    /// none where nothing was.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn carried(
        &self,
        session: SessionId,
        present: Option<(SandboxId, Counts)>,
    ) -> Result<Option<Counts>, Error> {
        let age = match (&present, self.totals.get(session)) {
            (None, Ok(total)) => return Ok(total),
            (None, Err(age)) => Some(age),
            (Some(_), _) => None,
        };
        let read = self.read(move |connection| {
            let counts = |sql, id: String| -> Result<Option<Counts>, rusqlite::Error> {
                let text: Option<String> =
                    connection.prepare_cached(sql)?.query_row([id], |row| row.get(0)).optional()?;
                Ok(text.map(|text| serde_json::from_str(&text).unwrap_or_default()))
            };
            let total = counts(TOTAL, session.to_string())?;
            let Some((sandbox, now)) = present else { return Ok(total) };
            let mut total = total.unwrap_or_default();
            total.add(&now.since(&counts(MARK, sandbox.to_string())?.unwrap_or_default()));
            Ok(Some(total))
        });
        let total = read.await?;
        if let Some(age) = age {
            self.totals.keep(age, session, total.clone());
        }
        Ok(total)
    }
}

#[cfg(test)]
mod tests {
    use pepo_sandbox::net::Traffic;
    use pepo_sandbox::net::dns::Tally;

    use super::super::{Claim, Write, session};
    use super::*;

    #[tokio::test]
    async fn activations_add_up_and_nothing_is_counted_twice() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("pepo.db");
        let store = Store::open(&path).expect("store");
        let row = session::tests::row(store.default_app().expect("app"), None);
        let id = row.id;
        let carried =
            |sent_bytes| Counted::SinceItsMaking(Counts::of_packets(&Traffic { sent_bytes, ..Traffic::default() }));
        let names = |asked| Counted::More(Counts::of_names(&Tally { asked, ..Tally::default() }));
        let (first, second) = (SandboxId::generate(), SandboxId::generate());
        store.write(Write::NewSandbox(first)).await.expect("sandbox");
        // One that waits in the pool is nobody's.
        store.write(Write::Counted(first, carried(5))).await.expect("count");
        store
            .write(Write::NewSessionOn(Box::new(row), Claim { sandbox: first, session: id, activation: 1 }))
            .await
            .expect("claim");
        assert_eq!(store.carried(id, None).await.expect("read"), None);
        for counted in [carried(100), names(3), carried(100), carried(150), carried(0)] {
            store.write(Write::Counted(first, counted)).await.expect("count");
        }
        let total = async |store: &Store| store.carried(id, None).await.expect("read").expect("counted").shown();
        assert_eq!((total(&store).await.sent_bytes, total(&store).await.names.asked), (150, 3), "looked at again");
        // Another life of pepod: the kernel's counts go on, those of names begin again.
        drop(store);
        let store = Store::open(&path).expect("again");
        for counted in [carried(160), names(1)] {
            store.write(Write::Counted(first, counted)).await.expect("count");
        }
        store.write(Write::DropSandbox(first)).await.expect("drop");
        store.write(Write::NewSandbox(second)).await.expect("sandbox");
        let claim = Claim { sandbox: second, session: id, activation: 2 };
        store.write(Write::Claim(claim)).await.expect("claim");
        store.write(Write::Counted(second, carried(40))).await.expect("count");
        let total = total(&store).await;
        assert_eq!((total.sent_bytes, total.names.asked), (200, 4));
        let now = Counts::of_packets(&Traffic { sent_bytes: 45, ..Traffic::default() });
        let looked = store.carried(id, Some((second, now))).await.expect("read").expect("counted");
        assert_eq!(looked.get("sent_bytes"), 205, "what the kernel counted since the last look is in it");
        store.write(Write::Counted(first, carried(999))).await.expect("one that is gone");
        assert_eq!(store.carried(id, None).await.expect("read").expect("counted").shown(), total);
    }
}
