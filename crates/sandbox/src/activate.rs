//! Activation and the one stop path: `Warm + Activation -> Active -> Exit`.
//!
//! Every way a Sandbox ends joins [`Active::stop`]: the guest is asked to shut down if it still can be, the keeper and all
//! below it are killed, what they left is read, and everything is given back in reverse order. An adopted Sandbox is an
//! [`Active`] like any other.

use std::time::{Duration, Instant};

use pepo_proto::console::{AGENT_DIED, BOOT_FAILED};
use pepo_proto::{Activate, Network, Share};
use tokio_util::sync::CancellationToken;

use crate::boot::{self, Claim, Error, Step, Steps, Warm};
use crate::guest::{self, Guest};
use crate::host::{self, Evidence, Host, Keeper};
use crate::id::{SandboxId, VolumeId};
use crate::jail::Access;
use crate::keeper::{ExitRecord, Left, Shutdown};
use crate::net::{Policy, address};
use crate::plan::Plan;
use crate::share::{Cache, Handing, PROOF, SharePlan};

/// How long a guest may take to become this Sandbox.
const ACTIVATE_WITHIN: Duration = Duration::from_secs(30);

/// How long a VMM may take to end after its guest said it is shutting down.
const POWER_OFF_WITHIN: Duration = Duration::from_secs(5);

/// How much later than a server of its trees a Sandbox's keeper may end for its end to be the one that is told: it reads
/// the console for half a second.
const BESIDE: Duration = Duration::from_millis(1500);

/// Console lines kept in an [`Exit`].
const CONSOLE_LINES: usize = 20;

/// Why a Sandbox ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// It was asked to, by [`Active::stop`].
    Stopped,
    /// The host's kernel killed a process of it for memory.
    OutOfMemory,
    /// The guest's kernel panicked.
    GuestPanic,
    /// The guest's first process died.
    GuestInitDied,
    /// The guest switched itself off or restarted.
    GuestOff,
    /// The VMM or its vsock device ended otherwise.
    VmmExit,
    /// A tree that it was served is not served any more.
    MountLost,
    /// Its keeper was killed: nothing was written.
    KilledOutside,
    /// None of these can be told.
    Unknown,
}

impl Cause {
    /// Its name outside.
    pub fn as_str(self) -> &'static str {
        match self {
            Cause::Stopped => "stopped",
            Cause::OutOfMemory => "out_of_memory",
            Cause::GuestPanic => "guest_panic",
            Cause::GuestInitDied => "guest_init_died",
            Cause::GuestOff => "guest_off",
            Cause::VmmExit => "vmm_exit",
            Cause::MountLost => "mount_lost",
            Cause::KilledOutside => "killed_outside",
            Cause::Unknown => "unknown",
        }
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A Sandbox's end.
#[derive(Clone, Debug)]
pub struct Exit {
    /// Whose.
    pub id: SandboxId,
    /// Why.
    pub cause: Cause,
    /// One sentence for people, safe to show.
    pub detail: String,
    /// The last lines of its console, safe to show.
    pub console: Vec<String>,
    /// What the keeper wrote.
    pub record: Option<ExitRecord>,
    /// What it had used at its end; of its disks, at the last look before that.
    pub usage: Option<host::Usage>,
    /// What its network had carried, where it had one.
    pub traffic: Option<crate::net::Traffic>,
    /// Whether everything was given back; if not, [`Host::release`] again.
    pub released: Result<(), host::Error>,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.detail, self.cause)
    }
}

impl Warm {
    /// Puts a network policy in force, before the guest hears of its network: what it is told then.
    ///
    /// # Errors
    /// As [`Host::network`]; it is still to be released.
    pub async fn network(&self, policy: &Policy) -> Result<Network, host::Error> {
        let link = self.claim.host().network(self.plan.id, policy).await?;
        Ok(address::guest_network(link.mtu))
    }

