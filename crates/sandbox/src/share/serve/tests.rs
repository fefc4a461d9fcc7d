//! A server on a stream, asked as a kernel asks.

use std::io::Write;

use fuse_backend_rs::abi::fuse_abi::WRITE_KILL_PRIV;

use super::super::nodes::Nodes;
use super::super::{Cache, PROOF};
use super::*;
use crate::cgroup::Io;

/// A server of `root` on one end of a stream; the other end, and what waits for its end.
pub fn serve(root: &std::path::Path, cache: Cache) -> (UnixStream, Running) {
    serve_within(root, cache, None)
}

fn serve_within(root: &std::path::Path, cache: Cache, io: Option<Io>) -> (UnixStream, Running) {
    serve_for(root, cache, io, PATIENCE)
}

pub fn serve_for(root: &std::path::Path, cache: Cache, io: Option<Io>, patience: Patience) -> (UnixStream, Running) {
    let (ours, theirs) = UnixStream::pair().expect("pair");
    let root = std::fs::File::open(root).expect("root");
    let nodes = Nodes::new(root.into(), 64, 10_000).expect("nodes");
    let files = std::fs::File::open("/proc/self/fd").expect("fds").into();
    let null = std::fs::File::options().write(true).open("/dev/null").expect("null").into();
    let tree = Tree::new(nodes, files, 64, cache, b"proof".to_vec(), None);
    let running = Running::begin(tree, theirs.into(), null, io.map(Bucket::new), patience, || Ok(())).expect("begin");
    ours.set_read_timeout(Some(Duration::from_secs(20))).expect("deadline");
    (ours, running)
}

pub fn request(kind: u32, unique: u64, node: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = ((REQUEST_HEAD + body.len()) as u32).to_le_bytes().to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.extend(unique.to_le_bytes());
    bytes.extend(node.to_le_bytes());
    bytes.extend([0; 16]);
    bytes.extend(body);
    bytes
}

/// The next answer that is not a question whether we are there: number, error, body.
pub fn answered(stream: &mut UnixStream) -> (u64, i32, Vec<u8>) {
    loop {
        let mut head = [0; ANSWER_HEAD];
        stream.read_exact(&mut head).expect("answer");
        let mut body = vec![0; word(&head, 0) as usize - ANSWER_HEAD];
        stream.read_exact(&mut body).expect("answer");
        if long(&head, 8) != 0 {
            return (long(&head, 8), word(&head, 4) as i32, body);
        }
    }
}

pub fn ask(stream: &mut UnixStream, kind: u32, node: u64, body: &[u8]) -> (i32, Vec<u8>) {
    stream.write_all(&request(kind, 77, node, body)).expect("ask");
    let (unique, error, body) = answered(stream);
    assert_eq!(unique, 77);
    (error, body)
}

pub fn init(stream: &mut UnixStream) -> (i32, Vec<u8>) {
    let body: Vec<u8> = [7_u32, 45, 128 << 10, u32::MAX].iter().flat_map(|word| word.to_le_bytes()).collect();
    ask(stream, 26, 0, &[&body[..], &[0xff; 48]].concat())
}

#[test]
fn the_first_message_settles_sizes_that_make_writing_fast() {
    let root = tempfile::tempdir().expect("directory");
    let (mut stream, _running) = serve(root.path(), Cache::Shared);
    let (error, body) = init(&mut stream);
    assert_eq!((error, word(&body, 0)), (0, 7));
    let (flags, largest) = (word(&body, 12), word(&body, 20));
    assert_eq!(largest, 1 << 20, "writes of {largest} bytes");
    assert_eq!(flags & (1 << 16), 0, "written later, acknowledged now");
    assert_ne!(flags & 2, 0, "ranges are locked in the guest alone");
    assert_ne!(flags & (1 << 10), 0, "files are locked in the guest alone");
    assert_ne!(init(&mut stream).0, 0, "a second time was taken");
}

