"""Rights: who may do what, and to whom things belong."""

import contextlib
import itertools
import os
import stat

from tools import (
    CALLS,
    GROUP,
    KINDS,
    OTHER,
    USER,
    acting,
    back,
    bind,
    came_of,
    family,
    fresh,
    linked,
    made,
    opened,
    put,
    rename2,
    seen,
    touching,
    with_open,
)


@family
def denied():
    """As a user, in directories that do not let it."""
    made("file", "plain", 0o666, USER)
    for name, mode in (("closed", 0o644), ("unreadable", 0o711), ("unwritable", 0o755)):
        made("dir", name)
        for call, act in CALLS.items():
            kind = "dir" if call in ("rmdir", "listdir", "open-directory") else "link" if call == "readlink" else "file"
            there = made(kind, f"{name}/{call}", 0o666 if kind == "file" else None, USER)
            new = f"{name}/new-{call}"
            os.chmod(name, mode)
            if not os.path.exists("moving"):
                made("file", "moving", 0o666, USER)
            os.chmod(".", 0o777)
            with acting(USER):
                yield f"{name}/{call}/there", came_of(lambda: act(there))
                yield f"{name}/{call}/new", came_of(lambda: act(new))
    for call, act in CALLS.items():
        path = made("dir" if call in ("rmdir", "listdir", "open-directory") else "file", None, 0o700, OTHER)
        with acting(USER):
            yield f"anothers/{call}", f"{came_of(lambda: act(path))}; {seen(path)}"


@family
def permissions():
    """Every mode for whoever is the owner, in the group, or neither."""
    flags = {"read": os.O_RDONLY, "write": os.O_WRONLY, "both": os.O_RDWR}
    classes = {"owner": (6, (USER, OTHER)), "group": (3, (OTHER, GROUP)), "other": (0, (OTHER, OTHER))}
    os.chmod(".", 0o755)
    for (whose, (shift, owner)), bits in itertools.product(classes.items(), range(8)):
        # The other classes may do all: only the first that fits counts.
        mode = 0o777 & ~(7 << shift) | bits << shift
        path = made("file", None, mode, owner)
        top = made("dir", None, None, owner)
        inside = made("file", f"{top}/in")
        gone = made("file", f"{top}/gone")
        os.chmod(top, mode)
        with acting(USER, groups=[GROUP]):
            for name, flag in flags.items():
                yield f"file/{whose}/{bits}/{name}", came_of(lambda: opened(path, flag))
            yield f"file/{whose}/{bits}/truncate", came_of(lambda: os.truncate(path, 1))
            yield f"file/{whose}/{bits}/utime-now", came_of(lambda: os.utime(path))
            yield f"file/{whose}/{bits}/utime", came_of(lambda: os.utime(path, (1, 1)))
            yield f"dir/{whose}/{bits}/list", came_of(lambda: len(os.listdir(top)))
            yield f"dir/{whose}/{bits}/search", came_of(lambda: seen(inside))
            yield f"dir/{whose}/{bits}/make", came_of(lambda: made("file", f"{top}/new") and None)
            yield f"dir/{whose}/{bits}/remove", came_of(lambda: os.unlink(gone))
            yield f"dir/{whose}/{bits}/enter", came_of(lambda: with_open(top, os.O_PATH, os.fchdir))
            back()


