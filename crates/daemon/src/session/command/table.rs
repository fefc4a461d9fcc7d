//! The commands of one Session: starting them, knowing them, recording how they end.
//!
//! Owns the record of each command while it runs and for a while after. Promises that the end of every one is recorded once,
//! also when nobody follows it.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pepo_api::{CommandEnd, CommandId, CommandRole, OnDisconnect, Reason};
use pepo_sandbox::guest::{self, Output};
use pepo_sandbox::proto::{self, Attach, Cause as End, FailureCode, Process};

use tracing::Instrument as _;

use super::input::feed;
use super::{Command, LEASE, NewCommand, Status, lock, not_started};
use crate::metrics::{CommandStep, METRICS};
use crate::session::follow::{Follower, Interest};
use crate::session::{Error, Serving, Session, Shelf};
use crate::store::{CommandRow, EndRow, Event, Store, Write};

/// Ended commands that a Session remembers besides the store.
const REMEMBERED: usize = 256;

/// Of the ended ones, how many whose small output is kept beside them.
const SMALL_ONES: usize = 64;

/// The commands of one Session.
#[derive(Debug)]
pub struct Commands {
    store: Store,
    pub(super) shelf: Shelf,
    pub(super) table: Mutex<Table>,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    known: HashMap<CommandId, Arc<Command>>,
    /// Ended ones, oldest first.
    ended: std::collections::VecDeque<CommandId>,
    /// Whether the store may know ended ones that this table does not.
    pub(super) forgot: bool,
    /// Why the Session ends: what its stop path kills ended for this reason.
    pub(super) ending: Option<Reason>,
}

impl Commands {
    pub(in crate::session) fn new(store: Store, shelf: Shelf) -> Self {
        Commands { store, shelf, table: Mutex::default() }
    }

    /// Where they are recorded.
    pub(in crate::session) fn store(&self) -> &Store {
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
        let span = tracing::info_span!("command", session = %session.id(), command = %new.id);
        self.begin(session, new, serving).instrument(span).await
    }

    async fn begin(&self, session: &Session, new: NewCommand, serving: Serving) -> Result<Follower, Error> {
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
        if counted && let Err(error) = self.store.write(Write::CountedCommand(row.clone())).await {
            // Never begun: its name is free, and whoever joined meanwhile learns why.
            lock(&self.table).known.remove(&id);
            *lock(&command.ticket) = None;
            command.status.send_replace(Status::NotStarted { code: FailureCode::Busy, message: error.to_string() });
            return Err(error.into());
        }
        self.store.record(session.event("command.started").command(id).detail("activation", command.activation));
        // From here on its caller counts: one that goes away while the guest is asked leaves a watched command.
        let follower = Follower::begin(session, command.clone());
        let asked = tokio::time::Instant::now();
        let begun = async {
            match serving.guest.exec(command.op(), exec).await {
                Ok(mut running) => {
                    METRICS.command_step(CommandStep::Start, asked.elapsed());
                    tracing::debug!(took = ?asked.elapsed(), "runs");
                    if let Some(stdin) = running.take_input()
                        && !(input.is_empty() && more_input)
                    {
                        tokio::spawn(feed(session.clone(), command.clone(), stdin, input, more_input));
                    }
                    follower.started(running).await
                }
                Err(error) => Err(self.failed_to_start(session, &command, error).await),
            }
        };
        if counted {
            return begun.await;
        }
        // Both at once, and the disk is the faster one: whoever is told of a command finds it, whatever dies then.
        let (recorded, begun) = tokio::join!(self.store.write(Write::NewCommand(row)), begun);
        recorded?;
        begun
    }

    /// The guest did not start it: what the caller is told, and what is recorded.
    pub(in crate::session) async fn failed_to_start(
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
        self.over(command, Status::NotStarted { code, message: told.to_string() }, row);
        told
    }

