//! What the kernel is answered in the guest: two kinds of requests on which nothing depends that only the host knows.
//! Each would cost whoever closes a file a round trip, or the guest the way of an answer that nobody waits for.

use std::collections::HashSet;

use crate::fuse::{REQUEST_HEAD, node, op, operation, word};

/// Nodes of which it is remembered that locks were asked for.
const LOCKED: usize = 4096;

/// By whom a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The host.
    Host,
    /// Us, and the host is told, by a number that no request has: it answers nobody.
    Both,
    /// Us; the host need not know.
    Us,
}

/// What must be known to tell.
#[derive(Debug, Default)]
pub struct Here {
    /// Nodes of which a process here has ever asked for a range's lock.
    locked: HashSet<u64>,
}

impl Here {
    /// By whom this is answered.
    pub fn by(&mut self, request: &[u8]) -> By {
        // Behind handle, owner, start, end, type and process: flags, of which the first one is `flock`'s.
        const FLAGS: usize = REQUEST_HEAD + 40;
        match operation(request) {
            op::SETLK | op::SETLKW if word(request, FLAGS) & 1 == 0 => {
                // More are not told apart: each is the host's then.
                if self.locked.len() <= LOCKED {
                    self.locked.insert(node(request));
                }
                By::Host
            }
            // A close gives back its process' locks of ranges, and does nothing else: a write is done when it returns.
            op::FLUSH if self.locked.len() <= LOCKED && !self.locked.contains(&node(request)) => By::Us,
            // The kernel waits for no answer to it; it gives the file's handle back.
            op::RELEASE | op::RELEASEDIR => By::Both,
            _ => By::Host,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(operation: u32, node: u64, flags: u32) -> Vec<u8> {
        let mut bytes = [88, operation].map(u32::to_le_bytes).concat();
        bytes.extend([7, node, 0, 0].map(u64::to_le_bytes).concat());
        bytes.resize(REQUEST_HEAD + 40, 0);
        bytes.extend([flags, 0].map(u32::to_le_bytes).concat());
        bytes
    }

    #[test]
    fn a_close_is_the_hosts_where_a_range_was_ever_locked() {
        let mut here = Here::default();
        assert_eq!(here.by(&request(op::FLUSH, 5, 0)), By::Us);
        assert_eq!(here.by(&request(op::SETLK, 5, 1)), By::Host);
        assert_eq!(here.by(&request(op::FLUSH, 5, 0)), By::Us, "flock is given back otherwise");
        for (lock, node) in [(op::SETLK, 5), (op::SETLKW, 6)] {
            assert_eq!(here.by(&request(lock, node, 0)), By::Host);
            for _ in 0..2 {
                assert_eq!(here.by(&request(op::FLUSH, node, 0)), By::Host);
            }
        }
        assert_eq!(here.by(&request(op::FLUSH, 7, 0)), By::Us);
    }

    #[test]
    fn what_cannot_be_remembered_any_more_is_the_hosts() {
        let mut here = Here::default();
        for node in 10..2 * LOCKED as u64 {
            here.by(&request(op::SETLK, node, 0));
        }
        assert!(here.locked.len() <= LOCKED + 1);
        assert_eq!(here.by(&request(op::FLUSH, 5, 0)), By::Host);
    }

    #[test]
    fn nothing_else_is_answered_here() {
        let mut here = Here::default();
        for operation in 0..60 {
            let by = here.by(&request(operation, 5, 1));
            match operation {
                op::FLUSH => assert_eq!(by, By::Us),
                op::RELEASE | op::RELEASEDIR => assert_eq!(by, By::Both),
                _ => assert_eq!(by, By::Host, "{operation}"),
            }
        }
        assert_eq!(here.by(&[0; REQUEST_HEAD]), By::Host);
    }
}
