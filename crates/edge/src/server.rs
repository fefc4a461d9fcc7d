//! The listener and its bounds: how many connections, how large a head, how slow a caller.

use std::io::{self, Write};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep};

use crate::config::Limits;
use crate::handler::{Edge, Place};
use crate::net;
use crate::rate::Open;
use crate::threads::Threads;
use crate::tls::Tls;

/// What a stranger may use up.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Connections at once; one more is told so and closed.
    pub connections: usize,
    /// Of these, those of one source that is no trusted proxy.
    pub of_source: usize,
    /// Bytes of a request's head.
    pub head_bytes: usize,
    /// Headers of a request.
    pub headers: usize,
    /// From the first byte of a head, or the end of the last answer, to the end of the head.
    pub head_within: Duration,
    /// How long a caller may not read while we have something for it.
    pub write_stall: Duration,
    /// How long the connections get at the end.
    pub end_within: Duration,
}

impl Bounds {
    /// The usual ones; each connection has two descriptors, so the limit on those bounds the connections too.
    pub fn for_this_process() -> Self {
        let connections = Self::fit().min(1024);
        Self {
            connections,
            of_source: connections * 3 / 4,
            head_bytes: 16 * 1024,
            headers: 100,
            head_within: Duration::from_secs(15),
            write_stall: Duration::from_secs(300),
            end_within: Duration::from_secs(5),
        }
    }

    /// These, as far as the settings say otherwise. Never more connections than there are descriptors for.
    pub fn within(self, limits: &Limits) -> Self {
        let connections = limits.connections.map_or(self.connections, |most| most.min(Self::fit()));
        Self { connections, of_source: (connections * 3 / 4).max(1), end_within: limits.drain, ..self }
    }

    fn fit() -> usize {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
        usize::try_from(files.saturating_sub(64) / 2).unwrap_or(usize::MAX).max(8)
    }
}

/// Serves on these threads until `end`, then lets what runs finish for a moment. Bounds hold for all threads together.
///
/// # Errors
/// The listener's, where it cannot go on.
pub async fn serve(
    listener: TcpListener,
    edge: Arc<Edge>,
    tls: Option<Arc<Tls>>,
    bounds: Bounds,
    threads: Threads,
    end: impl Future<Output = ()>,
) -> io::Result<()> {
    let sources = Open::default();
    let places = Arc::new(Semaphore::new(bounds.connections));
    let (ending, _) = watch::channel(());
    let mut end = pin!(end);
    tracing::info!(address = %listener.local_addr()?, connections = bounds.connections, "serving");
    loop {
        let (stream, from) = tokio::select! {
            () = &mut end => break,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) if passing(&error) => continue,
                Err(error) => {
                    // Out of descriptors or memory: what runs must end first.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            full(stream, tls.is_some());
            continue;
        };
        let source = from.ip().to_canonical();
        let most = if edge.proxies().have(source) { bounds.connections } else { bounds.of_source };
        let Some(one) = sources.enter(net::neighbourhood(source), most) else {
            full(stream, tls.is_some());
            continue;
        };
        // Known to this thread's runtime until here, and from there on to that of the thread that serves it.
        let Ok(stream) = stream.into_std() else { continue };
        threads.serve(|counted| {
            let place = Arc::new((place, one, counted));
            let visit = Visit { from: source, edge: edge.clone(), bounds, place, ending: ending.subscribe() };
            connection(stream, tls.clone(), visit)
        });
    }
    drop(listener);
    drop(ending);
    let all = u32::try_from(bounds.connections).unwrap_or(u32::MAX);
    if tokio::time::timeout(bounds.end_within, places.acquire_many(all)).await.is_err() {
        tracing::info!("connections were cut");
    }
    Ok(())
}

/// Errors of one connection that was gone before it was taken.
fn passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

/// Says that there is no place, without waiting for anything: where there is TLS nothing can be said.
fn full(stream: TcpStream, silent: bool) {
    tracing::warn!("no place for another connection");
    const BODY: &str = r#"{"error":{"code":"unavailable","message":"too many connections","retryable":true}}"#;
    if let (Ok(mut stream), false) = (stream.into_std(), silent) {
        let _ = write!(
            stream,
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{BODY}",
            BODY.len()
        );
    }
}

