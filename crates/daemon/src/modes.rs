//! The modes of this program beside serving: tools that print and end, and the stations of a Sandbox's life.

use std::io::Write as _;
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::Context as _;
use pepo_api::{DoctorReport, Leftover, SetupState, Severity, SweepReport};
use pepo_sandbox::vmm::probe::{self, Hardware, Wanted};
use pepo_sandbox::{Vmm, jail, keeper, share, sweep, sys};
use serde::Serialize;

use crate::config::{self, Column, Config, Typed, VmmChoice};
use crate::doctor::Seen;
use crate::image::left::Builds;
use crate::{doctor, places, server, setup, version};

/// How a tool prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Print {
    /// For people.
    Text,
    /// For programs.
    Json,
}

fn say(text: &str) -> anyhow::Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("cannot write")
}

fn say_json<T: Serialize>(value: &T) -> anyhow::Result<()> {
    say(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// `pepod keeper --fd N`.
///
/// # Errors
/// There is no such descriptor.
pub fn keep(fd: RawFd) -> anyhow::Result<ExitCode> {
    let socket = sys::inherited(fd).context("no socket was handed over")?;
    Ok(ExitCode::from(keeper::run(socket)))
}

/// `pepod share --fd N`.
///
/// # Errors
/// There is no such descriptor.
pub fn share(fd: RawFd) -> anyhow::Result<ExitCode> {
    let socket = sys::inherited(fd).context("no socket was handed over")?;
    Ok(ExitCode::from(share::run(socket)))
}

/// `pepod relay --fd N`.
///
/// # Errors
/// There is no such descriptor.
pub fn relay(fd: RawFd) -> anyhow::Result<ExitCode> {
    let socket = sys::inherited(fd).context("no socket was handed over")?;
    Ok(ExitCode::from(pepo_sandbox::net::relay::run(socket)))
}

/// `pepod jail --fd N`: becomes the program of the specification. Its words go where the program's would.
///
/// # Errors
/// The descriptor holds no specification.
pub fn enter_jail(fd: RawFd) -> anyhow::Result<ExitCode> {
    let from: OwnedFd = sys::inherited(fd).context("no specification was handed over")?;
    let spec = jail::read_spec(from)?;
    match jail::enter(&spec) {
        Ok(never) => match never {},
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "pepod jail: {:#}", anyhow::Error::from(error));
            Ok(ExitCode::from(jail::EXIT_NOT_JAILED))
        }
    }
}

