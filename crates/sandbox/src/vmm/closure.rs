//! The closure of a program: itself, its loader, its libraries, its modules and firmware, copied once.
//!
//! A jail's root is one of these directories, bound once. It is a copy because the host's own files change underneath
//! (a package upgrade would mix versions in a running Sandbox), and one directory because 59 binds per Sandbox cost more
//! than the whole jail. Layout:
//! ```text
//! <state>/vmm/<digest>/        0555, root's: becomes /
//!   <program>                  the executable
//!   <another>                  beside it: the jailer of Firecracker, which needs no libraries
//!   lib64/ld-linux-x86-64.so.2 its loader, where the executable says
//!   lib/                       libraries, found through LD_LIBRARY_PATH
//!   lib/qemu/  share/          QEMU's modules and firmware
//!   kernel initrd run/         empty: places to bind over
//! <state>/vmm/<digest>.json    what it was made of
//! ```
//! The digest is over names, modes and contents of the copies. A closure is made in a temporary directory and renamed,
//! so what has a digest is whole. Whether it still fits is told by its sources' stat data, so a start costs no hashing.
//! Caller: `pepod host`, at start.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// QEMU's firmware directory inside its closure.
pub const FIRMWARE: &str = "/share";

/// QEMU's module directory inside its closure.
const MODULES: &str = "/lib/qemu";

/// Libraries inside a closure.
const LIBRARIES: &str = "/lib";

/// The firmware that starts a kernel with the least ado. QEMU's own choice differs between distributions.
pub const FIRMWARE_FILE: &str = "qboot.rom";

/// Longest answer of the loader about libraries, bytes.
const MAX_LISTING: u64 = 1 << 20;

/// Where distributions put QEMU's modules and firmware.
const MODULE_DIRECTORIES: [&str; 4] =
    ["/usr/lib/x86_64-linux-gnu/qemu", "/usr/lib64/qemu", "/usr/lib/qemu", "/usr/local/lib/qemu"];
const FIRMWARE_DIRECTORIES: [&str; 4] =
    ["/usr/share/qemu", "/usr/share/qemu-kvm", "/usr/share/seabios", "/usr/local/share/qemu"];

/// A program ready to be jailed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closure {
    /// Name of the directory, hex.
    pub digest: String,
    /// The directory.
    pub root: PathBuf,
    /// The program inside it.
    pub program: PathBuf,
    /// The environment that makes it find its own.
    pub env: Vec<(String, String)>,
}

/// The two foreign programs of a Sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Programs {
    /// QEMU.
    pub qemu: Closure,
    /// vhost-device-vsock.
    pub vsock_device: Closure,
}

/// Where the programs are, if not where this module looks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// qemu-system-x86_64.
    pub qemu: Option<PathBuf>,
    /// vhost-device-vsock.
    pub vsock_device: Option<PathBuf>,
    /// The directory of firecracker and jailer.
    pub firecracker: Option<PathBuf>,
}

/// Why a closure could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host lacks a program. The remedy is the operator's: install it.
    #[error("{program} is not installed (looked in {looked})")]
    Missing {
        /// Its file name.
        program: &'static str,
        /// Where it was looked for.
        looked: String,
    },
    /// A program does not run on this host as installed.
    #[error("{}: {reason}", program.display())]
    Broken {
        /// Its path.
        program: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A file could not be read or written.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { path, source }
}

/// What a closure was made of, kept beside it.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    closure: Closure,
    /// Source path to what it looked like.
    sources: BTreeMap<PathBuf, Stamp>,
    /// Path in the closure to its size.
    files: BTreeMap<PathBuf, u64>,
}

/// A file's stat data: equal means the same content, since no package manager writes in place.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> io::Result<Self> {
        let stat = fs::metadata(path)?;
        Ok(Stamp {
            device: stat.dev(),
            inode: stat.ino(),
            size: stat.size(),
            changed: (stat.ctime(), stat.ctime_nsec()),
        })
    }
}

/// Finds QEMU and vhost-device-vsock on this host and makes their closures under `<state>/vmm`, or finds those made
/// before.
///
/// # Errors
/// [`Error::Missing`] names the program to install.
pub fn prepare(state: &Path, sources: &Sources) -> Result<Programs, Error> {
    let directory = state.join("vmm");
    fs::DirBuilder::new().recursive(true).mode(0o755).create(&directory).map_err(io_error(&directory))?;
    let qemu = find("qemu-system-x86_64", sources.qemu.as_deref())?;
    let vsock_device = find("vhost-device-vsock", sources.vsock_device.as_deref())?;
    Ok(Programs {
        qemu: ready(&directory, &qemu, qemu_parts)?,
        vsock_device: ready(&directory, &vsock_device, vsock_parts)?,
    })
}

