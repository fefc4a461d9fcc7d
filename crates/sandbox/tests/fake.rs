//! The whole line without root: the two sides, the wall between them, and the real guest agent as a host process; then the
//! same with each step failing. Needs `PEPO_GUEST`, or the agent built beside this test.
#![cfg(feature = "fake")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use pepo_sandbox::boot::{Error, Step};
use pepo_sandbox::guest::Output;
use pepo_sandbox::host::{FoundState, Host, HostConfig, Split, run, split};
use pepo_sandbox::proto::{Activate, Exec, OpId};
use pepo_sandbox::registry::Instance;
use pepo_sandbox::{Cause, Plan, SandboxId, StatePath, Vmm, boot};
use tokio_util::sync::CancellationToken;

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if args.iter().any(|arg| arg == "--list") {
        if !args.iter().any(|arg| arg == "--ignored") {
            println!("the_line_and_each_step_failing: test");
        }
        return std::process::ExitCode::SUCCESS;
    }
    let guest = std::env::var_os("PEPO_GUEST").expect("PEPO_GUEST names the guest agent: run `make test`");
    assert!(Path::new(&guest).exists(), "{} is missing", guest.display());
    let place = tempfile::tempdir().unwrap();
    let state = place.path().join("state");
    fs::create_dir_all(state.join("jail")).unwrap();
    let instance = Instance::acquire_in(&place.path().join("instances"), &state, &state.join("jail")).unwrap();
    match split().unwrap() {
        Split::Host { socket, daemon } => {
            // Without rights, as on a machine of somebody who has none. A test run as root gives them up first.
            if rustix::process::geteuid().is_root() {
                own(place.path(), 64_998);
                pepo_sandbox::rights::become_user(64_998, 64_998).unwrap();
            }
            let config = HostConfig {
                instance,
                daemon,
                daemon_uid: rustix::process::geteuid().as_raw(),
                vsock_device: None,
                qemu: None,
                firecracker: None,
                mkfs: "/nowhere".into(),
                directories: Default::default(),
                network: None,
            };
            let code = run(socket, config).unwrap();
            let left: Vec<_> =
                fs::read_dir(state.join("jail")).unwrap().flatten().map(|entry| entry.file_name()).collect();
            assert!(left.is_empty(), "left: {left:?}");
            assert_eq!(code, 0, "the side without rights failed");
            std::process::ExitCode::SUCCESS
        }
        Split::Daemon { socket } => {
            drop(instance);
            line(socket, &state);
            // The directory is the other side's to remove.
            std::mem::forget(place);
            std::process::ExitCode::SUCCESS
        }
    }
}

fn own(path: &Path, uid: u32) {
    std::os::unix::fs::chown(path, Some(uid), Some(uid)).unwrap();
    if path.is_dir() {
        fs::read_dir(path).unwrap().flatten().for_each(|entry| own(&entry.path(), uid));
    }
}

fn plan(id: SandboxId) -> Plan {
    let nothing = || StatePath::new("nothing").unwrap();
    Plan {
        id,
        vmm: Vmm::Fake,
        kernel: nothing(),
        initramfs: nothing(),
        root: nothing(),
        memory_mib: 256,
        cpus: 1,
        disk_mib: 256,
        network: pepo_sandbox::plan::Network::Absent,
        io: None,
    }
}

fn activation() -> Activate {
    Activate { hostname: "melon".into(), env: Vec::new(), clock_unix_ns: 1, entropy: vec![1; 32], network: None }
}

