//! Loop devices: files as disks. Caller: `volume`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

const CTL_GET_FREE: libc::c_ulong = 0x4C82;
const CONFIGURE: libc::c_ulong = 0x4C0A;
const GET_STATUS64: libc::c_ulong = 0x4C05;
const SET_CAPACITY: libc::c_ulong = 0x4C07;
const RESIZE: libc::c_ulong = 0x4008_6610;
const AUTOCLEAR: u32 = 4;
const DIRECT_IO: u32 = 16;
const TRIM: libc::c_ulong = 0xC018_5879;

/// `struct loop_info64`: how a file is a disk.
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

/// The number of a device that nobody uses now.
pub fn free(control: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: this request takes no argument.
    let number = check(unsafe { libc::ioctl(control.as_raw_fd(), CTL_GET_FREE as _) })?;
    u32::try_from(number).map_err(io::Error::other)
}

/// Makes `file` the disk of a free device, until nobody has the device open.
pub fn configure(device: BorrowedFd<'_>, file: BorrowedFd<'_>, direct: bool) -> io::Result<()> {
    // SAFETY: plain integers and arrays of them, for which all bits zero is a value.
    let mut config: Config = unsafe { std::mem::zeroed() };
    config.fd = u32::try_from(file.as_raw_fd()).map_err(io::Error::other)?;
    config.block_size = 4096;
    config.info.flags = AUTOCLEAR | if direct { DIRECT_IO } else { 0 };
    // SAFETY: the kernel reads the structure, which has its layout and outlives the call.
    check(unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE as _, &raw const config) }).map(drop)
}

/// File system and number of the file that is the device's disk; `None`: it has none.
pub fn backing(device: BorrowedFd<'_>) -> io::Result<Option<(u64, u64)>> {
    // SAFETY: plain integers and arrays of them, for which all bits zero is a value.
    let mut info: Info = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes the structure, which has its layout and outlives the call.
    match check(unsafe { libc::ioctl(device.as_raw_fd(), GET_STATUS64 as _, &raw mut info) }) {
        Ok(_) => Ok(Some((info.device, info.inode))),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes a device as large as its file is by now.
pub fn look_again(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: this request takes no argument.
    check(unsafe { libc::ioctl(device.as_raw_fd(), SET_CAPACITY as _, 0) }).map(drop)
}

/// Makes the ext4 that this directory is of so many blocks large, whoever uses it meanwhile. Needs `SYS_RESOURCE`.
pub fn grow(root: BorrowedFd<'_>, blocks: u64) -> io::Result<()> {
    // SAFETY: the kernel reads the one word, which outlives the call.
    check(unsafe { libc::ioctl(root.as_raw_fd(), RESIZE as _, &raw const blocks) }).map(drop)
}

/// Gives a file system's free space back to the disk below it; how many bytes.
pub fn trim(root: BorrowedFd<'_>) -> io::Result<u64> {
    // start, length, least extent
    let mut range: [u64; 3] = [0, u64::MAX, 64 * 1024];
    // SAFETY: the kernel reads and writes the three words, which outlive the call.
    check(unsafe { libc::ioctl(root.as_raw_fd(), TRIM as _, &raw mut range) })?;
    Ok(range[1])
}
