//! Scratch disks: an ext4 file system in a sparse file without a name, copied from a template of the same size.
//!
//! The file has no name from its first byte on (`O_TMPFILE`), so whoever dies holding it leaves nothing behind. Templates
//! are made once per size by `mkfs.ext4` and kept under `<jails>/templates`.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{OFlags, SeekFrom};

/// Why there is no disk.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system has too little room for the disk to become full.
    #[error("{needed_mib} MiB needed in {}, {available_mib} MiB available", path.display())]
    NoSpace {
        /// The disk's size.
        needed_mib: u64,
        /// What an unprivileged writer could still use.
        available_mib: u64,
        /// Where.
        path: PathBuf,
    },
    /// `mkfs.ext4` is not there.
    #[error("{} is not installed", program.display())]
    Missing {
        /// Where it was looked for.
        program: PathBuf,
    },
    /// It failed.
    #[error("{} failed: {said}", program.display())]
    Mkfs {
        /// Which program.
        program: PathBuf,
        /// The end of what it printed.
        said: String,
    },
    /// A file cannot be used.
    #[error("{what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

fn at<'a, E: Into<io::Error>>(what: &'static str, path: &'a Path) -> impl FnOnce(E) -> Error + 'a {
    move |source| Error::Io { what, path: path.to_owned(), source: source.into() }
}

/// Options of `mkfs.ext4`. Every feature is named, since without a configuration file mkfs makes something like ext2, whose
/// files cannot be preallocated and whose times are whole seconds. No journal, since nothing on this disk outlives a crash; a fixed id and hash seed, so that a
/// template's bytes are a function of its size; tables left to be zero as a sparse file is, so that neither we nor the
/// guest's kernel write them.
const OPTIONS: [&str; 16] = [
    "-q",
    "-F",
    "-b",
    "4096",
    "-m",
    "0",
    "-O",
    "^has_journal,^resize_inode,ext_attr,extent,huge_file,flex_bg,uninit_bg,64bit,dir_nlink,extra_isize",
    "-I",
    "256",
    "-U",
    "7065706f-0000-4000-8000-000000000001",
    "-E",
    "hash_seed=7065706f-0000-4000-8000-000000000002,lazy_itable_init=1,nodiscard,root_owner=0:0,assume_storage_prezeroed=1",
    "-L",
    "scratch",
];

/// Counts changes of [`OPTIONS`]: a template of before is not used again.
const FORMAT: u32 = 2;

/// Templates kept: each costs the host what an empty file system of its size has written, 200 KiB to a few MiB.
const TEMPLATES: usize = 16;

/// A fresh scratch disk of that size, open for reading and writing, without a name.
///
/// # Errors
/// [`Error`].
pub fn scratch(jails: &Path, mkfs: &Path, mib: u32) -> Result<File, Error> {
    room(jails, u64::from(mib))?;
    let template = template(jails, mkfs, mib)?;
    let disk = nameless(jails).map_err(at("make a file in", jails))?;
    copy(&template, &disk).map_err(at("copy a template in", jails))?;
    Ok(disk)
}

/// Whether a disk of that size could become full.
///
/// # Errors
/// [`Error::NoSpace`].
pub fn room(path: &Path, needed_mib: u64) -> Result<(), Error> {
    let stat = rustix::fs::statvfs(path).map_err(at("look at", path))?;
    let available_mib = stat.f_bavail.saturating_mul(stat.f_frsize) >> 20;
    if available_mib < needed_mib {
        return Err(Error::NoSpace { needed_mib, available_mib, path: path.to_owned() });
    }
    Ok(())
}

fn template(jails: &Path, mkfs: &Path, mib: u32) -> Result<File, Error> {
    let directory = jails.join("templates");
    let path = directory.join(format!("{mib}-{FORMAT}.ext4"));
    match File::open(&path) {
        Ok(file) => return Ok(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(at("open", &path)(error)),
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(at("make", &directory))?;
    // Two at once each make one and the later rename wins: both are whole and equal.
    let new = directory.join(format!("{mib}.{}.{:?}.new", std::process::id(), std::thread::current().id()));
    let made = make(&new, mkfs, mib).and_then(|()| fs::rename(&new, &path).map_err(at("rename", &new)));
    if made.is_err() {
        let _ = fs::remove_file(&new);
    }
    made?;
    let template = File::open(&path).map_err(at("open", &path))?;
    forget_oldest(&directory, TEMPLATES).map_err(at("tidy", &directory))?;
    Ok(template)
}

/// Sizes are the callers' to choose: only so many templates are kept, the longest unused going first. One that is being made
/// is called `….new`.
pub(crate) fn forget_oldest(directory: &Path, kept: usize) -> io::Result<()> {
    let mut templates = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "new")
            && let Ok(meta) = fs::metadata(&path)
        {
            templates.push((meta.accessed().or_else(|_| meta.modified())?, path));
        }
    }
    templates.sort_unstable();
    let over = templates.len().saturating_sub(kept);
    for (_, path) in &templates[..over] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn make(path: &Path, mkfs: &Path, mib: u32) -> Result<(), Error> {
    let file =
        File::options().write(true).create(true).truncate(true).mode(0o600).open(path).map_err(at("make", path))?;
    file.set_len(u64::from(mib) << 20).map_err(at("size", path))?;
    drop(file);
    let ran = Command::new(mkfs)
        .args(OPTIONS)
        .arg(path)
        .env_clear()
        // Times in the file system are this one's, so that the same size gives the same bytes.
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .env("E2FSPROGS_FAKE_TIME", "1700000000")
        .env("MKE2FS_CONFIG", "/dev/null")
        .stdin(Stdio::null())
        .output();
    match ran {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).trim().chars().rev().take(400).collect::<Vec<_>>();
            Err(Error::Mkfs { program: mkfs.to_owned(), said: said.into_iter().rev().collect() })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::Missing { program: mkfs.to_owned() }),
        Err(error) => Err(at("run", mkfs)(error)),
    }
}

