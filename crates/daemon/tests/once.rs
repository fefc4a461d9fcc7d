//! Requests with an `Idempotency-Key` on a real pepod with guests that are host processes: done once, whatever happens.
//!
//! Needs the feature `fake` and the agent's file in `PEPO_GUEST` (`make test` sets it).

#![cfg(feature = "fake")]
// Helpers of tests are tests to us, and not to the lint.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod daemon;

use std::collections::HashSet;

use daemon::{Daemon, Options, ended, within};
use pepo_api::client::{Client, ClientError};
use pepo_api::query::{ListKeys, ListSessions, ListWorkspaces, RemoveWorkspace};
use pepo_api::{CreateApp, CreateCommand, CreateKey, CreateSession, CreateWorkspace, ErrorCode, SessionState, Text};

fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> pepo_api::Error {
    match result {
        Err(ClientError::Api(error)) => *error,
        other => panic!("{other:?}"),
    }
}

fn named(name: &str) -> CreateSession {
    CreateSession { name: Some(name.into()), ..CreateSession::default() }
}

async fn sessions(client: &Client) -> usize {
    client.session_list(&ListSessions::default()).await.expect("list").items.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_made_once_by_many_at_once_and_over_a_crash() {
    let mut daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let body = CreateSession {
        secrets: Some([("TOKEN".to_owned(), pepo_api::SecretText::new("hunter2"))].into()),
        ..CreateSession::default()
    };
    let once = client.once("one");
    let all = within(120, futures_util::future::join_all((0..20).map(|_| once.session_create(&body)))).await;
    let ids: HashSet<_> = all.into_iter().map(|made| made.expect("made").id).collect();
    assert_eq!((ids.len(), sessions(&client).await), (1, 1), "{ids:?}");
    let id = *ids.iter().next().expect("one");

    let other = refused(once.session_create(&named("other")).await);
    assert_eq!((other.code, other.param.as_deref()), (ErrorCode::Invalid, Some("Idempotency-Key")));
    assert_ne!(client.once("two").session_create(&body).await.expect("another key").id, id);
    let refusal = refused(client.once("").session_create(&body).await);
    assert_eq!((refusal.code, refusal.param.as_deref()), (ErrorCode::Invalid, Some("Idempotency-Key")));

    daemon.kill();
    daemon.restart();
    assert_eq!(once.session_create(&body).await.expect("known over a crash").id, id);
    client.session_terminate(&id.to_string()).await.expect("terminate");
    ended(&client, &id.to_string()).await;
    let again = once.session_create(&body).await.expect("it has ended, and it was made");
    assert_eq!((again.id, again.state), (id, SessionState::Terminated));
    // A key is an App's own.
    client.app_create(&CreateApp { name: "shop".into(), ..CreateApp::default() }).await.expect("app");
    assert_ne!(once.clone().of_app("shop").session_create(&body).await.expect("made").id, id);
    let text = std::fs::read(daemon.home().join("state/store/pepo.db")).unwrap_or_default();
    assert!(!text.windows(7).any(|window| window == b"hunter2"), "the body is not kept");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_refused_made_nothing_and_may_be_tried_again() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let first = client.session_create(&named("a")).await.expect("made");
    let once = client.once("k");
    assert_eq!(refused(once.session_create(&named("a")).await).code, ErrorCode::Conflict);
    client.session_terminate(&first.id.to_string()).await.expect("terminate");
    ended(&client, &first.id.to_string()).await;
    let made = once.session_create(&named("a")).await.expect("the name is free now");
    assert_eq!(once.session_create(&named("a")).await.expect("again").id, made.id);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workspaces_apps_keys_and_commands_are_made_once_too() {
    let daemon = Daemon::start(Options::default());
    let client = daemon.client();
    let once = client.once("k");

    let workspace = once.workspace_create(&CreateWorkspace::default()).await.expect("made");
    assert_eq!(once.workspace_create(&CreateWorkspace::default()).await.expect("again").id, workspace.id);
    assert_eq!(client.workspace_list(&ListWorkspaces::default()).await.expect("list").items.len(), 1);
    client.workspace_remove(&workspace.id.to_string(), &RemoveWorkspace::default()).await.expect("remove");
    let gone = refused(once.workspace_create(&CreateWorkspace::default()).await);
    assert_eq!(gone.code, ErrorCode::Conflict, "it is not made a second time: {gone:?}");

    let shop = CreateApp { name: "shop".into(), ..CreateApp::default() };
    let app = once.app_create(&shop).await.expect("made");
    assert_eq!(once.app_create(&shop).await.expect("again").id, app.id);

    let before = client.key_list(&ListKeys::default()).await.expect("keys").items.len();
    let key = once.key_create(&CreateKey::default()).await.expect("made");
    let told = refused(once.key_create(&CreateKey::default()).await);
    assert_eq!(told.code, ErrorCode::Conflict);
    assert!(told.message.contains(&key.about.id.to_string()) && !told.message.contains(&key.key), "{}", told.message);
    assert_eq!(client.key_list(&ListKeys::default()).await.expect("keys").items.len(), before + 1);

    let session = client.session_create(&CreateSession::default()).await.expect("session").id.to_string();
    let run = CreateCommand { command: Some("echo $$; sleep 0.2".into()), ..CreateCommand::default() };
    let both = within(60, futures_util::future::join_all((0..5).map(|_| once.command_create(&session, &run)))).await;
    let said: HashSet<_> = both
        .into_iter()
        .map(|output| output.expect("ran"))
        .map(|output| match output.stdout {
            Text::Utf8(text) => (output.command.id, text),
            binary => panic!("{binary:?}"),
        })
        .collect();
    assert_eq!(said.len(), 1, "one process: {said:?}");
    let other = CreateCommand { command: Some("true".into()), ..CreateCommand::default() };
    assert_eq!(refused(once.command_create(&session, &other).await).code, ErrorCode::Invalid);
    daemon.end().await;
}
