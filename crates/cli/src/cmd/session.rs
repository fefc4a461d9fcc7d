//! `pepo session …`.

use std::collections::BTreeMap;

use clap::{Args, Subcommand, ValueEnum};
use pepo_api::client::Client;
use pepo_api::query::{ListSessions, ShowServices, ShowSession};
use pepo_api::{IfTerminated, NetworkStats, Service, ServiceState, Session as Record, SessionState, UpdateSession};

use super::flags::{Begins, Environment, Secrets, Shape};
use super::run::{end, wait_active};
use crate::fail::{self, Failure, Notes, Outcome};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::{launch, render, value};

#[derive(Debug, Subcommand)]
pub enum Session {
    /// Make a Session, wait until it takes commands, print its id
    Create(Box<Create>),
    /// List Sessions
    Ls(Ls),
    /// Show one Session
    Show(Show),
    /// Change a Session
    Update(Box<Update>),
    /// Give its machine back: what is on its disk is lost, and the Session ends unless it was made with --reactivate
    Release(One),
    /// End Sessions for good
    Rm(Rm),
    /// Wait until a Session is in a state
    Wait(Wait),
}

#[derive(Debug, Args)]
pub struct Create {
    #[command(flatten)]
    shape: Shape,
    #[command(flatten)]
    environment: Environment,
    #[command(flatten)]
    secrets: Secrets,
    #[command(flatten)]
    begins: Begins,
    /// Open the Session of this key, or make it; what else is said must be as it is there
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// With --key: fail where the last Session of the key has ended, instead of making a new one
    #[arg(long, requires = "key")]
    no_replace: bool,
    /// Keep it when its machine is given back: the next request gets it a fresh one, with an empty disk
    #[arg(long)]
    reactivate: bool,
    /// How long it stays after the last activity (a bare number is seconds; 90s, 5m, 1h)
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    keep_alive: Option<u64>,
    /// How long it lives at the most
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    expires: Option<u64>,
    /// Do not wait until it takes commands
    #[arg(short, long)]
    detach: bool,
    /// Say nothing of Pepo's own but failures
    #[arg(short, long)]
    quiet: bool,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct Ls {
    /// Also those that have ended
    #[arg(short, long)]
    all: bool,
    /// Only those in this state
    #[arg(long, value_name = "STATE")]
    state: Option<State>,
    /// Only those with this label; may be given several times
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    labels: Vec<String>,
    /// Only those of this key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Print ids alone
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct Show {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
}

#[derive(Debug, Args)]
pub struct Update {
    /// A new name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Labels; all of them, the old ones go
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = value::label)]
    labels: Vec<(String, String)>,
    /// How long it stays after the last activity
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    keep_alive: Option<u64>,
    /// How long it lives from now on
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    expires: Option<u64>,
    /// What it may reach, from this moment on: none, public, allow=…
    #[arg(long, value_name = "POLICY", value_parser = value::network)]
    net: Option<pepo_api::NetworkSpec>,
    /// What is given of these holds from its next machine on: all variables, setup, all services
    #[command(flatten)]
    environment: Environment,
    #[command(flatten)]
    secrets: Secrets,
    /// Take a secret away; may be given several times
    #[arg(long, value_name = "NAME")]
    no_secret: Vec<String>,
    #[command(flatten)]
    begins: Begins,
    /// From its next machine on, nothing sets it up
    #[arg(long, conflicts_with = "setup")]
    no_setup: bool,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
}

#[derive(Debug, Args)]
pub struct One {
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
}