@family
def making():
    """What is new: its mode under a mask, its owners, whose times move."""
    makers = {
        "file": lambda path, mode: opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode),
        "mknod": lambda path, mode: os.mknod(path, stat.S_IFREG | mode),
        "dir": os.mkdir,
        "fifo": os.mkfifo,
        "link": lambda path, mode: os.symlink("x" * (mode & 63 or 1), path),
        "socket": lambda path, mode: bind(path),
        "socket-by-mknod": lambda path, mode: os.mknod(path, stat.S_IFSOCK | mode),
        "char": lambda path, mode: os.mknod(path, stat.S_IFCHR | mode, os.makedev(1, 3)),
        "block": lambda path, mode: os.mknod(path, stat.S_IFBLK | mode, os.makedev(7, 0)),
    }
    tops = {"plain": (0o777, None), "setgid": (0o2777, (OTHER, GROUP)), "sticky": (0o1777, None)}
    for name, (mode, owner) in tops.items():
        made("dir", name, None, owner)
        os.chmod(name, mode)
    who = {"root": (0, 0, []), "user": (USER, USER, []), "member": (USER, USER, [GROUP])}
    for (kind, make), top, (whose, (uid, gid, groups)) in itertools.product(makers.items(), tops, who.items()):
        for mask, mode in ((0o022, 0o777), (0, 0o7777), (0o077, 0o2711), (0o777, 0o666)):
            path = f"{top}/{fresh()}"
            before = os.umask(mask)
            with acting(uid, gid, groups) if uid else contextlib.nullcontext():
                said = came_of(lambda: make(path, mode))
            os.umask(before)
            yield f"{kind}/{top}/{whose}/{mask:o}/{mode:o}", f"{said}; {seen(path)}"
    for kind in KINDS:
        top = made("dir")
        yield f"times/{kind}", touching(lambda: made(kind, f"{top}/new") and None, top)
        yield f"times/again/{kind}", touching(lambda: os.mkdir(f"{top}/new"), top)
        yield f"links-of-the-directory/{kind}", seen(top)
        times = os.lstat(f"{top}/new")
        yield f"times/same/{kind}", str(times.st_mtime_ns == times.st_ctime_ns)
    # Through a link that leads nowhere, and what lies in its way.
    for flags, how in ((0, "create"), (os.O_EXCL, "exclusive"), (os.O_NOFOLLOW, "nofollow")):
        target = fresh()
        link = linked(target)
        said = came_of(lambda: opened(link, os.O_CREAT | os.O_WRONLY | flags))
        yield f"through-a-link/{how}", f"{said}; {seen(target)}"
    for size in (1, 59, 60, 61, 255, 256, 4095):
        path = fresh()
        said = came_of(lambda: os.symlink("t" * size, path))
        yield f"link-of/{size}", f"{said}; {seen(path)} {came_of(lambda: len(os.readlink(path)))}"
    yield "link-of/4096", came_of(lambda: os.symlink("t" * 4096, fresh()))
    yield "link-of/0", came_of(lambda: os.symlink("", fresh()))
    fd = os.open(fresh(), os.O_CREAT | os.O_RDWR, 0)
    yield "mode-0-is-written", came_of(lambda: os.write(fd, b"x"))
    os.close(fd)
    yield "without-a-name", came_of(lambda: opened(".", os.O_TMPFILE | os.O_RDWR))
    yield "whiteout", came_of(lambda: os.mknod(fresh(), stat.S_IFCHR, 0))


@family
def sticky():
    """In a directory where each may remove only what is its own."""
    for dir_mode, dir_owner, owner in itertools.product((0o1777, 0o777), (USER, OTHER), (USER, OTHER)):
        for kind in ("file", "dir", "link"):
            name = f"{dir_mode:o}/{dir_owner == USER}/{owner == USER}/{kind}"
            top = made("dir", None, None, dir_owner)
            os.chmod(top, dir_mode)
            for act in ("remove", "rename", "rename-over", "exchange"):
                path = made(kind, f"{top}/{act}", None, owner)
                mine = made("dir" if kind == "dir" else "file", f"{top}/mine-{act}", None, USER)
                calls = {
                    "remove": lambda: (os.rmdir if kind == "dir" else os.unlink)(path),
                    "rename": lambda: os.rename(path, f"{path}-moved"),
                    "rename-over": lambda: os.rename(mine, path),
                    "exchange": lambda: rename2(mine, path, 2),
                }
                with acting(USER):
                    yield f"{name}/{act}", came_of(calls[act])


