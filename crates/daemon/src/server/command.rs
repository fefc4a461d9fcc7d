//! Routes of Commands: running, looking, feeding, signalling, killing.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use pepo_api::query::{ListCommands, ShowCommand, WriteStdin};
use pepo_api::{
    CommandId, CommandRole, CommandState, CreateCommand, ErrorCode, OnDisconnect, Output, Page, SendSignal, route,
};
use pepo_sandbox::proto::{self, Exec, PtySize, Variable};
use tokio::time::Instant;

use super::events::{self, Until};
use super::once::{self, Asked};
use super::session::with_activation;
use super::settings::check_env;
use super::{Call, Json, Problem, Query, Routes, limits};
use crate::Pepod;
use crate::metrics::{CommandStep, METRICS};
use crate::session::{Error, Follower, Found, Interest, Item, NewCommand, Session, Status, shown_row};
use crate::store::CommandSpec;
use crate::text::{Gathered, Side};

/// The longest wait for an end.
const LONGEST_WAIT: u64 = 3600;

/// The most output in one JSON answer, of each channel.
const MOST_OUTPUT: u64 = 8 << 20;

/// The longest command line: it has to fit into one message with its environment.
const MOST_ARGV: usize = 60 * 1024;

/// How long a look that does not wait may take to read what is there.
const GLANCE: Duration = Duration::from_secs(10);

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::command_create, create);
    routes.route(&route::command_list, list);
    routes.route(&route::command_show, show);
    routes.route(&route::command_kill, kill);
    routes.route(&route::command_stdout, stdout);
    routes.route(&route::command_stderr, stderr);
    routes.route(&route::command_stdin, stdin);
    routes.route(&route::command_signal, signal);
}

pub(super) fn wants_events(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    accept
        .split(',')
        .any(|kind| kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("text/event-stream")))
}

async fn create(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    headers: HeaderMap,
    Asked { body, once }: Asked<CreateCommand>,
) -> Result<Response, Problem> {
    let wait = wait(body.wait_seconds, 30)?;
    let limit = limit(body.max_output_bytes)?;
    let mut new = checked(body)?;
    new.counted = pepod.apps().get(call.app).is_some_and(|app| app.settings.quota.commands.is_some());
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    if let Some(limits) = &new.spec.limits {
        limits::check(limits, &session.now().spec)?;
    }
    // A command's id makes it run once already: the key stands for one, where the caller named none.
    if let Some(named) = once.filter(|_| !new.named_by_caller) {
        let of = format!("{} {}", route::command_create.name, session.id());
        new.id = once::id(&pepod, call, of, &named, new.id).await?;
        new.named_by_caller = true;
    }
    let command = new.id;
    // One that ran already is joined where it is: it needs no Sandbox, least of all a fresh one.
    let again = match new.named_by_caller {
        true => session.commands().again(&session, new.id).await?,
        false => None,
    };
    let (activation, follower) = match again {
        Some(follower) => (follower.shown().activation, follower),
        None if pepod.sessions().is_draining() => return Err(Error::Draining.into()),
        None => {
            let asked = Instant::now();
            let serving = session.serving(call.activation, pepod.start_within()).await?;
            METRICS.command_step(CommandStep::Sandbox, asked.elapsed());
            (serving.activation, session.commands().start(&session, new, serving).await?)
        }
    };
    let answer =
        if wants_events(&headers) { events::answer(follower, Until::End) } else { json(follower, wait, limit).await? };
    let mut answer = with_activation(activation, answer);
    if let Ok(place) = HeaderValue::try_from(format!("/v1/sessions/{}/commands/{command}", session.id())) {
        answer.headers_mut().insert(header::LOCATION, place);
    }
    Ok(answer)
}

fn wait(seconds: Option<u64>, default: u64) -> Result<Duration, Problem> {
    match seconds.unwrap_or(default) {
        seconds if seconds <= LONGEST_WAIT => Ok(Duration::from_secs(seconds)),
        _ => Err(Problem::invalid("wait_seconds", format!("wait_seconds must be from 0 to {LONGEST_WAIT}"))),
    }
}

