//! Ranges of IPv4 addresses, in the one form in which rules and the floor have them.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Error;

/// A range of IPv4 addresses: an address whose bits beyond the prefix are zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr {
    first: Ipv4Addr,
    prefix: u8,
}

impl Cidr {
    /// The range of that length (at most 32) in which the address lies.
    pub const fn containing(address: Ipv4Addr, prefix: u8) -> Self {
        let prefix = if prefix > 32 { 32 } else { prefix };
        let mask = if prefix == 0 { 0 } else { u32::MAX << (32 - prefix as u32) };
        Cidr { first: Ipv4Addr::from_bits(address.to_bits() & mask), prefix }
    }

    /// Its first address.
    pub fn first(self) -> Ipv4Addr {
        self.first
    }

    /// Its last address.
    pub fn last(self) -> Ipv4Addr {
        let rest = u32::MAX.checked_shr(u32::from(self.prefix)).unwrap_or(0);
        Ipv4Addr::from_bits(self.first.to_bits() | rest)
    }

    /// How many bits of an address decide whether it is in it.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// Whether the address is in it.
    pub fn holds(self, address: Ipv4Addr) -> bool {
        (self.first..=self.last()).contains(&address)
    }

    /// Whether the whole of the other is in it.
    pub fn holds_all(self, other: Cidr) -> bool {
        self.prefix <= other.prefix && self.holds(other.first)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

impl fmt::Debug for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Cidr {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = |reason: String| Error::Cidr { text: shown(text), reason };
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        if address.contains(':') {
            return Err(wrong("IPv6 is not carried; give IPv4".to_owned()));
        }
        let address: Ipv4Addr = address.parse().map_err(|_| wrong("write it like 203.0.113.0/24".to_owned()))?;
        let prefix: u8 = match prefix {
            None => 32,
            Some(text) => text
                .parse()
                .ok()
                .filter(|prefix| *prefix <= 32 && text.len() <= 2)
                .ok_or_else(|| wrong("a prefix is from 0 to 32".to_owned()))?,
        };
        let cidr = Cidr::containing(address, prefix);
        if cidr.first != address {
            return Err(wrong(format!("{address} has bits beyond its prefix; {cidr} has not")));
        }
        Ok(cidr)
    }
}

impl TryFrom<String> for Cidr {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(cidr: Cidr) -> String {
        cidr.to_string()
    }
}

impl Serialize for Cidr {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}
