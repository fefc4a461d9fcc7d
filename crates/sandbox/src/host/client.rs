//! pepod's end of the wall: an async, cloneable handle.
//!
//! One task owns the socket's reading side, one its writing side; a request is a row in a table of waiting ones until its
//! answer comes, its deadline passes, or the other side is gone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};

use super::evidence::Evidence;
use super::wire::{self, Answer, Asked, Reply, Request};
use super::{Error, Found, Leftover, Link, Refusal, Usage};
use crate::builder::BuildPlan;
use crate::guest::{Connector, Guest};
use crate::id::{SLOTS, SandboxId, Slot, VolumeId};
use crate::jail::Access;
use crate::net::{Opened, Policy, Traffic};
use crate::plan::Plan;
use crate::share::{SharePlan, VisitPlan};
use crate::volume::{VolumePlan, VolumeUsage};

/// Requests that may wait for answers at once; each is at most one thread on the other side.
const WAITING: usize = 512;

/// For answers that need no waiting on the other side. Ten times what a loaded machine of two cores was seen to need.
const QUICK: Duration = Duration::from_secs(10);
/// For taking or giving back resources: the other side has deadlines of its own well below it.
const SLOW: Duration = Duration::from_secs(120);

/// For throwing away what a builder unpacked on disk: 40,000 files took 60 s on a disk that others kept busy.
const REMOVAL: Duration = Duration::from_secs(600);

/// A request on its way, with the descriptors beside it.
type Sent = (Vec<u8>, Vec<OwnedFd>);

type Replied = Result<(Reply, Vec<OwnedFd>), Refusal>;

/// pepod's handle on the privileged side.
#[derive(Clone)]
pub struct Host(Arc<Inner>);

struct Inner {
    table: Mutex<Table>,
    out: mpsc::Sender<Sent>,
    lost: watch::Receiver<bool>,
    slots: Mutex<Slots>,
    leaving: AtomicBool,
    #[cfg(feature = "fake")]
    fakes: Mutex<std::collections::HashSet<SandboxId>>,
}

#[derive(Default)]
struct Table {
    next: u64,
    waiting: HashMap<u64, oneshot::Sender<Replied>>,
    lost: bool,
}

/// Which slots are taken, and by whom.
#[derive(Default)]
struct Slots {
    taken: BTreeMap<u16, Taken>,
    next: u16,
}

/// How this process knows that a slot is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    /// It gave the slot out, or adopted its Sandbox.
    Ours,
    /// It saw something of an earlier life there.
    Found,
}

