//! Configuration: what was typed (file, environment, flags) becomes one [`Config`] without an `Option` in it.
//!
//! Every setting is a row of [`SETTINGS`]: its default, its reader, its line of help. A later layer replaces an earlier one
//! whole, and each value remembers where it came from. Read once, by `main`, before anything is bound; nothing else in
//! this program looks at the environment.
//!
//! ```text
//! default  <  pepo.toml  <  PEPO_<SECTION>_<KEY>  <  flags
//! ```

mod network;
mod pool;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::setup;

use crate::capacity::Budget;
use crate::preset::Presets;
use crate::workspace::WorkspaceConfig;

pub use network::{NetworkConfig, NetworkUse};
pub use pool::{PoolConfig, PoolShape};

/// The longest path of `PEPO_HOME` in bytes: a Unix socket's path ends at 107, and ours below it take up to 64.
pub const HOME_BYTES: usize = 40;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is there and cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{path} is not valid TOML: {reason}")]
    Toml {
        /// The file.
        path: PathBuf,
        /// The parser's reason, with the line.
        reason: String,
    },
    /// A key that nobody knows.
    #[error("unknown setting `{key}` in {origin}{}", nearest.as_ref().map(|n| format!("; did you mean `{n}`?")).unwrap_or_default())]
    Unknown {
        /// As written.
        key: String,
        /// Where.
        origin: Origin,
        /// The known one that is most like it.
        nearest: Option<String>,
    },
    /// A value that cannot be.
    #[error("{key} = `{value}` in {origin}: {reason}")]
    Value {
        /// Which setting.
        key: String,
        /// As written.
        value: String,
        /// Where.
        origin: Origin,
        /// What would be right.
        reason: String,
    },
    /// `PEPO_HOME` cannot be an instance's home.
    #[error("PEPO_HOME={path}: {reason}")]
    Home {
        /// As given.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// A file.
    File(PathBuf),
    /// A variable of the environment.
    Environment(String),
    /// The command line.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path) => write!(f, "{}", path.display()),
            Origin::Environment(name) => write!(f, "environment {name}"),
            Origin::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// Where an instance keeps its things.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// `PEPO_HOME`, where the instance has one.
    pub home: Option<PathBuf>,
    /// The configuration file, there or not.
    pub file: PathBuf,
    /// What lasts: store, Images, jails.
    pub state: PathBuf,
    /// Sockets and other things that end with the host's uptime.
    pub run: PathBuf,
}

impl Places {
    /// The places of the instance that `PEPO_HOME` names, or of the system's.
    ///
    /// # Errors
    /// [`Error::Home`] for a path that is relative, too long, or has a part that a socket's path cannot have.
    pub fn of(home: Option<PathBuf>) -> Result<Self, Error> {
        let Some(home) = home else {
            return Ok(Places {
                home: None,
                file: "/etc/pepo/pepo.toml".into(),
                state: "/var/lib/pepo".into(),
                run: "/run/pepo".into(),
            });
        };
        let refuse = |reason: String| Error::Home { path: home.clone(), reason };
        if !home.is_absolute() {
            return Err(refuse("must be an absolute path".into()));
        }
        let bytes = home.as_os_str().len();
        if bytes > HOME_BYTES {
            return Err(refuse(format!("{bytes} bytes long; at most {HOME_BYTES}, because of socket paths below it")));
        }
        if home.to_str().is_none() {
            return Err(refuse("must be UTF-8".into()));
        }
        Ok(Places { file: home.join("pepo.toml"), state: home.join("state"), run: home.join("run"), home: Some(home) })
    }

    /// The operator's socket.
    pub fn operator_socket(&self) -> PathBuf {
        self.run.join("operator.sock")
    }

    /// The edge's socket.
    pub fn edge_socket(&self) -> PathBuf {
        self.run.join("edge.sock")
    }

    /// Where the database and the key of secrets are.
    pub fn store_directory(&self) -> PathBuf {
        self.state.join("store")
    }

    /// The database.
    pub fn store(&self) -> PathBuf {
        self.store_directory().join("pepo.db")
    }
}

/// Which VMM is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmmChoice {
    /// The one this host can run.
    Auto,
    /// QEMU's software emulation.
    Qemu,
    /// Firecracker on hardware virtualization.
    Firecracker,
    /// The guest agent as a host process: tests only.
    #[cfg(feature = "fake")]
    Fake,
}

/// What Sandboxes get and how many there may be.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxConfig {
    /// Which VMM.
    pub vmm: VmmChoice,
    /// The Image of a Session that names none.
    pub image: String,
    /// Processors of a Session that names none.
    pub cpus: u32,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Scratch disk, MiB.
    pub disk_mib: u32,
    /// How long a Sandbox stays after the last activity.
    pub keep_alive: Duration,
    /// The longest activation.
    pub lifetime: Duration,
    /// How many start at once.
    pub boots: usize,
    /// What all of them may have together, and who waits for it.
    pub budget: Budget,
    /// What each disk of a guest may do in a second.
    pub io: pepo_sandbox::Io,
    /// How long a start may take, waiting for its turn included.
    pub start_timeout: Duration,
    /// How long a guest may be silent.
    pub silence: Duration,
    /// How long a guest gets to end its programs and flush when its Sandbox is stopped.
    pub stop_grace: Duration,
}

