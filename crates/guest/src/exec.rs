//! Commands: a program started, its output kept, its end told truthfully.
//!
//! Owns [`Op`], what a command is to everyone who attaches, and the one task that drives it. Streams come and go
//! (`attach`); the task stays until the end. Called by `agent` and `shell`.
//!
//! ```text
//!   Starting --spawned--> Running --first process ends, output drained--> Ended{outcome}
//!      |                     |  kill asked (Cancel, time-out, lease over): the whole tree, SIGKILL
//!      '------ failed -------'---------------------------------------------^
//! ```
//!
//! A command ends when its first process ends. Processes it leaves behind go on, as they do under a shell: their pipes
//! are read and dropped so that a later write does not kill them, and a Cancel still reaches them.

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pepo_proto::{Cause, Channel, Exec, FailureCode, OpId, OpState, OpSummary, Outcome, Process, PtySize};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{sleep, sleep_until};

use crate::agent::Agent;
use crate::collect::Collector;
use crate::input::Input;
use crate::ring::{Hold, Ring};
use crate::spawn::{Environment, Launch, Wiring};
use crate::stream::failed;
use crate::sys;
use crate::tree::{Goes, Tree};

/// How long a reader may stand still while others read before its stream is given up.
pub const STALL: Duration = Duration::from_secs(30);

/// Where a command is.
pub enum Stage {
    /// Its program is being started, or waits for its shell.
    Starting,
    /// Its program runs.
    Running {
        /// Its first process.
        pid: i32,
        /// The same, in a form that cannot mean another process.
        pidfd: Rc<OwnedFd>,
    },
    /// It is over.
    Ended {
        /// How.
        outcome: Outcome,
        /// When.
        at: Instant,
    },
}

struct Reader {
    id: u64,
    cursor: u64,
    /// Whether the frame at the cursor has been written in part: then its bytes must stay.
    mid_frame: bool,
    moved: Instant,
}

/// One command, as seen by the streams attached to it.
pub struct Op {
    /// Its name.
    pub id: OpId,
    /// Whether it goes on without a stream beyond the lease.
    pub detached: bool,
    /// Whether its output is one terminal.
    pub terminal: bool,
    /// Its kept output.
    pub ring: Rc<RefCell<Ring>>,
    /// Its input.
    pub input: Input,
    /// Told when output came or the stage changed.
    pub changed: Notify,
    /// Told when a reader has gone on.
    pub room: Notify,
    /// Told when its task has something to look at.
    pub wake: Notify,
    stage: RefCell<Stage>,
    readers: RefCell<Vec<Reader>>,
    streams: Cell<usize>,
    made: Cell<u64>,
    sole_from: Cell<u64>,
    /// The streams there are, by the name of their Request.
    names: RefCell<Vec<(u64, OpId)>>,
    unattended_since: Cell<Option<Instant>>,
    kill: Cell<Option<Cause>>,
    master: RefCell<Option<Rc<OwnedFd>>>,
    tree: RefCell<Option<Rc<Tree>>>,
    /// The shell it runs in: a process that its signals are not for.
    shell: Cell<Option<i32>>,
    started: Cell<Instant>,
}

impl Op {
    /// A command that has not been started.
    pub fn new(id: OpId, exec: &Exec, ring: Ring) -> Rc<Self> {
        Rc::new(Op {
            id,
            detached: exec.detached,
            terminal: exec.pty.is_some(),
            ring: Rc::new(RefCell::new(ring)),
            input: Input::new(exec.stdin || exec.pty.is_some()),
            changed: Notify::new(),
            room: Notify::new(),
            wake: Notify::new(),
            stage: RefCell::new(Stage::Starting),
            readers: RefCell::default(),
            streams: Cell::new(0),
            made: Cell::new(0),
            sole_from: Cell::new(0),
            names: RefCell::default(),
            unattended_since: Cell::new(None),
            kill: Cell::new(None),
            master: RefCell::default(),
            tree: RefCell::default(),
            shell: Cell::new(None),
            started: Cell::new(Instant::now()),
        })
    }

    /// How it ended, where it has.
    pub fn outcome(&self) -> Option<Outcome> {
        match &*self.stage.borrow() {
            Stage::Ended { outcome, .. } => Some(outcome.clone()),
            _ => None,
        }
    }

