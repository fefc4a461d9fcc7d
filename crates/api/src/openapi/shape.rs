//! What goes in and out of each row: queries, bodies, answers, and how far a request reaches (which says what may go wrong).

mod port;

use std::borrow::Cow;

use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, Schema, Type};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{IntoParams, ToSchema};

use crate::query::*;
use crate::*;

/// Makes a type's name and its schema.
type Named = Box<dyn Fn() -> (String, RefOr<Schema>)>;

/// A type of the API as a schema.
pub(super) struct Model {
    /// Its name among the schemas.
    pub name: Cow<'static, str>,
    /// How others refer to it.
    pub reference: Box<dyn Fn() -> RefOr<Schema>>,
    /// Itself, where it is kept under its name.
    pub itself: Option<Named>,
    /// Every schema that it refers to.
    pub below: fn(&mut Vec<(String, RefOr<Schema>)>),
}

impl Model {
    /// One.
    pub fn of<T: ToSchema>() -> Self {
        let name = T::name();
        let (short, long) = (name.to_string(), name.to_string());
        Model {
            name,
            reference: Box::new(move || RefOr::Ref(Ref::from_schema_name(short.clone()))),
            itself: Some(Box::new(move || (long.clone(), T::schema()))),
            below: T::schemas,
        }
    }

    /// A page of them.
    fn page<T: ToSchema>() -> Self {
        let name = format!("{}Page", T::name());
        let short = name.clone();
        let itself = move || {
            let item = Ref::from_schema_name(T::name());
            let cursor = ObjectBuilder::new()
                .schema_type(Type::String)
                .description(Some("Give it as `cursor` for the next page; absent at the end"));
            let page = ObjectBuilder::new()
                .property("items", ArrayBuilder::new().items(item))
                .property("next_cursor", cursor)
                .required("items");
            (name.clone(), RefOr::T(Schema::Object(page.build())))
        };
        Model {
            name: Cow::Owned(short.clone()),
            reference: Box::new(move || RefOr::Ref(Ref::from_schema_name(short.clone()))),
            itself: Some(Box::new(itself)),
            below: |all| {
                T::schemas(all);
                all.push((T::name().into_owned(), T::schema()));
            },
        }
    }

    /// JSON of no type of ours.
    fn any() -> Self {
        let object = || RefOr::T(Schema::Object(ObjectBuilder::new().schema_type(Type::Object).build()));
        Model { name: Cow::Borrowed("object"), reference: Box::new(object), itself: None, below: |_| {} }
    }
}

/// How far a request reaches.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Pepo itself.
    Host,
    /// A Session's record or its Sandbox.
    Session,
    /// Into the guest, which may have to be made first.
    Guest,
}

/// One row's.
pub(super) struct Shape {
    pub summary: &'static str,
    pub description: &'static str,
    pub query: Option<fn() -> Vec<Parameter>>,
    pub headers: &'static [(&'static str, &'static str)],
    pub body: Option<Model>,
    pub body_required: bool,
    pub raw_in: &'static str,
    pub raw_out: &'static str,
    pub answers: Vec<(u16, Option<Model>)>,
    pub answer_headers: &'static [(&'static str, &'static str)],
    pub event: Option<Model>,
    pub once: bool,
    pub located: bool,
    pub reach: Reach,
    /// Further statuses of errors.
    pub also: &'static [u16],
}

impl Shape {
    fn new(summary: &'static str) -> Self {
        Shape {
            summary,
            description: "",
            query: None,
            headers: &[],
            body: None,
            body_required: false,
            raw_in: "application/octet-stream",
            raw_out: "application/octet-stream",
            answers: Vec::new(),
            answer_headers: &[],
            event: None,
            once: false,
            located: false,
            reach: Reach::Host,
            also: &[],
        }
    }

    /// Every type that the row carries.
    pub fn models(&self) -> impl Iterator<Item = &Model> {
        self.body.iter().chain(self.answers.iter().filter_map(|(_, model)| model.as_ref())).chain(&self.event)
    }

    fn about(self, description: &'static str) -> Self {
        Shape { description, ..self }
    }

