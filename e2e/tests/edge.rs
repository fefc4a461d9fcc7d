//! The way in for strangers: `pepo up`, the printed key, and what it opens.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::fs;
use std::time::Duration;

use pepo_api::client::Client;
use pepo_api::query::{ListSessions, ShowCommand};
use pepo_api::{CreateCommand, CreateKey, ErrorCode, StreamEvent, Text};
use pepo_e2e::{Instance, bare, until};
use rustix::process::{Pid, Signal, kill_process};

/// The URL and key that a first `pepo up` prints as lines for a shell.
fn printed(said: &str) -> Option<(String, String)> {
    let value = |name: &str| {
        let at = said.find(&format!("{name}="))? + name.len() + 1;
        Some(said[at..].split_whitespace().next()?.trim_matches(['\'', '"']).to_owned())
    };
    Some((value("PEPO_URL")?, value("PEPO_API_KEY")?))
}

#[tokio::test]
async fn the_printed_key_opens_sessions_and_nothing_of_the_operators() {
    let instance = Instance::new();
    let up = instance.up();
    let (url, key) = until("URL and key are printed", Duration::from_secs(20), || printed(&up.so_far()));
    assert_eq!(fs::read_to_string(instance.home().join("run/url")).expect("run/url").trim(), url);
    let client = Client::http(&url, Some(&key)).expect("client");
    let session = client.session_create(&bare()).await.expect("session").id.to_string();
    let command = CreateCommand { command: Some("echo through the edge".into()), ..Default::default() };
    let mut events = client.command_create_events(&session, &command).await.expect("events");
    let mut seen = String::new();
    while let Some(event) = events.next().await.expect("event") {
        if let StreamEvent::Stdout { data: Text::Utf8(text), .. } = event {
            seen.push_str(&text);
        }
    }
    assert_eq!(seen, "through the edge\n");

    let error = client.doctor().await.expect_err("the operator's");
    assert_eq!(error.code(), Some(ErrorCode::NotFound), "{error}");
    let error = client.down().await.expect_err("the operator's");
    assert_eq!(error.code(), Some(ErrorCode::NotFound), "{error}");
    let stranger = Client::http(&url, Some("pepo_0000000000000000")).expect("client");
    let error = stranger.session_list(&ListSessions::default()).await.expect_err("refused");
    assert_eq!(error.code(), Some(ErrorCode::Unauthenticated), "{error}");
    let nobody = Client::http(&url, None).expect("client");
    assert_eq!(
        nobody.session_list(&ListSessions::default()).await.expect_err("refused").code(),
        Some(ErrorCode::Unauthenticated)
    );

    // A key opens as soon as its maker has it, whoever was asked.
    for maker in [&instance.client(), &client].into_iter().cycle().take(6) {
        let made = maker.key_create(&CreateKey::default()).await.expect("key");
        let new = Client::http(&url, Some(&made.key)).expect("client");
        new.session_list(&ListSessions::default()).await.expect("it opens");
    }

    // `cp` and attachments go the same way.
    let input = instance.pepo(["exec", &session, "--", "cat"]).env("PEPO_URL", &url).env("PEPO_API_KEY", &key);
    let ran = input.args::<&str>([]).run();
    assert_eq!(ran.code(), Some(0), "{ran}");

    client.session_terminate(&session).await.expect("terminate");
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}

