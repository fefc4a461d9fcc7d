//! The way upstream: one socket for one query, made and connected by the privileged side.
//!
//! A socket per query is a random port per query, chosen by the kernel, and a connected one takes packets of its server
//! alone; the number in the query is random too. So whoever forges an answer guesses 32 bits. Sockets are fetched a few at a
//! time, ahead of need, because pepod itself may not make any.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hickory_proto::op::{Edns, Message, Query, ResponseCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use super::Why;
use super::chase::{Heard, hear};

/// Sockets fetched at once.
const BATCH: usize = 8;

/// Sockets kept ready at most.
const READY: usize = 16;

/// How long a ready socket is good: the host's resolver may have moved since.
const FRESH: Duration = Duration::from_secs(30);

/// Queries under way at once, all Sandboxes together. None has more than half of what is left free, so that some are left
/// for others whatever it asks (whoever asks for names of a server that never answers holds each for seconds), and the first
/// of each waits for one.
const AT_ONCE: usize = 256;

/// How often a query is sent.
const ATTEMPTS: usize = 3;

/// How long one attempt waits. Three of them are below the 5 s after which a guest's own library asks again.
const WAIT: Duration = Duration::from_millis(1500);

/// How long the same takes over TCP at most.
const WAIT_TCP: Duration = Duration::from_secs(3);

/// Packets that are not the answer, before an attempt is given up: somebody is guessing.
const FOREIGN: usize = 32;

/// The longest answer taken over UDP, and what we say we take.
const UDP_BYTES: usize = 1232;

/// The longest answer taken over TCP.
const TCP_BYTES: usize = 16 * 1024;

/// How a socket is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// For one datagram there and one back.
    Udp,
    /// For one longer answer.
    Tcp,
}

/// Who makes sockets that are connected, or being connected, to a server upstream.
pub trait Source: Send + Sync + 'static {
    /// At most `most` new non-blocking sockets to the server of that number, modulo how many there are. No sockets: there is
    /// no server.
    fn sockets(&self, kind: Kind, server: usize, most: usize) -> impl Future<Output = io::Result<Vec<OwnedFd>>> + Send;
}

/// Queries of one resolver under way.
#[derive(Debug, Default)]
pub struct Share(AtomicUsize);

/// One of them, until it is dropped.
struct Turn<'a>(&'a Share);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The way upstream, shared by all resolvers of an instance.
pub struct Lines<S> {
    source: S,
    ready: Mutex<VecDeque<(Instant, OwnedFd)>>,
    at_once: Semaphore,
}

impl<S: Source> Lines<S> {
    /// By sockets from there.
    pub fn new(source: S) -> Arc<Self> {
        Arc::new(Lines { source, ready: Mutex::default(), at_once: Semaphore::new(AT_ONCE) })
    }

    /// Asks upstream and returns the one answer to this query.
    ///
    /// # Errors
    /// [`Why::Rate`], [`Why::Silent`], [`Why::Wrong`], [`Why::Large`], [`Why::Upstream`], [`Why::NoServer`].
    pub async fn ask(&self, query: &Query, share: &Share) -> Result<Message, Why> {
        let others = share.0.fetch_add(1, Ordering::Relaxed);
        let _turn = Turn(share);
        let _line = match others {
            0 => tokio::time::timeout(WAIT, self.at_once.acquire()).await.map_err(|_| Why::Rate)?.ok(),
            _ if others * 2 < self.at_once.available_permits() => self.at_once.try_acquire().ok(),
            _ => None,
        }
        .ok_or(Why::Rate)?;
        let mut why = Why::Silent;
        for attempt in 0..ATTEMPTS {
            match self.attempt(query, attempt).await {
                Ok(message) if is_final(message.metadata.response_code) => return Ok(message),
                Ok(_) => why = Why::Upstream,
                Err(Why::NoServer) => return Err(Why::NoServer),
                Err(other) => why = other,
            }
        }
        Err(why)
    }

