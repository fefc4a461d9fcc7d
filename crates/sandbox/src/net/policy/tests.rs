use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::compiled::{RESOLVERS, rule_allows};
use super::*;

fn cidr(text: &str) -> Cidr {
    text.parse().expect("cidr")
}

fn range(entry: u16, text: &str) -> Rule {
    Rule {
        entry,
        target: Target::Cidr(cidr(text)),
        protocol: None,
        ports: Vec::new(),
        any_protocol: false,
        public: false,
    }
}

fn name(entry: u16, text: &str) -> Rule {
    let target = Target::Domain(text.parse().expect("domain"));
    Rule { entry, target, protocol: None, ports: Vec::new(), any_protocol: false, public: false }
}

fn allow(rules: Vec<Rule>) -> Policy {
    Policy { mode: Mode::Allow, rules, ..Policy::default() }
}

fn at(text: &str) -> Ipv4Addr {
    text.parse().expect("address")
}

#[test]
fn ranges_say_what_is_wrong_with_them() {
    let said = |text: &str| text.parse::<Cidr>().expect_err(text).to_string();
    assert_eq!(
        said("1.2.3.4/24"),
        "`1.2.3.4/24` is no IPv4 range: 1.2.3.4 has bits beyond its prefix; 1.2.3.0/24 has not"
    );
    assert_eq!(said("2001:db8::/32"), "`2001:db8::/32` is no IPv4 range: IPv6 is not carried; give IPv4");
    assert_eq!(said("1.2.3.0/33"), "`1.2.3.0/33` is no IPv4 range: a prefix is from 0 to 32");
    assert_eq!(said("\u{1b}[2J"), "`\\u{1b}[2J` is no IPv4 range: write it like 203.0.113.0/24");
    for bad in ["", "/", "1.2.3.0/", "1.2.3.0/+8", "1.2.3.0/008", "01.2.3.4", "1.2.3"] {
        assert!(bad.parse::<Cidr>().is_err(), "{bad} was taken");
    }
    assert_eq!(cidr("0.0.0.0/0").last(), Ipv4Addr::BROADCAST);
    assert_eq!(cidr("8.8.8.8"), cidr("8.8.8.8/32"));
}

#[test]
fn errors_name_the_entry_and_why() {
    let said = |policy: &Policy| policy.check(&Floor::default()).expect_err("an error").to_string();
    assert_eq!(
        said(&allow(vec![range(0, "1.2.3.0/24"), range(1, "10.1.0.0/16")])),
        "entry 1: 10.1.0.0/16 is on the floor (private networks, 10.0.0.0/8)"
    );
    assert_eq!(
        said(&allow(vec![range(0, "169.254.169.254")])),
        "entry 0: 169.254.169.254/32 is on the floor (link-local and cloud metadata, 169.254.0.0/16)"
    );
    assert_eq!(
        said(&allow(vec![Rule { protocol: Some(Protocol::Udp), ..name(3, "example.com") }])),
        "entry 3: udp carries no name, so it would open every name at the addresses of example.com; say \"any_protocol\": true if that is meant"
    );
    assert_eq!(
        said(&allow(vec![Rule { any_protocol: true, ..name(0, "example.com") }])),
        "entry 0: any_protocol opens the addresses of example.com to whatever is spoken there; name its ports"
    );
    assert_eq!(
        said(&allow(vec![Rule {
            any_protocol: true,
            protocol: Some(Protocol::Udp),
            ports: vec![443],
            ..name(0, "example.com")
        }])),
        "entry 0: udp 443 is closed to names, where it would evade the check for example.com; use tcp"
    );
    assert_eq!(
        said(&allow(vec![Rule { protocol: Some(Protocol::Icmp), ports: vec![1], ..range(0, "1.2.3.4") }])),
        "entry 0: icmp has no ports"
    );
    assert_eq!(
        said(&Policy { rules: vec![range(0, "1.2.3.4")], ..Policy::default() }),
        "the mode `none` opens nothing; leave the entries out or use `allow`"
    );
    assert_eq!(
        said(&Policy { egress_bytes_per_second: Some(10), ..Policy::public() }),
        "egress_bytes_per_second is below 4096"
    );
    // One that is only partly on the floor is taken; the floor is taken out of it.
    allow(vec![range(0, "0.0.0.0/0")]).check(&Floor::default()).expect("partly");
}

