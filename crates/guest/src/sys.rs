//! The system calls that `rustix` has no safe form of, each behind a small safe function.
//!
//! Owns every `unsafe` block of this program. Called by `init` (fork), `mount` and `net` (links), `agent` (vsock, entropy), `spawn`
//! (a child born in its control group) and `user` (a thread's file-system identity). Promises that no function here
//! can break memory safety for any argument.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::mem;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use bytes::BytesMut;
use rustix::io::Errno;

/// The CID of the host, the only peer the agent talks to.
pub const HOST_CID: u32 = libc::VMADDR_CID_HOST;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A listening, non-blocking vsock socket on `port`, for any of this machine's CIDs.
pub fn vsock_listen(port: u32, backlog: i32) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers; the returned descriptor is new and owned by nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(check(libc::socket(libc::AF_VSOCK, flags, 0))?) };
    // SAFETY: all bytes zero is a valid sockaddr_vm.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_port = port;
    address.svm_cid = libc::VMADDR_CID_ANY;
    let length = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: `address` outlives the call and `length` is its size.
    check(unsafe { libc::bind(socket.as_raw_fd(), ptr::from_ref(&address).cast(), length) })?;
    // SAFETY: no pointers.
    check(unsafe { libc::listen(socket.as_raw_fd(), backlog) })?;
    Ok(socket)
}

/// Accepts one connection and tells the peer's CID (`None` for a socket that is not vsock).
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<(OwnedFd, Option<u32>)> {
    // SAFETY: all bytes zero is a valid sockaddr_vm.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    let mut length = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the kernel writes at most `length` bytes into `address`, which is that large; the descriptor is new.
    let socket = unsafe {
        OwnedFd::from_raw_fd(check(libc::accept4(
            listener.as_raw_fd(),
            ptr::from_mut(&mut address).cast(),
            &raw mut length,
            flags,
        ))?)
    };
    let vsock = i32::from(address.svm_family) == libc::AF_VSOCK;
    Ok((socket, vsock.then_some(address.svm_cid)))
}

/// Which half of a fork this is.
pub enum Fork {
    /// The new process.
    Child,
    /// The old one, with the new one's pid.
    Parent(i32),
}

/// Forks a process that has one thread only: after it, both halves may do anything.
///
/// Refuses (`WouldBlock`) when the process has more than one thread.
pub fn fork_single_threaded() -> io::Result<Fork> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    // SAFETY: with a single thread no lock can be held by a thread that does not exist in the child.
    match check(unsafe { libc::fork() })? {
        0 => Ok(Fork::Child),
        pid => Ok(Fork::Parent(pid)),
    }
}

/// A socket to make requests about links with, and an empty one.
fn link_request(name: &str) -> io::Result<(OwnedFd, libc::ifreq)> {
    // SAFETY: no pointers; the descriptor is new.
    let socket =
        unsafe { OwnedFd::from_raw_fd(check(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0))?) };
    // SAFETY: all bytes zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok((socket, request))
}

/// Brings an interface up.
pub fn link_up(name: &str) -> io::Result<()> {
    let (socket, mut request) = link_request(name)?;
    // SAFETY: `request` is a valid ifreq for the duration of the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as _, &raw mut request) })?;
    // SAFETY: after SIOCGIFFLAGS the union holds flags, and any bit pattern is a valid c_short.
    unsafe { request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short };
    // SAFETY: as above.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) })?;
    Ok(())
}

/// Sets the largest packet of an interface.
pub fn link_mtu(name: &str, mtu: u32) -> io::Result<()> {
    let (socket, mut request) = link_request(name)?;
    request.ifr_ifru.ifru_mtu = i32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `request` is a valid ifreq for the duration of the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFMTU as _, &raw const request) })?;
    Ok(())
}

/// An IPv4 address as the kernel takes one.
fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: all bytes zero is a valid sockaddr.
    let mut plain: libc::sockaddr = unsafe { mem::zeroed() };
    plain.sa_family = libc::AF_INET as libc::sa_family_t;
    // Behind the port's two bytes.
    for (to, from) in plain.sa_data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    plain
}