fn nameless(directory: &Path) -> io::Result<File> {
    let flags = (OFlags::TMPFILE | OFlags::CLOEXEC).bits() as i32;
    match File::options().read(true).write(true).mode(0o600).custom_flags(flags).open(directory) {
        // A file system without nameless files: one whose name goes at once is the next best.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            let path = directory.join(format!(".{}.{:?}.disk", std::process::id(), std::thread::current().id()));
            let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            fs::remove_file(&path)?;
            Ok(file)
        }
        file => file,
    }
}

/// Copies data and leaves holes: by sharing blocks where the file system can, else the data alone.
pub(crate) fn copy(from: &File, to: &File) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut buffer = vec![0; 256 * 1024];
    let mut at = 0;
    while at < length {
        let start = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Nothing but a hole is left.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        at = rustix::fs::seek(from, SeekFrom::Hole(start))?;
        let mut done = start;
        while done < at {
            let part = buffer.len().min((at - done) as usize);
            from.read_exact_at(&mut buffer[..part], done)?;
            to.write_all_at(&buffer[..part], done)?;
            done += part as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const MKFS: &str = "/usr/sbin/mkfs.ext4";

    #[test]
    fn a_disk_is_sparse_nameless_and_the_same_each_time() {
        let jails = tempfile::tempdir().expect("directory");
        let one = scratch(jails.path(), Path::new(MKFS), 256).expect("disk");
        let stat = one.metadata().expect("stat");
        assert_eq!(stat.len(), 256 << 20);
        assert!(stat.blocks() * 512 < 4 << 20, "{} bytes are on the host's disk", stat.blocks() * 512);
        assert_eq!(stat.nlink(), 0);
        let template = fs::read(jails.path().join("templates").join(format!("256-{FORMAT}.ext4"))).expect("template");
        let mut copied = vec![0; template.len()];
        one.read_exact_at(&mut copied, 0).expect("read");
        assert!(copied == template, "the copy differs");
        fs::remove_dir_all(jails.path().join("templates")).expect("remove");
        scratch(jails.path(), Path::new(MKFS), 256).expect("again");
        assert!(
            fs::read(jails.path().join("templates").join(format!("256-{FORMAT}.ext4"))).expect("template") == template,
            "not deterministic"
        );
        let names: Vec<_> =
            fs::read_dir(jails.path()).expect("read").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(names, ["templates"]);
    }

    #[test]
    fn templates_do_not_pile_up() {
        let jails = tempfile::tempdir().expect("directory");
        for mib in 16..16 + TEMPLATES as u32 + 4 {
            scratch(jails.path(), Path::new(MKFS), mib).expect("disk");
        }
        assert_eq!(fs::read_dir(jails.path().join("templates")).expect("read").count(), TEMPLATES);
    }

    #[test]
    fn too_little_room_is_told_with_both_numbers() {
        let jails = tempfile::tempdir().expect("directory");
        match room(jails.path(), 1 << 40) {
            Err(Error::NoSpace { needed_mib, available_mib, .. }) => {
                assert!(needed_mib == 1 << 40 && available_mib < needed_mib)
            }
            other => panic!("{other:?}"),
        }
        assert!(room(jails.path(), 1).is_ok());
    }

    #[test]
    fn a_missing_or_failing_program_is_told_and_leaves_nothing() {
        let jails = tempfile::tempdir().expect("directory");
        assert!(matches!(scratch(jails.path(), Path::new("/no/mkfs"), 16), Err(Error::Missing { .. })));
        assert!(matches!(scratch(jails.path(), Path::new("/bin/false"), 16), Err(Error::Mkfs { .. })));
        assert_eq!(fs::read_dir(jails.path().join("templates")).expect("read").count(), 0);
    }
}
