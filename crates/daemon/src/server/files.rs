//! Routes of files and trees. Bytes pass through with backpressure and are never gathered.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use pepo_api::query::{AtPath, UnderPath, WriteFile};
use pepo_api::{ErrorCode, FileChange, FileChangeKind, FileEntry, FileKind, FileList, MakeFile, RenameFile, route};
use pepo_sandbox::guest::{self, Download, Guest, Upload};
use pepo_sandbox::proto;

use super::session::with_activation;
use super::{Call, Json, Problem, Query, Routes, events};
use crate::Pepod;
use crate::session::{Serving, Session, Ticket};
use crate::workspace::Visit;

/// Entries in one listing.
const MOST_ENTRIES: usize = 50_000;

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::file_read, read);
    routes.route(&route::file_write, write);
    routes.route(&route::file_remove, remove);
    routes.route(&route::file_stat, stat);
    routes.route(&route::file_list, list);
    routes.route(&route::file_watch, watch);
    routes.route(&route::file_make, make);
    routes.route(&route::file_rename, rename);
    routes.route(&route::tar_read, tar_read);
    routes.route(&route::tar_write, tar_write);
}

/// Files for one request, by whoever has them.
pub(super) struct Lent {
    guest: Guest,
    lender: Lender,
}

enum Lender {
    /// A Session's guest; the Session is asked when the guest goes away in the middle. While the ticket is held it is used.
    Session { session: Session, activation: u64, _ticket: Option<Ticket> },
    /// A Workspace without a guest.
    Workspace { _visit: Visit },
}

pub(super) async fn lend(pepod: &Pepod, call: Call, which: &str) -> Result<Lent, Problem> {
    let session = pepod.sessions().find(call.app, which).await?.live()?;
    let Serving { guest, activation, ticket } = session.serving(call.activation, pepod.start_within()).await?;
    Ok(Lent { guest, lender: Lender::Session { session, activation, _ticket: ticket } })
}

impl Lent {
    /// A Workspace's, without a guest.
    pub(super) fn workspace(visit: Visit) -> Self {
        Lent { guest: visit.guest().clone(), lender: Lender::Workspace { _visit: visit } }
    }

    /// Who serves.
    pub(super) fn guest(&self) -> &Guest {
        &self.guest
    }

    /// The Session, where it is one's.
    pub(super) fn session(&self) -> Option<&Session> {
        match &self.lender {
            Lender::Session { session, .. } => Some(session),
            Lender::Workspace { .. } => None,
        }
    }

    /// What an error is to the caller: a stream that broke because the Sandbox ended says so.
    pub(super) async fn told<T>(&self, result: Result<T, guest::Error>) -> Result<T, Problem> {
        match (result, &self.lender) {
            (Ok(done), _) => Ok(done),
            (
                Err(error @ (guest::Error::Lost(_) | guest::Error::Unreachable(_))),
                Lender::Session { session, activation, .. },
            ) => match session.sandbox_end(*activation, Duration::from_secs(2)).await {
                Some(ended) => Err(crate::session::Error::SandboxEnded(ended).into()),
                None => Err(error.into()),
            },
            (Err(error), _) => Err(error.into()),
        }
    }

    /// The answer, with what is told beside it.
    pub(super) fn with(&self, answer: impl IntoResponse) -> Response {
        match &self.lender {
            Lender::Session { activation, .. } => with_activation(*activation, answer),
            Lender::Workspace { .. } => answer.into_response(),
        }
    }
}

/// Whose files they are, found out when the request was looked at and not before: a Session may have to start for it.
pub(super) trait Lending: Future<Output = Result<Lent, Problem>> + Send {}

impl<F: Future<Output = Result<Lent, Problem>> + Send> Lending for F {}

fn check_path(param: &str, path: &str) -> Result<(), Problem> {
    if path.is_empty() || path.len() > 4096 || path.contains('\0') {
        return Err(Problem::invalid(param, "a path has 1 to 4096 bytes and no NUL"));
    }
    Ok(())
}

