//! Routes of Sessions.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use pepo_api::query::{ListSessions, ShowConsole, ShowSession};
use pepo_api::{
    CreateSession, ImageId, NetworkMode, NetworkSpec, Page, Reason, Session, SessionStats, UpdateSession, route,
};
use pepo_sandbox::plan;

use super::{Call, Json, Problem, Query, Routes};
use crate::Pepod;
use crate::session::state::Cause;
use crate::session::{Error, Found, NewSession, Published, Session as Handle, Spec, Update};
use crate::store::{Filter, SessionRow};

/// Rows looked at for one page, where a filter lets few through.
const LOOKED_AT: usize = 10_000;

/// The longest wait of a look.
const LONGEST_WAIT: u64 = 300;

/// How often a followed console is read.
const CONSOLE_EVERY: Duration = Duration::from_millis(250);

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::session_create, create);
    routes.route(&route::session_list, list);
    routes.route(&route::session_show, show);
    routes.route(&route::session_update, update);
    routes.route(&route::session_terminate, terminate);
    routes.route(&route::session_release, release);
    routes.route(&route::session_stats, stats);
    routes.route(&route::session_console, console);
}

async fn create(State(pepod): State<Pepod>, call: Call, Json(body): Json<CreateSession>) -> Result<Response, Problem> {
    let new = checked(&pepod, call, body)?;
    let session = pepod.sessions().create(new).await?;
    let shown = shown(&session, &session.now());
    let place = HeaderValue::try_from(format!("/v1/sessions/{}", session.id())).ok();
    let mut response = (StatusCode::CREATED, axum::Json(shown)).into_response();
    if let Some(place) = place {
        response.headers_mut().insert(header::LOCATION, place);
    }
    Ok(response)
}

/// What was asked for, with the defaults, or what is wrong with it.
fn checked(pepod: &Pepod, call: Call, body: CreateSession) -> Result<NewSession, Problem> {
    let CreateSession {
        image,
        cpus,
        memory_mib,
        disk_mib,
        keep_alive_seconds,
        expires_seconds,
        env,
        network,
        labels,
        name,
        workspace,
        reactivate,
        persist,
        secrets,
        setup,
        services,
    } = body;
    let absent = |param: &str, is_there: bool, why: &str| match is_there {
        true => Err(Problem::unsupported(param, format!("this release has no {why}; leave `{param}` out"))),
        false => Ok(()),
    };
    absent("workspace", workspace.is_some_and(|value| !value.is_null()), "Workspaces: release ends a Session")?;
    absent("reactivate", reactivate == Some(true), "second life of a Session")?;
    absent("persist", persist.is_some_and(|paths| !paths.is_empty()), "Workspaces to keep paths in")?;
    absent("secrets", secrets.is_some_and(|secrets| !secrets.is_empty()), "encrypted secrets")?;
    absent("setup", setup.is_some_and(|value| !value.is_null()), "setup commands")?;
    absent("services", services.is_some_and(|value| !value.is_null()), "services")?;
    no_network(network.as_ref())?;
    let config = pepod.sessions().config();
    if let Some(name) = &name {
        check_name(name)?;
    }
    check_labels(&labels)?;
    check_env("env", &env)?;
    let spec = Spec {
        name,
        image: image.unwrap_or_else(|| config.image.clone()),
        image_id: ImageId::from(uuid::Uuid::nil()),
        cpus: within("cpus", cpus.unwrap_or(config.cpus), &plan::CPUS)?,
        memory_mib: within("memory_mib", memory_mib.unwrap_or(config.memory_mib), &plan::MEMORY_MIB)?,
        disk_mib: within("disk_mib", disk_mib.unwrap_or(config.disk_mib), &plan::DISK_MIB)?,
        keep_alive_seconds: bounded(
            "keep_alive_seconds",
            keep_alive_seconds.unwrap_or(config.keep_alive.as_secs()),
            0,
        )?,
        env,
        labels,
    };
    let expires_at = match expires_seconds {
        Some(seconds) => expiry(bounded("expires_seconds", seconds, 1)?),
        None => None,
    };
    Ok(NewSession { app: call.app, spec, expires_at })
}