/// How long records are kept, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Sessions and Commands that have ended, and events.
    pub records: Duration,
    /// The audit log.
    pub audit: Duration,
    /// Events at the most; the oldest go first.
    pub most_events: u64,
    /// Calls in the audit log at the most.
    pub most_calls: u64,
}

/// All settings, resolved.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the instance is.
    pub places: Places,
    /// Sandboxes.
    pub sandbox: SandboxConfig,
    /// Those that wait ready.
    pub pool: PoolConfig,
    /// The directory of Firecracker and its jailer; `None`: what setup installs.
    pub firecracker: Option<PathBuf>,
    /// Where setup gets a release, with `{version}` and `{arch}` in it.
    pub setup_url: String,
    /// What Sandboxes may reach.
    pub network: NetworkConfig,
    /// Where builds get packages; `None` is the tool's own choice.
    pub mirror: Option<String>,
    /// What all Images may take of the disk together, MiB; `None`: no limit.
    pub images_budget_mib: Option<u64>,
    /// Workspaces.
    pub workspace: WorkspaceConfig,
    /// What of the store is kept.
    pub retention: Retention,
    /// Where metrics are asked for; `None` is nowhere.
    pub metrics: Option<SocketAddr>,
    /// Where the edge listens.
    pub listen: SocketAddr,
    /// Below which ports have host names of their own, where the operator gave one.
    pub domain: Option<pepo_api::Domain>,
    /// Who is asked for names; none: this host's own resolvers.
    pub dns: Vec<SocketAddr>,
    /// The operator's presets, by name, as written.
    pub presets: BTreeMap<String, Vec<String>>,
    /// What is logged (`info`, or directives like `pepo_daemon=debug`).
    pub log: String,
    /// The guest agent's file: `PEPO_GUEST`, else the one beside this program.
    pub guest: PathBuf,
    shown: BTreeMap<&'static str, (String, Origin)>,
    typed: Typed,
}

/// A default, found out when it is needed: some are the host's.
type DefaultOf = fn() -> String;

/// One setting.
struct Setting {
    key: &'static str,
    help: &'static str,
    default: DefaultOf,
}

const fn row(key: &'static str, help: &'static str, default: DefaultOf) -> Setting {
    Setting { key, help, default }
}

/// What runs the guests decides on their usual size: an emulated guest gets less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Column {
    /// Software emulation.
    #[default]
    Emulation,
    /// Hardware virtualization.
    Hardware,
}

/// Defaults on hardware virtualization, where they differ.
const HARDWARE: &[(&str, DefaultOf)] = &[
    ("sandbox.cpus", || "2".into()),
    ("sandbox.memory", || "1024m".into()),
    ("sandbox.disk", || "4g".into()),
    ("sandbox.boots", || cores().to_string()),
    ("pool.target", hardware_pool),
    // Commands do not slow a boot down there, nor a boot them: the pool is kept full.
    ("pool.minimum", hardware_pool),
];

fn hardware_pool() -> String {
    (cores() / 4).clamp(1, 4).to_string()
}

impl Setting {
    fn default(&self, column: Column) -> String {
        let hardware = HARDWARE.iter().find(|(key, _)| column == Column::Hardware && *key == self.key);
        hardware.map_or_else(self.default, |(_, default)| default())
    }
}

