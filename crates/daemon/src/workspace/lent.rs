//! Directories of this host that a local caller lends to a Session (`-v`), for as long as the Session lives and this pepod.
//!
//! Whose rights count is not decided here: the privileged side asks the kernel who is at the other end of the caller's own
//! connection, and keeps the directory that was opened with those rights. A pepod that starts anew has none of them, so a
//! Session that comes back after that says so instead of going on without its files.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use pepo_api::{HostVolume, WorkspaceMode};
use pepo_sandbox::host::{self, Refusal};
use pepo_sandbox::jail::Access;
use pepo_sandbox::share::Cache;
use pepo_sandbox::{Mount, VolumeId};
use serde::{Deserialize, Serialize};

use super::{Error, Workspaces};

/// Directories of one Session at the most: each is a process on the host.
pub const MOST: usize = 8;

/// The connection of a local caller.
#[derive(Clone, Debug)]
pub struct Connection(Arc<OwnedFd>);

impl Connection {
    /// That of this socket, for as long as anybody needs it.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn of(socket: impl AsFd) -> std::io::Result<Self> {
        Ok(Connection(Arc::new(socket.as_fd().try_clone_to_owned()?)))
    }
}

/// A directory that is lent to a Session, recorded with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lent {
    /// By which number: 32 hex digits.
    pub number: String,
    /// Which directory, and where in the guest.
    pub volume: HostVolume,
}

fn id(lent: &Lent) -> VolumeId {
    // One that is none of ours is one that nobody lends.
    lent.number.parse().unwrap_or_else(|_| VolumeId::new([0; 16]))
}

fn access(volume: &HostVolume) -> Access {
    match volume.mode {
        WorkspaceMode::Rw => Access::Writable,
        WorkspaceMode::Ro => Access::ReadOnly,
    }
}

impl Workspaces {
    /// Takes directories of a local caller: all of them or none.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the caller may not have one.
    pub async fn lend(&self, connection: &Connection, volumes: Vec<HostVolume>) -> Result<Vec<Lent>, Error> {
        let mut all = Vec::new();
        for volume in volumes {
            let lent = Lent { number: uuid::Uuid::now_v7().simple().to_string(), volume };
            let taken = async {
                let connection = connection.0.try_clone().map_err(|_| host::Error::Busy)?;
                let path = PathBuf::from(&lent.volume.source);
                self.host().lend(id(&lent), path, access(&lent.volume), connection).await
            };
            match taken.await {
                Ok(()) => all.push(lent),
                Err(error) => {
                    self.give_back(&all).await;
                    return Err(match error {
                        host::Error::Refused(Refusal::Invalid { reason }) => {
                            Error::Invalid { param: "volumes", message: reason }
                        }
                        error => Error::Host(error),
                    });
                }
            }
        }
        Ok(all)
    }

    /// Lets go of them. Nothing of them is removed.
    pub async fn give_back(&self, all: &[Lent]) {
        for lent in all {
            // A privileged side that is gone has let go of everything.
            let _ = self.host().volume_remove(id(lent)).await;
        }
    }

    /// What an activation is to mount of them.
    pub fn mount_lent(&self, all: &[Lent]) -> Vec<Mount> {
        let mount = |lent: &Lent| Mount {
            volume: id(lent),
            access: access(&lent.volume),
            cache: Cache::Shared,
            path: lent.volume.target.clone(),
        };
        all.iter().map(mount).collect()
    }
}
