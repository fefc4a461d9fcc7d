//! The privileged side's loop: takes requests off the socketpair, answers quick ones inline and gives each slow one a
//! thread. Ends at once, with everything it started left running, when pepod is gone.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

use super::wire::{self, Answer, Asked, Reply, Request};
use super::work::Work;
use super::{Found, FoundState, Refusal};
use crate::builder::{self, BuildPlan, Builder};
use crate::cgroup::Hierarchies;
use crate::held::{Holdings, Place};
use crate::id::{SandboxId, VolumeId, file, process};
use crate::registry::Instance;
use crate::sweep::{self, Act};
use crate::{net, proc, rights, sys};

/// Slow requests at once; pepod has its own, lower bounds for boots.
const THREADS: usize = 256;

/// What the privileged side is told once, at its start.
#[derive(Debug)]
pub struct HostConfig {
    /// Whose tag, uids and directories these are; held until the end. The directory of the jails must be root's alone, and
    /// the one above it must not let pepod replace it: root's, and sticky where others may write.
    pub instance: Instance,
    /// pepod: signals that end us go to it, and its exit code becomes ours.
    pub daemon: Pid,
    /// pepod's uid: files in Plans must be its own.
    pub daemon_uid: u32,
    /// `vhost-device-vsock`; `None` is where the distribution or `make` puts it.
    pub vsock_device: Option<PathBuf>,
    /// `qemu-system-x86_64`; `None` is where the distribution puts it.
    pub qemu: Option<PathBuf>,
    /// The directory of `firecracker` and `jailer`; `None` is where there are none.
    pub firecracker: Option<PathBuf>,
    /// `mkfs.ext4`.
    pub mkfs: PathBuf,
    /// Directories of the operator's in which trees may be, by name.
    pub directories: std::collections::BTreeMap<String, PathBuf>,
    /// What Sandboxes may reach at most; `None`: they have no network.
    pub network: Option<net::Settings>,
}

/// Serves pepod until it is gone, and returns its exit code. Called before this process has a second thread.
///
/// # Errors
/// The rights or the host's hierarchies are not what is needed; nothing has been served then.
pub fn run(socket: OwnedFd, config: HostConfig) -> io::Result<u8> {
    if let Ok(name) = std::ffi::CString::new(process::HOST) {
        rustix::thread::set_name(&name)?;
    }
    let daemon = rustix::process::pidfd_open(config.daemon, PidfdFlags::empty())?;
    let signals = sys::signals(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGCHLD])?;
    let cgroups = rights_and_cgroups()?;
    let instance = &config.instance;
    let place = Place::open(instance.tag(), instance.block(), instance.jails(), cgroups)?;
    let work = Work::new(place, &config)?;
    let site = builder::Place {
        jails: instance.jails().to_owned(),
        state: instance.state().to_owned(),
        tag: instance.tag(),
        block: instance.block(),
        owner: config.daemon_uid,
        launcher: PathBuf::from("/proc/self/exe"),
    };
    // What a builder left when an earlier life ended in the middle of a build.
    Builder::sweep(&site).map_err(io::Error::other)?;
    work.sweep_volumes()?;
    let owner = instance.state().to_owned();
    let work = Arc::new(work);
    let serve = Arc::new(Serve { socket, work, lanes: Mutex::default(), owner, site, builder: Mutex::default() });
    let served = serve.until_gone(&signals, &daemon);
    // A build without its pepod has nobody to name what it makes.
    let _ = serve.kill_builder();
    // Whatever ended us ends pepod too: it may not have noticed yet.
    let _ = rustix::net::shutdown(&serve.socket, rustix::net::Shutdown::Both);
    let code = exit_code(&daemon);
    // The lease goes if nothing of ours is left. Threads still at work die with this process; what they were making has a
    // directory, and the next start finds it.
    let _ = config.instance.end();
    served.map(|()| code)
}

