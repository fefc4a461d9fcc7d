//! The wall in the host's namespace: one table for an instance, there before its first slot and gone after its last.
//!
//! Other programs may empty the tables of a host (a firewall's reload does). The wall is looked at before each slot and
//! whenever the kernel tells that tables changed, and put back. Meanwhile every Sandbox has the one inside.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use super::netlink::tables::Tables;
use super::{Settings, address, nft};
use crate::id::{Tag, UidBlock};

/// An instance's wall.
#[derive(Debug)]
pub(crate) struct Wall {
    tag: Tag,
    block: UidBlock,
    settings: Settings,
    tables: Mutex<Tables>,
    /// Whether this life has loaded it: one of an earlier life may have another floor, or other limits.
    loaded: Mutex<bool>,
}

impl Wall {
    pub fn new(tag: Tag, block: UidBlock, settings: Settings) -> io::Result<Self> {
        Ok(Wall { tag, block, settings, tables: Mutex::new(Tables::open()?), loaded: Mutex::new(false) })
    }

    /// Whether the table is there.
    pub fn stands(&self) -> io::Result<bool> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner).has_table(&address::host_table(self.tag))
    }

    /// Puts the wall up, if it does not stand as it should; whether it had to.
    ///
    /// # Errors
    /// `NotFound` without `nft`; what `nft` or the kernel says.
    pub fn ensure(&self) -> io::Result<bool> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if *loaded && self.stands()? {
            return Ok(false);
        }
        let Settings { limits, floor, .. } = &self.settings;
        nft::load(&nft::outside(self.tag, self.block, limits, floor))?;
        // A kernel without this forgets ended connections later, no more.
        if let Err(error) = nft::load(&nft::quick_ends(self.tag)) {
            tracing::debug!(%error, "ended connections stay in the host's table for the usual time");
        }
        *loaded = true;
        // The host passes packets on for its Sandboxes only once the wall stands.
        let forward = "/proc/sys/net/ipv4/ip_forward";
        if std::fs::read_to_string(forward)?.trim() == "0" {
            tracing::info!("switching on net.ipv4.ip_forward");
            std::fs::write(forward, "1")?;
        }
        Ok(true)
    }

    /// Whether it was put up by this life: only then is it missed.
    pub fn is_loaded(&self) -> bool {
        *self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes an instance's wall down: when no Sandbox is left behind it.
pub(crate) fn remove(tag: Tag) -> io::Result<()> {
    Tables::open()?.remove_table(&address::host_table(tag))
}

/// Whether an instance's wall stands.
pub(crate) fn stands(tag: Tag) -> bool {
    Tables::open().and_then(|mut tables| tables.has_table(&address::host_table(tag))).unwrap_or(false)
}

/// Tells when tables of the host change.
#[derive(Debug)]
pub(crate) struct Watch(Tables);

impl Watch {
    pub fn new() -> io::Result<Self> {
        Ok(Watch(Tables::watch()?))
    }

    /// Takes what was told; whether it was anything.
    pub fn drain(&mut self) -> bool {
        self.0.drain()
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
