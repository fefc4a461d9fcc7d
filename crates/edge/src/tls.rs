//! TLS from two files, which are read again when they change. One that is wrong then is not taken: the old one stays.
//!
//! The edge has no rights by the time it reads them, so its user must be able to: see docs/edge.md.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// How often the files are looked at.
const EVERY: Duration = Duration::from_secs(2);

/// Where certificate and key are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The certificate, and those that vouch for it, as PEM.
    pub certificate: PathBuf,
    /// Its private key, as PEM.
    pub key: PathBuf,
}

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read, or is not what it should be.
    #[error("{path}: {reason}; the user pepo-edge must be able to read it")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Certificate and key do not go together.
    #[error("{certificate} and {key} do not go together: {reason}")]
    Pair {
        /// The certificate.
        certificate: PathBuf,
        /// The key.
        key: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// What takes connections, as the files are now.
pub struct Tls {
    files: Files,
    now: RwLock<Arc<ServerConfig>>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn open(files: Files) -> Result<Self, Error> {
        let now = RwLock::new(Arc::new(load(&files)?));
        Ok(Tls { files, now })
    }

    /// For the next connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.now.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Reads the files again whenever they change, for ever.
    pub async fn follow(&self) {
        let mut seen = stamps(&self.files);
        loop {
            tokio::time::sleep(EVERY).await;
            let stamps = stamps(&self.files);
            if stamps == seen {
                continue;
            }
            // Half of a pair is seen while it is being replaced: what fails is tried again with the next change.
            match load(&self.files) {
                Ok(config) => {
                    *self.now.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
                    tracing::info!(certificate = %self.files.certificate.display(), "the certificate was read again");
                }
                Err(error) => tracing::error!(%error, "the certificate was not taken; the old one stays"),
            }
            seen = stamps;
        }
    }
}

/// What tells a file from an earlier one.
fn stamps(files: &Files) -> [Option<(SystemTime, u64, u64)>; 2] {
    use std::os::unix::fs::MetadataExt;
    [&files.certificate, &files.key].map(|path| {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.modified().ok()?, meta.len(), meta.ino()))
    })
}

fn load(files: &Files) -> Result<ServerConfig, Error> {
    let wrong = |path: &Path, reason: String| Error::File { path: path.to_owned(), reason };
    let read = |path: &Path| std::fs::read(path).map_err(|error| wrong(path, error.to_string()));
    let text = read(&files.certificate)?;
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<_, _>>()
        .map_err(|error| wrong(&files.certificate, error.to_string()))?;
    if chain.is_empty() {
        return Err(wrong(&files.certificate, "no certificate is in it".into()));
    }
    let key =
        PrivateKeyDer::from_pem_slice(&read(&files.key)?).map_err(|error| wrong(&files.key, error.to_string()))?;
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key);
    let mut config = config.map_err(|error| Error::Pair {
        certificate: files.certificate.clone(),
        key: files.key.clone(),
        reason: error.to_string(),
    })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, name: &str) -> Files {
        let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).expect("certificate");
        let files = Files { certificate: directory.join("cert.pem"), key: directory.join("key.pem") };
        std::fs::write(&files.certificate, made.cert.pem()).expect("write");
        std::fs::write(&files.key, made.signing_key.serialize_pem()).expect("write");
        files
    }

    #[test]
    fn what_is_wrong_with_the_files_is_said_with_the_file() {
        let directory = tempfile::tempdir().expect("directory");
        let files = write(directory.path(), "a.example");
        assert!(Tls::open(files.clone()).is_ok());
        let other = rcgen::generate_simple_self_signed(vec!["b.example".to_owned()]).expect("certificate");
        std::fs::write(&files.key, other.signing_key.serialize_pem()).expect("write");
        let error = Tls::open(files.clone()).map(|_| ()).expect_err("another's key").to_string();
        assert!(error.contains("do not go together") && error.contains("key.pem"), "{error}");
        std::fs::write(&files.certificate, "nothing").expect("write");
        let error = Tls::open(files.clone()).map(|_| ()).expect_err("no certificate").to_string();
        assert!(error.contains("cert.pem: no certificate"), "{error}");
        std::fs::remove_file(&files.certificate).expect("remove");
        let error = Tls::open(files).map(|_| ()).expect_err("missing").to_string();
        assert!(error.contains("cert.pem") && error.contains("pepo-edge must be able"), "{error}");
    }
}
