//! What runs here, in numbers for Prometheus, on a listener of its own.
//!
//! Counters and histograms live here and are moved where things happen; gauges are read when somebody asks. Labels are of
//! closed sets: route names, states, causes, steps. Nothing of a caller's choosing is a label, so the size is bounded. The
//! listener is bound while pepod is still root, on loopback; it answers `/metrics`, `/healthz` and `/readyz` and takes nothing.

use std::net::TcpListener;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use pepo_api::{Reason, SessionState};
use pepo_sandbox::Steps;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::Semaphore;

use crate::Pepod;
use crate::network::Counts;
use crate::pressure::Readings;

/// Connections at once.
const CONNECTIONS: usize = 32;

/// How long a request's head may take.
const HEAD_WITHIN: Duration = Duration::from_secs(10);

type One = [(&'static str, &'static str); 1];
/// A reason of a closed set that another module has.
type Told = [(&'static str, String); 1];
type Two = [(&'static str, &'static str); 2];
type Seconds = fn() -> Histogram;

/// From 1 ms to about 65 s.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 17))
}

/// All that is counted: a field, what it is made of, its name for Prometheus, its line of help.
macro_rules! metrics {
    ($($field:ident: $kind:ty = $make:expr, $name:literal, $help:literal;)*) => {
        /// All that is counted.
        pub struct Metrics {
            registry: Registry,
            $($field: $kind,)*
        }

        impl Metrics {
            fn bare() -> Self {
                let mut registry = Registry::with_prefix("pepo");
                registry.register("build", "What runs here", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
                $(let $field: $kind = $make; registry.register($name, $help, $field.clone());)*
                Metrics { registry, $($field,)* }
            }
        }
    };
}

metrics! {
    requests: Family<Two, Counter> = Family::default(),
        "requests", "Requests answered, by route and class of status";
    request_seconds: Family<One, Histogram, Seconds> = Family::new_with_constructor(seconds),
        "request_seconds", "Until the head of the answer, by route; what waits for a command's end waits in here";
    activations: Family<One, Counter> = Family::default(),
        "activations", "Sandboxes made for Sessions, by outcome";
    step_seconds: Family<One, Histogram, Seconds> = Family::new_with_constructor(seconds),
        "activation_step_seconds", "Steps of making a Sandbox";
    command_seconds: Family<One, Histogram, Seconds> = Family::new_with_constructor(seconds),
        "command_step_seconds", "Steps of a command: until its Sandbox serves, until it runs, until it has ended";
    sandbox_ends: Family<One, Counter> = Family::default(),
        "sandbox_ends", "Ends of Sandboxes that were Sessions', by cause";
    command_ends: Family<One, Counter> = Family::default(),
        "command_ends", "Ends of commands, by reason";
    sandbox_cpu: Counter<f64, AtomicU64> = Counter::default(),
        "sandbox_cpu_seconds", "Processor time that Sandboxes used on the host";
    sessions: Family<One, Gauge> = Family::default(),
        "sessions", "Sessions that have not ended, by state";
    commands: Gauge = Gauge::default(),
        "commands_running", "Commands that run, without Services";
    sandboxes: Gauge = Gauge::default(),
        "sandboxes", "Sandboxes that serve a Session";
    sandbox_memory: Gauge = Gauge::default(),
        "sandbox_memory_bytes", "Memory of their processes on the host";
    sandbox_disk: Gauge = Gauge::default(),
        "sandbox_disk_bytes", "What their scratch disks take";
    network_bytes: Family<One, Counter> = Family::default(),
        "network_bytes", "Bytes that Sandboxes sent and received";
    network_packets: Family<One, Counter> = Family::default(),
        "network_packets", "Packets of the same";
    network_connections: Counter = Counter::default(),
        "network_connections", "Connections that left a Sandbox";
    network_refused: Family<Told, Counter> = Family::default(),
        "network_refused", "Packets refused, by reason";
    names_asked: Counter = Counter::default(),
        "names_asked", "Questions of Sandboxes for names";
    names_refused: Family<Told, Counter> = Family::default(),
        "names_refused", "Of those, the ones not answered as asked, by reason";
    pool_ready: Gauge = Gauge::default(),
        "pool_ready", "Sandboxes that wait ready";
    owed: Gauge = Gauge::default(),
        "cleanup_owed", "Sandboxes that have not given everything back";
    memory_available: Gauge = Gauge::default(),
        "host_memory_available_bytes", "Memory the host could give";
    disk_available: Gauge = Gauge::default(),
        "host_disk_available_bytes", "Room for the state directory";
    stall: Family<One, Gauge<f64, AtomicU64>> = Family::default(),
        "host_stalled_ratio", "Share of the last 10 s in which something waited for it";
    pressure: Gauge = Gauge::default(),
        "pressure_level", "0 none, 1 pool given up, 2 idle released, 3 new refused";
}

/// The process's own.
pub static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

/// Where a command's time goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandStep {
    /// Until the Sandbox of its Session serves.
    Sandbox,
    /// From then until its program runs.
    Start,
    /// From then until it has ended.
    Run,
}

impl CommandStep {
    fn as_str(self) -> &'static str {
        match self {
            CommandStep::Sandbox => "sandbox",
            CommandStep::Start => "start",
            CommandStep::Run => "run",
        }
    }
}

