//! Routes of Sessions.

use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use pepo_api::query::{ListSessions, ShowConsole, ShowServices, ShowSession};
use pepo_api::{
    CreateSession, IfTerminated, Page, Reason, Session, SessionId, SessionStats, SessionWorkspace, UpdateSession, route,
};

use super::once::{self, Asked};
use super::settings;
use super::volumes::{self, Local};
use super::{Call, Json, Problem, Query, Routes};
use crate::session::state::Cause;
use crate::session::{Error, Found, NewSession, Opened, Published, Services, Session as Handle};
use crate::store::{Filter, SessionRow};
use crate::workspace::{PATH, Use};
use crate::{Pepod, network};

/// Rows looked at for one page, where a filter lets few through.
const LOOKED_AT: usize = 10_000;

/// The longest wait of a look.
const LONGEST_WAIT: u64 = 300;

/// How often a followed look at what is used is repeated.
const STATS_EVERY: Duration = Duration::from_secs(1);

/// How often a followed console is read.
const CONSOLE_EVERY: Duration = Duration::from_millis(250);

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::session_create, create);
    routes.route(&route::session_open, open);
    routes.route(&route::session_services, services);
    routes.route(&route::session_list, list);
    routes.route(&route::session_show, show);
    routes.route(&route::session_update, update);
    routes.route(&route::session_terminate, terminate);
    routes.route(&route::session_release, release);
    routes.route(&route::session_stats, stats);
    routes.route(&route::session_console, console);
}

fn opened(session: &Handle, status: StatusCode) -> Response {
    let now = session.now();
    made(session.id(), now.activation, status, shown(session, &now))
}

fn made(id: SessionId, activation: u64, status: StatusCode, shown: Session) -> Response {
    let mut response = with_activation(activation, (status, axum::Json(shown)));
    if let Ok(place) = HeaderValue::try_from(format!("/v1/sessions/{id}")) {
        response.headers_mut().insert(header::LOCATION, place);
    }
    response
}

/// Opens the Session of a key, or makes it. What is there must be what was asked for, as far as that was said.
async fn open(
    State(pepod): State<Pepod>,
    call: Call,
    Path(key): Path<String>,
    Json(body): Json<CreateSession>,
) -> Result<Response, Problem> {
    settings::check_key(&key)?;
    if body.volumes.as_ref().is_some_and(|volumes| !volumes.is_empty()) {
        return Err(Problem::invalid("volumes", "directories of the host are lent to a new Session, not to a key's"));
    }
    let if_terminated = body.if_terminated.unwrap_or(IfTerminated::Replace);
    let asked = CreateSession { if_terminated: None, ..body };
    let mut new = settings::checked(&pepod, call, asked.clone())?;
    new.spec.key = Some(key);
    match pepod.sessions().open(new, if_terminated).await? {
        Opened::Made(session) => Ok(opened(&session, StatusCode::CREATED)),
        Opened::Found(session) => {
            settings::same(&asked, &session.now().spec)?;
            same_secrets(&pepod, &session, &asked).await?;
            Ok(opened(&session, StatusCode::OK))
        }
    }
}

/// Whether a Session has the secrets that were asked for, where some were. Which differs is not told, nor how.
async fn same_secrets(pepod: &Pepod, session: &Handle, asked: &CreateSession) -> Result<(), Problem> {
    let Some(asked) = asked.secrets.as_ref().filter(|asked| !asked.is_empty()) else { return Ok(()) };
    let has = pepod.sessions().unseal(session.id()).await?.0;
    let same = asked.len() == has.len()
        && asked.iter().all(|(name, value)| has.get(name).is_some_and(|has| has.as_str() == value.expose()));
    match same {
        true => Ok(()),
        false => {
            let message = "the Session of this key has other secrets; PATCH it to change them";
            Err(Problem::new(pepo_api::ErrorCode::Conflict, message).param_of("secrets"))
        }
    }
}

