//! One attachment to a command: its output in order, its input, signals and window sizes, over a WebSocket.
//!
//! ```text
//!   connect --> Start --> serve (read and write at once) --> Exit | Error: done
//!      ^                    |
//!      +---- pause <--- connection lost, lease (30 s) not over
//! ```
//!
//! Output has offsets, so a new connection asks for what is missing. Input is kept until 4 MiB have followed it, which is
//! more than every buffer on the way holds together, and the daemon says at each start where input stands; so neither
//! direction loses or repeats a byte when the daemon restarts in mid-command.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::{SinkExt, StreamExt};
use http::HeaderValue;
use http::header::{AUTHORIZATION, HOST, SEC_WEBSOCKET_PROTOCOL};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{self, Message};

use super::{Client, ClientError, LEASE, Target, Wire, refusal};
use crate::query::AttachCommand;
use crate::{ATTACH_PROTOCOL, AttachControl, Command, CommandId, ErrorCode, route};

/// Input that is kept for a resend.
const KEPT_INPUT: usize = 4 << 20;
/// How often a quiet connection is tried.
const PING: Duration = Duration::from_secs(15);
/// A connection on which not even a pong came for so long is lost.
const SILENT: Duration = Duration::from_secs(60);
/// How long the first attachment's answer and its first message may take, each.
const START: Duration = Duration::from_secs(60);
/// The same for the next ones. Short beside the lease: who hangs is asked again.
const AGAIN: Duration = Duration::from_secs(8);
/// Pieces under way in each direction.
const QUEUE: usize = 16;

/// What comes from a command.
#[derive(Clone, Debug, PartialEq)]
pub enum AttachEvent {
    /// It is attached: once, first.
    Start(Box<Command>),
    /// Standard output, or the terminal's.
    Stdout(Bytes),
    /// Error output.
    Stderr(Bytes),
    /// Output that is no longer kept: so many bytes are missing here.
    Gap(u64),
    /// The connection was lost and is being made again.
    Reconnecting,
    /// It is attached again.
    Reconnected,
    /// The command ended; the last event.
    Exit(Box<Command>),
}

/// What goes to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Bytes for its standard input.
    Bytes(Bytes),
    /// No more of them.
    Eof,
    /// The terminal's size.
    Resize {
        /// Columns.
        cols: u16,
        /// Rows.
        rows: u16,
    },
    /// A signal by name (`SIGINT`).
    Signal(String),
}

/// Sends to an attached command. Waits when the command does not read.
#[derive(Clone, Debug)]
pub struct AttachInput {
    data: mpsc::Sender<Input>,
    urgent: mpsc::Sender<Input>,
}

impl AttachInput {
    /// Gives it on; false when the attachment is over.
    pub async fn send(&self, input: Input) -> bool {
        let way = match input {
            Input::Bytes(_) | Input::Eof => &self.data,
            // What must pass while input is stuck has its own way.
            Input::Resize { .. } | Input::Signal(_) => &self.urgent,
        };
        way.send(input).await.is_ok()
    }
}

/// An attached command. Dropping it closes the connection.
pub struct Attachment {
    events: mpsc::Receiver<Result<AttachEvent, ClientError>>,
    input: AttachInput,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Attachment {
    /// The next event; nothing after `Exit` or an error.
    pub async fn next(&mut self) -> Option<Result<AttachEvent, ClientError>> {
        self.events.recv().await
    }

    /// The way in.
    pub fn input(&self) -> AttachInput {
        self.input.clone()
    }
}

pub(super) fn open(client: Client, session: String, command: CommandId, offset: u64) -> Attachment {
    let (events_in, events) = mpsc::channel(QUEUE);
    let (data, data_out) = mpsc::channel(QUEUE);
    let (urgent, urgent_out) = mpsc::channel(QUEUE);
    let link = Link {
        client,
        session,
        command,
        offset,
        started: false,
        kept: Kept::default(),
        eof: false,
        size: None,
        data: data_out,
        urgent: urgent_out,
        events: events_in,
    };
    let task = tokio::spawn(link.run());
    Attachment { events, input: AttachInput { data, urgent }, task }
}

/// The last bytes of input that were sent.
#[derive(Default)]
struct Kept {
    pieces: VecDeque<Bytes>,
    /// Offset of the first byte kept, and of the next one to come.
    from: u64,
    next: u64,
}

impl Kept {
    fn push(&mut self, piece: Bytes) {
        self.next += piece.len() as u64;
        self.pieces.push_back(piece);
        while let Some(first) = self.pieces.front()
            && self.next - self.from - first.len() as u64 >= KEPT_INPUT as u64
        {
            self.from += first.len() as u64;
            self.pieces.pop_front();
        }
    }

