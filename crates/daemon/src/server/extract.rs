//! Bodies and queries as types, with refusals that name the field.

use std::borrow::Cow;

use axum::extract::{FromRequest, FromRequestParts, Request};
use http::request::Parts;
use http_body_util::{BodyExt, Limited};
use pepo_api::ErrorCode;
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Visitor};

use super::{Call, Problem};

/// The largest JSON body.
const MAX_JSON: usize = 1 << 20;

/// A JSON body.
pub struct Json<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        parse(&body(request).await?).map(Json)
    }
}

/// All of a JSON body.
pub(super) async fn body(request: Request) -> Result<bytes::Bytes, Problem> {
    let large = || Problem::new(ErrorCode::PayloadTooLarge, format!("a JSON body may have {MAX_JSON} bytes"));
    let body = Limited::new(request.into_body(), MAX_JSON).collect().await.map_err(|error| {
        match error.downcast_ref::<http_body_util::LengthLimitError>() {
            Some(_) => large(),
            None => Problem::new(ErrorCode::BadRequest, "the body broke off"),
        }
    })?;
    Ok(body.to_bytes())
}

pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    // serde would take a list for an object, by the order of its fields.
    if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
        return Err(Problem::new(ErrorCode::Invalid, "the body is a list and must be an object"));
    }
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let parsed = serde_path_to_error::deserialize(&mut json);
    let value = parsed.map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        match inner.classify() {
            serde_json::error::Category::Data => refuse(&path, &inner.to_string()),
            _ => Problem::new(ErrorCode::BadRequest, format!("the body is not JSON: {inner}")),
        }
    })?;
    json.end().map_err(|error| Problem::new(ErrorCode::BadRequest, format!("the body is not JSON: {error}")))?;
    Ok(value)
}

/// A refusal of one field, from what serde says of it.
fn refuse(path: &str, said: &str) -> Problem {
    let said = said.split(" at line ").next().unwrap_or(said);
    let mut quoted = said.split('`').skip(1).step_by(2);
    let mut param = if path == "." { String::new() } else { path.to_owned() };
    let mut hint = None;
    if let Some(rest) = said.strip_prefix("unknown field `") {
        let field = rest.split('`').next().unwrap_or_default();
        // serde's path ends with the unknown field itself, or before it.
        if param != field && !param.ends_with(&format!(".{field}")) {
            param = if param.is_empty() { field.to_owned() } else { format!("{param}.{field}") };
        }
        let nearest = quoted
            .skip(1)
            .map(|known| (strsim::jaro_winkler(field, known), known))
            .filter(|(alike, _)| *alike > 0.75)
            .max_by(|a, b| a.0.total_cmp(&b.0));
        hint = nearest.map(|(_, known)| format!("did you mean `{known}`?"));
    } else if said.starts_with("missing field `")
        && let Some(field) = quoted.next()
    {
        param = if param.is_empty() { field.to_owned() } else { format!("{param}.{field}") };
    }
    let said: String = said
        .chars()
        .take(300)
        .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect();
    let mut problem =
        if param.is_empty() { Problem::new(ErrorCode::Invalid, said) } else { Problem::invalid(param, said) };
    problem.0.hint = hint;
    problem
}

/// What stands behind the `?`.
pub struct Query<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        query(parts.uri.query().unwrap_or_default()).map(Query)
    }
}

fn query<T: DeserializeOwned>(text: &str) -> Result<T, Problem> {
    let mut pairs: Vec<(Cow<'_, str>, Values<'_>)> = Vec::new();
    for (name, value) in form_urlencoded::parse(text.as_bytes()) {
        match pairs.iter_mut().find(|(known, _)| *known == name) {
            Some((_, values)) => values.0.push(value),
            None => pairs.push((name, Values(vec![value]))),
        }
    }
    serde_path_to_error::deserialize(MapDeserializer::<_, serde::de::value::Error>::new(pairs.into_iter()))
        .map_err(|error| refuse(&error.path().to_string(), &error.inner().to_string()))
}

/// The values of one parameter, read as whatever is wanted.
struct Values<'a>(Vec<Cow<'a, str>>);

