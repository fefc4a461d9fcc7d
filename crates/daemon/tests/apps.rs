//! Apps, keys, events and the audit log on a real pepod with guests that are host processes.
//!
//! Needs the feature `fake` and the agent's file in `PEPO_GUEST` (`make test` sets it).

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod daemon;

use std::collections::BTreeMap;
use std::time::Duration;

use daemon::{Daemon, Options, within};
use pepo_api::client::{Client, ClientError, EventStream};
use pepo_api::query::{ApplyFile, AskKey, ListApps, ListEvents, ListKeys, ListSessions, RemoveApp, ShowFile};
use pepo_api::{
    AppQuota, CreateApp, CreateCommand, CreateKey, CreateSession, EdgeState, ErrorCode, Event, FeedEvent, Quota,
    RotateKey, Scope, SecretText, UpdateApp, UpdateSession,
};

fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> pepo_api::Error {
    match result {
        Err(ClientError::Api(error)) => *error,
        other => panic!("{other:?}"),
    }
}

async fn next(stream: &mut EventStream<FeedEvent>) -> Event {
    match within(60, stream.next()).await.expect("stream").expect("open") {
        FeedEvent::Event(event) => *event,
        gap => panic!("{gap:?}"),
    }
}

async fn file(client: &Client, app: &str, version: Option<u64>) -> String {
    let mut stream = client.app_file_show(app, &ShowFile { version }).await.expect("file");
    let mut text = Vec::new();
    while let Some(piece) = stream.next().await.expect("piece") {
        text.extend_from_slice(&piece);
    }
    String::from_utf8(text).expect("text")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_apps_things_are_its_own_and_its_quota_holds() {
    let daemon = Daemon::start(Options::default());
    let operator = daemon.client();
    let quota = AppQuota { sessions: Some(2), commands: Some(1), ..AppQuota::default() };
    let labels = [("team".to_owned(), "shop".to_owned())].into();
    let made = CreateApp { name: "shop".into(), labels, quota, ..CreateApp::default() };
    let app = operator.app_create(&made).await.expect("app");
    assert_eq!(refused(operator.app_create(&made).await).code, ErrorCode::Conflict);
    let shop = operator.clone().of_app("shop");
    assert_eq!(
        refused(operator.clone().of_app("nothing").session_list(&ListSessions::default()).await).code,
        ErrorCode::NotFound
    );

    let session = shop.session_create(&CreateSession::default()).await.expect("one");
    assert_eq!(session.app_id, app.id);
    let second = shop.session_create(&CreateSession::default()).await.expect("two");
    let third = refused(shop.session_create(&CreateSession::default()).await);
    assert_eq!((third.code, third.retryable), (ErrorCode::TooManyRequests, true));
    assert_eq!(third.quota, Some(Quota { name: "sessions".into(), used: 2, limit: 2 }));
    assert!(third.message.contains("`sessions`") && third.message.contains("2 of 2"), "{}", third.message);
    operator.session_create(&CreateSession::default()).await.expect("another App has its own");
    let foreign = refused(operator.session_show(&session.id.to_string(), &Default::default()).await);
    assert_eq!(foreign.code, ErrorCode::NotFound);
    assert_eq!(shop.session_list(&ListSessions::default()).await.expect("list").items.len(), 2);

    let id = session.id.to_string();
    let command =
        |line: &str| CreateCommand { command: Some(line.into()), wait_seconds: Some(0), ..Default::default() };
    let running = shop.command_create(&id, &command("sleep 600")).await.expect("one");
    let over = refused(shop.command_create(&second.id.to_string(), &command("true")).await);
    assert_eq!(over.quota, Some(Quota { name: "commands".into(), used: 1, limit: 1 }));
    let used = operator.app_show("shop").await.expect("show").used;
    assert_eq!((used.sessions, used.sandboxes, used.commands), (2, 2, 1));
    shop.command_kill(&id, running.command.id).await.expect("kill");
    // Its share is free as soon as its end is on the disk.
    within(60, async {
        while let Err(error) = shop.command_create(&second.id.to_string(), &command("true")).await {
            assert_eq!(error.code(), Some(ErrorCode::TooManyRequests), "{error}");
        }
    })
    .await;

    let update = UpdateApp { quota: Some(AppQuota::default()), ..UpdateApp::default() };
    operator.app_update("shop", &update).await.expect("no quota");
    shop.session_create(&CreateSession::default()).await.expect("a third");
    let busy = refused(operator.app_remove("shop", &RemoveApp::default()).await);
    assert_eq!(busy.code, ErrorCode::Conflict);
    assert!(busy.message.contains("3 Sessions") && busy.hint.is_some(), "{busy:?}");
    operator.app_remove("shop", &RemoveApp { force: Some(true) }).await.expect("removed");
    assert_eq!(refused(operator.app_show("shop").await).code, ErrorCode::NotFound);
    assert_eq!(
        refused(operator.app_remove("default", &RemoveApp { force: Some(true) }).await).code,
        ErrorCode::Conflict
    );
    let left = operator.app_list(&ListApps::default()).await.expect("list").items;
    assert_eq!(left.iter().map(|app| app.name.as_str()).collect::<Vec<_>>(), ["default"]);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_session_comes_back_within_the_quota_alone() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let quota = Some(AppQuota { sandboxes: Some(1), ..AppQuota::default() });
    client.app_update("default", &UpdateApp { quota, ..UpdateApp::default() }).await.expect("quota");
    let again = CreateSession { reactivate: Some(true), ..Default::default() };
    let first = client.session_create(&again).await.expect("first").id.to_string();
    let run = CreateCommand { command: Some("true".into()), ..Default::default() };
    client.command_create(&first, &run).await.expect("it serves");
    assert_eq!(refused(client.session_create(&again).await).quota.expect("quota").name, "sandboxes");
    client.session_release(&first).await.expect("released");
    let second = client.session_create(&again).await.expect("the share is free").id.to_string();
    client.command_create(&second, &run).await.expect("it serves");
    let over = refused(client.command_create(&first, &run).await);
    assert_eq!(over.quota, Some(Quota { name: "sandboxes".into(), used: 1, limit: 1 }));
    client.session_release(&second).await.expect("released");
    client.command_create(&first, &run).await.expect("it is its turn");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_app_file_is_applied_compared_and_rolled_back() {
    let mut daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let text = "# ours\n[defaults]\nmemory_mib = 256\nkeep_alive_seconds = 7\n[limits]\nmemory_mib = 300\n";
    let look = ApplyFile { dry_run: Some(true), if_version: None };
    let told = client.app_file_apply("default", &look, text).await.expect("look");
    assert_eq!((told.version, told.applied, told.changes.len()), (1, false, 3));
    let told = client.app_file_apply("default", &ApplyFile::default(), text).await.expect("apply");
    assert_eq!((told.version, told.applied), (2, true));
    let again = client.app_file_apply("default", &ApplyFile::default(), text).await.expect("apply");
    assert_eq!((again.version, again.applied, again.changes.len()), (2, false, 0));
    assert_eq!(file(&client, "default", None).await, text);

    let session = client.session_create(&CreateSession::default()).await.expect("session");
    assert_eq!((session.memory_mib, session.keep_alive_seconds), (256, 7));
    let large = refused(client.session_create(&CreateSession { memory_mib: Some(301), ..Default::default() }).await);
    assert_eq!((large.code, large.param.as_deref()), (ErrorCode::Invalid, Some("memory_mib")));

    daemon.kill();
    daemon.restart();
    let wrong = refused(client.app_file_apply("default", &ApplyFile::default(), "[defaults]\nmemry_mib = 1\n").await);
    assert_eq!((wrong.code, wrong.param.as_deref()), (ErrorCode::Invalid, Some("defaults.memry_mib")));
    assert!(wrong.message.contains("line 2"), "{}", wrong.message);
    let late = ApplyFile { if_version: Some(1), dry_run: None };
    assert_eq!(refused(client.app_file_apply("default", &late, "").await).code, ErrorCode::Conflict);
    let first = file(&client, "default", Some(1)).await;
    client.app_file_apply("default", &ApplyFile::default(), first).await.expect("rolled back");
    assert_eq!(client.app_show("default").await.expect("show").version, 3);
    let session = client.session_create(&CreateSession::default()).await.expect("session");
    assert_eq!(session.memory_mib, 512);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_in_the_edges_copy_and_out_of_it_at_once() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let edge = |query: &str| {
        let answer =
            daemon.as_edge(&format!("GET /v1/edge/state{query} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"));
        let body = answer.rsplit("\r\n\r\n").next().expect("body").to_owned();
        serde_json::from_str::<EdgeState>(&body).unwrap_or_else(|error| panic!("{error}: {answer}"))
    };
    let before = edge("");
    assert_eq!(before.keys.as_ref().map(Vec::len), Some(1), "the first one");
    let key = CreateKey {
        name: Some("ci".into()),
        scopes: vec!["sessions:*".parse().expect("scope")],
        expires_seconds: Some(3600),
        sources: vec!["192.0.2.7".into()],
    };
    let made = client.key_create(&key).await.expect("key");
    let state = edge(&format!("?after={}", before.generation));
    assert!(state.generation > before.generation);
    let told = state.keys.expect("keys").into_iter().find(|key| key.id == made.about.id).expect("ours");
    assert_eq!((told.scopes, told.sources), (made.about.scopes.clone(), vec!["192.0.2.7/32".into()]));
    assert!(told.expires_at.is_some());
    assert!(edge(&format!("?after={}", state.generation)).keys.is_none(), "nothing new is not told again");

    let can = async |action: &str, resource: Option<&str>| {
        let query = AskKey { action: action.into(), resource: resource.map(str::to_owned) };
        let told = client.key_can("ci", &query).await.expect("can");
        (told.allowed, told.because)
    };
    assert!(can("sessions:read", None).await.0 && can("session_create", None).await.0);
    let (allowed, because) = can("commands:run", Some("web")).await;
    assert!(!allowed && because.contains("commands:run"), "{because}");
    // What is not there and what is another App's read the same.
    let stranger = client.app_create(&CreateApp { name: "stranger".into(), ..Default::default() }).await.expect("app");
    let foreign = client.clone().of_app("stranger").session_create(&CreateSession::default()).await.expect("session");
    let (allowed, because) = can("sessions:read", Some(&foreign.id.to_string())).await;
    assert_eq!(
        (allowed, because.clone()),
        can("sessions:read", Some(&pepo_api::SessionId::generate().to_string())).await
    );
    assert!(!allowed && because.contains("no such thing"), "{because}");
    client.app_remove(&stranger.id.to_string(), &RemoveApp { force: Some(true) }).await.expect("removed");
    let odd = AskKey { action: "sessions".into(), resource: None };
    assert_eq!(refused(client.key_can("ci", &odd).await).param.as_deref(), Some("action"));

    let home = daemon.home().to_owned();
    let rotated = client.key_rotate("ci", &RotateKey { overlap_seconds: Some(60) }).await.expect("rotated");
    assert_ne!(rotated.key, made.key);
    assert_eq!((rotated.about.name.as_deref(), &rotated.about.scopes), (Some("ci"), &made.about.scopes));
    let old = client.key_show(&made.about.id.to_string()).await.expect("show");
    assert_eq!(old.replaced_by, Some(rotated.about.id));
    assert!(old.expires_at.expect("end") < made.about.expires_at.expect("end"));
    // An edge that asks on, as it does: the revocation is answered once it has heard of it.
    let known = edge("").generation;
    let revoking = {
        let client = client.clone();
        tokio::spawn(async move { client.key_revoke("ci").await })
    };
    let heard = {
        // Every answer says what there is: it takes as many as come before the revocation.
        let heard = std::iter::repeat_with(|| edge(&format!("?after={known}"))).find_map(|state| {
            let new = state.generation > known;
            new.then_some(state)
        });
        let heard = heard.expect("heard");
        edge(&format!("?after={}", heard.generation));
        heard
    };
    let revoked = within(60, revoking).await.expect("task").expect("revoked");
    assert!(revoked.revoked_at.is_some());
    let valid: Vec<_> = heard.keys.expect("keys").into_iter().map(|key| key.id).collect();
    assert!(!valid.contains(&rotated.about.id) && valid.contains(&made.about.id));
    let names = client.key_list(&ListKeys::default()).await.expect("list").items;
    assert_eq!(names.len(), 2);
    assert_eq!(client.key_list(&ListKeys { all: Some(true) }).await.expect("list").items.len(), 3);
    assert_eq!(refused(client.key_revoke("ci").await).code, ErrorCode::NotFound);

    // What an App's own callers may not do.
    let as_key = |method: &str, path: &str, body: &str| {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\npepo-app: {}\r\npepo-key: {}\r\n",
            made.about.app_id, made.about.id
        );
        daemon.as_edge(&format!("{head}content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len()))
    };
    assert!(as_key("POST", "/v1/keys", r#"{"scopes":["app:admin"]}"#).starts_with("HTTP/1.1 403"));
    assert!(as_key("POST", "/v1/keys", r#"{"scopes":["files:read"]}"#).starts_with("HTTP/1.1 201"));
    assert!(as_key("PATCH", "/v1/apps/default", r#"{"quota":{"sessions":9}}"#).starts_with("HTTP/1.1 403"));
    assert!(as_key("PATCH", "/v1/apps/default", r#"{"limits":{"cpus":2}}"#).starts_with("HTTP/1.1 200"));
    assert!(as_key("PATCH", "/v1/apps/default", r#"{"name":"mine"}"#).starts_with("HTTP/1.1 403"));
    assert!(as_key("POST", "/v1/apps", r#"{"name":"x"}"#).starts_with("HTTP/1.1 405"));
    assert!(as_key("DELETE", "/v1/apps/default", "").starts_with("HTTP/1.1 405"));
    let other = client.app_create(&CreateApp { name: "other".into(), ..Default::default() }).await.expect("app");
    assert!(as_key("GET", &format!("/v1/apps/{}", other.id), "").starts_with("HTTP/1.1 404"));
    let audit = client.audit_list(&ListEvents::default()).await.expect("audit").items;
    let denied = audit.iter().find(|event| event.outcome == "forbidden").expect("denied");
    assert_eq!(denied.actor, made.about.id.to_string());

    // No text of a key is anywhere but in its own answer.
    let texts = [made.key, rotated.key];
    let mut places = vec![home.join("log")];
    places
        .extend(std::fs::read_dir(home.join("state/store")).expect("store").map(|entry| entry.expect("entry").path()));
    for place in places {
        let bytes = std::fs::read(&place).expect("read");
        for text in &texts {
            assert!(!bytes.windows(text.len()).any(|window| window == text.as_bytes()), "in {}", place.display());
        }
    }
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_tell_a_life_and_go_on_after_a_restart() {
    let mut daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let kind = vec!["session.*".to_owned(), "command.*".to_owned()];
    let query = ListEvents { kind: kind.clone(), ..ListEvents::default() };
    let mut stream = client.event_follow(&query).await.expect("stream");
    let labels = [("user".to_owned(), "42".to_owned())].into();
    let new = CreateSession { name: Some("web".into()), labels, ..Default::default() };
    let session = client.session_create(&new).await.expect("session");
    let run = CreateCommand { command: Some("exit 3".into()), ..Default::default() };
    client.command_create("web", &run).await.expect("command");
    let mut seen = Vec::new();
    while seen.last().is_none_or(|event: &Event| event.kind != "command.ended") {
        seen.push(next(&mut stream).await);
    }
    let kinds: Vec<_> = seen.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(kinds, ["session.created", "session.activating", "session.active", "command.started", "command.ended"]);
    assert!(seen.iter().all(|event| event.session_id == Some(session.id) && event.labels["user"] == "42"));
    assert!(seen.iter().all(|event| event.app_id == Some(session.app_id)));
    assert_eq!((seen[4].outcome.as_str(), &seen[4].detail["exit_code"]), ("exit", &3.into()));
    assert!(seen.windows(2).all(|pair| pair[0].id < pair[1].id));
    drop(stream);

    daemon.kill();
    daemon.restart();
    client.session_terminate("web").await.expect("end");
    let after = ListEvents { after: Some(seen[4].id), ..query.clone() };
    let mut stream = client.event_follow(&after).await.expect("stream");
    loop {
        let event = next(&mut stream).await;
        if event.kind == "session.terminated" {
            assert_eq!(event.outcome, "operator");
            break;
        }
    }
    let of_session = ListEvents { session: Some(session.id.to_string()), limit: Some(2), ..query.clone() };
    let page = client.event_list(&of_session).await.expect("page");
    assert_eq!(page.items[0].kind, "session.terminated");
    let more = ListEvents { cursor: page.next_cursor.clone(), ..of_session.clone() };
    assert!(client.event_list(&more).await.expect("page").items[0].id < page.items[1].id);
    let none = ListEvents { label: vec!["user=43".into()], ..query.clone() };
    assert!(client.event_list(&none).await.expect("page").items.is_empty());
    let other = client.app_create(&CreateApp { name: "other".into(), ..Default::default() }).await.expect("app");
    let theirs = client.clone().of_app("other").event_list(&ListEvents::default()).await.expect("page").items;
    assert!(theirs.iter().all(|event| event.app_id == Some(other.id)), "{theirs:?}");
    assert_eq!(
        refused(client.event_list(&ListEvents { kind: vec!["a b".into()], ..Default::default() }).await)
            .param
            .as_deref(),
        Some("type")
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_change_is_in_the_audit_log_with_who_and_how() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let session = client
        .session_create(&CreateSession { name: Some("web".into()), ..Default::default() })
        .await
        .expect("session");
    let run = CreateCommand { command: Some("cat".into()), stdin: Some("hush-hush".into()), ..Default::default() };
    let output = client.command_create("web", &run).await.expect("command");
    let env = [("TOKEN".to_owned(), "hush-hush".to_owned())].into();
    let second = client.session_create(&CreateSession { env, ..Default::default() }).await.expect("session");
    client
        .session_update("web", &UpdateSession { keep_alive_seconds: Some(9), ..Default::default() })
        .await
        .expect("update");
    let path = pepo_api::query::UnderPath { path: "/nowhere/at-all".into(), ..Default::default() };
    refused(client.file_remove("web", &path).await);
    refused(client.session_terminate("nobody").await);
    client.session_list(&ListSessions::default()).await.expect("looking is not told");
    client.session_terminate("web").await.expect("end");

    // The last answer's line follows the answer.
    let mut items = within(60, async {
        loop {
            let items = client.audit_list(&ListEvents::default()).await.expect("audit").items;
            if items.first().is_some_and(|event| event.kind == "session_terminate" && event.outcome == "ok") {
                break items;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    items.reverse();
    let told: Vec<_> = items.iter().map(|event| (event.kind.as_str(), event.outcome.as_str())).collect();
    assert_eq!(
        told,
        [
            ("session_create", "ok"),
            ("command_create", "ok"),
            ("session_create", "ok"),
            ("session_update", "ok"),
            ("file_remove", "not_found"),
            ("session_terminate", "not_found"),
            ("session_terminate", "ok"),
        ]
    );
    let uid = format!("uid:{}", rustix::process::getuid().as_raw());
    assert!(items.iter().all(|event| event.actor == uid && event.request_id.is_some()), "{items:?}");
    assert_eq!(items[0].session_id, Some(session.id));
    assert_eq!((items[1].session_id, items[1].command_id), (Some(session.id), Some(output.command.id)));
    assert_eq!(items[2].session_id, Some(second.id));
    assert_eq!(items[4].detail["path"], "/nowhere/at-all");
    assert_eq!(items[5].detail["session"], "nobody");
    let feed = client.event_list(&ListEvents::default()).await.expect("feed").items;
    let all = serde_json::to_string(&(items, feed)).expect("json");
    assert!(!all.contains("hush"), "{all}");
    let admin = Scope::admin();
    assert!(
        admin.covers(pepo_api::route::audit_list.action) && !Scope::all().covers(pepo_api::route::audit_list.action)
    );
    daemon.end().await;
}

/// Every file below a directory.
fn files(directory: &std::path::Path, into: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("directory") {
        let path = entry.expect("entry").path();
        let kind = std::fs::symlink_metadata(&path).expect("stat").file_type();
        if kind.is_dir() {
            files(&path, into);
        } else if kind.is_file() {
            into.push(path);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_is_in_the_guests_environment_and_nowhere_else() {
    const FIRST: &str = "hush-5f1c-the-first";
    const SECOND: &str = "hush-77aa-the-second";
    let mut daemon =
        Daemon::start(Options { flags: vec!["--set".into(), "log.level=debug".into()], ..Options::default() });
    let client = daemon.client();
    let secrets = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), SecretText::new(*value))).collect()
    };
    let new = CreateSession {
        name: Some("web".into()),
        secrets: Some(secrets(&[("TOKEN", FIRST), ("OTHER", "x")])),
        reactivate: Some(true),
        ..Default::default()
    };
    let session = client.session_create(&new).await.expect("session");
    assert_eq!(session.secret_names, ["OTHER", "TOKEN"]);
    // Said by its length, so that no output of a command has it either.
    let length = |value: &str| CreateCommand {
        command: Some(format!("test \"${{#TOKEN}}\" = {} && test -n \"$TOKEN\"", value.len())),
        ..Default::default()
    };
    let exit = async |value| {
        client.command_create("web", &length(value)).await.expect("command").command.end.expect("end").exit_code
    };
    assert_eq!(exit(FIRST).await, Some(0));

    let update = UpdateSession {
        secrets: Some([("TOKEN".to_owned(), Some(SecretText::new(SECOND))), ("OTHER".to_owned(), None)].into()),
        ..Default::default()
    };
    let updated = client.session_update("web", &update).await.expect("update");
    assert_eq!(updated.secret_names, ["TOKEN"]);
    assert_eq!(exit(FIRST).await, Some(0), "this activation has what it began with");
    daemon.kill();
    daemon.restart();
    client.session_release("web").await.expect("released");
    assert_eq!(exit(SECOND).await, Some(0), "the next one has the new value");

    let refuse = async |secrets: BTreeMap<String, SecretText>, env: &[(&str, &str)]| {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        refused(client.session_create(&CreateSession { secrets: Some(secrets), env, ..Default::default() }).await)
    };
    for error in [
        refuse(secrets(&[("A=B", FIRST)]), &[]).await,
        refuse(secrets(&[("A", FIRST)]), &[("A", "public")]).await,
        refuse(secrets(&[("A", &FIRST.repeat(1000))]), &[]).await,
        refuse(secrets(&[("A", &format!("{FIRST}\0"))]), &[]).await,
    ] {
        assert_eq!((error.code, error.param.as_deref()), (ErrorCode::Invalid, Some("secrets")), "{error}");
        assert!(!format!("{error:?}").contains("hush"), "{error:?}");
    }
    let keyed = CreateSession { name: None, ..new.clone() };
    client.session_open("k", &keyed).await.expect("opened");
    client.session_open("k", &keyed).await.expect("the same again");
    let other = CreateSession { secrets: Some(secrets(&[("TOKEN", SECOND), ("OTHER", "x")])), ..keyed };
    let error = refused(client.session_open("k", &other).await);
    assert_eq!((error.code, error.param.as_deref()), (ErrorCode::Conflict, Some("secrets")));

    let shown = client.session_show("web", &Default::default()).await.expect("show");
    let listed = client.session_list(&ListSessions::default()).await.expect("list").items;
    let feed = client.event_list(&ListEvents::default()).await.expect("feed").items;
    let audit = client.audit_list(&ListEvents::default()).await.expect("audit").items;
    let commands = client.command_list("web", &Default::default()).await.expect("commands").items;
    let all = serde_json::to_string(&(shown, listed, feed, audit, commands)).expect("json");
    assert!(!all.contains("hush"), "{all}");
    // Neither in the store (main file, log, key), nor in our log, nor anywhere else of the instance.
    let mut everything = Vec::new();
    files(daemon.home(), &mut everything);
    assert!(
        everything.iter().any(|path| path.ends_with("secret.key"))
            && everything.iter().any(|path| path.ends_with("pepo.db"))
    );
    for path in everything {
        let bytes = std::fs::read(&path).unwrap_or_default();
        assert!(!bytes.windows(5).any(|window| window == b"hush-"), "in {}", path.display());
    }
    client.session_terminate("web").await.expect("end");
    daemon.end().await;
}
