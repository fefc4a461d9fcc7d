//! How a keeper starts a Firecracker: the root for its jailer, the jailer, the API up to but not including the start.
//!
//! Everything here happens with the keeper's rights and before there is a guest: what Firecracker answers by then depends on
//! nothing that a guest chose. The start itself is asked for when all rights are gone ([`super::watch::Kept::begin`]).

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Gid, Mode, OFlags, Uid};
use rustix::mount::{MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

use super::start::{LISTEN_WITHIN, LOOK, Started, connect, launch, pipe, stream_pair};
use super::watch::{Control, Program};
use super::{Error, Order, tried};
use crate::chain;
use crate::id::file;
use crate::net::slot;
use crate::vmm::closure::Closure;
use crate::vmm::firecracker::{self, api::Api};

/// How long a call before the start may take. Each takes less than a millisecond; opening a tap on a busy host 2.
const CALL_WITHIN: Duration = Duration::from_secs(20);

/// Room in the root beside the program's copy.
const ROOM: u64 = 1 << 20;

/// What is mounted in the root, and may not be more than looked at but for the last.
pub(super) struct Trees {
    pub kernel: OwnedFd,
    pub initramfs: OwnedFd,
    pub system: OwnedFd,
    pub scratch: OwnedFd,
}

/// Starts jailer and VMM, and says everything there is to say before the guest begins.
pub(super) fn start(
    order: &Order,
    closure: &Closure,
    id: &str,
    network: Option<OwnedFd>,
    trees: Trees,
) -> Result<Started, Error> {
    let base = order.directory.join(file::BOOT);
    let uid = order.uids.vmm;
    let root = make_root(&base, closure, id, uid)?;
    let log = make_log(&root, uid)?;
    for (name, tree, flags) in [
        (firecracker::KERNEL, &trees.kernel, MountFlags::RDONLY),
        (firecracker::INITRD, &trees.initramfs, MountFlags::RDONLY),
        (firecracker::SYSTEM, &trees.system, MountFlags::RDONLY),
        (firecracker::SCRATCH, &trees.scratch, MountFlags::empty()),
    ] {
        attach(tree, &root.join(name), flags)?;
    }
    drop(trees);

    let (console, console_end) = stream_pair()?;
    let (said, said_end) = pipe()?;
    let spec = firecracker::command(closure, &order.boot, &base, id, console_end.as_raw_fd(), said_end.as_raw_fd());
    let mut vmm = within(network, || launch("start the VMM", &spec))?;
    drop((console_end, said_end));

    let deadline = Instant::now() + LISTEN_WITHIN;
    let stream = loop {
        match dial(&root, uid) {
            Ok(stream) => break stream,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {}
            // The jailer has made the directory and not given it away yet.
            Err(error) if error.kind() == io::ErrorKind::Other => {}
            Err(error) => return Err(Error::new("connect to the VMM", error)),
        }
        if let Some(status) = vmm.try_wait().map_err(tried("wait for the VMM"))? {
            let why = super::watch::said(said.as_fd());
            let log = super::watch::said(log.as_fd());
            return Err(Error::new("start the VMM", io::Error::other(format!("{status}: {why} {log}"))));
        }
        if Instant::now() >= deadline {
            return Err(Error::new("wait for the VMM", io::ErrorKind::TimedOut));
        }
        std::thread::sleep(LOOK);
    };
    let mut api = Api::new(stream).map_err(tried("connect to the VMM"))?;
    firecracker::configure(&mut api, &order.boot, CALL_WITHIN)
        .map_err(|error| Error::new("configure the VMM", io::Error::other(chain(&error))))?;
    let vmm = Program::new(vmm, vec![said, log]).map_err(tried("watch the VMM"))?;
    leave_root(&base, &root.join(firecracker::RUN))?;
    Ok(Started { vmm, device: None, console: console.into(), control: Control::Api(api) })
}

/// Starts something in a Sandbox's network namespace, where its rules hold, and comes back to the empty one.
fn within<T>(network: Option<OwnedFd>, start: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let Some(network) = network else { return start() };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let empty = rustix::fs::open("/proc/thread-self/ns/net", flags, Mode::empty());
    let empty = empty.map_err(tried("open the empty namespace"))?;
    slot::enter(network.as_fd()).map_err(tried("enter the network's namespace"))?;
    let started = start();
    slot::enter(empty.as_fd()).map_err(tried("go back to the empty namespace"))?;
    started
}

/// An empty root on a file system that this namespace alone has: large enough for the program's copy, no more.
fn make_root(base: &Path, closure: &Closure, id: &str, uid: u32) -> Result<PathBuf, Error> {
    let step = || tried("make the root");
    let program = std::fs::metadata(closure.root.join(firecracker::PROGRAM)).map_err(step())?.len();
    let options = format!("size={},nr_inodes=64,mode=0755", program + ROOM);
    let options =
        std::ffi::CString::new(options).map_err(|error| Error::new("make the root", io::Error::other(error)))?;
    // Device nodes and the program have to work in it.
    rustix::mount::mount("tmpfs", base, "tmpfs", MountFlags::NOSUID, Some(options.as_c_str()))
        .map_err(tried("mount the root"))?;
    let root = firecracker::root(base, id);
    let above = root.parent().unwrap_or(base);
    DirBuilder::new().recursive(true).mode(0o755).create(above).map_err(step())?;
    DirBuilder::new().mode(0o700).create(&root).map_err(step())?;
    // Made here so that it is there to be shown to the host whatever the jailer does; the jailer gives it away again.
    let run = root.join(firecracker::RUN);
    DirBuilder::new().mode(0o700).create(&run).map_err(step())?;
    std::os::unix::fs::chown(&run, Some(uid), Some(uid)).map_err(step())?;
    Ok(root)
}

/// The pipe that takes the VMM's log. Open here in both directions, it never ends and never blocks a writer's opening.
fn make_log(root: &Path, uid: u32) -> Result<OwnedFd, Error> {
    let step = || tried("make the log's pipe");
    let path = root.join(firecracker::LOG);
    rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).map_err(step())?;
    rustix::fs::chown(&path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(uid))).map_err(step())?;
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(step())
}