#[test]
fn the_operator_opens_what_is_closed_by_range_port_and_protocol_to_rules_that_name_it() {
    let open = Opening { range: cidr("10.5.0.0/24"), ports: vec![5432], protocol: Some(Protocol::Tcp) };
    let floor = Floor::with([cidr("9.9.0.0/16")], vec![open]);
    let wanted = |ports: Vec<u16>| allow(vec![Rule { ports, ..range(0, "10.5.0.7") }]);
    wanted(vec![5432]).check(&floor).expect("opened");
    assert!(wanted(vec![22]).check(&floor).is_err(), "another port");
    assert!(allow(vec![range(0, "10.6.0.0/16")]).check(&floor).is_err(), "another range");
    assert!(allow(vec![range(0, "9.9.1.0/24")]).check(&floor).is_err(), "closed by the operator");
    let compiled = Compiled::new(&allow(vec![range(0, "10.5.0.0/16")]), &floor);
    assert!(compiled.allows(at("10.5.0.7"), Protocol::Tcp, 5432).is_some());
    for (address, protocol, port) in [
        ("10.5.0.7", Protocol::Tcp, 5433),
        ("10.5.0.7", Protocol::Udp, 5432),
        ("10.5.0.7", Protocol::Icmp, 0),
        ("10.5.1.7", Protocol::Tcp, 5432),
    ] {
        assert_eq!(compiled.allows(at(address), protocol, port), None, "{address} {port}");
    }
    let public = Compiled::new(&Policy::public(), &floor);
    assert_eq!(public.allows(at("10.5.0.7"), Protocol::Tcp, 5432), None, "public reaches what was opened");
}

#[test]
fn other_resolvers_are_closed_under_allow_unless_named() {
    let floor = Floor::default();
    let wide = Compiled::new(&allow(vec![range(0, "8.0.0.0/8")]), &floor);
    assert!(wide.allows(at("8.8.8.8"), Protocol::Tcp, 80).is_some());
    for (protocol, port) in [(Protocol::Udp, 53), (Protocol::Tcp, 53), (Protocol::Tcp, 853), (Protocol::Tcp, 443)] {
        assert_eq!(wide.allows(at("8.8.8.8"), protocol, port), None, "{port}");
    }
    assert!(wide.allows(at("8.8.8.7"), Protocol::Tcp, 443).is_some());
    let named = Compiled::new(&allow(vec![Rule { ports: vec![53, 443], ..range(0, "8.8.8.8") }]), &floor);
    assert!(named.allows(at("8.8.8.8"), Protocol::Tcp, 53).is_some());
    assert!(named.allows(at("8.8.8.8"), Protocol::Tcp, 443).is_some());
    let public = Compiled::new(&Policy::public(), &floor);
    assert_eq!(public.allows(at("8.8.8.8"), Protocol::Udp, 53), Some(PUBLIC));
}

#[test]
fn a_rule_keeps_its_number_while_it_says_the_same() {
    let one = Rule { ports: vec![443, 80], ..range(0, "1.2.3.0/24") };
    assert_eq!(one.number(), Rule { entry: 7, ports: vec![80, 443], ..one.clone() }.number());
    assert_ne!(one.number(), Rule { ports: vec![443], ..one.clone() }.number());
    assert_ne!(name(0, "example.com").number(), name(0, "*.example.com").number());
    let relayed = Rule { ports: vec![443], ..name(0, "example.com") };
    assert_ne!(relayed.number(), Rule { any_protocol: true, ..relayed.clone() }.number());
    assert_eq!(name(0, "example.com").number(), Rule { ports: vec![80, 443], ..name(0, "example.com") }.number());
}

