//! Sessions on the wire.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::command::CommandEnd;
use crate::error::Ended;
use crate::id::{AppId, CommandId, ImageId, SandboxId, SessionId};
use crate::secret::SecretText;
use crate::workspace::{HostVolume, SessionWorkspace, WorkspaceChoice};

/// What a Session may be asked to have and what an App may give where nothing is said: one list of settings, the first
/// fields of both.
macro_rules! settings {
    ($(#[$about:meta])* pub struct $name:ident { $($more:tt)* }) => {
        $(#[$about])*
        pub struct $name {
            /// An Image's name or id.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub image: Option<String>,
            /// Virtual processors.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub cpus: Option<u32>,
            /// Guest memory.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub memory_mib: Option<u32>,
            /// Scratch disk.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub disk_mib: Option<u32>,
            /// How long the Sandbox stays after the last activity.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub keep_alive_seconds: Option<u64>,
            /// How long the Session lives at the most.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub expires_seconds: Option<u64>,
            $($more)*
        }
    };
}

pub(crate) use settings;

settings! {
    /// Body of `POST /v1/sessions`. Every field may be absent; the daemon's defaults stand in `GET /v1/config`.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
    #[serde(deny_unknown_fields)]
    pub struct CreateSession {
        /// Public environment of every command.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub env: BTreeMap<String, String>,
        /// What the Sandbox may reach.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub network: Option<NetworkSpec>,
        /// For filtering.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub labels: BTreeMap<String, String>,
        /// Unique in its App, usable wherever an id is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// The durable directory. Absent: one of its own; null: none.
        #[serde(default, deserialize_with = "crate::workspace::given", skip_serializing_if = "Option::is_none")]
        pub workspace: Option<Option<WorkspaceChoice>>,
        /// Without a Workspace: whether it goes on without a Sandbox when that is given back, and gets a fresh one, with an
        /// empty disk, on the next request. False where absent: then it ends. With a Workspace it always goes on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub reactivate: Option<bool>,
        /// Paths kept in the Workspace.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub persist: Option<Vec<String>>,
        /// Directories of the host, for local callers alone. They are there as long as the Session and this life of the daemon.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub volumes: Option<Vec<HostVolume>>,
        /// Write-only environment.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::secret::new")]
        pub secrets: Option<BTreeMap<String, SecretText>>,
        /// Runs once per activation before the Session is Active.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub setup: Option<Setup>,
        /// Run at each activation and kept running.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub services: Option<Vec<ServiceSpec>>,
        /// Of `PUT /v1/sessions/by-key/{key}` alone: what to do where the last Session of that key has ended. `replace` where
        /// absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub if_terminated: Option<IfTerminated>,
    }
}

/// What opening a key does where its last Session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum IfTerminated {
    /// Makes a new one.
    Replace,
    /// Answers 410 with that one's end.
    Refuse,
}

/// What runs once per activation, before the Session is Active. Where it fails, the activation fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// A line for `/bin/bash -c`.
    pub command: String,
    /// How long it may take, 1..=86400. 300 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
}

impl Setup {
    /// How long it may take.
    pub fn timeout_seconds(&self) -> u64 {
        self.timeout_seconds.unwrap_or(300)
    }
}

/// A program that is started at every activation, after setup, and kept running.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ServiceSpec {
    /// Unique in its Session: 1 to 63 of `a-z0-9-_.`.
    pub name: String,
    /// A line for `/bin/bash -c`.
    pub command: String,
    /// The TCP port it listens on: it is ready when that takes connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// What more it takes to be ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<ReadySpec>,
    /// What to do when it ends. `on-failure` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<Restart>,
}

impl ServiceSpec {
    /// What to do when it ends.
    pub fn restart(&self) -> Restart {
        self.restart.unwrap_or(Restart::OnFailure)
    }
}

/// What a Service answers once it is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReadySpec {
    /// A path: `GET` on the Service's port answers with a status from 200 to 399.
    pub http: String,
}

/// What becomes of a Service that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// It stays as it is.
    No,
    /// It is started again unless it exited with 0.
    OnFailure,
    /// It is started again.
    Always,
}

/// Where a Service is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ServiceState {
    /// The Session has no Sandbox, or it is not Active yet.
    Stopped,
    /// It runs and is not ready.
    Starting,
    /// It runs; where it said what that takes, it is ready.
    Ready,
    /// It ended and is started again at `next_start_at`.
    Waiting,
    /// It ended and stays so until the next activation.
    Exited,
}

