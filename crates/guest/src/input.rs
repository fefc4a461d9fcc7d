//! A command's input: from any number of streams, by offset, to one program.
//!
//! What was sent twice counts once, and no more is taken than the program reads. Called by `attach` (offers) and by the
//! tasks of `exec` and `shell` (feed).

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

/// Unwritten input that a command may have; more is left in the stream.
const MAX_INPUT: usize = 64 << 10;

/// A command's input: what the host has sent and the program has not read.
pub struct Input {
    next: Cell<u64>,
    open: Cell<bool>,
    finishing: Cell<bool>,
    buffer: RefCell<BytesMut>,
    more: Notify,
    /// Told when there is room for more, or nothing more is taken.
    pub room: Notify,
}

/// What became of input that was offered.
#[derive(Debug, PartialEq, Eq)]
pub enum Offer {
    /// It was taken, or it was a resend, or nobody wants it any more.
    Taken,
    /// It leaves a hole.
    Hole,
}

impl Input {
    /// Nothing sent yet; `open` where input is taken at all.
    pub fn new(open: bool) -> Self {
        Input {
            next: Cell::new(0),
            open: Cell::new(open),
            finishing: Cell::new(false),
            buffer: RefCell::default(),
            more: Notify::new(),
            room: Notify::new(),
        }
    }

    /// The next offset wanted, and whether more is taken.
    pub fn position(&self) -> (u64, bool) {
        (self.next.get(), self.open.get() && !self.finishing.get())
    }

    /// Whether it takes bytes now.
    pub fn has_room(&self) -> bool {
        !self.open.get() || self.buffer.borrow().len() < MAX_INPUT
    }

    /// Takes bytes that start at `offset`.
    pub fn offer(&self, offset: u64, mut bytes: Bytes) -> Offer {
        let next = self.next.get();
        // What was under way when the program stopped taking any is nobody's, wherever it begins.
        if !self.open.get() {
            return Offer::Taken;
        }
        if offset > next {
            return Offer::Hole;
        }
        let end = offset.saturating_add(bytes.len() as u64);
        if end > next && self.open.get() && !self.finishing.get() {
            bytes.advance((next - offset) as usize);
            self.buffer.borrow_mut().extend_from_slice(&bytes);
            self.next.set(end);
            self.more.notify_one();
        }
        Offer::Taken
    }

    /// Nothing follows after `offset`.
    pub fn end(&self, offset: u64) -> Offer {
        if self.open.get() && offset > self.next.get() {
            return Offer::Hole;
        }
        self.finishing.set(true);
        self.more.notify_one();
        Offer::Taken
    }

    /// Takes no more, and drops what is left.
    pub fn close(&self) {
        self.open.set(false);
        *self.buffer.borrow_mut() = BytesMut::new();
        self.room.notify_waiters();
        self.more.notify_one();
    }

    /// Writes input to the program until there is no more, the program takes no more, or it has ended.
    pub async fn feed(&self, sink: AsyncFd<Arc<OwnedFd>>, terminal: bool) {
        loop {
            let empty = self.buffer.borrow().is_empty();
            if !self.open.get() {
                return;
            }
            if empty {
                if self.finishing.get() {
                    if terminal {
                        end_of_file(&sink).await;
                    }
                    self.close();
                    return;
                }
                self.more.notified().await;
                continue;
            }
            let Ok(mut ready) = sink.writable().await else {
                return self.close();
            };
            let wrote = ready.try_io(|sink| Ok(rustix::io::write(sink.get_ref(), &self.buffer.borrow())?));
            match wrote {
                Ok(Ok(bytes)) => {
                    let mut buffer = self.buffer.borrow_mut();
                    // Closed meanwhile: nothing is left to take off.
                    let bytes = bytes.min(buffer.len());
                    buffer.advance(bytes);
                    drop(buffer);
                    self.room.notify_waiters();
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(_program_takes_no_more)) => return self.close(),
                Err(_would_block) => {}
            }
        }
    }
}

/// Types the end-of-file character, where the terminal is in a mode that knows one.
async fn end_of_file(sink: &AsyncFd<Arc<OwnedFd>>) {
    use rustix::termios::{LocalModes, SpecialCodeIndex, tcgetattr};
    let Ok(attributes) = tcgetattr(sink.get_ref()) else {
        return;
    };
    if attributes.local_modes.contains(LocalModes::ICANON) {
        let byte = [attributes.special_codes[SpecialCodeIndex::VEOF]];
        if let Ok(mut ready) = sink.writable().await {
            // A terminal too full to take it has a program that does not read: nothing to end.
            let _ = ready.try_io(|sink| Ok(rustix::io::write(sink.get_ref(), &byte)?));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_is_refused_only_while_somebody_takes_input() {
        let input = Input::new(true);
        assert_eq!(input.offer(0, Bytes::from_static(b"abc")), Offer::Taken);
        assert_eq!(input.offer(7, Bytes::from_static(b"h")), Offer::Hole);
        assert_eq!(input.position(), (3, true));
        input.close();
        // Two pieces were under way when the program ended: neither is a fault of the sender's.
        assert_eq!(input.offer(3, Bytes::from_static(b"def")), Offer::Taken);
        assert_eq!(input.offer(6, Bytes::from_static(b"ghi")), Offer::Taken);
        assert_eq!(input.end(9), Offer::Taken);
        assert_eq!(input.position(), (3, false));
    }
}
