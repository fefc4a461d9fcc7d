//! How a keeper starts what it keeps: everything that needs rights, up to the moment it gives them up.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit};

use super::calls::{self, Calls};
use super::official::{self, Trees};
use super::watch::{Control, Device, Kept, Program};
use super::{Error, FIXED_FDS, Order, Programs, tried};
use crate::cgroup;
use crate::chain;
use crate::host::wire;
use crate::id::file;
use crate::jail;
use crate::plan::StatePath;
use crate::proc;
use crate::rights;
use crate::sys;
use crate::vmm::{Descriptors, clock, qemu, vsock};

/// The launcher of jails: this very program, even if its file has been replaced meanwhile.
const LAUNCHER: &str = "/proc/self/exe";

/// How long the vsock device may take to listen: a start of 20 ms, on a machine with twenty others starting.
pub(super) const LISTEN_WITHIN: Duration = Duration::from_secs(20);

/// The largest file a keeper writes: its console ring has 256 KiB, its record a few.
const LARGEST_FILE: u64 = 1 << 20;

/// Descriptors a keeper has: about 12, and the calls that it holds.
const OPEN_FILES: u64 = 64 + calls::MOST as u64;

/// How long between two looks for its socket.
pub(super) const LOOK: Duration = Duration::from_millis(2);

/// Takes the order and carries it out.
pub(super) fn start(socket: &OwnedFd) -> Result<Kept, Error> {
    let received = wire::receive::<Order>(socket.as_fd(), &mut Vec::new()).map_err(tried("read the order"))?;
    let Some((mut order, fds)) = received else {
        return Err(Error::new("read the order", io::ErrorKind::UnexpectedEof));
    };
    let mut fds = fds.into_iter();
    let mut next = || fds.next().ok_or_else(|| Error::new("read the order", io::ErrorKind::InvalidData));
    let [kernel, initramfs, root, disk, keep, oom] = [next()?, next()?, next()?, next()?, next()?, next()?];
    const { assert!(FIXED_FDS == 6) }
    let tap = order.boot.interface.is_some().then(next).transpose()?;
    proc::yield_to_host().map_err(tried("come after the host's own"))?;
    cgroup::join(fds, &order.cgroup, order.hierarchies).map_err(tried("join the cgroup"))?;
    namespaces()?;
    clock::measured(order.tsc_khz);
    let console_ring = open_ring(&keep, order.uids.keeper)?;
    let started = match &order.programs {
        Programs::Qemu { .. } => {
            order.boot.kernel = mount_file(&order, &order.kernel, "kernel", &kernel)?;
            order.boot.initrd = mount_file(&order, &order.initramfs, "initrd", &initramfs)?;
            start_qemu(&order, root, disk, tap)?
        }
        Programs::Firecracker { firecracker, id } => {
            official::start(&order, firecracker, id, tap, Trees { kernel, initramfs, system: root, scratch: disk })?
        }
    };
    for (what, most) in [(Resource::Fsize, LARGEST_FILE), (Resource::Core, 0), (Resource::Nofile, OPEN_FILES)] {
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        rustix::process::setrlimit(what, limit).map_err(tried("limit the keeper"))?;
    }
    rights::become_user(order.uids.keeper, order.uids.keeper).map_err(tried("give up all rights"))?;
    let mut kept = Kept::new(started, console_ring, keep, oom.into())?;
    super::filter::enter().map_err(tried("forbid all other system calls"))?;
    // From here on, and not before, what a guest chose may be looked at.
    kept.begin()?;
    Ok(kept)
}

/// What runs now, and what the keeper keeps of it.
pub(super) struct Started {
    pub vmm: Program,
    pub device: Option<Device>,
    pub console: UnixStream,
    pub control: Control,
}

