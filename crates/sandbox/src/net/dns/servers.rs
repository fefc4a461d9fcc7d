//! Who answers upstream: the operator's choice, or this host's own resolvers.
//!
//! Runs in the privileged side, which connects the sockets: it reads the host's files, root's to write, and nothing a guest
//! chose.

use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::Kind;

/// Servers that are used at most, as by the C library.
const SERVERS: usize = 3;

/// Sockets made for one request at most.
pub const SOCKETS: usize = 16;

/// The longest file that is read, bytes.
const FILE: u64 = 64 * 1024;

/// The port of a server that says none.
const PORT: u16 = 53;

/// Reads `1.2.3.4`, `1.2.3.4:53`, `::1` or `[::1]:53`.
///
/// # Errors
/// What it should be.
pub fn server(text: &str) -> Result<SocketAddr, String> {
    let text = text.trim();
    let address = text.parse::<IpAddr>().map(|address| SocketAddr::new(address, PORT));
    address.or_else(|_| text.parse()).map_err(|_| format!("`{text}` is no address like 192.0.2.53 or 192.0.2.53:53"))
}

/// The servers of this host: those of `resolv.conf`, and where that names a forwarder of systemd's on this machine, those
/// that the forwarder asks.
pub fn of_host(root: &Path) -> Vec<SocketAddr> {
    let named = read(&root.join("etc/resolv.conf"));
    if named.iter().all(is_stub) {
        let real = read(&root.join("run/systemd/resolve/resolv.conf"));
        if !real.is_empty() {
            return real;
        }
    }
    named
}

/// systemd-resolved answers on these two.
fn is_stub(server: &SocketAddr) -> bool {
    matches!(server.ip(), IpAddr::V4(address) if matches!(address.octets(), [127, 0, 0, 53 | 54]))
}

fn read(path: &Path) -> Vec<SocketAddr> {
    let mut text = String::new();
    match File::open(path).and_then(|file| file.take(FILE).read_to_string(&mut text)) {
        Ok(_) => parse(&text),
        Err(_) => Vec::new(),
    }
}

/// The servers that a `resolv.conf` names.
fn parse(text: &str) -> Vec<SocketAddr> {
    let named = text.lines().filter_map(|line| {
        let mut words = line.split(['#', ';']).next().unwrap_or_default().split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()).flatten()
    });
    // An address with a zone (`fe80::1%eth0`) needs the link's number, which only makes sense on this host's links.
    named.filter_map(|word| word.parse::<IpAddr>().ok()).map(|ip| SocketAddr::new(ip, PORT)).take(SERVERS).collect()
}

/// New non-blocking sockets connected, or connecting, to that one of the servers, counted round.
///
/// # Errors
/// The kernel makes none.
pub fn sockets(servers: &[SocketAddr], kind: Kind, server: usize, most: usize) -> io::Result<Vec<OwnedFd>> {
    let Some(address) = server.checked_rem(servers.len()).and_then(|at| servers.get(at)) else { return Ok(Vec::new()) };
    let kind = match kind {
        Kind::Udp => SocketType::DGRAM,
        Kind::Tcp => SocketType::STREAM,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = |_| {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        let connecting = match address {
            SocketAddr::V4(address) => rustix::net::connect(&socket, address as &SocketAddrV4),
            SocketAddr::V6(address) => rustix::net::connect(&socket, address as &SocketAddrV6),
        };
        match connecting {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
            Err(error) => Err(error.into()),
        }
    };
    (0..most.min(SOCKETS)).map(connected).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(servers: &[SocketAddr]) -> Vec<String> {
        servers.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn resolv_conf_is_read_as_the_c_library_reads_it() {
        let text = "# nameserver 192.0.2.9\nsearch example.com\nnameserver 192.0.2.1 # one\n\tnameserver\t2001:db8::1\n\
            nameserver fe80::1%eth0\nnameserver nonsense\nnameserver 192.0.2.2;x\nnameserver 192.0.2.3\noptions edns0\n";
        assert_eq!(addresses(&parse(text)), ["192.0.2.1:53", "[2001:db8::1]:53", "192.0.2.2:53"]);
        assert_eq!(parse(""), []);
    }

    #[test]
    fn a_forwarder_of_this_machine_is_passed_over() {
        let root = tempfile::tempdir().expect("directory");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("directories");
            std::fs::write(path, text).expect("write");
        };
        assert_eq!(of_host(root.path()), []);
        write("etc/resolv.conf", "nameserver 127.0.0.53\n");
        assert_eq!(addresses(&of_host(root.path())), ["127.0.0.53:53"]);
        write("run/systemd/resolve/resolv.conf", "nameserver 192.0.2.7\n");
        assert_eq!(addresses(&of_host(root.path())), ["192.0.2.7:53"]);
        // Another program's forwarder is the operator's choice.
        write("etc/resolv.conf", "nameserver 127.0.0.1\n");
        assert_eq!(addresses(&of_host(root.path())), ["127.0.0.1:53"]);
    }

    #[test]
    fn a_server_is_an_address_with_or_without_a_port() {
        let read = |text: &str| server(text).map(|server| server.to_string());
        assert_eq!(read("192.0.2.1").as_deref(), Ok("192.0.2.1:53"));
        assert_eq!(read(" 192.0.2.1:5353 ").as_deref(), Ok("192.0.2.1:5353"));
        assert_eq!(read("[2001:db8::1]:53").as_deref(), Ok("[2001:db8::1]:53"));
        for bad in ["", "dns.example.com", "192.0.2.1:x", "192.0.2.300"] {
            assert!(read(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn sockets_have_a_port_each_and_take_turns_among_servers() {
        let servers: Vec<_> = (0..2).map(|_| std::net::UdpSocket::bind("127.0.0.1:0").expect("bind")).collect();
        let addresses: Vec<_> = servers.iter().map(|server| server.local_addr().expect("address")).collect();
        let made = sockets(&addresses, Kind::Udp, 3, 4).expect("sockets");
        let made: Vec<std::net::UdpSocket> = made.into_iter().map(Into::into).collect();
        assert!(made.iter().all(|socket| socket.peer_addr().expect("peer") == addresses[1]));
        let mut ports: Vec<_> = made.iter().map(|socket| socket.local_addr().expect("address").port()).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 4);
        assert_eq!(sockets(&addresses, Kind::Udp, 0, 1000).expect("sockets").len(), SOCKETS);
        assert!(sockets(&[], Kind::Tcp, 0, 1).expect("none").is_empty());
    }
}
