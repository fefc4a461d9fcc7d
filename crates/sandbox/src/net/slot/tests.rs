//! Real packets through a slot's real walls, written and read on the tap where a VMM would be. Everything happens in
//! namespaces made here: `host` has one way out, to `internet`, and that has none.
//!
//! Needs root; `PEPO_E2E=1` says that the machine is for this.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

mod figures;
mod host_table;

use super::*;
use crate::cgroup::Hierarchies;
use crate::id::{Slot as Number, UidBlock};
use crate::net::policy::{Mode, Protocol, Rule, Target};
use crate::net::wall::{self, Wall};

/// A public-looking address in `internet`, and one of its neighbour's.
const SERVER: Ipv4Addr = Ipv4Addr::new(8, 0, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(9, 1, 1, 1);
/// The host's address on its way out.
const HOST: Ipv4Addr = Ipv4Addr::new(8, 0, 0, 2);
/// What nobody may reach, all of them in `internet`.
const CLOSED: [Ipv4Addr; 5] = [
    Ipv4Addr::new(10, 9, 9, 9),
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(192, 168, 7, 7),
    Ipv4Addr::new(100, 100, 100, 200),
];
/// How long a packet may take that is to come.
const SOON: Duration = Duration::from_secs(5);
/// How long none has to come, to be sure that it does not: the way through is microseconds.
const NEVER: Duration = Duration::from_millis(150);

/// Runs a test in its own host namespace, or not at all where it may not.
fn in_a_world(index: u16, test: impl FnOnce(&World) + Send) {
    if std::env::var_os("PEPO_E2E").is_none() {
        eprintln!("skipped: needs root and PEPO_E2E=1");
        return;
    }
    std::thread::scope(|scope| {
        let done = scope.spawn(|| {
            let world = World::new(index);
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&world)));
            // Given back whatever became of the test; the namespaces of host and internet go with their threads.
            for id in namespaces(world.place.tag).expect("namespaces") {
                release(&world.place, id).expect("release");
            }
            if let Err(panic) = done {
                std::panic::resume_unwind(panic);
            }
        });
        if let Err(panic) = done.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

struct World {
    place: Place,
    settings: Settings,
    internet: OwnedFd,
    _root: tempfile::TempDir,
}

impl World {
    /// Moves the calling thread into a new host namespace with a way to a new internet.
    fn new(index: u16) -> Self {
        sys::unshare(libc::CLONE_NEWNET).expect("host namespace");
        let mut host = Route::open().expect("route");
        let here = own_namespace().expect("here");
        let internet = on_a_thread(|| {
            sys::unshare(libc::CLONE_NEWNET).expect("internet namespace");
            let mut net = Route::open().expect("route");
            let ours = End { name: "down", mac: address::Mac([2, 0, 0, 0, 0, 1]), namespace: None };
            let theirs = End { name: "wan", mac: address::Mac([2, 0, 0, 0, 0, 2]), namespace: Some(here.as_fd()) };
            net.add_veth(ours, theirs, 1500).expect("veth");
            let (lo, down) = (net.link("lo").expect("lo").index, net.link("down").expect("down").index);
            net.up(lo).expect("up");
            net.up(down).expect("up");
            net.address(down, SERVER, 24).expect("address");
            net.neighbour(down, HOST, address::Mac([2, 0, 0, 0, 0, 2])).expect("neighbour");
            for address in CLOSED.into_iter().chain([OTHER]) {
                net.address(lo, address, 32).expect("address");
            }
            Ok(own_namespace().expect("internet"))
        })
        .expect("internet");
        let (lo, wan) = (host.link("lo").expect("lo").index, host.link("wan").expect("wan").index);
        host.up(lo).expect("up");
        host.up(wan).expect("up");
        host.address(wan, HOST, 24).expect("address");
        host.neighbour(wan, SERVER, address::Mac([2, 0, 0, 0, 0, 1])).expect("neighbour");
        host.default_route(wan, SERVER).expect("route");
        links_carry(internet.as_fd());
        links_carry(here.as_fd());
        let root = tempfile::tempdir().expect("directory");
        let jails = root.path().join("jail");
        std::fs::create_dir(&jails).expect("jails");
        let block = UidBlock { index, first: 0x7000_0000 + u32::from(index) * UidBlock::SIZE };
        let tag = format!("t{index:03}").parse().expect("tag");
        let place = Place::open(tag, block, &jails, Hierarchies::detect().expect("cgroups")).expect("place");
        World { place, settings: Settings::default(), internet, _root: root }
    }

    /// Runs work in the internet.
    fn internet<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        on_a_thread(|| {
            enter(self.internet.as_fd()).expect("enter");
            Ok(work())
        })
        .expect("internet")
    }

    fn udp(&self, address: Ipv4Addr, port: u16) -> UdpSocket {
        let socket = self.internet(|| UdpSocket::bind((address, port)).expect("bind"));
        socket.set_read_timeout(Some(NEVER)).expect("timeout");
        socket
    }

    fn wall(&self) -> Wall {
        let wall = Wall::new(self.place.tag, self.place.block, self.settings.clone()).expect("wall");
        assert!(wall.ensure().expect("loaded"));
        assert!(!wall.ensure().expect("stands"));
        wall
    }

    fn slot(&self, number: u16) -> (SandboxId, Slot, Guest) {
        self.slot_with(number, &self.settings)
    }

    fn slot_with(&self, number: u16, settings: &Settings) -> (SandboxId, Slot, Guest) {
        let id = SandboxId::new(Number::new(number).expect("slot"));
        let (slot, tap) = Slot::prepare(&self.place, id, settings, Device::Handed).expect("slot");
        links_carry(namespace(&self.place, id).expect("namespace").as_fd());
        links_carry(own_namespace().expect("here").as_fd());
        (id, slot, Guest { tap, port: 40_000 })
    }

    /// The only wall left is the inside one: the host passes everything on.
    fn no_host_wall(&self) {
        wall::remove(self.place.tag).expect("remove");
        nft::load(&translation("oifname \"wan\" masquerade")).expect("translate");
    }

    /// The only wall left is the host's.
    fn no_inner_wall(&self, id: SandboxId) {
        let namespace = namespace(&self.place, id).expect("namespace");
        on_a_thread(|| {
            enter(namespace.as_fd()).expect("enter");
            let between = address::of_slot(self.place.block, id.slot());
            nft::load("flush ruleset").expect("flush");
            nft::load(&translation(&format!("oifname \"up\" snat to {between}"))).expect("translate");
            Ok(())
        })
        .expect("inside");
    }
}

