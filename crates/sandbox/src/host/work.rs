//! What the privileged side does for one request: takes, starts, connects, reads. It checks again whatever pepod said.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::mount::OpenTreeFlags;

use super::networks::Networks;
use super::serve::{HostConfig, Lane};
use super::wire::{self, Reply};
use super::{Refusal, Usage};
#[cfg(feature = "fake")]
use crate::boot::Step;
use crate::cgroup::{self, Limits};
use crate::chain;
use crate::held::{KeeperRecord, Place};
use crate::id::{SandboxId, file, process};
use crate::jail::Entry;
use crate::keeper::{self, FIXED_FDS, Order, Said, connect};
use crate::net::address::GUEST_MAC;
use crate::net::slot::Device;
use crate::plan::{self, Plan, StatePath, Vmm};
use crate::spawn::{PidNamespace, Spawned, spawn};
use crate::vmm::closure::{self, Closure, Programs, Sources};
use crate::vmm::{Boot, Interface, Streams, Throttle, clock, firecracker, vsock};
use crate::volume::Volumes;
use crate::{disk, proc};

/// Memory beside guest and VMM, in MiB: keeper and vsock device (measured: 4 and 8 resident), page tables, socket buffers.
const BESIDE_MIB: u64 = 64;

/// Files that a guest's kernel may know at once for each MiB of its memory, and so what a share server remembers: a kernel
/// needs twice the room for each itself.
pub(super) const KNOWN_PER_MIB: usize = 512;

/// Bytes that a share server remembers of a known file, with a name of usual length, by its parts.
const KNOWN_BYTES: u64 = 224;

/// Processor time beside the virtual processors', half of one: the VMM's main loop, the vsock device and the keeper work
/// while the guest does, and a guest whose own processor had to pay for its disk and streams would get less than it was given.
const BESIDE_CPU_US: u64 = cgroup::PERIOD_US / 2;

/// A page of this machine's memory, in bytes.
const PAGE: u64 = 4096;

/// The word of the kernel's command line without which our guest agent does not act on the machine it runs on.
const GUEST: &str = "pepo.guest=1";

/// How long a keeper may take to say that it runs.
const RUNNING_WITHIN: Duration = Duration::from_secs(60);

/// How long a killed keeper may take to be gone, with all below it; what is left then is told by what holds it.
const ENDED_WITHIN: Duration = Duration::from_secs(20);

/// How often a waiting start looks whether it was cancelled.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// What the work needs to know.
#[derive(Debug)]
pub(super) struct Work {
    pub place: Place,
    state: OwnedFd,
    pub state_path: PathBuf,
    daemon_uid: u32,
    sources: Sources,
    copies: Mutex<Copies>,
    /// Held from the look at a slot to its claim, so that no two get one.
    claims: Mutex<()>,
    mkfs: PathBuf,
    pub(super) volumes: Volumes,
    pub(super) visits: Arc<AtomicUsize>,
    pub networks: Networks,
}

/// Foreign programs as they were copied for jails.
#[derive(Debug, Default)]
struct Copies {
    qemu: Option<Programs>,
    firecracker: Option<Closure>,
}

impl Copies {
    fn digests(&self) -> Vec<&str> {
        let qemu = self.qemu.iter().flat_map(|programs| [&programs.qemu, &programs.vsock_device]);
        qemu.chain(&self.firecracker).map(|closure| closure.digest.as_str()).collect()
    }
}

/// What was made for a Sandbox and is still in this process' hands.
#[derive(Debug, Default)]
pub(super) struct Made {
    prepared: Option<Prepared>,
    keeper: Option<OwnedFd>,
    pub(super) servers: Vec<OwnedFd>,
    #[cfg(feature = "fake")]
    fake: bool,
    /// Waits for the agent's end and writes it down.
    #[cfg(feature = "fake")]
    pub(super) recorder: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Prepared {
    plan: Plan,
    kernel: File,
    initramfs: File,
    root: File,
    disk: File,
    tap: Option<OwnedFd>,
}

impl Made {
    /// Closes what is only held here, and ends a keeper that this process started: one that has not joined its cgroup yet is
    /// known by this descriptor alone. What was started into its pid namespace from here is ended and reaped first: the first
    /// process of a namespace does not end before all others in it are reaped, and these are nobody's to reap but ours.
    pub fn let_go(&mut self) {
        self.prepared = None;
        let killed = self.keeper.as_ref().is_some_and(|keeper| proc::kill(keeper.as_fd()).is_ok());
        for server in &self.servers {
            // One that has ended already cannot be killed, and is there to be reaped all the same.
            let _ = proc::kill(server.as_fd());
            proc::wait(server.as_fd(), ENDED_WITHIN);
            super::serve::reap(server.as_fd());
        }
        if killed && let Some(keeper) = &self.keeper {
            proc::wait(keeper.as_fd(), ENDED_WITHIN);
        }
    }

