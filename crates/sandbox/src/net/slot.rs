//! A slot: the network of one Sandbox on the host, made before its VMM and given back after its processes.
//!
//! ```text
//! host's namespace        wall (nft::outside), pp<tag><slot>: no address, one route, one neighbour
//! /run/netns/pepo-<tag>-<id>   wall (nft::inside), loaded before any link is up
//!   up    default route, rate to the outside           sockets of ours: the resolver's two
//!   tap   192.0.0.1, rate to the guest                 its descriptor is the VMM's network device
//! ```
//! Everything inside is done on a thread that is thrown away, since a thread's namespace is its own. What has to be changed
//! later (elements, rates) goes over sockets that were opened inside and stay there. After a restart they are opened again
//! by [`Slot::open`]; the namespace, its rules and its connections have been there all the time.

mod elements;
mod sysctl;
mod traffic;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::mount::UnmountFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::address::{
    self, GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, GUEST_PREFIX, HOST_END, NAMESPACES, TABLE, TAP, TRACKED, UPLINK,
};
use super::netlink::connections::Connections;
use super::netlink::route::{End, Route, is_absent};
use super::netlink::tables::{self, Change, Element, Tables};
use super::policy::{Compiled, Floor, Policy};
use super::{Limits, Opened, Settings, nft};
use crate::held::Place;
use crate::id::{Names, SandboxId};
use crate::sys;

use elements::{changes, elements_of};
use sysctl::{guard, settle};
pub use traffic::{Refused, Traffic};

/// The largest packet that a link carries when the host has no route out to say.
const ETHERNET: u32 = 1500;
/// What guests and every link of ours can carry.
const MTU: std::ops::RangeInclusive<u32> = 1280..=9000;

/// Why there is no slot, or not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// `nft` is not installed.
    #[error("nft is missing")]
    NoNft,
    /// All Sandboxes together could take more connections than half of what the kernel tracks.
    #[error(
        "{slots} networks of {each} connections are more than half of the {most} the kernel tracks (net.netfilter.nf_conntrack_max)"
    )]
    Full {
        /// Networks with this one.
        slots: usize,
        /// Connections of each.
        each: u32,
        /// What the kernel tracks.
        most: u64,
    },
    /// The policy is not one.
    #[error(transparent)]
    Policy(#[from] super::policy::Error),
    /// An opening for a rule that is not in force, or for an address that no rule may reach.
    #[error("{address} is not opened: {reason}")]
    Opening {
        /// The address.
        address: Ipv4Addr,
        /// Why not.
        reason: &'static str,
    },
    /// Names have opened as much as they may.
    #[error("names have opened {} pairs of address and port already; their times have to be over first", nft::OPENINGS)]
    Crowded,
    /// A step failed.
    #[error("{step}")]
    Step {
        /// Which.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
}

fn tried<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Error {
    move |source| Error::Step { step, source: source.into() }
}

/// How a VMM gets its network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// As a descriptor of the tap: it sits in an empty namespace of its own.
    Handed,
    /// It opens the tap by name, as this uid, within the slot's namespace, of which it gets a descriptor.
    Named(u32),
}

/// One Sandbox's network, in the hands of the privileged side.
#[derive(Debug)]
pub(crate) struct Slot {
    tables: Tables,
    route: Route,
    tap: u32,
    uplink: u32,
    policy: Policy,
    /// Bytes a second to the outside and to the guest, where they are known: a change stops the link for a moment.
    rates: Option<[Option<u64>; 2]>,
    resolver: [OwnedFd; 2],
}

/// What of a slot is opened inside its namespace.
struct Inside {
    tables: Tables,
    route: Route,
    tap: u32,
    uplink: u32,
    resolver: [OwnedFd; 2],
}

impl From<Inside> for Slot {
    fn from(inside: Inside) -> Self {
        let Inside { tables, route, tap, uplink, resolver } = inside;
        Slot { tables, route, tap, uplink, policy: Policy::default(), rates: None, resolver }
    }
}

