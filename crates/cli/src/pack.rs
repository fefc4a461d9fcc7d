//! A local file or directory as a tar stream, made while it is sent.
//!
//! Names are relative. Symbolic links stay links; sockets, pipes and devices are left out and counted. Nothing is left
//! out by name. A file that changes while it is read keeps the length it had when its header was written.

use std::fs::Metadata;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use pepo_api::client::Body;
use tar::{Builder, EntryType, Header};
use tokio::sync::{mpsc, oneshot};

use crate::escape;
use crate::fail::{Failure, Outcome, note};

/// What is sent at once.
const PIECE: usize = 128 << 10;

/// What an archive is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The contents of a directory, each name below `prefix` (which may be empty).
    Contents {
        /// The directory.
        directory: PathBuf,
        /// Put before each name.
        prefix: PathBuf,
    },
    /// One entry under this name.
    Entry {
        /// The file or link.
        file: PathBuf,
        /// Its name in the archive.
        name: PathBuf,
    },
}

/// Starts making the archive on a thread; the receiver tells how that ended.
pub fn stream(source: Source) -> (Body, oneshot::Receiver<Outcome<()>>) {
    let (pieces, from) = mpsc::channel::<std::io::Result<Bytes>>(8);
    let (tell, told) = oneshot::channel();
    std::thread::spawn(move || {
        let mut out = Pieces { to: pieces, pending: BytesMut::with_capacity(PIECE) };
        let mut made = write(&source, &mut out);
        if out.to.is_closed() {
            // The other end stopped taking it, and knows why.
            made = Ok(());
        }
        if let Err(failure) = &made {
            // The receiver must not take a broken archive for a whole one.
            let _ = out.to.blocking_send(Err(std::io::Error::other(failure.message().to_owned())));
        }
        let _ = tell.send(made);
    });
    let pieces = futures_util::stream::unfold(from, |mut from| async move { from.recv().await.map(|p| (p, from)) });
    (pepo_api::client::body_of(pieces), told)
}

struct Pieces {
    to: mpsc::Sender<std::io::Result<Bytes>>,
    pending: BytesMut,
}

/// Where the bytes of a file stopped.
enum Stopped {
    Reading(std::io::Error),
    Sending(std::io::Error),
}

impl Pieces {
    /// Exactly so many bytes of a file, filled up to a block: zeros where it has become shorter, nothing of what it has
    /// grown by.
    fn pour(&mut self, mut file: impl Read, length: u64) -> Result<(), Stopped> {
        let mut left = length;
        let mut ended = false;
        while left > 0 {
            let have = self.pending.len();
            let room = usize::try_from(left).unwrap_or(usize::MAX).min(PIECE.saturating_sub(have).max(512));
            self.pending.resize(have + room, 0);
            let read = match ended {
                true => room,
                false => match file.read(&mut self.pending[have..]) {
                    Ok(0) => {
                        ended = true;
                        room
                    }
                    Ok(read) => read,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => 0,
                    Err(error) => return Err(Stopped::Reading(error)),
                },
            };
            self.pending.truncate(have + read);
            left -= read as u64;
            if self.pending.len() >= PIECE {
                self.flush().map_err(Stopped::Sending)?;
            }
        }
        let filled = usize::try_from(length.next_multiple_of(512) - length).unwrap_or(0);
        self.pending.resize(self.pending.len() + filled, 0);
        Ok(())
    }
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.pending, BytesMut::with_capacity(PIECE)).freeze();
        self.to.blocking_send(Ok(piece)).map_err(|_| std::io::ErrorKind::BrokenPipe.into())
    }
}

fn write(source: &Source, out: &mut Pieces) -> Outcome<()> {
    let mut archive = Builder::new(&mut *out);
    let mut left_out = 0usize;
    match source {
        Source::Entry { file, name } => {
            let meta = std::fs::symlink_metadata(file).map_err(|e| at(file, e))?;
            if !append(&mut archive, file, name, &meta)? {
                return Err(Failure::new(format!("{}: neither a file nor a directory", file.display())));
            }
        }
        Source::Contents { directory, prefix } => {
            let mut below = vec![(directory.clone(), prefix.clone())];
            while let Some((directory, name)) = below.pop() {
                let mut entries: Vec<_> = std::fs::read_dir(&directory)
                    .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
                    .map_err(|e| at(&directory, e))?;
                entries.sort_by_key(std::fs::DirEntry::file_name);
                let mut deeper = Vec::new();
                for entry in entries {
                    let (path, name) = (entry.path(), name.join(entry.file_name()));
                    let meta = match std::fs::symlink_metadata(&path) {
                        Ok(meta) => meta,
                        // Gone since it was listed.
                        Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                        Err(error) => return Err(at(&path, error)),
                    };
                    if !append(&mut archive, &path, &name, &meta)? {
                        left_out += 1;
                    } else if meta.is_dir() {
                        deeper.push((path, name));
                    }
                }
                below.extend(deeper.into_iter().rev());
            }
        }
    }
    archive.finish().map_err(sending)?;
    drop(archive);
    out.flush().map_err(sending)?;
    if left_out > 0 {
        note(format!("left out {left_out} sockets, pipes or devices"));
    }
    Ok(())
}

