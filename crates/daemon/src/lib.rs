//! pepod: Sessions on Sandboxes, behind two Unix sockets.
//!
//! ```text
//! main ─► config, places, users, sockets ─► split ─┬─► pepo-host: the engine's privileged side
//!                                                  └─► pepod: no rights, then Pepod::run
//! Pepod::run:  store ─► Sessions of before ─► serve ─► ready ─► adopt, sweep, pool ─► until stopped
//! ```
//! How it stops: SIGTERM leaves every Sandbox to the next pepod, as a restart or an upgrade wants it; SIGINT and
//! `pepo down` end them all first, a second SIGINT does not wait for that. Either side's death ends the other.

#![forbid(unsafe_code)]

pub mod accounts;
pub mod apps;
pub mod backup;
pub mod capacity;
pub mod config;
pub mod doctor;
pub mod drain;
pub mod egress;
pub mod image;
pub mod metrics;
pub mod modes;
pub mod network;
pub mod places;
pub mod pool;
pub mod preset;
pub mod pressure;
pub mod secrets;
pub mod serve;
pub mod server;
pub mod session;
pub mod setup;
pub mod signal;
pub mod store;
pub mod text;
pub mod usage;
pub mod workspace;

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use pepo_api::{AppId, Check, Leftover, Ready, Reason, Scope, Version};
use pepo_sandbox::sweep::Act;
use pepo_sandbox::{Host, Tag, Vmm, proto};
use sha2::{Digest as _, Sha256};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal as on_signal};
use tokio::sync::watch;

use apps::Apps;
use config::{Config, PoolConfig};
use image::Images;
use image::left::Builds;
use network::Reach;
use secrets::Vault;
use server::{Listener, Streams, Turns};
use session::{Error, Files, FindImage, Sessions};
use store::{Actor, KeySpec, NewKey, Store, Write};
use workspace::Workspaces;

/// How long the end of all Sandboxes may take.
const DRAIN: Duration = Duration::from_secs(75);

/// Of pepod that left its Sandboxes to the next one: 128 + SIGTERM.
const LEFT: u8 = 143;

/// How pepod is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// Sandboxes stay for the next one.
    Leave,
    /// Sandboxes end first.
    Drain,
    /// At once.
    Now,
}

/// What `main` made before it gave its rights up.
#[derive(Debug)]
pub struct Begun {
    /// All settings.
    pub config: Config,
    /// What it says about the network; none where Sandboxes have none.
    pub network: Option<network::Network>,
    /// The instance's tag.
    pub tag: Tag,
    /// The operator's socket, bound.
    pub operator: UnixListener,
    /// The edge's socket, bound.
    pub edge: UnixListener,
    /// Who may connect to it.
    pub edge_uid: Option<u32>,
    /// What serves its connections: what is looked at there needs no thread beside the one that read the request.
    pub edge_runtime: Handle,
    /// pepod's end of the wall.
    pub host: OwnedFd,
    /// What root saw.
    pub seen: Vec<Check>,
    /// What runs the guests.
    pub vmm: Vmm,
    /// One line: what runs the guests, and why that.
    pub runs_on: String,
    /// Where to say that it is ready.
    pub ready: Option<OwnedFd>,
    /// Where metrics are asked for, bound; `None` is nowhere.
    pub metrics: Option<TcpListener>,
    /// When to end by itself.
    pub exit_when_idle: Option<Duration>,
}

/// The daemon's parts. Cloning is cheap.
#[derive(Clone)]
pub struct Pepod(Arc<Parts>);

struct Parts {
    config: Config,
    sessions: Sessions,
    images: Arc<Images>,
    store: Store,
    apps: Arc<Apps>,
    streams: Streams,
    turns: Turns,
    token_key: zeroize::Zeroizing<[u8; 32]>,
    edge_has: watch::Sender<EdgeHas>,
    backing: Arc<tokio::sync::Mutex<()>>,
    tag: Tag,
    seen: Vec<Check>,
    runs_on: String,
    guest_digest: String,
    stop: watch::Sender<Option<Stop>>,
    drained: watch::Sender<bool>,
    busy: watch::Sender<usize>,
    runtime: Handle,
}

