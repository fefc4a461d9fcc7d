//! What the edge refuses by itself, on its way into pepod's one audit log: gathered, counted, and bounded, so that nobody
//! without a credential can fill the log. What pepod is asked for, it notes itself.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use http::StatusCode;
use pepo_api::{AppId, EdgeDecision, EdgeDecisions, ErrorCode, RequestId, route};
use tokio::sync::mpsc;

use crate::auth::Who;
use crate::body;
use crate::upstream::Upstream;

/// How long entries are gathered.
const GATHER: Duration = Duration::from_secs(2);
/// Entries of callers that are known, at once; what is more is counted without its caller.
const KNOWN: usize = 128;
/// Entries of strangers by their address, at once; what is more is counted without its address.
const STRANGERS: usize = 8;
/// Entries on their way here.
const QUEUE: usize = 1024;
/// The daemon's answer is empty.
const ANSWER_BYTES: usize = 16 * 1024;
const WITHIN: Duration = Duration::from_secs(5);

/// Something that was refused.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The row's name; `-` where there was none.
    pub route: &'static str,
    /// Why.
    pub code: ErrorCode,
    /// Whose and who, where that is known.
    pub caller: Option<(AppId, Who)>,
    /// Where it came from.
    pub source: IpAddr,
    /// The request.
    pub request: RequestId,
}

/// Where decisions are noted.
#[derive(Clone)]
pub struct Decisions(mpsc::Sender<Decision>);

impl Decisions {
    /// A place to note, and what [`follow`] takes from.
    pub fn new() -> (Self, mpsc::Receiver<Decision>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Decisions(sender), receiver)
    }

    /// Notes one. Neither waits nor fails: a queue that is full is full of the same.
    pub fn note(&self, decision: Decision) {
        let _ = self.0.try_send(decision);
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Alike {
    route: &'static str,
    code: ErrorCode,
    caller: Option<(AppId, Who)>,
    source: Option<IpAddr>,
}

#[derive(Default)]
struct Gathered(HashMap<Alike, EdgeDecision>);

impl Gathered {
    fn add(&mut self, decision: &Decision) {
        let known = decision.caller.is_some();
        let mut alike = Alike {
            route: decision.route,
            code: decision.code,
            caller: decision.caller.clone(),
            source: Some(decision.source),
        };
        let room = if known { KNOWN } else { STRANGERS };
        if !self.0.contains_key(&alike) && self.0.keys().filter(|other| other.caller.is_some() == known).count() >= room
        {
            // Of all that are left over one is kept for each reason, whatever they asked for.
            alike = Alike { route: "-", code: decision.code, caller: None, source: None };
        }
        let entry = self.0.entry(alike).or_insert_with_key(|alike| EdgeDecision {
            at: jiff::Timestamp::now(),
            route: alike.route.into(),
            code: alike.code,
            app_id: alike.caller.as_ref().map(|(app, _)| *app),
            actor: alike.caller.as_ref().map(|(_, who)| who.to_string()),
            source: alike.source,
            request_id: decision.request,
            times: 0,
        });
        entry.times += 1;
    }
}

/// Brings what is noted to the daemon, for ever. While it is not there, what was gathered waits and what comes is counted to it.
pub async fn follow(mut noted: mpsc::Receiver<Decision>, upstream: Upstream) {
    let mut gathered = Gathered::default();
    while let Some(first) = noted.recv().await {
        gathered.add(&first);
        let end = tokio::time::Instant::now() + GATHER;
        while let Ok(Some(next)) = tokio::time::timeout_at(end, noted.recv()).await {
            gathered.add(&next);
        }
        let decisions: Vec<_> = gathered.0.values().cloned().collect();
        let Ok(text) = serde_json::to_vec(&EdgeDecisions { decisions }) else { continue };
        let saying = upstream.say(&route::edge_decisions, "", body::bytes(text), ANSWER_BYTES);
        match tokio::time::timeout(WITHIN, saying).await {
            Ok(Ok((StatusCode::NO_CONTENT, _))) => gathered = Gathered::default(),
            Ok(Ok((status, _))) => {
                tracing::warn!(%status, "the daemon does not take what was refused here");
                gathered = Gathered::default();
            }
            Ok(Err(_)) | Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_cannot_make_more_than_a_few_lines() {
        let mut gathered = Gathered::default();
        let stranger = |n: u32| Decision {
            route: "session_list",
            code: ErrorCode::Unauthenticated,
            caller: None,
            source: IpAddr::from(n.to_be_bytes()),
            request: RequestId::generate(),
        };
        for n in 0..10_000u32 {
            gathered.add(&stranger(n % 1000));
        }
        let known = Decision {
            code: ErrorCode::Forbidden,
            caller: Some((AppId::generate(), Who::Subject("idp:corp:me".into()))),
            ..stranger(7)
        };
        gathered.add(&known);
        assert_eq!(gathered.0.len(), STRANGERS + 2);
        let all: u64 = gathered.0.values().map(|decision| decision.times).sum();
        assert_eq!(all, 10_001, "each is counted");
        let told = gathered.0.values().find(|decision| decision.app_id.is_some()).expect("known");
        assert_eq!((told.actor.as_deref(), told.times), (Some("idp:corp:me"), 1));
        let rest = gathered.0.values().find(|decision| decision.source.is_none()).expect("the rest");
        assert_eq!((rest.route.as_str(), rest.code), ("-", ErrorCode::Unauthenticated));
    }
}
