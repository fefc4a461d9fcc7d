//! The machine's wall clock: set when the guest becomes a Sandbox, and put right when the host says so. A guest's clock is
//! behind by as long as that word was on its way, and by as long as the host slept.
//!
//! Whoever is root here may set it: from then on it is theirs. Called by `agent`.

use std::cell::Cell;

use rustix::io::Errno;
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

/// How far it may have come from where we left it: what a program does that keeps time by small steps.
const OURS: i64 = 100_000_000;

/// What of it is remembered.
#[derive(Debug, Default)]
pub struct Clock {
    /// The wall clock's time at the machine's start, as we set it, in nanoseconds.
    start: Cell<Option<i64>>,
}

impl Clock {
    /// Sets it, in nanoseconds since 1970 UTC.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set(&self, unix_ns: i64) -> Result<(), Errno> {
        let now = Timespec { tv_sec: unix_ns.div_euclid(SECOND), tv_nsec: unix_ns.rem_euclid(SECOND) };
        clock_settime(ClockId::Realtime, now)?;
        self.start.set(Some(start()));
        Ok(())
    }

    /// Adds so many nanoseconds, unless somebody else has set it since we did.
    ///
    /// # Errors
    /// The kernel's.
    pub fn add(&self, nanos: i64) -> Result<(), Errno> {
        let ours = self.start.get().is_some_and(|left| start().abs_diff(left) <= OURS.unsigned_abs());
        match ours && nanos != 0 {
            true => self.set(now().saturating_add(nanos)),
            false => Ok(()),
        }
    }
}

const SECOND: i64 = 1_000_000_000;

fn nanos(clock: ClockId) -> i64 {
    let time = clock_gettime(clock);
    time.tv_sec.saturating_mul(SECOND).saturating_add(time.tv_nsec)
}

/// What it says, in nanoseconds since 1970 UTC.
pub fn now() -> i64 {
    nanos(ClockId::Realtime)
}

fn start() -> i64 {
    now().saturating_sub(nanos(ClockId::Boottime))
}