fn mode(text: Option<&str>) -> Result<Option<u32>, Problem> {
    let Some(text) = text else { return Ok(None) };
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 && text.len() <= 5 => Ok(Some(mode)),
        _ => Err(Problem::invalid("mode", "a mode is octal text, as 0644")),
    }
}

/// First and last byte of a `Range` of one part, where the whole has `total` bytes. `None`: not a range of ours, so the
/// whole is sent.
pub(super) fn range(text: &str, total: u64) -> Result<Option<(u64, u64)>, Problem> {
    let Some((first, last)) = text.strip_prefix("bytes=").and_then(|parts| parts.split_once('-')) else {
        return Ok(None);
    };
    let outside = || {
        let message = format!("the range lies outside of the {total} bytes there are");
        Problem::new(ErrorCode::RangeNotSatisfiable, message)
    };
    let (first, last) = match (first.trim(), last.trim()) {
        ("", last) => {
            let Ok(count) = last.parse::<u64>() else { return Ok(None) };
            if count == 0 {
                return Err(outside());
            }
            (total.saturating_sub(count), total.checked_sub(1).ok_or_else(outside)?)
        }
        (first, last) => {
            let Ok(first) = first.parse::<u64>() else { return Ok(None) };
            let last = match last {
                "" => u64::MAX,
                last => match last.parse::<u64>() {
                    Ok(last) => last,
                    Err(_) => return Ok(None),
                },
            };
            if last < first {
                return Ok(None);
            }
            (first, last.min(total.checked_sub(1).ok_or_else(outside)?))
        }
    };
    if first >= total { Err(outside()) } else { Ok(Some((first, last))) }
}

/// Changes with every write that changes size or time.
fn etag(stat: &proto::FileStat) -> String {
    format!("\"{:x}-{:x}\"", stat.size, stat.modified_unix_ns)
}

async fn read(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    headers: HeaderMap,
    Query(at): Query<AtPath>,
) -> Result<Response, Problem> {
    read_from(lend(&pepod, call, &which), headers, at).await
}

pub(super) async fn read_from(lend: impl Lending, headers: HeaderMap, at: AtPath) -> Result<Response, Problem> {
    check_path("path", &at.path)?;
    let lent = lend.await?;
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let whole = |offset, length| proto::Read { path: at.path.clone(), offset, length, user: at.user.clone() };
    let asked = text(header::RANGE);
    // A range depends on the size, so that is looked at first, and only then.
    let range = match &asked {
        None => None,
        Some(asked) => {
            let (stat, look) = lent.told(lent.guest.read(whole(0, Some(0))).await).await?;
            drop(look);
            match text(header::IF_RANGE) {
                Some(tag) if tag != etag(&stat) => None,
                _ => range(asked, stat.size)?,
            }
        }
    };
    let (offset, length) = range.map_or((0, None), |(first, last)| (first, Some(last - first + 1)));
    let (stat, download) = lent.told(lent.guest.read(whole(offset, length)).await).await?;
    let tag = etag(&stat);
    let mut answer = if text(header::IF_NONE_MATCH).is_some_and(|known| known == tag || known == "*") {
        lent.with(StatusCode::NOT_MODIFIED)
    } else {
        // Files like those of /proc say 0 and have bytes all the same.
        let promised = match (range, stat.size) {
            (Some((first, last)), _) => Some(last - first + 1),
            (None, 0) => None,
            (None, size) => Some(size),
        };
        let headers = [
            (header::CONTENT_TYPE, "application/octet-stream"),
            (header::ACCEPT_RANGES, "bytes"),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        ];
        let mut response = lent.with(headers);
        *response.body_mut() = Body::from_stream(limited(download, promised, lent));
        if let Some(promised) = promised {
            response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(promised));
        }
        if let Some((first, last)) = range {
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            if let Ok(value) = HeaderValue::try_from(format!("bytes {first}-{last}/{}", stat.size)) {
                response.headers_mut().insert(header::CONTENT_RANGE, value);
            }
        }
        response
    };
    for (name, value) in [("etag", tag), ("pepo-file-mode", format!("{:04o}", stat.mode))] {
        if let Ok(value) = HeaderValue::try_from(value) {
            answer.headers_mut().insert(name, value);
        }
    }
    Ok(answer)
}

