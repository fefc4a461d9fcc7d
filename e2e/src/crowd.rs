//! Two guests, of which one makes as many connections, packets and questions as it can while the other one opens connections
//! of its own. A little of it is in the tests, all of it in `make soak`.

use std::net::TcpListener;
use std::time::Duration;

use crate::Instance;
use crate::names::{Has, Names};
use crate::program::Started;
use crate::world::{SERVER, World};

const MINUTES: Duration = Duration::from_secs(600);
/// Where connections are taken and held.
const HELD: u16 = 81;
/// What the quiet guest connects to, which it looks up each time.
const NAME: &str = "a.example.com";

/// In the guest: opens connections, a hundred and a pause, in processes of 900 each, and tells how many are open once all
/// have been begun and a while has passed.
const CONNECT: &str = r#"
import errno, os, socket, sys, time
count, pace, hold = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
said, say = os.pipe(); over, end = os.pipe()
def child(n):
    os.close(end); kept = []
    for i in range(n):
        s = socket.socket(); s.setblocking(False)
        if s.connect_ex(("8.0.0.1", 81)) in (0, errno.EINPROGRESS): kept.append(s)
        if i % 100 == 99: time.sleep(pace)
    os.write(say, b"begun\n"); os.read(over, 1)
    alive = 0
    for s in kept:
        try: s.getpeername(); alive += 1
        except OSError: pass
    os.write(say, b"%d\n" % alive)
lines = os.fdopen(said)
children = 0
for begin in range(0, count, 900):
    if os.fork() == 0:
        child(min(900, count - begin)); os._exit(0)
    children += 1; lines.readline()
print("begun", flush=True)
time.sleep(hold); os.close(end)
print("alive", sum(int(lines.readline()) for _ in range(children)), flush=True)
"#;

/// In the guest: connections one after the other, each by name. How many did not come about, the middle one and the longest
/// in milliseconds.
const LOOK: &str = r#"
import socket, sys, time
count, name, lost, times = int(sys.argv[1]), sys.argv[2], 0, []
for _ in range(count):
    began = time.monotonic()
    try:
        s = socket.create_connection((name, 80), 20)
        s.sendall(b"GET / HTTP/1.0\r\n\r\n")
        if not s.recv(4096).startswith(b"HTTP/1.0 200"): lost += 1
        s.close()
    except OSError: lost += 1
    times.append((time.monotonic() - began) * 1000)
times.sort()
print(lost, times[count // 2], times[-1])
"#;

/// A flood, until it is told to end.
#[derive(Clone, Copy, Debug)]
pub struct Flood {
    /// In what is printed.
    pub name: &'static str,
    program: &'static str,
}

/// All of them.
pub const FLOODS: [Flood; 3] = [
    Flood {
        name: "packets",
        program: r#"
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(("8.0.0.1", 4000))
while True:
    try: s.send(b"x" * 64)
    except OSError: pass
"#,
    },
    Flood {
        name: "connections",
        program: r#"
kept = []
while True:
    s = socket.socket(); s.setblocking(False)
    try: s.connect(("8.0.0.1", 80))
    except OSError: pass
    kept.append(s)
    if len(kept) > 500: kept.pop(0).close()
"#,
    },
    Flood {
        name: "questions for names",
        program: r#"
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); n = 0
while True:
    n += 1; labels = [b"n%d" % n, b"example", b"net"]
    asked = b"".join(bytes([len(l)]) + l for l in labels) + b"\0\0\1\0\1"
    try: s.sendto(struct.pack(">6H", n & 65535, 256, 1, 0, 0, 0) + asked, ("192.0.0.1", 53))
    except OSError: pass
"#,
    },
];

/// What the quiet guest saw.
#[derive(Clone, Copy, Debug)]
pub struct Looks {
    /// Connections that did not come about.
    pub lost: usize,
    /// The middle one, in milliseconds.
    pub middle: f64,
    /// The longest.
    pub longest: f64,
}

impl std::fmt::Display for Looks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} ms, at most {:.1} ms, {} lost", self.middle, self.longest, self.lost)
    }
}

