//! Elements of nftables' sets and maps, changed in transactions, and counters.
//!
//! Rules are loaded by `nft`, once (`nft.rs`); what changes afterwards is elements alone, and those go from here in a
//! fraction of a millisecond.

use std::collections::BTreeMap;
use std::io;
use std::sync::LazyLock;

use netlink_packet_core::{DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage};
use netlink_packet_core::{NetlinkPayload, NlaBuffer, NlasIterator};
use netlink_packet_netfilter::nftables::{
    DataAttribute, ListAttribute, NfTablesMessage, SetElementAttribute, SetElementFlags, SetElementList,
    SetElementMessage, TableAttribute, TableMessage,
};
use netlink_packet_netfilter::none::ControlMessage;
use netlink_packet_netfilter::{NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily};
use rustix::net::netlink;

use super::{Socket, framed};

/// The number of the nftables subsystem, and of its group of events.
const SUBSYSTEM: u16 = 10;
const EVENTS: u32 = 1 << (7 - 1);

/// Elements in one message: its list has a length of 16 bits.
const ELEMENTS: usize = 256;

/// nftables in one namespace.
#[derive(Debug)]
pub(crate) struct Tables(Socket);

/// One element of a set or map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Element {
    /// Its key, or where its range begins.
    pub key: Vec<u8>,
    /// Where the range ends, in sets whose keys are several fields.
    pub key_end: Option<Vec<u8>>,
    /// In maps: what it leads to.
    pub value: Option<Vec<u8>>,
    /// Whether it only ends the range before it, in sets whose key is one field.
    pub ends: bool,
    /// For how long it stays, in milliseconds.
    pub timeout_ms: Option<u64>,
}

