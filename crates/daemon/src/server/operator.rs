//! Routes of the operator and of the edge: what runs here, how it is set, what is wrong with the host, and the end of it.

use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{StatusCode, header};
use pepo_api::query::{ShowDoctor, ShowEdgeState};
use pepo_api::{
    ConfigShown, DoctorReport, DrainReport, DrainRequest, EdgeApp, EdgeDecision, EdgeDecisions, EdgeKey, EdgePort,
    EdgeState, ErrorCode, Health, OPENAPI, REFERENCE, REFERENCE_POLICY, SecretText, SweepReport, SweepRequest, route,
};

use super::{Call, Json, Problem, Query, Routes};
use crate::session::Error;
use crate::store::{Actor, EdgeNeeds, Event, KeyRow, Name};
use crate::{EdgeHas, Pepod, Stop};

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::version, version);
    routes.route(&route::config_show, config);
    routes.route(&route::doctor, doctor);
    routes.route(&route::sweep, sweep);
    routes.route(&route::drain, drain);
    routes.route(&route::down, down);
    routes.route(&route::edge_state, edge_state);
    routes.route(&route::edge_decisions, edge_decisions);
    routes.route(&route::backup, backup);
    routes.route(&route::healthz, healthz);
    routes.route(&route::readyz, readyz);
    routes.route(&route::openapi, openapi);
    routes.route(&route::reference, reference);
}

async fn version(State(pepod): State<Pepod>, call: Call) -> Response {
    let mut version = pepod.version();
    if !matches!(call.caller, super::Caller::Operator { .. }) {
        version.tag = None;
    }
    axum::Json(version).into_response()
}

async fn config(State(pepod): State<Pepod>) -> Response {
    axum::Json(shown(pepod.config())).into_response()
}

/// Every setting as the API shows it.
pub fn shown(config: &crate::config::Config) -> ConfigShown {
    let settings = config
        .shown()
        .map(|(key, value, origin)| (key.to_owned(), (serde_json::Value::String(value.to_owned()), origin.to_string())))
        .collect();
    ConfigShown { settings }
}

async fn doctor(State(pepod): State<Pepod>, Query(query): Query<ShowDoctor>) -> Response {
    let mut checks = pepod.seen_as_root().to_vec();
    let looking = {
        let config = pepod.config().clone();
        tokio::task::spawn_blocking(move || crate::doctor::anybody(&config))
    };
    checks.extend(looking.await.unwrap_or_default());
    let capacity = pepod.sessions().capacity();
    checks.push(crate::doctor::capacity(capacity.budget(), &capacity.load()));
    checks.extend(crate::doctor::pool(&pepod.sessions().pool().status()));
    checks.push(crate::doctor::debts(&pepod.sessions().owed()));
    checks.push(crate::doctor::holds(pepod.sessions().config()));
    if query.measure {
        checks.push(crate::doctor::slowdown(crate::doctor::measure::slowdown(pepod.sessions()).await));
    }
    axum::Json(DoctorReport { checks }).into_response()
}

async fn sweep(State(pepod): State<Pepod>, Json(body): Json<SweepRequest>) -> Result<Response, Problem> {
    if body.all {
        // Other instances' leftovers are root's to remove, and pepod holds none of their leases.
        return Err(Problem::from(
            pepo_api::Error::new(ErrorCode::Unsupported, "a running pepod sweeps its own instance only")
                .param("all")
                .hint("run `pepod sweep --all` as root"),
        ));
    }
    let leftovers = pepod.sweep(body.dry_run).await.map_err(Error::from)?;
    Ok(axum::Json(SweepReport { leftovers }).into_response())
}

/// The longest that what runs may take while the host is drained: a week.
const LONGEST_DRAIN: u64 = 7 * 86_400;

/// Answered when no Sandbox is left. Goes on without its caller.
async fn drain(State(pepod): State<Pepod>, Json(body): Json<DrainRequest>) -> Result<Response, Problem> {
    if body.cancel {
        crate::drain::cancel(pepod.sessions());
        let left = pepod.sessions().all().iter().filter(|session| session.holds()).count() as u32;
        return Ok(axum::Json(DrainReport { released: 0, cut: 0, left, cancelled: true }).into_response());
    }
    if body.deadline_seconds > LONGEST_DRAIN {
        let message = format!("deadline_seconds must be from 0 to {LONGEST_DRAIN}");
        return Err(Problem::invalid("deadline_seconds", message));
    }
    let draining = tokio::spawn(async move {
        let _busy = pepod.busy();
        crate::drain::drain(pepod.sessions(), Duration::from_secs(body.deadline_seconds)).await
    });
    let report = draining.await.map_err(|_| Problem::new(ErrorCode::Internal, "draining ended in a panic"))?;
    Ok(axum::Json(report).into_response())
}

/// Answered when every Sandbox has ended; pepod ends after that.
async fn down(State(pepod): State<Pepod>) -> Response {
    pepod.stop(Stop::Drain);
    pepod.drained().await;
    StatusCode::NO_CONTENT.into_response()
}

/// How long an asker for changes waits for one. The edge's copy is as old as its last answer, so this bounds that.
const EDGE_WAIT: Duration = Duration::from_secs(1);

