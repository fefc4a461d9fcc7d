"""What POSIX says of each call on files, as a table of our own: what is prepared, what is tried by whom, what comes of it.

Run as root in two directories, a local disk's and the one to be looked at: a line that the disk does not keep is a mistake of
the table. Prints a line for each case that differs; what cannot be kept is in NOT_KEPT with the reason, and a line there that
is kept after all is a mistake too. Exits with the number of mistakes.

Prepare and try are calls with plain words, `;` between them; `root`, `agent` or `nobody` before a call says as whom."""

import errno
import os
import stat
import sys
import time

USERS = {"root": 0, "agent": 1000, "nobody": 65534}
LONG = "n" * 255
TOO_LONG = "n" * 256
DEEP = "/".join(["d" * 200] * 21)

# case | prepared | tried | what comes of it: ok, an error, or a value
TABLE = """
mkdir: a new name                    |                                  | mkdir a 755                    | ok
mkdir: a file is there               | file a                           | mkdir a 755                    | EEXIST
mkdir: a directory is there          | dir a                            | mkdir a 755                    | EEXIST
mkdir: a link is there               | sym x a                          | mkdir a 755                    | EEXIST
mkdir: a pipe is there               | fifo a                           | mkdir a 755                    | EEXIST
mkdir: below a file                  | file a                           | mkdir a/b 755                  | ENOTDIR
mkdir: below nothing                 |                                  | mkdir a/b 755                  | ENOENT
mkdir: the longest name              |                                  | mkdir LONG 755                 | ok
mkdir: a longer name                 |                                  | mkdir TOOLONG 755              | ENAMETOOLONG
mkdir: a path too long               |                                  | mkdir DEEP 755                 | ENAMETOOLONG
mkdir: a loop on the way             | sym b a; sym a b                 | mkdir a/c 755                  | ELOOP
mkdir: not allowed                   | dir a; chmod a 555; own a agent  | agent mkdir a/b 755            | EACCES
mkdir: no way through                | dir a; dir a/b; chmod a 644      | agent mkdir a/b/c 755          | EACCES
mkdir: the mask counts               |                                  | umask 077; mkdir a 777; mode a | 700
mkdir: whose it is                   | dir a; own a agent               | agent mkdir a/b 755; owner a/b | 1000:1000
mkdir: the group of a set-gid one    | dir a; own a agent 20; chmod a 2777 | agent mkdir a/b 755; owner a/b | 1000:20
mkdir: set-gid goes down             | dir a; own a agent 20; chmod a 2777 | agent mkdir a/b 755; mode a/b  | 2755
mkdir: the one above has a new time  | dir a; old a                     | mkdir a/b 755; fresh a         | ok
mkdir: its links                     | dir a                            | mkdir a/b 755; links a         | 3
rmdir: an empty one                  | dir a                            | rmdir a                        | ok
rmdir: one with a file               | dir a; file a/b                  | rmdir a                        | ENOTEMPTY
rmdir: one with a directory          | dir a; dir a/b                   | rmdir a                        | ENOTEMPTY
rmdir: a file                        | file a                           | rmdir a                        | ENOTDIR
rmdir: a link to one                 | dir a; sym a b                   | rmdir b                        | ENOTDIR
rmdir: nothing                       |                                  | rmdir a                        | ENOENT
rmdir: itself                        | dir a                            | rmdir a/.                      | EINVAL
rmdir: the one above                 | dir a; dir a/b                   | rmdir a/b/..                   | ENOTEMPTY
rmdir: not allowed                   | dir a; dir a/b; chmod a 555; own a agent | agent rmdir a/b        | EACCES
rmdir: another's in a sticky one     | dir a; chmod a 1777; dir a/b     | nobody rmdir a/b               | EPERM
rmdir: its own in a sticky one       | dir a; chmod a 1777; nobody mkdir a/b 755 | nobody rmdir a/b      | ok
rmdir: its links go                  | dir a; dir a/b                   | rmdir a/b; links a             | 2
unlink: a file                       | file a                           | unlink a; there a              | no
unlink: a directory                  | dir a                            | unlink a                       | EISDIR
unlink: nothing                      |                                  | unlink a                       | ENOENT
unlink: a link, not what it means    | file a; sym a b                  | unlink b; there a              | yes
unlink: a pipe                       | fifo a                           | unlink a                       | ok
unlink: below a file                 | file a                           | unlink a/b                     | ENOTDIR
unlink: a longer name                |                                  | unlink TOOLONG                 | ENAMETOOLONG
unlink: not allowed                  | dir a; file a/b; chmod a 555; own a agent | agent unlink a/b      | EACCES
unlink: no way through               | dir a; file a/b; chmod a 644     | agent unlink a/b               | EACCES
unlink: another's in a sticky one    | dir a; chmod a 1777; file a/b; chmod a/b 666 | nobody unlink a/b  | EPERM
unlink: own in another's sticky one  | dir a; chmod a 1777; nobody create a/b 644 | nobody unlink a/b    | ok
unlink: another's in an own sticky one | dir a; own a agent; chmod a 1755; file a/b | agent unlink a/b   | ok
unlink: the count of names           | file a; link a b                 | unlink a; links b              | 1
unlink: the file has a new change time | file a; link a b; old b        | unlink a; changed b            | ok
unlink: the directory has a new time | dir a; file a/b; old a           | unlink a/b; fresh a            | ok
create: whose it is                  | dir a; own a agent               | agent create a/b 644; owner a/b | 1000:1000
create: the group of a set-gid one   | dir a; own a agent 20; chmod a 2777 | agent create a/b 644; owner a/b | 1000:20
create: the mask counts              |                                  | umask 027; create a 666; mode a | 640
create: a name that is there         | file a                           | create a 644                   | EEXIST
create: a link to nothing is there   | sym x a                          | create a 644                   | EEXIST
create: below a file                 | file a                           | create a/b 644                 | ENOTDIR
create: below nothing                |                                  | create a/b 644                 | ENOENT
create: a longer name                |                                  | create TOOLONG 644             | ENAMETOOLONG
create: not allowed                  | dir a; chmod a 755               | agent create a/b 644           | EACCES
create: a mode that it may not open itself |                            | create a 000; mode a           | 0
open: to read what may not be        | file a; chmod a 600              | agent read a                   | EACCES
open: to write what may only be read | file a; chmod a 644              | agent write a                  | EACCES
open: to read what may only be written | file a; chmod a 222            | agent read a                   | EACCES
open: by its group                   | file a; own a root 1000; chmod a 640 | agent read a               | ok
open: the owner's bits before others' | file a; own a agent; chmod a 077 | agent read a                  | EACCES
open: by root whatever the bits say  | file a; own a agent; chmod a 000 | root read a                    | ok
open: to write a directory           | dir a                            | write a                        | EISDIR
open: a link that may not be followed | file a; sym a b                 | nofollow b                     | ELOOP
open: a loop                         | sym b a; sym a b                 | read a                         | ELOOP
open: a directory that is none       | file a                           | list a                         | ENOTDIR
open: to list what may not be        | dir a; chmod a 311               | agent list a                   | EACCES
open: a pipe nobody reads            | fifo a                           | writenow a                     | ENXIO
open: cutting off has a new time     | file a; old a                    | cut a; fresh a                 | ok
open: a running program              | program p; run p                 | write p                        | ETXTBSY
link: a second name                  | file a                           | link a b; links a              | 2
link: a directory                    | dir a                            | link a b                       | EPERM
link: a name that is there           | file a; file b                   | link a b                       | EEXIST
link: nothing                        |                                  | link a b                       | ENOENT
link: below a file                   | file a; file b                   | link a b/c                     | ENOTDIR
link: a longer name                  | file a                           | link a TOOLONG                 | ENAMETOOLONG
link: not allowed                    | file a; own a agent; dir d; chmod d 755 | agent link a d/b        | EACCES
link: the file has a new change time | file a; old a                    | link a b; changed a            | ok
link: a link itself                  | sym x a                          | link a b; target b             | x
symlink: what it says                |                                  | sym anything a; target a       | anything
symlink: a name that is there        | file a                           | sym x a                        | EEXIST
symlink: below a file                | file a                           | sym x a/b                      | ENOTDIR
symlink: the longest meaning         |                                  | sym LONG a; target a           | LONG
symlink: nothing is meant            |                                  | sym EMPTY a                    | ENOENT
symlink: a longer name               |                                  | sym x TOOLONG                  | ENAMETOOLONG
symlink: not allowed                 | dir a; chmod a 755               | agent sym x a/b                | EACCES
symlink: whose it is                 | dir a; own a agent               | agent sym x a/b; owner a/b     | 1000:1000
readlink: no link                    | file a                           | target a                       | EINVAL
rename: a file                       | file a                           | rename a b; there b            | yes
rename: over a file                  | file a; file b                   | rename a b; there a            | no
rename: over itself                  | file a                           | rename a a; there a            | yes
rename: over a second name of itself | file a; link a b                 | rename a b; links a            | 2
rename: a directory over an empty one | dir a; dir b                    | rename a b                     | ok
rename: a directory over a full one  | dir a; dir b; file b/c           | rename a b                     | ENOTEMPTY
rename: a directory over a file      | dir a; file b                    | rename a b                     | ENOTDIR
rename: a file over a directory      | file a; dir b                    | rename a b                     | EISDIR
rename: below itself                 | dir a                            | rename a a/b                   | EINVAL
rename: over the one above           | dir a; dir a/b                   | rename a/b a                   | ENOTEMPTY
rename: nothing                      |                                  | rename a b                     | ENOENT
rename: to below nothing             | file a                           | rename a b/c                   | ENOENT
rename: to below a file              | file a; file b                   | rename a b/c                   | ENOTDIR
rename: a longer name                | file a                           | rename a TOOLONG               | ENAMETOOLONG
rename: itself, by its dot           | dir a                            | rename a/. b                   | EBUSY
rename: out of where that is not allowed | dir a; file a/b; dir c; chmod c 777; chmod a 555; own a agent | agent rename a/b c/b | EACCES
rename: into where that is not allowed | dir a; file a/b; own a agent; own a/b agent; dir c; chmod c 755 | agent rename a/b c/b | EACCES
rename: another's out of a sticky one | dir a; chmod a 1777; file a/b; dir c; chmod c 777 | nobody rename a/b c/b | EPERM
rename: over another's in a sticky one | dir a; chmod a 1777; file a/b; dir c; chmod c 777; nobody create c/d 644 | nobody rename c/d a/b | EPERM
rename: a link, not what it means    | file a; sym a b                  | rename b c; target c           | a
rename: both directories have new times | dir a; file a/b; dir c; old a; old c | rename a/b c/b; fresh a; fresh c | ok
rename: the links of directories     | dir a; dir a/b; dir c            | rename a/b c/b; links c        | 3
rename: replace no one               | file a; file b                   | renamenew a b                  | EEXIST
rename: change places                | file a; dir b                    | exchange a b; isdir a          | yes
chmod: all bits                      | file a                           | chmod a 7777; mode a           | 7777
chmod: by its owner                  | file a; own a agent              | agent chmod a 600; mode a      | 600
chmod: by somebody else              | file a                           | agent chmod a 777              | EPERM
chmod: through a link                | file a; sym a b                  | chmod b 600; mode a            | 600
chmod: nothing                       |                                  | chmod a 600                    | ENOENT
chmod: below a file                  | file a                           | chmod a/b 600                  | ENOTDIR
chmod: a loop                        | sym b a; sym a b                 | chmod a 600                    | ELOOP
chmod: a new change time             | file a; old a                    | chmod a 600; changed a         | ok
chmod: set-gid of a group that one is not in | file a; own a agent 20   | agent chmod a 2755; mode a     | 755
chmod: sticky on a file              | file a; own a agent              | agent chmod a 1644; mode a     | 1644
chown: by root                       | file a                           | own a agent 20; owner a        | 1000:20
chown: by its owner                  | file a; own a agent              | agent own a nobody             | EPERM
chown: to a group that one is in     | file a; own a agent 20           | agent own a agent 1000; owner a | 1000:1000
chown: to a group that one is not in | file a; own a agent              | agent own a agent 20           | EPERM
chown: a link itself                 | file a; sym a b                  | lown b agent; owner a          | 0:0
chown: set-id bits go                | file a; own a agent; chmod a 6755 | agent own a agent 1000; mode a | 755
chown: set-id bits of what is no program stay by group | file a; chmod a 2644; own a agent 20 | mode a  | 2644
chown: a new change time             | file a; old a                    | own a agent; changed a         | ok
chown: an id beyond the block        | file a                           | own a 70000                    | ok
truncate: shorter                    | file a                           | truncate a 1; size a           | 1
truncate: longer                     | file a                           | truncate a 100000; size a      | 100000
truncate: a directory                | dir a                            | truncate a 0                   | EISDIR
truncate: nothing                    |                                  | truncate a 0                   | ENOENT
truncate: less than nothing          | file a                           | truncate a -1                  | EINVAL
truncate: not allowed                | file a; chmod a 644              | agent truncate a 0             | EACCES
truncate: a new time                 | file a; old a                    | truncate a 1; fresh a          | ok
truncate: set-id bits go             | file a; own a agent; chmod a 6755 | agent truncate a 1; mode a    | 755
truncate: root keeps set-id bits     | file a; chmod a 6755             | root truncate a 1; mode a      | 6755
truncate: a running program          | program p; run p                 | truncate p 0                   | ETXTBSY
write: set-id bits go                | file a; own a agent; chmod a 6755 | agent write a; mode a         | 755
write: set-id bits go for whoever may write | file a; chmod a 4777      | agent write a; mode a          | 777
write: a new time                    | file a; old a                    | write a; fresh a               | ok
utimens: to a time                   | file a                           | times a 1000000000.5; mtime a  | 1000000000.5
utimens: before 1970                 | file a                           | times a -1; mtime a            | -1.0
utimens: after 2038                  | file a                           | times a 4000000000; mtime a    | 4000000000.0
utimens: to now by who may write     | file a; chmod a 666              | agent now a                    | ok
utimens: to now by who may not       | file a; chmod a 644              | agent now a                    | EACCES
utimens: to a time by somebody else  | file a; chmod a 666              | agent times a 1                | EPERM
utimens: a link itself               | file a; sym a b; old a           | ltimes b 7; mtime a            | 100.0
mkfifo: a new one                    |                                  | fifo a; isfifo a               | yes
mkfifo: a name that is there         | file a                           | fifo a                         | EEXIST
mkfifo: below a file                 | file a                           | fifo a/b                       | ENOTDIR
mknod: a socket                      |                                  | node a socket; issock a        | yes
mknod: a device by root              |                                  | node a char                    | ok
mknod: a device by somebody          | dir a; own a agent               | agent node a/b char            | EPERM
access: what the bits say            | file a; chmod a 640; own a root 1000 | agent may a r; agent may a w | EACCES
statvfs: the longest name            |                                  | namemax                        | 255
directory: as long as it is open     | dir a; file a/b                  | listgone a                     | ok
tmpfile: a file without a name       |                                  | tmpfile .                      | ok
posix acl: who else may              | file a                           | acl a                          | ok
"""