/// What there is to know of a connection beside its bytes.
struct Visit {
    from: IpAddr,
    edge: Arc<Edge>,
    bounds: Bounds,
    place: Place,
    ending: watch::Receiver<()>,
}

async fn connection(stream: std::net::TcpStream, tls: Option<Arc<Tls>>, visit: Visit) {
    let Ok(stream) = TcpStream::from_std(stream) else { return };
    let _ = stream.set_nodelay(true);
    let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
    let _ = rustix::net::sockopt::set_tcp_keepidle(&stream, Duration::from_secs(60));
    let stream = Stalling::new(stream, visit.bounds.write_stall);
    let Some(tls) = tls else {
        return Box::pin(first(stream, visit)).await;
    };
    match tokio::time::timeout(visit.bounds.head_within, tls.acceptor().accept(stream)).await {
        Ok(Ok(stream)) if stream.get_ref().1.alpn_protocol() == Some(b"h2") => {
            Box::pin(second(stream, visit)).await;
        }
        Ok(Ok(stream)) => Box::pin(first(stream, visit)).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS came about"),
        Err(_) => tracing::debug!("TLS took too long"),
    }
}

/// HTTP/1.1.
async fn first(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, visit: Visit) {
    let Visit { from, edge, bounds, place, mut ending } = visit;
    let service = service_fn(move |request| {
        let (edge, place) = (edge.clone(), place.clone());
        async move { edge.answer(request, from, place).await }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.head_within)
        .max_header_size(bounds.head_bytes)
        .max_headers(bounds.headers)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let mut told = false;
    let result = loop {
        tokio::select! {
            result = connection.as_mut() => break result,
            _ = ending.changed(), if !told => {
                told = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended");
    }
}

/// Requests of an HTTP/2 connection at once.
const AT_ONCE: u32 = 100;
/// Streams that were reset before they were looked at; more of them end the connection.
const RESET: usize = 20;
/// What a caller may have on its way to us, by stream and by connection.
const WINDOW: u32 = 256 * 1024;

/// HTTP/2. A connection on which nothing is asked ends after as long as a head may take, four times.
async fn second(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, visit: Visit) {
    let Visit { from, edge, bounds, place, mut ending } = visit;
    // Of what is running here each holds one; whoever asks counts it up.
    let running = Arc::new(AtomicU64::new(0));
    let served = running.clone();
    let service = service_fn(move |request| {
        let (edge, place, served) = (edge.clone(), place.clone(), served.clone());
        served.fetch_add(1, Ordering::Relaxed);
        async move {
            let answer = edge.answer(request, from, place).await;
            answer.map(|answer| answer.map(|body| crate::body::holding(body, served)))
        }
    });
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(AT_ONCE)
        .max_pending_accept_reset_streams(RESET)
        .max_local_error_reset_streams(Some(RESET))
        .max_header_list_size(u32::try_from(bounds.head_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW * 4)
        .max_send_buf_size(WINDOW as usize)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(20))
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let mut told = false;
    let (patience, mut known) = (bounds.head_within * 4, 0);
    let mut looked = Instant::now();
    let result = loop {
        tokio::select! {
            result = connection.as_mut() => break result,
            _ = ending.changed(), if !told => {
                told = true;
                connection.as_mut().graceful_shutdown();
            }
            () = tokio::time::sleep_until(looked + patience), if !told => {
                looked = Instant::now();
                // One is ours and one the service's: nothing runs, and nothing was asked since the last look.
                let asked = running.load(Ordering::Relaxed);
                if Arc::strong_count(&running) == 2 && asked == known {
                    told = true;
                    connection.as_mut().graceful_shutdown();
                }
                known = asked;
            }
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended");
    }
}

/// A stream whose writes fail once the other side has not read for too long.
struct Stalling {
    stream: TcpStream,
    most: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Stalling {
    fn new(stream: TcpStream, most: Duration) -> Self {
        Self { stream, most, waiting: None }
    }

    fn watch<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.waiting = None;
            return polled;
        }
        let most = self.most;
        let timer = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + most)));
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Stalling {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stalling {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(polled, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.watch(polled, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
