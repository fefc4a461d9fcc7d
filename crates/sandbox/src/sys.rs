//! The only place in this crate with `unsafe`: one small safe function per call the standard library and rustix do
//! not wrap. Nothing here decides anything; callers are named at each function.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

pub mod disk;
pub mod kvm;

/// Takes ownership of a descriptor this process was started with, by its number.
///
/// Callers: the modes of `pepod` that are told numbers on their command line or in a specification. `None` if nothing
/// is open there.
pub fn inherited(fd: RawFd) -> Option<OwnedFd> {
    if fd < 0 {
        return None;
    }
    // SAFETY: F_GETFD on any number is harmless: it fails with EBADF where nothing is open.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: the descriptor is open (just checked), and the caller names it as handed over by its parent, so nothing
    // else in this process owns it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Duplicates `fd` to the lowest free number that is at least `floor`; the copy is closed on exec.
pub fn duplicate_above(fd: RawFd, floor: RawFd) -> io::Result<RawFd> {
    // SAFETY: F_DUPFD_CLOEXEC takes two integers and touches no memory.
    check(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor) })
}

/// Makes `to` a copy of `from` that survives exec, replacing what was there. Used by the launcher, which owns its
/// whole descriptor table: it is single threaded and about to be replaced.
pub fn place_descriptor(from: RawFd, to: RawFd) -> io::Result<()> {
    // SAFETY: dup2 takes two integers. Replacing `to` is the purpose: the launcher holds no owner for that number.
    check(unsafe { libc::dup2(from, to) }).map(drop)
}

/// A copy of `fd`, closed on exec, owned by the caller. An error where nothing is open at that number.
pub fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    let copy = duplicate_above(fd, 3)?;
    // SAFETY: the number was made by the line above and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Sets or clears close-on-exec. An error where nothing is open at that number.
pub fn set_inheritable(fd: RawFd, inheritable: bool) -> io::Result<()> {
    let flags = if inheritable { 0 } else { libc::FD_CLOEXEC };
    // SAFETY: F_SETFD takes integers and touches no memory.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, flags) }).map(drop)
}

/// Closes every descriptor in `first..=last`. Used by the launcher (see [`place_descriptor`]) and by a keeper, first of all.
pub fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    let (first, last) = (first.max(0) as libc::c_uint, last.max(0) as libc::c_uint);
    // SAFETY: the launcher is about to exec, a keeper has just begun: neither has an owner of a descriptor in this range.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}

/// Moves the calling thread into new namespaces.
pub fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: no flag a caller in this crate passes (CLONE_NEW*) changes memory or the descriptor table.
    check(unsafe { libc::unshare(flags) }).map(drop)
}

/// A new tap of that name in the calling thread's network namespace. It goes with the last copy of the descriptor.
///
/// Packets carry the header with which a guest leaves segmentation and checksums to the host. With an owner it stays without
/// a descriptor, as long as its namespace, and that uid may open it by name. Caller: `net::slot`.
pub fn open_tap(name: &str, owner: Option<u32>) -> io::Result<OwnedFd> {
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC | rustix::fs::OFlags::NONBLOCK;
    let tap = rustix::fs::open("/dev/net/tun", flags, rustix::fs::Mode::empty())?;
    // SAFETY: all bytes zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the request reads and writes one ifreq, which lives as long as the call.
    check(unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&tap), libc::TUNSETIFF, &raw mut request) })?;
    if let Some(owner) = owner {
        for (call, number) in [(libc::TUNSETOWNER, owner), (libc::TUNSETPERSIST, 1)] {
            // SAFETY: both requests take a number and touch no memory.
            check(unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&tap), call, libc::c_ulong::from(number)) })?;
        }
    }
    Ok(tap)
}

/// Gives every signal its default action and unblocks all of them, so that the next program starts clean.
pub fn reset_signals() -> io::Result<()> {
    for signal in 1..=64 {
        if matches!(signal, libc::SIGKILL | libc::SIGSTOP | 32 | 33) {
            continue;
        }
        // SAFETY: SIG_DFL installs no handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: a zeroed sigset_t is a valid object for sigemptyset to write, and sigprocmask only reads it.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        check(libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut())).map(drop)
    }
}

/// Length of the page [`exec_path_page`] maps.
const PATH_PAGE: usize = 4096;