impl Slot {
    /// Makes a Sandbox's network, all of it closed. With it comes what the VMM is given of it. Whatever comes back, what there
    /// is of it goes with [`release`].
    pub fn prepare(
        place: &Place,
        id: SandboxId,
        settings: &Settings,
        device: Device,
    ) -> Result<(Self, OwnedFd), Error> {
        admit(place, &settings.limits)?;
        let names = Names { tag: place.tag, id };
        let slot = id.slot();
        let between = address::of_slot(place.block, slot);
        let mut host = Route::open().map_err(tried("ask for the host's links"))?;
        let mtu = uplink_mtu(&mut host).map_err(tried("look at the host's routes"))?;
        let here = own_namespace().map_err(tried("open the host's namespace"))?;
        // What an earlier Sandbox of the slot may have left would be counted as this one's.
        forget(between);
        uncount(place.tag, between);
        let pin = Pin::new(names).map_err(tried("make a place for the namespace"))?;
        let relay_uid = place.block.uids(slot).relay;
        let text = nft::inside(between, relay_uid, &settings.limits, &settings.floor);
        let veth = names.veth();
        let (inside, tap) = on_a_thread(|| {
            sys::unshare(libc::CLONE_NEWNET).map_err(tried("make the namespace"))?;
            pin.hold().map_err(tried("pin the namespace"))?;
            settle().map_err(tried("set up the namespace"))?;
            let owner = match device {
                Device::Handed => None,
                Device::Named(uid) => Some(uid),
            };
            let tap = sys::open_tap(TAP, owner).map_err(tried("make the tap"))?;
            let mut route = Route::open().map_err(tried("ask for links"))?;
            let ours = End { name: UPLINK, mac: address::inside_mac(slot), namespace: None };
            let theirs = End { name: &veth, mac: address::outside_mac(slot), namespace: Some(here.as_fd()) };
            route.add_veth(ours, theirs, mtu).map_err(tried("make the veth"))?;
            // Nothing is up yet: no packet comes before the wall.
            match nft::load(&text) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Error::NoNft),
                done => done.map_err(tried("load the wall inside"))?,
            }
            let links = tried("set the links up");
            let inside = (|| {
                let (tap, uplink) = (route.link(TAP)?.index, route.link(UPLINK)?.index);
                let lo = route.link("lo")?.index;
                route.up(lo)?;
                route.shape(tap, GATEWAY_MAC, mtu)?;
                route.address(tap, GATEWAY, GUEST_PREFIX)?;
                route.up(uplink)?;
                route.up(tap)?;
                route.neighbour(tap, GUEST, GUEST_MAC)?;
                route.neighbour(uplink, HOST_END, address::outside_mac(slot))?;
                route.default_route(uplink, HOST_END)?;
                Ok::<_, io::Error>((tap, uplink))
            })();
            let (tap_index, uplink) = inside.map_err(links)?;
            let given = match device {
                Device::Handed => tap,
                // Ours is closed: a tap has one user at a time.
                Device::Named(_) => own_namespace().map_err(tried("open the namespace"))?,
            };
            Ok((open_sockets(route, tap_index, uplink)?, given))
        })?;
        let outside = tried("set the host's end up");
        let done = (|| {
            let link = host.link(&veth)?.index;
            host.alias(link, &id.to_string())?;
            guard(&veth)?;
            host.up(link)?;
            host.neighbour(link, between, address::inside_mac(slot))?;
            host.host_route(link, between)
        })();
        done.map_err(outside)?;
        // A new link has none.
        let mut slot = Slot { rates: Some([None, None]), ..Slot::from(inside) };
        slot.limit(&settings.limits, &Policy::default())?;
        Ok((slot, tap))
    }

    /// Takes up a Sandbox's network that an earlier life made, with the policy it was given last.
    pub fn open(place: &Place, id: SandboxId, policy: Policy) -> Result<Self, Error> {
        let namespace = namespace(place, id).map_err(tried("open the namespace"))?;
        let inside = on_a_thread(|| {
            enter(namespace.as_fd()).map_err(tried("enter the namespace"))?;
            let mut route = Route::open().map_err(tried("ask for links"))?;
            let found = |name, route: &mut Route| route.link(name).map(|link| link.index);
            let tap = found(TAP, &mut route).map_err(tried("find the tap"))?;
            let uplink = found(UPLINK, &mut route).map_err(tried("find the veth"))?;
            open_sockets(route, tap, uplink)
        })?;
        Ok(Slot { policy, ..Slot::from(inside) })
    }

    /// Puts a policy in force at one moment: what is no longer allowed stops there, connections and all.
    pub fn apply(&mut self, policy: Policy, settings: &Settings) -> Result<(), Error> {
        policy.check(&settings.floor)?;
        let changes = changes(&Compiled::new(&policy, &settings.floor));
        self.tables.change(TABLE, &changes).map_err(tried("change the rules"))?;
        self.limit(&settings.limits, &policy)?;
        self.policy = policy;
        Ok(())
    }

    fn limit(&mut self, limits: &Limits, policy: &Policy) -> Result<(), Error> {
        let egress = policy.egress_bytes_per_second.or(limits.egress_bytes_per_second);
        let ingress = policy.ingress_bytes_per_second.or(limits.ingress_bytes_per_second);
        let rates = Some([egress, ingress]);
        if self.rates == rates {
            return Ok(());
        }
        self.rates = None;
        self.route.limit(self.uplink, egress).map_err(tried("limit what leaves"))?;
        self.route.limit(self.tap, ingress).map_err(tried("limit what comes"))?;
        self.rates = rates;
        Ok(())
    }

    /// The largest packet on the way to the guest.
    pub fn mtu(&mut self) -> Result<u32, Error> {
        Ok(self.route.link(TAP).map_err(tried("look at the tap"))?.mtu)
    }

    /// Opens addresses that the resolver found, all of them at one moment.
    pub fn admit(&mut self, opened: &[Opened], floor: &Floor) -> Result<(), Error> {
        let mut elements: BTreeMap<&'static str, Vec<Element>> = BTreeMap::new();
        for one in opened {
            let refused = |reason| Error::Opening { address: one.address, reason };
            let rule = self.policy.rule(one.rule).ok_or_else(|| refused("its rule is not in force"))?;
            for (set, element) in elements_of(rule, one, floor).ok_or_else(|| refused("it is on the floor"))? {
                let there = elements.entry(set).or_default();
                if !there.iter().any(|known| known.key == element.key) {
                    there.push(element);
                }
            }
        }
        self.renew(elements).map_err(|error| match error.raw_os_error() {
            Some(libc::ENFILE) => Error::Crowded,
            _ => tried("open an address")(error),
        })
    }

    /// Adds elements, or begins their time anew.
    fn renew(&mut self, elements: BTreeMap<&'static str, Vec<Element>>) -> io::Result<()> {
        // A transaction that fails, or takes something away, costs the wait for every reader of the tables there is.
        let change = if tables::lengthens() { Change::Renew } else { Change::Add };
        let all: Vec<_> = elements.iter().map(|(set, elements)| change(set, elements.clone())).collect();
        match self.tables.change(TABLE, &all) {
            Err(error) if is_there(&error) => {}
            done => return done,
        }
        for (set, elements) in elements {
            elements.into_iter().try_for_each(|element| self.renew_one(set, element))?;
        }
        Ok(())
    }

    /// The same of one that is there, perhaps for another rule, on every kernel.
    fn renew_one(&mut self, set: &'static str, element: Element) -> io::Result<()> {
        const TRIES: u32 = 4;
        let gone = Element { value: None, timeout_ms: None, ..element.clone() };
        for _ in 0..TRIES {
            match self.tables.change(TABLE, &[Change::Add(set, vec![element.clone()])]) {
                Err(error) if is_there(&error) => {}
                done => return done,
            }
            let anew = [Change::Remove(set, vec![gone.clone()]), Change::Add(set, vec![element.clone()])];
            match self.tables.change(TABLE, &anew) {
                // Its time was over in between.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                done => return done,
            }
        }
        Err(io::Error::other("it comes and goes"))
    }

    /// What was carried and refused.
    pub fn traffic(&mut self) -> Result<Traffic, Error> {
        Traffic::read(&mut self.tables).map_err(tried("read the counters"))
    }

    /// The resolver's sockets, UDP and listening TCP, for whoever answers.
    pub fn resolver(&self) -> io::Result<[OwnedFd; 2]> {
        Ok([self.resolver[0].try_clone()?, self.resolver[1].try_clone()?])
    }
}

