//! `pepod` as a tool: what looks at the host or at settings lives there, and works without a daemon.

use std::process::Stdio;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::fail::{Failure, Outcome};
use crate::launch;
use crate::place::Instance;

/// What a report may have.
const MOST: u64 = 16 << 20;
/// How long it may take.
const LIMIT: Duration = Duration::from_secs(300);

fn command(instance: &Instance, program: &str, arguments: &[&str]) -> Outcome<Command> {
    let mut command = Command::new(launch::program(program)?);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    match &instance.home {
        Some(home) => command.env("PEPO_HOME", home),
        None => command.env_remove("PEPO_HOME"),
    };
    Ok(command)
}

/// Runs `pepod` with these arguments and reads the JSON it prints. What it says on standard error is the caller's to see.
pub async fn ask<T: DeserializeOwned>(instance: &Instance, arguments: &[&str]) -> Outcome<T> {
    ask_of(instance, arguments, Stdio::null()).await
}

/// The same with an input.
pub async fn ask_of<T: DeserializeOwned>(instance: &Instance, arguments: &[&str], input: Stdio) -> Outcome<T> {
    let what = format!("pepod {}", arguments.join(" "));
    let failed = |error: std::io::Error| Failure::new(format!("{what}: {error}"));
    let mut child =
        command(instance, "pepod", arguments)?.stdin(input).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let stdout = child.stdout.take();
    let reading = async {
        let mut text = Vec::new();
        if let Some(stdout) = stdout {
            stdout.take(MOST).read_to_end(&mut text).await?;
        }
        Ok((text, child.wait().await?))
    };
    let (text, status) = tokio::time::timeout(LIMIT, reading)
        .await
        .map_err(|_| Failure::new(format!("{what}: no answer in {} s", LIMIT.as_secs())))?
        .map_err(failed)?;
    serde_json::from_slice(&text).map_err(|error| {
        let why = if text.is_empty() { launch::ended(status) } else { error.to_string() };
        Failure::new(format!("{what} gave no report: {why}"))
    })
}

/// Runs `pepod` with these arguments and our own output; gives its exit code.
pub async fn pass(instance: &Instance, arguments: &[&str]) -> Outcome<u8> {
    pass_to(instance, "pepod", arguments).await
}

/// The same with another program of ours.
pub async fn pass_to(instance: &Instance, program: &str, arguments: &[&str]) -> Outcome<u8> {
    let what = format!("{program} {}", arguments.join(" "));
    let status = tokio::time::timeout(LIMIT, command(instance, program, arguments)?.status())
        .await
        .map_err(|_| Failure::new(format!("{what}: no end in {} s", LIMIT.as_secs())))?
        .map_err(|error| Failure::new(format!("{what}: {error}")))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(125))
}
