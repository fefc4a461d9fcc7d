//! What the kernel of a guest knows of a tree: a number for each file it has looked up, and how the file is found again.
//!
//! A node is a parent and a name, and who was found there: inode, birth, kind. A descriptor of it is kept only while there
//! is room: the longest unused is closed, and opened again by name when it is needed, with the same file there or `ESTALE`.
//! So there may be a million nodes at a limit of a thousand descriptors. What has lost its name here while it is still in
//! use (unlinked, replaced) keeps its descriptor.
//!
//! ```text
//! lookup ─▶ node, no descriptor ──first use──▶ open by (parent, name), who is it? ──▶ kept ──room is short──▶ closed
//!   forget (as often as looked up) and no child left ─▶ gone                            ▲                     │
//!                                                                                       '──────next use───────'
//! ```

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags};

/// The node of the tree's top.
pub(super) const ROOT: u64 = 1;

/// The longest name, bytes: what Linux file systems have.
const NAME: usize = 255;

/// An error as the kernel knows it.
pub(super) fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

/// Who a file is, whatever it is called: its inode, told apart from one that has the number later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    device: (u32, u32),
    inode: u64,
    born: (i64, u32),
    kind: u32,
}

impl Identity {
    pub fn of(seen: &Statx) -> Self {
        // A file system that tells no birth has 0 for all.
        Identity {
            device: (seen.stx_dev_major, seen.stx_dev_minor),
            inode: seen.stx_ino,
            born: (seen.stx_btime.tv_sec, seen.stx_btime.tv_nsec),
            kind: u32::from(seen.stx_mode) & libc::S_IFMT,
        }
    }

    /// `S_IFREG` and the like.
    pub fn kind(self) -> u32 {
        self.kind
    }
}

#[derive(Debug)]
struct Node {
    who: Identity,
    parent: u64,
    /// `None`: it has none any more that is known here.
    name: Option<CString>,
    /// How often the kernel was told of it and has not forgotten.
    known: u64,
    /// Nodes whose parent it is.
    children: u32,
    file: Option<Arc<OwnedFd>>,
    /// Used since the hand came by.
    used: bool,
    /// The hand will come by: it is in the clock, once.
    queued: bool,
    /// Its descriptor is the only way to it.
    pinned: bool,
}

#[derive(Debug, Default)]
struct Table {
    nodes: HashMap<u64, Node>,
    by_inode: HashMap<u64, u64>,
    /// Nodes with a descriptor that may be closed, in the order in which the hand passes them.
    clock: VecDeque<u64>,
    /// Nodes with a descriptor, those that may not be closed among them.
    open: usize,
    pinned: usize,
    next: u64,
}

/// All nodes of one mount.
#[derive(Debug)]
pub(super) struct Nodes {
    table: Mutex<Table>,
    root: Arc<OwnedFd>,
    device: (u32, u32),
    /// Descriptors kept.
    room: usize,
    /// Nodes there may be.
    most: usize,
}

/// Looks at what a descriptor is open on.
pub(super) fn look(fd: impl AsFd) -> io::Result<Statx> {
    look_at(fd, c"")
}

/// Looks at an entry, not at what it points to.
pub(super) fn look_at(fd: impl AsFd, name: &CStr) -> io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    Ok(rustix::fs::statx(fd, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?)
}

/// A name that is one: not empty, no way up, no path. A guest's kernel sends no other.
pub(super) fn plain(name: &CStr) -> io::Result<&CStr> {
    let bytes = name.to_bytes();
    if bytes.len() > NAME {
        return Err(errno(libc::ENAMETOOLONG));
    }
    if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
        return Err(errno(libc::EINVAL));
    }
    Ok(name)
}

