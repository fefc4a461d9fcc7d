//! One method per row of the table.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::header::{CONNECTION, RANGE, UPGRADE};
use http::{HeaderMap, HeaderValue, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::attach::{self, Attachment};
use super::stream::CommandEvents;
use super::{Body, ByteStream, Client, ClientError, EventStream, body_from};
use crate::query::{
    ApplyFile, AskKey, AtPath, ListApps, ListCommands, ListEvents, ListKeys, ListSessions, ListWorkspaces, RemoveApp,
    RemoveWorkspace, ShowCommand, ShowConsole, ShowDoctor, ShowFile, ShowServices, ShowSession, ShowUsage, UnderPath,
    WriteFile, WriteStdin,
};
use crate::{
    App, AppliedFile, BuildEvent, BuildImage, Command, CommandId, ConfigShown, CreateApp, CreateCommand, CreateKey,
    CreateSession, CreateToken, CreateWorkspace, DIAL_UPGRADE, DoctorReport, DrainReport, DrainRequest, Event,
    FeedEvent, FileChange, FileEntry, FileList, Health, Image, Key, KeyCan, MakeFile, NewKey, NewToken, Output, Page,
    PublishPort, PublishedPort, RecipeFile, RemovedImages, RemovedWorkspace, RenameFile, RotateKey, SendSignal,
    Service, Session, SessionStats, StdinAnswer, StreamEvent, SweepReport, SweepRequest, Text, UpdateApp,
    UpdateSession, UpdateWorkspace, UsageReport, Version, Workspace, route,
};

/// Starting a Sandbox or building up an answer about the whole host may take this long, in seconds.
const LONG: u64 = 600;

/// Which of a command's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Standard output.
    Stdout,
    /// Error output.
    Stderr,
}

/// Raw bytes both ways.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

impl Client {
    /// Makes a Session.
    pub async fn session_create(&self, body: &CreateSession) -> Result<Session, ClientError> {
        self.json(self.request(&route::session_create, &[])?.with_json(body)?.waiting(LONG)).await
    }

    /// Opens the Session of that key, or makes it.
    pub async fn session_open(&self, key: &str, body: &CreateSession) -> Result<Session, ClientError> {
        self.json(self.request(&route::session_open, &[("key", key)])?.with_json(body)?.waiting(LONG)).await
    }

    /// Its Services; may wait until they are ready.
    pub async fn session_services(&self, session: &str, query: &ShowServices) -> Result<Page<Service>, ClientError> {
        let call = self.request(&route::session_services, &[("session", session)])?.with_query(query)?;
        self.json(call.waiting(query.wait_seconds.unwrap_or(0))).await
    }

    /// A page of Sessions.
    pub async fn session_list(&self, query: &ListSessions) -> Result<Page<Session>, ClientError> {
        self.json(self.request(&route::session_list, &[])?.with_query(query)?).await
    }

    /// One Session, by id or name; may wait for a change.
    pub async fn session_show(&self, session: &str, query: &ShowSession) -> Result<Session, ClientError> {
        let call = self.request(&route::session_show, &[("session", session)])?.with_query(query)?;
        self.json(call.waiting(query.wait_seconds.unwrap_or(0))).await
    }

    /// Changes a Session.
    pub async fn session_update(&self, session: &str, body: &UpdateSession) -> Result<Session, ClientError> {
        self.json(self.request(&route::session_update, &[("session", session)])?.with_json(body)?).await
    }

    /// Ends a Session for good.
    pub async fn session_terminate(&self, session: &str) -> Result<Session, ClientError> {
        self.json(self.request(&route::session_terminate, &[("session", session)])?.waiting(60)).await
    }

    /// Gives its Sandbox back.
    pub async fn session_release(&self, session: &str) -> Result<Session, ClientError> {
        self.json(self.request(&route::session_release, &[("session", session)])?.waiting(60)).await
    }

    /// What was used between two times.
    pub async fn usage(&self, query: &ShowUsage) -> Result<UsageReport, ClientError> {
        self.json(self.request(&route::usage, &[])?.with_query(query)?).await
    }

    /// What a Session uses now.
    pub async fn session_stats(&self, session: &str) -> Result<SessionStats, ClientError> {
        self.json(self.request(&route::session_stats, &[("session", session)])?).await
    }