fn limit(bytes: Option<u64>) -> Result<usize, Problem> {
    match bytes.unwrap_or(65_536) {
        bytes if bytes <= MOST_OUTPUT => Ok(bytes as usize),
        _ => Err(Problem::invalid("max_output_bytes", format!("max_output_bytes must be from 0 to {MOST_OUTPUT}"))),
    }
}

/// What is asked of the guest, or what is wrong with it.
fn checked(body: CreateCommand) -> Result<NewCommand, Problem> {
    let CreateCommand {
        command,
        argv,
        id,
        cwd,
        env,
        user,
        stdin,
        open_stdin,
        pty,
        shell,
        timeout_seconds,
        wait_seconds: _,
        max_output_bytes: _,
        on_disconnect,
        keeps_alive,
        limits,
    } = body;
    let (shown, argv) = match (command, argv) {
        (Some(line), None) if shell.is_some() => (vec![line.clone()], vec![line]),
        (Some(line), None) => (vec![line.clone()], vec!["/bin/bash".into(), "-c".into(), line]),
        (None, Some(_)) if shell.is_some() => {
            return Err(Problem::invalid("argv", "a shell evaluates a line: give `command` instead of `argv`"));
        }
        (None, Some(argv)) if argv.is_empty() || argv[0].is_empty() => {
            return Err(Problem::invalid("argv", "argv must begin with a program"));
        }
        (None, Some(argv)) => (argv.clone(), argv),
        (Some(_), Some(_)) => return Err(Problem::invalid("argv", "give `command` or `argv`, not both")),
        (None, None) => return Err(Problem::invalid("command", "give `command` or `argv`")),
    };
    if argv.iter().any(|part| part.contains('\0')) {
        return Err(Problem::invalid("argv", "an argument cannot hold a NUL byte"));
    }
    check_env("env", &env)?;
    let bytes: usize = argv.iter().map(|part| part.len() + 8).sum::<usize>()
        + env.iter().map(|(n, v)| n.len() + v.len() + 8).sum::<usize>();
    if bytes > MOST_ARGV {
        let message = format!("arguments and environment have {bytes} bytes; at most {MOST_ARGV}");
        return Err(Problem::invalid("argv", message).with_hint("put long data into a file, or into stdin"));
    }
    if let Some(size) = pty {
        if !(1..=1000).contains(&size.cols) || !(1..=1000).contains(&size.rows) {
            return Err(Problem::invalid("pty", "columns and rows must be from 1 to 1000"));
        }
        if shell.is_some() {
            return Err(Problem::invalid("pty", "a command in a lasting shell has no terminal of its own"));
        }
    }
    if let Some(name) = &shell
        && (name.is_empty() || name.len() > 63 || name.chars().any(char::is_control))
    {
        return Err(Problem::invalid("shell", "a shell's name has 1 to 63 bytes and no control characters"));
    }
    if id.is_some_and(|id| !id.is_v7()) {
        return Err(Problem::invalid("id", "a caller's id must be a UUID of version 7"));
    }
    let on_disconnect = on_disconnect.unwrap_or(OnDisconnect::Keep);
    let has_stdin = stdin.is_some() || open_stdin || pty.is_some();
    let timeout_ms = timeout_seconds.unwrap_or(0).checked_mul(1000);
    let exec = Exec {
        argv,
        env: env.into_iter().map(|(name, value)| Variable { name, value }).collect(),
        cwd,
        user,
        stdin: has_stdin,
        pty: pty.map(|size| PtySize { cols: size.cols, rows: size.rows }),
        timeout_ms: timeout_ms.ok_or_else(|| Problem::invalid("timeout_seconds", "timeout_seconds is too large"))?,
        detached: on_disconnect == OnDisconnect::Keep,
        shell: shell.clone(),
        limits: limits.as_ref().map(limits::asked),
    };
    let spec = CommandSpec {
        argv: shown,
        shell,
        on_disconnect,
        pty: pty.is_some(),
        stdin: has_stdin,
        keeps_alive: keeps_alive.unwrap_or(true),
        role: CommandRole::Command,
        service: None,
        limits,
    };
    Ok(NewCommand {
        id: id.unwrap_or_else(CommandId::generate),
        named_by_caller: id.is_some(),
        exec,
        spec,
        input: Bytes::from(stdin.unwrap_or_default()),
        more_input: open_stdin || pty.is_some(),
        counted: false,
    })
}

