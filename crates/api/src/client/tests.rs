//! The client against a server that is scripted connection by connection.

use std::path::PathBuf;

use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

use super::*;
use crate::query::{AtPath, ShowCommand, ShowSession};
use crate::{
    ATTACH_PROTOCOL, AttachControl, Command, CommandEnd, CommandId, CommandRole, CommandState, OnDisconnect, Reason,
    SessionId, StreamEvent,
};

struct Server {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Server {
    fn new() -> (Self, Client) {
        let path = std::env::temp_dir().join(format!("pepo-{}.sock", SessionId::generate().hex()));
        let listener = UnixListener::bind(&path).unwrap();
        let client = Client::unix(&path);
        (Server { listener, path }, client)
    }

    /// The next request up to its empty line, and the connection.
    async fn http(&self) -> (String, UnixStream) {
        let (mut stream, _) = self.listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        (String::from_utf8(head).unwrap(), stream)
    }

    async fn websocket(&self) -> (String, WebSocketStream<UnixStream>) {
        let (stream, _) = self.listener.accept().await.unwrap();
        let mut target = String::new();
        #[allow(clippy::result_large_err)]
        let shake = |request: &Request, mut response: Response| {
            target = request.uri().to_string();
            assert_eq!(request.headers()[SEC_WEBSOCKET_PROTOCOL], ATTACH_PROTOCOL);
            response.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(ATTACH_PROTOCOL));
            Ok(response)
        };
        let socket = tokio_tungstenite::accept_hdr_async(stream, shake).await.unwrap();
        (target, socket)
    }
}

use http::header::SEC_WEBSOCKET_PROTOCOL;

fn command(id: CommandId, ended: bool) -> Box<Command> {
    Box::new(Command {
        id,
        session_id: SessionId::generate(),
        activation: 1,
        state: if ended { CommandState::Exited } else { CommandState::Running },
        role: CommandRole::Command,
        service: None,
        argv: vec!["true".into()],
        shell: None,
        on_disconnect: OnDisconnect::Keep,
        limits: None,
        pty: false,
        started_at: jiff::Timestamp::UNIX_EPOCH,
        end: ended.then_some(CommandEnd {
            reason: Reason::Exit,
            exit_code: Some(7),
            signal: None,
            signal_number: None,
            cwd: None,
            at: jiff::Timestamp::UNIX_EPOCH,
        }),
        stdout_bytes: 0,
        stderr_bytes: 0,
    })
}

fn frame(channel: u8, payload: &[u8]) -> Message {
    Message::Binary([&[channel], payload].concat().into())
}

fn control(control: &AttachControl) -> Message {
    frame(3, &serde_json::to_vec(control).unwrap())
}

async fn input(socket: &mut WebSocketStream<UnixStream>) -> (u8, Vec<u8>) {
    loop {
        if let Message::Binary(bytes) = socket.next().await.unwrap().unwrap() {
            return (bytes[0], bytes[1..].to_vec());
        }
    }
}

const REFUSED: &str = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 107\r\n\r\n";

fn unavailable() -> String {
    let body = serde_json::to_string(&ErrorBody { error: Error::new(ErrorCode::Unavailable, "starting") }).unwrap();
    REFUSED.replace("107", &body.len().to_string()) + &body
}

