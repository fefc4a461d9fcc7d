//! What happens when the host runs short: the pool goes first, then Sandboxes that nobody uses, then nothing new begins.
//!
//! The decision is a pure function of a few readings and of where it stands, with a gap between going up and coming down so
//! that it does not flutter. Never is anything killed that somebody uses: that is the kernel's last resort, for which
//! Sandboxes are marked and pepod is not.
//!
//! ```text
//!   Calm ──► Tight: no pool ──► Pressed: idle Sandboxes go, the longest unused first ──► Full: nothing new
//!    ◄──────────◄──────────────────◄─────────────────────────────────────────────────────┘   one step at a time
//! ```

use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use pepo_api::Reason;

use crate::session::Sessions;
use crate::session::state::Cause;

/// How often the host is looked at.
const EVERY: Duration = Duration::from_secs(2);

const GIB: u64 = 1 << 30;

/// Where a test says what there is, below the state directory.
#[cfg(feature = "fake")]
const TOLD: &str = "told-proc";

/// How short the host is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Not at all.
    #[default]
    Calm,
    /// What nobody has asked for goes.
    Tight,
    /// What nobody uses goes.
    Pressed,
    /// Nothing new begins.
    Full,
}

/// What is looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Readings {
    /// Memory of the host, in bytes.
    pub memory: u64,
    /// What of it could be given, in bytes.
    pub memory_available: u64,
    /// The disk of the state directory, in bytes.
    pub disk: u64,
    /// What of it a process without rights could still use, in bytes.
    pub disk_available: u64,
    /// Shares of the last 10 s in which something waited for processor, memory, disk.
    pub stalled: [f64; 3],
    /// The share in which nothing went on for want of memory.
    pub memory_stood_still: f64,
}

impl Readings {
    /// As it is now. What cannot be read is as if there were enough of it.
    pub fn take(state: &Path) -> Self {
        #[cfg(feature = "fake")]
        if state.join(TOLD).exists() {
            return Self::told(&state.join(TOLD));
        }
        Self::of(Path::new("/proc"), state)
    }

    /// What a test says in files of the kernel's form, and `disk` with what there is and what is left, in bytes.
    #[cfg(feature = "fake")]
    fn told(proc: &Path) -> Self {
        let text = std::fs::read_to_string(proc.join("disk")).unwrap_or_default();
        let mut numbers = text.split_whitespace().map(|word| word.parse().unwrap_or(0));
        let [disk, disk_available] = [numbers.next(), numbers.next()].map(Option::unwrap_or_default);
        Readings { disk, disk_available, ..Self::of(proc, proc) }
    }

    fn of(proc: &Path, state: &Path) -> Self {
        let meminfo = std::fs::read_to_string(proc.join("meminfo")).unwrap_or_default();
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
        };
        let disk = rustix::fs::statvfs(state).ok();
        let bytes = |blocks: u64, size: u64| blocks.saturating_mul(size);
        Readings {
            memory: field("MemTotal"),
            memory_available: field("MemAvailable"),
            disk: disk.as_ref().map_or(0, |disk| bytes(disk.f_blocks, disk.f_frsize)),
            disk_available: disk.as_ref().map_or(0, |disk| bytes(disk.f_bavail, disk.f_frsize)),
            stalled: ["cpu", "memory", "io"].map(|what| stall(proc, what, "some")),
            memory_stood_still: stall(proc, "memory", "full"),
        }
    }
}

fn stall(proc: &Path, what: &str, kind: &str) -> f64 {
    let text = std::fs::read_to_string(proc.join("pressure").join(what)).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(kind));
    let share =
        line.and_then(|line| line.split_whitespace().find_map(|word| word.strip_prefix("avg10=")?.parse().ok()));
    share.unwrap_or(0.0) / 100.0
}

/// Where the levels begin: shares of memory and disk that are left, the least of the disk in bytes, and the share of time in
/// which everything waits for memory.
const BEGINS: [(Level, f64, f64, u64, f64); 3] = [
    (Level::Tight, 0.10, 0.05, 2 * GIB, 0.05),
    (Level::Pressed, 0.06, 0.03, GIB, 0.15),
    (Level::Full, 0.03, 0.01, GIB / 2, 0.40),
];

/// How much more must be there for a level to be over.
const GAP: f64 = 1.25;

