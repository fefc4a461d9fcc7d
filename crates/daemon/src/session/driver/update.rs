//! Changing what a Session is asked to be.

use std::sync::Arc;
use std::time::Duration;

use super::publish::Disk;
use super::{Driver, Work, after};
use crate::session::state::State;
use crate::session::{Error, Update};
use crate::store::Write;

impl Driver {
    /// Puts in force what it may reach, as that is now: its App may have changed.
    pub(super) async fn reach_again(&self) -> Result<(), Error> {
        if let Work::Serving { active, .. } = &self.work {
            self.sessions.enforce(&self.session, active, &self.session.now().spec.network).await?;
        }
        Ok(())
    }

    /// Replaces some of its settings.
    pub(super) async fn update(&mut self, update: Update) -> Result<(), Error> {
        let now = self.session.now();
        if let Some(ended) = now.ended {
            return Err(Error::Terminated(ended));
        }
        #[cfg(feature = "fake")]
        #[allow(clippy::panic, reason = "what becomes of a driver that panics is tested by one that does")]
        if update.labels.as_ref().and_then(|labels| labels.get("pepo-fault")).is_some_and(|fault| fault == "driver") {
            panic!("as a test wants it");
        }
        let mut spec = (*now.spec).clone();
        if let Some(name) = update.name {
            // The store decides whether a name is free, so it is asked before anything is published.
            spec.name = Some(name);
            let row = crate::store::SessionRow { spec: spec.clone(), ..self.session.row() };
            self.sessions.0.store.write(Write::Session(Box::new(row))).await?;
        }
        if !update.secrets.is_empty() {
            self.sessions.change_secrets(self.session.id(), &update.secrets).await?;
            for (name, value) in update.secrets {
                match value {
                    Some(_) => spec.secrets.insert(name),
                    None => spec.secrets.remove(&name),
                };
            }
        }
        if let Some(labels) = update.labels {
            spec.labels = labels;
        }
        if let Some(seconds) = update.keep_alive_seconds {
            spec.keep_alive_seconds = seconds;
        }
        if let Some(env) = update.env {
            spec.env = env;
        }
        if let Some(setup) = update.setup {
            spec.setup = setup;
        }
        if let Some(services) = update.services {
            let before = std::mem::replace(&mut spec.services, services);
            if let State::Active(_) = now.state {
                spec.services_begun.get_or_insert(before);
            }
        }
        if let Some(said) = update.network {
            // In force before it is written down: a change that is answered is one that holds. One that starts just now
            // is given what is written when it has started.
            if let Work::Serving { active, .. } = &self.work {
                self.sessions.enforce(&self.session, active, &said).await?;
            }
            spec.network = said;
        }
        if update.expires_seconds.is_some() {
            spec.expires_seconds = update.expires_seconds;
        }
        let expires_at = match update.expires_seconds {
            Some(seconds) => after(crate::store::now(), Duration::from_secs(seconds)),
            None => now.expires_at,
        };
        self.publish_on(Disk::First, |published| {
            published.spec = Arc::new(spec);
            published.expires_at = expires_at;
        })
        .await;
        Ok(())
    }
}