/// One Service of a Session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Service {
    /// What was asked for.
    #[serde(flatten)]
    pub spec: ServiceSpec,
    /// Where it is.
    pub state: ServiceState,
    /// Its last run: a Command, with the output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<CommandId>,
    /// How often it was started again in this activation.
    pub restarts: u32,
    /// When its last run began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<jiff::Timestamp>,
    /// When that became ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_at: Option<jiff::Timestamp>,
    /// When it is started again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_start_at: Option<jiff::Timestamp>,
    /// How its last run that is over ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_end: Option<CommandEnd>,
    /// Why it could not be started, where it could not. A guest may have had a say in it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// What a Sandbox may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NetworkSpec {
    /// The kind of policy.
    pub mode: NetworkMode,
    /// What is open: with mode `allow` all that is, with mode `public` beside what is public.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow: Option<Vec<NetworkRule>>,
    /// How much it may send.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_bytes_per_second: Option<u64>,
    /// How much it may receive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress_bytes_per_second: Option<u64>,
}

/// Kinds of network policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum NetworkMode {
    /// Nothing, not even names.
    #[default]
    None,
    /// Everything but the floor.
    Public,
    /// What the list says.
    Allow,
}

/// One entry of what is open: exactly one of `domain`, `cidr` and `preset`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NetworkRule {
    /// A name, or `*.` and a name for all below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// A range of IPv4 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cidr: Option<String>,
    /// A list of entries that the instance knows by this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// Ports. None: all to a range, 80 and 443 to a name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// The protocol. Absent: TCP where ports are named or it is a name, else all three.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<NetworkProtocol>,
    /// For a name: any protocol to its addresses, whoever else answers there, instead of TLS and HTTP for the name alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub any_protocol: bool,
}

/// Protocols that an entry can open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum NetworkProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP echo.
    Icmp,
}

/// Body of `PATCH /v1/sessions/{session}`: what is present is replaced.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct UpdateSession {
    /// A new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// All labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// How long the Sandbox stays after the last activity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_alive_seconds: Option<u64>,
    /// How long the Session lives from now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_seconds: Option<u64>,
    /// A new network policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSpec>,
    /// All public environment, from the next activation on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// Write-only environment, from the next activation on: these are set, `null` takes one away, others stay.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::secret::changed")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, Option<String>>>))]
    pub secrets: Option<BTreeMap<String, Option<SecretText>>>,
    /// What runs first, from the next activation on; `null` for nothing.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub setup: Option<Option<Setup>>,
    /// All Services, from the next activation on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub services: Option<Vec<ServiceSpec>>,
}

/// Tells `null` from a field that is not there.
pub(crate) fn present<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Where a Session is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SessionState {
    /// Recorded; its Sandbox is not begun.
    Requested,
    /// Its Sandbox starts.
    Activating,
    /// It takes commands.
    Active,
    /// Its Sandbox is being destroyed.
    Releasing,
    /// Without a Sandbox; the next request makes one.
    Idle,
    /// It is being ended.
    Terminating,
    /// It has ended.
    Terminated,
}

/// Why a Command, Sandbox or Session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// A program ended by itself.
    Exit,
    /// A program was ended by a signal.
    Signal,
    /// Its time was over.
    Timeout,
    /// Somebody asked for it.
    Killed,
    /// Memory ran out.
    OutOfMemory,
    /// The guest's kernel panicked.
    GuestPanic,
    /// The first process of the guest ended.
    GuestInitDied,
    /// The guest stopped answering.
    GuestSilent,
    /// The VMM ended.
    VmmExit,
    /// Something outside of Pepo killed it.
    KilledOutside,
    /// A mount went away.
    MountLost,
    /// The set-up command failed, or the Sandbox could not be started.
    SetupFailed,
    /// Nothing used it for its keep-alive.
    Idle,
    /// The longest activation was over.
    Lifetime,
    /// The Session's own end came.
    Expired,
    /// A quota.
    Quota,
    /// The operator or the owner ended it.
    Operator,
    /// The host is being drained.
    Drain,
    /// The host restarted.
    HostRestart,
    /// Not known, and not guessed.
    Unknown,
}