/// Maps one page at exactly `address` and writes `path` into it, read-only afterwards.
///
/// The jail's filter allows `execve` with this pointer alone, and no mapping there after it (`jail::filter`).
pub fn exec_path_page(address: usize, path: &CStr) -> io::Result<()> {
    let bytes = path.to_bytes_with_nul();
    if bytes.len() > PATH_PAGE {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let wanted = address as *mut libc::c_void;
    // SAFETY: NOREPLACE fails instead of replacing a mapping, so no memory in use is touched.
    let page = unsafe { libc::mmap(wanted, PATH_PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if page != wanted {
        return Err(io::Error::from_raw_os_error(libc::EEXIST));
    }
    // SAFETY: the page is fresh, writable, PATH_PAGE long, and `bytes` fits (checked above); nobody else knows of it.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), page.cast::<u8>(), bytes.len()) };
    // SAFETY: changes the protection of the page mapped above only.
    check(unsafe { libc::mprotect(page, PATH_PAGE, libc::PROT_READ) }).map(drop)
}

/// `execve` with the path at `address` (see [`exec_path_page`]). Returns only on failure.
pub fn exec_at(address: usize, argv: &[CString], env: &[CString]) -> io::Error {
    let argv: Vec<*const libc::c_char> = argv.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect();
    let env: Vec<*const libc::c_char> = env.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect();
    // SAFETY: both vectors are null-terminated arrays of pointers to C strings that outlive the call. The kernel
    // checks the path pointer itself and answers EFAULT if nothing is mapped there.
    unsafe { libc::syscall(libc::SYS_execve, address as *const libc::c_char, argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// The time stamp counter, ordered after everything before it. `None` on a machine without one that we know how to
/// read.
pub fn time_stamp() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: x86-64 has SSE2 (lfence) and the TSC; reading it has no effect.
        Some(unsafe {
            core::arch::x86_64::_mm_lfence();
            core::arch::x86_64::_rdtsc()
        })
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Whether somebody keeps this machine's clock right (the kernel's own account of it). Caller: `pepod doctor`.
pub fn clock_is_synchronized() -> io::Result<bool> {
    const UNSYNCHRONIZED: libc::c_int = 0x40;
    // SAFETY: `timex` is plain integers, for which zero is a value; with `modes` zero the call only fills it in.
    unsafe {
        let mut now: libc::timex = std::mem::zeroed();
        check(libc::adjtimex(&mut now))?;
        Ok(now.status & UNSYNCHRONIZED == 0)
    }
}

fn check<N: Into<i64> + Copy>(result: N) -> io::Result<N> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Forks a process that has one thread: `None` in the child. Callers: `host::split`, which looks first that there is no
/// other thread.
pub fn fork() -> io::Result<Option<rustix::process::Pid>> {
    // SAFETY: with a single thread no lock can be held by a thread that the child lacks, so the child may do anything.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(rustix::process::Pid::from_raw(pid)),
    }
}

/// `linux/sched.h`; the constant of the `libc` crate overflows its type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Starts a program with these as its standard input, output and error, at `/`, with no environment, in that cgroup of the
/// unified hierarchy or in this process' own. What it answers is its id here and a descriptor of it, by which it is reaped.
/// Callers: `spawn`; the standard library cannot name the cgroup.
pub fn spawn(
    program: &CStr,
    arguments: &[CString],
    stdio: [&OwnedFd; 3],
    cgroup: Option<&std::fs::File>,
) -> io::Result<(u32, OwnedFd)> {
    let argv: Vec<_> = arguments.iter().map(|one| one.as_ptr()).chain([std::ptr::null()]).collect();
    let env = [std::ptr::null::<libc::c_char>()];
    // Closed by a program that starts, written to by one that does not.
    let (told, tell) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let mut pidfd: RawFd = -1;
    // SAFETY: zeros are a valid `clone_args`.
    let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
    how.flags = libc::CLONE_PIDFD as u64;
    how.pidfd = (&raw mut pidfd) as u64;
    how.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        how.flags |= CLONE_INTO_CGROUP;
        how.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: a copy of this process, as fork makes it: no memory is shared. Other threads may hold locks that nobody in the
    // copy gives back, so it makes plain system calls only, with what was prepared before, and ends in exec or exit.
    let pid = unsafe {
        let pid = libc::syscall(libc::SYS_clone3, &raw mut how, size_of::<libc::clone_args>());
        if pid == 0 {
            let placed = stdio.iter().zip(0..).all(|(from, to)| libc::dup2(from.as_raw_fd(), to) == to);
            if placed && libc::chdir(c"/".as_ptr()) == 0 {
                libc::signal(libc::SIGPIPE, libc::SIG_DFL);
                libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr());
            }
            let error = *libc::__errno_location();
            libc::write(tell.as_raw_fd(), (&raw const error).cast(), size_of_val(&error));
            libc::_exit(127);
        }
        pid
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call that made the process made this descriptor too, and nobody else knows of it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    drop(tell);
    let mut error = [0; size_of::<libc::c_int>()];
    match rustix::io::retry_on_intr(|| rustix::io::read(&told, &mut error)) {
        Ok(0) => Ok((pid as u32, pidfd)),
        said => {
            use rustix::process::{WaitId, WaitIdOptions, waitid};
            let _ = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
            said?;
            Err(io::Error::from_raw_os_error(libc::c_int::from_ne_bytes(error)))
        }
    }
}

/// Watches a descriptor with the runtime's poller, which must be entered. Callers: pepod's side of the wall.
pub fn watch(fd: OwnedFd, interest: tokio::io::Interest) -> io::Result<tokio::io::unix::AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd always gives the same number, and keeps it open until it is dropped, which is when the poller
    // lets go of it.
    unsafe { tokio::io::unix::AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}

/// A signal that came.
#[derive(Clone, Copy, Debug)]
pub struct Signalled {
    /// Its number.
    pub number: i32,
    /// Whether a terminal sent it, to the whole foreground group.
    pub from_terminal: bool,
}

/// Blocks these signals in this thread, and in those it starts, and gives a descriptor to read them from. Caller: the
/// privileged side's loop, before it has a second thread.
pub fn signals(numbers: &[libc::c_int]) -> io::Result<OwnedFd> {
    // SAFETY: a zeroed sigset_t is a valid object for sigemptyset to write; the others read or add to it.
    let mask = unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut mask);
        for number in numbers {
            libc::sigaddset(&mut mask, *number);
        }
        check(libc::sigprocmask(libc::SIG_BLOCK, &mask, std::ptr::null_mut()))?;
        mask
    };
    // SAFETY: the mask is initialized; -1 asks for a new descriptor, which nobody else owns.
    unsafe {
        let fd = check(libc::signalfd(-1, &mask, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The signals that came since, from a descriptor of [`signals`].
pub fn read_signals(fd: &OwnedFd) -> io::Result<Vec<Signalled>> {
    const SIZE: usize = size_of::<libc::signalfd_siginfo>();
    let mut all = Vec::new();
    loop {
        let mut buffer = [0; SIZE];
        match rustix::io::read(fd, &mut buffer) {
            Ok(SIZE) => {
                // SAFETY: the structure is plain integers, for which every bit pattern is a value, and the buffer is as long.
                let info: libc::signalfd_siginfo = unsafe { std::ptr::read_unaligned(buffer.as_ptr().cast()) };
                let number = i32::try_from(info.ssi_signo).unwrap_or(0);
                all.push(Signalled { number, from_terminal: info.ssi_code == libc::SI_KERNEL });
            }
            Ok(_) | Err(rustix::io::Errno::AGAIN) => return Ok(all),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sets the ids under which this thread makes files. Both or neither; `false` where the namespace has no such id. Caller:
/// the share server, on each of its threads.
pub fn file_ids(uid: u32, gid: u32) -> bool {
    // SAFETY: integers in and out; the calls change the calling thread's credentials and no memory. They report nothing
    // but the id before, so asking for an impossible one afterwards tells the one in force.
    unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        libc::setfsgid(libc::gid_t::MAX) as u32 == gid && libc::setfsuid(libc::uid_t::MAX) as u32 == uid
    }
}

/// Attributes in the form that `fuse-backend-rs` takes.
pub fn stat64(seen: &rustix::fs::Statx) -> libc::stat64 {
    // SAFETY: plain integers, for which all bits zero is a value.
    let mut stat: libc::stat64 = unsafe { std::mem::zeroed() };
    stat.st_dev = libc::makedev(seen.stx_dev_major, seen.stx_dev_minor);
    stat.st_ino = seen.stx_ino;
    stat.st_nlink = seen.stx_nlink.into();
    stat.st_mode = seen.stx_mode.into();
    stat.st_uid = seen.stx_uid;
    stat.st_gid = seen.stx_gid;
    stat.st_rdev = libc::makedev(seen.stx_rdev_major, seen.stx_rdev_minor);
    stat.st_size = seen.stx_size as libc::off64_t;
    stat.st_blksize = libc::blksize_t::from(seen.stx_blksize as i32);
    stat.st_blocks = seen.stx_blocks as libc::blkcnt64_t;
    (stat.st_atime, stat.st_atime_nsec) = (seen.stx_atime.tv_sec, seen.stx_atime.tv_nsec.into());
    (stat.st_mtime, stat.st_mtime_nsec) = (seen.stx_mtime.tv_sec, seen.stx_mtime.tv_nsec.into());
    (stat.st_ctime, stat.st_ctime_nsec) = (seen.stx_ctime.tv_sec, seen.stx_ctime.tv_nsec.into());
    stat
}

/// The size and use of the file system a descriptor is on, in the form that `fuse-backend-rs` takes.
pub fn file_system(fd: BorrowedFd<'_>) -> io::Result<libc::statvfs64> {
    // SAFETY: plain integers, for which all bits zero is a value; the kernel writes into it alone.
    unsafe {
        let mut space: libc::statvfs64 = std::mem::zeroed();
        check(libc::fstatvfs64(fd.as_raw_fd(), &raw mut space))?;
        Ok(space)
    }
}

/// A lock on a range of a file, owned by the open file (`F_OFD_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLock {
    /// `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
    pub kind: i16,
    /// First byte.
    pub start: i64,
    /// How many; 0 is to the end of every file.
    pub length: i64,
}

fn range_lock(fd: BorrowedFd<'_>, command: libc::c_int, lock: RangeLock) -> io::Result<RangeLock> {
    // SAFETY: plain integers, for which all bits zero is a value; the kernel reads it and, for F_OFD_GETLK, writes it.
    unsafe {
        let mut raw: libc::flock64 = std::mem::zeroed();
        raw.l_type = lock.kind;
        raw.l_whence = libc::SEEK_SET as i16;
        raw.l_start = lock.start;
        raw.l_len = lock.length;
        check(libc::fcntl(fd.as_raw_fd(), command, &raw mut raw))?;
        Ok(RangeLock { kind: raw.l_type, start: raw.l_start, length: raw.l_len })
    }
}

/// Takes or gives back a lock without waiting; `WouldBlock` where somebody else has it.
pub fn set_range_lock(fd: BorrowedFd<'_>, lock: RangeLock) -> io::Result<()> {
    range_lock(fd, libc::F_OFD_SETLK, lock).map(drop)
}

/// The lock that stands in the way of this one, or the same with `F_UNLCK`.
pub fn get_range_lock(fd: BorrowedFd<'_>, lock: RangeLock) -> io::Result<RangeLock> {
    range_lock(fd, libc::F_OFD_GETLK, lock)
}

/// The groups beside its own of whoever is at the other end of a Unix socket, as they were when it connected. Caller:
/// `volume::lent`.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; 64];
    loop {
        let mut length = libc::socklen_t::try_from(groups.len() * 4).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `length` bytes into the vector and the length of what there is into `length`.
        let got = check(unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        });
        match got {
            Ok(_) => {
                groups.truncate(length as usize / 4);
                return Ok(groups);
            }
            // 65,536 are the most that anybody has.
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) && groups.len() <= 65_536 => {
                groups.resize(groups.len() * 4, 0);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Forbids set-id programs, devices, programs and, if asked, writing on a mount that is nowhere yet. Caller: `volume`.
pub fn restrict_mount(mount: BorrowedFd<'_>, read_only: bool) -> io::Result<()> {
    let mut attributes: libc::mount_attr = libc::mount_attr { attr_set: 0, attr_clr: 0, propagation: 0, userns_fd: 0 };
    attributes.attr_set = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    if read_only {
        attributes.attr_set |= libc::MOUNT_ATTR_RDONLY;
    }
    // SAFETY: the path is a C string and the structure plain integers; both outlive the call, which only reads them.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn words(all: &[&str]) -> Vec<CString> {
        all.iter().map(|word| CString::new(*word).expect("a word")).collect()
    }

    #[test]
    fn a_program_starts_with_its_streams_and_nothing_else_or_says_why_not() {
        let (mut ours, theirs) = UnixStream::pair().expect("pair");
        let theirs: OwnedFd = theirs.into();
        let line = words(&["sh", "-c", "pwd; tr '\\0' '\\n' < /proc/$$/environ; echo wrong >&2"]);
        let (pid, pidfd) = spawn(c"/bin/sh", &line, [&theirs, &theirs, &theirs], None).expect("it starts");
        drop(theirs);
        let mut said = String::new();
        ours.read_to_string(&mut said).expect("all it says");
        assert_eq!(said, "/\nwrong\n", "not where it was to be, or with an environment");
        let ended = || {
            rustix::process::waitid(
                rustix::process::WaitId::PidFd(pidfd.as_fd()),
                rustix::process::WaitIdOptions::EXITED,
            )
        };
        let ended = ended().expect("it is our child").expect("it has ended");
        assert!(pid > 1 && ended.exit_status() == Some(0), "{pid} {ended:?}");

        let nothing = rustix::fs::open(
            "/dev/null",
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )
        .expect("open");
        let error =
            spawn(c"/no/such/program", &words(&["x"]), [&nothing, &nothing, &nothing], None).expect_err("it started");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let elsewhere = std::fs::File::open("/").expect("open");
        let error = spawn(c"/bin/true", &words(&["true"]), [&nothing, &nothing, &nothing], Some(&elsewhere))
            .expect_err("no cgroup");
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
