//! The release of Firecracker that this Pepo takes: which one, where it is got from, what its bytes must be, and how it is
//! installed.
//!
//! ```text
//! pepo setup:   pepod setup --check   ->   curl, as whoever calls   ->   pepod setup --from FILE
//!               what and whence            a file in a cache              copied and hashed at once, unpacked, renamed
//! ```
//! The file is whoever's; nothing of it is looked at before it is copied to a place of root's and what was copied has the
//! pinned digest. A release has a directory of its own, so a new one never replaces what Sandboxes run.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use pepo_api::{SetupReport, SetupState};
use sha2::{Digest as _, Sha256};

use crate::config::Config;
use crate::store::hex;

/// Where releases are by themselves.
pub const URL: &str =
    "https://github.com/firecracker-microvm/firecracker/releases/download/v{version}/firecracker-v{version}-{arch}.tgz";

/// The release. Its digests are in [`RELEASES`], the only place that has them.
pub const VERSION: &str = pepo_sandbox::vmm::firecracker::RELEASE;

/// The largest archive and program, bytes: 7 and 3 MiB they are.
const LARGEST: u64 = 64 << 20;

/// One kind of machine's release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// The kind of machine, by the kernel's name for it.
    pub arch: &'static str,
    /// SHA-256 of the archive.
    pub archive: &'static str,
    /// The programs in it: the name that is kept, and the SHA-256.
    pub programs: [(&'static str, &'static str); 2],
}

/// Every pinned digest.
pub const RELEASES: [Release; 2] = [
    Release {
        arch: "x86_64",
        archive: "382a02a869e4d6d5cb14c40577f9545e8458021ea8b0b2d3fc10ec14d9c242e6",
        programs: [
            ("firecracker", "2fd0171309af7e24cf8dafc8a6f921c1434c49b5f9349bb996b7ed0a4deb8aa7"),
            ("jailer", "1f3a0c1fe86212d0001819bfe0819071c01208b3ccc9398c3b3bc1b84cf21edd"),
        ],
    },
    Release {
        arch: "aarch64",
        archive: "8d0e69f6d6f9a1724551f607f18504052c16c1828ee3d4d7b6e6c73380871e0e",
        programs: [
            ("firecracker", "71ca0733576579a75cef268a8fd0ae0629b761b9844559c611f144132ac6038a"),
            ("jailer", "7db39d34991ccdd8d12aacab384b1dcbe35e79c27823e4e4d33725d4b504edd7"),
        ],
    },
];

/// Why nothing was installed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is none for this kind of machine.
    #[error("there is no pinned release for {0} machines")]
    Unsupported(&'static str),
    /// Installing is root's.
    #[error("installing takes root: sudo pepo setup")]
    NotRoot,
    /// Not the release.
    #[error("{path} is not the release: its SHA-256 is {found}, {wanted} is wanted; nothing was installed")]
    Wrong {
        /// The file, or the program in it.
        path: String,
        /// What it has.
        found: String,
        /// What it must have.
        wanted: String,
    },
    /// A program is not in the archive.
    #[error("{path} has no {name} in it; nothing was installed")]
    Without {
        /// The archive.
        path: PathBuf,
        /// The program.
        name: String,
    },
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
}

fn step(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Step { what, path, source }
}

/// The release for this kind of machine.
pub fn release() -> Option<&'static Release> {
    RELEASES.iter().find(|release| release.arch == std::env::consts::ARCH)
}

/// Where a release is installed below the state directory.
fn place(state: &Path, release: &Release) -> PathBuf {
    state.join("firecracker").join(format!("v{VERSION}-{}", release.arch))
}

