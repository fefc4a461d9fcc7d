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

use crate::plan::Vmm;
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
    /// Firecracker, whatever the host has.
    Firecracker,
}

/// The VMM chosen, and why, for one line to the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Which.
    pub vmm: Vmm,
    /// What was seen on the host.
    pub reason: String,
}

impl fmt::Display for Choice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.vmm {
            Vmm::Firecracker => "hardware virtualization",
            _ => "software emulation",
        };
        write!(out, "{}, {how} ({})", self.vmm.caps().name, self.reason)
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

impl fmt::Display for Hardware {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hardware::Usable => out.write_str("hardware virtualization works here"),
            Hardware::Unusable(why) => out.write_str(why),
        }
    }
}

/// Chooses the VMM. Firecracker is `installed`, or why it cannot be used. What is asked for is taken: whether it can work
/// is for its caller to see.
pub fn choose(wanted: Wanted, hardware: &Hardware, installed: Result<(), &str>) -> Choice {
    let (vmm, reason) = match (wanted, hardware, installed) {
        (Wanted::Qemu, ..) => (Vmm::Qemu, "as asked for".to_owned()),
        (Wanted::Firecracker, Hardware::Usable, _) => (Vmm::Firecracker, "as asked for".to_owned()),
        (Wanted::Firecracker, Hardware::Unusable(why), _) => {
            (Vmm::Firecracker, format!("as asked for, although {why}"))
        }
        (Wanted::Automatic, Hardware::Usable, Ok(())) => {
            (Vmm::Firecracker, "a guest ran on this host's KVM".to_owned())
        }
        (Wanted::Automatic, Hardware::Usable, Err(why)) => {
            (Vmm::Qemu, format!("hardware virtualization works here, but {why}"))
        }
        (Wanted::Automatic, Hardware::Unusable(why), _) => (Vmm::Qemu, why.clone()),
    };
    Choice { vmm, reason }
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
    fn what_is_chosen_and_why_is_one_line() {
        let none = Hardware::Unusable("no hardware virtualization: /dev/kvm is not there".to_owned());
        let said = |wanted, hardware: &Hardware, installed| choose(wanted, hardware, installed).to_string();
        let missing = Err("firecracker is not installed (sudo pepo setup)");
        for (line, wanted) in [
            (
                said(Wanted::Automatic, &Hardware::Usable, Ok(())),
                "firecracker, hardware virtualization (a guest ran on this host's KVM)",
            ),
            (
                said(Wanted::Automatic, &Hardware::Usable, missing),
                "qemu, software emulation (hardware virtualization works here, but firecracker is not installed (sudo pepo setup))",
            ),
            (
                said(Wanted::Automatic, &none, Ok(())),
                "qemu, software emulation (no hardware virtualization: /dev/kvm is not there)",
            ),
            (said(Wanted::Qemu, &Hardware::Usable, Ok(())), "qemu, software emulation (as asked for)"),
            (
                said(Wanted::Firecracker, &Hardware::Usable, Ok(())),
                "firecracker, hardware virtualization (as asked for)",
            ),
            (
                said(Wanted::Firecracker, &none, Ok(())),
                "firecracker, hardware virtualization (as asked for, although no hardware virtualization: /dev/kvm is not there)",
            ),
        ] {
            assert_eq!(line, wanted);
        }
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
