//! Hierarchies of plain files: what is written where, and what is read.

use super::*;

const LIMITS: Limits = Limits { memory_bytes: 300 << 20, cpu_us: 200_000, pids: 100, weight_cpus: 2 };

/// A tree of plain files that looks like a cgroup file system where this module looks.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new(files: &[(&str, &str)]) -> Self {
        let root = tempfile::tempdir().expect("directory");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            fs::write(path, text).expect("file");
        }
        Tree(root)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).expect("read")
    }

    fn v1(&self) -> Hierarchies {
        let mounts: String = ["cpu,cpuacct", "memory", "pids", "freezer", "devices", "name=systemd"]
            .iter()
            .map(|names| format!("30 20 0:1 / {} rw - cgroup cgroup rw,{names}\n", self.path(names).display()))
            .collect();
        Hierarchies::from_mounts(&mounts, None).expect("v1")
    }

    fn v2(&self) -> Result<Hierarchies, Error> {
        Hierarchies::from_mounts(
            &format!("30 20 0:1 / {} rw - cgroup2 cgroup2 rw\n", self.path("").display()),
            Some("/"),
        )
    }
}

fn v1_files(leaf: &str) -> Vec<(String, &'static str)> {
    [
        ("cpu,cpuacct", "cpu.cfs_period_us", "100000"),
        ("cpu,cpuacct", "cpu.cfs_quota_us", "-1"),
        ("cpu,cpuacct", "cpu.shares", "1024"),
        ("cpu,cpuacct", "cpuacct.usage", "12345\n"),
        ("memory", "memory.limit_in_bytes", "9223372036854771712"),
        ("memory", "memory.swappiness", "60"),
        ("memory", "memory.usage_in_bytes", "4096\n"),
        ("memory", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        ("pids", "pids.max", "max"),
        ("pids", "pids.current", "7\n"),
        ("freezer", "freezer.state", "THAWED"),
        ("cpu,cpuacct", "tasks", ""),
        ("memory", "tasks", ""),
        ("pids", "tasks", ""),
        ("freezer", "tasks", ""),
    ]
    .into_iter()
    .map(|(mount, file, text)| (format!("{mount}/{leaf}/{file}"), text))
    .collect()
}

fn borrowed<'a>(files: &'a [(String, &'static str)]) -> Vec<(&'a str, &'a str)> {
    files.iter().map(|(path, text)| (path.as_str(), *text)).collect()
}

#[test]
fn v1_limits_are_written_in_each_hierarchy() {
    let files = v1_files("one");
    let tree = Tree::new(&borrowed(&files));
    let all = tree.v1();
    let leaf = all.leaf("one");
    leaf.create(&LIMITS).expect("create");
    // Plain files are not cut when written to: what follows the number was there before.
    assert!(tree.text("memory/one/memory.limit_in_bytes").starts_with(&(300u64 << 20).to_string()));
    assert!(tree.text("cpu,cpuacct/one/cpu.cfs_quota_us").starts_with("200000"));
    assert!(tree.text("pids/one/pids.max").starts_with("100"));
    assert!(tree.text("cpu,cpuacct/one/cpu.shares").starts_with("2048"));
    assert_eq!(leaf.held().expect("held").cpu_us, 200_000);
    assert!(tree.text("memory/one/memory.swappiness").starts_with('0'));
    assert!(!tree.path("devices/one").exists() && !tree.path("name=systemd/one").exists());
    // Nobody is born in it: whoever is to be joins each hierarchy.
    assert!(leaf.birthplace().expect("none").is_none());
    assert_eq!(leaf.doors().expect("doors").len(), leaf.hierarchies());
}

#[test]
fn v1_usage_is_read() {
    let files = v1_files("one");
    let tree = Tree::new(&borrowed(&files));
    let usage = tree.v1().leaf("one").usage().expect("usage");
    assert_eq!((usage.cpu_ns, usage.memory_bytes, usage.pids, usage.oom_kills), (12_345, 4096, 7, 3));
    assert!(tree.v1().leaf("absent").usage().is_err());
}

#[test]
fn v2_limits_and_usage() {
    let tree = Tree::new(&[
        ("cgroup.controllers", "cpuset cpu io memory pids"),
        ("cgroup.subtree_control", ""),
        ("cgroup.procs", ""),
        ("one/cpu.max", ""),
        ("one/cpu.weight", ""),
        ("one/cpu.stat", "usage_usec 5\nuser_usec 1\n"),
        ("one/memory.max", ""),
        ("one/memory.swap.max", ""),
        ("one/memory.current", "99"),
        ("one/memory.events", "low 0\noom 2\noom_kill 1\n"),
        ("one/pids.max", ""),
        ("one/pids.current", "2"),
    ]);
    let all = tree.v2().expect("v2");
    all.ready().expect("ready");
    assert_eq!(tree.text("cgroup.subtree_control"), "+cpu +memory +pids +io");
    let leaf = all.leaf("one");
    leaf.create(&LIMITS).expect("create");
    assert_eq!(tree.text("one/cpu.max"), "200000 100000");
    // Whoever is born in it has nothing left to join.
    assert!(leaf.birthplace().expect("a directory").is_some() && leaf.doors().expect("none").is_empty());
    let held = leaf.held().expect("held");
    let wanted = Held { memory_bytes: 300 << 20, swap: true, cpu_us: 200_000, weight: 200, pids: 100 };
    assert_eq!(held, wanted);
    assert!(matches!(leaf.limit_io(&tree.path(""), Io { bytes: 1, operations: 1 }), IoLayer::Absent(_)));
    assert_eq!(tree.text("one/memory.max"), (300u64 << 20).to_string());
    assert_eq!(tree.text("one/memory.swap.max"), "0");
    let usage = leaf.usage().expect("usage");
    assert_eq!((usage.cpu_ns, usage.memory_bytes, usage.pids, usage.oom_kills), (5000, 99, 2, 1));
}

#[test]
fn what_systemd_delegates_is_where_leaves_go() {
    let unit = "system.slice/pepo.service";
    let tree = Tree::new(&[
        ("cgroup.controllers", "cpu memory pids"),
        (&format!("{unit}/cgroup.controllers"), "cpu memory pids"),
        (&format!("{unit}/cgroup.subtree_control"), "cpu"),
        (&format!("{unit}/{OWN_LEAF}/cgroup.procs"), ""),
        (&format!("{unit}/{OWN_LEAF}/cpu.weight"), ""),
        (&format!("{unit}/{OWN_LEAF}/memory.min"), ""),
    ]);
    let mounts = format!("30 20 0:1 / {} rw - cgroup2 cgroup2 rw\n", tree.path("").display());
    let base = |own: &str| Hierarchies::from_mounts(&mounts, Some(own)).expect("v2").0[0].base.clone();
    let ours = format!("/{unit}/{OWN_LEAF}");
    assert_eq!(base(&ours), tree.path(""), "taken without being given");
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(tree.path(unit), "user.delegate", b"1", flags)
        .expect("user attributes in the temporary directory");
    assert_eq!(base(&ours), tree.path(unit));
    assert_eq!(base(&format!("/{unit}")), tree.path(""), "a unit that could not be started again");
    let all = Hierarchies::from_mounts(&mounts, Some(&ours)).expect("v2");
    all.ready().expect("ready");
    assert_eq!(tree.text(&format!("{unit}/cgroup.subtree_control")), "+memory +pids");
    let reserved = |file: &str| tree.text(&format!("{unit}/{OWN_LEAF}/{file}"));
    assert_eq!((reserved("cpu.weight"), reserved("memory.min")), ("10000".to_owned(), (256 << 20).to_string()));
}

#[test]
fn an_empty_v2_tree_is_not_enough_and_joins_a_hybrid() {
    let tree = Tree::new(&[("cgroup.controllers", "")]);
    assert!(matches!(tree.v2(), Err(Error::Absent(what)) if what == "cpu, memory, pids"));
    let files = v1_files("one");
    let mut files = borrowed(&files);
    files.push(("unified/cgroup.controllers", ""));
    let tree = Tree::new(&files);
    let mut all = tree.v1();
    let v2 = format!("30 20 0:1 / {} rw - cgroup2 cgroup2 rw\n", tree.path("unified").display());
    assert!(Hierarchies::from_mounts(&v2, None).is_err());
    all.0.push(Hierarchy { base: tree.path("unified"), version: Version::V2 { controllers: Vec::new() } });
    assert_eq!(all.describe(), "cgroup v1 and v2 (hybrid)");
    all.leaf("two").remove(Duration::ZERO).expect("absent is removed");
    all.leaf("two").kill(Duration::ZERO).expect("absent is empty");
}

#[test]
fn leaves_are_found_by_tag() {
    let (tag, other): (Tag, Tag) = ("abcd".parse().expect("tag"), "abce".parse().expect("tag"));
    let id = SandboxId::new(crate::id::Slot::new(4).expect("slot"));
    let name = Names { tag, id }.cgroup();
    let files = v1_files(&name);
    let tree = Tree::new(&borrowed(&files));
    assert_eq!(tree.v1().tagged(tag), [id]);
    assert!(tree.v1().tagged(other).is_empty());
}

#[test]
fn membership_wants_every_hierarchy() {
    let lines = |paths: &[&str]| paths.iter().map(|path| (1, String::new(), (*path).to_owned())).collect::<Vec<_>>();
    assert!(is_member(&lines(&["/x/one", "/one", "/"]), "one", 2));
    assert!(!is_member(&lines(&["/x/one", "/"]), "one", 2));
    assert!(!is_member(&lines(&["/one/below", "/one-not"]), "one", 1));
}