/// Gives an interface its address and mask.
pub fn link_address(name: &str, address: Ipv4Addr, mask: Ipv4Addr) -> io::Result<()> {
    for (call, value) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, mask)] {
        let (socket, mut request) = link_request(name)?;
        request.ifr_ifru.ifru_addr = socket_address(value);
        // SAFETY: `request` is a valid ifreq for the duration of the call.
        check(unsafe { libc::ioctl(socket.as_raw_fd(), call as _, &raw const request) })?;
    }
    Ok(())
}

/// Writes down for good at which hardware address somebody on an interface is.
pub fn neighbour(name: &str, address: Ipv4Addr, mac: [u8; 6]) -> io::Result<()> {
    let (socket, named) = link_request(name)?;
    // SAFETY: all bytes zero is a valid arpreq.
    let mut request: libc::arpreq = unsafe { mem::zeroed() };
    request.arp_pa = socket_address(address);
    request.arp_ha.sa_family = libc::ARPHRD_ETHER;
    for (to, from) in request.arp_ha.sa_data.iter_mut().zip(mac) {
        *to = from as libc::c_char;
    }
    request.arp_flags = libc::ATF_COM | libc::ATF_PERM;
    request.arp_dev = named.ifr_name;
    // SAFETY: `request` is a valid arpreq for the duration of the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSARP as _, &raw const request) })?;
    Ok(())
}

/// Sends everything that is not on a link's own network to `gateway`.
pub fn default_route(gateway: Ipv4Addr) -> io::Result<()> {
    let (socket, _) = link_request("")?;
    // SAFETY: all bytes zero is a valid rtentry: null pointers and numbers.
    let mut request: libc::rtentry = unsafe { mem::zeroed() };
    request.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    request.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    request.rt_gateway = socket_address(gateway);
    request.rt_flags = (libc::RTF_UP | libc::RTF_GATEWAY) as libc::c_ushort;
    // SAFETY: `request` is a valid rtentry for the duration of the call, and its one pointer is null.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT as _, &raw const request) })?;
    Ok(())
}

/// Sets which kernel messages reach the console: those below `level`.
pub fn console_level(level: i32) -> io::Result<()> {
    const SYSLOG_ACTION_CONSOLE_LEVEL: libc::c_int = 8;
    // SAFETY: this action takes no buffer; null is what it expects.
    check(unsafe { libc::klogctl(SYSLOG_ACTION_CONSOLE_LEVEL, ptr::null_mut(), level) })?;
    Ok(())
}

/// The most bytes [`add_entropy`] takes.
pub const MAX_ENTROPY: usize = 512;

/// Mixes bytes into the kernel's random generator and credits them, so that it counts as seeded.
pub fn add_entropy(random: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        size: libc::c_int,
        bytes: [u8; MAX_ENTROPY],
    }
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    if bytes.len() > MAX_ENTROPY {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut info = PoolInfo {
        entropy_bits: bytes.len() as libc::c_int * 8,
        size: bytes.len() as libc::c_int,
        bytes: [0; MAX_ENTROPY],
    };
    info.bytes[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: the kernel reads `size` bytes behind the two integers, and `bytes` has at least that many.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &raw const info) })?;
    Ok(())
}

/// Sets the calling thread's file-system user, and returns the one before.
///
/// From 0 to another this drops the thread's rights to override file permissions, back to 0 restores them.
pub fn set_thread_fsuid(uid: u32) -> u32 {
    // SAFETY: no pointers; the raw call changes the calling thread alone.
    unsafe { libc::syscall(libc::SYS_setfsuid, uid) as u32 }
}

/// Sets the calling thread's file-system group, and returns the one before.
pub fn set_thread_fsgid(gid: u32) -> u32 {
    // SAFETY: as `set_thread_fsuid`.
    unsafe { libc::syscall(libc::SYS_setfsgid, gid) as u32 }
}

