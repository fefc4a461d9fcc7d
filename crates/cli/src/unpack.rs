//! Unpacking a tar stream that a guest made: every name, link and bit in it may be an attack.
//!
//! Everything happens below one directory that the caller named, through descriptors opened with
//! `openat2(BENEATH | NO_SYMLINKS | NO_MAGICLINKS)`: no absolute name, no `..`, no walking through a link, be it from the
//! archive or there before. A file is written beside its place and renamed over it, so a link or a second name of what was
//! there is replaced, never written through. Symbolic links are made only where they cannot lead out: relative, `..` only
//! at their beginning and not above the top; so no chain of them leads out either. Devices, pipes and unknown entries are
//! left out; setuid, setgid, sticky and write for others are dropped; owners are the caller's. Long names and extended
//! headers are bounded.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, fchmod, futimens, linkat, mkdirat,
    openat, openat2, renameat, statat, symlinkat, unlinkat,
};
use tar::{Archive, EntryType};

use crate::escape;
use crate::fail::{Failure, Outcome};

/// Long names and extended headers are shorter than this.
const MAX_NAME: u64 = 64 << 10;
/// Directories whose final mode is set at the end; beyond so many it is set at once, with write for the owner.
const MAX_DIRECTORIES: usize = 100_000;
/// Notes that are kept.
const MAX_NOTES: usize = 20;

/// How names in the archive become names below the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Naming {
    /// As they are.
    AsIs,
    /// Each below this name.
    Below(OsString),
    /// The archive is one file, and this is its name.
    Only(OsString),
}

/// What was unpacked.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Entries made.
    pub entries: u64,
    /// What was left out and why, escaped; the first of them.
    pub notes: Vec<String>,
    /// How many were left out.
    pub left_out: u64,
}

impl Report {
    fn leave_out(&mut self, name: &Path, why: &str) {
        self.left_out += 1;
        if self.notes.len() < MAX_NOTES {
            self.notes.push(format!("left out `{}`: {why}", shown(name)));
        }
    }
}

fn shown(path: &Path) -> String {
    escape::bytes(path.as_os_str().as_bytes())
}

fn refused(name: &Path, why: &str) -> Failure {
    Failure::new(format!("refused to unpack `{}`: {why}", shown(name)))
}

fn failed(name: &Path) -> impl Fn(rustix::io::Errno) -> Failure {
    let name = shown(name);
    move |error| Failure::new(format!("{name}: {error}"))
}

/// Unpacks a stream below a directory, which must exist.
pub fn unpack(stream: impl Read, target: &Path, naming: &Naming) -> Outcome<Report> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    // The caller's own path: followed as they meant it.
    let top = openat(CWD, target, flags, Mode::empty()).map_err(failed(target))?;
    let mut work =
        Work { top, naming, report: Report::default(), directories: Vec::new(), serial: 0, buffer: vec![0; 128 << 10] };
    let mut archive = Archive::new(stream);
    let entries = archive.entries().map_err(reading)?.raw(true);
    let (mut long_name, mut long_link) = (None, None);
    for entry in entries {
        let mut entry = entry.map_err(reading)?;
        match entry.header().entry_type() {
            EntryType::GNULongName => long_name = Some(text_of(&mut entry)?),
            EntryType::GNULongLink => long_link = Some(text_of(&mut entry)?),
            EntryType::XHeader => {
                let records = bytes_of(&mut entry)?;
                for (key, value) in records_of(&records)? {
                    match key {
                        b"path" => long_name = Some(OsString::from_vec(value.to_vec())),
                        b"linkpath" => long_link = Some(OsString::from_vec(value.to_vec())),
                        b"size" => return Err(Failure::new("the archive has a size in an extended header")),
                        _ => {}
                    }
                }
            }
            EntryType::XGlobalHeader => drop(bytes_of(&mut entry)?),
            kind => {
                let name = long_name.take().map_or_else(|| entry.path_bytes().into_owned(), OsString::into_vec);
                let link =
                    long_link.take().or_else(|| entry.link_name_bytes().map(|l| OsString::from_vec(l.into_owned())));
                work.entry(kind, &PathBuf::from(OsString::from_vec(name)), link, &mut entry)?;
            }
        }
    }
    work.finish()
}

fn reading(error: std::io::Error) -> Failure {
    Failure::new(format!("the archive broke off: {error}"))
}

