//! QEMU `microvm` in software emulation: its command line, its jail, its limits.
//!
//! It sees the files of its closure, kernel and initial ramdisk, and nothing else: disks, console, control connection and
//! stream device are descriptors. `-sandbox` is a second layer of system call filtering below the jail's (it names what
//! is forbidden; ours names what is allowed).

use std::path::PathBuf;

use serde_json::json;

use super::closure::{self, Closure};
use super::{Boot, Descriptors, Interface, Throttle, clock};
use crate::jail::{Access, Bind, Descriptor, Entry, Filter, Limits, Spec};
use crate::proc;

/// Where QEMU finds the kernel and the initial ramdisk in its root.
const KERNEL: &str = "/kernel";
const INITRD: &str = "/initrd";

/// Numbers of the descriptors inside QEMU.
const SYSTEM: i32 = 10;
const SCRATCH: i32 = 11;
const CONSOLE: i32 = 12;
const CONTROL: i32 = 13;
const VSOCK: i32 = 14;
const TAP: i32 = 15;

/// Translated code is kept in a buffer of this size, MiB; when it is full it is thrown away and begun anew. A Debian
/// userland with Python fills about half.
const TRANSLATION_MIB: u32 = 128;

/// What QEMU needs beside the guest's memory, MiB: translated code, its tables (about as much again), itself.
pub const OVERHEAD_MIB: u32 = 2 * TRANSLATION_MIB + 64;

/// Descriptors QEMU may hold; it uses about 30.
const OPEN_FILES: u64 = 256;

/// The jail of a QEMU that boots `boot` out of `closure`.
pub fn command(closure: &Closure, boot: &Boot, descriptors: &Descriptors) -> Spec {
    let memory = u64::from(boot.memory_mib) << 20;
    let bind = |source: &PathBuf, target: &str| Bind {
        source: source.clone(),
        target: target.into(),
        access: Access::ReadOnly,
    };
    let descriptor = |from, to| Descriptor { from, to };
    Spec {
        name: "vmm".to_owned(),
        program: closure.program.clone(),
        argv: arguments(boot, clock::tsc_khz()),
        env: closure.env.clone(),
        uid: boot.uid,
        entry: Entry::Ours,
        root: closure.root.clone(),
        binds: vec![bind(&boot.kernel, KERNEL), bind(&boot.initrd, INITRD)],
        descriptors: [
            descriptor(descriptors.log, 1),
            descriptor(descriptors.log, 2),
            descriptor(descriptors.system, SYSTEM),
            descriptor(descriptors.scratch, SCRATCH),
            descriptor(descriptors.console, CONSOLE),
            descriptor(descriptors.control, CONTROL),
            descriptor(descriptors.vsock, VSOCK),
        ]
        .into_iter()
        .chain(descriptors.tap.map(|tap| descriptor(tap, TAP)))
        .collect(),
        limits: Limits { file_size: memory.max(boot.scratch_size), open_files: OPEN_FILES },
        filter: Filter::Qemu,
        oom_score_adj: proc::OOM_SCORE,
        gate: descriptors.gate,
    }
}

