//! The processes of a command, as one thing that can be killed, signalled and counted.
//!
//! In a guest this is a control group that the command's first process is born in, so that nothing leaves it (sessions,
//! double forks). Groups of ended commands are used again, since making one costs as much as starting a small program.
//! As a host process (tests) nothing on the machine may change: there the tree is found through `/proc`, by descent and
//! by a variable in the environment. Called by `exec` and `shell`.

use std::cell::{Cell, RefCell};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use pepo_proto::Limits;
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::pread;

use crate::sys;

/// The name of the variable by which a host process finds its own children again.
pub const MARK: &str = "PEPO_GUEST_COMMAND";

/// Groups kept for use again.
const KEPT: usize = 8;

/// The directory of the commands' groups in a guest.
pub const COMMANDS: &str = "/sys/fs/cgroup/pepo";

/// Where trees come from.
pub struct Trees {
    directory: Option<PathBuf>,
    free: RefCell<Vec<Group>>,
    made: Cell<u64>,
}

struct Group {
    directory: Arc<OwnedFd>,
    path: PathBuf,
    events: OwnedFd,
    memory_events: Option<OwnedFd>,
    /// Memory kills before this use.
    kills_before: u64,
}

enum Kind {
    Group(Group),
    /// Found by the first process and the mark.
    Scan {
        mark: String,
        first: Cell<i32>,
    },
}

/// The processes of one command.
pub struct Tree {
    kind: Option<Kind>,
    trees: Rc<Trees>,
    limited: Cell<bool>,
}

/// Who goes when a command's own memory is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goes {
    /// All of it: a program that lost one of its own is none any more.
    All,
    /// Whom the kernel chooses: its first process is a shell that is to stay.
    One,
}

/// The period of a processor limit in microseconds, as [`Limits`] says.
const PERIOD_US: u64 = 100_000;

impl Trees {
    /// Trees as groups under `directory`, or without groups.
    pub fn new(directory: Option<&Path>) -> Rc<Self> {
        Rc::new(Trees { directory: directory.map(Path::to_owned), free: RefCell::default(), made: Cell::new(0) })
    }

    /// A tree without processes.
    pub fn plant(self: &Rc<Self>) -> io::Result<Tree> {
        let kind = match &self.directory {
            None => {
                let number = self.made.replace(self.made.get() + 1);
                Kind::Scan { mark: format!("{}.{number}", std::process::id()), first: Cell::new(0) }
            }
            Some(directory) => Kind::Group(match self.free.borrow_mut().pop() {
                Some(group) => group,
                None => self.make(directory)?,
            }),
        };
        Ok(Tree { kind: Some(kind), trees: self.clone(), limited: Cell::new(false) })
    }

    /// Makes a group for the next command, where none is kept.
    pub fn keep_one(&self) {
        if let Some(directory) = &self.directory
            && self.free.borrow().is_empty()
            // The command that needs it is told why not.
            && let Ok(group) = self.make(directory)
        {
            self.free.borrow_mut().push(group);
        }
    }

    fn make(&self, directory: &Path) -> io::Result<Group> {
        let number = self.made.replace(self.made.get() + 1);
        let path = directory.join(format!("c{number}"));
        fs::create_dir(&path)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let directory = Arc::new(rustix::fs::open(&path, flags | OFlags::DIRECTORY, Mode::empty())?);
        let events = openat(directory.as_fd(), "cgroup.events", flags, Mode::empty())?;
        let memory_events = openat(directory.as_fd(), "memory.events", flags, Mode::empty()).ok();
        Ok(Group { directory, path, events, memory_events, kills_before: 0 })
    }
}

/// The number behind `key` in a file of `key number` lines.
fn number(file: BorrowedFd<'_>, key: &str) -> Option<u64> {
    let mut bytes = [0; 512];
    let read = pread(file, &mut bytes, 0).ok()?;
    let text = str::from_utf8(&bytes[..read]).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
    line.trim().parse().ok()
}

impl Group {
    fn kills(&self) -> u64 {
        self.memory_events.as_ref().and_then(|file| number(file.as_fd(), "oom_kill")).unwrap_or(0)
    }

    fn populated(&self) -> bool {
        number(self.events.as_fd(), "populated") != Some(0)
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        let file = openat(self.directory.as_fd(), file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(&file, text.as_bytes())?;
        Ok(())
    }

    fn pids(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect()
    }
}

impl Tree {
    fn kind(&self) -> Option<&Kind> {
        self.kind.as_ref()
    }

    /// The group that the first process is to be born in.
    pub fn birthplace(&self) -> Option<Arc<OwnedFd>> {
        match self.kind() {
            Some(Kind::Group(group)) => Some(group.directory.clone()),
            _ => None,
        }
    }

