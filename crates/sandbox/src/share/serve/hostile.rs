//! What a guest may send that has put another program in the place of its kernel: whatever it is, the server answers it or
//! ends, reaches nothing outside of its tree, and keeps what others have.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::super::Cache;
use super::tests::{answered, ask, init, request, serve, serve_for};
use super::*;
use crate::cgroup::Io;

/// Operations that have no answer, end a mount, begin one, or wait for somebody.
const OTHERS: [u32; 6] = [operation::FORGET, operation::BATCH_FORGET, operation::INTERRUPT, operation::SETLKW, 38, 26];

/// A tree with something beside it that nobody may reach.
fn beside() -> (tempfile::TempDir, std::path::PathBuf) {
    let root = tempfile::tempdir().expect("directory");
    let share = root.path().join("share");
    std::fs::create_dir_all(share.join("d")).expect("directory");
    std::fs::write(root.path().join("secret"), "kept").expect("file");
    std::fs::write(share.join("f"), "mine").expect("file");
    std::os::unix::fs::symlink("../secret", share.join("l")).expect("link");
    (root, share)
}

fn untouched(root: &Path) {
    let mut names: Vec<_> =
        std::fs::read_dir(root).expect("list").map(|entry| entry.expect("entry").file_name()).collect();
    names.sort();
    assert_eq!(names, ["secret", "share"], "something was made outside");
    assert_eq!(std::fs::read_to_string(root.join("secret")).expect("read"), "kept");
}

#[test]
fn the_longest_messages_of_every_kind_are_answered() {
    let (root, share) = beside();
    let (mut stream, _running) = serve(&share, Cache::Shared);
    init(&mut stream);
    for kind in (1..=60).filter(|kind| !OTHERS.contains(kind)) {
        for (fill, length) in
            [(0x41, MESSAGE - REQUEST_HEAD), (0xFF, MESSAGE - REQUEST_HEAD), (0, 70_000), (0x2E, 4096)]
        {
            // A name that ends, however long it is.
            let mut body = vec![fill; length];
            body[length - 1] = 0;
            let (error, _) = ask(&mut stream, kind, 1, &body);
            assert!((-4095..=0).contains(&error), "{kind}: {error}");
        }
    }
    let huge = [u32::MAX.to_le_bytes(), [0; 4]].concat();
    stream.write_all(&request(operation::BATCH_FORGET, 9, 0, &huge)).expect("forget");
    assert_eq!(ask(&mut stream, 1, 1, b"f\0").0, 0, "it serves no more");
    untouched(root.path());
}

#[test]
fn what_is_put_together_at_random_reaches_nothing_outside() {
    let (root, share) = beside();
    let (mut stream, _running) = serve(&share, Cache::Shared);
    init(&mut stream);
    let mut nodes = vec![0, 1, u64::MAX - 1, u64::MAX];
    for name in [&b"f\0"[..], b"d\0", b"l\0"] {
        nodes.push(long(&ask(&mut stream, 1, 1, name).1, 0));
    }
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let words: [u64; 8] = [0, 1, 2, 0o100_644, 0o120_777, 1 << 22, u64::MAX, i64::MAX as u64];
    let names: [&[u8]; 9] = [b"f", b"d", b"l", b"..", b".", b"../secret", b"/etc/passwd", b"", b"d/../../secret"];
    for _ in 0..20_000 {
        let kind = 1 + random(52) as u32;
        if OTHERS.contains(&kind) {
            continue;
        }
        let mut body = Vec::new();
        for _ in 0..random(8) {
            match random(3) {
                0 => body.extend(words[random(words.len())].to_le_bytes()),
                1 => body.extend((random(1 << 20) as u32).to_le_bytes()),
                _ => {
                    body.extend(names[random(names.len())]);
                    body.push(0);
                }
            }
        }
        let (error, answer) = ask(&mut stream, kind, nodes[random(nodes.len())], &body);
        assert!((-4095..=0).contains(&error), "{kind}: {error}");
        assert!(!answer.windows(4).any(|bytes| bytes == b"kept"), "{kind}: it read what is outside");
    }
    assert_eq!(ask(&mut stream, 1, 1, b"..\0").0, -libc::EINVAL, "it serves no more");
    untouched(root.path());
}

#[test]
fn a_message_cut_off_ends_the_server() {
    let (_root, share) = beside();
    for length in [3, REQUEST_HEAD - 1, REQUEST_HEAD + 2, 200_000] {
        let (mut stream, running) = serve(&share, Cache::Shared);
        init(&mut stream);
        let whole = request(operation::WRITE, 5, 1, &vec![7; 400_000]);
        stream.write_all(&whole[..length]).expect("a part");
        drop(stream);
        assert_eq!(running.end(), End::Closed, "{length}");
    }
}

#[test]
fn many_requests_at_once_are_each_answered_once() {
    let (_root, share) = beside();
    let (mut stream, _running) = serve(&share, Cache::Shared);
    init(&mut stream);
    const MANY: u64 = 20_000;
    let mut asking = stream.try_clone().expect("clone");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for unique in 1..=MANY {
                asking.write_all(&request(1, unique, 1, b"f\0")).expect("ask");
            }
        });
        // Nobody reads for a while: the server stops, and goes on.
        std::thread::sleep(Duration::from_millis(300));
        let answers: BTreeSet<u64> = (0..MANY).map(|_| answered(&mut stream).0).collect();
        assert_eq!(answers, (1..=MANY).collect());
    });
}

#[test]
fn a_server_that_is_busy_takes_nobody_for_silent() {
    let (_root, share) = beside();
    std::fs::write(share.join("f"), vec![7; 256 << 10]).expect("file");
    let patience = Patience { ask: Duration::from_millis(50), silence: Duration::from_millis(600) };
    let io = Io { bytes: 1 << 20, operations: 10 };
    let (mut stream, running) = serve_for(&share, Cache::Shared, Some(io), patience);
    init(&mut stream);
    let node = long(&ask(&mut stream, 1, 1, b"f\0").1, 0);
    let opened = ask(&mut stream, 14, node, &[0; 8]).1;
    let read = [&opened[..8], &0_u64.to_le_bytes(), &(256_u32 << 10).to_le_bytes(), &[0; 20]].concat();
    let began = Instant::now();
    // All threads wait for their share of the disks, longer than a guest may be silent.
    for unique in 1..=8 {
        stream.write_all(&request(operation::READ, unique, node, &read)).expect("ask");
    }
    let mut here = stream.try_clone().expect("clone");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The guest is there all the time, heard or not.
            while !over.load(Ordering::Relaxed) {
                here.write_all(&request(HERE, 0, 0, &[])).expect("here");
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        for _ in 1..=8 {
            assert_eq!(answered(&mut stream).2.len(), 256 << 10);
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(began.elapsed() > 2 * patience.silence, "it was not busy: {:?}", began.elapsed());
    assert!(running.over.try_recv().is_err(), "it has given its guest up");
    // And who says nothing while it listens is gone.
    assert_eq!(running.end(), End::Silent);
}
