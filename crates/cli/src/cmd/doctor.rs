//! `pepo doctor`: what the daemon, or `pepod` itself where none runs, finds on this host.

use clap::Args;
use pepo_api::client::ClientError;
use pepo_api::{DoctorReport, Severity};

use crate::fail::Outcome;
use crate::place::Place;
use crate::{render, tool};

#[derive(Debug, Args)]
pub struct Doctor {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Make no Sandbox to measure how much slower it is in there
    #[arg(long)]
    quick: bool,
}

impl Doctor {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let instance = place.local("doctor")?;
        let client = instance.client();
        let asked = if self.quick { client.doctor().await } else { client.doctor_measured().await };
        let report: DoctorReport = match asked {
            Ok(report) => report,
            Err(ClientError::NoDaemon { .. }) => tool::ask(&instance, &["doctor", "--json"]).await?,
            Err(error) => return Err(error.into()),
        };
        if self.json {
            render::json(&report)?
        } else {
            render::out(&text(&report))?
        }
        let bad = report.checks.iter().any(|check| check.severity == Severity::Error);
        Ok(u8::from(bad))
    }
}

fn text(report: &DoctorReport) -> String {
    let mut text = String::new();
    let width = report.checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    for check in &report.checks {
        let mark = match check.severity {
            Severity::Ok => "ok     ",
            Severity::Info => "info   ",
            Severity::Warning => "warning",
            Severity::Error => "ERROR  ",
        };
        let (name, found) = (crate::escape::line(&check.name), crate::escape::line(&check.found));
        text.push_str(&format!("{mark}  {name:width$}  {found}\n"));
        if let Some(fix) = &check.fix {
            text.push_str(&format!("         {:width$}  -> {}\n", "", crate::escape::line(fix)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use pepo_api::Check;

    #[test]
    fn findings_stand_below_each_other_with_what_to_do() {
        let check = |name: &str, severity, found: &str, fix: Option<&str>| Check {
            name: name.into(),
            severity,
            found: found.into(),
            fix: fix.map(Into::into),
        };
        let report = DoctorReport {
            checks: vec![
                check("cgroup", Severity::Ok, "v2", None),
                check("uid_range", Severity::Error, "none\x1b[2J", Some("echo x")),
            ],
        };
        let expected = "ok       cgroup     v2\nERROR    uid_range  none\\x1b[2J\n                    -> echo x\n";
        assert_eq!(text(&report), expected);
    }
}
