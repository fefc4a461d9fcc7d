//! One activation of a Session: a Sandbox is made for it, claimed, and becomes the Session's.
//!
//! Called by the driver, once per activation, on a task of its own. Promises that what fails or is cancelled has given
//! everything back, and that the claim is on the disk before the guest may run anything of the Session.

use jiff::Timestamp;
use pepo_api::Reason;
use pepo_sandbox::net::Policy;
use pepo_sandbox::plan::Network as Interface;
use pepo_sandbox::proto::{Activate, Keep, Network, Variable};
use pepo_sandbox::{Active, Exit, Warm, chain};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::state::{Cause, Tenure};
use super::{Files, Session, Sessions};
use crate::pool::Shape;
use crate::store::{Claim, Purpose, Write};

/// Fresh bytes for a guest's random generator.
const ENTROPY: usize = 256;

/// A Sandbox that became a Session's, and the network policy it was given; none where it has no network.
#[derive(Debug)]
pub(super) struct Activated {
    pub(super) active: Active,
    pub(super) policy: Option<Policy>,
}

/// Where the Sandbox comes from.
#[derive(Debug)]
pub(super) enum From {
    /// It is to be made.
    Files {
        /// Of this.
        files: Files,
        /// In this shape.
        shape: Shape,
    },
    /// It waits ready.
    Warm {
        /// It.
        warm: Warm,
        /// Whether the store knows whose it is.
        committed: bool,
    },
}

/// Makes a Sandbox and gives it to the Session. What fails gives everything back.
pub(super) async fn make(
    sessions: Sessions,
    session: Session,
    from: From,
    tenure: Tenure,
    cancel: CancellationToken,
) -> Result<Activated, Cause> {
    let Some(id) = super::engine_id(tenure.sandbox) else {
        return Err(Cause::told(Reason::SetupFailed, "an id that is none"));
    };
    let within = sessions.0.config.start_timeout;
    let late = cancel.clone();
    let timer = tokio::spawn(async move {
        tokio::time::sleep(within).await;
        late.cancel();
    });
    let begun = tokio::time::Instant::now();
    let span = tracing::info_span!("activation", session = %session.id(), sandbox = %id, number = tenure.activation);
    let made = attempt(&sessions, &session, from, tenure, id, &cancel).instrument(span.clone()).await;
    timer.abort();
    match made {
        Ok(activated) => {
            crate::metrics::METRICS.activated(activated.active.steps());
            for (step, took) in activated.active.steps().iter() {
                tracing::debug!(parent: &span, step = step.as_str(), ?took, "step");
            }
            Ok(activated)
        }
        Err(mut cause) => {
            crate::metrics::METRICS.not_activated();
            if begun.elapsed() >= within {
                cause.message = format!("it did not start within {} s: {}", within.as_secs(), cause.message);
            }
            sessions.bury(id).await;
            Err(cause)
        }
    }
}

async fn attempt(
    sessions: &Sessions,
    session: &Session,
    from: From,
    tenure: Tenure,
    id: pepo_sandbox::SandboxId,
    cancel: &CancellationToken,
) -> Result<Activated, Cause> {
    let failed = |error: &dyn std::error::Error| Cause::told(Reason::SetupFailed, chain(error));
    let inner = &sessions.0;
    let spec = session.now().spec;
    if let Some(used) = &spec.workspace {
        tokio::select! {
            biased;
            () = cancel.cancelled() => return Err(Cause::told(Reason::SetupFailed, "its Workspace was in use")),
            attached = inner.workspaces.attach(tenure.sandbox, used) => attached.map_err(|error| failed(&error))?,
        }
    }
    let (warm, committed, has_waited) = match from {
        From::Warm { warm, committed } => (warm, committed, true),
        From::Files { files, shape } => {
            // Recorded before the first thing is taken.
            inner.store.write(Write::NewSandbox(tenure.sandbox)).await.map_err(|error| failed(&error))?;
            let its_turn = async {
                // What the pool has too much of is given back first.
                inner.capacity.settled().await;
                inner.capacity.turn().await
            };
            let turn = tokio::select! {
                biased;
                () = cancel.cancelled() => return Err(Cause::told(Reason::SetupFailed, "its turn to start did not come")),
                turn = its_turn => turn,
            };
            let plan = shape.plan(id, &files, inner.config.io, sessions.interface());
            let booted = pepo_sandbox::boot(&inner.host, plan, cancel).await;
            let warm = booted.map_err(|error| boot_cause(&error))?;
            tracing::info!(session = %session.id(), sandbox = %id, took = ?warm.took(), guest = ?warm.hello(), "booted");
            drop(turn);
            (warm, false, false)
        }
    };
    // Committed before Activate is sent: from there on the guest may have run what the Session wanted.
    let claimed = async {
        if !committed {
            let claim = Claim { sandbox: tenure.sandbox, session: session.id(), activation: tenure.activation };
            inner.store.write(Write::Claim(claim)).await.map_err(|error| failed(&error))?;
        }
        Ok::<(), Cause>(())
    };
    let mounts = async {
        let mut mounts = Vec::new();
        if let Some(used) = &spec.workspace {
            mounts.push(inner.workspaces.mount(session.app(), used).await.map_err(|error| failed(&error))?);
        }
        mounts.extend(inner.workspaces.mount_lent(&spec.volumes));
        Ok(mounts)
    };
    // Each is done when another fails: none is cut off half-way.
    let (claimed, mounts, gathered) = tokio::join!(claimed, mounts, gather(sessions, session, &warm, has_waited));
    let all = claimed.and(mounts).and_then(|mounts| gathered.map(|(activate, policy)| (activate, policy, mounts)));
    let (activate, policy, mounts) = match all {
        Ok(all) => all,
        Err(cause) => {
            if let Err(error) = warm.release().await {
                tracing::error!(sandbox = %id, %error, "not everything was given back");
            }
            return Err(cause);
        }
    };
    let active = warm.activate(activate, mounts, cancel).await.map_err(|error| boot_cause(&error))?;
    if spec.persist.is_empty() {
        return Ok(Activated { active, policy });
    }
    let keep = Keep { top: crate::workspace::KEPT.to_owned(), paths: spec.persist.clone(), user: None };
    match active.guest().keep(keep).await {
        Ok(()) => Ok(Activated { active, policy }),
        Err(error) => {
            let exit = active.stop(std::time::Duration::ZERO).await;
            if let Err(error) = exit.released {
                tracing::error!(sandbox = %id, %error, "not everything was given back");
            }
            Err(failed(&error))
        }
    }
}

