//! Lasting shells: commands of one name share one bash, with its directory, variables and functions.
//!
//! One command at a time, the others wait in order. The line, the exit code and the directory go over descriptors of
//! their own, never through what the command prints; its output has a pair of FIFOs for itself, so that what an earlier
//! command left running does not write into it. Called by `agent`.
//!
//! ```text
//!   agent --lines--> fd 0 of bash (interactive, so that an interrupt gives up the line and not the shell)
//!   agent <--"S", "E code", directory-- fd 201 of bash (closed for the command itself)
//!   agent <--FIFO-- stdout, stderr;  agent --FIFO--> stdin        per command
//!
//!   command over its time or cancelled: the shell is told to give its line up, and its processes are killed; again and
//!   again. What has not let go within 5 s loses the shell.
//!   A shell that ends: ShellLost, the next one is fresh
//! ```

use std::cell::Cell;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pepo_proto::{Cause, Exec, FailureCode, Outcome, Variable};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;
use tokio::task::spawn_local;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::agent::Agent;
use crate::collect::Collector;
use crate::exec::{Op, until};
use crate::spawn::{Launch, Wiring};
use crate::stream::failed;
use crate::sys;
use crate::tree::{self, Goes, Tree};
use crate::user::User;

/// Commands that wait for one shell.
const MAX_WAITING: usize = 64;

/// How long a command that is to end may hold on to its shell.
const LET_GO: Duration = Duration::from_secs(5);

/// How often it is told meanwhile.
const AGAIN: Duration = Duration::from_millis(50);

/// How often it is looked whether it has heard, each time, and how long between two looks.
const LOOKS: usize = 20;
const LOOK: Duration = Duration::from_millis(1);

/// The signal at which bash gives up its line: of the real-time ones, which nothing else uses. Bash takes an interrupt that
/// comes while it waits for a program only if the program died of one too; its trap of a signal runs before the line goes on.
const GIVE_UP: i32 = 62;

/// Whether there is a line to give up: set by the line itself, and once is enough. Bash 5.2 crashes when an interrupt comes
/// out of a trap while it reads.
const LINE_RUNS: &str = "__pepo_line_runs";

/// How long a new shell may take to say that it is there.
const START: Duration = Duration::from_secs(60);

/// The most that the side channel holds unread: a directory's name, and a number.
const MAX_REPORT: usize = 16 << 10;

/// The descriptor on which bash reports.
const REPORT: i32 = 201;

/// A shell's place: its bash, where one runs, behind a lock that serves in order.
#[derive(Default)]
pub struct Shell {
    bash: Mutex<Option<Bash>>,
    waiting: Cell<usize>,
}

/// A running bash.
struct Bash {
    pid: i32,
    pidfd: Rc<OwnedFd>,
    exit: AsyncFd<Rc<OwnedFd>>,
    lines: AsyncFd<OwnedFd>,
    reports: AsyncFd<OwnedFd>,
    unread: Vec<u8>,
    /// Where it is between commands.
    home: Tree,
    directory: PathBuf,
    commands: u64,
    last_code: i32,
}

