//! The verbs: what each takes, and the one place that picks which runs.

mod app;
mod attach;
mod backup;
mod completion;
mod config;
mod contexts;
mod cp;
mod doctor;
mod down;
mod drain;
mod events;
mod exec;
mod flags;
mod forward;
mod image;
mod key;
mod kill;
mod logs;
mod ps;
mod run;
mod session;
mod setup;
mod shell;
mod stats;
mod sweep;
mod up;
mod url;
mod usage;
mod version;
mod workspace;

use std::ffi::OsString;

use clap::{Parser, Subcommand};

use crate::fail::Outcome;
use crate::place::{self, Place};

/// Runs AI agents and other untrusted programs, each Session in a machine of its own.
#[derive(Debug, Parser)]
#[command(name = "pepo", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// Another Pepo than this machine's, by its name in ~/.config/pepo/config.toml
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// The App it is for, by name or id: on the machine that runs Pepo; a key has its own
    #[arg(long = "app", global = true, value_name = "NAME")]
    of_app: Option<String>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run one command in a Session of its own, and end both
    Run(Box<run::Run>),
    /// Run daemon and edge in the foreground
    Up(up::Up),
    /// End the daemon and every Session that runs; those that come back stay idle
    Down(down::Down),
    /// Take nothing new, and let what runs finish
    Drain(drain::Drain),
    /// Make, look at, change and end Sessions
    #[command(subcommand, visible_alias = "sessions")]
    Session(session::Session),
    /// Run a command in a Session
    Exec(Box<exec::Exec>),
    /// Join a command that runs
    Attach(attach::Attach),
    /// Kill a command with all it started, or send it a signal
    Kill(kill::Kill),
    /// List the commands of a Session
    Ps(ps::Ps),
    /// Open a shell in a Session
    Shell(shell::Shell),
    /// Show what a command wrote, or a Session's console
    Logs(logs::Logs),
    /// Copy files between here and a Session
    Cp(cp::Cp),
    /// Make a port of a Session one of this machine's
    PortForward(forward::Forward),
    /// Print the address at which a port of a Session answers over HTTP
    Url(url::Url),
    /// Make, look at, change and remove Workspaces
    #[command(subcommand, visible_alias = "workspaces")]
    Workspace(workspace::Workspace),
    /// Build, look at and remove Images
    #[command(subcommand, visible_alias = "images")]
    Image(image::Image),
    /// Make, look at, change and remove Apps
    #[command(subcommand, visible_alias = "apps")]
    App(Box<app::App>),
    /// Make, look at and revoke an App's keys
    #[command(subcommand, visible_alias = "keys")]
    Key(key::Key),
    /// Show what happened, or who asked for what
    Events(events::Events),
    /// Show what Sessions use now
    Stats(stats::Stats),
    /// Show what was used, by App, Session, day or label
    Usage(usage::Usage),
    /// Look at this host: what works, what does not, what to do
    Doctor(doctor::Doctor),
    /// Install what this host lacks to run guests on its own processor
    Setup(setup::Setup),
    /// Remove what dead Sessions and daemons left on this host
    Sweep(sweep::Sweep),
    /// Save what cannot be made again, and bring it back
    #[command(subcommand)]
    Backup(backup::Backup),
    /// Check and show settings
    #[command(subcommand)]
    Config(config::Config),
    /// Show which Pepo this is
    Version(version::Version),
    /// Give Pepos elsewhere names
    #[command(subcommand, visible_alias = "contexts")]
    Context(contexts::Context),
    /// Print a completion script for a shell
    Completion(completion::Completion),
    /// Start a program in a terminal session of its own
    #[command(hide = true)]
    Detached {
        /// The program and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
}

impl Cli {
    /// The exit code for a failure that has none of its own: commands in a Session keep the low ones for themselves.
    pub fn failure_code(&self) -> u8 {
        match self.verb {
            Verb::Run(_) | Verb::Exec(_) | Verb::Attach(_) | Verb::Shell(_) => 125,
            _ => 1,
        }
    }

