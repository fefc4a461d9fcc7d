#!/usr/bin/env python3
"""What an agent does, and what it must not be able to do.

Run it in a microVM:  pepo run --copy examples/agent -- python3 agent.py

The first half does an agent's daily work. The second half attacks: it looks for the host, and asks for more than it
was given, as root where that helps. The exit code is 0 when all of the work was done and every wall held.
"""

import base64
import hashlib
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

# It fills memory and writes to disks: on a machine that somebody needs, it does nothing.
if "pepo.guest=1" not in Path("/proc/cmdline").read_text().split():
    sys.exit("agent.py attacks the machine it runs on, so it runs in a microVM only:\n"
             "  pepo run --copy examples/agent -- python3 agent.py")

WORK = Path(tempfile.mkdtemp(prefix="agent-"))
results = []


class Held(Exception):
    """An attack that failed, with what stopped it."""


def step(title):
    """Runs the function at once and writes down how it went. What it returns, or what held, is shown."""

    def decorate(function):
        began = time.monotonic()
        try:
            good, said = True, function() or ""
        except Held as held:
            good, said = True, str(held)
        except Exception as error:  # the report is the point: every failure becomes a line of it
            good, said = False, f"{type(error).__name__}: {error}"
        results.append(good)
        took = time.monotonic() - began
        print(f"  {'ok    ' if good else 'FAILED'} {title:<36} {said}  ({took:.1f} s)", flush=True)
        return function

    return decorate


def run(*argv, cwd=WORK, **more):
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120, **more)
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


def as_root(script):
    """Runs a line of shell as the guest's root: (exit code, what it said)."""
    done = subprocess.run(["sudo", "-n", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stderr or done.stdout).strip()


def wheel(folder):
    """A wheel is a zip file with three small files beside the code: no tool is needed to make one."""
    name = "melon-1.0-py3-none-any.whl"
    files = {
        "melon.py": "def rind():\n    return 'hard'\n",
        "melon-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: melon\nVersion: 1.0\n",
        "melon-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: agent\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    files["melon-1.0.dist-info/RECORD"] = record + "melon-1.0.dist-info/RECORD,,\n"
    with zipfile.ZipFile(folder / name, "w") as out:
        for path, text in files.items():
            out.writestr(path, text)
    return folder / name


kernel = os.uname().release
memory_kib = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text()).group(1))
print(f"This is Linux {kernel} on {os.uname().nodename}, {os.cpu_count()} CPU, {memory_kib // 1024} MiB of memory.")
print("\nThe work of an agent")


@step("write a program and run it")
def _():
    (WORK / "fib.py").write_text("a, b = 0, 1\nfor _ in range(90):\n    a, b = b, a + b\nprint(a)\n")
    answer = run("python3", "fib.py")
    if answer != "2880067194370816120":
        raise RuntimeError(f"wrong: {answer}")
    return answer


@step("keep it in git")
def _():
    run("git", "init", "-q", "-b", "main")
    run("git", "add", "fib.py")
    run("git", "-c", "user.name=agent", "-c", "user.email=agent@localhost", "commit", "-q", "-m", "Count like rabbits")
    return run("git", "log", "--oneline")


@step("install a package with pip")
def _():
    built = wheel(WORK)
    # Nothing is fetched, so no certificates are loaded: in software emulation that alone takes most of a second.
    local = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check")
    run("pip", "install", "-q", *local, "--use-deprecated=legacy-certs", str(built))
    importlib.invalidate_caches()
    return "melon: the rind is " + importlib.import_module("melon").rind()


@step("a pipeline in the shell")
def _():
    (WORK / "words").write_text("soft hard soft soft hard seed\n")
    return run("bash", "-c", "tr ' ' '\\n' < words | sort | uniq -c | sort -rn | head -n 1 | xargs")


@step("a process in the background")
def _():
    script = "for i in 1 2 3; do echo tick $i; sleep 0.05; done > ticks"
    background = subprocess.Popen(["bash", "-c", script], cwd=WORK)
    here = sum(range(1_000_000))  # something to do meanwhile
    background.wait(timeout=60)
    ticks = (WORK / "ticks").read_text().split("\n")
    if ticks[:3] != ["tick 1", "tick 2", "tick 3"]:
        raise RuntimeError(f"{ticks}")
    return f"3 ticks while counting to {here}"