/// The directory of Firecracker and its jailer, if both are there: the operator's own, or what was installed.
///
/// # Errors
/// What to say to whoever wants it.
pub fn installed(config: &Config) -> Result<PathBuf, String> {
    let (path, whose) = match (&config.firecracker, release()) {
        (Some(path), _) => (path.clone(), format!("not in {} (sandbox.firecracker)", path.display())),
        (None, Some(release)) => (place(&config.places.state, release), "not installed (sudo pepo setup)".to_owned()),
        (None, None) => return Err(Error::Unsupported(std::env::consts::ARCH).to_string()),
    };
    let missing = ["firecracker", "jailer"].into_iter().find(|name| !path.join(name).is_file());
    missing.map_or(Ok(path), |name| Err(format!("{name} is {whose}")))
}

/// How it stands, byte for byte. Changes nothing.
pub fn look(config: &Config) -> SetupReport {
    match release() {
        Some(release) => report(config, release),
        None => SetupReport {
            name: "Firecracker".into(),
            version: VERSION.into(),
            arch: std::env::consts::ARCH.into(),
            state: SetupState::Unsupported,
            found: Error::Unsupported(std::env::consts::ARCH).to_string(),
            directory: String::new(),
            url: String::new(),
            file: String::new(),
            sha256: String::new(),
        },
    }
}

fn report(config: &Config, release: &Release) -> SetupReport {
    let directory = place(&config.places.state, release);
    let (state, found) = state(&directory, release);
    SetupReport {
        name: "Firecracker".into(),
        version: VERSION.into(),
        arch: release.arch.into(),
        state,
        found,
        directory: directory.display().to_string(),
        url: config.setup_url.replace("{version}", VERSION).replace("{arch}", release.arch),
        file: format!("firecracker-v{VERSION}-{}.tgz", release.arch),
        sha256: release.archive.into(),
    }
}

fn state(directory: &Path, release: &Release) -> (SetupState, String) {
    if !directory.exists() {
        return (SetupState::Missing, "not installed".into());
    }
    for (name, wanted) in release.programs {
        let path = directory.join(name);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) => return (SetupState::Damaged, format!("{}: {error}", path.display())),
        };
        let stat = file.metadata();
        let alone = stat.is_ok_and(|stat| stat.is_file() && stat.mode() & 0o022 == 0 && stat.mode() & 0o111 != 0);
        match hash(&mut file, &mut io::sink()) {
            Ok(found) if found == wanted && alone => {}
            Ok(found) if found == wanted => {
                return (SetupState::Damaged, format!("{} has the wrong mode", path.display()));
            }
            Ok(_) => return (SetupState::Damaged, format!("{} is not the release's", path.display())),
            Err(error) => return (SetupState::Damaged, format!("{}: {error}", path.display())),
        }
    }
    (SetupState::Installed, format!("v{VERSION}, as released"))
}

/// Copies to the end, at most [`LARGEST`] bytes, and gives the SHA-256 of what was copied.
fn hash(from: &mut impl Read, to: &mut impl Write) -> io::Result<String> {
    let mut digest = Sha256::new();
    let mut chunk = vec![0; 1 << 18];
    let mut left = LARGEST;
    loop {
        let count = match from.read(&mut chunk) {
            Ok(0) => return Ok(hex(&digest.finalize())),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        left = left.checked_sub(count as u64).ok_or_else(|| io::Error::other("too large to be it"))?;
        digest.update(&chunk[..count]);
        to.write_all(&chunk[..count])?;
    }
}

/// Installs from a file, unless it is installed.
///
/// # Errors
/// [`Error`]; nothing has changed then.
pub fn install(config: &Config, from: &Path) -> Result<SetupReport, Error> {
    let release = release().ok_or(Error::Unsupported(std::env::consts::ARCH))?;
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NotRoot);
    }
    install_release(&config.places.state, release, from)?;
    Ok(report(config, release))
}