impl Drop for Bash {
    fn drop(&mut self) {
        // Gone already, or not wanted any more.
        let _ = sys::pidfd_signal(self.pidfd.as_fd(), libc::SIGKILL);
        for _ in 0..50 {
            // Bounded: one that the kernel cannot end yet stays a zombie, and nobody else waits for it.
            match waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                _ => break,
            }
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Drives a command that runs in a lasting shell.
pub async fn drive(agent: Rc<Agent>, op: Rc<Op>, shell: Rc<Shell>, exec: Exec) {
    let outcome = match turn(&agent, &op, &shell, &exec).await {
        Ok(outcome) | Err(outcome) => outcome,
    };
    op.finish(&agent, outcome);
}

struct Waiting<'a>(&'a Cell<usize>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

async fn turn(agent: &Rc<Agent>, op: &Rc<Op>, shell: &Shell, exec: &Exec) -> Result<Outcome, Outcome> {
    if exec.pty.is_some() {
        return Err(failed(FailureCode::Invalid, "a lasting shell's commands have no terminal of their own"));
    }
    let [line] = &exec.argv[..] else {
        return Err(failed(FailureCode::Invalid, "a lasting shell takes one line"));
    };
    if line.contains('\0') || exec.cwd.as_ref().is_some_and(|cwd| cwd.contains('\0')) {
        return Err(failed(FailureCode::Invalid, "a NUL byte cannot be in a shell's line"));
    }
    if shell.waiting.get() >= MAX_WAITING {
        return Err(failed(FailureCode::Busy, format!("{MAX_WAITING} commands wait for this shell already")));
    }
    shell.waiting.set(shell.waiting.get() + 1);
    let waiting = Waiting(&shell.waiting);
    let mut bash = loop {
        let lease = op.lease_end(agent.lease).map(tokio::time::Instant::from_std);
        tokio::select! {
            biased;
            bash = shell.bash.lock() => break bash,
            () = op.wake.notified() => {}
            () = until(lease) => op.ask_kill(Cause::Killed),
        }
        if op.asked().is_some() {
            return Err(failed(FailureCode::Cancelled, "cancelled before it began"));
        }
    };
    drop(waiting);
    if bash.as_ref().is_some_and(Bash::has_ended) {
        *bash = None;
    }
    let user = agent.user(exec.user.as_deref())?;
    if bash.is_none() {
        *bash = Some(start(agent, &user).await?);
    }
    let Some(running) = bash.as_mut() else {
        return Err(lost());
    };
    let (outcome, kept) = run(agent, op, running, exec, line, &user).await?;
    if !kept {
        *bash = None;
    }
    Ok(outcome)
}

fn lost() -> Outcome {
    failed(FailureCode::ShellLost, "the shell has ended; the next command has a fresh one")
}

fn trouble(error: io::Error) -> Outcome {
    failed(FailureCode::Busy, format!("the shell cannot be connected: {error}"))
}

/// A directory for a shell's FIFOs that only its user can enter.
fn place(agent: &Agent, user: &User) -> io::Result<PathBuf> {
    let base = if agent.is_guest() { PathBuf::from("/run/pepo") } else { std::env::temp_dir() };
    if agent.is_guest() {
        fs::create_dir_all(&base)?;
    }
    for number in 0..10_000 {
        let path = base.join(format!("pepo-shell-{}-{number}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
                if rustix::process::geteuid().is_root() {
                    chown(&path, Some(user.uid), Some(user.gid))?;
                }
                return Ok(path);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

async fn start(agent: &Rc<Agent>, user: &User) -> Result<Bash, Outcome> {
    let mut environment = agent.image_env();
    environment.of_user(user);
    environment.add(&agent.activation_env())?;
    let home = agent.trees.plant().map_err(trouble)?;
    let argv = ["bash", "--noprofile", "--norc", "--noediting", "+H", "-i"].map(str::to_owned);
    let launch = Launch::new(&argv, &environment, agent.place().as_deref(), user, home.mark())?;
    let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|error| trouble(error.into()));
    let ((input, lines), (reports, report)) = (pipe()?, pipe()?);
    for fd in [&lines, &reports] {
        rustix::io::ioctl_fionbio(fd, true).map_err(|error| trouble(error.into()))?;
    }
    let wiring = Wiring {
        stdio: [Arc::new(input), agent.null.clone(), agent.null.clone()],
        extra: vec![(report, REPORT)],
        terminal: false,
        group: home.birthplace(),
        in_guest: agent.is_guest(),
    };
    let (pid, pidfd) = agent.launch(launch, wiring).await?;
    home.rooted(pid);
    let pidfd = Rc::new(pidfd);
    let mut bash = Bash {
        pid,
        exit: sys::watch(pidfd.clone(), Interest::READABLE).map_err(trouble)?,
        pidfd,
        lines: sys::watch(lines, Interest::WRITABLE).map_err(trouble)?,
        reports: sys::watch(reports, Interest::READABLE).map_err(trouble)?,
        unread: vec![],
        home,
        directory: place(agent, user).map_err(trouble)?,
        commands: 0,
        last_code: 0,
    };
    let greeting = format!(
        "PS1= PS2=; unset PROMPT_COMMAND HISTFILE MAILCHECK; set +o history; \
         builtin trap 'if [[ ${{{LINE_RUNS}-}} ]]; then {LINE_RUNS}=; builtin kill -INT $$; fi' {GIVE_UP}; \
         __pepo_status() {{ builtin return \"$1\"; }}; builtin printf 'S0\\0' >&{REPORT}\n"
    );
    let hello = async {
        bash.say(greeting.as_bytes()).await?;
        while bash.report().await? != "S0" {}
        Ok::<_, io::Error>(())
    };
    match timeout(START, hello).await {
        Ok(Ok(())) => Ok(bash),
        _ => Err(lost()),
    }
}

impl Bash {
    fn has_ended(&self) -> bool {
        !matches!(
            waitid(
                WaitId::PidFd(self.pidfd.as_fd()),
                WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT
            ),
            Ok(None)
        )
    }

    async fn say(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.lines.writable().await?;
            match ready.try_io(|lines| Ok(rustix::io::write(lines.get_ref(), bytes)?)) {
                Ok(Ok(written)) => bytes = &bytes[written..],
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
        Ok(())
    }

    /// The next report. Cancel safe.
    async fn report(&mut self) -> io::Result<String> {
        report(&self.reports, &mut self.unread).await
    }

    fn signal(&self, signal: i32) {
        // One that has ended is seen elsewhere.
        let _ = sys::pidfd_signal(self.pidfd.as_fd(), signal);
    }

    /// Makes the shell give up its line, and then ends what the command runs: a shell that hears of both at once goes on to
    /// what the line says next. One that has not heard yet is told again.
    async fn interrupt(&self, tree: &Tree) {
        self.signal(GIVE_UP);
        if self.has_heard().await {
            tree.signal(libc::SIGKILL, Some(self.pid));
        }
    }

    /// Whether the shell has taken [`GIVE_UP`] up: it waits again, or goes on without ever waiting.
    async fn has_heard(&self) -> bool {
        let mut pending = true;
        for _ in 0..LOOKS {
            let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
            let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
            let waits = |set: &str| u64::from_str_radix(field(set), 16).is_ok_and(|set| set >> (GIVE_UP - 1) & 1 == 1);
            pending = waits("ShdPnd:") || waits("SigPnd:");
            if !pending && field("State:").starts_with('S') {
                return true;
            }
            sleep(LOOK).await;
        }
        !pending
    }
}

/// As one word of a shell's.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn is_shell_name(name: &str) -> bool {
    let first = name.bytes().next();
    first.is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// What bash is told for one command.
fn script(
    line: &str,
    exec: &Exec,
    number: u64,
    last: i32,
    mark: Option<&str>,
    fifos: &Fifos,
) -> Result<String, Outcome> {
    let mut prefix = String::new();
    for Variable { name, value } in &exec.env {
        if !is_shell_name(name) || value.contains('\0') {
            return Err(failed(FailureCode::Invalid, format!("{name:?} cannot be a shell's variable")));
        }
        let _ = write!(prefix, "{name}={} ", quoted(value));
    }
    if let Some(mark) = mark {
        let _ = write!(prefix, "{}={} ", tree::MARK, quoted(mark));
    }
    let cd = exec.cwd.as_ref().map(|cwd| format!("builtin cd -- {} && ", quoted(cwd))).unwrap_or_default();
    let path = |path: &Path| quoted(&path.to_string_lossy());
    let input = if exec.stdin { path(&fifos.input) } else { "/dev/null".to_owned() };
    Ok(format!(
        "__pepo_code=1; {{ {LINE_RUNS}=1 __pepo_code=130; builtin printf 'S{number}\\0' >&{REPORT}; \
         {cd}{{ __pepo_status {last}; {prefix}eval {line} {REPORT}>&-; }}; __pepo_code=$? {LINE_RUNS}=; \
         }} <{input} >{out} 2>{err}\n\
         builtin printf 'E{number} %s\\0%s\\0' \"$__pepo_code\" \"$PWD\" >&{REPORT}\n",
        line = quoted(line),
        out = path(&fifos.out),
        err = path(&fifos.err),
    ))
}

/// The names by which one command's pipes are opened.
struct Fifos {
    input: PathBuf,
    out: PathBuf,
    err: PathBuf,
}

impl Fifos {
    fn make(directory: &Path, number: u64, user: &User) -> io::Result<Self> {
        let fifos = Fifos {
            input: directory.join(format!("in.{number}")),
            out: directory.join(format!("out.{number}")),
            err: directory.join(format!("err.{number}")),
        };
        for path in [&fifos.input, &fifos.out, &fifos.err] {
            mknodat(CWD, path.as_os_str().as_bytes(), FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
            if rustix::process::geteuid().is_root() {
                // The directory is the user's: no link of theirs is to be followed.
                rustix::fs::chownat(
                    CWD,
                    path,
                    Some(rustix::fs::Uid::from_raw(user.uid)),
                    Some(rustix::fs::Gid::from_raw(user.gid)),
                    rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
                )?;
            }
        }
        Ok(fifos)
    }

    fn open(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) != FileType::Fifo {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(fd)
    }
}

impl Drop for Fifos {
    fn drop(&mut self) {
        for path in [&self.input, &self.out, &self.err] {
            // The directory goes with the shell.
            let _ = fs::remove_file(path);
        }
    }
}

/// Runs one command. Also tells whether the shell is still good.
async fn run(
    agent: &Rc<Agent>,
    op: &Rc<Op>,
    bash: &mut Bash,
    exec: &Exec,
    line: &str,
    user: &User,
) -> Result<(Outcome, bool), Outcome> {
    bash.commands += 1;
    let number = bash.commands;
    let tree = Rc::new(agent.trees.plant().map_err(trouble)?);
    if let Some(limits) = &exec.limits {
        tree.limit(limits, Goes::One).map_err(|why| failed(FailureCode::Invalid, why))?;
    }
    let fifos = Fifos::make(&bash.directory, number, user).map_err(trouble)?;
    let script = script(line, exec, number, bash.last_code, tree.mark(), &fifos)?;
    let out = Fifos::open(&fifos.out, OFlags::RDONLY).map_err(trouble)?;
    let err = Fifos::open(&fifos.err, OFlags::RDONLY).map_err(trouble)?;
    // Held until the shell has opened them: without a writer they would have ended already.
    let mut held = vec![
        Fifos::open(&fifos.out, OFlags::WRONLY).map_err(trouble)?,
        Fifos::open(&fifos.err, OFlags::WRONLY).map_err(trouble)?,
        Fifos::open(&fifos.input, OFlags::RDWR).map_err(trouble)?,
    ];
    let mut collector = Collector::new(out, Some(err)).map_err(trouble)?;
    tree.adopt(bash.pid).map_err(trouble)?;
    op.run(bash.pid, bash.pidfd.clone(), tree.clone(), Some(bash.pid));

    let deadline = (exec.timeout_ms > 0).then(|| tokio::time::Instant::now() + Duration::from_millis(exec.timeout_ms));
    let mut feeder = None;
    let mut killed: Option<(Cause, Instant)> = None;
    let mut again = interval(AGAIN);
    // Not what was missed while it looked for processes: the shell's answer would never have its turn.
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut has_begun = false;
    let mut said = 0;
    let ended: Option<(i32, String)> = loop {
        let lease = op.lease_end(agent.lease).map(tokio::time::Instant::from_std);
        let rest = &script.as_bytes()[said..];
        tokio::select! {
            biased;
            ready = bash.exit.readable() => {
                drop(ready);
                break None;
            }
            () = op.wake.notified() => {}
            () = until(deadline), if killed.is_none() => op.ask_kill(Cause::Timeout),
            () = until(lease), if killed.is_none() => op.ask_kill(Cause::Killed),
            _ = again.tick(), if killed.is_some() && has_begun => bash.interrupt(&tree).await,
            ready = bash.lines.writable(), if !rest.is_empty() => {
                let Ok(mut ready) = ready else { break None };
                match ready.try_io(|lines| Ok(rustix::io::write(lines.get_ref(), rest)?)) {
                    Ok(Ok(written)) => said += written,
                    Ok(Err(_)) => break None,
                    Err(_would_block) => {}
                }
            }
            report = report(&bash.reports, &mut bash.unread) => match report {
                Err(_) => break None,
                Ok(report) if report == format!("S{number}") => {
                    has_begun = true;
                    if exec.stdin
                        && let Ok(write) = Fifos::open(&fifos.input, OFlags::WRONLY)
                        && let Ok(sink) = sys::watch(Arc::new(write), Interest::WRITABLE)
                    {
                        let op = op.clone();
                        feeder = Some(spawn_local(async move { op.input.feed(sink, false).await }));
                    }
                    held.clear();
                }
                Ok(report) => {
                    let code = report.strip_prefix(&format!("E{number} ")).and_then(|code| code.parse().ok());
                    if let Some(code) = code {
                        match bash.report().await {
                            Ok(cwd) => break Some((code, cwd)),
                            Err(_) => break None,
                        }
                    }
                }
            },
            () = collector.step(op), if !collector.is_done() => {}
        }
        match (killed, op.asked()) {
            (None, Some(cause)) => {
                killed = Some((cause, Instant::now()));
                again.reset_immediately();
            }
            (Some((_, since)), _) if since.elapsed() > LET_GO => break None,
            _ => {}
        }
    };
    drop((held, fifos));
    let kills = tree.memory_kills();
    if ended.is_some() {
        // Between commands it is nobody's: a later kill of this command must not reach it.
        bash.home.adopt(bash.pid).map_err(trouble)?;
        if killed.is_some() {
            // What was just being started when the shell let go.
            tree.kill();
        }
    } else {
        bash.signal(libc::SIGKILL);
        tree.kill();
    }
    collector.drain(op).await;
    if let Some(feeder) = feeder {
        feeder.abort();
    }
    if !collector.is_done() {
        collector.sink(agent);
    }
    let Some((code, cwd)) = ended else {
        // Its end is waited for when it is dropped; a killed process is quick.
        sleep(Duration::from_millis(1)).await;
        return Ok((lost(), false));
    };
    bash.last_code = code;
    let outcome = match killed {
        Some((cause, _)) => op.process(cause, None, Some(libc::SIGKILL), Some(cwd)),
        None if kills > 0 && code != 0 => op.process(Cause::OutOfMemory, Some(code), None, Some(cwd)),
        None => op.process(Cause::Exit, Some(code), None, Some(cwd)),
    };
    Ok((outcome, true))
}

/// The next report on the side channel. Cancel safe.
async fn report(reports: &AsyncFd<OwnedFd>, unread: &mut Vec<u8>) -> io::Result<String> {
    loop {
        if let Some(end) = unread.iter().position(|byte| *byte == 0) {
            let rest = unread.split_off(end + 1);
            let mut report = std::mem::replace(unread, rest);
            report.pop();
            return Ok(String::from_utf8_lossy(&report).into_owned());
        }
        if unread.len() > MAX_REPORT {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = [0; 4096];
        let mut ready = reports.readable().await?;
        match ready.try_io(|reports| Ok(rustix::io::read(reports.get_ref(), &mut bytes)?)) {
            Ok(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(Ok(read)) => unread.extend_from_slice(&bytes[..read]),
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_words() {
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert!(is_shell_name("_A1") && !is_shell_name("1A") && !is_shell_name("") && !is_shell_name("a-b"));
    }
}