    fn query<Q: IntoParams>(self) -> Self {
        Shape { query: Some(|| Q::into_params(|| Some(ParameterIn::Query))), ..self }
    }

    fn headers(self, headers: &'static [(&'static str, &'static str)]) -> Self {
        Shape { headers, ..self }
    }

    /// A body without which the request means nothing.
    fn body<T: ToSchema>(self) -> Self {
        Shape { body: Some(Model::of::<T>()), body_required: true, ..self }
    }

    /// A body of which every field may be absent, and so may be itself.
    fn may_have<T: ToSchema>(self) -> Self {
        Shape { body: Some(Model::of::<T>()), ..self }
    }

    fn json<T: ToSchema>(mut self, status: u16) -> Self {
        self.answers.push((status, Some(Model::of::<T>())));
        self
    }

    fn page<T: ToSchema>(mut self) -> Self {
        self.answers.push((200, Some(Model::page::<T>())));
        self
    }

    fn plain(mut self, status: u16) -> Self {
        self.answers.push((status, None));
        self
    }

    fn events<T: ToSchema>(self) -> Self {
        Shape { event: Some(Model::of::<T>()), ..self }
    }

    fn once(self) -> Self {
        Shape { once: true, also: if self.also.is_empty() { &[409] } else { self.also }, ..self }
    }

    fn located(self) -> Self {
        Shape { located: true, ..self }
    }

    fn reach(self, reach: Reach) -> Self {
        Shape { reach, ..self }
    }

    fn also(self, also: &'static [u16]) -> Self {
        Shape { also, ..self }
    }
}

/// What a status says.
pub(super) fn meaning(status: u16) -> &'static str {
    match status {
        101 => "The connection is the caller's from here on",
        201 => "It was made",
        202 => "It goes on; the wait was over before it ended",
        204 => "It was done",
        206 => "The range that was asked for",
        304 => "It is as the caller knows it",
        503 => "It is not ready",
        _ => "As asked for",
    }
}

const RESUME: (&str, &str) = ("Last-Event-ID", "Event form: go on after this event; beats the query");
const RANGE: (&str, &str) = ("Range", "A part of it, as `bytes=0-99`, `bytes=100-`, `bytes=-100`");
const CONTENT_RANGE: (&str, &str) = ("Content-Range", "With 206: which part of how many bytes");

/// The shape of the row with that name.
pub(super) fn of(name: &str) -> Option<Shape> {
    let shape = match name.split('_').next()? {
        "session" => session(name)?,
        "command" => command(name)?,
        "file" | "tar" | "dial" => file(name)?,
        "port" => port::of(name)?,
        "workspace" => workspace(name)?,
        "app" | "key" => app(name)?,
        _ => other(name)?,
    };
    Some(shape)
}

fn session(name: &str) -> Option<Shape> {
    let says = Shape::new;
    Some(match name {
        "session_create" => says("Make a Session")
            .about("Answers at once; the Sandbox starts meanwhile, and the first request that needs it waits for it.")
            .may_have::<CreateSession>()
            .json::<Session>(201)
            .once()
            .located()
            .also(&[409, 502, 507]),
        "session_open" => says("Open the Session of a key, or make it")
            .about("Of any number of callers at once, one makes it. Settings that differ from those of the Session that is there are a conflict that names them.")
            .may_have::<CreateSession>()
            .json::<Session>(200)
            .json::<Session>(201)
            .located()
            .also(&[409, 410, 502, 507]),
        "session_list" => says("List Sessions, newest first").query::<ListSessions>().page::<Session>(),
        "session_show" => says("Look at a Session, or wait for a change of it").query::<ShowSession>().json::<Session>(200),
        "session_update" => {
            says("Change a Session").may_have::<UpdateSession>().json::<Session>(200).reach(Reach::Session)
        }
        "session_terminate" => says("End a Session for good")
            .about("Legal from every state. Its own Workspace goes with it unless it is kept; the record stays until retention.")
            .json::<Session>(200)
            .reach(Reach::Session),
        "session_release" => says("Give a Session's Sandbox back")
            .about("The next request that needs one gets a fresh one. A Session without a Workspace ends, unless `reactivate` was asked for.")
            .json::<Session>(200)
            .reach(Reach::Session),
        "session_services" => {
            says("See how a Session's Services are").query::<ShowServices>().page::<Service>().reach(Reach::Session)
        }
        "session_stats" => says("See what a Session uses now")
            .about("With `Accept: text/event-stream` every second, until the Sandbox ends.")
            .json::<SessionStats>(200)
            .events::<SessionStats>()
            .reach(Reach::Session),
        "session_console" => says("Read the guest's console").query::<ShowConsole>().plain(200),
        _ => return None,
    })
}