#[test]
fn a_compiled_policy_reads_like_this() {
    let policy = allow(vec![
        Rule { ports: vec![22, 443], ..range(0, "1.2.3.0/24") },
        Rule { protocol: Some(Protocol::Udp), ports: vec![123], ..range(1, "1.2.3.128/25") },
        Rule { protocol: Some(Protocol::Icmp), ..range(2, "1.2.3.255") },
        name(3, "example.com"),
    ]);
    let compiled = Compiled::new(&policy, &Floor::default());
    let number = |entry: usize| policy.rules[entry].number();
    let service =
        |class, protocol, port, entry| Service { class, protocol, first: port, last: port, rule: number(entry) };
    assert_eq!(
        compiled.ranges,
        [
            (at("1.2.3.0"), at("1.2.3.127"), 1),
            (at("1.2.3.128"), at("1.2.3.254"), 2),
            (at("1.2.3.255"), at("1.2.3.255"), 3),
        ]
    );
    let both = |class| [service(class, Protocol::Tcp, 22, 0), service(class, Protocol::Tcp, 443, 0)];
    let udp = |class| service(class, Protocol::Udp, 123, 1);
    let wanted = [&both(1)[..], &both(2)[..], &[udp(2)], &both(3)[..], &[udp(3)]].concat();
    assert_eq!(compiled.services, wanted);
    assert_eq!(compiled.pings, [(3, number(2))]);
    assert_eq!(compiled.live.len(), 4);
    assert!(compiled.resolves && compiled.relays);
    let none = Compiled::new(&Policy::default(), &Floor::default());
    assert_eq!(none, Compiled::default());
}

/// What the words of a policy mean, without any of the compiler's cleverness.
fn meaning(policy: &Policy, floor: &Floor, address: Ipv4Addr, protocol: Protocol, port: u16) -> Option<RuleNumber> {
    if !floor.admits(address, protocol, port) {
        return None;
    }
    let rule = policy.rules.iter().find(|rule| {
        rule.cidr().is_some_and(|cidr| cidr.holds(address)) && rule_allows(rule, address, protocol, port, policy.mode)
    });
    let public = policy.mode == Mode::Public && floor.covers(address).is_none();
    rule.map(Rule::number).or(public.then_some(PUBLIC))
}

fn any_protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Icmp)]
}

/// Ranges that meet each other and the floor often.
fn any_cidr() -> impl Strategy<Value = Cidr> {
    let near = prop_oneof![
        Just(0x0a00_0000_u32),
        Just(0x0808_0808),
        Just(0xc0a8_0000),
        Just(0xa9fe_a9fe),
        Just(0xa83f_8110),
        Just(0),
        Just(u32::MAX),
        any::<u32>(),
    ];
    (near, any::<u16>(), 0u8..=32)
        .prop_map(|(near, low, prefix)| Cidr::containing(Ipv4Addr::from_bits(near ^ u32::from(low & 0x3ff)), prefix))
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let port = prop_oneof![Just(22u16), Just(53), Just(80), Just(443), 1u16..];
    (any_cidr(), proptest::option::of(any_protocol()), proptest::collection::vec(port, 0..4)).prop_map(
        |(cidr, protocol, ports)| Rule {
            entry: 0,
            target: Target::Cidr(cidr),
            protocol,
            ports,
            any_protocol: false,
            public: false,
        },
    )
}

fn any_policy() -> impl Strategy<Value = (Policy, Floor)> {
    let mode = prop_oneof![Just(Mode::Public), Just(Mode::Allow)];
    let opening = (any_cidr(), proptest::option::of(any_protocol()), proptest::collection::vec(1u16.., 0..2))
        .prop_map(|(range, protocol, ports)| Opening { range, protocol, ports });
    let floor = (proptest::collection::vec(any_cidr(), 0..3), proptest::collection::vec(opening, 0..3))
        .prop_map(|(closed, open)| Floor::with(closed, open));
    let policy = (mode, proptest::collection::vec(any_rule(), 0..12)).prop_map(|(mode, rules)| Policy {
        mode,
        rules,
        ..Policy::default()
    });
    (policy, floor)
}

fn any_name() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        Just("example.com"),
        Just("a.example.com"),
        Just("b.a.example.com"),
        Just("example.org"),
        Just("a.example.org"),
    ]
}

fn any_names() -> impl Strategy<Value = Vec<Rule>> {
    let ports = prop_oneof![Just(vec![]), Just(vec![443]), Just(vec![80, 5432])];
    let one = (any_name(), any::<bool>(), any::<bool>(), ports).prop_map(|(text, star, wide, ports)| {
        let text = if star { format!("*.{text}") } else { text.to_owned() };
        Rule { any_protocol: wide && !ports.is_empty(), ports, ..name(0, &text) }
    });
    proptest::collection::vec(one, 0..4)
}

