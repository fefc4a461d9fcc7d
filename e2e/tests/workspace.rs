//! Workspaces in real microVMs: what a file system of theirs means, what is shared, and what outlives whom.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use std::fs;
use std::time::{Duration, Instant};

use pepo_api::client::body_from;
use pepo_api::query::{AtPath, RemoveWorkspace, WriteFile};
use pepo_api::{
    CreateCommand, CreateSession, CreateWorkspace, ErrorCode, IfBusy, Reason, WorkspaceChoice, WorkspaceMode,
};
use pepo_e2e::durable::{self, LIMIT, Up};
use pepo_e2e::strike::kill;
use pepo_e2e::until;

#[tokio::test]
async fn files_mean_what_they_do_on_a_disk() {
    let up = Up::start();
    let workspace = up.workspace(CreateWorkspace { name: Some("code".into()), ..Default::default() }).await;
    let one = up.with(&workspace).await;
    assert_eq!(up.ok(&one, "pwd; stat -c %U .; ls -A").await, "/workspace\nagent\n");
    up.put(&one, "semantics.py", include_str!("guest/semantics.py")).await;
    let began = Instant::now();
    let (code, said) = up.sh(&one, "mkdir s; cd s; python3 /tmp/semantics.py").await;
    println!("{said}in {:?}", began.elapsed());
    assert_eq!(code, 0, "{said}");
    // What this one leaves is there for the next one, and for nobody to change who may only read.
    up.ok(&one, "rm -rf s; mkdir d; echo kept > d/f; setfattr -n user.k -v v d/f 2>/dev/null || true").await;
    up.client.session_terminate(&one).await.expect("terminate");
    let reader =
        WorkspaceChoice { name: Some("code".into()), mode: Some(WorkspaceMode::Ro), ..WorkspaceChoice::default() };
    let two = up.session(reader).await.id.to_string();
    assert_eq!(up.ok(&two, "cat d/f").await, "kept\n");
    for change in ["echo x > d/f", "touch y", "rm d/f", "mkdir e", "chmod 600 d/f", "sudo rm d/f"] {
        let (code, said) = up.sh(&two, change).await;
        assert!(code != 0 && said.contains("Read-only file system"), "{change}: {said}");
    }
    up.client.session_terminate(&two).await.expect("terminate");
    let shown = up.client.workspace_show("code").await.expect("show");
    let usage = shown.usage.expect("usage");
    assert!(shown.sessions.is_empty() && usage.bytes >= 10 << 30 && usage.files >= 1 << 20, "{shown:?}");
    let removed = up.client.workspace_remove("code", &RemoveWorkspace::default()).await.expect("remove");
    assert!(removed.freed_bytes > 0 && removed.ended_sessions.is_empty(), "{removed:?}");
    let gone = up.client.workspace_show("code").await.expect_err("gone");
    assert_eq!(gone.code(), Some(ErrorCode::NotFound));
    up.end().await;
}

