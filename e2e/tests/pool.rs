//! The warm pool on real microVMs: what waits is claimed and used once, and made anew when nobody is in its way.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pepo_api::{CreateCommand, CreateSession, Text};
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

/// What a guest says of itself: its names, its own id, its network.
const WHO: &str = "hostname; cat /etc/hostname; grep -c 127.0.1.1 /etc/hosts; getent hosts $(hostname) | cut -d' ' -f1; \
    getent hosts localhost | wc -l; cat /etc/machine-id; ip -o -4 address show dev eth0 | wc -l; ip route | wc -l; \
    ls -A /run /tmp /var/tmp | tr '\\n' ' '; echo; cut -d' ' -f2,3 /proc/mounts | tr '\\n' ' '; echo; \
    sudo dmesg | grep -c 'Linux version'; sudo dmesg | grep -c 'no mount was rehearsed'";

#[tokio::test]
async fn whoever_waited_is_itself_like_one_that_was_made_for_somebody() {
    let ring = Ring::new(1);
    let waits = ring.ready(1).await;
    let mut ids = BTreeSet::new();
    let mut said = vec![];
    let other = CreateSession { memory_mib: Some(384), ..bare() };
    for body in [bare(), other] {
        let session = ring.create(body).await;
        let command = CreateCommand { command: Some(WHO.into()), wait_seconds: Some(60), ..Default::default() };
        let output = ring.client.command_create(&session, &command).await.expect("command");
        let Text::Utf8(text) = output.stdout else { panic!("no text") };
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        assert!(lines.len() == 12 && lines[0] == lines[1] && session.contains(&lines[0]), "{lines:?}");
        assert_eq!(lines[10..], ["1", "0"], "the kernel's log can be read, and has no complaint: {text}");
        assert!(lines[5].len() == 32 && ids.insert(lines.remove(5)), "no id of its own: {text}");
        said.push(lines.split_off(2));
        ring.client.session_terminate(&session).await.expect("terminate");
    }
    assert!(!waits.is_empty() && said[0] == said[1], "waited, and made for somebody: {said:?}");
    assert_eq!(said[0][0], "1", "{said:?}");
    ring.end();
}
