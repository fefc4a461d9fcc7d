//! `docs/openapi.json` and `docs/reference.html` are made from the routes table and the types. `PEPO_BLESS=1` writes them anew.

#![allow(clippy::expect_used, reason = "a test fails by panicking")]

mod made;

use std::collections::BTreeSet;

use made::same_as;
use pepo_api::openapi::{document, page};
use pepo_api::{Audience, ErrorCode, ROUTES};
use serde_json::Value;

#[test]
fn the_document_is_what_the_types_say() {
    let document = document().expect("every row has a shape");
    let text = serde_json::to_string_pretty(&document).expect("json") + "\n";
    same_as("openapi.json", &text);
    same_as("reference.html", &page(&document));
}

#[test]
fn every_row_is_in_it_with_who_may_and_how() {
    let document = document().expect("every row has a shape");
    assert_eq!(document["openapi"], "3.1.0");
    for route in ROUTES {
        let operation = &document["paths"][route.path][route.method.as_str().to_lowercase()];
        assert_eq!(operation["operationId"], route.name);
        let keyed = operation["security"][0].get("key").is_some();
        assert_eq!(keyed, route.audience == Audience::Tenant, "{}", route.name);
        let declared = operation["parameters"].as_array().cloned().unwrap_or_default();
        for name in route.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')) {
            assert!(
                declared.iter().any(|one| one["name"] == name && one["in"] == "path" && one["required"] == true),
                "{}: {name}",
                route.name
            );
        }
    }
}

fn references<'a>(value: &'a Value, into: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(fields) => {
            into.extend(fields.get("$ref").and_then(Value::as_str));
            fields.values().for_each(|value| references(value, into));
        }
        Value::Array(values) => values.iter().for_each(|value| references(value, into)),
        _ => {}
    }
}

#[test]
fn nothing_points_to_nowhere_and_no_flattened_object_is_closed() {
    let document = document().expect("every row has a shape");
    let mut all = BTreeSet::new();
    references(&document, &mut all);
    for reference in all {
        assert!(document.pointer(&reference[1..]).is_some_and(|there| !there.is_null()), "{reference}");
    }
    let schemas = document["components"]["schemas"].as_object().expect("schemas");
    for (name, schema) in schemas {
        assert!(schema.get("allOf").is_none(), "{name}");
    }
    assert_eq!(schemas["CreateSession"]["additionalProperties"], false, "an unknown field is refused");
    let codes = schemas["ErrorCode"]["enum"].as_array().expect("codes");
    assert!(codes.iter().eq(ErrorCode::ALL.iter().map(|code| code.as_str())), "{codes:?}");
}

#[test]
fn answers_of_the_types_fit_their_schemas() {
    let document = document().expect("every row has a shape");
    let properties = |name: &str| -> BTreeSet<String> {
        document["components"]["schemas"][name]["properties"].as_object().expect(name).keys().cloned().collect()
    };
    // What serde flattens stands beside the others.
    assert!(properties("Command").is_superset(&["exit_code", "reason", "argv"].map(str::to_owned).into()));
    assert!(properties("Output").is_superset(&["exit_code", "stdout", "next_offset"].map(str::to_owned).into()));
    assert!(properties("NewKey").is_superset(&["key", "prefix"].map(str::to_owned).into()));
    let required = document["components"]["schemas"]["Command"]["required"].as_array().expect("required");
    assert!(!required.iter().any(|name| name == "reason"), "a command that runs has no end");
}