#[test]
fn no_name_leads_out() {
    let root = tempfile::tempdir().expect("directory");
    std::fs::create_dir(root.path().join("share")).expect("directory");
    std::fs::write(root.path().join("secret"), "x").expect("file");
    std::os::unix::fs::symlink(root.path(), root.path().join("share/up")).expect("link");
    let (mut stream, _running) = serve(&root.path().join("share"), Cache::Shared);
    init(&mut stream);
    for bad in [&b"..\0"[..], b".\0", b"../secret\0", b"/etc/passwd\0", b"a/b\0", b"\0"] {
        assert_eq!(ask(&mut stream, 1, 1, bad).0, -libc::EINVAL, "{bad:?}");
    }
    assert!(ask(&mut stream, 1, 1, b"no end").0 < 0);
    // The link is found, as a link, and nothing is found or opened through it.
    let (error, entry) = ask(&mut stream, 1, 1, b"up\0");
    assert_eq!(error, 0);
    let link = long(&entry, 0);
    assert!(ask(&mut stream, 1, link, b"secret\0").0 < 0, "looked up through a link");
    assert!(ask(&mut stream, 14, link, &[0; 8]).0 < 0, "a link was opened");
    assert!(ask(&mut stream, 27, link, &[0; 8]).0 < 0, "a link was opened as a directory");
    let create = [&0_u32.to_le_bytes()[..], &0o644_u32.to_le_bytes(), &[0; 8], b"../out\0"].concat();
    assert!(ask(&mut stream, 35, 1, &create).0 < 0);
    let rename = [&1_u64.to_le_bytes()[..], b"up\0../out\0"].concat();
    assert!(ask(&mut stream, 12, 1, &rename).0 < 0);
    assert!(std::fs::read_dir(root.path()).expect("list").count() == 2, "something was made outside");
}

#[test]
fn a_request_that_was_answered_where_it_came_from_is_done_without_a_word() {
    let root = tempfile::tempdir().expect("directory");
    std::fs::write(root.path().join("f"), "x").expect("file");
    let (mut stream, _running) = serve(root.path(), Cache::Shared);
    init(&mut stream);
    let (_, entry) = ask(&mut stream, 1, 1, b"f\0");
    let node = long(&entry, 0);
    let (error, opened) = ask(&mut stream, 14, node, &[0; 8]);
    assert_eq!(error, 0);
    let read = [&opened[..8], &0_u64.to_le_bytes(), &[16, 0, 0, 0], &[0; 20]].concat();
    assert_eq!(ask(&mut stream, operation::READ, node, &read), (0, b"x".to_vec()));
    let release = [&opened[..8], &[0; 16]].concat();
    stream.write_all(&request(18, ANSWERED, node, &release)).expect("release");
    // Of one that cannot be done nothing is said either.
    stream.write_all(&request(operation::READ, ANSWERED, node, &[0xff; 40])).expect("read");
    while ask(&mut stream, operation::READ, node, &read).0 != -libc::EBADF {
        std::thread::sleep(Duration::from_millis(1));
    }
    stream.write_all(&request(3, 78, node, &[0; 16])).expect("ask");
    let mut head = [0; ANSWER_HEAD];
    stream.read_exact(&mut head).expect("answer");
    assert_eq!(long(&head, 8), 78, "something was said about a request without a number");
}

#[test]
fn every_request_is_answered_however_bad_it_is() {
    let root = tempfile::tempdir().expect("directory");
    std::fs::write(root.path().join("f"), "x").expect("file");
    let (mut stream, _running) = serve(root.path(), Cache::Shared);
    init(&mut stream);
    let unanswered = [operation::FORGET, operation::BATCH_FORGET, operation::INTERRUPT, 38, 26];
    for kind in (1..=60).chain([4096, 9999, u32::MAX - 1]).filter(|kind| !unanswered.contains(kind)) {
        for body in [&[][..], &[0xff; 3], &[0; 8], &[0xff; 24], &[0xff; 80], &[0x41; 300]] {
            for node in [0, 1, 2, 12345, u64::MAX] {
                stream.write_all(&request(kind, 5, node, body)).expect("ask");
                let (unique, error, _) = answered(&mut stream);
                assert_eq!(unique, 5, "{kind}");
                assert!((-4095..=0).contains(&error), "{kind}: {error}");
            }
        }
    }
    assert_eq!(ask(&mut stream, 1, 1, b"f\0").0, 0, "it serves no more");
}

#[test]
fn attributes_that_would_fill_memory_are_cut() {
    let root = tempfile::tempdir().expect("directory");
    std::fs::write(root.path().join("f"), "x").expect("file");
    let (mut stream, _running) = serve(root.path(), Cache::Shared);
    init(&mut stream);
    let node = long(&ask(&mut stream, 1, 1, b"f\0").1, 0);
    let huge = [&u32::MAX.to_le_bytes()[..], &[0; 4], b"user.x\0"].concat();
    assert_eq!(ask(&mut stream, operation::GETXATTR, node, &huge).0, -libc::ENODATA);
    assert_eq!(ask(&mut stream, operation::LISTXATTR, node, &huge[..8]).0, 0);
    let read = [&0_u64.to_le_bytes()[..], &0_u64.to_le_bytes(), &u32::MAX.to_le_bytes(), &[0; 20]].concat();
    assert_eq!(ask(&mut stream, operation::READ, node, &read).0, -libc::EINVAL);
}

