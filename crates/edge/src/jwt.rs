//! Tokens of identity providers (OIDC): who signed, for whom, until when, and what that gives here.
//!
//! The settings name the issuers; what a token says of itself only picks one of them. Of its algorithm it says nothing that
//! counts: that must be on the issuer's list and fit the key. Keys are the issuer's published ones, got again every
//! [`REFRESH`] and when an unknown one is named, and good for [`KEPT`] after that fails.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use pepo_api::Scope;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, watch};

use crate::auth::{Caller, Refused, Who};
use crate::config::Issuer;
use crate::fetch::{Error as FetchError, Fetch, Place};
use crate::keys::Copy;

/// How often an issuer's keys are got.
const REFRESH: Duration = Duration::from_secs(600);
/// How long they count when they cannot be got again.
const KEPT: Duration = Duration::from_secs(3600);
/// How soon they are got again because a token names a key that is not among them, or after a failure.
const AGAIN: Duration = Duration::from_secs(10);
/// How long a request waits for an issuer's keys.
const WAIT: Duration = Duration::from_secs(3);
/// How long a verified token is remembered at the most; as long a key that was withdrawn may count.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Tokens that are remembered.
const ENTRIES: usize = 4096;
/// The longest token.
const TOKEN_BYTES: usize = 8 * 1024;
/// Keys of one issuer.
const KEYS: usize = 64;

/// Why a token gives nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// It cannot be read.
    #[error("it cannot be read")]
    Form,
    /// Nobody of that name is trusted.
    #[error("its issuer is not one of this Pepo's")]
    Issuer,
    /// Its algorithm is not on the list.
    #[error("its algorithm is not allowed")]
    Algorithm,
    /// The issuer has no such key.
    #[error("its issuer has no key of that name")]
    Key,
    /// It was not signed by that key.
    #[error("its signature is wrong")]
    Signature,
    /// It is over.
    #[error("it is over")]
    Over,
    /// It is not valid yet.
    #[error("it is not valid yet")]
    Early,
    /// It is for somebody else.
    #[error("it is for another audience")]
    Audience,
    /// A claim that is needed is missing.
    #[error("the claim {0} is missing or not what it must be")]
    Claim(String),
    /// It gives no App that there is, or not from there.
    #[error("it gives no App here")]
    App,
    /// It gives no scope.
    #[error("it gives no scope here")]
    Scopes,
}

/// Whether a credential has the form of one.
pub fn looks_like_one(presented: &[u8]) -> bool {
    presented.starts_with(b"ey") && presented.iter().filter(|byte| **byte == b'.').count() == 2
}

struct Keys {
    got: Instant,
    all: Vec<Jwk>,
}

struct Source {
    issuer: Issuer,
    keys: watch::Sender<Option<Arc<Keys>>>,
    wanted: Notify,
}

struct Remembered {
    caller: Caller,
    until: Instant,
}

/// The issuers of the settings, and their keys.
pub struct Issuers {
    all: Vec<Arc<Source>>,
    remembered: Mutex<HashMap<[u8; 32], Remembered>>,
}

