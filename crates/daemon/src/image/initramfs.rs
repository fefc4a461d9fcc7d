//! What the kernel unpacks first: the Image's modules, then this release's guest agent.
//!
//! An initramfs is archives one after the other, so joining is appending. The modules' archive belongs to the Image, the
//! agent's is made here from the program beside pepod: an upgrade changes no Image. Each pair is joined once and kept under
//! the digests of both.
//!
//! ```text
//! modules.cpio   /modules/<name>.ko   unpacked, unsigned
//!                /modules/order       one file name a line, in the order in which they load
//! guest.cpio     /init                the agent
//! ```

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest as _, Sha256};

use super::kernel::Module;

/// In the state directory.
pub const DIRECTORY: &str = "initramfs";

/// Name of the list of modules in the archive.
pub const ORDER: &str = "modules/order";

/// Directory of the modules in the archive.
pub const MODULES: &str = "modules";

/// The archive of an Image's modules.
pub fn modules_archive(modules: &[Module]) -> Vec<u8> {
    let mut archive = Archive::default();
    archive.directory(MODULES);
    let mut order = String::new();
    for module in modules {
        let file = format!("{}.ko", module.name);
        archive.file(&format!("{MODULES}/{file}"), 0o644, &module.bytes);
        order.push_str(&file);
        order.push('\n');
    }
    archive.file(ORDER, 0o644, order.as_bytes());
    archive.end()
}

/// The archive of the guest agent.
fn guest_archive(agent: &[u8]) -> Vec<u8> {
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys", "run", "tmp"] {
        archive.directory(directory);
    }
    archive.file("init", 0o755, agent);
    archive.end()
}

/// The guest agent of this release, read once.
#[derive(Clone, Debug)]
pub struct Agent {
    archive: Vec<u8>,
    digest: String,
}

impl Agent {
    /// Reads the program.
    ///
    /// # Errors
    /// It cannot be read, or is not a program that could run as a guest's first: static, for Linux.
    pub fn read(path: &Path) -> io::Result<Self> {
        let bytes = fs::read(path)?;
        if !bytes.starts_with(b"\x7fELF") {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{} is not a program", path.display())));
        }
        let archive = guest_archive(&bytes);
        Ok(Agent { digest: super::hex(&Sha256::digest(&archive)), archive })
    }

    /// SHA-256 of its archive, as hex.
    pub fn digest(&self) -> &str {
        &self.digest
    }
}

/// The path, relative to the state directory, of the initramfs with those modules (by their digest) and that agent; made
/// if it is not there. Other agents' of the same modules are removed: no start will ask for them again.
///
/// # Errors
/// The files cannot be read or written.
pub fn joined(state: &Path, modules: &Path, modules_digest: &str, agent: &Agent) -> io::Result<String> {
    let short = |digest: &str| digest.chars().take(32).collect::<String>();
    let (modules_digest, agent_digest) = (short(modules_digest), short(&agent.digest));
    let name = format!("{modules_digest}-{agent_digest}.cpio");
    let directory = state.join(DIRECTORY);
    let path = directory.join(&name);
    // The first Sandboxes of an Image ask for it at once: one makes it, the others wait for that.
    static MAKING: Mutex<()> = Mutex::new(());
    let making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if !path.exists() {
        match fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let modules = fs::read(modules)?;
        // Renamed into place: nobody sees a part.
        let part = Part(directory.join(format!(".{name}.{}", std::process::id())));
        let mut file = File::create(&part.0)?;
        file.write_all(&modules)?;
        file.write_all(&agent.archive)?;
        file.sync_data()?;
        fs::rename(&part.0, &path)?;
        forget_others(&directory, &modules_digest, &name);
    }
    drop(making);
    Ok(format!("{DIRECTORY}/{name}"))
}

/// Removes what a failure leaves.
struct Part(PathBuf);

impl Drop for Part {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn forget_others(directory: &Path, modules_digest: &str, keep: &str) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(modules_digest) && name != keep {
            // Sandboxes that boot from it hold it open.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// An archive in the format `newc` that an initramfs is made of. Every file is root's and has no time: the same content
/// gives the same bytes.
#[derive(Debug, Default)]
struct Archive {
    out: Vec<u8>,
    inode: u32,
}

impl Archive {
    fn directory(&mut self, path: &str) {
        self.entry(path, 0o040_755, 2, &[]);
    }

    fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) {
        self.entry(path, 0o100_000 | mode, 1, bytes);
    }

