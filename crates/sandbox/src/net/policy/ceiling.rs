//! One policy under another: what both allow, as a policy again, so that nobody further down has to know of two.
//!
//! Each policy is a list of things that are open: its rules, and with the mode `public` all public addresses. What both
//! allow is every pair of them, met: of two ranges or patterns the narrower, of protocols and ports the common ones. A pair
//! that has nothing in common leaves nothing; a range that only a name allows, or a name that only a range allows, neither.
//! A rule that the ceiling does not narrow stays itself, number and connections included.

use std::collections::BTreeSet;

use super::compiled::{RESOLVER_PORTS, RESOLVERS};
use super::{Floor, Mode, Policy, Protocol, Rule, Target};
use crate::net::Pattern;
use crate::net::dns::special;

/// What of a policy is not within its ceiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beyond {
    /// Its mode opens more.
    Mode,
    /// A rule of that entry.
    Entry(u16),
    /// Bytes a second from the guest.
    Egress {
        /// The most.
        most: u64,
    },
    /// Bytes a second to the guest.
    Ingress {
        /// The most.
        most: u64,
    },
}

impl Policy {
    /// What both this and `ceiling` allow.
    pub fn under(&self, ceiling: &Policy, floor: &Floor) -> Policy {
        let mode = match (self.mode, ceiling.mode) {
            (Mode::None, _) | (_, Mode::None) => return Policy::default(),
            (Mode::Public, Mode::Public) => Mode::Public,
            _ => Mode::Allow,
        };
        let mut rules = Vec::new();
        // Under two `public` that of a rule which is public is open anyhow.
        let public = |of: Mode, rule: &Rule| if of == mode { None } else { public_part(rule, floor) };
        for rule in &self.rules {
            if ceiling.mode == Mode::Public {
                rules.extend(public(Mode::Public, rule));
            }
            rules.extend(ceiling.rules.iter().filter_map(|other| meet(rule, self.mode, other, ceiling.mode)));
        }
        if self.mode == Mode::Public {
            rules.extend(ceiling.rules.iter().filter_map(|rule| public(Mode::Public, rule)));
        }
        let mut seen = BTreeSet::new();
        rules.retain(|rule| {
            let leaves_something = rule.cidr().is_none_or(|cidr| floor.closes(cidr, rule).is_none());
            leaves_something && seen.insert(rule.number())
        });
        let least = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min();
        Policy {
            mode,
            rules,
            egress_bytes_per_second: least(self.egress_bytes_per_second, ceiling.egress_bytes_per_second),
            ingress_bytes_per_second: least(self.ingress_bytes_per_second, ceiling.ingress_bytes_per_second),
        }
    }

    /// The first thing of this that `ceiling` does not allow whole. Of a range that is public in part, that part is asked about.
    pub fn beyond(&self, ceiling: &Policy, floor: &Floor) -> Option<Beyond> {
        match (self.mode, ceiling.mode) {
            (Mode::None, _) => return None,
            (Mode::Public, Mode::None | Mode::Allow) => return Some(Beyond::Mode),
            (Mode::Allow, Mode::None) if !self.rules.is_empty() => return Some(Beyond::Mode),
            _ => {}
        }
        if let Some(rule) = self.rules.iter().find(|rule| !is_within(rule, self.mode, ceiling, floor)) {
            return Some(Beyond::Entry(rule.entry));
        }
        let over =
            |wanted: Option<u64>, most: Option<u64>| most.filter(|most| wanted.is_some_and(|wanted| wanted > *most));
        let egress = over(self.egress_bytes_per_second, ceiling.egress_bytes_per_second);
        let ingress = over(self.ingress_bytes_per_second, ceiling.ingress_bytes_per_second);
        egress.map(|most| Beyond::Egress { most }).or(ingress.map(|most| Beyond::Ingress { most }))
    }
}