#[test]
fn what_is_no_message_ends_the_server() {
    let root = tempfile::tempdir().expect("directory");
    for bad in [0_u32, 39, MESSAGE as u32 + 1, u32::MAX] {
        let (mut stream, running) = serve(root.path(), Cache::Shared);
        stream.write_all(&bad.to_le_bytes()).expect("write");
        stream.write_all(&[0; 64]).expect("write");
        assert_eq!(running.end(), End::Broken, "{bad}");
    }
    let (stream, running) = serve(root.path(), Cache::Shared);
    drop(stream);
    assert_eq!(running.end(), End::Closed);
}

#[test]
fn the_mount_is_proved_by_a_file_that_nobody_can_change() {
    let root = tempfile::tempdir().expect("directory");
    let (mut stream, _running) = serve(root.path(), Cache::Alone);
    init(&mut stream);
    let name = PROOF.to_bytes_with_nul();
    let (error, entry) = ask(&mut stream, 1, 1, name);
    assert_eq!(error, 0);
    let node = long(&entry, 0);
    let (error, opened) = ask(&mut stream, 14, node, &[0; 8]);
    assert_eq!(error, 0);
    let read = [&opened[..8], &0_u64.to_le_bytes(), &4096_u32.to_le_bytes(), &[0; 20]].concat();
    assert_eq!(ask(&mut stream, operation::READ, node, &read), (0, b"proof".to_vec()));
    let write = [&opened[..8], &0_u64.to_le_bytes(), &1_u32.to_le_bytes(), &[0; 20], b"x"].concat();
    assert!(ask(&mut stream, 16, node, &write).0 < 0, "it was written");
    assert!(ask(&mut stream, 10, 1, name).0 < 0, "it was removed");
    assert_eq!(std::fs::read_dir(root.path()).expect("list").count(), 0);
}

#[test]
fn bytes_beyond_the_rate_take_their_time_and_names_do_not() {
    let root = tempfile::tempdir().expect("directory");
    std::fs::write(root.path().join("f"), vec![7; 64 << 10]).expect("file");
    let io = Io { bytes: 256 << 10, operations: 10 };
    let (mut stream, _running) = serve_within(root.path(), Cache::Shared, Some(io));
    init(&mut stream);
    let node = long(&ask(&mut stream, 1, 1, b"f\0").1, 0);
    let (error, opened) = ask(&mut stream, 14, node, &[0; 8]);
    assert_eq!(error, 0);
    let began = Instant::now();
    for _ in 0..200 {
        assert_eq!(ask(&mut stream, 1, 1, b"f\0").0, 0);
    }
    assert!(began.elapsed() < Duration::from_secs(5), "names wait: {:?}", began.elapsed());
    let read = [&opened[..8], &0_u64.to_le_bytes(), &(64_u32 << 10).to_le_bytes(), &[0; 20]].concat();
    let began = Instant::now();
    for _ in 0..4 {
        assert_eq!(ask(&mut stream, operation::READ, node, &read).1.len(), 64 << 10);
    }
    // Four times a quarter of a second's worth, less the burst.
    assert!(began.elapsed() >= Duration::from_millis(850), "{:?}", began.elapsed());
    let began = Instant::now();
    for _ in 0..10 {
        assert_eq!(ask(&mut stream, operation::FSYNC, node, &[&opened[..8], &[0; 8]].concat()).0, 0);
    }
    assert!(began.elapsed() >= Duration::from_millis(850), "flushes are free: {:?}", began.elapsed());
}

