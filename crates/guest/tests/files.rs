//! Files, trees and ports through the real agent.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod wire;

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pepo_proto::*;
use wire::*;

/// A directory that guest and test both see: these tests look at files from outside.
struct Shared {
    guest: Guest,
    directory: tempfile::TempDir,
}

fn shared() -> Shared {
    Shared { guest: Guest::start_with(&["--lease-ms", "1000"]), directory: tempfile::tempdir().unwrap() }
}

impl Shared {
    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, path: &str, mode: Option<u32>, parents: bool, bytes: &[u8]) -> Talked {
        let write = Write { path: path.into(), mode, parents, user: None };
        let mut talk = self.guest.request(new_op(), Operation::Write(write));
        talk.input(0, bytes);
        talk.eof(bytes.len() as u64);
        talk.finish()
    }

    fn read(&self, path: &str, offset: u64, length: Option<u64>) -> Talked {
        self.guest.ask(Operation::Read(Read { path: path.into(), offset, length, user: None }))
    }

    fn make(&self, path: &str, kind: MakeKind, parents: bool) -> Outcome {
        self.guest.ask(Operation::Make(Make { path: path.into(), kind, mode: None, parents, user: None })).outcome
    }

    fn remove(&self, path: &str, recursive: bool) -> Outcome {
        self.guest.ask(Operation::Remove(Remove { path: path.into(), recursive, user: None })).outcome
    }

    fn tar_out(&self, path: &str) -> Talked {
        self.guest.ask(Operation::TarOut(TarOut { path: path.into(), user: None }))
    }

    fn tar_in(&self, path: &str, archive: &[u8]) -> Talked {
        let mut talk = self.guest.request(new_op(), Operation::TarIn(TarIn { path: path.into(), user: None }));
        // It may be refused while it is sent.
        let mut offset = 0;
        for piece in archive.chunks(MAX_DATA) {
            let mut bytes = bytes::BytesMut::new();
            use tokio_util::codec::Encoder;
            let piece = bytes::Bytes::copy_from_slice(piece);
            let length = piece.len() as u64;
            Frames::new().encode(Frame::Data { channel: Channel::In, offset, bytes: piece }, &mut bytes).unwrap();
            if talk.stream.write_all(&bytes).is_err() {
                break;
            }
            offset += length;
        }
        talk.eof(offset);
        talk.finish()
    }
}

fn code(outcome: &Outcome) -> Option<FailureCode> {
    if let Outcome::Failed(failure) = outcome { Some(failure.code) } else { None }
}

#[test]
fn writes_whole_or_not_at_all_and_keeps_modes() {
    let shared = shared();
    let file = shared.path("deep/er/file");
    let bytes: Vec<u8> = (0..300_000_u32).map(|i| (i * 7 % 251) as u8).collect();
    assert_eq!(shared.write(&file, None, false, b"x").failure(), FailureCode::NotFound);
    assert_eq!(shared.write(&file, None, true, &bytes).outcome, Outcome::Done);
    assert_eq!(std::fs::read(&file).unwrap(), bytes);
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o7777, 0o644);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o751)).unwrap();
    assert_eq!(shared.write(&file, None, false, b"").outcome, Outcome::Done);
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o7777, 0o751);
    assert_eq!(shared.write(&file, Some(0o600), false, b"short").outcome, Outcome::Done);
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o7777, 0o600);
    // Through a link: the file is replaced, not the link.
    symlink(&file, shared.path("link")).unwrap();
    assert_eq!(shared.write(&shared.path("link"), None, false, b"by link").outcome, Outcome::Done);
    assert_eq!(std::fs::read(&file).unwrap(), b"by link");
    // Cut off: nothing has changed, nothing is left.
    let write = Write { path: file.clone(), mode: None, parents: false, user: None };
    let mut talk = shared.guest.request(new_op(), Operation::Write(write));
    talk.input(0, b"half");
    talk.until(|frame| matches!(frame, Frame::Accepted).then_some(()));
    drop(talk);
    let entries = || std::fs::read_dir(shared.directory.path().join("deep/er")).unwrap().count();
    wait_for("the temporary file to go", || entries() == 1);
    assert_eq!(std::fs::read(&file).unwrap(), b"by link");
    for (path, expected) in [
        (shared.path("deep"), FailureCode::IsDirectory),
        (shared.path("link/x"), FailureCode::NotDirectory),
        ("/dev/null".to_owned(), FailureCode::Invalid),
        (String::new(), FailureCode::Invalid),
        ("a\0b".to_owned(), FailureCode::Invalid),
    ] {
        assert_eq!(shared.write(&path, None, false, b"x").failure(), expected, "{path:?}");
    }
    assert_eq!(shared.write(&file, Some(0o10000), false, b"x").failure(), FailureCode::Invalid);
}

