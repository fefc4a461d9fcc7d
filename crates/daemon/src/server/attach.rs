//! The WebSocket of one command: binary messages, the first byte the channel.
//!
//! Two halves of one task: output to the caller, and input, sizes and signals from it; so a signal passes while output is
//! stuck. Output that is there is joined into one message up to [`JOINED`]; a message that the caller does not take holds
//! the guest back. Nothing is buffered beyond that.
//!
//! ```text
//! 0 stdin    1 stdout    2 stderr    3 control, JSON: Start first, then Gap | Exit | Error; Resize | Signal | Eof back
//! ```

use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{Path, State};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{FutureExt as _, SinkExt as _, StreamExt as _};
use pepo_api::query::AttachCommand;
use pepo_api::{ATTACH_PROTOCOL, AttachControl, route};
use pepo_sandbox::guest::{self, Input};
use pepo_sandbox::proto::{self, PtySize};

use super::session::with_activation;
use super::{Call, Problem, Query, Routes};
use crate::Pepod;
use crate::session::{Command, Error, Follower, Found, Item, Session};
use crate::text::Side;

/// The largest message of joined output: four frames of the guest. Larger ones gain nothing and cost both sides memory.
const JOINED: usize = 256 * 1024;

/// Output of which more is probably there already.
const MUCH: usize = 8 * 1024;

/// The largest message taken. A caller's input comes in pieces of less.
const TAKEN: usize = 1 << 20;

/// Room for what comes, and the most that is read at once. Each attachment holds it all its life, and most say nothing.
const ROOM: usize = 16 * 1024;

/// Pieces of input under way: a caller of ours sends them with at most 32 KiB.
const INPUTS: usize = 16;

/// How often a caller that is sent nothing is tried: while its input is stuck, nothing else tells that it left.
const PING_EVERY: Duration = Duration::from_secs(5);

/// How long the last message may take to be taken, and a silent connection to be noticed.
const LAST_WITHIN: Duration = Duration::from_secs(30);

/// A caller that says nothing, not even to a ping, for so long is gone.
const SILENT: Duration = Duration::from_secs(60);

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::command_attach, attach);
}

