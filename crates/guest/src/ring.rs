//! Kept output: what a command wrote, held for replay, within bounds.
//!
//! One [`Ring`] per command, all under one [`Kept`] budget. Offsets count the bytes of standard output and standard error
//! together, in the order they were read. Memory is taken when output comes, in chunks, and the oldest chunk goes first.
//! Called by `exec` (fill) and by the streams of `attach` (segments). Pure: it does no waiting of its own.
//!
//! ```text
//!            kept_from          cursor of the slowest reader          next
//!   gone ....|== chunk ==|== chunk ==|== chunk ==|== chunk (filling) ==|....
//!            ^ may be dropped when room is needed   ^ never dropped while a reader needs it
//! ```

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::rc::{Rc, Weak};

use pepo_proto::{Channel, MAX_DATA};

/// The most one command's output takes (surface: "16 MiB while the Sandbox lives").
pub const PER_COMMAND: usize = 16 << 20;

/// The most that all kept output takes, before the eighth of the guest's memory is looked at.
pub const PER_SANDBOX: usize = 64 << 20;

/// Sizes of a ring's first chunks; the last repeats. Small programs stay small, and a full chunk is a full frame.
const CHUNKS: [usize; 3] = [4 << 10, 16 << 10, MAX_DATA];

/// Changes of channel remembered at once: what alternates byte by byte keeps less output rather than more memory.
const MAX_RUNS: usize = 64 << 10;

/// What all rings share.
pub struct Kept {
    used: Cell<usize>,
    limit: usize,
    /// Rings of ended commands, the oldest end first: given up before a running command loses anything.
    ended: RefCell<VecDeque<Weak<RefCell<Ring>>>>,
}

impl Kept {
    /// A budget for a machine with so much memory.
    pub fn new(memory_bytes: u64) -> Rc<Self> {
        let eighth = usize::try_from(memory_bytes / 8).unwrap_or(usize::MAX);
        Rc::new(Kept { used: Cell::new(0), limit: PER_SANDBOX.min(eighth), ended: RefCell::default() })
    }

    /// Takes `bytes` if there is room or if ended commands can make it.
    fn reserve(&self, bytes: usize) -> bool {
        while self.used.get() + bytes > self.limit {
            let Some(oldest) = self.ended.borrow_mut().pop_front() else {
                return false;
            };
            if let Some(ring) = oldest.upgrade()
                && let Ok(mut ring) = ring.try_borrow_mut()
            {
                ring.give_up();
            }
        }
        self.used.set(self.used.get() + bytes);
        true
    }

    fn release(&self, bytes: usize) {
        self.used.set(self.used.get().saturating_sub(bytes));
    }

    /// Tells that a ring's command has ended: it is now among those given up first.
    pub fn ended(&self, ring: &Rc<RefCell<Ring>>) {
        let mut ended = self.ended.borrow_mut();
        ended.retain(|ring| ring.strong_count() > 0);
        ended.push_back(Rc::downgrade(ring));
    }

    /// Bytes in use.
    #[cfg(test)]
    pub fn used(&self) -> usize {
        self.used.get()
    }
}

struct Chunk {
    start: u64,
    length: usize,
    bytes: Box<[u8]>,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.start + self.length as u64
    }
}

/// A stretch of one channel, up to the next one's start.
struct Run {
    channel: Channel,
    start: u64,
}

/// What came of trying to read into a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// So many bytes were read.
    Read(usize),
    /// There is no room until a reader goes on.
    Full,
    /// The source has ended.
    Eof,
}

/// Which bytes may be dropped to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// All: nobody reads, and nobody is waited for.
    Nothing,
    /// Those before this offset.
    From(u64),
}

/// One command's kept output.
pub struct Ring {
    kept: Rc<Kept>,
    chunks: VecDeque<Chunk>,
    /// A chunk taken for a read that did not need it.
    spare: Option<Box<[u8]>>,
    runs: VecDeque<Run>,
    charged_runs: usize,
    memory: usize,
    limit: usize,
    made: usize,
    next: u64,
    out_bytes: u64,
    err_bytes: u64,
}

impl Ring {
    /// An empty ring under this budget.
    pub fn new(kept: Rc<Kept>) -> Self {
        Ring {
            kept,
            chunks: VecDeque::new(),
            spare: None,
            runs: VecDeque::new(),
            charged_runs: 0,
            memory: 0,
            limit: PER_COMMAND,
            made: 0,
            next: 0,
            out_bytes: 0,
            err_bytes: 0,
        }
    }

    /// The next offset.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The oldest offset still kept.
    pub fn kept_from(&self) -> u64 {
        self.chunks.front().map_or(self.next, |chunk| chunk.start)
    }

    /// Bytes read from this channel, kept or not.
    pub fn bytes(&self, channel: Channel) -> u64 {
        if channel == Channel::Err { self.err_bytes } else { self.out_bytes }
    }

