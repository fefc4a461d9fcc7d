//! Images: read-only root file systems with the kernel and modules they boot with, named by digest.
//!
//! Owns `<state>/images` and `<state>/initramfs`. An Image is a directory that never changes; names are small files that
//! point to one. pepod verifies what a builder made before it gets its name, and nothing here runs a foreign program.
//!
//! ```text
//! <state>/images/<digest>/{rootfs.erofs,vmlinux,modules.cpio,image.json}
//! <state>/images/names/<name>        the digest it points to; written by rename
//! <state>/images/tmp/<build>/        what a build reads and what comes back; emptied at every start
//! <state>/initramfs/…                modules and guest agent, joined
//! ```
//! Callers: `server/image.rs` for the routes, the session driver for [`Images::boot_files`], `pepod build` for
//! [`build::main`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pepo_api::ImageId;
use pepo_sandbox::StatePath;
use sha2::{Digest as _, Sha256};

pub mod build;
pub mod initramfs;
pub mod job;
pub mod kernel;
pub mod left;
pub mod manifest;
pub mod recipe;
mod tree;

use initramfs::Agent;
use manifest::Manifest;
use recipe::Flat;

/// In the state directory.
const DIRECTORY: &str = "images";
const NAMES: &str = "names";
const TEMPORARY: &str = "tmp";

/// Why an Image is not there or not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No Image has that name, id or digest.
    #[error("there is no image {word:?}{}", .meant.as_ref().map(|name| format!(" (did you mean {name:?}?)")).unwrap_or_default())]
    Missing {
        /// What was asked for.
        word: String,
        /// The nearest name that there is.
        meant: Option<String>,
        /// The recipe of that name, if Pepo ships one: it only has to be built.
        recipe: Option<&'static str>,
    },
    /// A name that cannot be one.
    #[error("image name {name:?}: {reason}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Sandboxes use it.
    #[error("image {digest} is in use")]
    InUse {
        /// Which.
        digest: String,
    },
    /// What a builder handed over is not an Image.
    #[error("the built image is not one: {reason}")]
    Invalid {
        /// What is wrong.
        reason: String,
    },
    /// All Images together would take more than they may.
    #[error("an Image of {wanted_mib} MiB has no room: Images take {used_mib} of {limit_mib} MiB (images.budget)")]
    NoRoom {
        /// What this one takes.
        wanted_mib: u64,
        /// What those that are there take.
        used_mib: u64,
        /// What all of them may.
        limit_mib: u64,
    },
    /// A file or directory refuses.
    #[error("{step}")]
    Io {
        /// What was tried.
        step: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

fn at(step: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let step = step.into();
    move |source| Error::Io { step, source }
}

/// Bytes as lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A name, of an Image or a recipe: becomes the name of a file.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 63 {
        return Err("must be 1 to 63 characters long".to_owned());
    }
    if !name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()) || !name.chars().all(plain) {
        return Err("must be of a-z, 0-9, '-', '_' and '.', and begin with a letter or digit".to_owned());
    }
    if is_digest(name) {
        return Err("is a digest".to_owned());
    }
    Ok(())
}

fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// What a build is asked for, as one number: recipe, format, and the tools of this host that show in the result. Two builds
/// with the same inputs differ only by what Debian has published in between.
pub fn inputs_digest(recipe: &Flat) -> String {
    let mut digest = Sha256::new();
    digest.update(format!("{} {} {}\n", manifest::FORMAT, env!("CARGO_PKG_VERSION"), recipe.digest()));
    for tool in ["/usr/bin/mmdebstrap", "/usr/bin/mkfs.erofs"] {
        // A tool that is elsewhere or missing is the builder's to complain about.
        digest.update(build::hash(Path::new(tool)).map(|(_, hash)| hash).unwrap_or_default());
        digest.update("\n");
    }
    hex(&digest.finalize())
}

/// One Image.
#[derive(Clone, Debug)]
pub struct Image {
    /// SHA-256 of its manifest, as hex.
    pub digest: String,
    /// What it is.
    pub manifest: Arc<Manifest>,
    /// The names that point to it.
    pub names: Vec<String>,
    /// When it arrived here.
    pub created_at: jiff::Timestamp,
}

impl Image {
    /// The first 128 bits of its digest.
    pub fn id(&self) -> ImageId {
        id_of(&self.digest)
    }

