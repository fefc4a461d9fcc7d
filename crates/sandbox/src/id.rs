//! Identity: the id of a Sandbox, its slot, the tag of its instance, and every name on the host that follows from them.
//!
//! Nothing else in this crate makes up a name. What a Sandbox can hold is found again from its id alone, after any crash,
//! because each name, number and uid here is a pure function of ([`Tag`], [`SandboxId`], [`UidBlock`]).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// Slots of one instance: `0..SLOTS`. Four uids each make [`UidBlock::SANDBOXES`] of them.
pub const SLOTS: u16 = 16_384;

/// Why a text is not an id, a slot or a tag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {what}")]
pub struct Error {
    text: String,
    what: &'static str,
}

impl Error {
    fn new(text: &str, what: &'static str) -> Self {
        Error { text: text.chars().take(64).collect(), what }
    }
}

/// A Sandbox's place on the host: a small number, below [`SLOTS`], that one Sandbox of an instance has at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u16);

impl Slot {
    /// The slot of that number, if there is one.
    pub fn new(number: u16) -> Option<Self> {
        (number < SLOTS).then_some(Slot(number))
    }

    /// Its number.
    pub fn number(self) -> u16 {
        self.0
    }
}

/// `sbx_` and the 32 hex digits of a UUIDv7 whose last four are the slot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SandboxId([u8; 16]);

impl SandboxId {
    /// A new id for that slot: time-ordered, 48 random bits besides time and slot.
    pub fn new(slot: Slot) -> Self {
        let mut bytes = *Uuid::now_v7().as_bytes();
        bytes[14..].copy_from_slice(&slot.0.to_be_bytes());
        SandboxId(bytes)
    }

    /// The slot in it.
    pub fn slot(self) -> Slot {
        // Every constructor has checked the last two bytes.
        Slot(u16::from_be_bytes([self.0[14], self.0[15]]))
    }

    /// Its 32 lower-case hex digits: the form in host names, where an underscore may not stand.
    pub fn hex(self) -> String {
        Uuid::from_bytes(self.0).as_simple().to_string()
    }

    /// The id whose hex digits these are.
    ///
    /// # Errors
    /// Anything but 32 lower-case hex digits, or a slot beyond [`SLOTS`].
    pub fn from_hex(hex: &str) -> Result<Self, Error> {
        let wrong = || Error::new(hex, "a Sandbox's 32 hex digits");
        if hex.len() != 32 || !hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return Err(wrong());
        }
        let bytes = *Uuid::try_parse(hex).map_err(|_| wrong())?.as_bytes();
        Slot::new(u16::from_be_bytes([bytes[14], bytes[15]])).ok_or_else(wrong)?;
        Ok(SandboxId(bytes))
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sbx_{}", Uuid::from_bytes(self.0).as_simple())
    }
}

impl fmt::Debug for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for SandboxId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let hex = text.strip_prefix("sbx_").ok_or_else(|| Error::new(text, "a Sandbox id"))?;
        SandboxId::from_hex(hex)
    }
}

impl Serialize for SandboxId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SandboxId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer)
    }
}

/// The id of a tree on this host that outlives Sandboxes: 32 hex digits, chosen by whoever asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeId([u8; 16]);

impl VolumeId {
    /// The id of these bytes.
    pub fn new(bytes: [u8; 16]) -> Self {
        VolumeId(bytes)
    }

    /// Its 32 lower-case hex digits: its directory's name.
    pub fn hex(self) -> String {
        Uuid::from_bytes(self.0).as_simple().to_string()
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for VolumeId {
    type Err = Error;

    fn from_str(hex: &str) -> Result<Self, Error> {
        let wrong = || Error::new(hex, "a tree's 32 hex digits");
        if hex.len() != 32 || !hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return Err(wrong());
        }
        Ok(VolumeId(*Uuid::try_parse(hex).map_err(|_| wrong())?.as_bytes()))
    }
}

impl Serialize for VolumeId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for VolumeId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer)
    }
}

/// Four characters `[a-z0-9]` that name an instance in every host name of its Sandboxes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag([u8; 4]);