impl Nodes {
    /// Those of the tree below `root`, with so many descriptors kept and so many nodes known at the most.
    pub fn new(root: OwnedFd, room: usize, most: usize) -> io::Result<Self> {
        let who = Identity::of(&look(&root)?);
        let root = Arc::new(root);
        let top = Node {
            who,
            parent: ROOT,
            name: None,
            known: 1,
            children: 0,
            file: Some(root.clone()),
            used: true,
            queued: false,
            pinned: true,
        };
        let table = Table {
            nodes: HashMap::from([(ROOT, top)]),
            by_inode: HashMap::from([(who.inode, ROOT)]),
            next: ROOT + 1,
            ..Table::default()
        };
        Ok(Nodes { table: Mutex::new(table), root, device: who.device, room: room.max(16), most })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The top.
    pub fn root(&self) -> &OwnedFd {
        &self.root
    }

    /// Who a node is.
    pub fn who(&self, id: u64) -> io::Result<Identity> {
        Ok(self.table().nodes.get(&id).ok_or(errno(libc::ESTALE))?.who)
    }

    /// How many nodes there are, and how many descriptors are kept for them.
    #[cfg(test)]
    pub fn count(&self) -> (usize, usize) {
        let table = self.table();
        (table.nodes.len(), table.open)
    }

    /// A descriptor (`O_PATH`) of the node's file: kept from before, or opened by name and seen to be the same file.
    pub fn file(&self, id: u64) -> io::Result<Arc<OwnedFd>> {
        // Up to the nearest node that is open, then down again, each one checked.
        let mut missing = Vec::new();
        let mut at = id;
        let mut open = {
            let mut table = self.table();
            loop {
                let node = table.nodes.get_mut(&at).ok_or(errno(libc::ESTALE))?;
                if let Some(file) = &node.file {
                    node.used = true;
                    break file.clone();
                }
                let name = node.name.clone().ok_or(errno(libc::ESTALE))?;
                missing.push((at, name, node.who));
                // Up it goes until the top: `moved` lets no circle come about.
                at = node.parent;
            }
        };
        while let Some((id, name, who)) = missing.pop() {
            let found = Arc::new(open_entry(&open, &name)?);
            if Identity::of(&look(&*found)?) != who {
                return Err(errno(libc::ESTALE));
            }
            self.keep(id, &found);
            open = found;
        }
        Ok(open)
    }

    fn keep(&self, id: u64, file: &Arc<OwnedFd>) {
        let mut closed = Vec::new();
        {
            let mut table = self.table();
            let Some(node) = table.nodes.get_mut(&id) else { return };
            if node.file.is_some() {
                return;
            }
            node.file = Some(file.clone());
            node.used = true;
            table.open += 1;
            table.queue(id);
            // Ids of nodes that are gone stay behind until the hand comes by, or until they are the most.
            if table.clock.len() > 2 * table.open + 64 {
                let Table { clock, nodes, .. } = &mut *table;
                clock.retain(|id| {
                    nodes.get_mut(id).is_some_and(|node| {
                        node.queued = node.file.is_some() && !node.pinned;
                        node.queued
                    })
                });
            }
            table.make_room(self.room, &mut closed);
        }
        // Closed outside of the lock.
        drop(closed);
    }

    /// Makes known what was found at `name` in `parent`, once more where it is known. Its number.
    pub fn found(&self, parent: u64, name: &CStr, seen: &Statx) -> io::Result<u64> {
        let who = Identity::of(seen);
        if who.device != self.device {
            return Err(errno(libc::EXDEV));
        }
        let mut table = self.table();
        if let Some(id) = table.by_inode.get(&who.inode).copied()
            && table.nodes.get(&id).is_some_and(|node| node.who == who)
        {
            table.moved(id, parent, name);
            if let Some(node) = table.nodes.get_mut(&id) {
                node.known += 1;
            }
            return Ok(id);
        }
        if table.nodes.len() >= self.most {
            return Err(errno(libc::ENFILE));
        }
        let id = table.next;
        table.next += 1;
        let node = Node {
            who,
            parent,
            name: Some(name.to_owned()),
            known: 1,
            children: 0,
            file: None,
            used: false,
            queued: false,
            pinned: false,
        };
        table.nodes.get_mut(&parent).ok_or(errno(libc::ESTALE))?.children += 1;
        table.nodes.insert(id, node);
        table.by_inode.insert(who.inode, id);
        Ok(id)
    }

    /// The kernel forgets that it was told of it `count` times.
    pub fn forget(&self, id: u64, count: u64) {
        if id == ROOT {
            return;
        }
        let mut gone = Vec::new();
        let mut table = self.table();
        if let Some(node) = table.nodes.get_mut(&id) {
            node.known = node.known.saturating_sub(count);
        }
        table.leave(id, &mut gone);
        drop(table);
        drop(gone);
    }

    /// The node of the file that has this entry, if it is known here.
    fn known_at(&self, seen: &Statx) -> Option<u64> {
        let who = Identity::of(seen);
        let table = self.table();
        let id = *table.by_inode.get(&who.inode)?;
        (table.nodes.get(&id)?.who == who).then_some(id)
    }

    /// Before an entry goes: if its file is known and in use, a descriptor is all that is left of it afterwards.
    pub fn before_loss(&self, directory: &OwnedFd, parent: u64, name: &CStr) -> Option<u64> {
        let seen = look_at(directory, name).ok()?;
        let id = self.known_at(&seen)?;
        {
            let table = self.table();
            let node = table.nodes.get(&id)?;
            let here = node.parent == parent && node.name.as_deref() == Some(name);
            // Known by another name, it is found by that again.
            if !here {
                return None;
            }
        }
        // Opened now, while it has its name. Where that fails it is lost to whoever still holds it, and they are told so.
        let _ = self.file(id);
        Some(id)
    }

    /// After the entry of `before_loss` went.
    pub fn lost(&self, id: u64) {
        let mut table = self.table();
        // A guest that unlinks without end and forgets nothing keeps half of the descriptors, no more.
        let may_pin = table.pinned < self.room / 2;
        let Some(node) = table.nodes.get_mut(&id) else { return };
        node.name = None;
        if node.file.is_some() && !node.pinned && may_pin {
            node.pinned = true;
            table.pinned += 1;
        }
    }

    /// After a rename: the file is there now.
    pub fn renamed(&self, parent: u64, name: &CStr, directory: &OwnedFd) {
        if let Ok(seen) = look_at(directory, name)
            && let Some(id) = self.known_at(&seen)
        {
            self.table().moved(id, parent, name);
        }
    }
}

impl Table {
    /// Where a node is found from now on.
    fn moved(&mut self, id: u64, parent: u64, name: &CStr) {
        let Some(node) = self.nodes.get(&id) else { return };
        if id == ROOT || id == parent || (node.parent == parent && node.name.as_deref() == Some(name)) {
            return;
        }
        if node.parent != parent {
            self.lift_from_below(id, parent);
        }
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let before = std::mem::replace(&mut node.parent, parent);
        node.name = Some(name.to_owned());
        if std::mem::take(&mut node.pinned) {
            self.pinned -= 1;
            self.queue(id);
        }
        if before != parent {
            if let Some(new) = self.nodes.get_mut(&parent) {
                new.children += 1;
            }
            if let Some(old) = self.nodes.get_mut(&before) {
                old.children = old.children.saturating_sub(1);
            }
            let mut gone = Vec::new();
            self.leave(before, &mut gone);
        }
    }

