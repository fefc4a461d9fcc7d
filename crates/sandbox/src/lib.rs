//! One microVM and everything it holds on this host.
//!
//! ```text
//! Plan -> Prepared -> Booted -> Warm -> Active -> Exit      boot, activate: pepod's side, async, no rights
//!              |          |                         |
//!              '--------- Host ---------------------'       host: the wall; its other side is pepo-host, privileged
//!                          |
//!              held, cgroup, disk, keeper, jail, vmm         what a Sandbox holds, and who runs below it
//! ```
//! The only crate with privileged code. It speaks of Plans, guests and limits, and does not know for whom they are.
#![deny(unsafe_code)]

pub mod activate;
pub mod boot;
pub mod builder;
mod calls;
pub mod cgroup;
pub mod disk;
pub mod guest;
pub mod held;
pub mod host;
pub mod id;
pub mod jail;
pub mod keeper;
pub mod net;
pub mod plan;
pub mod proc;
pub mod registry;
pub mod rights;
pub mod share;
mod spawn;
pub mod sweep;
pub mod sys;
pub mod vmm;
pub mod volume;

pub use activate::{Active, Cause, Exit, Life, Mount, adopt};
pub use boot::{Booted, Prepared, Step, Steps, Warm, boot};
pub use cgroup::Io;
pub use host::Host;
pub use id::{SandboxId, Slot, Tag, UidBlock, VolumeId};
pub use pepo_proto as proto;
pub use plan::{Plan, StatePath, Vmm};

/// An error with all its sources in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(deeper) = source {
        text.push_str(": ");
        text.push_str(&deeper.to_string());
        source = deeper.source();
    }
    text
}