@step("become root of the guest")
def _():
    code, said = as_root("id -un")
    if code != 0 or said != "root":
        raise RuntimeError(said)
    return "sudo asks for no password: root in here is nobody out there"


print("\nWhat must not work")


@step("see the host's processes")
def _():
    names = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                names.append((entry / "comm").read_text().strip())
            except OSError:
                pass
    outside = [n for n in names if re.match(r"pepod|pepo-(host|keeper|edge|build)|qemu|vhost-device|systemd|dockerd|sshd", n)]
    if outside:
        raise RuntimeError(f"seen: {outside}")
    raise Held(f"{len(names)} processes, all of this guest")


@step("see the host's files")
def _():
    shared = []
    for line in Path("/proc/mounts").read_text().splitlines():
        source, where, kind = line.split()[:3]
        if kind in ("9p", "virtiofs", "nfs", "nfs4", "cifs", "vboxsf", "fuse"):
            shared.append(f"{where} ({kind})")
        if kind not in ("proc", "sysfs", "devtmpfs") and re.match(r"/dev/(sd|nvme|dm|loop|mapper)", source):
            shared.append(f"{where} ({source})")
    disks = sorted(d for d in os.listdir("/sys/block") if not re.match(r"loop|ram|zram", d))
    if shared or [d for d in disks if d not in ("vda", "vdb")]:
        raise RuntimeError(f"seen: {shared} {disks}")
    raise Held(f"disks {', '.join(disks)}; no directory of anybody else is mounted")


@step("change the Image others share")
def _():
    before = hashlib.sha256(Path("/etc/os-release").read_bytes()).hexdigest()
    code, said = as_root("blockdev --setrw /dev/vda 2>/dev/null; dd if=/dev/zero of=/dev/vda bs=4096 count=1 conv=fsync")
    if code == 0:
        raise RuntimeError("/dev/vda took a write")
    if hashlib.sha256(Path("/etc/os-release").read_bytes()).hexdigest() != before:
        raise RuntimeError("the Image changed")
    raise Held(said.splitlines()[0].removeprefix("dd: "))


@step("reach what is private")
def _():
    if os.listdir("/sys/class/net") == ["lo"]:
        raise Held("no interface but lo")
    # Where clouds tell machines their secrets, and what a host, a container or a home network is called.
    places = ("169.254.169.254", "10.0.2.2", "172.17.0.1", "192.168.0.1", "100.100.100.200")
    for address in places:
        try:
            socket.create_connection((address, 80), timeout=2).close()
        except OSError as error:
            why = error.strerror or "no answer"
        else:
            raise RuntimeError(f"{address} answered")
    raise Held(f"{len(places)} addresses, metadata among them: {why}")


@step("call the host over vsock")
def _():
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as stream:
        stream.settimeout(0.2)
        try:
            stream.connect((socket.VMADDR_CID_HOST, 1024))
        except OSError as error:
            raise Held(f"nobody listens ({error.strerror or 'no answer'})") from error
    raise RuntimeError("the host answered on port 1024")


@step("take more memory than given")
def _():
    # The hog asks to be the first one killed, touches every page, and stops at twice what this guest has.
    hog = (
        "open('/proc/self/oom_score_adj', 'w').write('1000')\n"
        "kept = []\n"
        f"for _ in range({2 * memory_kib // 1024 // 16}):\n"
        "    kept.append(b'x' * (16 << 20))\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", hog], capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        raise RuntimeError(f"got {2 * memory_kib // 1024} MiB of {memory_kib // 1024}")
    raise Held("killed by the guest's kernel" if done.returncode == -9 else done.stderr.strip().splitlines()[-1])


@step("take more disk than given")
def _():
    free = shutil.disk_usage(WORK).free
    path = WORK / "hog"
    try:
        with open(path, "wb") as hog:
            os.posix_fallocate(hog.fileno(), 0, free + (256 << 20))
    except OSError as error:
        raise Held(f"{error.strerror}, {free >> 20} MiB were free") from error
    finally:
        path.unlink(missing_ok=True)
    raise RuntimeError(f"got {(free >> 20) + 256} MiB of {free >> 20}")


shutil.rmtree(WORK, ignore_errors=True)
failed = results.count(False)
print(f"\n{len(results) - failed} of {len(results)} as they should be.", flush=True)
sys.exit(1 if failed else 0)
