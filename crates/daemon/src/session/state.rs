//! Where a Session is in its life: a pure function from a state and an event to the next state and what is to be done.
//!
//! Owns no resource and does no I/O. [`super::driver`] is its only caller, one task per Session; everybody else sees copies.
//!
//! ```text
//!            Begin              Activated
//! Requested ───────► Activating ─────────► Active
//!     │                │   │                │  │ Release, keep-alive or lifetime over
//!     │ Failed         │   │ Failed         │  └────────────► Releasing ──┐
//!     │ Terminate      │   │                │ Terminate, expiry,          │ Stopped
//!     │                │   │                │ its Sandbox ended           │
//!     │                │   │ any end asked  ▼                             │
//!     │                │   └─────────► Terminating ───────────────────────┤
//!     ▼                ▼                         Stopped, Failed          ▼
//! Terminated ◄────────────────────────────────────────────────────── Terminated
//! ```
//!
//! Requested: recorded, waits for its turn. Activating: a Sandbox is being made for it. Active: it takes commands. Releasing,
//! Terminating: the stop path runs; the first reason given stands. Terminated: for good. A Session without a Workspace has
//! nothing to come back to, so a release ends it.

use pepo_api::{Reason, SandboxId, SessionState};

/// Why a Session or its Sandbox ended, with what there is to say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The word.
    pub reason: Reason,
    /// One sentence for people; empty where the word says it all.
    pub message: String,
    /// The console's last lines, where the end was not orderly. Escaped.
    pub console: Vec<String>,
}

impl Cause {
    /// A cause that the word says in full.
    pub fn plain(reason: Reason) -> Self {
        Cause { reason, message: String::new(), console: Vec::new() }
    }

    /// A cause with a sentence.
    pub fn told(reason: Reason, message: impl Into<String>) -> Self {
        Cause { reason, message: message.into(), console: Vec::new() }
    }
}

/// A Sandbox of a Session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenure {
    /// Which.
    pub sandbox: SandboxId,
    /// The how manieth of its Session, from 1.
    pub activation: u64,
}

/// Where a Session is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Recorded.
    Requested,
    /// A Sandbox is being made.
    Activating(Tenure),
    /// It takes commands.
    Active(Tenure),
    /// The stop path runs because it was released.
    Releasing(Tenure, Cause),
    /// The stop path runs because it ends.
    Terminating(Tenure, Cause),
    /// It has ended.
    Terminated(Cause),
}

/// What can happen to a Session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Its turn came: this Sandbox will be made.
    Begin(Tenure),
    /// The Sandbox is the Session's.
    Activated,
    /// No Sandbox came of it; nothing is left.
    Failed(Cause),
    /// Its owner wants the Sandbox gone.
    Release,
    /// Nothing used it for its keep-alive.
    Idle,
    /// The longest activation is over.
    Lifetime,
    /// It shall end.
    Terminate(Cause),
    /// Its Sandbox ended by itself.
    SandboxEnded(Cause),
    /// Everything is given back.
    Stopped,
}

/// What is to be done about it, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Make the Sandbox.
    Boot,
    /// Stop making it; `Failed` or `Activated` follows.
    CancelBoot,
    /// Run the stop path; `Stopped` follows. What the guest still holds is asked for first.
    StopOrderly,
    /// Run the stop path for a Sandbox that no longer answers.
    StopNow,
}

impl State {
    /// The word for it.
    pub fn word(&self) -> SessionState {
        match self {
            State::Requested => SessionState::Requested,
            State::Activating(_) => SessionState::Activating,
            State::Active(_) => SessionState::Active,
            State::Releasing(..) => SessionState::Releasing,
            State::Terminating(..) => SessionState::Terminating,
            State::Terminated(_) => SessionState::Terminated,
        }
    }

    /// Its Sandbox, from the first thing taken to the last given back.
    pub fn tenure(&self) -> Option<Tenure> {
        match self {
            State::Activating(tenure)
            | State::Active(tenure)
            | State::Releasing(tenure, _)
            | State::Terminating(tenure, _) => Some(*tenure),
            State::Requested | State::Terminated(_) => None,
        }
    }

    /// Why it ends or has ended.
    pub fn cause(&self) -> Option<&Cause> {
        match self {
            State::Releasing(_, cause) | State::Terminating(_, cause) | State::Terminated(cause) => Some(cause),
            State::Requested | State::Activating(_) | State::Active(_) => None,
        }
    }
}

