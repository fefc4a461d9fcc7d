//! Getting one small document: from a file, or by one GET over TLS. No redirects, no proxy, nothing kept.

use std::io::Read as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// The longest that one may take.
const WITHIN: Duration = Duration::from_secs(10);
/// The largest document.
const MOST: usize = 512 * 1024;

/// Where a document is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a file.
    File(PathBuf),
    /// Behind a URL: https, or http on loopback.
    Url(Uri),
}

impl Place {
    /// An absolute path or a URL.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            return Ok(Place::File(text.into()));
        }
        let uri: Uri = text.parse().map_err(|_| format!("`{text}` is neither an absolute path nor a URL"))?;
        let host = uri.host().unwrap_or_default();
        let loopback =
            host == "localhost" || plain(host).parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback());
        match uri.scheme_str() {
            Some("https") if !host.is_empty() => Ok(Place::Url(uri)),
            Some("http") if loopback => Ok(Place::Url(uri)),
            Some("http") => Err(format!("`{text}` is not https: whoever is on the way could put other keys in")),
            _ => Err(format!("`{text}` is neither an absolute path nor an https URL")),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::File(path) => path.display().fmt(f),
            Place::Url(uri) => uri.fmt(f),
        }
    }
}

fn plain(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Why it was not got.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read it")]
    Read(#[source] std::io::Error),
    /// Nobody answers there.
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    /// The exchange broke off.
    #[error("the exchange broke off")]
    Exchange(#[source] hyper::Error),
    /// Another answer than 200.
    #[error("the answer was {0}")]
    Status(StatusCode),
    /// It is too large, or broke off.
    #[error("the document is larger than {MOST} bytes or broke off")]
    Body,
    /// It takes too long.
    #[error("no answer in {WITHIN:?}")]
    Late,
}

/// What gets documents.
#[derive(Clone)]
pub struct Fetch(TlsConnector);

impl Fetch {
    /// Trusts the system's certificate authorities, or those in this file alone.
    ///
    /// # Errors
    /// A file without any.
    pub fn new(authorities: Option<&std::path::Path>) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        match authorities {
            None => {
                let found = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(found.certs);
                if roots.is_empty() {
                    tracing::warn!("this system has no certificate authorities: no https document can be got");
                }
            }
            Some(path) => {
                let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
                let all = CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))?;
                for certificate in all {
                    roots.add(certificate.map_err(|error| wrong(&error))?).map_err(|error| wrong(&error))?;
                }
                if roots.is_empty() {
                    return Err(wrong(&"no certificate is in it"));
                }
            }
        }
        let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        Ok(Fetch(TlsConnector::from(Arc::new(config))))
    }

    /// Gets it.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn get(&self, place: &Place) -> Result<Bytes, Error> {
        tokio::time::timeout(WITHIN, self.get_slowly(place)).await.map_err(|_| Error::Late)?
    }

    async fn get_slowly(&self, place: &Place) -> Result<Bytes, Error> {
        let uri = match place {
            Place::File(path) => {
                let path = path.clone();
                let reading = tokio::task::spawn_blocking(move || {
                    let mut bytes = Vec::new();
                    std::fs::File::open(path)?.take(MOST as u64 + 1).read_to_end(&mut bytes).map(|_| bytes)
                });
                let bytes = reading.await.map_err(std::io::Error::other).flatten().map_err(Error::Read)?;
                return if bytes.len() > MOST { Err(Error::Body) } else { Ok(bytes.into()) };
            }
            Place::Url(uri) => uri,
        };
        let tls = uri.scheme_str() == Some("https");
        let host = uri.host().unwrap_or_default();
        let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let stream = TcpStream::connect((plain(host), port)).await.map_err(Error::Connect)?;
        if !tls {
            return ask(stream, uri).await;
        }
        let name = ServerName::try_from(plain(host).to_owned());
        let name = name.map_err(|error| Error::Connect(std::io::Error::other(error)))?;
        ask(self.0.connect(name, stream).await.map_err(Error::Connect)?, uri).await
    }
}

async fn ask(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, uri: &Uri) -> Result<Bytes, Error> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(Error::Exchange)?;
    let running = crate::upstream::Running::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection for a document ended");
        }
    });
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = crate::head::target(uri);
    if let Some(host) = uri.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
        request.headers_mut().insert(header::HOST, host);
    }
    request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static("application/json"));
    let answer = sender.send_request(request).await.map_err(Error::Exchange)?;
    if answer.status() != StatusCode::OK {
        return Err(Error::Status(answer.status()));
    }
    let body = Limited::new(answer.into_body(), MOST).collect().await.map_err(|_| Error::Body)?;
    drop(running);
    Ok(body.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_files_or_behind_tls() {
        for text in [
            "/etc/keys.json",
            "https://id.example.com/keys",
            "http://127.0.0.1:1/k",
            "http://[::1]/k",
            "http://localhost/k",
        ] {
            assert_eq!(Place::read(text).expect(text).to_string(), text);
        }
        for text in ["http://id.example.com/keys", "keys.json", "ftp://x/y", "https:///keys", ""] {
            assert!(Place::read(text).is_err(), "{text}");
        }
    }
}
