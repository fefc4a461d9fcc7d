//! Commands on the wire.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::{CommandId, SessionId};
use crate::session::Reason;

/// Body of `POST /v1/sessions/{session}/commands`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateCommand {
    /// A line for `/bin/bash -c`. Exactly one of this and `argv`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// A program and its arguments, passed on untouched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// A UUIDv7 made by the caller; the same again attaches to the command that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<CommandId>,
    /// The working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Added to the Session's environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// A user's name or uid in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// All of its input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// Input follows, by `POST …/stdin` or an attachment.
    #[serde(default, skip_serializing_if = "is_false")]
    pub open_stdin: bool,
    /// A terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<PtySize>,
    /// Evaluate in the lasting bash of this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    /// Kill it after so long; 0 is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// How long the answer waits for the end. 30 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_seconds: Option<u64>,
    /// How much of each output the answer carries: head and tail. 65536 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output_bytes: Option<u64>,
    /// What becomes of it when the caller goes away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_disconnect: Option<OnDisconnect>,
    /// Whether it counts as activity. True where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeps_alive: Option<bool>,
    /// What all its processes may have together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<CommandLimits>,
}

/// What the processes of a command may have together, within what its Session has. What is absent is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CommandLimits {
    /// Memory, at least 4: past it the command is killed, with reason `out_of_memory`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// Processes and threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
    /// Processor time, in hundredths of a processor: 50 is half of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<u32>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// What becomes of a command when its caller goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnDisconnect {
    /// It goes on.
    Keep,
    /// Its tree is killed when the last caller that waits for it, follows or attaches it is gone; also when its start
    /// was answered and nobody attaches within 30 seconds.
    Kill,
}

/// A terminal's size in character cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PtySize {
    /// Columns, 1..=1000.
    pub cols: u16,
    /// Rows, 1..=1000.
    pub rows: u16,
}

/// Whether a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum CommandState {
    /// It runs.
    Running,
    /// It has ended.
    Exited,
}

/// Output as JSON: text where it is UTF-8, else base64.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum Text {
    /// UTF-8.
    Utf8(String),
    /// Not UTF-8.
    Binary {
        /// The bytes.
        base64: String,
    },
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CommandEnd {
    /// Why.
    pub reason: Reason,
    /// Its exit code, where it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The signal's name (`SIGKILL`), where one ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// The signal's number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal_number: Option<i32>,
    /// In a shell: the working directory afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// When.
    pub at: jiff::Timestamp,
}

/// What a command is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum CommandRole {
    /// Somebody ran it.
    #[default]
    Command,
    /// It set the Sandbox up.
    Setup,
    /// It is a run of a Service.
    Service,
}

/// One command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Command {
    /// Its id.
    pub id: CommandId,
    /// Its Session.
    pub session_id: SessionId,
    /// The activation it runs in.
    pub activation: u64,
    /// Whether it runs.
    pub state: CommandState,
    /// What it is for.
    #[serde(default)]
    pub role: CommandRole,
    /// The Service it is a run of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// Program and arguments, or the one line given as `command`.
    pub argv: Vec<String>,
    /// The lasting shell it runs in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    /// What becomes of it when its caller goes away.
    pub on_disconnect: OnDisconnect,
    /// What its processes may have together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<CommandLimits>,
    /// Whether it has a terminal.
    pub pty: bool,
    /// When it was started.
    pub started_at: jiff::Timestamp,
    /// How it ended.
    #[serde(default, skip_serializing_if = "Option::is_none", flatten)]
    pub end: Option<CommandEnd>,
    /// Bytes of standard output, as far as known.
    pub stdout_bytes: u64,
    /// Bytes of standard error, as far as known.
    pub stderr_bytes: u64,
}

/// The JSON answer to running or looking at a command: the command and what it wrote.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Output {
    /// The command.
    #[serde(flatten)]
    pub command: Command,
    /// Standard output from the asked offset on, or head and tail of it.
    pub stdout: Text,
    /// Standard error, likewise.
    pub stderr: Text,
    /// Whether anything is missing between head and tail or before the head.
    pub truncated: bool,
    /// Bytes missing from both.
    pub missing_bytes: u64,
    /// Where the next look goes on.
    pub next_offset: u64,
}

/// One event of the SSE form. The SSE id is `offset` after it, so `Last-Event-ID` resumes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum StreamEvent {
    /// The command, once, first.
    Start {
        /// The command.
        command: Box<Command>,
    },
    /// Output.
    Stdout {
        /// Offset over both outputs of its first byte.
        offset: u64,
        /// The bytes.
        data: Text,
    },
    /// Error output.
    Stderr {
        /// Offset over both outputs of its first byte.
        offset: u64,
        /// The bytes.
        data: Text,
    },
    /// Output that is no longer kept.
    Gap {
        /// First missing offset.
        from: u64,
        /// First offset after the hole.
        to: u64,
    },
    /// The end, last.
    Exit {
        /// The command with its end.
        command: Box<Command>,
    },
    /// The stream broke; nothing follows.
    Error {
        /// Why.
        error: Box<crate::Error>,
    },
}

/// JSON on channel 3 of an attachment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AttachControl {
    /// From the daemon, first: the command and where its input stands.
    Start {
        /// The command.
        command: Box<Command>,
        /// The next input offset wanted.
        input_offset: u64,
    },
    /// From the daemon: output that is no longer kept.
    Gap {
        /// First missing offset.
        from: u64,
        /// First offset after the hole.
        to: u64,
    },
    /// From the daemon, last: the end.
    Exit {
        /// The command with its end.
        command: Box<Command>,
    },
    /// From the daemon, last: the stream broke.
    Error {
        /// Why.
        error: Box<crate::Error>,
    },
    /// From the caller: the terminal's new size.
    Resize {
        /// Columns.
        cols: u16,
        /// Rows.
        rows: u16,
    },
    /// From the caller: a signal, by name (`SIGINT`) or number as text.
    Signal {
        /// The signal.
        signal: String,
    },
    /// From the caller: no more input.
    Eof,
}

/// Body of `POST …/signal`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SendSignal {
    /// A name with or without `SIG`, or a number as text.
    pub signal: String,
    /// Every process of the command.
    #[serde(default)]
    pub tree: bool,
}

/// Answer to `POST …/stdin`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StdinAnswer {
    /// The next input offset wanted.
    pub next_offset: u64,
    /// Whether more is taken.
    pub open: bool,
}