fn bytes_of(entry: &mut tar::Entry<'_, impl Read>) -> Outcome<Vec<u8>> {
    if entry.size() > MAX_NAME {
        return Err(Failure::new(format!("the archive has a header of {} bytes", entry.size())));
    }
    let mut bytes = Vec::new();
    entry.read_to_end(&mut bytes).map_err(reading)?;
    Ok(bytes)
}

fn text_of(entry: &mut tar::Entry<'_, impl Read>) -> Outcome<OsString> {
    let mut bytes = bytes_of(entry)?;
    if let Some(end) = bytes.iter().position(|b| *b == 0) {
        bytes.truncate(end);
    }
    Ok(OsString::from_vec(bytes))
}

/// The records of an extended header: `LENGTH KEY=VALUE\n`.
fn records_of(mut rest: &[u8]) -> Outcome<Vec<(&[u8], &[u8])>> {
    let broken = || Failure::new("the archive has an extended header that is none");
    let mut records = Vec::new();
    while !rest.is_empty() {
        let space = rest.iter().position(|b| *b == b' ').ok_or_else(broken)?;
        let length: usize = std::str::from_utf8(&rest[..space]).ok().and_then(|t| t.parse().ok()).ok_or_else(broken)?;
        if length <= space + 1 || length > rest.len() || rest[length - 1] != b'\n' {
            return Err(broken());
        }
        let record = &rest[space + 1..length - 1];
        let equals = record.iter().position(|b| *b == b'=').ok_or_else(broken)?;
        records.push((&record[..equals], &record[equals + 1..]));
        rest = &rest[length..];
    }
    Ok(records)
}

struct Work<'a> {
    top: OwnedFd,
    naming: &'a Naming,
    report: Report,
    /// Path, mode and time of directories, set when nothing more comes into them.
    directories: Vec<(PathBuf, Mode, Timestamps)>,
    serial: u64,
    buffer: Vec<u8>,
}