#[tokio::test]
async fn the_server_is_nobody_on_the_host_and_sees_nothing_of_it() {
    let up = Up::start();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let session = up.with(&workspace).await;
    up.ok(&session, "echo in the tree > file").await;
    let [pid] = up.instance.pids("pepo-share")[..] else { panic!("{:?}", up.instance.pids("pepo-share")) };
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name} {status}"));
        line.trim().to_owned()
    };
    let uid: u32 = field("Uid:").split_whitespace().next().expect("a uid").parse().expect("a uid");
    assert!(pepo_e2e::SANDBOX_UIDS.contains(&uid), "it runs as {uid}");
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:"), field("Groups:")), ("1".into(), "2".into(), String::new()));
    assert_eq!(u64::from_str_radix(&field("CapBnd:"), 16), Ok(0));
    assert_eq!(u64::from_str_radix(&field("CapInh:"), 16), Ok(0));
    // chown, dac_override, fowner, fsetid, setgid, setuid, setfcap: of its own user namespace, and no other.
    assert_eq!(u64::from_str_radix(&field("CapEff:"), 16), Ok(0x8000_00DB));
    let link = |pid: &str, name: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).expect("a namespace");
    for name in ["user", "mnt", "net", "ipc", "uts", "pid"] {
        assert_ne!(link(&pid.to_string(), name), link("self", name), "it is in the host's {name} namespace");
    }
    let [keeper] = up.instance.pids("pepo-keeper")[..] else { panic!("one keeper") };
    assert_eq!(link(&pid.to_string(), "pid"), link(&keeper.to_string(), "pid"), "not below the keeper");
    let cgroup = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("cgroups");
    assert_eq!(cgroup(pid), cgroup(keeper), "not in the Sandbox's cgroup");
    let root: Vec<_> =
        fs::read_dir(format!("/proc/{pid}/root")).expect("root").map(|e| e.unwrap().file_name()).collect();
    assert_eq!(root, ["file"], "it sees more than the tree");
    let mounts = fs::read_to_string(format!("/proc/{pid}/mounts")).expect("mounts");
    assert!(mounts.lines().count() == 1 && mounts.contains("nosuid,nodev,noexec"), "{mounts}");
    // No file of the host is open in it but the tree's own and /dev/null.
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").flatten() {
        let to = fs::read_link(entry.path()).unwrap_or_default().display().to_string();
        let known = ["socket:", "pipe:", "anon_inode:", "/dev/null"].iter().any(|kind| to.starts_with(kind));
        assert!(known || to == "/" || to == "/file" || to.ends_with("/fd"), "it has {to} open");
    }
    up.client.session_terminate(&session).await.expect("terminate");
    up.end().await;
}

#[tokio::test]
async fn sessions_share_one_and_exclude_each_other() {
    let up = Up::start();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let (one, two) = tokio::join!(up.with(&workspace), up.with(&workspace));
    up.ok(&one, "touch lock; (flock 9; echo had > held; sleep 600) 9< lock >/dev/null 2>&1 & until [ -e held ]; do sleep 0.1; done")
        .await;
    let (code, _) = up.sh(&two, "flock -n lock true").await;
    assert_eq!(code, 1, "a lock of another Session was not seen");
    // Names, appended lines and a database, from both at once.
    let race = r#"
import os, sqlite3, sys
me = sys.argv[1]
won = 0
for n in range(60):
    try:
        os.close(os.open(f"x{n}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)); won += 1
    except FileExistsError: pass
    open(f"s{n}", "a").close()
    os.rename(*[(lambda p: (open(p, "w").close(), p)[1])(f"r{me}{n}"), "target"])
    with open("lines", "a") as f: f.write(me * 40 + "\n")
base = sqlite3.connect("base", timeout=120)
for n in range(12):
    base.execute("begin immediate")
    at = base.execute("select n from t").fetchone()[0]
    base.execute("update t set n = ?", (at + 1,))
    base.commit()
print(won)
"#;
    up.put(&one, "race.py", race).await;
    up.put(&two, "race.py", race).await;
    up.ok(&one, "python3 -c \"import sqlite3; b = sqlite3.connect('base'); b.execute('create table t(n)'); b.execute('insert into t values(0)'); b.commit()\"")
        .await;
    let (won_one, won_two) = tokio::join!(up.ok(&one, "python3 /tmp/race.py a"), up.ok(&two, "python3 /tmp/race.py b"));
    let won = |text: &str| text.trim().parse::<u32>().expect("a number");
    assert_eq!(won(&won_one) + won(&won_two), 60, "a name was made twice, or not at all: {won_one} {won_two}");
    // What one did is seen by the other within the second that names and attributes are trusted.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(up.ok(&one, "sort lines | uniq -c | awk '{print $1, length($2)}'").await, "60 40\n60 40\n");
    let count = "python3 -c \"import sqlite3; b = sqlite3.connect('base'); print(b.execute('select n from t').fetchone()[0], b.execute('pragma integrity_check').fetchone()[0])\"";
    for session in [&one, &two] {
        assert_eq!(up.ok(session, count).await, "24 ok\n", "an update was lost");
    }
    // One commits without end, until its Sandbox goes in the middle of it: what was committed stays.
    let commits = "import os, sqlite3\nb = sqlite3.connect('base', timeout=120, isolation_level=None)\n\
        while True:\n    b.execute('begin immediate')\n    b.execute('update t set n = n + 1')\n    b.execute('commit')\n    os.write(1, b'.')\n";
    up.put(&one, "commits.py", commits).await;
    up.ok(
        &one,
        "(trap '' TERM; exec python3 /tmp/commits.py) >told 2>/dev/null & until [ -s told ]; do sleep 0.1; done",
    )
    .await;
    // Whoever waits for a lock has it when its holder's Sandbox ends.
    let waiting = up.ok(&two, "flock lock echo got");
    let ending = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        up.client.session_terminate(&one).await.expect("terminate");
    };
    let (said, ()) = tokio::join!(waiting, ending);
    assert_eq!(said, "got\n");
    let told: u64 = up.ok(&two, "stat -c %s told").await.trim().parse().expect("a number");
    let counted = up.ok(&two, count).await;
    let (number, whole) = counted.trim().split_once(' ').expect("two words");
    let number: u64 = number.parse().expect("a number");
    assert!(told > 0 && number >= 24 + told && whole == "ok", "{told} more than 24 were committed: {counted}");
    up.client.session_terminate(&two).await.expect("terminate");
    up.end().await;
}

#[tokio::test]
async fn whoever_is_killed_nothing_acknowledged_is_lost() {
    durable::kills(1).await;
}

#[tokio::test]
async fn many_files_need_few_descriptors() {
    durable::many_files(10_000, 1024).await;
}

/// How often a process has waited for something: at least once for each message that comes alone.
fn waits(pid: i32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let of = |thread: fs::DirEntry| {
        let status = fs::read_to_string(thread.path().join("status")).expect("status");
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).expect("a line");
        line.trim().parse::<u64>().expect("a number")
    };
    threads.map(|thread| of(thread.expect("thread"))).sum()
}

