//! The only resolver a Sandbox has: asked on a socket bound in its own namespace, answering under its policy.
//!
//! Runs in pepod, without rights, since every packet here is a guest's or a stranger's. The sockets come from the privileged
//! side as descriptors; what an answer opens goes back to it as numbers, and it checks them again.
//!
//! ```text
//! guest ─▶ server ─▶ question ─▶ resolver ──▶ lines ──▶ upstream      one socket, port and number per query
//!                      │            │  ◀── chase ◀───────'            aliases followed here, bounded
//!                      ▼            ▼
//!                REFUSED, empty   open addresses, then answer
//! ```
//! Promises: under a list, a name that is not on it is REFUSED and no query leaves; no answer carries an address of the
//! floor; an address is open before its answer goes out, and for as long as the answer says; no question opens more than
//! [`ADDRESSES`] of them; everything is bounded and counted. pepod gone is a resolver that is silent.

pub mod chase;
mod lines;
pub mod question;
mod resolver;
mod server;
pub mod servers;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::net::Ipv4Addr;
use std::sync::Arc;

use super::{Floor, HostName, Mode, Policy, Rule, RuleNumber};

pub use lines::{Kind, Lines, Source};
pub use resolver::{Answered, Counts, Doors, Resolver, Shut, Tally};
pub use server::{Sockets, serve};

/// Addresses of one answer that are opened and told; an answer with more is cut to these.
pub const ADDRESSES: usize = 16;

/// Aliases followed for one question. Chains of CDNs were seen with up to six.
pub const LINKS: usize = 10;

/// Queries that one question may cost upstream, repeats not counted.
pub const HOPS: usize = 4;

/// The longest time to live that a guest is told, in seconds: a little below the longest opening.
pub const LONGEST: u32 = super::LONGEST_OPENING - GRACE;

/// The shortest that an address stays open, in seconds: who was told a time of 0 still has to connect.
pub const SHORTEST: u32 = 30;

/// How much longer than it is told an address stays open, in seconds: a guest that uses an answer in its last second.
pub const GRACE: u32 = 5;

/// One state of a policy, as the resolver needs it.
#[derive(Clone, Debug)]
pub struct Scope {
    /// What is allowed.
    pub policy: Arc<Policy>,
    /// What is not, whatever the policy says.
    pub floor: Arc<Floor>,
}

impl Scope {
    /// The rules that name that name, and so are opened for its addresses.
    ///
    /// # Errors
    /// Why it may not be looked up.
    pub fn rules(&self, name: &HostName) -> Result<Vec<RuleNumber>, Why> {
        let mut rules: Vec<RuleNumber> = self.policy.named(name).map(Rule::number).collect();
        rules.sort_unstable();
        rules.dedup();
        match self.policy.mode {
            Mode::None => Err(Why::NotListed),
            _ if !rules.is_empty() => Ok(rules),
            Mode::Allow => Err(Why::NotListed),
            Mode::Public if special(name) => Err(Why::Special),
            Mode::Public => Ok(rules),
        }
    }

    /// Whether an address may stand in an answer. What the operator opened of the floor is narrowed by port and rule where
    /// it is opened, and for good in the kernel.
    pub fn admits(&self, address: Ipv4Addr) -> bool {
        self.floor.covers(address).is_none() || self.floor.open.iter().any(|open| open.range.holds(address))
    }
}

/// Names that mean something on this host's network and nothing on the public one (RFC 6761, 6762, 7686, 8375, and the
/// reserved `internal`), and names of one label. Under `public` they are not asked for: the host's own resolver might know
/// them.
pub fn special(name: &HostName) -> bool {
    const ZONES: [&str; 9] =
        ["localhost", "local", "internal", "intranet", "home.arpa", "onion", "invalid", "localdomain", "lan"];
    name.labels() < 2 || ZONES.iter().any(|zone| name.is_within(zone)) || private_reverse(name)
}

