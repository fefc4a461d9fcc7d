//! PID 1: from the kernel's first program to a machine with an agent.
//!
//! Synchronous, no threads, no runtime. It loads modules, puts the root together, forks the agent, and then only reaps.
//! Called by `main`. What it prints last on the console tells the host why a machine ended:
//!
//! | console | cause |
//! |---|---|
//! | [`AGENT_DIED`] or [`BOOT_FAILED`], from PID 1 | `guest_init_died` |
//! | `Kernel panic - not syncing: Attempted to kill init!`, from the kernel | `guest_init_died` |
//! | `Kernel panic - not syncing: …`, from the kernel, otherwise | `guest_panic` |
//!
//! ```text
//!   initramfs: mounts, modules -> /dev/vda, /dev/vdb -> overlay -> switch root -> fork --> agent (serves)
//!                  the other modules, settings of the kernel, /dev (Activate waits for it) <-'
//!                                                                                  '-> reaps; agent gone: says so, restart
//! ```

use std::fmt::Display;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, WaitOptions, wait};

use pepo_proto::console::{AGENT_DIED, BOOT_FAILED, READY};

use crate::agent::{self, Effects, Settings};
use crate::mount;
use crate::sys::{self, Fork};

/// How long a disk may take to appear (it is there at once, or the host is very busy).
const DISKS: Duration = Duration::from_secs(15);

/// Modules without which there is no root and no agent, on one kernel or another.
const NEEDED: [&str; 7] = [
    "virtio_mmio.ko",
    "virtio_pci.ko",
    "virtio_blk.ko",
    "erofs.ko",
    "ext4.ko",
    "overlay.ko",
    "vmw_vsock_virtio_transport.ko",
];

/// Streams not accepted yet that the kernel holds for the agent: all that a host may have. One more it refuses, as if nobody
/// listened.
const BACKLOG: i32 = pepo_proto::MAX_STREAMS as i32;

/// Kernel messages from here on are kept from the console: it is slow, and programs can cause them. A panic still shows.
const QUIET: i32 = 1;

/// Whether this process is PID 1 of a guest that Pepo started.
pub fn is_guest() -> bool {
    rustix::process::getpid().is_init()
        && (Path::new("/proc/cmdline").exists() || mount::first().is_ok())
        && fs::read_to_string("/proc/cmdline")
            .is_ok_and(|line| line.split_ascii_whitespace().any(|word| word == "pepo.guest=1"))
}

/// Runs the guest. Returns only where even ending it failed.
pub fn run() -> ExitCode {
    console_as_stdio();
    let (listener, later) = match start() {
        Ok(started) => started,
        Err(error) => {
            say(format!("{BOOT_FAILED} {}", agent::explain(error.as_ref())));
            return end();
        }
    };
    // The agent waits at Activate for the other end to close; without the pipe it waits for nothing.
    let (settled, settling) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok().unzip();
    match sys::fork_single_threaded() {
        Ok(Fork::Child) => {
            drop((settling, later));
            let mut settings = Settings::new(Effects::Pid1);
            settings.settled = settled;
            let error = agent::run(listener, settings);
            say(format!("pepo-guest: the agent ends: {error:?}"));
            ExitCode::FAILURE
        }
        Ok(Fork::Parent(child)) => {
            drop((listener, settled));
            let rest = settle(later);
            drop(settling);
            rest.iter().for_each(load);
            note("all loaded");
            let how = reap_until(child);
            say(format!("{AGENT_DIED} {how}"));
            end()
        }
        Err(error) => {
            say(format!("{BOOT_FAILED} no second process: {error}"));
            end()
        }
    }
}

fn end() -> ExitCode {
    // The host reads the console: let the line get out.
    sleep(Duration::from_millis(50));
    mount::power_off();
    ExitCode::FAILURE
}

/// The kernel gives no descriptors where the initramfs has no console node: take them, or the first files opened would
/// become standard output.
fn console_as_stdio() {
    let Ok(console) = rustix::fs::open("/dev/console", OFlags::RDWR | OFlags::NOCTTY, Mode::empty()) else {
        return;
    };
    let copy = |slot: fn(&OwnedFd) -> rustix::io::Result<()>| slot(&console);
    // Without a console there is nobody to tell.
    let _ = copy(|console| rustix::stdio::dup2_stdin(console));
    let _ = copy(|console| rustix::stdio::dup2_stdout(console));
    let _ = copy(|console| rustix::stdio::dup2_stderr(console));
    use std::os::fd::AsRawFd;
    if console.as_raw_fd() <= 2 {
        // It is one of the three itself, and must stay open.
        std::mem::forget(console);
    }
}

