//! When a Session was used last: what counts is held as [`Ticket`]s, and the keep-alive runs from the end of the last one.
//!
//! Pure arithmetic on times, tested alone. Looking at a Session takes no ticket; running commands, open streams, file
//! operations and connections do.

use std::time::Duration;

use jiff::Timestamp;

use super::Session;

/// Before a Session was used for the first time it stays at least this long, whatever its keep-alive: whoever made it has
/// to come back to it.
const FIRST: Duration = Duration::from_secs(60);

/// Between two uses a Session stays at least this long: requests of one caller follow each other, and a keep-alive of zero
/// must not end it between a copy and the command that was copied for.
const BREATH: Duration = Duration::from_secs(5);

/// How a Session is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Activity {
    /// Uses now.
    pub open: u32,
    /// Whether there was one since the Sandbox serves.
    pub ever: bool,
    /// When the last one ended, or the Sandbox began to serve.
    pub quiet_since: Timestamp,
}

impl Activity {
    pub fn new(now: Timestamp) -> Self {
        Activity { open: 0, ever: false, quiet_since: now }
    }

    fn begin(&mut self) {
        self.open += 1;
    }

    fn end(&mut self, now: Timestamp) {
        self.open = self.open.saturating_sub(1);
        self.ever = true;
        self.quiet_since = now;
    }

    /// The Sandbox serves from now on.
    pub fn serving(&mut self, now: Timestamp) {
        self.quiet_since = now;
    }

    /// Since when nobody uses it; none while somebody does, or is about to.
    pub fn unused_since(&self, now: Timestamp) -> Option<Timestamp> {
        let about_to = self.keep_until(Duration::ZERO)? > now;
        (!about_to).then_some(self.quiet_since)
    }

    /// When the Sandbox goes if nothing happens; none while it is used.
    pub fn keep_until(&self, keep_alive: Duration) -> Option<Timestamp> {
        if self.open > 0 {
            return None;
        }
        let stay = keep_alive.max(if self.ever { BREATH } else { FIRST });
        // Beyond the end of time is never.
        self.quiet_since.checked_add(jiff::SignedDuration::try_from(stay).unwrap_or(jiff::SignedDuration::MAX)).ok()
    }
}

/// One use of a Session, until dropped.
#[derive(Debug)]
pub struct Ticket(Session);

impl Ticket {
    pub(super) fn new(session: Session) -> Self {
        session.0.activity.send_modify(Activity::begin);
        Ticket(session)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.0.activity.send_modify(|activity| activity.end(Timestamp::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + second).expect("time")
    }

    #[test]
    fn the_keep_alive_runs_from_the_end_of_the_last_use() {
        let mut activity = Activity::new(at(0));
        let keep = Duration::from_secs(300);
        assert_eq!(activity.keep_until(keep), Some(at(300)));
        activity.begin();
        activity.begin();
        assert_eq!(activity.keep_until(keep), None);
        activity.end(at(10));
        assert_eq!(activity.keep_until(keep), None);
        activity.end(at(1000));
        assert_eq!(activity.keep_until(keep), Some(at(1300)));
        assert_eq!((activity.unused_since(at(1003)), activity.unused_since(at(1006))), (None, Some(at(1000))));
    }

    #[test]
    fn before_the_first_use_it_stays_a_minute() {
        let mut activity = Activity::new(at(0));
        assert_eq!(activity.keep_until(Duration::ZERO), Some(at(60)));
        activity.begin();
        activity.end(at(7));
        assert_eq!(activity.keep_until(Duration::ZERO), Some(at(12)));
        assert_eq!(activity.keep_until(Duration::MAX), None);
    }
}
