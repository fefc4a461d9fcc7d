//! The API's own description, as it is checked in: what `openapi` makes and a test compares.

/// The OpenAPI document, as JSON.
pub const OPENAPI: &str = include_str!("../../../docs/openapi.json");

/// The same as a page: one file, without a script.
pub const REFERENCE: &str = include_str!("../../../docs/reference.html");

/// What a browser may do on that page: show it in its own colours, and nothing else.
pub const REFERENCE_POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
