//! Admission: how many Sandboxes this host takes, whose turn it is when there is no room, and how many start at once.
//!
//! Owns the count of places. A [`Place`] is held per activation, from before its Sandbox is made until everything is given
//! back; dropping it is giving it back. Where there is no room the request waits in its App's queue, which is short, for a
//! time that is short: full is an answer. Apps take turns, so that one that asks for hundreds does not stand before another
//! that asks for one.
//!
//! ```text
//! admit ──room, nobody waits──────────────────────────────► Place
//!   └────► queue of the App ──its turn, and it fits───────► Place
//!                └── the queue is full, or the wait is over ─► Full (503, Retry-After)
//! spare ──room beyond what requests have──► Place of the pool; it counts for nobody, and gives way
//! ```
//! Places of the pool never refuse a request: [`Capacity::admit`] does not see them. A request that was admitted waits for
//! [`Capacity::settled`] before it takes anything, until the pool has given back what is too much.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pepo_api::AppId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

/// Memory that a Sandbox costs beyond its guest's, in MiB: emulator and translation cache, vsock device, keeper.
pub const OVERHEAD_MIB: u64 = 128;

/// Requests that may wait over all Apps: each holds a connection.
const ALL_WAITING: usize = 1024;

/// What of this host one Sandbox needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Memory with the overhead, MiB.
    memory_mib: u64,
    /// Virtual processors.
    cpus: u64,
    /// Scratch disk when it is full, MiB.
    disk_mib: u64,
}

impl Needs {
    /// Of a guest of that size.
    pub fn new(memory_mib: u32, cpus: u32, disk_mib: u32) -> Self {
        Needs { memory_mib: u64::from(memory_mib) + OVERHEAD_MIB, cpus: u64::from(cpus), disk_mib: u64::from(disk_mib) }
    }
}

/// What there is for all Sandboxes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Sandboxes.
    pub places: u64,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Virtual processors: more than the host has, since most of them idle.
    pub cpus: u64,
    /// Scratch disks, MiB: more than the disk has, since they are sparse.
    pub disk_mib: u64,
    /// Requests of one App that may wait.
    pub waiting: usize,
    /// How long one may wait.
    pub wait: Duration,
}

/// Of what there is too little.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Places.
    Places,
    /// Memory.
    Memory,
    /// Virtual processors.
    Cpus,
    /// Scratch disks.
    Disk,
}

impl What {
    /// The parameter of a request that asks for it.
    pub fn param(self) -> Option<&'static str> {
        match self {
            What::Places => None,
            What::Memory => Some("memory_mib"),
            What::Cpus => Some("cpus"),
            What::Disk => Some("disk_mib"),
        }
    }

    fn unit(self) -> &'static str {
        match self {
            What::Places => "Sandboxes",
            What::Memory => "MiB of memory",
            What::Cpus => "virtual processors",
            What::Disk => "MiB of scratch disk",
        }
    }
}

