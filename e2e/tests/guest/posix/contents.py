"""What is in files and beside: sizes, bytes, times, attributes."""

import ctypes
import errno
import fcntl
import itertools
import os
import resource
import shutil
import signal
import subprocess

from tools import (
    KINDS,
    LIBC,
    OTHER,
    USER,
    acting,
    came_of,
    fallocate,
    family,
    fresh,
    linked,
    made,
    opened,
    put,
    seen,
    touching,
    with_open,
)


@family
def sizes():
    for size, to in itertools.product((0, 10, 5000), (0, 1, 4096, 5000, 100_000)):
        path = made("file")
        put(path, b"d" * size)
        yield f"truncate/{size}/{to}", touching(lambda: os.truncate(path, to), path) + f" {seen(path)}"
        os.truncate(path, 6000)
        held = os.open(path, os.O_RDWR)
        data = os.pread(held, 8000, 0)
        yield f"zeros/{size}/{to}", f"{len(data)} {data.count(0)}"
        yield f"ftruncate/{size}/{to}", touching(lambda: os.ftruncate(held, to), path) + f" {seen(path)}"
        os.close(held)
    path = made("file")
    for number in (-1, 1 << 40, (16 << 40) - 4096, 16 << 40, (1 << 63) - 1):
        yield f"truncate-to/{number}", came_of(lambda: os.truncate(path, number))
    os.truncate(path, 0)
    with open(path, "rb") as reading:
        yield "ftruncate/read-only", came_of(
            lambda: LIBC.ftruncate(reading.fileno(), 1) and os.ftruncate(reading.fileno(), 1)
        )
    for kind in ("dir", "fifo", "socket", "link"):
        where = made(kind)
        yield f"truncate-of/{kind}", came_of(lambda: os.truncate(where, 0))
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, soft[1]))
    yield "limit/write", came_of(lambda: put(path, b"x" * 2000)) + f" {seen(path)}"
    yield "limit/write-beyond", came_of(lambda: with_open(path, os.O_WRONLY, lambda fd: os.pwrite(fd, b"x", 1000)))
    yield "limit/truncate", came_of(lambda: os.truncate(path, 1001))
    yield "limit/fallocate", came_of(lambda: with_open(path, os.O_WRONLY, lambda fd: os.posix_fallocate(fd, 0, 2000)))
    resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    signal.signal(signal.SIGXFSZ, before)
    # Room beforehand, and its ways back.
    ways = {
        "plain": 0,
        "keep-size": 1,
        "punch": 3,
        "punch-alone": 2,
        "collapse": 8,
        "zero": 16,
        "zero-keep": 17,
        "insert": 32,
        "unknown": 1 << 20,
    }
    for (name, way), (offset, length) in itertools.product(
        ways.items(), ((0, 4096), (4096, 8192), (0, 0), (-1, 4096), (100, 200), (1 << 20, 4096))
    ):
        path = made("file")
        put(path, b"d" * 20_000)
        said = touching(lambda: with_open(path, os.O_RDWR, lambda fd: fallocate(fd, way, offset, length)), path)
        with open(path, "rb") as reading:
            data = reading.read(30_000)
        yield f"fallocate/{name}/{offset}/{length}", f"{said}; {seen(path)}; {data.count(b'd')} of {len(data)}"
    yield "fallocate/read-only", came_of(lambda: with_open(path, os.O_RDONLY, lambda fd: os.posix_fallocate(fd, 0, 9)))
    yield "fallocate/dir", came_of(lambda: with_open(".", os.O_RDONLY, lambda fd: os.posix_fallocate(fd, 0, 9)))
    pipe = made("fifo")
    yield "fallocate/fifo", came_of(lambda: with_open(pipe, os.O_RDWR, lambda fd: os.posix_fallocate(fd, 0, 9)))
    # Holes and data.
    path = made("file")
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"d" * 4096, 65_536)
    os.ftruncate(fd, 200_000)
    for whence, name in ((os.SEEK_DATA, "data"), (os.SEEK_HOLE, "hole")):
        for offset in (0, 65_536, 66_000, 70_000, 199_999, 200_000, 300_000, -1):
            yield f"{name}/{offset}", came_of(lambda: os.lseek(fd, offset, whence))
    yield "blocks", str(os.fstat(fd).st_blocks * 512)
    os.close(fd)