    /// The guest's console. A guest can write anything there.
    pub async fn session_console(&self, session: &str, query: &ShowConsole) -> Result<ByteStream, ClientError> {
        let call = self.request(&route::session_console, &[("session", session)])?.with_query(query)?;
        let stream = self.bytes(call).await?;
        Ok(if query.follow == Some(true) { stream.without_idle_limit() } else { stream })
    }

    /// Makes a Workspace.
    pub async fn workspace_create(&self, body: &CreateWorkspace) -> Result<Workspace, ClientError> {
        self.json(self.request(&route::workspace_create, &[])?.with_json(body)?.waiting(60)).await
    }

    /// A page of Workspaces.
    pub async fn workspace_list(&self, query: &ListWorkspaces) -> Result<Page<Workspace>, ClientError> {
        self.json(self.request(&route::workspace_list, &[])?.with_query(query)?).await
    }

    /// One Workspace, by id or name, with what it uses.
    pub async fn workspace_show(&self, workspace: &str) -> Result<Workspace, ClientError> {
        self.json(self.request(&route::workspace_show, &[("workspace", workspace)])?.waiting(60)).await
    }

    /// Changes a Workspace.
    pub async fn workspace_update(&self, workspace: &str, body: &UpdateWorkspace) -> Result<Workspace, ClientError> {
        let call = self.request(&route::workspace_update, &[("workspace", workspace)])?.with_json(body)?;
        self.json(call.waiting(120)).await
    }

    /// Removes a Workspace with all its files.
    pub async fn workspace_remove(
        &self,
        workspace: &str,
        query: &RemoveWorkspace,
    ) -> Result<RemovedWorkspace, ClientError> {
        let call = self.request(&route::workspace_remove, &[("workspace", workspace)])?.with_query(query)?;
        self.json(call.waiting(LONG)).await
    }

    /// Runs a command and waits as it says; `state` tells whether that was enough.
    pub async fn command_create(&self, session: &str, body: &CreateCommand) -> Result<Output, ClientError> {
        let call = self.request(&route::command_create, &[("session", session)])?.with_json(body)?;
        self.json(call.waiting(LONG + body.wait_seconds.unwrap_or(30))).await
    }

    /// Runs a command and follows it; the stream ends with it. Not taken up again: [`Client::command_events`] does that.
    pub async fn command_create_events(
        &self,
        session: &str,
        body: &CreateCommand,
    ) -> Result<EventStream<StreamEvent>, ClientError> {
        let call = self.request(&route::command_create, &[("session", session)])?.with_json(body)?;
        self.events(call.waiting(LONG)).await
    }

    /// A page of commands.
    pub async fn command_list(&self, session: &str, query: &ListCommands) -> Result<Page<Command>, ClientError> {
        self.json(self.request(&route::command_list, &[("session", session)])?.with_query(query)?).await
    }

    /// A command and what it wrote; may wait for its end.
    pub async fn command_show(
        &self,
        session: &str,
        command: CommandId,
        query: &ShowCommand,
    ) -> Result<Output, ClientError> {
        let id = command.to_string();
        let call = self.request(&route::command_show, &[("session", session), ("command", &id)])?.with_query(query)?;
        self.json(call.waiting(query.wait_seconds.unwrap_or(0))).await
    }

    /// Follows a command, also across a restart of the daemon.
    pub fn command_events(&self, session: &str, command: CommandId, query: ShowCommand) -> CommandEvents {
        CommandEvents::new(self.clone(), session, command, query)
    }

    pub(super) async fn command_events_once(
        &self,
        session: &str,
        command: CommandId,
        query: &ShowCommand,
        last_id: Option<&str>,
    ) -> Result<EventStream<StreamEvent>, ClientError> {
        let id = command.to_string();
        let mut call =
            self.request(&route::command_show, &[("session", session), ("command", &id)])?.with_query(query)?;
        if let Some(last) = last_id.and_then(|id| HeaderValue::from_str(id).ok()) {
            call.headers.insert("last-event-id", last);
        }
        self.events(call).await
    }

    /// Kills a command with its tree.
    pub async fn command_kill(&self, session: &str, command: CommandId) -> Result<Command, ClientError> {
        let id = command.to_string();
        self.json(self.request(&route::command_kill, &[("session", session), ("command", &id)])?).await
    }

