//! `pepo shell`: a login shell with a terminal.

use clap::Args;
use pepo_api::{CommandId, CreateCommand, OnDisconnect};

use super::flags::Environment;
use crate::fail::{Failure, Outcome};
use crate::follow::{self, Detach, Followed, Outputs, Stdin};
use crate::interrupt::Interrupts;
use crate::place::{Place, variable};
use crate::terminal;

#[derive(Debug, Args)]
pub struct Shell {
    /// Working directory
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// User in the Sandbox, by name or uid
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    #[command(flatten)]
    environment: Environment,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
}

impl Shell {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        if !terminal::interactive() {
            return Err(Failure::new("standard input is no terminal")
                .hint(format!("`pepo exec -i {} -- bash` reads commands from a pipe", self.session)));
        }
        let id = CommandId::generate();
        let mut env = self.environment.variables()?;
        env.entry("TERM".into()).or_insert_with(|| variable("TERM").unwrap_or_else(|| "xterm".into()));
        let command = CreateCommand {
            argv: Some(vec!["/bin/bash".into(), "-l".into()]),
            id: Some(id),
            cwd: self.workdir.clone(),
            user: self.user.clone(),
            env,
            open_stdin: true,
            pty: Some(terminal::size()),
            wait_seconds: Some(0),
            max_output_bytes: Some(0),
            on_disconnect: Some(OnDisconnect::Kill),
            ..CreateCommand::default()
        };
        let client = place.client();
        let mut interrupts = Interrupts::new()?;
        match interrupts.unless(client.command_create(&self.session, &command)).await {
            Ok(created) => drop(created?),
            Err(caught) => return Ok(caught.exit_code()),
        }
        let attached = client.command_attach(&self.session, id, 0);
        let followed = Followed { client: client.clone(), session: self.session.clone(), id };
        let ending =
            follow::follow(Some(&followed), attached, Stdin::Keys, Detach::Never, Outputs::own()?, &mut interrupts)
                .await?;
        super::exec::finish(&client, &self.session, id, ending).await
    }
}
