//! Apps: what each one is set to, in memory for every request, and in the store.
//!
//! Owns the only way to change one. A change is decided by the store (the row's version), so of two at once the slower is
//! refused; what is in memory follows it. An App's file is its settings as TOML: applying it, or changing a setting by the
//! API, is the same change and makes a new version of the file.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use pepo_api::{AppId, AppSettings, Change};
use serde_json::Value;

use crate::store::{self, Actor, AppRow, ChangedApp, Event, Store, Write};

/// The longest App file, bytes.
pub const FILE_BYTES: usize = 64 * 1024;

/// All Apps.
pub struct Apps {
    store: Store,
    default: AppId,
    known: RwLock<HashMap<AppId, Arc<AppRow>>>,
}

/// What an App shall become.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// Its settings.
    pub settings: AppSettings,
    /// Its file, where it was given as text; else it is written from the settings.
    pub text: Option<String>,
}

impl Apps {
    /// Those that the store has.
    ///
    /// # Errors
    /// A disk that fails.
    pub fn open(store: Store) -> Result<Self, store::Error> {
        let default = store.default_app()?;
        let known = store.apps()?.into_iter().map(|app| (app.id, Arc::new(app))).collect();
        Ok(Apps { store, default, known: RwLock::new(known) })
    }

    /// The App of everybody who names none.
    pub fn default(&self) -> AppId {
        self.default
    }

    /// The App of that id.
    pub fn get(&self, app: AppId) -> Option<Arc<AppRow>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).get(&app).cloned()
    }

    /// The App of that name or id.
    pub fn find(&self, which: &str) -> Option<Arc<AppRow>> {
        match which.parse() {
            Ok(id) => self.get(id),
            Err(_) => {
                let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
                known.values().find(|app| app.name == which).cloned()
            }
        }
    }

    /// All of them, oldest first.
    pub fn all(&self) -> Vec<Arc<AppRow>> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = known.values().cloned().collect();
        all.sort_by_key(|app| app.id);
        all
    }

    fn learn(&self, row: AppRow) -> Arc<AppRow> {
        let row = Arc::new(row);
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        // Of two changes that are on the disk the later one stands, whichever comes here first.
        match known.get(&row.id) {
            Some(newer) if newer.version >= row.version => newer.clone(),
            _ => {
                known.insert(row.id, row.clone());
                row
            }
        }
    }

    /// Makes one.
    ///
    /// # Errors
    /// The name is taken.
    pub async fn create(&self, id: AppId, wanted: Wanted, actor: Actor) -> Result<Arc<AppRow>, store::Error> {
        let Wanted { name, settings, text } = wanted;
        let text = text.unwrap_or_else(|| render(&settings));
        let row = AppRow { id, name, settings, version: 1, created_at: store::time(store::millis(now())) };
        self.store.write(Write::NewApp(Box::new(ChangedApp { row: row.clone(), text, actor }))).await?;
        let event = Event::new("app.created").app(row.id).actor(actor).detail("name", &row.name);
        self.store.record(event);
        Ok(self.learn(row))
    }

    /// Makes that one into what is wanted; `before` is what the caller has looked at.
    ///
    /// # Errors
    /// The name is taken, or somebody else was faster.
    pub async fn change(&self, before: &AppRow, wanted: Wanted, actor: Actor) -> Result<Arc<AppRow>, store::Error> {
        let Wanted { name, settings, text } = wanted;
        let text = text.unwrap_or_else(|| render(&settings));
        let row = AppRow { name, settings, version: before.version + 1, ..before.clone() };
        self.store.write(Write::App(Box::new(ChangedApp { row: row.clone(), text, actor }))).await?;
        let settings: Vec<_> = changes(&before.settings, &row.settings).into_iter().map(|c| c.setting).collect();
        let event = Event::new("app.updated").app(row.id).actor(actor).detail("version", row.version);
        self.store.record(event.detail("settings", settings));
        Ok(self.learn(row))
    }

    /// Removes one, with its keys.
    ///
    /// # Errors
    /// A Session of it lives.
    pub async fn remove(&self, app: &AppRow, actor: Actor) -> Result<(), store::Error> {
        self.store.write(Write::RemoveApp(app.id)).await?;
        self.known.write().unwrap_or_else(PoisonError::into_inner).remove(&app.id);
        self.store.record(Event::new("app.removed").app(app.id).actor(actor).detail("name", &app.name));
        Ok(())
    }
}

fn now() -> jiff::Timestamp {
    jiff::Timestamp::now()
}

/// Settings as an App file. What is not set is not in it.
pub fn render(settings: &AppSettings) -> String {
    toml::to_string_pretty(settings).unwrap_or_default()
}

/// Why a text is not an App file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FileError {
    /// The setting, where it is about one.
    pub setting: String,
    /// What is wrong, with the line.
    pub message: String,
}