/// What a guest is to become. Nothing of it waits for anything else of it: its network in force before it hears of it, its
/// secrets opened here and nowhere before, for the guest that may know them.
async fn gather(
    sessions: &Sessions,
    session: &Session,
    warm: &Warm,
    has_waited: bool,
) -> Result<(Activate, Option<Policy>), Cause> {
    let failed = |error: &dyn std::error::Error| Cause::told(Reason::SetupFailed, chain(error));
    let (inner, id) = (&sessions.0, warm.plan().id);
    // What it used while it waited is nobody's.
    let base = async {
        if has_waited && let Ok(base) = inner.host.usage(id).await {
            inner.store.write_later(Write::Usage(crate::usage::sample(id, &base, None), Purpose::Base)).await;
        }
    };
    let ((), opened, secrets) = tokio::join!(base, open(sessions, session, warm), sessions.unseal(session.id()));
    let (network, policy) = opened?.unzip();
    let secrets = secrets.map_err(|error| failed(&error))?;
    let mut entropy = vec![0; ENTROPY];
    rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| failed(&std::io::Error::from(error)))?;
    let mut env = session.environment();
    env.extend(secrets.0.iter().map(|(name, value)| Variable { name: name.clone(), value: value.to_string() }));
    let activate = Activate {
        hostname: session.id().hex(),
        env,
        clock_unix_ns: u64::try_from(Timestamp::now().as_nanosecond()).unwrap_or_default(),
        entropy,
        network,
    };
    Ok((activate, policy))
}

/// Puts a Session's network policy in force in its Sandbox, where that has a network.
async fn open(sessions: &Sessions, session: &Session, warm: &Warm) -> Result<Option<(Network, Policy)>, Cause> {
    if warm.plan().network == Interface::Absent {
        return Ok(None);
    }
    let failed = |message: String| Cause::told(Reason::SetupFailed, message);
    let policy = sessions.reach().in_force(session.app(), &session.now().spec.network);
    let policy = policy.map_err(|wrong| failed(format!("{}: {}", wrong.param, wrong.message)))?;
    let network = warm.network(&policy).await.map_err(|error| failed(chain(&error)))?;
    let answered = sessions.answer(session, warm.plan().id, policy.clone()).await;
    answered.map_err(|error| failed(chain(&error)))?;
    Ok(Some((network, policy)))
}

fn boot_cause(error: &pepo_sandbox::boot::Error) -> Cause {
    let console = match error {
        pepo_sandbox::boot::Error::Ended { detail, .. } => detail.console.clone(),
        pepo_sandbox::boot::Error::Silent { console, .. } => console.clone(),
        _ => Vec::new(),
    };
    Cause { console, ..Cause::told(Reason::SetupFailed, chain(error)) }
}

/// How a Sandbox ended, in the words of a Session.
pub(super) fn cause_of(exit: &Exit) -> Cause {
    use pepo_sandbox::Cause as Engine;
    let reason = match exit.cause {
        Engine::OutOfMemory => Reason::OutOfMemory,
        Engine::GuestPanic => Reason::GuestPanic,
        Engine::GuestInitDied => Reason::GuestInitDied,
        Engine::GuestOff | Engine::VmmExit => Reason::VmmExit,
        Engine::MountLost => Reason::MountLost,
        Engine::KilledOutside => Reason::KilledOutside,
        Engine::Stopped | Engine::Unknown => Reason::Unknown,
    };
    Cause { console: exit.console.clone(), ..Cause::told(reason, exit.detail.clone()) }
}
