//! Targets of the network boundary: what pepod and the relay read of guests and strangers.

use std::net::Ipv4Addr;

use hickory_proto::op::{Message, MessageType, Query};
use hickory_proto::rr::RecordType;
use pepo_sandbox::net::HostName;
use pepo_sandbox::net::dns::chase::{Chase, Heard, Next, hear};
use pepo_sandbox::net::dns::question::{Over, Question, Taken};
use pepo_sandbox::net::dns::{ADDRESSES, Why};
use pepo_sandbox::net::relay::hello::{HELLO_BYTES, Read, client_hello};
use pepo_sandbox::net::relay::http::{Requests, Step};

/// A question has at most one answer, for itself; an answer from upstream leads to admitted addresses alone.
pub fn dns_packets(bytes: &[u8]) {
    let Some((which, packet)) = bytes.split_first() else { return };
    if which % 2 == 0 {
        let over = if which & 2 == 0 { Over::Udp } else { Over::Tcp };
        let reply = match Question::take(packet, over) {
            Taken::Drop => return,
            Taken::Reply { packet, .. } => packet,
            Taken::Ask(question) => question.refuse(hickory_proto::op::ResponseCode::Refused, Why::NotListed),
        };
        let read = Message::from_vec(&reply).expect("our own reply");
        assert_eq!(read.metadata.message_type, MessageType::Response);
        assert_eq!(reply[..2], packet[..2], "a reply to another question");
        assert!(reply.len() <= 2048, "a reply of {} bytes without a record", reply.len());
        return;
    }
    let name = HostName::new("www.example.com").expect("a name");
    let mut chase = Chase::new(&name, RecordType::A).expect("a chase");
    let query: Query = chase.query();
    let Heard::Answer(message) = hear(packet, 9, &query) else { return };
    let admits = |address: Ipv4Addr| !address.is_private();
    if let Next::Done(found) = chase.feed(&message, &admits) {
        let addresses = found.addresses();
        assert!(addresses.len() <= ADDRESSES && addresses.into_iter().all(admits));
    }
}

/// A greeting says the same however it is cut, and what is not all there says nothing yet.
pub fn relay_greeting(bytes: &[u8]) {
    let Some((cut, bytes)) = bytes.split_first() else { return };
    if bytes.len() >= HELLO_BYTES {
        let _ = client_hello(bytes);
        return;
    }
    let whole = client_hello(bytes);
    for end in (0..bytes.len()).step_by(usize::from(*cut).max(1)) {
        match client_hello(&bytes[..end]) {
            Read::More => {}
            part => assert_eq!(part, whole, "the first {end} bytes say something else"),
        }
    }
    if let Read::Done(hello) = whole {
        assert!(hello.length <= bytes.len());
    }
}

/// What is passed on does not depend on the cuts, and read once more it is the same requests for the same name.
pub fn relay_requests(bytes: &[u8]) {
    let Some((cut, bytes)) = bytes.split_first() else { return };
    let whole = passed(bytes, usize::MAX);
    let parts = passed(bytes, usize::from(*cut).max(1));
    assert_eq!((whole.1, &whole.2), (parts.1, &parts.2));
    if whole.1 {
        assert_eq!(whole.0, parts.0);
    }
    let again = passed(&whole.0, usize::MAX);
    assert!(again.1, "what was passed on is not understood");
    assert_eq!(again.0, whole.0, "it is read another way the second time");
    if !whole.0.is_empty() {
        assert_eq!(again.2, whole.2);
    }
}

/// What is passed on, whether it is well, and for whom.
fn passed(bytes: &[u8], part: usize) -> (Vec<u8>, bool, Option<HostName>) {
    let (mut requests, mut out) = (Requests::new(80), Vec::new());
    for part in bytes.chunks(part.min(bytes.len().max(1))) {
        requests.take(part);
        loop {
            match requests.step() {
                Ok(Step::Pass(bytes)) => out.extend(bytes),
                Ok(Step::Upgrade(bytes)) => {
                    out.extend(bytes);
                    break;
                }
                Ok(Step::More) => break,
                Err(_) => return (out, false, requests.name().cloned()),
            }
        }
    }
    (out, true, requests.name().cloned())
}

/// Inputs of [`dns_packets`] to begin from.
pub const DNS_PACKETS: &[&[u8]] =
    &[include_bytes!("seeds/dns_packets/answer"), include_bytes!("seeds/dns_packets/question")];

/// Inputs of [`relay_greeting`] to begin from.
pub const RELAY_GREETING: &[&[u8]] =
    &[include_bytes!("seeds/relay_greeting/parts"), include_bytes!("seeds/relay_greeting/whole")];

/// Inputs of [`relay_requests`] to begin from.
pub const RELAY_REQUESTS: &[&[u8]] = &[
    include_bytes!("seeds/relay_requests/chunks"),
    include_bytes!("seeds/relay_requests/two"),
    include_bytes!("seeds/relay_requests/upgrade"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Chance;

    #[test]
    fn the_seeds_are_what_they_should_be() {
        for seed in RELAY_GREETING {
            assert!(matches!(client_hello(&seed[1..]), Read::Done(hello) if hello.name.as_str() == "a.example.com"));
        }
        for seed in RELAY_REQUESTS {
            let (out, well, name) = passed(&seed[1..], usize::MAX);
            assert!(well && !out.is_empty() && name.is_some_and(|name| name.as_str() == "a.example.com"));
        }
        assert!(matches!(Question::take(&DNS_PACKETS[1][1..], Over::Udp), Taken::Ask(_)));
        let name = HostName::new("www.example.com").expect("a name");
        let mut chase = Chase::new(&name, RecordType::A).expect("a chase");
        let Heard::Answer(message) = hear(&DNS_PACKETS[0][1..], 9, &chase.query()) else { panic!("no answer") };
        let Next::Done(found) = chase.feed(&message, &|address| !address.is_private()) else { panic!("no end") };
        assert_eq!((found.addresses().len(), found.dropped), (1, 1));
    }

    #[test]
    fn a_little_of_each() {
        let mut chance = Chance(4);
        for _ in 0..5_000 {
            dns_packets(&chance.near(DNS_PACKETS));
            dns_packets(&chance.bytes(100));
            relay_greeting(&chance.near(RELAY_GREETING));
            relay_greeting(&chance.bytes(100));
            relay_requests(&chance.near(RELAY_REQUESTS));
            relay_requests(&chance.bytes(100));
        }
    }
}
