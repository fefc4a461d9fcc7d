//! Files of a Session on the wire.

use serde::{Deserialize, Serialize};

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A pipe, socket or device.
    Other,
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileEntry {
    /// The last component; bytes that are not UTF-8 are replaced, and then `name_base64` has them.
    pub name: String,
    /// The exact bytes of a name that is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_base64: Option<String>,
    /// What it is.
    pub kind: FileKind,
    /// Bytes.
    pub size_bytes: u64,
    /// Permission bits, as octal text (`"0644"`).
    pub mode: String,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change of its bytes.
    pub modified_at: jiff::Timestamp,
    /// Where a symbolic link points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// Answer to `GET …/files/list`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileList {
    /// Sorted by name.
    pub entries: Vec<FileEntry>,
}

/// Body of `POST …/files/make`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MakeFile {
    /// Absolute, or under the home directory.
    pub path: String,
    /// `directory`, or `symlink` with a target.
    pub kind: FileKind,
    /// Where a symbolic link points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Permission bits as octal text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Whether missing parents are made and an existing directory is fine.
    #[serde(default)]
    pub parents: bool,
    /// As whom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Body of `POST …/files/rename`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RenameFile {
    /// The entry.
    pub from: String,
    /// Its new path.
    pub to: String,
    /// As whom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// How a watched entry changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileChangeKind {
    /// It appeared.
    Created,
    /// Its bytes changed.
    Modified,
    /// Its mode, owner or times changed.
    Attributes,
    /// It went away.
    Removed,
    /// Changes were lost: look again.
    Overflow,
}

/// One event of `GET …/files/watch`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileChange {
    /// How.
    pub kind: FileChangeKind,
    /// Relative to the watched path.
    pub path: String,
}