/// Installs a handler that does nothing for SIGPIPE, in place of the runtime's "ignore": a program that is started
/// then has the default action without being told (handlers do not outlive `execve`, ignored signals do).
pub fn default_signals() {
    extern "C" fn nothing(_: libc::c_int) {}
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGCHLD] {
        // SAFETY: SIG_DFL is valid for every signal.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: the handler is async-signal-safe since it does nothing.
    unsafe { libc::signal(libc::SIGPIPE, nothing as *const () as libc::sighandler_t) };
}

/// Sends `signal` to every process but init and this one.
pub fn kill_all(signal: i32) {
    // SAFETY: no pointers.
    unsafe { libc::kill(-1, signal) };
}

/// Sends `signal` to process `pid` (positive).
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    if pid <= 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: no pointers.
    check(unsafe { libc::kill(pid, signal) })?;
    Ok(())
}

/// Sends `signal` (1..=64) through a pidfd: it can reach no other process than the one the descriptor was opened for.
pub fn pidfd_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: a null siginfo asks the kernel to fill it in.
    let result = unsafe {
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, ptr::null::<libc::siginfo_t>(), 0)
    };
    check(result as libc::c_int)?;
    Ok(())
}

/// Who a child becomes.
pub struct Identity {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// A program to start, everything prepared: after the clone nothing may be allocated.
pub struct Program<'a> {
    /// Paths to try in order.
    pub candidates: &'a [CString],
    /// Arguments, the program's name first.
    pub argv: &'a [CString],
    /// `NAME=value` each.
    pub env: &'a [CString],
    /// Where it starts; the second is tried when the first fails.
    pub cwd: &'a [CString],
    /// What becomes its descriptors 0, 1, 2. All must be above 2.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Further descriptors, each to be moved to the number beside it.
    pub extra: &'a [(BorrowedFd<'a>, RawFd)],
    /// Whether descriptor 0 becomes the controlling terminal.
    pub terminal: bool,
    /// Who it becomes; `None` stays the caller.
    pub identity: Option<&'a Identity>,
    /// The control group it is born in.
    pub group: Option<BorrowedFd<'a>>,
    /// Whether the agent's protection from the memory killer is taken off it.
    pub reset_oom: bool,
    /// Whether it is killed when the calling thread ends.
    pub dies_with_caller: bool,
}

/// Where starting a program failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The clone itself.
    Clone,
    /// Descriptors, session, terminal.
    Setup,
    /// Becoming the user.
    Identity,
    /// The working directory.
    Cwd,
    /// The program.
    Exec,
}

#[repr(C)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// What the child reads, and where it leaves why it failed. Shared memory: the caller is suspended until the child has
/// executed its program or ended.
struct Shared<'a> {
    program: &'a Program<'a>,
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    sigmask: libc::sigset_t,
    step: Step,
    errno: i32,
}