    async fn attempt(&self, query: &Query, server: usize) -> Result<Message, Why> {
        let mut message = Message::query();
        message.metadata.recursion_desired = true;
        message.queries.push(query.clone());
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_BYTES as u16);
        edns.set_version(0);
        message.edns = Some(edns);
        let (id, packet) = (message.metadata.id, message.to_vec().map_err(|_| Why::Malformed)?);
        let socket = self.udp(server).await?;
        let heard = tokio::time::timeout(WAIT, over_udp(socket, &packet, id, query)).await;
        match heard.map_err(|_| Why::Silent)?? {
            Some(message) => Ok(message),
            None => {
                let over = async {
                    let sockets = self.source.sockets(Kind::Tcp, server, 1).await.map_err(|_| Why::Silent)?;
                    over_tcp(sockets.into_iter().next().ok_or(Why::NoServer)?, &packet, id, query).await
                };
                tokio::time::timeout(WAIT_TCP, over).await.map_err(|_| Why::Silent)?
            }
        }
    }

    /// A socket to that server. Only those of the first are kept ready: the others are for when it is silent.
    async fn udp(&self, server: usize) -> Result<UdpSocket, Why> {
        let ready = if server == 0 { self.take_ready() } else { None };
        let fd = match ready {
            Some(fd) => fd,
            None => {
                let most = if server == 0 { BATCH } else { 1 };
                let made = tokio::time::timeout(WAIT, self.source.sockets(Kind::Udp, server, most)).await;
                let mut made = made.map_err(|_| Why::Silent)?.map_err(|_| Why::Silent)?;
                let fd = made.pop().ok_or(Why::NoServer)?;
                let now = Instant::now();
                let mut ready = lock(&self.ready);
                let room = READY.saturating_sub(ready.len());
                ready.extend(made.into_iter().take(room).map(|fd| (now, fd)));
                fd
            }
        };
        UdpSocket::from_std(fd.into()).map_err(|_| Why::Silent)
    }

    fn take_ready(&self) -> Option<OwnedFd> {
        let mut ready = lock(&self.ready);
        while let Some((made, fd)) = ready.pop_front() {
            if made.elapsed() < FRESH {
                return Some(fd);
            }
        }
        None
    }
}

/// Whether another server would say the same: that it failed, or will not, is its own affair.
fn is_final(code: ResponseCode) -> bool {
    matches!(code, ResponseCode::NoError | ResponseCode::NXDomain)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One datagram there and the answer back; [`None`]: it is too long for a datagram.
async fn over_udp(socket: UdpSocket, packet: &[u8], id: u16, query: &Query) -> Result<Option<Message>, Why> {
    socket.send(packet).await.map_err(|_| Why::Silent)?;
    // One byte more than is taken: a longer datagram is seen to be longer.
    let mut buffer = [0; UDP_BYTES + 1];
    for _ in 0..FOREIGN {
        let length = socket.recv(&mut buffer).await.map_err(|_| Why::Silent)?;
        match hear(&buffer[..length], id, query) {
            _ if length > UDP_BYTES => return Err(Why::Large),
            Heard::Answer(message) => return Ok(Some(*message)),
            Heard::Short => return Ok(None),
            Heard::Broken(why) => return Err(why),
            Heard::NotOurs => {}
        }
    }
    Err(Why::Wrong)
}

/// The same on a stream, where every message has its length in front.
async fn over_tcp(socket: OwnedFd, packet: &[u8], id: u16, query: &Query) -> Result<Message, Why> {
    let mut stream = TcpStream::from_std(socket.into()).map_err(|_| Why::Silent)?;
    // It may still be connecting: writable is connected, or failed.
    stream.writable().await.map_err(|_| Why::Silent)?;
    if stream.take_error().map_err(|_| Why::Silent)?.is_some() {
        return Err(Why::Silent);
    }
    let mut framed = u16::try_from(packet.len()).map_err(|_| Why::Malformed)?.to_be_bytes().to_vec();
    framed.extend_from_slice(packet);
    stream.write_all(&framed).await.map_err(|_| Why::Silent)?;
    let length = usize::from(stream.read_u16().await.map_err(|_| Why::Silent)?);
    if length > TCP_BYTES {
        return Err(Why::Large);
    }
    let mut answer = vec![0; length];
    stream.read_exact(&mut answer).await.map_err(|_| Why::Silent)?;
    match hear(&answer, id, query) {
        Heard::Answer(message) => Ok(*message),
        Heard::Broken(why) => Err(why),
        Heard::Short | Heard::NotOurs => Err(Why::Wrong),
    }
}
