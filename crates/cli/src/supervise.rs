//! `pepo up`: keeps daemon and edge running, and ends both together.
//!
//! ```text
//!   lock up.lock -> pepod (started, or taken over) -> ready -> pepo-edge -> its URL -> the API answers -> watch
//!   watch:  one dies    -> a pause that grows -> it is started again
//!           pepod exits 0 (somebody said down), or a signal -> edge down, pepod down, nothing left -> end
//! ```
//!
//! The lock holds the supervisor's pid, so a second `pepo up` can say who it is and `pepo down` can ask it to end.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pepo_api::client::Client;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;

use crate::fail::{Failure, Outcome, note};
use crate::interrupt::Interrupts;
use crate::launch;
use crate::place::Instance;
use crate::render;

/// The first pause before a program is started again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// A program that lived this long has earned the first pause again.
const HEALTHY: Duration = Duration::from_secs(60);
/// How long the daemon may take to end every Sandbox.
const DOWN: Duration = Duration::from_secs(90);
/// How long a program may take after a signal.
const TERM: Duration = Duration::from_secs(10);
/// How long the API may take to answer once both run.
const ANSWER: Duration = Duration::from_secs(30);

/// The right to supervise an instance.
pub struct Supervisor {
    instance: Instance,
    _lock: File,
}

/// The lock's path.
pub fn lock_path(instance: &Instance) -> PathBuf {
    instance.run_directory().join("up.lock")
}

/// The pid in the lock, if somebody holds it.
pub fn holder(path: &Path) -> Option<u32> {
    let mut file = File::open(path).ok()?;
    if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
        return None;
    }
    let mut text = String::new();
    Read::take(&mut file, 32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok().or(Some(0))
}

/// The pid of the process that listens on a socket.
pub fn listener(socket: &Path) -> Option<Pid> {
    let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    rustix::net::sockopt::socket_peercred(&stream).ok().map(|peer| peer.pid)
}

