#!/usr/bin/env bash
# `make fuzz [TARGET=…] [SECONDS_EACH=60]`: each fuzz target in turn. With cargo-fuzz and a nightly toolchain it is
# guided by coverage; without them the targets run as plain programs, which finds less.
source "$(dirname "$0")/say.sh"

seconds=${SECONDS_EACH:-60}
mapfile -t targets < <(cargo metadata --locked --no-deps --format-version 1 |
  python3 -c 'import json,sys
for p in json.load(sys.stdin)["packages"]:
    if p["name"] == "pepo-fuzz":
        for t in p["targets"]:
            if "bin" in t["kind"]: print(t["name"])')
[ ${#targets[@]} -gt 0 ] || fail "there are no fuzz targets"
steps=0
for name in "${targets[@]}"; do
  [ -z "${TARGET:-}" ] || [ "$TARGET" = "$name" ] || continue
  step "$name for $seconds s"
  corpus=$target/fuzz/corpus/$name
  mkdir -p "$corpus" "$target/fuzz/artifacts/$name"
  if cargo fuzz --version >/dev/null 2>&1 && rustup run nightly rustc --version >/dev/null 2>&1; then
    cargo +nightly fuzz run "$name" "$corpus" -- -max_total_time="$seconds" -artifact_prefix="$target/fuzz/artifacts/$name/"
  else
    cargo build --quiet --locked -p pepo-fuzz --bin "$name"
    "$target/debug/$name" "$corpus" -max_total_time="$seconds" -artifact_prefix="$target/fuzz/artifacts/$name/"
  fi
  ok
done
