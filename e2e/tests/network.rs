//! The network boundary, from real guests, over real packets, on a host that the test made. (The engine's own tests send
//! what no program of a guest can; here it is the whole of Pepo.)

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pepo_api::client::Client;
use pepo_api::{CreateCommand, CreateSession, NetworkSpec, OnDisconnect, Session, Text, UpdateSession};
use pepo_e2e::world::{CLOSED, HOST, OTHER, SERVER, World};
use pepo_e2e::{Instance, until, until_still};
use rustix::process::{Pid, Signal, kill_process};

const MINUTE: Duration = Duration::from_secs(60);

fn network(json: &str) -> Option<NetworkSpec> {
    Some(serde_json::from_str(json).expect("a network"))
}

async fn session(client: &Client, json: &str) -> Session {
    client.session_create(&CreateSession { network: network(json), ..Default::default() }).await.expect("session")
}

async fn run(client: &Client, session: &Session, command: &str) -> String {
    let command = CreateCommand { command: Some(command.into()), wait_seconds: Some(120), ..Default::default() };
    let output = client.command_create(&session.id.to_string(), &command).await.expect("command");
    match output.stdout {
        Text::Utf8(text) => text,
        other => panic!("{other:?}"),
    }
}

/// One line for each address: what was reached there, or `refused`.
async fn reached(client: &Client, session: &Session, addresses: &[std::net::Ipv4Addr], port: u16) -> Vec<String> {
    let all: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let script = format!("for a in {}; do curl -s -m 4 http://$a:{port}/ || echo refused; done", all.join(" "));
    run(client, session, &script).await.lines().map(str::to_owned).collect()
}

async fn patch(client: &Client, session: &Session, json: &str) {
    let update = UpdateSession { network: network(json), ..Default::default() };
    client.session_update(&session.id.to_string(), &update).await.expect("update");
}

