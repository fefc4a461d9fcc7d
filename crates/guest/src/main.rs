//! `pepo-guest`: PID 1 and agent inside a microVM.
//!
//! As PID 1 of a kernel started with `pepo.guest=1` it is the guest (`init`). Started any other way it is an agent on a
//! Unix socket which changes nothing on the machine it runs on (`--listen PATH`): for tests of the whole path.

#![deny(unsafe_code)]

mod agent;
mod attach;
mod clock;
mod collect;
mod dial;
mod exec;
mod files;
mod fuse;
mod init;
mod input;
mod keep;
mod mount;
mod net;
mod rehearsal;
mod ring;
mod share;
mod shell;
mod spawn;
mod stream;
mod sys;
mod tar;
mod tree;
mod user;
mod watch;
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use crate::agent::{Effects, Settings};

/// Which build this is: the release, and what the build was told to add.
pub const BUILD: &str = match option_env!("PEPO_BUILD") {
    Some(build) => build,
    None => env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    if init::is_guest() {
        return init::run();
    }
    match on_host() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error is all a process has to say it with.
            let line = format!("pepo-guest: {}\n", agent::explain(error.as_ref()));
            let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn on_host() -> Result<(), Box<dyn std::error::Error>> {
    use lexopt::prelude::{Long, ValueExt};
    let mut settings = Settings::new(Effects::Process);
    let mut listen: Option<PathBuf> = None;
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("listen") => listen = Some(arguments.value()?.into()),
            // For tests, which cannot wait half a minute.
            Long("lease-ms") => settings.lease = Duration::from_millis(arguments.value()?.parse()?),
            Long("version") => {
                rustix::io::write(rustix::stdio::stdout(), format!("pepo-guest {BUILD}\n").as_bytes())?;
                return Ok(());
            }
            // What a host compares itself with: in a guest the agent's program is started so, as any other.
            Long("spin") => {
                let took = pepo_proto::measure::spin(arguments.value()?.parse()?);
                rustix::io::write(rustix::stdio::stdout(), format!("{}\n", took.as_nanos()).as_bytes())?;
                return Ok(());
            }
            _ => return Err(argument.unexpected().into()),
        }
    }
    let path = listen.ok_or("usage: pepo-guest --listen SOCKET (as PID 1 of a guest it needs nothing)")?;
    let listener =
        std::os::unix::net::UnixListener::bind(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    listener.set_nonblocking(true)?;
    sys::default_signals();
    agent::run(listener.into(), settings)?;
    // Left behind it would only mislead; gone already is as well.
    let _ = std::fs::remove_file(&path);
    Ok(())
}
