//! What a Sandbox may reach, as flat data, and its compilation to what the kernel looks up.
//!
//! A flow is matched once, when it begins: address to *class*, class and service to *rule*. The rule's number stays on the
//! connection, and every later packet of either direction needs it among the numbers in force. So a change of policy is a
//! change of three maps and one set in one transaction, and what lost permission stops with it.
//!
//! ```text
//! 203.0.113.7:443/tcp ─ ranges ─▶ class 3 ─ services ─▶ rule 9f3c21aa ─ live ─▶ passes
//! ```
//! The floor is under every policy: addresses that no policy opens. It is taken out of the ranges here, and checked again
//! by both walls. Callers: the privileged side compiles; pepod and the resolver read [`Policy::named`].

mod ceiling;
mod cidr;
mod compiled;
mod floor;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::name::{HostName, Pattern};

pub use ceiling::Beyond;
pub use cidr::Cidr;
pub use compiled::{Compiled, Service};
pub use floor::{Closed, Floor, Opening};

/// Rules of one policy at most, after presets are written out.
pub const RULES: usize = 512;
/// Ports of one rule at most.
pub const PORTS: usize = 32;
/// The ports that a rule for a name opens when it says none.
pub const NAME_PORTS: [u16; 2] = [80, 443];
/// The least rate that may be set, bytes per second: below, a single full packet takes seconds.
pub const LEAST_RATE: u64 = 4096;

/// What is wrong with a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A text is no address range.
    #[error("`{text}` is no IPv4 range: {reason}")]
    Cidr {
        /// The text.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An entry is on the floor.
    #[error("entry {entry}: {range} is on the floor ({what})")]
    Floor {
        /// The entry's place in the list, from 0.
        entry: u16,
        /// What it asked for.
        range: Cidr,
        /// What the floor has there.
        what: String,
    },
    /// An entry says something that cannot be.
    #[error("entry {entry}: {reason}")]
    Entry {
        /// The entry's place in the list, from 0.
        entry: u16,
        /// What is wrong with it.
        reason: String,
    },
    /// Something about the whole.
    #[error("{0}")]
    Whole(String),
}

/// Kinds of policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Nothing, not even names.
    #[default]
    None,
    /// Every public address, and what rules open beside.
    Public,
    /// What rules open.
    Allow,
}

/// What a rule is about, of an IPv4 packet's protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP echo.
    Icmp,
}

impl Protocol {
    /// Its number in a packet.
    pub fn number(self) -> u8 {
        match self {
            Protocol::Icmp => 1,
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
        }
    }

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Protocol::Icmp => "icmp",
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        }
    }
}

/// To whom a rule opens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// A range of addresses.
    Cidr(Cidr),
    /// A name, at the addresses that our resolver finds for it.
    Domain(Pattern),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Cidr(cidr) => cidr.fmt(f),
            Target::Domain(domain) => domain.fmt(f),
        }
    }
}

/// A rule's number: what stands on the connections it allowed. It follows from what the rule says, so that a rule which
/// stays in a changed policy keeps its connections, and one that says something else never takes over another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RuleNumber(pub u32);

/// One thing that is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Which entry of the list as it was given it came from, from 0: a preset makes many.
    pub entry: u16,
    /// To whom.
    pub target: Target,
    /// By what protocol. `None`: TCP where ports are named or the target is a name; otherwise all three.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// On which ports. None: all to a range, [`NAME_PORTS`] to a name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// For a name: whether anything may be spoken to its addresses, which opens them to whoever else answers there.
    /// Otherwise the relay insists on TLS or HTTP for a name of the policy.
    #[serde(default)]
    pub any_protocol: bool,
    /// Whether it opens what is public alone, and nothing that the operator took off the floor.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub public: bool,
}

impl Rule {
    /// Its number.
    pub fn number(&self) -> RuleNumber {
        let ports: BTreeSet<u16> = self.open_ports().iter().copied().collect();
        let public = if self.public { " public" } else { "" };
        let text = format!("{} {:?} {ports:?} {}{public}", self.target, self.protocols(), self.is_relayed());
        let [a, b, c, d, ..] = <[u8; 32]>::from(Sha256::digest(text));
        // The upper half is rules', so that no class and no absent mark is ever taken for one; a quarter is relayed rules'.
        let hash = u32::from_be_bytes([a, b, c, d]) & !RELAYED_BITS;
        RuleNumber(hash | if self.is_relayed() { RELAYED_BITS } else { RULE_BIT })
    }

    /// The ports it opens; none are all.
    pub fn open_ports(&self) -> &[u16] {
        match &self.target {
            Target::Domain(_) if self.ports.is_empty() => &NAME_PORTS,
            _ => &self.ports,
        }
    }