/// The host has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// Not now.
    #[error("{used} of {budget} {} in use, {waiting} waiting", .what.unit())]
    Now {
        /// Of what there is too little.
        what: What,
        /// How much of it is in use.
        used: u64,
        /// How much there is.
        budget: u64,
        /// Requests that wait for room, this one not counted.
        waiting: usize,
    },
    /// Not ever.
    #[error("{wanted} {} wanted, and all Sandboxes together may have {budget}", .what.unit())]
    TooLarge {
        /// Of what.
        what: What,
        /// How much is needed.
        wanted: u64,
        /// How much there is.
        budget: u64,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Used {
    places: u64,
    memory_mib: u64,
    cpus: u64,
    disk_mib: u64,
}

impl Used {
    fn add(&mut self, needs: Needs) {
        self.places += 1;
        self.memory_mib += needs.memory_mib;
        self.cpus += needs.cpus;
        self.disk_mib += needs.disk_mib;
    }

    fn sub(&mut self, needs: Needs) {
        self.places -= 1;
        self.memory_mib -= needs.memory_mib;
        self.cpus -= needs.cpus;
        self.disk_mib -= needs.disk_mib;
    }

    /// Each amount in use beside what is needed and what there is.
    fn each(&self, needs: Needs, budget: &Budget) -> [(What, u64, u64, u64); 4] {
        [
            (What::Places, self.places, 1, budget.places),
            (What::Memory, self.memory_mib, needs.memory_mib, budget.memory_mib),
            (What::Cpus, self.cpus, needs.cpus, budget.cpus),
            (What::Disk, self.disk_mib, needs.disk_mib, budget.disk_mib),
        ]
    }

    fn lacks(&self, needs: Needs, budget: &Budget) -> Option<(What, u64, u64)> {
        let lacking = self.each(needs, budget).into_iter().find(|(_, used, wanted, all)| used + wanted > *all);
        lacking.map(|(what, used, _, all)| (what, used, all))
    }

    fn is_over(&self, budget: &Budget) -> bool {
        self.places > budget.places
            || self.memory_mib > budget.memory_mib
            || self.cpus > budget.cpus
            || self.disk_mib > budget.disk_mib
    }
}

struct Waiter {
    ticket: u64,
    needs: Needs,
    granted: oneshot::Sender<Place>,
}

#[derive(Default)]
struct Table {
    /// By Sessions.
    used: Used,
    /// By the pool, beside those.
    spare: Used,
    /// Apps with somebody waiting, the next one first.
    turns: VecDeque<AppId>,
    queues: HashMap<AppId, VecDeque<Waiter>>,
    waiting: usize,
    tickets: u64,
}

impl Table {
    fn total(&self) -> Used {
        Used {
            places: self.used.places + self.spare.places,
            memory_mib: self.used.memory_mib + self.spare.memory_mib,
            cpus: self.used.cpus + self.spare.cpus,
            disk_mib: self.used.disk_mib + self.spare.disk_mib,
        }
    }

    fn forget(&mut self, app: AppId, ticket: u64) {
        let Some(queue) = self.queues.get_mut(&app) else { return };
        let before = queue.len();
        queue.retain(|waiter| waiter.ticket != ticket);
        self.waiting -= before - queue.len();
        if queue.is_empty() {
            self.queues.remove(&app);
            self.turns.retain(|turn| *turn != app);
        }
    }
}

struct Inner {
    table: Mutex<Table>,
    budget: Budget,
    boots: Arc<Semaphore>,
    /// Sessions that wait for their turn to start.
    starting: watch::Sender<usize>,
    /// Counts what may let somebody go on, or make the pool give way.
    changes: watch::Sender<u64>,
}

/// The count. Cloning is cheap.
#[derive(Clone)]
pub struct Capacity(Arc<Inner>);

impl std::fmt::Debug for Capacity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Capacity({:?})", self.load())
    }
}

/// Whose a place is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Session,
    Pool,
}

/// A Sandbox's place, until it is dropped.
pub struct Place {
    capacity: Arc<Inner>,
    needs: Needs,
    holder: Holder,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Place({:?}, {:?})", self.holder, self.needs)
    }
}

/// How much is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Sandboxes of Sessions.
    pub places: u64,
    /// Their memory, MiB.
    pub memory_mib: u64,
    /// Their virtual processors.
    pub cpus: u64,
    /// Their scratch disks, MiB.
    pub disk_mib: u64,
    /// Sandboxes of the pool, beside those.
    pub spare: u64,
    /// Requests that wait for room.
    pub waiting: usize,
}

impl Capacity {
    /// That much, `boots` of them starting at once.
    pub fn new(budget: Budget, boots: usize) -> Self {
        Capacity(Arc::new(Inner {
            table: Mutex::default(),
            budget,
            boots: Arc::new(Semaphore::new(boots)),
            starting: watch::Sender::new(0),
            changes: watch::Sender::new(0),
        }))
    }

