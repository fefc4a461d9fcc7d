//! The virtual machine monitor: which one this host gets, what it is told, and how it is spoken to.
//!
//! ```text
//! probe    looks at the host: may hardware virtualization be used, and why (not)
//! closure  the programs and all they load, copied once: the root of their jails
//! clock    the rate of the host's time stamp counter, which the guest is told
//! qemu     Boot + Descriptors -> the jail of QEMU
//! vsock    the jail of the stream device beside it
//! qmp      the control connection to a running QEMU
//! firecracker  Boot -> the jail of Firecracker, and what it is told over its API
//! ```
//! Nothing here starts a process: the keeper does, with what these modules return.

use std::os::fd::RawFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::jail::Entry;

pub mod clock;
pub mod closure;
pub mod firecracker;
pub mod probe;
pub mod qemu;
pub mod qmp;
pub mod vsock;

/// The guest's address on its stream device. Every microVM has a device of its own, so they may all have the same.
pub const GUEST_CID: u32 = 3;

/// In what VMMs differ, as data: whoever asks "which one is it" asks this instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    /// Its name in settings and lines to people.
    pub name: &'static str,
    /// Who makes its jail; with [`Entry::Official`] it gets paths in its root instead of descriptors.
    pub entry: Entry,
    /// Who gives the guest its streams.
    pub streams: Streams,
    /// Most virtual processors.
    pub max_cpus: u32,
    /// Memory it needs beside the guest's, MiB.
    pub overhead_mib: u32,
    /// Processes and threads of a Sandbox beside the virtual processors.
    pub threads: u64,
}

/// Who gives a guest its streams to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// A device process beside the VMM ([`vsock`]), in a directory of its own on the host.
    Beside,
    /// The VMM itself, in its root, which is seen through the keeper's.
    Within,
}

/// What a microVM is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boot {
    /// Virtual CPUs, at least 1.
    pub vcpus: u8,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Kernel on the host: a bzImage, or an uncompressed ELF with a PVH entry, which starts sooner in emulation.
    pub kernel: PathBuf,
    /// Initial ramdisk on the host.
    pub initrd: PathBuf,
    /// Words for the kernel's command line beside those the VMM needs ("pepo.guest=1").
    pub arguments: Vec<String>,
    /// Size of the scratch disk, bytes.
    pub scratch_size: u64,
    /// Ceiling for what each disk may move; `None` is no ceiling.
    pub throttle: Option<Throttle>,
    /// The uid of the VMM.
    pub uid: u32,
    /// Its network interface, if it has one.
    #[serde(default)]
    pub interface: Option<Interface>,
}

/// A guest's network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interface {
    /// Its hardware address.
    pub mac: String,
    /// Ceiling for the packets that the guest sends, per second. Held by the VMM where it can; the namespace's rules hold it
    /// in any case, and the bytes both ways, which change with the policy.
    pub packets_per_second: u32,
}

/// Ceiling for the traffic of one disk, both directions together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Throttle {
    /// Bytes per second.
    pub bytes: u64,
    /// Operations per second.
    pub operations: u64,
}

/// What the VMM is given instead of paths. Numbers are the caller's; all of them stay its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptors {
    /// The root filesystem, opened read-only.
    pub system: RawFd,
    /// The scratch disk, opened read-write.
    pub scratch: RawFd,
    /// A stream socket that takes the guest's serial console. The caller reads it without pause: what it leaves lying is
    /// lost to the guest, which waits a little and then drops.
    pub console: RawFd,
    /// A stream socket for the control connection ([`qmp`]).
    pub control: RawFd,
    /// A stream socket that is connected to the listening [`vsock`] device when the gate opens.
    pub vsock: RawFd,
    /// The tap of its network interface, if it has one.
    pub tap: Option<RawFd>,
    /// Where the VMM's own complaints go (standard output and error).
    pub log: RawFd,
    /// The end of a pipe whose other end closes when the VMM may begin; `None` is at once.
    pub gate: Option<RawFd>,
}