/// Every setting, in the order of `config default`, with its default under software emulation.
const SETTINGS: &[Setting] = &[
    row("sandbox.vmm", "What runs the guests: auto, firecracker, qemu.", || "auto".into()),
    row(
        "sandbox.firecracker",
        "Directory with `firecracker` and `jailer`; empty: those that `pepo setup` installs.",
        String::new,
    ),
    row("sandbox.image", "Image of a Session that names none.", || "base".into()),
    row("sandbox.cpus", "Processors of a guest.", || "1".into()),
    row("sandbox.memory", "Memory of a guest (bare number: MiB).", || "512m".into()),
    row("sandbox.disk", "Scratch disk of a guest; sparse, costs what is written.", || "2g".into()),
    row("sandbox.keep_alive", "How long a Sandbox stays after the last activity (bare number: seconds).", || {
        "300s".into()
    }),
    row("sandbox.lifetime", "The longest activation.", || "24h".into()),
    row("sandbox.boots", "Sandboxes that start at once.", || (cores() / 2).max(1).to_string()),
    row("sandbox.max", "Sandboxes at once.", || "200".into()),
    row("sandbox.memory_budget", "Memory that all Sandboxes may have together.", || {
        format!("{}m", host_memory_mib() * 4 / 5)
    }),
    row(
        "sandbox.cpu_overcommit",
        "Virtual processors that all Sandboxes may have together, for each of the host's.",
        || "16".into(),
    ),
    row(
        "sandbox.disk_budget",
        "Scratch disks that all Sandboxes may have together; empty: 4 times the disk, since they are sparse.",
        String::new,
    ),
    row("sandbox.queue", "Requests of one App that may wait for room.", || "32".into()),
    row("sandbox.queue_wait", "How long a request waits for room; 0s: not at all.", || "10s".into()),
    row("sandbox.io_bandwidth", "What each disk of a guest may read and write in a second.", || "256m".into()),
    row("sandbox.io_operations", "How often in a second.", || "4000".into()),
    row("sandbox.start_timeout", "How long a start may take, its turn included.", || "180s".into()),
    row("sandbox.silence", "How long a guest may not answer before it counts as dead.", || "60s".into()),
    row("sandbox.stop_grace", "How long a guest gets to end its programs and flush.", || "3s".into()),
    row("pool.target", "Sandboxes of the usual shape that wait ready while the host is quiet; 0: none.", || "1".into()),
    row("pool.minimum", "Below how many of them one is made although commands run.", || "0".into()),
    row("pool.age", "After how long one that nobody claimed is replaced.", || "1h".into()),
    row("pool.shapes", "Other shapes, as `browser:memory=2g:target=2, base:cpus=2`.", String::new),
    row("setup.url", "Where `pepo setup` gets Firecracker's release; {version} and {arch} are filled in.", || {
        setup::URL.into()
    }),
    row(
        "network.mode",
        "Whether Sandboxes have a network interface: auto (where this host can guard one), on, off.",
        || "auto".into(),
    ),
    row("network.default", "What a Session may reach that names nothing: public (all but the floor), none.", || {
        "public".into()
    }),
    row(
        "network.closed",
        "Ranges that no policy opens, beside private and reserved ones; commas between.",
        String::new,
    ),
    row(
        "network.open",
        "What of closed ranges an entry may open after all, as `10.5.0.0/24:5432/tcp, 10.6.0.1`.",
        String::new,
    ),
    row("network.connections", "Connections of a Sandbox at once.", || "1024".into()),
    row("network.flows", "New connections of a Sandbox a second; twice that in a burst.", || "200".into()),
    row("network.packets", "Packets from a Sandbox a second.", || "50000".into()),
    row("network.questions", "Questions for names of a Sandbox a second; four times that in a burst.", || "100".into()),
    row("network.egress", "Bytes a second from a Sandbox (bare number: MiB); empty: no limit.", String::new),
    row("network.ingress", "Bytes a second to a Sandbox (bare number: MiB); empty: no limit.", String::new),
    row(
        "network.dns",
        "Resolvers that are asked for Sandboxes, with commas between; empty: this host's own.",
        String::new,
    ),
    row("workspace.size", "Cap on the bytes of a Workspace that names none; sparse.", || "10g".into()),
    row("workspace.max_files", "Cap on the files of a Workspace that names none.", || "1048576".into()),
    row(
        "workspace.budget",
        "What the caps of all Workspaces may add up to; empty: no limit, since they are sparse.",
        String::new,
    ),
    row(
        "workspace.directories",
        "Directories that a Workspace may be in, as `name=/path, other=/path`: NFS and the like. Caps are not kept there.",
        String::new,
    ),
    row("images.mirror", "Mirror of Debian for builds; empty: where mmdebstrap gets packages by itself.", String::new),
    row("images.budget", "What all Images may take of the disk together; empty: no limit.", String::new),
    row("store.retention", "How long records of what has ended are kept, and events.", || "30d".into()),
    row("store.audit_retention", "How long the audit log is kept.", || "90d".into()),
    row("store.max_events", "Events that are kept at the most; the oldest go first.", || "1000000".into()),
    row("store.max_audit", "Calls that the audit log keeps at the most.", || "5000000".into()),
    row(
        "metrics.listen",
        "Where metrics are asked for: a loopback address, or off. An instance of its own takes a free port.",
        || "127.0.0.1:7071".into(),
    ),
    row("edge.listen", "Where the edge listens.", || "127.0.0.1:7070".into()),
    row("edge.certificate", "Its certificate with the chain, PEM, readable for pepo-edge; empty: no TLS.", String::new),
    row("edge.certificate_key", "The certificate's private key, PEM, readable for pepo-edge.", String::new),
    row("edge.plain_http", "Where it listens without TLS: loopback, anywhere.", || "loopback".into()),
    row("edge.trusted_proxies", "Whose X-Forwarded-For counts: addresses and ranges, commas between.", String::new),
    row(
        "edge.domain",
        "Below it ports of Sessions have host names of their own, as preview.example.com; empty: they have none.",
        String::new,
    ),
    row(
        "edge.origins",
        "Where pages may come from that call it from a browser, as https://app.example.com.",
        String::new,
    ),
    row("edge.requests", "Requests of one key a second, twice that at once; 0: no limit.", || "500".into()),
    row("edge.app_requests", "Requests of one App a second where it has no quota of its own; 0: no limit.", || {
        "1000".into()
    }),
    row("edge.public_requests", "Requests a second of strangers to one published port, twice that at once.", || {
        "400".into()
    }),
    row("edge.failures", "Wrong credentials of one address at once; one a second after that.", || "20".into()),
    row("edge.streams", "Requests of one key that run at once; empty: three quarters of the connections.", String::new),
    row(
        "edge.connections",
        "Connections at once; empty: as many as there are descriptors for, at most 1024.",
        String::new,
    ),
    row("edge.drain", "How long what runs gets when it ends.", || "5s".into()),
    row("log.level", "What is logged: error, warn, info, debug, or directives.", || "info".into()),
];

