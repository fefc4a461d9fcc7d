#!/usr/bin/env bash
# Builds an Image (`base` where none is named) in the development instance, where it is missing. With --boot-files the files
# that a microVM starts from are laid out in one directory too, for the tests of the engine alone.
source "$(dirname "$0")/say.sh"

boot_files=
[ "${1:-}" != --boot-files ] || { boot_files=1; shift; }
name=${1:-base}
export PEPO_HOME=$dev_home
can_root || fail "Pepo needs root to run: neither root nor sudo is here"
as_root mkdir -p "$dev_home"

if [ -z "$boot_files" ]; then
  trap 'as_root "$stage/pepo" down >/dev/null 2>&1 || true' EXIT
  as_root "$stage/pepo" image build "$name"
  exit 0
fi

# The initramfs joins the Image's modules and this build's agent: it is made by the first boot.
as_root "$stage/pepo" run --quiet --image "$name" -- true
as_root "$stage/pepo" down >/dev/null
digest=$(as_root cat "$dev_home/state/images/names/$name")
initramfs=$(as_root sh -c "ls -t '$dev_home'/state/initramfs/* | head -n 1")
as_root mkdir -p "$dev_home/boot"
# Copies of root's own: the Image's files belong to the instance's pepod, which the tests stand in for.
lay() { as_root cmp -s "$1" "$2" || as_root cp --remove-destination --no-preserve=ownership "$1" "$2"; }
for file in vmlinux rootfs.erofs; do lay "$dev_home/state/images/$digest/$file" "$dev_home/boot/$file"; done
lay "$initramfs" "$dev_home/boot/initramfs"
