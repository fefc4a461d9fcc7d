//! The daemon as a library: everything but its modes.
#![forbid(unsafe_code)]
pub mod image;
