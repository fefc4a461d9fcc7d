//! A guest of a few instructions on `/dev/kvm`. Caller: `vmm::probe`.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// How far the probe guest got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ran {
    /// It wrote its mark and counted as often as it should.
    ToTheEnd,
    /// It runs, but so slowly that it must be interpreted.
    Crawling,
    /// It stopped before, with this KVM exit reason.
    Stuck(u32),
}

const GET_API_VERSION: libc::c_ulong = 0xae00;
const CREATE_VM: libc::c_ulong = 0xae01;
const GET_VCPU_MMAP_SIZE: libc::c_ulong = 0xae04;
const GET_SUPPORTED_CPUID: libc::c_ulong = 0xc008_ae05;
const CREATE_VCPU: libc::c_ulong = 0xae41;
const SET_USER_MEMORY_REGION: libc::c_ulong = 0x4020_ae46;
const RUN: libc::c_ulong = 0xae80;
const SET_REGS: libc::c_ulong = 0x4090_ae82;
const GET_SREGS: libc::c_ulong = 0x8138_ae83;
const SET_SREGS: libc::c_ulong = 0x4138_ae84;
const SET_CPUID2: libc::c_ulong = 0x4008_ae90;

const EXIT_IO: u32 = 2;
/// How often the guest counts to 10,000.
const ROUNDS: usize = 200;
const MEMORY: usize = 0x1_0000;
const MARK: u32 = 0x1234_5678;

/// Where things are in the guest's memory.
const CODE: usize = 0x1000;
const TABLES: usize = 0x2000;
const SEGMENTS: usize = 0x5000;
const MARK_AT: usize = 0x7000;
const STACK: u64 = 0x9000;

#[rustfmt::skip]
const PROGRAM: [u8; 60] = [
    0x48, 0x0f, 0xae, 0x04, 0x25, 0x00, 0x60, 0x00, 0x00,             // fxsave64  [0x6000]
    0x48, 0x0f, 0xae, 0x0c, 0x25, 0x00, 0x60, 0x00, 0x00,             // fxrstor64 [0x6000]
    0x6a, 0x10,                                                       // push ss
    0x68, 0x00, 0x90, 0x00, 0x00,                                     // push rsp
    0x6a, 0x02,                                                       // push rflags
    0x6a, 0x08,                                                       // push cs
    0x68, 0x24, 0x10, 0x00, 0x00,                                     // push the next but one
    0x48, 0xcf,                                                       // iretq
    0xc7, 0x04, 0x25, 0x00, 0x70, 0x00, 0x00, 0x78, 0x56, 0x34, 0x12, // mov [0x7000], MARK
    0xb9, 0x10, 0x27, 0x00, 0x00,                                     // mov ecx, 10000
    0xff, 0xc9,                                                       // dec ecx
    0x75, 0xfc,                                                       // jnz back to dec
    0xe6, 0x80,                                                       // out 0x80, al: back to the host
    0xeb, 0xf3,                                                       // jmp back to mov ecx
];

/// A shared mapping, unmapped on drop.
struct Mapping {
    address: *mut u8,
    length: usize,
}

impl Mapping {
    fn new(length: usize, fd: Option<&OwnedFd>) -> io::Result<Self> {
        let (flags, fd) = match fd {
            Some(fd) => (libc::MAP_SHARED, fd.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, fd, 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { address: address.cast(), length })
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.length);
        // SAFETY: in bounds (just checked), mapped writable, and no reference into it exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address.add(at), bytes.len()) };
    }

    fn read_u32(&self, at: usize) -> u32 {
        assert!(at + 4 <= self.length);
        // SAFETY: in bounds (just checked) and mapped readable; volatile because the guest wrote it.
        unsafe { self.address.add(at).cast::<u32>().read_volatile() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and nobody can reach it any more.
        unsafe { libc::munmap(self.address.cast(), self.length) };
    }
}

fn number(fd: &impl AsRawFd, request: libc::c_ulong, argument: libc::c_ulong) -> io::Result<i32> {
    // SAFETY: the callers' requests take a plain number, not a pointer.
    super::check(unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) })
}

