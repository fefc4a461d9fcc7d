//! The agent: accepts streams, gives each to its operation, and answers the small ones itself.
//!
//! One thread, one task per stream; what blocks (starting programs, files) is on threads of the runtime's pool, and
//! bounded. Everything that a peer can make grow has a limit here. Called by `main` and, in a guest, by `init`.
//!
//! ```text
//!   accept -> first frame within 10 s (once activated), a Request -> room among the streams? -> the operation -> End -> host closes
//! ```

mod answers;
mod ready;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pepo_proto::{
    Exec, FailureCode, Frame, LEASE_SECONDS, MAX_STREAMS, Network, OpId, Operation, Outcome, Request, Share,
    URGENT_STREAMS, Variable,
};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::{spawn_blocking, spawn_local};
use tokio::time::{interval, sleep, timeout};

use crate::attach::{self, Wants};
use crate::clock::Clock;
use crate::exec::{self, Op};
use crate::ring::{Kept, Ring};
use crate::shell::{self, Shell};
use crate::spawn::{Environment, Launch, Wiring};
use crate::stream::{CLOSE_WAIT, Stream, failed};
use crate::sys;
use crate::tree::{self, Trees};
use crate::user::{User, Users};
use crate::wire::Wire;
use crate::{dial, files, share};

/// How long a new stream may take to send its Request, once the guest is somebody's.
const FIRST_FRAME: Duration = Duration::from_secs(10);

/// How long ended commands' output is kept (surface: "at most 10 min after its end").
const KEEP: Duration = Duration::from_secs(600);

/// Ended commands that are remembered by name and outcome, so that a repeated Exec does not run again.
const REMEMBERED: usize = 4096;

/// Commands that run at once.
const MAX_RUNNING: usize = 256;

/// Lasting shells.
const MAX_SHELLS: usize = 16;

/// Answers of operations that change something, kept for a repeated Request.
const ANSWERS: usize = 1024;

/// Operations on files at once; each has a thread.
const MAX_FILE_OPERATIONS: usize = 48;

/// Threads for what blocks: those of file operations, and some for starting programs.
pub const THREADS: usize = MAX_FILE_OPERATIONS + 16;

/// How long the answer to Shutdown may take to be read.
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// Whether this program may act on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effects {
    /// It is the guest's: host name, clock, mounts and power are its business.
    Pid1,
    /// It is a process on somebody's machine: those are answered and not done, and only its own children are touched.
    Process,
}

/// How the agent is run.
#[derive(Debug)]
pub struct Settings {
    /// What it may do.
    pub effects: Effects,
    /// How long a command outlives its last stream.
    pub lease: Duration,
    /// Ends when the machine is ready for programs; Activate waits for it.
    pub settled: Option<OwnedFd>,
}

impl Settings {
    /// Those of a release.
    pub fn new(effects: Effects) -> Self {
        Settings { effects, lease: Duration::from_secs(LEASE_SECONDS), settled: None }
    }
}

/// Everything the operations share.
pub struct Agent {
    settings: Settings,
    /// See [`Settings::lease`].
    pub lease: Duration,
    /// The budget of kept output.
    pub kept: Rc<Kept>,
    /// Where commands' process trees come from.
    pub trees: Rc<Trees>,
    /// Nothing to read and nowhere to write.
    pub null: Arc<OwnedFd>,
    /// Pipes being read for processes that outlived their command.
    pub sinks: Cell<usize>,
    users: Rc<Users>,
    image_env: RefCell<Environment>,
    activation: RefCell<Option<Vec<Variable>>>,
    /// What the interface is set up as.
    network: RefCell<Option<Network>>,
    /// Whether only the name is missing in the files that tell who this machine is.
    identity: Cell<bool>,
    clock: Clock,
    /// Where the first tree of the host's is mounted: commands begin there.
    place: RefCell<Option<String>>,
    ops: RefCell<HashMap<OpId, Rc<Op>>>,
    ended: RefCell<VecDeque<OpId>>,
    running: Cell<usize>,
    shells: RefCell<HashMap<(String, u32), Rc<Shell>>>,
    /// Operations that are not commands, while they run.
    others: RefCell<HashMap<OpId, Rc<Notify>>>,
    answers: RefCell<VecDeque<(OpId, Outcome)>>,
    streams: Cell<usize>,
    file_operations: Cell<usize>,
    listening_ms: u64,
    settled: RefCell<Option<Rc<AsyncFd<OwnedFd>>>>,
    over: Notify,
}

