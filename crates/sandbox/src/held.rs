//! What a Sandbox holds on the host: a function of its id, given back in reverse order.
//!
//! Normal release, adoption and sweep call the same [`Holdings::of`]. Each release is "absent is done", uses system calls
//! alone, and may be repeated; nothing is journalled. The directory is made first (it claims the slot) and removed last, so
//! it stands for everything between.
//!
//! ```text
//! taken     directory with plan.json   cgroup   network   areas (keep/, vsock/, boot/)   processes
//! released                         5        4         3      2                              1
//! ```
//! Disks, taps, sockets and mounts of a Sandbox are descriptors or lie in its processes' namespaces: they go with the processes.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cgroup::Hierarchies;
use crate::id::{Names, SandboxId, Tag, UidBlock, file};
use crate::net;
use crate::plan::Plan;
use crate::proc;

/// How long killed processes may take to be gone: a VMM with gigabytes of memory to tear down on a busy machine.
const DEAD_WITHIN: Duration = Duration::from_secs(20);
/// How long an empty cgroup may take to be removable.
const REMOVED_WITHIN: Duration = Duration::from_secs(5);
/// The longest file of ours that is read back.
const RECORD_BYTES: u64 = 64 * 1024;
/// How deep the areas may be: what is in them was made by jailed processes.
const DEPTH: u32 = 16;

/// Where an instance's Sandboxes are. The only paths this module uses are below `jails`, which is root's alone.
#[derive(Debug)]
pub struct Place {
    /// The instance's tag.
    pub tag: Tag,
    /// Its uids.
    pub block: UidBlock,
    /// The directory of the jails.
    pub jails: OwnedFd,
    /// Its path, for what takes paths alone (mounts) and for messages.
    pub path: PathBuf,
    /// The host's cgroups.
    pub cgroups: Hierarchies,
}

/// Who the keeper is: written before it does anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeeperRecord {
    /// Its process id here.
    pub pid: u32,
    /// When it started, in clock ticks since the machine's boot.
    pub start: u64,
}

impl Place {
    /// Opens the jails, which must be root's alone.
    ///
    /// # Errors
    /// They are not, or a directory above lets somebody else replace them.
    pub fn open(tag: Tag, block: UidBlock, path: &Path, cgroups: Hierarchies) -> io::Result<Self> {
        let jails = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let us = rustix::process::geteuid().as_raw();
        let stat = rustix::fs::fstat(&jails)?;
        if stat.st_uid != us || stat.st_mode & 0o022 != 0 {
            return Err(io::Error::other(format!("{} is not ours alone", path.display())));
        }
        let above = rustix::fs::openat(&jails, "..", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&above)?;
        let sticky = stat.st_mode & 0o1000 != 0;
        if stat.st_uid != us || (stat.st_mode & 0o022 != 0 && !sticky) {
            return Err(io::Error::other(format!("the directory of {} lets others replace it", path.display())));
        }
        Ok(Place { tag, block, jails, path: path.to_owned(), cgroups })
    }

    /// The place of an instance whose directory is gone: an empty one stands for it.
    ///
    /// # Errors
    /// There is not even an empty directory to be had.
    pub fn without_jails(tag: Tag, block: UidBlock, cgroups: Hierarchies) -> io::Result<Self> {
        let path = PathBuf::from("/proc/self/fdinfo");
        let jails = rustix::fs::open(&path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Place { tag, block, jails, path, cgroups })
    }

    fn names(&self, id: SandboxId) -> Names {
        Names { tag: self.tag, id }
    }

    /// A Sandbox's directory as a path.
    pub fn directory(&self, id: SandboxId) -> PathBuf {
        self.path.join(self.names(id).directory())
    }

    /// The name of its cgroup.
    pub fn cgroup(&self, id: SandboxId) -> String {
        self.names(id).cgroup()
    }

    /// Opens something below the jails, following nothing.
    ///
    /// # Errors
    /// It is not there, or is a link.
    pub fn open_at(&self, id: SandboxId, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let path = Path::new(&self.names(id).directory()).join(name);
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(rustix::fs::openat2(&self.jails, path, flags, Mode::empty(), resolve)?)
    }

