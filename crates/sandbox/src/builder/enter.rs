//! The two processes of a builder, before foreign programs run: see [`super`] for the order of their steps.
//!
//! Both are `pepod build`, executed anew, with one thread. The outer one is the host's root until its namespaces stand, and
//! their root (nobody on the host) from then on; it stays outside the pid namespace, keeps the lifeline and kills. The
//! inner one is pid 1 of the namespace and returns to its caller, to build.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::CWD;
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit, Signal};
use rustix::thread::{Gid, Uid};

use super::Order;
use crate::{proc, sys};

/// The longest input, bytes: a recipe with its files.
pub(super) const INPUT: u64 = 64 << 20;

/// Where the inner process finds things.
const OUT_AT: &str = "/out";
const ROOM_AT: &str = "/room";
const INPUT_AT: &str = "/input";

/// Directories of the host that the builder sees, read-only: its programs, and how they are configured. `/bin` and the like
/// are links into `/usr` on most hosts, and are links here then.
const SEEN: [&str; 8] = ["usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// Device nodes of the host that programs expect.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// Exit code of a process that could not enter.
const EXIT_NOT_INSIDE: u8 = 125;

/// The inner process, and where its things are.
#[derive(Debug)]
pub struct Inside {
    /// What to build, as pepod wrote it.
    pub input: PathBuf,
    /// The directory for the finished files.
    pub output: PathBuf,
    /// The directory to unpack in.
    pub room: PathBuf,
}

/// Either of the two, by what `pepod build` was called with. Standard output is the pipe of events.
///
/// `Ok` in the inner process alone, whose caller builds now; `Err` with the code to end with everywhere else.
///
/// # Errors
/// The outer process' end; or a step that failed, which has been told on the control socket.
pub fn enter(arguments: &[String]) -> Result<Inside, ExitCode> {
    let control = sys::duplicate(0).map(UnixStream::from).map_err(|_| ExitCode::from(EXIT_NOT_INSIDE))?;
    let tell = |error: io::Error| {
        let _ = (&control).write_all(format!("{error}\n").as_bytes());
        ExitCode::from(EXIT_NOT_INSIDE)
    };
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["outer"] => Err(outer(&control).unwrap_or_else(tell)),
        ["inner"] => inner(&control).map_err(tell),
        _ => Err(tell(io::Error::other("this mode is for pepod itself"))),
    }
}

fn step<T>(what: impl Into<String>, result: Result<T, impl Into<io::Error>>) -> io::Result<T> {
    let what = what.into();
    result.map_err(|error| {
        let error = error.into();
        io::Error::new(error.kind(), format!("{what}: {error}"))
    })
}

fn outer(control: &UnixStream) -> io::Result<ExitCode> {
    let mut lines = BufReader::new(control);
    let mut line = String::new();
    // JSON escapes can make an input up to six times as long.
    (&mut lines).take(6 * INPUT + 64 * 1024).read_line(&mut line)?;
    let order: Order = serde_json::from_str(&line)?;
    drop(line);
    step("come after the host's own", proc::yield_to_host())?;
    step("leave the mount namespace", sys::unshare(libc::CLONE_NEWNS))?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    step("make mounts private", rustix::mount::mount_change("/", private))?;
    build_root(&order)?;
    // The working directory comes along into the namespaces. By it the inner process finds the root: the way there may be
    // closed to it, and to us from then on.
    step("enter the root", rustix::process::chdir(&order.root))?;
    let namespaces = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP;
    step("enter namespaces (are user namespaces allowed on this host?)", sys::unshare(namespaces))?;
    let mut socket = control;
    socket.write_all(b"ready\n")?;
    let mut answer = String::new();
    (&mut lines).take(64).read_line(&mut answer)?;
    if answer != "mapped\n" {
        return Err(io::Error::other("uids were not mapped"));
    }
    step("leave all groups", rustix::thread::set_thread_groups(&[]))?;
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    step("become the group", rustix::thread::set_thread_res_gid(gid, gid, gid))?;
    step("become root in there", rustix::thread::set_thread_res_uid(uid, uid, uid))?;
    let child = Command::new("/proc/self/exe")
        .arg0("pepo-build")
        .args(["build", "inner"])
        .env("HOME", "/tmp")
        .stdin(Stdio::from(OwnedFd::from(control.try_clone()?)))
        .spawn();
    let mut child = step("start the inner process", child)?;
    let pidfd = step("watch the inner process", crate::proc::open(child.id()))?;
    loop {
        let mut watched = [PollFd::new(&pidfd, PollFlags::IN), PollFd::new(control, PollFlags::IN)];
        match poll(&mut watched, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        if watched.iter().any(|one| !one.revents().is_empty()) {
            break;
        }
    }
    // Ended by itself, or the lifeline has: nobody speaks on the control socket any more.
    if !crate::proc::has_ended(pidfd.as_fd()) {
        child.kill()?;
    }
    let status = child.wait()?;
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(EXIT_NOT_INSIDE)))
}

