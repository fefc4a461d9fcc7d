//! Booting: `Plan -> Prepared -> Booted -> Warm`, each step consuming the last, so that none can be skipped.
//!
//! ```text
//! Plan ──prepare──▶ Prepared ──start──▶ Booted ──hello──▶ Warm ──activate──▶ Active ──stop──▶ Exit
//!        directory,           keeper,            the guest        this            the one
//!        cgroup, disk         VMM, vsock         answers          Sandbox         stop path
//! ```
//! A step that fails, is cancelled, or whose result is dropped gives everything back. Nothing returns a [`Warm`] from an
//! `Active`: a Sandbox serves once.

use std::time::{Duration, Instant};

use pepo_proto::HelloReply;
use pepo_proto::console::READY;
use tokio_util::sync::CancellationToken;

use crate::guest::{self, Guest};
use crate::host::{self, Host, Keeper};
use crate::id::SandboxId;
use crate::keeper::Console;
use crate::net::address;
use crate::plan::{self, Plan};

/// How long a guest may take from its VMM's start to its first answer. In software emulation on a busy machine of two cores
/// 2 s are usual; twenty boots at once were seen to need ten times that.
pub const HELLO_WITHIN: Duration = Duration::from_secs(90);

/// Why there is no Sandbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The Plan is not one.
    #[error("plan of {id}")]
    Plan {
        /// The Sandbox that was wanted.
        id: SandboxId,
        /// What is wrong.
        source: plan::Error,
    },
    /// The privileged side did not do its part.
    #[error("{step} {id}")]
    Host {
        /// Which part.
        step: Step,
        /// The Sandbox that was wanted.
        id: SandboxId,
        /// Why not.
        source: host::Error,
    },
    /// The guest or its VMM ended before it answered.
    #[error("{id} ended while it {step}: {detail}")]
    Ended {
        /// What was done.
        step: Step,
        /// The Sandbox that was wanted.
        id: SandboxId,
        /// How it ended.
        detail: Box<crate::activate::Exit>,
    },
    /// The guest did not answer in time.
    #[error("the guest of {id} was silent for {} s", within.as_secs())]
    Silent {
        /// The Sandbox that was wanted.
        id: SandboxId,
        /// The deadline that passed.
        within: Duration,
        /// What its console said last.
        console: Vec<String>,
    },
    /// The guest refused.
    #[error("the guest of {id} failed to {step}")]
    Guest {
        /// What was done.
        step: Step,
        /// The Sandbox that was wanted.
        id: SandboxId,
        /// What it said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The caller's token was cancelled.
    #[error("{id} was cancelled")]
    Cancelled {
        /// The Sandbox that was wanted.
        id: SandboxId,
    },
}

/// A step of the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Step {
    /// Taking what does not run.
    Prepare,
    /// Starting what runs.
    Start,
    /// The guest's first answer.
    Hello,
    /// Making it this Sandbox.
    Activate,
    /// Asking the guest to end.
    Shutdown,
    /// Giving everything back.
    Release,
}

impl Step {
    /// What is done in it.
    pub fn as_str(self) -> &'static str {
        match self {
            Step::Prepare => "prepare",
            Step::Start => "start",
            Step::Hello => "boot",
            Step::Activate => "activate",
            Step::Shutdown => "shut down",
            Step::Release => "release",
        }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A Sandbox's claim on the host. Released by whoever ends it; a drop without that is a fault, told and then mended.
#[derive(Debug)]
pub(crate) struct Claim {
    host: Host,
    id: SandboxId,
    released: bool,
}

impl Claim {
    pub(crate) fn new(host: Host, id: SandboxId) -> Self {
        Claim { host, id, released: false }
    }

    pub(crate) fn host(&self) -> &Host {
        &self.host
    }

    pub(crate) fn id(&self) -> SandboxId {
        self.id
    }

    /// Lets go without giving back: it is the next life's.
    pub(crate) fn leave(mut self) -> SandboxId {
        self.released = true;
        self.id
    }

    /// Gives everything back.
    pub(crate) async fn release(mut self) -> Result<(), host::Error> {
        let released = self.host.release(self.id).await;
        // Answered either way: what is owed now is the caller's to repeat, not the drop's.
        self.released = true;
        released
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.released && !self.host.is_leaving() {
            tracing::warn!(sandbox = %self.id, "dropped without a release; releasing now");
            self.host.release_later(self.id);
        }
    }
}

/// How long each step took, in the order in which they were done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps(Vec<(Step, Duration)>);

impl Steps {
    pub(crate) fn took(&mut self, id: SandboxId, step: Step, since: Instant) {
        let took = since.elapsed();
        tracing::debug!(sandbox = %id, %step, took_ms = took.as_secs_f64() * 1e3, "step");
        self.0.push((step, took));
    }

