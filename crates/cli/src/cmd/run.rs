//! `pepo run`: one command in a Session of its own. Make, wait, copy in, run, copy out, end; an interrupt at any of these
//! steps goes to the last one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use pepo_api::client::Client;
use pepo_api::query::ShowSession;
use pepo_api::{CommandId, OnDisconnect, Session, SessionState, UpdateSession};

use super::flags::{How, Shape};
use crate::fail::{self, Failure, Outcome, note};
use crate::follow::{self, Detach, Ending, Outputs};
use crate::interrupt::{Caught, Interrupts};
use crate::place::Place;
use crate::transfer::{self, Peer};
use crate::value::{self, Copy};
use crate::{escape, launch, render};

/// What a Session of ours stays after its caller died: it copies in and out while no command runs.
const KEPT: u64 = 60;
/// A start that takes longer is mentioned.
const PATIENT: Duration = Duration::from_secs(10);
/// How long the end of a Session is waited for.
const GRACE: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
#[command(
    after_help = "Example: pepo run --copy . -- python3 agent.py\n\nExit code: the command's; 124 timeout, 125 Pepo failed, 126 not executable, 127 not found, 128+N signal N"
)]
pub struct Run {
    #[command(flatten)]
    shape: Shape,
    #[command(flatten)]
    how: How,
    /// Copy a file, or what is in a directory, into the Sandbox before the start
    #[arg(long, value_name = "SRC[:DST]", value_parser = value::copy)]
    copy: Vec<Copy>,
    /// Copy a file or directory back here after the end, also after a failure
    #[arg(long, value_name = "PATH", conflicts_with = "detach")]
    out: Vec<String>,
    /// Leave it running and print the Session's id
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    detach: bool,
    /// How long the Session stays after the command; without this it ends with it
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    keep_alive: Option<u64>,
    /// Print the outcome and the output as JSON when the command has ended
    #[arg(long, conflicts_with_all = ["interactive", "tty", "detach"])]
    json: bool,
    /// With -d: print nothing but the id
    #[arg(short, long)]
    quiet: bool,
    /// The command and its arguments
    #[arg(required = true, value_name = "CMD", trailing_var_arg = true)]
    pub argv: Vec<OsString>,
}

/// How the middle of a run ended.
enum Middle {
    Code(u8),
    Interrupted(Caught),
}

impl Run {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        // What is wrong with the request is said before anything is started.
        let on_disconnect = if self.detach { OnDisconnect::Keep } else { OnDisconnect::Kill };
        let mut command = self.how.command(&self.argv, on_disconnect)?;
        command.open_stdin &= !self.json;
        let stdin = self.how.stdin()?;
        for copy in &self.copy {
            std::fs::symlink_metadata(&copy.source)
                .map_err(|error| Failure::new(format!("--copy {}: {error}", copy.source.display())))?;
        }
        let mut interrupts = Interrupts::new()?;
        let client = match interrupts.unless(launch::ensure(place, "run")).await {
            Ok(client) => client?,
            Err(caught) => return Ok(caught.exit_code()),
        };
        let mut request = self.shape.request();
        request.keep_alive_seconds = Some(self.keep_alive.unwrap_or(0).max(KEPT));
        let id = command.id.unwrap_or_else(CommandId::generate);

        // Not given up half-way: what was made must be known to be ended.
        let session = client.session_create(&request).await?;
        let name = session.id.to_string();
        let middle = async {
            match interrupts.unless(self.prepare(&client, &session)).await {
                Ok(ready) => ready?,
                Err(caught) => return Ok(Middle::Interrupted(caught)),
            }
            match interrupts.unless(client.command_create(&name, &command)).await {
                Ok(created) => drop(created?),
                Err(caught) => return Ok(Middle::Interrupted(caught)),
            }
            if self.detach {
                return Ok(Middle::Code(0));
            }
            if self.json {
                return super::exec::json_result(&client, &name, id, &mut interrupts).await.map(Middle::Code);
            }
            let attached = client.command_attach(&name, id, 0);
            let ending = follow::follow(attached, stdin, Detach::Never, Outputs::own()?, &mut interrupts).await?;
            let code = match ending {
                Ending::Exited(command) => follow::exit_code(&command, Some(session.memory_mib)),
                Ending::Failed(error) => {
                    let failure = Failure::from(error);
                    failure.show();
                    failure.code.unwrap_or(125)
                }
                Ending::Impatient(caught) => return Ok(Middle::Interrupted(caught)),
                other => follow::code_of(&other).unwrap_or(125),
            };
            match interrupts.unless(self.copy_out(&client, &name, code)).await {
                Ok(code) => Ok(Middle::Code(code)),
                Err(caught) => Ok(Middle::Interrupted(caught)),
            }
        }
        .await;

