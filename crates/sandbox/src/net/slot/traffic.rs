//! What a Sandbox's network carried and refused, as the counters of its wall say.

use std::io;

use netlink_packet_netfilter::NetfilterProtoFamily;
use serde::{Deserialize, Serialize};

use crate::net::address::TABLE;
use crate::net::netlink::tables::{Count, Tables};

/// What a Sandbox's network carried and refused since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes the guest sent to somebody.
    pub sent_bytes: u64,
    /// Packets.
    pub sent_packets: u64,
    /// Bytes it received.
    pub received_bytes: u64,
    /// Packets.
    pub received_packets: u64,
    /// Connections that left the Sandbox.
    pub connections: u64,
    /// What was refused.
    pub refused: Refused,
}

/// Packets refused, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// No rule of the policy is for it.
    pub unlisted: u64,
    /// It is on the floor.
    pub floor: u64,
    /// Its rule is no longer in force.
    pub revoked: u64,
    /// Too many connections at once.
    pub connections: u64,
    /// Too many new ones a second.
    pub rate: u64,
    /// Too many packets a second.
    pub packets: u64,
    /// Too many questions for names a second.
    pub questions: u64,
    /// Sent from another's address.
    pub spoofed: u64,
    /// Not IPv4 to the next hop, or of no known flow.
    pub malformed: u64,
    /// Begun from outside.
    pub inbound: u64,
}

impl Traffic {
    /// Reads the counters of the wall inside.
    pub(super) fn read(tables: &mut Tables) -> io::Result<Self> {
        let flows = tables.counters(NetfilterProtoFamily::Inet, TABLE)?;
        let link = tables.counters(NetfilterProtoFamily::NetDev, TABLE)?;
        let count = |name: &str| flows.get(name).copied().unwrap_or_default();
        let packets = |name: &str| link.get(name).copied().unwrap_or_default().packets;
        let (Count { packets: sent_packets, bytes: sent_bytes }, received) = (count("sent"), count("received"));
        Ok(Traffic {
            sent_bytes,
            sent_packets,
            received_bytes: received.bytes,
            received_packets: received.packets,
            connections: count("connections").packets,
            refused: Refused {
                unlisted: count("unlisted").packets,
                floor: count("floor").packets,
                revoked: count("revoked").packets,
                connections: count("crowded").packets,
                rate: count("hasty").packets,
                packets: packets("flood"),
                questions: count("asking").packets,
                spoofed: packets("spoofed"),
                malformed: packets("odd") + count("odd").packets,
                inbound: count("inbound").packets,
            },
        })
    }
}
