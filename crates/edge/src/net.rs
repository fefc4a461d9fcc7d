//! Addresses: ranges of them, and whose address a request came from where a proxy stands between.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use http::HeaderMap;

/// Hops that are looked at in one request; more is a proxy's mistake or a stranger's text.
const HOPS: usize = 32;

/// Ranges of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<(IpAddr, u8)>);

impl Ranges {
    /// Reads each as `address/bits`, or one address. None: one of them is neither.
    pub fn read<'a>(texts: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        texts.into_iter().map(range).collect::<Option<_>>().map(Ranges)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether one of them has this address.
    pub fn have(&self, address: IpAddr) -> bool {
        self.0.iter().any(|(net, bits)| within(address, *net, *bits))
    }

    /// Whether this address may come, where none means that all may.
    pub fn admit(&self, address: IpAddr) -> bool {
        self.is_empty() || self.have(address)
    }
}

fn range(text: &str) -> Option<(IpAddr, u8)> {
    let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
    let address: IpAddr = address.parse().ok()?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    match bits {
        None => Some((address, most)),
        Some(bits) => bits.parse().ok().filter(|bits| *bits <= most).map(|bits| (address, bits)),
    }
}

/// Whether an address is in a range. A v4 address in its v6 form is the v4 address.
fn within(address: IpAddr, net: IpAddr, bits: u8) -> bool {
    let (address, net, width) = match (address.to_canonical(), net.to_canonical()) {
        (IpAddr::V4(address), IpAddr::V4(net)) => (u128::from(address.to_bits()), u128::from(net.to_bits()), 32),
        (IpAddr::V6(address), IpAddr::V6(net)) => (address.to_bits(), net.to_bits(), 128),
        _ => return false,
    };
    bits == 0 || (address ^ net) >> (width - u32::from(bits).min(width)) == 0
}

/// Who is counted as one: an address, or the /64 that one v6 host can make its addresses of.
pub fn neighbourhood(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

/// The address that a request came from: the connection's, unless that is a trusted proxy's. Then the nearest one in
/// `X-Forwarded-For` that is none: what stands left of it anybody may have written.
pub fn client(peer: IpAddr, headers: &HeaderMap, trusted: &Ranges) -> IpAddr {
    let mut nearest = peer.to_canonical();
    if !trusted.have(nearest) {
        return nearest;
    }
    let lists = headers.get_all("x-forwarded-for").iter().rev();
    let hops = lists.flat_map(|value| value.to_str().unwrap_or("?").rsplit(','));
    for hop in hops.take(HOPS) {
        let hop = hop.trim();
        let address = hop.parse().ok().or_else(|| hop.parse().ok().map(|address: SocketAddr| address.ip()));
        let address = address.or_else(|| hop.strip_prefix('[')?.strip_suffix(']')?.parse().ok());
        // What cannot be read says nothing; who told us is the nearest that is known.
        let Some(address): Option<IpAddr> = address else { return nearest };
        nearest = address.to_canonical();
        if !trusted.have(nearest) {
            return nearest;
        }
    }
    nearest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect(text)
    }

    #[test]
    fn ranges_are_read_whole_or_not_at_all() {
        let ranges = Ranges::read(["192.0.2.0/24", "2001:db8::/32", "10.0.0.7"]).expect("ranges");
        for address in ["192.0.2.9", "::ffff:192.0.2.9", "2001:db8:7::1", "10.0.0.7"] {
            assert!(ranges.have(ip(address)), "{address}");
        }
        for address in ["192.0.3.1", "127.0.0.1", "2001:db9::1", "::", "10.0.0.8"] {
            assert!(!ranges.have(ip(address)), "{address}");
        }
        for text in ["192.0.2.0/33", "::/129", "x/8", "192.0.2.0/", "", "anywhere"] {
            assert!(Ranges::read(["10.0.0.0/8", text]).is_none(), "{text}");
        }
        assert!(Ranges::read(["0.0.0.0/0"]).expect("range").have(ip("10.0.0.1")));
        assert!(Ranges::default().admit(ip("10.0.0.1")) && !Ranges::default().have(ip("10.0.0.1")));
    }

    #[test]
    fn only_a_trusted_proxy_says_who_the_caller_is() {
        let trusted = Ranges::read(["10.0.0.0/8", "::1"]).expect("ranges");
        let said = |peer: &str, lists: &[&str]| {
            let mut headers = HeaderMap::new();
            for list in lists {
                headers.append("x-forwarded-for", list.parse().expect("value"));
            }
            client(ip(peer), &headers, &trusted).to_string()
        };
        assert_eq!(said("192.0.2.1", &["198.51.100.1"]), "192.0.2.1", "a stranger's word counts nothing");
        assert_eq!(said("10.0.0.1", &["198.51.100.1"]), "198.51.100.1");
        assert_eq!(
            said("10.0.0.1", &["203.0.113.9, 198.51.100.1, 10.0.0.2"]),
            "198.51.100.1",
            "what is left of it is a claim"
        );
        assert_eq!(said("10.0.0.1", &["203.0.113.9", "198.51.100.1"]), "198.51.100.1", "the last header counts");
        assert_eq!(said("10.0.0.1", &["198.51.100.1:4711"]), "198.51.100.1");
        assert_eq!(said("10.0.0.1", &["[2001:db8::1]:4711"]), "2001:db8::1");
        assert_eq!(said("10.0.0.1", &["[2001:db8::1]"]), "2001:db8::1");
        assert_eq!(said("10.0.0.1", &["198.51.100.1, unknown"]), "10.0.0.1");
        assert_eq!(said("10.0.0.1", &[]), "10.0.0.1");
        assert_eq!(said("10.0.0.1", &["10.0.0.3, 10.0.0.2"]), "10.0.0.3");
        assert_eq!(said("::ffff:10.0.0.1", &["198.51.100.1"]), "198.51.100.1");
    }

    #[test]
    fn one_v6_host_is_one() {
        assert_eq!(neighbourhood(ip("2001:db8::1:2:3:4")), ip("2001:db8::"));
        assert_eq!(neighbourhood(ip("::ffff:192.0.2.1")), ip("192.0.2.1"));
    }
}
