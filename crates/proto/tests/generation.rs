//! The field and variant numbers of every message, against the list checked in for this generation.
//!
//! `wire/generation-1.txt` is what other releases were built from: a line in it never changes and never goes. A new
//! field (an `Option`) or a new variant is a new line, put there by whoever adds it.

#![allow(clippy::unwrap_used, clippy::panic)] // all of it is a test

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use pepo_proto::{GENERATION, OLDEST_GENERATION};

const MESSAGES: &str = include_str!("../src/message.rs");
const FRAMES: &str = include_str!("../src/frame.rs");
const GENERATION_1: &str = include_str!("../wire/generation-1.txt");

/// One numbered thing: where it is, its number, its name and type.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    place: String,
    number: u32,
    what: String,
}

/// The numbers in the source text, in its order. It knows the shapes that messages are written in and fails on others.
fn from_source() -> Vec<Entry> {
    let mut entries = Vec::new();
    let (mut outer, mut inner, mut number) = (String::new(), None::<String>, None::<u32>);
    for line in MESSAGES.lines() {
        let text = line.trim();
        if let Some(name) = line.strip_prefix("pub struct ").or(line.strip_prefix("pub enum ")) {
            let kind = line.split(' ').nth(1).unwrap();
            outer = format!("{kind} {}", name.trim_end_matches(" {"));
        } else if line == "}" {
            outer.clear();
        } else if outer.is_empty() || text.starts_with("//") {
            continue;
        } else if text.starts_with("#[n(") || text.starts_with("#[cbor(n(") {
            let digits = text.split("n(").nth(1).and_then(|rest| rest.split(')').next()).unwrap();
            number = Some(digits.parse().unwrap());
        } else if text == "}," || text == "}" {
            inner = None;
        } else if let Some(number) = number.take() {
            let what = text.trim_start_matches("pub ").trim_end_matches(',').replace("#[n(0)] ", "");
            let place = inner.as_ref().map_or(outer.clone(), |variant| format!("{outer} {variant}"));
            match what.strip_suffix(" {") {
                Some(variant) => {
                    inner = Some(variant.to_owned());
                    entries.push(Entry { place, number, what: variant.to_owned() });
                }
                None => entries.push(Entry { place, number, what }),
            }
        } else {
            panic!("no number before {text:?} in {outer}");
        }
    }
    for line in FRAMES.lines().map(str::trim) {
        if let Some((name, value)) = line.strip_prefix("pub const ").and_then(|rest| rest.split_once(": u8 = ")) {
            let number = value.trim_end_matches(';').parse().unwrap();
            entries.push(Entry { place: "frame kind".into(), number, what: name.to_owned() });
        }
    }
    entries
}

fn from_list(list: &str) -> BTreeSet<Entry> {
    let mut place = String::new();
    let mut entries = BTreeSet::new();
    for line in list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix("  ") {
            None => place = line.to_owned(),
            Some(entry) => {
                let (number, what) = entry.split_once(' ').unwrap();
                let (number, what) = (number.parse().unwrap(), what.to_owned());
                assert!(entries.insert(Entry { place: place.clone(), number, what }), "twice in the list: {line}");
            }
        }
    }
    entries
}

fn as_list(entries: &[Entry]) -> String {
    let mut list = String::new();
    let mut places: Vec<&str> = Vec::new();
    for entry in entries {
        if !places.contains(&entry.place.as_str()) {
            places.push(&entry.place);
        }
    }
    for place in places {
        writeln!(list, "\n{place}").unwrap();
        for entry in entries.iter().filter(|entry| entry.place == place) {
            writeln!(list, "  {} {}", entry.number, entry.what).unwrap();
        }
    }
    list
}

#[test]
fn nothing_of_this_generation_was_changed_or_taken_away() {
    let now: BTreeSet<Entry> = from_source().into_iter().collect();
    let gone: Vec<Entry> = from_list(GENERATION_1).into_iter().filter(|entry| !now.contains(entry)).collect();
    assert!(gone.is_empty(), "in wire/generation-1.txt and no longer in the source:\n{}", as_list(&gone));
}

#[test]
fn what_was_added_is_in_the_list() {
    let list = from_list(GENERATION_1);
    let new: Vec<Entry> = from_source().into_iter().filter(|entry| !list.contains(entry)).collect();
    assert!(new.is_empty(), "add to wire/generation-1.txt (a field of a struct only as an Option):\n{}", as_list(&new));
}

#[test]
fn no_number_is_used_twice_in_one_place() {
    let mut seen = BTreeMap::new();
    for entry in from_source() {
        if let Some(before) = seen.insert((entry.place.clone(), entry.number), entry.what.clone()) {
            panic!("{} {} is both {before} and {}", entry.place, entry.number, entry.what);
        }
    }
}

#[test]
fn the_reading_of_the_source_misses_nothing() {
    let written = MESSAGES.matches("#[n(").count() + MESSAGES.matches("#[cbor(n(").count();
    // A variant around one message has two numbers on two lines, of which one is always 0 and not listed.
    let wrapped = MESSAGES.matches("(#[n(0)] ").count();
    let listed = from_source().iter().filter(|entry| entry.place != "frame kind").count();
    assert_eq!(listed, written - wrapped);
    assert!(listed > 150, "only {listed} numbers found");
}

#[test]
fn this_generation_is_the_one_listed() {
    assert_eq!((OLDEST_GENERATION, GENERATION), (1, 1), "a new generation needs a list of its own beside the old one");
}
