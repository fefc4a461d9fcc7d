#!/usr/bin/env bash
# `make bench`: the figures, as ratios measured in one run, on release builds.
source "$(dirname "$0")/say.sh"

"$top/scripts/prepare.sh" run
step "Build (release)"
"$top/scripts/build.sh" --release
cargo build --quiet --locked --profile release -p pepo-e2e --bin pepo-bench
stage_release=$target/pepo-release/bin
ok
step "The Image"
"$top/scripts/build.sh"
"$top/scripts/image.sh" base
ok
step "Figures"
export PEPO_E2E=1 PEPO_E2E_BIN=$stage_release PEPO_E2E_IMAGES=$dev_home/state/images
code=0
as_root "$target/release/pepo-bench" "$@" || code=$?
printf '      lock file: %s packages\n' "$(grep -c '^\[\[package\]\]' Cargo.lock)"
printf '      guest agent: %s bytes\n' "$(stat -c %s "$stage_release/pepo-guest")"
"$top/scripts/check.sh" --quick | grep 'of at most' || true
[ "$code" = 0 ] || fail "a goal was missed"
