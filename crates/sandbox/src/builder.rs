//! A builder: package tools and the scripts of packages, run as nobody on this host, in a room of their own.
//!
//! They need to be root somewhere: the root of a user namespace mapped onto the instance's leased block of 65,536 uids,
//! with mount, pid, ipc, host name and cgroup namespaces of its own, no_new_privs, and a root directory that shows the
//! host's programs and configuration read-only and nothing else of it. The network is the host's, since packages come
//! from there. What it may fill is capped: memory and processes by its cgroup, files by the size of its room.
//!
//! ```text
//! pepo-host (a thread)                 outer: the host's root                 inner: root of the namespace
//!   start ── spawn ─────────────────▶  waits
//!   puts it into the cgroup
//!         ── the Order ─────────────▶  builds the root, enters namespaces
//!         ◀─ "ready" ────────────────
//!   writes uid_map and gid_map
//!         ── "mapped" ──────────────▶  becomes root in there, spawns ──────▶  pivots, gives up the way back
//!         ◀─ "inside" ────────────────────────────────────────────────────── builds, tells its events
//!   end:  kills the cgroup, takes the files over, removes the room
//! ```
//! The control socket is the lifeline too: when pepo-host is gone, the outer process sees its end and kills the inner one,
//! which is pid 1 of its namespace, so all of it goes. There is one builder at a time in an instance: its cgroup and
//! its directory below the jails have fixed names, and [`Builder::sweep`] needs no record to find them.

