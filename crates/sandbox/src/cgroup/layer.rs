//! The second layer below the VMM's own throttling of disks: what the kernel's io controller can hold.
//!
//! The cap that counts is the VMM's (every byte of a guest's disks goes through it, written through or not). Where the kernel
//! has the controller and the files lie on a disk that it can name, the same numbers are set there too: on v2 they hold
//! written-back bytes as well, on v1 direct and synchronous ones alone. What is held by what is read back, never assumed.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// What a Sandbox's disks may do, each way counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Io {
    /// Bytes per second.
    pub bytes: u64,
    /// Operations per second.
    pub operations: u64,
}

/// What the io controller holds of a leaf, as read back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoLayer {
    /// The whole of it: v2, where write-back is counted to who wrote.
    Held,
    /// Direct and synchronous bytes alone: v1.
    DirectOnly,
    /// Nothing, and why.
    Absent(String),
}

/// The whole disk below a path, by its numbers.
///
/// # Errors
/// A sentence: the file system has no such disk.
pub(super) fn disk(path: &Path) -> Result<(u32, u32), String> {
    let stat = rustix::fs::stat(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    if major == 0 {
        return Err(format!("{} is on a file system without a disk of its own", path.display()));
    }
    let block = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let own = if block.join("partition").exists() { block.join("../dev") } else { block.join("dev") };
    let text = fs::read_to_string(&own).map_err(|error| format!("{}: {error}", own.display()))?;
    let numbers = text.trim().split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    numbers.ok_or_else(|| format!("{} names no disk", own.display()))
}

/// The line of `io.max`.
pub(super) fn line(disk: (u32, u32), io: Io) -> String {
    let Io { bytes, operations } = io;
    format!("{}:{} rbps={bytes} wbps={bytes} riops={operations} wiops={operations}", disk.0, disk.1)
}

/// The files of v1 and what goes into each.
pub(super) fn lines_v1(disk: (u32, u32), io: Io) -> [(&'static str, String); 4] {
    let one = |value: u64| format!("{}:{} {value}", disk.0, disk.1);
    [
        ("blkio.throttle.read_bps_device", one(io.bytes)),
        ("blkio.throttle.write_bps_device", one(io.bytes)),
        ("blkio.throttle.read_iops_device", one(io.operations)),
        ("blkio.throttle.write_iops_device", one(io.operations)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_whole_and_a_file_system_without_one_says_so() {
        let error = disk(Path::new("/proc")).expect_err("no disk");
        assert!(error.contains("without a disk"), "{error}");
        if let Ok((major, minor)) = disk(Path::new("/")) {
            assert!(!Path::new(&format!("/sys/dev/block/{major}:{minor}/partition")).exists());
        }
        assert_eq!(line((8, 0), Io { bytes: 5, operations: 6 }), "8:0 rbps=5 wbps=5 riops=6 wiops=6");
    }
}
