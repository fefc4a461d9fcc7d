//! Where a Session is in its life: a pure function from a state and an event to the next state and what is to be done.
//!
//! Owns no resource and does no I/O. [`super::driver`] is its only caller, one task per Session; everybody else sees copies.
//!
//! ```text
//!            Begin              Activated
//! Requested ───────► Activating ─────────► Active
//!     │                │  │  ▲                │  │ released, keep-alive or lifetime over; or its Sandbox ended and it
//!     │ Failed         │  │  │ Begin          │  │ comes back
//!     │ Terminate      │  │  └──────── Idle   │  └────────────► Releasing ──┐
//!     │                │  │             │ ▲   │ Terminate, expiry           │ Stopped, Failed
//!     │                │  │   Terminate │ └───┼─────────────────────────────┤ (it comes back)
//!     │                │  └─────────────┼──►  ▼                             │
//!     │                │ Failed         │  Terminating ──► Stopped, Failed  │ (it does not)
//!     ▼                ▼                ▼                         ▼         ▼
//! Terminated ◄─────────┴────────────────┴─────────────────────────┴─────────┘
//! ```
//!
//! Requested: recorded, waits for its turn. Activating: a Sandbox is being made for it. Active: it takes commands. Releasing,
//! Terminating: the stop path runs; the first reason given stands, but an end for good beats a release. Idle: no Sandbox,
//! holds nothing; the next request makes one. Terminated: for good.
//!
//! Whether a Session comes back ([`Lives`]) is decided by what it is, once. One that does goes Idle after every end of a
//! Sandbox, also one that nobody asked for: the cause is kept, what ran is told, and the next request finds a fresh Sandbox.
//! Only its very first activation is different: what never worked is ended, so that whoever made it learns of it at once.

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
    /// What the set-up command exited with, where that was it.
    pub exit_code: Option<i32>,
    /// The last lines that the set-up command wrote, where that was it. Escaped.
    pub output: Vec<String>,
}

impl Cause {
    /// A cause that the word says in full.
    pub fn plain(reason: Reason) -> Self {
        Cause::told(reason, String::new())
    }

    /// A cause with a sentence.
    pub fn told(reason: Reason, message: impl Into<String>) -> Self {
        Cause { reason, message: message.into(), console: Vec::new(), exit_code: None, output: Vec::new() }
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

/// What becomes of a Session whose Sandbox is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lives {
    /// It ends with it.
    Once,
    /// It goes on without one, until the next request.
    Again,
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
    /// The stop path runs, because it was released or its Sandbox ended.
    Releasing(Tenure, Cause),
    /// Without a Sandbox, and why the last one went.
    Idle(Cause),
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
    /// Its Sandbox shall go: its owner wants it, nothing used it, or it was there for long enough.
    Release(Cause),
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
            State::Idle(_) => SessionState::Idle,
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
            State::Requested | State::Idle(_) | State::Terminated(_) => None,
        }
    }

    /// Why its Sandbox goes or has gone.
    pub fn cause(&self) -> Option<&Cause> {
        match self {
            State::Releasing(_, cause)
            | State::Idle(cause)
            | State::Terminating(_, cause)
            | State::Terminated(cause) => Some(cause),
            State::Requested | State::Activating(_) | State::Active(_) => None,
        }
    }

    /// Whether it is on its way to Active.
    pub fn is_coming(&self) -> bool {
        matches!(self, State::Requested | State::Activating(_))
    }

    /// Whether it ends, or has ended.
    pub fn ends(&self) -> bool {
        matches!(self, State::Terminating(..) | State::Terminated(_))
    }
}