    /// As the API shows it.
    pub fn to_api(&self, in_use: u32) -> pepo_api::Image {
        pepo_api::Image {
            id: self.id(),
            digest: self.digest.clone(),
            names: self.names.clone(),
            size_bytes: self.manifest.size(),
            kernel: self.manifest.kernel.clone(),
            packages: u32::try_from(self.manifest.packages.len()).unwrap_or(u32::MAX),
            created_at: self.created_at,
            in_use,
        }
    }
}

/// What a Sandbox boots from, relative to the state directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootFiles {
    /// The kernel.
    pub kernel: StatePath,
    /// Modules and guest agent.
    pub initramfs: StatePath,
    /// The root file system.
    pub root: StatePath,
}

/// All Images of this instance.
#[derive(Debug)]
pub struct Images {
    state: PathBuf,
    agent: Agent,
    /// Manifests by digest: they never change, and some are long.
    known: Mutex<BTreeMap<String, Arc<Manifest>>>,
    /// What all of them may take of the disk, MiB; `None`: no limit.
    budget_mib: Option<u64>,
    /// One build at a time: the builder's block of uids is one.
    pub(crate) turn: tokio::sync::Mutex<()>,
}

impl Images {
    /// Opens the instance's Images and throws away what an interrupted build left. `guest` is the guest agent's program;
    /// all Images together take no more of the disk than `budget_mib`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(state: &Path, guest: &Path, budget_mib: Option<u64>) -> Result<Self, Error> {
        let agent = Agent::read(guest).map_err(at(format!("read the guest agent {}", guest.display())))?;
        let (known, turn) = (Mutex::default(), tokio::sync::Mutex::default());
        let images = Images { state: state.to_owned(), agent, known, budget_mib, turn };
        let root = images.root();
        fs::create_dir_all(root.join(NAMES)).map_err(at(format!("make {}", root.display())))?;
        let temporary = root.join(TEMPORARY);
        match fs::remove_dir_all(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(at(format!("empty {}", temporary.display()))(error));
            }
            _ => {}
        }
        fs::create_dir(&temporary).map_err(at(format!("make {}", temporary.display())))?;
        Ok(images)
    }

    fn root(&self) -> PathBuf {
        self.state.join(DIRECTORY)
    }

    /// SHA-256 of the guest agent's archive, as hex: what `pepo version` shows.
    pub fn agent_digest(&self) -> &str {
        self.agent.digest()
    }

    /// Every Image, the newest first.
    ///
    /// # Errors
    /// [`Error::Io`]. One that cannot be read is left out.
    pub fn list(&self) -> Result<Vec<Image>, Error> {
        let mut names = self.names()?;
        let mut out = Vec::new();
        let root = self.root();
        for entry in fs::read_dir(&root).map_err(at("list images"))? {
            let entry = entry.map_err(at("list images"))?;
            let Some(digest) = entry.file_name().to_str().filter(|name| is_digest(name)).map(str::to_owned) else {
                continue;
            };
            let Ok(manifest) = self.manifest(&digest) else { continue };
            let made = entry.metadata().map_err(at("list images"))?.ctime();
            let created_at = jiff::Timestamp::from_second(made).unwrap_or_default();
            let names = names.remove(&digest).unwrap_or_default();
            out.push(Image { digest, manifest, names, created_at });
        }
        out.sort_by(|a, b| b.created_at.cmp(&a.created_at).then(a.digest.cmp(&b.digest)));
        Ok(out)
    }

    /// Names by the digest they point to. A name whose Image is gone is left out by [`Images::list`].
    fn names(&self) -> Result<BTreeMap<String, Vec<String>>, Error> {
        let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for entry in fs::read_dir(self.root().join(NAMES)).map_err(at("list the names of images"))? {
            let entry = entry.map_err(at("list the names of images"))?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            let Ok(digest) = fs::read_to_string(entry.path()) else { continue };
            if check_name(&name).is_ok() && is_digest(digest.trim()) {
                names.entry(digest.trim().to_owned()).or_default().push(name);
            }
        }
        names.values_mut().for_each(|names| names.sort());
        Ok(names)
    }

    fn manifest(&self, digest: &str) -> Result<Arc<Manifest>, Error> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(manifest) = known.get(digest) {
            return Ok(Arc::clone(manifest));
        }
        let manifest = Arc::new(read_manifest(&self.root().join(digest))?);
        known.insert(digest.to_owned(), Arc::clone(&manifest));
        Ok(manifest)
    }

    /// The Image of that name, id, digest, or beginning of a digest (8 digits or more).
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Io`].
    pub fn find(&self, word: &str) -> Result<Image, Error> {
        let images = self.list()?;
        let named = images.iter().find(|image| image.names.iter().any(|name| name == word));
        let hex = word.strip_prefix("img_").or(word.strip_prefix("sha256:")).unwrap_or(word);
        let numbered = || {
            let mut found = images.iter().filter(|image| hex.len() >= 8 && image.digest.starts_with(hex));
            let by_id = images.iter().find(|image| image.id().to_string() == word);
            by_id.or_else(|| found.next().filter(|_| found.next().is_none()))
        };
        if let Some(image) = named.or_else(numbered) {
            return Ok(image.clone());
        }
        let names = images.iter().flat_map(|image| &image.names).map(String::as_str);
        let recipe = recipe::SHIPPED.iter().map(|(name, _)| *name).find(|name| *name == word);
        Err(Error::Missing { word: word.to_owned(), meant: recipe::nearest(word, names), recipe })
    }

    /// The Image that was built from those inputs, if it is here.
    pub(crate) fn built_from(&self, inputs: &str) -> Result<Option<Image>, Error> {
        Ok(self.list()?.into_iter().find(|image| image.manifest.inputs == inputs))
    }

    /// What a Sandbox of that Image boots from. Joins the initramfs the first time.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn boot_files(&self, image: &Image) -> Result<BootFiles, Error> {
        let path = |path: String| {
            StatePath::new(path).map_err(|error| at("name a file of the image")(io::Error::other(error)))
        };
        let modules = self.root().join(&image.digest).join(manifest::MODULES);
        let digest = image.manifest.files.get(manifest::MODULES).map(|file| file.sha256.as_str()).unwrap_or_default();
        let initramfs =
            initramfs::joined(&self.state, &modules, digest, &self.agent).map_err(at("join the initramfs"))?;
        let file = |name: &str| path(format!("{DIRECTORY}/{}/{name}", image.digest));
        Ok(BootFiles { kernel: file(manifest::KERNEL)?, initramfs: path(initramfs)?, root: file(manifest::ROOT)? })
    }

    /// Points a name to an Image, from wherever it pointed before.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Io`].
    pub fn set_name(&self, name: &str, digest: &str) -> Result<(), Error> {
        check_name(name).map_err(|reason| Error::Name { name: name.to_owned(), reason })?;
        let part = self.root().join(TEMPORARY).join(format!("name-{name}"));
        let step = || format!("name the image {name}");
        fs::write(&part, format!("{digest}\n")).map_err(at(step()))?;
        fs::rename(&part, self.root().join(NAMES).join(name)).map_err(at(step()))
    }

    /// Whether one more of that size has room, bytes.
    ///
    /// # Errors
    /// [`Error::NoRoom`], [`Error::Io`].
    pub(crate) fn check_room(&self, wanted: u64) -> Result<(), Error> {
        let Some(limit_mib) = self.budget_mib else { return Ok(()) };
        let used: u64 = self.list()?.iter().map(|image| image.manifest.size()).sum();
        if used.saturating_add(wanted) <= limit_mib << 20 {
            return Ok(());
        }
        Err(Error::NoRoom { wanted_mib: wanted.div_ceil(1 << 20), used_mib: used.div_ceil(1 << 20), limit_mib })
    }

    /// Checks what a builder handed over in `directory` and makes it an Image. The same again is the one that is there.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoRoom`], [`Error::Io`]; the directory stays for the caller to remove.
    pub(crate) fn install(&self, directory: &Path, inputs: &str) -> Result<String, Error> {
        let manifest = read_manifest(directory)?;
        if manifest.inputs != inputs {
            return Err(Error::Invalid { reason: "it was built from other inputs".to_owned() });
        }
        let listed: BTreeSet<&str> = manifest.files.keys().map(String::as_str).collect();
        if listed != BTreeSet::from(manifest::FILES) {
            return Err(Error::Invalid { reason: "its list of files is not that of an image".to_owned() });
        }
        for (name, entry) in &manifest.files {
            let seen = manifest::FileEntry::of(&directory.join(name)).map_err(at(format!("read {name}")))?;
            if seen != *entry {
                return Err(Error::Invalid { reason: format!("{name} is not the file that its manifest lists") });
            }
            // Names point to it only when it is on the disk.
            let file = File::open(directory.join(name)).map_err(at(format!("open {name}")))?;
            file.sync_all().map_err(at(format!("write {name} to the disk")))?;
        }
        let digest = manifest.digest().map_err(at("read the manifest"))?;
        let target = self.root().join(&digest);
        if target.join(manifest::MANIFEST).exists() {
            return Ok(digest);
        }
        self.check_room(manifest.size())?;
        fs::rename(directory, &target).map_err(at(format!("move the image to {}", target.display())))?;
        if let Ok(root) = File::open(self.root()) {
            let _ = root.sync_all();
        }
        Ok(digest)
    }

    /// Removes one Image and the names that point to it.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::InUse`], [`Error::Io`].
    pub fn remove(&self, word: &str, in_use: impl Fn(&ImageId) -> u32) -> Result<Image, Error> {
        let image = self.find(word)?;
        if in_use(&image.id()) > 0 {
            return Err(Error::InUse { digest: image.digest });
        }
        let step = || format!("remove image {}", image.digest);
        for name in &image.names {
            fs::remove_file(self.root().join(NAMES).join(name)).map_err(at(step()))?;
        }
        // Out of sight in one step, then piece by piece: an interrupted removal is finished at the next start.
        let gone = self.root().join(TEMPORARY).join(&image.digest);
        fs::rename(self.root().join(&image.digest), &gone).map_err(at(step()))?;
        fs::remove_dir_all(&gone).map_err(at(step()))?;
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&image.digest);
        Ok(image)
    }

    /// Removes every Image that nothing names and nobody uses.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn gc(&self, in_use: impl Fn(&ImageId) -> u32) -> Result<Vec<Image>, Error> {
        let mut removed = Vec::new();
        for image in self.list()? {
            if image.names.is_empty() && in_use(&image.id()) == 0 {
                removed.push(self.remove(&image.digest, &in_use)?);
            }
        }
        Ok(removed)
    }
}

