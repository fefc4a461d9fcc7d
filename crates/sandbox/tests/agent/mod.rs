//! The real agent as a process of this machine, one for each test, and what tests ask of it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pepo_sandbox::guest::{Connector, Error, Exec, Guest, Output};
use pepo_sandbox::proto::{self, *};

/// Ten times what anything here takes on a busy machine.
pub const AT_MOST: Duration = Duration::from_secs(60);

/// An agent, killed with everything it left when dropped.
pub struct Agent {
    pub guest: Guest,
    pub socket: PathBuf,
    process: Child,
    directory: tempfile::TempDir,
}

impl Agent {
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    pub async fn start_with(arguments: &[&str]) -> Self {
        let agent = Self::fresh(arguments).await;
        let activate =
            Activate { hostname: "test".into(), env: vec![], clock_unix_ns: 0, entropy: vec![], network: None };
        agent.guest.activate(activate).await.unwrap();
        agent
    }

    /// One that has not been activated.
    pub async fn fresh(arguments: &[&str]) -> Self {
        let program = std::env::var_os("PEPO_GUEST").expect("PEPO_GUEST names no agent: run `make test`");
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent");
        let process = Command::new(&program)
            .arg("--listen")
            .arg(&socket)
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}: run `make test`", program.display()));
        let agent = Agent { guest: Guest::new(Connector::socket(&socket)), socket, process, directory };
        until("the agent answers", async || agent.guest.ping().await.is_ok()).await;
        agent
    }

    /// A directory of this agent's own.
    pub fn room(&self) -> &Path {
        self.directory.path()
    }

    /// A path in it, as requests want it.
    pub fn path(&self, name: &str) -> String {
        self.room().join(name).to_str().unwrap().to_owned()
    }

    /// Bytes of memory the agent occupies.
    pub fn memory(&self) -> u64 {
        memory(self.process.id())
    }

    pub async fn exec(&self, op: OpId, exec: proto::Exec) -> Exec {
        self.guest.exec(op, exec).await.unwrap()
    }

    /// Runs a line of sh to its end.
    pub async fn sh(&self, line: &str) -> Run {
        Run::of(self.exec(op(), sh(line)).await).await.unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Asked first, so that it ends its programs; killed where it does not.
        let pid = rustix::process::Pid::from_child(&self.process);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until && matches!(self.process.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Bytes of memory a process occupies.
pub fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// A name that no other operation has.
pub fn op() -> OpId {
    OpId(uuid::Uuid::now_v7().into_bytes())
}

/// A program and its arguments.
pub fn argv<const N: usize>(argv: [&str; N]) -> proto::Exec {
    proto::Exec::new(argv)
}

/// A line for sh.
pub fn sh(line: &str) -> proto::Exec {
    argv(["/bin/sh", "-c", line])
}

/// What became of a program.
#[derive(Debug, PartialEq)]
pub struct Run {
    pub out: Vec<u8>,
    pub err: Vec<u8>,
    pub gaps: Vec<(u64, u64)>,
    pub end: Process,
}

impl Run {
    pub async fn of(mut exec: Exec) -> Result<Self, Error> {
        let whole = async {
            let (mut out, mut err, mut gaps) = (vec![], vec![], vec![]);
            while let Some(output) = exec.next().await {
                match output? {
                    Output::Data { channel: Channel::Err, bytes, .. } => err.extend_from_slice(&bytes),
                    Output::Data { bytes, .. } => out.extend_from_slice(&bytes),
                    Output::Gap { from, to } => gaps.push((from, to)),
                    Output::End(end) => return Ok(Run { out, err, gaps, end }),
                    _ => {}
                }
            }
            panic!("a program's stream ended without its end")
        };
        tokio::time::timeout(AT_MOST, whole).await.expect("the program does not end")
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.out).unwrap()
    }

    pub fn code(&self) -> Option<i32> {
        self.end.code
    }
}

/// Waits for a level, generously.
pub async fn until(what: &str, mut level: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + AT_MOST;
    while !level().await {
        assert!(Instant::now() < end, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// How many processes of this machine have `marker` in their command line.
pub fn processes(marker: &str) -> usize {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let command = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).ok();
    entries.filter_map(command).filter(|line| String::from_utf8_lossy(line).contains(marker)).count()
}

/// Bytes in which nothing repeats, the same on every run.
pub fn noise(length: usize) -> Bytes {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(length).collect::<Vec<u8>>().into()
}
