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
//! rules, and nothing else: for names it asks whoever it was started by.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

pub mod address;
pub mod dns;
pub mod name;
pub(crate) mod netlink;
pub mod nft;
pub mod policy;
pub mod relay;
pub mod slot;
pub(crate) mod wall;

pub use name::{HostName, Pattern};
pub use policy::{Cidr, Compiled, Floor, Mode, Policy, Protocol, Rule, RuleNumber, Target};
pub use slot::{Refused, Traffic};

/// Takes an instance's wall in the host's namespace down: when no Sandbox is left behind it. One that does not stand is
/// down.
///
/// # Errors
/// The kernel's.
pub fn remove_wall(tag: crate::id::Tag) -> std::io::Result<()> {
    // Asked first: where it does not stand there may be no nftables to speak to either.
    if wall::stands(tag) { wall::remove(tag) } else { Ok(()) }
}

/// Whether this host can guard a network: makes all of one Sandbox's, with nobody in it, and throws it away.
///
/// # Errors
/// What it cannot do.
pub fn probe() -> Result<(), impl std::error::Error> {
    slot::probe()
}

/// Chains of others in the host's namespace that drop whatever is forwarded and not allowed by them, and say nothing of
/// links of ours: as `nft` names them (family, table, chain).
///
/// # Errors
/// The rules cannot be read.
pub fn dropping_forward_chains() -> Result<Vec<String>, String> {
    let listed = nft::run(&["-j", "list", "chains"], "").map_err(|error| error.to_string())?;
    let listed: serde_json::Value = serde_json::from_str(&listed).map_err(|error| error.to_string())?;
    let mut dropping = Vec::new();
    for chain in listed["nftables"].as_array().into_iter().flatten().map(|one| &one["chain"]) {
        let text = |key: &str| chain[key].as_str().unwrap_or_default();
        if text("hook") != "forward" || text("policy") != "drop" {
            continue;
        }
        let name = [text("family"), text("table"), text("name")];
        let rules = nft::run(&["list", "chain", name[0], name[1], name[2]], "").unwrap_or_default();
        if !rules.contains("\"pp") {
            dropping.push(name.join(" "));
        }
    }
    Ok(dropping)
}

/// The commands that let Sandboxes through such a chain: what they send, and what comes back to them. What they may reach
/// is decided by the walls all the same.
pub fn forward_rules(chain: &str) -> String {
    format!(
        "nft insert rule {chain} iifname \"pp*\" accept; nft insert rule {chain} oifname \"pp*\" ct state established,related accept"
    )
}

/// What every Sandbox of an instance may do at most, whatever its policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Connections at once. All Sandboxes together may take half of what the host's kernel tracks.
    pub connections: u32,
    /// New flows a second; twice that in a burst.
    pub flows_per_second: u32,
    /// Packets a second from the guest.
    pub packets_per_second: u32,
    /// Questions for names a second; four times that in a burst.
    pub questions_per_second: u32,
    /// Bytes a second from the guest, where its policy says nothing.
    pub egress_bytes_per_second: Option<u64>,
    /// Bytes a second to the guest, where its policy says nothing.
    pub ingress_bytes_per_second: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            // A browser or a package manager has some hundreds; 128 Sandboxes of this many are half of a usual kernel's table.
            connections: 1024,
            flows_per_second: 200,
            // A gigabit of full packets is 83,000; a guest hands over segments of up to 64 KiB.
            packets_per_second: 50_000,
            questions_per_second: 100,
            egress_bytes_per_second: None,
            ingress_bytes_per_second: None,
        }
    }
}

/// What the operator says about the network: [`Limits`] and the [`Floor`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Addresses that no policy opens.
    pub floor: Floor,
    /// What every Sandbox may do at most.
    pub limits: Limits,
    /// Who is asked for names; none: this host's own resolvers.
    #[serde(default)]
    pub dns: Vec<SocketAddr>,
}

/// Where the relay listens in the Sandbox's namespace.
pub const RELAY_PORT: u16 = 8443;

/// The longest time for which one answer opens an address, in seconds.
pub const LONGEST_OPENING: u32 = 3600;

/// Openings in one request at most.
pub const OPENED: usize = 64;

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
