//! What a Sandbox may use, as the kernel holds it: read by our own eyes, not through anything Pepo says about itself; the
//! limits of a single Command; and use that is counted of all that was used.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "which hierarchies there are is for whoever reads the run")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pepo_api::client::{Client, ClientError};
use pepo_api::query::ShowUsage;
use pepo_api::{
    Amounts, CommandLimits, CreateCommand, CreateSession, NetworkSpec, Output, Reason, Text, WorkspaceChoice,
};
use pepo_e2e::world::{SERVER, World};
use pepo_e2e::{Instance, Options, bare};

const MIB: u64 = 1 << 20;

/// Where each controller of this host is mounted: v1's by their names, v2 as the empty one.
fn mounts() -> BTreeMap<String, PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let mut found = BTreeMap::new();
    for line in table.lines() {
        let (left, right) = line.split_once(" - ").expect("mountinfo");
        let place = PathBuf::from(left.split(' ').nth(4).expect("a place"));
        let mut right = right.split(' ');
        match right.next() {
            Some("cgroup2") => drop(found.entry(String::new()).or_insert(place)),
            Some("cgroup") => {
                for name in right.nth(1).expect("options").split(',') {
                    found.entry(name.to_owned()).or_insert_with(|| place.clone());
                }
            }
            _ => {}
        }
    }
    found
}

/// The directory of a process' cgroup that has this controller, and whether that is v2.
fn group(pid: i32, controller: &str) -> (PathBuf, bool) {
    let mounts = mounts();
    let lines = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("cgroup");
    let line = |wanted: &str| {
        lines.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let names = parts.next()?;
            names.split(',').any(|name| name == wanted).then(|| parts.next().unwrap_or("/").trim_start_matches('/'))
        })
    };
    match (line(controller), mounts.get(controller)) {
        (Some(path), Some(mount)) => (mount.join(path), false),
        _ => (mounts.get("").expect("cgroup2").join(line("").expect("a v2 line")), true),
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).trim().to_owned()
}

/// A number of a controller's file, by its name in v1 and in v2.
fn number(pid: i32, controller: &str, v1: &str, v2: &str) -> u64 {
    let (group, is_v2) = group(pid, controller);
    let text = read(&group.join(if is_v2 { v2 } else { v1 }));
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{controller}: `{text}`"))
}

fn oom_score(pid: i32) -> i32 {
    read(Path::new(&format!("/proc/{pid}/oom_score_adj"))).parse().expect("a number")
}

/// What its main thread is to whoever wants a processor.
fn nice(pid: i32) -> i32 {
    let stat = read(Path::new(&format!("/proc/{pid}/stat")));
    let fields = stat.rsplit_once(") ").expect("a name").1;
    fields.split(' ').nth(16).and_then(|word| word.parse().ok()).expect("a number")
}

async fn run(client: &Client, session: &str, line: &str) -> Output {
    let command = CreateCommand { command: Some(line.into()), wait_seconds: Some(120), ..Default::default() };
    client.command_create(session, &command).await.expect("command")
}

