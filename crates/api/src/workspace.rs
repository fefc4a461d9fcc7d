//! Workspaces on the wire.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::{AppId, SessionId, WorkspaceId};

/// Body of `POST /v1/workspaces`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateWorkspace {
    /// Unique in its App, usable wherever an id is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Cap on the bytes of its files. The daemon's default where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_mib: Option<u64>,
    /// Cap on its files, directories and links. The daemon's default where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_files: Option<u64>,
    /// Whether one Sandbox may have it at a time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub single_writer: bool,
    /// A directory of the operator's list, by name, in the place of a file system of its own: the caps are not kept then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// For filtering.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Body of `PATCH /v1/workspaces/{workspace}`: what is present is replaced.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct UpdateWorkspace {
    /// A new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A higher cap on its bytes. No Sandbox may have it meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_mib: Option<u64>,
    /// All labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
}

/// One Workspace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Workspace {
    /// Its id.
    pub id: WorkspaceId,
    /// Its App.
    pub app_id: AppId,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Cap on the bytes of its files.
    pub size_mib: u64,
    /// Cap on its files, directories and links.
    pub max_files: u64,
    /// Whether the caps are kept: not in a directory of the operator's.
    pub capped: bool,
    /// Whether one Sandbox may have it at a time.
    pub single_writer: bool,
    /// The operator's directory that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// The Session whose own it is: it goes with it, unless kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// For filtering.
    pub labels: BTreeMap<String, String>,
    /// When it was made.
    pub created_at: jiff::Timestamp,
    /// Sessions that have not ended and use it.
    pub sessions: Vec<SessionId>,
    /// What it uses; in the answer to one alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<WorkspaceUsage>,
}

/// What a Workspace uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WorkspaceUsage {
    /// Bytes that there is room for in all.
    pub bytes: u64,
    /// Of them, those in use.
    pub bytes_used: u64,
    /// Files that there is room for in all.
    pub files: u64,
    /// Of them, those in use.
    pub files_used: u64,
    /// Bytes of the host's disk that it takes.
    pub host_bytes: u64,
}

/// The answer to `DELETE /v1/workspaces/{workspace}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RemovedWorkspace {
    /// Which.
    pub id: WorkspaceId,
    /// Bytes of the host's disk that came free.
    pub freed_bytes: u64,
    /// Sessions that were ended for it.
    pub ended_sessions: Vec<SessionId>,
}

/// Which Workspace a Session gets: its own, or one by id or name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct WorkspaceChoice {
    /// A private one that is made for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<bool>,
    /// With `own`: it stays when the Session is terminated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<bool>,
    /// One that there is, by id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<WorkspaceId>,
    /// One that there is, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether the Session may change it. It may where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<WorkspaceMode>,
    /// What to do while another Sandbox has a Workspace that one may have at a time. Waits where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_busy: Option<IfBusy>,
}

/// A directory of the host at a place in the guest: for local callers alone, with their rights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HostVolume {
    /// The directory, by its absolute path.
    pub source: String,
    /// Where it is in the guest: an absolute path.
    pub target: String,
    /// Whether the Session may change it. It may where absent.
    #[serde(default)]
    pub mode: WorkspaceMode,
}

/// What a Session may do with its Workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceMode {
    /// Read and write.
    #[default]
    Rw,
    /// Read alone.
    Ro,
}

/// What an activation does while another Sandbox has the Workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum IfBusy {
    /// Waits for it, as long as a start may take.
    #[default]
    Wait,
    /// Fails at once.
    Refuse,
}

/// A Session's Workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionWorkspace {
    /// Which.
    pub id: WorkspaceId,
    /// Where it is in the guest.
    pub path: String,
    /// What the Session may do with it.
    pub mode: WorkspaceMode,
    /// Whether it was made for this Session and goes with it.
    pub own: bool,
    /// With `own`: it stays when the Session is terminated.
    pub keep: bool,
    /// Once it is gone with the Session: bytes of the host's disk that came free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freed_bytes: Option<u64>,
}

/// A field that may be absent, null or there.
pub(crate) fn given<'de, D, T>(deserializer: D) -> Result<Option<Option<T>>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::<T>::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CreateSession;

    #[test]
    fn absent_null_and_given_are_three_things() {
        let parse = |text: &str| serde_json::from_str::<CreateSession>(text).expect("a body").workspace;
        assert_eq!(parse("{}"), None);
        assert_eq!(parse(r#"{"workspace": null}"#), Some(None));
        let own = WorkspaceChoice { own: Some(true), ..Default::default() };
        assert_eq!(parse(r#"{"workspace": {"own": true}}"#), Some(Some(own)));
        let none = CreateSession { workspace: Some(None), ..Default::default() };
        assert_eq!(serde_json::to_string(&none).expect("json"), r#"{"workspace":null}"#);
        assert!(serde_json::from_str::<CreateSession>(r#"{"workspace": {"pwn": true}}"#).is_err());
    }
}
