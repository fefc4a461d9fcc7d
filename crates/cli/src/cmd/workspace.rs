//! `pepo workspace …`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use pepo_api::client::{Client, body_of};
use pepo_api::query::{AtPath, ListWorkspaces, RemoveWorkspace};
use pepo_api::{CreateWorkspace, FileKind, UpdateWorkspace, Workspace as Record};

use super::cp;
use crate::fail::{Failure, Notes, Outcome, note};
use crate::interrupt::Interrupts;
use crate::place::Place;
use crate::transfer::{Holder, Peer};
use crate::value::{self, Place as Side};
use crate::{launch, render};

#[derive(Debug, Subcommand)]
pub enum Workspace {
    /// Make a Workspace, print its id
    Create(Create),
    /// List Workspaces
    Ls(Ls),
    /// Show one Workspace, with what it uses
    Show(Show),
    /// Raise the cap on its bytes
    Resize(Resize),
    /// Remove Workspaces with all their files
    Rm(Rm),
    /// Copy files into a Workspace and out of it, without a Session
    Cp(Cp),
    /// List a directory of a Workspace
    Files(Files),
    /// Print a file of a Workspace
    Cat(Cat),
    /// Write a Workspace as it is to a compressed archive
    Export(Export),
    /// Unpack an archive over what is in a Workspace
    Import(Import),
}

#[derive(Debug, Args)]
pub struct Create {
    /// A name to use in place of the id
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Cap on the bytes of its files (a bare number is MiB; 512m, 2G)
    #[arg(long, value_name = "SIZE", value_parser = value::mebibytes)]
    size: Option<u32>,
    /// Cap on its files, directories and links
    #[arg(long, value_name = "N")]
    max_files: Option<u64>,
    /// One Session's machine may have it at a time: faster, since nobody else changes it
    #[arg(long)]
    single_writer: bool,
    /// In this directory of the operator's list; caps are not kept there
    #[arg(long, value_name = "DIRECTORY")]
    directory: Option<String>,
    /// A label, KEY=VALUE; may be given several times
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = value::label)]
    labels: Vec<(String, String)>,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
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
pub struct Show {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The Workspace, by id or name
    #[arg(value_name = "WSP")]
    workspace: String,
}

#[derive(Debug, Args)]
pub struct Resize {
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// The Workspace, by id or name
    #[arg(value_name = "WSP")]
    workspace: String,
    /// The new cap (a bare number is MiB; 512m, 2G)
    #[arg(value_name = "SIZE", value_parser = value::mebibytes)]
    size: u32,
}

#[derive(Debug, Args)]
pub struct Rm {
    /// End the Sessions that use it
    #[arg(long)]
    force: bool,
    /// Print what was removed as JSON
    #[arg(long)]
    json: bool,
    /// The Workspaces, by id or name
    #[arg(value_name = "WSP", required = true)]
    workspaces: Vec<String>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "One side is WSP:PATH, PATH from the top of the Workspace; `-` is a tar stream, as in `pepo cp`."
)]
pub struct Cp {
    /// From
    #[arg(value_name = "SRC", value_parser = value::place)]
    source: Side,
    /// To
    #[arg(value_name = "DST", value_parser = value::place)]
    destination: Side,
}

#[derive(Debug, Args)]
pub struct Files {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The Workspace, by id or name
    #[arg(value_name = "WSP")]
    workspace: String,
    /// A directory, from the top of the Workspace
    #[arg(value_name = "PATH", default_value = "/")]
    path: String,
}

#[derive(Debug, Args)]
pub struct Cat {
    /// The Workspace, by id or name
    #[arg(value_name = "WSP")]
    workspace: String,
    /// A file, from the top of the Workspace
    #[arg(value_name = "PATH")]
    path: String,
}

#[derive(Debug, Args)]
pub struct Export {
    /// The Workspace, by id or name
    #[arg(value_name = "WSP")]
    workspace: String,
    /// The archive (tar, zstd); `-` is standard output
    #[arg(value_name = "FILE", default_value = "-")]
    file: PathBuf,
}

