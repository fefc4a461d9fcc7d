//! The daemon's end: one new connection over edge.sock per request, so that no two callers ever share one.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use pepo_api::Route;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use crate::body::{self, Any};

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

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Where the daemon is.
#[derive(Clone)]
pub struct Upstream {
    socket: Arc<PathBuf>,
}

impl Upstream {
    /// The daemon behind this socket.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket: Arc::new(socket) }
    }

    async fn open(&self) -> Result<(SendRequest<Any>, Running), Error> {
        let refuse = |source| Error::Connect { socket: (*self.socket).clone(), source };
        let stream = tokio::time::timeout(CONNECT_WITHIN, UnixStream::connect(&*self.socket))
            .await
            .map_err(|_| refuse(std::io::ErrorKind::TimedOut.into()))?
            .map_err(refuse)?;
        let (sender, connection) = http1::Builder::new()
            .max_header_size(HEAD_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(Error::Exchange)?;
        let running = Running(tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "connection to the daemon ended");
            }
        }));
        Ok((sender, running))
    }

    /// Sends a request. What is returned beside the answer must live as long as its body is read.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn send(&self, request: Request<Any>) -> Result<(Response<Incoming>, Running), Error> {
        let (mut sender, running) = self.open().await?;
        let answer = sender.send_request(request).await.map_err(Error::Exchange)?;
        Ok((answer, running))
    }

    /// Asks a question, `?name=value` or nothing behind its path, for an answer of at most `most` bytes.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn ask(&self, row: &Route, query: &str, most: usize) -> Result<(StatusCode, Bytes), Error> {
        let mut request = Request::new(body::nothing());
        *request.method_mut() = row.method.clone();
        *request.uri_mut() = format!("{}{query}", row.path).parse().map_err(|_| Error::Answer)?;
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("pepod"));
        let (answer, _running) = self.send(request).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), most).collect().await.map_err(|_| Error::Answer)?.to_bytes();
        Ok((status, body))
    }
}
