//! Events and the audit log: one table that is only added to, two views of it.
//!
//! [`Event`] is how everybody in this program says that something happened: built in place, handed to
//! [`Store::record`], which neither waits nor fails. Whatever was handed over earlier is on the disk earlier.
//!
//! ```text
//! record(Event::new("session.ended").app(..).session(..).outcome("idle"))
//!    └─► queue ─► writer: INSERT, commit ─► the feed's number moves ─► followers read on from where they are
//! asked(call) ─► row in `calls`          before the call is done: no change is on the disk without who asked for it
//! answered(event) ─► out of `calls`, into `events` with the outcome; what is left in `calls` by a death is `unknown`
//! ```
//!
//! **Never a secret**: no environment, no input, no value of a header; `detail` says what a stranger could be shown.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use pepo_api::{AppId, CommandId, KeyId, Reason, RequestId, SandboxId, SessionId};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::watch;

use super::{Error, Store, Write, id, json, millis, time, to_json};

/// The longest `detail`, bytes of JSON. What is longer is left out and says so.
const DETAIL: usize = 8 * 1024;

/// Rows that one read passes over; a filter that lets few through does not hold a connection for long.
const WINDOW: i64 = 20_000;

pub(super) const MIGRATION: &str = "
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, at INTEGER NOT NULL, audit INTEGER NOT NULL, type TEXT NOT NULL,
        app_id TEXT, session_id TEXT, sandbox_id TEXT, command_id TEXT, actor TEXT NOT NULL, outcome TEXT NOT NULL,
        request_id TEXT, labels TEXT NOT NULL, detail TEXT NOT NULL
    ) STRICT;
    CREATE INDEX event_ages ON events(audit, at);
    CREATE INDEX events_of_apps ON events(app_id, seq);
    CREATE INDEX events_of_sessions ON events(session_id, seq) WHERE session_id IS NOT NULL;
    CREATE VIEW feed AS SELECT * FROM events WHERE audit = 0;
    CREATE VIEW audit AS SELECT * FROM events WHERE audit = 1;
    CREATE TABLE calls (
        request_id TEXT PRIMARY KEY, at INTEGER NOT NULL, type TEXT NOT NULL, app_id TEXT, actor TEXT NOT NULL, detail TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
";

/// How far each view has been forgotten.
pub(super) const FORGOTTEN: &str = "INSERT INTO counters VALUES ('forgotten_events', 0), ('forgotten_calls', 0);";

/// Who brought something about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Actor {
    /// Pepo itself: a deadline, a death, a recovery.
    #[default]
    Pepo,
    /// An operator, by the uid of the peer.
    Uid(u32),
    /// A key's holder, through the edge.
    Key(KeyId),
    /// Somebody else who came through the edge, as it names them: a token's holder, an identity provider's subject.
    Named(Name),
    /// The edge, for itself.
    Edge,
}

/// A short name of printable characters that is copied as it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; Name::MOST],
    length: u8,
}

impl Name {
    /// The longest, bytes.
    pub const MOST: usize = 120;

    /// This text, if it can be one.
    pub fn new(text: &str) -> Option<Self> {
        let fits = (1..=Self::MOST).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        let mut bytes = [0; Self::MOST];
        bytes.get_mut(..text.len()).filter(|_| fits)?.copy_from_slice(text.as_bytes());
        Some(Name { bytes, length: u8::try_from(text.len()).ok()? })
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        self.bytes.get(..self.length.into()).and_then(|bytes| std::str::from_utf8(bytes).ok()).unwrap_or_default()
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Actor::Pepo => f.write_str("pepo"),
            Actor::Uid(uid) => write!(f, "uid:{uid}"),
            Actor::Key(key) => write!(f, "{key}"),
            Actor::Named(name) => f.write_str(name.as_str()),
            Actor::Edge => f.write_str("edge"),
        }
    }
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// What happened.
    Feed,
    /// What was asked for.
    Audit,
}

impl View {
    /// The counter of the last number that is no longer kept.
    fn forgotten(self) -> &'static str {
        match self {
            View::Feed => "forgotten_events",
            View::Audit => "forgotten_calls",
        }
    }
}

