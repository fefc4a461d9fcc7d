//! Running a program with a deadline, and looking at what it did.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// How long a program may run where a test does not say.
const LIMIT: Duration = Duration::from_secs(90);

/// Waits until there is something, looking often; fails at the limit, saying what was waited for.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until a count has stood still for half a second; fails at the limit, saying what was waited for.
pub fn until_still(what: &str, limit: Duration, count: impl Fn() -> u64) {
    let mut last = count();
    until(what, limit, || {
        std::thread::sleep(Duration::from_millis(500));
        let now = count();
        let still = now == last;
        last = now;
        still.then_some(())
    });
}

/// A program to be run.
pub struct Program {
    path: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    directory: Option<PathBuf>,
    stdin: Option<Vec<u8>>,
    limit: Duration,
    uid: Option<u32>,
}

impl Program {
    /// This one, with an environment of PATH and what is added.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path_variable = ("PATH".into(), std::env::var_os("PATH").unwrap_or_default());
        Program {
            path: path.into(),
            args: vec![],
            env: vec![path_variable, ("LANG".into(), "C.UTF-8".into())],
            directory: None,
            stdin: Some(vec![]),
            limit: LIMIT,
            uid: None,
        }
    }

    /// Adds arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Adds to the environment.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Its working directory.
    pub fn directory(mut self, path: impl Into<PathBuf>) -> Self {
        self.directory = Some(path.into());
        self
    }

    /// Its input; nothing where it is not given.
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = Some(bytes.into());
        self
    }

    /// Leaves its input open and silent until [`Started::feed`] and [`Started::close`].
    pub fn open_stdin(mut self) -> Self {
        self.stdin = None;
        self
    }

    /// How long it may take.
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs it as this user and group.
    pub fn uid(mut self, uid: u32) -> Self {
        self.uid = Some(uid);
        self
    }

    /// With at most so many descriptors, which it cannot raise.
    pub fn descriptors(mut self, most: u64) -> Self {
        let path = std::mem::replace(&mut self.path, "/usr/bin/prlimit".into());
        self.args.splice(0..0, [format!("--nofile={most}:{most}").into(), path.into()]);
        self
    }

    /// Starts it, in a process group of its own.
    pub fn start(self) -> Started {
        let mut command = Command::new(&self.path);
        command.args(&self.args).env_clear().envs(self.env).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        if let Some(uid) = self.uid {
            command.uid(uid).gid(uid);
        }
        let began = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{}: {error}", self.path.display()));
        let stdout = Pipe::read(child.stdout.take().expect("piped"));
        let stderr = Pipe::read(child.stderr.take().expect("piped"));
        let mut stdin = child.stdin.take();
        if let Some(bytes) = self.stdin {
            let mut to = stdin.take().expect("piped");
            // On a thread: a program that does not read must not hold the test.
            std::thread::spawn(move || {
                let _ = to.write_all(&bytes);
            });
        }
        let shown = self.args.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ");
        Started {
            what: format!("{} {shown}", name(&self.path)),
            child,
            stdin,
            stdout,
            stderr,
            began,
            limit: self.limit,
        }
    }

    /// Runs it to its end.
    pub fn run(self) -> Ran {
        self.start().wait()
    }

    /// Runs it to its end, which must be exit code 0.
    pub fn ok(self) -> Ran {
        let ran = self.run();
        assert_eq!(ran.code(), Some(0), "{ran}");
        ran
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What comes out of a pipe, read by a thread.
struct Pipe {
    bytes: Arc<(Mutex<Vec<u8>>, Condvar)>,
    thread: JoinHandle<()>,
}

impl Pipe {
    fn read(mut from: impl Read + Send + 'static) -> Self {
        let bytes: Arc<(Mutex<Vec<u8>>, Condvar)> = Arc::default();
        let into = bytes.clone();
        let thread = std::thread::spawn(move || {
            let mut piece = [0u8; 65536];
            while let Ok(n @ 1..) = from.read(&mut piece) {
                into.0.lock().expect("lock").extend_from_slice(&piece[..n]);
                into.1.notify_all();
            }
        });
        Pipe { bytes, thread }
    }

    fn now(&self) -> Vec<u8> {
        self.bytes.0.lock().expect("lock").clone()
    }

    fn wait_for(&self, text: &str, limit: Duration) -> bool {
        let held = self.bytes.0.lock().expect("lock");
        let there = |bytes: &mut Vec<u8>| !bytes.windows(text.len()).any(|window| window == text.as_bytes());
        let (held, _) = self.bytes.1.wait_timeout_while(held, limit, there).expect("lock");
        held.windows(text.len()).any(|window| window == text.as_bytes())
    }

    /// All of it, once the other end is closed; what there is, where something else still holds that end.
    fn finish(self) -> Vec<u8> {
        let began = Instant::now();
        while !self.thread.is_finished() && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.now()
    }
}

/// A program that runs.
pub struct Started {
    what: String,
    child: Child,
    stdin: Option<std::process::ChildStdin>,
    stdout: Pipe,
    stderr: Pipe,
    began: Instant,
    limit: Duration,
}

impl Started {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a pid")
    }

    /// Sends a signal to it alone.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("signal");
    }

    /// Sends a signal to its group, as a terminal does.
    pub fn signal_group(&self, signal: Signal) {
        kill_process_group(Pid::from_child(&self.child), signal).expect("signal");
    }

    /// Writes to its open input.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.stdin.as_mut().expect("open_stdin").write_all(bytes).expect("feed");
    }

    /// Closes its input.
    pub fn close(&mut self) {
        self.stdin = None;
    }

    /// Waits until this text is in its output.
    pub fn says(&self, text: &str, limit: Duration) {
        assert!(
            self.stdout.wait_for(text, limit),
            "{}: {text:?} did not come; stdout: {}\nstderr: {}",
            self.what,
            String::from_utf8_lossy(&self.stdout.now()),
            String::from_utf8_lossy(&self.stderr.now())
        );
    }

    /// Waits until this text is in its error output.
    pub fn complains(&self, text: &str, limit: Duration) {
        assert!(
            self.stderr.wait_for(text, limit),
            "{}: {text:?} did not come; stdout: {}\nstderr: {}",
            self.what,
            String::from_utf8_lossy(&self.stdout.now()),
            String::from_utf8_lossy(&self.stderr.now())
        );
    }

    /// What it has said so far.
    pub fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.stdout.now()).into_owned()
    }

    /// What it has complained of so far.
    pub fn complaint(&self) -> String {
        String::from_utf8_lossy(&self.stderr.now()).into_owned()
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end; at the limit it is killed and the test fails.
    pub fn wait(mut self) -> Ran {
        self.stdin = None;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                break status;
            }
            if self.began.elapsed() > self.limit {
                let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
                let _ = self.child.wait();
                panic!(
                    "{}: not done within {:?}\nstdout: {}\nstderr: {}",
                    self.what,
                    self.limit,
                    String::from_utf8_lossy(&self.stdout.now()),
                    String::from_utf8_lossy(&self.stderr.now())
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let took = self.began.elapsed();
        Ran { what: self.what, status, stdout: self.stdout.finish(), stderr: self.stderr.finish(), took }
    }
}

/// A program that has ended.
pub struct Ran {
    what: String,
    status: ExitStatus,
    /// Its output.
    pub stdout: Vec<u8>,
    /// Its error output.
    pub stderr: Vec<u8>,
    /// How long it ran.
    pub took: Duration,
}

impl Ran {
    /// Its exit code, where no signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that ended it.
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// Its output as text.
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Its error output as text.
    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = |bytes: &[u8]| String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(4000)..]).into_owned();
        write!(
            f,
            "`{}` ended with {} after {:?}\n--- stdout\n{}\n--- stderr\n{}",
            self.what,
            self.status,
            self.took,
            end(&self.stdout),
            end(&self.stderr)
        )
    }
}