impl Slots {
    /// Takes note of a look at the host: what is there, and what no longer is.
    fn found(&mut self, found: &[Found]) {
        let there: BTreeSet<u16> = found.iter().map(|one| one.id.slot().number()).collect();
        self.taken.retain(|slot, taken| *taken == Taken::Ours || there.contains(slot));
        for slot in there {
            self.taken.entry(slot).or_insert(Taken::Found);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    /// Takes pepod's end of the socketpair. Must be called in a runtime; [`Host::found`] comes next, so that no slot of
    /// an earlier life is given out again.
    ///
    /// # Errors
    /// The descriptor cannot be used.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let socket = Arc::new(crate::sys::watch(socket, Interest::READABLE | Interest::WRITABLE)?);
        let (out, queue) = mpsc::channel(WAITING);
        let (gone, lost) = watch::channel(false);
        let host = Host(Arc::new(Inner {
            table: Mutex::default(),
            out,
            lost,
            slots: Mutex::default(),
            leaving: AtomicBool::new(false),
            #[cfg(feature = "fake")]
            fakes: Mutex::default(),
        }));
        tokio::spawn(read(Arc::clone(&socket), Arc::downgrade(&host.0), gone));
        tokio::spawn(write(socket, queue));
        Ok(host)
    }

    /// A new id on a free slot. The slot is free again when [`Host::release`] has succeeded.
    ///
    /// # Errors
    /// [`Error::NoSlot`].
    pub fn new_id(&self) -> Result<SandboxId, Error> {
        let mut slots = lock(&self.0.slots);
        // The next one in turn, not the lowest: uids come back as late as possible.
        let number =
            (0..SLOTS).map(|step| (slots.next + step) % SLOTS).find(|number| !slots.taken.contains_key(number));
        let slot = number.and_then(Slot::new).ok_or(Error::NoSlot(usize::from(SLOTS)))?;
        slots.taken.insert(slot.number(), Taken::Ours);
        slots.next = (slot.number() + 1) % SLOTS;
        Ok(SandboxId::new(slot))
    }

    /// How many slots are taken, by what this process knows.
    pub fn slots_taken(&self) -> usize {
        lock(&self.0.slots).taken.len()
    }

    /// Takes what a Sandbox needs before it runs: its directory, cgroup and scratch disk. Whatever comes back, the id must
    /// be released.
    ///
    /// # Errors
    /// [`Refusal::Invalid`], [`Refusal::SlotTaken`], [`Refusal::UidInUse`], [`Refusal::NoSpace`], [`Refusal::Missing`],
    /// [`Refusal::Step`].
    pub async fn prepare(&self, plan: &Plan) -> Result<(), Error> {
        self.note(plan);
        match self.ask("prepare", Request::Prepare { plan: Box::new(plan.clone()) }, SLOW).await? {
            (Reply::Done, _) => Ok(()),
            _ => Err(Error::Confused { what: "prepare" }),
        }
    }

    /// Starts a prepared one's keeper, VMM and vsock device; answered when they run.
    ///
    /// # Errors
    /// As [`Host::prepare`].
    pub async fn start(&self, id: SandboxId) -> Result<Keeper, Error> {
        match self.ask("start", Request::Start { id }, SLOW).await? {
            (Reply::Done, fds) => Keeper::new("start", fds),
            _ => Err(Error::Confused { what: "start" }),
        }
    }

    /// A stream connected to the Sandbox's vsock device, on which `CONNECT <port>` comes next.
    ///
    /// # Errors
    /// [`Refusal::NotThere`] when it does not run (any more).
    pub async fn connect(&self, id: SandboxId) -> Result<OwnedFd, Error> {
        let confused = Error::Confused { what: "connect" };
        match self.ask("connect", Request::Connect { id }, QUICK).await? {
            (Reply::Done, fds) => fds.into_iter().next().ok_or(confused),
            _ => Err(confused),
        }
    }

    /// Every Sandbox of this instance that has anything on the host. Their slots count as taken from here on.
    ///
    /// # Errors
    /// The host's directories cannot be read.
    pub async fn found(&self) -> Result<Vec<Found>, Error> {
        match self.ask("found", Request::Found, SLOW).await? {
            (Reply::Found { found }, _) => {
                lock(&self.0.slots).found(&found);
                Ok(found)
            }
            _ => Err(Error::Confused { what: "found" }),
        }
    }

    /// Takes over a running one that an earlier life started: its Plan, its keeper, checked by start time and cgroup, and the
    /// servers of its trees.
    ///
    /// # Errors
    /// [`Refusal::NotThere`]: it does not run.
    pub async fn adopt(&self, id: SandboxId) -> Result<(Plan, Keeper, Vec<Keeper>), Error> {
        match self.ask("adopt", Request::Adopt { id }, QUICK).await? {
            (Reply::Plan { plan }, fds) => {
                self.note(&plan);
                lock(&self.0.slots).taken.insert(id.slot().number(), Taken::Ours);
                let mut processes = fds.into_iter().map(|fd| Keeper::new("adopt", vec![fd]));
                let keeper = processes.next().ok_or(Error::Confused { what: "adopt" })??;
                Ok((*plan, keeper, processes.collect::<Result<_, _>>()?))
            }
            _ => Err(Error::Confused { what: "adopt" }),
        }
    }

    /// Serves a tree into a Sandbox's guest, on the stream that is handed in at the other end of `hatch`
    /// ([`crate::share::Handing`]); answered when it is served. The server's end is the end of the tree.
    ///
    /// # Errors
    /// [`Refusal::Volume`], [`Refusal::NotThere`], [`Refusal::Step`]; the Sandbox must be released then.
    pub async fn share(&self, id: SandboxId, plan: SharePlan, hatch: OwnedFd) -> Result<Keeper, Error> {
        match self.ask_with("share", Request::Share { id, plan: Box::new(plan) }, vec![hatch], SLOW).await? {
            (Reply::Done, fds) => Keeper::new("share", fds),
            _ => Err(Error::Confused { what: "share" }),
        }
    }

    /// Takes a directory of this host as a tree, with the rights of whoever is at the other end of that connection, until
    /// [`Host::volume_remove`], which removes nothing of it, or until either of us ends.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] says why it is not lent.
    pub async fn lend(
        &self,
        volume: VolumeId,
        path: PathBuf,
        access: Access,
        connection: OwnedFd,
    ) -> Result<(), Error> {
        match self.ask_with("lend", Request::Lend { volume, path, access }, vec![connection], SLOW).await? {
            (Reply::Done, _) => Ok(()),
            _ => Err(Error::Confused { what: "lend" }),
        }
    }

    /// A tree without a guest: its files are asked for as a guest's are, each time a process of its own that is jailed in the
    /// tree and ends with its answer.
    pub fn visitor(&self, plan: VisitPlan) -> Guest {
        let host = self.clone();
        Guest::new(Connector::alone(move || {
            let host = host.clone();
            async move { host.visit(plan).await.map_err(io::Error::other) }
        }))
    }

    async fn visit(&self, plan: VisitPlan) -> Result<OwnedFd, Error> {
        let confused = Error::Confused { what: "visit" };
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(|_| confused.clone())?;
        match self.ask_with("visit", Request::Visit { plan }, vec![theirs.into()], SLOW).await? {
            (Reply::Done, _) => Ok(ours.into()),
            _ => Err(confused),
        }
    }

    /// Makes a tree.
    ///
    /// # Errors
    /// [`Refusal::Volume`], [`Refusal::Invalid`], [`Refusal::Missing`], [`Refusal::Step`]; nothing is left then.
    pub async fn volume_create(&self, plan: VolumePlan) -> Result<(), Error> {
        match self.ask("volume_create", Request::VolumeCreate { plan: Box::new(plan) }, SLOW).await? {
            (Reply::Done, _) => Ok(()),
            _ => Err(Error::Confused { what: "volume_create" }),
        }
    }

    /// Raises a tree's cap to so many MiB.
    ///
    /// # Errors
    /// [`Refusal::Volume`] (also while it is used), [`Refusal::Invalid`], [`Refusal::Step`].
    pub async fn volume_grow(&self, volume: VolumeId, mib: u64) -> Result<(), Error> {
        match self.ask("volume_grow", Request::VolumeGrow { volume, mib }, SLOW).await? {
            (Reply::Done, _) => Ok(()),
            _ => Err(Error::Confused { what: "volume_grow" }),
        }
    }

    /// What a tree uses.
    ///
    /// # Errors
    /// [`Refusal::Volume`], [`Refusal::Step`].
    pub async fn volume_usage(&self, volume: VolumeId) -> Result<VolumeUsage, Error> {
        match self.ask("volume_usage", Request::VolumeUsage { volume }, SLOW).await? {
            (Reply::Volume { usage }, _) => Ok(usage),
            _ => Err(Error::Confused { what: "volume_usage" }),
        }
    }

    /// Removes a tree with all that is in it; how many bytes of the host's disk that gave back. One that is not there is
    /// removed.
    ///
    /// # Errors
    /// [`Refusal::Volume`] while a Sandbox uses it, [`Refusal::Step`].
    pub async fn volume_remove(&self, volume: VolumeId) -> Result<u64, Error> {
        match self.ask("volume_remove", Request::VolumeRemove { volume }, REMOVAL).await? {
            (Reply::Freed { bytes }, _) => Ok(bytes),
            _ => Err(Error::Confused { what: "volume_remove" }),
        }
    }

    /// Which trees there are.
    ///
    /// # Errors
    /// Their directory cannot be read.
    pub async fn volumes(&self) -> Result<Vec<VolumeId>, Error> {
        match self.ask("volumes", Request::Volumes, QUICK).await? {
            (Reply::Volumes { volumes }, _) => Ok(volumes),
            _ => Err(Error::Confused { what: "volumes" }),
        }
    }

    /// The guest of a Sandbox, reached through [`Host::connect`]. Does not connect.
    pub fn guest(&self, id: SandboxId) -> Guest {
        let host = self.clone();
        let dial = move || {
            let host = host.clone();
            async move { host.connect(id).await.map_err(io::Error::other) }
        };
        #[cfg(feature = "fake")]
        if lock(&self.0.fakes).contains(&id) {
            return Guest::new(Connector::direct(dial));
        }
        Guest::new(Connector::vsock(dial))
    }

    /// Remembers which guests are host processes: no port is asked for on their streams.
    fn note(&self, plan: &Plan) {
        #[cfg(feature = "fake")]
        if plan.vmm == crate::plan::Vmm::Fake {
            lock(&self.0.fakes).insert(plan.id);
        }
        #[cfg(not(feature = "fake"))]
        let _ = plan;
    }

    /// Whether a step of the guest's may go on: tests make it fail.
    #[cfg(feature = "fake")]
    pub(crate) async fn may(&self, step: crate::boot::Step) -> Result<(), Error> {
        self.ask("may", Request::May { step }, QUICK).await.map(drop)
    }

    /// What a Sandbox left to tell how it ended, and its console so far. Valid until it is released.
    ///
    /// # Errors
    /// [`Refusal::NotThere`].
    pub async fn evidence(&self, id: SandboxId) -> Result<Evidence, Error> {
        match self.ask("evidence", Request::Evidence { id }, QUICK).await? {
            (Reply::Evidence { exit, console, memory }, fds) => {
                let mut fds = fds.into_iter();
                let exit = exit.then(|| fds.next()).flatten();
                let console = console.then(|| fds.next()).flatten();
                let memory = memory.then(|| fds.next()).flatten();
                Ok(Evidence::new(exit, console, memory))
            }
            _ => Err(Error::Confused { what: "evidence" }),
        }
    }

    /// What a Sandbox uses now.
    ///
    /// # Errors
    /// [`Refusal::NotThere`].
    pub async fn usage(&self, id: SandboxId) -> Result<Usage, Error> {
        match self.ask("usage", Request::Usage { id }, QUICK).await? {
            (Reply::Usage { usage }, _) => Ok(usage),
            _ => Err(Error::Confused { what: "usage" }),
        }
    }

    /// Puts a network policy in force at one moment: what is no longer allowed stops there, connections and all.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] names the entry and why; [`Refusal::NotThere`]: it has no network.
    pub async fn network(&self, id: SandboxId, policy: &Policy) -> Result<Link, Error> {
        match self.ask("network", Request::Network { id, policy: Box::new(policy.clone()) }, QUICK).await? {
            (Reply::Link { link }, _) => Ok(link),
            _ => Err(Error::Confused { what: "network" }),
        }
    }

    /// Opens addresses that the resolver found for rules of the policy in force, before it answers. At most
    /// [`OPENED`](crate::net::OPENED) at once.
    ///
    /// # Errors
    /// [`Refusal::Invalid`]: the rule is not in force any more, or the address is on the floor.
    pub async fn open(&self, id: SandboxId, opened: Vec<Opened>) -> Result<(), Error> {
        match self.ask("open", Request::Open { id, opened }, QUICK).await? {
            (Reply::Done, _) => Ok(()),
            _ => Err(Error::Confused { what: "open" }),
        }
    }

    /// The sockets on which a Sandbox's guest asks for names: UDP's, and TCP's, which listens. Both are non-blocking.
    ///
    /// # Errors
    /// [`Refusal::NotThere`]: it has no network.
    pub async fn resolver(&self, id: SandboxId) -> Result<[OwnedFd; 2], Error> {
        let confused = Error::Confused { what: "resolver" };
        match self.ask("resolver", Request::Resolver { id }, QUICK).await? {
            (Reply::Done, fds) => fds.try_into().map_err(|_| confused),
            _ => Err(confused),
        }
    }

    /// A stream to a Sandbox's relay, on which it asks what it may let through: see [`crate::net::relay::attend`]. It is
    /// started if it does not run.
    ///
    /// # Errors
    /// [`Refusal::NotThere`]: it does not run, or has no network; [`Refusal::Step`].
    pub async fn relay(&self, id: SandboxId) -> Result<OwnedFd, Error> {
        let confused = Error::Confused { what: "relay" };
        match self.ask("relay", Request::Relay { id }, SLOW).await? {
            (Reply::Done, fds) => fds.into_iter().next().ok_or(confused),
            _ => Err(confused),
        }
    }

    /// What a Sandbox's network carried and refused since it was made.
    ///
    /// # Errors
    /// [`Refusal::NotThere`]: it has no network.
    pub async fn traffic(&self, id: SandboxId) -> Result<Traffic, Error> {
        match self.ask("traffic", Request::Traffic { id }, QUICK).await? {
            (Reply::Traffic { traffic }, _) => Ok(traffic),
            _ => Err(Error::Confused { what: "traffic" }),
        }
    }

    /// Kills what runs of it and gives everything back, in reverse order. Legal at any time, for any id, any number of
    /// times: what is not there is done.
    ///
    /// # Errors
    /// [`Refusal::Owed`] when something is left; the slot stays taken, and a later repeat may succeed.
    pub async fn release(&self, id: SandboxId) -> Result<(), Error> {
        match self.ask("release", Request::Release { id }, SLOW).await? {
            (Reply::Done, _) => {
                lock(&self.0.slots).taken.remove(&id.slot().number());
                Ok(())
            }
            _ => Err(Error::Confused { what: "release" }),
        }
    }

    /// Starts the builder and returns the pipe that it writes its events to. Its end is end of file there;
    /// [`Host::build_end`] comes next, or [`Host::build_kill`].
    ///
    /// # Errors
    /// [`Refusal::Invalid`], [`Refusal::Step`]; nothing is left then.
    pub async fn build(&self, plan: &BuildPlan) -> Result<OwnedFd, Error> {
        let confused = Error::Confused { what: "build" };
        match self.ask("build", Request::Build { plan: Box::new(plan.clone()) }, SLOW).await? {
            (Reply::Done, fds) => fds.into_iter().next().ok_or(confused),
            _ => Err(confused),
        }
    }

    /// Waits for the builder's end. If it ended well, its files are in the plan's output directory.
    ///
    /// # Errors
    /// [`Refusal::Step`] when it failed or its files cannot be taken over; nothing is left then.
    pub async fn build_end(&self) -> Result<(), Error> {
        match self.ask("build_end", Request::BuildEnd, REMOVAL).await? {
            (Reply::Done, _) => Ok(()),
            _ => Err(Error::Confused { what: "build_end" }),
        }
    }

    /// Kills the builder without waiting: what a `Drop` can do.
    pub fn build_kill(&self) {
        let seq = lock(&self.0.table).number();
        if let Ok(body) = serde_json::to_vec(&Asked { seq, request: Request::BuildKill }) {
            let _ = self.0.out.try_send((body, Vec::new()));
        }
    }

    /// Releases without being waited for, again and again until it is done: what a `Drop` can do. The slot is free then,
    /// as after [`Host::release`]. Outside a runtime nothing can be done: the next start finds it.
    pub(crate) fn release_later(&self, id: SandboxId) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let host = self.clone();
        runtime.spawn(async move {
            let mut pause = Duration::from_millis(500);
            while !host.is_leaving() {
                match host.release(id).await {
                    Ok(()) | Err(Error::Lost) => return,
                    Err(error) => tracing::warn!(sandbox = %id, %error, "not everything was given back; trying again"),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(60));
            }
        });
    }