#[derive(Debug, Args)]
pub struct Import {
    /// The Workspace, by id or name; made under that name with --create
    #[arg(value_name = "WSP")]
    workspace: String,
    /// The archive (tar, also compressed by zstd); `-` is standard input
    #[arg(value_name = "FILE", default_value = "-")]
    file: PathBuf,
    /// Make the Workspace
    #[arg(long)]
    create: bool,
}

impl Workspace {
    pub async fn run(self, place: Place) -> Outcome<u8> {
        let mut interrupts = Interrupts::new()?;
        let working = async {
            let client = launch::ensure(place, "workspace …", Notes::On).await?;
            match self {
                Workspace::Create(verb) => verb.run(&client).await,
                Workspace::Ls(verb) => verb.run(&client).await,
                Workspace::Show(verb) => {
                    let workspace = client.workspace_show(&verb.workspace).await?;
                    if verb.json { render::json(&workspace) } else { render::out(&details(&workspace)) }
                }
                Workspace::Resize(verb) => {
                    let body = UpdateWorkspace { size_mib: Some(u64::from(verb.size)), ..UpdateWorkspace::default() };
                    let workspace = client.workspace_update(&verb.workspace, &body).await?;
                    if verb.json { render::json(&workspace) } else { render::say(&workspace.id.to_string()) }
                }
                Workspace::Rm(verb) => verb.run(&client).await,
                Workspace::Cp(verb) => {
                    let peer = |name| Peer { client: &client, holder: Holder::Workspace, name, user: None };
                    cp::copy(peer, &verb.source, &verb.destination).await
                }
                Workspace::Files(verb) => verb.run(&client).await,
                Workspace::Cat(verb) => {
                    let at = AtPath { path: verb.path, user: None };
                    cp::pass_on(client.workspace_file_read(&verb.workspace, &at).await?, std::io::stdout()).await
                }
                Workspace::Export(verb) => verb.run(&client).await,
                Workspace::Import(verb) => verb.run(&client).await,
            }
        };
        match interrupts.unless(working).await {
            Ok(done) => done.map(|()| 0),
            Err(caught) => Ok(caught.exit_code()),
        }
    }
}

impl Create {
    async fn run(self, client: &Client) -> Outcome<()> {
        let body = CreateWorkspace {
            name: self.name,
            size_mib: self.size.map(u64::from),
            max_files: self.max_files,
            single_writer: self.single_writer,
            directory: self.directory,
            labels: self.labels.into_iter().collect(),
        };
        let workspace = client.workspace_create(&body).await?;
        if !workspace.capped {
            note("its bytes and files are not capped: it is in a directory of the operator's");
        }
        if self.json { render::json(&workspace) } else { render::say(&workspace.id.to_string()) }
    }
}

impl Ls {
    async fn run(self, client: &Client) -> Outcome<()> {
        let mut query = ListWorkspaces { limit: Some(1000), label: self.labels, cursor: None };
        let mut all = Vec::new();
        loop {
            let page = client.workspace_list(&query).await?;
            all.extend(page.items);
            query.cursor = page.next_cursor;
            if query.cursor.is_none() {
                break;
            }
        }
        if self.json {
            render::json(&all)
        } else if self.quiet {
            all.iter().try_for_each(|workspace| render::say(&workspace.id.to_string()))
        } else {
            render::out(&table(&all, jiff::Timestamp::now()))
        }
    }
}

impl Rm {
    async fn run(self, client: &Client) -> Outcome<()> {
        let query = RemoveWorkspace { force: self.force.then_some(true) };
        let mut removed = Vec::new();
        for workspace in &self.workspaces {
            let one = client.workspace_remove(workspace, &query).await?;
            if !self.json {
                let ended = match one.ended_sessions.len() {
                    0 => String::new(),
                    count => format!(", {count} Session(s) ended"),
                };
                render::say(&format!("{}: {} are free again{ended}", one.id, render::size(one.freed_bytes)))?;
            }
            removed.push(one);
        }
        if self.json { render::json(&removed) } else { Ok(()) }
    }
}

