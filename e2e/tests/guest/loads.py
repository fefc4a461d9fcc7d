"""What people's programs do to a file system all day, at size, in the current directory: `loads.py NAME SIZE`. Says what was done;
fails where anything is not as on a disk."""

import hashlib
import io
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
import zipfile


def shell(line):
    ran = subprocess.run(["bash", "-ec", line], capture_output=True, text=True)
    assert ran.returncode == 0, f"{line}: {ran.returncode} {ran.stdout[-2000:]} {ran.stderr[-2000:]}"
    return ran.stdout


def tree(top, size):
    """A source tree of so many files."""
    for n in range(size):
        path = f"{top}/m{n % 37}/p{n % 11}"
        os.makedirs(path, exist_ok=True)
        with open(f"{path}/f{n}.txt", "w") as file:
            file.write(f"{n}\n" * (n % 400 + 1))


def digest(top):
    """Names, modes, times and bytes of a tree, as one number."""
    said = hashlib.sha256()
    for path, directories, files in os.walk(top):
        directories.sort()
        for name in sorted(directories + files):
            where = os.path.join(path, name)
            seen = os.lstat(where)
            said.update(f"{os.path.relpath(where, top)} {seen.st_mode} {seen.st_uid} {seen.st_gid} ".encode())
            if os.path.islink(where):
                said.update(os.readlink(where).encode())
            elif os.path.isfile(where):
                said.update(f"{seen.st_mtime_ns} {seen.st_nlink} ".encode())
                with open(where, "rb") as file:
                    said.update(file.read())
    return said.hexdigest()


def git(size):
    """A repository: commits, branches, merges, a clone, its maintenance, a clean state after all of it."""
    tree("a", size)
    who = "-c user.email=a@b -c user.name=n"
    shell(f"cd a; git init -q -b main; git add .; git {who} commit -qm all")
    for n in range(20):
        shell(
            f"cd a; git checkout -q -b b{n} main; for f in m{n}/*/*.txt; do echo {n} >> $f; done;"
            f"git {who} commit -qam {n}; git checkout -q main; git {who} merge -q --no-ff --no-edit b{n}"
        )
    shell(
        "git clone -q --bare a bare; git clone -q bare c; cd c; git fsck --strict; git gc -q --prune=now; git fsck --strict"
    )
    shell("cd c; git checkout -q origin/b3; git checkout -q main; git stash list; git worktree add -q ../w origin/b7")
    assert shell("git -C c status --porcelain; git -C w status --porcelain") == ""
    commits = int(shell("git -C c log --oneline | wc -l"))
    assert shell("git -C a rev-parse main^{tree}") == shell("git -C c rev-parse HEAD^{tree}")
    return f"{size} files, {commits} commits"


def pip(size):
    """Packages into an environment of their own: all of them, imported, one by one taken out again."""
    os.mkdir("wheels")
    for n in range(size):
        with zipfile.ZipFile(f"wheels/melon{n}-1-py3-none-any.whl", "w") as wheel:
            for part in range(30):
                wheel.writestr(f"melon{n}/part{part}.py", f"N = {part}\n" * 50)
            wheel.writestr(f"melon{n}/__init__.py", "from .part29 import N\n")
            needs = f"Requires-Dist: melon{n - 1}\n" if n else ""
            wheel.writestr(
                f"melon{n}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: melon{n}\nVersion: 1\n{needs}"
            )
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"melon{n}-1.dist-info/WHEEL", tag)
            wheel.writestr(f"melon{n}-1.dist-info/RECORD", "")
    shell(f"python3 -m venv v; v/bin/pip install -q --no-index --find-links wheels melon{size - 1}; v/bin/pip check")
    said = shell(f"v/bin/python -c 'for n in range({size}): print(__import__(f\"melon{{n}}\").N)'")
    assert said == "29\n" * size, said
    shell(
        f"v/bin/pip uninstall -q -y {' '.join(f'melon{n}' for n in range(size))}; ! ls v/lib/python3*/site-packages/melon*"
    )
    return f"{size} packages of 31 files"


def npm(size):
    """Packages from archives, each of which uses the one before; from nothing, and once more from what was locked."""
    for n in range(size):
        about = {"name": f"p{n}", "version": "1.0.0", "main": "i.js"}
        code = f"module.exports = {n} + {f'require(`p{n - 1}`)' if n else '0'};\n"
        with tarfile.open(f"p{n}.tgz", "w:gz") as archive:
            parts = {"package.json": json.dumps(about), "i.js": code} | {f"lib/{part}.js": code for part in range(20)}
            for name, text in parts.items():
                info = tarfile.TarInfo(f"package/{name}")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
    os.mkdir("app")
    wants = {f"p{n}": f"file:../p{n}.tgz" for n in range(size)}
    with open("app/package.json", "w") as file:
        json.dump({"name": "app", "version": "1.0.0", "dependencies": wants}, file)
    line = "npm {} --offline --no-audit --no-fund --silent; node -p 'require(`p{}`)'"
    for how in ("install", "ci"):
        said = shell("cd app; " + line.format(how, size - 1))
        assert int(said) == size * (size - 1) // 2, said
    return f"{size} packages of 22 files, twice"


def write_rows(name, mode, told):
    """Commits rows for ever, telling each one that is there to stay."""
    base = sqlite3.connect(name, timeout=120, isolation_level=None)
    base.execute(f"pragma journal_mode={mode}")
    while True:
        base.execute("begin immediate")
        base.execute("insert into t(a, b) values (?, ?)", (os.getpid(), "x" * random.randrange(5000)))
        base.execute("update sums set n = n + 1")
        base.execute("commit")
        with told.get_lock():
            told.value += 1