#[test]
fn a_repeated_change_is_answered_and_not_done_again() {
    let shared = shared();
    let op = new_op();
    let make = Operation::Make(Make {
        path: shared.path("once"),
        kind: MakeKind::Directory,
        mode: None,
        parents: false,
        user: None,
    });
    assert_eq!(shared.guest.request(op, make.clone()).finish().outcome, Outcome::Done);
    assert_eq!(shared.guest.request(op, make.clone()).finish().outcome, Outcome::Done);
    assert_eq!(shared.guest.ask(make).failure(), FailureCode::Exists);
}

#[test]
fn reads_lists_and_looks() {
    let shared = shared();
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|i| (i * 13 % 256) as u8).collect();
    std::fs::write(shared.path("file"), &bytes).unwrap();
    let talked = shared.read(&shared.path("file"), 0, None);
    assert_eq!((talked.out == bytes, talked.outcome), (true, Outcome::Done));
    assert!(matches!(&talked.events[..], [Event::Stat(stat)] if stat.size == 1_000_000 && stat.name == b"file"));
    assert_eq!(shared.read(&shared.path("file"), 999_990, None).out, &bytes[999_990..]);
    assert_eq!(shared.read(&shared.path("file"), 5, Some(7)).out, &bytes[5..12]);
    assert_eq!(shared.read(&shared.path("file"), 5_000_000, None).out, b"");
    assert!(!shared.read("/proc/version", 0, None).out.is_empty());
    assert_eq!(shared.read(&shared.path("none"), 0, None).failure(), FailureCode::NotFound);
    assert_eq!(shared.read("/dev/zero", 0, None).failure(), FailureCode::Invalid);
    assert_eq!(shared.read("/tmp", 0, None).failure(), FailureCode::IsDirectory);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        shared.path("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    assert_eq!(shared.read(&shared.path("fifo"), 0, None).failure(), FailureCode::Invalid);

    symlink("file", shared.path("link")).unwrap();
    let stat = |path: &str| shared.guest.ask(Operation::Stat(Stat { path: path.into(), user: None }));
    let talked = stat(&shared.path("link"));
    let [Event::Stat(link)] = &talked.events[..] else { panic!("{talked:?}") };
    assert_eq!((link.kind, link.target.as_ref().map(|t| t.to_vec())), (EntryKind::Symlink, Some(b"file".to_vec())));
    std::fs::create_dir(shared.path("many")).unwrap();
    for i in 0..3000 {
        std::fs::write(shared.path(&format!("many/{i:0>100}")), "").unwrap();
    }
    let talked = shared.guest.ask(Operation::List(List { path: shared.path("many"), user: None }));
    let entries: Vec<_> =
        talked.events.iter().flat_map(|e| if let Event::Entries(e) = e { e.clone() } else { vec![] }).collect();
    assert_eq!(entries.len(), 3000);
    assert!(talked.events.len() > 1);
    let talked = shared.guest.ask(Operation::List(List { path: shared.path("file"), user: None }));
    assert_eq!(talked.failure(), FailureCode::NotDirectory);
}

#[test]
fn makes_renames_and_removes() {
    let shared = shared();
    let path = |name: &str| shared.path(name);
    assert_eq!(code(&shared.make(&path("a/b"), MakeKind::Directory, false)), Some(FailureCode::NotFound));
    assert_eq!(shared.make(&path("a/b"), MakeKind::Directory, true), Outcome::Done);
    assert_eq!(shared.make(&path("a/b"), MakeKind::Directory, true), Outcome::Done);
    assert_eq!(code(&shared.make(&path("a/b"), MakeKind::Directory, false)), Some(FailureCode::Exists));
    assert_eq!(shared.make(&path("a/out"), MakeKind::Symlink("/etc".into()), false), Outcome::Done);
    let rename = |from: &str, to: &str| {
        shared.guest.ask(Operation::Rename(Rename { from: path(from), to: path(to), user: None })).outcome
    };
    assert_eq!(rename("a", "c"), Outcome::Done);
    assert_eq!(code(&rename("a", "d")), Some(FailureCode::NotFound));
    std::fs::write(path("c/b/file"), "x").unwrap();
    assert_eq!(code(&shared.remove(&path("c"), false)), Some(FailureCode::NotEmpty));
    assert_eq!(shared.remove(&path("c"), true), Outcome::Done);
    assert!(Path::new("/etc/passwd").exists(), "a link was followed");
    assert_eq!(code(&shared.remove(&path("c"), true)), Some(FailureCode::NotFound));
}