/// A size, or nothing for no limit.
fn budget(text: &str) -> Result<Option<u64>, String> {
    if text.is_empty() { Ok(None) } else { size_mib(text).map(Some) }
}

/// `name=/path, other=/path`.
fn directories(text: &str) -> Result<BTreeMap<String, PathBuf>, String> {
    let mut all = BTreeMap::new();
    for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let (name, path) = entry.split_once('=').ok_or("expected `name=/path, other=/path`")?;
        let (name, path) = (name.trim(), Path::new(path.trim()));
        let plain = path.components().skip(1).all(|part| matches!(part, std::path::Component::Normal(_)));
        if name.is_empty() || !path.is_absolute() || path.parent().is_none() || !plain {
            return Err(format!("`{entry}` is not a name and a plain absolute path"));
        }
        if all.insert(name.to_owned(), path.to_owned()).is_some() {
            return Err(format!("`{name}` is listed twice"));
        }
    }
    Ok(all)
}

/// Processors this host may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Memory of this host in MiB; what a control group leaves of it is the engine's to say.
fn host_memory_mib() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(1024 * 1024) / 1024
}

/// The size of the disk that this directory is on, or will be, MiB.
fn disk_mib(directory: &Path) -> u64 {
    let there = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    rustix::fs::statvfs(there).map_or(0, |stat| stat.f_blocks.saturating_mul(stat.f_frsize) >> 20)
}

/// What was typed.
#[derive(Clone, Debug, Default)]
pub struct Typed {
    /// The environment, as pairs.
    pub environment: Vec<(String, String)>,
    /// `--set section.key=value`, in order.
    pub flags: Vec<(String, String)>,
    /// Which defaults count: known once it is chosen what runs the guests.
    pub column: Column,
}

impl Typed {
    /// The process's own environment and these flags.
    pub fn from_process(flags: Vec<(String, String)>) -> Self {
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("PEPO_"))
            .collect();
        Typed { environment, flags, column: Column::default() }
    }

    /// The instance that is meant.
    ///
    /// # Errors
    /// [`Error::Home`].
    pub fn places(&self) -> Result<Places, Error> {
        Places::of(self.variable("PEPO_HOME").map(PathBuf::from))
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.environment
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
            .filter(|value| !value.is_empty())
    }
}

impl Config {
    /// Reads every layer.
    ///
    /// # Errors
    /// The first thing that is wrong, with where it was typed.
    pub fn read(typed: &Typed) -> Result<Self, Error> {
        let places = Places::of(typed.variable("PEPO_HOME").map(PathBuf::from))?;
        let mut raw = Raw::default();
        raw.file(&places.file)?;
        raw.environment(typed)?;
        for (key, value) in &typed.flags {
            raw.set(key, value.clone(), Origin::Flag(format!("--set {key}")))?;
        }
        let beside = || std::env::current_exe().unwrap_or_default().with_file_name("pepo-guest");
        raw.resolve(places, typed.variable("PEPO_GUEST").map_or_else(beside, PathBuf::from), typed.clone())
    }

    /// As it is by now: the file may have changed, environment and flags are those of the start.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub fn again(&self) -> Result<Self, Error> {
        Config::read(&self.typed)
    }

    /// Every setting with its value and origin.
    pub fn shown(&self) -> impl Iterator<Item = (&'static str, &str, &Origin)> {
        self.shown.iter().map(|(key, (value, origin))| (*key, value.as_str(), origin))
    }
}

/// The file that `config default` prints: every setting, commented out.
pub fn default_file(column: Column) -> String {
    let mut text = String::from("# Pepo's settings and their defaults on this host. A line without its # counts.\n");
    let mut section = "";
    for setting in SETTINGS {
        let (of, key) = setting.key.split_once('.').unwrap_or(("", setting.key));
        if of != section {
            section = of;
            text.push_str(&format!("\n[{of}]\n"));
        }
        text.push_str(&format!("# {}\n#{key} = {:?}\n", setting.help, setting.default(column)));
    }
    text.push_str(
        "\n[presets]\n# Names for what a network policy opens together; they replace those that come with Pepo.\n",
    );
    text.push_str("#our-git = [\"git.example.com\", \"192.0.2.0/24:22\"]\n");
    text.push_str("\n# Whose tokens the edge takes, and what they give (docs/edge.md).\n#[issuers.corp]\n");
    text.push_str("#issuer = \"https://id.example.com\"\n#audience = \"pepo\"\n#app = \"default\"\n#scopes = \"sessions:*, commands:*\"\n");
    text
}

