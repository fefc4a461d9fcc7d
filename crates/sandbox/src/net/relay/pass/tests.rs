//! Whole connections: a guest, a relay, a server and a pepod, all in one thread.

use std::cell::RefCell;
use std::net::SocketAddr;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::LocalSet;

use super::*;
use crate::net::relay::Verdict;
use crate::net::relay::hello::tests::{greeting, records};

thread_local! {
    /// Where connections were going: in place of the kernel's word.
    static WANTED: RefCell<Option<SocketAddrV4>> = const { RefCell::new(None) };
}

fn wanted(_: &TcpStream) -> io::Result<SocketAddrV4> {
    WANTED.with_borrow(|wanted| wanted.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into()))
}

/// A relay that runs, with a pepod that knows `*.example.com`.
struct Bench {
    relay: SocketAddr,
    server: TcpListener,
    words: tokio::sync::Mutex<tokio::sync::mpsc::UnboundedReceiver<Word>>,
    desk: Rc<Desk>,
    _place: tempfile::TempDir,
}

async fn bench() -> Bench {
    let place = tempfile::tempdir().expect("directory");
    let path = place.path().join("control");
    let listener = UnixListener::bind(&path).expect("bind");
    let control = Rc::new(Control::default());
    tokio::task::spawn_local(Rc::clone(&control).listen(listener));
    let (tell, words) = tokio::sync::mpsc::unbounded_channel();
    let mut pepod = BufReader::new(UnixStream::connect(&path).await.expect("connect"));
    tokio::task::spawn_local(async move {
        let mut line = String::new();
        while pepod.read_line(&mut line).await.is_ok_and(|count| count > 0) {
            let word: Word = serde_json::from_str(&line).expect("a word");
            if let Word::Ask { seq, name, .. } = &word {
                let verdict = match name.is_below("example.com") {
                    true => Verdict::Go { seq: *seq, address: Ipv4Addr::LOCALHOST },
                    false => Verdict::No { seq: *seq, why: Barred::Name },
                };
                let line = serde_json::to_string(&verdict).expect("json") + "\n";
                pepod.get_mut().write_all(line.as_bytes()).await.expect("write");
            }
            tell.send(word).expect("send");
            line.clear();
        }
    });
    let server = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = server.local_addr().expect("address").port();
    WANTED.with_borrow_mut(|wanted| *wanted = Some(SocketAddrV4::new([93, 184, 216, 34].into(), port)));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let relay = listener.local_addr().expect("address");
    let desk = Desk::new(control, wanted);
    tokio::task::spawn_local(Rc::clone(&desk).accept(listener));
    Bench { relay, server, words: tokio::sync::Mutex::new(words), desk, _place: place }
}

impl Bench {
    async fn guest(&self) -> TcpStream {
        TcpStream::connect(self.relay).await.expect("connect")
    }

    /// The relay's connection to the server.
    async fn served(&self) -> TcpStream {
        within(self.server.accept()).await.expect("accept").0
    }

    async fn word(&self) -> Word {
        within(self.words.lock().await.recv()).await.expect("a word")
    }

    /// Why the next connection that is barred is.
    async fn barred(&self) -> Barred {
        loop {
            if let Word::Barred { why, .. } = self.word().await {
                return why;
            }
        }
    }

    fn port(&self) -> u16 {
        self.server.local_addr().expect("address").port()
    }
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), what).await.expect("in time")
}

async fn some(stream: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    within(stream.read_exact(&mut bytes)).await.expect("read");
    bytes
}

async fn all(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is an end too.
    let _ = within(stream.read_to_end(&mut bytes)).await;
    bytes
}

fn locally(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    LocalSet::new().block_on(&runtime, test);
}

/// What a server answers that wants another greeting.
fn second_wanted() -> Vec<u8> {
    let mut message = vec![2, 0, 0, 38, 3, 3];
    message.extend([
        0xCF, 0x21, 0xAD, 0x74, 0xE5, 0x9A, 0x61, 0x11, 0xBE, 0x1D, 0x8C, 0x02, 0x1E, 0x65, 0xB8, 0x91, 0xC2, 0xA2,
        0x11, 0x16, 0x7A, 0xBB, 0x8C, 0x5E, 0x07, 0x9E, 0x09, 0xE2, 0xC8, 0xA8, 0x33, 0x9C,
    ]);
    message.extend([0, 0x13, 1, 0]);
    records(&message, 1 << 14)
}

