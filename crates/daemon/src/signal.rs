//! Names and numbers of signals on Linux x86-64, which is what guests run.

/// Number and name, without `SIG`.
const SIGNALS: &[(i32, &str)] = &[
    (1, "HUP"),
    (2, "INT"),
    (3, "QUIT"),
    (4, "ILL"),
    (5, "TRAP"),
    (6, "ABRT"),
    (7, "BUS"),
    (8, "FPE"),
    (9, "KILL"),
    (10, "USR1"),
    (11, "SEGV"),
    (12, "USR2"),
    (13, "PIPE"),
    (14, "ALRM"),
    (15, "TERM"),
    (16, "STKFLT"),
    (17, "CHLD"),
    (18, "CONT"),
    (19, "STOP"),
    (20, "TSTP"),
    (21, "TTIN"),
    (22, "TTOU"),
    (23, "URG"),
    (24, "XCPU"),
    (25, "XFSZ"),
    (26, "VTALRM"),
    (27, "PROF"),
    (28, "WINCH"),
    (29, "IO"),
    (30, "PWR"),
    (31, "SYS"),
];

/// The first real-time signal, and how many there are.
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;

/// A signal's name with its `SIG`.
pub fn name(number: i32) -> String {
    match SIGNALS.iter().find(|(known, _)| *known == number) {
        Some((_, name)) => format!("SIG{name}"),
        None if REAL_TIME.contains(&number) => format!("SIGRTMIN+{}", number - REAL_TIME.start()),
        None => format!("signal {number}"),
    }
}

/// The signal of that name (with or without `SIG`, any case) or number.
pub fn number(text: &str) -> Option<i32> {
    if let Ok(number) = text.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let upper = text.to_ascii_uppercase();
    let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
    if let Some(offset) = bare.strip_prefix("RTMIN+") {
        return offset.parse::<i32>().ok().filter(|n| (0..=30).contains(n)).map(|n| n + REAL_TIME.start());
    }
    SIGNALS.iter().find(|(_, name)| *name == bare).map(|(number, _)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_lead_to_each_other() {
        for n in (1..=31).chain(34..=64) {
            assert_eq!(number(&name(n)), Some(n));
        }
        assert_eq!(number("int"), Some(2));
        assert_eq!(number("SIGKILL"), Some(9));
        assert_eq!(number("9"), Some(9));
        for wrong in ["", "0", "65", "-9", "SIGNOPE", "RTMIN+31"] {
            assert_eq!(number(wrong), None, "{wrong}");
        }
    }
}
