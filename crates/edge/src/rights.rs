//! Giving up every right: started as root, the edge becomes the user `pepo-edge` without a capability, for good.
//!
//! Called once, by `main`, while the process has one thread: identities are a thread's, and the later ones inherit them.

use std::io;

use rustix::process::{Gid, Resource, Rlimit, Uid};
use rustix::thread::CapabilitySet;

/// The user that the edge is.
pub const USER: &str = "pepo-edge";

/// Rights could not be given up, so the edge does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such user.
    #[error("the user `{0}` does not exist; `make install` and `pepo up` make it")]
    NoUser(String),
    /// The kernel refused.
    #[error("cannot {step}")]
    Refused {
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// Afterwards there was still a capability.
    #[error("capabilities are left: {0}")]
    Left(String),
}

fn tried(step: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |errno| Error::Refused { step, source: errno.into() }
}

/// Becomes `user` if this is root, and in any case leaves nothing that a program started from here could gain.
///
/// # Errors
/// See [`Error`]; after one the process must end.
pub fn drop_all(user: &str) -> Result<(), Error> {
    if rustix::process::geteuid().is_root() {
        let passwd = std::fs::read_to_string("/etc/passwd")
            .map_err(|source| Error::Refused { step: "read /etc/passwd", source })?;
        let (uid, gid) = identity(&passwd, user).ok_or_else(|| Error::NoUser(user.into()))?;
        for capability in CapabilitySet::all().iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // This kernel does not have it.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(errno) => return Err(tried("empty the bounding set")(errno)),
            }
        }
        rustix::thread::set_thread_groups(&[]).map_err(tried("leave all groups"))?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(tried("change the group"))?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(tried("change the user"))?;
    }
    rustix::thread::set_no_new_privs(true).map_err(tried("set no_new_privs"))?;
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(Resource::Core, none).map_err(tried("forbid core dumps"))?;

    let status = std::fs::read_to_string("/proc/self/status")
        .map_err(|source| Error::Refused { step: "read /proc/self/status", source })?;
    let left = status
        .lines()
        .filter(|line| line.starts_with("CapEff:") || line.starts_with("CapPrm:"))
        .find(|line| !zero(line));
    match left {
        Some(line) => Err(Error::Left(line.into())),
        None => Ok(()),
    }
}

fn zero(line: &str) -> bool {
    line.split_whitespace().nth(1).is_some_and(|mask| mask.bytes().all(|b| b == b'0'))
}

/// Uid and primary group of a user in the text of `/etc/passwd`; never root's.
fn identity(passwd: &str, user: &str) -> Option<(Uid, Gid)> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? != user {
            return None;
        }
        let uid: u32 = fields.nth(1)?.parse().ok()?;
        let gid: u32 = fields.next()?.parse().ok()?;
        (uid != 0 && gid != 0 && uid != u32::MAX && gid != u32::MAX).then(|| (Uid::from_raw(uid), Gid::from_raw(gid)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_found_and_roots_is_not_taken() {
        let passwd =
            "root:x:0:0:root:/root:/bin/bash\npepo-edge:x:998:997::/nonexistent:/usr/sbin/nologin\nbad:x:0:12::/:/\n";
        let found = identity(passwd, "pepo-edge").map(|(uid, gid)| (uid.as_raw(), gid.as_raw()));
        assert_eq!(found, Some((998, 997)));
        assert!(identity(passwd, "bad").is_none());
        assert!(identity(passwd, "pepo").is_none());
    }

    #[test]
    fn a_mask_is_zero_or_not() {
        assert!(zero("CapEff:\t0000000000000000"));
        assert!(!zero("CapEff:\t0000000000000400"));
    }
}
