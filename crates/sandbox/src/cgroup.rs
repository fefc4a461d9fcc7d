//! Control groups: one leaf per Sandbox in every hierarchy that caps, counts, freezes or kills.
//!
//! Works on v2, on v1, and on hybrid hosts, where a leaf in the (empty) v2 tree serves identity and `cgroup.kill`. A leaf
//! lies directly below the root that this host shows, or below our own cgroup where systemd has delegated it to us: a place
//! that is the same for the next pepod, wherever that is started from. The name carries the instance's tag.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::host::Usage;
use crate::id::{Names, SandboxId, Tag};
use crate::proc;

mod layer;

pub use layer::{Io, IoLayer};

/// Controllers a Sandbox is capped and counted by.
const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];

/// The controller that is used where it is there.
const WISHED: &str = "io";

/// v1 controllers in which a leaf is made.
const USED_V1: [&str; 6] = ["cpu", "cpuacct", "memory", "pids", "freezer", "blkio"];

/// A processor's worth of weight: on v2, where 100 is everybody's, and on v1, where 1024 is.
const WEIGHT: (u64, u64) = (100, 1024);

/// The largest weight of v2.
const HEAVIEST: u64 = 10_000;

/// The period of a cpu quota, in microseconds: the kernel's default.
pub const PERIOD_US: u64 = 100_000;

/// How long between two looks at a cgroup that empties.
const LOOK: Duration = Duration::from_millis(4);

/// What pepod's own processes weigh against all Sandboxes together, and the memory that is theirs whatever Sandboxes want:
/// the unit's `MemoryMin=` is as much.
const RESERVED: [(&str, &str); 2] = [("cpu.weight", "10000"), ("memory.min", "268435456")];

/// The unit's `DelegateSubgroup=`: where pepod's own processes are below a delegated cgroup.
const OWN_LEAF: &str = "pepod";

/// Why a cgroup is not as wanted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host has no usable hierarchy for these.
    #[error(
        "no cgroup hierarchy that can be seen here offers {0} (`ip netns exec` hides them all; `nsenter --net` does not)"
    )]
    Absent(String),
    /// A file or directory of it refuses.
    #[error("{what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Processes are still there after the deadline.
    #[error("{count} processes are left in {name}")]
    Populated {
        /// The leaf.
        name: String,
        /// How many.
        count: usize,
    },
}

fn at<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Error + 'a {
    move |source| Error::Io { what, path: path.to_owned(), source }
}

/// What a Sandbox's processes may use together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory, in bytes; swap is off where the kernel can say so.
    pub memory_bytes: u64,
    /// Processor time, in microseconds for each [`PERIOD_US`].
    pub cpu_us: u64,
    /// Processes and threads.
    pub pids: u64,
    /// Its share where there is not enough processor time for all, in processors.
    pub weight_cpus: u64,
}

/// What holds, read back from the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Whether swap is capped with it.
    pub swap: bool,
    /// Processor time, in microseconds for each [`PERIOD_US`].
    pub cpu_us: u64,
    /// The share, in the hierarchy's own measure.
    pub weight: u64,
    /// Processes and threads.
    pub pids: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Version {
    V1(Vec<String>),
    V2 { controllers: Vec<String> },
}

/// One hierarchy and the directory in which our leaves are.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    base: PathBuf,
    version: Version,
}

/// The hierarchies of this host that a Sandbox is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchies(Vec<Hierarchy>);

impl Hierarchies {
    /// Looks at what is mounted.
    ///
    /// # Errors
    /// [`Error::Absent`] when cpu, memory or pids cannot be capped; [`Error::Io`].
    pub fn detect() -> Result<Self, Error> {
        let path = Path::new("/proc/self/mountinfo");
        let mounts = fs::read_to_string(path).map_err(at("read", path))?;
        let own = proc::cgroups(std::process::id()).map_err(at("read", Path::new("/proc/self/cgroup")))?;
        let own_v2 = own.iter().find(|(number, _, _)| *number == 0).map(|(_, _, path)| path.as_str());
        Self::from_mounts(&mounts, own_v2)
    }

    /// No hierarchy at all: nothing is capped, and every process is in every leaf.
    #[cfg(feature = "fake")]
    pub fn none() -> Self {
        Hierarchies(Vec::new())
    }