/// Values as typed, by setting.
#[derive(Default)]
struct Raw(BTreeMap<&'static str, (String, Origin)>, BTreeMap<String, Vec<String>>);

impl Raw {
    fn set(&mut self, key: &str, value: String, origin: Origin) -> Result<(), Error> {
        match SETTINGS.iter().find(|setting| setting.key == key) {
            Some(setting) => {
                self.0.insert(setting.key, (value, origin));
                Ok(())
            }
            None => Err(Error::Unknown { key: shorten(key), nearest: nearest(key), origin }),
        }
    }

    fn file(&mut self, path: &Path) -> Result<(), Error> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(Error::Read { path: path.into(), source }),
        };
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| Error::Toml {
            path: path.into(),
            reason: error.to_string().trim_end().into(),
        })?;
        for (section, value) in table {
            if section == "presets" {
                self.1 = value.try_into().map_err(|error: toml::de::Error| Error::Value {
                    key: "presets".into(),
                    value: shorten(&error.to_string()),
                    origin: Origin::File(path.into()),
                    reason: "expected a list of texts for each name: our-git = [\"git.example.com\"]".into(),
                })?;
                // Said now, with the file; what the machine adds is read where it may be.
                Presets::new(BTreeMap::new(), &self.1).map_err(|error| Error::Value {
                    key: "presets".into(),
                    value: String::new(),
                    origin: Origin::File(path.into()),
                    reason: error.to_string(),
                })?;
                continue;
            }
            // Identity providers: the edge's to read, and to refuse; `pepo-edge --check` says what is wrong there.
            if section == "issuers" && value.is_table() {
                continue;
            }
            let toml::Value::Table(keys) = value else {
                return Err(Error::Unknown {
                    nearest: nearest(&section),
                    key: section,
                    origin: Origin::File(path.into()),
                });
            };
            for (key, value) in keys {
                let value = match value {
                    toml::Value::String(text) => text,
                    toml::Value::Integer(number) => number.to_string(),
                    toml::Value::Boolean(flag) => flag.to_string(),
                    other => {
                        return Err(Error::Value {
                            key: format!("{section}.{key}"),
                            value: shorten(&other.to_string()),
                            origin: Origin::File(path.into()),
                            reason: "expected a text or a number".into(),
                        });
                    }
                };
                self.set(&format!("{section}.{key}"), value, Origin::File(path.into()))?;
            }
        }
        Ok(())
    }

    /// Variables of known sections must be known settings; other `PEPO_` variables belong to somebody else.
    fn environment(&mut self, typed: &Typed) -> Result<(), Error> {
        if let Some(vmm) = typed.variable("PEPO_VMM") {
            self.set("sandbox.vmm", vmm.into(), Origin::Environment("PEPO_VMM".into()))?;
        }
        for (name, value) in &typed.environment {
            let Some(rest) = name.strip_prefix("PEPO_") else { continue };
            let Some((section, key)) = rest.split_once('_') else { continue };
            let section = section.to_ascii_lowercase();
            if SETTINGS.iter().any(|setting| setting.key.split('.').next() == Some(&section)) {
                self.set(
                    &format!("{section}.{}", key.to_ascii_lowercase()),
                    value.clone(),
                    Origin::Environment(name.clone()),
                )?;
            }
        }
        Ok(())
    }

    fn resolve(mut self, places: Places, guest: PathBuf, typed: Typed) -> Result<Config, Error> {
        let column = typed.column;
        for setting in SETTINGS {
            self.0.entry(setting.key).or_insert_with(|| (setting.default(column), Origin::Default));
        }
        let sandbox = SandboxConfig {
            vmm: self.get("sandbox.vmm", vmm)?,
            image: self.get("sandbox.image", |text| {
                if text.is_empty() { Err("must not be empty".into()) } else { Ok(text.into()) }
            })?,
            cpus: self.get("sandbox.cpus", |text| number(text, 1, 64))?,
            memory_mib: self.get("sandbox.memory", |text| size_mib(text).and_then(|mib| fits(mib, 128)))?,
            disk_mib: self.get("sandbox.disk", |text| size_mib(text).and_then(|mib| fits(mib, 16)))?,
            keep_alive: self.get("sandbox.keep_alive", duration)?,
            lifetime: self.get("sandbox.lifetime", |text| duration(text).and_then(positive))?,
            boots: self.get("sandbox.boots", |text| number(text, 1, 1024))?,
            budget: Budget {
                places: self.get("sandbox.max", |text| number(text, 1, 16_384))?,
                memory_mib: self.get("sandbox.memory_budget", size_mib)?,
                cpus: self.get("sandbox.cpu_overcommit", |text| number(text, 1, 1024))? * cores() as u64,
                disk_mib: self.get("sandbox.disk_budget", |text| match text {
                    "" => Ok(disk_mib(&places.state) * 4),
                    text => size_mib(text),
                })?,
                waiting: self.get("sandbox.queue", |text| number(text, 0, 1024))?,
                wait: self.get("sandbox.queue_wait", duration)?,
            },
            io: pepo_sandbox::Io {
                bytes: self.get("sandbox.io_bandwidth", |text| size_mib(text).map(|mib| mib.max(1) << 20))?,
                operations: self.get("sandbox.io_operations", |text| number(text, 10, 10_000_000))?,
            },
            start_timeout: self.get("sandbox.start_timeout", |text| duration(text).and_then(positive))?,
            silence: self.get("sandbox.silence", |text| duration(text).and_then(positive))?,
            stop_grace: self.get("sandbox.stop_grace", duration)?,
        };
        let target = self.get("pool.target", pool::count)?;
        let minimum = self.get("pool.minimum", pool::count)?;
        let pool = PoolConfig {
            shapes: self.get("pool.shapes", |text| pool::shapes(text, &sandbox, target, minimum))?,
            age: self.get("pool.age", |text| duration(text).and_then(positive))?,
        };
        let limits = pepo_sandbox::net::Limits {
            connections: self.get("network.connections", |text| number(text, 16, 1_000_000))?,
            flows_per_second: self.get("network.flows", |text| number(text, 1, 100_000))?,
            packets_per_second: self.get("network.packets", |text| number(text, 100, 10_000_000))?,
            questions_per_second: self.get("network.questions", |text| number(text, 1, 10_000))?,
            egress_bytes_per_second: self.get("network.egress", network::rate)?,
            ingress_bytes_per_second: self.get("network.ingress", network::rate)?,
        };
        let network = NetworkConfig {
            uses: self.get("network.mode", network::uses)?,
            default: self.get("network.default", network::mode)?,
            settings: network::settings(
                self.get("network.closed", network::closed)?,
                self.get("network.open", network::open)?,
                limits,
            ),
        };
        Ok(Config {
            sandbox,
            pool,
            firecracker: self.get("sandbox.firecracker", |text| match text {
                "" => Ok(None),
                _ if Path::new(text).is_absolute() => Ok(Some(text.into())),
                _ => Err("expected the absolute path of a directory".into()),
            })?,
            setup_url: self.get("setup.url", url)?,
            network,
            mirror: self.get("images.mirror", mirror)?,
            images_budget_mib: self.get("images.budget", budget)?,
            workspace: WorkspaceConfig {
                size_mib: self.get("workspace.size", size_mib)?,
                max_files: self.get("workspace.max_files", |text| number(text, 1024, 1_000_000_000))?,
                budget_mib: self.get("workspace.budget", budget)?,
                directories: self.get("workspace.directories", directories)?,
            },
            retention: Retention {
                records: self.get("store.retention", |text| duration(text).and_then(positive))?,
                audit: self.get("store.audit_retention", |text| duration(text).and_then(positive))?,
                most_events: self.get("store.max_events", |text| number(text, 1000, 1_000_000_000))?,
                most_calls: self.get("store.max_audit", |text| number(text, 1000, 1_000_000_000))?,
            },
            metrics: {
                let typed = self.0.get("metrics.listen").is_some_and(|(_, origin)| *origin != Origin::Default);
                let listen = self.get("metrics.listen", metrics_address)?;
                // Two instances cannot have one port: one that has a home of its own takes any.
                listen.map(|address| match (&places.home, typed) {
                    (Some(_), false) => SocketAddr::new(address.ip(), 0),
                    _ => address,
                })
            },
            listen: self.get("edge.listen", |text| {
                text.parse().map_err(|_| "expected an address and a port, as 127.0.0.1:7070".into())
            })?,
            domain: self.get("edge.domain", |text| match text {
                "" => Ok(None),
                text => text.parse().map(Some).map_err(|error: pepo_api::DomainError| error.to_string()),
            })?,
            dns: self.get("network.dns", |text| {
                let servers = text.split(',').map(str::trim).filter(|text| !text.is_empty());
                servers.map(pepo_sandbox::net::dns::servers::server).collect()
            })?,
            presets: std::mem::take(&mut self.1),
            log: self.get("log.level", |text| Ok::<String, String>(text.into()))?,
            places,
            guest,
            shown: self.0,
            typed,
        })
    }

    fn get<T>(&self, key: &'static str, read: impl Fn(&str) -> Result<T, String>) -> Result<T, Error> {
        let (value, origin) = self.0.get(key).ok_or_else(|| Error::Unknown {
            key: key.into(),
            origin: Origin::Default,
            nearest: None,
        })?;
        read(value).map_err(|reason| Error::Value {
            key: key.into(),
            value: shorten(value),
            origin: origin.clone(),
            reason,
        })
    }
}