/// Whether an element could not be added because its key is in use.
fn is_there(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EEXIST | libc::EBUSY))
}

/// Opens what is used from outside, in the calling thread's namespace.
fn open_sockets(route: Route, tap: u32, uplink: u32) -> Result<Inside, Error> {
    let sockets = (|| {
        let tables = Tables::open()?;
        let resolver = [bound(SocketType::DGRAM, 53)?, bound(SocketType::STREAM, 53)?];
        Ok::<_, io::Error>((tables, resolver))
    })();
    let (tables, resolver) = sockets.map_err(tried("open the sockets inside"))?;
    Ok(Inside { tables, route, tap, uplink, resolver })
}

/// A socket of the gateway's, listening where it is a stream.
fn bound(kind: SocketType, port: u16) -> io::Result<OwnedFd> {
    const BACKLOG: i32 = 128;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, kind, flags, None)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &SocketAddrV4::new(GATEWAY, port))?;
    if kind == SocketType::STREAM {
        rustix::net::listen(&socket, BACKLOG)?;
    }
    Ok(socket)
}

/// Makes all that a slot has, in namespaces that go with the thread.
pub(super) fn probe() -> Result<(), Error> {
    let (tag, block) = (crate::id::Tag::spelled([0; 4]), crate::id::UidBlock { index: 0, first: 0x7000_0000 });
    let floor = Floor::default();
    let loaded = |text: String| match nft::load(&text) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::NoNft),
        done => done.map_err(tried("load a wall of nftables")),
    };
    on_a_thread(|| {
        sys::unshare(libc::CLONE_NEWNET).map_err(tried("make a network namespace"))?;
        settle().map_err(tried("set up the namespace"))?;
        let _tap = sys::open_tap(TAP, None).map_err(tried("make a tap"))?;
        let mut route = Route::open().map_err(tried("ask for links"))?;
        let end = |name, last| End { name, mac: address::Mac([2, 0, 0, 0, 0, last]), namespace: None };
        route.add_veth(end(UPLINK, 1), end("host", 2), ETHERNET).map_err(tried("make a veth"))?;
        let uplink = route.link(UPLINK).map_err(tried("find a veth"))?.index;
        route.limit(uplink, Some(1 << 20)).map_err(tried("limit a rate"))?;
        loaded(nft::inside(GUEST, block.first, &Limits::default(), &floor))?;
        loaded(nft::outside(tag, block, &Limits::default(), &floor))?;
        let policy = changes(&Compiled::new(&Policy::public(), &floor));
        Tables::open().and_then(|mut tables| tables.change(TABLE, &policy)).map_err(tried("change the rules"))
    })
}

