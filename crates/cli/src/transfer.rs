//! Files between this machine and a Session, or a Workspace without one: `--copy`, `--out` and `cp` are these two calls.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use pepo_api::client::{Body, ByteStream, Client, ClientError};
use pepo_api::query::AtPath;
use pepo_api::{ErrorCode, FileEntry, FileKind};
use tokio::sync::mpsc;

use crate::escape;
use crate::fail::{Failure, Outcome, note};
use crate::pack::{self, Source};
use crate::unpack::{self, Naming, Report};

/// Who has the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A Session's guest.
    Session,
    /// A Workspace, without a Session.
    Workspace,
}

/// Whose files, and as whom.
#[derive(Clone, Debug)]
pub struct Peer<'a> {
    /// The client.
    pub client: &'a Client,
    /// What `name` names.
    pub holder: Holder,
    /// The Session's or Workspace's id or name.
    pub name: &'a str,
    /// A user in the Sandbox; the default one where absent.
    pub user: Option<&'a str>,
}

impl Peer<'_> {
    fn at(&self, path: &str) -> AtPath {
        AtPath { path: path.to_owned(), user: self.user.map(str::to_owned) }
    }

    async fn stat(&self, path: &str) -> Result<FileEntry, ClientError> {
        match self.holder {
            Holder::Session => self.client.file_stat(self.name, &self.at(path)).await,
            Holder::Workspace => self.client.workspace_file_stat(self.name, &self.at(path)).await,
        }
    }

    /// Unpacks an archive into a directory, which is made where missing.
    pub async fn put(&self, directory: &str, body: Body) -> Result<(), ClientError> {
        match self.holder {
            Holder::Session => self.client.tar_write(self.name, &self.at(directory), body).await,
            Holder::Workspace => self.client.workspace_tar_write(self.name, &self.at(directory), body).await,
        }
    }

    /// What is there, or nothing.
    pub async fn look(&self, path: &str) -> Outcome<Option<FileEntry>> {
        match self.stat(path).await {
            Ok(entry) => Ok(Some(entry)),
            // That the Session itself is not there is said by what follows.
            Err(error) if error.code() == Some(ErrorCode::NotFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends a source into a directory of the Session, which is made where missing.
    pub async fn send(&self, source: Source, directory: &str) -> Outcome<()> {
        let (body, told) = pack::stream(source);
        let sent = self.put(directory, body).await;
        match (told.await, sent) {
            // What could not be read here explains the broken request.
            (Ok(Err(failure)), Err(ClientError::Lost(_) | ClientError::Transport { .. })) => Err(failure),
            (_, Err(error)) => Err(error.into()),
            (Ok(Err(failure)), Ok(())) => Err(failure),
            (_, Ok(())) => Ok(()),
        }
    }

    /// The tar stream of a path.
    pub async fn tar(&self, path: &str) -> Outcome<ByteStream> {
        Ok(match self.holder {
            Holder::Session => self.client.tar_read(self.name, &self.at(path)).await?,
            Holder::Workspace => self.client.workspace_tar_read(self.name, &self.at(path)).await?,
        })
    }

    /// Fetches a path below a directory here, which must exist.
    pub async fn fetch(&self, path: &str, target: &Path, naming: Naming) -> Outcome<Report> {
        let mut stream = self.tar(path).await?;
        let (pieces, from) = mpsc::channel::<std::io::Result<Bytes>>(8);
        let target = target.to_owned();
        let unpacking = tokio::task::spawn_blocking(move || {
            let report = unpack::unpack(Pieces { from, rest: Bytes::new() }, &target, &naming);
            report.map_err(|failure| failure.doing(escape::bytes(target.as_os_str().as_encoded_bytes())))
        });
        let mut broke = None;
        loop {
            let piece = match stream.next().await {
                Ok(None) => break,
                Ok(Some(piece)) => Ok(piece),
                Err(error) => {
                    broke = Some(error);
                    Err(std::io::ErrorKind::UnexpectedEof.into())
                }
            };
            if pieces.send(piece).await.is_err() || broke.is_some() {
                break;
            }
        }
        drop(pieces);
        let report = unpacking.await.map_err(|error| Failure::new(format!("unpacking failed: {error}")))?;
        match broke {
            Some(error @ ClientError::Lost(_)) => Err(Failure::from(error)
                .hint("what cannot be read in the Sandbox ends the copy: as another user (-u root) it may go")),
            Some(error) => Err(error.into()),
            None => report,
        }
    }
}

struct Pieces {
    from: mpsc::Receiver<std::io::Result<Bytes>>,
    rest: Bytes,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        while self.rest.is_empty() {
            match self.from.blocking_recv() {
                None => return Ok(0),
                Some(piece) => self.rest = piece?,
            }
        }
        let most = self.rest.len().min(buffer.len());
        buffer[..most].copy_from_slice(&self.rest.split_to(most));
        Ok(most)
    }
}

/// What was left out, on standard error.
pub fn tell(report: &Report) {
    for line in &report.notes {
        note(line);
    }
    if report.left_out > report.notes.len() as u64 {
        note(format!("left out {} entries in all", report.left_out));
    }
}

/// The last name of a guest's path as a plain name here, or nothing for `/`, `.` and what ends with `/.`.
pub fn last_name(path: &str) -> Option<OsString> {
    if path.ends_with("/.") || path == "." {
        return None;
    }
    let name = Path::new(path).file_name()?;
    Some(name.to_owned())
}

/// Copies a local path to where one would expect it, as docker does.
///
/// A file goes into a directory that exists or whose path ends with `/`, else under the destination's own last name. A
/// directory goes below a directory that exists, else becomes the destination; with `/.` at its end its contents go there.
pub async fn copy_in(peer: &Peer<'_>, source: &Path, destination: &str) -> Outcome<()> {
    let meta = std::fs::symlink_metadata(source)
        .map_err(|error| Failure::new(format!("{}: {error}", escape::bytes(source.as_os_str().as_encoded_bytes()))))?;
    let contents_only = source.as_os_str().as_encoded_bytes().ends_with(b"/.") || source == Path::new(".");
    let there = peer.look(destination).await?;
    let into_directory = destination.ends_with('/') || there.is_some_and(|entry| entry.kind == FileKind::Directory);
    if meta.is_dir() {
        let prefix = if contents_only || !into_directory { PathBuf::new() } else { own_name(source)?.into() };
        return peer.send(Source::Contents { directory: source.to_owned(), prefix }, destination).await;
    }
    if into_directory {
        let name = own_name(source)?.into();
        return peer.send(Source::Entry { file: source.to_owned(), name }, destination).await;
    }
    let (directory, name) = split(destination);
    peer.send(Source::Entry { file: source.to_owned(), name: name.into() }, directory).await
}

/// The directory and the name of a guest's path that does not end with a slash.
pub fn split(path: &str) -> (&str, &str) {
    match path.rsplit_once('/') {
        Some(("", name)) => ("/", name),
        Some((directory, name)) => (directory, name),
        None => (".", path),
    }
}

/// The last name of a local path; `..` and `.` have the name of the directory they mean.
pub fn own_name(path: &Path) -> Outcome<OsString> {
    if let Some(name) = path.file_name() {
        return Ok(name.to_owned());
    }
    let real = std::fs::canonicalize(path).map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    Ok(real.file_name().map_or_else(|| "root".into(), ToOwned::to_owned))
}

/// Copies a Session's path to where one would expect it here, by the same rules.
pub async fn copy_out(peer: &Peer<'_>, source: &str, destination: &Path) -> Outcome<Report> {
    let entry = peer.stat(source).await?;
    let is_directory = destination.is_dir();
    let ends_open = destination.as_os_str().as_encoded_bytes().ends_with(b"/");
    let name = last_name(source);
    if entry.kind == FileKind::Directory {
        let (target, naming) = match name {
            Some(name) if is_directory => (destination, Naming::Below(name)),
            _ => {
                make_directory(destination)?;
                (destination, Naming::AsIs)
            }
        };
        return peer.fetch(source, target, naming).await;
    }
    let name = name.ok_or_else(|| Failure::new(format!("{}: not a directory", escape::line(source))))?;
    if is_directory || ends_open {
        if !is_directory {
            return Err(Failure::new(format!("{}: no such directory", destination.display())));
        }
        return peer.fetch(source, destination, Naming::Only(name)).await;
    }
    let parent = match destination.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    peer.fetch(source, parent, Naming::Only(own_name(destination)?)).await
}

fn make_directory(path: &Path) -> Outcome<()> {
    match std::fs::create_dir(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => Err(Failure::new(format!("{}: {error}", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_paths_are_split_as_one_expects() {
        assert_eq!(split("/a/b"), ("/a", "b"));
        assert_eq!(split("/a"), ("/", "a"));
        assert_eq!(split("a"), (".", "a"));
        assert_eq!(last_name("/srv/out/"), Some("out".into()));
        assert_eq!(last_name("out"), Some("out".into()));
        for contents in ["/", ".", "/srv/out/."] {
            assert_eq!(last_name(contents), None, "{contents}");
        }
        assert_eq!(last_name("/srv/.."), None);
    }
}