/// The two, on a host of their own.
pub struct Two {
    /// The instance.
    pub instance: Instance,
    /// The one that floods.
    pub noisy: String,
    /// The other.
    pub quiet: String,
    up: Started,
    _names: Names,
    // Goes last: the instance believes that this is its machine.
    _world: World,
}

impl Two {
    /// Both, under the policy `public` and these limits of `[network]`.
    pub fn new(limits: &str) -> Self {
        // Both ends of every connection are on this host, one of them in this process.
        let most = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let most = rustix::process::Rlimit { current: most.maximum, ..most };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, most).expect("descriptors");
        let mut world = World::new();
        world.serve(80);
        let names = world.names();
        names.say(NAME, Has::Addresses(vec![SERVER]));
        let held = world.in_internet(|| TcpListener::bind(("0.0.0.0", HELD)).expect("bind"));
        std::thread::spawn(move || held.incoming().flatten().collect::<Vec<_>>());
        let instance = world.instance(&format!("[network]\ndns = \"{SERVER}\"\n{limits}"));
        let up = instance.up();
        let session = || {
            let words = ["session", "create", "-q", "--workspace", "none", "--net", "public"];
            instance.pepo(words).ok().out().trim().to_owned()
        };
        let (noisy, quiet) = (session(), session());
        let two = Two { instance, noisy, quiet, up, _names: names, _world: world };
        assert_eq!(two.looks(1).lost, 0, "nothing is reached");
        two
    }

    fn python(&self, session: &str, program: &str, arguments: &[String]) -> Started {
        let mut words = ["exec", session, "--", "python3", "-u", "-c", program].map(str::to_owned).to_vec();
        words.extend_from_slice(arguments);
        self.instance.pepo(words).within(MINUTES).start()
    }

    /// So many connections of the quiet guest, one after the other.
    pub fn looks(&self, count: usize) -> Looks {
        let ran = self.python(&self.quiet, LOOK, &[count.to_string(), NAME.to_owned()]).wait();
        let numbers: Vec<f64> = ran.out().split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [lost, middle, longest] = numbers[..] else { panic!("{ran}") };
        Looks { lost: lost as usize, middle, longest }
    }

    /// So many connections of the noisy guest at once, `pace` seconds after each hundred. How many there are, and what the
    /// other one saw while they were there.
    pub fn connections(&self, count: usize, pace: f64, looks: usize) -> (usize, Looks) {
        let hold = 2.0 + looks as f64 / 10.0;
        let opening = self.python(&self.noisy, CONNECT, &[count.to_string(), pace.to_string(), hold.to_string()]);
        opening.says("begun", MINUTES);
        let looks = self.looks(looks);
        let ran = opening.wait();
        let alive = ran.out().split("alive ").nth(1).and_then(|rest| rest.trim().parse().ok());
        (alive.unwrap_or_else(|| panic!("{ran}")), looks)
    }

    /// What the quiet guest sees beside a flood of the other one.
    pub fn beside(&self, flood: Flood, looks: usize) -> Looks {
        let program = format!("import socket, struct\nprint('begun', flush=True){}", flood.program);
        let mut flooding = self.python(&self.noisy, &program, &[]);
        flooding.says("begun", MINUTES);
        std::thread::sleep(Duration::from_secs(1));
        let looks = self.looks(looks);
        assert!(flooding.runs(), "{}: it ended by itself", flood.name);
        flooding.signal(rustix::process::Signal::INT);
        flooding.wait();
        looks
    }

    /// Ends everything; the host is as before.
    pub fn end(self) {
        let Two { instance, up, .. } = self;
        instance.pepo(["down"]).ok();
        up.wait();
        instance.end();
    }
}
