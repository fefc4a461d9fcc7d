//! `docs/errors.md` and `docs/routes.md` are made from the tables that the programs use. `PEPO_BLESS=1` writes them anew.

#![allow(clippy::expect_used, reason = "a test fails by panicking")]

mod made;

use std::fmt::Write;

use made::same_as;
use pepo_api::{Audience, ErrorCode, ROUTES};

#[test]
fn errors() {
    let mut text = String::from(
        "# Errors\n\nMade from the table in `crates/api/src/error.rs`. Every answer that is not a success carries\n\
         `{\"error\": {\"code\", \"message\", \"hint\", \"param\", \"retryable\", \"request_id\", \"ended\"}}`; programs decide by `code`.\n\n\
         | code | status | the same request may succeed later | meaning |\n|---|---|---|---|\n",
    );
    for code in ErrorCode::ALL {
        let again = if code.retryable() { "yes" } else { "no" };
        let _ = writeln!(
            text,
            "| `{}` | {} | {again} | {} |",
            code.as_str(),
            code.status().as_u16(),
            code.meaning().trim()
        );
    }
    same_as("errors.md", &text);
}

#[test]
fn routes() {
    let mut text = String::from(
        "# Routes\n\nMade from the table in `crates/api/src/routes.rs`. A tenant's routes are there on the Edge API (with a key) and on the\n\
         operator's socket; an operator's on that socket alone.\n\n\
         | route | request | answer | authorization asks about | for |\n|---|---|---|---|---|\n",
    );
    for route in ROUTES {
        let who = match route.audience {
            Audience::Tenant => "tenants",
            Audience::Operator => "the operator",
            Audience::Edge => "the edge",
            Audience::Anyone => "anyone",
        };
        let (body, answer, action) = (route.body, route.answer, route.action);
        let _ = writeln!(text, "| `{} {}` | {body:?} | {answer:?} | {action:?} | {who} |", route.method, route.path);
    }
    same_as("routes.md", &text);
}
