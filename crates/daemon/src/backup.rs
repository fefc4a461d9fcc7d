//! A backup: what of an instance cannot be made again, as one tar stream, and the way back.
//!
//! ```text
//! create: the store as it is at one moment (VACUUM INTO, writers go on) ─┐
//!         key of secrets, settings, recipes of Images, Workspaces ───────┴─► tar ─► the caller; manifest.json last
//! restore: stdin ─► beside the store, bounded and only names we know ─► digests, schema, soundness ─► renamed into place
//!          Workspaces ─► imported by the next pepod, each in its jail
//! ```
//! A stream without its manifest is no backup. Restoring needs the instance's lock, so it refuses while pepod runs; what
//! was there is moved aside, never overwritten. The archive holds the key of secrets: it is as precious as they are.

pub mod workspaces;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use pepo_api::{BackupFile, BackupManifest, RestoreReport};
use sha2::{Digest as _, Sha256};

use crate::accounts::Account;
use crate::config::Places;
use crate::secrets::KEY_FILE;
use crate::store::{self, hex};
use crate::workspace::Workspaces;
use crate::{image, places};

/// Changes when an older release could not read what is in it.
const FORMAT: u32 = 1;

const MANIFEST: &str = "manifest.json";
const STORE: &str = "store/pepo.db";
const KEY: &str = "store/secret.key";
const CONFIG: &str = "pepo.toml";
const RECIPES: &str = "recipes/";

/// The longest manifest or settings file, bytes.
const SMALL: u64 = 16 << 20;

/// The largest store, bytes.
const LARGE: u64 = 1 << 40;

/// Recipes at the most.
const MOST_RECIPES: usize = 10_000;

/// What no backup has, in words for people.
const LACKS: [&str; 3] = [
    "what Sandboxes had in memory and on scratch disks: Sessions that lived are found without their Sandbox",
    "files of Images: build them again from their recipes",
    "files of Workspaces as they were at one moment: each file is as it was when it was read",
];

/// Writes a backup. The store's copy is made in `scratch`, which is removed again.
///
/// # Errors
/// A disk that fails, or a reader that went away.
pub fn create(workspaces: &Workspaces, places: &Places, out: impl Write) -> anyhow::Result<()> {
    let store = workspaces.store();
    let copy = Copy(places.store_directory().join("backup.db"));
    copy.clear()?;
    store.copy_to(&copy.0).context("cannot copy the store")?;
    let mut manifest = BackupManifest {
        format: FORMAT,
        release: env!("CARGO_PKG_VERSION").into(),
        schema: store::SCHEMA,
        made_at: store::now(),
        files: BTreeMap::new(),
        lacks: LACKS.iter().map(|text| (*text).to_owned()).collect(),
    };
    let mut tar = tar::Builder::new(out);
    add(&mut tar, &mut manifest, STORE, &copy.0)?;
    drop(copy);
    add(&mut tar, &mut manifest, KEY, &places.store_directory().join(KEY_FILE))?;
    match File::open(&places.file) {
        Ok(_) => add(&mut tar, &mut manifest, CONFIG, &places.file)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        // Root's own file may be closed to us.
        Err(error) => manifest.lacks.push(format!("the settings in {}: {error}", places.file.display())),
    }
    for (name, path) in recipes(&places.state)? {
        add(&mut tar, &mut manifest, &format!("{RECIPES}{name}.json"), &path)?;
    }
    workspaces::add(&mut tar, &mut manifest, workspaces)?;
    let text = serde_json::to_vec_pretty(&manifest)?;
    tar.append_data(&mut header(text.len() as u64), MANIFEST, &text[..])?;
    tar.into_inner()?.flush()?;
    Ok(())
}

/// The store's copy, while it is needed.
struct Copy(PathBuf);

impl Copy {
    fn clear(&self) -> anyhow::Result<()> {
        match std::fs::remove_file(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", self.0.display()))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // The next backup clears it too.
        let _ = self.clear();
    }
}

fn header(bytes: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes);
    header.set_mode(0o600);
    header.set_entry_type(tar::EntryType::Regular);
    header
}

