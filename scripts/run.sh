#!/usr/bin/env bash
# `make run`: from a clone to untrusted code in a microVM of its own, and back to a clean host.
steps=6
source "$(dirname "$0")/say.sh"

export PEPO_HOME=$dev_home
pepo=$stage/pepo

step "What is needed"
can_root || fail "Pepo needs root to run: neither root nor sudo is here"
"$top/scripts/prepare.sh" run --plan
image_there() { as_root test -e "$dev_home/state/images/names/base"; }
if ! image_there; then
  note "will build the Image \`base\` from Debian's packages: about 5 minutes and 1 GiB in $dev_home"
fi
note "will build Pepo into ${target/#$top\//}; everything it keeps at run time is in $dev_home (\`make clean\` removes both)"
ok

step "Packages and tools"
"$top/scripts/prepare.sh" run
ok

step "Build"
"$top/scripts/build.sh"
ok

# From here on a daemon may run: whatever happens, it ends with this script.
finish() {
  as_root "$pepo" down >/dev/null 2>&1 || true
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step "The Image"
as_root mkdir -p "$dev_home"
if image_there; then
  ok "there"
else
  as_root "$pepo" image build base
  ok "built"
fi

step "pepo run --copy examples/agent -- python3 agent.py"
as_root "$pepo" run --copy examples/agent -- python3 agent.py
ok

step "pepo down"
as_root "$pepo" down
trap - EXIT
ok "nothing runs any more"

cat <<TXT

${bold}Done in $(seconds_since "$started") s.${plain} Next:
  $([ "$(id -u)" = 0 ] || echo "sudo ")PEPO_HOME=$dev_home ${stage/#$top\//}/pepo run -- uname -a        any command, in a microVM of its own
  $([ "$(id -u)" = 0 ] || echo "sudo ")make install                                              install it for this machine, then: pepo up
  make test                                                      prove it, on real microVMs
TXT