/// A download that keeps what was promised: no byte more, and a break instead of fewer.
fn limited(
    download: Download,
    promised: Option<u64>,
    lent: Lent,
) -> impl futures_util::Stream<Item = Result<Bytes, guest::Error>> + Send {
    // Whose it is is held until the last byte has passed.
    let state = (download, promised, lent);
    futures_util::stream::try_unfold(state, |(mut download, left, lent)| async move {
        if left == Some(0) {
            return Ok(None);
        }
        match download.next().await {
            Some(Ok(mut bytes)) => {
                let left = left.map(|left| {
                    bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                    left - bytes.len() as u64
                });
                Ok(Some((bytes, (download, left, lent))))
            }
            Some(Err(error)) => Err(error),
            None if left.is_none() => Ok(None),
            // The file became shorter while it was read.
            None => Err(guest::Error::Lost(None)),
        }
    })
}

async fn write(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<WriteFile>,
    request: Request,
) -> Result<Response, Problem> {
    write_to(lend(&pepod, call, &which), query, request).await
}

pub(super) async fn write_to(lend: impl Lending, query: WriteFile, request: Request) -> Result<Response, Problem> {
    check_path("path", &query.path)?;
    let write = proto::Write {
        path: query.path,
        mode: mode(query.mode.as_deref())?,
        parents: query.parents.unwrap_or(true),
        user: query.user,
    };
    let lent = lend.await?;
    let upload = lent.told(lent.guest.write(write).await).await?;
    pour(&lent, request.into_body(), upload).await?;
    Ok(lent.with(StatusCode::NO_CONTENT))
}

/// A request's body into the guest. A body that breaks off cancels: half a file never appears.
async fn pour(lent: &Lent, body: Body, mut upload: Upload) -> Result<(), Problem> {
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|_| Problem::new(ErrorCode::BadRequest, "the body broke off"))?;
        lent.told(upload.send(piece).await).await?;
    }
    lent.told(upload.finish().await).await
}

async fn remove(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<UnderPath>,
) -> Result<Response, Problem> {
    remove_from(lend(&pepod, call, &which), query).await
}

pub(super) async fn remove_from(lend: impl Lending, query: UnderPath) -> Result<Response, Problem> {
    check_path("path", &query.path)?;
    let lent = lend.await?;
    let remove = proto::Remove { path: query.path, recursive: query.recursive.unwrap_or(false), user: query.user };
    lent.told(lent.guest.remove(remove).await).await?;
    Ok(lent.with(StatusCode::NO_CONTENT))
}

async fn stat(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(at): Query<AtPath>,
) -> Result<Response, Problem> {
    stat_of(lend(&pepod, call, &which), at).await
}

pub(super) async fn stat_of(lend: impl Lending, at: AtPath) -> Result<Response, Problem> {
    check_path("path", &at.path)?;
    let lent = lend.await?;
    let stat = lent.told(lent.guest.stat(proto::Stat { path: at.path, user: at.user }).await).await?;
    Ok(lent.with(axum::Json(entry(stat))))
}

async fn list(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(at): Query<AtPath>,
) -> Result<Response, Problem> {
    list_of(lend(&pepod, call, &which), at).await
}

