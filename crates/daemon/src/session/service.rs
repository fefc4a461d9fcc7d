//! Services: programs that a Session wants running whenever it has a Sandbox.
//!
//! Owns one task for each Service of the present activation, from Active until the stop path begins. Every run is a Command,
//! so its output is kept and shown like any other's; none of it counts as activity. A run that ends is started again as its
//! Service says, after a pause that doubles from [`FIRST`] to [`LONGEST`] and is short again once a run was [`STEADY`].
//! Readiness is asked for from outside: a connection to the port, or an answer over HTTP; what a Service prints says nothing.
//!
//! ```text
//!            started              port or HTTP answers
//! Stopped ──────────► Starting ───────────────────────► Ready
//!    ▲                   │  ▲                              │
//!    │ stop path         │  └──── Waiting ◄────────────────┤ it ended, and is started again
//!    │                   └─────────────────► Exited ◄──────┘ it ended, and stays so
//! ```

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use pepo_api::{
    CommandEnd, CommandId, CommandRole, OnDisconnect, ReadySpec, Restart, Service, ServiceSpec, ServiceState,
};
use pepo_sandbox::guest::Guest;
use pepo_sandbox::{chain, proto};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::{Command, Error, NewCommand, Serving, Session, Status};
use crate::store::CommandSpec;

/// The pause before a Service is started again for the first time.
const FIRST: Duration = Duration::from_secs(1);

/// The longest such pause.
const LONGEST: Duration = Duration::from_secs(60);

/// A run of so long is no failed start.
const STEADY: Duration = Duration::from_secs(60);

/// Between two questions whether a Service is ready: at first, and at the most.
const ASK: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// How long one question may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Of an answer over HTTP so much is read: its first line fits.
const FIRST_LINE: usize = 256;

/// The Services of one Session.
#[derive(Debug, Default)]
pub struct Services {
    now: watch::Sender<Vec<Service>>,
    tasks: Mutex<Vec<AbortOnDropHandle<()>>>,
}

/// What is known of the last run when a Service is taken up.
enum Run {
    Runs(Arc<Command>),
    Over(CommandEnd),
}

fn unstarted(spec: &ServiceSpec, state: ServiceState) -> Service {
    Service {
        spec: spec.clone(),
        state,
        command_id: None,
        restarts: 0,
        started_at: None,
        ready_at: None,
        next_start_at: None,
        last_end: None,
        message: String::new(),
    }
}

impl Services {
    /// As they are: those of the present activation, or those that the next one will have.
    pub fn shown(&self, specs: &[ServiceSpec]) -> Vec<Service> {
        let now = self.now.borrow();
        match now.is_empty() {
            true => specs.iter().map(|spec| unstarted(spec, ServiceState::Stopped)).collect(),
            false => now.clone(),
        }
    }

    /// Returns when each one is ready or will not be, when the Session has no Sandbox for them, or when the wait is over.
    pub async fn decided(&self, session: &Session, wait: Duration) {
        let mut published = session.0.published.subscribe();
        let mut now = self.now.subscribe();
        let decided = async {
            loop {
                let comes = published.borrow_and_update().state.cause().is_none();
                let open = |service: &Service| matches!(service.state, ServiceState::Ready | ServiceState::Exited);
                let all = {
                    let now = now.borrow_and_update();
                    !now.is_empty() && now.iter().all(open)
                };
                if !comes || all || session.now().spec.services_now().is_empty() {
                    return;
                }
                tokio::select! {
                    moved = published.changed() => if moved.is_err() { return },
                    moved = now.changed() => if moved.is_err() { return },
                }
            }
        };
        // Over is over.
        let _ = tokio::time::timeout(wait, decided).await;
    }

    /// Returns when no Service of that port is on its way up, or when the wait is over.
    pub async fn up(&self, port: u16, wait: Duration) {
        let mut now = self.now.subscribe();
        let starting = |service: &Service| service.spec.port == Some(port) && service.state == ServiceState::Starting;
        let up = now.wait_for(|now| !now.iter().any(starting));
        // What is not up by then is told by the connection that fails.
        let _ = tokio::time::timeout(wait, up).await;
    }

    /// A Sandbox begins to serve: from now on they are on their way up.
    pub(super) fn announce(&self, specs: &[ServiceSpec]) {
        self.now.send_replace(specs.iter().map(|spec| unstarted(spec, ServiceState::Starting)).collect());
    }

    /// Starts what was announced.
    pub(super) fn begin(&self, session: &Session, guest: &Guest, activation: u64) {
        self.run(session, guest, activation, Past::None);
    }

