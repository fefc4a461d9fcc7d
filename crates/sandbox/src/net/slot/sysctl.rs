//! Settings of a slot's namespace, and of its link in the host's.

use std::fs;
use std::io;
use std::path::Path;

/// Settings of a new namespace, which has those of the host's for IPv4. The kernel's own answers are kept quiet, ended
/// connections are forgotten early; what the host's table keeps for long is counted here as long.
pub(super) fn settle() -> io::Result<()> {
    for (name, value) in [
        ("ipv4/ip_forward", "1"),
        ("ipv4/conf/all/accept_redirects", "0"),
        ("ipv4/conf/all/accept_source_route", "0"),
        ("ipv4/conf/all/route_localnet", "0"),
        ("ipv4/conf/default/route_localnet", "0"),
        ("ipv4/conf/all/proxy_arp", "0"),
        ("ipv4/conf/default/proxy_arp", "0"),
        ("ipv4/conf/all/send_redirects", "0"),
        ("ipv4/conf/default/send_redirects", "0"),
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("netfilter/nf_conntrack_tcp_timeout_syn_sent", "30"),
        ("netfilter/nf_conntrack_tcp_timeout_syn_recv", "30"),
        ("netfilter/nf_conntrack_tcp_timeout_fin_wait", "30"),
        ("netfilter/nf_conntrack_tcp_timeout_time_wait", "15"),
        ("netfilter/nf_conntrack_udp_timeout", "30"),
        ("netfilter/nf_conntrack_icmp_timeout", "30"),
    ] {
        set(name, value)?;
    }
    Ok(())
}

/// Settings of a veth's end in the host's namespace, before it is up.
pub(super) fn guard(veth: &str) -> io::Result<()> {
    for (name, value) in [
        ("accept_redirects", "0"),
        ("accept_source_route", "0"),
        ("send_redirects", "0"),
        ("proxy_arp", "0"),
        ("route_localnet", "0"),
        ("rp_filter", "1"),
        ("forwarding", "1"),
    ] {
        set(&format!("ipv4/conf/{veth}/{name}"), value)?;
    }
    for (name, value) in [("disable_ipv6", "1"), ("accept_ra", "0")] {
        set(&format!("ipv6/conf/{veth}/{name}"), value)?;
    }
    Ok(())
}

/// Writes a setting of the calling thread's namespace. One that this kernel does not have needs no setting.
fn set(name: &str, value: &str) -> io::Result<()> {
    match fs::write(Path::new("/proc/sys/net").join(name), value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
