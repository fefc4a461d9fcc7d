//! Values that are told once and never shown: neither by `Debug`, nor in the refusal of a body they stand in.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

/// A secret's value.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct SecretText(String);

impl SecretText {
    /// This text.
    pub fn new(text: impl Into<String>) -> Self {
        SecretText(text.into())
    }

    /// The text, for whoever hands it on.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText")
    }
}

impl<'de> Deserialize<'de> for SecretText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Text).map(SecretText)
    }
}

/// Refusals that do not repeat what was there.
macro_rules! silent {
    ($what:literal; $($method:ident: $type:ty),+) => {
        $(fn $method<E: de::Error>(self, _: $type) -> Result<Self::Value, E> {
            Err(E::custom($what))
        })+
    };
}

struct Text;

impl<'de> Visitor<'de> for Text {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }

    fn visit_string<E: de::Error>(self, text: String) -> Result<String, E> {
        Ok(text)
    }

    silent!("a secret must be a text"; visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64);
}

/// Names and values.
struct Named<T>(std::marker::PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Named<T> {
    type Value = Option<BTreeMap<String, T>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("names and texts")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut all = BTreeMap::new();
        while let Some((name, value)) = map.next_entry()? {
            all.insert(name, value);
        }
        Ok(Some(all))
    }

    silent!("secrets are names and texts"; visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);
}

pub(crate) fn new<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<BTreeMap<String, SecretText>>, D::Error> {
    deserializer.deserialize_any(Named(std::marker::PhantomData))
}

pub(crate) fn changed<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<BTreeMap<String, Option<SecretText>>>, D::Error> {
    deserializer.deserialize_any(Named(std::marker::PhantomData))
}

#[cfg(test)]
mod tests {
    use crate::{CreateSession, UpdateSession};

    #[test]
    fn a_value_is_neither_shown_nor_repeated_in_a_refusal() {
        let new: CreateSession = serde_json::from_str(r#"{"secrets":{"A":"hush"}}"#).expect("body");
        assert!(!format!("{new:?}").contains("hush"));
        assert_eq!(new.secrets.as_ref().expect("some")["A"].expose(), "hush");
        assert!(serde_json::to_string(&new).expect("json").contains("hush"), "a client must be able to send it");
        for body in [
            r#"{"secrets":{"A":4711}}"#,
            r#"{"secrets":{"A":["4711"]}}"#,
            r#"{"secrets":{"A":{"b":"4711"}}}"#,
            r#"{"secrets":"4711"}"#,
            r#"{"secrets":["4711"]}"#,
            r#"{"secrets":4711}"#,
        ] {
            let error = serde_json::from_str::<CreateSession>(body).expect_err(body).to_string();
            assert!(!error.contains("4711"), "{error}");
        }
        let update: UpdateSession = serde_json::from_str(r#"{"secrets":{"A":null,"B":"x"}}"#).expect("body");
        let secrets = update.secrets.expect("some");
        assert!(secrets["A"].is_none() && secrets["B"].is_some());
        assert!(serde_json::from_str::<UpdateSession>(r#"{"secrets":null}"#).expect("body").secrets.is_none());
    }
}
