//! What others do to a tree meanwhile, and each write's own place.

use std::os::unix::fs::PermissionsExt;

use super::super::Cache;
use super::tests::{ask, init, serve};
use super::*;

#[test]
fn what_others_took_away_is_there_for_whoever_has_it_open() {
    let share = tempfile::tempdir().expect("directory");
    let share = share.path();
    std::fs::create_dir(share.join("d")).expect("directory");
    std::fs::write(share.join("f"), "mine").expect("file");
    let (mut stream, _running) = serve(share, Cache::Shared);
    init(&mut stream);
    let node = long(&ask(&mut stream, 1, 1, b"f\0").1, 0);
    let opened = ask(&mut stream, 14, node, &[&2_u32.to_le_bytes()[..], &[0; 4]].concat()).1;
    std::fs::write(share.join("new"), "another").expect("file");
    std::fs::rename(share.join("f"), share.join("d/kept")).expect("move");
    std::fs::rename(share.join("new"), share.join("f")).expect("replace");
    // Its own descriptor is long closed when it is used again.
    for n in 0..300 {
        std::fs::write(share.join(format!("n{n}")), "").expect("file");
        let other = long(&ask(&mut stream, 1, 1, format!("n{n}\0").as_bytes()).1, 0);
        assert_eq!(ask(&mut stream, 3, other, &[0; 16]).0, 0);
    }
    let mut lock = [&opened[..8], &9_u64.to_le_bytes(), &[0; 8], &(i64::MAX as u64).to_le_bytes()].concat();
    lock.extend([&libc::F_WRLCK.to_le_bytes()[..], &[0; 4], &[1, 0, 0, 0, 0, 0, 0, 0]].concat());
    assert_eq!(ask(&mut stream, operation::SETLK, node, &lock).0, 0, "it cannot be locked");
    let mut mode = [0; 88];
    mode[0] = 1;
    mode[68..72].copy_from_slice(&0o600_u32.to_le_bytes());
    assert_eq!(ask(&mut stream, 4, node, &mode).0, 0, "its mode cannot be changed");
    let mode = std::fs::metadata(share.join("d/kept")).expect("stat").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(ask(&mut stream, 18, node, &[&opened[..8], &[0; 16]].concat()).0, 0);
    assert_eq!(ask(&mut stream, 3, node, &[0; 16]).0, -libc::ESTALE, "closed, and its name is another's");
}

#[test]
fn a_write_at_the_end_is_there_and_another_of_the_same_open_file_has_its_place() {
    let share = tempfile::tempdir().expect("directory");
    let path = share.path().join("f");
    std::fs::write(&path, "0123").expect("file");
    let (mut stream, _running) = serve(share.path(), Cache::Shared);
    init(&mut stream);
    let node = long(&ask(&mut stream, 1, 1, b"f\0").1, 0);
    let append = libc::O_RDWR | libc::O_APPEND;
    let opened = ask(&mut stream, 14, node, &[&append.to_le_bytes()[..], &[0; 4]].concat()).1;
    let mut write = |flags: i32, offset: u64, bytes: &[u8]| {
        let mut body = [&opened[..8], &offset.to_le_bytes(), &(bytes.len() as u32).to_le_bytes(), &[0; 12]].concat();
        body.extend([&flags.to_le_bytes()[..], &[0; 4], bytes].concat());
        let (error, written) = ask(&mut stream, operation::WRITE, node, &body);
        assert_eq!((error, word(&written, 0)), (0, bytes.len() as u32));
    };
    // What the guest believes the end to be was another's write ago.
    write(append, 4, b"ab");
    std::fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .and_then(|mut file| io::Write::write_all(&mut file, b"XY"))
        .expect("another");
    write(append, 6, b"cd");
    write(libc::O_RDWR, 1, b"-");
    write(append, 0, b"e");
    assert_eq!(std::fs::read_to_string(&path).expect("read"), "0-23abXYcde");
}

#[test]
fn what_another_made_meanwhile_is_not_opened_unasked() {
    let share = tempfile::tempdir().expect("directory");
    let (mut stream, _running) = serve(share.path(), Cache::Shared);
    init(&mut stream);
    assert_eq!(ask(&mut stream, 1, 1, b"f\0").0, -libc::ENOENT);
    std::fs::write(share.path().join("f"), "another's").expect("file");
    let mut create = |flags: i32, name: &str| {
        let words = [flags as u32, 0o100_644, 0o022, 0].map(u32::to_le_bytes).concat();
        ask(&mut stream, 35, 1, &[&words, name.as_bytes(), b"\0"].concat()).0
    };
    let truncate = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
    assert_eq!(create(truncate, "f"), -libc::ESTALE, "the guest's kernel has not looked whether it may");
    assert_eq!(create(truncate | libc::O_EXCL, "f"), -libc::EEXIST);
    assert_eq!(std::fs::read_to_string(share.path().join("f")).expect("read"), "another's");
    assert_eq!(create(truncate, "g"), 0);
    assert_eq!(std::fs::metadata(share.path().join("g")).expect("made").permissions().mode() & 0o777, 0o644);
}
