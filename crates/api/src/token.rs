//! Session tokens on the wire, and their form: claims that pepod signs and the edge checks, with one key of pepod's.
//!
//! ```text
//! pepot_<claims as JSON, base64url>.<HMAC-SHA256 of all before the dot, base64url>
//! ```
//! No record is kept of one. It ends by its time, with its Session, with the key that it was made by, and when all tokens of
//! its Session are revoked: for that it carries when it was made.

use serde::{Deserialize, Serialize};

use crate::id::{AppId, KeyId, SessionId};
use crate::scope::{Bound, Scope};

/// How every token begins.
pub const TOKEN_PREFIX: &str = "pepot_";

/// Body of `POST /v1/sessions/{session}/tokens`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// What it may do in the Session: `sessions:read`, words of `commands` and `files`, `ports:connect`; none that the caller lacks.
    /// Absent or empty: all that a token can have, of what the caller may do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scopes: Vec<Scope>,
    /// The one port it may connect to. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// How long it is valid: at most 3600. 600 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_seconds: Option<u64>,
}

/// A token that was just made: its text is kept nowhere.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewToken {
    /// The text to authenticate with, as a key is.
    pub token: String,
    /// The Session it is for.
    pub session_id: SessionId,
    /// What it may do there.
    pub scopes: Vec<Scope>,
    /// The one port it may connect to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// When it ends.
    pub expires_at: jiff::Timestamp,
}

impl std::fmt::Debug for NewToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("NewToken");
        shown.field("session_id", &self.session_id).field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

/// What a token says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenClaims {
    /// Whose the Session is.
    pub app: AppId,
    /// The Session.
    pub session: SessionId,
    /// What its holder may do there.
    pub scopes: Vec<Scope>,
    /// The one port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The key that it was made by, where one was: it ends with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyId>,
    /// When it was made, milliseconds since 1970.
    pub made: i64,
    /// When it ends, milliseconds since 1970.
    pub until: i64,
}

impl TokenClaims {
    /// What it is bound to.
    pub fn bound(&self) -> Bound {
        Bound { session: self.session, port: self.port }
    }
}

#[cfg(feature = "token")]
mod form {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
    use sha2::{Digest, Sha256};

    use super::{TOKEN_PREFIX, TokenClaims};

    /// Longer than any token of ours.
    const MOST: usize = 4096;

    /// HMAC-SHA256 (RFC 2104) with a key of at most one block.
    pub fn hmac(key: &[u8; 32], message: &[u8]) -> [u8; 32] {
        let pad = |byte: u8| {
            let mut block = [byte; 64];
            block.iter_mut().zip(key).for_each(|(to, key)| *to ^= key);
            block
        };
        let inner = Sha256::new().chain_update(pad(0x36)).chain_update(message).finalize();
        Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize().into()
    }

    impl TokenClaims {
        /// The token's text.
        pub fn sign(&self, key: &[u8; 32]) -> String {
            // A plain struct of numbers and words: it always serializes.
            let mut text = format!("{TOKEN_PREFIX}{}", BASE64.encode(serde_json::to_vec(self).unwrap_or_default()));
            let mac = BASE64.encode(hmac(key, text.as_bytes()));
            text.push('.');
            text.push_str(&mac);
            text
        }

        /// What a text says that was signed with this key. Whether it still counts is the caller's to see.
        pub fn open(text: &[u8], key: &[u8; 32]) -> Option<Self> {
            let text = std::str::from_utf8(text).ok().filter(|text| text.len() <= MOST)?;
            let (signed, mac) = text.split_once('.')?;
            let mac: [u8; 32] = BASE64.decode(mac).ok()?.try_into().ok()?;
            let right = hmac(key, signed.as_bytes());
            // Every byte is looked at, whatever the earlier ones say.
            let differ = mac.iter().zip(&right).fold(0u8, |differ, (given, right)| differ | (given ^ right));
            if std::hint::black_box(differ) != 0 {
                return None;
            }
            serde_json::from_slice(&BASE64.decode(signed.strip_prefix(TOKEN_PREFIX)?).ok()?).ok()
        }
    }
}

#[cfg(feature = "token")]
pub use form::hmac;

#[cfg(all(test, feature = "token"))]
mod tests {
    use super::*;

    #[test]
    fn the_mac_is_the_standards() {
        // RFC 4231, case 2 has a shorter key: padded with zeros it is the same block.
        let mut key = [0u8; 32];
        key[..4].copy_from_slice(b"Jefe");
        let mac = hmac(&key, b"what do ya want for nothing?");
        let hex: String = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn a_token_opens_with_its_key_and_whole_alone() {
        let claims = TokenClaims {
            app: AppId::generate(),
            session: SessionId::generate(),
            scopes: vec!["commands:run".parse().expect("scope")],
            port: Some(3000),
            key: Some(KeyId::generate()),
            made: 1,
            until: 2,
        };
        let (key, other) = ([7u8; 32], [8u8; 32]);
        let text = claims.sign(&key);
        assert!(text.starts_with(TOKEN_PREFIX) && text.len() < 1024, "{text}");
        assert_eq!(TokenClaims::open(text.as_bytes(), &key), Some(claims));
        assert_eq!(TokenClaims::open(text.as_bytes(), &other), None);
        for at in 0..text.len() {
            assert_eq!(TokenClaims::open(&text.as_bytes()[..at], &key), None, "cut at {at}");
            let mut bent = text.clone().into_bytes();
            bent[at] = if bent[at] == b'A' { b'B' } else { b'A' };
            assert_eq!(TokenClaims::open(&bent, &key), None, "byte {at}");
        }
        for text in ["", ".", "pepot_.", "pepot_e30.", "pepot_e30.e30"] {
            assert_eq!(TokenClaims::open(text.as_bytes(), &key), None, "{text}");
        }
    }
}