#[test]
fn watches_a_tree() {
    let shared = shared();
    std::fs::create_dir_all(shared.path("w/sub")).unwrap();
    let op = new_op();
    let watch = Watch { path: shared.path("w"), recursive: true, user: None };
    let mut talk = shared.guest.request(op, Operation::Watch(watch));
    talk.until(|frame| matches!(frame, Frame::Accepted).then_some(()));
    let mut expect = |kind: WatchKind, path: &str| {
        talk.until(|frame| match frame {
            Frame::Event(Event::Change { kind: k, path: p }) if *k == kind && p == path.as_bytes() => Some(()),
            _ => None,
        });
    };
    std::fs::write(shared.path("w/sub/new"), "x").unwrap();
    expect(WatchKind::Created, "sub/new");
    expect(WatchKind::Modified, "sub/new");
    std::fs::set_permissions(shared.path("w/sub/new"), std::fs::Permissions::from_mode(0o600)).unwrap();
    expect(WatchKind::Attributes, "sub/new");
    std::fs::create_dir_all(shared.path("w/x/y")).unwrap();
    std::fs::write(shared.path("w/x/y/z"), "").unwrap();
    expect(WatchKind::Created, "x/y/z");
    std::fs::remove_file(shared.path("w/sub/new")).unwrap();
    expect(WatchKind::Removed, "sub/new");
    std::fs::remove_dir_all(shared.path("w")).unwrap();
    expect(WatchKind::Removed, "");
    assert_eq!(talk.finish().outcome, Outcome::Done);
    // And a cancelled one ends.
    let op = new_op();
    let watch = Watch { path: "/tmp".into(), recursive: false, user: None };
    let mut talk = shared.guest.request(op, Operation::Watch(watch));
    talk.until(|frame| matches!(frame, Frame::Accepted).then_some(()));
    assert_eq!(shared.guest.cancel(op), Outcome::Done);
    while talk.receive().is_some() {}
}

/// A tree with everything that must survive the way there and back.
fn plant(root: &Path) {
    std::fs::create_dir_all(root.join("dir/empty")).unwrap();
    std::fs::write(root.join("dir/file"), vec![5; 70_000]).unwrap();
    std::fs::set_permissions(root.join("dir/file"), std::fs::Permissions::from_mode(0o640)).unwrap();
    std::fs::write(root.join("run.sh"), "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(root.join("run.sh"), std::fs::Permissions::from_mode(0o775)).unwrap();
    std::fs::write(root.join("locked"), "read only").unwrap();
    std::fs::set_permissions(root.join("locked"), std::fs::Permissions::from_mode(0o444)).unwrap();
    std::fs::hard_link(root.join("dir/file"), root.join("same")).unwrap();
    symlink("dir/file", root.join("link")).unwrap();
    symlink(format!("/{}", "long/".repeat(60)), root.join("long link")).unwrap();
    let deep: PathBuf = (0..12).map(|i| format!("{i}{}", "x".repeat(40))).collect();
    std::fs::create_dir_all(root.join(&deep)).unwrap();
    std::fs::write(root.join(&deep).join("bottom"), "b").unwrap();
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"odd \xff\xfe\n name");
    std::fs::write(root.join(odd), "odd").unwrap();
    let old = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_234_567_890);
    for name in ["dir/file", "run.sh"] {
        std::fs::File::options().read(true).open(root.join(name)).unwrap().set_modified(old).unwrap();
    }
    std::fs::set_permissions(root.join("dir"), std::fs::Permissions::from_mode(0o500)).unwrap();
    std::fs::File::open(root.join("dir")).unwrap().set_modified(old).unwrap();
}

/// Everything about a tree that is to be kept, as text.
fn picture(root: &Path) -> Vec<String> {
    fn walk(root: &Path, path: &Path, lines: &mut Vec<String>) {
        for entry in std::fs::read_dir(path).unwrap() {
            let path = entry.unwrap().path();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(root).unwrap();
            let content = if metadata.is_symlink() {
                format!("{:?}", std::fs::read_link(&path).unwrap())
            } else if metadata.is_file() {
                format!("{} {:?}", metadata.nlink(), std::fs::read(&path).unwrap().len())
            } else {
                String::new()
            };
            let mode = if metadata.is_symlink() { 0 } else { metadata.mode() };
            lines.push(format!("{name:?} {mode:o} {} {content}", metadata.mtime()));
            if metadata.is_dir() {
                walk(root, &path, lines);
            }
        }
    }
    let mut lines = vec![];
    walk(root, root, &mut lines);
    lines.sort();
    lines
}

