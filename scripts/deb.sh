#!/usr/bin/env bash
# `make deb`: a Debian package of a release build, by dpkg-deb alone. `deb.sh [--stage DIR] [--out DIR]`: of programs that
# are there already. `deb.sh --check FILE [--install SUITE]`: unpacks one and looks whether it is what it should be; and
# installs it in a fresh Debian of that suite.
source "$(dirname "$0")/say.sh"

from=
out=$target
check=
install=
while [ $# -gt 0 ]; do
  case $1 in
    --stage) from=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --check) check=$2; shift 2 ;;
    --install) install=$2; shift 2 ;;
    *) fail "deb.sh does not know \`$1\`" ;;
  esac
done
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
arch=amd64
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -n "$check" ]; then
  step "Unpack ${check##*/}"
  dpkg-deb -x "$check" "$work/root"
  dpkg-deb -e "$check" "$work/control"
  (cd "$work/root" && md5sum --quiet -c "$work/control/md5sums") || fail "md5sums do not match"
  [ "$(dpkg-deb -f "$check" Package)" = pepo ] || fail "it is not the package pepo"
  ok

  step "Owners, modes, places"
  wrong=$(dpkg-deb -c "$check" | awk '$2 != "root/root" { print }')
  [ -z "$wrong" ] || fail "not root's: $wrong"
  wrong=$(find "$work/root" \( -perm /022 ! -type l \) -o -perm /6000)
  [ -z "$wrong" ] || fail "others may write, or setuid: $wrong"
  for program in pepo pepod pepo-edge; do
    [ -x "$work/root/usr/bin/$program" ] || fail "/usr/bin/$program is not there"
  done
  for file in etc/pepo/pepo.toml usr/lib/systemd/system/pepod.service usr/lib/systemd/system/pepo-edge.service \
    usr/lib/pepo/pepo-guest usr/lib/pepo/vhost-device-vsock usr/share/doc/pepo/copyright usr/share/man/man1/pepo.1.gz \
    usr/share/bash-completion/completions/pepo usr/share/doc/pepo/openapi.json; do
    [ -e "$work/root/$file" ] || fail "/$file is not there"
  done
  grep -qx /etc/pepo/pepo.toml "$work/control/conffiles" || fail "/etc/pepo/pepo.toml is no conffile"
  ok

  step "Programs run from where they are"
  "$work/root/usr/bin/pepo" --version | grep -qF "$version" || fail "pepo does not say $version"
  # pepo finds pepod beside itself, and pepod its guest agent.
  PEPO_HOME=$work/h "$work/root/usr/bin/pepo" version --json | grep -q '"guest_digest"' || fail "pepod or the guest agent is not found"
  PEPO_HOME=$work/h "$work/root/usr/bin/pepod" config check >/dev/null || fail "pepod config check"
  ok

  step "Units and scripts"
  ! grep -rq '@PREFIX@' "$work/root/usr/lib/systemd/system" || fail "a unit has a placeholder left"
  while read -r program; do
    [ -x "$work/root$program" ] || fail "a unit starts $program, which is not there"
  done < <(sed -n 's/^ExecStart=\([^ ]*\).*/\1/p' "$work"/root/usr/lib/systemd/system/*.service)
  for script in preinst postinst prerm postrm; do
    [ ! -e "$work/control/$script" ] || sh -n "$work/control/$script" || fail "$script is no shell script"
  done
  ok
  if command -v lintian >/dev/null; then
    step "Lintian"
    quietly lintian --fail-on error,warning "$check" || fail "lintian has something to say"
    ok
  else
    note "lintian is not here and was not asked"
  fi

  # In a Debian of its own: what dpkg does with it, without the packages it would bring along.
  [ -n "$install" ] || exit 0
  step "Installed, upgraded, removed and purged in a fresh Debian"
  can_root || fail "this takes root"
  chroot=$work/debian
  quietly as_root mmdebstrap --variant=essential --include=passwd "$install" "$chroot" || fail "no chroot could be made"
  in_it() { as_root chroot "$chroot" env DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
  as_root cp "$check" "$chroot/pepo.deb"
  quietly in_it dpkg --force-depends -i /pepo.deb || fail "dpkg -i"
  in_it getent passwd pepo pepo-edge >/dev/null || fail "the users were not made"
  in_it pepo --version | grep -qF "$version" || fail "pepo does not run"
  [ -L "$chroot/etc/systemd/system/multi-user.target.wants/pepod.service" ] || fail "pepod.service is not enabled"
  as_root sh -c "echo '# mine' >>'$chroot/etc/pepo/pepo.toml'"
  quietly in_it dpkg --force-depends --force-confold -i /pepo.deb || fail "dpkg -i again"
  grep -qx '# mine' "$chroot/etc/pepo/pepo.toml" || fail "an upgrade changed the settings"
  as_root install -d -m 0700 "$chroot/var/lib/pepo/volumes/wsp"
  quietly in_it dpkg --force-depends -r pepo || fail "dpkg -r"
  [ ! -e "$chroot/usr/bin/pepo" ] && [ -e "$chroot/etc/pepo/pepo.toml" ] || fail "a removal keeps the settings and nothing else"
  in_it dpkg --force-depends -P pepo 2>&1 | grep -q 'has Workspaces' || fail "a purge does not tell of Workspaces"
  [ -d "$chroot/var/lib/pepo/volumes/wsp" ] || fail "a purge removed a Workspace"
  [ ! -e "$chroot/etc/pepo" ] || fail "a purge left the settings"
  as_root rm -rf --one-file-system "$chroot"
  ok
  exit 0
fi

if [ -z "$from" ]; then
  steps=3
  step "Packages and tools"
  "$top/scripts/prepare.sh" run
  ok
  step "Build"
  "$top/scripts/build.sh" --release
  from=$target/pepo-release/bin
  ok
fi
command -v dpkg-deb >/dev/null || fail "dpkg-deb is not on PATH" "this target makes Debian packages on Debian"

step "Package"
root=$work/pepo
lib=$root/usr/lib/pepo
install -d -m 0755 "$root" "$root/DEBIAN" "$lib" "$root/usr/bin"
for program in pepo pepod pepo-edge pepo-guest vhost-device-vsock; do
  install -m 0755 "$from/$program" "$lib/$program"
  # The guest agent is built without what a debugger wants; the others lose it here.
  case $program in pepo-guest) ;; *) strip --strip-unneeded --remove-section=.comment --remove-section=.note "$lib/$program" ;; esac
done
# Programs find each other beside themselves, so the directory is one and PATH has links.
for program in pepo pepod pepo-edge; do ln -s "../lib/pepo/$program" "$root/usr/bin/$program"; done
for unit in packaging/systemd/*.service; do
  install -d -m 0755 "$root/usr/lib/systemd/system"
  sed 's|@PREFIX@/bin|/usr/lib/pepo|g' "$unit" >"$root/usr/lib/systemd/system/${unit##*/}"