    /// Every Sandbox that has a directory, a cgroup or a network namespace here.
    ///
    /// # Errors
    /// The jails cannot be read.
    pub fn all(&self) -> io::Result<Vec<SandboxId>> {
        let mut ids = self.cgroups.tagged(self.tag);
        ids.extend(net::slot::namespaces(self.tag)?);
        for entry in rustix::fs::Dir::read_from(&self.jails)? {
            if let Ok(id) = SandboxId::from_hex(&entry?.file_name().to_string_lossy()) {
                ids.push(id);
            }
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// Reads one of our own records.
    ///
    /// # Errors
    /// It is not there or not whole.
    pub fn read<T: DeserializeOwned>(&self, id: SandboxId, name: &str) -> io::Result<T> {
        let mut text = Vec::new();
        File::from(self.open_at(id, name, OFlags::RDONLY | OFlags::NONBLOCK)?)
            .take(RECORD_BYTES)
            .read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }

    /// Writes one of our own records, whole or not at all.
    ///
    /// # Errors
    /// The file system's.
    pub fn write<T: Serialize>(&self, id: SandboxId, name: &str, record: &T) -> io::Result<()> {
        let directory = self.open_directory(id)?;
        let new = format!("{name}.new");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(&directory, &new, flags, Mode::from_raw_mode(0o600))?);
        file.write_all(&serde_json::to_vec(record)?)?;
        rustix::fs::renameat(&directory, &new, &directory, name)?;
        Ok(())
    }

    fn open_directory(&self, id: SandboxId) -> io::Result<OwnedFd> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.jails, self.names(id).directory(), flags, Mode::empty())?)
    }

    /// The keeper of a Sandbox, if it lives: found by pid and start time, and then seen to be in the Sandbox's cgroup.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn keeper(&self, id: SandboxId) -> io::Result<OwnedFd> {
        let record: KeeperRecord = self.read(id, file::KEEPER).map_err(|_| io::ErrorKind::NotFound)?;
        let pidfd = proc::open_exact(record.pid, record.start)?;
        // A guest agent as a host process is in no cgroup of ours, also where this side is root's.
        #[cfg(feature = "fake")]
        if self.directory(id).join("log").exists() {
            return Ok(pidfd);
        }
        // A keeper that has not joined yet has not started anything either: it is not one to adopt.
        if !self.cgroups.leaf(self.cgroup(id)).holds(record.pid) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(pidfd)
    }

    /// A directory in the root of a Sandbox's keeper, which only its own mount namespace has. The root is looked at through
    /// the keeper's entry in /proc, and the keeper is seen to live afterwards: so it was its root, and not that of a later
    /// process of the same number.
    ///
    /// # Errors
    /// `NotFound` when the keeper does not run; the file system's.
    pub fn open_in_keeper(&self, id: SandboxId, name: &str) -> io::Result<OwnedFd> {
        let record: KeeperRecord = self.read(id, file::KEEPER).map_err(|_| io::ErrorKind::NotFound)?;
        let keeper = self.keeper(id)?;
        let root = format!("/proc/{}/root", record.pid);
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty())?;
        if proc::has_ended(keeper.as_fd()) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat2(&root, name, flags, Mode::empty(), resolve)?)
    }

    /// Gives a nameless file a name in the Sandbox's directory, owned by that uid, and opens it by it: only what has a name
    /// can be mounted. [`Place::unname`] takes it away again.
    ///
    /// # Errors
    /// The file system's; one without nameless files cannot name them either.
    pub fn name(&self, id: SandboxId, name: &str, file: &File, owner: u32) -> io::Result<OwnedFd> {
        let directory = self.open_directory(id)?;
        let (uid, gid) = (rustix::fs::Uid::from_raw(owner), rustix::fs::Gid::from_raw(owner));
        rustix::fs::fchown(file, Some(uid), Some(gid))?;
        let nameless = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::linkat(rustix::fs::CWD, nameless, &directory, name, AtFlags::SYMLINK_FOLLOW)?;
        self.open_at(id, name, OFlags::RDWR)
    }

    /// Takes a name away. One that is not there is taken.
    ///
    /// # Errors
    /// The file system's.
    pub fn unname(&self, id: SandboxId, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(self.open_directory(id)?, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Claims the slot by making the directory, and writes the Plan into it.
    ///
    /// # Errors
    /// `AlreadyExists`; the file system's.
    pub fn claim(&self, plan: &Plan) -> io::Result<()> {
        rustix::fs::mkdirat(&self.jails, self.names(plan.id).directory(), Mode::from_raw_mode(0o700))?;
        self.write(plan.id, file::PLAN, plan)
    }

    /// Makes a directory of a Sandbox that belongs to one of its uids alone.
    ///
    /// # Errors
    /// The file system's.
    pub fn area(&self, id: SandboxId, name: &str, owner: u32) -> io::Result<()> {
        let directory = self.open_directory(id)?;
        rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o700))?;
        let area = self.open_at(id, name, OFlags::DIRECTORY)?;
        let (uid, gid) = (rustix::fs::Uid::from_raw(owner), rustix::fs::Gid::from_raw(owner));
        rustix::fs::fchown(&area, Some(uid), Some(gid))?;
        Ok(())
    }
}

