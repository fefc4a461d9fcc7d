//! Flags that several verbs share, and what they become in a request.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use pepo_api::{
    CommandId, CommandLimits, CreateCommand, CreateSession, HostVolume, NetworkSpec, OnDisconnect, SecretText,
    ServiceSpec, Setup,
};

use crate::fail::{Failure, Outcome};
use crate::follow::Stdin;
use crate::{place, terminal, value};

/// What a Session is made of.
#[derive(Debug, Args)]
pub struct Shape {
    /// The Image, by name or id
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Processors
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub cpus: Option<u32>,
    /// Memory (a bare number is MiB; 512m, 2G)
    #[arg(long, value_name = "SIZE", value_parser = value::mebibytes)]
    pub memory: Option<u32>,
    /// Scratch disk; costs what is written
    #[arg(long, value_name = "SIZE", value_parser = value::mebibytes)]
    pub disk: Option<u32>,
    /// Network: `none`, `public`, or `allow=` and presets, names and ranges with commas between
    #[arg(long, value_name = "POLICY", value_parser = value::network)]
    pub net: Option<NetworkSpec>,
    /// A name to use in place of the id
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// A label, KEY=VALUE; may be given several times
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = value::label)]
    pub labels: Vec<(String, String)>,
    /// A directory of this machine, with your rights, read-only with `:ro` behind it; may be given several times
    #[arg(short = 'v', long = "volume", value_name = "HOSTDIR:GUESTDIR[:ro]", value_parser = value::host_volume)]
    volumes: Vec<HostVolume>,
    /// The Workspace at /workspace, by id or name (`:ro` behind it: read-only), `own` or `none`
    #[arg(long, value_name = "WSP", value_parser = value::workspace)]
    pub workspace: Option<value::Workspace>,
}

impl Shape {
    /// The request, without what the command's flags add.
    pub fn request(&self) -> CreateSession {
        CreateSession {
            image: self.image.clone(),
            cpus: self.cpus,
            memory_mib: self.memory,
            disk_mib: self.disk,
            network: self.net.clone(),
            workspace: self.workspace.clone().map(|value::Workspace(choice)| choice),
            volumes: (!self.volumes.is_empty()).then(|| self.volumes.clone()),
            name: self.name.clone(),
            labels: self.labels.iter().cloned().collect(),
            ..CreateSession::default()
        }
    }
}

/// What a Session does whenever it gets a Sandbox.
#[derive(Debug, Args)]
pub struct Begins {
    /// A command line that sets it up, before anything else runs; where it fails, there is no Session
    #[arg(long, value_name = "COMMAND")]
    setup: Option<String>,
    /// How long that may take (a bare number is seconds; 90s, 5m, 1h)
    #[arg(long, value_name = "TIME", value_parser = value::seconds, requires = "setup")]
    setup_timeout: Option<u64>,
    /// A program to keep running, with its port if it has one; may be given several times
    #[arg(long = "service", value_name = "NAME[:PORT]=COMMAND", value_parser = value::service)]
    service: Vec<ServiceSpec>,
    /// A JSON file with a list of such programs: name, command, port, ready, restart
    #[arg(long, value_name = "FILE")]
    services: Option<PathBuf>,
}

impl Begins {
    /// What sets it up.
    pub fn setup(&self) -> Option<Setup> {
        self.setup.clone().map(|command| Setup { command, timeout_seconds: self.setup_timeout })
    }