    /// When it ended, where it has.
    pub fn ended_at(&self) -> Option<Instant> {
        match &*self.stage.borrow() {
            Stage::Ended { at, .. } => Some(*at),
            _ => None,
        }
    }

    /// Its first process, while it runs.
    pub fn running(&self) -> Option<(i32, Rc<OwnedFd>)> {
        match &*self.stage.borrow() {
            Stage::Running { pid, pidfd } => Some((*pid, pidfd.clone())),
            _ => None,
        }
    }

    /// Whether it is still being started.
    pub fn is_starting(&self) -> bool {
        matches!(&*self.stage.borrow(), Stage::Starting)
    }

    /// For the list of operations.
    pub fn summary(&self) -> OpSummary {
        let ring = self.ring.borrow();
        let outcome = self.outcome();
        OpSummary {
            op: self.id,
            state: match (&outcome, self.streams.get()) {
                (Some(_), _) => OpState::Ended,
                (None, 0) => OpState::Unattended,
                (None, _) => OpState::Attached,
            },
            detached: self.detached,
            kept_from: ring.kept_from(),
            next: ring.next(),
            outcome,
        }
    }

    /// Asks for its end. The first cause asked for is the one told. After its end: what it left behind is killed.
    pub fn ask_kill(&self, cause: Cause) {
        if self.kill.get().is_none() {
            self.kill.set(Some(cause));
        }
        if self.outcome().is_some()
            && let Some(tree) = &*self.tree.borrow()
        {
            tree.kill();
        }
        self.wake.notify_one();
    }

    /// Lets go of the processes it left behind, once there are none any more.
    pub fn tidy(&self) {
        let gone = self.ended_at().is_some() && self.tree.borrow().as_ref().is_some_and(|tree| !tree.is_populated());
        if gone {
            self.tree.borrow_mut().take();
        }
    }

    /// Kills what it has of processes, at once, without waiting for its task.
    pub fn kill_now(&self) {
        if let Some(tree) = &*self.tree.borrow() {
            tree.kill();
        }
    }

    /// What its end was asked for with.
    pub fn asked(&self) -> Option<Cause> {
        self.kill.get()
    }

    /// Waits until its end is asked for.
    pub async fn kill_asked(&self) -> Cause {
        loop {
            if let Some(cause) = self.kill.get() {
                return cause;
            }
            self.wake.notified().await;
        }
    }

    /// Sends a signal to the first process or to all.
    ///
    /// # Errors
    /// Where it does not run, or the kernel refuses.
    pub fn signal(&self, signal: i32, tree: bool) -> Result<(), Outcome> {
        let Some((_, pidfd)) = self.running() else {
            return Err(failed(FailureCode::State, "the command does not run"));
        };
        let send = |signal| {
            sys::pidfd_signal(pidfd.as_fd(), signal).map_err(|error| failed(FailureCode::Io, error.to_string()))
        };
        match (&*self.tree.borrow(), self.shell.get()) {
            // As Ctrl-C does: the shell gives up the rest of the line, too. Stopped meanwhile, or it could see its
            // program's end before its own interrupt, and go on.
            (Some(tree), Some(shell)) if signal == libc::SIGINT => {
                send(libc::SIGSTOP)?;
                tree.signal(signal, Some(shell));
                let interrupted = send(signal);
                send(libc::SIGCONT)?;
                interrupted
            }
            (Some(all), shell) if tree || shell.is_some() => {
                all.signal(signal, shell);
                Ok(())
            }
            _ => send(signal),
        }
    }

    /// Sets its terminal's size.
    ///
    /// # Errors
    /// Where it has none.
    pub fn resize(&self, size: PtySize) -> Result<(), Outcome> {
        check_size(size)?;
        let master = self.master.borrow();
        let Some(master) = &*master else {
            return Err(failed(FailureCode::State, "the command has no terminal"));
        };
        set_size(master, size).map_err(|error| failed(FailureCode::Io, error.to_string()))
    }

    /// Waits until it has ended.
    pub async fn ended(&self) -> Outcome {
        loop {
            let changed = self.changed.notified();
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            changed.await;
        }
    }