    /// Makes it this Sandbox: once, and there is no way back.
    ///
    /// # Errors
    /// [`Error::Guest`], [`Error::Ended`], [`Error::Silent`], [`Error::Cancelled`]; everything has been given back then.
    ///
    /// Every mount stands, and is proved to be the host's tree, before this returns.
    pub async fn activate(
        self,
        activation: Activate,
        mounts: Vec<Mount>,
        cancel: &CancellationToken,
    ) -> Result<Active, Error> {
        let Warm { claim, plan, keeper, guest, mut steps, .. } = self;
        let (id, since) = (plan.id, Instant::now());
        #[cfg(feature = "fake")]
        if let Err(source) = claim.host().may(Step::Activate).await {
            return Err(boot::give_back(claim, Error::Host { step: Step::Activate, id, source }).await);
        }
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(Error::Cancelled { id }),
            () = keeper.ended() => return Err(boot::ended(claim, Step::Activate).await),
            done = tokio::time::timeout(ACTIVATE_WITHIN, become_it(&claim, &guest, activation, mounts)) => match done {
                Ok(Ok(servers)) => Ok(servers),
                Ok(Err(source)) => Err(Error::Guest { step: Step::Activate, id, source }),
                Err(_) => Err(Error::Silent { id, within: ACTIVATE_WITHIN, console: Vec::new() }),
            },
        };
        match outcome {
            Ok(servers) => {
                steps.took(id, Step::Activate, since);
                Ok(Active { claim, plan, keeper, guest, servers, steps })
            }
            Err(error) => Err(boot::give_back(claim, error).await),
        }
    }
}

/// A tree of the host's that a Sandbox gets.
#[derive(Clone, Debug)]
pub struct Mount {
    /// Which tree, and how; its proof is made here.
    pub volume: VolumeId,
    /// Whether the guest may change it.
    pub access: Access,
    /// Whether others may.
    pub cache: Cache,
    /// Where in the guest.
    pub path: String,
}