/// Makes the closure of Firecracker and its jailer under `<state>/vmm`, or finds the one made before. Both have to be static:
/// a root of the jailer's has neither loader nor libraries.
///
/// # Errors
/// [`Error::Missing`] where there are none; [`Error::Broken`] for a dynamic program or one that others may change.
pub fn firecracker(state: &Path, sources: &Sources) -> Result<Closure, Error> {
    use super::firecracker::{JAILER, PROGRAM};
    let missing = |program| Error::Missing {
        program,
        looked: sources.firecracker.as_ref().map_or_else(|| "nowhere".to_owned(), |path| path.display().to_string()),
    };
    let place = sources.firecracker.as_deref().ok_or_else(|| missing(PROGRAM))?;
    for program in [PROGRAM, JAILER] {
        if !place.join(program).exists() {
            return Err(missing(program));
        }
    }
    let directory = state.join("vmm");
    fs::DirBuilder::new().recursive(true).mode(0o755).create(&directory).map_err(io_error(&directory))?;
    let program = fs::canonicalize(place.join(PROGRAM)).map_err(io_error(&place.join(PROGRAM)))?;
    ready(&directory, &program, firecracker_parts)
}

/// Firecracker as found, and the jailer beside it under the name it was found by or the release's (`jailer-v…`).
fn firecracker_parts(program: &Path) -> Result<Parts, Error> {
    use super::firecracker::{JAILER, PROGRAM};
    let beside = program.file_name().and_then(|name| name.to_str()).unwrap_or_default().replace(PROGRAM, JAILER);
    let jailer = program.with_file_name(beside);
    let jailer = fs::canonicalize(&jailer).map_err(io_error(&jailer))?;
    let mut parts = Parts { program: Path::new("/").join(PROGRAM), ..Parts::default() };
    for (name, found) in [(PROGRAM, program), (JAILER, &jailer)] {
        if interpreter(found)?.is_some() {
            let reason = "it is linked dynamically, and its root has no libraries: take the release's static one";
            return Err(Error::Broken { program: found.to_owned(), reason: reason.to_owned() });
        }
        let stat = fs::metadata(found).map_err(io_error(found))?;
        if !stat.is_file() || stat.uid() != 0 || stat.mode() & 0o022 != 0 {
            let reason = "it is not root's alone to change".to_owned();
            return Err(Error::Broken { program: found.to_owned(), reason });
        }
        parts.files.insert(Path::new("/").join(name), found.to_owned());
    }
    Ok(parts)
}

/// Removes the closures of `state` that are not among `kept` (digests), and what an interrupted copy left.
pub fn remove_unused(state: &Path, kept: &[&str]) -> Result<(), Error> {
    let directory = state.join("vmm");
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(io_error(&directory))?,
    };
    for entry in entries {
        let path = entry.map_err(io_error(&directory))?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        if kept.contains(&name) {
            continue;
        }
        if path.is_dir() {
            remove_tree(&path)?;
        } else {
            fs::remove_file(&path).map_err(io_error(&path))?;
        }
    }
    Ok(())
}

