//! An internet for one test: namespaces that the test made, none with a way out of them, so that no packet for a
//! public-looking address can ever leave this machine.
//!
//! ```text
//! internet ──── wan ─┤ host: the instance under test believes that this is its machine
//!  8.0.0.1, 9.1.1.1      8.0.0.2, default route to 8.0.0.1
//!  and on its loopback: metadata, private hosts
//! ```

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::instance::{Instance, Options};
use crate::names::Names;

/// Two public-looking hosts.
pub const SERVER: Ipv4Addr = Ipv4Addr::new(8, 0, 0, 1);
/// See [`SERVER`].
pub const OTHER: Ipv4Addr = Ipv4Addr::new(9, 1, 1, 1);
/// The instance's machine, on its way out.
pub const HOST: Ipv4Addr = Ipv4Addr::new(8, 0, 0, 2);
/// What nobody may reach: clouds' metadata, private hosts, a provider's network.
pub const CLOSED: [Ipv4Addr; 5] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(10, 9, 9, 9),
    Ipv4Addr::new(192, 168, 7, 7),
    Ipv4Addr::new(100, 100, 100, 200),
];

/// Host and internet of one test.
pub struct World {
    name: String,
    servers: Vec<Server>,
}

/// Something that answers on every address of a namespace at one port.
pub struct Server {
    stop: Arc<AtomicBool>,
    /// Connections so far.
    pub taken: Arc<AtomicU64>,
    /// Bytes of streams written so far.
    pub streamed: Arc<AtomicU64>,
    accepting: Option<JoinHandle<()>>,
}

fn ip(arguments: &str) {
    let done = Command::new("ip").args(arguments.split(' ')).output().expect("ip");
    assert!(done.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&done.stderr));
}

impl World {
    /// Makes both.
    pub fn new() -> Self {
        let mut random = [0u8; 2];
        File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random)).expect("urandom");
        // Whose it is, for a witness of another test.
        let name = format!("e2e-{}-{}", std::process::id(), random.map(|byte| format!("{byte:02x}")).concat());
        let world = World { name, servers: Vec::new() };
        let (host, net) = (world.host(), world.internet());
        ip(&format!("netns add {host}"));
        ip(&format!("netns add {net}"));
        ip(&format!("-n {host} link add wan type veth peer name lan netns {net}"));
        for (space, link) in [(&net, "lo"), (&net, "lan"), (&host, "lo"), (&host, "wan")] {
            ip(&format!("-n {space} link set dev {link} up"));
        }
        ip(&format!("-n {net} addr add {SERVER}/24 dev lan"));
        ip(&format!("-n {host} addr add {HOST}/24 dev wan"));
        ip(&format!("-n {host} route add default via {SERVER}"));
        for address in CLOSED.into_iter().chain([OTHER]) {
            ip(&format!("-n {net} addr add {address}/32 dev lo"));
        }
        world
    }

    fn host(&self) -> String {
        format!("{}h", self.name)
    }

    fn internet(&self) -> String {
        format!("{}i", self.name)
    }

    /// An instance whose machine is this host.
    pub fn instance(&self, config: &str) -> Instance {
        let within = Some(self.host_namespace());
        Instance::with(Options { config: Some(config.to_owned()), network: true, within, ..Options::default() })
    }

    /// Runs something on the host, or in the internet.
    fn inside<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(PathBuf::from("/run/netns").join(name)).expect("namespace");
        std::thread::scope(|scope| {
            let done = scope.spawn(move || {
                let kind = rustix::thread::LinkNameSpaceType::Network;
                rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), Some(kind))
                    .expect("enter");
                work()
            });
            done.join().expect("inside")
        })
    }

    /// Where the host's namespace is.
    pub fn host_namespace(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(self.host())
    }

    fn internet_namespace(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(self.internet())
    }

    /// Runs something in the internet.
    pub fn in_internet<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        Self::inside(&self.internet(), work)
    }

    /// Runs something on the host.
    pub fn on_host<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        Self::inside(&self.host(), work)
    }

    /// Runs `nft` on the host.
    pub fn nft(&self, words: &[&str]) -> String {
        nft(&self.host_namespace(), words, "")
    }

    /// Counts in the internet what comes from the host and this says, under this name, until it is read.
    pub fn count(&self, name: &str, what: &str) {
        let text = format!(
            "table ip seen {{\n counter {name} {{ }}\n chain in {{\n type filter hook prerouting priority raw;\n iifname lan {what} counter name {name}\n }}\n}}\n"
        );
        nft(&self.internet_namespace(), &["-f", "-"], &text);
    }

    /// How many packets came of that, from now on counted anew.
    pub fn counted(&self, name: &str) -> u64 {
        let text = nft(&self.internet_namespace(), &["reset", "counter", "ip", "seen", name], "");
        let count = text.split("packets ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
        count.unwrap_or_else(|| panic!("{text}"))
    }

    /// Whether somebody without a policy, on the host, reaches that.
    pub fn host_reaches(&self, address: Ipv4Addr, port: u16) -> bool {
        let to = SocketAddr::from((address, port));
        self.on_host(move || TcpStream::connect_timeout(&to, Duration::from_secs(10)).is_ok())
    }

    /// Serves on every address of the internet.
    pub fn serve(&mut self, port: u16) -> usize {
        self.servers.push(Server::start(Self::inside(&self.internet(), || listener(port))));
        self.servers.len() - 1
    }

    /// Answers for names at [`SERVER`], as the instance's `network.dns` has to say.
    pub fn names(&self) -> Names {
        Names::new(Self::inside(&self.internet(), || UdpSocket::bind((SERVER, 53)).expect("bind")))
    }

    /// A socket for datagrams to every address of the internet.
    pub fn datagrams(&self, port: u16) -> UdpSocket {
        let socket = self.in_internet(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).expect("bind"));
        socket.set_read_timeout(Some(Duration::from_secs(10))).expect("timeout");
        socket
    }

    /// Serves on every address of the host.
    pub fn serve_on_host(&mut self, port: u16) -> usize {
        self.servers.push(Server::start(self.on_host(|| listener(port))));
        self.servers.len() - 1
    }

    /// One that was started.
    pub fn server(&self, index: usize) -> &Server {
        &self.servers[index]
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.servers.clear();
        for name in [self.host(), self.internet()] {
            let done = Command::new("ip").args(["netns", "del", &name]).output();
            if !done.is_ok_and(|done| done.status.success()) {
                eprintln!("--- namespace {name} was not removed");
            }
        }
    }
}