    /// What a fill must not drop.
    pub fn hold(&self) -> Hold {
        let killed = self.kill.get().is_some();
        let readers = self.readers.borrow();
        // A command that is being killed waits for nobody, but what a reader was promised stays.
        match readers.iter().filter(|reader| !killed || reader.mid_frame).map(|reader| reader.cursor).min() {
            Some(cursor) => Hold::From(cursor),
            None if self.detached || killed => Hold::Nothing,
            // Within the lease: what a returning reader may ask for again stays.
            None => Hold::From(0),
        }
    }

    /// Drops readers that stand still while another one waits for more, or at a detached command, which is not to be held
    /// up by a host that has gone without a word. Who is still there attaches again.
    pub fn drop_stalled(&self) {
        let next = self.ring.borrow().next();
        let mut readers = self.readers.borrow_mut();
        let goes_on = |reader: &Reader| reader.cursor == next || reader.moved.elapsed() < STALL;
        if self.detached || readers.iter().any(goes_on) {
            readers.retain(goes_on);
            drop(readers);
            self.changed.notify_waiters();
            self.room.notify_one();
        }
    }

    /// Closes the streams of this name: the host has said that it does not read them any more.
    pub fn leave(&self, stream: OpId) {
        let mut names = self.names.borrow_mut();
        let before = names.len();
        names.retain(|(_, name)| *name != stream);
        if names.len() < before {
            self.readers.borrow_mut().retain(|reader| names.iter().any(|(id, _)| *id == reader.id));
            drop(names);
            self.changed.notify_waiters();
            self.room.notify_one();
        }
    }

    /// Its program runs; in a shell, the shell takes it up.
    pub fn run(&self, pid: i32, pidfd: Rc<OwnedFd>, tree: Rc<Tree>, shell: Option<i32>) {
        self.started.set(Instant::now());
        self.shell.set(shell);
        *self.tree.borrow_mut() = Some(tree);
        *self.stage.borrow_mut() = Stage::Running { pid, pidfd };
        self.changed.notify_waiters();
    }

    /// It is over: told to all, its processes let go, its output among what is given up first.
    pub fn finish(&self, agent: &Agent, outcome: Outcome) {
        self.input.close();
        self.master.borrow_mut().take();
        *self.stage.borrow_mut() = Stage::Ended { outcome, at: Instant::now() };
        let leftover = self.tree.borrow().as_ref().is_some_and(|tree| tree.is_populated());
        if !leftover {
            self.tree.borrow_mut().take();
        }
        self.ring.borrow_mut().settle();
        agent.kept.ended(&self.ring);
        self.changed.notify_waiters();
        agent.ended(self.id);
    }

    /// The end of its program as told to the host.
    pub fn process(&self, cause: Cause, code: Option<i32>, signal: Option<i32>, cwd: Option<String>) -> Outcome {
        let ring = self.ring.borrow();
        Outcome::Process(Process {
            cause,
            code,
            signal,
            stdout_bytes: ring.bytes(Channel::Out),
            stderr_bytes: ring.bytes(Channel::Err),
            elapsed_ms: self.started.get().elapsed().as_millis() as u64,
            cwd,
        })
    }

    /// When its lease is over, where one counts.
    pub fn lease_end(&self, lease: Duration) -> Option<Instant> {
        let since = self.unattended_since.get().filter(|_| !self.detached)?;
        Some(since + lease)
    }
}

/// A stream's place at a command: held while the stream lives, so that a lost one is noticed in every way it can end.
pub struct Place {
    op: Rc<Op>,
    id: u64,
    reads: bool,
}

impl Place {
    /// Takes a place for the stream of this name; with `from`, one that reads from there on. `sole` closes all others.
    pub fn take(op: &Rc<Op>, stream: OpId, from: Option<u64>, sole: bool) -> Self {
        let id = op.made.get();
        op.made.set(id + 1);
        if sole {
            op.sole_from.set(id);
            op.readers.borrow_mut().clear();
            op.room.notify_one();
            op.changed.notify_waiters();
        }
        if let Some(cursor) = from {
            op.readers.borrow_mut().push(Reader { id, cursor, mid_frame: false, moved: Instant::now() });
        }
        op.names.borrow_mut().push((id, stream));
        op.streams.set(op.streams.get() + 1);
        op.unattended_since.set(None);
        op.wake.notify_one();
        Place { op: op.clone(), id, reads: from.is_some() }
    }

