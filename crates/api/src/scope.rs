//! Authorization: one pure decision, [`allow`], over who asks, what for, and of what. What no scope names is denied.
//!
//! Whose a thing is, is not decided here: pepod looks everything up by (App, id), so what is another App's is as absent as
//! what was never made.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::id::SessionId;
use crate::routes::Action;

/// The scope that includes all others of its App: keys, settings, the App file, the audit log.
pub const ADMIN: &str = "app:admin";

/// What a key may do: an action's word (`sessions:read`), all of a noun (`sessions:*`), everything but the App's own
/// administration (`*`), or that too ([`ADMIN`]).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope(String);

/// Why a text is not a scope.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a scope; there are {}", words().join(", "))]
pub struct ScopeError {
    given: String,
}

/// Every scope that can be written.
pub(crate) fn words() -> Vec<String> {
    let mut words = vec!["*".to_owned()];
    for action in Action::ALL.iter().filter(|action| action.is_tenants()) {
        let word = action.word();
        let all = word.split_once(':').filter(|_| word != ADMIN).map(|(noun, _)| format!("{noun}:*"));
        for word in all.into_iter().chain([word.to_owned()]) {
            if !words.contains(&word) {
                words.push(word);
            }
        }
    }
    words
}

impl Scope {
    /// Everything but the App's administration.
    pub fn all() -> Self {
        Scope("*".into())
    }

    /// The App's administration and everything else of it.
    pub fn admin() -> Self {
        Scope(ADMIN.into())
    }

    /// The word.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is the administration of an App.
    pub fn is_admin(&self) -> bool {
        self.0 == ADMIN
    }

    /// Whether all that it covers is covered by these together: nobody hands on what they lack.
    pub fn within(&self, others: &[Scope]) -> bool {
        let covered = |action: &Action| others.iter().any(|other| other.covers(*action));
        Action::ALL.iter().filter(|action| self.covers(**action)).all(covered)
    }

    /// Whether it lets its holder do that. What is the operator's or the edge's own no scope covers.
    pub fn covers(&self, action: Action) -> bool {
        if !action.is_tenants() {
            return false;
        }
        let word = action.word();
        match self.0.as_str() {
            ADMIN => true,
            "*" => word != ADMIN,
            own => own == word || own.strip_suffix('*').is_some_and(|noun| word != ADMIN && word.starts_with(noun)),
        }
    }
}

/// Who asks, as far as it matters for the decision.
#[derive(Clone, Copy, Debug)]
pub struct Principal<'a> {
    /// What it may do.
    pub scopes: &'a [Scope],
    /// What it is bound to beside its scopes; a key of an App is bound to nothing.
    pub bound: Option<Bound>,
}

/// What a Session token is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The only Session it is for.
    pub session: SessionId,
    /// The only port of it; none: no port at all.
    pub port: Option<u16>,
}

