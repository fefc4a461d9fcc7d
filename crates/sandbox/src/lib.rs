//! sandbox

pub mod guest;

pub use pepo_proto as proto;