impl Issuers {
    /// These. Their keys are got by [`follow`].
    pub fn new(issuers: Vec<Issuer>) -> Self {
        let source = |issuer| Arc::new(Source { issuer, keys: watch::Sender::new(None), wanted: Notify::new() });
        Issuers { all: issuers.into_iter().map(source).collect(), remembered: Mutex::default() }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whom a token is of that was verified a moment ago.
    pub fn remembered(&self, presented: &[u8], copy: &Copy, from: IpAddr) -> Option<Caller> {
        if self.all.is_empty() || !looks_like_one(presented) {
            return None;
        }
        let digest: [u8; 32] = Sha256::digest(presented).into();
        let all = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.get(&digest).filter(|known| known.until > Instant::now())?;
        copy.app_admits(known.caller.app, from).then(|| known.caller.clone())
    }

    /// Whom a token is of, verified.
    ///
    /// # Errors
    /// See [`Refused`].
    pub async fn who(&self, presented: &[u8], copy: &Copy, from: IpAddr) -> Result<Caller, Refused> {
        if presented.len() > TOKEN_BYTES {
            return Err(Refused::Token(Wrong::Form));
        }
        let claimed: Map<String, Value> =
            jsonwebtoken::dangerous::insecure_decode_claims(presented).map_err(|_| Refused::Token(Wrong::Form))?;
        let claimed = claimed.get("iss").and_then(Value::as_str);
        let source = self.all.iter().find(|source| Some(source.issuer.issuer.as_str()) == claimed);
        let source = source.ok_or(Refused::Token(Wrong::Issuer))?;
        let header = jsonwebtoken::decode_header(presented).map_err(|_| Refused::Token(Wrong::Algorithm))?;
        if !source.issuer.algorithms.contains(&header.alg) {
            return Err(Refused::Token(Wrong::Algorithm));
        }
        let key = source.key(header.kid.as_deref(), header.alg).await?;
        let claims = verify(presented, &key, header.alg, &source.issuer).map_err(Refused::Token)?;
        let caller = given(&source.issuer, &claims, copy, from).map_err(Refused::Token)?;
        self.remember(presented, &caller, &claims);
        Ok(caller)
    }

    fn remember(&self, presented: &[u8], caller: &Caller, claims: &Map<String, Value>) {
        let ends =
            claims.get("exp").and_then(Value::as_f64).unwrap_or_default() - jiff::Timestamp::now().as_second() as f64;
        let left = Duration::try_from_secs_f64(ends.max(0.0)).unwrap_or(REMEMBERED).min(REMEMBERED);
        let mut all = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= ENTRIES {
            all.clear();
        }
        let digest = Sha256::digest(presented).into();
        all.insert(digest, Remembered { caller: caller.clone(), until: Instant::now() + left });
    }
}

impl Source {
    /// The key of that name, or the only one where none is named. One that is not known may be new: the keys are got again,
    /// but not more often than [`AGAIN`].
    async fn key(&self, name: Option<&str>, algorithm: Algorithm) -> Result<DecodingKey, Refused> {
        let mut keys = self.keys.subscribe();
        let find = |keys: &Keys| pick(&keys.all, name, algorithm);
        let now = keys.borrow_and_update().clone().filter(|keys| keys.got.elapsed() < KEPT);
        match now.as_deref().map(find) {
            Some(Ok(key)) => return Ok(key),
            Some(Err(wrong)) if now.as_ref().is_some_and(|keys| keys.got.elapsed() < AGAIN) => {
                return Err(Refused::Token(wrong));
            }
            _ => {}
        }
        self.wanted.notify_one();
        let asked = Instant::now();
        let newer = |keys: &Option<Arc<Keys>>| keys.as_ref().is_some_and(|keys| keys.got >= asked);
        // In time or not: what there is now decides.
        let _ = tokio::time::timeout(WAIT, keys.wait_for(newer)).await.is_ok();
        let latest = self.keys.borrow().clone().filter(|keys| keys.got.elapsed() < KEPT);
        match latest {
            Some(latest) => find(&latest).map_err(Refused::Token),
            None => Err(Refused::IssuerAway),
        }
    }
}

/// The key that a token means.
fn pick(all: &[Jwk], name: Option<&str>, algorithm: Algorithm) -> Result<DecodingKey, Wrong> {
    let named = |key: &&Jwk| name.is_none_or(|name| key.common.key_id.as_deref() == Some(name));
    let mut found = all.iter().filter(named).filter(|key| fits(key, algorithm));
    let key = found.next().ok_or(Wrong::Key)?;
    if name.is_none() && found.next().is_some() {
        return Err(Wrong::Key);
    }
    DecodingKey::from_jwk(key).map_err(|_| Wrong::Key)
}

/// Whether a key is for signatures of that algorithm: its kind says so, whatever the token says.
fn fits(key: &Jwk, algorithm: Algorithm) -> bool {
    use Algorithm::{ES256, ES384, EdDSA, PS256, PS384, PS512, RS256, RS384, RS512};
    let kind = match &key.algorithm {
        AlgorithmParameters::RSA(_) => matches!(algorithm, RS256 | RS384 | RS512 | PS256 | PS384 | PS512),
        AlgorithmParameters::EllipticCurve(key) => {
            matches!((&key.curve, algorithm), (EllipticCurve::P256, ES256) | (EllipticCurve::P384, ES384))
        }
        AlgorithmParameters::OctetKeyPair(key) => algorithm == EdDSA && key.curve == EllipticCurve::Ed25519,
        // A shared secret is nobody's public key.
        AlgorithmParameters::OctetKey(_) | AlgorithmParameters::Other(_) => false,
        // Nor is what this release does not know.
        _ => false,
    };
    let own = key.common.key_algorithm.is_none_or(|own| own == algorithm.into());
    let signs = key.common.public_key_use.as_ref().is_none_or(|use_| *use_ == PublicKeyUse::Signature);
    kind && own && signs
}

fn verify(
    presented: &[u8],
    key: &DecodingKey,
    algorithm: Algorithm,
    issuer: &Issuer,
) -> Result<Map<String, Value>, Wrong> {
    use jsonwebtoken::errors::ErrorKind;
    let mut wanted = Validation::new(algorithm);
    wanted.leeway = issuer.leeway.as_secs();
    wanted.validate_nbf = true;
    wanted.set_required_spec_claims(&["exp", "aud", "iss"]);
    wanted.set_audience(&issuer.audiences);
    wanted.set_issuer(&[&issuer.issuer]);
    jsonwebtoken::decode(presented, key, &wanted).map(|token| token.claims).map_err(|error| match error.kind() {
        ErrorKind::ExpiredSignature => Wrong::Over,
        ErrorKind::ImmatureSignature => Wrong::Early,
        ErrorKind::InvalidAudience => Wrong::Audience,
        ErrorKind::InvalidIssuer => Wrong::Issuer,
        ErrorKind::MissingRequiredClaim(claim) => Wrong::Claim(claim.clone()),
        ErrorKind::InvalidAlgorithm | ErrorKind::MissingAlgorithm => Wrong::Algorithm,
        ErrorKind::InvalidSignature | ErrorKind::InvalidKeyFormat => Wrong::Signature,
        _ => Wrong::Form,
    })
}

/// What a verified token gives: the App and the scopes that the settings say.
fn given(issuer: &Issuer, claims: &Map<String, Value>, copy: &Copy, from: IpAddr) -> Result<Caller, Wrong> {
    let word = |claim: &str| claims.get(claim).and_then(Value::as_str).ok_or_else(|| Wrong::Claim(claim.to_owned()));
    let named = match &issuer.app_claim {
        Some(claim) => word(claim)?,
        None => issuer.app.first().map(String::as_str).ok_or(Wrong::App)?,
    };
    if !issuer.app.is_empty() && !issuer.app.iter().any(|app| app == named) {
        return Err(Wrong::App);
    }
    let app = copy.app(named).filter(|app| copy.app_admits(*app, from)).ok_or(Wrong::App)?;
    let scopes: Arc<[Scope]> = match &issuer.scope_claim {
        None => issuer.scopes.clone().into(),
        Some(claim) => {
            // OAuth's form is one text with blanks; lists are as usual.
            let words: Vec<&str> = match claims.get(claim) {
                Some(Value::String(text)) => text.split(' ').collect(),
                Some(Value::Array(all)) => all.iter().filter_map(Value::as_str).collect(),
                _ => return Err(Wrong::Claim(claim.clone())),
            };
            let ours =
                words.into_iter().filter_map(|word| word.strip_prefix(issuer.scope_prefix.as_str())?.parse().ok());
            ours.filter(|scope: &Scope| scope.within(&issuer.scopes)).collect()
        }
    };
    if scopes.is_empty() {
        return Err(Wrong::Scopes);
    }
    Ok(Caller { app, who: Who::Subject(subject(&issuer.name, word(&issuer.subject_claim)?)), scopes, bound: None })
}

/// How the log names a subject: printable, and not without end. What is cut is told apart by a digest.
fn subject(issuer: &str, text: &str) -> Arc<str> {
    const MOST: usize = 60;
    let plain: String = text.chars().map(|c| if c.is_ascii_graphic() { c } else { '_' }).take(MOST).collect();
    if plain == text {
        return format!("idp:{issuer}:{plain}").into();
    }
    let digest = Sha256::digest(text);
    let digest: String = digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    format!("idp:{issuer}:{plain}~{digest}").into()
}

/// Gets the keys of all issuers, for ever.
pub async fn follow(issuers: Arc<Issuers>) {
    let mut all = tokio::task::JoinSet::new();
    for source in &issuers.all {
        all.spawn(keep(source.clone()));
    }
    while all.join_next().await.is_some() {}
}

async fn keep(source: Arc<Source>) {
    let name = source.issuer.name.as_str();
    let fetch = match Fetch::new(source.issuer.authorities.as_deref()) {
        Ok(fetch) => fetch,
        Err(error) => {
            tracing::error!(issuer = name, error, "its keys cannot be got");
            return;
        }
    };
    loop {
        let pause = match got(&fetch, &source.issuer).await {
            Ok(all) => {
                tracing::debug!(issuer = name, keys = all.len(), "keys of an issuer");
                source.keys.send_replace(Some(Arc::new(Keys { got: Instant::now(), all })));
                REFRESH
            }
            Err(error) => {
                let text = chain(&error);
                tracing::warn!(issuer = name, error = text, "its keys cannot be got now");
                AGAIN
            }
        };
        tokio::time::sleep(AGAIN.min(pause)).await;
        let _ = tokio::time::timeout(pause.saturating_sub(AGAIN), source.wanted.notified()).await;
    }
}

#[derive(serde::Deserialize)]
struct Set {
    keys: Vec<Value>,
}

/// Why there are no keys.
#[derive(Debug, thiserror::Error)]
enum NoKeys {
    #[error("{place}")]
    Fetch { place: String, source: FetchError },
    #[error("{0} is not a document of an issuer's settings: {1}")]
    Settings(String, String),
    #[error("{0} is not a set of keys: {1}")]
    Set(String, serde_json::Error),
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(&format!(": {inner}"));
        cause = inner.source();
    }
    text
}

