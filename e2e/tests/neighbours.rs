//! A bystander next to every neighbour that may be feared: it goes on, and the neighbour gets what was said it would get.
//! What that costs the bystander is a figure (`make bench`): here it is printed.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::time::{Duration, Instant};

use pepo_api::CommandId;
use pepo_e2e::neighbours::{HOSTILE, Hostile, Neighbourhood};

/// How long a neighbour may take until it has done its worst.
const WORST_WITHIN: Duration = Duration::from_secs(90);

/// Looks at the bystander beside each: enough to see that it goes on.
const LOOKS: u32 = 1;

async fn says(all: &Neighbourhood, command: CommandId, what: &str) {
    let began = Instant::now();
    loop {
        let said = all.said(command).await;
        if said.contains(what) {
            return;
        }
        assert!(began.elapsed() < WORST_WITHIN, "it does not say `{what}` but {said}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Bytes of the console that the host keeps of any Sandbox.
fn console_bytes(all: &Neighbourhood) -> u64 {
    let jails = std::fs::read_dir(all.instance.home().join("state/jail")).expect("jails").flatten();
    let sizes = jails.filter_map(|jail| Some(jail.path().join("keep/console").metadata().ok()?.len()));
    sizes.max().expect("a console")
}

/// What the neighbour must have come to.
async fn contained(all: &Neighbourhood, hostile: &Hostile, command: CommandId) {
    match hostile.name {
        "disk filler" | "inode filler" => says(all, command, "No space left on device").await,
        "memory hog" => says(all, command, "Killed").await,
        "fork bomb" => tokio::time::sleep(Duration::from_secs(4)).await,
        "cpu spinner" => {
            let used = async || all.client.session_stats(&all.neighbour).await.expect("stats").host_cpu_ms;
            let (began, before) = (Instant::now(), used().await);
            tokio::time::sleep(Duration::from_secs(2)).await;
            let (took, ms) = (began.elapsed(), used().await - before);
            // A processor, and a half for the VMM's own work; a period more for where the looks fall.
            let most = took.as_millis() as u64 * 3 / 2 + 300;
            assert!(ms <= most, "{ms} ms of processor time in {took:?}");
        }
        "console flood" => {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let kept = console_bytes(all);
            assert!(kept <= 1 << 20, "{kept} bytes of console are kept");
        }
        "packet flood" => {
            let began = Instant::now();
            loop {
                let network = all.client.session_stats(&all.neighbour).await.expect("stats").network;
                if network.expect("a network").sent_bytes > 0 {
                    return;
                }
                assert!(began.elapsed() < WORST_WITHIN, "nothing is sent");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        _ => tokio::time::sleep(Duration::from_secs(1)).await,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bystander_goes_on_beside_every_neighbour() {
    let mut all = Neighbourhood::new().await;
    println!("| neighbour | alone | beside it | contained and gone after |\n|---|---|---|---|");
    for hostile in HOSTILE {
        let mut times = [Duration::ZERO; 2];
        for _ in 0..LOOKS {
            times[0] += all.own_work().await;
        }
        let began = Instant::now();
        let command = all.begin(&hostile).await;
        for _ in 0..LOOKS {
            times[1] += all.own_work().await;
        }
        contained(&all, &hostile, command).await;
        all.own_work().await;
        let neighbour = all.neighbour.clone();
        all.end_of(command).await;
        assert_eq!(all.neighbour, neighbour, "{}: its own Session was lost with it", hostile.name);
        let [alone, beside] = times.map(|time| time / LOOKS);
        println!("| {} | {alone:.0?} | {beside:.0?} | {:.1?} |", hostile.name, began.elapsed());
    }
    all.end().await;
}
