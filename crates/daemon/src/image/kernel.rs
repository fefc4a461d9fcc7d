//! A distribution's kernel, made ready to boot: the ELF file inside the compressed one, and the modules a guest needs in
//! the order in which they load.
//!
//! The kernel is unpacked here because an emulated processor takes half a second for what this one does in a fraction of
//! it, and Firecracker takes nothing else. The modules' dependencies are those that the kernel's build wrote into each of
//! them (`.modinfo`), so nothing has to be generated first; what the kernel has built in is listed in `modules.builtin`.
//! Called by the builder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// What a guest needs of its kernel beyond what every kernel has built in. One that is built in is not looked for.
pub const WANTED: [&str; 11] = [
    "virtio_mmio",
    "virtio_blk",
    "vmw_vsock_virtio_transport",
    "erofs",
    "ext4",
    "overlay",
    "fuse",
    "virtio_net",
    "virtio_rng",
    "vmgenid",
    "virtio_balloon",
];

/// Of those, what an older kernel may lack, or one that is never asked for its memory.
const OPTIONAL: [&str; 2] = ["vmgenid", "virtio_balloon"];

/// The largest kernel or module, unpacked, bytes.
const UNPACKED: u64 = 512 << 20;

/// Why a kernel cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is not a kernel as expected.
    #[error("kernel: {0}")]
    Kernel(String),
    /// A module is needed and is neither there nor built in.
    #[error("kernel {release} has no module {name}")]
    Missing {
        /// The kernel's release.
        release: String,
        /// The module.
        name: String,
    },
    /// A module is not one.
    #[error("module {name}: {reason}")]
    Module {
        /// Which.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A file cannot be read.
    #[error("read {}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|source| Error::Io { path: path.to_owned(), source })
}

/// One module, unpacked and unsigned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Its name, with underscores.
    pub name: String,
    /// The object file.
    pub bytes: Vec<u8>,
}

/// The ELF file in a `bzImage`.
///
/// # Errors
/// [`Error::Kernel`].
pub fn unpack(image: &[u8]) -> Result<Vec<u8>, Error> {
    let wrong = |what: &str| Error::Kernel(what.to_owned());
    if image.starts_with(ELF) {
        return Ok(image.to_vec());
    }
    // The header of the x86 boot protocol, 2.08 and later: where the payload begins, and how long it is.
    if image.get(0x202..0x206) != Some(b"HdrS") || number(image, 0x206, 2).is_none_or(|version| version < 0x208) {
        return Err(wrong("it has no boot header of protocol 2.08 or later"));
    }
    let sectors = match image.get(0x1f1) {
        Some(0) | None => 4,
        Some(sectors) => u64::from(*sectors),
    };
    let offset = number(image, 0x248, 4).unwrap_or(0) + (sectors + 1) * 512;
    let length = number(image, 0x24c, 4).unwrap_or(0);
    let payload = slice(image, offset, length).ok_or_else(|| wrong("its payload is beyond its end"))?;
    let elf = decompress(payload).map_err(|error| wrong(&format!("its payload cannot be unpacked: {error}")))?;
    if elf.starts_with(ELF) { Ok(elf) } else { Err(wrong("its payload is not an ELF file")) }
}

const ELF: &[u8] = b"\x7fELF";

/// By the first bytes. A kernel's payload may have its length appended; each of these formats knows its own end.
fn decompress(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    match bytes {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(bytes).map_err(io::Error::other)?;
            decoder.take(UNPACKED).read_to_end(&mut out)?;
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            let mut input = bytes;
            lzma_rs::xz_decompress(&mut input, &mut Capped(&mut out)).map_err(|error| match error {
                lzma_rs::error::Error::IoError(error) => error,
                error => io::Error::other(format!("{error:?}")),
            })?;
        }
        [0x02, 0x21, 0x4c, 0x18, rest @ ..] => lz4_legacy(rest, &mut out)?,
        [0x1f, 0x8b, ..] => {
            flate2::read::GzDecoder::new(bytes).take(UNPACKED).read_to_end(&mut out)?;
        }
        _ => return Err(io::Error::other("unknown compression")),
    }
    if out.len() as u64 >= UNPACKED {
        return Err(io::Error::other("too large"));
    }
    Ok(out)
}