#[tokio::test]
async fn names_are_read_ahead_where_one_file_is_looked_at_after_the_other() {
    let up = Up::start();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let session = up.with(&workspace).await;
    up.ok(&session, "mkdir d e; cd d; seq 600 | xargs touch; printf hello > 300; cd ../e; seq 6 | xargs touch").await;
    let [server] = up.instance.pids("pepo-share")[..] else { panic!("one server") };
    let looks = async |names: &str| {
        up.ok(&session, "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches >/dev/null").await;
        let before = waits(server);
        let line = format!("python3 -c \"import os; print(sum(os.stat(n).st_size for n in {names}))\"");
        let said = up.ok(&session, &line).await;
        (said, waits(server) - before)
    };
    let (said, known) = looks("[f'd/{n}' for n in range(1, 601)]").await;
    let (_, few) = looks("[f'e/{n}' for n in range(1, 7)]").await;
    println!("looking at 600 files took {known} messages, at 6 it took {few}");
    assert_eq!(said, "5\n");
    assert!(known < 400, "looking at 600 files took {known} messages");
    // Names that are read ahead are trusted no longer than others.
    let beside = up.with(&workspace).await;
    up.ok(&beside, "printf 'hello, all' > d/300; rm d/301").await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(up.ok(&session, "stat -c %s d/300; ls d/301 2>/dev/null || echo gone").await, "10\ngone\n");
    for session in [session, beside] {
        up.client.session_terminate(&session).await.expect("terminate");
    }
    up.end().await;
}

