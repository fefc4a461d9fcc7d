//! Who calls: a key, a Session token or an identity provider's token becomes a [`Caller`], or a reason why not.
//!
//! ```text
//! pepo_…   the digest is in the copy           cheap, and never slowed down by what others fail at
//! pepot_…  signed by pepod's key, not void     one HMAC
//! eyJ….….  signed by an issuer of the settings one signature, remembered for a minute
//! ```
//! Failures are counted per source: after too many, that source's next ones are refused unseen. A good key still opens.

use std::net::IpAddr;
use std::sync::Arc;

use pepo_api::{AppId, Bound, KeyId, PortName, Principal, Scope, SessionId, TOKEN_PREFIX};

use crate::jwt::{self, Issuers};
use crate::keys::Keys;
use crate::net;
use crate::rate::{Buckets, Rate};

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// For which App.
    pub app: AppId,
    /// Who.
    pub who: Who,
    /// What they may do.
    pub scopes: Arc<[Scope]>,
    /// What that is bound to.
    pub bound: Option<Bound>,
}

/// Who that is. What is counted, is counted by this.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Who {
    /// A key's holder.
    Key(KeyId),
    /// Whoever has a token of this Session.
    Token(SessionId),
    /// An identity provider's subject, as the log names it.
    Subject(Arc<str>),
    /// Anybody, at a published port.
    Stranger(PortName),
}

impl Who {
    /// The name for the log; a key has its id.
    pub fn name(&self) -> Option<String> {
        match self {
            Who::Key(_) => None,
            Who::Token(session) => Some(format!("token:{session}")),
            Who::Subject(name) => Some(name.to_string()),
            Who::Stranger(of) => Some(format!("anybody:{of}")),
        }
    }

    /// The key.
    pub fn key(&self) -> Option<KeyId> {
        match self {
            Who::Key(key) => Some(*key),
            Who::Token(_) | Who::Subject(_) | Who::Stranger(_) => None,
        }
    }
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self, self.name()) {
            (Who::Key(key), _) => write!(f, "{key}"),
            (_, name) => f.write_str(&name.unwrap_or_default()),
        }
    }
}

impl Caller {
    /// For the decision.
    pub fn principal(&self) -> Principal<'_> {
        Principal { scopes: &self.scopes, bound: self.bound }
    }
}

/// Why nobody is known by that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is nobody's, or not from there, or not any more.
    Unknown,
    /// The same, and why: an identity provider's token says nothing that must stay secret.
    Token(jwt::Wrong),
    /// The copy is too old to say.
    Stale,
    /// The issuer's keys are not to be had.
    IssuerAway,
    /// Too many that were wrong came from there.
    TooMany {
        /// Seconds.
        wait: u64,
    },
}

/// What decides it.
pub struct Gate {
    keys: Arc<Keys>,
    issuers: Arc<Issuers>,
    failures: Buckets<IpAddr>,
    most: Rate,
}

impl Gate {
    /// Judges by this copy and these issuers, and lets a source fail that often.
    pub fn new(keys: Arc<Keys>, issuers: Arc<Issuers>, failures: Rate) -> Self {
        Gate { keys, issuers, failures: Buckets::default(), most: failures }
    }

    /// The copy.
    pub fn keys(&self) -> &Arc<Keys> {
        &self.keys
    }

    /// Who presents this, from there.
    ///
    /// # Errors
    /// See [`Refused`].
    pub async fn who(&self, presented: &[u8], from: IpAddr) -> Result<Caller, Refused> {
        let copy = self.keys.current().ok_or(Refused::Stale)?;
        if let Some(held) = copy.key(presented, from) {
            return Ok(Caller { app: held.app, who: Who::Key(held.id), scopes: held.scopes.clone(), bound: None });
        }
        if let Some(caller) = self.issuers.remembered(presented, &copy, from) {
            return Ok(caller);
        }
        let source = net::neighbourhood(from);
        if !self.failures.has(&source, self.most) {
            return Err(Refused::TooMany { wait: 1 });
        }
        let judged = if presented.starts_with(TOKEN_PREFIX.as_bytes()) {
            copy.token(presented, from).ok_or(Refused::Unknown).map(|claims| Caller {
                app: claims.app,
                who: Who::Token(claims.session),
                bound: Some(claims.bound()),
                scopes: claims.scopes.into(),
            })
        } else if jwt::looks_like_one(presented) && !self.issuers.is_empty() {
            self.issuers.who(presented, &copy, from).await
        } else {
            Err(Refused::Unknown)
        };
        if matches!(judged, Err(Refused::Unknown | Refused::Token(_))) {
            self.failed(from);
        }
        judged
    }

    /// Somebody from there came with nothing, or with what is wrong.
    pub fn failed(&self, from: IpAddr) {
        let _ = self.failures.take(net::neighbourhood(from), self.most);
    }
}
