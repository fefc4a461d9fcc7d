//! What goes wrong around a daemon: many clients, two instances, wrong names, no rights, no room, and the wrong moment to die.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use pepo_e2e::{Instance, Options, bin, images, until};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn ten_runs_at_once_without_a_daemon() {
    let instance = Instance::new();
    let all: Vec<_> = (0..10)
        .map(|n| instance.pepo_run(["sh", "-c", &format!("echo number {n}")]).within(Duration::from_secs(300)).start())
        .collect();
    for (n, running) in all.into_iter().enumerate() {
        let ran = running.wait();
        assert_eq!((ran.code(), ran.out()), (Some(0), format!("number {n}\n")), "{ran}");
        println!("run {n}: {:?}", ran.took);
    }
    assert_eq!(instance.pids("pepod").len(), 1);
    instance.end();
}

#[test]
fn two_instances_do_not_see_each_other() {
    let (one, two) = (Instance::new(), Instance::new());
    let (up_one, up_two) = (one.up(), two.up());
    let url = |instance: &Instance| fs::read_to_string(instance.home().join("run/url")).expect("the url");
    assert_ne!(url(&one), url(&two));
    let session = one.pepo(["session", "create", "-q", "--workspace", "none"]).ok().out().trim().to_owned();
    one.pepo(["exec", &session, "--", "true"]).ok();
    // Neither its records nor its leftovers are the other's.
    assert_eq!(two.pepo(["session", "ls", "--json"]).ok().out().matches(&session).count(), 0);
    two.pepo(["sweep"]).ok();
    assert_eq!(one.pepo(["exec", &session, "--", "echo", "alive"]).ok().out(), "alive\n");
    two.pepo(["down"]).ok();
    up_two.wait();
    assert_eq!(one.pepo(["exec", &session, "--", "echo", "alive"]).ok().out(), "alive\n");
    one.pepo(["session", "rm", &session]).ok();
    one.pepo(["down"]).ok();
    up_one.wait();
    two.end();
    one.end();
}

#[test]
fn a_second_up_says_who_runs_it() {
    let instance = Instance::new();
    let up = instance.up();
    let second = instance.pepo(["up"]).within(Duration::from_secs(30)).run();
    assert_ne!(second.code(), Some(0), "{second}");
    let err = second.err();
    assert!(err.contains("already") || err.contains("is run by"), "{second}");
    assert!(
        instance
            .pids("pepod")
            .iter()
            .chain(&instance.pids("pepo-host"))
            .chain([&up.pid()])
            .any(|pid| err.contains(&pid.to_string())),
        "{second}"
    );
    up.signal(Signal::INT);
    let first = up.wait();
    assert_eq!(first.code(), Some(0), "{first}");
    instance.end();
}

#[test]
fn an_up_whose_reader_has_gone_goes_on_and_is_ended() {
    let instance = Instance::new();
    let pepo = pepo_e2e::bin("pepo");
    let line = format!("{} up 2>{}/up.log | head -n 1", pepo.display(), instance.home().display());
    let first = instance.program_at("/bin/sh".into()).args(["-c", &line]).start();
    first.says("ready at", Duration::from_secs(60));
    until("it goes on", Duration::from_secs(20), || {
        instance.pepo(["session", "ls"]).run().code().filter(|code| *code == 0)
    });
    assert_eq!(instance.pids("pepo").len(), 1, "the supervisor runs");
    let down = instance.pepo(["down"]).within(Duration::from_secs(60)).ok();
    assert_eq!(down.out(), "stopped\n");
    let ran = first.wait();
    assert_eq!(ran.code(), Some(0), "{ran}");
    instance.end();
}

/// A Session with a program that does not hear that it shall end, and so takes the whole grace.
fn slow_to_end(instance: &Instance) {
    let session = instance.pepo(["session", "create", "-q", "--workspace", "none"]).ok().out().trim().to_owned();
    let line = "trap '' TERM; while :; do sleep 1; done";
    instance.pepo(["exec", "-d", &session, "--", "sh", "-c", line]).ok();
}