fn command(name: &str) -> Option<Shape> {
    let says = Shape::new;
    Some(match name {
        "command_create" => says("Run a command")
            .about(
                "Exactly one of `command` (a line for bash) and `argv`. 200 when it ended within `wait_seconds`, else 202; with \
                 `Accept: text/event-stream` its output as it comes. The same `id` again attaches and never runs twice.",
            )
            .body::<CreateCommand>()
            .json::<Output>(200)
            .json::<Output>(202)
            .events::<StreamEvent>()
            .once()
            .located()
            .reach(Reach::Guest),
        "command_list" => says("List the commands of a Session").query::<ListCommands>().page::<Command>(),
        "command_show" => says("Look at a command and its output, or follow it")
            .query::<ShowCommand>()
            .headers(&[RESUME])
            .json::<Output>(200)
            .json::<Output>(202)
            .events::<StreamEvent>()
            .also(&[409, 410, 502]),
        "command_kill" => says("Kill a command with all that it started").json::<Command>(200).reach(Reach::Session),
        "command_stdout" => output("Read what a command wrote to standard output"),
        "command_stderr" => output("Read what a command wrote to standard error"),
        "command_stdin" => says("Feed a command")
            .about("With `offset` a repeat after a lost connection is never typed twice.")
            .query::<WriteStdin>()
            .json::<StdinAnswer>(200)
            .reach(Reach::Session),
        "command_signal" => says("Send a command a signal").body::<SendSignal>().plain(204).reach(Reach::Session),
        "command_attach" => says("Join a command over a WebSocket")
            .about(
                "Subprotocol `pepo.attach.v1`. Binary messages, the first byte is the channel: 0 input, 1 output, 2 error \
                 output, 3 control as JSON (`AttachControl`).",
            )
            .query::<AttachCommand>()
            .plain(101)
            .events::<AttachControl>()
            .reach(Reach::Session),
        _ => return None,
    })
}

fn output(summary: &'static str) -> Shape {
    Shape::new(summary)
        .about("Bytes as they were written. A range is given of what has ended; of what runs, all that is there.")
        .headers(&[RANGE])
        .plain(200)
        .plain(206)
        .also(&[409, 410, 416, 502])
        .answering(&[CONTENT_RANGE])
}

impl Shape {
    fn answering(self, answer_headers: &'static [(&'static str, &'static str)]) -> Self {
        Shape { answer_headers, ..self }
    }
}

fn file(name: &str) -> Option<Shape> {
    let says = |summary| Shape::new(summary).reach(Reach::Guest);
    Some(match name {
        "file_read" => says("Read a file")
            .about("Its bytes, whole or a range of them.")
            .query::<AtPath>()
            .headers(&[
                RANGE,
                ("If-Range", "The `ETag` that the range is of; of another one the whole file is sent"),
                ("If-None-Match", "An `ETag`: 304 where it is still this one"),
            ])
            .plain(200)
            .plain(206)
            .plain(304)
            .also(&[416])
            .answering(&[
                CONTENT_RANGE,
                ("ETag", "Changes when size or time change"),
                ("Pepo-File-Mode", "Permission bits in octal"),
            ]),
        "file_write" => says("Write a file")
            .about("It is there whole, or as it was before: half a file never appears.")
            .query::<WriteFile>()
            .plain(204),
        "file_remove" => says("Remove a file or directory").query::<UnderPath>().plain(204),
        "file_stat" => says("Look at a file").query::<AtPath>().json::<FileEntry>(200),
        "file_list" => says("List a directory").query::<AtPath>().json::<FileList>(200),
        "file_watch" => says("Watch a file or directory")
            .about("Events named `change`, from the first line on, until the caller leaves or the Sandbox ends.")
            .query::<UnderPath>()
            .plain(200)
            .events::<FileChange>(),
        "file_make" => says("Make a directory or a symbolic link").body::<MakeFile>().plain(204),
        "file_rename" => says("Rename or move a file").body::<RenameFile>().plain(204),
        "tar_read" => {
            Shape { raw_out: "application/x-tar", ..says("Read a tree as a tar archive").query::<AtPath>().plain(200) }
        }
        "tar_write" => Shape {
            raw_in: "application/x-tar",
            ..says("Unpack a tar archive into a directory").query::<AtPath>().plain(204)
        },
        "dial" => says("Connect to a port inside")
            .about("With `Upgrade: pepo-dial`; raw bytes both ways after 101.")
            .plain(101),
        _ => return None,
    })
}