/// How short the host is, by the thresholds times `gap`; and why.
fn short(now: &Readings, gap: f64) -> (Level, String) {
    let mut found = (Level::Calm, String::new());
    for (level, memory, disk, least, still) in BEGINS {
        if now.memory > 0 && (now.memory_available as f64) < now.memory as f64 * memory * gap {
            found = (level, format!("{} of {} MiB of memory are left", now.memory_available >> 20, now.memory >> 20));
        } else if now.memory_stood_still * gap > still {
            found =
                (level, format!("for {:.0} % of the time everything waits for memory", now.memory_stood_still * 100.0));
        } else if now.disk > 0 {
            // A small disk is not short for being small: the least is no more than a tenth of it.
            let least = (least as f64).min(now.disk as f64 * disk * 2.0).max(now.disk as f64 * disk);
            if (now.disk_available as f64) < least * gap {
                found = (level, format!("{} of {} MiB of the disk are left", now.disk_available >> 20, now.disk >> 20));
            }
        }
    }
    found
}

/// The next level, and why it is not calm.
pub fn step(before: Level, now: &Readings) -> (Level, String) {
    let up = short(now, 1.0);
    if up.0 >= before {
        return up;
    }
    // Down only where it would stay down.
    let down = short(now, GAP);
    if down.0 >= before { (before, down.1) } else { down }
}

static LEVEL: AtomicU8 = AtomicU8::new(0);

/// Where it stands, 0 to 3.
pub fn level() -> u8 {
    LEVEL.load(Ordering::Relaxed)
}

/// Goes on until the daemon ends.
pub async fn run(sessions: Sessions, state: std::path::PathBuf) {
    let mut before = Level::Calm;
    loop {
        tokio::time::sleep(EVERY).await;
        let (now, why) = step(before, &Readings::take(&state));
        if now != before {
            if now > before {
                tracing::warn!(level = ?now, why, "the host runs short");
            } else {
                tracing::info!(level = ?now, why, "the host has more room again");
            }
            if now == Level::Calm && !sessions.is_draining() {
                sessions.pool().open();
            }
            before = now;
        }
        sessions.refuse((now == Level::Full).then(|| why.clone()));
        LEVEL.store(now as u8, Ordering::Relaxed);
        if now > Level::Calm {
            // Each time: a drain that was called off has opened it meanwhile.
            sessions.pool().shut();
        }
        if now < Level::Pressed {
            continue;
        }
        // What nobody asked for goes before what somebody has.
        sessions.pool().emptied(EVERY * 5).await;
        if let Some(session) = sessions.longest_unused() {
            tracing::warn!(session = %session.id(), why, "its Sandbox is not in use and is given back");
            let cause = Cause::told(Reason::Idle, format!("the host runs short: {why}"));
            // One that has just come into use or ended is no loss.
            let _ = tokio::time::timeout(EVERY * 5, session.release(cause)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readings(memory: f64, disk_gib: f64) -> Readings {
        Readings {
            memory: 16 * GIB,
            memory_available: (16.0 * GIB as f64 * memory) as u64,
            disk: 200 * GIB,
            disk_available: (disk_gib * GIB as f64) as u64,
            ..Readings::default()
        }
    }

    #[test]
    fn levels_go_up_at_once_and_come_down_with_a_gap() {
        let level = |before, memory, disk| step(before, &readings(memory, disk)).0;
        assert_eq!(level(Level::Calm, 0.5, 100.0), Level::Calm);
        assert_eq!(level(Level::Calm, 0.09, 100.0), Level::Tight);
        assert_eq!(level(Level::Calm, 0.02, 100.0), Level::Full);
        assert_eq!(level(Level::Tight, 0.11, 100.0), Level::Tight, "it flutters");
        assert_eq!(level(Level::Tight, 0.13, 100.0), Level::Calm);
        assert_eq!(level(Level::Full, 0.035, 100.0), Level::Full);
        assert_eq!(level(Level::Full, 0.05, 100.0), Level::Pressed);
        assert_eq!(level(Level::Calm, 0.5, 9.0), Level::Tight);
        assert_eq!(level(Level::Calm, 0.5, 5.0), Level::Pressed);
        assert_eq!(level(Level::Calm, 0.5, 1.0), Level::Full);
        let still = Readings { memory_stood_still: 0.2, ..readings(0.5, 100.0) };
        assert_eq!(step(Level::Calm, &still).0, Level::Pressed);
        assert!(step(Level::Calm, &still).1.contains("20 %"));
        assert_eq!(step(Level::Calm, &Readings::default()).0, Level::Calm, "nothing can be read");
    }

    #[test]
    fn this_host_can_be_read() {
        let now = Readings::take(Path::new("/"));
        assert!(now.memory > now.memory_available && now.memory_available > 0);
        assert!(now.disk >= now.disk_available && now.disk > 0);
        assert!(now.stalled.iter().all(|share| (0.0..=1.0).contains(share)));
    }
}
