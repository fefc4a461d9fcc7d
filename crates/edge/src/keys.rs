//! The edge's copy of what pepod says of keys, Apps, Session tokens and published ports.
//!
//! pepod owns them. The edge asks for what changed since the generation it has, over edge.sock, and pepod answers when
//! something did, or after a second: a revoked key is out as soon as the answer is here, and asking on says so. A copy
//! older than [`STALE`] lets nobody in: while pepod cannot say that a key is still good, it is not.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use pepo_api::{AppId, EdgeApp, EdgeKey, EdgeState, KeyId, PortName, Scope, SessionId, TokenClaims, route};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::net::Ranges;
use crate::upstream::Upstream;

/// How old the copy may be.
pub const STALE: Duration = Duration::from_secs(5);
const EVERY: Duration = Duration::from_secs(1);
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// A key is 64 hex digits and a prefix; what is far longer is not one.
const KEY_BYTES: usize = 256;
/// More than this many keys or bytes of state are refused rather than kept.
const STATE_BYTES: usize = 8 * 1024 * 1024;

/// What the daemon said last.
pub struct Copy {
    asked: Instant,
    generation: u64,
    what: Arc<What>,
}

#[derive(Default)]
struct What {
    /// By digest. That a look-up's time may tell something of a digest tells nothing of a text that has it.
    keys: HashMap<[u8; 32], Held>,
    /// When each key ends, by its id.
    ends: HashMap<KeyId, Option<jiff::Timestamp>>,
    apps: HashMap<AppId, App>,
    names: HashMap<String, AppId>,
    token_key: Option<[u8; 32]>,
    void: HashMap<SessionId, i64>,
    published: HashMap<PortName, (AppId, jiff::Timestamp)>,
}

/// A key as it is judged by.
pub struct Held {
    /// Its id.
    pub id: KeyId,
    /// Its App.
    pub app: AppId,
    /// What it may do.
    pub scopes: Arc<[Scope]>,
    sources: Ranges,
    expires_at: Option<jiff::Timestamp>,
}

impl Held {
    /// A key with a digest or a source that is none would match what it should not: it is left out.
    fn of(key: &EdgeKey) -> Option<([u8; 32], Self)> {
        let held = Held {
            id: key.id,
            app: key.app_id,
            scopes: key.scopes.clone().into(),
            sources: Ranges::read(key.sources.iter().map(String::as_str))?,
            expires_at: key.expires_at,
        };
        Some((from_hex(&key.sha256)?, held))
    }
}

struct App {
    sources: Ranges,
    requests_per_second: Option<u64>,
}

fn valid(expires_at: Option<jiff::Timestamp>) -> bool {
    expires_at.is_none_or(|at| at > jiff::Timestamp::now())
}

impl What {
    fn of(state: &EdgeState, keys: &[EdgeKey]) -> Self {
        let held: HashMap<_, _> = keys.iter().filter_map(Held::of).collect();
        if held.len() != keys.len() {
            tracing::warn!("{} keys have a digest or a source that is not one", keys.len() - held.len());
        }
        let app = |app: &EdgeApp| {
            // An App with a range that is none lets nobody in: it would else let in everybody.
            let sources = Ranges::read(app.sources.iter().map(String::as_str))?;
            Some((app.id, App { sources, requests_per_second: app.requests_per_second }))
        };
        What {
            ends: held.values().map(|held| (held.id, held.expires_at)).collect(),
            keys: held,
            apps: state.apps.iter().filter_map(app).collect(),
            names: state.apps.iter().map(|app| (app.name.clone(), app.id)).collect(),
            token_key: state.token_key.as_ref().and_then(|key| from_hex(key.expose())),
            void: state.void.iter().map(|void| (void.session_id, void.before)).collect(),
            published: state
                .published
                .iter()
                .map(|of| (PortName { session: of.session_id, port: of.port }, (of.app_id, of.expires_at)))
                .collect(),
        }
    }
}

impl Copy {
    /// The key of this text, if it may be used from there. That of an App that is not there may not.
    pub fn key(&self, presented: &[u8], from: IpAddr) -> Option<&Held> {
        if presented.len() > KEY_BYTES {
            return None;
        }
        let digest: [u8; 32] = Sha256::digest(presented).into();
        let held = self.what.keys.get(&digest)?;
        (valid(held.expires_at) && held.sources.admit(from) && self.app_admits(held.app, from)).then_some(held)
    }

