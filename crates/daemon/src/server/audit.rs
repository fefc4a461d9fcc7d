//! The audit log's one place: a layer around every row of the table that changes something.
//!
//! ```text
//! request ─► asked (noted before the change) ─► handler ─► answered: ok, an error's code, or `gone` with its caller
//! ```
//! What is noted: who, which route, of what; never a body, a header's value, or a query but a file's path.

use std::sync::Arc;

use axum::extract::{RawPathParams, Request};
use axum::middleware::Next;
use axum::response::Response;
use http::header;
use pepo_api::{Answer, Audience, CommandId, Error as ApiError, Route, SessionId};

use super::Call;
use super::ports::{By, OfGuest};
use crate::Pepod;
use crate::store::{Event, Store};

/// The longest text of a caller in the log.
const TEXT: usize = 256;

/// Around the handler of a row that changes something.
pub(super) async fn layer(route: &'static Route, params: RawPathParams, request: Request, next: Next) -> Response {
    let known = (request.extensions().get::<Pepod>().cloned(), request.extensions().get::<Call>().copied());
    let (Some(pepod), Some(call)) = known else { return next.run(request).await };
    // A look at what a guest serves changes nothing; a way in does.
    if !route.changes() && !request.headers().contains_key(header::UPGRADE) {
        return next.run(request).await;
    }
    // Nobody is known who could be noted; that the port was published is. Strangers do not fill the log.
    if route.answer == Answer::Guest && By::of(&call, request.headers()) == By::Anybody {
        return next.run(request).await;
    }
    let mut event = Event::new(route.name).of_audit().actor(call.actor()).request(call.request_id);
    // The operator's own routes concern the host, whatever App is named.
    if route.audience == Audience::Tenant {
        event = event.app(call.app);
    }
    if let Some(source) = call.source {
        event = event.detail("source", source);
    }
    for (name, value) in &params {
        event = match name {
            "session" => match value.parse::<SessionId>() {
                Ok(id) => event.session(id),
                Err(_) => match pepod.sessions().find_live(call.app, value) {
                    Some(session) => event.session(session.id()),
                    None => event.detail(name, short(value)),
                },
            },
            // What a guest is asked for may be anything.
            "rest" => event,
            "command" => match value.parse::<CommandId>() {
                Ok(id) => event.command(id),
                Err(_) => event.detail(name, short(value)),
            },
            _ => event.detail(name, short(value)),
        };
    }
    let of_guest = route.answer == Answer::Guest;
    for (name, value) in form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes()) {
        if name == "path" && !of_guest {
            event = event.detail("path", short(&value));
        }
    }
    pepod.store().asked(event.clone());
    // Dropped with the request where the caller goes away before there is an answer.
    let mut note = Note { store: pepod.store().clone(), event: Some(event) };
    let response = next.run(request).await;
    note.answered(&response);
    response
}

struct Note {
    store: Store,
    event: Option<Event>,
}

impl Note {
    fn answered(&mut self, response: &Response) {
        let Some(mut event) = self.event.take() else { return };
        let status = response.status();
        if let Some(error) = response.extensions().get::<Arc<ApiError>>() {
            event = event.outcome(error.code.as_str());
        } else if status.is_client_error() || status.is_server_error() {
            event = event.outcome(format!("http_{}", status.as_u16()));
        }
        // What was made says so in its address; a guest's answer says nothing that counts here.
        let ours = response.extensions().get::<OfGuest>().is_none();
        let made = response.headers().get(header::LOCATION).filter(|_| ours);
        let made = made.and_then(|place| place.to_str().ok()?.rsplit('/').next());
        if let Some(made) = made {
            event = match (made.parse::<SessionId>(), made.parse::<CommandId>()) {
                (Ok(session), _) => event.session(session),
                (_, Ok(command)) => event.command(command),
                _ => event.detail("made", short(made)),
            };
        }
        self.store.record(event);
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.store.record(event.outcome("gone"));
        }
    }
}

fn short(text: &str) -> String {
    text.chars().take(TEXT).collect()
}
