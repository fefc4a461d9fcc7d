//! Which VMM this host gets, by looking.
//!
//! A `/dev/kvm` that opens proves nothing: on a paravirtual nested KVM a VM can be created and runs, but its kernel mode
//! is interpreted, some thousand times too slow where it does not fail outright. So the probe runs a guest in kernel
//! mode that executes what such a KVM has trouble with (`fxrstor64`, `iretq`) and then counts to two million, which takes
//! a processor 1 ms; and the processor has to say itself that it virtualizes.
//! Callers: `pepod host` at start, `pepod doctor`.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use crate::sys::kvm;

/// How long the probe guest may take. A real one needs a few milliseconds, an interpreted one some seconds.
const PATIENCE: Duration = Duration::from_secs(1);

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

/// Looks at the processor, then runs the probe guest. Takes up to two seconds on a host whose KVM hangs.
pub fn hardware() -> Hardware {
    let unusable = |why: &str| Hardware::Unusable(format!("/dev/kvm is there, but {why}"));
    if !Path::new("/dev/kvm").exists() {
        return Hardware::Unusable("no hardware virtualization: /dev/kvm is not there".to_owned());
    }
    if !processor_virtualizes() {
        return unusable("the processor has neither vmx nor svm: a guest's kernel would be interpreted");
    }
    let (answer, answered) = std::sync::mpsc::channel();
    // A thread of its own: a broken KVM may never return from running the guest, and then it stays behind.
    std::thread::spawn(move || answer.send(kvm::run_probe_guest(PATIENCE)));
    match answered.recv_timeout(2 * PATIENCE) {
        Ok(Ok(kvm::Ran::ToTheEnd)) => Hardware::Usable,
        Ok(Ok(kvm::Ran::Crawling)) => unusable("it interprets a guest's kernel instead of running it"),
        Ok(Ok(kvm::Ran::Stuck(exit))) => unusable(&format!("a guest does not run on it (exit {exit})")),
        Ok(Err(error)) => unusable(&format!("it cannot be used: {error}")),
        Err(_) => unusable("a guest hangs on it"),
    }
}

/// Whether the processor's flags name an extension for virtualization.
fn processor_virtualizes() -> bool {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_is_always_found_and_what_cannot_be_had_is_refused() {
        assert_eq!(choose(Wanted::Automatic).unwrap().kind, Kind::Qemu);
        assert!(choose(Wanted::Firecracker).unwrap_err().to_string().contains("firecracker"));
    }

    #[test]
    fn the_probe_guest_runs_to_its_end_only_where_the_processor_virtualizes() {
        match kvm::run_probe_guest(PATIENCE) {
            Ok(ran) => assert_eq!(ran == kvm::Ran::ToTheEnd, processor_virtualizes(), "{ran:?}"),
            // No /dev/kvm, or none for this user: no virtualization is no failure.
            Err(error) => assert!(matches!(hardware(), Hardware::Unusable(_)), "{error}"),
        }
    }
}