#[test]
fn down_waits_for_what_is_ending_and_says_stopped_of_nothing_that_runs() {
    let instance = Instance::new();
    // Somebody asked `pepo up` to end already: a second asker cuts nothing short.
    let up = instance.up();
    slow_to_end(&instance);
    up.signal(Signal::TERM);
    let down = instance.pepo(["down"]).ok();
    assert!(down.out().contains("stopped"), "{down}");
    let up = up.wait();
    assert_eq!(up.code(), Some(0), "{up}");
    instance.must_be_clean();

    // Told twice not to wait, it says what that means.
    let up = instance.up();
    slow_to_end(&instance);
    up.signal(Signal::TERM);
    up.says("stopping", Duration::from_secs(10));
    up.signal(Signal::TERM);
    let up = up.wait();
    assert_eq!(up.code(), Some(1), "{up}");
    assert!(!up.out().contains("stopped") && up.err().contains("some may go on"), "{up}");
    assert!(!instance.pids(instance.vmm()).is_empty(), "nothing runs: {up}");
    // Where the host's cgroups cannot be seen (as in `ip netns exec`) nothing of that is known to be gone.
    let hidden = "umount -l /sys && exec \"$0\" down";
    let pepo = bin("pepo");
    let blind = instance.program_at("/usr/bin/unshare".into());
    let blind = blind.args(["-m", "sh", "-c", hidden, &pepo.to_string_lossy()]).run();
    assert!(blind.code() != Some(0) && !blind.out().contains("stopped"), "{blind}");
    assert!(blind.err().contains("no cgroup hierarchy that can be seen here"), "{blind}");
    instance.pepo(["down"]).ok();
    instance.end();
}

#[test]
fn without_root_the_sentence_says_what_to_do() {
    let instance = Instance::with(Options { without_images: true, ..Options::default() });
    let home = tempfile::tempdir_in("/tmp").expect("directory");
    fs::set_permissions(home.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("mode");
    // The programs where anybody can reach them.
    let bin = home.path().join("bin");
    fs::create_dir(&bin).expect("bin");
    for program in ["pepo", "pepod", "pepo-edge", "pepo-guest"] {
        fs::copy(pepo_e2e::bin(program), bin.join(program)).expect("copy");
    }
    let nobody = pepo_e2e::Program::new(bin.join("pepo")).env("PEPO_HOME", home.path().join("h")).uid(65534);
    let ran = nobody.args(["run", "--", "true"]).run();
    assert_eq!(ran.code(), Some(125), "{ran}");
    assert!(ran.err().contains("root") || ran.err().contains("sudo"), "{ran}");
    assert!(ran.err().lines().count() <= 4, "{ran}");
    instance.end();
}

#[test]
fn with_a_daemon_others_are_told_about_the_group() {
    let instance = Instance::new();
    let up = instance.up();
    let place = tempfile::tempdir_in("/tmp").expect("directory");
    fs::set_permissions(place.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("mode");
    fs::copy(pepo_e2e::bin("pepo"), place.path().join("pepo")).expect("copy");
    let nobody = pepo_e2e::Program::new(place.path().join("pepo")).env("PEPO_HOME", instance.home()).uid(65534);
    let ran = nobody.args(["session", "ls"]).run();
    assert_ne!(ran.code(), Some(0), "{ran}");
    assert!(ran.err().contains("sudo") || ran.err().contains("group"), "{ran}");
    instance.pepo(["down"]).ok();
    up.wait();
    instance.end();
}

/// A file system of its own, so that it can be full.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(at: &'a Path, size: &str) -> Self {
        fs::create_dir_all(at).expect("directory");
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size},mode=0711"), "pepo-e2e"])
            .arg(at)
            .status()
            .expect("mount");
        assert!(done.success(), "mount failed");
        SmallDisk(at)
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn alone_a_full_disk_while_building_is_said_with_numbers() {
    let instance = Instance::with(Options { without_images: true, ..Options::default() });
    let state = instance.home().join("state");
    let disk = SmallDisk::mount(&state, "64m");
    let ran = instance.pepo(["image", "build", "base"]).within(Duration::from_secs(400)).run();
    assert_ne!(ran.code(), Some(0), "{ran}");
    let err = ran.err().to_lowercase();
    assert!(err.contains("disk") || err.contains("space") || err.contains("room"), "{ran}");
    assert!(err.contains("mib") || err.contains("gib"), "how much is needed, and how much there is: {ran}");
    instance.pepo(["down"]).ok();
    // An interrupted build leaves nothing: no half of an Image, no tree of packages.
    let used = Command::new("du").args(["-sm"]).arg(state.join("images")).output().expect("du");
    let used: u64 =
        String::from_utf8_lossy(&used.stdout).split_whitespace().next().expect("a number").parse().expect("a number");
    assert!(used < 8, "{used} MiB are left");
    drop(disk);
    instance.end();
}

#[test]
fn alone_a_build_that_is_interrupted_leaves_nothing() {
    let instance = Instance::with(Options { without_images: true, ..Options::default() });
    let building = instance.pepo(["image", "build", "base"]).within(Duration::from_secs(300)).start();
    until("the build runs", Duration::from_secs(120), || {
        (!instance.pids("mmdebstrap").is_empty() || has_build(&instance)).then_some(())
    });
    building.signal_group(Signal::INT);
    let ran = building.wait();
    assert_ne!(ran.code(), Some(0), "{ran}");
    instance.pepo(["down"]).ok();
    instance.must_be_clean();
    let images = instance.home().join("state/images");
    let kept: Vec<_> = walk(&images)
        .into_iter()
        .filter(|path| path.is_file() && fs::metadata(path).is_ok_and(|meta| meta.len() > 1 << 20))
        .collect();
    assert!(kept.is_empty(), "{kept:?}");
    instance.end();
}

fn has_build(instance: &Instance) -> bool {
    !instance.pids("pepo-build").is_empty()
}

fn walk(root: &Path) -> Vec<std::path::PathBuf> {
    let mut found = vec![];
    let mut pending = vec![root.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                pending.push(entry.path());
            }
            found.push(entry.path());
        }
    }
    found
}

