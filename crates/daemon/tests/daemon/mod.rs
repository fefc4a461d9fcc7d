//! One pepod with guests that are host processes, and an end after which nothing of it is left.

#![allow(clippy::print_stderr, reason = "the log of a daemon that failed is for whoever reads the run")]
#![allow(dead_code, reason = "each test program uses what it needs")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pepo_api::client::Client;
use pepo_api::query::ShowSession;
use rustix::process::{Pid, Signal, kill_process};

/// How a daemon differs from the usual one.
#[derive(Debug, Default)]
pub struct Options {
    /// Its `pepo.toml`.
    pub config: String,
    /// Further arguments.
    pub flags: Vec<String>,
}

/// A running daemon.
pub struct Daemon {
    home: tempfile::TempDir,
    flags: Vec<String>,
    child: Option<Child>,
}

/// Bounds a wait, generously.
pub async fn within<T>(seconds: u64, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(seconds), work).await.expect("it hangs")
}

/// Waits until something holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "not in a minute: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// How a Session ended, once it has.
pub async fn ended(client: &Client, session: &str) -> pepo_api::Ended {
    let mut after = 0;
    loop {
        let query = ShowSession { after: Some(after), wait_seconds: Some(60) };
        let shown = within(120, client.session_show(session, &query)).await.expect("show");
        after = shown.generation;
        if let Some(ended) = shown.ended {
            return ended;
        }
    }
}

