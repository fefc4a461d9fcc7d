//! Routes of an App's keys. A key's text is in one answer and nowhere else.

use std::net::IpAddr;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use pepo_api::query::{AskKey, ListKeys};
use pepo_api::{
    Action, CreateKey, ErrorCode, Key, KeyCan, KeyId, NewKey as Shown, Page, Principal, ROUTES, Resource, RotateKey,
    Scope, Subject, allow, route,
};

use super::once::{self, Asked};
use super::settings::check_name;
use super::{Call, Caller, Json, Problem, Query, Routes};
use crate::Pepod;
use crate::store::{self, Event, KeyRow, KeySpec, NewKey, Write};

/// How long a revocation waits for the edge to say that it knows: its copy lets nobody in when it is older.
const KNOWN_WITHIN: Duration = Duration::from_secs(6);

/// The longest life of a key, seconds: ten years.
const LONGEST: u64 = 10 * 365 * 86_400;

/// How long a rotated key stays valid where nobody says.
const OVERLAP: u64 = 86_400;

/// Ranges that a key may be used from.
const SOURCES: usize = 64;

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::key_create, create);
    routes.route(&route::key_list, list);
    routes.route(&route::key_show, show);
    routes.route(&route::key_can, can);
    routes.route(&route::key_rotate, rotate);
    routes.route(&route::key_revoke, revoke);
}

fn shown(key: KeyRow) -> Key {
    Key {
        id: key.id,
        app_id: key.app,
        name: key.name,
        prefix: key.prefix,
        scopes: key.scopes,
        sources: key.sources,
        created_by: key.created_by,
        created_at: key.created_at,
        expires_at: key.expires_at,
        revoked_at: key.revoked_at,
        replaced_by: key.replaced_by,
    }
}

/// The key of the caller's App with that id, or with that name among the valid ones.
async fn find(pepod: &Pepod, call: Call, which: &str) -> Result<KeyRow, Problem> {
    let now = jiff::Timestamp::now();
    let keys = pepod.store().keys(call.app).await?;
    let found = match which.parse() {
        Ok(id) => keys.into_iter().find(|key| key.id == id),
        Err(_) => keys.into_iter().find(|key| key.is_valid(now) && key.name.as_deref() == Some(which)),
    };
    found.ok_or_else(|| {
        let which: String = which.chars().take(80).flat_map(char::escape_debug).collect();
        Problem::new(ErrorCode::NotFound, format!("no key `{which}`"))
    })
}

async fn create(State(pepod): State<Pepod>, call: Call, asked: Asked<CreateKey>) -> Result<Response, Problem> {
    let Asked { body, once } = asked;
    let CreateKey { name, scopes, expires_seconds, sources } = body;
    if let Some(name) = &name {
        check_name(name)?;
        if name.starts_with("key_") {
            return Err(Problem::invalid("name", "a name does not look like an id"));
        }
    }
    let scopes = if scopes.is_empty() { vec![Scope::all()] } else { scopes };
    may(call, &scopes)?;
    if scopes.len() > 32 {
        return Err(Problem::invalid("scopes", "at most 32 scopes"));
    }
    let sources = ranges("sources", &sources)?;
    let expires_at = match expires_seconds {
        None => None,
        Some(seconds) if (1..=LONGEST).contains(&seconds) => later(seconds),
        Some(seconds) => {
            let message = format!("expires_seconds is {seconds}; it must be from 1 to {LONGEST}");
            return Err(Problem::invalid("expires_seconds", message));
        }
    };
    let spec = KeySpec { app: call.app, name, scopes, sources, expires_at, created_by: call.actor() };
    let find = move |pepod: Pepod, id: KeyId| async move {
        let there = pepod.store().keys(call.app).await?.into_iter().any(|key| key.id == id);
        match there {
            // Its text was told once, and nobody has it to tell it again.
            true => Err(Problem::from(
                pepo_api::Error::new(
                    ErrorCode::Conflict,
                    format!("this request made {id} before, and its text is told once"),
                )
                .hint("rotate that key, or revoke it and make another under another Idempotency-Key"),
            )),
            false => Ok(None),
        }
    };
    let make = move |pepod: Pepod, id| async move {
        let (key, text) = generate(spec)?;
        made(&pepod, call, key.under(id), text, "key.created").await
    };
    once::run(&pepod, call, &route::key_create, once, KeyId::generate(), find, make).await
}

