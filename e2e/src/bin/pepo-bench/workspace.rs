//! Workspaces: against the stream they lie on, against NFS, a disk and memory of the same guest, and what their server takes.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use pepo_e2e::durable;
use pepo_e2e::strike::Ring;
use pepo_e2e::world::World;

use crate::exec::drained;
use crate::nfs::{self, Nfs};
use crate::room::Room;
use crate::table::{Goal, MIB, Row, median, rate};

/// What is written and read in one go.
const BULK: usize = 512 * MIB;

/// Small files that are made, looked at, read and removed.
const FILES: usize = 5000;

/// Files of a tree that is unpacked and that git looks at.
const TREE: usize = 20_000;

/// Files that a server is to know.
const KNOWN: usize = 100_000;

/// Starts of which the middle one is told.
const STARTS: usize = 15;

/// What is timed of them, in the order in which [`GUEST`] says it.
const SMALL_THINGS: [&str; 4] =
    ["create, write and close", "stat, nothing known", "open, read and close, nothing known", "unlink"];
/// The same of the tree.
const TREE_THINGS: [&str; 2] = ["untar of 20,000 files", "git status of 20,000 files, nothing known"];

/// Turns of the small files, each through all places.
const ROUNDS: usize = 3;

/// In the guest: seconds for each thing, in a new directory: `small PLACE FILES`, `tree PLACE ARCHIVE`.
const GUEST: &str = r#"
import os, subprocess, sys, tempfile, time
def run(line): subprocess.run(line, shell=True, stdout=subprocess.DEVNULL, check=True)
def cold(): run("sync; echo 3 | sudo tee /proc/sys/vm/drop_caches")
def timed(act):
    began = time.monotonic(); act(); return time.monotonic() - began
def small(top, files):
    names = [f"{top}/{n}" for n in range(int(files))]
    body = b"x" * 1024
    def make():
        for name in names:
            file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY); os.write(file, body); os.close(file)
    def look():
        for name in names: os.stat(name)
    def read():
        for name in names:
            file = os.open(name, os.O_RDONLY); os.read(file, 4096); os.close(file)
    def remove():
        for name in names: os.unlink(name)
    said = [timed(make)]
    cold(); said.append(timed(look))
    cold(); said.append(timed(read))
    said.append(timed(remove))
    return said
def tree(top, archive):
    said = [timed(lambda: run(f"tar xf {archive} -C {top}"))]
    run(f"cd {top} && git init -q && git add -N .")
    cold(); said.append(timed(lambda: run(f"cd {top} && git status --porcelain")))
    return said
print(*{"small": small, "tree": tree}[sys.argv[1]](tempfile.mkdtemp(dir=sys.argv[2]), sys.argv[3]))
"#;

/// Written with fsync, and read when nothing of it is in the guest's memory, against the same bytes over a raw stream.
pub fn bulk() -> Vec<Row> {
    let room = Room::with_workspace("own");
    let rows = written_and_read(&room);
    room.close();
    rows
}

fn written_and_read(Room { instance, session, guest, .. }: &Room) -> Vec<Row> {
    let mib = BULK / MIB;
    let sh = |line: String| {
        instance.pepo(["exec", session, "--", "bash", "-c", &line]).within(Duration::from_secs(600)).ok().out()
    };
    let seconds = |line: &str| -> f64 {
        // What is timed is quiet inside the group: redirected as a whole it would take the time with it.
        let timed = format!("TIMEFORMAT=%R; time {{ ({line}) >/dev/null 2>/dev/null; }}");
        sh(format!("{{ {timed}; }} 2>&1")).trim().parse().expect("seconds")
    };
    let (mut up, mut down, mut raw_up, mut raw_down) = (vec![], vec![], vec![], vec![]);
    for _ in 0..3 {
        let began = Instant::now();
        drained(guest.raw(&format!("head -c {BULK} /dev/zero")), BULK);
        raw_up.push(rate(BULK, began.elapsed()));
        up.push(mib as f64 / seconds(&format!("dd if=/dev/zero of=/workspace/bulk bs=1M count={mib} conv=fsync")));
        let began = Instant::now();
        filled(guest.raw(&format!("head -c {BULK} > /dev/null; echo done")), BULK);
        raw_down.push(rate(BULK, began.elapsed()));
        sh("echo 3 | sudo tee /proc/sys/vm/drop_caches".to_owned());
        down.push(mib as f64 / seconds("dd if=/workspace/bulk of=/dev/null bs=1M"));
        sh("rm /workspace/bulk".to_owned());
    }
    let row = |what: &str, ours, reference| Row {
        what: format!("Workspace: {what} of {mib} MiB, by the raw stream"),
        ours: median(ours),
        unit: "MiB/s",
        goal: Goal::AtLeast { reference: median(reference), ratio: 0.7 },
    };
    vec![row("write and fsync", up, raw_up), row("read", down, raw_down)]
}

