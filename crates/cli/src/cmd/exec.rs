//! `pepo exec`: a command in a Session that is there.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use pepo_api::client::Client;
use pepo_api::query::{ShowCommand, ShowSession};
use pepo_api::{Command, CommandId, CommandState, OnDisconnect, Reason};

use super::flags::How;
use crate::fail::{Failure, Outcome, console};
use crate::follow::{self, Detach, Ending, Followed, Outputs, Stdin};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::render;

#[derive(Debug, Args)]
#[command(override_usage = "pepo exec [OPTIONS] SES [--] CMD [ARG]...")]
pub struct Exec {
    #[command(flatten)]
    how: How,
    /// Leave it running and print its id
    #[arg(short, long)]
    detach: bool,
    /// Print the outcome and the output as JSON when the command has ended
    #[arg(long, conflicts_with_all = ["interactive", "tty", "detach"])]
    json: bool,
    /// The id of the command, `cmd_` and 32 hex digits of a UUIDv7: the same again joins it and never runs twice
    #[arg(long, value_name = "CMD_ID")]
    id: Option<CommandId>,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
    /// The command and its arguments
    #[arg(required = true, value_name = "CMD", trailing_var_arg = true)]
    pub argv: Vec<OsString>,
}

impl Exec {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let on_disconnect = if self.detach { OnDisconnect::Keep } else { OnDisconnect::Kill };
        let mut command = self.how.command(&self.argv, on_disconnect)?;
        let stdin = if self.detach { Stdin::None } else { self.how.stdin()? };
        if self.id.is_some() {
            command.id = self.id;
        }
        let id = command.id.unwrap_or_else(CommandId::generate);
        let client = place.client();
        let mut interrupts = Interrupts::new()?;
        match interrupts.unless(client.command_create(&self.session, &command)).await {
            Ok(created) => drop(created?),
            Err(caught) => {
                // It may have begun all the same.
                kill(&client, &self.session, id).await;
                return Ok(caught.exit_code());
            }
        }
        if self.detach {
            render::say(&id.to_string())?;
            return Ok(0);
        }
        if self.json {
            return json_result(&client, &self.session, id, &mut interrupts).await;
        }
        let attached = client.command_attach(&self.session, id, 0);
        let followed = Followed { client: client.clone(), session: self.session.clone(), id };
        let ending =
            follow::follow(Some(&followed), attached, stdin, Detach::Never, Outputs::own()?, &mut interrupts).await?;
        finish(&client, &self.session, id, ending).await
    }
}

/// The exit code for an ending; a command of ours that has not ended is killed.
pub async fn finish(client: &Client, session: &str, id: CommandId, ending: Ending) -> Outcome<u8> {
    match ending {
        Ending::Exited(command) => {
            explain(client, session, &command).await;
            let memory = client.session_show(session, &ShowSession::default()).await.ok().map(|s| s.memory_mib);
            Ok(follow::exit_code(&command, memory))
        }
        Ending::Failed(error) => Err(Failure::from(error)),
        Ending::Detached => Ok(0),
        other => {
            kill(client, session, id).await;
            Ok(follow::code_of(&other).unwrap_or(125))
        }
    }
}

/// Shows the end of the console where the machine itself went down: it may say why.
pub async fn explain(client: &Client, session: &str, command: &Command) {
    let Some(end) = &command.end else { return };
    if !matches!(end.reason, Reason::GuestPanic | Reason::GuestInitDied | Reason::GuestSilent | Reason::VmmExit) {
        return;
    }
    // Best effort, and the Session knows a moment after its command.
    let ended = async {
        let mut query = ShowSession::default();
        loop {
            let found = client.session_show(session, &query).await.ok()?;
            if found.ended.is_some() {
                return found.ended;
            }
            query = ShowSession { after: Some(found.generation), wait_seconds: Some(5) };
        }
    };
    if let Ok(Some(ended)) = tokio::time::timeout(Duration::from_secs(5), ended).await {
        console(&ended.last_console_lines);
    }
}

async fn kill(client: &Client, session: &str, id: CommandId) {
    // Best effort: closing the attachment kills it too.
    let _ = tokio::time::timeout(Duration::from_secs(5), client.command_kill(session, id)).await;
}

/// Waits for the end and prints the command with its output as JSON.
pub async fn json_result(client: &Client, session: &str, id: CommandId, interrupts: &mut Interrupts) -> Outcome<u8> {
    let query = ShowCommand { wait_seconds: Some(20), max_output_bytes: Some(1 << 20), ..ShowCommand::default() };
    let output = loop {
        match interrupts.unless(client.command_show(session, id, &query)).await {
            Ok(output) => {
                let output = output?;
                if output.command.state == CommandState::Exited {
                    break output;
                }
            }
            Err(caught) => {
                kill(client, session, id).await;
                return Ok(caught.exit_code());
            }
        }
    };
    render::json(&output)?;
    Ok(follow::exit_code(&output.command, None))
}
