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

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::name::{HostName, Pattern};

/// Rules of one policy at most, after presets are written out.
pub const RULES: usize = 512;
/// Ports of one rule at most.
pub const PORTS: usize = 32;
/// The ports that a rule for a name opens when it says none.
pub const NAME_PORTS: [u16; 2] = [80, 443];
/// The least rate that may be set, bytes per second: below, a single full packet takes seconds.
pub const LEAST_RATE: u64 = 4096;

/// Ports on which resolvers answer. A rule opens them by naming them.
const RESOLVER_PORTS: [u16; 2] = [53, 853];
/// Addresses at which public resolvers answer on 443 too. Under `allow` a rule opens them there by naming the address.
const RESOLVERS: [Ipv4Addr; 14] = [
    Ipv4Addr::new(1, 0, 0, 1),
    Ipv4Addr::new(1, 0, 0, 2),
    Ipv4Addr::new(1, 0, 0, 3),
    Ipv4Addr::new(1, 1, 1, 1),
    Ipv4Addr::new(1, 1, 1, 2),
    Ipv4Addr::new(1, 1, 1, 3),
    Ipv4Addr::new(8, 8, 4, 4),
    Ipv4Addr::new(8, 8, 8, 8),
    Ipv4Addr::new(9, 9, 9, 9),
    Ipv4Addr::new(94, 140, 14, 14),
    Ipv4Addr::new(94, 140, 15, 15),
    Ipv4Addr::new(149, 112, 112, 112),
    Ipv4Addr::new(208, 67, 220, 220),
    Ipv4Addr::new(208, 67, 222, 222),
];

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
}