/// Words of the closed sets.
const OUTCOMES: [&str; 2] = ["ok", "failed"];
const STALLED: [&str; 3] = ["cpu", "memory", "io"];
const STATES: [SessionState; 7] = [
    SessionState::Requested,
    SessionState::Activating,
    SessionState::Active,
    SessionState::Releasing,
    SessionState::Idle,
    SessionState::Terminating,
    SessionState::Terminated,
];

fn state(state: SessionState) -> &'static str {
    match state {
        SessionState::Requested => "requested",
        SessionState::Activating => "activating",
        SessionState::Active => "active",
        SessionState::Releasing => "releasing",
        SessionState::Idle => "idle",
        SessionState::Terminating => "terminating",
        SessionState::Terminated => "terminated",
    }
}

fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Exit => "exit",
        Reason::Signal => "signal",
        Reason::Timeout => "timeout",
        Reason::Killed => "killed",
        Reason::OutOfMemory => "out_of_memory",
        Reason::GuestPanic => "guest_panic",
        Reason::GuestInitDied => "guest_init_died",
        Reason::GuestSilent => "guest_silent",
        Reason::VmmExit => "vmm_exit",
        Reason::KilledOutside => "killed_outside",
        Reason::Idle => "idle",
        Reason::Lifetime => "lifetime",
        Reason::Expired => "expired",
        Reason::Operator => "operator",
        Reason::Drain => "drain",
        _ => "other",
    }
}

impl Metrics {
    /// With every word of the sets that are small: what never happened is zero, and not absent.
    fn new() -> Self {
        let metrics = Self::bare();
        for outcome in OUTCOMES {
            let _ = metrics.activations.get_or_create(&[("outcome", outcome)]);
        }
        for what in STALLED {
            let _ = metrics.stall.get_or_create(&[("of", what)]);
        }
        for end in
            [Reason::Idle, Reason::Operator, Reason::Drain, Reason::OutOfMemory, Reason::VmmExit, Reason::GuestPanic]
        {
            let _ = metrics.sandbox_ends.get_or_create(&[("cause", reason(end))]);
        }
        for end in [Reason::Exit, Reason::Signal, Reason::Timeout, Reason::Killed, Reason::OutOfMemory] {
            let _ = metrics.command_ends.get_or_create(&[("reason", reason(end))]);
        }
        metrics
    }

    /// A request was answered.
    pub fn answered(&self, route: &'static str, status: StatusCode, took: Duration) {
        let class = match status.as_u16() {
            100..=199 => "1xx",
            200..=299 => "2xx",
            300..=399 => "3xx",
            400..=499 => "4xx",
            _ => "5xx",
        };
        self.requests.get_or_create(&[("route", route), ("status", class)]).inc();
        self.request_seconds.get_or_create(&[("route", route)]).observe(took.as_secs_f64());
    }