#[tokio::test]
async fn an_attachment_loses_and_repeats_nothing_when_the_daemon_restarts() {
    let (server, client) = Server::new();
    let id = CommandId::generate();
    let script = tokio::spawn(async move {
        let (target, mut first) = server.websocket().await;
        assert!(target.ends_with(&format!("/commands/{id}/attach?offset=0")), "{target}");
        first.send(control(&AttachControl::Start { command: command(id, false), input_offset: 0 })).await.unwrap();
        first.send(frame(1, b"hello ")).await.unwrap();
        first.send(frame(2, b"err")).await.unwrap();
        assert_eq!(input(&mut first).await, (0, b"abc".to_vec()));
        drop(first);

        // It is back before it is ready.
        let (_, mut second) = server.http().await;
        second.write_all(unavailable().as_bytes()).await.unwrap();
        drop(second);

        let (target, mut third) = server.websocket().await;
        assert!(target.ends_with("offset=9"), "{target}");
        third.send(control(&AttachControl::Start { command: command(id, false), input_offset: 1 })).await.unwrap();
        assert_eq!(input(&mut third).await, (0, b"bc".to_vec()), "what the guest has not seen comes again");
        third.send(control(&AttachControl::Gap { from: 9, to: 12 })).await.unwrap();
        third.send(frame(1, b"world")).await.unwrap();
        let (channel, eof) = input(&mut third).await;
        assert_eq!((channel, serde_json::from_slice(&eof).unwrap()), (3, AttachControl::Eof));
        third.send(control(&AttachControl::Exit { command: command(id, true) })).await.unwrap();
        // Left open: the client closes.
        while let Some(Ok(_)) = third.next().await {}
    });

    let mut attached = client.command_attach("box", id, 0);
    let way_in = attached.input();
    let mut seen = Vec::new();
    while let Some(event) = attached.next().await {
        let event = event.unwrap();
        match &event {
            AttachEvent::Start(_) => assert!(way_in.send(Input::Bytes(Bytes::from_static(b"abc"))).await),
            AttachEvent::Gap(_) => assert!(way_in.send(Input::Eof).await),
            _ => {}
        }
        seen.push(event);
    }
    drop(attached);
    script.await.unwrap();
    let exit = seen.pop().unwrap();
    assert!(matches!(exit, AttachEvent::Exit(c) if c.end.as_ref().unwrap().exit_code == Some(7)));
    assert!(matches!(seen.remove(0), AttachEvent::Start(_)));
    assert_eq!(
        seen,
        [
            AttachEvent::Stdout(Bytes::from_static(b"hello ")),
            AttachEvent::Stderr(Bytes::from_static(b"err")),
            AttachEvent::Reconnecting,
            AttachEvent::Reconnected,
            AttachEvent::Gap(3),
            AttachEvent::Stdout(Bytes::from_static(b"world")),
        ]
    );
}

#[tokio::test]
async fn an_attachment_that_is_refused_says_why_at_once() {
    let (server, client) = Server::new();
    let mut attached = client.command_attach("box", CommandId::generate(), 0);
    let (_, mut stream) = server.http().await;
    stream.write_all(unavailable().as_bytes()).await.unwrap();
    let failed = attached.next().await.unwrap().unwrap_err();
    assert_eq!(failed.code(), Some(ErrorCode::Unavailable));
    assert!(attached.next().await.is_none());
}

#[tokio::test]
async fn events_resume_after_the_last_one_seen() {
    let (server, client) = Server::new();
    let id = CommandId::generate();
    let script = tokio::spawn(async move {
        let sse =
            |event: &StreamEvent, at: u64| format!("id: {at}\ndata: {}\n\n", serde_json::to_string(event).unwrap());
        let start = StreamEvent::Start { command: command(id, false) };
        let out = |offset, text: &str| StreamEvent::Stdout { offset, data: crate::Text::Utf8(text.into()) };
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
        let (request, mut stream) = server.http().await;
        assert!(!request.to_lowercase().contains("last-event-id"));
        let text = format!("{head}: hi\n\n{}{}", sse(&start, 0), sse(&out(0, "ab"), 2));
        stream.write_all(text.as_bytes()).await.unwrap();
        drop(stream);
        let (request, mut stream) = server.http().await;
        assert!(request.to_lowercase().contains("last-event-id: 2\r\n"), "{request}");
        let exit = StreamEvent::Exit { command: command(id, true) };
        let text = format!("{head}{}{}{}", sse(&start, 2), sse(&out(2, "cd"), 4), sse(&exit, 4));
        stream.write_all(text.as_bytes()).await.unwrap();
    });
    let mut events = client.command_events("box", id, ShowCommand::default());
    let mut text = String::new();
    let mut starts = 0;
    while let Some(event) = events.next().await.unwrap() {
        match event {
            StreamEvent::Start { .. } => starts += 1,
            StreamEvent::Stdout { data: crate::Text::Utf8(data), .. } => text.push_str(&data),
            StreamEvent::Exit { .. } => text.push('!'),
            other => panic!("{other:?}"),
        }
    }
    script.await.unwrap();
    assert_eq!((starts, text.as_str()), (1, "abcd!"));
}