    /// What is kept of one output, from an offset within it on.
    pub async fn command_output(
        &self,
        session: &str,
        command: CommandId,
        which: Which,
        from: u64,
    ) -> Result<ByteStream, ClientError> {
        let id = command.to_string();
        let route = match which {
            Which::Stdout => &route::command_stdout,
            Which::Stderr => &route::command_stderr,
        };
        let mut call = self.request(route, &[("session", session), ("command", &id)])?;
        if from > 0
            && let Ok(range) = HeaderValue::from_str(&format!("bytes={from}-"))
        {
            call.headers.insert(RANGE, range);
        }
        self.bytes(call).await
    }

    /// Sends input; with an offset the same bytes may be sent again.
    pub async fn command_stdin(
        &self,
        session: &str,
        command: CommandId,
        query: &WriteStdin,
        bytes: impl Into<Bytes>,
    ) -> Result<StdinAnswer, ClientError> {
        let id = command.to_string();
        let call = self.request(&route::command_stdin, &[("session", session), ("command", &id)])?.with_query(query)?;
        self.json(call.with_body(OCTETS, body_from(bytes))).await
    }

    /// Sends a signal.
    pub async fn command_signal(
        &self,
        session: &str,
        command: CommandId,
        body: &SendSignal,
    ) -> Result<(), ClientError> {
        let id = command.to_string();
        let call = self.request(&route::command_signal, &[("session", session), ("command", &id)])?;
        self.empty(call.with_json(body)?).await
    }

    /// Joins a command from this output offset on.
    pub fn command_attach(&self, session: &str, command: CommandId, offset: u64) -> Attachment {
        attach::open(self.clone(), session.to_owned(), command, offset)
    }

    /// A file's bytes.
    pub async fn file_read(&self, session: &str, query: &AtPath) -> Result<ByteStream, ClientError> {
        self.bytes(self.request(&route::file_read, &[("session", session)])?.with_query(query)?).await
    }

    /// Writes a file, whole or not at all.
    pub async fn file_write(&self, session: &str, query: &WriteFile, body: Body) -> Result<(), ClientError> {
        let call = self.request(&route::file_write, &[("session", session)])?.with_query(query)?;
        self.empty(call.with_body(OCTETS, body)).await
    }

    /// Removes an entry.
    pub async fn file_remove(&self, session: &str, query: &UnderPath) -> Result<(), ClientError> {
        self.empty(self.request(&route::file_remove, &[("session", session)])?.with_query(query)?).await
    }

    /// Looks at an entry; a link is not followed.
    pub async fn file_stat(&self, session: &str, query: &AtPath) -> Result<FileEntry, ClientError> {
        self.json(self.request(&route::file_stat, &[("session", session)])?.with_query(query)?).await
    }

    /// Lists a directory.
    pub async fn file_list(&self, session: &str, query: &AtPath) -> Result<FileList, ClientError> {
        self.json(self.request(&route::file_list, &[("session", session)])?.with_query(query)?).await
    }

    /// Reports changes until it is dropped.
    pub async fn file_watch(&self, session: &str, query: &UnderPath) -> Result<EventStream<FileChange>, ClientError> {
        self.events(self.request(&route::file_watch, &[("session", session)])?.with_query(query)?).await
    }

    /// Makes a directory or a link.
    pub async fn file_make(&self, session: &str, body: &MakeFile) -> Result<(), ClientError> {
        self.empty(self.request(&route::file_make, &[("session", session)])?.with_json(body)?).await
    }

    /// Renames an entry.
    pub async fn file_rename(&self, session: &str, body: &RenameFile) -> Result<(), ClientError> {
        self.empty(self.request(&route::file_rename, &[("session", session)])?.with_json(body)?).await
    }

    /// A directory's contents, or a file under its own name, as a tar archive. A guest made it: unpack with care.
    pub async fn tar_read(&self, session: &str, query: &AtPath) -> Result<ByteStream, ClientError> {
        self.bytes(self.request(&route::tar_read, &[("session", session)])?.with_query(query)?).await
    }

    /// Unpacks a tar archive into a directory, which is made where missing.
    pub async fn tar_write(&self, session: &str, query: &AtPath, body: Body) -> Result<(), ClientError> {
        let call = self.request(&route::tar_write, &[("session", session)])?.with_query(query)?;
        self.empty(call.with_body("application/x-tar", body)).await
    }

