//! The warm pool: Sandboxes that are booted, answer, and are nobody's yet.
//!
//! Owns them until they are claimed. A claim takes one out of the table under its lock, so nobody gets one twice, and the
//! store commits whose it is before the guest is told; nothing comes back that was told. What the pool holds gives way:
//! to requests that were admitted, to Sessions that wait for their turn to start, and to running commands, beside which
//! nothing is made. After a restart nothing of it is adopted: it is swept, and made anew.
//!
//! ```text
//!            room, a turn, quiet               poised
//! wanted ───────────────────────► making ───────────────► ready ──claim──► a Session's
//!    ▲                              │ failed, not needed     │ silent, ended, too old, in the way,
//!    └──────────────────────────────┴────────────────────────┘ not wanted any more: released
//! ```
//! Called by Sessions for a claim, and by [`Pool::run`], the one task that looks after it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pepo_api::ImageId;
use pepo_sandbox::host::Keeper;
use pepo_sandbox::plan::Network;
use pepo_sandbox::{Io, Plan, SandboxId, Vmm, Warm, chain};
use tokio::sync::{Notify, OwnedSemaphorePermit, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::capacity::{Needs, Place};
use crate::config::{PoolConfig, PoolShape, cores};
use crate::session::{Files, Sessions, Spec, sandbox_id};
use crate::store::Write;

/// How often one that waits is asked whether it is there.
const BEAT: Duration = Duration::from_secs(15);

/// How long a look at which Images there are counts; changes of ours are told at once.
const LOOKED: Duration = Duration::from_secs(60);

/// How often it looks whether the host is quiet, while something is wanted.
const QUIET: Duration = Duration::from_millis(250);

/// How long it has to have been quiet where a boot takes processors from what runs: whoever has just claimed one, or was just
/// answered, is about to want something.
const SETTLED: Duration = Duration::from_millis(300);

/// The first pause after one could not be made, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What makes two Sandboxes alike: one that fits may be given to whoever asks for the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// The Image, by its digest's id.
    pub image: ImageId,
    /// Processors.
    pub cpus: u32,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Scratch disk, MiB.
    pub disk_mib: u32,
    /// What runs it.
    pub vmm: Vmm,
}

impl Shape {
    /// Of a Session, once its Image is known.
    pub fn of(spec: &Spec, image: ImageId, vmm: Vmm) -> Self {
        Shape { image, cpus: spec.cpus, memory_mib: spec.memory_mib, disk_mib: spec.disk_mib, vmm }
    }

    fn needs(&self) -> Needs {
        Needs::new(self.memory_mib, self.cpus, self.disk_mib)
    }

    /// How a Sandbox of it is made.
    pub fn plan(&self, id: SandboxId, files: &Files, io: Io, network: Network) -> Plan {
        Plan {
            id,
            vmm: self.vmm,
            kernel: files.kernel.clone(),
            initramfs: files.initramfs.clone(),
            root: files.root.clone(),
            memory_mib: self.memory_mib,
            cpus: self.cpus,
            disk_mib: self.disk_mib,
            network,
            io: Some(io),
        }
    }
}

/// The pool. Cloning is cheap.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

struct Inner {
    table: Mutex<Table>,
    config: watch::Sender<PoolConfig>,
    vmm: Vmm,
    wake: Notify,
    /// How many there are, made or being made.
    count: watch::Sender<usize>,
}

#[derive(Default)]
struct Table {
    /// Oldest first.
    ready: Vec<Ready>,
    making: HashMap<SandboxId, Making>,
    /// Being released.
    leaving: usize,
    wanted: Vec<Wanted>,
    /// When somebody was last seen to want the host's processors.
    busy_at: Option<Instant>,
    /// Counts changes of the Images that were told.
    images: u64,
    closed: bool,
}

struct Ready {
    shape: Shape,
    since: Instant,
    warm: Warm,
    place: Place,
    _watch: AbortOnDropHandle<()>,
}

struct Making {
    shape: Shape,
    cancel: CancellationToken,
}

/// A shape of the settings, with what its Image is now.
#[derive(Clone, Debug)]
struct Wanted {
    set: PoolShape,
    found: Result<(Shape, Files), String>,
    /// Not tried again before this, after a failure.
    not_before: Option<Instant>,
    pause: Duration,
    failed: Option<String>,
}

