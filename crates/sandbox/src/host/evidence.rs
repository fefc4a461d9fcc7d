//! What a Sandbox leaves behind to tell how it ended. Written by its keeper, which a guest may have taken over in the worst
//! case: read by pepod alone, bounded, and never decided by beyond naming a cause.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;

use crate::keeper::{Console, ExitRecord};

/// The longest `exit.json`.
const EXIT_BYTES: u64 = 64 * 1024;

/// A Sandbox's end, as far as it is written.
#[derive(Debug, Default)]
pub struct Evidence {
    /// What the keeper wrote last; `None`: it was ended from outside, or still runs.
    pub exit: Option<ExitRecord>,
    /// The console's last bytes.
    pub console: Console,
    /// The console's ring itself, for looking again.
    pub(crate) file: Option<File>,
}

impl Evidence {
    pub(crate) fn new(exit: Option<OwnedFd>, console: Option<OwnedFd>) -> Self {
        let exit = exit.and_then(|fd| {
            let mut text = Vec::new();
            File::from(fd).take(EXIT_BYTES).read_to_end(&mut text).ok()?;
            serde_json::from_slice(&text).ok()
        });
        let file = console.map(File::from);
        let console = file.as_ref().and_then(|file| Console::read(file).ok()).unwrap_or_default();
        Evidence { exit, console, file }
    }
}
