//! An instance of Pepo for one test: its own home, the Images that `make test` built, and an end at which the host is as
//! it was.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pepo_api::CreateSession;
use pepo_api::client::Client;

use crate::host::Snapshot;
use crate::program::{Program, Started, until};

/// Where the homes are: on the file system of the built Images, so that those can be linked, and with short paths.
const HOMES: &str = "/var/lib/pepo-e2e";
const MINUTE: Duration = Duration::from_secs(60);

/// A program under test.
pub fn bin(name: &str) -> PathBuf {
    let directory = std::env::var_os("PEPO_E2E_BIN").expect("PEPO_E2E_BIN is not set: run `make test`");
    let path = PathBuf::from(directory).join(name);
    assert!(path.exists(), "{} is not there: run `make test`", path.display());
    path
}

/// The built Images.
pub fn images() -> PathBuf {
    PathBuf::from(std::env::var_os("PEPO_E2E_IMAGES").expect("PEPO_E2E_IMAGES is not set: run `make test`"))
}

/// A Session without a Workspace: it ends with its Sandbox.
pub fn bare() -> CreateSession {
    CreateSession { workspace: Some(None), ..CreateSession::default() }
}

/// How an instance differs from the usual one.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// No Images in it.
    pub without_images: bool,
    /// Its `pepo.toml`.
    pub config: Option<String>,
    /// Its Sandboxes have a network: for tests that make one, without a way out of this machine.
    pub network: bool,
    /// The network namespace that is its machine's.
    pub within: Option<PathBuf>,
}

/// One instance.
pub struct Instance {
    home: PathBuf,
    before: Snapshot,
    ended: bool,
    network: bool,
    within: Option<PathBuf>,
}

impl Instance {
    /// A new one, of which nothing runs yet.
    pub fn new() -> Self {
        Self::with(Options::default())
    }

    /// A new one that differs from the usual.
    pub fn with(options: Options) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests run real microVMs, which takes root: run `make test`"
        );
        let before = Snapshot::take();
        fs::create_dir_all(HOMES).expect("homes");
        let mut random = [0u8; 3];
        std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").expect("urandom"), &mut random).expect("urandom");
        let home = Path::new(HOMES).join(random.map(|byte| format!("{byte:02x}")).concat());
        fs::create_dir(&home).expect("a new home");
        fs::set_permissions(&home, fs::Permissions::from_mode(0o711)).expect("mode");
        // What most tests count is what they made themselves.
        let mut config = options.config.clone().unwrap_or_default();
        if !config.contains("[pool]") {
            config.push_str("\n[pool]\ntarget = 0\n");
        }
        fs::write(home.join("pepo.toml"), config).expect("config");
        if !options.without_images {
            let from = images();
            assert!(from.join("..").exists(), "{} is not there: run `make test`", from.display());
            fs::create_dir(home.join("state")).expect("state");
            like(&from.join(".."), &home.join("state"));
            link_tree(&from, &home.join("state/images"));
        }
        Instance { home, before, ended: false, network: options.network, within: options.within }
    }

    /// Its `PEPO_HOME`.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// `pepo` with these arguments.
    pub fn pepo<A: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Program {
        self.program("pepo").args(args)
    }

    /// `pepo run -- …` of a program and its arguments.
    pub fn pepo_run<A: AsRef<std::ffi::OsStr>>(&self, argv: impl IntoIterator<Item = A>) -> Program {
        self.pepo(["run", "--"]).args(argv)
    }

    /// A program of ours in this instance.
    pub fn program(&self, name: &str) -> Program {
        self.program_at(bin(name))
    }

    /// That program in this instance.
    pub fn program_at(&self, path: PathBuf) -> Program {
        let network = if self.network { "on" } else { "off" };
        let program = match &self.within {
            None => Program::new(path),
            Some(namespace) => Program::new("/usr/bin/nsenter")
                .args([std::ffi::OsString::from(format!("--net={}", namespace.display())), path.into()]),
        };
        self.surrounded(program, network)
    }

    /// With the environment that makes a program this instance's.
    fn surrounded(&self, program: Program, network: &str) -> Program {
        let program = program.env("PEPO_HOME", &self.home).env("PEPO_NETWORK_MODE", network);
        // The whole suite under one VMM or the other: asked for from outside, else the host decides.
        let asked = ["PEPO_VMM", "PEPO_SANDBOX_FIRECRACKER"].map(|name| (name, std::env::var_os(name)));
        asked.into_iter().fold(program, |program, (name, value)| match value {
            Some(value) => program.env(name, value),
            None => program,
        })
    }

    /// Builds an Image: `base` and these packages, under that name. Done on this machine itself, before [`Instance::up`]: what
    /// stands for the instance's may have no way to a mirror.
    pub fn build_image(&self, name: &str, packages: &[&str]) {
        let pepo = || self.surrounded(Program::new(bin("pepo")), "off");
        let packages = packages.iter().flat_map(|package| ["--package", package]);
        pepo().args(["image", "build", "base", "--name", name]).args(packages).within(15 * MINUTE).ok();
        pepo().args(["down"]).ok();
    }

    /// Whether its guests run under Firecracker, by what `pepod` itself says.
    pub fn under_firecracker(&self) -> bool {
        self.program("pepod").args(["version"]).ok().out().contains("firecracker, ")
    }

    /// The command name of its VMMs.
    pub fn vmm(&self) -> &'static str {
        if self.under_firecracker() { "firecracker" } else { "qemu-system-x86" }
    }

    /// A daemon that stays until [`Instance::end`] or its own death: `pepo up`.
    pub fn up(&self) -> Started {
        self.up_with(bin("pepo"))
    }

    /// [`Instance::up`] with that program, and what lies beside it.
    pub fn up_with(&self, pepo: PathBuf) -> Started {
        let up = self.program_at(pepo).args(["up"]).within(Duration::from_secs(600)).open_stdin().start();
        up.says("http://127.0.0.1:", MINUTE);
        up
    }

    /// A client of the operator's socket, which must answer soon.
    pub fn client(&self) -> Client {
        Client::unix(self.socket())
    }

    /// The operator's socket.
    pub fn socket(&self) -> PathBuf {
        self.home.join("run/operator.sock")
    }

    /// The instance's tag, as its lease says; there once a daemon has run.
    pub fn tag(&self) -> Option<String> {
        let text = fs::read_to_string(self.home.join("state/instance.json")).ok()?;
        let at = text.find("\"tag\"")?;
        let tag: String = text[at + 5..].chars().filter(char::is_ascii_alphanumeric).take(4).collect();
        (tag.len() == 4).then_some(tag)
    }

    /// Processes of that name that are this instance's.
    pub fn pids(&self, comm: &str) -> Vec<i32> {
        crate::host::pids_named(comm, &self.home, &self.tag().unwrap_or_default())
    }

    /// The directories of Sandboxes, by the hex digits of their ids.
    pub fn jails(&self) -> Vec<String> {
        let names = fs::read_dir(self.home.join("state/jail")).into_iter().flatten().flatten();
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        // Beside them there are copies that all of them share.
        names.filter(|name| name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit())).collect()
    }

    /// What this instance has on the host now and had not at the beginning.
    pub fn on_host(&self) -> Vec<String> {
        let tags: Vec<String> = self.tag().into_iter().collect();
        Snapshot::take().since(&self.before, &self.home, &tags)
    }

    /// Waits until a Session's end has left nothing of its Sandbox: no process with a Sandbox's uid, no cgroup.
    pub fn sandboxes_gone(&self) {
        until("the Sandboxes' leftovers go away", MINUTE, || {
            (!self.on_host().iter().any(|thing| of_sandbox(thing))).then_some(())
        });
    }

    /// `pepo down`, then the host must be as it was before.
    pub fn end(mut self) {
        self.pepo(["down"]).within(MINUTE).ok();
        self.must_be_clean();
        self.ended = true;
        remove(&self.home);
    }

    /// The host must be as it was before, soon.
    pub fn must_be_clean(&self) {
        let began = std::time::Instant::now();
        loop {
            let left = self.on_host();
            if left.is_empty() {
                break;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "left on the host:\n  {}", left.join("\n  "));
            std::thread::sleep(Duration::from_millis(20));
        }
        let kept = self.jails();
        assert!(kept.is_empty(), "jails are left: {kept:?}");
    }
}