    /// What this Session token says, if it counts.
    pub fn token(&self, presented: &[u8], from: IpAddr) -> Option<TokenClaims> {
        let claims = TokenClaims::open(presented, self.what.token_key.as_ref()?)?;
        let now = jiff::Timestamp::now().as_millisecond();
        // It goes with the key that it was made by, and with a revocation of its Session's tokens.
        let maker = claims.key.is_none_or(|key| self.what.ends.get(&key).is_some_and(|ends| valid(*ends)));
        let void = self.what.void.get(&claims.session).is_some_and(|before| claims.made < *before);
        (maker && !void && claims.until > now && self.app_admits(claims.app, from)).then_some(claims)
    }

    /// The App of that name or id.
    pub fn app(&self, which: &str) -> Option<AppId> {
        match which.parse() {
            Ok(id) => self.what.apps.contains_key(&id).then_some(id),
            Err(_) => self.what.names.get(which).copied(),
        }
    }

    /// Whether the App is there and its callers may come from there.
    pub fn app_admits(&self, app: AppId, from: IpAddr) -> bool {
        self.what.apps.get(&app).is_some_and(|app| app.sources.admit(from))
    }

    /// Whose that port is, if it is published and strangers from there may come to that App.
    pub fn published(&self, of: PortName, from: IpAddr) -> Option<AppId> {
        let (app, _) = self.what.published.get(&of).filter(|(_, until)| valid(Some(*until)))?;
        self.app_admits(*app, from).then_some(*app)
    }

    /// When that port ends to be published.
    pub fn published_until(&self, of: PortName) -> Option<jiff::Timestamp> {
        self.what.published.get(&of).map(|(_, until)| *until)
    }

    /// Requests a second of that App, where it is set.
    pub fn app_limit(&self, app: AppId) -> Option<u64> {
        self.what.apps.get(&app)?.requests_per_second
    }
}