/// One kind of thing a Sandbox can hold, in the order in which they are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Its directory: first and last.
    Directory,
    /// Its cgroup in every hierarchy.
    Cgroup,
    /// Its network namespace and the link to it.
    Network,
    /// The directories of its processes.
    Areas,
    /// Its processes.
    Processes,
}

impl Kind {
    /// Its name in lists.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Directory => "directory",
            Kind::Cgroup => "cgroup",
            Kind::Network => "network",
            Kind::Areas => "areas",
            Kind::Processes => "process",
        }
    }
}

/// Everything a Sandbox can hold.
#[derive(Clone, Copy, Debug)]
pub struct Holdings<'a> {
    place: &'a Place,
    id: SandboxId,
}

impl<'a> Holdings<'a> {
    /// By its id alone.
    pub fn of(place: &'a Place, id: SandboxId) -> Self {
        Holdings { place, id }
    }

    /// Every kind, last taken first.
    pub fn kinds() -> [Kind; 5] {
        [Kind::Processes, Kind::Areas, Kind::Network, Kind::Cgroup, Kind::Directory]
    }

    /// Gives everything back, last taken first. A kind that stays keeps those taken before it: they are what leads to it.
    ///
    /// # Errors
    /// One sentence for what stayed.
    pub fn release(self) -> Result<(), Vec<String>> {
        for kind in Self::kinds() {
            if let Err(error) = self.release_one(kind) {
                return Err(vec![format!("{} of {}: {error}", kind.as_str(), self.id)]);
            }
        }
        Ok(())
    }

    /// Gives one kind back. What is not there is given back.
    ///
    /// # Errors
    /// It stayed.
    pub fn release_one(self, kind: Kind) -> io::Result<()> {
        match kind {
            Kind::Processes => self.end_processes(),
            Kind::Areas => self.remove_areas(),
            Kind::Network => net::slot::release(self.place, self.id),
            Kind::Cgroup => {
                self.place.cgroups.leaf(self.place.cgroup(self.id)).remove(REMOVED_WITHIN).map_err(io::Error::other)
            }
            Kind::Directory => {
                remove_tree(self.place.jails.as_fd(), Names { tag: self.place.tag, id: self.id }.directory(), DEPTH)
            }
        }
    }

    /// Which kinds are there now, and by what name.
    pub fn present(self) -> Vec<(Kind, String)> {
        let mut there = Vec::new();
        let leaf = self.place.cgroups.leaf(self.place.cgroup(self.id));
        let uids = self.place.block.uids(self.id.slot()).all();
        for process in proc::all().filter(|process| uids.contains(&process.uid)) {
            there.push((Kind::Processes, format!("{} {}", process.pid, process.name)));
        }
        there.extend(net::slot::present(self.place.names(self.id)).into_iter().map(|name| (Kind::Network, name)));
        if leaf.exists() {
            there.push((Kind::Cgroup, self.place.cgroup(self.id)));
        }
        if self.place.open_directory(self.id).is_ok() {
            there.push((Kind::Directory, self.place.directory(self.id).display().to_string()));
        }
        there
    }

