//! `make soak`: what takes too long for `make test`. Many boots in a row, of which not one may hang; every process dead at
//! every moment of a Sandbox's life; Workspaces under kills, at size, and under what people's programs do to files all day;
//! crowds of connections and floods; an upgrade from the previous commit's programs; a browser in a Session, and one outside
//! whose page runs a command in one.
//!
//! `pepo-soak [boots|deaths|keep|loads|crowds|upgrade|browser|page]…`: those alone.

#![allow(clippy::panic, clippy::expect_used, reason = "a soak fails by panicking")]
#![allow(clippy::print_stdout, reason = "its report is its purpose")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use pepo_e2e::crowd::{FLOODS, Two};
use pepo_e2e::strike::{Moment, Ring, Victim};
use pepo_e2e::{Instance, Options, durable, loads, page, upgrade};

/// What is counted as a hang: a boot takes about two seconds.
const HANG: Duration = Duration::from_secs(120);

const PARTS: [(&str, fn()); 8] = [
    ("boots", boots),
    ("deaths", deaths),
    ("keep", keep),
    ("loads", load),
    ("crowds", crowds),
    ("upgrade", upgrades),
    ("browser", browse),
    ("page", page),
];

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    for name in &wanted {
        assert!(PARTS.iter().any(|(part, _)| part == name), "{name}: the parts are {:?}", PARTS.map(|(part, _)| part));
    }
    for (name, part) in PARTS {
        if wanted.is_empty() || wanted.iter().any(|one| one == name) {
            part();
        }
    }
}

/// A browser on this machine, with a page that runs a command through the edge.
fn page() {
    now(page::runs_a_command());
    println!("      a page in chromium ran a command over a WebSocket by a Session token");
}

fn boots() {
    let boots = std::env::var("BOOTS")
        .ok()
        .filter(|text| !text.is_empty())
        .map_or(200, |text| text.parse().expect("BOOTS is a number"));
    boot(boots);
}

fn now<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("runtime").block_on(work)
}

/// Each process at each moment. One instance for each moment: `pepo up` takes ever longer to start again what dies often.
fn deaths() {
    let mut count = 0;
    for moment in Moment::ALL {
        let ring = Ring::new(u32::from(moment == Moment::Waiting));
        let can_die = |victim: &Victim| victim.can_die(moment, ring.under_firecracker());
        for victim in Victim::ALL.into_iter().filter(can_die) {
            now(ring.strike(victim, moment));
            count += 1;
        }
        ring.end();
    }
    println!("      {count} deaths, and nothing is left");
}

/// From the programs of the previous commit, which `make soak` builds, to these.
fn upgrades() {
    let directory = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let here = directory("PEPO_E2E_BIN").expect("PEPO_E2E_BIN is not set: run `make soak`");
    match directory("PEPO_E2E_PREVIOUS") {
        Some(previous) => go(&previous, &here),
        None => {
            println!("      there is no previous commit here: from another build of this one");
            go(upgrade::other_build(&here).path(), &here);
        }
    }

    fn go(previous: &Path, here: &Path) {
        now(upgrade::adopts(previous, here));
        println!("      Sandboxes of {} go on under {}", previous.display(), here.display());
    }
}

/// Workspaces: kills in the middle of writing, files beyond number, a file beyond four GiB.
fn keep() {
    let number = |name: &str, usual: u64| {
        let text = std::env::var(name).ok().filter(|text| !text.is_empty());
        text.map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
    };
    // Each round kills each process once.
    now(durable::kills(number("KILLS", 100) as usize));
    now(durable::many_files(number("FILES", 100_000) as usize, 4096));
    now(durable::large_file(4096));
}

/// 10,000 connections of one guest: all of them where the operator lets it, its share where not; then floods. Another guest
/// opens its own beside all of it.
fn crowds() {
    const COUNT: usize = 10_000;
    const LOOKS: usize = 200;
    // At the second its pace is within its rate of new connections.
    for (limits, pace, expected) in
        [("connections = 12000\nflows = 20000\n", 0.02, COUNT..=COUNT), ("", 0.6, 900..=1024)]
    {
        let two = Two::new(limits);
        println!("      another guest's connections with nothing beside them: {}", two.looks(LOOKS));
        let (alive, looks) = two.connections(COUNT, pace, LOOKS);
        println!("      {alive} of {COUNT} connections at once; another guest's meanwhile: {looks}");
        assert!(expected.contains(&alive), "{alive} connections, not {expected:?}");
        assert_eq!(looks.lost, 0);
        if limits.is_empty() {
            for flood in FLOODS {
                let looks = two.beside(flood, LOOKS);
                println!("      beside a flood of {}: {looks}", flood.name);
                assert_eq!(looks.lost, 0, "beside a flood of {}", flood.name);
            }
        }
        two.end();
    }
}

/// Workspaces under git, npm, pip, SQLite, rsync, cargo and the tests of Python's own library (`LOADS=git,npm`: those alone).
fn load() {
    let wanted = std::env::var("LOADS").unwrap_or_default();
    let wanted: Vec<&str> = wanted.split(',').filter(|name| !name.is_empty()).collect();
    now(loads::run(&wanted));
}

fn boot(count: usize) {
    let instance = Instance::new();
    let mut times: Vec<Duration> = Vec::with_capacity(count);
    for n in 1..=count {
        let ran = instance.pepo_run(["true"]).within(HANG).ok();
        times.push(ran.took);
        if n.is_multiple_of(20) || n == count {
            println!("      {n} of {count} boots, the last one in {:.2} s", ran.took.as_secs_f64());
        }
    }
    instance.end();
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64();
    println!(
        "      {count} boots, none hung: p50 {:.2} s, p90 {:.2} s, p99 {:.2} s, most {:.2} s",
        at(50),
        at(90),
        at(99),
        at(100)
    );
}

/// Debian's chromium, with its own sandbox on, loads a page and prints it.
fn browse() {
    let instance = Instance::with(Options::default());
    println!("      building the Image `browser`");
    let built = instance.pepo(["image", "build", "browser"]).within(Duration::from_secs(3600)).ok();
    println!("      built in {:.0} s", built.took.as_secs_f64());
    let folder = tempfile::tempdir().expect("directory");
    std::fs::write(
        folder.path().join("page.html"),
        "<title>Pepo</title><h1>A page</h1><script>document.write(6 * 7)</script>",
    )
    .expect("write");
    let script = "chromium --headless --disable-gpu --no-first-run --print-to-pdf=/home/agent/page.pdf file:///home/agent/page.html && head -c 5 page.pdf";
    let ran = instance
        .pepo([
            "run", "--image", "browser", "--memory", "2G", "--copy", ".", "--out", "page.pdf", "--", "bash", "-c",
            script,
        ])
        .directory(folder.path())
        .within(Duration::from_secs(1800))
        .ok();
    assert_eq!(ran.out(), "%PDF-", "{ran}");
    let pdf = std::fs::metadata(folder.path().join("page.pdf")).expect("the PDF came out");
    println!(
        "      chromium wrote a PDF of {} bytes in {:.0} s, its own sandbox on",
        pdf.len(),
        ran.took.as_secs_f64()
    );
    instance.end();
}
