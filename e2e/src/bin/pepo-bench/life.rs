//! Lives of Sandboxes: how fast one that waits serves, how fast the host is clean after one, how fast a pepod that died is
//! back at its Sandboxes.

use std::time::{Duration, Instant};

use pepo_api::client::Client;
use pepo_api::{CreateCommand, CreateSession};
use pepo_e2e::strike::Ring;
use pepo_e2e::{Instance, Started, bare, until};
use rustix::process::{Pid, Signal, kill_process};

use crate::table::{Goal, Row, median, quantile};

const MINUTE: Duration = Duration::from_secs(60);

/// Deaths of pepod.
const DEATHS: usize = 20;

/// Sessions that begin warm: each needs a Sandbox that was booted for it. `PEPO_BENCH_CLAIMS` makes it fewer.
fn claims() -> usize {
    std::env::var("PEPO_BENCH_CLAIMS").map_or(200, |text| text.parse().expect("PEPO_BENCH_CLAIMS is a number"))
}

fn now<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime").block_on(work)
}

fn ms(times: &[f64]) -> Vec<f64> {
    times.iter().map(|seconds| seconds * 1e3).collect()
}

async fn run_true(client: &Client, session: &str) {
    let command = CreateCommand { argv: Some(vec!["/bin/true".into()]), wait_seconds: Some(60), ..Default::default() };
    let output = client.command_create(session, &command).await.expect("command");
    assert_eq!(output.command.end.expect("an end").exit_code, Some(0));
}

/// From the request for a Session to the end of its first command, against that command in a Session that runs; and from
/// the request for its end to the host without any of it.
pub fn warm() -> Vec<Row> {
    let ring = Ring::new(1);
    let (mut warm, mut bare_exec, mut clean) = (vec![], vec![], vec![]);
    now(async {
        let client = &ring.client;
        // Another shape: the pool is not for it.
        let other = ring.create(CreateSession { memory_mib: Some(384), ..bare() }).await;
        run_true(client, &other).await;
        for _ in 0..claims() {
            let waits = ring.ready_beside(1, 1).await;
            let began = Instant::now();
            run_true(client, &other).await;
            bare_exec.push(began.elapsed().as_secs_f64());

            let began = Instant::now();
            let session = ring.create(bare()).await;
            run_true(client, &session).await;
            warm.push(began.elapsed().as_secs_f64());

            let sandbox = ring.sandbox(&session).await;
            assert!(waits.contains(&sandbox), "what waited was not claimed");
            let began = Instant::now();
            client.session_terminate(&session).await.expect("terminate");
            // A Sandbox's directory is made first and removed last.
            until("the host is clean", MINUTE, || (!ring.instance.jails().contains(&sandbox)).then_some(()));
            clean.push(began.elapsed().as_secs_f64());
        }
        client.session_terminate(&other).await.expect("terminate");
    });
    ring.end();
    let count = warm.len();
    let (p50, p99) = (median(ms(&warm)), quantile(ms(&warm), 0.99));
    let what = "a Session from the pool, created, Active and through with `/bin/true`";
    vec![
        Row {
            what: format!("{what}, p50 of {count}, against that command in a running one"),
            ours: p50,
            unit: "ms",
            goal: Goal::AtMost { reference: median(ms(&bare_exec)), ratio: 1.3 },
        },
        Row {
            what: format!("the same, p99 against p50 of {count}"),
            ours: p99,
            unit: "ms",
            goal: Goal::AtMost { reference: p50, ratio: 3.0 },
        },
        Row { what: "terminate to a clean host, p50".into(), ours: median(ms(&clean)), unit: "ms", goal: Goal::Report },
        Row {
            what: "terminate to a clean host, p99".into(),
            ours: quantile(ms(&clean), 0.99),
            unit: "ms",
            goal: Goal::Report,
        },
    ]
}

/// From `kill -9` of pepod to the end of the next command in its Session, by a pepod that is started at once.
pub fn back() -> Vec<Row> {
    let instance = Instance::new();
    let client = instance.client();
    let mut pepod = serve(&instance);
    let mut back = vec![];
    now(async {
        answers(&client).await;
        let session = client.session_create(&bare()).await.expect("session").id.to_string();
        run_true(&client, &session).await;
        for _ in 0..DEATHS {
            let pids = instance.pids("pepod");
            assert_eq!(pids.len(), 1, "{pids:?}");
            let began = Instant::now();
            kill_process(Pid::from_raw(pids[0]).expect("a pid"), Signal::KILL).expect("kill");
            std::mem::replace(&mut pepod, serve(&instance)).wait();
            answers(&client).await;
            run_true(&client, &session).await;
            back.push(began.elapsed().as_secs_f64());
        }
        client.session_terminate(&session).await.expect("terminate");
    });
    instance.pepo(["down"]).ok();
    pepod.wait();
    instance.end();
    let row = |name: &str, ours| Row {
        what: format!("`kill -9` of pepod to the first command that works, {name} of {DEATHS}"),
        ours,
        unit: "ms",
        goal: Goal::Report,
    };
    vec![row("p50", median(ms(&back))), row("p99", quantile(ms(&back), 0.99))]
}

fn serve(instance: &Instance) -> Started {
    instance.program("pepod").args(["serve"]).within(Duration::from_secs(600)).start()
}

async fn answers(client: &Client) {
    let began = Instant::now();
    while client.healthz().await.is_err() {
        assert!(began.elapsed() < MINUTE, "pepod does not answer");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
