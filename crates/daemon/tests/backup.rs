//! A backup of a real pepod, its store destroyed, and everything back.
//!
//! Needs the feature `fake` and the agent's file in `PEPO_GUEST` (`make test` sets it).

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod daemon;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use daemon::{Daemon, Options};
use pepo_api::query::{ApplyFile, ListEvents, ListKeys, ShowFile};
use pepo_api::{
    CreateApp, CreateCommand, CreateKey, CreateSession, EdgeState, RestoreReport, SecretText, SessionState,
};

fn restore(home: &Path, archive: &Path, flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pepod"))
        .args(["restore", "--json"])
        .args(flags)
        .env("PEPO_HOME", home)
        .stdin(Stdio::from(std::fs::File::open(archive).expect("archive")))
        .output()
        .expect("pepod")
}

fn refused(output: &Output) -> String {
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn edge(daemon: &Daemon) -> EdgeState {
    let answer = daemon.as_edge("GET /v1/edge/state HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    serde_json::from_str(answer.rsplit("\r\n\r\n").next().expect("body")).expect("state")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_backed_up_is_there_after_the_store_was_destroyed() {
    let mut daemon = Daemon::start(Options { config: "[sandbox]\nkeep_alive = 77\n".into(), ..Options::default() });
    let client = daemon.client();
    let app = client.app_create(&CreateApp { name: "shop".into(), ..Default::default() }).await.expect("app");
    let shop = client.clone().of_app("shop");
    let text = "# kept to the letter\n[labels]\nteam = \"shop\"\n";
    shop.app_file_apply("shop", &ApplyFile::default(), text).await.expect("file");
    let key = shop.key_create(&CreateKey { name: Some("ci".into()), ..Default::default() }).await.expect("key");
    let new = CreateSession {
        name: Some("web".into()),
        reactivate: Some(true),
        secrets: Some([("TOKEN".to_owned(), SecretText::new("hush-hush"))].into()),
        ..Default::default()
    };
    let session = shop.session_create(&new).await.expect("session");
    let check = CreateCommand {
        command: Some("test \"$(printf %s \"$TOKEN\" | tr h H)\" = HusH-HusH".into()),
        ..Default::default()
    };
    let exit = async || shop.command_create("web", &check).await.expect("command").command.end.expect("end").exit_code;
    assert_eq!(exit().await, Some(0));
    shop.session_release("web").await.expect("idle");
    let before = edge(&daemon);

    let archive = daemon.home().join("backup.tar");
    let mut stream = client.backup().await.expect("backup");
    let mut bytes = Vec::new();
    while let Some(piece) = stream.next().await.expect("piece") {
        bytes.extend_from_slice(&piece);
    }
    std::fs::write(&archive, &bytes).expect("write");
    assert!(!daemon.home().join("state/store/backup.db").exists(), "the copy is gone");
    assert!(!bytes.windows(9).any(|window| window == b"hush-hush"), "secrets are sealed in it");
    // What comes after it is not in it.
    shop.session_create(&CreateSession { name: Some("late".into()), ..Default::default() }).await.expect("late");
    shop.session_terminate("late").await.expect("end");

    let running = refused(&restore(daemon.home(), &archive, &["--replace"]));
    assert!(running.contains("pepo down"), "{running}");
    daemon.kill();
    let there = refused(&restore(daemon.home(), &archive, &[]));
    assert!(there.contains("--replace"), "{there}");
    let store = daemon.home().join("state/store");
    let old = std::fs::read(store.join("pepo.db")).expect("store");
    let cut = daemon.home().join("cut.tar");
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).expect("write");
    let broken = refused(&restore(daemon.home(), &cut, &["--replace"]));
    assert!(broken.contains("cut off") || broken.contains("no manifest"), "{broken}");
    assert_eq!(std::fs::read(store.join("pepo.db")).expect("store"), old, "nothing was touched");

    std::fs::remove_dir_all(&store).expect("destroyed");
    std::fs::remove_file(daemon.home().join("pepo.toml")).expect("destroyed");
    let done = restore(daemon.home(), &archive, &[]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let report: RestoreReport = serde_json::from_slice(&done.stdout).expect("report");
    assert!(report.manifest.lacks.iter().any(|lack| lack.contains("Workspaces")), "{report:?}");
    assert!(std::fs::read_to_string(daemon.home().join("pepo.toml")).expect("settings").contains("77"));
    assert!(!store.join("restoring").exists());

    daemon.restart();
    let shown = client.app_show("shop").await.expect("app");
    assert_eq!((shown.id, shown.version, shown.settings.labels["team"].as_str()), (app.id, 2, "shop"));
    let mut file = client.app_file_show("shop", &ShowFile::default()).await.expect("file");
    let mut said = Vec::new();
    while let Some(piece) = file.next().await.expect("piece") {
        said.extend_from_slice(&piece);
    }
    assert_eq!(said, text.as_bytes());
    let keys = shop.key_list(&ListKeys::default()).await.expect("keys").items;
    assert_eq!(keys.iter().map(|key| key.id).collect::<Vec<_>>(), [key.about.id]);
    let after = edge(&daemon);
    let ids =
        |state: &EdgeState| state.keys.iter().flatten().map(|key| (key.id, key.sha256.clone())).collect::<Vec<_>>();
    assert_eq!(ids(&after), ids(&before));
    assert!(after.generation > before.generation, "no edge takes an older copy for this one");
    let back = shop.session_show("web", &Default::default()).await.expect("session");
    assert_eq!((back.id, back.state), (session.id, SessionState::Idle));
    assert!(shop.session_show("late", &Default::default()).await.is_err());
    assert_eq!(exit().await, Some(0), "its secret opens with the key that came along");
    let audit =
        client.audit_list(&ListEvents { kind: vec!["key_create".into()], ..Default::default() }).await.expect("audit");
    assert_eq!(audit.items.len(), 1);
    daemon.end().await;
}