/// The largest packet that every way out of the host carries.
fn uplink_mtu(host: &mut Route) -> io::Result<u32> {
    // One by one: each Sandbox has a link here too. One that has gone since carries nothing.
    let uplinks = host.uplinks()?;
    let mut least: Option<u32> = None;
    for index in uplinks {
        match host.link_of(index) {
            Ok(link) => least = Some(least.map_or(link.mtu, |least| least.min(link.mtu))),
            Err(error) if is_absent(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(least.unwrap_or(ETHERNET).clamp(*MTU.start(), *MTU.end()))
}

/// Whether the host's table of connections has room for one more slot beside everybody else.
fn admit(place: &Place, limits: &Limits) -> Result<(), Error> {
    let Ok(text) = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max") else { return Ok(()) };
    let Ok(most) = text.trim().parse::<u64>() else { return Ok(()) };
    let slots = namespaces(place.tag).map_err(tried("list the namespaces"))?.len() + 1;
    // 0 is no bound.
    if most > 0 && slots as u64 * u64::from(limits.connections) > most / 2 {
        return Err(Error::Full { slots, each: limits.connections, most });
    }
    Ok(())
}

/// Runs work that changes its thread's namespace, on a thread that is thrown away.
fn on_a_thread<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let panicked = |_| Err(Error::Step { step: "work inside", source: io::Error::other("the thread panicked") });
        scope.spawn(work).join().unwrap_or_else(panicked)
    })
}

