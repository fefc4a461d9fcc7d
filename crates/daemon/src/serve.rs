//! `pepod serve`: everything that happens as root and with one thread, in order, until the process is two.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use pepo_sandbox::host::{HostConfig, Split, split};
use pepo_sandbox::net::Settings;
use pepo_sandbox::{Vmm, rights, sys};

use crate::accounts::{self, Account};
use crate::config::{Config, NetworkUse};
use crate::doctor::Seen;
use crate::network::Network;
use crate::preset::{Presets, machine};
use crate::{Begun, Pepod, doctor, modes, places, setup};

/// Where `mkfs.ext4` is.
const MKFS: [&str; 3] = ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4", "/usr/bin/mkfs.ext4"];

/// What we are to the kernel's killer, and the privileged side with us.
const OOM_SCORE: &str = "-500";

/// What we are to whoever wants a processor, and the privileged side with us: about nine times the weight of a Sandbox with
/// one processor (the kernel's `sched_prio_to_weight`: 9548 against a cgroup's 1024). Under systemd the unit's own leaf weighs
/// more; elsewhere this is all that keeps time for us. What is started for a Sandbox gives it back.
const NICE: i32 = -10;

/// What the command line says of serving.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flags {
    /// `--ready-fd`.
    pub ready_fd: Option<RawFd>,
    /// `--exit-when-idle`.
    pub exit_when_idle: Option<Duration>,
}

/// Serves; returns when it is over.
///
/// # Errors
/// Whatever is not as it must be.
pub fn serve(config: Config, runs: Seen, flags: Flags) -> anyhow::Result<ExitCode> {
    log(&config.log)?;
    // Everything of a Sandbox is marked to go first; a container that lacks the right leaves it at that.
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::debug!(%error, "not protected from the kernel's killer");
    }
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "no precedence over Sandboxes");
    }
    // A pipe that nobody reads must not end us, and a name in `ps` must be ours.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let root = rustix::process::geteuid().is_root();
    let fake = is_fake(&config);
    anyhow::ensure!(root || fake, "pepod must be started as root: sudo pepo up");
    let (pepo, edge) = users(root)?;
    let instance = places::prepare(&config.places, pepo).context("the instance cannot be taken")?;
    let installed = setup::installed(&config);
    if runs.choice.vmm == Vmm::Firecracker {
        installed.as_ref().map_err(|why| anyhow::anyhow!("{why}"))?;
    }
    let guarded = if fake { Err("tests".to_owned()) } else { modes::network_works(&config.network) };
    if config.network.uses == NetworkUse::On
        && let Err(reason) = &guarded
    {
        anyhow::bail!("network.mode = \"on\", and this host cannot guard a network: {reason}");
    }
    let mut seen = doctor::root(&config, &runs);
    seen.extend(doctor::network(&config, &guarded));
    let network = match guarded {
        Ok(()) => Some(Network {
            settings: Settings { dns: config.dns.clone(), ..config.network.settings.clone() },
            default: config.network.default,
            presets: Presets::new(machine::read(Path::new("/"), &["/root".into()]), &config.presets)
                .context("presets")?,
        }),
        Err(_) => None,
    };
    let operator = places::bind(&config.places.operator_socket(), root.then_some(pepo.gid))?;
    let edge_socket = places::bind(&config.places.edge_socket(), root.then_some(edge.gid))?;
    let ready = match flags.ready_fd {
        Some(fd) => Some(sys::inherited(fd).with_context(|| format!("descriptor {fd} is not open"))?),
        None => None,
    };
    if let Some(ready) = &ready {
        rustix::io::fcntl_setfd(ready, rustix::io::FdFlags::CLOEXEC)?;
    }
    // A daemon that a run started has nobody who would ask.
    let metrics = if flags.exit_when_idle.is_some() { None } else { metrics_listener(&config)? };
    let tag = instance.tag();
    let mkfs = MKFS.iter().map(PathBuf::from).find(|path| path.exists()).unwrap_or_else(|| MKFS[0].into());
    let places = config.places.clone();
    match split().context("cannot split")? {
        Split::Host { socket, daemon } => {
            drop(metrics);
            drop((operator, edge_socket, ready));
            let host = HostConfig {
                instance,
                daemon,
                daemon_uid: pepo.uid,
                vsock_device: None,
                qemu: None,
                firecracker: None,
                mkfs,
                directories: config.workspace.directories.clone(),
                network: network.map(|network| network.settings),
            };
            let ended = pepo_sandbox::host::run(socket, host);
            places::unbind(&places);
            Ok(ExitCode::from(ended.context("the privileged side failed")?))
        }
        Split::Daemon { socket } => {
            // The lock belongs to the privileged side: closing our copy of it leaves that one.
            drop(instance);
            rights::become_user(pepo.uid, pepo.gid).context("cannot give rights up")?;
            rights::forbid_calls().context("cannot forbid calls")?;
            rustix::thread::set_name(c"pepod")?;
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("pepod").build()?;
            // As many as the edge has. Apart from the others, so that a look at something wakes no second thread.
            let threads = std::thread::available_parallelism().map_or(1, |all| (all.get() / 2).clamp(1, 4));
            let edge_runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(threads)
                .enable_all()
                .thread_name("pepod")
                .build()?;
            let begun = Begun {
                config,
                network,
                tag,
                operator,
                edge: edge_socket,
                edge_uid: root.then_some(edge.uid),
                edge_runtime: edge_runtime.handle().clone(),
                host: socket,
                seen,
                vmm: runs.choice.vmm,
                runs_on: runs.choice.to_string(),
                ready,
                metrics,
                exit_when_idle: flags.exit_when_idle,
            };
            let code = runtime.block_on(Pepod::run(begun));
            // Requests and drivers that are still at work end here; what they hold on the host is the next one's to find.
            edge_runtime.shutdown_timeout(Duration::from_millis(200));
            runtime.shutdown_timeout(Duration::from_millis(200));
            Ok(ExitCode::from(code?))
        }
    }
}

#[cfg(feature = "fake")]
fn is_fake(config: &Config) -> bool {
    config.sandbox.vmm == crate::config::VmmChoice::Fake
}

#[cfg(not(feature = "fake"))]
fn is_fake(_: &Config) -> bool {
    false
}

/// The listener of metrics, and where it is as a file: an instance of its own takes a free port.
fn metrics_listener(config: &Config) -> anyhow::Result<Option<std::net::TcpListener>> {
    let Some(address) = config.metrics else { return Ok(None) };
    let listener = std::net::TcpListener::bind(address).with_context(|| {
        format!("metrics cannot listen on {address}: choose another address with `metrics.listen`, or `off`")
    })?;
    let path = config.places.run.join("metrics");
    let url = format!("http://{}/metrics\n", listener.local_addr()?);
    std::fs::write(&path, url).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Some(listener))
}

/// Ours and the edge's. Without root both are whoever we are.
fn users(root: bool) -> anyhow::Result<(Account, Account)> {
    if root {
        return Ok((accounts::ensure(accounts::PEPO)?, accounts::ensure(accounts::EDGE)?));
    }
    let ours = Account { uid: rustix::process::getuid().as_raw(), gid: rustix::process::getgid().as_raw() };
    Ok((ours, ours))
}

fn log(directives: &str) -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_new(directives)
        .with_context(|| format!("log.level = `{directives}` is not understood"))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_target(false)
        .with_writer(std::io::stderr)
        .init();
    Ok(())
}
