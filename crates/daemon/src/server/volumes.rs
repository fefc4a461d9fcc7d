//! Directories of the host that a local caller lends to a new Session: what is wrong with them, and taking them.

use std::collections::HashSet;

use pepo_api::HostVolume;

use super::Problem;
use crate::Pepod;
use crate::workspace::{Connection, Lent, MOST_LENT, PATH};

/// The connection of a request, where its caller is local.
#[derive(Clone, Debug)]
pub(super) struct Local(pub Option<Connection>);

/// Places of a guest that are its kernel's or Pepo's own.
const TAKEN: [&str; 4] = ["/proc", "/sys", "/dev", "/run"];

/// Takes them with the caller's rights.
pub(super) async fn lend(
    pepod: &Pepod,
    local: &Local,
    volumes: Vec<HostVolume>,
    has_workspace: bool,
) -> Result<Vec<Lent>, Problem> {
    if volumes.is_empty() {
        return Ok(Vec::new());
    }
    let Some(connection) = &local.0 else {
        let message = "directories of the host are lent over the local socket alone, by whoever has them";
        return Err(Problem::invalid("volumes", message));
    };
    #[cfg(feature = "fake")]
    if pepod.sessions().config().vmm == crate::config::VmmChoice::Fake {
        return Err(Problem::unsupported("volumes", "a guest that is a process of this host can mount nothing"));
    }
    check(&volumes, has_workspace)?;
    Ok(pepod.workspaces().lend(connection, volumes).await?)
}

fn check(volumes: &[HostVolume], has_workspace: bool) -> Result<(), Problem> {
    let invalid = |message: String| Err(Problem::invalid("volumes", message));
    if volumes.len() > MOST_LENT {
        return invalid(format!("{} directories; at most {MOST_LENT}", volumes.len()));
    }
    let mut targets = HashSet::new();
    for HostVolume { source, target, mode: _ } in volumes {
        if !source.starts_with('/') || source.len() > 4096 || source.contains('\0') {
            return invalid(format!("`{}` is no absolute path of this host", source.escape_debug()));
        }
        let plain = target.strip_prefix('/').is_some_and(|below| {
            !below.is_empty() && below.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
        });
        if !plain || target.len() > 1024 || target.contains('\0') {
            return invalid(format!("`{}` is no plain absolute path of the guest", target.escape_debug()));
        }
        let below = |top: &str| target == top || target.strip_prefix(top).is_some_and(|rest| rest.starts_with('/'));
        if TAKEN.into_iter().any(below) || (has_workspace && below(PATH)) {
            return invalid(format!("`{}` is taken in the guest", target.escape_debug()));
        }
        if !targets.insert(target) {
            return invalid(format!("`{}` is named twice", target.escape_debug()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(source: &str, target: &str) -> HostVolume {
        HostVolume { source: source.into(), target: target.into(), mode: Default::default() }
    }

    #[test]
    fn only_plain_places_that_nobody_has_are_taken() {
        assert!(check(&[volume("/srv/data", "/data"), volume("/srv", "/home/agent/srv")], true).is_ok());
        assert!(check(&[volume("/srv", "/workspace/data")], false).is_ok());
        for (source, target) in [
            ("srv", "/data"),
            ("/srv", "data"),
            ("/srv", "/"),
            ("/srv", "/a/../b"),
            ("/srv", "/a//b"),
            ("/srv", "/proc/1"),
            ("/srv", "/dev"),
            ("/srv", "/workspace"),
            ("/srv", "/workspace/data"),
            ("/srv\0", "/data"),
        ] {
            assert!(check(&[volume(source, target)], true).is_err(), "{source}:{target} was taken");
        }
        assert!(check(&[volume("/a", "/data"), volume("/b", "/data")], false).is_err());
        assert!(check(&vec![volume("/a", "/data"); MOST_LENT + 1], false).is_err());
    }
}
