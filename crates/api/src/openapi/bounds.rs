//! What a value may be beyond its type: what the daemon checks. A line that fits nothing is a fault of this table.

use serde_json::{Map, Value, json};

/// Ten years, in seconds.
const LONG: u64 = 10 * 365 * 86_400;

/// A name that stands for an id.
const SLUG: &str = "^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$";

/// Schema, property, bounds.
fn properties() -> Vec<(&'static str, &'static str, Value)> {
    let seconds = |least: u64| json!({"minimum": least, "maximum": LONG});
    let cpus = || json!({"minimum": 1, "maximum": 64});
    let memory = || json!({"minimum": 128, "maximum": 1_048_576});
    let disk = || json!({"minimum": 16, "maximum": 16_777_215});
    let labels = || json!({"maxProperties": 64, "propertyNames": {"minLength": 1, "maxLength": 63, "pattern": "^[^=\\u0000-\\u001f\\u007f-\\u009f]+$"}});
    let slug = || json!({"pattern": SLUG, "maxLength": 63});
    let line = || json!({"minLength": 1, "maxLength": 16_384, "pattern": "^[^\\u0000]+$"});
    let path = || json!({"minLength": 1, "maxLength": 4096, "pattern": "^[^\\u0000]+$"});
    let variables = || json!({"propertyNames": {"minLength": 1, "pattern": "^[^=\\u0000]+$"}});
    let octal = || json!({"pattern": "^[0-7]{1,5}$"});
    let image = || json!({"minLength": 1, "maxLength": 128});
    let mut all = vec![
        ("CreateSession", "image", image()),
        ("CreateSession", "services", json!({"maxItems": 16})),
        ("CreateSession", "persist", json!({"maxItems": 32})),
        ("CreateSession", "secrets", variables()),
        ("UpdateSession", "secrets", variables()),
        ("UpdateSession", "services", json!({"maxItems": 16})),
        ("AppDefaults", "image", image()),
        ("Setup", "command", line()),
        ("Setup", "timeout_seconds", json!({"minimum": 1, "maximum": 86_400, "default": 300})),
        ("ServiceSpec", "name", slug()),
        ("ServiceSpec", "command", line()),
        ("ServiceSpec", "port", json!({"minimum": 1, "maximum": 65_535})),
        ("ReadySpec", "http", json!({"pattern": "^/[!-~]*$", "maxLength": 1024})),
        ("CreateCommand", "command", json!({"maxLength": 61_440, "pattern": "^[^\\u0000]*$"})),
        ("CreateCommand", "argv", json!({"minItems": 1, "items": {"type": "string", "pattern": "^[^\\u0000]*$"}})),
        ("CreateCommand", "shell", json!({"minLength": 1, "maxLength": 63})),
        ("CreateCommand", "wait_seconds", json!({"maximum": 3600, "default": 30})),
        ("CreateCommand", "max_output_bytes", json!({"maximum": 8 << 20, "default": 65_536})),
        ("CreateCommand", "timeout_seconds", json!({"maximum": u64::MAX / 1000, "default": 0})),
        ("CreateCommand", "env", variables()),
        ("CommandLimits", "memory_mib", json!({"minimum": 4})),
        ("CommandLimits", "pids", json!({"minimum": 1, "maximum": 1 << 22})),
        ("CommandLimits", "cpu_percent", json!({"minimum": 1, "maximum": 6400})),
        ("PtySize", "cols", json!({"minimum": 1, "maximum": 1000})),
        ("PtySize", "rows", json!({"minimum": 1, "maximum": 1000})),
        ("MakeFile", "path", path()),
        ("MakeFile", "target", path()),
        ("MakeFile", "mode", octal()),
        ("MakeFile", "kind", json!({"enum": ["directory", "symlink"]})),
        ("RenameFile", "from", path()),
        ("RenameFile", "to", path()),
        ("CreateKey", "name", slug()),
        ("CreateKey", "scopes", json!({"maxItems": 32})),
        ("CreateKey", "sources", json!({"maxItems": 64})),
        ("CreateKey", "expires_seconds", seconds(1)),
        ("AppIngress", "sources", json!({"maxItems": 64})),
        ("AppQuota", "requests_per_second", json!({"minimum": 1})),
        ("CreateToken", "scopes", json!({"maxItems": 32})),
        ("CreateToken", "port", json!({"minimum": 1, "maximum": 65_535})),
        ("CreateToken", "expires_seconds", json!({"minimum": 1, "maximum": 3600, "default": 600})),
        ("PublishPort", "expires_seconds", json!({"minimum": 1, "maximum": 604_800, "default": 3600})),
        ("NetworkRule", "ports", json!({"items": {"type": "integer", "minimum": 1, "maximum": 65_535}})),
    ];
    for schema in ["CreateSession", "AppDefaults", "AppLimits"] {
        all.extend([(schema, "cpus", cpus()), (schema, "memory_mib", memory()), (schema, "disk_mib", disk())]);
        all.push((schema, "keep_alive_seconds", seconds(0)));
    }
    all.push(("UpdateSession", "keep_alive_seconds", seconds(0)));
    for schema in ["CreateSession", "UpdateSession"] {
        all.extend([(schema, "expires_seconds", seconds(1)), (schema, "env", variables())]);
    }
    all.push(("AppDefaults", "expires_seconds", seconds(0)));
    for schema in ["CreateSession", "UpdateSession", "CreateWorkspace", "UpdateWorkspace", "CreateApp", "UpdateApp"] {
        all.extend([(schema, "name", slug()), (schema, "labels", labels())]);
    }
    all
}

