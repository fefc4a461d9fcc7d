//! Routes of Apps, and what an App says of a new Session.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use pepo_api::query::{ApplyFile, ListApps, RemoveApp, ShowFile};
use pepo_api::{
    App, AppDefaults, AppId, AppLimits, AppSettings, AppliedFile, CreateApp, ErrorCode, Page, Reason, UpdateApp, route,
};
use pepo_sandbox::plan;

use super::once::{self, Asked};
use super::settings::{check_image, check_labels, check_name};
use super::{Call, Caller, Json, Problem, Query, Routes};
use crate::Pepod;
use crate::apps::{self, FILE_BYTES, Wanted};
use crate::session::state::Cause;
use crate::store::{self, AppRow};

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::app_create, create);
    routes.route(&route::app_list, list);
    routes.route(&route::app_show, show);
    routes.route(&route::app_update, update);
    routes.route(&route::app_remove, remove);
    routes.route(&route::app_file_show, file_show);
    routes.route(&route::app_file_apply, file_apply);
}

/// The App that a path names, where the caller may see it: an App's callers see their own.
fn find(pepod: &Pepod, call: Call, which: &str) -> Result<Arc<AppRow>, Problem> {
    let found = pepod.apps().find(which).filter(|app| match call.caller {
        Caller::Operator { .. } => true,
        Caller::App(own) => app.id == own,
        Caller::Edge => false,
    });
    found.ok_or_else(|| {
        let which: String = which.chars().take(80).flat_map(char::escape_debug).collect();
        Problem::new(ErrorCode::NotFound, format!("no App `{which}`"))
    })
}

async fn shown(pepod: &Pepod, app: &AppRow) -> Result<App, Problem> {
    Ok(App {
        id: app.id,
        name: app.name.clone(),
        settings: app.settings.clone(),
        version: app.version,
        created_at: app.created_at,
        used: pepod.store().app_use(app.id).await?,
    })
}

async fn create(State(pepod): State<Pepod>, call: Call, asked: Asked<CreateApp>) -> Result<Response, Problem> {
    let Asked { body, once } = asked;
    let CreateApp { name, labels, defaults, limits, quota, network, ingress } = body;
    let mut settings = AppSettings { labels, defaults, limits, quota, network, ingress };
    check_app_name(&name)?;
    check(&pepod, &mut settings)?;
    let find = |pepod: Pepod, id: AppId| async move {
        match pepod.apps().get(id) {
            Some(app) => made(&pepod, &app).await.map(Some),
            None => Ok(None),
        }
    };
    let make = move |pepod: Pepod, id| async move {
        let wanted = Wanted { name, settings, text: None };
        let app = pepod.apps().create(id, wanted, call.actor()).await.map_err(named)?;
        made(&pepod, &app).await
    };
    once::run(&pepod, call, &route::app_create, once, AppId::generate(), find, make).await
}

async fn made(pepod: &Pepod, app: &AppRow) -> Result<Response, Problem> {
    let mut response = (StatusCode::CREATED, axum::Json(shown(pepod, app).await?)).into_response();
    if let Ok(place) = HeaderValue::try_from(format!("/v1/apps/{}", app.id)) {
        response.headers_mut().insert(header::LOCATION, place);
    }
    Ok(response)
}

async fn list(State(pepod): State<Pepod>, call: Call, Query(query): Query<ListApps>) -> Result<Response, Problem> {
    let labels = query.label.iter().map(|label| label.split_once('=')).collect::<Option<Vec<_>>>();
    let labels = labels.ok_or_else(|| Problem::invalid("label", "a label filter is `key=value`"))?;
    let own = match call.caller {
        Caller::Operator { .. } => None,
        Caller::App(app) => Some(app),
        Caller::Edge => return Err(Problem::new(ErrorCode::Forbidden, "the edge has no App")),
    };
    let mut items = Vec::new();
    // Newest first, as all lists.
    for app in pepod.apps().all().iter().rev().filter(|app| own.is_none_or(|own| own == app.id)) {
        let has = |(key, value): &(&str, &str)| app.settings.labels.get(*key).is_some_and(|has| has == value);
        if labels.iter().all(has) {
            items.push(shown(&pepod, app).await?);
        }
    }
    Ok(axum::Json(Page { items, next_cursor: None }).into_response())
}

