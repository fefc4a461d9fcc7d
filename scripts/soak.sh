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

step "The API against its own document"
as_root env STREAMS=500 "$top/scripts/schemathesis.sh" --examples 100

step "The Debian package in a fresh Debian"
package=$(mktemp -d)
"$top/scripts/deb.sh" --stage "$stage" --out "$package"
"$top/scripts/deb.sh" --check "$package"/*.deb --install bookworm
rm -rf "$package"

step "Starts and stops under Firecracker"
if [ -n "${PEPO_FIRECRACKER:-}" ]; then
  real=$(cargo test --quiet --locked -p pepo-sandbox --test real --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
  as_root env PEPO_CYCLES=1000 PEPO_BOOT="$dev_home/boot" PEPO_FIRECRACKER="$PEPO_FIRECRACKER" "$real" --exact firecracker_starts_and_stops_without_a_leak
  ok
else
  note "not run: PEPO_FIRECRACKER does not name the directory of firecracker and jailer"
fi
