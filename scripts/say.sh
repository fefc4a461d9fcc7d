# Sourced by the other scripts: where things are, numbered steps with their times, and root's rights when they are needed.
# shellcheck shell=bash

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

top=$PWD
target=${CARGO_TARGET_DIR:-$top/target}
case $target in /*) ;; *) target=$top/$target ;; esac

# What `make build` stages: laid out like an installation, so that every program finds its siblings beside itself.
stage=$target/pepo/bin

# Tools of pinned versions, shared by every checkout of this user.
tools=${PEPO_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/pepo-tools}

# The instance that `make run` and the tests take their Images from. Not the system's own: that one is never touched.
dev_home=${PEPO_DEV_HOME:-/var/lib/pepo-dev}

vsock_version=0.3.0
nextest_version=0.9.143
deny_version=0.20.2

if [ -t 1 ] && [ "${TERM:-dumb}" != dumb ] && [ -z "${NO_COLOR:-}" ]; then
  bold=$'\e[1m' dim=$'\e[2m' red=$'\e[31m' green=$'\e[32m' plain=$'\e[0m'
else
  bold='' dim='' red='' green='' plain=''
fi

started=$EPOCHREALTIME
step_number=0
steps=${steps:-0}

# seconds_since START: seconds with one decimal.
seconds_since() {
  local now=$EPOCHREALTIME
  local us=$(( (${now/[.,]/} - ${1/[.,]/}) / 100000 ))
  printf '%d.%d' $((us / 10)) $((us % 10))
}

# step TEXT: begins a numbered step.
step() {
  step_number=$((step_number + 1))
  step_started=$EPOCHREALTIME
  if [ "$steps" -gt 0 ]; then
    printf '%s[%d/%d]%s %s\n' "$bold" "$step_number" "$steps" "$plain" "$1"
  else
    printf '%s[%d]%s %s\n' "$bold" "$step_number" "$plain" "$1"
  fi
}

# ok [TEXT]: ends it.
ok() {
  printf '      %s%s%s (%s s)\n' "$green" "${1:-ok}" "$plain" "$(seconds_since "$step_started")"
}

note() { printf '      %s\n' "$1"; }

fail() {
  printf '%serror:%s %s\n' "$red" "$plain" "$1" >&2
  [ -z "${2:-}" ] || printf '  %s\n' "$2" >&2
  exit 1
}

# as_root CMD…: with root's rights; the variables Pepo reads go along.
as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    sudo --preserve-env=PEPO_HOME,PEPO_VMM,PEPO_E2E,PEPO_E2E_BIN,PEPO_E2E_IMAGES,PEPO_E2E_PREVIOUS,PEPO_BENCH_CLAIMS,NO_COLOR,DEBIAN_FRONTEND -- "$@"
  fi
}

# can_root: whether as_root can work at all.
can_root() { [ "$(id -u)" = 0 ] || command -v sudo >/dev/null; }

# quietly CMD…: its output only if it fails.
quietly() {
  local log code=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 || code=$?
  if [ "$code" != 0 ]; then
    tail -n 60 "$log" >&2
    rm -f "$log"
    return "$code"
  fi
  rm -f "$log"
}
