//! Sessions: the table of those that have not ended, and the handle that everybody else holds on one.
//!
//! Owns the drivers. A handle reads copies ([`Published`]), lends the guest while a Sandbox serves ([`Session::serving`]),
//! and asks the driver for changes. Look-ups take the App, so what belongs to another is not there.
//!
//! ```text
//! server ──create──► Sessions ──spawn──► driver (one task, owns the Sandbox) ──► sandbox
//!    │                                     │ publishes
//!    └──serving──► Session ◄───────────────┘         exec, files and dial go straight to the guest
//! ```

mod activation;
mod activity;
mod command;
mod driver;
mod error;
mod follow;
mod handle;
mod kept;
mod resume;
pub mod state;
mod table;

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use pepo_api::{Ended, ImageId, SandboxId};
use pepo_sandbox::StatePath;
use serde::{Deserialize, Serialize};

use handle::Ask;
use state::Cause;

pub use activity::Ticket;
pub use command::{Command, Commands, NewCommand, Status, shown_row};
pub use error::Error;
pub use follow::{Follower, Interest, Item, Leaving};
pub use handle::{Published, Serving, Session, Update};
pub use kept::Shelf;
pub use table::{Found, NewSession, Sessions};

/// What a Session was asked to be, resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Unique among its App's live ones.
    pub name: Option<String>,
    /// The Image as it was named.
    pub image: String,
    /// The Image.
    pub image_id: ImageId,
    /// Processors.
    pub cpus: u32,
    /// Memory.
    pub memory_mib: u32,
    /// Scratch disk.
    pub disk_mib: u32,
    /// How long the Sandbox stays after the last activity.
    pub keep_alive_seconds: u64,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// For filtering.
    pub labels: BTreeMap<String, String>,
}

impl Spec {
    /// What of the host an activation of it takes.
    pub fn needs(&self) -> crate::capacity::Needs {
        crate::capacity::Needs::new(self.memory_mib, self.cpus, self.disk_mib)
    }
}

/// An Image's files, as a Plan names them.
#[derive(Clone, Debug)]
pub struct Files {
    /// Which Image.
    pub id: ImageId,
    /// The kernel.
    pub kernel: StatePath,
    /// Modules and this release's guest agent.
    pub initramfs: StatePath,
    /// The root file system.
    pub root: StatePath,
}

/// Finds an Image by name or id.
pub type FindImage = Arc<dyn Fn(String) -> BoxFuture<'static, Result<Files, Error>> + Send + Sync>;

/// A cause as it is told outside.
fn ended(cause: &Cause, at: jiff::Timestamp) -> Ended {
    Ended { message: cause.message.clone(), last_console_lines: cause.console.clone(), ..Ended::new(cause.reason, at) }
}

/// A Sandbox's id as the API has it.
pub fn sandbox_id(id: pepo_sandbox::SandboxId) -> SandboxId {
    // Both are `sbx_` and 32 hex digits of 16 bytes.
    id.to_string().parse().unwrap_or_else(|_| SandboxId::from(uuid::Uuid::nil()))
}

/// A Sandbox's id as the engine has it.
fn engine_id(id: SandboxId) -> Option<pepo_sandbox::SandboxId> {
    id.to_string().parse().ok()
}
