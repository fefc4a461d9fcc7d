"""500 callers follow one command through the edge, and neither it nor pepod grows: `streams.py URL PIDS…`, the key in
PEPO_API_KEY. Prints what it saw; fails where a stream breaks, misses bytes, or memory is not flat."""

import asyncio
import json
import os
import sys
import time
import urllib.request

URL, PIDS = sys.argv[1], [int(pid) for pid in sys.argv[2:]]
STREAMS, SECONDS = int(os.environ.get("STREAMS", "500")), int(os.environ.get("SECONDS_EACH", "60"))
KEY = os.environ["PEPO_API_KEY"]
HOST, PORT = URL.removeprefix("http://").split(":")
# Sessions have places for about that many streams each.
EACH = 250


def ask(method, path, body=None):
    request = urllib.request.Request(URL + path, method=method, data=None if body is None else json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {KEY}")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def resident(pid):
    """MiB of that process and those that it started, apart from guests."""
    pids, total = [pid], 0
    for pid in pids:
        try:
            children = open(f"/proc/{pid}/task/{pid}/children").read().split()
            name = open(f"/proc/{pid}/comm").read().strip()
            if name in ("pepod", "pepo-host", "pepo-edge"):
                pids += [int(child) for child in children]
                total += int(open(f"/proc/{pid}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            pass
    return total / 2**20


async def follow(path, seen, at):
    """Reads one stream until its command exits; counts its output."""
    reader, writer = await asyncio.open_connection(HOST, int(PORT))
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {KEY}\r\nAccept: text/event-stream\r\n\r\n".encode()
    )
    status = await reader.readline()
    assert b" 200 " in status, status
    while True:
        line = await asyncio.wait_for(reader.readline(), 60)
        assert line, "the stream broke off"
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if event["type"] == "stdout":
                seen[at] += len(event["data"])
            elif event["type"] == "exit":
                break
            else:
                assert event["type"] == "start", event
    writer.close()


async def main():
    line = f"for i in $(seq {SECONDS * 5}); do echo 0123456789012345678901234567890123456789; sleep 0.2; done"
    paths, sessions = [], []
    for _ in range(0, STREAMS, EACH):
        session = ask("POST", "/v1/sessions", {"keep_alive_seconds": 600, "workspace": None})["id"]
        sessions.append(session)
        command = ask("POST", f"/v1/sessions/{session}/commands", {"command": "sleep 5; " + line, "wait_seconds": 0})["id"]
        paths.append(f"/v1/sessions/{session}/commands/{command}")
    began, seen = time.monotonic(), [0] * STREAMS
    following = [asyncio.create_task(follow(paths[n // EACH], seen, n)) for n in range(STREAMS)]
    looks = []
    while not all(task.done() for task in following):
        await asyncio.sleep(5)
        looks.append(sum(resident(pid) for pid in PIDS))
        if any(task.done() and task.exception() for task in following):
            break
    for task in following:
        await task
    took = time.monotonic() - began
    for session in sessions:
        ask("DELETE", f"/v1/sessions/{session}")
    assert set(seen) == {SECONDS * 5 * 41}, f"bytes are missing: {sorted(set(seen))[:5]}"
    # The first looks are of streams that are still being opened.
    settled = looks[2:]
    grown = max(settled) - settled[0]
    print(
        f"{STREAMS} streams for {took:.0f} s: {sum(seen)} bytes, none missing; resident {settled[0]:.1f} MiB at first, "
        f"{max(settled):.1f} MiB at most, {settled[-1]:.1f} MiB at last"
    )
    assert grown < max(8, settled[0] * 0.1), f"it grew by {grown:.1f} MiB"


asyncio.run(main())
