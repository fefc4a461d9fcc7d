//! What a hostile neighbour costs a bystander: the same small work, alone and beside it, in turn.

use std::process::Command;

use pepo_e2e::neighbours::{HOSTILE, Hostile, Neighbourhood};

use crate::table::{Goal, Row, median};

/// Turns of alone and beside, of which the middle of all looks counts.
const ROUNDS: usize = 6;

/// Looks in each half of a turn.
const LOOKS: usize = 8;

/// How long a neighbour gets before it is looked at what it costs.
const UNDER_WAY: std::time::Duration = std::time::Duration::from_secs(2);

/// What a thread of the host's does that shares nothing with a Sandbox but the machine: its processors alone, and the caches
/// and the memory that they have in common too.
const PROCESSES: [(&str, &str); 2] =
    [("counts", "while True: pass"), ("copies memory", "a = bytearray(64 << 20)\nwhile True: a = bytearray(a)")];

pub fn neighbours() -> Vec<Row> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut all = Neighbourhood::new().await;
        let mut rows = Vec::new();
        for process in PROCESSES {
            rows.push(beside_a_process(&all, process).await);
        }
        for hostile in HOSTILE {
            rows.push(beside(&mut all, &hostile).await);
        }
        all.end().await;
        rows
    })
}

/// The floor: one thread of the host's at work and no Sandbox around it, which costs what sharing this machine costs.
async fn beside_a_process(all: &Neighbourhood, (name, program): (&str, &str)) -> Row {
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        look(all, &mut alone).await;
        let mut busy = Command::new("python3").args(["-c", program]).spawn().expect("a process");
        tokio::time::sleep(UNDER_WAY).await;
        look(all, &mut beside).await;
        busy.kill().and_then(|()| busy.wait()).expect("its end");
    }
    let name = format!("a process of the host's that {name}, the floor");
    row(&name, alone, beside, |reference| Goal::Against { reference })
}

async fn beside(all: &mut Neighbourhood, hostile: &Hostile) -> Row {
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        look(all, &mut alone).await;
        let command = all.begin(hostile).await;
        tokio::time::sleep(UNDER_WAY).await;
        look(all, &mut beside).await;
        all.end_of(command).await;
    }
    row(&format!("a {}", hostile.name), alone, beside, |reference| Goal::AtMost { reference, ratio: 1.1 })
}

fn row(name: &str, alone: Vec<f64>, beside: Vec<f64>, goal: impl Fn(f64) -> Goal) -> Row {
    let what = format!("a bystander's work beside {name}");
    Row { what, ours: median(beside), unit: "ms", goal: goal(median(alone)) }
}

async fn look(all: &Neighbourhood, times: &mut Vec<f64>) {
    for _ in 0..LOOKS {
        times.push(all.own_work().await.as_secs_f64() * 1000.0);
    }
}
