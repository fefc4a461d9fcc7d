//! What the fuzz targets do with their bytes, and what must hold whatever these are.
//!
//! Each target is a function here and a program in `targets/`. They build on the stable toolchain, without
//! instrumentation; `cargo fuzz` on a nightly one guides them by coverage. A failed assertion is the finding.

#![allow(clippy::expect_used, clippy::panic)] // that is how a finding is told

mod net;

use bytes::{BufMut, Bytes, BytesMut};
use pepo_proto::{
    Attach, Cause, Channel, Dial, Event, Exec, Failure, FailureCode, Frame, Frames, HEADER, Hello, List, MAX_BODY,
    OpId, Operation, Outcome, Process, PtySize, Read, Request, TarOut,
};
use pepo_sandbox::guest::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::codec::{Decoder, Encoder};

pub use net::{DNS_PACKETS, RELAY_GREETING, RELAY_REQUESTS, dns_packets, relay_greeting, relay_requests};

/// The codec reads the same frames however the bytes are cut, reads back what it would write, and keeps little.
pub fn frames(bytes: &[u8]) {
    let Some((cut, bytes)) = bytes.split_first() else { return };
    let whole = read_all(bytes, usize::MAX);
    let parts = read_all(bytes, usize::from(*cut).max(1));
    assert_eq!(whole, parts, "a cut every {cut} bytes changes what is read");
    for frame in whole.0 {
        let mut again = BytesMut::new();
        // A message may be longer written than it was read: unknown fields are dropped, but numbers are never widened.
        Frames::new().encode(frame.clone(), &mut again).expect("what was read can be written");
        assert_eq!(Frames::new().decode(&mut again).ok().flatten(), Some(frame));
    }
}

/// The frames in `bytes` given in parts of `cut`, and whether they ended in an error.
fn read_all(bytes: &[u8], cut: usize) -> (Vec<Frame>, bool) {
    let (mut codec, mut buffer, mut frames) = (Frames::new(), BytesMut::new(), Vec::new());
    for part in bytes.chunks(cut.min(bytes.len().max(1))) {
        buffer.extend_from_slice(part);
        loop {
            match codec.decode(&mut buffer) {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(_) => return (frames, true),
            }
        }
        assert!(buffer.capacity() <= 2 * (HEADER + MAX_BODY) + bytes.len(), "the decoder asks for too much");
    }
    (frames, false)
}

/// What the host lets through on one stream is in order, whatever the guest sends.
pub fn guest_stream(bytes: &[u8]) {
    let [operation, cut, said @ ..] = bytes else { return };
    let request = Request { op: OpId([1; 16]), operation: asked(*operation), paced: Some(true) };
    let stream = match operation & 0x80 {
        0 => told(said),
        _ => said.to_vec(),
    };
    let mut incoming = Incoming::new(&request);
    let mut buffer = BytesMut::new();
    let mut seen = Seen { next: incoming.offset(), ..Seen::default() };
    for part in stream.chunks(usize::from(*cut).max(1) * 16) {
        buffer.extend_from_slice(part);
        loop {
            match incoming.next(&mut buffer) {
                Ok(Some(frame)) => seen.frame(&request.operation, &frame),
                Ok(None) => break,
                Err(_) => return,
            }
            assert_eq!(incoming.ended(), seen.ended);
            assert_eq!(incoming.offset(), seen.next);
        }
    }
}

/// The rules once more, written differently.
#[derive(Default)]
struct Seen {
    accepted: bool,
    ended: bool,
    next: u64,
    eof: [u32; 3],
    events: u32,
}

impl Seen {
    fn frame(&mut self, operation: &Operation, frame: &Frame) {
        assert!(!self.ended, "{frame:?} after the end");
        let refused = matches!(frame, Frame::End(Outcome::Failed(_)));
        let first = refused || matches!(frame, Frame::Accepted | Frame::Event(Event::Taken { .. }));
        assert!(self.accepted || first, "{frame:?} before accepted");
        match frame {
            Frame::Request(_) => panic!("a request from the guest"),
            Frame::Accepted => assert!(!std::mem::replace(&mut self.accepted, true), "accepted twice"),
            Frame::Data { channel, offset, bytes } => {
                assert_eq!(*offset, self.next);
                assert_eq!(self.eof[*channel as usize], 0, "data after the end of its channel");
                assert_ne!(*channel, Channel::In);
                self.next += bytes.len() as u64;
            }
            Frame::Eof { channel, offset } => {
                assert_eq!(*offset, self.next);
                assert_ne!(*channel, Channel::In);
                self.eof[*channel as usize] += 1;
                assert_eq!(self.eof[*channel as usize], 1, "a channel that ends twice");
            }
            Frame::Gap { from, to } => {
                assert!(matches!(operation, Operation::Exec(_) | Operation::Attach(_)));
                assert!(*from == self.next && to > from);
                self.next = *to;
            }
            Frame::Event(Event::Taken { .. }) => {}
            Frame::Event(_) => self.events += 1,
            Frame::End(outcome) => {
                self.ended = true;
                match (operation, outcome) {
                    (_, Outcome::Failed(_)) => {}
                    (Operation::Exec(_), outcome) => assert!(matches!(outcome, Outcome::Process(_))),
                    (Operation::Read(_) | Operation::TarOut(_) | Operation::Dial(_), outcome) => {
                        assert!(*outcome == Outcome::Done && self.eof[1] == 1, "not whole and yet done");
                    }
                    (Operation::Hello(_), _) => assert_eq!(self.events, 1),
                    _ => {}
                }
            }
        }
    }
}