#[test]
fn building_again_is_instant() {
    assert!(images().exists());
    let instance = Instance::new();
    let ran = instance.pepo(["image", "build", "base"]).within(Duration::from_secs(60)).ok();
    println!("second build: {:?}", ran.took);
    assert!(ran.took < Duration::from_secs(20), "{ran}");
    instance.end();
}

#[test]
fn ctrl_c_at_every_stage_leaves_nothing() {
    let instance = Instance::new();
    // From before the daemon is up to long after the command has begun.
    for ms in [1u64, 20, 60, 120, 250, 500, 900, 1400, 2000, 2800, 4000] {
        let mut running = instance.pepo_run(["sleep", "3333"]).start();
        std::thread::sleep(Duration::from_millis(ms));
        if running.runs() {
            running.signal_group(Signal::INT);
        }
        let ran = running.wait();
        assert!(ran.code() != Some(0), "after {ms} ms: {ran}");
        instance.sandboxes_gone();
    }
    instance.pepo_run(["true"]).ok();
    instance.end();
}

#[test]
fn kill_9_at_any_moment_leaves_nothing_that_a_sweep_does_not_find() {
    let instance = Instance::new();
    let victims = ["pepod", "pepo-host", "pepo-keeper", "pepo"];
    for (n, ms) in [50u64, 150, 300, 600, 1000, 1500, 2200, 3000].into_iter().enumerate() {
        let mut running = instance.pepo_run(["sleep", "2222"]).start();
        std::thread::sleep(Duration::from_millis(ms));
        let victim = victims[n % victims.len()];
        for pid in instance.pids(victim) {
            if let Some(pid) = Pid::from_raw(pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        if running.runs() {
            running.signal_group(Signal::KILL);
        }
        running.wait();
    }
    // Everything of pepod dies at once, as with a crash of the machine's user space.
    let mut running = instance.pepo_run(["sleep", "1111"]).start();
    until("a Sandbox is there", Duration::from_secs(60), || {
        (!instance.pids("pepo-keeper").is_empty() || !running.runs()).then_some(())
    });
    for victim in ["pepod", "pepo-host", "pepo-edge"] {
        for pid in instance.pids(victim) {
            if let Some(pid) = Pid::from_raw(pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
    running.signal_group(Signal::KILL);
    running.wait();
    until("no daemon is left", Duration::from_secs(30), || {
        (instance.pids("pepod").is_empty() && instance.pids("pepo-host").is_empty()).then_some(())
    });
    instance.pepo(["sweep"]).within(Duration::from_secs(60)).ok();
    instance.sandboxes_gone();
    instance.pepo_run(["true"]).ok();
    instance.end();
}

#[test]
fn a_setting_that_nobody_knows_is_refused_by_name() {
    let config = Some("[sandbox]\nmemmory = \"1g\"\n".to_owned());
    let instance = Instance::with(Options { without_images: true, config, ..Options::default() });
    let ran = instance.pepo(["run", "--", "true"]).run();
    assert_eq!(ran.code(), Some(125), "{ran}");
    assert!(
        ran.err().contains("memmory") && ran.err().contains("did you mean") && ran.err().contains("memory"),
        "{ran}"
    );
    fs::remove_file(instance.home().join("pepo.toml")).expect("remove");
    instance.end();
}
