//! Ids: a prefix that says the kind, then 32 lower-case hex digits of a UUIDv7. Typed, so that one kind cannot stand for another.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// Why a text is not an id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not an id: expected `{prefix}` and 32 lower-case hex digits")]
pub struct IdError {
    given: String,
    prefix: &'static str,
}

fn parse(text: &str, prefix: &'static str) -> Result<Uuid, IdError> {
    let refuse = || IdError { given: text.chars().take(80).collect(), prefix };
    let hex = text.strip_prefix(prefix).ok_or_else(refuse)?;
    let plain = hex.len() == 32 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !plain {
        return Err(refuse());
    }
    Uuid::try_parse(hex).map_err(|_| refuse())
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Uuid);

        impl $name {
            /// What stands before the hex digits.
            pub const PREFIX: &'static str = $prefix;

            /// A new one: time-ordered, 74 random bits.
            pub fn generate() -> Self {
                Self(Uuid::now_v7())
            }

            /// The 32 hex digits alone, for host names.
            pub fn hex(&self) -> String {
                self.0.simple().to_string()
            }

            /// The id as a UUID.
            pub fn uuid(&self) -> Uuid {
                self.0
            }

            /// Whether it is a UUID of version 7, as ids made by callers must be.
            pub fn is_v7(&self) -> bool {
                self.0.get_version_num() == 7
            }
        }

        impl From<Uuid> for $name {
            fn from(uuid: Uuid) -> Self {
                Self(uuid)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($prefix)?;
                f.write_str(self.0.simple().encode_lower(&mut Uuid::encode_buffer()))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                parse(text, $prefix).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

id!(
    /// An App: the unit of authentication, policy and quota.
    AppId,
    "app_"
);
id!(
    /// A Session: one conversation or task, a lasting identity.
    SessionId,
    "ses_"
);
id!(
    /// A Sandbox: what serves one activation of one Session.
    SandboxId,
    "sbx_"
);
id!(
    /// A Workspace: a durable directory tree of an App.
    WorkspaceId,
    "wsp_"
);
id!(
    /// A Command: a program run in a Session. Callers may make these.
    CommandId,
    "cmd_"
);
id!(
    /// An Image, by the digest of its content: the first 128 bits of it.
    ImageId,
    "img_"
);
id!(
    /// An API key (not the key itself).
    KeyId,
    "key_"
);
id!(
    /// One HTTP request, in answers, logs and audit.
    RequestId,
    "req_"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back_and_keeps_its_kind() {
        let id = SessionId::generate();
        assert_eq!(id.to_string().parse::<SessionId>(), Ok(id));
        assert!(id.is_v7());
        assert!(id.to_string().parse::<CommandId>().is_err());
    }

    #[test]
    fn other_spellings_are_refused() {
        let hex = SessionId::generate().hex();
        for text in [
            format!("ses_{}", hex.to_uppercase()),
            format!("ses_{}", &hex[1..]),
            format!("ses-{hex}"),
            format!("ses_{}-{}", &hex[..8], &hex[8..]),
            format!("ses_{{{hex}}}"),
            String::new(),
        ] {
            assert!(text.parse::<SessionId>().is_err(), "{text}");
        }
    }
}