/// One step. What an event has no meaning for is left as it is, with nothing to do: a Terminate of what has ended is done.
pub fn step(lives: Lives, state: State, event: Event) -> (State, Vec<Effect>) {
    use Effect::{Boot, CancelBoot, StopNow, StopOrderly};
    use Lives::{Again, Once};
    match (state, event) {
        (State::Requested | State::Idle(_), Event::Begin(tenure)) => (State::Activating(tenure), vec![Boot]),
        (State::Requested, Event::Failed(cause)) => (State::Terminated(cause), vec![]),
        (State::Requested, Event::Release(cause)) => (gone(lives, cause), vec![]),
        (State::Requested | State::Idle(_), Event::Terminate(cause)) => (State::Terminated(cause), vec![]),

        (State::Activating(tenure), Event::Activated) => (State::Active(tenure), vec![]),
        (State::Activating(tenure), Event::Failed(cause)) => match lives {
            Again if tenure.activation > 1 => (State::Idle(cause), vec![]),
            Again | Once => (State::Terminated(cause), vec![]),
        },
        (State::Activating(tenure), Event::Release(cause)) => (going(lives, tenure, cause), vec![CancelBoot]),
        (State::Activating(tenure), Event::Terminate(cause)) => (State::Terminating(tenure, cause), vec![CancelBoot]),

        (State::Active(tenure), Event::Release(cause)) => (State::Releasing(tenure, cause), vec![StopOrderly]),
        (State::Active(tenure), Event::Terminate(cause)) => (State::Terminating(tenure, cause), vec![StopOrderly]),
        (State::Active(tenure), Event::SandboxEnded(cause)) => (going(lives, tenure, cause), vec![StopNow]),

        // The boot could not be cancelled any more: what came of it is stopped.
        (going @ (State::Releasing(..) | State::Terminating(..)), Event::Activated) => (going, vec![StopNow]),
        // The work to stop it runs already; what it leads to changes where the Session would have come back.
        (State::Releasing(tenure, first), Event::Terminate(cause)) => match lives {
            Again => (State::Terminating(tenure, cause), vec![]),
            Once => (State::Terminating(tenure, first), vec![]),
        },
        (State::Releasing(_, cause), Event::Stopped | Event::Failed(_)) => (gone(lives, cause), vec![]),
        (State::Terminating(_, cause), Event::Stopped | Event::Failed(_)) => (State::Terminated(cause), vec![]),
        // The stop path's own account of an end is fuller than the first word of it.
        (State::Terminating(tenure, first), Event::SandboxEnded(cause)) if first.reason == cause.reason => {
            (State::Terminating(tenure, cause), vec![])
        }
        (State::Releasing(tenure, first), Event::SandboxEnded(cause)) if first.reason == cause.reason => {
            (State::Releasing(tenure, cause), vec![])
        }

        (unmoved, _) => (unmoved, vec![]),
    }
}

/// Its Sandbox goes.
fn going(lives: Lives, tenure: Tenure, cause: Cause) -> State {
    match lives {
        Lives::Again => State::Releasing(tenure, cause),
        Lives::Once => State::Terminating(tenure, cause),
    }
}