fn install_release(state_directory: &Path, release: &Release, from: &Path) -> Result<(), Error> {
    let target = place(state_directory, release);
    let above = target.parent().unwrap_or(state_directory);
    // What a FIFO or a device has is no release, and a name may be swapped meanwhile: the file is opened once.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let mut source = File::options().read(true).custom_flags(flags).open(from).map_err(step("open", from))?;
    let regular = source.metadata().map_err(step("look at", from))?.is_file();
    if !regular {
        return Err(step("read", from)(io::Error::other("it is not a regular file")));
    }
    DirBuilder::new().recursive(true).mode(0o755).create(above).map_err(step("make", above))?;
    forget_unfinished(above)?;
    let work = above.join(format!("new-{}", std::process::id()));
    DirBuilder::new().mode(0o700).create(&work).map_err(step("make", &work))?;
    let made = unpack(&work, release, from, &mut source).and_then(|()| publish(&work, &target));
    if made.is_err() {
        let _ = fs::remove_dir_all(&work);
    }
    made
}

/// What an interrupted installation left.
fn forget_unfinished(above: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(above).map_err(step("read", above))? {
        let path = entry.map_err(step("read", above))?.path();
        if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"new-")) {
            fs::remove_dir_all(&path).map_err(step("remove", &path))?;
        }
    }
    Ok(())
}

fn unpack(work: &Path, release: &Release, from: &Path, source: &mut File) -> Result<(), Error> {
    let copy = work.join("archive");
    let mut archive = new_file(&copy, 0o600)?;
    let found = hash(source, &mut archive).map_err(step("copy", from))?;
    if found != release.archive {
        return Err(Error::Wrong { path: from.display().to_string(), found, wanted: release.archive.into() });
    }
    drop(archive);
    // From here on the bytes are known ones.
    let archive = File::open(&copy).map_err(step("open", &copy))?;
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(archive));
    let mut missing: Vec<_> = release.programs.to_vec();
    for entry in archive.entries().map_err(step("unpack", from))? {
        let mut entry = entry.map_err(step("unpack", from))?;
        let name = entry.path().map_err(step("unpack", from))?;
        let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is = |program: &str| name == program || name == format!("{program}-v{VERSION}-{}", release.arch);
        let Some(at) = missing.iter().position(|(program, _)| is(program)) else { continue };
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let (program, wanted) = missing.swap_remove(at);
        let path = work.join(program);
        let mut file = new_file(&path, 0o755)?;
        let found = hash(&mut entry, &mut file).map_err(step("unpack", from))?;
        if found != wanted {
            return Err(Error::Wrong { path: name, found, wanted: wanted.into() });
        }
        file.set_permissions(fs::Permissions::from_mode(0o755)).map_err(step("change", &path))?;
        file.sync_all().map_err(step("write", &path))?;
    }
    if let Some((name, _)) = missing.first() {
        return Err(Error::Without { path: from.to_owned(), name: (*name).to_owned() });
    }
    fs::remove_file(&copy).map_err(step("remove", &copy))?;
    fs::set_permissions(work, fs::Permissions::from_mode(0o755)).map_err(step("change", work))
}

fn new_file(path: &Path, mode: u32) -> Result<File, Error> {
    File::options().write(true).create_new(true).mode(mode).open(path).map_err(step("make", path))
}

