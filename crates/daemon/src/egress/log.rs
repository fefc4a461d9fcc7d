//! What of a Sandbox's network is told: the first of each kind at once, the rest counted and told once a minute. Pure.
//!
//! A guest decides how often it asks and for how many names, so what it can have written is bounded whatever it does:
//! [`KINDS`] lines at once and as many a minute for one Sandbox; beyond that a line without a name counts the others. An
//! App decides how many Sandboxes it has: all of them together write [`OF_APP`] lines a minute, so that one App does not
//! push what others did out of the log.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use pepo_sandbox::net::HostName;

/// How long the same is only counted.
const WINDOW: Duration = Duration::from_secs(60);

/// Different lines in a window.
const KINDS: usize = 64;

/// Lines of all Sandboxes of one App in a window.
const OF_APP: u64 = 512;

/// What is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// Addresses were opened for a name.
    Opened,
    /// A connection begins through the relay.
    Begun,
    /// One has ended.
    Passed,
    /// A question or a connection was refused.
    Refused,
}

impl What {
    /// The event's type.
    pub fn kind(self) -> &'static str {
        match self {
            What::Opened => "network.opened",
            What::Begun => "network.connected",
            What::Passed => "network.disconnected",
            What::Refused => "network.refused",
        }
    }
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What.
    pub what: What,
    /// With which name.
    pub name: Option<HostName>,
    /// Why, of a refusal; how the name was said, of a connection.
    pub reason: &'static str,
    /// On which port.
    pub port: Option<u16>,
    /// At which addresses.
    pub addresses: Vec<Ipv4Addr>,
    /// Bytes from the guest.
    pub sent: u64,
    /// Bytes to it.
    pub received: u64,
}

impl Item {
    /// One without more.
    pub fn new(what: What, name: Option<HostName>, reason: &'static str) -> Self {
        Item { what, name, reason, port: None, addresses: Vec::new(), sent: 0, received: 0 }
    }
}

/// A line to write: an item, and how often it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// What: bytes are those of all of them, addresses those of the last.
    pub item: Item,
    /// How often.
    pub count: u64,
}

/// What lines are told apart by.
type Key = (What, Option<HostName>, &'static str, Option<u16>);

fn key(item: &Item) -> Key {
    (item.what, item.name.clone(), item.reason, item.port)
}

/// One Sandbox's account.
#[derive(Debug)]
pub struct Ledger {
    until: Instant,
    /// What was told in this window, and what has been counted since.
    told: HashMap<Key, Option<Line>>,
}

impl Ledger {
    /// An empty one.
    pub fn new(now: Instant) -> Self {
        Ledger { until: now + WINDOW, told: HashMap::new() }
    }

    /// Takes what happened; a line if it is to be told now.
    pub fn take(&mut self, item: Item) -> Option<Line> {
        let has_room = self.told.len() < KINDS;
        match self.told.get_mut(&key(&item)) {
            Some(counted) => {
                count(counted, item);
                None
            }
            None if has_room => {
                self.told.insert(key(&item), None);
                Some(Line { item, count: 1 })
            }
            None => {
                // The others, together: there are as many of these as reasons.
                let other = Item { name: None, port: None, addresses: Vec::new(), ..item };
                count(self.told.entry(key(&other)).or_default(), other);
                None
            }
        }
    }

    /// When [`Ledger::turn`] is due.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// Ends the window: what was counted in it.
    pub fn turn(&mut self, now: Instant) -> Vec<Line> {
        self.until = now + WINDOW;
        self.told.drain().filter_map(|(_, counted)| counted).collect()
    }
}

/// One App's account over all its Sandboxes.
#[derive(Debug)]
pub struct Budget {
    until: Instant,
    written: u64,
    left_out: u64,
}

impl Budget {
    /// A full one.
    pub fn new(now: Instant) -> Self {
        Budget { until: now + WINDOW, written: 0, left_out: 0 }
    }

    /// Whether one more line is written.
    pub fn take(&mut self) -> bool {
        let has_room = self.written < OF_APP;
        *(if has_room { &mut self.written } else { &mut self.left_out }) += 1;
        has_room
    }

    /// Begins a new window, if this one is over: how many lines it left out, if any.
    pub fn turn(&mut self, now: Instant) -> Option<u64> {
        if now < self.until {
            return None;
        }
        let left_out = self.left_out;
        *self = Budget::new(now);
        (left_out > 0).then_some(left_out)
    }
}

fn count(counted: &mut Option<Line>, item: Item) {
    match counted {
        Some(line) => {
            line.count += 1;
            line.item.sent += item.sent;
            line.item.received += item.received;
            line.item.addresses = item.addresses;
        }
        None => *counted = Some(Line { item, count: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(name: &str) -> Item {
        Item::new(What::Refused, Some(HostName::new(name).expect(name)), "name_not_listed")
    }

    #[test]
    fn the_first_is_told_at_once_and_the_rest_counted() {
        let now = Instant::now();
        let mut ledger = Ledger::new(now);
        assert_eq!(ledger.take(refused("a.example.com")), Some(Line { item: refused("a.example.com"), count: 1 }));
        for _ in 0..5 {
            assert_eq!(ledger.take(refused("a.example.com")), None);
        }
        let passed = |sent| Item { port: Some(443), sent, ..Item::new(What::Passed, None, "tls") };
        assert!(ledger.take(passed(1)).is_some());
        assert!(ledger.take(passed(2)).is_none() && ledger.take(passed(3)).is_none());
        let mut lines = ledger.turn(now + WINDOW);
        lines.sort_by_key(|line| line.count);
        assert_eq!(lines, [Line { item: passed(5), count: 2 }, Line { item: refused("a.example.com"), count: 5 }]);
        // A new window begins anew.
        assert!(ledger.take(refused("a.example.com")).is_some());
        assert_eq!(ledger.turn(now + WINDOW * 2), []);
    }

    #[test]
    fn an_app_with_many_sandboxes_writes_little_too() {
        let now = Instant::now();
        let mut budget = Budget::new(now);
        let written = (0..10_000).filter(|_| budget.take()).count() as u64;
        assert_eq!(written, OF_APP);
        assert_eq!(budget.turn(now), None, "the window is not over");
        assert_eq!(budget.turn(now + WINDOW), Some(10_000 - OF_APP));
        assert!(budget.take());
        assert_eq!(budget.turn(now + WINDOW * 2), None, "nothing was left out");
    }

    #[test]
    fn a_guest_that_asks_for_a_million_names_writes_little() {
        let now = Instant::now();
        let mut ledger = Ledger::new(now);
        let mut lines = (0..1_000_000).filter_map(|n| ledger.take(refused(&format!("n{n}.example.com")))).count();
        let counted = ledger.turn(now + WINDOW);
        lines += counted.len();
        assert!(lines <= 2 * KINDS, "{lines} lines");
        let others: u64 = counted.iter().map(|line| line.count).sum();
        assert_eq!(others, 1_000_000 - KINDS as u64);
        assert!(counted.iter().all(|line| line.item.name.is_none()));
    }
}