/// Milliseconds since the kernel started.
fn uptime_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// Runs the agent on a listening socket until Shutdown, or until `stop` says so.
///
/// # Errors
/// Where the runtime or the socket fails: the agent cannot go on then.
pub fn run(listener: OwnedFd, settings: Settings) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(THREADS)
        .thread_stack_size(512 << 10)
        .build()?;
    let local = tokio::task::LocalSet::new();
    let result = local.block_on(&runtime, serve(listener, settings));
    // Threads that still move files are not waited for.
    runtime.shutdown_background();
    result
}

async fn serve(listener: OwnedFd, mut settings: Settings) -> io::Result<()> {
    let settled = settings.settled.take().map(|fd| sys::watch(fd, tokio::io::Interest::READABLE)).transpose()?;
    let in_guest = settings.effects == Effects::Pid1;
    let commands = Path::new(tree::COMMANDS);
    let null = rustix::fs::open(
        "/dev/null",
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    let agent = Rc::new(Agent {
        lease: settings.lease,
        kept: Kept::new(answers::memory().0),
        trees: Trees::new((in_guest && commands.is_dir()).then_some(commands)),
        null: Arc::new(null),
        sinks: Cell::new(0),
        users: Rc::new(Users::new(Path::new("/"))),
        image_env: RefCell::default(),
        activation: RefCell::new(None),
        network: RefCell::new(None),
        identity: Cell::new(false),
        clock: Clock::default(),
        place: RefCell::new(None),
        ops: RefCell::default(),
        ended: RefCell::default(),
        running: Cell::new(0),
        shells: RefCell::default(),
        others: RefCell::default(),
        answers: RefCell::default(),
        streams: Cell::new(0),
        file_operations: Cell::new(0),
        listening_ms: uptime_ms(),
        over: Notify::new(),
        settled: RefCell::new(settled.map(Rc::new)),
        settings,
    });
    let listener = sys::watch(listener, tokio::io::Interest::READABLE)?;
    let mut sweep = interval(KEEP / 20);
    let mut stop = stop_signal(in_guest)?;
    loop {
        tokio::select! {
            ready = listener.readable() => {
                let mut ready = ready?;
                match ready.try_io(|listener| sys::accept(listener.as_fd())) {
                    Ok(Ok((socket, cid))) => agent.clone().welcome(socket, cid),
                    // The peer gave up, or descriptors are short: the next one may fare better.
                    Ok(Err(_)) => sleep(Duration::from_millis(10)).await,
                    Err(_would_block) => {}
                }
            }
            _ = sweep.tick() => agent.forget_old(),
            () = agent.over.notified() => return Ok(()),
            () = stop.recv() => {
                agent.kill_all();
                return Ok(());
            }
        }
    }
}

/// SIGTERM or SIGINT to a host process. A guest's agent does not end by either.
struct Stop(Option<(tokio::signal::unix::Signal, tokio::signal::unix::Signal)>);

fn stop_signal(in_guest: bool) -> io::Result<Stop> {
    use tokio::signal::unix::{SignalKind, signal};
    if in_guest {
        return Ok(Stop(None));
    }
    Ok(Stop(Some((signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))))
}

impl Stop {
    async fn recv(&mut self) {
        match &mut self.0 {
            Some((terminate, interrupt)) => {
                tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
            }
            None => std::future::pending().await,
        }
    }
}

/// A count that goes back when dropped.
struct Counted(Rc<Agent>, fn(&Agent) -> &Cell<usize>);

impl Counted {
    fn one(agent: &Rc<Agent>, which: fn(&Agent) -> &Cell<usize>) -> Self {
        which(agent).set(which(agent).get() + 1);
        Counted(agent.clone(), which)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let count = (self.1)(&self.0);
        count.set(count.get() - 1);
    }
}

/// The name of a running operation that is not a command; free again when dropped.
struct Named(Rc<Agent>, OpId);

impl Drop for Named {
    fn drop(&mut self) {
        self.0.others.borrow_mut().remove(&self.1);
    }
}

fn streams(agent: &Agent) -> &Cell<usize> {
    &agent.streams
}

fn file_operations(agent: &Agent) -> &Cell<usize> {
    &agent.file_operations
}

impl Agent {
    /// Whether this is a guest.
    pub fn is_guest(&self) -> bool {
        self.settings.effects == Effects::Pid1
    }

    /// Who `user` is.
    ///
    /// # Errors
    /// [`FailureCode::NotFound`] or [`FailureCode::Invalid`].
    pub fn user(&self, user: Option<&str>) -> Result<User, Outcome> {
        if user.is_none() && !rustix::process::geteuid().is_root() {
            // It can be nobody else.
            return self.find(&rustix::process::geteuid().as_raw().to_string());
        }
        match user {
            Some(user) => self.find(user),
            None if self.is_guest() => self.users.find(None).map_err(not_a_user),
            // A host process keeps to its own account unless told otherwise.
            None => self.find("0"),
        }
    }

    fn find(&self, user: &str) -> Result<User, Outcome> {
        self.users.find(Some(user)).map_err(not_a_user)
    }

    /// What Activate added to every command's environment.
    pub fn activation_env(&self) -> Vec<Variable> {
        self.activation.borrow().clone().unwrap_or_default()
    }

    /// Where a command begins that says nothing about it; at home where this says nothing either.
    pub fn place(&self) -> Option<String> {
        self.place.borrow().clone()
    }

    /// The Image's environment.
    pub fn image_env(&self) -> Environment {
        self.image_env.borrow().clone()
    }

    /// Starts a program, off this thread where that may block for long.
    ///
    /// # Errors
    /// What the host is to be told.
    pub async fn launch(&self, launch: Launch, wiring: Wiring) -> Result<(i32, OwnedFd), Outcome> {
        if self.is_guest() {
            // A program's path may lead into a file system that answers late or never.
            return spawn_blocking(move || launch.start(&wiring))
                .await
                .unwrap_or_else(|_| Err(failed(FailureCode::Io, "the program was not started")));
        }
        // On a host, children die with the thread that made them: that must be the one that lives as long as the agent.
        launch.start(&wiring)
    }

    /// A command has ended.
    pub fn ended(&self, id: OpId) {
        self.running.set(self.running.get().saturating_sub(1));
        let mut ended = self.ended.borrow_mut();
        ended.push_back(id);
        while ended.len() > REMEMBERED {
            if let Some(oldest) = ended.pop_front() {
                self.ops.borrow_mut().remove(&oldest);
            }
        }
    }

    fn forget_old(&self) {
        let ops = self.ops.borrow();
        for op in ops.values() {
            op.tidy();
            if op.ended_at().is_some_and(|at| at.elapsed() > KEEP)
                && let Ok(mut ring) = op.ring.try_borrow_mut()
            {
                ring.give_up();
            }
        }
    }

    /// A command that nobody will ask for.
    fn forget(&self, id: OpId) {
        self.ops.borrow_mut().remove(&id);
        self.ended.borrow_mut().retain(|ended| *ended != id);
    }

    fn kill_all(&self) {
        for op in self.ops.borrow().values() {
            op.kill_now();
        }
    }

    fn op(&self, id: OpId) -> Result<Rc<Op>, Outcome> {
        let op = self.ops.borrow().get(&id).cloned();
        op.ok_or_else(|| failed(FailureCode::UnknownOp, format!("no command {id}")))
    }

    fn welcome(self: Rc<Self>, socket: OwnedFd, cid: Option<u32>) {
        let stranger = cid.is_some_and(|cid| cid != sys::HOST_CID);
        if stranger || self.streams.get() >= MAX_STREAMS {
            return;
        }
        let counted = Counted::one(&self, streams);
        spawn_local(async move {
            if let Ok(stream) = Stream::new(socket) {
                self.talk(stream).await;
            }
            drop(counted);
        });
    }

    async fn talk(self: Rc<Self>, mut stream: Stream) {
        let first = {
            let mut receiving = std::pin::pin!(stream.receive());
            loop {
                match timeout(FIRST_FRAME, &mut receiving).await {
                    Ok(first) => break first,
                    // Until the guest is somebody's, the host may keep streams ready for whoever that will be.
                    Err(_) if self.activation.borrow().is_none() => {}
                    Err(_) => return,
                }
            }
        };
        let request = match first {
            Ok(Some(Frame::Request(request))) => request,
            Ok(Some(_)) => return stream.end(failed(FailureCode::Invalid, "a stream begins with a request")).await,
            Ok(None) | Err(pepo_proto::Error::Io(_) | pepo_proto::Error::Truncated) => return,
            Err(error) => return stream.end(failed(FailureCode::Invalid, explain(&error))).await,
        };
        if !request.operation.is_urgent() && self.streams.get() > MAX_STREAMS - URGENT_STREAMS {
            return stream.end(failed(FailureCode::Busy, "all streams are in use")).await;
        }
        let Request { op, operation, paced } = request;
        if paced == Some(true) {
            stream.pace();
        }
        match operation {
            Operation::Exec(exec) => self.exec(stream, op, exec).await,
            Operation::Attach(wanted) => match self.op(wanted.target) {
                Ok(target) => {
                    let wants = Wants {
                        stream: op,
                        from: wanted.from,
                        input: wanted.input,
                        keep_input: wanted.keep_input,
                        sole: wanted.sole == Some(true),
                    };
                    attach::serve(stream, target, wants).await;
                }
                Err(outcome) => stream.end(outcome).await,
            },
            operation => self.other(stream, op, operation).await,
        }
    }

    /// An operation that is not a command: runs once under its name, and can be cancelled.
    async fn other(self: Rc<Self>, mut stream: Stream, id: OpId, operation: Operation) {
        let answered = self.answers.borrow().iter().find(|(op, _)| *op == id).map(|(_, outcome)| outcome.clone());
        if let Some(outcome) = answered {
            if stream.accept().is_ok() {
                stream.end(outcome).await;
            }
            return;
        }
        if self.others.borrow().contains_key(&id) || self.ops.borrow().contains_key(&id) {
            return stream.end(failed(FailureCode::Exists, format!("operation {id} runs already"))).await;
        }
        let cancel = Rc::new(Notify::new());
        self.others.borrow_mut().insert(id, cancel.clone());
        let named = Named(self.clone(), id);
        match operation {
            Operation::Dial(dial) => match dial::connect(dial.port).await {
                Ok(socket) => {
                    let outcome = tokio::select! {
                        outcome = dial::pass(&mut stream, socket) => outcome,
                        () = cancel.notified() => None,
                    };
                    drop(named);
                    if let Some(outcome) = outcome {
                        stream.end(outcome).await;
                    }
                    return;
                }
                Err(outcome) => {
                    drop(named);
                    return stream.end(outcome).await;
                }
            },
            Operation::Share(wanted) => {
                drop(named);
                return self.share(stream, wanted).await;
            }
            operation if files::acting_user(&operation).is_some() => {
                return self.on_files(stream, named, cancel, operation).await;
            }
            operation => {
                let remember = matches!(operation, Operation::Activate(_));
                let is_last = matches!(operation, Operation::Shutdown);
                let is_first = matches!(operation, Operation::Hello(_));
                let mut events = vec![];
                let outcome = self.small(operation, &mut events).await;
                if remember {
                    self.remember(id, &outcome);
                }
                let mut queued = stream.accept();
                for event in events {
                    queued = queued.and_then(|()| stream.queue(Frame::Event(event)));
                }
                if is_last {
                    // The host reads the answer and closes; one that does not is not waited for.
                    let _ = timeout(LAST_ANSWER, stream.end(outcome)).await;
                    if self.is_guest() {
                        crate::mount::power_off();
                    }
                    self.over.notify_one();
                    return;
                }
                match queued {
                    Ok(()) => stream.end(outcome).await,
                    Err(error) => stream.end(failed(FailureCode::Io, explain(&error))).await,
                }
                if is_first && self.is_guest() {
                    self.warm_up().await;
                }
            }
        }
        drop(named);
    }

    /// Mounts a tree of the host's.
    async fn share(self: Rc<Self>, mut stream: Stream, wanted: Share) {
        if !self.is_guest() {
            return stream.end(failed(FailureCode::Invalid, "only a guest can mount a tree")).await;
        }
        self.settle().await;
        let path = wanted.path.clone();
        if mount(stream, wanted).await {
            self.place.borrow_mut().get_or_insert(path);
        }
    }

    /// An operation on files, on a thread. Cancelling it closes the stream.
    async fn on_files(self: Rc<Self>, mut stream: Stream, named: Named, cancel: Rc<Notify>, operation: Operation) {
        let id = named.1;
        let user = match self.user(files::acting_user(&operation).flatten()) {
            Ok(user) => user,
            Err(outcome) => return stream.end(outcome).await,
        };
        if self.file_operations.get() >= MAX_FILE_OPERATIONS {
            return stream
                .end(failed(FailureCode::Busy, format!("{MAX_FILE_OPERATIONS} operations on files run")))
                .await;
        }
        let counted = Counted::one(&self, file_operations);
        let remember = files::changes_something(&operation);
        let Ok(hold) = stream.fd().try_clone_to_owned() else {
            return stream.end(failed(FailureCode::Busy, "no descriptor is left")).await;
        };
        let Ok(mut wire) = Wire::new(stream) else {
            return;
        };
        let mut work = spawn_blocking(move || {
            let outcome = files::run(&mut wire, operation, &user);
            (wire, outcome)
        });
        let done = tokio::select! {
            done = &mut work => done,
            () = cancel.notified() => {
                // The thread sees its stream end, whatever it waits for there.
                let _ = rustix::net::shutdown(&hold, rustix::net::Shutdown::Both);
                work.await
            }
        };
        drop((hold, counted, named));
        let Ok((mut wire, Some(outcome))) = done else {
            return;
        };
        if remember {
            self.remember(id, &outcome);
        }
        let told = spawn_blocking(move || {
            let told = wire.queue(Frame::End(outcome)).and_then(|()| wire.flush());
            told.is_ok().then_some(wire)
        });
        if let Ok(Some(wire)) = told.await
            && let Ok(mut stream) = wire.into_stream()
        {
            // What happens to a stream after its End decides nothing any more.
            let _ = timeout(CLOSE_WAIT, stream.closed()).await;
        }
    }

    fn remember(&self, id: OpId, outcome: &Outcome) {
        let mut answers = self.answers.borrow_mut();
        if answers.len() >= ANSWERS {
            answers.pop_front();
        }
        answers.push_back((id, outcome.clone()));
    }

    async fn exec(self: Rc<Self>, mut stream: Stream, id: OpId, exec: Exec) {
        let known = self.ops.borrow().get(&id).cloned();
        if let Some(op) = known {
            return attach::serve(stream, op, Wants::of(id, &exec)).await;
        }
        if self.others.borrow().contains_key(&id) {
            return stream.end(failed(FailureCode::Exists, format!("operation {id} runs already"))).await;
        }
        if let Err(outcome) = self.admit(&exec) {
            return stream.end(outcome).await;
        }
        self.run(stream, id, exec).await;
    }

    /// Runs a command that was admitted, and serves the stream on which it came.
    async fn run(self: Rc<Self>, mut stream: Stream, id: OpId, exec: Exec) {
        let wants = Wants::of(id, &exec);
        let shell = match exec.shell.as_deref().map(|name| self.shell(name, exec.user.as_deref())).transpose() {
            Ok(shell) => shell,
            Err(outcome) => return stream.end(outcome).await,
        };
        let op = Op::new(id, &exec, Ring::new(self.kept.clone()));
        self.ops.borrow_mut().insert(id, op.clone());
        self.running.set(self.running.get() + 1);
        match shell {
            Some(shell) => spawn_local(shell::drive(self.clone(), op.clone(), shell, exec)),
            None => {
                let environment = self.image_env();
                spawn_local(exec::drive(self.clone(), op.clone(), exec, environment))
            }
        };
        drop(self);
        attach::serve(stream, op, wants).await;
    }

    /// The lasting shell of that name and user.
    fn shell(&self, name: &str, user: Option<&str>) -> Result<Rc<Shell>, Outcome> {
        if name.is_empty() || name.len() > 64 {
            return Err(failed(FailureCode::Invalid, "a shell's name has 1 to 64 bytes"));
        }
        let uid = self.user(user)?.uid;
        let mut shells = self.shells.borrow_mut();
        let key = (name.to_owned(), uid);
        if !shells.contains_key(&key) && shells.len() >= MAX_SHELLS {
            return Err(failed(FailureCode::Busy, format!("{MAX_SHELLS} lasting shells are in use")));
        }
        Ok(shells.entry(key).or_default().clone())
    }

    fn admit(&self, exec: &Exec) -> Result<(), Outcome> {
        if self.activation.borrow().is_none() {
            return Err(failed(FailureCode::State, "the guest has not been activated"));
        }
        if let Some(size) = exec.pty {
            exec::check_size(size)?;
        }
        if exec.argv.is_empty() {
            return Err(failed(FailureCode::Invalid, "no program is named"));
        }
        if self.running.get() >= MAX_RUNNING {
            return Err(failed(FailureCode::Busy, format!("{MAX_RUNNING} commands run already")));
        }
        Ok(())
    }
}

/// Mounts a tree; its stream is the kernel's from then on, and no longer one of ours. Whether it stands.
async fn mount(mut stream: Stream, wanted: Share) -> bool {
    let mounted = spawn_blocking(move || share::mount_tree(&wanted)).await;
    let mounted = mounted.unwrap_or_else(|_| Err(failed(FailureCode::Io, "the tree was not mounted")));
    let (fuse, pages) = match mounted {
        Ok(mounted) => mounted,
        Err(outcome) => {
            stream.end(outcome).await;
            return false;
        }
    };
    if stream.send(Frame::Accepted).await.is_err() {
        return false;
    }
    let (socket, input, _) = stream.into_parts();
    let pumping = std::thread::Builder::new().name("share".to_owned()).stack_size(128 << 10);
    // Without a thread both ends close here, which the host sees.
    pumping.spawn(move || share::pump(fuse, pages, socket, input)).is_ok()
}

fn not_a_user(error: crate::user::Error) -> Outcome {
    let code = match error {
        crate::user::Error::Unknown(_) => FailureCode::NotFound,
        crate::user::Error::Malformed(_) => FailureCode::Invalid,
    };
    failed(code, error.to_string())
}

/// An error and its reasons, in one line.
pub fn explain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(reason) = source {
        text = format!("{text}: {reason}");
        source = reason.source();
    }
    text
}
