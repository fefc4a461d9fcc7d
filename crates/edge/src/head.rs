//! What of a head may pass, in both directions. A connection's own headers end here, so does whatever authenticated the
//! caller, and nobody outside can speak for us in a `Pepo-` header.

use std::net::IpAddr;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Uri, Version};
use pepo_api::{Action, Answer, DIAL_UPGRADE, PORT_PROTOCOL, RequestId, Route, TOKEN_PREFIX, hop};

use crate::auth::Caller;

/// The App that a request is for, told to the daemon.
pub const APP: HeaderName = HeaderName::from_static("pepo-app");
/// The key that a request came with, told to the daemon.
pub const KEY: HeaderName = HeaderName::from_static("pepo-key");
/// Who a request came from where that is no key, told to the daemon.
pub const ACTOR: HeaderName = HeaderName::from_static("pepo-actor");
/// What they may do, told to the daemon where something of it can be handed on.
pub const SCOPES: HeaderName = HeaderName::from_static("pepo-scopes");
/// The address it came from, told to the daemon.
pub const SOURCE: HeaderName = HeaderName::from_static("pepo-source");
/// What stands before a Session token among a WebSocket's protocols: a browser can send nothing else with one.
pub const BEARER_PROTOCOL: &str = "pepo.bearer.";
/// That a port was asked for by its own host name, told to the daemon: by whom.
pub const NAMED: HeaderName = HeaderName::from_static("pepo-named");
/// The request's id, told to both sides.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("pepo-request-id");

/// What ends here beside the headers of a connection.
const ENDS_HERE: &[&str] = &["authorization", "cookie", "expect", "host", "forwarded"];

/// Why a head is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A proxy's form of the target.
    #[error("the request's target must be a path")]
    Target,
    /// HTTP/1.1 wants one.
    #[error("exactly one Host header is needed")]
    Host,
    /// Two lengths, or one that is not a length.
    #[error("the length of the body is told in more than one way")]
    Length,
}

/// Refuses heads that two readers could understand differently. hyper has refused what cannot be parsed at all.
///
/// # Errors
/// See [`Refused`].
pub fn admit(head: &Parts) -> Result<(), Refused> {
    let count = |name: HeaderName| head.headers.get_all(name).iter().count();
    let hosts = count(header::HOST);
    // HTTP/2 always says both; its own rules leave the rest no second meaning.
    if head.version == Version::HTTP_2 {
        let authority = head.uri.authority().map(|authority| authority.as_str().as_bytes());
        let differs = head.headers.get(header::HOST).is_some_and(|host| Some(host.as_bytes()) != authority);
        return match hosts > 1 || differs || authority.is_none() {
            true => Err(Refused::Host),
            false if count(header::CONTENT_LENGTH) > 1 => Err(Refused::Length),
            false => Ok(()),
        };
    }
    if head.uri.authority().is_some() || head.uri.scheme().is_some() {
        return Err(Refused::Target);
    }
    if hosts > 1 || (hosts == 0 && head.version == Version::HTTP_11) {
        return Err(Refused::Host);
    }
    let (lengths, encodings) = (count(header::CONTENT_LENGTH), count(header::TRANSFER_ENCODING));
    let chunked = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"chunked");
    let odd = head.headers.get(header::TRANSFER_ENCODING).is_some_and(|value| !chunked(value));
    if lengths + encodings > 1 || odd {
        return Err(Refused::Length);
    }
    Ok(())
}

/// The protocol that a request asks to change to, where the row has it.
pub fn upgrade(row: &Route, headers: &HeaderMap) -> Option<&'static str> {
    let protocol = match row.answer {
        Answer::WebSocket | Answer::Guest => "websocket",
        Answer::Upgrade => DIAL_UPGRADE,
        _ => return None,
    };
    hop::changes_to(headers, protocol).then_some(protocol)
}

fn keep(headers: &HeaderMap) -> HeaderMap {
    hop::kept(headers, |name| {
        !ENDS_HERE.contains(&name) && !name.starts_with("pepo-") && !name.starts_with("x-forwarded-")
    })
}

fn text(value: impl std::fmt::Display) -> HeaderValue {
    // Ids are letters, digits and an underscore.
    HeaderValue::try_from(value.to_string()).unwrap_or_else(|_| HeaderValue::from_static("invalid"))
}

