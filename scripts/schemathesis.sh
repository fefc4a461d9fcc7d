#!/usr/bin/env bash
# Schemathesis against docs/openapi.json: a pepod whose guests are processes of this host, behind an edge, asked what the
# document allows and what it forbids. `schemathesis.sh [--examples N] [--programs DIR] [SCHEMATHESIS OPTIONS…]`.
# Programs are built with the feature `fake` unless a directory has them; Python packages go into a directory of their own.
source "$(dirname "$0")/say.sh"

examples=25
[ "${1:-}" != --examples ] || { examples=$2; shift 2; }
programs=
[ "${1:-}" != --programs ] || { programs=$2; shift 2; }
wanted=4.32.5
venv=$tools/schemathesis-$wanted
[ -x "$venv/bin/schemathesis" ] || {
  step "Schemathesis $wanted"
  command -v python3 >/dev/null || fail "python3 is not on PATH"
  python3 -m venv "$venv" 2>/dev/null || fail "python3 cannot make a virtual environment" "apt install python3-venv"
  quietly "$venv/bin/pip" install --quiet "schemathesis==$wanted" || fail "schemathesis could not be installed"
  ok
}

step "Programs"
# With the feature `fake` a guest is a process: everything between the edge and the guest agent is the real thing.
if [ -z "$programs" ]; then
  cargo build --quiet --locked -p pepo-daemon --features pepo-daemon/fake --bin pepod
  cargo build --quiet --locked -p pepo-edge --bin pepo-edge
  programs=$target/debug
fi
guest=$stage/pepo-guest
[ -x "$guest" ] || fail "$guest is not there" "run \`make build\` first"
ok

home=$(mktemp -d /tmp/pepo-st-XXXXXX)
chmod 0711 "$home"
mkdir "$home/guest"
pids=()
finish() {
  local code=$?
  for pid in "${pids[@]}"; do kill -INT "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  [ "$code" = 0 ] || { printf '      pepod said last:\n'; grep -E 'ERROR|WARN|panicked' "$home/log" | tail -n 20 || true; }
  [ -n "${PEPO_KEEP:-}" ] || rm -rf "$home"
}
trap finish EXIT

step "pepod and the edge"
# Wrong credentials are tried at every row, by one address.
printf '[pool]\ntarget = 0\n[edge]\nfailures = 10000\n' >"$home/pepo.toml"
export PEPO_HOME=$home PEPO_GUEST=$guest PEPO_VMM=fake
mkfifo "$home/ready"
"$programs/pepod" serve --ready-fd 3 3>"$home/ready" 2>>"$home/log" &
pids+=($!)
read -r ready <"$home/ready" || fail "pepod did not start: $(tail -n 5 "$home/log")"
key=$(sed -n 's/.*"key":"\([^"]*\)".*/\1/p' <<<"$ready")
[ -n "$key" ] || fail "there is no first key in the ready line"
"$programs/pepo-edge" >"$home/edge" 2>>"$home/log" &
pids+=($!)
for _ in $(seq 100); do
  url=$(cat "$home/run/url" 2>/dev/null || true)
  [ -z "$url" ] || ! curl -sf "$url/readyz" >/dev/null || break
  sleep 0.1
done
ask() { curl -sf -H "Authorization: Bearer $key" -H 'Content-Type: application/json' "$@"; }
ask "$url/v1/version" >/dev/null || fail "the edge does not answer: $(tail -n 5 "$home/log")"
curl -sf "$url/openapi.json" | cmp -s - docs/openapi.json || fail "the edge serves another document than docs/openapi.json"
session=$(ask -d '{"name": "there", "keep_alive_seconds": 3600}' "$url/v1/sessions" | sed -n 's/.*"id":"\(ses_[0-9a-f]*\)".*/\1/p' | head -n 1)
[ -n "$session" ] || fail "no Session was made"
command=$(ask -d '{"command": "echo hello; cat", "open_stdin": true, "wait_seconds": 0}' "$url/v1/sessions/$session/commands" |
  sed -n 's/^{"id":"\(cmd_[0-9a-f]*\)".*/\1/p')
[ -n "$command" ] || fail "no command was run"
# What listens in the Session, which is on this host here: it answers every method with what it was asked.
asked=$(python3 -c 'import json, sys; print(json.dumps({"argv": ["python3", "-c", sys.argv[1]], "wait_seconds": 0}))' "$(cat scripts/echo.py)")
echo=$(ask -d "$asked" "$url/v1/sessions/$session/commands" | sed -n 's/^{"id":"\(cmd_[0-9a-f]*\)".*/\1/p')
for _ in $(seq 100); do
  port=$(ask "$url/v1/sessions/$session/commands/$echo" | python3 -c 'import json, sys; print(json.load(sys.stdin)["stdout"].strip())')
  [ -z "$port" ] || break
  sleep 0.1
done
[ "$(ask -d through "$url/v1/sessions/$session/ports/$port/")" = through ] || fail "the program in the Session does not answer on port $port"
ok "$url"

# The operator's rows are not on the edge.
python3 - "$home/tenants.json" <<'PY'
import json, sys
document = json.load(open("docs/openapi.json"))
for path, operations in document["paths"].items():
    document["paths"][path] = {m: o for m, o in operations.items() if o["x-audience"] in ("tenants", "anyone")}
document["paths"] = {path: operations for path, operations in document["paths"].items() if operations}
json.dump(document, open(sys.argv[1], "w"))
PY

# Streams without an end are for other tests. The same checks for both: all of them. What may be answered to a request that the document allows is in the settings file.
st=("$venv/bin/schemathesis" --config-file scripts/schemathesis.toml run "$home/tenants.json" --url "$url" --no-color
  -H "Authorization: Bearer $key" --exclude-operation-id file_watch --max-examples "$examples" --generation-database none
  --request-timeout 60 --output-sanitize true "$@")
export SCHEMATHESIS_HOOKS=scripts/schemathesis_hooks.py PEPO_ST_SESSION=$session PEPO_ST_COMMAND=$command PEPO_ST_PORT=$port
report() {
  step "$1"
  shift
  if ! "$@" >"$home/report" 2>&1; then
    cat "$home/report"
    fail "the API and its document differ"
  fi
  ok "$(grep -E 'cases|passed' "$home/report" | tail -n 1 | sed 's/^ *//')"
}
# What can take the key or the App away from the others comes last.
last=(app_update app_file_apply key_rotate key_revoke)
report "Any id, any value" env PEPO_ST_SESSION= "${st[@]}" "${last[@]/#/--exclude-operation-id=}"
report "A Session that is there" "${st[@]}" --phases examples,coverage,fuzzing --include-path-regex '^/v1/sessions/\{session\}' \
  --exclude-operation-id session_terminate --exclude-operation-id session_release
if [ -n "${STREAMS:-}" ]; then
  step "$STREAMS streams for a minute"
  ulimit -n 4096
  PEPO_API_KEY=$key python3 scripts/streams.py "$url" "${pids[@]}" || fail "the streams"
  ok
fi
report "What may end it all" env PEPO_ST_SESSION= "${st[@]}" --phases examples,coverage,fuzzing "${last[@]/#/--include-operation-id=}"

step "What it left"
! grep -qE 'panicked|ERROR' "$home/log" || { grep -E 'panicked|ERROR' "$home/log" | head -n 20; fail "pepod or the edge logged a fault of their own"; }
curl -sf --unix-socket "$home/run/operator.sock" -X POST http://pepo/v1/down >/dev/null || fail "pepod does not go down"
ok
