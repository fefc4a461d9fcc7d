//! The caller's terminal: raw while a command has it, as it was on every way out.
//!
//! The settings to go back to are kept in one static, so that a panic in any thread, a signal (which the program turns into
//! an orderly end) and the normal end restore the same.

use std::io::IsTerminal;
use std::sync::Mutex;

use pepo_api::PtySize;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// While it lives the terminal is raw.
pub struct Raw(());

impl Raw {
    /// Makes the terminal on standard input raw.
    pub fn enter() -> std::io::Result<Raw> {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        {
            let mut kept = BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            kept.get_or_insert(before);
        }
        tcsetattr(&stdin, OptionalActions::Drain, &raw)?;
        Ok(Raw(()))
    }

    /// Again, after the program was stopped and continued.
    pub fn again(&self) {
        let stdin = std::io::stdin();
        if let Ok(mut now) = tcgetattr(&stdin) {
            now.make_raw();
            let _ = tcsetattr(&stdin, OptionalActions::Drain, &now);
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts the terminal back, if it was changed.
pub fn restore() {
    let before = BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
    if let Some(before) = before {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &before);
    }
}

/// A panic's message must not be printed into a raw terminal.
pub fn restore_on_panic() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        restore();
        usual(panic);
    }));
}

/// The window's size; 80 by 24 where the terminal does not know.
pub fn size() -> PtySize {
    let found = [tcgetwinsize(std::io::stdout()), tcgetwinsize(std::io::stdin()), tcgetwinsize(std::io::stderr())]
        .into_iter()
        .flatten()
        .find(|size| size.ws_col > 0 && size.ws_row > 0);
    found.map_or(PtySize { cols: 80, rows: 24 }, |size| PtySize {
        cols: size.ws_col.clamp(1, 1000),
        rows: size.ws_row.clamp(1, 1000),
    })
}

/// Whether a person could type.
pub fn interactive() -> bool {
    std::io::stdin().is_terminal()
}
