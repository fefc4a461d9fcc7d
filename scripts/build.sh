#!/usr/bin/env bash
# Builds the programs and stages them in target/pepo/bin, the guest agent as a static program. `build.sh [--release]`.
source "$(dirname "$0")/say.sh"

profile=dev folder=debug
# On a terminal cargo shows how far it is; in a log its lines would bury the others.
quiet=--quiet
[ ! -t 2 ] || quiet=
[ "${1:-}" != --release ] || { profile=release folder=release stage=$target/pepo-release/bin; }

guest_target=x86_64-unknown-linux-gnu
# The flags hold for this call alone, and in a target directory of its own: a static glibc would break build scripts'
# shared objects elsewhere.
RUSTFLAGS="-C target-feature=+crt-static" cargo build $quiet --locked -p pepo-guest --profile guest \
  --target $guest_target --target-dir "$target/guest"
cargo build $quiet --locked --profile $profile -p pepo-daemon -p pepo-cli -p pepo-edge

mkdir -p "$stage"
stage_one() {
  # By rename: a program that runs keeps its file.
  cmp -s "$1" "$stage/$2" || { cp "$1" "$stage/.$2" && mv "$stage/.$2" "$stage/$2"; }
}
stage_one "$target/$folder/pepo" pepo
stage_one "$target/$folder/pepod" pepod
stage_one "$target/$folder/pepo-edge" pepo-edge
stage_one "$target/guest/$guest_target/guest/pepo-guest" pepo-guest
vsock=$tools/vhost-device-vsock-$vsock_version/bin/vhost-device-vsock
[ ! -x "$vsock" ] || stage_one "$vsock" vhost-device-vsock
