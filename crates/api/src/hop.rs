//! Headers that are one connection's, which nobody who stands between two passes on (RFC 9110, 7.6.1).

use http::HeaderMap;
use http::header::CONNECTION;

/// Those that always are.
const ALWAYS: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// What `Connection` names.
pub fn named(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

/// Whether the connection is to change to this protocol.
pub fn changes_to(headers: &HeaderMap, protocol: &str) -> bool {
    let asked = headers.get("upgrade").is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(protocol.as_bytes()));
    asked && named(headers).any(|name| name.eq_ignore_ascii_case("upgrade"))
}

/// The others that `passes` lets pass.
pub fn kept(headers: &HeaderMap, passes: impl Fn(&str) -> bool) -> HeaderMap {
    let dropped: Vec<String> = named(headers).map(str::to_ascii_lowercase).collect();
    let mut kept = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        let name_text = name.as_str();
        if !ALWAYS.contains(&name_text) && !dropped.iter().any(|dropped| dropped == name_text) && passes(name_text) {
            kept.append(name.clone(), value.clone());
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use http::header::{HeaderName, UPGRADE};

    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pair =
            |(name, value): &(&str, &str)| (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap());
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn what_is_a_connections_stays_there() {
        let given = headers(&[
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("accept", "a"),
            ("x-other", "b"),
        ]);
        let kept = kept(&given, |name| name != "x-other");
        assert_eq!(kept.len(), 1);
        assert_eq!(kept["accept"], "a");
    }

    #[test]
    fn a_change_of_protocol_is_asked_for_twice() {
        let mut both = headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "WebSocket")]);
        assert!(changes_to(&both, "websocket") && !changes_to(&both, "h2c"));
        both.remove(CONNECTION);
        assert!(!changes_to(&both, "websocket"));
        both.remove(UPGRADE);
        assert!(!changes_to(&both, "websocket"));
    }
}
