//! Whatever dies by `kill -9`, at whatever step of a Sandbox's life: what can go on goes on, what cannot is told and
//! removed, and the API answers soon after pepod's start. Here is one of each kind; `make soak` has them all.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use pepo_e2e::strike::{Moment, Ring, Victim};

#[tokio::test]
async fn pepod_dies_while_a_sandbox_is_made_set_up_or_released() {
    let ring = Ring::new(0);
    for moment in [Moment::Booting, Moment::Activating, Moment::Releasing] {
        ring.strike(Victim::Pepod, moment).await;
    }
    ring.end();
}

#[tokio::test]
async fn what_runs_a_sandbox_dies_at_each_step() {
    let ring = Ring::new(0);
    let mut strikes = vec![
        (Victim::Vmm, Moment::Booting),
        (Victim::Keeper, Moment::Activating),
        (Victim::Agent, Moment::Running),
        (Victim::Device, Moment::Releasing),
    ];
    strikes.retain(|(victim, moment)| victim.can_die(*moment, ring.under_firecracker()));
    for (victim, moment) in strikes {
        ring.strike(victim, moment).await;
    }
    ring.end();
}

#[tokio::test]
async fn the_privileged_half_or_the_edge_dies_while_it_is_needed() {
    let ring = Ring::new(0);
    ring.strike(Victim::Host, Moment::Booting).await;
    ring.strike(Victim::Edge, Moment::Running).await;
    ring.end();
}