fn start_qemu(order: &Order, root: OwnedFd, disk: OwnedFd, tap: Option<OwnedFd>) -> Result<Started, Error> {
    let Programs::Qemu { qemu: program, vsock_device } = &order.programs else {
        return Err(Error::new("read the order", io::ErrorKind::InvalidData));
    };
    // The two programs begin side by side: the VMM's launcher has everything but a device that answers.
    let (device_log, device_log_end) = pipe()?;
    let directory = order.directory.join(file::VSOCK);
    let spec = vsock::command(vsock_device, directory.clone(), order.uids.vsock, device_log_end.as_raw_fd());
    let mut device = launch("start the vsock device", &spec)?;
    drop(device_log_end);

    let vhost = unconnected().map_err(tried("make a socket"))?;
    let (gate, gate_open) = pipe()?;
    let (console, console_end) = stream_pair()?;
    let (control, control_end) = stream_pair()?;
    let (vmm_log, vmm_log_end) = pipe()?;
    let descriptors = Descriptors {
        system: root.as_raw_fd(),
        scratch: disk.as_raw_fd(),
        console: console_end.as_raw_fd(),
        control: control_end.as_raw_fd(),
        vsock: vhost.as_raw_fd(),
        tap: tap.as_ref().map(AsRawFd::as_raw_fd),
        log: vmm_log_end.as_raw_fd(),
        gate: Some(gate.as_raw_fd()),
    };
    let spec = qemu::command(program, &order.boot, &descriptors);
    let mut vmm = launch("start the VMM", &spec)?;
    drop((root, disk, tap, console_end, control_end, vmm_log_end, gate));
    connect_device(&vhost, &directory, order.uids.vsock, &mut device, &device_log)?;
    drop((vhost, gate_open));
    // It greets once it is in its jail; until then its launcher shares our mounts. The greeting itself is read later.
    greeted(&control, &mut vmm, &vmm_log)?;

    let program = Program::new(device, vec![device_log]).map_err(tried("watch the vsock device"))?;
    let calls = Calls::bind(&order.directory).map_err(tried("make a place for calls"))?;
    let vmm = Program::new(vmm, vec![vmm_log]).map_err(tried("watch the VMM"))?;
    leave_root(&order.directory)?;
    Ok(Started {
        vmm,
        device: Some(Device { program, calls }),
        console: console.into(),
        control: Control::Qmp(control.into()),
    })
}

/// Own mounts, an empty network, own IPC and host name. The pid namespace is there already: this is its first process.
fn namespaces() -> Result<(), Error> {
    if std::process::id() != 1 {
        return Err(Error::new("look at the pid namespace", io::Error::other("not its first process")));
    }
    let flags = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    sys::unshare(flags).map_err(tried("leave the host's namespaces"))?;
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(tried("make mounts private"))?;
    rustix::system::sethostname(b"sandbox").map_err(tried("set the host name"))
}

/// Gives a boot file a path that only this namespace has, since a path of the state directory could be another file by now.
/// A descriptor opened outside cannot be bound inside, so the file is opened once more and seen to be the one that was checked.
fn mount_file(order: &Order, path: &StatePath, name: &'static str, checked: &OwnedFd) -> Result<PathBuf, Error> {
    let place = order.directory.join(file::BOOT);
    let target = place.join(name);
    if rustix::fs::statfs(&place).map_err(tried("look at the boot directory"))?.f_type != TMPFS {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        rustix::mount::mount("tmpfs", &place, "tmpfs", flags, Some(c"size=64k,mode=0755"))
            .map_err(tried("mount the boot directory"))?;
    }
    File::create_new(&target).map_err(tried("make a place for a boot file"))?;
    let state = rustix::fs::open(&order.state, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
        .map_err(tried("open the state directory"))?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let again =
        rustix::fs::openat2(&state, path.as_str(), flags, Mode::empty(), resolve).map_err(tried("open a boot file"))?;
    let [ours, theirs] = [checked, &again].map(rustix::fs::fstat);
    let (ours, theirs) = (ours.map_err(tried("look at a boot file"))?, theirs.map_err(tried("look at a boot file"))?);
    if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino) {
        return Err(Error::new("bind a boot file", io::Error::other(format!("{path} was replaced"))));
    }
    rustix::mount::mount_bind(format!("/proc/self/fd/{}", again.as_raw_fd()), &target)
        .map_err(tried("bind a boot file"))?;
    Ok(target)
}

/// `TMPFS_MAGIC`.
const TMPFS: i64 = 0x0102_1994;

fn open_ring(keep: &OwnedFd, owner: u32) -> Result<File, Error> {
    let step = || tried("make the console ring");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let ring = rustix::fs::openat(keep, file::CONSOLE, flags, Mode::from_raw_mode(0o600)).map_err(step())?;
    let (uid, gid) = (rustix::fs::Uid::from_raw(owner), rustix::fs::Gid::from_raw(owner));
    rustix::fs::fchown(&ring, Some(uid), Some(gid)).map_err(step())?;
    Ok(ring.into())
}

pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd), Error> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(tried("make a pipe"))
}

pub(super) fn stream_pair() -> Result<(OwnedFd, OwnedFd), Error> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(tried("make a socket pair"))
}

pub(super) fn launch(step: &'static str, spec: &jail::Spec) -> Result<Child, Error> {
    jail::launch(Path::new(LAUNCHER), spec).map_err(|error| Error::new(step, io::Error::other(chain(&error))))
}