/// Something that happened, or was asked for. `type` is a noun and a past participle: `session.created`,
/// `sandbox.booted`, `command.ended`, `host.swept`.
#[derive(Clone, Debug)]
pub struct Event {
    pub(super) view: View,
    kind: Cow<'static, str>,
    at: jiff::Timestamp,
    app: Option<AppId>,
    session: Option<SessionId>,
    sandbox: Option<SandboxId>,
    command: Option<CommandId>,
    actor: Actor,
    outcome: Cow<'static, str>,
    request: Option<RequestId>,
    labels: BTreeMap<String, String>,
    detail: Map<String, Value>,
}

impl Event {
    /// Something of that type happened now, to the host, by Pepo itself, and well.
    pub fn new(kind: impl Into<Cow<'static, str>>) -> Self {
        Event {
            view: View::Feed,
            kind: kind.into(),
            at: jiff::Timestamp::now(),
            app: None,
            session: None,
            sandbox: None,
            command: None,
            actor: Actor::Pepo,
            outcome: "ok".into(),
            request: None,
            labels: BTreeMap::new(),
            detail: Map::new(),
        }
    }

    /// Whose it is. Without an App only the operator sees it.
    pub fn app(mut self, app: AppId) -> Self {
        self.app = Some(app);
        self
    }

    /// Which Session. Where no App is given, App and labels are the Session's.
    pub fn session(mut self, session: SessionId) -> Self {
        self.session = Some(session);
        self
    }

    /// Which Sandbox.
    pub fn sandbox(mut self, sandbox: SandboxId) -> Self {
        self.sandbox = Some(sandbox);
        self
    }

    /// Which Command.
    pub fn command(mut self, command: CommandId) -> Self {
        self.command = Some(command);
        self
    }

    /// Who.
    pub fn actor(mut self, actor: Actor) -> Self {
        self.actor = actor;
        self
    }

    /// How it came out, where not `ok`: a reason's or an error's word.
    pub fn outcome(mut self, outcome: impl Into<Cow<'static, str>>) -> Self {
        self.outcome = outcome.into();
        self
    }

    /// How it came out, by a reason's word.
    pub fn reason(self, reason: Reason) -> Self {
        let word = serde_json::to_value(reason).ok().and_then(|word| word.as_str().map(str::to_owned));
        self.outcome(word.unwrap_or_default())
    }

    /// The request that brought it about.
    pub fn request(mut self, request: RequestId) -> Self {
        self.request = Some(request);
        self
    }

    /// The Session's labels.
    pub fn labels(mut self, labels: &BTreeMap<String, String>) -> Self {
        self.labels.clone_from(labels);
        self
    }

    /// One more thing to know. What cannot be JSON is left out.
    pub fn detail(mut self, name: &str, value: impl Serialize) -> Self {
        if let Ok(value) = serde_json::to_value(value) {
            self.detail.insert(name.to_owned(), value);
        }
        self
    }

    /// It belongs to the audit log: a call, which needs its request.
    pub fn of_audit(mut self) -> Self {
        self.view = View::Audit;
        self
    }

    fn detail_text(&self) -> Result<String, Error> {
        let text = to_json(&self.detail)?;
        if text.len() <= DETAIL {
            return Ok(text);
        }
        to_json(&serde_json::json!({ "left_out_bytes": text.len() }))
    }
}

/// Which rows are wanted.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Of which view.
    pub view: View,
    /// Of one App; of all where absent.
    pub app: Option<AppId>,
    /// Of one Session.
    pub session: Option<SessionId>,
    /// Of these types: exact, or all below a noun (`session.*`). All where empty.
    pub kinds: Vec<String>,
    /// With all of these labels.
    pub labels: Vec<(String, String)>,
}

impl Wanted {
    fn admits(&self, event: &pepo_api::Event) -> bool {
        let kind = |wanted: &String| match wanted.strip_suffix('*') {
            Some(front) => event.kind.starts_with(front),
            None => event.kind == *wanted,
        };
        (self.kinds.is_empty() || self.kinds.iter().any(kind))
            && self.labels.iter().all(|(key, value)| event.labels.get(key) == Some(value))
    }
}

