//! Builders on a real host, as root: what they see and may do, what is taken over from them, and that nothing stays of one
//! however it ends.
//!
//! This program is its own pepod: started as `build outer` or `build inner` it enters the builder's room and then plays the
//! foreign program that its input names. What is left is read from `/proc`, the cgroup file systems and the directories.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use pepo_sandbox::StatePath;
use pepo_sandbox::builder::{BuildPlan, Builder, Inside, Place, Room, enter, left_by};
use pepo_sandbox::id::UidBlock;

/// Given out to no instance: the machine's registry counts from the lower end.
const BLOCK: UidBlock = UidBlock { index: 0, first: 0x7fe0_0000 };
const OWNER: u32 = 65_534;
const GROUP: u32 = 65_533;
/// Ten times what a loaded machine was seen to need.
const PATIENCE: Duration = Duration::from_secs(30);

const ALL: [(&str, fn()); 7] = [
    ("sees_the_hosts_programs_and_nothing_else", sees_the_hosts_programs_and_nothing_else),
    ("is_nobody_on_the_host", is_nobody_on_the_host),
    ("what_it_makes_is_taken_over", what_it_makes_is_taken_over),
    ("what_is_no_plain_file_is_refused", what_is_no_plain_file_is_refused),
    ("cannot_fill_more_than_its_room", cannot_fill_more_than_its_room),
    ("a_kill_leaves_nothing", a_kill_leaves_nothing),
    ("goes_with_the_one_who_started_it", goes_with_the_one_who_started_it),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match &words[..] {
        ["build", rest @ ..] => {
            let rest: Vec<String> = rest.iter().map(|&word| word.to_owned()).collect();
            match enter(&rest) {
                Ok(inside) => play(&inside),
                Err(code) => code,
            }
        }
        ["life", home, tag] => {
            let mut builder = Builder::start(place(Path::new(home), tag), plan(Room::Memory)).expect("start");
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
            builder.kill();
            ExitCode::SUCCESS
        }
        rest if rest.contains(&"--list") => {
            let left_out = std::env::var_os("PEPO_E2E").is_some_and(|value| value.is_empty());
            if !rest.contains(&"--ignored") && !left_out {
                ALL.iter().for_each(|(name, _)| println!("{name}: test"));
            }
            ExitCode::SUCCESS
        }
        rest => {
            let wanted: Vec<_> = rest.iter().filter(|word| !word.starts_with('-')).collect();
            let mut failed = 0;
            for (name, test) in ALL {
                if !wanted.is_empty() && !wanted.iter().any(|want| name.contains(**want)) {
                    continue;
                }
                println!("test {name} ...");
                let ok = std::panic::catch_unwind(test).is_ok();
                println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
                failed += u8::from(!ok);
            }
            ExitCode::from(failed)
        }
    }
}

/// The foreign program.
fn play(inside: &Inside) -> ExitCode {
    let out = &inside.output;
    let input = fs::read_to_string(&inside.input).unwrap();
    match input.as_str() {
        "look" => fs::write(out.join("report"), look(inside)).unwrap(),
        "make" => {
            fs::write(out.join("report"), "made").unwrap();
            fs::create_dir(out.join("directory")).unwrap();
            fs::write(out.join("directory/more"), "x").unwrap();
            fs::write(out.join("other"), "x").unwrap();
        }
        "link" => symlink("/etc/hostname", out.join("report")).unwrap(),
        "pipe" => {
            let mode = rustix::fs::Mode::from_raw_mode(0o644);
            rustix::fs::mknodat(rustix::fs::CWD, out.join("report"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        }
        "twice" => {
            fs::write(out.join("report"), "x").unwrap();
            fs::hard_link(out.join("report"), out.join("again")).unwrap();
        }
        "nothing" => {}
        "fill" => {
            let mut file = fs::File::create(inside.room.join("big")).unwrap();
            let block = vec![1_u8; 1 << 20];
            let mut written = 0;
            let error = loop {
                match file.write_all(&block) {
                    Ok(()) => written += 1,
                    Err(error) => break error,
                }
            };
            fs::write(out.join("report"), format!("{written} {:?}", error.kind())).unwrap();
        }
        "stay" => {
            // One that nobody waits for, in a session of its own.
            let script = "setsid sleep 1000 & setsid sh -c 'trap \"\" TERM HUP; sleep 1000; sleep 1000' & wait";
            Command::new("sh").args(["-c", script]).status().unwrap();
        }
        other => panic!("input {other:?}"),
    }
    ExitCode::SUCCESS
}

/// What a foreign program can find out and do, one line each.
fn look(inside: &Inside) -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let processes = processes.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok()).count();
    let mut lines = vec![
        field("NoNewPrivs"),
        field("CapEff"),
        format!(
            "uids {}",
            fs::read_to_string("/proc/self/uid_map").unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
        ),
        format!("pid {}", std::process::id()),
        format!("processes {processes}"),
        format!("old root {}", Path::new("/proc/1/root/root/.bashrc").exists()),
    ];
    for path in ["/root", "/home", "/var/lib", "/run", "/sys", "/boot", "/opt"] {
        let seen = fs::read_dir(path).map_or(0, Iterator::count);
        lines.push(format!("{path} {seen}"));
    }
    for path in ["/usr/x", "/etc/x", "/x", "/dev/x"] {
        lines.push(format!("write {path} {}", fs::write(path, "x").is_ok()));
    }
    let disk = rustix::fs::makedev(7, 0);
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let node = inside.room.join("loop0");
    let made = rustix::fs::mknodat(rustix::fs::CWD, &node, rustix::fs::FileType::BlockDevice, mode, disk);
    lines.push(format!("disk {}", made.is_ok()));
    lines.push(format!("shadow {}", fs::read("/etc/shadow").is_ok()));
    let remount = rustix::mount::mount_remount("/usr", rustix::mount::MountFlags::BIND, "");
    lines.push(format!("remount {}", remount.is_ok()));
    lines.push(format!("unmount {}", rustix::mount::unmount("/etc", rustix::mount::UnmountFlags::DETACH).is_ok()));
    // What it is there for: owning files as any of its users, in its room.
    let file = inside.room.join("file");
    fs::write(&file, "x").unwrap();
    lines.push(format!("chown {}", std::os::unix::fs::chown(&file, Some(1000), Some(1000)).is_ok()));
    lines.push(format!("outside {}", std::os::unix::fs::chown(&file, Some(70_000), None).is_ok()));
    lines.join("\n")
}

