//! Making text from elsewhere harmless before a terminal shows it: a guest or a server may put anything into names,
//! errors and consoles. Only the payload of a command (its own output) passes untouched, and not through here.

use std::fmt::Write;

/// Whether a character could steer a terminal, move what stands around it, or hide.
pub fn is_active(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

fn push(into: &mut String, c: char) {
    match c {
        '\n' => into.push_str("\\n"),
        '\r' => into.push_str("\\r"),
        '\t' => into.push_str("\\t"),
        c if (c as u32) < 0x100 => _ = write!(into, "\\x{:02x}", c as u32),
        c => _ = write!(into, "\\u{{{:x}}}", c as u32),
    }
}

/// One line: nothing in it moves the cursor.
pub fn line(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        if is_active(c) { push(&mut clean, c) } else { clean.push(c) }
    }
    clean
}

/// Several lines: as [`line()`], but line feeds and tabs stay.
pub fn text(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        if is_active(c) && c != '\n' && c != '\t' { push(&mut clean, c) } else { clean.push(c) }
    }
    clean
}

/// One line of bytes that may not be UTF-8, as names of files.
pub fn bytes(raw: &[u8]) -> String {
    let mut clean = String::with_capacity(raw.len());
    for chunk in raw.utf8_chunks() {
        clean.push_str(&line(chunk.valid()));
        for byte in chunk.invalid() {
            _ = write!(clean, "\\x{byte:02x}");
        }
    }
    clean
}

/// A stream of bytes whose pieces may end inside of a character, as a console's.
#[derive(Default)]
pub struct Stream {
    tail: Vec<u8>,
}

impl Stream {
    /// What can be shown of the stream with this piece; CR before LF goes, being what consoles end lines with.
    pub fn feed(&mut self, piece: &[u8]) -> String {
        self.tail.extend_from_slice(piece);
        let split = self.tail.len() - held_back(&self.tail);
        let rest = self.tail.split_off(split);
        let ready = std::mem::replace(&mut self.tail, rest);
        show(&ready)
    }

    /// What was held back.
    pub fn finish(self) -> String {
        show(&self.tail)
    }
}

/// How many bytes at the end wait for what follows: a CR, or the beginning of a character.
fn held_back(raw: &[u8]) -> usize {
    if raw.ends_with(b"\r") {
        return 1;
    }
    for (back, byte) in (1..=3).zip(raw.iter().rev()) {
        let needed = match byte {
            0x80..=0xbf => continue,
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            _ => 1,
        };
        return if needed > back { back } else { 0 };
    }
    0
}

fn show(raw: &[u8]) -> String {
    let mut clean = String::with_capacity(raw.len());
    for chunk in raw.utf8_chunks() {
        clean.push_str(&text(&chunk.valid().replace("\r\n", "\n")));
        for byte in chunk.invalid() {
            _ = write!(clean, "\\x{byte:02x}");
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_shown_as_text() {
        assert_eq!(line("plain größe 日本 👩‍💻".replace('\u{200d}', "").as_str()), "plain größe 日本 👩💻");
        assert_eq!(line("\x1b[2Jx\x07\r\n\u{9b}31m\x7f"), "\\x1b[2Jx\\x07\\r\\n\\x9b31m\\x7f");
        assert_eq!(line("a\u{202e}b\u{2066}c\u{feff}"), "a\\u{202e}b\\u{2066}c\\u{feff}");
        assert_eq!(text("a\n\tb\x1b"), "a\n\tb\\x1b");
        assert_eq!(bytes(b"a\xff\x1bz"), "a\\xff\\x1bz");
    }

    #[test]
    fn a_stream_may_be_cut_anywhere() {
        let raw = "größe\r\nx\x1b[31m\u{202e}日本\n".as_bytes();
        let raw = [b"\xff", raw, b"\xff\xc3"].concat();
        let whole = {
            let mut stream = Stream::default();
            let first = stream.feed(&raw);
            first + &stream.finish()
        };
        assert_eq!(whole, "\\xffgröße\nx\\x1b[31m\\u{202e}日本\n\\xff\\xc3");
        for at in 1..raw.len() {
            let mut stream = Stream::default();
            let mut shown = stream.feed(&raw[..at]);
            shown += &stream.feed(&raw[at..]);
            assert_eq!(shown + &stream.finish(), whole, "cut at {at}");
        }
    }
}
