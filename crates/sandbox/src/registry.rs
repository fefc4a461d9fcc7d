//! Instances: a state directory is one, while somebody holds its lock, and leases a tag and a block of uids from a
//! machine-wide registry, so that two instances never share a uid, a name or an address, and never sweep each other.
//!
//! ```text
//! <state>/lock                     flock held for life: one daemon per state directory; its text is the holder's pid
//! <state>/instance.json            the lease of last time, wanted again
//! /run/pepo/instances/             flock on the directory itself while leases are looked at and changed
//! /run/pepo/instances/<tag>        flock held for life: the lease; its text says whose it is
//! ```
//! A lease whose lock nobody holds is *stale*. It is kept while anything of its tag or its uids is on the host (a restart
//! of the same instance adopts it), and taken away otherwise. The same instance gets the same tag and block again.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::builder;
use crate::cgroup;
use crate::id::{Tag, UidBlock};
use crate::net;
use crate::proc;

/// Where the machine's registry is. The same for every instance, wherever its own files are.
pub const REGISTRY: &str = "/run/pepo/instances";

/// The first uid of the machine's range: above what `useradd`, subordinate ids (to 600,100,000 by default) and systemd's
/// containers (to 1,879,048,191) use; the last one is below systemd's block for foreign uids.
pub const FIRST_UID: u32 = 0x7000_0000;
/// The last uid of the machine's range.
pub const LAST_UID: u32 = 0x7FFD_FFFF;

/// Blocks in the range.
const BLOCKS: u16 = ((LAST_UID - FIRST_UID + 1) / UidBlock::SIZE) as u16;

/// The longest lease file that is read.
const LEASE_BYTES: u64 = 8 * 1024;

/// Why this process is not an instance.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody runs it already.
    #[error("{} is run by process {pid}", state.display())]
    Running {
        /// The state directory.
        state: PathBuf,
        /// The process that holds it (0: it did not say).
        pid: u32,
    },
    /// Every block is taken or overlaps what the system has.
    #[error("no block of {size} uids is free in {first}..={last}", size = UidBlock::SIZE, first = FIRST_UID, last = LAST_UID)]
    NoBlock,
    /// A file or directory cannot be used.
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

/// Adds what and where to an error.
fn at<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Error + 'a {
    move |source| Error::Io { what, path: path.to_owned(), source }
}

/// What a lease file says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// The tag.
    pub tag: Tag,
    /// The uids.
    pub block: UidBlock,
    /// Whose it is.
    pub state: PathBuf,
    /// Where its jails are.
    pub jails: PathBuf,
    /// Who held it last.
    pub pid: u32,
}

/// Whether somebody holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// Its instance runs.
    Alive,
    /// Nobody.
    Nobody,
}

/// This process' hold on a state directory and on its lease. Dropped, both locks go; what the lease names stays.
#[derive(Debug)]
pub struct Instance {
    lease: Lease,
    registry: PathBuf,
    _state_lock: File,
    _lease_lock: File,
}

impl Instance {
    /// Takes the state directory, which must exist, and a lease in the machine's registry.
    ///
    /// # Errors
    /// [`Error::Running`], [`Error::NoBlock`], [`Error::Io`].
    pub fn acquire(state: &Path, jails: &Path) -> Result<Self, Error> {
        #[cfg(feature = "fake")]
        if !rustix::process::geteuid().is_root() {
            // Without rights there is nothing of the machine's to lease, and the registry is root's.
            return Self::acquire_in(&state.join("instances"), state, jails);
        }
        Self::acquire_in(Path::new(REGISTRY), state, jails)
    }

    /// As [`Instance::acquire`], in that registry.
    ///
    /// # Errors
    /// As [`Instance::acquire`].
    pub fn acquire_in(registry: &Path, state: &Path, jails: &Path) -> Result<Self, Error> {
        let state = fs::canonicalize(state).map_err(at("find", state))?;
        let state_lock = hold(&state)?;
        let guard = Guard::take(registry)?;
        let remembered = remembered(&state);
        let mut leases = Vec::new();
        for (lease, holder) in guard.leases()? {
            let ours = lease.state == state;
            if holder == Holder::Nobody && !ours && !on_the_host(&lease) {
                guard.remove(lease.tag)?;
                continue;
            }
            leases.push((lease, holder));
        }
        let ours = leases.iter().find(|(lease, holder)| lease.state == state && *holder == Holder::Nobody);
        let wanted = ours.map(|(lease, _)| (lease.tag, lease.block)).or(remembered);
        let others: Vec<&Lease> = leases.iter().map(|(lease, _)| lease).filter(|lease| lease.state != state).collect();
        let tag = free_tag(&state, wanted.map(|(tag, _)| tag), &others);
        let known = ours.map(|(lease, _)| lease.block);
        let block = free_block(known, wanted.map(|(_, block)| block), &others).ok_or(Error::NoBlock)?;
        let lease = Lease { tag, block, state: state.clone(), jails: jails.to_owned(), pid: std::process::id() };
        let lease_lock = guard.write(&lease)?;
        remember(&state, &lease)?;
        Ok(Instance { lease, registry: registry.to_owned(), _state_lock: state_lock, _lease_lock: lease_lock })
    }