fn metrics_address(text: &str) -> Result<Option<SocketAddr>, String> {
    if text == "off" {
        return Ok(None);
    }
    match text.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => Ok(Some(address)),
        _ => Err("expected a loopback address and a port, as 127.0.0.1:7071, or off".into()),
    }
}

fn nearest(key: &str) -> Option<String> {
    SETTINGS
        .iter()
        .map(|setting| (strsim::jaro_winkler(key, setting.key), setting.key))
        .filter(|(alike, _)| *alike > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, key)| key.into())
}

fn shorten(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}

fn mirror(text: &str) -> Result<Option<String>, String> {
    let known = ["http://", "https://"].iter().any(|scheme| text.starts_with(scheme));
    match text {
        "" => Ok(None),
        _ if known && text.chars().all(|c| c.is_ascii_graphic()) => Ok(Some(text.trim_end_matches('/').to_owned())),
        _ => Err("expected the address of a mirror of Debian, http:// or https://".into()),
    }
}

fn url(text: &str) -> Result<String, String> {
    let rest = ["http://", "https://", "file:///"].iter().find_map(|scheme| text.strip_prefix(scheme));
    match rest {
        Some(rest) if !rest.is_empty() && text.chars().all(|c| c.is_ascii_graphic()) => Ok(text.to_owned()),
        _ => Err("expected the address of a release, https://…, http://… or file:///…".into()),
    }
}

