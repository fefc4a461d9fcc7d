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
mod keyed;
mod resume;
pub mod secret;
mod service;
mod setup;
pub mod state;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use pepo_api::{Ended, ImageId, SandboxId, ServiceSpec, Setup};
use pepo_sandbox::StatePath;
use serde::{Deserialize, Serialize};

use crate::workspace::{Lent, Use};
use handle::Ask;
use state::{Cause, Lives};

pub use activity::Ticket;
pub use command::{Command, Commands, NewCommand, Status, shown_row};
pub use error::Error;
pub use follow::{Follower, Interest, Item, Leaving};
pub use handle::{Published, Serving, Session, Update};
pub use kept::Shelf;
pub use keyed::Opened;
pub use service::Services;
pub use table::{Found, NewSession, Sessions};

/// What a Session was asked to be, resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Unique among its App's live ones.
    pub name: Option<String>,
    /// The key it was opened by, unique among its App's live ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
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
    /// Names of the secrets in it.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub secrets: BTreeSet<String>,
    /// For filtering.
    pub labels: BTreeMap<String, String>,
    /// How long it was to live, as it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_seconds: Option<u64>,
    /// Whether it gets a second life on an empty disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reactivate: bool,
    /// Runs once per activation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setup: Option<Setup>,
    /// Kept running.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceSpec>,
    /// Those that the present Sandbox began with, where others were asked for since: these go on until it goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub services_begun: Option<Vec<ServiceSpec>>,
    /// What it may reach, as it was said.
    #[serde(default)]
    pub network: pepo_api::NetworkSpec,
    /// Its Workspace; filled in when it is recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<Use>,
    /// Paths kept in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub persist: Vec<String>,
    /// Directories of the host that it was lent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Lent>,
}

impl Spec {
    /// What becomes of it when its Sandbox is given back: the one place that decides this.
    pub fn lives(&self) -> Lives {
        if self.reactivate || self.workspace.is_some() { Lives::Again } else { Lives::Once }
    }

    /// The Services of the Sandbox that serves now.
    pub fn services_now(&self) -> &[ServiceSpec] {
        self.services_begun.as_deref().unwrap_or(&self.services)
    }
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
    Ended {
        message: cause.message.clone(),
        last_console_lines: cause.console.clone(),
        exit_code: cause.exit_code,
        last_output_lines: cause.output.clone(),
        ..Ended::new(cause.reason, at)
    }
}

/// A cause as it was told.
fn cause(ended: &Ended) -> Cause {
    Cause {
        reason: ended.reason,
        message: ended.message.clone(),
        console: ended.last_console_lines.clone(),
        exit_code: ended.exit_code,
        output: ended.last_output_lines.clone(),
    }
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