    /// Gives back everything that carries this instance's tag and is not one of `keep`.
    ///
    /// # Errors
    /// The host's directories cannot be read; what could not be removed is in the answer.
    pub async fn sweep(&self, keep: &[SandboxId]) -> Result<Vec<Leftover>, Error> {
        let left = match self.ask("sweep", Request::Sweep { keep: keep.to_vec() }, SLOW).await? {
            (Reply::Leftovers { left }, _) => left,
            _ => return Err(Error::Confused { what: "sweep" }),
        };
        // What is gone no longer has its slot.
        self.found().await?;
        Ok(left)
    }

    /// From now on a dropped Sandbox is left running: this life of pepod ends, and the next one adopts them. To be called
    /// before the runtime goes down, which drops whatever its tasks hold.
    pub fn leave_all(&self) {
        self.0.leaving.store(true, Ordering::Release);
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.0.leaving.load(Ordering::Acquire)
    }

    /// Returns when the privileged side is gone. pepod then ends: keepers and Sandboxes stay for the next one.
    pub async fn lost(&self) {
        let mut lost = self.0.lost.clone();
        // An error means that the reading task is gone: the same thing.
        let _ = lost.wait_for(|lost| *lost).await;
    }

    /// Whether it is gone: whatever fails from then on says nothing about a Sandbox.
    pub fn is_lost(&self) -> bool {
        lock(&self.0.table).lost
    }

