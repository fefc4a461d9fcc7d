//! The OpenAPI document: every row of the routes table with its parameters, bodies and errors, and a page to read it on.
//!
//! Made by a test, checked in as `docs/openapi.json` and `docs/reference.html`, and served from there: no program links
//! this. What a row is called, where it is and who may call it is the table's; what goes in and out is in [`shape`]; what a
//! value may be beyond its type is in [`bounds`], since the types themselves know no policy.

mod bounds;
mod flat;
mod page;
mod shape;
mod types;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use utoipa::openapi::path::{
    HttpMethod, OperationBuilder, Parameter, ParameterBuilder, ParameterIn, PathItem, PathsBuilder,
};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{ComponentsBuilder, ObjectBuilder, Schema, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::tag::TagBuilder;
use utoipa::openapi::{
    ContentBuilder, HeaderBuilder, InfoBuilder, OpenApiBuilder, Ref, RefOr, Required, ResponseBuilder, ServerBuilder,
};
use utoipa::{PartialSchema, ToSchema};

use crate::error::ErrorBody;
use crate::{Answer, Audience, Body, ErrorCode, ROUTES, Route};
use shape::{Model, Reach, Shape};

pub use page::page;

/// The groups of rows, in the order of the page, and what each is about.
const TAGS: &[(&str, &str)] = &[
    ("Sessions", "One conversation or task: a lasting identity with at most one microVM at a time."),
    ("Commands", "Programs run in a Session: started, followed, fed, signalled."),
    ("Files", "Files of a Session: read, written, listed, watched, moved as a tree."),
    ("Ports", "Connections to what listens inside."),
    ("Workspaces", "Durable directory trees that Sessions mount at `/workspace`."),
    ("Images", "What Sessions start from."),
    ("Events", "What happened, who asked for what, what was used."),
    ("Apps", "Policy, quota and defaults of an App, and its keys."),
    ("Service", "The service itself: health, version, this document."),
    ("Operator", "On the operator's socket of the machine that runs Pepo, and nowhere else."),
];

/// A row that nobody described.
#[derive(Debug, thiserror::Error)]
#[error("the route `{0}` is not in crates/api/src/openapi/shape.rs: say there what goes in and out")]
pub struct Undescribed(&'static str);

/// The document.
///
/// # Errors
/// A row of the table that has no shape.
pub fn document() -> Result<Value, Undescribed> {
    let mut schemas = BTreeMap::new();
    keep(&mut schemas, &Model::of::<ErrorBody>());
    let mut paths = PathsBuilder::new();
    for route in ROUTES {
        let shape = shape::of(route.name).ok_or(Undescribed(route.name))?;
        for model in shape.models() {
            keep(&mut schemas, model);
        }
        paths = paths.path(route.path, PathItem::new(method(route), operation(route, &shape)));
    }
    let mut components = ComponentsBuilder::new().schemas_from_iter(schemas).security_scheme(
        "key",
        SecurityScheme::Http(
            HttpBuilder::new()
                .scheme(HttpAuthScheme::Bearer)
                .description(Some(
                    "`Authorization: Bearer KEY`: an API key (`pepo key create`), or another credential that the edge is \
                     set to take. What it may do is its scopes; each operation says which one it asks for.",
                ))
                .build(),
        ),
    );
    for status in statuses() {
        components = components.response(refusal_name(status), refusal(status));
    }
    let too_long = ResponseBuilder::new().description("The request's line and headers are too long; there is no body");
    components = components.response(refusal_name(431), too_long.build());
    let document = OpenApiBuilder::new()
        .info(
            InfoBuilder::new()
                .title("Pepo")
                .version("v1")
                .description(Some(include_str!("openapi/about.md")))
                .license(Some(
                    utoipa::openapi::LicenseBuilder::new().name("Apache-2.0").identifier(Some("Apache-2.0")).build(),
                ))
                .build(),
        )
        .servers(Some([ServerBuilder::new().url("/").description(Some("where this document is served")).build()]))
        .tags(Some(TAGS.iter().map(|(name, about)| TagBuilder::new().name(*name).description(Some(*about)).build())))
        .paths(paths.build())
        .components(Some(components.build()))
        .build();
    // Plain data: it always serializes.
    let mut document = serde_json::to_value(&document).unwrap_or_default();
    for route in ROUTES {
        let operation = &mut document["paths"][route.path][route.method.as_str().to_ascii_lowercase()];
        operation["x-audience"] = json!(audience(route));
        operation["x-action"] = json!(route.action.word());
    }
    flat::flatten(&mut document);
    flat::numbers(&mut document);
    bounds::apply(&mut document);
    Ok(document)
}

fn keep(schemas: &mut BTreeMap<String, RefOr<Schema>>, model: &Model) {
    let mut found = Vec::new();
    (model.below)(&mut found);
    if let Some(itself) = &model.itself {
        found.push(itself());
    }
    schemas.extend(found);
}

fn audience(route: &Route) -> &'static str {
    match route.audience {
        Audience::Tenant => "tenants",
        Audience::Operator => "operator",
        Audience::Edge => "edge",
        Audience::Anyone => "anyone",
    }
}

fn method(route: &Route) -> HttpMethod {
    match route.method.as_str() {
        "POST" => HttpMethod::Post,
        "PUT" => HttpMethod::Put,
        "PATCH" => HttpMethod::Patch,
        "DELETE" => HttpMethod::Delete,
        "HEAD" => HttpMethod::Head,
        "OPTIONS" => HttpMethod::Options,
        _ => HttpMethod::Get,
    }
}

fn tag(route: &Route) -> &'static str {
    if matches!(route.audience, Audience::Operator | Audience::Edge) {
        return "Operator";
    }
    match route.name.split('_').next().unwrap_or_default() {
        "session" | "token" => "Sessions",
        "command" => "Commands",
        "file" | "tar" => "Files",
        "dial" | "port" => "Ports",
        "workspace" => "Workspaces",
        "image" => "Images",
        "event" | "audit" | "usage" => "Events",
        "app" | "key" => "Apps",
        _ => "Service",
    }
}

fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String)
}

fn parameter(name: &str, place: ParameterIn, about: &str, schema: impl Into<RefOr<Schema>>) -> Parameter {
    let required = if matches!(place, ParameterIn::Path) { Required::True } else { Required::False };
    ParameterBuilder::new()
        .name(name)
        .parameter_in(place)
        .required(required)
        .description(Some(about))
        .schema(Some(schema.into()))
        .build()
}

fn in_path(name: &str) -> Parameter {
    let named =
        |about: &str| parameter(name, ParameterIn::Path, about, text().min_length(Some(1)).max_length(Some(128)));
    match name {
        "session" => named("A Session's id, or its name"),
        "workspace" => named("A Workspace's id, or its name"),
        "image" => named("An Image's id, or one of its names"),
        "app" => named("An App's id, or its name"),
        "command" => {
            parameter(name, ParameterIn::Path, "A Command's id", <crate::CommandId as PartialSchema>::schema())
        }
        "port" => {
            let port = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1)).maximum(Some(65_535));
            parameter(name, ParameterIn::Path, "A TCP port inside", port)
        }
        // Of slashes too: a template has no word for that.
        "rest" => parameter(name, ParameterIn::Path, "The path for the program inside; it may have slashes", text()),
        "key" => named("What the Session is opened by; at most 128 bytes, no `/` and no control characters"),
        _ => named(""),
    }
}

fn header(name: &str, about: &str, schema: impl Into<RefOr<Schema>>) -> Parameter {
    parameter(name, ParameterIn::Header, about, schema)
}

fn operation(route: &Route, shape: &Shape) -> OperationBuilder {
    let mut operation = OperationBuilder::new()
        .operation_id(Some(route.name))
        .tag(tag(route))
        .summary(Some(shape.summary))
        .description((!shape.description.is_empty()).then_some(shape.description));
    operation = match route.audience {
        Audience::Tenant => operation.security(SecurityRequirement::new("key", [route.action.word()])),
        // Who calls is known from the socket.
        Audience::Operator | Audience::Edge | Audience::Anyone => operation.security(SecurityRequirement::default()),
    };
    let of_key = route.path.starts_with("/v1/keys/");
    for segment in route.path.split('/') {
        if let Some(name) = segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            operation = operation.parameter(match of_key {
                true => parameter(
                    name,
                    ParameterIn::Path,
                    "A key's id, or its name",
                    text().min_length(Some(1)).max_length(Some(128)),
                ),
                false => in_path(name),
            });
        }
    }
    for query in shape.query.iter().flat_map(|query| query()) {
        operation = operation.parameter(query);
    }
    if shape.reach != Reach::Host {
        let number = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0));
        operation =
            operation.parameter(header("If-Activation", "Only in this activation of the Session, else 412", number));
    }
    if shape.once {
        let key = text().min_length(Some(1)).max_length(Some(255)).pattern(Some("^[!-~]+$"));
        operation = operation.parameter(header(
            "Idempotency-Key",
            "Made by the caller: the same key with the same body within 24 hours makes nothing new and answers with what \
             the first request made; with another body it is refused",
            key,
        ));
    }
    for (name, about) in shape.headers {
        operation = operation.parameter(header(name, about, text()));
    }
    if let Some(body) = request_body(route, shape) {
        operation = operation.request_body(Some(body));
    }
    for (status, model) in &shape.answers {
        operation = operation.response(status.to_string(), answer(route, shape, *status, model.as_ref()));
    }
    for status in refusals(route, shape) {
        operation = operation.response(status.to_string(), Ref::from_response_name(refusal_name(status)));
    }
    operation
}

