//! The commands of one Session: which there are, how each one stands, and who waits for it.
//!
//! Owns the record of a command while it runs and for a while after. Bytes never pass through here: a [`super::Follower`]
//! reads them from the guest for one caller. Promises that the end of every command is recorded once, also when nobody
//! follows it, and that one whose callers are gone is killed where they asked for that.
//!
//! ```text
//! Starting ──► Running ──► Ended          by its End, seen by a follower or by the watcher
//!     │           └──────► Ended          by the Sandbox's end
//!     └──► NotStarted
//! ```

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use pepo_api::{CommandEnd, CommandId, CommandRole, CommandState, Ended, OnDisconnect, Reason, SessionId};
use pepo_sandbox::guest::{self, InputEnd, Output};
use pepo_sandbox::proto::{self, Attach, Cause as End, FailureCode, OpId, Process};
use tokio::sync::watch;

use super::follow::{Follower, Interest, Leaving, Parked};
use super::kept;
use super::{Error, Serving, Session, Shelf, Ticket};
use crate::store::{CommandRow, CommandSpec, EndRow, Event, Store, Write};

/// Ended commands that a Session remembers besides the store.
const REMEMBERED: usize = 256;

/// Of the ended ones, how many whose small output is kept beside them.
const SMALL_ONES: usize = 64;

/// How long a command without a caller waits for one, where it is to be killed with its last caller.
const LEASE: Duration = Duration::from_secs(proto::LEASE_SECONDS);

/// How long the stop path may spend on saving output.
const RESCUE: Duration = Duration::from_secs(5);

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
            runtime.spawn(watch_end(session.clone(), self.clone(), false));
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

/// The commands of one Session.
#[derive(Debug)]
pub struct Commands {
    store: Store,
    shelf: Shelf,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    known: HashMap<CommandId, Arc<Command>>,
    /// Ended ones, oldest first.
    ended: std::collections::VecDeque<CommandId>,
    /// Whether the store may know ended ones that this table does not.
    forgot: bool,
    /// Why the Session ends: what its stop path kills ended for this reason.
    ending: Option<Reason>,
}

impl Commands {
    pub(super) fn new(store: Store, shelf: Shelf) -> Self {
        Commands { store, shelf, table: Mutex::default() }
    }

    /// Where they are recorded.
    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// The command of that id, if it is remembered.
    pub fn get(&self, id: CommandId) -> Option<Arc<Command>> {
        lock(&self.table).known.get(&id).cloned()
    }

    /// Every command that is remembered.
    pub fn all(&self) -> Vec<Arc<Command>> {
        lock(&self.table).known.values().cloned().collect()
    }

    /// How many run, without Services.
    pub fn running(&self) -> u32 {
        let table = lock(&self.table);
        let runs = |command: &&Arc<Command>| command.spec.role != CommandRole::Service && !command.is_over();
        table.known.values().filter(runs).count() as u32
    }

    /// Follows the run that there is of a command whose id its caller made; none, where it never ran.
    ///
    /// # Errors
    /// As [`Commands::start`].
    pub async fn again(&self, session: &Session, id: CommandId) -> Result<Option<Follower>, Error> {
        let (known, forgot) = {
            let table = lock(&self.table);
            (table.known.get(&id).cloned(), table.forgot)
        };
        if let Some(known) = known {
            if let Status::NotStarted { code, message } = known.started().await {
                return Err(not_started(code, message));
            }
            return Follower::join(session, known, 0, Interest::Caller).await.map(Some);
        }
        match if forgot { self.store.command(session.id(), id).await? } else { None } {
            Some(row) if row.end.is_some() => Follower::of_record(row, &self.shelf, 0).map(Some),
            _ => Ok(None),
        }
    }

