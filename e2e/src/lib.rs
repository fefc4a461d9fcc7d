//! Black-box tests: the real programs, real microVMs, the host looked at from outside.
//!
//! A test makes an [`Instance`], uses it as a user does, and ends it; [`Instance::end`] then compares the host with what
//! it was before, through /proc, cgroupfs and the file system, not through anything Pepo says about itself. Nothing here is
//! skipped: without root or without what `make test` prepares, a test fails and says what is missing.

#![allow(clippy::panic, clippy::expect_used, clippy::unwrap_used, reason = "a test harness fails by panicking")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "times and leftovers are for whoever reads the run")]

pub mod crowd;
pub mod durable;
mod host;
mod instance;
pub mod line;
pub mod loads;
pub mod names;
pub mod neighbours;
pub mod page;
mod program;
pub mod strike;
pub mod upgrade;
pub mod walls;
pub mod world;

pub use host::{SANDBOX_UIDS, Snapshot, pids_named};
pub use instance::{Instance, Options, bare, bin, images};
pub use program::{Program, Ran, Started, until, until_still};
