//! How a share server, or a visit, comes into its jail: see [`super`] for who does what. All of it before the first byte of a guest.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid};

use super::bucket::Bucket;
use super::nodes::Nodes;
use super::serve::{self, Running};
use super::tree::Tree;
use super::visit::Visit;
use super::{FIXED_FDS, Handed, Mapped, Order, Said, Task, filter};
use crate::host::wire;
use crate::id::process;
use crate::volume::Lender;
use crate::{cgroup, proc, rights, sys};

/// What root of the user namespace keeps: to make files as whoever asks, and to do with them what root of a guest may do
/// with files. None of it counts for anything that is not of the namespace's ids.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETFCAP);

/// The most descriptors kept for files that are known and not open.
const ROOM: u64 = 8192;

/// The memory that a visit may map, bytes: the window of a compressed archive is at most 128 MiB of it, this program some 40.
const VISIT_MEMORY: u64 = 1 << 30;

/// Descriptors that are neither a known nor an open file's: streams, threads' copies.
const BESIDE: u64 = 64;

type Step<T> = Result<T, (String, io::Error)>;

fn step<T>(what: &str, result: Result<T, impl Into<io::Error>>) -> Step<T> {
    result.map_err(|error| (what.to_owned(), error.into()))
}

/// The whole life of a share server, from the socket its order comes on. Returns this process' exit code.
pub fn run(socket: OwnedFd) -> u8 {
    // A name that cannot be set is a name not shown, no more.
    let _ = std::ffi::CString::new(process::SHARE).map(|name| rustix::thread::set_name(&name));
    let ours = socket.as_raw_fd();
    let _ = sys::close_range(3, ours.max(3) - 1);
    let _ = sys::close_range(ours.max(2) + 1, i32::MAX);
    match begin(&socket) {
        Ok(ready) => {
            // Whether it is heard decides nothing here.
            let _ = wire::send(socket.as_fd(), &Said::Serving, &[]);
            drop(socket);
            match ready {
                Ready::Serving(running) => running.end(),
                Ready::Visiting(visit) => visit.run(),
            }
            .code()
        }
        Err((step, error)) => {
            let said = Said::Failed { step, reason: error.to_string() };
            let _ = wire::send(socket.as_fd(), &said, &[]);
            serve::End::Fault.code()
        }
    }
}

/// What is in its jail, under the last wall.
enum Ready {
    Serving(Running),
    Visiting(Visit),
}

fn begin(socket: &OwnedFd) -> Step<Ready> {
    let received = step("read the order", wire::receive::<Order>(socket.as_fd(), &mut Vec::new()))?;
    let gone = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let (order, fds) = step("read the order", received.ok_or_else(gone))?;
    let mut fds = fds.into_iter();
    let mut next = || step("read the order", fds.next().ok_or_else(gone));
    let [way, tree] = [next()?, next()?];
    const { assert!(FIXED_FDS == 2) }
    step("come after the host's own", proc::yield_to_host())?;
    if let Task::Serve { cgroup, hierarchies, .. } = &order.task {
        step("join the cgroup", cgroup::join(fds, cgroup, *hierarchies))?;
    }
    let null = step("open /dev/null", File::options().write(true).open("/dev/null"))?;
    let null: OwnedFd = null.into();
    let flags = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    step("leave the host's namespaces", sys::unshare(flags))?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    step("make mounts private", rustix::mount::mount_change("/", private))?;
    let files = own_files()?;
    change_root(&order, &tree)?;
    drop(tree);
    match &order.lender {
        Some(lender) => become_lender(lender)?,
        None => {
            step("enter a user namespace (are they allowed on this host?)", sys::unshare(libc::CLONE_NEWUSER))?;
            step("ask for ids", wire::send(socket.as_fd(), &Said::Ready, &[]))?;
            let mapped = step("wait for ids", wire::receive::<Mapped>(socket.as_fd(), &mut Vec::new()))?;
            step("wait for ids", mapped.ok_or_else(gone))?;
            become_its_root()?;
        }
    }
    let (task, memory) = match order.task {
        task @ Task::Serve { .. } => (task, None),
        // Its Sandbox's cgroup caps a server; a visit has none.
        task @ Task::Visit { .. } => (task, Some(VISIT_MEMORY)),
    };
    let open_files = limits(order.open_files, memory)?;
    rustix::process::umask(Mode::empty());

    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = step("open the root", rustix::fs::open("/", flags, Mode::empty()))?;
    let (cache, proof, nodes, io) = match task {
        Task::Serve { cache, proof, nodes, io, .. } => (cache, proof, nodes, io),
        Task::Visit { archive } => {
            let visit = step("take the stream", Visit::new(root, way, archive))?;
            step("enter the system call filter", filter::enter())?;
            return Ok(Ready::Visiting(visit));
        }
    };
    let room = (open_files / 2).min(ROOM);
    let handles = open_files.saturating_sub(room + BESIDE).saturating_sub(super::locks::MOST as u64).max(16);
    let nodes = step("look at the root", Nodes::new(root, room as usize, nodes))?;
    let whose = order.lender.map(|lender| (lender.uid, lender.gid));
    let tree = Tree::new(nodes, files, handles as usize, cache, proof.into_bytes(), whose);
    let bucket = io.map(Bucket::new);
    let handed = step("wait for the stream", wire::receive::<Handed>(way.as_fd(), &mut Vec::new()))?;
    let stream = handed.and_then(|(_, fds)| fds.into_iter().next());
    let stream = step("wait for the stream", stream.ok_or_else(gone))?;
    drop(way);
    let running = Running::begin(tree, stream, null, bucket, serve::PATIENCE, filter::enter);
    Ok(Ready::Serving(step("start threads under the system call filter", running)?))
}

