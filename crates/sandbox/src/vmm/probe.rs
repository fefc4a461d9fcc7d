//! Which VMM this host gets, by looking.
//!
//! A `/dev/kvm` that opens proves nothing: on a paravirtual nested KVM a VM can be created and runs for a while, and a
//! stock kernel dies in it because some instructions are neither executed nor emulated. So the probe runs a guest of
//! eleven instructions that contains those (`fxrstor64`, `iretq`), and believes only a guest that got past them.
//! Callers: `pepod host` at start, `pepod doctor`.

use std::fmt;
use std::time::Duration;

use crate::sys::kvm;

/// How long a guest of eleven instructions may take. A real one needs microseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the operator asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// What fits the host.
    #[default]
    Automatic,
    /// QEMU in software emulation, whatever the host has.
    Qemu,
    /// Firecracker on hardware virtualization.
    Firecracker,
}

/// A VMM this version drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// QEMU `microvm`, software emulation.
    Qemu,
}

/// The VMM chosen, and why, for one line to the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Which.
    pub kind: Kind,
    /// What was seen on the host.
    pub reason: String,
}

impl fmt::Display for Choice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kind::Qemu = self.kind;
        write!(out, "qemu, software emulation ({})", self.reason)
    }
}

/// Whether hardware virtualization really works here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hardware {
    /// A guest ran.
    Usable,
    /// It did not, and why.
    Unusable(String),
}

/// Why no VMM was chosen.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Asked for something this version does not drive.
    #[error("firecracker is not supported by this version: leave the choice to pepo, or ask for qemu")]
    Firecracker,
}

/// Chooses the VMM.
///
/// # Errors
/// If what is wanted cannot be had.
pub fn choose(wanted: Wanted) -> Result<Choice, Error> {
    let reason = match wanted {
        Wanted::Firecracker => return Err(Error::Firecracker),
        Wanted::Qemu => "as asked for".to_owned(),
        Wanted::Automatic => match hardware() {
            Hardware::Usable => "this host has hardware virtualization, which this version does not use".to_owned(),
            Hardware::Unusable(why) => why,
        },
    };
    Ok(Choice { kind: Kind::Qemu, reason })
}

/// Runs the probe guest. Takes up to two seconds on a host whose KVM hangs.
pub fn hardware() -> Hardware {
    let (answer, answered) = std::sync::mpsc::channel();
    // A thread of its own: a broken KVM may never return from running the guest, and then it stays behind.
    std::thread::spawn(move || answer.send(kvm::run_probe_guest()));
    match answered.recv_timeout(PATIENCE) {
        Ok(Ok(kvm::Ran::ToTheEnd)) => Hardware::Usable,
        Ok(Ok(kvm::Ran::Stuck(exit))) => {
            Hardware::Unusable(format!("/dev/kvm is there, but a guest does not run on it: exit {exit}"))
        }
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            Hardware::Unusable("no hardware virtualization: /dev/kvm is not there".to_owned())
        }
        Ok(Err(error)) => Hardware::Unusable(format!("/dev/kvm is of no use: {error}")),
        Err(_) => Hardware::Unusable("/dev/kvm is there, but a guest hangs on it".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_is_always_found_and_what_cannot_be_had_is_refused() {
        assert_eq!(choose(Wanted::Automatic).unwrap().kind, Kind::Qemu);
        assert!(choose(Wanted::Firecracker).unwrap_err().to_string().contains("firecracker"));
        // Twice the same: the probe leaves nothing behind that changes the answer.
        assert_eq!(hardware(), hardware());
    }
}
