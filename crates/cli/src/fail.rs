//! How a verb fails: one sentence, what to do about it, an exit code. Printed once, by `main`, with everything escaped.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use pepo_api::client::ClientError;
use pepo_api::{Ended, ErrorCode, Reason};

use crate::escape;

/// A failed verb.
#[derive(Debug)]
pub struct Failure {
    message: String,
    hints: Vec<String>,
    /// Lines of a guest's console, which explain but prove nothing.
    console: Vec<String>,
    /// Lines that a setup command wrote, likewise.
    output: Vec<String>,
    /// The exit code, where it is not the verb's usual one.
    pub code: Option<u8>,
}

/// Most functions of this program.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// With this sentence: lower case, no full stop.
    pub fn new(message: impl fmt::Display) -> Self {
        Failure { message: message.to_string(), hints: Vec::new(), console: Vec::new(), output: Vec::new(), code: None }
    }

    /// Adds what to do.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Adds what a guest left to an end.
    pub fn evidence(mut self, ended: &Ended) -> Self {
        self.console = ended.last_console_lines.clone();
        self.output = ended.last_output_lines.clone();
        self
    }

    /// Sets the exit code.
    pub fn code(mut self, code: u8) -> Self {
        self.code = Some(code);
        self
    }

    /// Puts behind the sentence why.
    pub fn because(mut self, why: impl fmt::Display) -> Self {
        self.message = format!("{}: {why}", self.message);
        self
    }

    /// Puts before the sentence what was being done.
    pub fn doing(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// The sentence, as it is.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Writes it to standard error.
    pub fn show(&self) {
        let mut text = String::new();
        let mut lines = self.message.lines();
        text.push_str(&format!("pepo: {}\n", escape::line(lines.next().unwrap_or_default())));
        for more in lines {
            text.push_str(&format!("      {}\n", escape::line(more)));
        }
        for line in &self.console {
            text.push_str(&console_line(line));
        }
        for line in &self.output {
            text.push_str(&format!("setup: {}\n", escape::line(line)));
        }
        for hint in &self.hints {
            text.push_str(&format!("hint: {}\n", escape::line(hint)));
        }
        // Standard error may be gone; there is no other place to say so.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

fn console_line(line: &str) -> String {
    format!("console: {}\n", escape::line(line))
}

/// Lines of a guest's console on standard error, which explain but prove nothing.
pub fn console(lines: &[String]) {
    let text: String = lines.iter().map(|line| console_line(line)).collect();
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Whether notes are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notes {
    /// They are.
    On,
    /// Only failures are.
    Off,
}

/// A line on standard error that is not a failure.
pub fn note(text: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "pepo: {}", escape::line(&text.to_string()));
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let mut failure = Failure::new(chain(&error));
        failure.hints.extend(error.hint());
        if let ClientError::Api(error) = &error {
            if let Some(ended) = &error.ended {
                // The sentence says why already, unless it is a short one.
                let said = !ended.message.is_empty() && failure.message.contains(&ended.message);
                if !said && !failure.message.contains(&crate::render::word(&ended.reason)) {
                    failure.message = format!("{} ({})", failure.message, why(ended));
                }
                failure = failure.evidence(ended);
            }
            failure.code = match error.code {
                ErrorCode::CommandNotFound => Some(127),
                ErrorCode::CommandNotStarted => Some(126),
                ErrorCode::SandboxEnded => Some(137),
                _ => None,
            };
        }
        failure
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        let failure = Failure::new(&error);
        // Nobody reads our output any more: the exit code of a program that a closed pipe ended.
        if error.kind() == std::io::ErrorKind::BrokenPipe { failure.code(CLOSED_PIPE) } else { failure }
    }
}

/// 128 + SIGPIPE. `main` says nothing for it.
pub const CLOSED_PIPE: u8 = 141;

/// An error and its sources in one line, each text once.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let more = source.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        next = source.source();
    }
    text
}

/// Why something ended, in words.
pub fn why(ended: &Ended) -> String {
    match ended.message.is_empty() {
        true => reason(ended.reason).to_owned(),
        false => format!("{}: {}", reason(ended.reason), ended.message),
    }
}

/// A reason in words.
pub fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Exit => "exited",
        Reason::Signal => "ended by a signal",
        Reason::Timeout => "its time was over",
        Reason::Killed => "killed",
        Reason::OutOfMemory => "out of memory",
        Reason::GuestPanic => "the guest's kernel panicked",
        Reason::GuestInitDied => "the guest's first process died",
        Reason::GuestSilent => "the guest stopped answering",
        Reason::VmmExit => "the machine's process ended",
        Reason::KilledOutside => "killed by something outside of Pepo",
        Reason::MountLost => "a mount was lost",
        Reason::SetupFailed => "it could not be set up",
        Reason::Idle => "idle",
        Reason::Lifetime => "its longest activation was over",
        Reason::Expired => "expired",
        Reason::Quota => "a quota was used up",
        Reason::Operator => "ended on request",
        Reason::Drain => "the host is being drained",
        Reason::HostRestart => "the host restarted",
        Reason::Unknown => "for a reason that is not known",
    }
}

/// The program's end.
pub fn exit(code: u8) -> ExitCode {
    ExitCode::from(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_pepo_answers_becomes_a_sentence_and_a_code() {
        let mut error = pepo_api::Error::new(ErrorCode::SandboxEnded, "the Sandbox ended");
        error.hint = Some("look at the console".into());
        let ended =
            r#"{"reason": "guest_panic", "at": "1970-01-01T00:00:00Z", "last_console_lines": ["panic\u001b[2J"]}"#;
        error.ended = Some(serde_json::from_str(ended).unwrap());
        let failure = Failure::from(ClientError::Api(Box::new(error)));
        assert_eq!(failure.message(), "the Sandbox ended (the guest's kernel panicked)");
        assert_eq!(failure.code, Some(137));
        assert_eq!(failure.hints, ["look at the console"]);
        assert_eq!(failure.console, ["panic\x1b[2J"]);
        let not_found = pepo_api::Error::new(ErrorCode::CommandNotFound, "x: not found");
        assert_eq!(Failure::from(ClientError::Api(Box::new(not_found))).code, Some(127));
    }

    #[test]
    fn a_chain_says_each_thing_once() {
        let inner = std::io::Error::other("refused");
        let outer = ClientError::Transport { what: "connecting to /x".into(), source: Box::new(inner) };
        assert_eq!(chain(&outer), "connecting to /x: refused");
    }
}
