//! The jail: what one process of a Sandbox may see and do, and the launcher that puts it there.
//!
//! A [`Spec`] says it as data. [`launch`] starts `pepod jail --fd N` with the specification on a memfd; that process
//! calls [`enter`], which builds the walls around itself and becomes the program by exec. The launcher is a process of
//! its own because each wall applies to the calling thread and has to be whole before foreign code runs: never in the
//! forked copy of a program with threads.
//!
//! The order, and why:
//! ```text
//! name, process group, umask, signals, score  needs /proc, which the new root lacks
//! descriptors                                 needs the launcher's own open-file limit
//! mount namespace, root, binds, pivot         needs CAP_SYS_ADMIN
//! limits
//! bounding set, securebits                    needs CAP_SETPCAP
//! groups, gid, uid                            needs CAP_SETGID, CAP_SETUID
//! every capability set emptied
//! no_new_privs, system call filter            from here on nothing but what the filter allows
//! exec                                        once: see `filter`
//! ```
//! Namespaces for pids, network, ipc and host name are the keeper's, entered before it calls [`launch`]; the jail adds
//! the mounts.
//!
//! A VMM that comes with a jailer of its own ([`Entry::Official`]) is started by that: then the program is the jailer, the
//! steps for mounts and user are left to it, and the others are made around it, with the seven capabilities it needs and
//! none that it could hand on ([`crate::rights::lend`]). Caller: the keeper, for the VMM and the stream device. (A builder has to be root of something and reach the
//! network, so it has a room of another kind: `builder`.)

use std::convert::Infallible;
use std::ffi::{CString, NulError};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Component, Path, PathBuf};
use std::process::{Child, Command};

use rustix::fs::{MemfdFlags, Mode, SealFlags, memfd_create};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid};
use serde::{Deserialize, Serialize};

use crate::sys;

pub mod filter;

pub use filter::Filter;

/// Address space of a jailed process, bytes. Far more than a VMM reserves, far less than the 128 TiB an attacker would
/// have to fill before the kernel maps low addresses (see [`filter`]).
pub const ADDRESS_SPACE: u64 = 1 << 40;

/// Lowest uid a jailed process may have: below are the system's and people's (S18).
pub const LOWEST_UID: u32 = 65_536;

/// Longest specification the launcher reads, bytes.
const MAX_SPEC: u64 = 1 << 20;

/// Stack limit, bytes. Smaller than the gap that keeps a growing stack from the exec page (see [`filter`]).
const STACK: u64 = 8 << 20;

/// What one jailed process is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// What the process is called in messages, and its command name until exec ("vmm", "vsock").
    pub name: String,
    /// The program, as seen inside the root.
    pub program: PathBuf,
    /// All arguments, the zeroth included.
    pub argv: Vec<String>,
    /// The whole environment.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    /// User and group id, at least [`LOWEST_UID`]; supplementary groups are none.
    pub uid: u32,
    /// Who makes its root and takes its rights away.
    #[serde(default)]
    pub entry: Entry,
    /// Host directory that becomes `/`: bound once, read-only, nosuid, nodev. Only root may have write access to it. Not used
    /// with [`Entry::Official`].
    pub root: PathBuf,
    /// What else is seen, bound over something that exists in the root.
    #[serde(default)]
    pub binds: Vec<Bind>,
    /// Descriptors the program gets. Everything else is closed; standard ones that are not listed are `/dev/null`.
    pub descriptors: Vec<Descriptor>,
    /// Resource limits.
    pub limits: Limits,
    /// Which system calls are allowed.
    pub filter: Filter,
    /// How readily the kernel kills it when memory ends, 0 to 1000. Can only be raised.
    pub oom_score_adj: i16,
    /// A descriptor of the caller at whose end the launcher becomes the program; it builds the walls meanwhile.
    #[serde(default)]
    pub gate: Option<RawFd>,
}

/// Who makes a program's root and takes its rights away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Entry {
    /// This launcher.
    #[default]
    Ours,
    /// The jailer that the program's authors made for it; it is what this launcher executes. It closes every descriptor
    /// from 3 on, so the program gets paths in its root instead.
    Official,
}

/// A directory or file of the host seen inside the root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bind {
    /// Path on the host. No component of it may be writable by a jailed process.
    pub source: PathBuf,
    /// Absolute path inside the root, which has to exist there and be of the same kind.
    pub target: PathBuf,
    /// Whether the jailed process may write. Never executable, whatever this says.
    pub access: Access,
}