    fn from_mounts(mountinfo: &str, own_v2: Option<&str>) -> Result<Self, Error> {
        let mut found: Vec<Hierarchy> = Vec::new();
        for (kind, mount, options) in mountinfo.lines().filter_map(cgroup_mount) {
            let version = if kind == "cgroup2" {
                let base = delegated(&mount, own_v2).unwrap_or_else(|| mount.clone());
                let controllers = words(&base.join("cgroup.controllers"));
                if !found.iter().any(|one| matches!(one.version, Version::V2 { .. })) {
                    found.push(Hierarchy { base, version: Version::V2 { controllers } });
                }
                continue;
            } else {
                let names = options.split(',').filter(|name| USED_V1.contains(name)).map(str::to_owned);
                Version::V1(names.collect())
            };
            let Version::V1(names) = &version else { continue };
            if !names.is_empty() && !found.iter().any(|one| one.version == version) {
                found.push(Hierarchy { base: mount, version });
            }
        }
        let all = Hierarchies(found);
        let missing: Vec<&str> = NEEDED.into_iter().filter(|name| all.with(name).is_none()).collect();
        if missing.is_empty() { Ok(all) } else { Err(Error::Absent(missing.join(", "))) }
    }

    fn with(&self, controller: &str) -> Option<&Hierarchy> {
        self.0.iter().find(|one| match &one.version {
            Version::V1(names) => names.iter().any(|name| name == controller),
            Version::V2 { controllers } => controllers.iter().any(|name| name == controller),
        })
    }

    fn v2(&self) -> Option<&Hierarchy> {
        self.0.iter().find(|one| matches!(one.version, Version::V2 { .. }))
    }

    /// One line for people: which hierarchies there are.
    pub fn describe(&self) -> String {
        let v1 = self.0.iter().any(|one| matches!(one.version, Version::V1(_)));
        match (v1, self.v2().is_some()) {
            (true, true) => "cgroup v1 and v2 (hybrid)".to_owned(),
            (true, false) => "cgroup v1".to_owned(),
            _ => "cgroup v2".to_owned(),
        }
    }

    /// Whether a host out of memory could still swap a Sandbox out: v1 without swap accounting.
    pub fn swap_is_capped(&self) -> bool {
        self.with("memory").is_some_and(|one| match one.version {
            Version::V1(_) => one.base.join("memory.memsw.limit_in_bytes").exists(),
            Version::V2 { .. } => true,
        })
    }

    /// Readies the place of the leaves: on v2 the controllers must be handed down.
    ///
    /// # Errors
    /// [`Error::Io`]: the kernel does not hand them down (processes sit in the cgroup itself, as in some containers).
    pub fn ready(&self) -> Result<(), Error> {
        let Some(Hierarchy { base, version: Version::V2 { controllers } }) = self.v2() else { return Ok(()) };
        let handed = base.join("cgroup.subtree_control");
        let wanted: Vec<String> = NEEDED
            .iter()
            .chain([&WISHED])
            .filter(|name| {
                controllers.iter().any(|have| have == *name) && !words(&handed).iter().any(|have| have == *name)
            })
            .map(|name| format!("+{name}"))
            .collect();
        if !wanted.is_empty() {
            put(&handed, &wanted.join(" ")).map_err(at("hand controllers down in", &handed))?;
        }
        for (file, text) in RESERVED {
            // There where systemd made it; elsewhere our processes are in nobody's cgroup that we could weigh.
            if let Err(error) = put(&base.join(OWN_LEAF).join(file), text)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(file, %error, "pepod's own processes have nothing reserved");
            }
        }
        Ok(())
    }

    /// Ids of the Sandboxes that have a leaf anywhere, for that tag.
    pub fn tagged(&self, tag: Tag) -> Vec<SandboxId> {
        let mut ids: Vec<SandboxId> = self
            .0
            .iter()
            .flat_map(|one| fs::read_dir(&one.base).into_iter().flatten().flatten())
            .filter_map(|entry| Names::from_cgroup(tag, entry.file_name().to_str()?))
            .collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The leaf of that name. Makes nothing.
    pub fn leaf(&self, name: impl Into<String>) -> Leaf<'_> {
        Leaf { all: self, name: name.into() }
    }
}

/// Kind, mount point and options of a cgroup mount whose root is the hierarchy's (as far as this namespace shows it).
fn cgroup_mount(line: &str) -> Option<(&str, PathBuf, &str)> {
    let (left, right) = line.split_once(" - ")?;
    let mut right = right.split(' ');
    let kind = right.next().filter(|kind| matches!(*kind, "cgroup" | "cgroup2"))?;
    let options = right.nth(1)?;
    let mount = left.split(' ').nth(4)?;
    Some((kind, PathBuf::from(mount.replace("\\040", " ")), options))
}