async fn show(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    let app = find(&pepod, call, &which)?;
    Ok(axum::Json(shown(&pepod, &app).await?).into_response())
}

async fn update(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Json(body): Json<UpdateApp>,
) -> Result<Response, Problem> {
    let app = find(&pepod, call, &which)?;
    let UpdateApp { name, labels, defaults, limits, quota, network, ingress } = body;
    let mut settings = AppSettings {
        labels: labels.unwrap_or_else(|| app.settings.labels.clone()),
        defaults: defaults.unwrap_or_else(|| app.settings.defaults.clone()),
        limits: limits.unwrap_or_else(|| app.settings.limits.clone()),
        quota: quota.unwrap_or_else(|| app.settings.quota.clone()),
        network: network.unwrap_or_else(|| app.settings.network.clone()),
        ingress: ingress.unwrap_or_else(|| app.settings.ingress.clone()),
    };
    if let Some(name) = &name {
        rename(&pepod, call, &app, name)?;
    }
    may(call, &app, &settings)?;
    check(&pepod, &mut settings)?;
    let wanted = Wanted { name: name.unwrap_or_else(|| app.name.clone()), settings, text: None };
    let ingress = app.settings.ingress != wanted.settings.ingress;
    let app = change(&pepod, call, &app, wanted).await?;
    if ingress {
        super::key::settled(&pepod).await;
    }
    Ok(axum::Json(shown(&pepod, &app).await?).into_response())
}

/// Makes an App into what is wanted. What it no longer allows its Sessions to reach is closed when this returns.
async fn change(pepod: &Pepod, call: Call, app: &AppRow, wanted: Wanted) -> Result<Arc<AppRow>, Problem> {
    let changed = pepod.apps().change(app, wanted, call.actor()).await.map_err(named)?;
    if changed.settings.network != app.settings.network {
        pepod.sessions().narrow(changed.id).await;
    }
    Ok(changed)
}

fn rename(pepod: &Pepod, call: Call, app: &AppRow, name: &str) -> Result<(), Problem> {
    if *name == app.name {
        return Ok(());
    }
    if !matches!(call.caller, Caller::Operator { .. }) {
        return Err(Problem::new(ErrorCode::Forbidden, "only the operator renames an App").param_of("name"));
    }
    if app.id == pepod.default_app() {
        return Err(Problem::new(ErrorCode::Conflict, "the App `default` keeps its name").param_of("name"));
    }
    check_app_name(name)
}

/// What an App's own administrator may not do.
fn may(call: Call, app: &AppRow, settings: &AppSettings) -> Result<(), Problem> {
    match call.caller {
        Caller::Operator { .. } => Ok(()),
        _ if settings.quota == app.settings.quota => Ok(()),
        _ => Err(Problem::new(ErrorCode::Forbidden, "only the operator changes the quota of an App").param_of("quota")),
    }
}

async fn remove(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<RemoveApp>,
) -> Result<Response, Problem> {
    let app = find(&pepod, call, &which)?;
    if app.id == pepod.default_app() {
        return Err(Problem::new(ErrorCode::Conflict, "the App `default` stays"));
    }
    let last = shown(&pepod, &app).await?;
    if query.force == Some(true) {
        let own = pepod.sessions().all().into_iter().filter(|session| session.app() == app.id);
        let ending = own.map(|session| async move { session.terminate(Cause::plain(Reason::Operator)).await });
        futures_util::future::join_all(ending).await;
    }
    pepod.apps().remove(&app, call.actor()).await.map_err(|error| match error {
        store::Error::InUse(live) => Problem::from(
            pepo_api::Error::new(ErrorCode::Conflict, format!("{live} Sessions of the App `{}` live", app.name))
                .hint("end them first, or say `force` to end them with it"),
        ),
        store::Error::HasWorkspaces(number) => Problem::from(
            pepo_api::Error::new(ErrorCode::Conflict, format!("the App `{}` has {number} Workspaces", app.name))
                .hint("remove them first: `pepo workspace ls`, `pepo workspace rm`"),
        ),
        error => error.into(),
    })?;
    super::key::settled(&pepod).await;
    Ok(axum::Json(last).into_response())
}

