//! `pepo cp`: files both ways, by the rules of `docker cp`.

use std::io::{IsTerminal, Read, Write};

use bytes::Bytes;
use clap::Args;
use pepo_api::client::body_of;
use pepo_api::query::AtPath;
use tokio::sync::mpsc;

use crate::fail::{Failure, Outcome};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::transfer::{self, Peer};
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
        let peer = |session| Peer { client: &client, session, user: self.user.as_deref() };
        let copying = async {
            match (&self.source, &self.destination) {
                (Side::Local(source), Side::Remote { session, path }) => {
                    transfer::copy_in(&peer(session), source, path).await
                }
                (Side::Remote { session, path }, Side::Local(destination)) => {
                    transfer::copy_out(&peer(session), path, destination).await.map(|report| transfer::tell(&report))
                }
                (Side::Stream, Side::Remote { session, path }) => {
                    let at = AtPath { path: path.clone(), user: self.user.clone() };
                    Ok(client.tar_write(session, &at, body_of(standard_input())).await?)
                }
                (Side::Remote { session, path }, Side::Stream) => to_standard_output(&peer(session), path).await,
                (Side::Remote { .. }, Side::Remote { .. }) => {
                    Err(Failure::new("one side must be here: copying from Session to Session goes through a pipe")
                        .hint("pepo cp A:/srv - | pepo cp - B:/srv"))
                }
                _ => Err(Failure::new("one side must be in a Session: SES:PATH")),
            }
        };
        match Interrupts::new()?.unless(copying).await {
            Ok(done) => done.map(|()| 0),
            Err(caught) => Ok(caught.exit_code()),
        }
    }
}

fn standard_input() -> impl futures_util::Stream<Item = std::io::Result<Bytes>> {
    let (pieces, from) = mpsc::channel(4);
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; 128 << 10];
        loop {
            let piece = match stdin.read(&mut buffer) {
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

async fn to_standard_output(peer: &Peer<'_>, path: &str) -> Outcome<()> {
    if std::io::stdout().is_terminal() {
        return Err(Failure::new("a tar stream is not for a terminal").hint("pepo cp SES:PATH - > archive.tar"));
    }
    let mut stream = peer.tar(path).await?;
    let (pieces, mut from) = mpsc::channel::<Bytes>(4);
    let writing = tokio::task::spawn_blocking(move || -> std::io::Result<()> {
        let mut stdout = std::io::stdout().lock();
        while let Some(piece) = from.blocking_recv() {
            stdout.write_all(&piece)?;
        }
        stdout.flush()
    });
    while let Some(piece) = stream.next().await? {
        if pieces.send(piece).await.is_err() {
            break;
        }
    }
    drop(pieces);
    Ok(writing.await.map_err(|error| Failure::new(format!("writing failed: {error}")))??)
}
