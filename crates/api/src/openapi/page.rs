//! The document as one page of HTML: no script, nothing from elsewhere.

use std::fmt::Write;

use serde_json::Value;

use super::TAGS;

const STYLE: &str = include_str!("page.css");

/// The page.
pub fn page(document: &Value) -> String {
    let mut out = String::new();
    let title = text(&document["info"]["title"]);
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{title}: the HTTP API</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<nav>\n<h2>{title}</h2>\n"
    );
    for (tag, _) in TAGS {
        let _ = writeln!(out, "<a href=\"#tag-{tag}\"><b>{tag}</b></a>");
        for (method, path, operation) in operations(document).filter(|(_, _, operation)| is_of(operation, tag)) {
            let _ = writeln!(
                out,
                "<a href=\"#{}\" title=\"{} {}\">{}</a>",
                text(&operation["operationId"]),
                method.to_uppercase(),
                escape(path),
                text(&operation["summary"])
            );
        }
    }
    let _ = writeln!(out, "<a href=\"#schemas\"><b>Types</b></a>\n</nav>\n<main>\n<h1>The HTTP API of {title}</h1>");
    paragraphs(&mut out, &document["info"]["description"]);
    out.push_str("<p>The same for programs: <a href=\"/openapi.json\">/openapi.json</a> (OpenAPI 3.1).</p>\n");
    for (tag, about) in TAGS {
        let _ = writeln!(out, "<h2 id=\"tag-{tag}\">{tag}</h2>\n<p>{}</p>", code(about));
        for (method, path, operation) in operations(document).filter(|(_, _, operation)| is_of(operation, tag)) {
            one(&mut out, method, path, operation);
        }
    }
    out.push_str("<h2 id=\"schemas\">Types</h2>\n");
    for (name, schema) in document["components"]["schemas"].as_object().into_iter().flatten() {
        let _ = writeln!(out, "<section id=\"type-{name}\">\n<h3>{name}</h3>");
        paragraphs(&mut out, &schema["description"]);
        schema_table(&mut out, schema);
        out.push_str("</section>\n");
    }
    out.push_str("</main>\n</body>\n</html>\n");
    out
}

fn operations(document: &Value) -> impl Iterator<Item = (&str, &str, &Value)> {
    document["paths"].as_object().into_iter().flatten().flat_map(|(path, item)| {
        let of_path = item.as_object().into_iter().flatten();
        of_path
            .filter(|(_, operation)| operation.is_object())
            .map(move |(method, operation)| (method.as_str(), path.as_str(), operation))
    })
}

fn is_of(operation: &Value, tag: &str) -> bool {
    operation["tags"][0] == tag
}

fn one(out: &mut String, method: &str, path: &str, operation: &Value) {
    let _ = writeln!(
        out,
        "<section id=\"{}\">\n<h3><span class=\"{method}\">{}</span> <code>{}</code></h3>\n<p>{}",
        text(&operation["operationId"]),
        method.to_uppercase(),
        escape(path),
        text(&operation["summary"])
    );
    if operation["x-audience"] == "tenants" {
        let _ = write!(out, " <small>scope <code>{}</code></small>", text(&operation["x-action"]));
    }
    out.push_str("</p>\n");
    paragraphs(out, &operation["description"]);
    let parameters: Vec<&Value> = operation["parameters"].as_array().into_iter().flatten().collect();
    if !parameters.is_empty() {
        out.push_str("<table>\n<tr><th>parameter</th><th>in</th><th>what</th></tr>\n");
        for parameter in parameters {
            let must = if parameter["required"] == true { " <em>required</em>" } else { "" };
            let _ = writeln!(
                out,
                "<tr><td><code>{}</code>{must}</td><td>{}</td><td>{} <small>{}</small></td></tr>",
                text(&parameter["name"]),
                text(&parameter["in"]),
                code(parameter["description"].as_str().unwrap_or_default()),
                kind(&parameter["schema"])
            );
        }
        out.push_str("</table>\n");
    }
    for (what, schema) in operation["requestBody"]["content"].as_object().into_iter().flatten() {
        let _ = writeln!(out, "<p>Body: <code>{}</code> {}</p>", escape(what), kind(&schema["schema"]));
    }
    out.push_str("<table>\n<tr><th>answer</th><th>what</th></tr>\n");
    let mut refusals = Vec::new();
    for (status, answer) in operation["responses"].as_object().into_iter().flatten() {
        if answer.get("$ref").is_some() {
            refusals.push(status.as_str());
            continue;
        }
        let mut contents = String::new();
        for (what, schema) in answer["content"].as_object().into_iter().flatten() {
            let _ = write!(contents, "<br><code>{}</code> {}", escape(what), kind(&schema["schema"]));
        }
        let _ = writeln!(out, "<tr><td>{status}</td><td>{}{contents}</td></tr>", text(&answer["description"]));
    }
    if !refusals.is_empty() {
        let error = "<a href=\"#type-ErrorBody\">ErrorBody</a>";
        let _ = writeln!(out, "<tr><td>{}</td><td>a refusal: {error}</td></tr>", refusals.join(", "));
    }
    out.push_str("</table>\n</section>\n");
}

