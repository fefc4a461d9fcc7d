//! One Session in an instance of its own, with a raw stream beside it: what most figures are measured in.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pepo_e2e::{Instance, Started, until};

const RAW_PORT: u32 = 7001;

/// In the guest: for each connection, one line of shell with the stream as its input and output.
const RAW_SERVER: &str = r#"
import socket, subprocess
s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
s.bind((socket.VMADDR_CID_ANY, 7001)); s.listen(8)
print("ready", flush=True)
while True:
    c, _ = s.accept()
    line = b""
    while not line.endswith(b"\n"): line += c.recv(1)
    if line == b"echo\n":
        while True:
            b = c.recv(64)
            if not b: break
            c.sendall(b)
    else:
        subprocess.run(["bash", "-c", line.decode()], stdin=c.fileno(), stdout=c.fileno())
    c.close()
"#;

pub struct Room {
    pub instance: Instance,
    pub session: String,
    pub guest: Guest,
    up: Started,
    server: Started,
}

impl Room {
    pub fn open() -> Self {
        Self::with_workspace("none")
    }

    /// With a Workspace of its own (`own`), or `none`.
    pub fn with_workspace(workspace: &str) -> Self {
        Self::of(Instance::new(), &["--workspace", workspace])
    }

    /// In that instance, with these options of the Session's.
    pub fn of(instance: Instance, options: &[&str]) -> Self {
        let up = instance.up();
        let create = instance.pepo(["session", "create", "-q", "--memory", "512m"]).args(options);
        let session = create.ok().out().trim().to_owned();
        instance.pepo(["exec", &session, "--", "true"]).ok();
        let guest = Guest::find(&instance);
        let server = instance
            .pepo(["exec", &session, "--", "python3", "-u", "-c", RAW_SERVER])
            .within(Duration::from_secs(3600))
            .start();
        server.says("ready", Duration::from_secs(60));
        Room { instance, session, guest, up, server }
    }

    pub fn close(self) {
        self.server.signal(rustix::process::Signal::INT);
        self.server.wait();
        self.instance.pepo(["session", "rm", &self.session]).ok();
        self.instance.pepo(["down"]).ok();
        self.up.wait();
        self.instance.end();
    }
}

/// The processes of the one Sandbox that runs.
pub struct Guest {
    pub vmm: i32,
    pub device: i32,
    pub keeper: i32,
    socket: PathBuf,
    /// The Image's root file system.
    pub image: PathBuf,
}

impl Guest {
    fn find(instance: &Instance) -> Self {
        let one = |comm: &str| {
            let pids = instance.pids(comm);
            assert_eq!(pids.len(), 1, "{comm}: {pids:?}");
            pids[0]
        };
        let jails = instance.home().join("state/jail");
        let jail = fs::read_dir(&jails)
            .expect("jails")
            .flatten()
            .find(|entry| entry.path().join("vsock/stream.sock").exists());
        let image = fs::read_dir(instance.home().join("state/images"))
            .expect("Images")
            .flatten()
            .map(|entry| entry.path().join("rootfs.erofs"))
            .find(|path| path.exists());
        Guest {
            image: image.expect("an Image"),
            vmm: one("qemu-system-x86"),
            device: one("vhost-device-vs"),
            keeper: one("pepo-keeper"),
            socket: jail.expect("the Sandbox's directory").path().join("vsock/stream.sock"),
        }
    }

    /// A raw stream to the server in the guest.
    pub fn raw(&self, line: &str) -> UnixStream {
        // The device gives a call up now and then while the guest is busy with the one before; a second one is taken.
        let mut stream =
            until("the server in the guest answers", Duration::from_secs(60), || connect(&self.socket, RAW_PORT));
        writeln!(stream, "{line}").expect("write");
        stream
    }
}

/// Asks the stream device for a port of the guest.
pub fn connect(socket: &Path, port: u32) -> Option<UnixStream> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    writeln!(stream, "CONNECT {port}").ok()?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\n") {
        let mut byte = [0u8];
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        answer.push(byte[0]);
    }
    stream.set_read_timeout(Some(Duration::from_secs(300))).ok()?;
    answer.starts_with(b"OK").then_some(stream)
}
