//! The daemon's end: connections over edge.sock. One whose answer was read to its end serves the same caller again, and
//! never another: no two callers ever share one, so nothing of one can be taken for the other's.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use pepo_api::Route;
use pepo_api::quiet::Quiet;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::auth::Who;
use crate::body::{self, Any, Held};

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// The daemon's heads are small.
const HEAD_BYTES: usize = 64 * 1024;

/// Why the daemon gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers on the socket.
    #[error("the daemon is not reachable on {socket}")]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It, or the body on its way to it, broke off.
    #[error("the exchange with the daemon broke off")]
    Exchange(#[source] hyper::Error),
    /// Its answer was not what was asked for.
    #[error("the daemon's answer is too large or broke off")]
    Answer,
}

/// A task that ends when this does.
pub struct Running(JoinHandle<()>);

impl Running {
    /// Starts it.
    pub fn spawn(task: impl Future<Output = ()> + Send + 'static) -> Self {
        Running(tokio::spawn(task))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// How long a connection waits for its caller's next request; pepod waits longer.
const IDLE: Duration = Duration::from_secs(10);
/// Connections of one caller that wait.
const WAITING: usize = 8;
/// Callers whose connections wait.
const CALLERS: usize = 64;

struct Connection {
    sender: SendRequest<Any>,
    /// The runtime that moves its bytes: it serves requests of that one's thread.
    on: tokio::runtime::Id,
    since: Instant,
    _running: Running,
}

type Waiting = Mutex<HashMap<Who, Vec<Connection>>>;

/// A connection in use for a caller. It waits for the next request once the answer is whole, and goes where it is not.
pub struct Lease {
    connection: Option<Connection>,
    of: Who,
    waiting: Arc<Waiting>,
}

impl Held for Lease {
    fn whole(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        // Strangers are many, and not one caller: each has its own, and none takes the place of a known one's.
        if matches!(self.of, Who::Stranger(_)) {
            return;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() >= CALLERS && !waiting.contains_key(&self.of) {
            waiting.retain(|_, of| of.iter().any(|one| one.since.elapsed() < IDLE));
            if waiting.len() >= CALLERS {
                return;
            }
        }
        let of = waiting.entry(self.of.clone()).or_default();
        if of.len() == WAITING {
            // The one that waits longest goes; it may be one of another thread, which has nothing to do now.
            of.remove(0);
        }
        of.push(Connection { since: Instant::now(), ..connection });
    }
}

/// Where the daemon is.
#[derive(Clone)]
pub struct Upstream {
    socket: Arc<PathBuf>,
    waiting: Arc<Waiting>,
}

impl Upstream {
    /// The daemon behind this socket.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket: Arc::new(socket), waiting: Arc::default() }
    }

    async fn open(&self) -> Result<Connection, Error> {
        let refuse = |source| Error::Connect { socket: (*self.socket).clone(), source };
        let stream = tokio::time::timeout(CONNECT_WITHIN, UnixStream::connect(&*self.socket))
            .await
            .map_err(|_| refuse(std::io::ErrorKind::TimedOut.into()))?
            .and_then(|stream| Quiet::new(stream.into_std()?))
            .map_err(refuse)?;
        let (sender, connection) = http1::Builder::new()
            .max_header_size(HEAD_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(Error::Exchange)?;
        let running = Running::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "connection to the daemon ended");
            }
        });
        Ok(Connection { sender, on: Handle::current().id(), since: Instant::now(), _running: running })
    }

    /// A connection of that caller that waits on this thread and is well.
    fn waiting(&self, of: &Who) -> Option<Connection> {
        let here = Handle::current().id();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let own = waiting.get_mut(of)?;
        own.retain(|one| one.since.elapsed() < IDLE && !one.sender.is_closed());
        let last = own.iter().rposition(|one| one.on == here && one.sender.is_ready())?;
        Some(own.remove(last))
    }

    /// Sends a caller's request. What is returned beside the answer must live as long as its body is read.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn send(&self, of: &Who, mut request: Request<Any>) -> Result<(Response<Incoming>, Lease), Error> {
        let lease = |connection| Lease { connection: Some(connection), of: of.clone(), waiting: self.waiting.clone() };
        if let Some(mut connection) = self.waiting(of) {
            match connection.sender.try_send_request(request).await {
                Ok(answer) => return Ok((answer, lease(connection))),
                // The daemon closed it before anything was on its way: as if it had not been there.
                Err(mut failed) => match failed.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(Error::Exchange(failed.into_error())),
                },
            }
        }
        let mut connection = self.open().await?;
        let answer = connection.sender.send_request(request).await.map_err(Error::Exchange)?;
        Ok((answer, lease(connection)))
    }

    /// Asks a question, `?name=value` or nothing behind its path, for an answer of at most `most` bytes.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn ask(&self, row: &Route, query: &str, most: usize) -> Result<(StatusCode, Bytes), Error> {
        self.say(row, query, body::nothing(), most).await
    }

    /// The same with a body.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn say(&self, row: &Route, query: &str, body: Any, most: usize) -> Result<(StatusCode, Bytes), Error> {
        let mut request = Request::new(body);
        *request.method_mut() = row.method.clone();
        *request.uri_mut() = format!("{}{query}", row.path).parse().map_err(|_| Error::Answer)?;
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("pepod"));
        let mut connection = self.open().await?;
        let answer = connection.sender.send_request(request).await.map_err(Error::Exchange)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), most).collect().await.map_err(|_| Error::Answer)?.to_bytes();
        Ok((status, body))
    }
}