fn filled(mut stream: UnixStream, bytes: usize) {
    let buffer = vec![0u8; 1 << 18];
    for _ in 0..bytes / buffer.len() {
        stream.write_all(&buffer).expect("write");
    }
    let mut word = [0; 4];
    stream.read_exact(&mut word).expect("the guest has all of it");
    let _ = stream.shutdown(Shutdown::Both);
}

/// Many small files: here, over NFS, on the guest's own disk, in its memory.
pub fn small() -> Vec<Row> {
    let world = World::new();
    let room = nfs::room(&world);
    let nfs = Nfs::mounted(&world, &room);
    let rows = made_and_removed(&room);
    nfs.end(&room);
    room.close();
    rows
}

fn made_and_removed(Room { instance, session, .. }: &Room) -> Vec<Row> {
    let home = tempfile::tempdir().expect("directory");
    for (name, bytes) in [("files.py", GUEST.as_bytes().to_vec()), ("tree.tar", durable::files(TREE))] {
        fs::write(home.path().join(name), bytes).expect("write");
        let to = format!("{session}:/tmp/{name}");
        instance.pepo(["cp"]).args([home.path().join(name).as_os_str(), to.as_ref()]).ok();
    }
    let run = |what: &str, place: &str, of: &str| -> Vec<f64> {
        let argv = ["exec", session, "--", "python3", "/tmp/files.py", what, place, of];
        let said = instance.pepo(argv).within(Duration::from_secs(1800)).ok().out();
        said.split_whitespace().map(|word| word.parse().expect("seconds")).collect()
    };
    let places = ["/workspace", nfs::PLACE, "/tmp", "/dev/shm"];
    let rounds: Vec<_> = (0..ROUNDS).map(|_| places.map(|place| run("small", place, &FILES.to_string()))).collect();
    let trees = places.map(|place| run("tree", place, "/tmp/tree.tar"));
    let [ours, references @ ..] = std::array::from_fn::<Vec<f64>, 4, _>(|place| {
        let middle = |thing| median(rounds.iter().map(|round| round[place][thing]).collect()) / FILES as f64;
        let tree = trees[place].iter().map(|seconds| seconds / TREE as f64);
        (0..SMALL_THINGS.len()).map(middle).chain(tree).map(|seconds| seconds * 1e6).collect()
    });
    // By name, and whether ours may not be slower.
    let names = [("NFSv4 over the tap", true), ("ext4 on virtio", false), ("tmpfs", false)];
    let mut rows = Vec::new();
    for ((name, held), reference) in names.into_iter().zip(references) {
        let things = SMALL_THINGS.iter().chain(&TREE_THINGS);
        for (what, (ours, reference)) in things.zip(ours.iter().zip(reference)) {
            let what = format!("Workspace: {what}, by {name}");
            let goal = if held { Goal::AtMost { reference, ratio: 1.0 } } else { Goal::Against { reference } };
            rows.push(Row { what, ours: *ours, unit: "µs a file", goal });
        }
    }
    rows
}

/// From the request for a Session to the end of its first command, with a Workspace and without, both on a warm Sandbox.
pub fn attach() -> Vec<Row> {
    let ring = Ring::new(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let (mut with, mut without) = (vec![], vec![]);
    runtime.block_on(async {
        let client = &ring.client;
        let made = client.workspace_create(&pepo_api::CreateWorkspace::default()).await.expect("Workspace").id;
        let its = || pepo_api::WorkspaceChoice { id: Some(made), ..Default::default() };
        for _ in 0..STARTS {
            for (workspace, times) in [(None, &mut without), (Some(its()), &mut with)] {
                ring.ready_beside(1, 0).await;
                let began = Instant::now();
                let body = pepo_api::CreateSession { workspace: Some(workspace), ..Default::default() };
                let session = client.session_create(&body).await.expect("Session").id.to_string();
                let command = pepo_api::CreateCommand { argv: Some(vec!["/bin/true".into()]), ..Default::default() };
                client.command_create(&session, &command).await.expect("command");
                times.push(began.elapsed().as_secs_f64() * 1e3);
                client.session_terminate(&session).await.expect("end");
            }
        }
    });
    ring.end();
    vec![Row {
        what: format!("Workspace: attach to a warm Sandbox, p50 over {:.0} ms without one", median(without.clone())),
        ours: median(with) - median(without),
        unit: "ms",
        goal: Goal::Below(30.0),
    }]
}

/// What a server keeps in memory: idle, and when its guest knows very many files.
pub fn memory() -> Vec<Row> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let (idle, full) = runtime.block_on(durable::server_memory(KNOWN));
    let row = |what: &str, bytes: u64| Row {
        what: format!("Workspace: memory of its server, {what}"),
        ours: bytes as f64 / MIB as f64,
        unit: "MiB",
        goal: Goal::Report,
    };
    vec![row("idle", idle), row("100,000 files known", full)]
}