fn asked(byte: u8) -> Operation {
    let path = || "/f".to_owned();
    let exec = |stdin, pty| {
        let (argv, env, cwd, user, shell) = (vec!["true".into()], vec![], None, None, None);
        Operation::Exec(Exec { argv, env, cwd, user, stdin, pty, timeout_ms: 0, detached: false, shell, limits: None })
    };
    let attach =
        |from, input| Operation::Attach(Attach { target: OpId([2; 16]), from, input, keep_input: true, sole: None });
    match byte % 13 {
        0 => exec(false, None),
        1 => exec(true, None),
        2 => exec(true, Some(PtySize { cols: 80, rows: 24 })),
        3 => attach(Some(0), false),
        4 => attach(Some(7), true),
        5 => attach(None, true),
        6 => Operation::Read(Read { path: path(), offset: 0, length: None, user: None }),
        7 => Operation::TarOut(TarOut { path: path(), user: None }),
        8 => Operation::List(List { path: path(), user: None }),
        9 => Operation::Dial(Dial { port: 80 }),
        10 => Operation::Hello(Hello { oldest: 1, newest: 1, features: 0 }),
        11 => Operation::Ops,
        _ => Operation::Ping,
    }
}

/// Reads bytes as instructions for frames that are almost right, so that chance alone gets beyond the first one.
fn told(mut said: &[u8]) -> Vec<u8> {
    let mut stream = BytesMut::new();
    let mut next = 0_u64;
    while let [what, how, rest @ ..] = said {
        said = rest;
        let offset = if how & 0x40 == 0 { next } else { u64::from(*how) };
        let channel = [Channel::Out, Channel::Err, Channel::Out, Channel::In][usize::from(how % 4)];
        let frame = match what % 16 {
            0 | 1 => Frame::Accepted,
            2 => Frame::Event(Event::Taken { bytes: u64::from(*how) }),
            3..=5 => {
                let bytes = Bytes::from(vec![*how; 1 + usize::from(how % 32)]);
                next = offset + bytes.len() as u64;
                Frame::Data { channel, offset, bytes }
            }
            6 | 7 => Frame::Eof { channel, offset },
            8 => {
                let from = offset;
                next = from + 1 + u64::from(*how);
                Frame::Gap { from, to: next }
            }
            9 => Frame::Event(Event::Started { pid: 7 }),
            10 => Frame::Event(Event::Input { next: u64::from(*how), open: true }),
            11 => Frame::Event(Event::Entries(vec![])),
            12 => Frame::End(Outcome::Done),
            13 => Frame::End(Outcome::Process(Process {
                cause: Cause::Exit,
                code: Some(i32::from(*how)),
                signal: None,
                stdout_bytes: next,
                stderr_bytes: 0,
                elapsed_ms: 1,
                cwd: None,
            })),
            14 => Frame::End(Outcome::Failed(Failure { code: FailureCode::Io, message: "x".into() })),
            _ => {
                // A frame of a kind and body that nobody wrote.
                let length = rest.len().min(usize::from(*how));
                stream.put_u32_le(length as u32 + 1);
                stream.put_u8(how % 9);
                stream.put_slice(&rest[..length]);
                continue;
            }
        };
        Frames::new().encode(frame, &mut stream).expect("frames of ours can be written");
    }
    stream.to_vec()
}