/// The headers for the daemon. The body's length is put in again where the body goes.
pub fn to_daemon(
    headers: &HeaderMap,
    row: &Route,
    caller: &Caller,
    from: IpAddr,
    id: RequestId,
    upgrade: Option<&'static str>,
) -> HeaderMap {
    let mut kept = keep(headers);
    kept.remove(header::CONTENT_LENGTH);
    if kept.remove(header::SEC_WEBSOCKET_PROTOCOL).is_some() && upgrade.is_some() {
        let ours = |protocol: &str| protocol.starts_with(BEARER_PROTOCOL) || protocol == PORT_PROTOCOL;
        let rest: Vec<&str> = protocols(headers).filter(|protocol| !ours(protocol)).collect();
        if !rest.is_empty() {
            kept.insert(header::SEC_WEBSOCKET_PROTOCOL, text(rest.join(", ")));
        }
    }
    kept.insert(header::HOST, HeaderValue::from_static("pepod"));
    kept.insert(APP, text(caller.app));
    if let Some(key) = caller.who.key() {
        kept.insert(KEY, text(key));
    }
    if let Some(name) = caller.who.name() {
        kept.insert(ACTOR, text(name));
    }
    kept.insert(SOURCE, text(from));
    if row.action == Action::TokensWrite {
        let words: Vec<&str> = caller.scopes.iter().map(pepo_api::Scope::as_str).collect();
        kept.insert(SCOPES, text(words.join(" ")));
    }
    kept.insert(REQUEST_ID, text(id));
    if let Some(protocol) = upgrade {
        kept.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        kept.insert(header::UPGRADE, HeaderValue::from_static(protocol));
    }
    kept
}

/// The headers for a caller whose connection changes its protocol. A browser that named protocols wants one of them: where
/// a program in the guest chose none, it is [`PORT_PROTOCOL`], if that was among them.
pub fn to_switching(asked: &HeaderMap, headers: &HeaderMap, id: RequestId, upgrade: &'static str) -> HeaderMap {
    let mut kept = to_caller(headers, id, Some(upgrade));
    if !kept.contains_key(header::SEC_WEBSOCKET_PROTOCOL) && protocols(asked).any(|protocol| protocol == PORT_PROTOCOL)
    {
        kept.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(PORT_PROTOCOL));
    }
    kept
}

/// The headers for the caller. The daemon's own `Pepo-` headers pass: they are answers.
pub fn to_caller(headers: &HeaderMap, id: RequestId, upgrade: Option<&'static str>) -> HeaderMap {
    let mut kept = keep(headers);
    for (name, value) in headers.iter().filter(|(name, _)| name.as_str().starts_with("pepo-")) {
        kept.append(name.clone(), value.clone());
    }
    kept.insert(REQUEST_ID, text(id));
    // Bytes of a guest may be the body: no browser may guess what they are, and no cache keep them.
    kept.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    kept.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    if let Some(protocol) = upgrade {
        kept.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        kept.insert(header::UPGRADE, HeaderValue::from_static(protocol));
    }
    kept
}

/// Path and query, as they came.
pub fn target(uri: &Uri) -> Uri {
    uri.path_and_query().map_or_else(|| Uri::from_static("/"), |both| Uri::from(both.clone()))
}

/// The protocols that a WebSocket is asked for with.
fn protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let all = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
    all.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(',')).map(str::trim)
}

/// The one Session token among a WebSocket's protocols. A key is not taken from there: it does not belong into a browser.
pub fn bearer_protocol(headers: &HeaderMap) -> Option<&[u8]> {
    let mut all = protocols(headers).filter_map(|protocol| protocol.strip_prefix(BEARER_PROTOCOL));
    let token = all.next().filter(|token| token.starts_with(TOKEN_PREFIX))?;
    all.next().is_none().then_some(token.as_bytes())
}

