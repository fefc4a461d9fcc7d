//! What lies in the directories of Images and is none: for `pepo sweep`.
//!
//! An Image is a directory named by its digest with a manifest in it; a name points to one. Whatever else is there was left
//! by something that was cut off, or put there by somebody else. What a build uses now is left alone by the caller, who
//! knows whether one runs. Follows no link.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::{DIRECTORY, NAMES, TEMPORARY, is_digest, manifest};

/// Something that is no Image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// `image` or `image name`.
    pub kind: &'static str,
    /// Where it is.
    pub path: PathBuf,
    /// Seconds since it was changed last.
    pub age_seconds: Option<u64>,
}

/// Whether a build may be at work on what is in the directory for parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builds {
    /// One may.
    Run,
    /// None does.
    Rest,
}

/// What is left in an instance's state directory.
pub fn look(state: &Path, builds: Builds) -> Vec<Left> {
    let root = state.join(DIRECTORY);
    let mut left = Vec::new();
    for (name, path) in entries(&root) {
        let is_image = is_digest(&name) && path.join(manifest::MANIFEST).is_file();
        if name != NAMES && name != TEMPORARY && !is_image {
            left.push(of("image", path));
        }
    }
    for (_, path) in entries(&root.join(NAMES)) {
        let digest = fs::read_to_string(&path).unwrap_or_default();
        let digest = digest.trim();
        if !is_digest(digest) || !root.join(digest).is_dir() {
            left.push(of("image name", path));
        }
    }
    if builds == Builds::Rest {
        left.extend(entries(&root.join(TEMPORARY)).map(|(_, path)| of("image", path)));
    }
    left
}

/// Removes one. What is not there is removed.
///
/// # Errors
/// It stayed.
pub fn remove(left: &Left) -> io::Result<()> {
    let meta = match fs::symlink_metadata(&left.path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if meta.is_dir() { fs::remove_dir_all(&left.path) } else { fs::remove_file(&left.path) }
}

fn of(kind: &'static str, path: PathBuf) -> Left {
    let changed = fs::symlink_metadata(&path).and_then(|meta| meta.modified()).ok();
    let age = changed.and_then(|changed| SystemTime::now().duration_since(changed).ok());
    Left { kind, path, age_seconds: age.map(|age| age.as_secs()) }
}

fn entries(directory: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_stay_and_the_rest_is_found_and_removed() {
        let state = tempfile::tempdir().expect("directory");
        let at = |path: &str| state.path().join(DIRECTORY).join(path);
        let (whole, half) = ("a".repeat(64), "b".repeat(64));
        for directory in [NAMES, TEMPORARY, &whole, &half, "tmp/build-1"] {
            fs::create_dir_all(at(directory)).expect("directory");
        }
        fs::write(at(&whole).join(manifest::MANIFEST), "{}").expect("manifest");
        fs::write(at("names/base"), format!("{whole}\n")).expect("name");
        fs::write(at("names/gone"), format!("{}\n", "c".repeat(64))).expect("name");
        std::os::unix::fs::symlink("/etc", at("link")).expect("link");
        let found = |builds| {
            let mut names: Vec<_> = look(state.path(), builds)
                .into_iter()
                .map(|left| (left.kind, left.path.file_name().expect("name").to_string_lossy().into_owned()))
                .collect();
            names.sort();
            names
        };
        let some = [("image", half.clone()), ("image", "link".to_owned()), ("image name", "gone".to_owned())];
        assert_eq!(found(Builds::Run), some);
        let all = look(state.path(), Builds::Rest);
        assert_eq!(all.len(), 4, "{all:?}");
        for left in &all {
            remove(left).expect("remove");
            remove(left).expect("absent is done");
        }
        assert!(found(Builds::Rest).is_empty());
        assert!(at(&whole).join(manifest::MANIFEST).exists() && Path::new("/etc/passwd").exists());
    }
}
