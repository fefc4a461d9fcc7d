//! pepod's side of a relay: answers what connections it may let through.
//!
//! The relay reads what guests send, so whatever it says may be a guest's word: it is bounded, checked, and can at worst
//! name a name that the policy has.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use futures_util::{SinkExt, StreamExt};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::codec::{Framed, LinesCodec};
use tokio_util::sync::CancellationToken;

use super::{Barred, By, MESSAGE, Verdict, Word};
use crate::net::dns::{Doors, Resolver, Source, Why};
use crate::net::{HostName, Rule, RuleNumber};

/// Questions of one relay under way at once; more wait on its stream.
const AT_ONCE: usize = 64;

/// What is worth telling of a relay's work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A connection goes on.
    Passed {
        /// The name it named.
        name: HostName,
        /// Where it goes.
        address: Ipv4Addr,
        /// On which port.
        port: u16,
        /// How it named it.
        by: By,
    },
    /// One does not.
    Barred {
        /// The name, if it named one.
        name: Option<HostName>,
        /// Where it wanted to go, if known.
        to: Option<Ipv4Addr>,
        /// On which port.
        port: u16,
        /// Why.
        why: Barred,
    },
    /// One that went on has ended.
    Ended {
        /// The name it named.
        name: HostName,
        /// Where it went.
        address: Ipv4Addr,
        /// On which port.
        port: u16,
        /// Bytes from the guest.
        sent: u64,
        /// Bytes to the guest.
        received: u64,
    },
}

/// Answers a relay on its control stream until either ends. What happens is told by `events`, as far as it has room; when
/// `changed` does, the relay asks again for what it let through.
///
/// # Errors
/// The stream cannot be used, or the relay says what no relay says; it must be replaced then.
pub async fn attend<S: Source, D: Doors>(
    stream: OwnedFd,
    resolver: Arc<Resolver<S, D>>,
    events: mpsc::Sender<Event>,
    mut changed: watch::Receiver<u64>,
    end: CancellationToken,
) -> std::io::Result<()> {
    let stream: std::os::unix::net::UnixStream = stream.into();
    stream.set_nonblocking(true)?;
    let framed = Framed::new(UnixStream::from_std(stream)?, LinesCodec::new_with_max_length(MESSAGE));
    let (mut to, mut from) = framed.split::<String>();
    let (answers, mut queue) = mpsc::channel::<Verdict>(AT_ONCE);
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let wrong = std::io::Error::other;
    loop {
        let line = tokio::select! {
            () = end.cancelled() => return Ok(()),
            Some(verdict) = queue.recv() => {
                to.send(serde_json::to_string(&verdict)?).await.map_err(wrong)?;
                continue;
            }
            Ok(()) = changed.changed() => {
                to.send(serde_json::to_string(&Verdict::Again)?).await.map_err(wrong)?;
                continue;
            }
            line = from.next() => match line {
                None => return Ok(()),
                Some(line) => line.map_err(wrong)?,
            },
        };
        match serde_json::from_str(&line)? {
            Word::Ask { seq, name, to, port, by } => {
                // There is room for every answer under way, so whoever has a turn gives it back without us.
                let turn = Arc::clone(&turns).acquire_owned().await.map_err(std::io::Error::other)?;
                let (resolver, answers, events) = (Arc::clone(&resolver), answers.clone(), events.clone());
                tokio::spawn(async move {
                    let (verdict, event) = match decide(&resolver, &name, to, port).await {
                        Ok(address) => (Verdict::Go { seq, address }, Event::Passed { name, address, port, by }),
                        Err(why) => {
                            (Verdict::No { seq, why }, Event::Barred { name: Some(name), to: Some(to), port, why })
                        }
                    };
                    let _ = events.try_send(event);
                    // A relay that is gone has nobody to let through.
                    let _ = answers.send(verdict).await;
                    drop(turn);
                });
            }
            Word::Barred { why, name, to, port } => {
                let _ = events.try_send(Event::Barred { name, to, port, why });
            }
            Word::Ended { name, address, port, sent, received } => {
                let _ = events.try_send(Event::Ended { name, address, port, sent, received });
            }
        }
    }
}

/// Where a connection may go that wanted to go to that address and names that name.
async fn decide<S: Source, D: Doors>(
    resolver: &Resolver<S, D>,
    name: &HostName,
    to: Ipv4Addr,
    port: u16,
) -> Result<Ipv4Addr, Barred> {
    let policy = resolver.scope().policy;
    let fits = |rule: &&Rule| rule.is_relayed() && rule.open_ports().contains(&port);
    let rules: Vec<RuleNumber> = policy.named(name).filter(fits).map(Rule::number).collect();
    if rules.is_empty() {
        return Err(Barred::Name);
    }
    // A life of pepod that did not open the address does not know by which rule it is open.
    let opened = resolver.opened_by(to);
    if !opened.is_empty() && !opened.iter().any(|rule| rules.contains(rule)) {
        return Err(Barred::Rule);
    }
    let addresses = resolver.addresses(name).await.map_err(|why| match why {
        Why::NotListed | Why::Special => Barred::Name,
        Why::Floor => Barred::Floor,
        _ => Barred::Lookup,
    })?;
    match addresses.contains(&to) {
        true => Ok(to),
        false => addresses.first().copied().ok_or(Barred::Lookup),
    }
}

#[cfg(test)]
mod tests;
