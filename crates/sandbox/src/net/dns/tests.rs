//! The resolver against an upstream that is made for the test: counted, late, lying, endless.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsCode;
use hickory_proto::rr::rdata::{A, AAAA, CNAME, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::chase::{Chase, Heard, Next, hear};
use super::question::{Over, Question, Taken};
use super::*;
use crate::net::policy::Closed;
use crate::net::{Opened, Pattern, Target};

type Handler = Arc<dyn Fn(&Message, Over) -> Vec<Vec<u8>> + Send + Sync>;

/// A server upstream: what it is asked, it answers by its handler with any number of packets.
pub(crate) struct Upstream {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
}

impl Upstream {
    async fn new(handler: Handler) -> Self {
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind("127.0.0.1:0").await.expect("bind");
            if let Ok(tcp) = TcpListener::bind(udp.local_addr().expect("address")).await {
                break (udp, tcp);
            }
        };
        let (address, asked) = (udp.local_addr().expect("address"), Arc::new(AtomicUsize::new(0)));
        let (count, by) = (Arc::clone(&asked), Arc::clone(&handler));
        tokio::spawn(async move {
            let mut buffer = [0; 2048];
            while let Ok((length, from)) = udp.recv_from(&mut buffer).await {
                count.fetch_add(1, Ordering::SeqCst);
                let query = Message::from_vec(&buffer[..length]).expect("our own query");
                for packet in by(&query, Over::Udp) {
                    udp.send_to(&packet, from).await.expect("send");
                }
            }
        });
        let count = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = tcp.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let handler = Arc::clone(&handler);
                tokio::spawn(async move {
                    let Ok(length) = stream.read_u16().await else { return };
                    let mut query = vec![0; usize::from(length)];
                    stream.read_exact(&mut query).await.expect("query");
                    let query = Message::from_vec(&query).expect("our own query");
                    for packet in handler(&query, Over::Tcp) {
                        let _ = stream.write_u16(packet.len() as u16).await;
                        let _ = stream.write_all(&packet).await;
                    }
                });
            }
        });
        Upstream { address, asked }
    }

    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

/// Sockets to one server, or to none.
pub(crate) struct To(pub(crate) Option<SocketAddr>);

impl Source for To {
    async fn sockets(&self, kind: Kind, _server: usize, most: usize) -> io::Result<Vec<OwnedFd>> {
        let Some(address) = self.0 else { return Ok(Vec::new()) };
        let mut made = Vec::new();
        for _ in 0..most {
            made.push(match kind {
                Kind::Udp => {
                    let socket = std::net::UdpSocket::bind("127.0.0.1:0")?;
                    socket.connect(address)?;
                    socket.set_nonblocking(true)?;
                    socket.into()
                }
                Kind::Tcp => {
                    let socket = std::net::TcpStream::connect(address)?;
                    socket.set_nonblocking(true)?;
                    socket.into()
                }
            });
        }
        Ok(made)
    }
}

/// Doors that remember, and say what they are told to say first.
#[derive(Clone, Default)]
pub(crate) struct Seen {
    opened: Arc<Mutex<Vec<Opened>>>,
    say: Arc<Mutex<VecDeque<Shut>>>,
}

impl Doors for Seen {
    async fn open(&self, openings: Vec<Opened>) -> Result<(), Shut> {
        if let Some(shut) = self.say.lock().expect("lock").pop_front() {
            return Err(shut);
        }
        self.opened.lock().expect("lock").extend(openings);
        Ok(())
    }
}

impl Seen {
    pub(crate) fn opened(&self) -> Vec<Opened> {
        self.opened.lock().expect("lock").clone()
    }
}

/// The test's addresses are documentation's, which the real floor has; so a floor of the test's own.
pub(crate) fn floor() -> Arc<Floor> {
    let closed = |range: &str| Closed { range: range.parse().expect("range"), what: "test".to_owned() };
    Arc::new(Floor { closed: ["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16"].map(closed).into(), open: Vec::new() })
}