/// Its Sandbox has gone.
fn gone(lives: Lives, cause: Cause) -> State {
    match lives {
        Lives::Again => State::Idle(cause),
        Lives::Once => State::Terminated(cause),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn causes() -> impl Strategy<Value = Cause> {
        prop_oneof![
            Just(Reason::Operator),
            Just(Reason::Expired),
            Just(Reason::Drain),
            Just(Reason::GuestPanic),
            Just(Reason::VmmExit),
            Just(Reason::Idle),
            Just(Reason::Lifetime)
        ]
        .prop_map(Cause::plain)
    }

    fn events() -> impl Strategy<Value = Event> {
        prop_oneof![
            // Which Sandbox it is, is filled in when its turn comes.
            Just(Event::Begin(tenure(0))),
            Just(Event::Activated),
            causes().prop_map(Event::Failed),
            causes().prop_map(Event::Release),
            causes().prop_map(Event::Terminate),
            causes().prop_map(Event::SandboxEnded),
            Just(Event::Stopped),
        ]
    }

    fn lives() -> impl Strategy<Value = Lives> {
        prop_oneof![Just(Lives::Once), Just(Lives::Again)]
    }

    fn tenure(activation: u64) -> Tenure {
        Tenure { sandbox: SandboxId::from(uuid::Uuid::from_u128(u128::from(activation))), activation }
    }

    /// What the outside may do next: the driver sends Activated and Failed only while a boot runs, Stopped only while a stop
    /// runs. The model follows the effects and drops what cannot happen.
    struct Outside {
        lives: Lives,
        state: State,
        booting: bool,
        stopping: bool,
        alive: bool,
        activations: u64,
    }

    impl Outside {
        fn new(lives: Lives) -> Self {
            Outside { lives, state: State::Requested, booting: false, stopping: false, alive: false, activations: 0 }
        }

        /// One event, if it can happen; whether it could.
        fn happens(&mut self, event: Event) -> bool {
            let event = match event {
                Event::Begin(_) => Event::Begin(tenure(self.activations + 1)),
                other => other,
            };
            let can = match &event {
                Event::Activated | Event::Failed(_) => self.booting,
                Event::Stopped => self.stopping,
                Event::SandboxEnded(_) => self.alive && !self.stopping,
                _ => true,
            };
            if !can {
                return false;
            }
            match &event {
                Event::Activated => (self.booting, self.alive) = (false, true),
                Event::Failed(_) => self.booting = false,
                Event::Stopped => (self.stopping, self.alive) = (false, false),
                _ => {}
            }
            let (state, effects) = step(self.lives, self.state.clone(), event);
            self.state = state;
            for effect in effects {
                match effect {
                    Effect::Boot => {
                        assert!(!self.booting && !self.alive, "a second Sandbox was made");
                        self.booting = true;
                        self.activations += 1;
                    }
                    Effect::CancelBoot => assert!(self.booting, "no boot to cancel"),
                    Effect::StopOrderly | Effect::StopNow => {
                        assert!(self.alive && !self.stopping, "stopped twice, or nothing to stop");
                        self.stopping = true;
                    }
                }
            }
            true
        }
    }

    proptest! {
        #[test]
        fn whatever_happens_a_session_holds_one_sandbox_and_ends_once(
            lives in lives(), script in proptest::collection::vec(events(), 0..60)
        ) {
            let mut outside = Outside::new(lives);
            for event in script {
                let before = outside.state.clone();
                let asked = event.clone();
                if !outside.happens(event) {
                    continue;
                }
                let after = &outside.state;
                // An end for good is one: nothing moves it, nothing runs for it.
                if let State::Terminated(_) = before {
                    prop_assert_eq!(after, &before);
                }
                // The first reason stands, until it is over or somebody ends what would have come back.
                if let (Some(first), Some(now)) = (before.cause(), after.cause()) {
                    let ended_for_good = lives == Lives::Again && !before.ends() && after.ends();
                    prop_assert!(first.reason == now.reason || ended_for_good, "{:?} became {:?}", before, after);
                }
                // Something is known for all that runs, and nothing runs for what is Idle or has ended.
                let holds = outside.booting || outside.alive;
                prop_assert_eq!(holds, after.tenure().is_some());
                // One that lives once never waits for a second life; one that lives again ends only by being told so, or
                // when nothing ever came of it.
                match (lives, &before, after) {
                    (Lives::Once, _, State::Idle(_)) => prop_assert!(false, "a second life that nobody asked for"),
                    (Lives::Again, before, after) if after.ends() && !before.ends() => {
                        let told = matches!(asked, Event::Terminate(_));
                        let never = matches!(asked, Event::Failed(_)) && outside.activations <= 1;
                        prop_assert!(told || never, "{:?} ended it", asked);
                    }
                    _ => {}
                }
            }
        }

        #[test]
        fn terminate_is_legal_everywhere_and_leads_to_the_end(
            lives in lives(), script in proptest::collection::vec(events(), 0..30)
        ) {
            let mut outside = Outside::new(lives);
            let end = Event::Terminate(Cause::plain(Reason::Operator));
            for event in script.into_iter().chain([end.clone(), end]) {
                outside.happens(event);
            }
            prop_assert!(outside.state.ends());
            // Only what is being worked on can keep it from its end: let that work finish.
            for event in [Event::Failed(Cause::plain(Reason::SetupFailed)), Event::Stopped] {
                outside.happens(event);
            }
            prop_assert_eq!(outside.state.word(), SessionState::Terminated);
        }

        #[test]
        fn one_that_lives_again_can_always_be_reached_or_says_that_it_has_ended(
            script in proptest::collection::vec(events(), 0..30)
        ) {
            let mut outside = Outside::new(Lives::Again);
            for event in script {
                outside.happens(event);
            }
            // Whatever runs comes to its end, then the next request brings it up.
            outside.happens(Event::Failed(Cause::plain(Reason::SetupFailed)));
            outside.happens(Event::Stopped);
            outside.happens(Event::Begin(tenure(0)));
            outside.happens(Event::Activated);
            let word = outside.state.word();
            prop_assert!(matches!(word, SessionState::Active | SessionState::Terminated), "{:?}", outside.state);
        }
    }

    #[test]
    fn a_release_ends_a_session_that_has_nothing_to_come_back_to() {
        let released = Event::Release(Cause::plain(Reason::Idle));
        let (state, effects) = step(Lives::Once, State::Active(tenure(1)), released.clone());
        assert_eq!((state.word(), effects), (SessionState::Releasing, vec![Effect::StopOrderly]));
        let (state, _) = step(Lives::Once, state, Event::Stopped);
        assert_eq!(state, State::Terminated(Cause::plain(Reason::Idle)));
        let (state, _) = step(Lives::Again, State::Active(tenure(1)), released);
        let (state, _) = step(Lives::Again, state, Event::Stopped);
        assert_eq!(state, State::Idle(Cause::plain(Reason::Idle)));
        let (state, effects) = step(Lives::Again, state, Event::Begin(tenure(2)));
        assert_eq!((state, effects), (State::Activating(tenure(2)), vec![Effect::Boot]));
    }

    #[test]
    fn a_sandbox_that_dies_takes_only_a_session_that_lives_once_with_it() {
        let died = || Event::SandboxEnded(Cause::plain(Reason::GuestPanic));
        for (lives, word) in [(Lives::Once, SessionState::Terminated), (Lives::Again, SessionState::Idle)] {
            let (state, effects) = step(lives, State::Active(tenure(1)), died());
            assert_eq!(effects, [Effect::StopNow]);
            let (state, _) = step(lives, state, Event::Stopped);
            assert_eq!((state.word(), state.cause().map(|cause| cause.reason)), (word, Some(Reason::GuestPanic)));
        }
    }
}