/// What one read found.
#[derive(Debug)]
pub struct Looked {
    /// What was wanted, in the order that was asked for.
    pub events: Vec<pepo_api::Event>,
    /// Where the next read goes on.
    pub next: u64,
    /// Whether it came to the end of what is there.
    pub end: bool,
    /// The last number of the view that is no longer kept.
    pub forgotten: u64,
}

/// Which way a read goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Towards {
    /// To what came later.
    Newer,
    /// To what was before.
    Older,
}

pub(super) fn insert(transaction: &Transaction<'_>, event: &Event) -> Result<u64, Error> {
    let session = event.session.map(|id| id.to_string());
    let (mut app, mut labels) = (event.app.map(|id| id.to_string()), to_json(&event.labels)?);
    if let (None, Some(session)) = (&app, &session) {
        let known = transaction
            .prepare_cached("SELECT app_id, json_extract(spec, '$.labels') FROM sessions WHERE id = ?1")?
            .query_row([session], |row| Ok((row.get(0)?, row.get::<_, Option<String>>(1)?)))
            .optional()?;
        if let Some((of, theirs)) = known {
            app = Some(of);
            labels = theirs.unwrap_or(labels);
        }
    }
    transaction
        .prepare_cached(
            "INSERT INTO events (at, audit, type, app_id, session_id, sandbox_id, command_id, actor, outcome, request_id, labels, detail)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        )?
        .execute(params![
            millis(event.at),
            event.view == View::Audit,
            event.kind,
            app,
            session,
            event.sandbox.map(|id| id.to_string()),
            event.command.map(|id| id.to_string()),
            event.actor.to_string(),
            event.outcome,
            event.request.map(|id| id.to_string()),
            labels,
            event.detail_text()?,
        ])?;
    if event.view == View::Audit
        && let Some(request) = event.request
    {
        transaction.prepare_cached("DELETE FROM calls WHERE request_id = ?1")?.execute([request.to_string()])?;
    }
    Ok(transaction.last_insert_rowid() as u64)
}

/// Takes down that a call was made, before it is done.
pub(super) fn asked(transaction: &Transaction<'_>, event: &Event) -> Result<(), Error> {
    transaction
        .prepare_cached(
            "INSERT OR IGNORE INTO calls (request_id, at, type, app_id, actor, detail) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?
        .execute(params![
            event.request.map(|id| id.to_string()),
            millis(event.at),
            event.kind,
            event.app.map(|id| id.to_string()),
            event.actor.to_string(),
            event.detail_text()?,
        ])?;
    Ok(())
}

/// Calls that the life before did not answer: whether they were done is not known.
pub(super) fn settle(connection: &Connection) -> Result<(), Error> {
    connection.execute_batch(
        "BEGIN IMMEDIATE;
         INSERT INTO events (at, audit, type, app_id, actor, outcome, request_id, labels, detail)
            SELECT at, 1, type, app_id, actor, 'unknown', request_id, '{}', detail FROM calls ORDER BY at, request_id;
         DELETE FROM calls;
         COMMIT;",
    )?;
    Ok(())
}

/// How long rows are kept, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Those before this time (milliseconds since 1970) go.
    pub before: i64,
    /// Of the others the oldest go beyond this number.
    pub most: u64,
}

pub(super) fn prune(transaction: &Transaction<'_>, view: View, keep: Keep) -> Result<(), Error> {
    let audit = view == View::Audit;
    let count: i64 =
        transaction.query_row("SELECT count(*) FROM events WHERE audit = ?1", [audit], |row| row.get(0))?;
    let over = (count - i64::try_from(keep.most).unwrap_or(i64::MAX)).max(0);
    let last: Option<i64> = transaction.query_row(
        "SELECT max(seq) FROM (SELECT seq FROM events WHERE audit = ?1 AND at < ?2
             UNION ALL SELECT * FROM (SELECT seq FROM events WHERE audit = ?1 ORDER BY seq LIMIT ?3))",
        params![audit, keep.before, over],
        |row| row.get(0),
    )?;
    if let Some(last) = last {
        transaction.execute("DELETE FROM events WHERE audit = ?1 AND seq <= ?2", params![audit, last])?;
        transaction.execute("UPDATE counters SET value = ?2 WHERE name = ?1", params![view.forgotten(), last])?;
    }
    Ok(())
}