#[test]
fn a_tree_goes_out_and_in_unchanged() {
    let shared = shared();
    let from = shared.directory.path().join("from");
    plant(&from);
    let talked = shared.tar_out(from.to_str().unwrap());
    assert_eq!(talked.outcome, Outcome::Done);
    // What another program makes of it.
    let by_tar = shared.directory.path().join("by-tar");
    std::fs::create_dir(&by_tar).unwrap();
    let mut tar = std::process::Command::new("tar")
        .args(["-xpf", "-", "-C"])
        .arg(&by_tar)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    tar.stdin.take().unwrap().write_all(&talked.out).unwrap();
    assert!(tar.wait().unwrap().success());
    assert_eq!(picture(&from), picture(&by_tar));
    // What we make of it ourselves, and of what the other program makes.
    let to = shared.path("to/new");
    let talked = shared.tar_in(&to, &talked.out);
    assert_eq!(talked.outcome, Outcome::Done);
    assert_eq!(picture(&from), picture(Path::new(&to)));
    for format in ["gnu", "pax", "ustar"] {
        let mut command = std::process::Command::new("tar");
        command.args(["-c", &format!("--format={format}"), "--sort=name"]);
        if format == "ustar" {
            command.args(["--exclude=long link", "--exclude=0x*"]);
        }
        let archive = command.arg("-C").arg(&from).arg(".").output().unwrap();
        assert!(archive.status.success(), "{}", String::from_utf8_lossy(&archive.stderr));
        let to = shared.path(&format!("to/{format}"));
        let talked = shared.tar_in(&to, &archive.stdout);
        assert_eq!(talked.outcome, Outcome::Done, "{format}");
        if format != "ustar" {
            assert_eq!(picture(&from), picture(Path::new(&to)), "{format}");
        }
        // Again over what is there.
        assert_eq!(shared.tar_in(&to, &archive.stdout).outcome, Outcome::Done, "{format} again");
    }
    let talked = shared.tar_out(&shared.path("from/run.sh"));
    let mut archive = tar::Archive::new(&talked.out[..]);
    let names: Vec<_> = archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().into_owned()).collect();
    assert_eq!(names, [Path::new("run.sh")]);
}

/// A name, a kind, a link's target, a content.
type Given<'a> = (&'a [u8], tar::EntryType, &'a [u8], &'a [u8]);