/// What a jailed process may do with a [`Bind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Look only.
    ReadOnly,
    /// Write too, as far as the file's mode allows.
    Writable,
}

/// One descriptor handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Descriptor {
    /// Its number in the process that calls [`launch`].
    pub from: RawFd,
    /// Its number in the program.
    pub to: RawFd,
}

/// Resource limits of a jailed process; core dumps and locked memory are always 0. Where the launcher was itself started
/// with less, that holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Largest file it may write, bytes. Counts for guest memory in a memfd as well.
    pub file_size: u64,
    /// Highest descriptor number plus one.
    pub open_files: u64,
}

/// Why a jail could not be entered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The specification is not one this launcher follows. Nothing has been changed.
    #[error("jail specification for {name:?}: {reason}")]
    Spec {
        /// The process's name, or "?" where even that is unknown.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A wall could not be built. The process is half jailed and has to end.
    #[error("jail {name}: {step}")]
    Wall {
        /// The process's name.
        name: String,
        /// What was being done, on what.
        step: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// There is no system call list for this machine.
    #[error("jail {name}: system call filter")]
    Filter {
        /// The process's name.
        name: String,
        /// What the compiler says.
        #[source]
        source: seccompiler::Error,
    },
}

/// Exit code of a launcher that could not enter its jail.
pub const EXIT_NOT_JAILED: u8 = 125;

/// Starts a jailed process: runs `launcher` (pepod itself) as `jail --fd N` with the specification on descriptor N.
///
/// The child is a child of the caller, in the caller's namespaces and cgroup. Meant for single-threaded callers: the
/// listed descriptors are inheritable for the time of the call, and closed on exec afterwards.
///
/// # Errors
/// [`Error::Spec`] for a specification [`enter`] would refuse; [`Error::Wall`] if the launcher cannot be started. What
/// goes wrong later is printed by the launcher on the program's standard error, and its exit code is
/// [`EXIT_NOT_JAILED`].
pub fn launch(launcher: &Path, spec: &Spec) -> Result<Child, Error> {
    spec.check()?;
    let memfd = sealed(spec).map_err(|source| spec.wall("write the specification", source))?;
    let mut command = Command::new(launcher);
    command.arg("jail").arg("--fd").arg(memfd.as_raw_fd().to_string()).env_clear().current_dir("/");
    // The launcher complains where the program would: one place to look.
    if let Some(standard_error) = spec.descriptors.iter().find(|descriptor| descriptor.to == 2) {
        let copy = sys::duplicate(standard_error.from).map_err(|source| spec.wall("copy standard error", source))?;
        command.stderr(copy);
    }
    let lent: Vec<RawFd> =
        spec.descriptors.iter().map(|fd| fd.from).chain(spec.gate).chain([memfd.as_raw_fd()]).collect();
    let opened = lent.iter().try_for_each(|fd| sys::set_inheritable(*fd, true));
    let child = opened.and_then(|()| command.spawn());
    for fd in lent {
        // A number that is not open was never lent: the first error says so already.
        let _ = sys::set_inheritable(fd, false);
    }
    child.map_err(|source| spec.wall("start the launcher", source))
}

/// The specification as JSON in a sealed memfd, read position at the start.
fn sealed(spec: &Spec) -> io::Result<OwnedFd> {
    let mut file = std::fs::File::from(memfd_create("jail", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.write_all(&serde_json::to_vec(spec)?)?;
    file.rewind()?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file.into())
}

/// Reads a specification, as the launcher does, from what [`launch`] handed over.
///
/// # Errors
/// [`Error::Spec`] if it is too long, not JSON, or not a specification.
pub fn read_spec(from: OwnedFd) -> Result<Spec, Error> {
    let refuse = |reason: String| Error::Spec { name: "?".to_owned(), reason };
    let mut text = Vec::new();
    let mut file = std::fs::File::from(from).take(MAX_SPEC + 1);
    file.read_to_end(&mut text).map_err(|error| refuse(error.to_string()))?;
    if text.len() as u64 > MAX_SPEC {
        return Err(refuse(format!("longer than {MAX_SPEC} bytes")));
    }
    serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))
}

