//! What people's programs do to a file system all day, at size, in a Workspace. For the soak: it takes an Image with more
//! programs than the default one has, and so package mirrors.

use std::time::Duration;

use pepo_api::{CreateSession, CreateWorkspace, WorkspaceChoice};

use crate::durable::Up;

const PROGRAM: &str = include_str!("../tests/guest/loads.py");

/// What the Image has beside what the default one has.
const PACKAGES: [&str; 3] = ["cargo", "libpython3.13-testsuite", "rsync"];

/// Each load with its size. Longer than a command's usual time, in software emulation.
const LOADS: [(&str, u32); 7] =
    [("git", 400), ("npm", 40), ("pip", 20), ("sqlite", 6), ("rsync", 600), ("cargo", 3), ("cpython", 1)];

const HOURS: Duration = Duration::from_secs(3 * 3600);

/// All of them, or those that are named.
pub async fn run(wanted: &[&str]) {
    let names = LOADS.map(|(name, _)| name);
    assert!(wanted.iter().all(|name| names.contains(name)), "{wanted:?}: the loads are {names:?}");
    let up = Up::start();
    let began = std::time::Instant::now();
    println!("      building an Image with {}", PACKAGES.join(", "));
    let packages = PACKAGES.iter().flat_map(|name| ["--package", name]);
    let words = ["image", "build", "base", "--name", "loads"].into_iter().chain(packages);
    let built = up.instance.pepo(words).within(Duration::from_secs(3600)).ok();
    println!("      built in {:.0} s", built.took.as_secs_f64());
    let body = CreateWorkspace { size_mib: Some(8192), ..CreateWorkspace::default() };
    let workspace = up.workspace(body).await;
    let choice = WorkspaceChoice { id: Some(workspace.id), ..WorkspaceChoice::default() };
    let body = CreateSession { image: Some("loads".into()), workspace: Some(Some(choice)), ..CreateSession::default() };
    let session = up.client.session_create(&body).await.expect("a Session").id.to_string();
    up.put(&session, "loads.py", PROGRAM).await;
    for (load, size) in LOADS.into_iter().filter(|(load, _)| wanted.is_empty() || wanted.contains(load)) {
        let said = up.ok_within(&session, &format!("python3 /tmp/loads.py {load} {size}"), HOURS).await;
        print!("      {said}");
    }
    println!("      all of it in {:.0} s", began.elapsed().as_secs_f64());
    up.client.session_terminate(&session).await.expect("terminate");
    up.end().await;
}
