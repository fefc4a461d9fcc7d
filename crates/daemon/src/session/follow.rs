//! Following one command for one caller: its output in order from an offset, from the guest or from what was kept of it.
//!
//! Holds one stream of the guest. Reading slowly holds the program back, which is the backpressure all the way from the
//! caller. A stream that breaks while the Sandbox serves is made again from where it was; a Sandbox that ends is told as
//! the command's end. Dropping a follower is the caller's leaving.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pepo_api::Reason;
use pepo_sandbox::guest::{self, Exec, Output};
use pepo_sandbox::proto::{Attach, Channel, FailureCode};
use tokio::sync::oneshot;

use super::command::{Command, Status, not_started, shown_row};
use super::{Error, Session, Shelf, kept};
use crate::store::CommandRow;
use crate::text::Side;

/// Output up to this size is kept with the command, so that its stop path need not ask for it.
const SMALL: u64 = 16 * 1024;

/// How long a broken stream is taken up again before the guest counts as gone.
const RESUME: Duration = Duration::from_secs(30);

/// How long the stream of a command that was just started stays for the caller to come back to it by another connection.
const PARKED: Duration = Duration::from_secs(1);

/// A stream that waits for its caller to come back.
#[derive(Debug)]
pub(super) struct Parked {
    /// The offset it stands at.
    from: u64,
    /// Where it is asked for.
    wanted: oneshot::Sender<oneshot::Sender<Box<Follower>>>,
}

impl Parked {
    /// Whether it stands there.
    pub(super) fn is_at(&self, offset: u64) -> bool {
        self.from == offset
    }

    /// The stream, unless it has been given up meanwhile.
    pub(super) async fn take(self) -> Option<Box<Follower>> {
        let (to, taken) = oneshot::channel();
        self.wanted.send(to).ok()?;
        taken.await.ok()
    }
}

/// How a caller leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// It went away.
    Gone,
    /// It was answered, and may come back.
    Answered,
}

/// Whether somebody who follows is a caller of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// It waits for the end, follows or attaches: the command may depend on it.
    Caller,
    /// It takes what is there and goes.
    Glance,
}

/// What a follower sees.
#[derive(Debug)]
pub enum Item {
    /// Output.
    Data {
        /// Which.
        side: Side,
        /// Bytes before these, over both.
        offset: u64,
        /// The bytes.
        bytes: Bytes,
    },
    /// Output that is no longer kept.
    Gap {
        /// First missing offset.
        from: u64,
        /// First offset after the hole.
        to: u64,
    },
    /// It has ended; the last item.
    End,
}

#[derive(Debug)]
enum Source {
    /// Nothing yet.
    None,
    /// The guest.
    Live(Box<Exec>),
    /// A copy.
    Kept(Arc<kept::Output>, usize),
    /// Nothing more.
    Over,
}

#[derive(Debug)]
enum Who {
    Known(Session, Arc<Command>),
    Recorded(Box<CommandRow>),
}

/// One caller's look at one command.
#[derive(Debug)]
pub struct Follower {
    interest: Interest,
    who: Who,
    source: Source,
    /// The next offset.
    next: u64,
    /// Bytes of each output, while it was followed from the beginning without a hole.
    counts: Option<[u64; 2]>,
    small: Option<kept::Output>,
    /// Items that were read before their time.
    ahead: VecDeque<Item>,
    leaving: Leaving,
    input: Option<guest::Input>,
    /// Whether the caller has been given anything yet.
    begun: bool,
}

/// Which output a channel is.
pub(super) fn side(channel: Channel) -> Side {
    match channel {
        Channel::Err => Side::Err,
        Channel::Out | Channel::In => Side::Out,
    }
}

impl Follower {
    fn new(who: Who, source: Source, next: u64, interest: Interest) -> Self {
        if let Who::Known(_, command) = &who
            && interest == Interest::Caller
        {
            command.follows();
        }
        Follower {
            interest,
            who,
            source,
            next,
            counts: (next == 0).then_some([0, 0]),
            small: None,
            ahead: VecDeque::new(),
            leaving: Leaving::Gone,
            input: None,
            begun: false,
        }
    }