/// An App's administrator makes keys for the App; another administrator only the operator makes.
fn may(call: Call, scopes: &[Scope]) -> Result<(), Problem> {
    match call.caller {
        Caller::Operator { .. } => Ok(()),
        _ if scopes.iter().any(Scope::is_admin) => {
            Err(Problem::new(ErrorCode::Forbidden, "only the operator makes a key with the scope app:admin")
                .param_of("scopes"))
        }
        _ => Ok(()),
    }
}

fn generate(spec: KeySpec) -> Result<(NewKey, String), Problem> {
    NewKey::generate(spec).map_err(|error| Problem::new(ErrorCode::Internal, format!("no random bytes: {error}")))
}

fn later(seconds: u64) -> Option<jiff::Timestamp> {
    jiff::Timestamp::now().checked_add(jiff::SignedDuration::from_secs(seconds as i64)).ok()
}

/// Ranges of addresses, each in its one form.
pub(super) fn ranges(param: &str, sources: &[String]) -> Result<Vec<String>, Problem> {
    if sources.len() > SOURCES {
        return Err(Problem::invalid(param, format!("at most {SOURCES} ranges")));
    }
    sources.iter().enumerate().map(|(n, text)| range(&format!("{param}[{n}]"), text)).collect()
}

/// `address/bits`, or an address alone.
fn range(param: &str, text: &str) -> Result<String, Problem> {
    let wrong = || Problem::invalid(param, "a range is as 192.0.2.0/24, 2001:db8::/32, or one address");
    let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
    let address: IpAddr = address.parse().map_err(|_| wrong())?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    let bits = match bits {
        None => most,
        Some(bits) => bits.parse::<u8>().ok().filter(|bits| *bits <= most).ok_or_else(wrong)?,
    };
    Ok(format!("{address}/{bits}"))
}

