//! The two walls of an instance on a test's own host, taken away: what has to be proved of each alone, or measured without
//! both.

use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};

use crate::Instance;
use crate::world::{World, nft};

/// Walls that are taken away, and put back as they were at the end.
pub struct Walls {
    /// Each namespace with the rules that were in it.
    were: Vec<(PathBuf, String)>,
    halted: Pid,
}

impl Walls {
    /// Takes those in the Sandboxes' namespaces away, or that in the host's, or both. What is left translates addresses, and
    /// no more. The privileged half is halted meanwhile, since it would put its own back.
    pub fn remove(world: &World, instance: &Instance, inside: bool, outside: bool) -> Self {
        let halted = Pid::from_raw(instance.pids("pepo-host")[0]).expect("pid");
        kill_process(halted, Signal::STOP).expect("halt");
        let mut walls = Walls { were: Vec::new(), halted };
        let prefix = format!("pepo-{}-", instance.tag().expect("a tag"));
        let pinned = std::fs::read_dir("/run/netns").expect("namespaces").flatten().map(|entry| entry.path());
        let ours = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix));
        for space in pinned.filter(|path| inside && ours(path)) {
            let rules = nft(&space, &["list", "ruleset"], "");
            let to = rules.split("snat ip to ").nth(1).and_then(|rest| rest.split_whitespace().next());
            bare(&space, &format!("oifname \"up\" snat to {}", to.expect("where it is translated to")));
            walls.were.push((space, rules));
        }
        if outside {
            let host = world.host_namespace();
            walls.were.push((host.clone(), nft(&host, &["list", "ruleset"], "")));
            bare(&host, "oifname \"wan\" masquerade");
        }
        walls
    }
}

impl Drop for Walls {
    fn drop(&mut self) {
        // First: whatever fails, nobody is left halted. It puts its own wall back, in whose place the same one comes.
        kill_process(self.halted, Signal::CONT).expect("go on");
        for (space, rules) in &self.were {
            nft(space, &["-f", "-"], &format!("flush ruleset\n{rules}"));
        }
    }
}

/// Leaves nothing but a translation of addresses.
fn bare(space: &Path, rule: &str) {
    let chain = format!("type nat hook postrouting priority srcnat;\n {rule}\n");
    nft(space, &["-f", "-"], &format!("flush ruleset\ntable ip plain {{\n chain leave {{\n {chain} }}\n}}\n"));
}
