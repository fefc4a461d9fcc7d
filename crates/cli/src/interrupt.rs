//! Signals to this program, as events in the order they came.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::fail::{Failure, Outcome};

/// One signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caught {
    /// Its name.
    pub name: &'static str,
    /// Its number.
    pub number: u8,
}

impl Caught {
    /// Whether a person or a service wants this program to end.
    pub fn ends(self) -> bool {
        matches!(self.name, "SIGINT" | "SIGTERM" | "SIGHUP" | "SIGQUIT")
    }

    /// The exit code for having been ended by it.
    pub fn exit_code(self) -> u8 {
        128 + self.number
    }
}

/// The signals that are passed on or end things.
pub struct Interrupts {
    int: Signal,
    term: Signal,
    hup: Signal,
    quit: Signal,
    user1: Signal,
    user2: Signal,
}

impl Interrupts {
    /// From here on they are events and no longer end the program.
    pub fn new() -> Outcome<Self> {
        let take = |kind| signal(kind).map_err(|error| Failure::new(format!("cannot take signals: {error}")));
        Ok(Interrupts {
            int: take(SignalKind::interrupt())?,
            term: take(SignalKind::terminate())?,
            hup: take(SignalKind::hangup())?,
            quit: take(SignalKind::quit())?,
            user1: take(SignalKind::user_defined1())?,
            user2: take(SignalKind::user_defined2())?,
        })
    }

    /// The next one.
    pub async fn next(&mut self) -> Caught {
        let (name, number) = tokio::select! {
            _ = self.int.recv() => ("SIGINT", 2),
            _ = self.term.recv() => ("SIGTERM", 15),
            _ = self.hup.recv() => ("SIGHUP", 1),
            _ = self.quit.recv() => ("SIGQUIT", 3),
            _ = self.user1.recv() => ("SIGUSR1", 10),
            _ = self.user2.recv() => ("SIGUSR2", 12),
        };
        Caught { name, number }
    }

    /// The next one that asks for an end.
    pub async fn end(&mut self) -> Caught {
        loop {
            let caught = self.next().await;
            if caught.ends() {
                return caught;
            }
        }
    }

    /// Does this unless an end is asked for first.
    pub async fn unless<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Caught> {
        tokio::select! {
            biased;
            caught = self.end() => Err(caught),
            done = work => Ok(done),
        }
    }
}
