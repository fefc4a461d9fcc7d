//! The network of a Sandbox: what it may reach, and who decides it on the host.

pub mod name;