impl Rule {
    /// Its number.
    pub fn number(&self) -> RuleNumber {
        let ports: BTreeSet<u16> = self.open_ports().iter().copied().collect();
        let text = format!("{} {:?} {ports:?} {}", self.target, self.protocols(), self.is_relayed());
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

    /// Whether a rule may reach that.
    pub fn admits(&self, address: Ipv4Addr, protocol: Protocol, port: u16) -> bool {
        self.covers(address).is_none() || self.open.iter().any(|open| open.opens(address, protocol, port))
    }

    /// What leaves nothing of a rule to that range. One that is only partly on the floor is open where it is not.
    fn closes(&self, range: Cidr, rule: &Rule) -> Option<&Closed> {
        let closed = self.closed.iter().find(|closed| closed.range.holds_all(range))?;
        let meet = |open: &Opening| {
            (open.range.holds_all(range) || range.holds_all(open.range))
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

/// Services of a class: disjoint ranges of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Service {
    /// The class.
    pub class: u32,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Its first port.
    pub first: u16,
    /// Its last.
    pub last: u16,
    /// What allows it.
    pub rule: RuleNumber,
}

/// A policy as the kernel looks it up. Names are not in it: the resolver adds their addresses as it finds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    /// Disjoint ranges of addresses, ascending, each with its class.
    pub ranges: Vec<(Ipv4Addr, Ipv4Addr, u32)>,
    /// What is open in a class.
    pub services: Vec<Service>,
    /// Classes that may be pinged, and by what rule.
    pub pings: Vec<(u32, RuleNumber)>,
    /// The numbers in force.
    pub live: BTreeSet<RuleNumber>,
    /// Whether the guest may ask our resolver.
    pub resolves: bool,
    /// Whether there is a rule whose connections are relayed.
    pub relays: bool,
}

/// What is open at an address: for TCP and UDP the ranges of ports with their rules, and the rule for ICMP.
type Open = (Vec<(Protocol, u16, u16, RuleNumber)>, Option<RuleNumber>);

impl Compiled {
    /// Compiles a policy over a floor.
    pub fn new(policy: &Policy, floor: &Floor) -> Self {
        let mut compiled = Compiled {
            live: policy.rules.iter().map(Rule::number).collect(),
            resolves: policy.resolves(),
            relays: policy.relays(),
            ..Compiled::default()
        };
        if policy.mode == Mode::Public {
            compiled.live.insert(PUBLIC);
        }
        let rules: Vec<(Cidr, &Rule)> = policy.rules.iter().filter_map(|rule| Some((rule.cidr()?, rule))).collect();
        // Between two neighbours of these, all addresses are alike.
        let mut bounds = BTreeSet::from([0, 1 << 32]);
        let ranges = rules.iter().map(|(cidr, _)| *cidr);
        let ranges = ranges.chain(floor.closed.iter().map(|closed| closed.range));
        let ranges = ranges.chain(floor.open.iter().map(|open| open.range));
        let ranges = ranges.chain(RESOLVERS.map(|address| Cidr::containing(address, 32)));
        for range in ranges {
            bounds.extend([u64::from(range.first().to_bits()), u64::from(range.last().to_bits()) + 1]);
        }
        let mut classes: BTreeMap<Open, u32> = BTreeMap::new();
        let mut bounds = bounds.into_iter().peekable();
        while let (Some(first), Some(next)) = (bounds.next(), bounds.peek().copied()) {
            let address = |bits: u64| Ipv4Addr::from_bits(u32::try_from(bits).unwrap_or(u32::MAX));
            let (first, last) = (address(first), address(next - 1));
            let open = open_at(first, policy.mode, &rules, floor);
            if open.0.is_empty() && open.1.is_none() {
                continue;
            }
            let number = classes.len() as u32 + 1;
            // Each rule, floor and opening has two ends: 16 bits hold the classes that RULES can make.
            let class = *classes.entry(open).or_insert(number);
            match compiled.ranges.last_mut() {
                Some(before) if before.2 == class && before.1.to_bits().checked_add(1) == Some(first.to_bits()) => {
                    before.1 = last;
                }
                _ => compiled.ranges.push((first, last, class)),
            }
        }
        for ((services, ping), class) in classes {
            let service = |(protocol, first, last, rule)| Service { class, protocol, first, last, rule };
            compiled.services.extend(services.into_iter().map(service));
            compiled.pings.extend(ping.map(|rule| (class, rule)));
        }
        compiled.services.sort_unstable();
        compiled.pings.sort_unstable();
        compiled
    }

    /// What allows a new flow, as the kernel finds it. For ICMP echo the port is 0.
    pub fn allows(&self, address: Ipv4Addr, protocol: Protocol, port: u16) -> Option<RuleNumber> {
        let (.., class) = self.ranges.iter().find(|(first, last, _)| (*first..=*last).contains(&address))?;
        let rule = match protocol {
            Protocol::Icmp => self.pings.iter().find(|(of, _)| of == class)?.1,
            _ => {
                let fits =
                    |s: &&Service| s.class == *class && s.protocol == protocol && (s.first..=s.last).contains(&port);
                self.services.iter().find(fits)?.rule
            }
        };
        self.live.contains(&rule).then_some(rule)
    }
}

/// What is open at that address.
fn open_at(address: Ipv4Addr, mode: Mode, rules: &[(Cidr, &Rule)], floor: &Floor) -> Open {
    let closed = floor.covers(address).is_some();
    let rules: Vec<&Rule> = rules.iter().filter(|(cidr, _)| cidr.holds(address)).map(|(_, rule)| *rule).collect();
    let public = mode == Mode::Public && !closed;
    if rules.is_empty() && !public {
        return (Vec::new(), None);
    }
    let decide = |protocol, port| {
        if !floor.admits(address, protocol, port) {
            return None;
        }
        let fits = |rule: &&&Rule| rule_allows(rule, address, protocol, port, mode);
        rules.iter().find(fits).map(|rule| rule.number()).or(public.then_some(PUBLIC))
    };
    let mut services = Vec::new();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let mut bounds = BTreeSet::from([1u32, 1 << 16]);
        let ports = rules.iter().flat_map(|rule| &rule.ports).chain(floor.open.iter().flat_map(|open| &open.ports));
        for port in ports.chain(&RESOLVER_PORTS).chain(&[443]) {
            bounds.extend([u32::from(*port), u32::from(*port) + 1]);
        }
        let mut bounds = bounds.into_iter().peekable();
        while let (Some(first), Some(next)) = (bounds.next(), bounds.peek().copied()) {
            let port = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
            let (first, last) = (port(first), port(next - 1));
            let Some(rule) = decide(protocol, first) else { continue };
            match services.last_mut() {
                Some((p, _, end, r)) if *p == protocol && *r == rule && *end + 1 == first => *end = last,
                _ => services.push((protocol, first, last, rule)),
            }
        }
    }
    (services, decide(Protocol::Icmp, 0))
}

/// Whether a rule for a range that holds the address opens it there, the floor aside.
fn rule_allows(rule: &Rule, address: Ipv4Addr, protocol: Protocol, port: u16, mode: Mode) -> bool {
    if !rule.protocols().contains(&protocol) {
        return false;
    }
    if protocol == Protocol::Icmp {
        return true;
    }
    if !rule.ports.is_empty() && !rule.ports.contains(&port) {
        return false;
    }
    // Another resolver answers names that are not on the list: it has to be meant.
    let resolver = RESOLVER_PORTS.contains(&port) && rule.ports.is_empty()
        || port == 443 && RESOLVERS.contains(&address) && rule.cidr().is_none_or(|cidr| cidr.prefix() < 32);
    !(resolver && mode == Mode::Allow)
}

#[cfg(test)]
mod tests;
