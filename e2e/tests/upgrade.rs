//! An upgrade with live Sandboxes: the ones that another build made go on under this one.
//!
//! The programs of the previous commit are not there in a clean clone, and building them takes minutes. So here the other
//! build is this one with a guest agent of other bytes: other files under every running process, another initramfs, an
//! adoption across both; but the same protocol and the same store. `make soak` builds the previous commit and goes from
//! that one to this, with whatever differs between the two (`PEPO_E2E_PREVIOUS` names its directory of programs). There is
//! no guest of an older generation yet: this is the first.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;

use pepo_e2e::upgrade;

#[tokio::test]
async fn sandboxes_of_another_build_go_on_under_this_one() {
    let now = PathBuf::from(std::env::var_os("PEPO_E2E_BIN").expect("PEPO_E2E_BIN is not set: run `make test`"));
    let other = upgrade::other_build(&now);
    upgrade::adopts(other.path(), &now).await;
}