pub(crate) fn rule(pattern: &str, ports: &[u16]) -> Rule {
    Rule {
        entry: 0,
        target: Target::Domain(Pattern::new(pattern).expect("pattern")),
        protocol: None,
        ports: ports.to_vec(),
        any_protocol: false,
        public: false,
    }
}

pub(crate) fn scope(mode: Mode, rules: Vec<Rule>) -> Scope {
    Scope { policy: Arc::new(Policy { mode, rules, ..Policy::default() }), floor: floor() }
}

pub(crate) fn listed(patterns: &[&str]) -> Scope {
    scope(Mode::Allow, patterns.iter().map(|pattern| rule(pattern, &[])).collect())
}

pub(crate) fn number(pattern: &str) -> RuleNumber {
    rule(pattern, &[]).number()
}

pub(crate) fn public() -> Scope {
    scope(Mode::Public, Vec::new())
}

pub(crate) type Tested = Resolver<To, Seen>;

/// A resolver under test, with everything round it.
pub(crate) struct Bench {
    pub(crate) resolver: Arc<Tested>,
    pub(crate) upstream: Upstream,
    pub(crate) doors: Seen,
    pub(crate) events: mpsc::Receiver<Event>,
}

impl Bench {
    pub(crate) async fn new(
        scope: Scope,
        handler: impl Fn(&Message, Over) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        let upstream = Upstream::new(Arc::new(handler)).await;
        let (doors, (tell, events)) = (Seen::default(), mpsc::channel(64));
        let resolver = Resolver::new(Lines::new(To(Some(upstream.address))), doors.clone(), scope, tell);
        Bench { resolver, upstream, doors, events }
    }

    pub(crate) async fn a(&self, name: &str) -> Result<Vec<Ipv4Addr>, Why> {
        let answered = self.resolver.answer(&host(name), RecordType::A).await?;
        Ok(answered.records.iter().filter_map(address).collect())
    }
}

pub(crate) fn host(name: &str) -> HostName {
    HostName::new(name).expect(name)
}

pub(crate) fn wire(name: &str) -> Name {
    Name::from_ascii(format!("{name}.")).expect(name)
}

fn address(record: &Record) -> Option<Ipv4Addr> {
    match &record.data {
        RData::A(A(address)) => Some(*address),
        _ => None,
    }
}

pub(crate) fn a(name: &str, ttl: u32, address: [u8; 4]) -> Record {
    Record::from_rdata(wire(name), ttl, RData::A(A(address.into())))
}

pub(crate) fn alias(name: &str, to: &str) -> Record {
    Record::from_rdata(wire(name), 60, RData::CNAME(CNAME(wire(to))))
}

pub(crate) fn reply(query: &Message, records: Vec<Record>) -> Message {
    let mut message = Message::new(query.metadata.id, MessageType::Response, OpCode::Query);
    message.queries = query.queries.clone();
    message.answers = records;
    message
}

pub(crate) fn packet(message: &Message) -> Vec<u8> {
    message.to_vec().expect("encode")
}

pub(crate) fn asked(query: &Message) -> String {
    query.queries[0].name().to_lowercase().to_ascii().trim_end_matches('.').to_owned()
}

/// Answers any name with that address.
pub(crate) fn always(ttl: u32, to: [u8; 4]) -> impl Fn(&Message, Over) -> Vec<Vec<u8>> + Send + Sync + 'static {
    move |query, _| vec![packet(&reply(query, vec![a(&asked(query), ttl, to)]))]
}

fn question(name: &str, kind: RecordType, edns: bool) -> Vec<u8> {
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.queries.push(Query::query(wire(name), kind));
    if edns {
        let mut edns = Edns::new();
        edns.set_max_payload(4096);
        edns.set_version(0);
        message.edns = Some(edns);
    }
    packet(&message)
}

