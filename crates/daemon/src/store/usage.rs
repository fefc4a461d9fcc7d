//! What Sandboxes have used for their Sessions: periods, of which every claimed Sandbox has exactly one open.
//!
//! A period opens with the claim, in its transaction, and closes with the Sandbox; in between it is closed and opened anew at
//! each turn of [`SLICE_MS`], so that a report over part of a long activation has something to count. The index is what
//! keeps a second one from being open. Amounts are whole numbers and belong to the report that holds their period's
//! beginning, so reports over parts of a time add up to that over the whole, to the last byte.
//!
//! ```text
//! claim ──► open ──sample, sample, …──► turn: closed, and another open ──► … ──► Sandbox given back: closed
//!           marks: what the counters stood at when they were last looked at
//! ```

use pepo_api::{Amounts, AppId, SandboxId, UsageGroup};
use rusqlite::{Connection, Transaction, named_params, params};

use super::{Claim, Error, Store};

/// How long a period is at the most: the finest that a report can tell apart within one activation.
pub const SLICE_MS: i64 = 600_000;

pub(super) const MIGRATION: &str = "
    CREATE TABLE usage (
        id INTEGER PRIMARY KEY, app_id TEXT NOT NULL, session_id TEXT NOT NULL, sandbox_id TEXT NOT NULL,
        activation INTEGER NOT NULL, begins INTEGER NOT NULL, labels TEXT NOT NULL,
        memory_mib INTEGER NOT NULL, disk_mib INTEGER NOT NULL,
        started_at INTEGER NOT NULL, sampled_at INTEGER NOT NULL, ended_at INTEGER,
        cpu_us INTEGER NOT NULL DEFAULT 0, memory_used_mib_ms INTEGER NOT NULL DEFAULT 0,
        disk_used_mib_ms INTEGER NOT NULL DEFAULT 0, read_bytes INTEGER NOT NULL DEFAULT 0,
        write_bytes INTEGER NOT NULL DEFAULT 0, sent_bytes INTEGER NOT NULL DEFAULT 0, received_bytes INTEGER NOT NULL DEFAULT 0,
        mark_cpu_us INTEGER NOT NULL DEFAULT 0, mark_read INTEGER NOT NULL DEFAULT 0, mark_write INTEGER NOT NULL DEFAULT 0,
        mark_sent INTEGER NOT NULL DEFAULT 0, mark_received INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE UNIQUE INDEX usage_open ON usage(sandbox_id) WHERE ended_at IS NULL;
    CREATE INDEX usage_times ON usage(started_at);
";

/// What a Sandbox's counters say at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Whose.
    pub sandbox: SandboxId,
    /// When, in milliseconds since 1970.
    pub at: i64,
    /// Processor time since its start, in microseconds.
    pub cpu_us: u64,
    /// Memory in use, in bytes.
    pub memory_bytes: u64,
    /// Scratch disk in use, in bytes.
    pub disk_bytes: u64,
    /// Bytes read since its start.
    pub read_bytes: u64,
    /// Bytes written since its start.
    pub write_bytes: u64,
    /// Bytes sent into the network.
    pub sent_bytes: u64,
    /// Bytes received from it.
    pub received_bytes: u64,
}

/// What a sample is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// What was used before it is nobody's: a Sandbox that waited for its Session.
    Base,
    /// One of many.
    Look,
    /// The last.
    End,
}

/// Opens the period of a claim.
pub(super) fn open(transaction: &Transaction<'_>, claim: &Claim, at: i64) -> Result<(), Error> {
    transaction
        .prepare_cached(
            "INSERT INTO usage (app_id, session_id, sandbox_id, activation, begins, labels, memory_mib, disk_mib, started_at, sampled_at)
             SELECT app_id, id, ?2, ?3, 1, coalesce(spec ->> '$.labels', '{}'), spec ->> '$.memory_mib', spec ->> '$.disk_mib', ?4, ?4
             FROM sessions WHERE id = ?1",
        )?
        .execute(params![claim.session.to_string(), claim.sandbox.to_string(), claim.activation as i64, at])?;
    Ok(())
}

