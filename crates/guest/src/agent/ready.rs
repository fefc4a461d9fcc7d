//! What the agent does while nobody waits for it: whoever is first to come finds it done.

use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use pepo_proto::{Exec, FailureCode, Frame, Network, OpId, Outcome, Ready};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::task::{spawn_blocking, spawn_local};
use tokio::time::timeout;

use super::{Agent, explain};
use crate::spawn::Environment;
use crate::stream::{Stream, failed};

/// How long Activate waits for the rest of the boot.
const SETTLE: Duration = Duration::from_secs(10);

/// How often it rehearses: the second time shows what the first one still had to fetch.
const REHEARSALS: usize = 2;

/// The rehearsal's name. Hosts name operations by UUIDs, of which this is none.
const REHEARSAL: OpId = OpId([0; 16]);

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
                return;
            }
        }
    }

    /// Runs a program that does nothing, as a host would have it run. What every command needs is in memory afterwards,
    /// and translated where the processor is emulated.
    async fn rehearse(self: &Rc<Self>) -> io::Result<()> {
        let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
        let (stream, mut host) = (Stream::new(ours)?, Stream::new(theirs)?);
        let exec = Exec::new(["bash", "-c", "exec true"]);
        let running = spawn_local(self.clone().run(stream, REHEARSAL, exec));
        while let Ok(Some(frame)) = host.receive().await {
            if matches!(frame, Frame::End(_)) {
                break;
            }
        }
        drop(host);
        running.await?;
        self.forget(REHEARSAL);
        Ok(())
    }
}
