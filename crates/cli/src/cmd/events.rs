//! `pepo events`: what happened, or who asked for what.

use clap::Args;
use pepo_api::client::{Client, ClientError};
use pepo_api::query::ListEvents;
use pepo_api::{Event, FeedEvent};

use crate::fail::{self, Outcome};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::render;

/// How long a daemon that is away is waited for.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

#[derive(Debug, Args)]
#[command(
    after_help = "Examples: pepo events -f --type 'session.*'\n          pepo events --session web -n 20\n          pepo events --audit --json"
)]
pub struct Events {
    /// Stay and show what comes
    #[arg(short, long)]
    follow: bool,
    /// Who asked for what, instead of what happened
    #[arg(long)]
    audit: bool,
    /// Only those of this type (session.ended), or all of a noun (session.*); may be given several times
    #[arg(long = "type", value_name = "TYPE")]
    kinds: Vec<String>,
    /// Only those with this label; may be given several times
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    labels: Vec<String>,
    /// Only those of this Session, by id or name
    #[arg(long, value_name = "SES")]
    session: Option<String>,
    /// So many of the last ones; with -f none where absent
    #[arg(short = 'n', long = "last", value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    last: Option<u32>,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

impl Events {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        let mut interrupts = Interrupts::new()?;
        let working = async {
            let last = self.last.unwrap_or(if self.follow { 0 } else { 100 });
            let events = self.latest(&client, last as usize).await?;
            events.iter().rev().try_for_each(|event| self.show(event))?;
            if self.follow {
                self.stay(&client, events.first().map(|event| event.id)).await?;
            }
            Ok(0)
        };
        match interrupts.unless(working).await {
            Ok(done) => done,
            Err(caught) => Ok(caught.exit_code()),
        }
    }

    fn query(&self) -> ListEvents {
        ListEvents {
            kind: self.kinds.clone(),
            label: self.labels.clone(),
            session: self.session.clone(),
            ..ListEvents::default()
        }
    }

    /// The last ones, newest first.
    async fn latest(&self, client: &Client, most: usize) -> Outcome<Vec<Event>> {
        let mut events = Vec::new();
        let mut query = self.query();
        while events.len() < most {
            query.limit = Some((most - events.len()).min(1000) as u32);
            let page = match self.audit {
                true => client.audit_list(&query).await?,
                false => client.event_list(&query).await?,
            };
            events.extend(page.items);
            query.cursor = page.next_cursor;
            if query.cursor.is_none() {
                break;
            }
        }
        Ok(events)
    }

    /// Shows what comes, also across a restart of the daemon.
    async fn stay(&self, client: &Client, mut after: Option<u64>) -> Outcome<()> {
        let mut lost: Option<std::time::Instant> = None;
        loop {
            let query = ListEvents { after, ..self.query() };
            let opened = match self.audit {
                true => client.audit_follow(&query).await,
                false => client.event_follow(&query).await,
            };
            let mut stream = match (opened, lost) {
                (Ok(stream), _) => stream,
                (Err(error), Some(since)) if passes(&error) && since.elapsed() < PATIENCE => {
                    tokio::time::sleep(std::time::Duration::from_millis(250)).await;
                    continue;
                }
                (Err(error), _) => return Err(error.into()),
            };
            lost = None;
            loop {
                match stream.next().await {
                    Ok(Some(FeedEvent::Event(event))) => {
                        after = Some(event.id);
                        self.show(&event)?;
                    }
                    Ok(Some(FeedEvent::Gap { after: seen, from })) => {
                        after = Some(from.saturating_sub(1));
                        fail::note(format!("what lay between {seen} and {from} is no longer kept"));
                    }
                    Ok(None) => break,
                    Err(error) if passes(&error) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            lost.get_or_insert_with(std::time::Instant::now);
        }
    }

    fn show(&self, event: &Event) -> Outcome<()> {
        if self.json { render::json_line(event) } else { render::say(&line(event)) }
    }
}

fn passes(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Lost(_)
            | ClientError::NoDaemon { .. }
            | ClientError::Transport { .. }
            | ClientError::Silent { .. }
    )
}

fn line(event: &Event) -> String {
    let mut text = format!("{}  {:<22} {:<10}", render::time(event.at), event.kind, event.outcome);
    let ids = [
        event.session_id.map(|id| id.to_string()),
        event.command_id.map(|id| id.to_string()),
        event.sandbox_id.map(|id| id.to_string()),
    ];
    for id in ids.into_iter().flatten() {
        text.push_str(&format!(" {id}"));
    }
    if event.actor != "pepo" {
        text.push_str(&format!(" by {}", event.actor));
    }
    for (name, value) in &event.detail {
        match value {
            serde_json::Value::String(value) => text.push_str(&format!(" {name}={value}")),
            serde_json::Value::Null => {}
            value => text.push_str(&format!(" {name}={value}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_it_all() {
        let event: Event = serde_json::from_value(serde_json::json!({
            "id": 7, "at": "2026-03-01T10:00:00Z", "type": "session.terminated", "actor": "uid:0", "outcome": "idle",
            "session_id": format!("ses_{}", "0".repeat(32)), "detail": {"activation": 2, "why": "x\u{1b}", "none": null}
        }))
        .unwrap();
        assert_eq!(
            line(&event),
            format!(
                "2026-03-01 10:00:00 UTC  session.terminated     idle       ses_{} by uid:0 activation=2 why=x\u{1b}",
                "0".repeat(32)
            )
        );
    }
}
