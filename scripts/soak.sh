#!/usr/bin/env bash
# `make soak [BOOTS=200]`: many boots in a row without a hang, then what takes too long for `make test`.
# `soak.sh PART…`: some parts of pepo-soak alone (boots, deaths, keep, loads, crowds, upgrade, browser, page).
source "$(dirname "$0")/say.sh"

"$top/scripts/prepare.sh" soak
# Its crates are other ones than ours to cargo, for their path; what they depend on is built once.
previous=
if git rev-parse --quiet --verify HEAD~1 >/dev/null 2>&1; then
  step "The programs of the previous commit"
  from=$target/previous/source previous=$target/previous/bin
  git worktree remove --force "$from" 2>/dev/null || true
  rm -rf "$target/previous"
  git worktree add --quiet --detach --force "$from" HEAD~1
  (cd "$from" && CARGO_TARGET_DIR=$target ./scripts/build.sh)
  cp -r "$stage" "$previous"
  git worktree remove --force "$from"
  ok
else
  note "there is no previous commit here: the upgrade is from another build of this one"
fi
step "Build"
"$top/scripts/build.sh"
cargo build --quiet --locked -p pepo-e2e --bin pepo-soak
ok
step "The Image"
"$top/scripts/image.sh" base
ok
step "Soak"
export PEPO_E2E=1 PEPO_E2E_BIN=$stage PEPO_E2E_IMAGES=$dev_home/state/images
[ -z "$previous" ] || export PEPO_E2E_PREVIOUS=$previous
as_root "$target/debug/pepo-soak" "$@"
[ $# = 0 ] || exit 0

step "A storm of 1,000 Sessions, guests that are host processes, a failure at every step"
PEPO_GUEST=$stage/pepo-guest PEPO_STORM=${STORM:-1000} \
  cargo test --quiet --locked -p pepo-daemon --features fake --test storm -- --nocapture
ok

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
