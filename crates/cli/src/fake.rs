//! A daemon for tests: one Session, one command, a script of what the command does. It speaks real HTTP and WebSocket on a
//! real socket, writes down what it was asked, and can be gone for a while.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use pepo_api::{AttachControl, Command, Reason, SessionId};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

use crate::place::{Instance, Place};

/// What the command does, step by step.
#[derive(Clone, Debug)]
pub enum Step {
    /// Writes to its standard output.
    Out(&'static [u8]),
    /// Writes to its error output.
    Err(&'static [u8]),
    /// Waits for so many signals.
    Signals(usize),
    /// The connection breaks here; the next one goes on after it.
    Break,
    /// Ends.
    Exit(Reason, i32),
}

#[derive(Default)]
struct State {
    asked: Vec<String>,
    signals: Vec<String>,
    uploads: Vec<Vec<u8>>,
    terminated: bool,
    killed: bool,
}

/// What it answers to.
#[derive(Clone, Default)]
pub struct Script {
    /// The command.
    pub steps: Vec<Step>,
    /// The archive that any path is read as, and what `stat` says of the path.
    pub files: Option<(Vec<u8>, &'static str)>,
    /// Requests whose name begins like this are not answered.
    pub hangs: Option<&'static str>,
    /// The Session never becomes active.
    pub never_active: bool,
    /// Starting the command fails with this code.
    pub refuses: Option<&'static str>,
}

/// The daemon.
pub struct Fake {
    state: Arc<Mutex<State>>,
    home: tempfile::TempDir,
}

impl Fake {
    /// Starts one.
    pub fn new(script: Script) -> Self {
        let home = tempfile::Builder::new().prefix("pf").tempdir_in("/tmp").unwrap();
        let socket = instance(home.path()).socket();
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let listener = UnixListener::bind(socket).unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let (served, script) = (state.clone(), Arc::new(script));
        let id = SessionId::generate();
        tokio::spawn(async move {
            // The position in the command's script outlives a connection.
            let at = Arc::new(tokio::sync::Mutex::new((0, 0u64)));
            while let Ok((stream, _)) = listener.accept().await {
                let one = One { state: served.clone(), script: script.clone(), id, at: at.clone() };
                tokio::spawn(one.serve(stream));
            }
        });
        Fake { state, home }
    }

    /// Where it is.
    pub fn place(&self) -> Place {
        Place::Local(instance(self.home.path()))
    }

    /// A directory of the test's own.
    pub fn directory(&self) -> PathBuf {
        let path = self.home.path().join("here");
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    /// The names of the requests so far, health and waits left out.
    pub fn asked(&self) -> Vec<String> {
        self.state.lock().unwrap().asked.clone()
    }

    /// The signals so far.
    pub fn signals(&self) -> Vec<String> {
        self.state.lock().unwrap().signals.clone()
    }

    /// The names in the n-th archive that was sent.
    pub fn upload(&self, number: usize) -> Vec<String> {
        let bytes = self.state.lock().unwrap().uploads[number].clone();
        let mut archive = tar::Archive::new(&bytes[..]);
        archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect()
    }

    /// Waits until a request of that name has come.
    pub async fn until_asked(&self, name: &str) {
        for _ in 0..2000 {
            if self.asked().iter().any(|asked| asked.starts_with(name)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("`{name}` was not asked; {:?}", self.asked());
    }
}

fn instance(home: &Path) -> Instance {
    Instance { home: Some(home.to_owned()), app: None }
}

struct One {
    state: Arc<Mutex<State>>,
    script: Arc<Script>,
    id: SessionId,
    at: Arc<tokio::sync::Mutex<(usize, u64)>>,
}

impl One {
    async fn serve(self, mut stream: UnixStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => return,
            }
        }
        let head = String::from_utf8(head).unwrap();
        let mut words = head.split_whitespace();
        let (method, target) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let name = name(&method, path);
        let body = body(&head, &mut stream).await;
        let note = match name {
            "tar_write" | "tar_read" | "file_stat" => format!("{name} {query}"),
            name => name.to_owned(),
        };
        if !matches!(name, "healthz" | "session_show") {
            self.state.lock().unwrap().asked.push(note);
        }
        if self.script.hangs.is_some_and(|hangs| name.starts_with(hangs)) {
            std::future::pending::<()>().await;
        }
        match name {
            "healthz" => answer(&mut stream, 200, &json!({"status": "ok"})).await,
            "session_create" | "session_open" => answer(&mut stream, 201, &self.session("requested")).await,
            "session_show" if self.state.lock().unwrap().terminated => {
                answer(&mut stream, 200, &self.session("terminated")).await;
            }
            "session_show" if self.script.never_active => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                answer(&mut stream, 200, &self.session("activating")).await;
            }
            "session_show" => answer(&mut stream, 200, &self.session("active")).await,
            "session_terminate" => {
                self.state.lock().unwrap().terminated = true;
                answer(&mut stream, 200, &self.session("terminating")).await;
            }
            "tar_write" => {
                self.state.lock().unwrap().uploads.push(body);
                answer(&mut stream, 204, &Value::Null).await;
            }
            "file_stat" => match &self.script.files {
                Some((_, kind)) => {
                    let stat = json!({"name": "x", "kind": kind, "size_bytes": 1, "mode": "0644", "uid": 0, "gid": 0,
                        "modified_at": "2026-01-01T00:00:00Z"});
                    answer(&mut stream, 200, &stat).await;
                }
                None => refuse(&mut stream, 404, "not_found", "no such file or directory").await,
            },
            "tar_read" => {
                let bytes = self.script.files.clone().unwrap_or_default().0;
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", bytes.len());
                let _ = stream.write_all(&[head.as_bytes(), &bytes].concat()).await;
            }
            "command_create" if self.script.never_active => std::future::pending().await,
            "command_create" => match self.script.refuses {
                Some(code) => refuse(&mut stream, 422, code, "it could not be started").await,
                None => {
                    let mut output = serde_json::to_value(self.command(None)).unwrap();
                    let more =
                        json!({"stdout": "", "stderr": "", "truncated": false, "missing_bytes": 0, "next_offset": 0});
                    output.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                    answer(&mut stream, 202, &output).await;
                }
            },
            "command_signal" => {
                let body: Value = serde_json::from_slice(&body).unwrap();
                let tree = if body["tree"] == true { " tree" } else { "" };
                let signal = format!("{}{tree}", body["signal"].as_str().unwrap());
                self.state.lock().unwrap().signals.push(signal);
                answer(&mut stream, 204, &Value::Null).await;
            }
            "command_kill" => {
                self.state.lock().unwrap().killed = true;
                answer(&mut stream, 200, &serde_json::to_value(self.command(None)).unwrap()).await;
            }
            "command_attach" => self.attach(&head, query, stream).await,
            other => refuse(&mut stream, 404, "not_found", other).await,
        }
    }

    fn session(&self, state: &str) -> Value {
        json!({"id": self.id, "app_id": pepo_api::AppId::generate(), "state": state, "generation": 1, "activation": 1,
            "image_id": pepo_api::ImageId::generate(), "image": "base", "cpus": 1, "memory_mib": 512, "disk_mib": 2048,
            "keep_alive_seconds": 60, "network": {"mode": "none"}, "env": {}, "labels": {},
            "created_at": "2026-01-01T00:00:00Z", "commands_running": 0})
    }

    fn command(&self, end: Option<(Reason, i32)>) -> Command {
        let mut value = json!({"id": pepo_api::CommandId::generate(), "session_id": self.id, "activation": 1,
            "state": "running", "argv": ["x"], "on_disconnect": "kill", "pty": false,
            "started_at": "2026-01-01T00:00:00Z", "stdout_bytes": 0, "stderr_bytes": 0});
        if let Some((reason, number)) = end {
            let which = if reason == Reason::Signal { "signal_number" } else { "exit_code" };
            let end = json!({"state": "exited", "reason": reason, which: number, "at": "2026-01-01T00:00:01Z"});
            value.as_object_mut().unwrap().extend(end.as_object().unwrap().clone());
        }
        serde_json::from_value(value).unwrap()
    }

    async fn attach(&self, head: &str, query: &str, mut stream: UnixStream) {
        let key = head.lines().find_map(|l| l.to_lowercase().starts_with("sec-websocket-key").then(|| l[18..].trim()));
        let accept = derive_accept_key(key.unwrap().trim_start_matches(':').trim().as_bytes());
        let shake = format!(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: {accept}\r\nsec-websocket-protocol: {}\r\n\r\n",
            pepo_api::ATTACH_PROTOCOL
        );
        stream.write_all(shake.as_bytes()).await.unwrap();
        let mut socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
        let mut at = self.at.lock().await;
        let start = AttachControl::Start { command: Box::new(self.command(None)), input_offset: 0 };
        socket.send(control(&start)).await.unwrap();
        assert_eq!(query, format!("offset={}", at.1), "output is asked for where it stopped");
        while let Some(step) = self.script.steps.get(at.0).cloned() {
            at.0 += 1;
            let (channel, bytes) = match step {
                Step::Out(bytes) => (1, bytes.to_vec()),
                Step::Err(bytes) => (2, bytes.to_vec()),
                Step::Break => return,
                Step::Exit(reason, code) => {
                    let exit = AttachControl::Exit { command: Box::new(self.command(Some((reason, code)))) };
                    let _ = socket.send(control(&exit)).await;
                    return;
                }
                Step::Signals(count) => {
                    while self.state.lock().unwrap().signals.len() < count {
                        let gone = tokio::time::timeout(Duration::from_millis(5), socket.next()).await;
                        if matches!(gone, Ok(None | Some(Err(_)) | Some(Ok(Message::Close(_))))) {
                            return;
                        }
                    }
                    continue;
                }
            };
            at.1 += bytes.len() as u64;
            if socket.send(Message::Binary([vec![channel], bytes].concat().into())).await.is_err() {
                return;
            }
        }
    }
}

fn control(control: &AttachControl) -> Message {
    Message::Binary([vec![3], serde_json::to_vec(control).unwrap()].concat().into())
}

/// The route's name.
fn name(method: &str, path: &str) -> &'static str {
    let fits = |template: &str| {
        let (mut parts, mut given) = (template.split('/'), path.split('/'));
        loop {
            match (parts.next(), given.next()) {
                (None, None) => return true,
                (Some(part), Some(found)) if part == found || part.starts_with('{') => {}
                _ => return false,
            }
        }
    };
    let found = pepo_api::ROUTES.iter().find(|route| route.method.as_str() == method && fits(route.path));
    found.unwrap_or_else(|| panic!("no route {method} {path}")).name
}

async fn body(head: &str, stream: &mut UnixStream) -> Vec<u8> {
    let header = |name: &str| {
        head.lines()
            .find_map(|line| line.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v))
    };
    if let Some(length) = header("content-length") {
        let mut bytes = vec![0; length.parse().unwrap()];
        stream.read_exact(&mut bytes).await.unwrap();
        return bytes;
    }
    let mut all = Vec::new();
    if header("transfer-encoding").is_none() {
        return all;
    }
    loop {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            match stream.read_u8().await {
                Ok(byte) => line.push(byte),
                Err(_) => return all,
            }
        }
        let length = usize::from_str_radix(std::str::from_utf8(&line).unwrap().trim(), 16).unwrap();
        let mut bytes = vec![0; length + 2];
        stream.read_exact(&mut bytes).await.unwrap();
        if length == 0 {
            return all;
        }
        all.extend_from_slice(&bytes[..length]);
    }
}

async fn answer(stream: &mut UnixStream, status: u16, value: &Value) {
    let body = if value.is_null() { String::new() } else { value.to_string() };
    let text = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let text = if status == 204 { "HTTP/1.1 204 X\r\n\r\n".to_owned() } else { text };
    let _ = stream.write_all(text.as_bytes()).await;
}

async fn refuse(stream: &mut UnixStream, status: u16, code: &str, message: &str) {
    let error = json!({"error": {"code": code, "message": message, "retryable": false}});
    answer(stream, status, &error).await;
}
