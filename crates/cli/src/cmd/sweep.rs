//! `pepo sweep`: what nobody owns any more, removed by the daemon, or by `pepod` itself where none runs.

use clap::Args;
use pepo_api::client::ClientError;
use pepo_api::{SweepReport, SweepRequest};

use crate::fail::Outcome;
use crate::place::Place;
use crate::{render, tool};

#[derive(Debug, Args)]
pub struct Sweep {
    /// List only
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Also what belongs to instances that nobody runs
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Sweep {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let instance = place.local("sweep")?;
        let request = SweepRequest { dry_run: self.dry_run, all: self.all };
        let report: SweepReport = match instance.client().sweep(&request).await {
            Ok(report) => report,
            Err(ClientError::NoDaemon { .. }) => {
                let mut arguments = vec!["sweep", "--json"];
                arguments.extend(self.dry_run.then_some("--dry-run"));
                arguments.extend(self.all.then_some("--all"));
                tool::ask(&instance, &arguments).await?
            }
            Err(error) => return Err(error.into()),
        };
        if self.json {
            render::json(&report)?;
        } else {
            render::out(&text(&report))?;
        }
        let stayed = !self.dry_run && report.leftovers.iter().any(|one| !one.removed);
        Ok(u8::from(stayed))
    }
}

fn text(report: &SweepReport) -> String {
    if report.leftovers.is_empty() {
        return "nothing is left over\n".into();
    }
    let rows: Vec<_> = report
        .leftovers
        .iter()
        .map(|one| {
            let what = match (&one.error, one.removed) {
                (Some(error), _) => error.clone(),
                (None, true) => "removed".into(),
                (None, false) => "found".into(),
            };
            let age = one.age_seconds.map_or_else(|| "-".into(), |s| format!("{s} s"));
            vec![one.kind.clone(), one.name.clone(), one.owner.clone(), age, what]
        })
        .collect();
    render::table(&["KIND", "NAME", "OWNER", "AGE", "RESULT"], &rows)
}
