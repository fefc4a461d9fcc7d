//! Events and the audit log on the wire: one record, two views.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::id::{AppId, CommandId, RequestId, SandboxId, SessionId};

/// Something that happened (`GET /v1/events`), or something that was asked for (`GET /v1/audit`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    /// Counts up over both views; the id of the server-sent event.
    pub id: u64,
    /// When.
    pub at: jiff::Timestamp,
    /// What: a noun and what happened to it (`session.ended`); in the audit log the route that was called
    /// (`session_create`).
    #[serde(rename = "type")]
    pub kind: String,
    /// Whose; absent for what concerns the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app_id: Option<AppId>,
    /// Which Session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Which Sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<SandboxId>,
    /// Which Command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<CommandId>,
    /// Who: `uid:0` (an operator, by the peer's uid), `key_…`, or `pepo` itself.
    pub actor: String,
    /// How it came out: `ok`, a reason (`idle`), or an error's code (`not_found`). In the audit log `unknown` says that
    /// pepod ended before the answer.
    pub outcome: String,
    /// The request that brought it about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<RequestId>,
    /// The Session's labels at that time.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// More, by type. A guest may have had a say in texts here.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub detail: Map<String, Value>,
}

/// One server-sent event of `GET /v1/events` and `GET /v1/audit`: named `event` or `gap`, with this as its data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum FeedEvent {
    /// The next one.
    Event(Box<Event>),
    /// What lay between these ids is no longer kept.
    Gap {
        /// The last one that was seen.
        after: u64,
        /// The first one that is still there.
        from: u64,
    },
}