    /// Connects to a port inside.
    pub async fn dial(&self, session: &str, port: u16) -> Result<Box<dyn Duplex>, ClientError> {
        let port = port.to_string();
        let mut call = self.request(&route::dial, &[("session", session), ("port", &port)])?;
        upgrade_headers(&mut call.headers);
        let what = call.what();
        let answer = self.send(call).await?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(ClientError::Unexpected { what, found: answer.status().to_string() });
        }
        let upgraded = hyper::upgrade::on(answer).await.map_err(|e| ClientError::transport(what, e))?;
        Ok(Box::new(TokioIo::new(upgraded)))
    }

    /// A file's bytes, out of a Workspace.
    pub async fn workspace_file_read(&self, workspace: &str, query: &AtPath) -> Result<ByteStream, ClientError> {
        self.bytes(self.request(&route::workspace_file_read, &[("workspace", workspace)])?.with_query(query)?).await
    }

    /// Writes a file of a Workspace, whole or not at all.
    pub async fn workspace_file_write(
        &self,
        workspace: &str,
        query: &WriteFile,
        body: Body,
    ) -> Result<(), ClientError> {
        let call = self.request(&route::workspace_file_write, &[("workspace", workspace)])?.with_query(query)?;
        self.empty(call.with_body(OCTETS, body)).await
    }

    /// Removes an entry of a Workspace.
    pub async fn workspace_file_remove(&self, workspace: &str, query: &UnderPath) -> Result<(), ClientError> {
        self.empty(self.request(&route::workspace_file_remove, &[("workspace", workspace)])?.with_query(query)?).await
    }

    /// Looks at an entry of a Workspace; a link is not followed.
    pub async fn workspace_file_stat(&self, workspace: &str, query: &AtPath) -> Result<FileEntry, ClientError> {
        self.json(self.request(&route::workspace_file_stat, &[("workspace", workspace)])?.with_query(query)?).await
    }

    /// Lists a directory of a Workspace.
    pub async fn workspace_file_list(&self, workspace: &str, query: &AtPath) -> Result<FileList, ClientError> {
        self.json(self.request(&route::workspace_file_list, &[("workspace", workspace)])?.with_query(query)?).await
    }

    /// Makes a directory or a link in a Workspace.
    pub async fn workspace_file_make(&self, workspace: &str, body: &MakeFile) -> Result<(), ClientError> {
        self.empty(self.request(&route::workspace_file_make, &[("workspace", workspace)])?.with_json(body)?).await
    }

    /// Renames an entry of a Workspace.
    pub async fn workspace_file_rename(&self, workspace: &str, body: &RenameFile) -> Result<(), ClientError> {
        self.empty(self.request(&route::workspace_file_rename, &[("workspace", workspace)])?.with_json(body)?).await
    }

    /// A directory's contents, or a file under its own name, as a tar archive. A guest made it: unpack with care.
    pub async fn workspace_tar_read(&self, workspace: &str, query: &AtPath) -> Result<ByteStream, ClientError> {
        self.bytes(self.request(&route::workspace_tar_read, &[("workspace", workspace)])?.with_query(query)?).await
    }

    /// Unpacks a tar archive into a directory of a Workspace, which is made where missing.
    pub async fn workspace_tar_write(&self, workspace: &str, query: &AtPath, body: Body) -> Result<(), ClientError> {
        let call = self.request(&route::workspace_tar_write, &[("workspace", workspace)])?.with_query(query)?;
        self.empty(call.with_body("application/x-tar", body)).await
    }

    /// A Workspace as it is, as a compressed archive (tar, zstd).
    pub async fn workspace_export(&self, workspace: &str) -> Result<ByteStream, ClientError> {
        self.bytes(self.request(&route::workspace_export, &[("workspace", workspace)])?).await
    }

    /// Unpacks what was exported over what is in a Workspace.
    pub async fn workspace_import(&self, workspace: &str, body: Body) -> Result<(), ClientError> {
        let call = self.request(&route::workspace_import, &[("workspace", workspace)])?;
        self.empty(call.with_body("application/zstd", body)).await
    }

    /// All Images.
    pub async fn image_list(&self) -> Result<Page<Image>, ClientError> {
        self.json(self.request(&route::image_list, &[])?).await
    }

    /// One Image, by name, id or digest.
    pub async fn image_show(&self, image: &str) -> Result<Image, ClientError> {
        self.json(self.request(&route::image_show, &[("image", image)])?).await
    }

    /// Builds an Image and reports how it goes. Dropping the stream gives the build up.
    pub async fn image_build(&self, body: &BuildImage) -> Result<EventStream<BuildEvent>, ClientError> {
        self.events(self.request(&route::image_build, &[])?.with_json(body)?).await
    }

    /// Removes a name, and the Image where it was the last one.
    pub async fn image_remove(&self, image: &str) -> Result<RemovedImages, ClientError> {
        self.json(self.request(&route::image_remove, &[("image", image)])?).await
    }

    /// Removes Images that no name points to and nobody uses.
    pub async fn image_gc(&self) -> Result<RemovedImages, ClientError> {
        self.json(self.request(&route::image_gc, &[])?.waiting(LONG)).await
    }

    /// A page of events, newest first.
    pub async fn event_list(&self, query: &ListEvents) -> Result<Page<Event>, ClientError> {
        self.json(self.request(&route::event_list, &[])?.with_query(query)?).await
    }

    /// Follows events, from now or from `after` on.
    pub async fn event_follow(&self, query: &ListEvents) -> Result<EventStream<FeedEvent>, ClientError> {
        self.events(self.request(&route::event_list, &[])?.with_query(query)?).await
    }

    /// A page of the audit log, newest first.
    pub async fn audit_list(&self, query: &ListEvents) -> Result<Page<Event>, ClientError> {
        self.json(self.request(&route::audit_list, &[])?.with_query(query)?).await
    }

    /// Follows the audit log, from now or from `after` on.
    pub async fn audit_follow(&self, query: &ListEvents) -> Result<EventStream<FeedEvent>, ClientError> {
        self.events(self.request(&route::audit_list, &[])?.with_query(query)?).await
    }

    /// Makes an App.
    pub async fn app_create(&self, body: &CreateApp) -> Result<App, ClientError> {
        self.json(self.request(&route::app_create, &[])?.with_json(body)?).await
    }

    /// All Apps that the caller may see.
    pub async fn app_list(&self, query: &ListApps) -> Result<Page<App>, ClientError> {
        self.json(self.request(&route::app_list, &[])?.with_query(query)?).await
    }

    /// One App, by id or name.
    pub async fn app_show(&self, app: &str) -> Result<App, ClientError> {
        self.json(self.request(&route::app_show, &[("app", app)])?).await
    }

    /// Changes an App.
    pub async fn app_update(&self, app: &str, body: &UpdateApp) -> Result<App, ClientError> {
        self.json(self.request(&route::app_update, &[("app", app)])?.with_json(body)?).await
    }

    /// Removes an App with its keys.
    pub async fn app_remove(&self, app: &str, query: &RemoveApp) -> Result<App, ClientError> {
        let call = self.request(&route::app_remove, &[("app", app)])?.with_query(query)?;
        self.json(call.waiting(LONG)).await
    }

    /// An App's file, TOML.
    pub async fn app_file_show(&self, app: &str, query: &ShowFile) -> Result<ByteStream, ClientError> {
        self.bytes(self.request(&route::app_file_show, &[("app", app)])?.with_query(query)?).await
    }

    /// Puts an App's file in force.
    pub async fn app_file_apply(
        &self,
        app: &str,
        query: &ApplyFile,
        text: impl Into<Bytes>,
    ) -> Result<AppliedFile, ClientError> {
        let call = self.request(&route::app_file_apply, &[("app", app)])?.with_query(query)?;
        self.json(call.with_body("application/toml", body_from(text))).await
    }

    /// Makes a key; its text is told this once.
    pub async fn key_create(&self, body: &CreateKey) -> Result<NewKey, ClientError> {
        self.json(self.request(&route::key_create, &[])?.with_json(body)?).await
    }

    /// The App's keys.
    pub async fn key_list(&self, query: &ListKeys) -> Result<Page<Key>, ClientError> {
        self.json(self.request(&route::key_list, &[])?.with_query(query)?).await
    }

    /// One key, by id or name.
    pub async fn key_show(&self, key: &str) -> Result<Key, ClientError> {
        self.json(self.request(&route::key_show, &[("key", key)])?).await
    }

    /// Makes a short-lived token for one Session; its text is told this once.
    pub async fn token_create(&self, session: &str, body: &CreateToken) -> Result<NewToken, ClientError> {
        self.json(self.request(&route::token_create, &[("session", session)])?.with_json(body)?).await
    }

    /// Ends every token of this Session that was made until now.
    pub async fn token_revoke(&self, session: &str) -> Result<(), ClientError> {
        self.empty(self.request(&route::token_revoke, &[("session", session)])?.waiting(30)).await
    }

    /// The published ports of a Session.
    pub async fn port_list(&self, session: &str) -> Result<Page<PublishedPort>, ClientError> {
        self.json(self.request(&route::port_list, &[("session", session)])?).await
    }

    /// Publishes a port, or sets another end for it.
    pub async fn port_publish(
        &self,
        session: &str,
        port: u16,
        body: &PublishPort,
    ) -> Result<PublishedPort, ClientError> {
        let port = port.to_string();
        let call = self.request(&route::port_publish, &[("session", session), ("port", &port)])?.with_json(body)?;
        self.json(call.waiting(30)).await
    }

    /// Withdraws a published port, at once.
    pub async fn port_withdraw(&self, session: &str, port: u16) -> Result<(), ClientError> {
        let port = port.to_string();
        let call = self.request(&route::port_withdraw, &[("session", session), ("port", &port)])?;
        self.empty(call.waiting(30)).await
    }

    /// Whether this key could do that, and why.
    pub async fn key_can(&self, key: &str, query: &AskKey) -> Result<KeyCan, ClientError> {
        self.json(self.request(&route::key_can, &[("key", key)])?.with_query(query)?).await
    }

    /// Makes a key that takes this one's place.
    pub async fn key_rotate(&self, key: &str, body: &RotateKey) -> Result<NewKey, ClientError> {
        self.json(self.request(&route::key_rotate, &[("key", key)])?.with_json(body)?).await
    }

    /// Ends a key at once.
    pub async fn key_revoke(&self, key: &str) -> Result<Key, ClientError> {
        self.json(self.request(&route::key_revoke, &[("key", key)])?.waiting(30)).await
    }

    /// Which Pepo that is.
    pub async fn version(&self) -> Result<Version, ClientError> {
        self.json(self.request(&route::version, &[])?).await
    }

    /// Every setting and where it came from.
    pub async fn config_show(&self) -> Result<ConfigShown, ClientError> {
        self.json(self.request(&route::config_show, &[])?).await
    }

    /// Looks at the host.
    pub async fn doctor(&self) -> Result<DoctorReport, ClientError> {
        self.json(self.request(&route::doctor, &[])?.waiting(60)).await
    }

    /// Looks at the host, and measures in a Sandbox how much slower it is there.
    pub async fn doctor_measured(&self) -> Result<DoctorReport, ClientError> {
        let call = self.request(&route::doctor, &[])?.with_query(&ShowDoctor { measure: true })?;
        self.json(call.waiting(180)).await
    }

    /// Removes what nobody owns.
    pub async fn sweep(&self, body: &SweepRequest) -> Result<SweepReport, ClientError> {
        self.json(self.request(&route::sweep, &[])?.with_json(body)?.waiting(60)).await
    }

    /// Takes nothing new and waits for what runs, or takes new work again.
    pub async fn drain(&self, body: &DrainRequest) -> Result<DrainReport, ClientError> {
        // Beyond the deadline the rest is stopped, which is bounded too.
        let patience = body.deadline_seconds.saturating_add(120);
        self.json(self.request(&route::drain, &[])?.with_json(body)?.waiting(patience)).await
    }

    /// What of the instance cannot be made again, as a tar stream: with the keys of secrets in it.
    pub async fn backup(&self) -> Result<ByteStream, ClientError> {
        self.bytes(self.request(&route::backup, &[])?.waiting(LONG)).await
    }

    /// Ends the daemon and every Sandbox.
    pub async fn down(&self) -> Result<(), ClientError> {
        self.empty(self.request(&route::down, &[])?.waiting(60)).await
    }

    /// Whether it lives.
    pub async fn healthz(&self) -> Result<Health, ClientError> {
        self.json(self.request(&route::healthz, &[])?).await
    }

    /// Whether it can take work.
    pub async fn readyz(&self) -> Result<Health, ClientError> {
        self.json(self.request(&route::readyz, &[])?).await
    }
}

impl Text {
    /// The bytes, whichever form they came in; what is not base64 is nothing.
    pub fn into_bytes(self) -> Vec<u8> {
        match self {
            Text::Utf8(text) => text.into_bytes(),
            Text::Binary { base64 } => BASE64.decode(base64).unwrap_or_default(),
        }
    }
}

impl RecipeFile {
    /// A file with these bytes.
    pub fn of(bytes: &[u8], executable: bool) -> Self {
        RecipeFile { base64: BASE64.encode(bytes), executable }
    }
}

const OCTETS: &str = "application/octet-stream";

fn upgrade_headers(headers: &mut HeaderMap) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(DIAL_UPGRADE));
}
