//! The floor: addresses that no policy opens, ours by definition and the operator's on top, less what the operator opened.

use std::fmt;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::{Cidr, Protocol, Rule};

/// A range on the floor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Closed {
    /// The range.
    pub range: Cidr,
    /// Why it is there.
    pub what: String,
}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.what, self.range)
    }
}

/// What the operator took off the floor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Opening {
    /// The range.
    pub range: Cidr,
    /// On which ports; none are all.
    #[serde(default)]
    pub ports: Vec<u16>,
    /// By what protocol; `None` are all three.
    #[serde(default)]
    pub protocol: Option<Protocol>,
}

impl fmt::Display for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.range)?;
        for (at, port) in self.ports.iter().enumerate() {
            write!(f, "{}{port}", if at == 0 { ':' } else { '+' })?;
        }
        self.protocol.map_or(Ok(()), |protocol| write!(f, "/{}", protocol.as_str()))
    }
}

impl Opening {
    /// Whether it opens that.
    pub fn opens(&self, address: Ipv4Addr, protocol: Protocol, port: u16) -> bool {
        self.range.holds(address)
            && self.protocol.is_none_or(|opened| opened == protocol)
            && (self.ports.is_empty() || protocol != Protocol::Icmp && self.ports.contains(&port))
    }
}

/// Addresses that no policy opens: ours by definition, and the operator's on top; less what the operator opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Floor {
    /// What is closed.
    pub closed: Vec<Closed>,
    /// What of it is open all the same to a rule that names it. The mode `public` alone does not reach it.
    #[serde(default)]
    pub open: Vec<Opening>,
}

/// The floor of every host (S19): what is no public address, and the addresses at which clouds answer their guests.
const FLOOR: [(Ipv4Addr, u8, &str); 16] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8, "this network"),
    (Ipv4Addr::new(10, 0, 0, 0), 8, "private networks"),
    (Ipv4Addr::new(100, 64, 0, 0), 10, "shared and provider networks"),
    (Ipv4Addr::new(127, 0, 0, 0), 8, "loopback"),
    (Ipv4Addr::new(168, 63, 129, 16), 32, "a cloud's metadata and resolver"),
    (Ipv4Addr::new(169, 254, 0, 0), 16, "link-local and cloud metadata"),
    (Ipv4Addr::new(172, 16, 0, 0), 12, "private networks"),
    (Ipv4Addr::new(192, 0, 0, 0), 24, "protocol assignments and cloud metadata"),
    (Ipv4Addr::new(192, 0, 2, 0), 24, "documentation"),
    (Ipv4Addr::new(192, 88, 99, 0), 24, "6to4 relays"),
    (Ipv4Addr::new(192, 168, 0, 0), 16, "private networks"),
    (Ipv4Addr::new(198, 18, 0, 0), 15, "benchmarks"),
    (Ipv4Addr::new(198, 51, 100, 0), 24, "documentation"),
    (Ipv4Addr::new(203, 0, 113, 0), 24, "documentation"),
    (Ipv4Addr::new(224, 0, 0, 0), 4, "multicast"),
    (Ipv4Addr::new(240, 0, 0, 0), 4, "reserved"),
];

impl Default for Floor {
    fn default() -> Self {
        let closed = |(first, prefix, what): &(Ipv4Addr, u8, &str)| Closed {
            range: Cidr::containing(*first, *prefix),
            what: (*what).to_owned(),
        };
        Floor { closed: FLOOR.iter().map(closed).collect(), open: Vec::new() }
    }
}

impl Floor {
    /// The floor with what the operator closes and opens.
    pub fn with(closed: impl IntoIterator<Item = Cidr>, open: Vec<Opening>) -> Self {
        let mut floor = Floor::default();
        let what = "closed by the operator";
        floor.closed.extend(closed.into_iter().map(|range| Closed { range, what: what.to_owned() }));
        Floor { open, ..floor }
    }

    /// What closes that address, whatever is open of it.
    pub fn covers(&self, address: Ipv4Addr) -> Option<&Closed> {
        self.closed.iter().find(|closed| closed.range.holds(address))
    }

    /// Whether that rule may reach that, as far as the floor has a say.
    pub fn admits_to(&self, rule: &Rule, address: Ipv4Addr, protocol: Protocol, port: u16) -> bool {
        if rule.public { self.covers(address).is_none() } else { self.admits(address, protocol, port) }
    }

    /// Whether a rule may reach that.
    pub fn admits(&self, address: Ipv4Addr, protocol: Protocol, port: u16) -> bool {
        self.covers(address).is_none() || self.open.iter().any(|open| open.opens(address, protocol, port))
    }

    /// What leaves nothing of a rule to that range. One that is only partly on the floor is open where it is not.
    pub(super) fn closes(&self, range: Cidr, rule: &Rule) -> Option<&Closed> {
        let closed = self.closed.iter().find(|closed| closed.range.holds_all(range))?;
        let meet = |open: &Opening| {
            !rule.public
                && (open.range.holds_all(range) || range.holds_all(open.range))
                && rule.protocols().iter().any(|protocol| {
                    open.protocol.is_none_or(|opened| opened == *protocol)
                        && (open.ports.is_empty()
                            || *protocol != Protocol::Icmp
                                && (rule.ports.is_empty() || rule.ports.iter().any(|port| open.ports.contains(port))))
                })
        };
        if self.open.iter().any(meet) { None } else { Some(closed) }
    }
}
