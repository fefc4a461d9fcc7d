//! What the operator says about the network: rows of their own, since they are lists of ranges and rates.

use pepo_sandbox::net::policy::Opening;
use pepo_sandbox::net::{Cidr, Floor, Limits, Protocol, Settings};

use super::{number, size_mib};

/// Whether Sandboxes have a network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkUse {
    /// Where the host can guard one.
    Auto,
    /// They have, or the daemon does not start.
    On,
    /// They have none.
    Off,
}

/// Everything about the network.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkConfig {
    /// Whether there is one.
    pub uses: NetworkUse,
    /// The kind of policy of a Session that names none.
    pub default: pepo_api::NetworkMode,
    /// The floor and what every Sandbox may do at most.
    pub settings: Settings,
}

/// `auto`, `on`, `off`.
pub(super) fn uses(text: &str) -> Result<NetworkUse, String> {
    match text {
        "auto" => Ok(NetworkUse::Auto),
        "on" | "true" => Ok(NetworkUse::On),
        "off" | "false" => Ok(NetworkUse::Off),
        _ => Err("expected auto, on or off".into()),
    }
}

/// `public`, `none`.
pub(super) fn mode(text: &str) -> Result<pepo_api::NetworkMode, String> {
    match text {
        "public" => Ok(pepo_api::NetworkMode::Public),
        "none" => Ok(pepo_api::NetworkMode::None),
        _ => Err("expected public or none".into()),
    }
}

fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', ' ']).map(str::trim).filter(|item| !item.is_empty())
}

/// Ranges, with commas between.
pub(super) fn closed(text: &str) -> Result<Vec<Cidr>, String> {
    items(text).map(|item| item.parse::<Cidr>().map_err(|error| error.to_string())).collect()
}

/// `RANGE[:PORT[+PORT]…][/PROTOCOL]`, with commas between: `10.5.0.0/24:5432/tcp`.
pub(super) fn open(text: &str) -> Result<Vec<Opening>, String> {
    items(text).map(opening).collect()
}

fn opening(item: &str) -> Result<Opening, String> {
    let (rest, protocol) = match item.rsplit_once('/') {
        Some((rest, "tcp")) => (rest, Some(Protocol::Tcp)),
        Some((rest, "udp")) => (rest, Some(Protocol::Udp)),
        Some((rest, "icmp")) => (rest, Some(Protocol::Icmp)),
        _ => (item, None),
    };
    let (range, ports) = rest.split_once(':').unwrap_or((rest, ""));
    let ports = ports.split('+').filter(|port| !port.is_empty());
    let ports = ports.map(|port| number::<u16>(port, 1, 65_535)).collect::<Result<Vec<_>, _>>()?;
    if protocol == Some(Protocol::Icmp) && !ports.is_empty() {
        return Err(format!("`{item}`: icmp has no ports"));
    }
    Ok(Opening {
        range: range.parse().map_err(|error: pepo_sandbox::net::policy::Error| error.to_string())?,
        ports,
        protocol,
    })
}

/// A rate in bytes a second (bare number: MiB); empty is none.
pub(super) fn rate(text: &str) -> Result<Option<u64>, String> {
    match text {
        "" => Ok(None),
        text => match size_mib(text)? << 20 {
            0 => Err("must be more than 0; empty means no limit".into()),
            rate => Ok(Some(rate)),
        },
    }
}

/// Puts the rows together.
pub(super) fn settings(closed: Vec<Cidr>, open: Vec<Opening>, limits: Limits) -> Settings {
    Settings { floor: Floor::with(closed, open), limits, dns: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openings_are_read_with_ports_and_protocol() {
        let read = open("10.5.0.0/24:5432+22/tcp, 10.6.0.1 10.7.0.1:53/udp,10.8.0.0/16/icmp").expect("openings");
        let wanted = |range: &str, ports: &[u16], protocol| Opening {
            range: range.parse().expect("range"),
            ports: ports.to_vec(),
            protocol,
        };
        assert_eq!(
            read,
            [
                wanted("10.5.0.0/24", &[5432, 22], Some(Protocol::Tcp)),
                wanted("10.6.0.1/32", &[], None),
                wanted("10.7.0.1/32", &[53], Some(Protocol::Udp)),
                wanted("10.8.0.0/16", &[], Some(Protocol::Icmp)),
            ]
        );
        let written: Vec<String> = read.iter().map(ToString::to_string).collect();
        assert_eq!(written, ["10.5.0.0/24:5432+22/tcp", "10.6.0.1/32", "10.7.0.1/32:53/udp", "10.8.0.0/16/icmp"]);
        for bad in ["10.5.0.1/24", "10.5.0.0/24:0", "10.5.0.0/24:x", "10.5.0.0/24:1/icmp", "10.5.0.0/24/sctp", "::1"] {
            assert!(open(bad).is_err(), "{bad} was taken");
        }
        assert!(open("").expect("none").is_empty() && closed("").expect("none").is_empty());
        assert_eq!(rate("10m"), Ok(Some(10 << 20)));
        assert_eq!(rate(""), Ok(None));
        assert!(rate("0").is_err());
    }
}