    /// Holds one more process of the Sandbox's.
    pub fn serve(&mut self, server: OwnedFd) {
        self.servers.push(server);
    }

    /// Takes a keeper's exit status, if it has one, so that no zombie stays.
    pub fn reap(&self) {
        if let Some(keeper) = &self.keeper {
            super::serve::reap(keeper.as_fd());
        }
        self.servers.iter().for_each(|server| super::serve::reap(server.as_fd()));
    }
}

/// A step that failed.
pub(super) fn failed(step: &str, error: impl std::error::Error) -> Refusal {
    Refusal::Step { step: step.to_owned(), reason: chain(&error) }
}

impl Work {
    pub fn new(place: Place, config: &HostConfig) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let state = rustix::fs::open(config.instance.state(), flags, Mode::empty())?;
        // Measured while nobody waits for it.
        std::thread::spawn(clock::tsc_khz);
        let networks = Networks::new(&place, config.network.clone())?;
        let sources = Sources {
            qemu: config.qemu.clone(),
            vsock_device: config.vsock_device.clone(),
            firecracker: config.firecracker.clone(),
        };
        Ok(Work {
            place,
            state,
            state_path: config.instance.state().to_owned(),
            daemon_uid: config.daemon_uid,
            sources,
            copies: Mutex::default(),
            claims: Mutex::default(),
            volumes: Volumes::new(
                config.instance.state(),
                config.instance.block(),
                config.mkfs.clone(),
                config.directories.clone(),
            ),
            mkfs: config.mkfs.clone(),
            visits: Arc::default(),
            networks,
        })
    }

    /// Everything that does not run yet, each thing recorded by the directory's existence before it is taken.
    pub fn prepare(&self, plan: &Plan, lane: &Lane, made: &mut Made) -> Result<(), Refusal> {
        plan.check().map_err(|error| Refusal::Invalid { reason: error.to_string() })?;
        let id = plan.id;
        let going_on = || if lane.cancelled.load(Ordering::Acquire) { Err(Refusal::Released { id }) } else { Ok(()) };
        going_on()?;
        #[cfg(feature = "fake")]
        {
            self.may(Step::Prepare)?;
            if plan.vmm == Vmm::Fake {
                made.fake = true;
                return self.prepare_fake(plan);
            }
        }
        let caps = plan.vmm.caps();
        self.programs(plan)?;
        let kernel = self.file(&plan.kernel, Readers::Jailed)?;
        let initramfs = self.file(&plan.initramfs, Readers::Jailed)?;
        let readers = match caps.entry {
            Entry::Ours => Readers::Us,
            // It opens the file by its path in the root.
            Entry::Official => Readers::Jailed,
        };
        let root = self.file(&plan.root, readers)?;
        self.claim(plan)?;
        going_on()?;
        let limits = Limits {
            memory_bytes: (u64::from(plan.memory_mib) + u64::from(caps.overhead_mib) + beside_mib(plan.memory_mib))
                << 20,
            cpu_us: u64::from(plan.cpus) * cgroup::PERIOD_US + BESIDE_CPU_US,
            pids: u64::from(plan.cpus) + caps.threads,
            weight_cpus: u64::from(plan.cpus),
        };
        let leaf = self.place.cgroups.leaf(self.place.cgroup(id));
        leaf.create(&limits).map_err(|error| failed("make the cgroup", error))?;
        self.holds(&leaf, &limits)?;
        if let Some(io) = plan.io {
            match leaf.limit_io(&self.place.path, io) {
                cgroup::IoLayer::Absent(why) => {
                    tracing::debug!(sandbox = %id, why, "disks are capped by the VMM alone")
                }
                layer => tracing::debug!(sandbox = %id, ?layer, "disks are capped by the VMM and the kernel"),
            }
        }
        let uids = self.place.block.uids(id.slot());
        for (name, owner) in [(file::BOOT, 0), (file::VSOCK, uids.vsock), (file::KEEP, uids.keeper)] {
            self.place.area(id, name, owner).map_err(|error| failed("make a directory", error))?;
        }
        going_on()?;
        let disk = disk::scratch(&self.place.path, &self.mkfs, plan.disk_mib).map_err(|error| match error {
            disk::Error::NoSpace { needed_mib, available_mib, path } => {
                Refusal::NoSpace { needed_mib, available_mib, path }
            }
            disk::Error::Missing { program } => {
                Refusal::Missing { what: program.display().to_string(), hint: "install e2fsprogs".to_owned() }
            }
            error => failed("make the scratch disk", error),
        })?;
        going_on()?;
        let tap = match plan.network {
            plan::Network::Absent => None,
            plan::Network::Slot => {
                let device = match plan.vmm.caps().entry {
                    Entry::Ours => Device::Handed,
                    Entry::Official => Device::Named(uids.vmm),
                };
                Some(self.networks.prepare(&self.place, id, device)?)
            }
        };
        made.prepared = Some(Prepared { plan: plan.clone(), kernel, initramfs, root, disk, tap });
        Ok(())
    }

