//! Raw streams both ways, as WebSockets and ports are: most of them say nothing most of the time, so one that waits holds
//! no buffer.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Room of one direction while something moves.
const ROOM: usize = 32 * 1024;

/// Copies both ways until both have ended; the end of one direction is passed on and leaves the other open.
///
/// # Errors
/// Those of either side; they end both directions.
pub async fn both<A, B>(a: &mut A, b: &mut B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (mut there, mut back) = (Way::default(), Way::default());
    poll_fn(|cx| {
        let there = there.poll(cx, a, b)?;
        let back = back.poll(cx, b, a)?;
        if there.is_ready() && back.is_ready() { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await
}

/// One direction.
#[derive(Default)]
struct Way {
    /// What was read; there while something moves.
    room: Option<Box<[u8]>>,
    /// What of it has to be written.
    from: usize,
    to: usize,
    unflushed: bool,
    stage: Stage,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Moving,
    /// Nothing more is read.
    Ending,
    Over,
}

impl Way {
    fn poll<R, W>(&mut self, cx: &mut Context<'_>, reader: &mut R, writer: &mut W) -> Poll<io::Result<()>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        loop {
            if let Some(room) = &self.room {
                while self.from < self.to {
                    let written = ready!(Pin::new(&mut *writer).poll_write(cx, &room[self.from..self.to]))?;
                    if written == 0 {
                        return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                    }
                    self.from += written;
                    self.unflushed = true;
                }
            }
            match self.stage {
                Stage::Moving => {}
                Stage::Ending => {
                    self.room = None;
                    ready!(Pin::new(&mut *writer).poll_shutdown(cx))?;
                    self.stage = Stage::Over;
                    return Poll::Ready(Ok(()));
                }
                Stage::Over => return Poll::Ready(Ok(())),
            }
            let room = self.room.get_or_insert_with(|| vec![0; ROOM].into_boxed_slice());
            let mut into = ReadBuf::new(room);
            match Pin::new(&mut *reader).poll_read(cx, &mut into)? {
                Poll::Ready(()) => {
                    (self.from, self.to) = (0, into.filled().len());
                    if self.to == 0 {
                        self.stage = Stage::Ending;
                    }
                }
                Poll::Pending => {
                    self.room = None;
                    if self.unflushed {
                        ready!(Pin::new(&mut *writer).poll_flush(cx))?;
                        self.unflushed = false;
                    }
                    return Poll::Pending;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn all_of_it_passes_both_ways_and_an_end_leaves_the_other_direction_open() {
        let ((mut left, mut a), (mut b, mut right)) = (tokio::io::duplex(1000), tokio::io::duplex(100));
        let relayed = tokio::spawn(async move { both(&mut a, &mut b).await });
        let sent: Vec<u8> = (0..100_000).map(|n| (n % 251) as u8).collect();
        let whole = sent.clone();
        let writer = tokio::spawn(async move {
            left.write_all(&whole).await.expect("write");
            left.shutdown().await.expect("end");
            let mut back = Vec::new();
            left.read_to_end(&mut back).await.expect("read");
            back
        });
        let mut came = Vec::new();
        right.read_to_end(&mut came).await.expect("read");
        assert!(came == sent);
        right.write_all(b"and back").await.expect("write");
        drop(right);
        assert_eq!(writer.await.expect("task"), b"and back");
        relayed.await.expect("task").expect("both ended");
    }

    #[tokio::test]
    async fn one_that_waits_holds_nothing() {
        let ((mut left, mut a), (mut b, mut right)) = (tokio::io::duplex(100), tokio::io::duplex(100));
        let mut way = Way::default();
        let waits = poll_fn(|cx| Poll::Ready(way.poll(cx, &mut a, &mut b).is_pending())).await;
        assert!(waits && way.room.is_none());
        left.write_all(b"x").await.expect("write");
        let waits = poll_fn(|cx| Poll::Ready(way.poll(cx, &mut a, &mut b).is_pending())).await;
        assert!(waits && way.room.is_none());
        assert_eq!(right.read_u8().await.expect("byte"), b'x');
    }
}