#[tokio::test]
async fn a_listed_name_is_opened_before_it_is_answered() {
    let mut bench = Bench::new(listed(&["api.example.com", "*.example.com"]), always(77, [93, 184, 216, 34])).await;
    assert_eq!(bench.a("api.example.com").await, Ok(vec![[93, 184, 216, 34].into()]));
    let opening = |of| Opened { rule: number(of), address: [93, 184, 216, 34].into(), ttl_seconds: 77 + GRACE };
    let mut expected = ["api.example.com", "*.example.com"].map(opening);
    expected.sort_by_key(|one| one.rule);
    assert_eq!(bench.doors.opened(), expected);
    assert!(matches!(bench.events.recv().await, Some(Event::Opened { seconds: 82, .. })));
    // What the relay asks is known by now.
    assert_eq!(bench.resolver.addresses(&host("api.example.com")).await, Ok(vec![[93, 184, 216, 34].into()]));
    assert_eq!(bench.upstream.asked(), 1);
    assert!(bench.resolver.opened_by([93, 184, 216, 34].into()).contains(&number("api.example.com")));
    assert!(!bench.resolver.opened_by([93, 184, 216, 34].into()).contains(&number("*.example.org")));
    assert!(!bench.resolver.opened_by([93, 184, 216, 35].into()).contains(&number("api.example.com")));
}

#[tokio::test]
async fn a_name_off_the_list_is_refused_and_nothing_leaves() {
    let bench = Bench::new(listed(&["*.example.com"]), always(60, [93, 184, 216, 34])).await;
    for name in ["example.com", "evil.net", "secret-data.evil.net", "example.com.evil.net", "badexample.com", "x"] {
        assert_eq!(bench.a(name).await, Err(Why::NotListed), "{name}");
        assert_eq!(bench.resolver.addresses(&host(name)).await, Err(Why::NotListed), "{name}");
        let kinds = [RecordType::TXT, RecordType::MX, RecordType::AAAA, RecordType::HTTPS];
        for kind in kinds {
            let answer = bench.resolver.answer(&host(name), kind).await;
            assert_eq!(answer, Err(Why::NotListed), "{name} {kind}");
        }
    }
    // The server would have been heard: a listed name is.
    assert_eq!(bench.upstream.asked(), 0);
    assert!(bench.a("a.example.com").await.is_ok());
    assert_eq!(bench.upstream.asked(), 1);
    assert_eq!(bench.resolver.counts().tally().refused["name_not_listed"], 30);
}

#[tokio::test]
async fn no_answer_has_an_address_of_the_floor() {
    let bench = Bench::new(listed(&["*.example.com"]), |query, _| {
        let name = asked(query);
        let records = match name.as_str() {
            "mixed.example.com" => vec![a(&name, 60, [10, 0, 0, 1]), a(&name, 60, [93, 184, 216, 34])],
            // The same in the other family's clothes: no answer of ours has that family.
            "mapped.example.com" => vec![Record::from_rdata(
                wire(&name),
                60,
                RData::AAAA(AAAA("::ffff:10.0.0.1".parse().expect("address"))),
            )],
            _ => vec![a(&name, 60, [169, 254, 169, 254])],
        };
        vec![packet(&reply(query, records))]
    })
    .await;
    assert_eq!(bench.a("mixed.example.com").await, Ok(vec![[93, 184, 216, 34].into()]));
    assert_eq!(bench.a("moved.example.com").await, Err(Why::Floor));
    assert_eq!(bench.resolver.addresses(&host("moved.example.com")).await, Err(Why::Floor));
    assert_eq!(bench.a("mapped.example.com").await, Ok(vec![]));
    assert!(bench.doors.opened().iter().all(|one| one.address == Ipv4Addr::new(93, 184, 216, 34)));
    assert_eq!(bench.resolver.counts().tally().dropped, 3);
}