    async fn ask(
        &self,
        what: &'static str,
        request: Request,
        within: Duration,
    ) -> Result<(Reply, Vec<OwnedFd>), Error> {
        self.ask_with(what, request, Vec::new(), within).await
    }

    async fn ask_with(
        &self,
        what: &'static str,
        request: Request,
        fds: Vec<OwnedFd>,
        within: Duration,
    ) -> Result<(Reply, Vec<OwnedFd>), Error> {
        let (answer, waiting) = oneshot::channel();
        let seq = {
            let mut table = lock(&self.0.table);
            if table.lost {
                return Err(Error::Lost);
            }
            if table.waiting.len() >= WAITING {
                return Err(Error::Busy);
            }
            let seq = table.number();
            table.waiting.insert(seq, answer);
            seq
        };
        // Removes the row however this ends, so that a caller that goes away leaves nothing behind.
        let _row = Row { inner: &self.0, seq };
        let body = serde_json::to_vec(&Asked { seq, request })
            .map_err(|error| Refusal::Invalid { reason: format!("{what}: {error}") })?;
        if body.len() > wire::MAX_BYTES {
            return Err(Refusal::Invalid { reason: format!("{what}: request of {} bytes", body.len()) }.into());
        }
        let answered = async {
            self.0.out.send((body, fds)).await.map_err(|_| Error::Lost)?;
            Ok(waiting.await.map_err(|_| Error::Lost)??)
        };
        match tokio::time::timeout(within, answered).await {
            Ok(answered) => answered,
            Err(_) => Err(Error::Silent { what, seconds: within.as_secs() }),
        }
    }
}