fn arguments(boot: &Boot, tsc_khz: Option<u64>) -> Vec<String> {
    let Boot { vcpus, memory_mib, throttle, .. } = boot;
    let threads = if *vcpus > 1 { "multi" } else { "single" };
    let mut line = Line(vec!["qemu-system-x86_64".to_owned()]);
    line.flags(&["-nodefaults", "-no-user-config", "-no-reboot"]);
    line.option("-display", "none").option("-monitor", "none");
    line.option("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    line.option("-L", closure::FIRMWARE).option("-bios", closure::FIRMWARE_FILE);
    line.option("-machine", "microvm,memory-backend=ram,x-option-roms=off");
    line.option("-accel", format!("tcg,thread={threads},tb-size={TRANSLATION_MIB}"));
    // All that the emulator can, but for the enhanced `rep movsb`: kernel and C library would copy and fill with it, and it
    // is emulated byte by byte. Without it a copy takes a fifth of the time, a pipe a third (QEMU 7.2, Linux 6.12).
    line.option("-cpu", "max,-erms").option("-smp", vcpus.to_string()).option("-m", format!("{memory_mib}M"));
    // Shared, because the stream device reads and writes guest memory; sealed, so that it cannot shrink it under us.
    line.option("-object", format!("memory-backend-memfd,id=ram,size={memory_mib}M,share=on,seal=on"));
    line.option("-kernel", KERNEL).option("-initrd", INITRD).option("-append", kernel_line(boot, tsc_khz));
    line.option("-chardev", format!("socket,id=console,fd={CONSOLE}")).option("-serial", "chardev:console");
    line.option("-chardev", format!("socket,id=control,fd={CONTROL}")).option("-mon", "chardev=control,mode=control");
    line.disk("system", SYSTEM, "read-only=on", *throttle);
    line.disk("scratch", SCRATCH, "discard=unmap,cache.direct=off", *throttle);
    line.option("-chardev", format!("socket,id=vsock,fd={VSOCK}"));
    line.option("-device", "vhost-user-vsock-device,chardev=vsock");
    if let Some(Interface { mac, .. }) = &boot.interface {
        line.option("-netdev", format!("tap,id=net,fd={TAP}"));
        line.option("-device", format!("virtio-net-device,netdev=net,mac={mac}"));
    }
    line.option("-object", "rng-builtin,id=entropy").option("-device", "virtio-rng-device,rng=entropy");
    line.0
}

/// An argument vector being written.
struct Line(Vec<String>);

impl Line {
    fn flags(&mut self, flags: &[&str]) {
        self.0.extend(flags.iter().map(|flag| (*flag).to_owned()));
    }

    fn option(&mut self, name: &str, value: impl Into<String>) -> &mut Self {
        self.0.extend([name.to_owned(), value.into()]);
        self
    }

    /// A virtio disk whose file is the inherited descriptor `fd`. No lock is taken: the file is the host's to guard.
    fn disk(&mut self, name: &str, fd: i32, file_options: &str, throttle: Option<Throttle>) {
        self.option("-add-fd", format!("fd={fd},set={fd}"));
        let read_only = if file_options.contains("read-only=on") { ",read-only=on" } else { "" };
        let file = format!("driver=file,node-name={name}-file,filename=/dev/fdset/{fd},locking=off,{file_options}");
        self.option("-blockdev", file);
        let raw = format!("driver=raw,node-name={name},file={name}-file{read_only}");
        self.option("-blockdev", raw);
        let mut node = name.to_owned();
        if let Some(Throttle { bytes, operations }) = throttle {
            let limits = json!({ "bps-total": bytes, "iops-total": operations });
            let group = json!({ "qom-type": "throttle-group", "id": format!("{name}-limit"), "limits": limits });
            self.option("-object", group.to_string());
            node = format!("{name}-slow");
            let slow = format!("driver=throttle,node-name={node},throttle-group={name}-limit,file={name}{read_only}");
            self.option("-blockdev", slow);
        }
        self.option("-device", format!("virtio-blk-device,drive={node}"));
    }
}

/// Words every kernel is started with, each for a reason:
/// `console` is where the keeper listens, `quiet` because each character is a trap into QEMU; `panic=-1` and `reboot=t`
/// together with `-no-reboot` make a panic the end of the process. `tsc=reliable`: the kernel's watchdog compares the
/// counter with a timer that stands still while the host runs somebody else, then declares the counter broken and keeps
/// time by ticks it misses. `cryptomgr.notests` saves 0.4 s of self-tests, the last word 0.07 s of collecting jitter,
/// which is no entropy under emulation (the guest has virtio-rng).
const KERNEL_WORDS: [&str; 7] = [
    "console=ttyS0",
    "quiet",
    "panic=-1",
    "reboot=t",
    "tsc=reliable",
    "cryptomgr.notests",
    "initcall_blacklist=jent_mod_init",
];

/// The kernel's command line: [`KERNEL_WORDS`], the clock's rate (see [`clock`]), and the caller's words.
fn kernel_line(boot: &Boot, tsc_khz: Option<u64>) -> String {
    let mut words: Vec<String> = KERNEL_WORDS.map(str::to_owned).into();
    words.extend(tsc_khz.map(|khz| format!("tsc_early_khz={khz}")));
    words.extend(boot.arguments.iter().cloned());
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot() -> Boot {
        Boot {
            vcpus: 2,
            memory_mib: 512,
            kernel: "/state/kernel".into(),
            initrd: "/state/initrd".into(),
            arguments: vec!["pepo.guest=1".to_owned()],
            scratch_size: 1 << 30,
            throttle: Some(Throttle { bytes: 100 << 20, operations: 5000 }),
            uid: 0x7000_0001,
            interface: None,
        }
    }

    #[test]
    fn nothing_on_the_command_line_is_a_path_of_the_host_or_a_network_device() {
        let line = arguments(&boot(), Some(2_500_000));
        assert!(!line.iter().any(|word| word.contains("/state") || word.contains("net")), "{line:#?}");
        assert!(line.iter().any(|word| word.contains("tsc_early_khz=2500000") && word.ends_with("pepo.guest=1")));
        assert!(line.iter().any(|word| word == "tcg,thread=multi,tb-size=128"));
    }

    #[test]
    fn a_network_device_is_a_descriptor() {
        let line = arguments(
            &Boot {
                interface: Some(Interface { mac: "02:00:00:00:00:01".to_owned(), packets_per_second: 1 }),
                ..boot()
            },
            None,
        );
        let net: Vec<&String> = line.iter().filter(|word| word.contains("net")).collect();
        assert_eq!(net, ["-netdev", "tap,id=net,fd=15", "virtio-net-device,netdev=net,mac=02:00:00:00:00:01"]);
    }

    #[test]
    fn the_root_file_system_is_read_only_at_every_layer_and_the_scratch_disk_is_not() {
        let line = arguments(&boot(), None);
        let nodes = |name: &str| -> Vec<String> {
            let named = |word: &&String| word.contains("node-name=") && word.contains(name);
            line.iter().filter(named).cloned().collect()
        };
        assert!(nodes("system").len() == 3 && nodes("system").iter().all(|node| node.contains("read-only=on")));
        assert!(nodes("scratch").len() == 3 && !nodes("scratch").iter().any(|node| node.contains("read-only")));
    }
}
