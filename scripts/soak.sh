#!/usr/bin/env bash
# `make soak [BOOTS=200]`: many boots in a row without a hang, then what takes too long for `make test`.
source "$(dirname "$0")/say.sh"

"$top/scripts/prepare.sh" test
step "Build"
"$top/scripts/build.sh"
cargo build --quiet --locked -p pepo-e2e --bin pepo-soak
ok
step "The Image"
"$top/scripts/image.sh" base
ok
step "Soak"
export PEPO_E2E=1 PEPO_E2E_BIN=$stage PEPO_E2E_IMAGES=$dev_home/state/images
as_root "$target/debug/pepo-soak" "$@"