fn read(row: &Row<'_>) -> Result<pepo_api::Event, rusqlite::Error> {
    fn maybe<T: std::str::FromStr<Err = pepo_api::IdError>>(
        row: &Row<'_>,
        column: &str,
    ) -> Result<Option<T>, rusqlite::Error> {
        match row.get_ref(column)? {
            rusqlite::types::ValueRef::Null => Ok(None),
            _ => id(row, column).map(Some),
        }
    }
    Ok(pepo_api::Event {
        id: row.get::<_, i64>("seq")? as u64,
        at: time(row.get("at")?),
        kind: row.get("type")?,
        app_id: maybe(row, "app_id")?,
        session_id: maybe(row, "session_id")?,
        sandbox_id: maybe(row, "sandbox_id")?,
        command_id: maybe(row, "command_id")?,
        actor: row.get("actor")?,
        outcome: row.get("outcome")?,
        request_id: maybe(row, "request_id")?,
        labels: json(row, "labels")?,
        detail: json(row, "detail")?,
    })
}

impl Store {
    /// Takes down that something happened. Neither waits nor fails.
    pub fn record(&self, event: Event) {
        self.write_soon(Write::Event(Box::new(event)));
    }

    /// Takes down that a call of the audit log is about to be done; [`Store::record`] of the same request ends it.
    pub fn asked(&self, event: Event) {
        self.write_soon(Write::Asked(Box::new(event)));
    }

    /// The number of the newest event that is on the disk, as it moves.
    pub fn feed(&self) -> watch::Receiver<u64> {
        self.feed.clone()
    }

    /// Rows beyond `from` (exclusive), at most `limit` of those that are wanted, in the order of the way.
    ///
    /// # Errors
    /// A disk that fails.
    pub async fn events(&self, wanted: Wanted, way: Towards, from: u64, limit: usize) -> Result<Looked, Error> {
        self.read(move |connection| look(connection, &wanted, way, from, limit)).await
    }
}

fn look(
    connection: &Connection,
    wanted: &Wanted,
    way: Towards,
    from: u64,
    limit: usize,
) -> Result<Looked, rusqlite::Error> {
    let from = i64::try_from(from).unwrap_or(i64::MAX);
    let forgotten: i64 = connection
        .prepare_cached("SELECT value FROM counters WHERE name = ?1")?
        .query_row([wanted.view.forgotten()], |row| row.get(0))?;
    let forgotten = forgotten as u64;
    let sql = match (way, wanted.session.is_some(), wanted.app.is_some()) {
        (Towards::Newer, true, _) => NEWER_SESSION,
        (Towards::Older, true, _) => OLDER_SESSION,
        (Towards::Newer, false, true) => NEWER_APP,
        (Towards::Older, false, true) => OLDER_APP,
        (Towards::Newer, false, false) => NEWER,
        (Towards::Older, false, false) => OLDER,
    };
    let mut statement = connection.prepare_cached(sql)?;
    let app = wanted.app.map(|id| id.to_string());
    let session = wanted.session.map(|id| id.to_string());
    let mut rows = statement.query(params![from, wanted.view == View::Audit, app, session, WINDOW])?;
    let (mut events, mut passed, mut next) = (Vec::new(), 0, from);
    while let Some(row) = rows.next()? {
        let event = read(row)?;
        (next, passed) = (event.id as i64, passed + 1);
        if wanted.admits(&event) {
            events.push(event);
            if events.len() == limit {
                return Ok(Looked { events, next: next as u64, end: false, forgotten });
            }
        }
    }
    let end = passed < WINDOW;
    Ok(Looked { events, next: next as u64, end, forgotten })
}