async fn got(fetch: &Fetch, issuer: &Issuer) -> Result<Vec<Jwk>, NoKeys> {
    let get = async |place: &Place| {
        fetch.get(place).await.map_err(|source| NoKeys::Fetch { place: place.to_string(), source })
    };
    let place = match &issuer.keys {
        Some(place) => place.clone(),
        None => {
            let settings = format!("{}/.well-known/openid-configuration", issuer.issuer.trim_end_matches('/'));
            let wrong = |why: String| NoKeys::Settings(settings.clone(), why);
            let document = get(&Place::read(&settings).map_err(&wrong)?).await?;
            let document: Map<String, Value> =
                serde_json::from_slice(&document).map_err(|error| wrong(error.to_string()))?;
            let text = |name: &str| document.get(name).and_then(Value::as_str);
            if text("issuer") != Some(&issuer.issuer) {
                return Err(wrong("it is another issuer's".into()));
            }
            let keys = text("jwks_uri").ok_or_else(|| wrong("it has no jwks_uri".into()))?;
            match Place::read(keys).map_err(&wrong)? {
                // A document from the network names no file of ours.
                Place::File(_) => return Err(wrong("its jwks_uri is no URL".into())),
                place => place,
            }
        }
    };
    let set: Set =
        serde_json::from_slice(&get(&place).await?).map_err(|error| NoKeys::Set(place.to_string(), error))?;
    // One that cannot be read is none of those that can be used.
    Ok(set.keys.into_iter().take(KEYS).filter_map(|key| serde_json::from_value(key).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_looks_like_a_token_or_not() {
        assert!(looks_like_one(b"eyJh.eyJz.x") && looks_like_one(b"eyJh.eyJz."));
        for text in [&b"pepo_abc"[..], b"ey", b"eyJh.eyJz", b"eyJh.a.b.c", b""] {
            assert!(!looks_like_one(text));
        }
    }

    #[test]
    fn a_key_fits_the_algorithms_of_its_kind_alone() {
        let key = |json: Value| serde_json::from_value::<Jwk>(json).expect("key");
        let rsa = key(serde_json::json!({"kty": "RSA", "n": "AQAB", "e": "AQAB", "kid": "r"}));
        let curve =
            key(serde_json::json!({"kty": "EC", "crv": "P-256", "x": "AQAB", "y": "AQAB", "kid": "e", "alg": "ES256"}));
        let secret = key(serde_json::json!({"kty": "oct", "k": "AQAB", "kid": "s"}));
        let sealing = key(serde_json::json!({"kty": "RSA", "n": "AQAB", "e": "AQAB", "use": "enc"}));
        assert!(fits(&rsa, Algorithm::RS256) && fits(&rsa, Algorithm::PS512) && !fits(&rsa, Algorithm::ES256));
        assert!(fits(&curve, Algorithm::ES256) && !fits(&curve, Algorithm::ES384));
        for algorithm in [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512] {
            for key in [&rsa, &curve, &secret] {
                assert!(!fits(key, algorithm), "{algorithm:?}");
            }
        }
        assert!(!fits(&sealing, Algorithm::RS256));
        let all = [rsa, curve];
        assert!(pick(&all, Some("r"), Algorithm::RS256).is_ok());
        assert_eq!(pick(&all, Some("r"), Algorithm::ES256).err(), Some(Wrong::Key));
        assert_eq!(pick(&all, Some("x"), Algorithm::RS256).err(), Some(Wrong::Key));
        assert!(pick(&all, None, Algorithm::RS256).is_ok());
        let two = [all[0].clone(), all[0].clone()];
        assert_eq!(pick(&two, None, Algorithm::RS256).err(), Some(Wrong::Key), "which of them is not said");
    }

    #[test]
    fn a_subject_is_shown_in_print() {
        assert_eq!(&*subject("corp", "me@example.com"), "idp:corp:me@example.com");
        let odd = subject("corp", "a b\u{1b}[2J");
        assert!(odd.starts_with("idp:corp:a_b_[2J~") && odd.is_ascii(), "{odd}");
        assert_ne!(subject("corp", &"x".repeat(70)), subject("corp", &"x".repeat(71)));
        assert!(subject(&"n".repeat(30), &"x".repeat(1000)).len() <= 120);
    }
}
