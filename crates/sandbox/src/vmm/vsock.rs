//! The stream device: vhost-device-vsock, which gives a microVM its streams to the host.
//!
//! It listens twice in one small directory, the only thing it can write: [`DEVICE_SOCKET`] for the VMM (the keeper
//! connects there once and hands the connection over) and [`STREAM_SOCKET`], where the host dials the guest
//! (`CONNECT <port>\n`, answered `OK <port>\n`). Nothing else is ever bound there: a guest that dials out would look for
//! `stream.sock_<port>`.

use std::os::fd::RawFd;
use std::path::PathBuf;

use super::GUEST_CID;
use super::closure::Closure;
use crate::jail::{Access, Bind, Descriptor, Entry, Filter, Limits, Spec};
use crate::proc;

/// Name of the socket for the VMM in the device's directory.
pub const DEVICE_SOCKET: &str = "device.sock";

/// Name of the socket where the host dials the guest.
pub const STREAM_SOCKET: &str = "stream.sock";

/// Where the device sees its directory.
const DIRECTORY: &str = "/run";

/// Descriptors the device may hold: one per stream and direction of a busy Sandbox, with room to spare.
const OPEN_FILES: u64 = 2048;

/// The jail of a device that owns `directory` (mode 0700, owner `uid`) and complains to `log`.
pub fn command(closure: &Closure, directory: PathBuf, uid: u32, log: RawFd) -> Spec {
    let device =
        format!("guest-cid={GUEST_CID},socket={DIRECTORY}/{DEVICE_SOCKET},uds-path={DIRECTORY}/{STREAM_SOCKET}");
    Spec {
        name: "vsock".to_owned(),
        program: closure.program.clone(),
        argv: vec!["vhost-device-vsock".to_owned(), "--vm".to_owned(), device],
        env: closure.env.clone(),
        uid,
        entry: Entry::Ours,
        root: closure.root.clone(),
        binds: vec![Bind { source: directory, target: DIRECTORY.into(), access: Access::Writable }],
        descriptors: vec![Descriptor { from: log, to: 1 }, Descriptor { from: log, to: 2 }],
        limits: Limits { file_size: 0, open_files: OPEN_FILES },
        filter: Filter::VsockDevice,
        oom_score_adj: proc::OOM_SCORE,
        gate: None,
    }
}
