//! `pepo app …`.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use pepo_api::client::Client;
use pepo_api::query::{ApplyFile, ListApps, RemoveApp, ShowFile};
use pepo_api::{App as Record, AppDefaults, AppLimits, AppQuota, AppliedFile, CreateApp, NetworkSpec, UpdateApp};

use crate::fail::{Failure, Outcome};
use crate::place::Place;
use crate::{escape, render, value};

/// The longest App file.
const MOST: u64 = 64 * 1024;

#[derive(Debug, Subcommand)]
pub enum App {
    /// Make an App, print its id
    Create(Create),
    /// List Apps
    Ls(Ls),
    /// Show one App
    Show(One),
    /// Change an App
    Update(Update),
    /// Remove an App with its keys
    Rm(Rm),
    /// Put an App file in force
    Apply(Apply),
    /// Say what an App file would change (exit code 1 where it would)
    Diff(Apply),
    /// Print the App file that is in force, or an earlier version
    Get(Get),
    /// Put an earlier version of the App file in force again
    Rollback(Get),
}

/// What an App is set to.
#[derive(Debug, Default, PartialEq, Eq, Args)]
struct Settings {
    /// Image of a Session that names none
    #[arg(long, value_name = "IMAGE", help_heading = "Defaults of its Sessions")]
    image: Option<String>,
    /// Processors
    #[arg(long, value_name = "N", help_heading = "Defaults of its Sessions")]
    cpus: Option<u32>,
    /// Memory (a bare number is MiB; 512m, 2G)
    #[arg(long, value_name = "SIZE", value_parser = value::mebibytes, help_heading = "Defaults of its Sessions")]
    memory: Option<u32>,
    /// Scratch disk
    #[arg(long, value_name = "SIZE", value_parser = value::mebibytes, help_heading = "Defaults of its Sessions")]
    disk: Option<u32>,
    /// How long a Sandbox stays after the last activity
    #[arg(long, value_name = "TIME", value_parser = value::seconds, help_heading = "Defaults of its Sessions")]
    keep_alive: Option<u64>,
    /// How long a Session lives at the most
    #[arg(long, value_name = "TIME", value_parser = value::seconds, help_heading = "Defaults of its Sessions")]
    expires: Option<u64>,
    /// Processors
    #[arg(long, value_name = "N", help_heading = "The most that one Session may ask for")]
    max_cpus: Option<u32>,
    /// Memory
    #[arg(long, value_name = "SIZE", value_parser = value::mebibytes, help_heading = "The most that one Session may ask for")]
    max_memory: Option<u32>,
    /// Scratch disk
    #[arg(long, value_name = "SIZE", value_parser = value::mebibytes, help_heading = "The most that one Session may ask for")]
    max_disk: Option<u32>,
    /// Keep-alive
    #[arg(long, value_name = "TIME", value_parser = value::seconds, help_heading = "The most that one Session may ask for")]
    max_keep_alive: Option<u64>,
    /// Sessions
    #[arg(long, value_name = "N", help_heading = "The most that all of them may have")]
    quota_sessions: Option<u64>,
    /// Sessions with a Sandbox
    #[arg(long, value_name = "N", help_heading = "The most that all of them may have")]
    quota_sandboxes: Option<u64>,
    /// Memory of those
    #[arg(long, value_name = "SIZE", value_parser = value::mebibytes, help_heading = "The most that all of them may have")]
    quota_memory: Option<u32>,
    /// Processors of those
    #[arg(long, value_name = "N", help_heading = "The most that all of them may have")]
    quota_cpus: Option<u64>,
    /// Commands that run
    #[arg(long, value_name = "N", help_heading = "The most that all of them may have")]
    quota_commands: Option<u64>,
    /// Caps of Workspaces together
    #[arg(long, value_name = "SIZE", value_parser = value::mebibytes, help_heading = "The most that all of them may have")]
    quota_workspaces: Option<u32>,
    /// What its Sessions may reach at the most, and get where they name nothing: `none`, `public`, `allow=ENTRY,…`
    #[arg(long, value_name = "POLICY", value_parser = value::network, help_heading = "The most that one Session may ask for")]
    net: Option<NetworkSpec>,
    /// Requests a second through the Edge API
    #[arg(long, value_name = "N", help_heading = "The most that all of them may have")]
    quota_requests: Option<u64>,
}

