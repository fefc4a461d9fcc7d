//! From a path to a row of the table. Only rows of tenants exist here; an operator's path is unknown like any other.

use std::borrow::Cow;
use std::sync::LazyLock;

use http::Method;
use pepo_api::{Audience, REST, ROUTES, Route, route};

/// What a path leads to.
#[derive(Debug)]
pub enum Found {
    /// A tenant's row.
    Row(&'static Route),
    /// `/healthz`: whether this process lives.
    Healthz,
    /// `/readyz`: whether requests would be served.
    Readyz,
    /// The API's description, and the page of it.
    Description(&'static Route),
    /// The path is there, with these methods.
    WrongMethod(Vec<&'static Method>),
    /// Nothing.
    Nothing,
}

/// A row with its pattern cut at the slashes.
struct Pattern {
    row: &'static Route,
    words: Vec<&'static str>,
}

/// The rows that exist here.
static PATTERNS: LazyLock<Vec<Pattern>> = LazyLock::new(|| {
    let here = |row: &&Route| matches!(row.audience, Audience::Tenant | Audience::Anyone);
    ROUTES.iter().filter(here).map(|row| Pattern { row, words: row.path.split('/').collect() }).collect()
});

/// Finds the row of a method and a path as sent. Where a word and a parameter both fit, the word wins.
pub fn find(method: &Method, path: &str) -> Found {
    if path.len() > LONGEST {
        return Found::Nothing;
    }
    let given: Vec<&str> = path.split('/').collect();
    let mut best: Option<(usize, &'static Route)> = None;
    for pattern in PATTERNS.iter().filter(|pattern| pattern.row.method == method) {
        let Some(words) = pattern.fits(&given) else { continue };
        if best.is_none_or(|(most, _)| words > most) {
            best = Some((words, pattern.row));
        }
    }
    match best {
        Some((_, row)) if row.audience == Audience::Tenant => Found::Row(row),
        Some((_, row)) if row.path == route::healthz.path => Found::Healthz,
        Some((_, row)) if [route::openapi.path, route::reference.path].contains(&row.path) => Found::Description(row),
        Some(_) => Found::Readyz,
        None => {
            let others = PATTERNS.iter().filter(|pattern| pattern.fits(&given).is_some());
            let methods: Vec<_> = others.map(|pattern| pattern.row.method).collect();
            if methods.is_empty() { Found::Nothing } else { Found::WrongMethod(methods) }
        }
    }
}

impl Pattern {
    /// How many segments of a path are words of the pattern rather than parameters, if it fits.
    fn fits(&self, given: &[&str]) -> Option<usize> {
        let takes_rest = self.words.last() == Some(&REST);
        let wanted = &self.words[..self.words.len() - usize::from(takes_rest)];
        let (segments, rest) = given.split_at_checked(wanted.len())?;
        if rest.is_empty() == takes_rest {
            return None;
        }
        // Words first: most rows differ in one, and parameters are looked at letter by letter.
        let is_word = |wanted: &str| !wanted.starts_with('{');
        let pairs = || wanted.iter().zip(segments);
        if pairs().any(|(wanted, segment)| is_word(wanted) && wanted != segment) {
            return None;
        }
        let parameters_are_plain = pairs().all(|(wanted, segment)| is_word(wanted) || plain(segment));
        // What is a guest's to read is its own, but for what readers on the way there might take for another path.
        let fits = parameters_are_plain && !rest.iter().any(|segment| dotted(segment));
        fits.then(|| wanted.iter().filter(|wanted| is_word(wanted)).count())
    }
}

/// The longest path.
const LONGEST: usize = 4096;

/// The segment without what may be encoded in it and matters.
fn decoded(segment: &str) -> Cow<'_, str> {
    match segment.contains('%') {
        true => segment.to_ascii_lowercase().replace("%2e", ".").into(),
        false => segment.into(),
    }
}

/// Whether a reader may take it for a way up.
fn dotted(segment: &str) -> bool {
    matches!(&*decoded(segment), "." | "..")
}

/// Whether two readers can only see the same parameter in it: not empty, no dots, no slash or NUL of any kind.
fn plain(segment: &str) -> bool {
    let decoded = decoded(segment);
    let odd = || ["%2f", "%5c", "%00", "\\"].iter().any(|odd| decoded.contains(odd));
    !matches!(&*decoded, "" | "." | "..") && !odd()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(method: Method, path: &str) -> String {
        match find(&method, path) {
            Found::Row(row) => row.name.into(),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn every_tenant_row_is_found_by_its_own_path() {
        for row in ROUTES.iter().filter(|row| row.audience == Audience::Tenant) {
            let path: Vec<&str> = row.path.split('/').map(|s| if s.starts_with('{') { "x1" } else { s }).collect();
            assert_eq!(name(row.method.clone(), &path.join("/")), row.name);
            if let Some(before) = row.before_rest() {
                let before = before.replace("{session}", "s").replace("{port}", "80");
                for rest in ["", "a/b", "a//b/", "%2f", ".well-known/x", "a..b", "%zz"] {
                    assert_eq!(name(row.method.clone(), &format!("{before}{rest}")), row.name, "{rest}");
                }
                for rest in ["..", "a/../b", "a/%2E%2e/b", "./a", "a/."] {
                    assert_eq!(name(row.method.clone(), &format!("{before}{rest}")), "Nothing", "{rest}");
                }
                assert_eq!(name(row.method.clone(), before.trim_end_matches('/')), "Nothing");
            }
        }
    }

    #[test]
    fn no_row_of_the_operator_or_the_edge_is_reachable() {
        for row in ROUTES.iter().filter(|row| matches!(row.audience, Audience::Operator | Audience::Edge)) {
            let path: Vec<&str> = row.path.split('/').map(|s| if s.starts_with('{') { "x1" } else { s }).collect();
            assert!(
                !matches!(find(row.method, &path.join("/")), Found::Row(found) if found.name == row.name),
                "{}",
                row.name
            );
        }
        assert_eq!(name(Method::POST, "/v1/down"), "Nothing");
        assert_eq!(name(Method::GET, "/v1/edge/state"), "Nothing");
    }

    #[test]
    fn paths_that_two_readers_may_see_differently_are_nothing() {
        for path in [
            "/v1//sessions",
            "/v1/./sessions",
            "/v1/images/../sessions",
            "/v1/images/%2e%2E/sessions",
            "/v1/sessions/",
            "/v1/sessions/a%2Fb",
            "/v1/sessions/a%5cb",
            "/v1/sessions/a\\b",
            "/v1/sessions/%00",
            "/v1/sessions/%2e%2e/ports/80/",
            "/v1/sessions/a%2Fb/ports/80/",
            "/v1/sessions//ports/80/",
            "v1/sessions",
            "",
            "*",
        ] {
            assert_eq!(name(Method::GET, path), "Nothing", "{path}");
        }
    }

    #[test]
    fn a_wrong_method_says_which_there_are() {
        match find(&Method::PUT, "/v1/sessions") {
            Found::WrongMethod(methods) => assert_eq!(methods, [&Method::POST, &Method::GET]),
            other => panic!("{other:?}"),
        }
    }
}
