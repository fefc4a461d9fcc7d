//! Programs of Pepo that this one starts: `pepod` in the background for a run without a daemon, and `pepod` as a tool.
//!
//! Ten runs at once start one daemon: each takes the lock `run/start.lock`; who has it looks again whether one answers,
//! and starts it if not; who waits connects to the winner's. The daemon gets a session of its own (a Ctrl-C here is not
//! for it) by going through `pepo detached`, which calls setsid and becomes it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use pepo_api::Ready;
use pepo_api::client::{Client, ClientError};
use rustix::fs::{FlockOperation, flock};

use crate::fail::{Failure, Notes, Outcome, note};
use crate::place::{Instance, Place};

/// How long an idle daemon stays that a run started.
const IDLE_SECONDS: u64 = 300;
/// How long a daemon may take to answer; its first start looks at the whole host.
pub const READY: Duration = Duration::from_secs(120);

/// A client of a daemon that answers; on this machine one is started where none runs.
pub async fn ensure(place: Place, verb: &str, notes: Notes) -> Outcome<Client> {
    let instance = match place {
        Place::Remote(client) => return Ok(client),
        Place::Local(instance) => instance,
    };
    let client = instance.client();
    match answers(&client).await {
        Ok(()) => return Ok(client),
        Err(ClientError::NoDaemon { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    if !rustix::process::geteuid().is_root() {
        let prefix = instance.prefix();
        return Err(Failure::new("no daemon runs, and starting one takes root")
            .hint(format!("`sudo {prefix}pepo {verb} …` starts one; or let `sudo {prefix}pepo up` run, and join the group: `sudo usermod -aG pepo $USER`")));
    }
    let starting = instance.clone();
    tokio::task::spawn_blocking(move || start_under_lock(&starting, notes))
        .await
        .map_err(|error| Failure::new(format!("starting the daemon failed: {error}")))??;
    // The loser of the lock may meet a daemon that is still coming up.
    let deadline = Instant::now() + READY;
    loop {
        match answers(&client).await {
            Ok(()) => return Ok(client),
            Err(error) if Instant::now() >= deadline => return Err(error.into()),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn answers(client: &Client) -> Result<(), ClientError> {
    client.healthz().await.map(drop)
}

fn start_under_lock(instance: &Instance, notes: Notes) -> Outcome<()> {
    let run = make_run_directory(instance)?;
    let path = run.join("start.lock");
    let lock = open_lock(&path)?;
    let deadline = Instant::now() + READY;
    while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() >= deadline {
            return Err(Failure::new(format!("another `pepo` has been starting a daemon for {} s", READY.as_secs()))
                .hint(format!("`fuser -v {}` says which", path.display())));
        }
        std::thread::sleep(Duration::from_millis(30));
    }
    // The winner before us has done it.
    if std::os::unix::net::UnixStream::connect(instance.socket()).is_ok() {
        return Ok(());
    }
    let pepod = program("pepod")?;
    let log_path = run.join("pepod.log");
    let log = open_log(&log_path)?;
    let (ready, ready_out) = ready_pipe()?;
    let own = own_path()?;
    let mut command = Command::new(own);
    match &instance.home {
        Some(home) => command.env("PEPO_HOME", home),
        None => command.env_remove("PEPO_HOME"),
    };
    let child = command
        .arg("detached")
        .arg(&pepod)
        .args(["serve", "--exit-when-idle", &IDLE_SECONDS.to_string()])
        .args(["--ready-fd", &ready_out.as_raw_fd().to_string()])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .map_err(|error| Failure::new(format!("cannot start {}: {error}", pepod.display())))?;
    drop(ready_out);
    match wait_ready(ready, child) {
        Ok(_) => {
            if notes == Notes::On {
                note(format!(
                    "started a daemon in the background (log: {}); it ends by itself {} minutes after the last Session",
                    log_path.display(),
                    IDLE_SECONDS / 60
                ));
            }
            Ok(())
        }
        Err(failure) => Err(with_tail(failure, &log_path)),
    }
}

/// The run directory, made where it is missing; its final owner is set by `pepod`, whose user must get there.
pub fn make_run_directory(instance: &Instance) -> Outcome<PathBuf> {
    let run = instance.run_directory();
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(&run)
        .map_err(|error| Failure::new(format!("cannot make {}: {error}", run.display())))?;
    if let Some(home) = &instance.home {
        let told = |path: &Path, error: std::io::Error| Failure::new(format!("{}: {error}", path.display()));
        for above in home.ancestors().skip(1) {
            let mode = std::fs::metadata(above).map_err(|e| told(above, e))?.permissions().mode();
            if mode & 0o001 == 0 {
                return Err(Failure::new(format!(
                    "PEPO_HOME={}: the user `pepo` cannot get there, because {} is closed to others",
                    home.display(),
                    above.display()
                ))
                .hint("choose a directory below one that is open, for instance in /srv or /var/tmp"));
            }
        }
        let mut permissions = std::fs::metadata(home).map_err(|e| told(home, e))?.permissions();
        if permissions.mode() & 0o001 == 0 {
            permissions.set_mode(permissions.mode() | 0o001);
            std::fs::set_permissions(home, permissions).map_err(|e| told(home, e))?;
            note(format!("opened {} to others (o+x): the user `pepo` must get there", home.display()));
        }
    }
    Ok(run)
}

/// Opens a lock file, which is made where it is missing and never removed.
pub fn open_lock(path: &Path) -> Outcome<File> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
        .map_err(|error| Failure::new(format!("cannot open {}: {error}", path.display())))
}

/// A new log; the one before stays beside it, since it may say why there is a new one.
fn open_log(path: &Path) -> Outcome<File> {
    let _ = std::fs::rename(path, path.with_extension("log.1"));
    std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o640)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
        .map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))
}

/// A pipe whose writing end a child inherits under its number.
pub fn ready_pipe() -> Outcome<(OwnedFd, OwnedFd)> {
    let failed = |error: rustix::io::Errno| Failure::new(format!("cannot make a pipe: {error}"));
    let (read, write) = rustix::pipe::pipe().map_err(failed)?;
    rustix::io::fcntl_setfd(&read, rustix::io::FdFlags::CLOEXEC).map_err(failed)?;
    Ok((read, write))
}

/// Reads the ready line; nothing when the pipe closes without one.
pub fn ready_line(pipe: OwnedFd) -> Outcome<Option<Ready>> {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(File::from(pipe).take(64 << 10)).read_line(&mut line);
        let _ = tell.send(read.map(|_| line));
    });
    let line = match told.recv_timeout(READY) {
        Ok(Ok(line)) if line.is_empty() => return Ok(None),
        Ok(Ok(line)) => line,
        Ok(Err(error)) => return Err(Failure::new(format!("cannot read the daemon's ready line: {error}"))),
        Err(_) => return Err(Failure::new(format!("the daemon did not get ready in {} s", READY.as_secs()))),
    };
    let ready = serde_json::from_str(&line);
    let ready =
        ready.map_err(|e| Failure::new(format!("the daemon's ready line is not one: {e}: {}", line.trim_end())));
    ready.map(Some)
}