@family
def modes():
    who = {"root": None, "owner": (USER, [GROUP]), "outside-its-group": (USER, []), "another": (OTHER, [])}
    for (whose, acts_as), kind, mode in itertools.product(
        who.items(),
        ("file", "dir", "fifo", "socket"),
        (0, 0o111, 0o644, 0o1777, 0o2755, 0o2644, 0o4755, 0o6777, 0o7777),
    ):
        path = made(kind, None, None, (USER, GROUP))
        with acting(acts_as[0], groups=acts_as[1]) if acts_as else contextlib.nullcontext():
            said = came_of(lambda: os.chmod(path, mode))
        yield f"{whose}/{kind}/{mode:o}", f"{said}; {seen(path)}"
    for kind in ("file", "dir", "fifo", "socket"):
        path = made(kind)
        yield f"times/{kind}", touching(lambda: os.chmod(path, 0o600), path)
        yield f"times/same/{kind}", touching(lambda: os.chmod(path, 0o600), path)
        with acting(USER):
            yield f"times/refused/{kind}", touching(lambda: os.chmod(path, 0o777), path)
    target = made("file")
    yield "through-a-link", f"{came_of(lambda: os.chmod(linked(target), 0o604))}; {seen(target)}"
    # Set-id bits go when somebody without the right to keep them changes what is in the file.
    changes = {
        "write": lambda path: put(path, b"x"),
        "write-nothing": lambda path: put(path, b""),
        "truncate": lambda path: os.truncate(path, 1),
        "open-truncate": lambda path: opened(path, os.O_WRONLY | os.O_TRUNC),
        "fallocate": lambda path: with_open(path, os.O_RDWR, lambda fd: os.posix_fallocate(fd, 0, 9)),
        "chown": lambda path: os.chown(path, -1, GROUP),
        "chown-to-itself": lambda path: os.chown(path, -1, -1),
        "utime": lambda path: os.utime(path, (1, 1)),
        "chmod": lambda path: os.chmod(path, 0o6711),
    }
    for (name, change), mode, whose in itertools.product(
        changes.items(), (0o4755, 0o2755, 0o2745, 0o6777), ("root", "user")
    ):
        path = made("file", None, None, USER)
        os.truncate(path, 2)
        os.chmod(path, mode)
        with acting(USER, groups=[GROUP]) if whose == "user" else contextlib.nullcontext():
            said = came_of(lambda: change(path))
        yield f"set-ids/{name}/{mode:o}/{whose}", f"{said}; {seen(path)}"


@family
def owners():
    pairs = {
        "user": (OTHER, -1),
        "group": (-1, GROUP),
        "both": (OTHER, GROUP),
        "none": (-1, -1),
        "same": (USER, USER),
        "foreign-group": (-1, OTHER),
    }
    who = {"root": None, "owner": (USER, [GROUP]), "another": (OTHER, [GROUP])}
    for (whose, acts_as), kind, (name, (uid, gid)) in itertools.product(who.items(), KINDS, pairs.items()):
        path = made(kind, None, None, USER)
        if kind != "link":
            os.chmod(path, 0o6775)
        with acting(acts_as[0], groups=acts_as[1]) if acts_as else contextlib.nullcontext():
            said = came_of(lambda: os.lchown(path, uid, gid))
        yield f"{whose}/{kind}/{name}", f"{said}; {seen(path)}"
    for kind in KINDS:
        path = made(kind)
        yield f"times/{kind}", touching(lambda: os.lchown(path, USER, USER), path)
        yield f"times/none/{kind}", touching(lambda: os.lchown(path, -1, -1), path)
    target = made("file")
    link = linked(target)
    yield "through-a-link", f"{came_of(lambda: os.chown(link, USER, GROUP))}; {seen(target)}; {seen(link)}"
    for number in (65_535, 65_536, 1 << 31):
        path = made("file")
        yield f"number/{number}", f"{came_of(lambda: os.chown(path, number, number))}; {seen(path)}"