    /// What follows this offset, or nothing when it is no longer kept.
    fn after(&mut self, offset: u64) -> Option<Vec<Bytes>> {
        if offset > self.next {
            // Input came from somebody else, or before this attachment.
            *self = Kept { pieces: VecDeque::new(), from: offset, next: offset };
        }
        if offset < self.from {
            return None;
        }
        let mut at = self.from;
        let mut missing = Vec::new();
        for piece in &self.pieces {
            let end = at + piece.len() as u64;
            if end > offset {
                let skip = usize::try_from(offset.saturating_sub(at)).unwrap_or(usize::MAX);
                missing.push(piece.slice(skip.min(piece.len())..));
            }
            at = end;
        }
        Some(missing)
    }
}

type Socket = WebSocketStream<Box<dyn Wire>>;
type EventSender = mpsc::Sender<Result<AttachEvent, ClientError>>;

struct Link {
    client: Client,
    session: String,
    command: CommandId,
    /// The next output offset wanted.
    offset: u64,
    started: bool,
    kept: Kept,
    eof: bool,
    size: Option<(u16, u16)>,
    data: mpsc::Receiver<Input>,
    urgent: mpsc::Receiver<Input>,
    events: EventSender,
}

enum Served {
    /// Said its end, or nobody listens here any more.
    Over,
    Failed(ClientError),
}

impl Link {
    async fn run(mut self) {
        let mut give_up: Option<Instant> = None;
        let mut pause = Duration::from_millis(50);
        loop {
            let before = self.offset;
            let error = match self.connect_and_serve().await {
                Served::Over => return,
                Served::Failed(error) => error,
            };
            // The first connection is tried once: there is nothing yet that could be lost.
            if !error.may_pass() || !self.started {
                let _ = self.events.send(Err(error)).await;
                return;
            }
            if self.offset != before {
                give_up = None;
                pause = Duration::from_millis(50);
            }
            let now = Instant::now();
            if give_up.is_none() && self.events.send(Ok(AttachEvent::Reconnecting)).await.is_err() {
                return;
            }
            if now >= *give_up.get_or_insert(now + LEASE) {
                let _ = self.events.send(Err(error)).await;
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    fn what(&self) -> String {
        format!("attaching to {}", self.command)
    }

    async fn connect_and_serve(&mut self) -> Served {
        let limit = if self.started { AGAIN } else { START };
        let mut socket = match self.client.websocket(&self.session, self.command, self.offset, limit).await {
            Ok(socket) => socket,
            Err(error) => return Served::Failed(error),
        };
        let what = self.what();
        let first = match tokio::time::timeout(limit, first_control(&mut socket, &what)).await {
            Ok(Ok(control)) => control,
            Ok(Err(error)) => return Served::Failed(error),
            Err(_) => return Served::Failed(ClientError::Silent { what, seconds: limit.as_secs() }),
        };
        let (command, input_offset) = match first {
            AttachControl::Start { command, input_offset } => (command, input_offset),
            AttachControl::Error { error } => return Served::Failed(ClientError::Api(error)),
            other => return Served::Failed(ClientError::Unexpected { what, found: format!("{other:?}") }),
        };
        let event = match std::mem::replace(&mut self.started, true) {
            false => AttachEvent::Start(command),
            true => AttachEvent::Reconnected,
        };
        if self.events.send(Ok(event)).await.is_err() {
            return Served::Over;
        }
        let Some(resend) = self.kept.after(input_offset) else {
            return Served::Failed(ClientError::Unexpected {
                what,
                found: format!("input from offset {input_offset} is wanted again and no longer kept"),
            });
        };
        self.serve(socket, resend).await
    }

    async fn serve(&mut self, socket: Socket, resend: Vec<Bytes>) -> Served {
        let what = self.what();
        let (sink, source) = socket.split();
        let writer = Writer {
            sink,
            kept: &mut self.kept,
            eof: &mut self.eof,
            size: &mut self.size,
            data: &mut self.data,
            urgent: &mut self.urgent,
        };
        let read = read(source, &mut self.offset, &self.events, &what);
        let write = async {
            // A failed write is not the end: what the daemon said before it may still be there to read.
            let _ = writer.run(resend).await;
            std::future::pending::<Served>().await
        };
        // The caller may lose interest while nothing comes.
        let gone = async {
            self.events.closed().await;
            Served::Over
        };
        tokio::select! {
            biased;
            served = read => served,
            served = write => served,
            served = gone => served,
        }
    }
}

async fn first_control(socket: &mut Socket, what: &str) -> Result<AttachControl, ClientError> {
    loop {
        let message = match socket.next().await {
            Some(Ok(message)) => message,
            Some(Err(_)) | None => return Err(ClientError::Lost(what.to_owned())),
        };
        if let Message::Binary(bytes) = message {
            let Some((3, json)) = bytes.split_first().map(|(c, rest)| (*c, rest)) else {
                return Err(ClientError::Unexpected { what: what.to_owned(), found: "output before the start".into() });
            };
            return control(json, what);
        }
    }
}

fn control(json: &[u8], what: &str) -> Result<AttachControl, ClientError> {
    serde_json::from_slice(json)
        .map_err(|error| ClientError::Unexpected { what: what.to_owned(), found: error.to_string() })
}

async fn read(
    mut source: futures_util::stream::SplitStream<Socket>,
    offset: &mut u64,
    events: &EventSender,
    what: &str,
) -> Served {
    let lost = || Served::Failed(ClientError::Lost(what.to_owned()));
    loop {
        // Room first: a caller that does not read holds the daemon back, and with it the command.
        let Ok(room) = events.reserve().await else { return Served::Over };
        let message = match tokio::time::timeout(SILENT, source.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(Some(Err(_)) | None) => return lost(),
            Err(_) => {
                return Served::Failed(ClientError::Silent { what: what.to_owned(), seconds: SILENT.as_secs() });
            }
        };
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Close(_) => return lost(),
            _ => continue,
        };
        let Some(&channel) = bytes.first() else { continue };
        let payload = bytes.slice(1..);
        match channel {
            1 | 2 => {
                *offset += payload.len() as u64;
                room.send(Ok(if channel == 1 { AttachEvent::Stdout(payload) } else { AttachEvent::Stderr(payload) }));
            }
            3 => match control(&payload, what) {
                Ok(AttachControl::Gap { from, to }) => {
                    *offset = to.max(*offset);
                    room.send(Ok(AttachEvent::Gap(to.saturating_sub(from))));
                }
                Ok(AttachControl::Exit { command }) => {
                    room.send(Ok(AttachEvent::Exit(command)));
                    return Served::Over;
                }
                Ok(AttachControl::Error { error }) => return Served::Failed(ClientError::Api(error)),
                Ok(_) => {}
                Err(error) => return Served::Failed(error),
            },
            _ => {}
        }
    }
}

struct Writer<'a> {
    sink: futures_util::stream::SplitSink<Socket, Message>,
    kept: &'a mut Kept,
    eof: &'a mut bool,
    size: &'a mut Option<(u16, u16)>,
    data: &'a mut mpsc::Receiver<Input>,
    urgent: &'a mut mpsc::Receiver<Input>,
}

impl Writer<'_> {
    async fn run(mut self, resend: Vec<Bytes>) -> Result<(), tungstenite::Error> {
        if let Some((cols, rows)) = *self.size {
            self.control(&AttachControl::Resize { cols, rows }).await?;
        }
        for piece in resend {
            self.sink.send(framed(&piece)).await?;
        }
        if *self.eof {
            self.control(&AttachControl::Eof).await?;
        }
        loop {
            let input = tokio::select! {
                biased;
                Some(input) = self.urgent.recv() => Some(input),
                Some(input) = self.data.recv(), if !*self.eof => Some(input),
                () = tokio::time::sleep(PING) => None,
            };
            match input {
                None => self.sink.send(Message::Ping(Bytes::new())).await?,
                Some(Input::Bytes(bytes)) => {
                    for piece in pieces(bytes) {
                        // Kept before it is sent: a write that fails half-way is sent again.
                        self.kept.push(piece.clone());
                        self.sink.send(framed(&piece)).await?;
                    }
                }
                Some(Input::Eof) => {
                    *self.eof = true;
                    self.control(&AttachControl::Eof).await?;
                }
                Some(Input::Resize { cols, rows }) => {
                    *self.size = Some((cols, rows));
                    self.control(&AttachControl::Resize { cols, rows }).await?;
                }
                Some(Input::Signal(signal)) => self.control(&AttachControl::Signal { signal }).await?,
            }
        }
    }

