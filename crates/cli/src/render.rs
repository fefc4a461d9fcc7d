//! Showing: tables, sizes, times, JSON. Everything is escaped here, once.

use std::io::{IsTerminal, Write};

use serde::Serialize;

use crate::escape;
use crate::fail::{Failure, Outcome};

/// Writes to standard output.
pub fn out(text: &str) -> Outcome<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}

/// One line on standard output, escaped.
pub fn say(line: &str) -> Outcome<()> {
    out(&format!("{}\n", escape::line(line)))
}

/// JSON on standard output: indented for a person, in one line for a program.
pub fn json<T: Serialize>(value: &T) -> Outcome<()> {
    let text = if std::io::stdout().is_terminal() {
        serde_json::to_string_pretty(value)
    } else {
        serde_json::to_string(value)
    };
    let text = text.map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
    out(&harmless(&text))
}

/// JSON in one line, whoever reads it.
pub fn json_line<T: Serialize>(value: &T) -> Outcome<()> {
    let text = serde_json::to_string(value).map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
    out(&harmless(&text))
}

/// The same JSON without a character that steers a terminal: C0 is escaped by JSON's own rules already, what else there
/// is stands in strings and stays the same string as `\uXXXX`.
fn harmless(text: &str) -> String {
    let mut safe = String::with_capacity(text.len() + 1);
    for c in text.chars() {
        if c == '\n' || !escape::is_active(c) {
            safe.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                safe.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    safe.push('\n');
    safe
}

/// A table with its columns aligned; the last one is not padded.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let clean: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| escape::line(cell)).collect()).collect();
    let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in &clean {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut one = String::new();
        for (cell, width) in cells.zip(&widths) {
            one.push_str(cell);
            one.extend(std::iter::repeat_n(' ', width - cell.chars().count() + 3));
        }
        text.push_str(one.trim_end());
        text.push('\n');
    };
    line(&mut head.iter().copied());
    for row in &clean {
        line(&mut row.iter().map(String::as_str));
    }
    text
}

/// Names and values below each other; empty values are left out.
pub fn fields(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    pairs
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("{name:width$}   {}\n", escape::line(value)))
        .collect()
}

/// A size in bytes, for a person.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 100.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// A size in MiB as it is typed.
pub fn mebibytes(mib: u32) -> String {
    if mib >= 1024 && mib.is_multiple_of(1024) { format!("{}G", mib / 1024) } else { format!("{mib}M") }
}

/// A time to the second.
pub fn time(at: jiff::Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%S UTC").to_string()
}

/// How long ago, in the largest unit that fits.
pub fn ago(then: jiff::Timestamp, now: jiff::Timestamp) -> String {
    let seconds = (now.as_second() - then.as_second()).max(0);
    let (count, unit) = match seconds {
        0..=1 => return "now".into(),
        2..=119 => (seconds, "seconds"),
        120..=7199 => (seconds / 60, "minutes"),
        7200..=172_799 => (seconds / 3600, "hours"),
        _ => (seconds / 86_400, "days"),
    };
    format!("{count} {unit} ago")
}

/// The name of a plain enum as it stands in JSON.
pub fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        _ => String::new(),
    }
}

/// A command line as one could type it.
pub fn argv(argv: &[String]) -> String {
    let plain = |arg: &&String| !arg.is_empty() && arg.chars().all(|c| c.is_alphanumeric() || "-_./:=@%+,".contains(c));
    argv.iter()
        .map(|arg| if plain(&arg) { arg.clone() } else { format!("'{}'", arg.replace('\'', r"'\''")) })
        .collect::<Vec<_>>()
        .join(" ")
}

/// The first so many characters.
pub fn short(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_harmless() {
        let rows =
            [vec!["ses_1".into(), "größe".into(), "x\x1b[2J".into()], vec!["s".into(), String::new(), "y".into()]];
        let expected = "ID      NAME    WHAT\nses_1   größe   x\\x1b[2J\ns               y\n";
        assert_eq!(table(&["ID", "NAME", "WHAT"], &rows), expected);
    }

    #[test]
    fn sizes_and_times_are_for_people() {
        assert_eq!([0, 1023, 1024, 1536, 104_857_600].map(size), ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "100 MiB"]);
        assert_eq!([512, 1024, 1536].map(mebibytes), ["512M", "1G", "1536M"]);
        let at = |s| jiff::Timestamp::from_second(s).unwrap();
        let ages = [0, 5, 119, 120, 7200, 172_800].map(|s| ago(at(1000), at(1000 + s)));
        assert_eq!(ages, ["now", "5 seconds ago", "119 seconds ago", "2 minutes ago", "2 hours ago", "2 days ago"]);
    }

    #[test]
    fn json_stays_the_same_value_and_harmless() {
        let value = serde_json::json!({"name": "a\x1b\u{9b}\u{202e}\u{e0001}größe"});
        let text = harmless(&value.to_string());
        assert_eq!(text, "{\"name\":\"a\\u001b\\u009b\\u202e\\udb40\\udc01größe\"}\n");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn a_command_line_reads_back() {
        let args = ["sh", "-c", "echo 'a b'", ""].map(String::from);
        assert_eq!(argv(&args), r"sh -c 'echo '\''a b'\''' ''");
        assert_eq!(short("abcdef", 4), "abc…");
    }
}
