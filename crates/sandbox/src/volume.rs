//! Volumes: trees that outlive Sandboxes, each with a cap on its bytes and its files.
//!
//! By default a tree is an ext4 file system in a sparse file of root's, made and mounted by the host; no guest ever writes
//! its blocks. It is mounted nowhere: whoever serves it gets a mount by descriptor, nosuid, nodev and noexec, which goes
//! with the process that holds it, and the disk with the last of them. So nothing can be left on the host, whatever is
//! killed when. A plain directory takes its place where the operator lists one; then the cap is that directory's own.
//!
//! ```text
//! <state>/volumes/<hex>/volume.json   what it was asked to be, and under which ids its files are stored
//!                       tree.ext4     sparse
//! tree.ext4 ─▶ loop device (goes with its last user) ─▶ ext4 ─▶ a mount for each server, by descriptor
//! ```
//! Called by the privileged side alone, one request about a tree at a time.

mod device;
mod lent;
mod plan;
mod template;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::OpenTreeFlags;
use serde::{Deserialize, Serialize};

use crate::disk;
use crate::held::remove_tree;
use crate::id::{UidBlock, VolumeId};
use crate::jail::Access;
use crate::{rights, sys};

use device::{device_of, mount_disk};
use lent::Lent;
use template::size;

pub use lent::Lender;
pub use plan::{Medium, VOLUME_FILES, VOLUME_MIB, VolumePlan, VolumeUsage, files_after};

/// The id, within its owner's, of the user to whom a new tree belongs: the one that programs of a guest run as.
pub const USER: u32 = 1000;

/// The directory below the state directory.
const DIRECTORY: &str = "volumes";

/// In a tree's directory.
const DISK: &str = "tree.ext4";
const RECORD: &str = "volume.json";

/// The longest record that is read back.
const RECORD_BYTES: u64 = 8 * 1024;

/// How long a disk may take to be let go by the kernel after its last user ended: it is flushed meanwhile.
const QUIET_WITHIN: Duration = Duration::from_secs(60);

/// The same for one that may well have users: they are told of soon.
const LET_GO_WITHIN: Duration = Duration::from_secs(3);

/// Bytes of a block of ext4, as it is made here.
const BLOCK: u64 = 4096;

/// How deep a tree in a directory of the operator's may be to be removed: each level holds a descriptor.
const DEPTH: u32 = 512;

/// Why there is no tree.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plan is not one that is followed.
    #[error("{0}")]
    Plan(String),
    /// There is none of that id.
    #[error("there is no tree {0}")]
    NotThere(VolumeId),
    /// There is one already.
    #[error("there is a tree {0} already")]
    There(VolumeId),
    /// Somebody uses it.
    #[error("{0} is in use")]
    InUse(VolumeId),
    /// Its files are stored under ids that are not this instance's.
    #[error("files of {id} are stored under ids from {stored}, this instance has those from {ours}")]
    Ids {
        /// Which.
        id: VolumeId,
        /// The first of its ids.
        stored: u32,
        /// What the first would be here.
        ours: u32,
    },
    /// The disk, or a program for it.
    #[error(transparent)]
    Disk(#[from] disk::Error),
    /// A step failed.
    #[error("{step}")]
    Step {
        /// What was tried, on what.
        step: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

fn at<E: Into<io::Error>>(step: impl Into<String>) -> impl FnOnce(E) -> Error {
    let step = step.into();
    move |source| Error::Step { step, source: source.into() }
}

/// `volume.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    plan: VolumePlan,
    first_uid: u32,
}

/// An instance's trees.
#[derive(Debug)]
pub struct Volumes {
    directory: PathBuf,
    block: UidBlock,
    mkfs: PathBuf,
    listed: BTreeMap<String, PathBuf>,
    /// One request about a tree at a time: two disks of one file would destroy it.
    turns: Mutex<HashMap<VolumeId, Arc<Mutex<()>>>>,
    templates: Mutex<()>,
    /// Directories of local callers, for as long as this process and whoever they are lent to.
    lent: Mutex<HashMap<VolumeId, Lent>>,
}

/// Directories that may be lent at once: each is a descriptor.
const LENT: usize = 256;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A mount of a tree, held by descriptor, and whose its files are.
#[derive(Debug)]
pub struct Mounted {
    /// The mount: nowhere, and gone with its last descriptor or the namespace it is moved to.
    pub mount: OwnedFd,
    /// Whose.
    pub whose: Whose,
}

impl Mounted {
    /// Who lends it, if somebody does.
    pub fn lender(&self) -> Option<Lender> {
        match &self.whose {
            Whose::Owner(_) => None,
            Whose::Lender(lender) => Some(lender.clone()),
        }
    }
}

/// Whose the files of a tree are on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Nobody's: stored under 65,536 ids from this one on. See [`UidBlock::tree`].
    Owner(u32),
    /// A local caller's, who lends them.
    Lender(Lender),
}

