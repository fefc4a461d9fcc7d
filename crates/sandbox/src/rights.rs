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
    .union(CapabilitySet::SYS_PTRACE);

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
    rustix::thread::clear_ambient_capability_set()?;
    // An unprivileged caller (tests of everything above) is that user already and has nothing to lose here.
    let ours = rustix::process::getuid().as_raw();
    if ours == uid && uid != 0 && rustix::thread::capabilities(None)?.permitted.is_empty() {
        rustix::thread::set_no_new_privs(true)?;
        return Ok(());
    }
    rustix::thread::set_thread_groups(&[])?;
    drop_bounding_set(CapabilitySet::empty())?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}
