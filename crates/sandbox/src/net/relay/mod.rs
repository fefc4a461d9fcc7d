//! The relay of one Sandbox: lets a connection to a named address through only if it names a name that the policy has.
//!
//! An address says nothing about who answers there: thousands of sites share one. So new connections that a rule for a name
//! opened are redirected to this process, which reads the name in the TLS greeting or in each HTTP request, asks pepod, and
//! connects to the address that our resolver found for that name. It decrypts nothing.
//!
//! ```text
//! guest ──▶ kernel redirects ──▶ pepo-relay ── name, address it wanted ──▶ pepod (attend)
//!                                    │ ◀──────── address, or why not ──────┘
//!                                    └──▶ connects from the Sandbox's own namespace, under its policy
//! ```
//! A process without rights, in the Sandbox's cgroup, pid and network namespace, with an empty root and a list of system
//! calls: what it reads a guest chose. What it may connect to is still the kernel's to say, by its uid.
//!
//! What it cannot see: what is asked inside of TLS. Whoever answers for an allowed name may serve another name's pages to
//! those who ask there, as some networks for content do.

mod attend;
mod control;
mod enter;
mod filter;
pub mod hello;
pub mod http;
mod pass;

use std::fmt;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::HostName;
use hello::Bad;

pub use attend::{Event, attend};
pub use enter::run;
pub(crate) use enter::{Order, Said};

/// Connections of one Sandbox at once. Each may hold 2 × 32 KiB that its slower side has not taken.
pub const CONNECTIONS: usize = 512;

/// The longest message on the control stream, bytes.
const MESSAGE: usize = 2048;

/// How a connection named its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// In a TLS greeting.
    Tls,
    /// In the open part of a TLS greeting that has another one encrypted in it.
    TlsOuter,
    /// In an HTTP request.
    Http,
}

/// Why a connection was not let through. Text for people is [`fmt::Display`], the name in counts is [`Barred::as_str`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Barred {
    /// No rule for this port names the name.
    Name,
    /// A rule names it, and it is not the one that opened the address.
    Rule,
    /// All its addresses are of the floor.
    Floor,
    /// It has no address now.
    Lookup,
    /// Neither TLS nor HTTP.
    Protocol,
    /// TLS or HTTP that is malformed, or can be read in two ways.
    Malformed,
    /// A greeting or head longer than anybody needs.
    Long,
    /// It says no name, or another than before.
    NoName,
    /// It says nothing for too long.
    Slow,
    /// Too many connections.
    Busy,
    /// pepod does not answer.
    Away,
    /// The server does not answer.
    Unreachable,
}

impl Barred {
    /// All of them.
    pub const ALL: [Barred; 12] = [
        Barred::Name,
        Barred::Rule,
        Barred::Floor,
        Barred::Lookup,
        Barred::Protocol,
        Barred::Malformed,
        Barred::Long,
        Barred::NoName,
        Barred::Slow,
        Barred::Busy,
        Barred::Away,
        Barred::Unreachable,
    ];

    /// Its name in counts and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Barred::Name => "name_not_listed",
            Barred::Rule => "name_of_other_rule",
            Barred::Floor => "answer_on_floor",
            Barred::Lookup => "name_without_address",
            Barred::Protocol => "relay_protocol",
            Barred::Malformed => "relay_malformed",
            Barred::Long => "relay_too_long",
            Barred::NoName => "relay_no_name",
            Barred::Slow => "relay_slow",
            Barred::Busy => "relay_connections",
            Barred::Away => "relay_no_answer",
            Barred::Unreachable => "relay_unreachable",
        }
    }
}

impl fmt::Display for Barred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Barred::Name => "no rule of the network policy names it on this port",
            Barred::Rule => "its rule is not the one that opened this address",
            Barred::Floor => "its addresses are private or reserved",
            Barred::Lookup => "it has no address",
            Barred::Protocol => "only TLS and HTTP/1 carry the name that the network policy asks for; see any_protocol",
            Barred::Malformed => "the request cannot be read in one way only",
            Barred::Long => "the request is too long",
            Barred::NoName => "the request does not say the one name the connection is for",
            Barred::Slow => "no request came",
            Barred::Busy => "too many connections",
            Barred::Away => "the network policy cannot be asked now",
            Barred::Unreachable => "its server does not answer",
        })
    }
}

impl From<Bad> for Barred {
    fn from(bad: Bad) -> Self {
        match bad {
            Bad::Protocol => Barred::Protocol,
            Bad::Malformed => Barred::Malformed,
            Bad::Long => Barred::Long,
            Bad::NoName => Barred::NoName,
        }
    }
}

/// What a relay says to pepod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Word {
    /// May this connection go on, and whereto?
    Ask {
        /// Chosen by the relay; the answer carries it.
        seq: u32,
        /// The name it names.
        name: HostName,
        /// Where it was going.
        to: Ipv4Addr,
        /// On which port.
        port: u16,
        /// How it names it.
        by: By,
    },
    /// One was refused without asking.
    Barred {
        /// Why.
        why: Barred,
        /// The name, if it got that far.
        name: Option<HostName>,
        /// Where it was going, if that is known.
        to: Option<Ipv4Addr>,
        /// On which port.
        port: u16,
    },
    /// One that went on has ended.
    Ended {
        /// Its name.
        name: HostName,
        /// Where it went.
        address: Ipv4Addr,
        /// On which port.
        port: u16,
        /// Bytes from the guest.
        sent: u64,
        /// Bytes to the guest.
        received: u64,
    },
}

/// What pepod answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Verdict {
    /// Connect there.
    Go {
        /// The question's.
        seq: u32,
        /// Where.
        address: Ipv4Addr,
    },
    /// Do not.
    No {
        /// The question's.
        seq: u32,
        /// Why.
        why: Barred,
    },
    /// The policy is another now: ask once more for every connection, and end those that may not be any more. The kernel
    /// lets none of their packets pass already.
    Again,
}