fn own_namespace() -> io::Result<OwnedFd> {
    // A link of the kernel's own: to be followed.
    Ok(rustix::fs::open("/proc/thread-self/ns/net", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Moves the calling thread into a network namespace.
pub(crate) fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    let kind = rustix::thread::LinkNameSpaceType::Network;
    Ok(rustix::thread::move_into_link_name_space(namespace, Some(kind))?)
}

/// A Sandbox's namespace.
///
/// # Errors
/// It is not there.
pub fn namespace(place: &Place, id: SandboxId) -> io::Result<OwnedFd> {
    let namespace = rustix::fs::open(
        path(Names { tag: place.tag, id }),
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
    )?;
    // A pin whose mount is gone is an empty file.
    const NSFS: i64 = 0x6e73_6673;
    if rustix::fs::fstatfs(&namespace)?.f_type != NSFS {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(namespace)
}

fn path(names: Names) -> PathBuf {
    Path::new(NAMESPACES).join(names.namespace())
}

/// The file over which a namespace is mounted, so that it stays when no process is in it.
struct Pin(PathBuf);

impl Pin {
    fn new(names: Names) -> io::Result<Self> {
        fs::create_dir_all(NAMESPACES)?;
        let path = path(names);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::open(&path, flags, Mode::empty())?;
        Ok(Pin(path))
    }

    /// Mounts the calling thread's namespace.
    fn hold(&self) -> io::Result<()> {
        Ok(rustix::mount::mount_bind("/proc/thread-self/ns/net", &self.0)?)
    }
}

/// The Sandboxes of that tag that have a namespace here.
pub(crate) fn namespaces(tag: crate::id::Tag) -> io::Result<Vec<SandboxId>> {
    let entries = match fs::read_dir(NAMESPACES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut ids = Vec::new();
    for entry in entries {
        ids.extend(entry?.file_name().to_str().and_then(|name| Names::from_namespace(tag, name)));
    }
    Ok(ids)
}

/// What of a Sandbox's network is there.
pub(crate) fn present(names: Names) -> Vec<String> {
    let mut there = Vec::new();
    if fs::symlink_metadata(path(names)).is_ok() {
        there.push(path(names).display().to_string());
    }
    if let Ok(Some(_)) = Route::open().and_then(|mut route| veth_of(&mut route, names)) {
        there.push(names.veth());
    }
    there
}

/// The number of a Sandbox's veth, if it is there and no later Sandbox's of the same slot.
fn veth_of(route: &mut Route, names: Names) -> io::Result<Option<u32>> {
    match route.link(&names.veth()) {
        // One without an alias was made by a life that ended right there.
        Ok(link) => Ok(link.alias.is_none_or(|alias| alias == names.id.to_string()).then_some(link.index)),
        Err(error) if is_absent(&error) || error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Takes a slot's connections out of the host's table: nobody ends them any more.
fn forget(between: Ipv4Addr) {
    match Connections::open().and_then(|mut connections| connections.forget(between)) {
        Ok(0) => {}
        Ok(count) => tracing::debug!(%between, count, "connections of a Sandbox that ended are forgotten"),
        // The kernel forgets them itself, later.
        Err(error) => tracing::debug!(%between, %error, "connections of a Sandbox that ended stay in the host's table"),
    }
}

/// Begins the host's count of a slot's connections anew. The kernel takes those that are over out of it eight at a time
/// (`CONNCOUNT_GC_MAX_NODES`), so that the next Sandbox would be refused its first ones.
fn uncount(tag: crate::id::Tag, between: Ipv4Addr) {
    let removed =
        Tables::open().and_then(|mut host| host.remove_element(&address::host_table(tag), TRACKED, &between.octets()));
    if let Err(error) = removed {
        tracing::warn!(%between, %error, "connections of a Sandbox that ended may count as those of the next one");
    }
}

/// Gives a Sandbox's network back. What is not there is given back.
pub(crate) fn release(place: &Place, id: SandboxId) -> io::Result<()> {
    let names = Names { tag: place.tag, id };
    let mut route = Route::open()?;
    if let Some(index) = veth_of(&mut route, names)? {
        route.remove(index)?;
        forget(address::of_slot(place.block, id.slot()));
    }
    let path = path(names);
    match rustix::mount::unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        // Not a mount, or not there.
        Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests;