    /// Reads once from `source` into free memory. An error of `source` comes back as it is.
    pub fn fill(
        &mut self,
        channel: Channel,
        hold: Hold,
        mut source: impl FnMut(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<Fill> {
        if self.runs.len() >= MAX_RUNS && !self.drop_oldest(hold) {
            return Ok(Fill::Full);
        }
        let free = self.chunks.back().map_or(0, |chunk| chunk.bytes.len() - chunk.length);
        if free < MAX_DATA / 2 && self.spare.is_none() {
            self.spare = self.fresh(hold);
            if free == 0 && self.spare.is_none() {
                return Ok(Fill::Full);
            }
        }
        let read = {
            let mut slices = [IoSliceMut::new(&mut []), IoSliceMut::new(&mut [])];
            if let Some(chunk) = self.chunks.back_mut() {
                slices[0] = IoSliceMut::new(&mut chunk.bytes[chunk.length..]);
            }
            if free < MAX_DATA / 2
                && let Some(spare) = &mut self.spare
            {
                slices[1] = IoSliceMut::new(spare);
            }
            let first = usize::from(slices[0].is_empty());
            source(&mut slices[first..])?
        };
        if read == 0 {
            return Ok(Fill::Eof);
        }
        self.took(channel, read, free);
        Ok(Fill::Read(read))
    }

    /// Gives back the memory of a chunk that was taken and not needed. To be called when nothing more is read for now.
    pub fn settle(&mut self) {
        if let Some(spare) = self.spare.take() {
            self.memory -= spare.len();
            self.kept.release(spare.len());
        }
    }

    fn took(&mut self, channel: Channel, read: usize, free: usize) {
        if self.runs.back().is_none_or(|run| run.channel != channel) {
            self.runs.push_back(Run { channel, start: self.next });
            self.charge_runs();
        }
        let into_last = read.min(free);
        if let Some(chunk) = self.chunks.back_mut() {
            chunk.length += into_last;
        }
        if read > into_last
            && let Some(bytes) = self.spare.take()
        {
            self.chunks.push_back(Chunk { start: self.next + into_last as u64, length: read - into_last, bytes });
        }
        self.next += read as u64;
        match channel {
            Channel::Err => self.err_bytes += read as u64,
            _ => self.out_bytes += read as u64,
        }
    }

    fn charge_runs(&mut self) {
        let bytes = self.runs.capacity() * size_of::<Run>();
        if bytes > self.charged_runs {
            let more = bytes - self.charged_runs;
            if !self.kept.reserve(more) {
                self.kept.used.set(self.kept.used.get() + more);
            }
            self.charged_runs = bytes;
        }
    }

    /// Memory for one more chunk: new, or that of the oldest one.
    fn fresh(&mut self, hold: Hold) -> Option<Box<[u8]>> {
        let size = CHUNKS[self.made.min(CHUNKS.len() - 1)];
        // A ring without a chunk gets its first, small one in any case: a command that cannot write cannot end.
        let within = self.memory + self.charged_runs + size <= self.limit;
        if within && (self.kept.reserve(size) || self.chunks.is_empty()) {
            if self.chunks.is_empty() && self.memory == 0 && self.kept.used.get() > self.kept.limit {
                self.kept.used.set(self.kept.used.get() + size);
            }
            self.memory += size;
            self.made += 1;
            return Some(vec![0; size].into_boxed_slice());
        }
        let oldest = self.take_oldest(hold)?;
        Some(oldest.bytes)
    }

    /// Takes the oldest chunk out, its memory still charged.
    fn take_oldest(&mut self, hold: Hold) -> Option<Chunk> {
        let oldest = self.chunks.front()?;
        let free = match hold {
            Hold::Nothing => true,
            Hold::From(offset) => oldest.end() <= offset,
        };
        // The chunk being filled stays, or there would be nothing to fill.
        if !free || oldest.length == 0 {
            return None;
        }
        let oldest = self.chunks.pop_front()?;
        let kept_from = self.kept_from();
        while self.runs.get(1).is_some_and(|second| second.start <= kept_from) {
            self.runs.pop_front();
        }
        if self.chunks.is_empty() {
            self.runs.clear();
        }
        Some(oldest)
    }

    fn drop_oldest(&mut self, hold: Hold) -> bool {
        match self.take_oldest(hold) {
            Some(chunk) => {
                self.memory -= chunk.bytes.len();
                self.kept.release(chunk.bytes.len());
                true
            }
            None => false,
        }
    }

    /// Drops everything kept; offsets and counts stay.
    pub fn give_up(&mut self) {
        self.kept.release(self.memory + self.charged_runs);
        self.chunks = VecDeque::new();
        self.runs = VecDeque::new();
        self.spare = None;
        self.memory = 0;
        self.charged_runs = 0;
    }

    /// The piece that starts at `offset`: one channel, contiguous, at most a frame's payload. `None` at the end, or
    /// where `offset` is no longer kept.
    pub fn piece(&self, offset: u64) -> Option<(Channel, &[u8])> {
        if offset >= self.next {
            return None;
        }
        let index = self.chunks.partition_point(|chunk| chunk.end() <= offset);
        let chunk = self.chunks.get(index)?;
        let skip = usize::try_from(offset.checked_sub(chunk.start)?).ok()?;
        let after = self.runs.partition_point(|run| run.start <= offset);
        let run = self.runs.get(after.checked_sub(1)?)?;
        let run_left = self.runs.get(after).map_or(u64::MAX, |next| next.start - offset);
        let length = (chunk.length - skip).min(MAX_DATA).min(usize::try_from(run_left).unwrap_or(usize::MAX));
        Some((run.channel, &chunk.bytes[skip..skip + length]))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.give_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(ring: &mut Ring, channel: Channel, hold: Hold, bytes: &[u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            let fill = ring.fill(channel, hold, |slices| {
                let mut n = 0;
                for slice in slices {
                    let take = slice.len().min(bytes.len() - done - n);
                    slice[..take].copy_from_slice(&bytes[done + n..done + n + take]);
                    n += take;
                }
                Ok(n)
            });
            match fill.unwrap() {
                Fill::Read(n) => done += n,
                Fill::Full | Fill::Eof => break,
            }
        }
        done
    }

    fn all(ring: &Ring, mut from: u64) -> (Vec<u8>, Vec<u8>) {
        let (mut out, mut err) = (vec![], vec![]);
        while let Some((channel, bytes)) = ring.piece(from) {
            assert!(!bytes.is_empty() && bytes.len() <= MAX_DATA);
            if channel == Channel::Err { &mut err } else { &mut out }.extend_from_slice(bytes);
            from += bytes.len() as u64;
        }
        assert_eq!(from, ring.next());
        (out, err)
    }

    #[test]
    fn keeps_channels_apart_and_in_order() {
        let kept = Kept::new(1 << 30);
        let mut ring = Ring::new(kept.clone());
        let (mut out, mut err) = (vec![], vec![]);
        for round in 0..3000_u32 {
            let text = vec![round as u8; 1 + (round as usize * 37) % 211];
            let channel = if round % 3 == 0 { Channel::Err } else { Channel::Out };
            assert_eq!(put(&mut ring, channel, Hold::From(0), &text), text.len());
            if round % 3 == 0 { &mut err } else { &mut out }.extend_from_slice(&text);
        }
        assert_eq!(all(&ring, 0), (out.clone(), err.clone()));
        assert_eq!(ring.bytes(Channel::Out), out.len() as u64);
        assert_eq!(ring.bytes(Channel::Err), err.len() as u64);
        drop(ring);
        assert_eq!(kept.used(), 0);
    }

    #[test]
    fn is_full_where_a_reader_holds_and_overwrites_where_none_does() {
        let kept = Kept::new(1 << 30);
        let mut ring = Ring::new(kept.clone());
        let block = vec![7; 1 << 20];
        let mut total = 0;
        while put(&mut ring, Channel::Out, Hold::From(0), &block) == block.len() {
            total += block.len();
            assert!(total <= PER_COMMAND);
        }
        assert!(ring.next() as usize > PER_COMMAND - (1 << 18), "filled {}", ring.next());
        assert_eq!(ring.kept_from(), 0);
        assert_eq!(put(&mut ring, Channel::Out, Hold::Nothing, &block), block.len());
        assert!(ring.kept_from() > 0);
        assert!(kept.used() <= PER_COMMAND);
        assert!(ring.piece(0).is_none());
        let from = ring.kept_from();
        all(&ring, from);
    }

    #[test]
    fn stays_within_the_sandbox_s_budget_and_takes_it_from_ended_commands_first() {
        let kept = Kept::new(8 << 20);
        let rings: Vec<_> = (0..8).map(|_| Rc::new(RefCell::new(Ring::new(kept.clone())))).collect();
        for ring in &rings {
            put(&mut ring.borrow_mut(), Channel::Out, Hold::From(0), &vec![1; 512 << 10]);
            kept.ended(ring);
            assert!(kept.used() <= 1 << 20, "{}", kept.used());
        }
        assert_eq!(rings[0].borrow().kept_from(), rings[0].borrow().next(), "the oldest was given up");
        assert!(rings[7].borrow().piece(0).is_some());
        // A running one keeps going within the budget, on its own oldest output.
        let mut running = Ring::new(kept.clone());
        assert_eq!(put(&mut running, Channel::Out, Hold::Nothing, &vec![1; 4 << 20]), 4 << 20);
        assert!(kept.used() <= (1 << 20) + (64 << 10), "{}", kept.used());
        // And a second one, though everything is used up, still gets its first chunk and goes on in it.
        let mut late = Ring::new(kept.clone());
        assert_eq!(put(&mut late, Channel::Out, Hold::Nothing, &vec![1; 64 << 10]), 64 << 10);
        assert!(kept.used() <= (1 << 20) + (128 << 10), "{}", kept.used());
        drop((rings, running, late));
        assert_eq!(kept.used(), 0);
    }

    #[test]
    fn alternating_bytes_cost_bounded_memory() {
        let kept = Kept::new(1 << 30);
        let mut ring = Ring::new(kept.clone());
        for round in 0..1_000_000 {
            let channel = if round % 2 == 0 { Channel::Err } else { Channel::Out };
            assert_eq!(put(&mut ring, channel, Hold::Nothing, b"x"), 1);
        }
        assert!(kept.used() < 4 << 20, "{}", kept.used());
        all(&ring, ring.kept_from());
    }
}