/// How a shape stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// What the settings say.
    pub wanted: PoolShape,
    /// How many wait ready.
    pub ready: usize,
    /// How many are being made.
    pub making: usize,
    /// Why there are not as many as wanted, where that is a fault.
    pub fault: Option<String>,
}

/// One that was taken out of the pool and is not told yet whose it is. Dropped, it goes back.
pub struct Claimed {
    pool: Pool,
    sessions: Sessions,
    one: Option<(Shape, Instant, Warm, Place)>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({:?})", self.status())
    }
}

impl std::fmt::Debug for Claimed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Claimed({:?})", self.one.as_ref().map(|(shape, ..)| shape))
    }
}

impl Pool {
    /// An empty one; [`Pool::run`] fills it.
    pub fn new(config: PoolConfig, vmm: Vmm) -> Self {
        Pool(Arc::new(Inner {
            table: Mutex::default(),
            config: watch::Sender::new(config),
            vmm,
            wake: Notify::new(),
            count: watch::Sender::new(0),
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The oldest one of that shape that lives, with its place. Nobody else gets it.
    pub fn claim(&self, sessions: &Sessions, shape: &Shape) -> Option<Claimed> {
        let ready = {
            let mut table = self.table();
            let fits = |ready: &Ready| ready.shape == *shape && !ready.warm.keeper().has_ended();
            let at = table.ready.iter().position(fits).filter(|_| !table.closed)?;
            table.busy_at = Some(Instant::now());
            table.ready.remove(at)
        };
        self.changed();
        let Ready { shape, since, warm, place, .. } = ready;
        Some(Claimed { pool: self.clone(), sessions: sessions.clone(), one: Some((shape, since, warm, place)) })
    }

    /// Other settings from now on.
    pub fn configure(&self, config: PoolConfig) {
        self.0.config.send_replace(config);
        self.images_changed();
    }

    /// Images were built or removed: names may mean others now.
    pub fn images_changed(&self) {
        self.table().images += 1;
        self.0.wake.notify_one();
    }

    /// Every Sandbox that the pool accounts for.
    pub fn sandboxes(&self) -> Vec<SandboxId> {
        let table = self.table();
        table.ready.iter().map(|ready| ready.warm.id()).chain(table.making.keys().copied()).collect()
    }

    /// How each shape stands.
    pub fn status(&self) -> Vec<Status> {
        let table = self.table();
        let status = |wanted: &Wanted| {
            let (ready, making) = match &wanted.found {
                Ok((shape, _)) => table.count(shape),
                Err(_) => (0, 0),
            };
            let fault = wanted.found.as_ref().err().or(wanted.failed.as_ref()).cloned();
            Status { wanted: wanted.set.clone(), ready, making, fault }
        };
        table.wanted.iter().map(status).collect()
    }

    /// Makes no more, and begins to give back what nobody claimed.
    pub fn shut(&self) {
        {
            let mut table = self.table();
            table.closed = true;
            table.making.values().for_each(|making| making.cancel.cancel());
        }
        self.0.wake.notify_one();
    }

    /// Returns when nothing of it is left, at most `within`.
    pub async fn emptied(&self, within: Duration) {
        let mut count = self.0.count.subscribe();
        // An error means that it is gone altogether.
        let _ = tokio::time::timeout(within, count.wait_for(|count| *count == 0)).await;
    }

    /// Makes again, after [`Pool::shut`].
    pub fn open(&self) {
        self.table().closed = false;
        self.0.wake.notify_one();
    }

    fn changed(&self) {
        self.tell();
        self.0.wake.notify_one();
    }

    fn tell(&self) {
        let count = {
            let table = self.table();
            table.ready.len() + table.making.len() + table.leaving
        };
        self.0.count.send_if_modified(|told| std::mem::replace(told, count) != count);
    }

    /// Looks after the pool, for ever.
    pub async fn run(self, sessions: Sessions) {
        let mut changes = sessions.capacity().changes();
        let mut looked: Option<(Instant, u64)> = None;
        loop {
            let told = self.table().images;
            if looked.is_none_or(|(at, images)| at.elapsed() >= LOOKED || images != told) {
                self.look(&sessions).await;
                looked = Some((Instant::now(), told));
            }
            let next = self.tend(&sessions);
            tokio::select! {
                () = self.0.wake.notified() => {}
                _ = changes.changed() => {}
                () = tokio::time::sleep(next) => {}
            }
        }
    }

    /// Finds out what the settings mean now.
    async fn look(&self, sessions: &Sessions) {
        let config = self.0.config.borrow().clone();
        let mut wanted = Vec::new();
        for set in config.shapes {
            let found = match sessions.find_files(set.image.clone()).await {
                Ok(files) => {
                    let (cpus, memory_mib, disk_mib) = (set.cpus, set.memory_mib, set.disk_mib);
                    Ok((Shape { image: files.id, cpus, memory_mib, disk_mib, vmm: self.0.vmm }, files))
                }
                Err(error) => Err(error.to_string()),
            };
            wanted.push(Wanted { set, found, not_before: None, pause: PAUSES.0, failed: None });
        }
        let mut table = self.table();
        // A pause goes on for what is still the same.
        for new in &mut wanted {
            let same = table.wanted.iter().find(|old| old.set == new.set && old.shape() == new.shape());
            if let Some(old) = same {
                (new.not_before, new.pause, new.failed) = (old.not_before, old.pause, old.failed.clone());
            }
        }
        table.wanted = wanted;
    }

    /// Gives back what has to go, and begins what is wanted. Returns when to look again at the latest.
    fn tend(&self, sessions: &Sessions) -> Duration {
        let capacity = sessions.capacity();
        let age = self.0.config.borrow().age;
        let beside = beside(self.0.vmm);
        // Looked at once, and only where something is wanted.
        let quiet = std::cell::OnceCell::new();
        let is_quiet = |busy_at: &mut Option<Instant>| {
            *quiet.get_or_init(|| {
                let at_work = sessions.at_work();
                if at_work > 0 {
                    *busy_at = Some(Instant::now());
                }
                let settled = beside > 0 || busy_at.is_none_or(|at| at.elapsed() >= SETTLED);
                settled && at_work <= beside
            })
        };
        let mut next = LOOKED;
        let (mut gone, mut begun) = (Vec::new(), Vec::new());
        {
            let mut table = self.table();
            let table = &mut *table;
            for making in table.making.values() {
                let wanted = table.wanted.iter().any(|wanted| wanted.shape() == Some(making.shape));
                // A Session that waits to start goes first: what it would have waited for is begun again later.
                if !wanted || table.closed || capacity.is_awaited() || capacity.is_over() {
                    making.cancel.cancel();
                }
            }
            let mut kept: HashMap<Shape, usize> = HashMap::new();
            for ready in std::mem::take(&mut table.ready) {
                let target = table.target(&ready.shape);
                let count = kept.entry(ready.shape).or_default();
                if table.closed || *count >= target {
                    gone.push((ready, "not wanted any more"));
                    continue;
                }
                *count += 1;
                table.ready.push(ready);
            }
            if table.making.is_empty() && gone.is_empty() && capacity.is_over() && !table.ready.is_empty() {
                // One at a time: its place comes back when it is released, and then it is looked again.
                if table.leaving == 0 {
                    gone.push((table.ready.remove(0), "a Session needs the room"));
                }
            }
            for at in 0..table.wanted.len() {
                let Ok((shape, files)) = table.wanted[at].found.clone() else { continue };
                let set = table.wanted[at].set.clone();
                let is_allowed = |have: usize, busy_at: &mut Option<Instant>| have < set.minimum || is_quiet(busy_at);
                let (ready, making) = table.count(&shape);
                let old = table.ready.iter().position(|one| one.shape == shape && one.since.elapsed() >= age);
                if let Some(old) = old {
                    // An old one is better than none while nothing may be made in its place.
                    if is_allowed(ready, &mut table.busy_at) && making == 0 {
                        gone.push((table.ready.remove(old), "too old"));
                    }
                } else if let Some(oldest) = table.ready.iter().find(|one| one.shape == shape) {
                    next = next.min(age.saturating_sub(oldest.since.elapsed()));
                }
                let (ready, making) = table.count(&shape);
                for have in ready + making..set.target {
                    if table.closed {
                        break;
                    }
                    if let Some(at) = table.wanted[at].not_before.filter(|at| *at > Instant::now()) {
                        next = next.min(at - Instant::now());
                        break;
                    }
                    if !is_allowed(have, &mut table.busy_at) {
                        next = next.min(QUIET);
                        break;
                    }
                    let Some(place) = capacity.spare(shape.needs()) else { break };
                    let Some(turn) = capacity.idle_turn() else { break };
                    let Ok(id) = sessions.host().new_id() else { break };
                    let cancel = CancellationToken::new();
                    table.making.insert(id, Making { shape, cancel: cancel.clone() });
                    begun.push((id, shape, files.clone(), place, turn, cancel));
                }
            }
            table.leaving += gone.len();
        }
        for (ready, why) in gone {
            self.let_go(sessions, ready, why);
        }
        for (id, shape, files, place, turn, cancel) in begun {
            let (pool, sessions) = (self.clone(), sessions.clone());
            tokio::spawn(async move { pool.make(sessions, id, shape, files, place, turn, cancel).await });
        }
        self.tell();
        next
    }

    /// Gives one back that is out of the table and counted as leaving.
    fn let_go(&self, sessions: &Sessions, ready: Ready, why: &'static str) {
        let Ready { warm, place, .. } = ready;
        let (pool, sessions) = (self.clone(), sessions.clone());
        tracing::debug!(sandbox = %warm.id(), why, "leaves the pool");
        tokio::spawn(async move {
            let id = warm.id();
            match warm.release().await {
                Ok(()) => sessions.settled(id).await,
                Err(error) => sessions.owe(id, error.to_string()),
            }
            drop(place);
            pool.table().leaving -= 1;
            pool.changed();
        });
    }

    #[allow(clippy::too_many_arguments, reason = "one caller, which has just taken all of it")]
    async fn make(
        self,
        sessions: Sessions,
        id: SandboxId,
        shape: Shape,
        files: Files,
        place: Place,
        turn: OwnedSemaphorePermit,
        cancel: CancellationToken,
    ) {
        let within = sessions.config().start_timeout;
        let made = tokio::time::timeout(within, self.boot(&sessions, id, &shape, &files, &cancel)).await;
        drop(turn);
        let error = match made {
            Ok(Ok(warm)) => {
                tracing::info!(sandbox = %id, took = ?warm.took(), "ready in the pool");
                self.enter(&sessions, shape, Instant::now(), warm, place);
                return;
            }
            Ok(Err(error)) => error,
            Err(_) => format!("it did not start within {} s", within.as_secs()),
        };
        // What the boot gave back itself is given back; a repeat finds nothing and says so to the store.
        sessions.bury(id).await;
        drop(place);
        {
            let mut table = self.table();
            table.making.remove(&id);
            if !cancel.is_cancelled()
                && let Some(wanted) = table.wanted.iter_mut().find(|wanted| wanted.shape() == Some(shape))
            {
                tracing::warn!(sandbox = %id, error, "could not be made for the pool");
                wanted.not_before = Some(Instant::now() + wanted.pause);
                wanted.pause = (wanted.pause * 2).min(PAUSES.1);
                wanted.failed = Some(error);
            }
        }
        self.changed();
    }

    async fn boot(
        &self,
        sessions: &Sessions,
        id: SandboxId,
        shape: &Shape,
        files: &Files,
        cancel: &CancellationToken,
    ) -> Result<Warm, String> {
        let told = |error: &dyn std::error::Error| chain(error);
        // Recorded before the first thing is taken.
        let record = sessions.store().write(Write::NewSandbox(sandbox_id(id))).await;
        record.map_err(|error| told(&error))?;
        let plan = shape.plan(id, files, sessions.config().io, sessions.interface());
        let warm = pepo_sandbox::boot(sessions.host(), plan, cancel).await;
        let warm = warm.map_err(|error| told(&error))?;
        match warm.poise().await {
            Ok(()) => Ok(warm),
            Err(error) => {
                let error = told(&error);
                // The caller releases again, and remembers what stays.
                let _ = warm.release().await;
                Err(error)
            }
        }
    }

    /// Puts one among those that wait.
    fn enter(&self, sessions: &Sessions, shape: Shape, since: Instant, warm: Warm, place: Place) {
        let id = warm.id();
        let watch = watched(self.clone(), sessions.clone(), &warm);
        {
            let mut table = self.table();
            table.making.remove(&id);
            if let Some(wanted) = table.wanted.iter_mut().find(|wanted| wanted.shape() == Some(shape)) {
                (wanted.not_before, wanted.pause, wanted.failed) = (None, PAUSES.0, None);
            }
            let at = table.ready.partition_point(|ready| ready.since <= since);
            table.ready.insert(at, Ready { shape, since, warm, place, _watch: watch });
        }
        self.changed();
    }
}

/// Commands beside which one may be made. In software emulation a boot takes whole processors from what runs.
fn beside(vmm: Vmm) -> usize {
    match vmm {
        Vmm::Qemu => 0,
        #[cfg(feature = "fake")]
        Vmm::Fake => 0,
        #[allow(unreachable_patterns, reason = "where there are others, they have hardware virtualization")]
        _ => cores(),
    }
}

/// Asks it now and then whether it is there; one that is not leaves the pool.
fn watched(pool: Pool, sessions: Sessions, warm: &Warm) -> AbortOnDropHandle<()> {
    let (id, guest, keeper): (_, _, Keeper) = (warm.id(), warm.guest().clone(), warm.keeper());
    AbortOnDropHandle::new(tokio::spawn(async move {
        let most = sessions.config().silence;
        let beat = BEAT.min(most / 2).max(Duration::from_millis(10));
        let why = loop {
            tokio::select! {
                biased;
                () = keeper.ended() => break "it ended",
                () = tokio::time::sleep(beat) => {}
            }
            match tokio::time::timeout(most, guest.ping()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => break "its guest does not answer",
            }
        };
        let ready = {
            let mut table = pool.table();
            let at = table.ready.iter().position(|ready| ready.warm.id() == id);
            let ready = at.map(|at| table.ready.remove(at));
            table.leaving += usize::from(ready.is_some());
            ready
        };
        if let Some(ready) = ready {
            tracing::warn!(sandbox = %id, why, "leaves the pool");
            // This task is what `ready` would abort: the release has one of its own.
            pool.let_go(&sessions, ready, why);
        }
    }))
}

impl Table {
    fn count(&self, shape: &Shape) -> (usize, usize) {
        let ready = self.ready.iter().filter(|ready| ready.shape == *shape).count();
        let making = self.making.values().filter(|making| making.shape == *shape && !making.cancel.is_cancelled());
        (ready, making.count())
    }

    fn target(&self, shape: &Shape) -> usize {
        let alike = self.wanted.iter().filter(|wanted| wanted.shape() == Some(*shape));
        alike.map(|wanted| wanted.set.target).max().unwrap_or(0)
    }
}

impl Wanted {
    fn shape(&self) -> Option<Shape> {
        self.found.as_ref().ok().map(|(shape, _)| *shape)
    }
}

impl Claimed {
    /// Which it is.
    pub fn id(&self) -> Option<SandboxId> {
        self.one.as_ref().map(|(_, _, warm, _)| warm.id())
    }

    /// Makes its place a Session's. False where others wait for room, or its budget is used up: then it is not to be had.
    pub fn admit(&mut self) -> bool {
        let capacity = self.sessions.capacity();
        self.one.as_mut().is_some_and(|(_, _, _, place)| capacity.convert(place))
    }

    /// With this place, which a Session has already, in the stead of the pool's.
    pub fn with(mut self, place: Place) -> Self {
        if let Some((_, _, _, own)) = &mut self.one {
            *own = place;
        }
        self
    }

    /// For good: whoever takes it gives it back to the host, not to the pool.
    pub fn take(mut self) -> Option<(Warm, Place)> {
        self.one.take().map(|(_, _, warm, place)| (warm, place))
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        let Some((shape, since, warm, mut place)) = self.one.take() else { return };
        if tokio::runtime::Handle::try_current().is_ok() {
            place.make_spare();
            self.pool.enter(&self.sessions, shape, since, warm, place);
        }
    }
}
