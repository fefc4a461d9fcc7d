//! The one table of routes. Daemon, edge and client read it; a row without an action does not compile.

use http::Method;

use crate::scope::Resource;

/// Who may call a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// An App's callers through the edge, and the operator.
    Tenant,
    /// The operator alone: not on the edge's socket.
    Operator,
    /// The edge process itself: on its socket alone.
    Edge,
    /// Anyone who can connect, without a credential.
    Anyone,
}

macro_rules! actions {
    ($($(#[doc = $doc:literal])+ $variant:ident = $word:literal;)+) => {
        /// What authorization asks about.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Action {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Action {
            /// Every action.
            pub const ALL: &'static [Action] = &[$(Action::$variant),+];

            /// Its word in scopes.
            pub fn word(self) -> &'static str {
                match self { $(Action::$variant => $word),+ }
            }
        }
    };
}

actions! {
    /// See Sessions.
    SessionsRead = "sessions:read";
    /// Make, change and end Sessions.
    SessionsWrite = "sessions:write";
    /// See Commands and their output.
    CommandsRead = "commands:read";
    /// Run Commands and speak to them.
    CommandsRun = "commands:run";
    /// See files.
    FilesRead = "files:read";
    /// Change files.
    FilesWrite = "files:write";
    /// Connect to a port inside.
    PortsConnect = "ports:connect";
    /// Publish a port inside to whoever has its address, and withdraw it.
    PortsPublish = "ports:publish";
    /// Make and revoke tokens of a Session.
    TokensWrite = "tokens:write";
    /// See Workspaces and their files.
    WorkspacesRead = "workspaces:read";
    /// Make, change and remove Workspaces and their files.
    WorkspacesWrite = "workspaces:write";
    /// See Images.
    ImagesRead = "images:read";
    /// Build and remove Images.
    ImagesWrite = "images:write";
    /// Follow what happens.
    EventsRead = "events:read";
    /// See the App and its file.
    AppsRead = "app:read";
    /// Change the App and its file.
    AppsWrite = "app:admin";
    /// See the App's keys.
    KeysRead = "app:admin";
    /// Make and revoke the App's keys.
    KeysWrite = "app:admin";
    /// See who asked for what.
    AuditRead = "app:admin";
    /// See what was used.
    UsageRead = "usage:read";
    /// Look at and steer the host.
    HostOperate = "host:operate";
    /// Read what the edge needs.
    EdgeSync = "edge:sync";
    /// Ask whether it lives, and how it is spoken to.
    Health = "health";
}

impl Action {
    /// Whether an App's callers can be allowed it at all.
    pub fn is_tenants(self) -> bool {
        !matches!(self, Action::ImagesWrite | Action::HostOperate | Action::EdgeSync | Action::Health)
    }
}

/// What a route is about: the kind of thing that authorization looks at beside the action. A path says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The App as a whole: its lists, what is made in it, its usage, its log.
    App,
    /// One Session and what is in it.
    Session,
    /// One port of one Session.
    Port,
    /// One Workspace.
    Workspace,
    /// One Image.
    Image,
    /// One key.
    Key,
}

impl Subject {
    const fn of(path: &str) -> Self {
        const KINDS: &[(&str, Subject)] = &[
            ("{port}", Subject::Port),
            ("{session}", Subject::Session),
            ("{workspace}", Subject::Workspace),
            ("{image}", Subject::Image),
            ("/keys/{key}", Subject::Key),
        ];
        let mut n = 0;
        while n < KINDS.len() {
            if holds(path.as_bytes(), KINDS[n].0.as_bytes()) {
                return KINDS[n].1;
            }
            n += 1;
        }
        Subject::App
    }
}

const fn holds(text: &[u8], word: &[u8]) -> bool {
    let mut at = 0;
    while at + word.len() <= text.len() {
        let mut n = 0;
        while n < word.len() && text[at + n] == word[n] {
            n += 1;
        }
        if n == word.len() {
            return true;
        }
        at += 1;
    }
    false
}

