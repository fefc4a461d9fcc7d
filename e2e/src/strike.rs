//! One of the processes of an instance dies at a named moment of a Sandbox's life, as by `kill -9`; what has to become of
//! it is checked here, once, for the tests and for the soak.
//!
//! ```text
//!            booting        waiting     activating      running        releasing
//! pepod,     made anew      swept,      set up anew,    adopted, no    idle
//! pepo-host                 made anew   in a fresh one  output lost
//! its own    the Session    replaced    the Session     told why,      idle
//! processes  has ended                  has ended       comes back
//! the edge   nothing        nothing     nothing         nothing        nothing
//! ```
//! After each one nothing is left of the Sandbox that died. The guest's agent dies where something of ours runs in the
//! guest that can kill it: in `setup`, and beside a command.

use std::time::{Duration, Instant};

use pepo_api::client::Client;
use pepo_api::query::{ListCommands, ShowCommand, ShowSession};
use pepo_api::{
    CommandEnd, CommandRole, CreateCommand, CreateSession, OnDisconnect, Reason, Session, SessionState, Setup,
    StreamEvent, Text,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::instance::{Instance, Options, bare};
use crate::program::{Started, until};

const MINUTE: Duration = Duration::from_secs(60);

/// How long a daemon may take to answer after its start: the goal, and the limit of a test on a busy machine.
pub const ANSWERS_WITHIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// Lines of the command that is not to lose any.
const LINES: u32 = 30;

/// Kills the agent from inside: it is the oldest child of the guest's first process.
pub(crate) const KILL_AGENT: &str = "sudo kill -9 $(pgrep -o -P 1)";

/// What dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The daemon.
    Pepod,
    /// Its privileged half.
    Host,
    /// The parent of the Sandbox's processes.
    Keeper,
    /// The virtual machine.
    Vmm,
    /// The stream device beside it.
    Device,
    /// The agent in the guest.
    Agent,
    /// The way in for strangers.
    Edge,
}

/// When.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// A Sandbox is being made for a Session.
    Booting,
    /// One waits in the pool.
    Waiting,
    /// It is a Session's, and its set-up runs.
    Activating,
    /// It runs a command.
    Running,
    /// It is being given back.
    Releasing,
}

impl Moment {
    /// All of them.
    pub const ALL: [Moment; 5] =
        [Moment::Booting, Moment::Waiting, Moment::Activating, Moment::Running, Moment::Releasing];
}

impl Victim {
    /// All of them.
    pub const ALL: [Victim; 7] =
        [Victim::Pepod, Victim::Host, Victim::Keeper, Victim::Vmm, Victim::Device, Victim::Agent, Victim::Edge];

    /// Whether it can be killed then, by a test that owns nothing in the guest but its commands.
    pub fn can_die(self, moment: Moment, under_firecracker: bool) -> bool {
        match self {
            Victim::Agent => matches!(moment, Moment::Activating | Moment::Running),
            // Its streams are within the virtual machine there.
            Victim::Device => !under_firecracker,
            _ => true,
        }
    }

    /// What its process is called; `None`: it is no process of this host.
    pub(crate) fn called(self, under_firecracker: bool) -> Option<&'static str> {
        Some(match self {
            Victim::Pepod => "pepod",
            Victim::Host => "pepo-host",
            Victim::Keeper => "pepo-keeper",
            Victim::Vmm if under_firecracker => "firecracker",
            Victim::Vmm => "qemu-system-x86",
            Victim::Device => "vhost-device-vs",
            Victim::Edge => "pepo-edge",
            Victim::Agent => return None,
        })
    }

    /// Whether it is a process of the Sandbox's own.
    fn is_sandboxes(self) -> bool {
        matches!(self, Victim::Keeper | Victim::Vmm | Victim::Device | Victim::Agent)
    }

    /// What a Sandbox's end by it may be called.
    pub(crate) fn reasons(self) -> &'static [Reason] {
        match self {
            Victim::Keeper => &[Reason::KilledOutside],
            Victim::Vmm => &[Reason::VmmExit, Reason::KilledOutside],
            Victim::Device => &[Reason::VmmExit, Reason::KilledOutside, Reason::GuestSilent],
            Victim::Agent => &[Reason::GuestInitDied],
            Victim::Pepod | Victim::Host | Victim::Edge => &[],
        }
    }
}

