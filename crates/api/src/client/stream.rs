//! Streams that answer: raw bytes, server-sent events, and the events of one command across a restart of the daemon.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::{Client, ClientError, IDLE, LEASE};
use crate::query::ShowCommand;
use crate::{CommandId, StreamEvent};

/// One line of an event stream is shorter than this: 64 KiB of output as base64 with room around it.
const MAX_EVENT: usize = 1 << 20;

/// The bytes of an answer, as they come.
pub struct ByteStream {
    what: String,
    body: Incoming,
    limit: Duration,
}

impl ByteStream {
    pub(super) fn new(what: String, body: Incoming) -> Self {
        ByteStream { what, body, limit: IDLE }
    }

    pub(super) fn be_patient(&mut self, longer: Duration) {
        self.limit = IDLE.saturating_add(longer);
    }

    /// Never takes silence for a fault: for streams that follow something quiet.
    pub fn without_idle_limit(mut self) -> Self {
        self.limit = Duration::from_secs(u64::from(u32::MAX));
        self
    }

    /// The next piece; nothing at the orderly end. A connection that breaks is [`ClientError::Lost`].
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            let frame = tokio::time::timeout(self.limit, self.body.frame())
                .await
                .map_err(|_| ClientError::Silent { what: self.what.clone(), seconds: self.limit.as_secs() })?;
            match frame {
                None => return Ok(None),
                Some(Err(_)) => return Err(ClientError::Lost(self.what.clone())),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data()
                        && !data.is_empty()
                    {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }
}

/// One event as it stands in the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RawEvent {
    pub(super) id: Option<String>,
    pub(super) data: String,
}

/// Takes bytes, gives events. Lines end with LF, CRLF or CR; comments and unknown fields are skipped.
#[derive(Default)]
pub(super) struct SseParser {
    line: Vec<u8>,
    after_cr: bool,
    event: RawEvent,
    has_data: bool,
    ready: VecDeque<RawEvent>,
}

impl SseParser {
    /// Feeds a piece; an error when a line or event is larger than any of ours.
    pub(super) fn feed(&mut self, piece: &[u8]) -> Result<(), &'static str> {
        for &byte in piece {
            let after_cr = std::mem::replace(&mut self.after_cr, byte == b'\r');
            match byte {
                b'\n' if after_cr => {}
                b'\n' | b'\r' => self.end_of_line()?,
                other if self.line.len() < MAX_EVENT => self.line.push(other),
                _ => return Err("a line of more than 1 MiB"),
            }
        }
        Ok(())
    }

    pub(super) fn take(&mut self) -> Option<RawEvent> {
        self.ready.pop_front()
    }

    fn end_of_line(&mut self) -> Result<(), &'static str> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            if std::mem::take(&mut self.has_data) {
                self.ready.push_back(event);
            }
            return Ok(());
        }
        let line = String::from_utf8(line).map_err(|_| "a line that is not UTF-8")?;
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" => self.event.id = Some(value.to_owned()),
            "data" => {
                if self.has_data {
                    self.event.data.push('\n');
                }
                if self.event.data.len() + value.len() > MAX_EVENT {
                    return Err("an event of more than 1 MiB");
                }
                self.event.data.push_str(value);
                self.has_data = true;
            }
            _ => {}
        }
        Ok(())
    }
}

