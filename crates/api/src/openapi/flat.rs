//! What the derived schemas say otherwise than serde does.

use serde_json::{Map, Value, json};

/// A flattened field is told as `allOf`: of a closed object that nothing fits, and of one that may be absent as required.
/// Its properties become the outer object's own.
pub(super) fn flatten(document: &mut Value) {
    let Some(schemas) = document["components"]["schemas"].as_object_mut() else { return };
    let before = schemas.clone();
    for schema in schemas.values_mut() {
        if let Some(whole) = merged(&before, schema) {
            *schema = whole;
        }
    }
}

fn merged(schemas: &Map<String, Value>, schema: &Value) -> Option<Value> {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for part in schema.get("allOf")?.as_array()? {
        let (part, optional) = match part.get("oneOf").and_then(Value::as_array) {
            Some(choice) => (named(schemas, &choice[0]), true),
            None => (named(schemas, part), false),
        };
        // What is flattened may itself have something flattened.
        let whole = merged(schemas, part);
        let part = whole.as_ref().unwrap_or(part);
        if let Some(own) = part.get("properties").and_then(Value::as_object) {
            properties.extend(own.clone());
        }
        if let Some(names) = part.get("required").and_then(Value::as_array).filter(|_| !optional) {
            required.extend(names.clone());
        }
    }
    let mut whole = json!({"type": "object", "properties": properties});
    if !required.is_empty() {
        whole["required"] = required.into();
    }
    if let Some(description) = schema.get("description") {
        whole["description"] = description.clone();
    }
    Some(whole)
}

fn named<'a>(schemas: &'a Map<String, Value>, part: &'a Value) -> &'a Value {
    part.get("$ref")
        .and_then(Value::as_str)
        .and_then(|text| schemas.get(text.rsplit('/').next().unwrap_or_default()))
        .unwrap_or(part)
}

/// Unsigned numbers have the bounds of their type, not the format of a signed one.
pub(super) fn numbers(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let is_integer = match fields.get("type") {
                Some(Value::String(kind)) => kind == "integer",
                Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "integer"),
                _ => false,
            };
            if is_integer && fields.get("minimum").and_then(Value::as_f64) == Some(0.0) {
                let most = match fields.get("format").and_then(Value::as_str) {
                    Some("int32") => Some(json!(u32::MAX)),
                    Some("int64") => Some(json!(u64::MAX)),
                    _ => None,
                };
                if let Some(most) = most {
                    fields.remove("format");
                    fields.entry("maximum").or_insert(most);
                }
            }
            fields.values_mut().for_each(numbers);
        }
        Value::Array(values) => values.iter_mut().for_each(numbers),
        _ => {}
    }
}