fn workspace(name: &str) -> Option<Shape> {
    let says = Shape::new;
    // What is had alone by a Sandbox is not written without its Session.
    let changes = |summary| says(summary).plain(204).also(&[409]);
    Some(match name {
        "workspace_file_read" => says("Read a file of a Workspace")
            .about("Its bytes, whole or a range of them. Paths are from the top of the Workspace.")
            .query::<AtPath>()
            .headers(&[RANGE])
            .plain(200)
            .plain(206)
            .plain(304)
            .also(&[409, 416])
            .answering(&[CONTENT_RANGE]),
        "workspace_file_write" => changes("Write a file of a Workspace")
            .about("It is there whole, or as it was before: half a file never appears.")
            .query::<WriteFile>(),
        "workspace_file_remove" => changes("Remove a file or directory of a Workspace").query::<UnderPath>(),
        "workspace_file_stat" => {
            says("Look at a file of a Workspace").query::<AtPath>().json::<FileEntry>(200).also(&[409])
        }
        "workspace_file_list" => {
            says("List a directory of a Workspace").query::<AtPath>().json::<FileList>(200).also(&[409])
        }
        "workspace_file_make" => changes("Make a directory or a symbolic link in a Workspace").body::<MakeFile>(),
        "workspace_file_rename" => changes("Rename or move a file of a Workspace").body::<RenameFile>(),
        "workspace_tar_read" => Shape {
            raw_out: "application/x-tar",
            ..says("Read a tree of a Workspace as a tar archive").query::<AtPath>().plain(200).also(&[409])
        },
        "workspace_tar_write" => Shape {
            raw_in: "application/x-tar",
            ..changes("Unpack a tar archive into a directory of a Workspace").query::<AtPath>()
        },
        "workspace_export" => Shape {
            raw_out: "application/zstd",
            ..says("Export a Workspace").about("A tar archive, compressed, of all of it as it is.").plain(200)
        },
        "workspace_import" => Shape {
            raw_in: "application/zstd",
            ..changes("Import into a Workspace").about("Unpacks an export, or a plain tar archive, over what is there.")
        },
        "workspace_create" => {
            says("Make a Workspace").may_have::<CreateWorkspace>().json::<Workspace>(201).once().located()
        }
        "workspace_list" => says("List Workspaces, newest first").query::<ListWorkspaces>().page::<Workspace>(),
        "workspace_show" => says("Look at a Workspace and what it uses").json::<Workspace>(200),
        "workspace_update" => {
            says("Change a Workspace").may_have::<UpdateWorkspace>().json::<Workspace>(200).also(&[409])
        }
        "workspace_remove" => says("Remove a Workspace with all its files")
            .query::<RemoveWorkspace>()
            .json::<RemovedWorkspace>(200)
            .also(&[409]),
        _ => return None,
    })
}