    /// Records the end of a command. The first one stands.
    pub(in crate::session) fn finish(&self, command: &Arc<Command>, process: &Process) {
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
    pub(in crate::session) fn finish_unseen(&self, command: &Arc<Command>, reason: Reason, at: jiff::Timestamp) {
        let end = CommandEnd { reason, exit_code: None, signal: None, signal_number: None, cwd: None, at };
        let seen = [command.seen[0].load(Ordering::Relaxed), command.seen[1].load(Ordering::Relaxed)];
        self.end(command, end, seen);
    }

    fn end(&self, command: &Arc<Command>, end: CommandEnd, [stdout_bytes, stderr_bytes]: [u64; 2]) {
        let row = EndRow { session: command.session, id: command.id, end, stdout_bytes, stderr_bytes };
        self.over(command, Status::Ended(Box::new(row.clone())), row);
    }

    /// The first end stands, and is told once.
    fn over(&self, command: &Arc<Command>, how: Status, row: EndRow) {
        let first = command.status.send_if_modified(|status| {
            let first = matches!(status, Status::Starting | Status::Running);
            if first {
                *status = how;
            }
            first
        });
        if !first {
            return;
        }
        let event = Event::new("command.ended").session(command.session).command(command.id).reason(row.end.reason);
        self.store.record(event.detail("exit_code", row.end.exit_code).detail("signal", &row.end.signal));
        METRICS.command_ended(row.end.reason);
        let ran = Duration::try_from(row.end.at.duration_since(command.started_at)).unwrap_or_default();
        METRICS.command_step(CommandStep::Run, ran);
        tracing::debug!(session = %command.session, command = %command.id, took = ?ran, reason = ?row.end.reason, "ended");
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
    pub(in crate::session) fn look_after(&self, session: &Session, command: &Arc<Command>) {
        let mut callers = lock(&command.callers);
        if callers.following == 0 && !std::mem::replace(&mut callers.watched, true) {
            tokio::spawn(watch_end(session.clone(), command.clone(), false));
        }
    }

    /// Takes the ends that the guest's list tells.
    pub(super) fn settle(&self, ops: &[proto::OpSummary]) {
        for op in ops {
            if let Some(proto::Outcome::Process(process)) = &op.outcome
                && let Some(command) = self.get(CommandId::from(uuid::Uuid::from_bytes(op.op.0)))
            {
                self.finish(&command, process);
            }
        }
    }

    /// Takes over a command that an earlier life of this daemon started.
    pub(in crate::session) fn adopt(&self, session: &Session, row: CommandRow, op: Option<&proto::OpSummary>) {
        let command = self.known_as(row);
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

    /// Takes note of a command whose end is its Sandbox's, which is about to be told.
    pub(in crate::session) fn remember(&self, row: CommandRow) {
        self.known_as(row);
    }

    fn known_as(&self, row: CommandRow) -> Arc<Command> {
        let command = Arc::new(Command::new(row.session, row.activation, row.id, row.spec, row.started_at));
        command.runs();
        let mut table = lock(&self.table);
        table.known.insert(row.id, command.clone());
        table.forgot = true;
        command
    }

    /// A new Sandbox is made: what ends in it ends for its own reasons.
    pub(in crate::session) fn begins(&self) {
        lock(&self.table).ending = None;
    }

    /// Lets go of what has ended and is recorded.
    pub(in crate::session) fn forget(&self) {
        let mut table = lock(&self.table);
        table.known.retain(|_, command| !command.is_over());
        table.known.shrink_to_fit();
        table.ended = Default::default();
        table.forgot = true;
    }

    /// The store may know commands that this table does not.
    pub(in crate::session) fn is_incomplete(&self) {
        lock(&self.table).forgot = true;
    }

    /// Commands in the store that this table does not have.
    pub fn shelf(&self) -> &Shelf {
        &self.shelf
    }
}

/// Waits for a command's end where nobody follows it.
pub(super) async fn watch_end(session: Session, command: Arc<Command>, mut sole: bool) {
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
