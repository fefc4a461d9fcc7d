//! Many Sessions on one pepod, with guests that are processes of this host: what pepod itself takes and bears.

use std::time::{Duration, Instant};

use pepo_api::client::Client;
use pepo_api::query::ListSessions;
use pepo_api::{CreateCommand, CreateSession, SessionState};
use pepo_e2e::{Instance, Options, Started, bin, until};

use crate::table::{Goal, Row};

const SESSIONS: usize = 1000;
const POOL: usize = 50;
const CALLERS: usize = 20;
const MINUTE: Duration = Duration::from_secs(60);

/// How long pepod is watched while nobody asks it anything.
const WATCHED: Duration = Duration::from_secs(20);

/// Sessions created in a second, and what a thousand idle ones with a pool beside them cost.
pub fn many() -> Vec<Row> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    let config = format!(
        "[sandbox]\nmax = 200\nmemory_budget = \"1t\"\ncpu_overcommit = 500\ndisk_budget = \"1t\"\nboots = 4\n[pool]\ntarget = {POOL}\n"
    );
    let instance = Instance::with(Options { without_images: true, config: Some(config), ..Options::default() });
    let client = instance.client();
    let pepod = serve(&instance, &client, &runtime);
    let before = resident_kib(&instance);
    let began = Instant::now();
    runtime.block_on(spread(&client));
    let created = SESSIONS as f64 / began.elapsed().as_secs_f64();

    // A fresh one, which holds what it has to and not what it once had.
    runtime.block_on(client.down()).expect("down");
    pepod.wait();
    let pepod = serve(&instance, &client, &runtime);
    let query = ListSessions { limit: Some(1000), state: Some(SessionState::Idle), ..Default::default() };
    let idle = runtime.block_on(client.session_list(&query)).expect("list").items.len();
    assert_eq!(idle, SESSIONS, "not every one is idle");
    let each = resident_kib(&instance).saturating_sub(before) as f64 / SESSIONS as f64;
    let (cpu, began) = (cpu_ms(&instance), Instant::now());
    std::thread::sleep(WATCHED);
    let used = (cpu_ms(&instance) - cpu) as f64 / began.elapsed().as_millis() as f64 * 100.0;

    runtime.block_on(client.down()).expect("down");
    pepod.wait();
    instance.end();
    let idle = format!("{SESSIONS} idle Sessions and a pool of {POOL}");
    vec![
        Row {
            what: format!(
                "Sessions created, served and put away in a second by {CALLERS} callers, guests as processes"
            ),
            ours: created,
            unit: "/s",
            goal: Goal::Report,
        },
        Row { what: format!("{idle}: processor of pepod"), ours: used, unit: "% of one", goal: Goal::Below(1.0) },
        Row { what: format!("{idle}: memory of pepod for each"), ours: each, unit: "KiB", goal: Goal::Below(32.0) },
    ]
}

fn again() -> CreateSession {
    CreateSession { workspace: Some(None), reactivate: Some(true), ..CreateSession::default() }
}

/// A pepod whose guests are processes, once its pool is full.
fn serve(instance: &Instance, client: &Client, runtime: &tokio::runtime::Runtime) -> Started {
    let pepod = instance.program_at(bin("pepod-fake")).args(["serve"]);
    let pepod = pepod.env("PEPO_VMM", "fake").env("PEPO_GUEST", bin("pepo-guest"));
    let pepod = pepod.within(Duration::from_secs(600)).start();
    until("the pool is full", 2 * MINUTE, || (instance.jails().len() == POOL).then_some(()));
    // Whatever it still does for that.
    std::thread::sleep(Duration::from_secs(3));
    runtime.block_on(client.healthz()).expect("it answers");
    pepod
}

/// So many Sessions, by so many callers: each is made, runs a command and is given back.
async fn spread(client: &Client) {
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..CALLERS {
        let client = client.clone();
        callers.spawn(async move {
            for _ in 0..SESSIONS / CALLERS {
                let session = client.session_create(&again()).await.expect("session").id.to_string();
                let command = CreateCommand { argv: Some(vec!["/bin/true".into()]), ..CreateCommand::default() };
                client.command_create(&session, &command).await.expect("command");
                client.session_release(&session).await.expect("release");
            }
        });
    }
    while let Some(caller) = callers.join_next().await {
        caller.expect("caller");
    }
}

/// What `/proc` says of pepod in that file.
fn of_pepod(instance: &Instance, file: &str) -> String {
    let pids = instance.pids("pepod");
    assert_eq!(pids.len(), 1, "{pids:?}");
    std::fs::read_to_string(format!("/proc/{}/{file}", pids[0])).expect("/proc")
}

fn resident_kib(instance: &Instance) -> u64 {
    let status = of_pepod(instance, "status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

fn cpu_ms(instance: &Instance) -> u64 {
    let stat = of_pepod(instance, "stat");
    // After the name: state is the first, user and system time are the 12th and 13th.
    let fields: Vec<_> = stat.rsplit(") ").next().expect("fields").split(' ').collect();
    let ticks = |n: usize| fields[n].parse::<u64>().expect("ticks");
    (ticks(11) + ticks(12)) * 1000 / rustix::param::clock_ticks_per_second()
}
