#!/usr/bin/env bash
# `make bench`: the figures, as ratios measured in one run, on release builds.
source "$(dirname "$0")/say.sh"

"$top/scripts/prepare.sh" bench
step "Build (release)"
"$top/scripts/build.sh" --release
cargo build --quiet --locked --profile release -p pepo-e2e --bin pepo-bench
stage_release=$target/pepo-release/bin
# A pepod whose guests may be processes of this host, for figures of many Sessions. No release has this one.
cargo build --quiet --locked --profile release -p pepo-daemon --features fake
cp "$target/release/pepod" "$stage_release/.pepod-fake"
mv "$stage_release/.pepod-fake" "$stage_release/pepod-fake"
ok
step "The Image"
"$top/scripts/build.sh"
"$top/scripts/image.sh" base
ok
step "Figures"
export PEPO_E2E=1 PEPO_E2E_BIN=$stage_release PEPO_E2E_IMAGES=$dev_home/state/images
code=0
as_root "$target/release/pepo-bench" "$@" || code=$?
# What the store alone can take.
if [ $# = 0 ]; then
  cargo test --quiet --locked --release -p pepo-daemon --lib -- --ignored --nocapture \
    --exact store::session::tests::figure_of_sessions_that_the_store_takes | grep -E 'figure|FAILED' || code=1
fi
# Slots of the network are made without a guest, in namespaces of the test's own.
case " ${*:-network} " in
  *" network "*)
    slots=$(cargo test --quiet --locked --release -p pepo-sandbox --lib --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    as_root "$slots" --ignored --exact net::slot::tests::figures::figures_of_two_hundred_slots --nocapture | grep -E 'figure|FAILED' || code=1
    ;;
esac
# The host's side of a start needs the two programs and no guest that runs.
if [ -n "${PEPO_FIRECRACKER:-}" ]; then
  figures=$(cargo test --quiet --locked --release -p pepo-sandbox --test real --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
  as_root env PEPO_BOOT="$dev_home/boot" PEPO_FIRECRACKER="$PEPO_FIRECRACKER" "$figures" --ignored --exact figures_of_firecracker_against_by_hand | grep -E 'figure|FAILED' || code=1
else
  printf '      not run: the figures of Firecracker (PEPO_FIRECRACKER names the directory of firecracker and jailer)\n'
fi
printf '      lock file: %s packages\n' "$(grep -c '^\[\[package\]\]' Cargo.lock)"
printf '      guest agent: %s bytes\n' "$(stat -c %s "$stage_release/pepo-guest")"
"$top/scripts/check.sh" --quick | grep 'of at most' || true
[ "$code" = 0 ] || fail "a goal was missed"