    /// What there is.
    pub fn budget(&self) -> &Budget {
        &self.0.budget
    }

    /// What of it is in use.
    pub fn load(&self) -> Load {
        let table = self.0.lock();
        let Used { places, memory_mib, cpus, disk_mib } = table.used;
        Load { places, memory_mib, cpus, disk_mib, spare: table.spare.places, waiting: table.waiting }
    }

    /// A place, after those of the App that came before and in turn with other Apps. A caller that goes away leaves the
    /// queue.
    ///
    /// # Errors
    /// [`Full`]: it will never fit, too many of this App wait already, or there was no room in time.
    pub async fn admit(&self, app: AppId, needs: Needs) -> Result<Place, Full> {
        let inner = &self.0;
        let nothing = Used::default();
        let too_large = nothing.each(needs, &inner.budget).into_iter().find(|(_, _, wanted, all)| wanted > all);
        if let Some((what, _, wanted, budget)) = too_large {
            return Err(Full::TooLarge { what, wanted, budget });
        }
        let (waiting, granted) = {
            let mut table = inner.lock();
            let lacking = table.used.lacks(needs, &inner.budget);
            if lacking.is_none() && table.waiting == 0 {
                return Ok(inner.take(&mut table, needs, Holder::Session));
            }
            let queued = table.queues.get(&app).map_or(0, VecDeque::len);
            if queued >= inner.budget.waiting || table.waiting >= ALL_WAITING || inner.budget.wait.is_zero() {
                return Err(inner.full(&table, needs));
            }
            let (grant, granted) = oneshot::channel();
            table.tickets += 1;
            let ticket = table.tickets;
            if queued == 0 {
                table.turns.push_back(app);
            }
            table.queues.entry(app).or_default().push_back(Waiter { ticket, needs, granted: grant });
            table.waiting += 1;
            (Waiting { inner, app, ticket }, granted)
        };
        // It may have been somebody else's turn alone that kept this one.
        inner.grant();
        let granted = tokio::time::timeout(inner.budget.wait, granted).await;
        drop(waiting);
        match granted {
            Ok(Ok(place)) => Ok(place),
            Ok(Err(_)) | Err(_) => Err(inner.full(&inner.lock(), needs)),
        }
    }

    /// A place for a Sandbox that is there already, whatever the count says.
    pub fn adopted(&self, needs: Needs) -> Place {
        self.0.take(&mut self.0.lock(), needs, Holder::Session)
    }

    /// A place for the pool: only of what no request has or waits for.
    pub fn spare(&self, needs: Needs) -> Option<Place> {
        let mut table = self.0.lock();
        if table.waiting > 0 || table.total().lacks(needs, &self.0.budget).is_some() {
            return None;
        }
        Some(self.0.take(&mut table, needs, Holder::Pool))
    }

    /// Makes a place of the pool a Session's, where no other request waits and there is room for one more.
    pub fn convert(&self, place: &mut Place) -> bool {
        let mut table = self.0.lock();
        if place.holder == Holder::Session
            || table.waiting > 0
            || table.used.lacks(place.needs, &self.0.budget).is_some()
        {
            return place.holder == Holder::Session;
        }
        table.spare.sub(place.needs);
        table.used.add(place.needs);
        place.holder = Holder::Session;
        self.0.changed();
        true
    }

    /// Whether the pool has something that it must give back.
    pub fn is_over(&self) -> bool {
        let table = self.0.lock();
        table.spare.places > 0 && table.total().is_over(&self.0.budget)
    }

    /// Returns when what was admitted and what is spare fit together. The caller sets the deadline.
    pub async fn settled(&self) {
        let mut changes = self.0.changes.subscribe();
        // An error means that the count is gone, and with it the daemon.
        while self.is_over() && changes.changed().await.is_ok() {}
    }