async fn file_show(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<ShowFile>,
) -> Result<Response, Problem> {
    let app = find(&pepod, call, &which)?;
    let version = query.version.unwrap_or(app.version);
    let text = pepod.store().app_file(app.id, version).await?.ok_or_else(|| {
        let message = format!("the App `{}` has no version {version}; {} is in force", app.name, app.version);
        Problem::new(ErrorCode::NotFound, message).param_of("version")
    })?;
    let kind = [(header::CONTENT_TYPE, HeaderValue::from_static("application/toml"))];
    let mut response = (kind, Body::from(text)).into_response();
    response.headers_mut().insert("pepo-version", HeaderValue::from(version));
    Ok(response)
}

async fn file_apply(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<ApplyFile>,
    request: Request,
) -> Result<Response, Problem> {
    let app = find(&pepod, call, &which)?;
    let body = Limited::new(request.into_body(), FILE_BYTES)
        .collect()
        .await
        .map_err(|_| Problem::new(ErrorCode::PayloadTooLarge, format!("an App file has at most {FILE_BYTES} bytes")))?;
    let text = String::from_utf8(body.to_bytes().into())
        .map_err(|_| Problem::new(ErrorCode::BadRequest, "the App file is not UTF-8"))?;
    let mut settings = apps::parse(&text).map_err(|error| match error.setting.as_str() {
        "" => Problem::new(ErrorCode::Invalid, error.message),
        setting => Problem::invalid(setting.to_owned(), error.message),
    })?;
    if query.if_version.is_some_and(|version| version != app.version) {
        let message = format!("version {} is in force", app.version);
        return Err(Problem::new(ErrorCode::Conflict, message).param_of("if_version"));
    }
    may(call, &app, &settings)?;
    check(&pepod, &mut settings)?;
    let changes = apps::changes(&app.settings, &settings);
    let same = changes.is_empty() && pepod.store().app_file(app.id, app.version).await?.as_deref() == Some(&text);
    if query.dry_run == Some(true) || same {
        return Ok(axum::Json(AppliedFile { version: app.version, changes, applied: false }).into_response());
    }
    let wanted = Wanted { name: app.name.clone(), settings, text: Some(text) };
    let app = change(&pepod, call, &app, wanted).await?;
    Ok(axum::Json(AppliedFile { version: app.version, changes, applied: true }).into_response())
}

fn named(error: store::Error) -> Problem {
    match error {
        store::Error::NameTaken(name) => {
            Problem::new(ErrorCode::Conflict, format!("another App is called `{name}`")).param_of("name")
        }
        error => error.into(),
    }
}

fn check_app_name(name: &str) -> Result<(), Problem> {
    check_name(name)?;
    match name.starts_with("app_") {
        false => Ok(()),
        true => Err(Problem::invalid("name", "a name does not look like an id")),
    }
}

/// Refuses what cannot be, and puts ranges into their one form.
fn check(pepod: &Pepod, settings: &mut AppSettings) -> Result<(), Problem> {
    if let Some(network) = &settings.network {
        crate::network::policy(pepod.sessions().reach().network(), network)?;
    }
    check_numbers(settings)
}

