//! `pepo setup` against a server on loopback that gives what it is told to: nothing that is not the pinned release is ever
//! installed, a file that was begun is gone on with, and looking changes nothing.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, Mutex};

use pepo_e2e::Instance;

/// What the server gives, and from which byte on it was asked for it.
struct Server {
    url: String,
    asked: Arc<Mutex<Vec<u64>>>,
}

fn serve(content: Vec<u8>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let url = format!("http://{}/{{version}}/{{arch}}.tgz", listener.local_addr().expect("address"));
    let asked = Arc::new(Mutex::new(Vec::new()));
    let record = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut from = 0;
            for line in BufReader::new(&stream).lines() {
                let line = line.expect("a header").to_ascii_lowercase();
                if let Some(range) = line.strip_prefix("range: bytes=") {
                    from = range.trim_end_matches('-').parse().expect("an offset");
                }
                if line.is_empty() {
                    break;
                }
            }
            record.lock().expect("lock").push(from);
            let rest = content.get(usize::try_from(from).expect("offset")..).unwrap_or_default();
            let (status, range) = match from {
                0 => ("200 OK", String::new()),
                _ => (
                    "206 Partial Content",
                    format!("Content-Range: bytes {from}-{0}/{1}\r\n", content.len() - 1, content.len()),
                ),
            };
            let head =
                format!("HTTP/1.1 {status}\r\n{range}Content-Length: {}\r\nConnection: close\r\n\r\n", rest.len());
            // One that has enough may go.
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(rest));
        }
    });
    Server { url, asked }
}

/// All names below a directory; none where there is none.
fn tree(directory: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        names.push(entry.path().display().to_string());
        if entry.path().is_dir() {
            names.extend(tree(&entry.path()));
        }
    }
    names
}

#[test]
fn what_is_not_the_release_is_never_installed_and_looking_changes_nothing() {
    let instance = Instance::new();
    let cache = tempfile::tempdir().expect("a cache");
    let server = serve(b"certainly not a release".to_vec());
    let setup = |arguments: &[&str]| {
        instance
            .pepo(["setup"].iter().chain(arguments).copied())
            .env("PEPO_SETUP_URL", &server.url)
            .env("XDG_CACHE_HOME", cache.path())
            .run()
    };
    let before = tree(instance.home());
    let looked = setup(&["--check"]);
    assert_eq!(looked.code(), Some(1), "{looked}");
    assert!(looked.out().contains("not installed") && looked.out().contains("sudo pepo setup"), "{looked}");
    assert_eq!(tree(instance.home()), before, "looking changed something");
    assert!(server.asked.lock().expect("lock").is_empty(), "looking asked the server");

    let got = setup(&[]);
    assert_eq!(got.code(), Some(1), "{got}");
    assert!(got.err().contains("is not the release: its SHA-256 is") && got.err().contains("nothing was installed"));
    assert_eq!(*server.asked.lock().expect("lock"), [0]);
    assert!(!tree(instance.home()).iter().any(|name| name.contains("/firecracker/")), "something was installed");

    // What was begun is gone on with; being still no release, it is refused, and the next time begins anew.
    let part = cache.path().join("pepo").join(format!("firecracker-v1.16.1-{}.tgz.part", std::env::consts::ARCH));
    fs::create_dir_all(part.parent().expect("directory")).expect("cache");
    fs::write(&part, b"certainly").expect("a part");
    let rest = setup(&[]);
    assert!(rest.err().contains("getting the rest") && rest.err().contains("is not the release"), "{rest}");
    assert_eq!(*server.asked.lock().expect("lock"), [0, 9]);
    assert!(!part.exists());

    let file = cache.path().join("other.tgz");
    fs::write(&file, b"something else").expect("a file");
    let given = setup(&["--from", file.to_str().expect("UTF-8")]);
    assert!(given.code() == Some(1) && given.err().contains("is not the release"), "{given}");
    assert!(file.exists(), "the caller's own file was removed");
    let none = setup(&["--from", "/nonexistent.tgz"]);
    assert!(none.code() == Some(1) && none.err().contains("cannot open /nonexistent.tgz"), "{none}");
    // What is forced and not there is refused with what to do, and takes nothing.
    let forced = instance.program("pepod").args(["serve"]).env("PEPO_VMM", "firecracker").run();
    assert!(forced.code() == Some(1) && forced.err().contains("not installed (sudo pepo setup)"), "{forced}");
    instance.end();
}
