//! Routes of events and of the audit log: a page of what was, or a stream of what comes.
//!
//! A stream holds a place in the table and nothing else: it reads on when its caller has taken what came before, so a slow
//! one costs no memory and misses nothing that is kept. What is no longer kept is told as a gap. Streams are counted per
//! App, and for the operator apart.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, header};
use pepo_api::query::ListEvents;
use pepo_api::{AppId, ErrorCode, FeedEvent, Page, route};
use tokio::sync::watch;

use super::events::{COMMENT_EVERY, event, sse};
use super::{Call, Problem, Query, Routes};
use crate::Pepod;
use crate::session::{Error, Found};
use crate::store::{Store, Towards, View, Wanted};

/// Streams of one App at once, and of the operator.
const STREAMS: usize = 32;

/// Events of one read of a stream.
const PIECE: usize = 100;

/// Reads for one page, where a filter lets few through.
const READS: usize = 10;

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::event_list, events);
    routes.route(&route::audit_list, audit);
}

/// How many streams there are, by App.
#[derive(Clone, Default)]
pub struct Streams(Arc<Mutex<HashMap<Option<AppId>, usize>>>);

/// One of them, until dropped.
struct Open {
    streams: Streams,
    of: Option<AppId>,
}

impl Streams {
    fn open(&self, of: Option<AppId>) -> Option<Open> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(of).or_insert(0);
        if *count >= STREAMS {
            return None;
        }
        *count += 1;
        Some(Open { streams: self.clone(), of })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut open = self.streams.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.of) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.of);
            }
        }
    }
}

async fn events(
    State(pepod): State<Pepod>,
    call: Call,
    headers: HeaderMap,
    Query(query): Query<ListEvents>,
) -> Result<Response, Problem> {
    answer(pepod, call, headers, query, View::Feed).await
}

async fn audit(
    State(pepod): State<Pepod>,
    call: Call,
    headers: HeaderMap,
    Query(query): Query<ListEvents>,
) -> Result<Response, Problem> {
    answer(pepod, call, headers, query, View::Audit).await
}

async fn answer(
    pepod: Pepod,
    call: Call,
    headers: HeaderMap,
    query: ListEvents,
    view: View,
) -> Result<Response, Problem> {
    let wanted = wanted(&pepod, call, &query, view).await?;
    let follows = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.contains("text/event-stream"));
    if follows { follow(&pepod, &headers, &query, wanted) } else { page(&pepod, &query, wanted).await }
}

async fn wanted(pepod: &Pepod, call: Call, query: &ListEvents, view: View) -> Result<Wanted, Problem> {
    let pair = |label: &String| label.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    let labels = query.label.iter().map(pair).collect::<Option<Vec<_>>>();
    let labels = labels.ok_or_else(|| Problem::invalid("label", "a label filter is `key=value`"))?;
    let fits = |kind: &String| {
        let word = kind.strip_suffix(".*").unwrap_or(kind);
        !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || matches!(b, b'.' | b'_'))
    };
    if !query.kind.iter().all(fits) {
        return Err(Problem::invalid("type", "a type is a word as `session.ended`, or all of a noun as `session.*`"));
    }
    let session = match &query.session {
        None => None,
        Some(which) => Some(match which.parse() {
            Ok(id) => id,
            Err(_) => match pepod.sessions().find(call.app, which).await? {
                Found::Live(session) => session.id(),
                Found::Ended(row) => row.id,
            },
        }),
    };
    Ok(Wanted { view, app: call.scope(), session, kinds: query.kind.clone(), labels })
}

async fn page(pepod: &Pepod, query: &ListEvents, wanted: Wanted) -> Result<Response, Problem> {
    let limit = query.limit.unwrap_or(100);
    if !(1..=1000).contains(&limit) {
        return Err(Problem::invalid("limit", "limit must be from 1 to 1000"));
    }
    let limit = limit as usize;
    let mut at = match &query.cursor {
        Some(cursor) => cursor.parse().map_err(|_| Problem::invalid("cursor", "this cursor is none of ours"))?,
        None => u64::MAX,
    };
    let floor = query.after.unwrap_or(0);
    let (mut items, mut more) = (Vec::new(), true);
    for _ in 0..READS {
        let left = limit - items.len();
        let looked = pepod.store().events(wanted.clone(), Towards::Older, at, left).await.map_err(Error::from)?;
        (at, more) = (looked.next, !looked.end && looked.next > floor);
        items.extend(looked.events.into_iter().filter(|event| event.id > floor));
        if items.len() >= limit || !more {
            break;
        }
    }
    let next_cursor = more.then(|| at.to_string());
    Ok(axum::Json(Page { items, next_cursor }).into_response())
}

