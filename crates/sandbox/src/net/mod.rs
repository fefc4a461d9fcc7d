//! The network boundary: what a Sandbox may reach, decided on the host where its guest cannot touch it.
//!
//! ```text
//! guest ── tap ─┤ namespace of the Sandbox ├─ veth ─┤ the host's namespace ├─ uplink
//!               │ netdev ingress: IPv4, one │        │ one static table:     │
//!               │ MAC, one address          │        │ floor, own addresses, │
//!               │ input, forward, output:   │        │ no way in, none from  │
//!               │ drop but for rules in     │        │ one Sandbox to another│
//!               │ force; DNS by us alone    │        └───────────────────────┘
//!               └───────────────────────────┘
//! ```
//! Two walls, each whole without the other. `policy` says what is open and compiles it, with the floor, to what the kernel
//! looks up; `address` gives every name and address of a slot as a function of tag, block and id. Nothing of a guest is
//! decoded on this side: the kernel does that, and for names a process without rights.
//!
//! # Names
//!
//! The resolver's two sockets are bound to [`address::GATEWAY`] port 53 in the Sandbox's namespace by the privileged side
//! and handed to pepod. For each address that it finds for a rule ([`Policy::named`]) it asks for an [`Opened`] before its
//! answer goes out; one of a rule that is no longer in force, or on the floor, is refused. An opening admits new flows
//! until its time is over; flows that have begun go on while their rule is in force.
//!
//! New TCP flows from the guest to an address opened by a rule that [`Rule::is_relayed`] are redirected to the relay's
//! socket, [`address::GATEWAY`] port [`RELAY_PORT`] (`SO_ORIGINAL_DST` tells where they were going). The relay runs in the
//! Sandbox's namespace under its fourth uid; as that uid it may begin flows to addresses and ports opened for relayed
//! rules, and ask our resolver, and nothing else.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

pub mod address;
pub mod dns;
pub mod name;
pub mod policy;
pub mod relay;

pub use name::{HostName, Pattern};
pub use policy::{Cidr, Compiled, Floor, Mode, Policy, Protocol, Rule, RuleNumber, Target};

/// Where the relay listens in the Sandbox's namespace.
pub const RELAY_PORT: u16 = 8443;

/// The longest time for which one answer opens an address, in seconds.
pub const LONGEST_OPENING: u32 = 3600;

/// An address that our resolver found for a name that a rule allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Opened {
    /// The rule.
    pub rule: RuleNumber,
    /// The address: it opens on the rule's ports.
    pub address: Ipv4Addr,
    /// For how long, in seconds, 1 to [`LONGEST_OPENING`].
    pub ttl_seconds: u32,
}
