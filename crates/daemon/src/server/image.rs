//! Routes of Images. Everybody sees them, the operator alone changes them.

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use pepo_api::{BuildEvent, BuildImage, ErrorCode, RemovedImages, route};
use pepo_sandbox::chain;
use tokio::sync::mpsc;

use super::{Json, Problem, Routes, events};
use crate::Pepod;
use crate::image::job::{BuildError, Order};
use crate::image::{Error, Image, Images};

/// Events under way between a build and its caller: a slow reader holds the builder's log back, not its work.
const EVENTS: usize = 64;

pub(super) fn register(routes: &mut Routes) {
    routes.route(&route::image_list, list);
    routes.route(&route::image_show, show);
    routes.route(&route::image_build, build);
    routes.route(&route::image_remove, remove);
    routes.route(&route::image_gc, gc);
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let text = chain(&error);
        let api = match &error {
            Error::Missing { meant, recipe, .. } => {
                let missing = pepo_api::Error::new(ErrorCode::NotFound, text).param("image");
                match (recipe, meant) {
                    (Some(recipe), _) => missing.hint(format!("build it: pepo image build {recipe}")),
                    (None, Some(name)) => missing.hint(format!("did you mean `{name}`?")),
                    (None, None) => missing.hint("`pepo image ls` shows those that there are"),
                }
            }
            Error::Name { .. } => pepo_api::Error::new(ErrorCode::Invalid, text).param("name"),
            Error::InUse { .. } => pepo_api::Error::new(ErrorCode::Conflict, text),
            Error::NoRoom { .. } => pepo_api::Error::new(ErrorCode::DiskFull, text)
                .hint("remove what nobody needs (`pepo image gc`, `pepo image rm`), or raise images.budget"),
            _ => {
                tracing::error!(error = text, "an Image could not be used");
                pepo_api::Error::new(ErrorCode::Internal, text)
            }
        };
        Problem::from(api)
    }
}

impl From<BuildError> for Problem {
    fn from(error: BuildError) -> Self {
        let text = chain(&error);
        match error {
            BuildError::Recipe(_) | BuildError::Request(_) => Problem::invalid("recipe", text),
            BuildError::Images(error) => error.into(),
            BuildError::Failed(crate::image::build::Failure::Disk { .. }) => Problem::new(ErrorCode::DiskFull, text),
            BuildError::Failed(_) | BuildError::Ended { .. } | BuildError::Host(_) => {
                Problem::new(ErrorCode::Internal, text)
            }
        }
    }
}

/// Runs a look at the disk where it may block.
async fn off<T: Send + 'static>(
    pepod: &Pepod,
    work: impl FnOnce(&Images) -> Result<T, Error> + Send + 'static,
) -> Result<T, Problem> {
    let images = pepod.images().clone();
    let done = tokio::task::spawn_blocking(move || work(&images)).await;
    done.map_err(|_| Problem::new(ErrorCode::Internal, "looking at the Images ended in a panic"))?
        .map_err(Problem::from)
}

fn shown(pepod: &Pepod, image: &Image) -> pepo_api::Image {
    image.to_api(pepod.sessions().images_in_use().get(&image.id()).copied().unwrap_or(0))
}

async fn list(State(pepod): State<Pepod>) -> Result<Response, Problem> {
    let images = off(&pepod, Images::list).await?;
    let items = images.iter().map(|image| shown(&pepod, image)).collect();
    Ok(axum::Json(pepo_api::Page { items, next_cursor: None }).into_response())
}

async fn show(State(pepod): State<Pepod>, Path(which): Path<String>) -> Result<Response, Problem> {
    let image = off(&pepod, move |images| images.find(&which)).await?;
    Ok(axum::Json(shown(&pepod, &image)).into_response())
}

/// Answers with events; the build ends with its caller.
async fn build(State(pepod): State<Pepod>, Json(body): Json<BuildImage>) -> Result<Response, Problem> {
    let order = Order::new(&body, pepod.config().mirror.clone())?;
    let (events, told) = mpsc::channel(EVENTS);
    let building = {
        let (pepod, events) = (pepod.clone(), events.clone());
        async move {
            let _busy = pepod.busy();
            let last = match pepod.images().build(pepod.sessions().host(), order, &events).await {
                Ok((image, cached)) => {
                    pepod.sessions().pool().images_changed();
                    BuildEvent::Done { image: shown(&pepod, &image), cached }
                }
                Err(error) => {
                    let Problem(error) = error.into();
                    BuildEvent::Failed { error: *error }
                }
            };
            // A caller that left has ended the build before this.
            let _ = events.send(last).await;
        }
    };
    drop(events);
    let task = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(building));
    let stream = futures_util::stream::unfold((told, task), |(mut told, task)| async move {
        let bytes = match tokio::time::timeout(events::COMMENT_EVERY, told.recv()).await {
            Err(_) => bytes::Bytes::from_static(b":\n\n"),
            Ok(Some(event)) => events::event(name(&event), None, &event),
            Ok(None) => return None,
        };
        Some((Ok(bytes), (told, task)))
    });
    Ok(events::sse(stream.boxed()))
}

fn name(event: &BuildEvent) -> &'static str {
    match event {
        BuildEvent::Step { .. } => "step",
        BuildEvent::Progress { .. } => "progress",
        BuildEvent::Log { .. } => "log",
        BuildEvent::Done { .. } => "done",
        BuildEvent::Failed { .. } => "failed",
    }
}

async fn remove(State(pepod): State<Pepod>, Path(which): Path<String>) -> Result<Response, Problem> {
    let uses = pepod.sessions().images_in_use();
    let image = off(&pepod, move |images| images.remove(&which, |id| uses.get(id).copied().unwrap_or(0))).await?;
    pepod.sessions().pool().images_changed();
    Ok(removed(vec![image]))
}

async fn gc(State(pepod): State<Pepod>) -> Result<Response, Problem> {
    let uses = pepod.sessions().images_in_use();
    let gone = off(&pepod, move |images| images.gc(|id| uses.get(id).copied().unwrap_or(0))).await?;
    pepod.sessions().pool().images_changed();
    Ok(removed(gone))
}

fn removed(images: Vec<Image>) -> Response {
    let removed: Vec<_> = images.iter().map(|image| image.to_api(0)).collect();
    let freed_bytes = removed.iter().map(|image| image.size_bytes).sum();
    axum::Json(RemovedImages { removed, freed_bytes }).into_response()
}
