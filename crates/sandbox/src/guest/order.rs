//! What a guest may say on one stream, and when: the pure half of the host's side.
//!
//! Owns no socket and no clock, so the fuzzer and the tests feed it directly. [`Incoming`] turns bytes into frames and
//! lets none through that the operation's order does not allow; what it refuses ends the stream, because a guest that
//! lies once is not asked again on it.
//!
//! ```text
//! Asked --Accepted--> Running --(Data | Eof | Gap | Event)*--> Running --End--> Ended
//!   '--End(Failed)------------------------------------------------------------> Ended    (refused, nothing was started)
//! ```
//! Where the request asked for it, what was taken is told at any time before the end.

use bytes::BytesMut;
use pepo_proto::{Channel, Error, Event, Frame, Frames, Operation, Outcome, Request};
use tokio_util::codec::Decoder;

/// How far the talk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Asked,
    Running,
    Ended,
}

/// Operations that the guest answers alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Done or Failed, nothing else.
    Plain,
    /// Exactly one event of this kind, then Done.
    One(Report),
    /// Any number of events of this kind, then Done.
    Many(Report),
    /// Bytes on `Out` up to its Eof, then Done; with `stat`, one Stat event before them.
    Bytes { stat: bool },
    /// A program. Its output may have gaps; a terminal always takes input and has no standard error.
    Program { input: bool, terminal: bool },
    /// A program that somebody joined.
    Joined { output: bool, input: bool },
}

/// Kinds of [`Event`], as far as an order distinguishes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    Hello,
    Started,
    Input,
    Stat,
    Entries,
    Ops,
    Stats,
    Change,
    Taken,
    Clock,
}

fn report(event: &Event) -> Report {
    match event {
        Event::Hello(_) => Report::Hello,
        Event::Started { .. } => Report::Started,
        Event::Input { .. } => Report::Input,
        Event::Stat(_) => Report::Stat,
        Event::Entries(_) => Report::Entries,
        Event::Ops(_) => Report::Ops,
        Event::Stats(_) => Report::Stats,
        Event::Change { .. } => Report::Change,
        Event::Taken { .. } => Report::Taken,
        Event::Clock { .. } => Report::Clock,
    }
}

fn class(operation: &Operation) -> Class {
    match operation {
        Operation::Hello(_) => Class::One(Report::Hello),
        Operation::Stat(_) => Class::One(Report::Stat),
        Operation::Stats => Class::One(Report::Stats),
        Operation::Clock(_) => Class::One(Report::Clock),
        Operation::Ops => Class::Many(Report::Ops),
        Operation::List(_) => Class::Many(Report::Entries),
        Operation::Watch(_) => Class::Many(Report::Change),
        Operation::Read(_) => Class::Bytes { stat: true },
        Operation::TarOut(_) | Operation::Dial(_) => Class::Bytes { stat: false },
        Operation::Exec(exec) => {
            let terminal = exec.pty.is_some();
            Class::Program { input: exec.stdin || terminal, terminal }
        }
        Operation::Attach(attach) => Class::Joined { output: attach.from.is_some(), input: attach.input },
        Operation::Activate(_)
        | Operation::Signal(_)
        | Operation::Resize(_)
        | Operation::Cancel(_)
        | Operation::Leave(_)
        | Operation::Ping
        | Operation::Write(_)
        | Operation::Make(_)
        | Operation::Rename(_)
        | Operation::Remove(_)
        | Operation::TarIn(_)
        | Operation::Sync
        | Operation::Share(_)
        | Operation::Keep(_)
        | Operation::Ready(_)
        | Operation::Shutdown => Class::Plain,
    }
}

/// The order of one operation's frames, as far as they came.
#[derive(Debug)]
struct Order {
    class: Class,
    stage: Stage,
    /// The next output offset, counted over both channels.
    offset: u64,
    out_ended: bool,
    err_ended: bool,
    /// Whether Started, or the one event of the operation, was there.
    reported: bool,
    /// The last input offset reported.
    input: Option<u64>,
    /// What was last told as taken; `None` where that was not asked.
    taken: Option<u64>,
}

impl Order {
    fn new(request: &Request) -> Self {
        let operation = &request.operation;
        let offset = match operation {
            Operation::Attach(attach) => attach.from.unwrap_or(0),
            _ => 0,
        };
        Order {
            class: class(operation),
            stage: Stage::Asked,
            offset,
            out_ended: false,
            err_ended: false,
            reported: false,
            input: None,
            taken: (request.paced == Some(true)).then_some(0),
        }
    }