/// `/proc/self/fd` of a procfs that is mounted nowhere and shows processes alone.
fn own_files() -> Step<OwnedFd> {
    let fs = step("open procfs", rustix::mount::fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC))?;
    // Kernels before 5.8 show the rest of /proc too, read-only as everything there is to what we are from here on.
    let _ = rustix::mount::fsconfig_set_string(&fs, "subset", "pid");
    step("make procfs", rustix::mount::fsconfig_create(&fs))?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mount = step("mount procfs", rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    step("open the own descriptors", rustix::fs::openat(&mount, "self/fd", flags, Mode::empty()))
}

/// The tree becomes `/`, and there is nothing else.
fn change_root(order: &Order, tree: &OwnedFd) -> Step<()> {
    let whole = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    step("put the tree in its place", rustix::mount::move_mount(tree, "", CWD, &order.at, whole))?;
    step("enter the tree", rustix::process::chdir(&order.at))?;
    step("make it the root", rustix::process::pivot_root(".", "."))?;
    step("let go of the old root", rustix::mount::unmount(".", UnmountFlags::DETACH))?;
    step("enter the root", rustix::process::chdir("/"))
}

/// From the privileged side's user to whoever lends the tree, with that user's rights and no other.
fn become_lender(lender: &Lender) -> Step<()> {
    let groups: Vec<Gid> = lender.groups.iter().copied().map(Gid::from_raw).collect();
    step("become whoever lends it", rights::become_user_of(lender.uid, lender.gid, &groups))
}

/// From nobody in particular to root of the namespace, which is nobody on the host, with the few rights it keeps.
fn become_its_root() -> Step<()> {
    step("leave all groups", rustix::thread::set_thread_groups(&[]))?;
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    step("become the group", rustix::thread::set_thread_res_gid(gid, gid, gid))?;
    step("become root in there", rustix::thread::set_thread_res_uid(uid, uid, uid))?;
    for capability in 0..64 {
        let one = CapabilitySet::from_bits_retain(1 << capability);
        match rustix::thread::remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // One past the last this kernel has.
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(("empty the bounding set".to_owned(), error.into())),
        }
    }
    // Rights stay as they are when a thread takes the ids of whoever asks: a guest's kernel has checked already.
    let locked = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    step("lock the secure bits", rustix::thread::set_capabilities_secure_bits(locked))?;
    step("empty the ambient set", rustix::thread::clear_ambient_capability_set())?;
    let kept = CapabilitySets { effective: KEPT, permitted: KEPT, inheritable: CapabilitySet::empty() };
    step("drop capabilities", rustix::thread::set_capabilities(None, kept))?;
    step("forbid new rights", rustix::thread::set_no_new_privs(true))
}

/// How many files may be open, as far as it may be raised, how much memory may be mapped, and no core dumps.
fn limits(wanted: u64, memory: Option<u64>) -> Step<u64> {
    let given = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let open_files = wanted.min(given);
    let fixed = [(Resource::Nofile, open_files), (Resource::Core, 0), (Resource::Memlock, 0)];
    for (what, most) in fixed.into_iter().chain(memory.map(|memory| (Resource::As, memory))) {
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        step("set limits", rustix::process::setrlimit(what, limit))?;
    }
    Ok(open_files)
}
