//! Answers that are the edge's own: refusals, its health, the API's description, what a browser asks before it asks.

use http::header::HeaderName;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use pepo_api::{
    Error, ErrorBody, ErrorCode, Health, OPENAPI, Quota, REFERENCE, REFERENCE_POLICY, RequestId, Route, route,
};

use crate::body::{self, Any};
use crate::head;

/// How long a browser may remember what a page of another origin may ask, seconds.
const PREFLIGHT_AGE: &str = "600";

/// A refusal: an error, and what its head says beside it.
pub struct Refusal {
    /// The error.
    pub error: Box<Error>,
    header: Option<(HeaderName, HeaderValue)>,
    after: After,
}

/// What becomes of the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    /// The next request may come.
    GoOn,
    /// What is left of this request cannot be told from a next one.
    Close,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal { error: Box::new(error), header: None, after: After::GoOn }
    }
}

impl Refusal {
    /// With a header beside it.
    pub fn with(error: Error, name: HeaderName, value: &str) -> Self {
        let header = HeaderValue::from_str(value).ok().map(|value| (name, value));
        Refusal { header, ..error.into() }
    }

    /// And the connection ends.
    pub fn and_close(self) -> Self {
        Refusal { after: After::Close, ..self }
    }
}

/// What a browser asks before a page of another origin may call.
pub fn preflight(id: RequestId) -> Response<Any> {
    const METHODS: &str = "GET, POST, PUT, PATCH, DELETE";
    const HEADERS: &str = "authorization, content-type, accept, if-activation, last-event-id, idempotency-key, range";
    let mut answer = Response::new(body::nothing());
    *answer.status_mut() = StatusCode::NO_CONTENT;
    let mut headers = head::to_caller(&HeaderMap::new(), id, None);
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static(HEADERS));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_AGE));
    *answer.headers_mut() = headers;
    answer
}

/// A share that is used up: its name, what is used of it and its limit.
pub fn used_up(name: &str, limit: u64, message: String, wait: u64) -> Refusal {
    let quota = Quota { name: name.into(), used: limit, limit };
    let error = Error::new(ErrorCode::TooManyRequests, message).quota(quota);
    Refusal::with(error.hint("wait as long as Retry-After says"), header::RETRY_AFTER, &wait.max(1).to_string())
}

/// Something that is needed is away for a moment.
pub fn unavailable(why: &str) -> Refusal {
    Refusal::with(
        Error::new(ErrorCode::Unavailable, why).hint("is pepod running? try again soon"),
        header::RETRY_AFTER,
        "1",
    )
}

/// Whether all is well.
pub fn health(well: bool, id: RequestId) -> Response<Any> {
    let status = if well { "ok" } else { "the daemon cannot be asked about keys" };
    let code = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(code, HeaderMap::new(), &Health { status: status.into() }, id)
}

/// The API's own description: the same for everybody, so nobody is asked for a key.
pub fn description(row: &Route, id: RequestId) -> Response<Any> {
    let (kind, text) = match row.path == route::openapi.path {
        true => ("application/json", OPENAPI),
        false => ("text/html; charset=utf-8", REFERENCE),
    };
    let mut answer = Response::new(body::bytes(text));
    let mut headers = head::to_caller(&HeaderMap::new(), id, None);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(REFERENCE_POLICY));
    *answer.headers_mut() = headers;
    answer
}

/// A refusal as an answer.
pub fn refused(refusal: Refusal, id: RequestId) -> Response<Any> {
    let Refusal { mut error, header, after } = refusal;
    error.request_id = Some(id);
    let mut headers: HeaderMap = header.into_iter().collect();
    if after == After::Close {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    json(error.code.status(), headers, &ErrorBody { error: *error }, id)
}

fn json(status: StatusCode, more: HeaderMap, value: &impl serde::Serialize, id: RequestId) -> Response<Any> {
    // Plain structs of text: they always serialize.
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mut answer = Response::new(body::bytes(text));
    *answer.status_mut() = status;
    let mut headers = head::to_caller(&HeaderMap::new(), id, None);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.extend(more);
    *answer.headers_mut() = headers;
    answer
}
