//! The host's side and the real agent together: files, trees, watches and connections.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is a test

#[allow(dead_code)] // made for the programs' tests, of which these use some
mod agent;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt;

use agent::{AT_MOST, Agent, memory, noise, until};
use bytes::Bytes;
use pepo_sandbox::guest::{Download, Error};
use pepo_sandbox::proto::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn failure<T: std::fmt::Debug>(result: Result<T, Error>) -> FailureCode {
    match result {
        Err(Error::Failed(failure)) => failure.code,
        other => panic!("no failure but {other:?}"),
    }
}

fn reading(path: String) -> Read {
    Read { path, offset: 0, length: None, user: None }
}

fn writing(path: String) -> Write {
    Write { path, mode: None, parents: false, user: None }
}

async fn all(mut download: Download) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    while let Some(part) = tokio::time::timeout(AT_MOST, download.next()).await.expect("it hangs") {
        bytes.extend_from_slice(&part?);
    }
    Ok(bytes)
}

async fn put(agent: &Agent, write: Write, bytes: &Bytes) -> Result<(), Error> {
    let mut upload = agent.guest.write(write).await?;
    for from in (0..bytes.len()).step_by(300_000) {
        upload.send(bytes.slice(from..bytes.len().min(from + 300_000))).await?;
    }
    upload.finish().await
}

#[tokio::test]
async fn a_file_goes_in_and_comes_out_as_it_was() {
    let agent = Agent::start().await;
    let bytes = noise(5_000_000);
    for (name, bytes) in [("empty", Bytes::new()), ("one", Bytes::from_static(b"x")), ("many", bytes)] {
        put(&agent, writing(agent.path(name)), &bytes).await.unwrap();
        assert!(std::fs::read(agent.path(name)).unwrap() == bytes, "{name}");
        let (stat, download) = agent.guest.read(reading(agent.path(name))).await.unwrap();
        assert_eq!((stat.kind, stat.size, stat.mode), (EntryKind::File, bytes.len() as u64, 0o644));
        assert!(all(download).await.unwrap() == bytes, "{name}");
    }
    let part = Read { path: agent.path("many"), offset: 4_999_990, length: Some(100), user: None };
    let (_, download) = agent.guest.read(part).await.unwrap();
    assert_eq!(all(download).await.unwrap().len(), 10);
    let part = Read { path: agent.path("many"), offset: 7, length: Some(100_000), user: None };
    let (_, download) = agent.guest.read(part).await.unwrap();
    assert_eq!(all(download).await.unwrap()[..], noise(100_007)[7..]);
}

#[tokio::test]
async fn a_file_appears_whole_or_not_at_all() {
    let agent = Agent::start().await;
    std::fs::write(agent.path("f"), "before").unwrap();
    std::fs::set_permissions(agent.path("f"), std::fs::Permissions::from_mode(0o751)).unwrap();
    let mut upload = agent.guest.write(writing(agent.path("f"))).await.unwrap();
    upload.send(noise(1 << 20)).await.unwrap();
    assert_eq!(std::fs::read(agent.path("f")).unwrap(), b"before");
    drop(upload);
    let names = || std::fs::read_dir(agent.room()).unwrap().count();
    until("the half-written file is gone", async || names() == 2).await;
    assert_eq!(std::fs::read(agent.path("f")).unwrap(), b"before");

    put(&agent, writing(agent.path("f")), &Bytes::from_static(b"after")).await.unwrap();
    assert_eq!(std::fs::read(agent.path("f")).unwrap(), b"after");
    assert_eq!(std::fs::metadata(agent.path("f")).unwrap().permissions().mode() & 0o7777, 0o751);

    let deep = Write { path: agent.path("a/b/c"), mode: Some(0o600), parents: true, user: None };
    put(&agent, deep, &Bytes::from_static(b"deep")).await.unwrap();
    assert_eq!(std::fs::metadata(agent.path("a/b/c")).unwrap().permissions().mode() & 0o7777, 0o600);
}

