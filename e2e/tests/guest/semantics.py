"""What programs need of a file system, tried one by one in the current directory. Prints a line for each thing that is
not as on a local disk, and how many are; exits with the number of those that are not."""

import errno
import fcntl
import mmap
import os
import socket
import sqlite3
import stat
import struct
import subprocess
import sys
import threading
import time

passed, failed = 0, []


def case(check):
    """Runs a check in a directory of its own."""
    global passed
    here = os.getcwd()
    os.mkdir(check.__name__)
    os.chdir(check.__name__)
    try:
        check()
        passed += 1
    except BaseException as error:
        failed.append(check.__name__)
        print(f"NOT AS ON A DISK: {check.__name__}: {error!r}", flush=True)
    os.chdir(here)
    return check


def put(path, data=b"x"):
    with open(path, "wb") as file:
        file.write(data)


def get(path):
    with open(path, "rb") as file:
        return file.read()


def refused(code, act):
    try:
        act()
    except OSError as error:
        assert error.errno == code, f"{errno.errorcode[error.errno]} in place of {errno.errorcode[code]}"
        return
    raise AssertionError("it was not refused")


def shell(line):
    ran = subprocess.run(["bash", "-ec", line], capture_output=True, text=True)
    assert ran.returncode == 0, f"{line}: {ran.returncode} {ran.stdout} {ran.stderr}"
    return ran.stdout


def shell_errno(line):
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    if ran.returncode != 0:
        known = {"Operation not permitted": errno.EPERM, "Invalid argument": errno.EINVAL}
        for text, code in known.items():
            if text in ran.stderr:
                raise OSError(code, text)
        raise AssertionError(ran.stderr)