#[test]
fn a_ceiling_says_which_entry_is_beyond_it() {
    let open = Opening { range: cidr("10.5.0.0/24"), ports: vec![5432], protocol: None };
    let floor = Floor::with([], vec![open]);
    let list = allow(vec![
        Rule { ports: vec![443], ..name(0, "*.example.com") },
        range(1, "1.2.0.0/16"),
        Rule { ports: vec![22], ..range(2, "1.3.0.0/16") },
        Rule { ports: vec![80], ..range(3, "1.3.0.0/16") },
    ]);
    let beyond = |policy: &Policy, ceiling: &Policy| policy.beyond(ceiling, &floor);
    let one = |rule: Rule| allow(vec![rule]);
    assert_eq!(beyond(&Policy::public(), &list), Some(Beyond::Mode));
    assert_eq!(beyond(&one(range(4, "1.3.0.0/24")), &list), Some(Beyond::Entry(4)));
    assert_eq!(beyond(&one(name(5, "a.example.com")), &list), Some(Beyond::Entry(5)), "80 too");
    assert_eq!(beyond(&one(name(6, "example.com")), &list), Some(Beyond::Entry(6)));
    assert_eq!(beyond(&one(Rule { ports: vec![22, 80], ..range(7, "1.3.9.0/24") }), &list), None, "of two entries");
    assert_eq!(beyond(&one(Rule { ports: vec![443], ..name(8, "a.example.com") }), &list), None);
    assert_eq!(beyond(&Policy::default(), &list), None);
    let wide = Rule { ports: vec![443], any_protocol: true, ..name(9, "a.example.com") };
    assert_eq!(beyond(&one(wide), &list), Some(Beyond::Entry(9)), "any protocol");
    // Of `public` alone the operator's openings are no part, nor names that are not public.
    let opened = Rule { ports: vec![5432], ..range(10, "10.5.0.0/24") };
    assert_eq!(beyond(&one(opened.clone()), &Policy::public()), Some(Beyond::Entry(10)));
    assert_eq!(beyond(&one(opened.clone()), &one(opened.clone())), None);
    assert_eq!(beyond(&one(name(11, "db.internal")), &Policy::public()), Some(Beyond::Entry(11)));
    let by_name = Rule { ports: vec![5432], any_protocol: true, ..name(12, "db.example.com") };
    let under = one(by_name).under(&Policy::public(), &floor);
    assert!(under.rules[0].public && !floor.admits_to(&under.rules[0], at("10.5.0.7"), Protocol::Tcp, 5432));
    let fast = Policy { egress_bytes_per_second: Some(9_000), ..Policy::public() };
    let slow = Policy { egress_bytes_per_second: Some(5_000), ..Policy::public() };
    assert_eq!(beyond(&fast, &slow), Some(Beyond::Egress { most: 5_000 }));
    assert_eq!(Policy::public().under(&slow, &floor).egress_bytes_per_second, Some(5_000));
    // What is not narrowed keeps its number, and so its connections.
    let kept = Rule { ports: vec![22], ..range(0, "1.3.0.0/24") };
    assert_eq!(one(kept.clone()).under(&list, &floor).rules[0].number(), kept.number());
}

