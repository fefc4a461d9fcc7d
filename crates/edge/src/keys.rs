//! The edge's copy of the keys, and the judgement over a presented one.
//!
//! pepod owns the keys. The edge asks for what changed since the generation it has, over edge.sock, and pepod answers when
//! something did, or after a second: a revoked key is out as soon as the answer is here, and asking on says so. A copy
//! older than [`STALE`] lets nobody in: while pepod cannot say that a key is still good, it is not.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use pepo_api::{Action, AppId, EdgeKey, EdgeState, KeyId, Scope, route};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::upstream::Upstream;

/// How old the copy may be.
pub const STALE: Duration = Duration::from_secs(5);
const EVERY: Duration = Duration::from_secs(1);
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
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
    /// It is this caller's, and does not allow this.
    Refused(Caller),
    /// It is nobody's, or not from there, or not any more.
    Unknown,
    /// The copy is too old to say.
    Stale,
}

struct Copy {
    asked: Instant,
    generation: u64,
    keys: Arc<[Held]>,
}

/// A key as it is judged by.
struct Held {
    caller: Caller,
    digest: [u8; 32],
    scopes: Vec<Scope>,
    sources: Vec<(IpAddr, u8)>,
    expires_at: Option<jiff::Timestamp>,
}

impl Held {
    /// A key with a digest or a source that is none would match what it should not: it is left out.
    fn of(key: &EdgeKey) -> Option<Self> {
        Some(Held {
            caller: Caller { app: key.app_id, key: key.id },
            digest: from_hex(&key.sha256)?,
            scopes: key.scopes.clone(),
            sources: key.sources.iter().map(|text| range(text)).collect::<Option<_>>()?,
            expires_at: key.expires_at,
        })
    }

    fn admits(&self, from: IpAddr, now: jiff::Timestamp) -> bool {
        self.expires_at.is_none_or(|at| at > now)
            && (self.sources.is_empty() || self.sources.iter().any(|(net, bits)| within(from, *net, *bits)))
    }
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
    /// Takes what the daemon said; `asked` is when the question was sent. Tells whether it was something new.
    pub fn learn(&self, state: &EdgeState, asked: Instant) -> bool {
        let before = self.copy.borrow().clone();
        let known = before.as_ref().map(|copy| copy.generation);
        let keys: Arc<[Held]> = match (&state.keys, before) {
            (Some(keys), _) => keys.iter().filter_map(Held::of).collect(),
            (None, Some(before)) if before.generation == state.generation => before.keys.clone(),
            // Nothing is known to be good: the next question asks for all.
            (None, _) => return false,
        };
        if let Some(told) = &state.keys
            && told.len() != keys.len()
        {
            tracing::warn!("{} keys have a digest or a source that is not one", told.len() - keys.len());
        }
        let new = known != Some(state.generation);
        if new {
            tracing::info!(generation = state.generation, keys = keys.len(), "keys changed");
        }
        self.copy.send_replace(Some(Arc::new(Copy { asked, generation: state.generation, keys })));
        new
    }

    /// The generation of the copy.
    fn generation(&self) -> Option<u64> {
        self.copy.borrow().as_ref().map(|copy| copy.generation)
    }

    /// Whether the copy is fresh enough to judge by.
    pub fn fresh(&self) -> bool {
        self.copy.borrow().as_ref().is_some_and(|copy| copy.asked.elapsed() <= STALE)
    }

    /// Judges a presented key, for this action, from this address. Takes the same time whether and where it matches.
    pub fn judge(&self, presented: &[u8], action: Action, from: IpAddr) -> Verdict {
        let Some(copy) = self.copy.borrow().clone() else { return Verdict::Stale };
        if copy.asked.elapsed() > STALE {
            return Verdict::Stale;
        }
        if presented.len() > KEY_BYTES {
            return Verdict::Unknown;
        }
        let digest: [u8; 32] = Sha256::digest(presented).into();
        let mut found = None;
        for held in &*copy.keys {
            if same(&digest, &held.digest) {
                found = Some(held);
            }
        }
        match found.filter(|held| held.admits(from, jiff::Timestamp::now())) {
            None => Verdict::Unknown,
            Some(held) if held.scopes.iter().any(|scope| scope.covers(action)) => Verdict::Known(held.caller),
            Some(held) => Verdict::Refused(held.caller),
        }
    }
}

/// Reads `address/bits`.
fn range(text: &str) -> Option<(IpAddr, u8)> {
    let (address, bits) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    bits.parse().ok().filter(|bits| *bits <= most).map(|bits| (address, bits))
}