/// Waits until the device listens for its VMM, and connects. The directory is the device's to change, so it is entered as
/// hostile: no link is followed, and whoever answers must have the device's uid.
fn connect_device(
    stream: &OwnedFd,
    directory: &Path,
    uid: u32,
    device: &mut Child,
    log: &OwnedFd,
) -> Result<(), Error> {
    let step = "connect the vsock device";
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags, Mode::empty()).map_err(tried(step))?;
    let deadline = Instant::now() + LISTEN_WITHIN;
    loop {
        match connect_to(stream, directory.as_fd(), vsock::DEVICE_SOCKET, uid) {
            Ok(()) => return Ok(()),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {}
            Err(error) => return Err(Error::new(step, error)),
        }
        if let Some(status) = device.try_wait().map_err(tried(step))? {
            let said = super::watch::said(log.as_fd());
            return Err(Error::new("start the vsock device", io::Error::other(format!("{status}: {said}"))));
        }
        if Instant::now() >= deadline {
            return Err(Error::new(step, io::ErrorKind::TimedOut));
        }
        std::thread::sleep(LOOK);
    }
}

/// Waits until the VMM has something to say on its control connection.
fn greeted(control: &OwnedFd, vmm: &mut Child, log: &OwnedFd) -> Result<(), Error> {
    let deadline = Instant::now() + LISTEN_WITHIN;
    loop {
        let mut fds = [PollFd::new(control, PollFlags::IN)];
        let ready = match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 })) {
            Ok(ready) => ready > 0,
            Err(rustix::io::Errno::INTR) => false,
            Err(error) => return Err(Error::new("wait for the VMM", error)),
        };
        if let Some(status) = vmm.try_wait().map_err(tried("wait for the VMM"))? {
            let said = super::watch::said(log.as_fd());
            return Err(Error::new("start the VMM", io::Error::other(format!("{status}: {said}"))));
        }
        if ready {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(Error::new("wait for the VMM", io::ErrorKind::TimedOut));
        }
    }
}

/// A stream to a socket in a directory that somebody else owns: opened beneath it without following anything, seen to be a
/// socket of that uid, connected through the descriptor, and answered by that uid.
pub(crate) fn connect(directory: BorrowedFd<'_>, name: &str, uid: u32) -> io::Result<OwnedFd> {
    let stream = unconnected()?;
    connect_to(&stream, directory, name, uid)?;
    Ok(stream)
}

fn unconnected() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

fn connect_to(stream: &OwnedFd, directory: BorrowedFd<'_>, name: &str, uid: u32) -> io::Result<()> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&found)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || stat.st_uid != uid {
        return Err(io::Error::other(format!("{name} is not a socket of uid {uid}")));
    }
    let address = rustix::net::SocketAddrUnix::new(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
    rustix::net::connect(stream, &address)?;
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    if peer.uid.as_raw() != uid {
        return Err(io::Error::other(format!("{name} is answered by uid {}", peer.uid.as_raw())));
    }
    rustix::io::ioctl_fionbio(stream, false)?;
    Ok(())
}

/// An empty root: what is still needed is held by descriptor.
fn leave_root(directory: &Path) -> Result<(), Error> {
    let step = || tried("leave the host's root");
    let root = directory.join(file::BOOT);
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    // Over the boot files, which the VMM's own namespace has by now or has a copy of: the launcher copied this namespace
    // when it was entered, so what is mounted here later is ours alone.
    rustix::mount::mount("tmpfs", &root, "tmpfs", flags, Some(c"size=4k,mode=0555")).map_err(step())?;
    rustix::process::chdir(&root).map_err(step())?;
    rustix::process::pivot_root(".", ".").map_err(step())?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(step())?;
    rustix::process::chdir("/").map_err(step())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_is_reached_only_if_it_is_the_one_meant() {
        let place = tempfile::tempdir().expect("directory");
        let ours = rustix::process::geteuid().as_raw();
        let directory = File::open(place.path()).expect("open");
        let _listener = UnixListener::bind(place.path().join("real")).expect("bind");
        connect(directory.as_fd(), "real", ours).expect("the real one");
        let refused = |name: &str, uid| connect(directory.as_fd(), name, uid).expect_err(name);
        refused("real", ours + 1);
        symlink(place.path().join("real"), place.path().join("link")).expect("link");
        refused("link", ours);
        std::fs::create_dir(place.path().join("below")).expect("directory");
        symlink(place.path(), place.path().join("below/up")).expect("link");
        refused("below/up/real", ours);
        refused("../real", ours);
        std::fs::write(place.path().join("file"), "x").expect("file");
        refused("file", ours);
        assert_eq!(refused("absent", ours).kind(), io::ErrorKind::NotFound);
    }
}