/// The cgroup above our own, if systemd gave it to us to divide and put us into a leaf of it (`DelegateSubgroup=`, systemd
/// 254). A unit whose processes sit in the delegated cgroup itself cannot be started again while sub-groups with controllers
/// are there, and Sandboxes outlive pepod: such a delegation is of no use here.
fn delegated(mount: &Path, own: Option<&str>) -> Option<PathBuf> {
    let above = own?.trim_start_matches('/').strip_suffix(OWN_LEAF)?.trim_end_matches('/');
    if above.is_empty() {
        return None;
    }
    let path = mount.join(above);
    let mut value = [0; 8];
    let is = |name: &str, value: &mut [u8]| {
        rustix::fs::getxattr(&path, name, &mut *value).is_ok_and(|n| n >= 1 && value[0] == b'1')
    };
    (is("trusted.delegate", &mut value) || is("user.delegate", &mut value)).then_some(path)
}

fn words(path: &Path) -> Vec<String> {
    fs::read_to_string(path).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

fn put(path: &Path, text: &str) -> io::Result<()> {
    File::options().write(true).open(path)?.write_all(text.as_bytes())
}

fn make(path: &Path) -> Result<(), Error> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(at("make", path)(error)),
        _ => Ok(()),
    }
}

/// One Sandbox's cgroup: a directory of the same name in each hierarchy.
#[derive(Debug)]
pub struct Leaf<'a> {
    all: &'a Hierarchies,
    name: String,
}