use std::fs::{self, File, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use serde::{Deserialize, Serialize};

use crate::cgroup::{self, Hierarchies, Limits, PERIOD_US};
use crate::id::{Names, Tag, UidBlock};
use crate::plan::StatePath;

mod enter;

pub use enter::{Inside, enter};

/// The builder's directory below the jails, and the end of its cgroup's name.
const NAME: &str = "build";

/// In that directory: what becomes its root, the files it makes, and its room where that is on disk.
const ROOT: &str = "root";
const OUT: &str = "out";
const ROOM: &str = "room";

/// For each step of entering: a loaded machine of two cores was seen to need 50 ms for all of them.
const STEP: Duration = Duration::from_secs(20);

/// For the kernel to end everything in the cgroup.
const KILL: Duration = Duration::from_secs(20);

/// The longest line on the control socket, bytes.
const LINE: u64 = 8 * 1024;

/// Bounds of [`BuildPlan::room_bytes`] and [`BuildPlan::memory_bytes`].
const ROOM_BYTES: std::ops::RangeInclusive<u64> = (64 << 20)..=(1 << 40);

/// Why there is no builder, or nothing from it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One runs already.
    #[error("a builder runs already in this instance")]
    Busy,
    /// The plan is not one that is followed.
    #[error("build plan: {0}")]
    Plan(String),
    /// Its cgroup is not as needed.
    #[error("the builder's cgroup")]
    Cgroup(#[from] cgroup::Error),
    /// It could not enter its namespaces.
    #[error("the builder did not start: {0}")]
    Start(String),
    /// The host refuses a step.
    #[error("{step}")]
    Step {
        /// What was tried, on what.
        step: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A file that it should have made is not there or not a plain file of its own.
    #[error("the builder's file {name}: {reason}")]
    File {
        /// Which.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
}

fn at(step: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let step = step.into();
    move |source| Error::Step { step, source }
}

/// Where the builder unpacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Room {
    /// In memory: fast, and gone with the builder whatever happens.
    Memory,
    /// In a directory below the jails, for machines with little memory.
    Disk,
}

/// What pepod asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuildPlan {
    /// What to build: a file of pepod's, seen by the builder as [`Inside::input`] and not understood here.
    pub input: StatePath,
    /// The directory that the finished files arrive in. It must not exist; the directory above it must.
    pub output: StatePath,
    /// The files to take over; whatever else the builder leaves is thrown away.
    pub files: Vec<String>,
    /// Where it unpacks.
    pub room: Room,
    /// How much it may unpack, bytes.
    pub room_bytes: u64,
    /// Memory of all its processes, bytes, a [`Room::Memory`] included.
    pub memory_bytes: u64,
    /// Processors it may use.
    pub cpus: u32,
    /// What it is told of the environment: proxies.
    pub env: Vec<(String, String)>,
}

impl BuildPlan {
    /// Checks every bound.
    ///
    /// # Errors
    /// [`Error::Plan`] with the first that does not hold.
    pub fn check(&self) -> Result<(), Error> {
        let wrong = |what: String| Err(Error::Plan(what));
        for (field, value) in [("room_bytes", self.room_bytes), ("memory_bytes", self.memory_bytes)] {
            if !ROOM_BYTES.contains(&value) {
                return wrong(format!("{field} is {value}, outside {}..={}", ROOM_BYTES.start(), ROOM_BYTES.end()));
            }
        }
        if self.cpus == 0 || self.files.is_empty() || self.files.len() > 16 || self.env.len() > 16 {
            return wrong("cpus, files or env out of bounds".to_owned());
        }
        let plain = |name: &String| {
            !name.is_empty() && name.len() <= 64 && !name.starts_with('.') && !name.contains(['/', '\0', '\n'])
        };
        if let Some(name) = self.files.iter().find(|name| !plain(name)) {
            return wrong(format!("{name:?} is not a file name"));
        }
        let bad = |text: &String| text.len() > 4096 || text.contains('\0');
        if self.env.iter().any(|(name, value)| name.is_empty() || name.contains('=') || bad(name) || bad(value)) {
            return wrong("an environment variable is not one".to_owned());
        }
        Ok(())
    }
}

/// What a builder needs to know of its instance.
#[derive(Clone, Debug)]
pub struct Place {
    /// Where the jails are: root's.
    pub jails: PathBuf,
    /// The state directory, below which the plan's paths are.
    pub state: PathBuf,
    /// Whose cgroup it is.
    pub tag: Tag,
    /// Whose uids they are.
    pub block: UidBlock,
    /// The uid that owns the input and will own the files, which get the group of the directory they arrive in.
    pub owner: u32,
    /// pepod itself, which is executed again as `pepod build`.
    pub launcher: PathBuf,
}

impl Place {
    fn directory(&self) -> PathBuf {
        self.jails.join(NAME)
    }

    fn cgroup(&self) -> String {
        cgroup_of(self.tag)
    }
}

fn cgroup_of(tag: Tag) -> String {
    format!("{}{NAME}", Names::cgroup_prefix(tag))
}

/// What a builder of the instance with those jails and that tag holds on the host: kind and name of each thing.
pub fn left_by(jails: &Path, tag: Tag) -> Vec<(&'static str, String)> {
    let mut left = Vec::new();
    if Hierarchies::detect().is_ok_and(|all| all.leaf(cgroup_of(tag)).exists()) {
        left.push(("cgroup", cgroup_of(tag)));
    }
    let directory = jails.join(NAME);
    if fs::symlink_metadata(&directory).is_ok() {
        left.push(("directory", directory.display().to_string()));
    }
    left
}

/// Ends and removes it. What is not there is done.
///
/// # Errors
/// What cannot be removed.
pub fn sweep_left(jails: &Path, tag: Tag) -> Result<(), Error> {
    let hierarchies = Hierarchies::detect()?;
    let leaf = hierarchies.leaf(cgroup_of(tag));
    leaf.kill(KILL)?;
    leaf.remove(KILL)?;
    let directory = jails.join(NAME);
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(at(format!("remove {}", directory.display()))(error))
        }
        _ => Ok(()),
    }
}

/// What the outer process is told: paths are the host's, and root made them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    /// An empty directory, to become the root.
    root: PathBuf,
    /// Where the files are made.
    out: PathBuf,
    /// Where to unpack; a file system in memory where absent.
    room: Option<PathBuf>,
    /// Size of the room where it is in memory, and the largest file anywhere, bytes.
    room_bytes: u64,
    /// First uid of the mapping.
    first_uid: u32,
    /// The input's text.
    input: String,
}

/// A running builder. Dropped, it is killed and removed.
#[derive(Debug)]
pub struct Builder {
    place: Place,
    plan: BuildPlan,
    child: Child,
    events: Option<OwnedFd>,
    /// Closed when we end, however we end: then the builder ends.
    _lifeline: UnixStream,
    ended: bool,
}

