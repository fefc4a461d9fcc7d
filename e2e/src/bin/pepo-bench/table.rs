//! The table of figures.

use std::time::Duration;

pub const MIB: usize = 1 << 20;
/// What is moved where a rate is measured.
pub const BULK: usize = 256 * MIB;

/// One figure.
pub struct Row {
    pub what: String,
    pub ours: f64,
    pub unit: &'static str,
    pub goal: Goal,
}

/// What a figure is held to. A reference has its unit and was measured in the same run, in turn with it.
#[allow(dead_code, reason = "each group of figures uses what it needs")]
pub enum Goal {
    /// Times: ours is at most so many times the reference.
    AtMost { reference: f64, ratio: f64 },
    /// Rates: ours is at least so many times the reference.
    AtLeast { reference: f64, ratio: f64 },
    /// Less than this, in the figure's unit.
    Below(f64),
    /// Told, not limited.
    Report,
    /// Told beside a reference, not limited.
    Against { reference: f64 },
}

impl Row {
    /// Whether the goal is met, and the row as the table has it.
    pub fn verdict(&self) -> (bool, String) {
        let Row { what, ours, unit, goal } = self;
        let (reference, ratio, goal, met) = match goal {
            Goal::AtMost { reference, ratio } => {
                (Some(reference), Some(ours / reference), format!("<= {ratio}"), ours / reference <= *ratio)
            }
            Goal::AtLeast { reference, ratio } => {
                (Some(reference), Some(ours / reference), format!(">= {ratio}"), ours / reference >= *ratio)
            }
            Goal::Below(limit) => (None, None, format!("< {limit} {unit}"), ours < limit),
            Goal::Report => (None, None, "report".into(), true),
            Goal::Against { reference } => (Some(reference), Some(ours / reference), "report".into(), true),
        };
        let reference = reference.map(|reference| format!("{reference:.2} {unit}")).unwrap_or_default();
        let ratio = ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
        let mark = match (goal.as_str(), met) {
            ("report", _) => "",
            (_, true) => " met",
            (_, false) => " missed",
        };
        (met, format!("| {what} | {ours:.2} {unit} | {reference} | {ratio} | {goal}{mark} |"))
    }
}

/// The middle one.
pub fn median(times: Vec<f64>) -> f64 {
    quantile(times, 0.5)
}

/// The value below which a part of them lies: 0.99 for the 99th percentile.
pub fn quantile(mut times: Vec<f64>, part: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    let at = (times.len() as f64 * part) as usize;
    times[at.min(times.len() - 1)]
}

/// MiB per second.
pub fn rate(bytes: usize, took: Duration) -> f64 {
    bytes as f64 / MIB as f64 / took.as_secs_f64()
}
