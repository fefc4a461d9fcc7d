//! From a program's pipes, or its terminal, into the ring.
//!
//! Reads only what the ring has room for, so that a slow reader holds the program back, and nothing that a program wrote
//! before its end is lost. Called by the tasks of `exec` and `shell`.

use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use pepo_proto::{Channel, MAX_DATA};
use tokio::io::unix::AsyncFd;
use tokio::task::spawn_local;
use tokio::time::{sleep, sleep_until, timeout};

use crate::agent::Agent;
use crate::exec::{Op, STALL};
use crate::ring::Fill;
use crate::sys;

/// After the first process's end: output that others still write is taken for so long at the most ...
const GRACE: Duration = Duration::from_millis(200);

/// ... and only while something comes at least this often.
const QUIET: Duration = Duration::from_millis(20);

/// What a pipe is grown to once a program fills it.
const LARGE_PIPE: usize = 1 << 20;

/// Pipes of processes that outlived their command which are read and dropped. Beyond it they are closed.
const MAX_SINKS: usize = 256;

/// From so many bytes without a pause on, a program is a bulk writer ...
const BULK: usize = 128 << 10;

/// ... and is left to fill its pipe for so long between reads: otherwise each of its small writes wakes the agent, and
/// the time goes into taking turns on the processor, of which each empties an emulator's table of pages (measured in
/// software emulation: with 1 ms a stream of output costs 15 % more than without us, with 4 ms nothing).
const GATHER: Duration = Duration::from_millis(4);

/// Reads before others have their turn: as much as a large pipe holds.
const READS: usize = LARGE_PIPE / MAX_DATA + 1;

/// Where a command's output comes from.
pub struct Collector {
    sources: [Option<AsyncFd<OwnedFd>>; 2],
    full: bool,
    /// Bytes since there was last nothing to read.
    burst: usize,
    grown: [bool; 2],
}

/// Waits until a source has something; for ever where there is none.
async fn ready(source: &Option<AsyncFd<OwnedFd>>) -> io::Result<()> {
    match source {
        Some(source) => source.readable().await.map(drop),
        None => pending().await,
    }
}

const CHANNELS: [Channel; 2] = [Channel::Out, Channel::Err];

impl Collector {
    pub fn new(out: OwnedFd, err: Option<OwnedFd>) -> io::Result<Self> {
        let source = |fd| sys::watch(fd, tokio::io::Interest::READABLE);
        Ok(Collector {
            sources: [Some(source(out)?), err.map(source).transpose()?],
            full: false,
            burst: 0,
            grown: [false; 2],
        })
    }

    /// Whether every source has ended.
    pub fn is_done(&self) -> bool {
        self.sources.iter().all(Option::is_none)
    }

    /// Waits until some output was taken or a source has ended. Cancel safe.
    pub async fn step(&mut self, op: &Op) {
        if self.full {
            if timeout(STALL / 6, op.room.notified()).await.is_err() {
                op.drop_stalled();
            }
            self.full = false;
        }
        if self.burst >= BULK {
            sleep(GATHER).await;
            if self.take(op) {
                return;
            }
            self.burst = 0;
        }
        let [out, err] = &self.sources;
        tokio::select! {
            result = ready(out) => if result.is_err() { self.sources[0] = None },
            result = ready(err) => if result.is_err() { self.sources[1] = None },
        }
        self.take(op);
    }

    /// Takes what there is now, up to a bound that lets others have their turn. Tells whether there was anything.
    pub fn take(&mut self, op: &Op) -> bool {
        let mut took = false;
        for index in [1, 0] {
            for _ in 0..READS {
                let Some(source) = &self.sources[index] else {
                    break;
                };
                let fill = source.try_io(tokio::io::Interest::READABLE, |fd| {
                    op.ring.borrow_mut().fill(CHANNELS[index], op.hold(), |slices| Ok(rustix::io::readv(fd, slices)?))
                });
                match fill {
                    Ok(Fill::Read(bytes)) => {
                        took = true;
                        self.burst += bytes;
                        if self.burst >= BULK && !self.grown[index] {
                            self.grown[index] = true;
                            // A program that fills its pipe is waited for less often with a larger one; only speed.
                            let _ = rustix::pipe::fcntl_setpipe_size(source.get_ref(), LARGE_PIPE);
                        }
                    }
                    Ok(Fill::Full) => {
                        self.full = true;
                        break;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    // A terminal whose last program is gone says EIO.
                    Ok(Fill::Eof) | Err(_) => self.sources[index] = None,
                }
            }
        }
        if took {
            op.changed.notify_waiters();
        } else {
            op.ring.borrow_mut().settle();
        }
        took
    }

    /// After the end of the first process: takes what it wrote, and for a short while what others still write.
    pub async fn drain(&mut self, op: &Op) {
        let unread: u64 =
            self.sources.iter().flatten().map(|source| rustix::io::ioctl_fionread(source.get_ref()).unwrap_or(0)).sum();
        let owed = op.ring.borrow().next() + unread;
        let until = tokio::time::Instant::now() + GRACE;
        while !self.is_done() {
            let before = op.ring.borrow().next();
            if before < owed {
                // It was written before the end: waited for as long as its readers take, unless a kill was asked for.
                tokio::select! {
                    () = self.step(op) => {}
                    _ = op.kill_asked(), if op.asked().is_none() => {}
                    () = sleep_until(until), if op.asked().is_some() => return,
                }
                continue;
            }
            let quiet = (tokio::time::Instant::now() + QUIET).min(until);
            tokio::select! {
                () = self.step(op) => {}
                () = sleep_until(quiet) => return,
            }
        }
    }

    /// Goes on reading for processes that outlived the command, and drops what they write.
    pub fn sink(self, agent: &Rc<Agent>) {
        for source in self.sources.into_iter().flatten() {
            if agent.sinks.get() >= MAX_SINKS {
                return;
            }
            agent.sinks.set(agent.sinks.get() + 1);
            let agent = agent.clone();
            spawn_local(async move {
                let mut scratch = [0; 4096];
                loop {
                    let Ok(mut ready) = source.readable().await else {
                        break;
                    };
                    match ready.try_io(|source| Ok(rustix::io::read(source.get_ref(), &mut scratch)?)) {
                        Ok(Ok(0) | Err(_)) => break,
                        Ok(Ok(_)) => tokio::task::yield_now().await,
                        Err(_would_block) => {}
                    }
                }
                agent.sinks.set(agent.sinks.get() - 1);
            });
        }
    }
}
