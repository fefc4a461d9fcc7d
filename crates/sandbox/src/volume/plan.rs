//! What pepod asks for when it asks for a tree, and what it is told of one.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::Error;
use crate::id::{UidBlock, VolumeId};

/// A tree's cap in MiB: below, ext4's own tables leave no room; above, ext4 ends.
pub const VOLUME_MIB: RangeInclusive<u64> = 16..=16_000_000;

/// The files a tree may have.
pub const VOLUME_FILES: RangeInclusive<u64> = 1024..=1_000_000_000;

/// What a tree is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Medium {
    /// A file system of its own.
    Disk {
        /// Cap on its bytes, in MiB.
        mib: u64,
        /// Cap on its files, directories and links.
        files: u64,
    },
    /// A directory below one of the operator's list, by that one's name. What caps it is its own file system.
    Directory {
        /// The name in the list.
        name: String,
    },
}

/// What pepod asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumePlan {
    /// Which it will be.
    pub id: VolumeId,
    /// Whose, by number: below [`UidBlock::TREES`]. Trees of one owner have the same ids.
    pub owner: u16,
    /// What of.
    pub medium: Medium,
}

impl VolumePlan {
    /// Checks every bound.
    ///
    /// # Errors
    /// [`Error::Plan`] with the first that does not hold.
    pub fn check(&self) -> Result<(), Error> {
        if self.owner >= UidBlock::TREES {
            return Err(Error::Plan(format!("owner {} is not below {}", self.owner, UidBlock::TREES)));
        }
        if let Medium::Disk { mib, files } = self.medium {
            for (field, value, range) in [("mib", mib, &VOLUME_MIB), ("files", files, &VOLUME_FILES)] {
                if !range.contains(&value) {
                    let (low, high) = (range.start(), range.end());
                    return Err(Error::Plan(format!("{field} is {value}, outside {low}..={high}")));
                }
            }
        }
        Ok(())
    }
}

/// The files a tree may have when it has grown: as many for each byte as before, which is how ext4 grows.
pub fn files_after(files: u64, mib: u64, grown_mib: u64) -> u64 {
    let grown = u128::from(files) * u128::from(grown_mib) / u128::from(mib.max(1));
    u64::try_from(grown).unwrap_or(u64::MAX).clamp(files, *VOLUME_FILES.end())
}

/// What a tree uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeUsage {
    /// Bytes its files may have in all, and have.
    pub bytes: u64,
    /// Of them, those in use.
    pub bytes_used: u64,
    /// Files it may have.
    pub files: u64,
    /// Of them, those it has.
    pub files_used: u64,
    /// Bytes of the host's disk that it takes.
    pub allocated: u64,
    /// Whether bytes and files are capped for this tree alone.
    pub capped: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(mib: u64, files: u64) -> VolumePlan {
        VolumePlan { id: VolumeId::new([7; 16]), owner: 0, medium: Medium::Disk { mib, files } }
    }

    #[test]
    fn a_plan_is_checked() {
        plan(16, 1024).check().expect("small");
        plan(16_000_000, 1_000_000_000).check().expect("large");
        for bad in [plan(15, 1024), plan(16, 1023), plan(u64::MAX, 1024), plan(16, u64::MAX)] {
            assert!(bad.check().is_err(), "{bad:?} was taken");
        }
        assert!(VolumePlan { owner: UidBlock::TREES, ..plan(16, 1024) }.check().is_err());
        let text = serde_json::to_string(&plan(16, 1024)).expect("json");
        assert_eq!(serde_json::from_str::<VolumePlan>(&text).expect("plan"), plan(16, 1024));
    }
}