fn vmm(text: &str) -> Result<VmmChoice, String> {
    match text {
        "auto" => Ok(VmmChoice::Auto),
        "qemu" => Ok(VmmChoice::Qemu),
        #[cfg(feature = "fake")]
        "fake" => Ok(VmmChoice::Fake),
        "firecracker" => Ok(VmmChoice::Firecracker),
        _ => Err("expected auto, firecracker or qemu".into()),
    }
}

fn number<T: std::str::FromStr + PartialOrd + fmt::Display>(text: &str, least: T, most: T) -> Result<T, String> {
    match text.trim().parse::<T>() {
        Ok(value) if value >= least && value <= most => Ok(value),
        _ => Err(format!("expected a number from {least} to {most}")),
    }
}

fn fits(mib: u64, least: u32) -> Result<u32, String> {
    u32::try_from(mib).ok().filter(|mib| *mib >= least).ok_or_else(|| format!("must be at least {least} MiB"))
}

fn positive(duration: Duration) -> Result<Duration, String> {
    if duration.is_zero() { Err("must not be zero".into()) } else { Ok(duration) }
}

/// A size in MiB: a bare number, or one with `k`, `m`, `g`, `t` (powers of 1024, any case, `ib` or `b` may follow).
///
/// # Errors
/// What was expected.
pub fn size_mib(text: &str) -> Result<u64, String> {
    let wrong = || "expected a size, as 512m or 2G (a bare number is MiB)".to_owned();
    let text = text.trim().to_ascii_lowercase();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let (up, down) = match &text[digits..] {
        "" | "m" | "mb" | "mib" => (1, 1),
        "k" | "kb" | "kib" => (1, 1024),
        "g" | "gb" | "gib" => (1024, 1),
        "t" | "tb" | "tib" => (1024 * 1024, 1),
        _ => return Err(wrong()),
    };
    if !number.is_multiple_of(down) {
        return Err("must be whole MiB".into());
    }
    (number / down).checked_mul(up).ok_or_else(wrong)
}