def sqlite(size):
    """Databases under writers that are killed in the middle: nothing that was committed is lost, and nothing half there."""
    done = []
    for mode in ("wal", "delete", "truncate", "persist"):
        name = f"{mode}.db"
        base = sqlite3.connect(name)
        base.execute(f"pragma journal_mode={mode}")
        base.executescript("create table t(a, b); create table sums(n); insert into sums values(0)")
        base.close()
        told = multiprocessing.Value("i", 0)
        writers = []
        for _ in range(size):
            while len(writers) < 3:
                writers.append(multiprocessing.Process(target=write_rows, args=(name, mode, told)))
                writers[-1].start()
            time.sleep(1.5)
            dying = writers.pop(0)
            os.kill(dying.pid, signal.SIGKILL)
            dying.join()
            if told.get_lock().acquire(timeout=5):
                told.get_lock().release()
            else:
                # It died with the counter in its hand.
                told = multiprocessing.Value("i", told.value)
                for writer in writers:
                    writer.kill()
                    writer.join()
                writers = []
        for writer in writers:
            writer.kill()
            writer.join()
        base = sqlite3.connect(name, timeout=120)
        rows, total = base.execute("select (select count(*) from t), (select n from sums)").fetchone()
        assert rows == total >= told.value > 0, (mode, rows, total, told.value)
        assert base.execute("pragma integrity_check").fetchone()[0] == "ok", mode
        base.close()
        done.append(f"{mode} {rows}")
    return f"{size} killed for each; rows: {', '.join(done)}"


def rsync(size):
    """Copies with all that a file has, then what changed alone."""
    tree("a", size)
    shell(
        "cd a; ln m0/p0/f0.txt hard; ln -s m1 soft; mkfifo pipe; truncate -s 100M hole; echo end >> hole;"
        "sudo chown 1234:4321 hard; sudo chmod 4751 soft/p*/f1.txt; touch -d 1999-09-09 m2; python3 -c"
        " \"import os; os.setxattr('hole', 'user.k', b'v' * 2000)\""
    )
    copy = "sudo rsync -aHAXS --numeric-ids --delete a/ b/"
    shell(copy)
    assert digest("a") == digest("b") and os.stat("b/hole").st_blocks < 1000
    assert os.getxattr("b/hole", "user.k") == b"v" * 2000
    shell("for f in a/m3/*/*; do echo more >> $f; done; rm -r a/m4; mv a/m5 a/moved; " + copy)
    assert digest("a") == digest("b")
    assert shell(copy.replace("-aHAXS", "-aHAXSin")) == "", "a second time there is something to do"
    shell(copy.replace("-aHAXS", "-aHAXSc --inplace"))
    return f"{size} files, twice"


def cargo(size):
    """A workspace of crates: built, tested, changed, built again."""
    os.mkdir("w")
    members = [f"c{n}" for n in range(size)]
    with open("w/Cargo.toml", "w") as file:
        file.write(f"[workspace]\nresolver = '2'\nmembers = {json.dumps(members)}\n")
    for n, name in enumerate(members):
        shell(f"cd w; cargo new -q --lib --vcs none {name} 2>/dev/null || true")
        with open(f"w/{name}/Cargo.toml", "w") as file:
            needs = f"c{n - 1} = {{ path = '../c{n - 1}' }}\n" if n else ""
            file.write(f"[package]\nname = '{name}'\nversion = '0.1.0'\nedition = '2021'\n[dependencies]\n{needs}")
        with open(f"w/{name}/src/lib.rs", "w") as file:
            before = f"c{n - 1}::n()" if n else "0"
            file.write(f"pub fn n() -> u32 {{ {before} + 1 }}\n#[test]\nfn t() {{ assert_eq!(n(), {n + 1}); }}\n")
    said = shell("cd w; cargo test --offline 2>&1")
    assert said.count("test t ... ok") == size, said
    shell(
        "cd w; echo 'pub fn more() {}' >> c0/src/lib.rs; cargo test --offline -q 2>&1; cargo clean -q; test ! -e target/debug"
    )
    return f"{size} crates, twice"


def cpython(_size):
    """The tests of Python's own library that work on files."""
    names = (
        "test_os test_posix test_posixpath test_shutil test_tempfile test_fileio test_file test_largefile test_mmap test_fcntl"
        " test_glob test_sqlite3 test_dbm test_mailbox test_filecmp"
    )
    here = os.getcwd()
    known = [name for name in names.split() if shell(f"python3 -c 'import test.{name}' && echo yes || true").strip()]
    # What needs a network, a device or hours is left out by the tests themselves. Timers of a millisecond, which an emulated
    # processor misses, are not about files, and what a write is stamped with is the host's clock.
    without = ["--ignore", "*Timerfd*", "--ignore", "test_utime_current*"]
    line = ["env", f"TMPDIR={here}", "python3", "-m", "test", *without, "--tempdir", here, *known]
    ran = subprocess.run(line, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-6000:]
    return f"{len(known)} files of tests"


def main():
    name, size = sys.argv[1], int(sys.argv[2])
    top = f"load-{name}"
    os.mkdir(top)
    os.chdir(top)
    began = time.monotonic()
    said = globals()[name](size)
    os.chdir("..")
    subprocess.run(["sudo", "rm", "-rf", top], check=True)
    assert not os.path.exists(top)
    print(f"{name}: {said}, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
