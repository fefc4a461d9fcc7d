//! The Edge API: the only way in for strangers. It authenticates, bounds and forwards; it decides nothing about Sessions
//! and owns no state, and it has no rights on this host beyond one loopback port and one Unix socket.
//!
//! ```text
//! stranger --TLS--> server (bounds) -> handler: path -> auth -> rate -> allow -> head -> body --edge.sock--> pepod
//!                                                        ^                                                     ^
//!        keys (a copy of pepod's, at most 5 s old, else nobody is let in), jwt (issuers)     decisions (refusals)
//! ```
//!
//! One handler serves every row of [`pepo_api::ROUTES`] that is a tenant's. What the daemon answers passes through.

#![forbid(unsafe_code)]

pub mod auth;
pub mod body;
pub mod config;
pub mod decisions;
pub mod fetch;
pub mod handler;
pub mod head;
pub mod jwt;
pub mod keys;
pub mod lines;
pub mod named;
pub mod net;
mod own;
pub mod path;
pub mod port;
pub mod rate;
mod relay;
pub mod rights;
pub mod server;
pub mod threads;
pub mod tls;
pub mod upstream;