/// Removes a tree of closed directories; one that is not there is removed already.
fn remove_tree(path: &Path) -> Result<(), Error> {
    match set_modes(path, 0o755).and_then(|()| fs::remove_dir_all(path).map_err(io_error(path))) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The files of a closure before they are copied: path in it to path on the host.
#[derive(Debug, Default)]
struct Parts {
    program: PathBuf,
    files: BTreeMap<PathBuf, PathBuf>,
    env: Vec<(String, String)>,
    /// Empty files and directories to bind over.
    places: Vec<Place>,
}

#[derive(Debug)]
enum Place {
    File(&'static str),
    Directory(&'static str),
}

fn qemu_parts(qemu: &Path) -> Result<Parts, Error> {
    let mut parts = Parts::of(qemu, "qemu-system-x86_64")?;
    // Emulation is a module in some distributions and part of the program in others.
    let module = "accel-tcg-x86_64.so";
    if let Some(found) = first_existing(&MODULE_DIRECTORIES, module) {
        parts.add_libraries(&found)?;
        parts.files.insert(Path::new(MODULES).join(module), found);
        parts.env.push(("QEMU_MODULE_DIR".to_owned(), MODULES.to_owned()));
    }
    let firmware = first_existing(&FIRMWARE_DIRECTORIES, FIRMWARE_FILE).ok_or_else(|| {
        let reason = format!("its firmware {FIRMWARE_FILE} is not in {}", FIRMWARE_DIRECTORIES.join(", "));
        Error::Broken { program: qemu.to_owned(), reason }
    })?;
    parts.files.insert(Path::new(FIRMWARE).join(FIRMWARE_FILE), firmware);
    parts.places = vec![Place::File("kernel"), Place::File("initrd")];
    Ok(parts)
}

fn vsock_parts(device: &Path) -> Result<Parts, Error> {
    let mut parts = Parts::of(device, "vhost-device-vsock")?;
    parts.places = vec![Place::Directory("run")];
    Ok(parts)
}

impl Parts {
    /// The program with its loader and libraries.
    fn of(program: &Path, name: &str) -> Result<Self, Error> {
        let inside = Path::new("/").join(name);
        let mut parts = Parts { program: inside.clone(), ..Parts::default() };
        parts.files.insert(inside, program.to_owned());
        if let Some(loader) = interpreter(program)? {
            let found = fs::canonicalize(&loader).map_err(io_error(&loader))?;
            parts.files.insert(loader, found);
            parts.env.push(("LD_LIBRARY_PATH".to_owned(), LIBRARIES.to_owned()));
            parts.add_libraries(program)?;
        }
        Ok(parts)
    }

    /// Asks the loader what `object` loads. It maps the libraries but runs nothing of them.
    fn add_libraries(&mut self, object: &Path) -> Result<(), Error> {
        let broken = |reason: String| Error::Broken { program: object.to_owned(), reason };
        let loader = match interpreter(object)? {
            Some(loader) => Some(loader),
            None => self.files.iter().find(|(inside, _)| is_loader(inside)).map(|(_, found)| found.clone()),
        };
        let loader = loader.ok_or_else(|| broken("it has no loader".to_owned()))?;
        let mut child = Command::new(&loader)
            .arg("--list")
            .arg(object)
            .env_clear()
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io_error(&loader))?;
        let mut listing = String::new();
        let read = child.stdout.take().map(|out| out.take(MAX_LISTING).read_to_string(&mut listing));
        let status = child.wait().map_err(io_error(&loader))?;
        read.transpose().map_err(io_error(object))?;
        if !status.success() {
            return Err(broken(format!("{} cannot list its libraries", loader.display())));
        }
        for (name, found) in libraries(&listing).map_err(broken)? {
            self.files.insert(Path::new(LIBRARIES).join(name), found);
        }
        Ok(())
    }
}

fn is_loader(inside: &Path) -> bool {
    inside.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld-"))
}

/// Reads the loader's listing: lines of `name => path (address)`. The loader itself and the kernel's page have no arrow.
fn libraries(listing: &str) -> Result<Vec<(String, PathBuf)>, String> {
    let mut found = Vec::new();
    for line in listing.lines() {
        let Some((name, rest)) = line.trim().split_once(" => ") else { continue };
        let path = rest.split_once(" (").map_or(rest, |(path, _)| path).trim();
        if !path.starts_with('/') {
            return Err(format!("it needs {name}, which is {path}"));
        }
        // A name with a path in it is the loader, listed by some as an alias; it is copied to its own place.
        if !name.contains('/') {
            found.push((name.to_owned(), PathBuf::from(path)));
        }
    }
    Ok(found)
}

/// The loader an ELF executable names; `None` for a static one and for a library.
fn interpreter(object: &Path) -> Result<Option<PathBuf>, Error> {
    const PT_INTERP: u32 = 3;
    let broken = |reason: &str| Error::Broken { program: object.to_owned(), reason: reason.to_owned() };
    let file = File::open(object).map_err(io_error(object))?;
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).map_err(io_error(object))?;
    // 64 bit, little endian: the only kind this crate has a system call list for.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return Err(broken("not a 64-bit little-endian ELF file"));
    }
    let count = number(&header, 56, 2);
    for index in 0..count {
        let mut entry = [0; 56];
        let at = number(&header, 32, 8).saturating_add(index * 56);
        file.read_exact_at(&mut entry, at).map_err(io_error(object))?;
        if number(&entry, 0, 4) != u64::from(PT_INTERP) {
            continue;
        }
        let length = number(&entry, 32, 8);
        if length > 4096 {
            return Err(broken("the name of its loader is too long"));
        }
        let mut name = vec![0; length as usize];
        file.read_exact_at(&mut name, number(&entry, 8, 8)).map_err(io_error(object))?;
        let name = String::from_utf8(name).map_err(|_| broken("the name of its loader is not text"))?;
        return Ok(Some(PathBuf::from(name.trim_end_matches('\0'))));
    }
    Ok(None)
}

