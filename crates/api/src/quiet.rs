//! The Unix socket between edge and pepod, on either side of it: watched for what comes, and for nothing else.
//!
//! The kernel says that a Unix socket has room whenever the other side has read something, whoever waits for that. tokio's
//! own watches for both, so each message costs its sender a wake-up that tells nothing. Here room is watched for only where
//! there was none.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// The most that is read at once.
const MOST: usize = 64 * 1024;

/// The stream.
pub struct Quiet {
    comes: AsyncFd<UnixStream>,
    /// A second descriptor of the socket, once a write had to wait.
    room: Option<AsyncFd<UnixStream>>,
}

#[expect(
    deprecated,
    reason = "unsound for what is not its descriptor's owner, and unsafe is what takes its place; a UnixStream is"
)]
fn watch(stream: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    AsyncFd::with_interest(stream, interest)
}

impl Quiet {
    /// Watches this socket.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Quiet { comes: watch(stream, Interest::READABLE)?, room: None })
    }

    fn poll_room(
        &mut self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        match write(self.comes.get_ref()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            done => return Poll::Ready(done),
        }
        if self.room.is_none() {
            self.room = Some(watch(self.comes.get_ref().try_clone()?, Interest::WRITABLE)?);
        }
        let Some(room) = &self.room else { return Poll::Ready(Err(io::ErrorKind::NotConnected.into())) };
        loop {
            let mut ready = ready!(room.poll_write_ready(cx))?;
            if let Ok(done) = ready.try_io(|stream| write(stream.get_ref())) {
                return Poll::Ready(done);
            }
        }
    }
}

impl AsyncRead for Quiet {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.comes.poll_read_ready(cx))?;
            let most = buf.remaining().min(MOST);
            let room = buf.initialize_unfilled_to(most);
            match ready.try_io(|stream| stream.get_ref().read(room)) {
                Ok(Ok(read)) => {
                    // Less than there was room for is all there was.
                    if read > 0 && read < most {
                        ready.clear_ready();
                    }
                    buf.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Ok(Err(error)) => return Poll::Ready(Err(error)),
                Err(_) => {}
            }
        }
    }
}

impl AsyncWrite for Quiet {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_room(cx, |mut stream| stream.write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_room(cx, |mut stream| stream.write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.comes.get_ref().shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn pair() -> (Quiet, Quiet) {
        let (one, two) = UnixStream::pair().unwrap();
        (Quiet::new(one).unwrap(), Quiet::new(two).unwrap())
    }

    #[tokio::test]
    async fn what_is_written_arrives_though_there_is_no_room_at_times() {
        let (mut one, mut two) = pair();
        let all: Vec<u8> = (0..8 << 20).map(|n: u32| (n % 251) as u8).collect();
        let sent = all.clone();
        let writing = tokio::spawn(async move {
            one.write_all(&sent).await.unwrap();
            assert!(one.room.is_some(), "it had to wait");
            one.shutdown().await.unwrap();
            let mut back = Vec::new();
            one.read_to_end(&mut back).await.unwrap();
            back
        });
        // The writer waits by then.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let mut came = Vec::new();
        two.read_to_end(&mut came).await.unwrap();
        assert!(came == all);
        two.write_all(b"back").await.unwrap();
        drop(two);
        assert_eq!(writing.await.unwrap(), b"back");
    }

    #[tokio::test]
    async fn pieces_come_one_by_one_and_the_end_is_an_end() {
        let (mut one, mut two) = pair();
        let mut bytes = [0; 8];
        for piece in [&b"a"[..], b"12345678", b"bcd"] {
            two.write_all(piece).await.unwrap();
            let read = one.read(&mut bytes).await.unwrap();
            assert_eq!(&bytes[..read], piece);
            let later = tokio::time::timeout(std::time::Duration::from_millis(20), one.read(&mut bytes)).await;
            assert!(later.is_err(), "there is no more yet");
        }
        drop(two);
        assert_eq!(one.read(&mut bytes).await.unwrap(), 0);
        assert!(one.write(b"x").await.is_err());
    }
}
