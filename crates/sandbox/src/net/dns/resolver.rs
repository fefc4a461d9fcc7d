//! The resolver of one Sandbox: what its policy makes of a question, and what it has opened.
//!
//! ```text
//! look_up(name) ─▶ rules of the name ─▶ chase upstream ─▶ floor ─▶ open for each rule ─▶ remember ─▶ answer
//!                      none: refused        bounded       drops      before answering
//! ```
//! One per Sandbox; cheap to share. [`super::server`] asks it for the guest, the relay's side asks it for a name that a
//! connection named.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{Record, RecordType};
use tokio::sync::mpsc;

use super::chase::{Chase, Found, Next};
use super::lines::{Lines, Share, Source};
use super::{Event, GRACE, LONGEST, SHORTEST, Scope, Why, special};
use crate::net::{HostName, Mode, Opened, RuleNumber};

/// Names whose addresses are remembered for one Sandbox.
const NAMES: usize = 1024;

/// Why the doors stay shut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shut {
    /// A rule is in force no more: decide again.
    Stale,
    /// Anything else.
    Failed,
}

/// Who opens addresses: the privileged side, which checks each once more.
pub trait Doors: Send + Sync + 'static {
    /// Opens all of them, or none, and returns when they are open.
    fn open(&self, openings: Vec<Opened>) -> impl Future<Output = Result<(), Shut>> + Send;
}

/// What was counted, by reason.
#[derive(Debug, Default)]
pub struct Counts {
    asked: AtomicU64,
    answered: AtomicU64,
    opened: AtomicU64,
    dropped: AtomicU64,
    refused: [AtomicU64; Why::ALL.len()],
}

/// A copy of the counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Questions.
    pub asked: u64,
    /// Of them, answered as asked (that a name does not exist is an answer).
    pub answered: u64,
    /// Addresses opened, each time counted.
    pub opened: u64,
    /// Addresses left out of answers because they are of the floor.
    pub dropped: u64,
    /// The others, by reason; reasons that never were are not in it.
    pub refused: BTreeMap<&'static str, u64>,
}