        if self.detach && matches!(middle, Ok(Middle::Code(_))) {
            let update =
                UpdateSession { keep_alive_seconds: Some(self.keep_alive.unwrap_or(0)), ..UpdateSession::default() };
            client.session_update(&name, &update).await?;
            if self.quiet {
                render::say(&name)?;
            } else {
                render::out(&format!("{name}\n"))?;
                note(format!("runs as {id}; `pepo logs -f {name}` follows it"));
            }
            return Ok(0);
        }
        if self.keep_alive.is_some_and(|s| s > 0) && matches!(middle, Ok(Middle::Code(_))) {
            note(format!("Session {name} stays (--keep-alive); `pepo session rm {name}` ends it"));
            return middle.map(|middle| match middle {
                Middle::Code(code) => code,
                Middle::Interrupted(caught) => caught.exit_code(),
            });
        }
        let ended = end(&client, &name, &mut interrupts).await;
        let code = match middle? {
            Middle::Code(code) => code,
            Middle::Interrupted(caught) => caught.exit_code(),
        };
        match ended {
            Ok(()) => Ok(code),
            Err(failure) => {
                failure.doing(format!("ending Session {name}")).show();
                Ok(if code == 0 { 125 } else { code })
            }
        }
    }

    async fn prepare(&self, client: &Client, session: &Session) -> Outcome<()> {
        wait_active(client, session).await?;
        let name = session.id.to_string();
        let peer = Peer { client, session: &name, user: self.how.user.as_deref() };
        let home = self.how.workdir.as_deref().unwrap_or("/home/agent");
        for copy in &self.copy {
            let is_directory = copy.source.is_dir() && !is_link(&copy.source);
            let copied = match (&copy.destination, is_directory) {
                // A directory's contents go there, whether it exists or not.
                (destination, true) => {
                    let directory = copy.source.clone();
                    let source = crate::pack::Source::Contents { directory, prefix: PathBuf::new() };
                    peer.send(source, destination.as_deref().unwrap_or(home)).await
                }
                (None, false) => transfer::copy_in(&peer, &copy.source, &format!("{home}/")).await,
                (Some(destination), false) => transfer::copy_in(&peer, &copy.source, destination).await,
            };
            copied.map_err(|failure| failure.doing(format!("--copy {}", copy.source.display())))?;
        }
        Ok(())
    }

    /// Copies back what was asked for; a failure there is the run's, unless the command's own comes first.
    async fn copy_out(&self, client: &Client, session: &str, code: u8) -> u8 {
        let peer = Peer { client, session, user: self.how.user.as_deref() };
        let mut result = code;
        for path in &self.out {
            let full = match &self.how.workdir {
                Some(workdir) if !path.starts_with('/') => format!("{}/{path}", workdir.trim_end_matches('/')),
                _ => path.clone(),
            };
            match transfer::copy_out(&peer, &full, Path::new(".")).await {
                Ok(report) => transfer::tell(&report),
                Err(failure) => {
                    failure.doing(format!("--out {}", escape::line(path))).show();
                    if result == 0 {
                        result = 125;
                    }
                }
            }
        }
        result
    }
}

fn is_link(path: &Path) -> bool {
    // `dir/` and `dir/.` mean what the link leads to.
    let bytes = path.as_os_str().as_encoded_bytes();
    !bytes.ends_with(b"/") && !bytes.ends_with(b"/.") && path.is_symlink()
}

/// Waits until the Session takes commands.
pub async fn wait_active(client: &Client, session: &Session) -> Outcome<()> {
    let name = session.id.to_string();
    let mut now = session.clone();
    let begun = tokio::time::Instant::now();
    let mut told = false;
    loop {
        match now.state {
            SessionState::Active => return Ok(()),
            SessionState::Terminating | SessionState::Terminated => return Err(not_started(&now)),
            _ => {}
        }
        if !told && begun.elapsed() >= PATIENT {
            told = true;
            note(format!("still waiting: Session {name} is {}", render::word(&now.state)));
        }
        let wait = if told { 60 } else { PATIENT.as_secs() };
        let query = ShowSession { after: Some(now.generation), wait_seconds: Some(wait) };
        now = client.session_show(&name, &query).await?;
    }
}

fn not_started(session: &Session) -> Failure {
    let mut failure = Failure::new(format!("Session {} did not start", session.id));
    if let Some(ended) = &session.ended {
        failure = Failure::new(format!("Session {} did not start: {}", session.id, fail::reason(ended.reason)))
            .console(&ended.last_console_lines);
    }
    failure.hint("`pepo doctor` looks at this host")
}

/// Ends the Session and waits until nothing of it is left. A further interrupt ends the waiting, not the ending.
pub async fn end(client: &Client, session: &str, interrupts: &mut Interrupts) -> Outcome<()> {
    let ending = async {
        let mut now = client.session_terminate(session).await?;
        while now.state != SessionState::Terminated {
            let query = ShowSession { after: Some(now.generation), wait_seconds: Some(30) };
            now = client.session_show(session, &query).await?;
        }
        Outcome::Ok(())
    };
    match interrupts.unless(tokio::time::timeout(GRACE, ending)).await {
        Ok(Ok(ended)) => ended,
        Ok(Err(_)) => Err(Failure::new(format!("it takes longer than {} s; the daemon goes on", GRACE.as_secs()))),
        Err(_) => Err(Failure::new("not waited for; the daemon goes on")),
    }
}