impl Work<'_> {
    fn entry(
        &mut self,
        kind: EntryType,
        raw: &Path,
        link: Option<OsString>,
        entry: &mut tar::Entry<'_, impl Read>,
    ) -> Outcome<()> {
        let Some(path) = self.place(raw)? else {
            // The top itself is the caller's: its mode and time are not the guest's to set.
            return Ok(());
        };
        let bits = entry.header().mode().unwrap_or(0o644);
        let seconds = entry.header().mtime().ok().and_then(|s| i64::try_from(s).ok()).unwrap_or(0);
        let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        // Never setuid, setgid, sticky, or write for anybody but the owner.
        let mode = Mode::from_raw_mode(bits & 0o755);
        match kind {
            EntryType::Regular | EntryType::Continuous => self.file(&path, mode, &times, entry)?,
            EntryType::Directory => self.directory(&path, mode, times)?,
            EntryType::Symlink => {
                let Some(target) = link else { return Err(refused(raw, "a link without a target")) };
                if let Err(why) = stays_inside(&path, Path::new(&target)) {
                    self.report.leave_out(raw, why);
                    return Ok(());
                }
                let (parent, name) = self.parent(&path)?;
                let spare = self.spare();
                symlinkat(&target, &parent, &spare).map_err(failed(raw))?;
                self.move_into_place(&parent, &spare, name, &path)?;
            }
            EntryType::Link => {
                let Some(target) = link else { return Err(refused(raw, "a link without a target")) };
                let Some(target) = self.place(Path::new(&target))? else {
                    return Err(refused(raw, "a second name of the top directory"));
                };
                let (from, from_name) = self.parent(&target)?;
                let is = statat(&from, from_name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed(&target))?;
                if FileType::from_raw_mode(is.st_mode) != FileType::RegularFile {
                    return Err(refused(raw, "a second name of something that is no file"));
                }
                let from_name = from_name.to_owned();
                let (parent, name) = self.parent(&path)?;
                let spare = self.spare();
                linkat(&from, &from_name, &parent, &spare, AtFlags::empty()).map_err(failed(raw))?;
                self.move_into_place(&parent, &spare, name, &path)?;
                // Renaming one name of a file over another does nothing, and leaves both.
                let _ = unlinkat(&parent, &spare, AtFlags::empty());
            }
            EntryType::Char | EntryType::Block => {
                self.report.leave_out(raw, "a device");
                return Ok(());
            }
            EntryType::Fifo => {
                self.report.leave_out(raw, "a pipe");
                return Ok(());
            }
            _ => {
                self.report.leave_out(raw, "of a kind that is not unpacked");
                return Ok(());
            }
        }
        self.report.entries += 1;
        Ok(())
    }

    /// The path below the top, made of plain names alone; nothing when it is the top itself.
    fn place(&self, raw: &Path) -> Outcome<Option<PathBuf>> {
        if raw.as_os_str().as_bytes().contains(&0) {
            return Err(refused(raw, "a name with a zero byte"));
        }
        let mut path = PathBuf::new();
        for component in raw.components() {
            match component {
                Component::Normal(name) => path.push(name),
                Component::CurDir => {}
                Component::ParentDir => return Err(refused(raw, "a name with `..`")),
                Component::RootDir | Component::Prefix(_) => return Err(refused(raw, "an absolute name")),
            }
        }
        let path = match self.naming {
            Naming::AsIs => path,
            Naming::Below(name) => Path::new(name).join(path),
            Naming::Only(name) if path.components().count() == 1 => PathBuf::from(name),
            Naming::Only(_) if path.as_os_str().is_empty() => path,
            Naming::Only(_) => return Err(refused(raw, "only one file was asked for")),
        };
        Ok((!path.as_os_str().is_empty()).then_some(path))
    }

    /// The directory an entry goes into, made where missing, and the entry's name.
    fn parent<'p>(&self, path: &'p Path) -> Outcome<(OwnedFd, &'p OsStr)> {
        let name = path.file_name().ok_or_else(|| refused(path, "no name"))?;
        let parent = path.parent().unwrap_or(Path::new(""));
        Ok((self.open_directory(parent)?, name))
    }

    fn open_directory(&self, path: &Path) -> Outcome<OwnedFd> {
        let open = |path: &Path| beneath(self.top.as_fd(), path, OFlags::DIRECTORY | OFlags::RDONLY);
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        match open(path) {
            Ok(fd) => return Ok(fd),
            Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(through(path, error)),
        }
        let mut at = open(Path::new(".")).map_err(failed(path))?;
        for name in path.components() {
            let name = Path::new(name.as_os_str());
            match mkdirat(&at, name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(failed(path)(error)),
            }
            at = beneath(at.as_fd(), name, OFlags::DIRECTORY | OFlags::RDONLY).map_err(|e| through(path, e))?;
        }
        Ok(at)
    }

    fn file(
        &mut self,
        path: &Path,
        mode: Mode,
        times: &Timestamps,
        entry: &mut tar::Entry<'_, impl Read>,
    ) -> Outcome<()> {
        let (parent, name) = self.parent(path)?;
        let spare = self.spare();
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&parent, &spare, flags, Mode::from_raw_mode(0o600)).map_err(failed(path))?;
        let written = (|| {
            let mut file = File::from(file);
            let copied = copy(entry, &mut file, &mut self.buffer)
                .map_err(|error| Failure::new(format!("{}: {error}", shown(path))))?;
            if copied != entry.size() {
                return Err(Failure::new("the archive broke off in the middle of a file"));
            }
            fchmod(&file, mode).map_err(failed(path))?;
            futimens(&file, times).map_err(failed(path))?;
            self.move_into_place(&parent, &spare, name, path)
        })();
        if written.is_err() {
            let _ = unlinkat(&parent, &spare, AtFlags::empty());
        }
        written
    }

    fn directory(&mut self, path: &Path, mode: Mode, times: Timestamps) -> Outcome<()> {
        let (parent, name) = self.parent(path)?;
        match mkdirat(&parent, name, Mode::from_raw_mode(0o700)) {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST) => {
                // Something there that is no directory, or a link to one, is not gone through.
                beneath(parent.as_fd(), Path::new(name), OFlags::DIRECTORY | OFlags::RDONLY)
                    .map_err(|e| through(path, e))?;
                return Ok(());
            }
            Err(error) => return Err(failed(path)(error)),
        }
        if self.directories.len() < MAX_DIRECTORIES {
            self.directories.push((path.to_owned(), mode, times));
        } else {
            let made = beneath(parent.as_fd(), Path::new(name), OFlags::DIRECTORY | OFlags::RDONLY);
            fchmod(made.map_err(failed(path))?, mode | Mode::RWXU).map_err(failed(path))?;
        }
        Ok(())
    }

    fn move_into_place(&self, parent: &OwnedFd, spare: &OsStr, name: &OsStr, path: &Path) -> Outcome<()> {
        renameat(parent, spare, parent, name).map_err(|error| {
            let _ = unlinkat(parent, spare, AtFlags::empty());
            match error {
                rustix::io::Errno::ISDIR | rustix::io::Errno::EXIST | rustix::io::Errno::NOTEMPTY => {
                    Failure::new(format!("{}: there is a directory of that name", shown(path)))
                }
                error => failed(path)(error),
            }
        })
    }

    /// A name beside the final one; it is made exclusively, so one that is there is an error, not followed.
    fn spare(&mut self) -> OsString {
        self.serial += 1;
        format!(".pepo-{}-{}", std::process::id(), self.serial).into()
    }

    fn finish(mut self) -> Outcome<Report> {
        // Deepest last made, first finished: a parent that becomes read-only does not hinder its children.
        while let Some((path, mode, times)) = self.directories.pop() {
            let made = beneath(self.top.as_fd(), &path, OFlags::DIRECTORY | OFlags::RDONLY).map_err(failed(&path))?;
            fchmod(&made, mode).map_err(failed(&path))?;
            futimens(&made, &times).map_err(failed(&path))?;
        }
        Ok(self.report)
    }
}