    /// Does what was asked; gives the exit code.
    pub async fn run(self) -> Outcome<u8> {
        let place = || -> Outcome<Place> { place::find(self.context.as_deref(), self.of_app.as_deref()) };
        match self.verb {
            Verb::Run(verb) => Box::pin(verb.run(place()?)).await,
            Verb::Up(verb) => verb.run(place()?).await,
            Verb::Down(verb) => verb.run(place()?).await,
            Verb::Drain(verb) => verb.run(place()?).await,
            Verb::Session(verb) => verb.run(place()?).await,
            Verb::Exec(verb) => verb.run(place()?).await,
            Verb::Attach(verb) => verb.run(place()?).await,
            Verb::Kill(verb) => verb.run(place()?).await,
            Verb::Ps(verb) => verb.run(place()?).await,
            Verb::Shell(verb) => verb.run(place()?).await,
            Verb::Logs(verb) => verb.run(place()?).await,
            Verb::Cp(verb) => verb.run(place()?).await,
            Verb::PortForward(verb) => verb.run(place()?).await,
            Verb::Url(verb) => verb.run(place()?).await,
            Verb::Workspace(verb) => verb.run(place()?).await,
            Verb::Image(verb) => verb.run(place()?).await,
            Verb::App(verb) => verb.run(place()?).await,
            Verb::Key(verb) => verb.run(place()?).await,
            Verb::Events(verb) => verb.run(place()?).await,
            Verb::Stats(verb) => verb.run(place()?).await,
            Verb::Usage(verb) => verb.run(place()?, self.of_app.as_deref()).await,
            Verb::Doctor(verb) => verb.run(place()?).await,
            Verb::Setup(verb) => verb.run(place()?).await,
            Verb::Sweep(verb) => verb.run(place()?).await,
            Verb::Backup(verb) => verb.run(place()?).await,
            Verb::Config(verb) => verb.run(place()?).await,
            Verb::Version(verb) => verb.run(place()?).await,
            Verb::Context(verb) => verb.run(),
            Verb::Completion(verb) => verb.run(),
            Verb::Detached { command } => Err(crate::launch::detached(&command)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_flags_are_consistent() {
        Cli::command().debug_assert();
    }

    fn argv(line: &[&str]) -> Vec<OsString> {
        match Cli::try_parse_from(line).unwrap().verb {
            Verb::Run(run) => run.argv,
            Verb::Exec(exec) => exec.argv,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_command_line_is_left_untouched() {
        let cases: [(&[&str], &[&str]); 7] = [
            (&["pepo", "run", "--", "python3", "-c", "print('größe  x')"], &["python3", "-c", "print('größe  x')"]),
            (&["pepo", "run", "echo", "-n", "--image", "x", "--", "y"], &["echo", "-n", "--image", "x", "--", "y"]),
            (&["pepo", "run", "--image", "a", "--", "echo", "--", "--help"], &["echo", "--", "--help"]),
            (&["pepo", "run", "-i", "--", "-x", ""], &["-x", ""]),
            (&["pepo", "exec", "web", "--", "ls", "-la"], &["ls", "-la"]),
            (&["pepo", "exec", "-w", "/tmp", "web", "ls", "-la", "--json"], &["ls", "-la", "--json"]),
            (&["pepo", "exec", "web", "--", "sh", "--", "-c"], &["sh", "--", "-c"]),
        ];
        for (line, expected) in cases {
            assert_eq!(argv(line), expected, "{line:?}");
        }
    }

    fn refusal(line: &[&str]) -> String {
        Cli::try_parse_from(line).unwrap_err().to_string()
    }

    #[test]
    fn values_that_are_wrong_are_told_by_flag() {
        let text = refusal(&["pepo", "run", "--memory", "lots", "--", "true"]);
        assert!(text.contains("invalid value 'lots' for '--memory <SIZE>'"), "{text}");
        assert!(text.contains("`lots` is not a size: a bare number is MiB, else 512m, 2G, 1T"), "{text}");
        let net = refusal(&["pepo", "run", "--net", "lan", "--", "true"]);
        assert!(net.contains("`lan` is not a network policy"), "{net}");
        let volume = refusal(&["pepo", "run", "-v", "/x", "--", "true"]);
        assert!(volume.contains("`/x` is not HOSTDIR:/GUESTDIR or HOSTDIR:/GUESTDIR:ro"), "{volume}");
        assert!(refusal(&["pepo", "run", "--imgae", "x", "--", "true"]).contains("'--imgae'"), "no command by mistake");
        assert!(refusal(&["pepo", "run"]).contains("<CMD>..."), "a command is needed");
        assert!(refusal(&["pepo", "run", "-d", "--out", "x", "--", "true"]).contains("cannot be used with"));
    }
}
