//! TLS to an edge, by the system's certificates or by those in a file.

use std::io;
use std::path::Path;
use std::sync::Arc;

use pepo_api::client::{Duplex, Secure};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

use crate::fail::{Failure, Outcome};

/// What makes connections private, trusting the certificates in that file, or those of the system.
pub fn secure(ca: Option<&Path>) -> Outcome<Secure> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => {
            let cannot = |why: String| Failure::new(format!("no certificates in {}: {why}", path.display()));
            for found in CertificateDer::pem_file_iter(path).map_err(|error| cannot(error.to_string()))? {
                let certificate = found.map_err(|error| cannot(error.to_string()))?;
                roots.add(certificate).map_err(|error| cannot(error.to_string()))?;
            }
        }
        None => {
            // Those that cannot be read vouch for nobody, and the others still do.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        let place = ca.map_or_else(|| "on this machine".to_owned(), |path| format!("in {}", path.display()));
        return Err(Failure::new(format!("there are no certificates {place} to know a server by"))
            .hint("install the package ca-certificates, or give the context its `ca`"));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::new(format!("TLS cannot be used: {error}")))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    Ok(Secure::new(move |stream, host| {
        let connector = connector.clone();
        Box::pin(async move {
            let name =
                ServerName::try_from(host).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
            Ok(Box::new(connector.connect(name, stream).await?) as Box<dyn Duplex>)
        })
    }))
}

#[cfg(test)]
mod tests {
    use pepo_api::client::Client;
    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// A server for `localhost` that answers everything with health; and its certificate.
    async fn server(directory: &Path) -> (u16, std::path::PathBuf) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let file = directory.join("ca.pem");
        std::fs::write(&file, made.cert.pem()).unwrap();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let mut seen = vec![0; 4096];
                    let read = stream.read(&mut seen).await.unwrap_or(0);
                    let head = String::from_utf8_lossy(&seen[..read]).into_owned();
                    assert!(head.starts_with("GET /healthz HTTP/1.1\r\n"), "{head}");
                    let body = "HTTP/1.1 200 OK\r\ncontent-length: 15\r\nconnection: close\r\n\r\n{\"status\":\"ok\"}";
                    stream.write_all(body.as_bytes()).await.unwrap();
                    let _ = stream.shutdown().await;
                });
            }
        });
        (port, file)
    }

    #[tokio::test]
    async fn a_server_is_known_by_its_certificate_and_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let (port, file) = server(directory.path()).await;
        let client = |host: &str, ca| {
            Client::remote(&format!("https://{host}:{port}"), Some("pepo_x"), Some(secure(ca).unwrap())).unwrap()
        };
        assert_eq!(client("localhost", Some(&file)).healthz().await.unwrap().status, "ok");
        let other = client("127.0.0.1", Some(&file)).healthz().await.unwrap_err();
        assert!(format!("{other:?}").contains("NotValidForName"), "{other:?}");
        // The system's certificates, where there are any, do not vouch for this one.
        if let Ok(system) = secure(None) {
            let url = format!("https://localhost:{port}");
            let unknown = Client::remote(&url, None, Some(system)).unwrap().healthz().await.unwrap_err();
            assert!(format!("{unknown:?}").contains("UnknownIssuer"), "{unknown:?}");
        }
        assert!(secure(Some(&directory.path().join("missing"))).is_err());
    }
}
