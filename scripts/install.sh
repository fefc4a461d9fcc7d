#!/usr/bin/env bash
# `make install [PREFIX=/usr/local] [DESTDIR=]`: programs, systemd units and the two system users.
source "$(dirname "$0")/say.sh"

prefix=${PREFIX:-/usr/local}
dest=${DESTDIR:-}
case $prefix in /*) ;; *) fail "PREFIX must be an absolute path, and it is \`$prefix\`" ;; esac
steps=4

step "Packages and tools"
"$top/scripts/prepare.sh" run
ok

step "Build"
"$top/scripts/build.sh" --release
stage=$target/pepo-release/bin
ok

step "Programs and units"
for program in pepo pepod pepo-edge pepo-guest vhost-device-vsock; do
  as_root install -D -m 0755 "$stage/$program" "$dest$prefix/bin/$program"
done
units=$dest${UNITDIR:-/etc/systemd/system}
for unit in packaging/systemd/*.service; do
  made=$(mktemp)
  sed "s|@PREFIX@|$prefix|g" "$unit" >"$made"
  as_root install -D -m 0644 "$made" "$units/$(basename "$unit")"
  rm -f "$made"
done
ok "$dest$prefix/bin, $units"

step "Users pepo and pepo-edge"
if [ -n "$dest" ]; then
  ok "not made: DESTDIR is set (they are made at the first start)"
else
  for user in pepo pepo-edge; do
    getent passwd "$user" >/dev/null ||
      as_root useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin "$user"
  done
  ok
fi

cat <<TXT

Next:
  pepo doctor                                     what this host can do
  systemctl daemon-reload && systemctl enable --now pepod pepo-edge
  pepo image build base                           the default Image, from Debian's packages
  pepo run -- uname -a
TXT
