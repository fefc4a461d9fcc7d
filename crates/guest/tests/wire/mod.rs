//! A host's side of the frames, for tests: blocking, with deadlines.
//!
//! Starts the real `pepo-guest` as a host process. With `PEPO_TEST_GUEST=SOCKET` (and `CONNECT` spoken there) the same
//! tests run against a real guest instead.

#![allow(dead_code)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use pepo_proto::*;
use tokio_util::codec::{Decoder, Encoder};

/// Generous: a busy machine must not fail a test that is right.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Guest {
    process: Option<Child>,
    _directory: Option<tempfile::TempDir>,
    pub socket: PathBuf,
    real: bool,
}

static COUNT: AtomicU64 = AtomicU64::new(1);

pub fn new_op() -> OpId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&COUNT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    id[8..].copy_from_slice(&(now.as_nanos() as u64).to_le_bytes());
    OpId(id)
}

pub fn program(argv: &[&str]) -> Exec {
    Exec::new(argv.iter().copied())
}

pub fn sh(line: &str) -> Exec {
    program(&["/bin/bash", "-c", line])
}

pub fn activation() -> Activate {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    Activate {
        hostname: "test-host".into(),
        env: vec![Variable { name: "FROM_ACTIVATE".into(), value: "yes".into() }],
        clock_unix_ns: now.as_nanos() as u64,
        entropy: vec![7; 64],
        network: None,
    }
}