fn copy(from: &mut impl Read, to: &mut File, buffer: &mut [u8]) -> std::io::Result<u64> {
    let mut copied = 0;
    loop {
        match from.read(buffer) {
            Ok(0) => return Ok(copied),
            Ok(read) => {
                to.write_all(&buffer[..read])?;
                copied += read as u64;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn beneath(at: BorrowedFd<'_>, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    loop {
        // A rename elsewhere during the walk makes the kernel ask us to look again.
        match openat2(at, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            other => return other,
        }
    }
}

fn through(path: &Path, error: rustix::io::Errno) -> Failure {
    match error {
        rustix::io::Errno::LOOP => refused(path, "it leads through a symbolic link"),
        rustix::io::Errno::NOTDIR => Failure::new(format!("{}: part of it is no directory", shown(path))),
        rustix::io::Errno::XDEV => refused(path, "it leads out of the target"),
        error => failed(path)(error),
    }
}

/// Whether a link at this place with this target can only lead to what is below the top.
///
/// `..` may stand at the beginning alone, where it is counted against real directories: after a name it could be counted
/// against wherever another link leads.
fn stays_inside(path: &Path, target: &Path) -> Result<(), &'static str> {
    let depth = path.components().count() - 1;
    let (mut up, mut names) = (0, 0);
    for component in target.components() {
        match component {
            Component::RootDir | Component::Prefix(_) => return Err("a link to an absolute path"),
            Component::ParentDir if names > 0 => return Err("a link with `..` after a name"),
            Component::ParentDir => up += 1,
            Component::Normal(_) => names += 1,
            Component::CurDir => {}
        }
    }
    if target.as_os_str().is_empty() || target.as_os_str().as_bytes().contains(&0) {
        return Err("a link to nothing");
    }
    if up > depth { Err("a link that leads out") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use tar::Header;

    /// Builds an archive header by header, so that names nobody's library would write can be written.
    struct Hostile(Vec<u8>);

    impl Hostile {
        fn new() -> Self {
            Hostile(Vec::new())
        }

        fn add(mut self, kind: EntryType, name: &[u8], link: &[u8], mode: u32, body: &[u8]) -> Self {
            let mut header = Header::new_gnu();
            header.as_mut_bytes()[..name.len()].copy_from_slice(name);
            header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link);
            header.set_entry_type(kind);
            header.set_mode(mode);
            header.set_mtime(1000);
            header.set_size(body.len() as u64);
            header.set_cksum();
            self.0.extend_from_slice(header.as_bytes());
            self.0.extend_from_slice(body);
            self.0.resize(self.0.len().next_multiple_of(512), 0);
            self
        }

        fn file(self, name: &str, body: &str) -> Self {
            self.add(EntryType::Regular, name.as_bytes(), b"", 0o644, body.as_bytes())
        }

        fn link(self, name: &str, target: &str) -> Self {
            self.add(EntryType::Symlink, name.as_bytes(), target.as_bytes(), 0o777, b"")
        }

        fn into(mut self, target: &Path, naming: Naming) -> Outcome<Report> {
            self.0.resize(self.0.len() + 1024, 0);
            unpack(&self.0[..], target, &naming)
        }
    }

    /// A target with a neighbour that must stay as it is.
    fn ground() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let (target, outside) = (dir.path().join("target"), dir.path().join("outside"));
        std::fs::create_dir(&target).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("precious"), "mine").unwrap();
        (dir, target, outside)
    }

    fn untouched(outside: &Path) {
        let names: Vec<_> = std::fs::read_dir(outside).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["precious"]);
        assert_eq!(std::fs::read(outside.join("precious")).unwrap(), b"mine");
    }

    fn leftovers(target: &Path) -> bool {
        std::fs::read_dir(target).unwrap().any(|e| e.unwrap().file_name().to_string_lossy().starts_with(".pepo-"))
    }

    #[test]
    fn honest_archives_arrive_whole() {
        let (_dir, target, _) = ground();
        std::fs::write(target.join("old"), "old").unwrap();
        let long = format!("long/{}", "n".repeat(150));
        let report = Hostile::new()
            .add(EntryType::Directory, b"./", b"", 0o700, b"")
            .add(EntryType::Directory, b"bin/", b"", 0o555, b"")
            .add(EntryType::Regular, b"bin/tool", b"", 0o4777, b"#!")
            .add(EntryType::Link, b"bin/same", b"bin/tool", 0o755, b"")
            .link("bin/up", "../old")
            .link("self", ".")
            .file("old", "new")
            .add(EntryType::GNULongName, b"././@LongLink", b"", 0o644, &[long.as_bytes(), b"\0"].concat())
            .file("cut", "long")
            .add(EntryType::XHeader, b"pax", b"", 0o644, "20 path=pax größe\n".as_bytes())
            .file("ignored", "pax")
            .into(&target, Naming::AsIs)
            .unwrap();
        assert_eq!(report, Report { entries: 8, notes: vec![], left_out: 0 });
        let tool = std::fs::metadata(target.join("bin/tool")).unwrap();
        assert_eq!((tool.permissions().mode() & 0o7777, tool.mtime(), tool.nlink()), (0o755, 1000, 2));
        assert_eq!(std::fs::metadata(target.join("bin")).unwrap().permissions().mode() & 0o7777, 0o555);
        assert_eq!(std::fs::read(target.join("bin/up")).unwrap(), b"new");
        assert_eq!(std::fs::read(target.join(long)).unwrap(), b"long");
        assert_eq!(std::fs::read(target.join("pax größe")).unwrap(), b"pax");
        std::fs::set_permissions(target.join("bin"), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(!leftovers(&target));
    }

    #[test]
    fn names_that_lead_out_are_refused() {
        for name in ["/etc/x", "../outside/x", "a/../../outside/x", "a/..", ".."] {
            let (_dir, target, outside) = ground();
            let refused = Hostile::new().file(name, "evil").into(&target, Naming::AsIs).unwrap_err();
            assert!(refused.message().starts_with("refused to unpack `"), "{name}: {refused:?}");
            untouched(&outside);
        }
        let (_dir, target, outside) = ground();
        let long = [b"../".repeat(60), b"etc/x\0".to_vec()].concat();
        let refused = Hostile::new()
            .add(EntryType::GNULongName, b"l", b"", 0o644, &long)
            .file("short", "evil")
            .into(&target, Naming::AsIs)
            .unwrap_err();
        assert!(refused.message().contains("`..`"), "{refused:?}");
        let refused = Hostile::new()
            .add(EntryType::XHeader, b"p", b"", 0o644, b"21 path=../outside/x\n" as &[u8])
            .file("short", "evil")
            .into(&target, Naming::AsIs)
            .unwrap_err();
        assert!(refused.message().contains("`..`"), "{refused:?}");
        untouched(&outside);
    }

    #[test]
    fn links_that_lead_out_are_left_out_and_not_walked_through() {
        let (_dir, target, outside) = ground();
        let report = Hostile::new()
            .link("abs", "/etc")
            .link("up", "../outside")
            .link("d/up", "../../outside")
            .link("d/tricky", "x/../../..")
            .link("d/fine", "../ok")
            .file("abs/x", "a plain directory now")
            .into(&target, Naming::AsIs)
            .unwrap();
        assert_eq!(report.left_out, 4, "{report:?}");
        assert!(target.join("abs/x").is_file() && target.join("d/fine").is_symlink());
        untouched(&outside);

        // Links that were there before, and links of the archive itself, are not walked through either.
        symlink(&outside, target.join("there")).unwrap();
        let refused = Hostile::new().file("there/x", "evil").into(&target, Naming::AsIs).unwrap_err();
        assert!(refused.message().contains("through a symbolic link"), "{refused:?}");
        let refused = Hostile::new().link("in", "d").file("in/x", "evil").into(&target, Naming::AsIs).unwrap_err();
        assert!(refused.message().contains("through a symbolic link"), "{refused:?}");
        untouched(&outside);
    }

    #[test]
    fn what_is_there_is_replaced_and_never_written_through() {
        let (_dir, target, outside) = ground();
        symlink(outside.join("precious"), target.join("link")).unwrap();
        std::fs::hard_link(outside.join("precious"), target.join("second")).unwrap();
        Hostile::new().file("link", "evil").file("second", "evil").into(&target, Naming::AsIs).unwrap();
        untouched(&outside);
        assert!(!target.join("link").is_symlink());
        std::fs::create_dir(target.join("dir")).unwrap();
        let failed = Hostile::new().file("dir", "x").into(&target, Naming::AsIs).unwrap_err();
        assert_eq!(failed.message(), "dir: there is a directory of that name");
        assert!(!leftovers(&target));
    }

    #[test]
    fn second_names_of_what_is_outside_are_refused() {
        let (_dir, target, outside) = ground();
        symlink(&outside, target.join("there")).unwrap();
        symlink(outside.join("precious"), target.join("leak")).unwrap();
        for from in ["../outside/precious", "/etc/passwd", "there/precious", "leak", ""] {
            let archive = Hostile::new().add(EntryType::Link, b"got", from.as_bytes(), 0o644, b"");
            assert!(archive.into(&target, Naming::AsIs).is_err(), "{from}");
        }
        assert!(!target.join("got").exists());
        untouched(&outside);
    }

    #[test]
    fn devices_and_pipes_are_left_out() {
        let (_dir, target, _) = ground();
        let report = Hostile::new()
            .add(EntryType::Char, b"null", b"", 0o666, b"")
            .add(EntryType::Block, b"disk", b"", 0o666, b"")
            .add(EntryType::Fifo, b"pipe\x1b[2J", b"", 0o666, b"")
            .add(EntryType::new(b'V'), b"label", b"", 0o666, b"")
            .file("after", "x")
            .into(&target, Naming::AsIs)
            .unwrap();
        assert_eq!((report.entries, report.left_out), (1, 4));
        assert!(report.notes.contains(&"left out `pipe\\x1b[2J`: a pipe".to_owned()), "{report:?}");
        let names: Vec<_> = std::fs::read_dir(&target).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["after"]);
    }

    #[test]
    fn headers_that_would_fill_memory_or_lie_are_refused() {
        let (_dir, target, _) = ground();
        let big = vec![b'n'; 70_000];
        let refused = Hostile::new().add(EntryType::GNULongName, b"l", b"", 0o644, &big).into(&target, Naming::AsIs);
        assert_eq!(refused.unwrap_err().message(), "the archive has a header of 70000 bytes");
        for pax in ["11 size=99\n", "99999999999999999999 a=b\n", "x", "3 a\n", "0 \n", "5 a=b"] {
            let archive = Hostile::new().add(EntryType::XHeader, b"p", b"", 0o644, pax.as_bytes()).file("f", "x");
            assert!(archive.into(&target, Naming::AsIs).is_err(), "{pax:?}");
        }
        let mut cut = Hostile::new().file("f", &"x".repeat(2000)).0;
        cut.truncate(1000);
        assert!(unpack(&cut[..], &target, &Naming::AsIs).is_err());
        assert!(!target.join("f").exists() && !leftovers(&target));
    }

    #[test]
    fn names_can_be_given_by_the_caller() {
        let (_dir, target, outside) = ground();
        Hostile::new().file("a/b", "x").into(&target, Naming::Below("got".into())).unwrap();
        assert!(target.join("got/a/b").is_file());
        Hostile::new().link("l", "../a").into(&target, Naming::Below("got".into())).unwrap();
        Hostile::new().file("report", "x").into(&target, Naming::Only("mine".into())).unwrap();
        assert!(target.join("mine").is_file());
        let two = Hostile::new().file("a/b", "x").into(&target, Naming::Only("mine".into()));
        assert_eq!(two.unwrap_err().message(), "refused to unpack `a/b`: only one file was asked for");
        untouched(&outside);
    }
}
