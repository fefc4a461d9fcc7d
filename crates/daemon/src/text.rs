//! Output of programs as JSON: head and tail of each channel, text where it is UTF-8.
//!
//! Pure and bounded: a [`Gathered`] holds at most its limit per channel whatever is put in. Called by the JSON and the
//! event form of commands.

use std::collections::VecDeque;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pepo_api::Text;

/// Bytes as [`Text`].
pub fn text(bytes: &[u8]) -> Text {
    match std::str::from_utf8(bytes) {
        Ok(text) => Text::Utf8(text.to_owned()),
        Err(_) => Text::Binary { base64: STANDARD.encode(bytes) },
    }
}

/// How many bytes at the end begin a character whose rest has not come: 0..=3.
pub fn split_tail(bytes: &[u8]) -> usize {
    // Looking at the last three suffices: no longer beginning of a character is incomplete.
    for back in 1..=bytes.len().min(3) {
        let byte = bytes[bytes.len() - back];
        let whole = match byte {
            0xC2..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xF4 => 4,
            0x80..=0xBF => continue,
            _ => return 0,
        };
        return if back < whole { back } else { 0 };
    }
    0
}

/// How many bytes at the start continue a character whose beginning is not there: 0..=3.
fn torn_head(bytes: &[u8]) -> usize {
    bytes.iter().take(3).take_while(|byte| matches!(byte, 0x80..=0xBF)).count()
}

/// One channel: its first bytes and its last.
#[derive(Debug)]
struct Ends {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    head_limit: usize,
    tail_limit: usize,
    dropped: u64,
}

impl Ends {
    fn new(limit: usize) -> Self {
        let tail_limit = limit / 2;
        Ends { head: Vec::new(), tail: VecDeque::new(), head_limit: limit - tail_limit, tail_limit, dropped: 0 }
    }

    fn put(&mut self, mut bytes: &[u8]) {
        if self.dropped == 0 && self.tail.is_empty() {
            let room = (self.head_limit - self.head.len()).min(bytes.len());
            self.head.extend_from_slice(&bytes[..room]);
            bytes = &bytes[room..];
        }
        if bytes.len() > self.tail_limit {
            self.dropped += (self.tail.len() + bytes.len() - self.tail_limit) as u64;
            self.tail.clear();
            bytes = &bytes[bytes.len() - self.tail_limit..];
        }
        let over = (self.tail.len() + bytes.len()).saturating_sub(self.tail_limit);
        self.dropped += over.min(self.tail.len()) as u64;
        self.tail.drain(..over.min(self.tail.len()));
        self.tail.extend(bytes);
    }

    /// Takes back the last bytes, which another look will bring whole.
    fn take_back(&mut self, count: usize) {
        let from_tail = count.min(self.tail.len());
        self.tail.truncate(self.tail.len() - from_tail);
        self.head.truncate(self.head.len() - (count - from_tail));
    }

    /// The last bytes, up to three: all that telling a split character needs.
    fn last(&self) -> Vec<u8> {
        let all = self.head.iter().chain(&self.tail);
        all.skip((self.head.len() + self.tail.len()).saturating_sub(3)).copied().collect()
    }

    /// Both ends in one, and how many bytes lie between them. Where something is missing the cut is made between
    /// characters, so that a text stays a text.
    fn join(mut self) -> (Vec<u8>, u64) {
        if self.dropped > 0 {
            let torn = split_tail(&self.head);
            self.head.truncate(self.head.len() - torn);
            let tail = self.tail.make_contiguous();
            let orphans = torn_head(tail);
            self.tail.drain(..orphans);
            self.dropped += (torn + orphans) as u64;
        }
        self.head.extend(self.tail);
        (self.head, self.dropped)
    }
}

/// Both channels of one look at a command.
#[derive(Debug)]
pub struct Gathered {
    out: Ends,
    err: Ends,
    /// Bytes that the guest no longer keeps.
    gone: u64,
    next: u64,
    last: Option<Side>,
}

/// Which output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// What a look found.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    /// Standard output.
    pub stdout: Text,
    /// Standard error.
    pub stderr: Text,
    /// Bytes missing of both.
    pub missing: u64,
    /// Where the next look goes on.
    pub next: u64,
}

impl Gathered {
    /// An empty one that begins at `offset` and keeps at most `limit` bytes of each channel.
    pub fn new(offset: u64, limit: usize) -> Self {
        Gathered { out: Ends::new(limit), err: Ends::new(limit), gone: 0, next: offset, last: None }
    }

    /// Output that came.
    pub fn put(&mut self, side: Side, bytes: &[u8]) {
        self.next += bytes.len() as u64;
        self.last = Some(side);
        match side {
            Side::Out => self.out.put(bytes),
            Side::Err => self.err.put(bytes),
        }
    }

    /// Output that is gone.
    pub fn gap(&mut self, from: u64, to: u64) {
        self.gone += to.saturating_sub(from);
        self.next = to.max(self.next);
        self.last = None;
    }

    /// Where the next look goes on if nothing is held back.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// What was found of a command that has ended.
    pub fn whole(self) -> Found {
        let (stdout, out_missing) = self.out.join();
        let (stderr, err_missing) = self.err.join();
        Found {
            stdout: text(&stdout),
            stderr: text(&stderr),
            missing: self.gone + out_missing + err_missing,
            next: self.next,
        }
    }