impl<'de> IntoDeserializer<'de, serde::de::value::Error> for Values<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Values<'de> {
    fn one(self) -> Result<Cow<'de, str>, serde::de::value::Error> {
        match <[_; 1]>::try_from(self.0) {
            Ok([one]) => Ok(one),
            Err(_) => Err(serde::de::value::Error::custom("given more than once")),
        }
    }
}

macro_rules! parsed {
    ($($method:ident $visit:ident $what:literal;)+) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
            let text = self.one()?;
            match text.parse() {
                Ok(value) => visitor.$visit(value),
                Err(_) => Err(Self::Error::custom(format!("`{}` is not {}", text, $what))),
            }
        }
    )+};
}

impl<'de> Deserializer<'de> for Values<'de> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_string(self.one()?.into_owned())
    }

    parsed! {
        deserialize_bool visit_bool "true or false";
        deserialize_u8 visit_u8 "a number";
        deserialize_u16 visit_u16 "a number";
        deserialize_u32 visit_u32 "a number";
        deserialize_u64 visit_u64 "a number";
        deserialize_i32 visit_i32 "a number";
        deserialize_i64 visit_i64 "a number";
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_seq(SeqDeserializer::new(self.0.into_iter().map(|one| one.into_owned())))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        let deserializer: serde::de::value::StringDeserializer<Self::Error> =
            self.one()?.into_owned().into_deserializer();
        visitor.visit_enum(deserializer)
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i128 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct tuple tuple_struct map
        struct identifier ignored_any
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Call {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        parts
            .extensions
            .get::<Call>()
            .copied()
            .ok_or_else(|| Problem::new(ErrorCode::Internal, "nobody identified the caller"))
    }
}

#[cfg(test)]
mod tests {
    use pepo_api::query::{ListSessions, ShowCommand, UnderPath};
    use pepo_api::{CreateSession, SessionState};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_field_is_named_with_its_place() {
        let refused = |text: &str| parse::<CreateSession>(text.as_bytes()).expect_err("refused").0;
        let error = refused(r#"{"memory_mb": 5}"#);
        assert_eq!((error.code, error.param.as_deref()), (ErrorCode::Invalid, Some("memory_mb")));
        assert_eq!(error.hint.as_deref(), Some("did you mean `memory_mib`?"));
        assert_eq!(refused(r#"{"cpus": "two"}"#).param.as_deref(), Some("cpus"));
        assert_eq!(refused(r#"{"network": {"mode": "wide"}}"#).param.as_deref(), Some("network.mode"));
        assert_eq!(refused(r#"{"network": {"mode": "none", "x": 1}}"#).param.as_deref(), Some("network.x"));
        assert_eq!(refused(r#"{"network": {}}"#).param.as_deref(), Some("network.mode"));
        assert_eq!(refused(" [null, null]").code, ErrorCode::Invalid);
        assert_eq!(refused("{").code, ErrorCode::BadRequest);
        assert_eq!(refused("{} x").code, ErrorCode::BadRequest);
        assert!(parse::<CreateSession>(b"").is_ok());
    }

    #[test]
    fn queries_are_typed() {
        let list: ListSessions = query("label=a%3Db&label=c=d&state=active&limit=5").map_err(|p| p.0).expect("query");
        assert_eq!(list.label, ["a=b", "c=d"]);
        assert_eq!((list.state, list.limit), (Some(SessionState::Active), Some(5)));
        let show: ShowCommand = query("follow=false&offset=7").map_err(|p| p.0).expect("query");
        assert_eq!((show.follow, show.offset), (Some(false), Some(7)));
        let refused = |text: &str| query::<ShowCommand>(text).expect_err("refused").0;
        assert_eq!(refused("offset=x").param.as_deref(), Some("offset"));
        assert_eq!(refused("ofset=1").hint.as_deref(), Some("did you mean `offset`?"));
        assert_eq!(refused("offset=1&offset=2").param.as_deref(), Some("offset"));
        assert_eq!(query::<UnderPath>("").expect_err("refused").0.param.as_deref(), Some("path"));
        let path: UnderPath = query("path=/a%20b&recursive=true").map_err(|p| p.0).expect("query");
        assert_eq!((path.path.as_str(), path.recursive), ("/a b", Some(true)));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,60}") {
            let _ = query::<ListSessions>(&text);
            let _ = parse::<CreateSession>(text.as_bytes());
        }
    }
}