impl Supervisor {
    /// Takes the lock, or says who has it.
    pub fn take(instance: Instance) -> Outcome<Self> {
        launch::make_run_directory(&instance)?;
        let path = lock_path(&instance);
        let mut lock = launch::open_lock(&path)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            let prefix = instance.prefix();
            let who = holder(&path).filter(|pid| *pid != 0).map_or_else(String::new, |pid| format!(" (pid {pid})"));
            return Err(Failure::new(format!("`pepo up` runs already{who}"))
                .hint(format!("`{prefix}pepo down` ends it; PEPO_HOME=DIR is another instance")));
        }
        let written = lock
            .set_len(0)
            .and_then(|()| lock.seek(SeekFrom::Start(0)))
            .and_then(|_| writeln!(lock, "{}", std::process::id()));
        written.map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))?;
        Ok(Supervisor { instance, _lock: lock })
    }

    /// Runs both until somebody wants the end.
    pub async fn run(&self, mut interrupts: Interrupts) -> Outcome<u8> {
        let begun = Instant::now();
        let pepod = launch::program("pepod")?;
        let edge_program = launch::program("pepo-edge")?;
        // A start is not given up half-way: what it has begun must be ended in order.
        let mut wanted = true;
        let (mut daemon, key) = {
            let mut starting = std::pin::pin!(self.first_daemon(&pepod));
            loop {
                tokio::select! {
                    started = &mut starting => break started?,
                    _ = interrupts.end() => {
                        tell("stopping as soon as it has started\n");
                        wanted = false;
                    }
                }
            }
        };
        if !wanted {
            self.stop(&mut daemon, None, &mut interrupts).await?;
            return Ok(0);
        }
        let first = interrupts.unless(start_edge(&edge_program, &self.instance)).await;
        let mut edge = match first {
            Ok(Ok(edge)) => edge,
            Ok(Err(failure)) => {
                self.stop(&mut daemon, None, &mut interrupts).await?;
                return Err(failure);
            }
            Err(caught) => {
                self.stop(&mut daemon, None, &mut interrupts).await?;
                return Ok(caught.exit_code());
            }
        };
        let (mut daemon_pause, mut edge_pause) = (Pause::new(), Pause::new());
        match interrupts.unless(answers(&edge.url)).await {
            Ok(Ok(())) => self.greet(&edge.url, key.as_deref(), begun.elapsed()),
            Ok(Err(failure)) => {
                self.stop(&mut daemon, Some(&mut edge.child), &mut interrupts).await?;
                return Err(failure);
            }
            Err(_) => {
                self.stop(&mut daemon, Some(&mut edge.child), &mut interrupts).await?;
                return Ok(0);
            }
        }
        loop {
            tokio::select! {
                biased;
                _ = interrupts.end() => {
                    tell("stopping\n");
                    self.stop(&mut daemon, Some(&mut edge.child), &mut interrupts).await?;
                    tell("stopped\n");
                    return Ok(0);
                }
                ended = daemon.ended() => {
                    if ended.orderly {
                        stop_child(&mut edge.child).await;
                        tell("stopped: the daemon was asked to end\n");
                        return Ok(0);
                    }
                    note(format!("pepod ended ({}); Sandboxes go on, it is started again", ended.how));
                    loop {
                        match interrupts.unless(daemon_pause.wait(daemon.since())).await {
                            Ok(()) => {}
                            Err(_) => {
                                stop_child(&mut edge.child).await;
                                return Ok(0);
                            }
                        }
                        match start_daemon(&pepod, &self.instance).await {
                            Ok((started, _)) => {
                                daemon = started;
                                break;
                            }
                            Err(failure) => failure.show(),
                        }
                    }
                    tell("pepod runs again\n");
                }
                status = edge.child.wait() => {
                    let how = status.map_or_else(|error| error.to_string(), launch::ended);
                    note(format!("pepo-edge ended ({how}); it is started again"));
                    loop {
                        match interrupts.unless(edge_pause.wait(edge.since)).await {
                            Ok(()) => {}
                            Err(_) => {
                                self.stop(&mut daemon, None, &mut interrupts).await?;
                                return Ok(0);
                            }
                        }
                        match start_edge(&edge_program, &self.instance).await {
                            Ok(started) => {
                                edge = started;
                                break;
                            }
                            Err(failure) => failure.show(),
                        }
                    }
                    tell(&format!("pepo-edge runs again: {}\n", edge.url));
                }
            }
        }
    }

    /// Starts the daemon, or takes over one that a dead supervisor or a run has left.
    async fn first_daemon(&self, pepod: &Path) -> Outcome<(Daemon, Option<String>)> {
        match self.instance.client().healthz().await {
            Ok(_) => {}
            Err(_) => return start_daemon(pepod, &self.instance).await,
        }
        let failed = || Failure::new("a daemon answers, but it cannot be told which process that is");
        let pid = listener(&self.instance.socket()).ok_or_else(failed)?;
        let fd = Arc::new(pidfd_open(pid, PidfdFlags::empty()).map_err(|_| failed())?);
        note(format!("a daemon runs already (pid {}); it is taken over", pid.as_raw_nonzero()));
        let (tell, gone) = watch::channel(false);
        let watched = fd.clone();
        std::thread::spawn(move || {
            use rustix::event::{PollFd, PollFlags, poll};
            while poll(&mut [PollFd::new(&*watched, PollFlags::IN)], None) == Err(rustix::io::Errno::INTR) {}
            let _ = tell.send(true);
        });
        Ok((Daemon::Taken { fd, gone, since: Instant::now() }, None))
    }

    fn greet(&self, url: &str, key: Option<&str>, took: Duration) {
        tell(&format!("ready at {url} ({:.1} s)\n", took.as_secs_f64()));
        // A service's output is a log, and a key has no place there.
        if crate::place::variable("JOURNAL_STREAM").is_some() {
            return;
        }
        match key {
            Some(key) => tell(&format!(
                "this is the only time that the first key is shown:\n\n  export PEPO_URL={url} PEPO_API_KEY={key}\n  curl -H \"Authorization: Bearer $PEPO_API_KEY\" $PEPO_URL/v1/sessions\n\n"
            )),
            None => tell("the key is the one that was shown at the first start\n"),
        }
    }

    /// Ends the edge, then the daemon with every Sandbox. A signal meanwhile ends the patience; what did not end in order
    /// may have left Sandboxes that go on.
    async fn stop(&self, daemon: &mut Daemon, edge: Option<&mut Child>, interrupts: &mut Interrupts) -> Outcome<()> {
        if let Some(edge) = edge {
            stop_child(edge).await;
        }
        let client = self.instance.client();
        let orderly = async {
            match tokio::time::timeout(DOWN, client.down()).await {
                Ok(Ok(())) => tokio::time::timeout(DOWN, daemon.ended()).await.is_ok(),
                _ => false,
            }
        };
        if interrupts.unless(orderly).await == Ok(true) {
            return Ok(());
        }
        note("the daemon does not end by itself; it gets a signal");
        daemon.signal(Signal::TERM);
        if tokio::time::timeout(TERM, daemon.ended()).await.is_err() {
            daemon.signal(Signal::KILL);
            let _ = tokio::time::timeout(TERM, daemon.ended()).await;
        }
        let prefix = self.instance.prefix();
        Err(Failure::new("the daemon ended before its Sandboxes: some may go on")
            .hint(format!("`{prefix}pepo down` removes them; `{prefix}pepo up` takes them over")))
    }
}

