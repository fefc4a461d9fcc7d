//! What a guest's use of a served tree may cost this host's disks in a second: the bucket that the VMM is for its own disks.
//!
//! Counted is what reaches a disk: bytes read and written, and each flush as one operation. Looking at names and attributes
//! is the page cache's, and a write that nobody flushes is put together with others before it is anybody's operation.
//! Whoever has taken more than there was waits before it is done, on the thread that does it: so full is slow, and never an
//! error.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::cgroup::Io;

/// What may be used at once after a rest.
const BURST: Duration = Duration::from_millis(100);

/// What one request costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    /// Bytes of files.
    pub bytes: u64,
    /// Flushes.
    pub operations: u64,
}

/// Both measures, each as the time at which all that was taken is paid for.
#[derive(Debug)]
pub(super) struct Bucket {
    io: Io,
    paid_at: Mutex<[Duration; 2]>,
}

impl Bucket {
    /// A full one.
    pub fn new(io: Io) -> Self {
        Bucket { io, paid_at: Mutex::new([Duration::ZERO; 2]) }
    }

    /// Takes at that time; how long whoever takes has to wait before it goes on.
    pub fn take(&self, now: Duration, cost: Cost) -> Duration {
        let mut paid_at = self.paid_at.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = [(cost.bytes, self.io.bytes), (cost.operations, self.io.operations)];
        let mut wait = Duration::ZERO;
        for (paid_at, (amount, rate)) in paid_at.iter_mut().zip(taken) {
            if amount > 0 {
                let nanos = u128::from(amount) * 1_000_000_000 / u128::from(rate.max(1));
                *paid_at = (*paid_at).max(now) + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
                wait = wait.max(paid_at.saturating_sub(now + BURST));
            }
        }
        wait
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_more_than_the_rate_waits_and_a_rest_is_worth_a_burst() {
        let bucket = Bucket::new(Io { bytes: 1000, operations: 10 });
        let bytes = |bytes| Cost { bytes, operations: 0 };
        let at = Duration::from_millis;
        assert_eq!(bucket.take(at(0), bytes(100)), Duration::ZERO, "a burst waits");
        assert_eq!(bucket.take(at(0), bytes(500)), at(500));
        assert_eq!(bucket.take(at(600), bytes(100)), Duration::ZERO);
        // A long rest is worth no more than a short one.
        assert_eq!(bucket.take(at(60_000), bytes(200)), at(100));
        assert_eq!(bucket.take(at(0), Cost { bytes: 0, operations: 11 }), at(1000), "flushes are not counted");
        assert_eq!(bucket.take(at(0), Cost::default()), Duration::ZERO, "what costs nothing waits");
    }

    proptest! {
        /// Whoever waits as told never gets more than the rate and one burst.
        #[test]
        fn no_more_than_the_rate_comes_through(requests in prop::collection::vec((1_u64..2_000_000, 0_u64..50), 1..200)) {
            let io = Io { bytes: 1 << 20, operations: 100 };
            let bucket = Bucket::new(io);
            let (mut now, mut bytes) = (Duration::ZERO, 0);
            for (amount, rest_ms) in requests {
                now += Duration::from_millis(rest_ms);
                now += bucket.take(now, Cost { bytes: amount, operations: 0 });
                bytes += amount;
                let most = (now + BURST).as_secs_f64() * io.bytes as f64;
                prop_assert!(bytes as f64 <= most + 1.0, "{bytes} bytes by {now:?}");
            }
        }
    }
}
