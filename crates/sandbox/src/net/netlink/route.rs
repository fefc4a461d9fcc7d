//! Links, addresses, neighbours, routes and queues of a namespace.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::Socket;
use crate::net::address::Mac;

/// The kernel's routing interface in one namespace.
#[derive(Debug)]
pub(crate) struct Route(Socket);

/// One end of a new pair of links.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End<'a> {
    pub name: &'a str,
    pub mac: Mac,
    /// Whose namespace it is in, if not that of the socket.
    pub namespace: Option<BorrowedFd<'a>>,
}

impl Route {
    /// Opens it in the calling thread's namespace.
    pub fn open() -> io::Result<Self> {
        // Its protocol is number 0, which an absent one stands for.
        Ok(Route(Socket::open(None, 0)?))
    }

    /// Makes a pair of links, both down.
    pub fn add_veth(&mut self, here: End<'_>, there: End<'_>, mtu: u32) -> io::Result<()> {
        let end = |end: End<'_>| {
            let mut attributes = vec![
                LinkAttribute::IfName(end.name.to_owned()),
                LinkAttribute::Address(end.mac.0.to_vec()),
                LinkAttribute::Mtu(mtu),
            ];
            attributes.extend(end.namespace.map(|fd| LinkAttribute::NetNsFd(fd.as_raw_fd())));
            attributes
        };
        let mut peer = LinkMessage::default();
        peer.attributes = end(there);
        let mut message = LinkMessage::default();
        message.attributes = end(here);
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]));
        self.0.ask(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// A link's number and alias.
    pub fn link(&mut self, name: &str) -> io::Result<Link> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        let answer = self.0.dump(RouteNetlinkMessage::GetLink(message), 0)?;
        answer.into_iter().find_map(Link::from_message).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The same of the link that has that number.
    pub fn link_of(&mut self, index: u32) -> io::Result<Link> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        let answer = self.0.dump(RouteNetlinkMessage::GetLink(message), 0)?;
        answer.into_iter().find_map(Link::from_message).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Changes what `attributes` say.
    fn change(&mut self, index: u32, attributes: Vec<LinkAttribute>, on: LinkFlags) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = on;
        message.header.change_mask = on;
        message.attributes = attributes;
        self.0.ask(RouteNetlinkMessage::SetLink(message), 0)
    }

    /// Gives a link its hardware address and largest packet.
    pub fn shape(&mut self, index: u32, mac: Mac, mtu: u32) -> io::Result<()> {
        self.change(index, vec![LinkAttribute::Address(mac.0.to_vec()), LinkAttribute::Mtu(mtu)], LinkFlags::empty())
    }

    /// Writes whose a link is where people see it.
    pub fn alias(&mut self, index: u32, alias: &str) -> io::Result<()> {
        self.change(index, vec![LinkAttribute::IfAlias(alias.to_owned())], LinkFlags::empty())
    }

    /// Turns a link on. It asks nobody for hardware addresses.
    pub fn up(&mut self, index: u32) -> io::Result<()> {
        self.change(index, Vec::new(), LinkFlags::Up | LinkFlags::Noarp)
    }

    /// Removes a link; whether it was there.
    pub fn remove(&mut self, index: u32) -> io::Result<bool> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        match self.0.ask(RouteNetlinkMessage::DelLink(message), 0) {
            Ok(()) => Ok(true),
            Err(error) if is_absent(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives a link an address.
    pub fn address(&mut self, index: u32, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.prefix_len = prefix;
        message.header.index = index;
        let address = IpAddr::V4(address);
        message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
        self.0.ask(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Says for good at which hardware address somebody is.
    pub fn neighbour(&mut self, index: u32, address: Ipv4Addr, mac: Mac) -> io::Result<()> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.ifindex = index;
        message.header.state = NeighbourState::Permanent;
        message.header.kind = RouteType::Unicast;
        message.attributes = vec![
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)),
            NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()),
        ];
        self.0.ask(RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Everything goes to `gateway`, which is behind that link whatever addresses it has.
    pub fn default_route(&mut self, index: u32, gateway: Ipv4Addr) -> io::Result<()> {
        let mut message = route(RouteScope::Universe, 0);
        message.header.flags = RouteFlags::Onlink;
        message.attributes = vec![RouteAttribute::Oif(index), RouteAttribute::Gateway(RouteAddress::Inet(gateway))];
        self.0.ask(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// One address is behind that link.
    pub fn host_route(&mut self, index: u32, address: Ipv4Addr) -> io::Result<()> {
        let mut message = route(RouteScope::Link, 32);
        message.attributes = vec![RouteAttribute::Oif(index), RouteAttribute::Destination(RouteAddress::Inet(address))];
        self.0.ask(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// The links over which the namespace's default routes go.
    pub fn uplinks(&mut self) -> io::Result<Vec<u32>> {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        let answer = self.0.dump(RouteNetlinkMessage::GetRoute(message), NLM_F_DUMP)?;
        let mut links = Vec::new();
        for message in answer {
            let RouteNetlinkMessage::NewRoute(route) = message else { continue };
            let is_default = route.header.destination_prefix_length == 0 && route.header.kind == RouteType::Unicast;
            if is_default && u32::from(route.header.table) == MAIN_TABLE {
                let oif = |attribute: &RouteAttribute| match attribute {
                    RouteAttribute::Oif(index) => Some(*index),
                    _ => None,
                };
                links.extend(route.attributes.iter().find_map(oif));
            }
        }
        links.sort_unstable();
        links.dedup();
        Ok(links)
    }

    /// Lets no more than `rate` bytes a second leave over a link; `None` lifts that.
    pub fn limit(&mut self, index: u32, rate: Option<u64>) -> io::Result<()> {
        let index = i32::try_from(index).map_err(io::Error::other)?;
        let mut message = TcMessage::with_index(index);
        message.header.parent = TcHandle::ROOT;
        let Some(rate) = rate else {
            return match self.0.ask(RouteNetlinkMessage::DelQueueDiscipline(message), 0) {
                // There was no limit.
                Err(error) if is_absent(&error) || error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                done => done,
            };
        };
        message.header.handle = TcHandle { major: 1, minor: 0 };
        message.attributes = vec![TcAttribute::Kind("tbf".to_owned()), TcAttribute::Options(token_bucket(rate))];
        self.0.ask(RouteNetlinkMessage::NewQueueDiscipline(message), NLM_F_CREATE | NLM_F_REPLACE)
    }
}

/// The main routing table.
const MAIN_TABLE: u32 = 254;

/// A link as the kernel tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub index: u32,
    pub name: String,
    pub alias: Option<String>,
    pub mtu: u32,
}

impl Link {
    fn from_message(message: RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewLink(message) = message else { return None };
        let mut link = Link { index: message.header.index, name: String::new(), alias: None, mtu: 0 };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                _ => {}
            }
        }
        Some(link)
    }
}

fn route(scope: RouteScope, prefix: u8) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = AddressFamily::Inet;
    message.header.destination_prefix_length = prefix;
    message.header.table = MAIN_TABLE as u8;
    message.header.protocol = RouteProtocol::Static;
    message.header.scope = scope;
    message.header.kind = RouteType::Unicast;
    message
}

/// The options of a token bucket filter (`tc_tbf_qopt` and its rate in 64 bits): bursts of an eighth of a second, at least
/// one large packet; half a second may wait.
fn token_bucket(rate: u64) -> Vec<TcOption> {
    const PARMS: u16 = 1;
    const RATE64: u16 = 4;
    const BURST: u16 = 6;
    /// A segment of the largest size, as a guest hands it over.
    const LARGEST: u64 = 66_000;
    const ETHERNET: u8 = 1;
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    let burst = narrow((rate / 8).clamp(LARGEST, 64 << 20));
    let limit = narrow((rate / 2).max(u64::from(burst)).max(2 * LARGEST));
    let mut parms = Vec::with_capacity(36);
    // Two rates, each: cell logarithm, link layer, overhead, cell alignment, packet unit, rate.
    for rate in [rate, 0] {
        parms.extend([0, ETHERNET]);
        parms.extend([0; 6]);
        parms.extend(narrow(rate).to_ne_bytes());
    }
    parms.extend(limit.to_ne_bytes());
    parms.extend(burst.to_ne_bytes());
    parms.extend(0u32.to_ne_bytes());
    let mut options = vec![
        TcOption::Other(DefaultNla::new(PARMS, parms)),
        TcOption::Other(DefaultNla::new(BURST, burst.to_ne_bytes().to_vec())),
    ];
    if rate > u64::from(u32::MAX) {
        options.push(TcOption::Other(DefaultNla::new(RATE64, rate.to_ne_bytes().to_vec())));
    }
    options
}

/// Whether an error says that what was to go is not there.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENOENT | libc::ESRCH | libc::ENXIO))
}
