//! Two Sandboxes side by side on one host: one does its own small work, the other one everything that a neighbour may be
//! feared for. Used by the tests, which ask whether each is contained, and by the figures, which ask what it costs.

use std::time::{Duration, Instant};

use pepo_api::client::Client;
use pepo_api::query::ShowCommand;
use pepo_api::{CommandId, CreateCommand, CreateSession, NetworkSpec, OnDisconnect, Output, Text};

use crate::program::Started;
use crate::world::{SERVER, World};
use crate::{Instance, bare};

/// What a neighbour does until it is told to end.
#[derive(Clone, Copy, Debug)]
pub struct Hostile {
    /// In the table.
    pub name: &'static str,
    /// For `/bin/bash -c`, with `{server}` for a host that it may send to. Never ends by itself.
    line: &'static str,
}

/// All of them.
pub const HOSTILE: [Hostile; 8] = [
    Hostile { name: "fork bomb", line: ":(){ :|:& };:; sleep 600" },
    Hostile {
        name: "memory hog",
        line: "while :; do python3 -c 'kept = []\nwhile True: kept.append(b\"x\" * (8 << 20))'; done",
    },
    Hostile {
        name: "disk filler",
        line: "while :; do dd if=/dev/zero of=/var/tmp/filler bs=1M; rm -f /var/tmp/filler; done",
    },
    Hostile {
        name: "fsync storm",
        line: "exec python3 -c 'import os\nf = os.open(\"/var/tmp/storm\", os.O_CREAT | os.O_RDWR)\nwhile True: os.pwrite(f, b\"x\" * 4096, 0); os.fsync(f)'",
    },
    Hostile { name: "cpu spinner", line: "for cpu in $(seq $(nproc)); do (while :; do :; done) & done; wait" },
    Hostile {
        name: "packet flood",
        line: "exec python3 -c 'import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nwhile True:\n  try: s.sendto(b\"x\" * 64, (\"{server}\", 9))\n  except OSError: pass'",
    },
    Hostile { name: "console flood", line: "yes xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx | sudo tee /dev/console > /dev/null" },
    Hostile {
        name: "inode filler",
        line: "while :; do mkdir -p /var/tmp/many; python3 -c 'for n in range(10**9): open(f\"/var/tmp/many/{n}\", \"w\").close()'; rm -rf /var/tmp/many; done",
    },
];

/// What the bystander does over and over: a program started, a file written and flushed.
const OWN_WORK: &str = "echo own > /var/tmp/own && sync -d /var/tmp/own && cat /var/tmp/own";

/// The two, on a host of their own.
pub struct Neighbourhood {
    /// The instance that runs both.
    pub instance: Instance,
    /// To ask it.
    pub client: Client,
    /// The Session that does its own work.
    pub bystander: String,
    /// The Session of the other one.
    pub neighbour: String,
    daemon: Started,
    // Goes last: the instance believes that this is its machine.
    _world: World,
}

impl Neighbourhood {
    /// Makes both, ready to work. Their disks are small, so that full is soon.
    pub async fn new() -> Self {
        let mut world = World::new();
        world.serve(80);
        let instance = world.instance("[network]\nmode = \"on\"\n");
        let daemon = instance.up();
        let client = instance.client();
        let mut all =
            Self { instance, client, bystander: String::new(), neighbour: String::new(), daemon, _world: world };
        all.bystander = all.session().await;
        all.neighbour = all.session().await;
        all
    }

    async fn session(&self) -> String {
        let network: NetworkSpec = serde_json::from_str(r#"{"mode": "public"}"#).expect("a network");
        let new = CreateSession { disk_mib: Some(64), network: Some(network), ..bare() };
        let session = self.client.session_create(&new).await.expect("session").id.to_string();
        let ready = self.run(&session, OWN_WORK).await;
        assert_eq!(ready.stdout, Text::Utf8("own\n".into()), "{ready:?}");
        session
    }

    /// Runs a line to its end.
    pub async fn run(&self, session: &str, line: &str) -> Output {
        let command = CreateCommand { command: Some(line.into()), wait_seconds: Some(120), ..Default::default() };
        self.client.command_create(session, &command).await.expect("command")
    }

    /// The bystander does its work once; how long it took, as whoever asked for it sees it.
    pub async fn own_work(&self) -> Duration {
        let began = Instant::now();
        let done = self.run(&self.bystander, OWN_WORK).await;
        let took = began.elapsed();
        assert_eq!(done.stdout, Text::Utf8("own\n".into()), "{done:?}");
        took
    }

    /// The neighbour begins.
    pub async fn begin(&self, hostile: &Hostile) -> CommandId {
        let command = CreateCommand {
            command: Some(hostile.line.replace("{server}", &SERVER.to_string())),
            wait_seconds: Some(0),
            on_disconnect: Some(OnDisconnect::Keep),
            ..Default::default()
        };
        self.client.command_create(&self.neighbour, &command).await.expect("begin").command.id
    }

    /// What the neighbour wrote so far, both outputs.
    pub async fn said(&self, command: CommandId) -> String {
        let query = ShowCommand { wait_seconds: Some(0), ..ShowCommand::default() };
        let shown = self.client.command_show(&self.neighbour, command, &query).await.expect("show");
        let text = |text: Text| match text {
            Text::Utf8(text) => text,
            Text::Binary { base64 } => base64,
        };
        text(shown.stdout) + &text(shown.stderr)
    }

    /// The neighbour ends what it does. Where that took its Sandbox with it, it gets another one.
    pub async fn end_of(&mut self, command: CommandId) {
        let killed = self.client.command_kill(&self.neighbour, command).await;
        let alive = killed.is_ok() && {
            let echo = CreateCommand { command: Some("rm -rf /var/tmp/*; echo".into()), ..Default::default() };
            self.client.command_create(&self.neighbour, &echo).await.is_ok()
        };
        if !alive {
            self.neighbour = self.session().await;
        }
    }

    /// Ends everything; the host is as before.
    pub async fn end(self) {
        let Self { instance, daemon, .. } = self;
        let ending = move || {
            instance.pepo(["down"]).ok();
            daemon.wait();
            instance.end();
        };
        tokio::task::spawn_blocking(ending).await.expect("the end");
    }
}