impl Settings {
    /// These over those that are there.
    fn over(&self, defaults: AppDefaults, limits: AppLimits, quota: AppQuota) -> (AppDefaults, AppLimits, AppQuota) {
        (
            AppDefaults {
                image: self.image.clone().or(defaults.image),
                cpus: self.cpus.or(defaults.cpus),
                memory_mib: self.memory.or(defaults.memory_mib),
                disk_mib: self.disk.or(defaults.disk_mib),
                keep_alive_seconds: self.keep_alive.or(defaults.keep_alive_seconds),
                expires_seconds: self.expires.or(defaults.expires_seconds),
            },
            AppLimits {
                cpus: self.max_cpus.or(limits.cpus),
                memory_mib: self.max_memory.or(limits.memory_mib),
                disk_mib: self.max_disk.or(limits.disk_mib),
                keep_alive_seconds: self.max_keep_alive.or(limits.keep_alive_seconds),
            },
            AppQuota {
                sessions: self.quota_sessions.or(quota.sessions),
                sandboxes: self.quota_sandboxes.or(quota.sandboxes),
                memory_mib: self.quota_memory.map(u64::from).or(quota.memory_mib),
                cpus: self.quota_cpus.or(quota.cpus),
                commands: self.quota_commands.or(quota.commands),
                workspace_mib: self.quota_workspaces.map(u64::from).or(quota.workspace_mib),
                requests_per_second: self.quota_requests.or(quota.requests_per_second),
            },
        )
    }
}

#[derive(Debug, Args)]
pub struct Create {
    /// A label, KEY=VALUE; may be given several times
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = value::label)]
    labels: Vec<(String, String)>,
    #[command(flatten)]
    settings: Settings,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// Its name
    #[arg(value_name = "NAME")]
    name: String,
}

#[derive(Debug, Args)]
pub struct Ls {
    /// Only those with this label; may be given several times
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    labels: Vec<String>,
    /// Print ids alone
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct One {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The App, by name or id
    #[arg(value_name = "APP", default_value = "default")]
    which: String,
}

#[derive(Debug, Args)]
pub struct Update {
    /// A new name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Labels; all of them, the old ones go
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = value::label)]
    labels: Vec<(String, String)>,
    #[command(flatten)]
    settings: Settings,
    /// Unset a setting, by its name in the App file (quota.sessions); may be given several times
    #[arg(long, value_name = "SETTING")]
    unset: Vec<String>,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The App, by name or id
    #[arg(value_name = "APP")]
    which: String,
}

#[derive(Debug, Args)]
pub struct Rm {
    /// End its Sessions first
    #[arg(short, long)]
    force: bool,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The App, by name or id
    #[arg(value_name = "APP")]
    which: String,
}

#[derive(Debug, Args)]
pub struct Apply {
    /// The file; `-` is standard input
    #[arg(short, long, value_name = "FILE", default_value = "pepo-app.toml")]
    file: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The App, by name or id
    #[arg(value_name = "APP", default_value = "default")]
    which: String,
}

#[derive(Debug, Args)]
pub struct Get {
    /// Which version; for `rollback` the one before the present one where absent
    #[arg(long, value_name = "N")]
    version: Option<u64>,
    /// The App, by name or id
    #[arg(value_name = "APP", default_value = "default")]
    which: String,
}

