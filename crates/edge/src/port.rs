//! Taking the port, and saying who has it where that fails. Called once, by `main`, before rights are dropped.

use std::net::{IpAddr, SocketAddr, TcpListener};

/// The port cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody listens there.
    #[error("{address} is in use{}; choose another with --listen or edge.listen", by.as_ref().map(|by| format!(" by {by}")).unwrap_or_default())]
    InUse {
        /// The address.
        address: SocketAddr,
        /// `name (pid 12)`, where it could be found.
        by: Option<String>,
    },
    /// Anything else.
    #[error("cannot listen on {address}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
}

/// Binds and listens.
///
/// # Errors
/// See [`Error`].
pub fn bind(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address).map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => Error::InUse { address, by: holder(address) },
        _ => Error::Bind { address, source },
    })
}

/// Binds a free port: the one that the instance had last, as its URL was written down, where that is still free. Callers
/// keep their address over a restart of the edge.
///
/// # Errors
/// See [`Error`].
pub fn bind_free(address: SocketAddr, last_url: Option<&str>) -> Result<TcpListener, Error> {
    let last = last_url.and_then(|url| url.trim().split_once("://")?.1.parse::<SocketAddr>().ok());
    match last.filter(|last| last.ip() == address.ip()).map(TcpListener::bind) {
        Some(Ok(listener)) => Ok(listener),
        _ => bind(address),
    }
}

/// The process that listens on this address, as the kernel's tables show it to us.
fn holder(address: SocketAddr) -> Option<String> {
    let table = match address.ip() {
        IpAddr::V4(_) => "/proc/net/tcp",
        IpAddr::V6(_) => "/proc/net/tcp6",
    };
    let inode = listening_inode(&std::fs::read_to_string(table).ok()?, address.port())?;
    let wanted = format!("socket:[{inode}]");
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(descriptors) = std::fs::read_dir(process.path().join("fd")) else { continue };
        let holds = descriptors
            .flatten()
            .any(|descriptor| std::fs::read_link(descriptor.path()).is_ok_and(|to| to.to_str() == Some(&wanted)));
        if holds {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            let name: String = name.trim_end().chars().flat_map(char::escape_debug).collect();
            return Some(format!("{name} (pid {pid})"));
        }
    }
    None
}

/// The inode of the socket that listens on this port, in the text of `/proc/net/tcp`.
fn listening_inode(table: &str, port: u16) -> Option<u64> {
    const LISTEN: &str = "0A";
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let local = fields.nth(1)?;
        let state = fields.nth(1)?;
        let inode = fields.nth(5)?;
        let (_, hex) = local.rsplit_once(':')?;
        (state == LISTEN && u16::from_str_radix(hex, 16) == Ok(port)).then(|| inode.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_port_is_the_last_one_where_that_can_be() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let first = bind_free(any, None).expect("a free port").local_addr().expect("address");
        let url = format!("http://{first}\n");
        let again = bind_free(any, Some(&url)).expect("the same");
        assert_eq!(again.local_addr().expect("address"), first);
        let other = bind_free(any, Some(&url)).expect("another");
        assert_ne!(other.local_addr().expect("address"), first);
        assert!(bind_free(any, Some("http://8.8.8.8:1")).is_ok());
    }

    #[test]
    fn a_taken_port_names_its_holder() {
        let first = bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        let address = first.local_addr().expect("address");
        let error = bind(address).expect_err("taken").to_string();
        assert!(error.contains(&address.to_string()), "{error}");
        assert!(error.contains(&format!("(pid {})", std::process::id())), "{error}");
    }
}
