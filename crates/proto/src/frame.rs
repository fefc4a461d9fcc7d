//! Frames: how messages and payload lie on a stream.
//!
//! Payload frames (`Data`, `Eof`, `Gap`) have fixed layouts, since they carry the bulk; the rest are numbered-field CBOR.
//! [`Frames`] is the one codec, used by both sides and by the fuzzer.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio_util::codec::{Decoder, Encoder};

use crate::message::{Event, Outcome, Request};

/// Bytes before a frame's body: the length and the kind.
pub const HEADER: usize = 5;

/// The largest body of a frame.
pub const MAX_BODY: usize = 64 * 1024;

/// Bytes of a `Data` body before its payload: channel and offset.
const DATA_HEAD: usize = 9;

/// The largest payload of one `Data` frame.
pub const MAX_DATA: usize = MAX_BODY - DATA_HEAD;

/// Which of an operation's byte streams a payload belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Channel {
    /// Host to guest: a command's standard input, a file being written, a tar going in, a connection's upward half.
    In = 0,
    /// Guest to host: standard output (a PTY's only output), a file being read, a tar coming out, a connection's downward half.
    Out = 1,
    /// Guest to host: standard error.
    Err = 2,
}

impl TryFrom<u8> for Channel {
    type Error = Error;

    fn try_from(byte: u8) -> Result<Self, Error> {
        match byte {
            0 => Ok(Channel::In),
            1 => Ok(Channel::Out),
            2 => Ok(Channel::Err),
            other => Err(Error::Channel(other)),
        }
    }
}

/// One frame.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// The first frame of a stream, from the host.
    Request(Request),
    /// The guest took the operation (or found it already running under this id).
    Accepted,
    /// Payload. `offset` counts payload bytes before this one: over [`Channel::In`] alone for input, over
    /// [`Channel::Out`] and [`Channel::Err`] together, in order, for output.
    Data {
        /// The stream it belongs to.
        channel: Channel,
        /// Bytes before the first byte of `bytes`.
        offset: u64,
        /// At most [`MAX_DATA`] bytes, at least one.
        bytes: Bytes,
    },
    /// Nothing more follows on this channel; `offset` as for `Data`.
    Eof {
        /// The stream that ended.
        channel: Channel,
        /// Where it ended.
        offset: u64,
    },
    /// Output from `from` up to `to` is no longer kept and will not be sent.
    Gap {
        /// First missing offset.
        from: u64,
        /// First offset after the hole.
        to: u64,
    },
    /// Something an operation reports while it runs.
    Event(Event),
    /// The last frame: what became of the operation. The receiver closes.
    End(Outcome),
}

