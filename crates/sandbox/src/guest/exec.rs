//! Programs: starting one, joining one, its output as a stream and its input with backpressure.
//!
//! Dropping an [`Exec`] leaves its program alone: the guest is told that the stream is not read any more, gives the
//! program 30 s to be joined again, then kills it, unless it is detached. [`Exec::cancel`] kills it now.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::Stream;
use pepo_proto::{Attach, Channel, Event, Frame, OpId, Operation, Outcome, Process};

use super::stream::Writer;
use super::{Error, Guest, Talk, new_op};

/// What a program says, in the order in which it said it.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// It runs.
    Started {
        /// Its process id in the guest.
        pid: u32,
    },
    /// Where its input stands.
    Input {
        /// The next offset wanted.
        next: u64,
        /// Whether more is taken.
        open: bool,
    },
    /// Bytes it wrote.
    Data {
        /// [`Channel::Out`] or [`Channel::Err`].
        channel: Channel,
        /// Bytes before these, over both channels.
        offset: u64,
        /// At least one.
        bytes: Bytes,
    },
    /// Bytes it wrote that are no longer kept.
    Gap {
        /// The first of them.
        from: u64,
        /// The first after them.
        to: u64,
    },
    /// Nothing more comes on this channel.
    Eof {
        /// [`Channel::Out`] or [`Channel::Err`].
        channel: Channel,
        /// Bytes before it, over both channels.
        offset: u64,
    },
    /// How it ended: the last item of an [`Exec`] from [`Guest::exec`].
    End(Process),
    /// An attachment without output ended with its input; the program goes on.
    Left,
}

/// A program's streams: output as a [`Stream`], input by [`Exec::take_input`].
///
/// Reading slowly holds the program back. The stream ends after [`Output::End`], [`Output::Left`] or an error;
/// [`Error::Lost`] says that the stream broke and the program may still run: attach again from [`Exec::offset`].
#[derive(Debug)]
pub struct Exec {
    target: OpId,
    talk: Talk,
    input: Option<Input>,
    /// Frames read while starting.
    first: Option<Output>,
    over: bool,
}

impl Guest {
    /// Runs a program named `op`. The same name again joins the run there is, from the first byte kept, and starts
    /// nothing.
    pub async fn exec(&self, op: OpId, exec: pepo_proto::Exec) -> Result<Exec, Error> {
        let stdin = exec.stdin || exec.pty.is_some();
        let mut talk = self.open(op, Operation::Exec(exec)).await?;
        let input = stdin.then(|| Input::of(&mut talk, 0));
        Ok(Exec { target: op, talk, input, first: None, over: false })
    }

    /// Joins a program: replays its output from an offset and follows, or feeds it, or both.
    pub async fn attach(&self, attach: Attach) -> Result<Exec, Error> {
        let (target, wants_input) = (attach.target, attach.input);
        let mut talk = self.open(new_op(), Operation::Attach(attach)).await?;
        if !wants_input {
            return Ok(Exec { target, talk, input: None, first: None, over: false });
        }
        let within = self.0.deadlines.control;
        let first = tokio::time::timeout(within, talk.frame())
            .await
            .map_err(|_| Error::Timeout { what: "say where input stands", after: within })??;
        match first {
            Frame::Event(Event::Input { next, open }) => {
                let mut input = Input::of(&mut talk, next);
                input.open = open;
                Ok(Exec { target, talk, input: Some(input), first: Some(Output::Input { next, open }), over: false })
            }
            Frame::End(Outcome::Failed(failure)) => Err(Error::Failed(failure)),
            // The program ended while we came.
            Frame::End(outcome) => {
                Ok(Exec { target, talk, input: None, first: output(Frame::End(outcome)).ok(), over: false })
            }
            _ => Err(Error::Protocol(pepo_proto::Error::Order("a frame before the state of the input"))),
        }
    }

    /// Feeds a program from elsewhere than its own stream: take the [`Input`], send, [`Input::eof`], then read to
    /// [`Output::Left`] (or to the program's end, if that is first): only then has the guest taken all of it.
    pub async fn input(&self, target: OpId, end: InputEnd) -> Result<Exec, Error> {
        self.attach(Attach { target, from: None, input: true, keep_input: end == InputEnd::Keep, sole: None }).await
    }
}

