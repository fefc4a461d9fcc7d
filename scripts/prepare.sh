#!/usr/bin/env bash
# What this machine lacks to build and run Pepo: said first, then installed. `prepare.sh [run|test|bench|soak|check] [--plan]`;
# --plan only says. Safe to repeat; takes no time when nothing is missing.
source "$(dirname "$0")/say.sh"

purpose=run
plan_only=
for arg; do
  case $arg in
    run | test | bench | soak | check) purpose=$arg ;;
    --plan) plan_only=1 ;;
    *) fail "prepare.sh does not know \`$arg\`" ;;
  esac
done

[ "$(uname -s)" = Linux ] || fail "Pepo runs on Linux, and this is $(uname -s)"
[ "$(uname -m)" = x86_64 ] || fail "Pepo runs on x86_64, and this is $(uname -m)"
command -v cargo >/dev/null || fail "cargo is not on PATH" "Rust 1.95 or newer is needed: https://rustup.rs"

# package:program that shows it is there
needs=(qemu-system-x86:qemu-system-x86_64 mmdebstrap:mmdebstrap uidmap:newuidmap erofs-utils:mkfs.erofs nftables:nft
  e2fsprogs:mkfs.ext4 gcc:cc kmod:depmod cpio:cpio zstd:zstd)
[ "$purpose" = check ] && needs=(gcc:cc)
case $purpose in test | bench | soak) needs+=(git:git iproute2:ip) ;; esac
# Too much for every test run: a few hundred MB.
[ "$purpose" = soak ] && needs+=(chromium:chromium)

packages=()
for need in "${needs[@]}"; do
  PATH=$PATH:/usr/sbin:/sbin command -v "${need#*:}" >/dev/null || packages+=("${need%%:*}")
done
[ "$purpose" != check ] && [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ] && packages+=(debian-archive-keyring)
# The linker is not enough: crates with C code in them need the C library's headers.
[ -e /usr/include/stdio.h ] || packages+=(libc6-dev)

crates=()
vsock=$tools/vhost-device-vsock-$vsock_version/bin/vhost-device-vsock
[ "$purpose" = check ] || [ -x "$vsock" ] || crates+=("vhost-device-vsock $vsock_version")
[ "$purpose" != test ] || cargo nextest --version >/dev/null 2>&1 ||
  [ -x "$tools/cargo-nextest-$nextest_version/bin/cargo-nextest" ] || crates+=("cargo-nextest $nextest_version")
[ "$purpose" != check ] || [ -x "$tools/cargo-deny-$deny_version/bin/cargo-deny" ] || crates+=("cargo-deny $deny_version")

if [ ${#packages[@]} -gt 0 ]; then note "will install Debian packages: ${packages[*]}"; fi
if [ ${#crates[@]} -gt 0 ]; then
  list=$(printf ', %s' "${crates[@]}")
  note "will install with cargo (one to four minutes each, once): ${list:2}"
  note "    into $tools"
fi
[ -z "$plan_only" ] || exit 0

if [ ${#packages[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || fail "these programs are missing and apt-get is not here to install them: ${packages[*]}"
  can_root || fail "these packages are missing and installing them takes root: ${packages[*]}" "run as root, or install sudo"
  export DEBIAN_FRONTEND=noninteractive
  quietly as_root apt-get update -q || fail "apt-get update failed"
  quietly as_root apt-get install -q -y --no-install-recommends "${packages[@]}" ||
    fail "these packages could not be installed: ${packages[*]}"
fi

for entry in "${crates[@]}"; do
  name=${entry% *} version=${entry#* }
  root=$tools/$name-$version
  mkdir -p "$root"
  # One at a time per machine, and never half of a tool under the final name: cargo writes the program last.
  (
    flock 9
    [ -x "$root/bin/$name" ] || {
      note "building $name $version"
      CARGO_TARGET_DIR=$root/build quietly cargo install "$name" --version "$version" --locked --root "$root" ||
        fail "$name $version could not be installed"
      rm -rf "$root/build"
    }
  ) 9>"$root/lock"
done