@case
def exclusive_creation():
    put("a")
    refused(errno.EEXIST, lambda: os.open("a", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    refused(errno.EEXIST, lambda: os.mkdir("a"))
    refused(errno.EEXIST, lambda: os.symlink("x", "a"))


@case
def appending_from_two_descriptors():
    one = os.open("a", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    two = os.open("a", os.O_APPEND | os.O_WRONLY)
    for _ in range(50):
        os.write(one, b"1\n")
        os.write(two, b"2\n")
    assert sorted(get("a").split()) == [b"1"] * 50 + [b"2"] * 50


@case
def appending_switched_on_and_off():
    fd = os.open("a", os.O_CREAT | os.O_RDWR)
    os.write(fd, b"0123456789")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, b"ab")
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    os.pwrite(fd, b"X", 0)
    assert get("a") == b"X123456789ab"


@case
def renames():
    put("a", b"new")
    put("b", b"old")
    held = open("b", "rb")
    os.rename("a", "b")
    assert get("b") == b"new" and held.read() == b"old" and not os.path.exists("a")
    os.mkdir("d")
    put("d/f")
    refused(errno.EISDIR, lambda: os.rename("b", "d"))
    refused(errno.ENOTDIR, lambda: os.rename("d", "b"))
    os.mkdir("e")
    put("e/f")
    refused(errno.ENOTEMPTY, lambda: os.rename("d", "e"))
    refused(errno.EINVAL, lambda: os.rename("d", "d/below"))
    os.rename("d", "moved")
    assert get("moved/f") == b"x"
    refused(errno.ENOENT, lambda: os.stat("d"))


@case
def links():
    put("a", b"l")
    os.link("a", "b")
    os.symlink("a", "c")
    assert os.stat("a").st_nlink == 2 and os.stat("a").st_ino == os.stat("b").st_ino
    os.unlink("a")
    assert get("b") == b"l" and os.readlink("c") == "a" and os.stat("b").st_nlink == 1
    refused(errno.ENOENT, lambda: os.stat("c"))
    os.link("c", "d", follow_symlinks=False)
    assert os.readlink("d") == "a"
    os.symlink("loop", "loop")
    refused(errno.ELOOP, lambda: os.stat("loop"))


@case
def attributes_of_users():
    put("a")
    os.setxattr("a", "user.k", b"v" * 3000)
    assert os.getxattr("a", "user.k") == b"v" * 3000 and os.listxattr("a") == ["user.k"]
    refused(errno.EEXIST, lambda: os.setxattr("a", "user.k", b"", os.XATTR_CREATE))
    os.removexattr("a", "user.k")
    assert os.listxattr("a") == []
    refused(errno.ENODATA, lambda: os.getxattr("a", "user.k"))


@case
def preallocation_and_holes():
    fd = os.open("a", os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(fd, 0, 1 << 20)
    assert os.fstat(fd).st_size == 1 << 20 and os.fstat(fd).st_blocks * 512 >= 1 << 20
    shell("fallocate --punch-hole --offset 0 --length 1048576 a")
    assert os.fstat(fd).st_blocks * 512 < 65536
    os.pwrite(fd, b"end", 1 << 30)
    assert os.fstat(fd).st_blocks * 512 < 65536
    assert os.lseek(fd, 0, os.SEEK_DATA) == 1 << 30 and os.lseek(fd, 0, os.SEEK_HOLE) == 0
    os.ftruncate(fd, 10)
    assert get("a") == b"\0" * 10


@case
def shared_mappings():
    fd = os.open("a", os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, 8192)
    with mmap.mmap(fd, 8192) as memory:
        memory[:5] = b"hello"
        memory.flush()
        assert os.pread(fd, 5, 0) == b"hello"
        os.pwrite(fd, b"J", 0)
        assert memory[:5] == b"Jello"


@case
def files_without_a_name():
    fd = os.open("a", os.O_CREAT | os.O_RDWR)
    os.write(fd, b"abc")
    os.unlink("a")
    put("a", b"another")
    assert os.pread(fd, 3, 0) == b"abc" and os.fstat(fd).st_nlink == 0
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    assert os.read(again, 3) == b"abc"


@case
def names_of_every_byte():
    for byte in range(1, 256):
        if byte == ord("/"):
            continue
        name = bytes([byte]) * 3
        put(name, name)
        assert name in os.listdir(b".") and get(name) == name, name
        os.unlink(name)
    put(b"n" * 255)
    refused(errno.ENAMETOOLONG, lambda: put(b"n" * 256))


@case
def deep_trees():
    here = os.getcwd()
    for _ in range(300):
        os.mkdir("directory")
        os.chdir("directory")
    put("f", b"deep")
    assert get("f") == b"deep"
    os.chdir(here)
    shell("rm -r directory")


@case
def locks_of_files():
    put("a")
    one, two = open("a"), open("a")
    fcntl.flock(one, fcntl.LOCK_EX)
    refused(errno.EAGAIN, lambda: fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB))
    waiting = threading.Thread(target=lambda: fcntl.flock(two, fcntl.LOCK_EX))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    fcntl.flock(one, fcntl.LOCK_UN)
    waiting.join(20)
    assert not waiting.is_alive()
    # A waiting program can be killed.
    blocked = subprocess.Popen(["flock", "a", "true"])
    time.sleep(0.3)
    assert blocked.poll() is None
    blocked.terminate()
    assert blocked.wait(20) != 0


@case
def locks_of_ranges():
    put("a", b"0" * 100)
    file = open("a", "r+")
    fcntl.lockf(file, fcntl.LOCK_EX, 10, 0)
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import fcntl\n"
            "f = open('a', 'r+')\n"
            "try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 5); print('had')\n"
            "except OSError: print('kept')\n"
            "fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 10); print('free')\n",
        ],
        capture_output=True,
        text=True,
    )
    assert said.stdout == "kept\nfree\n", said
    # A close of any descriptor gives a process' ranges back.
    os.close(os.open("a", os.O_RDONLY))
    shell(f"{sys.executable} -c \"import fcntl; fcntl.lockf(open('a', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\"")