/// One line on the console.
fn say(text: impl Display) {
    let line = format!("\r\n{text}\r\n");
    // Where this fails nothing can be said.
    let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
}

/// One line in the kernel's log, with its clock. Without its end the kernel shows it to nobody before the next one comes.
pub fn note(text: impl Display) {
    let _ = fs::write("/dev/kmsg", format!("<6>pepo-guest: {text}\n"));
}

/// A module that is open and not loaded yet.
struct Module {
    name: String,
    file: OwnedFd,
}

/// Everything up to the listening socket, and the modules that can wait.
fn start() -> Result<(OwnedFd, Vec<Module>), Box<dyn std::error::Error>> {
    note("init");
    let later = modules();
    note("modules");
    disk("/dev/vda")?;
    disk("/dev/vdb")?;
    mount::root()?;
    mount::switch()?;
    note("root");
    for fault in mount::limit() {
        note(agent::explain(&fault));
    }
    // Whoever is killed for memory, it is neither of these two.
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-1000") {
        note(format!("protection from the memory killer: {error}"));
    }
    rustix::process::umask(Mode::from_raw_mode(0o022));
    sys::default_signals();
    let listener = sys::vsock_listen(pepo_proto::AGENT_PORT, BACKLOG)?;
    note("listening");
    if let Err(error) = sys::console_level(QUIET) {
        note(format!("console level: {error}"));
    }
    say(READY);
    Ok((listener, later))
}

/// Modules that drive a device, and the device's number on the virtio bus: without it they are of no use.
const OF_DEVICE: [(&str, u32); 4] =
    [("failover.ko", NETWORK), ("net_failover.ko", NETWORK), ("virtio_net.ko", NETWORK), ("virtio_rng.ko", RANDOM)];
const NETWORK: u32 = 1;
const RANDOM: u32 = 4;

/// What nobody waits for: the host gives bytes for the random generator with Activate.
const LAST: [&str; 1] = ["virtio_rng.ko"];

/// Numbers of the virtio devices there are.
fn devices() -> Vec<u32> {
    let entries = fs::read_dir("/sys/bus/virtio/devices").into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| {
        let text = fs::read_to_string(entry.path().join("device")).ok()?;
        u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
    };
    entries.filter_map(number).collect()
}

/// What programs need and the agent does not: done while the host greets the agent. Gives back what can wait even longer.
fn settle(later: Vec<Module>) -> Vec<Module> {
    mount::copy_up();
    let devices = devices();
    let useful = |module: &Module| {
        let of = OF_DEVICE.iter().find(|(name, _)| *name == module.name);
        of.is_none_or(|(_, device)| devices.contains(device))
    };
    let (last, later): (Vec<_>, Vec<_>) =
        later.into_iter().filter(useful).partition(|module| LAST.contains(&module.name.as_str()));
    later.iter().for_each(load);
    for fault in mount::furnish() {
        note(agent::explain(&fault));
    }
    note("settled");
    last
}

/// Loads the modules of `/modules/order` up to the last one that the agent needs, and opens the rest.
fn modules() -> Vec<Module> {
    let order = fs::read_to_string("/modules/order").unwrap_or_default();
    let names = order.lines().map(str::trim).filter(|name| !name.is_empty() && !name.contains('/'));
    let mut modules = vec![];
    for name in names {
        match rustix::fs::open(format!("/modules/{name}"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => modules.push(Module { name: name.to_owned(), file }),
            Err(error) => note(format!("module {name}: {error}")),
        }
    }
    let needed = modules.iter().rposition(|module| NEEDED.contains(&module.name.as_str()));
    let later = modules.split_off(needed.map_or(modules.len(), |last| last + 1));
    modules.iter().for_each(load);
    later
}

/// Loads a module. One that cannot be loaded is told: if it mattered, a disk or a socket is missing.
fn load(module: &Module) {
    match rustix::system::finit_module(&module.file, c"", 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => note(format!("module {}: {error}", module.name)),
    }
}

/// Waits for a disk.
fn disk(path: &str) -> io::Result<()> {
    let until = Instant::now() + DISKS;
    while !Path::new(path).exists() {
        if Instant::now() > until {
            return Err(io::Error::other(format!("no disk {path} within {} s", DISKS.as_secs())));
        }
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Reaps every process until `child` has ended; tells how it did.
fn reap_until(child: i32) -> String {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if Some(pid) == Pid::from_raw(child) => {
                return match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => format!("exit code {code}"),
                    (_, Some(signal)) => format!("signal {signal}"),
                    _ => "no reason known".to_owned(),
                };
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return format!("not seen: {error}"),
        }
    }
}
