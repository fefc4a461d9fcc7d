//! What Apps have used, as numbers that one can bill.

use serde::{Deserialize, Serialize};

use crate::AppId;

/// Amounts of use. All whole numbers, so that parts add up to their total exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Amounts {
    /// How long Sandboxes were a Session's, in milliseconds.
    pub wall_ms: u64,
    /// Processor time that they used on the host, in microseconds.
    pub cpu_us: u64,
    /// Memory that they were given, times how long, in MiB x milliseconds.
    pub memory_allocated_mib_ms: u64,
    /// Memory that they had in use on the host, times how long, in MiB x milliseconds.
    pub memory_used_mib_ms: u64,
    /// Scratch disk that they were given, times how long, in MiB x milliseconds.
    pub disk_allocated_mib_ms: u64,
    /// Scratch disk that they filled, times how long, in MiB x milliseconds.
    pub disk_used_mib_ms: u64,
    /// Bytes read for them.
    pub read_bytes: u64,
    /// Bytes written for them.
    pub write_bytes: u64,
    /// Bytes sent into the network.
    pub sent_bytes: u64,
    /// Bytes received from it.
    pub received_bytes: u64,
    /// Activations that began.
    pub activations: u64,
    /// What Workspaces may fill, times how long they were there, in MiB x milliseconds. An App's, and no Session's.
    #[serde(default)]
    pub workspace_allocated_mib_ms: u64,
}

impl std::ops::AddAssign for Amounts {
    fn add_assign(&mut self, other: Self) {
        self.wall_ms += other.wall_ms;
        self.cpu_us += other.cpu_us;
        self.memory_allocated_mib_ms += other.memory_allocated_mib_ms;
        self.memory_used_mib_ms += other.memory_used_mib_ms;
        self.disk_allocated_mib_ms += other.disk_allocated_mib_ms;
        self.disk_used_mib_ms += other.disk_used_mib_ms;
        self.read_bytes += other.read_bytes;
        self.write_bytes += other.write_bytes;
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        self.activations += other.activations;
        self.workspace_allocated_mib_ms += other.workspace_allocated_mib_ms;
    }
}

/// One part of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsageGroup {
    /// What its members have in common: an id, a label's value, a day. Absent: those without that label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// What they used.
    #[serde(flatten)]
    pub amounts: Amounts,
}

/// What was used between two times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsageReport {
    /// The App it is of; absent: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app_id: Option<AppId>,
    /// From this time on.
    pub from: jiff::Timestamp,
    /// Up to this time, itself not included.
    pub to: jiff::Timestamp,
    /// What the parts are grouped by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_by: Option<String>,
    /// All of it: the sum of the parts.
    pub total: Amounts,
    /// The parts.
    pub groups: Vec<UsageGroup>,
}