struct Here {
    home: tempfile::TempDir,
    tag: String,
}

impl Here {
    fn new(input: &str) -> Self {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let home = tempfile::tempdir().unwrap();
        // Four characters that no other test of this run has.
        let tag: String =
            home.path().file_name().unwrap().to_string_lossy().to_lowercase().chars().skip(4).take(4).collect();
        fs::create_dir(home.path().join("jail")).unwrap();
        std::os::unix::fs::chown(home.path(), Some(OWNER), Some(GROUP)).unwrap();
        // Closed to everybody but one: a builder needs no way through the directories above it.
        fs::set_permissions(home.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        fs::write(home.path().join("input"), input).unwrap();
        std::os::unix::fs::chown(home.path().join("input"), Some(OWNER), Some(OWNER)).unwrap();
        Here { home, tag }
    }

    fn place(&self) -> Place {
        place(self.home.path(), &self.tag)
    }

    fn start(&self) -> Builder {
        Builder::start(self.place(), plan(Room::Memory)).expect("start")
    }

    fn report(&self) -> String {
        fs::read_to_string(self.home.path().join("out/report")).unwrap()
    }

    /// Directories of the builder's cgroup.
    fn cgroups(&self) -> Vec<PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let roots = mounts.lines().filter(|line| line.contains(" - cgroup")).filter_map(|line| line.split(' ').nth(4));
        let wanted = format!("pepo-{}-build", self.tag);
        roots.flat_map(|root| find(Path::new(root), &wanted, 3)).collect()
    }

    fn processes(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = self
            .cgroups()
            .iter()
            .flat_map(|path| fs::read_to_string(path.join("cgroup.procs")))
            .flat_map(|text| text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<u32>>())
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    fn assert_clean(&self) {
        assert_eq!(self.cgroups(), Vec::<PathBuf>::new(), "a cgroup is left");
        assert_eq!(fs::read_dir(self.home.path().join("jail")).unwrap().count(), 0, "a directory is left");
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(self.home.path().to_str().unwrap()), "a mount is left");
    }
}

fn find(at: &Path, name: &str, depth: u32) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(at).into_iter().flatten().flatten() {
        if entry.file_name() == name {
            found.push(entry.path());
        } else if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(find(&entry.path(), name, depth - 1));
        }
    }
    found
}

fn place(home: &Path, tag: &str) -> Place {
    let launcher = std::env::current_exe().unwrap();
    Place {
        jails: home.join("jail"),
        state: home.to_owned(),
        tag: tag.parse().unwrap(),
        block: BLOCK,
        owner: OWNER,
        launcher,
    }
}