pub(super) async fn list_of(lend: impl Lending, at: AtPath) -> Result<Response, Problem> {
    check_path("path", &at.path)?;
    let lent = lend.await?;
    let asked = proto::List { path: at.path, user: at.user };
    let listing = lent.told(lent.guest.list(asked, MOST_ENTRIES).await).await?;
    if listing.more {
        let message = format!("the directory has more than {MOST_ENTRIES} entries");
        return Err(Problem::from(
            pepo_api::Error::new(ErrorCode::Invalid, message)
                .param("path")
                .hint("use the tar route, or `find` in a command"),
        ));
    }
    let mut entries: Vec<_> = listing.entries.into_iter().map(entry).collect();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(lent.with(axum::Json(FileList { entries })))
}

/// An entry as the API shows it. The guest chose the name; JSON carries any text.
fn entry(stat: proto::FileStat) -> FileEntry {
    let name_base64 = std::str::from_utf8(&stat.name).is_err().then(|| STANDARD.encode(&stat.name));
    FileEntry {
        name: String::from_utf8_lossy(&stat.name).into_owned(),
        name_base64,
        kind: match stat.kind {
            proto::EntryKind::File => FileKind::File,
            proto::EntryKind::Directory => FileKind::Directory,
            proto::EntryKind::Symlink => FileKind::Symlink,
            proto::EntryKind::Other => FileKind::Other,
        },
        size_bytes: stat.size,
        mode: format!("{:04o}", stat.mode),
        uid: stat.uid,
        gid: stat.gid,
        modified_at: jiff::Timestamp::from_nanosecond(i128::from(stat.modified_unix_ns))
            .unwrap_or(jiff::Timestamp::UNIX_EPOCH),
        target: stat.target.map(|target| String::from_utf8_lossy(&target).into_owned()),
    }
}

async fn watch(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(query): Query<UnderPath>,
) -> Result<Response, Problem> {
    check_path("path", &query.path)?;
    let lent = lend(&pepod, call, &which).await?;
    let asked = proto::Watch { path: query.path, recursive: query.recursive.unwrap_or(false), user: query.user };
    let watching = lent.told(lent.guest.watch(asked).await).await?;
    let answer = lent.with(());
    // The first line tells that the watch stands: changes from here on are seen.
    let state = (watching, lent, true);
    let changes = futures_util::stream::unfold(state, |(mut watching, lent, first)| async move {
        if first {
            return Some((Ok(Bytes::from_static(b": watching\n\n")), (watching, lent, false)));
        }
        let bytes = match tokio::time::timeout(events::COMMENT_EVERY, watching.next()).await {
            Err(_) => Bytes::from_static(b":\n\n"),
            Ok(Some(Ok(change))) => {
                let kind = match change.kind {
                    proto::WatchKind::Created => FileChangeKind::Created,
                    proto::WatchKind::Modified => FileChangeKind::Modified,
                    proto::WatchKind::Attributes => FileChangeKind::Attributes,
                    proto::WatchKind::Removed => FileChangeKind::Removed,
                    proto::WatchKind::Overflow => FileChangeKind::Overflow,
                };
                let path = String::from_utf8_lossy(&change.path).into_owned();
                events::event("change", None, &FileChange { kind, path })
            }
            Ok(Some(Err(_)) | None) => return None,
        };
        Some((Ok(bytes), (watching, lent, false)))
    });
    let mut response = events::sse(changes).into_response();
    response.headers_mut().extend(answer.into_parts().0.headers);
    Ok(response)
}

async fn make(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Json(body): Json<MakeFile>,
) -> Result<Response, Problem> {
    make_in(lend(&pepod, call, &which), body).await
}

pub(super) async fn make_in(lend: impl Lending, body: MakeFile) -> Result<Response, Problem> {
    check_path("path", &body.path)?;
    let kind = match (body.kind, body.target) {
        (FileKind::Directory, None) => proto::MakeKind::Directory,
        (FileKind::Directory, Some(_)) => return Err(Problem::invalid("target", "only a symlink has a target")),
        (FileKind::Symlink, Some(target)) => {
            check_path("target", &target)?;
            proto::MakeKind::Symlink(target)
        }
        (FileKind::Symlink, None) => return Err(Problem::invalid("target", "a symlink needs a target")),
        (FileKind::File | FileKind::Other, _) => {
            return Err(Problem::invalid("kind", "make a directory or a symlink; PUT the bytes of a file"));
        }
    };
    let make = proto::Make {
        path: body.path,
        kind,
        mode: mode(body.mode.as_deref())?,
        parents: body.parents,
        user: body.user,
    };
    let lent = lend.await?;
    lent.told(lent.guest.make(make).await).await?;
    Ok(lent.with(StatusCode::NO_CONTENT))
}

