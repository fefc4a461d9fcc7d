//! One command: what it is, how it stands, and who waits for it.
//!
//! Its record is the table's ([`super::Commands`]), its bytes are read by a [`super::Follower`]. Promises that one whose callers
//! are gone is watched for its end, and killed where they asked for that.
//!
//! ```text
//! Starting ──► Running ──► Ended          by its End, seen by a follower or by the watcher
//!     │           └──────► Ended          by the Sandbox's end
//!     └──► NotStarted
//! ```

mod input;
mod rescue;
mod table;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use pepo_api::{CommandEnd, CommandId, CommandState, OnDisconnect, SessionId};
use pepo_sandbox::guest;
use pepo_sandbox::proto::{self, FailureCode, OpId};
use tokio::sync::watch;

use super::follow::{Follower, Leaving, Parked};
use super::kept;
use super::{Error, Session, Ticket};
use crate::store::{CommandRow, CommandSpec, EndRow};

pub use table::Commands;

/// How long a command without a caller waits for one, where it is to be killed with its last caller.
const LEASE: Duration = Duration::from_secs(proto::LEASE_SECONDS);

/// A command to be run.
#[derive(Debug)]
pub struct NewCommand {
    /// Its name; the same again joins the run there is.
    pub id: CommandId,
    /// Whether the caller made the name.
    pub named_by_caller: bool,
    /// What the guest is asked.
    pub exec: proto::Exec,
    /// What is recorded.
    pub spec: CommandSpec,
    /// Input that is there already.
    pub input: Bytes,
    /// Whether more follows.
    pub more_input: bool,
    /// Whether its App's quota counts Commands: then its record is on the disk before it is started.
    pub counted: bool,
}

/// How a command stands.
#[derive(Clone, Debug)]
pub enum Status {
    /// The guest was asked.
    Starting,
    /// It runs.
    Running,
    /// It could not be started.
    NotStarted {
        /// Whether the program is not there (127) or not executable (126), or else why.
        code: FailureCode,
        /// The guest's sentence, escaped.
        message: String,
    },
    /// It has ended.
    Ended(Box<EndRow>),
}

/// One command.
#[derive(Debug)]
pub struct Command {
    session: SessionId,
    id: CommandId,
    spec: CommandSpec,
    activation: u64,
    started_at: jiff::Timestamp,
    status: watch::Sender<Status>,
    callers: Mutex<Callers>,
    ticket: Mutex<Option<Ticket>>,
    /// Bytes seen of both outputs by whoever followed from the beginning.
    seen: [AtomicU64; 2],
    /// One at a time feeds it.
    input: tokio::sync::Mutex<()>,
    /// Its whole output, while that is small.
    small: Mutex<Option<kept::Output>>,
    /// The stream it was started by, for a moment after its caller was answered.
    parked: Mutex<Option<Parked>>,
}

