//! One microVM and everything it holds on this host.
#![deny(unsafe_code)]

pub mod guest;
pub mod jail;
pub mod sys;

pub use pepo_proto as proto;
