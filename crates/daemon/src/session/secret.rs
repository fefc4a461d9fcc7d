//! A Session's secrets on their way to the store, and from there to a guest.

use std::collections::BTreeMap;

use pepo_api::SessionId;
use zeroize::Zeroizing;

use super::{Error, Sessions};
use crate::secrets::{self, Secrets};
use crate::store::{ChangedSecrets, Write};

impl Sessions {
    /// Hands the secrets of a Session that is about to be recorded to the store, which keeps the order.
    pub(super) async fn seal(&self, session: SessionId, secrets: &Secrets) -> Result<(), Error> {
        let changes = secrets.0.iter().map(|(name, value)| self.sealed(session, name, Some(value)));
        let changes = changes.collect::<Result<Vec<_>, _>>()?;
        if !changes.is_empty() {
            self.0.store.write_later(Write::Secrets(Box::new(ChangedSecrets { session, changes }))).await;
        }
        Ok(())
    }

    fn sealed(
        &self,
        session: SessionId,
        name: &str,
        value: Option<&Zeroizing<String>>,
    ) -> Result<(String, Option<Vec<u8>>), Error> {
        let sealed = value.map(|value| self.0.vault.seal(session, name, value)).transpose()?;
        Ok((name.to_owned(), sealed))
    }

    /// Changes secrets; returns when that is on the disk. Called by the Session's driver alone.
    ///
    /// # Errors
    /// They are too many together, or a failing disk.
    pub(super) async fn change_secrets(
        &self,
        session: SessionId,
        wanted: &BTreeMap<String, Option<Zeroizing<String>>>,
    ) -> Result<(), Error> {
        let there = self.0.store.secrets(session).await?;
        let stay = there.iter().filter(|(name, _)| !wanted.contains_key(name));
        let stay: Vec<_> = stay.map(|(name, sealed)| (name, sealed.len().saturating_sub(secrets::ADDED))).collect();
        let new = wanted.iter().filter_map(|(name, value)| Some((name, value.as_ref()?.len())));
        let all: Vec<_> = stay.into_iter().chain(new).collect();
        fits(all.iter().map(|(name, bytes)| (name.as_str(), *bytes)))?;
        let changes = wanted.iter().map(|(name, value)| self.sealed(session, name, value.as_ref()));
        let changes = changes.collect::<Result<Vec<_>, _>>()?;
        Ok(self.0.store.write(Write::Secrets(Box::new(ChangedSecrets { session, changes }))).await?)
    }

    /// The secrets of a Session, opened: for its guest, and to compare with what is asked for.
    ///
    /// # Errors
    /// One does not open, or a failing disk.
    pub async fn unseal(&self, session: SessionId) -> Result<Secrets, Error> {
        let mut opened = BTreeMap::new();
        for (name, sealed) in self.0.store.secrets(session).await? {
            let value = self.0.vault.unseal(session, &name, &sealed)?;
            opened.insert(name, value);
        }
        Ok(Secrets(opened))
    }
}

/// Whether these are not too many for one Session.
///
/// # Errors
/// [`Error::Invalid`].
pub fn fits<'a>(all: impl Iterator<Item = (&'a str, usize)>) -> Result<(), Error> {
    let refuse = |message: String| Err(Error::Invalid { param: "secrets", message });
    let (mut count, mut bytes) = (0, 0);
    for (name, value) in all {
        count += 1;
        bytes += name.len() + value + 8;
    }
    if count > secrets::MOST {
        return refuse(format!("{count} secrets; at most {}", secrets::MOST));
    }
    if bytes > secrets::BYTES {
        return refuse(format!("the secrets have {bytes} bytes together; at most {}", secrets::BYTES));
    }
    Ok(())
}