@case
def locks_of_open_files():
    put("a", b"0" * 100)

    def take(file, first, length):
        # A lock of the open file itself (F_OFD_SETLK), which no process owns.
        fcntl.fcntl(file, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, length, 0))

    one, two = open("a", "r+"), open("a", "r+")
    take(one, 0, 10)
    refused(errno.EAGAIN, lambda: take(two, 5, 10))
    # Another descriptor's close gives nothing back; its own last one does.
    os.close(os.open("a", os.O_RDONLY))
    again = os.dup(one.fileno())
    one.close()
    refused(errno.EAGAIN, lambda: take(two, 5, 10))
    os.close(again)
    # The guest's kernel tells of a close when it is over.
    for _ in range(100):
        try:
            take(two, 5, 10)
            return
        except BlockingIOError:
            time.sleep(0.05)
    raise AssertionError("it outlived its file")


@case
def times_modes_and_masks():
    put("a")
    os.utime("a", ns=(1234567890123456789, 987654321987654321))
    seen = os.stat("a")
    assert (seen.st_atime_ns, seen.st_mtime_ns) == (1234567890123456789, 987654321987654321)
    os.chmod("a", 0o640)
    assert stat.S_IMODE(os.stat("a").st_mode) == 0o640
    before = os.umask(0o027)
    fd = os.open("b", os.O_CREAT | os.O_WRONLY, 0o666)
    os.umask(before)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o640
    time.sleep(0.01)
    earlier = os.stat(".").st_mtime_ns
    put("c")
    assert os.stat(".").st_mtime_ns > earlier


@case
def pipes_and_sockets():
    os.mkfifo("f")
    writing = threading.Thread(target=lambda: put("f", b"piped"))
    writing.start()
    assert get("f") == b"piped"
    writing.join()
    server = socket.socket(socket.AF_UNIX)
    server.bind("s")
    server.listen()
    socket.socket(socket.AF_UNIX).connect("s")


@case
def sqlite_in_both_modes():
    for mode in ("wal", "delete"):
        name = f"{mode}.db"
        base = sqlite3.connect(name)
        assert base.execute(f"pragma journal_mode={mode}").fetchone()[0] == mode
        base.execute("create table t(a)")
        for number in range(20):
            base.execute("insert into t values(?)", (number,))
            base.commit()
        other = sqlite3.connect(name)
        assert other.execute("select count(*) from t").fetchone()[0] == 20
        base.close()
        other.close()
        base = sqlite3.connect(name)
        assert base.execute("pragma integrity_check").fetchone()[0] == "ok"


@case
def sqlite_under_writers_that_are_killed():
    writer = (
        "import os, sqlite3, sys\n"
        "base = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)\n"
        "while True:\n"
        "    base.execute('begin immediate')\n"
        "    base.execute('insert into t values(?)', ('x' * 3000,))\n"
        "    base.execute('update n set n = n + 1')\n"
        "    base.execute('commit')\n"
        "    os.write(1, b'.')\n"
    )
    for mode in ("wal", "delete"):
        base = sqlite3.connect(f"{mode}.db")
        base.executescript(f"pragma journal_mode={mode}; create table t(a); create table n(n); insert into n values(0)")
        base.close()
        with open(f"{mode}.said", "wb") as said:
            line = [sys.executable, "-c", writer, f"{mode}.db"]
            writers = [subprocess.Popen(line, stdout=said) for _ in range(2)]
            while os.stat(f"{mode}.said").st_size < 10:
                time.sleep(0.05)
            for one in writers:
                one.kill()
                one.wait()
        base = sqlite3.connect(f"{mode}.db", timeout=60)
        rows, counted = base.execute("select (select count(*) from t), (select n from n)").fetchone()
        told = os.stat(f"{mode}.said").st_size
        assert rows == counted and rows >= told, (mode, rows, counted, told)
        assert base.execute("pragma integrity_check").fetchone()[0] == "ok"


@case
def removal_while_listing():
    for number in range(300):
        put(str(number))
    count = 0
    for entry in os.scandir("."):
        os.unlink(entry.path)
        count += 1
    assert count == 300 and os.listdir(".") == []


@case
def programs():
    put("a", b"#!/bin/sh\necho ran\n")
    os.chmod("a", 0o755)
    assert subprocess.check_output(["./a"]) == b"ran\n"