    /// Before a node is put below `parent`: where that is below the node by what is known here, others have moved it
    /// meanwhile. Where to, its next lookup tells; until then it has a descriptor or nothing.
    fn lift_from_below(&mut self, id: u64, parent: u64) {
        let mut at = parent;
        while at != ROOT {
            let Some(node) = self.nodes.get_mut(&at) else { return };
            if node.parent != id {
                at = node.parent;
                continue;
            }
            node.parent = ROOT;
            node.name = None;
            for (id, more) in [(id, -1), (ROOT, 1)] {
                if let Some(node) = self.nodes.get_mut(&id) {
                    node.children = node.children.saturating_add_signed(more);
                }
            }
            return;
        }
    }

    /// Lets the hand come by a node, once.
    fn queue(&mut self, id: u64) {
        if let Some(node) = self.nodes.get_mut(&id)
            && !std::mem::replace(&mut node.queued, true)
        {
            self.clock.push_back(id);
        }
    }

    /// Removes a node that nobody knows and nobody is below, and then its parent for the same reason.
    fn leave(&mut self, mut id: u64, gone: &mut Vec<Arc<OwnedFd>>) {
        while id != ROOT {
            match self.nodes.get(&id) {
                Some(node) if node.known == 0 && node.children == 0 => {}
                _ => return,
            }
            let Some(node) = self.nodes.remove(&id) else { return };
            if self.by_inode.get(&node.who.inode) == Some(&id) {
                self.by_inode.remove(&node.who.inode);
            }
            if let Some(file) = node.file {
                self.open -= 1;
                gone.push(file);
            }
            if node.pinned {
                self.pinned -= 1;
            }
            id = node.parent;
            if let Some(parent) = self.nodes.get_mut(&id) {
                parent.children = parent.children.saturating_sub(1);
            }
        }
    }