fn follow(pepod: &Pepod, headers: &HeaderMap, query: &ListEvents, wanted: Wanted) -> Result<Response, Problem> {
    if query.cursor.is_some() || query.limit.is_some() {
        let param = if query.cursor.is_some() { "cursor" } else { "limit" };
        return Err(Problem::invalid(param, "a stream has no pages; `after` says where it begins"));
    }
    let moves = pepod.store().feed();
    let last = match headers.get("last-event-id") {
        None => query.after,
        Some(id) => Some(
            id.to_str()
                .ok()
                .and_then(|id| id.parse().ok())
                .ok_or_else(|| Problem::invalid("Last-Event-ID", "Last-Event-ID is none of ours"))?,
        ),
    };
    let at = last.unwrap_or_else(|| *moves.borrow());
    let Some(open) = pepod.streams().open(wanted.app) else {
        return Err(Problem::new(ErrorCode::Busy, format!("{STREAMS} streams of events are open already")));
    };
    let store = pepod.store().clone();
    let following = Following { store, wanted, at, moves, ready: VecDeque::new(), through: None, _open: open };
    Ok(sse(futures_util::stream::unfold(following, |mut following| async move {
        let bytes = following.next().await?;
        Some((Ok::<_, Infallible>(bytes), following))
    })))
}

struct Following {
    store: Store,
    wanted: Wanted,
    /// Everything up to here was sent or not wanted.
    at: u64,
    moves: watch::Receiver<u64>,
    ready: VecDeque<Bytes>,
    /// The feed's number before the last read, where that read came to the end.
    through: Option<u64>,
    _open: Open,
}

impl Following {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Some(ready);
            }
            let newest = *self.moves.borrow_and_update();
            if self.through == Some(newest) {
                match tokio::time::timeout(COMMENT_EVERY, self.moves.changed()).await {
                    Ok(Ok(())) => continue,
                    // The store is closed: the daemon is about to end.
                    Ok(Err(_)) => return None,
                    Err(_) => return Some(Bytes::from_static(b":\n\n")),
                }
            }
            // A disk that fails ends the daemon; the caller comes back with its last id.
            let looked = self.store.events(self.wanted.clone(), Towards::Newer, self.at, PIECE).await.ok()?;
            if looked.forgotten > self.at {
                let gap = FeedEvent::Gap { after: self.at, from: looked.forgotten + 1 };
                self.ready.push_back(event("gap", Some(looked.forgotten), &gap));
                self.at = looked.forgotten;
            }
            self.at = self.at.max(looked.next);
            if looked.end {
                // All up to this number was on the disk before the read.
                self.through = Some(newest);
                self.at = self.at.max(newest);
            }
            for one in looked.events {
                let id = one.id;
                self.ready.push_back(event("event", Some(id), &FeedEvent::Event(Box::new(one))));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Event, Keep, Write};

    fn following(store: &Store, at: u64) -> Following {
        let wanted = Wanted { view: View::Feed, app: None, session: None, kinds: vec!["a.*".into()], labels: vec![] };
        let open = Streams::default().open(None).expect("room");
        let (store, moves) = (store.clone(), store.feed());
        Following { store, wanted, at, moves, ready: VecDeque::new(), through: None, _open: open }
    }

    async fn next(following: &mut Following) -> String {
        let bytes = tokio::time::timeout(std::time::Duration::from_secs(60), following.next()).await.expect("in time");
        String::from_utf8(bytes.expect("open").to_vec()).expect("text")
    }

    #[tokio::test]
    async fn a_follower_misses_nothing_and_a_hole_is_told() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let mut early = following(&store, 0);
        // More than one read's worth, with others between.
        for n in 0..250 {
            store.record(Event::new("b.x"));
            store.record(Event::new("a.x").detail("n", n));
        }
        for n in 0..250 {
            let text = next(&mut early).await;
            assert!(text.contains(&format!("\"n\":{n}")), "{text}");
            assert!(text.starts_with(&format!("event: event\nid: {}\n", (n + 1) * 2)), "{text}");
        }
        // It sleeps until there is more.
        let (store_too, waiting) = (store.clone(), tokio::spawn(async move { next(&mut early).await }));
        store_too.record(Event::new("a.late"));
        assert!(waiting.await.expect("task").contains("a.late"));

        let all = Keep { before: 0, most: u64::MAX };
        let few = Keep { before: 0, most: 1 };
        store.write(Write::Prune { ended_before: 0, feed: few, audit: all }).await.expect("prune");
        let mut slow = following(&store, 10);
        let gap = next(&mut slow).await;
        assert_eq!(gap, "event: gap\nid: 500\ndata: {\"after\":10,\"from\":501}\n\n");
        assert!(next(&mut slow).await.contains("a.late"));
    }

    #[test]
    fn streams_are_bounded_by_app() {
        let streams = Streams::default();
        let app = Some(AppId::generate());
        let open: Vec<_> = (0..STREAMS).map(|_| streams.open(app).expect("room")).collect();
        assert!(streams.open(app).is_none());
        assert!(streams.open(None).is_some(), "the operator's are counted apart");
        drop(open);
        assert!(streams.open(app).is_some());
        assert!(streams.0.lock().expect("lock").is_empty());
    }
}