    /// A Sandbox was made.
    pub fn activated(&self, steps: &Steps) {
        self.activations.get_or_create(&[("outcome", "ok")]).inc();
        for (step, took) in steps.iter() {
            self.step_seconds.get_or_create(&[("step", step.as_str())]).observe(took.as_secs_f64());
        }
    }

    /// One could not be made.
    pub fn not_activated(&self) {
        self.activations.get_or_create(&[("outcome", "failed")]).inc();
    }

    /// A Session's Sandbox ended.
    pub fn sandbox_ended(&self, cause: Reason) {
        self.sandbox_ends.get_or_create(&[("cause", reason(cause))]).inc();
    }

    /// A command came through a step.
    pub fn command_step(&self, step: CommandStep, took: Duration) {
        self.command_seconds.get_or_create(&[("step", step.as_str())]).observe(took.as_secs_f64());
    }

    /// A command ended.
    pub fn command_ended(&self, why: Reason) {
        self.command_ends.get_or_create(&[("reason", reason(why))]).inc();
    }

    /// Sandboxes used that much more.
    pub fn used_cpu(&self, more: Duration) {
        self.sandbox_cpu.inc_by(more.as_secs_f64());
    }

    /// Networks of Sandboxes carried and refused that much more.
    pub fn carried(&self, more: &Counts) {
        for (direction, bytes, packets) in
            [("sent", "sent_bytes", "sent_packets"), ("received", "received_bytes", "received_packets")]
        {
            self.network_bytes.get_or_create(&[("direction", direction)]).inc_by(more.get(bytes));
            self.network_packets.get_or_create(&[("direction", direction)]).inc_by(more.get(packets));
        }
        self.network_connections.inc_by(more.get("connections"));
        self.names_asked.inc_by(more.get("names.asked"));
        for (family, front) in [(&self.network_refused, "refused."), (&self.names_refused, "names.refused.")] {
            for (reason, count) in more.below(front) {
                family.get_or_create(&[("reason", reason.to_owned())]).inc_by(count);
            }
        }
    }

    /// Everything, as Prometheus reads it.
    pub fn text(&self, pepod: &Pepod) -> String {
        let sessions = pepod.sessions();
        let mut by_state = [0_i64; STATES.len()];
        for session in sessions.all() {
            let word = session.now().state.word();
            if let Some(index) = STATES.iter().position(|state| *state == word) {
                by_state[index] += 1;
            }
        }
        for (word, count) in STATES.iter().zip(by_state) {
            self.sessions.get_or_create(&[("state", state(*word))]).set(count);
        }
        let sum = crate::usage::last();
        self.commands.set(sessions.commands_running() as i64);
        self.sandboxes.set(sum.sandboxes as i64);
        self.sandbox_memory.set(sum.memory_bytes as i64);
        self.sandbox_disk.set(sum.disk_bytes as i64);
        self.pool_ready.set(sessions.pool().status().iter().map(|status| status.ready as i64).sum());
        self.owed.set(sessions.owed().len() as i64);
        let readings = Readings::take(&pepod.config().places.state);
        self.memory_available.set(readings.memory_available as i64);
        self.disk_available.set(readings.disk_available as i64);
        for (what, share) in STALLED.iter().zip(readings.stalled) {
            self.stall.get_or_create(&[("of", what)]).set(share);
        }
        self.pressure.set(crate::pressure::level() as i64);
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// Answers until the daemon stops.
pub async fn serve(pepod: Pepod, listener: TcpListener) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state(pepod);
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return Ok(()) };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let served = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_WITHIN)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = served.await {
                tracing::debug!(%error, "a connection for metrics ended");
            }
            drop(place);
        });
    }
}

async fn metrics(State(pepod): State<Pepod>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], METRICS.text(&pepod)).into_response()
}

async fn ready(State(pepod): State<Pepod>) -> Response {
    if pepod.sessions().is_draining() {
        return (StatusCode::SERVICE_UNAVAILABLE, "stopping\n").into_response();
    }
    "ok\n".into_response()
}
