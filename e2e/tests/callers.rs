//! What the edge's own uid reaches: on the operator's socket nothing, on its own no verb of the operator, and of another App
//! nothing that reads otherwise than what was never made.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pepo_api::client::Client;
use pepo_api::{Audience, Body, CreateApp, CreateCommand, CreateKey, ErrorCode, ROUTES, SessionId};
use pepo_e2e::{Instance, bare, until};
use rustix::process::{Gid, Uid};

/// Uid and group of a system user.
fn account(name: &str) -> (Uid, Gid) {
    let passwd = std::fs::read_to_string("/etc/passwd").expect("users");
    let line = passwd.lines().find(|line| line.split(':').next() == Some(name)).expect("the user is there");
    let number = |n: usize| line.split(':').nth(n).expect("field").parse::<u32>().expect("number");
    (Uid::from_raw(number(2)), Gid::from_raw(number(3)))
}

/// Does something as this user, on a thread of its own: identities are a thread's.
fn as_user<T: Send + 'static>(user: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (uid, gid) = account(user);
    let working = std::thread::spawn(move || {
        rustix::thread::set_thread_groups(&[]).expect("groups");
        rustix::thread::set_thread_res_gid(gid, gid, gid).expect("group");
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("user");
        work()
    });
    working.join().expect("thread")
}

/// One request over a socket, as this user.
fn ask_as(user: &str, socket: &Path, request: &str) -> std::io::Result<String> {
    let (socket, request) = (socket.to_owned(), request.to_owned());
    as_user(user, move || {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    })
}

/// What this user can read or list of these places.
fn readable_by(user: &str, places: Vec<PathBuf>) -> Vec<PathBuf> {
    as_user(user, move || {
        let reads = |place: &PathBuf| match std::fs::read_dir(place) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::NotADirectory => std::fs::File::open(place).is_ok(),
            Err(_) => false,
        };
        places.into_iter().filter(reads).collect()
    })
}

/// Every file and directory below, links not followed.
fn below(directory: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let kind = entry.file_type().expect("type");
        if kind.is_dir() {
            below(&entry.path(), into);
        }
        if kind.is_dir() || kind.is_file() {
            into.push(entry.path());
        }
    }
}

fn request(method: &str, path: &str, app: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\npepo-app: {app}\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}"
    )
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{answer:?}"))
}

/// The body without what differs from one request to the next.
fn alike(answer: &str, id: &str) -> String {
    let body = answer.split("\r\n\r\n").nth(1).expect("body").replace(id, "ID");
    match body.find("req_") {
        Some(at) => format!("{}{}", &body[..at], &body[at + 36..]),
        None => body,
    }
}