#[tokio::test]
async fn an_answer_cut_short_is_lost_not_ended() {
    let (server, client) = Server::new();
    let script = tokio::spawn(async move {
        let (request, mut stream) = server.http().await;
        assert!(request.starts_with("GET /v1/sessions/box/tar?path=%2Ftmp%2Fa%20b HTTP/1.1\r\n"), "{request}");
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n").await.unwrap();
    });
    let query = AtPath { path: "/tmp/a b".into(), user: None };
    let mut bytes = client.tar_read("box", &query).await.unwrap();
    assert_eq!(bytes.next().await.unwrap().as_deref(), Some(&b"abc"[..]));
    assert!(matches!(bytes.next().await, Err(ClientError::Lost(_))));
    script.await.unwrap();
}

#[tokio::test]
async fn a_body_is_sent_as_it_is_made_and_dial_is_raw() {
    let (server, client) = Server::new();
    let script = tokio::spawn(async move {
        let (request, mut stream) = server.http().await;
        assert!(request.starts_with("PUT /v1/sessions/box/tar?path=%2Fx HTTP/1.1\r\n"), "{request}");
        let mut body = Vec::new();
        while !body.ends_with(b"0\r\n\r\n") {
            body.push(stream.read_u8().await.unwrap());
        }
        assert_eq!(body, b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n");
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();

        let (request, mut stream) = server.http().await;
        assert!(request.to_lowercase().contains("upgrade: pepo-dial\r\n"), "{request}");
        let answer = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: pepo-dial\r\n\r\nearly";
        stream.write_all(answer.as_bytes()).await.unwrap();
        let mut four = [0; 4];
        stream.read_exact(&mut four).await.unwrap();
        stream.write_all(&four).await.unwrap();
    });
    let pieces = ["one", "two"].map(|t| Ok(Bytes::from(t)));
    let query = AtPath { path: "/x".into(), user: None };
    client.tar_write("box", &query, body_of(futures_util::stream::iter(pieces))).await.unwrap();
    let mut raw = client.dial("box", 80).await.unwrap();
    raw.write_all(b"ping").await.unwrap();
    let mut all = Vec::new();
    raw.read_to_end(&mut all).await.unwrap();
    assert_eq!(all, b"earlyping");
    script.await.unwrap();
}

#[tokio::test]
async fn failures_say_what_to_do() {
    let nowhere = Client::unix("/nonexistent/operator.sock");
    let failed = nowhere.version().await.unwrap_err();
    assert_eq!(failed.to_string(), "no daemon at /nonexistent/operator.sock");
    assert_eq!(failed.hint().as_deref(), Some("start one with `pepo up`"));

    let (server, client) = Server::new();
    let script = tokio::spawn(async move {
        let (_, mut stream) = server.http().await;
        stream.write_all(unavailable().as_bytes()).await.unwrap();
        let (_, mut stream) = server.http().await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    });
    let failed = client.session_show("box", &ShowSession::default()).await.unwrap_err();
    assert_eq!(failed.code(), Some(ErrorCode::Unavailable));
    let failed = client.session_show("box", &ShowSession::default()).await.unwrap_err();
    assert!(matches!(failed, ClientError::Unexpected { .. }), "{failed}");
    script.await.unwrap();
}