    /// Runs a command and follows it from its first byte; or, where its name is known, follows the run there is.
    /// Returns when it runs.
    ///
    /// # Errors
    /// [`Error::NotStarted`], what the guest refuses, and what a Session can answer.
    pub async fn start(&self, session: &Session, new: NewCommand, serving: Serving) -> Result<Follower, Error> {
        let NewCommand { id, named_by_caller, exec, spec, input, more_input, counted } = new;
        if named_by_caller && let Some(follower) = self.again(session, id).await? {
            return Ok(follower);
        }
        let command = {
            let mut table = lock(&self.table);
            match table.known.get(&id) {
                Some(known) => Err(known.clone()),
                None => {
                    let command =
                        Arc::new(Command::new(session.id(), serving.activation, id, spec, jiff::Timestamp::now()));
                    table.known.insert(id, command.clone());
                    Ok(command)
                }
            }
        };
        let command = match command {
            Ok(new) => new,
            Err(known) => {
                if let Status::NotStarted { code, message } = known.started().await {
                    return Err(not_started(code, message));
                }
                return Follower::join(session, known, 0, Interest::Caller).await;
            }
        };
        if command.spec.keeps_alive {
            *lock(&command.ticket) = Some(session.ticket());
        }
        let row = Box::new(CommandRow {
            session: session.id(),
            id,
            spec: command.spec.clone(),
            activation: command.activation,
            started_at: command.started_at,
            end: None,
            stdout_bytes: 0,
            stderr_bytes: 0,
        });
        if !counted {
            self.store.write_soon(Write::NewCommand(row));
        } else if let Err(error) = self.store.write(Write::CountedCommand(row)).await {
            // Never begun: its name is free, and whoever joined meanwhile learns why.
            lock(&self.table).known.remove(&id);
            *lock(&command.ticket) = None;
            command.status.send_replace(Status::NotStarted { code: FailureCode::Busy, message: error.to_string() });
            return Err(error.into());
        }
        self.store.record(session.event("command.started").command(id).detail("activation", command.activation));
        // From here on its caller counts: one that goes away while the guest is asked leaves a watched command.
        let follower = Follower::begin(session, command.clone());
        match serving.guest.exec(command.op(), exec).await {
            Ok(mut running) => {
                if let Some(stdin) = running.take_input()
                    && !(input.is_empty() && more_input)
                {
                    tokio::spawn(feed(session.clone(), command.clone(), stdin, input, more_input));
                }
                follower.started(running).await
            }
            Err(error) => Err(self.failed_to_start(session, &command, error).await),
        }
    }

    /// The guest did not start it: what the caller is told, and what is recorded.
    pub(super) async fn failed_to_start(
        &self,
        session: &Session,
        command: &Arc<Command>,
        error: guest::Error,
    ) -> Error {
        let (code, told) = match error {
            guest::Error::Failed(failure) => {
                let message = pepo_sandbox::keeper::escape(&failure.message, 200);
                (failure.code, not_started(failure.code, message))
            }
            other => {
                let code = if matches!(other, guest::Error::Busy) { FailureCode::Busy } else { FailureCode::Io };
                let ended = match code {
                    FailureCode::Busy => None,
                    _ => session.sandbox_end(command.activation, Duration::from_secs(10)).await,
                };
                (code, ended.map_or(Error::Guest(other), Error::SandboxEnded))
            }
        };
        let exit_code = match code {
            FailureCode::ProgramNotFound => Some(127),
            FailureCode::ProgramNotExecutable => Some(126),
            _ => None,
        };
        let reason = if exit_code.is_some() { Reason::Exit } else { Reason::Unknown };
        let end =
            CommandEnd { reason, exit_code, signal: None, signal_number: None, cwd: None, at: jiff::Timestamp::now() };
        let row = EndRow { session: command.session, id: command.id, end, stdout_bytes: 0, stderr_bytes: 0 };
        let message = told.to_string();
        let first = command.status.send_if_modified(|status| {
            let first = matches!(status, Status::Starting | Status::Running);
            if first {
                *status = Status::NotStarted { code, message };
            }
            first
        });
        if first {
            self.over(command, row);
        }
        told
    }

    /// Records the end of a command. The first one stands.
    pub(super) fn finish(&self, command: &Arc<Command>, process: &Process) {
        let ending = lock(&self.table).ending;
        let reason = match process.cause {
            End::Exit => Reason::Exit,
            End::Signal => Reason::Signal,
            End::Timeout => Reason::Timeout,
            End::Killed => ending.unwrap_or(Reason::Killed),
            End::OutOfMemory => Reason::OutOfMemory,
        };
        let end = CommandEnd {
            reason,
            exit_code: process.code,
            signal: process.signal.map(crate::signal::name),
            signal_number: process.signal,
            cwd: process.cwd.clone(),
            at: jiff::Timestamp::now(),
        };
        self.end(command, end, [process.stdout_bytes, process.stderr_bytes]);
    }