impl Leaf<'_> {
    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.all.0.iter().map(|one| one.base.join(&self.name))
    }

    fn file(&self, controller: &str, v1: &str, v2: &str) -> Option<PathBuf> {
        let one = self.all.with(controller)?;
        let file = if matches!(one.version, Version::V1(_)) { v1 } else { v2 };
        Some(one.base.join(&self.name).join(file))
    }

    /// Makes it and sets its limits, before any process is in it.
    ///
    /// # Errors
    /// [`Error::Io`]; what was made stays for [`Leaf::remove`].
    pub fn create(&self, limits: &Limits) -> Result<(), Error> {
        for path in self.paths() {
            make(&path)?;
        }
        for one in &self.all.0 {
            let leaf = one.base.join(&self.name);
            let set = |file: &str, text: String| {
                let path = leaf.join(file);
                put(&path, &text).map_err(at("write", &path))
            };
            // What older kernels or a kernel without swap accounting lack.
            let set_if_there =
                |file: &str, text: String| if leaf.join(file).exists() { set(file, text) } else { Ok(()) };
            let memory = limits.memory_bytes.to_string();
            let quota = limits.cpu_us.to_string();
            let (names, v1): (&[String], bool) = match &one.version {
                Version::V1(names) => (names, true),
                Version::V2 { controllers } => (controllers, false),
            };
            for name in names {
                match (name.as_str(), v1) {
                    ("memory", true) => {
                        set("memory.limit_in_bytes", memory.clone())?;
                        set_if_there("memory.memsw.limit_in_bytes", memory.clone())?;
                        set_if_there("memory.swappiness", "0".to_owned())?;
                    }
                    ("memory", false) => {
                        set("memory.max", memory.clone())?;
                        set_if_there("memory.swap.max", "0".to_owned())?;
                        set_if_there("memory.oom.group", "1".to_owned())?;
                    }
                    ("cpu", true) => {
                        set("cpu.cfs_period_us", PERIOD_US.to_string())?;
                        set("cpu.cfs_quota_us", quota.clone())?;
                        set("cpu.shares", (limits.weight_cpus.max(1) * WEIGHT.1).to_string())?;
                    }
                    ("cpu", false) => {
                        set("cpu.max", format!("{quota} {PERIOD_US}"))?;
                        let weight = (limits.weight_cpus.max(1) * WEIGHT.0).min(HEAVIEST);
                        set_if_there("cpu.weight", weight.to_string())?;
                    }
                    ("pids", _) => set("pids.max", limits.pids.to_string())?,
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// What holds now, as the kernel says.
    ///
    /// # Errors
    /// [`Error::Io`] when it is not there, or says something else than a number.
    pub fn held(&self) -> Result<Held, Error> {
        let text = |controller: &str, v1: &str, v2: &str| {
            let path = self.file(controller, v1, v2).ok_or_else(|| Error::Absent(controller.to_owned()))?;
            fs::read_to_string(&path).map_err(at("read", &path))
        };
        let number =
            |text: String| text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(u64::MAX);
        Ok(Held {
            memory_bytes: number(text("memory", "memory.limit_in_bytes", "memory.max")?),
            swap: match self.file("memory", "memory.memsw.limit_in_bytes", "memory.swap.max") {
                Some(path) => fs::read_to_string(path).is_ok_and(|text| text.trim() != "max"),
                None => false,
            },
            cpu_us: number(text("cpu", "cpu.cfs_quota_us", "cpu.max")?),
            weight: number(text("cpu", "cpu.shares", "cpu.weight").unwrap_or_default()),
            pids: number(text("pids", "pids.max", "pids.max")?),
        })
    }

    /// Sets the second layer of the disks' cap for what lies at `path`, and says what the kernel holds of it.
    pub fn limit_io(&self, path: &Path, io: Io) -> IoLayer {
        let disk = match layer::disk(path) {
            Ok(disk) => disk,
            Err(why) => return IoLayer::Absent(why),
        };
        if let Some(one) = self.all.with("io") {
            let file = one.base.join(&self.name).join("io.max");
            let line = layer::line(disk, io);
            let set = put(&file, &line).and_then(|()| fs::read_to_string(&file));
            return match set {
                Ok(text) if text.lines().any(|held| held == line) => IoLayer::Held,
                Ok(text) => IoLayer::Absent(format!("the kernel holds `{}`", text.trim())),
                Err(error) => IoLayer::Absent(format!("{}: {error}", file.display())),
            };
        }
        let Some(one) = self.all.with("blkio") else {
            return IoLayer::Absent("no io controller is mounted".to_owned());
        };
        for (name, line) in layer::lines_v1(disk, io) {
            let file = one.base.join(&self.name).join(name);
            let set = put(&file, &line).and_then(|()| fs::read_to_string(&file));
            match set {
                Ok(text) if text.lines().any(|held| held == line) => {}
                Ok(_) => return IoLayer::Absent(format!("{} does not keep what is written", file.display())),
                Err(error) => return IoLayer::Absent(format!("{}: {error}", file.display())),
            }
        }
        IoLayer::DirectOnly
    }

    /// Where a process of it is born (`CLONE_INTO_CGROUP`): its directory in the unified hierarchy, if there is one.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn birthplace(&self) -> Result<Option<File>, Error> {
        let path = self.all.v2().map(|one| one.base.join(&self.name));
        path.map(|path| File::open(&path).map_err(at("open", &path))).transpose()
    }

    /// Descriptors through which whoever was born in [`Leaf::birthplace`] joins the rest: see [`join`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn doors(&self) -> Result<Vec<File>, Error> {
        let v1 = self.all.0.iter().filter(|one| matches!(one.version, Version::V1(_)));
        v1.map(|one| {
            // By thread: the kernel lets one move itself at once, and waits for a grace period to move a process.
            let tasks = one.base.join(&self.name).join("tasks");
            File::options().write(true).open(&tasks).map_err(at("open", &tasks))
        })
        .collect()
    }

    /// Puts a process into it that was born elsewhere.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn put(&self, pid: u32) -> Result<(), Error> {
        self.paths().try_for_each(|path| {
            let procs = path.join("cgroup.procs");
            put(&procs, &pid.to_string()).map_err(at("write", &procs))
        })
    }

    /// The file that counts the kernel's kills for memory; [`oom_kills`] reads it again and again.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn oom_file(&self) -> Result<File, Error> {
        let path =
            self.file("memory", "memory.oom_control", "memory.events").ok_or_else(|| Error::Absent("memory".into()))?;
        File::open(&path).map_err(at("open", &path))
    }

    /// Whether any part of it is there.
    pub fn exists(&self) -> bool {
        self.paths().any(|path| path.exists())
    }

    /// How many hierarchies it spans.
    pub fn hierarchies(&self) -> usize {
        self.all.0.len()
    }

    /// Whether that process is in it, in every hierarchy.
    pub fn holds(&self, pid: u32) -> bool {
        proc::cgroups(pid).is_ok_and(|lines| is_member(&lines, &self.name, self.all.0.len()))
    }

    /// Ids of the processes in it.
    pub fn processes(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = self
            .paths()
            .flat_map(|path| words(&path.join("cgroup.procs")))
            .filter_map(|pid| pid.parse().ok())
            .filter(|pid| *pid != 0)
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Kills everything in it and waits until it is empty. One that is not there is empty.
    ///
    /// # Errors
    /// [`Error::Populated`] after the deadline.
    pub fn kill(&self, within: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + within;
        loop {
            if self.processes().is_empty() {
                return Ok(());
            }
            // `cgroup.kill` (5.14) leaves no one out, and reaches only those that joined the v2 leaf: the rest by hand.
            let killed =
                self.all.v2().is_some_and(|one| put(&one.base.join(&self.name).join("cgroup.kill"), "1").is_ok());
            if !killed || !self.processes().is_empty() {
                self.kill_frozen();
            }
            while !self.processes().is_empty() {
                if Instant::now() >= deadline {
                    return Err(Error::Populated { name: self.name.clone(), count: self.processes().len() });
                }
                sleep(LOOK);
                if Instant::now() + within / 2 > deadline {
                    break;
                }
            }
        }
    }

    /// Freezes, so that nothing forks past us; signals each; thaws, so that they can die.
    fn kill_frozen(&self) {
        self.freeze(true);
        for pid in self.processes() {
            // Opened first, then checked to be in here: the pid may be another's by now.
            if let Ok(pidfd) = proc::open(pid)
                && proc::cgroups(pid).is_ok_and(|lines| lines.iter().any(|(_, _, path)| last(path) == self.name))
            {
                let _ = proc::kill(pidfd.as_fd());
            }
        }
        self.freeze(false);
    }

    fn freeze(&self, frozen: bool) {
        if let Some(one) = self.all.with("freezer") {
            let _ = put(&one.base.join(&self.name).join("freezer.state"), if frozen { "FROZEN" } else { "THAWED" });
        } else if let Some(one) = self.all.v2() {
            let _ = put(&one.base.join(&self.name).join("cgroup.freeze"), if frozen { "1" } else { "0" });
        }
    }

    /// Removes it everywhere. One that is not there is removed.
    ///
    /// # Errors
    /// [`Error::Io`] when a directory stays busy until the deadline.
    pub fn remove(&self, within: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + within;
        for path in self.paths() {
            loop {
                match fs::remove_dir(&path) {
                    Ok(()) => break,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    // A process that was just reaped is accounted for a moment longer.
                    Err(_) if Instant::now() < deadline => sleep(LOOK),
                    Err(error) => return Err(at("remove", &path)(error)),
                }
            }
        }
        Ok(())
    }

    /// What its processes use.
    ///
    /// # Errors
    /// [`Error::Io`] when it is not there.
    pub fn usage(&self) -> Result<Usage, Error> {
        let number = |controller: &str, v1: &str, v2: &str| {
            let path = self.file(controller, v1, v2).ok_or_else(|| Error::Absent(controller.to_owned()))?;
            let text = fs::read_to_string(&path).map_err(at("read", &path))?;
            Ok::<u64, Error>(text.trim().parse().unwrap_or(u64::MAX))
        };
        let cpu_ns = match self.all.with("cpuacct") {
            Some(_) => number("cpuacct", "cpuacct.usage", "cpuacct.usage")?,
            None => {
                let path = self.file("cpu", "cpu.stat", "cpu.stat").ok_or_else(|| Error::Absent("cpu".to_owned()))?;
                let text = fs::read_to_string(&path).map_err(at("read", &path))?;
                keyed(&text, "usage_usec").unwrap_or(0).saturating_mul(1000)
            }
        };
        Ok(Usage {
            cpu_ns,
            memory_bytes: number("memory", "memory.usage_in_bytes", "memory.current")?,
            memory_limit_bytes: number("memory", "memory.limit_in_bytes", "memory.max")?,
            pids: number("pids", "pids.current", "pids.current")?,
            oom_kills: self.oom_file().ok().and_then(|file| oom_kills(&file).ok()).unwrap_or(0),
            ..Usage::default()
        })
    }
}