    /// Each step with its time.
    pub fn iter(&self) -> impl Iterator<Item = (Step, Duration)> {
        self.0.iter().copied()
    }
}

/// What does not run is there.
#[derive(Debug)]
pub struct Prepared {
    claim: Claim,
    plan: Plan,
    steps: Steps,
}

/// VMM and vsock device run.
#[derive(Debug)]
pub struct Booted {
    claim: Claim,
    plan: Plan,
    keeper: Keeper,
    since: Instant,
    steps: Steps,
}

/// The guest answers and is nobody's yet.
#[derive(Debug)]
pub struct Warm {
    pub(crate) claim: Claim,
    pub(crate) plan: Plan,
    pub(crate) keeper: Keeper,
    pub(crate) guest: Guest,
    pub(crate) steps: Steps,
    hello: HelloReply,
    took: Duration,
}

/// The whole line from a Plan to a guest that answers.
///
/// # Errors
/// Whatever step failed; everything has been given back then (or is owed, which the log tells).
pub async fn boot(host: &Host, plan: Plan, cancel: &CancellationToken) -> Result<Warm, Error> {
    Prepared::new(host, plan, cancel).await?.start(cancel).await?.hello(cancel).await
}

impl Prepared {
    /// Checks the Plan and takes what a Sandbox needs before it runs.
    ///
    /// # Errors
    /// [`Error::Plan`], [`Error::Host`], [`Error::Cancelled`].
    pub async fn new(host: &Host, plan: Plan, cancel: &CancellationToken) -> Result<Self, Error> {
        let id = plan.id;
        // The slot is taken since the id was made, so the claim begins here, before any check can fail.
        let claim = Claim::new(host.clone(), id);
        if let Err(source) = plan.check() {
            return Err(give_back(claim, Error::Plan { id, source }).await);
        }
        let since = Instant::now();
        match step(cancel, host.prepare(&plan)).await {
            Some(Ok(())) => {
                let mut steps = Steps::default();
                steps.took(id, Step::Prepare, since);
                Ok(Prepared { claim, plan, steps })
            }
            Some(Err(source)) => Err(give_back(claim, Error::Host { step: Step::Prepare, id, source }).await),
            None => Err(give_back(claim, Error::Cancelled { id }).await),
        }
    }

    /// Starts keeper, VMM and vsock device.
    ///
    /// # Errors
    /// [`Error::Host`], [`Error::Cancelled`].
    pub async fn start(self, cancel: &CancellationToken) -> Result<Booted, Error> {
        let Prepared { claim, plan, mut steps } = self;
        let (id, since) = (plan.id, Instant::now());
        let started = step(cancel, claim.host.start(id)).await;
        match started {
            Some(Ok(keeper)) => {
                steps.took(id, Step::Start, since);
                Ok(Booted { claim, plan, keeper, since, steps })
            }
            Some(Err(source)) => Err(give_back(claim, Error::Host { step: Step::Start, id, source }).await),
            None => Err(give_back(claim, Error::Cancelled { id }).await),
        }
    }

    /// Gives everything back.
    ///
    /// # Errors
    /// What is left.
    pub async fn release(self) -> Result<(), host::Error> {
        self.claim.release().await
    }
}

/// What a guest's interface has before its slot is asked (the kernel's `ETH_DATA_LEN`).
const ETHERNET_MTU: u32 = 1500;

/// Streams of a guest that waits: for Activate, a mount, its proof, and the first command.
const POISED: usize = 4;

/// How long between two tries to reach a guest that does not answer yet.
const KNOCK: Duration = Duration::from_millis(20);

/// How long one try may take before the next: a guest that listens answers in milliseconds, and one that does not yet is
/// answered by no one (the vsock device has no reset for a port without a listener).
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

impl Booted {
    /// Waits for the guest's first answer.
    ///
    /// # Errors
    /// [`Error::Ended`], [`Error::Silent`], [`Error::Guest`] (the generations do not meet), [`Error::Cancelled`].
    pub async fn hello(self, cancel: &CancellationToken) -> Result<Warm, Error> {
        let Booted { claim, plan, keeper, since, mut steps } = self;
        let (id, started) = (plan.id, Instant::now());
        #[cfg(feature = "fake")]
        if let Err(source) = claim.host.may(Step::Hello).await {
            return Err(give_back(claim, Error::Host { step: Step::Hello, id, source }).await);
        }
        let guest = claim.host.guest(id);
        let knocking = tokio::time::timeout(HELLO_WITHIN, async {
            listening(&claim).await;
            knock(&guest).await
        });
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(Error::Cancelled { id }),
            () = keeper.ended() => return Err(ended(claim, Step::Hello).await),
            answered = knocking => match answered {
                Ok(Ok(hello)) => Ok(hello),
                Ok(Err(source)) => Err(Error::Guest { step: Step::Hello, id, source: source.into() }),
                Err(_) => Err(Error::Silent { id, within: HELLO_WITHIN, console: console(&claim).await }),
            },
        };
        match outcome {
            Ok(hello) => {
                steps.took(id, Step::Hello, started);
                Ok(Warm { claim, plan, keeper, guest, steps, hello, took: since.elapsed() })
            }
            Err(error) => Err(give_back(claim, error).await),
        }
    }

