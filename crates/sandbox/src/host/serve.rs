//! The privileged side's loop.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::process::Pid;

use crate::registry::Instance;

/// What the privileged side is told once, at its start.
#[derive(Debug)]
pub struct HostConfig {
    /// Whose tag, uids and directories these are; held until the end.
    pub instance: Instance,
    /// pepod: files in Plans must be its own, signals that end us go to it, and its exit code becomes ours.
    pub daemon: Pid,
    /// pepod's uid.
    pub daemon_uid: u32,
    /// `vhost-device-vsock`.
    pub vsock_device: PathBuf,
    /// `qemu-system-x86_64`.
    pub qemu: PathBuf,
    /// `mkfs.ext4`.
    pub mkfs: PathBuf,
}

/// Serves pepod until it is gone, and returns its exit code. Called before this process has a second thread.
///
/// # Errors
/// The rights or the host's hierarchies are not what is needed; nothing has been served then.
pub fn run(socket: OwnedFd, config: HostConfig) -> io::Result<u8> {
    let _ = (socket, config);
    Err(io::ErrorKind::Unsupported.into())
}
