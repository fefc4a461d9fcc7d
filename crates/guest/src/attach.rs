//! One stream at a command: output from the ring to the host, input from the host to the program.
//!
//! Output is written straight from the ring's memory, many frames in one call. Any number of streams may be at one
//! command; each has its own place in the output, and the slowest holds the program back. Called by `agent`.

use std::io::IoSlice;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use pepo_proto::{Channel, Error, Event, Exec, FailureCode, Frame, Frames, OpId, Outcome, data_head};
use tokio::time::sleep;
use tokio_util::codec::Encoder;

use crate::exec::{Op, Place};
use crate::input::Offer;
use crate::stream::{CLOSE_WAIT, DATA_HEAD, Sender, Stream, failed};

/// Frames written by one call.
const BATCH: usize = 8;

/// How long the first answer waits for the program to run, so that both go out together.
const TOGETHER: Duration = Duration::from_millis(20);

/// What a stream wants of a command.
#[derive(Clone, Copy, Debug)]
pub struct Wants {
    /// The name of its Request.
    pub stream: OpId,
    /// Output from here on.
    pub from: Option<u64>,
    /// Whether it sends input.
    pub input: bool,
    /// Whether the end of what it sends is not the end of the program's input.
    pub keep_input: bool,
    /// Whether every other stream is to be closed.
    pub sole: bool,
}

impl Wants {
    /// Of the stream that runs a command.
    pub fn of(stream: OpId, exec: &Exec) -> Self {
        let input = exec.stdin || exec.pty.is_some();
        Wants { stream, from: Some(0), input, keep_input: false, sole: false }
    }
}

/// The frame at the cursor, written in part: its length is told, and `sent` bytes of head and payload are out.
struct Partial {
    length: usize,
    sent: usize,
}

enum Wrote {
    /// Everything there is; more may come.
    All,
    /// The socket takes no more for now.
    Blocked,
    /// The `End`, too.
    End,
}

/// Serves a stream until the command's end or the stream's.
pub async fn serve(mut stream: Stream, op: Rc<Op>, wants: Wants) {
    let place = Place::take(&op, wants.stream, wants.from, wants.sole);
    let result = pump(&mut stream, &op, &place, wants).await;
    drop(place);
    match result {
        Ok(Some(outcome)) => stream.end(outcome).await,
        Ok(None) => {
            // The End is written: the host closes.
            let _ = tokio::time::timeout(CLOSE_WAIT, stream.closed()).await;
        }
        Err(Error::Io(_) | Error::Truncated) => {}
        Err(error) => stream.end(failed(FailureCode::Invalid, error.to_string())).await,
    }
}

/// `Some` is an End still to be sent, `None` means that it was, or that there is nothing to say.
async fn pump(stream: &mut Stream, op: &Rc<Op>, place: &Place, wants: Wants) -> Result<Option<Outcome>, Error> {
    if op.is_starting() {
        let changed = op.changed.notified();
        if op.is_starting() {
            // Whether it came in time decides only how many writes there are.
            let _ = tokio::time::timeout(TOGETHER, changed).await;
        }
    }
    stream.accept()?;
    let (mut receiver, mut sender) = stream.halves();
    let mut output = wants.from.map(Output::new);
    let mut told_start = wants.from.is_none();
    let mut told_input = !wants.input;
    loop {
        let mut changed = pin!(op.changed.notified());
        changed.as_mut().enable();
        let room = op.input.room.notified();
        if place.is_closed() {
            return Err(Error::Truncated);
        }
        if let Some(told) = receiver.due() {
            sender.queue(told)?;
        }
        if !told_input && !op.is_starting() {
            told_input = true;
            let (next, open) = op.input.position();
            sender.queue(Frame::Event(Event::Input { next, open }))?;
        }
        if !told_start && let Some((pid, _)) = op.running() {
            told_start = true;
            sender.queue(Frame::Event(Event::Started { pid: pid as u32 }))?;
        }
        let ended = op.outcome();
        let next = op.ring.borrow().next();
        if ended.is_some() && output.as_ref().is_some_and(|output| output.cursor > next) {
            // It waited for what will never come.
            return Ok(Some(failed(FailureCode::Invalid, format!("the output ended at offset {next}"))));
        }
        let wrote = match &mut output {
            Some(output) => output.write(&mut sender, op, place, ended.as_ref())?,
            None => match (sender.try_flush()?, &ended) {
                (true, Some(outcome)) => return Ok(Some(outcome.clone())),
                (true, None) => Wrote::All,
                (false, _) => Wrote::Blocked,
            },
        };
        if matches!(wrote, Wrote::End) {
            return Ok(None);
        }
        let blocked = matches!(wrote, Wrote::Blocked);
        let takes_input = op.input.has_room();
        tokio::select! {
            biased;
            frame = receiver.receive(), if takes_input => match frame? {
                None => return Err(Error::Truncated),
                Some(Frame::Data { channel: Channel::In, offset, bytes }) if wants.input => {
                    if op.input.offer(offset, bytes) == Offer::Hole {
                        return Ok(Some(failed(FailureCode::Invalid, "input was skipped")));
                    }
                }
                Some(Frame::Eof { channel: Channel::In, offset }) if wants.input => {
                    if !wants.keep_input && op.input.end(offset) == Offer::Hole {
                        return Ok(Some(failed(FailureCode::Invalid, "input was skipped")));
                    }
                    if wants.from.is_none() {
                        return Ok(Some(Outcome::Done));
                    }
                }
                Some(_) => return Ok(Some(failed(FailureCode::Invalid, "this frame has no place here"))),
            },
            result = sender.writable(), if blocked => result?,
            () = &mut changed => {}
            () = room, if !takes_input => {}
            // Ended, and the host reads nothing: it is gone, or will attach again.
            () = sleep(CLOSE_WAIT), if blocked && ended.is_some() => return Err(Error::Truncated),
        }
    }
}