NOT_KEPT = {
    "mknod: a device by root": "it would be the host's",
    "chown: an id beyond the block": "the App's block of ids ends at 65,535",
    "tmpfile: a file without a name": "the protocol of the library ends before it; programs fall back to a name and its removal",
    "posix acl: who else may": "modes and ids are what is shared",
}

running = []


def name(word):
    return {"LONG": LONG, "TOOLONG": TOO_LONG, "DEEP": DEEP, "EMPTY": ""}.get(word, word)


def create(path, mode):
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, int(mode, 8)))


def put(path):
    with open(path, "wb") as file:
        file.write(b"bytes")


def program(path):
    with open("/usr/bin/sleep", "rb") as source, open(path, "wb") as file:
        file.write(source.read())
    os.chmod(path, 0o755)


def run(path):
    running.append(os.spawnv(os.P_NOWAIT, path, [path, "600"]))
    time.sleep(0.2)


def opened(path, flags):
    os.close(os.open(path, flags))


def write(path):
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, b"x")
    finally:
        os.close(file)


def own(path, user, group=None, follow=True):
    uid = USERS[user] if user in USERS else int(user)
    os.chown(path, uid, int(group) if group else (uid if uid < 65536 else -1), follow_symlinks=follow)


def rename_with(flag):
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def rename(old, new):
        if libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flag) != 0:
            raise OSError(ctypes.get_errno(), "renameat2")

    return rename