/// Starts a program and returns its pid and pidfd once it runs.
///
/// The child borrows the caller's memory until `execve`, as with `vfork`: no page table is copied, and the reason of a
/// failure is simply left in memory. Only the calling thread waits meanwhile.
pub fn spawn(program: &Program<'_>) -> Result<(i32, OwnedFd), (Step, Errno)> {
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    const STACK: usize = 64 * 1024;
    let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
    };
    // SAFETY: all bytes zero is a valid (empty) signal set.
    let mut all: libc::sigset_t = unsafe { mem::zeroed() };
    let mut shared = Shared {
        program,
        argv: pointers(program.argv),
        env: pointers(program.env),
        sigmask: all,
        step: Step::Clone,
        errno: 0,
    };
    // SAFETY: `all` is a valid set to fill.
    unsafe { libc::sigfillset(&raw mut all) };
    let mut before = shared.sigmask;
    // SAFETY: both sets are valid; the mask of the calling thread alone changes.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };

    let mut stack: Vec<u8> = Vec::with_capacity(STACK);
    let mut pidfd: RawFd = -1;
    let mut flags = (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD) as u64;
    if program.group.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    let arguments = CloneArgs {
        flags,
        pidfd: (&raw mut pidfd) as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr() as u64,
        stack_size: STACK as u64,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: program.group.map_or(0, |group| group.as_raw_fd() as u64),
    };
    // SAFETY: the child runs `child` on `stack`, which outlives it: CLONE_VFORK suspends this thread until the child has
    // executed another program or ended. It touches `shared` only, makes async-signal-safe calls only, and every
    // signal is blocked, so no handler runs on it.
    let result = unsafe { clone3(&raw const arguments, size_of::<CloneArgs>(), child, (&raw mut shared).cast()) };
    // SAFETY: restores the mask saved above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    drop(stack);
    if result < 0 {
        return Err((Step::Clone, Errno::from_raw_os_error(-result as i32)));
    }
    let pid = result as i32;
    // SAFETY: the kernel stored a new descriptor there, since the clone succeeded.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    // SAFETY: a volatile read, since the compiler did not see the child write it.
    let errno = unsafe { ptr::read_volatile(&raw const shared.errno) };
    if errno != 0 {
        // SAFETY: as above.
        let step = unsafe { ptr::read_volatile(&raw const shared.step) };
        // SAFETY: waits for the child just made; a null status is allowed.
        unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
        return Err((step, Errno::from_raw_os_error(errno)));
    }
    Ok((pid, pidfd))
}

/// `clone3` with a function to run in the child, on the stack that the arguments name.
///
/// # Safety
/// `arguments` must name a stack and `CLONE_VFORK`; `entry` must never return.
#[cfg(target_arch = "x86_64")]
unsafe fn clone3(
    arguments: *const CloneArgs,
    size: usize,
    entry: extern "C" fn(*mut libc::c_void) -> !,
    argument: *mut libc::c_void,
) -> i64 {
    let result: i64;
    // SAFETY: the parent sees an ordinary system call that clobbers rcx and r11; the child leaves through `entry`,
    // which never returns, on a stack of its own that is aligned before the call.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "and rsp, -16",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") arguments,
            in("rsi") size,
            in("r12") entry,
            in("r13") argument,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

extern "C" fn child(argument: *mut libc::c_void) -> ! {
    // SAFETY: `argument` is the `Shared` of the suspended caller, which nobody else touches meanwhile.
    let shared = unsafe { &mut *argument.cast::<Shared<'_>>() };
    // SAFETY: system calls on values prepared by the caller; nothing is allocated and nothing is dropped.
    let (step, errno) = unsafe { become_program(shared) };
    // SAFETY: both fields are the caller's, read after this process has ended.
    unsafe {
        ptr::write_volatile(&raw mut shared.step, step);
        ptr::write_volatile(&raw mut shared.errno, errno.max(1));
        libc::_exit(127)
    }
}

/// Everything between clone and exec. Returns only when something failed.
///
/// # Safety
/// Runs in a child that shares the caller's memory: async-signal-safe calls only.
unsafe fn become_program(shared: &Shared<'_>) -> (Step, i32) {
    // SAFETY: see above; every pointer passed comes from a live CString or vector of the suspended caller.
    unsafe {
        let errno = || *libc::__errno_location();
        let program = shared.program;
        if libc::setsid() < 0 {
            return (Step::Setup, errno());
        }
        for (index, fd) in program.stdio.iter().enumerate() {
            if libc::dup2(fd.as_raw_fd(), index as RawFd) < 0 {
                return (Step::Setup, errno());
            }
        }
        for (fd, number) in program.extra {
            let moved = match fd.as_raw_fd() {
                // There already: it only has to outlive the exec.
                fd if fd == *number => libc::fcntl(fd, libc::F_SETFD, 0),
                fd => libc::dup2(fd, *number),
            };
            if moved < 0 {
                return (Step::Setup, errno());
            }
        }
        if program.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return (Step::Setup, errno());
        }
        if program.reset_oom {
            let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if fd >= 0 {
                libc::write(fd, c"0".as_ptr().cast(), 1);
                libc::close(fd);
            }
        }
        if let Some(identity) = program.identity {
            // Raw calls: the library's wrappers would change every thread of the caller.
            let (uid, gid, groups) = (identity.uid, identity.gid, &identity.groups);
            if libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) < 0
                || libc::syscall(libc::SYS_setresgid, gid, gid, gid) < 0
                || libc::syscall(libc::SYS_setresuid, uid, uid, uid) < 0
            {
                return (Step::Identity, errno());
            }
        }
        if program.dies_with_caller {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        }
        let mut failed = 0;
        for directory in program.cwd {
            failed = if libc::chdir(directory.as_ptr()) < 0 { errno() } else { 0 };
            if failed == 0 {
                break;
            }
        }
        if failed != 0 {
            return (Step::Cwd, failed);
        }
        libc::sigprocmask(libc::SIG_SETMASK, &raw const shared.sigmask, ptr::null_mut());
        let mut reason = libc::ENOENT;
        for candidate in program.candidates {
            libc::execve(candidate.as_ptr(), shared.argv.as_ptr(), shared.env.as_ptr());
            match errno() {
                libc::ENOENT | libc::ENOTDIR => {}
                // As a shell does: remember that one was found, and look on.
                libc::EACCES => reason = libc::EACCES,
                other => return (Step::Exec, other),
            }
        }
        (Step::Exec, reason)
    }
}