/// Adds what was used since the last look to the open period, if there is one.
pub(super) fn sample(transaction: &Transaction<'_>, sample: &Sample, purpose: Purpose) -> Result<(), Error> {
    let sandbox = sample.sandbox.to_string();
    if purpose == Purpose::Base {
        transaction
            .prepare_cached(
                "UPDATE usage SET mark_cpu_us = ?2, mark_read = ?3, mark_write = ?4 WHERE sandbox_id = ?1 AND ended_at IS NULL",
            )?
            .execute(params![sandbox, sample.cpu_us as i64, sample.read_bytes as i64, sample.write_bytes as i64])?;
        return Ok(());
    }
    // A counter below its mark is one that could not be read: it adds nothing, and its mark stays.
    transaction
        .prepare_cached(
            "UPDATE usage SET
               cpu_us = cpu_us + max(0, :cpu - mark_cpu_us), mark_cpu_us = max(mark_cpu_us, :cpu),
               read_bytes = read_bytes + max(0, :read - mark_read), mark_read = max(mark_read, :read),
               write_bytes = write_bytes + max(0, :write - mark_write), mark_write = max(mark_write, :write),
               sent_bytes = sent_bytes + max(0, :sent - mark_sent), mark_sent = max(mark_sent, :sent),
               received_bytes = received_bytes + max(0, :received - mark_received),
               mark_received = max(mark_received, :received),
               memory_used_mib_ms = memory_used_mib_ms + :memory * max(0, :at - sampled_at) / 1048576,
               disk_used_mib_ms = disk_used_mib_ms + :disk * max(0, :at - sampled_at) / 1048576,
               sampled_at = max(sampled_at, :at), ended_at = CASE WHEN :last THEN max(sampled_at, :at) END
             WHERE sandbox_id = :sandbox AND ended_at IS NULL",
        )?
        .execute(named_params! {
            ":cpu": sample.cpu_us as i64,
            ":read": sample.read_bytes as i64,
            ":write": sample.write_bytes as i64,
            ":sent": sample.sent_bytes as i64,
            ":received": sample.received_bytes as i64,
            ":memory": sample.memory_bytes as i64,
            ":disk": sample.disk_bytes as i64,
            ":at": sample.at,
            ":last": purpose == Purpose::End,
            ":sandbox": sandbox,
        })?;
    if purpose == Purpose::Look {
        turn(transaction, &sandbox, sample.at)?;
    }
    Ok(())
}

/// Closes a period that began in an earlier slice of time, and opens the next.
fn turn(transaction: &Transaction<'_>, sandbox: &str, at: i64) -> Result<(), Error> {
    let closed = transaction
        .prepare_cached(
            "UPDATE usage SET ended_at = sampled_at
             WHERE sandbox_id = ?1 AND ended_at IS NULL AND started_at / ?3 <> ?2 / ?3 RETURNING id",
        )?
        .query_map(params![sandbox, at, SLICE_MS], |row| row.get::<_, i64>(0))?
        .collect::<Result<Vec<_>, _>>()?;
    for id in closed {
        transaction
            .prepare_cached(
                "INSERT INTO usage (app_id, session_id, sandbox_id, activation, begins, labels, memory_mib, disk_mib, started_at,
                   sampled_at, mark_cpu_us, mark_read, mark_write, mark_sent, mark_received)
                 SELECT app_id, session_id, sandbox_id, activation, 0, labels, memory_mib, disk_mib, ended_at, ended_at,
                   mark_cpu_us, mark_read, mark_write, mark_sent, mark_received FROM usage WHERE id = ?1",
            )?
            .execute([id])?;
    }
    Ok(())
}

/// Closes what is open of a Sandbox that is gone, as it was last seen.
pub(super) fn close(transaction: &Transaction<'_>, sandbox: SandboxId) -> Result<(), Error> {
    transaction
        .prepare_cached("UPDATE usage SET ended_at = sampled_at WHERE sandbox_id = ?1 AND ended_at IS NULL")?
        .execute([sandbox.to_string()])?;
    Ok(())
}