/// The one key in `Authorization: Bearer KEY`.
pub fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut all = headers.get_all(header::AUTHORIZATION).iter();
    let value = all.next()?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    (all.next().is_none() && scheme.eq_ignore_ascii_case(b"bearer ") && !key.is_empty()).then_some(key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use http::Request;
    use pepo_api::{AppId, KeyId, Scope, route};

    use crate::auth::Who;

    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (name.parse::<HeaderName>().expect("name"), HeaderValue::from_str(value).expect("value"))
            })
            .collect()
    }

    fn parts(uri: &str, pairs: &[(&str, &str)]) -> Parts {
        let (mut parts, ()) = Request::get(uri).body(()).expect("request").into_parts();
        parts.headers = HeaderMap::new();
        for (name, value) in pairs {
            parts
                .headers
                .append(name.parse::<HeaderName>().expect("name"), HeaderValue::from_str(value).expect("value"));
        }
        parts
    }

    #[test]
    fn nothing_of_the_callers_connection_or_credential_reaches_the_daemon() {
        let given = headers(&[
            ("authorization", "Bearer secret"),
            ("cookie", "a=b"),
            ("pepo-app", "app_x"),
            ("pepo-anything", "x"),
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("x-forwarded-for", "1.2.3.4"),
            ("forwarded", "for=1"),
            ("upgrade", "h2c"),
            ("host", "evil"),
            ("content-length", "5"),
            ("accept", "text/event-stream"),
            ("last-event-id", "9"),
        ]);
        let key = KeyId::generate();
        let scopes: Vec<Scope> = vec![Scope::all(), Scope::admin()];
        let caller = Caller { app: AppId::generate(), who: Who::Key(key), scopes: scopes.into(), bound: None };
        let id = RequestId::generate();
        let from = IpAddr::from([192, 0, 2, 1]);
        let sent = to_daemon(&given, &route::session_list, &caller, from, id, None);
        let mut names: Vec<&str> = sent.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["accept", "host", "last-event-id", "pepo-app", "pepo-key", "pepo-request-id", "pepo-source"]
        );
        assert_eq!(sent[SOURCE], "192.0.2.1");
        assert_eq!(sent[APP], caller.app.to_string().as_str());
        assert_eq!(sent[header::HOST], "pepod");
        let minting = to_daemon(&given, &route::token_create, &caller, from, id, None);
        assert_eq!(minting[SCOPES], "* app:admin");
        let subject = Caller { who: Who::Subject("idp:corp:me".into()), ..caller };
        let named = to_daemon(&given, &route::session_list, &subject, from, id, None);
        assert!(named.get(KEY).is_none() && named[ACTOR] == "idp:corp:me");
    }

    #[test]
    fn a_browsers_token_is_among_the_protocols_and_goes_no_further() {
        let given = headers(&[("sec-websocket-protocol", "pepo.attach.v1, pepo.bearer.pepot_abc.def")]);
        assert_eq!(bearer_protocol(&given), Some(&b"pepot_abc.def"[..]));
        let caller = Caller {
            app: AppId::generate(),
            who: Who::Token(pepo_api::SessionId::generate()),
            scopes: vec![Scope::all()].into(),
            bound: None,
        };
        let id = RequestId::generate();
        let from = IpAddr::from([192, 0, 2, 1]);
        let sent = to_daemon(&given, &route::command_attach, &caller, from, id, Some("websocket"));
        assert_eq!(sent[header::SEC_WEBSOCKET_PROTOCOL], "pepo.attach.v1");
        assert!(!format!("{sent:?}").contains("pepot_"));
        for odd in ["pepo.bearer.pepo_key", "pepo.bearer.", "pepo.bearer.pepot_a, pepo.bearer.pepot_b", "x"] {
            assert_eq!(bearer_protocol(&headers(&[("sec-websocket-protocol", odd)])), None, "{odd}");
        }
    }

    #[test]
    fn http_2_says_its_host_once() {
        let head = |pairs: &[(&str, &str)]| {
            let mut parts = parts("https://a.example/v1/sessions", pairs);
            parts.version = Version::HTTP_2;
            admit(&parts)
        };
        assert_eq!(head(&[]), Ok(()));
        assert_eq!(head(&[("host", "a.example")]), Ok(()));
        assert_eq!(head(&[("host", "b.example")]), Err(Refused::Host));
        assert_eq!(head(&[("content-length", "1"), ("content-length", "2")]), Err(Refused::Length));
    }

    #[test]
    fn heads_with_two_meanings_are_refused() {
        let host = ("host", "x");
        assert_eq!(admit(&parts("/v1/sessions", &[host])), Ok(()));
        assert_eq!(admit(&parts("http://x/v1/sessions", &[host])), Err(Refused::Target));
        assert_eq!(admit(&parts("/", &[])), Err(Refused::Host));
        assert_eq!(admit(&parts("/", &[host, host])), Err(Refused::Host));
        let both = [host, ("content-length", "1"), ("transfer-encoding", "chunked")];
        assert_eq!(admit(&parts("/", &both)), Err(Refused::Length));
        assert_eq!(admit(&parts("/", &[host, ("content-length", "1"), ("content-length", "1")])), Err(Refused::Length));
        assert_eq!(admit(&parts("/", &[host, ("transfer-encoding", "gzip, chunked")])), Err(Refused::Length));
    }

    #[test]
    fn only_the_rows_own_upgrade_passes() {
        let websocket = headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "WebSocket")]);
        assert_eq!(upgrade(&route::command_attach, &websocket), Some("websocket"));
        assert_eq!(upgrade(&route::port_get, &websocket), Some("websocket"));
        assert_eq!(upgrade(&route::dial, &websocket), None);
        assert_eq!(upgrade(&route::session_list, &websocket), None);
        assert_eq!(upgrade(&route::command_attach, &headers(&[("upgrade", "websocket")])), None);
        assert_eq!(
            upgrade(&route::dial, &headers(&[("connection", "upgrade"), ("upgrade", "pepo-dial")])),
            Some("pepo-dial")
        );
    }

    #[test]
    fn there_is_one_key_or_none() {
        assert_eq!(bearer(&headers(&[("authorization", "bearer pepo_x")])), Some(&b"pepo_x"[..]));
        for value in ["Bearer", "Bearer ", "Basic pepo_x", "pepo_x", ""] {
            assert_eq!(bearer(&headers(&[("authorization", value)])), None, "{value}");
        }
        let two = parts("/", &[("authorization", "Bearer a"), ("authorization", "Bearer b")]);
        assert_eq!(bearer(&two.headers), None);
    }
}
