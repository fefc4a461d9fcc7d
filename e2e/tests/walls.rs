//! What a real guest's root tries against its walls: everything that can be sent, with both walls, with either of them alone,
//! and while whoever made them dies and comes back.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::num::NonZero;
use std::time::Duration;

use pepo_e2e::crowd::{FLOODS, Two};
use pepo_e2e::line::Line;
use pepo_e2e::names::Has;
use pepo_e2e::walls::Walls;
use pepo_e2e::world::{CLOSED, HOST, OTHER, SERVER, World};
use pepo_e2e::{Instance, until};
use rustix::net::{AddressFamily, Protocol, SendFlags, SocketType};
use rustix::process::{Pid, Signal, kill_process};

const MINUTE: Duration = Duration::from_secs(60);
const HOSTILE: &str = include_str!("guest/hostile.py");

fn session(instance: &Instance, network: &str) -> String {
    let words = ["session", "create", "-q", "--workspace", "none", "--net", network];
    instance.pepo(words).ok().out().trim().to_owned()
}

/// A guest's root, who does what a line says.
fn hostile(instance: &Instance, session: &str) -> Line {
    Line::open(instance, session, &["sudo", "python3", "-u", "-c", HOSTILE])
}

/// Which of them it reaches.
fn reached(guest: &mut Line, targets: &[String]) -> Vec<String> {
    guest.ask(&format!("reach {}", targets.join(" "))).split_whitespace().map(str::to_owned).collect()
}

/// The address of every Sandbox between the walls, as the host routes it.
fn between(world: &World) -> Vec<Ipv4Addr> {
    let routes = world.on_host(|| std::fs::read_to_string("/proc/thread-self/net/route").expect("routes"));
    let ours = routes.lines().filter(|line| line.starts_with("pp"));
    let number = |line: &str| u32::from_str_radix(line.split('\t').nth(1).expect("an address"), 16).expect("hex");
    ours.map(|line| Ipv4Addr::from(number(line).to_le_bytes())).collect()
}

/// A packet of the host's own, as somebody without a policy sends it.
fn from_host(world: &World, protocol: u32, body: &[u8]) {
    world.on_host(|| {
        let protocol = Some(Protocol::from_raw(NonZero::new(protocol).expect("a protocol")));
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::RAW, protocol).expect("socket");
        rustix::net::sendto(&socket, body, SendFlags::empty(), &SocketAddrV4::new(SERVER, 0)).expect("send");
    });
}

#[test]
fn a_guests_root_is_kept_in_by_both_walls_and_by_either_alone() {
    let mut world = World::new();
    world.serve(80);
    world.serve_on_host(8080);
    // What is seen of the guest's tricks in the internet. Each is seen when somebody without a policy does it.
    let tricks = [
        ("protocols", "ip protocol != { tcp, udp, icmp }"),
        ("datagrams", "udp dport 5000-5999"),
        ("messages", "icmp type != { echo-request, echo-reply }"),
        ("pieces", "ip frag-off & 0x1fff != 0"),
    ];
    for (name, what) in tricks {
        world.count(name, what);
    }
    from_host(&world, 4, &[0; 40]);
    from_host(&world, 1, &[13, 0, 0xf2, 0xff, 0, 0, 0, 0]);
    world.on_host(|| {
        let socket = UdpSocket::bind((HOST, 0)).expect("bind");
        socket.send_to(b"x", (SERVER, 5000)).expect("send");
        socket.send_to(&[0; 5000], (SERVER, 5000)).expect("send");
    });
    for (name, what) in tricks {
        assert!(world.counted(name) > 0, "{what} is not seen at all");
    }
    for address in CLOSED.into_iter().chain([SERVER, OTHER]) {
        assert!(world.host_reaches(address, 80), "{address} cannot be reached at all");
    }
    assert!(world.host_reaches(HOST, 8080));

    let instance = world.instance("");
    let up = instance.up();
    let (id, other) = (session(&instance, "public"), session(&instance, "public"));
    let serve = ["exec", &other, "--", "sudo", "python3", "-u", "-m", "http.server", "80"];
    let mut serving = instance.pepo(serve).within(MINUTE * 5).start();
    serving.says("Serving", MINUTE);
    let mut guest = hostile(&instance, &id);
    let open: Vec<String> = [SERVER, OTHER].map(|address| format!("{address}:80")).into();
    let neighbours: Vec<String> = between(&world).iter().map(|address| format!("{address}:80")).collect();
    assert_eq!(neighbours.len(), 2, "{neighbours:?}");
    let mut targets = open.clone();
    targets.extend(CLOSED.map(|address| format!("{address}:80")));
    targets.extend(neighbours);
    let own = ["8.0.0.2:8080", "192.0.0.1:8080", "192.0.0.6:8080", "192.0.0.1:8443"].map(str::to_owned);
    let nothing_strange = |standing: &str| {
        for (name, what) in tricks {
            assert_eq!(world.counted(name), 0, "{standing}: {what} came out");
        }
    };

    let all = [&targets[..], &own].concat();
    assert_eq!(reached(&mut guest, &all), open);
    assert_eq!(guest.ask("anything"), "sent");
    nothing_strange("both");
    assert_eq!(reached(&mut guest, &open), open, "its own connections suffered");
    // The host's own addresses are its own wall's affair: inside nobody knows all of them at all times.
    let walls = Walls::remove(&world, &instance, false, true);
    assert_eq!(reached(&mut guest, &targets), open, "the wall inside alone");
    assert_eq!(guest.ask("anything"), "sent");
    nothing_strange("the wall inside alone");
    drop(walls);
    let walls = Walls::remove(&world, &instance, true, false);
    assert_eq!(reached(&mut guest, &all), open, "the host's wall alone");
    drop(walls);
    assert_eq!(reached(&mut guest, &all), open, "both again");

    // Pieces of a datagram that together, or one over another, say a port that is not open.
    instance.pepo(["session", "update", &id, "--net", "allow=8.0.0.1:4000/udp"]).ok();
    assert_eq!(guest.ask("fragments"), "sent");
    assert_eq!(world.counted("datagrams"), 0, "pieces said another port");
    assert!(reached(&mut guest, &all).is_empty());
    guest.close();
    assert!(serving.runs(), "nobody served in the other guest");
    serving.signal(Signal::INT);
    serving.wait();
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}

