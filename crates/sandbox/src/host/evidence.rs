//! What a Sandbox leaves behind to tell how it ended, and what its guest says of its memory meanwhile. Written by its keeper, which a guest may have taken over in the worst
//! case: read by pepod alone, bounded, and never decided by beyond naming a cause.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;

use serde::de::DeserializeOwned;

use crate::keeper::{Console, ExitRecord};
use crate::vmm::firecracker::GuestMemory;

/// The longest `exit.json` or `memory.json`.
const RECORD_BYTES: u64 = 64 * 1024;

/// A Sandbox's end, as far as it is written.
#[derive(Debug, Default)]
pub struct Evidence {
    /// What the keeper wrote last; `None`: it was ended from outside, or still runs.
    pub exit: Option<ExitRecord>,
    /// The console's last bytes.
    pub console: Console,
    /// What the guest last said of its memory, where its VMM asks for that.
    pub memory: Option<GuestMemory>,
    /// The console's ring itself, for looking again.
    pub(crate) file: Option<File>,
}

impl Evidence {
    pub(crate) fn new(exit: Option<OwnedFd>, console: Option<OwnedFd>, memory: Option<OwnedFd>) -> Self {
        let file = console.map(File::from);
        let console = file.as_ref().and_then(|file| Console::read(file).ok()).unwrap_or_default();
        Evidence { exit: exit.and_then(record), console, memory: memory.and_then(record), file }
    }
}

fn record<T: DeserializeOwned>(file: OwnedFd) -> Option<T> {
    let mut text = Vec::new();
    File::from(file).take(RECORD_BYTES).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}