/// Parameters by name, and by their row where it differs.
fn parameters() -> Vec<(&'static str, &'static str, Value)> {
    let path = || json!({"minLength": 1, "maxLength": 4096});
    vec![
        ("", "limit", json!({"minimum": 1, "maximum": 1000, "default": 100})),
        ("", "wait_seconds", json!({"minimum": 0, "maximum": 300, "default": 0})),
        ("command_show", "wait_seconds", json!({"minimum": 0, "maximum": 3600, "default": 0})),
        ("", "max_output_bytes", json!({"maximum": 8 << 20, "default": 65_536})),
        ("", "path", path()),
        ("", "mode", json!({"pattern": "^[0-7]{1,5}$"})),
        ("", "label", json!({"items": {"type": "string", "pattern": "^[^=]+=.*$"}})),
        ("", "group_by", json!({"pattern": "^(app|session|day|label:.{1,63})$"})),
        ("event_list", "type", json!({"items": {"type": "string", "pattern": "^[a-z._]+(\\.\\*)?$"}})),
        ("audit_list", "type", json!({"items": {"type": "string", "pattern": "^[a-z._]+(\\.\\*)?$"}})),
    ]
}

/// Writes them in.
pub(super) fn apply(document: &mut Value) {
    for (schema, property, bounds) in properties() {
        let place = &mut document["components"]["schemas"][schema]["properties"][property];
        assert!(!place.is_null(), "bounds.rs: there is no {schema}.{property}");
        narrow(place, bounds);
    }
    let either = json!([{"required": ["command"], "properties": {"command": {"type": "string"}, "argv": {"type": "null"}}},
                        {"required": ["argv"], "properties": {"argv": {"type": "array"}, "command": {"type": "null"}}}]);
    document["components"]["schemas"]["CreateCommand"]["oneOf"] = either;
    let Some(paths) = document["paths"].as_object_mut() else { return };
    for operation in paths.values_mut().filter_map(Value::as_object_mut).flat_map(Map::values_mut) {
        let name = operation["operationId"].as_str().unwrap_or_default().to_owned();
        let Some(given) = operation.get_mut("parameters").and_then(Value::as_array_mut) else { continue };
        for parameter in given {
            let own = parameter["name"].as_str().unwrap_or_default().to_owned();
            if parameter["in"] != "query" {
                continue;
            }
            for (_, _, bounds) in
                parameters().into_iter().filter(|(row, of, _)| (row.is_empty() || *row == name) && *of == own)
            {
                narrow(&mut parameter["schema"], bounds);
            }
        }
    }
}

fn narrow(schema: &mut Value, bounds: Value) {
    // A reference, or a choice of one and null, is narrowed beside it.
    if let (Value::Object(schema), Value::Object(bounds)) = (schema, bounds) {
        schema.extend(bounds);
    }
}