#[test]
fn nothing_opens_while_the_daemon_dies_and_comes_back() {
    let mut world = World::new();
    world.serve(80);
    world.serve(53);
    world.serve_on_host(8080);
    world.count("resolvers", "ip daddr 9.1.1.1 udp dport 53");
    world.on_host(|| {
        UdpSocket::bind((HOST, 0)).expect("bind").send_to(b"x", (OTHER, 53)).expect("send");
    });
    assert!(world.counted("resolvers") > 0 && world.host_reaches(OTHER, 53) && world.host_reaches(HOST, 8080));
    let names = world.names();
    names.say("a.example.com", Has::Addresses(vec![SERVER]));
    names.say("b.example.com", Has::Addresses(vec![OTHER]));
    let instance = world.instance(&format!("[network]\ndns = \"{SERVER}\"\n"));
    let up = instance.up();
    let guest = session(&instance, "allow=8.0.0.1:80,a.example.com");
    let mut targets: Vec<String> = [SERVER, OTHER].into_iter().chain(CLOSED).map(|to| format!("{to}:80")).collect();
    targets.extend(["9.1.1.1:53", "8.0.0.1:53", "8.0.0.2:8080", "192.0.0.1:8080"].map(str::to_owned));
    let mut words = vec!["exec", &guest, "--", "sudo", "python3", "-u", "-c", HOSTILE, "for ever", "b.example.com"];
    words.extend(targets.iter().map(String::as_str));
    let trying = instance.pepo(words).within(MINUTE * 5).start();
    trying.says("ready", MINUTE);
    for victim in ["pepod", "pepo-host", "pepod", "pepo-host"] {
        let before = instance.pids("pepod");
        let pid = instance.pids(victim)[0];
        kill_process(Pid::from_raw(pid).expect("pid"), Signal::KILL).expect("kill");
        until("pepod is started again", MINUTE, || {
            let now = instance.pids("pepod");
            (now.len() == 1 && now != before).then_some(())
        });
        until("it answers again", MINUTE, || {
            instance.pepo(["session", "show", &guest]).run().code().filter(|code| *code == 0)
        });
    }
    instance.pepo(["exec", &guest, "--", "sudo", "touch", "stop"]).ok();
    let ran = trying.wait();
    let said = ran.out();
    let said: Vec<&str> = said.lines().last().unwrap_or_default().split_whitespace().collect();
    let (rounds, ever) = said.split_first().unwrap_or_else(|| panic!("{ran}"));
    assert!(rounds.parse::<u32>().is_ok_and(|rounds| rounds >= 5), "{ran}");
    assert_eq!(ever, ["8.0.0.1:80"], "{ran}");
    assert_eq!(world.counted("resolvers"), 0, "another resolver was asked");
    assert!(!names.asked().iter().any(|name| name == "b.example.com"), "a name off the list was asked for");
    // And right after all that everything is as it should be.
    let mut again = hostile(&instance, &guest);
    assert_eq!(reached(&mut again, &targets), ["8.0.0.1:80"]);
    again.close();
    let mut fresh = hostile(&instance, &session(&instance, "public"));
    assert_eq!(reached(&mut fresh, &targets), ["8.0.0.1:53", "8.0.0.1:80", "9.1.1.1:53", "9.1.1.1:80"]);
    fresh.close();
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}

#[test]
fn two_thousand_connections_and_floods_of_one_guest_take_none_from_another() {
    const COUNT: usize = 2000;
    let two = Two::new("connections = 2500\nflows = 20000\n");
    println!("network.alone {}", two.looks(10));
    let (alive, looks) = two.connections(COUNT, 0.02, 10);
    println!("network.beside_connections {looks}");
    assert_eq!((alive, looks.lost), (COUNT, 0));
    for flood in FLOODS {
        let looks = two.beside(flood, 10);
        println!("network.beside_flood {}: {looks}", flood.name);
        assert_eq!(looks.lost, 0, "beside a flood of {}", flood.name);
    }
    two.end();
}