async fn end(instance: Instance) {
    tokio::task::spawn_blocking(move || instance.end()).await.expect("the end");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kernel_holds_what_a_sandbox_may_use() {
    let kinds: Vec<_> = mounts().into_keys().map(|name| if name.is_empty() { "v2".into() } else { name }).collect();
    println!("cgroup hierarchies here: {}", kinds.join(", "));
    let v2 = mounts().get("").is_some_and(|place| read(&place.join("cgroup.controllers")).contains("memory"));
    println!(
        "not mounted here, and so proved on trees of real files (pepo-sandbox, cgroup::tests): {}",
        if v2 { "v1" } else { "v2 with controllers" }
    );
    let config = "[sandbox]\nio_bandwidth = \"64m\"\nio_operations = 1234\n".to_owned();
    let instance = Instance::with(Options { config: Some(config), ..Options::default() });
    let _daemon = instance.up();
    let client = instance.client();
    let new = CreateSession { cpus: Some(2), memory_mib: Some(384), ..bare() };
    let session = client.session_create(&new).await.expect("session").id.to_string();
    run(&client, &session, "true").await;

    let vmm = instance.pids(instance.vmm())[0];
    let memory = number(vmm, "memory", "memory.limit_in_bytes", "memory.max");
    assert!((384 * MIB..=(384 + 512) * MIB).contains(&memory), "{} MiB of memory", memory / MIB);
    assert_eq!(number(vmm, "cpu", "cpu.cfs_quota_us", "cpu.max"), 250_000, "two processors and a half");
    assert_eq!(number(vmm, "cpu", "cpu.shares", "cpu.weight"), if v2 { 200 } else { 2048 });
    assert!((2..=256).contains(&number(vmm, "pids", "pids.max", "pids.max")));
    let (memory_group, _) = group(vmm, "memory");
    let swap = memory_group.join(if v2 { "memory.swap.max" } else { "memory.memsw.limit_in_bytes" });
    if swap.exists() {
        let swap: u64 = read(&swap).parse().expect("a number");
        assert!(if v2 { swap == 0 } else { swap == memory }, "{swap} bytes of swap");
    }

    // All of it is in there, and goes before anything of ours.
    let mut all = instance.pids("pepo-keeper");
    all.push(vmm);
    all.extend(instance.pids("vhost-device-vs"));
    for pid in &all {
        for controller in ["memory", "cpu", "pids"] {
            assert_eq!(group(*pid, controller), group(vmm, controller), "{pid} is elsewhere");
        }
        let name = read(Path::new(&format!("/proc/{pid}/comm")));
        assert_eq!((oom_score(*pid), nice(*pid)), (500, 0), "{name}");
    }
    for name in ["pepod", "pepo-host", "pepo-edge"] {
        for pid in instance.pids(name) {
            assert!(oom_score(pid) <= 0, "{name} is taken as soon as a Sandbox");
            assert!(nice(pid) < 0, "{name} waits for processors as a Sandbox does");
            assert_ne!(group(pid, "memory").0, memory_group, "{name} is in a Sandbox's cgroup");
        }
    }
    if instance.vmm().starts_with("qemu") {
        let line = fs::read(format!("/proc/{vmm}/cmdline")).expect("cmdline");
        let line = String::from_utf8_lossy(&line).replace(['\0', ' '], "");
        let limit = format!("\"bps-total\":{},\"iops-total\":1234", 64 * MIB);
        assert_eq!(line.matches(&limit).count(), 2, "each disk is capped at its source: {line}");
    }
    // It is so, and not only said: 192 MiB do not go onto a disk of 64 MiB a second in a moment.
    let began = Instant::now();
    let wrote = run(&client, &session, "dd if=/dev/zero of=/var/tmp/f bs=1M count=192 oflag=direct 2>&1").await;
    assert!(began.elapsed() >= Duration::from_millis(2_500), "{:?}: {wrote:?}", began.elapsed());
    end(instance).await;
}

fn limited(line: &str, limits: CommandLimits) -> CreateCommand {
    CreateCommand { command: Some(line.into()), wait_seconds: Some(120), limits: Some(limits), ..Default::default() }
}

fn text(text: &Text) -> &str {
    match text {
        Text::Utf8(text) => text.trim(),
        Text::Binary { base64 } => base64,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_keeps_to_its_own_limits() {
    let instance = Instance::new();
    let _daemon = instance.up();
    let client = instance.client();
    let session = client.session_create(&bare()).await.expect("session").id.to_string();
    let none = CommandLimits::default();
    let ask = async |command: &CreateCommand| client.command_create(&session, command).await;

    // Memory: all of it goes, told as what it was, and nothing else of the Session.
    let beside = CreateCommand { wait_seconds: Some(0), command: Some("sleep 300".into()), ..Default::default() };
    let beside = ask(&beside).await.expect("command").command.id;
    let hog = "sleep 300 & python3 -c 'kept = [b\"x\" * (8 << 20) for n in range(30)]'; echo on";
    let memory = CommandLimits { memory_mib: Some(64), ..none };
    let killed = ask(&limited(hog, memory)).await.expect("command");
    assert_eq!(killed.command.end.as_ref().map(|end| end.reason), Some(Reason::OutOfMemory), "{killed:?}");
    assert_eq!((text(&killed.stdout), killed.command.limits), ("", Some(memory)));
    let shown = client.command_show(&session, beside, &Default::default()).await.expect("show");
    assert!(shown.command.end.is_none(), "what is beside it was killed, too");
    let fits = ask(&limited("python3 -c 'kept = b\"x\" * (8 << 20)'; echo on", memory)).await.expect("command");
    assert_eq!(text(&fits.stdout), "on");

    // Processes.
    let count = "import os, time\nmade = 0\ntry:\n  while made < 100:\n    if os.fork() == 0: time.sleep(60)\n    made += 1\nexcept BlockingIOError: print(made, flush=True)\nos._exit(0)";
    let line = format!("exec python3 -c '{count}'");
    let pids = ask(&limited(&line, CommandLimits { pids: Some(8), ..none })).await.expect("command");
    assert_eq!(text(&pids.stdout), "7", "{pids:?}");

    // Processor time, what the interpreter's start took apart.
    let spin = "exec python3 -c 'import time\nt, used = time.time(), time.process_time()\nwhile time.time() - t < 3: pass\nprint(time.process_time() - used)'";
    let cpu = ask(&limited(spin, CommandLimits { cpu_percent: Some(20), ..none })).await.expect("command");
    let used: f64 = text(&cpu.stdout).parse().expect("seconds");
    assert!(used < 1.5, "{used} s of processor time in 3 s");

    // In a lasting shell: the program goes, the shell stays, and the next command is not limited.
    let in_shell = |line: &str, limits| CreateCommand { shell: Some("main".into()), limits, ..limited(line, none) };
    let hog = "python3 -c 'kept = [b\"x\" * (8 << 20) for n in range(30)]'";
    ask(&in_shell("A=kept", None)).await.expect("command");
    let killed = ask(&in_shell(hog, Some(memory))).await.expect("command");
    assert_eq!(killed.command.end.map(|end| end.reason), Some(Reason::OutOfMemory));
    let after = ask(&in_shell(&format!("{hog} && echo $A"), None)).await.expect("command");
    assert_eq!(text(&after.stdout), "kept", "{after:?}");

    // What cannot be is refused by name.
    let wrong = [
        ("limits.memory_mib", CommandLimits { memory_mib: Some(4096), ..none }, "from 4 to 512"),
        ("limits.pids", CommandLimits { pids: Some(0), ..none }, "from 1 to"),
        ("limits.cpu_percent", CommandLimits { cpu_percent: Some(101), ..none }, "from 1 to 100"),
    ];
    for (param, limits, says) in wrong {
        match ask(&limited("true", limits)).await.expect_err("refused") {
            ClientError::Api(error) => {
                assert_eq!(error.param.as_deref(), Some(param));
                assert!(error.message.contains(says), "{}", error.message);
            }
            other => panic!("{other}"),
        }
    }
    // As it is typed.
    let typed = instance
        .pepo(["exec", "--limit", "memory=64m,cpus=0.5", &session, "--", "python3", "-c"])
        .args(["kept = [b'x' * (8 << 20) for n in range(30)]"])
        .run();
    assert_eq!(typed.code(), Some(137), "{typed}");
    assert!(
        typed.err().contains("limit 64 MiB of the command") && typed.err().contains("--limit memory=128M"),
        "{typed}"
    );
    end(instance).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_a_session_used_is_counted() {
    let mut world = World::new();
    world.serve(80);
    let instance = world.instance("[network]\nmode = \"on\"\n");
    let _daemon = instance.up();
    let client = instance.client();
    let network: NetworkSpec = serde_json::from_str(r#"{"mode": "public"}"#).expect("a network");
    let workspace = Some(Some(WorkspaceChoice::default()));
    let new = CreateSession { network: Some(network), workspace, ..bare() };
    let session = client.session_create(&new).await.expect("session").id.to_string();
    let work = format!(
        "dd if=/dev/urandom of=/var/tmp/f bs=1M count=24 && dd if=/var/tmp/f of=/workspace/f bs=1M count=16 && sync && \
         echo 3 | sudo tee /proc/sys/vm/drop_caches && cat /var/tmp/f /workspace/f > /dev/null && \
         for n in $(seq 20); do curl -s -m 20 http://{SERVER}/; done"
    );
    run(&client, &session, "true").await;
    let read = async || client.session_stats(&session).await.expect("stats").read_bytes;
    let before = read().await;
    let done = run(&client, &session, &work).await;
    assert_eq!(text(&done.stdout).matches("reached").count(), 20, "{done:?}");
    let read = read().await - before;
    assert!(read >= 40 * MIB, "{read} bytes were read of the scratch disk and the Workspace");
    let worked = Instant::now();
    let total = async || client.usage(&ShowUsage::default()).await.expect("usage").total;
    // At most 10 s later all of it is in the store.
    let seen = loop {
        let seen = total().await;
        // The scratch disk's and the Workspace's.
        let whole = seen.write_bytes >= 40 * MIB && seen.read_bytes >= 40 * MIB && seen.received_bytes >= 20 * 60;
        if whole {
            break seen;
        }
        assert!(worked.elapsed() < Duration::from_secs(12), "not counted after {:?}: {seen:?}", worked.elapsed());
        tokio::time::sleep(Duration::from_millis(250)).await;
    };
    println!("counted after {:?}: {seen:?}", worked.elapsed());
    assert!(seen.cpu_us > 500_000 && seen.wall_ms > 0 && seen.activations == 1, "{seen:?}");
    assert!(seen.memory_used_mib_ms / seen.wall_ms > 50, "memory in use: {seen:?}");
    assert_eq!(seen.memory_allocated_mib_ms / seen.wall_ms, 512);
    assert!(seen.disk_used_mib_ms > 0 && seen.disk_used_mib_ms <= seen.disk_allocated_mib_ms, "{seen:?}");
    assert!(seen.sent_bytes > 20 * 60, "{seen:?}");
    assert!(seen.write_bytes < 50 * MIB, "what was read from the Workspace counts as written, too: {seen:?}");

    client.session_terminate(&session).await.expect("terminate");
    let last = total().await;
    assert!(last.wall_ms >= seen.wall_ms && last.cpu_us >= seen.cpu_us, "{last:?} after {seen:?}");
    for by in ["session", "app", "day"] {
        let query = ShowUsage { group_by: Some(by.into()), ..Default::default() };
        let report = client.usage(&query).await.expect("usage");
        let mut sum = Amounts::default();
        report.groups.iter().for_each(|group| sum += group.amounts);
        assert_eq!((sum, report.total), (last, last), "{by}");
    }
    end(instance).await;
}