    /// Of a command that the guest is being asked to run.
    pub(super) fn begin(session: &Session, command: Arc<Command>) -> Self {
        let mut follower = Follower::new(Who::Known(session.clone(), command), Source::None, 0, Interest::Caller);
        follower.small = Some(kept::Output::default());
        follower
    }

    /// The guest took it: returns when it runs, or has ended.
    pub(super) async fn started(mut self, exec: Exec) -> Result<Self, Error> {
        self.source = Source::Live(Box::new(exec));
        let Who::Known(session, command) = &self.who else { return Ok(self) };
        let (session, command) = (session.clone(), command.clone());
        let Source::Live(exec) = &mut self.source else { return Ok(self) };
        match exec.next().await {
            Some(Ok(Output::Started { .. })) => command.runs(),
            Some(Ok(other)) => {
                command.runs();
                let item = self.item(other);
                self.ahead.extend(item);
            }
            Some(Err(error @ guest::Error::Failed(_))) => {
                return Err(session.commands().failed_to_start(&session, &command, error).await);
            }
            // The stream broke: the guest may run it, and `next` will find out.
            Some(Err(_)) | None => self.source = Source::None,
        }
        Ok(self)
    }

    /// Of a command that runs or has ended, from that offset on.
    ///
    /// # Errors
    /// [`Error::OutputGone`], and what a guest can answer.
    pub async fn join(session: &Session, command: Arc<Command>, from: u64, interest: Interest) -> Result<Self, Error> {
        Self::joined(session, command, from, false, interest).await
    }

    /// As [`Follower::join`], and takes the command's input where it has one.
    ///
    /// # Errors
    /// As [`Follower::join`].
    pub async fn join_with_input(session: &Session, command: Arc<Command>, from: u64) -> Result<Self, Error> {
        let input = command.spec().stdin && !command.is_over();
        Self::joined(session, command, from, input, Interest::Caller).await
    }

    async fn joined(
        session: &Session,
        command: Arc<Command>,
        from: u64,
        input: bool,
        interest: Interest,
    ) -> Result<Self, Error> {
        if interest == Interest::Caller
            && let Some(follower) = command.unpark(from).await
        {
            return Ok(follower.taken_up(input));
        }
        let mut follower = Follower::new(Who::Known(session.clone(), command), Source::None, from, interest);
        match follower.connect(input).await {
            Ok(()) => Ok(follower),
            Err(error) => {
                // A look that failed is no caller that left.
                follower.leaving = Leaving::Answered;
                Err(error)
            }
        }
    }

    /// Of a command of which only the record is left.
    ///
    /// # Errors
    /// [`Error::OutputGone`].
    pub fn of_record(row: CommandRow, shelf: &Shelf, from: u64) -> Result<Self, Error> {
        let source = match shelf.get(row.session, row.id) {
            Some(output) => Source::Kept(output.clone(), output.first_at(from)),
            None if from >= row.stdout_bytes + row.stderr_bytes => Source::Over,
            None => return Err(Error::OutputGone(row.id)),
        };
        Ok(Follower::new(Who::Recorded(Box::new(row)), source, from, Interest::Glance))
    }

    /// The command as the API shows it.
    pub fn shown(&self) -> pepo_api::Command {
        match &self.who {
            Who::Known(_, command) => command.shown(),
            Who::Recorded(row) => shown_row((**row).clone()),
        }
    }

    /// The command, where it is more than a record.
    pub fn command(&self) -> Option<&Arc<Command>> {
        match &self.who {
            Who::Known(_, command) => Some(command),
            Who::Recorded(_) => None,
        }
    }

    /// The guest, if its Sandbox serves now.
    pub fn guest(&self) -> Option<guest::Guest> {
        match &self.who {
            Who::Known(session, _) => session.guest(),
            Who::Recorded(_) => None,
        }
    }

    /// The next offset.
    pub fn next_offset(&self) -> u64 {
        self.next
    }

    /// The command's input, once.
    pub fn take_input(&mut self) -> Option<guest::Input> {
        self.input.take()
    }

    /// The caller is answered: what its leaving does is put off.
    pub fn answered(&mut self) {
        self.leaving = Leaving::Answered;
    }