/// What a request carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// Nothing.
    None,
    /// JSON of at most 1 MiB.
    Json,
    /// Bytes without a length known before.
    Raw,
}

/// What an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// JSON.
    Json,
    /// JSON or server-sent events, as `Accept` says.
    JsonOrEvents,
    /// Server-sent events.
    Events,
    /// Bytes.
    Raw,
    /// Nothing.
    Empty,
    /// A WebSocket.
    WebSocket,
    /// Raw bytes both ways after 101.
    Upgrade,
    /// Whatever a program in the guest answers over HTTP, a WebSocket too.
    Guest,
}

/// The last segment of a pattern that takes all that is left of a path, however many segments that are, or none.
pub const REST: &str = "{rest}";

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// A name for logs, metrics and [`route`].
    pub name: &'static str,
    /// The method.
    pub method: &'static Method,
    /// The path, parameters in braces.
    pub path: &'static str,
    /// What authorization asks about.
    pub action: Action,
    /// What it is about.
    pub subject: Subject,
    /// Who may call it.
    pub audience: Audience,
    /// What it carries.
    pub body: Body,
    /// What it answers.
    pub answer: Answer,
}

impl Route {
    /// What this path, which fits the row's, is about.
    pub fn resource<'a>(&self, path: &'a str) -> Resource<'a> {
        let part = |name: &str| {
            let mut both = self.path.split('/').zip(path.split('/'));
            both.find(|(pattern, _)| *pattern == name).map_or("", |(_, given)| given)
        };
        match self.subject {
            Subject::App => Resource::App,
            Subject::Session => Resource::Session(part("{session}")),
            Subject::Port => Resource::Port(part("{session}"), part("{port}")),
            Subject::Workspace => Resource::Workspace(part("{workspace}")),
            Subject::Image => Resource::Image(part("{image}")),
            Subject::Key => Resource::Key(part("{key}")),
        }
    }

    /// Whether it changes something, or opens a way in that can: what the audit log tells of.
    pub fn changes(&self) -> bool {
        !self.method.is_safe() || matches!(self.answer, Answer::WebSocket | Answer::Upgrade)
    }

    /// The path before [`REST`], where the pattern ends so.
    pub fn before_rest(&self) -> Option<&'static str> {
        self.path.strip_suffix(REST)
    }
}

const GET: &Method = &Method::GET;
const HEAD: &Method = &Method::HEAD;
const OPTIONS: &Method = &Method::OPTIONS;
const POST: &Method = &Method::POST;
const PUT: &Method = &Method::PUT;
const PATCH: &Method = &Method::PATCH;
const DELETE: &Method = &Method::DELETE;

macro_rules! routes {
    ($($name:ident: $method:ident $path:literal, $action:ident, $audience:ident, $body:ident -> $answer:ident;)+) => {
        /// Every route by its name.
        #[allow(non_upper_case_globals, missing_docs)]
        pub mod route {
            use super::*;
            $(pub const $name: Route = Route {
                name: stringify!($name),
                method: $method,
                path: $path,
                action: Action::$action,
                subject: Subject::of($path),
                audience: Audience::$audience,
                body: Body::$body,
                answer: Answer::$answer,
            };)+
        }

        /// Every route.
        pub const ROUTES: &[Route] = &[$(route::$name),+];
    };
}