done
install -d -m 0755 "$root/etc/pepo"
"$lib/pepod" config default >"$root/etc/pepo/pepo.toml"

doc=$root/usr/share/doc/pepo
install -d -m 0755 "$doc" "$root/usr/share/man/man1" "$root/usr/share/lintian/overrides"
install -m 0644 packaging/debian/copyright docs/openapi.json docs/reference.html docs/errors.md docs/routes.md "$doc"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH
{
  printf 'pepo (%s) unstable; urgency=medium\n\n  * See the list of changes in CHANGELOG.md.\n\n' "$version"
  printf ' -- Pepo <pepo@localhost>  %s\n' "$(date -u -R -d "@$SOURCE_DATE_EPOCH")"
} | gzip -9n >"$doc/changelog.gz"
gzip -9n <CHANGELOG.md >"$doc/CHANGELOG.md.gz"
for page in packaging/man/*.1; do sed "s/@VERSION@/$version/" "$page" | gzip -9n >"$root/usr/share/man/man1/${page##*/}.gz"; done
for also in pepod pepo-edge; do ln -s pepo.1.gz "$root/usr/share/man/man1/$also.1.gz"; done
completion() { install -d -m 0755 "$root/$(dirname "$2")" && "$lib/pepo" completion "$1" >"$root/$2"; }
completion bash usr/share/bash-completion/completions/pepo
completion zsh usr/share/zsh/vendor-completions/_pepo
completion fish usr/share/fish/vendor_completions.d/pepo.fish
install -m 0644 packaging/debian/lintian-overrides "$root/usr/share/lintian/overrides/pepo"
find "$root" -type f ! -perm /0111 -exec chmod 0644 {} +
find "$root" -type d -exec chmod 0755 {} +

# Which libraries the programs were linked with: asked of dpkg, which knows since when they have what is used.
mkdir -p "$work/debian"
printf 'Source: pepo\n\nPackage: pepo\nArchitecture: any\n' >"$work/debian/control"
libraries=$(cd "$work" && dpkg-shlibdeps -O --ignore-missing-info "$lib"/{pepo,pepod,pepo-edge,vhost-device-vsock} 2>/dev/null |
  sed -n 's/^shlibs:Depends=//p') || true
[ -n "$libraries" ] || libraries="libc6"
size=$(du -k -s --apparent-size --exclude=DEBIAN "$root" | cut -f1)
sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$arch/" -e "s/@SIZE@/$size/" -e "s/@LIBRARIES@/$libraries/" \
  packaging/debian/control >"$root/DEBIAN/control"
printf '/etc/pepo/pepo.toml\n' >"$root/DEBIAN/conffiles"
for script in postinst prerm postrm; do install -m 0755 "packaging/debian/$script" "$root/DEBIAN/$script"; done
(cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
chmod 0644 "$root/DEBIAN/control" "$root/DEBIAN/conffiles" "$root/DEBIAN/md5sums"
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

mkdir -p "$out"
package=$out/pepo_${version}_$arch.deb
dpkg-deb --root-owner-group ${PEPO_DEB_FAST:+-Zgzip -z1} --build "$root" "$package" >/dev/null
ok "$package ($(du -k "$package" | cut -f1) KiB)"