/// Reads once into the free capacity of `buffer` and lengthens it by what came; 0 is the end.
///
/// Interrupted calls are made again.
pub fn read_into(fd: BorrowedFd<'_>, buffer: &mut BytesMut) -> io::Result<usize> {
    let spare = buffer.spare_capacity_mut();
    if spare.is_empty() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (start, length) = (spare.as_mut_ptr(), spare.len());
    loop {
        // SAFETY: the kernel writes at most `length` bytes to `start`, which is that much memory of the buffer's own.
        let read = unsafe { libc::read(fd.as_raw_fd(), start.cast(), length) };
        if read >= 0 {
            let filled = buffer.len() + read as usize;
            // SAFETY: the kernel has initialized `read` bytes behind the old length.
            unsafe { buffer.set_len(filled) };
            return Ok(read as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Gives this thread a working directory of its own.
pub fn own_place() -> io::Result<()> {
    // SAFETY: no pointers; what is unshared is the kernel's.
    check(unsafe { libc::unshare(libc::CLONE_FS) }).map(drop)
}

/// Opens the directory that has this node in the FUSE mount in which this thread works. The kernel must know it already.
///
/// The handle's form is that of the kernel's `fs/fuse/inode.c`, `fuse_encode_fh`.
pub fn open_node(node: u64) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        high: u32,
        low: u32,
        generation: u32,
    }
    /// `FILEID_INO64_GEN`.
    const KIND: i32 = 0x81;
    let mut handle = Handle { bytes: 12, kind: KIND, high: (node >> 32) as u32, low: node as u32, generation: 0 };
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let at = ptr::from_mut(&mut handle);
    // SAFETY: `at` outlives the call, and 12 bytes follow its first two fields, as it says.
    let opened = unsafe { libc::syscall(libc::SYS_open_by_handle_at, libc::AT_FDCWD, at, flags) };
    let opened = check(opened as libc::c_int)?;
    // SAFETY: the descriptor is new and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

/// Descriptors that stay open and the same for as long as the value lives.
pub trait Steady: std::os::fd::AsRawFd {}

impl Steady for OwnedFd {}
impl Steady for std::rc::Rc<OwnedFd> {}
impl Steady for std::sync::Arc<OwnedFd> {}

/// Lets the runtime watch a descriptor.
pub fn watch<T: Steady>(fd: T, interest: tokio::io::Interest) -> io::Result<tokio::io::unix::AsyncFd<T>> {
    // SAFETY: `Steady` is implemented here only, for owners of a descriptor: it stays open, and `as_raw_fd` the same,
    // until the value is dropped, which is after its registration ends.
    Ok(unsafe { tokio::io::unix::AsyncFd::register_with_interest(fd, interest) }?)
}
