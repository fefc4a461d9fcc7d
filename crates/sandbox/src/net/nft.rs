//! The two walls as `nft` loads them: one text for a Sandbox's namespace, loaded before its first packet and never changed
//! but for elements; one for the host's namespace, static.
//!
//! Both are whole without the other. Counters carry the reasons that people see: what was `unlisted` (no rule), on the
//! `floor`, `revoked` (its rule is gone), `crowded` (too many connections), `hasty` (too many new ones a second), `flood`
//! (too many packets), `asking` (too many questions for names), `spoofed` (another's address), `odd` (not plain IPv4 of a
//! known flow), `inbound` (begun from outside).

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::address::{self, GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, TABLE, TAP, TRACKED, UPLINK};
use super::policy::{Floor, Protocol, RELAYED_BITS};
use super::{Limits, RELAY_PORT};
use crate::id::{Tag, UidBlock};
use crate::proc;

/// Where distributions have `nft`.
const PROGRAMS: [&str; 5] = ["/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft", "/bin/nft", "/usr/local/sbin/nft"];

/// How long loading a text may take: 20 ms where nothing else runs.
const LOADED_WITHIN: Duration = Duration::from_secs(20);

/// Pairs of address and port that names may have open in one Sandbox at once, through its relay and as many past it.
pub const OPENINGS: usize = 4096;

/// The longest complaint of `nft` that is kept.
const COMPLAINT: u64 = 2048;

/// `nft`, if it is there.
pub fn program() -> Option<&'static Path> {
    PROGRAMS.iter().map(Path::new).find(|path| path.exists())
}

/// Loads a text in the calling thread's namespace, whole or not at all.
///
/// # Errors
/// `NotFound` without `nft`; what it complained otherwise.
pub fn load(text: &str) -> io::Result<()> {
    run(&["-f", "-"], text).map(drop)
}

/// Runs `nft` in the calling thread's namespace, with nothing of our environment, and returns what it printed.
pub(crate) fn run(arguments: &[&str], input: &str) -> io::Result<String> {
    const PRINTED: u64 = 4 << 20;
    let program = program().ok_or(io::ErrorKind::NotFound)?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (printed, complaint) = std::thread::scope(|scope| {
        let printed = scope.spawn(move || {
            let mut text = String::new();
            // What cannot be read is no answer; its end tells.
            let _ = stdout.map(|stdout| stdout.take(PRINTED).read_to_string(&mut text));
            text
        });
        let watched = proc::open(child.id());
        let fed = scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input.as_bytes())));
        if let Ok(pidfd) = &watched
            && !proc::wait(pidfd.as_fd(), LOADED_WITHIN)
        {
            let _ = proc::kill(pidfd.as_fd());
        }
        let mut complaint = String::new();
        let _ = stderr.map(|stderr| stderr.take(COMPLAINT).read_to_string(&mut complaint));
        // Its status tells whether it had all it wanted.
        let _ = fed.join();
        (printed.join().unwrap_or_default(), complaint)
    });
    let status = child.wait()?;
    if status.success() {
        return Ok(printed);
    }
    let complaint = complaint.lines().next().unwrap_or("nothing").to_owned();
    Err(io::Error::other(format!("nft ({status}) says: {complaint}")))
}

