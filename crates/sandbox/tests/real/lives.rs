//! Lives of an instance: each forks into the privileged side and a side without rights, which does what the name says.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use pepo_sandbox::boot::Error as BootError;
use pepo_sandbox::host::{FoundState, Host, HostConfig, Split, run, split};
use pepo_sandbox::proto::{Activate, Variable};
use pepo_sandbox::registry::Instance;
use pepo_sandbox::{Active, Cause, Plan, SandboxId, StatePath, Vmm, adopt, boot};
use tokio_util::sync::CancellationToken;

/// The uid of the side without rights.
const NOBODY: u32 = 64_999;

/// Set for the lives of a test that runs its guests under Firecracker.
pub const UNDER_FIRECRACKER: &str = "PEPO_TEST_UNDER_FIRECRACKER";

pub const GRACE: Duration = Duration::from_secs(10);

/// Makes a state directory with the boot files in it.
pub fn state_directory(state: &Path) {
    let boot = PathBuf::from(std::env::var_os("PEPO_BOOT").expect("PEPO_BOOT names the directory with the boot files"));
    assert!(rustix::process::getuid().is_root(), "the tests on real microVMs need root");
    fs::create_dir_all(state.join("jail")).unwrap();
    rustix::fs::chmod(state.join("jail"), rustix::fs::Mode::from_raw_mode(0o700)).unwrap();
    fs::create_dir_all(state.join("boot")).unwrap();
    for name in ["vmlinux", "initramfs", "rootfs.erofs"] {
        let (from, to) = (boot.join(name), state.join("boot").join(name));
        assert!(from.exists(), "{} is missing", from.display());
        if !to.exists() && fs::hard_link(&from, &to).is_err() {
            fs::copy(&from, &to).unwrap();
        }
    }
}