fn id_of(digest: &str) -> ImageId {
    let digits: String = digest.chars().take(32).collect();
    // Every digest here is 64 hex digits; the last alternative is never taken.
    format!("img_{digits}").parse().unwrap_or_else(|_| ImageId::generate())
}

fn read_manifest(directory: &Path) -> Result<Manifest, Error> {
    let path = directory.join(manifest::MANIFEST);
    let file = File::open(&path).map_err(at(format!("open {}", path.display())))?;
    let mut text = Vec::new();
    file.take(manifest::BYTES).read_to_end(&mut text).map_err(at(format!("read {}", path.display())))?;
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|error| Error::Invalid { reason: format!("{}: {error}", path.display()) })?;
    if manifest.format != manifest::FORMAT {
        return Err(Error::Invalid { reason: format!("{} has format {}", path.display(), manifest.format) });
    }
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Here {
        dir: tempfile::TempDir,
        images: Images,
    }

    fn here() -> Here {
        let dir = tempfile::tempdir().expect("dir");
        let guest = dir.path().join("guest");
        fs::write(&guest, b"\x7fELF guest").expect("write");
        let images = Images::open(dir.path(), &guest, None).expect("open");
        Here { dir, images }
    }

    /// What a builder hands over.
    fn built(here: &Here, kernel: &str) -> PathBuf {
        let directory = here.dir.path().join("images/tmp/built");
        fs::create_dir(&directory).expect("make");
        let mut manifest = Manifest { kernel: kernel.to_owned(), ..manifest::tests::manifest() };
        for name in manifest::FILES {
            fs::write(directory.join(name), format!("{name} of {kernel}")).expect("write");
            let entry = manifest::FileEntry::of(&directory.join(name)).expect("hash");
            manifest.files.insert(name.to_owned(), entry);
        }
        fs::write(directory.join(manifest::MANIFEST), manifest.to_bytes().expect("bytes")).expect("write");
        directory
    }

    fn inputs() -> String {
        manifest::tests::manifest().inputs
    }

    #[test]
    fn an_image_is_found_by_name_id_and_digest() {
        let here = here();
        let digest = here.images.install(&built(&here, "6.12"), &inputs()).expect("install");
        here.images.set_name("base", &digest).expect("name");
        here.images.set_name("mine", &digest).expect("name");
        let image = here.images.find("base").expect("by name");
        assert_eq!(image.names, ["base", "mine"]);
        for word in [digest.as_str(), &digest[..8], &format!("sha256:{digest}"), &image.id().to_string()] {
            assert_eq!(here.images.find(word).expect(word).digest, digest);
        }
        assert!(here.images.find(&digest[..7]).is_err(), "too short a beginning was taken");
        let error = here.images.find("bose").expect_err("no such name").to_string();
        assert_eq!(error, "there is no image \"bose\" (did you mean \"base\"?)");
        assert!(matches!(here.images.find("base-dev"), Err(Error::Missing { recipe: Some("base-dev"), .. })));
        assert!(here.images.built_from(&inputs()).expect("look").is_some());
        assert!(here.images.built_from("22").expect("look").is_none());
    }

    #[test]
    fn a_name_moves_and_the_same_image_is_one() {
        let here = here();
        let one = here.images.install(&built(&here, "6.12"), &inputs()).expect("install");
        here.images.set_name("base", &one).expect("name");
        let again = here.images.install(&built(&here, "6.12"), &inputs()).expect("install");
        assert_eq!(again, one);
        fs::remove_dir_all(here.dir.path().join("images/tmp/built")).expect("the second is left to the caller");
        let two = here.images.install(&built(&here, "6.13"), &inputs()).expect("install");
        here.images.set_name("base", &two).expect("name");
        assert_eq!(here.images.find("base").expect("found").digest, two);
        assert_eq!(here.images.list().expect("list").len(), 2);
        let removed = here.images.gc(|_| 0).expect("gc");
        assert_eq!(removed.iter().map(|image| image.digest.as_str()).collect::<Vec<_>>(), [one.as_str()]);
        assert!(matches!(here.images.remove("base", |_| 1), Err(Error::InUse { .. })));
        here.images.remove("base", |_| 0).expect("removed");
        assert!(here.images.list().expect("list").is_empty());
        assert!(matches!(here.images.find("base"), Err(Error::Missing { .. })), "its name was left");
    }

    #[test]
    fn what_is_not_as_its_manifest_says_is_refused() {
        let here = here();
        let directory = built(&here, "6.12");
        assert!(matches!(here.images.install(&directory, "22"), Err(Error::Invalid { .. })), "other inputs");
        fs::write(directory.join(manifest::KERNEL), "changed").expect("write");
        assert!(matches!(here.images.install(&directory, &inputs()), Err(Error::Invalid { .. })), "another kernel");
        fs::write(directory.join(manifest::MANIFEST), "{}").expect("write");
        assert!(here.images.install(&directory, &inputs()).is_err());
        assert!(here.images.list().expect("list").is_empty());
    }

    #[test]
    fn names_that_would_be_paths_are_refused() {
        let here = here();
        for bad in ["", "../x", "a/b", ".hidden", "UPPER", "a b", &"x".repeat(64), &"0a".repeat(32)] {
            assert!(matches!(here.images.set_name(bad, "x"), Err(Error::Name { .. })), "{bad:?} was taken");
        }
    }

    #[test]
    fn an_interrupted_build_is_gone_after_a_start() {
        let here = here();
        built(&here, "6.12");
        let guest = here.dir.path().join("guest");
        let images = Images::open(here.dir.path(), &guest, None).expect("open");
        assert_eq!(fs::read_dir(here.dir.path().join("images/tmp")).expect("list").count(), 0);
        assert!(images.list().expect("list").is_empty());
    }

    #[test]
    fn boot_files_are_there_and_relative() {
        let here = here();
        let digest = here.images.install(&built(&here, "6.12"), &inputs()).expect("install");
        let image = here.images.find(&digest).expect("found");
        let files = here.images.boot_files(&image).expect("files");
        for path in [&files.kernel, &files.initramfs, &files.root] {
            assert!(here.dir.path().join(path.as_str()).is_file(), "{path} is not there");
        }
        assert_eq!(files, here.images.boot_files(&image).expect("again"));
    }
}