/// Builds the walls of `spec` around this process and becomes its program. Returns only on failure, and the process
/// must then end: some walls may stand already.
///
/// To be called by a process with one thread that holds nothing of value: it loses all its descriptors.
pub fn enter(spec: &Spec) -> Result<Infallible, Error> {
    spec.check()?;
    let argv = spec.strings(spec.argv.iter().cloned())?;
    let env = spec.strings(spec.env.iter().map(|(name, value)| format!("{name}={value}")))?;
    let [program] = &spec.strings([spec.program.display().to_string()])?[..] else {
        return Err(spec.refuse("no program"));
    };
    let filters = filter::compile(spec.filter, std::process::id())
        .map_err(|source| Error::Filter { name: spec.name.clone(), source: source.into() })?;

    spec.detach()?;
    let gate = spec.arrange_descriptors().map_err(|source| spec.wall("arrange descriptors", source))?;
    match spec.entry {
        Entry::Ours => {
            spec.change_root()?;
            spec.set_limits()?;
            spec.drop_rights()?;
        }
        Entry::Official => {
            spec.set_limits()?;
            crate::rights::lend(crate::rights::JAILER)
                .map_err(|source| spec.wall("lend the jailer its capabilities", source))?;
        }
    }
    if let Some(gate) = gate {
        // Nobody writes to it: what comes is its end.
        std::fs::File::from(gate).read(&mut [0]).map_err(|source| spec.wall("wait at the gate", source))?;
    }
    let page = sys::exec_path_page(filter::PATH_ADDRESS, program);
    page.map_err(|source| spec.wall("map the path of the program", source))?;
    for program in &filters {
        seccompiler::apply_filter(program).map_err(|source| Error::Filter { name: spec.name.clone(), source })?;
    }
    let source = sys::exec_at(filter::PATH_ADDRESS, &argv, &env);
    Err(spec.wall(format!("execute {}", spec.program.display()), source))
}

impl Spec {
    /// What can be refused before anything is changed.
    fn check(&self) -> Result<(), Error> {
        if self.uid < LOWEST_UID || self.uid >= u32::MAX - 1 {
            return Err(self.refuse(format!(
                "uid {} is not below {} and at least {LOWEST_UID}",
                self.uid,
                u32::MAX - 1
            )));
        }
        if self.argv.is_empty() {
            return Err(self.refuse("no arguments, not even the zeroth"));
        }
        if !(0..=1000).contains(&self.oom_score_adj) {
            return Err(self.refuse(format!("oom_score_adj {} is not in 0..=1000", self.oom_score_adj)));
        }
        let paths = [&self.program, &self.root].into_iter();
        for path in paths.chain(self.binds.iter().flat_map(|bind| [&bind.source, &bind.target])) {
            let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
            if !path.is_absolute() || !path.components().all(plain) {
                return Err(self.refuse(format!("{} is not a plain absolute path", path.display())));
            }
        }
        if (self.entry == Entry::Official) != (self.filter == Filter::Official)
            || self.entry == Entry::Official && (!self.binds.is_empty() || self.descriptors.iter().any(|fd| fd.to > 2))
        {
            return Err(self.refuse(
                "an official jailer takes neither our binds nor descriptors above 2, and has a filter of its own",
            ));
        }
        if let Some(bind) = self.binds.iter().find(|bind| bind.target == Path::new("/")) {
            return Err(self.refuse(format!("{} would cover the root", bind.source.display())));
        }
        for (index, descriptor) in self.descriptors.iter().enumerate() {
            if descriptor.from < 3 {
                return Err(self.refuse(format!("descriptor {} is the launcher's own", descriptor.from)));
            }
            let taken = self.descriptors.iter().take(index).any(|earlier| earlier.to == descriptor.to);
            if taken || descriptor.to < 0 || descriptor.to as u64 >= self.limits.open_files {
                return Err(self.refuse(format!("descriptor {} is used twice or out of range", descriptor.to)));
            }
        }
        Ok(())
    }

    fn refuse(&self, reason: impl Into<String>) -> Error {
        Error::Spec { name: self.name.clone(), reason: reason.into() }
    }

    fn wall(&self, step: impl Into<String>, source: impl Into<io::Error>) -> Error {
        Error::Wall { name: self.name.clone(), step: step.into(), source: source.into() }
    }

    fn strings(&self, from: impl IntoIterator<Item = String>) -> Result<Vec<CString>, Error> {
        let strings: Result<_, NulError> = from.into_iter().map(CString::new).collect();
        strings.map_err(|error| self.refuse(error.to_string()))
    }