/// Tells whoever reads our output. A reader that has gone (`pepo up | head`) ends nothing that runs.
fn tell(text: &str) {
    let _ = render::out(text);
}

/// The daemon: our child, or somebody's.
enum Daemon {
    Ours { child: Box<Child>, since: Instant },
    Taken { fd: Arc<OwnedFd>, gone: watch::Receiver<bool>, since: Instant },
}

struct Ended {
    orderly: bool,
    how: String,
}

impl Daemon {
    fn since(&self) -> Instant {
        match self {
            Daemon::Ours { since, .. } | Daemon::Taken { since, .. } => *since,
        }
    }

    async fn ended(&mut self) -> Ended {
        match self {
            Daemon::Ours { child, .. } => match child.wait().await {
                Ok(status) => Ended { orderly: status.success(), how: launch::ended(status) },
                Err(error) => Ended { orderly: false, how: error.to_string() },
            },
            Daemon::Taken { gone, .. } => {
                let _ = gone.wait_for(|gone| *gone).await;
                Ended { orderly: false, how: "it was another's child".into() }
            }
        }
    }

    fn signal(&self, signal: Signal) {
        match self {
            Daemon::Ours { child, .. } => signal_child(child, signal),
            Daemon::Taken { fd, .. } => _ = pidfd_send_signal(&**fd, signal),
        }
    }
}

struct Edge {
    child: Child,
    /// Its standard input, which waiting for it would close.
    _lifeline: Option<ChildStdin>,
    url: String,
    since: Instant,
}

struct Pause(Duration);

impl Pause {
    fn new() -> Self {
        Pause(PAUSES.0)
    }

    /// How long to wait now, after a program that was started then.
    fn next(&mut self, since: Instant) -> Duration {
        if since.elapsed() >= HEALTHY {
            self.0 = PAUSES.0;
        }
        let now = self.0;
        self.0 = (now * 2).min(PAUSES.1);
        now
    }

    async fn wait(&mut self, since: Instant) {
        tokio::time::sleep(self.next(since)).await;
    }
}

fn in_instance<'a>(command: &'a mut Command, instance: &Instance) -> &'a mut Command {
    match &instance.home {
        Some(home) => command.env("PEPO_HOME", home),
        None => command.env_remove("PEPO_HOME"),
    };
    // A Ctrl-C on our terminal is for us; we end both in order.
    command.process_group(0)
}