/// A table that only translates addresses.
fn translation(rule: &str) -> String {
    format!("table ip plain {{\n chain leave {{\n type nat hook postrouting priority srcnat;\n {rule}\n }}\n}}\n")
}

/// What a VMM would be: the tap, and a guest that makes packets of its own.
struct Guest {
    tap: OwnedFd,
    port: u16,
}

/// A packet to be, with what may be wrong about it.
#[derive(Clone)]
struct Packet {
    from_mac: address::Mac,
    to_mac: address::Mac,
    tag: Option<u16>,
    from: Ipv4Addr,
    to: Ipv4Addr,
    protocol: u8,
    body: Vec<u8>,
    fragment: u16,
    hops: u8,
}

fn sum(parts: &[&[u8]]) -> [u8; 2] {
    let bytes: Vec<u8> = parts.concat();
    let mut sum: u32 = bytes.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(*two.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

impl Packet {
    fn new(to: Ipv4Addr, protocol: u8, body: Vec<u8>) -> Self {
        let (from_mac, to_mac) = (GUEST_MAC, GATEWAY_MAC);
        Packet { from_mac, to_mac, tag: None, from: GUEST, to, protocol, body, fragment: 0, hops: 64 }
    }

    fn udp(to: Ipv4Addr, port: u16, from_port: u16, text: &[u8]) -> Self {
        let length = (8 + text.len() as u16).to_be_bytes();
        Packet::new(to, 17, [&from_port.to_be_bytes()[..], &port.to_be_bytes(), &length, &[0, 0], text].concat())
    }

    /// A segment of TCP without anything in it.
    fn tcp(to: Ipv4Addr, port: u16, from_port: u16, [sequence, acknowledged]: [u32; 2], flags: u8) -> Self {
        let numbers = [sequence.to_be_bytes(), acknowledged.to_be_bytes()].concat();
        let head = [&from_port.to_be_bytes()[..], &port.to_be_bytes(), &numbers, &[0x50, flags, 0xff, 0xff]].concat();
        let pseudo = [&GUEST.octets()[..], &to.octets(), &[0, 6, 0, 20]].concat();
        let checksum = sum(&[&pseudo, &head, &[0, 0, 0, 0]]);
        Packet::new(to, 6, [&head[..], &checksum, &[0, 0]].concat())
    }

    /// An opening segment of TCP.
    fn syn(to: Ipv4Addr, port: u16, from_port: u16) -> Self {
        Packet::tcp(to, port, from_port, [9, 0], 2)
    }

    fn icmp(to: Ipv4Addr, kind: u8) -> Self {
        let head = [kind, 0, 0, 0, 0, 7, 0, 1];
        let checksum = sum(&[&head]);
        Packet::new(to, 1, [&head[..2], &checksum, &head[4..]].concat())
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 10];
        bytes.extend(self.to_mac.0);
        bytes.extend(self.from_mac.0);
        bytes.extend(self.tag.into_iter().flat_map(|tag| [0x81, 0, (tag >> 8) as u8, tag as u8]));
        bytes.extend([8, 0]);
        let length = (20 + self.body.len() as u16).to_be_bytes();
        let fragment = self.fragment.to_be_bytes();
        let mut head = [&[0x45, 0][..], &length, &[0x12, 0x34], &fragment, &[self.hops, self.protocol, 0, 0]].concat();
        head.extend(self.from.octets());
        head.extend(self.to.octets());
        let checksum = sum(&[&head]);
        head[10..12].copy_from_slice(&checksum);
        bytes.extend(head);
        bytes.extend(&self.body);
        bytes
    }
}

impl Guest {
    fn send(&self, packet: &Packet) {
        self.raw(&packet.bytes());
    }

    fn raw(&self, bytes: &[u8]) {
        rustix::io::write(&self.tap, bytes).expect("the tap takes it");
    }

    /// The next IPv4 packet to the guest: source, protocol, what is in it.
    fn next(&self, within: Duration) -> Option<(Ipv4Addr, u8, Vec<u8>)> {
        let until = Instant::now() + within;
        let mut buffer = vec![0; 70_000];
        while Instant::now() < until {
            match rustix::io::read(&self.tap, &mut buffer) {
                Ok(got) => {
                    let frame = &buffer[10..got];
                    if frame.len() < 34 || frame[12..14] != [8, 0] {
                        continue;
                    }
                    assert_eq!(frame[..6], GUEST_MAC.0);
                    let from = Ipv4Addr::new(frame[26], frame[27], frame[28], frame[29]);
                    return Some((from, frame[23], frame[34..].to_vec()));
                }
                Err(rustix::io::Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => panic!("read: {error}"),
            }
        }
        None
    }

    /// Whether a datagram of the guest reaches a socket, as it should, and its answer comes back.
    fn reaches(&mut self, socket: &UdpSocket) -> bool {
        self.asks(socket, SOON)
    }

    /// Whether it does although it should not.
    fn evades(&mut self, socket: &UdpSocket) -> bool {
        self.asks(socket, NEVER)
    }

    fn asks(&mut self, socket: &UdpSocket, within: Duration) -> bool {
        let SocketAddr::V4(to) = socket.local_addr().expect("address") else { panic!("not IPv4") };
        // Whatever came before is not the answer.
        while self.next(Duration::from_millis(5)).is_some() {}
        self.port += 1;
        self.send(&Packet::udp(*to.ip(), to.port(), self.port, b"ask"));
        let Some(from) = comes(socket, within) else { return false };
        assert_eq!(from.ip(), HOST, "not translated");
        socket.send_to(b"answer", from).expect("answer");
        let (source, protocol, body) = self.next(SOON).expect("the answer comes");
        assert_eq!((source, protocol, &body[8..]), (*to.ip(), 17, &b"answer"[..]));
        true
    }
}

/// Waits until every link of a namespace carries. The kernel looks at that in a thread of its own, which a busy host lets
/// wait, and what is sent before is lost.
fn links_carry(namespace: BorrowedFd<'_>) {
    let deadline = Instant::now() + 4 * SOON;
    let links = || {
        on_a_thread(|| {
            enter(namespace).expect("enter");
            Ok(std::process::Command::new("ip").args(["-o", "link", "show", "type", "veth"]).output().expect("ip"))
        })
    };
    loop {
        let said = String::from_utf8_lossy(&links().expect("inside").stdout).into_owned();
        if said.lines().all(|line| line.contains(" state UP ")) {
            return;
        }
        assert!(Instant::now() < deadline, "{said}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// From where the next datagram to a socket comes, if one does.
fn comes(socket: &UdpSocket, within: Duration) -> Option<SocketAddr> {
    socket.set_read_timeout(Some(within)).expect("timeout");
    let came = socket.recv_from(&mut [0; 2048]).ok().map(|(_, from)| from);
    socket.set_read_timeout(Some(NEVER)).expect("timeout");
    came
}

fn rule(cidr: &str, protocol: Option<Protocol>, ports: &[u16]) -> Rule {
    let target = Target::Cidr(cidr.parse().expect("cidr"));
    Rule { entry: 0, target, protocol, ports: ports.to_vec(), any_protocol: false, public: false }
}

fn allow(rules: Vec<Rule>) -> Policy {
    Policy { mode: Mode::Allow, rules, ..Policy::default() }
}

#[test]
fn nothing_is_reached_until_a_policy_says_so_and_only_that() {
    in_a_world(200, |world| {
        let _wall = world.wall();
        let (id, mut slot, mut guest) = world.slot(3);
        let (server, other) = (world.udp(SERVER, 4000), world.udp(OTHER, 4000));
        let closed: Vec<UdpSocket> = CLOSED.iter().map(|address| world.udp(*address, 4000)).collect();
        // Every target answers somebody without a policy.
        for target in closed.iter().chain([&server, &other]) {
            let probe = UdpSocket::bind((HOST, 0)).expect("bind");
            probe.send_to(b"ask", target.local_addr().expect("address")).expect("send");
            comes(target, SOON).expect("the host reaches it");
        }
        assert!(!guest.evades(&server), "reached without a policy");
        slot.apply(Policy::public(), &world.settings).expect("public");
        assert!(guest.reaches(&server) && guest.reaches(&other), "public is not reached");
        for target in &closed {
            assert!(!guest.evades(target), "{target:?} was reached");
        }
        slot.apply(allow(vec![rule("9.1.1.0/24", Some(Protocol::Udp), &[4000])]), &world.settings).expect("allow");
        assert!(guest.reaches(&other) && !guest.evades(&server));
        let elsewhere = world.udp(OTHER, 4001);
        assert!(!guest.evades(&elsewhere), "another port was reached");
        let traffic = slot.traffic().expect("traffic");
        assert_eq!(traffic.refused.floor, 5, "{traffic:?}");
        assert_eq!(traffic.refused.unlisted, 3, "{traffic:?}");
        assert_eq!(traffic.connections, 3, "{traffic:?}");
        assert!(traffic.sent_packets >= 3 && traffic.received_bytes > 0, "{traffic:?}");
        // After a restart of ours everything is as it was, and changes again.
        drop(slot);
        assert!(guest.reaches(&other) && !guest.evades(&server));
        let mut slot = Slot::open(&world.place, id, Policy::default()).expect("open");
        slot.apply(Policy::public(), &world.settings).expect("public");
        assert!(guest.reaches(&server));
        slot.apply(Policy::default(), &world.settings).expect("none");
        assert!(!guest.evades(&server));
    });
}

/// Whether a packet of the guest reaches a socket, as it should.
fn arrives(guest: &Guest, packet: &Packet, socket: &UdpSocket) -> bool {
    guest.send(packet);
    comes(socket, SOON).is_some()
}

/// Whether it does although it should not.
fn slips(guest: &Guest, packet: &Packet, socket: &UdpSocket) -> bool {
    guest.send(packet);
    comes(socket, NEVER).is_some()
}

#[test]
fn only_plain_ipv4_from_its_own_address_leaves_the_guest() {
    in_a_world(201, |world| {
        let _wall = world.wall();
        let (_id, mut slot, mut guest) = world.slot(4);
        slot.apply(Policy::public(), &world.settings).expect("public");
        let server = world.udp(SERVER, 4000);
        assert!(guest.reaches(&server));
        let plain = Packet::udp(SERVER, 4000, 50_000, b"x");
        assert!(arrives(&guest, &plain, &server));
        let strange = [
            Packet { from: Ipv4Addr::new(192, 0, 0, 3), ..plain.clone() },
            Packet { from: HOST, ..plain.clone() },
            Packet { from: Ipv4Addr::LOCALHOST, ..plain.clone() },
            Packet { from: Ipv4Addr::UNSPECIFIED, ..plain.clone() },
            Packet { from_mac: address::Mac([2, 9, 9, 9, 9, 9]), ..plain.clone() },
            Packet { to_mac: address::Mac([0xff; 6]), ..plain.clone() },
            Packet { to_mac: address::Mac([1, 0, 0x5e, 0, 0, 1]), ..plain.clone() },
            Packet { tag: Some(0), ..plain.clone() },
            Packet { tag: Some(7), ..plain.clone() },
        ];
        for packet in &strange {
            assert!(!slips(&guest, packet, &server), "{:?} tag {:?} left", packet.from, packet.tag);
        }
        // ARP and IPv6, as frames whose contents do not matter.
        let head = |kind: [u8; 2], to: [u8; 6]| [&[0; 10][..], &to, &GUEST_MAC.0, &kind, &[0; 60]].concat();
        for frame in [head([8, 6], [0xff; 6]), head([0x86, 0xdd], GATEWAY_MAC.0), head([0x88, 0xcc], GATEWAY_MAC.0)] {
            guest.raw(&frame);
        }
        assert_eq!(guest.next(NEVER), None, "something answers");
        let refused = slot.traffic().expect("traffic").refused;
        assert_eq!(refused.spoofed, 5, "{refused:?}");
        assert_eq!(refused.malformed, 7, "{refused:?}");
        // Of ICMP only echo.
        for (kind, passes) in [(8, true), (0, false), (3, false), (5, false), (13, false)] {
            let before = slot.traffic().expect("traffic").sent_packets;
            guest.send(&Packet::icmp(SERVER, kind));
            let after = slot.traffic().expect("traffic").sent_packets;
            assert_eq!(after > before, passes, "icmp {kind}");
        }
        let (from, protocol, body) = guest.next(SOON).expect("an echo comes back");
        assert_eq!((from, protocol, body[0]), (SERVER, 1, 0));
    });
}

#[test]
fn fragments_are_judged_whole() {
    in_a_world(202, |world| {
        let _wall = world.wall();
        let (_id, mut slot, guest) = world.slot(5);
        let open = allow(vec![rule("8.0.0.0/24", Some(Protocol::Udp), &[4000])]);
        slot.apply(open, &world.settings).expect("allow");
        let (open, shut) = (world.udp(SERVER, 4000), world.udp(SERVER, 4001));
        let in_two = |port: u16, from: u16| {
            let whole = Packet::udp(SERVER, port, from, &[7; 1000]);
            let (first, second) = whole.body.split_at(512);
            [
                Packet { body: first.to_vec(), fragment: 0x2000, ..whole.clone() },
                Packet { body: second.to_vec(), fragment: 512 / 8, ..whole.clone() },
            ]
        };
        let [first, second] = in_two(4000, 50_001);
        guest.send(&first);
        assert!(arrives(&guest, &second, &open), "fragments of what is open do not arrive");
        // The port is in the first one only; the second alone, or both, must not pass for another.
        let [first, second] = in_two(4001, 50_002);
        guest.send(&second);
        assert!(!slips(&guest, &first, &shut), "fragments evaded the port");
    });
}

#[test]
fn a_vmm_that_opens_its_tap_itself_may_open_that_one_alone() {
    in_a_world(210, |world| {
        let _wall = world.wall();
        let id = SandboxId::new(Number::new(16).expect("slot"));
        let owner = world.place.block.uids(id.slot()).vmm;
        let (_slot, namespace) = Slot::prepare(&world.place, id, &world.settings, Device::Named(owner)).expect("slot");
        on_a_thread(|| {
            enter(namespace.as_fd()).expect("enter");
            // Its links are there without anybody's descriptor; a second tap of the name is not made.
            assert!(Route::open().expect("route").link(TAP).is_ok());
            // A child that another thread starts has a copy of ours until it executes its program.
            let until = Instant::now() + SOON;
            let opened = loop {
                match sys::open_tap(TAP, None) {
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < until => {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    opened => break opened,
                }
            };
            drop(opened.expect("the tap takes one user"));
            assert!(Route::open().expect("route").link(TAP).is_ok(), "it went with its user");
            // What a process in the namespace sends by itself does not leave it: the output chain is closed.
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("bind");
            let sent = socket.send_to(b"x", (SERVER, 4000)).expect_err("a packet of the namespace's own left");
            assert_eq!(sent.kind(), io::ErrorKind::PermissionDenied);
            Ok(())
        })
        .expect("inside");
    });
}

#[test]
fn each_wall_holds_alone() {
    for standing in ["both", "inside", "outside"] {
        in_a_world(203, |world| {
            let _wall = world.wall();
            let (id, mut slot, mut guest) = world.slot(6);
            let (_, mut other_slot, other) = world.slot(7);
            slot.apply(Policy::public(), &world.settings).expect("public");
            other_slot.apply(Policy::public(), &world.settings).expect("public");
            match standing {
                "inside" => world.no_host_wall(),
                "outside" => world.no_inner_wall(id),
                _ => {}
            }
            let server = world.udp(SERVER, 4000);
            assert!(guest.reaches(&server), "{standing}: nothing is reached");
            for address in CLOSED {
                let target = world.udp(address, 4000);
                let probe = UdpSocket::bind((HOST, 0)).expect("bind");
                probe.send_to(b"ask", (address, 4000)).expect("send");
                comes(&target, SOON).expect("the host reaches it");
                assert!(!guest.evades(&target), "{standing}: {address} was reached");
            }
            // Another Sandbox, by its address between the walls.
            let neighbour = address::of_slot(world.place.block, Number::new(7).expect("slot"));
            guest.send(&Packet::udp(neighbour, 53, 50_003, b"x"));
            assert_eq!(other.next(NEVER), None, "{standing}: a neighbour was reached");
            // Multicast and everybody.
            for address in [Ipv4Addr::new(224, 0, 0, 1), Ipv4Addr::BROADCAST, Ipv4Addr::new(8, 0, 0, 255)] {
                let before = server.recv_from(&mut [0; 8]).is_ok();
                assert!(!before);
                guest.send(&Packet::udp(address, 4000, 50_004, b"x"));
                assert!(server.recv_from(&mut [0; 8]).is_err(), "{standing}: {address} was reached");
            }
            // From outside, to where the host would send it on.
            let between = address::of_slot(world.place.block, id.slot());
            let tool = |arguments: &[&str]| {
                let done = std::process::Command::new("ip").args(arguments).status().expect("ip");
                assert!(done.success(), "ip {arguments:?}");
            };
            world.internet(|| tool(&["route", "add", &format!("{between}/32"), "via", &HOST.to_string()]));
            let outside = world.udp(SERVER, 4444);
            // Refusals of what it sent itself are not from outside.
            while guest.next(Duration::from_millis(20)).is_some() {}
            outside.send_to(b"in", (between, 5555)).expect("send");
            assert_eq!(guest.next(NEVER), None, "{standing}: it was reached from outside");
            if standing == "inside" {
                // The host's own addresses are its own wall's: nobody inside knows all of them at all times.
                return;
            }
            let host = UdpSocket::bind((HOST, 4000)).expect("bind");
            host.set_read_timeout(Some(NEVER)).expect("timeout");
            guest.send(&Packet::udp(HOST, 4000, 50_005, b"x"));
            assert!(host.recv_from(&mut [0; 8]).is_err(), "{standing}: the host was reached");
        });
    }
}

#[test]
fn no_sandbox_lends_itself_anothers_address() {
    in_a_world(204, |world| {
        let _wall = world.wall();
        let (id, _slot, guest) = world.slot(8);
        let (_, _other_slot, _other) = world.slot(9);
        // Without the wall inside, and without its translation: the guest's packets as they are.
        let namespace = namespace(&world.place, id).expect("namespace");
        on_a_thread(|| {
            enter(namespace.as_fd()).expect("enter");
            nft::load("flush ruleset").expect("flush");
            Ok(())
        })
        .expect("inside");
        let server = world.udp(SERVER, 4000);
        let own = address::of_slot(world.place.block, id.slot());
        let anothers = address::of_slot(world.place.block, Number::new(9).expect("slot"));
        let from = |from| Packet { from, ..Packet::udp(SERVER, 4000, 50_006, b"x") };
        assert!(arrives(&guest, &from(own), &server), "its own address does not pass");
        for spoofed in [anothers, HOST, OTHER, GUEST, Ipv4Addr::new(10, 9, 9, 9)] {
            assert!(!slips(&guest, &from(spoofed), &server), "{spoofed} passed");
        }
    });
}

#[test]
fn what_lost_permission_stops_with_the_change_and_the_rest_goes_on() {
    in_a_world(205, |world| {
        let _wall = world.wall();
        let (_id, mut slot, guest) = world.slot(10);
        let (kept, lost) = (rule("9.1.1.0/24", None, &[]), rule("8.0.0.0/24", None, &[]));
        slot.apply(allow(vec![kept.clone(), lost.clone()]), &world.settings).expect("both");
        let (server, other) = (world.udp(SERVER, 4000), world.udp(OTHER, 4000));
        let begin = |to: Ipv4Addr, socket: &UdpSocket, port: u16| {
            guest.send(&Packet::udp(to, 4000, port, b"begin"));
            let from = comes(socket, SOON).expect("it arrives");
            socket.send_to(b"on", from).expect("answer");
            guest.next(SOON).expect("an answer");
            from
        };
        let back = begin(SERVER, &server, 50_007);
        let other_back = begin(OTHER, &other, 50_008);
        slot.apply(allow(vec![kept.clone()]), &world.settings).expect("one");
        // What is under way stops in both directions, the other goes on in both.
        server.send_to(b"late", back).expect("send");
        assert_eq!(guest.next(NEVER), None, "an answer came through");
        assert!(!slips(&guest, &Packet::udp(SERVER, 4000, 50_007, b"more"), &server), "more went out");
        while guest.next(Duration::from_millis(20)).is_some() {}
        other.send_to(b"on", other_back).expect("send");
        assert_eq!(guest.next(SOON).expect("the other goes on").0, OTHER);
        assert!(arrives(&guest, &Packet::udp(OTHER, 4000, 50_008, b"more"), &other));
        assert!(slot.traffic().expect("traffic").refused.revoked >= 2);
        // An address that is allowed by another rule now begins anew, and the old rule does not come back with it.
        slot.apply(allow(vec![kept, rule("8.0.0.1", Some(Protocol::Udp), &[4000])]), &world.settings).expect("another");
        assert!(!slips(&guest, &Packet::udp(SERVER, 4000, 50_007, b"old"), &server), "the old flow lives");
        while guest.next(Duration::from_millis(20)).is_some() {}
        begin(SERVER, &server, 50_009);
    });
}

#[test]
fn openings_of_names_are_bounded_and_pass_from_rule_to_rule() {
    in_a_world(215, |world| {
        let _wall = world.wall();
        let (_, mut slot, guest) = world.slot(21);
        let named = |entry| Rule {
            entry,
            target: Target::Domain(format!("db{entry}.example.com").parse().expect("name")),
            protocol: Some(Protocol::Udp),
            ports: vec![4000],
            any_protocol: true,
            public: false,
        };
        let (first, second) = (named(0), named(1));
        let opened = |rule: &Rule, address| Opened { rule: rule.number(), address, ttl_seconds: 600 };
        let server = world.udp(SERVER, 4000);
        slot.apply(allow(vec![first.clone()]), &world.settings).expect("allow");
        slot.admit(&[opened(&first, SERVER)], &world.settings.floor).expect("open");
        assert!(arrives(&guest, &Packet::udp(SERVER, 4000, 50_010, b"x"), &server));
        // The address is the other rule's now: that of the first would lead to nothing.
        slot.apply(allow(vec![second.clone()]), &world.settings).expect("allow");
        slot.admit(&[opened(&second, OTHER), opened(&second, SERVER)], &world.settings.floor).expect("open");
        assert!(arrives(&guest, &Packet::udp(SERVER, 4000, 50_011, b"x"), &server));
        // Until there is no room, which is said.
        let mut addresses = (0x0900_0000u32..).map(Ipv4Addr::from_bits);
        let mut fill = || {
            let some: Vec<_> = addresses.by_ref().take(128).map(|address| opened(&second, address)).collect();
            slot.admit(&some, &world.settings.floor)
        };
        let full = (0..=nft::OPENINGS / 128).find_map(|_| fill().err()).expect("a bound");
        assert!(matches!(full, Error::Crowded) && full.to_string().contains("4096 pairs"), "{full}");
        // What is open is lengthened all the same.
        slot.admit(&[opened(&second, SERVER)], &world.settings.floor).expect("again");
    });
}

#[test]
fn names_open_addresses_for_new_flows_until_their_time_is_over() {
    in_a_world(206, |world| {
        let _wall = world.wall();
        let (id, mut slot, guest) = world.slot(11);
        let named = |ports: &[u16], any_protocol, protocol| Rule {
            entry: 0,
            target: Target::Domain("db.example.com".parse().expect("name")),
            protocol,
            ports: ports.to_vec(),
            any_protocol,
            public: false,
        };
        let (wide, relayed) = (named(&[4000], true, Some(Protocol::Udp)), named(&[], false, None));
        slot.apply(allow(vec![wide.clone(), relayed.clone()]), &world.settings).expect("allow");
        let server = world.udp(SERVER, 4000);
        assert!(!slips(&guest, &Packet::udp(SERVER, 4000, 50_010, b"x"), &server), "open before it was found");
        let opened = |rule: &Rule, address, ttl_seconds| Opened { rule: rule.number(), address, ttl_seconds };
        let open = |slot: &mut Slot, one| slot.admit(&[one], &world.settings.floor);
        open(&mut slot, opened(&wide, SERVER, 1)).expect("open");
        assert!(arrives(&guest, &Packet::udp(SERVER, 4000, 50_011, b"x"), &server));
        // Once more, before and after its time: both are the same to whoever asks.
        open(&mut slot, opened(&wide, SERVER, 1)).expect("again");
        let until = Instant::now() + SOON;
        let mut port = 50_100;
        while slips(&guest, &Packet::udp(SERVER, 4000, port, b"new"), &server) {
            assert!(Instant::now() < until, "it is open for ever");
            port += 1;
        }
        assert!(arrives(&guest, &Packet::udp(SERVER, 4000, 50_011, b"old"), &server), "what had begun was cut");
        open(&mut slot, opened(&wide, SERVER, 60)).expect("anew");
        assert!(arrives(&guest, &Packet::udp(SERVER, 4000, 50_012, b"x"), &server));
        // The floor holds for names, and a rule that is gone opens nothing.
        for address in CLOSED {
            assert!(open(&mut slot, opened(&wide, address, 60)).is_err(), "{address} was opened");
        }
        let stranger = named(&[9], true, Some(Protocol::Udp));
        assert!(open(&mut slot, opened(&stranger, SERVER, 60)).is_err(), "a rule of nobody opened something");
        // TCP of a relayed rule goes to the relay, and nowhere else.
        let direct = world.internet(|| TcpListener::bind((SERVER, 443)).expect("bind"));
        direct.set_nonblocking(true).expect("nonblocking");
        let namespace = namespace(&world.place, id).expect("namespace");
        let relay = on_a_thread(|| {
            enter(namespace.as_fd()).expect("enter");
            Ok(TcpListener::bind((GATEWAY, super::super::RELAY_PORT)).expect("bind"))
        })
        .expect("relay");
        relay.set_nonblocking(true).expect("nonblocking");
        let answered = |port: u16, from_port: u16| {
            while guest.next(Duration::from_millis(5)).is_some() {}
            guest.send(&Packet::syn(SERVER, port, from_port));
            let until = Instant::now() + Duration::from_millis(500);
            while let Some((from, protocol, body)) = guest.next(until.saturating_duration_since(Instant::now())) {
                if protocol == 6 && from == SERVER && body[13] & 0x12 == 0x12 {
                    return true;
                }
            }
            false
        };
        assert!(!answered(443, 51_000), "open before it was found");
        open(&mut slot, opened(&relayed, SERVER, 60)).expect("open");
        assert!(answered(443, 51_001), "the relay does not answer");
        assert!(direct.accept().is_err(), "it was reached without the relay");
        assert!(!answered(8443, 51_002), "another port of the address is open");
        // The relay's own port is nothing to speak to.
        guest.send(&Packet::syn(GATEWAY, super::super::RELAY_PORT, 51_003));
        let refused = guest.next(SOON).expect("a refusal");
        assert_eq!(refused.1, 1, "the relay was reached directly");
        slot.apply(allow(vec![wide]), &world.settings).expect("without");
        assert!(!answered(443, 51_004), "the relay is reached without a rule");
    });
}

#[test]
fn one_sandbox_cannot_take_what_is_for_all() {
    in_a_world(207, |world| {
        let mut settings = world.settings.clone();
        settings.limits =
            Limits { connections: 20, flows_per_second: 100, packets_per_second: 1000, ..Limits::default() };
        let _wall = world.wall();
        let prepare = |number| {
            let id = SandboxId::new(Number::new(number).expect("slot"));
            let (mut slot, tap) = Slot::prepare(&world.place, id, &settings, Device::Handed).expect("slot");
            slot.apply(Policy::public(), &settings).expect("public");
            (slot, Guest { tap, port: 40_000 })
        };
        let ((mut slot, guest), (_quiet_slot, mut quiet)) = (prepare(12), prepare(13));
        let (server, other) = (world.udp(SERVER, 4000), world.udp(OTHER, 4000));
        for port in 0..60 {
            guest.send(&Packet::udp(SERVER, 4000, 52_000 + port, b"x"));
        }
        let mut reached = 0;
        while server.recv_from(&mut [0; 8]).is_ok() {
            reached += 1;
        }
        assert!((15..=20).contains(&reached), "{reached} connections of 20");
        assert!(slot.traffic().expect("traffic").refused.connections >= 40);
        // A flood of packets and of openings, while somebody else begins connections.
        for port in 0..20_000u16 {
            guest.send(&Packet::syn(SERVER, 80, 10_000 + port));
            if port % 4000 == 0 {
                assert!(quiet.reaches(&other), "the neighbour has no connection");
            }
        }
        let refused = slot.traffic().expect("traffic").refused;
        assert!(refused.packets > 1000, "{refused:?}");
        assert!(refused.rate + refused.connections > 0, "{refused:?}");
        let tracked = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").expect("count");
        assert!(tracked.trim().parse::<u32>().expect("number") < 200, "{tracked} in the host's table");
    });
}

#[test]
fn a_firewall_that_drops_what_is_forwarded_is_seen_and_the_printed_rule_lets_sandboxes_through() {
    in_a_world(211, |world| {
        let _wall = world.wall();
        let (_id, mut slot, mut guest) = world.slot(17);
        slot.apply(Policy::public(), &world.settings).expect("public");
        let server = world.udp(SERVER, 4000);
        assert!(guest.reaches(&server));
        let dropping = || crate::net::dropping_forward_chains().expect("chains");
        assert!(dropping().is_empty(), "our own are taken for another's");
        let docker =
            "table ip filter {\n chain FORWARD {\n type filter hook forward priority filter; policy drop;\n }\n}\n";
        nft::load(docker).expect("another firewall");
        assert!(!guest.evades(&server), "it drops nothing");
        assert_eq!(dropping(), ["ip filter FORWARD"]);
        // As a person does with what `doctor` prints.
        let rule = crate::net::forward_rules("ip filter FORWARD");
        let done = std::process::Command::new("/bin/sh").args(["-c", &rule]).status().expect("sh");
        assert!(done.success(), "{rule}");
        assert!(guest.reaches(&server), "the rule lets nothing through");
        assert!(dropping().is_empty(), "it is told once more");
        for target in CLOSED.map(|address| world.udp(address, 4000)) {
            assert!(!guest.evades(&target), "{target:?} was reached");
        }
    });
}

#[test]
fn rates_hold_in_both_directions() {
    in_a_world(208, |world| {
        let _wall = world.wall();
        let (_id, mut slot, guest) = world.slot(14);
        let rate = 256 * 1024;
        let limited =
            Policy { egress_bytes_per_second: Some(rate), ingress_bytes_per_second: Some(rate), ..Policy::public() };
        slot.apply(limited, &world.settings).expect("limited");
        let server = world.udp(SERVER, 4000);
        let begun = Instant::now();
        for _ in 0..1500 {
            guest.send(&Packet::udp(SERVER, 4000, 53_000, &[1; 1000]));
        }
        let mut bytes = 0u64;
        let mut back = None;
        while begun.elapsed() < Duration::from_secs(1) {
            if let Ok((got, from)) = server.recv_from(&mut [0; 2048]) {
                (bytes, back) = (bytes + got as u64, Some(from));
            }
        }
        // One second's worth and one burst.
        assert!(bytes > rate / 4 && bytes < rate * 2, "{bytes} bytes left in a second");
        let back = back.expect("somebody to answer");
        let begun = Instant::now();
        for _ in 0..1500 {
            server.send_to(&[2; 1000], back).expect("send");
        }
        let mut bytes = 0u64;
        while begun.elapsed() < Duration::from_secs(1) {
            bytes += guest.next(Duration::from_millis(20)).map_or(0, |(_, _, body)| body.len() as u64);
        }
        assert!(bytes > rate / 4 && bytes < rate * 2, "{bytes} bytes came in a second");
        slot.apply(Policy::public(), &world.settings).expect("unlimited");
    });
}

#[test]
fn a_wall_that_somebody_removes_is_put_back_and_nothing_is_left_at_the_end() {
    in_a_world(209, |world| {
        let wall = world.wall();
        let mut watch = wall::Watch::new().expect("watch");
        let (id, mut slot, mut guest) = world.slot(15);
        slot.apply(Policy::public(), &world.settings).expect("public");
        watch.drain();
        nft::load("flush ruleset").expect("flush");
        assert!(watch.drain(), "nobody was told");
        assert!(!wall.stands().expect("look"));
        assert!(wall.ensure().expect("put back"));
        let server = world.udp(SERVER, 4000);
        assert!(guest.reaches(&server));
        let names = Names { tag: world.place.tag, id };
        assert_eq!(present(names).len(), 2);
        // A release of one that had the slot before takes nothing of this one's.
        release(&world.place, SandboxId::new(id.slot())).expect("release");
        assert_eq!(present(names).len(), 2, "an earlier one's release took it away");
        assert!(guest.reaches(&server));
        drop((slot, guest));
        release(&world.place, id).expect("release");
        release(&world.place, id).expect("absent is done");
        assert!(present(names).is_empty());
        wall::remove(world.place.tag).expect("remove");
        wall::remove(world.place.tag).expect("absent is done");
        assert!(!wall::stands(world.place.tag));
    });
}