fn schema_table(out: &mut String, schema: &Value) {
    if let Some(choices) = schema["oneOf"].as_array().filter(|_| schema.get("properties").is_none()) {
        for choice in choices {
            paragraphs(out, &choice["description"]);
            match choice.get("properties") {
                Some(_) => schema_table(out, choice),
                None => {
                    let _ = writeln!(out, "<p>{}</p>", kind(choice));
                }
            }
        }
        return;
    }
    let Some(properties) = schema["properties"].as_object() else {
        let _ = writeln!(out, "<p>{}</p>", kind(schema));
        return;
    };
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    out.push_str("<table>\n");
    for (name, property) in properties {
        let must = if required.contains(&name.as_str()) { " <em>required</em>" } else { "" };
        let about = code(property["description"].as_str().unwrap_or_default());
        let _ = writeln!(
            out,
            "<tr><td><code>{}</code>{must}</td><td>{about} <small>{}</small></td></tr>",
            escape(name),
            kind(property)
        );
    }
    out.push_str("</table>\n");
}

/// What a schema is, in a few words.
fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|place| place.rsplit('/').next()) {
        return format!("<a href=\"#type-{name}\">{name}</a>");
    }
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<String> = values.iter().map(|value| format!("<code>{}</code>", text(value))).collect();
        return values.join(" | ");
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        let choices: Vec<String> = choices.iter().filter(|choice| choice["type"] != "null").map(kind).collect();
        return choices.join(" | ");
    }
    let mut word = match &schema["type"] {
        Value::Array(kinds) => {
            let kinds: Vec<&str> = kinds.iter().filter_map(Value::as_str).filter(|kind| *kind != "null").collect();
            kinds.join(" | ")
        }
        Value::String(word) => word.clone(),
        _ => "any".to_owned(),
    };
    if word == "array" {
        word = format!("list of {}", kind(&schema["items"]));
    } else if word == "object" && schema["additionalProperties"].is_object() {
        word = format!("names to {}", kind(&schema["additionalProperties"]));
    }
    if let Some(format) = schema["format"].as_str() {
        let _ = write!(word, " ({format})");
    }
    match (schema["minimum"].as_u64(), schema["maximum"].as_u64()) {
        (Some(least), Some(most)) if most < u64::from(u32::MAX) => {
            let _ = write!(word, ", {least} to {most}");
        }
        _ => {}
    }
    if let Some(pattern) = schema["pattern"].as_str() {
        let _ = write!(word, ", <code>{}</code>", escape(pattern));
    }
    if let Some(default) = schema.get("default") {
        let _ = write!(word, ", {default} where absent");
    }
    word
}

fn paragraphs(out: &mut String, value: &Value) {
    for paragraph in value.as_str().unwrap_or_default().split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()) {
        let _ = writeln!(out, "<p>{}</p>", code(paragraph.trim()));
    }
}

/// Text with `code` in it.
fn code(value: &str) -> String {
    let pieces = value.split('`').enumerate();
    pieces
        .map(|(at, piece)| if at % 2 == 1 { format!("<code>{}</code>", escape(piece)) } else { escape(piece) })
        .collect()
}

fn text(value: &Value) -> String {
    escape(value.as_str().unwrap_or_default())
}

fn escape(value: &str) -> String {
    value.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