    /// A receiver that learns of every change of the count and of who waits.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// Waits for the turn to start. While somebody waits here the pool starts nothing, and gives up what it is starting.
    pub async fn turn(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(free) = Arc::clone(&self.0.boots).try_acquire_owned() {
            return Some(free);
        }
        let _counted = Starting::new(&self.0);
        Arc::clone(&self.0.boots).acquire_owned().await.ok()
    }

    /// A turn that nobody waits for.
    pub fn idle_turn(&self) -> Option<OwnedSemaphorePermit> {
        if self.is_awaited() {
            return None;
        }
        Arc::clone(&self.0.boots).try_acquire_owned().ok()
    }

    /// Whether a Session waits for its turn to start.
    pub fn is_awaited(&self) -> bool {
        *self.0.starting.borrow() > 0
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(self: &Arc<Self>, table: &mut Table, needs: Needs, holder: Holder) -> Place {
        match holder {
            Holder::Session => table.used.add(needs),
            Holder::Pool => table.spare.add(needs),
        }
        self.changed();
        Place { capacity: self.clone(), needs, holder }
    }

    fn changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    fn full(&self, table: &Table, needs: Needs) -> Full {
        // Where it would fit now, it is the others that wait which kept it.
        let (what, used, budget) =
            table.used.lacks(needs, &self.budget).unwrap_or((What::Places, table.used.places, self.budget.places));
        Full::Now { what, used, budget, waiting: table.waiting }
    }

    /// Gives room to those whose turn it is. One that does not fit yet is not overtaken: small requests that keep coming
    /// would keep it waiting for ever.
    fn grant(self: &Arc<Self>) {
        let mut granted = Vec::new();
        {
            let mut table = self.lock();
            while let Some(app) = table.turns.front().copied() {
                let needs = match table.queues.get(&app).and_then(VecDeque::front) {
                    Some(waiter) => waiter.needs,
                    None => {
                        table.turns.pop_front();
                        continue;
                    }
                };
                if table.used.lacks(needs, &self.budget).is_some() {
                    break;
                }
                table.turns.pop_front();
                let waiter = table.queues.get_mut(&app).and_then(VecDeque::pop_front);
                match table.queues.get(&app).is_some_and(|queue| !queue.is_empty()) {
                    true => table.turns.push_back(app),
                    false => drop(table.queues.remove(&app)),
                }
                if let Some(waiter) = waiter {
                    table.waiting -= 1;
                    granted.push((waiter.granted, self.take(&mut table, needs, Holder::Session)));
                }
            }
        }
        // Outside the lock: a place whose waiter has gone is given back here.
        for (waiter, place) in granted {
            let _ = waiter.send(place);
        }
    }
}

/// A request in the queue; dropped, it leaves it.
struct Waiting<'a> {
    inner: &'a Arc<Inner>,
    app: AppId,
    ticket: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.inner.lock().forget(self.app, self.ticket);
        // It may have been the one that kept others.
        self.inner.grant();
    }
}

struct Starting<'a>(&'a Inner);

impl<'a> Starting<'a> {
    fn new(inner: &'a Inner) -> Self {
        inner.starting.send_modify(|starting| *starting += 1);
        inner.changed();
        Starting(inner)
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.0.starting.send_modify(|starting| *starting -= 1);
        self.0.changed();
    }
}

impl Place {
    /// How much it is for.
    pub fn needs(&self) -> Needs {
        self.needs
    }

