//! Opening a Session by its key: the one there is, or a new one, and never two.
//!
//! Who makes it is decided in memory (one maker at a time for each key; the others wait for what comes of it), so that two
//! hundred callers ask for one place on the host and not for two hundred; the store's unique index stands behind that.
//!
//! ```text
//! open ─► a live one? ──────────────────────────────► found
//!    ▲        │ none
//!    │        ├─ somebody makes it: wait ──┐
//!    └────────┼────────────────────────────┘
//!             └─ this one makes it: the last one ended and may not be replaced? ─► refused
//!                                   else create ─► made
//! ```

use std::time::Duration;

use pepo_api::{AppId, IfTerminated};

use super::{Error, NewSession, Session, Sessions};

/// How long an opener waits for one that ends, or for another's making.
const PATIENCE: Duration = Duration::from_secs(60);

/// What opening brought.
#[derive(Debug)]
pub enum Opened {
    /// A new one.
    Made(Session),
    /// The one there is.
    Found(Session),
}

/// The right to make the Session of a key, until dropped.
struct Maker<'a> {
    sessions: &'a Sessions,
    key: (AppId, String),
}

impl Drop for Maker<'_> {
    fn drop(&mut self) {
        self.sessions.0.opening.send_modify(|opening| {
            opening.remove(&self.key);
        });
    }
}

impl Sessions {
    /// The live Session of that App with that key.
    pub fn find_keyed(&self, app: AppId, key: &str) -> Option<Session> {
        let live = self.live();
        let has =
            |session: &&Session| session.app() == app && session.0.published.borrow().spec.key.as_deref() == Some(key);
        live.values().find(has).cloned()
    }

    /// Opens the Session of the key that `new` has, or makes it.
    ///
    /// # Errors
    /// [`Error::Terminated`] where the last one ended and that is to be refused, and as [`Sessions::create`].
    pub async fn open(&self, new: NewSession, if_terminated: IfTerminated) -> Result<Opened, Error> {
        let key = new.spec.key.clone().unwrap_or_default();
        let mut opening = self.0.opening.subscribe();
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            if let Some(found) = self.find_keyed(new.app, &key) {
                if !found.now().state.ends() {
                    return Ok(Opened::Found(found));
                }
                // It is on its way out: what comes after it is decided when it is gone.
                let mut count = self.count();
                let gone = async { while self.by_id(found.id()).is_some() && count.changed().await.is_ok() {} };
                match tokio::time::timeout_at(until, gone).await {
                    Ok(()) => continue,
                    Err(_) => return Err(Error::KeyTaken(key)),
                }
            }
            let Some(_maker) = self.maker(new.app, &key) else {
                let named = (new.app, key.clone());
                let over = opening.wait_for(|opening| !opening.contains(&named));
                match tokio::time::timeout_at(until, over).await {
                    Ok(Ok(_)) => continue,
                    Ok(Err(_)) | Err(_) => return Err(Error::KeyTaken(key)),
                }
            };
            // Whoever made one just before this has entered it by now.
            if self.find_keyed(new.app, &key).is_some() {
                continue;
            }
            if if_terminated == IfTerminated::Refuse
                && let Some(last) = self.0.store.last_of_key(new.app, key.clone()).await?
                && let Some(ended) = last.ended
            {
                return Err(Error::Terminated(ended));
            }
            return self.create(new).await.map(Opened::Made);
        }
    }

    /// The right to make the Session of that key, where nobody has it.
    fn maker(&self, app: AppId, key: &str) -> Option<Maker<'_>> {
        let key = (app, key.to_owned());
        let first = self.0.opening.send_if_modified(|opening| opening.insert(key.clone()));
        first.then(|| Maker { sessions: self, key })
    }
}
