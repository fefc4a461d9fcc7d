//! pepod: reads its arguments and settings, then serves or is one of its other modes.
//!
//! ```text
//! pepod [serve] [--ready-fd N] [--exit-when-idle SECONDS] [--set section.key=value]…
//! pepod setup [--check] [--from FILE]                                                 [--json]
//! pepod restore [--replace]                                     a backup on its input   [--json]
//! pepod doctor | sweep [--dry-run] [--all] | version | config show|check|default      [--json]
//! pepod keeper --fd N | jail --fd N | share --fd N | relay --fd N | build … | probe | probe-network   its own, by re-execution
//! ```

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use lexopt::ValueExt as _;
use pepo_daemon::backup::There;
use pepo_daemon::config::{Config, Typed, duration};
use pepo_daemon::modes::{self, Print};
use pepo_daemon::serve::{Flags, serve};

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            use std::io::Write as _;
            let _ = writeln!(std::io::stderr(), "pepod: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    use lexopt::Arg::{Long, Short, Value};
    let mut words = Vec::new();
    let (mut fd, mut flags, mut sets) = (None, Flags::default(), Vec::new());
    let (mut print, mut only_look, mut all, mut from) = (Print::Text, false, false, None);
    if std::env::args().nth(1).as_deref() == Some("build") {
        let rest: Vec<String> = std::env::args().skip(2).collect();
        return Ok(pepo_daemon::image::build::main(&rest));
    }
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("fd") => fd = Some(parser.value()?.parse()?),
            Long("ready-fd") => flags.ready_fd = Some(parser.value()?.parse()?),
            Long("exit-when-idle") => {
                let idle = duration(&parser.value()?.string()?).map_err(anyhow::Error::msg);
                flags.exit_when_idle = Some(idle.context("--exit-when-idle")?.max(Duration::from_secs(1)));
            }
            Long("set") => {
                let set = parser.value()?.string()?;
                let (key, value) = set.split_once('=').context("--set takes section.key=value")?;
                sets.push((key.to_owned(), value.to_owned()));
            }
            Long("json") => print = Print::Json,
            Long("dry-run" | "check") | Short('n') => only_look = true,
            Long("from") => from = Some(std::path::PathBuf::from(parser.value()?)),
            Long("all" | "replace") => all = true,
            Long("version") | Short('V') => words = vec!["version".to_owned()],
            Value(word) => words.push(word.string()?),
            other => return Err(other.unexpected().into()),
        }
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let fd = || fd.context("--fd is missing");
    match words[..] {
        ["keeper"] => return modes::keep(fd()?),
        ["share"] => return modes::share(fd()?),
        ["jail"] => return modes::enter_jail(fd()?),
        ["relay"] => return modes::relay(fd()?),
        ["probe"] => return modes::probe(),
        ["probe-network"] => return modes::probe_network(),
        _ => {}
    }
    let typed = Typed::from_process(sets);
    match words[..] {
        ["config", verb] => return modes::config(typed, verb, print),
        ["config"] => return modes::config(typed, "show", print),
        _ => {}
    }
    match words[..] {
        ["sweep"] => return modes::sweep(&Config::read(&typed)?, only_look, all, print),
        ["restore"] => {
            let there = if all { There::MoveAside } else { There::Refuse };
            return modes::restore(&typed, there, print);
        }
        ["setup"] => return modes::setup(&Config::read(&typed)?, only_look, from.as_deref(), print),
        _ => {}
    }
    let (config, seen) = modes::settle(typed)?;
    match words[..] {
        [] | ["serve"] => serve(config, seen, flags),
        ["doctor"] => modes::doctor(&config, &seen, print),
        ["version"] => modes::print_version(&config, &seen, print),
        _ => anyhow::bail!("`{}` is no mode: serve, doctor, setup, sweep, restore, version, config", words.join(" ")),
    }
}