impl Problem {
    fn with_hint(mut self, hint: &str) -> Self {
        self.0.hint = Some(hint.to_owned());
        self
    }
}

/// The JSON form: what was written until the end, or until the wait is over.
async fn json(mut follower: Follower, wait: Duration, limit: usize) -> Result<Response, Problem> {
    let mut gathered = Gathered::new(follower.next_offset(), limit);
    if wait.is_zero() && follower.command().is_some_and(|command| !command.is_over()) {
        // Whoever does not wait comes for the output by another way, from here on.
        let answer = output(&mut follower, gathered, false);
        follower.park();
        return Ok(answer);
    }
    let deadline = Instant::now() + wait;
    loop {
        match tokio::time::timeout_at(deadline, follower.next()).await {
            Ok(Ok(item)) => {
                if gather(&mut gathered, item) {
                    return Ok(output(&mut follower, gathered, true));
                }
            }
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => return Ok(output(&mut follower, gathered, false)),
        }
    }
}

/// Puts an item in; whether it was the last.
fn gather(gathered: &mut Gathered, item: Item) -> bool {
    match item {
        Item::Data { side, bytes, .. } => gathered.put(side, &bytes),
        Item::Gap { from, to } => gathered.gap(from, to),
        Item::End => return true,
    }
    false
}

fn output(follower: &mut Follower, gathered: Gathered, whole: bool) -> Response {
    follower.answered();
    let found = if whole { gathered.whole() } else { gathered.so_far() };
    let command = follower.shown();
    let status = if command.state == CommandState::Exited { StatusCode::OK } else { StatusCode::ACCEPTED };
    let body = Output {
        command,
        stdout: found.stdout,
        stderr: found.stderr,
        truncated: found.missing > 0,
        missing_bytes: found.missing,
        next_offset: found.next,
    };
    with_activation(body.command.activation, (status, axum::Json(body)))
}

async fn list(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<ListCommands>,
) -> Result<Response, Problem> {
    let limit = query.limit.unwrap_or(100);
    if !(1..=1000).contains(&limit) {
        return Err(Problem::invalid("limit", "limit must be from 1 to 1000"));
    }
    let before = match &query.cursor {
        Some(cursor) => Some(cursor.parse().map_err(|_| Problem::invalid("cursor", "this cursor is none of ours"))?),
        None => None,
    };
    let (id, activation, live) = match pepod.sessions().find(call.app, &which).await? {
        Found::Live(session) => (session.id(), session.now().activation, Some(session)),
        Found::Ended(row) => (row.id, row.activation, None),
    };
    let mut rows = pepod.store().list_commands(id, before, limit as usize + 1).await.map_err(Error::from)?;
    let more = rows.len() > limit as usize;
    rows.truncate(limit as usize);
    let next_cursor = rows.last().filter(|_| more).map(|row| row.id.to_string());
    let newest = |row| match &live {
        Some(session) => known(session, row),
        None => shown_row(row),
    };
    let items = rows.into_iter().map(newest).collect();
    Ok(with_activation(activation, axum::Json(Page { items, next_cursor })))
}

/// The store may be a moment behind what is known in memory.
fn known(session: &Session, row: crate::store::CommandRow) -> pepo_api::Command {
    match session.commands().get(row.id) {
        Some(command) => command.shown(),
        None => shown_row(row),
    }
}