impl Builder {
    /// Starts one.
    ///
    /// # Errors
    /// Any [`Error`]; nothing is left then.
    pub fn start(place: Place, plan: BuildPlan) -> Result<Builder, Error> {
        plan.check()?;
        let hierarchies = Hierarchies::detect()?;
        let leaf = hierarchies.leaf(place.cgroup());
        if !leaf.processes().is_empty() {
            return Err(Error::Busy);
        }
        // What an earlier one left, if anything.
        Self::sweep(&place)?;
        let started = Self::start_clean(&place, &plan, &hierarchies);
        if started.is_err() {
            // The first error is the one to tell; what cannot be removed now is found by the next start.
            let _ = Self::sweep(&place);
        }
        let (child, lifeline, events) = started?;
        Ok(Builder { place, plan, child, events: Some(events), _lifeline: lifeline, ended: false })
    }

    fn start_clean(
        place: &Place,
        plan: &BuildPlan,
        hierarchies: &Hierarchies,
    ) -> Result<(Child, UnixStream, OwnedFd), Error> {
        let leaf = hierarchies.leaf(place.cgroup());
        let input = read_input(place, &plan.input)?;
        let first_uid = place.block.builder();
        let directory = place.directory();
        // Closed: set-user-id programs are unpacked below it, and nobody else on the host may run those.
        make_directory(&directory, 0o700, None)?;
        make_directory(&directory.join(ROOT), 0o755, None)?;
        make_directory(&directory.join(OUT), 0o700, Some(first_uid))?;
        let room = match plan.room {
            Room::Memory => None,
            Room::Disk => {
                let room = directory.join(ROOM);
                make_directory(&room, 0o755, Some(first_uid))?;
                Some(room)
            }
        };
        leaf.create(&Limits {
            memory_bytes: plan.memory_bytes,
            cpu_us: u64::from(plan.cpus) * PERIOD_US,
            pids: 4096,
            weight_cpus: 1,
        })?;
        let (ours, theirs) = UnixStream::pair().map_err(at("make the control socket"))?;
        let (events, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|error| at("make the pipe of events")(error.into()))?;
        let mut child = Command::new(&place.launcher)
            .arg0("pepo-build")
            .args(["build", "outer"])
            .env_clear()
            .envs(plan.env.iter().map(|(name, value)| (name, value)))
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LANG", "C.UTF-8")
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(writer))
            .spawn()
            .map_err(at(format!("start {}", place.launcher.display())))?;
        let entered = (|| {
            leaf.put(child.id())?;
            let out = directory.join(OUT);
            let root = directory.join(ROOT);
            let order = Order { root, out, room, room_bytes: plan.room_bytes, first_uid, input };
            ours.set_read_timeout(Some(STEP)).map_err(at("set a deadline"))?;
            ours.set_write_timeout(Some(STEP)).map_err(at("set a deadline"))?;
            let text = serde_json::to_string(&order).map_err(|error| at("write the order")(error.into()))?;
            say(&ours, &text)?;
            let mut answers = BufReader::new(&ours);
            expect(&mut answers, "ready")?;
            for (file, what) in [("uid_map", "map uids"), ("gid_map", "map gids")] {
                let map = format!("0 {first_uid} {}\n", UidBlock::BUILDER);
                fs::write(format!("/proc/{}/{file}", child.id()), map).map_err(at(what))?;
            }
            say(&ours, "mapped")?;
            expect(&mut answers, "inside")
        })();
        if let Err(error) = entered {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
        Ok((child, ours, events))
    }

    /// What the builder writes on its standard output, once.
    pub fn take_events(&mut self) -> Option<OwnedFd> {
        self.events.take()
    }