    /// Closes the longest unused descriptors beyond the room, of which those that may not be closed take up to a half.
    /// (Second chance: what was used since the hand came by stays.)
    fn make_room(&mut self, room: usize, closed: &mut Vec<Arc<OwnedFd>>) {
        let mut looked_at = 0;
        while self.open > room && looked_at < 2 * room + 64 {
            looked_at += 1;
            let Some(id) = self.clock.pop_front() else { return };
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            node.queued = false;
            if node.pinned || node.file.is_none() {
                continue;
            }
            if std::mem::take(&mut node.used) {
                self.queue(id);
                continue;
            }
            closed.extend(node.file.take());
            self.open -= 1;
        }
    }
}

/// Opens an entry without following it, and without leaving the directory or its file system.
fn open_entry(directory: &OwnedFd, name: &CStr) -> io::Result<OwnedFd> {
    let resolve =
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve) {
        Ok(file) => Ok(file),
        // A link itself is opened by O_PATH with NOFOLLOW, but some kernels refuse it under NO_SYMLINKS. One name without
        // a slash leads nowhere else.
        Err(rustix::io::Errno::LOOP) => Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?),
        // It was there once: whoever holds its number learns that it is another's now.
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => Err(errno(libc::ESTALE)),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn nodes(root: &std::path::Path, room: usize) -> Nodes {
        Nodes::new(fs::File::open(root).expect("root").into(), room, 100_000).expect("nodes")
    }

    fn name(text: &str) -> CString {
        CString::new(text).expect("name")
    }

    fn enter(nodes: &Nodes, parent: u64, text: &str) -> u64 {
        let directory = nodes.file(parent).expect("parent");
        let seen = look_at(&*directory, &name(text)).expect("look");
        nodes.found(parent, &name(text), &seen).expect("found")
    }

    #[test]
    fn descriptors_stay_within_their_room_and_every_file_is_found_again() {
        let root = tempfile::tempdir().expect("directory");
        let nodes = nodes(root.path(), 16);
        fs::create_dir(root.path().join("d")).expect("directory");
        let parent = enter(&nodes, ROOT, "d");
        let ids: Vec<u64> = (0..500)
            .map(|n| {
                fs::write(root.path().join(format!("d/f{n}")), n.to_string()).expect("write");
                enter(&nodes, parent, &format!("f{n}"))
            })
            .collect();
        for round in 0..3 {
            for id in &ids {
                let file = nodes.file(*id).expect("file");
                assert_eq!(Identity::of(&look(&*file).expect("look")), nodes.who(*id).expect("who"), "round {round}");
                assert!(nodes.count().1 <= 18, "{} descriptors are open", nodes.count().1);
            }
        }
        assert_eq!(nodes.count().0, 502);
        for id in ids {
            nodes.forget(id, 1);
        }
        nodes.forget(parent, 1);
        assert_eq!(nodes.count(), (1, 0));
    }

