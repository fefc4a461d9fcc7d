//! Messages of the kernel's FUSE, as far as this program looks into them.
//!
//! The layouts are those of the kernel's `include/uapi/linux/fuse.h`, protocol 7.31.

/// The longest message: what the kernel sends and takes at the most.
pub const MESSAGE: usize = (1 << 20) + 4096;

/// Bytes before an answer's own: length, error, number.
pub const ANSWER_HEAD: usize = 16;

/// Bytes before a request's own: length, operation, number, node, and who asks.
pub const REQUEST_HEAD: usize = 40;

/// What is asked for by these numbers.
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const RELEASE: u32 = 18;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const RELEASEDIR: u32 = 29;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    /// Ours: somebody is here.
    pub const HERE: u32 = u32::MAX;
}

/// The 32-bit number at that byte; 0 where there is none.
pub fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|found| found.try_into().ok()).map_or(0, u32::from_le_bytes)
}

/// The 64-bit number at that byte; 0 where there is none.
pub fn long(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|found| found.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// The operation of a request.
pub fn operation(request: &[u8]) -> u32 {
    word(request, 4)
}

/// The number of a request, or of the request that an answer is for.
pub fn number(message: &[u8]) -> u64 {
    long(message, 8)
}

/// The node that a request is about.
pub fn node(request: &[u8]) -> u64 {
    long(request, 16)
}

/// An answer that has nothing to say but that it is done.
pub fn done(request: &[u8]) -> [u8; ANSWER_HEAD] {
    let mut answer = [0; ANSWER_HEAD];
    answer[..4].copy_from_slice(&(ANSWER_HEAD as u32).to_le_bytes());
    answer[8..].copy_from_slice(&number(request).to_le_bytes());
    answer
}
