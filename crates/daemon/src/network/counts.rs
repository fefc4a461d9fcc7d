//! What a network carried and refused as counts by name, so that parts can be added up: over activations for a Session, over
//! all of them for metrics.
//!
//! ```text
//! kernel's counters, since the Sandbox was made ─▶ of_packets ─┐
//! resolver's counts, since pepod answers it     ─▶ of_names   ─┴─▶ store: totals of the Session ─▶ shown
//! ```

use std::borrow::Cow;
use std::collections::BTreeMap;

use pepo_api::{NameStats, NetworkRefused, NetworkStats};
use pepo_sandbox::net::dns::Tally;
use pepo_sandbox::net::{Refused, Traffic};
use serde::{Deserialize, Serialize};

/// Counts by name (`sent_bytes`, `refused.floor`, `names.refused.name_not_listed`); one that is not there is zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Counts(BTreeMap<Cow<'static, str>, u64>);

impl Counts {
    fn nonzero(counts: impl IntoIterator<Item = (Cow<'static, str>, u64)>) -> Self {
        Counts(counts.into_iter().filter(|(_, count)| *count > 0).collect())
    }

    /// Of packets.
    pub fn of_packets(traffic: &Traffic) -> Self {
        let Traffic { sent_bytes, sent_packets, received_bytes, received_packets, connections, refused } = *traffic;
        let Refused {
            unlisted,
            floor,
            revoked,
            connections: crowded,
            rate,
            packets,
            questions,
            spoofed,
            malformed,
            inbound,
        } = refused;
        let counts = [
            ("sent_bytes", sent_bytes),
            ("sent_packets", sent_packets),
            ("received_bytes", received_bytes),
            ("received_packets", received_packets),
            ("connections", connections),
            ("refused.unlisted", unlisted),
            ("refused.floor", floor),
            ("refused.revoked", revoked),
            ("refused.connections", crowded),
            ("refused.rate", rate),
            ("refused.packets", packets),
            ("refused.questions", questions),
            ("refused.spoofed", spoofed),
            ("refused.malformed", malformed),
            ("refused.inbound", inbound),
        ];
        Self::nonzero(counts.map(|(name, count)| (name.into(), count)))
    }

    /// Of questions for names.
    pub fn of_names(tally: &Tally) -> Self {
        let Tally { asked, answered, opened, dropped, refused } = tally;
        let counts = [
            ("names.asked", *asked),
            ("names.answered", *answered),
            ("names.opened", *opened),
            ("names.dropped", *dropped),
        ];
        let reasons = refused.iter().map(|(why, count)| (format!("names.refused.{why}").into(), *count));
        Self::nonzero(counts.map(|(name, count)| (name.into(), count)).into_iter().chain(reasons))
    }

    /// What of this is more than before. A count that is less now than then is one that began anew, or could not be read:
    /// nothing of it is more.
    pub fn since(&self, before: &Counts) -> Counts {
        Self::nonzero(self.0.iter().map(|(name, now)| (name.clone(), now.saturating_sub(before.get(name)))))
    }

    /// Adds these.
    pub fn add(&mut self, more: &Counts) {
        for (name, count) in &more.0 {
            let sum = self.0.entry(name.clone()).or_default();
            *sum = sum.saturating_add(*count);
        }
    }

    /// The greater of each.
    pub fn raise(&mut self, other: &Counts) {
        for (name, count) in &other.0 {
            let most = self.0.entry(name.clone()).or_default();
            *most = (*most).max(*count);
        }
    }

    /// Whether all of them are zero.
    pub fn is_zero(&self) -> bool {
        self.0.is_empty()
    }

    /// One of them.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// Those whose name begins so, by the rest of it.
    pub fn below<'a>(&'a self, front: &'a str) -> impl Iterator<Item = (&'a str, u64)> {
        self.0.iter().filter_map(move |(name, count)| Some((name.strip_prefix(front)?, *count)))
    }

    /// As the API shows them.
    pub fn shown(&self) -> NetworkStats {
        let refused = |reason: &str| self.get(&format!("refused.{reason}"));
        NetworkStats {
            sent_bytes: self.get("sent_bytes"),
            sent_packets: self.get("sent_packets"),
            received_bytes: self.get("received_bytes"),
            received_packets: self.get("received_packets"),
            connections: self.get("connections"),
            refused: NetworkRefused {
                unlisted: refused("unlisted"),
                floor: refused("floor"),
                revoked: refused("revoked"),
                connections: refused("connections"),
                rate: refused("rate"),
                packets: refused("packets"),
                questions: refused("questions"),
                spoofed: refused("spoofed"),
                malformed: refused("malformed"),
                inbound: refused("inbound"),
            },
            names: NameStats {
                asked: self.get("names.asked"),
                answered: self.get("names.answered"),
                opened: self.get("names.opened"),
                dropped: self.get("names.dropped"),
                refused: self.below("names.refused.").map(|(why, count)| (why.to_owned(), count)).collect(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_and_every_count_is_shown() {
        let refused = Refused {
            unlisted: 6,
            floor: 7,
            revoked: 8,
            connections: 9,
            rate: 10,
            packets: 11,
            questions: 12,
            spoofed: 13,
            malformed: 14,
            inbound: 15,
        };
        let traffic =
            Traffic { sent_bytes: 1, sent_packets: 2, received_bytes: 3, received_packets: 4, connections: 5, refused };
        let tally =
            Tally { asked: 20, answered: 17, opened: 16, dropped: 18, refused: [("name_not_listed", 19)].into() };
        let mut all = Counts::of_packets(&traffic);
        assert_eq!(all.since(&all), Counts::default());
        all.add(&Counts::of_names(&tally));
        let mut numbers = Vec::new();
        fn leaves(value: &serde_json::Value, into: &mut Vec<u64>) {
            match value {
                serde_json::Value::Object(map) => map.values().for_each(|value| leaves(value, into)),
                value => into.extend(value.as_u64()),
            }
        }
        leaves(&serde_json::to_value(all.shown()).expect("json"), &mut numbers);
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=20).collect::<Vec<_>>());
        let mut twice = all.clone();
        twice.add(&all);
        assert_eq!(twice.since(&all), all);
        assert_eq!(all.since(&twice), Counts::default(), "nothing goes down");
        let text = serde_json::to_string(&all).expect("json");
        assert_eq!(serde_json::from_str::<Counts>(&text).expect("read"), all);
    }
}