    /// All Services, where there are any: those of the file, then those of the flags.
    pub fn services(&self) -> Outcome<Option<Vec<ServiceSpec>>> {
        let mut all = Vec::new();
        if let Some(path) = &self.services {
            let told = |why: String| Failure::new(format!("--services {}: {why}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|error| told(error.to_string()))?;
            let listed: Vec<ServiceSpec> = serde_json::from_str(&text).map_err(|error| told(error.to_string()))?;
            all.extend(listed);
        }
        all.extend(self.service.iter().cloned());
        Ok((self.services.is_some() || !all.is_empty()).then_some(all))
    }
}

/// The environment.
#[derive(Debug, Args)]
pub struct Environment {
    /// A variable, NAME=VALUE; NAME alone passes on your own
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// A file of such lines
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
}

impl Environment {
    /// All of it; flags beat files, later ones earlier ones.
    pub fn variables(&self) -> Outcome<BTreeMap<String, String>> {
        let mut all = BTreeMap::new();
        for path in &self.env_file {
            let told = |why: String| Failure::new(format!("--env-file {}: {why}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|error| told(error.to_string()))?;
            all.extend(value::variables(&text, place::variable).map_err(told)?);
        }
        for text in &self.env {
            all.extend(value::variable(text, place::variable).map_err(|why| Failure::new(format!("-e: {why}")))?);
        }
        Ok(all)
    }
}

/// What only the guest may know.
#[derive(Debug, Args)]
pub struct Secrets {
    /// A secret variable: NAME takes your own, NAME=VALUE shows it to who lists processes here
    #[arg(long = "secret", value_name = "NAME")]
    secrets: Vec<String>,
    /// A secret variable from a file, as it is
    #[arg(long, value_name = "NAME=FILE")]
    secret_file: Vec<String>,
}

impl Secrets {
    /// All of them. One that is not set is a failure: nothing runs without it by mistake.
    pub fn all(&self) -> Outcome<BTreeMap<String, SecretText>> {
        let mut all = BTreeMap::new();
        for text in &self.secret_file {
            let Some((name, path)) = text.split_once('=').filter(|(name, path)| !name.is_empty() && !path.is_empty())
            else {
                return Err(Failure::new("--secret-file takes NAME=FILE"));
            };
            let value = std::fs::read_to_string(path)
                .map_err(|error| Failure::new(format!("--secret-file {name}={path}: {error}")))?;
            all.insert(name.to_owned(), SecretText::new(value));
        }
        for text in &self.secrets {
            let name = text.split_once('=').map_or(text.as_str(), |(name, _)| name);
            match value::variable(text, place::variable) {
                Ok(Some((name, value))) => all.insert(name, SecretText::new(value)),
                Ok(None) => return Err(Failure::new(format!("--secret {name}: your environment has no `{name}`"))),
                Err(_) => return Err(Failure::new("--secret takes NAME, or NAME=VALUE")),
            };
        }
        Ok(all)
    }
}

/// How a command runs.
#[derive(Debug, Args)]
pub struct How {
    /// Pass on standard input
    #[arg(short, long)]
    pub interactive: bool,
    /// Give it a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// Working directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User in the Sandbox, by name or uid
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Kill it after so long (a bare number is seconds; 90s, 5m, 1h)
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    pub timeout: Option<u64>,
    /// What its processes may have together: memory=SIZE, pids=N, cpus=N (0.5 is half of one)
    #[arg(long, value_name = "WHAT=N,...", value_parser = value::limits)]
    pub limit: Option<CommandLimits>,
    #[command(flatten)]
    pub environment: Environment,
}

impl How {
    /// Where its input comes from, refused where a terminal is asked for and none is there.
    pub fn stdin(&self) -> Outcome<Stdin> {
        let keys = terminal::interactive();
        match (self.tty, self.interactive) {
            (true, true) if !keys => Err(Failure::new("-t needs a terminal on standard input, which is none")
                .hint("leave -t away to pipe input in, or -i to give the command a terminal without input")),
            (true, true) => Ok(Stdin::Keys),
            (true, false) => Ok(Stdin::None),
            (false, true) => Ok(Stdin::Bytes),
            (false, false) => Ok(Stdin::None),
        }
    }

    /// The request for a command that this process follows, or leaves alone.
    pub fn command(&self, argv: &[OsString], on_disconnect: OnDisconnect) -> Outcome<CreateCommand> {
        Ok(CreateCommand {
            argv: Some(text(argv)?),
            id: Some(CommandId::generate()),
            cwd: self.workdir.clone(),
            env: self.environment(),
            user: self.user.clone(),
            open_stdin: self.interactive,
            pty: self.tty.then(terminal::size),
            timeout_seconds: self.timeout,
            limits: self.limit,
            wait_seconds: Some(0),
            max_output_bytes: Some(0),
            on_disconnect: Some(on_disconnect),
            ..CreateCommand::default()
        }
        .with(self.environment.variables()?))
    }

    fn environment(&self) -> BTreeMap<String, String> {
        // A terminal's programs ask what it can do.
        let own = self.tty && std::io::stdout().is_terminal();
        own.then(|| place::variable("TERM")).flatten().map(|term| ("TERM".to_owned(), term)).into_iter().collect()
    }
}

trait With {
    fn with(self, variables: BTreeMap<String, String>) -> Self;
}

impl With for CreateCommand {
    fn with(mut self, variables: BTreeMap<String, String>) -> Self {
        self.env.extend(variables);
        self
    }
}

/// The arguments as the API carries them.
pub fn text(argv: &[OsString]) -> Outcome<Vec<String>> {
    argv.iter()
        .map(|arg| {
            arg.to_str().map(str::to_owned).ok_or_else(|| {
                Failure::new(format!(
                    "the argument `{}` is not UTF-8, and only UTF-8 can be passed on",
                    crate::escape::bytes(arg.as_encoded_bytes())
                ))
            })
        })
        .collect()
}