async fn create(
    State(pepod): State<Pepod>,
    Extension(local): Extension<Local>,
    call: Call,
    asked: Asked<CreateSession>,
) -> Result<Response, Problem> {
    let Asked { body, once } = asked;
    if body.if_terminated.is_some() {
        return Err(Problem::invalid("if_terminated", "if_terminated is for PUT /v1/sessions/by-key/{key}"));
    }
    let volumes = body.volumes.clone().unwrap_or_default();
    let new = settings::checked(&pepod, call, body)?;
    let find = move |pepod: Pepod, id: SessionId| async move {
        // It may have ended since: its record says so.
        Ok(match pepod.sessions().find(call.app, &id.to_string()).await {
            Ok(Found::Live(session)) => Some(opened(&session, StatusCode::CREATED)),
            Ok(Found::Ended(row)) => Some(made(row.id, row.activation, StatusCode::CREATED, shown_row(*row))),
            Err(Error::NotFound { .. }) => None,
            Err(error) => return Err(error.into()),
        })
    };
    let make = move |pepod: Pepod, id| async move {
        let mut new = NewSession { id, ..new };
        new.spec.volumes = volumes::lend(&pepod, &local, volumes, new.workspace.is_some()).await?;
        let lent = new.spec.volumes.clone();
        match pepod.sessions().create(new).await {
            Ok(session) => Ok(opened(&session, StatusCode::CREATED)),
            Err(error) => {
                pepod.workspaces().give_back(&lent).await;
                Err(error.into())
            }
        }
    };
    once::run(&pepod, call, &route::session_create, once, SessionId::generate(), find, make).await
}

async fn list(State(pepod): State<Pepod>, call: Call, Query(query): Query<ListSessions>) -> Result<Response, Problem> {
    let limit = query.limit.unwrap_or(100);
    if !(1..=1000).contains(&limit) {
        return Err(Problem::invalid("limit", "limit must be from 1 to 1000"));
    }
    let limit = limit as usize;
    let labels = query.label.iter().map(|label| label.split_once('=')).collect::<Option<Vec<_>>>();
    let labels = labels.ok_or_else(|| Problem::invalid("label", "a label filter is `key=value`"))?;
    let mut before = match &query.cursor {
        Some(cursor) => Some(cursor.parse().map_err(|_| Problem::invalid("cursor", "this cursor is none of ours"))?),
        None => None,
    };
    let (mut items, mut looked_at, mut more) = (Vec::new(), 0, true);
    while items.len() < limit && looked_at < LOOKED_AT && more {
        let rows = pepod
            .store()
            .list_sessions(call.app, Filter { before, key: query.key.clone(), limit: limit + 1 })
            .await
            .map_err(Error::from)?;
        more = rows.len() > limit;
        for row in rows.into_iter().take(limit) {
            looked_at += 1;
            before = Some(row.id);
            let session = match pepod.sessions().by_id(row.id) {
                Some(live) => shown(&live, &live.now()),
                None => shown_row(row),
            };
            let state_fits = query.state.is_none_or(|state| state == session.state);
            let labels_fit = labels.iter().all(|(key, value)| session.labels.get(*key).is_some_and(|has| has == value));
            if state_fits && labels_fit {
                items.push(session);
                if items.len() == limit {
                    // The rest of these rows belongs to the next page.
                    more = true;
                    break;
                }
            }
        }
    }
    let next_cursor = before.filter(|_| more).map(|id| id.to_string());
    Ok(axum::Json(Page { items, next_cursor }).into_response())
}

fn longest(seconds: Option<u64>) -> Result<Duration, Problem> {
    match seconds.unwrap_or(0) {
        seconds if seconds <= LONGEST_WAIT => Ok(Duration::from_secs(seconds)),
        _ => Err(Problem::invalid("wait_seconds", format!("wait_seconds must be from 0 to {LONGEST_WAIT}"))),
    }
}

async fn show(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<ShowSession>,
) -> Result<Response, Problem> {
    let wait = longest(query.wait_seconds)?;
    match pepod.sessions().find(call.app, &which).await? {
        Found::Live(session) => {
            let now = match query.after {
                Some(after) => session.changed(after, wait).await,
                None => session.now(),
            };
            let mut shown = shown(&session, &now);
            shown.network_used =
                pepod.store().carried(session.id(), None).await.map_err(Error::from)?.map(|all| Box::new(all.shown()));
            shown.network_notes.extend(pepod.sessions().reach().notes(session.app(), &now.spec.network));
            Ok(with_activation(now.activation, axum::Json(shown)))
        }
        Found::Ended(row) => {
            let mut shown = shown_row(*row);
            shown.network_used =
                pepod.store().carried(shown.id, None).await.map_err(Error::from)?.map(|all| Box::new(all.shown()));
            Ok(with_activation(shown.activation, axum::Json(shown)))
        }
    }
}

async fn update(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Json(body): Json<UpdateSession>,
) -> Result<Response, Problem> {
    let update = settings::changed(&pepod, call, body)?;
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    session.is_still(call.activation)?;
    let now = session.update(update).await?;
    Ok(with_activation(now.activation, axum::Json(shown(&session, &now))))
}