/// One Session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// Its App.
    pub app_id: AppId,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The key it was opened by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Where it is.
    pub state: SessionState,
    /// Counts every change of what is shown here.
    pub generation: u64,
    /// Counts Sandboxes: 0 before the first.
    pub activation: u64,
    /// The present Sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<SandboxId>,
    /// Its Image.
    pub image_id: ImageId,
    /// The Image's name when the Session was made.
    pub image: String,
    /// Virtual processors.
    pub cpus: u32,
    /// Guest memory.
    pub memory_mib: u32,
    /// Scratch disk.
    pub disk_mib: u32,
    /// How long the Sandbox stays after the last activity.
    pub keep_alive_seconds: u64,
    /// Whether it gets a fresh Sandbox when the one it had is given back.
    #[serde(default)]
    pub reactivate: bool,
    /// Its network policy.
    pub network: NetworkSpec,
    /// What of it opens more than it seems to, and what its App does not allow any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network_notes: Vec<String>,
    /// What the networks of its Sandboxes carried and refused so far, all activations together; in `GET …/{session}` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_used: Option<Box<NetworkStats>>,
    /// Its durable directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<SessionWorkspace>,
    /// Paths kept in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub persist: Vec<String>,
    /// Directories of the host that a local caller lent it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<HostVolume>,
    /// What runs once per activation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setup: Option<Setup>,
    /// Its Services; how they are stands in `GET …/services`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceSpec>,
    /// Public environment.
    pub env: BTreeMap<String, String>,
    /// Names of the secrets that are set; nobody can read their values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secret_names: Vec<String>,
    /// For filtering.
    pub labels: BTreeMap<String, String>,
    /// When it was asked for.
    pub created_at: jiff::Timestamp,
    /// When it ends at the latest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<jiff::Timestamp>,
    /// When the present Sandbox became Active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_at: Option<jiff::Timestamp>,
    /// Commands that run, without its Services.
    pub commands_running: u32,
    /// How its last Sandbox that is gone ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_end: Option<Ended>,
    /// How it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
}

/// What a Session uses now, by the guest's account where it says so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionStats {
    /// Milliseconds since the guest's start.
    pub uptime_ms: u64,
    /// Processor time of the guest's programs, by the guest.
    pub cpu_ms: u64,
    /// Memory the guest has.
    pub memory_bytes: u64,
    /// Memory in use, by the guest.
    pub memory_used_bytes: u64,
    /// Scratch disk.
    pub disk_bytes: u64,
    /// Scratch disk in use.
    pub disk_used_bytes: u64,
    /// Processes in the guest.
    pub processes: u32,
    /// Processor time of the whole Sandbox, by the host.
    pub host_cpu_ms: u64,
    /// Memory of the whole Sandbox, by the host.
    pub host_memory_bytes: u64,
    /// The cap on it.
    #[serde(default)]
    pub host_memory_limit_bytes: u64,
    /// What the scratch disk takes on the host.
    #[serde(default)]
    pub host_disk_bytes: u64,
    /// Bytes read for it since its start, by the host.
    #[serde(default)]
    pub read_bytes: u64,
    /// Bytes written for it since its start, by the host.
    #[serde(default)]
    pub write_bytes: u64,
    /// What the present Sandbox's network carried and refused, by the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkStats>,
    /// The same of all its Sandboxes so far, this one's included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_total: Option<Box<NetworkStats>>,
}

/// What a Sandbox's network carried and refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkStats {
    /// Bytes sent to somebody.
    pub sent_bytes: u64,
    /// Packets sent.
    pub sent_packets: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Connections that left it.
    pub connections: u64,
    /// Packets refused, by reason.
    pub refused: NetworkRefused,
    /// Questions for names.
    #[serde(default)]
    pub names: NameStats,
}

/// What became of a Sandbox's questions for names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NameStats {
    /// Questions.
    pub asked: u64,
    /// Of them, answered as asked.
    pub answered: u64,
    /// Addresses opened for names, each time counted.
    pub opened: u64,
    /// Addresses left out of answers because they are on the floor.
    pub dropped: u64,
    /// Questions that were not answered as asked, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub refused: BTreeMap<String, u64>,
}

/// Packets refused, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkRefused {
    /// No entry of the policy is for it.
    pub unlisted: u64,
    /// It is on the floor.
    pub floor: u64,
    /// Its entry is no longer in force.
    pub revoked: u64,
    /// Too many connections at once.
    pub connections: u64,
    /// Too many new ones a second.
    pub rate: u64,
    /// Too many packets a second.
    pub packets: u64,
    /// Too many questions for names a second.
    pub questions: u64,
    /// From another's address.
    pub spoofed: u64,
    /// Not IPv4 of a known flow to the next hop.
    pub malformed: u64,
    /// Begun from outside.
    pub inbound: u64,
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Page<T> {
    /// The entries, newest first.
    pub items: Vec<T>,
    /// Give it as `?cursor=` for the next page; absent at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}
