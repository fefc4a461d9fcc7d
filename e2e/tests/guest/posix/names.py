"""Names: what a path leads to, and what becomes of names."""

import itertools
import os
import stat
import subprocess
import time

from tools import (
    CALLS,
    CHANGES,
    KINDS,
    LETTER,
    LIBC,
    OTHER,
    TICK,
    USER,
    acting,
    back,
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


def chain(count):
    """Links to a file, each through one more."""
    os.symlink("plain", "chain1")
    for n in range(1, count):
        os.symlink(f"chain{n}", f"chain{n + 1}")


# Paths that lead where they should not, or that look as if.
PATHS = {
    "nothing": fresh,
    "empty": lambda: "",
    "file": lambda: made("file"),
    "dir": lambda: made("dir"),
    "full": lambda: made("full"),
    "fifo": lambda: made("fifo"),
    "socket": lambda: made("socket"),
    "link-to-file": lambda: linked(made("file")),
    "link-to-dir": lambda: linked(made("dir")),
    "link-to-nothing": lambda: linked(fresh()),
    "link-to-itself": lambda: "loop",
    "below-file": lambda: "plain/x",
    "below-fifo": lambda: "pipe/x",
    "below-link-to-file": lambda: linked("plain", "/x"),
    "below-nothing": lambda: "none/x",
    "below-link-to-nothing": lambda: "dangling/x",
    "below-link-to-itself": lambda: "loop/x",
    "nothing/": lambda: fresh() + "/",
    "file/": lambda: made("file") + "/",
    "dir/": lambda: made("dir") + "/",
    "link-to-dir/": lambda: linked(made("dir"), "/"),
    "dir/.": lambda: made("dir") + "/.",
    "dir/in/..": lambda: made("dir", made("dir") + "/in") + "/..",
    "name-of-255": lambda: fresh().ljust(255, "x"),
    "name-of-256": lambda: "n" * 256,
    "below-name-of-256": lambda: "n" * 256 + "/x",
    "path-of-4095": lambda: "./" * 2000 + fresh().rjust(95, "n"),
    "path-of-4096": lambda: "./" * 2000 + fresh().rjust(96, "n"),
    "40-links": lambda: linked("chain39"),
    "41-links": lambda: linked("chain40"),
}


@family
def paths():
    made("file", "plain")
    made("fifo", "pipe")
    os.symlink("loop", "loop")
    os.symlink("none", "dangling")
    chain(40)
    for (call, act), (name, path) in itertools.product(CALLS.items(), PATHS.items()):
        if not os.path.exists("moving"):
            made("file", "moving")
        where = path()
        said = came_of(lambda: act(where))
        yield f"{call}/{name}", f"{said}; {seen(where)}" if call in CHANGES and len(where) < 256 else said


@family
def renaming():
    kinds = (*KINDS, "full", "nothing")
    for old, new in itertools.product(kinds, kinds):
        for flags, how in ((0, "over"), (1, "not-over"), (2, "exchanged")):
            source, target = (made(kind) if kind != "nothing" else fresh() for kind in (old, new))
            said = came_of(lambda: rename2(source, target, flags))
            yield f"{old}/{new}/{how}", f"{said}; {seen(source)}; {seen(target)}"
    for kind in KINDS:
        one, two = made("dir"), made("dir")
        path = made(kind, f"{one}/a")
        yield f"times/{kind}", touching(lambda: os.rename(path, f"{two}/b"), one, two) + f" {seen(one)} {seen(two)}"
        where = f"{two}/b"
        yield f"times/own/{kind}", touching(lambda: os.rename(where, f"{where}2"), two)
        before = os.lstat(f"{where}2").st_ctime_ns
        time.sleep(TICK)
        os.rename(f"{where}2", where)
        yield f"times/ctime/{kind}", str(os.lstat(where).st_ctime_ns > before)
    path = made("file")
    other = fresh()
    os.link(path, other)
    yield "two-names-of-one", f"{came_of(lambda: os.rename(path, other))}; {seen(path)}; {seen(other)}"
    yield "onto-itself", came_of(lambda: os.rename(path, path))
    top = made("dir")
    for name, act in {
        "below-itself": lambda: os.rename(top, f"{top}/in"),
        "far-below-itself": lambda: os.rename(top, f"{made('dir', f'{top}/x')}/in"),
        "dot": lambda: os.rename(f"{top}/.", fresh()),
        "dotdot": lambda: os.rename(f"{top}/x/..", fresh()),
        "onto-its-parent": lambda: os.rename(f"{top}/x", top),
        "flags-that-clash": lambda: rename2(top, fresh(), 3),
        "flags-unknown": lambda: rename2(top, fresh(), 8),
        "exchange-with-a-parent": lambda: rename2(f"{top}/x", top, 2),
        "whiteout": lambda: rename2(made("file"), fresh(), 4),
    }.items():
        yield name, came_of(act)
    # A directory's own parent changes with it.
    one, two = made("dir"), made("dir")
    moving = made("dir", f"{one}/m")
    parent = os.stat(f"{moving}/..").st_ino
    os.rename(moving, f"{two}/m")
    yield "parent", str((os.stat(f"{two}/m/..").st_ino == os.stat(two).st_ino, parent == os.stat(one).st_ino))
    # What had another name goes on under it, with one link less.
    kept, replaced, new = made("file"), fresh(), made("file")
    os.link(kept, replaced)
    yield "over-one-of-two-names", touching(lambda: os.rename(new, replaced), kept) + f" {seen(kept)}"
    held = os.open(replaced, os.O_RDWR)
    os.rename(made("file"), replaced)
    yield "over-what-is-open", f"{os.fstat(held).st_nlink} {came_of(lambda: os.write(held, b'x'))}"
    os.close(held)
    # To move a directory elsewhere takes the right to write in it; to call it something else does not.
    one = made("dir", None, 0o777)
    two = made("dir", None, 0o777)
    moving = made("dir", f"{one}/m", 0o555, USER)
    with acting(USER):
        yield "unwritable-directory/elsewhere", came_of(lambda: os.rename(moving, f"{two}/m"))
        yield "unwritable-directory/here", came_of(lambda: os.rename(moving, f"{one}/n"))
    foreign = made("dir", f"{one}/f", 0o755)
    with acting(USER):
        yield "anothers-directory/elsewhere", came_of(lambda: os.rename(foreign, f"{two}/f"))


@family
def linking():
    for kind in (*KINDS, "full"):
        path, new, top = made(kind), fresh(), made("dir")
        yield f"{kind}", touching(
            lambda: os.link(path, f"{top}/{new}", follow_symlinks=False), path, top
        ) + f" {seen(path)}"
        yield f"{kind}/onto", came_of(lambda: os.link(made("file"), path))
    path = made("file")
    name = fresh()
    os.link(path, name)
    os.chmod(name, 0o600)
    os.truncate(name, 5)
    yield "one-file", f"{seen(path)}; {os.stat(path).st_ino == os.stat(name).st_ino}"
    yield "one-name-less", touching(lambda: os.unlink(name), path) + f" {seen(path)}"
    target = made("file")
    link = linked(target)
    yield "following", came_of(
        lambda: LIBC.linkat(-100, link.encode(), -100, fresh().encode(), 0x400)
    ) + f"; {seen(target)}"
    yield "itself", came_of(lambda: os.link(path, path))
    held = os.open(made("file", "removed"), os.O_RDWR)
    os.unlink("removed")
    yield "no-name-left", came_of(lambda: os.link(f"/proc/self/fd/{held}", fresh(), follow_symlinks=True))
    os.close(held)
    os.chmod(".", 0o777)
    for mode, owner in itertools.product((0o644, 0o666, 0o4777), (USER, OTHER)):
        path = made("file", None, mode, owner)
        os.chmod(path, mode)
        with acting(USER):
            yield f"as-a-user/{mode:o}/{owner == USER}", came_of(lambda: os.link(path, fresh()))


@family
def removing():
    for kind in (*KINDS, "full"):
        for act in (os.unlink, os.rmdir):
            top = made("dir")
            path = made(kind, f"{top}/a")
            yield f"{act.__name__}/{kind}", touching(lambda: act(path), top) + f" {seen(top)}"
    path = made("file")
    held = os.open(path, os.O_RDWR)
    os.write(held, b"held")
    os.unlink(path)
    yield "open/still-there", f"{os.fstat(held).st_nlink} {os.fstat(held).st_size} {os.pread(held, 9, 0)}"
    yield "open/written", came_of(lambda: os.pwrite(held, b"more", 4))
    yield "open/mode", came_of(lambda: os.fchmod(held, 0o600))
    yield "open/size", f"{came_of(lambda: os.ftruncate(held, 2))} {os.fstat(held).st_size}"
    yield "open/owner", came_of(lambda: os.fchown(held, USER, USER)) + f" {os.fstat(held).st_uid}"
    yield "open/again", came_of(lambda: with_open(f"/proc/self/fd/{held}", os.O_RDWR, lambda fd: os.read(fd, 9)))
    yield "open/name-anew", f"{seen(made('file', path))} {os.fstat(held).st_size}"
    os.close(held)
    # A directory that is gone, from inside.
    top = made("dir")
    inside = os.open(top, os.O_RDONLY)
    os.chdir(top)
    os.rmdir(f"../{top}")
    for name, act in {
        "list": lambda: os.listdir("."),
        "make": lambda: made("file", "new"),
        "make-dir": lambda: os.mkdir("new"),
        "look": lambda: seen("new"),
        "up": lambda: LETTER[stat.S_IFMT(os.stat("..").st_mode)],
        "links": lambda: os.fstat(inside).st_nlink,
        "cwd": lambda: os.getcwd(),
        "rename": lambda: os.rename("../plain", "new"),
    }.items():
        yield f"gone-directory/{name}", came_of(act)
    back()
    os.close(inside)
    top = made("full")
    yield "dot", came_of(lambda: os.rmdir(f"{top}/."))
    yield "dotdot", came_of(lambda: os.rmdir(f"{top}/in/.."))
    for n in range(100):
        made("file", f"{top}/{n}")
    listing = os.scandir(top)
    for entry in listing:
        os.unlink(entry.path)
    yield "while-listing", came_of(lambda: os.rmdir(top))


@family
def opening():
    flags = {
        "read": os.O_RDONLY,
        "write": os.O_WRONLY,
        "both": os.O_RDWR,
        "directory": os.O_DIRECTORY,
        "nofollow": os.O_NOFOLLOW,
        "path": os.O_PATH,
        "path-nofollow": os.O_PATH | os.O_NOFOLLOW,
        "create": os.O_CREAT | os.O_WRONLY,
        "exclusive": os.O_CREAT | os.O_EXCL | os.O_WRONLY,
        "truncate": os.O_TRUNC | os.O_WRONLY,
        "create-directory": os.O_CREAT | os.O_DIRECTORY,
        "noatime": os.O_NOATIME,
        "direct": os.O_DIRECT,
        "append": os.O_APPEND | os.O_WRONLY,
    }
    for kind, (name, flag) in itertools.product((*KINDS, "full"), flags.items()):
        path = made(kind)
        yield f"{kind}/{name}", f"{came_of(lambda: opened(path, flag | os.O_NONBLOCK))}; {seen(path)}"
    path = made("file", None, 0o666, OTHER)
    with acting(USER):
        yield "noatime/anothers", came_of(lambda: opened(path, os.O_NOATIME))
    pipe = made("fifo")
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)):
        yield "fifo/with-a-reader", came_of(lambda: put(pipe, b"x", os.O_WRONLY | os.O_NONBLOCK))
    top = made("dir")
    for kind in KINDS:
        made(kind, f"{top}/{kind}")
    kinds = sorted(
        f"{entry.name}:{entry.is_file(follow_symlinks=False)}:{entry.is_dir(follow_symlinks=False)}:{entry.is_symlink()}"
        for entry in os.scandir(top)
    )
    yield "listed", " ".join(kinds)
    yield "same-inode", str(all(entry.inode() == os.lstat(entry.path).st_ino for entry in os.scandir(top)))
    for n in range(300):
        made("file", f"{top}/{n}")
    yield "all-are-listed", str(len(os.listdir(top)))