/// Whether a ceiling allows the whole of a rule.
fn is_within(rule: &Rule, mode: Mode, ceiling: &Policy, floor: &Floor) -> bool {
    if ceiling.mode == Mode::Public && public_part(rule, floor).is_some() {
        return true;
    }
    // By parts: one entry may allow one port, another the next.
    let allowed =
        |part: Rule| {
            ceiling.rules.iter().filter_map(|other| meet(&part, mode, other, ceiling.mode)).any(|met| {
                met.target == part.target && met.ports == part.ports && met.any_protocol == part.any_protocol
            })
        };
    rule.protocols().iter().all(|protocol| {
        let part = |ports| Rule { protocol: Some(*protocol), ports, ..rule.clone() };
        match rule.open_ports() {
            _ if *protocol == Protocol::Icmp => allowed(part(Vec::new())),
            [] => allowed(part(Vec::new())),
            ports => ports.iter().all(|port| allowed(part(vec![*port]))),
        }
    })
}

/// What of a rule is public.
fn public_part(rule: &Rule, floor: &Floor) -> Option<Rule> {
    let public = match &rule.target {
        Target::Cidr(cidr) if floor.closed.iter().any(|closed| closed.range.holds_all(*cidr)) => return None,
        Target::Cidr(cidr) => floor.open.iter().any(|open| open.range.holds_all(*cidr) || cidr.holds_all(open.range)),
        Target::Domain(Pattern::Exactly(name) | Pattern::Below(name)) if special(name) => return None,
        Target::Domain(_) => !floor.open.is_empty(),
    };
    Some(Rule { public: rule.public || public, ..rule.clone() })
}

/// What two rules allow both, each by the meaning that it has in its own policy.
fn meet(rule: &Rule, mode: Mode, other: &Rule, others: Mode) -> Option<Rule> {
    let target = match (&rule.target, &other.target) {
        (Target::Cidr(one), Target::Cidr(two)) if one.holds_all(*two) => Target::Cidr(*two),
        (Target::Cidr(one), Target::Cidr(two)) if two.holds_all(*one) => Target::Cidr(*one),
        (Target::Domain(one), Target::Domain(two)) if one.covers(two) => Target::Domain(two.clone()),
        (Target::Domain(one), Target::Domain(two)) if two.covers(one) => Target::Domain(one.clone()),
        _ => return None,
    };
    // All three, or one.
    let protocol = match (rule.protocols(), other.protocols()) {
        (all, same) if all.len() > 1 && same.len() > 1 => None,
        (one, two) => Some(*one.iter().find(|protocol| two.contains(protocol))?),
    };
    let ports = match protocol {
        Some(Protocol::Icmp) => Vec::new(),
        _ => common_ports(rule, mode, other, others)?,
    };
    let met = Rule {
        entry: rule.entry,
        target,
        protocol,
        ports,
        any_protocol: rule.any_protocol && other.any_protocol,
        public: rule.public || other.public,
    };
    without_resolvers(met, &[(rule, mode), (other, others)])
}

/// The ports of both; none are all.
fn common_ports(rule: &Rule, mode: Mode, other: &Rule, others: Mode) -> Option<Vec<u16>> {
    // A list of names does not open resolvers' ports to a range that does not name them.
    let all_but = |mode: Mode, ports: &[u16]| -> Vec<u16> {
        ports.iter().copied().filter(|port| mode != Mode::Allow || !RESOLVER_PORTS.contains(port)).collect()
    };
    let common = match (rule.open_ports(), other.open_ports()) {
        ([], []) => return Some(Vec::new()),
        ([], ports) => all_but(mode, ports),
        (ports, []) => all_but(others, ports),
        (one, two) => one.iter().copied().filter(|port| two.contains(port)).collect(),
    };
    (!common.is_empty()).then_some(common)
}

/// A public resolver's own address opens its 443 under `allow`; a range around it does not, so neither do both together.
fn without_resolvers(mut met: Rule, of: &[(&Rule, Mode)]) -> Option<Rule> {
    let is_resolver = |cidr: super::Cidr| cidr.prefix() == 32 && RESOLVERS.contains(&cidr.first());
    let around =
        |(rule, mode): &(&Rule, Mode)| *mode == Mode::Allow && rule.cidr().is_some_and(|cidr| cidr.prefix() < 32);
    if met.protocol == Some(Protocol::Icmp) || !met.cidr().is_some_and(is_resolver) || !of.iter().any(around) {
        return Some(met);
    }
    let named = met.ports.len();
    met.ports.retain(|port| *port != 443);
    // All ports but one cannot be said: none of them.
    (named > 0 && !met.ports.is_empty()).then_some(met)
}
