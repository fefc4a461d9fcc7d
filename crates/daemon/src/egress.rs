//! Names and the ways out of live Sandboxes: their resolvers, their relays, and what is told of both.
//!
//! ```text
//! driver ── answer(whose, id, policy) ──▶ Answering ◀── end(id)     everything of the Sandbox here ends
//!                                             │
//!   guest's questions ─▶ resolver ◀───────────┤
//!   relay's questions ─▶ attend ─▶ resolver   ┘     the relay is started when the policy first needs one
//!            events ─▶ ledger ─▶ store              bounded; see `log`
//! ```
//! A life of pepod that takes Sandboxes over begins here for each of them anew: the sockets are handed out again, a relay
//! that runs is found again.

pub mod log;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pepo_api::{AppId, SandboxId as ApiSandboxId, SessionId};
use pepo_sandbox::host::{self, Doors};
use pepo_sandbox::net::dns::{self, Lines, Resolver, Scope, Sockets, Tally};
use pepo_sandbox::net::{Floor, Policy, Settings, relay};
use pepo_sandbox::{Host, SandboxId};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::network::Counts;
use crate::store::{Event, Store};
use log::{Budget, Item, Ledger, Line, What};

/// Events on their way to the ledger; one that listens too slowly misses some, the counts do not.
const EVENTS: usize = 256;

/// How long after a relay's end the next one is started; twice that, and so on, up to [`PAUSE_MOST`].
const PAUSE: Duration = Duration::from_millis(200);

/// The longest of these pauses.
const PAUSE_MOST: Duration = Duration::from_secs(30);

/// Whose Sandbox it is.
#[derive(Clone, Copy, Debug)]
pub struct Whose {
    /// The App.
    pub app: AppId,
    /// The Session.
    pub session: SessionId,
    /// The Sandbox.
    pub sandbox: ApiSandboxId,
}

/// What all Sandboxes share. Cloning is cheap.
#[derive(Clone)]
pub struct Egress(Arc<Inner>);

struct Inner {
    host: Host,
    store: Store,
    lines: Arc<Lines<Host>>,
    floor: Arc<Floor>,
    questions_per_second: u32,
    live: Mutex<HashMap<SandboxId, Arc<Answering>>>,
    budgets: Budgets,
}

/// What each App may still write.
type Budgets = Arc<Mutex<HashMap<AppId, Budget>>>;

impl std::fmt::Debug for Egress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Egress")
    }
}

impl Egress {
    /// For Sandboxes of that host by these settings.
    pub fn new(host: Host, store: Store, settings: &Settings) -> Self {
        let lines = Lines::new(host.clone());
        let questions_per_second = settings.limits.questions_per_second;
        Egress(Arc::new(Inner {
            lines,
            host,
            store,
            floor: Arc::new(settings.floor.clone()),
            questions_per_second,
            live: Mutex::default(),
            budgets: Arc::default(),
        }))
    }