fn plan(room: Room) -> BuildPlan {
    BuildPlan {
        input: StatePath::new("input").unwrap(),
        output: StatePath::new("out").unwrap(),
        files: vec!["report".to_owned()],
        room,
        room_bytes: 64 << 20,
        memory_bytes: 512 << 20,
        cpus: 2,
        env: Vec::new(),
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn sees_the_hosts_programs_and_nothing_else() {
    for room in [Room::Memory, Room::Disk] {
        let here = Here::new("look");
        let builder = Builder::start(here.place(), plan(room)).expect("start");
        assert!(builder.end().expect("end").success());
        let report = here.report();
        let has = |line: &str| assert!(report.lines().any(|one| one == line), "no {line:?} in\n{report}");
        has("NoNewPrivs:\t1");
        has(&format!("uids 0 {} 65536", BLOCK.builder()));
        has("pid 1");
        has("processes 1");
        has("old root false");
        for hidden in ["/root", "/home", "/var/lib", "/run", "/sys", "/boot", "/opt"] {
            // A resolver's copy may lie below /run.
            if hidden != "/run" {
                has(&format!("{hidden} 0"));
            }
        }
        for path in ["/usr/x", "/etc/x", "/x", "/dev/x"] {
            has(&format!("write {path} false"));
        }
        for denied in ["disk", "shadow", "remount", "unmount", "outside"] {
            has(&format!("{denied} false"));
        }
        has("chown true");
        here.assert_clean();
    }
}

fn is_nobody_on_the_host() {
    let here = Here::new("stay");
    let builder = here.start();
    // Outer and inner, the shell, both sleepers and one's shell.
    until("six processes", || here.processes().len() >= 6);
    for pid in here.processes() {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
        let uids: Vec<u32> = field("Uid:").split_whitespace().map(|uid| uid.parse().unwrap()).collect();
        let first = BLOCK.builder();
        assert!(uids.iter().all(|uid| (first..first + 65_536).contains(uid)), "{uids:?}");
        let gids: Vec<u32> = field("Gid:").split_whitespace().map(|gid| gid.parse().unwrap()).collect();
        assert!(gids.iter().all(|gid| (first..first + 65_536).contains(gid)), "{gids:?}");
        assert_eq!(field("Groups:"), "");
        let ours = fs::read_link("/proc/self/ns/user").unwrap();
        assert_ne!(fs::read_link(format!("/proc/{pid}/ns/user")).unwrap(), ours);
    }
    drop(builder);
    here.assert_clean();
}

fn what_it_makes_is_taken_over() {
    let here = Here::new("make");
    assert!(here.start().end().expect("end").success());
    let report = fs::metadata(here.home.path().join("out/report")).unwrap();
    assert_eq!((report.uid(), report.gid(), report.mode() & 0o7777), (OWNER, GROUP, 0o444));
    let out = fs::metadata(here.home.path().join("out")).unwrap();
    assert_eq!((out.uid(), out.mode() & 0o7777), (OWNER, 0o755));
    assert_eq!(fs::read_dir(here.home.path().join("out")).unwrap().count(), 1, "more than was asked for came over");
    here.assert_clean();
}

fn what_is_no_plain_file_is_refused() {
    for input in ["link", "pipe", "nothing"] {
        let here = Here::new(input);
        let error = here.start().end().expect_err(input);
        assert!(error.to_string().contains("report"), "{input}: {error}");
        assert!(!here.home.path().join("out").exists(), "{input}: it came over");
        here.assert_clean();
    }
    // The other name is thrown away before it is looked at.
    let here = Here::new("twice");
    here.start().end().expect("one name is left");
    here.assert_clean();
}

fn cannot_fill_more_than_its_room() {
    let here = Here::new("fill");
    assert!(here.start().end().expect("end").success());
    let report = here.report();
    let (written, error) = report.split_once(' ').unwrap();
    let written: u64 = written.parse().unwrap();
    assert!((50..=64).contains(&written), "{report}");
    assert_eq!(error, "StorageFull");
    here.assert_clean();
}

fn a_kill_leaves_nothing() {
    let here = Here::new("stay");
    let mut builder = here.start();
    until("six processes", || here.processes().len() >= 6);
    let pids = here.processes();
    assert!(matches!(Builder::start(here.place(), plan(Room::Memory)), Err(pepo_sandbox::builder::Error::Busy)));
    builder.kill();
    assert!(!builder.end().expect("end").success());
    for pid in pids {
        assert!(!Path::new(&format!("/proc/{pid}/root")).exists(), "process {pid} is left");
    }
    here.assert_clean();
}

fn goes_with_the_one_who_started_it() {
    let here = Here::new("stay");
    let mut life = Command::new(std::env::current_exe().unwrap())
        .arg("life")
        .arg(here.home.path())
        .arg(&here.tag)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    until("six processes", || here.processes().len() >= 6);
    life.kill().unwrap();
    life.wait().unwrap();
    until("an empty cgroup", || here.processes().is_empty());
    // What remains are directories, which the next start removes.
    let place = here.place();
    assert_eq!(left_by(&place.jails, place.tag).len(), 2);
    Builder::sweep(&place).expect("sweep");
    assert!(left_by(&place.jails, place.tag).is_empty());
    here.assert_clean();
}
