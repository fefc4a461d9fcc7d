//! The job by which a guest's processor is compared with its host's: the same code on both sides, and nothing but a loop.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// How much of it is one measurement: about 50 ms on a host.
pub const ROUNDS: u64 = 40_000_000;

/// Does the job; how long it took.
#[inline(never)]
pub fn spin(rounds: u64) -> Duration {
    let began = Instant::now();
    let mut number = black_box(0x9E37_79B9_7F4A_7C15_u64);
    for _ in 0..rounds {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
    }
    black_box(number);
    began.elapsed()
}