    /// Starts the keeper and waits until it says that everything runs. Its pidfd is the answer.
    pub fn start(&self, id: SandboxId, lane: &Lane, made: &mut Made) -> Result<OwnedFd, Refusal> {
        #[cfg(feature = "fake")]
        {
            self.may(Step::Start)?;
            if made.fake {
                return self.start_fake(id, made);
            }
        }
        let Some(prepared) = made.prepared.take() else {
            return Err(Refusal::NotThere { id, state: "is not prepared".to_owned() });
        };
        if lane.cancelled.load(Ordering::Acquire) {
            return Err(Refusal::Released { id });
        }
        let plan = &prepared.plan;
        let programs = self.programs(plan)?;
        let leaf = self.place.cgroups.leaf(self.place.cgroup(id));
        let doors = leaf.doors().map_err(|error| failed("open the cgroup", error))?;
        let oom = leaf.oom_file().map_err(|error| failed("open the cgroup", error))?;
        let keep =
            self.place.open_at(id, file::KEEP, OFlags::DIRECTORY).map_err(|error| failed("open a directory", error))?;
        let uids = self.place.block.uids(id.slot());
        let order = Order {
            directory: self.place.directory(id),
            state: self.state_path.clone(),
            kernel: plan.kernel.clone(),
            initramfs: plan.initramfs.clone(),
            cgroup: self.place.cgroup(id),
            hierarchies: leaf.hierarchies(),
            uids,
            boot: Boot {
                vcpus: u8::try_from(plan.cpus).map_err(|error| failed("read the plan", error))?,
                memory_mib: plan.memory_mib,
                kernel: PathBuf::new(),
                initrd: PathBuf::new(),
                arguments: vec![GUEST.to_owned()],
                scratch_size: u64::from(plan.disk_mib) << 20,
                throttle: plan.io.map(|io| Throttle { bytes: io.bytes, operations: io.operations }),
                uid: uids.vmm,
                interface: prepared.tap.as_ref().map(|_| Interface {
                    mac: GUEST_MAC.to_string(),
                    packets_per_second: self.networks.packets_per_second(),
                }),
            },
            tsc_khz: clock::tsc_khz(),
            programs,
        };
        let spawned = spawn(process::KEEPER, PidNamespace::New, Some(&leaf));
        let Spawned { pid, start, pidfd: keeper, socket } =
            spawned.map_err(|error| failed("start the keeper", error))?;
        self.record(id, pid, start)?;
        made.keeper = Some(keeper.try_clone().map_err(|error| failed("hold the keeper", error))?);
        let files = [&prepared.kernel, &prepared.initramfs, &prepared.root, &prepared.disk];
        let trees = match plan.vmm.caps().entry {
            Entry::Ours => Vec::new(),
            Entry::Official => {
                let named = self.place.name(id, file::SCRATCH, &prepared.disk, uids.vmm);
                let disk = named.map_err(|error| failed("name the scratch disk", error))?;
                vec![tree(&prepared.kernel)?, tree(&prepared.initramfs)?, tree(&prepared.root)?, tree(disk)?]
            }
        };
        let fixed = match &trees[..] {
            [kernel, initramfs, root, disk] => [kernel, initramfs, root, disk].map(AsFd::as_fd),
            _ => files.map(AsFd::as_fd),
        };
        let fixed: [_; FIXED_FDS] = [fixed[0], fixed[1], fixed[2], fixed[3], keep.as_fd(), oom.as_fd()];
        let tap = prepared.tap.iter().map(AsFd::as_fd);
        let fds: Vec<_> = fixed.into_iter().chain(tap).chain(doors.iter().map(AsFd::as_fd)).collect();
        wire::send(socket.as_fd(), &order, &fds).map_err(|error| failed("order the keeper", error))?;
        drop((prepared, trees));
        self.wait_for(id, &socket, lane)?;
        self.place.unname(id, file::SCRATCH).map_err(|error| failed("take the scratch disk's name", error))?;
        Ok(keeper)
    }