impl Default for Instance {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Instance {
    /// A failed test ends here: say what was going on, stop it, and take it away.
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        for log in ["state/pepod.log", "state/log/pepod.log", "run/pepod.log", "pepod.log"] {
            if let Ok(text) = fs::read_to_string(self.home.join(log)) {
                let lines: Vec<&str> = text.lines().collect();
                eprintln!("--- the end of {log}\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
            }
        }
        let quietly = |name: &str, args: &[&str]| {
            let result = std::process::Command::new(bin(name)).args(args).env("PEPO_HOME", &self.home).output();
            if let Ok(output) = result
                && !output.status.success()
            {
                eprintln!("--- {name} {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
            }
        };
        quietly("pepo", &["down"]);
        quietly("pepo", &["sweep"]);
        for left in self.on_host() {
            eprintln!("--- left: {left}");
        }
        // Only what is surely ours: what else is new may be somebody's.
        for pid in self.pids("") {
            if let Some(pid) = rustix::process::Pid::from_raw(pid)
                && pid != rustix::process::getpid()
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        remove(&self.home);
    }
}

/// A cgroup, or a process that has a uid of Sandboxes.
fn of_sandbox(thing: &str) -> bool {
    let uid = thing.split(" uid ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    thing.starts_with("cgroup ") || uid.is_some_and(|uid| crate::host::SANDBOX_UIDS.contains(&uid))
}

fn remove(home: &Path) {
    // The state may be a mount of its own in tests of full disks: those unmount it themselves.
    if let Err(error) = fs::remove_dir_all(home) {
        eprintln!("--- {} was not removed: {error}", home.display());
    }
    let _ = fs::remove_dir(HOMES);
}

/// Gives a path the owner and mode of another.
fn like(model: &Path, path: &Path) {
    let meta = fs::metadata(model).expect("metadata");
    std::os::unix::fs::chown(path, Some(meta.uid()), Some(meta.gid())).expect("owner");
    fs::set_permissions(path, meta.permissions()).expect("mode");
}

/// The same tree elsewhere: directories and links anew, files as hard links.
fn link_tree(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
    for entry in fs::read_dir(from).unwrap_or_else(|error| panic!("{}: {error}", from.display())) {
        let entry = entry.expect("entry");
        let target = to.join(entry.file_name());
        let kind = entry.file_type().expect("type");
        if kind.is_dir() {
            link_tree(&entry.path(), &target);
        } else if kind.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(entry.path()).expect("link"), &target).expect("link");
        } else if kind.is_file() {
            fs::hard_link(entry.path(), &target).unwrap_or_else(|error| panic!("{}: {error}", target.display()));
        }
    }
    like(from, to);
}
