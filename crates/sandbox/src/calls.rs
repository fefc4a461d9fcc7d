//! The last wall of a process of ours that works on its own: a list of the system calls it makes. Whatever else it tries
//! ends it.
//!
//! Each program has its list beside it, and says what it is for. What all of them share is here: memory is never
//! executable, and the default is death. (Programs of others run behind the lists of `jail`.)

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// The only request of `ioctl` that a socket of ours needs: whether it blocks.
const FIONBIO: u32 = 0x5421;

/// A call that is allowed with these arguments alone: every test holds.
pub(crate) type When = (i64, Vec<SeccompCondition>);

/// The low half of that argument is exactly this.
pub(crate) fn is(argument: u8, value: u32) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, Len::Dword, Op::Eq, u64::from(value))
}

/// The bits of `mask` in the low half of that argument are exactly these.
pub(crate) fn masked(argument: u8, mask: u32, value: u32) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, Len::Dword, Op::MaskedEq(u64::from(mask)), u64::from(value))
}

/// `ioctl`, to say whether a descriptor blocks.
pub(crate) fn says_whether_it_blocks() -> Result<When, BackendError> {
    Ok((libc::SYS_ioctl, vec![is(1, FIONBIO)?]))
}

/// Compiles a list: calls with `any` argument, others `when` theirs are as told, and memory that is never executable.
pub(crate) fn compile(any: &[i64], when: Vec<When>) -> Result<BpfProgram, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = any.iter().map(|call| (*call, Vec::new())).collect();
    let executable = libc::PROT_EXEC.unsigned_abs();
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![SeccompRule::new(vec![masked(2, executable, 0)?])?]);
    }
    for (call, tests) in when {
        rules.insert(call, vec![SeccompRule::new(tests)?]);
    }
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)?.try_into()
}

/// Builds the wall around the calling thread, of a process that has one.
///
/// # Errors
/// The kernel has no system call filters, or there is no list for this machine.
pub(crate) fn enter(program: Result<BpfProgram, BackendError>) -> io::Result<()> {
    seccompiler::apply_filter(&program.map_err(io::Error::other)?).map_err(io::Error::other)
}

/// Builds it around all threads of this process.
///
/// # Errors
/// As [`enter`].
pub(crate) fn enter_all_threads(program: Result<BpfProgram, BackendError>) -> io::Result<()> {
    seccompiler::apply_filter_all_threads(&program.map_err(io::Error::other)?).map_err(io::Error::other)
}
