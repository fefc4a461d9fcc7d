//! What is made as root before rights are given up: the instance's directories, its lock, its sockets.
//!
//! ```text
//! state/            root, 0711 and sticky-free: pepod passes through and changes nothing in it
//!   store/          pepo, 0700
//!   images/ initramfs/   pepo, 0755: what Plans name; the privileged side reads them
//!   jail/           root, 0711
//! run/              root, 0755
//!   operator.sock   root:pepo, 0660        edge.sock   root:pepo-edge, 0660
//! ```

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use pepo_api::Leftover;
use pepo_sandbox::registry::Instance;
use pepo_sandbox::sweep::Act;

use crate::accounts::Account;
use crate::config::Places;
use crate::image::left::{self, Builds, Left};

/// Why the places are not ready.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A step failed.
    #[error("cannot {what} {path}")]
    Step {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// pepod's user cannot get there.
    #[error("the user `pepo` cannot enter {0}; choose a PEPO_HOME below directories that are open to others (o+x)")]
    Closed(PathBuf),
    /// Another pepod runs this instance, or none can be leased.
    #[error(transparent)]
    Instance(#[from] pepo_sandbox::registry::Error),
}

fn step(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Step { what, path, source }
}

/// Makes directories with their owners and modes, and takes the instance.
///
/// # Errors
/// See [`Error`].
pub fn prepare(places: &Places, pepo: Account) -> Result<Instance, Error> {
    let root = rustix::process::geteuid().is_root();
    let jails = places.state.join("jail");
    let as_root: &[(&Path, u32)] = &[(&places.state, 0o711), (&jails, 0o711), (&places.run, 0o755)];
    for (path, mode) in as_root {
        fs::create_dir_all(path).map_err(step("make", path))?;
        if root {
            chown(path, Some(0), Some(0)).map_err(step("own", path))?;
        }
        fs::set_permissions(path, fs::Permissions::from_mode(*mode)).map_err(step("open", path))?;
    }
    for (name, mode) in [("store", 0o700), ("images", 0o700), ("initramfs", 0o700)] {
        let path = places.state.join(name);
        fs::create_dir_all(&path).map_err(step("make", &path))?;
        if root {
            own_tree(&path, pepo).map_err(step("own", &path))?;
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(step("open", &path))?;
    }
    if root {
        enterable(&places.state)?;
    }
    if root {
        return Ok(Instance::acquire(&places.state, &jails)?);
    }
    // Only a test build comes here: a registry of its own, since the machine's is root's.
    let registry = places.state.join("registry");
    fs::create_dir_all(&registry).map_err(step("make", &registry))?;
    Ok(Instance::acquire_in(&registry, &places.state, &jails)?)
}

/// Gives a tree to pepod: what was copied in by root would be foreign to it otherwise. Follows no link.
fn own_tree(path: &Path, pepo: Account) -> io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    use std::os::unix::fs::MetadataExt;
    if meta.uid() != pepo.uid || meta.gid() != pepo.gid {
        std::os::unix::fs::lchown(path, Some(pepo.uid), Some(pepo.gid))?;
    }
    if meta.is_dir() {
        for entry in fs::read_dir(path)? {
            own_tree(&entry?.path(), pepo)?;
        }
    }
    Ok(())
}

/// Every directory above must let others through.
fn enterable(path: &Path) -> Result<(), Error> {
    for above in path.ancestors().skip(1) {
        let mode = fs::metadata(above).map_err(step("look at", above))?.permissions().mode();
        if mode & 0o001 == 0 {
            return Err(Error::Closed(above.into()));
        }
    }
    Ok(())
}

/// Binds a socket in the place of the one that a dead pepod left: the instance is ours, so nobody listens on it.
///
/// # Errors
/// See [`Error`].
pub fn bind(path: &Path, group: Option<u32>) -> Result<UnixListener, Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(step("remove", path)(error)),
        _ => {}
    }
    // Nobody may connect before mode and owner are right.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o777));
    let bound = UnixListener::bind(path);
    rustix::process::umask(before);
    let socket = bound.map_err(step("bind", path))?;
    if let Some(group) = group {
        chown(path, Some(0), Some(group)).map_err(step("own", path))?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o660)).map_err(step("open", path))?;
    Ok(socket)
}

/// Removes the sockets of an instance that is ending.
pub fn unbind(places: &Places) {
    for path in [places.operator_socket(), places.edge_socket()] {
        // What is not there is removed.
        let _ = fs::remove_file(path);
    }
}

/// Something on the host, as the API shows it.
pub fn leftover(left: pepo_sandbox::host::Leftover) -> Leftover {
    let (removed, error) = match left.removed {
        Some(Ok(())) => (true, None),
        Some(Err(why)) => (false, Some(why)),
        None => (false, None),
    };
    Leftover {
        kind: left.kind,
        name: left.name,
        age_seconds: left.age_seconds,
        owner: left.owner.map_or(left.tag, |owner| owner.display().to_string()),
        removed,
        error,
    }
}

/// Files and directories of the state that are nothing's: no Image's. (Where Pepo keeps more in files, it is looked at
/// here.)
pub fn left_files(state: &Path, builds: Builds, act: Act, owner: &str) -> Vec<Leftover> {
    let leftover = |left: Left| {
        let removed = match act {
            Act::Look => None,
            Act::Remove => Some(left::remove(&left)),
        };
        Leftover {
            kind: left.kind.into(),
            name: left.path.display().to_string(),
            age_seconds: left.age_seconds,
            owner: owner.to_owned(),
            removed: matches!(removed, Some(Ok(()))),
            error: removed.and_then(Result::err).map(|error| error.to_string()),
        }
    };
    left::look(state, builds).into_iter().map(leftover).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_takes_the_place_of_a_dead_one() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("s.sock");
        drop(bind(&path, None).expect("first"));
        let socket = bind(&path, None).expect("second");
        assert_eq!(fs::metadata(&path).expect("stat").permissions().mode() & 0o777, 0o660);
        std::os::unix::net::UnixStream::connect(&path).expect("connect");
        drop(socket);
    }
}