/// Gives the finished directory its name. One that is there and damaged makes way; what runs of it goes on.
fn publish(work: &Path, target: &Path) -> Result<(), Error> {
    if target.exists() {
        let old = work.with_extension("old");
        fs::rename(target, &old).map_err(step("move", target))?;
        fs::rename(work, target).map_err(step("name", target))?;
        fs::remove_dir_all(&old).map_err(step("remove", &old))?;
    } else {
        fs::rename(work, target).map_err(step("name", target))?;
    }
    let above = target.parent().unwrap_or(target);
    File::open(above).and_then(|directory| directory.sync_all()).map_err(step("write", above))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An archive as released, of these members, and the release that it would be.
    fn archive(place: &Path, members: &[(&str, &str)]) -> (PathBuf, Release) {
        let path = place.join("release.tgz");
        let gzip = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
        let mut tar = tar::Builder::new(gzip);
        for (name, content) in members {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o755);
            header.set_cksum();
            tar.append_data(&mut header, format!("release/{name}"), content.as_bytes()).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap();
        let digest = |bytes: &[u8]| -> &'static str { Box::leak(hex(&Sha256::digest(bytes)).into_boxed_str()) };
        let release = Release {
            arch: "x86_64",
            archive: digest(&fs::read(&path).unwrap()),
            programs: [("firecracker", digest(b"the vmm")), ("jailer", digest(b"the jailer"))],
        };
        (path, release)
    }

    const AS_RELEASED: [(&str, &str); 4] = [
        ("LICENSE", "text"),
        ("firecracker-v1.16.1-x86_64", "the vmm"),
        ("firecracker-v1.16.1-x86_64.debug", "symbols"),
        ("jailer-v1.16.1-x86_64", "the jailer"),
    ];

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_release_is_installed_seen_and_mended() {
        let place = tempfile::tempdir().unwrap();
        let (file, release) = archive(place.path(), &AS_RELEASED);
        let directory = super::place(place.path(), &release);
        assert_eq!(state(&directory, &release).0, SetupState::Missing);
        install_release(place.path(), &release, &file).unwrap();
        assert_eq!(state(&directory, &release).0, SetupState::Installed);
        assert_eq!(names(&directory), ["firecracker", "jailer"]);
        assert_eq!(fs::read(directory.join("jailer")).unwrap(), b"the jailer");
        assert_eq!(fs::metadata(directory.join("firecracker")).unwrap().mode() & 0o7777, 0o755);
        // Again is the same, and what was changed is seen and mended; an installation that was cut short leaves nothing.
        install_release(place.path(), &release, &file).unwrap();
        fs::write(directory.join("firecracker"), "another").unwrap();
        assert_eq!(state(&directory, &release).0, SetupState::Damaged);
        fs::create_dir(directory.with_file_name("new-1")).unwrap();
        install_release(place.path(), &release, &file).unwrap();
        assert_eq!(state(&directory, &release).0, SetupState::Installed);
        fs::set_permissions(directory.join("jailer"), fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(state(&directory, &release).0, SetupState::Damaged, "others may change it");
        assert_eq!(names(directory.parent().unwrap()), ["v1.16.1-x86_64"]);
    }

    #[test]
    fn what_is_not_the_release_is_refused_and_nothing_changes() {
        let place = tempfile::tempdir().unwrap();
        let (file, release) = archive(place.path(), &AS_RELEASED);
        install_release(place.path(), &release, &file).unwrap();
        let refused = |release: &Release, file: &Path, expected: &str| {
            let error = install_release(place.path(), release, file).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(names(&place.path().join("firecracker")), ["v1.16.1-x86_64"]);
        };
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        let changed = place.path().join("changed.tgz");
        fs::write(&changed, &bytes).unwrap();
        refused(&release, &changed, "is not the release: its SHA-256 is");
        fs::write(&changed, &bytes[..bytes.len() / 2]).unwrap();
        refused(&release, &changed, release.archive);
        refused(&release, place.path(), "cannot read");
        refused(&release, Path::new("/dev/zero"), "cannot read");
        refused(&release, &place.path().join("none"), "cannot open");
        let (file, without) = archive(place.path(), &AS_RELEASED[..3]);
        refused(&without, &file, "has no jailer");
        let (file, other) = archive(place.path(), &[AS_RELEASED[3], ("firecracker", "something else")]);
        refused(&other, &file, "firecracker is not the release");
        assert_eq!(state(&super::place(place.path(), &release), &release).0, SetupState::Installed);
    }

    #[test]
    fn every_digest_is_one_and_the_address_is_filled_in() {
        for release in RELEASES {
            let programs = release.programs.map(|(_, digest)| digest);
            for digest in [release.archive, programs[0], programs[1]] {
                assert!(digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit()), "{digest}");
            }
        }
        let config = Config::read(&crate::config::Typed::default()).unwrap();
        let report = report(&config, &RELEASES[1]);
        assert!(report.url.ends_with("/v1.16.1/firecracker-v1.16.1-aarch64.tgz"), "{}", report.url);
        assert_eq!((report.state, &*report.file), (SetupState::Missing, "firecracker-v1.16.1-aarch64.tgz"));
    }
}