/// Brings this process, which has one thread and was born in that leaf's [`Leaf::birthplace`], into its other hierarchies by
/// their [`Leaf::doors`], and looks that it is in all of them.
///
/// # Errors
/// The kernel refuses, or it is not in all of them.
pub fn join(doors: impl Iterator<Item = OwnedFd>, name: &str, hierarchies: usize) -> io::Result<()> {
    for door in doors {
        File::from(door).write_all(b"0")?;
    }
    match is_member(&proc::own_cgroups()?, name, hierarchies) {
        true => Ok(()),
        false => Err(io::Error::other(format!("not in {name}"))),
    }
}

/// Whether these lines of `/proc/<pid>/cgroup` put the process into a leaf of that name in so many hierarchies.
pub fn is_member(lines: &[(u32, String, String)], name: &str, hierarchies: usize) -> bool {
    lines.iter().filter(|(_, _, path)| last(path) == name).count() >= hierarchies
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// How often the kernel killed for memory, by a file of [`Leaf::oom_file`].
///
/// # Errors
/// It cannot be read.
pub fn oom_kills(file: &File) -> io::Result<u64> {
    let mut text = [0; 1024];
    let length = std::os::unix::fs::FileExt::read_at(file, &mut text, 0)?;
    Ok(keyed(&String::from_utf8_lossy(&text[..length]), "oom_kill").unwrap_or(0))
}

fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests;
