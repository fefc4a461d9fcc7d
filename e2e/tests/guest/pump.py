"""In the place of the guest's own pump, as root of a guest could: speaks to the share server on the stream that the agent
holds, while the agent stands still.

    pump.py talk       requests that no kernel sends, each of which must be refused or come to nothing; how many there were
    pump.py garbage    what is no message
"""

import ctypes
import os
import signal
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
own = os.readlink("/proc/1/exe")


def runs_own(name):
    try:
        return name.isdigit() and name != "1" and os.readlink(f"/proc/{name}/exe") == own
    except OSError:
        return False


def stream_of(agent):
    """The stream of the mount: the one that a thread of the agent waits at by itself, in a read."""
    for task in os.listdir(f"/proc/{agent}/task"):
        with open(f"/proc/{agent}/task/{task}/syscall") as file:
            words = file.read().split()
        if words[0] == "0" and os.readlink(f"/proc/{agent}/fd/{int(words[1], 16)}").startswith("socket:"):
            pidfd = libc.syscall(434, agent, 0)
            fd = libc.syscall(438, pidfd, int(words[1], 16), 0)
            assert fd >= 0, os.strerror(ctypes.get_errno())
            return fd
    raise AssertionError("no thread of the agent waits for answers")


def whole(count):
    data = b""
    while len(data) < count:
        piece = os.read(stream, count - len(data))
        assert piece, "the server has gone"
        data += piece
    return data


def send(data):
    # The stream device drops what is larger than a packet that lies in one piece of memory.
    for at in range(0, len(data), 32_000):
        piece = data[at : at + 32_000]
        while piece:
            piece = piece[os.write(stream, piece) :]


def ask(kind, node, body, uid=0):
    """The error of the answer to a request, and what came with it."""
    global unique
    unique += 1
    send(struct.pack("<IIQQIIII", 40 + len(body), kind, unique, node, uid, uid, 1, 0) + body)
    while True:
        length, error, to = struct.unpack("<IiQ", whole(16))
        rest = whole(length - 16)
        # The server's own question is for the agent: it asks again.
        if to == unique:
            return error, rest


LOOKUP, SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ = 1, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15
SETXATTR, GETXATTR, INIT, OPENDIR, CREATE, RENAME2 = 21, 22, 26, 27, 35, 45
OUTSIDE = (b"..", b".", b"../x", b"../../etc/passwd", b"/etc/passwd", b"a/../../x", b"/proc/self/fd/0", b"", b"x" * 256)


def talk():
    refused = 0

    def no(kind, node, body, **more):
        nonlocal refused
        error, _ = ask(kind, node, body, **more)
        assert -4096 < error < 0, (kind, node, body[:80], error)
        refused += 1

    def node(name):
        error, entry = ask(LOOKUP, 1, name + b"\0")
        assert error == 0, (name, error)
        return struct.unpack_from("<Q", entry)[0]

    a, out, top = node(b"a"), node(b"out"), node(b"d")
    for name in OUTSIDE:
        end = name + b"\0"
        no(LOOKUP, 1, end)
        no(LOOKUP, top, end)
        no(MKDIR, 1, struct.pack("<II", 0o755, 0) + end)
        no(MKNOD, 1, struct.pack("<IIII", 0o100644, 0, 0, 0) + end)
        no(CREATE, top, struct.pack("<IIII", os.O_CREAT | os.O_WRONLY, 0o644, 0, 0) + end)
        no(SYMLINK, 1, end + b"target\0")
        no(LINK, 1, struct.pack("<Q", a) + end)
        no(UNLINK, top, end)
        no(RMDIR, top, end)
        no(RENAME, 1, struct.pack("<Q", 1) + b"a\0" + end)
        no(RENAME2, 1, struct.pack("<QII", top, 0, 0) + end + b"a\0")
    # Through a link that leads out, and with numbers that nobody was told.
    for number in (out, a, 0, 99_999, (1 << 64) - 1):
        no(LOOKUP, number, b"passwd\0")
        no(OPENDIR, number, bytes(8))
        no(CREATE, number, struct.pack("<IIII", os.O_CREAT | os.O_WRONLY, 0o644, 0, 0) + b"made\0")
        no(READ, number, struct.pack("<QQIIQII", 4711, 0, 4096, 0, 0, 0, 0))
    for number in (out, top, 0, 99_999):
        no(OPEN, number, struct.pack("<II", os.O_RDWR, 0))
    # What would be the host's, or would fill it.
    for kind in (0o020666, 0o060666):
        no(MKNOD, 1, struct.pack("<IIII", kind, 0x103, 0, 0) + b"device\0")
    no(MKDIR, 1, struct.pack("<II", 0o755, 0) + b"foreign\0", uid=70_000)
    no(SETATTR, a, struct.pack("<IIQQQQQQIIIIIIII", 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 70_000, 0, 0))
    no(SETXATTR, a, struct.pack("<II", 1, 0) + b"trusted.overlay.opaque\0y")
    no(GETXATTR, a, struct.pack("<II", 0xFFFFFFFF, 0) + b"user.none\0")
    no(READ, a, struct.pack("<QQIIQII", 1, 0, 0xFFFFFFFF, 0, 0, 0, 0))
    no(INIT, 0, struct.pack("<IIII", 7, 38, 1 << 20, 0xFFFFFFFF) + bytes(48))
    # Bodies that are too short, too long, or nothing; requests that there are none of.
    # (What is let go of without having been held is let go of: 18, 25, 29. Another version is answered by ours: 26.)
    for kind in set(range(1, 52)) - {2, 17, 18, 25, 26, 29, 36, 38, 42}:
        no(kind, 99_999, b"")
        no(kind, 99_999, b"A" * (1 << 20 if kind in (LOOKUP, CREATE, 16) else 4096))
    for kind in (0, 99, 4096, 0x7FFFFFFF):
        no(kind, 1, bytes(64))
    print(f"{refused} refused")


unique = 1 << 60
agent = next(int(name) for name in os.listdir("/proc") if runs_own(name))
stream = stream_of(agent)
if sys.argv[1] == "garbage":
    os.write(stream, b"\xff" * 4096)
else:
    os.kill(agent, signal.SIGSTOP)
    try:
        # Stopped is what a thread is a moment later.
        time.sleep(0.1)
        talk()
    finally:
        os.kill(agent, signal.SIGCONT)
