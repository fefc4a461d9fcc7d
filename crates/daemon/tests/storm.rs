//! Many Sessions, random operations, a failure at every step, and pepod killed in the middle: nothing is held, none is lost,
//! and no Sandbox ever has two owners.
//!
//! `PEPO_STORM` is how many Sessions (60 where it is not set, 1,000 in `make soak`), `PEPO_SEED` repeats a run. Needs the
//! feature `fake` and the agent's file in `PEPO_GUEST`.

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr)]
#![allow(dead_code, reason = "the daemon's helper is shared with other tests")]

mod daemon;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use daemon::{Daemon, Options, within};
use pepo_api::client::{Client, ClientError};
use pepo_api::query::ListSessions;
use pepo_api::{CreateCommand, CreateSession, ErrorCode, SessionState, Text};
use rustix::process::{Pid, Signal, kill_process};

const STEPS: [&str; 6] = ["prepare", "start", "hello", "activate", "shutdown", "release"];

/// A small generator: the run must be repeatable, not unpredictable.
#[derive(Clone)]
struct Dice(Arc<AtomicU64>);

impl Dice {
    fn new(seed: u64) -> Self {
        Dice(Arc::new(AtomicU64::new(seed.max(1))))
    }

    fn below(&self, most: u64) -> u64 {
        let step = |mut x: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^ (x << 17)
        };
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |x| Some(step(x))).unwrap_or(1);
        step(before) % most
    }
}

#[derive(Default)]
struct Seen {
    /// Which Session and activation each Sandbox was seen to serve.
    owners: Mutex<HashMap<String, (String, u64)>>,
    /// Every Session that was made.
    made: Mutex<BTreeSet<String>>,
    /// What was refused, and how often.
    refused: Mutex<BTreeMap<String, usize>>,
    commands: AtomicUsize,
}

impl Seen {
    fn owner(&self, sandbox: String, session: &str, activation: u64) {
        let mut owners = self.owners.lock().expect("lock");
        let owner = owners.entry(sandbox.clone()).or_insert_with(|| (session.to_owned(), activation));
        assert_eq!(*owner, (session.to_owned(), activation), "{sandbox} has two owners");
    }

    /// What may happen in a storm; anything else is a fault of ours.
    fn refusal(&self, what: &str, error: &ClientError) {
        let word = match error {
            ClientError::Api(problem) => {
                let fine = matches!(
                    problem.code,
                    ErrorCode::NoCapacity
                        | ErrorCode::ActivationFailed
                        | ErrorCode::SessionTerminated
                        | ErrorCode::SandboxEnded
                        | ErrorCode::Conflict
                        | ErrorCode::GuestFailed
                        | ErrorCode::Timeout
                        | ErrorCode::Draining
                        | ErrorCode::Unavailable
                );
                assert!(fine, "{what}: {:?}: {}", problem.code, problem.message);
                problem.code.as_str().to_owned()
            }
            ClientError::NoDaemon { .. } | ClientError::Lost(_) | ClientError::Transport { .. } => {
                "no daemon".to_owned()
            }
            other => panic!("{what}: {other:?}"),
        };
        *self.refused.lock().expect("lock").entry(format!("{what}: {word}")).or_default() += 1;
    }
}

/// One Session's life.
async fn one(client: Client, dice: Dice, seen: Arc<Seen>, number: usize) {
    let token = format!("t{number}");
    let new = CreateSession {
        env: [("TOKEN".to_owned(), token.clone())].into(),
        reactivate: Some(dice.below(2) == 0),
        name: (dice.below(3) == 0).then(|| format!("n{number}")),
        // Some fit what waits in the pool, some do not.
        memory_mib: (dice.below(4) == 0).then_some(256),
        ..Default::default()
    };
    let session = loop {
        match within(120, client.session_create(&new)).await {
            Ok(made) => break made.id.to_string(),
            Err(error) => {
                seen.refusal("create", &error);
                // One that was recorded while its answer was lost has the name.
                if matches!(&error, ClientError::Api(problem) if problem.code == ErrorCode::Conflict) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20 + dice.below(80))).await;
            }
        }
    };
    seen.made.lock().expect("lock").insert(session.clone());
    for _ in 0..1 + dice.below(4) {
        let done = match dice.below(8) {
            0 => within(120, client.session_release(&session)).await.map(drop),
            1 => within(120, client.session_show(&session, &Default::default())).await.map(drop),
            _ => command(&client, &seen, &session, &token).await,
        };
        if let Err(error) = done {
            seen.refusal("operation", &error);
        }
    }
    if dice.below(4) > 0
        && let Err(error) = within(120, client.session_terminate(&session)).await
    {
        seen.refusal("terminate", &error);
    }
}

async fn command(client: &Client, seen: &Seen, session: &str, token: &str) -> Result<(), ClientError> {
    let line = CreateCommand { command: Some("echo $TOKEN".into()), wait_seconds: Some(60), ..Default::default() };
    let output = within(120, client.command_create(session, &line)).await?;
    if let Some(end) = &output.command.end
        && end.exit_code == Some(0)
        && let Text::Utf8(said) = &output.stdout
        && output.missing_bytes == 0
    {
        assert_eq!(said.trim(), token, "{session} ran in somebody else's Sandbox");
        seen.commands.fetch_add(1, Ordering::Relaxed);
    }
    let shown = within(120, client.session_show(session, &Default::default())).await?;
    if let Some(sandbox) = shown.sandbox_id
        && shown.state == SessionState::Active
    {
        seen.owner(sandbox.to_string(), session, shown.activation);
    }
    Ok(())
}