/// Mounts a tree that the privileged side took from the file it checked: the very file, whatever its path is by now.
fn attach(tree: &OwnedFd, target: &Path, flags: MountFlags) -> Result<(), Error> {
    let step = || tried("mount in the root");
    File::create_new(target).map_err(tried("make a place in the root"))?;
    rustix::mount::move_mount(tree, "", rustix::fs::CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(step())?;
    let fixed = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount_remount(target, fixed | flags | MountFlags::BIND, "").map_err(step())
}

fn dial(root: &Path, uid: u32) -> io::Result<UnixStream> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let run = rustix::fs::open(root.join(firecracker::RUN), flags, Mode::empty())?;
    connect(run.as_fd(), firecracker::API_SOCKET, uid).map(Into::into)
}

/// A root with nothing but the directory of the VMM's sockets, through which the privileged side reaches the guest.
fn leave_root(base: &Path, run: &Path) -> Result<(), Error> {
    let step = || tried("leave the host's root");
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let run = rustix::mount::open_tree(rustix::fs::CWD, run, flags).map_err(step())?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("tmpfs", base, "tmpfs", flags, Some(c"size=4k,nr_inodes=4,mode=0555")).map_err(step())?;
    let place = base.join(firecracker::RUN);
    DirBuilder::new().mode(0o555).create(&place).map_err(tried("make a place for the sockets"))?;
    rustix::mount::move_mount(&run, "", rustix::fs::CWD, &place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(step())?;
    for path in [&*place, base] {
        rustix::mount::mount_remount(path, flags | MountFlags::RDONLY | MountFlags::BIND, "").map_err(step())?;
    }
    rustix::process::chdir(base).map_err(step())?;
    rustix::process::pivot_root(".", ".").map_err(step())?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(step())?;
    rustix::process::chdir("/").map_err(step())
}
