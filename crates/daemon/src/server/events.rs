//! A command's output as a stream: server-sent events, or one channel's bytes.
//!
//! Pulled by the connection: nothing is read from the guest before the caller took what came before.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::Stream;
use http::header;
use pepo_api::StreamEvent;

use super::Problem;
use crate::session::{Follower, Item};
use crate::text::{Joiner, Side, text};

/// A stream without events says that it lives.
pub(super) const COMMENT_EVERY: Duration = Duration::from_secs(15);

/// How far a stream goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// To the command's end.
    End,
    /// To what was written when it was asked for.
    Offset(u64),
}

/// An answer of server-sent events.
pub(super) fn sse(events: impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(events)).into_response()
}

/// One event in its form on the wire. JSON has no line breaks, so one `data` line holds it.
pub(super) fn event<T: serde::Serialize>(name: &str, id: Option<u64>, data: &T) -> Bytes {
    let mut out = format!("event: {name}\n");
    if let Some(id) = id {
        out.push_str(&format!("id: {id}\n"));
    }
    out.push_str("data: ");
    out.push_str(&serde_json::to_string(data).unwrap_or_default());
    out.push_str("\n\n");
    Bytes::from(out)
}

struct Sending {
    follower: Follower,
    until: Until,
    joiners: [Joiner; 2],
    /// Where the bytes end that are held back, if some are.
    held_end: u64,
    ready: VecDeque<Bytes>,
    over: bool,
}

/// The events of one command.
pub(super) fn answer(follower: Follower, until: Until) -> Response {
    let start = StreamEvent::Start { command: Box::new(follower.shown()) };
    let first = event("start", Some(follower.next_offset()), &start);
    let sending =
        Sending { follower, until, joiners: Default::default(), held_end: 0, ready: [first].into(), over: false };
    sse(futures_util::stream::unfold(sending, |mut sending| async move {
        let bytes = sending.next().await?;
        Some((Ok(bytes), sending))
    }))
}

impl Sending {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Some(ready);
            }
            if self.over {
                return None;
            }
            if let Until::Offset(until) = self.until
                && self.follower.next_offset() >= until
            {
                self.flush(None);
                self.stop();
                continue;
            }
            match tokio::time::timeout(COMMENT_EVERY, self.follower.next()).await {
                Err(_) => return Some(Bytes::from_static(b":\n\n")),
                Ok(Ok(item)) => self.item(item),
                // A stream that breaks off is resumed by its last id; an error would be the last word.
                Ok(Err(error)) if error.is_a_lost_stream() => return None,
                Ok(Err(error)) => {
                    self.flush(None);
                    let Problem(error) = error.into();
                    self.ready.push_back(event("error", None, &StreamEvent::Error { error }));
                    self.stop();
                }
            }
        }
    }

    fn stop(&mut self) {
        self.over = true;
        self.follower.answered();
    }

    fn item(&mut self, item: Item) {
        match item {
            Item::Data { side, offset, bytes } => {
                // What the other channel holds back lies before these bytes, and so must its event.
                self.flush(Some(side));
                self.held_end = offset + bytes.len() as u64;
                if let Some((held, piece)) = self.joiners[index(side)].piece(&bytes) {
                    self.output(side, offset - held as u64, &piece);
                }
            }
            Item::Gap { from, to } => {
                self.flush(None);
                self.ready.push_back(event("gap", Some(to), &StreamEvent::Gap { from, to }));
            }
            Item::End => {
                self.flush(None);
                let exit = StreamEvent::Exit { command: Box::new(self.follower.shown()) };
                self.ready.push_back(event("exit", Some(self.follower.next_offset()), &exit));
                self.stop();
            }
        }
    }

    /// Sends what is held back, of all channels but this one. Held bytes always end where the next ones begin.
    fn flush(&mut self, but: Option<Side>) {
        for side in [Side::Out, Side::Err] {
            if but == Some(side) {
                continue;
            }
            if let Some(rest) = self.joiners[index(side)].rest() {
                let end = self.held_end;
                self.output(side, end - rest.len() as u64, &rest);
            }
        }
    }

    fn output(&mut self, side: Side, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        let data = text(bytes);
        let (name, stream_event) = match side {
            Side::Out => ("stdout", StreamEvent::Stdout { offset, data }),
            Side::Err => ("stderr", StreamEvent::Stderr { offset, data }),
        };
        self.ready.push_back(event(name, Some(end), &stream_event));
    }
}

fn index(side: Side) -> usize {
    match side {
        Side::Out => 0,
        Side::Err => 1,
    }
}

/// One channel's bytes: `take` of them after `skip`, from what was written up to the offset `until`. A hole before bytes
/// that are wanted breaks the body off rather than shifting them.
pub(super) fn bytes(
    follower: Follower,
    side: Side,
    until: u64,
    skip: u64,
    take: u64,
) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Send + 'static {
    struct Taking {
        follower: Follower,
        skip: u64,
        take: u64,
    }
    let taking = Taking { follower, skip, take };
    futures_util::stream::try_unfold(taking, move |mut taking| async move {
        loop {
            if taking.take == 0 || taking.follower.next_offset() >= until {
                taking.follower.answered();
                return Ok(None);
            }
            match taking.follower.next().await {
                Ok(Item::Data { side: of, mut bytes, .. }) if of == side => {
                    let skipped = taking.skip.min(bytes.len() as u64);
                    taking.skip -= skipped;
                    let mut wanted = bytes.split_off(skipped as usize);
                    wanted.truncate(usize::try_from(taking.take).unwrap_or(usize::MAX));
                    taking.take -= wanted.len() as u64;
                    if !wanted.is_empty() {
                        return Ok(Some((wanted, taking)));
                    }
                }
                Ok(Item::Data { .. }) => {}
                Ok(Item::Gap { from, to }) => {
                    return Err(std::io::Error::other(format!("output from {from} to {to} is no longer kept")));
                }
                Ok(Item::End) => return Ok(None),
                Err(error) => return Err(std::io::Error::other(error.to_string())),
            }
        }
    })
}