fn add<W: Write>(
    tar: &mut tar::Builder<W>,
    manifest: &mut BackupManifest,
    name: &str,
    path: &Path,
) -> anyhow::Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let bytes = file.metadata()?.len();
    let mut reader = Digesting { from: file.take(bytes), digest: Sha256::new(), bytes: 0 };
    tar.append_data(&mut header(bytes), name, &mut reader)
        .with_context(|| format!("cannot pass on {}", path.display()))?;
    manifest.files.insert(name.to_owned(), reader.told());
    Ok(())
}

/// Passes bytes on and takes their digest.
struct Digesting<R> {
    from: R,
    digest: Sha256,
    bytes: u64,
}

impl<R> Digesting<R> {
    fn told(self) -> BackupFile {
        BackupFile { bytes: self.bytes, sha256: hex(&self.digest.finalize()) }
    }
}

impl<R: Read> Read for Digesting<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(into)?;
        self.digest.update(&into[..read]);
        self.bytes += read as u64;
        Ok(read)
    }
}

/// What each Image was made of, by the Image's directory.
fn recipes(state: &Path) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(state.join("images")).context("cannot list the Images")? {
        let entry = entry?;
        let manifest = entry.path().join(image::manifest::MANIFEST);
        let name = entry.file_name().into_string().unwrap_or_default();
        if entry.file_type()?.is_dir() && is_plain(&name) && manifest.is_file() {
            found.push((name, manifest));
        }
    }
    found.sort();
    found.truncate(MOST_RECIPES);
    Ok(found)
}

fn is_plain(name: &str) -> bool {
    (1..=128).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// What becomes of a store that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum There {
    /// It is a reason to refuse.
    Refuse,
    /// It is moved aside.
    MoveAside,
}

/// Puts a backup in place. The caller is root, or is who runs the instance.
///
/// # Errors
/// The instance runs, something is there already, or the archive is not whole, not ours, or of a newer release.
pub fn restore(places: &Places, pepo: Account, there: There, from: impl Read) -> anyhow::Result<RestoreReport> {
    // Its lock: nobody serves this instance meanwhile.
    let _instance =
        places::prepare(places, pepo).context("the instance cannot be taken; end pepod first (`pepo down`)")?;
    let directory = places.store_directory();
    if there == There::Refuse && places.store().exists() {
        anyhow::bail!("{} is there; --replace moves it aside", places.store().display());
    }
    let draft = Draft::new(directory.join("restoring"))?;
    let manifest = unpack(&draft.0, from)?;
    let schema = store::inspect(&draft.0.join("pepo.db")).context("the backup's store cannot be used")?;
    anyhow::ensure!(schema == manifest.schema, "the backup says schema {} and its store has {schema}", manifest.schema);
    store::restored(&draft.0.join("pepo.db")).context("the backup's store cannot be prepared")?;

    let mut notes = Vec::new();
    for name in ["pepo.db", "pepo.db-wal", "pepo.db-shm", KEY_FILE] {
        let (old, aside) = (directory.join(name), directory.join(format!("{name}.before-restore")));
        if old.exists() {
            std::fs::rename(&old, &aside).with_context(|| format!("cannot move {} aside", old.display()))?;
            notes.push(format!("what was in {} is in {} now", old.display(), aside.display()));
        }
    }
    for name in ["pepo.db", KEY_FILE] {
        std::fs::rename(draft.0.join(name), directory.join(name)).with_context(|| format!("cannot place {name}"))?;
    }
    if let Some(told) = settings(&draft.0.join(CONFIG), &places.file)? {
        notes.push(told);
    }
    if let Some(told) = restore_workspaces(&draft.0, &directory)? {
        notes.push(told);
    }
    let recipes = places.state.join("recipes");
    if draft.0.join("recipes").exists() {
        std::fs::create_dir_all(&recipes).with_context(|| format!("cannot make {}", recipes.display()))?;
        for entry in std::fs::read_dir(draft.0.join("recipes"))? {
            let entry = entry?;
            std::fs::rename(entry.path(), recipes.join(entry.file_name()))
                .with_context(|| format!("cannot place a recipe in {}", recipes.display()))?;
        }
        notes.push(format!("what Images were made of is in {}", recipes.display()));
    }
    File::open(&directory).and_then(|directory| directory.sync_all()).context("cannot keep what was placed")?;
    Ok(RestoreReport { manifest, notes })
}