/// What the edge said when it asked last.
#[derive(Clone, Copy, Debug, Default)]
pub struct EdgeHas {
    /// The generation of its copy.
    pub generation: u64,
    /// When it asked; none: not in this life.
    pub asked: Option<std::time::Instant>,
}

/// Work that is no Session and keeps pepod from ending for idleness.
#[derive(Debug)]
pub struct Busy(watch::Sender<usize>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.send_modify(|busy| *busy -= 1);
    }
}

impl Pepod {
    /// Serves until stopped. Returns the exit code.
    ///
    /// # Errors
    /// The store, the Images or the privileged side cannot be used.
    pub async fn run(begun: Begun) -> anyhow::Result<u8> {
        let Begun {
            config,
            network,
            tag,
            operator,
            edge,
            edge_uid,
            edge_runtime,
            host,
            seen,
            vmm,
            runs_on,
            ready,
            metrics,
            exit_when_idle,
        } = begun;
        let host = Host::new(host).context("cannot speak to the privileged side")?;
        let store = Store::open(&config.places.store()).context("cannot open the store")?;
        network::floor::audit(&store, &config).await.context("cannot take down what the floor is")?;
        let apps = Arc::new(Apps::open(store.clone()).context("cannot read the Apps")?);
        let vault = Vault::open(&config.places.store_directory(), store.has_secrets()?)
            .context("cannot open what secrets are sealed with")?;
        let token_key = vault.token_key();
        let agent = guest_agent(&config)?;
        let images = Arc::new(
            Images::open(&config.places.state, &agent, config.images_budget_mib).context("cannot open the Images")?,
        );
        // One that a run started ends soon, and its Sandboxes should be those that were asked for.
        let pool = if exit_when_idle.is_some() { PoolConfig::off() } else { config.pool.clone() };
        let workspaces =
            Workspaces::new(store.clone(), host.clone(), config.workspace.clone(), config.places.store_directory());
        let (find, settings) = (finder(&images, vmm), config.sandbox.clone());
        let reach = Reach::new(network, Arc::clone(&apps));
        let sessions = Sessions::new(workspaces, vault, find, settings, pool, vmm, reach);
        let pepod = Pepod(Arc::new(Parts {
            guest_digest: digest_of(&agent).with_context(|| format!("cannot read {}", agent.display()))?,
            config,
            sessions,
            images,
            store,
            apps,
            streams: Streams::default(),
            turns: Turns::default(),
            token_key,
            edge_has: watch::Sender::new(EdgeHas::default()),
            backing: Arc::default(),
            tag,
            seen,
            runs_on,
            stop: watch::Sender::new(None),
            drained: watch::Sender::new(false),
            busy: watch::Sender::new(0),
            runtime: Handle::current(),
        }));
        let same_boot = pepod.same_boot().await?;
        let returning = pepod.sessions().resume(same_boot).await.context("cannot take up what was before")?;
        let live = |id| pepod.sessions().by_id(id).is_some();
        pepod.workspaces().tidy(live).await.context("cannot look at the Workspaces")?;
        let key = pepod.first_key().await?;
        let sockets =
            [(operator, Listener::Operator, Handle::current()), (edge, Listener::Edge { uid: edge_uid }, edge_runtime)];
        for (socket, listener, runtime) in sockets {
            socket.set_nonblocking(true)?;
            let _there = runtime.enter();
            tokio::spawn(server::serve(pepod.clone(), listener, tokio::net::UnixListener::from_std(socket)?));
        }
        pepod.say_ready(ready, key)?;
        tracing::info!(tag = %tag, taken_up = returning.count(), runs_on = pepod.0.runs_on, "ready");
        let settling = pepod.clone();
        tokio::spawn(async move {
            let sessions = settling.sessions();
            returning.done(sessions).await;
            match sessions.host().sweep(&sessions.sandboxes()).await {
                Ok(left) if left.is_empty() => {}
                Ok(left) => tracing::info!(found = left.len(), "swept what was left of an earlier life"),
                Err(error) => tracing::error!(%error, "could not sweep"),
            }
            sessions.pool().clone().run(sessions.clone()).await;
        });
        if let Some(listener) = metrics {
            tracing::info!(address = ?listener.local_addr().ok(), "metrics");
            let measured = pepod.clone();
            tokio::spawn(async move {
                if let Err(error) = metrics::serve(measured, listener).await {
                    tracing::error!(%error, "metrics cannot be asked for");
                }
            });
        }
        tokio::spawn(usage::run(pepod.sessions().clone()));
        tokio::spawn(workspace::meter(pepod.store().clone()));
        let state = pepod.config().places.state.clone();
        tokio::spawn(pressure::run(pepod.sessions().clone(), state));
        let forgetting = pepod.clone();
        tokio::spawn(async move { forgetting.sessions().forget(forgetting.config().retention).await });
        let stopped = pepod.until_stopped(exit_when_idle).await;
        // What drivers still hold is dropped with the runtime: it is left to the next life, not given back.
        pepod.sessions().host().leave_all();
        stopped
    }