@family
def writing():
    path = made("file")
    for name, flags, act in (
        ("plain", os.O_WRONLY, lambda fd: os.write(fd, b"abc")),
        ("nothing", os.O_WRONLY, lambda fd: os.write(fd, b"")),
        ("append", os.O_WRONLY | os.O_APPEND, lambda fd: os.write(fd, b"def")),
        ("append-at", os.O_WRONLY | os.O_APPEND, lambda fd: os.pwrite(fd, b"ghi", 0)),
        ("beyond", os.O_WRONLY, lambda fd: os.pwrite(fd, b"z", 50)),
        ("read-only", os.O_RDONLY, lambda fd: os.write(fd, b"x")),
        ("read-of-write-only", os.O_WRONLY, lambda fd: os.read(fd, 1)),
        ("negative", os.O_WRONLY, lambda fd: os.pwrite(fd, b"x", -1)),
        ("at-the-end-of-offsets", os.O_WRONLY, lambda fd: os.pwrite(fd, b"xy", (1 << 63) - 2)),
        ("beyond-16-TiB", os.O_WRONLY, lambda fd: os.pwrite(fd, b"x", 17 << 40)),
        ("truncate-read-only", os.O_RDONLY | os.O_TRUNC, lambda fd: os.read(fd, 9)),
        ("sync", os.O_WRONLY | os.O_SYNC, lambda fd: os.write(fd, b"s")),
        (
            "vector",
            os.O_RDWR,
            lambda fd: (os.writev(fd, [b"ab", b"", b"cd"]), os.preadv(fd, [bytearray(2), bytearray(9)], 1)),
        ),
        ("no-such-access", os.O_ACCMODE, lambda fd: os.read(fd, 1)),
        ("path-only", os.O_PATH, lambda fd: os.read(fd, 1)),
        ("path-only-chmod", os.O_PATH, lambda fd: os.fchmod(fd, 0o600)),
        ("path-only-stat", os.O_PATH, lambda fd: os.fstat(fd).st_size),
        ("sendfile", os.O_RDWR, lambda fd: os.sendfile(fd, fd, 0, 2)),
        ("copy-range", os.O_RDWR, lambda fd: os.copy_file_range(fd, fd, 1, 0, 10)),
        ("fsync-read-only", os.O_RDONLY, os.fsync),
        ("fdatasync", os.O_RDWR, os.fdatasync),
    ):
        said = touching(lambda: with_open(path, flags, act), path)
        with open(path, "rb") as reading:
            yield name, f"{said}; {reading.read()}"
    yield "dir/read", came_of(lambda: with_open(".", os.O_RDONLY, lambda fd: os.read(fd, 1)))
    yield "dir/write", came_of(lambda: opened(".", os.O_RDWR))
    yield "dir/create", came_of(lambda: opened(".", os.O_RDONLY | os.O_CREAT))
    yield "dir/fsync", came_of(lambda: with_open(".", os.O_RDONLY, os.fsync))
    yield "dir/truncate", came_of(lambda: opened(".", os.O_RDONLY | os.O_TRUNC))
    for size in (1, 4095, 4096, 4097, 131_072, 131_073, 1_048_576, 1_048_577, 3_000_000):
        path = made("file")
        data = os.urandom(size)
        said = came_of(lambda: put(path, data))
        yield f"large/{size}", f"{said} {with_open(path, os.O_RDONLY, lambda fd: os.read(fd, size + 9)) == data}"
    # A program that runs cannot be written, and one that is written cannot be run.
    program = fresh()
    shutil.copy("/bin/sleep", program)
    os.chmod(program, 0o755)
    running = subprocess.Popen([f"./{program}", "60"])
    for name, act in {
        "write": lambda: opened(program, os.O_WRONLY),
        "truncate": lambda: os.truncate(program, 1),
        "unlink": lambda: os.unlink(program),
    }.items():
        yield f"running/{name}", came_of(act)
    running.kill()
    running.wait()
    program = fresh()
    shutil.copy("/bin/true", program)
    for mode in (0o644, 0o755, 0o700, 0o011):
        os.chmod(program, mode)
        yield f"run/{mode:o}", came_of(lambda: subprocess.run([f"./{program}"]).returncode)
    with open(program, "ab"):
        yield "run/while-written", came_of(lambda: subprocess.run([f"./{program}"]).returncode)


@family
def times():
    values = {
        "past": (1, 2),
        "before-1970": (-5, -1_500_000_000),
        "after-2038": (2_200_000_000_123_456_789, 4_000_000_000_000_000_001),
        "beyond-2446": (20_000_000_000_000_000_000, 1),
        "order": (9, 8),
    }
    for kind, (name, value) in itertools.product(KINDS, values.items()):
        path = made(kind)
        said = touching(lambda: os.utime(path, ns=value, follow_symlinks=False), path).split()[0]
        now = os.lstat(path)
        yield f"set/{kind}/{name}", f"{said} {now.st_atime_ns} {now.st_mtime_ns}"
    now, omit = (1 << 30) - 1, (1 << 30) - 2

    def utimensat(path, atime, mtime, flags=0x100):
        pair = ((ctypes.c_long * 2) * 2)((0, atime), (0, mtime))
        if LIBC.utimensat(-100, path.encode(), pair, flags) != 0:
            raise OSError(ctypes.get_errno(), "utimensat")

    for kind, (name, pair) in itertools.product(
        KINDS,
        {
            "now": (now, now),
            "omit": (omit, omit),
            "now-omit": (now, omit),
            "omit-now": (omit, now),
            "now-5": (now, 5),
            "omit-5": (omit, 5),
            "bad": (1 << 30, 5),
        }.items(),
    ):
        path = made(kind)
        os.utime(path, ns=(77, 78), follow_symlinks=False)
        said = came_of(lambda: utimensat(path, *pair))
        after = os.lstat(path)
        shown = ["set" if value > 10**18 else str(value) for value in (after.st_atime_ns, after.st_mtime_ns)]
        yield f"{name}/{kind}", f"{said} {' '.join(shown)}"
    for kind in KINDS:
        path = made(kind)
        yield f"ctime/{kind}", touching(lambda: os.utime(path, ns=(1, 1), follow_symlinks=False), path)
    who = {"owner": (USER, 0o444), "may-write": (OTHER, 0o646), "may-not": (OTHER, 0o644)}
    for (whose, (uid, mode)), (name, pair) in itertools.product(
        who.items(),
        {
            "now": (now, now),
            "omit": (omit, omit),
            "now-omit": (now, omit),
            "set": (5, 5),
            "set-omit": (5, omit),
        }.items(),
    ):
        path = made("file", None, mode, USER)
        with acting(uid):
            yield f"as/{whose}/{name}", came_of(lambda: utimensat(path, *pair))
    target = made("file")
    link = linked(target)
    yield "through-a-link", came_of(
        lambda: os.utime(link, ns=(5, 6))
    ) + f" {os.stat(target).st_mtime_ns} {os.lstat(link).st_mtime_ns > 10}"