impl Daemon {
    /// Starts one and waits until it is ready.
    pub fn start(options: Options) -> Self {
        let home = tempfile::Builder::new().prefix("pd-").tempdir_in("/tmp").expect("home");
        std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o711)).expect("mode");
        // What most tests count is what they made themselves.
        let pool = if options.config.contains("[pool]") { "" } else { "\n[pool]\ntarget = 0\n" };
        std::fs::write(home.path().join("pepo.toml"), options.config + pool).expect("config");
        std::fs::create_dir(home.path().join("guest")).expect("guest");
        let mut daemon = Daemon { home, flags: options.flags, child: None };
        daemon.restart();
        daemon
    }

    /// Starts it (again).
    pub fn restart(&mut self) {
        let guest = std::env::var_os("PEPO_GUEST").expect("PEPO_GUEST is not set: run `make test`");
        let (read, write) = rustix::pipe::pipe().expect("pipe");
        rustix::io::fcntl_setfd(&read, rustix::io::FdFlags::CLOEXEC).expect("flags");
        let log = std::fs::File::options().create(true).append(true).open(self.home.path().join("log")).expect("log");
        let child = Command::new(env!("CARGO_BIN_EXE_pepod"))
            .args(["serve", "--ready-fd", &write.as_raw_fd().to_string()])
            .args(&self.flags)
            .env("PEPO_HOME", self.home.path())
            .env("PEPO_GUEST", guest)
            .env("PEPO_VMM", "fake")
            .env("PEPO_LOG_LEVEL", "info")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("pepod");
        drop(write);
        self.child = Some(child);
        let mut line = String::new();
        BufReader::new(std::fs::File::from(read)).read_line(&mut line).expect("ready line");
        assert!(line.contains("operator_socket"), "pepod did not start:\n{}", self.log());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.home.path().join("log")).unwrap_or_default()
    }

    /// Its `PEPO_HOME`.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// A client of the operator's socket.
    pub fn client(&self) -> Client {
        Client::unix(self.home.path().join("run/operator.sock"))
    }

    fn pepod(&self) -> String {
        let host = self.child.as_ref().expect("running").id();
        let children = std::fs::read_to_string(format!("/proc/{host}/task/{host}/children")).expect("children");
        let comm = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        children.split_whitespace().find(|pid| comm(pid).trim() == "pepod").expect("pepod").to_owned()
    }

    /// Memory that pepod has resident.
    pub fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pepod())).expect("status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        line.trim().trim_end_matches(" kB").trim().parse().expect("number")
    }

    /// Processor time that pepod has used.
    pub fn cpu_ms(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pepod())).expect("stat");
        // After the name: state is the first, user and system time are the 12th and 13th.
        let fields: Vec<_> = stat.rsplit(") ").next().expect("fields").split(' ').collect();
        let ticks = |n: usize| fields[n].parse::<u64>().expect("ticks");
        (ticks(11) + ticks(12)) * 1000 / rustix::param::clock_ticks_per_second()
    }

    /// Directories of Sandboxes.
    pub fn jails(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.home.path().join("state/jail")).expect("jails");
        entries.map(|entry| entry.expect("entry").path()).collect()
    }

    /// Kills pepod and its privileged side as a crash would.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("running");
        child.kill().expect("kill");
        child.wait().expect("wait");
        // The other half sees the end of the socketpair, and its sockets go with it.
        let socket = self.home.path().join("run/operator.sock");
        until("pepod ends with its other half", || UnixStream::connect(&socket).is_err());
    }

    /// Every guest agent.
    pub fn agents(&self) -> Vec<Pid> {
        let agent = |jail: PathBuf| {
            let text = std::fs::read_to_string(jail.join("keeper.json")).expect("keeper.json");
            let record: serde_json::Value = serde_json::from_str(&text).expect("json");
            let pid = i32::try_from(record["pid"].as_i64().expect("pid")).expect("pid");
            Pid::from_raw(pid).expect("pid")
        };
        self.jails().into_iter().map(agent).collect()
    }

    /// Kills every guest agent.
    pub fn kill_agents(&self) {
        for agent in self.agents() {
            kill_process(agent, Signal::KILL).expect("kill");
        }
    }

    /// One request on the edge's socket, as the edge's user.
    pub fn as_edge(&self, request: &str) -> String {
        let (socket, request) = (self.home.path().join("run/edge.sock"), request.to_owned());
        let asking = std::thread::spawn(move || {
            if rustix::process::geteuid().is_root() {
                let passwd = std::fs::read_to_string("/etc/passwd").expect("passwd");
                let line = passwd.lines().find(|line| line.starts_with("pepo-edge:")).expect("user pepo-edge");
                let number = |n: usize| line.split(':').nth(n).expect("field").parse().expect("number");
                let (uid, gid) = (rustix::process::Uid::from_raw(number(2)), rustix::process::Gid::from_raw(number(3)));
                // Of this thread alone, which ends with the request.
                rustix::thread::set_thread_res_gid(gid, gid, gid).expect("gid");
                rustix::thread::set_thread_res_uid(uid, uid, uid).expect("uid");
            }
            let mut stream = UnixStream::connect(socket).expect("connect");
            stream.set_read_timeout(Some(Duration::from_secs(60))).expect("time-out");
            stream.write_all(request.as_bytes()).expect("write");
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).expect("read");
            String::from_utf8_lossy(&answer).into_owned()
        });
        asking.join().expect("thread")
    }

    /// Returns when it has ended of itself, in order.
    pub fn gone(&mut self) {
        let status = self.child.take().expect("running").wait().expect("wait");
        assert_eq!(status.code(), Some(0), "{}", self.log());
    }

    /// Stops it, and checks that nothing is left.
    pub async fn end(mut self) {
        within(120, self.client().down()).await.unwrap_or_else(|error| panic!("down: {error}\n{}", self.log()));
        let status = self.child.take().expect("running").wait().expect("wait");
        assert_eq!(status.code(), Some(0), "{}", self.log());
        self.must_be_clean();
    }

    /// It ends by itself, and nothing is left.
    pub fn ended_by_itself(mut self) {
        let mut child = self.child.take().expect("running");
        until("pepod ends by itself", || child.try_wait().expect("wait").is_some());
        self.must_be_clean();
    }

    fn must_be_clean(&self) {
        assert!(self.jails().is_empty(), "jails are left: {:?}\n{}", self.jails(), self.log());
        let home = self.home.path().as_os_str().as_encoded_bytes().to_vec();
        let ours = || {
            let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
            processes
                .filter(|process| {
                    let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
                    line.windows(home.len()).any(|window| window == home)
                })
                .count()
        };
        until("no process of this instance is left", || ours() == 0);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            eprintln!("--- log of pepod\n{}", self.log());
            if !std::thread::panicking() {
                return;
            }
            let _ = child.kill();
            let _ = child.wait();
            for jail in self.jails() {
                let text = std::fs::read_to_string(jail.join("keeper.json")).unwrap_or_default();
                let record: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
                if let Some(pid) = record["pid"].as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
    }
}