    /// Goes on with the Services of a Sandbox that an earlier life of this daemon made.
    pub(super) fn take_up(&self, session: &Session, guest: &Guest, activation: u64) {
        self.announce(session.now().spec.services_now());
        self.run(session, guest, activation, Past::Recorded);
    }

    fn run(&self, session: &Session, guest: &Guest, activation: u64, past: Past) {
        let specs: Vec<_> = self.now.borrow().iter().map(|service| service.spec.clone()).collect();
        if specs.is_empty() {
            return;
        }
        let tasks = specs.into_iter().enumerate().map(|(at, spec)| {
            let keeper = Keeper { session: session.clone(), guest: guest.clone(), activation, at, spec };
            AbortOnDropHandle::new(tokio::spawn(keeper.keep(past)))
        });
        *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) = tasks.collect();
    }

    /// Starts nothing more. What runs is ended by the stop path, with all other Commands.
    pub(super) fn stop(&self) {
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        drop(tasks);
        self.now.send_replace(Vec::new());
    }

    fn set(&self, at: usize, change: impl FnOnce(&mut Service)) {
        self.now.send_if_modified(|now| match now.get_mut(at) {
            Some(service) => {
                change(service);
                true
            }
            // It was stopped a moment ago.
            None => false,
        });
    }
}

/// Whether there may be runs that this life of the daemon does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Past {
    None,
    Recorded,
}

/// Keeps one Service.
struct Keeper {
    session: Session,
    guest: Guest,
    activation: u64,
    at: usize,
    spec: ServiceSpec,
}

impl Keeper {
    async fn keep(self, past: Past) {
        let mut known = match past {
            Past::None => None,
            Past::Recorded => self.last_run().await,
        };
        let mut pause = FIRST;
        loop {
            let began = Instant::now();
            let run = match known.take() {
                Some(run) => Ok(run),
                None => self.start().await.map(Run::Runs),
            };
            let end = match run {
                Ok(Run::Runs(command)) => self.until_over(&command).await,
                Ok(Run::Over(end)) => Some(end),
                Err(error) => {
                    self.set(|service| service.message = chain(&error));
                    None
                }
            };
            if began.elapsed() >= STEADY {
                pause = FIRST;
            }
            if !again(self.spec.restart(), end.as_ref()) {
                self.set(|service| {
                    service.state = ServiceState::Exited;
                    service.last_end = end;
                });
                return;
            }
            let next = Timestamp::now().checked_add(jiff::SignedDuration::try_from(pause).unwrap_or_default()).ok();
            self.set(|service| {
                service.state = ServiceState::Waiting;
                service.next_start_at = next;
                service.last_end = end.or(service.last_end.take());
            });
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST);
            self.set(|service| {
                service.state = ServiceState::Starting;
                (service.next_start_at, service.ready_at) = (None, None);
                service.restarts += 1;
            });
        }
    }

    fn set(&self, change: impl FnOnce(&mut Service)) {
        self.session.services().set(self.at, change);
    }

    /// Its last run in this activation, by the record and by what the guest says.
    async fn last_run(&self) -> Option<Run> {
        let store = self.session.commands().store();
        let rows = store.last_runs(self.session.id(), self.activation).await.unwrap_or_else(|error| {
            tracing::error!(session = %self.session.id(), error = chain(&error), "the Services' runs are not known");
            Vec::new()
        });
        let row = rows.into_iter().find(|row| row.spec.service.as_deref() == Some(&self.spec.name))?;
        match self.session.commands().get(row.id) {
            Some(command) => Some(Run::Runs(command)),
            None => row.end.map(Run::Over),
        }
    }

    async fn start(&self) -> Result<Arc<Command>, Error> {
        let exec = proto::Exec { detached: true, ..proto::Exec::new(["/bin/bash", "-c", self.spec.command.as_str()]) };
        let spec = CommandSpec {
            argv: vec![self.spec.command.clone()],
            shell: None,
            on_disconnect: OnDisconnect::Keep,
            pty: false,
            stdin: false,
            keeps_alive: false,
            role: CommandRole::Service,
            service: Some(self.spec.name.clone()),
            limits: None,
        };
        let new = NewCommand {
            id: CommandId::generate(),
            named_by_caller: false,
            exec,
            spec,
            input: Bytes::new(),
            more_input: false,
            counted: false,
        };
        let serving = Serving { guest: self.guest.clone(), activation: self.activation, ticket: None };
        // Followed no further: the command is watched for its end, and its output stays in the guest.
        let mut follower = self.session.commands().start(&self.session, new, serving).await?;
        follower.answered();
        follower.command().cloned().ok_or_else(|| Error::NoSandboxNow("it is a record only".into()))
    }

    /// How it ended; none where it never began.
    async fn until_over(&self, command: &Arc<Command>) -> Option<CommandEnd> {
        let (id, started_at) = (command.id(), command.started_at());
        self.set(|service| {
            (service.command_id, service.started_at) = (Some(id), Some(started_at));
            service.message.clear();
        });
        let over = async {
            match command.over().await {
                Status::Ended(row) => Ok(row.end),
                Status::NotStarted { message, .. } => Err(message),
                Status::Starting | Status::Running => Err(String::new()),
            }
        };
        tokio::pin!(over);
        let ended = tokio::select! {
            biased;
            ended = &mut over => ended,
            () = ready(&self.guest, &self.spec) => {
                self.set(|service| {
                    service.state = ServiceState::Ready;
                    service.ready_at = Some(Timestamp::now());
                });
                over.await
            }
        };
        match ended {
            Ok(end) => Some(end),
            Err(message) => {
                self.set(|service| service.message = message);
                None
            }
        }
    }
}

