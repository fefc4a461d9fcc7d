//! A page in a real browser that runs a Command: plain JavaScript on an origin of its own, a Session token, a WebSocket.
//!
//! ```text
//! test ── serves the page, on loopback ──► chromium ── fetch, WebSocket, with the token ──► edge ──► guest
//!   ▲                                          │
//!   └── the document, once the page is done ◄──┘
//! ```
//! The page keeps its own `load` from happening until it is done, by a picture that is not answered before.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use pepo_api::client::Client;
use pepo_api::{CreateKey, CreateToken};

use crate::{Instance, Options, Program, bare, until};

/// Debian's.
const BROWSER: &str = "/usr/bin/chromium";

/// The user that the browser is.
const NOBODY: u32 = 65534;

/// How long one page may take, its browser's start included.
const LIMIT: Duration = Duration::from_secs(180);

const PAGE: &str = r#"<!doctype html><title>page</title><pre id="out"></pre><p id="end"></p>
<script>
const url = "@URL@", session = "@SESSION@", token = "@TOKEN@";
const say = text => { document.getElementById("out").append(text); };
const done = word => { document.getElementById("end").append(word); fetch("/done", {method: "POST"}); };
const bytes = (channel, text) => {
  const all = new TextEncoder().encode("\0" + text);
  all[0] = channel;
  return all;
};
const run = async () => {
  const made = await fetch(`${url}/v1/sessions/${session}/commands`, {
    method: "POST",
    headers: {"authorization": `Bearer ${token}`, "content-type": "application/json"},
    body: JSON.stringify({command: "read name; echo \"hello $name, from $(hostname)\"; exit 7", open_stdin: true, wait_seconds: 0}),
  });
  const command = await made.json();
  const socket = new WebSocket(`${url.replace("http", "ws")}/v1/sessions/${session}/commands/${command.id}/attach`,
    ["pepo.attach.v1", `pepo.bearer.${token}`]);
  socket.binaryType = "arraybuffer";
  socket.onmessage = ({data}) => {
    const all = new Uint8Array(data), text = new TextDecoder().decode(all.subarray(1));
    if (all[0] === 1 || all[0] === 2) say(text);
    if (all[0] !== 3) return;
    const control = JSON.parse(text);
    if (control.type === "start") socket.send(bytes(0, "page\n"));
    if (control.type === "exit") done(`exit ${control.command.exit_code} by ${socket.protocol}`);
    if (control.type === "error") done(`error ${control.error.code}`);
  };
  socket.onerror = () => done("no socket");
};
run().catch(error => done(`refused: ${error.name}`));
</script>
<img src="/hold">
"#;

/// Serves the page until the process ends; `/hold` waits until the page has said that it is done.
fn serve(listener: TcpListener, page: String) {
    let told = Arc::new((Mutex::new(0), Condvar::new()));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (page, told) = (page.clone(), told.clone());
            // A browser that goes away is no fault.
            std::thread::spawn(move || drop(answer(stream, &page, &told)));
        }
    });
}

fn answer(mut stream: TcpStream, page: &str, (count, moved): &(Mutex<u32>, Condvar)) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut first = String::new();
    lines.by_ref().take(4096).read_line(&mut first)?;
    let mut line = String::new();
    while lines.by_ref().take(4096).read_line(&mut line)? > 2 {
        line.clear();
    }
    let (kind, body) = match first.split(' ').nth(1) {
        Some("/") => ("text/html", page),
        Some("/done") => {
            *count.lock().expect("lock") += 1;
            moved.notify_all();
            ("text/plain", "")
        }
        Some("/hold") => {
            let before = count.lock().expect("lock");
            let now = *before;
            drop(moved.wait_timeout_while(before, LIMIT, |count| *count == now));
            ("image/png", "")
        }
        _ => ("text/plain", ""),
    };
    write!(
        stream,
        "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// The document of that address, once it is loaded.
fn look(address: &str) -> String {
    let home = tempfile::tempdir().expect("directory");
    std::os::unix::fs::chown(home.path(), Some(NOBODY), Some(NOBODY)).expect("owner");
    let profile = format!("--user-data-dir={}/profile", home.path().display());
    let ran = Program::new(BROWSER)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-breakpad"])
        // Nothing but this machine.
        .args([
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
            "--proxy-server=direct://",
        ])
        .args([profile.as_str(), "--dump-dom", address])
        .env("HOME", home.path())
        .uid(NOBODY)
        .within(LIMIT)
        .ok();
    ran.out()
}

/// A page of an origin that the settings name runs a command and speaks to it; one of another origin does not come so far,
/// nor does one whose token is revoked.
pub async fn runs_a_command() {
    assert!(std::path::Path::new(BROWSER).exists(), "{BROWSER} is not there: run `make soak`");
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("address").port();
    let config = format!("[edge]\norigins = \"http://127.0.0.1:{port}\"\n");
    let instance = Instance::with(Options { config: Some(config), ..Options::default() });
    let up = instance.up();
    let url = until("the edge answers", Duration::from_secs(30), || {
        std::fs::read_to_string(instance.home().join("run/url")).ok()
    });
    let url = url.trim();
    let operator = instance.client();
    let key = operator.key_create(&CreateKey::default()).await.expect("key").key;
    let backend = Client::http(url, Some(&key)).expect("client");
    let session = backend.session_create(&bare()).await.expect("session").id;
    let scopes = vec!["commands:*".parse().expect("scope")];
    let wanted = CreateToken { scopes, ..CreateToken::default() };
    let token = backend.token_create(&session.to_string(), &wanted).await.expect("token").token;
    let page = PAGE.replace("@URL@", url).replace("@SESSION@", &session.to_string()).replace("@TOKEN@", &token);
    serve(listener, page);

    let shown = look(&format!("http://127.0.0.1:{port}/"));
    let said = format!("hello page, from {}\n", session.hex());
    assert!(shown.contains(&said), "{shown}");
    assert!(shown.contains(r#"<p id="end">exit 7 by pepo.attach.v1</p>"#), "{shown}");
    // The same page by another name is of another origin.
    let shown = look(&format!("http://localhost:{port}/"));
    assert!(shown.contains(r#"<p id="end">refused: TypeError</p>"#) && !shown.contains("hello page"), "{shown}");
    backend.token_revoke(&session.to_string()).await.expect("revoked");
    let shown = look(&format!("http://127.0.0.1:{port}/"));
    assert!(shown.contains(r#"<p id="end">no socket</p>"#) && !shown.contains("hello page"), "{shown}");

    backend.session_terminate(&session.to_string()).await.expect("end");
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}