impl Guest {
    /// Started and activated.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    pub fn start_with(arguments: &[&str]) -> Self {
        let guest = Self::fresh(arguments);
        let outcome = guest.ask(Operation::Activate(activation())).outcome;
        assert!(outcome == Outcome::Done || guest.real, "{outcome:?}");
        guest
    }

    /// Started only.
    pub fn fresh(arguments: &[&str]) -> Self {
        if let (Ok(socket), true) = (std::env::var("PEPO_TEST_GUEST"), arguments.is_empty()) {
            return Guest { process: None, _directory: None, socket: socket.into(), real: true };
        }
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("guest.sock");
        let process = Command::new(env!("CARGO_BIN_EXE_pepo-guest"))
            .arg("--listen")
            .arg(&socket)
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let guest = Guest { process: Some(process), _directory: Some(directory), socket, real: false };
        wait_for("the guest to listen", || UnixStream::connect(&guest.socket).is_ok());
        guest
    }

    pub fn is_real(&self) -> bool {
        self.real
    }

    pub fn directory(&self) -> &Path {
        self.socket.parent().unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    pub fn connect(&self) -> Talk {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        if self.real {
            stream.write_all(format!("CONNECT {AGENT_PORT}\n").as_bytes()).unwrap();
            let mut line = vec![];
            while line.last() != Some(&b'\n') {
                let mut byte = [0];
                assert_eq!(stream.read(&mut byte).unwrap(), 1, "the guest does not answer");
                line.push(byte[0]);
            }
            assert!(line.starts_with(b"OK"), "{}", line.escape_ascii());
        }
        Talk { stream, buffer: BytesMut::new() }
    }

    pub fn request(&self, op: OpId, operation: Operation) -> Talk {
        let mut talk = self.connect();
        talk.send(Frame::Request(Request { op, operation, paced: None }));
        talk
    }

    /// One operation, to its end.
    pub fn ask(&self, operation: Operation) -> Talked {
        self.request(new_op(), operation).finish()
    }

    pub fn exec(&self, exec: Exec) -> Talked {
        self.ask(Operation::Exec(exec))
    }

    pub fn start_exec(&self, exec: Exec) -> (OpId, Talk) {
        let op = new_op();
        (op, self.request(op, Operation::Exec(exec)))
    }

    pub fn attach(&self, target: OpId, from: Option<u64>) -> Talk {
        let attach = Attach { target, from, input: false, keep_input: false, sole: None };
        self.request(new_op(), Operation::Attach(attach))
    }

    pub fn cancel(&self, target: OpId) -> Outcome {
        self.ask(Operation::Cancel(Cancel { target })).outcome
    }

    pub fn ops(&self) -> Vec<OpSummary> {
        let events = self.ask(Operation::Ops).events;
        events.into_iter().flat_map(|event| if let Event::Ops(ops) = event { ops } else { vec![] }).collect()
    }

    pub fn state(&self, op: OpId) -> Option<OpState> {
        self.ops().into_iter().find(|summary| summary.op == op).map(|summary| summary.state)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let terminated = Command::new("kill").arg(process.id().to_string()).status();
            let until = Instant::now() + Duration::from_secs(10);
            while terminated.is_ok() && Instant::now() < until {
                if matches!(process.try_wait(), Ok(Some(_))) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Everything a stream said.
#[derive(Debug)]
pub struct Talked {
    pub accepted: bool,
    pub out: Vec<u8>,
    pub err: Vec<u8>,
    pub events: Vec<Event>,
    pub gaps: Vec<(u64, u64)>,
    pub next: u64,
    pub eofs: Vec<Channel>,
    pub outcome: Outcome,
}

impl Talked {
    pub fn process(&self) -> &Process {
        match &self.outcome {
            Outcome::Process(process) => process,
            other => panic!("no process: {other:?}"),
        }
    }

    pub fn failure(&self) -> FailureCode {
        match &self.outcome {
            Outcome::Failed(failure) => failure.code,
            other => panic!("no failure: {other:?}"),
        }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    pub fn error_text(&self) -> String {
        String::from_utf8_lossy(&self.err).into_owned()
    }
}

/// One stream.
pub struct Talk {
    pub stream: UnixStream,
    buffer: BytesMut,
}

impl Talk {
    pub fn send(&mut self, frame: Frame) {
        let mut bytes = BytesMut::new();
        Frames::new().encode(frame, &mut bytes).unwrap();
        self.stream.write_all(&bytes).unwrap();
    }

    pub fn input(&mut self, offset: u64, bytes: &[u8]) {
        let mut offset = offset;
        for piece in bytes.chunks(MAX_DATA) {
            self.send(Frame::Data { channel: Channel::In, offset, bytes: Bytes::copy_from_slice(piece) });
            offset += piece.len() as u64;
        }
    }

    pub fn eof(&mut self, offset: u64) {
        self.send(Frame::Eof { channel: Channel::In, offset });
    }

    /// The next frame, `None` at the stream's end.
    pub fn receive(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = Frames::new().decode(&mut self.buffer).unwrap() {
                return Some(frame);
            }
            let mut bytes = vec![0; 256 << 10];
            match self.stream.read(&mut bytes) {
                Ok(0) => return None,
                Ok(read) => self.buffer.extend_from_slice(&bytes[..read]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("no frame came: {error}"),
            }
        }
    }

    /// Frames up to the first that `wanted` takes.
    pub fn until<T>(&mut self, mut wanted: impl FnMut(&Frame) -> Option<T>) -> T {
        loop {
            let frame = self.receive().expect("the stream ended");
            if let Some(found) = wanted(&frame) {
                return found;
            }
            assert!(!matches!(frame, Frame::End(_)), "ended early: {frame:?}");
        }
    }

    pub fn started(&mut self) -> u32 {
        self.until(|frame| if let Frame::Event(Event::Started { pid }) = frame { Some(*pid) } else { None })
    }

    /// Waits for so much output on standard output.
    pub fn output(&mut self, bytes: usize) -> Vec<u8> {
        let mut out = vec![];
        while out.len() < bytes {
            out.extend(self.until(|frame| match frame {
                Frame::Data { channel: Channel::Out, bytes, .. } => Some(bytes.clone()),
                _ => None,
            }));
        }
        out
    }

    /// Everything up to the End, with every rule of the order checked.
    pub fn finish(mut self) -> Talked {
        let mut talked = Talked {
            accepted: false,
            out: vec![],
            err: vec![],
            events: vec![],
            gaps: vec![],
            next: u64::MAX,
            eofs: vec![],
            outcome: Outcome::Done,
        };
        loop {
            match self.receive().expect("the stream ended without an End") {
                Frame::Accepted => {
                    assert!(!talked.accepted);
                    talked.accepted = true;
                }
                Frame::Data { channel, offset, bytes } => {
                    assert!(talked.next == u64::MAX || offset == talked.next, "offset {offset}, not {}", talked.next);
                    assert!(!talked.eofs.contains(&channel));
                    talked.next = offset + bytes.len() as u64;
                    let into = if channel == Channel::Err { &mut talked.err } else { &mut talked.out };
                    into.extend_from_slice(&bytes);
                }
                Frame::Gap { from, to } => {
                    talked.gaps.push((from, to));
                    talked.next = to;
                }
                Frame::Eof { channel, offset } => {
                    assert!(talked.next == u64::MAX || offset == talked.next, "eof at {offset}, not {}", talked.next);
                    talked.eofs.push(channel);
                }
                Frame::Event(event) => talked.events.push(event),
                Frame::End(outcome) => {
                    talked.outcome = outcome;
                    return talked;
                }
                Frame::Request(_) => panic!("a guest requests nothing"),
            }
        }
    }
}

pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn is_alive(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'),
        Err(_) => false,
    }
}
