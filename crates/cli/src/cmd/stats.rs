//! `pepo stats`: what Sessions use now, as a table that is drawn again every two seconds on a terminal.

use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Args;
use futures_util::future::join_all;
use pepo_api::client::Client;
use pepo_api::query::ListSessions;
use pepo_api::{Session, SessionState, SessionStats};

use crate::fail::Outcome;
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::render;

/// To the first line, and nothing below it: what every terminal since the VT100 understands.
const REDRAW: &str = "\u{1b}[H\u{1b}[2J";

/// How often it is drawn.
const EVERY: Duration = Duration::from_secs(2);

/// Sessions shown.
const MOST: u32 = 100;

#[derive(Debug, Args)]
pub struct Stats {
    /// Once, and not again
    #[arg(long)]
    no_stream: bool,
    /// Print JSON, one line for each look
    #[arg(long)]
    json: bool,
    /// This Session alone, by id or name
    #[arg(value_name = "SES")]
    session: Option<String>,
}

/// One Session as it was seen, and how much processor time it had used then.
type Seen = (Session, SessionStats);

impl Stats {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        let live = !self.no_stream && !self.json && std::io::stdout().is_terminal();
        let mut interrupts = Interrupts::new()?;
        let mut before: Vec<Seen> = Vec::new();
        loop {
            let looked = tokio::time::Instant::now();
            let now = match interrupts.unless(self.look(&client)).await {
                Ok(now) => now?,
                Err(_) => return Ok(0),
            };
            if self.json {
                render::json_line(
                    &now.iter()
                        .map(|(session, stats)| (session.id, stats))
                        .collect::<std::collections::BTreeMap<_, _>>(),
                )?;
            } else {
                let text = table(&now, &before, if before.is_empty() { Duration::MAX } else { EVERY });
                if live {
                    render::out(REDRAW)?;
                }
                render::out(&text)?;
            }
            if self.no_stream || !(live || self.json) {
                return Ok(0);
            }
            before = now;
            let pause = tokio::time::sleep_until(looked + EVERY);
            if interrupts.unless(pause).await.is_err() {
                return Ok(0);
            }
        }
    }

    async fn look(&self, client: &Client) -> Outcome<Vec<Seen>> {
        if let Some(name) = &self.session {
            let session = client.session_show(name, &Default::default()).await?;
            let stats = client.session_stats(name).await?;
            return Ok(vec![(session, stats)]);
        }
        let query = ListSessions { limit: Some(MOST), state: Some(SessionState::Active), ..ListSessions::default() };
        let sessions = client.session_list(&query).await?.items;
        let looks = sessions.into_iter().map(|session| async move {
            let stats = client.session_stats(&session.id.to_string()).await;
            // One that has just ended is no longer to be seen.
            stats.ok().map(|stats| (session, stats))
        });
        Ok(join_all(looks).await.into_iter().flatten().collect())
    }
}

fn table(now: &[Seen], before: &[Seen], between: Duration) -> String {
    let rows: Vec<_> = now
        .iter()
        .map(|(session, stats)| {
            let earlier = before.iter().find(|(other, _)| other.id == session.id).map(|(_, stats)| stats);
            let share = earlier.map(|earlier| {
                stats.host_cpu_ms.saturating_sub(earlier.host_cpu_ms) as f64 / between.as_millis().max(1) as f64 * 100.0
            });
            let of = |used: u64, all: u64| format!("{} / {}", render::size(used), render::size(all));
            vec![
                session.name.clone().unwrap_or_else(|| session.id.to_string()),
                share.map_or_else(|| "-".into(), |share| format!("{share:.0} %")),
                of(stats.memory_used_bytes, stats.memory_bytes),
                of(stats.host_memory_bytes, stats.host_memory_limit_bytes),
                of(stats.disk_used_bytes, stats.disk_bytes),
                format!("{} / {}", render::size(stats.read_bytes), render::size(stats.write_bytes)),
                stats.processes.to_string(),
            ]
        })
        .collect();
    render::table(&["SESSION", "CPU", "MEMORY", "ON THE HOST", "DISK", "READ / WRITTEN", "PROCESSES"], &rows)
}