/// One stream's place in the output.
struct Output {
    cursor: u64,
    partial: Option<Partial>,
    /// Whether all that is left to say is queued.
    ending: bool,
}

impl Output {
    fn new(from: u64) -> Self {
        Output { cursor: from, partial: None, ending: false }
    }

    /// Writes what there is, as much as the socket takes.
    fn write(
        &mut self,
        sender: &mut Sender<'_>,
        op: &Op,
        place: &Place,
        ended: Option<&Outcome>,
    ) -> Result<Wrote, Error> {
        if self.ending {
            return Ok(if sender.try_flush()? { Wrote::End } else { Wrote::Blocked });
        }
        let ring = op.ring.borrow();
        loop {
            if self.partial.is_none() && self.cursor < ring.kept_from() {
                sender.queue(Frame::Gap { from: self.cursor, to: ring.kept_from() })?;
                self.cursor = ring.kept_from();
            }
            let mut heads = [[0; DATA_HEAD]; BATCH];
            let mut pieces: [&[u8]; BATCH] = [&[]; BATCH];
            let mut count = 0;
            let mut cursor = self.cursor;
            while count < BATCH {
                let Some((channel, mut bytes)) = ring.piece(cursor) else {
                    break;
                };
                if let (0, Some(partial)) = (count, &self.partial) {
                    // Its length is told already, and what is told is kept until it is written.
                    bytes = bytes.get(..partial.length).ok_or(Error::Truncated)?;
                }
                heads[count] = data_head(channel, cursor, bytes.len())?;
                pieces[count] = bytes;
                cursor += bytes.len() as u64;
                count += 1;
            }
            let mut tail = BytesMut::new();
            if let Some(outcome) = ended.filter(|_| cursor == ring.next()) {
                let mut frames = Frames::new();
                frames.encode(Frame::Eof { channel: Channel::Out, offset: cursor }, &mut tail)?;
                if !op.terminal {
                    frames.encode(Frame::Eof { channel: Channel::Err, offset: cursor }, &mut tail)?;
                }
                frames.encode(Frame::End(outcome.clone()), &mut tail)?;
            }
            // A frame written in part goes first: what is queued must not come into the middle of it.
            let queued_first = self.partial.is_none();
            let mut slices = Vec::with_capacity(2 * BATCH + 2);
            if queued_first {
                slices.push(IoSlice::new(sender.queued()));
            }
            for index in 0..count {
                let sent = if index == 0 { self.partial.as_ref().map_or(0, |partial| partial.sent) } else { 0 };
                slices.push(IoSlice::new(&heads[index][sent.min(DATA_HEAD)..]));
                slices.push(IoSlice::new(&pieces[index][sent.saturating_sub(DATA_HEAD)..]));
                if index == 0 && !queued_first {
                    slices.push(IoSlice::new(sender.queued()));
                }
            }
            slices.push(IoSlice::new(&tail));
            if slices.iter().all(|slice| slice.is_empty()) {
                return Ok(Wrote::All);
            }
            let Some(mut written) = sender.try_write(&slices)? else {
                return Ok(Wrote::Blocked);
            };
            drop(slices);
            let offered: usize = sender.queued().len()
                + (0..count).map(|index| DATA_HEAD + pieces[index].len()).sum::<usize>()
                + tail.len()
                - self.partial.as_ref().map_or(0, |partial| partial.sent);
            let complete = written == offered;
            let queued = sender.queued().len();
            let take_queued = |sender: &mut Sender<'_>, written: &mut usize| {
                let take = queued.min(*written);
                sender.wrote(take);
                *written -= take;
            };
            if queued_first {
                take_queued(sender, &mut written);
            }
            for (index, bytes) in pieces[..count].iter().enumerate() {
                let sent = if index == 0 { self.partial.take().map_or(0, |partial| partial.sent) } else { 0 };
                let whole = DATA_HEAD + bytes.len();
                if sent + written < whole {
                    let sent = sent + written;
                    written = 0;
                    if sent > 0 {
                        self.partial = Some(Partial { length: bytes.len(), sent });
                    }
                    break;
                }
                written -= whole - sent;
                self.cursor += bytes.len() as u64;
                if index == 0 && !queued_first {
                    take_queued(sender, &mut written);
                }
            }
            place.read_to(self.cursor, self.partial.is_some());
            if complete && !tail.is_empty() {
                return Ok(Wrote::End);
            }
            if !complete && written > 0 {
                // Only the tail can have been cut here: the rest of it is all that is left to say.
                sender.queue_bytes(&tail[written..]);
                self.ending = true;
                return Ok(Wrote::Blocked);
            }
        }
    }
}