proptest! {
    #[test]
    fn a_compiled_policy_means_what_the_policy_says((policy, floor) in any_policy(), others in proptest::collection::vec(any::<u32>(), 8)) {
        let compiled = Compiled::new(&policy, &floor);
        let mut addresses: Vec<Ipv4Addr> = others.into_iter().map(Ipv4Addr::from_bits).collect();
        let ranges = policy.rules.iter().filter_map(Rule::cidr).chain(floor.open.iter().map(|open| open.range));
        for range in ranges.chain(floor.closed.iter().map(|closed| closed.range)) {
            let (first, last) = (range.first().to_bits(), range.last().to_bits());
            addresses.extend([first, last, first.wrapping_sub(1), last.wrapping_add(1)].map(Ipv4Addr::from_bits));
        }
        let ports = policy.rules.iter().flat_map(|rule| rule.ports.clone()).chain([22, 53, 80, 443, 853, 65535]);
        let ports: Vec<u16> = ports.chain(floor.open.iter().flat_map(|open| open.ports.clone())).collect();
        for address in addresses {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                for port in &ports {
                    let wanted = meaning(&policy, &floor, address, protocol, *port);
                    prop_assert_eq!(compiled.allows(address, protocol, *port), wanted, "{} {:?} {}", address, protocol, port);
                    prop_assert!(wanted.is_none() || floor.admits(address, protocol, *port));
                }
            }
            prop_assert_eq!(compiled.allows(address, Protocol::Icmp, 0), meaning(&policy, &floor, address, Protocol::Icmp, 0));
        }
        // The kernel refuses what overlaps.
        for pair in compiled.ranges.windows(2) {
            prop_assert!(pair[0].1 < pair[1].0);
        }
        for pair in compiled.services.windows(2) {
            let same = (pair[0].class, pair[0].protocol) == (pair[1].class, pair[1].protocol);
            prop_assert!(!same || pair[0].last < pair[1].first);
        }
    }

    #[test]
    fn what_both_allow_is_open_under_a_ceiling_and_nothing_else(
        (policy, floor) in any_policy(), (ceiling, _) in any_policy(), others in proptest::collection::vec(any::<u32>(), 8),
    ) {
        let under = policy.under(&ceiling, &floor);
        let (one, two, both) =
            (Compiled::new(&policy, &floor), Compiled::new(&ceiling, &floor), Compiled::new(&under, &floor));
        let is_within = policy.beyond(&ceiling, &floor).is_none();
        // What the operator opened within a wider range is narrowed without a word.
        let unasked = |address| RESOLVERS.contains(&address) || floor.covers(address).is_some();
        let mut addresses: Vec<Ipv4Addr> = others.into_iter().map(Ipv4Addr::from_bits).collect();
        let ranges = policy.rules.iter().chain(&ceiling.rules).filter_map(Rule::cidr);
        for range in ranges.chain(floor.open.iter().map(|open| open.range)).chain(RESOLVERS.map(|at| Cidr::containing(at, 32))) {
            let (first, last) = (range.first().to_bits(), range.last().to_bits());
            addresses.extend([first, last, first.wrapping_sub(1), last.wrapping_add(1)].map(Ipv4Addr::from_bits));
        }
        let ports = policy.rules.iter().chain(&ceiling.rules).flat_map(|rule| rule.ports.clone());
        let ports: Vec<u16> = ports.chain([22, 53, 80, 443, 853, 65535]).collect();
        for address in addresses {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmp] {
                for port in &ports {
                    let port = if protocol == Protocol::Icmp { 0 } else { *port };
                    let open = |compiled: &Compiled| compiled.allows(address, protocol, port).is_some();
                    let wanted = open(&one) && open(&two);
                    prop_assert!(wanted || !open(&both), "{} {:?} {}", address, protocol, port);
                    // What cannot be said of public resolvers is closed.
                    let lost = wanted && !open(&both);
                    prop_assert!(!lost || RESOLVERS.contains(&address), "{} {:?} {}", address, protocol, port);
                    prop_assert!(!is_within || unasked(address) || open(&both) == open(&one), "{} {:?} {}", address, protocol, port);
                }
            }
        }
        prop_assert_eq!(policy.under(&policy, &floor).mode, policy.mode);
    }

    #[test]
    fn names_under_a_ceiling_are_those_of_both(one in any_names(), two in any_names(), name in any_name()) {
        let floor = Floor::default();
        let (one, two) = (allow(one), allow(two));
        let name: HostName = name.parse().expect("name");
        let ports = |policy: &Policy| -> BTreeSet<(u16, bool)> {
            policy.named(&name).flat_map(|rule| rule.open_ports().iter().map(|port| (*port, rule.any_protocol))).collect()
        };
        let both = ports(&one.under(&two, &floor));
        for port in [80, 443, 5432] {
            let any = |of: &BTreeSet<(u16, bool)>| of.contains(&(port, true));
            let open = |of: &BTreeSet<(u16, bool)>| any(of) || of.contains(&(port, false));
            prop_assert_eq!(open(&both), open(&ports(&one)) && open(&ports(&two)));
            prop_assert_eq!(any(&both), any(&ports(&one)) && any(&ports(&two)));
        }
        prop_assert_eq!(ports(&one.under(&Policy::public(), &floor)), ports(&one), "all of them are public");
    }

    #[test]
    fn public_never_reaches_the_floor(address in any::<u32>(), port in 1u16.., protocol in any_protocol()) {
        let floor = Floor::default();
        let address = Ipv4Addr::from_bits(address);
        let public = Compiled::new(&Policy::public(), &floor);
        prop_assert_eq!(public.allows(address, protocol, port).is_some(), floor.covers(address).is_none());
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,40}") {
        let _ = text.parse::<Cidr>();
    }
}
