"""What all cases are told with."""

import contextlib
import ctypes
import errno
import itertools
import os
import socket
import stat
import time

# Users and their groups: nobody else's here, and below 65,536.
USER, OTHER, GROUP = 60001, 60002, 60003
# Longer than a tick of any kernel's clock.
TICK = 0.012
KINDS = ("file", "dir", "fifo", "link", "socket")
LETTER = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFIFO: "fifo",
    stat.S_IFLNK: "link",
    stat.S_IFSOCK: "socket",
}
LIBC = ctypes.CDLL(None, use_errno=True)

families, counter = [], itertools.count()
# Descriptor of the directory of all cases, and the name of the one of the family at work.
place = {}


def family(cases):
    """One that yields a name and what came of it, in a directory of its own."""
    families.append(cases)
    return cases


def came_of(act):
    """What a call comes to: its answer, or the error's name."""
    try:
        answer = act()
    except OSError as error:
        # What Python refuses by itself (an address of a socket that is too long) has no number.
        return errno.errorcode.get(error.errno, str(error))
    return "ok" if answer is None else f"ok {answer}"


def begin(top, cases):
    """Goes into a new directory for a family, below that of all."""
    place.update(home=top, family=cases.__name__)
    os.fchdir(top)
    os.mkdir(cases.__name__)
    os.chdir(cases.__name__)


def back():
    """Goes there again."""
    os.fchdir(place["home"])
    os.chdir(place["family"])


@contextlib.contextmanager
def acting(uid, gid=None, groups=()):
    """As another user, who has none of root's rights."""
    os.setgroups(groups)
    os.setegid(gid or uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups([])


def fresh():
    """A name that nothing has."""
    return f"n{next(counter)}"


def bind(path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)


def opened(path, flags, mode=0o644):
    os.close(os.open(path, flags, mode))


def made(kind, path=None, mode=None, owner=None):
    """A new one of that kind; what it is called."""
    path = path or fresh()
    if kind == "file":
        opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    elif kind == "dir":
        os.mkdir(path)
    elif kind == "full":
        os.mkdir(path)
        made("file", f"{path}/in")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        os.symlink("nowhere", path)
    elif kind == "socket":
        bind(path)
    if owner is not None:
        os.chown(path, *(owner if isinstance(owner, tuple) else (owner, owner)), follow_symlinks=False)
    if mode is not None:
        os.chmod(path, mode)
    return path


def seen(path):
    """What it is: kind, mode, owners, links; bytes of files and links."""
    try:
        found = os.lstat(path)
    except OSError as error:
        return errno.errorcode[error.errno]
    kind = LETTER.get(stat.S_IFMT(found.st_mode), "device")
    size = f" {found.st_size}" if kind in ("file", "link") else ""
    return f"{kind} {stat.S_IMODE(found.st_mode):04o} {found.st_uid}:{found.st_gid} {found.st_nlink}{size}"


def touching(act, *paths):
    """What a call comes to, and whose times of change (c) and of modification (m) it moves forward."""
    before = [os.lstat(path) for path in paths]
    time.sleep(TICK)
    said = came_of(act)
    for path, was in zip(paths, before):
        try:
            now = os.lstat(path)
        except OSError:
            said += " gone"
            continue
        moved = ("c" if now.st_ctime_ns > was.st_ctime_ns else "") + ("m" if now.st_mtime_ns > was.st_mtime_ns else "")
        said += f" {moved or '-'}"
    return said


def linked(target, suffix=""):
    """A new link to that; what it is called."""
    path = fresh()
    os.symlink(target, path)
    return path + suffix


def put(path, data, flags=os.O_WRONLY):
    fd = os.open(path, flags)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def with_open(path, flags, act):
    fd = os.open(path, flags)
    try:
        return act(fd)
    finally:
        os.close(fd)


def rename2(old, new, flags):
    if LIBC.renameat2(-100, old.encode(), -100, new.encode(), flags) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


def fallocate(fd, mode, offset, length):
    LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    if LIBC.fallocate(fd, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


# Each call that takes a path, with that path.
CALLS = {
    "stat": lambda path: LETTER[stat.S_IFMT(os.stat(path).st_mode)],
    "lstat": lambda path: LETTER[stat.S_IFMT(os.lstat(path).st_mode)],
    "statvfs": lambda path: os.statvfs(path).f_namemax,
    "open": lambda path: opened(path, os.O_RDONLY | os.O_NONBLOCK),
    "open-write": lambda path: opened(path, os.O_WRONLY | os.O_NONBLOCK),
    "open-create": lambda path: opened(path, os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK),
    "open-exclusive": lambda path: opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY),
    "open-directory": lambda path: opened(path, os.O_RDONLY | os.O_DIRECTORY),
    "open-nofollow": lambda path: opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK),
    "open-truncate": lambda path: opened(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK),
    "listdir": lambda path: len(os.listdir(path)),
    "mkdir": lambda path: os.mkdir(path),
    "mkfifo": lambda path: os.mkfifo(path),
    "mknod": lambda path: os.mknod(path, stat.S_IFREG | 0o644),
    "bind": bind,
    "symlink": lambda path: os.symlink("target", path),
    "readlink": os.readlink,
    "link-from": lambda path: os.link(path, fresh()),
    "link-to": lambda path: os.link("plain", path),
    "rename-from": lambda path: os.rename(path, fresh()),
    "rename-to": lambda path: os.rename("moving", path),
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "chmod": lambda path: os.chmod(path, 0o640),
    "chown": lambda path: os.chown(path, USER, GROUP),
    "lchown": lambda path: os.lchown(path, USER, GROUP),
    "truncate": lambda path: os.truncate(path, 3),
    "utime": lambda path: os.utime(path, ns=(5, 7)),
    "utime-now": lambda path: os.utime(path),
    "setxattr": lambda path: os.setxattr(path, "user.a", b"b"),
    "getxattr": lambda path: os.getxattr(path, "user.a"),
    "listxattr": lambda path: os.listxattr(path),
}
# Those of them that change something.
CHANGES = [
    name
    for name in CALLS
    if name
    not in (
        "stat",
        "lstat",
        "statvfs",
        "open",
        "open-directory",
        "open-nofollow",
        "listdir",
        "readlink",
        "getxattr",
        "listxattr",
    )
]
