//! What the agent does while nobody waits for it: whoever is first to come finds it done.

use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use pepo_proto::{FailureCode, Outcome};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use super::Agent;
use crate::spawn::{Environment, Launch, Wiring};
use crate::stream::failed;
use crate::sys;

/// How long Activate waits for the rest of the boot.
const SETTLE: Duration = Duration::from_secs(10);

/// How long a guest is to be nobody's before it rehearses: one that was booted for somebody is activated at once.
const ALONE: Duration = Duration::from_millis(200);

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

    /// While the host has nothing to ask yet: what the first command would wait for. Nothing here can fail it.
    pub(super) async fn make_ready(&self) {
        let _ = self.user(None);
        self.trees.keep_one();
        let _ = spawn_blocking(|| ()).await;
    }

    /// In a guest that waits to be somebody's: runs a program that does nothing, as a command would be run. What every
    /// program needs is in memory afterwards, and translated where the processor is emulated.
    pub(super) async fn rehearse(&self) -> Result<(), Outcome> {
        sleep(ALONE).await;
        self.settle().await;
        if self.activation.borrow().is_some() {
            return Ok(());
        }
        // Here, on the one thread that activates: what is read is what is written.
        crate::mount::ready_identity();
        let trouble = |error: io::Error| failed(FailureCode::Io, error.to_string());
        let user = self.user(None)?;
        let mut environment = Environment::of_image(Path::new("/"));
        environment.of_user(&user);
        let tree = self.trees.plant().map_err(trouble)?;
        let argv = ["bash", "-c", "exec true"].map(str::to_owned);
        let launch = Launch::new(&argv, &environment, None, &user, tree.mark())?;
        let wiring = Wiring {
            stdio: [self.null.clone(), self.null.clone(), self.null.clone()],
            extra: vec![],
            terminal: false,
            group: tree.birthplace(),
            in_guest: true,
        };
        let (_, pidfd) = self.launch(launch, wiring).await?;
        let exit = sys::watch(Rc::new(pidfd), tokio::io::Interest::READABLE).map_err(trouble)?;
        drop(exit.readable().await.map_err(trouble)?);
        waitid(WaitId::PidFd(exit.get_ref().as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG)
            .map_err(|error| trouble(error.into()))?;
        drop(tree);
        self.trees.keep_one();
        Ok(())
    }
}