/// Whether it is started again.
fn again(restart: Restart, end: Option<&CommandEnd>) -> bool {
    match restart {
        Restart::No => false,
        Restart::OnFailure => end.is_none_or(|end| end.exit_code != Some(0)),
        Restart::Always => true,
    }
}

/// Returns when it is ready.
async fn ready(guest: &Guest, spec: &ServiceSpec) {
    let Some(port) = spec.port else { return };
    let (mut pause, most) = ASK;
    loop {
        let asked = tokio::time::timeout(ANSWER_WITHIN, answers(guest, port, spec.ready.as_ref())).await;
        if asked.unwrap_or(false) {
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(most);
    }
}

async fn answers(guest: &Guest, port: u16, ready: Option<&ReadySpec>) -> bool {
    let Ok(mut connection) = guest.dial(port).await else { return false };
    let Some(ready) = ready else { return true };
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: localhost:{port}\r\nUser-Agent: pepo\r\nAccept: */*\r\nConnection: close\r\n\r\n",
        ready.http
    );
    if connection.write_all(request.as_bytes()).await.is_err() || connection.flush().await.is_err() {
        return false;
    }
    let mut line = Vec::new();
    while line.len() < FIRST_LINE && !line.contains(&b'\n') {
        let mut piece = [0; FIRST_LINE];
        match connection.read(&mut piece).await {
            Ok(0) | Err(_) => break,
            Ok(length) => line.extend_from_slice(&piece[..length]),
        }
    }
    is_well(&line)
}

/// Whether an answer's first line says that all is well.
fn is_well(line: &[u8]) -> bool {
    let Some(rest) = line.strip_prefix(b"HTTP/1.") else { return false };
    // A digit, a space, three digits.
    let status = rest.get(2..5).and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<u16>().ok());
    status.is_some_and(|status| (200..400).contains(&status))
}

#[cfg(test)]
mod tests {
    use pepo_api::Reason;

    use super::*;

    #[test]
    fn a_status_of_two_or_three_hundred_is_well() {
        for good in ["HTTP/1.1 200 OK\r\n", "HTTP/1.0 204 \r\n", "HTTP/1.1 302 Found\r\nLocation: /\r\n"] {
            assert!(is_well(good.as_bytes()), "{good}");
        }
        for bad in
            ["", "HTTP/1.1 ", "HTTP/1.1 404 No", "HTTP/1.1 500 x", "SSH-2.0-OpenSSH", "HTTP/2 200", "HTTP/1.1 99x"]
        {
            assert!(!is_well(bad.as_bytes()), "{bad}");
        }
    }

    #[test]
    fn what_is_started_again_is_what_was_asked_for() {
        let end = |code| CommandEnd {
            reason: Reason::Exit,
            exit_code: code,
            signal: None,
            signal_number: None,
            cwd: None,
            at: Timestamp::UNIX_EPOCH,
        };
        let (well, badly, killed) = (end(Some(0)), end(Some(1)), end(None));
        for (restart, expected) in [
            (Restart::No, [false, false, false, false]),
            (Restart::OnFailure, [false, true, true, true]),
            (Restart::Always, [true, true, true, true]),
        ] {
            let ends = [Some(&well), Some(&badly), Some(&killed), None];
            assert_eq!(ends.map(|end| again(restart, end)), expected, "{restart:?}");
        }
    }
}