    /// The caller is answered and may come back at once for what follows, as `pepo run` does: the guest's stream is kept for
    /// that, since a new one would take the guest as long as a small program. What comes meanwhile is read as far as it is
    /// small, so that an end is known when it comes.
    pub fn park(mut self) {
        self.answered();
        let Who::Known(_, command) = &self.who else { return };
        let Source::Live(exec) = &self.source else { return };
        let fed_elsewhere = command.spec().stdin && !exec.has_input();
        if !self.ahead.is_empty() || fed_elsewhere {
            return;
        }
        let (wanted, mut asked) = oneshot::channel();
        command.park(Parked { from: self.next, wanted });
        tokio::spawn(async move {
            let wait = tokio::time::sleep(PARKED);
            tokio::pin!(wait);
            let (from, mut over) = (self.next, false);
            loop {
                let full = over || self.next - from > SMALL;
                tokio::select! {
                    biased;
                    to = &mut asked => {
                        if let Ok(to) = to {
                            // One that has gone meanwhile drops it, which is the caller's leaving.
                            let _ = to.send(Box::new(self));
                        }
                        return;
                    }
                    item = self.read(), if !full => match item {
                        Ok(item) => {
                            over = matches!(item, Item::End);
                            self.ahead.push_back(item);
                        }
                        // Whoever comes next meets it, too.
                        Err(_) => return,
                    },
                    () = &mut wait => return,
                }
            }
        });
    }

    /// A parked one, in the hands of its caller again.
    fn taken_up(mut self: Box<Self>, input: bool) -> Self {
        self.leaving = Leaving::Gone;
        if input && let Source::Live(exec) = &mut self.source {
            self.input = exec.take_input();
        }
        *self
    }

    /// The next item. After [`Item::End`] there is none.
    ///
    /// # Errors
    /// [`Error::OutputGone`], or a guest that is no longer understood.
    pub async fn next(&mut self) -> Result<Item, Error> {
        if let Some(first) = self.ahead.pop_front() {
            self.begun = true;
            return Ok(first);
        }
        self.read().await
    }

    async fn read(&mut self) -> Result<Item, Error> {
        let mut lost_at = None;
        loop {
            match &mut self.source {
                Source::Over => return Ok(Item::End),
                Source::Kept(output, n) => {
                    let (output, at) = (output.clone(), *n);
                    return Ok(self.kept(&output, at));
                }
                Source::Live(exec) => match exec.next().await {
                    Some(Ok(output)) => {
                        lost_at = None;
                        self.begun = true;
                        if let Some(item) = self.item(output) {
                            return Ok(item);
                        }
                    }
                    Some(Err(guest::Error::Failed(failure))) => return self.refused(failure),
                    Some(Err(error @ guest::Error::Protocol(_))) => return Err(error.into()),
                    Some(Err(_)) | None => {
                        self.source = Source::None;
                    }
                },
                Source::None => {
                    let since = *lost_at.get_or_insert_with(tokio::time::Instant::now);
                    match self.connect(false).await {
                        Ok(()) => {}
                        Err(error) if since.elapsed() > RESUME => return Err(error),
                        Err(error @ (Error::OutputGone(_) | Error::NotStarted { .. })) => return Err(error),
                        Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                    }
                }
            }
        }
    }

    /// Opens a source at `next`.
    async fn connect(&mut self, input: bool) -> Result<(), Error> {
        let Who::Known(session, command) = &self.who else {
            self.source = Source::Over;
            return Ok(());
        };
        let (session, command) = (session.clone(), command.clone());
        if let Status::NotStarted { code, message } = command.started().await {
            return Err(not_started(code, message));
        }
        let Some(guest) = session.guest_of(command.activation(), RESUME).await else {
            return self.after_the_end(&session, &command).await;
        };
        let attach = Attach { target: command.op(), from: Some(self.next), input, keep_input: false, sole: None };
        match guest.attach(attach).await {
            Ok(mut exec) => {
                self.input = exec.take_input();
                self.source = Source::Live(Box::new(exec));
                Ok(())
            }
            Err(guest::Error::Failed(failure)) if failure.code == FailureCode::UnknownOp => {
                if !command.is_over() {
                    session.commands().finish_unseen(&command, Reason::Unknown, jiff::Timestamp::now());
                }
                Err(Error::OutputGone(command.id()))
            }
            Err(error @ guest::Error::Failed(_)) => Err(error.into()),
            Err(error @ guest::Error::Busy) => Err(error.into()),
            Err(error) => match session.sandbox_end(command.activation(), Duration::from_secs(5)).await {
                Some(_) => self.after_the_end(&session, &command).await,
                None => Err(error.into()),
            },
        }
    }

