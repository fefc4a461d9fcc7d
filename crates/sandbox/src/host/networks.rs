//! The networks of an instance's Sandboxes, as the privileged side holds them: each behind a lock of its own, so that one
//! that is slow keeps nobody else waiting.
//!
//! A policy is written down before it is put in force, so that a life after this one finds it; [`Slot::open`] takes up what
//! an earlier life made at the first request about it.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::{Link, Refusal};
use crate::held::Place;
use crate::id::{SandboxId, file};
use crate::net::dns::{Kind, servers};
use crate::net::slot::{Device, Error, Slot};
use crate::net::wall::{self, Wall};
use crate::net::{OPENED, Opened, Policy, Settings, Traffic};
use crate::{chain, net};

/// How long the host's resolvers are remembered.
const SERVERS_FOR: Duration = Duration::from_secs(5);

type Shared = Arc<Mutex<Option<Slot>>>;

/// All of them.
#[derive(Debug)]
pub(super) struct Networks {
    settings: Option<Settings>,
    wall: Option<Wall>,
    slots: Mutex<HashMap<SandboxId, Shared>>,
    known: Mutex<Option<(Instant, Vec<SocketAddr>)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refused(error: Error) -> Refusal {
    match error {
        Error::NoNft => Refusal::Missing { what: "nft".to_owned(), hint: "install the package nftables".to_owned() },
        Error::Policy(_) | Error::Opening { .. } | Error::Full { .. } | Error::Crowded => {
            Refusal::Invalid { reason: error.to_string() }
        }
        Error::Step { .. } => Refusal::Step { step: "network".to_owned(), reason: chain(&error) },
    }
}

impl Networks {
    pub fn new(place: &Place, settings: Option<Settings>) -> io::Result<Self> {
        let wall = settings.as_ref().map(|settings| Wall::new(place.tag, place.block, settings.clone()));
        Ok(Networks { wall: wall.transpose()?, settings, slots: Mutex::default(), known: Mutex::default() })
    }

    fn settings(&self) -> Result<(&Settings, &Wall), Refusal> {
        let off = || Refusal::Invalid { reason: "this instance gives its Sandboxes no network".to_owned() };
        Ok((self.settings.as_ref().ok_or_else(off)?, self.wall.as_ref().ok_or_else(off)?))
    }

    /// Puts the host's wall up if it does not stand.
    fn wall(&self) -> Result<(), Refusal> {
        let (_, wall) = self.settings()?;
        match wall.ensure() {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(refused(Error::NoNft)),
            Err(error) => Err(Refusal::Step {
                step: "put the wall up in the host's namespace".to_owned(),
                reason: error.to_string(),
            }),
        }
    }

    fn shared(&self, id: SandboxId) -> Shared {
        Arc::clone(lock(&self.slots).entry(id).or_default())
    }

    /// How many packets a second any Sandbox may send.
    pub fn packets_per_second(&self) -> u32 {
        self.settings.as_ref().map_or(0, |settings| settings.limits.packets_per_second)
    }

    /// Makes a Sandbox's network, closed, and returns what its VMM is given of it.
    pub fn prepare(&self, place: &Place, id: SandboxId, device: Device) -> Result<OwnedFd, Refusal> {
        self.wall()?;
        let (settings, _) = self.settings()?;
        let shared = self.shared(id);
        let mut held = lock(&shared);
        let (slot, tap) = Slot::prepare(place, id, settings, device).map_err(refused)?;
        *held = Some(slot);
        Ok(tap)
    }

    /// Does something with a Sandbox's network, which is taken up first if it is an earlier life's.
    fn with<T>(
        &self,
        place: &Place,
        id: SandboxId,
        work: impl FnOnce(&mut Slot, &Settings) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let (settings, _) = self.settings()?;
        if net::slot::namespace(place, id).is_err() {
            return Err(Refusal::NotThere { id, state: "has no network".to_owned() });
        }
        let shared = self.shared(id);
        let mut held = lock(&shared);
        if held.is_none() {
            // A policy that cannot be read is not guessed: nothing is opened by name until pepod sends one.
            let policy: Policy = place.read(id, file::POLICY).unwrap_or_default();
            *held = Some(Slot::open(place, id, policy).map_err(refused)?);
        }
        match held.as_mut() {
            Some(slot) => work(slot, settings),
            None => Err(Refusal::NotThere { id, state: "has no network".to_owned() }),
        }
    }