impl Files {
    async fn run(self, client: &Client) -> Outcome<()> {
        let list = client.workspace_file_list(&self.workspace, &AtPath { path: self.path, user: None }).await?;
        if self.json {
            return render::json(&list.entries);
        }
        let rows: Vec<_> = list
            .entries
            .iter()
            .map(|entry| {
                let to = entry.target.as_ref().map_or_else(String::new, |target| format!(" -> {target}"));
                let end = if entry.kind == FileKind::Directory { "/" } else { "" };
                vec![
                    entry.mode.clone(),
                    format!("{}:{}", entry.uid, entry.gid),
                    render::size(entry.size_bytes),
                    render::time(entry.modified_at),
                    format!("{}{end}{to}", entry.name),
                ]
            })
            .collect();
        render::out(&render::table(&["MODE", "OWNER", "SIZE", "CHANGED", "NAME"], &rows))
    }
}

fn is_standard(file: &Path) -> bool {
    file == Path::new("-")
}

impl Export {
    async fn run(self, client: &Client) -> Outcome<()> {
        let stream = client.workspace_export(&self.workspace).await?;
        if is_standard(&self.file) {
            return cp::to_standard_output(stream, "pepo workspace export WSP archive.tar.zst").await;
        }
        // Whole or not at all: a part of an archive is none.
        let mut part = self.file.clone().into_os_string();
        part.push(".part");
        let part = PathBuf::from(part);
        let at = |path: &Path| format!("{}", path.display());
        let file = std::fs::File::create(&part).map_err(|error| Failure::new(format!("{}: {error}", at(&part))))?;
        let written = cp::pass_on(stream, file).await.and_then(|()| {
            std::fs::rename(&part, &self.file).map_err(|error| Failure::new(format!("{}: {error}", at(&self.file))))
        });
        if written.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        written
    }
}

impl Import {
    async fn run(self, client: &Client) -> Outcome<()> {
        let file = match is_standard(&self.file) {
            true => None,
            false => {
                let file = std::fs::File::open(&self.file);
                Some(file.map_err(|error| Failure::new(format!("{}: {error}", self.file.display())))?)
            }
        };
        if self.create {
            let body = CreateWorkspace { name: Some(self.workspace.clone()), ..CreateWorkspace::default() };
            client.workspace_create(&body).await?;
        }
        let body = match file {
            Some(file) => body_of(cp::pieces(file)),
            None => body_of(cp::pieces(std::io::stdin())),
        };
        Ok(client.workspace_import(&self.workspace, body).await?)
    }
}

fn cap(workspace: &Record) -> String {
    if workspace.capped { render::size(workspace.size_mib << 20) } else { "not capped".to_owned() }
}

fn table(all: &[Record], now: jiff::Timestamp) -> String {
    let rows: Vec<_> = all
        .iter()
        .map(|w| {
            vec![
                w.id.to_string(),
                w.name.clone().unwrap_or_else(|| "-".into()),
                cap(w),
                w.sessions.len().to_string(),
                w.session_id.map_or_else(|| "-".into(), |session| session.to_string()),
                render::ago(w.created_at, now),
            ]
        })
        .collect();
    render::table(&["ID", "NAME", "CAP", "SESSIONS", "OWN OF", "CREATED"], &rows)
}

fn details(w: &Record) -> String {
    let usage = w.usage.unwrap_or_default();
    let sessions: Vec<String> = w.sessions.iter().map(ToString::to_string).collect();
    let labels: Vec<String> = w.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let what = match (&w.directory, w.capped) {
        (Some(directory), _) => format!("in the directory `{directory}`: bytes and files are not capped"),
        _ => String::new(),
    };
    render::fields(&[
        ("id", w.id.to_string()),
        ("name", w.name.clone().unwrap_or_default()),
        ("cap", cap(w)),
        ("place", what),
        ("bytes", format!("{} of {}", render::size(usage.bytes_used), render::size(usage.bytes))),
        ("files", format!("{} of {}", usage.files_used, usage.files)),
        ("on this host", render::size(usage.host_bytes)),
        ("one at a time", if w.single_writer { "yes".to_owned() } else { String::new() }),
        ("own of", w.session_id.map(|session| session.to_string()).unwrap_or_default()),
        ("sessions", sessions.join(" ")),
        ("labels", labels.join(" ")),
        ("created", render::time(w.created_at)),
    ])
}