impl crate::net::dns::Source for Host {
    async fn sockets(&self, kind: crate::net::dns::Kind, server: usize, most: usize) -> io::Result<Vec<OwnedFd>> {
        match self.ask("upstream", Request::Upstream { kind, server, most }, QUICK).await.map_err(io::Error::other)? {
            (Reply::Done, sockets) => Ok(sockets),
            _ => Err(io::Error::other(Error::Confused { what: "upstream" })),
        }
    }
}

/// Where one Sandbox's openings go.
#[derive(Clone, Debug)]
pub struct Doors {
    host: Host,
    id: SandboxId,
}

impl Doors {
    /// That Sandbox's.
    pub fn new(host: Host, id: SandboxId) -> Self {
        Doors { host, id }
    }
}

impl crate::net::dns::Doors for Doors {
    async fn open(&self, openings: Vec<crate::net::Opened>) -> Result<(), crate::net::dns::Shut> {
        use crate::net::dns::Shut;
        for part in openings.chunks(crate::net::OPENED) {
            self.host.open(self.id, part.to_vec()).await.map_err(|error| match error {
                // Its rule is no longer in force, or the floor is another now.
                Error::Refused(Refusal::Invalid { .. }) => Shut::Stale,
                error => {
                    tracing::warn!(sandbox = %self.id, %error, "an address could not be opened");
                    Shut::Failed
                }
            })?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Host")
    }
}

impl Table {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

struct Row<'a> {
    inner: &'a Inner,
    seq: u64,
}

impl Drop for Row<'_> {
    fn drop(&mut self) {
        lock(&self.inner.table).waiting.remove(&self.seq);
    }
}