/// Waits until a background daemon is ready; one that is not is ended.
fn wait_ready(pipe: OwnedFd, mut child: Child) -> Outcome<Ready> {
    match ready_line(pipe) {
        Ok(Some(ready)) => Ok(ready),
        Ok(None) => {
            // It has closed the pipe, so it is about to end; what it said is in its log.
            let status = wait_for(&mut child, Duration::from_secs(10));
            Err(Failure::new(format!("the daemon did not start ({})", status.map_or("it hangs".into(), ended))))
        }
        Err(failure) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(failure)
        }
    }
}

/// How a program of ours ended, in words.
pub fn ended(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "it ended".into(),
    }
}

/// Waits for a child's end, but not for ever.
pub fn wait_for(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            _ => return None,
        }
    }
}

/// Adds the last lines of a log: what the daemon says about itself is the cause.
fn with_tail(failure: Failure, log: &Path) -> Failure {
    let tail = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(4096)))?;
        let mut text = Vec::new();
        file.take(4096).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let text = tail().unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(5)..];
    let message = [&[failure.message()][..], last].concat().join("\n");
    Failure::new(message).hint(format!("all of it is in {}", log.display()))
}

/// The file of this program.
pub fn own_path() -> Outcome<PathBuf> {
    std::env::current_exe().map_err(|error| Failure::new(format!("cannot tell where this program is: {error}")))
}

/// One of our programs: beside this one, else by PATH.
pub fn program(name: &str) -> Outcome<PathBuf> {
    if let Some(beside) = own_path()?.parent().map(|dir| dir.join(name))
        && beside.is_file()
    {
        return Ok(beside);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file()).ok_or_else(|| {
        Failure::new(format!("{name} is not there, neither beside pepo nor on PATH"))
            .hint("`make install` installs all of Pepo's programs together")
    })
}

/// `pepo detached PROGRAM ARGS…`: a session of its own, then the program. Only ever returns a failure.
pub fn detached(command: &[std::ffi::OsString]) -> Failure {
    use std::os::unix::process::CommandExt;
    let Some((program, arguments)) = command.split_first() else {
        return Failure::new("detached: no program");
    };
    // It fails for the leader of a process group, who has what it is for.
    let _ = rustix::process::setsid();
    let error = Command::new(program).args(arguments).current_dir("/").exec();
    Failure::new(format!("cannot start {}: {error}", program.display()))
}