impl Volumes {
    /// Those below a state directory that is root's. The directory is made at the first tree.
    pub fn new(state: &Path, block: UidBlock, mkfs: PathBuf, listed: BTreeMap<String, PathBuf>) -> Self {
        let (turns, templates, lent) = (Mutex::default(), Mutex::default(), Mutex::default());
        Volumes { directory: state.join(DIRECTORY), block, mkfs, listed, turns, templates, lent }
    }

    fn turn(&self, id: VolumeId) -> Arc<Mutex<()>> {
        lock(&self.turns).entry(id).or_default().clone()
    }

    fn place(&self, id: VolumeId) -> PathBuf {
        self.directory.join(id.hex())
    }

    fn record(&self, id: VolumeId) -> Result<Record, Error> {
        let path = self.place(id).join(RECORD);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Error::NotThere(id)),
            Err(error) => return Err(at(format!("open {}", path.display()))(error)),
        };
        let mut text = Vec::new();
        file.take(RECORD_BYTES).read_to_end(&mut text).map_err(at(format!("read {}", path.display())))?;
        serde_json::from_slice(&text).map_err(|error| at(format!("read {}", path.display()))(io::Error::from(error)))
    }

    /// The ids that an owner's trees have here.
    fn ids(&self, owner: u16) -> Result<u32, Error> {
        self.block.tree(owner).ok_or_else(|| Error::Plan(format!("owner {owner} has no ids")))
    }

    /// Every tree there is.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn all(&self) -> Result<Vec<VolumeId>, Error> {
        let step = || format!("read {}", self.directory.display());
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(at(step())(error)),
        };
        let mut all = Vec::new();
        for entry in entries {
            let name = entry.map_err(at(step()))?.file_name();
            all.extend(name.to_str().and_then(|name| name.parse::<VolumeId>().ok()));
        }
        Ok(all)
    }

    /// Makes one: whole, or not at all.
    ///
    /// # Errors
    /// [`Error::Plan`], [`Error::There`], [`Error::Disk`], [`Error::Step`].
    pub fn create(&self, plan: &VolumePlan) -> Result<(), Error> {
        plan.check()?;
        let turn = self.turn(plan.id);
        let _turn = lock(&turn);
        if self.place(plan.id).exists() {
            return Err(Error::There(plan.id));
        }
        let first_uid = self.ids(plan.owner)?;
        let make = |path: &Path| {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(at(format!("make {}", path.display())))
        };
        make(&self.directory)?;
        let new = self.directory.join(format!("{}.new", plan.id.hex()));
        self.discard(&new)?;
        make(&new)?;
        let made = self.fill(plan, first_uid, &new).and_then(|()| {
            fs::rename(&new, self.place(plan.id)).map_err(at(format!("rename {}", new.display())))?;
            let parent = File::open(&self.directory).map_err(at("open the directory of trees"))?;
            parent.sync_all().map_err(at("write the directory of trees"))
        });
        if made.is_err() {
            // The first error is the one to tell; the next sweep finds what is left.
            let _ = self.discard(&new);
        }
        made
    }

    fn fill(&self, plan: &VolumePlan, first_uid: u32, new: &Path) -> Result<(), Error> {
        match &plan.medium {
            Medium::Disk { mib, files } => {
                let backing = new.join(DISK);
                let step = || format!("make {}", backing.display());
                let file = File::options()
                    .read(true)
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&backing)
                    .map_err(at(step()))?;
                let template = self.template(*mib, *files, first_uid)?;
                disk::copy(&template, &file).map_err(at(step()))?;
                file.sync_all().map_err(at(step()))?;
            }
            Medium::Directory { name } => {
                let above = self.listed(name)?;
                let below = plan.id.hex();
                let step = || format!("make {below} in the directory {name}");
                match rustix::fs::mkdirat(&above, &below, Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                    Err(error) => return Err(at(step())(error)),
                }
                let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let made = rustix::fs::openat(&above, &below, flags, Mode::empty()).map_err(at(step()))?;
                let owner = first_uid + USER;
                let (uid, gid) = (rustix::fs::Uid::from_raw(owner), rustix::fs::Gid::from_raw(owner));
                rustix::fs::fchown(&made, Some(uid), Some(gid)).map_err(at(step()))?;
            }
        }
        let record = Record { plan: plan.clone(), first_uid };
        let path = new.join(RECORD);
        let step = || format!("write {}", path.display());
        let text = serde_json::to_vec(&record).map_err(|error| at(step())(io::Error::from(error)))?;
        let mut file = File::create_new(&path).map_err(at(step()))?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(at(step()))
    }

    /// One of the operator's directories.
    fn listed(&self, name: &str) -> Result<OwnedFd, Error> {
        let unknown = || Error::Plan(format!("the operator lists no directory `{}`", name.escape_debug()));
        let path = self.listed.get(name).ok_or_else(unknown)?;
        let step = format!("open the directory {name}");
        let top = rustix::fs::open("/", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(at(&*step))?;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let relative = path.strip_prefix("/").unwrap_or(path);
        rustix::fs::openat2(&top, relative, flags, Mode::empty(), resolve).map_err(at(step))
    }

    /// A mount of it for one user. Any number of them may be there at once.
    ///
    /// # Errors
    /// [`Error::NotThere`], [`Error::Ids`], [`Error::Step`].
    pub fn mount(&self, id: VolumeId, access: Access) -> Result<Mounted, Error> {
        let turn = self.turn(id);
        let _turn = lock(&turn);
        self.mount_now(id, access)
    }

    /// Takes a directory that a local caller lends, with that caller's rights. It is given back by [`Volumes::remove`], which
    /// removes nothing of it.
    ///
    /// # Errors
    /// [`Error::Plan`] where the caller may not have it, [`Error::There`].
    pub fn lend(&self, id: VolumeId, connection: &OwnedFd, path: &Path, access: Access) -> Result<(), Error> {
        let lent = lent::open(connection, path, access)
            .map_err(|error| Error::Plan(format!("{}: {error}", path.display().to_string().escape_debug())))?;
        let mut all = lock(&self.lent);
        if all.len() >= LENT {
            return Err(Error::Plan(format!("{LENT} directories are lent already")));
        }
        match all.entry(id) {
            std::collections::hash_map::Entry::Occupied(_) => Err(Error::There(id)),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(lent);
                Ok(())
            }
        }
    }

    /// Whether it is a directory that is lent.
    pub fn is_lent(&self, id: VolumeId) -> bool {
        lock(&self.lent).contains_key(&id)
    }

    /// A mount of a directory that is lent.
    fn mount_lent(&self, id: VolumeId, access: Access) -> Option<Result<Mounted, Error>> {
        let all = lock(&self.lent);
        let Lent { directory, lender, access: most } = all.get(&id)?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let mount = || {
            let tree = rustix::mount::open_tree(directory, "", flags).map_err(at("open a directory that is lent"))?;
            let read_only = access == Access::ReadOnly || *most == Access::ReadOnly;
            sys::restrict_mount(tree.as_fd(), read_only)
                .map_err(at("mount a directory that is lent (Linux 5.12 can)"))?;
            Ok(Mounted { mount: tree, whose: Whose::Lender(lender.clone()) })
        };
        Some(mount())
    }

    fn mount_now(&self, id: VolumeId, access: Access) -> Result<Mounted, Error> {
        if let Some(mounted) = self.mount_lent(id, access) {
            return mounted;
        }
        let Record { plan, first_uid } = self.record(id)?;
        let ours = self.ids(plan.owner)?;
        if ours != first_uid {
            return Err(Error::Ids { id, stored: first_uid, ours });
        }
        let mount = match &plan.medium {
            Medium::Disk { .. } => {
                let backing = self.open_disk(id)?;
                mount_disk(&backing, access).map_err(at(format!("mount {id}")))?
            }
            Medium::Directory { name } => {
                let above = self.listed(name)?;
                let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
                let nofollow = OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
                let tree = rustix::mount::open_tree(&above, id.hex(), flags | nofollow)
                    .map_err(at(format!("open {id} in the directory {name}")))?;
                sys::restrict_mount(tree.as_fd(), access == Access::ReadOnly)
                    .map_err(at(format!("mount {id} from the directory {name} (Linux 5.12 can)")))?;
                tree
            }
        };
        Ok(Mounted { mount, whose: Whose::Owner(first_uid) })
    }

    fn open_disk(&self, id: VolumeId) -> Result<File, Error> {
        let path = self.place(id).join(DISK);
        let step = || format!("open {}", path.display());
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags((OFlags::NOFOLLOW | OFlags::CLOEXEC).bits() as i32)
            .open(&path)
            .map_err(at(step()))?;
        let meta = file.metadata().map_err(at(step()))?;
        if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(at(step())(io::Error::other("it is not a plain file of ours")));
        }
        Ok(file)
    }

    /// What it uses now.
    ///
    /// # Errors
    /// As [`Volumes::mount`].
    pub fn usage(&self, id: VolumeId) -> Result<VolumeUsage, Error> {
        let turn = self.turn(id);
        let _turn = lock(&turn);
        let record = self.record(id)?;
        let mounted = self.mount_now(id, Access::Writable)?;
        let space = rustix::fs::fstatvfs(&mounted.mount).map_err(at(format!("look at {id}")))?;
        let (capped, allocated) = match record.plan.medium {
            Medium::Disk { .. } => {
                (true, self.open_disk(id)?.metadata().map_err(at(format!("look at {id}")))?.blocks() * 512)
            }
            Medium::Directory { .. } => (false, 0),
        };
        Ok(VolumeUsage {
            bytes: space.f_blocks.saturating_mul(space.f_frsize),
            bytes_used: space.f_blocks.saturating_sub(space.f_bfree).saturating_mul(space.f_frsize),
            files: space.f_files,
            files_used: space.f_files.saturating_sub(space.f_ffree),
            allocated,
            capped,
        })
    }

    /// Gives the disk back what it holds no more, and makes everything written so far last through a power cut.
    ///
    /// # Errors
    /// As [`Volumes::mount`].
    pub fn settle(&self, id: VolumeId) -> Result<(), Error> {
        let turn = self.turn(id);
        let _turn = lock(&turn);
        let record = self.record(id)?;
        let mounted = self.mount_now(id, Access::Writable)?;
        let root = self.top(id, &mounted)?;
        rustix::fs::syncfs(&root).map_err(at(format!("flush {id}")))?;
        if matches!(record.plan.medium, Medium::Disk { .. }) {
            match sys::disk::trim(root.as_fd()) {
                // A disk below that knows no holes keeps what it has: only room is lost.
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
                Err(error) => return Err(at(format!("trim {id}"))(error)),
            }
        }
        Ok(())
    }

    /// Raises the cap: of one that is used only where this process may pass every limit, which is who the kernel lets resize
    /// what is mounted.
    ///
    /// # Errors
    /// [`Error::Plan`], [`Error::NotThere`], [`Error::InUse`], [`Error::Step`].
    pub fn grow(&self, id: VolumeId, mib: u64) -> Result<(), Error> {
        let turn = self.turn(id);
        let _turn = lock(&turn);
        let Record { mut plan, first_uid } = self.record(id)?;
        let Medium::Disk { mib: now, files } = plan.medium else {
            return Err(Error::Plan("a directory of the operator's has no cap to change".to_owned()));
        };
        if mib < now {
            return Err(Error::Plan(format!("it has {now} MiB: a tree grows and does not shrink")));
        }
        if mib == now {
            return Ok(());
        }
        let files = files_after(files, now, mib);
        plan.medium = Medium::Disk { mib, files };
        plan.check()?;
        let step = || format!("grow {id}");
        let backing = self.open_disk(id)?;
        if !rights::may_resize_mounted().map_err(at(step()))? {
            self.wait_until_quiet(&backing, LET_GO_WITHIN).map_err(|_| Error::InUse(id))?;
        }
        let device = device_of(&backing).map_err(at("look for its disk"))?;
        // A resize that failed half-way has left the file as large as this or larger; it never becomes smaller.
        let bytes = size(mib, files).max(backing.metadata().map_err(at(step()))?.len());
        backing.set_len(bytes).map_err(at(step()))?;
        match device {
            None => {
                self.resize_at_rest(id)?;
                backing.sync_all().map_err(at(step()))?;
            }
            Some((device, _)) => {
                sys::disk::look_again(device.as_fd()).map_err(at(step()))?;
                let mounted = self.mount_now(id, Access::Writable)?;
                let root = self.top(id, &mounted)?;
                sys::disk::grow(root.as_fd(), bytes / BLOCK).map_err(at(step()))?;
                rustix::fs::syncfs(&root).map_err(at(step()))?;
            }
        }
        let path = self.place(id).join(RECORD);
        let new = self.place(id).join(format!("{RECORD}.new"));
        let text = serde_json::to_vec(&Record { plan, first_uid })
            .map_err(|error| at(format!("write {}", path.display()))(io::Error::from(error)))?;
        fs::write(&new, text)
            .and_then(|()| File::open(&new)?.sync_all())
            .and_then(|()| fs::rename(&new, &path))
            .map_err(at(format!("write {}", path.display())))
    }

    /// Makes the file system as large as its file.
    fn resize_at_rest(&self, id: VolumeId) -> Result<(), Error> {
        let program = self.mkfs.with_file_name("resize2fs");
        let ran = Command::new(&program)
            .arg("-f")
            .arg(self.place(id).join(DISK))
            .env_clear()
            .stdin(Stdio::null())
            .output()
            .map_err(at(format!("run {}", program.display())))?;
        if ran.status.success() {
            return Ok(());
        }
        let said: String = String::from_utf8_lossy(&ran.stderr).trim().chars().take(400).collect();
        Err(disk::Error::Mkfs { program, said }.into())
    }

    fn top(&self, id: VolumeId, mounted: &Mounted) -> Result<OwnedFd, Error> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::openat(&mounted.mount, ".", flags, Mode::empty()).map_err(at(format!("open {id}")))
    }

    /// Removes it with all that is in it; how many bytes of the host's disk that gave back. One that is not there is removed.
    ///
    /// # Errors
    /// [`Error::InUse`], [`Error::Step`].
    pub fn remove(&self, id: VolumeId) -> Result<u64, Error> {
        if lock(&self.lent).remove(&id).is_some() {
            return Ok(0);
        }
        let turn = self.turn(id);
        let _turn = lock(&turn);
        let record = match self.record(id) {
            Ok(record) => record,
            Err(Error::NotThere(_)) => {
                self.discard(&self.place(id))?;
                return Ok(0);
            }
            Err(error) => return Err(error),
        };
        let mut freed = 0;
        match &record.plan.medium {
            Medium::Disk { .. } => match self.open_disk(id) {
                Ok(backing) => {
                    // A server that has just ended lets go of it in a moment.
                    self.wait_until_quiet(&backing, QUIET_WITHIN).map_err(|_| Error::InUse(id))?;
                    freed = backing.metadata().map(|meta| meta.blocks() * 512).unwrap_or(0);
                }
                Err(Error::Step { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            },
            Medium::Directory { name } => {
                let above = self.listed(name)?;
                remove_tree(above.as_fd(), id.hex(), DEPTH)
                    .map_err(at(format!("remove {id} from the directory {name}")))?;
            }
        }
        // The record goes last of all, with its directory: until then it is a tree that can be removed again.
        let gone = self.directory.join(format!("{}.new", id.hex()));
        self.discard(&gone)?;
        fs::rename(self.place(id), &gone).map_err(at(format!("remove {id}")))?;
        self.discard(&gone)?;
        lock(&self.turns).remove(&id);
        Ok(freed)
    }

    /// Removes what a creation or a removal that was cut off left. Called once, before anything else.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn sweep(&self) -> Result<(), Error> {
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(at(format!("read {}", self.directory.display()))(error)),
        };
        for entry in entries.flatten() {
            if entry.file_name().to_str().is_some_and(|name| name.ends_with(".new")) {
                self.discard(&entry.path())?;
            }
        }
        Ok(())
    }

    fn discard(&self, path: &Path) -> Result<(), Error> {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(at(format!("remove {}", path.display()))(error))
            }
            _ => Ok(()),
        }
    }

    fn wait_until_quiet(&self, backing: &File, within: Duration) -> io::Result<()> {
        let deadline = Instant::now() + within;
        while device_of(backing)?.is_some() {
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}