    /// Its tag.
    pub fn tag(&self) -> Tag {
        self.lease.tag
    }

    /// Its uids. The index is that of its address block too.
    pub fn block(&self) -> UidBlock {
        self.lease.block
    }

    /// The canonical state directory.
    pub fn state(&self) -> &Path {
        &self.lease.state
    }

    /// Where its jails are.
    pub fn jails(&self) -> &Path {
        &self.lease.jails
    }

    /// Ends it: the lease goes too when nothing of it is left on the host.
    ///
    /// # Errors
    /// The registry cannot be changed; the lease is then stale and goes later.
    pub fn end(self) -> Result<(), Error> {
        let guard = Guard::take(&self.registry)?;
        if !on_the_host(&self.lease) {
            guard.remove(self.lease.tag)?;
        }
        Ok(())
    }
}

/// Every lease of the machine's registry and whether somebody holds it. An absent registry has none.
///
/// # Errors
/// [`Error::Io`].
pub fn leases() -> Result<Vec<(Lease, Holder)>, Error> {
    leases_in(Path::new(REGISTRY))
}

/// As [`leases`], of that registry.
///
/// # Errors
/// [`Error::Io`].
pub fn leases_in(registry: &Path) -> Result<Vec<(Lease, Holder)>, Error> {
    if !registry.exists() {
        return Ok(Vec::new());
    }
    Guard::take(registry)?.leases()
}

/// Runs `work` on a lease nobody holds, holding it meanwhile, so that its instance cannot start in between; the lease is
/// removed when nothing of it is left. `None`: somebody holds it, or it is not there.
///
/// # Errors
/// [`Error::Io`].
pub fn with_stale<T>(registry: &Path, tag: Tag, work: impl FnOnce(&Lease) -> T) -> Result<Option<T>, Error> {
    let lock = {
        let guard = Guard::take(registry)?;
        guard.lock(tag)?
    };
    let Some((lease, _lock)) = lock else { return Ok(None) };
    let done = work(&lease);
    let guard = Guard::take(registry)?;
    if !on_the_host(&lease) {
        guard.remove(tag)?;
    }
    Ok(Some(done))
}

/// Whether anything of a lease is on the host: a cgroup of its tag, a process under one of its uids, a jail.
fn on_the_host(lease: &Lease) -> bool {
    let jails = fs::read_dir(&lease.jails).is_ok_and(|mut jails| {
        jails.any(|jail| jail.is_ok_and(|jail| jail.file_name().to_str().is_some_and(|name| name.len() == 32)))
    });
    jails
        || !builder::left_by(&lease.jails, lease.tag).is_empty()
        || !cgroup::Hierarchies::detect().is_ok_and(|all| all.tagged(lease.tag).is_empty())
        || proc::of_uids(lease.block).next().is_some()
        || net::slot::namespaces(lease.tag).is_ok_and(|ids| !ids.is_empty())
}