/// Whether it asks for the name of an address that is nobody's but this network's, in either family.
fn private_reverse(name: &HostName) -> bool {
    if name.is_within("ip6.arpa") {
        return true;
    }
    let Some(front) = name.as_str().strip_suffix(".in-addr.arpa") else {
        return name.as_str() == "in-addr.arpa";
    };
    let mut octets = front.rsplit('.').map(str::parse::<u8>);
    match (octets.next(), octets.next()) {
        (Some(Ok(0 | 10 | 127 | 224..)), _) => true,
        (Some(Ok(100)), Some(Ok(64..=127)) | None)
        | (Some(Ok(169)), Some(Ok(254)) | None)
        | (Some(Ok(172)), Some(Ok(16..=31)) | None)
        | (Some(Ok(192)), Some(Ok(168)) | None)
        | (Some(Ok(198)), Some(Ok(18 | 19)) | None) => true,
        (Some(Ok(_)), None | Some(Ok(_))) => false,
        _ => true,
    }
}

/// Why a question was not answered as asked. Text for people is [`fmt::Display`], the name in counts is [`Why::as_str`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Why {
    /// No rule names it.
    NotListed,
    /// It is never public.
    Special,
    /// All its addresses are of the floor.
    Floor,
    /// Too many questions.
    Rate,
    /// The packet is no question.
    Malformed,
    /// A type of record that is not asked for here.
    Kind,
    /// Its aliases lead round in a circle.
    Loop,
    /// Its aliases lead too far.
    Chain,
    /// The answer has too many records or bytes.
    Large,
    /// The server upstream did not answer.
    Silent,
    /// It answered something else.
    Wrong,
    /// It answered that it cannot.
    Upstream,
    /// There is no server upstream.
    NoServer,
    /// Too many addresses are open, or the privileged side did not open them.
    NotOpened,
    /// The policy changed meanwhile.
    Stale,
}

impl Why {
    /// All of them, in order.
    pub const ALL: [Why; 15] = [
        Why::NotListed,
        Why::Special,
        Why::Floor,
        Why::Rate,
        Why::Malformed,
        Why::Kind,
        Why::Loop,
        Why::Chain,
        Why::Large,
        Why::Silent,
        Why::Wrong,
        Why::Upstream,
        Why::NoServer,
        Why::NotOpened,
        Why::Stale,
    ];

    /// Its name in counts and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Why::NotListed => "name_not_listed",
            Why::Special => "name_not_public",
            Why::Floor => "answer_on_floor",
            Why::Rate => "dns_rate",
            Why::Malformed => "dns_malformed",
            Why::Kind => "dns_type",
            Why::Loop => "dns_alias_loop",
            Why::Chain => "dns_alias_chain",
            Why::Large => "dns_answer_size",
            Why::Silent => "dns_upstream_silent",
            Why::Wrong => "dns_upstream_wrong",
            Why::Upstream => "dns_upstream_failed",
            Why::NoServer => "dns_no_upstream",
            Why::NotOpened => "dns_not_opened",
            Why::Stale => "policy_changed",
        }
    }

    /// Whether the policy said no, rather than the network.
    pub fn is_policy(self) -> bool {
        matches!(self, Why::NotListed | Why::Special | Why::Floor | Why::Kind)
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::NotListed => "no rule of the network policy names it",
            Why::Special => "it is not a public name",
            Why::Floor => "its addresses are private or reserved",
            Why::Rate => "too many questions",
            Why::Malformed => "not a well-formed question",
            Why::Kind => "records of this type are not looked up",
            Why::Loop => "its aliases form a loop",
            Why::Chain => "too many aliases",
            Why::Large => "the answer is too large",
            Why::Silent => "the resolver of this host does not answer",
            Why::Wrong => "the resolver of this host answered something else",
            Why::Upstream => "the resolver of this host failed",
            Why::NoServer => "this host has no resolver; set [network] dns",
            Why::NotOpened => "its addresses could not be opened",
            Why::Stale => "the network policy changed",
        })
    }
}

/// Something worth telling: bounded by who listens, never by waiting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Addresses were opened for a name.
    Opened {
        /// The name, as asked.
        name: HostName,
        /// Which.
        addresses: Vec<Ipv4Addr>,
        /// For new connections, that long.
        seconds: u32,
    },
    /// A question was refused.
    Refused {
        /// The name, if it was one.
        name: Option<HostName>,
        /// Why.
        why: Why,
    },
}