#[derive(Debug, Default)]
struct Callers {
    following: usize,
    /// Whether a task waits for its end.
    watched: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Command {
    fn new(session: SessionId, activation: u64, id: CommandId, spec: CommandSpec, started_at: jiff::Timestamp) -> Self {
        Command {
            session,
            id,
            spec,
            activation,
            started_at,
            status: watch::Sender::new(Status::Starting),
            callers: Mutex::default(),
            ticket: Mutex::default(),
            seen: Default::default(),
            input: tokio::sync::Mutex::new(()),
            small: Mutex::default(),
            parked: Mutex::default(),
        }
    }

    /// Its id.
    pub fn id(&self) -> CommandId {
        self.id
    }

    /// The guest's name for it.
    pub fn op(&self) -> OpId {
        OpId(self.id.uuid().into_bytes())
    }

    /// What was asked for.
    pub fn spec(&self) -> &CommandSpec {
        &self.spec
    }

    /// The activation it runs in.
    pub fn activation(&self) -> u64 {
        self.activation
    }

    /// When it was started.
    pub fn started_at(&self) -> jiff::Timestamp {
        self.started_at
    }

    /// How it stands.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Whether it has ended, one way or the other.
    pub fn is_over(&self) -> bool {
        matches!(*self.status.borrow(), Status::Ended(_) | Status::NotStarted { .. })
    }

    /// Returns when it is known to run, or to have ended.
    pub async fn started(&self) -> Status {
        let mut status = self.status.subscribe();
        match status.wait_for(|now| !matches!(now, Status::Starting)).await {
            Ok(now) => now.clone(),
            Err(_) => self.status(),
        }
    }

    /// Returns when it has ended.
    pub async fn over(&self) -> Status {
        let mut status = self.status.subscribe();
        match status.wait_for(|now| matches!(now, Status::Ended(_) | Status::NotStarted { .. })).await {
            Ok(now) => now.clone(),
            Err(_) => self.status(),
        }
    }

    pub(super) fn runs(&self) {
        self.status.send_if_modified(|status| {
            let starting = matches!(status, Status::Starting);
            if starting {
                *status = Status::Running;
            }
            starting
        });
    }

    pub(super) fn saw(&self, counts: [u64; 2]) {
        for (seen, count) in self.seen.iter().zip(counts) {
            seen.fetch_max(count, Ordering::Relaxed);
        }
    }

    pub(super) fn keep_small(&self, output: kept::Output) {
        *lock(&self.small) = Some(output);
    }

    pub(super) fn park(&self, parked: Parked) {
        *lock(&self.parked) = Some(parked);
    }

    /// The parked stream, if there is one that stands at this offset.
    pub(super) async fn unpark(&self, from: u64) -> Option<Box<Follower>> {
        let parked = lock(&self.parked).take_if(|parked| parked.is_at(from))?;
        parked.take().await
    }

    /// As the API shows it.
    pub fn shown(&self) -> pepo_api::Command {
        let status = self.status();
        let (end, stdout_bytes, stderr_bytes) = match &status {
            Status::Ended(row) => (Some(row.end.clone()), row.stdout_bytes, row.stderr_bytes),
            Status::Starting | Status::Running | Status::NotStarted { .. } => {
                (None, self.seen[0].load(Ordering::Relaxed), self.seen[1].load(Ordering::Relaxed))
            }
        };
        shown(self.session, self.id, &self.spec, self.activation, self.started_at, end, [stdout_bytes, stderr_bytes])
    }

    pub(super) fn follows(&self) {
        lock(&self.callers).following += 1;
    }

    /// A caller leaves. Where it was the last, the command is watched for its end, and killed where that was asked for.
    pub(super) fn leaves(self: &Arc<Self>, session: &Session, how: Leaving) {
        let mut callers = lock(&self.callers);
        callers.following -= 1;
        if callers.following > 0 || self.is_over() {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if !std::mem::replace(&mut callers.watched, true) {
            runtime.spawn(table::watch_end(session.clone(), self.clone(), false));
        }
        if self.spec.on_disconnect == OnDisconnect::Kill {
            let (session, command) = (session.clone(), self.clone());
            runtime.spawn(async move {
                if how == Leaving::Answered && !command.is_forsaken_after(LEASE).await {
                    return;
                }
                tracing::debug!(command = %command.id, "its callers are gone: killing it");
                if let Err(error) = session.commands().kill(&session, &command).await {
                    tracing::debug!(command = %command.id, %error, "could not be killed");
                }
            });
        }
    }

    /// Whether nobody followed it for that long, and it still runs.
    async fn is_forsaken_after(&self, lease: Duration) -> bool {
        if tokio::time::timeout(lease, self.over()).await.is_ok() {
            return false;
        }
        lock(&self.callers).following == 0
    }
}

/// A command as the API shows it.
pub fn shown(
    session: SessionId,
    id: CommandId,
    spec: &CommandSpec,
    activation: u64,
    started_at: jiff::Timestamp,
    end: Option<CommandEnd>,
    [stdout_bytes, stderr_bytes]: [u64; 2],
) -> pepo_api::Command {
    pepo_api::Command {
        id,
        session_id: session,
        activation,
        role: spec.role,
        service: spec.service.clone(),
        state: if end.is_some() { CommandState::Exited } else { CommandState::Running },
        argv: spec.argv.clone(),
        shell: spec.shell.clone(),
        on_disconnect: spec.on_disconnect,
        limits: spec.limits,
        pty: spec.pty,
        started_at,
        end,
        stdout_bytes,
        stderr_bytes,
    }
}

/// A command of which only the record is left, as the API shows it.
pub fn shown_row(row: CommandRow) -> pepo_api::Command {
    shown(row.session, row.id, &row.spec, row.activation, row.started_at, row.end, [row.stdout_bytes, row.stderr_bytes])
}

/// What the guest's refusal to start is to the caller.
pub(super) fn not_started(code: FailureCode, message: String) -> Error {
    match code {
        FailureCode::ProgramNotFound => Error::NotStarted { message, exit_code: 127 },
        FailureCode::ProgramNotExecutable => Error::NotStarted { message, exit_code: 126 },
        _ => Error::Guest(guest::Error::Failed(proto::Failure { code, message })),
    }
}