    /// Records that a command ended in a way that its guest did not tell.
    pub(super) fn finish_unseen(&self, command: &Arc<Command>, reason: Reason, at: jiff::Timestamp) {
        let end = CommandEnd { reason, exit_code: None, signal: None, signal_number: None, cwd: None, at };
        let seen = [command.seen[0].load(Ordering::Relaxed), command.seen[1].load(Ordering::Relaxed)];
        self.end(command, end, seen);
    }

    fn end(&self, command: &Arc<Command>, end: CommandEnd, [stdout_bytes, stderr_bytes]: [u64; 2]) {
        let row = EndRow { session: command.session, id: command.id, end, stdout_bytes, stderr_bytes };
        let first = command.status.send_if_modified(|status| {
            let first = matches!(status, Status::Starting | Status::Running);
            if first {
                *status = Status::Ended(Box::new(row.clone()));
            }
            first
        });
        if first {
            self.over(command, row);
        }
    }

    fn over(&self, command: &Arc<Command>, row: EndRow) {
        let event = Event::new("command.ended").session(command.session).command(command.id).reason(row.end.reason);
        self.store.record(event.detail("exit_code", row.end.exit_code).detail("signal", &row.end.signal));
        crate::metrics::METRICS.command_ended(row.end.reason);
        self.store.write_soon(Write::EndCommand(Box::new(row)));
        *lock(&command.ticket) = None;
        let mut table = lock(&self.table);
        table.ended.push_back(command.id);
        // Of older ones the guest is asked again, should their output be wanted after its end.
        if let Some(older) = table.ended.iter().rev().nth(SMALL_ONES)
            && let Some(older) = table.known.get(older)
        {
            *lock(&older.small) = None;
        }
        while table.ended.len() > REMEMBERED {
            let Some(oldest) = table.ended.pop_front() else { break };
            table.known.remove(&oldest);
            table.forgot = true;
        }
    }

    /// Kills a command with all its processes. Returns when it has ended.
    ///
    /// # Errors
    /// The guest does not answer.
    pub async fn kill(&self, session: &Session, command: &Arc<Command>) -> Result<(), Error> {
        if command.is_over() {
            return Ok(());
        }
        let serving = session.serving_still(command.activation, Duration::from_secs(10)).await?;
        self.look_after(session, command);
        match serving.guest.cancel(command.op()).await {
            Ok(()) => {}
            // It ended by itself meanwhile.
            Err(guest::Error::Failed(failure)) if failure.code == FailureCode::UnknownOp => {}
            Err(error) => return Err(error.into()),
        }
        // Whoever reads its stream may be held up by a slow caller: the guest's list says how it ended all the same.
        if tokio::time::timeout(Duration::from_millis(500), command.over()).await.is_err() {
            self.settle(&serving.guest.ops().await?);
        }
        Ok(())
    }

    /// Makes sure that somebody waits for its end.
    pub(super) fn look_after(&self, session: &Session, command: &Arc<Command>) {
        let mut callers = lock(&command.callers);
        if callers.following == 0 && !std::mem::replace(&mut callers.watched, true) {
            tokio::spawn(watch_end(session.clone(), command.clone(), false));
        }
    }

    /// Takes the ends that the guest's list tells.
    fn settle(&self, ops: &[proto::OpSummary]) {
        for op in ops {
            if let Some(proto::Outcome::Process(process)) = &op.outcome
                && let Some(command) = self.get(CommandId::from(uuid::Uuid::from_bytes(op.op.0)))
            {
                self.finish(&command, process);
            }
        }
    }