/// Closes what is open of Sandboxes that are not there any more.
pub(super) fn settle(connection: &Connection) -> Result<(), Error> {
    connection.execute(
        "UPDATE usage SET ended_at = sampled_at WHERE ended_at IS NULL AND sandbox_id NOT IN (SELECT id FROM sandboxes)",
        [],
    )?;
    Ok(())
}

pub(super) fn prune(transaction: &Transaction<'_>, before: i64) -> Result<(), Error> {
    transaction.execute("DELETE FROM usage WHERE ended_at < ?1", [before])?;
    Ok(())
}

/// What a report is divided by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupBy {
    /// Nothing: one part.
    All,
    /// The App.
    App,
    /// The Session.
    Session,
    /// The day, UTC.
    Day,
    /// The value of a label, as it was when the activation began.
    Label(String),
}

impl GroupBy {
    /// The column, and its parameter.
    fn column(&self) -> (&'static str, &str) {
        match self {
            GroupBy::All => ("NULL", ""),
            GroupBy::App => ("app_id", ""),
            GroupBy::Session => ("session_id", ""),
            GroupBy::Day => ("date(started_at / 1000, 'unixepoch')", ""),
            GroupBy::Label(name) => ("(SELECT value FROM json_each(labels) WHERE key = :label)", name),
        }
    }
}