/// When this is answered the key opens what it is for, and one that it replaces at once opens nothing.
async fn made(pepod: &Pepod, call: Call, key: NewKey, text: String, kind: &'static str) -> Result<Response, Problem> {
    let row = key.row().clone();
    pepod.store().write(Write::NewKey(Box::new(key))).await.map_err(|error| match error {
        store::Error::NameTaken(name) => {
            Problem::new(ErrorCode::Conflict, format!("another key is called `{name}`")).param_of("name")
        }
        store::Error::Stale => Problem::new(ErrorCode::Conflict, "the key was replaced or revoked already"),
        error => error.into(),
    })?;
    let event = Event::new(kind).app(row.app).actor(call.actor()).detail("key", row.id).detail("scopes", &row.scopes);
    pepod.store().record(event);
    settled(pepod).await;
    let place = HeaderValue::try_from(format!("/v1/keys/{}", row.id)).ok();
    let shown = Shown { key: text, about: shown(row) };
    let mut response = (StatusCode::CREATED, axum::Json(shown)).into_response();
    if let Some(place) = place {
        response.headers_mut().insert(header::LOCATION, place);
    }
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

async fn list(State(pepod): State<Pepod>, call: Call, Query(query): Query<ListKeys>) -> Result<Response, Problem> {
    let now = jiff::Timestamp::now();
    let keys = pepod.store().keys(call.app).await?;
    let items = keys.into_iter().filter(|key| query.all == Some(true) || key.is_valid(now)).map(shown).collect();
    Ok(axum::Json(Page::<Key> { items, next_cursor: None }).into_response())
}

async fn show(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    Ok(axum::Json(shown(find(&pepod, call, &which).await?)).into_response())
}

/// What an action's word is about, where no route says it closer.
fn subject(action: Action) -> Subject {
    match action {
        Action::SessionsRead
        | Action::SessionsWrite
        | Action::CommandsRead
        | Action::CommandsRun
        | Action::FilesRead
        | Action::FilesWrite => Subject::Session,
        Action::PortsConnect | Action::PortsPublish => Subject::Port,
        Action::WorkspacesRead | Action::WorkspacesWrite => Subject::Workspace,
        Action::ImagesRead | Action::ImagesWrite => Subject::Image,
        Action::KeysRead | Action::KeysWrite => Subject::Key,
        Action::TokensWrite => Subject::Session,
        Action::EventsRead
        | Action::AppsRead
        | Action::AppsWrite
        | Action::AuditRead
        | Action::UsageRead
        | Action::HostOperate
        | Action::EdgeSync
        | Action::Health => Subject::App,
    }
}

/// An action by its word, or by a route that asks for it.
fn asked(text: &str) -> Option<(Action, Subject)> {
    if let Some(row) = ROUTES.iter().find(|row| row.name == text) {
        return Some((row.action, row.subject));
    }
    Action::ALL.iter().find(|action| action.word() == text).map(|action| (*action, subject(*action)))
}

/// Whether the App has that. What another one has is as absent as what nobody has.
async fn there_is(pepod: &Pepod, call: Call, resource: Resource<'_>) -> Result<bool, Problem> {
    Ok(match resource {
        Resource::App => true,
        Resource::Session(which) | Resource::Port(which, _) => match pepod.sessions().find(call.app, which).await {
            Ok(_) => true,
            Err(crate::session::Error::NotFound { .. }) => false,
            Err(error) => return Err(error.into()),
        },
        Resource::Workspace(which) => match pepod.workspaces().find(call.app, which).await {
            Ok(_) => true,
            Err(crate::workspace::Error::NotFound(_)) => false,
            Err(error) => return Err(error.into()),
        },
        // Images are everybody's who may see them.
        Resource::Image(_) => true,
        Resource::Key(which) => find(pepod, call, which).await.is_ok(),
    })
}

async fn can(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<AskKey>,
) -> Result<Response, Problem> {
    let key = find(&pepod, call, &which).await?;
    let Some((action, subject)) = asked(&query.action) else {
        let words = Action::ALL.iter().filter(|action| action.is_tenants()).map(|action| action.word());
        let mut words: Vec<_> = words.collect();
        words.dedup();
        let message = format!("no action and no route is called so; there are {}", words.join(", "));
        return Err(Problem::invalid("action", message));
    };
    let resource = match (query.resource.as_deref(), subject) {
        (None, _) | (Some(""), _) => Resource::App,
        (Some(_), Subject::App) => return Err(Problem::invalid("resource", "this action is about the App as a whole")),
        (Some(which), Subject::Session) => Resource::Session(which),
        (Some(text), Subject::Port) => match text.split_once(':') {
            Some((session, port)) if port.parse::<u16>().is_ok() => Resource::Port(session, port),
            _ => return Err(Problem::invalid("resource", "a port is named SESSION:PORT")),
        },
        (Some(which), Subject::Workspace) => Resource::Workspace(which),
        (Some(which), Subject::Image) => Resource::Image(which),
        (Some(which), Subject::Key) => Resource::Key(which),
    };
    let app = pepod.apps().get(call.app);
    let decided = allow(Principal { scopes: &key.scopes, bound: None }, action, resource);
    let (allowed, because) = if key.revoked_at.is_some() {
        (false, "the key was revoked".into())
    } else if !key.is_valid(jiff::Timestamp::now()) {
        (false, "the key is over".into())
    } else {
        match decided {
            Err(denied) => (false, denied.to_string()),
            Ok(_) if !there_is(&pepod, call, resource).await? => (
                false,
                format!("the App{} has no such thing", app.map(|app| format!(" {}", app.name)).unwrap_or_default()),
            ),
            Ok(scope) => (true, format!("its scope {scope} covers {}", action.word())),
        }
    };
    let told = KeyCan { allowed, because, action: action.word().into(), key_id: key.id, sources: key.sources };
    Ok(axum::Json(told).into_response())
}

async fn rotate(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Json(body): Json<RotateKey>,
) -> Result<Response, Problem> {
    let old = find(&pepod, call, &which).await?;
    if !old.is_valid(jiff::Timestamp::now()) {
        return Err(Problem::new(ErrorCode::Conflict, format!("{} is not valid any more", old.id)));
    }
    may(call, &old.scopes).or_else(|refused| if call.key == Some(old.id) { Ok(()) } else { Err(refused) })?;
    let overlap = body.overlap_seconds.unwrap_or(OVERLAP);
    if overlap > LONGEST {
        return Err(Problem::invalid("overlap_seconds", format!("it is {overlap}; at most {LONGEST}")));
    }
    let until = later(overlap).unwrap_or_else(jiff::Timestamp::now);
    // The new one lives as long as the old one was to live.
    let life = |end: jiff::Timestamp| end.duration_since(old.created_at);
    let expires_at = old.expires_at.and_then(|end| jiff::Timestamp::now().checked_add(life(end)).ok());
    let spec = KeySpec {
        app: old.app,
        name: old.name,
        scopes: old.scopes,
        sources: old.sources,
        expires_at,
        created_by: call.actor(),
    };
    let (key, text) = generate(spec)?;
    made(&pepod, call, key.replacing(old.id, until), text, "key.rotated").await
}

/// When this is answered the key lets nobody in.
async fn revoke(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    let mut key = find(&pepod, call, &which).await?;
    if key.revoked_at.is_none() {
        pepod.store().write(Write::RevokeKey(key.id)).await?;
        let event = Event::new("key.revoked").app(key.app).actor(call.actor()).detail("key", key.id);
        pepod.store().record(event);
        key.revoked_at = Some(jiff::Timestamp::now());
        settled(&pepod).await;
    }
    Ok(axum::Json(shown(key)).into_response())
}

/// Returns when no edge judges by an older copy than what is in the store now: it said so, or is too late to let anybody in.
pub(super) async fn settled(pepod: &Pepod) {
    let generation = *pepod.store().edge().borrow();
    let mut has = pepod.edge_has().subscribe();
    // Nobody asked for so long: whatever copy there is, is too old. Else it will be, by the end of this wait.
    let Some(left) = has.borrow().asked.and_then(|asked| KNOWN_WITHIN.checked_sub(asked.elapsed())) else { return };
    let _ = tokio::time::timeout(left, has.wait_for(|has| has.generation >= generation)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_is_named_by_its_word_or_by_a_route() {
        assert_eq!(asked("commands:run"), Some((Action::CommandsRun, Subject::Session)));
        assert_eq!(asked("session_create"), Some((Action::SessionsWrite, Subject::App)));
        assert_eq!(asked("dial"), Some((Action::PortsConnect, Subject::Port)));
        assert_eq!(asked("host:operate"), Some((Action::HostOperate, Subject::App)));
        assert_eq!(asked("commands"), None);
    }

    #[test]
    fn ranges_have_one_form() {
        let read = |text| range("sources[3]", text).map_err(|problem| problem.0.param.unwrap_or_default());
        assert_eq!(read("192.0.2.0/24"), Ok("192.0.2.0/24".into()));
        assert_eq!(read("192.0.2.7"), Ok("192.0.2.7/32".into()));
        assert_eq!(read("2001:DB8:0::/32"), Ok("2001:db8::/32".into()));
        for text in ["", "x", "192.0.2.0/33", "192.0.2.0/-1", "192.0.2/24", "::/129", "192.0.2.0/", "1.2.3.4/1/1"] {
            assert_eq!(read(text), Err("sources[3]".into()), "{text}");
        }
    }
}
