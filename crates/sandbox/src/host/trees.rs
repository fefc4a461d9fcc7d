//! Trees on the privileged side: who is served which, visits, and what becomes of them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::serve::Lane;
use super::work::{KNOWN_PER_MIB, Made, Work, failed};
use super::{Refusal, VolumeState};
use crate::id::{SandboxId, VolumeId, file};
use crate::jail::Access;
use crate::plan::Plan;
use crate::share::{self, Archive, SharePlan, ShareRecord, VisitPlan};
use crate::volume::{self, VolumePlan, VolumeUsage};
use crate::{disk, proc};

/// Files that a share server may have open, where the host lets it.
const SHARE_FILES: u64 = 16_384;

/// Files that a visit may have open: one for each level of the deepest tree it walks, and some.
const VISIT_FILES: u64 = 2048;

/// Visits at once: each is a process.
const VISITS: usize = 32;

/// How long a visit that was killed may take to be gone; how often one that runs is looked at.
const VISIT_ENDED_WITHIN: Duration = Duration::from_secs(20);

/// One of the visits at work.
struct Visiting(Arc<AtomicUsize>);

impl Visiting {
    fn begin(all: &Arc<AtomicUsize>) -> Result<Self, Refusal> {
        let one = Visiting(Arc::clone(all));
        match all.fetch_add(1, Ordering::AcqRel) {
            VISITS.. => Err(Refusal::Invalid { reason: format!("{VISITS} visits of trees are at work already") }),
            _ => Ok(one),
        }
    }
}

impl Drop for Visiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Work {
    /// What a Sandbox is served, by its record.
    pub(super) fn shares(&self, id: SandboxId) -> Vec<ShareRecord> {
        self.place.read(id, file::SHARES).unwrap_or_default()
    }

    /// The trees it is served.
    pub fn shared(&self, id: SandboxId) -> Vec<VolumeId> {
        let mut volumes: Vec<_> = self.shares(id).into_iter().map(|record| record.volume).collect();
        volumes.sort_unstable();
        volumes.dedup();
        volumes
    }

    /// Whether any Sandbox is served that tree.
    fn is_shared(&self, volume: VolumeId) -> Result<bool, Refusal> {
        let all = self.place.all().map_err(|error| failed("read the jails", error))?;
        Ok(all.into_iter().any(|id| self.shares(id).iter().any(|record| record.volume == volume)))
    }

    /// Starts a server of a tree for a running Sandbox, on the stream into its guest that comes to it by `hatch`. Its pidfd is
    /// the answer.
    pub fn share(
        &self,
        id: SandboxId,
        plan: &SharePlan,
        hatch: OwnedFd,
        lane: &Lane,
        made: &mut Made,
    ) -> Result<OwnedFd, Refusal> {
        plan.check().map_err(|reason| Refusal::Invalid { reason })?;
        let cancelled = || lane.cancelled.load(Ordering::Acquire);
        if cancelled() {
            return Err(Refusal::Released { id });
        }
        let not_there = |state: &str| Refusal::NotThere { id, state: state.to_owned() };
        let keeper = self.place.keeper(id).map_err(|_| not_there("does not run"))?;
        let sandbox: Plan = self.place.read(id, file::PLAN).map_err(|_| not_there("has no plan"))?;
        // Written down before anything is taken: from here on the tree has a user.
        let mut records = self.shares(id);
        records.push(ShareRecord { volume: plan.volume, server: None });
        let write = |records: &Vec<ShareRecord>| {
            self.place.write(id, file::SHARES, records).map_err(|error| failed("write the share down", error))
        };
        write(&records)?;
        let leaf = self.place.cgroups.leaf(self.place.cgroup(id));
        // Begun first: it starts while the tree is mounted.
        let server = share::Server::spawn(Some((keeper.as_fd(), &leaf)))
            .map_err(|error| failed("start the share server", error))?;
        made.servers.push(server.pidfd().try_clone().map_err(|error| failed("hold the share server", error))?);
        if let Some(record) = records.last_mut() {
            record.server = Some(server.identity());
        }
        write(&records)?;
        let mounted =
            self.volumes.mount(plan.volume, plan.access).map_err(|error| volume_refused(plan.volume, error))?;
        let doors = leaf.doors().map_err(|error| failed("open the cgroup", error))?;
        let order = share::Order {
            at: self.place.directory(id).join(file::BOOT),
            lender: mounted.lender(),
            open_files: SHARE_FILES,
            task: share::Task::Serve {
                cgroup: self.place.cgroup(id),
                hierarchies: leaf.hierarchies(),
                cache: plan.cache,
                proof: plan.proof.clone(),
                nodes: sandbox.memory_mib as usize * KNOWN_PER_MIB,
                io: sandbox.io,
            },
        };
        let fds: Vec<_> =
            [hatch.as_fd(), mounted.mount.as_fd()].into_iter().chain(doors.iter().map(AsFd::as_fd)).collect();
        server.serve(&order, &mounted.whose, &fds, &cancelled).map_err(|error| failed("serve the tree", error))
    }

