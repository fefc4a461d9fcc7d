//! The guest's one interface: given its address, its way out and its resolver at activation.
//!
//! Nobody answers questions for hardware addresses out there, so the next hop's is written down. IPv6 is switched off on
//! the interface: the host carries none. Called by `agent`.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use pepo_proto::Network;

use crate::sys;

/// The interface's name, as the kernel gives it to the first network device.
const NAME: &str = "eth0";

/// How long its driver may take (it is loaded by now).
const APPEARS: Duration = Duration::from_secs(10);

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
#[error("{step}")]
pub struct Error {
    step: &'static str,
    source: io::Error,
}

fn tried<T>(step: &'static str, done: io::Result<T>) -> Result<T, Error> {
    done.map_err(|source| Error { step, source })
}

/// Brings the interface up, where it is not as `before` says already.
///
/// # Errors
/// There is none, or the kernel refuses a step.
pub fn begin(network: &Network, before: Option<&Network>) -> Result<(), Error> {
    match before {
        Some(before) if before == network => return Ok(()),
        Some(before) if Network { mtu: network.mtu, ..*before } == *network => {
            return tried("set the largest packet", sys::link_mtu(NAME, network.mtu));
        }
        _ => {}
    }
    if network.prefix > 32 || network.prefix == 0 || network.gateway_mac >> 48 != 0 {
        return tried("read the network", Err(io::ErrorKind::InvalidInput.into()));
    }
    let until = Instant::now() + APPEARS;
    while !Path::new("/sys/class/net").join(NAME).exists() {
        if Instant::now() > until {
            return tried("find eth0", Err(io::ErrorKind::NotFound.into()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    for scope in ["default", NAME] {
        // A kernel without IPv6 has nothing to switch off.
        let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"), "1");
    }
    let (address, gateway) = (Ipv4Addr::from_bits(network.address), Ipv4Addr::from_bits(network.gateway));
    let mask = Ipv4Addr::from_bits(u32::MAX << (32 - u32::from(network.prefix)));
    tried("set the largest packet", sys::link_mtu(NAME, network.mtu))?;
    tried("set the address", sys::link_address(NAME, address, mask))?;
    tried("set eth0 up", sys::link_up(NAME))?;
    let [_, _, mac @ ..] = network.gateway_mac.to_be_bytes();
    tried("write the next hop down", sys::neighbour(NAME, gateway, mac))?;
    tried("set the route", sys::default_route(gateway))?;
    // An Image may have a link here, to something that does not run.
    let _ = fs::remove_file("/etc/resolv.conf");
    tried("write /etc/resolv.conf", fs::write("/etc/resolv.conf", format!("nameserver {gateway}\noptions edns0\n")))
}
