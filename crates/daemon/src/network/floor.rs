//! What the operator closes and opens of the floor, for people: a finding of `doctor`, and a row of the audit log whenever it
//! is another than in the life before.
//!
//! Only who may write the configuration and start pepod can change it: the half without rights cannot, so there is no
//! route for it. The row says who started pepod, and who that was at the login.

use pepo_api::Check;
use pepo_sandbox::net::Floor;
use serde_json::json;

use crate::config::Config;
use crate::store::{self, Actor, Event, Store, Write};

/// The settings that say it.
const SETTINGS: [&str; 2] = ["network.closed", "network.open"];

/// What was taken off the floor, where anything was.
pub fn finding(floor: &Floor) -> Option<Check> {
    let opened: Vec<String> = floor.open.iter().map(ToString::to_string).collect();
    (!opened.is_empty()).then(|| Check {
        name: "floor".to_owned(),
        severity: pepo_api::Severity::Info,
        found: format!("taken off the floor by network.open, for entries that name it: {}", opened.join(", ")),
        fix: None,
    })
}

/// Takes down who changed the floor, and how.
///
/// # Errors
/// A disk that fails.
pub async fn audit(store: &Store, config: &Config) -> Result<(), store::Error> {
    let said = |key: &str| config.shown().find(|(name, ..)| *name == key);
    let now = json!(SETTINGS.map(|key| said(key).map(|(_, value, _)| value.to_owned()).unwrap_or_default()));
    let before = match store.fact("floor").await? {
        Some(text) => serde_json::from_str(&text).unwrap_or_default(),
        None => json!(["", ""]),
    };
    if before == now {
        return Ok(());
    }
    let mut event = Event::new("floor.changed").of_audit().actor(Actor::Uid(0));
    for (at, key) in SETTINGS.into_iter().enumerate() {
        let name = key.trim_start_matches("network.");
        let origin = said(key).map(|(.., origin)| origin.to_string());
        event = event.detail(name, json!({"before": before[at], "now": now[at], "from": origin}));
    }
    if let Some(login) = login_uid() {
        event = event.detail("login_uid", login);
    }
    store.write(Write::Event(Box::new(event))).await?;
    store.write(Write::Fact("floor", now.to_string())).await
}

/// Who logged in to start this process, where anybody did: the kernel keeps it over sudo and su.
fn login_uid() -> Option<u32> {
    const NOBODY: u32 = u32::MAX;
    let text = std::fs::read_to_string("/proc/self/loginuid").ok()?;
    text.trim().parse().ok().filter(|uid| *uid != NOBODY)
}