#[tokio::test]
async fn aliases_are_followed_and_end() {
    let bench = Bench::new(listed(&["www.example.com", "*.loop.net"]), |query, _| {
        let name = asked(query);
        let records = match name.as_str() {
            "www.example.com" => vec![alias("www.example.com", "a.cdn.net"), alias("a.cdn.net", "b.cdn.net")],
            "b.cdn.net" => vec![a("b.cdn.net", 20, [93, 184, 216, 34]), a("other.net", 20, [93, 184, 216, 35])],
            "a.loop.net" => vec![alias("a.loop.net", "b.loop.net"), alias("b.loop.net", "a.loop.net")],
            "slow.loop.net" => vec![alias("slow.loop.net", "next.loop.net")],
            "next.loop.net" => vec![alias("next.loop.net", "slow.loop.net")],
            "long.loop.net" => (0..20).map(|n| alias(&format!("{}", Far(n)), &format!("{}", Far(n + 1)))).collect(),
            // Always one step further.
            endless => vec![alias(endless, &format!("x{endless}"))],
        };
        vec![packet(&reply(query, records))]
    })
    .await;
    let answer = bench.resolver.answer(&host("www.example.com"), RecordType::A).await.expect("answer");
    let names: Vec<_> = answer.records.iter().map(|record| record.name.to_ascii()).collect();
    assert_eq!(names, ["www.example.com.", "a.cdn.net.", "b.cdn.net."]);
    // A stranger's record in the same answer opens nothing.
    let opened = bench.doors.opened();
    assert_eq!(
        opened,
        [Opened { rule: number("www.example.com"), address: [93, 184, 216, 34].into(), ttl_seconds: SHORTEST + GRACE }]
    );
    assert_eq!(bench.a("a.loop.net").await, Err(Why::Loop));
    assert_eq!(bench.a("slow.loop.net").await, Err(Why::Loop));
    assert_eq!(bench.a("long.loop.net").await, Err(Why::Chain));
    let before = bench.upstream.asked();
    assert_eq!(bench.a("endless.loop.net").await, Err(Why::Chain));
    assert_eq!(bench.upstream.asked() - before, HOPS);
}

/// `long.loop.net`, then its aliases.
struct Far(usize);

impl std::fmt::Display for Far {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 == 0 { f.write_str("long.loop.net") } else { write!(f, "l{}.loop.net", self.0) }
    }
}

#[tokio::test]
async fn a_forger_is_not_heard_and_the_true_answer_is() {
    let bench = Bench::new(listed(&["*.example.com"]), |query, _| {
        let name = asked(query);
        let forged = vec![a(&name, 60, [6, 6, 6, 6])];
        let mut wrong_number = reply(query, forged.clone());
        wrong_number.metadata.id ^= 1;
        let mut wrong_question = reply(query, forged.clone());
        wrong_question.queries = vec![Query::query(wire("other.example.com"), RecordType::A)];
        let mut wrong_type = reply(query, forged.clone());
        wrong_type.queries = vec![Query::query(wire(&name), RecordType::TXT)];
        let mut no_answer = reply(query, forged);
        no_answer.metadata.message_type = MessageType::Query;
        let mut packets: Vec<_> = [wrong_number, wrong_question, wrong_type, no_answer].iter().map(packet).collect();
        packets.push(vec![]);
        packets.push(vec![0; 5]);
        if name == "flood.example.com" {
            return std::iter::repeat_n(packets[0].clone(), 100).collect();
        }
        packets.push(packet(&reply(query, vec![a(&name, 60, [93, 184, 216, 34])])));
        packets
    })
    .await;
    assert_eq!(bench.a("true.example.com").await, Ok(vec![[93, 184, 216, 34].into()]));
    assert_eq!(bench.a("flood.example.com").await, Err(Why::Wrong));
    assert!(bench.doors.opened().iter().all(|one| one.address != Ipv4Addr::new(6, 6, 6, 6)));
}

#[tokio::test]
async fn a_short_answer_is_fetched_over_a_stream() {
    let bench = Bench::new(listed(&["*.example.com"]), |query, over| {
        let name = asked(query);
        let many: Vec<_> = (0..100).map(|n| a(&name, 60, [93, 184, 216, n])).collect();
        match (name.as_str(), over) {
            ("large.example.com", Over::Udp) => {
                let mut short = reply(query, vec![]);
                short.metadata.truncation = true;
                vec![packet(&short)]
            }
            // Cut in the middle of a record.
            ("cut.example.com", Over::Udp) => {
                let mut short = reply(query, many);
                short.metadata.truncation = true;
                vec![packet(&short)[..500].to_vec()]
            }
            // More than was said to be taken.
            ("rude.example.com", Over::Udp) => vec![packet(&reply(query, many))],
            ("huge.example.com", Over::Udp) => {
                let mut short = reply(query, vec![]);
                short.metadata.truncation = true;
                vec![packet(&short)]
            }
            ("huge.example.com", Over::Tcp) => {
                let text = RData::TXT(TXT::new(vec!["x".repeat(250); 100]));
                let records = vec![Record::from_rdata(wire(&name), 60, text); 2];
                vec![packet(&reply(query, records))]
            }
            _ => vec![packet(&reply(query, many))],
        }
    })
    .await;
    for name in ["large.example.com", "cut.example.com"] {
        assert_eq!(bench.a(name).await.map(|all| all.len()), Ok(ADDRESSES), "{name}");
    }
    assert_eq!(bench.doors.opened().len(), 2 * ADDRESSES);
    assert_eq!(bench.a("rude.example.com").await, Err(Why::Large));
    assert_eq!(bench.a("huge.example.com").await, Err(Why::Large));
}