#[tokio::test]
async fn a_private_one_goes_with_its_session_unless_it_is_kept() {
    let up = Up::start();
    // Nothing said: one of its own.
    let session = up.client.session_create(&CreateSession::default()).await.expect("a Session");
    let own = session.workspace.clone().expect("a Workspace of its own");
    assert!(own.own && !own.keep && own.path == "/workspace", "{own:?}");
    let id = session.id.to_string();
    up.ok(&id, "dd if=/dev/urandom of=big bs=1M count=8 status=none").await;
    let busy = up.client.workspace_remove(&own.id.to_string(), &RemoveWorkspace::default()).await;
    assert_eq!(busy.expect_err("it is used").code(), Some(ErrorCode::Conflict));
    let foreign = WorkspaceChoice { id: Some(own.id), ..WorkspaceChoice::default() };
    let body = CreateSession { workspace: Some(Some(foreign)), ..CreateSession::default() };
    let shared = up.client.session_create(&body).await.expect_err("it is another Session's own");
    assert_eq!(shared.code(), Some(ErrorCode::Conflict));
    let ended = up.client.session_terminate(&id).await.expect("terminate");
    let freed = ended.workspace.and_then(|workspace| workspace.freed_bytes).expect("how much came free");
    assert!(freed > 8 << 20, "{freed}");
    assert_eq!(
        up.client.workspace_show(&own.id.to_string()).await.expect_err("gone").code(),
        Some(ErrorCode::NotFound)
    );

    // Kept, it stays and is nobody's; what is to persist lies in it.
    let keep = WorkspaceChoice { own: Some(true), keep: Some(true), ..WorkspaceChoice::default() };
    let body = CreateSession {
        workspace: Some(Some(keep)),
        persist: Some(vec!["~/.config/tool".into(), "/opt/cache".into()]),
        ..CreateSession::default()
    };
    let session = up.client.session_create(&body).await.expect("a Session");
    let kept = session.workspace.clone().expect("a Workspace");
    let id = session.id.to_string();
    up.ok(&id, "echo mine > ~/.config/tool/settings; echo warm > /opt/cache/c; stat -c %U ~/.config/tool").await;
    up.client.session_terminate(&id).await.expect("terminate");
    let stays = up.client.workspace_show(&kept.id.to_string()).await.expect("it stays");
    assert!(stays.session_id.is_none() && stays.sessions.is_empty(), "{stays:?}");
    let body = CreateSession {
        workspace: Some(Some(WorkspaceChoice { id: Some(kept.id), ..WorkspaceChoice::default() })),
        persist: Some(vec!["~/.config/tool".into(), "/opt/cache".into()]),
        ..CreateSession::default()
    };
    let id = up.client.session_create(&body).await.expect("a Session").id.to_string();
    assert_eq!(up.ok(&id, "cat ~/.config/tool/settings /opt/cache/c").await, "mine\nwarm\n");
    // By force it goes, and its user with it.
    let force = RemoveWorkspace { force: Some(true) };
    let removed = up.client.workspace_remove(&kept.id.to_string(), &force).await.expect("by force");
    assert_eq!(removed.ended_sessions.len(), 1);
    assert_eq!(up.ended(&id).await.reason, Reason::Operator);

    // And none is none.
    let body = CreateSession { workspace: Some(None), ..CreateSession::default() };
    let id = up.client.session_create(&body).await.expect("a Session").id.to_string();
    assert_eq!(up.ok(&id, "pwd; mount | grep -c fuse || true").await, "/home/agent\n0\n");
    up.client.session_terminate(&id).await.expect("terminate");
    up.end().await;
}