/// What is asked for, as the request names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource<'a> {
    /// The App as a whole.
    App,
    /// A Session, by id or name.
    Session(&'a str),
    /// A Session and a port of it.
    Port(&'a str, &'a str),
    /// A Workspace, by id or name.
    Workspace(&'a str),
    /// An Image, by id or name.
    Image(&'a str),
    /// A key, by id or name.
    Key(&'a str),
}

/// Why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// None of the scopes covers the action.
    #[error("none of its scopes covers {0}")]
    Scope(&'static str),
    /// The action is nobody's who comes through the edge.
    #[error("{0} is the operator's alone")]
    Operator(&'static str),
    /// It is bound to a Session, and this is not about that one.
    #[error("it is for {0} alone, named by its id")]
    Session(SessionId),
    /// It is bound to a Session, and this opens it to others.
    #[error("{0} is nothing that a Session token can have")]
    Bound(&'static str),
    /// It is bound to one port or none, and this is another.
    #[error("it is for no port{}", .0.map(|port| format!(" but {port}")).unwrap_or_default())]
    Port(Option<u16>),
}

/// Decides. Tells by which scope, or why not.
///
/// # Errors
/// [`Denied`]: the default.
pub fn allow<'a>(who: Principal<'a>, action: Action, of: Resource<'_>) -> Result<&'a Scope, Denied> {
    if !action.is_tenants() {
        return Err(Denied::Operator(action.word()));
    }
    let scope = who.scopes.iter().find(|scope| scope.covers(action)).ok_or(Denied::Scope(action.word()))?;
    let Some(bound) = who.bound else { return Ok(scope) };
    // Whatever its scopes say: what was lent for minutes opens nothing to everybody.
    if action == Action::PortsPublish {
        return Err(Denied::Bound(action.word()));
    }
    // By its id, not a name: names are given anew.
    let own = |session: &str| session.parse() == Ok(bound.session);
    match of {
        Resource::Session(session) if own(session) => Ok(scope),
        Resource::Port(session, port) if own(session) => match bound.port {
            Some(only) if port.parse() == Ok(only) => Ok(scope),
            only => Err(Denied::Port(only)),
        },
        _ => Err(Denied::Session(bound.session)),
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Scope {
    type Err = ScopeError;

    fn from_str(text: &str) -> Result<Self, ScopeError> {
        match words().iter().any(|word| word == text) {
            true => Ok(Scope(text.to_owned())),
            false => Err(ScopeError { given: text.chars().take(80).collect() }),
        }
    }
}

impl Serialize for Scope {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Scope {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(text: &str) -> Scope {
        text.parse().expect(text)
    }

    #[test]
    fn a_scope_covers_its_word_and_no_more() {
        assert!(scope("sessions:read").covers(Action::SessionsRead));
        assert!(!scope("sessions:read").covers(Action::SessionsWrite));
        assert!(scope("sessions:*").covers(Action::SessionsWrite));
        assert!(!scope("sessions:*").covers(Action::CommandsRun));
        for action in Action::ALL.iter().copied() {
            let everything = action.is_tenants();
            assert_eq!(Scope::admin().covers(action), everything, "{action:?}");
            assert_eq!(Scope::all().covers(action), everything && action.word() != ADMIN, "{action:?}");
        }
        assert!(!scope("app:read").covers(Action::AppsWrite));
        assert!(!scope("app:*").covers(Action::KeysWrite), "the administration must be named");
        assert!(!Scope::admin().covers(Action::HostOperate));
    }

    #[test]
    fn nothing_is_allowed_that_no_scope_names() {
        use crate::routes::{Audience, ROUTES};
        let nobody = Principal { scopes: &[], bound: None };
        let admin = [Scope::admin()];
        let admin = Principal { scopes: &admin, bound: None };
        for row in ROUTES {
            let path = row.path.replace(['{', '}'], "");
            let of = row.resource(&path);
            assert!(allow(nobody, row.action, of).is_err(), "{}", row.name);
            assert_eq!(allow(admin, row.action, of).is_ok(), row.audience == Audience::Tenant, "{}", row.name);
        }
        let reads = [scope("sessions:read")];
        let reads = Principal { scopes: &reads, bound: None };
        assert_eq!(allow(reads, Action::SessionsRead, Resource::Session("web")), Ok(&scope("sessions:read")));
        assert_eq!(allow(reads, Action::SessionsWrite, Resource::App), Err(Denied::Scope("sessions:write")));
        assert_eq!(allow(reads, Action::HostOperate, Resource::App), Err(Denied::Operator("host:operate")));
    }

    #[test]
    fn what_is_bound_to_a_session_reaches_nothing_else() {
        let (session, other) = (SessionId::generate(), SessionId::generate());
        let scopes = [Scope::all()];
        let bound = |port| Principal { scopes: &scopes, bound: Some(Bound { session, port }) };
        let (own, not) = (session.to_string(), other.to_string());
        for action in [Action::CommandsRun, Action::FilesRead] {
            assert!(allow(bound(None), action, Resource::Session(&own)).is_ok());
            for of in [Resource::Session(&not), Resource::Session("web"), Resource::App, Resource::Workspace(&own)] {
                assert_eq!(allow(bound(Some(80)), action, of), Err(Denied::Session(session)), "{of:?}");
            }
        }
        let port = |only, given| allow(bound(only), Action::PortsConnect, Resource::Port(&own, given)).err();
        assert_eq!(port(Some(80), "80"), None);
        assert_eq!(port(Some(80), "81"), Some(Denied::Port(Some(80))));
        assert_eq!(port(None, "80"), Some(Denied::Port(None)));
        assert_eq!(port(Some(80), "x"), Some(Denied::Port(Some(80))));
        let publish = |bound| allow(bound, Action::PortsPublish, Resource::Port(&own, "80")).err();
        assert_eq!(publish(bound(Some(80))), Some(Denied::Bound("ports:publish")));
        assert_eq!(publish(Principal { scopes: &scopes, bound: None }), None);
    }

    #[test]
    fn nobody_hands_on_what_they_lack() {
        let has = [scope("commands:run"), scope("commands:read"), scope("files:*")];
        assert!(scope("commands:*").within(&has) && scope("files:read").within(&has));
        assert!(!scope("sessions:read").within(&has) && !Scope::all().within(&has) && !Scope::admin().within(&has));
        assert!(Scope::all().within(&[Scope::admin()]) && !Scope::admin().within(&[Scope::all()]));
        assert!(!scope("files:read").within(&[]));
    }

    #[test]
    fn what_is_no_scope_names_those_that_are() {
        for text in ["", "sessions", "sessions:", "host:operate", "edge:sync", "Sessions:*", "nothing:*", "health"] {
            let error = text.parse::<Scope>().expect_err(text).to_string();
            assert!(error.contains("sessions:read") && error.contains(ADMIN), "{error}");
        }
    }
}
