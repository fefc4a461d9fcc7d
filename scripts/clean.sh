#!/usr/bin/env bash
# `make clean`: the build, and the instance that `make run` and the tests keep.
source "$(dirname "$0")/say.sh"

if [ -e "$dev_home" ]; then
  can_root || fail "removing $dev_home takes root"
  if [ -x "$stage/pepo" ]; then
    PEPO_HOME=$dev_home as_root "$stage/pepo" down || fail "the instance in $dev_home could not be stopped, so nothing was removed"
  fi
  mountpoint -q "$dev_home" && fail "$dev_home is a mount point: not removed"
  as_root rm -rf --one-file-system -- "$dev_home"
fi
cargo clean --quiet
note "removed ${target/#$top\//} and $dev_home; tools stay in $tools"