const NEWER: &str = "SELECT * FROM events WHERE seq > ?1 AND audit = ?2 AND (?3 IS NULL OR app_id = ?3)
    AND (?4 IS NULL OR session_id = ?4) ORDER BY seq LIMIT ?5";
const OLDER: &str = "SELECT * FROM events WHERE seq < ?1 AND audit = ?2 AND (?3 IS NULL OR app_id = ?3)
    AND (?4 IS NULL OR session_id = ?4) ORDER BY seq DESC LIMIT ?5";
const NEWER_APP: &str = "SELECT * FROM events WHERE app_id = ?3 AND seq > ?1 AND audit = ?2 AND (?4 IS NULL OR session_id = ?4) ORDER BY seq LIMIT ?5";
const OLDER_APP: &str = "SELECT * FROM events WHERE app_id = ?3 AND seq < ?1 AND audit = ?2 AND (?4 IS NULL OR session_id = ?4) ORDER BY seq DESC LIMIT ?5";
const NEWER_SESSION: &str = "SELECT * FROM events WHERE session_id = ?4 AND seq > ?1 AND audit = ?2 AND (?3 IS NULL OR app_id = ?3) ORDER BY seq LIMIT ?5";
const OLDER_SESSION: &str = "SELECT * FROM events WHERE session_id = ?4 AND seq < ?1 AND audit = ?2 AND (?3 IS NULL OR app_id = ?3) ORDER BY seq DESC LIMIT ?5";

#[cfg(test)]
mod tests {
    use super::*;

    fn all(view: View) -> Wanted {
        Wanted { view, app: None, session: None, kinds: Vec::new(), labels: Vec::new() }
    }

    async fn settled(store: &Store, number: u64) {
        let mut feed = store.feed();
        tokio::time::timeout(std::time::Duration::from_secs(60), feed.wait_for(|seq| *seq >= number))
            .await
            .expect("in time")
            .expect("store");
    }

    #[test]
    fn a_name_is_short_and_printable() {
        assert_eq!(Name::new("idp:corp:me").expect("name").as_str(), "idp:corp:me");
        assert_eq!(Actor::Named(Name::new("x").expect("name")).to_string(), "x");
        assert!(Name::new(&"x".repeat(120)).is_some());
        for text in ["", "a b", "a\n", "\u{1b}[2J", "\u{e9}", &"x".repeat(121)] {
            assert!(Name::new(text).is_none(), "{text:?}");
        }
    }

    #[tokio::test]
    async fn one_table_has_two_views_and_each_app_its_own() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("s.db");
        let store = Store::open(&path).expect("store");
        let (ours, theirs) = (AppId::generate(), AppId::generate());
        let session = SessionId::generate();
        let labels: BTreeMap<_, _> = [("user".to_owned(), "42".to_owned())].into();
        store.record(Event::new("session.created").app(ours).session(session).labels(&labels));
        store.record(Event::new("session.ended").app(ours).session(session).outcome("idle").detail("activation", 1));
        store.record(Event::new("session.created").app(theirs));
        store.record(Event::new("host.swept").detail("found", 3));
        let request = RequestId::generate();
        let call = || Event::new("session_create").of_audit().app(ours).actor(Actor::Uid(7)).request(request);
        store.asked(call());
        store.record(call().outcome("not_found"));
        settled(&store, 5).await;

        let kinds = async |wanted: Wanted, way| {
            let from = if way == Towards::Newer { 0 } else { u64::MAX };
            let looked = store.events(wanted, way, from, 100).await.expect("read");
            assert!(looked.end);
            looked.events.into_iter().map(|event| event.kind).collect::<Vec<_>>()
        };
        let every = kinds(all(View::Feed), Towards::Newer).await;
        assert_eq!(every, ["session.created", "session.ended", "session.created", "host.swept"]);
        let of_ours = Wanted { app: Some(ours), ..all(View::Feed) };
        assert_eq!(kinds(of_ours.clone(), Towards::Older).await, ["session.ended", "session.created"]);
        let labelled = Wanted { labels: vec![("user".into(), "42".into())], ..of_ours.clone() };
        assert_eq!(kinds(labelled, Towards::Newer).await, ["session.created"]);
        let typed = Wanted { kinds: vec!["host.*".into(), "session.ended".into()], ..all(View::Feed) };
        assert_eq!(kinds(typed, Towards::Newer).await, ["session.ended", "host.swept"]);
        let of_session = Wanted { session: Some(session), app: Some(theirs), ..all(View::Feed) };
        assert!(kinds(of_session, Towards::Newer).await.is_empty(), "another App's Session");