/// `pepod restore [--replace]`: puts the backup on its input in place.
///
/// # Errors
/// See [`crate::backup::restore`].
pub fn restore(typed: &Typed, there: crate::backup::There, print: Print) -> anyhow::Result<ExitCode> {
    let places = typed.places()?;
    let root = rustix::process::geteuid().is_root();
    let fake = cfg!(feature = "fake") && !root;
    anyhow::ensure!(root || fake, "a backup must be restored as root: sudo pepo backup restore FILE");
    let ours = || crate::accounts::Account {
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
    };
    let pepo = if root { crate::accounts::ensure(crate::accounts::PEPO)? } else { ours() };
    let report = crate::backup::restore(&places, pepo, there, std::io::stdin().lock())?;
    match print {
        Print::Json => say_json(&report)?,
        Print::Text => {
            say(&format!("restored what was at {}\n", report.manifest.made_at))?;
            for note in &report.notes {
                say(&format!("{note}\n"))?;
            }
            for lack in &report.manifest.lacks {
                say(&format!("not in it: {lack}\n"))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `pepod probe`: one line about hardware virtualization. A process of its own, since a broken KVM may hold a thread for
/// ever.
///
/// # Errors
/// Nobody reads it.
pub fn probe() -> anyhow::Result<ExitCode> {
    say(&format!("{}\n", probe::hardware()))?;
    Ok(ExitCode::SUCCESS)
}

/// Asks `pepod probe`.
fn probed() -> Hardware {
    let asked =
        Command::new("/proc/self/exe").arg("probe").env_clear().stdin(Stdio::null()).stderr(Stdio::null()).output();
    let said = asked.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    if said == Hardware::Usable.to_string() {
        Hardware::Usable
    } else if said.is_empty() {
        Hardware::Unusable("whether hardware virtualization works could not be found out".into())
    } else {
        Hardware::Unusable(said)
    }
}

/// The settings, once it is chosen what runs the guests: their usual size follows from that.
///
/// # Errors
/// The configuration is wrong.
pub fn settle(mut typed: Typed) -> anyhow::Result<(Config, Seen)> {
    let config = Config::read(&typed)?;
    let wanted = match config.sandbox.vmm {
        VmmChoice::Auto => Wanted::Automatic,
        VmmChoice::Qemu => Wanted::Qemu,
        VmmChoice::Firecracker => Wanted::Firecracker,
        #[cfg(feature = "fake")]
        VmmChoice::Fake => {
            let choice = probe::Choice { vmm: Vmm::Fake, reason: "tests".into() };
            return Ok((config, Seen { hardware: Hardware::Unusable("tests".into()), choice }));
        }
    };
    let hardware = probed();
    let installed = setup::installed(&config);
    let choice = probe::choose(wanted, &hardware, installed.as_ref().map(drop).map_err(|why| &**why));
    let config = match choice.vmm {
        Vmm::Firecracker => {
            typed.column = Column::Hardware;
            Config::read(&typed)?
        }
        _ => config,
    };
    Ok((config, Seen { hardware, choice }))
}

/// `pepod setup [--check] [--from FILE]`.
///
/// # Errors
/// Nothing was installed.
pub fn setup(config: &Config, only_look: bool, from: Option<&Path>, print: Print) -> anyhow::Result<ExitCode> {
    let report = match (from, only_look) {
        (Some(_), true) => anyhow::bail!("--check looks, --from installs: one of them"),
        (Some(from), false) => setup::install(config, from)?,
        (None, _) => setup::look(config),
    };
    let missing = matches!(report.state, SetupState::Missing | SetupState::Damaged);
    match print {
        Print::Json => say_json(&report)?,
        Print::Text => {
            say(&format!("{} {} ({})\n", report.name, report.found, report.directory))?;
            anyhow::ensure!(!missing || only_look, "`pepo setup` gets it; pepod installs with --from FILE");
        }
    }
    Ok(ExitCode::from(u8::from(missing)))
}

/// `pepod probe-network`: whether this host can guard a network. A process of its own, since looking makes a namespace.
///
/// # Errors
/// Nobody reads it.
pub fn probe_network() -> anyhow::Result<ExitCode> {
    say(&match pepo_sandbox::net::probe() {
        Ok(()) => "ok\n".to_owned(),
        Err(error) => format!("{}\n", pepo_sandbox::chain(&error)),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Whether Sandboxes get a network on this host; if not, why.
///
/// # Errors
/// The reason.
pub fn network_works(config: &config::NetworkConfig) -> Result<(), String> {
    if config.uses == config::NetworkUse::Off {
        return Err("network.mode = \"off\"".to_owned());
    }
    let asked = Command::new("/proc/self/exe")
        .arg("probe-network")
        .env_clear()
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    match String::from_utf8_lossy(&asked.stdout).trim() {
        "ok" => Ok(()),
        "" => Err("it could not be found out".to_owned()),
        reason => Err(reason.to_owned()),
    }
}

/// `pepod doctor`.
///
/// # Errors
/// Nobody reads it.
pub fn doctor(config: &Config, seen: &Seen, print: Print) -> anyhow::Result<ExitCode> {
    let mut checks = doctor::root(config, seen);
    checks.extend(doctor::network(config, &network_works(&config.network)));
    checks.extend(doctor::anybody(config));
    checks.push(doctor::holds(&config.sandbox));
    checks.push(doctor::slowdown(Err("no daemon runs here that could make a Sandbox".into())));
    let bad = checks.iter().any(|check| check.severity == Severity::Error);
    match print {
        Print::Json => say_json(&DoctorReport { checks })?,
        Print::Text => {
            let line = |check: &pepo_api::Check| {
                let fix = check.fix.as_ref().map(|fix| format!("\n        -> {fix}")).unwrap_or_default();
                format!("{:?}: {}: {}{fix}\n", check.severity, check.name, check.found).to_string()
            };
            say(&checks.iter().map(line).collect::<String>())?;
        }
    }
    Ok(ExitCode::from(u8::from(bad)))
}

/// `pepod sweep`: what instances that nobody runs have left; without `--all`, this instance's.
///
/// # Errors
/// The registry cannot be read, or this is not root.
pub fn sweep(config: &Config, only_look: bool, all: bool, print: Print) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(only_look || rustix::process::geteuid().is_root(), "sweeping takes root: sudo pepo sweep");
    let state = std::fs::canonicalize(&config.places.state).unwrap_or_else(|_| config.places.state.clone());
    let ours = |left: &pepo_sandbox::host::Leftover| all || left.owner.as_deref() == Some(&*state);
    let found = if only_look || !all {
        // Looked at first: removing is by instance, and a foreign one is not asked for.
        sweep::look()?
    } else {
        Vec::new()
    };
    let is_ours = found.iter().any(ours);
    let mut left: Vec<Leftover> = match (only_look, all) {
        (true, _) => found.into_iter().filter(ours).map(places::leftover).collect(),
        (false, true) => sweep::sweep_stale()?.into_iter().map(places::leftover).collect(),
        (false, false) if is_ours => sweep::sweep_stale_of(&state)?.into_iter().map(places::leftover).collect(),
        (false, false) => Vec::new(),
    };
    // With a daemon its builds would be in the way; without one nothing is built.
    let act = if only_look { sweep::Act::Look } else { sweep::Act::Remove };
    if std::os::unix::net::UnixStream::connect(config.places.operator_socket()).is_err() {
        left.extend(places::left_files(&state, Builds::Rest, act, &state.display().to_string()));
    }
    let stayed = !only_look && left.iter().any(|one| !one.removed);
    match print {
        Print::Json => say_json(&SweepReport { leftovers: left })?,
        Print::Text if left.is_empty() => say("nothing is left over\n")?,
        Print::Text => {
            let line = |one: &Leftover| {
                let what = one.error.clone().unwrap_or_else(|| if one.removed { "removed" } else { "found" }.into());
                format!("{} {} ({}): {what}\n", one.kind, one.name, one.owner)
            };
            say(&left.iter().map(line).collect::<String>())?;
        }
    }
    Ok(ExitCode::from(u8::from(stayed)))
}

/// `pepod version`.
///
/// # Errors
/// Nobody reads it.
pub fn print_version(config: &Config, seen: &Seen, print: Print) -> anyhow::Result<ExitCode> {
    let mut version = version(&seen.choice.to_string());
    version.guest_digest = crate::guest_agent(config).ok().and_then(|path| crate::digest_of(&path).ok());
    match print {
        Print::Json => say_json(&version)?,
        Print::Text => say(&format!("pepod {}\n{}\n", version.version, version.runs_on))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// `pepod config show|check|default`.
///
/// # Errors
/// The configuration is wrong, or there is no such verb.
pub fn config(typed: Typed, verb: &str, print: Print) -> anyhow::Result<ExitCode> {
    match verb {
        "default" => {
            // What is set does not matter to what would be the default, but for what runs the guests.
            let column = settle(typed).map_or(Column::Emulation, |(_, seen)| match seen.choice.vmm {
                Vmm::Firecracker => Column::Hardware,
                _ => Column::Emulation,
            });
            say(&config::default_file(column))?;
        }
        "check" => {
            let config = Config::read(&typed)?;
            say(&format!("{}: valid\n", config.places.file.display()))?;
        }
        "show" => {
            let (config, _) = settle(typed)?;
            match print {
                Print::Json => say_json(&server::shown(&config))?,
                Print::Text => {
                    let line = |(key, value, origin): (&str, &str, &config::Origin)| {
                        format!("{key} = {value:?}  # {origin}\n")
                    };
                    say(&config.shown().map(line).collect::<String>())?;
                }
            }
        }
        other => anyhow::bail!("`pepod config {other}` is none of show, check, default"),
    }
    Ok(ExitCode::SUCCESS)
}
