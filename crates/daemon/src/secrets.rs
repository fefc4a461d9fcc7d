//! Secrets: sealed before they come to the store, opened for an activation alone.
//!
//! XChaCha20-Poly1305 with a key of 32 random bytes in a file of mode 0600 beside the store. A nonce has 24 random bytes,
//! so none repeats; the Session's id and the secret's name are authenticated with the value, so a row moved to another
//! Session or name does not open. What this guards against: a copy of the database alone (a backup elsewhere, a disk that
//! is thrown away). Whoever has the key file and the database, or pepod's memory, has the values. Plain text is wiped from
//! memory when it is dropped, and is shown by nothing here.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{Key, XChaCha20Poly1305, XNonce};
use pepo_api::SessionId;
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

/// The key's file, beside the store.
pub const KEY_FILE: &str = "secret.key";

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;

const NONCE_BYTES: usize = 24;

/// What sealing adds to a value: the nonce before it and the tag behind it.
pub const ADDED: usize = NONCE_BYTES + 16;

/// Secrets of one Session.
pub const MOST: usize = 64;

/// Names and values of one Session's secrets together, counted as an environment is: with it they fit into one message to
/// the guest.
pub const BYTES: usize = 12 * 1024;

/// Why a secret is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key's file cannot be used.
    #[error("cannot {what} {path}")]
    File {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The key's file is not what this program wrote.
    #[error("{path} {reason}; put the right one back from a backup")]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Sealed by another key, or changed since.
    #[error("the secret `{0}` does not open: it was sealed by another key, or changed since; set it again")]
    Sealed(String),
    /// The kernel gives no random bytes.
    #[error("no random bytes")]
    Random(#[from] rustix::io::Errno),
}

/// Names and values, wiped when dropped.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets(pub BTreeMap<String, Zeroizing<String>>);

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Seals and opens.
pub struct Vault {
    cipher: XChaCha20Poly1305,
    digests: Zeroizing<[u8; KEY_BYTES]>,
    tokens: Zeroizing<[u8; KEY_BYTES]>,
}

impl fmt::Debug for Vault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Vault")
    }
}

impl Vault {
    /// The vault of the key in that directory. Where there is none one is made, unless something was sealed already.
    ///
    /// # Errors
    /// A file that is not there though needed, that others can read, or that is no key.
    pub fn open(directory: &Path, something_is_sealed: bool) -> Result<Self, Error> {
        let path = directory.join(KEY_FILE);
        let key = match read_key(&path) {
            Ok(key) => key,
            Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound && !something_is_sealed => {
                make_key(directory, &path)?
            }
            Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(Error::Key { path, reason: "is missing, and there are secrets sealed by it".into() });
            }
            Err(error) => return Err(error),
        };
        // Other keys for other purposes, out of the same bytes; a backup of the store alone lacks them.
        let digests = Zeroizing::new(Sha256::digest([b"pepo digests ".as_slice(), &*key].concat()).into());
        let tokens = Zeroizing::new(pepo_api::hmac(&key, b"pepo: session tokens, 1"));
        Ok(Vault { cipher: XChaCha20Poly1305::new(&Key::from(*key)), digests, tokens })
    }

    /// A digest that tells two texts apart and says nothing about one to whoever lacks the key.
    pub fn fingerprint(&self, text: &[u8]) -> [u8; 32] {
        // Both parts have a fixed length, so nothing can be appended.
        Sha256::digest([&*self.digests as &[u8], &Sha256::digest(text)].concat()).into()
    }

    /// What Session tokens are signed with.
    pub fn token_key(&self) -> Zeroizing<[u8; KEY_BYTES]> {
        self.tokens.clone()
    }

    /// Seals a value for that Session under that name.
    ///
    /// # Errors
    /// [`Error::Random`].
    pub fn seal(&self, session: SessionId, name: &str, value: &str) -> Result<Vec<u8>, Error> {
        let mut nonce = [0u8; NONCE_BYTES];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
        let payload = Payload { msg: value.as_bytes(), aad: &about(session, name) };
        // It fails for messages of 256 GiB alone.
        let sealed = self.cipher.encrypt(&XNonce::from(nonce), payload).map_err(|_| Error::Sealed(name.into()))?;
        Ok([&nonce[..], &sealed].concat())
    }

    /// Opens what was sealed for that Session under that name.
    ///
    /// # Errors
    /// [`Error::Sealed`].
    pub fn unseal(&self, session: SessionId, name: &str, sealed: &[u8]) -> Result<Zeroizing<String>, Error> {
        let wrong = || Error::Sealed(name.to_owned());
        let (nonce, rest) = sealed.split_first_chunk::<NONCE_BYTES>().ok_or_else(wrong)?;
        let payload = Payload { msg: rest, aad: &about(session, name) };
        let plain = self.cipher.decrypt(&XNonce::from(*nonce), payload).map_err(|_| wrong())?;
        match String::from_utf8(plain) {
            Ok(text) => Ok(Zeroizing::new(text)),
            Err(error) => {
                drop(Zeroizing::new(error.into_bytes()));
                Err(wrong())
            }
        }
    }
}