/// Runs `nft` in a namespace, with that for its input; what it printed.
pub(crate) fn nft(space: &Path, words: &[&str], input: &str) -> String {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", space.display())).arg("nft").args(words);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nsenter");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("write");
    let done = child.wait_with_output().expect("nft");
    assert!(done.status.success(), "nft {words:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

fn listener(port: u16) -> TcpListener {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).expect("bind")
}

impl Server {
    fn start(listener: TcpListener) -> Self {
        let (stop, taken, streamed) = (Arc::new(AtomicBool::new(false)), Arc::default(), Arc::default());
        listener.set_nonblocking(true).expect("nonblocking");
        let shared: (_, Arc<AtomicU64>, Arc<AtomicU64>) =
            (Arc::clone(&stop), Arc::clone(&taken), Arc::clone(&streamed));
        let accepting = std::thread::spawn(move || {
            let (stop, taken, streamed) = shared;
            while !stop.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        taken.fetch_add(1, Ordering::Relaxed);
                        let (stop, streamed) = (Arc::clone(&stop), Arc::clone(&streamed));
                        std::thread::spawn(move || answer(stream, &stop, &streamed));
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        Server { stop, taken, streamed, accepting: Some(accepting) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

/// `GET /stream` is answered without end, a little at a time; everything else with the address that was reached.
fn answer(mut stream: TcpStream, stop: &AtomicBool, streamed: &AtomicU64) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_read_timeout(Some(Duration::from_secs(30)));
    let mut request = [0; 1024];
    let got = stream.read(&mut request).unwrap_or(0);
    let address = stream.local_addr().map(|address| address.ip().to_string()).unwrap_or_default();
    if !request[..got].starts_with(b"GET /stream") {
        let body = format!("reached {address}\n");
        let _ = write!(stream, "HTTP/1.0 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        return;
    }
    let _ = write!(stream, "HTTP/1.0 200 OK\r\n\r\n");
    while !stop.load(Ordering::Relaxed) && stream.write_all(&[b'x'; 512]).is_ok() {
        streamed.fetch_add(512, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
    }
}
