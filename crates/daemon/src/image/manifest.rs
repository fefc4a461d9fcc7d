//! `image.json`: what an Image is, and what its digest is made of.
//!
//! Written by the builder, checked by pepod. Its bytes are canonical (sorted keys, no spaces) and hold nothing of when and
//! where it was built, so the same packages by the same tools with the same recipe have the same digest: the SHA-256 of
//! these bytes. The files are in it by theirs.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::recipe::Flat;

/// Changes when the same inputs are made into something else: an Image of another format is built again.
pub const FORMAT: u32 = 1;

/// The root file system's file.
pub const ROOT: &str = "rootfs.erofs";
/// The kernel's: ELF, unpacked.
pub const KERNEL: &str = "vmlinux";
/// The archive of the kernel's modules.
pub const MODULES: &str = "modules.cpio";
/// This.
pub const MANIFEST: &str = "image.json";

/// The files that a manifest lists: all but itself.
pub const FILES: [&str; 3] = [ROOT, KERNEL, MODULES];

/// The longest manifest, bytes: 3,000 packages take a quarter of it, the files of a recipe up to 43 MiB.
pub const BYTES: u64 = 64 << 20;

/// What an Image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The digest of what it was asked to be; see [`super::inputs_digest`].
    pub inputs: String,
    /// The recipe.
    pub recipe: Flat,
    /// The packages in it, sorted, and the kernel's.
    pub packages: Vec<Package>,
    /// Tools whose version shows in the result.
    pub tools: BTreeMap<String, String>,
    /// The kernel's release.
    pub kernel: String,
    /// The time that files carry which the build made, seconds since 1970.
    pub epoch: u64,
    /// The files beside it.
    pub files: BTreeMap<String, FileEntry>,
}

/// One package, exactly.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Package {
    /// Name.
    pub name: String,
    /// Version.
    pub version: String,
    /// Architecture.
    pub architecture: String,
    /// SHA-256 of its file, as the signed list has it.
    pub sha256: String,
}

/// One file, exactly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256.
    pub sha256: String,
}

impl FileEntry {
    /// Reads it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(path: &Path) -> io::Result<Self> {
        let (bytes, sha256) = super::build::hash(path)?;
        Ok(FileEntry { bytes, sha256 })
    }
}

impl Manifest {
    /// The canonical bytes.
    ///
    /// # Errors
    /// None in practice: every key is text.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        // Through a value, whose maps are sorted.
        Ok(serde_json::to_vec(&serde_json::to_value(self)?)?)
    }

    /// The Image's digest, as hex.
    ///
    /// # Errors
    /// As [`Manifest::to_bytes`].
    pub fn digest(&self) -> io::Result<String> {
        Ok(super::hex(&Sha256::digest(self.to_bytes()?)))
    }

    /// Bytes of all its files.
    pub fn size(&self) -> u64 {
        self.files.values().map(|file| file.bytes).sum()
    }
}

/// The packages by dpkg's list (`name version architecture` a line) with the hashes of apt's (records of `Package:`,
/// `Version:`, `Architecture:`, `SHA256:` in any order, each begun by `Package:`). Records of packages that are in no list,
/// such as the kernel's, which is not installed, are added.
///
/// # Errors
/// What is wrong with the lists.
pub fn packages(installed: &str, records: &str) -> Result<Vec<Package>, String> {
    let mut hashes: BTreeMap<(String, String), (String, String)> = BTreeMap::new();
    let mut record = [const { String::new() }; 4];
    let mut flush = |record: &mut [String; 4]| {
        let [name, version, architecture, sha256] = std::mem::take(record);
        if !name.is_empty() && !sha256.is_empty() {
            hashes.insert((name, version), (architecture, sha256));
        }
    };
    for line in records.lines() {
        let Some((key, value)) = line.split_once(": ") else { continue };
        let place = match key {
            "Package" => {
                flush(&mut record);
                0
            }
            "Version" => 1,
            "Architecture" => 2,
            "SHA256" => 3,
            _ => continue,
        };
        value.trim().clone_into(&mut record[place]);
    }
    flush(&mut record);
    let mut out = Vec::new();
    for line in installed.lines().filter(|line| !line.is_empty()) {
        let mut words = line.split(' ');
        let (Some(name), Some(version), Some(architecture)) = (words.next(), words.next(), words.next()) else {
            return Err(format!("{line:?} is not a package, a version and an architecture"));
        };
        let key = (name.to_owned(), version.to_owned());
        let (_, sha256) = hashes.remove(&key).ok_or_else(|| format!("there is no hash for {name} {version}"))?;
        let (name, version) = key;
        out.push(Package { name, version, architecture: architecture.to_owned(), sha256 });
    }
    let rest = hashes.into_iter().map(|((name, version), (architecture, sha256))| Package {
        name,
        version,
        architecture,
        sha256,
    });
    out.extend(rest.filter(|package| package.name.starts_with("linux-image-")));
    out.sort();
    Ok(out)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::image::recipe;

    pub fn manifest() -> Manifest {
        let text = recipe::shipped("base").expect("base");
        Manifest {
            format: FORMAT,
            inputs: "11".repeat(32),
            recipe: recipe::resolve(text, &[], &BTreeMap::new()).expect("recipe"),
            packages: packages("a 1 amd64\n", "Package: a\nVersion: 1\nSHA256: ff\n").expect("packages"),
            tools: BTreeMap::from([("mkfs.erofs".to_owned(), "1.5".to_owned())]),
            kernel: "6.12".to_owned(),
            epoch: 1,
            files: BTreeMap::new(),
        }
    }

    #[test]
    fn the_digest_is_of_the_content() {
        let one = manifest();
        assert_eq!(one.digest().expect("digest"), manifest().digest().expect("digest"));
        let read: Manifest = serde_json::from_slice(&one.to_bytes().expect("bytes")).expect("read");
        assert_eq!(read.to_bytes().expect("bytes"), one.to_bytes().expect("bytes"));
        let changed = [
            Manifest { kernel: "6.13".to_owned(), ..manifest() },
            Manifest { epoch: 2, ..manifest() },
            Manifest { tools: BTreeMap::new(), ..manifest() },
            Manifest {
                packages: packages("a 2 amd64\n", "Package: a\nVersion: 2\nSHA256: ff\n").expect("packages"),
                ..manifest()
            },
            Manifest {
                packages: packages("a 1 amd64\n", "Package: a\nVersion: 1\nSHA256: fe\n").expect("packages"),
                ..manifest()
            },
        ];
        for other in changed {
            assert_ne!(other.digest().expect("digest"), one.digest().expect("digest"));
        }
    }

    #[test]
    fn every_installed_package_has_its_hash() {
        let records = "Package: b\nVersion: 2\nArchitecture: all\nSHA256: bb\n\nPackage: a\nSHA256: aa\nVersion: 1\n\
                       Package: linux-image-x\nVersion: 9\nArchitecture: amd64\nSHA256: cc\nPackage: z\nVersion: 1\nSHA256: dd\n";
        let got = packages("a 1 amd64\nb 2 all\n", records).expect("packages");
        let names: Vec<_> = got.iter().map(|one| (one.name.as_str(), one.sha256.as_str())).collect();
        assert_eq!(names, [("a", "aa"), ("b", "bb"), ("linux-image-x", "cc")]);
        assert!(packages("a 2 amd64\n", records).is_err(), "another version's hash was taken");
        assert!(packages("a\n", records).is_err());
    }
}
