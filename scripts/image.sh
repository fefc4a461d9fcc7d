#!/usr/bin/env bash
# Builds the Image `base` (or the one named) in the development instance, where it is missing.
source "$(dirname "$0")/say.sh"

name=${1:-base}
export PEPO_HOME=$dev_home
can_root || fail "Pepo needs root to run: neither root nor sudo is here"
as_root mkdir -p "$dev_home"
as_root "$stage/pepo" image build "$name"
as_root "$stage/pepo" down