/// Why bytes are not a frame. All of them end the stream; none of them can be resumed from.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The announced length is beyond [`MAX_BODY`] or has no room for a kind.
    #[error("frame of {0} bytes is outside 1..={max}", max = MAX_BODY + 1)]
    Length(usize),
    /// The kind is none we know.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// The channel is none we know.
    #[error("unknown channel {0}")]
    Channel(u8),
    /// A fixed layout has the wrong size or an impossible value.
    #[error("malformed {0} frame")]
    Malformed(&'static str),
    /// A message does not decode.
    #[error("undecodable {what} message")]
    Message {
        /// Which frame held it.
        what: &'static str,
        /// The decoder's reason.
        source: minicbor::decode::Error,
    },
    /// A message of ours is larger than a frame holds.
    #[error("{what} message of {bytes} bytes is over {MAX_BODY}")]
    TooLarge {
        /// Which frame should have held it.
        what: &'static str,
        /// Its encoded size.
        bytes: usize,
    },
    /// A frame that the order of its operation does not allow here.
    #[error("frame out of order: {0}")]
    Order(&'static str),
    /// The stream ended inside a frame.
    #[error("stream ended inside a frame")]
    Truncated,
    /// The stream itself failed.
    #[error("stream failed")]
    Io(#[from] std::io::Error),
}

mod kind {
    pub const REQUEST: u8 = 1;
    pub const ACCEPTED: u8 = 2;
    pub const DATA: u8 = 3;
    pub const EOF: u8 = 4;
    pub const GAP: u8 = 5;
    pub const EVENT: u8 = 6;
    pub const END: u8 = 7;
}

/// The codec. Holds at most one frame beyond what the caller's buffer already has.
#[derive(Debug, Default)]
pub struct Frames(());

impl Frames {
    /// A codec at the start of a stream.
    pub fn new() -> Self {
        Frames(())
    }
}

impl Decoder for Frames {
    type Item = Frame;
    type Error = Error;

    fn decode(&mut self, src: &mut BytesMut) -> Result<Option<Frame>, Error> {
        let Some(head) = src.first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*head) as usize;
        if length == 0 || length > MAX_BODY + 1 {
            return Err(Error::Length(length));
        }
        let whole = 4 + length;
        if src.len() < whole {
            src.reserve(whole - src.len());
            return Ok(None);
        }
        let mut frame = src.split_to(whole).freeze();
        frame.advance(4);
        let kind = frame.get_u8();
        parse(kind, frame).map(Some)
    }

    fn decode_eof(&mut self, src: &mut BytesMut) -> Result<Option<Frame>, Error> {
        match self.decode(src)? {
            Some(frame) => Ok(Some(frame)),
            None if src.is_empty() => Ok(None),
            None => Err(Error::Truncated),
        }
    }
}

fn parse(kind: u8, mut body: Bytes) -> Result<Frame, Error> {
    Ok(match kind {
        kind::REQUEST => Frame::Request(message("request", &body)?),
        kind::ACCEPTED if body.is_empty() => Frame::Accepted,
        kind::ACCEPTED => return Err(Error::Malformed("accepted")),
        kind::DATA => {
            if body.len() <= DATA_HEAD {
                return Err(Error::Malformed("data"));
            }
            let channel = Channel::try_from(body.get_u8())?;
            Frame::Data { channel, offset: body.get_u64_le(), bytes: body }
        }
        kind::EOF => {
            if body.len() != DATA_HEAD {
                return Err(Error::Malformed("eof"));
            }
            let channel = Channel::try_from(body.get_u8())?;
            Frame::Eof { channel, offset: body.get_u64_le() }
        }
        kind::GAP => {
            if body.len() != 16 {
                return Err(Error::Malformed("gap"));
            }
            let (from, to) = (body.get_u64_le(), body.get_u64_le());
            if from >= to {
                return Err(Error::Malformed("gap"));
            }
            Frame::Gap { from, to }
        }
        kind::EVENT => Frame::Event(message("event", &body)?),
        kind::END => Frame::End(message("end", &body)?),
        other => return Err(Error::Kind(other)),
    })
}

/// Decodes one message and nothing after it: trailing bytes are an error, or two sides could read one frame differently.
fn message<'b, T: minicbor::Decode<'b, ()>>(what: &'static str, body: &'b [u8]) -> Result<T, Error> {
    let mut decoder = minicbor::Decoder::new(body);
    let message = decoder.decode().map_err(|source| Error::Message { what, source })?;
    if decoder.position() != body.len() {
        return Err(Error::Malformed(what));
    }
    Ok(message)
}

impl Encoder<Frame> for Frames {
    type Error = Error;

    fn encode(&mut self, frame: Frame, dst: &mut BytesMut) -> Result<(), Error> {
        match frame {
            Frame::Request(request) => put_message(dst, kind::REQUEST, "request", &request),
            Frame::Accepted => {
                put_head(dst, kind::ACCEPTED, 0);
                Ok(())
            }
            Frame::Data { channel, offset, bytes } => {
                let head = data_head(channel, offset, bytes.len())?;
                dst.reserve(head.len() + bytes.len());
                dst.put_slice(&head);
                dst.put_slice(&bytes);
                Ok(())
            }
            Frame::Eof { channel, offset } => {
                put_head(dst, kind::EOF, DATA_HEAD);
                dst.put_u8(channel as u8);
                dst.put_u64_le(offset);
                Ok(())
            }
            Frame::Gap { from, to } => {
                put_head(dst, kind::GAP, 16);
                dst.put_u64_le(from);
                dst.put_u64_le(to);
                Ok(())
            }
            Frame::Event(event) => put_message(dst, kind::EVENT, "event", &event),
            Frame::End(outcome) => put_message(dst, kind::END, "end", &outcome),
        }
    }
}

/// The bytes of a `Data` frame before its payload, for a writer that sends the payload from where it lies.
pub fn data_head(channel: Channel, offset: u64, payload: usize) -> Result<[u8; HEADER + DATA_HEAD], Error> {
    if payload == 0 {
        return Err(Error::Malformed("data"));
    }
    if payload > MAX_DATA {
        return Err(Error::TooLarge { what: "data", bytes: payload });
    }
    let mut head = [0; HEADER + DATA_HEAD];
    head[..4].copy_from_slice(&((1 + DATA_HEAD + payload) as u32).to_le_bytes());
    head[4] = kind::DATA;
    head[5] = channel as u8;
    head[6..].copy_from_slice(&offset.to_le_bytes());
    Ok(head)
}

fn put_head(dst: &mut BytesMut, kind: u8, body: usize) {
    dst.reserve(HEADER + body);
    dst.put_u32_le(body as u32 + 1);
    dst.put_u8(kind);
}

fn put_message<T: minicbor::Encode<()>>(
    dst: &mut BytesMut,
    kind: u8,
    what: &'static str,
    message: &T,
) -> Result<(), Error> {
    let body = minicbor::to_vec(message).map_err(|_| Error::Malformed(what))?;
    if body.len() > MAX_BODY {
        return Err(Error::TooLarge { what, bytes: body.len() });
    }
    put_head(dst, kind, body.len());
    dst.put_slice(&body);
    Ok(())
}
