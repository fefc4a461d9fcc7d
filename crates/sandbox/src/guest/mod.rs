//! The host's side of the guest protocol: one [`Guest`] per Sandbox, one stream per operation.
//!
//! Owns the streams of a Sandbox and their number. Promises that nothing here hangs by the guest's doing except what is
//! meant to last (a program's output, a watch, a connection), that a guest which breaks the order of frames gets
//! [`Error::Protocol`] and no memory, and that a full Sandbox is [`Error::Busy`] at once. Called by whoever drives a
//! Sandbox; decodes what a guest chose, so the process that calls it holds no capability.
//!
//! ```text
//! operation -> permit -> connect -> Request -> Accepted -> frames, checked by order.rs -> End -> close
//! ```
//!
//! A dropped handle closes its stream, and says so on a stream kept for it, because a guest does not notice a closed
//! stream while its data is stuck: a program is left and goes on under its lease (see [`Exec`]), everything else is
//! cancelled.

mod clock;
mod dial;
mod exec;
mod files;
mod order;
mod share;
mod stream;

use std::future::poll_fn;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pepo_proto::{
    Activate, Cancel, Event, Failure, Frame, GENERATION, Hello, HelloReply, MAX_STREAMS, Network, OLDEST_GENERATION,
    OpId, OpSummary, Operation, Outcome, PtySize, Ready, Request, Resize, Signal, Stats, URGENT_STREAMS,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use dial::Dialed;
pub use exec::{Exec, Input, InputEnd, Output};
pub use files::{Change, Download, Listing, Upload, Watching};
pub use order::Incoming;
pub use stream::Connector;

use stream::{Reader, Writer, halves};

/// How long one call may take. The stream device loses a call now and then, without a word; the next one is taken.
const CALL: Duration = Duration::from_secs(4);

/// Of the streams kept for urgent operations, those that attachments may use; the others are for what ends by itself.
const ATTACH_STREAMS: usize = URGENT_STREAMS / 2;

/// Operations a guest may report. It could report for ever; no guest of ours keeps so many.
const MOST_OPS: usize = 16 * 1024;

/// Why an operation has no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No stream could be made: nothing was asked.
    #[error("guest cannot be reached")]
    Unreachable(#[source] io::Error),
    /// The stream ended before `End`: what became of the operation is unknown.
    #[error("stream was lost before the operation's end")]
    Lost(#[source] Option<io::Error>),
    /// The guest sent what no guest of ours sends (or we asked for what no frame holds).
    #[error("protocol was broken")]
    Protocol(#[source] pepo_proto::Error),
    /// The guest says that it did not do it. Shown escaped and shortened: a guest can write anything.
    #[error("guest failed with {:?}: {}", .0.code, shown(&.0.message))]
    Failed(Failure),
    /// Nothing came in time.
    #[error("guest did not {what} within {after:?}")]
    Timeout {
        /// What it should have done.
        what: &'static str,
        /// How long it had.
        after: Duration,
    },
    /// All streams of this Sandbox are in use.
    #[error("all streams of the sandbox are in use")]
    Busy,
    /// The operation has ended, or takes no more input.
    #[error("operation takes no more")]
    Ended,
}

/// A guest's sentence, made harmless: escaped, at most 200 characters.
fn shown(message: &str) -> String {
    message.chars().take(200).flat_map(char::escape_debug).collect()
}

/// How long a guest may take.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// To give a stream.
    pub connect: Duration,
    /// To accept an operation, and to finish one that is short.
    pub control: Duration,
    /// To end another operation. A killed process may be in an uninterruptible wait, for which the guest itself waits 20 s.
    pub cancel: Duration,
    /// Between two frames of a file, a tree or a listing, and to take bytes of one.
    pub idle: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        // In software emulation, on two cores with a load of fourteen, a guest was seen to need five seconds to give a
        // stream. One whose VMM is gone answers at once.
        Deadlines {
            connect: Duration::from_secs(20),
            control: Duration::from_secs(30),
            cancel: Duration::from_secs(25),
            idle: Duration::from_secs(60),
        }
    }
}

/// The agent of one Sandbox. Cloning is cheap; clones share the count of streams.
#[derive(Clone, Debug)]
pub struct Guest(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    connector: Connector,
    deadlines: Deadlines,
    ordinary: Arc<Semaphore>,
    attach: Arc<Semaphore>,
    control: Arc<Semaphore>,
    /// Connected, and nothing said on them yet.
    held: Mutex<Vec<tokio::net::UnixStream>>,
}

impl Guest {
    /// A guest reached through `connector`, with the default [`Deadlines`]. Does not connect.
    pub fn new(connector: Connector) -> Self {
        Self::with_deadlines(connector, Deadlines::default())
    }

    /// A guest that may take this long.
    pub fn with_deadlines(connector: Connector, deadlines: Deadlines) -> Self {
        Guest(Arc::new(Shared {
            connector,
            deadlines,
            ordinary: Arc::new(Semaphore::new(MAX_STREAMS - URGENT_STREAMS)),
            attach: Arc::new(Semaphore::new(ATTACH_STREAMS)),
            control: Arc::new(Semaphore::new(URGENT_STREAMS - ATTACH_STREAMS)),
            held: Mutex::default(),
        }))
    }

    /// Who answers. A guest whose generation this host does not speak is an error.
    pub async fn hello(&self) -> Result<HelloReply, Error> {
        let hello = Hello { oldest: OLDEST_GENERATION, newest: GENERATION, features: 0 };
        let mut reply = None;
        self.control(Operation::Hello(hello), self.0.deadlines.control, |event| {
            if let Event::Hello(hello) = event {
                reply = Some(hello);
            }
            Ok(())
        })
        .await?;
        match reply {
            Some(hello) if (OLDEST_GENERATION..=GENERATION).contains(&hello.generation) => Ok(hello),
            _ => Err(Error::Protocol(pepo_proto::Error::Order("a generation that was not offered"))),
        }
    }

    /// Connects streams ahead of need, so that the first operations do not wait for that. A guest keeps them open until it
    /// is activated, and for 10 s after that.
    pub(crate) async fn hold(&self, streams: usize) -> Result<(), Error> {
        for _ in 0..streams {
            let stream = self.connect().await?;
            lock(&self.0.held).push(stream);
        }
        Ok(())
    }

    /// Has a fresh guest do ahead what its activation, with this network, and its first command would wait for.
    pub(crate) async fn ready(&self, network: Option<Network>) -> Result<(), Error> {
        self.plain(Operation::Ready(Ready { network })).await
    }

    /// Turns a fresh guest into this Sandbox. A second time is [`pepo_proto::FailureCode::State`].
    pub async fn activate(&self, activate: Activate) -> Result<(), Error> {
        self.plain(Operation::Activate(activate)).await
    }

    /// Sends a signal to a program (`tree`: to all its processes).
    pub async fn signal(&self, signal: Signal) -> Result<(), Error> {
        self.plain(Operation::Signal(signal)).await
    }

    /// Sets the size of a program's terminal.
    pub async fn resize(&self, target: OpId, size: PtySize) -> Result<(), Error> {
        self.plain(Operation::Resize(Resize { target, size })).await
    }

    /// Ends an operation; a program with all its processes. Answered when it has ended.
    pub async fn cancel(&self, target: OpId) -> Result<(), Error> {
        self.control(Operation::Cancel(Cancel { target }), self.0.deadlines.cancel, |_| Ok(())).await
    }

    /// The programs that run, and those whose output is still kept.
    pub async fn ops(&self) -> Result<Vec<OpSummary>, Error> {
        let mut all = Vec::new();
        self.control(Operation::Ops, self.0.deadlines.control, |event| {
            if let Event::Ops(some) = event {
                all.extend(some);
            }
            if all.len() > MOST_OPS {
                return Err(Error::Protocol(pepo_proto::Error::Order("more operations than a guest keeps")));
            }
            Ok(())
        })
        .await?;
        Ok(all)
    }

    /// Whether the agent answers.
    pub async fn ping(&self) -> Result<(), Error> {
        self.plain(Operation::Ping).await
    }

    /// What the guest uses, by its own account.
    pub async fn stats(&self) -> Result<Stats, Error> {
        let mut stats = None;
        self.control(Operation::Stats, self.0.deadlines.control, |event| {
            if let Event::Stats(reported) = event {
                stats = Some(reported);
            }
            Ok(())
        })
        .await?;
        stats.ok_or(Error::Lost(None))
    }

    /// Flushes all file systems of the guest, at most `within`.
    pub async fn sync(&self, within: Duration) -> Result<(), Error> {
        self.control(Operation::Sync, within, |_| Ok(())).await
    }

    /// Ends all programs, flushes and powers off; answered before the power goes, at most `within`.
    pub async fn shutdown(&self, within: Duration) -> Result<(), Error> {
        self.control(Operation::Shutdown, within, |_| Ok(())).await
    }

    async fn plain(&self, operation: Operation) -> Result<(), Error> {
        self.control(operation, self.0.deadlines.control, |_| Ok(())).await
    }

    /// An operation that is asked, perhaps answered by events, and done: all of it `within`.
    async fn control(
        &self,
        operation: Operation,
        within: Duration,
        mut event: impl FnMut(Event) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let whole = async {
            let mut talk = self.open(new_op(), operation).await?;
            loop {
                match talk.frame().await? {
                    Frame::Event(reported) => event(reported)?,
                    Frame::End(outcome) => return done(outcome),
                    _ => {
                        return Err(Error::Protocol(pepo_proto::Error::Order(
                            "output that the operation does not have",
                        )));
                    }
                }
            }
        };
        tokio::time::timeout(within, whole).await.unwrap_or(Err(Error::Timeout { what: "answer", after: within }))
    }

    /// Starts an operation: a permit, a stream, the Request, and Accepted.
    async fn open(&self, op: OpId, operation: Operation) -> Result<Talk, Error> {
        let permit = self.permit(&operation)?;
        // Who asks whether a guest is there takes none of those that are for its first work.
        if !matches!(operation, Operation::Ping | Operation::Hello(_))
            && let Some(stream) = self.held()
        {
            match self.open_on(stream, op, operation.clone(), permit).await {
                // The guest closed it at this moment, and nothing was asked; or it was, and the same name asks again.
                Err(Error::Lost(_)) => {
                    let permit = self.permit(&operation)?;
                    return self.open_on(self.connect().await?, op, operation, permit).await;
                }
                opened => return opened,
            }
        }
        self.open_on(self.connect().await?, op, operation, permit).await
    }

    async fn connect(&self) -> Result<tokio::net::UnixStream, Error> {
        let after = self.0.deadlines.connect;
        let calling = async {
            loop {
                if let Ok(connected) = tokio::time::timeout(CALL, self.0.connector.connect()).await {
                    break connected;
                }
            }
        };
        let connected = tokio::time::timeout(after, calling).await;
        connected.map_err(|_| Error::Timeout { what: "give a stream", after })?.map_err(Error::Unreachable)
    }

    /// A stream that was connected ahead, if one is still open.
    fn held(&self) -> Option<tokio::net::UnixStream> {
        let mut held = lock(&self.0.held);
        std::iter::from_fn(|| held.pop()).find(|stream| {
            let peeked = rustix::net::recv(stream, &mut [0_u8; 1], rustix::net::RecvFlags::PEEK);
            matches!(peeked, Err(rustix::io::Errno::WOULDBLOCK))
        })
    }

    async fn open_on(
        &self,
        stream: tokio::net::UnixStream,
        op: OpId,
        operation: Operation,
        permit: OwnedSemaphorePermit,
    ) -> Result<Talk, Error> {
        let deadlines = self.0.deadlines;
        let leaving = match self.0.connector.is_alone() {
            true => Leaving::Close,
            false => Leaving::of(&operation),
        };
        let paced = operation.takes_input().then_some(true);
        let request = Request { op, operation, paced };
        let (reader, mut writer) = halves(stream, &request);
        writer.queue(Frame::Request(request))?;
        let mut talk =
            Talk { op, reader, writer, leave: Leave { guest: self.clone(), op, leaving, permit: Some(permit) } };
        let accepted = async {
            poll_fn(|cx| talk.writer.poll_flush(cx)).await?;
            talk.frame().await
        };
        let first = tokio::time::timeout(deadlines.control, accepted)
            .await
            .map_err(|_| Error::Timeout { what: "accept an operation", after: deadlines.control })??;
        match first {
            Frame::End(Outcome::Failed(failure)) => Err(Error::Failed(failure)),
            _ => Ok(talk),
        }
    }

    fn permit(&self, operation: &Operation) -> Result<OwnedSemaphorePermit, Error> {
        let Shared { ordinary, attach, control, .. } = &*self.0;
        let order: &[&Arc<Semaphore>] = match operation {
            Operation::Attach(_) => &[ordinary, attach],
            urgent if urgent.is_urgent() => &[control, ordinary],
            _ => &[ordinary],
        };
        order.iter().find_map(|streams| Arc::clone(streams).try_acquire_owned().ok()).ok_or(Error::Busy)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name for an operation that nobody will ask for again.
fn new_op() -> OpId {
    OpId(uuid::Uuid::now_v7().into_bytes())
}

/// The result of an operation that has none but being done.
fn done(outcome: Outcome) -> Result<(), Error> {
    match outcome {
        Outcome::Failed(failure) => Err(Error::Failed(failure)),
        Outcome::Done | Outcome::Process(_) => Ok(()),
    }
}

/// One accepted operation and its stream.
#[derive(Debug)]
struct Talk {
    op: OpId,
    reader: Reader,
    writer: Writer,
    leave: Leave,
}

impl Talk {
    /// The next frame, whenever it comes.
    async fn frame(&mut self) -> Result<Frame, Error> {
        poll_fn(|cx| self.reader.poll_frame(cx)).await
    }

    /// The next frame, within the deadline between two of them.
    async fn frame_soon(&mut self) -> Result<Frame, Error> {
        let idle = self.leave.guest.0.deadlines.idle;
        tokio::time::timeout(idle, self.frame()).await.unwrap_or(Err(Error::Timeout { what: "go on", after: idle }))
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        if self.reader.ended() && self.leave.leaving != Leaving::Handed {
            self.leave.leaving = Leaving::Close;
        }
        self.leave.now(self.reader.wire().clone());
    }
}

/// What becomes of an operation whose handle is dropped before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    /// The stream is closed and that is all.
    Close,
    /// The operation is cancelled, then the stream is closed.
    Cancel,
    /// The guest is told that nobody reads the stream, then it is closed.
    Leave,
    /// The stream is somebody else's: its descriptor here is closed, and it is not.
    Handed,
    /// All was said but the guest's `End`: the stream is closed when that is there, so that nothing sent is lost.
    Linger,
}

impl Leaving {
    fn of(operation: &Operation) -> Self {
        match operation {
            Operation::Exec(_) | Operation::Attach(_) => Leaving::Leave,
            Operation::Read(_)
            | Operation::Write(_)
            | Operation::List(_)
            | Operation::Stat(_)
            | Operation::Make(_)
            | Operation::Rename(_)
            | Operation::Remove(_)
            | Operation::Watch(_)
            | Operation::TarOut(_)
            | Operation::TarIn(_)
            | Operation::Share(_)
            | Operation::Dial(_) => Leaving::Cancel,
            _ => Leaving::Close,
        }
    }
}

#[derive(Debug)]
struct Leave {
    guest: Guest,
    op: OpId,
    leaving: Leaving,
    permit: Option<OwnedSemaphorePermit>,
}

impl Leave {
    /// Closes, after saying so where it must be said. The stream and its permit are kept until that is answered or its
    /// deadline is over, so there are never more of these tasks than streams.
    fn now(&mut self, wire: Arc<stream::Wire>) {
        let permit = self.permit.take();
        let runtime = match self.leaving {
            Leaving::Cancel | Leaving::Leave | Leaving::Linger => tokio::runtime::Handle::try_current().ok(),
            Leaving::Close => None,
            Leaving::Handed => return,
        };
        let Some(runtime) = runtime else {
            wire.close();
            return;
        };
        let (guest, op, leaving) = (self.guest.clone(), self.op, self.leaving);
        runtime.spawn(async move {
            let told = match leaving {
                Leaving::Cancel => guest.cancel(op).await,
                Leaving::Leave => guest.plain(Operation::Leave(pepo_proto::Leave { stream: op })).await,
                Leaving::Linger | Leaving::Close | Leaving::Handed => {
                    let _ = tokio::time::timeout(guest.0.deadlines.control, wire.heard()).await;
                    Ok(())
                }
            };
            if let Err(error) = told {
                tracing::debug!(%op, %error, "the guest could not be told that nobody waits for an operation");
            }
            wire.close();
            drop(permit);
        });
    }
}