    async fn until_stopped(&self, exit_when_idle: Option<Duration>) -> anyhow::Result<u8> {
        let mut terminate = on_signal(SignalKind::terminate())?;
        let mut interrupt = on_signal(SignalKind::interrupt())?;
        let mut hangup = on_signal(SignalKind::hangup())?;
        let (pool, config) = (self.sessions().pool().clone(), self.0.config.clone());
        let may_pool = exit_when_idle.is_none();
        tokio::spawn(async move {
            while hangup.recv().await.is_some() {
                match config.again() {
                    Ok(now) => {
                        if may_pool {
                            pool.configure(now.pool);
                        }
                        tracing::info!(
                            "[pool] is as the settings say now; the others are read at the start, and Sandboxes go on over a restart"
                        );
                    }
                    Err(error) => tracing::error!(%error, "the settings are left as they were"),
                }
            }
        });
        let mut stop = self.0.stop.subscribe();
        let wanted = tokio::select! {
            biased;
            () = self.sessions().host().lost() => anyhow::bail!("the privileged side is gone; Sandboxes go on, start pepod again"),
            reason = self.store().failed() => anyhow::bail!("the store failed: {reason}"),
            _ = terminate.recv() => Stop::Leave,
            _ = interrupt.recv() => Stop::Drain,
            wanted = stop.wait_for(Option::is_some) => wanted.map(|wanted| *wanted).unwrap_or(None).unwrap_or(Stop::Drain),
            () = self.idle(exit_when_idle) => {
                tracing::info!("idle: ending");
                Stop::Drain
            }
        };
        if wanted == Stop::Leave {
            tracing::info!("leaving; Sandboxes go on");
            self.sessions().drain();
            return Ok(LEFT);
        }
        tracing::info!("ending every Sandbox");
        tokio::select! {
            biased;
            () = self.sessions().end_all(Reason::Drain, DRAIN) => {}
            _ = interrupt.recv() => {
                tracing::warn!("asked again: not waiting for Sandboxes");
                return Ok(130);
            }
            _ = terminate.recv() => {
                tracing::warn!("told to go: not waiting for Sandboxes");
                return Ok(LEFT);
            }
        }
        self.0.drained.send_replace(true);
        // The answer to whoever asked for it is on its way.
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(0)
    }

    /// Returns when there was no Session for that long.
    async fn idle(&self, after: Option<Duration>) {
        let Some(after) = after else { return std::future::pending().await };
        let mut sessions = self.sessions().count();
        let mut busy = self.0.busy.subscribe();
        loop {
            let quiet = *sessions.borrow_and_update() == 0 && *busy.borrow_and_update() == 0;
            tokio::select! {
                () = tokio::time::sleep(after), if quiet => return,
                _ = sessions.changed() => {}
                _ = busy.changed() => {}
            }
        }
    }

    /// Whether the host has not been restarted since this instance's last life.
    async fn same_boot(&self) -> anyhow::Result<bool> {
        let now = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        let before = self.store().fact("boot_id").await?;
        self.store().write(Write::Fact("boot_id", now.clone())).await?;
        Ok(before.is_none_or(|before| before == now))
    }

