//! What a keeper writes when its Sandbox ends.

use serde::{Deserialize, Serialize};

use crate::vmm::qmp::Reason;

/// Which process' end was the Sandbox's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Left {
    /// The VMM.
    Vmm,
    /// The vsock device.
    Device,
    /// The keeper gave up by itself: `stderr` says why.
    Keeper,
}

/// What the VMM said of its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shutdown {
    /// The guest switched off.
    GuestShutdown,
    /// The guest restarted, or its kernel panicked: the console tells which.
    GuestReset,
    /// The guest's kernel panicked, by its panic device.
    GuestPanic,
    /// Somebody on the host.
    Host,
    /// Something newer.
    Other,
}

impl From<Reason> for Shutdown {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::GuestShutdown => Shutdown::GuestShutdown,
            Reason::GuestReset => Shutdown::GuestReset,
            Reason::GuestPanic => Shutdown::GuestPanic,
            Reason::Host => Shutdown::Host,
            Reason::Other => Shutdown::Other,
        }
    }
}

/// `exit.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// Whose end it was.
    pub left: Left,
    /// Its exit code, where it had one.
    pub code: Option<i32>,
    /// The signal that ended it, where one did.
    pub signal: Option<i32>,
    /// How often the host's kernel killed a process of the Sandbox for memory.
    pub oom_kills: u64,
    /// What the VMM said of the guest's end.
    pub shutdown: Option<Shutdown>,
    /// The last bytes that process wrote to its standard error, as text.
    pub stderr: String,
    /// When, in milliseconds since 1970 UTC.
    pub at_unix_ms: u64,
}
