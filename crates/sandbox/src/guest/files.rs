//! Files and trees of a guest: small operations, downloads, uploads, a watch.
//!
//! Bytes pass through, never gathered: a [`Download`] is a stream, an [`Upload`] takes what the guest takes. A listing
//! is gathered up to the caller's limit. Names from the guest are bytes and hostile; whoever shows them escapes them.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use pepo_proto::{
    Channel, Event, FileStat, Frame, List, Make, OpId, Operation, Outcome, Read, Remove, Rename, Stat, TarIn, TarOut,
    Watch, WatchKind, Write,
};
use tokio::time::Sleep;

use super::{Error, Guest, Talk, done, new_op};

/// A directory's entries, in no order.
#[derive(Clone, Debug, PartialEq)]
pub struct Listing {
    /// At most as many as were asked for.
    pub entries: Vec<FileStat>,
    /// Whether there are more.
    pub more: bool,
}

impl Guest {
    /// A file's bytes, and what it is.
    pub async fn read(&self, read: Read) -> Result<(FileStat, Download), Error> {
        let mut talk = self.open(new_op(), Operation::Read(read)).await?;
        match talk.frame_soon().await? {
            Frame::Event(Event::Stat(stat)) => Ok((stat, Download::of(talk, None))),
            Frame::End(Outcome::Failed(failure)) => Err(Error::Failed(failure)),
            _ => Err(unasked()),
        }
    }

    /// A tree as a tar archive. A failure to begin (no such path) is told here, not in the stream.
    pub async fn tar_out(&self, tar: TarOut) -> Result<Download, Error> {
        let mut talk = self.open(new_op(), Operation::TarOut(tar)).await?;
        match talk.frame_soon().await? {
            Frame::End(Outcome::Failed(failure)) => Err(Error::Failed(failure)),
            first => Ok(Download::of(talk, Some(first))),
        }
    }

    /// A file to be written: it appears whole at [`Upload::finish`], or not at all.
    pub async fn write(&self, write: Write) -> Result<Upload, Error> {
        Ok(Upload::of(self.open(new_op(), Operation::Write(write)).await?))
    }

    /// A tar archive to be unpacked.
    pub async fn tar_in(&self, tar: TarIn) -> Result<Upload, Error> {
        Ok(Upload::of(self.open(new_op(), Operation::TarIn(tar)).await?))
    }

    /// A directory's entries, at most `limit` of them. The deadline of bytes is for all of it: entries that drip are
    /// no progress.
    pub async fn list(&self, list: List, limit: usize) -> Result<Listing, Error> {
        let after = self.0.deadlines.idle;
        let whole = tokio::time::timeout(after, self.entries(list, limit));
        whole.await.unwrap_or(Err(Error::Timeout { what: "list a directory", after }))
    }

    async fn entries(&self, list: List, limit: usize) -> Result<Listing, Error> {
        let mut talk = self.open(new_op(), Operation::List(list)).await?;
        let mut entries = Vec::new();
        loop {
            match talk.frame().await? {
                Frame::Event(Event::Entries(some)) => {
                    let room = limit - entries.len();
                    let more = some.len() > room;
                    entries.extend(some.into_iter().take(room));
                    if more {
                        return Ok(Listing { entries, more });
                    }
                }
                Frame::End(outcome) => return done(outcome).map(|()| Listing { entries, more: false }),
                _ => return Err(unasked()),
            }
        }
    }

    /// One entry; the last component is not followed.
    pub async fn stat(&self, stat: Stat) -> Result<FileStat, Error> {
        let mut found = None;
        self.control(Operation::Stat(stat), self.0.deadlines.idle, |event| {
            if let Event::Stat(stat) = event {
                found = Some(stat);
            }
            Ok(())
        })
        .await?;
        found.ok_or_else(unasked)
    }

    /// Makes a directory or a link.
    pub async fn make(&self, make: Make) -> Result<(), Error> {
        self.change(Operation::Make(make)).await
    }

    /// Renames, replacing what is there.
    pub async fn rename(&self, rename: Rename) -> Result<(), Error> {
        self.change(Operation::Rename(rename)).await
    }

    /// Removes an entry, a directory with what is in it if asked so.
    pub async fn remove(&self, remove: Remove) -> Result<(), Error> {
        self.change(Operation::Remove(remove)).await
    }

    /// Changes below a path, until the handle is dropped.
    pub async fn watch(&self, watch: Watch) -> Result<Watching, Error> {
        Ok(Watching { talk: self.open(new_op(), Operation::Watch(watch)).await?, over: false })
    }

    /// A change of files: the guest's disk may be slow, so it has the deadline of bytes.
    async fn change(&self, operation: Operation) -> Result<(), Error> {
        self.control(operation, self.0.deadlines.idle, |_| Ok(())).await
    }
}

fn unasked() -> Error {
    Error::Protocol(pepo_proto::Error::Order("an answer to something else"))
}