#[tokio::test]
async fn one_writer_means_one_and_full_is_an_answer() {
    let up = Up::start();
    let body = CreateWorkspace { size_mib: Some(16), max_files: Some(1024), single_writer: true, ..Default::default() };
    let workspace = up.workspace(body).await;
    let mut one = up.with(&workspace).await;
    up.ok(&one, "echo first > a").await;
    let refusing =
        WorkspaceChoice { id: Some(workspace.id), if_busy: Some(IfBusy::Refuse), ..WorkspaceChoice::default() };
    let refused = up.session(refusing).await.id.to_string();
    let ended = up.ended(&refused).await;
    assert!(ended.reason == Reason::SetupFailed && ended.message.contains("one may have it at a time"), "{ended:?}");
    let resize = pepo_api::UpdateWorkspace { size_mib: Some(32), ..Default::default() };
    // Without the Session its files can be read meanwhile, and not changed: that guest trusts what it knows.
    let name = workspace.id.to_string();
    let write = WriteFile { path: "/b".into(), ..WriteFile::default() };
    let busy = up.client.workspace_file_write(&name, &write, body_from("x")).await.expect_err("it is had alone");
    assert_eq!(busy.code(), Some(ErrorCode::Conflict));
    let at = |path: &str| AtPath { path: path.into(), user: None };
    let mut read = up.client.workspace_file_read(&name, &at("/a")).await.expect("read");
    assert_eq!(read.next().await.expect("bytes").expect("bytes"), "first\n");
    // Bytes, then files: the answer is that there is no room, and what is there stays as it is.
    let (code, said) = up.sh(&one, "dd if=/dev/zero of=big bs=64k count=1000").await;
    assert!(code != 0 && said.contains("No space left on device"), "{said}");
    assert_eq!(
        up.ok(&one, "cat a; rm big; for i in $(seq 900); do echo > f$i; done; ls | wc -l").await,
        "first\n901\n"
    );
    let (code, said) = up.sh(&one, "for i in $(seq 901 1100); do echo > f$i || exit 7; done").await;
    assert!(code == 7 && said.contains("No space left on device"), "{said}");
    assert_eq!(up.ok(&one, "cat a").await, "first\n");
    // More room comes while it is used, where the host lets that be; elsewhere the refusal says what to do.
    let grown = match up.client.workspace_update(&name, &resize).await {
        Err(refused) if !durable::may_resize_mounted() => {
            assert_eq!(refused.code(), Some(ErrorCode::Conflict));
            assert!(refused.to_string().contains("CAP_SYS_RESOURCE"), "{refused}");
            assert_eq!(up.client.workspace_show(&name).await.expect("show").size_mib, 16);
            up.client.session_terminate(&one).await.expect("terminate");
            let grown = up.client.workspace_update(&name, &resize).await.expect("grow at rest");
            one = up.with(&workspace).await;
            grown
        }
        grown => grown.expect("grow"),
    };
    assert_eq!(grown.size_mib, 32);
    // Room that came free is the host's again without anybody's end.
    up.ok(&one, "rm f*; dd if=/dev/urandom of=big bs=64k count=384 conv=fsync; cat a").await;
    let on_host = async || up.client.workspace_show(&name).await.expect("show").usage.expect("usage").host_bytes;
    assert!(on_host().await >= 24 << 20);
    up.ok(&one, "rm big; sync").await;
    let began = Instant::now();
    while on_host().await > 16 << 20 {
        assert!(began.elapsed() < LIMIT, "{} bytes are still taken", on_host().await);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    // One that waits gets it when the first has gone.
    let waiting = up.with(&workspace).await;
    up.client.session_terminate(&one).await.expect("terminate");
    assert_eq!(up.ok(&waiting, "cat a; ls").await, "first\na\n");
    up.client.session_terminate(&waiting).await.expect("terminate");
    up.end().await;
}

#[tokio::test]
async fn a_restart_of_pepod_ends_no_mount_and_its_loss_is_told_afterwards() {
    let up = Up::start();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let session = up.with(&workspace).await;
    up.ok(&session, "echo before > a").await;
    let [host] = up.instance.pids("pepo-host")[..] else { panic!("one privileged side") };
    kill(host);
    until("another pepod answers", LIMIT, || {
        let hosts = up.instance.pids("pepo-host");
        (hosts.len() == 1 && hosts[0] != host).then_some(())
    });
    assert_eq!(up.ok(&session, "cat a; echo after > b; cat b").await, "before\nafter\n");
    let [server] = up.instance.pids("pepo-share")[..] else { panic!("one server") };
    kill(server);
    assert_eq!(up.ended(&session).await.reason, Reason::MountLost);
    up.end().await;
}

#[tokio::test]
async fn a_guest_that_lies_to_its_server_breaks_its_own_mount_alone() {
    let up = Up::start();
    let workspace = up.workspace(CreateWorkspace::default()).await;
    let (liar, bystander) = tokio::join!(up.with(&workspace), up.with(&workspace));
    up.ok(&liar, "echo precious > a; ln -s /etc out; mkdir d; mkdir -p below/deep; echo deep > below/deep/f").await;
    up.put(&liar, "pump.py", include_str!("guest/pump.py")).await;
    // What a kernel never sends is refused, one by one, and changes nothing; the mount goes on.
    let said = up.ok(&liar, "sudo python3 /tmp/pump.py talk").await;
    let refused = said.split_once(" refused").and_then(|(count, _)| count.parse::<u32>().ok());
    assert!(refused.is_some_and(|refused| refused > 200), "{said}");
    assert_eq!(up.ok(&liar, "ls -A . d; cat a; echo on > b; rm b").await, ".:\na\nbelow\nd\nout\n\nd:\nprecious\n");
    // A directory that others move away while somebody is in it leads to what is its own, or to nothing.
    let inside = async {
        let line = "cd below/deep; until [ -e /workspace/moved ]; do sleep 0.1; done; sleep 1.2; \
                    cat f ../../a 2>/dev/null; cat /workspace/moved/deep/f";
        up.ok(&liar, line).await
    };
    let moving = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        up.ok(&bystander, "mkdir -p d/e; mv below d/e/below; mv d/e/below moved; rmdir d/e").await
    };
    let (said, _) = tokio::join!(inside, moving);
    let own = |line: &str| matches!(line, "deep" | "precious");
    assert!(said.lines().all(own) && said.ends_with("deep\n"), "{said}");
    let command = CreateCommand {
        command: Some("sudo python3 /tmp/pump.py garbage; cat a".into()),
        wait_seconds: Some(0),
        ..CreateCommand::default()
    };
    up.client.command_create(&liar, &command).await.expect("a command");
    let ended = up.ended(&liar).await;
    assert_eq!(ended.reason, Reason::MountLost, "{ended:?}");
    assert_eq!(up.ok(&bystander, "cat a; echo more >> a; cat a").await, "precious\nprecious\nmore\n");
    up.client.session_terminate(&bystander).await.expect("terminate");
    up.end().await;
}