fn exec(argv: &[&str]) -> Exec {
    Exec { cwd: Some("/".into()), detached: true, ..Exec::new(argv.iter().copied()) }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn line(socket: OwnedFd, state: &Path) {
    let host = Host::new(socket).unwrap();
    let cancel = CancellationToken::new();
    assert_eq!(host.found().await.unwrap(), []);

    let active = boot(&host, plan(host.new_id().unwrap()), &cancel).await.unwrap();
    let active = active.activate(activation(), Vec::new(), &cancel).await.unwrap();
    let mut running = active.guest().exec(OpId([1; 16]), exec(&["/bin/echo", "pip"])).await.unwrap();
    let mut said = Vec::new();
    while let Some(item) = running.next().await {
        if let Output::Data { bytes, .. } = item.unwrap() {
            said.extend_from_slice(&bytes);
        }
    }
    assert_eq!(said, b"pip\n");
    let found = host.found().await.unwrap();
    assert!(found.len() == 1 && found[0].state == FoundState::Running, "{found:?}");
    // Something that would outlive its agent.
    drop(active.guest().exec(OpId([2; 16]), exec(&["/bin/sleep", "1234.5"])).await.unwrap());
    let exit = active.stop(Duration::from_secs(10)).await;
    assert!(exit.cause == Cause::Stopped && exit.released.is_ok(), "{exit:?}");
    assert_eq!(host.found().await.unwrap(), []);

    for step in [Step::Prepare, Step::Start, Step::Hello, Step::Activate] {
        let fault = state.join(format!("fault-{step:?}").to_lowercase());
        fs::write(&fault, format!("no {step:?}")).unwrap();
        let failed = match boot(&host, plan(host.new_id().unwrap()), &cancel).await {
            Ok(warm) => warm.activate(activation(), Vec::new(), &cancel).await.map(drop),
            Err(error) => Err(error),
        };
        match failed {
            Err(Error::Host { step: failed, source, .. }) => {
                assert_eq!(failed, step);
                assert!(source.to_string().contains(&format!("no {step:?}")), "{source}");
            }
            other => panic!("{step:?}: {other:?}"),
        }
        assert_eq!(host.found().await.unwrap(), [], "after a failed {step:?}");
        fs::remove_file(fault).unwrap();
    }

    // A guest that does not take the shutdown is ended all the same.
    fs::write(state.join("fault-shutdown"), "").unwrap();
    let active = boot(&host, plan(host.new_id().unwrap()), &cancel).await.unwrap();
    let active = active.activate(activation(), Vec::new(), &cancel).await.unwrap();
    let exit = active.stop(Duration::from_millis(50)).await;
    assert!(exit.cause == Cause::Stopped && exit.released.is_ok(), "{exit:?}");

    // What cannot be given back is owed, its slot stays taken, and a repeat pays.
    fs::write(state.join("fault-release"), "busy").unwrap();
    let active = boot(&host, plan(host.new_id().unwrap()), &cancel).await.unwrap();
    let active = active.activate(activation(), Vec::new(), &cancel).await.unwrap();
    let id = active.id();
    let exit = active.stop(Duration::ZERO).await;
    assert!(exit.released.unwrap_err().to_string().contains("busy"));
    assert_eq!(host.found().await.unwrap().len(), 1);
    fs::remove_file(state.join("fault-release")).unwrap();
    host.release(id).await.unwrap();
    assert_eq!(host.found().await.unwrap(), []);

    // One that ends by itself, dropped instead of stopped: given back too.
    let active = boot(&host, plan(host.new_id().unwrap()), &cancel).await.unwrap();
    let active = active.activate(activation(), Vec::new(), &cancel).await.unwrap();
    drop(active);
    tokio::time::timeout(Duration::from_secs(20), async {
        while !host.found().await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("a dropped one is not given back");
    // Its slot comes back with it, also where the first try fails, or it would be lost until pepod restarts.
    let slots_free = async |what: &str| {
        tokio::time::timeout(Duration::from_secs(20), async {
            while host.slots_taken() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap_or_else(|_| panic!("{what}: {} slots stay taken", host.slots_taken()));
    };
    slots_free("dropped").await;
    fs::write(state.join("fault-release"), "busy").unwrap();
    drop(boot(&host, plan(host.new_id().unwrap()), &cancel).await.unwrap());
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(host.slots_taken(), 1, "a slot is free while something of its Sandbox is there");
    fs::remove_file(state.join("fault-release")).unwrap();
    slots_free("dropped, and owed at first").await;

    // What an earlier life left has its slot until the sweep.
    let left = SandboxId::new(pepo_sandbox::Slot::new(77).unwrap());
    fs::create_dir(state.join("jail").join(left.hex())).unwrap();
    assert_eq!((host.found().await.unwrap().len(), host.slots_taken()), (1, 1));
    assert!(host.sweep(&[]).await.unwrap().iter().any(|gone| gone.removed == Some(Ok(()))));
    assert_eq!(host.slots_taken(), 0, "a swept slot stays taken");
}
