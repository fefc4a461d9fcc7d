//! Looking at a Session's Sandbox without owning it.

use tokio::sync::oneshot;

use super::{Driver, Work};
use crate::session::Error;

impl Driver {
    /// Answers a look at the Sandbox, on a task of its own.
    pub(super) fn look<T, F, Q>(&self, answer: oneshot::Sender<Result<T, Error>>, look: Q)
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
        Q: FnOnce(View) -> F,
    {
        match &self.work {
            Work::Serving { active, .. } => {
                let looked = look(View { host: self.sessions.0.host.clone(), id: active.id() });
                tokio::spawn(async move {
                    let _ = answer.send(looked.await);
                });
            }
            _ => {
                let message =
                    format!("the Session is {:?} and has no Sandbox to look at", self.session.now().state.word());
                let _ = answer.send(Err(Error::NoSandboxNow(message.to_lowercase())));
            }
        }
    }
}

/// What can be looked at of a Sandbox without owning it.
pub(super) struct View {
    host: pepo_sandbox::Host,
    id: pepo_sandbox::SandboxId,
}

impl View {
    pub(super) async fn console(&self) -> Result<pepo_sandbox::keeper::Console, pepo_sandbox::host::Error> {
        Ok(self.host.evidence(self.id).await?.console)
    }

    pub(super) async fn usage(&self) -> Result<pepo_sandbox::host::Usage, pepo_sandbox::host::Error> {
        self.host.usage(self.id).await
    }

    pub(super) async fn traffic(&self) -> Result<pepo_sandbox::net::Traffic, pepo_sandbox::host::Error> {
        self.host.traffic(self.id).await
    }
}
