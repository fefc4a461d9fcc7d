//! Files of a Workspace without a Session: who may touch them when, and what reaches them.
//!
//! A reading visit is always possible: what a guest wrote is on the host. A writing one is not while a Sandbox has the
//! Workspace alone, since that guest trusts what it knows for a day; and nobody gets it alone while one writes.

use std::collections::HashMap;

use pepo_api::WorkspaceId;
use pepo_sandbox::guest::Guest;
use pepo_sandbox::jail::Access;
use pepo_sandbox::share::{Archive, VisitPlan};

use super::{Error, Workspaces, volume};
use crate::store::WorkspaceRow;

/// Visits at once: each operation of one is a process. What there is too much of is told at once.
const MOST: usize = 16;

/// The visits at work.
#[derive(Debug, Default)]
pub(super) struct Visits {
    /// Of each Workspace, how many there are, and how many of them may write.
    by: HashMap<WorkspaceId, (usize, usize)>,
    all: usize,
}

impl Visits {
    pub fn is_visited(&self, id: WorkspaceId) -> bool {
        self.by.contains_key(&id)
    }

    pub fn is_written(&self, id: WorkspaceId) -> bool {
        self.by.get(&id).is_some_and(|(_, writers)| *writers > 0)
    }

    fn begin(&mut self, id: WorkspaceId, access: Access) -> Result<(), Error> {
        if self.all >= MOST {
            return Err(Error::Full(format!("{MOST} requests work on files of Workspaces already")));
        }
        self.all += 1;
        let (visits, writers) = self.by.entry(id).or_default();
        *visits += 1;
        *writers += usize::from(access == Access::Writable);
        Ok(())
    }

    fn end(&mut self, id: WorkspaceId, access: Access) {
        self.all = self.all.saturating_sub(1);
        let Some((visits, writers)) = self.by.get_mut(&id) else { return };
        *visits = visits.saturating_sub(1);
        *writers = writers.saturating_sub(usize::from(access == Access::Writable));
        if *visits == 0 {
            self.by.remove(&id);
        }
    }
}

/// One request's visit: as long as it is there, the Workspace is not removed, and not given away alone if it is written.
#[derive(Debug)]
pub struct Visit {
    workspaces: Workspaces,
    id: WorkspaceId,
    access: Access,
    guest: Guest,
}

impl Visit {
    /// What is asked for files.
    pub fn guest(&self) -> &Guest {
        &self.guest
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.workspaces.holders().visits.end(self.id, self.access);
        self.workspaces.0.left.notify_waiters();
    }
}

impl Workspaces {
    /// Begins a visit. The tree is made here where it is not there yet.
    ///
    /// # Errors
    /// [`Error::Busy`] where a Sandbox has it alone and it is to be written, [`Error::Full`], [`Error::Host`].
    pub async fn visit(&self, row: &WorkspaceRow, access: Access, archive: Archive) -> Result<Visit, Error> {
        let begin = || {
            let mut holders = self.holders();
            let alone = holders.sandboxes.iter().find(|(_, (id, alone))| *id == row.id && *alone);
            if let Some((sandbox, _)) = alone.filter(|_| access == Access::Writable) {
                return Err(Error::Busy(format!(
                    "{} is in use by {sandbox}, which has it alone: change files through its Session, or release that",
                    row.id
                )));
            }
            holders.visits.begin(row.id, access)
        };
        begin()?;
        let guest = self.visitor(row.id, access, archive);
        let visit = Visit { workspaces: self.clone(), id: row.id, access, guest };
        self.ensure(row).await?;
        Ok(visit)
    }

    /// What is asked for files of a tree that is there, whoever has it.
    pub(crate) fn visitor(&self, id: WorkspaceId, access: Access, archive: Archive) -> Guest {
        self.host().visitor(VisitPlan { volume: volume(id), access, archive })
    }
}
