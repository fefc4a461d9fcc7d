//! How a relay comes into its jail. All of it before the first byte of a guest.
//!
//! ```text
//! pepo-host (a thread)                  pepo-relay
//!   setns(keeper), spawn ──────────▶
//!     ── Order + namespace, listener, doors ──▶  cgroup, network namespace, other namespaces, empty root
//!     ◀─ Serving ─────────────────────────────   its uid, no rights, filter; relays until the Sandbox ends
//! ```

use std::ffi::CString;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit};
use rustix::thread::LinkNameSpaceType;
use serde::{Deserialize, Serialize};

use super::control::Control;
use super::pass::{Desk, original};
use super::{CONNECTIONS, filter};
use crate::host::wire;
use crate::id::process;
use crate::{cgroup, proc, rights, sys};

/// Descriptors beside connections: listeners, the runtime's own, the control stream.
const BESIDE: u64 = 32;

/// What a relay is told, beside the descriptors: its network namespace, the listener of its control stream, then the
/// cgroup's doors.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Order {
    /// A directory over which its empty root is put, in its own namespace.
    pub at: PathBuf,
    /// The name of its cgroup in every hierarchy.
    pub cgroup: String,
    /// How many hierarchies there are.
    pub hierarchies: usize,
    /// Its uid.
    pub uid: u32,
    /// Where it listens.
    pub address: Ipv4Addr,
    /// On which port.
    pub port: u16,
}

/// Descriptors in an [`Order`] before the doors.
pub(crate) const FIXED_FDS: usize = 2;

/// What a relay says to the privileged side, once.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    /// It relays, and has no right left.
    Serving,
    /// It does not.
    Failed {
        /// What was tried.
        step: String,
        /// Why it failed.
        reason: String,
    },
}

type Tried<T> = Result<T, (String, io::Error)>;

fn step<T>(what: &str, result: Result<T, impl Into<io::Error>>) -> Tried<T> {
    result.map_err(|error| (what.to_owned(), error.into()))
}

/// The whole life of a relay, from the socket its order comes on. Returns this process' exit code.
pub fn run(socket: OwnedFd) -> u8 {
    // A name that cannot be set is a name not shown, no more.
    let _ = CString::new(process::RELAY).map(|name| rustix::thread::set_name(&name));
    let ours = socket.as_raw_fd();
    let _ = sys::close_range(3, ours.max(3) - 1);
    let _ = sys::close_range(ours.max(2) + 1, i32::MAX);
    let ready = begin(&socket).and_then(|(listener, control)| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = step("start the runtime", runtime)?;
        step("forbid all other system calls", filter::enter())?;
        Ok((runtime, listener, control))
    });
    match ready {
        Ok((runtime, listener, control)) => {
            // Whether it is heard decides nothing here.
            let _ = wire::send(socket.as_fd(), &Said::Serving, &[]);
            drop(socket);
            let local = tokio::task::LocalSet::new();
            match local.block_on(&runtime, relay(listener, control)) {
                Ok(()) => 0,
                Err(_) => 1,
            }
        }
        Err((step, error)) => {
            let said = Said::Failed { step, reason: error.to_string() };
            let _ = wire::send(socket.as_fd(), &said, &[]);
            1
        }
    }
}

async fn relay(listener: TcpListener, control: OwnedFd) -> io::Result<()> {
    let control: std::os::unix::net::UnixListener = control.into();
    let control = tokio::net::UnixListener::from_std(control)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let asked = Rc::new(Control::default());
    let desk = Desk::new(Rc::clone(&asked), original);
    tokio::join!(asked.listen(control), desk.accept(listener));
    Ok(())
}

fn begin(socket: &OwnedFd) -> Tried<(TcpListener, OwnedFd)> {
    let received = step("read the order", wire::receive::<Order>(socket.as_fd(), &mut Vec::new()))?;
    let gone = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let (order, fds) = step("read the order", received.ok_or_else(gone))?;
    let mut fds = fds.into_iter();
    let mut next = || step("read the order", fds.next().ok_or_else(gone));
    let [namespace, control] = [next()?, next()?];
    const { assert!(FIXED_FDS == 2) }
    step("come after the host's own", proc::yield_to_host())?;
    step("join the cgroup", cgroup::join(fds, &order.cgroup, order.hierarchies))?;
    let network = Some(LinkNameSpaceType::Network);
    step("enter the network namespace", rustix::thread::move_into_link_name_space(namespace.as_fd(), network))?;
    drop(namespace);
    let flags = libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    step("leave the host's namespaces", sys::unshare(flags))?;
    let listener = step("listen", TcpListener::bind(SocketAddrV4::new(order.address, order.port)))?;
    step("listen", listener.set_nonblocking(true))?;
    step("listen for pepod", rustix::io::ioctl_fionbio(&control, true))?;
    step("leave the host's root", leave_root(&order.at))?;
    // Two sockets for a connection.
    let open_files = 2 * CONNECTIONS as u64 + BESIDE;
    let given = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    for (what, most) in [(Resource::Fsize, 0), (Resource::Core, 0), (Resource::Nofile, open_files.min(given))] {
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        step("set limits", rustix::process::setrlimit(what, limit))?;
    }
    step("give up all rights", rights::become_user(order.uid, order.uid))?;
    Ok((listener, control))
}

/// An empty root in place of the host's.
fn leave_root(at: &Path) -> io::Result<()> {
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    rustix::mount::mount("tmpfs", at, "tmpfs", flags, Some(c"size=4k,mode=0555"))?;
    rustix::process::chdir(at)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    Ok(rustix::process::chdir("/")?)
}