/// A look at a command of a live or ended Session, from an offset on.
async fn look(
    pepod: &Pepod,
    call: Call,
    which: &str,
    id: CommandId,
    from: u64,
    interest: Interest,
) -> Result<Follower, Problem> {
    let (session_id, live) = match pepod.sessions().find(call.app, which).await? {
        Found::Live(session) => (session.id(), Some(session)),
        Found::Ended(row) => (row.id, None),
    };
    if let Some(session) = &live
        && let Some(command) = session.commands().get(id)
    {
        return Ok(Follower::join(session, command, from, interest).await?);
    }
    let row = pepod.store().command(session_id, id).await.map_err(Error::from)?;
    let row = row.ok_or(Error::NotFound { what: "command", which: id.to_string() })?;
    Ok(Follower::of_record(row, pepod.sessions().shelf(), from)?)
}

/// Shows a command of which the output is gone all the same.
async fn record(pepod: &Pepod, call: Call, which: &str, id: CommandId) -> Result<pepo_api::Command, Problem> {
    let (session_id, live) = match pepod.sessions().find(call.app, which).await? {
        Found::Live(session) => (session.id(), Some(session)),
        Found::Ended(row) => (row.id, None),
    };
    if let Some(command) = live.as_ref().and_then(|session| session.commands().get(id)) {
        return Ok(command.shown());
    }
    let row = pepod.store().command(session_id, id).await.map_err(Error::from)?;
    Ok(shown_row(row.ok_or(Error::NotFound { what: "command", which: id.to_string() })?))
}

async fn show(
    State(pepod): State<Pepod>,
    call: Call,
    Path((which, id)): Path<(String, String)>,
    headers: HeaderMap,
    Query(query): Query<ShowCommand>,
) -> Result<Response, Problem> {
    let id = command_id(&id)?;
    let wait = wait(query.wait_seconds, 0)?;
    let limit = limit(query.max_output_bytes)?;
    if wants_events(&headers) {
        let resumed = headers.get("last-event-id").and_then(|value| value.to_str().ok());
        let from = match resumed {
            Some(text) => {
                text.parse().map_err(|_| Problem::invalid("Last-Event-ID", "this event id is none of ours"))?
            }
            None => query.offset.unwrap_or(0),
        };
        let interest = if query.follow == Some(false) { Interest::Glance } else { Interest::Caller };
        let follower = look(&pepod, call, &which, id, from, interest).await?;
        let until = match query.follow {
            Some(false) => Until::Offset(written(&follower).await?),
            _ => Until::End,
        };
        let activation = follower.shown().activation;
        return Ok(with_activation(activation, events::answer(follower, until)));
    }
    let from = query.offset.unwrap_or(0);
    let interest = if wait.is_zero() { Interest::Glance } else { Interest::Caller };
    let mut follower = match look(&pepod, call, &which, id, from, interest).await {
        Ok(follower) => follower,
        // The record outlives the output: it says how the command ended and how much it wrote.
        Err(Problem(error)) if error.code == ErrorCode::OutputGone => {
            let command = record(&pepod, call, &which, id).await?;
            let next = command.stdout_bytes + command.stderr_bytes;
            let empty = || pepo_api::Text::Utf8(String::new());
            let missing = next.saturating_sub(from);
            let status = if command.state == CommandState::Exited { StatusCode::OK } else { StatusCode::ACCEPTED };
            let body = Output {
                command,
                stdout: empty(),
                stderr: empty(),
                truncated: missing > 0,
                missing_bytes: missing,
                next_offset: next,
            };
            return Ok(with_activation(body.command.activation, (status, axum::Json(body))));
        }
        Err(problem) => return Err(problem),
    };
    if !wait.is_zero() {
        return json(follower, wait, limit).await;
    }
    let until = written(&follower).await?;
    let mut gathered = Gathered::new(from, limit);
    let deadline = Instant::now() + GLANCE;
    let over = follower.command().is_none_or(|command| command.is_over());
    while over || follower.next_offset() < until {
        match tokio::time::timeout_at(deadline, follower.next()).await {
            Ok(item) => {
                if gather(&mut gathered, item?) {
                    return Ok(output(&mut follower, gathered, true));
                }
            }
            Err(_) => break,
        }
    }
    Ok(output(&mut follower, gathered, false))
}