    /// Starts a visit of a tree: one operation, asked on that stream, by a jailed process that ends with its answer.
    pub fn visit(self: &Arc<Self>, plan: VisitPlan, stream: &OwnedFd) -> Result<(), Refusal> {
        let one = Visiting::begin(&self.visits)?;
        let mounted =
            self.volumes.mount(plan.volume, plan.access).map_err(|error| volume_refused(plan.volume, error))?;
        let task = share::Task::Visit { archive: plan.archive };
        let order =
            share::Order { at: self.place.path.clone(), lender: mounted.lender(), open_files: VISIT_FILES, task };
        let server = share::Server::spawn(None).map_err(|error| failed("start a visit", error))?;
        let process = server.pidfd().try_clone().map_err(|error| failed("hold a visit", error))?;
        let served = server.serve(&order, &mounted.whose, &[stream.as_fd(), mounted.mount.as_fd()], &|| false);
        drop(mounted);
        if let Err(error) = served {
            let _ = proc::kill(process.as_fd());
            proc::wait(process.as_fd(), VISIT_ENDED_WITHIN);
            super::serve::reap(process.as_fd());
            return Err(failed("visit the tree", error));
        }
        let work = Arc::clone(self);
        let waiting = std::thread::Builder::new().name("visit".to_owned()).spawn(move || {
            while !proc::wait(process.as_fd(), VISIT_ENDED_WITHIN) {}
            super::serve::reap(process.as_fd());
            drop(one);
            if plan.access == Access::Writable && plan.archive == Archive::Whole {
                // One that cannot be settled now is settled by its next user's end, or by the host's kernel in time.
                let _ = work.settle_volume(plan.volume);
            }
        });
        waiting.map(drop).map_err(|error| failed("wait for a visit", error))
    }

    /// Takes a directory with the rights of whoever is at the other end of the connection.
    pub fn lend(&self, id: VolumeId, connection: &OwnedFd, path: &Path, access: Access) -> Result<(), Refusal> {
        self.volumes.lend(id, connection, path, access).map_err(|error| volume_refused(id, error))
    }

    pub fn create_volume(&self, plan: &VolumePlan) -> Result<(), Refusal> {
        self.volumes.create(plan).map_err(|error| volume_refused(plan.id, error))
    }

    pub fn grow_volume(&self, id: VolumeId, mib: u64) -> Result<(), Refusal> {
        self.volumes.grow(id, mib).map_err(|error| volume_refused(id, error))
    }

    pub fn volume_usage(&self, id: VolumeId) -> Result<VolumeUsage, Refusal> {
        self.volumes.usage(id).map_err(|error| volume_refused(id, error))
    }

    pub fn remove_volume(&self, id: VolumeId) -> Result<u64, Refusal> {
        if self.is_shared(id)? && !self.volumes.is_lent(id) {
            return Err(Refusal::Volume { volume: id, state: VolumeState::InUse });
        }
        self.volumes.remove(id).map_err(|error| volume_refused(id, error))
    }

    pub fn all_volumes(&self) -> Result<Vec<VolumeId>, Refusal> {
        self.volumes.all().map_err(|error| failed("list the trees", error))
    }

    /// After a user of a tree has gone: if it was the last one.
    pub fn settle_volume(&self, id: VolumeId) -> Result<(), Refusal> {
        if self.is_shared(id)? {
            return Ok(());
        }
        self.volumes.settle(id).map_err(|error| volume_refused(id, error))
    }

    /// Removes what half-made trees left.
    pub fn sweep_volumes(&self) -> io::Result<()> {
        self.volumes.sweep().map_err(io::Error::other)
    }
}

/// What pepod is told of a tree that could not be used.
fn volume_refused(volume: VolumeId, error: volume::Error) -> Refusal {
    match error {
        volume::Error::Plan(reason) => Refusal::Invalid { reason },
        volume::Error::NotThere(_) => Refusal::Volume { volume, state: VolumeState::Absent },
        volume::Error::There(_) => Refusal::Volume { volume, state: VolumeState::Present },
        volume::Error::InUse(_) => Refusal::Volume { volume, state: VolumeState::InUse },
        volume::Error::Disk(disk::Error::Missing { program }) => {
            Refusal::Missing { what: program.display().to_string(), hint: "install e2fsprogs".to_owned() }
        }
        error => failed("use the tree", error),
    }
}
