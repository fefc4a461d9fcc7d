//! What a guest asks: its packet taken apart, and the replies made for it. Pure.

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{DNSClass, Record, RecordType};

use super::Why;
use crate::net::HostName;

/// The longest question taken, bytes: a name of 255 with room for EDNS and its options.
pub const QUESTION_BYTES: usize = 1232;

/// The longest answer given over UDP, bytes, whatever a guest says it can take: no fragments (the figure of the DNS flag
/// day of 2020).
const UDP_BYTES: u16 = 1232;

/// The longest answer given over TCP, bytes.
const TCP_BYTES: u16 = 16 * 1024;

/// What a packet is.
#[derive(Debug)]
pub enum Taken {
    /// A question to answer.
    Ask(Box<Question>),
    /// Answered already.
    Reply {
        /// The packet to send back.
        packet: Vec<u8>,
        /// The reason.
        why: Why,
    },
    /// Nothing that is answered.
    Drop,
}

/// How a question came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// In a datagram.
    Udp,
    /// On a stream.
    Tcp,
}

/// A question.
#[derive(Clone, Debug)]
pub struct Question {
    /// The name asked for.
    pub name: HostName,
    /// What of it.
    pub kind: RecordType,
    id: u16,
    query: Query,
    recursion: bool,
    edns: bool,
    most: u16,
}

/// Types that are looked up, beside addresses: none carries an address, and none is asked of every server of a zone.
const KINDS: [RecordType; 11] = [
    RecordType::A,
    RecordType::CNAME,
    RecordType::TXT,
    RecordType::MX,
    RecordType::SRV,
    RecordType::NS,
    RecordType::SOA,
    RecordType::CAA,
    RecordType::PTR,
    RecordType::NAPTR,
    RecordType::TLSA,
];

/// Types whose answers would lead round the policy, or to an address family that is off: there are none of that name.
const EMPTY: [RecordType; 3] = [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB];

/// Whether a header's counts are those of something we read: the decoder makes room for what they say before it looks.
pub fn plausible(packet: &[u8], questions: u16, records: u32) -> bool {
    let Some(header) = packet.first_chunk::<12>() else { return false };
    let count = |at: usize| u32::from(u16::from_be_bytes([header[at], header[at + 1]]));
    count(4) == u32::from(questions) && count(6) + count(8) + count(10) <= records
}

impl Question {
    /// Takes a guest's packet apart.
    pub fn take(packet: &[u8], over: Over) -> Taken {
        let Some(header) = packet.first_chunk::<12>() else { return Taken::Drop };
        let (id, is_response) = (u16::from_be_bytes([header[0], header[1]]), header[2] & 0x80 != 0);
        if is_response {
            return Taken::Drop;
        }
        let bare = |code| {
            let message = Message::error_msg(id, OpCode::Query, code);
            message.to_vec().map_or(Taken::Drop, |packet| Taken::Reply { packet, why: Why::Malformed })
        };
        if packet.len() > QUESTION_BYTES || !plausible(packet, 1, 8) {
            return bare(ResponseCode::FormErr);
        }
        let Ok(message) = Message::from_vec(packet) else { return bare(ResponseCode::FormErr) };
        let [query] = &message.queries[..] else { return bare(ResponseCode::FormErr) };
        if message.metadata.op_code != OpCode::Query {
            return bare(ResponseCode::NotImp);
        }
        let most = match (over, &message.edns) {
            (Over::Tcp, _) => TCP_BYTES,
            (Over::Udp, Some(edns)) => edns.max_payload().clamp(512, UDP_BYTES),
            (Over::Udp, None) => 512,
        };
        let mut name = query.name().to_ascii();
        if name.len() > 1 && name.ends_with('.') {
            name.pop();
        }
        let name = HostName::new(&name);
        let question = |name| Question {
            name,
            kind: query.query_type(),
            id,
            query: query.clone(),
            recursion: message.metadata.recursion_desired,
            edns: message.edns.is_some(),
            most,
        };
        let Ok(name) = name else { return bare(ResponseCode::Refused) };
        let question = question(name);
        if message.edns.as_ref().is_some_and(|edns| edns.version() != 0) {
            return question.instead(ResponseCode::BADVERS, Why::Malformed);
        }
        if query.query_class() != DNSClass::IN || !(KINDS.contains(&question.kind) || EMPTY.contains(&question.kind)) {
            return question.instead(ResponseCode::Refused, Why::Kind);
        }
        Taken::Ask(Box::new(question))
    }

    /// Whether there is nothing of this type, whatever the name.
    pub fn is_empty(&self) -> bool {
        EMPTY.contains(&self.kind)
    }

    fn instead(&self, code: ResponseCode, why: Why) -> Taken {
        Taken::Reply { packet: self.refuse(code, why), why }
    }

    /// A reply with these records; one that is too long says so, and the guest asks again over TCP.
    pub fn answer(&self, code: ResponseCode, records: Vec<Record>) -> Vec<u8> {
        let mut message = self.message(code);
        message.answers = records;
        let full = message.to_vec().unwrap_or_default();
        if !full.is_empty() && full.len() <= usize::from(self.most) {
            return full;
        }
        message.answers.clear();
        message.metadata.truncation = true;
        message.to_vec().unwrap_or_default()
    }

    /// A reply without records that says why, to those who understand extended errors (RFC 8914).
    pub fn refuse(&self, code: ResponseCode, why: Why) -> Vec<u8> {
        let mut message = self.message(code);
        if let Some(edns) = &mut message.edns {
            edns.options_mut().insert(extended_error(why));
        }
        message.to_vec().unwrap_or_default()
    }

    fn message(&self, code: ResponseCode) -> Message {
        let mut message = Message::new(self.id, MessageType::Response, OpCode::Query);
        message.metadata.recursion_desired = self.recursion;
        message.metadata.recursion_available = true;
        message.metadata.response_code = code;
        message.queries.push(self.query.clone());
        if self.edns {
            let mut edns = Edns::new();
            edns.set_max_payload(UDP_BYTES);
            edns.set_version(0);
            message.edns = Some(edns);
        }
        message
    }
}

/// Option 15: a code and a text.
fn extended_error(why: Why) -> EdnsOption {
    const BLOCKED: u16 = 15;
    const FILTERED: u16 = 17;
    const NOT_SUPPORTED: u16 = 21;
    const NETWORK: u16 = 23;
    let code = match why {
        Why::NotListed | Why::Special => BLOCKED,
        Why::Floor => FILTERED,
        Why::Kind => NOT_SUPPORTED,
        Why::Silent | Why::NoServer => NETWORK,
        _ => 0,
    };
    let mut data = code.to_be_bytes().to_vec();
    data.extend_from_slice(format!("pepo: {why}").as_bytes());
    EdnsOption::Unknown(15, data)
}