/// The wall in a Sandbox's namespace. `slot` is its address between the walls, `relay` the uid of its relay.
///
/// The kernel makes room for as many openings as a map may have at once, and looks through all of that room every second for
/// those whose time is over: with three maps of 16,384 in each, the two hundredth wall took 21 ms to load where the first took
/// 13 (6.18).
pub fn inside(slot: Ipv4Addr, relay: u32, limits: &Limits, floor: &Floor) -> String {
    let Limits {
        connections, flows_per_second: flows, packets_per_second: packets, questions_per_second: asks, ..
    } = limits;
    let (flow_burst, packet_burst, ask_burst) = (flows * 2, (packets / 4).max(64), asks * 4);
    let floor = elements(floor);
    format!(
        r#"table netdev {TABLE} {{
	counter odd {{ }}
	counter spoofed {{ }}
	counter flood {{ }}
	chain guest {{
		type filter hook ingress device "{TAP}" priority 0; policy drop;
		@ll,96,16 != 0x0800 counter name odd drop
		ether saddr != {GUEST_MAC} counter name spoofed drop
		ether daddr != {GATEWAY_MAC} counter name odd drop
		ip saddr != {GUEST} counter name spoofed drop
		limit rate over {packets}/second burst {packet_burst} packets counter name flood drop
		accept
	}}
}}
table inet {TABLE} {{
	counter sent {{ }}
	counter received {{ }}
	counter connections {{ }}
	counter unlisted {{ }}
	counter floor {{ }}
	counter revoked {{ }}
	counter crowded {{ }}
	counter hasty {{ }}
	counter asking {{ }}
	counter odd {{ }}
	counter inbound {{ }}
	set live {{ type mark; }}
	set serve {{ type inet_service; }}
	set floor {{ type ipv4_addr; flags interval; elements = {{ {floor} }}; }}
	map ranges {{ type ipv4_addr : mark; flags interval; }}
	map services {{ type mark . inet_proto . inet_service : mark; flags interval; }}
	map pings {{ type mark : mark; }}
	map opened {{ type ipv4_addr . inet_proto . inet_service : mark; flags timeout; size {OPENINGS}; }}
	map opened_pings {{ type ipv4_addr : mark; flags timeout; size 1024; }}
	map relayed {{ type ipv4_addr . inet_service : mark; flags timeout; size {OPENINGS}; }}
	chain first {{
		type filter hook prerouting priority mangle; policy accept;
		iifname "{TAP}" ct state new ct mark 0 jump fresh
	}}
	chain fresh {{
		limit rate over {flows}/second burst {flow_burst} packets counter name hasty drop
		ip daddr {GATEWAY} return
		ct count over {connections} counter name crowded drop
		meta mark set ip daddr map @ranges
		meta l4proto {{ tcp, udp }} ct mark set meta mark . meta l4proto . th dport map @services return
		icmp type echo-request ct mark set meta mark map @pings return
		meta l4proto {{ tcp, udp }} ct mark set ip daddr . meta l4proto . th dport map @opened
		icmp type echo-request ct mark set ip daddr map @opened_pings
		ct mark @live return
		ct mark set ip daddr . tcp dport map @relayed
		ct mark @live return
		ct mark set 0
	}}
	chain divert {{
		type nat hook prerouting priority dstnat; policy accept;
		iifname "{TAP}" meta l4proto tcp ct mark & {RELAYED_BITS:#x} == {RELAYED_BITS:#x} redirect to :{RELAY_PORT}
	}}
	chain input {{
		type filter hook input priority filter; policy drop;
		ct state invalid counter name odd drop
		iifname "{TAP}" goto asked
		iifname "{UPLINK}" ct direction reply ct mark @live counter name received accept
		counter name inbound
	}}
	chain asked {{
		ip daddr != {GATEWAY} counter name unlisted drop
		meta l4proto {{ tcp, udp }} th dport 53 limit rate over {asks}/second burst {ask_burst} packets counter name asking drop
		meta l4proto {{ tcp, udp }} th dport 53 th dport @serve counter name sent accept
		tcp dport {RELAY_PORT} ct mark @live counter name sent accept
		ct mark != 0 counter name revoked goto cut
		counter name unlisted goto refuse
	}}
	chain output {{
		type filter hook output priority filter; policy drop;
		oifname "{TAP}" ct direction reply meta l4proto {{ tcp, udp }} th sport 53 th sport @serve counter name received accept
		oifname "{TAP}" ct direction reply tcp sport {RELAY_PORT} ct mark @live counter name received accept
		oifname "{TAP}" ct direction reply tcp flags & rst == rst accept
		oifname "{TAP}" icmp type {{ destination-unreachable, time-exceeded }} accept
		oifname "{UPLINK}" ct state new meta skuid {relay} ct mark set ip daddr . tcp dport map @relayed
		oifname "{UPLINK}" ct mark @live counter name sent accept
	}}
	chain forward {{
		type filter hook forward priority filter; policy drop;
		ct state invalid counter name odd drop
		iifname "{TAP}" oifname "{UPLINK}" goto leaving
		iifname "{UPLINK}" oifname "{TAP}" goto coming
		counter name odd
	}}
	chain leaving {{
		ct direction reply counter name odd drop
		meta l4proto icmp icmp type != echo-request counter name odd drop
		tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
		ct mark @live counter name sent accept
		ct mark != 0 counter name revoked goto cut
		ip daddr @floor counter name floor goto refuse
		counter name unlisted goto refuse
	}}
	chain coming {{
		ct direction original counter name inbound drop
		ct mark @live counter name received accept
		counter name revoked drop
	}}
	chain refuse {{
		limit rate over 50/second burst 50 packets drop
		reject with icmp type admin-prohibited
	}}
	chain cut {{
		limit rate over 50/second burst 50 packets drop
		meta l4proto tcp reject with tcp reset
		reject with icmp type admin-prohibited
	}}
	chain leave {{
		type nat hook postrouting priority srcnat; policy accept;
		oifname "{UPLINK}" counter name connections snat ip to {slot}
	}}
}}
"#
    )
}

