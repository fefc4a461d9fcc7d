//! Routes of Workspaces.

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use pepo_api::query::{AtPath, ListWorkspaces, RemoveWorkspace, UnderPath, WriteFile};
use pepo_api::{
    CreateWorkspace, ErrorCode, MakeFile, Page, Reason, RemovedWorkspace, RenameFile, SessionId, UpdateWorkspace,
    Workspace, WorkspaceId, WorkspaceUsage, route,
};
use pepo_sandbox::jail::Access;
use pepo_sandbox::share::Archive;

use super::files::{self, Lent};
use super::once::{self, Asked};
use super::settings::{check_labels, check_name};
use super::{Call, Json, Problem, Query, Routes};
use crate::Pepod;
use crate::session::state::Cause;
use crate::store::WorkspaceRow;
use crate::workspace::{Error, NewWorkspace};

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::workspace_create, create);
    routes.route(&route::workspace_list, list);
    routes.route(&route::workspace_show, show);
    routes.route(&route::workspace_update, update);
    routes.route(&route::workspace_remove, remove);
    routes.route(&route::workspace_file_read, file_read);
    routes.route(&route::workspace_file_write, file_write);
    routes.route(&route::workspace_file_remove, file_remove);
    routes.route(&route::workspace_file_stat, file_stat);
    routes.route(&route::workspace_file_list, file_list);
    routes.route(&route::workspace_file_make, file_make);
    routes.route(&route::workspace_file_rename, file_rename);
    routes.route(&route::workspace_tar_read, tar_read);
    routes.route(&route::workspace_tar_write, tar_write);
    routes.route(&route::workspace_export, export);
    routes.route(&route::workspace_import, import);
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let text = pepo_sandbox::chain(&error);
        match error {
            Error::NotFound(_) => Problem::new(ErrorCode::NotFound, text),
            Error::Invalid { param, message } => Problem::invalid(param, message),
            Error::NameTaken(_) => Problem::from(pepo_api::Error::new(ErrorCode::Conflict, text).param("name")),
            Error::Busy(_) => Problem::new(ErrorCode::Conflict, text),
            Error::Full(_) => Problem::from(
                pepo_api::Error::new(ErrorCode::NoCapacity, text)
                    .hint("remove a Workspace (`pepo workspace ls`, `pepo workspace rm`) or raise `workspace.budget`"),
            ),
            // Quotas and refusals of the store read the same whatever they are about.
            Error::Store(error) if error.is_an_answer() => crate::session::Error::from(error).into(),
            Error::Store(error @ crate::store::Error::Closed) => crate::session::Error::from(error).into(),
            Error::Host(error @ pepo_sandbox::host::Error::Lost) => crate::session::Error::Host(error).into(),
            Error::Store(_) | Error::Host(_) | Error::NotRestored(_) => {
                tracing::error!(error = text, "a request about a Workspace failed by a fault of ours");
                Problem::new(ErrorCode::Internal, text)
            }
        }
    }
}

/// A name that is not an id.
fn named(name: &str) -> Result<(), Problem> {
    check_name(name)?;
    if name.starts_with(WorkspaceId::PREFIX) {
        return Err(Problem::invalid("name", "a name does not look like an id"));
    }
    Ok(())
}

