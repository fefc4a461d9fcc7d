//! Why a request about a Session was not done. The server has the one translation into what a caller is told.

use std::time::Duration;

use pepo_api::{Ended, SessionId};
use pepo_sandbox::guest;

use crate::capacity::Full;
use crate::store;

/// Why a request about a Session was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such thing for this App.
    #[error("no {what} `{which}`")]
    NotFound {
        /// Session, command, …
        what: &'static str,
        /// As asked for.
        which: String,
    },
    /// The Session has ended.
    #[error("the Session has ended")]
    Terminated(Ended),
    /// The Sandbox ended while this ran.
    #[error("the Sandbox ended")]
    SandboxEnded(Ended),
    /// Its Sandbox could not be started.
    #[error("the Sandbox could not be started: {}", .0.message)]
    ActivationFailed(Ended),
    /// It did not become Active in time.
    #[error("the Session was not active within {} s", .0.as_secs())]
    NotActive(Duration),
    /// `If-Activation` names another one.
    #[error("activation {wanted} is not the present one: {now} {}", if wanted == now { "is over" } else { "is the last there was" })]
    Replaced {
        /// As asked for.
        wanted: u64,
        /// As it is.
        now: u64,
    },
    /// No such Image.
    #[error("no Image `{name}`")]
    NoImage {
        /// As asked for.
        name: String,
        /// What to do.
        hint: String,
    },
    /// The host has no room.
    #[error("no room for another Sandbox")]
    Full(#[from] Full),
    /// An idle Session gets no Sandbox, by a fault of ours.
    #[error("no Sandbox could be made: {0}")]
    NoSandbox(String),
    /// There is nothing to look at.
    #[error("{0}")]
    NoSandboxNow(String),
    /// The host runs short.
    #[error("the host runs short: {0}")]
    Short(String),
    /// The daemon takes nothing new.
    #[error("this host is being drained or stopped: it takes nothing new")]
    Draining,
    /// The key's Session was asked to be otherwise.
    #[error("the Session of this key has {field} {has}, not {wanted}")]
    Differs {
        /// Which setting.
        field: String,
        /// As it is, in JSON.
        has: String,
        /// As asked for, in JSON.
        wanted: String,
    },
    /// Another live Session of the App has that key.
    #[error("another Session has the key `{0}`")]
    KeyTaken(String),
    /// A value of the request.
    #[error("{message}")]
    Invalid {
        /// Which one.
        param: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The command's program could not be started.
    #[error("{message}")]
    NotStarted {
        /// What the guest says, escaped.
        message: String,
        /// What a shell would exit with.
        exit_code: i32,
    },
    /// The output is no longer kept.
    #[error("output of {0} is no longer kept")]
    OutputGone(pepo_api::CommandId),
    /// The guest did not do it.
    #[error("the guest did not do it")]
    Guest(#[from] guest::Error),
    /// Its Workspace.
    #[error(transparent)]
    Workspace(#[from] crate::workspace::Error),
    /// A secret.
    #[error(transparent)]
    Secret(#[from] crate::secrets::Error),
    /// The store.
    #[error("the record could not be kept")]
    Store(#[source] store::Error),
    /// The privileged side.
    #[error("the privileged side did not do it")]
    Host(#[from] pepo_sandbox::host::Error),
    /// The driver of this Session is gone, which is a fault of Pepo.
    #[error("nobody drives {0} any more")]
    Lost(SessionId),
}

impl Error {
    /// Whether it says only that a stream to the guest broke: the operation is not over by that, and whoever follows it
    /// may do so again from where it was.
    pub fn is_a_lost_stream(&self) -> bool {
        matches!(
            self,
            Error::Guest(guest::Error::Lost(_) | guest::Error::Unreachable(_))
                | Error::Host(pepo_sandbox::host::Error::Lost)
        )
    }
}

impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        match error {
            store::Error::NameTaken(name) => {
                Error::Invalid { param: "name", message: format!("another Session is called `{name}`") }
            }
            store::Error::KeyTaken(key) => Error::KeyTaken(key),
            other => Error::Store(other),
        }
    }
}
