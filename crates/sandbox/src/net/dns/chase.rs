//! Following aliases: what an upstream's answers mean for one question. Pure.
//!
//! ```text
//! Chase ── feed(answer) ──▶ Ask(next name)      an alias whose end the answer does not have
//!                      └──▶ Done(records)       bounded: links, hops, records; a name seen twice is a loop
//! ```
//! Only records on the way from the name asked for are looked at; everything else in an answer is ignored.

use std::net::Ipv4Addr;

use hickory_proto::op::{Message, MessageType, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use super::question::plausible;
use super::{ADDRESSES, HOPS, LINKS, LONGEST, Why};
use crate::net::HostName;

/// Records in one answer that are read; with more it is refused.
const RECORDS: u32 = 300;

/// Records that are passed on, addresses and aliases aside.
const OTHERS: usize = 64;

/// Whether a packet is the answer to a query.
#[derive(Debug)]
pub enum Heard {
    /// It is.
    Answer(Box<Message>),
    /// It is, cut short: to be asked again over TCP.
    Short,
    /// Another number, another question, or no answer at all: forged or late. The true one may still come.
    NotOurs,
    /// It is ours, and no one can read it.
    Broken(Why),
}

/// Reads a packet that came while waiting for the answer to `query` with that number.
pub fn hear(packet: &[u8], id: u16, query: &Query) -> Heard {
    let Some(header) = packet.first_chunk::<12>() else { return Heard::NotOurs };
    if u16::from_be_bytes([header[0], header[1]]) != id || header[2] & 0x80 == 0 {
        return Heard::NotOurs;
    }
    if !plausible(packet, 1, RECORDS) {
        // Without its question it may be anybody's; with too much in it, it is ours and of no use.
        let ours = u16::from_be_bytes([header[4], header[5]]) == 1;
        return if ours { Heard::Broken(Why::Large) } else { Heard::NotOurs };
    }
    let is_short = header[2] & 0x02 != 0;
    match Message::from_vec(packet) {
        Ok(message) if message.metadata.message_type != MessageType::Response => Heard::NotOurs,
        Ok(message) if !same(&message.queries, query) => Heard::NotOurs,
        Ok(_) if is_short => Heard::Short,
        Ok(message) => Heard::Answer(Box::new(message)),
        // Cut in the middle of a record, as some do.
        Err(_) if is_short => Heard::Short,
        Err(_) => Heard::Broken(Why::Wrong),
    }
}

fn same(queries: &[Query], query: &Query) -> bool {
    let [theirs] = queries else { return false };
    theirs.name().to_lowercase() == query.name().to_lowercase()
        && theirs.query_type() == query.query_type()
        && theirs.query_class() == query.query_class()
}

/// What comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Ask for this name.
    Ask(HostName),
    /// Over.
    Done(Found),
    /// Over, without an answer.
    Failed(Why),
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// `NoError` or `NXDomain`.
    pub code: ResponseCode,
    /// The aliases from the name asked for, then what stands at their end. Times to live are bounded.
    pub records: Vec<Record>,
    /// Addresses that were left out because they may never be reached.
    pub dropped: usize,
}

impl Found {
    /// The addresses in it, each once.
    pub fn addresses(&self) -> Vec<Ipv4Addr> {
        let mut addresses: Vec<Ipv4Addr> = self
            .records
            .iter()
            .filter_map(|record| match &record.data {
                RData::A(A(address)) => Some(*address),
                _ => None,
            })
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses
    }

    /// How long all of it holds, in seconds: the shortest time to live in it.
    pub fn seconds(&self) -> u32 {
        self.records.iter().map(|record| record.ttl).min().unwrap_or(0)
    }
}

/// One question being followed.
#[derive(Debug)]
pub struct Chase {
    kind: RecordType,
    at: Name,
    seen: Vec<Name>,
    links: Vec<Record>,
    hops: usize,
}

impl Chase {
    /// Begins at that name; [`None`] for one that is none on the wire.
    pub fn new(name: &HostName, kind: RecordType) -> Option<Self> {
        let at = wire_name(name)?;
        Some(Chase { kind, seen: vec![at.clone()], at, links: Vec::new(), hops: 1 })
    }

    /// The query to send now.
    pub fn query(&self) -> Query {
        Query::query(self.at.clone(), self.kind)
    }

    /// Takes the answer to [`Chase::query`].
    pub fn feed(&mut self, message: &Message, admits: &dyn Fn(Ipv4Addr) -> bool) -> Next {
        let code = message.metadata.response_code;
        if !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) {
            return Next::Failed(Why::Upstream);
        }
        let on_the_way = |record: &&Record| record.dns_class == DNSClass::IN;
        let mut moved = false;
        // A question for the alias itself is answered by it, not led on.
        while self.kind != RecordType::CNAME {
            let alias = message.answers.iter().filter(on_the_way).find_map(|record| match &record.data {
                RData::CNAME(CNAME(target)) if record.name.to_lowercase() == self.at => Some((record, target)),
                _ => None,
            });
            let Some((record, target)) = alias else { break };
            let target = target.to_lowercase();
            if self.seen.contains(&target) {
                return Next::Failed(Why::Loop);
            }
            if self.links.len() == LINKS {
                return Next::Failed(Why::Chain);
            }
            self.links.push(bounded(self.at.clone(), record.ttl, RData::CNAME(CNAME(target.clone()))));
            self.seen.push(target.clone());
            self.at = target;
            moved = true;
        }
        let at_the_end = message
            .answers
            .iter()
            .filter(on_the_way)
            .filter(|record| record.record_type() == self.kind && record.name.to_lowercase() == self.at);
        let (mut records, mut dropped) = (self.links.clone(), 0);
        let first = records.len();
        for record in at_the_end {
            let most = if self.kind == RecordType::A { ADDRESSES } else { OTHERS };
            match &record.data {
                RData::A(A(address)) if !admits(*address) => dropped += 1,
                _ if records.len() - first == most => break,
                data => records.push(bounded(self.at.clone(), record.ttl, data.clone())),
            }
        }
        let is_end = records.len() > first || dropped > 0 || code == ResponseCode::NXDomain || !moved;
        if is_end {
            return Next::Done(Found { code, records, dropped });
        }
        // An alias without its end: who wrote the answer leaves the rest to us.
        if self.hops == HOPS {
            return Next::Failed(Why::Chain);
        }
        self.hops += 1;
        match HostName::new(&self.at.to_ascii()) {
            Ok(name) => Next::Ask(name),
            Err(_) => Next::Failed(Why::Wrong),
        }
    }
}

fn bounded(name: Name, ttl: u32, data: RData) -> Record {
    Record::from_rdata(name, ttl.min(LONGEST), data)
}

/// A name as hickory has it: lower case, complete.
pub fn wire_name(name: &HostName) -> Option<Name> {
    let mut wire = Name::from_labels(name.as_str().split('.').map(str::as_bytes)).ok()?;
    wire.set_fqdn(true);
    Some(wire)
}