/// A change within a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Empties a set.
    Empty(&'static str),
    /// Adds elements, of which none may be there.
    Add(&'static str, Vec<Element>),
    /// Adds elements, or begins the time of those that are there anew where the kernel [`lengthens`] it.
    Renew(&'static str, Vec<Element>),
    /// Removes elements, which must be there.
    Remove(&'static str, Vec<Element>),
}

/// Whether the kernel begins an element's time anew when it is added again. Those before 6.12 (the commit "set element
/// timeout update support") leave it as it was, and say nothing.
pub(crate) fn lengthens() -> bool {
    static LENGTHENS: LazyLock<bool> = LazyLock::new(|| {
        let name = rustix::system::uname();
        let release = name.release().to_string_lossy();
        let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
        (numbers.next(), numbers.next()) >= (Some(6), Some(12))
    });
    *LENGTHENS
}

impl Tables {
    /// Opens it in the calling thread's namespace.
    pub fn open() -> io::Result<Self> {
        Ok(Tables(Socket::open(Some(netlink::NETFILTER), 0)?))
    }

    /// As [`Tables::open`], to poll for changes of whatever kind to the namespace's rules.
    pub fn watch() -> io::Result<Self> {
        let socket = Socket::open(Some(netlink::NETFILTER), EVENTS)?;
        rustix::io::ioctl_fionbio(&socket.fd, true)?;
        Ok(Tables(socket))
    }

    /// Throws away the events that have come; whether there was one.
    pub fn drain(&mut self) -> bool {
        let mut any = false;
        let mut buffer = vec![0; super::DATAGRAM];
        loop {
            match rustix::net::recv(&self.0.fd, &mut buffer[..], rustix::net::RecvFlags::empty()) {
                Ok(_) | Err(rustix::io::Errno::NOBUFS | rustix::io::Errno::INTR) => any = true,
                Err(_) => return any,
            }
        }
    }

    /// Whether the namespace has that table.
    pub fn has_table(&mut self, table: &str) -> io::Result<bool> {
        let message = TableMessage { attributes: vec![TableAttribute::Name(table.to_owned())] };
        match self.0.dump(inet(NfTablesMessage::GetTable(message)), 0) {
            Ok(_) => Ok(true),
            Err(error) if super::route::is_absent(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes a table, which may be absent.
    pub fn remove_table(&mut self, table: &str) -> io::Result<()> {
        let message = TableMessage { attributes: vec![TableAttribute::Name(table.to_owned())] };
        match self.commit(vec![(NfTablesMessage::DeleteTable(message), 0)]) {
            Err(error) if super::route::is_absent(&error) => Ok(()),
            done => done,
        }
    }

    /// Removes an element where it is; whether it was there. One that is not there costs no transaction.
    pub fn remove_element(&mut self, table: &str, set: &'static str, key: &[u8]) -> io::Result<bool> {
        let element = Element { key: key.to_vec(), ..Element::default() };
        let asked = list(table, set, Some(std::slice::from_ref(&element)));
        // That there is an answer is enough: not all that it may say can be read here.
        match self.0.dump(inet(NfTablesMessage::GetSetElement(asked)), 0) {
            Err(error) if super::route::is_absent(&error) => return Ok(false),
            Err(error) if error.raw_os_error().is_some() => return Err(error),
            _ => {}
        }
        match self.change(table, &[Change::Remove(set, vec![element])]) {
            Err(error) if super::route::is_absent(&error) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// Makes all changes at one moment, or none of them.
    pub fn change(&mut self, table: &str, changes: &[Change]) -> io::Result<()> {
        let mut messages = Vec::new();
        for change in changes {
            match change {
                Change::Empty(set) => messages.push((NfTablesMessage::DeleteSetElement(list(table, set, None)), 0)),
                Change::Add(set, elements) | Change::Renew(set, elements) => {
                    let alone = if matches!(change, Change::Add(..)) { NLM_F_EXCL } else { 0 };
                    for some in elements.chunks(ELEMENTS) {
                        let message = NfTablesMessage::NewSetElement(list(table, set, Some(some)));
                        messages.push((message, NLM_F_CREATE | alone));
                    }
                }
                Change::Remove(set, elements) => {
                    for some in elements.chunks(ELEMENTS) {
                        messages.push((NfTablesMessage::DeleteSetElement(list(table, set, Some(some))), 0));
                    }
                }
            }
        }
        self.commit(messages)
    }

    fn commit(&mut self, messages: Vec<(NfTablesMessage, u16)>) -> io::Result<()> {
        let Some(last) = messages.len().checked_sub(1) else { return Ok(()) };
        let control = |message| {
            let header = NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, SUBSYSTEM);
            NetfilterMessage::new(header, message)
        };
        let begin = self.0.next();
        let mut bytes = framed(control(ControlMessage::BatchBegin), NLM_F_REQUEST, begin);
        let mut acknowledged = begin;
        for (index, (message, flags)) in messages.into_iter().enumerate() {
            let sequence = self.0.next();
            let ack = if index == last { NLM_F_ACK } else { 0 };
            acknowledged = sequence;
            bytes.extend(framed(inet(message), NLM_F_REQUEST | flags | ack, sequence));
        }
        let end = self.0.next();
        bytes.extend(framed(control(ControlMessage::BatchEnd), NLM_F_REQUEST, end));
        self.0.send(&bytes)?;
        // Errors come in the order of the messages; that of the transaction as a whole is its beginning's.
        loop {
            let message: NetlinkMessage<NetfilterMessage> = self.0.message()?;
            let sequence = message.header.sequence_number;
            let NetlinkPayload::Error(answer) = message.payload else { continue };
            // In circles: numbers wrap around.
            if sequence.wrapping_sub(begin) > end.wrapping_sub(begin) {
                continue;
            }
            if answer.code.is_some() {
                return Err(answer.to_io());
            }
            if sequence == acknowledged {
                return Ok(());
            }
        }
    }

    /// Packets and bytes of every counter of the table, by name.
    pub fn counters(&mut self, family: NetfilterProtoFamily, table: &str) -> io::Result<BTreeMap<String, Count>> {
        let ask = vec![DefaultNla::new(OBJECT_TABLE, zero_terminated(table)), number(OBJECT_TYPE, COUNTER)];
        let header = NetfilterHeader::new(family, 0, 0);
        let message = NetfilterMessage::new(header, NfTablesMessage::GetObject(ask));
        let answer = self.0.dump(message, NLM_F_DUMP)?;
        let mut counters = BTreeMap::new();
        for message in answer {
            let NetfilterMessageInner::NfTables(NfTablesMessage::NewObject(attributes)) = message.inner else {
                continue;
            };
            if let Some((name, count)) = counter(&attributes, table) {
                counters.insert(name, count);
            }
        }
        Ok(counters)
    }
}

impl std::os::fd::AsFd for Tables {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }
}

/// What a counter counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub packets: u64,
    pub bytes: u64,
}

const OBJECT_TABLE: u16 = 1;
const OBJECT_NAME: u16 = 2;
const OBJECT_TYPE: u16 = 3;
const OBJECT_DATA: u16 = 4;
const COUNTER: u32 = 1;
const COUNTER_BYTES: u16 = 1;
const COUNTER_PACKETS: u16 = 2;

fn counter(attributes: &[DefaultNla], table: &str) -> Option<(String, Count)> {
    use netlink_packet_core::Nla;
    let value = |kind: u16| {
        let found = attributes.iter().find(|nla| nla.kind() & NLA_TYPE == kind)?;
        let mut value = vec![0; found.value_len()];
        found.emit_value(&mut value);
        Some(value)
    };
    let text = |bytes: Vec<u8>| String::from_utf8(bytes.into_iter().take_while(|b| *b != 0).collect()).ok();
    // The kernel may answer with those of every table.
    if text(value(OBJECT_TABLE)?)? != table {
        return None;
    }
    let name = text(value(OBJECT_NAME)?)?;
    let mut count = Count::default();
    let data = value(OBJECT_DATA)?;
    for nla in NlasIterator::new(&data[..]) {
        let nla: NlaBuffer<&[u8]> = nla.ok()?;
        let wide = nla.value().first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
        match (nla.kind(), wide) {
            (COUNTER_BYTES, Some(bytes)) => count.bytes = bytes,
            (COUNTER_PACKETS, Some(packets)) => count.packets = packets,
            _ => {}
        }
    }
    Some((name, count))
}

/// The bits of an attribute's kind that are its number.
const NLA_TYPE: u16 = 0x3fff;

fn zero_terminated(text: &str) -> Vec<u8> {
    text.bytes().chain([0]).collect()
}

fn number(kind: u16, number: u32) -> DefaultNla {
    DefaultNla::new(kind, number.to_be_bytes().to_vec())
}

fn inet(message: NfTablesMessage) -> NetfilterMessage {
    NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::Inet, 0, 0), message)
}

fn list(table: &str, set: &str, elements: Option<&[Element]>) -> SetElementMessage {
    let mut attributes = vec![SetElementList::Table(table.to_owned()), SetElementList::Set(set.to_owned())];
    if let Some(elements) = elements {
        let elements = elements.iter().map(|element| ListAttribute::Element(element.attributes())).collect();
        attributes.push(SetElementList::Elements(elements));
    }
    SetElementMessage { attributes }
}

impl Element {
    fn attributes(&self) -> Vec<SetElementAttribute> {
        const DATA_VALUE: u16 = 1;
        let mut attributes = Vec::with_capacity(4);
        if self.ends {
            attributes.push(SetElementAttribute::Flags(SetElementFlags::IntervalEnd));
        }
        attributes.push(SetElementAttribute::Key(DataAttribute::Value(self.key.clone())));
        if let Some(end) = &self.key_end {
            attributes.push(SetElementAttribute::KeyEnd(vec![DefaultNla::new(DATA_VALUE, end.clone())]));
        }
        attributes.extend(self.value.clone().map(|value| SetElementAttribute::Data(DataAttribute::Value(value))));
        attributes.extend(self.timeout_ms.map(SetElementAttribute::Timeout));
        attributes
    }
}