fn command_id(text: &str) -> Result<CommandId, Problem> {
    text.parse().map_err(|_| {
        Error::NotFound { what: "command", which: text.chars().take(80).flat_map(char::escape_debug).collect() }.into()
    })
}

/// How much a command has written by now.
async fn written(follower: &Follower) -> Result<u64, Problem> {
    let Some(command) = follower.command() else { return Ok(u64::MAX) };
    if let Status::Ended(row) = command.status() {
        return Ok(row.stdout_bytes + row.stderr_bytes);
    }
    let Some(guest) = follower.guest() else { return Ok(u64::MAX) };
    let ops = guest.ops().await?;
    Ok(ops.iter().find(|op| op.op == command.op()).map_or(0, |op| op.next))
}

async fn kill(
    State(pepod): State<Pepod>,
    call: Call,
    Path((which, id)): Path<(String, String)>,
) -> Result<Response, Problem> {
    let id = command_id(&id)?;
    if let Found::Live(session) = pepod.sessions().find(call.app, &which).await? {
        session.is_still(call.activation)?;
        if let Some(command) = session.commands().get(id) {
            session.commands().kill(&session, &command).await?;
            // Its end is known a moment after its death.
            let _ = tokio::time::timeout(Duration::from_secs(5), command.over()).await;
            return Ok(with_activation(command.activation(), axum::Json(command.shown())));
        }
    }
    // What has ended is killed already.
    let command = record(&pepod, call, &which, id).await?;
    Ok(with_activation(command.activation, axum::Json(command)))
}

async fn stdout(
    pepod: State<Pepod>,
    call: Call,
    path: Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    raw(pepod, call, path, headers, Side::Out).await
}

async fn stderr(
    pepod: State<Pepod>,
    call: Call,
    path: Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    raw(pepod, call, path, headers, Side::Err).await
}

