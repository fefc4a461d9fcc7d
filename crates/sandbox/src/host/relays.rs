//! Relays, as the privileged side starts and finds them: one for a Sandbox whose policy needs it, born in the keeper's pid
//! namespace, reached by a socket in a directory that is root's alone.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, OFlags};

use super::serve::Lane;
use super::work::{Made, Work, failed};
use super::{Refusal, wire};
use crate::id::{SandboxId, file, process};
use crate::keeper::connect;
use crate::net::relay::{Order, Said};
use crate::net::{RELAY_PORT, address, slot};
use crate::spawn::{PidNamespace, Spawned, spawn};

/// How long a relay may take to relay: twenty system calls, on a machine that starts twenty others.
const SERVING_WITHIN: Duration = Duration::from_secs(30);

/// How often it is looked whether to go on waiting.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The socket of its control stream, in [`file::RELAY`].
const CONTROL: &str = "control";

impl Work {
    /// A stream to a Sandbox's relay, which is started if it does not run.
    pub fn relay(&self, id: SandboxId, lane: &Lane, made: &mut Made) -> Result<OwnedFd, Refusal> {
        let not_there = |state: &str| Refusal::NotThere { id, state: state.to_owned() };
        if lane.cancelled.load(Ordering::Acquire) {
            return Err(Refusal::Released { id });
        }
        let keeper = self.place.keeper(id).map_err(|_| not_there("does not run"))?;
        let namespace = slot::namespace(&self.place, id).map_err(|_| not_there("has no network"))?;
        match self.place.area(id, file::RELAY, 0) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("make a directory", error));
            }
            _ => {}
        }
        let area = self
            .place
            .open_at(id, file::RELAY, OFlags::DIRECTORY)
            .map_err(|error| failed("open a directory", error))?;
        if let Ok(stream) = connect(area.as_fd(), CONTROL, 0) {
            return Ok(stream);
        }
        match rustix::fs::unlinkat(&area, CONTROL, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(failed("remove an old socket", error)),
        }
        // In a directory that is root's: nobody else makes, finds or replaces it.
        let control = UnixListener::bind(format!("/proc/self/fd/{}/{CONTROL}", area.as_raw_fd()))
            .map_err(|error| failed("listen for pepod", error))?;
        let leaf = self.place.cgroups.leaf(self.place.cgroup(id));
        let doors = leaf.doors().map_err(|error| failed("open the cgroup", error))?;
        let order = Order {
            at: self.place.directory(id).join(file::RELAY),
            cgroup: self.place.cgroup(id),
            hierarchies: leaf.hierarchies(),
            uid: self.place.block.uids(id.slot()).relay,
            address: address::GATEWAY,
            port: RELAY_PORT,
        };
        let spawned = spawn(process::RELAY, PidNamespace::Of(keeper.as_fd()), Some(&leaf));
        let Spawned { pidfd, socket, .. } = spawned.map_err(|error| failed("start the relay", error))?;
        made.serve(pidfd);
        let fds: Vec<_> =
            [namespace.as_fd(), control.as_fd()].into_iter().chain(doors.iter().map(AsFd::as_fd)).collect();
        wire::send(socket.as_fd(), &order, &fds).map_err(|error| failed("order the relay", error))?;
        serving(id, &socket, lane)?;
        connect(area.as_fd(), CONTROL, 0).map_err(|error| failed("reach the relay", error))
    }
}

/// Waits until the relay relays.
fn serving(id: SandboxId, socket: &OwnedFd, lane: &Lane) -> Result<(), Refusal> {
    let deadline = Instant::now() + SERVING_WITHIN;
    loop {
        if lane.cancelled.load(Ordering::Acquire) {
            return Err(Refusal::Released { id });
        }
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&LOOK)) {
            Ok(0) | Err(rustix::io::Errno::INTR) if Instant::now() < deadline => {}
            Ok(0) | Err(rustix::io::Errno::INTR) => {
                return Err(failed("wait for the relay", io::Error::from(io::ErrorKind::TimedOut)));
            }
            Ok(_) => break,
            Err(error) => return Err(failed("wait for the relay", error)),
        }
    }
    match wire::receive::<Said>(socket.as_fd(), &mut Vec::new()) {
        Ok(Some((Said::Serving, _))) => Ok(()),
        Ok(Some((Said::Failed { step, reason }, _))) => Err(Refusal::Step { step: format!("relay: {step}"), reason }),
        Ok(None) => Err(failed("wait for the relay", io::Error::other("it ended without a word"))),
        Err(error) => Err(failed("hear the relay", error)),
    }
}