    #[test]
    fn a_file_that_took_the_name_is_not_taken_for_the_one_before() {
        let root = tempfile::tempdir().expect("directory");
        let nodes = nodes(root.path(), 16);
        fs::write(root.path().join("a"), "first").expect("write");
        let first = enter(&nodes, ROOT, "a");
        // Somebody else replaces it: the one before still has its inode, or another file has it by now.
        fs::write(root.path().join("b"), "second").expect("write");
        fs::rename(root.path().join("b"), root.path().join("a")).expect("rename");
        assert_eq!(nodes.file(first).expect_err("found").raw_os_error(), Some(libc::ESTALE));
        let second = enter(&nodes, ROOT, "a");
        assert_ne!(first, second);
        nodes.file(second).expect("the new one");
        fs::remove_file(root.path().join("a")).expect("remove");
        let third = {
            fs::write(root.path().join("a"), "third").expect("write");
            enter(&nodes, ROOT, "a")
        };
        assert_ne!(second, third, "an inode used again was taken for the file before");
    }

    #[test]
    fn what_lost_its_name_is_there_until_it_is_forgotten() {
        let root = tempfile::tempdir().expect("directory");
        let nodes = nodes(root.path(), 16);
        fs::write(root.path().join("a"), "kept").expect("write");
        let id = enter(&nodes, ROOT, "a");
        let held = nodes.before_loss(nodes.root(), ROOT, c"a").expect("known");
        fs::remove_file(root.path().join("a")).expect("remove");
        nodes.lost(held);
        for n in 0..100 {
            fs::write(root.path().join(format!("f{n}")), "").expect("write");
            nodes.file(enter(&nodes, ROOT, &format!("f{n}"))).expect("file");
        }
        assert_eq!(look(&*nodes.file(id).expect("kept")).expect("look").stx_nlink, 0);
        nodes.forget(id, 1);
        assert_eq!(nodes.file(id).expect_err("gone").raw_os_error(), Some(libc::ESTALE));
    }

    #[test]
    fn a_moved_directory_takes_what_is_below_along() {
        let root = tempfile::tempdir().expect("directory");
        let nodes = nodes(root.path(), 16);
        fs::create_dir_all(root.path().join("a/b")).expect("directories");
        fs::write(root.path().join("a/b/c"), "x").expect("write");
        let b = {
            let a = enter(&nodes, ROOT, "a");
            enter(&nodes, a, "b")
        };
        let c = enter(&nodes, b, "c");
        fs::rename(root.path().join("a/b"), root.path().join("moved")).expect("rename");
        nodes.renamed(ROOT, c"moved", nodes.root());
        nodes.file(c).expect("below the moved one");
        fs::create_dir(root.path().join("elsewhere")).expect("directory");
        fs::rename(root.path().join("moved"), root.path().join("elsewhere/moved")).expect("rename");
        // By somebody else, and unknown to us: found again as long as it is open, or told.
        let told = nodes.file(c).map(drop).map_err(|error| error.raw_os_error());
        assert!(matches!(told, Ok(()) | Err(Some(libc::ESTALE))), "{told:?}");
    }

    #[test]
    fn a_directory_that_others_moved_below_its_own_child_makes_no_circle() {
        let root = tempfile::tempdir().expect("directory");
        let nodes = nodes(root.path(), 16);
        fs::create_dir_all(root.path().join("d/e")).expect("directories");
        let d = enter(&nodes, ROOT, "d");
        let e = enter(&nodes, d, "e");
        nodes.file(e).expect("open");
        fs::rename(root.path().join("d/e"), root.path().join("e")).expect("rename");
        fs::rename(root.path().join("d"), root.path().join("e/d")).expect("rename");
        // By the open descriptor of the one, the other is found where it is now.
        assert_eq!(enter(&nodes, e, "d"), d);
        nodes.file(d).expect("through the open one");
        for n in 0..100 {
            fs::write(root.path().join(format!("f{n}")), "").expect("write");
            nodes.file(enter(&nodes, ROOT, &format!("f{n}"))).expect("file");
        }
        // Closed meanwhile: where it went nobody has said, and whoever asks again is told.
        for lost in [d, e] {
            assert_eq!(nodes.file(lost).expect_err("found").raw_os_error(), Some(libc::ESTALE));
        }
        assert_eq!(enter(&nodes, ROOT, "e"), e);
        nodes.file(d).expect("below the one that was found again");
        nodes.forget(d, 2);
        nodes.forget(e, 2);
        assert_eq!(nodes.file(e).expect_err("forgotten").raw_os_error(), Some(libc::ESTALE));
    }

