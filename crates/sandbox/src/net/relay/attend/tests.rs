use hickory_proto::op::ResponseCode;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

use super::*;
use crate::net::dns::tests::{Bench, a, always, asked, listed, packet, reply, rule, scope};
use crate::net::{Mode, Rule};

fn host(name: &str) -> HostName {
    HostName::new(name).expect(name)
}

const SITE: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 99);

/// `a.example.com` and its neighbours live at one address, `b.example.com` beside it, `moved` on the floor.
async fn bench(scope: crate::net::dns::Scope) -> Bench {
    Bench::new(scope, |query, _| {
        let name = asked(query);
        let to = match name.as_str() {
            "moved.example.com" => [10, 0, 0, 1],
            "b.example.com" => [93, 184, 216, 35],
            _ => [93, 184, 216, 34],
        };
        let mut message = reply(query, vec![a(&name, 60, to)]);
        if name == "gone.example.com" {
            message.answers.clear();
            message.metadata.response_code = ResponseCode::NXDomain;
        }
        vec![packet(&message)]
    })
    .await
}

#[tokio::test]
async fn a_name_goes_to_its_own_address_and_a_neighbour_nowhere() {
    let bench = bench(listed(&["a.example.com", "b.example.com", "moved.example.com", "gone.example.com"])).await;
    let decide = async |name: &str, to, port| decide(&bench.resolver, &host(name), to, port).await;
    assert_eq!(decide("a.example.com", SITE, 443).await, Ok(SITE));
    assert_eq!(decide("a.example.com", SITE, 80).await, Ok(SITE));
    // On the same address, and not of the policy; nor is the port.
    assert_eq!(decide("neighbour.example.com", SITE, 443).await, Err(Barred::Name));
    assert_eq!(decide("a.example.com", SITE, 8080).await, Err(Barred::Name));
    // It goes where its own answers say, wherever the guest wanted to take it.
    assert_eq!(decide("a.example.com", ELSEWHERE, 443).await, Ok(SITE));
    // An address that one rule opened is not entered under the name of another.
    assert_eq!(bench.a("b.example.com").await.map(|all| all.len()), Ok(1));
    assert_eq!(decide("b.example.com", [93, 184, 216, 35].into(), 443).await, Ok([93, 184, 216, 35].into()));
    assert_eq!(decide("a.example.com", [93, 184, 216, 35].into(), 443).await, Err(Barred::Rule));
    assert_eq!(decide("moved.example.com", ELSEWHERE, 443).await, Err(Barred::Floor));
    assert_eq!(decide("gone.example.com", ELSEWHERE, 443).await, Err(Barred::Lookup));
}

#[tokio::test]
async fn only_rules_that_are_relayed_count() {
    let open = Rule { any_protocol: true, ports: vec![443], ..rule("a.example.com", &[]) };
    let bench = bench(scope(Mode::Allow, vec![open, rule("*.example.com", &[8443])])).await;
    assert_eq!(decide(&bench.resolver, &host("a.example.com"), SITE, 443).await, Err(Barred::Name));
    assert_eq!(decide(&bench.resolver, &host("a.example.com"), SITE, 8443).await, Ok(SITE));
}

#[tokio::test]
async fn a_relay_is_answered_and_what_is_no_word_ends_it() {
    let mut bench = Bench::new(listed(&["a.example.com"]), always(60, [93, 184, 216, 34])).await;
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("pair");
    theirs.set_nonblocking(true).expect("non-blocking");
    let (tell, mut events) = mpsc::channel(8);
    let end = CancellationToken::new();
    let (change, changed) = watch::channel(0);
    let attending = tokio::spawn(attend(ours.into(), Arc::clone(&bench.resolver), tell, changed, end));
    let mut stream = BufReader::new(UnixStream::from_std(theirs).expect("stream"));
    let ask = |seq, name: &str| {
        let word = Word::Ask { seq, name: host(name), to: SITE, port: 443, by: By::Tls };
        serde_json::to_string(&word).expect("json") + "\n"
    };
    for (seq, name, expected) in [
        (7, "a.example.com", Verdict::Go { seq: 7, address: SITE }),
        (8, "evil.example.net", Verdict::No { seq: 8, why: Barred::Name }),
    ] {
        stream.get_mut().write_all(ask(seq, name).as_bytes()).await.expect("write");
        let mut line = String::new();
        stream.read_line(&mut line).await.expect("read");
        assert_eq!(serde_json::from_str::<Verdict>(&line).expect("a verdict"), expected);
    }
    change.send_modify(|generation| *generation += 1);
    let mut line = String::new();
    stream.read_line(&mut line).await.expect("read");
    assert_eq!(serde_json::from_str::<Verdict>(&line).expect("a verdict"), Verdict::Again);
    assert!(matches!(events.recv().await, Some(Event::Passed { by: By::Tls, port: 443, .. })));
    assert!(matches!(events.recv().await, Some(Event::Barred { why: Barred::Name, .. })));
    assert!(matches!(bench.events.recv().await, Some(crate::net::dns::Event::Opened { .. })));
    stream.get_mut().write_all(b"{\"ask\":{\"name\":\"\\u001b[2J\"}}\n").await.expect("write");
    assert!(attending.await.expect("a task").is_err());
}