    /// Kills the keeper (and the kernel with it everything in its pid namespace), then whatever is in the cgroup, then
    /// whatever runs under its uids; returns when all of it is gone.
    fn end_processes(self) -> io::Result<()> {
        let deadline = Instant::now() + DEAD_WITHIN;
        if let Ok(pidfd) = self.place.keeper(self.id) {
            proc::kill(pidfd.as_fd())?;
            if !proc::wait(pidfd.as_fd(), DEAD_WITHIN) {
                return Err(io::Error::other("its keeper does not end"));
            }
        }
        self.place.cgroups.leaf(self.place.cgroup(self.id)).kill(DEAD_WITHIN).map_err(io::Error::other)?;
        let uids = self.place.block.uids(self.id.slot()).all();
        loop {
            let left: Vec<_> = proc::all().filter(|process| uids.contains(&process.uid)).collect();
            let Some(first) = left.first() else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(io::Error::other(format!(
                    "process {} ({}) of uid {} does not end",
                    first.pid, first.name, first.uid
                )));
            }
            for process in &left {
                // Opened first, then seen to have the uid still: the pid may be another's by now.
                if let Ok(pidfd) = proc::open(process.pid)
                    && proc::read(process.pid).is_some_and(|now| now.uid == process.uid)
                {
                    proc::kill(pidfd.as_fd())?;
                    proc::wait(pidfd.as_fd(), Duration::from_millis(100));
                }
            }
        }
    }

    fn remove_areas(self) -> io::Result<()> {
        let directory = match self.place.open_directory(self.id) {
            Ok(directory) => directory,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        [file::BOOT, file::VSOCK, file::RELAY, file::KEEP]
            .iter()
            .try_for_each(|name| remove_tree(directory.as_fd(), name, DEPTH))
    }
}

/// Removes a directory and what is in it, at most so deep, without ever following a link or leaving its file system: jailed
/// processes own some of what is below. One that is not there is removed.
///
/// # Errors
/// Something in it does not go.
pub fn remove_tree(parent: BorrowedFd<'_>, name: impl AsRef<std::ffi::OsStr>, depth: u32) -> io::Result<()> {
    let name = name.as_ref();
    let device = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat.st_dev,
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    remove_entry(parent, name, device, depth)
}

fn remove_entry(parent: BorrowedFd<'_>, name: &std::ffi::OsStr, device: u64, depth: u32) -> io::Result<()> {
    let stat = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return absent_is_done(rustix::fs::unlinkat(parent, name, AtFlags::empty()));
    }
    if stat.st_dev != device || depth == 0 {
        return Err(io::Error::other(format!("{} is another file system or too deep", name.display())));
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let entry = entry?;
        let below = std::os::unix::ffi::OsStrExt::from_bytes(entry.file_name().to_bytes());
        let below: &std::ffi::OsStr = below;
        if below != "." && below != ".." {
            remove_entry(directory.as_fd(), below, device, depth - 1)?;
        }
    }
    absent_is_done(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR))
}