#[tokio::test]
async fn times_to_live_are_bounded_both_ways() {
    let bench = Bench::new(listed(&["*.example.com"]), |query, _| {
        let name = asked(query);
        let ttl = if name.starts_with("zero") { 0 } else { u32::MAX >> 1 };
        vec![packet(&reply(query, vec![a(&name, ttl, [93, 184, 216, 34])]))]
    })
    .await;
    let zero = bench.resolver.answer(&host("zero.example.com"), RecordType::A).await.expect("answer");
    let ever = bench.resolver.answer(&host("ever.example.com"), RecordType::A).await.expect("answer");
    assert_eq!((zero.records[0].ttl, ever.records[0].ttl), (0, LONGEST));
    let seconds: Vec<_> = bench.doors.opened().iter().map(|one| one.ttl_seconds).collect();
    assert_eq!(seconds, [SHORTEST + GRACE, LONGEST + GRACE]);
}

#[tokio::test]
async fn a_policy_that_changes_meanwhile_decides_again() {
    let bench = Bench::new(listed(&["*.example.com"]), always(60, [93, 184, 216, 34])).await;
    bench.doors.say.lock().expect("lock").push_back(Shut::Stale);
    assert!(bench.a("a.example.com").await.is_ok());
    assert_eq!(bench.upstream.asked(), 2);
    bench.doors.say.lock().expect("lock").extend([Shut::Stale, Shut::Stale]);
    assert_eq!(bench.a("b.example.com").await, Err(Why::Stale));
    bench.doors.say.lock().expect("lock").push_back(Shut::Failed);
    assert_eq!(bench.a("c.example.com").await, Err(Why::NotOpened));
    // What stays allowed is opened again under the new number, and the rest is forgotten.
    bench.resolver.change(listed(&["a.example.com"])).await;
    let last = bench.doors.opened().pop().expect("opening");
    assert_eq!(last.rule, number("a.example.com"));
    assert!(last.ttl_seconds <= 60 + GRACE);
    assert_eq!(bench.a("b.example.com").await, Err(Why::NotListed));
    assert!(bench.resolver.opened_by([93, 184, 216, 34].into()).contains(&number("a.example.com")));
    assert!(!bench.resolver.opened_by([93, 184, 216, 34].into()).contains(&number("*.example.com")));
}

#[tokio::test]
async fn public_asks_anything_but_what_is_not_public() {
    let bench = Bench::new(public(), always(60, [93, 184, 216, 34])).await;
    for name in [
        "metadata.google.internal",
        "printer.local",
        "localhost",
        "intranet",
        "x.onion",
        "1.0.168.192.in-addr.arpa",
        "168.192.in-addr.arpa",
        "10.in-addr.arpa",
        "in-addr.arpa",
        "1.0.0.0.ip6.arpa",
    ] {
        assert_eq!(bench.a(name).await, Err(Why::Special), "{name}");
    }
    assert_eq!(bench.upstream.asked(), 0);
    assert!(bench.a("www.example.com").await.is_ok());
    assert!(bench.a("1.1.168.193.in-addr.arpa").await.is_ok());
    // Everything public is open already.
    assert_eq!(bench.doors.opened(), []);
    bench.resolver.change(scope(Mode::None, Vec::new())).await;
    assert_eq!(bench.a("www.example.com").await, Err(Why::NotListed));
}