/// The little-endian number of `width` bytes at `at`; 0 where the bytes end.
fn number(bytes: &[u8], at: usize, width: usize) -> u64 {
    let bytes = bytes.get(at..at + width).unwrap_or_default();
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn first_existing(directories: &[&str], name: &str) -> Option<PathBuf> {
    directories.iter().find_map(|directory| fs::canonicalize(Path::new(directory).join(name)).ok())
}

fn find(program: &'static str, named: Option<&Path>) -> Result<PathBuf, Error> {
    if let Some(path) = named {
        return fs::canonicalize(path).map_err(io_error(path));
    }
    let beside = std::env::current_exe().ok().and_then(|own| own.parent().map(Path::to_owned));
    let usual = ["/usr/local/bin", "/usr/local/libexec", "/usr/bin", "/usr/libexec"].map(PathBuf::from);
    let directories: Vec<PathBuf> = beside.into_iter().chain(usual).collect();
    let found = directories.iter().find_map(|directory| fs::canonicalize(directory.join(program)).ok());
    found.ok_or_else(|| Error::Missing {
        program,
        looked: directories.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
    })
}

/// The closure of `program` in `directory`: one made before if its sources are as they were, else a new one.
fn ready(directory: &Path, program: &Path, parts: fn(&Path) -> Result<Parts, Error>) -> Result<Closure, Error> {
    for entry in fs::read_dir(directory).map_err(io_error(directory))? {
        let path = entry.map_err(io_error(directory))?.path();
        if path.extension().is_some_and(|extension| extension == "json")
            && let Ok(manifest) = serde_json::from_slice::<Manifest>(&fs::read(&path).map_err(io_error(&path))?)
            && manifest.is_of(program)
            && manifest.fits(directory)
        {
            return Ok(manifest.closure);
        }
    }
    copy(directory, &parts(program)?)
}

impl Manifest {
    fn is_of(&self, program: &Path) -> bool {
        self.sources.contains_key(program)
    }

    /// Whether every source is as it was, and every copy in its place with its size.
    fn fits(&self, directory: &Path) -> bool {
        let root = directory.join(&self.closure.digest);
        self.closure.root == root
            && self.sources.iter().all(|(path, stamp)| Stamp::of(path).is_ok_and(|now| now == *stamp))
            && self.files.iter().all(|(path, size)| {
                let path = root.join(path.strip_prefix("/").unwrap_or(path));
                fs::symlink_metadata(path).is_ok_and(|stat| stat.is_file() && stat.size() == *size)
            })
    }
}

fn copy(directory: &Path, parts: &Parts) -> Result<Closure, Error> {
    let temporary = directory.join(format!("new-{}", std::process::id()));
    remove_tree(&temporary)?;
    make_directory(&temporary)?;
    let mut digest = Sha256::new();
    let mut sources = BTreeMap::new();
    let mut files = BTreeMap::new();
    for (inside, source) in &parts.files {
        let target = temporary.join(inside.strip_prefix("/").unwrap_or(inside));
        make_parents(&temporary, &target)?;
        let before = Stamp::of(source).map_err(io_error(source))?;
        let executable = inside.parent() == Some(Path::new("/")) || is_loader(inside);
        let mode = if executable { 0o555 } else { 0o444 };
        digest.update(format!("{}\0{mode:o}\0{}\0", inside.display(), before.size));
        let size = copy_file(source, &target, mode, &mut digest)?;
        if Stamp::of(source).map_err(io_error(source))? != before || size != before.size {
            let reason = format!("{} changed while it was copied", source.display());
            return Err(Error::Broken { program: parts.program.clone(), reason });
        }
        sources.insert(source.clone(), before);
        files.insert(inside.clone(), size);
    }
    for place in &parts.places {
        match place {
            Place::File(name) => {
                digest.update(format!("/{name}\0file\0"));
                let path = temporary.join(name);
                File::options().write(true).create_new(true).mode(0o444).open(&path).map_err(io_error(&path))?;
            }
            Place::Directory(name) => {
                digest.update(format!("/{name}\0directory\0"));
                make_directory(&temporary.join(name))?;
            }
        }
    }
    let digest: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let root = directory.join(&digest);
    set_modes(&temporary, 0o555)?;
    let closure = Closure { digest, root, program: parts.program.clone(), env: parts.env.clone() };
    publish(directory, &temporary, &Manifest { closure: closure.clone(), sources, files })?;
    Ok(closure)
}

/// Copies, hashes what was written, and puts it on the disk.
fn copy_file(source: &Path, target: &Path, mode: u32, digest: &mut Sha256) -> Result<u64, Error> {
    let mut from = File::open(source).map_err(io_error(source))?;
    let mut to = File::options().write(true).create_new(true).open(target).map_err(io_error(target))?;
    let mut chunk = vec![0; 1 << 18];
    let mut size = 0;
    loop {
        let count = match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(io_error(source)(error)),
        };
        let read = chunk.get(..count).unwrap_or_default();
        digest.update(read);
        to.write_all(read).map_err(io_error(target))?;
        size += count as u64;
    }
    to.set_permissions(fs::Permissions::from_mode(mode)).map_err(io_error(target))?;
    to.sync_data().map_err(io_error(target))?;
    Ok(size)
}