async fn start_daemon(pepod: &Path, instance: &Instance) -> Outcome<(Daemon, Option<String>)> {
    let (ready, ready_out) = launch::ready_pipe()?;
    let mut command = Command::new(pepod);
    command.args(["serve", "--ready-fd", &ready_out.as_raw_fd().to_string()]).stdin(Stdio::null());
    let child = in_instance(&mut command, instance)
        .spawn()
        .map_err(|error| Failure::new(format!("cannot start {}: {error}", pepod.display())))?;
    drop(ready_out);
    let mut daemon = Daemon::Ours { child: Box::new(child), since: Instant::now() };
    let line = tokio::task::spawn_blocking(move || launch::ready_line(ready));
    let ready = match line.await.map_err(|error| Failure::new(format!("waiting failed: {error}")))? {
        Ok(Some(ready)) => ready,
        Ok(None) => {
            let ended = tokio::time::timeout(TERM, daemon.ended()).await;
            daemon.signal(Signal::KILL);
            let how = ended.map_or_else(|_| "it hung".into(), |ended| ended.how);
            return Err(Failure::new(format!("the daemon did not start ({how}); its own words are above")));
        }
        Err(failure) => {
            daemon.signal(Signal::KILL);
            let _ = tokio::time::timeout(TERM, daemon.ended()).await;
            return Err(failure);
        }
    };
    Ok((daemon, ready.key))
}

async fn start_edge(program: &Path, instance: &Instance) -> Outcome<Edge> {
    let mut command = Command::new(program);
    // Its standard input is its lifeline: when we die, it ends.
    command.arg("--lifeline").stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = in_instance(&mut command, instance)
        .spawn()
        .map_err(|error| Failure::new(format!("cannot start {}: {error}", program.display())))?;
    let mut url = String::new();
    if let Some(stdout) = child.stdout.take() {
        let mut lines = BufReader::new(stdout);
        let reading = tokio::io::AsyncReadExt::take(&mut lines, 4096);
        let mut reading = BufReader::new(reading);
        let _ = tokio::time::timeout(ANSWER, reading.read_line(&mut url)).await;
    }
    let url = url.trim().to_owned();
    if !url.starts_with("http://") && !url.starts_with("https://") {
        stop_child(&mut child).await;
        return Err(Failure::new("pepo-edge did not start; its own words are above"));
    }
    Ok(Edge { _lifeline: child.stdin.take(), child, url, since: Instant::now() })
}

async fn answers(url: &str) -> Outcome<()> {
    // Whom a certificate names is for those who call by that name. It listens: its URL came after that.
    if url.starts_with("https://") {
        return Ok(());
    }
    let client = Client::http(url, None)?;
    let deadline = Instant::now() + ANSWER;
    loop {
        match client.readyz().await {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() >= deadline => {
                return Err(Failure::from(error).doing(format!("the API at {url} does not answer")));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

fn signal_child(child: &Child, signal: Signal) {
    // It is not reaped before we wait for it, so the pid is its own.
    if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

async fn stop_child(child: &mut Child) {
    signal_child(child, Signal::TERM);
    if tokio::time::timeout(TERM, child.wait()).await.is_err() {
        let _ = child.start_kill();
        let _ = child.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_supervisor_hears_who_is_first() {
        let dir = tempfile::Builder::new().prefix("p").tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let instance = Instance { home: Some(dir.path().to_owned()), app: None };
        assert_eq!(holder(&lock_path(&instance)), None);
        let first = Supervisor::take(instance.clone()).unwrap();
        assert_eq!(holder(&lock_path(&instance)), Some(std::process::id()));
        let refused = Supervisor::take(instance.clone()).err().unwrap();
        assert_eq!(refused.message(), format!("`pepo up` runs already (pid {})", std::process::id()));
        drop(first);
        assert_eq!(holder(&lock_path(&instance)), None);
        assert!(Supervisor::take(instance).is_ok());
    }

    #[test]
    fn the_listener_of_a_socket_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert_eq!(listener(&path), None);
        let _listening = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(listener(&path), Some(rustix::process::getpid()));
    }

    #[test]
    fn pauses_grow_to_a_limit_and_shrink_again() {
        let mut pause = Pause::new();
        let now = Instant::now();
        assert_eq!([(); 3].map(|()| pause.next(now)), [1, 2, 4].map(|n| PAUSES.0 * n));
        assert_eq!((0..20).map(|_| pause.next(now)).last(), Some(PAUSES.1));
        let long_ago = now.checked_sub(HEALTHY).unwrap();
        assert_eq!(pause.next(long_ago), PAUSES.0);
    }
}