fn check_numbers(settings: &mut AppSettings) -> Result<(), Problem> {
    let AppSettings { labels, defaults, limits, quota, ingress, network: _ } = settings;
    ingress.sources = super::key::ranges("ingress.sources", &ingress.sources)?;
    let (defaults, limits): (&AppDefaults, &AppLimits) = (defaults, limits);
    if quota.requests_per_second == Some(0) {
        return Err(Problem::invalid("quota.requests_per_second", "it is 0; at least 1, or not set"));
    }
    check_labels(labels)?;
    let AppDefaults { image, cpus, memory_mib, disk_mib, keep_alive_seconds, expires_seconds } = defaults;
    check_image("defaults.image", image.as_deref())?;
    let AppLimits { cpus: most_cpus, memory_mib: most_memory, disk_mib: most_disk, keep_alive_seconds: most_keep } =
        limits;
    for (name, value, most, range) in [
        ("cpus", cpus, most_cpus, &plan::CPUS),
        ("memory_mib", memory_mib, most_memory, &plan::MEMORY_MIB),
        ("disk_mib", disk_mib, most_disk, &plan::DISK_MIB),
    ] {
        for (group, value) in [("defaults", value), ("limits", most)] {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                let message = format!("it is {value}; it must be from {} to {}", range.start(), range.end());
                return Err(Problem::invalid(format!("{group}.{name}"), message));
            }
        }
        if let (Some(value), Some(most)) = (value, most)
            && value > most
        {
            let message = format!("the default is {value}, over the limit of {most}");
            return Err(Problem::invalid(format!("defaults.{name}"), message));
        }
    }
    for (name, value) in [
        ("defaults.keep_alive_seconds", keep_alive_seconds),
        ("limits.keep_alive_seconds", most_keep),
        ("defaults.expires_seconds", expires_seconds),
    ] {
        const TEN_YEARS: u64 = 10 * 365 * 86_400;
        if let Some(value) = value.filter(|value| *value > TEN_YEARS) {
            return Err(Problem::invalid(name, format!("it is {value}; at most {TEN_YEARS}")));
        }
    }
    if let (Some(value), Some(most)) = (keep_alive_seconds, most_keep)
        && value > most
    {
        let message = format!("the default is {value}, over the limit of {most}");
        return Err(Problem::invalid("defaults.keep_alive_seconds", message));
    }
    Ok(())
}

/// What one Session gets: what it asked for within the App's limit, else the App's default, else the daemon's own, which
/// the limit cuts.
pub(super) fn within<T: Copy + Ord + std::fmt::Display>(
    param: &str,
    asked: Option<T>,
    default: Option<T>,
    own: T,
    limit: Option<T>,
) -> Result<T, Problem> {
    match (asked.or(default), limit) {
        (Some(value), Some(limit)) if value > limit => {
            Err(Problem::invalid(param, format!("{param} is {value}; the App allows at most {limit}")))
        }
        (Some(value), _) => Ok(value),
        (None, Some(limit)) => Ok(own.min(limit)),
        (None, None) => Ok(own),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_apps_word_stands_between_the_callers_and_the_daemons() {
        let get = |asked, default, limit| within("cpus", asked, default, 2u32, limit).map_err(|problem| problem.0);
        assert_eq!(get(None, None, None), Ok(2));
        assert_eq!(get(None, None, Some(1)), Ok(1), "the daemon's own default is cut");
        assert_eq!(get(None, Some(3), Some(4)), Ok(3));
        assert_eq!(get(Some(4), Some(3), Some(4)), Ok(4));
        let refused = get(Some(5), None, Some(4)).expect_err("over");
        assert_eq!(refused.param.as_deref(), Some("cpus"));
        assert_eq!(refused.message, "cpus is 5; the App allows at most 4");
    }

    #[test]
    fn settings_that_cannot_be_are_named() {
        let refused = |change: fn(&mut AppSettings)| {
            let mut settings = AppSettings::default();
            change(&mut settings);
            check_numbers(&mut settings).map_err(|problem| problem.0.param.unwrap_or_default()).expect_err("refused")
        };
        assert_eq!(refused(|s| s.defaults.cpus = Some(0)), "defaults.cpus");
        assert_eq!(refused(|s| s.limits.memory_mib = Some(1)), "limits.memory_mib");
        assert_eq!(refused(|s| (s.defaults.cpus, s.limits.cpus) = (Some(3), Some(2))), "defaults.cpus");
        assert_eq!(refused(|s| s.defaults.image = Some(String::new())), "defaults.image");
        assert_eq!(refused(|s| s.defaults.keep_alive_seconds = Some(u64::MAX)), "defaults.keep_alive_seconds");
        assert_eq!(refused(|s| s.ingress.sources = vec!["10.0.0.0/8".into(), "x".into()]), "ingress.sources[1]");
        assert_eq!(refused(|s| s.quota.requests_per_second = Some(0)), "quota.requests_per_second");
        let mut ours = AppSettings::default();
        ours.ingress.sources = vec!["10.0.0.1".into()];
        assert!(check_numbers(&mut ours).is_ok());
        assert_eq!(ours.ingress.sources, ["10.0.0.1/32"]);
    }
}