def fresh(path):
    if os.stat(path).st_mtime < time.time() - 600:
        raise AssertionError(f"{path} has its old time")


def changed(path):
    if os.stat(path).st_ctime_ns <= before[path]:
        raise AssertionError(f"{path} has its old change time")


def old(path):
    os.utime(path, (100, 100))
    before[path] = os.stat(path).st_ctime_ns
    time.sleep(0.02)


def list_gone(path):
    entries = os.scandir(path)
    os.unlink(path + "/b")
    os.rmdir(path)
    list(entries)


before = {}
yes = {True: "yes", False: "no"}
CALLS = {
    "file": put,
    "dir": os.mkdir,
    "program": program,
    "run": run,
    "mkdir": lambda path, mode: os.mkdir(path, int(mode, 8)),
    "rmdir": os.rmdir,
    "unlink": os.unlink,
    "create": create,
    "read": lambda path: opened(path, os.O_RDONLY),
    "write": write,
    "writenow": lambda path: opened(path, os.O_WRONLY | os.O_NONBLOCK),
    "nofollow": lambda path: opened(path, os.O_RDONLY | os.O_NOFOLLOW),
    "list": lambda path: opened(path, os.O_RDONLY | os.O_DIRECTORY),
    "cut": lambda path: opened(path, os.O_WRONLY | os.O_TRUNC),
    "tmpfile": lambda path: opened(path, os.O_TMPFILE | os.O_RDWR),
    "link": lambda a, b: os.link(a, b, follow_symlinks=False),
    "sym": os.symlink,
    "target": os.readlink,
    "rename": os.rename,
    "renamenew": rename_with(1),
    "exchange": rename_with(2),
    "chmod": lambda path, mode: os.chmod(path, int(mode, 8)),
    "own": own,
    "lown": lambda path, user: own(path, user, follow=False),
    "truncate": lambda path, size: os.truncate(path, int(size)),
    "times": lambda path, at: os.utime(path, (float(at), float(at))),
    "ltimes": lambda path, at: os.utime(path, (float(at), float(at)), follow_symlinks=False),
    "now": os.utime,
    "old": old,
    "fifo": os.mkfifo,
    "node": lambda path, kind: os.mknod(
        path, {"char": stat.S_IFCHR, "socket": stat.S_IFSOCK}[kind] | 0o644, os.makedev(1, 3)
    ),
    "umask": lambda mask: os.umask(int(mask, 8)) and None,
    "mode": lambda path: oct(stat.S_IMODE(os.lstat(path).st_mode))[2:],
    "owner": lambda path: f"{os.lstat(path).st_uid}:{os.lstat(path).st_gid}",
    "links": lambda path: str(os.lstat(path).st_nlink),
    "size": lambda path: str(os.stat(path).st_size),
    "mtime": lambda path: str(os.stat(path).st_mtime),
    "there": lambda path: yes[os.path.lexists(path)],
    "isdir": lambda path: yes[os.path.isdir(path)],
    "isfifo": lambda path: yes[stat.S_ISFIFO(os.lstat(path).st_mode)],
    "issock": lambda path: yes[stat.S_ISSOCK(os.lstat(path).st_mode)],
    "fresh": fresh,
    "changed": changed,
    "namemax": lambda: str(os.statvfs(".").f_namemax),
    "listgone": list_gone,
    "may": lambda path, how: opened(path, os.O_RDONLY if how == "r" else os.O_WRONLY),
    "acl": lambda path: os.setxattr(
        path,
        "system.posix_acl_access",
        bytes.fromhex("02000000 01000600ffffffff 02000400e8030000 04000400ffffffff 10000400ffffffff 20000000ffffffff"),
    ),
}


