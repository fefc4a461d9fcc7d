//! What of an instance is on this host, by the kernel's own lists.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Everything that could be left: processes of the range of uids or with our names, cgroups, mounts, network namespaces,
/// loop devices, entries of the state directory.
pub fn traces(state: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim().to_owned();
        let uid: u32 = field("Uid:").split_whitespace().next().unwrap_or("0").parse().unwrap_or(0);
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let ours = (0x7000_0000..=0x7FFD_FFFF).contains(&uid) && in_block(uid, state);
        let named = field("Name:").starts_with("pepo-keeper") && command.contains("keeper") && of_state(&pid, state);
        if ours || named {
            found.insert(format!("process {pid} {} uid {uid} {}", field("Name:"), field("State:")));
        }
    }
    let tag = tag(state);
    for mount in fs::read_to_string("/proc/self/mountinfo").unwrap().lines() {
        if mount.contains(&*state.to_string_lossy()) {
            found.insert(format!("mount {mount}"));
        }
        if let (Some(tag), true) = (&tag, mount.contains(" - cgroup")) {
            let path = mount.split(' ').nth(4).unwrap();
            for entry in fs::read_dir(path).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.starts_with(&format!("pepo-{tag}-")) {
                    found.insert(format!("cgroup {path}/{name}"));
                }
            }
        }
    }
    for entry in fs::read_dir(state.join("jail")).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != "templates" && name != "vmm" {
            found.insert(format!("directory jail/{name}"));
        }
    }
    found
}

fn tag(state: &Path) -> Option<String> {
    lease(state, "tag").map(|tag| tag.as_str().unwrap().to_owned())
}

fn lease(state: &Path, field: &str) -> Option<serde_json::Value> {
    let text = fs::read_to_string(state.join("instance.json")).ok()?;
    let lease: serde_json::Value = serde_json::from_str(&text).unwrap();
    lease.get(field).cloned()
}

fn in_block(uid: u32, state: &Path) -> bool {
    let Some(block) = lease(state, "block") else { return false };
    let first = u32::try_from(block["first"].as_u64().unwrap()).unwrap();
    uid >= first && uid - first < 0x10_0000
}

fn of_state(pid: &str, state: &Path) -> bool {
    let Some(tag) = tag(state) else { return false };
    fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(&format!("pepo-{tag}-")))
}

/// Waits until nothing is left.
pub fn assert_clean(state: &Path) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let left = traces(state);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "left on the host:\n{}", left.into_iter().collect::<Vec<_>>().join("\n"));
        std::thread::sleep(Duration::from_millis(50));
    }
}
