//! The network boundary: what crosses it, against what crosses the same guest's same tap without a rule of ours.
//!
//! The reference is not another guest: for its turns both walls are taken away, and what remains translates addresses.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use pepo_api::UpdateSession;
use pepo_e2e::line::Line;
use pepo_e2e::names::Has;
use pepo_e2e::walls::Walls;
use pepo_e2e::world::{OTHER, SERVER, World};

use crate::table::{Goal, MIB, Row, median};

/// Turns of ours, of the relay's and of the bare tap's, in that order.
const ROUNDS: usize = 5;
/// What is sent from the guest in one turn.
const SENT: usize = 64 * MIB;
/// Requests of one turn, each a connection of its own.
const REQUESTS: usize = 100;
const CHANGES: usize = 40;
/// Questions of one turn.
const QUESTIONS: usize = 100;

/// In the guest: `send HOST BYTES` and `ask HOST TIMES` say seconds, `names SERVER NAME TIMES` the middle one.
const GUEST: &str = r#"
import socket, struct, sys, time
def reply(s):
    while s.recv(65536): pass
def send(to, left):
    left, part = int(left), b"x" * 65536
    s = socket.create_connection((to, 80))
    s.sendall(b"POST / HTTP/1.1\r\nhost: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (to.encode(), left))
    began = time.monotonic()
    while left: left -= s.send(part[:left])
    reply(s)
    return time.monotonic() - began
def ask(to, times):
    times, began = int(times), time.monotonic()
    for _ in range(times):
        s = socket.create_connection((to, 80))
        s.sendall(b"GET / HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n" % to.encode())
        reply(s); s.close()
    return (time.monotonic() - began) / times
def names(to, name, times):
    times, took = int(times), []
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect((to, 53)); s.settimeout(5)
    asked = b"".join(bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\0\0\1\0\1"
    for n in range(times):
        began = time.monotonic()
        s.send(struct.pack(">6H", n, 256, 1, 0, 0, 0) + asked)
        s.recv(2000)
        took.append(time.monotonic() - began)
        time.sleep(0.012)
    return sorted(took)[times // 2]
print("ready", flush=True)
for line in sys.stdin:
    n, what, *rest = line.split()
    print("%s is %.9f." % (n, {"send": send, "ask": ask, "names": names}[what](*rest)), flush=True)
"#;

fn measure(guest: &mut Line, words: &str) -> f64 {
    guest.ask(words).parse().expect("a number")
}

/// MiB a second.
fn send(guest: &mut Line, to: &str) -> f64 {
    SENT as f64 / MIB as f64 / measure(guest, &format!("send {to} {SENT}"))
}

/// Milliseconds of a request.
fn ask(guest: &mut Line, to: &str) -> f64 {
    measure(guest, &format!("ask {to} {REQUESTS}")) * 1000.0
}

/// Measures it.
pub fn network() -> Vec<Row> {
    let world = World::new();
    let listener = world.in_internet(|| TcpListener::bind(("0.0.0.0", 80)).expect("bind"));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || answer(&stream));
        }
    });
    let names = world.names();
    names.say("a.example.com", Has::Addresses(vec![OTHER]));
    let limits = "flows = 100000\npackets = 10000000\nquestions = 10000\n";
    let instance = world.instance(&format!("[network]\n{limits}dns = \"{SERVER}\"\n"));
    let up = instance.up();
    let client = instance.client();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let session = instance.pepo(["session", "create", "-q", "--workspace", "none"]).ok().out().trim().to_owned();
    let policy = |more: &str| UpdateSession {
        network: Some(
            serde_json::from_str(&format!(
                r#"{{"mode": "allow", "allow": [{{"cidr": "8.0.0.1", "ports": [80]}}, {{"domain": "a.example.com"}},
                    {{"cidr": "8.0.0.1", "ports": [53], "protocol": "udp"}}{more}]}}"#
            ))
            .expect("a policy"),
        ),
        ..UpdateSession::default()
    };
    let change = |more: &str| {
        let (update, began) = (policy(more), Instant::now());
        runtime.block_on(client.session_update(&session, &update)).expect("update");
        began.elapsed().as_secs_f64() * 1000.0
    };
    change("");
    let mut guest = Line::open(&instance, &session, &["python3", "-u", "-c", GUEST]);
    let server = SERVER.to_string();
    let (mut sent, mut relayed, mut bare) = (vec![], vec![], vec![]);
    let (mut asked, mut asked_relay, mut asked_bare) = (vec![], vec![], vec![]);
    let (mut ours, mut upstream) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        sent.push(send(&mut guest, &server));
        asked.push(ask(&mut guest, &server));
        relayed.push(send(&mut guest, "a.example.com"));
        asked_relay.push(ask(&mut guest, "a.example.com"));
        upstream.push(measure(&mut guest, &format!("names {server} a.example.com {QUESTIONS}")));
        ours.push(measure(&mut guest, &format!("names 192.0.0.1 a.example.com {QUESTIONS}")));
        let walls = Walls::remove(&world, &instance, true, true);
        bare.push(send(&mut guest, &server));
        asked_bare.push(ask(&mut guest, &server));
        drop(walls);
    }
    let changes = (0..CHANGES).map(|n| change(if n % 2 == 0 { r#", {"cidr": "9.0.0.0/8"}"# } else { "" })).collect();
    guest.close();
    let (bare, asked_bare) = (median(bare), median(asked_bare));
    let row = |what: &str, ours, unit, goal| Row { what: what.to_owned(), ours, unit, goal };
    let rows = vec![
        row("guest egress", median(sent), "MiB/s", Goal::AtLeast { reference: bare, ratio: 0.95 }),
        row("request, each a new connection", median(asked), "ms", Goal::AtMost { reference: asked_bare, ratio: 1.1 }),
        row("guest egress through the relay", median(relayed), "MiB/s", Goal::AtLeast { reference: bare, ratio: 0.7 }),
        row("request through the relay", median(asked_relay), "ms", Goal::Against { reference: asked_bare }),
        row("change of a live policy, answered", median(changes), "ms", Goal::Below(10.0)),
        row(
            "name opened and answered, beyond its upstream",
            (median(ours) - median(upstream)) * 1000.0,
            "ms",
            Goal::Below(1.0),
        ),
    ];
    instance.pepo(["session", "rm", &session]).ok();
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
    rows
}

/// Takes a request and its body, and says one word.
fn answer(stream: &TcpStream) {
    let mut reader = BufReader::with_capacity(1 << 18, stream);
    let (mut line, mut length) = (String::new(), 0u64);
    while reader.read_line(&mut line).is_ok_and(|got| got > 2) {
        if let Some(text) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = text.trim().parse().expect("a length");
        }
        line.clear();
    }
    let _ = std::io::copy(&mut reader.take(length), &mut std::io::sink());
    let mut stream = stream;
    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
}
