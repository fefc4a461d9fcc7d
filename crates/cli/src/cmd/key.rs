//! `pepo key …`: keys of one App. A key's text is shown once, by whoever made it.

use clap::{Args, Subcommand};
use pepo_api::query::{AskKey, ListKeys};
use pepo_api::{CreateKey, Key as Record, KeyCan, NewKey, RotateKey, Scope};

use crate::fail::{self, Outcome};
use crate::place::Place;
use crate::{render, value};

#[derive(Debug, Subcommand)]
pub enum Key {
    /// Make a key, print its text: the only time that it is shown
    Create(Create),
    /// List keys
    Ls(Ls),
    /// Make a key that takes another one's place; the old one is valid for a while yet
    Rotate(Rotate),
    /// Say whether a key could do that, and why
    Can(Can),
    /// End a key: when this returns it lets nobody in
    Revoke(Revoke),
}

#[derive(Debug, Args)]
pub struct Create {
    /// What it is for
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// What it may do: sessions:read, commands:*, …; may be given several times [default: *]
    #[arg(long = "scope", value_name = "SCOPE", value_parser = scope)]
    scopes: Vec<Scope>,
    /// Also the App's administration: its keys, settings, file and audit log
    #[arg(long)]
    admin: bool,
    /// How long it is valid (a bare number is seconds; 1h, 30d)
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    expires: Option<u64>,
    /// Where it may be used from, an address or a range; may be given several times
    #[arg(long = "source", value_name = "RANGE")]
    sources: Vec<String>,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct Ls {
    /// Also those that are revoked or over
    #[arg(short, long)]
    all: bool,
    /// Print ids alone
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct Rotate {
    /// How long the old one stays valid (0: not at all) [default: 1d]
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    overlap: Option<u64>,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The key, by id or name
    #[arg(value_name = "KEY")]
    which: String,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples: pepo key can ci commands:run web\n          pepo key can ci dial web:3000\n          pepo key can ci session_create"
)]
pub struct Can {
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The key, by id or name
    #[arg(value_name = "KEY")]
    which: String,
    /// A scope's word (commands:run) or a route's name (command_create)
    #[arg(value_name = "ACTION")]
    action: String,
    /// What it is done to: a Session, Workspace, Image or key by id or name, SES:PORT; left out: the App
    #[arg(value_name = "RESOURCE")]
    resource: Option<String>,
}

#[derive(Debug, Args)]
pub struct Revoke {
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The key, by id or name
    #[arg(value_name = "KEY")]
    which: String,
}

fn scope(text: &str) -> Result<Scope, String> {
    text.parse().map_err(|error: pepo_api::ScopeError| error.to_string())
}

impl Key {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        match self {
            Key::Create(verb) => {
                let admin = verb.admin.then(Scope::admin);
                let body = CreateKey {
                    name: verb.name.clone(),
                    scopes: verb.scopes.iter().cloned().chain(admin).collect(),
                    expires_seconds: verb.expires,
                    sources: verb.sources.clone(),
                };
                print(&client.key_create(&body).await?, verb.json)
            }
            Key::Ls(verb) => {
                let keys = client.key_list(&ListKeys { all: verb.all.then_some(true) }).await?.items;
                if verb.json {
                    render::json(&keys)?;
                } else if verb.quiet {
                    keys.iter().try_for_each(|key| render::say(&key.id.to_string()))?;
                } else {
                    render::out(&table(&keys, jiff::Timestamp::now()))?;
                }
                Ok(0)
            }
            Key::Rotate(verb) => {
                print(&client.key_rotate(&verb.which, &RotateKey { overlap_seconds: verb.overlap }).await?, verb.json)
            }
            Key::Can(verb) => {
                let query = AskKey { action: verb.action.clone(), resource: verb.resource.clone() };
                let told = client.key_can(&verb.which, &query).await?;
                match verb.json {
                    true => render::json(&told)?,
                    false => render::say(&answer(&told))?,
                }
                Ok(if told.allowed { 0 } else { 1 })
            }
            Key::Revoke(verb) => {
                let key = client.key_revoke(&verb.which).await?;
                if verb.json {
                    render::json(&key)?
                } else {
                    render::say(&key.id.to_string())?
                }
                Ok(0)
            }
        }
    }
}

fn answer(told: &KeyCan) -> String {
    let word = if told.allowed { "yes" } else { "no" };
    let from = match told.sources.as_slice() {
        [] => String::new(),
        sources => format!("; from {} alone", sources.join(", ")),
    };
    format!("{word}: {}{from}", told.because)
}

/// The text alone on standard output, so that it can go straight to where it is kept.
fn print(key: &NewKey, json: bool) -> Outcome<u8> {
    if json {
        render::json(key)?;
    } else {
        render::say(&key.key)?;
        fail::note(format!("{}; its text is not shown again", key.about.id));
    }
    Ok(0)
}

fn table(keys: &[Record], now: jiff::Timestamp) -> String {
    let rows: Vec<_> = keys
        .iter()
        .map(|key| {
            vec![
                key.id.to_string(),
                key.name.clone().unwrap_or_else(|| "-".into()),
                format!("{}…", key.prefix),
                key.scopes.iter().map(Scope::as_str).collect::<Vec<_>>().join(" "),
                if key.sources.is_empty() { "any".into() } else { key.sources.join(" ") },
                state(key, now),
                key.created_by.clone(),
                render::ago(key.created_at, now),
            ]
        })
        .collect();
    render::table(&["ID", "NAME", "BEGINS", "SCOPES", "FROM", "STATE", "BY", "CREATED"], &rows)
}

fn state(key: &Record, now: jiff::Timestamp) -> String {
    match (key.revoked_at, key.expires_at) {
        (Some(_), _) => "revoked".into(),
        (None, Some(at)) if at <= now => "over".into(),
        (None, Some(at)) => format!("until {}", render::time(at)),
        (None, None) => "valid".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(at: jiff::Timestamp) -> Record {
        Record {
            id: pepo_api::KeyId::generate(),
            app_id: pepo_api::AppId::generate(),
            name: None,
            prefix: "pepo_0123abcd".into(),
            scopes: vec![scope("sessions:*").unwrap(), scope("files:read").unwrap()],
            sources: vec![],
            created_by: "uid:0".into(),
            created_at: at,
            expires_at: None,
            revoked_at: None,
            replaced_by: None,
        }
    }

    #[test]
    fn a_key_is_shown_without_its_text() {
        let now = jiff::Timestamp::from_second(1_800_000_000).unwrap();
        let shown = table(&[key(now)], now);
        let line = shown.lines().nth(1).unwrap();
        assert!(line.contains("pepo_0123abcd…") && line.contains("sessions:* files:read"), "{line}");
        assert!(line.contains("any") && line.contains("valid") && line.ends_with("now"), "{line}");
        let mut over = key(now);
        over.expires_at = Some(now);
        assert_eq!(state(&over, now), "over");
        over.revoked_at = Some(now);
        assert_eq!(state(&over, now), "revoked");
        assert!(scope("sessions").unwrap_err().contains("sessions:read"));
    }
}
