//! Scopes: what a key may do, in the words of the actions.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
    fn what_is_no_scope_names_those_that_are() {
        for text in ["", "sessions", "sessions:", "host:operate", "edge:sync", "Sessions:*", "nothing:*", "health"] {
            let error = text.parse::<Scope>().expect_err(text).to_string();
            assert!(error.contains("sessions:read") && error.contains(ADMIN), "{error}");
        }
    }
}
