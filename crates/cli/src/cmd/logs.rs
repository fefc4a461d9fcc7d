//! `pepo logs`: what a command wrote, as it is; the console of a Session, made harmless.

use std::io::Write;

use clap::Args;
use pepo_api::client::Client;
use pepo_api::query::{ListCommands, ShowCommand, ShowConsole, ShowServices};
use pepo_api::{CommandId, StreamEvent};

use crate::escape;
use crate::fail::{Failure, Outcome, note};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::render;

#[derive(Debug, Args)]
pub struct Logs {
    /// Stay and show what comes
    #[arg(short, long)]
    follow: bool,
    /// The guest's console instead (operator only); a guest can write anything there
    #[arg(long, conflicts_with_all = ["command", "json"])]
    console: bool,
    /// Print one JSON event a line
    #[arg(long)]
    json: bool,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
    /// The command's id, or a Service's name; the newest command where absent
    #[arg(value_name = "CMD")]
    command: Option<String>,
}

impl Logs {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let mut interrupts = Interrupts::new()?;
        let showing = async {
            match self.console {
                true => self.console(place).await,
                false => self.command(place).await,
            }
        };
        match interrupts.unless(showing).await {
            Ok(done) => done.map(|()| 0),
            Err(caught) => Ok(caught.exit_code()),
        }
    }

    async fn console(&self, place: Place) -> Outcome<()> {
        let query = ShowConsole { follow: self.follow.then_some(true) };
        let mut bytes = place.client().session_console(&self.session, &query).await?;
        let mut clean = escape::Stream::default();
        while let Some(piece) = bytes.next().await? {
            render::out(&clean.feed(&piece))?;
        }
        render::out(&clean.finish())
    }

    /// The last run of that Service.
    async fn service(&self, client: &Client, name: &str) -> Outcome<CommandId> {
        let services = client.session_services(&self.session, &ShowServices::default()).await?.items;
        let service = services.iter().find(|service| service.spec.name == name);
        let service = service.ok_or_else(|| {
            Failure::new(format!("Session {} has neither a command nor a service `{name}`", self.session))
                .hint("`pepo ps -a` lists its commands, `pepo session show` its services")
        })?;
        if let Some(command) = service.command_id {
            return Ok(command);
        }
        let query = ListCommands { limit: Some(1000), cursor: None };
        let listed = client.command_list(&self.session, &query).await?.items;
        let last = listed.into_iter().find(|command| command.service.as_deref() == Some(name));
        last.map(|command| command.id).ok_or_else(|| Failure::new(format!("service `{name}` has not run yet")))
    }

    async fn command(&self, place: Place) -> Outcome<()> {
        let client = place.client();
        let command = match &self.command {
            Some(text) => match text.parse::<CommandId>() {
                Ok(command) => command,
                Err(error) if text.starts_with("cmd_") => return Err(Failure::new(error)),
                Err(_) => self.service(&client, text).await?,
            },
            None => {
                let query = ListCommands { limit: Some(1), cursor: None };
                let newest = client.command_list(&self.session, &query).await?.items.into_iter().next();
                newest.ok_or_else(|| Failure::new(format!("no command has run in Session {}", self.session)))?.id
            }
        };
        let query = ShowCommand { follow: (!self.follow).then_some(false), ..ShowCommand::default() };
        let mut events = client.command_events(&self.session, command, query);
        let (mut stdout, mut stderr) = (std::io::stdout(), std::io::stderr());
        while let Some(event) = events.next().await? {
            if self.json {
                render::json_line(&event)?;
                continue;
            }
            match event {
                StreamEvent::Stdout { data, .. } => {
                    stdout.write_all(&data.into_bytes())?;
                    stdout.flush()?;
                }
                StreamEvent::Stderr { data, .. } => stderr.write_all(&data.into_bytes())?,
                StreamEvent::Gap { from, to } => note(format!("{} bytes are no longer kept", to.saturating_sub(from))),
                StreamEvent::Start { .. } | StreamEvent::Exit { .. } | StreamEvent::Error { .. } => {}
            }
        }
        Ok(())
    }
}
