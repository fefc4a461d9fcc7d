//! Routes of published ports: what anybody may open who has the address, until when, and the end of it.

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use pepo_api::{Domain, ErrorCode, Page, PortName, PublishPort, PublishedPort, route};

use super::ports::number;
use super::{Call, Json, Problem, Routes};
use crate::Pepod;
use crate::store::{self, Event, PUBLISHED_LONGEST, PublishedRow, Write};

/// How long a port is published where nobody says, seconds.
const USUAL: u64 = 3600;

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::port_list, list);
    routes.route(&route::port_publish, publish);
    routes.route(&route::port_withdraw, withdraw);
}

/// The domain; without one a published port would have no address.
fn domain(pepod: &Pepod) -> Result<&Domain, Problem> {
    pepod.config().domain.as_ref().ok_or_else(|| {
        let message = "ports have no host names here, and without one a port cannot be published";
        let error = pepo_api::Error::new(ErrorCode::Unsupported, message);
        error.hint("the operator sets edge.domain = \"preview.example.com\" in pepo.toml and starts pepod and the edge again (docs/preview.md)").into()
    })
}

/// Whether a stranger may go on to that port. The edge knows it too; what is withdrawn, over or ended this very moment, only
/// pepod does.
pub(super) async fn check(pepod: &Pepod, call: Call, session: &str, port: u16) -> Result<(), Problem> {
    let of = session.parse().ok().map(|session| PortName { session, port });
    let published = match of {
        Some(of) => pepod.store().is_published(call.app, of).await?,
        None => false,
    };
    if published { Ok(()) } else { Err(nobody()) }
}

/// What a stranger is told who asks for what is not published: as the edge says it, whatever the reason is.
fn nobody() -> Problem {
    Problem::new(ErrorCode::Unauthenticated, "a key is needed")
}

/// What a stranger may know of what came out: nothing of the Session but what its program answers. Errors of ours tell their
/// own callers how a Session ended, what its setup wrote, which quota is used up.
pub(super) fn for_anybody(passed: Result<Response, Problem>) -> Result<Response, Problem> {
    match passed {
        Ok(mut answer) => {
            answer.headers_mut().remove("pepo-activation");
            Ok(answer)
        }
        Err(Problem(error)) => Err(match error.code {
            ErrorCode::NotFound | ErrorCode::SessionTerminated | ErrorCode::Unauthenticated => nobody(),
            code => Problem::new(code, code.meaning().trim()),
        }),
    }
}

fn shown(domain: &Domain, row: PublishedRow) -> PublishedPort {
    PublishedPort {
        host: domain.name(PortName { session: row.session, port: row.port }),
        session_id: row.session,
        port: row.port,
        published_by: row.published_by,
        published_at: row.published_at,
        expires_at: row.expires_at,
    }
}

async fn list(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    // Without a domain nobody reaches what was published while there was one.
    let items = match domain(&pepod) {
        Ok(domain) => {
            let rows = pepod.store().published(session.id()).await?;
            rows.into_iter().map(|row| shown(domain, row)).collect()
        }
        Err(_) => vec![],
    };
    Ok(axum::Json(Page::<PublishedPort> { items, next_cursor: None }).into_response())
}

/// When this is answered the edge lets everybody in there.
async fn publish(
    State(pepod): State<Pepod>,
    call: Call,
    Path((which, port)): Path<(String, String)>,
    Json(body): Json<PublishPort>,
) -> Result<Response, Problem> {
    let port = number(&port)?;
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    let domain = domain(&pepod)?;
    let seconds = body.expires_seconds.unwrap_or(USUAL);
    if !(1..=PUBLISHED_LONGEST).contains(&seconds) {
        let message = format!("expires_seconds is {seconds}; it must be from 1 to {PUBLISHED_LONGEST}");
        return Err(Problem::invalid("expires_seconds", message));
    }
    let published_at = store::now();
    let row = PublishedRow {
        session: session.id(),
        port,
        app: call.app,
        published_by: call.actor().to_string(),
        published_at,
        expires_at: store::time(store::millis(published_at) + seconds as i64 * 1000),
    };
    pepod.store().write(Write::Publish(Box::new(row.clone()))).await?;
    let event = Event::new("port.published").app(call.app).session(row.session).actor(call.actor());
    pepod.store().record(event.detail("port", port).detail("expires_seconds", seconds));
    super::key::settled(&pepod).await;
    Ok(axum::Json(shown(domain, row)).into_response())
}

/// When this is answered the port takes a credential again. One that was not published is as it was.
async fn withdraw(
    State(pepod): State<Pepod>,
    call: Call,
    Path((which, port)): Path<(String, String)>,
) -> Result<Response, Problem> {
    let port = number(&port)?;
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    let there = pepod.store().published(session.id()).await?.iter().any(|row| row.port == port);
    pepod.store().write(Write::Withdraw(session.id(), port)).await?;
    if there {
        let event = Event::new("port.withdrawn").app(call.app).session(session.id()).actor(call.actor());
        pepod.store().record(event.detail("port", port));
        super::key::settled(&pepod).await;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

#[cfg(test)]
mod tests {
    use pepo_api::{Ended, Reason};

    use super::*;

    #[test]
    fn a_stranger_learns_what_failed_and_nothing_of_the_session() {
        let told = |error: pepo_api::Error| *for_anybody(Err(Problem::from(error))).expect_err("an error").0;
        let mut ended = Ended::new(Reason::Idle, jiff::Timestamp::UNIX_EPOCH);
        ended.message = "secret".into();
        for code in [ErrorCode::NotFound, ErrorCode::SessionTerminated, ErrorCode::Unauthenticated] {
            let error = told(pepo_api::Error::new(code, "secret").ended(ended.clone()).hint("secret"));
            assert_eq!(
                (error.code, error.ended.is_none(), error.hint.is_none()),
                (ErrorCode::Unauthenticated, true, true)
            );
        }
        for code in ErrorCode::ALL {
            let error = told(pepo_api::Error::new(*code, "secret").ended(ended.clone()).hint("secret").param("secret"));
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
        }
        let mut answer = Response::new(axum::body::Body::empty());
        answer.headers_mut().insert("pepo-activation", http::HeaderValue::from_static("7"));
        assert!(for_anybody(Ok(answer)).expect("passed").headers().is_empty());
    }
}