/// Whether an address is in a range. A v4 address in its v6 form is the v4 address.
fn within(address: IpAddr, net: IpAddr, bits: u8) -> bool {
    let (address, net, width) = match (address.to_canonical(), net.to_canonical()) {
        (IpAddr::V4(address), IpAddr::V4(net)) => (u128::from(address.to_bits()), u128::from(net.to_bits()), 32),
        (IpAddr::V6(address), IpAddr::V6(net)) => (address.to_bits(), net.to_bits(), 128),
        _ => return false,
    };
    bits == 0 || (address ^ net) >> (width - u32::from(bits).min(width)) == 0
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
        let mut new = false;
        let query = keys.generation().map_or_else(String::new, |has| format!("?after={has}"));
        let asking = upstream.ask(&route::edge_state, &query, STATE_BYTES);
        let answer = tokio::time::timeout(ANSWER_WITHIN, asking).await;
        let problem = match answer {
            Ok(Ok((StatusCode::OK, body))) => match serde_json::from_slice::<EdgeState>(&body) {
                Ok(state) => {
                    new = keys.learn(&state, asked);
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
        // The daemon waits with its answer; one that does not must not be asked in a circle. What is new is acknowledged
        // at once, by asking on.
        let pause = match (failed, new) {
            (true, _) => EVERY / 4,
            (false, true) => Duration::from_millis(5),
            (false, false) => EVERY.saturating_sub(asked.elapsed()).min(EVERY),
        };
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use pepo_api::EdgeKey;

    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn key(text: &str) -> EdgeKey {
        EdgeKey {
            id: KeyId::generate(),
            app_id: AppId::generate(),
            sha256: hex(&Sha256::digest(text)),
            scopes: vec![Scope::all()],
            sources: Vec::new(),
            expires_at: None,
        }
    }

    fn caller(key: &EdgeKey) -> Caller {
        Caller { app: key.app_id, key: key.id }
    }

    fn state(generation: u64, keys: &[&EdgeKey]) -> EdgeState {
        EdgeState { generation, keys: Some(keys.iter().map(|key| (*key).clone()).collect()) }
    }

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn judge(keys: &Keys, text: &[u8]) -> Verdict {
        keys.judge(text, Action::SessionsRead, HERE)
    }

    #[test]
    fn a_key_is_its_callers_and_nothing_else_is() {
        let keys = Keys::default();
        assert_eq!(judge(&keys, b"pepo_a"), Verdict::Stale);
        let (a, b) = (key("pepo_a"), key("pepo_b"));
        assert!(keys.learn(&state(1, &[&a, &b]), Instant::now()));
        assert_eq!(judge(&keys, b"pepo_b"), Verdict::Known(caller(&b)));
        assert_eq!(judge(&keys, b"pepo_a"), Verdict::Known(caller(&a)));
        for other in [&b"pepo_"[..], b"", b"pepo_aa", &[b'a'; 1000]] {
            assert_eq!(judge(&keys, other), Verdict::Unknown);
        }
        // A revoked key is unknown as soon as the copy says so.
        assert!(keys.learn(&state(2, &[&a]), Instant::now()));
        assert_eq!(judge(&keys, b"pepo_b"), Verdict::Unknown);
    }

    #[test]
    fn a_key_does_what_its_scopes_say_from_where_it_may_until_its_end() {
        let keys = Keys::default();
        let mut reads = key("pepo_r");
        reads.scopes = vec!["sessions:read".parse().expect("scope")];
        reads.sources = vec!["192.0.2.0/24".into(), "2001:db8::/32".into()];
        let mut over = key("pepo_o");
        over.expires_at = Some(jiff::Timestamp::now() - jiff::SignedDuration::from_secs(1));
        keys.learn(&state(1, &[&reads, &over]), Instant::now());
        let from = |address: &str, action| keys.judge(b"pepo_r", action, address.parse().expect("address"));
        for address in ["192.0.2.9", "::ffff:192.0.2.9", "2001:db8:7::1"] {
            assert_eq!(from(address, Action::SessionsRead), Verdict::Known(caller(&reads)), "{address}");
        }
        for address in ["192.0.3.1", "127.0.0.1", "2001:db9::1", "::"] {
            assert_eq!(from(address, Action::SessionsRead), Verdict::Unknown, "{address}");
        }
        assert_eq!(from("192.0.2.9", Action::SessionsWrite), Verdict::Refused(caller(&reads)));
        assert_eq!(judge(&keys, b"pepo_o"), Verdict::Unknown);
        assert!(within("10.0.0.1".parse().expect("address"), "0.0.0.0".parse().expect("net"), 0));
    }

    #[test]
    fn a_copy_is_kept_fresh_without_being_sent_again() {
        let keys = Keys::default();
        let a = key("pepo_a");
        let unchanged = |generation| EdgeState { generation, keys: None };
        assert!(!keys.learn(&unchanged(1), Instant::now()));
        assert_eq!(judge(&keys, b"pepo_a"), Verdict::Stale);
        let Some(old) = Instant::now().checked_sub(STALE + Duration::from_millis(10)) else { return };
        keys.learn(&state(1, &[&a]), old);
        assert_eq!(judge(&keys, b"pepo_a"), Verdict::Stale);
        assert!(!keys.fresh());
        keys.learn(&unchanged(2), Instant::now());
        assert!(!keys.fresh(), "another generation than the copy's says nothing about it");
        assert!(!keys.learn(&unchanged(1), Instant::now()));
        assert_eq!(judge(&keys, b"pepo_a"), Verdict::Known(caller(&a)));
    }

    #[test]
    fn what_cannot_be_read_matches_nothing() {
        assert!(from_hex("zz").is_none());
        assert!(from_hex(&"g".repeat(64)).is_none());
        assert_eq!(from_hex(&"0f".repeat(32)), Some([15; 32]));
        let keys = Keys::default();
        let mut odd = key("pepo_a");
        odd.sources = vec!["anywhere".into()];
        keys.learn(&state(1, &[&odd]), Instant::now());
        assert_eq!(judge(&keys, b"pepo_a"), Verdict::Unknown);
        for text in ["192.0.2.0", "192.0.2.0/33", "::/129", "x/8", "192.0.2.0/"] {
            assert!(range(text).is_none(), "{text}");
        }
    }
}
