//! Plans: what pepod asks the privileged side to build, as data.
//!
//! Both sides check a Plan with the same function: pepod so that its caller gets a good answer, the privileged side because
//! it trusts nobody. A path in a Plan is relative to the state directory; the privileged side opens it beneath that directory,
//! follows no link, and takes regular files of pepod's owner alone.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cgroup::Io;
use crate::id::SandboxId;
use crate::jail::Entry;
use crate::vmm::{Caps, Streams, firecracker, qemu};

/// Memory of a guest in MiB. Below 128 the default kernel with its initramfs does not come up.
pub const MEMORY_MIB: std::ops::RangeInclusive<u32> = 128..=1_048_576;
/// Processors of a guest. The `microvm` machine ends at 288; no host we know profits from more than this.
pub const CPUS: std::ops::RangeInclusive<u32> = 1..=64;
/// The scratch disk in MiB: below 16 there is no room for ext4's own tables, above 16 TiB ext4 ends.
pub const DISK_MIB: std::ops::RangeInclusive<u32> = 16..=16_777_215;
/// The longest path in a Plan, in bytes.
pub const PATH_BYTES: usize = 512;

/// What is wrong with a Plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A number is outside its bounds.
    #[error("{field} is {value}, outside {low}..={high}")]
    Bounds {
        /// Which one.
        field: &'static str,
        /// What it was.
        value: u32,
        /// The least it may be.
        low: u32,
        /// The most it may be.
        high: u32,
    },
    /// A path is not a plain relative one.
    #[error("path {0:?} is not a plain path below the state directory")]
    Path(String),
}

/// A path below the state directory: relative, no empty, `.` or `..` component, no NUL.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StatePath(String);

impl StatePath {
    /// Takes a path that is one.
    ///
    /// # Errors
    /// [`Error::Path`] otherwise.
    pub fn new(path: impl Into<String>) -> Result<Self, Error> {
        let path = path.into();
        let plain = !path.is_empty()
            && path.len() <= PATH_BYTES
            && !path.contains('\0')
            && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
        if plain { Ok(StatePath(path)) } else { Err(Error::Path(path.chars().take(80).collect())) }
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for StatePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for StatePath {
    type Error = Error;

    fn try_from(path: String) -> Result<Self, Error> {
        StatePath::new(path)
    }
}

impl From<StatePath> for String {
    fn from(path: StatePath) -> String {
        path.0
    }
}

/// Which VMM runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vmm {
    /// QEMU's `microvm` in software emulation.
    Qemu,
    /// Firecracker on hardware virtualization.
    Firecracker,
    /// The guest agent as a host process: for tests of everything above.
    #[cfg(feature = "fake")]
    Fake,
}

impl Vmm {
    /// What it can, and how it is handled.
    pub fn caps(self) -> Caps {
        match self {
            Vmm::Qemu => Caps {
                name: "qemu",
                entry: Entry::Ours,
                streams: Streams::Beside,
                max_cpus: *CPUS.end(),
                overhead_mib: qemu::OVERHEAD_MIB,
                // A main loop, a worker pool of up to 64, an RCU thread; the stream device about 8; the keeper.
                threads: 128,
            },
            Vmm::Firecracker => Caps {
                name: "firecracker",
                entry: Entry::Official,
                streams: Streams::Within,
                max_cpus: firecracker::MAX_CPUS,
                overhead_mib: firecracker::OVERHEAD_MIB,
                threads: firecracker::THREADS,
            },
            #[cfg(feature = "fake")]
            Vmm::Fake => Caps { name: "fake", overhead_mib: 0, ..Vmm::Qemu.caps() },
        }
    }
}

/// Whether a Sandbox has a network interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// It has none.
    #[default]
    Absent,
    /// It has one, closed until a policy is put in force.
    Slot,
}

/// One Sandbox to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Who it will be; made by [`crate::Host::new_id`].
    pub id: SandboxId,
    /// What runs it.
    pub vmm: Vmm,
    /// The kernel's file.
    pub kernel: StatePath,
    /// The initramfs' file.
    pub initramfs: StatePath,
    /// The read-only root file system's file.
    pub root: StatePath,
    /// Memory, in [`MEMORY_MIB`].
    pub memory_mib: u32,
    /// Processors, in [`CPUS`].
    pub cpus: u32,
    /// The scratch disk's size, in [`DISK_MIB`]: sparse, it costs what is written to it.
    pub disk_mib: u32,
    /// Its network interface.
    #[serde(default)]
    pub network: Network,
    /// What each of its disks may do; `None` is without a cap.
    #[serde(default)]
    pub io: Option<Io>,
}

impl Plan {
    /// Checks every bound.
    ///
    /// # Errors
    /// The first number outside its range.
    pub fn check(&self) -> Result<(), Error> {
        within("memory_mib", self.memory_mib, &MEMORY_MIB)?;
        within("cpus", self.cpus, &(*CPUS.start()..=self.vmm.caps().max_cpus))?;
        within("disk_mib", self.disk_mib, &DISK_MIB)
    }
}

fn within(field: &'static str, value: u32, range: &std::ops::RangeInclusive<u32>) -> Result<(), Error> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(Error::Bounds { field, value, low: *range.start(), high: *range.end() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Slot;

    fn plan() -> Plan {
        let path = |p: &str| StatePath::new(p).expect("path");
        Plan {
            id: SandboxId::new(Slot::new(3).expect("slot")),
            vmm: Vmm::Qemu,
            kernel: path("boot/a/vmlinuz"),
            initramfs: path("boot/a/initramfs"),
            root: path("boot/a/rootfs.erofs"),
            memory_mib: 512,
            cpus: 1,
            disk_mib: 2048,
            network: Network::Slot,
            io: Some(Io { bytes: 256 << 20, operations: 4000 }),
        }
    }

    #[test]
    fn bounds_hold_at_both_ends() {
        assert_eq!(plan().check(), Ok(()));
        for (memory_mib, cpus, disk_mib) in
            [(127, 1, 2048), (512, 0, 2048), (512, 65, 2048), (512, 1, 15), (1_048_577, 1, 16), (512, 1, 16_777_216)]
        {
            assert!(Plan { memory_mib, cpus, disk_mib, ..plan() }.check().is_err(), "{memory_mib} {cpus} {disk_mib}");
        }
        assert!(Plan { vmm: Vmm::Firecracker, cpus: 32, ..plan() }.check().is_ok());
        assert!(Plan { vmm: Vmm::Firecracker, cpus: 33, ..plan() }.check().is_err(), "its API ends at 32");
    }

    #[test]
    fn paths_stay_below() {
        for bad in ["", "/etc/shadow", "../x", "a/../b", "a//b", "a/.", "a\0b", &"a/".repeat(400)] {
            assert!(StatePath::new(bad).is_err(), "{bad:?} was taken");
        }
        let mut json = serde_json::to_value(plan()).expect("json");
        json["kernel"] = "../../etc/shadow".into();
        assert!(serde_json::from_value::<Plan>(json).is_err(), "serde does not check");
    }

    #[test]
    fn a_plan_survives_json_and_refuses_what_it_does_not_know() {
        let plan = plan();
        let mut json = serde_json::to_value(&plan).expect("json");
        assert_eq!(serde_json::from_value::<Plan>(json.clone()).expect("plan"), plan);
        json["extra"] = 1.into();
        assert!(serde_json::from_value::<Plan>(json).is_err());
    }
}