/// A vector that does not grow beyond [`UNPACKED`].
struct Capped<'a>(&'a mut Vec<u8>);

impl io::Write for Capped<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if (self.0.len() + bytes.len()) as u64 >= UNPACKED {
            return Err(io::Error::other("too large"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// LZ4's legacy frame: blocks of 8 MiB, each with its length before it, to the end of the file.
fn lz4_legacy(mut rest: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
    const BLOCK: usize = 8 << 20;
    // A last length without a block is the size that the kernel's build appends.
    while let Some(length) = number(rest, 0, 4)
        && rest.len() > 4
    {
        let block = slice(rest, 4, length).ok_or_else(|| io::Error::other("a block is beyond the end"))?;
        out.extend(lz4_flex::block::decompress(block, BLOCK).map_err(io::Error::other)?);
        if out.len() as u64 >= UNPACKED {
            return Err(io::Error::other("too large"));
        }
        rest = &rest[4 + block.len()..];
    }
    Ok(())
}

/// The modules of `wanted` with all that they depend on, in the order in which they load, from a kernel's tree
/// (`lib/modules/<release>`).
///
/// # Errors
/// Any [`Error`].
pub fn modules(tree: &Path, wanted: &[&str]) -> Result<Vec<Module>, Error> {
    let release = tree.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let built_in = tree.join("modules.builtin");
    let built_in = fs::read_to_string(&built_in).map_err(|source| Error::Io { path: built_in, source })?;
    let built_in: BTreeSet<String> = built_in.lines().filter_map(|line| name_of(Path::new(line))).collect();
    let mut files = BTreeMap::new();
    find(&tree.join("kernel"), &mut files)?;
    let mut order = Order { release, built_in, files, seen: BTreeSet::new(), out: Vec::new() };
    for name in wanted {
        order.add(name)?;
    }
    Ok(order.out)
}

struct Order {
    release: String,
    built_in: BTreeSet<String>,
    files: BTreeMap<String, PathBuf>,
    seen: BTreeSet<String>,
    out: Vec<Module>,
}

impl Order {
    fn add(&mut self, name: &str) -> Result<(), Error> {
        // Seen before it is loaded: a circle of soft dependencies ends here.
        if self.built_in.contains(name) || !self.seen.insert(name.to_owned()) {
            return Ok(());
        }
        let Some(path) = self.files.get(name).cloned() else {
            if OPTIONAL.contains(&name) {
                return Ok(());
            }
            return Err(Error::Missing { release: self.release.clone(), name: name.to_owned() });
        };
        let wrong = |reason: String| Error::Module { name: name.to_owned(), reason };
        let raw = read(&path)?;
        let bytes = if raw.starts_with(ELF) { raw } else { decompress(&raw).map_err(|e| wrong(e.to_string()))? };
        let info = module_info(&bytes).ok_or_else(|| wrong("it has no .modinfo".to_owned()))?;
        for (key, value) in &info {
            match key.as_str() {
                "depends" => {
                    for one in value.split(',').filter(|one| !one.is_empty()) {
                        self.add(&one.replace('-', "_"))?;
                    }
                }
                // "pre: a b post: c": those before, if there are any; the others are nobody's need.
                "softdep" => {
                    let before = value.split("post:").next().unwrap_or_default();
                    for one in before.split_whitespace().filter(|one| *one != "pre:") {
                        match self.add(&one.replace('-', "_")) {
                            Ok(()) | Err(Error::Missing { .. }) => {}
                            Err(error) => return Err(error),
                        }
                    }
                }
                _ => {}
            }
        }
        self.out.push(Module { name: name.to_owned(), bytes: unsigned(bytes) });
        Ok(())
    }
}

fn find(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), Error> {
    let wrong = |source| Error::Io { path: directory.to_owned(), source };
    for entry in fs::read_dir(directory).map_err(wrong)? {
        let entry = entry.map_err(wrong)?;
        let kind = entry.file_type().map_err(wrong)?;
        if kind.is_dir() {
            find(&entry.path(), files)?;
        } else if kind.is_file()
            && let Some(name) = name_of(&entry.path())
        {
            files.insert(name, entry.path());
        }
    }
    Ok(())
}

/// `kernel/fs/overlayfs/overlay.ko.xz` is `overlay`; a dash is an underscore.
fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (name, rest) = file.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst").then(|| name.replace('-', "_"))
}

/// Keys and values of a module's `.modinfo`.
fn module_info(elf: &[u8]) -> Option<Vec<(String, String)>> {
    // 64-bit little-endian, as everything this runs on is.
    if !elf.starts_with(ELF) || elf.get(4..6) != Some(&[2, 1]) {
        return None;
    }
    let table = number(elf, 0x28, 8)?;
    let (size, count, names) = (number(elf, 0x3a, 2)?, number(elf, 0x3c, 2)?, number(elf, 0x3e, 2)?);
    let header = |index: u64| slice(elf, table.checked_add(index.checked_mul(size)?)?, 64);
    let names = header(names)?;
    let names = slice(elf, number(names, 0x18, 8)?, number(names, 0x20, 8)?)?;
    for index in 0..count {
        let section = header(index)?;
        let name = names.get(usize::try_from(number(section, 0, 4)?).ok()?..)?;
        if name.split(|byte| *byte == 0).next() != Some(b".modinfo") {
            continue;
        }
        let bytes = slice(elf, number(section, 0x18, 8)?, number(section, 0x20, 8)?)?;
        let lines = bytes.split(|byte| *byte == 0).filter_map(|line| {
            let (key, value) = std::str::from_utf8(line).ok()?.split_once('=')?;
            Some((key.to_owned(), value.to_owned()))
        });
        return Some(lines.collect());
    }
    None
}

/// Without the signature at its end. Checking one takes an emulated processor 15 ms, for a file that came with the kernel
/// in one package: whoever could change the one could change the other.
fn unsigned(mut module: Vec<u8>) -> Vec<u8> {
    const MARK: &[u8] = b"~Module signature appended~\n";
    /// The record before the mark; its last four bytes are the signature's length, big-endian.
    const RECORD: usize = 12;
    let signed = module.strip_suffix(MARK).and_then(|rest| {
        let length = u32::from_be_bytes(*rest.last_chunk()?);
        rest.len().checked_sub(RECORD)?.checked_sub(usize::try_from(length).ok()?)
    });
    if let Some(end) = signed {
        module.truncate(end);
    }
    module
}

fn slice(bytes: &[u8], offset: u64, length: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    bytes.get(start..start.checked_add(usize::try_from(length).ok()?)?)
}

/// A little-endian number of that many bytes (at most 8).
fn number(bytes: &[u8], offset: u64, length: u64) -> Option<u64> {
    let bytes = slice(bytes, offset, length)?;
    Some(bytes.iter().rev().fold(0, |sum, byte| (sum << 8) | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with nothing but a `.modinfo`, and the signature of a signed module at its end if wanted.
    fn module(info: &[&str], signed: bool) -> Vec<u8> {
        let info: Vec<u8> = info.iter().flat_map(|line| line.bytes().chain([0])).collect();
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut out = vec![0; 64];
        out[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        let info_at = out.len();
        out.extend(&info);
        let names_at = out.len();
        out.extend(names);
        let table = out.len();
        let mut section = |name: u32, at: usize, length: usize| {
            let mut header = [0_u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(length as u64).to_le_bytes());
            out.extend(header);
        };
        section(0, 0, 0);
        section(1, info_at, info.len());
        section(10, names_at, names.len());
        out[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        out[0x3a..0x3c].copy_from_slice(&64_u16.to_le_bytes());
        out[0x3c..0x3e].copy_from_slice(&3_u16.to_le_bytes());
        out[0x3e..0x40].copy_from_slice(&2_u16.to_le_bytes());
        if signed {
            out.extend([7; 300]);
            out.extend([0, 0, 2, 0, 0, 0, 0, 0]);
            out.extend(300_u32.to_be_bytes());
            out.extend(b"~Module signature appended~\n");
        }
        out
    }

    /// A kernel's tree: virtio-like names, a dash where depmod shows an underscore, something built in, a soft dependency.
    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("dir");
        let root = dir.path().join("6.0-test");
        let put = |path: &str, bytes: &[u8]| {
            let path = root.join("kernel").join(path);
            fs::create_dir_all(path.parent().expect("parent")).expect("make");
            fs::write(path, bytes).expect("write");
        };
        put("drivers/ring.ko", &module(&["name=ring", "depends="], true));
        put("drivers/bus.ko", &module(&["name=bus", "depends=ring"], true));
        put("drivers/bus-blk.ko", &module(&["name=bus_blk", "depends=bus,ring"], true));
        put("net/sock.ko", &module(&["name=sock", "depends=bus-core,bus,ring", "softdep=pre: crc post: late"], false));
        let mut xz = Vec::new();
        lzma_rs::xz_compress(&mut &module(&["name=crc", "depends="], true)[..], &mut xz).expect("compress");
        put("lib/crc.ko.xz", &xz);
        put("net/late.ko", &module(&["name=late", "depends="], false));
        fs::write(root.join("modules.builtin"), "kernel/drivers/bus-core.ko\nkernel/fs/ext4/ext4.ko\n").expect("write");
        dir
    }

    #[test]
    fn modules_come_after_what_they_need() {
        let dir = tree();
        let got = modules(&dir.path().join("6.0-test"), &["bus_blk", "ext4", "sock"]).expect("modules");
        let names: Vec<&str> = got.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["ring", "bus", "bus_blk", "crc", "sock"]);
        for one in &got {
            assert!(one.bytes.starts_with(ELF), "{} is not unpacked", one.name);
            assert!(!one.bytes.ends_with(b"~\n"), "{} is signed", one.name);
        }
        assert_eq!(got[0].bytes, module(&["name=ring", "depends="], false));
    }

    #[test]
    fn a_module_that_is_nowhere_is_named() {
        let dir = tree();
        let error = modules(&dir.path().join("6.0-test"), &["bus_blk", "zfs"]).expect_err("missing");
        assert_eq!(error.to_string(), "kernel 6.0-test has no module zfs");
        assert!(modules(&dir.path().join("6.0-test"), &["vmgenid"]).expect("optional").is_empty());
        assert!(modules(&dir.path().join("none"), &["x"]).is_err());
    }

    #[test]
    fn nonsense_is_refused_and_never_panics() {
        for bytes in [&b""[..], b"\x7fELF", &[0x7f; 64], &module(&["a=b"], false)[..70]] {
            assert!(module_info(bytes).is_none());
            assert!(unpack(bytes).is_err() || bytes.starts_with(ELF));
        }
        let mut wild = module(&["a=b"], false);
        wild[0x28..0x30].fill(0xff);
        assert!(module_info(&wild).is_none());
        assert_eq!(unsigned(b"~Module signature appended~\n".to_vec()), b"~Module signature appended~\n");
    }

    #[test]
    fn a_kernel_is_found_in_its_wrapping() {
        let elf = [ELF, &[9; 5000]].concat();
        let mut xz = Vec::new();
        lzma_rs::xz_compress(&mut &elf[..], &mut xz).expect("compress");
        let block = lz4_flex::block::compress(&elf);
        let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
        lz4.extend((block.len() as u32).to_le_bytes());
        lz4.extend(&block);
        // As the kernel's build does: the unpacked size after the payload.
        lz4.extend((elf.len() as u32).to_le_bytes());
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        io::Write::write_all(&mut gzip, &elf).expect("compress");
        let gzip = gzip.finish().expect("compress");
        for payload in [xz, lz4, gzip] {
            let mut image = vec![0; 1024 + 64];
            image[0x1f1] = 1;
            image[0x202..0x206].copy_from_slice(b"HdrS");
            image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
            image[0x248..0x24c].copy_from_slice(&64_u32.to_le_bytes());
            image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
            image.extend(&payload);
            assert_eq!(unpack(&image).expect("unpacked"), elf);
            image.truncate(1100);
            assert!(unpack(&image).is_err(), "a cut one was taken");
        }
    }
}
