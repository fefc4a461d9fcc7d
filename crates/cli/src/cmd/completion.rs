//! `pepo completion SHELL`.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::fail::Outcome;
use crate::render;

#[derive(Debug, Args)]
pub struct Completion {
    /// bash, zsh, fish, elvish or powershell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

impl Completion {
    pub fn run(&self) -> Outcome<u8> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut super::Cli::command(), "pepo", &mut script);
        render::out(&String::from_utf8_lossy(&script))?;
        Ok(0)
    }
}
