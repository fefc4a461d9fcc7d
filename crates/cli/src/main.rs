//! pepo: the command line. It speaks the public API to a daemon, starts one where a run needs it, and copies files with
//! care; what looks at the host is `pepod`'s, and only called here.
//!
//! ```text
//!   main -> cmd/<verb> -> launch (a daemon, if need be) -> api::client -> follow | transfer | render
//! ```

#![forbid(unsafe_code)]

mod cmd;
mod contexts;
mod escape;
mod fail;
#[cfg(test)]
mod fake;
mod follow;
mod interrupt;
mod launch;
mod pack;
mod place;
mod render;
mod supervise;
mod terminal;
mod tls;
mod tool;
mod transfer;
mod unpack;
mod value;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    terminal::restore_on_panic();
    let cli = match cmd::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            if !error.use_stderr() {
                let _ = error.print();
                return fail::exit(0);
            }
            let text = error.to_string();
            let text = text.strip_prefix("error: ").unwrap_or(&text);
            let _ = std::io::stderr().write_all(format!("pepo: {}", escape::text(text)).as_bytes());
            return fail::exit(usage_code());
        }
    };
    let usual = cli.failure_code();
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            fail::Failure::new(format!("cannot start: {error}")).show();
            return fail::exit(usual);
        }
    };
    let done = runtime.block_on(Box::pin(cli.run()));
    // A thread may be stuck in a read of standard input, which nothing can take back.
    runtime.shutdown_background();
    terminal::restore();
    match done {
        Ok(code) => fail::exit(code),
        Err(failure) if failure.code == Some(fail::CLOSED_PIPE) => fail::exit(fail::CLOSED_PIPE),
        Err(failure) => {
            failure.show();
            fail::exit(failure.code.unwrap_or(usual))
        }
    }
}

/// The exit code for a command line that is not understood: 125 where the low ones belong to a command in a Session.
fn usage_code() -> u8 {
    let verb = std::env::args_os().skip(1).find(|arg| !arg.as_encoded_bytes().starts_with(b"-"));
    match verb.as_ref().and_then(|verb| verb.to_str()) {
        Some("run" | "exec" | "attach" | "shell") => 125,
        _ => 2,
    }
}
