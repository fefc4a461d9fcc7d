//! Output that outlives its Sandbox: for ten minutes after a command's end, at most a head and a tail of it, all of them
//! together within a budget.
//!
//! Owns copies: nothing here holds on to a buffer of a stream.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pepo_api::{CommandId, SessionId};

use crate::text::Side;

/// Of each command: so much from its beginning, and as much from its end.
const END: usize = 1 << 20;

/// Of all commands together. What is over it goes oldest first.
const BUDGET: usize = 128 << 20;

/// How long it stays.
const STAY: Duration = Duration::from_secs(600);

/// What a piece costs beyond its bytes.
const PIECE: usize = 64;

/// Some bytes that a command wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where.
    pub side: Side,
    /// Bytes before these, over both outputs.
    pub offset: u64,
    /// The bytes.
    pub bytes: Bytes,
}

impl Piece {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

/// A command's head and tail, in order.
#[derive(Debug, Default)]
pub struct Output {
    head: Vec<Piece>,
    head_bytes: usize,
    tail: VecDeque<Piece>,
    tail_bytes: usize,
    /// The next offset.
    next: u64,
}

impl Output {
    /// Takes a copy of what came, and lets go of what is too much.
    pub fn put(&mut self, side: Side, offset: u64, bytes: &[u8]) {
        self.next = offset + bytes.len() as u64;
        let mut copy = Bytes::copy_from_slice(bytes);
        let mut offset = offset;
        if self.head_bytes < END && self.tail.is_empty() {
            let part = copy.split_to(copy.len().min(END - self.head_bytes));
            self.head_bytes += part.len();
            let length = part.len() as u64;
            self.head.push(Piece { side, offset, bytes: part });
            offset += length;
        }
        if copy.is_empty() {
            return;
        }
        self.tail_bytes += copy.len();
        self.tail.push_back(Piece { side, offset, bytes: copy });
        while self.tail_bytes > END {
            let over = self.tail_bytes - END;
            match self.tail.front_mut() {
                Some(first) if first.bytes.len() > over => {
                    first.bytes = Bytes::copy_from_slice(&first.bytes[over..]);
                    first.offset += over as u64;
                    self.tail_bytes -= over;
                }
                Some(first) => {
                    self.tail_bytes -= first.bytes.len();
                    self.tail.pop_front();
                }
                None => break,
            }
        }
    }

    /// Bytes up to this offset are gone.
    pub fn gap(&mut self, to: u64) {
        self.next = self.next.max(to);
    }

    /// The next offset.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The `n`th piece.
    pub fn piece(&self, n: usize) -> Option<&Piece> {
        self.head.get(n).or_else(|| self.tail.get(n - self.head.len().min(n)))
    }

    /// The first piece that has bytes at or after this offset.
    pub fn first_at(&self, offset: u64) -> usize {
        self.head
            .iter()
            .chain(&self.tail)
            .position(|piece| piece.end() > offset)
            .unwrap_or(self.head.len() + self.tail.len())
    }

    fn cost(&self) -> usize {
        self.head_bytes + self.tail_bytes + PIECE * (1 + self.head.len() + self.tail.len())
    }
}

#[derive(Debug, Default)]
struct Inner {
    outputs: HashMap<(SessionId, CommandId), (Arc<Output>, Instant)>,
    order: VecDeque<((SessionId, CommandId), Instant)>,
    bytes: usize,
}

/// The outputs of all commands whose Sandbox has gone.
#[derive(Clone, Debug, Default)]
pub struct Shelf(Arc<Mutex<Inner>>);

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps that output for the rest of its time.
    pub fn put(&self, session: SessionId, command: CommandId, output: Output) {
        let (key, now) = ((session, command), Instant::now());
        let mut inner = self.lock();
        inner.bytes += output.cost();
        if let Some((before, _)) = inner.outputs.insert(key, (Arc::new(output), now)) {
            inner.bytes -= before.cost();
        }
        inner.order.push_back((key, now));
        while inner.bytes > BUDGET && inner.drop_oldest() {}
    }

    /// That output, if it is still kept.
    pub fn get(&self, session: SessionId, command: CommandId) -> Option<Arc<Output>> {
        let inner = self.lock();
        let (output, since) = inner.outputs.get(&(session, command))?;
        (since.elapsed() < STAY).then(|| output.clone())
    }

    /// Lets go of what has stayed its time.
    pub fn tidy(&self) {
        let mut inner = self.lock();
        while inner.order.front().is_some_and(|(_, since)| since.elapsed() >= STAY) && inner.drop_oldest() {}
    }
}

impl Inner {
    fn drop_oldest(&mut self) -> bool {
        let Some((key, at)) = self.order.pop_front() else { return false };
        // It may have been replaced by a younger one since.
        if self.outputs.get(&key).is_some_and(|(_, since)| *since == at)
            && let Some((output, _)) = self.outputs.remove(&key)
        {
            self.bytes -= output.cost();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(output: &Output, from: u64) -> Vec<(u64, usize)> {
        (output.first_at(from)..)
            .map_while(|n| output.piece(n))
            .map(|piece| (piece.offset, piece.bytes.len()))
            .collect()
    }

    #[test]
    fn head_and_tail_stay_and_the_middle_goes() {
        let mut output = Output::default();
        let block = vec![b'x'; 700_000];
        for n in 0..10u64 {
            output.put(Side::Out, n * 700_000, &block);
        }
        let kept = all(&output, 0);
        assert_eq!(kept[..2], [(0, 700_000), (700_000, END - 700_000)]);
        let (first_of_tail, _) = kept[2];
        assert_eq!(first_of_tail, 7_000_000 - END as u64);
        assert_eq!(kept.iter().map(|(_, length)| length).sum::<usize>(), 2 * END);
        assert_eq!(output.next(), 7_000_000);
        assert_eq!(all(&output, 6_900_000).len(), 1);
        assert!(all(&output, 7_000_000).is_empty());
    }

    #[test]
    fn the_shelf_has_a_budget_and_lets_the_oldest_go() {
        let shelf = Shelf::default();
        let session = SessionId::generate();
        let commands: Vec<_> = (0..100).map(|_| CommandId::generate()).collect();
        let block = vec![b'x'; 2 * END];
        for command in &commands {
            let mut output = Output::default();
            output.put(Side::Out, 0, &block);
            shelf.put(session, *command, output);
        }
        assert!(shelf.lock().bytes <= BUDGET);
        assert!(shelf.get(session, commands[0]).is_none());
        assert!(shelf.get(session, commands[99]).is_some());
        assert!(shelf.get(SessionId::generate(), commands[99]).is_none());
    }
}
