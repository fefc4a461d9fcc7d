//! The kernel's table of connections, from which those of a Sandbox that ended are taken: the kernel itself would keep
//! those that were open for days.

use std::io;
use std::net::{IpAddr, Ipv4Addr};

use netlink_packet_core::{DefaultNla, NLM_F_DUMP};
use netlink_packet_netfilter::conntrack::{ConntrackAttribute, ConntrackMessage, IPTuple, Tuple};
use netlink_packet_netfilter::{NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily};
use rustix::net::netlink;

use super::{Socket, route};

/// The connections of one namespace.
#[derive(Debug)]
pub(crate) struct Connections(Socket);

impl Connections {
    /// Opens it in the calling thread's namespace.
    pub fn open() -> io::Result<Self> {
        Ok(Connections(Socket::open(Some(netlink::NETFILTER), 0)?))
    }

    /// Forgets every connection that this address began; how many there were.
    ///
    /// # Errors
    /// The kernel's: some have no such interface.
    pub fn forget(&mut self, source: Ipv4Addr) -> io::Result<usize> {
        let of = ConntrackAttribute::CtaTupleOrig(vec![Tuple::Ip(vec![IPTuple::SourceAddress(source.into())])]);
        // Kernels before 5.8 list all of them, and those that refuse the filter are asked for all.
        let listed = match self.list(vec![of, by_source()]) {
            Err(_) => self.list(Vec::new())?,
            listed => listed?,
        };
        let mut forgotten = 0;
        for message in listed {
            let NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)) = message.inner else { continue };
            let began = attributes.into_iter().find_map(|attribute| match attribute {
                ConntrackAttribute::CtaTupleOrig(tuple) if begins_at(&tuple, source) => Some(tuple),
                _ => None,
            });
            // Without one of these everything would be forgotten.
            let Some(tuple) = began else { continue };
            match self.0.ask(ipv4(ConntrackMessage::Delete(vec![ConntrackAttribute::CtaTupleOrig(tuple)])), 0) {
                Ok(()) => forgotten += 1,
                // It ended meanwhile.
                Err(error) if route::is_absent(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(forgotten)
    }

    fn list(&mut self, which: Vec<ConntrackAttribute>) -> io::Result<Vec<NetfilterMessage>> {
        self.0.dump(ipv4(ConntrackMessage::Get(which)), NLM_F_DUMP)
    }
}

fn ipv4(message: ConntrackMessage) -> NetfilterMessage {
    NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::IPv4, 0, 0), message)
}

fn begins_at(tuple: &[Tuple], source: Ipv4Addr) -> bool {
    tuple.iter().any(|part| match part {
        Tuple::Ip(addresses) => addresses.contains(&IPTuple::SourceAddress(IpAddr::V4(source))),
        _ => false,
    })
}

/// Says that of the tuple given the source counts (`CTA_FILTER`).
fn by_source() -> ConntrackAttribute {
    const NESTED: u16 = 1 << 15;
    const CTA_FILTER: u16 = 25;
    const ORIGINAL: u16 = 1;
    const REPLY: u16 = 2;
    const SOURCE: u32 = 1;
    let mut value = Vec::new();
    for (kind, flags) in [(ORIGINAL, SOURCE), (REPLY, 0)] {
        value.extend(8u16.to_ne_bytes());
        value.extend(kind.to_ne_bytes());
        value.extend(flags.to_ne_bytes());
    }
    ConntrackAttribute::Other(DefaultNla::new(CTA_FILTER | NESTED, value))
}
