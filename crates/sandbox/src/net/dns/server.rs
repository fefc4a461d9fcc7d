//! The sockets a guest asks on: bounded in rate, in questions at once, in streams, in bytes, in time.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::Why;
use super::lines::Source;
use super::question::{Over, QUESTION_BYTES, Question, Taken};
use super::resolver::{Doors, Resolver};

/// Questions at once after a quiet time, in seconds of the rate. A browser's first page was seen to ask 120.
const BURST: f64 = 4.0;

/// Questions of one Sandbox under way at once.
const AT_ONCE: usize = 64;

/// Streams of one Sandbox at once.
const STREAMS: usize = 8;

/// Questions on one stream.
const ON_STREAM: usize = 128;

/// How long a stream may say nothing, or take to take an answer.
const IDLE: Duration = Duration::from_secs(10);

/// How long the socket rests when the system cannot read or accept from it.
const REST: Duration = Duration::from_millis(100);

/// The sockets of one Sandbox, bound in its namespace.
#[derive(Debug)]
pub struct Sockets {
    /// For datagrams.
    pub udp: OwnedFd,
    /// For streams, listening.
    pub tcp: OwnedFd,
}

/// Answers on these sockets until `end`; the sockets close then. Above `rate` questions a second on average they are dropped
/// and counted.
///
/// # Errors
/// They cannot be used.
pub async fn serve<S: Source, D: Doors>(
    sockets: Sockets,
    resolver: Arc<Resolver<S, D>>,
    rate: u32,
    end: CancellationToken,
) -> io::Result<()> {
    let udp: std::net::UdpSocket = sockets.udp.into();
    let tcp: std::net::TcpListener = sockets.tcp.into();
    udp.set_nonblocking(true)?;
    tcp.set_nonblocking(true)?;
    let (udp, tcp) = (Arc::new(UdpSocket::from_std(udp)?), TcpListener::from_std(tcp)?);
    let desk = Arc::new(Desk {
        resolver,
        rate: std::sync::Mutex::new(Bucket::new(rate)),
        at_once: Arc::new(Semaphore::new(AT_ONCE)),
    });
    let streams = Arc::new(Semaphore::new(STREAMS));
    let work = async { tokio::join!(datagrams(&desk, &udp), accept(&desk, &tcp, &streams, &end)) };
    tokio::select! {
        () = end.cancelled() => {}
        _ = work => {}
    }
    Ok(())
}

/// What all questions of a Sandbox share.
struct Desk<S, D> {
    resolver: Arc<Resolver<S, D>>,
    rate: std::sync::Mutex<Bucket>,
    at_once: Arc<Semaphore>,
}

/// A bucket of tokens.
struct Bucket {
    left: f64,
    rate: f64,
    at: Instant,
}

impl Bucket {
    fn new(rate: u32) -> Self {
        let rate = f64::from(rate);
        Bucket { left: rate * BURST, rate, at: Instant::now() }
    }

    fn take(&mut self, now: Instant) -> bool {
        let more = now.duration_since(self.at).as_secs_f64() * self.rate;
        self.left = (self.left + more).min(self.rate * BURST);
        self.at = now;
        if self.left < 1.0 {
            return false;
        }
        self.left -= 1.0;
        true
    }
}

impl<S: Source, D: Doors> Desk<S, D> {
    /// Whether one more question is taken now.
    fn turn(&self) -> Option<OwnedSemaphorePermit> {
        self.resolver.counts().ask();
        let in_rate = self.rate.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take(Instant::now());
        let turn = in_rate.then(|| Arc::clone(&self.at_once).try_acquire_owned().ok()).flatten();
        if turn.is_none() {
            self.resolver.refuse(None, Why::Rate);
        }
        turn
    }

    /// The reply to a packet, or none.
    async fn reply(&self, packet: &[u8], over: Over) -> Option<Vec<u8>> {
        let question = match Question::take(packet, over) {
            Taken::Drop => {
                self.resolver.refuse(None, Why::Malformed);
                return None;
            }
            Taken::Reply { packet, why } => {
                self.resolver.refuse(None, why);
                return Some(packet);
            }
            Taken::Ask(question) => question,
        };
        // Also for types of which there is nothing, so that a name off the list says so whatever is asked of it.
        if question.is_empty() {
            return Some(match self.resolver.scope().rules(&question.name) {
                Ok(_) => question.answer(ResponseCode::NoError, Vec::new()),
                Err(why) => {
                    self.resolver.refuse(Some(&question.name), why);
                    question.refuse(ResponseCode::Refused, why)
                }
            });
        }
        Some(match self.resolver.answer(&question.name, question.kind).await {
            Ok(answer) => question.answer(answer.code, answer.records),
            // Nothing of it may be reached: that is no failure to be tried again.
            Err(Why::Floor) => question.refuse(ResponseCode::NoError, Why::Floor),
            Err(why @ (Why::NotListed | Why::Special | Why::Kind)) => question.refuse(ResponseCode::Refused, why),
            Err(why) => question.refuse(ResponseCode::ServFail, why),
        })
    }
}

async fn datagrams<S: Source, D: Doors>(desk: &Arc<Desk<S, D>>, socket: &Arc<UdpSocket>) {
    let mut buffer = [0; QUESTION_BYTES + 1];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(_) => {
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let Some(turn) = desk.turn() else { continue };
        let packet = buffer[..length].to_vec();
        let (desk, socket) = (Arc::clone(desk), Arc::clone(socket));
        tokio::spawn(async move {
            if let Some(reply) = desk.reply(&packet, Over::Udp).await {
                // A guest that does not take it asks again.
                let _ = socket.send_to(&reply, from).await;
            }
            drop(turn);
        });
    }
}

async fn accept<S: Source, D: Doors>(
    desk: &Arc<Desk<S, D>>,
    listener: &TcpListener,
    streams: &Arc<Semaphore>,
    end: &CancellationToken,
) {
    loop {
        // One more waits in the listener's queue.
        let Ok(room) = Arc::clone(streams).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (desk, end) = (Arc::clone(desk), end.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = end.cancelled() => {}
                        _ = talk(&desk, stream) => {}
                    }
                    drop(room);
                });
            }
            Err(_) => tokio::time::sleep(REST).await,
        }
    }
}

/// Questions on a stream, one after the other.
async fn talk<S: Source, D: Doors>(desk: &Desk<S, D>, mut stream: TcpStream) -> io::Result<()> {
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    for _ in 0..ON_STREAM {
        let length = tokio::time::timeout(IDLE, stream.read_u16()).await.map_err(late)??;
        if usize::from(length) > QUESTION_BYTES {
            desk.resolver.refuse(None, Why::Malformed);
            return Ok(());
        }
        let mut packet = vec![0; usize::from(length)];
        tokio::time::timeout(IDLE, stream.read_exact(&mut packet)).await.map_err(late)??;
        let Some(turn) = desk.turn() else { return Ok(()) };
        let Some(reply) = desk.reply(&packet, Over::Tcp).await else { return Ok(()) };
        drop(turn);
        let mut framed = u16::try_from(reply.len()).unwrap_or_default().to_be_bytes().to_vec();
        framed.extend_from_slice(&reply);
        tokio::time::timeout(IDLE, stream.write_all(&framed)).await.map_err(late)??;
    }
    Ok(())
}