async fn read(socket: Arc<AsyncFd<OwnedFd>>, inner: std::sync::Weak<Inner>, gone: watch::Sender<bool>) {
    let mut buffer = Vec::new();
    loop {
        let received = match socket.readable().await {
            Ok(mut ready) => ready.try_io(|fd| wire::receive::<Answer>(fd.as_fd(), &mut buffer)),
            Err(error) => Ok(Err(error)),
        };
        let Some(inner) = inner.upgrade() else { return };
        match received {
            Err(_not_ready) => {}
            Ok(Ok(Some((answer, fds)))) => {
                let waiting = lock(&inner.table).waiting.remove(&answer.seq);
                // Nobody waits any more: the descriptors close here.
                if let Some(waiting) = waiting {
                    let _ = waiting.send(answer.result.map(|reply| (reply, fds)));
                }
            }
            Ok(Ok(None)) => break lose(&inner, &gone, None),
            Ok(Err(error)) => break lose(&inner, &gone, Some(error)),
        }
    }
}

fn lose(inner: &Inner, gone: &watch::Sender<bool>, error: Option<io::Error>) {
    if let Some(error) = error {
        tracing::error!(%error, "the privileged side cannot be understood");
    }
    let mut table = lock(&inner.table);
    table.lost = true;
    table.waiting.clear();
    drop(table);
    gone.send_replace(true);
}