routes! {
    session_create: POST "/v1/sessions", SessionsWrite, Tenant, Json -> Json;
    session_list: GET "/v1/sessions", SessionsRead, Tenant, None -> Json;
    session_show: GET "/v1/sessions/{session}", SessionsRead, Tenant, None -> Json;
    session_update: PATCH "/v1/sessions/{session}", SessionsWrite, Tenant, Json -> Json;
    session_terminate: DELETE "/v1/sessions/{session}", SessionsWrite, Tenant, None -> Json;
    session_release: POST "/v1/sessions/{session}/release", SessionsWrite, Tenant, None -> Json;
    session_open: PUT "/v1/sessions/by-key/{key}", SessionsWrite, Tenant, Json -> Json;
    session_services: GET "/v1/sessions/{session}/services", SessionsRead, Tenant, None -> Json;
    session_stats: GET "/v1/sessions/{session}/stats", SessionsRead, Tenant, None -> JsonOrEvents;
    usage: GET "/v1/usage", UsageRead, Tenant, None -> Json;
    session_console: GET "/v1/sessions/{session}/console", HostOperate, Operator, None -> Raw;
    command_create: POST "/v1/sessions/{session}/commands", CommandsRun, Tenant, Json -> JsonOrEvents;
    command_list: GET "/v1/sessions/{session}/commands", CommandsRead, Tenant, None -> Json;
    command_show: GET "/v1/sessions/{session}/commands/{command}", CommandsRead, Tenant, None -> JsonOrEvents;
    command_kill: DELETE "/v1/sessions/{session}/commands/{command}", CommandsRun, Tenant, None -> Json;
    command_stdout: GET "/v1/sessions/{session}/commands/{command}/stdout", CommandsRead, Tenant, None -> Raw;
    command_stderr: GET "/v1/sessions/{session}/commands/{command}/stderr", CommandsRead, Tenant, None -> Raw;
    command_stdin: POST "/v1/sessions/{session}/commands/{command}/stdin", CommandsRun, Tenant, Raw -> Json;
    command_signal: POST "/v1/sessions/{session}/commands/{command}/signal", CommandsRun, Tenant, Json -> Empty;
    command_attach: GET "/v1/sessions/{session}/commands/{command}/attach", CommandsRun, Tenant, None -> WebSocket;
    file_read: GET "/v1/sessions/{session}/files", FilesRead, Tenant, None -> Raw;
    file_write: PUT "/v1/sessions/{session}/files", FilesWrite, Tenant, Raw -> Empty;
    file_remove: DELETE "/v1/sessions/{session}/files", FilesWrite, Tenant, None -> Empty;
    file_stat: GET "/v1/sessions/{session}/files/stat", FilesRead, Tenant, None -> Json;
    file_list: GET "/v1/sessions/{session}/files/list", FilesRead, Tenant, None -> Json;
    file_watch: GET "/v1/sessions/{session}/files/watch", FilesRead, Tenant, None -> Events;
    file_make: POST "/v1/sessions/{session}/files/make", FilesWrite, Tenant, Json -> Empty;
    file_rename: POST "/v1/sessions/{session}/files/rename", FilesWrite, Tenant, Json -> Empty;
    tar_read: GET "/v1/sessions/{session}/tar", FilesRead, Tenant, None -> Raw;
    tar_write: PUT "/v1/sessions/{session}/tar", FilesWrite, Tenant, Raw -> Empty;
    dial: GET "/v1/sessions/{session}/dial/{port}", PortsConnect, Tenant, None -> Upgrade;
    port_get: GET "/v1/sessions/{session}/ports/{port}/{rest}", PortsConnect, Tenant, None -> Guest;
    port_head: HEAD "/v1/sessions/{session}/ports/{port}/{rest}", PortsConnect, Tenant, None -> Guest;
    port_options: OPTIONS "/v1/sessions/{session}/ports/{port}/{rest}", PortsConnect, Tenant, None -> Guest;
    port_post: POST "/v1/sessions/{session}/ports/{port}/{rest}", PortsConnect, Tenant, Raw -> Guest;
    port_put: PUT "/v1/sessions/{session}/ports/{port}/{rest}", PortsConnect, Tenant, Raw -> Guest;
    port_patch: PATCH "/v1/sessions/{session}/ports/{port}/{rest}", PortsConnect, Tenant, Raw -> Guest;
    port_delete: DELETE "/v1/sessions/{session}/ports/{port}/{rest}", PortsConnect, Tenant, Raw -> Guest;
    port_list: GET "/v1/sessions/{session}/published", SessionsRead, Tenant, None -> Json;
    port_publish: PUT "/v1/sessions/{session}/published/{port}", PortsPublish, Tenant, Json -> Json;
    port_withdraw: DELETE "/v1/sessions/{session}/published/{port}", PortsPublish, Tenant, None -> Empty;
    token_create: POST "/v1/sessions/{session}/tokens", TokensWrite, Tenant, Json -> Json;
    token_revoke: DELETE "/v1/sessions/{session}/tokens", TokensWrite, Tenant, None -> Empty;
    workspace_create: POST "/v1/workspaces", WorkspacesWrite, Tenant, Json -> Json;
    workspace_list: GET "/v1/workspaces", WorkspacesRead, Tenant, None -> Json;
    workspace_show: GET "/v1/workspaces/{workspace}", WorkspacesRead, Tenant, None -> Json;
    workspace_update: PATCH "/v1/workspaces/{workspace}", WorkspacesWrite, Tenant, Json -> Json;
    workspace_remove: DELETE "/v1/workspaces/{workspace}", WorkspacesWrite, Tenant, None -> Json;
    workspace_file_read: GET "/v1/workspaces/{workspace}/files", WorkspacesRead, Tenant, None -> Raw;
    workspace_file_write: PUT "/v1/workspaces/{workspace}/files", WorkspacesWrite, Tenant, Raw -> Empty;
    workspace_file_remove: DELETE "/v1/workspaces/{workspace}/files", WorkspacesWrite, Tenant, None -> Empty;
    workspace_file_stat: GET "/v1/workspaces/{workspace}/files/stat", WorkspacesRead, Tenant, None -> Json;
    workspace_file_list: GET "/v1/workspaces/{workspace}/files/list", WorkspacesRead, Tenant, None -> Json;
    workspace_file_make: POST "/v1/workspaces/{workspace}/files/make", WorkspacesWrite, Tenant, Json -> Empty;
    workspace_file_rename: POST "/v1/workspaces/{workspace}/files/rename", WorkspacesWrite, Tenant, Json -> Empty;
    workspace_tar_read: GET "/v1/workspaces/{workspace}/tar", WorkspacesRead, Tenant, None -> Raw;
    workspace_tar_write: PUT "/v1/workspaces/{workspace}/tar", WorkspacesWrite, Tenant, Raw -> Empty;
    workspace_export: GET "/v1/workspaces/{workspace}/export", WorkspacesRead, Tenant, None -> Raw;
    workspace_import: PUT "/v1/workspaces/{workspace}/import", WorkspacesWrite, Tenant, Raw -> Empty;
    image_list: GET "/v1/images", ImagesRead, Tenant, None -> Json;
    image_show: GET "/v1/images/{image}", ImagesRead, Tenant, None -> Json;
    image_build: POST "/v1/images", ImagesWrite, Operator, Json -> Events;
    image_remove: DELETE "/v1/images/{image}", ImagesWrite, Operator, None -> Json;
    image_gc: POST "/v1/images/gc", ImagesWrite, Operator, None -> Json;
    event_list: GET "/v1/events", EventsRead, Tenant, None -> JsonOrEvents;
    audit_list: GET "/v1/audit", AuditRead, Tenant, None -> JsonOrEvents;
    app_create: POST "/v1/apps", HostOperate, Operator, Json -> Json;
    app_list: GET "/v1/apps", AppsRead, Tenant, None -> Json;
    app_show: GET "/v1/apps/{app}", AppsRead, Tenant, None -> Json;
    app_update: PATCH "/v1/apps/{app}", AppsWrite, Tenant, Json -> Json;
    app_remove: DELETE "/v1/apps/{app}", HostOperate, Operator, None -> Json;
    app_file_show: GET "/v1/apps/{app}/file", AppsRead, Tenant, None -> Raw;
    app_file_apply: PUT "/v1/apps/{app}/file", AppsWrite, Tenant, Raw -> Json;
    key_create: POST "/v1/keys", KeysWrite, Tenant, Json -> Json;
    key_list: GET "/v1/keys", KeysRead, Tenant, None -> Json;
    key_show: GET "/v1/keys/{key}", KeysRead, Tenant, None -> Json;
    key_can: GET "/v1/keys/{key}/can", KeysRead, Tenant, None -> Json;
    key_rotate: POST "/v1/keys/{key}/rotate", KeysWrite, Tenant, Json -> Json;
    key_revoke: DELETE "/v1/keys/{key}", KeysWrite, Tenant, None -> Json;
    version: GET "/v1/version", SessionsRead, Tenant, None -> Json;
    config_show: GET "/v1/config", HostOperate, Operator, None -> Json;
    doctor: GET "/v1/doctor", HostOperate, Operator, None -> Json;
    sweep: POST "/v1/sweep", HostOperate, Operator, Json -> Json;
    drain: POST "/v1/drain", HostOperate, Operator, Json -> Json;
    down: POST "/v1/down", HostOperate, Operator, None -> Empty;
    backup: POST "/v1/backup", HostOperate, Operator, None -> Raw;
    edge_state: GET "/v1/edge/state", EdgeSync, Edge, None -> Json;
    edge_decisions: POST "/v1/edge/decisions", EdgeSync, Edge, Json -> Empty;
    healthz: GET "/healthz", Health, Anyone, None -> Json;
    readyz: GET "/readyz", Health, Anyone, None -> Json;
    openapi: GET "/openapi.json", Health, Anyone, None -> Json;
    reference: GET "/docs", Health, Anyone, None -> Raw;
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_routes_share_a_name_or_a_place() {
        let mut names = HashSet::new();
        let mut places = HashSet::new();
        for route in ROUTES {
            assert!(names.insert(route.name), "{}", route.name);
            assert!(places.insert((route.method, route.path)), "{} {}", route.method, route.path);
        }
    }

    #[test]
    fn a_path_says_what_a_row_is_about() {
        for row in ROUTES {
            let (session, port) = (row.path.contains("{session}"), row.path.contains("{port}"));
            assert_eq!(matches!(row.subject, Subject::Session | Subject::Port), session, "{}", row.name);
            assert_eq!(row.subject == Subject::Port, port, "{}", row.name);
        }
        assert_eq!(route::session_open.subject, Subject::App, "a key of a Session is no key of the App");
        assert_eq!(route::key_show.subject, Subject::Key);
        assert_eq!(route::dial.resource("/v1/sessions/web/dial/80"), Resource::Port("web", "80"));
        assert_eq!(route::port_get.resource("/v1/sessions/web/ports/80/a/b"), Resource::Port("web", "80"));
        assert_eq!(route::port_post.resource("/v1/sessions/web/ports/80/"), Resource::Port("web", "80"));
        assert_eq!(route::file_read.resource("/v1/sessions/web/files"), Resource::Session("web"));
        assert_eq!(route::session_list.resource("/v1/sessions"), Resource::App);
    }

    #[test]
    fn what_takes_the_rest_of_a_path_is_about_a_port() {
        for row in ROUTES {
            assert_eq!(row.path.contains(REST), row.before_rest().is_some(), "{}", row.name);
            assert_eq!(row.before_rest().is_some(), row.answer == Answer::Guest, "{}", row.name);
            assert!(row.before_rest().is_none() || row.subject == Subject::Port, "{}", row.name);
        }
    }

    #[test]
    fn a_tenants_row_asks_for_what_a_tenant_can_be_allowed_and_no_other_row_does() {
        for row in ROUTES {
            assert_eq!(row.action.is_tenants(), row.audience == Audience::Tenant, "{}", row.name);
            if row.changes() && row.audience == Audience::Tenant {
                assert!(
                    !row.action.word().ends_with(":read"),
                    "{} changes something by {}",
                    row.name,
                    row.action.word()
                );
            }
        }
    }
}
