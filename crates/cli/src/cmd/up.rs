//! `pepo up`.

use clap::Args;

use crate::fail::{Failure, Outcome};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::supervise::Supervisor;

#[derive(Debug, Args)]
pub struct Up {}

impl Up {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let instance = place.local("up")?;
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::new(
                "`pepo up` takes root: it makes control groups and jails, and gives the rest away",
            )
            .hint(format!("sudo {}pepo up", instance.prefix())));
        }
        let interrupts = Interrupts::new()?;
        Supervisor::take(instance)?.run(interrupts).await
    }
}