impl Tag {
    /// The tag that 20 bits of a digest spell; different digests may spell the same one.
    pub(crate) fn spelled(digest: [u8; 4]) -> Self {
        const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
        Tag(digest.map(|byte| LETTERS[byte as usize % LETTERS.len()]))
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        // ASCII by construction.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Tag {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match <[u8; 4]>::try_from(text.as_bytes()) {
            Ok(bytes) if bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) => Ok(Tag(bytes)),
            _ => Err(Error::new(text, "a tag of four characters a-z and 0-9")),
        }
    }
}

impl Serialize for Tag {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Tag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer)
    }
}

fn text<'de, D: Deserializer<'de>, T: FromStr<Err = Error>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// The uids (and equal gids) an instance leases: one block of the machine's range.
///
/// ```text
/// first + 0x00000 .. 0x10000   four for each slot
/// first + 0x10000 .. 0x20000   one builder's user namespace
/// first + 0x20000 .. 0x100000  fourteen user namespaces of 0x10000 for the files of served trees
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UidBlock {
    /// The block's number, also that of the instance's address block.
    pub index: u16,
    /// Its first uid.
    pub first: u32,
}

/// What runs as which of a Sandbox's four uids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uids {
    /// The keeper, once everything runs.
    pub keeper: u32,
    /// The VMM.
    pub vmm: u32,
    /// The vsock device.
    pub vsock: u32,
    /// The relay.
    pub relay: u32,
}

impl Uids {
    /// All four.
    pub fn all(self) -> [u32; 4] {
        [self.keeper, self.vmm, self.vsock, self.relay]
    }
}

impl UidBlock {
    /// Uids in a block.
    pub const SIZE: u32 = 0x10_0000;
    /// Of them, those of Sandboxes.
    pub const SANDBOXES: u32 = 0x1_0000;
    /// Of them, those of a builder.
    pub const BUILDER: u32 = 0x1_0000;

    /// Of them, those of one owner's trees: a whole user namespace.
    pub const TREE: u32 = 0x1_0000;
    /// Owners of trees that an instance may have.
    pub const TREES: u16 = 14;

    /// The first of the [`UidBlock::TREE`] uids under which the files of an owner's trees are stored; `None` beyond
    /// [`UidBlock::TREES`].
    pub fn tree(self, owner: u16) -> Option<u32> {
        (owner < Self::TREES).then(|| self.first + Self::SANDBOXES + Self::BUILDER + u32::from(owner) * Self::TREE)
    }

    /// The four uids of a slot.
    pub fn uids(self, slot: Slot) -> Uids {
        let first = self.first + 4 * u32::from(slot.number());
        Uids { keeper: first, vmm: first + 1, vsock: first + 2, relay: first + 3 }
    }

    /// The slot to which a uid belongs, if it is a Sandbox's.
    pub fn slot_of(self, uid: u32) -> Option<Slot> {
        let offset = uid.checked_sub(self.first).filter(|offset| *offset < Self::SANDBOXES)?;
        Slot::new(u16::try_from(offset / 4).ok()?)
    }

    /// The first of the [`UidBlock::BUILDER`] uids onto which a builder's user namespace is mapped.
    pub fn builder(self) -> u32 {
        self.first + Self::SANDBOXES
    }

    /// Whether the uid is in the block.
    pub fn holds(self, uid: u32) -> bool {
        uid >= self.first && uid - self.first < Self::SIZE
    }
}

/// Names of our processes, as `ps` shows them (at most 15 bytes).
pub mod process {
    /// The privileged side.
    pub const HOST: &str = "pepo-host";
    /// A Sandbox's keeper.
    pub const KEEPER: &str = "pepo-keeper";
    /// A Sandbox's relay.
    pub const RELAY: &str = "pepo-relay";
    /// A builder of root file systems.
    pub const BUILD: &str = "pepo-build";
    /// A share server.
    pub const SHARE: &str = "pepo-share";
}