impl Store {
    /// What was used in periods that began in `from..to` (milliseconds since 1970), by group.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn usage(
        &self,
        app: Option<AppId>,
        from: i64,
        to: i64,
        group_by: GroupBy,
    ) -> Result<Vec<UsageGroup>, Error> {
        self.read(move |connection| {
            let (column, label) = group_by.column();
            let sql = format!(
                "SELECT {column} AS part, sum(coalesce(ended_at, sampled_at) - started_at), sum(cpu_us),
                   sum(memory_mib * (coalesce(ended_at, sampled_at) - started_at)), sum(memory_used_mib_ms),
                   sum(disk_mib * (coalesce(ended_at, sampled_at) - started_at)), sum(disk_used_mib_ms),
                   sum(read_bytes), sum(write_bytes), sum(begins), sum(sent_bytes), sum(received_bytes)
                 FROM usage WHERE started_at >= :from AND started_at < :to AND (:app IS NULL OR app_id = :app) AND :label = :label
                 GROUP BY part ORDER BY part"
            );
            let parameters = named_params! {
                ":from": from, ":to": to, ":app": app.map(|app| app.to_string()), ":label": label
            };
            let mut groups: Vec<UsageGroup> = connection
                .prepare_cached(&sql)?
                .query_map(parameters, |row| {
                    let number = |index: usize| row.get::<_, i64>(index).map(|number| number.max(0) as u64);
                    Ok(UsageGroup {
                        key: row.get(0)?,
                        amounts: Amounts {
                            wall_ms: number(1)?,
                            cpu_us: number(2)?,
                            memory_allocated_mib_ms: number(3)?,
                            memory_used_mib_ms: number(4)?,
                            disk_allocated_mib_ms: number(5)?,
                            disk_used_mib_ms: number(6)?,
                            read_bytes: number(7)?,
                            write_bytes: number(8)?,
                            activations: number(9)?,
                            sent_bytes: number(10)?,
                            received_bytes: number(11)?,
                            ..Amounts::default()
                        },
                    })
                })?
                .collect::<Result<_, _>>()?;
            for (key, mib_ms) in super::workspace::used(connection, app, (from, to), &group_by)? {
                let amounts = Amounts { workspace_allocated_mib_ms: mib_ms, ..Amounts::default() };
                match groups.iter_mut().find(|group| group.key == key) {
                    Some(group) => group.amounts += amounts,
                    None => groups.push(UsageGroup { key, amounts }),
                }
            }
            groups.sort_by(|a, b| a.key.cmp(&b.key));
            Ok(groups)
        })
        .await
    }

    /// Periods that are open.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn open_periods(&self) -> Result<u64, Error> {
        self.read(|connection| {
            connection.query_row("SELECT count(*) FROM usage WHERE ended_at IS NULL", [], |row| row.get::<_, i64>(0))
        })
        .await
        .map(|count| count as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Write, session, time};
    use super::*;

    fn look(sandbox: SandboxId, at: i64, cpu_us: u64) -> Sample {
        Sample {
            sandbox,
            at,
            cpu_us,
            memory_bytes: 100 << 20,
            disk_bytes: 10 << 20,
            read_bytes: cpu_us,
            write_bytes: 7,
            sent_bytes: cpu_us,
            received_bytes: 3,
        }
    }

    async fn claimed(store: &Store, app: AppId, user: &str) -> (SandboxId, Claim) {
        let mut row = session::tests::row(app, None);
        row.spec.labels = [("user".to_owned(), user.to_owned())].into();
        let sandbox = SandboxId::generate();
        let claim = Claim { sandbox, session: row.id, activation: 1 };
        store.write(Write::NewSandbox(sandbox)).await.expect("sandbox");
        store.write(Write::NewSessionOn(Box::new(row), claim)).await.expect("claim");
        (sandbox, claim)
    }

    fn sum(groups: &[UsageGroup]) -> Amounts {
        let mut all = Amounts::default();
        groups.iter().for_each(|group| all += group.amounts);
        all
    }

    #[tokio::test]
    async fn a_sandbox_has_one_open_period_and_parts_add_up_to_the_whole() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("pepo.db");
        let store = Store::open(&path).expect("store");
        let app = store.default_app().expect("app");
        let began = super::super::millis(jiff::Timestamp::now());
        let (first, _) = claimed(&store, app, "a'; DROP TABLE usage; --").await;
        let (second, claim) = claimed(&store, app, "b").await;
        // The database itself refuses a second one.
        let twice = rusqlite::Connection::open(&path).expect("open").execute(
            "INSERT INTO usage (app_id, session_id, sandbox_id, activation, begins, labels, memory_mib, disk_mib, started_at, sampled_at)
             SELECT app_id, session_id, sandbox_id, activation, begins, labels, memory_mib, disk_mib, started_at, sampled_at
             FROM usage WHERE sandbox_id = ?1",
            [claim.sandbox.to_string()],
        );
        assert!(twice.expect_err("refused").to_string().contains("UNIQUE"), "two open periods of one Sandbox");

        store.write(Write::Usage(look(first, began, 500), Purpose::Base)).await.expect("base");
        let mut at = began;
        for step in 1..=300_i64 {
            at = began + step * 5_003;
            store.write_later(Write::Usage(look(first, at, 500 + step as u64 * 1_001), Purpose::Look)).await;
            store.write_later(Write::Usage(look(second, at, step as u64 * 17), Purpose::Look)).await;
        }
        // A counter that cannot be read any more adds nothing and takes nothing away.
        store.write(Write::Usage(look(second, at, 0), Purpose::Look)).await.expect("look");
        assert_eq!(store.open_periods().await.expect("open"), 2);
        store.write(Write::Usage(look(first, at, 500 + 300 * 1_001), Purpose::End)).await.expect("end");
        store.write(Write::DropSandbox(second)).await.expect("drop");
        assert_eq!(store.open_periods().await.expect("open"), 0);

        let all = store.usage(Some(app), 0, i64::MAX, GroupBy::All).await.expect("usage");
        let total = sum(&all);
        assert_eq!(total.cpu_us, 300 * 1_001 + 300 * 17);
        assert_eq!(total.activations, 2);
        assert_eq!((total.sent_bytes, total.received_bytes), (500 + total.cpu_us, 6));
        assert!(total.wall_ms.abs_diff(2 * 300 * 5_003) < 5_000, "{}", total.wall_ms);
        assert_eq!(total.memory_allocated_mib_ms, total.wall_ms * 512);
        for by in
            [GroupBy::App, GroupBy::Session, GroupBy::Day, GroupBy::Label("user".into()), GroupBy::Label("no".into())]
        {
            let parts = store.usage(None, 0, i64::MAX, by.clone()).await.expect("usage");
            assert_eq!(sum(&parts), total, "{by:?}");
        }
        let users = store.usage(None, 0, i64::MAX, GroupBy::Label("user".into())).await.expect("usage");
        assert_eq!(
            users.iter().filter_map(|group| group.key.as_deref()).collect::<Vec<_>>(),
            ["a'; DROP TABLE usage; --", "b"]
        );
        // Any division of time adds up, too, and there is something to divide.
        for cut in [began + 1, began + SLICE_MS, began + 700_000, at] {
            let before = sum(&store.usage(None, 0, cut, GroupBy::All).await.expect("usage"));
            let after = sum(&store.usage(None, cut, i64::MAX, GroupBy::All).await.expect("usage"));
            let mut both = before;
            both += after;
            assert_eq!(both, total, "cut at {cut}");
        }
        let early = sum(&store.usage(None, 0, began + 700_000, GroupBy::All).await.expect("usage"));
        assert!(early.cpu_us > 0 && early.cpu_us < total.cpu_us, "long activations are one lump");
        assert!(store.usage(Some(AppId::generate()), 0, i64::MAX, GroupBy::App).await.expect("usage").is_empty());
    }

    /// Looks at three Sandboxes of two users: which one, how much later, and what its counters moved by.
    async fn any_use_adds_up(looks: Vec<(usize, i64, u64)>, cuts: Vec<i64>) {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("pepo.db")).expect("store");
        let app = store.default_app().expect("app");
        let began = super::super::millis(jiff::Timestamp::now());
        let mut sandboxes = Vec::new();
        for user in ["a", "b", "a"] {
            sandboxes.push((claimed(&store, app, user).await.0, 0));
        }
        let mut at = began;
        for (which, later, more) in looks {
            at += later;
            let (sandbox, cpu_us) = &mut sandboxes[which];
            *cpu_us += more;
            store.write_later(Write::Usage(look(*sandbox, at, *cpu_us), Purpose::Look)).await;
        }
        let used: u64 = sandboxes.iter().map(|(_, cpu_us)| cpu_us).sum();
        store.write(Write::Usage(look(sandboxes[0].0, at, sandboxes[0].1), Purpose::End)).await.expect("end");
        let total = sum(&store.usage(None, 0, i64::MAX, GroupBy::All).await.expect("usage"));
        assert_eq!((total.cpu_us, total.read_bytes, total.activations), (used, used, 3));
        for by in [GroupBy::App, GroupBy::Session, GroupBy::Day, GroupBy::Label("user".into())] {
            let parts = store.usage(None, 0, i64::MAX, by.clone()).await.expect("usage");
            assert_eq!(sum(&parts), total, "{by:?}");
        }
        let mut times: Vec<i64> = cuts.into_iter().map(|cut| began + cut).collect();
        times.sort_unstable();
        let (mut whole, mut from) = (Amounts::default(), 0);
        for to in times.into_iter().chain([i64::MAX]) {
            whole += sum(&store.usage(None, from, to, GroupBy::Session).await.expect("usage"));
            from = to;
        }
        assert_eq!(whole, total, "parts of the time are not the whole");
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(12))]

        #[test]
        fn whatever_is_used_the_parts_are_the_whole(
            looks in proptest::collection::vec((0_usize..3, 0_i64..900_000, 0_u64..5_000_000), 1..60),
            cuts in proptest::collection::vec(0_i64..40_000_000, 0..5),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
            runtime.block_on(any_use_adds_up(looks, cuts));
        }
    }

    #[tokio::test]
    async fn what_a_crash_left_open_is_closed_where_it_was_last_seen() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("pepo.db");
        let store = Store::open(&path).expect("store");
        let app = store.default_app().expect("app");
        let began = super::super::millis(jiff::Timestamp::now());
        let (sandbox, _) = claimed(&store, app, "a").await;
        store.write(Write::Usage(look(sandbox, began + 9_000, 1), Purpose::Look)).await.expect("look");
        drop(store);
        // The host was restarted: its Sandboxes are gone, and so is this row.
        rusqlite::Connection::open(&path).expect("open").execute("DELETE FROM sandboxes", []).expect("delete");
        let store = Store::open(&path).expect("store");
        assert_eq!(store.open_periods().await.expect("open"), 0);
        let total = sum(&store.usage(None, 0, i64::MAX, GroupBy::All).await.expect("usage"));
        assert!((8_000..=9_000).contains(&total.wall_ms), "{}", total.wall_ms);
        let _ = time(0);
    }
}