#[test]
fn tls_for_a_name_of_the_policy_passes_untouched() {
    locally(async {
        let bench = bench().await;
        let mut guest = bench.guest().await;
        let mut words = greeting(Some("a.example.com"), &[]);
        let length = words.len();
        words.extend([23, 3, 3, 0, 3, 1, 2, 3]);
        // Cut anywhere.
        for part in words.chunks(50) {
            guest.write_all(part).await.expect("write");
            tokio::task::yield_now().await;
        }
        let mut server = bench.served().await;
        assert_eq!(some(&mut server, length).await, words[..length]);
        assert!(matches!(bench.word().await, Word::Ask { by: By::Tls, port, .. } if port == bench.port()));
        // What follows waits for the server's first word, and comes whole.
        let mut answer = records(&[vec![2, 0, 0, 38, 3, 3], vec![1; 36]].concat(), 1 << 14);
        answer.extend(vec![7; 100_000]);
        server.write_all(&answer).await.expect("write");
        assert_eq!(some(&mut server, words.len() - length).await, words[length..]);
        assert_eq!(some(&mut guest, answer.len()).await, answer);
        // Much both ways at once, and the ends come through one by one.
        let much = vec![5; 3_000_000];
        let (mut guest_read, mut guest_write) = guest.split();
        let (mut server_read, mut server_write) = server.split();
        let (mut to_server, mut to_guest) = (Vec::new(), Vec::new());
        within(async {
            tokio::join!(
                async {
                    guest_write.write_all(&much).await.expect("write");
                    guest_write.shutdown().await.expect("shutdown");
                },
                async {
                    server_read.read_to_end(&mut to_server).await.expect("read");
                    server_write.write_all(&much).await.expect("write");
                    server_write.shutdown().await.expect("shutdown");
                },
                async { guest_read.read_to_end(&mut to_guest).await.expect("read") },
            )
        })
        .await;
        assert!(to_server == much && to_guest == much);
        let Word::Ended { name, sent, received, .. } = bench.word().await else { panic!("no end") };
        assert_eq!(name.as_str(), "a.example.com");
        assert_eq!((sent, received), ((words.len() + much.len()) as u64, (answer.len() + much.len()) as u64));
        assert_eq!(bench.desk.open.get(), 0);
    });
}