/// The settings that an App file says.
///
/// # Errors
/// Not TOML, or not our settings.
pub fn parse(text: &str) -> Result<AppSettings, FileError> {
    let wrong = |setting: String, error: toml::de::Error| {
        let line = error.span().map(|span| 1 + text.bytes().take(span.start).filter(|byte| *byte == b'\n').count());
        let place = line.map_or_else(String::new, |line| format!("line {line}: "));
        let said: String = error.message().chars().take(300).flat_map(escaped).collect();
        FileError { setting, message: format!("{place}{said}") }
    };
    let file = toml::de::Deserializer::parse(text).map_err(|error| wrong(String::new(), error))?;
    serde_path_to_error::deserialize(file).map_err(|error| {
        let path = error.path().to_string();
        wrong(if path == "." { String::new() } else { path }, error.into_inner())
    })
}

fn escaped(c: char) -> Vec<char> {
    if c.is_control() { c.escape_default().collect() } else { vec![c] }
}

/// What is set otherwise in the second than in the first.
pub fn changes(before: &AppSettings, after: &AppSettings) -> Vec<Change> {
    let (mut old, mut new) = (BTreeMap::new(), BTreeMap::new());
    leaves("", &serde_json::to_value(before).unwrap_or_default(), &mut old);
    leaves("", &serde_json::to_value(after).unwrap_or_default(), &mut new);
    let names: std::collections::BTreeSet<_> = old.keys().chain(new.keys()).cloned().collect();
    names
        .into_iter()
        .map(|setting| Change { before: old.get(&setting).cloned(), after: new.get(&setting).cloned(), setting })
        .filter(|change| change.before != change.after)
        .collect()
}

fn leaves(path: &str, value: &Value, into: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                leaves(&path, value, into);
            }
        }
        value => {
            into.insert(path.to_owned(), value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
# The shop's agents.
[labels]
team = \"shop\"

[defaults]
image = \"base-dev\"
cpus = 2
keep_alive_seconds = 60

[limits]
memory_mib = 4096

[quota]
sessions = 100

[network]
mode = \"allow\"
egress_bytes_per_second = 1000000

[[network.allow]]
domain = \"*.example.com\"
ports = [443]

[[network.allow]]
preset = \"pypi\"
";

    #[test]
    fn a_file_says_settings_and_settings_write_a_file() {
        let settings = parse(FILE).expect("file");
        assert_eq!(settings.labels["team"], "shop");
        assert_eq!((settings.defaults.cpus, settings.quota.sessions), (Some(2), Some(100)));
        assert_eq!(parse(&render(&settings)), Ok(settings.clone()));
        assert_eq!(render(&AppSettings::default()), "");
        assert_eq!(parse(""), Ok(AppSettings::default()));
        assert!(changes(&settings, &settings).is_empty());
        let mut other = settings.clone();
        other.defaults.cpus = None;
        other.limits.cpus = Some(4);
        other.labels.insert("team".into(), "x".into());
        let told: Vec<_> = changes(&settings, &other)
            .into_iter()
            .map(|change| format!("{} {:?} {:?}", change.setting, change.before, change.after))
            .collect();
        assert_eq!(
            told,
            [
                "defaults.cpus Some(Number(2)) None",
                "labels.team Some(String(\"shop\")) Some(String(\"x\"))",
                "limits.cpus None Some(Number(4))"
            ]
        );
    }

    #[test]
    fn what_is_wrong_has_its_line_and_its_setting() {
        let refused = |text: &str| parse(text).expect_err(text);
        let error = refused("[defaults]\ncpus = 2\nmemory = 3\n");
        assert_eq!(error.setting, "defaults.memory");
        assert!(error.message.contains("line 3") && error.message.contains("memory_mib"), "{error}");
        let error = refused("[defaults]\ncpus = \"two\"\n");
        assert_eq!(error.setting, "defaults.cpus");
        assert!(refused("[networks]\nmode = \"none\"\n").message.contains("networks"));
        assert!(refused("a = ").message.contains("line 1"));
        assert!(!refused("\"\u{1b}[2J\" = 1").message.contains('\u{1b}'));
    }

    #[tokio::test]
    async fn of_two_changes_at_once_one_is_refused_and_memory_follows_the_disk() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(&directory.path().join("s.db")).expect("store");
        let apps = Apps::open(store.clone()).expect("apps");
        let made = Wanted { name: "shop".into(), settings: parse(FILE).expect("file"), text: Some(FILE.into()) };
        let app = apps.create(AppId::generate(), made.clone(), Actor::Uid(0)).await.expect("made");
        assert!(matches!(
            apps.create(AppId::generate(), made.clone(), Actor::Uid(0)).await,
            Err(store::Error::NameTaken(_))
        ));
        let other = Wanted { name: "shop-2".into(), settings: AppSettings::default(), text: None };
        let (one, two) =
            tokio::join!(apps.change(&app, other.clone(), Actor::Uid(0)), apps.change(&app, other, Actor::Uid(0)));
        assert!(one.is_ok() != two.is_ok());
        assert_eq!(apps.find("shop-2").expect("there").version, 2);
        assert!(apps.find("shop").is_none());
        assert_eq!(store.app_file(app.id, 1).await.expect("read").as_deref(), Some(FILE));
        let again = Apps::open(store).expect("apps");
        assert_eq!(again.all(), apps.all());
        let shop = apps.find("shop-2").expect("there");
        apps.remove(&shop, Actor::Uid(0)).await.expect("removed");
        assert!(apps.find("shop-2").is_none() && apps.get(app.id).is_none());
    }
}