#[tokio::test]
async fn an_upstream_that_fails_or_is_not_there_is_told() {
    let bench = Bench::new(public(), |query, _| {
        let mut failed = reply(query, vec![]);
        failed.metadata.response_code = match asked(query).as_str() {
            "no.example.com" => ResponseCode::NXDomain,
            _ => ResponseCode::ServFail,
        };
        vec![packet(&failed)]
    })
    .await;
    assert_eq!(bench.a("a.example.com").await, Err(Why::Upstream));
    let no = bench.resolver.answer(&host("no.example.com"), RecordType::A).await.expect("an answer");
    assert_eq!(no.code, ResponseCode::NXDomain);
    let (tell, _events) = mpsc::channel(1);
    let alone = Resolver::new(Lines::new(To(None)), Seen::default(), public(), tell);
    assert_eq!(alone.answer(&host("a.example.com"), RecordType::A).await, Err(Why::NoServer));
}

#[tokio::test]
async fn a_silent_upstream_ends_in_time() {
    let bench = Bench::new(public(), |_, _| Vec::new()).await;
    let answer = tokio::time::timeout(Duration::from_secs(60), bench.a("a.example.com")).await.expect("in time");
    assert_eq!(answer, Err(Why::Silent));
    assert_eq!(bench.upstream.asked(), 3);
}

