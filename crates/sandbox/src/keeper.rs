//! The keeper: one process per Sandbox, pid 1 of its pid namespace, parent of VMM and vsock device.

mod console;
mod record;

pub use console::{Console, escape};
pub use record::{ExitRecord, Left};