fn absent_is_done(done: Result<(), rustix::io::Errno>) -> io::Result<()> {
    match done {
        Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn kinds_go_back_in_reverse() {
        let mut taken = Holdings::kinds();
        assert_eq!(taken[4], Kind::Directory, "the directory is not last");
        taken.reverse();
        assert!(taken.is_sorted(), "not the reverse of taking");
    }

    #[test]
    fn a_tree_is_removed_without_following_links() {
        let root = tempfile::tempdir().expect("directory");
        let outside = root.path().join("outside");
        fs::create_dir(&outside).expect("outside");
        fs::write(outside.join("precious"), "x").expect("file");
        let tree = root.path().join("tree");
        fs::create_dir_all(tree.join("a/b")).expect("tree");
        fs::write(tree.join("a/b/c"), "x").expect("file");
        symlink(&outside, tree.join("a/link")).expect("link");
        symlink("/", tree.join("up")).expect("link");
        let parent = File::open(root.path()).expect("open");
        remove_tree(parent.as_fd(), "tree", DEPTH).expect("remove");
        assert!(!tree.exists());
        assert!(outside.join("precious").exists(), "a link was followed");
        remove_tree(parent.as_fd(), "tree", DEPTH).expect("absent is done");
        symlink(&outside, root.path().join("tree")).expect("link");
        remove_tree(parent.as_fd(), "tree", DEPTH).expect("a link itself");
        assert!(outside.join("precious").exists(), "a link was followed");
    }

    fn place(root: &Path) -> Place {
        let jails = root.join("jail");
        fs::create_dir_all(&jails).expect("jails");
        let block = UidBlock { index: 7, first: crate::registry::LAST_UID - UidBlock::SIZE + 1 };
        let tag = "te5t".parse().expect("tag");
        Place::open(tag, block, &jails, Hierarchies::detect().expect("cgroups")).expect("place")
    }

    fn plan(id: SandboxId) -> Plan {
        let path = || crate::plan::StatePath::new("x").expect("path");
        let vmm = crate::plan::Vmm::Qemu;
        let network = crate::plan::Network::Absent;
        Plan {
            id,
            vmm,
            kernel: path(),
            initramfs: path(),
            root: path(),
            memory_mib: 256,
            cpus: 1,
            disk_mib: 64,
            network,
            io: None,
        }
    }

    #[test]
    fn a_directory_claims_a_slot_and_leads_to_everything() {
        let root = tempfile::tempdir().expect("directory");
        let place = place(root.path());
        let id = SandboxId::new(crate::id::Slot::new(9).expect("slot"));
        place.claim(&plan(id)).expect("claim");
        assert_eq!(place.claim(&plan(id)).expect_err("twice").kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(place.read::<Plan>(id, file::PLAN).expect("plan"), plan(id));
        assert_eq!(place.all().expect("all"), [id]);
        assert_eq!(place.keeper(id).expect_err("no keeper yet").kind(), io::ErrorKind::NotFound);
        // A process of that number that started at another time, or is in another cgroup, is not the keeper.
        let start = proc::start_time(std::process::id()).expect("start time");
        for start in [start + 1, start] {
            place.write(id, file::KEEPER, &KeeperRecord { pid: std::process::id(), start }).expect("record");
            assert!(place.keeper(id).is_err(), "this test was taken for a keeper");
        }
        assert_eq!(Holdings::of(&place, id).present().len(), 1);
        // That record is still there: a release that believed it would end this test.
        Holdings::of(&place, id).release().expect("release");
        Holdings::of(&place, id).release().expect("absent is done");
        assert!(place.all().expect("all").is_empty());
    }

    #[test]
    fn links_in_a_jail_lead_nowhere() {
        let root = tempfile::tempdir().expect("directory");
        let place = place(root.path());
        let id = SandboxId::new(crate::id::Slot::new(10).expect("slot"));
        place.claim(&plan(id)).expect("claim");
        fs::write(root.path().join("secret"), "x").expect("secret");
        symlink(root.path(), place.directory(id).join("keep")).expect("link");
        symlink("../../secret", place.directory(id).join("exit.json")).expect("link");
        for name in ["keep/secret", "exit.json", "../../secret", "/etc/passwd"] {
            assert!(place.open_at(id, name, OFlags::RDONLY).is_err(), "{name} was opened");
        }
        Holdings::of(&place, id).release().expect("release");
        assert!(root.path().join("secret").exists());
    }

    #[test]
    fn jails_that_others_could_replace_are_refused() {
        let root = tempfile::tempdir().expect("directory");
        drop(place(root.path()));
        let open = || {
            let (tag, block) = ("te5t".parse().expect("tag"), UidBlock { index: 7, first: 0x7070_0000 });
            Place::open(tag, block, &root.path().join("jail"), Hierarchies::detect().expect("cgroups"))
        };
        let mode = |path: &Path, mode| rustix::fs::chmod(path, Mode::from_raw_mode(mode)).expect("chmod");
        mode(root.path(), 0o777);
        assert!(open().is_err(), "the directory above is everybody's");
        mode(root.path(), 0o1777);
        assert!(open().is_ok(), "sticky protects it");
        mode(&root.path().join("jail"), 0o777);
        assert!(open().is_err(), "the jails are everybody's");
    }
}