async fn write(socket: Arc<AsyncFd<OwnedFd>>, mut queue: mpsc::Receiver<Sent>) {
    while let Some((body, fds)) = queue.recv().await {
        let sent = loop {
            match socket.writable().await {
                Ok(mut ready) => {
                    if let Ok(sent) = ready.try_io(|fd| wire::send_bytes(fd.as_fd(), &body, &wire::borrow(&fds))) {
                        break sent;
                    }
                }
                Err(error) => break Err(error),
            }
        };
        // The reading side sees the end too and tells everybody.
        if sent.is_err() {
            return;
        }
    }
}

/// A Sandbox's keeper, held by pidfd: its end is the Sandbox's end.
#[derive(Clone, Debug)]
pub struct Keeper(Arc<AsyncFd<OwnedFd>>);

impl Keeper {
    fn new(what: &'static str, fds: Vec<OwnedFd>) -> Result<Self, Error> {
        let fd = fds.into_iter().next().ok_or(Error::Confused { what })?;
        Keeper::watch(fd).map_err(|_| Error::Confused { what })
    }

    /// Watches the process of that pidfd.
    pub(crate) fn watch(pidfd: OwnedFd) -> io::Result<Self> {
        Ok(Keeper(Arc::new(crate::sys::watch(pidfd, Interest::READABLE)?)))
    }

    /// Returns when the process has ended; at once, every time, after that.
    pub async fn ended(&self) {
        loop {
            match self.0.readable().await {
                Ok(mut ready) => {
                    if self.has_ended() {
                        return;
                    }
                    ready.clear_ready();
                }
                // The runtime is going down, and this task with it.
                Err(_) => std::future::pending::<()>().await,
            }
        }
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        crate::proc::has_ended(self.0.get_ref().as_fd())
    }
}
