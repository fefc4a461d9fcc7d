//! The tree that becomes an Image's root file system, and the file system itself: what makes the same packages the same
//! bytes. Called by the builder.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps};

/// Removes what a build leaves of its time and place.
///
/// # Errors
/// A file cannot be removed or written.
pub fn tidy(tree: &Path) -> io::Result<()> {
    for directory in ["tmp", "var/tmp", "run", "dev", "proc", "sys", "var/log", "var/lib/apt/lists", "var/cache/apt"] {
        empty(&tree.join(directory))?;
    }
    for directory in ["var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/log/apt"] {
        fs::create_dir_all(tree.join(directory))?;
    }
    for file in [
        "etc/hostname",
        "etc/resolv.conf",
        "etc/.pwd.lock",
        "etc/passwd-",
        "etc/group-",
        "etc/shadow-",
        "etc/gshadow-",
        "etc/subuid-",
        "etc/subgid-",
        "var/cache/ldconfig/aux-cache",
        "var/cache/debconf/config.dat-old",
        "var/cache/debconf/templates.dat-old",
        "var/lib/dpkg/status-old",
        "var/lib/dpkg/available-old",
        "var/lib/dpkg/diversions-old",
        "var/lib/dpkg/statoverride-old",
        "var/lib/systemd/random-seed",
        "var/lib/dbus/machine-id",
    ] {
        match fs::remove_file(tree.join(file)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    // Empty, not absent: the first says "not chosen yet", the second is an error to some programs.
    fs::write(tree.join("etc/machine-id"), "")?;
    fs::write(tree.join("etc/resolv.conf"), "")?;
    // The third field is the day on which a password was last changed: that of the build. Debian's minimum has no such file.
    let shadow = tree.join("etc/shadow");
    let text = match fs::read_to_string(&shadow) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let lines = text.lines().map(|line| {
        let mut fields: Vec<&str> = line.split(':').collect();
        if let Some(day) = fields.get_mut(2).filter(|day| !day.is_empty()) {
            *day = "19000";
        }
        fields.join(":") + "\n"
    });
    fs::write(&shadow, lines.collect::<String>())
}

fn empty(directory: &Path) -> io::Result<()> {
    let there = match fs::read_dir(directory) {
        Ok(there) => there,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in there {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Everything below, each directory before what is in it, the tree itself included.
fn walk(path: &Path, each: &mut impl FnMut(&Path, &fs::Metadata) -> io::Result<()>) -> io::Result<()> {
    let seen = fs::symlink_metadata(path)?;
    each(path, &seen)?;
    if seen.is_dir() {
        for entry in fs::read_dir(path)? {
            walk(&entry?.path(), each)?;
        }
    }
    Ok(())
}

/// Gives everything that the build made (it is younger than the build's start) the time of the newest thing it did not make.
/// Files of packages keep theirs, since compiled Python names the time of its source. Returns that time, in seconds.
///
/// # Errors
/// A file cannot be looked at or changed.
pub fn settle_times(tree: &Path, started: SystemTime) -> io::Result<u64> {
    let started = started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut newest = 0;
    walk(tree, &mut |_, seen| {
        let time = u64::try_from(seen.mtime()).unwrap_or(0);
        if time < started && !seen.is_dir() {
            newest = newest.max(time);
        }
        Ok(())
    })?;
    let time = Timespec { tv_sec: i64::try_from(newest).unwrap_or(0), tv_nsec: 0 };
    walk(tree, &mut |path, seen| {
        // Directories change whenever something is put into them: theirs never come out of a package.
        let ours = seen.is_dir() || u64::try_from(seen.mtime()).is_ok_and(|time| time >= started);
        let time = match ours {
            true => time,
            // Fractions of a second come and go with the file system the packages were made on.
            false => Timespec { tv_sec: seen.mtime(), tv_nsec: 0 },
        };
        let times = Timestamps { last_access: time, last_modification: time };
        Ok(rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    })?;
    Ok(newest)
}

/// About what an uncompressed file system of the tree takes, bytes.
///
/// # Errors
/// A file cannot be looked at.
pub fn size(tree: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    walk(tree, &mut |_, seen| {
        let linked = if seen.is_dir() { 1 } else { seen.nlink().max(1) };
        bytes += (seen.len().next_multiple_of(4096) + 64 + 64) / linked;
        Ok(())
    })?;
    Ok(bytes)
}

/// Sets the build time in the superblock of an erofs, and its checksum.
///
/// # Errors
/// The file is not an erofs as `mkfs.erofs` makes it, or cannot be written.
pub fn set_build_time(image: &Path, epoch: u64) -> io::Result<()> {
    // Offsets in the superblock, which lies 1024 bytes into the first block.
    const START: u64 = 1024;
    const MAGIC: [u8; 4] = 0xe0f5_e1e2_u32.to_le_bytes();
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("not an erofs as expected: {what}"));
    let file = File::options().read(true).write(true).open(image)?;
    let mut block = vec![0; 4096];
    file.read_exact_at(&mut block, 0)?;
    let sb = &mut block[START as usize..];
    if sb[..4] != MAGIC {
        return Err(wrong("magic number"));
    }
    if sb[12] != 12 {
        return Err(wrong("block size"));
    }
    sb[24..32].copy_from_slice(&epoch.to_le_bytes());
    sb[32..36].fill(0);
    // Feature bit 0: the checksum covers the first block from the superblock on, itself taken as zero.
    if sb[8] & 1 != 0 {
        sb[4..8].fill(0);
        let sum = crc32c(sb);
        sb[4..8].copy_from_slice(&sum.to_le_bytes());
    }
    file.write_all_at(&sb[..128], START)
}

/// Castagnoli's, without the final complement: as erofs wants it.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut sum = u32::MAX;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg());
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_of_packages_stay_and_those_of_the_build_go() {
        let dir = tempfile::tempdir().expect("dir");
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).expect("make");
        let old = tree.join("old");
        fs::write(&old, "x").expect("write");
        let time = Timespec { tv_sec: 1_000_000, tv_nsec: 5 };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, &old, &times, AtFlags::empty()).expect("time");
        fs::write(tree.join("new"), "x").expect("write");
        std::os::unix::fs::symlink("nowhere", tree.join("link")).expect("link");
        let started = SystemTime::now() - Duration::from_secs(100);
        assert_eq!(settle_times(&tree, started).expect("settled"), 1_000_000);
        walk(&tree, &mut |path, seen| {
            assert_eq!((seen.mtime(), seen.mtime_nsec()), (1_000_000, 0), "{}", path.display());
            Ok(())
        })
        .expect("walk");
    }

    #[test]
    fn the_checksum_is_castagnolis() {
        assert_eq!(!crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn the_time_of_a_file_system_is_set() {
        let dir = tempfile::tempdir().expect("dir");
        let image = dir.path().join("image");
        let mut bytes = vec![7; 8192];
        bytes[1024..1028].copy_from_slice(&0xe0f5_e1e2_u32.to_le_bytes());
        bytes[1032] = 1;
        bytes[1036] = 12;
        fs::write(&image, &bytes).expect("write");
        set_build_time(&image, 0x0102_0304).expect("set");
        let got = fs::read(&image).expect("read");
        assert_eq!(got[1048..1056], 0x0102_0304_u64.to_le_bytes());
        let sum: [u8; 4] = got[1028..1032].try_into().expect("four");
        let mut block = got[1024..4096].to_vec();
        block[4..8].fill(0);
        assert_eq!(u32::from_le_bytes(sum), crc32c(&block));
        assert_eq!(got[4096..], bytes[4096..]);
        fs::write(&image, vec![0; 8192]).expect("write");
        assert!(set_build_time(&image, 1).is_err());
    }
}