/// Typed server-sent events.
pub struct EventStream<T> {
    bytes: ByteStream,
    parser: SseParser,
    last_id: Option<String>,
    kind: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> EventStream<T> {
    pub(super) fn new(bytes: ByteStream) -> Self {
        EventStream { bytes, parser: SseParser::default(), last_id: None, kind: PhantomData }
    }

    /// The id of the last event that had one.
    pub fn last_id(&self) -> Option<&str> {
        self.last_id.as_deref()
    }

    /// The next event; nothing when the stream ended, which the caller compares with the events it has seen.
    pub async fn next(&mut self) -> Result<Option<T>, ClientError> {
        loop {
            if let Some(event) = self.parser.take() {
                let value = serde_json::from_str(&event.data).map_err(|error| ClientError::Unexpected {
                    what: self.bytes.what.clone(),
                    found: format!("{error}: {}", event.data.chars().take(200).collect::<String>()),
                })?;
                if event.id.is_some() {
                    self.last_id = event.id;
                }
                return Ok(Some(value));
            }
            match self.bytes.next().await? {
                None => return Ok(None),
                Some(piece) => self
                    .parser
                    .feed(&piece)
                    .map_err(|why| ClientError::Unexpected { what: self.bytes.what.clone(), found: why.to_owned() })?,
            }
        }
    }
}

/// The events of one command. A lost connection is taken up again with `Last-Event-ID` for up to 30 s, so no output is
/// missing or repeated when the daemon restarts.
pub struct CommandEvents {
    client: Client,
    session: String,
    command: CommandId,
    query: ShowCommand,
    stream: Option<EventStream<StreamEvent>>,
    last_id: Option<String>,
    started: bool,
    over: bool,
}

impl CommandEvents {
    pub(super) fn new(client: Client, session: &str, command: CommandId, query: ShowCommand) -> Self {
        CommandEvents {
            client,
            session: session.to_owned(),
            command,
            query,
            stream: None,
            last_id: None,
            started: false,
            over: false,
        }
    }

    /// The next event. After `Exit`, or at the end of what is kept when the query said not to follow, nothing.
    pub async fn next(&mut self) -> Result<Option<StreamEvent>, ClientError> {
        let mut give_up: Option<Instant> = None;
        let mut pause = Duration::from_millis(50);
        loop {
            if self.over {
                return Ok(None);
            }
            let result = match self.step().await {
                Ok(Some(StreamEvent::Error { error })) => Err(ClientError::Api(error)),
                other => other,
            };
            match result {
                Ok(Some(StreamEvent::Start { .. })) if std::mem::replace(&mut self.started, true) => {}
                Ok(Some(event)) => {
                    self.over = matches!(event, StreamEvent::Exit { .. });
                    return Ok(Some(event));
                }
                Ok(None) if self.query.follow == Some(false) => {
                    self.over = true;
                    return Ok(None);
                }
                lost => {
                    let error = match lost {
                        Err(error) if !error.may_pass() || !self.started => {
                            self.over = true;
                            return Err(error);
                        }
                        Err(error) => error,
                        Ok(_) => ClientError::Lost(format!("the events of {}", self.command)),
                    };
                    self.stream = None;
                    let now = Instant::now();
                    if now >= *give_up.get_or_insert(now + LEASE) {
                        self.over = true;
                        return Err(error);
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
            }
        }
    }

    async fn step(&mut self) -> Result<Option<StreamEvent>, ClientError> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => {
                let opened = self
                    .client
                    .command_events_once(&self.session, self.command, &self.query, self.last_id.as_deref())
                    .await?;
                self.stream.insert(opened)
            }
        };
        let event = stream.next().await?;
        if let Some(id) = stream.last_id() {
            self.last_id = Some(id.to_owned());
        }
        Ok(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &[u8], step: usize) -> Vec<RawEvent> {
        let mut parser = SseParser::default();
        for piece in text.chunks(step) {
            parser.feed(piece).unwrap();
        }
        std::iter::from_fn(|| parser.take()).collect()
    }

    #[test]
    fn events_are_read_however_they_are_cut() {
        let text = b": hello\nid: 7\nevent: x\ndata: {\"a\":\r\ndata:1}\r\n\r\n:\n\ndata\n\nid: 9\n\ndata: cut";
        let whole = parse(text, text.len());
        assert_eq!(
            whole,
            [RawEvent { id: Some("7".into()), data: "{\"a\":\n1}".into() }, RawEvent { id: None, data: String::new() },]
        );
        for step in 1..12 {
            assert_eq!(parse(text, step), whole, "{step}");
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = SseParser::default();
        let piece = vec![b'x'; 64 << 10];
        let failed = (0..64).any(|_| parser.feed(&piece).is_err());
        assert!(failed && parser.line.len() <= MAX_EVENT);
    }
}
