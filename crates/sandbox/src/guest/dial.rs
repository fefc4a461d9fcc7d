//! A TCP connection inside the guest, as bytes both ways: the only ingress there is.
//!
//! Each direction ends by its own `Eof`, so a half-closed connection stays usable the other way. [`Dialed`] is shut
//! down in the usual way; dropping it before both directions have ended cancels the connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes};
use pepo_proto::{Channel, Dial, Frame, MAX_DATA, OpId, Operation};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Error, Guest, Leaving, Talk, done, new_op};

/// A connection to a port on the guest's loopback.
#[derive(Debug)]
pub struct Dialed {
    talk: Talk,
    /// Bytes received and not yet read.
    received: Bytes,
    /// Whether the guest's side has ended.
    down_ended: bool,
    sent: u64,
    up_ended: bool,
}

impl Guest {
    /// Connects to a TCP port in the guest. [`pepo_proto::FailureCode::Refused`] where nothing listens.
    pub async fn dial(&self, port: u16) -> Result<Dialed, Error> {
        let talk = self.open(new_op(), Operation::Dial(Dial { port })).await?;
        Ok(Dialed { talk, received: Bytes::new(), down_ended: false, sent: 0, up_ended: false })
    }
}

impl Dialed {
    /// The operation's name.
    pub fn op(&self) -> OpId {
        self.talk.op
    }
}

impl AsyncRead for Dialed {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let dialed = self.get_mut();
        while dialed.received.is_empty() && !dialed.down_ended {
            match ready!(dialed.talk.reader.poll_frame(cx)).map_err(failed)? {
                Frame::Data { bytes, .. } => dialed.received = bytes,
                Frame::Eof { .. } => dialed.down_ended = true,
                Frame::End(outcome) => {
                    dialed.down_ended = true;
                    done(outcome).map_err(failed)?;
                }
                _ => return Poll::Ready(Err(io::ErrorKind::InvalidData.into())),
            }
        }
        let length = dialed.received.len().min(into.remaining());
        into.put_slice(&dialed.received[..length]);
        dialed.received.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Dialed {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let dialed = self.get_mut();
        ready!(dialed.talk.writer.poll_flush(cx)).map_err(failed)?;
        if dialed.up_ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let taken = bytes.len().min(MAX_DATA);
        dialed
            .talk
            .writer
            .queue_data(Channel::In, dialed.sent, Bytes::copy_from_slice(&bytes[..taken]))
            .map_err(failed)?;
        dialed.sent += taken as u64;
        // Taken is taken: what the stream does not take now goes with the next write, flush or shutdown.
        match dialed.talk.writer.poll_flush(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(failed(error))),
            _ => Poll::Ready(Ok(taken)),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().talk.writer.poll_flush(cx).map_err(failed)
    }

    /// Ends this side's direction; the other goes on.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let dialed = self.get_mut();
        if !dialed.up_ended {
            dialed.up_ended = true;
            dialed.talk.writer.queue(Frame::Eof { channel: Channel::In, offset: dialed.sent }).map_err(failed)?;
        }
        match ready!(dialed.talk.writer.poll_flush(cx)) {
            // The connection is over: there is nothing left to end.
            Ok(()) | Err(Error::Ended) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(failed(error))),
        }
    }
}

impl Drop for Dialed {
    fn drop(&mut self) {
        if self.down_ended && self.up_ended && self.talk.writer.queued() == 0 {
            self.talk.leave.leaving = Leaving::Linger;
            // The end may be here already, unread.
            let mut cx = Context::from_waker(Waker::noop());
            let _ = self.talk.reader.poll_frame(&mut cx);
        }
    }
}

fn failed(error: Error) -> io::Error {
    let kind = match &error {
        Error::Lost(_) | Error::Failed(_) => io::ErrorKind::ConnectionReset,
        Error::Protocol(_) => io::ErrorKind::InvalidData,
        Error::Ended => io::ErrorKind::BrokenPipe,
        Error::Timeout { .. } => io::ErrorKind::TimedOut,
        Error::Unreachable(_) | Error::Busy => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