    /// Puts a policy in force.
    pub fn apply(&self, place: &Place, id: SandboxId, policy: Policy) -> Result<Link, Refusal> {
        self.wall()?;
        self.with(place, id, |slot, settings| {
            policy.check(&settings.floor).map_err(|error| refused(error.into()))?;
            place.write(id, file::POLICY, &policy).map_err(|error| Refusal::Step {
                step: "write the policy down".to_owned(),
                reason: error.to_string(),
            })?;
            slot.apply(policy, settings).map_err(refused)?;
            Ok(Link { mtu: slot.mtu().map_err(refused)? })
        })
    }

    /// Opens addresses, waiting for whoever else is at it.
    pub fn open(&self, place: &Place, id: SandboxId, opened: &[Opened]) -> Result<(), Refusal> {
        bounded(opened)?;
        self.with(place, id, |slot, settings| slot.admit(opened, &settings.floor).map_err(refused))
    }

    /// Opens addresses at once, if the network is in hand and nobody else is at it.
    pub fn try_open(&self, id: SandboxId, opened: &[Opened]) -> Option<Result<(), Refusal>> {
        let settings = self.settings.as_ref()?;
        let shared = lock(&self.slots).get(&id).map(Arc::clone)?;
        let mut held = match shared.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let slot = held.as_mut()?;
        Some(bounded(opened).and_then(|()| slot.admit(opened, &settings.floor).map_err(refused)))
    }

    pub fn resolver(&self, place: &Place, id: SandboxId) -> Result<[OwnedFd; 2], Refusal> {
        self.with(place, id, |slot, _| {
            slot.resolver()
                .map_err(|error| Refusal::Step { step: "share the sockets".to_owned(), reason: error.to_string() })
        })
    }

    pub fn traffic(&self, place: &Place, id: SandboxId) -> Result<Traffic, Refusal> {
        self.with(place, id, |slot, _| slot.traffic().map_err(refused))
    }

    /// Closes what is held of a Sandbox that goes.
    pub fn let_go(&self, id: SandboxId) {
        lock(&self.slots).remove(&id);
    }

    /// New sockets to a resolver upstream.
    pub fn upstream(&self, kind: Kind, server: usize, most: usize) -> Result<Vec<OwnedFd>, Refusal> {
        let (settings, _) = self.settings()?;
        let servers = match &settings.dns[..] {
            [] => self.servers(),
            own => own.to_vec(),
        };
        servers::sockets(&servers, kind, server, most).map_err(|error| Refusal::Step {
            step: "make a socket to the resolver".to_owned(),
            reason: error.to_string(),
        })
    }

    /// This host's own resolvers, as they were a moment ago.
    fn servers(&self) -> Vec<SocketAddr> {
        let mut known = lock(&self.known);
        match &*known {
            Some((at, servers)) if at.elapsed() < SERVERS_FOR => servers.clone(),
            _ => {
                let servers = servers::of_host(Path::new("/"));
                *known = Some((Instant::now(), servers.clone()));
                servers
            }
        }
    }

    /// What tells when tables of the host change, where that matters.
    pub fn watch(&self) -> Option<wall::Watch> {
        self.wall.as_ref()?;
        wall::Watch::new().inspect_err(|error| tracing::warn!(%error, "cannot watch the host's tables")).ok()
    }

    /// Puts the host's wall back if somebody removed it.
    pub fn keep_wall(&self) {
        let Some(wall) = self.wall.as_ref().filter(|wall| wall.is_loaded()) else { return };
        match wall.ensure() {
            Ok(true) => tracing::warn!("somebody removed the wall in the host's namespace; it stands again"),
            Ok(false) => {}
            Err(error) => tracing::error!(%error, "the wall in the host's namespace is gone"),
        }
    }
}

fn bounded(opened: &[Opened]) -> Result<(), Refusal> {
    match opened.len() {
        0..=OPENED => Ok(()),
        many => Err(Refusal::Invalid { reason: format!("{many} openings at once; at most {OPENED}") }),
    }
}
