//! Names and addresses of a slot: functions of the instance's tag and block and the Sandbox's id, so that a release finds
//! them again and no two are ever the same on one host.
//!
//! ```text
//! guest eth0       192.0.0.2/29, the same in every Sandbox      MAC 02:70:65:70:6f:02
//! tap's end        192.0.0.1: next hop, DNS                      MAC 02:70:65:70:6f:01
//! veth, inside     244.0.0.0/10 | block << 14 | slot: what the guest is translated to, one per slot of the machine
//! veth, host's end no address: next hop only
//! ```
//! 192.0.0.0/29 was set aside for exactly such a translation inside one machine (RFC 7335) and lies on the floor, so nobody
//! has to reach it. The addresses between the walls come from class E: no network, VPN or container engine uses it, Linux
//! routes it, and they never leave the host, which translates them once more.

use std::net::Ipv4Addr;

use pepo_proto::Network;

use crate::id::{Names, SandboxId, Slot, Tag, UidBlock};

use super::policy::Cidr;

/// The guest's address, in every Sandbox.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);
/// Its next hop and its resolver: the tap's end in the Sandbox's namespace.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 1);
/// The length of the prefix that both lie in.
pub const GUEST_PREFIX: u8 = 29;
/// The guest's hardware address.
pub const GUEST_MAC: Mac = Mac([0x02, 0x70, 0x65, 0x70, 0x6f, 0x02]);
/// The tap's.
pub const GATEWAY_MAC: Mac = Mac([0x02, 0x70, 0x65, 0x70, 0x6f, 0x01]);
/// The next hop of a namespace to the host: nobody has this address, a static neighbour leads to the host's end.
pub const HOST_END: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 6);
/// The tap's name in the namespace.
pub const TAP: &str = "tap";
/// The veth's name in the namespace.
pub const UPLINK: &str = "up";
/// The table in the namespace.
pub const TABLE: &str = "pepo";
/// The set of connections counted by Sandbox in the table of the host's namespace.
pub const TRACKED: &str = "tracked";
/// Where namespaces are pinned, as `ip netns` expects them.
pub const NAMESPACES: &str = "/run/netns";

/// The machine's range for the addresses between the walls: one /18 for each block.
const RANGE: u32 = 0xF400_0000;
/// Bits of a slot's number.
const SLOT_BITS: u32 = 14;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl std::fmt::Display for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The guest's network, as it is told.
pub fn guest_network(mtu: u32) -> Network {
    let [a, b, c, d, e, f] = GATEWAY_MAC.0;
    Network {
        address: GUEST.to_bits(),
        prefix: GUEST_PREFIX,
        gateway: GATEWAY.to_bits(),
        gateway_mac: u64::from_be_bytes([0, 0, a, b, c, d, e, f]),
        mtu,
    }
}

/// The address of a slot between the walls.
pub fn of_slot(block: UidBlock, slot: Slot) -> Ipv4Addr {
    Ipv4Addr::from_bits(RANGE | u32::from(block.index) << SLOT_BITS | u32::from(slot.number()))
}

/// All of an instance's addresses between the walls.
pub fn of_block(block: UidBlock) -> Cidr {
    let first = Ipv4Addr::from_bits(RANGE | u32::from(block.index) << SLOT_BITS);
    Cidr::containing(first, 32 - SLOT_BITS as u8)
}

/// Hardware address of a slot's veth inside its namespace.
pub fn inside_mac(slot: Slot) -> Mac {
    let [high, low] = slot.number().to_be_bytes();
    Mac([0x02, 0x70, 0x70, high, low, 0x01])
}

/// Hardware address of a slot's veth in the host's namespace.
pub fn outside_mac(slot: Slot) -> Mac {
    let [high, low] = slot.number().to_be_bytes();
    Mac([0x02, 0x70, 0x70, high, low, 0x02])
}

/// What every veth of that instance begins with, in the host's namespace.
pub fn veth_prefix(tag: Tag) -> String {
    format!("pp{tag}")
}

/// The slot whose veth has that name, if it is one of the tag's.
pub fn slot_of_veth(tag: Tag, name: &str) -> Option<Slot> {
    let hex = name.strip_prefix(&veth_prefix(tag)).filter(|hex| hex.len() == 4)?;
    Slot::new(u16::from_str_radix(hex, 16).ok()?)
}

/// The table in the host's namespace.
pub fn host_table(tag: Tag) -> String {
    format!("pepo_{tag}")
}

impl Names {
    /// Its veth in the host's namespace: 10 of at most 15 bytes.
    pub fn veth(self) -> String {
        format!("{}{:04x}", veth_prefix(self.tag), self.id.slot().number())
    }

    /// Its network namespace, below [`NAMESPACES`].
    pub fn namespace(self) -> String {
        format!("{}{}", Self::namespace_prefix(self.tag), self.id.hex())
    }

    /// What every namespace of that instance begins with.
    pub fn namespace_prefix(tag: Tag) -> String {
        format!("pepo-{tag}-")
    }

    /// The Sandbox whose namespace has that name, if it is one of the tag's.
    pub fn from_namespace(tag: Tag, name: &str) -> Option<SandboxId> {
        SandboxId::from_hex(name.strip_prefix(&Self::namespace_prefix(tag))?).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::id::SLOTS;
    use crate::net::policy::Floor;

    proptest! {
        #[test]
        fn no_two_slots_of_the_machine_share_an_address_and_all_are_on_the_floor(
            a in (0u16..256, 0..SLOTS), b in (0u16..256, 0..SLOTS),
        ) {
            let address = |(index, slot)| {
                of_slot(UidBlock { index, first: 0x7000_0000 }, Slot::new(slot).expect("slot"))
            };
            prop_assert_eq!(a == b, address(a) == address(b));
            prop_assert!(Floor::default().covers(address(a)).is_some());
            let block = of_block(UidBlock { index: a.0, first: 0 });
            prop_assert!(block.holds(address(a)));
            prop_assert_eq!(block.holds(address(b)), a.0 == b.0);
        }

        #[test]
        fn names_fit_and_lead_back(slot in 0..SLOTS) {
            let (tag, slot): (Tag, _) = ("ab1c".parse().expect("tag"), Slot::new(slot).expect("slot"));
            let names = Names { tag, id: SandboxId::new(slot) };
            prop_assert!(names.veth().len() <= 15);
            prop_assert_eq!(slot_of_veth(tag, &names.veth()), Some(slot));
            prop_assert_eq!(slot_of_veth("ab1d".parse().expect("tag"), &names.veth()), None);
            prop_assert_eq!(Names::from_namespace(tag, &names.namespace()), Some(names.id));
            prop_assert_ne!(inside_mac(slot), outside_mac(slot));
        }
    }

    #[test]
    fn the_guests_own_network_is_on_the_floor() {
        for address in [GUEST, GATEWAY, HOST_END] {
            assert!(Floor::default().covers(address).is_some());
            assert!(Cidr::containing(GATEWAY, GUEST_PREFIX).holds(address));
        }
    }
}
