//! The system users: `pepo`, which pepod is, and `pepo-edge`, which the edge is. Made here where they are missing and this
//! is root, with the system's own `useradd`; their numbers read from `/etc/passwd`, where system users are.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

/// pepod's user and group.
pub const PEPO: &str = "pepo";
/// The edge's user and group.
pub const EDGE: &str = "pepo-edge";

/// Why a user is not there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is missing and this is not root.
    #[error("the system user `{0}` does not exist; `pepo up` as root, or `make install`, makes it")]
    Missing(&'static str),
    /// It could not be made.
    #[error(
        "cannot make the system user `{name}`: {reason}; make it by hand: useradd --system --user-group --no-create-home --shell /usr/sbin/nologin {name}"
    )]
    NotMade {
        /// Which.
        name: &'static str,
        /// What `useradd` says.
        reason: String,
    },
    /// The list of users cannot be read.
    #[error("cannot read /etc/passwd")]
    Read(#[source] io::Error),
    /// Its number is root's.
    #[error("the user `{0}` has uid or gid 0")]
    Root(&'static str),
}

/// A user's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its uid.
    pub uid: u32,
    /// Its primary gid.
    pub gid: u32,
}

/// The account of that name, made where it is missing and this is root.
///
/// # Errors
/// See [`Error`].
pub fn ensure(name: &'static str) -> Result<Account, Error> {
    if let Some(account) = find(name)? {
        return Ok(account);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Missing(name));
    }
    make(name)?;
    find(name)?.ok_or(Error::Missing(name))
}

/// The account of that name, if there is one.
///
/// # Errors
/// See [`Error`].
pub fn find(name: &'static str) -> Result<Option<Account>, Error> {
    let passwd = std::fs::read_to_string("/etc/passwd").map_err(Error::Read)?;
    match account(&passwd, name) {
        Some(Account { uid: 0, .. } | Account { gid: 0, .. }) => Err(Error::Root(name)),
        found => Ok(found),
    }
}

fn account(passwd: &str, name: &str) -> Option<Account> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? != name {
            return None;
        }
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some(Account { uid, gid })
    })
}

fn make(name: &'static str) -> Result<(), Error> {
    let failed = |reason: String| Error::NotMade { name, reason };
    let program =
        ["/usr/sbin/useradd", "/sbin/useradd", "/usr/bin/useradd"].into_iter().find(|path| Path::new(path).exists());
    let program = program.ok_or_else(|| failed("useradd is not there".into()))?;
    let made = Command::new(program)
        .args([
            "--system",
            "--user-group",
            "--no-create-home",
            "--home-dir",
            "/nonexistent",
            "--shell",
            "/usr/sbin/nologin",
        ])
        .arg(name)
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(error.to_string()))?;
    // Two that start at once: the other has made it (9: the name is in use).
    if made.status.success() || made.status.code() == Some(9) {
        return Ok(());
    }
    Err(failed(String::from_utf8_lossy(&made.stderr).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_and_broken_lines_skipped() {
        let passwd = "root:x:0:0::/root:/bin/sh\npepo:x\npepo-edge:x:998:997::/:/x\npepo:x:999:996::/:/x\n";
        assert_eq!(account(passwd, "pepo"), Some(Account { uid: 999, gid: 996 }));
        assert_eq!(account(passwd, "pepo-edge"), Some(Account { uid: 998, gid: 997 }));
        assert_eq!(account(passwd, "nobody-here"), None);
    }
}
