//! Bodies on their way through: bounded in size where the row says so, and in the time between two pieces always.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep};

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is larger than its row takes.
    #[error("the body is larger than {0} bytes")]
    TooLarge(u64),
    /// Nothing came for so long.
    #[error("no byte of the body came for {0:?}")]
    Idle(Duration),
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

/// A body that passes through. `held` lives as long as the body does.
pub struct Passing<H> {
    inner: Incoming,
    left: Option<u64>,
    most: u64,
    idle: Duration,
    timer: Pin<Box<Sleep>>,
    _held: H,
}

impl<H> Passing<H> {
    /// Passes at most `most` bytes (all, where absent), with at most `idle` between two pieces that somebody waits for.
    pub fn new(inner: Incoming, most: Option<u64>, idle: Duration, held: H) -> Self {
        let timer = Box::pin(tokio::time::sleep(idle));
        Self { inner, left: most, most: most.unwrap_or(u64::MAX), idle, timer, _held: held }
    }
}

impl<H: Unpin> Body for Passing<H> {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        loop {
            let frame = match Pin::new(&mut this.inner).poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    ready!(this.timer.as_mut().poll(cx));
                    return Poll::Ready(Some(Err(Error::Idle(this.idle))));
                }
            };
            this.timer.as_mut().reset(Instant::now() + this.idle);
            let data = match frame {
                None => return Poll::Ready(None),
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
