//! Requests that make something, done once: the same `Idempotency-Key` with the same body makes nothing new.
//!
//! ```text
//! key ─► wait for whoever does the same now ─► claim (on the disk, with the id of what will be made)
//!          free  ─► make it ─► refused? the key is free again : done
//!          known ─► another body? refused : is it there? show it : was it done? gone : make it, under that id
//! ```
//! The work goes on without its caller, so one that leaves never leaves half of it. A body is kept as a digest under the
//! instance's own key: it may hold secrets.

use std::collections::HashSet;
use std::str::FromStr;
use std::time::Duration;

use axum::extract::{FromRequest, Request};
use axum::response::Response;
use bytes::Bytes;
use pepo_api::{ErrorCode, Route};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::extract::{body, parse};
use super::{Call, Problem};
use crate::Pepod;
use crate::store::{self, OnceKey, OnceRow, Write};

/// The header.
const HEADER: &str = "idempotency-key";

/// The longest key.
const LONGEST: usize = 255;

/// How long a repeat waits for the first one.
const PATIENCE: Duration = Duration::from_secs(60);

/// A JSON body, and the caller's word for the request where it is to be done once.
pub(super) struct Asked<T> {
    /// The body.
    pub body: T,
    /// The word.
    pub once: Option<Named>,
}

/// A caller's word for a request, and the bytes it came with.
#[derive(Debug)]
pub(super) struct Named {
    key: String,
    bytes: Bytes,
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Asked<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let key = key(request.headers())?;
        let bytes = body(request).await?;
        let parsed = parse(&bytes)?;
        Ok(Asked { body: parsed, once: key.map(|key| Named { key, bytes }) })
    }
}

fn key(headers: &http::HeaderMap) -> Result<Option<String>, Problem> {
    let mut given = headers.get_all(HEADER).iter();
    let Some(first) = given.next() else { return Ok(None) };
    match first.to_str() {
        Ok(text)
            if given.next().is_none()
                && (1..=LONGEST).contains(&text.len())
                && text.bytes().all(|byte| byte.is_ascii_graphic()) =>
        {
            Ok(Some(text.to_owned()))
        }
        _ => Err(Problem::invalid(
            "Idempotency-Key",
            format!("an Idempotency-Key is given once and has 1 to {LONGEST} printable characters, no spaces"),
        )),
    }
}

/// Who is at which request now: one at a time.
#[derive(Debug)]
pub struct Turns(watch::Sender<HashSet<OnceKey>>);

impl Default for Turns {
    fn default() -> Self {
        Turns(watch::Sender::new(HashSet::new()))
    }
}

/// A turn, until dropped.
struct Turn {
    pepod: Pepod,
    which: OnceKey,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.pepod.turns().0.send_modify(|taken| {
            taken.remove(&self.which);
        });
    }
}

async fn turn(pepod: &Pepod, which: &OnceKey) -> Result<Turn, Problem> {
    let turns = &pepod.turns().0;
    let mut seen = turns.subscribe();
    let until = tokio::time::Instant::now() + PATIENCE;
    loop {
        if turns.send_if_modified(|taken| taken.insert(which.clone())) {
            return Ok(Turn { pepod: pepod.clone(), which: which.clone() });
        }
        let free = seen.wait_for(|taken| !taken.contains(which));
        if tokio::time::timeout_at(until, free).await.is_err() {
            return Err(Problem::new(ErrorCode::Timeout, "the first request with this Idempotency-Key still runs"));
        }
    }
}

/// What a claim found.
enum Claimed<I> {
    /// It is this request's to make, under that id.
    New(I),
    /// An earlier one was to make that.
    Known { id: I, done: bool },
}

async fn claim<I: FromStr + ToString>(
    pepod: &Pepod,
    which: &OnceKey,
    bytes: &[u8],
    id: I,
) -> Result<Claimed<I>, Problem> {
    let row = OnceRow {
        which: which.clone(),
        digest: pepod.sessions().fingerprint(bytes),
        made: id.to_string(),
        done: false,
        at: store::millis(jiff::Timestamp::now()),
    };
    let digest = row.digest.clone();
    match pepod.store().write(Write::Once(Box::new(row))).await {
        Ok(()) => Ok(Claimed::New(id)),
        Err(store::Error::Known(known)) if known.digest == digest => {
            let id =
                known.made.parse().map_err(|_| Problem::new(ErrorCode::Internal, "what was made has no id of ours"))?;
            Ok(Claimed::Known { id, done: known.done })
        }
        Err(store::Error::Known(_)) => Err(Problem::invalid(
            "Idempotency-Key",
            "an earlier request with this Idempotency-Key had another body; a new request takes a new key",
        )),
        Err(error) => Err(error.into()),
    }
}

/// The id under which a request is done that is safe to repeat with it: the same for the same key.
pub(super) async fn id<I: FromStr + ToString>(
    pepod: &Pepod,
    call: Call,
    of: String,
    named: &Named,
    id: I,
) -> Result<I, Problem> {
    let which = OnceKey { app: call.app, of, key: named.key.clone() };
    match claim(pepod, &which, &named.bytes, id).await? {
        Claimed::New(id) | Claimed::Known { id, .. } => Ok(id),
    }
}

/// Makes something under an id that is ours to choose; or shows what the same request made before.
///
/// `find` shows what has that id, where there is such a thing.
pub(super) async fn run<I, Find, Found, Make, Made>(
    pepod: &Pepod,
    call: Call,
    route: &'static Route,
    named: Option<Named>,
    id: I,
    find: Find,
    make: Make,
) -> Result<Response, Problem>
where
    I: FromStr + ToString + Copy + Send + 'static,
    Find: FnOnce(Pepod, I) -> Found + Send + 'static,
    Found: Future<Output = Result<Option<Response>, Problem>> + Send,
    Make: FnOnce(Pepod, I) -> Made + Send + 'static,
    Made: Future<Output = Result<Response, Problem>> + Send,
{
    let pepod = pepod.clone();
    let Some(named) = named else { return make(pepod, id).await };
    let which = OnceKey { app: call.app, of: route.name.to_owned(), key: named.key };
    let doing = tokio::spawn(async move {
        let _turn = turn(&pepod, &which).await?;
        let id = match claim(&pepod, &which, &named.bytes, id).await? {
            Claimed::New(id) => id,
            Claimed::Known { id, done } => match find(pepod.clone(), id).await? {
                Some(there) => return Ok(there),
                None if done => {
                    let message = format!("what this Idempotency-Key made, {}, is gone", id.to_string());
                    return Err(Problem::new(ErrorCode::Conflict, message));
                }
                // Its maker died before it was there.
                None => id,
            },
        };
        let made = make(pepod.clone(), id).await;
        let note = match &made {
            Ok(_) => Write::OnceDone(which),
            Err(_) => Write::OnceForget(which),
        };
        pepod.store().write_later(note).await;
        made
    });
    doing.await.unwrap_or_else(|error| {
        tracing::error!(%error, "a request that is done once ended in a panic");
        Err(Problem::new(ErrorCode::Internal, "the request failed"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_one_word() {
        let read = |values: &[&str]| {
            let mut headers = http::HeaderMap::new();
            for value in values {
                headers.append(HEADER, value.parse().expect("value"));
            }
            key(&headers).map_err(|problem| problem.0.param.unwrap_or_default())
        };
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&["8e03978e-40d5"]), Ok(Some("8e03978e-40d5".into())));
        for bad in [&[""][..], &["a b"], &["a", "a"], &[&"k".repeat(256)]] {
            assert_eq!(read(bad), Err("Idempotency-Key".into()), "{bad:?}");
        }
    }
}
