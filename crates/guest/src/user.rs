//! Users of the guest: who a name or number is, and a thread that acts with their rights.
//!
//! Reads `/etc/passwd` and `/etc/group` as they are now (a command may have changed them), remembered until either
//! changes. Called by `spawn` and `files`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::thread::set_thread_groups;

use crate::sys;

/// The user that commands run as where none is named, if the Image has it.
const DEFAULT_USER: &str = "agent";

/// The largest user database that is read.
const MAX_FILE: u64 = 1 << 20;

/// A user, resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Its name, or its number where it has none.
    pub name: String,
    /// User number.
    pub uid: u32,
    /// Group number.
    pub gid: u32,
    /// Supplementary groups, the primary one among them.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: PathBuf,
    /// Login shell.
    pub shell: PathBuf,
}

/// Why there is no such user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Neither a known name nor `uid[:gid]`.
    #[error("no user {0:?}")]
    Unknown(String),
    /// A name or number with something in it that cannot be.
    #[error("{0:?} is neither a user's name nor uid[:gid]")]
    Malformed(String),
}

/// What a file was when it was read.
type Seen = Option<(u64, i64, i64, i64)>;

/// The user database.
pub struct Users {
    root: PathBuf,
    cache: RefCell<(Seen, Seen, HashMap<Option<String>, User>)>,
}

impl Users {
    /// The database under `root` (`/`, or a test's directory).
    pub fn new(root: &Path) -> Self {
        Users { root: root.to_owned(), cache: RefCell::default() }
    }

    /// Who `user` is: a name, `uid`, `uid:gid`, or the default user.
    pub fn find(&self, user: Option<&str>) -> Result<User, Error> {
        let (passwd, group) = (self.root.join("etc/passwd"), self.root.join("etc/group"));
        let seen = (seen(&passwd), seen(&group));
        {
            let mut cache = self.cache.borrow_mut();
            if (cache.0, cache.1) != seen || cache.2.len() > 64 {
                *cache = (seen.0, seen.1, HashMap::new());
            }
            if let Some(user) = cache.2.get(&user.map(str::to_owned)) {
                return Ok(user.clone());
            }
        }
        let found = resolve(user, &read(&passwd), &read(&group))?;
        self.cache.borrow_mut().2.insert(user.map(str::to_owned), found.clone());
        Ok(found)
    }
}

fn seen(path: &Path) -> Seen {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.ino(), metadata.ctime(), metadata.ctime_nsec(), metadata.size() as i64))
}

fn read(path: &Path) -> Vec<u8> {
    use std::io::Read;
    let mut bytes = vec![];
    if let Ok(file) = std::fs::File::open(path) {
        // Unreadable or huge: as if it had no more entries.
        let _ = file.take(MAX_FILE).read_to_end(&mut bytes);
    }
    bytes
}

/// One line of passwd: name, uid, gid, home, shell.
fn entry(line: &[u8]) -> Option<(&str, u32, u32, PathBuf, PathBuf)> {
    let mut fields = line.split(|byte| *byte == b':');
    let name = str::from_utf8(fields.next()?).ok().filter(|name| !name.is_empty())?;
    let (_, uid, gid) = (fields.next()?, number(fields.next()?)?, number(fields.next()?)?);
    let _gecos = fields.next()?;
    let path = |field: Option<&[u8]>, default: &str| match field {
        Some(bytes) if !bytes.is_empty() => PathBuf::from(OsString::from_vec(bytes.to_vec())),
        _ => PathBuf::from(default),
    };
    Some((name, uid, gid, path(fields.next(), "/"), path(fields.next(), "/bin/sh")))
}

fn number(field: &[u8]) -> Option<u32> {
    let number = str::from_utf8(field).ok()?;
    // u32::MAX means "no change" to the system calls.
    number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok())?.filter(|n| *n != u32::MAX)
}