#[test]
fn another_name_is_told_no_in_its_own_language() {
    locally(async {
        let bench = bench().await;
        let mut guest = bench.guest().await;
        guest.write_all(&greeting(Some("evil.example.net"), &[])).await.expect("write");
        assert_eq!(all(&mut guest).await, [21, 3, 3, 0, 2, 2, 112]);
        let mut guest = bench.guest().await;
        guest.write_all(&greeting(None, &[])).await.expect("write");
        assert_eq!(all(&mut guest).await, [21, 3, 3, 0, 2, 2, 112]);
        assert_eq!(bench.barred().await, Barred::NoName);
        let mut guest = bench.guest().await;
        guest.write_all(b"GET / HTTP/1.1\r\nHost: evil.example.net\r\n\r\n").await.expect("write");
        let said = String::from_utf8(all(&mut guest).await).expect("text");
        assert!(said.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{said}");
        assert!(
            said.ends_with("pepo: evil.example.net: no rule of the network policy names it on this port\n"),
            "{said}"
        );
        let mut guest = bench.guest().await;
        guest.write_all(b"SSH-2.0-OpenSSH_9\r\n").await.expect("write");
        let said = String::from_utf8_lossy(&all(&mut guest).await).into_owned();
        assert!(said.starts_with("HTTP/1.1 400"), "{said}");
        let mut guest = bench.guest().await;
        guest.write_all(b"\x01\x02\x03").await.expect("write");
        assert!(all(&mut guest).await.is_empty());
        assert_eq!(bench.barred().await, Barred::Malformed);
        assert_eq!(bench.barred().await, Barred::Protocol);
        // Nobody came to the server.
        assert!(tokio::time::timeout(Duration::from_millis(50), bench.server.accept()).await.is_err());
    });
}

#[test]
fn an_encrypted_greeting_passes_by_its_outer_name() {
    locally(async {
        let bench = bench().await;
        let mut guest = bench.guest().await;
        guest.write_all(&greeting(Some("a.example.com"), &[(0xfe0d, vec![0; 64])])).await.expect("write");
        assert!(matches!(bench.word().await, Word::Ask { by: By::TlsOuter, .. }));
        bench.served().await;
        let mut guest = bench.guest().await;
        guest.write_all(&greeting(Some("evil.example.net"), &[(0xfe0d, vec![0; 64])])).await.expect("write");
        assert_eq!(all(&mut guest).await, [21, 3, 3, 0, 2, 2, 112]);
    });
}

#[test]
fn a_second_greeting_says_the_same_name() {
    locally(async {
        let bench = bench().await;
        for (second, passes) in [("a.example.com", true), ("b.example.com", false), ("evil.example.net", false)] {
            let mut guest = bench.guest().await;
            let hello = greeting(Some("a.example.com"), &[]);
            guest.write_all(&hello).await.expect("write");
            let mut server = bench.served().await;
            assert_eq!(some(&mut server, hello.len()).await, hello);
            server.write_all(&second_wanted()).await.expect("write");
            let mut again = vec![20, 3, 3, 0, 1, 1];
            again.extend(greeting(Some(second), &[]));
            guest.write_all(&again).await.expect("write");
            if passes {
                assert_eq!(some(&mut server, again.len()).await, again);
            } else {
                assert_eq!(all(&mut server).await, b"", "{second}");
                assert_eq!(bench.barred().await, Barred::NoName);
            }
        }
    });
}

#[test]
fn http_passes_request_by_request() {
    locally(async {
        let bench = bench().await;
        let mut guest = bench.guest().await;
        let request = |path: &str, name: &str| format!("GET {path} HTTP/1.1\r\nHost: {name}\r\n\r\n");
        guest.write_all(request("/1", "a.example.com").as_bytes()).await.expect("write");
        let mut server = bench.served().await;
        let first = request("/1", "a.example.com");
        assert_eq!(some(&mut server, first.len()).await, first.as_bytes());
        server.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.expect("write");
        assert!(some(&mut guest, 40).await.ends_with(b"ok"));
        guest.write_all(first.as_bytes()).await.expect("write");
        assert_eq!(some(&mut server, first.len()).await, first.as_bytes());
        // Another name of the policy has a connection of its own; one that is not of it has none.
        guest.write_all(request("/2", "b.example.com").as_bytes()).await.expect("write");
        assert_eq!(all(&mut server).await, b"");
        assert_eq!(bench.barred().await, Barred::NoName);
        assert!(matches!(bench.word().await, Word::Ended { .. }));
    });
}

#[test]
fn a_websocket_passes_when_its_server_agrees_and_hides_nothing_when_not() {
    locally(async {
        let bench = bench().await;
        let ask = "GET / HTTP/1.1\r\nHost: a.example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
        let hidden = "GET / HTTP/1.1\r\nHost: evil.example.net\r\n\r\n";
        for (answer, agreed) in [("HTTP/1.1 101 Switching\r\n\r\n", true), ("HTTP/1.1 200 OK\r\n\r\n", false)] {
            let mut guest = bench.guest().await;
            guest.write_all(ask.as_bytes()).await.expect("write");
            let mut server = bench.served().await;
            assert_eq!(some(&mut server, ask.len()).await, ask.as_bytes());
            guest.write_all(hidden.as_bytes()).await.expect("write");
            server.write_all(answer.as_bytes()).await.expect("write");
            assert_eq!(some(&mut guest, answer.len()).await, answer.as_bytes());
            match agreed {
                true => assert_eq!(some(&mut server, hidden.len()).await, hidden.as_bytes()),
                false => assert_eq!(all(&mut server).await, b""),
            }
        }
    });
}

#[test]
fn a_server_that_is_not_there_is_told() {
    locally(async {
        let bench = bench().await;
        let mut guest = bench.guest().await;
        WANTED.with_borrow_mut(|wanted| *wanted = Some(SocketAddrV4::new([93, 184, 216, 34].into(), 1)));
        guest.write_all(b"GET / HTTP/1.1\r\nHost: a.example.com:1\r\n\r\n").await.expect("write");
        let said = String::from_utf8(all(&mut guest).await).expect("text");
        assert!(said.starts_with("HTTP/1.1 502"), "{said}");
        assert_eq!(bench.barred().await, Barred::Unreachable);
    });
}

#[test]
fn connections_are_bounded() {
    locally(async {
        let bench = bench().await;
        let mut silent = Vec::new();
        for _ in 0..CONNECTIONS {
            silent.push(bench.guest().await);
        }
        let counted = async {
            while bench.desk.open.get() < CONNECTIONS {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(counted).await;
        let mut more = bench.guest().await;
        assert_eq!(all(&mut more).await, b"");
        assert_eq!(bench.barred().await, Barred::Busy);
        drop(silent);
        let ended = async {
            while bench.desk.open.get() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(ended).await;
        let mut guest = bench.guest().await;
        guest.write_all(&greeting(Some("a.example.com"), &[])).await.expect("write");
        bench.served().await;
    });
}

#[test]
fn a_pepod_that_comes_back_is_asked() {
    locally(async {
        let bench = bench().await;
        let other = bench._place.path().join("control");
        // The one before is replaced by one that says no to all.
        let mut pepod = BufReader::new(UnixStream::connect(&other).await.expect("connect"));
        let mut guest = bench.guest().await;
        guest.write_all(&greeting(Some("a.example.com"), &[])).await.expect("write");
        let mut line = String::new();
        within(pepod.read_line(&mut line)).await.expect("read");
        let Ok(Word::Ask { seq, .. }) = serde_json::from_str(&line) else { panic!("{line}") };
        // It goes away while asked, and another one answers.
        drop(pepod);
        let mut pepod = BufReader::new(UnixStream::connect(&other).await.expect("connect"));
        line.clear();
        within(pepod.read_line(&mut line)).await.expect("read");
        let Ok(Word::Ask { seq: again, .. }) = serde_json::from_str(&line) else { panic!("{line}") };
        assert_ne!(seq, again);
        let verdict = Verdict::No { seq: again, why: Barred::Floor };
        let line = serde_json::to_string(&verdict).expect("json") + "\n";
        pepod.get_mut().write_all(line.as_bytes()).await.expect("write");
        assert_eq!(all(&mut guest).await, [21, 3, 3, 0, 2, 2, 112]);
    });
}
