//! The host name of a guest's port: `{port}-{32 hex digits of the Session's id}.{domain}`. pepod makes it, the edge reads it.
//!
//! Everything below the domain is a guest's or nobody's, and never the API's: what is read here as [`Named::Elsewhere`] is
//! all that the API may answer.

use std::fmt;
use std::str::FromStr;

use crate::id::SessionId;

/// What stands before the domain: five digits, a hyphen, the id, a dot.
const BEFORE: usize = 5 + 1 + 32 + 1;
/// The longest name that the DNS has.
const LONGEST: usize = 253;
/// The longest label.
const LABEL: usize = 63;

/// The domain below which ports have names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain(String);

/// Why a text is no such domain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a domain, as preview.example.com: lower-case letters, digits and hyphens, dots between")]
pub struct DomainError(String);

/// One port of one Session, as its name says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortName {
    /// The Session.
    pub session: SessionId,
    /// The port in it.
    pub port: u16,
}

/// What a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// Not below the domain.
    Elsewhere,
    /// Below the domain, and no port's.
    Nothing,
    /// That port's.
    Port(PortName),
}

impl Domain {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The host name of that port.
    pub fn name(&self, of: PortName) -> String {
        format!("{}-{}.{}", of.port, of.session.hex(), self.0)
    }

    /// What the host is that a request names, with or without a port behind it. Letters count alike in both cases, as they do
    /// in the DNS; one more dot at the end is the same host to the DNS and another origin to a browser, so it is nobody's.
    pub fn read(&self, host: &[u8]) -> Named {
        let host = String::from_utf8_lossy(host).to_ascii_lowercase();
        let host = host.rsplit_once('@').map_or(&*host, |(_, host)| host);
        let (name, port) = host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port)));
        let (name, dot) = name.strip_suffix('.').map_or((name, false), |name| (name, true));
        let Some(label) = name.strip_suffix(&self.0) else { return Named::Elsewhere };
        // The domain itself is not below it, and neither is another one that ends alike.
        let Some(label) = label.strip_suffix('.') else { return Named::Elsewhere };
        let sound = !dot && port.is_none_or(|port| number(port).is_some());
        match PortName::read(label).filter(|_| sound) {
            Some(of) => Named::Port(of),
            None => Named::Nothing,
        }
    }
}

impl PortName {
    fn read(label: &str) -> Option<Self> {
        let (port, hex) = label.split_once('-')?;
        Some(PortName { port: number(port)?, session: format!("ses_{hex}").parse().ok()? })
    }
}

/// A port in its one spelling.
fn number(text: &str) -> Option<u16> {
    let plain = (1..=5).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| plain)
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.session, self.port)
    }
}

impl FromStr for Domain {
    type Err = DomainError;

