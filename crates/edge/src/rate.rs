//! How much one may use: token buckets, and counts of what is open at once. Every table here is bounded.
//!
//! A bucket of our own rather than a crate: forty lines, and the answer says what is left, which callers are told.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Entries of a table; beyond that, those that are as good as new go.
const ENTRIES: usize = 16 * 1024;

/// So many a second, and so many at once after a silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// A second.
    pub per_second: u64,
    /// At once.
    pub burst: u64,
}

impl Rate {
    /// So many a second, twice that at once.
    pub fn of(per_second: u64) -> Self {
        Rate { per_second, burst: per_second.saturating_mul(2) }
    }
}

/// How a bucket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// What it holds when full.
    pub limit: u64,
    /// What it holds now.
    pub left: u64,
    /// Seconds until it holds one more, where it is empty; else until it is full.
    pub reset_seconds: u64,
}

struct Bucket {
    has: f64,
    at: Instant,
}

/// Buckets by whoever they are of.
pub struct Buckets<K> {
    all: Mutex<HashMap<K, Bucket>>,
}

impl<K> Default for Buckets<K> {
    fn default() -> Self {
        Buckets { all: Mutex::new(HashMap::new()) }
    }
}

impl<K: Hash + Eq> Buckets<K> {
    /// Takes one out of that bucket, if there is one in it.
    ///
    /// # Errors
    /// It is empty.
    pub fn take(&self, of: K, rate: Rate) -> Result<Level, Level> {
        self.take_at(of, rate, Instant::now())
    }

    /// Whether there is one in it. Nothing is taken.
    pub fn has(&self, of: &K, rate: Rate) -> bool {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(of).is_none_or(|bucket| filled(bucket, rate, Instant::now()) >= 1.0)
    }

    fn take_at(&self, of: K, rate: Rate, now: Instant) -> Result<Level, Level> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= ENTRIES && !all.contains_key(&of) {
            all.retain(|_, bucket| filled(bucket, rate, now) < rate.burst as f64);
            if all.len() >= ENTRIES {
                // So many at once are not one caller: what bounds the whole bounds them.
                all.clear();
            }
        }
        let bucket = all.entry(of).or_insert(Bucket { has: rate.burst as f64, at: now });
        bucket.has = filled(bucket, rate, now);
        bucket.at = now;
        let enough = bucket.has >= 1.0;
        if enough {
            bucket.has -= 1.0;
        }
        let missing = if enough { rate.burst as f64 - bucket.has } else { 1.0 - bucket.has };
        let level = Level {
            limit: rate.burst,
            left: bucket.has as u64,
            reset_seconds: (missing / rate.per_second.max(1) as f64).ceil() as u64,
        };
        if enough { Ok(level) } else { Err(level) }
    }
}

fn filled(bucket: &Bucket, rate: Rate, now: Instant) -> f64 {
    let since = now.saturating_duration_since(bucket.at).as_secs_f64();
    (bucket.has + since * rate.per_second as f64).min(rate.burst as f64)
}

/// Counts of what is open, by whoever opened it.
pub struct Open<K> {
    all: Arc<Mutex<HashMap<K, usize>>>,
}

impl<K> Default for Open<K> {
    fn default() -> Self {
        Open { all: Arc::default() }
    }
}

/// One that is open, until it is dropped.
pub struct Opened<K: Hash + Eq> {
    all: Arc<Mutex<HashMap<K, usize>>>,
    of: K,
}

impl<K: Hash + Eq> Drop for Opened<K> {
    fn drop(&mut self) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = all.get_mut(&self.of) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.of);
            }
        }
    }
}

impl<K: Hash + Eq + Clone> Open<K> {
    /// One more, unless there are that many already.
    pub fn enter(&self, of: K, most: usize) -> Option<Opened<K>> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let count = all.get(&of).copied().unwrap_or(0);
        if count >= most {
            return None;
        }
        all.insert(of.clone(), count + 1);
        Some(Opened { all: self.all.clone(), of })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_bucket_empties_and_fills() {
        let buckets = Buckets::default();
        let rate = Rate { per_second: 10, burst: 3 };
        let began = Instant::now();
        let left: Vec<_> = (0..4).map(|_| buckets.take_at("a", rate, began).map(|level| level.left)).collect();
        assert_eq!(left[..3], [Ok(2), Ok(1), Ok(0)]);
        assert_eq!(left[3], Err(Level { limit: 3, left: 0, reset_seconds: 1 }));
        assert!(buckets.take_at("b", rate, began).is_ok(), "another one's is full");
        assert!(buckets.take_at("a", rate, began + Duration::from_millis(50)).is_err());
        assert!(buckets.take_at("a", rate, began + Duration::from_millis(110)).is_ok());
        assert_eq!(
            buckets.take_at("a", rate, began + Duration::from_secs(60)).map(|level| level.left),
            Ok(2),
            "never more than full"
        );
        assert!(buckets.has(&"c", rate));
    }

    #[test]
    fn the_table_is_bounded() {
        let buckets = Buckets::default();
        let rate = Rate { per_second: 1, burst: 2 };
        let began = Instant::now();
        for n in 0..3 * ENTRIES {
            let _ = buckets.take_at(n, rate, began);
        }
        assert!(buckets.all.lock().expect("lock").len() <= ENTRIES);
    }

    #[test]
    fn what_is_open_is_counted_until_it_is_dropped() {
        let open = Open::default();
        let (one, two) = (open.enter("a", 2), open.enter("a", 2));
        assert!(one.is_some() && two.is_some() && open.enter("a", 2).is_none());
        assert!(open.enter("b", 2).is_some());
        drop(one);
        assert!(open.enter("a", 2).is_some());
        drop(two);
        assert!(open.all.lock().expect("lock").is_empty());
    }
}