#[derive(Debug, Args)]
pub struct Rm {
    /// Print them as JSON
    #[arg(long)]
    json: bool,
    /// The Sessions, by id or name
    #[arg(value_name = "SES", required = true)]
    sessions: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Wait {
    /// The state
    #[arg(long, value_name = "STATE", default_value = "terminated")]
    state: State,
    /// Give up after so long, with exit code 124
    #[arg(long, value_name = "TIME", value_parser = value::seconds)]
    timeout: Option<u64>,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The Session, by id or name
    #[arg(value_name = "SES")]
    session: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum State {
    Requested,
    Activating,
    Active,
    Releasing,
    Idle,
    Terminating,
    Terminated,
}

impl From<State> for SessionState {
    fn from(state: State) -> Self {
        match state {
            State::Requested => SessionState::Requested,
            State::Activating => SessionState::Activating,
            State::Active => SessionState::Active,
            State::Releasing => SessionState::Releasing,
            State::Idle => SessionState::Idle,
            State::Terminating => SessionState::Terminating,
            State::Terminated => SessionState::Terminated,
        }
    }
}

impl Session {
    pub async fn run(&self, place: Place) -> Outcome<u8> {
        match self {
            Session::Create(verb) => verb.run(place).await,
            Session::Ls(verb) => verb.run(&place.client()).await,
            Session::Show(verb) => {
                let client = place.client();
                let session = client.session_show(&verb.session, &ShowSession::default()).await?;
                if verb.json {
                    render::json(&session)?
                } else {
                    let services = match session.services.is_empty() {
                        true => Vec::new(),
                        false => client.session_services(&verb.session, &ShowServices::default()).await?.items,
                    };
                    render::out(&details(&session, &services))?
                }
                Ok(0)
            }
            Session::Update(verb) => verb.run(&place.client()).await,
            Session::Release(verb) => {
                let session = place.client().session_release(&verb.session).await?;
                print(&session, verb.json)
            }
            Session::Rm(verb) => verb.run(&place.client()).await,
            Session::Wait(verb) => verb.run(&place.client()).await,
        }
    }
}

fn print(session: &Record, json: bool) -> Outcome<u8> {
    if json {
        render::json(session)?
    } else {
        render::say(&session.id.to_string())?
    }
    Ok(0)
}

impl Create {
    async fn run(&self, place: Place) -> Outcome<u8> {
        let mut request = self.shape.request();
        request.env = self.environment.variables()?;
        request.secrets = Some(self.secrets.all()?).filter(|secrets| !secrets.is_empty());
        request.keep_alive_seconds = self.keep_alive;
        request.expires_seconds = self.expires;
        request.reactivate = self.reactivate.then_some(true);
        request.setup = self.begins.setup();
        request.services = self.begins.services()?;
        request.if_terminated = self.no_replace.then_some(IfTerminated::Refuse);
        let notes = if self.quiet { Notes::Off } else { Notes::On };
        let mut interrupts = Interrupts::new()?;
        let client = match interrupts.unless(launch::ensure(place, "session create", notes)).await {
            Ok(client) => client?,
            Err(caught) => return Ok(caught.exit_code()),
        };
        let (mut session, ours) = match &self.key {
            // Others may have opened it too: it is not ours to end.
            Some(key) => (client.session_open(key, &request).await?, false),
            None => (client.session_create(&request).await?, true),
        };
        if !self.detach {
            match interrupts.unless(wait_active(&client, &session, notes)).await {
                Ok(ready) => ready?,
                Err(caught) => {
                    if ours {
                        end(&client, &session.id.to_string(), &mut interrupts).await?;
                    }
                    return Ok(caught.exit_code());
                }
            }
            if self.json {
                session = client.session_show(&session.id.to_string(), &ShowSession::default()).await?;
            }
        }
        print(&session, self.json)
    }
}

impl Ls {
    async fn run(&self, client: &Client) -> Outcome<u8> {
        let mut query = ListSessions {
            limit: Some(1000),
            state: self.state.map(Into::into),
            label: self.labels.clone(),
            key: self.key.clone(),
            cursor: None,
        };
        let mut sessions = Vec::new();
        loop {
            let page = client.session_list(&query).await?;
            let wanted = |s: &Record| self.all || self.state.is_some() || s.state != SessionState::Terminated;
            sessions.extend(page.items.into_iter().filter(wanted));
            query.cursor = page.next_cursor;
            if query.cursor.is_none() {
                break;
            }
        }
        if self.json {
            render::json(&sessions)?;
        } else if self.quiet {
            for session in &sessions {
                render::say(&session.id.to_string())?;
            }
        } else {
            render::out(&table(&sessions, jiff::Timestamp::now()))?;
        }
        Ok(0)
    }
}

fn table(sessions: &[Record], now: jiff::Timestamp) -> String {
    let rows: Vec<_> = sessions
        .iter()
        .map(|s| {
            let state = match &s.ended {
                Some(ended) => {
                    format!("{} ({})", render::word(&s.state), render::word(&ended.reason).replace('_', " "))
                }
                None => render::word(&s.state),
            };
            vec![
                s.id.to_string(),
                s.name.clone().unwrap_or_else(|| "-".into()),
                state,
                s.image.clone(),
                s.cpus.to_string(),
                render::mebibytes(s.memory_mib),
                s.commands_running.to_string(),
                render::ago(s.created_at, now),
            ]
        })
        .collect();
    render::table(&["ID", "NAME", "STATE", "IMAGE", "CPUS", "MEMORY", "COMMANDS", "CREATED"], &rows)
}

fn details(session: &Record, services: &[Service]) -> String {
    let pairs = |map: &std::collections::BTreeMap<String, String>| {
        map.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    };
    let time = |at: Option<jiff::Timestamp>| at.map_or_else(String::new, render::time);
    let ended = session.ended.as_ref();
    let mut text = render::fields(&[
        ("id", session.id.to_string()),
        ("name", session.name.clone().unwrap_or_default()),
        ("key", session.key.clone().unwrap_or_default()),
        ("state", render::word(&session.state)),
        ("ended", ended.map_or_else(String::new, |e| format!("{}, {}", fail::why(e), render::time(e.at)))),
        ("image", format!("{} ({})", session.image, session.image_id)),
        ("cpus", session.cpus.to_string()),
        ("memory", render::mebibytes(session.memory_mib)),
        ("disk", render::mebibytes(session.disk_mib)),
        ("network", network(session)),
        ("traffic", session.network_used.as_ref().map_or_else(String::new, |used| traffic(used))),
        ("keep alive", format!("{} s", session.keep_alive_seconds)),
        ("reactivate", if session.reactivate { "yes".into() } else { String::new() }),
        ("setup", session.setup.as_ref().map_or_else(String::new, |setup| setup.command.clone())),
        ("commands", session.commands_running.to_string()),
        ("activation", session.activation.to_string()),
        ("sandbox", session.sandbox_id.map_or_else(String::new, |id| id.to_string())),
        (
            "last end",
            session.last_end.as_ref().map_or_else(String::new, |e| format!("{}, {}", fail::why(e), render::time(e.at))),
        ),
        ("env", pairs(&session.env)),
        ("secrets", session.secret_names.join(" ")),
        ("labels", pairs(&session.labels)),
        ("created", render::time(session.created_at)),
        ("active since", time(session.active_at)),
        ("expires", time(session.expires_at)),
    ]);
    for note in &session.network_notes {
        text.push_str(&format!("network: {}\n", crate::escape::line(note)));
    }
    if let Some(end) = ended.or(session.last_end.as_ref()) {
        for line in &end.last_console_lines {
            text.push_str(&format!("console: {}\n", crate::escape::line(line)));
        }
        for line in &end.last_output_lines {
            text.push_str(&format!("setup: {}\n", crate::escape::line(line)));
        }
    }
    if !services.is_empty() {
        text.push('\n');
        text.push_str(&services_table(services));
    }
    text
}

fn services_table(services: &[Service]) -> String {
    let rows: Vec<_> = services
        .iter()
        .map(|service| {
            let end = service.last_end.as_ref();
            let state = match (service.state, end) {
                (ServiceState::Waiting | ServiceState::Exited, Some(end)) => {
                    format!("{} ({})", render::word(&service.state), super::ps::end(end))
                }
                _ => render::word(&service.state),
            };
            vec![
                service.spec.name.clone(),
                state,
                service.spec.port.map_or_else(|| "-".into(), |port| port.to_string()),
                service.restarts.to_string(),
                service.command_id.map_or_else(|| "-".into(), |id| id.to_string()),
                render::short(&service.spec.command, 60),
            ]
        })
        .collect();
    render::table(&["SERVICE", "STATE", "PORT", "RESTARTS", "RUN", "COMMAND"], &rows)
}

/// What a Session may reach, in one line.
fn network(session: &pepo_api::Session) -> String {
    let entries = session.network.allow.iter().flatten();
    let entry = |entry: &pepo_api::NetworkRule| {
        let target =
            entry.domain.as_ref().or(entry.cidr.as_ref()).or(entry.preset.as_ref()).cloned().unwrap_or_default();
        let ports = entry.ports.iter().map(u16::to_string).collect::<Vec<_>>().join("+");
        let ports = if ports.is_empty() { String::new() } else { format!(":{ports}") };
        let protocol = entry.protocol.map(|protocol| format!("/{}", render::word(&protocol))).unwrap_or_default();
        let wide = if entry.any_protocol { " (address-wide)" } else { "" };
        format!("{target}{ports}{protocol}{wide}")
    };
    let entries = entries.map(entry).collect::<Vec<_>>().join(", ");
    let mode = render::word(&session.network.mode);
    if entries.is_empty() { mode } else { format!("{mode}: {entries}") }
}

/// What its Sandboxes' networks carried and refused, in one line; reasons that never were are left out.
fn traffic(used: &NetworkStats) -> String {
    let refused = match serde_json::to_value(used.refused) {
        Ok(serde_json::Value::Object(reasons)) => reasons,
        _ => Default::default(),
    };
    let counted = |reasons: Vec<(String, u64)>| {
        let reasons = reasons.into_iter().filter(|(_, count)| *count > 0);
        reasons.map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ")
    };
    let packets = counted(refused.into_iter().filter_map(|(reason, count)| Some((reason, count.as_u64()?))).collect());
    let names = counted(used.names.refused.clone().into_iter().collect());
    let mut text = format!(
        "{} sent, {} received, {} connections, {} names asked",
        render::size(used.sent_bytes),
        render::size(used.received_bytes),
        used.connections,
        used.names.asked
    );
    for (what, of) in [("packets", packets), ("names", names)] {
        if !of.is_empty() {
            text.push_str(&format!("; {what} refused: {of}"));
        }
    }
    text
}

impl Update {
    async fn run(&self, client: &Client) -> Outcome<u8> {
        let update = UpdateSession {
            name: self.name.clone(),
            labels: (!self.labels.is_empty()).then(|| self.labels.iter().cloned().collect()),
            keep_alive_seconds: self.keep_alive,
            expires_seconds: self.expires,
            network: self.net.clone(),
            env: Some(self.environment.variables()?).filter(|env| !env.is_empty()),
            secrets: Some(
                self.secrets
                    .all()?
                    .into_iter()
                    .map(|(name, value)| (name, Some(value)))
                    .chain(self.no_secret.iter().map(|name| (name.clone(), None)))
                    .collect(),
            )
            .filter(|secrets: &BTreeMap<_, _>| !secrets.is_empty()),
            setup: match self.no_setup {
                true => Some(None),
                false => self.begins.setup().map(Some),
            },
            services: self.begins.services()?,
        };
        if update == UpdateSession::default() {
            return Err(Failure::new("nothing to change")
                .hint("--name, --label, --keep-alive, --expires, --net, --env, --secret, --setup, --service"));
        }
        let session = client.session_update(&self.session, &update).await?;
        print(&session, self.json)
    }
}

impl Rm {
    async fn run(&self, client: &Client) -> Outcome<u8> {
        let mut interrupts = Interrupts::new()?;
        let (mut code, mut ended) = (0, Vec::new());
        for session in &self.sessions {
            match end(client, session, &mut interrupts).await {
                Ok(()) if self.json => ended.push(client.session_show(session, &ShowSession::default()).await?),
                Ok(()) => render::say(session)?,
                // The others are ended all the same.
                Err(failure) => {
                    failure.show();
                    code = 1;
                }
            }
        }
        if self.json {
            render::json(&ended)?;
        }
        Ok(code)
    }
}

impl Wait {
    async fn run(&self, client: &Client) -> Outcome<u8> {
        let wanted: SessionState = self.state.into();
        let waiting = async {
            let mut query = ShowSession::default();
            loop {
                let now = client.session_show(&self.session, &query).await?;
                if now.state == wanted {
                    return Ok(now);
                }
                if now.state == SessionState::Terminated {
                    let why = now.ended.as_ref().map_or("", |ended| fail::reason(ended.reason));
                    return Err(Failure::new(format!("Session {} has ended: {why}", self.session)));
                }
                query = ShowSession { after: Some(now.generation), wait_seconds: Some(60) };
            }
        };
        let limit = std::time::Duration::from_secs(self.timeout.unwrap_or(u64::from(u32::MAX)));
        match Interrupts::new()?.unless(tokio::time::timeout(limit, waiting)).await {
            Ok(Ok(session)) => {
                let session = session?;
                if self.json {
                    render::json(&session)?;
                }
                Ok(0)
            }
            Ok(Err(_)) => {
                Err(Failure::new(format!("Session {} is not {} yet", self.session, render::word(&wanted))).code(124))
            }
            Err(caught) => Ok(caught.exit_code()),
        }
    }
}