#[test]
fn every_verb_that_is_not_the_operators_works_from_elsewhere() {
    let instance = Instance::new();
    let up = instance.up();
    let (url, key) = until("URL and key are printed", Duration::from_secs(20), || printed(&up.so_far()));
    let mine = tempfile::tempdir().expect("directory");
    fs::write(mine.path().join("key"), &key).expect("write");
    let elsewhere = |args: &[&str]| {
        instance.pepo(["--context", "lab"]).args(args).env("XDG_CONFIG_HOME", mine.path()).directory(mine.path())
    };
    let added = instance
        .pepo(["context", "add", "lab", "--url", &url, "--key-file", "key"])
        .env("XDG_CONFIG_HOME", mine.path())
        .directory(mine.path())
        .ok();
    let listed = elsewhere(&["context", "ls"]).ok();
    assert!(listed.out().contains("lab") && !listed.out().contains(&key) && !added.err().contains(&key), "{listed}");

    assert_eq!(elsewhere(&["run", "--", "echo", "far"]).ok().out(), "far\n");
    let made = elsewhere(&["session", "create", "--name", "far", "--workspace", "none", "--keep-alive", "10m"]).ok();
    let session = made.out().trim().to_owned();
    elsewhere(&["session", "wait", "--state", "active", "far"]).ok();
    let detached = elsewhere(&["exec", "-d", "far", "--", "sh", "-c", "echo out; sleep 600"]).ok().out();
    let command = detached.trim();
    fs::write(mine.path().join("here"), "bytes").expect("write");
    elsewhere(&["cp", "here", "far:/tmp/there"]).ok();
    assert_eq!(elsewhere(&["exec", "far", "--", "cat", "/tmp/there"]).ok().out(), "bytes");
    elsewhere(&["cp", "far:/tmp/there", "back"]).ok();
    assert_eq!(fs::read_to_string(mine.path().join("back")).expect("back"), "bytes");
    for verb in [
        &["session", "ls"][..],
        &["session", "show", "far"],
        &["session", "update", "far", "-l", "a=b"],
        &["ps", "far"],
        &["logs", "far", command],
        &["kill", "far", command],
        &["stats", "far"],
        &["usage"],
        &["events"],
        &["events", "--audit"],
        &["image", "ls"],
        &["image", "show", "base"],
        &["app", "ls"],
        &["app", "show", "default"],
        &["key", "create", "--name", "other"],
        &["key", "ls"],
        &["key", "revoke", "other"],
        &["workspace", "create", "w"],
        &["workspace", "ls"],
        &["workspace", "show", "w"],
        &["workspace", "rm", "w"],
        &["version"],
        &["session", "rm", &session],
    ] {
        elsewhere(verb).ok();
    }
    for verb in [
        &["up"][..],
        &["down"],
        &["doctor"],
        &["sweep"],
        &["drain"],
        &["config", "show"],
        &["backup", "create", "x.tar"],
        &["setup", "--check"],
        &["image", "build", "base"],
        &["image", "gc"],
        &["app", "create", "mine"],
        &["app", "rm", "default"],
    ] {
        let refused = elsewhere(verb).run();
        assert_ne!(refused.code(), Some(0), "{verb:?} is the operator's: {refused}");
    }
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}

#[tokio::test]
async fn the_edge_has_no_rights_and_its_death_hurts_nobody() {
    let instance = Instance::new();
    let up = instance.up();
    let (url, key) = until("URL and key are printed", Duration::from_secs(20), || printed(&up.so_far()));
    let edge = instance.pids("pepo-edge");
    assert_eq!(edge.len(), 1);
    let status = fs::read_to_string(format!("/proc/{}/status", edge[0])).expect("status");
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).expect("field").trim().to_owned();
    assert_ne!(field("Uid:").split_whitespace().next(), Some("0"));
    assert_eq!(field("Groups:"), "");
    assert_eq!(field("NoNewPrivs:"), "1");
    for set in ["CapEff:", "CapPrm:", "CapBnd:", "CapAmb:", "CapInh:"] {
        assert!(field(set).bytes().all(|b| b == b'0'), "{set} {}", field(set));
    }

    let client = Client::http(&url, Some(&key)).expect("client");
    let session = client.session_create(&bare()).await.expect("session").id.to_string();
    let command =
        CreateCommand { command: Some("sleep 4; echo done".into()), wait_seconds: Some(0), ..Default::default() };
    let id = client.command_create(&session, &command).await.expect("command").command.id;
    kill_process(Pid::from_raw(edge[0]).expect("a pid"), Signal::KILL).expect("kill");
    until("the edge is started again", Duration::from_secs(30), || {
        let now = instance.pids("pepo-edge");
        (now.len() == 1 && now != edge).then_some(())
    });
    let url = until("it answers", Duration::from_secs(30), || {
        let url = fs::read_to_string(instance.home().join("run/url")).ok()?;
        std::net::TcpStream::connect(url.trim().strip_prefix("http://")?).ok()?;
        Some(url.trim().to_owned())
    });
    let client = Client::http(&url, Some(&key)).expect("client");
    let show = ShowCommand { wait_seconds: Some(30), ..Default::default() };
    let began = std::time::Instant::now();
    let ended = loop {
        match client.command_show(&session, id, &show).await {
            Ok(ended) => break ended,
            Err(error) if error.code() == Some(ErrorCode::Unavailable) && began.elapsed() < Duration::from_secs(20) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(ended.stdout, Text::Utf8("done\n".into()));
    client.session_terminate(&session).await.expect("terminate");
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}
