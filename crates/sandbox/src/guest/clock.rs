//! A guest's wall clock beside this host's. It is set by Activate, and behind by as long as that was on its way; it stands
//! while the host sleeps; and files of a tree that is served have the host's times.

use std::time::{Duration, SystemTime};

use pepo_proto::{Clock, Event, Operation};

use super::{Error, Guest};

/// How far a guest's clock may be off. Less than a file system's tick and the way to a guest cannot be told from nothing.
const NEAR: Duration = Duration::from_millis(10);

/// How a guest's clock is to be changed, where that can be told: what it said, and between which two moments it did.
fn change(said: Duration, between: (Duration, Duration)) -> Option<i64> {
    let (from, to) = between;
    // Wherever it was asked in between, it is that far off at the least.
    let behind = from.saturating_sub(said);
    let ahead = said.saturating_sub(to);
    if behind.max(ahead) <= NEAR || to < from {
        return None;
    }
    let middle = from + to.saturating_sub(from) / 2;
    let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    Some(nanos(middle).saturating_sub(nanos(said)))
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

impl Guest {
    /// Puts the guest's wall clock right where it is surely off by more than hundredths of a second, and tells by how many
    /// nanoseconds. One that a program of the guest has set stays as it is.
    ///
    /// # Errors
    /// An agent that cannot be asked; one of an earlier release does not know the question.
    pub async fn keep_clock(&self) -> Result<Option<i64>, Error> {
        let from = now();
        let said = self.clock(0).await?;
        let Some(add_ns) = change(said, (from, now())) else { return Ok(None) };
        self.clock(add_ns).await?;
        Ok(Some(add_ns))
    }

    async fn clock(&self, add_ns: i64) -> Result<Duration, Error> {
        let mut said = None;
        self.control(Operation::Clock(Clock { add_ns }), self.0.deadlines.control, |event| {
            if let Event::Clock { unix_ns } = event {
                said = Some(Duration::from_nanos(unix_ns));
            }
            Ok(())
        })
        .await?;
        said.ok_or(Error::Lost(None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(1_700_000_000_000 + ms)
    }

    #[test]
    fn a_clock_is_changed_where_it_is_surely_off_and_to_the_middle_of_what_it_may_be() {
        for (said, from, to, by) in [
            (100, 100, 100, None),
            (95, 100, 300, None),
            (310, 100, 300, None),
            (80, 100, 300, Some(120)),
            (320, 100, 300, Some(-120)),
            (0, 8 * 3_600_000, 8 * 3_600_000 + 2, Some(8 * 3_600_000 + 1)),
        ] {
            assert_eq!(change(ms(said), (ms(from), ms(to))), by.map(|by| by * 1_000_000), "{said}");
        }
        assert_eq!(change(Duration::ZERO, (Duration::MAX, Duration::MAX)), Some(i64::MAX));
        assert_eq!(change(Duration::MAX, (ms(0), ms(0))), Some(ms(0).as_nanos() as i64 - i64::MAX));
        assert_eq!(change(ms(500), (ms(100), ms(0))), None, "the host's own went back meanwhile");
    }
}