async fn create(
    State(pepod): State<Pepod>,
    call: Call,
    Asked { body, once }: Asked<CreateWorkspace>,
) -> Result<Response, Problem> {
    let CreateWorkspace { name, size_mib, max_files, single_writer, directory, labels } = body;
    if let Some(name) = &name {
        named(name)?;
    }
    check_labels(&labels)?;
    let id = WorkspaceId::generate();
    let new =
        NewWorkspace { id, app: call.app, name, size_mib, max_files, single_writer, directory, labels, own: None };
    let find = move |pepod: Pepod, id: WorkspaceId| async move {
        match pepod.workspaces().find(call.app, &id.to_string()).await {
            Ok(row) => Ok(Some(made(&pepod, row))),
            Err(Error::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    };
    let make = move |pepod: Pepod, id| async move {
        let row = pepod.workspaces().create(NewWorkspace { id, ..new }).await?;
        Ok(made(&pepod, row))
    };
    once::run(&pepod, call, &route::workspace_create, once, id, find, make).await
}

fn made(pepod: &Pepod, row: WorkspaceRow) -> Response {
    let place = HeaderValue::try_from(format!("/v1/workspaces/{}", row.id)).ok();
    let mut response = (StatusCode::CREATED, axum::Json(shown(pepod, row, None))).into_response();
    if let Some(place) = place {
        response.headers_mut().insert(header::LOCATION, place);
    }
    response
}

/// Sessions that have not ended and use it.
fn users(pepod: &Pepod, id: WorkspaceId) -> Vec<SessionId> {
    let all = pepod.sessions().all();
    let uses =
        |session: &crate::session::Session| session.now().spec.workspace.as_ref().is_some_and(|used| used.id == id);
    let mut users: Vec<SessionId> = all.iter().filter(|session| uses(session)).map(|session| session.id()).collect();
    users.sort_unstable();
    users
}

fn shown(pepod: &Pepod, row: WorkspaceRow, usage: Option<WorkspaceUsage>) -> Workspace {
    Workspace {
        sessions: users(pepod, row.id),
        id: row.id,
        app_id: row.app,
        name: row.name,
        size_mib: row.size_mib,
        max_files: row.max_files,
        capped: row.directory.is_none(),
        single_writer: row.single_writer,
        directory: row.directory,
        session_id: row.session,
        labels: row.labels,
        created_at: row.created_at,
        usage,
    }
}

async fn list(
    State(pepod): State<Pepod>,
    call: Call,
    Query(query): Query<ListWorkspaces>,
) -> Result<Response, Problem> {
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
    let (mut items, mut more) = (Vec::new(), true);
    while items.len() < limit && more {
        let rows = pepod.store().workspaces(call.app, before, limit + 1).await.map_err(Error::from)?;
        more = rows.len() > limit;
        for row in rows.into_iter().take(limit) {
            before = Some(row.id);
            if labels.iter().all(|(key, value)| row.labels.get(*key).is_some_and(|has| has == value)) {
                items.push(shown(&pepod, row, None));
                if items.len() == limit {
                    // The rest of these rows belongs to the next page.
                    more = true;
                    break;
                }
            }
        }
    }
    let next_cursor = before.filter(|_| more).map(|id: WorkspaceId| id.to_string());
    Ok(axum::Json(Page { items, next_cursor }).into_response())
}

async fn show(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    let row = pepod.workspaces().find(call.app, &which).await?;
    let used = pepod.workspaces().usage(&row).await?;
    let usage = WorkspaceUsage {
        bytes: used.bytes,
        bytes_used: used.bytes_used,
        files: used.files,
        files_used: used.files_used,
        host_bytes: used.allocated,
    };
    Ok(axum::Json(shown(&pepod, row, Some(usage))).into_response())
}

async fn update(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Json(body): Json<UpdateWorkspace>,
) -> Result<Response, Problem> {
    let UpdateWorkspace { name, size_mib, labels } = body;
    if let Some(name) = &name {
        named(name)?;
    }
    if let Some(labels) = &labels {
        check_labels(labels)?;
    }
    let row = pepod.workspaces().find(call.app, &which).await?;
    let row = pepod.workspaces().update(row, name, size_mib, labels).await?;
    Ok(axum::Json(shown(&pepod, row, None)).into_response())
}

async fn remove(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<RemoveWorkspace>,
) -> Result<Response, Problem> {
    let row = pepod.workspaces().find(call.app, &which).await?;
    let users = users(&pepod, row.id);
    if !users.is_empty() && query.force != Some(true) {
        let some: Vec<String> = users.iter().take(5).map(ToString::to_string).collect();
        let rest = if users.len() > some.len() { ", …" } else { "" };
        return Err(Problem::from(
            pepo_api::Error::new(
                ErrorCode::Conflict,
                format!("{} is used by {} Session(s): {}{rest}", row.id, users.len(), some.join(", ")),
            )
            .hint("end them first, or remove it by force, which ends them"),
        ));
    }
    // Goes on if the caller leaves: it was asked for.
    let removing = tokio::spawn(async move {
        let ending = users.iter().filter_map(|id| pepod.sessions().by_id(*id)).map(|session| async move {
            session.terminate(Cause::told(Reason::Operator, "its Workspace was removed")).await;
        });
        futures_util::future::join_all(ending).await;
        let freed_bytes = match pepod.workspaces().remove(row.id).await {
            Ok(freed) => freed,
            // It was a Session's own and went with it.
            Err(_) if pepod.workspaces().find(row.app, &row.id.to_string()).await.is_err() => 0,
            Err(error) => return Err(error),
        };
        Ok(RemovedWorkspace { id: row.id, freed_bytes, ended_sessions: users })
    });
    let removed =
        removing.await.map_err(|_| Problem::new(ErrorCode::Internal, "the removal broke off; see the log"))?;
    Ok(axum::Json(removed?).into_response())
}

/// The Workspace's files, for one request that reads or writes.
async fn visit(pepod: &Pepod, call: Call, which: &str, access: Access, archive: Archive) -> Result<Lent, Problem> {
    let row = pepod.workspaces().find(call.app, which).await?;
    Ok(Lent::workspace(pepod.workspaces().visit(&row, access, archive).await?))
}

async fn reading(pepod: &Pepod, call: Call, which: &str) -> Result<Lent, Problem> {
    visit(pepod, call, which, Access::ReadOnly, Archive::Plain).await
}

async fn writing(pepod: &Pepod, call: Call, which: &str) -> Result<Lent, Problem> {
    visit(pepod, call, which, Access::Writable, Archive::Plain).await
}

/// All of a Workspace.
fn top() -> AtPath {
    AtPath { path: "/".to_owned(), user: None }
}

/// Files that no guest serves have no user to act as: what is made belongs to the guest's usual one.
fn nobody(user: Option<&String>) -> Result<(), Problem> {
    match user {
        Some(_) => Err(Problem::invalid("user", "a Workspace without a Session knows no users")),
        None => Ok(()),
    }
}

async fn file_read(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    headers: HeaderMap,
    Query(at): Query<AtPath>,
) -> Result<Response, Problem> {
    nobody(at.user.as_ref())?;
    files::read_from(reading(&pepod, call, &which), headers, at).await
}

async fn file_write(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<WriteFile>,
    request: Request,
) -> Result<Response, Problem> {
    nobody(query.user.as_ref())?;
    files::write_to(writing(&pepod, call, &which), query, request).await
}

async fn file_remove(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<UnderPath>,
) -> Result<Response, Problem> {
    nobody(query.user.as_ref())?;
    files::remove_from(writing(&pepod, call, &which), query).await
}

async fn file_stat(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(at): Query<AtPath>,
) -> Result<Response, Problem> {
    nobody(at.user.as_ref())?;
    files::stat_of(reading(&pepod, call, &which), at).await
}

async fn file_list(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(at): Query<AtPath>,
) -> Result<Response, Problem> {
    nobody(at.user.as_ref())?;
    files::list_of(reading(&pepod, call, &which), at).await
}

async fn file_make(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Json(body): Json<MakeFile>,
) -> Result<Response, Problem> {
    nobody(body.user.as_ref())?;
    files::make_in(writing(&pepod, call, &which), body).await
}

async fn file_rename(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Json(body): Json<RenameFile>,
) -> Result<Response, Problem> {
    nobody(body.user.as_ref())?;
    files::rename_in(writing(&pepod, call, &which), body).await
}

async fn tar_read(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(at): Query<AtPath>,
) -> Result<Response, Problem> {
    nobody(at.user.as_ref())?;
    files::tar_of(reading(&pepod, call, &which), at, "application/x-tar").await
}

async fn tar_write(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(at): Query<AtPath>,
    request: Request,
) -> Result<Response, Problem> {
    nobody(at.user.as_ref())?;
    files::tar_into(writing(&pepod, call, &which), at, request).await
}

async fn export(State(pepod): State<Pepod>, call: Call, Path(which): Path<String>) -> Result<Response, Problem> {
    let whole = visit(&pepod, call, &which, Access::ReadOnly, Archive::Whole);
    files::tar_of(whole, top(), "application/zstd").await
}

async fn import(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    request: Request,
) -> Result<Response, Problem> {
    let whole = visit(&pepod, call, &which, Access::Writable, Archive::Whole);
    files::tar_into(whole, top(), request).await
}
