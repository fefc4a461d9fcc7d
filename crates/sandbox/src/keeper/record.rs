//! What a keeper writes when its Sandbox ends.

use serde::{Deserialize, Serialize};

/// Which process' end was the Sandbox's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Left {
    /// The VMM.
    Vmm,
    /// The vsock device.
    Vsock,
    /// The keeper gave up by itself: `stderr` says why.
    Keeper,
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
    /// What the VMM said of the guest's end (`guest-shutdown`, `guest-reset`, `guest-panic`, `host-qmp-quit`, …).
    pub shutdown: Option<String>,
    /// The last bytes that process wrote to its standard error, as text.
    pub stderr: String,
    /// When, in milliseconds since 1970 UTC.
    pub at_unix_ms: u64,
}
