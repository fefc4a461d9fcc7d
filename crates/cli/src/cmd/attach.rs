//! `pepo attach`: joining a command that runs.

use clap::Args;
use pepo_api::CommandId;
use pepo_api::query::ShowCommand;

use crate::fail::Outcome;
use crate::follow::{self, Detach, Followed, Outputs, Stdin};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::terminal;

#[derive(Debug, Args)]
#[command(after_help = "With a terminal, Ctrl-P Ctrl-Q leaves the command alone.")]
pub struct Attach {
    /// Only look: pass nothing in, no signals either
    #[arg(long)]
    no_stdin: bool,
    /// First show what it wrote before, as far as it is kept
    #[arg(long)]
    replay: bool,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
    /// The command's id
    #[arg(value_name = "CMD")]
    command: CommandId,
}

impl Attach {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        let query = ShowCommand { max_output_bytes: Some(0), ..ShowCommand::default() };
        let now = client.command_show(&self.session, self.command, &query).await?;
        let stdin = match (self.no_stdin, now.command.pty) {
            (true, _) => Stdin::None,
            (false, true) if terminal::interactive() => Stdin::Keys,
            (false, _) => Stdin::Bytes,
        };
        let offset = if self.replay { 0 } else { now.command.stdout_bytes + now.command.stderr_bytes };
        let mut interrupts = Interrupts::new()?;
        let attached = client.command_attach(&self.session, self.command, offset);
        if stdin == Stdin::Keys {
            let size = terminal::size();
            let resize = pepo_api::client::Input::Resize { cols: size.cols, rows: size.rows };
            attached.input().send(resize).await;
        }
        let detach = if stdin == Stdin::Keys { Detach::ByKeys } else { Detach::Never };
        let followed = Followed { client: client.clone(), session: self.session.clone(), id: self.command };
        let ending = follow::follow(
            (!self.no_stdin).then_some(&followed),
            attached,
            stdin,
            detach,
            Outputs::own()?,
            &mut interrupts,
        )
        .await?;
        match ending {
            // It is not ours to kill.
            follow::Ending::Impatient(caught) => Ok(caught.exit_code()),
            follow::Ending::ClosedPipe => Ok(crate::fail::CLOSED_PIPE),
            other => super::exec::finish(&client, &self.session, self.command, other).await,
        }
    }
}
