//! Errors: one closed list of codes, each with its HTTP status, and the body that carries one.

use http::StatusCode;
use serde::{Deserialize, Serialize};

use crate::session::Reason;

macro_rules! codes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $text:literal, $status:ident, $retry:literal;)+) => {
        /// What went wrong, as a word that programs decide by.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum ErrorCode {
            $($(#[doc = $doc])+ #[serde(rename = $text)] $variant,)+
        }

        impl ErrorCode {
            /// Every code, in the order of the documentation.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$variant),+];

            /// The word on the wire.
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$variant => $text),+ }
            }

            /// The HTTP status it is answered with.
            pub fn status(self) -> StatusCode {
                match self { $(ErrorCode::$variant => StatusCode::$status),+ }
            }

            /// Whether the same request may succeed later without a change.
            pub fn retryable(self) -> bool {
                match self { $(ErrorCode::$variant => $retry),+ }
            }

            /// What it means, for `docs/errors.md`.
            pub fn meaning(self) -> &'static str {
                match self { $(ErrorCode::$variant => concat!($($doc),+)),+ }
            }
        }
    };
}

codes! {
    /// The request is not well-formed HTTP or JSON.
    BadRequest = "bad_request", BAD_REQUEST, false;
    /// No credential, or one that is not valid.
    Unauthenticated = "unauthenticated", UNAUTHORIZED, false;
    /// The credential does not allow this.
    Forbidden = "forbidden", FORBIDDEN, false;
    /// There is no such thing, or it belongs to another App.
    NotFound = "not_found", NOT_FOUND, false;
    /// The path exists, the method does not.
    MethodNotAllowed = "method_not_allowed", METHOD_NOT_ALLOWED, false;
    /// It clashes with what is there: a name taken, a file that exists, a directory that is not empty.
    Conflict = "conflict", CONFLICT, false;
    /// The Session has ended; `ended` says why and when.
    SessionTerminated = "session_terminated", GONE, false;
    /// The Sandbox ended while this operation ran; `ended` says why.
    SandboxEnded = "sandbox_ended", GONE, false;
    /// The output is no longer kept.
    OutputGone = "output_gone", GONE, false;
    /// The Sandbox was replaced since the activation named in `If-Activation`.
    SandboxReplaced = "sandbox_replaced", PRECONDITION_FAILED, false;
    /// The body is larger than this route takes.
    PayloadTooLarge = "payload_too_large", PAYLOAD_TOO_LARGE, false;
    /// The range asked for lies outside of what there is.
    RangeNotSatisfiable = "range_not_satisfiable", RANGE_NOT_SATISFIABLE, false;
    /// A value is not valid; `param` names it.
    Invalid = "invalid", UNPROCESSABLE_ENTITY, false;
    /// The setting exists but this release or this host cannot do it; `param` names it.
    Unsupported = "unsupported", UNPROCESSABLE_ENTITY, false;
    /// The Image is not there.
    ImageMissing = "image_missing", UNPROCESSABLE_ENTITY, false;
    /// The command could not be started: the program is not there (a shell's 127).
    CommandNotFound = "command_not_found", UNPROCESSABLE_ENTITY, false;
    /// The command could not be started: the program cannot be executed (a shell's 126).
    CommandNotStarted = "command_not_started", UNPROCESSABLE_ENTITY, false;
    /// The lasting shell of that name died.
    ShellLost = "shell_lost", CONFLICT, false;
    /// The caller's own quota or rate is used up.
    TooManyRequests = "too_many_requests", TOO_MANY_REQUESTS, true;
    /// A limit of this Session is used up: streams, commands.
    Busy = "busy", TOO_MANY_REQUESTS, true;
    /// The host has no room for another Sandbox now.
    NoCapacity = "capacity", SERVICE_UNAVAILABLE, true;
    /// The host is being drained: it takes nothing new.
    Draining = "draining", SERVICE_UNAVAILABLE, true;
    /// The daemon is starting, stopping or not reachable.
    Unavailable = "unavailable", SERVICE_UNAVAILABLE, true;
    /// The disk of the guest or of the host is full.
    DiskFull = "disk_full", INSUFFICIENT_STORAGE, false;
    /// The Sandbox could not be started.
    ActivationFailed = "activation_failed", BAD_GATEWAY, true;
    /// The guest answered with something that is not our protocol, or not at all.
    GuestFailed = "guest_failed", BAD_GATEWAY, true;
    /// A wait in the guest or for it took too long.
    Timeout = "timeout", GATEWAY_TIMEOUT, true;
    /// A fault of Pepo itself.
    Internal = "internal", INTERNAL_SERVER_ERROR, true;
}

/// What every answer that is not a success carries.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    /// The error.
    pub error: Error,
}

/// One error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[error("{message}")]
pub struct Error {
    /// The kind.
    pub code: ErrorCode,
    /// What went wrong, with the names and numbers in it.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The field or parameter it is about, as a path (`network.allow[2]`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param: Option<String>,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// The request's id, also in the header `Pepo-Request-Id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<crate::RequestId>,
    /// For `session_terminated` and `sandbox_ended`: why and when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    /// For a quota that is used up: which one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<Quota>,
}

/// A quota of an App that is used up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Quota {
    /// Its name, as in the App's `quota`.
    pub name: String,
    /// What is used.
    pub used: u64,
    /// What may be used.
    pub limit: u64,
}

/// The end of a Session or Sandbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Ended {
    /// Why.
    pub reason: Reason,
    /// When.
    pub at: jiff::Timestamp,
    /// One sentence more about it, where there is one. A guest may have had a say in it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The last lines of the guest's console, where the end was not orderly. A guest can write anything here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_console_lines: Vec<String>,
    /// With `setup_failed`: what the setup command exited with, where it exited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// With `setup_failed`: the last lines that the setup command wrote. A guest can write anything here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_output_lines: Vec<String>,
}

impl Ended {
    /// An end that the word says in full.
    pub fn new(reason: Reason, at: jiff::Timestamp) -> Self {
        Ended {
            reason,
            at,
            message: String::new(),
            last_console_lines: Vec::new(),
            exit_code: None,
            last_output_lines: Vec::new(),
        }
    }
}

impl Error {
    /// An error of this kind that says this.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Error {
            code,
            message: message.into(),
            hint: None,
            param: None,
            retryable: code.retryable(),
            request_id: None,
            ended: None,
            quota: None,
        }
    }

    /// Adds what to do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds which field it is about.
    pub fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Adds which quota it is about.
    pub fn quota(mut self, quota: Quota) -> Self {
        self.quota = Some(quota);
        self
    }

    /// Adds how the Session or Sandbox ended.
    pub fn ended(mut self, ended: Ended) -> Self {
        self.ended = Some(ended);
        self
    }
}
