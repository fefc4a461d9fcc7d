//! Images on the wire.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::ImageId;

/// One Image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Image {
    /// Its id: the first 128 bits of its digest.
    pub id: ImageId,
    /// SHA-256 over its content, 64 hex digits.
    pub digest: String,
    /// The names that point to it.
    pub names: Vec<String>,
    /// Bytes it takes on the host.
    pub size_bytes: u64,
    /// The kernel's release.
    pub kernel: String,
    /// Packages in it.
    pub packages: u32,
    /// When it was built.
    pub created_at: jiff::Timestamp,
    /// Sessions that use it now.
    pub in_use: u32,
}

/// Answer to `DELETE /v1/images/{image}` and `POST /v1/images/gc`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RemovedImages {
    /// What is gone now.
    pub removed: Vec<Image>,
    /// Bytes that are free again.
    pub freed_bytes: u64,
}

/// Body of `POST /v1/images`: what to build. Files of the recipe come along, since no request names a path of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct BuildImage {
    /// The name that shall point to it; the recipe's own where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A recipe that Pepo ships (`base`, `base-dev`), or the text of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,
    /// The text of a recipe file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe_toml: Option<String>,
    /// Packages added to the recipe's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub packages: Vec<String>,
    /// The files that the recipe's `[[file]]` entries name, by their source path as written there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, RecipeFile>,
    /// Build even if an Image of the same inputs is there: for newer packages.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refresh: bool,
}

/// One file that goes into an Image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RecipeFile {
    /// Its bytes.
    pub base64: String,
    /// Whether it is executable.
    #[serde(default)]
    pub executable: bool,
}

/// One SSE event of a build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BuildEvent {
    /// A step began.
    Step {
        /// Which one, from 1.
        number: u32,
        /// Of how many.
        of: u32,
        /// What it does.
        name: String,
    },
    /// How far the present step is, where that is known.
    Progress {
        /// 0..=100.
        percent: u8,
    },
    /// A line from a tool. Package scripts can write anything here.
    Log {
        /// The line.
        line: String,
    },
    /// It is there; the last event.
    Done {
        /// The Image.
        image: Image,
        /// Whether it was there already.
        cached: bool,
    },
    /// It failed; the last event.
    Failed {
        /// Why.
        error: crate::Error,
    },
}