/// An archive of entries as given.
fn archive(entries: &[Given<'_>]) -> Vec<u8> {
    let mut all = vec![];
    for (name, kind, link, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o6755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        header.set_size(content.len() as u64);
        let old = header.as_old_mut();
        old.name[..name.len()].copy_from_slice(name);
        old.linkname[..link.len()].copy_from_slice(link);
        header.set_cksum();
        all.extend_from_slice(header.as_bytes());
        all.extend_from_slice(content);
        all.resize(all.len().next_multiple_of(512), 0);
    }
    all.extend_from_slice(&[0; 1024]);
    all
}

#[test]
fn a_hostile_archive_writes_nothing_outside() {
    use tar::EntryType as Kind;
    let shared = shared();
    let outside = shared.path("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(format!("{outside}/kept"), "kept").unwrap();
    let out = outside.as_bytes();
    let kept = format!("{outside}/kept");
    let picture_before = picture(Path::new(&outside));
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("up", archive(&[(b"../outside/new", Kind::Regular, b"", b"x")])),
        ("up in the middle", archive(&[(b"a/../../outside/new", Kind::Regular, b"", b"x")])),
        ("through a link", archive(&[(b"l", Kind::Symlink, out, b""), (b"l/new", Kind::Regular, b"", b"x")])),
        (
            "through a relative link",
            archive(&[(b"l", Kind::Symlink, b"..", b""), (b"l/outside/new", Kind::Regular, b"", b"x")]),
        ),
        (
            "directory through a link",
            archive(&[(b"l", Kind::Symlink, out, b""), (b"l/new", Kind::Directory, b"", b"")]),
        ),
        (
            "hard link to outside",
            archive(&[(b"h", Kind::Link, b"../outside/kept", b""), (b"h", Kind::Regular, b"", b"x")]),
        ),
        ("hard link by a link", archive(&[(b"l", Kind::Symlink, out, b""), (b"h", Kind::Link, b"l/kept", b"")])),
        ("device", archive(&[(b"d", Kind::Char, b"", b"")])),
        ("block device", archive(&[(b"d", Kind::Block, b"", b"")])),
        ("pipe", archive(&[(b"d", Kind::Fifo, b"", b"")])),
        (
            "directory's mode through a link",
            archive(&[(b"d", Kind::Directory, b"", b""), (b"d", Kind::Symlink, out, b"")]),
        ),
    ];
    for (name, bytes) in &cases {
        let into = shared.path(&format!("into {name}"));
        let talked = shared.tar_in(&into, bytes);
        assert!(*name == "directory's mode through a link" || code(&talked.outcome).is_some(), "{name}: {talked:?}");
        assert_eq!(picture(Path::new(&outside)), picture_before, "{name}");
    }
    // An absolute name lands below.
    let into = shared.path("absolute");
    let talked = shared.tar_in(&into, &archive(&[(kept.as_bytes(), Kind::Regular, b"", b"x")]));
    assert_eq!(talked.outcome, Outcome::Done);
    assert_eq!(std::fs::read(&kept).unwrap(), b"kept");
    // A file over a link replaces the link; no set-user-ID bit comes through.
    let into = shared.path("over");
    std::fs::create_dir(&into).unwrap();
    symlink(&kept, format!("{into}/f")).unwrap();
    assert_eq!(shared.tar_in(&into, &archive(&[(b"f", Kind::Regular, b"", b"new")])).outcome, Outcome::Done);
    assert_eq!(std::fs::read(&kept).unwrap(), b"kept");
    assert_eq!(std::fs::symlink_metadata(format!("{into}/f")).unwrap().mode() & 0o7777, 0o755);
}

#[test]
fn a_broken_archive_is_refused_and_costs_nothing() {
    use tar::EntryType as Kind;
    let shared = shared();
    let mut huge_name = archive(&[(b"x", Kind::GNULongName, b"", b"")]);
    let mut header = tar::Header::from_byte_slice(&huge_name[..512]).clone();
    header.set_size(1 << 40);
    header.set_cksum();
    huge_name[..512].copy_from_slice(header.as_bytes());
    let mut huge_pax = huge_name.clone();
    header.set_entry_type(Kind::XHeader);
    header.set_cksum();
    huge_pax[..512].copy_from_slice(header.as_bytes());
    let good = archive(&[(b"file", Kind::Regular, b"", &[1; 1000])]);
    let mut checksum = good.clone();
    checksum[0] ^= 1;
    let pax = |record: &[u8]| archive(&[(b"p", Kind::XHeader, b"", record), (b"f", Kind::Regular, b"", b"x")]);
    for (name, bytes) in [
        ("huge name", huge_name),
        ("huge pax", huge_pax),
        ("checksum", checksum),
        ("cut", good[..700].to_vec()),
        ("cut header", good[..300].to_vec()),
        ("noise", vec![7; 5000]),
        ("pax length", pax(b"99 path=x\n")),
        ("pax zero", pax(b"0 path=x\n")),
        ("pax no equals", pax(b"8 pathx\n")),
        ("pax size", pax(b"12 size=-12\n")),
        ("pax up", pax(b"13 path=../x\n")),
        ("pax nul", pax(b"12 path=a\0b\n")),
        ("pax huge size", pax(b"29 size=18446744073709551615\n")),
        ("sparse", pax(b"22 GNU.sparse.major=1\n")),
    ] {
        let talked = shared.tar_in(&shared.path("broken"), &bytes);
        assert_eq!(code(&talked.outcome), Some(FailureCode::Invalid), "{name}: {talked:?}");
    }
    assert_eq!(shared.guest.ask(Operation::Ping).outcome, Outcome::Done);
}

#[test]
fn dials_a_port_both_ways() {
    let shared = shared();
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let listener = std::net::TcpListener::bind(address).unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut all = vec![];
            socket.read_to_end(&mut all).unwrap();
            all.reverse();
            socket.write_all(&all).unwrap();
        });
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 253) as u8).collect();
        let mut talk = shared.guest.request(new_op(), Operation::Dial(Dial { port }));
        talk.input(0, &bytes);
        talk.eof(bytes.len() as u64);
        let talked = talk.finish();
        server.join().unwrap();
        assert_eq!(talked.outcome, Outcome::Done);
        assert!(talked.out.iter().eq(bytes.iter().rev()));
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert_eq!(shared.guest.ask(Operation::Dial(Dial { port: free })).failure(), FailureCode::Refused);
    assert_eq!(shared.guest.ask(Operation::Dial(Dial { port: 0 })).failure(), FailureCode::Invalid);
    // A connection that nobody ends can be cancelled.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let op = new_op();
    let dial = Dial { port: listener.local_addr().unwrap().port() };
    let mut talk = shared.guest.request(op, Operation::Dial(dial));
    let _held = listener.accept().unwrap();
    talk.until(|frame| matches!(frame, Frame::Accepted).then_some(()));
    assert_eq!(shared.guest.cancel(op), Outcome::Done);
    while talk.receive().is_some() {}
}