#[tokio::test]
async fn the_edges_uid_has_no_verb_of_the_operators_and_no_other_apps_things() {
    let instance = Instance::new();
    let up = instance.up();
    let run = instance.home().join("run");
    let edge_socket = run.join("edge.sock");
    until("the edge's socket is there", Duration::from_secs(30), || edge_socket.exists().then_some(()));
    let operator = instance.client();
    let default = operator.app_show("default").await.expect("app").id.to_string();

    // The operator's socket: not even a connection.
    let refused =
        ask_as("pepo-edge", &instance.socket(), &request("GET", "/v1/doctor", &default)).expect_err("refused");
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
    // The edge's socket: nobody else.
    let stranger = ask_as("nobody", &edge_socket, &request("GET", "/v1/sessions", &default));
    assert!(stranger.is_err() || stranger.as_ref().is_ok_and(String::is_empty), "{stranger:?}");
    let well = ask_as("pepo-edge", &edge_socket, &request("GET", "/v1/version", &default)).expect("answer");
    assert_eq!(status(&well), 200, "{well}");

    // Nor a file of the instance: neither its secrets, nor a Session's, nor what the daemon says of itself.
    let bare_session = operator.session_create(&bare()).await.expect("session").id.to_string();
    let command = CreateCommand { command: Some("true".into()), ..Default::default() };
    operator.command_create(&bare_session, &command).await.expect("command");
    let mut places = vec![instance.home().join("state")];
    below(&instance.home().join("state"), &mut places);
    assert!(places.iter().any(|place| place.ends_with("secret.key")), "{places:?}");
    assert!(places.iter().any(|place| place.ends_with("pepo.db")), "{places:?}");
    // The foreign programs that VMMs run are the host's own, which anybody may read; the rest of this is names.
    places
        .retain(|place| !place.ends_with("instance.json") && !place.components().any(|part| part.as_os_str() == "vmm"));
    let readable = readable_by("pepo-edge", places);
    assert!(readable.is_empty(), "{readable:?}");
    for device in ["/dev/kvm", "/dev/vhost-vsock", "/dev/net/tun", "/dev/loop-control"] {
        let opened = as_user("pepo-edge", move || std::fs::File::options().read(true).write(true).open(device).is_ok());
        // A tap needs a capability beside the device.
        assert!(!opened || device == "/dev/net/tun", "{device}");
    }
    operator.session_terminate(&bare_session).await.expect("end");
    // The process itself holds its sockets and nothing else.
    let edge = instance.pids("pepo-edge");
    let [edge] = edge[..] else { panic!("{edge:?}") };
    for descriptor in std::fs::read_dir(format!("/proc/{edge}/fd")).expect("descriptors").flatten() {
        let to = std::fs::read_link(descriptor.path()).unwrap_or_default().to_string_lossy().into_owned();
        let known = ["socket:", "pipe:", "anon_inode:"].iter().any(|kind| to.starts_with(kind));
        assert!(known || to.is_empty() || to == "/dev/null", "{to}");
    }

    for row in ROUTES.iter().filter(|row| row.audience == Audience::Operator) {
        let path = row.path.replace(['{', '}'], "");
        let answer = ask_as("pepo-edge", &edge_socket, &request(row.method.as_str(), &path, &default)).expect("answer");
        assert!(matches!(status(&answer), 404 | 405), "{}: {answer}", row.name);
        // Nor does it help to say who one would like to be.
        let forged = request(row.method.as_str(), &path, &default).replace("host: x", "host: x\r\npepo-actor: uid:0");
        let answer = ask_as("pepo-edge", &edge_socket, &forged).expect("answer");
        assert!(matches!(status(&answer), 404 | 405), "{}: {answer}", row.name);
    }

    let other = operator.app_create(&CreateApp { name: "other".into(), ..Default::default() }).await.expect("app");
    let session = operator.clone().of_app("other").session_create(&bare()).await.expect("session").id.to_string();
    let unknown = SessionId::generate().to_string();
    for row in ROUTES.iter().filter(|row| row.audience == Audience::Tenant && row.path.contains("{session}")) {
        let ask = |id: &str| {
            let path = row.path.replace("{session}", id).replace("{command}", &format!("cmd_{}", "0".repeat(32)));
            let mut path = path.replace("{port}", "80").replace("{rest}", "");
            // What is looked at before the Session is right in both.
            if path.ends_with("/files") || path.contains("/files/") && row.body != Body::Json || path.ends_with("/tar")
            {
                path.push_str("?path=/etc/hostname");
            }
            ask_as("pepo-edge", &edge_socket, &request(row.method.as_str(), &path, &default)).expect("answer")
        };
        let (foreign, none) = (ask(&session), ask(&unknown));
        assert!(status(&foreign) >= 400, "{}: {foreign}", row.name);
        assert_eq!(alike(&foreign, &session), alike(&none, &unknown), "{}", row.name);
        assert_eq!(status(&foreign), status(&none), "{}", row.name);
    }
    // It lives, and is its own App's.
    let own = request("GET", &format!("/v1/sessions/{session}"), &other.id.to_string());
    assert_eq!(status(&ask_as("pepo-edge", &edge_socket, &own).expect("answer")), 200);

    // The same through the edge, by a key of the other App; and what was refused there is in the one log.
    let url = std::fs::read_to_string(run.join("url")).expect("url");
    let reads = CreateKey { scopes: vec!["sessions:read".parse().expect("scope")], ..Default::default() };
    let key = operator.key_create(&reads).await.expect("key");
    let client = Client::http(url.trim(), Some(&key.key)).expect("client");
    let foreign = client.session_show(&session, &Default::default()).await.expect_err("foreign");
    assert_eq!(foreign.code(), Some(ErrorCode::NotFound));
    let denied = client.session_create(&bare()).await.expect_err("denied");
    assert_eq!(denied.code(), Some(ErrorCode::Forbidden));
    let id = key.about.id.to_string();
    let told = async {
        loop {
            let audit = operator.audit_list(&Default::default()).await.expect("audit").items;
            if let Some(event) = audit.into_iter().find(|event| event.actor == id && event.outcome == "forbidden") {
                return event;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let event = tokio::time::timeout(Duration::from_secs(30), told).await.expect("told");
    assert_eq!((event.kind.as_str(), &event.detail["source"]), ("session_create", &"127.0.0.1".into()));
    assert!(event.request_id.is_some());
    let log = std::fs::read_to_string(instance.home().join("run/url")).unwrap_or_default() + &up.so_far();
    assert!(!log.contains(&key.key), "the key's text is in a log");

    operator.clone().of_app("other").session_terminate(&session).await.expect("end");
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}

#[tokio::test]
async fn a_browsers_token_runs_commands_in_its_session_until_it_is_revoked() {
    let instance = Instance::new();
    let up = instance.up();
    let run = instance.home().join("run");
    let operator = instance.client();
    until("the edge answers", Duration::from_secs(30), || run.join("url").exists().then_some(()));
    let url = std::fs::read_to_string(run.join("url")).expect("url");
    let backend = operator.key_create(&CreateKey::default()).await.expect("key").key;
    let backend = Client::http(url.trim(), Some(&backend)).expect("client");
    let session = backend.session_create(&bare()).await.expect("session").id.to_string();
    let token = backend.token_create(&session, &Default::default()).await.expect("token");
    let page = Client::http(url.trim(), Some(&token.token)).expect("client");
    let command = CreateCommand { command: Some("echo from a page".into()), ..Default::default() };
    let output = page.command_create(&session, &command).await.expect("command");
    assert_eq!(output.stdout, pepo_api::Text::Utf8("from a page\n".into()));
    let refused = page.session_terminate(&session).await.expect_err("not the page's");
    assert_eq!(refused.code(), Some(ErrorCode::Forbidden));
    backend.token_revoke(&session).await.expect("revoked");
    let over = page.command_create(&session, &command).await.expect_err("revoked");
    assert_eq!(over.code(), Some(ErrorCode::Unauthenticated));
    let again = backend.token_create(&session, &Default::default()).await.expect("token").token;
    let page = Client::http(url.trim(), Some(&again)).expect("client");
    backend.session_terminate(&session).await.expect("end");
    let gone = page.command_create(&session, &command).await.expect_err("its Session is over");
    assert_eq!(gone.code(), Some(ErrorCode::SessionTerminated));
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}
