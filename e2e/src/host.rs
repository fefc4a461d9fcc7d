//! The host as a witness sees it: what could be left behind, found without asking Pepo.
//!
//! Other things happen on a machine meanwhile, other instances of Pepo among them. So a snapshot takes what could be ours
//! (by name, by uid range, by place), with the instance it belongs to where that can be told, and the comparison counts
//! what is new and nobody else's.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Uids that only Sandboxes have.
pub const SANDBOX_UIDS: std::ops::RangeInclusive<u32> = 0x7000_0000..=0x7FFD_FFFF;
/// What there is: a thing, and whose it is where that can be told.
#[derive(Debug, Default)]
pub struct Snapshot {
    things: BTreeMap<String, Option<Owner>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Owner {
    /// An instance, by its home.
    Home(PathBuf),
    /// An instance, by its tag.
    Tag(String),
    /// A test, by its process: what it built around the instance.
    Test(u32),
}

impl Snapshot {
    /// Looks at the host.
    pub fn take() -> Self {
        let mut things = BTreeMap::new();
        processes(&mut things);
        cgroups(&mut things);
        mounts(&mut things);
        for (place, what) in
            [("/sys/class/net", "interface"), ("/run/netns", "namespace"), ("/run/pepo/instances", "lease")]
        {
            for entry in fs::read_dir(place).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let owner = match what {
                    "lease" => Some(Owner::Tag(name.clone())),
                    "namespace" => owner_of_namespace(&name),
                    _ => {
                        let tag = name.strip_prefix("pp").filter(|rest| rest.len() == 8).and_then(|rest| rest.get(..4));
                        tag.map(|tag| Owner::Tag(tag.to_owned()))
                    }
                };
                things.insert(format!("{what} {name}"), owner);
            }
        }
        for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
            if let Ok(file) = fs::read_to_string(entry.path().join("loop/backing_file")) {
                things.insert(
                    format!("loop device {} on {}", entry.file_name().to_string_lossy(), file.trim()),
                    home_in(&file),
                );
            }
        }
        Snapshot { things }
    }

    /// What is here and was not there before, of this instance or of nobody.
    pub fn since(&self, before: &Snapshot, home: &Path, tags: &[String]) -> Vec<String> {
        let ours = |owner: &Option<Owner>| match owner {
            None => true,
            Some(Owner::Home(path)) => path == home,
            Some(Owner::Tag(tag)) => tags.contains(tag),
            // One that is gone cannot take its things away any more.
            Some(Owner::Test(pid)) => *pid == std::process::id() || !Path::new(&format!("/proc/{pid}")).exists(),
        };
        let is_new = |thing: &String| !before.things.contains_key(thing);
        self.things
            .iter()
            .filter(|(thing, owner)| is_new(thing) && ours(owner))
            .map(|(thing, _)| thing.clone())
            .collect()
    }
}

/// Whose a network namespace is stands in its name: a Sandbox's, or a test's `World`.
fn owner_of_namespace(name: &str) -> Option<Owner> {
    let of_a_test = || name.strip_prefix("e2e-")?.split_once('-')?.0.parse().ok().map(Owner::Test);
    tag_in(name).or_else(of_a_test)
}

/// The instance in whose home a path is, by the layout that `PEPO_HOME` makes.
fn home_in(path: &str) -> Option<Owner> {
    let at = path.find("/state/").or_else(|| path.find("/run/"))?;
    let start = path[..at].rfind([' ', '=', ':']).map_or(0, |i| i + 1);
    (at > start).then(|| Owner::Home(PathBuf::from(&path[start..at])))
}

fn processes(things: &mut BTreeMap<String, Option<Owner>>) {
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        let status = read("status");
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned();
        let (comm, state) = (field("Name:"), field("State:"));
        let uid: u32 = field("Uid:").split_whitespace().next().and_then(|uid| uid.parse().ok()).unwrap_or(0);
        if state.starts_with('Z') || status.is_empty() {
            continue;
        }
        // Foreign programs run for Pepo as a Sandbox's uid, or not at all; the rest are the programs under test.
        if !SANDBOX_UIDS.contains(&uid) && !under_test(&entry.path()) {
            continue;
        }
        // Start time: the same pid later is another process.
        let stat = read("stat");
        let start = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(19)).unwrap_or_default().to_owned();
        let owner = owner_by_cgroup(&read("cgroup")).or_else(|| owner_by_environment(&entry.path()));
        things.insert(format!("process {pid} `{comm}` uid {uid} started {start}"), owner);
    }
}

