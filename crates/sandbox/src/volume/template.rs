//! How an empty file system is made: once for each size and owner, and copied after that. Called by [`super`].

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::AtFlags;

use super::device::mount_disk;
use super::{Error, USER, Volumes, at, lock};
use crate::disk;
use crate::jail::Access;

/// Empty file systems kept for copying: each costs the host what it has written, some MiB.
const TEMPLATES: usize = 8;

/// Counts changes of how an empty file system is made.
const FORMAT: u32 = 2;

impl Volumes {
    /// An empty file system of that size, made once.
    pub(super) fn template(&self, mib: u64, files: u64, first_uid: u32) -> Result<File, Error> {
        let _alone = lock(&self.templates);
        let directory = self.directory.join("templates");
        let name = format!("{mib}-{files}-{first_uid}-{FORMAT}");
        let path = directory.join(&name);
        match File::open(&path) {
            Ok(file) => return Ok(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at(format!("open {}", path.display()))(error)),
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(at(format!("make {}", directory.display())))?;
        let new = directory.join(format!("{name}.new"));
        let made = self.format(&new, mib, files, first_uid).and_then(|()| {
            fs::rename(&new, &path).map_err(at(format!("rename {}", new.display())))?;
            File::open(&path).map_err(at(format!("open {}", path.display())))
        });
        if made.is_err() {
            let _ = fs::remove_file(&new);
        }
        let made = made?;
        disk::forget_oldest(&directory, TEMPLATES).map_err(at(format!("tidy {}", directory.display())))?;
        Ok(made)
    }

    fn format(&self, path: &Path, mib: u64, files: u64, first_uid: u32) -> Result<(), Error> {
        let step = || format!("make {}", path.display());
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)
            .map_err(at(step()))?;
        file.set_len(size(mib, files)).map_err(at(step()))?;
        let owner = first_uid + USER;
        let options = [
            "-q".to_owned(),
            "-F".to_owned(),
            "-b".to_owned(),
            "4096".to_owned(),
            "-m".to_owned(),
            "0".to_owned(),
            "-I".to_owned(),
            "256".to_owned(),
            "-N".to_owned(),
            files.to_string(),
            "-J".to_owned(),
            format!("size={}", journal_mib(mib)),
            "-O".to_owned(),
            // Named one by one: without its configuration file mkfs makes something like ext2.
            "has_journal,resize_inode,ext_attr,dir_index,filetype,extent,huge_file,flex_bg,uninit_bg,64bit,dir_nlink,\
             extra_isize,large_file,sparse_super,metadata_csum"
                .to_owned(),
            "-E".to_owned(),
            // Tables that are zero stay holes: neither we nor the kernel write them.
            format!(
                "lazy_itable_init=1,lazy_journal_init=1,nodiscard,assume_storage_prezeroed=1,root_owner={owner}:{owner}"
            ),
        ];
        let ran = Command::new(&self.mkfs)
            .args(&options)
            .arg(path)
            .env_clear()
            .env("MKE2FS_CONFIG", "/dev/null")
            .stdin(Stdio::null())
            .output();
        match ran {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                let said: String = String::from_utf8_lossy(&output.stderr).trim().chars().take(400).collect();
                return Err(disk::Error::Mkfs { program: self.mkfs.clone(), said }.into());
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(disk::Error::Missing { program: self.mkfs.clone() }.into());
            }
            Err(error) => return Err(at(format!("run {}", self.mkfs.display()))(error)),
        }
        // What mkfs puts into every file system is nobody's here and would be seen by everybody.
        let mounted = mount_disk(&file, Access::Writable).map_err(at(format!("mount {}", path.display())))?;
        match rustix::fs::unlinkat(&mounted, "lost+found", AtFlags::REMOVEDIR) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(at(step())(error)),
        }
        drop(mounted);
        self.wait_until_quiet(&file, super::QUIET_WITHIN).map_err(at(format!("unmount {}", path.display())))
    }
}

/// The file's size for a cap on bytes and files: ext4's tables are not the user's to pay for.
pub(super) fn size(mib: u64, files: u64) -> u64 {
    // Inodes of 256 bytes; a bitmap block for each and a copy of the group table here and there in every 128 MiB.
    let tables = files.saturating_mul(256) + (mib / 128 + 1) * (64 << 10);
    let total = (mib << 20) + tables + (journal_mib(mib) << 20) + (4 << 20);
    // Each copy of the group table has room to grow a thousandfold, 4 MiB at the most.
    let groups = total / GROUP + 1;
    let total = total + copies(groups) * (groups * 1024 * 64).min(4 << 20);
    total.next_multiple_of(1 << 20)
}

/// Bytes of a group of ext4.
const GROUP: u64 = 128 << 20;

/// Groups with a copy of the group table: the first two and those that are a power of 3, 5 or 7.
fn copies(groups: u64) -> u64 {
    let powers = |base: u64| std::iter::successors(Some(base), move |power| power.checked_mul(base));
    let of = |base| powers(base).take_while(|power| *power < groups).count() as u64;
    groups.min(2) + of(3) + of(5) + of(7)
}

fn journal_mib(mib: u64) -> u64 {
    (mib / 32).clamp(4, 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_not_the_users_to_pay_for() {
        assert!(size(10 * 1024, 1 << 20) >= (10 << 30) + (256 << 20));
        assert!(size(16, 1024) < 32 << 20);
        // 49 and 27, 25, 9, 7, 5, 3, 1, 0 of 80 groups.
        assert_eq!((copies(1), copies(2), copies(80)), (1, 2, 9));
    }
}