/// Kills a process.
pub fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).expect("a pid"), Signal::KILL).expect("kill");
}

/// Kills the daemon, or its privileged half, and waits until what `pepo up` starts in its place answers.
pub(crate) async fn kill_daemon(instance: &Instance, client: &Client, pid: i32) {
    let daemon = instance.pids("pepod");
    let killed = Instant::now();
    kill(pid);
    until("pepod is started again", MINUTE, || {
        instance.pids("pepod").iter().any(|pid| !daemon.contains(pid)).then_some(())
    });
    let started = Instant::now();
    while client.healthz().await.is_err() {
        assert!(started.elapsed() < ANSWERS_WITHIN.1, "pepod runs and does not answer");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    println!(
        "  the API answers {:.0} ms after pepod's start (goal {:.0} ms), {:.0} ms after the kill",
        started.elapsed().as_secs_f64() * 1e3,
        ANSWERS_WITHIN.0.as_secs_f64() * 1e3,
        killed.elapsed().as_secs_f64() * 1e3
    );
}

/// An instance that is struck.
pub struct Ring {
    /// It.
    pub instance: Instance,
    /// A client of its operator's socket.
    pub client: Client,
    under_firecracker: bool,
    up: Started,
}

impl Ring {
    /// A new one, with so many Sandboxes that wait ready.
    pub fn new(pool: u32) -> Self {
        let config = Some(format!("[pool]\ntarget = {pool}\n"));
        let instance = Instance::with(Options { config, ..Options::default() });
        let up = instance.up();
        Ring::of(instance, up)
    }

    /// Of an instance that is up.
    pub fn of(instance: Instance, up: Started) -> Self {
        let client = instance.client();
        Ring { under_firecracker: instance.under_firecracker(), instance, client, up }
    }

    /// Whether its guests run under Firecracker.
    pub fn under_firecracker(&self) -> bool {
        self.under_firecracker
    }

    /// Ends it, and the host is as before.
    pub fn end(self) {
        self.instance.pepo(["down"]).within(2 * MINUTE).ok();
        self.up.wait();
        self.instance.end();
    }

    /// Kills it then, and sees to what becomes of it.
    pub async fn strike(&self, victim: Victim, moment: Moment) {
        let began = Instant::now();
        match moment {
            Moment::Booting => self.booting(victim).await,
            Moment::Waiting => self.waiting(victim).await,
            Moment::Activating => self.activating(victim).await,
            Moment::Running => self.running(victim).await,
            Moment::Releasing => self.releasing(victim).await,
        }
        println!("{victim:?} at {moment:?}: as it must be after {:.1} s", began.elapsed().as_secs_f64());
    }

    async fn booting(&self, victim: Victim) {
        let session = self.create(bare()).await;
        let sign = if victim.is_sandboxes() { victim } else { Victim::Vmm };
        until("a Sandbox boots", MINUTE, || (!self.pids(sign).is_empty()).then_some(()));
        self.kill(victim).await;
        if victim.is_sandboxes() {
            let ended = self.ended(&session).await;
            assert_eq!(ended.ended.expect("an end").reason, Reason::SetupFailed, "{victim:?}");
        } else {
            assert_eq!(self.echo(&session).await, 1, "{victim:?}: what never served counts");
            self.client.session_terminate(&session).await.expect("terminate");
        }
        self.nothing_left();
    }

    /// Waits until so many wait ready and there are no others, and says which.
    pub async fn ready(&self, count: usize) -> Vec<String> {
        self.ready_beside(count, 0).await
    }

    /// Waits until so many wait ready, beside so many that are somebody's. All of them.
    pub async fn ready_beside(&self, count: usize, others: usize) -> Vec<String> {
        let says = format!("{count} of {count} ready");
        let waiting = async {
            loop {
                let report = self.client.doctor().await;
                let ready = report.is_ok_and(|report| {
                    report.checks.iter().any(|check| check.name == "pool" && check.found.contains(&says))
                });
                let jails = self.instance.jails();
                if ready && jails.len() == count + others {
                    return jails;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(2 * MINUTE, waiting).await.unwrap_or_else(|_| panic!("the pool does not say `{says}`"))
    }

    async fn waiting(&self, victim: Victim) {
        let before = self.ready(1).await;
        self.kill(victim).await;
        if victim == Victim::Edge {
            assert_eq!(self.ready(1).await, before, "it was replaced");
        } else {
            until("another one takes its place", MINUTE, || {
                let now = self.instance.jails();
                (now.len() == 1 && now != before).then_some(())
            });
        }
        let waits = self.ready(1).await;
        let session = self.create(bare()).await;
        self.echo(&session).await;
        assert_eq!(self.sandbox(&session).await, waits[0], "{victim:?}: what waited was not claimed");
        self.client.session_terminate(&session).await.expect("terminate");
        until("it is gone", MINUTE, || (!self.instance.jails().contains(&waits[0])).then_some(()));
    }

    async fn activating(&self, victim: Victim) {
        // From inside: whoever could do it from outside would need the agent for it.
        let deed = if victim == Victim::Agent { KILL_AGENT } else { "true" };
        let setup = Setup { command: format!("{deed}; sleep 2"), timeout_seconds: None };
        let session = self.create(CreateSession { setup: Some(setup), ..bare() }).await;
        let began = async {
            loop {
                let commands = self.client.command_list(&session, &ListCommands::default()).await.expect("commands");
                if commands.items.iter().any(|command| command.role == CommandRole::Setup) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(MINUTE, began).await.expect("its set-up begins");
        if victim != Victim::Agent {
            self.kill(victim).await;
        }
        if victim.is_sandboxes() {
            let end = self.ended(&session).await.ended.expect("an end");
            assert!(victim.reasons().contains(&end.reason), "{victim:?}: {end:?}");
        } else {
            // A set-up that was cut off is not gone on with.
            let activation = if victim == Victim::Edge { 1 } else { 2 };
            assert_eq!(self.echo(&session).await, activation, "{victim:?}");
            self.client.session_terminate(&session).await.expect("terminate");
        }
        self.nothing_left();
    }

    async fn running(&self, victim: Victim) {
        let session = self.create(CreateSession { reactivate: Some(true), ..bare() }).await;
        let deed = async {
            match victim {
                Victim::Agent => drop(self.begin(&session, KILL_AGENT).await),
                _ => self.kill(victim).await,
            }
        };
        let (end, whole) = self.meanwhile(&session, deed).await;
        let activation = if victim.is_sandboxes() {
            assert!(victim.reasons().contains(&end.reason), "{victim:?}: {end:?}");
            2
        } else {
            assert!(whole && end.exit_code == Some(7), "{victim:?}: {end:?}");
            1
        };
        assert_eq!(self.echo(&session).await, activation, "{victim:?}");
        self.client.session_terminate(&session).await.expect("terminate");
        self.nothing_left();
    }

    /// Runs a command that somebody follows, does the deed in its middle, and says how it ended and whether all that it
    /// wrote was seen.
    pub async fn meanwhile(&self, session: &str, deed: impl Future<Output = ()>) -> (CommandEnd, bool) {
        let line = format!("for i in $(seq 1 {LINES}); do echo line $i; sleep 0.1; done; exit 7");
        let command = self.begin(session, &line).await;
        let query = ShowCommand { follow: Some(true), ..Default::default() };
        let mut events = self.client.command_events(session, command, query);
        let (mut seen, mut deed) = (String::new(), Some(deed));
        let end = loop {
            let next = tokio::time::timeout(MINUTE, events.next()).await.expect("the stream goes on, or ends");
            match next {
                Ok(Some(StreamEvent::Stdout { data: Text::Utf8(text), .. })) => seen.push_str(&text),
                Ok(Some(StreamEvent::Gap { from, to })) => panic!("{from}..{to} is missing"),
                Ok(Some(StreamEvent::Exit { command })) => break command.end.expect("an end"),
                Ok(Some(_)) => {}
                // How its Sandbox ended stands in its record, too.
                Ok(None) | Err(_) => {
                    let shown = self.client.command_show(session, command, &ShowCommand::default()).await;
                    break shown.expect("the record stays").command.end.expect("an end");
                }
            }
            if seen.contains("line 5\n")
                && let Some(deed) = deed.take()
            {
                deed.await;
            }
        };
        assert!(deed.is_none(), "it ended before anything was done: {seen}, {end:?}");
        let wanted: String = (1..=LINES).map(|n| format!("line {n}\n")).collect();
        (end, seen == wanted)
    }

    async fn releasing(&self, victim: Victim) {
        let session = self.create(CreateSession { reactivate: Some(true), ..bare() }).await;
        // With something at work the guest is asked to end it in order, which takes a moment.
        self.begin(&session, "trap '' TERM; while :; do sleep 1; done").await;
        let (client, name) = (self.client.clone(), session.clone());
        let releasing = tokio::spawn(async move { drop(client.session_release(&name).await) });
        let going = async {
            while self.show(&session).await.state == SessionState::Active {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(MINUTE, going).await.expect("it is given back");
        self.kill_if_there(victim).await;
        let shown = self.reached(&session, |shown| shown.state == SessionState::Idle).await;
        assert!(shown.last_end.is_some(), "{victim:?}: {shown:?}");
        releasing.await.expect("task");
        self.nothing_left();
        self.client.session_terminate(&session).await.expect("terminate");
    }

    fn pids(&self, victim: Victim) -> Vec<i32> {
        self.instance.pids(victim.called(self.under_firecracker).expect("it is a process of this host"))
    }

    async fn kill(&self, victim: Victim) {
        let there = self.kill_if_there(victim).await;
        assert!(there, "{victim:?} was not there to be killed");
    }

    /// Kills it, and waits until what `pepo up` starts in its place answers.
    async fn kill_if_there(&self, victim: Victim) -> bool {
        // Everything of ours is called `pepod` until it says what it is.
        let pids = until("it is one process, or none", MINUTE, || {
            let pids = self.pids(victim);
            (pids.len() <= 1).then_some(pids)
        });
        let [pid] = pids[..] else { return false };
        match victim {
            Victim::Pepod | Victim::Host => kill_daemon(&self.instance, &self.client, pid).await,
            Victim::Edge => {
                kill(pid);
                let url = self.instance.home().join("run/url");
                let answers = async {
                    while self.pids(Victim::Edge).first().is_none_or(|now| *now == pid) {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    loop {
                        let url = std::fs::read_to_string(&url).unwrap_or_default();
                        if let Ok(client) = Client::http(url.trim(), None)
                            && client.readyz().await.is_ok()
                        {
                            return;
                        }
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                };
                tokio::time::timeout(MINUTE, answers).await.expect("the edge answers again");
            }
            Victim::Keeper | Victim::Vmm | Victim::Device | Victim::Agent => kill(pid),
        }
        true
    }

    /// Makes a Session.
    pub async fn create(&self, body: CreateSession) -> String {
        self.client.session_create(&body).await.expect("session").id.to_string()
    }

    /// Starts a line and leaves it running.
    pub async fn begin(&self, session: &str, line: &str) -> pepo_api::CommandId {
        let command = CreateCommand {
            command: Some(line.into()),
            wait_seconds: Some(0),
            on_disconnect: Some(OnDisconnect::Keep),
            ..Default::default()
        };
        self.client.command_create(session, &command).await.expect("command").command.id
    }

    /// A command works; in which activation.
    pub async fn echo(&self, session: &str) -> u64 {
        let command =
            CreateCommand { command: Some("echo works".into()), wait_seconds: Some(120), ..Default::default() };
        let output = self.client.command_create(session, &command).await.expect("command");
        assert_eq!(output.stdout, Text::Utf8("works\n".into()));
        output.command.activation
    }

    async fn show(&self, session: &str) -> Session {
        self.client.session_show(session, &ShowSession::default()).await.expect("show")
    }

    /// The hex digits of its Sandbox's id.
    pub async fn sandbox(&self, session: &str) -> String {
        self.show(session).await.sandbox_id.expect("a Sandbox").hex()
    }

    async fn ended(&self, session: &str) -> Session {
        self.reached(session, |shown| shown.ended.is_some()).await
    }

    async fn reached(&self, session: &str, wanted: impl Fn(&Session) -> bool) -> Session {
        let waiting = async {
            loop {
                let shown = self.show(session).await;
                if wanted(&shown) {
                    return shown;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(2 * MINUTE, waiting).await.expect("the Session gets there")
    }

    /// Nothing of any Sandbox is on the host.
    fn nothing_left(&self) {
        self.instance.sandboxes_gone();
        until("the Sandboxes' directories go", MINUTE, || self.instance.jails().is_empty().then_some(()));
    }
}