    /// What was found of a command that runs on: a character whose rest has not come is left to the next look.
    pub fn so_far(mut self) -> Found {
        let ends = match self.last {
            Some(Side::Out) => &mut self.out,
            Some(Side::Err) => &mut self.err,
            None => return self.whole(),
        };
        let torn = split_tail(&ends.last());
        ends.take_back(torn);
        self.next -= torn as u64;
        self.whole()
    }
}

/// Turns one channel's pieces into texts for the event form: a character that is split between pieces comes whole.
#[derive(Debug, Default)]
pub struct Joiner {
    held: Vec<u8>,
}

impl Joiner {
    /// The next piece, and how many bytes before it were held and come now.
    pub fn piece(&mut self, bytes: &[u8]) -> Option<(usize, Vec<u8>)> {
        let before = self.held.len();
        let mut whole = std::mem::take(&mut self.held);
        whole.extend_from_slice(bytes);
        let torn = split_tail(&whole);
        self.held = whole.split_off(whole.len() - torn);
        (!whole.is_empty()).then_some((before, whole))
    }

    /// What is held, when nothing more follows or the other channel speaks.
    pub fn rest(&mut self) -> Option<Vec<u8>> {
        (!self.held.is_empty()).then(|| std::mem::take(&mut self.held))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(text: &Text) -> Vec<u8> {
        match text {
            Text::Utf8(text) => text.clone().into_bytes(),
            Text::Binary { base64 } => STANDARD.decode(base64).expect("base64"),
        }
    }

    proptest! {
        #[test]
        fn nothing_is_lost_below_the_limit(pieces in proptest::collection::vec((any::<bool>(), proptest::collection::vec(any::<u8>(), 1..40)), 0..20)) {
            let mut gathered = Gathered::new(0, 4096);
            let (mut out, mut err) = (Vec::new(), Vec::new());
            for (is_out, bytes) in &pieces {
                gathered.put(if *is_out { Side::Out } else { Side::Err }, bytes);
                if *is_out { &mut out } else { &mut err }.extend_from_slice(bytes);
            }
            let found = gathered.whole();
            prop_assert_eq!(bytes_of(&found.stdout), out.clone());
            prop_assert_eq!(bytes_of(&found.stderr), err.clone());
            prop_assert_eq!(found.missing, 0);
            prop_assert_eq!(found.next as usize, out.len() + err.len());
        }

        #[test]
        fn head_and_tail_are_kept_and_the_rest_is_counted(size in 0usize..3000, limit in 0usize..500, step in 1usize..200) {
            let all: Vec<u8> = (0..size).map(|n| b'a' + (n % 26) as u8).collect();
            let mut gathered = Gathered::new(0, limit);
            for piece in all.chunks(step) {
                gathered.put(Side::Out, piece);
            }
            let found = gathered.whole();
            let kept = bytes_of(&found.stdout);
            prop_assert!(kept.len() <= limit);
            prop_assert_eq!(kept.len() as u64 + found.missing, size as u64);
            let tail = if size > limit { limit / 2 } else { 0 };
            let head = kept.len() - tail;
            prop_assert_eq!(&kept[..head], &all[..head]);
            prop_assert_eq!(&kept[head..], &all[size - tail..]);
        }

        #[test]
        fn a_text_stays_a_text_wherever_it_is_cut(words in "[aäß€𝄞]{0,300}", limit in 8usize..64, step in 1usize..9) {
            let mut gathered = Gathered::new(0, limit);
            for piece in words.as_bytes().chunks(step) {
                gathered.put(Side::Out, piece);
            }
            let found = gathered.whole();
            prop_assert!(matches!(found.stdout, Text::Utf8(_)));
            prop_assert_eq!(bytes_of(&found.stdout).len() as u64 + found.missing, words.len() as u64);
        }

        #[test]
        fn looks_that_follow_each_other_bring_every_character_whole(words in "[aß€𝄞]{1,40}", step in 1usize..7) {
            let all = words.as_bytes();
            let (mut at, mut seen) = (0usize, String::new());
            let mut end = step;
            while at < all.len() {
                let mut gathered = Gathered::new(at as u64, 1024);
                gathered.put(Side::Out, &all[at..end.min(all.len())]);
                let found = gathered.so_far();
                match found.stdout {
                    Text::Utf8(text) => seen.push_str(&text),
                    Text::Binary { .. } => prop_assert!(false, "split"),
                }
                at = found.next as usize;
                end = end.max(at) + step;
            }
            prop_assert_eq!(seen, words);
        }

        #[test]
        fn joined_pieces_are_the_same_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200), step in 1usize..9) {
            let (mut joiner, mut seen) = (Joiner::default(), Vec::new());
            for piece in bytes.chunks(step) {
                if let Some((_, whole)) = joiner.piece(piece) {
                    seen.extend(whole);
                }
            }
            seen.extend(joiner.rest().unwrap_or_default());
            prop_assert_eq!(seen, bytes);
        }
    }

    #[test]
    fn what_is_no_text_says_so() {
        assert_eq!(text(b"ok"), Text::Utf8("ok".into()));
        assert!(matches!(text(&[0xff]), Text::Binary { .. }));
        assert_eq!(split_tail("a€".as_bytes().split_at(3).0), 2);
        assert_eq!(split_tail(&[0xff, 0x80]), 0);
    }
}