#[tokio::test]
async fn whoever_asks_for_names_that_nobody_answers_leaves_lines_to_others() {
    let upstream = Upstream::new(Arc::new(|query: &Message, over| match asked(query).ends_with(".slow.net") {
        true => Vec::new(),
        false => always(60, [93, 184, 216, 34])(query, over),
    }))
    .await;
    let lines = Lines::new(To(Some(upstream.address)));
    let resolver = || {
        let (tell, _events) = mpsc::channel(1);
        Resolver::new(Arc::clone(&lines), Seen::default(), public(), tell)
    };
    let others: Vec<_> = (0..8).map(|_| resolver()).collect();
    for other in &others {
        for number in 0..64 {
            let other = Arc::clone(other);
            tokio::spawn(async move { other.answer(&host(&format!("n{number}.slow.net")), RecordType::A).await });
        }
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let refused = |one: &Arc<Tested>| one.counts().tally().refused.get("dns_rate").copied().unwrap_or_default();
    assert_eq!(refused(&others[0]), 0, "where nobody else asks one may have as many as a guest may ask at once");
    assert!(others.iter().map(refused).sum::<u64>() > 200, "there is room for all of it");
    let quiet = resolver();
    for number in 0..10 {
        let answer = quiet.answer(&host(&format!("n{number}.example.com")), RecordType::A).await;
        assert!(answer.is_ok(), "{number}: {answer:?}");
    }
}

/// The sockets of a guest's side, served.
async fn served(resolver: &Arc<Tested>) -> (UdpSocket, SocketAddr, CancellationToken) {
    // A port that is free to the one may be taken to the other.
    let (udp, tcp) = loop {
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
        if let Ok(tcp) = std::net::TcpListener::bind(udp.local_addr().expect("address")) {
            break (udp, tcp);
        }
    };
    let address = udp.local_addr().expect("address");
    let end = CancellationToken::new();
    let sockets = Sockets { udp: udp.into(), tcp: tcp.into() };
    tokio::spawn(serve(sockets, Arc::clone(resolver), 100, end.clone()));
    let guest = UdpSocket::bind("127.0.0.1:0").await.expect("bind");
    guest.connect(address).await.expect("connect");
    (guest, address, end)
}

async fn exchange(guest: &UdpSocket, packet: &[u8]) -> Message {
    guest.send(packet).await.expect("send");
    let mut buffer = [0; 4096];
    let length = tokio::time::timeout(Duration::from_secs(30), guest.recv(&mut buffer)).await.expect("in time");
    Message::from_vec(&buffer[..length.expect("receive")]).expect("an answer")
}

#[tokio::test]
async fn a_guest_gets_its_answers_and_reasons() {
    let bench = Bench::new(listed(&["*.example.com"]), |query, over| {
        let name = asked(query);
        let to = if name.starts_with("moved") { [10, 0, 0, 1] } else { [93, 184, 216, 34] };
        let record = match query.queries[0].query_type() {
            RecordType::TXT => Record::from_rdata(wire(&name), 60, RData::TXT(TXT::new(vec!["x".repeat(200); 20]))),
            _ => a(&name, 60, to),
        };
        let mut whole = reply(query, vec![record]);
        if over == Over::Udp && packet(&whole).len() > 1232 {
            whole.answers.clear();
            whole.metadata.truncation = true;
        }
        vec![packet(&whole)]
    })
    .await;
    let (guest, address, end) = served(&bench.resolver).await;

    // The question comes back as it was written.
    let answer = exchange(&guest, &question("wWw.Example.com", RecordType::A, false)).await;
    assert_eq!((answer.metadata.id, answer.metadata.response_code), (7, ResponseCode::NoError));
    assert!(answer.queries[0].name().eq_case(&wire("wWw.Example.com")));
    assert!(answer.metadata.recursion_available && answer.edns.is_none());
    assert_eq!(answer.answers.iter().filter_map(address_of).collect::<Vec<_>>(), [Ipv4Addr::new(93, 184, 216, 34)]);

    let refused = exchange(&guest, &question("evil.net", RecordType::A, true)).await;
    assert_eq!(refused.metadata.response_code, ResponseCode::Refused);
    assert_eq!(why(&refused).expect("a reason"), (15, "pepo: no rule of the network policy names it".to_owned()));
    let moved = exchange(&guest, &question("moved.example.com", RecordType::A, true)).await;
    assert_eq!((moved.metadata.response_code, moved.answers.len()), (ResponseCode::NoError, 0));
    assert_eq!(why(&moved).expect("a reason").0, 17);

    let before = bench.upstream.asked();
    for kind in [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB] {
        let empty = exchange(&guest, &question("www.example.com", kind, true)).await;
        assert_eq!((empty.metadata.response_code, empty.answers.len()), (ResponseCode::NoError, 0), "{kind}");
        let off = exchange(&guest, &question("evil.net", kind, true)).await;
        assert_eq!(off.metadata.response_code, ResponseCode::Refused, "{kind}");
    }
    for kind in [RecordType::ANY, RecordType::AXFR, RecordType::NULL] {
        let refused = exchange(&guest, &question("www.example.com", kind, false)).await;
        assert_eq!(refused.metadata.response_code, ResponseCode::Refused, "{kind}");
    }
    assert_eq!(bench.upstream.asked(), before);

    // Too long for a datagram; whole on a stream.
    let short = exchange(&guest, &question("text.example.com", RecordType::TXT, true)).await;
    assert!(short.metadata.truncation && short.answers.is_empty());
    let mut stream = TcpStream::connect(address).await.expect("connect");
    for _ in 0..2 {
        let packet = question("text.example.com", RecordType::TXT, true);
        stream.write_u16(packet.len() as u16).await.expect("write");
        stream.write_all(&packet).await.expect("write");
        let mut whole = vec![0; usize::from(stream.read_u16().await.expect("read"))];
        stream.read_exact(&mut whole).await.expect("read");
        let whole = Message::from_vec(&whole).expect("an answer");
        assert!(!whole.metadata.truncation && whole.answers.len() == 1);
    }
    end.cancel();
    assert_eq!(stream.read(&mut [0; 1]).await.expect("the end"), 0);
}

fn address_of(record: &Record) -> Option<Ipv4Addr> {
    address(record)
}

/// The extended error of an answer.
fn why(message: &Message) -> Option<(u16, String)> {
    use hickory_proto::rr::rdata::opt::EdnsOption;
    match message.edns.as_ref()?.option(EdnsCode::from(15))? {
        EdnsOption::Unknown(15, data) => {
            Some((u16::from_be_bytes([data[0], data[1]]), String::from_utf8_lossy(&data[2..]).into_owned()))
        }
        _ => None,
    }
}

#[tokio::test]
async fn a_flood_of_questions_is_bounded() {
    let bench = Bench::new(public(), always(60, [93, 184, 216, 34])).await;
    let (guest, _, end) = served(&bench.resolver).await;
    for n in 0..3000 {
        guest.send(&question(&format!("data{n}.tunnel.net"), RecordType::TXT, false)).await.expect("send");
        if n % 50 == 0 {
            tokio::task::yield_now().await;
        }
    }
    // The last is a mark: when it is refused or answered, the others have been looked at.
    let counted = || bench.resolver.counts().tally();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    while !counted().refused.contains_key("dns_rate") && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let tally = counted();
    assert!(tally.refused["dns_rate"] > 0, "{tally:?}");
    assert!(bench.upstream.asked() < 1500, "{} queries left", bench.upstream.asked());
    end.cancel();
}

#[test]
fn an_answer_that_is_a_bomb_is_cheap() {
    // 65,535 records by its header, none in it; then names that point at each other.
    let query = Query::query(wire("www.example.com"), RecordType::A);
    let mut bomb = packet(&reply(&Message::query(), vec![]));
    bomb[4..6].copy_from_slice(&1_u16.to_be_bytes());
    bomb[6..8].copy_from_slice(&u16::MAX.to_be_bytes());
    let id = u16::from_be_bytes([bomb[0], bomb[1]]);
    assert!(matches!(hear(&bomb, id, &query), Heard::Broken(Why::Large)));
    let mut pointers = vec![0, 9, 0x80, 0, 0, 1, 0, 200, 0, 0, 0, 0];
    for n in 0..600_u16 {
        // A label, then a pointer to the one before.
        let before = if n == 0 { 12 } else { 12 + (n - 1) * 4 };
        pointers.extend([1, b'a', 0xc0 | (before >> 8) as u8, before as u8]);
    }
    let begin = std::time::Instant::now();
    assert!(!matches!(hear(&pointers, 9, &query), Heard::Answer(_)));
    assert!(begin.elapsed() < Duration::from_millis(500));
}

proptest! {
    #[test]
    fn any_packet_is_taken_or_left(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        match Question::take(&bytes, Over::Udp) {
            Taken::Ask(question) => {
                let packet = question.answer(ResponseCode::NoError, Vec::new());
                prop_assert!(Message::from_vec(&packet).is_ok());
            }
            Taken::Reply { packet, .. } => prop_assert!(Message::from_vec(&packet).is_ok()),
            Taken::Drop => {}
        }
        let _ = hear(&bytes, 9, &Query::query(wire("www.example.com"), RecordType::A));
    }

    #[test]
    fn a_question_with_one_byte_changed_is_still_safe(at in 0usize..40, to in any::<u8>()) {
        let mut bytes = question("www.example.com", RecordType::A, true);
        let at = at % bytes.len();
        bytes[at] = to;
        if let Taken::Ask(question) = Question::take(&bytes, Over::Udp) {
            prop_assert!(!question.answer(ResponseCode::NoError, Vec::new()).is_empty());
        }
    }

    #[test]
    fn no_answer_whatever_leads_to_an_address_that_is_not_admitted(
        links in proptest::collection::vec((0usize..6, 0usize..6), 0..12),
        addresses in proptest::collection::vec((0usize..6, any::<[u8; 4]>()), 0..24),
    ) {
        let name = |n: usize| format!("n{n}.example.com");
        let query = Message::query();
        let mut message = reply(&query, vec![]);
        message.answers.extend(links.iter().map(|(from, to)| alias(&name(*from), &name(*to))));
        message.answers.extend(addresses.iter().map(|(of, address)| a(&name(*of), 60, *address)));
        let mut chase = Chase::new(&host(&name(0)), RecordType::A).expect("chase");
        let scope = public();
        let admits = |address| scope.admits(address);
        for _ in 0..HOPS + 1 {
            match chase.feed(&message, &admits) {
                Next::Done(found) => {
                    let found = found.addresses();
                    prop_assert!(found.len() <= ADDRESSES);
                    prop_assert!(found.iter().all(|address| admits(*address)));
                    return Ok(());
                }
                Next::Failed(_) => return Ok(()),
                Next::Ask(_) => {}
            }
        }
        prop_assert!(false, "it never ends");
    }
}