fn no_network(network: Option<&NetworkSpec>) -> Result<(), Problem> {
    match network {
        Some(NetworkSpec { mode: NetworkMode::None, allow: None }) | None => Ok(()),
        Some(NetworkSpec { mode: NetworkMode::None, .. }) => Err(Problem::unsupported(
            "network.allow",
            "this release gives a Sandbox no network interface; leave `allow` out",
        )),
        Some(_) => {
            Err(Problem::unsupported("network.mode", "this release gives a Sandbox no network interface; use `none`"))
        }
    }
}

fn within(param: &str, value: u32, range: &std::ops::RangeInclusive<u32>) -> Result<u32, Problem> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(Problem::invalid(param, format!("{param} is {value}; it must be from {} to {}", range.start(), range.end())))
}

/// A number of seconds up to ten years.
fn bounded(param: &str, value: u64, least: u64) -> Result<u64, Problem> {
    const MOST: u64 = 10 * 365 * 86_400;
    if (least..=MOST).contains(&value) {
        return Ok(value);
    }
    Err(Problem::invalid(param, format!("{param} is {value}; it must be from {least} to {MOST}")))
}

fn expiry(seconds: u64) -> Option<jiff::Timestamp> {
    jiff::Timestamp::now().checked_add(jiff::SignedDuration::from_secs(seconds as i64)).ok()
}

fn check_name(name: &str) -> Result<(), Problem> {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_' | b'.');
    let outer = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let bytes = name.as_bytes();
    let shaped = bytes.len() <= 63
        && outer(bytes.first().copied())
        && outer(bytes.last().copied())
        && bytes.iter().all(|b| inner(*b));
    if shaped && !name.starts_with("ses_") {
        return Ok(());
    }
    Err(Problem::invalid(
        "name",
        "a name has at most 63 of a-z, 0-9, `-`, `_`, `.`, begins and ends with a letter or digit, and does not look like an id",
    ))
}

fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Problem> {
    if labels.len() > 64 {
        return Err(Problem::invalid("labels", format!("{} labels; at most 64", labels.len())));
    }
    for (key, value) in labels {
        if key.is_empty() || key.len() > 63 || key.contains('=') || key.chars().any(char::is_control) {
            return Err(Problem::invalid(
                "labels",
                "a label's key has 1 to 63 bytes, without `=` and control characters",
            ));
        }
        if value.len() > 256 || value.chars().any(char::is_control) {
            let message =
                format!("the label `{}` has a value over 256 bytes or with control characters", key.escape_debug());
            return Err(Problem::invalid("labels", message));
        }
    }
    Ok(())
}

/// An environment that fits into one message to the guest.
pub(super) fn check_env(param: &str, env: &BTreeMap<String, String>) -> Result<(), Problem> {
    const MOST: usize = 48 * 1024;
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            let message = format!("`{}` is not a variable: no empty name, no `=` in it, no NUL", name.escape_debug());
            return Err(Problem::invalid(param, message));
        }
    }
    let bytes: usize = env.iter().map(|(name, value)| name.len() + value.len() + 8).sum();
    if bytes > MOST {
        return Err(Problem::invalid(param, format!("the environment has {bytes} bytes; at most {MOST}")));
    }
    Ok(())
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
        let rows =
            pepod.store().list_sessions(call.app, Filter { before, limit: limit + 1 }).await.map_err(Error::from)?;
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

async fn show(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<ShowSession>,
) -> Result<Response, Problem> {
    let wait = query.wait_seconds.unwrap_or(0);
    if wait > LONGEST_WAIT {
        return Err(Problem::invalid("wait_seconds", format!("wait_seconds must be from 0 to {LONGEST_WAIT}")));
    }
    match pepod.sessions().find(call.app, &which).await? {
        Found::Live(session) => {
            let now = match query.after {
                Some(after) => session.changed(after, Duration::from_secs(wait)).await,
                None => session.now(),
            };
            Ok(with_activation(now.activation, axum::Json(shown(&session, &now))))
        }
        Found::Ended(row) => Ok(with_activation(row.activation, axum::Json(shown_row(*row)))),
    }
}

