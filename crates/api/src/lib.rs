//! The public HTTP surface as data: routes, types, typed ids, errors; with feature `client` the typed
//! client, with feature `openapi` the document of it all, with feature `quiet` the stream between edge and pepod.
//!
//! Types here are what goes over the wire and nothing else: no defaults, no parsing of sizes, no policy. The daemon
//! translates them to its own, the edge forwards them, the command line shows them.

#![forbid(unsafe_code)]

mod address;
mod app;
mod command;
mod document;
mod error;
mod event;
mod file;
pub mod hop;
mod id;
mod image;
#[cfg(feature = "openapi")]
pub mod openapi;
mod operator;
mod publish;
pub mod query;
mod routes;
mod scope;
mod secret;
mod session;
mod token;
mod usage;
mod workspace;

#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "quiet")]
pub mod quiet;

pub use address::{Domain, DomainError, Named, PortName};
pub use app::{
    App, AppDefaults, AppIngress, AppLimits, AppQuota, AppSettings, AppUse, AppliedFile, Change, CreateApp, CreateKey,
    Key, KeyCan, NewKey, RotateKey, UpdateApp,
};
pub use command::{
    AttachControl, Command, CommandEnd, CommandLimits, CommandRole, CommandState, CreateCommand, OnDisconnect, Output,
    PtySize, SendSignal, StdinAnswer, StreamEvent, Text,
};
pub use document::{OPENAPI, REFERENCE, REFERENCE_POLICY};
pub use error::{Ended, Error, ErrorBody, ErrorCode, Quota};
pub use event::{Event, FeedEvent};
pub use file::{FileChange, FileChangeKind, FileEntry, FileKind, FileList, MakeFile, RenameFile};
pub use id::{AppId, CommandId, IdError, ImageId, KeyId, RequestId, SandboxId, SessionId, WorkspaceId};
pub use image::{BuildEvent, BuildImage, Image, RecipeFile, RemovedImages};
pub use operator::{
    BackupFile, BackupManifest, Check, ConfigShown, DoctorReport, DrainReport, DrainRequest, EdgeApp, EdgeDecision,
    EdgeDecisions, EdgeKey, EdgePort, EdgeState, EdgeVoid, Health, Leftover, Ready, RestoreReport, SetupReport,
    SetupState, Severity, SweepReport, SweepRequest, Version,
};
pub use publish::{PublishPort, PublishedPort};
pub use routes::{Action, Answer, Audience, Body, REST, ROUTES, Route, Subject, route};
pub use scope::{ADMIN, Bound, Denied, Principal, Resource, Scope, ScopeError, allow};
pub use secret::SecretText;
pub use session::{
    CreateSession, IfTerminated, NameStats, NetworkMode, NetworkProtocol, NetworkRefused, NetworkRule, NetworkSpec,
    NetworkStats, Page, ReadySpec, Reason, Restart, Service, ServiceSpec, ServiceState, Session, SessionState,
    SessionStats, Setup, UpdateSession,
};
#[cfg(feature = "token")]
pub use token::hmac;
pub use token::{CreateToken, NewToken, TOKEN_PREFIX, TokenClaims};
pub use usage::{Amounts, UsageGroup, UsageReport};
pub use workspace::{
    CreateWorkspace, HostVolume, IfBusy, RemovedWorkspace, SessionWorkspace, UpdateWorkspace, Workspace,
    WorkspaceChoice, WorkspaceMode, WorkspaceUsage,
};

/// Subprotocol of the WebSocket on which a command is attached. Binary messages: the first byte is the channel
/// (0 stdin, 1 stdout, 2 stderr, 3 control as JSON [`AttachControl`]), the rest is payload; a message is at most 1 MiB.
///
/// The daemon sends `Start` before anything else, then output from `?offset=` on, in order and without a hole that no
/// `Gap` tells; a caller counts what it got over both outputs and comes back with the sum. `Start` also says which input
/// offset is wanted next: the caller goes on there, so a repeat after a lost connection is never typed twice.
pub const ATTACH_PROTOCOL: &str = "pepo.attach.v1";

/// Subprotocol that a page names beside its token where it opens a WebSocket to a port: it is answered with where the program
/// in the guest chose none, since a browser that named some wants one.
pub const PORT_PROTOCOL: &str = "pepo.port.v1";

/// Token of the `Upgrade` header that turns a request into raw bytes to a port in the guest.
pub const DIAL_UPGRADE: &str = "pepo-dial";