/// Whether it is one of the programs that `make test` staged, replaced meanwhile or not.
fn under_test(process: &Path) -> bool {
    let stage = std::env::var_os("PEPO_E2E_BIN").map(PathBuf::from);
    stage.is_some_and(|stage| fs::read_link(process.join("exe")).is_ok_and(|program| program.starts_with(stage)))
}

fn owner_by_cgroup(text: &str) -> Option<Owner> {
    text.lines().flat_map(|line| line.split('/')).find_map(tag_in)
}

/// The tag in a name like `pepo-ab12-…`.
fn tag_in(name: &str) -> Option<Owner> {
    let (tag, _) = name.strip_prefix("pepo-")?.split_once('-')?;
    (tag.len() == 4).then(|| Owner::Tag(tag.into()))
}

fn owner_by_environment(process: &Path) -> Option<Owner> {
    let environment = fs::read(process.join("environ")).ok()?;
    let home = environment.split(|b| *b == 0).find_map(|pair| pair.strip_prefix(b"PEPO_HOME="))?;
    Some(Owner::Home(PathBuf::from(String::from_utf8_lossy(home).into_owned())))
}

fn cgroups(things: &mut BTreeMap<String, Option<Owner>>) {
    let mut pending = vec![(PathBuf::from("/sys/fs/cgroup"), 0)];
    while let Some((directory, depth)) = pending.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.contains("pepo") {
                things.insert(format!("cgroup {}", entry.path().display()), tag_in(&name));
            }
            if depth < 6 {
                pending.push((entry.path(), depth + 1));
            }
        }
    }
}

fn mounts(things: &mut BTreeMap<String, Option<Owner>>) {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for line in table.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let (Some(place), Some(dash)) = (fields.get(4), fields.iter().position(|field| *field == "-")) else {
            continue;
        };
        let kind_and_source = fields.get(dash + 1..=dash + 2).unwrap_or_default().join(" ");
        // What holds everybody's named namespaces: `ip` makes it once, and it stays.
        if *place == "/run/netns" {
            continue;
        }
        let owner = place.strip_prefix("/run/netns/").map_or_else(|| home_in(place), owner_of_namespace);
        things.insert(format!("mount {place} ({kind_and_source})"), owner);
    }
}

/// Processes of that name (as `/proc/PID/comm` shows it; any, where it is empty) whose cgroup names this tag, or whose
/// environment names this home.
pub fn pids_named(comm: &str, home: &Path, tag: &str) -> Vec<i32> {
    let mut found = vec![];
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        if !comm.is_empty() && read("comm").trim_end() != comm {
            continue;
        }
        let owner = owner_by_cgroup(&read("cgroup")).or_else(|| owner_by_environment(&entry.path()));
        if owner.is_some_and(|owner| owner == Owner::Tag(tag.into()) || owner == Owner::Home(home.into())) {
            found.push(pid);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_told_from_names_and_paths() {
        assert_eq!(owner_by_cgroup("5:memory:/a/pepo-ab12-0123\n"), Some(Owner::Tag("ab12".into())));
        assert_eq!(owner_by_cgroup("5:memory:/user.slice\n"), None);
        assert_eq!(home_in("/var/lib/x/state/jail/y"), Some(Owner::Home("/var/lib/x".into())));
        assert_eq!(home_in("/var/lib"), None);
        assert_eq!(owner_of_namespace("pepo-ab12-0123"), Some(Owner::Tag("ab12".into())));
        assert_eq!(owner_of_namespace("e2e-4711-0badh"), Some(Owner::Test(4711)));
        assert_eq!(owner_of_namespace("e2e-x-0badh"), None);
    }

    #[test]
    fn what_is_new_and_nobodys_counts() {
        let thing = |name: &str, owner| (name.to_owned(), owner);
        let before = Snapshot { things: [thing("a", None)].into() };
        let other = Some(Owner::Tag("zzzz".into()));
        let ours = Some(Owner::Tag("ab12".into()));
        let after =
            Snapshot { things: [thing("a", None), thing("b", None), thing("c", other), thing("d", ours)].into() };
        assert_eq!(after.since(&before, Path::new("/h"), &["ab12".into()]), ["b", "d"]);
        // Another test that runs has its own; one that is gone has left something.
        let test = |pid| Snapshot { things: [thing("n", Some(Owner::Test(pid)))].into() };
        assert!(test(std::os::unix::process::parent_id()).since(&before, Path::new("/h"), &[]).is_empty());
        assert_eq!(test(u32::MAX).since(&before, Path::new("/h"), &[]), ["n"]);
    }
}