#[test]
fn a_lock_waits_and_can_be_interrupted() {
    let root = tempfile::tempdir().expect("directory");
    std::fs::write(root.path().join("f"), "x").expect("file");
    let (mut one, _running) = serve(root.path(), Cache::Shared);
    let (mut other, _also) = serve(root.path(), Cache::Shared);
    let mut nodes = Vec::new();
    for stream in [&mut one, &mut other] {
        init(stream);
        nodes.push(long(&ask(stream, 1, 1, b"f\0").1, 0));
    }
    let flock = |kind: i32| {
        [&[0; 8][..], &9_u64.to_le_bytes(), &[0; 8], &u64::MAX.to_le_bytes(), &kind.to_le_bytes(), &[0; 4]]
            .concat()
            .into_iter()
            .chain([1, 0, 0, 0, 0, 0, 0, 0])
            .collect::<Vec<u8>>()
    };
    let lock = |kind| {
        let mut body = flock(kind);
        // A lock of the whole file ends at the largest offset.
        body[24..32].copy_from_slice(&(i64::MAX as u64).to_le_bytes());
        body
    };
    assert_eq!(ask(&mut one, operation::SETLK, nodes[0], &lock(libc::F_WRLCK)).0, 0);
    assert_eq!(ask(&mut other, operation::SETLK, nodes[1], &lock(libc::F_WRLCK)).0, -libc::EAGAIN);
    other.write_all(&request(operation::SETLKW, 100, nodes[1], &lock(libc::F_WRLCK))).expect("wait");
    other.write_all(&request(operation::INTERRUPT, 101, 0, &100_u64.to_le_bytes())).expect("interrupt");
    let (unique, error, _) = answered(&mut other);
    assert_eq!((unique, error), (100, -libc::EINTR));
    other.write_all(&request(operation::SETLKW, 102, nodes[1], &lock(libc::F_WRLCK))).expect("wait");
    drop(one);
    let (unique, error, _) = answered(&mut other);
    assert_eq!((unique, error), (102, 0), "the lock outlived its holder");
}

#[test]
fn a_write_that_takes_set_id_bits_away_tells_so_before_it_is_answered() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().expect("directory");
    let path = root.path().join("f");
    std::fs::write(&path, "x").expect("file");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o6755)).expect("mode");
    let (mut stream, _running) = serve(root.path(), Cache::Alone);
    init(&mut stream);
    let node = long(&ask(&mut stream, 1, 1, b"f\0").1, 0);
    let (error, opened) = ask(&mut stream, 14, node, &[&2_u32.to_le_bytes()[..], &[0; 4]].concat());
    assert_eq!(error, 0);
    // By whoever may keep them, they are kept and nothing is told; by anybody else they go.
    for (flags, mode) in [(0, 0o6755), (WRITE_KILL_PRIV, 0o755)] {
        let mut write = [&opened[..8], &0_u64.to_le_bytes(), &1_u32.to_le_bytes(), &flags.to_le_bytes()].concat();
        write.extend([&0_u64.to_le_bytes()[..], &2_u32.to_le_bytes(), &[0; 4], b"y"].concat());
        stream.write_all(&request(16, 78, node, &write)).expect("ask");
        if mode == 0o755 {
            let mut told = [0; NOTICE];
            stream.read_exact(&mut told).expect("a notice");
            assert_eq!((word(&told, 4) as i32, long(&told, 8), long(&told, 16)), (INVALID_INODE, 0, node));
        }
        assert_eq!(answered(&mut stream).1, 0);
        assert_eq!(std::fs::metadata(&path).expect("stat").permissions().mode() & 0o7777, mode);
    }
}

#[test]
fn a_directory_that_turns_into_a_link_and_back_leads_nowhere_else() {
    use std::sync::atomic::AtomicBool;
    let root = tempfile::tempdir().expect("directory");
    let share = root.path().join("share");
    for directory in ["share/d", "outside"] {
        std::fs::create_dir_all(root.path().join(directory)).expect("directory");
    }
    std::fs::write(root.path().join("outside/secret"), "x").expect("file");
    std::os::unix::fs::symlink("../outside", share.join("l")).expect("link");
    let (mut stream, _running) = serve(&share, Cache::Shared);
    init(&mut stream);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let top = std::fs::File::open(&share).expect("share");
            while !over.load(Ordering::Relaxed) {
                let exchange = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(&top, "d", &top, "l", exchange).expect("exchange");
            }
        });
        let mut met = 0;
        for _ in 0..2000 {
            let (error, entry) = ask(&mut stream, 1, 1, b"d\0");
            assert_eq!(error, 0, "it is always there, as one or the other");
            let node = long(&entry, 0);
            let (error, _) = ask(&mut stream, 1, node, b"secret\0");
            assert!(error < 0, "found through a link");
            let (error, opened) = ask(&mut stream, 27, node, &[0; 8]);
            if error == 0 {
                met += 1;
                let read = [&opened[..8], &0_u64.to_le_bytes(), &4096_u32.to_le_bytes(), &[0; 20]].concat();
                let (error, listed) = ask(&mut stream, operation::READDIR, node, &read);
                assert!(error < 0 || !listed.windows(6).any(|name| name == b"secret"), "listed through a link");
                ask(&mut stream, 29, node, &[&opened[..8], &[0; 16]].concat());
            }
        }
        over.store(true, Ordering::Relaxed);
        assert!(met > 0, "it was never a directory");
    });
}
