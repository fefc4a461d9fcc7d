//! The warm pool on real microVMs: what waits is claimed and used once, and made anew when nobody is in its way.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pepo_api::CreateSession;
use pepo_e2e::bare;
use pepo_e2e::strike::{Moment, Ring, Victim};

#[tokio::test]
async fn what_waits_is_claimed_once_and_made_anew_when_it_is_quiet() {
    let ring = Ring::new(1);
    let mut seen: BTreeSet<String> = ring.ready(1).await.into_iter().collect();

    // Another shape has to be made.
    let began = Instant::now();
    let other = ring.create(CreateSession { memory_mib: Some(384), ..bare() }).await;
    ring.echo(&other).await;
    let cold = began.elapsed();
    assert!(!seen.contains(&ring.sandbox(&other).await), "another shape was claimed");
    ring.client.session_terminate(&other).await.expect("terminate");

    let began = Instant::now();
    let first = ring.create(bare()).await;
    ring.echo(&first).await;
    let warm = began.elapsed();
    println!("made: {cold:?}, claimed: {warm:?}");
    let used = ring.sandbox(&first).await;
    assert!(seen.contains(&used), "what waited was not claimed");
    assert!(warm < cold, "a claim in {warm:?} is no faster than a start in {cold:?}");

    // A new one takes its place beside it; with that one claimed too and a command at work, none does.
    let beside = ring.ready_beside(1, 1).await;
    assert!(beside.iter().all(|one| seen.insert(one.clone()) || *one == used), "one came back: {beside:?}");
    let busy = ring.begin(&first, "sleep 600").await;
    let second = ring.create(bare()).await;
    ring.echo(&second).await;
    assert!(beside.contains(&ring.sandbox(&second).await), "what waited was not claimed");
    if !ring.under_firecracker() {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let now: BTreeSet<String> = ring.instance.jails().into_iter().collect();
        assert_eq!(now, beside.into_iter().collect(), "one was made beside a running command");
    }
    ring.client.command_kill(&first, busy).await.expect("kill");
    ring.ready_beside(1, 2).await;

    // What was used is gone with its Session, and never anybody's again.
    for session in [&first, &second] {
        ring.client.session_terminate(session).await.expect("terminate");
    }
    let waits = ring.ready(1).await;
    assert!(!seen.contains(&waits[0]), "a used one waits again");

    // One that dies is replaced; a pepod that dies makes them anew.
    ring.strike(Victim::Vmm, Moment::Waiting).await;
    ring.strike(Victim::Pepod, Moment::Waiting).await;
    ring.end();
}
