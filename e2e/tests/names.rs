//! Domain rules from real guests: a name opens a name, not whatever else is at its address, and names off the list do not
//! even leave the host.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::Ipv4Addr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pepo_api::client::Client;
use pepo_api::{CreateCommand, CreateSession, NetworkSpec, Session, Text, UpdateSession};
use pepo_e2e::names::Has;
use pepo_e2e::world::{CLOSED, OTHER, SERVER, World};
use pepo_e2e::{until, until_still};
use rustix::process::{Pid, Signal, kill_process};

const MINUTE: Duration = Duration::from_secs(60);

fn network(json: &str) -> Option<NetworkSpec> {
    Some(serde_json::from_str(json).expect("a network"))
}

async fn run(client: &Client, session: &Session, command: &str) -> String {
    let command = CreateCommand { command: Some(command.into()), wait_seconds: Some(300), ..Default::default() };
    match client.command_create(&session.id.to_string(), &command).await.expect("command").stdout {
        Text::Utf8(text) => text,
        other => panic!("{other:?}"),
    }
}

/// A greeting with that name in its open part, and another one encrypted if `inner`: what comes back, in hex, or nothing.
fn greet(to: Ipv4Addr, name: &str, inner: bool) -> String {
    format!(
        r#"python3 - <<'E'
import socket, struct
name, inner = b"{name}", {}
ext = lambda kind, data: struct.pack(">HH", kind, len(data)) + data
exts = ext(0, struct.pack(">HBH", len(name) + 3, 0, len(name)) + name) + (ext(0xfe0d, bytes(64)) if inner else b"")
body = b"\x03\x03" + bytes(32) + b"\x00\x00\x02\x13\x01\x01\x00" + struct.pack(">H", len(exts)) + exts
hello = b"\x01\x00" + struct.pack(">H", len(body)) + body
s = socket.create_connection(("{to}", 443), 20); s.settimeout(20)
s.sendall(b"\x16\x03\x01" + struct.pack(">H", len(hello)) + hello)
print(s.recv(100)[:12])
E
"#,
        if inner { "True" } else { "False" }
    )
}