/// One life. Returns the exit code of the side without rights.
pub fn live(name: &str, state: &Path, args: &[&str]) -> ExitCode {
    // The life before this one may just be ending: it holds the instance until its last process has gone.
    let wait = std::time::Instant::now() + Duration::from_secs(10);
    let instance = loop {
        match Instance::acquire(state, &state.join("jail")) {
            Err(pepo_sandbox::registry::Error::Running { .. }) if std::time::Instant::now() < wait => {
                std::thread::sleep(Duration::from_millis(10));
            }
            acquired => break acquired.expect("the instance"),
        }
    };
    match split().expect("split") {
        Split::Host { socket, daemon } => {
            let config = HostConfig {
                instance,
                daemon,
                daemon_uid: 0,
                vsock_device: std::env::var_os("PEPO_VSOCK_DEVICE").map(Into::into),
                qemu: None,
                firecracker: crate::official::directory(),
                mkfs: "/usr/sbin/mkfs.ext4".into(),
                directories: Default::default(),
                network: None,
            };
            ExitCode::from(run(socket, config).expect("the privileged side"))
        }
        Split::Daemon { socket } => {
            drop(instance);
            pepo_sandbox::rights::become_user(NOBODY, NOBODY).expect("give up all rights");
            unprivileged(name, socket, args);
            ExitCode::SUCCESS
        }
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn unprivileged(name: &str, socket: OwnedFd, args: &[&str]) {
    let host = Host::new(socket).expect("the handle");
    match name {
        "serve" => serve(&host).await,
        "endings" => endings(&host, args[0]).await,
        "hang-up" => hang_up(&host).await,
        "cycles" => cycles(&host, args[0].parse().unwrap()).await,
        "leave" => leave(&host).await,
        "adopt" => take_over(&host).await,
        "cancel" => cancel(&host).await,
        "refuse" => refuse(&host).await,
        "sweep" => sweep(&host).await,
        "tidy" => tidy(&host).await,
        "official" => crate::official::stand(&host).await,
        "official-falls" => crate::official::fall(&host).await,
        "official-refuses" => crate::official::refuse(&host).await,
        "official-turns" => crate::official::turn(&host, args[0].parse().unwrap()).await,
        "many" => many(&host, args[0].parse().unwrap()).await,
        other => panic!("no life {other}"),
    }
}

pub fn plan(id: SandboxId) -> Plan {
    let path = |name: &str| StatePath::new(format!("boot/{name}")).unwrap();
    Plan {
        id,
        vmm: if std::env::var_os(UNDER_FIRECRACKER).is_some() { Vmm::Firecracker } else { Vmm::Qemu },
        kernel: path("vmlinux"),
        initramfs: path("initramfs"),
        root: path("rootfs.erofs"),
        memory_mib: 256,
        cpus: 1,
        disk_mib: 256,
        network: pepo_sandbox::plan::Network::Absent,
        io: None,
    }
}

fn activation() -> Activate {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    Activate {
        hostname: "melon".into(),
        env: vec![Variable { name: "RIND".into(), value: "hard".into() }],
        clock_unix_ns: u64::try_from(now.as_nanos()).unwrap(),
        entropy: vec![7; 64],
        network: None,
    }
}

async fn start(host: &Host) -> Active {
    let cancel = CancellationToken::new();
    let begun = Instant::now();
    let warm = match boot(host, plan(host.new_id().unwrap()), &cancel).await {
        Ok(warm) => warm,
        Err(error) => panic!("{}", chain(&error)),
    };
    println!("warm after {:?}, {:?} of it the guest; {:?}", begun.elapsed(), warm.took(), warm.hello());
    warm.activate(activation(), Vec::new(), &cancel).await.unwrap_or_else(|error| panic!("{}", chain(&error)))
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(reason) = source {
        text = format!("{text}: {reason}");
        source = reason.source();
    }
    text
}

/// Boot, hello, activate, exec, stop.
async fn serve(host: &Host) {
    assert_eq!(host.found().await.unwrap(), []);
    let active = start(host).await;
    let said = crate::tests::output(&active, &["/bin/sh", "-c", "echo $RIND; cat /proc/sys/kernel/hostname"]).await;
    assert_eq!(said, "hard\nmelon\n");
    let usage = active.usage().await.unwrap();
    println!("{usage:?}");
    assert!(usage.cpu_ns > 100_000_000 && usage.memory_bytes > 64 << 20 && usage.pids >= 4, "{usage:?}");
    assert!(usage.memory_limit_bytes > 256 << 20 && usage.memory_limit_bytes < 1 << 30, "{usage:?}");
    let found = host.found().await.unwrap();
    assert!(found.len() == 1 && found[0].id == active.id() && found[0].state == FoundState::Running, "{found:?}");
    let begun = Instant::now();
    let exit = active.stop(GRACE).await;
    println!("stopped in {:?}: {exit}", begun.elapsed());
    assert_eq!(exit.cause, Cause::Stopped);
    assert!(exit.released.is_ok(), "{:?}", exit.released);
    assert_eq!(host.found().await.unwrap(), []);
}

/// Calls that are given up at any moment hurt no later one.
async fn hang_up(host: &Host) {
    let active = start(host).await;
    for n in 0..200 {
        // From at once to longer than an answer takes.
        let _ = tokio::time::timeout(Duration::from_micros(50 * n), active.guest().ops()).await;
    }
    assert_eq!(crate::tests::output(&active, &["/bin/echo", "ripe"]).await, "ripe\n");
    let exit = active.stop(GRACE).await;
    assert!(exit.cause == Cause::Stopped && exit.released.is_ok(), "{exit:?}");
}

/// Something ends it; the end is noticed in under 2 s and told truly.
async fn endings(host: &Host, how: &str) {
    let active = start(host).await;
    let id = active.id();
    println!("victim {}", id.hex());
    let begun = Instant::now();
    match how {
        "panic" => crate::tests::begin(&active, "echo c > /proc/sysrq-trigger").await,
        "init" => crate::tests::begin(&active, "kill -9 $PPID").await,
        "poweroff" => crate::tests::begin(&active, "echo o > /proc/sysrq-trigger").await,
        "memory" => {
            assert!(std::io::stdin().read_line(&mut String::new()).unwrap() > 0, "the test is gone");
            crate::tests::begin(&active, "dd if=/dev/zero of=/dev/shm/fill bs=1M count=100").await;
        }
        // The test's own process, which has the rights, does it when it has read the line above.
        _ => {}
    }
    tokio::time::timeout(Duration::from_secs(60), active.wait()).await.expect("it does not end");
    let noticed = begun.elapsed();
    let exit = active.stop(GRACE).await;
    println!("{how}: noticed after {noticed:?}: {exit}: {:?}", exit.record);
    println!("{}", exit.console.join("\n"));
    println!("cause {}", exit.cause);
    assert!(exit.released.is_ok(), "{:?}", exit.released);
}

/// Many lives of a Sandbox in one of pepod. After each the test looks at both sides, then says to go on.
async fn cycles(host: &Host, count: usize) {
    for n in 0..count {
        let active = start(host).await;
        assert_eq!(crate::tests::output(&active, &["/bin/echo", "ripe"]).await, "ripe\n");
        let exit = active.stop(GRACE).await;
        assert!(exit.cause == Cause::Stopped && exit.released.is_ok(), "{exit:?}");
        println!("cycle {n}");
        assert!(std::io::stdin().read_line(&mut String::new()).unwrap() > 0, "the test is gone");
    }
}

/// Starts a Sandbox with a command in it, says so, and stays until it is killed.
async fn leave(host: &Host) {
    let active = start(host).await;
    crate::tests::begin_and_hear(&active, "echo before > /tmp/mark; echo marked; sleep 600").await;
    println!("ready {}", active.id().hex());
    host.lost().await;
    active.leave();
}

/// Takes over what an earlier life left.
async fn take_over(host: &Host) {
    let found = host.found().await.unwrap();
    assert!(found.len() == 1 && found[0].state == FoundState::Running, "{found:?}");
    let fresh = host.new_id().unwrap();
    assert_ne!(fresh.slot(), found[0].id.slot(), "a slot in use was given out");
    let active = adopt(host, found[0].id).await.unwrap();
    assert_eq!(crate::tests::output(&active, &["/bin/cat", "/tmp/mark"]).await, "before\n");
    assert_eq!(active.plan(), &plan(active.id()));
    let exit = active.stop(GRACE).await;
    println!("adopted and stopped: {exit}");
    assert!(exit.cause == Cause::Stopped && exit.released.is_ok(), "{exit:?}");
}

/// A token cancelled at many moments of a boot leaves nothing.
async fn cancel(host: &Host) {
    // At first often: what was asked for before a release may begin after it.
    let early = (0..60).map(|n| n % 6);
    for milliseconds in early.chain([20, 60, 120, 250, 500, 1000, 1600]) {
        let cancel = CancellationToken::new();
        let plan = plan(host.new_id().unwrap());
        let booting = boot(host, plan, &cancel);
        let cancelling = async {
            tokio::time::sleep(Duration::from_millis(milliseconds)).await;
            cancel.cancel();
        };
        let (booted, ()) = tokio::join!(booting, cancelling);
        match booted {
            Err(BootError::Cancelled { .. }) => {}
            Ok(warm) => warm.release().await.unwrap(),
            Err(error) => panic!("after {milliseconds} ms: {}", chain(&error)),
        }
        assert_eq!(host.found().await.unwrap(), [], "after {milliseconds} ms");
    }
}

/// What pepod may not ask.
async fn refuse(host: &Host) {
    let cancel = CancellationToken::new();
    for (kernel, wanted) in [
        ("boot/none", "open boot/none"),
        ("boot", "not a regular file"),
        ("link", "open link"),
        ("foreign", "not pepod's"),
        ("open", "can be written by others"),
    ] {
        let plan = Plan { kernel: StatePath::new(kernel).unwrap(), ..plan(host.new_id().unwrap()) };
        let error = boot(host, plan, &cancel).await.expect_err(kernel);
        assert!(chain(&error).contains(wanted), "{kernel}: {}", chain(&error));
    }
    let huge = Plan { disk_mib: 16_000_000, ..plan(host.new_id().unwrap()) };
    let error = boot(host, huge, &cancel).await.expect_err("a disk larger than the host's");
    assert!(chain(&error).contains("MiB available"), "{}", chain(&error));
    let nobody = host.new_id().unwrap();
    assert!(host.connect(nobody).await.is_err());
    assert!(host.usage(nobody).await.is_err());
    assert!(host.adopt(nobody).await.is_err());
    assert!(host.start(nobody).await.is_err());
    host.release(nobody).await.expect("absent is done");
    assert_eq!(host.found().await.unwrap(), []);
}

/// Gives back what an earlier life left, without knowing it.
async fn sweep(host: &Host) {
    let left = host.sweep(&[]).await.unwrap();
    println!("{left:#?}");
    assert!(!left.is_empty() && left.iter().all(|one| one.removed == Some(Ok(()))), "{left:?}");
    assert_eq!(host.found().await.unwrap(), []);
    assert_eq!(host.sweep(&[]).await.unwrap(), []);
}

/// As [`sweep`], where there may be nothing.
async fn tidy(host: &Host) {
    let left = host.sweep(&[]).await.unwrap();
    println!("{:?}", left.iter().map(|one| &one.kind).collect::<Vec<_>>());
    assert!(left.iter().all(|one| one.removed == Some(Ok(()))), "{left:?}");
    assert_eq!(host.found().await.unwrap(), []);
}

/// Several at once.
async fn many(host: &Host, count: usize) {
    let tasks: Vec<_> = (0..count)
        .map(|n| {
            let host = host.clone();
            tokio::spawn(async move {
                let active = start(&host).await;
                let said = crate::tests::output(&active, &["/bin/echo", &n.to_string()]).await;
                assert_eq!(said, format!("{n}\n"));
                active.stop(GRACE).await
            })
        })
        .collect();
    for task in tasks {
        let exit = task.await.unwrap();
        assert!(exit.cause == Cause::Stopped && exit.released.is_ok(), "{exit:?}");
    }
}
