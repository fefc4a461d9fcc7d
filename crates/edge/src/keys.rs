//! The edge's copy of the keys, and the judgement over a presented one.
//!
//! pepod owns the keys; the copy is asked for every second over edge.sock. A copy older than [`STALE`] lets nobody in:
//! while pepod cannot say that a key is still good, it is not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use pepo_api::{AppId, EdgeState, KeyId, route};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::upstream::Upstream;

/// How old the copy may be.
pub const STALE: Duration = Duration::from_secs(5);
const EVERY: Duration = Duration::from_secs(1);
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// A key is 64 hex digits and a prefix; what is far longer is not one.
const KEY_BYTES: usize = 256;
/// More than this many keys or bytes of state are refused rather than kept.
const STATE_BYTES: usize = 8 * 1024 * 1024;

/// Who calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The App of the key.
    pub app: AppId,
    /// The key.
    pub key: KeyId,
}

/// What is said about a presented key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is this caller's.
    Known(Caller),
    /// It is nobody's.
    Unknown,
    /// The copy is too old to say.
    Stale,
}

struct Copy {
    asked: Instant,
    generation: u64,
    keys: Vec<(Caller, [u8; 32])>,
}

/// The copy.
pub struct Keys {
    copy: watch::Sender<Option<Arc<Copy>>>,
}

impl Default for Keys {
    fn default() -> Self {
        Self { copy: watch::Sender::new(None) }
    }
}

impl Keys {
    /// Takes what the daemon said; `asked` is when the question was sent.
    pub fn learn(&self, state: &EdgeState, asked: Instant) {
        let keys = state
            .keys
            .iter()
            .filter_map(|key| Some((Caller { app: key.app_id, key: key.id }, from_hex(&key.sha256)?)))
            .collect::<Vec<_>>();
        if keys.len() != state.keys.len() {
            tracing::warn!("{} keys have a digest that is not one", state.keys.len() - keys.len());
        }
        let before = self.copy.borrow().as_ref().map(|copy| copy.generation);
        if before != Some(state.generation) {
            tracing::info!(generation = state.generation, keys = keys.len(), "keys changed");
        }
        self.copy.send_replace(Some(Arc::new(Copy { asked, generation: state.generation, keys })));
    }

    /// Whether the copy is fresh enough to judge by.
    pub fn fresh(&self) -> bool {
        self.copy.borrow().as_ref().is_some_and(|copy| copy.asked.elapsed() <= STALE)
    }

    /// Judges a presented key. Takes the same time whether and where it matches.
    pub fn judge(&self, presented: &[u8]) -> Verdict {
        let Some(copy) = self.copy.borrow().clone() else { return Verdict::Stale };
        if copy.asked.elapsed() > STALE {
            return Verdict::Stale;
        }
        if presented.len() > KEY_BYTES {
            return Verdict::Unknown;
        }
        let digest: [u8; 32] = Sha256::digest(presented).into();
        let mut found = Verdict::Unknown;
        for (caller, wanted) in &copy.keys {
            if same(&digest, wanted) {
                found = Verdict::Known(*caller);
            }
        }
        found
    }
}

/// Compares every byte whatever the earlier ones say.
fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0u8, |differ, (x, y)| differ | (x ^ y))) == 0
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    let bytes = text.as_bytes();
    let mut out = [0u8; 32];
    if bytes.len() != 64 {
        return None;
    }
    for (to, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        let digit = |b: u8| (b as char).to_digit(16).and_then(|d| u8::try_from(d).ok());
        *to = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(out)
}

/// Asks the daemon for ever.
pub async fn follow(keys: Arc<Keys>, upstream: Upstream) {
    let mut failed = false;
    loop {
        let asked = Instant::now();
        let answer = tokio::time::timeout(ANSWER_WITHIN, upstream.ask(&route::edge_state, STATE_BYTES)).await;
        let problem = match answer {
            Ok(Ok((StatusCode::OK, body))) => match serde_json::from_slice::<EdgeState>(&body) {
                Ok(state) => {
                    keys.learn(&state, asked);
                    None
                }
                Err(error) => Some(format!("the daemon's answer cannot be read: {error}")),
            },
            Ok(Ok((status, _))) => Some(format!("the daemon answered {status}")),
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("the daemon did not answer in time".into()),
        };
        match problem {
            Some(problem) if !failed => {
                tracing::warn!("keys cannot be refreshed: {problem}");
                failed = true;
            }
            None if failed => {
                tracing::info!("keys are refreshed again");
                failed = false;
            }
            _ => {}
        }
        tokio::time::sleep(if failed { EVERY / 4 } else { EVERY }).await;
    }
}

#[cfg(test)]
mod tests {
    use pepo_api::EdgeKey;

    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn state(texts: &[&str]) -> (EdgeState, Vec<Caller>) {
        let keys: Vec<EdgeKey> = texts
            .iter()
            .map(|text| EdgeKey {
                id: KeyId::generate(),
                app_id: AppId::generate(),
                sha256: hex(&Sha256::digest(text)),
            })
            .collect();
        let callers = keys.iter().map(|key| Caller { app: key.app_id, key: key.id }).collect();
        (EdgeState { generation: 1, keys }, callers)
    }

    #[test]
    fn a_key_is_its_callers_and_nothing_else_is() {
        let keys = Keys::default();
        assert_eq!(keys.judge(b"pepo_a"), Verdict::Stale);
        let (state, callers) = state(&["pepo_a", "pepo_b"]);
        keys.learn(&state, Instant::now());
        assert_eq!(keys.judge(b"pepo_b"), Verdict::Known(callers[1]));
        assert_eq!(keys.judge(b"pepo_a"), Verdict::Known(callers[0]));
        for other in [&b"pepo_"[..], b"", b"pepo_aa", &[b'a'; 1000]] {
            assert_eq!(keys.judge(other), Verdict::Unknown);
        }
        // A revoked key is unknown as soon as the copy says so.
        keys.learn(&EdgeState { generation: 2, keys: vec![] }, Instant::now());
        assert_eq!(keys.judge(b"pepo_b"), Verdict::Unknown);
    }

    #[test]
    fn an_old_copy_lets_nobody_in() {
        let keys = Keys::default();
        let (state, _) = state(&["pepo_a"]);
        let Some(old) = Instant::now().checked_sub(STALE + Duration::from_millis(10)) else { return };
        keys.learn(&state, old);
        assert_eq!(keys.judge(b"pepo_a"), Verdict::Stale);
        assert!(!keys.fresh());
    }

    #[test]
    fn a_digest_that_is_not_one_matches_nothing() {
        assert!(from_hex("zz").is_none());
        assert!(from_hex(&"g".repeat(64)).is_none());
        assert_eq!(from_hex(&"0f".repeat(32)), Some([15; 32]));
    }
}