    /// A descriptor that becomes readable when it has ended.
    ///
    /// # Errors
    /// The kernel has none to give.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        crate::proc::open(self.child.id())
    }

    /// Ends it at once. Legal at any time.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
    }

    /// Waits for its end, kills what it started, and, if it ended well, hands its files over: they are the owner's then,
    /// readable by all and changed by nobody, in the plan's output directory.
    ///
    /// # Errors
    /// Any [`Error`]; nothing is left then except as [`Error::Cgroup`] says.
    pub fn end(mut self) -> Result<ExitStatus, Error> {
        let status = self.child.wait().map_err(at("wait for the builder"))?;
        self.ended = true;
        self.kill_all()?;
        let taken = if status.success() { self.take_over() } else { Ok(()) };
        Self::sweep(&self.place)?;
        taken.map(|()| status)
    }

    fn kill_all(&self) -> Result<(), Error> {
        let hierarchies = Hierarchies::detect()?;
        Ok(hierarchies.leaf(self.place.cgroup()).kill(KILL)?)
    }

    /// Nothing of the builder runs any more: what is looked at here stays as it is.
    fn take_over(&self) -> Result<(), Error> {
        let out = self.place.directory().join(OUT);
        let builder = self.place.block.builder();
        let (above, name_there) = split(self.plan.output.as_str());
        let above = open_beneath(&self.place.state, above, OFlags::DIRECTORY | OFlags::RDONLY)
            .map_err(at(format!("open the directory above {}", self.plan.output)))?;
        let above = File::from(above);
        // The owner's group is that of its own directory.
        let seen = above.metadata().map_err(at(format!("look at the directory above {}", self.plan.output)))?;
        if seen.uid() != self.place.owner {
            return Err(Error::Plan(format!("the directory above {} is not the owner's", self.plan.output)));
        }
        let owner = (self.place.owner, seen.gid());
        let there = fs::read_dir(&out).map_err(at("list the builder's files"))?;
        for entry in there {
            let entry = entry.map_err(at("list the builder's files"))?;
            if self.plan.files.iter().any(|name| entry.file_name() == name.as_str()) {
                continue;
            }
            let path = entry.path();
            let gone = if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            };
            gone.map_err(at(format!("remove {}", path.display())))?;
        }
        for name in &self.plan.files {
            let wrong = |reason: String| Error::File { name: name.clone(), reason };
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = rustix::fs::open(out.join(name), flags, Mode::empty())
                .map_err(|error| wrong(io::Error::from(error).to_string()))?;
            let file = File::from(file);
            let seen = file.metadata().map_err(|error| wrong(error.to_string()))?;
            if !seen.is_file() || seen.nlink() != 1 || seen.uid() != builder {
                return Err(wrong("it is not a plain file of the builder's own".to_owned()));
            }
            give(&file, owner, 0o444).map_err(|error| wrong(error.to_string()))?;
        }
        let directory = File::open(&out).map_err(at("open the builder's directory"))?;
        give(&directory, owner, 0o755).map_err(at("give the builder's directory away"))?;
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        rustix::fs::renameat_with(rustix::fs::CWD, &out, &above, name_there, flags)
            .map_err(|error| at(format!("move the files to {}", self.plan.output))(error.into()))
    }

    /// Ends and removes whatever a builder of that instance left. What is not there is done.
    ///
    /// # Errors
    /// What cannot be removed.
    pub fn sweep(place: &Place) -> Result<(), Error> {
        sweep_left(&place.jails, place.tag)
    }
}

impl Drop for Builder {
    fn drop(&mut self) {
        if !self.ended {
            self.kill();
            let _ = self.child.wait();
            let _ = Self::sweep(&self.place);
        }
    }
}

/// Directory and name of a plain relative path.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or((".", path))
}

fn open_beneath(state: &Path, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
    let state = File::open(state)?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(state.as_fd(), path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)?)
}

/// The input's text: of a plain file of the owner's, below the state directory.
fn read_input(place: &Place, path: &StatePath) -> Result<String, Error> {
    let step = || format!("read {path}");
    let file = open_beneath(&place.state, path.as_str(), OFlags::RDONLY | OFlags::NONBLOCK).map_err(at(step()))?;
    let file = File::from(file);
    let seen = file.metadata().map_err(at(step()))?;
    if !seen.is_file() || seen.uid() != place.owner {
        return Err(Error::Plan(format!("{path} is not a plain file of the owner's")));
    }
    if seen.len() > enter::INPUT {
        return Err(Error::Plan(format!("{path} is longer than {} bytes", enter::INPUT)));
    }
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(file, enter::INPUT), &mut text).map_err(at(step()))?;
    Ok(text)
}