    /// Sends input that begins at `offset` (where it stands, if that is absent), and then ends it if asked so.
    ///
    /// # Errors
    /// A hole before `offset`, a command that takes no input, and what a guest can answer.
    pub async fn feed(
        &self,
        session: &Session,
        command: &Arc<Command>,
        offset: Option<u64>,
        mut body: impl futures_util::Stream<Item = Result<Bytes, Error>> + Unpin,
        eof: bool,
    ) -> Result<pepo_api::StdinAnswer, Error> {
        use futures_util::StreamExt as _;
        let _one = command.input.lock().await;
        let serving = session.serving_still(command.activation, Duration::from_secs(10)).await?;
        let end = if eof { InputEnd::Close } else { InputEnd::Keep };
        let mut joined = serving.guest.input(command.op(), end).await?;
        let Some(mut input) = joined.take_input() else {
            return Ok(pepo_api::StdinAnswer { next_offset: 0, open: false });
        };
        let mut at = offset.unwrap_or(input.next());
        let mut next = input.next();
        let mut open = input.is_open();
        while open && let Some(bytes) = body.next().await {
            let bytes = bytes?;
            let length = bytes.len() as u64;
            match input.send(at, bytes).await {
                Ok(()) => at += length,
                Err(guest::Error::Ended | guest::Error::Lost(_)) => open = false,
                Err(error) => return Err(error.into()),
            }
            next = input.next();
        }
        if open {
            match input.eof().await {
                Ok(()) => open = !eof,
                Err(guest::Error::Ended | guest::Error::Lost(_)) => open = false,
                Err(error) => return Err(error.into()),
            }
        }
        // Only then has the guest taken all of it.
        while let Some(output) = joined.next().await {
            match output {
                Ok(Output::Input { next: stands, open: takes }) => (next, open) = (next.max(stands), open && takes),
                Ok(Output::Left) | Err(guest::Error::Lost(_)) => break,
                Ok(Output::End(_)) => {
                    open = false;
                    break;
                }
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(pepo_api::StdinAnswer { next_offset: next, open })
    }

    /// Whether nothing runs, and the guest keeps no output that is not kept here.
    fn owes_nothing(&self) -> bool {
        !lock(&self.table).forgot
            && self.all().iter().all(|command| match command.status() {
                Status::Ended(row) => row.stdout_bytes + row.stderr_bytes == 0 || lock(&command.small).is_some(),
                Status::NotStarted { .. } => true,
                Status::Starting | Status::Running => false,
            })
    }

    /// The first part of the stop path: ends what runs, for that reason, and saves what was written and not yet seen.
    pub(super) async fn wind_up(&self, guest: &guest::Guest, reason: Reason) {
        lock(&self.table).ending = Some(reason);
        let work = async {
            if self.owes_nothing() {
                return;
            }
            let running: Vec<_> = self.all().into_iter().filter(|command| !command.is_over()).collect();
            let ending = running.iter().map(|command| guest.cancel(command.op()));
            futures_util::future::join_all(ending).await;
            let ops = guest.ops().await.unwrap_or_default();
            self.settle(&ops);
            for op in ops {
                let Some(command) = self.get(CommandId::from(uuid::Uuid::from_bytes(op.op.0))) else { continue };
                if op.next == 0 || lock(&command.small).is_some() {
                    continue;
                }
                if let Ok(output) = save(guest, op.op).await {
                    self.shelf.put(command.session, command.id, output);
                }
            }
        };
        if tokio::time::timeout(RESCUE, work).await.is_err() {
            tracing::warn!("not all output could be saved in time");
        }
    }

    /// The last part of every Sandbox's end: whatever still runs by our account does not.
    pub(super) fn sandbox_ended(&self, ended: &Ended) {
        for command in self.all() {
            if let Some(output) = lock(&command.small).take() {
                self.shelf.put(command.session, command.id, output);
            }
            if !command.is_over() {
                self.finish_unseen(&command, ended.reason, ended.at);
            }
        }
    }

    /// Takes over a command that an earlier life of this daemon started.
    pub(super) fn adopt(&self, session: &Session, row: CommandRow, op: Option<&proto::OpSummary>) {
        let command = Arc::new(Command::new(row.session, row.activation, row.id, row.spec, row.started_at));
        command.runs();
        {
            let mut table = lock(&self.table);
            table.known.insert(row.id, command.clone());
            table.forgot = true;
        }
        match op.map(|op| &op.outcome) {
            Some(Some(proto::Outcome::Process(process))) => self.finish(&command, process),
            Some(None) => {
                if command.spec.keeps_alive {
                    *lock(&command.ticket) = Some(session.ticket());
                }
                lock(&command.callers).watched = true;
                tokio::spawn(watch_end(session.clone(), command.clone(), true));
                if command.spec.on_disconnect == OnDisconnect::Kill {
                    let session = session.clone();
                    tokio::spawn(async move {
                        if command.is_forsaken_after(LEASE).await {
                            let _ = session.commands().kill(&session, &command).await;
                        }
                    });
                }
            }
            // The guest does not know it: it never began, or ended so long ago that it is forgotten.
            _ => self.finish_unseen(&command, Reason::Unknown, jiff::Timestamp::now()),
        }
    }

    /// A new Sandbox is made: what ends in it ends for its own reasons.
    pub(super) fn begins(&self) {
        lock(&self.table).ending = None;
    }

    /// Lets go of what has ended and is recorded.
    pub(super) fn forget(&self) {
        let mut table = lock(&self.table);
        table.known.retain(|_, command| !command.is_over());
        table.known.shrink_to_fit();
        table.ended = Default::default();
        table.forgot = true;
    }

    /// The store may know commands that this table does not.
    pub(super) fn is_incomplete(&self) {
        lock(&self.table).forgot = true;
    }

    /// Commands in the store that this table does not have.
    pub fn shelf(&self) -> &Shelf {
        &self.shelf
    }
}

/// What the guest's refusal to start is to the caller.
pub(super) fn not_started(code: FailureCode, message: String) -> Error {
    match code {
        FailureCode::ProgramNotFound => Error::NotStarted { message, exit_code: 127 },
        FailureCode::ProgramNotExecutable => Error::NotStarted { message, exit_code: 126 },
        _ => Error::Guest(guest::Error::Failed(proto::Failure { code, message })),
    }
}

/// Waits for a command's end where nobody follows it.
async fn watch_end(session: Session, command: Arc<Command>, mut sole: bool) {
    let mut pause = Duration::from_millis(100);
    while !command.is_over() {
        let Some(guest) = session.guest() else {
            // Its Sandbox is ending; that end is told to all its commands.
            if session.sandbox_end(command.activation, Duration::from_secs(60)).await.is_some() {
                return;
            }
            continue;
        };
        let attach =
            Attach { target: command.op(), from: None, input: false, keep_input: true, sole: sole.then_some(true) };
        match guest.attach(attach).await {
            Ok(mut joined) => {
                sole = false;
                while let Some(Ok(output)) = joined.next().await {
                    if let Output::End(process) = output {
                        return session.commands().finish(&command, &process);
                    }
                }
            }
            Err(guest::Error::Failed(failure)) if failure.code == FailureCode::UnknownOp => {
                return session.commands().finish_unseen(&command, Reason::Unknown, jiff::Timestamp::now());
            }
            Err(error) => tracing::debug!(command = %command.id, %error, "cannot wait for its end; trying again"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}

/// Gives a command the input that came with it.
async fn feed(session: Session, command: Arc<Command>, mut input: guest::Input, bytes: Bytes, more: bool) {
    let _one = command.input.lock().await;
    let sent = async {
        input.send(0, bytes.clone()).await?;
        if more { Ok(()) } else { input.eof().await }
    };
    if sent.await.is_ok() || command.is_over() {
        return;
    }
    // The stream went with its caller; the input goes on by a stream of its own.
    drop(_one);
    let body = futures_util::stream::iter([Ok(bytes)]);
    if let Err(error) = session.commands().feed(&session, &command, Some(0), body, !more).await {
        tracing::debug!(command = %command.id, %error, "input was cut short");
    }
}

/// Head and tail of what the guest keeps of a command that has ended.
async fn save(guest: &guest::Guest, op: OpId) -> Result<kept::Output, guest::Error> {
    let attach = Attach { target: op, from: Some(0), input: false, keep_input: true, sole: None };
    let mut joined = guest.attach(attach).await?;
    let mut output = kept::Output::default();
    while let Some(piece) = joined.next().await {
        match piece? {
            Output::Data { channel, offset, bytes } => output.put(super::follow::side(channel), offset, &bytes),
            Output::Gap { to, .. } => output.gap(to),
            _ => {}
        }
    }
    Ok(output)
}