    #[test]
    fn what_lost_its_name_takes_no_room_beyond_what_there_is() {
        let root = tempfile::tempdir().expect("directory");
        let nodes = nodes(root.path(), 16);
        let ids: Vec<u64> = (0..200)
            .map(|n| {
                let name = name(&format!("f{n}"));
                fs::write(root.path().join(format!("f{n}")), "").expect("write");
                let id = enter(&nodes, ROOT, &format!("f{n}"));
                if n % 2 == 0 {
                    let held = nodes.before_loss(nodes.root(), ROOT, &name).expect("known");
                    fs::remove_file(root.path().join(format!("f{n}"))).expect("remove");
                    nodes.lost(held);
                }
                nodes.file(id).map(drop).unwrap_or_default();
                assert!(nodes.count().1 <= 17, "{} descriptors are open", nodes.count().1);
                id
            })
            .collect();
        for (n, id) in ids.iter().enumerate() {
            match n % 2 == 1 || n < 16 {
                true => drop(nodes.file(*id).expect("by its name, or held")),
                false if n < 150 => drop(nodes.file(*id).expect_err("more are held than there is room for")),
                false => {}
            }
        }
    }

    #[test]
    fn a_name_that_comes_and_goes_takes_no_memory() {
        let root = tempfile::tempdir().expect("directory");
        let nodes = nodes(root.path(), 16);
        fs::write(root.path().join("a"), "").expect("write");
        let id = enter(&nodes, ROOT, "a");
        for _ in 0..1000 {
            fs::hard_link(root.path().join("a"), root.path().join("b")).expect("link");
            let held = nodes.before_loss(nodes.root(), ROOT, c"a").expect("known");
            fs::remove_file(root.path().join("a")).expect("remove");
            nodes.lost(held);
            fs::rename(root.path().join("b"), root.path().join("a")).expect("rename");
            assert_eq!(enter(&nodes, ROOT, "a"), id);
        }
        assert!(nodes.table().clock.len() <= 2, "the hand passes one file {} times", nodes.table().clock.len());
    }

    #[test]
    fn more_nodes_than_there_may_be_are_refused_until_some_are_forgotten() {
        let root = tempfile::tempdir().expect("directory");
        let nodes = Nodes::new(fs::File::open(root.path()).expect("root").into(), 16, 11).expect("nodes");
        let found = |n: u32| {
            let name = name(&format!("f{n}"));
            fs::write(root.path().join(format!("f{n}")), "").expect("write");
            nodes.found(ROOT, &name, &look_at(nodes.root(), &name).expect("look"))
        };
        let ids: Vec<u64> = (0..10).map(|n| found(n).expect("room")).collect();
        assert_eq!(found(10).expect_err("one more").raw_os_error(), Some(libc::ENFILE));
        assert_eq!(found(3).expect("known already"), ids[3]);
        nodes.forget(ids[0], 1);
        found(10).expect("room again");
    }

    #[test]
    fn names_that_are_paths_are_refused() {
        for bad in ["", ".", "..", "a/b", "/", "../x", &"n".repeat(256)] {
            assert!(plain(&name(bad)).is_err(), "{bad:?} was taken");
        }
        for good in ["a", "...", "..a", "\u{e9}", " ", "a\nb", &"n".repeat(255)] {
            plain(&name(good)).expect(good);
        }
    }
}