    fn live(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Answering>>> {
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a Sandbox under a policy that is in force already: from now on, or as another than before. One task calls
    /// this for one Sandbox.
    ///
    /// # Errors
    /// It has no network, or its relay does not start.
    pub async fn answer(&self, whose: Whose, id: SandboxId, policy: Policy) -> Result<(), host::Error> {
        let known = self.live().get(&id).map(Arc::clone);
        match known {
            Some(answering) => answering.change(self.scope(policy)).await,
            None => {
                let answering = self.begin(whose, id, policy).await?;
                self.live().insert(id, Arc::new(answering));
            }
        }
        Ok(())
    }

    /// Answers a Sandbox no more, if it was answered.
    pub fn end(&self, id: SandboxId) {
        self.live().remove(&id);
    }

    /// What was counted of a Sandbox's questions since this life answers it.
    pub fn tally(&self, id: SandboxId) -> Option<Tally> {
        self.live().get(&id).map(|answering| answering.resolver.counts().tally())
    }

    /// Takes what of it is new since this was called last; none: nothing.
    pub fn more(&self, id: SandboxId) -> Option<Counts> {
        let answering = self.live().get(&id).map(Arc::clone)?;
        let mut told = answering.told.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Counts::of_names(&answering.resolver.counts().tally());
        let more = now.since(&told);
        *told = now;
        (!more.is_zero()).then_some(more)
    }

    /// What the next [`Egress::more`] would take.
    pub fn untold(&self, id: SandboxId) -> Option<Counts> {
        let answering = self.live().get(&id).map(Arc::clone)?;
        let told = answering.told.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Some(Counts::of_names(&answering.resolver.counts().tally()).since(&told))
    }

    fn scope(&self, policy: Policy) -> Scope {
        Scope { policy: Arc::new(policy), floor: Arc::clone(&self.0.floor) }
    }

    async fn begin(&self, whose: Whose, id: SandboxId, policy: Policy) -> Result<Answering, host::Error> {
        let inner = &self.0;
        let [udp, tcp] = inner.host.resolver(id).await?;
        let end = CancellationToken::new();
        let guard = end.clone().drop_guard();
        let (names, of_names) = mpsc::channel(EVENTS);
        let (ways, of_ways) = mpsc::channel(EVENTS);
        let (relays, wanted) = watch::channel(policy.relays());
        let (changed, seen) = watch::channel(0);
        let doors = Doors::new(inner.host.clone(), id);
        let resolver = Resolver::new(Arc::clone(&inner.lines), doors, self.scope(policy), names);
        // Before the guest can want it; later ones are started in the background.
        let first = if *wanted.borrow() { Some(inner.host.relay(id).await?) } else { None };
        let (served, rate) = (Arc::clone(&resolver), inner.questions_per_second);
        let until = end.clone();
        tokio::spawn(async move {
            if let Err(error) = dns::serve(Sockets { udp, tcp }, served, rate, until).await {
                tracing::error!(sandbox = %id, %error, "its questions for names cannot be answered");
            }
        });
        let relaying = Relaying {
            host: inner.host.clone(),
            id,
            resolver: Arc::clone(&resolver),
            events: ways,
            changed: seen,
            end: end.clone(),
        };
        tokio::spawn(relaying.keep(first, wanted));
        let log = Log { store: inner.store.clone(), budgets: Arc::clone(&inner.budgets), whose };
        tokio::spawn(log.tell(of_names, of_ways, end));
        Ok(Answering { resolver, relays, changed, told: Mutex::default(), _end: guard })
    }
}

/// A Sandbox that is answered, until this is dropped.
struct Answering {
    resolver: Arc<Resolver<Host, Doors>>,
    relays: watch::Sender<bool>,
    changed: watch::Sender<u64>,
    /// What of its counts was taken.
    told: Mutex<Counts>,
    _end: DropGuard,
}

impl Answering {
    async fn change(&self, scope: Scope) {
        self.relays.send_replace(scope.policy.relays());
        self.resolver.change(scope).await;
        self.changed.send_modify(|generation| *generation += 1);
    }
}

/// One Sandbox's relay.
struct Relaying {
    host: Host,
    id: SandboxId,
    resolver: Arc<Resolver<Host, Doors>>,
    events: mpsc::Sender<relay::Event>,
    changed: watch::Receiver<u64>,
    end: CancellationToken,
}

impl Relaying {
    /// Answers a relay whenever the policy needs one, and starts another when one ends.
    async fn keep(self, mut first: Option<std::os::fd::OwnedFd>, mut wanted: watch::Receiver<bool>) {
        let mut pause = PAUSE;
        loop {
            tokio::select! {
                () = self.end.cancelled() => return,
                wanted = wanted.wait_for(|wanted| *wanted) => if wanted.is_err() { return },
            }
            let stream = match first.take() {
                Some(stream) => Ok(stream),
                None => self.host.relay(self.id).await,
            };
            let begun = Instant::now();
            let ended = match stream {
                Ok(stream) => {
                    let (resolver, events) = (Arc::clone(&self.resolver), self.events.clone());
                    relay::attend(stream, resolver, events, self.changed.clone(), self.end.clone())
                        .await
                        .map_err(|error| error.to_string())
                }
                Err(error) => Err(error.to_string()),
            };
            if self.end.is_cancelled() {
                return;
            }
            // One that did its work for a while has earned a quick successor.
            pause = if begun.elapsed() > PAUSE_MOST { PAUSE } else { (pause * 2).min(PAUSE_MOST) };
            match ended {
                Ok(()) => tracing::warn!(sandbox = %self.id, "its relay ended; starting another"),
                Err(reason) => tracing::warn!(sandbox = %self.id, reason, "its relay cannot be answered; trying again"),
            }
            tokio::select! {
                () = self.end.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }
}

/// Where what is told of one Sandbox goes.
struct Log {
    store: Store,
    budgets: Budgets,
    whose: Whose,
}

impl Log {
    /// Writes what is told.
    async fn tell(
        self,
        mut names: mpsc::Receiver<dns::Event>,
        mut ways: mpsc::Receiver<relay::Event>,
        end: CancellationToken,
    ) {
        let mut ledger = Ledger::new(Instant::now());
        loop {
            let item = tokio::select! {
                () = end.cancelled() => break,
                Some(event) = names.recv() => of_names(event),
                Some(event) = ways.recv() => of_ways(event),
                () = tokio::time::sleep_until(ledger.until().into()) => {
                    ledger.turn(Instant::now()).into_iter().for_each(|line| self.write(line));
                    self.turn();
                    continue;
                }
            };
            ledger.take(item).into_iter().for_each(|line| self.write(line));
        }
        ledger.turn(Instant::now()).into_iter().for_each(|line| self.write(line));
    }

    fn write(&self, line: Line) {
        self.turn();
        if self.budget(Budget::take) {
            self.store.record(event(self.whose, line));
        }
    }

    /// Says what was left out in a window that is over.
    fn turn(&self) {
        if let Some(left_out) = self.budget(|budget| budget.turn(Instant::now())) {
            let event = Event::new("network.omitted").app(self.whose.app).detail("count", left_out);
            self.store.record(event);
        }
    }

    fn budget<T>(&self, work: impl FnOnce(&mut Budget) -> T) -> T {
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        work(budgets.entry(self.whose.app).or_insert_with(|| Budget::new(Instant::now())))
    }
}

fn of_names(event: dns::Event) -> Item {
    match event {
        dns::Event::Opened { name, addresses, .. } => Item { addresses, ..Item::new(What::Opened, Some(name), "ok") },
        dns::Event::Refused { name, why } => Item::new(What::Refused, name, why.as_str()),
    }
}

fn of_ways(event: relay::Event) -> Item {
    match event {
        relay::Event::Passed { name, address, port, by } => {
            let by = match by {
                relay::By::Tls => "tls",
                relay::By::TlsOuter => "tls_outer",
                relay::By::Http => "http",
            };
            Item { port: Some(port), addresses: vec![address], ..Item::new(What::Begun, Some(name), by) }
        }
        relay::Event::Ended { name, address, port, sent, received } => Item {
            port: Some(port),
            addresses: vec![address],
            sent,
            received,
            ..Item::new(What::Passed, Some(name), "ok")
        },
        relay::Event::Barred { name, to, port, why } => Item {
            port: Some(port),
            addresses: to.into_iter().collect(),
            ..Item::new(What::Refused, name, why.as_str())
        },
    }
}

fn event(whose: Whose, line: Line) -> Event {
    let Line { item, count } = line;
    let mut event = Event::new(item.what.kind())
        .app(whose.app)
        .session(whose.session)
        .sandbox(whose.sandbox)
        .outcome(item.reason)
        .detail("count", count);
    if let Some(name) = &item.name {
        event = event.detail("name", name.as_str());
    }
    if let Some(port) = item.port {
        event = event.detail("port", port);
    }
    if !item.addresses.is_empty() {
        event = event.detail("addresses", item.addresses);
    }
    if item.what == What::Passed {
        event = event.detail("sent_bytes", item.sent).detail("received_bytes", item.received);
    }
    event
}