fn make_directory(path: &Path) -> Result<(), Error> {
    fs::DirBuilder::new().mode(0o755).create(path).map_err(io_error(path))
}

fn make_parents(root: &Path, target: &Path) -> Result<(), Error> {
    let Some(parent) = target.parent().filter(|parent| *parent != root && !parent.exists()) else { return Ok(()) };
    make_parents(root, parent)?;
    make_directory(parent)
}

/// Gives every directory of the tree this mode.
fn set_modes(path: &Path, mode: u32) -> Result<(), Error> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(io_error(path))?;
    for entry in fs::read_dir(path).map_err(io_error(path))? {
        let entry = entry.map_err(io_error(path))?;
        if entry.file_type().map_err(io_error(path))?.is_dir() {
            set_modes(&entry.path(), mode)?;
        }
    }
    Ok(())
}

/// Gives the finished tree its name, then writes what it was made of. A tree of that name already there has the same
/// content, unless somebody damaged it; then it makes way.
fn publish(directory: &Path, temporary: &Path, manifest: &Manifest) -> Result<(), Error> {
    let root = &manifest.closure.root;
    if root.exists() {
        let old = directory.join(format!("new-{}-old", std::process::id()));
        fs::rename(root, &old).map_err(io_error(root))?;
        fs::rename(temporary, root).map_err(io_error(root))?;
        remove_tree(&old)?;
    } else {
        fs::rename(temporary, root).map_err(io_error(root))?;
    }
    let written = directory.join(format!("new-{}.json", std::process::id()));
    let text = serde_json::to_vec_pretty(manifest).map_err(|error| io_error(&written)(error.into()))?;
    fs::write(&written, text).map_err(io_error(&written))?;
    let named = directory.join(format!("{}.json", manifest.closure.digest));
    fs::rename(&written, &named).map_err(io_error(&named))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_named() {
        let listing = "\tlinux-vdso.so.1 (0x7ffc)\n\tliba.so.1 => /lib/liba.so.1 (0x7f00)\n\tlibb.so.2 => not found\n";
        assert!(libraries(listing).unwrap_err().contains("libb.so.2"));
        let listing = "\tliba.so.1 => /lib/liba.so.1 (0x7f00)\n\t/lib64/ld-linux-x86-64.so.2 (0x7f01)\n";
        assert_eq!(libraries(listing).unwrap(), [("liba.so.1".to_owned(), PathBuf::from("/lib/liba.so.1"))]);
    }

    #[test]
    fn a_copy_is_made_once_found_again_and_made_anew_when_its_source_or_itself_changes() {
        let state = tempfile::tempdir().unwrap();
        let program = state.path().join("true");
        fs::copy("/bin/true", &program).unwrap();
        let directory = state.path().join("vmm");
        make_directory(&directory).unwrap();
        let make = || ready(&directory, &program, |path| Parts::of(path, "true")).unwrap();

        let first = make();
        let loader = interpreter(&program).unwrap().unwrap();
        let copied_loader = first.root.join(loader.strip_prefix("/").unwrap());
        let inode = fs::metadata(&copied_loader).unwrap().ino();
        assert_eq!(fs::metadata(&first.root).unwrap().mode() & 0o7777, 0o555);
        assert_eq!(fs::metadata(&copied_loader).unwrap().mode() & 0o7777, 0o555);

        assert_eq!(make(), first);
        assert_eq!(fs::metadata(&copied_loader).unwrap().ino(), inode, "it was copied again");

        fs::remove_file(&copied_loader).unwrap();
        assert_eq!(make(), first);
        assert!(copied_loader.exists(), "a damaged copy was used");

        let mut changed = File::options().append(true).open(&program).unwrap();
        changed.write_all(b"\0").unwrap();
        let second = make();
        assert_ne!(second.digest, first.digest);

        remove_unused(state.path(), &[&second.digest]).unwrap();
        let left: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
        assert!(second.root.exists());
    }

    #[test]
    fn what_is_not_a_program_is_refused() {
        assert!(matches!(interpreter(Path::new("/etc/passwd")), Err(Error::Broken { .. })));
    }
}
