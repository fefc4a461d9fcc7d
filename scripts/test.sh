#!/usr/bin/env bash
# `make test`: every ring of tests, real microVMs included. `test.sh [--no-microvm] [nextest arguments…]`.
source "$(dirname "$0")/say.sh"

microvm=1
[ "${1:-}" != --no-microvm ] || { microvm=; shift; }

nextest=(cargo nextest)
"$top/scripts/prepare.sh" test
cargo nextest --version >/dev/null 2>&1 || nextest=("$tools/cargo-nextest-$nextest_version/bin/cargo-nextest" nextest)

step "Programs under test"
"$top/scripts/build.sh"
# What is put in the VMM's place to try the jail: static, since it must run in any root.
triple=x86_64-unknown-linux-gnu
RUSTFLAGS="-C target-feature=+crt-static" cargo build --quiet --locked -p pepo-hostile --bins --target $triple --target-dir "$target/hostile"
ok

# What the tests need, in place of guesses: a test that misses one of these fails, it does not skip.
export PEPO_GUEST=$stage/pepo-guest
export PEPO_PROBE=$target/hostile/$triple/debug/probe
export PEPO_VSOCK_DEVICE=$stage/vhost-device-vsock
export PEPO_E2E=$microvm PEPO_E2E_BIN=$stage PEPO_E2E_IMAGES=$dev_home/state/images
export PEPO_BOOT=$dev_home/boot

if [ -n "$microvm" ]; then
  step "The Image"
  "$top/scripts/image.sh" base
  "$top/scripts/image.sh" --boot-files base
  ok
fi
skip=()
[ -n "$microvm" ] || skip=(--exclude pepo-e2e --exclude pepo-hostile)

# What tests of an interrupted run left.
for home in /var/lib/pepo-e2e/*; do
  [ -d "$home" ] || continue
  note "removing $home of an interrupted run"
  PEPO_HOME=$home as_root "$stage/pepo" down >/dev/null 2>&1 || true
  PEPO_HOME=$home as_root "$stage/pepo" sweep >/dev/null 2>&1 || true
  as_root umount "$home/state" 2>/dev/null || true
  as_root rm -rf --one-file-system -- "$home"
done

step "Tests"
code=0
run() { "${nextest[@]}" run --locked --workspace "${skip[@]}" --features pepo-daemon/fake --profile ci "$@"; }
if [ "$(id -u)" = 0 ]; then
  run "$@" || code=$?
else
  # Built as this user, run as root: microVMs and their jails need it.
  CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="sudo --preserve-env" run "$@" || code=$?
fi

step "The Debian package"
if command -v dpkg-deb >/dev/null; then
  package=$(mktemp -d)
  # Of the programs under test, packed fast: what is looked at is what is in it and where.
  { PEPO_DEB_FAST=1 "$top/scripts/deb.sh" --stage "$stage" --out "$package" && "$top/scripts/deb.sh" --check "$package"/*.deb; } || code=1
  rm -rf "$package"
  ok
else
  note "not made: dpkg-deb is not here"
fi

# Named and counted, so that nobody takes silence for success.
if [ -n "$microvm" ]; then
  step "Not run here"
  "${nextest[@]}" list --locked --workspace "${skip[@]}" --features pepo-daemon/fake --run-ignored only --message-format oneline 2>/dev/null | sed 's/^/      /' | tee "$target/not-run" || true
  note "$(grep -c . "$target/not-run") tests, which need Firecracker (PEPO_FIRECRACKER), hardware virtualization, or are figures"
fi

step "Nothing is left on the host"
left=$({
  ls -d /var/lib/pepo-e2e/* 2>/dev/null || true
  for exe in /proc/[0-9]*/exe; do
    case $(readlink "$exe" 2>/dev/null) in "$stage"/*) pid=${exe#/proc/}; ps -o pid=,user=,args= -p "${pid%/exe}" || true ;; esac
  done
} | head -n 20)
[ -z "$left" ] || { printf '%s\n' "$left" | sed 's/^/      /'; [ "$code" != 0 ] || code=1; }
[ "$code" = 0 ] || fail "the tests failed"
ok
printf '%sAll tests passed%s in %s s.\n' "$green" "$plain" "$(seconds_since "$started")"