async fn end(instance: Instance) {
    tokio::task::spawn_blocking(move || instance.end()).await.expect("the end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_reaches_what_is_public_and_nothing_else() {
    let mut world = World::new();
    world.serve(80);
    let on_host = world.serve_on_host(8080);
    for address in CLOSED.into_iter().chain([SERVER, OTHER]) {
        assert!(world.host_reaches(address, 80), "{address} cannot be reached at all");
    }
    assert!(world.host_reaches(HOST, 8080));
    let taken = until("the control is counted", MINUTE, || {
        Some(world.server(on_host).taken.load(Ordering::Relaxed)).filter(|taken| *taken == 1)
    });
    let instance = world.instance("");
    let _daemon = instance.up();
    let client = instance.client();
    let open = client.session_create(&CreateSession::default()).await.expect("session");
    assert_eq!(open.network.mode, pepo_api::NetworkMode::Public, "the default is another");

    assert_eq!(
        reached(&client, &open, &[SERVER, OTHER], 80).await,
        [format!("reached {SERVER}"), format!("reached {OTHER}")]
    );
    assert_eq!(reached(&client, &open, &CLOSED, 80).await, ["refused"; 5]);
    // The host itself, by its address and by what the guest has as its next hop.
    let own = [HOST, std::net::Ipv4Addr::new(192, 0, 0, 1)];
    assert_eq!(reached(&client, &open, &own, 8080).await, ["refused"; 2]);
    assert_eq!(world.server(on_host).taken.load(Ordering::Relaxed), taken, "the host was reached");

    // What no ordinary program sends: another's address, ARP, IPv6, a VLAN, from the guest's root.
    let strange = r#"sudo python3 - <<'E'
import socket
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(("eth0", 0))
us, gw = bytes.fromhex("02706570 6f02".replace(" ", "")), bytes.fromhex("027065706f01")
def ip(src, dst=bytes([8, 0, 0, 1])):
    h = bytes([0x45, 0, 0, 28, 0, 1, 0, 0, 64, 17, 0, 0]) + src + dst
    c = sum(int.from_bytes(h[i:i+2], "big") for i in range(0, 20, 2)); c = (c & 0xffff) + (c >> 16); c = ~((c & 0xffff) + (c >> 16)) & 0xffff
    return h[:10] + c.to_bytes(2, "big") + h[12:] + bytes([0, 9, 0, 80, 0, 8, 0, 0])
for _ in range(5):
    s.send(gw + us + b"\x08\x00" + ip(bytes([8, 0, 0, 9])))
    s.send(b"\xff" * 6 + us + b"\x08\x06" + bytes(28))
    s.send(gw + us + b"\x86\xdd" + bytes([0x60]) + bytes(59))
    s.send(gw + us + b"\x81\x00\x00\x05\x08\x00" + ip(bytes([192, 0, 0, 2])))
E
cat /proc/sys/net/ipv6/conf/eth0/disable_ipv6"#;
    assert_eq!(run(&client, &open, strange).await, "1\n");
    let stats = client.session_stats(&open.id.to_string()).await.expect("stats").network.expect("a network");
    assert!(stats.refused.spoofed >= 5 && stats.refused.malformed >= 15, "{stats:?}");
    assert!(stats.refused.floor >= 5 && stats.connections >= 2 && stats.received_bytes > 0, "{stats:?}");

    // Another Sandbox, by the address that it has between the walls, and from outside.
    let other = session(&client, r#"{"mode": "public"}"#).await;
    run(&client, &other, "setsid python3 -m http.server 80 >/dev/null 2>&1 & sleep 1; curl -s -m 5 -o /dev/null http://127.0.0.1/ && echo up").await;
    let routes = world.on_host(|| std::fs::read_to_string("/proc/thread-self/net/route").expect("routes"));
    let between: Vec<_> = routes
        .lines()
        .filter(|line| line.starts_with("pp"))
        .map(|line| u32::from_str_radix(line.split('\t').nth(1).expect("an address"), 16).expect("hex"))
        .map(|number| std::net::Ipv4Addr::from(number.to_le_bytes()))
        .collect();
    assert!(between.len() >= 2, "{routes}");
    assert_eq!(reached(&client, &open, &between, 80).await, vec!["refused"; between.len()]);
    for address in &between {
        assert!(
            !world.on_host({
                let to = std::net::SocketAddr::from((*address, 80));
                move || std::net::TcpStream::connect_timeout(&to, Duration::from_secs(1)).is_ok()
            }),
            "{address} is reached from the host"
        );
    }

    // An entry on the floor is refused, with its place and why.
    let wrong = network(r#"{"mode": "allow", "allow": [{"cidr": "9.0.0.0/8"}, {"cidr": "169.254.169.254"}]}"#);
    let error =
        client.session_create(&CreateSession { network: wrong, ..Default::default() }).await.expect_err("floor");
    let text = format!("{error:?}");
    assert!(
        text.contains("entry 1: 169.254.169.254/32 is on the floor (link-local and cloud metadata, 169.254.0.0/16)"),
        "{text}"
    );

    // What `make run` shows first: its attacks fail with a network too.
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/agent");
    let program = instance.pepo(["run", "--copy", example, "--", "python3", "agent.py"]).within(3 * MINUTE);
    let ran = tokio::task::spawn_blocking(move || program.run()).await.expect("the example");
    assert!(ran.out().contains("13 of 13 as they should be") && ran.code() == Some(0), "{ran}");
    end(instance).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_cuts_what_it_forbids_and_death_of_the_daemon_changes_nothing() {
    let mut world = World::new();
    let web = world.serve(80);
    let instance = world.instance("");
    let daemon = instance.up();
    let client = instance.client();
    let both = r#"{"mode": "allow", "allow": [{"cidr": "8.0.0.1", "ports": [80]}, {"cidr": "9.1.1.0/24"}]}"#;
    let one = r#"{"mode": "allow", "allow": [{"cidr": "9.1.1.0/24"}]}"#;
    let session = session(&client, both).await;
    assert_eq!(reached(&client, &session, &[SERVER, OTHER, CLOSED[0]], 80).await[2], "refused");
    let download = CreateCommand {
        command: Some(format!("curl -s -N http://{SERVER}/stream | wc -c")),
        on_disconnect: Some(OnDisconnect::Keep),
        wait_seconds: Some(0),
        ..Default::default()
    };
    client.command_create(&session.id.to_string(), &download).await.expect("command");
    let streamed = || world.server(web).streamed.load(Ordering::Relaxed);
    until("the download begins", MINUTE, || (streamed() > 4096).then_some(()));

    // The privileged half dies, and with it the daemon: the download goes on, what is refused stays so.
    let before = instance.pids("pepod");
    let host = instance.pids("pepo-host");
    kill_process(Pid::from_raw(host[0]).expect("pid"), Signal::KILL).expect("kill");
    let at = streamed();
    until("the download goes on meanwhile", MINUTE, || (streamed() > at + 2048).then_some(()));
    until("pepod is started again", MINUTE, || {
        let now = instance.pids("pepod");
        (now.len() == 1 && now != before).then_some(())
    });
    let client = instance.client();
    let begun = Instant::now();
    while client.session_show(&session.id.to_string(), &Default::default()).await.is_err() {
        assert!(begun.elapsed() < MINUTE, "the daemon does not answer again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(
        reached(&client, &session, &[OTHER, CLOSED[0]], 80).await,
        [format!("reached {OTHER}"), "refused".to_owned()]
    );
    let at = streamed();
    until("the download goes on afterwards", MINUTE, || (streamed() > at + 2048).then_some(()));

    // A change in its middle: it stops, at once, and the rest goes on.
    let begun = Instant::now();
    patch(&client, &session, one).await;
    println!("network.policy_change_live {:?}", begun.elapsed());
    // What the server's own buffers still take is a little; then nothing more.
    until_still("the download stops", MINUTE, streamed);
    assert_eq!(
        reached(&client, &session, &[SERVER, OTHER], 80).await,
        ["refused".to_owned(), format!("reached {OTHER}")]
    );
    patch(&client, &session, r#"{"mode": "none"}"#).await;
    assert_eq!(reached(&client, &session, &[SERVER, OTHER], 80).await, ["refused"; 2]);
    let shown = client.session_show(&session.id.to_string(), &Default::default()).await.expect("show");
    assert_eq!(shown.network.mode, pepo_api::NetworkMode::None);

    // Somebody empties the host's tables: the wall is put back.
    patch(&client, &session, r#"{"mode": "public"}"#).await;
    world.nft(&["flush", "ruleset"]);
    until("the wall stands again", MINUTE, || world.nft(&["list", "tables"]).contains("inet pepo_").then_some(()));
    assert_eq!(
        reached(&client, &session, &[SERVER, CLOSED[1]], 80).await,
        [format!("reached {SERVER}"), "refused".to_owned()]
    );
    drop(daemon);
    end(instance).await;
    assert!(!world.nft(&["list", "tables"]).contains("pepo"), "the wall is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_app_narrows_what_its_sessions_reach_at_once_and_counts_add_up() {
    let mut world = World::new();
    let web = world.serve(80);
    assert!(world.host_reaches(SERVER, 80) && world.host_reaches(OTHER, 80));
    let instance = world.instance("[network]\nopen = \"10.9.9.9:80/tcp\"\n");
    let _daemon = instance.up();
    let client = instance.client();
    let app = async |json: &str| {
        let network = Some(serde_json::from_str(json).expect("a policy"));
        client.app_update("default", &pepo_api::UpdateApp { network, ..Default::default() }).await.expect("app")
    };
    let both = r#"{"mode": "allow", "allow": [{"cidr": "8.0.0.0/24", "ports": [80]}, {"cidr": "9.1.1.0/24"}, {"cidr": "10.9.9.9"}]}"#;
    app(both).await;
    // It idles without a Workspace and comes back with an empty disk.
    let create = CreateSession { reactivate: Some(true), ..pepo_e2e::bare() };
    let session = client.session_create(&create).await.expect("session");
    let id = session.id.to_string();
    assert_eq!(Some(session.network.clone()), network(both), "it has not what its App has");
    let refused = CreateSession { network: network(r#"{"mode": "public"}"#), ..pepo_e2e::bare() };
    let error = format!("{:?}", client.session_create(&refused).await.expect_err("beyond the App"));
    assert!(error.contains("the App `default` does not allow `public`"), "{error}");
    // What the operator took off the floor is reached by the entry that names it.
    let all = [SERVER, OTHER, CLOSED[2]];
    assert_eq!(reached(&client, &session, &all, 80).await, all.map(|address| format!("reached {address}")));

    let download = CreateCommand {
        command: Some(format!("curl -s -N http://{SERVER}/stream | wc -c")),
        wait_seconds: Some(0),
        ..Default::default()
    };
    client.command_create(&id, &download).await.expect("command");
    let streamed = || world.server(web).streamed.load(Ordering::Relaxed);
    until("the download begins", MINUTE, || (streamed() > 4096).then_some(()));
    app(r#"{"mode": "allow", "allow": [{"cidr": "9.0.0.0/8", "ports": [80]}]}"#).await;
    until_still("the download stops", MINUTE, streamed);
    let narrowed = ["refused".to_owned(), format!("reached {OTHER}"), "refused".to_owned()];
    assert_eq!(reached(&client, &session, &all, 80).await, narrowed);
    let shown = client.session_show(&id, &Default::default()).await.expect("show");
    assert_eq!(Some(shown.network.clone()), network(both), "what was said of it is forgotten");
    assert!(shown.network_notes[0].contains("narrowed by its App: entry 0 (8.0.0.0/24:80)"), "{shown:?}");
    let update = UpdateSession { network: network(both), ..Default::default() };
    let error = format!("{:?}", client.session_update(&id, &update).await.expect_err("beyond the App"));
    assert!(error.contains("entry 0 (8.0.0.0/24:80): the network policy of the App `default`"), "{error}");

    // Another activation: the same policy under the same ceiling, and counts that go on from where they were.
    let before = client.session_stats(&id).await.expect("stats").network_total.expect("a total");
    client.session_release(&id).await.expect("release");
    assert_eq!(reached(&client, &session, &all, 80).await, narrowed);
    let stats = client.session_stats(&id).await.expect("stats");
    let (now, total) = (stats.network.expect("a network"), stats.network_total.expect("a total"));
    assert!(before.connections >= 4 && now.connections == 1, "{before:?} {now:?}");
    assert_eq!(total.connections, before.connections + now.connections);
    assert!(total.sent_bytes >= before.sent_bytes + now.sent_bytes, "{before:?} {now:?} {total:?}");
    assert!(total.refused.unlisted > before.refused.unlisted && total.refused.revoked >= 1, "{total:?}");
    // Who opened the floor is on record, and the operator is told.
    let audit = instance.pepo(["events", "--audit", "--json"]).ok().out();
    let row = audit.lines().find(|line| line.contains("floor.changed")).unwrap_or_else(|| panic!("{audit}"));
    assert!(row.contains("uid:0") && row.contains("10.9.9.9:80/tcp"), "{row}");
    let doctor = instance.pepo(["doctor"]).run().out();
    assert!(doctor.contains("taken off the floor by network.open"), "{doctor}");
    assert!(instance.pepo(["config", "show"]).ok().out().contains("10.9.9.9:80/tcp"));
    // Back to what this instance allows.
    let network = Some(None);
    client.app_update("default", &pepo_api::UpdateApp { network, ..Default::default() }).await.expect("app");
    assert_eq!(reached(&client, &session, &all, 80).await, all.map(|address| format!("reached {address}")));
    end(instance).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_one_guest_takes_nothing_from_another() {
    let mut world = World::new();
    world.serve(80);
    let (open, shut) = (world.datagrams(4000), world.datagrams(4001));
    let instance = world.instance("[network]\nconnections = 64\nflows = 50\npackets = 2000\n");
    let _daemon = instance.up();
    let client = instance.client();
    let entries = r#"{"cidr": "8.0.0.1", "ports": [4000], "protocol": "udp"}, {"cidr": "8.0.0.1", "ports": [80]},
        {"cidr": "8.0.0.1", "protocol": "icmp"}"#;
    let noisy = session(&client, &format!(r#"{{"mode": "allow", "allow": [{entries}]}}"#)).await;
    let quiet = session(&client, r#"{"mode": "public"}"#).await;

    // Fragments and echoes, from a guest's own kernel: of what is open they pass, of what is not they do not.
    let large = r#"sudo python3 - <<'E'
import socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in (4001, 4000): s.sendto(b"x" * 5000, ("8.0.0.1", port))
def sum16(b): t = sum(struct.unpack(">%dH" % (len(b) // 2), b)); t = (t >> 16) + (t & 65535); return ~(t + (t >> 16)) & 65535
def echo(to):
    i = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); i.settimeout(3)
    head = struct.pack(">BBHHH", 8, 0, 0, 7, 1)
    i.sendto(struct.pack(">BBHHH", 8, 0, sum16(head), 7, 1), (to, 0))
    try:
        while True:
            data, who = i.recvfrom(100)
            if data[20] == 0 and who[0] == to: return "echo"
    except OSError: return "nothing"
print(echo("8.0.0.1"), echo("9.1.1.1"))
E"#;
    assert_eq!(run(&client, &noisy, large).await, "echo nothing\n");
    let mut buffer = [0; 8192];
    assert_eq!(open.recv(&mut buffer).expect("what is open arrives in fragments"), 5000);
    shut.set_read_timeout(Some(Duration::from_millis(200))).expect("timeout");
    assert!(shut.recv(&mut buffer).is_err(), "fragments evaded the port");

    // As many connections and packets as it can make, while another one opens connections.
    let flood = r#"cat >flood.py <<'E'
import socket, time
kept = []; end = time.time() + 20
while time.time() < end:
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(200):
        try: u.sendto(b"x", ("8.0.0.1", 4000))
        except OSError: pass
    u.close()
    for _ in range(20):
        s = socket.socket(); s.setblocking(False)
        try: s.connect(("8.0.0.1", 80))
        except OSError: pass
        kept.append(s)
    while len(kept) > 500: kept.pop(0).close()
E
setsid python3 flood.py >/dev/null 2>&1 & sleep 2; echo flooding"#;
    assert_eq!(run(&client, &noisy, flood).await, "flooding\n");
    let begun = Instant::now();
    let gets = format!("for i in 1 2 3 4 5 6 7 8 9 10; do curl -s -m 10 http://{SERVER}/ || echo lost; done");
    assert_eq!(run(&client, &quiet, &gets).await, format!("reached {SERVER}\n").repeat(10));
    println!("network.beside_a_flood {:?}", begun.elapsed());
    let of = async |session: &Session| {
        client.session_stats(&session.id.to_string()).await.expect("stats").network.expect("a network")
    };
    let (flooded, other) = (of(&noisy).await, of(&quiet).await);
    assert!(flooded.refused.rate + flooded.refused.connections > 100, "{flooded:?}");
    assert!(flooded.refused.packets > 0, "{flooded:?}");
    assert_eq!((other.refused.rate, other.refused.connections, other.refused.packets), (0, 0, 0), "{other:?}");
    let tracked = world.on_host(|| std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count"));
    let tracked: u32 = tracked.expect("a count").trim().parse().expect("a number");
    assert!(tracked < 1000, "{tracked} connections in the host's table");
    end(instance).await;
}
