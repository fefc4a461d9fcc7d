//! What is in directories. Called by [`super`].

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use fuse_backend_rs::abi::fuse_abi::OpenOptions;
use fuse_backend_rs::api::filesystem::{DirEntry, Entry};
use rustix::fs::{FileType, OFlags, RawDir, SeekFrom};

use super::super::Cache;
use super::super::nodes::{errno, look_at, plain};
use super::Tree;

/// The most of a directory that is read at once, bytes.
const DIRECTORY: usize = 64 * 1024;

impl Tree {
    pub(super) fn open_directory(&self, node: u64) -> io::Result<(Option<u64>, OpenOptions)> {
        let file = self.file(node)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let handle = self.hold(File::from(self.again(file.as_fd(), flags)?), node, true)?;
        let options = match self.cache {
            Cache::Shared => OpenOptions::empty(),
            Cache::Alone => OpenOptions::KEEP_CACHE | OpenOptions::CACHE_DIR,
        };
        Ok((Some(handle), options))
    }

    pub(super) fn read_directory(
        &self,
        node: u64,
        handle: u64,
        (size, offset): (u32, u64),
        add: &mut dyn FnMut(&CStr, DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        let handle = self.handle(handle, node)?;
        if !handle.directory {
            return Err(errno(libc::ENOTDIR));
        }
        // A copy of the descriptor has the same position, so whoever reads one directory through one handle takes turns;
        // the kernel of a guest does.
        rustix::fs::seek(&handle.file, SeekFrom::Start(offset))?;
        let mut buffer = vec![MaybeUninit::uninit(); (size as usize).clamp(4096, DIRECTORY)];
        let mut entries = RawDir::new(&handle.file, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name();
            let kind = match entry.file_type() {
                FileType::RegularFile => libc::DT_REG,
                FileType::Directory => libc::DT_DIR,
                FileType::Symlink => libc::DT_LNK,
                FileType::Fifo => libc::DT_FIFO,
                FileType::Socket => libc::DT_SOCK,
                FileType::CharacterDevice => libc::DT_CHR,
                FileType::BlockDevice => libc::DT_BLK,
                FileType::Unknown => libc::DT_UNKNOWN,
            };
            let entry = DirEntry {
                ino: entry.ino(),
                offset: entry.next_entry_cookie(),
                type_: u32::from(kind),
                name: name.to_bytes(),
            };
            if add(name, entry)? == 0 {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn read_directory_and_look(
        &self,
        node: u64,
        handle: u64,
        place: (u32, u64),
        add: &mut dyn FnMut(DirEntry<'_>, Entry) -> io::Result<usize>,
    ) -> io::Result<()> {
        let directory = self.file(node)?;
        self.read_directory(node, handle, place, &mut |name, entry| {
            let found = match plain(name) {
                Ok(name) => look_at(&*directory, name).and_then(|seen| self.entry(node, name, &seen)),
                // The directory itself and the one above are told and not looked up.
                Err(_) => Ok(Entry::default()),
            };
            // One that went meanwhile, or for which there is no room, is told by its name alone.
            let found = found.unwrap_or_default();
            let added = add(entry, found);
            if found.inode != 0 && !matches!(added, Ok(size) if size > 0) {
                self.nodes.forget(found.inode, 1);
            }
            added
        })
    }
}