/// A duration: a bare number is seconds, or one with `s`, `m`, `h`, `d`.
///
/// # Errors
/// What was expected.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "expected a duration, as 90s, 5m, 1h or 30d (a bare number is seconds)".to_owned();
    let text = text.trim().to_ascii_lowercase();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let seconds = match &text[digits..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(wrong()),
    };
    // A century is for ever, and leaves room for sums of times.
    number.checked_mul(seconds).filter(|s| *s <= 100 * 365 * 86_400).map(Duration::from_secs).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn typed(environment: &[(&str, &str)], flags: &[(&str, &str)]) -> Typed {
        let own = |pairs: &[(&str, &str)]| pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        Typed { environment: own(environment), flags: own(flags), ..Typed::default() }
    }

    #[test]
    fn later_layers_win_and_say_so() {
        let home = tempfile::tempdir_in("/tmp").expect("directory");
        std::fs::write(home.path().join("pepo.toml"), "[sandbox]\nmemory = \"1g\"\ncpus = 2\nkeep_alive = 90\n")
            .expect("file");
        let path = home.path().to_str().expect("utf-8");
        let config = Config::read(&typed(
            &[("PEPO_HOME", path), ("PEPO_SANDBOX_CPUS", "3"), ("PEPO_VMM", "qemu")],
            &[("sandbox.keep_alive", "2m")],
        ))
        .expect("config");
        assert_eq!(config.sandbox.memory_mib, 1024);
        assert_eq!(config.sandbox.cpus, 3);
        assert_eq!(config.sandbox.keep_alive, Duration::from_secs(120));
        assert_eq!(config.sandbox.vmm, VmmChoice::Qemu);
        assert_eq!(config.places.state, home.path().join("state"));
        let origin = |key: &str| config.shown().find(|(k, ..)| *k == key).map(|(_, _, origin)| origin.clone());
        assert!(matches!(origin("sandbox.memory"), Some(Origin::File(_))));
        assert_eq!(origin("sandbox.cpus"), Some(Origin::Environment("PEPO_SANDBOX_CPUS".into())));
        assert!(matches!(origin("sandbox.keep_alive"), Some(Origin::Flag(_))));
        assert_eq!(origin("sandbox.disk"), Some(Origin::Default));
    }

    #[test]
    fn presets_and_resolvers_are_read_and_told_wrong() {
        let home = tempfile::tempdir().expect("directory");
        let path = home.path().to_str().expect("utf-8");
        let read = |text: &str| {
            std::fs::write(home.path().join("pepo.toml"), text).expect("write");
            Config::read(&typed(&[("PEPO_HOME", path)], &[])).map_err(|error| error.to_string())
        };
        let config = read("[network]\ndns = \"192.0.2.1, 192.0.2.2:5353\"\n[presets]\nours = [\"git.example.com\"]\n");
        let config = config.expect("valid");
        assert_eq!(config.dns, ["192.0.2.1:53", "192.0.2.2:5353"].map(|text| text.parse().expect("address")));
        assert_eq!(config.presets["ours"], ["git.example.com"]);
        let wrong = read("[presets]\nours = \"git.example.com\"\n").expect_err("refused");
        assert!(wrong.contains("expected a list of texts"), "{wrong}");
        let wrong = read("[presets]\nours = [\"*.com\"]\n").expect_err("refused");
        assert!(wrong.contains("preset \"ours\"") && wrong.contains("top level"), "{wrong}");
        let wrong = read("[network]\ndns = \"dns.example.com\"\n").expect_err("refused");
        assert!(wrong.contains("network.dns"), "{wrong}");
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let home = tempfile::tempdir_in("/tmp").expect("directory");
        let path = home.path().to_str().expect("utf-8");
        std::fs::write(home.path().join("pepo.toml"), "[sandbox]\nmemroy = 1\n").expect("file");
        let error = Config::read(&typed(&[("PEPO_HOME", path)], &[])).expect_err("refused").to_string();
        assert!(error.contains("sandbox.memroy") && error.contains("did you mean `sandbox.memory`"), "{error}");
        std::fs::remove_file(home.path().join("pepo.toml")).expect("remove");
        let error = Config::read(&typed(&[("PEPO_HOME", path), ("PEPO_SANDBOX_CPU", "1")], &[]))
            .expect_err("refused")
            .to_string();
        assert!(error.contains("PEPO_SANDBOX_CPU") && error.contains("sandbox.cpus"), "{error}");
        assert!(Config::read(&typed(&[("PEPO_HOME", path), ("PEPO_URL", "x"), ("PEPO_API_KEY", "y")], &[])).is_ok());
    }

    #[test]
    fn a_bad_value_names_its_place() {
        let error = Config::read(&typed(&[("PEPO_SANDBOX_MEMORY", "lots")], &[])).expect_err("refused").to_string();
        assert!(
            error.contains("sandbox.memory") && error.contains("PEPO_SANDBOX_MEMORY") && error.contains("512m"),
            "{error}"
        );
        let error = Config::read(&typed(&[("PEPO_VMM", "xen")], &[])).expect_err("refused").to_string();
        assert!(error.contains("PEPO_VMM") && error.contains("firecracker or qemu"), "{error}");
        for wrong in ["ftp://x/{version}", "https://", "x"] {
            let error = Config::read(&typed(&[("PEPO_SETUP_URL", wrong)], &[])).expect_err("refused").to_string();
            assert!(error.contains("setup.url") && error.contains("https://"), "{error}");
        }
        assert!(Config::read(&typed(&[("PEPO_SANDBOX_FIRECRACKER", "bin")], &[])).is_err(), "a relative directory");
    }

    #[test]
    fn a_home_has_its_bounds() {
        assert!(Places::of(Some("relative".into())).is_err());
        assert!(Places::of(Some(format!("/{}", "a".repeat(40)).into())).is_err());
        assert!(Places::of(Some(format!("/{}", "a".repeat(39)).into())).is_ok());
    }

    #[test]
    fn defaults_are_valid_and_the_default_file_is_toml() {
        let config = Config::read(&typed(&[], &[])).expect("defaults");
        assert_eq!((config.sandbox.cpus, config.sandbox.memory_mib, config.sandbox.disk_mib), (1, 512, 2048));
        let live: String = default_file(Column::Emulation)
            .lines()
            .map(|line| format!("{}\n", line.strip_prefix('#').filter(|l| !l.starts_with(' ')).unwrap_or(line)))
            .collect();
        let table: toml::Table = live.parse().expect("toml");
        assert!(table.contains_key("sandbox") && table.contains_key("edge"));
    }

    #[test]
    fn guests_are_larger_where_hardware_runs_them() {
        let hardware = Typed { column: Column::Hardware, ..typed(&[], &[]) };
        let sandbox = Config::read(&hardware).expect("defaults").sandbox;
        assert_eq!((sandbox.cpus, sandbox.memory_mib, sandbox.disk_mib, sandbox.boots), (2, 1024, 4096, cores()));
        let set = Typed { column: Column::Hardware, ..typed(&[("PEPO_SANDBOX_CPUS", "1")], &[]) };
        assert_eq!(Config::read(&set).expect("set").sandbox.cpus, 1, "what is set stays");
        assert!(default_file(Column::Hardware).contains("#memory = \"1024m\""));
        for (key, _) in HARDWARE {
            assert!(SETTINGS.iter().any(|setting| setting.key == *key), "{key}");
        }
    }

    #[test]
    fn sizes_and_durations() {
        for (text, mib) in [("512", 512), ("512m", 512), ("2G", 2048), ("1gib", 1024), ("2048k", 2), ("1T", 1_048_576)]
        {
            assert_eq!(size_mib(text), Ok(mib), "{text}");
        }
        for text in ["", "m", "1.5g", "-1", "12q", "1k", "99999999999999999999", "99999999999999t"] {
            assert!(size_mib(text).is_err(), "{text}");
        }
        for (text, seconds) in [("0", 0), ("90", 90), ("90s", 90), ("5m", 300), ("1h", 3600), ("30d", 2_592_000)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "s", "1w", "99999999999999999d", "1.5s"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,24}") {
            let _ = size_mib(&text);
            let _ = duration(&text);
        }
    }
}