@family
def attributes():
    names = {
        "user": "user.k",
        "trusted": "trusted.k",
        "security": "security.k",
        "capability": "security.capability",
        "access-list": "system.posix_acl_access",
        "other": "other.k",
        "no-name": "user.",
        "long": "user." + "n" * 250,
        "too-long": "user." + "n" * 251,
    }
    values = {
        "user": b"v",
        "capability": bytes.fromhex("0100000200000000000000000000000000000000"),
        "access-list": bytes.fromhex("0200000001000600ffffffff04000400ffffffff20000400ffffffff"),
    }
    for kind, (name, key) in itertools.product(KINDS, names.items()):
        path = made(kind)
        value = values.get(name, b"v")
        said = came_of(lambda: os.setxattr(path, key, value, follow_symlinks=False))
        read = came_of(lambda: os.getxattr(path, key, follow_symlinks=False).hex())
        listed = came_of(lambda: len(os.listxattr(path, follow_symlinks=False)))
        removed = came_of(lambda: os.removexattr(path, key, follow_symlinks=False))
        yield f"{kind}/{name}", f"{said}; {read}; {listed}; {removed}"
    path = made("file")
    for size in (0, 1, 1000, 3500, 60_000, 65_536, 65_537):
        said = came_of(lambda: os.setxattr(path, "user.s", b"v" * size))
        yield f"size/{size}", f"{said}; {came_of(lambda: len(os.getxattr(path, 'user.s')))}"
    for name, flags in (("create", os.XATTR_CREATE), ("replace", os.XATTR_REPLACE), ("both", 3), ("unknown", 4)):
        yield f"{name}/there", came_of(lambda: os.setxattr(path, "user.s", b"w", flags))
        yield f"{name}/new", came_of(lambda: os.setxattr(path, "user.new" + name, b"w", flags))
    yield "times", touching(lambda: os.setxattr(path, "user.s", b"x"), path)
    yield "small-buffer", came_of(lambda: LIBC.getxattr(path.encode(), b"user.s", ctypes.create_string_buffer(1), 0))
    buffer = ctypes.create_string_buffer(2)
    os.setxattr(path, "user.s", b"long")
    yield "too-small-buffer", f"{LIBC.getxattr(path.encode(), b'user.s', buffer, 2)} {errno.errorcode[ctypes.get_errno()]}"
    yield "too-small-list", f"{LIBC.listxattr(path.encode(), buffer, 2)} {errno.errorcode[ctypes.get_errno()]}"
    for mode, owner in itertools.product((0o600, 0o644, 0o666), (USER, OTHER)):
        path = made("file", None, mode, owner)
        os.setxattr(path, "user.k", b"v")
        with acting(USER):
            read = came_of(lambda: os.getxattr(path, "user.k"))
            written = came_of(lambda: os.setxattr(path, "user.k", b"w"))
            removed = came_of(lambda: os.removexattr(path, "user.k"))
        yield f"as-a-user/{mode:o}/{owner == USER}", f"{read} {written} {removed}"
    top = made("dir", None, 0o1777)
    with acting(USER):
        yield "sticky-directory", came_of(lambda: os.setxattr(top, "user.k", b"v"))


@family
def flags():
    """Files that nobody may change."""
    for name, flag in {"immutable": 0x10, "append-only": 0x20}.items():
        path = made("file")

        def set_flag(value):
            return with_open(
                path, os.O_RDONLY, lambda fd: fcntl.ioctl(fd, 0x40086602, value.to_bytes(8, "little")) and None
            )

        yield f"{name}/set", came_of(lambda: set_flag(flag))
        yield f"{name}/write", came_of(lambda: opened(path, os.O_WRONLY))
        yield f"{name}/unlink", came_of(lambda: os.unlink(path))
        if os.path.exists(path):
            set_flag(0)