async fn rename(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Json(body): Json<RenameFile>,
) -> Result<Response, Problem> {
    rename_in(lend(&pepod, call, &which), body).await
}

pub(super) async fn rename_in(lend: impl Lending, body: RenameFile) -> Result<Response, Problem> {
    check_path("from", &body.from)?;
    check_path("to", &body.to)?;
    let lent = lend.await?;
    let rename = proto::Rename { from: body.from, to: body.to, user: body.user };
    lent.told(lent.guest.rename(rename).await).await?;
    Ok(lent.with(StatusCode::NO_CONTENT))
}

async fn tar_read(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(at): Query<AtPath>,
) -> Result<Response, Problem> {
    tar_of(lend(&pepod, call, &which), at, "application/x-tar").await
}

pub(super) async fn tar_of(lend: impl Lending, at: AtPath, kind: &'static str) -> Result<Response, Problem> {
    check_path("path", &at.path)?;
    let lent = lend.await?;
    let download = lent.told(lent.guest.tar_out(proto::TarOut { path: at.path, user: at.user }).await).await?;
    let mut response = lent.with([(header::CONTENT_TYPE, kind)]);
    *response.body_mut() = Body::from_stream(limited(download, None, lent));
    Ok(response)
}

async fn tar_write(
    State(pepod): State<Pepod>,
    call: Call,
    Path(which): Path<String>,
    Query(at): Query<AtPath>,
    request: Request,
) -> Result<Response, Problem> {
    tar_into(lend(&pepod, call, &which), at, request).await
}

pub(super) async fn tar_into(lend: impl Lending, at: AtPath, request: Request) -> Result<Response, Problem> {
    check_path("path", &at.path)?;
    let lent = lend.await?;
    let upload = lent.told(lent.guest.tar_in(proto::TarIn { path: at.path, user: at.user }).await).await?;
    pour(&lent, request.into_body(), upload).await?;
    Ok(lent.with(StatusCode::NO_CONTENT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_http_says() {
        let ok = |text, total| range(text, total).map_err(|problem| problem.0.code);
        assert_eq!(ok("bytes=0-4", 10), Ok(Some((0, 4))));
        assert_eq!(ok("bytes=5-", 10), Ok(Some((5, 9))));
        assert_eq!(ok("bytes=-3", 10), Ok(Some((7, 9))));
        assert_eq!(ok("bytes=-30", 10), Ok(Some((0, 9))));
        assert_eq!(ok("bytes=8-99", 10), Ok(Some((8, 9))));
        assert_eq!(ok("bytes=10-", 10), Err(ErrorCode::RangeNotSatisfiable));
        assert_eq!(ok("bytes=0-", 0), Err(ErrorCode::RangeNotSatisfiable));
        assert_eq!(ok("bytes=-0", 10), Err(ErrorCode::RangeNotSatisfiable));
        for ignored in ["bytes=4-2", "bytes=a-b", "lines=0-4", "bytes=0-1,3-4", ""] {
            assert_eq!(ok(ignored, 10), Ok(None), "{ignored}");
        }
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(mode(Some("0644")).map_err(|_| ()), Ok(Some(0o644)));
        assert_eq!(mode(None).map_err(|_| ()), Ok(None));
        for bad in ["", "9", "77777", "0x1", "-1"] {
            assert!(mode(Some(bad)).is_err(), "{bad}");
        }
    }
}