#[test]
fn users_have_their_own_rights_and_no_others() {
    let shared = shared();
    if !rustix::process::geteuid().is_root() {
        // Without root everybody is the caller, and that has been shown by every other test here.
        return;
    }
    std::fs::set_permissions(shared.directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let nobody = || Some("nobody".to_owned());
    let path = |name: &str| shared.path(name);
    let mut exec = program(&["id", "-u"]);
    exec.user = nobody();
    assert_eq!(shared.guest.exec(exec).text(), "65534\n");
    let mut exec = sh("id -u; id -G; echo $HOME");
    exec.user = Some("1234:77".into());
    assert_eq!(shared.guest.exec(exec).text(), "1234\n77\n/\n");
    std::fs::write(path("secret"), "s").unwrap();
    std::fs::set_permissions(path("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::create_dir(path("closed")).unwrap();
    std::fs::set_permissions(path("closed"), std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::write(path("closed/file"), "s").unwrap();
    let denied: Vec<Operation> = vec![
        Operation::Read(Read { path: path("secret"), offset: 0, length: None, user: nobody() }),
        Operation::List(List { path: path("closed"), user: nobody() }),
        Operation::Stat(Stat { path: path("closed/file"), user: nobody() }),
        Operation::TarOut(TarOut { path: path("closed"), user: nobody() }),
        Operation::Watch(Watch { path: path("closed"), recursive: false, user: nobody() }),
        Operation::Remove(Remove { path: path("closed/file"), recursive: false, user: nobody() }),
        Operation::Rename(Rename { from: path("closed/file"), to: path("x"), user: nobody() }),
        Operation::Make(Make {
            path: path("closed/new"),
            kind: MakeKind::Directory,
            mode: None,
            parents: false,
            user: nobody(),
        }),
        Operation::Write(Write { path: path("closed/new"), mode: None, parents: false, user: nobody() }),
    ];
    for operation in denied {
        let shown = format!("{operation:?}");
        let writes = matches!(operation, Operation::Write(_));
        let mut talk = shared.guest.request(new_op(), operation);
        if writes {
            talk.eof(0);
        }
        assert_eq!(talk.finish().failure(), FailureCode::Denied, "{shown}");
    }
    // And root again on the same threads.
    for _ in 0..8 {
        assert_eq!(shared.read(&path("secret"), 0, None).out, b"s");
    }
    let write = Write { path: path("theirs"), mode: None, parents: false, user: nobody() };
    let mut talk = shared.guest.request(new_op(), Operation::Write(write));
    talk.input(0, b"mine");
    talk.eof(4);
    assert_eq!(talk.finish().outcome, Outcome::Done);
    assert_eq!(std::fs::metadata(path("theirs")).unwrap().uid(), 65534);
    // Root replaces another's file: it stays the other's.
    assert_eq!(shared.write(&path("theirs"), None, false, b"new").outcome, Outcome::Done);
    assert_eq!(std::fs::metadata(path("theirs")).unwrap().uid(), 65534);
    let bytes = archive(&[(b"d/", tar::EntryType::Directory, b"", b""), (b"d/f", tar::EntryType::Regular, b"", b"x")]);
    let mut talk = shared.guest.request(new_op(), Operation::TarIn(TarIn { path: path("unpacked"), user: nobody() }));
    talk.input(0, &bytes);
    talk.eof(bytes.len() as u64);
    assert_eq!(talk.finish().outcome, Outcome::Done);
    assert_eq!(std::fs::metadata(path("unpacked/d/f")).unwrap().uid(), 65534);
    let read = Read { path: path("theirs"), offset: 0, length: None, user: Some("no-such-user".into()) };
    assert_eq!(shared.guest.ask(Operation::Read(read)).failure(), FailureCode::NotFound);
}
