//! The meter: looks at what every Sandbox of a Session uses, and gives it to the store.
//!
//! Owns no numbers but the last ones, for metrics. Every [`EVERY`] each Sandbox that serves is looked at once; a Sandbox's
//! end brings its last numbers with it (`Sessions::settle`). So what a crash loses is at most one turn.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use pepo_sandbox::SandboxId;
use pepo_sandbox::host::Usage;
use pepo_sandbox::net::Traffic;

use crate::metrics::METRICS;
use crate::session::{Sessions, sandbox_id};
use crate::store::{self, Purpose, Sample, Write};

/// How old the last look is at the most; with the time a turn takes, samples are never older than 10 s.
const EVERY: Duration = Duration::from_secs(5);

/// Looks at once.
const AT_ONCE: usize = 8;

/// What of a Sandbox's counters is kept.
pub fn sample(id: SandboxId, usage: &Usage, traffic: Option<&Traffic>) -> Sample {
    Sample {
        sandbox: sandbox_id(id),
        at: store::millis(jiff::Timestamp::now()),
        cpu_us: usage.cpu_ns / 1000,
        memory_bytes: usage.memory_bytes,
        disk_bytes: usage.disk_bytes,
        read_bytes: usage.read_bytes,
        write_bytes: usage.write_bytes,
        sent_bytes: traffic.map_or(0, |traffic| traffic.sent_bytes),
        received_bytes: traffic.map_or(0, |traffic| traffic.received_bytes),
    }
}

/// What all Sandboxes used when they were last looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// How many.
    pub sandboxes: u64,
    /// Memory on the host, in bytes.
    pub memory_bytes: u64,
    /// Scratch disks on the host, in bytes.
    pub disk_bytes: u64,
}

static LAST: Mutex<Sum> = Mutex::new(Sum { sandboxes: 0, memory_bytes: 0, disk_bytes: 0 });

/// The sum of the last turn.
pub fn last() -> Sum {
    *LAST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Goes on until the daemon ends.
pub async fn run(sessions: Sessions) {
    let mut seen: HashMap<SandboxId, u64> = HashMap::new();
    let mut turn = tokio::time::interval(EVERY);
    turn.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        turn.tick().await;
        let ids = sessions.serving();
        let host = sessions.host();
        let looks = ids.into_iter().map(|id| async move { (id, host.usage(id).await, host.traffic(id).await.ok()) });
        let mut looks = futures_util::stream::iter(looks).buffer_unordered(AT_ONCE);
        let mut sum = Sum::default();
        let mut now = HashMap::new();
        while let Some((id, usage, traffic)) = looks.next().await {
            // One that has just gone brings its numbers by its end.
            let Ok(usage) = usage else { continue };
            sum.sandboxes += 1;
            sum.memory_bytes += usage.memory_bytes;
            sum.disk_bytes += usage.disk_bytes;
            let before = seen.get(&id).copied().unwrap_or(usage.cpu_ns);
            METRICS.used_cpu(Duration::from_nanos(usage.cpu_ns.saturating_sub(before)));
            now.insert(id, usage.cpu_ns);
            sessions.store().write_later(Write::Usage(sample(id, &usage, traffic.as_ref()), Purpose::Look)).await;
            sessions.count_network(id, traffic.as_ref());
        }
        seen = now;
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = sum;
    }
}