/// The state directory's lock.
fn hold(state: &Path) -> Result<File, Error> {
    let path = state.join("lock");
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(&path)
        .map_err(at("open", &path))?;
    if !try_lock(&file).map_err(at("lock", &path))? {
        let mut text = String::new();
        let _ = file.take(32).read_to_string(&mut text);
        return Err(Error::Running { state: state.to_owned(), pid: text.trim().parse().unwrap_or(0) });
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(at("write", &path))?;
    Ok(file)
}

fn try_lock(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn remembered(state: &Path) -> Option<(Tag, UidBlock)> {
    let lease: Lease = serde_json::from_slice(&fs::read(state.join("instance.json")).ok()?).ok()?;
    // A number anybody could have written there is not taken on trust: it must be a block of the range.
    (numbered(lease.block.index) == Some(lease.block)).then_some((lease.tag, lease.block))
}

fn remember(state: &Path, lease: &Lease) -> Result<(), Error> {
    let path = state.join("instance.json");
    let new = state.join("instance.json.new");
    let text = serde_json::to_vec(lease).map_err(|error| at("write", &path)(error.into()))?;
    fs::write(&new, text).and_then(|()| fs::rename(&new, &path)).map_err(at("write", &path))
}

fn numbered(index: u16) -> Option<UidBlock> {
    (index < BLOCKS).then(|| UidBlock { index, first: FIRST_UID + u32::from(index) * UidBlock::SIZE })
}

/// The wanted tag, else one spelled by the path, that no other lease has.
fn free_tag(state: &Path, wanted: Option<Tag>, others: &[&Lease]) -> Tag {
    let spelled = (0u32..).map(|salt| {
        let digest = Sha256::new()
            .chain_update(state.as_os_str().as_encoded_bytes())
            .chain_update(salt.to_le_bytes())
            .finalize();
        Tag::spelled([digest[0], digest[1], digest[2], digest[3]])
    });
    // There are 1.6 million tags and at most a few hundred leases: the search ends.
    let mut all = wanted.into_iter().chain(spelled);
    loop {
        if let Some(tag) = all.next()
            && others.iter().all(|lease| lease.tag != tag)
        {
            return tag;
        }
    }
}

/// The block the instance has (`known`: what runs under its uids is its own), else the one it wants, else the first, that
/// neither a lease nor the system has.
fn free_block(known: Option<UidBlock>, wanted: Option<UidBlock>, others: &[&Lease]) -> Option<UidBlock> {
    let leased = |block: UidBlock| others.iter().any(|lease| lease.block.index == block.index);
    if let Some(block) = known
        && !leased(block)
    {
        return Some(block);
    }
    let taken = SystemUids::read();
    wanted
        .into_iter()
        .chain((0..BLOCKS).filter_map(numbered))
        .find(|block| !leased(*block) && !taken.overlap(*block) && proc::of_uids(*block).next().is_none())
}

/// Uids the system gives out by its files. (Users of a directory service have no business in this range.)
struct SystemUids(Vec<(u64, u64)>);

impl SystemUids {
    fn read() -> Self {
        let mut ranges = Vec::new();
        for (path, start, count) in [
            ("/etc/passwd", 2, None),
            ("/etc/group", 2, None),
            ("/etc/subuid", 1, Some(2)),
            ("/etc/subgid", 1, Some(2)),
        ] {
            for line in fs::read_to_string(path).unwrap_or_default().lines() {
                let field = |n: usize| line.split(':').nth(n).and_then(|text| text.trim().parse::<u64>().ok());
                if let Some(first) = field(start) {
                    let count = count.map_or(Some(1), field).unwrap_or(1);
                    ranges.push((first, first.saturating_add(count)));
                }
            }
        }
        SystemUids(ranges)
    }

    fn overlap(&self, block: UidBlock) -> bool {
        let (first, end) = (u64::from(block.first), u64::from(block.first) + u64::from(UidBlock::SIZE));
        self.0.iter().any(|(low, high)| *low < end && first < *high)
    }
}

/// The registry, nobody else changing it.
struct Guard {
    path: PathBuf,
    _lock: File,
}

impl Guard {
    fn take(registry: &Path) -> Result<Self, Error> {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(registry).map_err(at("make", registry))?;
        let lock = File::open(registry).map_err(at("open", registry))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|error| at("lock", registry)(error.into()))?;
        Ok(Guard { path: registry.to_owned(), _lock: lock })
    }

    fn open(&self, tag: Tag) -> io::Result<File> {
        File::options()
            .read(true)
            .write(true)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(self.path.join(tag.as_str()))
    }

    fn leases(&self) -> Result<Vec<(Lease, Holder)>, Error> {
        let mut leases = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(at("read", &self.path))? {
            let entry = entry.map_err(at("read", &self.path))?;
            let Some(tag) = entry.file_name().to_str().and_then(|name| name.parse::<Tag>().ok()) else { continue };
            let file = match self.open(tag) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(at("open", &entry.path())(error)),
            };
            let holder =
                if try_lock(&file).map_err(at("lock", &entry.path()))? { Holder::Nobody } else { Holder::Alive };
            match read(&file) {
                Some(lease) if lease.tag == tag => leases.push((lease, holder)),
                // Written half by someone who died of it: whatever it was, nothing was made under it yet.
                _ if holder == Holder::Nobody => self.remove(tag)?,
                _ => {}
            }
        }
        Ok(leases)
    }

    /// Locks a lease that nobody holds.
    fn lock(&self, tag: Tag) -> Result<Option<(Lease, File)>, Error> {
        let path = self.path.join(tag.as_str());
        let file = match self.open(tag) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(at("open", &path)(error)),
        };
        if !try_lock(&file).map_err(at("lock", &path))? {
            return Ok(None);
        }
        Ok(read(&file).map(|lease| (lease, file)))
    }

    fn write(&self, lease: &Lease) -> Result<File, Error> {
        let path = self.path.join(lease.tag.as_str());
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .map_err(at("open", &path))?;
        if !try_lock(&file).map_err(at("lock", &path))? {
            return Err(Error::Running { state: lease.state.clone(), pid: read(&file).map_or(0, |lease| lease.pid) });
        }
        let text = serde_json::to_vec(lease).map_err(|error| at("write", &path)(error.into()))?;
        file.set_len(0).and_then(|()| file.write_all(&text)).map_err(at("write", &path))?;
        Ok(file)
    }

    /// The lease goes, and with it the instance's wall, which stands for Sandboxes that are gone. (Without rights there is
    /// none, and it is not ours to remove.)
    fn remove(&self, tag: Tag) -> Result<(), Error> {
        if rustix::process::geteuid().is_root() {
            net::remove_wall(tag).map_err(at("take down the wall of", &self.path.join(tag.as_str())))?;
        }
        let path = self.path.join(tag.as_str());
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at("remove", &path)(error)),
            _ => Ok(()),
        }
    }
}

