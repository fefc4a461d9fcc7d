//! Published ports on the wire: what anybody may open who has the address.

use serde::{Deserialize, Serialize};

use crate::id::SessionId;

/// Body of `PUT /v1/sessions/{session}/published/{port}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PublishPort {
    /// For how long, from now on: at most 604800, a week. 3600 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_seconds: Option<u64>,
}

/// A port that is published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PublishedPort {
    /// The Session.
    pub session_id: SessionId,
    /// The port in it.
    pub port: u16,
    /// Its host name. Scheme and port of its URL are the edge's, as whoever calls reaches it.
    pub host: String,
    /// Who published it.
    pub published_by: String,
    /// When.
    pub published_at: jiff::Timestamp,
    /// When it ends by itself.
    pub expires_at: jiff::Timestamp,
}
