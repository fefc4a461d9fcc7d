//! Loop devices: how a file of the host's becomes a disk, and a disk a mount. Called by [`super`].

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use crate::jail::Access;
use crate::sys;

/// Tries for a loop device that another process takes first.
const LOOPS: usize = 64;

/// The loop device that has this file as its disk, if one does. Looked for among all there are: no record of ours can be
/// wrong about it.
pub(super) fn device_of(backing: &File) -> io::Result<Option<(OwnedFd, PathBuf)>> {
    let meta = backing.metadata()?;
    for entry in fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        let Some(name) = name.to_str().filter(|name| name.starts_with("loop")) else { continue };
        if !Path::new("/sys/block").join(name).join("loop/backing_file").exists() {
            continue;
        }
        let path = Path::new("/dev").join(name);
        let Ok(device) = open_device(&path) else { continue };
        if sys::disk::backing(device.as_fd()).ok().flatten() == Some((meta.dev(), meta.ino())) {
            return Ok(Some((device, path)));
        }
    }
    Ok(None)
}

fn open_device(path: &Path) -> io::Result<OwnedFd> {
    let device = rustix::fs::open(path, OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&device)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => Ok(device),
        _ => Err(io::Error::other(format!("{} is not a disk", path.display()))),
    }
}

/// Mounts a tree's file, by way of a loop device that goes with its last mount. The caller has the tree's turn.
pub(super) fn mount_disk(backing: &File, access: Access) -> io::Result<OwnedFd> {
    // Held until it is mounted: a device that nobody has open is not the tree's any more.
    let (_device, path) = match device_of(backing)? {
        Some(found) => found,
        None => attach(backing)?,
    };
    let fs = rustix::mount::fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&fs, "source", &path)?;
    rustix::mount::fsconfig_set_flag(&fs, "noinit_itable")?;
    // Room that comes free is the host's again with the next commit, not only when nobody has the tree any more.
    rustix::mount::fsconfig_set_flag(&fs, "discard")?;
    rustix::mount::fsconfig_set_string(&fs, "errors", "remount-ro")?;
    rustix::mount::fsconfig_create(&fs)?;
    let mut attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    if access == Access::ReadOnly {
        attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    Ok(rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

fn attach(backing: &File) -> io::Result<(OwnedFd, PathBuf)> {
    let control = rustix::fs::open("/dev/loop-control", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let mut last = io::Error::from(io::ErrorKind::ResourceBusy);
    for _ in 0..LOOPS {
        let number = sys::disk::free(control.as_fd())?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        if !path.exists() {
            // Where no devtmpfs makes them.
            let device = rustix::fs::makedev(7, number);
            let mode = Mode::from_raw_mode(0o600);
            match rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::BlockDevice, mode, device) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let device = open_device(&path)?;
        // Without a second copy in memory where the file system below can do that.
        let configured =
            sys::disk::configure(device.as_fd(), backing.as_fd(), true).or_else(|error| match error.raw_os_error() {
                Some(libc::EINVAL) => sys::disk::configure(device.as_fd(), backing.as_fd(), false),
                _ => Err(error),
            });
        match configured {
            Ok(()) => return Ok((device, path)),
            // Another process took it first.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}