fn resolve(wanted: Option<&str>, passwd: &[u8], group: &[u8]) -> Result<User, Error> {
    let lines = || passwd.split(|byte| *byte == b'\n').filter_map(entry);
    let mut explicit_gid = None;
    let found = match wanted {
        None => lines().find(|line| line.0 == DEFAULT_USER).or_else(|| lines().find(|line| line.1 == 0)),
        Some("") => return Err(Error::Malformed(String::new())),
        Some(text) if text.as_bytes()[0].is_ascii_digit() => {
            let malformed = || Error::Malformed(text.to_owned());
            let (uid, gid) = match text.split_once(':') {
                Some((uid, gid)) => (uid, Some(number(gid.as_bytes()).ok_or_else(malformed)?)),
                None => (text, None),
            };
            let uid = number(uid.as_bytes()).ok_or_else(malformed)?;
            explicit_gid = gid;
            let unnamed = move || ("", uid, gid.unwrap_or(uid), PathBuf::from("/"), PathBuf::from("/bin/sh"));
            Some(lines().find(|line| line.1 == uid).unwrap_or_else(unnamed))
        }
        Some(name) => match lines().find(|line| line.0 == name) {
            Some(line) => Some(line),
            None => return Err(Error::Unknown(name.to_owned())),
        },
    };
    let (name, uid, gid, home, shell) =
        found.unwrap_or(("root", 0, 0, PathBuf::from("/root"), PathBuf::from("/bin/sh")));
    let gid = explicit_gid.unwrap_or(gid);
    let mut groups = vec![gid];
    if explicit_gid.is_none() && !name.is_empty() {
        groups.extend(memberships(name, group).filter(|member| *member != gid));
        groups.truncate(1024);
    }
    let name = if name.is_empty() { uid.to_string() } else { name.to_owned() };
    Ok(User { name, uid, gid, groups, home, shell })
}

/// Groups that list `name` among their members.
fn memberships<'a>(name: &'a str, group: &'a [u8]) -> impl Iterator<Item = u32> + 'a {
    group.split(|byte| *byte == b'\n').filter_map(move |line| {
        let mut fields = line.split(|byte| *byte == b':');
        let gid = number(fields.nth(2)?)?;
        let mut members = fields.next()?.split(|byte| *byte == b',');
        members.any(|member| member == name.as_bytes()).then_some(gid)
    })
}

/// While it lives, the calling thread touches files with a user's rights. The agent's other rights stay: code under a
/// guard opens, makes and removes files and does nothing else.
pub struct Acting {
    switched: bool,
}

impl Acting {
    /// Starts acting as `user`. A process that is not root acts as itself.
    ///
    /// # Errors
    /// The kernel's, when the identity cannot be taken: nothing must be done then.
    pub fn start(user: &User) -> std::io::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Ok(Acting { switched: false });
        }
        let groups: Vec<_> = user.groups.iter().map(|gid| rustix::process::Gid::from_raw(*gid)).collect();
        // Armed before the first step, so that a failure half-way is undone too.
        let acting = Acting { switched: true };
        set_thread_groups(&groups)?;
        sys::set_thread_fsgid(user.gid);
        sys::set_thread_fsuid(user.uid);
        // These calls report nothing: what they did shows in what they find.
        if sys::set_thread_fsuid(u32::MAX) != user.uid || sys::set_thread_fsgid(u32::MAX) != user.gid {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        Ok(acting)
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        if self.switched {
            sys::set_thread_fsuid(0);
            sys::set_thread_fsgid(0);
            // Root may always drop its groups; should it fail, the thread has groups it does not use as root.
            let _ = set_thread_groups(&[]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\nbroken\nagent:x:1000:1000::/home/agent:/bin/bash\nodd:x:7:8::::\nmax:x:4294967295:0::/:\n";
    const GROUP: &[u8] = b"root:x:0:\nsudo:x:27:agent,odd\nagent:x:1000:\nvideo:x:44:someone,agent\n";

    #[test]
    fn finds_names_numbers_and_the_default() {
        let agent = resolve(None, PASSWD, GROUP).unwrap();
        assert_eq!((agent.uid, agent.gid, &agent.groups[..]), (1000, 1000, &[1000, 27, 44][..]));
        assert_eq!(agent.home, Path::new("/home/agent"));
        assert_eq!(resolve(Some("1000"), PASSWD, GROUP).unwrap(), agent);
        let other = resolve(Some("1000:5"), PASSWD, GROUP).unwrap();
        assert_eq!((other.gid, &other.groups[..]), (5, &[5][..]));
        let unnamed = resolve(Some("4242"), PASSWD, GROUP).unwrap();
        assert_eq!((unnamed.name.as_str(), unnamed.uid, unnamed.gid), ("4242", 4242, 4242));
        assert_eq!(resolve(None, b"root:x:0:0::/root:/bin/sh\n", b"").unwrap().name, "root");
        assert_eq!(resolve(None, b"", b"").unwrap().uid, 0);
        assert_eq!(resolve(Some("odd"), PASSWD, GROUP).unwrap().shell, Path::new("/bin/sh"));
    }

    #[test]
    fn refuses_what_is_nobody() {
        for text in ["", "nobody-here", "12x", "1:", ":1", "4294967295", "1:4294967295", "99999999999", "max"] {
            assert!(resolve(Some(text), PASSWD, GROUP).is_err(), "{text}");
        }
    }
}