@family
def mounts():
    """Across mounts, at mount points, and where nothing may be changed."""

    def mount(*words):
        subprocess.run(["mount", *words], check=True)

    made("file", "plain")
    one, two = made("dir", "one"), made("dir", "two")
    mount("--bind", one, two)
    for kind in ("file", "dir", "link"):
        path = made(kind, f"{one}/{kind}")
        yield f"across/rename/{kind}", came_of(lambda: os.rename(path, f"{two}/new"))
        yield f"across/link/{kind}", came_of(lambda: os.link(path, f"{two}/new", follow_symlinks=False))
        yield f"away/rename/{kind}", came_of(lambda: os.rename(path, f"/run/{fresh()}"))
        yield f"away/link/{kind}", came_of(lambda: os.link(path, f"/run/{fresh()}", follow_symlinks=False))
    yield "point/rmdir", came_of(lambda: os.rmdir(two))
    yield "point/rename", came_of(lambda: os.rename(two, "three"))
    yield "point/rename-over", came_of(lambda: os.rename(made("dir"), two))
    mount("-o", "remount,bind,ro", two)
    for call, act in CALLS.items():
        kind = "dir" if call in ("rmdir", "listdir", "open-directory") else "link" if call == "readlink" else "file"
        made(kind, f"{one}/{call}")
        if not os.path.exists("moving"):
            made("file", "moving")
        yield f"read-only/{call}/there", came_of(lambda: act(f"{two}/{call}"))
        yield f"read-only/{call}/new", came_of(lambda: act(f"{two}/new"))
    subprocess.run(["umount", two], check=True)