    fn from_str(text: &str) -> Result<Self, DomainError> {
        let letter = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        let label = |label: &str| {
            (1..=LABEL).contains(&label.len())
                && label.bytes().all(letter)
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        // What ends in a number is an address and not a name.
        let address = text.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
        match text.len() + BEFORE <= LONGEST && text.split('.').all(label) && !address {
            true => Ok(Domain(text.to_owned())),
            false => Err(DomainError(text.chars().take(80).collect())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEX: &str = "0192f0c1a2b37c4d8e5f60718293a4b5";

    fn domain() -> Domain {
        "preview.example.com".parse().expect("domain")
    }

    fn read(host: &str) -> Named {
        domain().read(host.as_bytes())
    }

    fn port(port: u16) -> Named {
        Named::Port(PortName { session: format!("ses_{HEX}").parse().expect("id"), port })
    }

    #[test]
    fn a_port_has_one_name() {
        let Named::Port(of) = port(3000) else { panic!("a port") };
        assert_eq!(domain().name(of), format!("3000-{HEX}.preview.example.com"));
        for host in [
            format!("3000-{HEX}.preview.example.com"),
            format!("3000-{HEX}.preview.example.com:7070"),
            format!("3000-{}.Preview.EXAMPLE.com", HEX.to_uppercase()),
        ] {
            assert_eq!(read(&host), port(3000), "{host}");
        }
        assert_eq!(read(&format!("1-{HEX}.preview.example.com")), port(1));
        assert_eq!(read(&format!("65535-{HEX}.preview.example.com:1")), port(65_535));
    }

    #[test]
    fn all_else_below_the_domain_is_nobodys() {
        let own = format!("3000-{HEX}");
        for label in [
            String::new(),
            "www".into(),
            HEX.into(),
            format!("-{HEX}"),
            format!("0-{HEX}"),
            format!("03000-{HEX}"),
            format!("65536-{HEX}"),
            format!("+300-{HEX}"),
            format!("300000-{HEX}"),
            format!("3000--{HEX}"),
            format!("3000_{HEX}"),
            format!("3000-ses_{HEX}"),
            format!("3000-{}", &HEX[1..]),
            format!("3000-{HEX}0"),
            format!("3000-{}g", &HEX[1..]),
            format!("3000-{}-{}", &HEX[..8], &HEX[8..]),
            format!("a.{own}"),
            format!("{own}."),
            format!(" {own}"),
            format!("%33000-{HEX}"),
        ] {
            assert_eq!(read(&format!("{label}.preview.example.com")), Named::Nothing, "{label}");
        }
        for host in [
            format!("{own}.preview.example.com."),
            format!("{own}.preview.example.com.:7070"),
            format!("{own}.preview.example.com:"),
            format!("{own}.preview.example.com:0"),
            format!("{own}.preview.example.com:x"),
            format!("{own}.preview.example.com:70700"),
            format!("{own}.preview.example.com:80:80"),
            "\u{fffd}.preview.example.com".to_owned(),
        ] {
            assert_eq!(read(&host), Named::Nothing, "{host}");
        }
        assert_eq!(domain().read(b"\xff.preview.example.com"), Named::Nothing);
        assert_eq!(read(&format!("x@{own}.preview.example.com")), port(3000), "who it is for is the host's part");
    }

    #[test]
    fn what_is_not_below_the_domain_is_elsewhere() {
        let own = format!("3000-{HEX}");
        for host in [
            "",
            "preview.example.com",
            "preview.example.com:7070",
            "preview.example.com.",
            "api.example.com",
            "127.0.0.1:7070",
            "[::1]:7070",
            "[::1]",
            &format!("{own}.preview.example.com.evil"),
            &format!("{own}.preview.example.com.evil:7070"),
            &format!("{own}.xpreview.example.com"),
            &format!("{own}preview.example.com"),
            &format!("{own}.preview.example.com@evil"),
            &format!("{own}.preview.example.co"),
            &format!("{own}.preview.example.com.."),
        ] {
            assert_eq!(read(host), Named::Elsewhere, "{host}");
        }
    }

    #[test]
    fn a_domain_is_a_plain_name() {
        for text in ["localhost", "preview.example.com", "a-b.c0", &"a".repeat(63)] {
            assert_eq!(text.parse::<Domain>().map(|domain| domain.as_str().to_owned()).as_deref(), Ok(text));
        }
        let long = ["a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(23)].join(".");
        for text in [
            "",
            ".",
            "Example.com",
            "example.com.",
            ".example.com",
            "a..b",
            "-a.b",
            "a-.b",
            "*.example.com",
            "a_b.c",
            "http://a.b",
            "a.b:80",
            "127.0.0.1",
            "1",
            "::1",
            "ä.example",
            &"a".repeat(64),
            &long,
        ] {
            assert!(text.parse::<Domain>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_name_reads_back(id in any::<u128>(), number in 1..=u16::MAX, suffix in proptest::option::of(1..=u16::MAX)) {
            let of = PortName { session: uuid::Uuid::from_u128(id).into(), port: number };
            let name = domain().name(of);
            prop_assert!(name.split('.').all(|label| label.len() <= LABEL));
            let host = suffix.map_or(name.clone(), |suffix| format!("{name}:{suffix}"));
            prop_assert_eq!(read(&host), Named::Port(of));
        }

        #[test]
        fn a_port_is_read_from_its_name_alone(before in ".{0,60}", cut in 0..40usize, junk in "[-.:@0-9a-fA-F%]{0,3}") {
            // A name that was bent: cut, and with something put in.
            let name = format!("3000-{HEX}");
            let bent = format!("{}{junk}{}", &name[..cut.min(name.len())], &name[cut.min(name.len())..]);
            for label in [before, bent] {
                let host = format!("{label}.preview.example.com");
                match domain().read(host.as_bytes()) {
                    Named::Port(of) => {
                        let own = host.to_ascii_lowercase();
                        let own = own.rsplit_once('@').map_or(&*own, |(_, own)| own);
                        prop_assert_eq!(own, domain().name(of));
                    }
                    Named::Nothing => {}
                    // A colon in the label cuts what comes behind it off the host.
                    Named::Elsewhere => prop_assert!(label.contains(':'), "{host}"),
                }
            }
        }

        #[test]
        fn any_bytes_are_read(host in proptest::collection::vec(any::<u8>(), 0..80)) {
            let told = domain().read(&host);
            prop_assert!(!matches!(told, Named::Port(_)));
        }
    }
}