fn at(path: &Path, error: std::io::Error) -> Failure {
    Failure::new(format!("{}: {error}", escape::bytes(path.as_os_str().as_encoded_bytes())))
}

fn sending(error: std::io::Error) -> Failure {
    Failure::new(format!("sending stopped: {error}"))
}

/// Appends one entry; false when it is of a kind that is left out.
fn append(archive: &mut Builder<&mut Pieces>, path: &Path, name: &Path, meta: &Metadata) -> Outcome<bool> {
    let kind = meta.file_type();
    let mut header = header(meta);
    if kind.is_dir() {
        header.set_entry_type(EntryType::Directory);
        header.set_size(0);
        archive.append_data(&mut header, name, std::io::empty()).map_err(sending)?;
    } else if kind.is_symlink() {
        let target = std::fs::read_link(path).map_err(|e| at(path, e))?;
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        archive.append_link(&mut header, name, target).map_err(sending)?;
    } else if kind.is_file() {
        // It may have become a pipe since: opening that must not wait for a writer.
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits().cast_signed())
            .open(path)
            .map_err(|e| at(path, e))?;
        let now = file.metadata().map_err(|e| at(path, e))?;
        if !now.file_type().is_file() {
            return Ok(false);
        }
        header.set_entry_type(EntryType::Regular);
        header.set_size(now.len());
        // The library would copy in small steps: it writes the header, the bytes go their own way.
        archive.append_data(&mut header, name, std::io::empty()).map_err(sending)?;
        archive.get_mut().pour(file, now.len()).map_err(|why| match why {
            Stopped::Reading(error) => at(path, error),
            Stopped::Sending(error) => sending(error),
        })?;
    } else {
        debug_assert!(kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device());
        return Ok(false);
    }
    Ok(true)
}

fn header(meta: &Metadata) -> Header {
    let mut header = Header::new_gnu();
    header.set_mode(meta.mode() & 0o7777);
    header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
    // Who owns it in the Sandbox is the Sandbox's to say.
    header.set_uid(0);
    header.set_gid(0);
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    async fn names(source: Source) -> Vec<(String, EntryType, u64)> {
        let (body, told) = stream(source);
        let bytes = body.collect().await.unwrap().to_bytes();
        told.await.unwrap().unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        archive
            .entries()
            .unwrap()
            .map(|e| {
                let e = e.unwrap();
                (e.path().unwrap().display().to_string(), e.header().entry_type(), e.size())
            })
            .collect()
    }

    #[tokio::test]
    async fn a_directory_gives_its_contents_with_links_and_without_sockets() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir_all(root.join("b/empty")).unwrap();
        std::fs::write(root.join("a größe.txt"), "hello").unwrap();
        std::fs::write(root.join("b/.gitignore"), "*").unwrap();
        std::os::unix::fs::symlink("../a", root.join("b/link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(root.join("sock")).unwrap();
        let long = "n".repeat(200);
        std::fs::write(root.join(&long), "").unwrap();
        let contents = Source::Contents { directory: root.into(), prefix: PathBuf::new() };
        let expected: [(&str, EntryType, u64); 6] = [
            ("a größe.txt", EntryType::Regular, 5),
            ("b", EntryType::Directory, 0),
            (&long, EntryType::Regular, 0),
            ("b/.gitignore", EntryType::Regular, 1),
            ("b/empty", EntryType::Directory, 0),
            ("b/link", EntryType::Symlink, 0),
        ];
        assert_eq!(names(contents).await, expected.map(|(n, k, s)| (n.to_owned(), k, s)));
        let one = Source::Entry { file: root.join("a größe.txt"), name: "x".into() };
        assert_eq!(names(one).await, [("x".to_owned(), EntryType::Regular, 5)]);
    }

    #[tokio::test]
    async fn what_cannot_be_read_breaks_the_stream() {
        let (body, told) = stream(Source::Entry { file: "/nonexistent/x".into(), name: "x".into() });
        assert!(body.collect().await.is_err());
        assert!(told.await.unwrap().unwrap_err().message().starts_with("/nonexistent/x: "));
    }

    #[test]
    fn a_file_that_changes_keeps_its_announced_length() {
        for (there, length) in [(3, 5), (600, 512), (0, 0), (300_000, 299_000), (1000, 300_000)] {
            let (to, mut from) = mpsc::channel(100);
            let mut pieces = Pieces { to, pending: BytesMut::new() };
            assert!(pieces.pour(&vec![7u8; there][..], length).is_ok());
            pieces.flush().unwrap();
            drop(pieces);
            let mut all = Vec::new();
            while let Some(piece) = from.blocking_recv() {
                all.extend_from_slice(&piece.unwrap());
            }
            let length = usize::try_from(length).unwrap();
            assert_eq!(all.len(), length.next_multiple_of(512));
            let real = there.min(length);
            assert!(all[..real].iter().all(|b| *b == 7) && all[real..].iter().all(|b| *b == 0), "{there} of {length}");
        }
    }
}
