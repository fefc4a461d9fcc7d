//! What a guest, and one that is gone, takes of the host's table of connections, which all Sandboxes share.

use super::*;

const CONNECTIONS: u32 = 20;

fn settings(world: &World) -> Settings {
    let limits = Limits { connections: CONNECTIONS, flows_per_second: 5000, ..Limits::default() };
    Settings { limits, ..world.settings.clone() }
}

fn open_to_all(world: &World, settings: &Settings, number: u16) -> (SandboxId, Slot, Guest) {
    let (id, mut slot, guest) = world.slot_with(number, settings);
    slot.apply(Policy::public(), settings).expect("public");
    (id, slot, guest)
}

/// Connections in the table of the namespace that the calling thread is in.
fn tracked() -> u32 {
    let count = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").expect("count");
    count.trim().parse().expect("number")
}

impl Guest {
    /// Begins a connection as a guest's kernel does; the number that its next segment has, and the server's.
    fn connects(&self, port: u16, from_port: u16) -> Option<[u32; 2]> {
        self.send(&Packet::syn(SERVER, port, from_port));
        let until = Instant::now() + NEVER;
        loop {
            let (_, protocol, body) = self.next(until.saturating_duration_since(Instant::now()))?;
            let is_answer = protocol == 6 && body[2..4] == from_port.to_be_bytes() && body[13] & 0x12 == 0x12;
            if let Some(theirs) = body.get(4..8).and_then(|bytes| bytes.first_chunk()).filter(|_| is_answer) {
                let numbers = [10, u32::from_be_bytes(*theirs).wrapping_add(1)];
                self.send(&Packet::tcp(SERVER, port, from_port, numbers, 0x10));
                return Some(numbers);
            }
        }
    }
}

#[test]
fn connections_that_end_between_the_walls_are_counted_by_the_host() {
    in_a_world(213, |world| {
        let settings = settings(world);
        let wall = Wall::new(world.place.tag, world.place.block, settings.clone()).expect("wall");
        wall.ensure().expect("loaded");
        let (id, slot, guest) = open_to_all(world, &settings, 18);
        let (_, _other_slot, other) = open_to_all(world, &settings, 19);
        let listener = world.internet(|| TcpListener::bind((SERVER, 80)).expect("bind"));
        let kept = other.connects(80, 29_000).expect("the other one connects");
        let mut taken = vec![listener.accept().expect("accept")];
        let mut begun = 0;
        for port in 30_000..30_100 {
            let Some(numbers) = guest.connects(80, port) else { break };
            taken.push(listener.accept().expect("accept"));
            begun += 1;
            // Its end is heard by the wall inside, and dies on the way to the other one.
            guest.send(&Packet { hops: 1, ..Packet::tcp(SERVER, 80, port, numbers, 4) });
            while guest.next(Duration::from_millis(1)).is_some() {}
        }
        assert!(begun >= CONNECTIONS, "only {begun} connections");
        assert!(begun <= CONNECTIONS * 5 / 4, "{begun} connections of one guest, which may have {CONNECTIONS}");
        assert!(tracked() <= CONNECTIONS * 5 / 4 + 2, "{} in the host's table", tracked());
        // With the Sandbox they are gone, the other one's are not, and whoever has the slot next begins with none.
        drop((slot, guest));
        release(&world.place, id).expect("release");
        assert_eq!(tracked(), 1, "what is left of a Sandbox that is gone");
        other.send(&Packet::tcp(SERVER, 80, 29_000, kept, 0x11));
        let (stream, _) = &mut taken[0];
        stream.set_read_timeout(Some(SOON)).expect("timeout");
        assert_eq!(io::Read::read(stream, &mut [0; 8]).expect("its end"), 0, "the other one's went with them");
        let (_, _slot, guest) = open_to_all(world, &settings, 18);
        let between = address::of_slot(world.place.block, id.slot()).octets();
        let counted = Tables::open().expect("tables").remove_element(
            &address::host_table(world.place.tag),
            address::TRACKED,
            &between,
        );
        assert!(!counted.expect("asked"), "those of the one before count");
        // Until the kernel has seen both ends of a new link up it carries nothing.
        let connects = (0..20).any(|_| guest.connects(80, 31_000).is_some());
        assert!(connects, "the next one of the slot does not connect");
    });
}

#[test]
fn questions_for_names_are_no_connections() {
    in_a_world(214, |world| {
        let _wall = world.wall();
        let (_, slot, mut guest) = open_to_all(world, &settings(world), 20);
        for port in 0..3 * CONNECTIONS as u16 {
            guest.send(&Packet::udp(GATEWAY, 53, 20_000 + port, b"a question"));
        }
        let asked = slot.resolver().expect("sockets")[0].try_clone().expect("socket");
        let asked = UdpSocket::from(asked);
        for _ in 0..3 * CONNECTIONS {
            asked.recv(&mut [0; 32]).expect("it arrives");
        }
        assert!(guest.reaches(&world.udp(SERVER, 4000)), "a connection more is one too many");
    });
}
