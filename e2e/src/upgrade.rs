//! An upgrade in place: the programs of one build run Sandboxes, their files are replaced by those of another, pepod and
//! the edge are restarted as a service manager does it, and nobody whose command runs notices.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pepo_api::CreateSession;
use rustix::process::{Pid, Signal, kill_process};

use crate::instance::{Instance, bare};
use crate::program::until;
use crate::strike::Ring;

const MINUTE: Duration = Duration::from_secs(60);

/// What an installation has.
const PROGRAMS: [&str; 5] = ["pepo", "pepod", "pepo-edge", "pepo-guest", "vhost-device-vsock"];

/// Puts the programs of that directory in place as a package manager does: what runs keeps its file.
fn install(from: &Path, to: &Path) {
    for name in PROGRAMS {
        let new = to.join(format!(".{name}"));
        fs::copy(from.join(name), &new).unwrap_or_else(|error| panic!("{}: {error}", from.join(name).display()));
        fs::rename(new, to.join(name)).expect("rename");
    }
}

/// A directory that is counted among the programs under test, for an installation.
fn directory() -> tempfile::TempDir {
    let stage = PathBuf::from(std::env::var_os("PEPO_E2E_BIN").expect("PEPO_E2E_BIN is not set: run `make test`"));
    let directory = tempfile::tempdir_in(stage).expect("directory");
    // pepod and the edge have no rights of root's.
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("mode");
    directory
}

/// The programs of this build as another one: the guest agent has other bytes, so that every Sandbox of theirs has another
/// initramfs than those of this build.
pub fn other_build(of: &Path) -> tempfile::TempDir {
    use std::io::Write as _;
    let other = directory();
    install(of, other.path());
    let mut guest = fs::File::options().append(true).open(other.path().join("pepo-guest")).expect("open");
    guest.write_all(b"another build").expect("write");
    other
}

/// Sandboxes that `previous` made are adopted by `now`.
pub async fn adopts(previous: &Path, now: &Path) {
    let installed = directory();
    install(previous, installed.path());
    let instance = Instance::new();
    let up = instance.up_with(installed.path().join("pepo"));
    let ring = Ring::of(instance, up);
    let session = ring.create(CreateSession { reactivate: Some(true), ..bare() }).await;
    assert_eq!(ring.echo(&session).await, 1);
    let before = ring.client.version().await.expect("version");
    let sandbox = ring.sandbox(&session).await;
    let program = |comm: &str| {
        let pids = ring.instance.pids(comm);
        assert_eq!(pids.len(), 1, "{comm}: {pids:?}");
        let path = fs::read_link(format!("/proc/{}/exe", pids[0])).expect("exe");
        (pids[0], path.to_string_lossy().into_owned())
    };

    let restart = async {
        install(now, installed.path());
        for comm in ["pepod", "pepo-edge"] {
            let (pid, path) = program(comm);
            assert!(path.ends_with(" (deleted)"), "{path} was not replaced");
            kill_process(Pid::from_raw(pid).expect("a pid"), Signal::TERM).expect("signal");
            until("it is started again", MINUTE, || {
                let now = ring.instance.pids(comm);
                (now.len() == 1 && now[0] != pid).then_some(())
            });
        }
        let answers = async {
            while ring.client.readyz().await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(MINUTE, answers).await.expect("the new pepod answers");
    };
    let (end, whole) = ring.meanwhile(&session, restart).await;
    assert!(whole && end.exit_code == Some(7), "{end:?}");

    // The daemon is the new one, the keeper the old one's, the Sandbox the same, and it does what it did.
    for comm in ["pepod", "pepo-host", "pepo-edge"] {
        let (_, path) = program(comm);
        assert!(!path.ends_with(" (deleted)"), "{comm} is the old one: {path}");
    }
    let (_, keeper) = program("pepo-keeper");
    assert!(keeper.ends_with(" (deleted)"), "the keeper was not the old one's: {keeper}");
    let after = ring.client.version().await.expect("version");
    println!(
        "from guest {:?} of {} to {:?} of {}",
        before.guest_digest, before.version, after.guest_digest, after.version
    );
    assert_eq!(after.tag, before.tag);
    assert_eq!((ring.echo(&session).await, ring.sandbox(&session).await), (1, sandbox.clone()));

    // Its release gives back what the old one took, and its next life has this build's agent.
    ring.client.session_release(&session).await.expect("release");
    ring.instance.sandboxes_gone();
    assert!(!ring.instance.jails().contains(&sandbox), "its directory is left");
    assert_eq!(ring.echo(&session).await, 2);
    ring.client.session_terminate(&session).await.expect("terminate");
    ring.end();
}