    /// Makes the instance's first key, once. Its text is told once and kept nowhere.
    async fn first_key(&self) -> anyhow::Result<Option<String>> {
        if self.store().fact("first_key").await?.is_some() || self.store().has_keys().await? {
            return Ok(None);
        }
        let spec = KeySpec {
            app: self.default_app(),
            name: Some("first".into()),
            scopes: vec![Scope::admin()],
            sources: Vec::new(),
            expires_at: None,
            created_by: Actor::Pepo,
        };
        let (key, text) = NewKey::generate(spec)?;
        let id = key.row().id.to_string();
        self.store().write(Write::NewKey(Box::new(key))).await?;
        self.store().write(Write::Fact("first_key", id)).await?;
        Ok(Some(text))
    }

    fn say_ready(&self, to: Option<OwnedFd>, key: Option<String>) -> anyhow::Result<()> {
        use std::io::Write as _;
        let places = &self.0.config.places;
        let ready = Ready {
            operator_socket: places.operator_socket().display().to_string(),
            edge_socket: places.edge_socket().display().to_string(),
            key,
        };
        if let Some(to) = to {
            let mut line = serde_json::to_vec(&ready)?;
            line.push(b'\n');
            // Whoever started this may be gone already.
            if let Err(error) = std::fs::File::from(to).write_all(&line) {
                tracing::debug!(%error, "nobody reads the ready line");
            }
        }
        Ok(())
    }

    /// Asks for the end. A more urgent one replaces a less urgent.
    pub fn stop(&self, how: Stop) {
        self.0.stop.send_modify(|wanted| *wanted = (*wanted).max(Some(how)));
    }

    /// Returns when every Sandbox has ended.
    pub async fn drained(&self) {
        let mut drained = self.0.drained.subscribe();
        // An error means that the daemon is gone.
        let _ = drained.wait_for(|drained| *drained).await;
    }

    /// Counts as work until dropped.
    pub fn busy(&self) -> Busy {
        self.0.busy.send_modify(|busy| *busy += 1);
        Busy(self.0.busy.clone())
    }

    /// Gives back what no Session accounts for, and what is no Image; or lists it.
    ///
    /// # Errors
    /// The privileged side.
    pub async fn sweep(&self, only_look: bool) -> Result<Vec<Leftover>, pepo_sandbox::host::Error> {
        let host = self.sessions().host();
        let mut left: Vec<Leftover> = if only_look {
            // Looked at first: whatever is made meanwhile is accounted for before it is on the host.
            let found = host.found().await?;
            let kept = self.sessions().sandboxes();
            found
                .into_iter()
                .filter(|found| !kept.contains(&found.id))
                .map(|found| Leftover {
                    kind: "sandbox".into(),
                    name: found.id.to_string(),
                    age_seconds: Some(found.age_seconds),
                    owner: self.0.tag.to_string(),
                    removed: false,
                    error: None,
                })
                .collect()
        } else {
            host.sweep(&self.sessions().sandboxes()).await?.into_iter().map(places::leftover).collect()
        };
        let builds = if *self.0.busy.borrow() > 0 { Builds::Run } else { Builds::Rest };
        let act = if only_look { Act::Look } else { Act::Remove };
        let (state, owner) = (self.0.config.places.state.clone(), self.0.tag.to_string());
        let files = tokio::task::spawn_blocking(move || places::left_files(&state, builds, act, &owner));
        left.extend(files.await.unwrap_or_default());
        Ok(left)
    }

    /// Who is at which request that is done once.
    pub fn turns(&self) -> &Turns {
        &self.0.turns
    }

    /// Workspaces.
    pub fn workspaces(&self) -> &Workspaces {
        self.sessions().workspaces()
    }

    /// All Sessions.
    pub fn sessions(&self) -> &Sessions {
        &self.0.sessions
    }

    /// All Images.
    pub fn images(&self) -> &Arc<Images> {
        &self.0.images
    }

    /// Where all runs that no connection holds.
    pub fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// All settings.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// All Apps.
    pub fn apps(&self) -> &Apps {
        &self.0.apps
    }

    /// The App of everybody who names none.
    pub fn default_app(&self) -> AppId {
        self.0.apps.default()
    }

    /// The App of that name or id.
    pub fn app(&self, which: &str) -> Option<AppId> {
        self.0.apps.find(which).map(|app| app.id)
    }