/// One step. What an event has no meaning for is left as it is, with nothing to do: a Terminate of what has ended is done.
pub fn step(state: State, event: Event) -> (State, Vec<Effect>) {
    use Effect::{Boot, CancelBoot, StopNow, StopOrderly};
    match (state, event) {
        (State::Requested, Event::Begin(tenure)) => (State::Activating(tenure), vec![Boot]),
        (State::Requested, Event::Failed(cause) | Event::Terminate(cause)) => (State::Terminated(cause), vec![]),
        (State::Requested, Event::Release) => (State::Terminated(Cause::plain(Reason::Idle)), vec![]),

        (State::Activating(tenure), Event::Activated) => (State::Active(tenure), vec![]),
        (State::Activating(_), Event::Failed(cause)) => (State::Terminated(cause), vec![]),
        (State::Activating(tenure), Event::Release) => {
            (State::Terminating(tenure, Cause::plain(Reason::Idle)), vec![CancelBoot])
        }
        (State::Activating(tenure), Event::Terminate(cause)) => (State::Terminating(tenure, cause), vec![CancelBoot]),

        (State::Active(tenure), Event::Release | Event::Idle) => {
            (State::Releasing(tenure, Cause::plain(Reason::Idle)), vec![StopOrderly])
        }
        (State::Active(tenure), Event::Lifetime) => {
            (State::Releasing(tenure, Cause::plain(Reason::Lifetime)), vec![StopOrderly])
        }
        (State::Active(tenure), Event::Terminate(cause)) => (State::Terminating(tenure, cause), vec![StopOrderly]),
        (State::Active(tenure), Event::SandboxEnded(cause)) => (State::Terminating(tenure, cause), vec![StopNow]),

        // The boot could not be cancelled any more: what came of it is stopped.
        (State::Terminating(tenure, cause), Event::Activated) => (State::Terminating(tenure, cause), vec![StopNow]),
        // The stop path's own account of an end is fuller than the first word of it.
        (State::Releasing(_, cause) | State::Terminating(_, cause), Event::Stopped | Event::Failed(_)) => {
            (State::Terminated(cause), vec![])
        }
        (State::Terminating(tenure, first), Event::SandboxEnded(cause)) if first.reason == cause.reason => {
            (State::Terminating(tenure, cause), vec![])
        }

        (unmoved, _) => (unmoved, vec![]),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reasons() -> impl Strategy<Value = Cause> {
        prop_oneof![
            Just(Reason::Operator),
            Just(Reason::Expired),
            Just(Reason::Drain),
            Just(Reason::GuestPanic),
            Just(Reason::VmmExit)
        ]
        .prop_map(Cause::plain)
    }

    fn events() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Begin(tenure())),
            Just(Event::Activated),
            reasons().prop_map(Event::Failed),
            Just(Event::Release),
            Just(Event::Idle),
            Just(Event::Lifetime),
            reasons().prop_map(Event::Terminate),
            reasons().prop_map(Event::SandboxEnded),
            Just(Event::Stopped),
        ]
    }

    fn tenure() -> Tenure {
        Tenure { sandbox: SandboxId::from(uuid::Uuid::nil()), activation: 1 }
    }

    /// What the outside may do next: the driver sends Activated and Failed only while a boot runs, Stopped only while a stop
    /// runs. The model follows the effects and drops what cannot happen.
    #[derive(Default)]
    struct Outside {
        booting: bool,
        stopping: bool,
        alive: bool,
    }

    impl Outside {
        fn can(&self, event: &Event) -> bool {
            match event {
                Event::Activated => self.booting,
                Event::Failed(_) => self.booting,
                Event::Stopped => self.stopping,
                Event::SandboxEnded(_) => self.alive && !self.stopping,
                _ => true,
            }
        }

        fn before(&mut self, event: &Event) {
            match event {
                Event::Activated => (self.booting, self.alive) = (false, true),
                Event::Failed(_) => self.booting = false,
                Event::Stopped => (self.stopping, self.alive) = (false, false),
                _ => {}
            }
        }

        fn after(&mut self, effects: &[Effect]) {
            for effect in effects {
                match effect {
                    Effect::Boot => {
                        assert!(!self.booting && !self.alive, "a second Sandbox was made");
                        self.booting = true;
                    }
                    Effect::CancelBoot => assert!(self.booting, "no boot to cancel"),
                    Effect::StopOrderly | Effect::StopNow => {
                        assert!(self.alive && !self.stopping, "stopped twice, or nothing to stop");
                        self.stopping = true;
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn whatever_happens_a_session_holds_one_sandbox_and_ends_once(script in proptest::collection::vec(events(), 0..40)) {
            let (mut state, mut outside) = (State::Requested, Outside::default());
            let mut first_end = None;
            for event in script {
                if !outside.can(&event) {
                    continue;
                }
                outside.before(&event);
                let before = state.clone();
                let (after, effects) = step(state, event);
                outside.after(&effects);
                if let State::Terminated(_) = before {
                    prop_assert_eq!(&after, &before);
                    prop_assert!(effects.is_empty());
                }
                if let Some(cause) = after.cause() {
                    let stands = *first_end.get_or_insert(cause.reason);
                    prop_assert_eq!(stands, cause.reason, "the first reason did not stand");
                }
                // Nothing runs for what has ended, and something is known for all that runs.
                let holds = outside.booting || outside.alive;
                prop_assert_eq!(holds, after.tenure().is_some());
                state = after;
            }
        }

        #[test]
        fn terminate_is_legal_everywhere_and_leads_to_the_end(script in proptest::collection::vec(events(), 0..20)) {
            let (mut state, mut outside) = (State::Requested, Outside::default());
            let end = Event::Terminate(Cause::plain(Reason::Operator));
            for event in script.into_iter().chain([end.clone(), end]) {
                if outside.can(&event) {
                    outside.before(&event);
                    let (after, effects) = step(state, event);
                    outside.after(&effects);
                    state = after;
                }
            }
            // Only what is being worked on can keep it from its end: let that work finish.
            for event in [Event::Failed(Cause::plain(Reason::SetupFailed)), Event::Stopped] {
                if outside.can(&event) {
                    outside.before(&event);
                    let (after, effects) = step(state, event);
                    outside.after(&effects);
                    state = after;
                }
            }
            prop_assert_eq!(state.word(), SessionState::Terminated);
        }
    }

    #[test]
    fn a_release_ends_a_session_that_has_nothing_to_come_back_to() {
        let (state, effects) = step(State::Active(tenure()), Event::Release);
        assert_eq!((state.word(), effects), (SessionState::Releasing, vec![Effect::StopOrderly]));
        let (state, _) = step(state, Event::Stopped);
        assert_eq!(state, State::Terminated(Cause::plain(Reason::Idle)));
    }
}
