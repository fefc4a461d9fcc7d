//! What the operator asks of a host, and what the edge asks of the daemon.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::id::{AppId, KeyId, RequestId, SessionId};
use crate::scope::Scope;
use crate::secret::SecretText;

/// Answer to `GET /v1/version`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Version {
    /// The release; `+fake` marks a test build.
    pub version: String,
    /// Generation of the guest protocol.
    pub guest_generation: u32,
    /// SHA-256 of the guest agent, 64 hex digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_digest: Option<String>,
    /// What runs the guests, and why that: one line.
    pub runs_on: String,
    /// The instance's tag in host names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The domain below which ports have host names of their own: `{port}-{32 hex digits of the Session's id}.{domain}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

/// Answer to `GET /healthz` and `/readyz`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    /// `ok`, or what is missing.
    pub status: String,
}

/// The one JSON line that `pepod serve --ready-fd N` writes to N, and then closes it, once both sockets answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Ready {
    /// Path of the operator's socket.
    pub operator_socket: String,
    /// Path of the edge's socket.
    pub edge_socket: String,
    /// The first key of the instance, on its first start only: nobody can read it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Info,
    /// A weakness.
    Warning,
    /// Sandboxes cannot run, or not safely.
    Error,
}

/// One probe of `pepo doctor`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Check {
    /// A short fixed name (`cgroup`, `uid_range`).
    pub name: String,
    /// How it stands.
    pub severity: Severity,
    /// What was found.
    pub found: String,
    /// What to do, as a command where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// Answer to `GET /v1/doctor`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DoctorReport {
    /// Every probe.
    pub checks: Vec<Check>,
}

/// Whether a part that the host lacks is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SetupState {
    /// It is not there.
    Missing,
    /// It is there, byte for byte.
    Installed,
    /// Something else is in its place.
    Damaged,
    /// There is no release of it for this kind of machine.
    Unsupported,
}

/// What `pepod setup` says of the release it installs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SetupReport {
    /// What it is.
    pub name: String,
    /// The one release that this Pepo takes.
    pub version: String,
    /// The kind of machine.
    pub arch: String,
    /// How it stands.
    pub state: SetupState,
    /// The same in words.
    pub found: String,
    /// Where it is installed.
    pub directory: String,
    /// Where the release is got from.
    pub url: String,
    /// The name of the file that is got.
    pub file: String,
    /// Its SHA-256, 64 hex digits.
    pub sha256: String,
}

/// Body of `POST /v1/sweep`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SweepRequest {
    /// List only.
    #[serde(default)]
    pub dry_run: bool,
    /// Also what belongs to instances that nobody runs.
    #[serde(default)]
    pub all: bool,
}

/// Body of `POST /v1/drain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// How long what runs may take; then it is stopped.
    #[serde(default)]
    pub deadline_seconds: u64,
    /// Takes new work again instead.
    #[serde(default)]
    pub cancel: bool,
}

/// Answer to `POST /v1/drain`, when no Sandbox is left or draining was cancelled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DrainReport {
    /// Sandboxes that went after what ran in them had finished.
    pub released: u32,
    /// Sandboxes that were stopped at the deadline.
    pub cut: u32,
    /// Sandboxes that are left.
    pub left: u32,
    /// Whether new work is taken again.
    pub cancelled: bool,
}

/// Something on the host that no live Sandbox accounts for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Leftover {
    /// `cgroup`, `process`, `directory`, `image`, …
    pub kind: String,
    /// Its name on the host.
    pub name: String,
    /// Seconds since it was made, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<u64>,
    /// The instance or Sandbox it belonged to.
    pub owner: String,
    /// Whether it is gone now.
    pub removed: bool,
    /// Why it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Answer to `POST /v1/sweep`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SweepReport {
    /// What was found.
    pub leftovers: Vec<Leftover>,
}

/// Answer to `GET /v1/config`: every setting with its value and where that came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConfigShown {
    /// Setting (`sandbox.memory_mib`) to value and origin.
    pub settings: BTreeMap<String, (serde_json::Value, String)>,
}

/// Answer to `GET /v1/edge/state`, on the edge's socket only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EdgeState {
    /// Counts changes.
    pub generation: u64,
    /// Keys that are valid. Absent where `after` is this generation: the asker has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<Vec<EdgeKey>>,
    /// The Apps; beside the keys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apps: Vec<EdgeApp>,
    /// What Session tokens are signed with, 64 hex digits; beside the keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_key: Option<SecretText>,
    /// Session tokens that are revoked and not over yet; beside the keys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub void: Vec<EdgeVoid>,
    /// Ports that are published and not over yet; beside the keys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<EdgePort>,
}

/// A published port as the edge needs it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EdgePort {
    /// Whose the Session is.
    pub app_id: AppId,
    /// The Session.
    pub session_id: SessionId,
    /// The port in it.
    pub port: u16,
    /// When that ends.
    pub expires_at: jiff::Timestamp,
}

/// An App as the edge needs it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EdgeApp {
    /// Its id.
    pub id: AppId,
    /// Its name.
    pub name: String,
    /// Where its callers may come from, as `address/bits`; empty: from anywhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// Requests a second that all of its callers may make together; absent: as the edge is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<u64>,
}

/// Tokens of a Session that were made before this time are revoked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EdgeVoid {
    /// The Session.
    pub session_id: SessionId,
    /// Milliseconds since 1970.
    pub before: i64,
}

/// Body of `POST /v1/edge/decisions`, on the edge's socket only: what the edge refused by itself, for the one log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct EdgeDecisions {
    /// At most 256.
    pub decisions: Vec<EdgeDecision>,
}

/// What the edge refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct EdgeDecision {
    /// When, the first of them.
    pub at: jiff::Timestamp,
    /// The row's name; `-` where there was none.
    pub route: String,
    /// Why: an error's code.
    pub code: ErrorCode,
    /// Whose, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app_id: Option<AppId>,
    /// Who, where that is known, as the log names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<String>,
    /// The address it came from; absent where the entry is about several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub source: Option<std::net::IpAddr>,
    /// The request, the first of them.
    pub request_id: RequestId,
    /// How many alike.
    pub times: u64,
}

/// A key as the edge needs it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EdgeKey {
    /// Its id.
    pub id: KeyId,
    /// The App it belongs to.
    pub app_id: AppId,
    /// SHA-256 of the key's text, 64 hex digits.
    pub sha256: String,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// Where it may be used from, as `address/bits`; empty: from anywhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// When it ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<jiff::Timestamp>,
}

/// `manifest.json` of a backup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BackupManifest {
    /// Of the archive.
    pub format: u32,
    /// The release that made it.
    pub release: String,
    /// The store's schema.
    pub schema: u32,
    /// When the store was as it is in it.
    pub made_at: jiff::Timestamp,
    /// Every file in it but this one.
    pub files: BTreeMap<String, BackupFile>,
    /// What is not in it, for people.
    pub lacks: Vec<String>,
}

/// A file of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BackupFile {
    /// Its length.
    pub bytes: u64,
    /// SHA-256, 64 hex digits.
    pub sha256: String,
}

/// What `pepod restore` prints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RestoreReport {
    /// Of the backup.
    pub manifest: BackupManifest,
    /// What happened beside it, for people.
    pub notes: Vec<String>,
}
