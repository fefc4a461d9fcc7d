//! What the agent does while nobody waits for it: whoever is first to come finds it done.

use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use pepo_proto::{Exec, FailureCode, Frame, Network, OpId, Operation, Outcome, Read, Ready, Share};
use rustix::mount::{UnmountFlags, unmount};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::task::{spawn_blocking, spawn_local};
use tokio::time::timeout;

use super::{Agent, explain};
use crate::rehearsal;
use crate::spawn::Environment;
use crate::stream::{Stream, failed};

/// How long Activate waits for the rest of the boot.
const SETTLE: Duration = Duration::from_secs(10);

/// How often it rehearses: the second time shows what the first one still had to fetch.
const REHEARSALS: usize = 2;

/// The rehearsal's name. Hosts name operations by UUIDs, of which this is none.
const REHEARSAL: OpId = OpId([0; 16]);

/// Where a mount is rehearsed.
const STAGE: &str = "/run/pepo-rehearsal";

impl Agent {
    /// Waits until PID 1 has made the machine ready for programs. One that takes too long is not waited for: what is
    /// missing then shows in the program that needs it.
    pub(super) async fn settle(&self) {
        let settled = self.settled.borrow().clone();
        if let Some(settled) = settled {
            let _ = timeout(SETTLE, settled.readable()).await;
            self.settled.borrow_mut().take();
        }
    }

    /// Sets the interface up as far as it is not.
    pub(super) fn connect(&self, network: &Network) -> Result<(), Outcome> {
        crate::net::begin(network, self.network.borrow().as_ref())
            .map_err(|error| failed(FailureCode::Io, format!("network: {}", explain(&error))))?;
        *self.network.borrow_mut() = Some(*network);
        Ok(())
    }

    /// While the host has nothing to ask yet: little things that the first command would wait for.
    pub(super) async fn warm_up(&self) {
        let _ = self.user(None);
        self.trees.keep_one();
        let _ = spawn_blocking(|| ()).await;
    }

    /// What Activate and the first command would wait for. What fails here is done when it is needed, or fails then.
    pub(super) async fn make_ready(self: &Rc<Self>, ready: &Ready) {
        self.settle().await;
        if self.activation.borrow().is_none() {
            if let Some(network) = &ready.network {
                let _ = self.connect(network);
            }
            self.identity.set(crate::mount::ready_identity());
            *self.image_env.borrow_mut() = Environment::of_image(Path::new("/"));
        }
        for _ in 0..REHEARSALS {
            if self.activation.borrow().is_some() || self.rehearse().await.is_err() {
                break;
            }
        }
        for _ in 0..REHEARSALS {
            if self.activation.borrow().is_some() {
                break;
            }
            if let Err(error) = self.rehearse_mount().await {
                crate::init::note(format!("no mount was rehearsed: {error}"));
                break;
            }
        }
    }

    /// Runs a program that does nothing, as a host would have it run. What every command needs is in memory afterwards,
    /// and translated where the processor is emulated.
    async fn rehearse(self: &Rc<Self>) -> io::Result<()> {
        let (stream, mut host) = pair()?;
        let exec = Exec::new(["bash", "-c", "exec true"]);
        let running = spawn_local(self.clone().run(stream, REHEARSAL, exec));
        until_end(&mut host).await;
        drop(host);
        running.await?;
        self.forget(REHEARSAL);
        Ok(())
    }

    /// Mounts a tree, reads a file in it as a host does that wants to know whether it is its own, and lets it go.
    async fn rehearse_mount(self: &Rc<Self>) -> io::Result<()> {
        let (stream, mut host) = pair()?;
        let wanted = Share { path: STAGE.to_owned(), read_only: true };
        let mounting = spawn_local(super::mount(stream, wanted));
        let accepted = matches!(host.receive().await, Ok(Some(Frame::Accepted)));
        drop(mounting);
        if !accepted {
            return Err(io::Error::other("the tree was not mounted"));
        }
        let read = self.read_staged(host).await;
        // Whatever came of that: nobody finds it later.
        unmount(STAGE, UnmountFlags::DETACH)?;
        std::fs::remove_dir(STAGE)?;
        read
    }

    async fn read_staged(self: &Rc<Self>, host: Stream) -> io::Result<()> {
        let (theirs, _, _) = host.into_parts();
        rustix::io::ioctl_fionbio(&theirs, false)?;
        // Ends with the mount.
        drop(spawn_blocking(move || rehearsal::serve(&theirs)));
        let path = format!("{STAGE}/{}", rehearsal::FILE);
        let read = Read { path, offset: 0, length: Some(256), user: Some("0".to_owned()) };
        let (stream, mut host) = pair()?;
        let reading = spawn_local(self.clone().other(stream, REHEARSAL, Operation::Read(read)));
        let said = until_end(&mut host).await;
        drop(host);
        reading.await?;
        match said == rehearsal::FILE.as_bytes() {
            true => Ok(()),
            false => Err(io::Error::other("the file was not read")),
        }
    }
}

/// A stream and its host's end.
fn pair() -> io::Result<(Stream, Stream)> {
    let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
    Ok((Stream::new(ours)?, Stream::new(theirs)?))
}

/// What comes until the operation's end.
async fn until_end(host: &mut Stream) -> Vec<u8> {
    let mut said = Vec::new();
    while let Ok(Some(frame)) = host.receive().await {
        match frame {
            Frame::Data { bytes, .. } => said.extend_from_slice(&bytes),
            Frame::End(_) => break,
            _ => {}
        }
    }
    said
}
