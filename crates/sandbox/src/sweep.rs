//! Sweeping: what is found on the host, minus what is kept, is given back. It reads the host and no memory of ours.
//!
//! An instance sweeps its own tag, through the privileged side that holds its lease. Tags whose lease nobody holds are
//! looked at by [`look`] and swept by [`sweep_stale`], which holds the lease meanwhile.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::builder;
use crate::cgroup::Hierarchies;
use crate::held::{Holdings, Place};
use crate::host::Leftover;
use crate::id::{SandboxId, Slot};
use crate::proc::{self, Process};
use crate::registry::{self, Holder, Lease};

/// What of this instance is on the host and not kept, and whether `act` removed it. `kept` is asked after the host was looked
/// at, so that what is made meanwhile can be in it.
///
/// # Errors
/// The jails cannot be read.
pub fn sweep(
    place: &Place,
    kept: &dyn Fn(SandboxId) -> bool,
    owner: &Path,
    act: Act,
) -> std::io::Result<Vec<Leftover>> {
    let strays: Vec<Process> = proc::of_uids(place.block).collect();
    let all = place.all()?;
    let mut left = Vec::new();
    for id in all.iter().copied().filter(|id| !kept(*id)) {
        let age = age_seconds(place, id);
        let present = Holdings::of(place, id).present();
        let removed = match act {
            Act::Look => None,
            Act::Remove => Some(Holdings::of(place, id).release().map_err(|left| left.join("; "))),
        };
        left.extend(present.into_iter().map(|(kind, name)| Leftover {
            kind: kind.as_str().to_owned(),
            name,
            tag: place.tag.to_string(),
            owner: Some(owner.to_owned()),
            age_seconds: age,
            removed: removed.clone(),
        }));
    }
    // Processes under uids of a slot to which nothing else leads any more. (A builder's are the builder's to sweep.)
    let led_to = |slot: Slot| all.iter().any(|id| id.slot() == slot);
    for process in strays {
        let Some(slot) = place.block.slot_of(process.uid).filter(|slot| !led_to(*slot)) else { continue };
        left.push(Leftover {
            kind: "process".to_owned(),
            name: format!("{} {} of slot {}", process.pid, process.name, slot.number()),
            tag: place.tag.to_string(),
            owner: Some(owner.to_owned()),
            age_seconds: None,
            removed: (act == Act::Remove).then(|| end(&process)),
        });
    }
    Ok(left)
}

fn end(process: &Process) -> Result<(), String> {
    let Ok(pidfd) = proc::open(process.pid) else { return Ok(()) };
    // Opened first, then seen to be under that uid still: the pid may be another's by now.
    if proc::read(process.pid).is_none_or(|now| now.uid != process.uid) {
        return Ok(());
    }
    proc::kill(pidfd.as_fd()).map_err(|error| error.to_string())?;
    if proc::wait(pidfd.as_fd(), DEAD_WITHIN) { Ok(()) } else { Err("it does not end".to_owned()) }
}

/// How long a killed process may take to be gone.
const DEAD_WITHIN: Duration = Duration::from_secs(10);

/// Whether to look or to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Lists.
    Look,
    /// Gives back.
    Remove,
}

/// Seconds since a Sandbox's directory was made.
pub fn age_seconds(place: &Place, id: SandboxId) -> Option<u64> {
    let made = std::fs::symlink_metadata(place.directory(id)).ok()?.mtime();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs();
    Some(now.saturating_sub(u64::try_from(made).ok()?))
}

/// What instances that nobody runs have left on the host.
///
/// # Errors
/// The registry or the host's cgroups cannot be read.
pub fn look() -> std::io::Result<Vec<Leftover>> {
    stale(Act::Look, None)
}

/// Gives back what instances that nobody runs have left. Needs root.
///
/// # Errors
/// As [`look`].
pub fn sweep_stale() -> std::io::Result<Vec<Leftover>> {
    stale(Act::Remove, None)
}

/// As [`sweep_stale`], of the instance with that (canonical) state directory alone.
///
/// # Errors
/// As [`look`].
pub fn sweep_stale_of(state: &Path) -> std::io::Result<Vec<Leftover>> {
    stale(Act::Remove, Some(state))
}

fn stale(act: Act, only: Option<&Path>) -> std::io::Result<Vec<Leftover>> {
    let mut left = Vec::new();
    let cgroups = Hierarchies::detect().map_err(std::io::Error::other)?;
    for (lease, holder) in registry::leases().map_err(std::io::Error::other)? {
        if holder == Holder::Alive || only.is_some_and(|state| state != lease.state) {
            continue;
        }
        let work = |lease: &Lease| of_lease(lease, cgroups.clone(), act);
        // Held meanwhile, so that its instance cannot start while it is swept.
        match registry::with_stale(Path::new(registry::REGISTRY), lease.tag, work).map_err(std::io::Error::other)? {
            Some(found) => left.extend(found?),
            None => continue,
        }
    }
    Ok(left)
}

fn of_lease(lease: &Lease, cgroups: Hierarchies, act: Act) -> std::io::Result<Vec<Leftover>> {
    let mut left = of_builder(lease, act);
    left.extend(match Place::open(lease.tag, lease.block, &lease.jails, cgroups.clone()) {
        Ok(place) => sweep(&place, &|_| false, &lease.state, act)?,
        // Its directory is gone; cgroups and processes may be there all the same, and lead to their ids.
        Err(_) => {
            let place = Place::without_jails(lease.tag, lease.block, cgroups)?;
            sweep(&place, &|_| false, &lease.state, act)?
        }
    });
    Ok(left)
}

/// What a builder of that instance left. One of a living instance is swept by its own privileged side at its start.
fn of_builder(lease: &Lease, act: Act) -> Vec<Leftover> {
    let present = builder::left_by(&lease.jails, lease.tag);
    let removed = match act {
        Act::Remove if !present.is_empty() => {
            Some(builder::sweep_left(&lease.jails, lease.tag).map_err(|error| error.to_string()))
        }
        _ => None,
    };
    let leftover = |(kind, name): (&str, String)| Leftover {
        kind: kind.to_owned(),
        name,
        tag: lease.tag.to_string(),
        owner: Some(lease.state.clone()),
        age_seconds: None,
        removed: removed.clone(),
    };
    present.into_iter().map(leftover).collect()
}