/// The copy, as it is learnt.
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
        let what = match (&state.keys, before) {
            (Some(keys), _) => Arc::new(What::of(state, keys)),
            (None, Some(before)) if before.generation == state.generation => before.what.clone(),
            // Nothing is known to be good: the next question asks for all.
            (None, _) => return false,
        };
        let new = known != Some(state.generation);
        if new {
            tracing::info!(generation = state.generation, keys = what.keys.len(), "keys changed");
        }
        self.copy.send_replace(Some(Arc::new(Copy { asked, generation: state.generation, what })));
        new
    }

    /// The generation of the copy.
    fn generation(&self) -> Option<u64> {
        self.copy.borrow().as_ref().map(|copy| copy.generation)
    }

    /// The copy, while it is fresh enough to judge by.
    pub fn current(&self) -> Option<Arc<Copy>> {
        self.copy.borrow().clone().filter(|copy| copy.asked.elapsed() <= STALE)
    }

    /// The copy as it changes, however old it is.
    pub fn moves(&self) -> watch::Receiver<Option<Arc<Copy>>> {
        self.copy.subscribe()
    }

    /// Whether there is one.
    pub fn fresh(&self) -> bool {
        self.current().is_some()
    }
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
    use pepo_api::{EdgePort, EdgeVoid, SecretText};

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn key(app: AppId, text: &str) -> EdgeKey {
        EdgeKey {
            id: KeyId::generate(),
            app_id: app,
            sha256: hex(&Sha256::digest(text)),
            scopes: vec![Scope::all()],
            sources: Vec::new(),
            expires_at: None,
        }
    }

    fn app() -> EdgeApp {
        EdgeApp { id: AppId::generate(), name: "default".into(), sources: vec![], requests_per_second: None }
    }

    fn state(generation: u64, app: &EdgeApp, keys: &[&EdgeKey]) -> EdgeState {
        EdgeState {
            generation,
            keys: Some(keys.iter().map(|key| (*key).clone()).collect()),
            apps: vec![app.clone()],
            token_key: Some(SecretText::new(hex(&[7; 32]))),
            void: vec![],
            published: vec![],
        }
    }

    fn whose(keys: &Keys, text: &[u8], from: &str) -> Option<KeyId> {
        keys.current()?.key(text, from.parse().expect("address")).map(|held| held.id)
    }

    #[test]
    fn a_key_is_its_callers_and_nothing_else_is() {
        let keys = Keys::default();
        assert!(keys.current().is_none());
        let app = app();
        let (a, b) = (key(app.id, "pepo_a"), key(app.id, "pepo_b"));
        assert!(keys.learn(&state(1, &app, &[&a, &b]), Instant::now()));
        assert_eq!(whose(&keys, b"pepo_b", "127.0.0.1"), Some(b.id));
        assert_eq!(whose(&keys, b"pepo_a", "127.0.0.1"), Some(a.id));
        for other in [&b"pepo_"[..], b"", b"pepo_aa", &[b'a'; 1000]] {
            assert_eq!(whose(&keys, other, "127.0.0.1"), None);
        }
        // A revoked key is unknown as soon as the copy says so.
        assert!(keys.learn(&state(2, &app, &[&a]), Instant::now()));
        assert_eq!(whose(&keys, b"pepo_b", "127.0.0.1"), None);
        let orphan = key(AppId::generate(), "pepo_o");
        keys.learn(&state(3, &app, &[&orphan]), Instant::now());
        assert_eq!(whose(&keys, b"pepo_o", "127.0.0.1"), None, "its App is not there");
    }

    #[test]
    fn a_key_counts_from_where_it_and_its_app_may_until_its_end() {
        let keys = Keys::default();
        let mut app = app();
        let mut near = key(app.id, "pepo_r");
        near.sources = vec!["192.0.2.0/24".into()];
        let mut over = key(app.id, "pepo_o");
        over.expires_at = Some(jiff::Timestamp::now() - jiff::SignedDuration::from_secs(1));
        keys.learn(&state(1, &app, &[&near, &over]), Instant::now());
        assert_eq!(whose(&keys, b"pepo_r", "192.0.2.9"), Some(near.id));
        assert_eq!(whose(&keys, b"pepo_r", "192.0.3.1"), None);
        assert_eq!(whose(&keys, b"pepo_o", "192.0.2.9"), None);
        app.sources = vec!["192.0.2.8/29".into()];
        keys.learn(&state(2, &app, &[&near]), Instant::now());
        assert_eq!(whose(&keys, b"pepo_r", "192.0.2.9"), Some(near.id));
        assert_eq!(whose(&keys, b"pepo_r", "192.0.2.99"), None, "its App's callers come from elsewhere");
        app.sources = vec!["anywhere".into()];
        keys.learn(&state(3, &app, &[&near]), Instant::now());
        assert_eq!(whose(&keys, b"pepo_r", "192.0.2.9"), None, "a range that is none admits nobody");
    }

    #[test]
    fn a_token_counts_until_its_end_its_makers_and_its_sessions_revocation() {
        let keys = Keys::default();
        let app = app();
        let maker = key(app.id, "pepo_m");
        let now = jiff::Timestamp::now().as_millisecond();
        let claims = TokenClaims {
            app: app.id,
            session: SessionId::generate(),
            scopes: vec![Scope::all()],
            port: None,
            key: Some(maker.id),
            made: now,
            until: now + 60_000,
        };
        let says = |keys: &Keys, claims: &TokenClaims, key: u8| {
            keys.current().expect("fresh").token(claims.sign(&[key; 32]).as_bytes(), HERE)
        };
        keys.learn(&state(1, &app, &[&maker]), Instant::now());
        assert_eq!(says(&keys, &claims, 7), Some(claims.clone()));
        assert_eq!(says(&keys, &claims, 8), None, "signed by another");
        assert_eq!(says(&keys, &TokenClaims { until: now - 1, ..claims.clone() }, 7), None, "over");
        let foreign = TokenClaims { app: AppId::generate(), ..claims.clone() };
        assert_eq!(says(&keys, &foreign, 7), None, "of an App that is gone");
        let mut revoked = state(2, &app, &[&maker]);
        revoked.void = vec![EdgeVoid { session_id: claims.session, before: now + 1 }];
        keys.learn(&revoked, Instant::now());
        assert_eq!(says(&keys, &claims, 7), None);
        assert!(says(&keys, &TokenClaims { made: now + 1, ..claims.clone() }, 7).is_some(), "made after it");
        keys.learn(&state(3, &app, &[]), Instant::now());
        assert_eq!(says(&keys, &claims, 7), None, "its maker is revoked");
        assert!(says(&keys, &TokenClaims { key: None, ..claims }, 7).is_some(), "the operator made it");
    }

    #[test]
    fn a_copy_is_kept_fresh_without_being_sent_again() {
        let keys = Keys::default();
        let app = app();
        let a = key(app.id, "pepo_a");
        let same = |generation| EdgeState {
            generation,
            keys: None,
            apps: vec![],
            token_key: None,
            void: vec![],
            published: vec![],
        };
        assert!(!keys.learn(&same(1), Instant::now()));
        assert!(!keys.fresh());
        let Some(old) = Instant::now().checked_sub(STALE + Duration::from_millis(10)) else { return };
        keys.learn(&state(1, &app, &[&a]), old);
        assert!(!keys.fresh() && whose(&keys, b"pepo_a", "127.0.0.1").is_none());
        keys.learn(&same(2), Instant::now());
        assert!(!keys.fresh(), "another generation than the copy's says nothing about it");
        assert!(!keys.learn(&same(1), Instant::now()));
        assert_eq!(whose(&keys, b"pepo_a", "127.0.0.1"), Some(a.id));
        assert_eq!(keys.current().expect("fresh").app("default"), Some(app.id));
        assert_eq!(keys.current().expect("fresh").app(&app.id.to_string()), Some(app.id));
        assert_eq!(keys.current().expect("fresh").app(&AppId::generate().to_string()), None);
    }

    #[test]
    fn a_port_is_published_until_its_end_for_whom_its_app_admits_and_while_the_copy_is_fresh() {
        let keys = Keys::default();
        let mut app = app();
        let of = PortName { session: SessionId::generate(), port: 80 };
        let told = |generation, app: &EdgeApp, seconds| {
            let until = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds);
            let port = EdgePort { app_id: app.id, session_id: of.session, port: 80, expires_at: until };
            EdgeState { published: vec![port], ..state(generation, app, &[]) }
        };
        let is = |of, from: &str| keys.current().and_then(|copy| copy.published(of, from.parse().expect("address")));
        assert_eq!(is(of, "127.0.0.1"), None);
        keys.learn(&told(1, &app, 60), Instant::now());
        assert_eq!(is(of, "127.0.0.1"), Some(app.id));
        assert_eq!(is(PortName { port: 81, ..of }, "127.0.0.1"), None);
        assert_eq!(is(PortName { session: SessionId::generate(), ..of }, "127.0.0.1"), None);
        app.sources = vec!["192.0.2.0/24".into()];
        keys.learn(&told(2, &app, 60), Instant::now());
        assert_eq!((is(of, "127.0.0.1"), is(of, "192.0.2.1")), (None, Some(app.id)));
        keys.learn(&told(3, &app, -1), Instant::now());
        assert_eq!(is(of, "192.0.2.1"), None, "over");
        let Some(old) = Instant::now().checked_sub(STALE + Duration::from_millis(10)) else { return };
        keys.learn(&told(4, &app, 60), old);
        assert_eq!(is(of, "192.0.2.1"), None, "nobody knows whether it still is");
        let gone = EdgeApp { id: AppId::generate(), ..app.clone() };
        keys.learn(&EdgeState { apps: vec![gone], ..told(5, &app, 60) }, Instant::now());
        assert_eq!(is(of, "192.0.2.1"), None, "its App is not there");
    }

    #[test]
    fn what_cannot_be_read_matches_nothing() {
        assert!(from_hex("zz").is_none());
        assert!(from_hex(&"g".repeat(64)).is_none());
        assert_eq!(from_hex(&"0f".repeat(32)), Some([15; 32]));
        let keys = Keys::default();
        let app = app();
        let mut odd = key(app.id, "pepo_a");
        odd.sources = vec!["anywhere".into()];
        keys.learn(&state(1, &app, &[&odd]), Instant::now());
        assert_eq!(whose(&keys, b"pepo_a", "127.0.0.1"), None);
    }
}
