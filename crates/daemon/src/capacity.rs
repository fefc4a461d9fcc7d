//! How many Sandboxes this host takes, and how many start at once.
//!
//! Admission is an answer, not a wait: memory and places are counted when a Session is made and given back when its Sandbox
//! is. The turn to start is a wait, bounded by the caller's deadline. Places are permits: dropping one frees it.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory that a Sandbox costs beyond its guest's, in MiB: emulator and translation cache, vsock device, keeper.
pub const OVERHEAD_MIB: u64 = 128;

/// The host has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// Too many Sandboxes.
    #[error("{0} of {0} Sandboxes are in use")]
    Places(usize),
    /// Too little memory.
    #[error("{wanted_mib} MiB wanted, {used_mib} of {budget_mib} MiB are in use")]
    Memory {
        /// With the overhead.
        wanted_mib: u64,
        /// By the others.
        used_mib: u64,
        /// That there is.
        budget_mib: u64,
    },
    /// It will never fit.
    #[error(
        "{wanted_mib} MiB wanted (with {OVERHEAD_MIB} MiB for the Sandbox itself), all Sandboxes together may have {budget_mib} MiB"
    )]
    TooLarge {
        /// With the overhead.
        wanted_mib: u64,
        /// That there is.
        budget_mib: u64,
    },
}

#[derive(Debug, Default)]
struct Used {
    places: usize,
    memory_mib: u64,
}

/// The count.
#[derive(Clone, Debug)]
pub struct Capacity {
    used: Arc<Mutex<Used>>,
    most: usize,
    budget_mib: u64,
    turns: Arc<Semaphore>,
}

/// A Sandbox's place.
#[derive(Debug)]
pub struct Place {
    used: Arc<Mutex<Used>>,
    memory_mib: u64,
}

impl Capacity {
    /// Room for `most` Sandboxes with `budget_mib` together, `boots` of them starting at once.
    pub fn new(most: usize, budget_mib: u64, boots: usize) -> Self {
        Capacity { used: Arc::default(), most, budget_mib, turns: Arc::new(Semaphore::new(boots)) }
    }

    /// A place for a guest of that memory.
    ///
    /// # Errors
    /// There is none.
    pub fn admit(&self, guest_mib: u32) -> Result<Place, Full> {
        let wanted_mib = u64::from(guest_mib) + OVERHEAD_MIB;
        if wanted_mib > self.budget_mib {
            return Err(Full::TooLarge { wanted_mib, budget_mib: self.budget_mib });
        }
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.places >= self.most {
            return Err(Full::Places(self.most));
        }
        if used.memory_mib + wanted_mib > self.budget_mib {
            return Err(Full::Memory { wanted_mib, used_mib: used.memory_mib, budget_mib: self.budget_mib });
        }
        Ok(self.take(&mut used, wanted_mib))
    }

    /// A place for a Sandbox that is there already, whatever the count says.
    pub fn adopted(&self, guest_mib: u32) -> Place {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        self.take(&mut used, u64::from(guest_mib) + OVERHEAD_MIB)
    }

    fn take(&self, used: &mut Used, memory_mib: u64) -> Place {
        used.places += 1;
        used.memory_mib += memory_mib;
        Place { used: self.used.clone(), memory_mib }
    }

    /// Waits for the turn to start.
    pub async fn turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.turns).acquire_owned().await.ok()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.places -= 1;
        used.memory_mib -= self.memory_mib;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_memory_are_given_back() {
        let capacity = Capacity::new(2, 2000, 1);
        let first = capacity.admit(512).expect("room");
        let second = capacity.admit(512).expect("room");
        assert_eq!(capacity.admit(512).expect_err("full"), Full::Places(2));
        drop(second);
        assert!(matches!(capacity.admit(1800), Err(Full::Memory { used_mib: 640, .. })));
        drop(first);
        assert!(capacity.admit(1800).is_ok());
        assert!(matches!(capacity.admit(4000), Err(Full::TooLarge { .. })));
    }
}
