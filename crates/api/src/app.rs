//! Apps and their keys on the wire.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::id::{AppId, KeyId};
use crate::scope::Scope;
use crate::session::{NetworkSpec, settings};

settings! {
    /// What an App's Sessions get where they name nothing. What is absent is the daemon's own default.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
    #[serde(deny_unknown_fields)]
    pub struct AppDefaults {}
}

/// The most that one Session of the App may ask for. Absent: what the host allows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AppLimits {
    /// Virtual processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// Guest memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// Scratch disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_mib: Option<u32>,
    /// Keep-alive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_alive_seconds: Option<u64>,
}

/// The most that all Sessions of the App may have together: the operator's to set. Absent: no such limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AppQuota {
    /// Sessions that have not ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<u64>,
    /// Sessions with a Sandbox, or about to get one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandboxes: Option<u64>,
    /// Memory of those.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Virtual processors of those.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u64>,
    /// Commands that run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commands: Option<u64>,
    /// Caps of its Workspaces together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_mib: Option<u64>,
    /// Requests a second through the edge, of all its callers together. Absent: as the edge is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<u64>,
}

/// What an App is set to: what its file says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AppSettings {
    /// For filtering.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What its Sessions get where they name nothing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub defaults: AppDefaults,
    /// The most that one Session may ask for.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: AppLimits,
    /// The most that all of them may have.
    #[serde(default, skip_serializing_if = "is_default")]
    pub quota: AppQuota,
    /// What its Sessions may reach at the most, and what those get that name nothing. Absent: what this instance allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSpec>,
    /// Who may come in through the edge.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ingress: AppIngress,
}

/// Who may come in through the edge for an App, whatever credential they have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AppIngress {
    /// Addresses they may come from, `192.0.2.0/24` or `2001:db8::/32`. Absent or empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Body of `POST /v1/apps`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateApp {
    /// Its name, which `Pepo-App` takes too.
    pub name: String,
    /// For filtering.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What its Sessions get where they name nothing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub defaults: AppDefaults,
    /// The most that one Session may ask for.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: AppLimits,
    /// The most that all of them may have.
    #[serde(default, skip_serializing_if = "is_default")]
    pub quota: AppQuota,
    /// What its Sessions may reach at the most, and what those get that name nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSpec>,
    /// Who may come in through the edge.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ingress: AppIngress,
}

/// Body of `PATCH /v1/apps/{app}`: each of these is replaced whole where it is present.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct UpdateApp {
    /// A new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// All labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// All defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defaults: Option<AppDefaults>,
    /// All limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<AppLimits>,
    /// The whole quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<AppQuota>,
    /// What its Sessions may reach, from now on; `null` for what this instance allows.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::session::present")]
    pub network: Option<Option<NetworkSpec>>,
    /// Who may come in through the edge, all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<AppIngress>,
}

/// One App.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct App {
    /// Its id.
    pub id: AppId,
    /// Its name.
    pub name: String,
    /// What it is set to.
    #[serde(flatten)]
    pub settings: AppSettings,
    /// The version of its file.
    pub version: u64,
    /// When it was made.
    pub created_at: jiff::Timestamp,
    /// What it has now.
    pub used: AppUse,
}

/// What an App has now, in the terms of its quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AppUse {
    /// Sessions that have not ended.
    pub sessions: u64,
    /// Of those, the ones with a Sandbox or about to get one.
    pub sandboxes: u64,
    /// Memory of those.
    pub memory_mib: u64,
    /// Virtual processors of those.
    pub cpus: u64,
    /// Commands that run.
    pub commands: u64,
    /// Caps of its Workspaces together.
    pub workspace_mib: u64,
}

/// A setting that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Change {
    /// Which (`defaults.image`).
    pub setting: String,
    /// As it was; absent where it was not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Value>,
    /// As it is; absent where it is not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Value>,
}

/// Answer to `PUT /v1/apps/{app}/file`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AppliedFile {
    /// The version that is in force now.
    pub version: u64,
    /// What it changes. Nothing: the file said what is in force.
    pub changes: Vec<Change>,
    /// Whether they were made.
    pub applied: bool,
}

/// Body of `POST /v1/keys`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateKey {
    /// What it is for; unique among the App's keys that are valid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What it may do. Absent or empty: `*`, everything but the App's administration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scopes: Vec<Scope>,
    /// How long it is valid. Absent: until it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_seconds: Option<u64>,
    /// Addresses it may be used from, `192.0.2.0/24` or `2001:db8::/32`. Absent or empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
}

/// Body of `POST /v1/keys/{key}/rotate`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RotateKey {
    /// How long the old one stays valid. 86400 where absent; 0: not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap_seconds: Option<u64>,
}

/// One key: what can be known of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Key {
    /// Its id.
    pub id: KeyId,
    /// Its App.
    pub app_id: AppId,
    /// What it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// How its text begins, to tell keys apart.
    pub prefix: String,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// Where it may be used from; empty: from anywhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// Who made it.
    pub created_by: String,
    /// When.
    pub created_at: jiff::Timestamp,
    /// When it ends by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<jiff::Timestamp>,
    /// When it was revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<jiff::Timestamp>,
    /// The key that takes its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced_by: Option<KeyId>,
}

/// Answer to `GET /v1/keys/{key}/can`: what the edge and the daemon would say to a request with that key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeyCan {
    /// Whether it could.
    pub allowed: bool,
    /// Which scope lets it, or what is in the way.
    pub because: String,
    /// The action that was looked at, as scopes name it.
    pub action: String,
    /// The key.
    pub key_id: KeyId,
    /// The only addresses that it is let in from; empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
}

/// A key that was just made: the only time its text is told.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewKey {
    /// The text to authenticate with. Nobody can read it again.
    pub key: String,
    /// What is known of it.
    #[serde(flatten)]
    pub about: Key,
}

impl std::fmt::Debug for NewKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewKey").field("about", &self.about).finish_non_exhaustive()
    }
}