fn request_body(route: &Route, shape: &Shape) -> Option<utoipa::openapi::request_body::RequestBody> {
    let content = |schema: RefOr<Schema>| ContentBuilder::new().schema(Some(schema)).build();
    let body = RequestBodyBuilder::new();
    match route.body {
        Body::None => None,
        Body::Json => {
            let model = shape.body.as_ref()?;
            let required = if shape.body_required { Required::True } else { Required::False };
            Some(body.required(Some(required)).content("application/json", content((model.reference)())).build())
        }
        // No bytes are bytes too: an empty file.
        Body::Raw => Some(body.required(Some(Required::False)).content(shape.raw_in, content(bytes())).build()),
    }
}

/// Bytes as they are: a string without any bound, whatever its content type.
fn bytes() -> RefOr<Schema> {
    RefOr::T(Schema::Object(text().content_media_type("application/octet-stream").build()))
}

fn answer(route: &Route, shape: &Shape, status: u16, model: Option<&Model>) -> utoipa::openapi::Response {
    let whole =
        |about: &str, schema: ObjectBuilder| HeaderBuilder::new().schema(Some(schema)).description(Some(about)).build();
    let mut response = ResponseBuilder::new()
        .description(shape::meaning(status))
        .header("Pepo-Request-Id", whole("The request's id", text().pattern(Some("^req_[0-9a-f]{32}$"))));
    if shape.reach != Reach::Host {
        let number = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0));
        response = response.header("Pepo-Activation", whole("Which activation answered", number));
    }
    if shape.located && matches!(status, 200..=202) {
        response = response.header("Location", whole("Where it is", text()));
    }
    for (name, about) in shape.answer_headers {
        if status < 300 {
            response = response.header(*name, whole(about, text()));
        }
    }
    let (json, events) = match route.answer {
        Answer::Json => (true, false),
        Answer::JsonOrEvents => (true, status == 200),
        Answer::Events => (false, true),
        Answer::Raw | Answer::Empty | Answer::WebSocket | Answer::Upgrade | Answer::Guest => (false, false),
    };
    if let Some(model) = model.filter(|_| json) {
        response =
            response.content("application/json", ContentBuilder::new().schema(Some((model.reference)())).build());
    }
    if let Some(event) = shape.event.as_ref().filter(|_| events) {
        let about = format!("Server-sent events; the `data` of each is a `{}`", event.name);
        let schema = text().description(Some(about)).build();
        response = response.content("text/event-stream", ContentBuilder::new().schema(Some(schema)).build());
    }
    if route.answer == Answer::Raw && matches!(status, 200 | 206) {
        response = response.content(shape.raw_out, ContentBuilder::new().schema(Some(bytes())).build());
    }
    response.build()
}

/// Statuses that errors have.
fn statuses() -> Vec<u16> {
    let mut all: Vec<u16> = ErrorCode::ALL.iter().map(|code| code.status().as_u16()).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn refusal_name(status: u16) -> String {
    format!("Refused{status}")
}

fn refusal(status: u16) -> utoipa::openapi::Response {
    let codes = ErrorCode::ALL.iter().filter(|code| code.status().as_u16() == status);
    let lines: Vec<String> = codes.map(|code| format!("`{}`: {}", code.as_str(), code.meaning().trim())).collect();
    let mut response = ResponseBuilder::new().description(lines.join("\n\n")).content(
        "application/json",
        ContentBuilder::new().schema(Some(Ref::from_schema_name(ErrorBody::name()))).build(),
    );
    if matches!(status, 429 | 503) {
        let seconds = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0));
        let header = HeaderBuilder::new().schema(Some(seconds)).description(Some("Seconds until another try may help"));
        response = response.header("Retry-After", header.build());
    }
    response.build()
}

/// The statuses of what may go wrong.
fn refusals(route: &Route, shape: &Shape) -> Vec<u16> {
    let mut all = vec![];
    if !matches!(route.audience, Audience::Anyone) {
        all.extend([400, 403, 404, 422, 429, 431, 500, 503, 504]);
    }
    if route.audience == Audience::Tenant {
        all.push(401);
    }
    if route.body != Body::None {
        all.push(413);
    }
    match shape.reach {
        Reach::Host => {}
        Reach::Session => all.extend([409, 410, 412, 502]),
        Reach::Guest => all.extend([409, 410, 412, 502, 507]),
    }
    all.extend(shape.also);
    all.sort_unstable();
    all.dedup();
    all
}