/// Names in a Sandbox's directory, which is `<jails>/<hex>` and root's.
pub mod file {
    /// The Plan, written before the first resource is taken. Root's.
    pub const PLAN: &str = "plan.json";
    /// The network policy in force. Root's.
    pub const POLICY: &str = "policy.json";
    /// Process id and start time of the keeper. Root's.
    pub const KEEPER: &str = "keeper.json";
    /// What is served into its guest, by whom. Root's.
    pub const SHARES: &str = "shares.json";
    /// The keeper's own directory.
    pub const KEEP: &str = "keep";
    /// In it: how the Sandbox ended.
    pub const EXIT: &str = "exit.json";
    /// In it: the console's last bytes.
    pub const CONSOLE: &str = "console";
    /// In it: what the guest last said of its memory, where its VMM asks.
    pub const MEMORY: &str = "memory.json";
    /// The scratch disk of a VMM that takes paths, while it starts: from then on it has no name.
    pub const SCRATCH: &str = "scratch";
    /// The socket over which the keeper of a VMM with a vsock device beside it is given calls to hold. Root's.
    pub const CALLS: &str = "calls";
    /// The vsock device's own directory.
    pub const VSOCK: &str = "vsock";
    /// The directory of the relay's control stream, over which the relay mounts its root in its own namespace. Root's.
    pub const RELAY: &str = "relay";
    /// An empty directory over which the keeper mounts what its VMM boots from, or its root, in its own namespace.
    pub const BOOT: &str = "boot";
}

/// The host names of one Sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// The instance's.
    pub tag: Tag,
    /// The Sandbox's.
    pub id: SandboxId,
}

impl Names {
    /// What every cgroup of that instance begins with.
    pub fn cgroup_prefix(tag: Tag) -> String {
        format!("pepo-{tag}-")
    }

    /// The leaf cgroup in each hierarchy.
    pub fn cgroup(self) -> String {
        format!("pepo-{}-{}", self.tag, self.id.hex())
    }

    /// The Sandbox whose cgroup has that name, if it is one of the tag's.
    pub fn from_cgroup(tag: Tag, name: &str) -> Option<SandboxId> {
        SandboxId::from_hex(name.strip_prefix(&Self::cgroup_prefix(tag))?).ok()
    }

    /// Its directory under the jails.
    pub fn directory(self) -> String {
        self.id.hex()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slot(number: u16) -> Slot {
        Slot::new(number).expect("a slot")
    }

    proptest! {
        #[test]
        fn an_id_keeps_its_slot_and_survives_text(number in 0..SLOTS) {
            let id = SandboxId::new(slot(number));
            prop_assert_eq!(id.slot().number(), number);
            prop_assert_eq!(id.to_string().parse::<SandboxId>(), Ok(id));
            prop_assert_eq!(&id.hex()[28..], &format!("{number:04x}"));
            prop_assert_eq!(serde_json::from_str::<SandboxId>(&serde_json::to_string(&id).expect("json")).expect("id"), id);
        }

        #[test]
        fn slots_never_share_a_uid(a in 0..SLOTS, b in 0..SLOTS) {
            prop_assume!(a != b);
            let block = UidBlock { index: 0, first: 0x7000_0000 };
            for uid in block.uids(slot(a)).all() {
                prop_assert!(!block.uids(slot(b)).all().contains(&uid));
                prop_assert!(block.holds(uid));
                prop_assert_eq!(block.slot_of(uid), Some(slot(a)));
                prop_assert!(uid < block.builder());
            }
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = text.parse::<SandboxId>();
            let _ = text.parse::<Tag>();
        }
    }

    #[test]
    fn refuses_what_is_no_id() {
        let good = SandboxId::new(slot(7)).to_string();
        for bad in ["", "sbx_", &good[4..], &good.to_uppercase(), &format!("{good}0"), &format!("{}ffff", &good[..32])]
        {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad} was taken");
        }
        for bad in ["", "abc", "abcde", "ab-d", "ABCD", "abc/"] {
            assert!(bad.parse::<Tag>().is_err(), "{bad} was taken");
        }
        assert!(Slot::new(SLOTS).is_none());
    }

    #[test]
    fn cgroup_names_lead_back() {
        let tag: Tag = "ab1c".parse().expect("tag");
        let id = SandboxId::new(slot(300));
        let name = Names { tag, id }.cgroup();
        assert_eq!(Names::from_cgroup(tag, &name), Some(id));
        assert_eq!(Names::from_cgroup("ab1d".parse().expect("tag"), &name), None);
    }
}
