//! The keeper: one process per Sandbox, born in its cgroup, pid 1 of its pid namespace, parent of VMM and vsock device.
//!
//! Started by the privileged side as `pepod keeper --fd 0`, with its [`Order`] on a socket that is its standard input. It has one thread, uses no
//! runtime, and once both programs run it has no capability, no root directory and a uid of its own; only then does it read
//! what a guest chose (console, control connection). It outlives pepod and the privileged side; its death is the death of
//! everything in its pid namespace.
//!
//! ```text
//! order ─▶ join the cgroup ─▶ namespaces ─▶ vsock device ─▶ VMM ─▶ give up all rights ─▶ "running" ─▶ keep ─▶ exit.json
//! ```
//! Firecracker has its streams within, comes with a jailer, and is told over an API: [`official`]. Its guest begins after
//! the rights are gone.

mod calls;
mod console;
mod filter;
mod official;
mod record;
mod start;
mod watch;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::host::wire;
use crate::id::{Uids, process};
use crate::plan::StatePath;
use crate::vmm::Boot;
use crate::vmm::closure::Closure;

pub(crate) use calls::give;
pub use console::{Console, escape};
pub(crate) use start::connect;

pub use record::{ExitRecord, Left, Shutdown};

/// What a keeper is told, beside descriptors in this order: kernel, initramfs, root file system, scratch disk, the keeper's
/// own directory, the file that counts kills for memory, then the network device where the boot has one (its tap, or
/// the namespace in which it opens it), then the
/// cgroup's doors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    /// The Sandbox's directory.
    pub directory: PathBuf,
    /// The state directory, below which the kernel's and the initramfs' files are, and where there.
    pub state: PathBuf,
    /// The kernel's path.
    pub kernel: StatePath,
    /// The initramfs' path.
    pub initramfs: StatePath,
    /// The name of its cgroup in every hierarchy.
    pub cgroup: String,
    /// How many hierarchies there are.
    pub hierarchies: usize,
    /// Its uids.
    pub uids: Uids,
    /// What to boot; kernel and initramfs are filled in by the keeper.
    pub boot: Boot,
    /// The rate of this machine's time stamp counter, in kHz.
    pub tsc_khz: Option<u64>,
    /// What runs it.
    pub programs: Programs,
}

/// The foreign programs of a Sandbox.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Programs {
    /// QEMU; the first four descriptors are files.
    Qemu {
        /// The VMM.
        qemu: Closure,
        /// The vsock device.
        vsock_device: Closure,
    },
    /// Firecracker; the first four descriptors are trees to be mounted.
    Firecracker {
        /// The VMM with its jailer.
        firecracker: Closure,
        /// What the jailer is to call it: 32 hex digits.
        id: String,
    },
}

/// Descriptors in an [`Order`] before the doors.
pub(crate) const FIXED_FDS: usize = 6;

/// What a keeper says to the privileged side, once.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    /// Both programs run, and the keeper has no rights left.
    Running,
    /// They do not.
    Failed {
        /// What was tried.
        step: String,
        /// The whole chain of reasons.
        reason: String,
    },
}

/// Why a keeper cannot keep.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub(crate) struct Error {
    step: String,
    #[source]
    source: io::Error,
}

impl Error {
    fn new(step: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Error { step: step.into(), source: source.into() }
    }
}

/// Adds what was tried.
fn tried<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Error {
    move |source| Error::new(step, source)
}

/// The whole life of a keeper, from the socket its order comes on. Returns this process' exit code.
pub fn run(socket: OwnedFd) -> u8 {
    // A name that cannot be set is a name not shown, no more.
    let _ = std::ffi::CString::new(process::KEEPER).map(|name| rustix::thread::set_name(&name));
    // What whoever started pepod left open is nothing for a Sandbox.
    let ours = socket.as_raw_fd();
    let _ = crate::sys::close_range(3, ours.max(3) - 1);
    let _ = crate::sys::close_range(ours.max(2) + 1, i32::MAX);
    let (mut kept, said) = match start::start(&socket) {
        Ok(kept) => (Some(kept), Said::Running),
        Err(error) => (None, Said::Failed { step: error.step.clone(), reason: error.source.to_string() }),
    };
    // Whether anybody still listens does not matter: a Sandbox without its privileged side is adopted by the next.
    let _ = wire::send(socket.as_fd(), &said, &[]);
    drop(socket);
    match kept.take() {
        Some(kept) => kept.keep(),
        None => 1,
    }
}