    /// Limits what all of it may have, before anything is in it.
    ///
    /// # Errors
    /// A sentence that names the limit that cannot be kept.
    pub fn limit(&self, limits: &Limits, goes: Goes) -> Result<(), String> {
        let Some(Kind::Group(group)) = self.kind() else {
            return Err("limits of a command need control groups, and there are none here".to_owned());
        };
        self.limited.set(true);
        let wanted = [
            ("memory", "memory.max", limits.memory_bytes.map(|bytes| bytes.to_string())),
            ("pids", "pids.max", limits.pids.map(|pids| pids.to_string())),
            ("cpu", "cpu.max", limits.cpu_us.map(|cpu_us| format!("{cpu_us} {PERIOD_US}"))),
        ];
        for (name, file, text) in wanted {
            if let Some(text) = text {
                group.write(file, &text).map_err(|error| format!("the limit of {name} cannot be kept: {error}"))?;
            }
        }
        if limits.memory_bytes.is_some() && goes == Goes::All {
            // Kernels before 4.19 choose one.
            let _ = group.write("memory.oom.group", "1");
        }
        Ok(())
    }

    /// What to add to the first process's environment.
    pub fn mark(&self) -> Option<&str> {
        match self.kind() {
            Some(Kind::Scan { mark, .. }) => Some(mark),
            _ => None,
        }
    }

    /// Tells the pid of the first process; 0 once it has been waited for.
    pub fn rooted(&self, pid: i32) {
        if let Some(Kind::Scan { first, .. }) = self.kind() {
            first.set(pid);
        }
    }

    /// Moves a process in (its later children are born here).
    pub fn adopt(&self, pid: i32) -> io::Result<()> {
        match self.kind() {
            Some(Kind::Group(group)) => group.write("cgroup.procs", &pid.to_string()),
            _ => Ok(()),
        }
    }

    /// Whether any process is left.
    pub fn is_populated(&self) -> bool {
        match self.kind() {
            Some(Kind::Group(group)) => group.populated(),
            Some(Kind::Scan { .. }) => !self.pids().is_empty(),
            None => false,
        }
    }

    /// Kills every process.
    pub fn kill(&self) {
        if let Some(Kind::Group(group)) = self.kind()
            && group.write("cgroup.kill", "1").is_ok()
        {
            return;
        }
        // What forks while it is looked at is found by the next look.
        for _ in 0..100 {
            let pids = self.pids();
            if pids.is_empty() {
                return;
            }
            for pid in pids {
                // One that has gone meanwhile is what was wanted.
                let _ = sys::kill(pid, 9);
            }
            std::thread::yield_now();
        }
    }

    /// Sends a signal to every process except `spared`: to the oldest first, a shell mostly, which would go on to its next
    /// line once what it waits for is gone; then to the youngest, of a pipeline the reader, which would end by itself once
    /// its writer is gone.
    pub fn signal(&self, signal: i32, spared: Option<i32>) {
        let mut pids = self.pids();
        pids.sort_unstable_by(|a, b| b.cmp(a));
        let oldest = pids.pop();
        for pid in oldest.into_iter().chain(pids) {
            if Some(pid) != spared {
                // As above.
                let _ = sys::kill(pid, signal);
            }
        }
    }

    /// How many processes the kernel killed for memory.
    pub fn memory_kills(&self) -> u64 {
        match self.kind() {
            Some(Kind::Group(group)) => group.kills().saturating_sub(group.kills_before),
            _ => 0,
        }
    }

    /// Every process there is now, zombies not counted.
    pub fn pids(&self) -> Vec<i32> {
        match self.kind() {
            Some(Kind::Group(group)) => group.pids(),
            Some(Kind::Scan { mark, first }) => scan(mark, first.get()),
            None => vec![],
        }
    }
}

impl Drop for Tree {
    /// An empty group is kept for the next command; one with processes left stays for as long as they do.
    fn drop(&mut self) {
        let Some(Kind::Group(mut group)) = self.kind.take() else {
            return;
        };
        if group.populated() {
            return;
        }
        let mut free = self.trees.free.borrow_mut();
        // One that was limited would limit the next.
        if free.len() < KEPT && !self.limited.get() {
            group.kills_before = group.kills();
            free.push(group);
        } else {
            // Not removable means that something lives in it again: it stays.
            let _ = fs::remove_dir(&group.path);
        }
    }
}

/// Processes that descend from `first` or carry the mark; only such that this process started, directly or not.
fn scan(mark: &str, first: i32) -> Vec<i32> {
    let marked = format!("{MARK}={mark}");
    let mut processes = vec![];
    let Ok(directory) = fs::read_dir("/proc") else {
        return vec![];
    };
    for entry in directory.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
        let (state, parent) = (fields.next(), fields.next().and_then(|field| field.parse::<i32>().ok()));
        if let (Some(state), Some(parent)) = (state, parent) {
            processes.push((pid, parent, state == "Z"));
        }
    }
    let mut found: Vec<i32> = processes
        .iter()
        .filter(|(pid, _, zombie)| {
            !zombie
                && (*pid == first
                    || fs::read(format!("/proc/{pid}/environ"))
                        .is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|text| text == marked.as_bytes())))
        })
        .map(|(pid, ..)| *pid)
        .collect();
    let mut index = 0;
    while index < found.len() {
        let parent = found[index];
        let more: Vec<i32> =
            processes.iter().filter(|p| p.1 == parent && !p.2 && !found.contains(&p.0)).map(|p| p.0).collect();
        found.extend(more);
        index += 1;
    }
    found.retain(|pid| *pid != std::process::id() as i32);
    found
}