/// Why a mount does not stand.
#[derive(Debug, thiserror::Error)]
enum MountError {
    #[error("mount {path}")]
    Guest { path: String, source: guest::Error },
    #[error("serve {path}")]
    Host { path: String, source: host::Error },
    #[error("make a way to the server")]
    Hatch(#[source] std::io::Error),
    #[error("no random bytes")]
    Random(#[source] std::io::Error),
    #[error("what is at {path} in the guest is not the tree that was to be there")]
    Unproved { path: String },
}

/// Everything that makes a guest this Sandbox.
async fn become_it(
    claim: &Claim,
    guest: &Guest,
    activation: Activate,
    mounts: Vec<Mount>,
) -> Result<Vec<Keeper>, Box<dyn std::error::Error + Send + Sync>> {
    let activated = async { Ok(guest.activate(activation).await?) };
    let stood = async {
        let mut servers = Vec::with_capacity(mounts.len());
        for mount in mounts {
            servers.push(stand(claim, guest, mount).await?);
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(servers)
    };
    // At once: most of a mount is the host's to do, most of the rest the guest's.
    let ((), servers) = tokio::try_join!(activated, stood)?;
    Ok(servers)
}

/// One mount: the guest mounts, the host serves, and a file that only the server can know is read through both.
async fn stand(claim: &Claim, guest: &Guest, mount: Mount) -> Result<Keeper, MountError> {
    let Mount { volume, access, cache, path } = mount;
    let told = |source| MountError::Guest { path: path.clone(), source };
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| MountError::Random(error.into()))?;
    let proof: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let share = Share { path: path.clone(), read_only: access == Access::ReadOnly };
    let began = Instant::now();
    let (hand, hatch) = Handing::new().map_err(MountError::Hatch)?;
    // The server goes into its jail while the guest mounts, and the guest waits in its read until it is served.
    let mounted = async {
        let stream = guest.share(share).await.map_err(told)?;
        let mounted = began.elapsed();
        // A server that is gone, or does not get it, says so itself.
        let _ = hand.hand(&stream);
        drop(stream);
        Ok((said(guest, &path, proof.len()).await.map_err(told)?, mounted))
    };
    let served = async {
        let plan = SharePlan { volume, access, cache, proof: proof.clone() };
        let served = claim.host().share(claim.id(), plan, hatch).await;
        served.map(|server| (server, began.elapsed())).map_err(|source| MountError::Host { path: path.clone(), source })
    };
    let ((said, mounted), (server, served)) = tokio::try_join!(mounted, served)?;
    tracing::debug!(sandbox = %claim.id(), ?mounted, ?served, proved = ?began.elapsed(), path, "a tree stands");
    if said == proof.as_bytes() { Ok(server) } else { Err(MountError::Unproved { path }) }
}

/// What the file says that proves the mount at this path, as far as it is to be read: its end would be asked for once more.
async fn said(guest: &Guest, path: &str, length: usize) -> Result<Vec<u8>, guest::Error> {
    let read = pepo_proto::Read {
        path: format!("{}/{}", path.trim_end_matches('/'), PROOF.to_string_lossy()),
        offset: 0,
        length: Some(length as u64),
        user: Some("0".to_owned()),
    };
    let (_, mut download) = guest.read(read).await?;
    let mut said = Vec::new();
    while let Some(bytes) = download.next().await {
        said.extend_from_slice(&bytes?);
        if said.len() > length {
            break;
        }
    }
    Ok(said)
}

/// A Sandbox that serves.
#[derive(Debug)]
pub struct Active {
    claim: Claim,
    plan: Plan,
    keeper: Keeper,
    guest: Guest,
    /// Who serves its trees.
    servers: Vec<Keeper>,
    steps: Steps,
}

/// Takes over a Sandbox that an earlier life of pepod activated. Whether it *was* activated is the caller's to know: one
/// that nobody claimed is released instead.
///
/// # Errors
/// It does not run (any more): [`Host::evidence`] tells how it ended, [`Host::release`] gives it back.
pub async fn adopt(host: &Host, id: SandboxId) -> Result<Active, host::Error> {
    let (plan, keeper, servers) = host.adopt(id).await?;
    let (claim, guest) = (Claim::new(host.clone(), id), host.guest(id));
    Ok(Active { claim, plan, keeper, guest, servers, steps: Steps::default() })
}

/// How a Sandbox ended that no [`Active`] holds any more (its keeper ended while pepod was away); everything is given back.
pub async fn gone(host: &Host, id: SandboxId) -> Exit {
    collect(Claim::new(host.clone(), id), Asked::No).await
}

impl Active {
    /// Which it is.
    pub fn id(&self) -> SandboxId {
        self.plan.id
    }

    /// What it was made of.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether something is mounted in it that outlasts it.
    pub fn has_mounts(&self) -> bool {
        !self.servers.is_empty()
    }

    /// What each step of its making took; nothing of one that was adopted.
    pub fn steps(&self) -> &Steps {
        &self.steps
    }

    /// The guest's operations. Cheap to clone; its streams end when the Sandbox does.
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Returns when it has ended by itself, at once every time after that. [`Active::stop`] then says how and gives it back.
    pub async fn wait(&self) {
        self.life().ended().await;
    }

    /// A watch on its end that outlives this borrow.
    pub fn life(&self) -> Life {
        Life { keeper: self.keeper.clone(), servers: self.servers.clone() }
    }

    /// What it uses on the host now.
    ///
    /// # Errors
    /// As [`Host::usage`].
    pub async fn usage(&self) -> Result<host::Usage, host::Error> {
        self.claim.host().usage(self.id()).await
    }

    /// What the guest last said of its own memory, where its VMM asks: `None` under QEMU, and until it has said something.
    ///
    /// # Errors
    /// As [`Host::evidence`].
    pub async fn guest_memory(&self) -> Result<Option<crate::vmm::firecracker::GuestMemory>, host::Error> {
        Ok(self.claim.host().evidence(self.id()).await?.memory)
    }

    /// Puts another network policy in force at one moment: what is no longer allowed stops there.
    ///
    /// # Errors
    /// As [`Host::network`].
    pub async fn network(&self, policy: &Policy) -> Result<(), host::Error> {
        self.claim.host().network(self.id(), policy).await.map(drop)
    }

    /// What its console printed last.
    ///
    /// # Errors
    /// As [`Host::evidence`].
    pub async fn console(&self) -> Result<crate::keeper::Console, host::Error> {
        Ok(self.claim.host().evidence(self.id()).await?.console)
    }

    /// Lets go of it without ending it: it runs on, and the next life of pepod adopts it by this id.
    pub fn leave(self) -> SandboxId {
        self.claim.leave()
    }

    /// The one stop path. With a grace the guest is asked to end its programs and flush first; `Duration::ZERO` asks nothing.
    /// What had ended before is told as it ended, else the cause is [`Cause::Stopped`].
    pub async fn stop(self, grace: Duration) -> Exit {
        let life = self.life();
        let Active { claim, keeper, guest, .. } = self;
        if life.lost_a_mount().await {
            return collect(claim, Asked::MountLost).await;
        }
        if keeper.has_ended() {
            return collect(claim, Asked::No).await;
        }
        // What its disks did is the VMM's account, which goes with it.
        let (last, carried) = tokio::join!(claim.host().usage(claim.id()), claim.host().traffic(claim.id()));
        let last = last.unwrap_or_default();
        if !grace.is_zero() {
            let asked = tokio::time::timeout(grace, async {
                #[cfg(feature = "fake")]
                if claim.host().may(Step::Shutdown).await.is_err() {
                    // A guest that does not answer.
                    std::future::pending::<()>().await;
                }
                guest.shutdown(grace).await
            });
            tokio::select! {
                biased;
                () = keeper.ended() => {}
                asked = asked => match asked {
                    Ok(Ok(())) => {
                        let _ = tokio::time::timeout(POWER_OFF_WITHIN.min(grace), keeper.ended()).await;
                    }
                    Ok(Err(error)) => tracing::debug!(sandbox = %claim.id(), %error, "the guest did not take the shutdown"),
                    Err(_) => tracing::debug!(sandbox = %claim.id(), "the guest did not shut down in time"),
                },
            }
        }
        let mut exit = collect(claim, Asked::Yes).await;
        if let Some(usage) = &mut exit.usage {
            usage.disk_bytes = last.disk_bytes;
            (usage.read_bytes, usage.write_bytes) = (last.read_bytes, last.write_bytes);
        }
        exit.traffic = exit.traffic.or(carried.ok());
        exit
    }
}

/// What ends with a Sandbox, or ends it: its keeper, and the servers of its trees.
#[derive(Clone, Debug)]
pub struct Life {
    keeper: Keeper,
    servers: Vec<Keeper>,
}

impl Life {
    /// Returns when the Sandbox has ended or has lost a tree.
    pub async fn ended(&self) {
        let all = self.servers.iter().chain([&self.keeper]).map(|process| Box::pin(process.ended()));
        futures_util::future::select_all(all).await;
    }

    /// Whether a server ended and the keeper goes on. A Sandbox that ends takes its servers along, some of them a moment
    /// before its keeper has written how.
    async fn lost_a_mount(&self) -> bool {
        if !self.servers.iter().any(Keeper::has_ended) {
            return false;
        }
        tokio::time::timeout(BESIDE, self.keeper.ended()).await.is_err()
    }
}

/// Whether the end was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// By us.
    Yes,
    /// It came by itself.
    No,
    /// By us, since a tree that it was served is not served any more.
    MountLost,
}

/// Reads what is left, gives everything back, and says how it ended.
pub(crate) async fn collect(claim: Claim, asked: Asked) -> Exit {
    let id = claim.id();
    let evidence = claim.host().evidence(id).await.unwrap_or_else(|error| {
        tracing::debug!(sandbox = %id, %error, "no evidence");
        Evidence::default()
    });
    // Its processes are gone, their account stands until the cgroup goes.
    let (usage, traffic) = tokio::join!(claim.host().usage(id), claim.host().traffic(id));
    let (usage, traffic) = (usage.ok(), traffic.ok());
    let released = claim.release().await;
    Exit { usage, traffic, ..exit(id, evidence, asked, released) }
}

/// Tells the cause from the evidence. A guest can forge its console: it names a cause here and decides nothing.
pub(crate) fn exit(id: SandboxId, evidence: Evidence, asked: Asked, released: Result<(), host::Error>) -> Exit {
    let Evidence { exit: record, console, .. } = evidence;
    let (cause, detail) = match (&record, asked) {
        (_, Asked::MountLost) => (
            Cause::MountLost,
            "the server of its files ended, so it was ended: what was acknowledged is kept".to_owned(),
        ),
        (_, Asked::Yes) => (Cause::Stopped, "stopped as asked".to_owned()),
        (None, Asked::No) => (Cause::KilledOutside, "killed from outside: its keeper wrote nothing".to_owned()),
        (Some(record), Asked::No) => told(record, &console.bytes),
    };
    Exit { id, cause, detail, console: console.last_lines(CONSOLE_LINES), record, usage: None, traffic: None, released }
}

fn told(record: &ExitRecord, console: &[u8]) -> (Cause, String) {
    if record.oom_kills > 0 && record.signal == Some(9) {
        return (Cause::OutOfMemory, "the host's kernel killed it for memory".to_owned());
    }
    let who = match record.left {
        Left::Vmm => "VMM",
        Left::Device => "vsock device",
        Left::Keeper => "keeper",
    };
    let how = match (record.code, record.signal) {
        (_, Some(signal)) => format!("{who} ended by signal {signal}"),
        (Some(code), None) => format!("{who} ended with code {code}"),
        (None, None) => format!("{who} gave up"),
    };
    match record.shutdown {
        Some(Shutdown::GuestShutdown | Shutdown::GuestReset) if said_by_init(console) => {
            (Cause::GuestInitDied, "the guest's agent died, and its first process ended the guest".to_owned())
        }
        Some(Shutdown::GuestShutdown) => (Cause::GuestOff, "the guest switched itself off".to_owned()),
        Some(off @ (Shutdown::GuestReset | Shutdown::GuestPanic)) => match panic(console) {
            Some(Cause::GuestInitDied) => (Cause::GuestInitDied, "the guest's first process died".to_owned()),
            Some(_) => (Cause::GuestPanic, "the guest's kernel panicked".to_owned()),
            None if off == Shutdown::GuestPanic => (Cause::GuestPanic, "the guest's kernel panicked".to_owned()),
            None => (Cause::GuestOff, "the guest restarted itself".to_owned()),
        },
        _ => {
            let said = crate::keeper::escape(record.stderr.trim(), 400);
            let detail = if said.is_empty() { how } else { format!("{how}: {said}") };
            (Cause::VmmExit, detail)
        }
    }
}

/// Whether the guest's first process said, among the last lines, that it cannot go on.
fn said_by_init(console: &[u8]) -> bool {
    let text = String::from_utf8_lossy(console);
    text.lines().rev().take(CONSOLE_LINES).any(|line| line.starts_with(AGENT_DIED) || line.starts_with(BOOT_FAILED))
}

/// The kernel's last words, if they are there.
fn panic(console: &[u8]) -> Option<Cause> {
    let text = String::from_utf8_lossy(console);
    let at = text.rfind("Kernel panic - not syncing")?;
    let line = text[at..].lines().next().unwrap_or_default();
    Some(if line.contains("Attempted to kill init") { Cause::GuestInitDied } else { Cause::GuestPanic })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Slot;
    use crate::keeper::Console;

    fn record() -> ExitRecord {
        ExitRecord {
            left: Left::Vmm,
            code: Some(0),
            signal: None,
            oom_kills: 0,
            shutdown: None,
            stderr: String::new(),
            at_unix_ms: 1,
        }
    }

    fn cause(record: Option<ExitRecord>, console: &str, asked: Asked) -> Exit {
        let id = SandboxId::new(Slot::new(1).expect("slot"));
        let console = Console { bytes: console.into(), ..Console::default() };
        exit(id, Evidence { exit: record, console, ..Evidence::default() }, asked, Ok(()))
    }

    #[test]
    fn each_end_has_its_cause() {
        let reset = || Some(ExitRecord { shutdown: Some(Shutdown::GuestReset), ..record() });
        let init = "[ 3.1] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000009\n[ 3.1] Rebooting";
        let panicked = "[ 3.1] Kernel panic - not syncing: sysrq triggered crash\n";
        assert_eq!(cause(reset(), init, Asked::No).cause, Cause::GuestInitDied);
        assert_eq!(cause(reset(), panicked, Asked::No).cause, Cause::GuestPanic);
        assert_eq!(cause(reset(), "all is well", Asked::No).cause, Cause::GuestOff);
        let off = ExitRecord { shutdown: Some(Shutdown::GuestShutdown), ..record() };
        assert_eq!(cause(Some(off.clone()), panicked, Asked::No).cause, Cause::GuestOff);
        let died = "booting\r\npepo-guest: the agent died: signal 9\r\n";
        assert_eq!(cause(Some(off), died, Asked::No).cause, Cause::GuestInitDied);
        let killed = ExitRecord { code: None, signal: Some(9), ..record() };
        assert_eq!(cause(Some(killed.clone()), "", Asked::No).cause, Cause::VmmExit);
        assert_eq!(cause(Some(ExitRecord { oom_kills: 1, ..killed }), "", Asked::No).cause, Cause::OutOfMemory);
        assert_eq!(cause(None, "", Asked::No).cause, Cause::KilledOutside);
        assert_eq!(cause(None, "", Asked::Yes).cause, Cause::Stopped);
    }

    #[test]
    fn what_a_program_said_is_shown_escaped() {
        let said = ExitRecord { stderr: "qemu: \u{1b}[2J no\nsecond".into(), code: Some(1), ..record() };
        let exit = cause(Some(said), "", Asked::No);
        assert!(exit.detail.contains("code 1") && !exit.detail.chars().any(char::is_control), "{}", exit.detail);
    }
}