    /// Tells how far it has read.
    pub fn read_to(&self, cursor: u64, mid_frame: bool) {
        if let Some(reader) = self.op.readers.borrow_mut().iter_mut().find(|reader| reader.id == self.id) {
            reader.cursor = cursor;
            reader.mid_frame = mid_frame;
            reader.moved = Instant::now();
        }
        self.op.room.notify_one();
    }

    /// Whether it has been closed from the other side of the command.
    pub fn is_closed(&self) -> bool {
        self.id < self.op.sole_from.get()
            || !self.op.names.borrow().iter().any(|(id, _)| *id == self.id)
            || (self.reads && !self.op.readers.borrow().iter().any(|reader| reader.id == self.id))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.op.readers.borrow_mut().retain(|reader| reader.id != self.id);
        self.op.names.borrow_mut().retain(|(id, _)| *id != self.id);
        self.op.streams.set(self.op.streams.get() - 1);
        if self.op.streams.get() == 0 {
            self.op.unattended_since.set(Some(Instant::now()));
        }
        self.op.room.notify_one();
        self.op.wake.notify_one();
    }
}

/// Whether a terminal can have this size.
///
/// # Errors
/// [`FailureCode::Invalid`].
pub fn check_size(size: PtySize) -> Result<(), Outcome> {
    if (1..=1000).contains(&size.cols) && (1..=1000).contains(&size.rows) {
        Ok(())
    } else {
        Err(failed(FailureCode::Invalid, format!("a terminal of {}x{} is outside 1..=1000", size.cols, size.rows)))
    }
}

fn set_size(master: &OwnedFd, size: PtySize) -> io::Result<()> {
    let size = rustix::termios::Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(master, size)?)
}

/// A started program and the agent's ends of what it is connected to.
struct Child {
    pid: i32,
    pidfd: Rc<OwnedFd>,
    collector: Collector,
    feed: Option<AsyncFd<Arc<OwnedFd>>>,
    tree: Rc<Tree>,
}

/// Drives a command from its start to its end. `op` is in the agent's table already.
pub async fn drive(agent: Rc<Agent>, op: Rc<Op>, exec: Exec, environment: Environment) {
    let outcome = match start(&agent, &op, &exec, environment).await {
        Ok(child) => follow(&agent, &op, child, exec.timeout_ms).await,
        Err(outcome) => outcome,
    };
    op.finish(&agent, outcome);
}

async fn start(agent: &Rc<Agent>, op: &Op, exec: &Exec, mut environment: Environment) -> Result<Child, Outcome> {
    let io = |error: io::Error| failed(FailureCode::Busy, format!("no pipe, terminal or group can be made: {error}"));
    let user = agent.user(exec.user.as_deref())?;
    let mut own = std::mem::take(&mut environment);
    own.of_user(&user);
    own.add(&agent.activation_env())?;
    if exec.pty.is_some() && own.get("TERM").is_none() {
        own.set("TERM", "xterm-256color");
    }
    own.add(&exec.env)?;
    let tree = Rc::new(agent.trees.plant().map_err(io)?);
    if let Some(limits) = &exec.limits {
        tree.limit(limits, Goes::All).map_err(|why| failed(FailureCode::Invalid, why))?;
    }
    let cwd = exec.cwd.clone().or_else(|| agent.place());
    let launch = Launch::new(&exec.argv, &own, cwd.as_deref(), &user, tree.mark())?;

    let mut feed = None;
    let (stdio, out, err) = match exec.pty {
        Some(size) => {
            let (master, slave) = open_pty(size, user.uid).map_err(io)?;
            let slave = Arc::new(slave);
            feed = Some(Arc::new(master.try_clone().map_err(io)?));
            *op.master.borrow_mut() = Some(Rc::new(master.try_clone().map_err(io)?));
            ([slave.clone(), slave.clone(), slave], master, None)
        }
        None => {
            let stdin = match exec.stdin {
                true => {
                    let (read, write) = pipe(End::Write).map_err(io)?;
                    feed = Some(Arc::new(write));
                    Arc::new(read)
                }
                false => agent.null.clone(),
            };
            let (out, stdout) = pipe(End::Read).map_err(io)?;
            let (err, stderr) = pipe(End::Read).map_err(io)?;
            ([stdin, Arc::new(stdout), Arc::new(stderr)], out, Some(err))
        }
    };
    let collector = Collector::new(out, err).map_err(io)?;
    let feed = feed.map(|fd| sys::watch(fd, tokio::io::Interest::WRITABLE)).transpose().map_err(io)?;
    let wiring = Wiring {
        stdio,
        extra: vec![],
        terminal: exec.pty.is_some(),
        group: tree.birthplace(),
        in_guest: agent.is_guest(),
    };
    let (pid, pidfd) = agent.launch(launch, wiring).await?;
    tree.rooted(pid);
    Ok(Child { pid, pidfd: Rc::new(pidfd), collector, feed, tree })
}