/// Archives of Workspaces wait beside the store for the pepod that makes their trees.
fn restore_workspaces(draft: &Path, store: &Path) -> anyhow::Result<Option<String>> {
    let from = draft.join(workspaces::WORKSPACES);
    if !from.exists() {
        return Ok(None);
    }
    let to = store.join(workspaces::WORKSPACES);
    std::fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
    let mut count = 0;
    for entry in std::fs::read_dir(&from)? {
        let entry = entry?;
        let place = to.join(entry.file_name());
        match std::fs::remove_dir_all(&place) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", place.display()));
            }
            _ => {}
        }
        std::fs::rename(entry.path(), &place).with_context(|| format!("cannot place {}", place.display()))?;
        count += 1;
    }
    Ok(Some(format!(
        "{count} Workspaces are unpacked by the next pepod; those that are on this host already stay as they are"
    )))
}

/// Settings go where they were, unless others are there.
fn settings(from: &Path, to: &Path) -> anyhow::Result<Option<String>> {
    let Ok(text) = std::fs::read(from) else { return Ok(None) };
    let other = match std::fs::read(to) {
        Ok(there) if there == text => return Ok(None),
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", to.display())),
    };
    let place = if other { to.with_extension("toml.restored") } else { to.to_owned() };
    if let Some(directory) = place.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    }
    std::fs::write(&place, text).with_context(|| format!("cannot write {}", place.display()))?;
    Ok(other.then(|| format!("{} stays; the backup's settings are in {}", to.display(), place.display())))
}

/// A directory that is removed with whatever is left in it.
struct Draft(PathBuf);

impl Draft {
    fn new(path: PathBuf) -> anyhow::Result<Self> {
        match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot clear {}", path.display()));
            }
            _ => {}
        }
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Draft(path))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // The next restoration clears it too.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Unpacks into a directory of our own and checks all that the archive says of itself.
fn unpack(into: &Path, from: impl Read) -> anyhow::Result<BackupManifest> {
    let mut archive = tar::Archive::new(from);
    let mut found: BTreeMap<String, BackupFile> = BTreeMap::new();
    let mut manifest: Option<BackupManifest> = None;
    for entry in archive.entries().context("this is not a backup")? {
        let entry = entry.context("the backup is cut off or damaged")?;
        anyhow::ensure!(manifest.is_none(), "the backup goes on after its manifest");
        let name = entry.path().ok().and_then(|path| path.to_str().map(str::to_owned)).unwrap_or_default();
        let recipe = name.strip_prefix(RECIPES).filter(|rest| is_plain(rest) && rest.ends_with(".json"));
        let (place, most) = match (name.as_str(), recipe) {
            (STORE, _) => (into.join("pepo.db"), LARGE),
            (KEY, _) => (into.join(KEY_FILE), SMALL),
            (CONFIG, _) => (into.join(CONFIG), SMALL),
            (MANIFEST, _) => (PathBuf::new(), SMALL),
            (_, Some(recipe)) if found.len() < MOST_RECIPES + 8 => {
                std::fs::create_dir_all(into.join("recipes"))?;
                (into.join("recipes").join(recipe), image::manifest::BYTES)
            }
            _ if let Some(part) = workspaces::place(&name) => {
                let place = into.join(part);
                place.parent().map(std::fs::create_dir_all).transpose()?;
                (place, workspaces::PART as u64)
            }
            _ => anyhow::bail!("`{}` does not belong into a backup", name.escape_debug()),
        };
        let size = entry.header().size().unwrap_or(u64::MAX);
        let plain = entry.header().entry_type() == tar::EntryType::Regular;
        anyhow::ensure!(plain && size <= most, "`{name}` in the backup is no file of at most {most} bytes");
        let mut reader = Digesting { from: entry, digest: Sha256::new(), bytes: 0 };
        if name == MANIFEST {
            let mut text = Vec::new();
            reader.read_to_end(&mut text).context("the backup is cut off")?;
            manifest = Some(read_manifest(&text)?);
            continue;
        }
        use std::os::unix::fs::OpenOptionsExt as _;
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&place)
            .with_context(|| format!("`{name}` is in the backup twice, or cannot be written"))?;
        io::copy(&mut reader, &mut file).with_context(|| format!("cannot unpack {name}"))?;
        file.sync_all().with_context(|| format!("cannot keep {name}"))?;
        anyhow::ensure!(reader.bytes == size, "the backup is cut off in `{name}`");
        found.insert(name, reader.told());
    }
    let manifest = manifest.context("the backup has no manifest: it is cut off, or none")?;
    anyhow::ensure!(found == manifest.files, "files of the backup are not those that its manifest tells of");
    for needed in [STORE, KEY] {
        anyhow::ensure!(found.contains_key(needed), "the backup lacks {needed}");
    }
    Ok(manifest)
}