/// A body that is taken is written and read back the same; no body panics.
pub fn api_bodies(bytes: &[u8]) {
    let Some((which, body)) = bytes.split_first() else { return };
    match which % 14 {
        0 => body_of::<pepo_api::CreateSession>(body),
        1 => body_of::<pepo_api::CreateCommand>(body),
        2 => body_of::<pepo_api::SendSignal>(body),
        3 => body_of::<pepo_api::MakeFile>(body),
        4 => body_of::<pepo_api::RenameFile>(body),
        5 => body_of::<pepo_api::BuildImage>(body),
        6 => body_of::<pepo_api::SweepRequest>(body),
        7 => body_of::<pepo_api::AttachControl>(body),
        8 => body_of::<pepo_api::query::ListSessions>(body),
        9 => body_of::<pepo_api::query::ShowCommand>(body),
        10 => body_of::<pepo_api::query::WriteFile>(body),
        11 => id::<pepo_api::SessionId>(body),
        12 => id::<pepo_api::CommandId>(body),
        _ => id::<pepo_api::ImageId>(body),
    }
}

fn body_of<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(body: &[u8]) {
    let Ok(taken) = serde_json::from_slice::<T>(body) else { return };
    let written = serde_json::to_vec(&taken).expect("what was taken can be written");
    let again: T = serde_json::from_slice(&written).expect("what was written can be read");
    assert_eq!(again, taken);
}

fn id<T: std::str::FromStr + std::fmt::Display + PartialEq + std::fmt::Debug>(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    let Ok(id) = text.parse::<T>() else { return };
    assert_eq!(id.to_string().parse::<T>().ok(), Some(id));
}

/// Inputs of [`frames`] to begin from.
pub const FRAMES: &[&[u8]] = &[
    include_bytes!("seeds/frames/failure"),
    include_bytes!("seeds/frames/file"),
    include_bytes!("seeds/frames/listing"),
    include_bytes!("seeds/frames/program"),
];

/// Inputs of [`guest_stream`] to begin from.
pub const GUEST_STREAM: &[&[u8]] = &[
    include_bytes!("seeds/guest_stream/file_bytes"),
    include_bytes!("seeds/guest_stream/joined_told"),
    include_bytes!("seeds/guest_stream/listing_bytes"),
    include_bytes!("seeds/guest_stream/program_bytes"),
    include_bytes!("seeds/guest_stream/program_told"),
    include_bytes!("seeds/guest_stream/tree_told"),
];

/// Inputs of [`api_bodies`] to begin from.
pub const API_BODIES: &[&[u8]] = &[
    include_bytes!("seeds/api_bodies/argv"),
    include_bytes!("seeds/api_bodies/command_id"),
    include_bytes!("seeds/api_bodies/line"),
    include_bytes!("seeds/api_bodies/resize"),
    include_bytes!("seeds/api_bodies/session"),
    include_bytes!("seeds/api_bodies/session_id"),
];

/// Policies worth beginning with.
pub const NETWORK_POLICIES: &[&[u8]] = &[
    br#"[{"mode":"public"},{"closed":[{"range":"10.0.0.0/8","what":"x"}],"open":[]}]"#,
    br#"[{"mode":"allow","rules":[{"entry":0,"target":{"cidr":"0.0.0.0/0"},"protocol":"tcp","ports":[22,443]},{"entry":1,"target":{"cidr":"10.5.0.0/16"}}]},{"closed":[{"range":"10.0.0.0/8","what":"x"}],"open":[{"range":"10.5.0.0/24","ports":[443],"protocol":"tcp"}]}]"#,
    br#"[{"mode":"allow","rules":[{"entry":0,"target":{"domain":"*.example.com"}},{"entry":0,"target":{"cidr":"8.8.8.8/32"},"ports":[53]}]},{"closed":[],"open":[]}]"#,
];