    /// The protocols it opens.
    pub fn protocols(&self) -> &'static [Protocol] {
        match (self.protocol, &self.target) {
            (Some(Protocol::Tcp), _) | (None, Target::Domain(_)) => &[Protocol::Tcp],
            (Some(Protocol::Udp), _) => &[Protocol::Udp],
            (Some(Protocol::Icmp), _) => &[Protocol::Icmp],
            (None, Target::Cidr(_)) if !self.ports.is_empty() => &[Protocol::Tcp],
            (None, Target::Cidr(_)) => &[Protocol::Tcp, Protocol::Udp, Protocol::Icmp],
        }
    }

    /// Whether its connections pass the relay, which asks for a name of the policy.
    pub fn is_relayed(&self) -> bool {
        matches!(self.target, Target::Domain(_)) && !self.any_protocol
    }

    /// Its range, if it has one.
    fn cidr(&self) -> Option<Cidr> {
        match self.target {
            Target::Cidr(cidr) => Some(cidr),
            Target::Domain(_) => None,
        }
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |reason: String| Err(Error::Entry { entry: self.entry, reason });
        if self.ports.len() > PORTS {
            return wrong(format!("{} ports; at most {PORTS}", self.ports.len()));
        }
        if self.ports.contains(&0) {
            return wrong("there is no port 0".to_owned());
        }
        if self.protocol == Some(Protocol::Icmp) && !self.ports.is_empty() {
            return wrong("icmp has no ports".to_owned());
        }
        match &self.target {
            Target::Cidr(cidr) if self.any_protocol => {
                wrong(format!("any_protocol is for names; {cidr} is open to any protocol"))
            }
            Target::Domain(domain)
                if !self.any_protocol && matches!(self.protocol, Some(Protocol::Udp | Protocol::Icmp)) =>
            {
                let protocol = self.protocol.map_or("", Protocol::as_str);
                wrong(format!(
                    "{protocol} carries no name, so it would open every name at the addresses of {domain}; say \"any_protocol\": true if that is meant"
                ))
            }
            Target::Domain(domain)
                if self.any_protocol && self.ports.is_empty() && self.protocol != Some(Protocol::Icmp) =>
            {
                wrong(format!(
                    "any_protocol opens the addresses of {domain} to whatever is spoken there; name its ports"
                ))
            }
            Target::Domain(domain) if self.protocol == Some(Protocol::Udp) && self.ports.contains(&443) => {
                wrong(format!("udp 443 is closed to names, where it would evade the check for {domain}; use tcp"))
            }
            _ => Ok(()),
        }
    }
}

/// Set in every rule's number, in no class.
const RULE_BIT: u32 = 1 << 31;
/// Set in the number of every relayed rule; in no other are all of them.
pub const RELAYED_BITS: u32 = RULE_BIT | 1 << 30;

/// The number of what the mode `public` opens.
pub const PUBLIC: RuleNumber = RuleNumber(RULE_BIT);

/// What a Sandbox may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The kind.
    pub mode: Mode,
    /// What is open, the first that fits deciding.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
    /// How much the guest may send, bytes per second. `None`: the operator's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_bytes_per_second: Option<u64>,
    /// How much it may receive, bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress_bytes_per_second: Option<u64>,
}

impl Policy {
    /// A policy that opens every public address.
    pub fn public() -> Self {
        Policy { mode: Mode::Public, ..Policy::default() }
    }

    /// Checks everything that can be wrong with it, under that floor.
    ///
    /// # Errors
    /// The first thing that is.
    pub fn check(&self, floor: &Floor) -> Result<(), Error> {
        if self.rules.len() > RULES {
            return Err(Error::Whole(format!("{} rules; at most {RULES}", self.rules.len())));
        }
        if self.mode == Mode::None && !self.rules.is_empty() {
            return Err(Error::Whole("the mode `none` opens nothing; leave the entries out or use `allow`".to_owned()));
        }
        for (name, rate) in [("egress", self.egress_bytes_per_second), ("ingress", self.ingress_bytes_per_second)] {
            if rate.is_some_and(|rate| rate < LEAST_RATE) {
                return Err(Error::Whole(format!("{name}_bytes_per_second is below {LEAST_RATE}")));
            }
        }
        let mut numbers: BTreeMap<RuleNumber, &Rule> = BTreeMap::new();
        for rule in &self.rules {
            rule.check()?;
            if let Some(cidr) = rule.cidr()
                && let Some(closed) = floor.closes(cidr, rule)
            {
                return Err(Error::Floor { entry: rule.entry, range: cidr, what: closed.to_string() });
            }
            let number = rule.number();
            let same = numbers.insert(number, rule).is_none_or(|other| other.target == rule.target);
            if !same || number == PUBLIC {
                let reason = "its number is another entry's; change either a little".to_owned();
                return Err(Error::Entry { entry: rule.entry, reason });
            }
        }
        Ok(())
    }

    /// Whether the guest may ask for names at all.
    pub fn resolves(&self) -> bool {
        self.mode != Mode::None
    }

    /// The rules that allow this name. Under the mode `public` every name may be resolved besides.
    pub fn named<'a>(&'a self, name: &'a HostName) -> impl Iterator<Item = &'a Rule> {
        self.rules.iter().filter(move |rule| matches!(&rule.target, Target::Domain(domain) if domain.matches(name)))
    }

    /// The rule of that number.
    pub fn rule(&self, number: RuleNumber) -> Option<&Rule> {
        self.rules.iter().find(|rule| rule.number() == number)
    }

    /// Whether some rule's connections pass the relay.
    pub fn relays(&self) -> bool {
        self.rules.iter().any(Rule::is_relayed)
    }
}

#[cfg(test)]
mod tests;
