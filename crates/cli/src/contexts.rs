//! Names for places: `~/.config/pepo/config.toml`. It may hold keys, so it is the user's alone.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::fail::{Failure, Outcome};

/// The file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contexts {
    /// The one that is meant where none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// All of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub contexts: BTreeMap<String, Place>,
}

/// One of them: an edge, or an instance on this machine.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Of the edge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// For the edge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Certificates that vouch for the edge, in place of the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// `PEPO_HOME` of an instance on this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<PathBuf>,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Place").field("url", &self.url).field("home", &self.home).finish_non_exhaustive()
    }
}

/// Where the file is, by the environment.
pub fn path(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    variable("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".config")))
        .map(|directory| directory.join("pepo").join("config.toml"))
}

/// What it says; nothing where it is not there.
pub fn load(path: &Path) -> Outcome<Contexts> {
    let cannot = |why: String| Failure::new(format!("cannot read {}: {why}", path.display()));
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Contexts::default()),
        Err(error) => return Err(cannot(error.to_string())),
    };
    // What is wrong is told by its place alone: the line may hold a key.
    let contexts: Contexts = toml::from_str(&text).map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        Failure::new(format!("{}, line {line}: {}", path.display(), error.message()))
    })?;
    let mode = std::fs::metadata(path).map_err(|error| cannot(error.to_string()))?.mode();
    if mode & 0o077 != 0 && contexts.contexts.values().any(|place| place.key.is_some()) {
        return Err(Failure::new(format!("{} has keys in it, and others may read it", path.display()))
            .hint(format!("chmod 600 {}", path.display())));
    }
    Ok(contexts)
}

/// Writes it, whole or not at all, for nobody else to read.
pub fn save(path: &Path, contexts: &Contexts) -> Outcome<()> {
    let cannot = |error: std::io::Error| Failure::new(format!("cannot write {}: {error}", path.display()));
    let text =
        toml::to_string(contexts).map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))?;
    if let Some(directory) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(cannot)?;
    }
    let draft = path.with_extension(format!("new-{}", std::process::id()));
    let written = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&draft, path));
    written.map_err(|error| {
        // It may not be there at all.
        let _ = std::fs::remove_file(&draft);
        cannot(error)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn with_key() -> Contexts {
        let place = Place { url: Some("https://h".into()), key: Some("pepo_secret".into()), ..Place::default() };
        Contexts { current: Some("a".into()), contexts: [("a".to_owned(), place)].into() }
    }

    #[test]
    fn a_file_with_keys_is_the_users_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pepo/config.toml");
        assert_eq!(load(&path).unwrap(), Contexts::default());
        save(&path, &with_key()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(load(&path).unwrap(), with_key());
        assert!(!format!("{:?}", with_key()).contains("secret"));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert!(load(&path).unwrap_err().message().contains("others may read it"));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no draft is left");
    }

    #[test]
    fn what_is_wrong_is_told_without_what_stands_there() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        for text in ["[contexts.a]\nkey = 'pepo_secret\n", "[contexts.a]\nkee = 'pepo_secret'\n"] {
            std::fs::write(&path, text).unwrap();
            let refused = load(&path).unwrap_err();
            assert!(refused.message().contains("line 2") && !refused.message().contains("secret"), "{refused:?}");
        }
    }
}
