//! A guest that says what a test makes it say.

use std::future::Future;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use pepo_sandbox::guest::{Connector, Deadlines, Error, Exec, Guest, Output};
use pepo_sandbox::proto::{self, *};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::codec::{Decoder, Encoder};

/// Short, so that what must time out does soon; a test that must not time out uses [`PATIENT`].
pub const HASTY: Deadlines = deadlines(Duration::from_millis(300));

pub const PATIENT: Deadlines = deadlines(Duration::from_secs(30));

pub const fn deadlines(all: Duration) -> Deadlines {
    Deadlines { connect: all, control: all, cancel: all, idle: all }
}

/// Ten times what any of these may take on a busy machine.
pub const AT_MOST: Duration = Duration::from_secs(30);

/// The guest's end of one stream.
pub struct End {
    pub stream: UnixStream,
    pub buffer: BytesMut,
}

impl End {
    /// The next frame from the host; `None` when it has closed.
    pub async fn frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = Frames::new().decode(&mut self.buffer).unwrap() {
                return Some(frame);
            }
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    pub async fn request(&mut self) -> Request {
        match self.frame().await {
            Some(Frame::Request(request)) => request,
            other => panic!("no request but {other:?}"),
        }
    }

    pub async fn say(&mut self, frames: &[Frame]) {
        self.bytes(&encoded(frames)).await;
    }

    /// Errors are the host's closing, which is what some of these tests are about.
    pub async fn bytes(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes).await;
    }

    /// Waits until the host has closed, whatever it says before.
    pub async fn closed(mut self) {
        while self.frame().await.is_some() {}
    }
}

pub fn encoded(frames: &[Frame]) -> BytesMut {
    let mut bytes = BytesMut::new();
    for frame in frames {
        Frames::new().encode(frame.clone(), &mut bytes).unwrap();
    }
    bytes
}

/// A guest whose every stream is served by `serve`.
pub fn guest<F, D>(deadlines: Deadlines, serve: F) -> (Guest, tempfile::TempDir)
where
    F: Fn(End) -> D + Send + Sync + 'static,
    D: Future<Output = ()> + Send + 'static,
{
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(End { stream, buffer: BytesMut::new() }));
        }
    });
    (Guest::with_deadlines(Connector::socket(path), deadlines), directory)
}

/// A guest that answers every request with the same frames and keeps its end open.
pub fn parrot(deadlines: Deadlines, frames: Vec<Frame>) -> (Guest, tempfile::TempDir) {
    let bytes = encoded(&frames).freeze();
    guest(deadlines, move |mut end| {
        let bytes = bytes.clone();
        async move {
            end.request().await;
            end.bytes(&bytes).await;
            end.closed().await;
        }
    })
}

pub fn program(stdin: bool, pty: Option<PtySize>) -> proto::Exec {
    proto::Exec { stdin, pty, ..proto::Exec::new(["true"]) }
}

pub const OP: OpId = OpId([7; 16]);

pub fn data(channel: Channel, offset: u64, bytes: &'static [u8]) -> Frame {
    Frame::Data { channel, offset, bytes: Bytes::from_static(bytes) }
}

pub fn eof(channel: Channel, offset: u64) -> Frame {
    Frame::Eof { channel, offset }
}

pub fn started() -> Frame {
    Frame::Event(Event::Started { pid: 2 })
}

pub fn input(next: u64) -> Frame {
    Frame::Event(Event::Input { next, open: true })
}

pub fn exited() -> Frame {
    Frame::End(Outcome::Process(Process {
        cause: Cause::Exit,
        code: Some(0),
        signal: None,
        stdout_bytes: 0,
        stderr_bytes: 0,
        elapsed_ms: 1,
        cwd: None,
    }))
}

pub fn failed(code: FailureCode) -> Frame {
    Frame::End(Outcome::Failed(Failure { code, message: "no".into() }))
}

pub fn stat() -> FileStat {
    FileStat {
        name: b"f".to_vec(),
        kind: EntryKind::File,
        size: 3,
        mode: 0o644,
        uid: 1000,
        gid: 1000,
        modified_unix_ns: 0,
        target: None,
    }
}

pub fn hello(generation: u32) -> Frame {
    let (build, kernel) = (String::new(), String::new());
    Frame::Event(Event::Hello(HelloReply { generation, features: 0, build, kernel, boot_ms: 0, activated: false }))
}

pub const ACCEPTED: Frame = Frame::Accepted;
pub const DONE: Frame = Frame::End(Outcome::Done);

/// All output of a program up to its end.
pub async fn outputs(mut exec: Exec) -> Result<Vec<Output>, Error> {
    let mut all = Vec::new();
    while let Some(output) = exec.next().await {
        all.push(output?);
    }
    Ok(all)
}

/// What a program's stream comes to when the guest says this.
pub async fn run(exec: proto::Exec, frames: Vec<Frame>) -> Result<Vec<Output>, Error> {
    let (guest, _directory) = parrot(PATIENT, frames);
    tokio::time::timeout(AT_MOST, async { outputs(guest.exec(OP, exec).await?).await }).await.unwrap()
}

pub fn is_protocol<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Protocol(proto::Error::Order(_))))
}