/// Legal from every state and done at once where it has ended: what is asked for is what is answered.
async fn terminate(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    match pepod.sessions().find(call.app, &which).await? {
        Found::Live(session) => {
            session.is_still(call.activation)?;
            // Goes on if the caller leaves: it was asked for.
            let ending = {
                let session = session.clone();
                tokio::spawn(async move { session.terminate(Cause::plain(Reason::Operator)).await })
            };
            let now = ending.await.unwrap_or_else(|_| session.now());
            let mut shown = shown(&session, &now);
            if let Some(workspace) = &mut shown.workspace {
                workspace.freed_bytes = pepod.workspaces().freed(workspace.id);
            }
            Ok(with_activation(now.activation, axum::Json(shown)))
        }
        Found::Ended(row) => Ok(with_activation(row.activation, axum::Json(shown_row(*row)))),
    }
}

async fn release(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    session.is_still(call.activation)?;
    let now = session.release(Cause::plain(Reason::Idle)).await?;
    Ok(with_activation(now.activation, axum::Json(shown(&session, &now))))
}

async fn services(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<ShowServices>,
) -> Result<Response, Problem> {
    let wait = longest(query.wait_seconds)?;
    let (activation, items) = match pepod.sessions().find(call.app, &which).await? {
        Found::Live(session) => {
            session.is_still(call.activation)?;
            session.services().decided(&session, wait).await;
            let now = session.now();
            (now.activation, session.services().shown(&now.spec.services))
        }
        Found::Ended(row) => (row.activation, Services::default().shown(&row.spec.services)),
    };
    Ok(with_activation(activation, axum::Json(Page { items, next_cursor: None })))
}

async fn stats(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    session.is_still(call.activation)?;
    let first = used(&pepod, &session).await?;
    let activation = session.now().activation;
    if !super::command::wants_events(&headers) {
        return Ok(with_activation(activation, axum::Json(first)));
    }
    // It ends with the Sandbox: a look at the next one is asked for anew.
    let following =
        futures_util::stream::unfold((pepod, session, Some(first)), move |(pepod, session, first)| async move {
            let shown = match first {
                Some(first) => first,
                None => {
                    tokio::time::sleep(STATS_EVERY).await;
                    if session.now().activation != activation {
                        return None;
                    }
                    used(&pepod, &session).await.ok()?
                }
            };
            Some((
                Ok::<_, std::convert::Infallible>(super::events::event("stats", None, &shown)),
                (pepod, session, None),
            ))
        });
    Ok(with_activation(activation, super::events::sse(following)))
}

/// What its Sandbox uses now. Looking is no use: it neither waits for a Sandbox nor keeps one.
async fn used(pepod: &Pepod, session: &Handle) -> Result<SessionStats, Problem> {
    let guest = session
        .guest()
        .ok_or_else(|| Problem::new(pepo_api::ErrorCode::Conflict, format!("{} has no Sandbox now", session.id())))?;
    let (stats, usage, traffic) = tokio::join!(guest.stats(), session.usage(), session.traffic());
    let (stats, usage, traffic) = (stats?, usage?, traffic?);
    let sessions = pepod.sessions();
    let now = traffic.as_ref().map(|traffic| sessions.counted_network(session, traffic));
    let total = match traffic {
        Some(traffic) => sessions.total_network(session, &traffic).await?,
        None => None,
    };
    Ok(SessionStats {
        uptime_ms: stats.uptime_ms,
        cpu_ms: stats.cpu_ms,
        memory_bytes: stats.memory_bytes,
        memory_used_bytes: stats.memory_bytes.saturating_sub(stats.memory_available_bytes),
        disk_bytes: stats.disk_bytes,
        disk_used_bytes: stats.disk_used_bytes,
        processes: stats.processes,
        host_cpu_ms: usage.cpu_ns / 1_000_000,
        host_memory_bytes: usage.memory_bytes,
        host_memory_limit_bytes: usage.memory_limit_bytes,
        host_disk_bytes: usage.disk_bytes,
        read_bytes: usage.read_bytes,
        write_bytes: usage.write_bytes,
        network: now.map(|now| now.shown()),
        network_total: total.map(|total| Box::new(total.shown())),
    })
}