/// The wall in the host's namespace: in place of the one that may be there, at one moment.
///
/// It counts connections by itself, a quarter above what a Sandbox may have: a guest can end one for the wall inside alone,
/// with a packet that dies between the two (of too short a life, too large), and the host would keep it for days.
pub fn outside(tag: Tag, block: UidBlock, limits: &Limits, floor: &Floor) -> String {
    let (table, ours, addresses) = (address::host_table(tag), address::veth_prefix(tag), address::of_block(block));
    let mut opened = String::new();
    for opening in &floor.open {
        let range = opening.range;
        let ports = opening.ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmp] {
            if opening.protocol.is_some_and(|only| only != protocol) {
                continue;
            }
            // Writing to a string does not fail.
            let _ = match (protocol, ports.is_empty()) {
                (Protocol::Icmp, true) => writeln!(opened, "\t\tip daddr {range} icmp type echo-request return"),
                (Protocol::Icmp, false) => Ok(()),
                (_, true) => writeln!(opened, "\t\tip daddr {range} meta l4proto {} return", protocol.as_str()),
                (_, false) => {
                    writeln!(opened, "\t\tip daddr {range} {} dport {{ {ports} }} return", protocol.as_str())
                }
            };
        }
    }
    let floor = elements(floor);
    let connections = limits.connections.saturating_add(limits.connections / 4);
    format!(
        r#"table inet {table} {{ }}
delete table inet {table}
table inet {table} {{
	set floor {{ type ipv4_addr; flags interval; elements = {{ {floor} }}; }}
	set {TRACKED} {{ type ipv4_addr; flags dynamic; size 16384; }}
	chain first {{
		type filter hook prerouting priority raw; policy accept;
		iifname "{ours}*" jump from
	}}
	chain from {{
		meta protocol != ip drop
		ip saddr != {addresses} drop
		fib saddr . iif oif missing drop
		fib daddr type != unicast drop
		ip daddr @floor jump closed
	}}
	chain closed {{
{opened}		drop
	}}
	chain forward {{
		type filter hook forward priority filter - 10; policy accept;
		iifname "{ours}*" goto out
		oifname "{ours}*" goto in
	}}
	chain out {{
		oifname "pp*" drop
		ip daddr @floor jump closed
		ct state new ct status & confirmed == 0 add @{TRACKED} {{ ip saddr ct count over {connections} }} drop
	}}
	chain in {{
		meta protocol != ip drop
		ct direction original drop
		ct state established,related return
		drop
	}}
	chain input {{
		type filter hook input priority filter - 10; policy accept;
		iifname "{ours}*" drop
	}}
	chain output {{
		type filter hook output priority filter - 10; policy accept;
		oifname "{ours}*" icmp type {{ destination-unreachable, time-exceeded }} ct state related return
		oifname "{ours}*" drop
	}}
	chain leave {{
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr {addresses} oifname != "{ours}*" masquerade
	}}
}}
"#
    )
}

/// What makes ended connections of Sandboxes leave the host's table of connections at once, so that the quota of one is not
/// its recent past: those that are over are not counted, but kept. Loaded after [`outside`], where the kernel can do it.
pub fn quick_ends(tag: Tag) -> String {
    let (table, ours) = (address::host_table(tag), address::veth_prefix(tag));
    format!(
        r#"table inet {table} {{
	ct timeout quick {{
		protocol tcp;
		l3proto ip;
		policy = {{ syn_sent: 30, syn_recv: 30, fin_wait: 30, close_wait: 60, last_ack: 15, time_wait: 2, close: 1 }};
	}}
	chain ends {{
		type filter hook prerouting priority mangle; policy accept;
		iifname "{ours}*" ct state new meta l4proto tcp ct timeout set "quick"
	}}
}}
"#
    )
}

/// The floor's ranges as elements: without those that lie in another, which `nft` would refuse.
fn elements(floor: &Floor) -> String {
    let mut ranges: Vec<_> = floor.closed.iter().map(|closed| closed.range).collect();
    ranges.sort_unstable();
    ranges.dedup();
    let within_another = |range| ranges.iter().any(|other| *other != range && other.holds_all(range));
    let outermost = ranges.iter().filter(|range| !within_another(**range));
    outermost.map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::policy::Opening;

    fn block() -> UidBlock {
        UidBlock { index: 3, first: 0x7030_0000 }
    }

    /// Compares with the checked-in text; `PEPO_BLESS=1` writes it.
    fn golden(name: &str, text: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/net/golden").join(name);
        if std::env::var_os("PEPO_BLESS").is_some() {
            std::fs::write(&path, text).expect("write");
        }
        let wanted = std::fs::read_to_string(&path).expect("the golden text");
        assert_eq!(text, wanted, "{name} changed: look at the difference, then run with PEPO_BLESS=1");
    }

    #[test]
    fn the_walls_read_like_this() {
        let floor = Floor::default();
        let slot = address::of_slot(block(), crate::id::Slot::new(5).expect("slot"));
        golden("inside.nft", &inside(slot, 0x7030_0017, &Limits::default(), &floor));
        let opening = |protocol, ports: &[u16]| Opening {
            range: "10.5.0.0/24".parse().expect("range"),
            ports: ports.to_vec(),
            protocol,
        };
        let open = vec![opening(Some(Protocol::Tcp), &[22, 5432]), opening(None, &[])];
        let closed = ["203.0.113.9/32", "9.9.0.0/16"].map(|text| text.parse().expect("range"));
        let floor = Floor::with(closed, open);
        let tag = "ab1c".parse().expect("tag");
        golden("outside.nft", &(outside(tag, block(), &Limits::default(), &floor) + &quick_ends(tag)));
    }

    #[test]
    fn ranges_within_others_are_left_out() {
        let floor = Floor::with(["10.1.0.0/16", "9.0.0.0/8"].map(|text| text.parse().expect("range")), Vec::new());
        let text = elements(&floor);
        assert!(text.contains("9.0.0.0/8") && text.contains("10.0.0.0/8") && !text.contains("10.1.0.0"), "{text}");
    }
}
