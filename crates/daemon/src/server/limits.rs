//! What a Command asks to be limited to: checked against what its Session has, and as the guest is told it.

use pepo_api::CommandLimits;
use pepo_sandbox::proto;

use super::Problem;
use crate::session::Spec;

/// Below this no program of a usual size is even loaded.
const LEAST_MEMORY_MIB: u32 = 4;

/// What the kernel takes.
const MOST_PIDS: u32 = 1 << 22;

/// The least that a kernel gives of a period of 100 ms.
const LEAST_CPU_PERCENT: u32 = 1;

/// Refuses by name what no guest of this shape could give, or keep.
pub(super) fn check(limits: &CommandLimits, spec: &Spec) -> Result<(), Problem> {
    within("limits.memory_mib", limits.memory_mib, LEAST_MEMORY_MIB, spec.memory_mib)?;
    within("limits.pids", limits.pids, 1, MOST_PIDS)?;
    within("limits.cpu_percent", limits.cpu_percent, LEAST_CPU_PERCENT, spec.cpus.saturating_mul(100))
}

fn within(name: &'static str, value: Option<u32>, least: u32, most: u32) -> Result<(), Problem> {
    match value {
        Some(value) if !(least..=most).contains(&value) => {
            Err(Problem::invalid(name, format!("{name} is {value}; in this Session it may be from {least} to {most}")))
        }
        _ => Ok(()),
    }
}

/// As the guest is told.
pub(super) fn asked(limits: &CommandLimits) -> proto::Limits {
    proto::Limits {
        memory_bytes: limits.memory_mib.map(|mib| u64::from(mib) << 20),
        pids: limits.pids.map(u64::from),
        cpu_us: limits.cpu_percent.map(|percent| u64::from(percent) * 1000),
    }
}