fn read_manifest(text: &[u8]) -> anyhow::Result<BackupManifest> {
    #[derive(serde::Deserialize)]
    struct Age {
        format: u32,
        schema: u32,
        release: String,
    }
    // First what every release can read.
    let age: Age = serde_json::from_slice(text).context("the backup's manifest cannot be read")?;
    let release: String = age.release.chars().take(40).flat_map(char::escape_debug).collect();
    anyhow::ensure!(
        age.format <= FORMAT && age.schema <= store::SCHEMA,
        "the backup was made by a newer release ({release}, schema {}; this one knows {}); restore it with that release",
        age.schema,
        store::SCHEMA
    );
    serde_json::from_slice(text).context("the backup's manifest cannot be read")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, tar::EntryType, &[u8])]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for (name, kind, bytes) in entries {
            let mut header = header(bytes.len() as u64);
            header.set_entry_type(*kind);
            // Past the checks of the builder, as an attacker would.
            header.as_gnu_mut().expect("gnu").name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_cksum();
            tar.append(&header, *bytes).expect("append");
        }
        tar.into_inner().expect("tar")
    }

    fn refused(bytes: &[u8]) -> String {
        let directory = tempfile::tempdir().expect("directory");
        let error = unpack(directory.path(), bytes).expect_err("refused");
        let outside = std::fs::read_dir(directory.path().parent().expect("parent")).expect("list");
        assert!(outside.flatten().all(|entry| entry.file_name() != "escaped"));
        format!("{error:#}")
    }

    #[test]
    fn what_is_no_backup_is_refused_with_the_reason() {
        use tar::EntryType::{Regular, Symlink};
        let manifest = |format: u32, schema: u32| {
            format!(
                r#"{{"format":{format},"release":"9.0","schema":{schema},"made_at":"2026-01-01T00:00:00Z","files":{{}},"lacks":[]}}"#
            )
        };
        assert!(refused(b"not a tar at all").contains("backup"));
        assert!(refused(&archive(&[(STORE, Regular, b"x")])).contains("no manifest"));
        for name in ["../escaped", "/tmp/escaped", "recipes/../../escaped", "store/other", "recipes/.x.json"] {
            assert!(refused(&archive(&[(name, Regular, b"x")])).contains("does not belong"), "{name}");
        }
        assert!(refused(&archive(&[(STORE, Symlink, b"")])).contains("no file"));
        assert!(refused(&archive(&[(KEY, Regular, b"x"), (KEY, Regular, b"y")])).contains("twice"));
        let newer = manifest(1, store::SCHEMA + 1);
        assert!(refused(&archive(&[(MANIFEST, Regular, newer.as_bytes())])).contains("newer release"));
        let newer = manifest(FORMAT + 1, 1);
        assert!(refused(&archive(&[(MANIFEST, Regular, newer.as_bytes())])).contains("newer release"));
        let untold = manifest(1, 1);
        let swapped = archive(&[(STORE, Regular, b"x"), (MANIFEST, Regular, untold.as_bytes())]);
        assert!(refused(&swapped).contains("not those that its manifest tells of"));
        assert!(refused(&archive(&[(MANIFEST, Regular, untold.as_bytes())])).contains("lacks store/pepo.db"));
        let mut cut = archive(&[(STORE, Regular, &[7; 4096])]);
        cut.truncate(2000);
        assert!(refused(&cut).contains("cut off") || refused(&cut).contains("unpack"));
    }
}
