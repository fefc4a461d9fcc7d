//! Workspaces in a backup: each as the compressed archive that its export is, in parts, since nobody knows before how long
//! it will be. A live one is read while it is used: each file is as it was when it was read, all of them together are not of
//! one moment.
//!
//! ```text
//! create:  tree ─► export in its jail ─► parts ─► workspaces/<hex>/000000, 000001, …
//! restore: parts ─► <state>/store/workspaces/<hex>/ ─► the next pepod makes the tree and imports them, in its jail
//! ```

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use bytes::Bytes;
use pepo_api::{BackupManifest, WorkspaceId};
use pepo_sandbox::jail::Access;
use pepo_sandbox::proto;
use pepo_sandbox::share::Archive;
use tokio::io::AsyncReadExt as _;

use super::{Digesting, header};
use crate::store::WorkspaceRow;
use crate::workspace::Workspaces;
use sha2::{Digest as _, Sha256};

/// Where they are in an archive, and below the store's directory until they are imported.
pub(super) const WORKSPACES: &str = "workspaces/";

/// Beside the parts of one whose import has begun: its tree is what the import made of it.
const BEGUN: &str = "begun";

/// Bytes of one part.
pub(super) const PART: usize = 16 << 20;

/// Parts of one Workspace at the most: 16 TiB.
const PARTS: u32 = 1_000_000;

/// Writes those that have files.
///
/// # Errors
/// One cannot be read, or the reader of the backup went away.
pub(super) fn add<W: Write>(
    tar: &mut tar::Builder<W>,
    manifest: &mut BackupManifest,
    workspaces: &Workspaces,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Handle::current();
    let rows = runtime.block_on(workspaces.store().all_workspaces())?;
    let trees = runtime.block_on(workspaces.trees()).context("cannot look at the Workspaces")?;
    for row in rows.into_iter().filter(|row| trees.contains(&row.id)) {
        if let Some(directory) = &row.directory {
            manifest.lacks.push(format!("{}, which is in the operator's directory `{directory}`", row.id));
            continue;
        }
        let id = row.id;
        match runtime.block_on(workspaces.find(row.app, &id.to_string())) {
            Ok(row) => one(tar, manifest, workspaces, &row).with_context(|| format!("cannot read {id}"))?,
            // Gone since.
            Err(_) => manifest.lacks.push(format!("{id}, which was removed meanwhile")),
        }
    }
    Ok(())
}

fn one<W: Write>(
    tar: &mut tar::Builder<W>,
    manifest: &mut BackupManifest,
    workspaces: &Workspaces,
    row: &WorkspaceRow,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Handle::current();
    let visit = runtime.block_on(workspaces.visit(row, Access::ReadOnly, Archive::Whole))?;
    let all = proto::TarOut { path: "/".to_owned(), user: None };
    let mut export = runtime.block_on(visit.guest().tar_out(all))?;
    let (mut part, mut number) = (Vec::with_capacity(PART), 0);
    let mut over = false;
    while !over {
        match runtime.block_on(export.next()) {
            Some(bytes) => part.extend_from_slice(&bytes?),
            None => over = true,
        }
        while part.len() >= PART || (over && !part.is_empty()) {
            let rest = part.split_off(part.len().min(PART));
            let name = format!("{WORKSPACES}{}/{number:06}", row.id.uuid().simple());
            let mut reader = Digesting { from: &part[..], digest: Sha256::new(), bytes: 0 };
            tar.append_data(&mut header(part.len() as u64), &name, &mut reader)?;
            manifest.files.insert(name, reader.told());
            part = rest;
            number += 1;
        }
    }
    Ok(())
}

/// The place of a part below the directory that is unpacked into, if that is what the name is.
pub(super) fn place(name: &str) -> Option<PathBuf> {
    let (hex, number) = name.strip_prefix(WORKSPACES)?.split_once('/')?;
    let is_hex = hex.len() == 32 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_number = number.len() == 6 && number.parse::<u32>().is_ok_and(|number| number < PARTS);
    (is_hex && is_number).then(|| Path::new("workspaces").join(hex).join(number))
}

/// What a restored backup has of a Workspace, until it is imported.
fn restored(workspaces: &Workspaces, id: WorkspaceId) -> PathBuf {
    workspaces.restored().join(id.uuid().simple().to_string())
}

/// Whether a restored backup waits to be imported into that one.
pub fn waits(workspaces: &Workspaces, id: WorkspaceId) -> bool {
    restored(workspaces, id).is_dir()
}

/// Imports what waits into a tree, and forgets it when all of it is in place. Cut off in the middle, it is done once more.
/// What was on this host before (`there`) stays as it is, and the archive beside it.
///
/// # Errors
/// The parts cannot be read, or the tree does not take them.
pub async fn import(workspaces: &Workspaces, row: &WorkspaceRow, there: bool) -> anyhow::Result<()> {
    let directory = restored(workspaces, row.id);
    let begun = directory.join(BEGUN);
    if !directory.exists() {
        // Somebody else did it meanwhile.
        return Ok(());
    }
    if there && !begun.exists() {
        let aside = directory.with_extension("unused");
        tracing::warn!(workspace = %row.id, archive = %aside.display(), "it is on this host already and stays as it is");
        return tokio::fs::rename(&directory, &aside).await.with_context(|| format!("cannot make {}", aside.display()));
    }
    tokio::fs::write(&begun, []).await.with_context(|| format!("cannot make {}", begun.display()))?;
    let all = proto::TarIn { path: "/".to_owned(), user: None };
    let mut import = workspaces.visitor(row.id, Access::Writable, Archive::Whole).tar_in(all).await?;
    for number in 0..PARTS {
        let path = directory.join(format!("{number:06}"));
        let mut part = match tokio::fs::File::open(&path).await {
            Ok(part) => part,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
            Err(error) => return Err(error).with_context(|| format!("cannot open {}", path.display())),
        };
        let mut piece = vec![0; 256 << 10];
        loop {
            let read = part.read(&mut piece).await.with_context(|| format!("cannot read {}", path.display()))?;
            if read == 0 {
                break;
            }
            import.send(Bytes::copy_from_slice(&piece[..read])).await?;
        }
    }
    import.finish().await?;
    tokio::fs::remove_dir_all(&directory).await.with_context(|| format!("cannot remove {}", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_part_has_a_place() {
        let hex = "0123456789abcdef0123456789abcdef";
        let at = place(&format!("workspaces/{hex}/000007")).expect("a part");
        assert_eq!(at, Path::new("workspaces").join(hex).join("000007"));
        for bad in [
            format!("workspaces/{hex}/7"),
            format!("workspaces/{hex}/../000007"),
            format!("workspaces/../{hex}/000007"),
            format!("workspaces/{}/000007", &hex[1..]),
            format!("workspaces/{}/000007", hex.to_uppercase()),
            format!("workspaces/{hex}"),
        ] {
            assert_eq!(place(&bad), None, "{bad}");
        }
    }
}
