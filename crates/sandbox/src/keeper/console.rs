//! The console ring: a file of fixed size with the last bytes a guest's console printed.
//!
//! ```text
//! 0..8   how many bytes were ever written, little endian
//! 8..16  how many were dropped by the rate limit
//! 16..   the ring; byte n of the console is at n % size
//! ```
//! The keeper writes it, a bound on everything a guest prints; pepod reads it at any time. A read that meets a write may
//! see a few newer bytes in place of the oldest.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of console kept.
pub const RING: usize = 256 * 1024;

const HEAD: usize = 16;

/// Bytes a second taken on average; a kernel that boots verbosely prints about 40 KiB in its first second.
const RATE: f64 = 256.0 * 1024.0;

/// Bytes taken at once after a quiet time.
const BURST: f64 = 1024.0 * 1024.0;

/// A console as it was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Console {
    /// Its last bytes, at most [`RING`], as the guest wrote them: escape before showing.
    pub bytes: Vec<u8>,
    /// How many bytes were written before these.
    pub before: u64,
    /// How many were dropped because they came too fast.
    pub dropped: u64,
}

impl Console {
    /// Reads a ring file. What is in it was made by a process that guests may have taken over: any content is a console.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(file: &File) -> io::Result<Self> {
        let mut head = [0; HEAD];
        let mut ring = vec![0; RING];
        if read_at(file, &mut head, 0)? < HEAD {
            return Ok(Console::default());
        }
        let have = read_at(file, &mut ring, HEAD as u64)?;
        ring.truncate(have);
        let (written, dropped) = head.split_at(8);
        let written = u64::from_le_bytes(written.try_into().unwrap_or_default());
        let dropped = u64::from_le_bytes(dropped.try_into().unwrap_or_default());
        let bytes = if written <= RING as u64 {
            ring.truncate(written as usize);
            ring
        } else {
            let start = ((written % RING as u64) as usize).min(ring.len());
            ring.rotate_left(start);
            ring
        };
        Ok(Console { before: written - (bytes.len() as u64).min(written), bytes, dropped })
    }

    /// How many bytes were ever written to a ring file: cheap to ask again and again.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn written(file: &File) -> io::Result<u64> {
        let mut head = [0; 8];
        read_at(file, &mut head, 0)?;
        Ok(u64::from_le_bytes(head))
    }

    /// Whether a line of it begins so.
    pub fn has_line(&self, begin: &str) -> bool {
        self.bytes.split(|byte| matches!(byte, b'\r' | b'\n')).any(|line| line.starts_with(begin.as_bytes()))
    }

    /// Its last lines as text that is safe on a terminal, oldest first.
    pub fn last_lines(&self, most: usize) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.bytes);
        let mut lines: Vec<String> = text
            .lines()
            .rev()
            .filter(|line| !line.trim().is_empty())
            .take(most)
            .map(|line| escape(line, 400))
            .collect();
        lines.reverse();
        lines
    }
}

/// Text of a guest made safe for a terminal or a log line: control and direction-changing characters are written out, and
/// it ends after `most` characters.
pub fn escape(text: &str, most: usize) -> String {
    let mut safe = String::with_capacity(text.len().min(most));
    for (count, letter) in text.chars().enumerate() {
        if count == most {
            safe.push('…');
            break;
        }
        match letter {
            '\t' => safe.push(' '),
            '\r' => {}
            '\u{200b}'..='\u{200f}'
            | '\u{202a}'..='\u{202e}'
            | '\u{2060}'..='\u{2069}'
            | '\u{feff}'
            | '\u{2028}'
            | '\u{2029}' => {
                safe.extend(letter.escape_unicode());
            }
            _ if letter.is_control() => safe.extend(letter.escape_unicode()),
            _ => safe.push(letter),
        }
    }
    safe
}

fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut have = 0;
    while have < buffer.len() {
        match file.read_at(&mut buffer[have..], offset + have as u64) {
            Ok(0) => break,
            Ok(n) => have += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(have)
}

/// The writing side.
#[derive(Debug)]
pub struct Ring {
    file: File,
    written: u64,
    dropped: u64,
    allowance: f64,
    last: std::time::Instant,
}

impl Ring {
    /// Starts an empty ring in that file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(file: File, now: std::time::Instant) -> io::Result<Self> {
        file.set_len((HEAD + RING) as u64)?;
        Ok(Ring { file, written: 0, dropped: 0, allowance: BURST, last: now })
    }

    /// Takes bytes of the console, or drops them when they come too fast.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn take(&mut self, bytes: &[u8], now: std::time::Instant) -> io::Result<()> {
        self.allowance = (self.allowance + now.duration_since(self.last).as_secs_f64() * RATE).min(BURST);
        self.last = now;
        let taken = bytes.len().min(self.allowance as usize);
        self.allowance -= taken as f64;
        self.dropped += (bytes.len() - taken) as u64;
        let mut rest = &bytes[..taken];
        while !rest.is_empty() {
            let at = (self.written % RING as u64) as usize;
            let part = rest.len().min(RING - at);
            self.file.write_all_at(&rest[..part], (HEAD + at) as u64)?;
            self.written += part as u64;
            rest = &rest[part..];
        }
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&self.written.to_le_bytes());
        head[8..].copy_from_slice(&self.dropped.to_le_bytes());
        self.file.write_all_at(&head, 0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    fn ring() -> (Ring, File, Instant) {
        let file = tempfile::tempfile().expect("file");
        let now = Instant::now();
        (Ring::new(file.try_clone().expect("clone"), now).expect("ring"), file, now)
    }

    proptest! {
        #[test]
        fn a_ring_keeps_the_last_bytes(pieces in proptest::collection::vec(0usize..90_000, 0..12)) {
            let (mut ring, file, mut now) = ring();
            let mut all = Vec::new();
            for (n, size) in pieces.into_iter().enumerate() {
                let piece: Vec<u8> = (0..size).map(|i| (i * 7 + n) as u8).collect();
                now += Duration::from_secs(10);
                ring.take(&piece, now).expect("take");
                all.extend(piece);
            }
            let console = Console::read(&file).expect("read");
            let kept = all.len().min(RING);
            prop_assert_eq!(&console.bytes[..], &all[all.len() - kept..]);
            prop_assert_eq!(console.before as usize, all.len() - kept);
            prop_assert_eq!(console.dropped, 0);
        }

        #[test]
        fn any_file_is_a_console(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let file = tempfile::tempfile().expect("file");
            file.write_all_at(&bytes, 0).expect("write");
            let console = Console::read(&file).expect("read");
            prop_assert!(console.bytes.len() <= RING);
            let _ = console.last_lines(5);
        }
    }

    #[test]
    fn a_flood_is_dropped_and_counted_and_the_file_does_not_grow() {
        let (mut ring, file, now) = ring();
        let flood = vec![b'x'; 1024 * 1024];
        for _ in 0..8 {
            ring.take(&flood, now).expect("take");
        }
        let console = Console::read(&file).expect("read");
        assert_eq!(console.dropped, 7 * 1024 * 1024);
        assert_eq!(file.metadata().expect("stat").len(), (HEAD + RING) as u64);
    }

    #[test]
    fn nothing_reaches_a_terminal_unescaped() {
        let console = Console { bytes: "ok\n\n\u{1b}]0;evil\u{7}\u{202e}x\u{9b}31m\n".into(), ..Console::default() };
        let lines = console.last_lines(5);
        assert_eq!(lines.len(), 2);
        assert!(lines[1].chars().all(|c| !c.is_control() && c != '\u{202e}'), "{lines:?}");
        assert_eq!(escape(&"y".repeat(500), 400).chars().count(), 401);
    }
}