    fn end(mut self) -> Vec<u8> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, 1, &[]);
        // The kernel takes the next archive from a multiple of four on; tools pad to blocks of 512.
        self.pad(512);
        self.out
    }

    fn entry(&mut self, path: &str, mode: u32, links: u32, bytes: &[u8]) {
        if mode != 0 {
            self.inode += 1;
        }
        let length = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        let name = length(path.len() + 1);
        // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let fields = [self.inode, mode, 0, 0, links, 0, length(bytes.len()), 0, 0, 0, 0, name, 0];
        self.out.extend(b"070701");
        for field in fields {
            self.out.extend(format!("{field:08x}").bytes());
        }
        self.out.extend(path.bytes());
        self.out.push(0);
        self.pad(4);
        self.out.extend(bytes);
        self.pad(4);
    }

    fn pad(&mut self, to: usize) {
        self.out.resize(self.out.len().next_multiple_of(to), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(name: &str, bytes: &[u8]) -> Module {
        Module { name: name.to_owned(), bytes: bytes.to_vec() }
    }

    #[test]
    fn many_that_ask_at_once_get_one_whole_file() {
        let state = tempfile::tempdir().expect("directory");
        let modules = state.path().join("modules.cpio");
        fs::write(&modules, vec![7; 3 << 20]).expect("write");
        let agent = Agent { archive: vec![9; 1 << 20], digest: "ab".repeat(32) };
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let path = joined(state.path(), &modules, &"cd".repeat(32), &agent).expect("joined");
                    assert_eq!(fs::metadata(state.path().join(path)).expect("there").len(), 4 << 20);
                });
            }
        });
        let left: Vec<_> = fs::read_dir(state.path().join(DIRECTORY)).expect("list").collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }

    #[test]
    fn the_bytes_are_those_of_newc() {
        let mut archive = Archive::default();
        archive.file("init", 0o755, b"hello");
        let out = archive.end();
        let expected = concat!(
            "070701",
            "00000001",
            "000081ed",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000005",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000005",
            "00000000",
            "init\0\0",
            "hello\0\0\0",
            "070701",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "0000000b",
            "00000000",
            "TRAILER!!!\0\0\0\0",
        );
        assert!(out.starts_with(expected.as_bytes()), "{}", String::from_utf8_lossy(&out));
        assert_eq!(out.len() % 512, 0);
        assert!(out[expected.len()..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn cpio_reads_what_is_written() {
        let modules = modules_archive(&[module("ring", b"one"), module("bus", b"four")]);
        assert_eq!(modules, modules_archive(&[module("ring", b"one"), module("bus", b"four")]));
        let Ok(mut cpio) = std::process::Command::new("cpio")
            .args(["-t", "--quiet"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
        else {
            return;
        };
        cpio.stdin.take().expect("stdin").write_all(&modules).expect("write");
        let listed = cpio.wait_with_output().expect("cpio");
        assert!(listed.status.success());
        let listed = String::from_utf8(listed.stdout).expect("text");
        assert_eq!(
            listed.lines().collect::<Vec<_>>(),
            ["modules", "modules/ring.ko", "modules/bus.ko", "modules/order"]
        );
    }

    #[test]
    fn a_pair_is_joined_once_and_old_agents_go() {
        let state = tempfile::tempdir().expect("state");
        let modules = state.path().join("modules.cpio");
        fs::write(&modules, b"modules.").expect("write");
        let program = state.path().join("pepo-guest");
        fs::write(&program, b"\x7fELF one").expect("write");
        let digest = "ab".repeat(32);
        let one = Agent::read(&program).expect("agent");
        let first = joined(state.path(), &modules, &digest, &one).expect("joined");
        let bytes = fs::read(state.path().join(&first)).expect("read");
        assert!(bytes.starts_with(b"modules.070701") && bytes.windows(4).any(|four| four == b"init"));
        let made = fs::metadata(state.path().join(&first)).expect("there").modified().expect("time");
        assert_eq!(joined(state.path(), &modules, &digest, &one).expect("again"), first);
        assert_eq!(fs::metadata(state.path().join(&first)).expect("there").modified().expect("time"), made);
        fs::write(&program, b"\x7fELF two").expect("write");
        let two = Agent::read(&program).expect("agent");
        let second = joined(state.path(), &modules, &digest, &two).expect("joined");
        assert_ne!(first, second);
        assert_eq!(fs::read_dir(state.path().join(DIRECTORY)).expect("list").count(), 1, "an old one was left");
        fs::write(&program, b"#!/bin/sh").expect("write");
        assert!(Agent::read(&program).is_err());
    }
}
