//! Capabilities of our own processes: which are kept, and how the others are lost for good.

use std::io;

use rustix::process::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// The highest capability a kernel may have: the sets are 64 bits wide.
const HIGHEST: u32 = 63;

/// What the privileged side keeps (design, section 2); every other capability leaves every set at its start.
pub const HOST: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::SYS_PTRACE)
    // ADR 16: see `may_resize_mounted`. A host that does not give it goes without.
    .union(CapabilitySet::SYS_RESOURCE);

/// Whether this thread may resize an ext4 that is mounted: the kernel lets only who may pass every limit.
///
/// # Errors
/// The kernel does not say.
pub fn may_resize_mounted() -> io::Result<bool> {
    Ok(rustix::thread::capabilities(None)?.effective.contains(CapabilitySet::SYS_RESOURCE))
}

/// What an official jailer needs: nodes for devices, a root, a user. Part of [`HOST`].
pub const JAILER: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SYS_ADMIN);

/// Lends capabilities to the program that this process is about to become, as root, and to none after it: they are
/// ambient, so that they survive one exec as root without being root's by right, and go when that program changes its
/// user; the bounding set is empty, so that nothing brings any back. What stays inheritable is worth nothing without a
/// file that has capabilities, and no_new_privs makes those worthless too. The order is the kernel's: the inheritable
/// set can be filled only while the bounding set still allows it.
///
/// # Errors
/// The kernel refuses a step; the process must not go on.
pub fn lend(lent: CapabilitySet) -> io::Result<()> {
    use rustix::thread::CapabilitiesSecureBits as Bits;
    let had = rustix::thread::capabilities(None)?;
    if !had.permitted.contains(lent) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    rustix::thread::set_capabilities_secure_bits(Bits::NO_ROOT | Bits::NO_ROOT_LOCKED)?;
    rustix::thread::set_capabilities(None, CapabilitySets { inheritable: lent, ..had })?;
    rustix::thread::clear_ambient_capability_set()?;
    for one in lent.iter() {
        rustix::thread::configure_capability_in_ambient_set(one, true)?;
    }
    drop_bounding_set(CapabilitySet::empty())?;
    let bits = Bits::NO_ROOT | Bits::NO_ROOT_LOCKED | Bits::NO_CAP_AMBIENT_RAISE | Bits::NO_CAP_AMBIENT_RAISE_LOCKED;
    rustix::thread::set_capabilities_secure_bits(bits)?;
    rustix::thread::set_capabilities(None, CapabilitySets { effective: lent, permitted: lent, inheritable: lent })?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

/// Leaves `kept` (as far as it is there) in the permitted, effective and bounding sets and nothing anywhere else. Of the
/// calling thread: called before there is another.
///
/// # Errors
/// The kernel refuses a step; the process must not go on.
pub fn keep_only(kept: CapabilitySet) -> io::Result<()> {
    rustix::thread::clear_ambient_capability_set()?;
    drop_bounding_set(kept)?;
    let had = rustix::thread::capabilities(None)?.permitted;
    let left = had.intersection(kept);
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() },
    )?;
    Ok(())
}

/// Removes every capability but `kept` from the bounding set, so that no program executed later has it.
fn drop_bounding_set(kept: CapabilitySet) -> io::Result<()> {
    for number in 0..=HIGHEST {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(one) {
            continue;
        }
        match rustix::thread::capability_is_in_bounding_set(one) {
            Ok(true) => rustix::thread::remove_capability_from_bounding_set(one)?,
            Ok(false) => {}
            // The first number the kernel does not know.
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Becomes that uid and gid with no other group, no capability in any set, no_new_privs: for good. Of the calling thread:
/// called before there is another.
///
/// # Errors
/// The kernel refuses a step; the process must not go on.
pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    become_user_of(uid, gid, &[])
}

/// As [`become_user`], with these other groups.
///
/// # Errors
/// As [`become_user`].
pub fn become_user_of(uid: u32, gid: u32, groups: &[Gid]) -> io::Result<()> {
    rustix::thread::clear_ambient_capability_set()?;
    // An unprivileged caller (tests of everything above) is that user already and has nothing to lose here.
    let ours = rustix::process::getuid().as_raw();
    if ours == uid && uid != 0 && rustix::thread::capabilities(None)?.permitted.is_empty() {
        rustix::thread::set_no_new_privs(true)?;
        return Ok(());
    }
    rustix::thread::set_thread_groups(groups)?;
    drop_bounding_set(CapabilitySet::empty())?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

/// Forbids for good, to this thread and all later ones, what a server of HTTP and frames never asks of the kernel: another
/// program, other processes' memory, mounts and namespaces, the kernel's programmable parts, sockets other than Unix ones.
/// Each is answered EPERM. A deny-list: the process has no rights left to lose, and this takes away the kernel's rarer
/// entrances from whoever takes it over. Called after [`become_user`], before the first thread.
///
/// # Errors
/// The kernel takes no filter; the process must not go on.
pub fn forbid_calls() -> io::Result<()> {
    use std::collections::BTreeMap;

    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
        TargetArch,
    };

    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = FORBIDDEN.iter().map(|call| (*call, Vec::new())).collect();
    let other = |domain: i32| {
        SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, u64::from(domain.unsigned_abs()))
            .and_then(|condition| SeccompRule::new(vec![condition]))
            .map_err(io::Error::other)
    };
    rules.insert(libc::SYS_socket, vec![other(libc::AF_UNIX)?]);
    rules.insert(libc::SYS_socketpair, vec![other(libc::AF_UNIX)?]);
    let filter =
        SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32), TargetArch::x86_64)
            .map_err(io::Error::other)?;
    let program: BpfProgram = filter.try_into().map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

/// Calls that [`forbid_calls`] forbids whatever their arguments.
const FORBIDDEN: &[i64] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_personality,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_vhangup,
    libc::SYS_syslog,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_forbidden_is_refused_and_the_rest_goes_on() {
        // A filter is a thread's: this one takes it to its grave.
        std::thread::spawn(|| {
            rustix::thread::set_no_new_privs(true).expect("no_new_privs");
            forbid_calls().expect("filter");
            let refused = std::process::Command::new("/bin/true").spawn().expect_err("execve was allowed");
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            let refused = std::net::TcpListener::bind("127.0.0.1:0").expect_err("a TCP socket was allowed");
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            let refused = crate::sys::unshare(libc::CLONE_NEWUTS).expect_err("unshare was allowed");
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            std::os::unix::net::UnixStream::pair().expect("a Unix socket");
            std::thread::spawn(|| ()).join().expect("a thread");
        })
        .join()
        .expect("thread");
    }
}
