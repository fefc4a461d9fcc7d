//! The only place in this crate with `unsafe`: one small safe function per call the standard library and rustix do
//! not wrap. Nothing here decides anything; callers are named at each function.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

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

/// Closes every descriptor in `first..=last`. Used by the launcher only (see [`place_descriptor`]).
pub fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    let (first, last) = (first.max(0) as libc::c_uint, last.max(0) as libc::c_uint);
    // SAFETY: the launcher is about to exec and keeps no owner of a descriptor in this range.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}

/// Moves the calling thread into new namespaces.
pub fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: no flag a caller in this crate passes (CLONE_NEW*) changes memory or the descriptor table.
    check(unsafe { libc::unshare(flags) }).map(drop)
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

/// Watches a descriptor with the runtime's poller, which must be entered. Callers: pepod's side of the wall.
pub fn watch(fd: OwnedFd, interest: tokio::io::Interest) -> io::Result<tokio::io::unix::AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd always gives the same number, and keeps it open until it is dropped, which is when the poller
    // lets go of it.
    unsafe { tokio::io::unix::AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}
