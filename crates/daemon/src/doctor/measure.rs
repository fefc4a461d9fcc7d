//! How much slower a loop runs in a Sandbox than beside it: measured in one of the usual shape that is made for it, and given
//! back, by the same code on both sides.
//!
//! Takes room that nobody wants, or says that there is none. What was found holds until the daemon ends.

use std::time::Duration;

use jiff::Timestamp;
use pepo_sandbox::plan::Network;
use pepo_sandbox::proto::{Activate, Exec, OpId, measure};
use pepo_sandbox::{chain, guest};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use crate::capacity::Needs;
use crate::pool::Shape;
use crate::session::{Sessions, sandbox_id};
use crate::store::Write;

/// Looks on each side, of which the best counts: what else the machine does only ever adds.
const LOOKS: usize = 3;

/// How long all of it may take.
const WITHIN: Duration = Duration::from_secs(120);

/// The agent's own program, seen from whoever it starts.
const AGENT: &str = "/proc/self/exe";

static FOUND: Mutex<Option<f64>> = Mutex::const_new(None);

/// How many times as long it takes inside.
///
/// # Errors
/// A sentence: why it could not be measured.
pub async fn slowdown(sessions: &Sessions) -> Result<f64, String> {
    let sessions = sessions.clone();
    // A caller that leaves must not leave a Sandbox.
    let looking = tokio::spawn(async move {
        let mut found = FOUND.lock().await;
        if let Some(ratio) = *found {
            return Ok(ratio);
        }
        let ratio = measured(&sessions).await?;
        *found = Some(ratio);
        Ok(ratio)
    });
    looking.await.unwrap_or_else(|error| Err(error.to_string()))
}

async fn measured(sessions: &Sessions) -> Result<f64, String> {
    let config = sessions.config();
    let (cpus, memory_mib, disk_mib) = (config.cpus, config.memory_mib, config.disk_mib);
    let files = sessions.find_files(config.image.clone()).await.map_err(|error| error.to_string())?;
    let busy = || "there is no room that nobody wants".to_owned();
    let place = sessions.capacity().spare(Needs::new(memory_mib, cpus, disk_mib)).ok_or_else(busy)?;
    let turn = sessions.capacity().idle_turn().ok_or_else(busy)?;
    let shape = Shape { image: files.id, cpus, memory_mib, disk_mib, vmm: sessions.vmm() };
    let told = |error: &dyn std::error::Error| chain(error);
    let id = sessions.host().new_id().map_err(|error| told(&error))?;
    // Recorded before the first thing is taken.
    sessions.store().write(Write::NewSandbox(sandbox_id(id))).await.map_err(|error| told(&error))?;
    let cancel = CancellationToken::new();
    let plan = shape.plan(id, &files, config.io, Network::Absent);
    let looking = async {
        let warm = pepo_sandbox::boot(sessions.host(), plan, &cancel).await.map_err(|error| told(&error))?;
        let activate = Activate {
            hostname: "doctor".to_owned(),
            env: Vec::new(),
            clock_unix_ns: u64::try_from(Timestamp::now().as_nanosecond()).unwrap_or_default(),
            entropy: Vec::new(),
            network: None,
        };
        let active = warm.activate(activate, Vec::new(), &cancel).await.map_err(|error| told(&error))?;
        let ratio = compare(active.guest()).await;
        let exit = active.stop(Duration::ZERO).await;
        exit.released.map_err(|error| told(&error))?;
        ratio
    };
    let ratio = match tokio::time::timeout(WITHIN, looking).await {
        Ok(ratio) => ratio,
        Err(_) => Err(format!("it took more than {} s", WITHIN.as_secs())),
    };
    // Whatever became of it: a repeat finds nothing, and what is owed is remembered.
    sessions.bury(id).await;
    drop((turn, place));
    ratio
}

async fn compare(guest: &guest::Guest) -> Result<f64, String> {
    let (mut outside, mut inside) = (Duration::MAX, Duration::MAX);
    for _ in 0..LOOKS {
        let here = tokio::task::spawn_blocking(|| measure::spin(measure::ROUNDS)).await;
        outside = outside.min(here.map_err(|error| error.to_string())?);
        inside = inside.min(spin(guest).await?);
    }
    Ok(inside.as_secs_f64() / outside.as_secs_f64().max(1e-9))
}

async fn spin(guest: &guest::Guest) -> Result<Duration, String> {
    let exec = Exec {
        cwd: Some("/".to_owned()),
        user: Some("root".to_owned()),
        timeout_ms: WITHIN.as_millis() as u64,
        ..Exec::new([AGENT.to_owned(), "--spin".to_owned(), measure::ROUNDS.to_string()])
    };
    let mut running = guest.exec(OpId(uuid::Uuid::now_v7().into_bytes()), exec).await.map_err(|error| chain(&error))?;
    let mut text = Vec::new();
    while let Some(output) = running.next().await {
        match output.map_err(|error| chain(&error))? {
            // A guest says a number; more than that is not listened to.
            guest::Output::Data { bytes, .. } if text.len() < 64 => text.extend_from_slice(&bytes),
            _ => {}
        }
    }
    let said = String::from_utf8_lossy(&text);
    let nanos = said.trim().parse().map_err(|_| "the guest did not say how long it took".to_owned())?;
    Ok(Duration::from_nanos(nanos))
}