    /// Leaves what the caller gave by being the parent: terminal, umask, signal actions, command name.
    fn detach(&self) -> Result<(), Error> {
        if let Ok(name) = CString::new(self.name.as_str()) {
            rustix::thread::set_name(&name).map_err(|source| self.wall("set the name", source))?;
        }
        match rustix::process::setsid() {
            // The leader of a process group cannot start one; it has none to leave either, or the caller wants it so.
            Ok(_) | Err(rustix::io::Errno::PERM) => {}
            Err(source) => return Err(self.wall("start a process group", source)),
        }
        rustix::process::umask(Mode::from_raw_mode(0o077));
        sys::reset_signals().map_err(|source| self.wall("reset signals", source))?;
        let score = "/proc/self/oom_score_adj";
        std::fs::write(score, self.oom_score_adj.to_string())
            .map_err(|source| self.wall(format!("write {score}"), source))
    }

    /// Puts the listed descriptors at their numbers and closes all others but the gate, which closes on exec.
    fn arrange_descriptors(&self) -> io::Result<Option<OwnedFd>> {
        let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
        // Parked above every number involved first, so that no target is a source still needed.
        let numbers = self.descriptors.iter().flat_map(|descriptor| [descriptor.from, descriptor.to]);
        let floor = numbers.chain(self.gate).chain([null.as_raw_fd()]).max().unwrap_or(2) + 1;
        let gate = self.gate.map(|gate| sys::duplicate_above(gate, floor)).transpose()?;
        let mut parked = Vec::new();
        for standard in 0..=2 {
            if !self.descriptors.iter().any(|descriptor| descriptor.to == standard) {
                parked.push((sys::duplicate_above(null.as_raw_fd(), floor)?, standard));
            }
        }
        for descriptor in &self.descriptors {
            parked.push((sys::duplicate_above(descriptor.from, floor)?, descriptor.to));
        }
        drop(null);
        let mut kept: Vec<RawFd> = gate.into_iter().collect();
        for (from, to) in parked {
            sys::place_descriptor(from, to)?;
            kept.push(to);
        }
        kept.sort_unstable();
        let mut next = 0;
        for fd in kept {
            if fd > next {
                sys::close_range(next, fd - 1)?;
            }
            next = fd + 1;
        }
        sys::close_range(next, RawFd::MAX)?;
        Ok(gate.and_then(sys::inherited))
    }

    /// A mount namespace of its own whose root is `self.root`, with the binds in it and nothing else.
    fn change_root(&self) -> Result<(), Error> {
        let fixed = MountFlags::NOSUID | MountFlags::NODEV;
        sys::unshare(libc::CLONE_NEWNS).map_err(|source| self.wall("leave the mount namespace", source))?;
        rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .map_err(|source| self.wall("make mounts private", source))?;
        self.bind(&self.root, &self.root, fixed | MountFlags::RDONLY)?;
        for bind in &self.binds {
            let target = self.root.join(bind.target.strip_prefix("/").unwrap_or(&bind.target));
            let flags = match bind.access {
                Access::ReadOnly => MountFlags::RDONLY,
                Access::Writable => MountFlags::empty(),
            };
            self.bind(&bind.source, &target, fixed | MountFlags::NOEXEC | flags)?;
        }
        let root = &self.root;
        rustix::process::chdir(root).map_err(|source| self.wall(format!("enter {}", root.display()), source))?;
        rustix::process::pivot_root(".", ".").map_err(|source| self.wall("make it the root", source))?;
        // The old root lies over the new one at the same place: the last `.` is the old one.
        rustix::mount::unmount(".", UnmountFlags::DETACH)
            .map_err(|source| self.wall("let go of the old root", source))?;
        rustix::process::chdir("/").map_err(|source| self.wall("enter the root", source))
    }

    fn bind(&self, source: &Path, target: &Path, flags: MountFlags) -> Result<(), Error> {
        let step = || format!("bind {} on {}", source.display(), target.display());
        rustix::mount::mount_bind(source, target).map_err(|error| self.wall(step(), error))?;
        // A bind takes its flags in a second step; that it was made is not enough.
        rustix::mount::mount_remount(target, flags | MountFlags::BIND, "").map_err(|error| self.wall(step(), error))
    }