/// What the edge needs. Asking says which generation it has, which is what a revocation waits for.
async fn edge_state(State(pepod): State<Pepod>, Query(query): Query<ShowEdgeState>) -> Result<Response, Problem> {
    pepod
        .edge_has()
        .send_replace(EdgeHas { generation: query.after.unwrap_or(0), asked: Some(std::time::Instant::now()) });
    if let Some(has) = query.after {
        let mut moves = pepod.store().edge();
        // Over: it has what there is, and learns that it still is so.
        let _ = tokio::time::timeout(EDGE_WAIT, moves.wait_for(|now| *now != has)).await;
        let generation = *moves.borrow();
        if generation == has {
            let same =
                EdgeState { generation, keys: None, apps: vec![], token_key: None, void: vec![], published: vec![] };
            return Ok(axum::Json(same).into_response());
        }
    }
    let EdgeNeeds { generation, keys, apps, void, published } = pepod.store().edge_state().await?;
    let shown = |key: KeyRow| EdgeKey {
        id: key.id,
        app_id: key.app,
        sha256: key.sha256,
        scopes: key.scopes,
        sources: key.sources,
        expires_at: key.expires_at,
    };
    let keys = Some(keys.into_iter().map(shown).collect());
    let apps = apps.into_iter().map(|app| EdgeApp {
        id: app.id,
        name: app.name,
        sources: app.settings.ingress.sources,
        requests_per_second: app.settings.quota.requests_per_second,
    });
    let token_key = Some(SecretText::new(crate::store::hex(pepod.token_key())));
    let published = published.into_iter().map(|row| EdgePort {
        app_id: row.app,
        session_id: row.session,
        port: row.port,
        expires_at: row.expires_at,
    });
    let (apps, published) = (apps.collect(), published.collect());
    Ok(axum::Json(EdgeState { generation, keys, apps, token_key, void, published }).into_response())
}

/// Entries that the edge may bring at once; it gathers for a second.
const DECISIONS: usize = 256;

/// What the edge refused by itself comes into the one audit log. The edge bounds how much a stranger can make of that.
async fn edge_decisions(State(pepod): State<Pepod>, Json(body): Json<EdgeDecisions>) -> Result<Response, Problem> {
    if body.decisions.len() > DECISIONS {
        return Err(Problem::invalid("decisions", format!("at most {DECISIONS}")));
    }
    for decision in body.decisions {
        let EdgeDecision { at: _, route, code, app_id, actor, source, request_id, times } = decision;
        // The row's name as the table has it: nobody's own text becomes a type in the log.
        let row = pepo_api::ROUTES.iter().find(|row| row.name == route).map_or("-", |row| row.name);
        let actor = match (actor.as_deref().and_then(Name::new), actor.and_then(|actor| actor.parse().ok())) {
            (_, Some(key)) => Actor::Key(key),
            (Some(name), None) => Actor::Named(name),
            (None, None) => Actor::Edge,
        };
        let mut event = Event::new(row).of_audit().actor(actor).outcome(code.as_str()).request(request_id);
        event = event.detail("by", "edge").detail("source", source);
        if times > 1 {
            event = event.detail("times", times);
        }
        if let Some(app) = app_id.filter(|app| pepod.apps().get(*app).is_some()) {
            event = event.app(app);
        }
        pepod.store().record(event);
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// A backup as it is made. It breaks off where something fails, so what came whole is whole.
async fn backup(State(pepod): State<Pepod>) -> Result<Response, Problem> {
    let only = pepod.backing().try_lock_owned();
    let only = only.map_err(|_| Problem::new(ErrorCode::Conflict, "another backup is being made"))?;
    let busy = pepod.busy();
    let (sender, pieces) = tokio::sync::mpsc::channel::<Result<Bytes, std::io::Error>>(8);
    tokio::task::spawn_blocking(move || {
        let (_only, _busy) = (only, busy);
        let out = std::io::BufWriter::with_capacity(PIECE, Pieces(sender.clone()));
        if let Err(error) = crate::backup::create(pepod.workspaces(), &pepod.config().places, out) {
            let text = format!("{error:#}");
            tracing::error!(error = text, "a backup broke off");
            // Where its caller went away there is nobody to tell.
            let _ = sender.blocking_send(Err(std::io::Error::other(text)));
        }
    });
    let stream =
        futures_util::stream::unfold(
            pieces,
            |mut pieces| async move { pieces.recv().await.map(|piece| (piece, pieces)) },
        );
    let kind = [(http::header::CONTENT_TYPE, "application/x-tar"), (http::header::CACHE_CONTROL, "no-store")];
    Ok((kind, axum::body::Body::from_stream(stream)).into_response())
}

/// Bytes of one piece of a backup's stream.
const PIECE: usize = 256 * 1024;

/// Writes into a stream that its reader pulls.
struct Pieces(tokio::sync::mpsc::Sender<Result<Bytes, std::io::Error>>);

impl std::io::Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let piece = Bytes::copy_from_slice(bytes);
        self.0.blocking_send(Ok(piece)).map_err(|_| std::io::Error::from(std::io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

async fn reference() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, REFERENCE_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, REFERENCE).into_response()
}

async fn healthz() -> Response {
    axum::Json(Health { status: "ok".into() }).into_response()
}

async fn readyz(State(pepod): State<Pepod>) -> Result<Response, Problem> {
    if pepod.sessions().is_draining() {
        return Err(Error::Draining.into());
    }
    Ok(axum::Json(Health { status: "ok".into() }).into_response())
}
