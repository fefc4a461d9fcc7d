//! Names of hosts as rules and questions use them: lower case, ASCII, bounded; and the patterns that rules are made of.
//!
//! One form everywhere (rules, DNS questions, TLS and HTTP names), so that two spellings of a name cannot be taken for two
//! names. A [`HostName`] is safe to print.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The longest name in bytes, without a dot at its end (RFC 1035: 255 octets on the wire).
pub const NAME_BYTES: usize = 253;
/// The longest label in bytes.
pub const LABEL_BYTES: usize = 63;

/// Why a text is not the name of a host, or not a pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} {reason}")]
pub struct Error {
    text: String,
    reason: &'static str,
}

impl Error {
    fn new(text: &str, reason: &'static str) -> Self {
        Error { text: text.chars().take(80).collect(), reason }
    }
}

/// The name of a host: labels of `a-z`, `0-9`, `-` and `_`, the last one not a number.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(Box<str>);

impl HostName {
    /// Takes a name in any case, with or without a dot at its end.
    ///
    /// # Errors
    /// What is wrong with it: empty, too long, another character, an address.
    pub fn new(text: &str) -> Result<Self, Error> {
        let wrong = |reason| Err(Error::new(text, reason));
        let plain = text.strip_suffix('.').unwrap_or(text);
        if plain.is_empty() {
            return wrong("is no name");
        }
        if plain.len() > NAME_BYTES {
            return wrong("is longer than 253 characters");
        }
        if !plain.is_ascii() {
            return wrong("has a character outside ASCII: write it in its xn-- form");
        }
        for label in plain.split('.') {
            if label.is_empty() || label.len() > LABEL_BYTES {
                return wrong("has a part that is empty or longer than 63 characters");
            }
            if !label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_') {
                return wrong("has a character that no host's name has");
            }
        }
        let last = plain.rsplit('.').next().unwrap_or_default();
        // `1.2.3.4`, and every other way in which a library reads a number as an address.
        if last.bytes().all(|byte| byte.is_ascii_digit()) || last.to_ascii_lowercase().starts_with("0x") {
            return wrong("is a number or an address, not a name");
        }
        Ok(HostName(plain.to_ascii_lowercase().into()))
    }

    /// As text: lower case, no dot at the end.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it lies below `zone`: at least one label longer.
    pub fn is_below(&self, zone: &str) -> bool {
        self.0.strip_suffix(zone).is_some_and(|front| front.len() > 1 && front.ends_with('.'))
    }

    /// Whether it is `zone` or lies below it.
    pub fn is_within(&self, zone: &str) -> bool {
        &*self.0 == zone || self.is_below(zone)
    }

    /// How many labels it has.
    pub fn labels(&self) -> usize {
        self.0.split('.').count()
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for HostName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        HostName::new(text)
    }
}

/// Which names a rule is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pattern {
    /// `example.com`: that one.
    Exactly(HostName),
    /// `*.example.com`: every name below it, at any depth, and not itself.
    Below(HostName),
}

impl Pattern {
    /// Reads `example.com` or `*.example.com`.
    ///
    /// # Errors
    /// As [`HostName::new`]; a star elsewhere; a star over a whole top level, which is what the mode `public` is for.
    pub fn new(text: &str) -> Result<Self, Error> {
        match text.strip_prefix("*.") {
            Some(zone) if zone.contains('*') => Err(Error::new(text, "has a second star")),
            Some(zone) => {
                let zone = HostName::new(zone).map_err(|error| Error::new(text, error.reason))?;
                if zone.labels() < 2 {
                    return Err(Error::new(
                        text,
                        "would open a whole top level: name at least two parts after the star",
                    ));
                }
                Ok(Pattern::Below(zone))
            }
            None if text.contains('*') => {
                Err(Error::new(text, "has a star that is not its whole first part: write *.example.com"))
            }
            None => HostName::new(text).map(Pattern::Exactly),
        }
    }

    /// Whether the rule is about that name.
    pub fn matches(&self, name: &HostName) -> bool {
        match self {
            Pattern::Exactly(own) => own == name,
            Pattern::Below(zone) => name.is_below(zone.as_str()),
        }
    }

    /// Whether every name of `other` is one of this.
    pub fn covers(&self, other: &Pattern) -> bool {
        match (self, other) {
            (_, Pattern::Exactly(name)) => self.matches(name),
            (Pattern::Below(ours), Pattern::Below(theirs)) => theirs.is_within(ours.as_str()),
            (Pattern::Exactly(_), Pattern::Below(_)) => false,
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pattern::Exactly(name) => write!(f, "{name}"),
            Pattern::Below(zone) => write!(f, "*.{zone}"),
        }
    }
}

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Pattern::new(text)
    }
}

impl Serialize for HostName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for HostName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Serialize for Pattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> HostName {
        HostName::new(text).expect(text)
    }

    fn pattern(text: &str) -> Pattern {
        Pattern::new(text).expect(text)
    }

    #[test]
    fn one_name_has_one_form() {
        for same in ["api.example.com", "API.Example.com", "api.example.com.", "aPI.EXAMPLE.COM."] {
            assert_eq!(name(same).as_str(), "api.example.com");
        }
        for bad in
            ["", ".", "a..b", ".a", "a b", "a/b", "1.2.3.4", "0x7f000001", "a.0x1", "bücher.de", "a\0b", "[::1]", "*"]
        {
            assert!(HostName::new(bad).is_err(), "{bad:?} was taken");
        }
        assert!(HostName::new(&format!("{}.com", "a".repeat(64))).is_err());
        assert!(HostName::new(&"a.".repeat(127)).is_ok());
        assert!(HostName::new(&"a.".repeat(128)).is_err());
    }

    #[test]
    fn a_star_is_everything_below_and_nothing_beside() {
        let below = pattern("*.Example.com");
        assert_eq!(below.to_string(), "*.example.com");
        for yes in ["a.example.com", "a.b.example.com"] {
            assert!(below.matches(&name(yes)), "{yes}");
        }
        for no in ["example.com", "badexample.com", "example.com.evil.net", "example.co", "com"] {
            assert!(!below.matches(&name(no)), "{no}");
        }
        for bad in ["*", "*.com", "*.*.com", "a*.example.com", "a.*.example.com", "*example.com", "*."] {
            assert!(Pattern::new(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn covering_is_what_matching_says() {
        assert!(pattern("*.example.com").covers(&pattern("*.a.example.com")));
        assert!(pattern("*.example.com").covers(&pattern("*.example.com")));
        assert!(!pattern("*.a.example.com").covers(&pattern("*.example.com")));
        assert!(!pattern("example.com").covers(&pattern("*.example.com")));
        assert!(!pattern("*.example.com").covers(&pattern("example.com")));
    }

    proptest! {
        #[test]
        fn any_text_is_a_name_or_an_error(text in "\\PC{0,300}") {
            if let Ok(taken) = HostName::new(&text) {
                prop_assert_eq!(&HostName::new(taken.as_str()).expect("again"), &taken);
                prop_assert!(taken.as_str().len() <= NAME_BYTES);
            }
            if let Ok(taken) = Pattern::new(&text) {
                prop_assert_eq!(Pattern::new(&taken.to_string()).expect("again"), taken);
            }
        }

        #[test]
        fn what_a_pattern_matches_ends_with_its_zone(front in "[a-z0-9.-]{0,20}") {
            let whole = format!("{front}example.com");
            if let Ok(taken) = HostName::new(&whole) {
                let matched = pattern("*.example.com").matches(&taken);
                prop_assert_eq!(matched, front.ends_with('.') && front.len() > 1);
            }
        }
    }
}