async fn console(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<ShowConsole>,
) -> Result<Response, Problem> {
    let session = match pepod.sessions().find(call.app, &which).await? {
        Found::Live(session) => session,
        // What an end without order left is all there is.
        Found::Ended(row) => {
            let lines = row.ended.map(|ended| ended.last_console_lines).unwrap_or_default();
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            return Ok(raw(Body::from(text)));
        }
    };
    let (first, at) = session.console().await?;
    if query.follow != Some(true) {
        return Ok(raw(Body::from(first)));
    }
    let following = futures_util::stream::unfold((session, at, Some(first)), |(session, at, first)| async move {
        if let Some(first) = first {
            return Some((Ok::<_, std::convert::Infallible>(Bytes::from(first)), (session, at, None)));
        }
        loop {
            tokio::time::sleep(CONSOLE_EVERY).await;
            let (bytes, end) = session.console().await.ok()?;
            let new = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX).min(bytes.len());
            if new > 0 {
                let bytes = Bytes::from(bytes);
                let tail = bytes.slice(bytes.len() - new..);
                return Some((Ok(tail), (session, end, None)));
            }
        }
    });
    Ok(raw(Body::from_stream(following)))
}

fn raw(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "application/octet-stream"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")], body)
        .into_response()
}

/// Says which activation answered.
pub(super) fn with_activation(activation: u64, answer: impl IntoResponse) -> Response {
    let mut response = answer.into_response();
    response.headers_mut().insert("pepo-activation", HeaderValue::from(activation));
    response
}

/// A Session's Workspace as the API shows it.
fn in_use(used: &Use) -> SessionWorkspace {
    SessionWorkspace {
        id: used.id,
        path: PATH.to_owned(),
        mode: used.mode,
        own: used.own,
        keep: used.keep,
        freed_bytes: None,
    }
}

/// A live Session as the API shows it.
pub(super) fn shown(session: &Handle, now: &Published) -> Session {
    Session {
        id: session.id(),
        app_id: session.app(),
        name: now.spec.name.clone(),
        key: now.spec.key.clone(),
        state: now.state.word(),
        generation: now.generation,
        activation: now.activation,
        sandbox_id: now.state.tenure().map(|tenure| tenure.sandbox),
        image_id: now.spec.image_id,
        image: now.spec.image.clone(),
        cpus: now.spec.cpus,
        memory_mib: now.spec.memory_mib,
        disk_mib: now.spec.disk_mib,
        keep_alive_seconds: now.spec.keep_alive_seconds,
        reactivate: now.spec.reactivate,
        setup: now.spec.setup.clone(),
        services: now.spec.services.clone(),
        network_notes: network::notes(&now.spec.network),
        network: now.spec.network.clone(),
        network_used: None,
        workspace: now.spec.workspace.as_ref().map(in_use),
        persist: now.spec.persist.clone(),
        volumes: now.spec.volumes.iter().map(|lent| lent.volume.clone()).collect(),
        env: now.spec.env.clone(),
        secret_names: now.spec.secrets.iter().cloned().collect(),
        labels: now.spec.labels.clone(),
        created_at: session.created_at(),
        expires_at: now.expires_at,
        active_at: now.active_at,
        commands_running: session.commands().running(),
        last_end: now.last_end.clone(),
        ended: now.ended.clone(),
    }
}

/// A Session of which only the record is left, as the API shows it.
fn shown_row(row: SessionRow) -> Session {
    Session {
        id: row.id,
        app_id: row.app,
        name: row.spec.name,
        key: row.spec.key,
        state: row.state,
        generation: row.generation,
        activation: row.activation,
        sandbox_id: None,
        image_id: row.spec.image_id,
        image: row.spec.image,
        cpus: row.spec.cpus,
        memory_mib: row.spec.memory_mib,
        disk_mib: row.spec.disk_mib,
        keep_alive_seconds: row.spec.keep_alive_seconds,
        reactivate: row.spec.reactivate,
        setup: row.spec.setup,
        services: row.spec.services,
        network_notes: network::notes(&row.spec.network),
        network: row.spec.network,
        network_used: None,
        workspace: row.spec.workspace.as_ref().map(in_use),
        persist: row.spec.persist,
        volumes: row.spec.volumes.into_iter().map(|lent| lent.volume).collect(),
        env: row.spec.env,
        secret_names: row.spec.secrets.into_iter().collect(),
        labels: row.spec.labels,
        created_at: row.created_at,
        expires_at: row.expires_at,
        active_at: row.active_at,
        commands_running: 0,
        last_end: row.last_end,
        ended: row.ended,
    }
}
