//! Signals to this program, as events in the order they came.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

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

    /// Whether a terminal sends it to every process of the foreground at once.
    pub fn is_for_all(self) -> bool {
        matches!(self.name, "SIGINT" | "SIGHUP" | "SIGQUIT")
    }

    /// The exit code for having been ended by it.
    pub fn exit_code(self) -> u8 {
        128 + self.number
    }
}

/// The signals that are passed on or end things.
pub struct Interrupts {
    caught: mpsc::Receiver<Caught>,
}

impl Interrupts {
    /// From here on they are events and no longer end the program.
    pub fn new() -> Outcome<Self> {
        let take = |kind| signal(kind).map_err(|error| Failure::new(format!("cannot take signals: {error}")));
        let mut int = take(SignalKind::interrupt())?;
        let mut term = take(SignalKind::terminate())?;
        let mut hup = take(SignalKind::hangup())?;
        let mut quit = take(SignalKind::quit())?;
        let mut user1 = take(SignalKind::user_defined1())?;
        let mut user2 = take(SignalKind::user_defined2())?;
        let (tell, caught) = mpsc::channel(16);
        tokio::spawn(async move {
            loop {
                let (name, number) = tokio::select! {
                    _ = int.recv() => ("SIGINT", 2),
                    _ = term.recv() => ("SIGTERM", 15),
                    _ = hup.recv() => ("SIGHUP", 1),
                    _ = quit.recv() => ("SIGQUIT", 3),
                    _ = user1.recv() => ("SIGUSR1", 10),
                    _ = user2.recv() => ("SIGUSR2", 12),
                };
                if tell.send(Caught { name, number }).await.is_err() {
                    return;
                }
            }
        });
        Ok(Interrupts { caught })
    }

    /// From a test's hand.
    #[cfg(test)]
    pub fn scripted() -> (mpsc::Sender<Caught>, Self) {
        let (tell, caught) = mpsc::channel(16);
        (tell, Interrupts { caught })
    }

    /// The next one.
    pub async fn next(&mut self) -> Caught {
        match self.caught.recv().await {
            Some(caught) => caught,
            None => std::future::pending().await,
        }
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