    async fn control(&mut self, control: &AttachControl) -> Result<(), tungstenite::Error> {
        let json = serde_json::to_vec(control).unwrap_or_default();
        let mut message = BytesMut::with_capacity(json.len() + 1);
        message.put_u8(3);
        message.put_slice(&json);
        self.sink.send(Message::Binary(message.freeze())).await
    }
}

/// Cut so that a frame and its channel byte stay under 64 KiB.
fn pieces(mut bytes: Bytes) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || (!bytes.is_empty()).then(|| bytes.split_to(bytes.len().min(32 << 10))))
}

fn framed(piece: &[u8]) -> Message {
    let mut message = BytesMut::with_capacity(piece.len() + 1);
    message.put_u8(0);
    message.put_slice(piece);
    Message::Binary(message.freeze())
}

impl Client {
    async fn websocket(
        &self,
        session: &str,
        command: CommandId,
        offset: u64,
        limit: Duration,
    ) -> Result<Socket, ClientError> {
        let what = format!("attaching to {command}");
        let id = command.to_string();
        let call = self
            .request(&route::command_attach, &[("session", session), ("command", &id)])?
            .with_query(&AttachCommand { offset: Some(offset) })?;
        let (authority, key) = match &*self.target {
            Target::Unix(_) => ("pepo", None),
            Target::Tcp { authority, key, .. } => (authority.as_str(), key.as_ref()),
        };
        let mut request = format!("ws://{authority}{}", call.path)
            .into_client_request()
            .map_err(|e| ClientError::transport(what.clone(), e))?;
        let headers = request.headers_mut();
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(ATTACH_PROTOCOL));
        if let Some(key) = key {
            headers.insert(AUTHORIZATION, key.clone());
        }
        if let Ok(host) = HeaderValue::from_str(authority) {
            headers.insert(HOST, host);
        }
        if let Some(app) = &self.app {
            headers.insert("pepo-app", app.clone());
        }
        let config = WebSocketConfig::default()
            .max_message_size(Some(1 << 20))
            .max_frame_size(Some(1 << 20))
            .max_write_buffer_size(1 << 20);
        let wire = self.connect().await?;
        let shaking = tokio_tungstenite::client_async_with_config(request, wire, Some(config));
        match tokio::time::timeout(limit, shaking).await {
            Ok(Ok((socket, _))) => Ok(socket),
            Ok(Err(tungstenite::Error::Http(answer))) => {
                let error = refusal(&what, answer.status(), answer.body().as_deref().unwrap_or_default());
                Err(match (error, answer.status().as_u16()) {
                    // Too long for one read of the handshake: the status alone must do.
                    (ClientError::Unexpected { .. }, 503) => ClientError::Api(Box::new(crate::Error::new(
                        ErrorCode::Unavailable,
                        "the daemon is starting or stopping",
                    ))),
                    (error, _) => error,
                })
            }
            Ok(Err(
                tungstenite::Error::Io(_) | tungstenite::Error::ConnectionClosed | tungstenite::Error::Protocol(_),
            )) => Err(ClientError::Lost(what)),
            Ok(Err(error)) => Err(ClientError::transport(what, error)),
            Err(_) => Err(ClientError::Silent { what, seconds: limit.as_secs() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_input_is_resent_from_any_offset() {
        let mut kept = Kept::default();
        kept.push(Bytes::from_static(b"hello "));
        kept.push(Bytes::from_static(b"world"));
        let text = |kept: &mut Kept, at| kept.after(at).map(|pieces| pieces.concat());
        assert_eq!(text(&mut kept, 0).as_deref(), Some(&b"hello world"[..]));
        assert_eq!(text(&mut kept, 3).as_deref(), Some(&b"lo world"[..]));
        assert_eq!(text(&mut kept, 6).as_deref(), Some(&b"world"[..]));
        assert_eq!(text(&mut kept, 11).as_deref(), Some(&b""[..]));
        assert_eq!(text(&mut kept, 20).as_deref(), Some(&b""[..]));
        assert_eq!((kept.from, kept.next), (20, 20));
    }

    #[test]
    fn kept_input_is_bounded_and_says_when_it_forgot() {
        let mut kept = Kept::default();
        let piece = Bytes::from(vec![7; 1 << 20]);
        for _ in 0..20 {
            kept.push(piece.clone());
        }
        let held: usize = kept.pieces.iter().map(Bytes::len).sum();
        assert!(held >= KEPT_INPUT && held <= KEPT_INPUT + piece.len(), "{held}");
        assert!(kept.after(1).is_none());
        assert!(kept.after(kept.from).is_some());
    }

    #[test]
    fn input_is_cut_small() {
        let cut: Vec<_> = pieces(Bytes::from(vec![1; 70_000])).map(|p| p.len()).collect();
        assert_eq!(cut, [32 << 10, 32 << 10, 70_000 - (64 << 10)]);
    }
}