fn events(instance: &pepo_e2e::Instance) -> String {
    let socket = instance.socket();
    let url = "http://pepo/v1/events?limit=500";
    let mut curl = std::process::Command::new("curl");
    curl.args(["-s", "-m", "20", "--unix-socket"]).arg(socket).arg(url);
    String::from_utf8_lossy(&curl.output().expect("curl").stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_opens_a_name_and_not_its_neighbours() {
    let mut world = World::new();
    let web = world.serve(80);
    let tls = world.serve(443);
    let names = world.names();
    let of = |address| Has::Addresses(vec![address]);
    names.say("a.example.com", of(SERVER));
    names.say("neighbour.example.net", of(SERVER));
    names.say("www.example.com", Has::Alias("cdn.example.net".into()));
    names.say("cdn.example.net", of(OTHER));
    names.say("moving.example.com", of(OTHER));
    assert!(world.host_reaches(SERVER, 80) && world.host_reaches(SERVER, 443) && world.host_reaches(CLOSED[2], 80));
    let instance = world.instance(&format!("[network]\ndns = \"{SERVER}\"\n"));
    let daemon = instance.up();
    let client = instance.client();
    let policy = r#"{"mode": "allow", "allow": [{"domain": "a.example.com"}, {"domain": "www.example.com"},
        {"domain": "moving.example.com"}]}"#;
    let create = CreateSession { network: network(policy), ..Default::default() };
    let session = client.session_create(&create).await.expect("session");

    // By name, and through an alias that is nobody's to ask for.
    let get = "curl -s -m 20";
    assert_eq!(run(&client, &session, &format!("{get} http://a.example.com/")).await, format!("reached {SERVER}\n"));
    assert_eq!(run(&client, &session, &format!("{get} http://www.example.com/")).await, format!("reached {OTHER}\n"));
    assert_eq!(
        run(&client, &session, &format!("{get} http://moving.example.com/")).await,
        format!("reached {OTHER}\n")
    );

    // The neighbour at the very same address, which is open by now: over HTTP and over TLS.
    let taken = |server: usize| world.server(server).taken.load(Ordering::Relaxed);
    let before = (taken(web), taken(tls));
    let host = format!("{get} -H 'Host: neighbour.example.net' http://a.example.com/");
    let text = run(&client, &session, &host).await;
    assert_eq!(text, "pepo: neighbour.example.net: no rule of the network policy names it on this port\n");
    let alert = r"b'\x15\x03\x03\x00\x02\x02p'";
    assert_eq!(run(&client, &session, &greet(SERVER, "neighbour.example.net", false)).await.trim(), alert);
    assert_eq!(run(&client, &session, &greet(SERVER, "neighbour.example.net", true)).await.trim(), alert);
    assert!(
        run(&client, &session, &format!("{get} http://{SERVER}/")).await.starts_with("pepo: "),
        "an address passed"
    );
    assert_eq!((taken(web), taken(tls)), before, "somebody came through");
    // The name of the rule passes, and where another greeting is encrypted its outer name counts.
    for inner in [false, true] {
        let reached = run(&client, &session, &greet(SERVER, "a.example.com", inner)).await;
        assert!(reached.contains("HTTP/1.0 200"), "{reached}");
    }
    assert_eq!(taken(tls), before.1 + 2);

    // What is not on the list is refused, and no query leaves.
    let asked = names.asked().len();
    let lookups = "for n in neighbour.example.net cdn.example.net c2VjcmV0.evil.example.org example.com; do
        getent hosts $n || echo none; done; getent ahostsv6 a.example.com || echo no6";
    assert_eq!(run(&client, &session, lookups).await, "none\nnone\nnone\nnone\nno6\n");
    assert_eq!(names.asked().len(), asked, "{:?}", &names.asked()[asked..]);

    // An allowed name that moves to a private address leads nowhere.
    names.say("moving.example.com", of(CLOSED[2]));
    let moved = run(&client, &session, "getent hosts moving.example.com || echo none").await;
    assert_eq!(moved, "none\n");

    // The daemon dies: the relay lives on, and the next one answers it.
    let relays = instance.pids("pepo-relay");
    assert_eq!(relays.len(), 1);
    let pepod = instance.pids("pepod");
    kill_process(Pid::from_raw(pepod[0]).expect("pid"), Signal::KILL).expect("kill");
    again(&instance, &pepod);
    let client = instance.client();
    assert_eq!(run(&client, &session, &format!("{get} http://a.example.com/")).await, format!("reached {SERVER}\n"));
    assert_eq!(run(&client, &session, &host).await, text);
    assert_eq!(instance.pids("pepo-relay"), relays);

    // A relay that dies is replaced.
    kill_process(Pid::from_raw(relays[0]).expect("pid"), Signal::KILL).expect("kill");
    until("another relay", MINUTE, || {
        let now = instance.pids("pepo-relay");
        (now.len() == 1 && now != relays).then_some(())
    });
    let again = format!("for i in 1 2 3 4 5 6 7 8 9; do {get} http://a.example.com/ && break; sleep 1; done");
    assert_eq!(run(&client, &session, &again).await, format!("reached {SERVER}\n"));

    // It is all told.
    let told = events(&instance);
    for expected in ["network.opened", "network.connected", "name_not_listed", "answer_on_floor", "tls_outer"] {
        assert!(told.contains(expected), "no {expected} in {told}");
    }
    drop(daemon);
    tokio::task::spawn_blocking(move || instance.end()).await.expect("the end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tunnel_of_names_is_narrow_and_a_change_ends_relayed_connections() {
    let mut world = World::new();
    let web = world.serve(80);
    let names = world.names();
    names.say("a.example.com", Has::Addresses(vec![SERVER]));
    let instance = world.instance(&format!("[network]\ndns = \"{SERVER}\"\n"));
    let daemon = instance.up();
    let client = instance.client();
    let create = CreateSession { network: network(r#"{"mode": "public"}"#), ..Default::default() };
    let session = client.session_create(&create).await.expect("session");
    // As fast as it can, for two seconds.
    let tunnel = r#"python3 - <<'E'
import socket, struct, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); n = 0; end = time.time() + 2
while time.time() < end:
    labels = [b"d%d" % n, b"tunnel", b"example", b"net"]; n += 1
    s.sendto(struct.pack(">6H", n & 65535, 256, 1, 0, 0, 0) + b"".join(bytes([len(l)]) + l for l in labels) + b"\0\0\x10\0\1", ("192.0.0.1", 53))
print(n)
E"#;
    let sent: usize = run(&client, &session, tunnel).await.trim().parse().expect("a number");
    let left = names.asked().iter().filter(|name| name.ends_with("tunnel.example.net")).count();
    assert!(left > 0 && left <= 700, "{left} of {sent} questions left");

    // A download by name, which a change of the policy ends: at the server, in the relay, in the guest.
    let update = |json: &str| UpdateSession { network: network(json), ..Default::default() };
    let id = session.id.to_string();
    let by_name = update(r#"{"mode": "allow", "allow": [{"domain": "a.example.com"}]}"#);
    client.session_update(&id, &by_name).await.expect("update");
    let download = CreateCommand {
        command: Some("curl -s -N http://a.example.com/stream | wc -c".into()),
        wait_seconds: Some(0),
        ..Default::default()
    };
    client.command_create(&id, &download).await.expect("command");
    let streamed = || world.server(web).streamed.load(Ordering::Relaxed);
    until("the download begins", MINUTE, || (streamed() > 4096).then_some(()));
    let other = update(r#"{"mode": "allow", "allow": [{"domain": "b.example.com"}]}"#);
    client.session_update(&id, &other).await.expect("update");
    until_still("the download stops", MINUTE, streamed);
    assert_eq!(run(&client, &session, "getent hosts a.example.com || echo none").await, "none\n");
    drop(daemon);
    tokio::task::spawn_blocking(move || instance.end()).await.expect("the end");
}

/// Waits for another pepod than that, and for its socket.
fn again(instance: &pepo_e2e::Instance, before: &[i32]) {
    until("pepod is started again", MINUTE, || {
        let now = instance.pids("pepod");
        (now.len() == 1 && now != before).then_some(())
    });
    let connected = || std::os::unix::net::UnixStream::connect(instance.socket()).ok();
    until("pepod listens again", MINUTE, connected);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_hostile_resolver_answers_opens_nothing_it_should_not() {
    let mut world = World::new();
    world.serve(80);
    let names = world.names();
    let alias = |to: &str| Has::Alias(to.into());
    names.say("round.example.com", alias("and.example.com"));
    names.say("and.example.com", alias("round.example.com"));
    let many = (1..=200).map(|last| Ipv4Addr::new(9, 9, 1, last)).collect();
    names.say("huge.example.com", Has::Addresses(many));
    names.say("forged.example.com", Has::Forged { lie: OTHER, truth: SERVER });
    names.say("brief.example.com", Has::Brief(SERVER));
    names.say("mixed.example.com", Has::Addresses(vec![CLOSED[2], SERVER, CLOSED[0]]));
    assert!(world.host_reaches(SERVER, 80) && world.host_reaches(OTHER, 80) && world.host_reaches(CLOSED[2], 80));
    let instance = world.instance(&format!("[network]\ndns = \"{SERVER}\"\n"));
    let _daemon = instance.up();
    let client = instance.client();
    let policy = r#"{"mode": "allow", "allow": [{"domain": "*.example.com"}]}"#;
    let create = CreateSession { network: network(policy), ..Default::default() };
    let session = client.session_create(&create).await.expect("session");
    // The same twice: the second time by a daemon that has just been started, over rules that were there all the time.
    for life in ["first", "second"] {
        names.say("rebind.example.com", Has::Turns(vec![SERVER, CLOSED[2]]));
        let client = instance.client();
        let lookups = "for n in round huge rebind rebind mixed brief forged; do
            getent ahostsv4 $n.example.com | grep STREAM | cut -d' ' -f1 | tr '\\n' ' '; echo $n; done";
        assert_eq!(
            run(&client, &session, lookups).await,
            format!("round\nhuge\n{SERVER} rebind\nrebind\n{SERVER} mixed\n{SERVER} brief\n{SERVER} forged\n"),
            "in the {life} life"
        );
        // A time of nothing is enough to connect, a forged address is open to nobody, nor is one that a name moved to.
        let reach = format!(
            "for n in brief forged mixed; do curl -s -m 20 http://$n.example.com/; done
            for a in {OTHER} {} {}; do curl -s -m 3 http://$a/ || echo refused; done",
            CLOSED[2], CLOSED[0]
        );
        let reached = run(&client, &session, &reach).await;
        assert_eq!(reached, format!("{}{}", format!("reached {SERVER}\n").repeat(3), "refused\n".repeat(3)));
        if life == "first" {
            // What was counted of names is written down within seconds; a death loses no more than those.
            let begun = std::time::Instant::now();
            let id = session.id.to_string();
            let written = async || client.session_show(&id, &Default::default()).await.expect("show").network_used;
            while written().await.is_none_or(|used| used.names.asked < 10) {
                assert!(begun.elapsed() < MINUTE, "nothing was written down");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let pepod = instance.pids("pepod");
            let host = instance.pids("pepo-host");
            kill_process(Pid::from_raw(host[0]).expect("pid"), Signal::KILL).expect("kill");
            again(&instance, &pepod);
        }
    }
    let used = client.session_show(&session.id.to_string(), &Default::default()).await.expect("show").network_used;
    let stats = client.session_stats(&session.id.to_string()).await.expect("stats");
    let (now, total) = (stats.network.expect("a network"), stats.network_total.expect("a total"));
    println!("network.used {used:?}");
    for reason in ["dns_alias_loop", "dns_answer_size", "answer_on_floor"] {
        assert!(total.names.refused.get(reason).is_some_and(|count| *count >= 2), "{reason} in {total:?}");
    }
    assert!(total.names.asked > now.names.asked && total.names.dropped >= 4, "{total:?}");
    assert_eq!(total.sent_bytes, now.sent_bytes, "one Sandbox is all there was");
    let told = events(&instance);
    assert!(told.contains("dns_alias_loop"), "{told}");
    tokio::task::spawn_blocking(move || instance.end()).await.expect("the end");
}
