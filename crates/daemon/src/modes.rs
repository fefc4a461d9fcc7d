//! The modes of this program beside serving: tools that print and end, and the stations of a Sandbox's life.

use std::io::Write as _;
use std::os::fd::{OwnedFd, RawFd};
use std::process::{Command, ExitCode, Stdio};

use anyhow::Context as _;
use pepo_api::{DoctorReport, Leftover, Severity, SweepReport};
use pepo_sandbox::{jail, keeper, share, sweep, sys};
use serde::Serialize;

use crate::config::{self, Config, Typed};
use crate::{doctor, places, server, version};

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

/// `pepod probe`: one line about hardware virtualization. A process of its own, since a broken KVM may hold a thread for
/// ever.
///
/// # Errors
/// Nobody reads it.
pub fn probe() -> anyhow::Result<ExitCode> {
    say(&format!("{}\n", doctor::virtualization()))?;
    Ok(ExitCode::SUCCESS)
}

/// Asks `pepod probe`.
pub fn probed() -> String {
    let asked =
        Command::new("/proc/self/exe").arg("probe").env_clear().stdin(Stdio::null()).stderr(Stdio::null()).output();
    let said = asked.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    if said.is_empty() { "whether hardware virtualization works could not be found out".into() } else { said }
}

/// `pepod doctor`.
///
/// # Errors
/// Nobody reads it.
pub fn doctor(config: &Config, print: Print) -> anyhow::Result<ExitCode> {
    let mut checks = doctor::root(config, &probed());
    checks.extend(doctor::anybody(config));
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
    let left: Vec<Leftover> = match (only_look, all) {
        (true, _) => found.into_iter().filter(ours).map(places::leftover).collect(),
        (false, true) => sweep::sweep_stale()?.into_iter().map(places::leftover).collect(),
        (false, false) if is_ours => sweep::sweep_stale_of(&state)?.into_iter().map(places::leftover).collect(),
        (false, false) => Vec::new(),
    };
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
pub fn print_version(config: &Config, print: Print) -> anyhow::Result<ExitCode> {
    let mut version = version(&runs_on(&probed()));
    version.guest_digest = crate::guest_agent(config).ok().and_then(|path| crate::digest_of(&path).ok());
    match print {
        Print::Json => say_json(&version)?,
        Print::Text => say(&format!("pepod {}\n{}\n", version.version, version.runs_on))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// One line: what runs the guests, and why that.
pub fn runs_on(virtualization: &str) -> String {
    format!("qemu, software emulation ({virtualization})")
}

/// `pepod config show|check|default`.
///
/// # Errors
/// The configuration is wrong, or there is no such verb.
pub fn config(typed: &Typed, verb: &str, print: Print) -> anyhow::Result<ExitCode> {
    match verb {
        "default" => say(&config::default_file())?,
        "check" => {
            let config = Config::read(typed)?;
            say(&format!("{}: valid\n", config.places.file.display()))?;
        }
        "show" => {
            let config = Config::read(typed)?;
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