async fn attach(
    State(pepod): State<Pepod>,
    call: Call,
    Path((which, id)): Path<(String, String)>,
    Query(query): Query<AttachCommand>,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Problem> {
    let unknown =
        || Error::NotFound { what: "command", which: id.chars().take(80).flat_map(char::escape_debug).collect() };
    let command_id = id.parse().map_err(|_| unknown())?;
    let from = query.offset.unwrap_or(0);
    let (session_id, live) = match pepod.sessions().find(call.app, &which).await? {
        Found::Live(session) => (session.id(), Some(session)),
        Found::Ended(row) => (row.id, None),
    };
    if let Some(session) = &live {
        session.is_still(call.activation)?;
    }
    let known = live.as_ref().and_then(|session| session.commands().get(command_id));
    let mut follower = match (&live, known) {
        (Some(session), Some(command)) => Follower::join_with_input(session, command, from).await?,
        _ => {
            let row = pepod.store().command(session_id, command_id).await.map_err(Error::from)?;
            Follower::of_record(row.ok_or_else(unknown)?, pepod.sessions().shelf(), from)?
        }
    };
    let activation = follower.shown().activation;
    let input = follower.take_input();
    let upgraded = upgrade
        .protocols([ATTACH_PROTOCOL])
        .max_message_size(TAKEN)
        .max_frame_size(TAKEN)
        .read_buffer_size(ROOM)
        .write_buffer_size(0)
        .max_write_buffer_size(2 * JOINED)
        .on_upgrade(move |socket| serve(socket, live, follower, input));
    Ok(with_activation(activation, upgraded))
}

async fn serve(socket: WebSocket, session: Option<Session>, follower: Follower, input: Option<Input>) {
    let (sink, source) = socket.split();
    let command = follower.command().cloned();
    let input_offset = input.as_ref().map_or(0, Input::next);
    let mut outward = Outward { sink, follower };
    let start = AttachControl::Start { command: Box::new(outward.follower.shown()), input_offset };
    if outward.control(&start).await.is_err() {
        return;
    }
    let inward = inward(source, session, command, input);
    tokio::pin!(inward);
    tokio::select! {
        biased;
        // Its end, or a caller that takes nothing any more.
        over = outward.run() => {
            if over {
                // Waits for the caller's close, so that the last message is not lost in a reset.
                let _ = tokio::time::timeout(LAST_WITHIN, inward).await;
            }
        }
        // The caller left: dropping the follower is what follows from that.
        () = &mut inward => {}
    }
}

struct Outward {
    sink: SplitSink<WebSocket, Message>,
    follower: Follower,
}

impl Outward {
    /// Sends until the command's end. Whether it came to that.
    async fn run(&mut self) -> bool {
        let mut held: Option<Item> = None;
        loop {
            let item = match held.take() {
                Some(item) => Ok(item),
                None => match tokio::time::timeout(PING_EVERY, self.follower.next()).await {
                    Ok(item) => item,
                    Err(_) => {
                        if self.sink.send(Message::Ping(Bytes::new())).await.is_err() {
                            return false;
                        }
                        continue;
                    }
                },
            };
            let last = match item {
                Ok(Item::Data { side, bytes, .. }) => {
                    let (message, next) = self.join(side, bytes);
                    held = next;
                    if self.sink.send(Message::Binary(message)).await.is_err() {
                        return false;
                    }
                    continue;
                }
                Ok(Item::Gap { from, to }) => {
                    if self.control(&AttachControl::Gap { from, to }).await.is_err() {
                        return false;
                    }
                    continue;
                }
                Ok(Item::End) => AttachControl::Exit { command: Box::new(self.follower.shown()) },
                // A connection that breaks off is taken up again by the caller; an Error would be the last word.
                Err(error) if error.is_a_lost_stream() => return false,
                Err(error) => {
                    let Problem(error) = error.into();
                    AttachControl::Error { error }
                }
            };
            self.follower.answered();
            let close = CloseFrame { code: close_code::NORMAL, reason: "".into() };
            let said = async {
                self.control(&last).await?;
                self.sink.send(Message::Close(Some(close))).await
            };
            return matches!(tokio::time::timeout(LAST_WITHIN, said).await, Ok(Ok(())));
        }
    }

    /// One message of these bytes and those of the same channel that are there already; what came instead is next.
    fn join(&mut self, side: Side, bytes: Bytes) -> (Bytes, Option<Item>) {
        let channel = match side {
            Side::Out => 1,
            Side::Err => 2,
        };
        // Much is followed by more: room for it is made once. A prompt's few bytes take no more than they are.
        let room = if bytes.len() < MUCH { 1 + bytes.len() } else { JOINED + 64 * 1024 };
        let mut message = BytesMut::with_capacity(room);
        message.put_u8(channel);
        message.put_slice(&bytes);
        while message.len() < JOINED {
            match self.follower.next().now_or_never() {
                Some(Ok(Item::Data { side: of, bytes, .. })) if of == side => message.put_slice(&bytes),
                Some(Ok(other)) => return (message.freeze(), Some(other)),
                // An error comes again.
                Some(Err(_)) | None => break,
            }
        }
        (message.freeze(), None)
    }

    async fn control(&mut self, control: &AttachControl) -> Result<(), axum::Error> {
        let json = serde_json::to_vec(control).unwrap_or_default();
        let mut message = BytesMut::with_capacity(1 + json.len());
        message.put_u8(3);
        message.put_slice(&json);
        self.sink.send(Message::Binary(message.freeze())).await
    }
}

/// Takes what the caller sends, until it leaves.
async fn inward(
    mut source: SplitStream<WebSocket>,
    session: Option<Session>,
    command: Option<Arc<Command>>,
    mut input: Option<Input>,
) {
    // Input goes by a short queue, so that a program that does not read keeps no signal from it for a while.
    let (pieces, mut waiting) = tokio::sync::mpsc::channel::<Option<Bytes>>(INPUTS);
    let feeding = async {
        while let Some(piece) = waiting.recv().await {
            let Some(input) = &mut input else { continue };
            let sent = match piece {
                Some(bytes) => input.send(input.next(), bytes).await,
                None => input.eof().await,
            };
            if let Err(error) = sent {
                // Its end is told on the other half.
                tracing::debug!(%error, "input is not taken any more");
                break;
            }
        }
        // Nobody takes more: what comes is let go.
        while waiting.recv().await.is_some() {}
    };
    let listening = async {
        let mut stuck: Option<Option<Bytes>> = None;
        loop {
            let message = tokio::select! {
                biased;
                room = pieces.reserve(), if stuck.is_some() => {
                    if let (Ok(room), Some(piece)) = (room, stuck.take()) {
                        room.send(piece);
                    }
                    continue;
                }
                message = tokio::time::timeout(SILENT, source.next()), if stuck.is_none() => message,
            };
            let bytes = match message {
                Ok(Some(Ok(Message::Binary(bytes)))) => bytes,
                Ok(Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Text(_)))) => continue,
                Ok(Some(Ok(Message::Close(_)) | Err(_)) | None) | Err(_) => return,
            };
            match bytes.first() {
                Some(0) => stuck = Some(Some(bytes.slice(1..))),
                Some(3) => match serde_json::from_slice::<AttachControl>(&bytes[1..]) {
                    Ok(AttachControl::Eof) => stuck = Some(None),
                    Ok(control) => {
                        if let (Some(session), Some(command)) = (&session, &command)
                            && let Err(error) = steer(session, command, control).await
                        {
                            tracing::debug!(command = %command.id(), %error, "could not be steered");
                        }
                    }
                    Err(_) => return,
                },
                // A channel that is the daemon's, or none.
                _ => return,
            }
        }
    };
    tokio::select! {
        biased;
        () = listening => {}
        () = feeding => {}
    }
}

async fn steer(session: &Session, command: &Command, control: AttachControl) -> Result<(), guest::Error> {
    let Some(guest) = session.guest() else { return Ok(()) };
    match control {
        AttachControl::Resize { cols, rows } => {
            let size = PtySize { cols: cols.clamp(1, 1000), rows: rows.clamp(1, 1000) };
            guest.resize(command.op(), size).await
        }
        AttachControl::Signal { signal } => match crate::signal::number(&signal) {
            Some(signal) => guest.signal(proto::Signal { target: command.op(), signal, tree: false }).await,
            None => Ok(()),
        },
        // The others are the daemon's to say.
        _ => Ok(()),
    }
}