fn make_directory(path: &Path, mode: u32, owner: Option<u32>) -> Result<(), Error> {
    let step = || format!("make {}", path.display());
    fs::create_dir(path).map_err(at(step()))?;
    let directory = File::open(path).map_err(at(step()))?;
    let owner = owner.unwrap_or(0);
    give(&directory, (owner, owner), mode).map_err(at(step()))
}

/// The owner first: changing it clears bits of the mode.
fn give(file: &File, (user, group): (u32, u32), mode: u32) -> io::Result<()> {
    std::os::unix::fs::fchown(file, Some(user), Some(group))?;
    file.set_permissions(Permissions::from_mode(mode))
}

fn say(socket: &UnixStream, line: &str) -> Result<(), Error> {
    let mut socket = socket;
    socket.write_all(line.as_bytes()).and_then(|()| socket.write_all(b"\n")).map_err(at("speak to the builder"))
}

fn expect(answers: &mut impl BufRead, wanted: &str) -> Result<(), Error> {
    let mut line = String::new();
    let got = io::Read::take(&mut *answers, LINE).read_line(&mut line);
    match (got, line.trim_end()) {
        (Ok(_), line) if line == wanted => Ok(()),
        (Ok(0), _) => Err(Error::Start(format!("it ended before it was {wanted}"))),
        (Ok(_), line) => Err(Error::Start(line.escape_default().to_string())),
        (Err(error), _) => Err(Error::Start(format!("not {wanted}: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> BuildPlan {
        BuildPlan {
            input: StatePath::new("x/input.json").expect("path"),
            output: StatePath::new("x/out").expect("path"),
            files: vec!["a.bin".to_owned()],
            room: Room::Memory,
            room_bytes: 1 << 30,
            memory_bytes: 2 << 30,
            cpus: 1,
            env: vec![("https_proxy".to_owned(), "x".to_owned())],
        }
    }

    #[test]
    fn a_plan_is_checked() {
        plan().check().expect("good");
        let bad = [
            BuildPlan { files: vec!["../a".to_owned()], ..plan() },
            BuildPlan { files: vec![".a".to_owned()], ..plan() },
            BuildPlan { files: Vec::new(), ..plan() },
            BuildPlan { room_bytes: 1, ..plan() },
            BuildPlan { memory_bytes: u64::MAX, ..plan() },
            BuildPlan { cpus: 0, ..plan() },
            BuildPlan { env: vec![("A=B".to_owned(), String::new())], ..plan() },
            BuildPlan { env: vec![("A".to_owned(), "\0".to_owned())], ..plan() },
        ];
        for plan in bad {
            assert!(plan.check().is_err(), "{plan:?} was taken");
        }
    }

    #[test]
    fn the_input_is_the_owners_own_file() {
        let state = tempfile::tempdir().expect("state");
        let owner = rustix::process::getuid().as_raw();
        let place = Place {
            jails: state.path().join("jail"),
            state: state.path().to_owned(),
            tag: "abcd".parse().expect("tag"),
            block: UidBlock { index: 0, first: 0x7000_0000 },
            owner,
            launcher: PathBuf::from("/proc/self/exe"),
        };
        let path = |text: &str| StatePath::new(text).expect("path");
        fs::write(state.path().join("good"), "{}").expect("write");
        assert_eq!(read_input(&place, &path("good")).expect("read"), "{}");
        std::os::unix::fs::symlink("good", state.path().join("link")).expect("link");
        assert!(read_input(&place, &path("link")).is_err(), "a link was followed");
        assert!(read_input(&place, &path("none")).is_err());
        fs::create_dir(state.path().join("directory")).expect("make");
        assert!(read_input(&place, &path("directory")).is_err());
        let other = Place { owner: owner + 1, ..place };
        assert!(read_input(&other, &path("good")).is_err(), "another's file was taken");
    }

    #[test]
    fn answers_are_told_apart() {
        let answer = |text: &str| expect(&mut text.as_bytes(), "ready");
        answer("ready\n").expect("ready");
        assert!(matches!(answer(""), Err(Error::Start(text)) if text.contains("ended")));
        assert!(matches!(answer("mount \u{1b}[31m\n"), Err(Error::Start(text)) if !text.contains('\u{1b}')));
    }
}
