//! `pepo usage`: what was used between two times, as a table or JSON.

use clap::Args;
use pepo_api::query::ShowUsage;
use pepo_api::{Amounts, UsageReport};

use crate::fail::{Failure, Outcome};
use crate::place::Place;
use crate::render;

#[derive(Debug, Args)]
#[command(after_help = "Example: pepo usage --from 7d --by label:user")]
pub struct Usage {
    /// From this time on: RFC 3339, a day (2026-01-31), or so long ago (7d)
    #[arg(long, value_name = "TIME", default_value = "30d")]
    from: String,
    /// Up to this time; now where it is left out
    #[arg(long, value_name = "TIME")]
    to: Option<String>,
    /// Divide it: app, session, day or label:KEY
    #[arg(long = "by", value_name = "WHAT")]
    group_by: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Usage {
    pub async fn run(&self, place: Place, app: Option<&str>) -> Outcome<u8> {
        let now = jiff::Timestamp::now();
        let to = self.to.as_deref().map(|text| time(text, now)).transpose()?;
        let query = ShowUsage {
            app: app.map(str::to_owned),
            from: Some(time(&self.from, now)?),
            to: Some(to.unwrap_or(now)),
            group_by: self.group_by.clone(),
        };
        let report = place.client().usage(&query).await?;
        if self.json {
            render::json(&report)?;
        } else {
            render::out(&table(&report))?;
        }
        Ok(0)
    }
}

/// A time as it is typed.
fn time(text: &str, now: jiff::Timestamp) -> Outcome<jiff::Timestamp> {
    let wrong =
        || Failure::new(format!("`{text}` is no time: 2026-01-31T12:00:00Z, 2026-01-31, or how long ago (7d, 12h)"));
    if let Ok(at) = text.parse::<jiff::Timestamp>() {
        return Ok(at);
    }
    if let Ok(day) = text.parse::<jiff::civil::Date>() {
        return day.to_zoned(jiff::tz::TimeZone::UTC).map(|zoned| zoned.timestamp()).map_err(|_| wrong());
    }
    let (number, unit) = text.split_at(text.len() - text.chars().next_back().map_or(0, char::len_utf8));
    let hours = match unit {
        "d" => 24,
        "h" => 1,
        _ => return Err(wrong()),
    };
    let ago =
        number.parse::<i64>().ok().and_then(|n| n.checked_mul(hours)).filter(|hours| (0..=876_000).contains(hours));
    now.checked_sub(jiff::SignedDuration::from_hours(ago.ok_or_else(wrong)?)).map_err(|_| wrong())
}

fn table(report: &UsageReport) -> String {
    let by = report.group_by.as_deref().unwrap_or("");
    let mut rows: Vec<_> = match by {
        "" => Vec::new(),
        _ => report.groups.iter().map(|group| row(group.key.as_deref().unwrap_or("-"), &group.amounts)).collect(),
    };
    rows.push(row("total", &report.total));
    let head = [
        by,
        "ACTIVATIONS",
        "TIME",
        "CPU",
        "MEMORY GiB-h",
        "USED GiB-h",
        "DISK GiB-h",
        "READ",
        "WRITTEN",
        "SENT",
        "RECEIVED",
        "WORKSPACES GiB-h",
    ];
    let head = head.map(str::to_uppercase);
    render::table(&head.each_ref().map(String::as_str), &rows)
}

fn row(key: &str, used: &Amounts) -> Vec<String> {
    let gib_hours = |mib_ms: u64| format!("{:.3}", mib_ms as f64 / 1024.0 / 3_600_000.0);
    let seconds = |ms: u64| format!("{}:{:02}:{:02}", ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60);
    vec![
        key.to_owned(),
        used.activations.to_string(),
        seconds(used.wall_ms),
        seconds(used.cpu_us / 1000),
        gib_hours(used.memory_allocated_mib_ms),
        gib_hours(used.memory_used_mib_ms),
        gib_hours(used.disk_used_mib_ms),
        render::size(used.read_bytes),
        render::size(used.write_bytes),
        render::size(used.sent_bytes),
        render::size(used.received_bytes),
        gib_hours(used.workspace_allocated_mib_ms),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_typed_in_three_ways() {
        let now: jiff::Timestamp = "2026-03-10T12:00:00Z".parse().unwrap();
        let read = |text: &str| time(text, now).map(|at| at.to_string());
        assert_eq!(read("2026-03-01").unwrap(), "2026-03-01T00:00:00Z");
        assert_eq!(read("2026-03-01T01:00:00Z").unwrap(), "2026-03-01T01:00:00Z");
        assert_eq!(read("7d").unwrap(), "2026-03-03T12:00:00Z");
        assert_eq!(read("12h").unwrap(), "2026-03-10T00:00:00Z");
        for wrong in ["", "d", "-3d", "7ü", "99999999999999d", "yesterday"] {
            assert!(read(wrong).unwrap_err().message().contains("is no time"), "{wrong}");
        }
    }

    #[test]
    fn a_table_ends_with_the_total() {
        let used = Amounts {
            wall_ms: 3_661_000,
            cpu_us: 61_000_000,
            memory_allocated_mib_ms: 1024 * 3_600_000,
            ..Amounts::default()
        };
        let group = pepo_api::UsageGroup { key: Some("a\u{1b}[2J".into()), amounts: used };
        let now: jiff::Timestamp = "2026-03-10T12:00:00Z".parse().unwrap();
        let report = UsageReport {
            app_id: None,
            from: now,
            to: now,
            group_by: Some("label:user".into()),
            total: used,
            groups: vec![group],
        };
        let text = table(&report);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("LABEL:USER") && lines[2].starts_with("total"), "{text}");
        assert!(lines[2].contains("1:01:01") && lines[2].contains("0:01:01") && lines[2].contains("1.000"), "{text}");
        assert!(!text.contains('\u{1b}'));
    }
}