fn read(mut file: &File) -> Option<Lease> {
    let mut text = Vec::new();
    file.rewind().ok()?;
    file.take(LEASE_BYTES).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Place {
        root: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Self {
            Place { root: tempfile::tempdir().expect("directory") }
        }

        fn acquire(&self, name: &str) -> Result<Instance, Error> {
            let state = self.root.path().join(name);
            fs::create_dir_all(&state).expect("state");
            Instance::acquire_in(&self.registry(), &state, &state.join("jail"))
        }

        fn registry(&self) -> PathBuf {
            self.root.path().join("instances")
        }
    }

    #[test]
    fn instances_never_share_and_one_is_one() {
        let place = Place::new();
        let a = place.acquire("a").expect("a");
        let b = place.acquire("b").expect("b");
        assert_ne!(a.tag(), b.tag());
        assert_ne!(a.block(), b.block());
        assert!(!a.block().holds(b.block().first));
        match place.acquire("a") {
            Err(Error::Running { pid, .. }) => assert_eq!(pid, std::process::id()),
            other => panic!("a second one: {other:?}"),
        }
    }

    #[test]
    fn the_same_instance_comes_back_as_it_was() {
        let place = Place::new();
        let first = place.acquire("first").expect("first");
        let second = place.acquire("second").expect("second");
        let (tag, block) = (second.tag(), second.block());
        drop((first, second));
        let again = place.acquire("second").expect("again");
        assert_eq!((again.tag(), again.block()), (tag, block));
        again.end().expect("end");
        assert!(!place.registry().join(tag.as_str()).exists(), "a clean end leaves a lease");
        // The registry lost it (a reboot), the state directory did not.
        let third = place.acquire("second").expect("third");
        assert_eq!((third.tag(), third.block()), (tag, block));
    }

    #[test]
    fn a_stale_lease_goes_when_nothing_of_it_is_left_and_stays_otherwise() {
        let place = Place::new();
        let clean = place.acquire("clean").expect("clean").tag();
        let dirty = place.acquire("dirty").expect("dirty");
        let (tag, block) = (dirty.tag(), dirty.block());
        let jail = dirty.jails().join("0".repeat(32));
        fs::create_dir_all(&jail).expect("jail");
        drop(dirty);
        let other = place.acquire("other").expect("other");
        assert!(!place.registry().join(clean.as_str()).exists());
        assert!(place.registry().join(tag.as_str()).exists());
        assert_ne!(other.block(), block, "a block in use was leased again");
        let seen =
            with_stale(&place.registry(), tag, |lease| fs::remove_dir(&jail).map(|()| lease.block)).expect("stale");
        assert_eq!(seen.expect("nobody holds it").expect("removed"), block);
        assert!(!place.registry().join(tag.as_str()).exists());
        assert!(with_stale(&place.registry(), other.tag(), |_| ()).expect("held").is_none());
    }

    #[test]
    fn a_forged_memory_is_not_believed() {
        let place = Place::new();
        let state = place.root.path().join("s");
        fs::create_dir_all(&state).expect("state");
        fs::write(
            state.join("instance.json"),
            r#"{"tag":"abcd","block":{"index":0,"first":0},"state":"/","jails":"/","pid":1}"#,
        )
        .expect("write");
        let got = Instance::acquire_in(&place.registry(), &state, &state).expect("instance");
        assert!(got.block().first >= FIRST_UID);
        assert_eq!(numbered(got.block().index), Some(got.block()));
    }

    #[test]
    fn blocks_lie_in_the_range() {
        let last = numbered(BLOCKS - 1).expect("last");
        assert!(last.first + UidBlock::SIZE - 1 <= LAST_UID);
        assert!(numbered(BLOCKS).is_none());
    }
}
