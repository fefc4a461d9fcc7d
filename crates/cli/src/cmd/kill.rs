//! `pepo kill`: the end of a command, or a signal to it.

use clap::Args;
use pepo_api::{CommandId, SendSignal};

use crate::fail::Outcome;
use crate::place::Place;
use crate::render;

#[derive(Debug, Args)]
pub struct Kill {
    /// Send this signal (by name or number) instead of killing it with all it started
    #[arg(short, long, value_name = "SIG")]
    signal: Option<String>,
    /// Send the signal to every process that the command started
    #[arg(long, requires = "signal")]
    tree: bool,
    /// Print the command as JSON
    #[arg(long, conflicts_with = "signal")]
    json: bool,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
    /// The command's id
    #[arg(value_name = "CMD")]
    command: CommandId,
}

impl Kill {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        match &self.signal {
            Some(signal) => {
                let body = SendSignal { signal: signal.clone(), tree: self.tree };
                client.command_signal(&self.session, self.command, &body).await?;
            }
            None => {
                let command = client.command_kill(&self.session, self.command).await?;
                if self.json {
                    render::json(&command)?;
                }
            }
        }
        Ok(0)
    }
}