/// Makes each step fail for a moment, one after the other, again and again, and kills a guest now and then.
async fn faults(state: PathBuf, dice: Dice, over: Arc<AtomicBool>) -> [usize; STEPS.len()] {
    let mut times = [0; STEPS.len()];
    for turn in 0.. {
        if over.load(Ordering::Relaxed) && times.iter().all(|times| *times > 0) {
            break;
        }
        let at = turn % STEPS.len();
        let fault = state.join(format!("fault-{}", STEPS[at]));
        std::fs::write(&fault, format!("a storm at {}", STEPS[at])).expect("fault");
        tokio::time::sleep(Duration::from_millis(30 + dice.below(70))).await;
        std::fs::remove_file(&fault).expect("no fault");
        times[at] += 1;
        if dice.below(3) == 0 {
            kill_one(&state, &dice);
        }
        tokio::time::sleep(Duration::from_millis(100 + dice.below(200))).await;
    }
    times
}

fn kill_one(state: &Path, dice: &Dice) {
    let jails: Vec<_> = std::fs::read_dir(state.join("jail")).expect("jails").flatten().collect();
    if jails.is_empty() {
        return;
    }
    let jail = &jails[dice.below(jails.len() as u64) as usize];
    let text = std::fs::read_to_string(jail.path().join("keeper.json")).unwrap_or_default();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    // It may have gone since, and its number may be another's: only what is an agent of this instance is killed.
    let Some(pid) = record["pid"].as_i64() else { return };
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let ours = state.as_os_str().as_encoded_bytes();
    if line.windows(ours.len()).any(|part| part == ours)
        && let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw)
    {
        let _ = kill_process(pid, Signal::KILL);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_held_none_is_lost_and_no_sandbox_has_two_owners() {
    let number = |name: &str, usual: u64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let sessions = number("PEPO_STORM", 60) as usize;
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("clock");
    let seed = number("PEPO_SEED", clock.as_nanos() as u64);
    eprintln!("{sessions} Sessions, PEPO_SEED={seed}");
    let dice = Dice::new(seed);
    let config = "[sandbox]\nmax = 12\nmemory_budget = \"1t\"\ncpu_overcommit = 200\ndisk_budget = \"1t\"\nboots = 4\n\
                  queue_wait = \"2s\"\nstop_grace = \"500ms\"\n[pool]\ntarget = 3\n";
    let config = config.replace("stop_grace = \"500ms\"\n", "stop_grace = \"1s\"\n");
    let mut daemon = Daemon::start(Options { config, ..Options::default() });
    let client = daemon.client();
    let (seen, over) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(false)));
    let state = daemon.home().join("state");
    let raging = tokio::spawn(faults(state, dice.clone(), over.clone()));
    let turns = Arc::new(tokio::sync::Semaphore::new(16));
    let lives: Vec<_> = (0..sessions)
        .map(|number| {
            let (client, dice, seen, turns) = (client.clone(), dice.clone(), seen.clone(), turns.clone());
            tokio::spawn(async move {
                let _turn = turns.acquire_owned().await.expect("open");
                one(client, dice, seen, number).await;
            })
        })
        .collect();
    // In the middle of it pepod dies, once for every hundred Sessions and at least once.
    for part in 1..=(sessions / 100).max(1) {
        let wanted = (sessions * part / ((sessions / 100).max(1) + 1)).max(1);
        while seen.made.lock().expect("lock").len() < wanted && !lives.iter().all(tokio::task::JoinHandle::is_finished)
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        daemon.kill();
        daemon.restart();
    }
    for life in lives {
        within(900, life).await.unwrap_or_else(|error| panic!("PEPO_SEED={seed}: {error}"));
    }
    over.store(true, Ordering::Relaxed);
    let times = within(120, raging).await.expect("faults");

    // None is lost: every one that was made is there, and says how it is.
    let made = seen.made.lock().expect("lock").clone();
    for session in &made {
        let shown = within(60, client.session_show(session, &Default::default())).await;
        let shown = shown.unwrap_or_else(|error| panic!("{session} is lost: {error}, PEPO_SEED={seed}"));
        let is_over = matches!(shown.state, SessionState::Terminated);
        assert_eq!(shown.ended.is_some(), is_over, "{session} does not say why it ended: {shown:?}");
    }
    // Nothing is held: after the last one has gone, only the pool's are there, and after the pool nothing.
    let all = client.session_list(&ListSessions { limit: Some(1000), ..Default::default() }).await.expect("list");
    for session in all.items.iter().filter(|session| session.state != SessionState::Terminated) {
        within(120, client.session_terminate(&session.id.to_string())).await.expect("terminate");
    }
    let began = Instant::now();
    loop {
        let report = within(60, client.doctor()).await.expect("doctor");
        let about = |name: &str| report.checks.iter().find(|check| check.name == name).expect("check").found.clone();
        let (used, debts) = (about("capacity"), about("leftovers"));
        if used.starts_with("0 of 12 Sandboxes, 0 of") && debts.contains("no ended Sandbox holds anything") {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(150), "held: {used}; {debts}; PEPO_SEED={seed}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let refused = seen.refused.lock().expect("lock").clone();
    let commands = seen.commands.load(Ordering::Relaxed);
    eprintln!("{} made, {commands} commands answered, faults {times:?}, refused {refused:?}", made.len());
    assert!(commands > sessions / 4, "hardly anything worked: {refused:?}");
    daemon.end().await;
}
