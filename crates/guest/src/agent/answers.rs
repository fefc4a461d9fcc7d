//! What the agent answers by itself, with a few events: who it is, its activation, signals, numbers, its end.

use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pepo_proto::{
    Activate, Cause, Event, FailureCode, GENERATION, Hello, HelloReply, OpId, OpSummary, Operation, Outcome, Stats,
};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use super::{Agent, uptime_ms};
use crate::spawn::Environment;
use crate::stream::failed;
use crate::{clock, keep, sys};

/// How long Shutdown waits between the polite signal and the other one.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);

impl Agent {
    /// Operations that are answered by a few events.
    pub(super) async fn small(self: &Rc<Self>, operation: Operation, events: &mut Vec<Event>) -> Outcome {
        let result = match operation {
            Operation::Hello(hello) => self.hello(hello).map(|reply| events.push(Event::Hello(reply))),
            Operation::Activate(activate) => {
                self.settle().await;
                self.activate(activate)
            }
            Operation::Signal(signal) => match signal.signal {
                1..=64 => self.op(signal.target).and_then(|op| op.signal(signal.signal, signal.tree)),
                other => Err(failed(FailureCode::Invalid, format!("{other} is no signal"))),
            },
            Operation::Resize(resize) => self.op(resize.target).and_then(|op| op.resize(resize.size)),
            Operation::Cancel(cancel) => self.cancel(cancel.target).await,
            Operation::Leave(leave) => {
                self.ops.borrow().values().for_each(|op| op.leave(leave.stream));
                Ok(())
            }
            Operation::Ops => {
                let summaries: Vec<OpSummary> = self.ops.borrow().values().map(|op| op.summary()).collect();
                // An outcome may have a sentence of 1 KiB: so few are sure to fit a frame.
                events.extend(summaries.chunks(32).map(|chunk| Event::Ops(chunk.to_vec())));
                Ok(())
            }
            Operation::Ping => Ok(()),
            Operation::Stats => {
                events.push(Event::Stats(self.stats()));
                Ok(())
            }
            Operation::Clock(change) => {
                // A host's own clock is not ours to change.
                let changed = if self.is_guest() { self.clock.add(change.add_ns) } else { Ok(()) };
                events.push(Event::Clock { unix_ns: clock::now().unsigned_abs() });
                changed.map_err(|error| failed(FailureCode::Io, format!("set the clock: {error}")))
            }
            Operation::Sync => {
                // A host's disks are not ours to wait for.
                if self.is_guest() && spawn_blocking(rustix::fs::sync).await.is_err() {
                    Err(failed(FailureCode::Io, "the file systems were not flushed"))
                } else {
                    Ok(())
                }
            }
            Operation::Shutdown => self.shutdown().await,
            Operation::Ready(ready) => {
                if self.is_guest() {
                    self.make_ready(&ready).await;
                }
                Ok(())
            }
            Operation::Keep(wanted) => match (self.is_guest(), self.user(wanted.user.as_deref())) {
                (true, Ok(user)) => spawn_blocking(move || keep::keep(&wanted, &user))
                    .await
                    .unwrap_or_else(|_| Err(failed(FailureCode::Io, "nothing is kept"))),
                (false, _) => Err(failed(FailureCode::Invalid, "only a guest can keep paths")),
                (_, Err(outcome)) => Err(outcome),
            },
            _ => Err(failed(FailureCode::Invalid, "this operation has no place here")),
        };
        result.map_or_else(|outcome| outcome, |()| Outcome::Done)
    }

    fn hello(&self, hello: Hello) -> Result<HelloReply, Outcome> {
        if !(hello.oldest..=hello.newest).contains(&GENERATION) {
            return Err(failed(
                FailureCode::Generation,
                format!("the guest speaks generation {GENERATION}, the host {}..={}", hello.oldest, hello.newest),
            ));
        }
        Ok(HelloReply {
            generation: GENERATION,
            features: 0,
            build: crate::BUILD.to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            boot_ms: self.listening_ms,
            activated: self.activation.borrow().is_some(),
        })
    }