impl Counts {
    /// One question more.
    pub fn ask(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// One refusal more.
    pub fn refuse(&self, why: Why) {
        if let Some(count) = Why::ALL.iter().position(|one| *one == why).and_then(|at| self.refused.get(at)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What there is.
    pub fn tally(&self) -> Tally {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Tally {
            asked: get(&self.asked),
            answered: get(&self.answered),
            opened: get(&self.opened),
            dropped: get(&self.dropped),
            refused: Why::ALL
                .iter()
                .zip(&self.refused)
                .map(|(why, count)| (why.as_str(), get(count)))
                .filter(|(_, count)| *count > 0)
                .collect(),
        }
    }
}

/// An answer to give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// `NoError` or `NXDomain`.
    pub code: ResponseCode,
    /// The records.
    pub records: Vec<Record>,
}

/// What a name has now.
#[derive(Clone, Debug)]
struct Known {
    addresses: Vec<Ipv4Addr>,
    until: Instant,
}

/// The resolver of one Sandbox.
pub struct Resolver<S, D> {
    lines: Arc<Lines<S>>,
    share: Share,
    doors: D,
    scope: Mutex<Scope>,
    known: Mutex<BTreeMap<HostName, Known>>,
    counts: Counts,
    events: mpsc::Sender<Event>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: Source, D: Doors> Resolver<S, D> {
    /// One that asks by those lines and opens by those doors. What happens is told by `events`, as far as it has room.
    pub fn new(lines: Arc<Lines<S>>, doors: D, scope: Scope, events: mpsc::Sender<Event>) -> Arc<Self> {
        Arc::new(Resolver {
            lines,
            share: Share::default(),
            doors,
            scope: Mutex::new(scope),
            known: Mutex::default(),
            counts: Counts::default(),
            events,
        })
    }

    /// What was counted.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// The policy now.
    pub fn scope(&self) -> Scope {
        lock(&self.scope).clone()
    }

    /// Goes over to another policy. What names had under the old one is forgotten as far as the new one does not name them,
    /// and the rest is opened again, for rules that are new: so a guest that remembers an answer goes on.
    pub async fn change(&self, scope: Scope) {
        *lock(&self.scope) = scope.clone();
        let now = Instant::now();
        let mut openings = Vec::new();
        lock(&self.known).retain(|name, known| match scope.rules(name) {
            Ok(rules) if known.until > now => {
                let seconds = u32::try_from((known.until - now).as_secs()).unwrap_or(LONGEST).clamp(1, LONGEST);
                for rule in rules {
                    let open = |&address| Opened { rule, address, ttl_seconds: seconds };
                    openings.extend(known.addresses.iter().map(open));
                }
                true
            }
            _ => false,
        });
        for part in openings.chunks(OPENINGS) {
            if self.doors.open(part.to_vec()).await.is_err() {
                // The next question opens them.
                lock(&self.known).clear();
                return;
            }
        }
    }

    /// Answers a guest's question for records of that type.
    ///
    /// # Errors
    /// Why not; counted and told already.
    pub async fn answer(&self, name: &HostName, kind: RecordType) -> Result<Answered, Why> {
        match self.look_up(name, kind).await {
            Ok(found) => {
                self.counts.answered.fetch_add(1, Ordering::Relaxed);
                Ok(Answered { code: found.code, records: found.records })
            }
            Err(why) => {
                self.refuse(Some(name), why);
                Err(why)
            }
        }
    }

    /// The addresses of a name that a connection named, and the rules that name it: those that are open already, else asked
    /// for now.
    ///
    /// # Errors
    /// Why there are none.
    pub async fn addresses(&self, name: &HostName) -> Result<Vec<Ipv4Addr>, Why> {
        // The policy first: it may have lost the name since.
        self.scope().rules(name)?;
        let now = Instant::now();
        if let Some(known) = lock(&self.known).get(name).filter(|known| known.until > now) {
            return Ok(known.addresses.clone());
        }
        let found = self.look_up(name, RecordType::A).await?;
        let addresses = found.addresses();
        if addresses.is_empty() {
            Err(if found.dropped > 0 { Why::Floor } else { Why::Upstream })
        } else {
            Ok(addresses)
        }
    }

    /// The rules by which that address is open now, as far as this life of the resolver opened it.
    pub fn opened_by(&self, address: Ipv4Addr) -> Vec<RuleNumber> {
        let (scope, now) = (self.scope(), Instant::now());
        let known = lock(&self.known);
        let names = known.iter().filter(|(_, known)| known.until > now && known.addresses.contains(&address));
        let mut rules: Vec<RuleNumber> = names.flat_map(|(name, _)| scope.rules(name).unwrap_or_default()).collect();
        rules.sort_unstable();
        rules.dedup();
        rules
    }

    /// Counts and tells a refusal.
    pub fn refuse(&self, name: Option<&HostName>, why: Why) {
        self.counts.refuse(why);
        self.tell(Event::Refused { name: name.cloned(), why });
    }

    /// Who listens too slowly misses something: the counts are complete.
    fn tell(&self, event: Event) {
        let _ = self.events.try_send(event);
    }

    async fn look_up(&self, name: &HostName, kind: RecordType) -> Result<Found, Why> {
        // A policy that changes while an answer is on its way is asked once more.
        for _ in 0..2 {
            let scope = self.scope();
            let rules = scope.rules(name)?;
            let found = self.chase(name, kind, &scope).await?;
            self.counts.dropped.fetch_add(found.dropped as u64, Ordering::Relaxed);
            if found.dropped > 0 && found.addresses().is_empty() {
                return Err(Why::Floor);
            }
            if rules.is_empty() || kind != RecordType::A {
                return Ok(found);
            }
            match self.open(name, &rules, &found).await {
                Ok(()) => return Ok(found),
                Err(Shut::Stale) => {}
                Err(Shut::Failed) => return Err(Why::NotOpened),
            }
        }
        Err(Why::Stale)
    }

    async fn chase(&self, name: &HostName, kind: RecordType, scope: &Scope) -> Result<Found, Why> {
        let mut chase = Chase::new(name, kind).ok_or(Why::Malformed)?;
        loop {
            let message = self.lines.ask(&chase.query(), &self.share).await?;
            match chase.feed(&message, &|address| scope.admits(address)) {
                Next::Done(found) => return Ok(found),
                Next::Failed(why) => return Err(why),
                // Where the owner of a listed name leads is the owner's choice; where anybody's name leads is not.
                Next::Ask(next) if scope.policy.mode == Mode::Public && special(&next) => return Err(Why::Special),
                Next::Ask(_) => {}
            }
        }
    }

    async fn open(&self, name: &HostName, rules: &[RuleNumber], found: &Found) -> Result<(), Shut> {
        let addresses = found.addresses();
        if addresses.is_empty() {
            return Ok(());
        }
        let seconds = found.seconds().clamp(SHORTEST, LONGEST) + GRACE;
        let open = |rule| move |&address| Opened { rule, address, ttl_seconds: seconds };
        let mut openings: Vec<Opened> = rules.iter().flat_map(|&rule| addresses.iter().map(open(rule))).collect();
        openings.truncate(OPENINGS);
        let count = openings.len();
        self.doors.open(openings).await?;
        self.counts.opened.fetch_add(count as u64, Ordering::Relaxed);
        let now = Instant::now();
        let until = now + Duration::from_secs(u64::from(seconds));
        {
            let mut known = lock(&self.known);
            if known.len() >= NAMES && !known.contains_key(name) {
                known.retain(|_, known| known.until > now);
            }
            if known.len() >= NAMES && !known.contains_key(name) {
                // The one that ends first: a guest that asks for thousands of names of a star loses its own.
                let first = known.iter().min_by_key(|(_, known)| known.until).map(|(name, _)| name.clone());
                first.map(|first| known.remove(&first));
            }
            known.insert(name.clone(), Known { addresses: addresses.clone(), until });
        }
        self.tell(Event::Opened { name: name.clone(), addresses, seconds });
        Ok(())
    }
}

/// Openings in one request to the privileged side.
const OPENINGS: usize = 128;