/// One output as bytes: what there is now. A range is given of what has ended; while it runs there is no length to have a
/// range of, and the whole is sent.
async fn raw(
    State(pepod): State<Pepod>,
    call: Call,
    Path((which, id)): Path<(String, String)>,
    headers: HeaderMap,
    side: Side,
) -> Result<Response, Problem> {
    let id = command_id(&id)?;
    let follower = look(&pepod, call, &which, id, 0, Interest::Glance).await?;
    let until = written(&follower).await?;
    let shown = follower.shown();
    let ended = shown.state == CommandState::Exited;
    let total = if side == Side::Out { shown.stdout_bytes } else { shown.stderr_bytes };
    let range = match headers.get(header::RANGE).and_then(|value| value.to_str().ok()) {
        Some(text) if ended => super::files::range(text, total)?,
        _ => None,
    };
    let (skip, take) = range.map_or((0, u64::MAX), |(first, last)| (first, last - first + 1));
    // A hole before what was asked for would shift every byte: found before the answer begins.
    let body = events::bytes(follower, side, until, skip, take);
    let mut response = (
        [(header::CONTENT_TYPE, "application/octet-stream"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")],
        Body::from_stream(body),
    )
        .into_response();
    if let Some((first, last)) = range {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        if let Ok(value) = HeaderValue::try_from(format!("bytes {first}-{last}/{total}")) {
            response.headers_mut().insert(header::CONTENT_RANGE, value);
        }
    }
    if ended {
        response.headers_mut().insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    }
    Ok(with_activation(shown.activation, response))
}

/// A command that can still be spoken to.
async fn live(
    pepod: &Pepod,
    call: Call,
    which: &str,
    id: &str,
) -> Result<(Session, std::sync::Arc<crate::session::Command>), Problem> {
    let id = command_id(id)?;
    let session = pepod.sessions().find(call.app, which).await?.live()?;
    session.is_still(call.activation)?;
    match session.commands().get(id) {
        Some(command) => Ok((session, command)),
        None => {
            // One that ended so long ago is told apart from one that never was.
            record(pepod, call, which, id).await?;
            Err(Problem::new(ErrorCode::Conflict, format!("{id} has ended")))
        }
    }
}

async fn stdin(
    State(pepod): State<Pepod>,
    call: Call,
    Path((which, id)): Path<(String, String)>,
    Query(query): Query<WriteStdin>,
    request: Request,
) -> Result<Response, Problem> {
    let (session, command) = live(&pepod, call, &which, &id).await?;
    if !command.spec().stdin {
        return Err(
            Problem::new(ErrorCode::Conflict, format!("{id} takes no input")).with_hint("start it with `open_stdin`")
        );
    }
    let broke = |error: axum::Error| Error::Invalid { param: "body", message: format!("the body broke off: {error}") };
    let body = request.into_body().into_data_stream().map(|piece| piece.map_err(broke));
    let answer =
        session.commands().feed(&session, &command, query.offset, Box::pin(body), query.eof.unwrap_or(false)).await?;
    Ok(with_activation(command.activation(), axum::Json(answer)))
}

async fn signal(
    State(pepod): State<Pepod>,
    call: Call,
    Path((which, id)): Path<(String, String)>,
    Json(body): Json<SendSignal>,
) -> Result<Response, Problem> {
    let number = crate::signal::number(&body.signal)
        .ok_or_else(|| Problem::invalid("signal", format!("`{}` is no signal", body.signal.escape_debug())))?;
    let (session, command) = live(&pepod, call, &which, &id).await?;
    if command.is_over() {
        return Err(Problem::new(ErrorCode::Conflict, format!("{id} has ended")));
    }
    let serving = session.serving_still(command.activation(), GLANCE).await?;
    serving.guest.signal(proto::Signal { target: command.op(), signal: number, tree: body.tree }).await?;
    Ok(with_activation(command.activation(), StatusCode::NO_CONTENT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_one_line_or_its_arguments() {
        let one = |body: CreateCommand| checked(body).map_err(|problem| problem.0.param.unwrap_or_default());
        let line = one(CreateCommand { command: Some("echo hi".into()), ..Default::default() }).expect("line");
        assert_eq!(line.exec.argv, ["/bin/bash", "-c", "echo hi"]);
        assert_eq!(line.spec.argv, ["echo hi"]);
        assert!(line.exec.detached && !line.exec.stdin);
        let shell = CreateCommand { command: Some("cd /".into()), shell: Some("main".into()), ..Default::default() };
        assert_eq!(one(shell).expect("shell").exec.argv, ["cd /"]);
        for (body, param) in [
            (CreateCommand::default(), "command"),
            (CreateCommand { argv: Some(vec![]), ..Default::default() }, "argv"),
            (CreateCommand { argv: Some(vec!["a\0".into()]), ..Default::default() }, "argv"),
            (CreateCommand { argv: Some(vec!["x".repeat(70_000)]), ..Default::default() }, "argv"),
            (CreateCommand { command: Some("x".into()), argv: Some(vec!["x".into()]), ..Default::default() }, "argv"),
            (
                CreateCommand { command: Some("x".into()), id: Some(uuid::Uuid::nil().into()), ..Default::default() },
                "id",
            ),
            (
                CreateCommand {
                    command: Some("x".into()),
                    env: [("a=b".into(), "c".into())].into(),
                    ..Default::default()
                },
                "env",
            ),
            (
                CreateCommand { command: Some("x".into()), timeout_seconds: Some(u64::MAX), ..Default::default() },
                "timeout_seconds",
            ),
        ] {
            assert_eq!(one(body).err().as_deref(), Some(param));
        }
    }
}