def call(line):
    words = line.split()
    user = words.pop(0) if words[0] in USERS else "root"
    act, *given = words
    given = [name(word) for word in given]
    uid = USERS[user]
    if uid:
        os.setgroups([uid])
        os.setegid(uid)
        os.seteuid(uid)
    try:
        return CALLS[act](*given)
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups([])


def outcome(prepared, tried):
    for line in filter(None, map(str.strip, prepared.split(";"))):
        call(line)
    said = None
    try:
        for line in filter(None, map(str.strip, tried.split(";"))):
            said = call(line)
    except OSError as error:
        return errno.errorcode[error.errno]
    except AssertionError as error:
        return str(error)
    finally:
        os.umask(0o022)
        while running:
            pid = running.pop()
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    return "ok" if said is None else name(said) if said == "LONG" else said


def all_cases(top):
    """What comes of every case below a directory."""
    found = {}
    os.umask(0o022)
    for number, row in enumerate(filter(None, TABLE.splitlines())):
        case, prepared, tried, wanted = (part.strip() for part in row.split("|"))
        place = os.path.join(top, f"c{number}")
        os.mkdir(place, 0o755)
        os.chmod(place, 0o777)
        os.chdir(place)
        before.clear()
        try:
            found[case] = (outcome(prepared, tried), name(wanted))
        except OSError as error:
            found[case] = (f"cannot be prepared: {error}", name(wanted))
        os.chdir("/")
    return found


def main(disk, looked_at):
    mistakes = 0
    for case, (said, wanted) in all_cases(disk).items():
        if said != wanted:
            mistakes += 1
            print(f"THE TABLE IS WRONG: {case}: {said} on a disk, not {wanted}", flush=True)
    cases = all_cases(looked_at)
    for case, (said, wanted) in cases.items():
        if (said == wanted) == (case in NOT_KEPT):
            mistakes += 1
            print(f"NOT AS SAID: {case}: {said}, not {wanted}", flush=True)
    unknown = set(NOT_KEPT) - set(cases)
    print(f"{len(cases) - len(NOT_KEPT)} cases as on a disk, {len(NOT_KEPT)} not and known, {mistakes} mistakes", flush=True)
    return mistakes + len(unknown)


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:3]), 100))