    /// Ends it and gives everything back.
    ///
    /// # Errors
    /// What is left.
    pub async fn release(self) -> Result<(), host::Error> {
        self.claim.release().await
    }
}

impl Warm {
    /// Whose it is.
    pub fn id(&self) -> SandboxId {
        self.plan.id
    }

    /// What it was made of.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the guest said of itself.
    pub fn hello(&self) -> &HelloReply {
        &self.hello
    }

    /// What each step took so far.
    pub fn steps(&self) -> &Steps {
        &self.steps
    }

    /// From the start of its processes to its first answer.
    pub fn took(&self) -> Duration {
        self.took
    }

    /// Makes it ready to wait for whoever will claim it: the guest does what can be done ahead, and the streams of its
    /// activation and of the first command are connected.
    ///
    /// # Errors
    /// The guest does not: it is of no use, and is to be released.
    pub async fn poise(&self) -> Result<(), guest::Error> {
        let network = (self.plan.network != plan::Network::Absent).then(|| address::guest_network(ETHERNET_MTU));
        self.guest.ready(network).await?;
        self.guest.hold(POISED).await
    }

    /// The guest, to ask whether it is there: it takes nothing else before it is activated.
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// A watch on its end that outlives this borrow.
    pub fn keeper(&self) -> Keeper {
        self.keeper.clone()
    }

    /// Returns when it has ended by itself; then [`Warm::release`] it.
    pub async fn ended(&self) {
        self.keeper.ended().await;
    }

    /// Ends it and gives everything back: nobody used it, so there is nothing to flush.
    ///
    /// # Errors
    /// What is left.
    pub async fn release(self) -> Result<(), host::Error> {
        self.claim.release().await
    }
}

/// Runs one step unless the caller's token is cancelled first (`None`). A request that was sent goes on over there; the
/// release that follows waits for it.
pub(crate) async fn step<T>(cancel: &CancellationToken, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        () = cancel.cancelled() => None,
        done = work => Some(done),
    }
}

/// Gives everything back after a failure, which stays the failure that is told.
pub(crate) async fn give_back(claim: Claim, error: Error) -> Error {
    let id = claim.id;
    if let Err(owed) = claim.release().await {
        tracing::error!(sandbox = %id, error = %owed, "not everything was given back");
    }
    error
}

/// How a Sandbox that ended by itself ended, everything given back.
pub(crate) async fn ended(claim: Claim, step: Step) -> Error {
    let id = claim.id;
    let exit = crate::activate::collect(claim, crate::activate::Asked::No).await;
    Error::Ended { step, id, detail: Box::new(exit) }
}

async fn console(claim: &Claim) -> Vec<String> {
    claim.host.evidence(claim.id).await.map(|evidence| evidence.console.last_lines(20)).unwrap_or_default()
}

/// How often the console is looked at while a guest boots: one read of a few bytes.
const LOOK: Duration = Duration::from_millis(3);

/// How long a guest that says nothing on its console is waited for before it is dialled all the same.
const SAID_WITHIN: Duration = Duration::from_secs(60);

/// Returns when the guest has said that it listens. It is not dialled before: vhost-device-vsock 0.3.0 loses the thread that
/// serves its queues when a stream comes between the moments at which it gets the guest's memory and its queues, and the
/// guest is mute from then on.
async fn listening(claim: &Claim) {
    let Some(file) = claim.host.evidence(claim.id).await.ok().and_then(|evidence| evidence.file) else { return };
    let said = async {
        let mut seen = 0;
        loop {
            let written = Console::written(&file).unwrap_or(0);
            if written != seen && Console::read(&file).is_ok_and(|console| console.has_line(READY)) {
                return;
            }
            seen = written;
            tokio::time::sleep(LOOK).await;
        }
    };
    if tokio::time::timeout(SAID_WITHIN, said).await.is_err() {
        tracing::warn!(sandbox = %claim.id, "the guest does not say that it listens; dialling all the same");
    }
}

/// Says Hello until it is answered. Only an answer that can never become another ends it.
async fn knock(guest: &Guest) -> Result<HelloReply, guest::Error> {
    loop {
        match tokio::time::timeout(ANSWER_WITHIN, guest.hello()).await {
            Ok(Ok(hello)) => return Ok(hello),
            Ok(Err(error @ (guest::Error::Failed(_) | guest::Error::Protocol(_)))) => return Err(error),
            Ok(Err(_)) => tokio::time::sleep(KNOCK).await,
            Err(_) => {}
        }
    }
}