impl App {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        let client = place.client();
        match self {
            App::Create(verb) => {
                let (defaults, limits, quota) =
                    verb.settings.over(Default::default(), Default::default(), Default::default());
                let labels = verb.labels.iter().cloned().collect();
                let network = verb.settings.net.clone();
                let body = CreateApp {
                    name: verb.name.clone(),
                    labels,
                    defaults,
                    limits,
                    quota,
                    network,
                    ..CreateApp::default()
                };
                print(&client.app_create(&body).await?, verb.json)
            }
            App::Ls(verb) => {
                let apps = client.app_list(&ListApps { label: verb.labels.clone() }).await?.items;
                if verb.json {
                    render::json(&apps)?;
                } else if verb.quiet {
                    apps.iter().try_for_each(|app| render::say(&app.id.to_string()))?;
                } else {
                    render::out(&table(&apps, jiff::Timestamp::now()))?;
                }
                Ok(0)
            }
            App::Show(verb) => {
                let app = client.app_show(&verb.which).await?;
                if verb.json {
                    render::json(&app)?
                } else {
                    render::out(&details(&app)?)?
                }
                Ok(0)
            }
            App::Update(verb) => verb.run(&client).await,
            App::Rm(verb) => {
                let app = client.app_remove(&verb.which, &RemoveApp { force: verb.force.then_some(true) }).await?;
                print(&app, verb.json)
            }
            App::Apply(verb) => verb.run(&client, Mode::Apply).await,
            App::Diff(verb) => verb.run(&client, Mode::Look).await,
            App::Get(verb) => {
                render::out(&escape::text(&file(&client, &verb.which, verb.version).await?))?;
                Ok(0)
            }
            App::Rollback(verb) => verb.roll_back(&client).await,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Apply,
    Look,
}

fn print(app: &Record, json: bool) -> Outcome<u8> {
    if json {
        render::json(app)?
    } else {
        render::say(&app.id.to_string())?
    }
    Ok(0)
}

impl Update {
    async fn run(&self, client: &Client) -> Outcome<u8> {
        let nothing = self.settings == Settings::default() && self.unset.is_empty();
        if self.name.is_none() && self.labels.is_empty() && nothing {
            return Err(Failure::new("nothing to change").hint("`pepo app update --help` lists what can be set"));
        }
        let mut body = UpdateApp {
            name: self.name.clone(),
            labels: (!self.labels.is_empty()).then(|| self.labels.iter().cloned().collect()),
            ..UpdateApp::default()
        };
        if !nothing {
            let now = client.app_show(&self.which).await?.settings;
            let before = (now.defaults.clone(), now.limits.clone(), now.quota.clone());
            let (defaults, limits, quota) = self.settings.over(now.defaults, now.limits, now.quota);
            let (mut defaults, mut limits, mut quota) = (plain(&defaults)?, plain(&limits)?, plain(&quota)?);
            body.network = self.settings.net.clone().map(Some);
            for name in &self.unset {
                if name == "network" && now.network.is_some() {
                    body.network = Some(None);
                    continue;
                }
                let (group, setting) = name.split_once('.').unwrap_or((name, ""));
                let from = match group {
                    "defaults" => &mut defaults,
                    "limits" => &mut limits,
                    "quota" => &mut quota,
                    _ => {
                        return Err(Failure::new(format!("`{name}` is no setting of an App"))
                            .hint("a setting is as in the App file: defaults.image, limits.cpus, quota.sessions"));
                    }
                };
                if from.as_object_mut().and_then(|settings| settings.remove(setting)).is_none() {
                    return Err(Failure::new(format!("{name} is not set")));
                }
            }
            // Only what differs is sent: an App's own administrator may not send a quota.
            body.defaults = Some(typed(defaults)?).filter(|new| *new != before.0);
            body.limits = Some(typed(limits)?).filter(|new| *new != before.1);
            body.quota = Some(typed(quota)?).filter(|new| *new != before.2);
        }
        print(&client.app_update(&self.which, &body).await?, self.json)
    }
}

fn plain<T: serde::Serialize>(group: &T) -> Outcome<serde_json::Value> {
    serde_json::to_value(group).map_err(|error| Failure::new(format!("cannot write JSON: {error}")))
}

fn typed<T: serde::de::DeserializeOwned>(group: serde_json::Value) -> Outcome<T> {
    serde_json::from_value(group).map_err(|error| Failure::new(format!("cannot read JSON: {error}")))
}

impl Apply {
    async fn run(&self, client: &Client, mode: Mode) -> Outcome<u8> {
        let text = read(&self.file)?;
        let query = ApplyFile { dry_run: (mode == Mode::Look).then_some(true), if_version: None };
        let told = client.app_file_apply(&self.which, &query, text).await?;
        if self.json {
            render::json(&told)?;
        } else {
            render::out(&said(&told))?;
        }
        Ok(u8::from(mode == Mode::Look && !told.changes.is_empty()))
    }
}

impl Get {
    async fn roll_back(&self, client: &Client) -> Outcome<u8> {
        let now = client.app_show(&self.which).await?.version;
        let version = match self.version {
            Some(version) => version,
            None if now > 1 => now - 1,
            None => return Err(Failure::new(format!("the App `{}` has no earlier version", self.which))),
        };
        let text = file(client, &self.which, Some(version)).await?;
        let query = ApplyFile { dry_run: None, if_version: Some(now) };
        render::out(&said(&client.app_file_apply(&self.which, &query, text).await?))?;
        Ok(0)
    }
}

/// A version of an App's file, whole.
async fn file(client: &Client, which: &str, version: Option<u64>) -> Outcome<String> {
    let mut stream = client.app_file_show(which, &ShowFile { version }).await?;
    let mut bytes = Vec::new();
    while let Some(piece) = stream.next().await? {
        bytes.extend_from_slice(&piece);
        if bytes.len() as u64 > MOST {
            return Err(Failure::new("the answer is larger than any App file"));
        }
    }
    String::from_utf8(bytes).map_err(|_| Failure::new("the App file is not UTF-8"))
}

fn read(path: &Path) -> Outcome<String> {
    let told = |why: String| Failure::new(format!("{}: {why}", path.display()));
    let mut text = String::new();
    let read = match path.as_os_str().as_encoded_bytes() {
        b"-" => std::io::stdin().lock().take(MOST + 1).read_to_string(&mut text),
        _ => std::fs::File::open(path).and_then(|file| file.take(MOST + 1).read_to_string(&mut text)),
    };
    read.map_err(|error| told(error.to_string()))?;
    match text.len() as u64 {
        bytes if bytes > MOST => Err(told(format!("more than {MOST} bytes; an App file is shorter"))),
        _ => Ok(text),
    }
}

fn said(told: &AppliedFile) -> String {
    let mut text = String::new();
    for change in &told.changes {
        for (sign, value) in [('-', &change.before), ('+', &change.after)] {
            if let Some(value) = value {
                text.push_str(&format!(
                    "{sign} {} = {}\n",
                    escape::line(&change.setting),
                    escape::line(&value.to_string())
                ));
            }
        }
    }
    match (told.applied, told.changes.is_empty()) {
        (true, _) => text.push_str(&format!("version {} is in force\n", told.version)),
        (false, true) => text.push_str(&format!("nothing differs from version {}\n", told.version)),
        (false, false) => {}
    }
    text
}

fn of(used: u64, quota: Option<u64>) -> String {
    quota.map_or_else(|| used.to_string(), |quota| format!("{used} of {quota}"))
}

fn table(apps: &[Record], now: jiff::Timestamp) -> String {
    let rows: Vec<_> = apps
        .iter()
        .map(|app| {
            let (used, quota) = (&app.used, &app.settings.quota);
            vec![
                app.id.to_string(),
                app.name.clone(),
                of(used.sessions, quota.sessions),
                of(used.sandboxes, quota.sandboxes),
                of(used.memory_mib, quota.memory_mib),
                of(used.cpus, quota.cpus),
                app.version.to_string(),
                render::ago(app.created_at, now),
            ]
        })
        .collect();
    render::table(&["ID", "NAME", "SESSIONS", "SANDBOXES", "MEMORY MiB", "CPUS", "VERSION", "CREATED"], &rows)
}

fn details(app: &Record) -> Outcome<String> {
    let (used, quota) = (&app.used, &app.settings.quota);
    let mut text = render::fields(&[
        ("id", app.id.to_string()),
        ("name", app.name.clone()),
        ("created", render::time(app.created_at)),
        ("file version", app.version.to_string()),
        ("sessions", of(used.sessions, quota.sessions)),
        ("sandboxes", of(used.sandboxes, quota.sandboxes)),
        ("memory MiB", of(used.memory_mib, quota.memory_mib)),
        ("cpus", of(used.cpus, quota.cpus)),
        ("commands", of(used.commands, quota.commands)),
        ("workspaces MiB", of(used.workspace_mib, quota.workspace_mib)),
    ]);
    let mut lines = Vec::new();
    leaves("", &plain(&app.settings)?, &mut lines);
    for (name, value) in lines.iter().filter(|(name, _)| !name.starts_with("quota.")) {
        text.push_str(&format!("{} = {}\n", escape::line(name), escape::line(value)));
    }
    Ok(text)
}

fn leaves(path: &str, value: &serde_json::Value, into: &mut Vec<(String, String)>) {
    match value {
        serde_json::Value::Object(map) => {
            for (name, value) in map {
                leaves(&if path.is_empty() { name.clone() } else { format!("{path}.{name}") }, value, into);
            }
        }
        value => into.push((path.to_owned(), value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use pepo_api::Change;

    use super::*;

    #[test]
    fn a_difference_reads_as_one() {
        let change = |setting: &str, before: Option<u32>, after: Option<u32>| Change {
            setting: setting.into(),
            before: before.map(Into::into),
            after: after.map(Into::into),
        };
        let changes = vec![change("limits.cpus", Some(2), Some(4)), change("quota.sessions", None, Some(9))];
        let mut told = AppliedFile { version: 3, changes, applied: true };
        assert_eq!(said(&told), "- limits.cpus = 2\n+ limits.cpus = 4\n+ quota.sessions = 9\nversion 3 is in force\n");
        told.applied = false;
        assert!(said(&told).ends_with("+ quota.sessions = 9\n"));
        told.changes.clear();
        assert_eq!(said(&told), "nothing differs from version 3\n");
    }

    #[test]
    fn a_file_that_is_too_long_is_refused_before_it_is_sent() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "#".repeat(MOST as usize)).unwrap();
        assert_eq!(read(file.path()).unwrap().len() as u64, MOST);
        std::fs::write(file.path(), "#".repeat(MOST as usize + 1)).unwrap();
        assert!(read(file.path()).unwrap_err().message().contains("65536 bytes"));
        assert!(read(Path::new("/nowhere/x.toml")).unwrap_err().message().starts_with("/nowhere/x.toml: "));
    }
}
