//! What is saved of the commands when their Sandbox ends: what they wrote and nobody has seen yet, and how they ended.
//!
//! Called by the driver, first while the guest still answers, then when all is given back.

use std::time::Duration;

use pepo_api::{CommandId, Ended, Reason};
use pepo_sandbox::guest::{self, Output};
use pepo_sandbox::proto::{Attach, OpId};

use super::{Commands, Status, lock};
use crate::session::{follow, kept};

/// How long the stop path may spend on saving output.
const RESCUE: Duration = Duration::from_secs(5);

impl Commands {
    /// Whether nothing runs, and the guest keeps no output that is not kept here.
    fn owes_nothing(&self) -> bool {
        !lock(&self.table).forgot
            && self.all().iter().all(|command| match command.status() {
                Status::Ended(row) => row.stdout_bytes + row.stderr_bytes == 0 || lock(&command.small).is_some(),
                Status::NotStarted { .. } => true,
                Status::Starting | Status::Running => false,
            })
    }

    /// The first part of the stop path: ends what runs, for that reason, and saves what was written and not yet seen.
    pub(in crate::session) async fn wind_up(&self, guest: &guest::Guest, reason: Reason) {
        lock(&self.table).ending = Some(reason);
        let work = async {
            if self.owes_nothing() {
                return;
            }
            let running: Vec<_> = self.all().into_iter().filter(|command| !command.is_over()).collect();
            let ending = running.iter().map(|command| guest.cancel(command.op()));
            futures_util::future::join_all(ending).await;
            let ops = guest.ops().await.unwrap_or_default();
            self.settle(&ops);
            for op in ops {
                let Some(command) = self.get(CommandId::from(uuid::Uuid::from_bytes(op.op.0))) else { continue };
                if op.next == 0 || lock(&command.small).is_some() {
                    continue;
                }
                if let Ok(output) = save(guest, op.op).await {
                    self.shelf.put(command.session, command.id, output);
                }
            }
        };
        if tokio::time::timeout(RESCUE, work).await.is_err() {
            tracing::warn!("not all output could be saved in time");
        }
    }

    /// The last part of every Sandbox's end: whatever still runs by our account does not.
    pub(in crate::session) fn sandbox_ended(&self, ended: &Ended) {
        for command in self.all() {
            if let Some(output) = lock(&command.small).take() {
                self.shelf.put(command.session, command.id, output);
            }
            if !command.is_over() {
                self.finish_unseen(&command, ended.reason, ended.at);
            }
        }
    }
}

/// Head and tail of what the guest keeps of a command that has ended.
async fn save(guest: &guest::Guest, op: OpId) -> Result<kept::Output, guest::Error> {
    let attach = Attach { target: op, from: Some(0), input: false, keep_input: true, sole: None };
    let mut joined = guest.attach(attach).await?;
    let mut output = kept::Output::default();
    while let Some(piece) = joined.next().await {
        match piece? {
            Output::Data { channel, offset, bytes } => output.put(follow::side(channel), offset, &bytes),
            Output::Gap { to, .. } => output.gap(to),
            _ => {}
        }
    }
    Ok(output)
}