    /// Writes down who the keeper is before it is told anything.
    pub(super) fn record(&self, id: SandboxId, pid: u32, start: u64) -> Result<(), Refusal> {
        self.place
            .write(id, file::KEEPER, &KeeperRecord { pid, start })
            .map_err(|error| failed("write the keeper down", error))
    }

    fn wait_for(&self, id: SandboxId, socket: &OwnedFd, lane: &Lane) -> Result<(), Refusal> {
        let deadline = Instant::now() + RUNNING_WITHIN;
        loop {
            if lane.cancelled.load(Ordering::Acquire) {
                return Err(Refusal::Released { id });
            }
            match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&LOOK)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => break,
                Err(error) => return Err(failed("wait for the keeper", error)),
            }
            if Instant::now() >= deadline {
                return Err(failed("wait for the keeper", io::Error::from(io::ErrorKind::TimedOut)));
            }
        }
        match wire::receive::<Said>(socket.as_fd(), &mut Vec::new()) {
            Ok(Some((Said::Running, _))) => Ok(()),
            Ok(Some((Said::Failed { step, reason }, _))) => Err(Refusal::Step { step, reason }),
            Ok(None) => Err(failed("wait for the keeper", io::Error::other("it ended without a word"))),
            Err(error) => Err(failed("hear the keeper", error)),
        }
    }

    /// A stream to the Sandbox's vsock device. [`Refusal::Step`]: its queue is full just now.
    pub fn connect(&self, id: SandboxId) -> Result<OwnedFd, Refusal> {
        #[cfg(feature = "fake")]
        if self.is_fake(id) {
            return self.connect_fake(id);
        }
        let not_there = |state: &str| Refusal::NotThere { id, state: state.to_owned() };
        let uids = self.place.block.uids(id.slot());
        let plan: Plan = self.place.read(id, file::PLAN).map_err(|_| not_there("is not there"))?;
        let streams = plan.vmm.caps().streams;
        let (directory, socket, uid) = match streams {
            Streams::Beside => {
                (self.place.open_at(id, file::VSOCK, OFlags::DIRECTORY), vsock::STREAM_SOCKET, uids.vsock)
            }
            Streams::Within => (self.place.open_in_keeper(id, firecracker::RUN), firecracker::STREAM_SOCKET, uids.vmm),
        };
        let directory = directory.map_err(|_| not_there("does not run"))?;
        match connect(directory.as_fd(), socket, uid) {
            Ok(stream) => {
                if let (Streams::Beside, Ok(own)) = (streams, self.place.open_at(id, ".", OFlags::DIRECTORY)) {
                    // Without it a caller that goes too early takes the device with it, as before.
                    let _ = keeper::give(own.as_fd(), stream.as_fd());
                }
                Ok(stream)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(failed("connect", error)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                Err(not_there("does not run"))
            }
            Err(error) => Err(not_there(&format!("cannot be reached ({error})"))),
        }
    }

    pub fn adopt(&self, id: SandboxId) -> Result<(Plan, Vec<OwnedFd>), Refusal> {
        let not_there = |state: &str| Refusal::NotThere { id, state: state.to_owned() };
        let plan = self.place.read(id, file::PLAN).map_err(|_| not_there("has no plan"))?;
        let mut processes = vec![self.place.keeper(id).map_err(|_| not_there("does not run"))?];
        for record in self.shares(id) {
            // One that never served belongs to an activation that was cut off: whoever adopts it learns that it is over.
            let (pid, start) = record.server.ok_or_else(|| not_there("was not served its tree"))?;
            processes.push(proc::open_exact(pid, start).map_err(|_| not_there("is not served its tree any more"))?);
        }
        Ok((plan, processes))
    }

    /// The keeper's files as descriptors. They are its own to write, so they are opened as hostile, and pepod reads them.
    pub fn evidence(&self, id: SandboxId) -> (Reply, Vec<OwnedFd>) {
        let uid = self.place.block.uids(id.slot()).keeper;
        #[cfg(feature = "fake")]
        let uid = if self.is_fake(id) { rustix::process::geteuid().as_raw() } else { uid };
        let open = |name: &str| {
            let path = format!("{}/{name}", file::KEEP);
            let fd = self.place.open_at(id, &path, OFlags::RDONLY | OFlags::NONBLOCK).ok()?;
            let stat = rustix::fs::fstat(&fd).ok()?;
            (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_uid == uid).then_some(fd)
        };
        let (exit, console, memory) = (open(file::EXIT), open(file::CONSOLE), open(file::MEMORY));
        let reply = Reply::Evidence { exit: exit.is_some(), console: console.is_some(), memory: memory.is_some() };
        (reply, exit.into_iter().chain(console).chain(memory).collect())
    }

    pub fn usage(&self, id: SandboxId) -> Result<Usage, Refusal> {
        #[cfg(feature = "fake")]
        if self.is_fake(id) {
            return Ok(Usage::default());
        }
        let leaf = self.place.cgroups.leaf(self.place.cgroup(id));
        let not_there = |error| Refusal::NotThere { id, state: format!("cannot be measured ({})", chain(&error)) };
        let mut usage = leaf.usage().map_err(not_there)?;
        let uid = self.place.block.uids(id.slot()).vmm;
        // The VMM by its uid, which nobody else has; what is its own to say (its name) does not count.
        if let Some(vmm) = leaf.processes().into_iter().find(|pid| proc::read(*pid).is_some_and(|one| one.uid == uid)) {
            (usage.read_bytes, usage.write_bytes) = proc::io(vmm).unwrap_or_default();
            usage.disk_bytes =
                self.place.read::<Plan>(id, file::PLAN).ok().map_or(0, |plan| self.disk_bytes(vmm, &plan));
        }
        // What it is served is read and written by the servers of its trees. They receive requests, which nobody counts as
        // read, and write answers, which are not the files'.
        for (pid, start) in self.shares(id).into_iter().filter_map(|record| record.server) {
            if let Some((read, written)) = proc::file_io(pid).filter(|_| proc::start_time(pid) == Some(start)) {
                usage.read_bytes += read;
                usage.write_bytes += written;
            }
        }
        Ok(usage)
    }

    /// What a Sandbox's scratch disk takes: the one file of its size that its VMM has open on the file system of the jails.
    fn disk_bytes(&self, vmm: u32, plan: &Plan) -> u64 {
        let Ok(here) = rustix::fs::fstat(&self.place.jails) else { return 0 };
        let open = std::fs::read_dir(format!("/proc/{vmm}/fd")).into_iter().flatten().flatten();
        open.filter_map(|entry| rustix::fs::stat(entry.path()).ok())
            .find(|stat| {
                stat.st_dev == here.st_dev
                    && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                    && stat.st_size as u64 == u64::from(plan.disk_mib) << 20
            })
            .map_or(0, |stat| stat.st_blocks as u64 * 512)
    }

    /// The kernel holds what was written, or there is no Sandbox.
    fn holds(&self, leaf: &cgroup::Leaf<'_>, limits: &Limits) -> Result<(), Refusal> {
        let held = leaf.held().map_err(|error| failed("read the cgroup back", error))?;
        let page = PAGE;
        // The kernel counts memory in pages.
        let memory = held.memory_bytes <= limits.memory_bytes && held.memory_bytes + page > limits.memory_bytes;
        if memory && held.cpu_us == limits.cpu_us && held.pids == limits.pids {
            return Ok(());
        }
        Err(failed("read the cgroup back", io::Error::other(format!("{held:?} holds, and {limits:?} was written"))))
    }

    /// The programs that run a Plan, copied at the first request.
    fn programs(&self, plan: &Plan) -> Result<keeper::Programs, Refusal> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let copied = |error| match error {
            closure::Error::Missing { program, .. } => Refusal::Missing {
                what: program.to_owned(),
                hint: match program {
                    "qemu-system-x86_64" => "install the package qemu-system-x86".to_owned(),
                    "vhost-device-vsock" => "install it with cargo, as `make` does".to_owned(),
                    _ => "sudo pepo setup".to_owned(),
                },
            },
            error => failed("copy the VMM", error),
        };
        let (programs, new) = match (plan.vmm, &mut *copies) {
            (Vmm::Firecracker, Copies { firecracker, .. }) => {
                let new = firecracker.is_none();
                let made = match firecracker {
                    Some(made) => made,
                    None => firecracker.insert(closure::firecracker(&self.place.path, &self.sources).map_err(copied)?),
                };
                (keeper::Programs::Firecracker { firecracker: made.clone(), id: plan.id.hex() }, new)
            }
            (_, Copies { qemu, .. }) => {
                let new = qemu.is_none();
                let made = match qemu {
                    Some(made) => made,
                    None => qemu.insert(closure::prepare(&self.place.path, &self.sources).map_err(copied)?),
                };
                let Programs { qemu, vsock_device } = made.clone();
                (keeper::Programs::Qemu { qemu, vsock_device }, new)
            }
        };
        // Those of an earlier release go when nothing runs in them.
        if new && self.place.all().is_ok_and(|ids| ids.is_empty()) {
            closure::remove_unused(&self.place.path, &copies.digests())
                .map_err(|error| failed("remove an old copy of the VMM", error))?;
        }
        Ok(programs)
    }

    /// Opens a file of a Plan: below the state directory, through no link, regular, pepod's own, and no one else's to write.
    fn file(&self, path: &StatePath, readers: Readers) -> Result<File, Refusal> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat2(&self.state, path.as_str(), flags, Mode::empty(), resolve)
            .map_err(|error| failed(&format!("open {path}"), error))?;
        let stat = rustix::fs::fstat(&fd).map_err(|error| failed(&format!("look at {path}"), error))?;
        let wrong = |what: &str| Err(Refusal::Invalid { reason: format!("{path} {what}") });
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return wrong("is not a regular file");
        }
        if stat.st_uid != self.daemon_uid {
            return wrong("is not pepod's");
        }
        if stat.st_mode & 0o022 != 0 {
            return wrong("can be written by others");
        }
        if readers == Readers::Jailed && stat.st_mode & 0o004 == 0 {
            return wrong("cannot be read by a jailed process");
        }
        Ok(fd.into())
    }

    /// Takes the slot by making the directory.
    pub(super) fn claim(&self, plan: &Plan) -> Result<(), Refusal> {
        let _alone = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        self.slot_is_free(plan.id)?;
        self.place.claim(plan).map_err(|error| failed("make the directory", error))
    }

    /// No other Sandbox has the slot, and nobody's process runs under its uids.
    fn slot_is_free(&self, id: SandboxId) -> Result<(), Refusal> {
        let slot = id.slot();
        let all = self.place.all().map_err(|error| failed("read the jails", error))?;
        if let Some(holder) = all.into_iter().find(|one| one.slot() == slot) {
            return Err(Refusal::SlotTaken { slot: slot.number(), holder });
        }
        let uids = self.place.block.uids(slot).all();
        match proc::all().find(|process| uids.contains(&process.uid)) {
            Some(process) => Err(Refusal::UidInUse { uid: process.uid, pid: process.pid, name: process.name }),
            None => Ok(()),
        }
    }
}

/// Memory beside guest and VMM, in MiB.
fn beside_mib(memory_mib: u32) -> u64 {
    BESIDE_MIB + (u64::from(memory_mib) * KNOWN_PER_MIB as u64 * KNOWN_BYTES).div_ceil(1 << 20)
}

/// Who has to read a file of a Plan by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Readers {
    /// Only this process; others get the descriptor.
    Us,
    /// A process in a jail.
    Jailed,
}

/// A file as a tree that can be mounted in another namespace, whatever its path is by then.
fn tree(file: impl AsFd) -> Result<OwnedFd, Refusal> {
    let flags = OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    rustix::mount::open_tree(file, "", flags).map_err(|error| failed("take a file's tree", error))
}