    /// Streams of events that are open.
    pub fn streams(&self) -> &Streams {
        &self.0.streams
    }

    /// Held by the one backup that may be under way.
    pub fn backing(&self) -> Arc<tokio::sync::Mutex<()>> {
        self.0.backing.clone()
    }

    /// What Session tokens are signed with.
    pub fn token_key(&self) -> &[u8; 32] {
        &self.0.token_key
    }

    /// What the edge said it has, as it moves.
    pub fn edge_has(&self) -> &watch::Sender<EdgeHas> {
        &self.0.edge_has
    }

    /// What root saw when it started.
    pub fn seen_as_root(&self) -> &[Check] {
        &self.0.seen
    }

    /// How long a request waits for its Session to be Active.
    pub fn start_within(&self) -> Duration {
        self.0.config.sandbox.start_timeout + Duration::from_secs(10)
    }

    /// What runs here.
    pub fn version(&self) -> Version {
        Version {
            guest_digest: Some(self.0.guest_digest.clone()),
            tag: Some(self.0.tag.to_string()),
            domain: self.0.config.domain.as_ref().map(|domain| domain.as_str().to_owned()),
            ..version(&self.0.runs_on)
        }
    }
}

/// What this program is.
pub fn version(runs_on: &str) -> Version {
    let mark = if cfg!(feature = "fake") { "+fake" } else { "" };
    Version {
        version: format!("{}{mark}", env!("CARGO_PKG_VERSION")),
        guest_generation: proto::GENERATION,
        guest_digest: None,
        runs_on: runs_on.to_owned(),
        tag: None,
        domain: None,
    }
}

/// The guest agent's file: what `PEPO_GUEST` names, or the one beside this program.
///
/// # Errors
/// There is none.
pub fn guest_agent(config: &Config) -> anyhow::Result<PathBuf> {
    let path = &config.guest;
    anyhow::ensure!(path.is_file(), "the guest agent is not there: {}", path.display());
    Ok(path.clone())
}

/// SHA-256 of a file, 64 hex digits.
///
/// # Errors
/// It cannot be read.
pub fn digest_of(path: &Path) -> std::io::Result<String> {
    Ok(store::hex(&Sha256::digest(std::fs::read(path)?)))
}

/// Finds Images for Sessions.
fn finder(images: &Arc<Images>, vmm: Vmm) -> FindImage {
    let images = images.clone();
    Arc::new(move |name: String| {
        let images = images.clone();
        Box::pin(async move {
            #[cfg(feature = "fake")]
            if vmm == Vmm::Fake {
                return Ok(fake_files());
            }
            let _ = vmm;
            let looked = tokio::task::spawn_blocking(move || {
                let image = images.find(&name).map_err(|error| no_image(&name, error))?;
                let files = images.boot_files(&image).map_err(|error| no_image(&name, error))?;
                Ok(Files { id: image.id(), kernel: files.kernel, initramfs: files.initramfs, root: files.root })
            });
            looked.await.unwrap_or_else(|error| Err(no_image("?", image::Error::Invalid { reason: error.to_string() })))
        })
    })
}

/// An Image that a Session cannot have, with what to do about it.
fn no_image(name: &str, error: image::Error) -> Error {
    let hint = match &error {
        image::Error::Missing { recipe: Some(recipe), .. } => format!("build it: pepo image build {recipe}"),
        image::Error::Missing { meant: Some(meant), .. } => format!("did you mean `{meant}`?"),
        image::Error::Missing { .. } => "`pepo image ls` shows those that there are".into(),
        broken => {
            tracing::error!(image = name, error = %broken, "an Image cannot be used");
            broken.to_string()
        }
    };
    Error::NoImage { name: name.chars().take(80).flat_map(char::escape_debug).collect(), hint }
}

/// What a guest that is a host process boots from: nothing.
#[cfg(feature = "fake")]
fn fake_files() -> Files {
    let path = || pepo_sandbox::StatePath::new("fake").unwrap_or_else(|_| unreachable!("a plain path"));
    Files { id: uuid::Uuid::nil().into(), kernel: path(), initramfs: path(), root: path() }
}
