//! What is open as elements of the wall's sets and maps: of a policy, all of them at once; of a name, as its addresses are
//! found.

use std::net::Ipv4Addr;

use crate::net::netlink::tables::{Change, Element};
use crate::net::policy::{Compiled, Floor, Protocol, Rule};
use crate::net::{LONGEST_OPENING, Opened};

/// The elements that open an address for a rule, or `None` where the floor leaves nothing of it.
pub(super) fn elements_of(rule: &Rule, opened: &Opened, floor: &Floor) -> Option<Vec<(&'static str, Element)>> {
    let octets = opened.address.octets();
    let timeout = u64::from(opened.ttl_seconds.clamp(1, LONGEST_OPENING)) * 1000;
    let value = mark(rule.number().0);
    let element =
        |key: Vec<u8>| Element { key, value: Some(value.clone()), timeout_ms: Some(timeout), ..Element::default() };
    let mut all = Vec::new();
    for protocol in rule.protocols() {
        if *protocol == Protocol::Icmp {
            if floor.admits_to(rule, opened.address, Protocol::Icmp, 0) {
                all.push(("opened_pings", element(octets.to_vec())));
            }
            continue;
        }
        for port in rule.open_ports().iter().filter(|port| floor.admits_to(rule, opened.address, *protocol, **port)) {
            all.push(match rule.is_relayed() {
                true => ("relayed", element([&octets[..], &padded(*port)].concat())),
                false => {
                    let key = [&octets[..], &[protocol.number(), 0, 0, 0], &padded(*port)].concat();
                    ("opened", element(key))
                }
            });
        }
    }
    if all.is_empty() { None } else { Some(all) }
}

/// A class as a mark: the same bytes in both orders, because `nft` turns a mark around where it stands in a key of several
/// fields with ranges, and not where it is a value or a key alone.
fn class_mark(class: u32) -> Vec<u8> {
    let [low, high, ..] = class.to_le_bytes();
    vec![low, high, high, low]
}

/// A mark as the kernel keeps it.
fn mark(number: u32) -> Vec<u8> {
    number.to_ne_bytes().to_vec()
}

/// A port as a field of a key: fields are padded to four bytes.
fn padded(port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    [high, low, 0, 0]
}

/// The transaction that puts a compiled policy in the place of another. Openings stay: those of rules that are gone lead to
/// numbers that are not in force.
pub(super) fn changes(compiled: &Compiled) -> Vec<Change> {
    let mut ranges = Vec::new();
    for (first, last, class) in &compiled.ranges {
        ranges.push(Element { key: first.octets().to_vec(), value: Some(class_mark(*class)), ..Element::default() });
        if let Some(after) = last.to_bits().checked_add(1) {
            let key = Ipv4Addr::from_bits(after).octets().to_vec();
            ranges.push(Element { key, ends: true, ..Element::default() });
        }
    }
    let services = compiled.services.iter().map(|service| {
        let key =
            |port| [&class_mark(service.class)[..], &[service.protocol.number(), 0, 0, 0], &padded(port)].concat();
        let value = Some(mark(service.rule.0));
        Element { key: key(service.first), key_end: Some(key(service.last)), value, ..Element::default() }
    });
    let pings = compiled.pings.iter().map(|(class, rule)| Element {
        key: class_mark(*class),
        value: Some(mark(rule.0)),
        ..Element::default()
    });
    let live = compiled.live.iter().map(|rule| Element { key: mark(rule.0), ..Element::default() });
    let serve = compiled.resolves.then(|| Element { key: 53u16.to_be_bytes().to_vec(), ..Element::default() });
    let sets = ["live", "serve", "ranges", "services", "pings"];
    let mut changes: Vec<Change> = sets.into_iter().map(Change::Empty).collect();
    let added: [Vec<Element>; 5] =
        [live.collect(), serve.into_iter().collect(), ranges, services.collect(), pings.collect()];
    for (set, elements) in sets.into_iter().zip(added) {
        if !elements.is_empty() {
            changes.push(Change::Add(set, elements));
        }
    }
    changes
}
