//! Routes of Session tokens: what a backend hands to a browser, so that its key stays with it.

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use pepo_api::{CreateToken, ErrorCode, NewToken, Scope, TokenClaims, route};

use super::{Call, Caller, Json, Problem, Routes};
use crate::Pepod;
use crate::store::{Event, TOKEN_LONGEST, Write, millis};

/// How long a token is valid where nobody says, seconds.
const USUAL: u64 = 600;

/// What a token can have at all: one Session, and nothing that outlives it or makes more of it.
const POSSIBLE: &[&str] =
    &["sessions:read", "commands:read", "commands:run", "files:read", "files:write", "ports:connect"];

/// What the caller may do, as the edge tells it.
const SCOPES: &str = "pepo-scopes";

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::token_create, create);
    routes.route(&route::token_revoke, revoke);
}

fn possible() -> Vec<Scope> {
    POSSIBLE.iter().filter_map(|word| word.parse().ok()).collect()
}

/// What the caller may do; everything, where it is the operator. A word that is none covers nothing.
fn of_caller(call: Call, headers: &HeaderMap) -> Vec<Scope> {
    match call.caller {
        Caller::Operator { .. } => vec![Scope::admin()],
        Caller::App(_) | Caller::Edge => {
            let told = headers.get(SCOPES).and_then(|value| value.to_str().ok()).unwrap_or_default();
            told.split(' ').filter_map(|word| word.parse().ok()).collect()
        }
    }
}

/// What the token gets: what was asked for, if that can be, or all that can.
fn granted(asked: Vec<Scope>, port: Option<u16>, has: &[Scope]) -> Result<Vec<Scope>, Problem> {
    let possible = possible();
    let needs_port = |scope: &Scope| scope.covers(pepo_api::Action::PortsConnect);
    if asked.is_empty() {
        let all = possible.into_iter().filter(|scope| scope.within(has) && (port.is_some() || !needs_port(scope)));
        let all: Vec<_> = all.collect();
        return match all.is_empty() {
            true => {
                Err(Problem::new(ErrorCode::Forbidden, "you may do nothing that a token can have").param_of("scopes"))
            }
            false => Ok(all),
        };
    }
    for scope in &asked {
        if !scope.within(&possible) {
            let message = format!("a token cannot have {scope}; it can have {}", POSSIBLE.join(", "));
            return Err(Problem::invalid("scopes", message));
        }
        if !scope.within(has) {
            let message = format!("you cannot hand on {scope}: you lack it");
            return Err(Problem::new(ErrorCode::Forbidden, message).param_of("scopes"));
        }
    }
    if port.is_none() && asked.iter().any(needs_port) {
        return Err(Problem::invalid("port", "ports:connect needs the port"));
    }
    Ok(asked)
}

async fn create(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    headers: HeaderMap,
    Json(body): Json<CreateToken>,
) -> Result<Response, Problem> {
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    let CreateToken { scopes, port, expires_seconds } = body;
    if scopes.len() > 32 {
        return Err(Problem::invalid("scopes", "at most 32 scopes"));
    }
    if port == Some(0) {
        return Err(Problem::invalid("port", "a port is from 1 to 65535"));
    }
    let seconds = expires_seconds.unwrap_or(USUAL);
    if !(1..=TOKEN_LONGEST).contains(&seconds) {
        let message = format!("expires_seconds is {seconds}; it must be from 1 to {TOKEN_LONGEST}");
        return Err(Problem::invalid("expires_seconds", message));
    }
    let has = of_caller(call, &headers);
    let scopes = granted(scopes, port, &has)?;
    if port.is_some() && !has.iter().any(|scope| scope.covers(pepo_api::Action::PortsConnect)) {
        return Err(
            Problem::new(ErrorCode::Forbidden, "you cannot hand on a port: you lack ports:connect").param_of("port")
        );
    }
    let made = millis(jiff::Timestamp::now());
    let until = made + seconds as i64 * 1000;
    let claims =
        TokenClaims { app: call.app, session: session.id(), scopes: scopes.clone(), port, key: call.key, made, until };
    let event = Event::new("token.created").app(call.app).session(session.id()).actor(call.actor());
    pepod.store().record(event.detail("scopes", &scopes).detail("port", port).detail("expires_seconds", seconds));
    let token = claims.sign(pepod.token_key());
    let expires_at = crate::store::time(until);
    let made = NewToken { token, session_id: session.id(), scopes, port, expires_at };
    let mut response = (StatusCode::CREATED, axum::Json(made)).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// When this is answered no token of the Session that was made before lets anybody in.
async fn revoke(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    let session = pepod.sessions().find(call.app, &which).await?.live()?;
    pepod.store().write(Write::VoidTokens(session.id())).await?;
    let event = Event::new("token.revoked").app(call.app).session(session.id()).actor(call.actor());
    pepod.store().record(event);
    super::key::settled(&pepod).await;
    Ok(StatusCode::NO_CONTENT.into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scopes(words: &[&str]) -> Vec<Scope> {
        words.iter().map(|word| word.parse().expect(word)).collect()
    }

    #[test]
    fn a_token_has_what_its_maker_has_of_what_a_token_can_have() {
        let refused = |asked: &[&str], port, has: &[&str]| {
            granted(scopes(asked), port, &scopes(has))
                .map_err(|problem| (problem.0.code, problem.0.param.unwrap_or_default()))
        };
        assert_eq!(possible().len(), POSSIBLE.len());
        assert_eq!(refused(&[], Some(80), &["*"]), Ok(possible()));
        assert_eq!(refused(&[], None, &["files:*"]), Ok(scopes(&["files:read", "files:write"])));
        assert_eq!(refused(&["commands:*"], None, &["*"]), Ok(scopes(&["commands:*"])));
        let forbidden = |param: &str| Err((ErrorCode::Forbidden, param.to_owned()));
        let invalid = |param: &str| Err((ErrorCode::Invalid, param.to_owned()));
        assert_eq!(refused(&["commands:run"], None, &["files:*"]), forbidden("scopes"));
        assert_eq!(refused(&[], None, &["usage:read"]), forbidden("scopes"));
        assert_eq!(refused(&["*"], None, &["*"]), invalid("scopes"));
        for word in ["sessions:write", "app:admin", "tokens:write", "workspaces:read", "sessions:*"] {
            assert_eq!(refused(&[word], None, &["app:admin"]), invalid("scopes"), "{word}");
        }
        assert_eq!(refused(&["ports:connect"], None, &["*"]), invalid("port"));
    }
}
