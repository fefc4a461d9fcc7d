//! Paths of other places that are kept in a mounted tree. Called by `agent`, in a guest only.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use pepo_proto::{FailureCode, Keep, Outcome};
use rustix::mount::mount_bind;

use crate::stream::failed;
use crate::user::User;

/// Keeps paths in a mounted tree: each has its like below `top`, bound over its place. What is at the place already, and
/// not kept yet, is where keeping begins.
///
/// # Errors
/// What the host is to be told.
pub fn keep(keep: &Keep, user: &User) -> Result<(), Outcome> {
    let top = Path::new(&keep.top);
    for path in &keep.paths {
        let wrong = || failed(FailureCode::Invalid, format!("{path:?} cannot be kept"));
        let place = match path.strip_prefix("~/") {
            Some(rest) => Path::new(&user.home).join(rest),
            None => PathBuf::from(path),
        };
        let parts: Vec<_> = place.components().skip(1).collect();
        let plain = parts.iter().all(|part| matches!(part, std::path::Component::Normal(_)));
        if !place.is_absolute() || parts.is_empty() || !plain || place.starts_with(top) || top.starts_with(&place) {
            return Err(wrong());
        }
        let told = |what: &str, error: io::Error| failed(FailureCode::Io, format!("{what} {path}: {error}"));
        let kept = top.join(place.strip_prefix("/").map_err(|_| wrong())?);
        let is_file = match (fs::symlink_metadata(&kept), fs::metadata(&place)) {
            (Ok(kept), _) => kept.is_file(),
            (Err(_), Ok(place)) => place.is_file(),
            (Err(_), Err(_)) => false,
        };
        let above = |path: &Path| path.parent().map(Path::to_owned).unwrap_or_default();
        directories(&above(&kept), user).map_err(|error| told("make", error))?;
        if fs::symlink_metadata(&kept).is_err() {
            begin(&place, &kept, is_file, user).map_err(|error| told("begin to keep", error))?;
        }
        directories(&above(&place), user).map_err(|error| told("make", error))?;
        if fs::metadata(&place).is_err() {
            let made = if is_file { fs::File::create(&place).map(drop) } else { fs::create_dir(&place) };
            made.and_then(|()| own(&place, user)).map_err(|error| told("make", error))?;
        }
        mount_bind(&kept, &place).map_err(|error| told("bind", error.into()))?;
    }
    Ok(())
}

/// The first content of what is kept: that of its place.
fn begin(place: &Path, kept: &Path, is_file: bool, user: &User) -> io::Result<()> {
    if is_file {
        match fs::copy(place, kept) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::File::create(kept).map(drop)?,
            done => drop(done?),
        }
        return own(kept, user);
    }
    fs::create_dir(kept)?;
    own(kept, user)?;
    let entries = match fs::read_dir(place) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let (from, to) = (entry.path(), kept.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_symlink() {
            symlink(fs::read_link(&from)?, &to)?;
        } else {
            begin(&from, &to, !kind.is_dir(), user)?;
            fs::set_permissions(&to, fs::metadata(&from)?.permissions())?;
        }
    }
    Ok(())
}

fn own(path: &Path, user: &User) -> io::Result<()> {
    std::os::unix::fs::lchown(path, Some(user.uid), Some(user.gid))
}

/// Makes what is missing of a path, each part the user's.
fn directories(path: &Path, user: &User) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(above) = path.parent() {
        directories(above, user)?;
    }
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        done => done?,
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    own(path, user)
}