fn rights_and_cgroups() -> io::Result<Hierarchies> {
    #[cfg(feature = "fake")]
    if super::fake::is_bare() {
        super::fake::without_rights()?;
        return Ok(Hierarchies::none());
    }
    rights::keep_only(rights::HOST)?;
    let cgroups = Hierarchies::detect().map_err(io::Error::other)?;
    cgroups.ready().map_err(io::Error::other)?;
    Ok(cgroups)
}

/// What one Sandbox's requests share.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// Held by the one slow request at work on it.
    pub turn: Mutex<super::work::Made>,
    /// Set by a release that waits: what is at work gives up at its next step.
    pub cancelled: std::sync::atomic::AtomicBool,
}

/// Whose lane a request goes by, if it does.
fn in_turn(request: &Request) -> Option<SandboxId> {
    match request {
        Request::Prepare { plan } => Some(plan.id),
        Request::Start { id } | Request::Share { id, .. } | Request::Relay { id } | Request::Release { id } => {
            Some(*id)
        }
        _ => None,
    }
}

struct Serve {
    socket: OwnedFd,
    work: Arc<Work>,
    lanes: Mutex<HashMap<SandboxId, Arc<Lane>>>,
    owner: PathBuf,
    site: builder::Place,
    builder: Mutex<Option<Builder>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Serve {
    fn until_gone(self: &Arc<Self>, signals: &OwnedFd, daemon: &OwnedFd) -> io::Result<()> {
        let mut buffer = Vec::new();
        let mut tables = self.work.networks.watch();
        loop {
            let mut fds = vec![PollFd::new(&self.socket, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
            fds.extend(tables.as_ref().map(|tables| PollFd::new(tables, PollFlags::IN)));
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
            let [asked, signalled, changed] = [ready(0), ready(1), ready(2)];
            drop(fds);
            if changed && tables.as_mut().is_some_and(net::wall::Watch::drain) {
                self.work.networks.keep_wall();
            }
            if signalled {
                self.signalled(signals, daemon)?;
            }
            if !asked {
                continue;
            }
            match wire::receive::<Asked>(self.socket.as_fd(), &mut buffer) {
                Ok(None) => return Ok(()),
                Ok(Some((asked, fds))) => self.take(asked, fds),
                // pepod sends nothing else; one that does is not pepod any more.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(error),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Signals that would end us are pepod's to act on; a child that ended is reaped.
    fn signalled(&self, signals: &OwnedFd, daemon: &OwnedFd) -> io::Result<()> {
        for signal in sys::read_signals(signals)? {
            if signal.number == libc::SIGCHLD {
                for lane in lock(&self.lanes).values() {
                    // One at work reaps for itself.
                    if let Ok(made) = lane.turn.try_lock() {
                        made.reap();
                    }
                }
            } else if !signal.from_terminal {
                // A terminal's Ctrl-C reaches the whole group, pepod with it: it would count it twice.
                if let Some(number) = rustix::process::Signal::from_named_raw(signal.number) {
                    let _ = rustix::process::pidfd_send_signal(daemon, number);
                }
            }
        }
        Ok(())
    }

    fn take(self: &Arc<Self>, asked: Asked, fds: Vec<OwnedFd>) {
        let Asked { seq, request } = asked;
        match &request {
            // Quick, and waited for by streams: answered here.
            Request::Connect { id } => match self.work.connect(*id) {
                Err(Refusal::Step { .. }) => self.slowly(seq, request, fds),
                done => self.answer(seq, done.map(|stream| (Reply::Done, vec![stream]))),
            },
            Request::Usage { id } => {
                self.answer(seq, self.work.usage(*id).map(|usage| (Reply::Usage { usage }, Vec::new())))
            }
            Request::Evidence { id } => self.answer(seq, Ok(self.work.evidence(*id))),
            Request::Upstream { kind, server, most } => {
                let sockets = self.work.networks.upstream(*kind, *server, *most);
                self.answer(seq, sockets.map(|sockets| (Reply::Done, sockets)));
            }
            Request::Open { id, opened } => match self.work.networks.try_open(*id, opened) {
                Some(done) => self.answer(seq, done.map(|()| (Reply::Done, Vec::new()))),
                None => self.slowly(seq, request, fds),
            },
            _ => self.slowly(seq, request, fds),
        }
    }

    /// In a thread of its own.
    fn slowly(self: &Arc<Self>, seq: u64, request: Request, fds: Vec<OwnedFd>) {
        let serve = Arc::clone(self);
        if Arc::strong_count(self) > THREADS {
            return self.answer(seq, Err(Refusal::Invalid { reason: "too many requests at once".to_owned() }));
        }
        // Found here, in the order of the requests, and not where a thread begins: a release ends what was asked before it,
        // also where that has not begun.
        let lane = in_turn(&request).map(|id| self.lane(id)).unwrap_or_default();
        let thread = std::thread::Builder::new().name("request".to_owned()).spawn(move || {
            // A fault of ours ends one request, and is answered.
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| serve.work_on(request, &lane, fds)));
            let panicked = |_| Err(Refusal::Step { step: "work".to_owned(), reason: "a panic".to_owned() });
            let done = done.unwrap_or_else(panicked);
            serve.answer(seq, done);
        });
        if let Err(error) = thread {
            self.answer(seq, Err(Refusal::Step { step: "start a thread".to_owned(), reason: error.to_string() }));
        }
    }

    fn lane(&self, id: SandboxId) -> Arc<Lane> {
        Arc::clone(lock(&self.lanes).entry(id).or_default())
    }

    fn work_on(
        self: &Arc<Self>,
        request: Request,
        lane: &Lane,
        fds: Vec<OwnedFd>,
    ) -> Result<(Reply, Vec<OwnedFd>), Refusal> {
        match request {
            Request::Prepare { plan } => {
                let mut made = lock(&lane.turn);
                self.work.prepare(&plan, lane, &mut made).map(|()| (Reply::Done, Vec::new()))
            }
            Request::Start { id } => {
                let mut made = lock(&lane.turn);
                self.work.start(id, lane, &mut made).map(|keeper| (Reply::Done, vec![keeper]))
            }
            Request::Connect { id } => self.connect_patiently(id).map(|stream| (Reply::Done, vec![stream])),
            Request::Found => Ok((Reply::Found { found: self.found()? }, Vec::new())),
            Request::Adopt { id } => {
                let (plan, processes) = self.work.adopt(id)?;
                Ok((Reply::Plan { plan: Box::new(plan) }, processes))
            }
            Request::Share { id, plan } => {
                let Some(hatch) = fds.into_iter().next() else {
                    return Err(Refusal::Invalid { reason: "a share needs a way for its stream".to_owned() });
                };
                let mut made = lock(&lane.turn);
                self.work.share(id, &plan, hatch, lane, &mut made).map(|server| (Reply::Done, vec![server]))
            }
            Request::Visit { plan } => {
                let Some(stream) = fds.into_iter().next() else {
                    return Err(Refusal::Invalid { reason: "a visit needs a stream".to_owned() });
                };
                self.work.visit(plan, &stream).map(|()| (Reply::Done, Vec::new()))
            }
            Request::Lend { volume, path, access } => {
                let Some(connection) = fds.into_iter().next() else {
                    return Err(Refusal::Invalid { reason: "nobody lends it".to_owned() });
                };
                self.work.lend(volume, &connection, &path, access).map(|()| (Reply::Done, Vec::new()))
            }
            Request::VolumeCreate { plan } => self.work.create_volume(&plan).map(|()| (Reply::Done, Vec::new())),
            Request::VolumeGrow { volume, mib } => {
                self.work.grow_volume(volume, mib).map(|()| (Reply::Done, Vec::new()))
            }
            Request::VolumeUsage { volume } => {
                self.work.volume_usage(volume).map(|usage| (Reply::Volume { usage }, Vec::new()))
            }
            Request::VolumeRemove { volume } => {
                self.work.remove_volume(volume).map(|bytes| (Reply::Freed { bytes }, Vec::new()))
            }
            Request::Volumes => self.work.all_volumes().map(|volumes| (Reply::Volumes { volumes }, Vec::new())),
            Request::Network { id, policy } => {
                let link = self.work.networks.apply(&self.work.place, id, *policy)?;
                Ok((Reply::Link { link }, Vec::new()))
            }
            Request::Open { id, opened } => {
                self.work.networks.open(&self.work.place, id, &opened).map(|()| (Reply::Done, Vec::new()))
            }
            Request::Relay { id } => {
                let mut made = lock(&lane.turn);
                self.work.relay(id, lane, &mut made).map(|stream| (Reply::Done, vec![stream]))
            }
            Request::Upstream { kind, server, most } => {
                self.work.networks.upstream(kind, server, most).map(|sockets| (Reply::Done, sockets))
            }
            Request::Resolver { id } => {
                self.work.networks.resolver(&self.work.place, id).map(|fds| (Reply::Done, fds.into()))
            }
            Request::Traffic { id } => {
                let traffic = self.work.networks.traffic(&self.work.place, id)?;
                Ok((Reply::Traffic { traffic }, Vec::new()))
            }
            Request::Release { id } => self.release(id, lane).map(|()| (Reply::Done, Vec::new())),
            Request::Sweep { keep } => {
                // What this life made, or is making, has a lane since before its directory: it is no leftover, whether pepod
                // knew of it when it asked or not.
                let kept = |id| keep.contains(&id) || lock(&self.lanes).contains_key(&id);
                let left = sweep::sweep(&self.work.place, &kept, &self.owner, Act::Remove)
                    .map_err(|error| Refusal::Step { step: "sweep".to_owned(), reason: error.to_string() })?;
                Ok((Reply::Leftovers { left }, Vec::new()))
            }
            Request::Usage { id } => self.work.usage(id).map(|usage| (Reply::Usage { usage }, Vec::new())),
            Request::Evidence { id } => Ok(self.work.evidence(id)),
            #[cfg(feature = "fake")]
            Request::May { step } => self.work.may(step).map(|()| (Reply::Done, Vec::new())),
            Request::Build { plan } => self.build(*plan).map(|events| (Reply::Done, vec![events])).map_err(unbuilt),
            Request::BuildEnd => self.end_build().map(|()| (Reply::Done, Vec::new())).map_err(unbuilt),
            Request::BuildKill => self.kill_builder().map(|()| (Reply::Done, Vec::new())).map_err(unbuilt),
        }
    }

    fn build(&self, plan: BuildPlan) -> Result<OwnedFd, builder::Error> {
        let mut running = lock(&self.builder);
        if running.is_some() {
            return Err(builder::Error::Busy);
        }
        let mut builder = Builder::start(self.site.clone(), plan)?;
        let events = builder.take_events().ok_or(builder::Error::Busy)?;
        *running = Some(builder);
        Ok(events)
    }

    /// Waits outside the lock: a kill comes through meanwhile.
    fn end_build(&self) -> Result<(), builder::Error> {
        let builder = lock(&self.builder).take();
        let builder = builder.ok_or_else(|| builder::Error::Start("no builder runs".to_owned()))?;
        let status = builder.end()?;
        if status.success() { Ok(()) } else { Err(builder::Error::Start(format!("it ended by {status}"))) }
    }

    fn kill_builder(&self) -> Result<(), builder::Error> {
        // Dropped, it is killed and swept; one that is being waited for is no longer here.
        drop(lock(&self.builder).take());
        Builder::sweep(&self.site)
    }

    /// A device whose queue of callers is full answers a little later.
    fn connect_patiently(&self, id: SandboxId) -> Result<OwnedFd, Refusal> {
        let deadline = Instant::now() + Duration::from_secs(2);
        loop {
            match self.work.connect(id) {
                Err(Refusal::Step { .. }) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                done => return done,
            }
        }
    }

    fn release(self: &Arc<Self>, id: SandboxId, lane: &Lane) -> Result<(), Refusal> {
        lane.cancelled.store(true, std::sync::atomic::Ordering::Release);
        let mut made = lock(&lane.turn);
        made.let_go();
        self.work.networks.let_go(id);
        #[cfg(feature = "fake")]
        {
            self.work
                .may(crate::boot::Step::Release)
                .map_err(|fault| Refusal::Owed { id, left: vec![fault.to_string()] })?;
            if self.work.is_fake(id) {
                self.work.end_fake(id, &mut made);
            }
        }
        let shared = self.work.shared(id);
        let released = Holdings::of(&self.work.place, id).release();
        made.reap();
        if released.is_ok() {
            lock(&self.lanes).remove(&id);
            self.settle(shared);
        }
        released.map_err(|left| Refusal::Owed { id, left })
    }

    /// What was served is settled once its last user has gone: written for good, and its free room given back. Nobody waits
    /// for it; whoever uses the tree next takes his turn after it.
    fn settle(self: &Arc<Self>, volumes: Vec<VolumeId>) {
        for volume in volumes {
            let serve = Arc::clone(self);
            let settling = std::thread::Builder::new().name("settle".to_owned()).spawn(move || {
                // A tree that cannot be settled now is settled by its next user's end, or by the host's kernel in time.
                let _ = serve.work.settle_volume(volume);
            });
            drop(settling);
        }
    }

    fn found(&self) -> Result<Vec<Found>, Refusal> {
        let place = &self.work.place;
        let ids = place
            .all()
            .map_err(|error| Refusal::Step { step: "read the jails".to_owned(), reason: error.to_string() })?;
        let state = |id| match place.keeper(id) {
            Ok(_) => FoundState::Running,
            Err(_) if place.read::<crate::held::KeeperRecord>(id, file::KEEPER).is_ok() => FoundState::Ended,
            Err(_) => FoundState::Partial,
        };
        let found = |id| Found { id, state: state(id), age_seconds: sweep::age_seconds(place, id).unwrap_or(0) };
        Ok(ids.into_iter().map(found).collect())
    }

    fn answer(&self, seq: u64, done: Result<(Reply, Vec<OwnedFd>), Refusal>) {
        let (result, fds) = match done {
            Ok((reply, fds)) => (Ok(reply), fds),
            Err(refusal) => (Err(refusal), Vec::new()),
        };
        let sent = wire::send(self.socket.as_fd(), &Answer { seq, result }, &wire::borrow(&fds));
        // One that is too long is told, or its caller would wait in vain. A pepod that is gone is noticed by the loop.
        if sent.is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput) {
            let result = Err(Refusal::Invalid { reason: "the answer is too long".to_owned() });
            let _ = wire::send(self.socket.as_fd(), &Answer { seq, result }, &[]);
        }
    }
}

fn unbuilt(error: builder::Error) -> Refusal {
    match error {
        builder::Error::Busy | builder::Error::Plan(_) => Refusal::Invalid { reason: error.to_string() },
        error => {
            let reason = std::error::Error::source(&error).map(ToString::to_string);
            Refusal::Step {
                step: error.to_string(),
                reason: reason.unwrap_or_else(|| "the build did not end well".to_owned()),
            }
        }
    }
}

/// How pepod ended, as a shell would say it. It closed its end of the socketpair, so it has ended or is about to.
fn exit_code(daemon: &OwnedFd) -> u8 {
    if !proc::wait(daemon.as_fd(), Duration::from_secs(10)) {
        let _ = proc::kill(daemon.as_fd());
    }
    let waited = rustix::process::waitid(WaitId::PidFd(daemon.as_fd()), WaitIdOptions::EXITED);
    match waited {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => u8::try_from(code).unwrap_or(125),
            (None, Some(signal)) => u8::try_from(128 + signal).unwrap_or(125),
            (None, None) => 125,
        },
        _ => 125,
    }
}

/// Reaps a child by pidfd, if it is ours and has ended.
pub(super) fn reap(pidfd: BorrowedFd<'_>) {
    let _ = rustix::process::waitid(WaitId::PidFd(pidfd), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
}
