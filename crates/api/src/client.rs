//! The typed client, over a Unix socket or TCP.
