//! What a hostile neighbour costs a bystander: the same small work, alone and beside it, in turn.

use pepo_e2e::neighbours::{HOSTILE, Hostile, Neighbourhood};

use crate::table::{Goal, Row, median};

/// Turns of alone and beside, of which the middle of all looks counts.
const ROUNDS: usize = 6;

/// Looks in each half of a turn.
const LOOKS: usize = 8;

/// How long a neighbour gets before it is looked at what it costs.
const UNDER_WAY: std::time::Duration = std::time::Duration::from_secs(2);

pub fn neighbours() -> Vec<Row> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut all = Neighbourhood::new().await;
        let mut rows = Vec::new();
        for hostile in HOSTILE {
            rows.push(beside(&mut all, &hostile).await);
        }
        all.end().await;
        rows
    })
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
    Row {
        what: format!("a bystander's work beside a {}", hostile.name),
        ours: median(beside),
        unit: "ms",
        goal: Goal::AtMost { reference: median(alone), ratio: 1.1 },
    }
}

async fn look(all: &Neighbourhood, times: &mut Vec<f64>) {
    for _ in 0..LOOKS {
        times.push(all.own_work().await.as_secs_f64() * 1000.0);
    }
}