/// What the end of an attachment's input means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputEnd {
    /// This side sends no more; the program may get more from others.
    Keep,
    /// The program's input ends.
    Close,
}

impl Exec {
    /// The program's name.
    pub fn op(&self) -> OpId {
        self.target
    }

    /// The next output offset: where to attach after a loss.
    pub fn offset(&self) -> u64 {
        self.talk.reader.offset()
    }

    /// Whether its input is still here to be taken.
    pub fn has_input(&self) -> bool {
        self.input.is_some()
    }

    /// The program's input, once; `None` where it has none, or it was taken.
    pub fn take_input(&mut self) -> Option<Input> {
        self.input.take()
    }

    /// Kills the program with all its processes; answered when it has ended. Its `End` still comes here.
    pub async fn cancel(&self) -> Result<(), Error> {
        self.talk.leave.guest.cancel(self.target).await
    }

    /// The next output; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<Output, Error>> {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Output, Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if self.over {
            return Poll::Ready(None);
        }
        let result = match ready!(self.talk.reader.poll_frame(cx)) {
            Ok(frame) => output(frame),
            Err(error) => Err(error),
        };
        self.over = matches!(result, Ok(Output::End(_) | Output::Left) | Err(_));
        Poll::Ready(Some(result))
    }
}

impl Stream for Exec {
    type Item = Result<Output, Error>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll(cx)
    }
}

fn output(frame: Frame) -> Result<Output, Error> {
    match frame {
        Frame::Data { channel, offset, bytes } => Ok(Output::Data { channel, offset, bytes }),
        Frame::Eof { channel, offset } => Ok(Output::Eof { channel, offset }),
        Frame::Gap { from, to } => Ok(Output::Gap { from, to }),
        Frame::Event(Event::Started { pid }) => Ok(Output::Started { pid }),
        Frame::Event(Event::Input { next, open }) => Ok(Output::Input { next, open }),
        Frame::End(Outcome::Process(process)) => Ok(Output::End(process)),
        Frame::End(Outcome::Done) => Ok(Output::Left),
        Frame::End(Outcome::Failed(failure)) => Err(Error::Failed(failure)),
        Frame::Request(_) | Frame::Accepted | Frame::Event(_) => {
            Err(Error::Protocol(pepo_proto::Error::Order("a frame that a program does not send")))
        }
    }
}

/// A program's input on one stream.
#[derive(Debug)]
pub struct Input {
    writer: Writer,
    next: u64,
    open: bool,
}

impl Input {
    fn of(talk: &mut Talk, next: u64) -> Self {
        Input { writer: talk.writer.another(), next, open: true }
    }

    /// The next offset to send.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Whether the program still took input when this was made, and it was not ended here since.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Sends bytes that begin at `offset`, and waits until the stream has taken them. What was sent before is left out,
    /// so a repeat is safe, also after this future was dropped half-way. An offset beyond [`Input::next`] is
    /// refused as invalid; nothing is sent then.
    pub async fn send(&mut self, offset: u64, mut bytes: Bytes) -> Result<(), Error> {
        if !self.open {
            return Err(Error::Ended);
        }
        poll_fn(|cx| self.writer.poll_flush(cx)).await?;
        let known = self.next.checked_sub(offset).ok_or_else(|| {
            Error::Failed(pepo_proto::Failure {
                code: pepo_proto::FailureCode::Invalid,
                message: format!("input at offset {offset} leaves a hole after {}", self.next),
            })
        })?;
        if known >= bytes.len() as u64 {
            return Ok(());
        }
        let _ = bytes.split_to(known as usize);
        let length = bytes.len() as u64;
        self.writer.queue_data(Channel::In, self.next, bytes)?;
        self.next += length;
        poll_fn(|cx| self.writer.poll_flush(cx)).await
    }

    /// Ends the input. What this means to the program was said when the stream was opened.
    pub async fn eof(&mut self) -> Result<(), Error> {
        if self.open {
            self.open = false;
            self.writer.queue(Frame::Eof { channel: Channel::In, offset: self.next })?;
        }
        poll_fn(|cx| self.writer.poll_flush(cx)).await
    }
}
