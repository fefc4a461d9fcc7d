//! The set-up command of a Session: once per activation, in the fresh Sandbox, before anybody else may use it.
//!
//! Called by the driver on the task that makes the Sandbox. Promises that a Sandbox whose set-up did not exit with 0 is
//! destroyed, and that its exit code and last lines become the cause. It is a Command like any other, so its whole output
//! can be looked at.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use pepo_api::{CommandEnd, CommandId, CommandRole, OnDisconnect, Reason, Setup};
use pepo_sandbox::{Active, proto};
use tokio_util::sync::CancellationToken;

use super::state::Cause;
use super::{Error, Item, NewCommand, Serving, Session, Sessions, activation};
use crate::store::CommandSpec;

/// Lines of its output that the cause keeps.
const LINES: usize = 20;

/// Bytes of its output that they are taken from.
const TAIL: usize = 4096;

/// The guest ends it in time; this much later it is not waited for any more.
const LATE: Duration = Duration::from_secs(30);

/// Sets the Sandbox up, where the Session wants that.
pub(super) async fn run(
    sessions: &Sessions,
    session: &Session,
    active: Active,
    number: u64,
    cancel: &CancellationToken,
) -> Result<Active, Cause> {
    let Some(setup) = session.now().spec.setup.clone() else { return Ok(active) };
    let most = Duration::from_secs(setup.timeout_seconds());
    let mut tail = Tail::default();
    let serving = Serving { guest: active.guest().clone(), activation: number, ticket: None };
    let died = tokio::select! {
        biased;
        () = cancel.cancelled() => None,
        () = active.wait() => Some(None),
        done = tokio::time::timeout(most + LATE, follow(session, &setup, serving, &mut tail)) => match done {
            Ok(Ok(end)) if end.exit_code == Some(0) => return Ok(active),
            Ok(Ok(end)) => Some(Some(failed(&end, &setup, &tail))),
            Ok(Err(error)) => {
                let told = format!("the setup command could not be run: {}", pepo_sandbox::chain(&error));
                Some(Some(Cause { output: tail.lines(), ..Cause::told(Reason::SetupFailed, told) }))
            }
            Err(_) => {
                let told = format!("the setup command did not end within {} s", most.as_secs());
                Some(Some(Cause { output: tail.lines(), ..Cause::told(Reason::SetupFailed, told) }))
            }
        },
    };
    let exit = active.stop(Duration::ZERO).await;
    sessions.settle(&exit).await;
    Err(match died {
        Some(Some(cause)) => cause,
        Some(None) => {
            let cause = activation::cause_of(&exit);
            let message = format!("while it was set up: {}", cause.message);
            Cause { message, output: tail.lines(), ..cause }
        }
        None => Cause::told(Reason::SetupFailed, "it was called off while the setup command ran"),
    })
}

async fn follow(session: &Session, setup: &Setup, serving: Serving, tail: &mut Tail) -> Result<CommandEnd, Error> {
    let exec = proto::Exec {
        timeout_ms: setup.timeout_seconds() * 1000,
        detached: true,
        ..proto::Exec::new(["/bin/bash", "-c", setup.command.as_str()])
    };
    let spec = CommandSpec {
        argv: vec![setup.command.clone()],
        shell: None,
        on_disconnect: OnDisconnect::Keep,
        pty: false,
        stdin: false,
        keeps_alive: false,
        role: CommandRole::Setup,
        service: None,
        limits: None,
    };
    let new = NewCommand {
        id: CommandId::generate(),
        named_by_caller: false,
        exec,
        spec,
        input: Bytes::new(),
        more_input: false,
        counted: false,
    };
    let mut follower = session.commands().start(session, new, serving).await?;
    loop {
        match follower.next().await? {
            Item::Data { bytes, .. } => tail.put(&bytes),
            Item::Gap { .. } => tail.0.clear(),
            Item::End => {
                let unknown = || CommandEnd {
                    reason: Reason::Unknown,
                    exit_code: None,
                    signal: None,
                    signal_number: None,
                    cwd: None,
                    at: jiff::Timestamp::now(),
                };
                return Ok(follower.shown().end.unwrap_or_else(unknown));
            }
        }
    }
}

fn failed(end: &CommandEnd, setup: &Setup, tail: &Tail) -> Cause {
    let how = match (end.reason, end.exit_code, &end.signal) {
        (Reason::Timeout, ..) => format!("ran longer than {} s", setup.timeout_seconds()),
        (Reason::OutOfMemory, ..) => "was killed: out of memory".to_owned(),
        (_, Some(code), _) => format!("exited with {code}"),
        (_, None, Some(signal)) => format!("was ended by {signal}"),
        (_, None, None) => "ended in a way that is not known".to_owned(),
    };
    let message = format!("the setup command {how}");
    Cause { exit_code: end.exit_code, output: tail.lines(), ..Cause::told(Reason::SetupFailed, message) }
}

/// The end of an output.
#[derive(Debug, Default)]
struct Tail(VecDeque<u8>);

impl Tail {
    fn put(&mut self, bytes: &[u8]) {
        self.0.extend(&bytes[bytes.len().saturating_sub(TAIL)..]);
        let over = self.0.len().saturating_sub(TAIL);
        self.0.drain(..over);
    }

    /// Its last lines, escaped. The first one may be the end of a longer one.
    fn lines(&self) -> Vec<String> {
        let bytes: Vec<u8> = self.0.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].iter().map(|line| pepo_sandbox::keeper::escape(line, 200)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_and_escaped() {
        let mut tail = Tail::default();
        for n in 0..5000 {
            tail.put(format!("line {n}\n").as_bytes());
        }
        tail.put(b"\x1b[31mred");
        let lines = tail.lines();
        assert_eq!(lines.len(), LINES);
        assert_eq!(lines[LINES - 2], "line 4999");
        assert!(lines[LINES - 1].ends_with("[31mred") && !lines[LINES - 1].contains('\x1b'), "{}", lines[LINES - 1]);
        tail.put(&vec![b'x'; 3 * TAIL]);
        assert_eq!(tail.0.len(), TAIL);
        assert_eq!(Tail::default().lines(), Vec::<String>::new());
    }

    #[test]
    fn what_it_exited_with_is_told() {
        let end = |reason, exit_code, signal: Option<&str>| CommandEnd {
            reason,
            exit_code,
            signal: signal.map(str::to_owned),
            signal_number: None,
            cwd: None,
            at: jiff::Timestamp::UNIX_EPOCH,
        };
        let setup = Setup { command: "x".into(), timeout_seconds: Some(7) };
        let told = |end: CommandEnd| failed(&end, &setup, &Tail::default()).message;
        assert_eq!(told(end(Reason::Exit, Some(3), None)), "the setup command exited with 3");
        assert_eq!(told(end(Reason::Timeout, None, Some("SIGKILL"))), "the setup command ran longer than 7 s");
        assert_eq!(told(end(Reason::Signal, None, Some("SIGSEGV"))), "the setup command was ended by SIGSEGV");
    }
}
