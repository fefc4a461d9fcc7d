//! `pepo run`: one command in a Session of its own. Make, wait, copy in, run, copy out, end; an interrupt at any of these
//! steps goes to the last one. With `--key` the Session is the key's, which stays: others may use it too, so nothing ends it
//! here, and the command ends with its caller.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use pepo_api::client::Client;
use pepo_api::query::ShowSession;
use pepo_api::{CommandId, CreateCommand, OnDisconnect, Session, SessionState, UpdateSession};

use super::flags::{How, Secrets, Shape};
use crate::fail::{self, Failure, Notes, Outcome, note};
use crate::follow::{self, Detach, Ending, Followed, Outputs, Stdin};
use crate::interrupt::{Caught, Interrupts};
use crate::place::Place;
use crate::transfer::{self, Holder, Peer};
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
    override_usage = "pepo run [OPTIONS] [--] CMD [ARG]...",
    after_help = "Example: pepo run --copy . -- python3 agent.py\n\nExit code: the command's; 124 timeout, 125 Pepo failed, 126 not executable, 127 not found, 128+N signal N"
)]
pub struct Run {
    #[command(flatten)]
    shape: Shape,
    /// Run it in the Session of this key, which is made where there is none, and stays; what else is said must be as it is
    /// there
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    secrets: Secrets,
    /// Copy a file, or what is in a directory, into the Sandbox before the start
    #[arg(long, value_name = "SRC[:DST]", value_parser = value::copy)]
    copy: Vec<Copy>,
    /// Copy a file or directory back here after the end, also after a failure
    #[arg(long, value_name = "PATH", conflicts_with = "detach")]
    out: Vec<String>,
    /// Leave it running and print the Session's id
    #[arg(short, long)]
    detach: bool,
    /// How long the Session stays after the command; without this it ends with it
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    keep_alive: Option<u64>,
    /// Print the outcome and the output as JSON when the command has ended
    #[arg(long, conflicts_with_all = ["interactive", "tty", "detach"])]
    json: bool,
    /// Say nothing of Pepo's own but failures
    #[arg(short, long)]
    quiet: bool,
    /// Where `--out` puts things.
    #[arg(skip = PathBuf::from("."))]
    here: PathBuf,
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
        let (interrupts, outputs) = (Interrupts::new()?, Outputs::own()?);
        Box::pin(self.run_with(place, interrupts, outputs)).await
    }

    async fn run_with(&self, place: Place, mut interrupts: Interrupts, outputs: Outputs) -> Outcome<u8> {
        // What is wrong with the request is said before anything is started.
        let on_disconnect = if self.detach { OnDisconnect::Keep } else { OnDisconnect::Kill };
        let mut command = self.how.command(&self.argv, on_disconnect)?;
        command.open_stdin &= !self.json;
        let stdin = if self.detach { Stdin::None } else { self.how.stdin()? };
        let secrets = Some(self.secrets.all()?).filter(|secrets| !secrets.is_empty());
        for copy in &self.copy {
            std::fs::symlink_metadata(&copy.source)
                .map_err(|error| Failure::new(format!("--copy {}: {error}", copy.source.display())))?;
        }
        let client = match interrupts.unless(launch::ensure(place, "run", self.notes())).await {
            Ok(client) => client?,
            Err(caught) => return Ok(caught.exit_code()),
        };
        let mut request = self.shape.request();
        match self.key {
            // One that lasts begins as any Session does; what is not said is not asked of one that is there.
            Some(_) => request.keep_alive_seconds = self.keep_alive,
            None => {
                request.keep_alive_seconds = Some(self.keep_alive.unwrap_or(0).max(KEPT));
                // What is run once leaves nothing behind, unless it is given a place.
                request.workspace.get_or_insert(None);
            }
        }
        request.secrets = secrets;
        let id = command.id.unwrap_or_else(CommandId::generate);

        // Not given up half-way: what was made must be known to be ended.
        let session = match &self.key {
            Some(key) => client.session_open(key, &request).await?,
            None => client.session_create(&request).await?,
        };
        let name = session.id.to_string();
        let middle = async {
            if !self.copy.is_empty() {
                match interrupts.unless(self.prepare(&client, &session)).await {
                    Ok(ready) => ready?,
                    Err(caught) => return Ok(Middle::Interrupted(caught)),
                }
            }
            match interrupts.unless(self.begin(&client, &session, &command)).await {
                Ok(begun) => begun?,
                Err(caught) => return Ok(Middle::Interrupted(caught)),
            }
            if self.detach {
                return Ok(Middle::Code(0));
            }
            if self.json {
                return super::exec::json_result(&client, &name, id, &mut interrupts).await.map(Middle::Code);
            }
            let attached = client.command_attach(&name, id, 0);
            let followed = Followed { client: client.clone(), session: name.clone(), id };
            let ending =
                follow::follow(Some(&followed), attached, stdin, Detach::Never, outputs, &mut interrupts).await?;
            let code = match ending {
                Ending::Exited(command) => {
                    super::exec::explain(&client, &name, &command).await;
                    follow::exit_code(&command, Some(session.memory_mib))
                }
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
            if self.key.is_none() {
                let update = UpdateSession {
                    keep_alive_seconds: Some(self.keep_alive.unwrap_or(0)),
                    ..UpdateSession::default()
                };
                client.session_update(&name, &update).await?;
            }
            render::say(&name)?;
            if !self.quiet {
                note(format!("runs as {id}; `pepo logs -f {name}` follows it"));
            }
            return Ok(0);
        }
        let code_of = |middle| match middle {
            Middle::Code(code) => code,
            Middle::Interrupted(caught) => caught.exit_code(),
        };
        if self.key.is_some() {
            return middle.map(code_of);
        }
        if self.keep_alive.is_some_and(|s| s > 0) && matches!(middle, Ok(Middle::Code(_))) {
            if !self.quiet {
                note(format!("Session {name} stays (--keep-alive); `pepo session rm {name}` ends it"));
            }
            return middle.map(code_of);
        }
        let ended = end(&client, &name, &mut interrupts).await;
        let code = code_of(middle?);
        match ended {
            Ok(()) => Ok(code),
            Err(failure) => {
                failure.doing(format!("ending Session {name}")).show();
                Ok(if code == 0 { 125 } else { code })
            }
        }
    }

    fn notes(&self) -> Notes {
        if self.quiet { Notes::Off } else { Notes::On }
    }

    /// Has the command run. It is asked for at once: the daemon waits for the Session to be Active, and a request that is
    /// there already runs sooner than one that follows the news.
    async fn begin(&self, client: &Client, session: &Session, command: &CreateCommand) -> Outcome<()> {
        let name = session.id.to_string();
        let created = client.command_create(&name, command);
        tokio::pin!(created);
        let error = match tokio::time::timeout(PATIENT, &mut created).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => error,
            Err(_) => {
                let waited = wait_active(client, session, self.notes());
                tokio::select! {
                    biased;
                    created = &mut created => match created {
                        Ok(_) => return Ok(()),
                        Err(error) => error,
                    },
                    ended = async {
                        match waited.await {
                            Ok(()) => std::future::pending().await,
                            Err(failure) => failure,
                        }
                    } => return Err(ended),
                }
            }
        };
        // What kept the Session from starting says more than that its command found none.
        let now = client.session_show(&name, &ShowSession::default()).await;
        match now {
            Ok(now) if now.active_at.is_none() && now.ended.is_some() => Err(not_started(&now)),
            _ => Err(error.into()),
        }
    }

    async fn prepare(&self, client: &Client, session: &Session) -> Outcome<()> {
        wait_active(client, session, self.notes()).await?;
        let name = session.id.to_string();
        let peer = Peer { client, holder: Holder::Session, name: &name, user: self.how.user.as_deref() };
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
        let peer = Peer { client, holder: Holder::Session, name: session, user: self.how.user.as_deref() };
        let mut result = code;
        for path in &self.out {
            let full = match &self.how.workdir {
                Some(workdir) if !path.starts_with('/') => format!("{}/{path}", workdir.trim_end_matches('/')),
                _ => path.clone(),
            };
            match transfer::copy_out(&peer, &full, &self.here).await {
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
pub async fn wait_active(client: &Client, session: &Session, notes: Notes) -> Outcome<()> {
    let name = session.id.to_string();
    let mut now = session.clone();
    let begun = tokio::time::Instant::now();
    let mut told = false;
    loop {
        match now.state {
            // One that is idle takes commands too: the next one brings it back.
            SessionState::Active | SessionState::Idle => return Ok(()),
            SessionState::Terminating | SessionState::Terminated => return Err(not_started(&now)),
            _ => {}
        }
        if !told && begun.elapsed() >= PATIENT && notes == Notes::On {
            told = true;
            note(format!("still waiting: Session {name} is {}", render::word(&now.state)));
        }
        let wait = if told { 60 } else { PATIENT.as_secs() };
        let query = ShowSession { after: Some(now.generation), wait_seconds: Some(wait) };
        now = client.session_show(&name, &query).await?;
    }
}

fn not_started(session: &Session) -> Failure {
    let failure = Failure::new(format!("Session {} did not start", session.id));
    let failure = match &session.ended {
        Some(ended) => failure.because(fail::why(ended)).evidence(ended),
        None => failure,
    };
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use clap::Parser;

    use super::*;
    use crate::fake::{Fake, Script, Step};
    use pepo_api::Reason;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        run: Run,
    }

    /// What was written, and where to write it.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn run(fake: &Fake, line: &[&str]) -> Run {
        let mut run = Alone::try_parse_from([&["run"], line].concat()).unwrap().run;
        run.here = fake.directory();
        run
    }

    /// Runs it; gives exit code or failure, and both outputs.
    async fn ran(fake: &Fake, line: &[&str]) -> (Outcome<u8>, Vec<u8>, Vec<u8>) {
        let (out, err) = (Written::default(), Written::default());
        let outputs = Outputs { stdout: Box::new(out.clone()), stderr: Box::new(err.clone()) };
        let (_hand, interrupts) = Interrupts::scripted();
        let code = Box::pin(run(fake, line).run_with(fake.place(), interrupts, outputs)).await;
        (code, out.0.lock().unwrap().clone(), err.0.lock().unwrap().clone())
    }

    fn steps(steps: &[Step]) -> Script {
        Script { steps: steps.to_vec(), ..Script::default() }
    }

    const WHOLE: [&str; 4] = ["session_create", "command_create", "command_attach", "session_terminate"];

    #[tokio::test]
    async fn outputs_stay_apart_and_the_session_is_ended() {
        let bytes = b"\0\xff\x1b[31m";
        let fake =
            Fake::new(steps(&[Step::Out(bytes), Step::Err(b"oops\n"), Step::Out(b"x"), Step::Exit(Reason::Exit, 3)]));
        let (code, out, err) = ran(&fake, &["--", "x"]).await;
        assert_eq!(code.unwrap(), 3);
        assert_eq!((&out[..], &err[..]), (&[&bytes[..], b"x"].concat()[..], &b"oops\n"[..]));
        assert_eq!(fake.asked(), WHOLE);
    }

    #[tokio::test]
    async fn the_session_of_a_key_stays() {
        const KEYED: [&str; 3] = ["session_open", "command_create", "command_attach"];
        let fake = Fake::new(steps(&[Step::Out(b"x"), Step::Exit(Reason::Exit, 3)]));
        let (code, out, _) = ran(&fake, &["--key", "user:42", "--", "x"]).await;
        assert_eq!((code.unwrap(), &out[..], &fake.asked()[..]), (3, &b"x"[..], &KEYED.map(String::from)[..]));
        // Also where the command was interrupted until nobody waits for it: its end is the daemon's, when its caller is gone.
        let script = steps(&[Step::Signals(99)]);
        let (code, fake) = interrupted(script, &["--key", "k", "--", "x"], &["command_attach", "command_signal"]).await;
        assert_eq!((code.unwrap(), fake.asked().contains(&"session_terminate".to_owned())), (130, false));
        let fake = Fake::new(steps(&[]));
        let (code, ..) = ran(&fake, &["--key", "k", "--detach", "--", "x"]).await;
        assert_eq!(
            (code.unwrap(), &fake.asked()[..]),
            (0, &KEYED[..2].iter().map(|s| s.to_string()).collect::<Vec<_>>()[..])
        );
    }

    #[tokio::test]
    async fn a_restart_of_the_daemon_is_not_noticed() {
        let script = [
            Step::Out(b"one "),
            Step::Break,
            Step::Out(b"two "),
            Step::Break,
            Step::Out(b"three"),
            Step::Exit(Reason::Exit, 0),
        ];
        let fake = Fake::new(steps(&script));
        let (code, out, _) = ran(&fake, &["--", "x"]).await;
        assert_eq!((code.unwrap(), &out[..]), (0, &b"one two three"[..]));
    }

    #[tokio::test]
    async fn files_go_in_before_and_come_out_after_even_a_failure() {
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o644);
        archive.append_data(&mut header, "a/b", &b"done"[..]).unwrap();
        let fake = Fake::new(Script {
            files: Some((archive.into_inner().unwrap(), "directory")),
            ..steps(&[Step::Exit(Reason::Exit, 9)])
        });
        let from = fake.directory();
        std::fs::create_dir(from.join("src")).unwrap();
        std::fs::write(from.join("src/x.py"), "").unwrap();
        std::fs::write(from.join("one file"), "").unwrap();
        let (src, one) = (from.join("src"), format!("{}:/srv/", from.join("one file").display()));
        let line = ["--copy", src.to_str().unwrap(), "--copy", &one, "--out", "results", "-w", "/work", "--", "x"];
        let (code, _, _) = ran(&fake, &line).await;
        assert_eq!(code.unwrap(), 9);
        assert_eq!(std::fs::read(from.join("results/a/b")).unwrap(), b"done");
        assert_eq!((fake.upload(0), fake.upload(1)), (vec!["x.py".to_owned()], vec!["one file".to_owned()]));
        let asked = [
            "session_create",
            "tar_write path=%2Fwork",
            "file_stat path=%2Fsrv%2F",
            "tar_write path=%2Fsrv%2F",
            "command_create",
            "command_attach",
            "file_stat path=%2Fwork%2Fresults",
            "tar_read path=%2Fwork%2Fresults",
            "session_terminate",
        ];
        assert_eq!(fake.asked(), asked);
    }

    #[tokio::test]
    async fn what_cannot_be_copied_back_fails_a_run_that_went_well_and_no_other() {
        for (own, code) in [(0, 125), (4, 4)] {
            let fake = Fake::new(steps(&[Step::Exit(Reason::Exit, own)]));
            let (ended, _, _) = ran(&fake, &["--out", "missing", "--", "x"]).await;
            assert_eq!(ended.unwrap(), code);
            assert_eq!(fake.asked().last().unwrap(), "session_terminate");
        }
    }

    #[tokio::test]
    async fn a_command_that_cannot_start_is_told_by_its_code() {
        for (refusal, code) in [("command_not_found", 127), ("command_not_started", 126)] {
            let fake = Fake::new(Script { refuses: Some(refusal), ..Script::default() });
            let (ended, _, _) = ran(&fake, &["--", "x"]).await;
            assert_eq!(ended.unwrap_err().code, Some(code));
            assert_eq!(fake.asked().last().unwrap(), "session_terminate");
        }
    }

    #[tokio::test]
    async fn a_missing_source_is_said_before_anything_is_started() {
        let fake = Fake::new(Script::default());
        let (ended, _, _) = ran(&fake, &["--copy", "/nonexistent/x", "--", "x"]).await;
        assert!(ended.unwrap_err().message().starts_with("--copy /nonexistent/x: "));
        assert!(fake.asked().is_empty());
    }

    #[tokio::test]
    async fn a_reader_that_closes_ends_it_quietly() {
        let fake = Fake::new(steps(&[Step::Out(b"x"), Step::Signals(99)]));
        let outputs = Outputs { stdout: Box::new(Closed), stderr: Box::new(Closed) };
        let (_hand, interrupts) = Interrupts::scripted();
        let code = Box::pin(run(&fake, &["--", "x"]).run_with(fake.place(), interrupts, outputs)).await.unwrap();
        assert_eq!(code, 141);
        assert_eq!(fake.asked(), WHOLE);
    }

    const INT: Caught = Caught { name: "SIGINT", number: 2 };

    /// Runs it and interrupts so often, each time once that request was made.
    async fn interrupted(script: Script, line: &[&str], at: &[&str]) -> (Outcome<u8>, Fake) {
        let fake = Fake::new(script);
        let (hand, interrupts) = Interrupts::scripted();
        let sink = || Box::new(Written::default());
        let run = run(&fake, line);
        let running = Box::pin(run.run_with(fake.place(), interrupts, Outputs { stdout: sink(), stderr: sink() }));
        let interrupting = async {
            for name in at {
                fake.until_asked(name).await;
                hand.send(INT).await.unwrap();
            }
            std::future::pending::<()>().await;
        };
        let code = tokio::select! {
            code = running => code,
            () = interrupting => unreachable!(),
        };
        (code, fake)
    }

    #[tokio::test]
    async fn an_interrupt_before_the_command_cancels_the_start() {
        let never = Script { never_active: true, ..Script::default() };
        let (code, fake) = interrupted(never, &["--", "x"], &["command_create"]).await;
        assert_eq!(
            (code.unwrap(), &fake.asked()[..]),
            (130, &["session_create", "command_create", "session_terminate"].map(String::from)[..])
        );

        let dir = tempfile::tempdir().unwrap();
        let hangs = Script { hangs: Some("tar_write"), ..Script::default() };
        let line = ["--copy", dir.path().to_str().unwrap(), "--", "x"];
        let (code, fake) = interrupted(hangs, &line, &["tar_write"]).await;
        assert_eq!((code.unwrap(), fake.asked().last().unwrap().as_str()), (130, "session_terminate"));

        let hangs = Script { hangs: Some("command_create"), ..Script::default() };
        let (code, fake) = interrupted(hangs, &["--", "x"], &["command_create"]).await;
        assert_eq!((code.unwrap(), fake.asked().last().unwrap().as_str()), (130, "session_terminate"));
    }

    #[tokio::test]
    async fn a_first_interrupt_is_the_commands_to_handle() {
        let script = steps(&[Step::Signals(1), Step::Exit(Reason::Exit, 7)]);
        let (code, fake) = interrupted(script, &["--", "x"], &["command_attach"]).await;
        assert_eq!((code.unwrap(), fake.signals()), (7, vec!["SIGINT tree".to_owned()]));
        assert_eq!(fake.asked().last().unwrap(), "session_terminate");
    }

    #[tokio::test]
    async fn a_second_interrupt_ends_the_session() {
        let script = steps(&[Step::Signals(99)]);
        let (code, fake) = interrupted(script, &["--", "x"], &["command_attach", "command_signal"]).await;
        assert_eq!((code.unwrap(), fake.asked().last().unwrap().as_str()), (130, "session_terminate"));
    }

    #[tokio::test]
    async fn an_interrupt_while_copying_back_still_ends_the_session() {
        let script = Script {
            hangs: Some("tar_read"),
            files: Some((Vec::new(), "directory")),
            ..steps(&[Step::Exit(Reason::Exit, 0)])
        };
        let (code, fake) = interrupted(script, &["--out", "x", "--", "x"], &["tar_read"]).await;
        assert_eq!((code.unwrap(), fake.asked().last().unwrap().as_str()), (130, "session_terminate"));
    }

    #[tokio::test]
    async fn an_end_that_hangs_is_not_waited_for_twice() {
        let script = Script { hangs: Some("session_terminate"), ..steps(&[Step::Exit(Reason::Exit, 0)]) };
        let (code, _) = interrupted(script, &["--", "x"], &["session_terminate"]).await;
        assert_eq!(code.unwrap(), 125, "it is not known to be gone");
    }
}