    fn check(&mut self, frame: &Frame) -> Result<(), Error> {
        match (self.stage, frame) {
            (Stage::Ended, _) => Err(Error::Order("a frame after the end")),
            (_, Frame::Request(_)) => Err(Error::Order("a request from the guest")),
            (Stage::Asked, Frame::Accepted) => {
                self.stage = Stage::Running;
                Ok(())
            }
            (Stage::Asked, Frame::End(Outcome::Failed(_))) => {
                self.stage = Stage::Ended;
                Ok(())
            }
            (Stage::Asked | Stage::Running, Frame::Event(Event::Taken { bytes })) => self.taken(*bytes),
            (Stage::Asked, _) => Err(Error::Order("a frame before accepted")),
            (Stage::Running, Frame::Accepted) => Err(Error::Order("accepted twice")),
            (Stage::Running, Frame::Event(event)) => self.event(event),
            (Stage::Running, Frame::Data { channel, offset, bytes }) => {
                self.output(*channel, *offset)?;
                self.offset =
                    offset.checked_add(bytes.len() as u64).ok_or(Error::Order("an output offset that overflows"))?;
                Ok(())
            }
            (Stage::Running, Frame::Eof { channel, offset }) => {
                self.output(*channel, *offset)?;
                match channel {
                    Channel::Err => self.err_ended = true,
                    _ => self.out_ended = true,
                }
                Ok(())
            }
            (Stage::Running, Frame::Gap { from, to }) => {
                if !matches!(self.class, Class::Program { .. } | Class::Joined { output: true, .. }) {
                    return Err(Error::Order("a gap in an operation without kept output"));
                }
                self.input_first()?;
                if self.out_ended && self.err_ended {
                    return Err(Error::Order("a gap after the end of all output"));
                }
                if *from != self.offset || to <= from {
                    return Err(Error::Order("a gap that does not begin at the next offset"));
                }
                self.offset = *to;
                Ok(())
            }
            (Stage::Running, Frame::End(outcome)) => self.end(outcome),
        }
    }

    fn taken(&mut self, bytes: u64) -> Result<(), Error> {
        match self.taken.replace(bytes) {
            None => Err(Error::Order("told what was taken, unasked")),
            Some(before) if bytes < before => Err(Error::Order("taken, and then less")),
            Some(_) => Ok(()),
        }
    }

    /// Data and Eof alike: an output channel of this operation, not ended, at the next offset.
    fn output(&self, channel: Channel, offset: u64) -> Result<(), Error> {
        self.input_first()?;
        let (allowed, ended) = match (self.class, channel) {
            (Class::Program { .. } | Class::Joined { output: true, .. }, Channel::Out) => (true, self.out_ended),
            (Class::Program { terminal: false, .. } | Class::Joined { output: true, .. }, Channel::Err) => {
                (true, self.err_ended)
            }
            (Class::Bytes { stat }, Channel::Out) => (!stat || self.reported, self.out_ended),
            _ => (false, false),
        };
        if !allowed {
            return Err(Error::Order("output that the operation does not have"));
        }
        if ended {
            return Err(Error::Order("output after the end of its channel"));
        }
        if offset != self.offset {
            return Err(Error::Order("output that does not begin at the next offset"));
        }
        Ok(())
    }

    /// Whoever joined a program to feed it is told first where its input stands.
    fn input_first(&self) -> Result<(), Error> {
        match self.class {
            Class::Joined { input: true, .. } if self.input.is_none() => {
                Err(Error::Order("a frame before the state of the input"))
            }
            _ => Ok(()),
        }
    }

    fn event(&mut self, event: &Event) -> Result<(), Error> {
        let report = report(event);
        match (self.class, report) {
            (Class::One(wanted), _) if wanted == report => self.once(),
            (Class::Many(wanted), _) if wanted == report => Ok(()),
            (Class::Bytes { stat: true }, Report::Stat) => self.once(),
            (Class::Program { .. } | Class::Joined { .. }, Report::Started) => {
                self.input_first()?;
                self.once()
            }
            (Class::Program { input: true, .. } | Class::Joined { input: true, .. }, Report::Input) => {
                let Event::Input { next, .. } = event else {
                    return Err(Error::Order("an event of another operation"));
                };
                if self.input.is_some_and(|before| *next < before) {
                    return Err(Error::Order("an input offset that goes back"));
                }
                self.input = Some(*next);
                Ok(())
            }
            _ => Err(Error::Order("an event of another operation")),
        }
    }

    fn once(&mut self) -> Result<(), Error> {
        if self.reported {
            return Err(Error::Order("an event that comes once, twice"));
        }
        self.reported = true;
        Ok(())
    }

    fn end(&mut self, outcome: &Outcome) -> Result<(), Error> {
        let allowed = match (self.class, outcome) {
            (_, Outcome::Failed(_)) => true,
            (Class::Program { .. } | Class::Joined { output: true, .. }, Outcome::Process(_)) => true,
            // Without output wanted, the joining ends with its input or with the program, whichever is first.
            (Class::Joined { output: false, .. }, Outcome::Process(_) | Outcome::Done) => true,
            (Class::One(_), Outcome::Done) => self.reported,
            (Class::Bytes { .. }, Outcome::Done) => self.out_ended,
            (Class::Plain | Class::Many(_), Outcome::Done) => true,
            _ => false,
        };
        if !allowed {
            return Err(Error::Order("an end that the operation cannot have here"));
        }
        self.stage = Stage::Ended;
        Ok(())
    }
}

/// The guest's frames on one stream: decoded, and let through only in order.
#[derive(Debug)]
pub struct Incoming {
    frames: Frames,
    order: Order,
}

impl Incoming {
    /// For the stream on which `request` is sent.
    pub fn new(request: &Request) -> Self {
        Incoming { frames: Frames::new(), order: Order::new(request) }
    }

    /// The next frame in `buffer`; `None` wants more bytes. Never asks for more than one frame's room.
    pub fn next(&mut self, buffer: &mut BytesMut) -> Result<Option<Frame>, Error> {
        let Some(frame) = self.frames.decode(buffer)? else {
            return Ok(None);
        };
        self.order.check(&frame)?;
        Ok(Some(frame))
    }

    /// Whether `End` has come: the stream is to be closed.
    pub fn ended(&self) -> bool {
        self.order.stage == Stage::Ended
    }

    /// The next output offset, counted over both channels.
    pub fn offset(&self) -> u64 {
        self.order.offset
    }
}
