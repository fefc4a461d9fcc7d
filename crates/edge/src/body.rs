//! Bodies on their way through: bounded in size where the row says so, and in the time between two pieces always.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::Sleep;

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is larger than its row takes.
    #[error("the body is larger than {0} bytes")]
    TooLarge(u64),
    /// Nothing came for so long.
    #[error("no byte of the body came for {0:?}")]
    Idle(Duration),
    /// It was not whole for so long.
    #[error("the body was not whole within {0:?}")]
    Slow(Duration),
    /// The port that it comes from is published no more.
    #[error("the port is published no more")]
    Withdrawn,
    /// The connection broke.
    #[error("the connection broke")]
    Broken(#[source] hyper::Error),
}

/// Any body of ours.
pub type Any = BoxBody<Bytes, Error>;

/// No bytes.
pub fn nothing() -> Any {
    Empty::new().map_err(|never| match never {}).boxed()
}

/// These bytes.
pub fn bytes(bytes: impl Into<Bytes>) -> Any {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

/// The same body; `held` lives as long as it does.
pub fn holding(body: Any, held: impl Send + Sync + Unpin + 'static) -> Any {
    Holding { body, _held: held }.boxed()
}

struct Holding<H> {
    body: Any,
    _held: H,
}

impl<H: Unpin> Body for Holding<H> {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What a body holds while it passes.
pub trait Held {
    /// The body passed to its end.
    fn whole(&mut self);
}

impl Held for () {
    fn whole(&mut self) {}
}

impl<A: Held, B> Held for (A, B) {
    fn whole(&mut self) {
        self.0.whole();
    }
}

/// A body that passes through. `held` lives as long as the body does.
pub struct Passing<H: Held> {
    inner: Incoming,
    left: Option<u64>,
    most: u64,
    idle: Duration,
    /// Runs while somebody waits for the next piece.
    waiting: Option<Pin<Box<Sleep>>>,
    held: H,
    ended: bool,
}

impl<H: Held> Drop for Passing<H> {
    fn drop(&mut self) {
        // Where the length is known nobody asks for the end.
        if self.ended || self.inner.is_end_stream() {
            self.held.whole();
        }
    }
}

impl<H: Held> Passing<H> {
    /// Passes at most `most` bytes (all, where absent), with at most `idle` between two pieces that somebody waits for.
    pub fn new(inner: Incoming, most: Option<u64>, idle: Duration, held: H) -> Self {
        Self { inner, left: most, most: most.unwrap_or(u64::MAX), idle, waiting: None, held, ended: false }
    }
}

impl<H: Held + Unpin> Body for Passing<H> {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        loop {
            let frame = match Pin::new(&mut this.inner).poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    let timer = this.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(this.idle)));
                    ready!(timer.as_mut().poll(cx));
                    return Poll::Ready(Some(Err(Error::Idle(this.idle))));
                }
            };
            this.waiting = None;
            let data = match frame {
                None => {
                    this.ended = true;
                    return Poll::Ready(None);
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(Error::Broken(error)))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => data,
                    // Trailers are a connection's matter.
                    Err(_) => continue,
                },
            };
            if let Some(left) = &mut this.left {
                match left.checked_sub(data.len() as u64) {
                    Some(rest) => *left = rest,
                    None => return Poll::Ready(Some(Err(Error::TooLarge(this.most)))),
                }
            }
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