#[tokio::test]
async fn what_is_not_there_or_not_so_is_named() {
    let agent = Agent::start().await;
    std::fs::write(agent.path("f"), "x").unwrap();
    std::fs::create_dir(agent.path("d")).unwrap();
    std::fs::write(agent.path("d/inner"), "x").unwrap();
    let guest = &agent.guest;
    assert_eq!(failure(guest.read(reading(agent.path("no"))).await), FailureCode::NotFound);
    assert_eq!(failure(guest.read(reading(agent.path("d"))).await), FailureCode::IsDirectory);
    assert_eq!(failure(guest.read(reading(agent.path("f/x"))).await), FailureCode::NotDirectory);
    assert_eq!(failure(put(&agent, writing(agent.path("no/f")), &Bytes::new()).await), FailureCode::NotFound);
    assert_eq!(failure(put(&agent, writing(agent.path("d")), &Bytes::new()).await), FailureCode::IsDirectory);
    let tar = TarOut { path: agent.path("no"), user: None };
    assert_eq!(failure(guest.tar_out(tar).await), FailureCode::NotFound);
    let list = List { path: agent.path("f"), user: None };
    assert_eq!(failure(guest.list(list, 10).await), FailureCode::NotDirectory);
    let remove = |path, recursive| Remove { path, recursive, user: None };
    assert_eq!(failure(guest.remove(remove(agent.path("d"), false)).await), FailureCode::NotEmpty);
    assert_eq!(failure(guest.remove(remove(agent.path("no"), true)).await), FailureCode::NotFound);
    guest.remove(remove(agent.path("d"), true)).await.unwrap();
    assert!(!std::fs::exists(agent.path("d")).unwrap());
    let make = |path, parents| Make { path, kind: MakeKind::Directory, mode: None, parents, user: None };
    assert_eq!(failure(guest.make(make(agent.path("f"), false)).await), FailureCode::Exists);
    guest.make(make(agent.path("p/q"), true)).await.unwrap();
    guest.make(make(agent.path("p/q"), true)).await.unwrap();
    let link = MakeKind::Symlink("../f".into());
    let link = Make { path: agent.path("p/link"), kind: link, mode: None, parents: false, user: None };
    guest.make(link).await.unwrap();
    let stat = guest.stat(Stat { path: agent.path("p/link"), user: None }).await.unwrap();
    assert_eq!((stat.kind, stat.target.as_deref().map(|t| &t[..])), (EntryKind::Symlink, Some(&b"../f"[..])));
    let rename = Rename { from: agent.path("f"), to: agent.path("g"), user: None };
    guest.rename(rename.clone()).await.unwrap();
    assert_eq!(failure(guest.rename(rename).await), FailureCode::NotFound);
    let names = guest.list(List { path: agent.path("p"), user: None }, 10).await.unwrap();
    let mut names: Vec<_> = names.entries.iter().map(|entry| entry.name.clone()).collect();
    names.sort();
    assert_eq!(names, [b"link".to_vec(), b"q".to_vec()]);
}

#[tokio::test]
async fn a_large_directory_is_listed_up_to_the_limit() {
    let agent = Agent::start().await;
    std::fs::create_dir(agent.path("d")).unwrap();
    for n in 0..3000 {
        std::fs::write(agent.path(&format!("d/file-{n}-with-a-name-of-some-length")), "").unwrap();
    }
    let list = || List { path: agent.path("d"), user: None };
    let whole = agent.guest.list(list(), 5000).await.unwrap();
    assert_eq!((whole.entries.len(), whole.more), (3000, false));
    let part = agent.guest.list(list(), 1000).await.unwrap();
    assert_eq!((part.entries.len(), part.more), (1000, true));
    agent.guest.ping().await.unwrap();
}

fn tree(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(archive).entries().unwrap() {
        let mut entry = entry.unwrap();
        if entry.header().entry_type().is_file() {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            let path = String::from_utf8(entry.path_bytes().into_owned()).unwrap();
            files.insert(path.trim_start_matches("./").to_owned(), bytes);
        }
    }
    files
}

#[tokio::test]
async fn five_thousand_small_files_go_in_and_come_out() {
    let agent = Agent::start().await;
    let mut archive = tar::Builder::new(Vec::new());
    let mut sent = BTreeMap::new();
    for n in 0..5000_usize {
        let bytes = noise(n % 700 + 1);
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o640);
        header.set_entry_type(tar::EntryType::Regular);
        let path = format!("d{}/e{}/f{n}", n % 17, n % 5);
        archive.append_data(&mut header, &path, &bytes[..]).unwrap();
        sent.insert(path, bytes.to_vec());
    }
    let archive = Bytes::from(archive.into_inner().unwrap());
    let mut upload = agent.guest.tar_in(TarIn { path: agent.path("in"), user: None }).await.unwrap();
    for from in (0..archive.len()).step_by(256 << 10) {
        upload.send(archive.slice(from..archive.len().min(from + (256 << 10)))).await.unwrap();
    }
    upload.finish().await.unwrap();
    assert_eq!(std::fs::read(agent.path("in/d3/e2/f4032")).unwrap(), sent["d3/e2/f4032"]);
    let download = agent.guest.tar_out(TarOut { path: agent.path("in"), user: None }).await.unwrap();
    let came = tree(&all(download).await.unwrap());
    assert!(came == sent, "{} of {} files, or others", came.len(), sent.len());
}