/// Mounts the builder's root at `order.root`, as the host's root: what is mounted here cannot be taken off in there.
fn build_root(order: &Order) -> io::Result<()> {
    let fixed = MountFlags::NOSUID | MountFlags::NODEV;
    let root = &order.root;
    memory(root, fixed, 2 * INPUT, 0o755, 0)?;
    for name in SEEN {
        let source = Path::new("/").join(name);
        let target = root.join(name);
        let Ok(seen) = fs::symlink_metadata(&source) else { continue };
        if seen.is_symlink() {
            let to = step(format!("read the link {}", source.display()), fs::read_link(&source))?;
            step(format!("link {}", target.display()), std::os::unix::fs::symlink(to, &target))?;
        } else if seen.is_dir() {
            directory(&target)?;
            bind(&source, &target, fixed | MountFlags::RDONLY)?;
        }
    }
    for name in ["proc", "sys", "dev", "run", "tmp", "var", "var/tmp", "var/lib", "var/cache", "out", "room"] {
        directory(&root.join(name))?;
    }
    for name in DEVICES {
        let target = root.join("dev").join(name);
        step(format!("make {}", target.display()), File::create(&target))?;
        // No nodev here: a device is what this is. Which ones there are is decided above.
        bind(&Path::new("/dev").join(name), &target, MountFlags::NOSUID | MountFlags::NOEXEC)?;
    }
    let fd = root.join("dev/fd");
    step("link /dev/fd", std::os::unix::fs::symlink("/proc/self/fd", fd))?;
    resolver(root)?;
    memory(&root.join("tmp"), fixed, order.room_bytes, 0o1777, order.first_uid)?;
    memory(&root.join("var/tmp"), fixed, order.room_bytes, 0o1777, order.first_uid)?;
    let input = root.join("input");
    step("write the input", fs::write(&input, &order.input))?;
    step("write the input", fs::set_permissions(&input, fs::Permissions::from_mode(0o444)))?;
    bind(&order.out, &root.join("out"), fixed)?;
    match &order.room {
        Some(room) => bind(room, &root.join("room"), MountFlags::empty())?,
        None => memory(&root.join("room"), MountFlags::empty(), order.room_bytes, 0o755, order.first_uid)?,
    }
    let read_only = MountFlags::BIND | fixed | MountFlags::RDONLY;
    step("make the root read-only", rustix::mount::mount_remount(root, read_only, ""))
}

fn memory(at: &Path, flags: MountFlags, bytes: u64, mode: u32, owner: u32) -> io::Result<()> {
    let options = format!("size={bytes},mode={mode:o},uid={owner},gid={owner}");
    let options = CString::new(options).map_err(io::Error::other)?;
    let mounted = rustix::mount::mount("pepo", at, "tmpfs", flags, Some(options.as_c_str()));
    step(format!("mount memory on {}", at.display()), mounted)
}

fn directory(path: &Path) -> io::Result<()> {
    step(format!("make {}", path.display()), fs::create_dir(path))
}

fn bind(source: &Path, target: &Path, flags: MountFlags) -> io::Result<()> {
    let what = format!("bind {} on {}", source.display(), target.display());
    step(&*what, rustix::mount::mount_bind(source, target))?;
    step(&*what, rustix::mount::mount_remount(target, flags | MountFlags::BIND, ""))
}

/// `/etc/resolv.conf` is on many hosts a link to a file that is not under `/etc`: a copy of that lies where the link points.
fn resolver(root: &Path) -> io::Result<()> {
    let Ok(real) = fs::canonicalize("/etc/resolv.conf") else { return Ok(()) };
    if SEEN.iter().any(|name| real.starts_with(Path::new("/").join(name))) {
        return Ok(());
    }
    let Ok(text) = fs::read(&real) else { return Ok(()) };
    // The link may go through others (/var/run is /run): each place gets the copy.
    let direct = fs::read_link("/etc/resolv.conf").map(|link| Path::new("/etc").join(link)).unwrap_or_default();
    for place in [lexical(&direct), real] {
        let Ok(place) = place.strip_prefix("/") else { continue };
        let target = root.join(place);
        if let Some(above) = target.parent() {
            step(format!("make {}", above.display()), fs::create_dir_all(above))?;
        }
        step(format!("write {}", target.display()), fs::write(&target, &text))?;
    }
    Ok(())
}

/// The path without `.` and `..`, by its letters.
fn lexical(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                out.pop();
            }
            std::path::Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}

fn inner(control: &UnixStream) -> io::Result<Inside> {
    let name: &CStr = c"pepo-build";
    step("set the name", rustix::thread::set_name(name))?;
    // Should the outer process be killed alone: then so are we, and the namespace with us.
    step("follow the outer process", rustix::process::set_parent_process_death_signal(Some(Signal::KILL)))?;
    let fixed = MountFlags::NOSUID | MountFlags::NODEV;
    let proc = rustix::mount::mount("proc", "proc", "proc", fixed | MountFlags::NOEXEC, None);
    step("mount proc", proc)?;
    // What came from the other mount namespace is locked in place and cannot be a new root: a copy of it can.
    let copy = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = step("copy the root", rustix::mount::open_tree(CWD, ".", copy))?;
    let whole = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    step("put the copy over the root", rustix::mount::move_mount(&tree, "", CWD, ".", whole))?;
    step("enter the copy", rustix::process::fchdir(&tree))?;
    step("make it the root", rustix::process::pivot_root(".", "."))?;
    step("let go of the old root", rustix::mount::unmount(".", UnmountFlags::DETACH))?;
    step("enter the root", rustix::process::chdir("/"))?;
    drop(tree);
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    step("forbid core dumps", rustix::process::setrlimit(Resource::Core, none))?;
    let _ = rustix::system::sethostname(b"pepo-build");
    step("forbid new rights", rustix::thread::set_no_new_privs(true))?;
    let null = step("open /dev/null", File::open("/dev/null"))?;
    // The control socket on descriptor 0 would be inherited by every tool.
    step("close the control socket", rustix::stdio::dup2_stdin(&null))?;
    let mut socket = control;
    socket.write_all(b"inside\n")?;
    Ok(Inside { input: INPUT_AT.into(), output: OUT_AT.into(), room: ROOM_AT.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_go_by_their_letters() {
        assert_eq!(lexical(Path::new("/etc/../run/x/./resolv.conf")), Path::new("/run/x/resolv.conf"));
        assert_eq!(lexical(Path::new("/etc/resolv.conf")), Path::new("/etc/resolv.conf"));
    }
}