        let audit = store.events(all(View::Audit), Towards::Newer, 0, 9).await.expect("read").events;
        assert_eq!(audit.len(), 1);
        assert_eq!((audit[0].actor.as_str(), audit[0].outcome.as_str()), ("uid:7", "not_found"));
        assert_eq!(audit[0].request_id, Some(request));
    }

    #[tokio::test]
    async fn a_call_that_nobody_answered_is_told_after_the_restart() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("s.db");
        let store = Store::open(&path).expect("store");
        let request = RequestId::generate();
        store
            .asked(Event::new("session_create").of_audit().actor(Actor::Uid(0)).request(request).detail("target", "x"));
        // Whatever is awaited after it comes to the disk after it.
        store.write(Write::Fact("boot_id", "x".into())).await.expect("write");
        drop(store);
        let store = Store::open(&path).expect("store");
        let found = store.events(all(View::Audit), Towards::Newer, 0, 9).await.expect("read").events;
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].outcome.as_str(), found[0].request_id), ("unknown", Some(request)));
        assert_eq!(found[0].detail["target"], "x");
        drop(store);
        let again =
            Store::open(&path).expect("store").events(all(View::Audit), Towards::Newer, 0, 9).await.expect("read");
        assert_eq!(again.events.len(), 1, "told once");
    }

    #[tokio::test]
    async fn rows_go_by_age_and_by_number() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        for n in 0..10 {
            store.record(Event { at: time(1000 + n), ..Event::new("a.b") });
            store.record(Event { at: time(1000 + n), ..Event::new("call").of_audit().request(RequestId::generate()) });
        }
        settled(&store, 20).await;
        let feed = Keep { before: 1003, most: 5 };
        let audit = Keep { before: 0, most: 100 };
        store.write(Write::Prune { ended_before: 0, feed, audit }).await.expect("prune");
        let looked = store.events(all(View::Feed), Towards::Newer, 0, 100).await.expect("read");
        let times: Vec<_> = looked.events.iter().map(|event| millis(event.at)).collect();
        assert_eq!(times, [1005, 1006, 1007, 1008, 1009]);
        assert_eq!(Some(looked.forgotten + 2), looked.events.first().map(|event| event.id), "the call between them");
        assert_eq!(store.events(all(View::Audit), Towards::Older, u64::MAX, 100).await.expect("read").events.len(), 10);
        // Numbers are never used again, also when the newest rows are gone.
        let none = Keep { before: i64::MAX, most: 0 };
        store.write(Write::Prune { ended_before: 0, feed: none, audit: none }).await.expect("prune");
        store.record(Event::new("a.b"));
        settled(&store, 21).await;
    }

    #[tokio::test]
    async fn a_session_brings_its_app_and_its_labels() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let app = store.default_app().expect("app");
        let row = super::super::session::tests::row(app, None);
        store.write(Write::NewSession(Box::new(row.clone()))).await.expect("session");
        store.record(Event::new("command.ended").session(row.id));
        settled(&store, 1).await;
        let event = store.events(all(View::Feed), Towards::Newer, 0, 1).await.expect("read").events.remove(0);
        assert_eq!((event.app_id, event.labels), (Some(app), row.spec.labels));
    }

    #[tokio::test]
    async fn a_detail_is_bounded() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        store.record(Event::new("a.b").detail("text", "x".repeat(DETAIL)));
        settled(&store, 1).await;
        let events = store.events(all(View::Feed), Towards::Newer, 0, 1).await.expect("read").events;
        assert!(events[0].detail.contains_key("left_out_bytes"), "{:?}", events[0].detail);
    }
}
