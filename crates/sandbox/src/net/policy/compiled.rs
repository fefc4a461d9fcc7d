//! A policy as the kernel looks it up: address to class, class and service to rule.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use super::{Cidr, Floor, Mode, PUBLIC, Policy, Protocol, Rule, RuleNumber};

/// Ports on which resolvers answer. A rule opens them by naming them.
pub(super) const RESOLVER_PORTS: [u16; 2] = [53, 853];
/// Addresses at which public resolvers answer on 443 too. Under `allow` a rule opens them there by naming the address.
pub(super) const RESOLVERS: [Ipv4Addr; 14] = [
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
        let fits = |rule: &&&Rule| {
            floor.admits_to(rule, address, protocol, port) && rule_allows(rule, address, protocol, port, mode)
        };
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
pub(super) fn rule_allows(rule: &Rule, address: Ipv4Addr, protocol: Protocol, port: u16, mode: Mode) -> bool {
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
