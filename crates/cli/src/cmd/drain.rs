//! `pepo drain`: takes nothing new, lets what runs finish, and returns when no Sandbox is left.

use clap::Args;
use pepo_api::DrainRequest;

use crate::fail::Outcome;
use crate::place::Place;
use crate::{render, value};

/// How long what runs may take, where nothing else is said.
const DEADLINE: u64 = 600;

#[derive(Debug, Args)]
pub struct Drain {
    /// How long what runs may take; then it is stopped [default: 10m]
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    timeout: Option<u64>,
    /// Take new work again
    #[arg(long, conflicts_with = "timeout")]
    cancel: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Drain {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.local("drain")?.client();
        let deadline_seconds = self.timeout.unwrap_or(DEADLINE);
        if !self.cancel && !self.json {
            render::say(&format!(
                "taking nothing new; what runs has {deadline_seconds} s (`pepo drain --cancel` takes new work again)"
            ))?;
        }
        let report = client.drain(&DrainRequest { deadline_seconds, cancel: self.cancel }).await?;
        if self.json {
            render::json(&report)?;
            return Ok(u8::from(report.left > 0));
        }
        if report.cancelled {
            render::say("not draining; new work is taken")?;
        } else {
            let cut = if report.cut == 0 { String::new() } else { format!(", {} of them cut off", report.cut) };
            render::say(&format!("drained: {} Sandboxes went{cut}", report.released + report.cut))?;
        }
        Ok(u8::from(report.left > 0 && !report.cancelled))
    }
}
