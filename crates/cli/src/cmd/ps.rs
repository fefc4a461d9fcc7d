//! `pepo ps`: the commands of a Session.

use clap::Args;
use pepo_api::query::ListCommands;
use pepo_api::{Command, CommandEnd, CommandRole, CommandState, Reason};

use crate::fail::Outcome;
use crate::place::Place;
use crate::render;

#[derive(Debug, Args)]
pub struct Ps {
    /// Also those that have ended
    #[arg(short, long)]
    all: bool,
    /// Print ids alone
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
}

impl Ps {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        let mut query = ListCommands { limit: Some(1000), cursor: None };
        let mut commands = Vec::new();
        loop {
            let page = client.command_list(&self.session, &query).await?;
            commands.extend(page.items.into_iter().filter(|c| self.all || c.state == CommandState::Running));
            query.cursor = page.next_cursor;
            if query.cursor.is_none() {
                break;
            }
        }
        if self.json {
            render::json(&commands)?;
        } else if self.quiet {
            for command in &commands {
                render::say(&command.id.to_string())?;
            }
        } else {
            render::out(&table(&commands, jiff::Timestamp::now()))?;
        }
        Ok(0)
    }
}

fn table(commands: &[Command], now: jiff::Timestamp) -> String {
    let rows: Vec<_> = commands
        .iter()
        .map(|c| {
            vec![
                c.id.to_string(),
                state(c),
                render::ago(c.started_at, now),
                if c.pty { "tty".into() } else { "-".into() },
                match (c.role, &c.service) {
                    (CommandRole::Command, _) => "-".into(),
                    (_, Some(service)) => service.clone(),
                    (role, None) => render::word(&role),
                },
                render::short(&render::argv(&c.argv), 60),
            ]
        })
        .collect();
    render::table(&["ID", "STATE", "STARTED", "TTY", "FOR", "COMMAND"], &rows)
}

/// How a command stands, in a word or two.
pub fn state(command: &Command) -> String {
    match &command.end {
        None => "running".into(),
        Some(end) => self::end(end),
    }
}

/// How a command ended, in a word or two.
pub fn end(end: &CommandEnd) -> String {
    match (end.reason, end.exit_code, &end.signal) {
        (Reason::Exit, Some(code), _) => format!("exited {code}"),
        (Reason::Signal, _, Some(signal)) => signal.clone(),
        (reason, _, _) => render::word(&reason).replace('_', " "),
    }
}