#[tokio::test]
async fn a_tree_leaves_nothing_outside_of_its_place() {
    let agent = Agent::start().await;
    std::fs::create_dir(agent.path("outside")).unwrap();
    let entry = |name: &str, kind: tar::EntryType, link: Option<&str>| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(if kind.is_file() { 4 } else { 0 });
        let bytes = name.as_bytes();
        header.as_old_mut().name[..bytes.len()].copy_from_slice(bytes);
        if let Some(link) = link {
            header.set_link_name_literal(link).unwrap();
        }
        header.set_cksum();
        let mut block = header.as_bytes().to_vec();
        if kind.is_file() {
            block.extend([b"evil".to_vec(), vec![0; 508]].concat());
        }
        block
    };
    let outside = agent.path("outside");
    use tar::EntryType::{Regular, Symlink};
    for (what, archive) in [
        ("dots", entry("../outside/f", Regular, None)),
        ("an absolute name", entry(&format!("{outside}/f"), Regular, None)),
        ("a link", [entry("l", Symlink, Some(&outside)), entry("l/f", Regular, None)].concat()),
        ("a link up", [entry("l", Symlink, Some("../outside")), entry("l/f", Regular, None)].concat()),
    ] {
        let archive = Bytes::from([archive, vec![0; 1024]].concat());
        let mut upload = agent.guest.tar_in(TarIn { path: agent.path("in"), user: None }).await.unwrap();
        let _ = upload.send(archive).await;
        // Refused, or kept inside: both are right, outside is not.
        let _ = upload.finish().await;
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0, "{what}");
        let _ = std::fs::remove_dir_all(agent.path("in"));
    }
}

#[tokio::test]
async fn bytes_pass_through_little_memory_both_ways() {
    const BYTES: u64 = 128 << 20;
    let agent = Agent::start().await;
    let before = memory(std::process::id());
    let piece = Bytes::from(vec![5; 256 << 10]);
    let mut upload = agent.guest.write(writing(agent.path("big"))).await.unwrap();
    for _ in 0..BYTES / piece.len() as u64 {
        upload.send(piece.clone()).await.unwrap();
    }
    upload.finish().await.unwrap();
    assert_eq!(std::fs::metadata(agent.path("big")).unwrap().len(), BYTES);
    let (_, mut download) = agent.guest.read(reading(agent.path("big"))).await.unwrap();
    let mut seen = 0;
    while let Some(part) = download.next().await {
        seen += part.unwrap().len() as u64;
    }
    assert_eq!(seen, BYTES);
    let grown = memory(std::process::id()).saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes more here");
    assert!(agent.memory() < 64 << 20, "{} bytes in the agent", agent.memory());
}

#[tokio::test]
async fn a_dropped_download_frees_the_agent() {
    let agent = Agent::start().await;
    std::fs::write(agent.path("big"), vec![7; 32 << 20]).unwrap();
    for _ in 0..100 {
        let (_, download) = agent.guest.read(reading(agent.path("big"))).await.unwrap();
        drop(download);
    }
    until("new ones are served", async || {
        let Ok((_, download)) = agent.guest.read(reading(agent.path("big"))).await else { return false };
        all(download).await.is_ok_and(|bytes| bytes.len() == 32 << 20)
    })
    .await;
}

#[tokio::test]
async fn a_watch_tells_changes() {
    let agent = Agent::start().await;
    std::fs::create_dir(agent.path("w")).unwrap();
    let watch = Watch { path: agent.path("w"), recursive: true, user: None };
    let mut watching = agent.guest.watch(watch).await.unwrap();
    std::fs::write(agent.path("w/new"), "x").unwrap();
    std::fs::create_dir(agent.path("w/sub")).unwrap();
    let mut expect = async |wanted: (WatchKind, &[u8])| loop {
        let change = tokio::time::timeout(AT_MOST, watching.next()).await.expect("it is not told");
        let change = change.expect("the watch ended").unwrap();
        if (change.kind, &change.path[..]) == wanted {
            break;
        }
    };
    expect((WatchKind::Created, b"new")).await;
    expect((WatchKind::Created, b"sub")).await;
    std::fs::write(agent.path("w/sub/deep"), "y").unwrap();
    expect((WatchKind::Created, b"sub/deep")).await;
    std::fs::write(agent.path("w/new"), "z").unwrap();
    expect((WatchKind::Modified, b"new")).await;
    std::fs::remove_file(agent.path("w/new")).unwrap();
    expect((WatchKind::Removed, b"new")).await;
}

#[tokio::test]
async fn a_connection_into_the_guest_half_closes_each_way() {
    let agent = Agent::start().await;
    let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let served = tokio::spawn(async move {
        let (mut stream, _) = server.accept().await.unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        got.reverse();
        stream.write_all(&got).await.unwrap();
    });
    let sent = noise(1 << 20);
    let mut dialed = agent.guest.dial(port).await.unwrap();
    dialed.write_all(&sent).await.unwrap();
    dialed.shutdown().await.unwrap();
    let mut got = Vec::new();
    tokio::time::timeout(AT_MOST, dialed.read_to_end(&mut got)).await.unwrap().unwrap();
    got.reverse();
    assert!(got == sent, "{} of {} bytes, or others", got.len(), sent.len());
    served.await.unwrap();

    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert_eq!(failure(agent.guest.dial(free).await), FailureCode::Refused);
    assert_eq!(failure(agent.guest.dial(0).await), FailureCode::Invalid);
}