fn app(name: &str) -> Option<Shape> {
    let says = Shape::new;
    Some(match name {
        "app_create" => says("Make an App").body::<CreateApp>().json::<App>(201).once().located(),
        "app_list" => says("List Apps: for a key, its own").query::<ListApps>().page::<App>(),
        "app_show" => says("Look at an App").json::<App>(200),
        "app_update" => says("Change an App").may_have::<UpdateApp>().json::<App>(200).also(&[409]),
        "app_remove" => says("Remove an App").query::<RemoveApp>().json::<App>(200).also(&[409]),
        "app_file_show" => Shape {
            raw_out: "application/toml",
            ..says("Read an App's file")
                .query::<ShowFile>()
                .plain(200)
                .answering(&[("Pepo-Version", "The version it is")])
        },
        "app_file_apply" => Shape {
            raw_in: "application/toml",
            ..says("Apply an App file").query::<ApplyFile>().json::<AppliedFile>(200).also(&[409])
        },
        "key_create" => says("Make a key")
            .about("The only answer that has its text. A repeat under the same `Idempotency-Key` is a conflict, since nobody can read it again.")
            .may_have::<CreateKey>()
            .json::<NewKey>(201)
            .once()
            .located(),
        "key_list" => says("List keys").query::<ListKeys>().page::<Key>(),
        "key_show" => says("Look at a key").json::<Key>(200),
        "key_can" => says("Ask whether a key could do something, and why")
            .about("What the edge and the daemon would say. What is another App's is as absent as what was never made.")
            .query::<AskKey>()
            .json::<KeyCan>(200),
        "key_rotate" => says("Replace a key")
            .about("The old one stays valid for as long as is asked for.")
            .may_have::<RotateKey>()
            .json::<NewKey>(201)
            .located()
            .also(&[409]),
        "key_revoke" => says("Revoke a key, at once").json::<Key>(200),
        _ => return None,
    })
}

fn other(name: &str) -> Option<Shape> {
    let says = Shape::new;
    Some(match name {
        "usage" => says("See what was used").query::<ShowUsage>().json::<UsageReport>(200),
        "image_list" => says("List Images").page::<Image>(),
        "image_show" => says("Look at an Image").json::<Image>(200),
        "image_build" => {
            says("Build an Image").may_have::<BuildImage>().plain(200).events::<BuildEvent>().also(&[409, 507])
        }
        "image_remove" => says("Remove an Image").json::<RemovedImages>(200).also(&[409]),
        "image_gc" => says("Remove Images that nothing uses").json::<RemovedImages>(200),
        "event_list" => says("See what happened, or follow it")
            .query::<ListEvents>()
            .headers(&[RESUME])
            .page::<Event>()
            .events::<FeedEvent>(),
        "audit_list" => says("See who asked for what, or follow it")
            .query::<ListEvents>()
            .headers(&[RESUME])
            .page::<Event>()
            .events::<FeedEvent>(),
        "version" => says("See which Pepo this is").json::<Version>(200),
        "config_show" => says("See every setting and where it is from").json::<ConfigShown>(200),
        "doctor" => says("Look at the host").query::<ShowDoctor>().json::<DoctorReport>(200),
        "sweep" => says("Remove what dead Sandboxes left").may_have::<SweepRequest>().json::<SweepReport>(200),
        "drain" => {
            says("Take nothing new, and let what runs finish").may_have::<DrainRequest>().json::<DrainReport>(200)
        }
        "down" => says("End the daemon and every Sandbox").plain(204),
        "backup" => Shape { raw_out: "application/x-tar", ..says("Save what cannot be made again").plain(200) },
        "edge_state" => says("Read what the edge needs").query::<ShowEdgeState>().json::<EdgeState>(200),
        "edge_decisions" => says("Tell what the edge refused").body::<EdgeDecisions>().plain(204),
        "token_create" => says("Make a token of a Session, for a browser")
            .about("It ends by its time, with the Session, with the key that made it, and when the Session's tokens are revoked.")
            .may_have::<CreateToken>()
            .json::<NewToken>(201)
            .also(&[410]),
        "token_revoke" => says("Revoke every token of a Session, at once").plain(204).also(&[410]),
        "healthz" => says("Whether it lives").json::<Health>(200),
        "readyz" => says("Whether requests would be served").json::<Health>(200).json::<Health>(503),
        "openapi" => Shape { answers: vec![(200, Some(Model::any()))], ..says("This document") },
        "reference" => Shape { raw_out: "text/html", ..says("This document as a page").plain(200) },
        _ => return None,
    })
}