async fn update(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Json(body): Json<UpdateSession>,
) -> Result<Response, Problem> {
    let UpdateSession { name, labels, keep_alive_seconds, expires_seconds, network } = body;
    no_network(network.as_ref())?;
    if let Some(name) = &name {
        check_name(name)?;
    }
    if let Some(labels) = &labels {
        check_labels(labels)?;
    }
    let keep_alive_seconds = keep_alive_seconds.map(|seconds| bounded("keep_alive_seconds", seconds, 0)).transpose()?;
    let expires_seconds = expires_seconds.map(|seconds| bounded("expires_seconds", seconds, 1)).transpose()?;
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    let now = session.update(Update { name, labels, keep_alive_seconds, expires_seconds }).await?;
    Ok(with_activation(now.activation, axum::Json(shown(&session, &now))))
}

/// Legal from every state and done at once where it has ended: what is asked for is what is answered.
async fn terminate(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    match pepod.sessions().find(call.app, &which).await? {
        Found::Live(session) => {
            // Goes on if the caller leaves: it was asked for.
            let ending = {
                let session = session.clone();
                tokio::spawn(async move { session.terminate(Cause::plain(Reason::Operator)).await })
            };
            let now = ending.await.unwrap_or_else(|_| session.now());
            Ok(with_activation(now.activation, axum::Json(shown(&session, &now))))
        }
        Found::Ended(row) => Ok(with_activation(row.activation, axum::Json(shown_row(*row)))),
    }
}

async fn release(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    let now = session.release().await?;
    Ok(with_activation(now.activation, axum::Json(shown(&session, &now))))
}

async fn stats(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    // Looking is no use: it neither waits for a Sandbox nor keeps one.
    let guest = session
        .guest()
        .ok_or_else(|| Problem::new(pepo_api::ErrorCode::Conflict, format!("{} has no Sandbox now", session.id())))?;
    let (stats, usage) = tokio::join!(guest.stats(), session.usage());
    let (stats, usage) = (stats?, usage?);
    let shown = SessionStats {
        uptime_ms: stats.uptime_ms,
        cpu_ms: stats.cpu_ms,
        memory_bytes: stats.memory_bytes,
        memory_used_bytes: stats.memory_bytes.saturating_sub(stats.memory_available_bytes),
        disk_bytes: stats.disk_bytes,
        disk_used_bytes: stats.disk_used_bytes,
        processes: stats.processes,
        host_cpu_ms: usage.cpu_ns / 1_000_000,
        host_memory_bytes: usage.memory_bytes,
    };
    Ok(with_activation(session.now().activation, axum::Json(shown)))
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

fn none() -> NetworkSpec {
    NetworkSpec { mode: NetworkMode::None, allow: None }
}

/// A live Session as the API shows it.
pub(super) fn shown(session: &Handle, now: &Published) -> Session {
    Session {
        id: session.id(),
        app_id: session.app(),
        name: now.spec.name.clone(),
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
        network: none(),
        env: now.spec.env.clone(),
        labels: now.spec.labels.clone(),
        created_at: session.created_at(),
        expires_at: now.expires_at,
        active_at: now.active_at,
        commands_running: session.commands().running(),
        ended: now.ended.clone(),
    }
}

/// A Session of which only the record is left, as the API shows it.
fn shown_row(row: SessionRow) -> Session {
    Session {
        id: row.id,
        app_id: row.app,
        name: row.spec.name,
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
        network: none(),
        env: row.spec.env,
        labels: row.spec.labels,
        created_at: row.created_at,
        expires_at: row.expires_at,
        active_at: row.active_at,
        commands_running: 0,
        ended: row.ended,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_slugs_and_no_ids() {
        for good in ["a", "web-1", "a_b.c", "7"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a b", "ses_01", "ü", &"a".repeat(64)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
