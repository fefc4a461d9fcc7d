#!/usr/bin/env bash
# `make check`: everything about the code that a tool can decide. The rules are ARCHITECTURE.md's.
source "$(dirname "$0")/say.sh"

quick=
[ "${1:-}" != --quick ] || quick=1   # only what needs no compiler
faults=0
fault() { printf '      %s%s%s\n' "$red" "$1" "$plain"; faults=$((faults + 1)); }
# pass: ends a step, in the colour of what it found.
faults_before=0
pass() {
  if [ "$faults" = "$faults_before" ]; then ok "${1:-ok}"; else printf '      (%s s)\n' "$(seconds_since "$step_started")"; fi
  faults_before=$faults
}
# code_lines FILE: lines that are neither blank nor comment, up to the test module.
code_lines() { awk '/^#\[cfg\(test\)\]/{exit} !/^[[:space:]]*(\/\/|$)/{n++} END{print n+0}' "$1"; }

if [ -z "$quick" ]; then
  step "Tools"
  "$top/scripts/prepare.sh" check
  pass
fi

step "Format"
cargo fmt --all --check >/dev/null 2>&1 || { cargo fmt --all --check 2>&1 | head -n 40 || true; fault "run cargo fmt --all"; }
pass

step "Lock file"
cargo metadata --locked --format-version 1 >/dev/null 2>&1 || fault "Cargo.lock does not match the manifests: run cargo check and commit it"
pass

step "Word walls"
wall() { # wall CRATE WORDS
  local found
  found=$(grep -rnwiE "($2)s?" "crates/$1/src" --include='*.rs' || true)
  [ -z "$found" ] || { printf '%s\n' "$found" | head -n 10 | sed 's/^/      /'; fault "crates/$1 may not know these words: ${2//|/, }"; }
}
wall sandbox 'session|app|tenant|workspace|image'
wall edge 'vm|vsock|firecracker|qemu'
wall cli 'vm|vsock|firecracker|qemu'
pass

step "Names and sizes of files"
while read -r file; do
  lines=$(code_lines "$file")
  if [ "$lines" -gt 800 ]; then fault "$file has $lines code lines: split it (the alarm is at 800)"
  elif [ "$lines" -gt 500 ]; then note "$file has $lines code lines: does it hold one thing?"; fi
done < <(git ls-files 'crates/*.rs' 'e2e/*.rs')
drawers=$(git ls-files 'crates/*.rs' | grep -E '/(manager|core|common|utils?|helpers?|base|context|impl|misc)(\.rs|/)' || true)
[ -z "$drawers" ] || { printf '%s\n' "$drawers" | sed 's/^/      /'; fault "these are names of drawers, not of rooms"; }
pass

step "Unsafe code"
for crate in api proto; do
  grep -q '^#!\[forbid(unsafe_code)\]' "crates/$crate/src/lib.rs" || fault "crates/$crate/src/lib.rs does not forbid unsafe code"
done
for crate in edge cli daemon; do
  for root in "crates/$crate/src/main.rs" "crates/$crate/src/lib.rs"; do
    [ ! -e "$root" ] || grep -q '^#!\[forbid(unsafe_code)\]' "$root" || fault "$root does not forbid unsafe code"
  done
done
for root in crates/sandbox/src/lib.rs crates/guest/src/main.rs; do
  grep -q '^#!\[deny(unsafe_code)\]' "$root" || fault "$root does not deny unsafe code"
done
loose=$(grep -rnE 'allow\(unsafe_code\)' crates --include='*.rs' | grep -vE '^crates/(sandbox|guest)/src/(sys\.rs|sys/|lib\.rs|main\.rs)' || true)
[ -z "$loose" ] || { printf '%s\n' "$loose" | sed 's/^/      /'; fault "unsafe code lives in sys.rs alone"; }
pass

step "Nothing of this machine in the tree"
leaks=$({
  parent=$(dirname "$top")
  # Everybody's directories are no trace of anybody's machine.
  case $parent in / | /tmp | /root) ;; *) git grep -nF "$parent/" -- . || true ;; esac
  case $HOME in / | /root) ;; *) git grep -nF "$HOME/" -- . || true ;; esac
  git grep -nE '[a-z]+://[^/@[:space:]"]+:[^/@[:space:]"]+@' -- . ':!crates/*/src/*' || true
} | head -n 10)
[ -z "$leaks" ] || { printf '%s\n' "$leaks" | sed 's/^/      /'; fault "paths or credentials of a machine"; }
pass

step "Package counts"
count() { # count PACKAGE ALARM
  local n
  n=$(cargo tree --locked -p "$1" -e normal,build --target x86_64-unknown-linux-gnu --prefix none --format '{p}' 2>/dev/null |
    sed 's/ (\*)$//; s/ (proc-macro)//' | sort -u | wc -l)
  [ "$n" -gt 0 ] || { fault "$1: its packages could not be counted"; return; }
  note "$(printf '%-14s %4d of at most %d packages' "$1" "$n" "$2")"
  [ "$n" -le "$2" ] || fault "$1 has $n packages, the alarm is at $2: remove some, or give the reason in an ADR and raise it"
}
count pepo-daemon 260
count pepo-edge 250
count pepo-cli 190
count pepo-guest 60
pass

[ -z "$quick" ] || { [ "$faults" = 0 ] || fail "$faults faults"; exit 0; }

step "Dependencies: walls, licences, sources"
quietly "$tools/cargo-deny-$deny_version/bin/cargo-deny" --locked check --hide-inclusion-graph -A unused-wrapper bans licenses sources ||
  fault "cargo deny check bans licenses sources"
for crate in pepo-daemon pepo-guest; do
  for tls in rustls openssl-sys; do
    [ -z "$(cargo tree --locked -p $crate -e normal,build -i $tls 2>/dev/null)" ] || fault "$crate links $tls"
  done
done
pass

step "Clippy, every target (the fuzz targets too)"
cargo clippy --quiet --locked --workspace --all-targets --features pepo-daemon/fake -- -D warnings || fault "clippy"
pass

step "The API's document is what the types say"
cargo clippy --quiet --locked -p pepo-api --features openapi --all-targets -- -D warnings || fault "clippy of the feature openapi"
quietly cargo test --quiet --locked -p pepo-api --features openapi --test openapi --test documents ||
  fault "docs/: run PEPO_BLESS=1 cargo test -p pepo-api --features openapi --test openapi --test documents"
pass

step "Documentation"
RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --quiet --locked --workspace --no-deps --lib --bins --document-private-items ||
  fault "cargo doc"
pass

[ "$faults" = 0 ] || fail "$faults of the checks found something"
printf '%sAll checks passed%s in %s s.\n' "$green" "$plain" "$(seconds_since "$started")"