    fn activate(&self, activate: Activate) -> Result<(), Outcome> {
        if self.activation.borrow().is_some() {
            return Err(failed(FailureCode::State, "the guest has been activated already"));
        }
        let label = activate.hostname.as_bytes();
        let fits = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
        if label.is_empty() || label.len() > 63 || !label.iter().all(fits) || label[0] == b'-' || label.ends_with(b"-")
        {
            return Err(failed(FailureCode::Invalid, format!("{:?} is no host name", activate.hostname)));
        }
        if activate.entropy.len() > sys::MAX_ENTROPY {
            return Err(failed(FailureCode::Invalid, "more entropy than 512 bytes"));
        }
        Environment::default().add(&activate.env)?;
        if self.is_guest() {
            crate::mount::become_sandbox(&activate.hostname, &self.clock, activate.clock_unix_ns, &activate.entropy)
                .map_err(|error| failed(FailureCode::Io, error.to_string()))?;
            if !self.identity.get() {
                crate::mount::ready_identity();
            }
            crate::mount::tell_name(&activate.hostname);
            if let Some(network) = &activate.network {
                self.connect(network)?;
            }
        }
        *self.image_env.borrow_mut() = Environment::of_image(Path::new("/"));
        *self.activation.borrow_mut() = Some(activate.env);
        Ok(())
    }

    async fn cancel(&self, target: OpId) -> Result<(), Outcome> {
        if let Some(cancel) = self.others.borrow().get(&target) {
            cancel.notify_one();
            return Ok(());
        }
        let op = self.op(target)?;
        op.ask_kill(Cause::Killed);
        // A kill cannot be refused; what can take long is a process in an uninterruptible wait.
        match timeout(Duration::from_secs(20), op.ended()).await {
            Ok(_) => Ok(()),
            Err(_) => Err(failed(FailureCode::Busy, "the command is killed and has not ended yet")),
        }
    }

    fn stats(&self) -> Stats {
        let (memory_bytes, memory_available_bytes) = memory();
        let disk = rustix::fs::statvfs("/").ok();
        let processes = std::fs::read_dir("/proc")
            .map(|entries| {
                let digits = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
                entries.flatten().filter(|entry| digits(&entry.file_name())).count() as u32
            })
            .unwrap_or(0);
        Stats {
            uptime_ms: uptime_ms(),
            cpu_ms: cpu_ms(),
            memory_bytes,
            memory_available_bytes,
            disk_bytes: disk.as_ref().map_or(0, |disk| disk.f_blocks * disk.f_frsize),
            disk_used_bytes: disk.as_ref().map_or(0, |disk| (disk.f_blocks - disk.f_bfree) * disk.f_frsize),
            processes,
            commands: self.running.get() as u32,
        }
    }

    /// Ends all programs and lets go of what lasts. The power goes after the answer.
    async fn shutdown(self: &Rc<Self>) -> Result<(), Outcome> {
        if self.is_guest() {
            sys::kill_all(15);
            let until = Instant::now() + SHUTDOWN_GRACE;
            while Instant::now() < until && crate::mount::has_processes() {
                sleep(Duration::from_millis(10)).await;
            }
            sys::kill_all(9);
            // The scratch disk ends with the Sandbox; what is to last is on no disk of ours yet unflushed after this.
            let _ = timeout(Duration::from_secs(5), spawn_blocking(crate::mount::flush)).await;
        } else {
            self.kill_all();
        }
        Ok(())
    }
}

/// Bytes of memory: all, and available.
pub(super) fn memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
    };
    (field("MemTotal"), field("MemAvailable"))
}

/// Processor time used since boot, in milliseconds: all but idle and waiting.
fn cpu_ms() -> u64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let numbers = text.lines().next().unwrap_or_default().split_ascii_whitespace().skip(1);
    let ticks: u64 = numbers
        .take(8)
        .enumerate()
        .filter(|(i, _)| *i != 3 && *i != 4)
        .filter_map(|(_, n)| n.parse::<u64>().ok())
        .sum();
    // User-visible ticks are a hundredth of a second on every Linux x86-64.
    ticks * 10
}
