//! `pepo cp`: files both ways, by the rules of `docker cp`.

use std::io::{IsTerminal, Read, Write};

use bytes::Bytes;
use clap::Args;
use pepo_api::client::{ByteStream, body_of};
use tokio::sync::mpsc;

use crate::fail::{Failure, Outcome};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::transfer::{self, Holder, Peer};
use crate::value::{self, Place as Side};

#[derive(Debug, Args)]
#[command(
    after_help = "One side is SES:PATH. A directory goes below a destination that exists, else becomes it; with /. at its\nend only its contents go. `-` is a tar stream: pepo cp - SES:/srv < a.tar, pepo cp SES:/srv - > a.tar"
)]
pub struct Cp {
    /// As this user in the Sandbox
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    /// From
    #[arg(value_name = "SRC", value_parser = value::place)]
    source: Side,
    /// To
    #[arg(value_name = "DST", value_parser = value::place)]
    destination: Side,
}

impl Cp {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        let peer = |name| Peer { client: &client, holder: Holder::Session, name, user: self.user.as_deref() };
        match Interrupts::new()?.unless(copy(peer, &self.source, &self.destination)).await {
            Ok(done) => done.map(|()| 0),
            Err(caught) => Ok(caught.exit_code()),
        }
    }
}

/// Copies between here and there; `peer` is what a name there names.
pub async fn copy<'a>(peer: impl Fn(&'a str) -> Peer<'a>, source: &'a Side, destination: &'a Side) -> Outcome<()> {
    match (source, destination) {
        (Side::Local(source), Side::Remote { session, path }) => transfer::copy_in(&peer(session), source, path).await,
        (Side::Remote { session, path }, Side::Local(destination)) => {
            transfer::copy_out(&peer(session), path, destination).await.map(|report| transfer::tell(&report))
        }
        (Side::Stream, Side::Remote { session, path }) => {
            Ok(peer(session).put(path, body_of(pieces(std::io::stdin()))).await?)
        }
        (Side::Remote { session, path }, Side::Stream) => {
            to_standard_output(peer(session).tar(path).await?, "pepo cp SES:PATH - > archive.tar").await
        }
        (Side::Remote { .. }, Side::Remote { .. }) => {
            Err(Failure::new("one side must be here: copying from one to another goes through a pipe")
                .hint("pepo cp A:/srv - | pepo cp - B:/srv"))
        }
        _ => Err(Failure::new("one side must be there: NAME:PATH")),
    }
}

/// What can be read from a file or a pipe.
pub fn pieces(mut file: impl Read + Send + 'static) -> impl futures_util::Stream<Item = std::io::Result<Bytes>> {
    let (pieces, from) = mpsc::channel(4);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 128 << 10];
        loop {
            let piece = match file.read(&mut buffer) {
                Ok(0) => return,
                Ok(read) => Ok(Bytes::copy_from_slice(&buffer[..read])),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let broken = piece.is_err();
            if pieces.blocking_send(piece).is_err() || broken {
                return;
            }
        }
    });
    futures_util::stream::unfold(from, |mut from| async move { from.recv().await.map(|piece| (piece, from)) })
}

/// Writes an archive to standard output, unless that is a terminal.
pub async fn to_standard_output(stream: ByteStream, instead: &str) -> Outcome<()> {
    if std::io::stdout().is_terminal() {
        return Err(Failure::new("an archive is not for a terminal").hint(instead));
    }
    pass_on(stream, std::io::stdout()).await
}

/// Writes what comes to a file or a pipe.
pub async fn pass_on(mut stream: ByteStream, mut to: impl Write + Send + 'static) -> Outcome<()> {
    let (pieces, mut from) = mpsc::channel::<Bytes>(4);
    let writing = tokio::task::spawn_blocking(move || -> std::io::Result<()> {
        while let Some(piece) = from.blocking_recv() {
            to.write_all(&piece)?;
        }
        to.flush()
    });
    while let Some(piece) = stream.next().await? {
        if pieces.send(piece).await.is_err() {
            break;
        }
    }
    drop(pieces);
    Ok(writing.await.map_err(|error| Failure::new(format!("writing failed: {error}")))??)
}