@case
def transfers_past_the_cache():
    fd = os.open("a", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    page = mmap.mmap(-1, 4096)
    page.write(b"d" * 4096)
    assert os.write(fd, page) == 4096 and get("a") == b"d" * 4096


@case
def large_files():
    block = os.urandom(1 << 20)
    with open("a", "wb") as file:
        for _ in range(32):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    shell("echo 3 | sudo tee /proc/sys/vm/drop_caches")
    with open("a", "rb") as file:
        for _ in range(32):
            assert file.read(1 << 20) == block
    # Beyond 4 GiB, sparse.
    with open("b", "wb") as file:
        file.seek(5 << 30)
        file.write(b"end")
    with open("b", "rb") as file:
        file.seek((5 << 30) - 1)
        assert file.read() == b"\0end"


@case
def git():
    said = shell(
        "git init -q a; cd a; git config user.email a@b; git config user.name n;"
        "for i in 1 2 3 4 5; do echo $i > f$i; git add .; git commit -qm $i; done;"
        "git gc -q; git fsck --strict; cd ..; git clone -q a b; cd b; git status --porcelain; git log --oneline | wc -l"
    )
    assert said.strip() == "5", said


@case
def pip_and_npm():
    os.makedirs("p/melon")
    put("p/melon/__init__.py", b"RIND = 'hard'\n")
    put("p/pyproject.toml", b"[project]\nname = 'melon'\nversion = '1'\n[build-system]\nrequires = []\n"
        b"build-backend = 'setuptools.build_meta'\n")
    shell("python3 -m venv v; v/bin/python -c 'import sys; print(sys.prefix)'")
    put("package.json", b'{"name": "a", "version": "1.0.0", "dependencies": {"b": "file:./b"}}')
    os.mkdir("b")
    put("b/package.json", b'{"name": "b", "version": "1.0.0", "bin": {"b": "b.js"}}')
    put("b/b.js", b"#!/usr/bin/env node\nconsole.log('ran')\n")
    shell("npm install --offline --no-audit --no-fund --install-links")
    assert shell("node_modules/.bin/b") == "ran\n"


@case
def archives_as_root():
    shell("sudo tar cf /tmp/a.tar -C /etc . ; mkdir t; sudo tar xpf /tmp/a.tar -C t; sudo tar df /tmp/a.tar -C t")
    shell("sudo cp -a /etc c; sudo diff -r --no-dereference /etc c")
    assert shell("sudo stat -c '%u %g %a' t/shadow") == shell("stat -c '%u %g %a' /etc/shadow")
    shell("sudo rm -r t c")


@case
def permissions_between_users():
    shell("sudo sh -c 'echo s > a; chmod 600 a'")
    refused(errno.EACCES, lambda: get("a"))
    assert shell("sudo cat a") == "s\n"
    os.chmod(".", 0o755)
    shell("! sudo -u nobody touch b; chmod 1777 .; sudo -u nobody touch b; test $(stat -c %U b) = nobody")
    shell("sudo chown root .")
    refused(errno.EPERM, lambda: os.unlink("b"))
    shell("sudo mkdir g; sudo chown agent:games g; sudo chmod 2770 g; sudo touch g/f; test $(sudo stat -c %G g/f) = games")


@case
def what_means_nothing_here():
    refused(errno.EPERM, lambda: shell_errno("sudo mknod a c 1 3"))
    # A set-id bit is kept and has no effect; a write takes it away, unless it is root's.
    shell("cp /usr/bin/id i; sudo chown root i; sudo chmod 4755 i; test $(./i -u) = 1000; test $(stat -c %a i) = 4755")
    shell("sudo sh -c 'echo >> i'; test $(stat -c %a i) = 4755")
    shell("sudo chown agent i; chmod 6755 i; echo >> i; test $(stat -c %a i) = 755")
    shell("chmod 6755 i; truncate -s 10 i; test $(stat -c %a i) = 755; chmod 4755 i; echo x > i; test $(stat -c %a i) = 755")


print(f"{passed} as on a disk, {len(failed)} not: {' '.join(failed)}", flush=True)
sys.exit(len(failed))
