//! The rate of the host's time stamp counter.
//!
//! A guest under emulation cannot calibrate its clock on a busy host: one boot in four hung for ever without a hint. The
//! emulated counter ticks with the host's, so the host's measured rate is the right hint, and a guess would make the
//! guest's clock drift. Caller: [`super::qemu`].

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::sys;

/// How long the counter is watched. At 50 ms and about 100 ns for a pair of readings the error is a few parts in a
/// million, less than a crystal's.
const WATCHED: Duration = Duration::from_millis(50);

/// kHz of the host's time stamp counter, measured once per process. `None` where there is none that can be read.
///
/// The first call takes 50 ms.
pub fn tsc_khz() -> Option<u64> {
    *RATE.get_or_init(measure)
}

/// Takes over what another process of ours measured: a keeper starts one guest and has no 50 ms to lose.
pub fn measured(khz: Option<u64>) {
    let _ = RATE.set(khz);
}

static RATE: OnceLock<Option<u64>> = OnceLock::new();

fn measure() -> Option<u64> {
    let (first_ticks, first_time) = reading()?;
    let until = Instant::now() + WATCHED;
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        std::thread::sleep(left);
    }
    let (last_ticks, last_time) = reading()?;
    let nanoseconds = last_time.checked_sub(first_time)?.as_nanos();
    let khz = u128::from(last_ticks.checked_sub(first_ticks)?) * 1_000_000 / nanoseconds;
    u64::try_from(khz).ok().filter(|khz| *khz > 0)
}

/// A counter value and the raw clock at the same moment: of several tries the one that took least, since any of them may
/// be torn apart by the scheduler.
fn reading() -> Option<(u64, Duration)> {
    let mut best: Option<(u64, u64, Duration)> = None;
    for _ in 0..16 {
        let before = sys::time_stamp()?;
        let time = clock_gettime(ClockId::MonotonicRaw);
        let after = sys::time_stamp()?;
        let took = after.wrapping_sub(before);
        let time = Duration::new(u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?);
        if best.is_none_or(|(shortest, ..)| took < shortest) {
            best = Some((took, before + took / 2, time));
        }
    }
    best.map(|(_, ticks, time)| (ticks, time))
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree_to_a_thousandth() {
        // A busy machine can spoil one; a wrong method spoils all.
        let agrees = (0..10).any(|_| {
            let (one, other) = (measure().unwrap(), measure().unwrap());
            one.abs_diff(other) * 1000 < one
        });
        assert!(agrees);
        assert!(tsc_khz().is_some_and(|khz| (100_000..20_000_000).contains(&khz)));
    }
}