#[tokio::test]
async fn a_directory_of_the_host_is_served_with_its_lenders_rights_and_no_other() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    const LENDER: u32 = 54_321;
    let up = Up::start();
    let socket = up.instance.socket();
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).expect("mode");
    let home = up.instance.home().join("lender");
    fs::create_dir(&home).expect("directory");
    fs::write(home.join("mine"), "mine\n").expect("file");
    fs::create_dir(home.join("roots")).expect("directory");
    fs::write(home.join("roots/secret"), "secret\n").expect("file");
    fs::set_permissions(home.join("roots"), fs::Permissions::from_mode(0o700)).expect("mode");
    std::os::unix::fs::symlink("/etc/passwd", home.join("out")).expect("link");
    for path in [home.clone(), home.join("mine")] {
        chown(path, Some(LENDER), Some(LENDER)).expect("owner");
    }
    fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).expect("mode");
    let run = |volume: String, line: &str| {
        let program = up.instance.pepo(["run", "-v", volume.as_str(), "--", "bash", "-c", line]);
        program.uid(LENDER).env("HOME", "/nonexistent").within(LIMIT).run()
    };
    let there = format!("{}:/data", home.display());
    // Its own files are the guest's user's; what is another's is nobody's; a link leads into the guest.
    let ran = run(
        there.clone(),
        "cd /data && cat mine && stat -c %U mine && echo made > made && sudo sh -c 'echo root > by-root' \
         && cp /usr/bin/id id && chmod 6755 id && stat -c %a id && ! sudo chown root made && ! sudo mknod n c 1 3 \
         && ! sudo cat roots/secret && ! sudo rm -rf roots && [ \"$(cat out)\" = \"$(cat /etc/passwd)\" ] && mv made moved",
    );
    assert_eq!((ran.code(), ran.out()), (Some(0), "mine\nagent\n755\n".to_owned()), "{ran}");
    for (name, mode) in [("moved", 0o644), ("by-root", 0o644), ("id", 0o755)] {
        let meta = fs::metadata(home.join(name)).expect(name);
        assert_eq!((meta.uid(), meta.mode() & 0o7777), (LENDER, mode), "{name}");
    }
    assert_eq!(fs::read_to_string(home.join("roots/secret")).expect("still there"), "secret\n");
    let ran = run(format!("{there}:ro"), "cat /data/moved; ! echo x > /data/x");
    assert_eq!((ran.code(), ran.out()), (Some(0), "made\n".to_owned()), "{ran}");
    assert!(!home.join("x").exists());
    // What the caller cannot reach is not lent, whoever pepod is; and over the edge nothing is.
    for closed in [home.join("roots"), "/root/.ssh".into(), home.join("nothing"), home.join("mine")] {
        let ran = run(format!("{}:/data", closed.display()), "true");
        assert_eq!(ran.code(), Some(125), "{}: {ran}", closed.display());
        assert!(ran.err().contains(&closed.display().to_string()), "{ran}");
    }
    // A place in the guest that cannot be made is told: nobody waits for a server whose stream never comes.
    let ran = run(format!("{}:/etc/hostname/below", home.display()), "true");
    assert!(ran.code() == Some(125) && ran.err().contains("make /etc/hostname/below"), "{ran}");
    up.end().await;
}