    fn set_limits(&self) -> Result<(), Error> {
        for (what, resource, limit) in [
            ("file size", Resource::Fsize, self.limits.file_size),
            ("open files", Resource::Nofile, self.limits.open_files),
            ("core dumps", Resource::Core, 0),
            ("locked memory", Resource::Memlock, 0),
            ("stack", Resource::Stack, STACK),
            ("address space", Resource::As, ADDRESS_SPACE),
            ("message queues", Resource::Msgqueue, 0),
        ] {
            // A lower limit that was handed down stays: nobody here may raise one. Less than the largest file would be a
            // death by signal later, so that is an error now.
            let given = rustix::process::getrlimit(resource).maximum.unwrap_or(u64::MAX);
            let limit = if resource == Resource::Fsize { limit } else { limit.min(given) };
            rustix::process::setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })
                .map_err(|source| self.wall(format!("limit {what} to {limit}"), source))?;
        }
        Ok(())
    }

    /// From root to a uid with nothing, and no way back.
    fn drop_rights(&self) -> Result<(), Error> {
        for capability in 0..64 {
            let capability = CapabilitySet::from_bits_retain(1 << capability);
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                Ok(()) => {}
                // One past the last this kernel has.
                Err(rustix::io::Errno::INVAL) => break,
                Err(source) => return Err(self.wall("empty the bounding set", source)),
            }
        }
        let locked = CapabilitiesSecureBits::NO_ROOT
            | CapabilitiesSecureBits::NO_ROOT_LOCKED
            | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
            | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
        rustix::thread::set_capabilities_secure_bits(locked)
            .map_err(|source| self.wall("lock the secure bits", source))?;
        rustix::thread::clear_ambient_capability_set().map_err(|source| self.wall("empty the ambient set", source))?;
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.uid));
        rustix::thread::set_thread_groups(&[]).map_err(|source| self.wall("leave all groups", source))?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(|source| self.wall("set the group", source))?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(|source| self.wall("set the user", source))?;
        let none = CapabilitySet::empty();
        let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
        rustix::thread::set_capabilities(None, none).map_err(|source| self.wall("drop capabilities", source))?;
        rustix::thread::set_no_new_privs(true).map_err(|source| self.wall("forbid new rights", source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Spec {
        Spec {
            name: "probe".to_owned(),
            program: "/probe".into(),
            argv: vec!["probe".to_owned()],
            env: Vec::new(),
            uid: 0x7000_0000,
            entry: Entry::Ours,
            root: "/srv/closure".into(),
            binds: vec![Bind { source: "/srv/run".into(), target: "/run".into(), access: Access::Writable }],
            descriptors: vec![Descriptor { from: 5, to: 3 }, Descriptor { from: 3, to: 5 }],
            limits: Limits { file_size: 1 << 20, open_files: 64 },
            filter: Filter::Qemu,
            oom_score_adj: 500,
            gate: None,
        }
    }

    #[test]
    fn a_specification_survives_the_way_to_the_launcher() {
        let sent = spec();
        assert!(sent.check().is_ok());
        assert_eq!(read_spec(sealed(&sent).unwrap()).unwrap(), sent);
    }

    #[test]
    fn what_would_weaken_the_jail_is_refused_before_anything_happens() {
        type Change = fn(&mut Spec);
        let refused: [(&str, Change); 12] = [
            ("our binds under an official jailer", |spec| {
                (spec.entry, spec.filter) = (Entry::Official, Filter::Official);
                spec.descriptors.clear();
            }),
            ("descriptors that an official jailer closes", |spec| {
                (spec.entry, spec.filter) = (Entry::Official, Filter::Official);
                spec.binds.clear();
            }),
            ("the wide filter for a jail of ours", |spec| spec.filter = Filter::Official),
            ("root", |spec| spec.uid = 0),
            ("a system user", |spec| spec.uid = 65_535),
            ("keep my uid", |spec| spec.uid = u32::MAX),
            ("a relative root", |spec| spec.root = "closure".into()),
            ("a root that climbs", |spec| spec.root = "/srv/../etc".into()),
            ("a cover over the root", |spec| spec.binds[0].target = "/".into()),
            ("a descriptor number twice", |spec| spec.descriptors[0].to = 5),
            ("a descriptor out of reach", |spec| spec.descriptors[0].to = 64),
            ("protection from the kernel's killer", |spec| spec.oom_score_adj = -1000),
        ];
        for (what, change) in refused {
            let mut spec = spec();
            change(&mut spec);
            assert!(matches!(spec.check(), Err(Error::Spec { .. })), "{what} was accepted");
        }
    }

    #[test]
    fn a_specification_without_end_is_refused() {
        let endless = std::fs::File::open("/dev/zero").unwrap();
        assert!(matches!(read_spec(endless.into()), Err(Error::Spec { .. })));
    }
}