fn object(fd: &impl AsRawFd, request: libc::c_ulong, argument: libc::c_ulong) -> io::Result<OwnedFd> {
    let fd = number(fd, request, argument)?;
    // SAFETY: the request answers with a new descriptor, which nobody else knows.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn buffer(fd: &impl AsRawFd, request: libc::c_ulong, buffer: &mut [u64]) -> io::Result<()> {
    // SAFETY: every caller gives a buffer of at least the size the request encodes (or, for CPUID, announces its
    // capacity in the first word), aligned for its 64-bit fields.
    super::check(unsafe { libc::ioctl(fd.as_raw_fd(), request, buffer.as_mut_ptr()) }).map(drop)
}

/// Runs the probe guest once, for at most `patience` (and a little: it is looked at every 10,000 counts).
///
/// # Errors
/// The system's answer where `/dev/kvm` cannot be opened or refuses a step before the guest runs.
pub fn run_probe_guest(patience: Duration) -> io::Result<Ran> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
    if number(&kvm, GET_API_VERSION, 0)? != 12 {
        return Err(io::Error::other("not version 12 of its interface"));
    }
    let vm = object(&kvm, CREATE_VM, 0)?;
    let memory = Mapping::new(MEMORY, None)?;
    memory.write(CODE, &PROGRAM);
    // One page of 2 MiB, mapped one to one, below three levels of tables.
    for (level, entry) in [(0, 0x3003_u64), (1, 0x4003), (2, 0x83)] {
        memory.write(TABLES + level * 0x1000, &entry.to_le_bytes());
    }
    for (index, descriptor) in [0_u64, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff].into_iter().enumerate() {
        memory.write(SEGMENTS + index * 8, &descriptor.to_le_bytes());
    }
    // slot and flags, guest address, size, our address
    buffer(&vm, SET_USER_MEMORY_REGION, &mut [0, 0, MEMORY as u64, memory.address as u64])?;

    let vcpu = object(&vm, CREATE_VCPU, 0)?;
    const CPUID_ENTRIES: usize = 256;
    let mut cpuid = vec![0; 1 + CPUID_ENTRIES * 5];
    cpuid[0] = CPUID_ENTRIES as u64;
    buffer(&kvm, GET_SUPPORTED_CPUID, &mut cpuid)?;
    buffer(&vcpu, SET_CPUID2, &mut cpuid)?;
    let mut system = [0; 39];
    buffer(&vcpu, GET_SREGS, &mut system)?;
    // A segment is base, then limit and selector, then eight small fields: type, present, dpl, db, s, l, g, avl.
    let segment = |selector: u64, kind: u64, db: u64, long: u64| {
        [0, 0xffff_ffff | selector << 32 | kind << 48 | 1 << 56, db << 8 | 1 << 16 | long << 24 | 1 << 32]
    };
    for (index, words) in [segment(8, 11, 0, 1)].into_iter().chain([segment(16, 3, 1, 0); 5]).enumerate() {
        system[index * 3..index * 3 + 3].copy_from_slice(&words);
    }
    system[24] = SEGMENTS as u64;
    system[25] = 23;
    system[28] = 0x8000_0033; // cr0: paging, protection, the FPU as the kernel has it
    system[30] = TABLES as u64; // cr3
    system[31] = 0x220; // cr4: physical address extension, fxsave
    system[33] = 0x500; // efer: long mode, active
    buffer(&vcpu, SET_SREGS, &mut system)?;
    let mut registers = [0; 18];
    registers[6] = STACK;
    registers[16] = CODE as u64;
    registers[17] = 2;
    buffer(&vcpu, SET_REGS, &mut registers)?;

    let length = usize::try_from(number(&kvm, GET_VCPU_MMAP_SIZE, 0)?).map_err(io::Error::other)?;
    let state = Mapping::new(length, Some(&vcpu))?;
    let deadline = Instant::now() + patience;
    for _ in 0..ROUNDS {
        number(&vcpu, RUN, 0)?;
        let exit = state.read_u32(8);
        if exit != EXIT_IO || memory.read_u32(MARK_AT) != MARK {
            return Ok(Ran::Stuck(exit));
        }
        if Instant::now() > deadline {
            return Ok(Ran::Crawling);
        }
    }
    Ok(Ran::ToTheEnd)
}