/// Which end of a pipe is the agent's, and does not block.
#[derive(Clone, Copy)]
enum End {
    Read,
    Write,
}

/// A pipe: its reading and its writing end.
fn pipe(ours: End) -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(if matches!(ours, End::Read) { &read } else { &write }, true)?;
    Ok((read, write))
}

/// A terminal: the agent's side and the program's.
fn open_pty(size: PtySize, owner: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags)?;
    unlockpt(&master)?;
    let slave = ioctl_tiocgptpeer(&master, flags)?;
    set_size(&master, size)?;
    if rustix::process::geteuid().is_root() {
        // As a login would: the user may open its own terminal by name.
        rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(owner)), None)?;
    }
    rustix::io::ioctl_fionbio(&master, true)?;
    Ok((master, slave))
}

/// Follows a running program to its end.
async fn follow(agent: &Rc<Agent>, op: &Rc<Op>, child: Child, timeout_ms: u64) -> Outcome {
    let Child { pid, pidfd, mut collector, feed, tree } = child;
    let exit = match sys::watch(pidfd.clone(), tokio::io::Interest::READABLE) {
        Ok(exit) => exit,
        Err(error) => {
            tree.kill();
            return failed(FailureCode::Io, format!("the program cannot be watched: {error}"));
        }
    };
    op.run(pid, pidfd, tree.clone(), None);
    let feeder = feed.map(|feed| {
        let op = op.clone();
        spawn_local(async move { op.input.feed(feed, op.terminal).await })
    });
    let deadline = (timeout_ms > 0).then(|| tokio::time::Instant::now() + Duration::from_millis(timeout_ms));
    let mut killed = None;
    loop {
        let lease = op.lease_end(agent.lease).map(tokio::time::Instant::from_std);
        tokio::select! {
            biased;
            ready = exit.readable() => {
                // An error here is no exit; the next look tells.
                drop(ready);
                break;
            }
            () = op.wake.notified() => {}
            () = until(deadline), if killed.is_none() => op.ask_kill(Cause::Timeout),
            () = until(lease), if killed.is_none() => op.ask_kill(Cause::Killed),
            () = collector.step(op), if !collector.is_done() => {}
        }
        if killed.is_none()
            && let Some(cause) = op.asked()
        {
            killed = Some(cause);
            tree.kill();
        }
    }
    let status = loop {
        match waitid(WaitId::PidFd(exit.get_ref().as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(status)) => break Some(status),
            Ok(None) => sleep(Duration::from_millis(1)).await,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break None,
        }
    };
    let mut kills = tree.memory_kills();
    if killed.is_some() {
        // Whatever was forked while the first kill went through.
        tree.kill();
    }
    tree.rooted(0);
    collector.drain(op).await;
    if kills == 0 {
        kills = tree.memory_kills();
    }
    if let Some(feeder) = feeder {
        feeder.abort();
    }
    if !collector.is_done() {
        collector.sink(agent);
    }
    let Some(status) = status else {
        return failed(FailureCode::Io, "the end of the program was not seen");
    };
    let (code, signal) = (status.exit_status(), status.terminating_signal());
    let cause = match killed {
        // It may have ended by itself just before the kill came: then that is the truth.
        Some(cause) if code.is_none() => cause,
        _ if kills > 0 && code != Some(0) => Cause::OutOfMemory,
        _ if signal.is_some() => Cause::Signal,
        _ => Cause::Exit,
    };
    op.process(cause, code, signal, None)
}

/// Waits until then, or for ever.
pub async fn until(when: Option<tokio::time::Instant>) {
    match when {
        Some(when) => sleep_until(when).await,
        None => pending().await,
    }
}