/// A policy and a floor as JSON: what is taken compiles to disjoint elements, and nothing of them is on the floor.
///
/// # Panics
/// A floor address is open, or two elements overlap.
pub fn network_policies(bytes: &[u8]) {
    use pepo_sandbox::net::{Compiled, Floor, Policy, Protocol};
    let Ok((policy, floor)) = serde_json::from_slice::<(Policy, Floor)>(bytes) else { return };
    if floor.closed.len() > 64 || floor.open.len() > 64 || policy.check(&floor).is_err() {
        return;
    }
    let compiled = Compiled::new(&policy, &floor);
    for pair in compiled.ranges.windows(2) {
        assert!(pair[0].1 < pair[1].0, "{pair:?} overlap");
    }
    for pair in compiled.services.windows(2) {
        let same = (pair[0].class, pair[0].protocol) == (pair[1].class, pair[1].protocol);
        assert!(!same || pair[0].last < pair[1].first, "{pair:?} overlap");
    }
    let ends = floor.closed.iter().flat_map(|closed| [closed.range.first(), closed.range.last()]);
    let opened = floor.open.iter().flat_map(|open| [open.range.first(), open.range.last()]);
    let ports: Vec<u16> = floor.open.iter().flat_map(|open| open.ports.clone()).chain([1, 53, 443, 65_535]).collect();
    for address in ends.chain(opened) {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            for port in &ports {
                let open = compiled.allows(address, protocol, *port).is_some();
                assert!(!open || floor.admits(address, protocol, *port), "{address} {protocol:?} {port} is open");
            }
        }
        let open = compiled.allows(address, Protocol::Icmp, 0).is_some();
        assert!(!open || floor.admits(address, Protocol::Icmp, 0), "{address} answers pings");
    }
    // Under a ceiling there is never more, and under `public` nothing of the floor, opened or not.
    let under = policy.under(&Policy::public(), &floor);
    if under.rules.len() > pepo_sandbox::net::policy::RULES {
        return;
    }
    under.check(&floor).expect("what both allow is a policy");
    let under = Compiled::new(&under, &floor);
    for closed in &floor.closed {
        for address in [closed.range.first(), closed.range.last()] {
            let open = |protocol, port| under.allows(address, protocol, port).is_some();
            let any = ports.iter().any(|port| open(Protocol::Tcp, *port) || open(Protocol::Udp, *port));
            assert!(!any && !open(Protocol::Icmp, 0), "{address} is open under `public`");
        }
    }
}

/// Changes an input for the next run: mostly as libFuzzer does, and begins again near a seed where there is little to
/// change, since without coverage it keeps nothing to build on.
pub fn mutate(seeds: &[&[u8]], input: &mut [u8], size: usize, most: usize, chance: u32) -> usize {
    if size > 4 && !chance.is_multiple_of(8) {
        return libfuzzer_sys::fuzzer_mutate(input, size, most);
    }
    let near = Chance(u64::from(chance)).near(seeds);
    let length = near.len().min(most);
    input[..length].copy_from_slice(&near[..length]);
    length
}

/// Chance that is the same on every run (splitmix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Fewer than `most` of them.
    #[cfg(test)]
    fn bytes(&mut self, most: u64) -> Vec<u8> {
        let length = self.next() % most;
        (0..length).map(|_| self.next() as u8).collect()
    }

    /// One of the seeds with a few bytes changed, taken away or put in.
    fn near(&mut self, seeds: &[&[u8]]) -> Vec<u8> {
        let mut bytes = seeds[self.next() as usize % seeds.len()].to_vec();
        for _ in 0..self.next() % 4 {
            let at = self.next() as usize % (bytes.len() + 1);
            match self.next() % 3 {
                0 => bytes.insert(at, self.next() as u8),
                1 if at < bytes.len() => drop(bytes.remove(at)),
                _ if at < bytes.len() => bytes[at] = self.next() as u8,
                _ => {}
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    //! A little of each target on every run: enough to see that it works and that its own assertions hold.

    use super::*;

    #[test]
    fn a_little_of_frames() {
        let mut chance = Chance(1);
        let seeds = FRAMES;
        for seed in seeds {
            let read = read_all(&seed[1..], usize::MAX);
            assert!(!read.1 && read.0.len() > 1, "a seed that is no stream");
        }
        for _ in 0..5_000 {
            frames(&chance.bytes(300));
            frames(&chance.near(seeds));
        }
    }

    #[test]
    fn a_little_of_guest_stream() {
        let mut chance = Chance(2);
        let seeds = GUEST_STREAM;
        for _ in 0..30_000 {
            guest_stream(&chance.bytes(60));
            guest_stream(&chance.near(seeds));
        }
    }

    #[test]
    fn an_honest_stream_is_let_through_to_its_end() {
        // Else the target would be content with refusing everything.
        let request = Request { op: OpId([1; 16]), operation: asked(1), paced: None };
        let mut buffer = BytesMut::from(&told(&[0, 0, 9, 0, 3, 0, 3, 1, 8, 0, 6, 0, 6, 1, 13, 0])[..]);
        let mut incoming = Incoming::new(&request);
        let mut let_through = 0;
        while incoming.next(&mut buffer).unwrap().is_some() {
            let_through += 1;
        }
        assert_eq!((let_through, incoming.ended()), (8, true));
        assert!(incoming.next(&mut BytesMut::from(&told(&[0, 0])[..])).is_err(), "a frame after the end");
    }

    #[test]
    fn a_little_of_api_bodies() {
        let mut chance = Chance(3);
        let seeds = API_BODIES;
        for _ in 0..20_000 {
            api_bodies(&chance.near(seeds));
            api_bodies(&chance.bytes(60));
        }
    }
}