    /// Makes a Session's place one of the pool: nobody came of it.
    pub fn make_spare(&mut self) {
        if self.holder == Holder::Pool {
            return;
        }
        {
            let mut table = self.capacity.lock();
            table.used.sub(self.needs);
            table.spare.add(self.needs);
        }
        self.holder = Holder::Pool;
        self.capacity.changed();
        self.capacity.grant();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        {
            let mut table = self.capacity.lock();
            match self.holder {
                Holder::Session => table.used.sub(self.needs),
                Holder::Pool => table.spare.sub(self.needs),
            }
        }
        self.capacity.changed();
        self.capacity.grant();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_secs(60);

    fn budget(places: u64) -> Budget {
        Budget { places, memory_mib: 10_000, cpus: 64, disk_mib: 100_000, waiting: 3, wait: WAIT }
    }

    fn small() -> Needs {
        Needs::new(512, 1, 2048)
    }

    async fn is_waiting<T>(admission: &mut std::pin::Pin<&mut impl Future<Output = T>>) -> bool {
        futures_util::poll!(admission.as_mut()).is_pending()
    }

    #[tokio::test]
    async fn each_amount_is_counted_refused_by_name_and_given_back() {
        let none = Duration::ZERO;
        let all = Budget { places: 3, memory_mib: 2000, cpus: 4, disk_mib: 9000, waiting: 3, wait: none };
        let capacity = Capacity::new(all, 1);
        let app = AppId::generate();
        let first = capacity.admit(app, small()).await.expect("room");
        let refusal = |text: &str| text.to_owned();
        let cases = [
            (Needs::new(1500, 1, 1), refusal("640 of 2000 MiB of memory in use, 0 waiting")),
            (Needs::new(1, 4, 1), refusal("1 of 4 virtual processors in use, 0 waiting")),
            (Needs::new(1, 1, 8000), refusal("2048 of 9000 MiB of scratch disk in use, 0 waiting")),
        ];
        for (needs, text) in cases {
            assert_eq!(capacity.admit(app, needs).await.expect_err("full").to_string(), text);
        }
        let tiny = Needs::new(1, 1, 1);
        let more = [capacity.admit(app, tiny).await.expect("room"), capacity.admit(app, tiny).await.expect("room")];
        let full = capacity.admit(app, tiny).await.expect_err("full");
        assert_eq!(full.to_string(), "3 of 3 Sandboxes in use, 0 waiting");
        drop((first, more));
        assert_eq!(capacity.load(), Capacity::new(all, 1).load(), "something was not given back");
        let never = capacity.admit(app, Needs::new(4000, 1, 1)).await.expect_err("never");
        assert_eq!(never.to_string(), "4128 MiB of memory wanted, and all Sandboxes together may have 2000");
    }

    #[tokio::test]
    async fn apps_take_turns_and_one_app_keeps_its_order() {
        let capacity = Capacity::new(budget(1), 1);
        let (a, b) = (AppId::generate(), AppId::generate());
        let held = capacity.admit(a, small()).await.expect("room");
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for (app, name) in [(a, "a1"), (a, "a2"), (a, "a3"), (b, "b1"), (b, "b2")] {
            let (capacity, order) = (capacity.clone(), order.clone());
            tasks.push(tokio::spawn(async move {
                let place = capacity.admit(app, small()).await.expect("its turn");
                order.lock().expect("lock").push(name);
                tokio::time::sleep(Duration::from_millis(10)).await;
                drop(place);
            }));
            // Each is in the queue before the next.
            tokio::task::yield_now().await;
        }
        assert_eq!(capacity.load().waiting, 5);
        let fourth = capacity.admit(a, small()).await.expect_err("its queue is full");
        assert_eq!(fourth.to_string(), "1 of 1 Sandboxes in use, 5 waiting");
        drop(held);
        for task in tasks {
            task.await.expect("task");
        }
        assert_eq!(*order.lock().expect("lock"), ["a1", "b1", "a2", "b2", "a3"]);
        assert_eq!((capacity.load().places, capacity.load().waiting), (0, 0));
    }

    #[tokio::test]
    async fn a_wait_ends_in_time_and_a_caller_that_leaves_leaves_the_queue() {
        let app = AppId::generate();
        let short = Duration::from_millis(50);
        let capacity = Capacity::new(Budget { wait: short, ..budget(1) }, 1);
        let _held = capacity.admit(app, small()).await.expect("room");
        let began = tokio::time::Instant::now();
        let full = capacity.admit(app, small()).await.expect_err("full");
        assert!(began.elapsed() >= short);
        assert!(matches!(full, Full::Now { waiting: 0, .. }), "{full:?}");

        let capacity = Capacity::new(budget(1), 1);
        let held = capacity.admit(app, small()).await.expect("room");
        let mut leaves = Box::pin(capacity.admit(app, small()));
        assert!(is_waiting(&mut leaves.as_mut()).await);
        let mut stays = Box::pin(capacity.admit(app, small()));
        assert!(is_waiting(&mut stays.as_mut()).await);
        drop(leaves);
        assert_eq!(capacity.load().waiting, 1);
        drop(held);
        let place = stays.await.expect("its turn");
        // Granted, and nobody is there to take it any more.
        let mut gone = Box::pin(capacity.admit(app, small()));
        assert!(is_waiting(&mut gone.as_mut()).await);
        drop(place);
        assert_eq!(capacity.load().places, 1);
        drop(gone);
        assert_eq!((capacity.load().places, capacity.load().waiting), (0, 0));
    }

    #[tokio::test]
    async fn a_large_request_is_not_overtaken() {
        let capacity = Capacity::new(budget(10), 1);
        let (a, b) = (AppId::generate(), AppId::generate());
        let held = capacity.admit(a, Needs::new(8000, 1, 1)).await.expect("room");
        let mut large = Box::pin(capacity.admit(a, Needs::new(8000, 1, 1)));
        assert!(is_waiting(&mut large.as_mut()).await);
        let mut late = Box::pin(capacity.admit(b, small()));
        assert!(is_waiting(&mut late.as_mut()).await, "it overtook");
        drop(held);
        let _large = large.await.expect("its turn");
        late.await.expect("its turn after that");
    }

    #[tokio::test]
    async fn the_pool_gives_way() {
        let capacity = Capacity::new(budget(2), 1);
        let app = AppId::generate();
        let spares = [capacity.spare(small()).expect("room"), capacity.spare(small()).expect("room")];
        assert!(capacity.spare(small()).is_none());
        let place = capacity.admit(app, small()).await.expect("the pool refuses nobody");
        assert!(capacity.is_over());
        let mut settled = Box::pin(capacity.settled());
        assert!(is_waiting(&mut settled.as_mut()).await);
        let [first, second] = spares;
        drop(first);
        settled.await;
        assert!(!capacity.is_over() && capacity.spare(small()).is_none());
        // Claimed, its place is a Session's; nobody coming of it, the pool's again.
        let mut second = second;
        assert!(capacity.convert(&mut second));
        assert_eq!((capacity.load().places, capacity.load().spare), (2, 0));
        second.make_spare();
        drop(place);
        let mut waits = Box::pin(capacity.admit(app, Needs::new(9000, 1, 1)));
        let held =
            [capacity.admit(app, small()).await.expect("room"), capacity.admit(app, small()).await.expect("room")];
        assert!(is_waiting(&mut waits.as_mut()).await);
        assert!(!capacity.convert(&mut second), "a claim overtook whoever waits");
        drop((held, waits, second));
        assert_eq!((capacity.load().places, capacity.load().spare), (0, 0));
    }

    #[tokio::test]
    async fn whoever_waits_to_start_keeps_the_pool_from_starting() {
        let capacity = Capacity::new(budget(9), 1);
        let turn = capacity.idle_turn().expect("free");
        let mut waiting = Box::pin(capacity.turn());
        assert!(is_waiting(&mut waiting.as_mut()).await);
        assert!(capacity.is_awaited());
        drop(turn);
        assert!(capacity.idle_turn().is_none(), "the pool went first");
        drop(waiting.await.expect("its turn"));
        assert!(!capacity.is_awaited() && capacity.idle_turn().is_some());
    }
}