/// Bytes out of the guest. Ends after the last byte, or with an error; only a stream that ended without one is whole.
/// Dropping it earlier cancels the operation.
#[derive(Debug)]
pub struct Download {
    talk: Talk,
    first: Option<Frame>,
    /// Runs while a frame is awaited, not while the caller does something else.
    idle: Option<Pin<Box<Sleep>>>,
    over: bool,
}

impl Download {
    fn of(talk: Talk, first: Option<Frame>) -> Self {
        Download { talk, first, idle: None, over: false }
    }

    /// The operation's name.
    pub fn op(&self) -> OpId {
        self.talk.op
    }

    /// The next bytes; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        if self.over {
            return Poll::Ready(None);
        }
        loop {
            let frame = match self.first.take() {
                Some(first) => Ok(first),
                None => match self.talk.reader.poll_frame(cx) {
                    Poll::Ready(frame) => {
                        self.idle = None;
                        frame
                    }
                    Poll::Pending => {
                        let after = self.talk.leave.guest.0.deadlines.idle;
                        ready!(poll_idle(&mut self.idle, after, cx));
                        Err(Error::Timeout { what: "go on", after })
                    }
                },
            };
            let end = match frame {
                Ok(Frame::Data { bytes, .. }) => return Poll::Ready(Some(Ok(bytes))),
                Ok(Frame::Eof { .. }) => continue,
                Ok(Frame::End(outcome)) => done(outcome).err(),
                Ok(_) => Some(unasked()),
                Err(error) => Some(error),
            };
            self.over = true;
            return Poll::Ready(end.map(Err));
        }
    }
}

impl Stream for Download {
    type Item = Result<Bytes, Error>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll(cx)
    }
}

fn poll_idle(idle: &mut Option<Pin<Box<Sleep>>>, after: Duration, cx: &mut Context<'_>) -> Poll<()> {
    idle.get_or_insert_with(|| Box::pin(tokio::time::sleep(after))).as_mut().poll(cx)
}

/// Bytes into the guest. Nothing counts before [`Upload::finish`] has answered; dropping it earlier cancels.
#[derive(Debug)]
pub struct Upload {
    talk: Talk,
    sent: u64,
}

impl Upload {
    fn of(talk: Talk) -> Self {
        Upload { talk, sent: 0 }
    }

    /// The operation's name.
    pub fn op(&self) -> OpId {
        self.talk.op
    }

    /// Sends bytes and waits until the stream has taken them. An early refusal (disk full) is told here.
    pub async fn send(&mut self, bytes: Bytes) -> Result<(), Error> {
        self.flush().await?;
        let length = bytes.len() as u64;
        self.talk.writer.queue_data(Channel::In, self.sent, bytes)?;
        self.sent += length;
        self.flush().await
    }

    /// Says that all was sent, and waits for the guest to have it in place.
    pub async fn finish(mut self) -> Result<(), Error> {
        self.talk.writer.queue(Frame::Eof { channel: Channel::In, offset: self.sent })?;
        self.flush().await?;
        match self.talk.frame_soon().await? {
            Frame::End(outcome) => done(outcome),
            _ => Err(unasked()),
        }
    }

    /// Writes what is queued, and listens meanwhile: the guest may refuse at any time. The deadline is for progress.
    async fn flush(&mut self) -> Result<(), Error> {
        let after = self.talk.leave.guest.0.deadlines.idle;
        let mut idle = None;
        let mut left = self.talk.writer.queued();
        poll_fn(|cx| {
            if let Poll::Ready(frame) = self.talk.reader.poll_frame(cx) {
                return Poll::Ready(match frame? {
                    Frame::End(Outcome::Failed(failure)) => Err(Error::Failed(failure)),
                    _ => Err(unasked()),
                });
            }
            if let Poll::Ready(flushed) = self.talk.writer.poll_flush(cx) {
                return Poll::Ready(flushed);
            }
            if self.talk.writer.queued() < left {
                left = self.talk.writer.queued();
                idle = None;
            }
            ready!(poll_idle(&mut idle, after, cx));
            Poll::Ready(Err(Error::Timeout { what: "take bytes", after }))
        })
        .await
    }
}

/// One change below a watched path.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// How.
    pub kind: WatchKind,
    /// Relative to the watched path, empty for the path itself. Hostile bytes.
    pub path: Vec<u8>,
}

/// Changes as they come. Dropping it ends the watch.
#[derive(Debug)]
pub struct Watching {
    talk: Talk,
    over: bool,
}

impl Watching {
    /// The next change; `None` after the guest ended the watch (the watched path went away).
    pub async fn next(&mut self) -> Option<Result<Change, Error>> {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Change, Error>>> {
        if self.over {
            return Poll::Ready(None);
        }
        let end = match ready!(self.talk.reader.poll_frame(cx)) {
            Ok(Frame::Event(Event::Change { kind, path })) => return Poll::Ready(Some(Ok(Change { kind, path }))),
            Ok(Frame::End(outcome)) => done(outcome).err(),
            Ok(_) => Some(unasked()),
            Err(error) => Some(error),
        };
        self.over = true;
        Poll::Ready(end.map(Err))
    }
}

impl Stream for Watching {
    type Item = Result<Change, Error>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll(cx)
    }
}