fn about(session: SessionId, name: &str) -> Vec<u8> {
    format!("{session} {name}").into_bytes()
}

fn read_key(path: &Path) -> Result<Zeroizing<[u8; KEY_BYTES]>, Error> {
    let file = |what| move |source| Error::File { what, path: path.to_owned(), source };
    let odd = |reason: String| Error::Key { path: path.to_owned(), reason };
    let no_link = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let open = std::fs::File::options().read(true).custom_flags(no_link).open(path).map_err(file("open"))?;
    let meta = open.metadata().map_err(file("look at"))?;
    if !meta.is_file() || meta.mode() & 0o077 != 0 {
        return Err(odd(format!("must be a file of mode 0600 and has {:04o}", meta.mode() & 0o7777)));
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(KEY_BYTES + 1));
    open.take(KEY_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(file("read"))?;
    let key: [u8; KEY_BYTES] =
        bytes.as_slice().try_into().map_err(|_| odd(format!("has not the {KEY_BYTES} bytes of a key")))?;
    Ok(Zeroizing::new(key))
}

fn make_key(directory: &Path, path: &Path) -> Result<Zeroizing<[u8; KEY_BYTES]>, Error> {
    let file = |what| move |source| Error::File { what, path: path.to_owned(), source };
    let mut key = Zeroizing::new([0u8; KEY_BYTES]);
    rustix::rand::getrandom(&mut *key, rustix::rand::GetRandomFlags::empty())?;
    // Whole or not at all, and on the disk before anything is sealed with it.
    let draft = path.with_extension("new");
    match std::fs::remove_file(&draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(file("replace")(error)),
        _ => {}
    }
    let mut made =
        std::fs::File::options().write(true).create_new(true).mode(0o600).open(&draft).map_err(file("make"))?;
    made.write_all(&*key).and_then(|()| made.sync_all()).map_err(file("write"))?;
    std::fs::rename(&draft, path).map_err(file("name"))?;
    std::fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(file("keep"))?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_is_sealed_opens_with_its_key_for_its_session_under_its_name_alone() {
        let directory = tempfile::tempdir().expect("directory");
        let vault = Vault::open(directory.path(), false).expect("vault");
        let (ours, theirs) = (SessionId::generate(), SessionId::generate());
        let sealed = vault.seal(ours, "TOKEN", "hush-hush").expect("sealed");
        assert_eq!(sealed.len(), "hush-hush".len() + ADDED);
        assert!(!sealed.windows(4).any(|window| window == b"hush"));
        assert_ne!(sealed, vault.seal(ours, "TOKEN", "hush-hush").expect("sealed"), "a nonce of its own");
        let again = Vault::open(directory.path(), true).expect("the same key");
        assert_eq!(again.unseal(ours, "TOKEN", &sealed).expect("opened").as_str(), "hush-hush");
        assert!(again.unseal(theirs, "TOKEN", &sealed).is_err());
        assert!(again.unseal(ours, "OTHER", &sealed).is_err());
        for at in 0..sealed.len() {
            let mut bent = sealed.clone();
            bent[at] ^= 1;
            assert!(again.unseal(ours, "TOKEN", &bent).is_err(), "byte {at}");
            assert!(again.unseal(ours, "TOKEN", &sealed[..at]).is_err(), "cut at {at}");
        }
        assert_eq!(again.token_key(), vault.token_key());
        assert_ne!(*again.token_key(), *read_key(&directory.path().join(KEY_FILE)).expect("key"));
        let other = tempfile::tempdir().expect("directory");
        assert!(Vault::open(other.path(), false).expect("vault").unseal(ours, "TOKEN", &sealed).is_err());
        let secrets = Secrets([("A".to_owned(), Zeroizing::new("hush".to_owned()))].into());
        assert_eq!(format!("{secrets:?}"), "{\"A\"}");
    }

    #[test]
    fn a_key_that_is_missing_or_open_to_others_is_refused() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join(KEY_FILE);
        let error = Vault::open(directory.path(), true).expect_err("missing").to_string();
        assert!(error.contains("is missing") && error.contains("backup"), "{error}");
        assert!(!path.exists(), "none is made where one was lost");
        Vault::open(directory.path(), false).expect("made");
        assert_eq!(std::fs::metadata(&path).expect("stat").permissions().mode() & 0o7777, 0o600);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("mode");
        assert!(Vault::open(directory.path(), true).expect_err("open").to_string().contains("0640"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("mode");
        for bytes in [&b"short"[..], &[7; KEY_BYTES + 1]] {
            std::fs::write(&path, bytes).expect("write");
            assert!(matches!(Vault::open(directory.path(), false), Err(Error::Key { .. })));
        }
        std::fs::remove_file(&path).expect("remove");
        std::os::unix::fs::symlink("/etc/hostname", &path).expect("link");
        assert!(Vault::open(directory.path(), false).is_err(), "a link is no key");
    }
}