    /// The Sandbox is gone, or going: what was kept of the output, then the end.
    async fn after_the_end(&mut self, session: &Session, command: &Arc<Command>) -> Result<(), Error> {
        // The driver tells every command when its Sandbox has ended.
        let over = tokio::time::timeout(RESUME, command.over()).await;
        let Ok(Status::Ended(row)) = over else {
            return Err(Error::Guest(guest::Error::Lost(None)));
        };
        let shelf = session.commands().shelf();
        self.source = match shelf.get(row.session, row.id) {
            Some(output) => Source::Kept(output.clone(), output.first_at(self.next)),
            None if self.counts.is_some() || self.next >= row.stdout_bytes + row.stderr_bytes => Source::Over,
            // In the middle of it a hole is told, then the end; a new look is told that there is nothing to see.
            None if self.begun => {
                let mut hole = kept::Output::default();
                hole.gap(row.stdout_bytes + row.stderr_bytes);
                Source::Kept(Arc::new(hole), 0)
            }
            None => return Err(Error::OutputGone(row.id)),
        };
        Ok(())
    }

    fn kept(&mut self, output: &kept::Output, n: usize) -> Item {
        let Some(piece) = output.piece(n) else {
            let (from, to) = (self.next, output.next());
            self.source = Source::Over;
            if to > from {
                self.next = to;
                return Item::Gap { from, to };
            }
            return Item::End;
        };
        if piece.offset > self.next {
            let from = std::mem::replace(&mut self.next, piece.offset);
            return Item::Gap { from, to: piece.offset };
        }
        let known = (self.next - piece.offset) as usize;
        let bytes = piece.bytes.slice(known.min(piece.bytes.len())..);
        let offset = self.next;
        let side = piece.side;
        self.next += bytes.len() as u64;
        if let Source::Kept(_, at) = &mut self.source {
            *at = n + 1;
        }
        Item::Data { side, offset, bytes }
    }

    fn item(&mut self, output: Output) -> Option<Item> {
        match output {
            Output::Data { channel, offset, bytes } => {
                let side = side(channel);
                self.next = offset + bytes.len() as u64;
                if let Some(counts) = &mut self.counts {
                    counts[usize::from(side == Side::Err)] += bytes.len() as u64;
                    let counts = *counts;
                    if let Who::Known(_, command) = &self.who {
                        command.saw(counts);
                    }
                }
                if self.next > SMALL {
                    self.small = None;
                }
                if let Some(small) = &mut self.small {
                    small.put(side, offset, &bytes);
                }
                Some(Item::Data { side, offset, bytes })
            }
            Output::Gap { from, to } => {
                self.next = to;
                self.counts = None;
                self.small = None;
                Some(Item::Gap { from, to })
            }
            Output::End(process) => {
                if let Who::Known(session, command) = &self.who {
                    if let Some(small) = self.small.take() {
                        command.keep_small(small);
                    }
                    session.commands().finish(command, &process);
                }
                self.source = Source::Over;
                Some(Item::End)
            }
            Output::Started { .. } => {
                if let Who::Known(_, command) = &self.who {
                    command.runs();
                }
                None
            }
            Output::Input { .. } | Output::Eof { .. } => None,
            // No stream of ours asks for that; reading on finds the stream over and joins again.
            Output::Left => None,
        }
    }

    fn refused(&mut self, failure: pepo_sandbox::proto::Failure) -> Result<Item, Error> {
        self.source = Source::Over;
        let Who::Known(session, command) = &self.who else { return Ok(Item::End) };
        if failure.code == FailureCode::UnknownOp {
            return Err(Error::OutputGone(command.id()));
        }
        session.commands().finish_unseen(command, Reason::Unknown, jiff::Timestamp::now());
        Err(guest::Error::Failed(failure).into())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if let Who::Known(session, command) = &self.who
            && self.interest == Interest::Caller
        {
            command.leaves(session, self.leaving);
        }
    }
}
