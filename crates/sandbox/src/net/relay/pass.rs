//! Connections through the relay: read who is meant, ask, connect, copy.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::rc::Rc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::control::Control;
use super::hello::{self, Bad, Read};
use super::http::{self, Reply, Requests, Step};
use super::{Barred, By, CONNECTIONS, Word};
use crate::net::HostName;

/// How long a connection may take to say whom it is for.
const NAMED_WITHIN: Duration = Duration::from_secs(10);

/// How long its server may take to accept it.
const CONNECTED_WITHIN: Duration = Duration::from_secs(10);

/// How long a connection may say nothing in either direction.
const IDLE: Duration = Duration::from_secs(3600);

/// How long the last words of a refusal may take to be taken.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Bytes moved at once.
const PART: usize = 32 * 1024;

/// Bytes that may stand before a second greeting.
const BEFORE_SECOND: usize = 64 * 1024;

/// Where connections come from and whom to ask about them.
pub struct Desk {
    /// pepod.
    pub control: Rc<Control>,
    /// Connections now.
    pub open: Cell<usize>,
    scratch: RefCell<Box<[u8]>>,
    wanted: fn(&TcpStream) -> io::Result<SocketAddrV4>,
}

impl Desk {
    /// One that finds where a connection was going in that way.
    pub fn new(control: Rc<Control>, wanted: fn(&TcpStream) -> io::Result<SocketAddrV4>) -> Rc<Self> {
        Rc::new(Desk { control, open: Cell::new(0), scratch: RefCell::new(vec![0; PART].into_boxed_slice()), wanted })
    }

    /// Takes connections, for good.
    pub async fn accept(self: Rc<Self>, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) if self.open.get() < CONNECTIONS => {
                    self.open.set(self.open.get() + 1);
                    let desk = Rc::clone(&self);
                    tokio::task::spawn_local(async move {
                        desk.serve(stream).await;
                        desk.open.set(desk.open.get() - 1);
                    });
                }
                Ok((stream, _)) => {
                    let to = (self.wanted)(&stream).ok();
                    self.bar(Barred::Busy, None, to);
                    drop(stream);
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn bar(&self, why: Barred, name: Option<&HostName>, to: Option<SocketAddrV4>) {
        let (address, port) = (to.map(|to| *to.ip()), to.map_or(0, |to| to.port()));
        self.control.tell(Word::Barred { why, name: name.cloned(), to: address, port });
    }

    async fn serve(&self, mut guest: TcpStream) {
        let Ok(to) = (self.wanted)(&guest) else { return };
        let first = match tokio::time::timeout(NAMED_WITHIN, self.first(&mut guest, to.port())).await {
            Ok(Ok(first)) => first,
            // It ended without a word.
            Ok(Err(Said::Nothing)) => return,
            Ok(Err(Said::Bad(spoken, bad))) => {
                self.bar(bad.into(), None, Some(to));
                return refuse(guest, spoken, None, bad.into()).await;
            }
            Err(_) => return self.bar(Barred::Slow, None, Some(to)),
        };
        let Some(name) = first.name().cloned() else { return };
        let spoken = first.spoken();
        let address = match self.control.ask(&name, *to.ip(), to.port(), first.by()).await {
            Ok(address) => address,
            Err(why) => {
                // A refusal of pepod's is known there.
                if why == Barred::Away {
                    self.bar(why, Some(&name), Some(to));
                }
                return refuse(guest, spoken, Some(&name), why).await;
            }
        };
        let connecting = TcpStream::connect((address, to.port()));
        let server = match tokio::time::timeout(CONNECTED_WITHIN, connecting).await {
            Ok(Ok(server)) => server,
            Ok(Err(_)) | Err(_) => {
                self.bar(Barred::Unreachable, Some(&name), Some(SocketAddrV4::new(address, to.port())));
                return refuse(guest, spoken, Some(&name), Barred::Unreachable).await;
            }
        };
        let _ = (guest.set_nodelay(true), server.set_nodelay(true));
        let pair = Pair { desk: self, last: Cell::new(Instant::now()), sent: Cell::new(0), received: Cell::new(0) };
        let by = first.by();
        let passed = tokio::select! {
            passed = pair.pass(guest, server, first) => passed,
            // Neither side is told more than that it is over.
            () = self.allowed(&name, to, by) => Err(Broken::Gone),
        };
        if let Err(Broken::Bad(bad)) = passed {
            self.bar(bad.into(), Some(&name), Some(to));
        }
        let (sent, received) = (pair.sent.get(), pair.received.get());
        self.control.tell(Word::Ended { name, address, port: to.port(), sent, received });
    }

    /// Returns when a connection that goes on may not any more.
    async fn allowed(&self, name: &HostName, to: SocketAddrV4, by: By) {
        loop {
            self.control.again().await;
            let answer = self.control.ask(name, *to.ip(), to.port(), by).await;
            // Not allowed; that it is not known just now is another matter.
            if let Err(Barred::Name | Barred::Rule | Barred::Floor) = answer {
                return;
            }
        }
    }

    /// Reads until it is known whom a connection is for.
    async fn first(&self, guest: &mut TcpStream, port: u16) -> Result<First, Said> {
        let mut bytes = Vec::new();
        self.more(guest, &mut bytes).await?;
        match bytes.first() {
            Some(&byte) if hello::is_tls(byte) => loop {
                match hello::client_hello(&bytes) {
                    Read::Done(hello) => return Ok(First::Tls { hello, bytes }),
                    Read::Bad(bad) => return Err(Said::Bad(Spoken::Tls, bad)),
                    Read::More => self.more(guest, &mut bytes).await?,
                }
            },
            Some(&byte) if http::is_http(byte) => {
                let mut requests = Requests::new(port);
                loop {
                    requests.take(&std::mem::take(&mut bytes));
                    match requests.step().map_err(|bad| Said::Bad(Spoken::Http, bad))? {
                        Step::More => self.more(guest, &mut bytes).await?,
                        step => return Ok(First::Http { requests, step }),
                    }
                }
            }
            _ => Err(Said::Bad(Spoken::Else, Bad::Protocol)),
        }
    }

    async fn more(&self, guest: &mut TcpStream, bytes: &mut Vec<u8>) -> Result<(), Said> {
        loop {
            guest.readable().await.map_err(|_| Said::Nothing)?;
            let mut scratch = self.scratch.borrow_mut();
            match guest.try_read(&mut scratch) {
                Ok(0) => return Err(Said::Nothing),
                Ok(count) => {
                    bytes.extend_from_slice(&scratch[..count]);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(Said::Nothing),
            }
        }
    }
}

/// What a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spoken {
    Tls,
    Http,
    Else,
}

/// Why there is no name.
enum Said {
    Nothing,
    Bad(Spoken, Bad),
}

/// What a connection said first.
enum First {
    Tls { hello: hello::Hello, bytes: Vec<u8> },
    Http { requests: Requests, step: Step },
}

impl First {
    fn name(&self) -> Option<&HostName> {
        match self {
            First::Tls { hello, .. } => Some(&hello.name),
            First::Http { requests, .. } => requests.name(),
        }
    }

    fn by(&self) -> By {
        match self {
            First::Tls { hello, .. } if hello.encrypted => By::TlsOuter,
            First::Tls { .. } => By::Tls,
            First::Http { .. } => By::Http,
        }
    }

    fn spoken(&self) -> Spoken {
        match self {
            First::Tls { .. } => Spoken::Tls,
            First::Http { .. } => Spoken::Http,
        }
    }
}

/// Why a connection that went on ended early.
enum Broken {
    /// Either side is gone.
    Gone,
    /// The guest said what may not pass.
    Bad(Bad),
}

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Broken::Gone
    }
}

impl From<Bad> for Broken {
    fn from(bad: Bad) -> Self {
        Broken::Bad(bad)
    }
}

/// A connection that goes on.
struct Pair<'a> {
    desk: &'a Desk,
    last: Cell<Instant>,
    sent: Cell<u64>,
    received: Cell<u64>,
}

/// What the beginning of a server's words has to tell the other direction.
enum Ear {
    /// Nothing.
    Deaf,
    /// Whether it asks for a second greeting.
    Second(oneshot::Sender<bool>),
    /// Whether it agrees to a WebSocket.
    Agrees(oneshot::Sender<bool>),
}

impl Pair<'_> {
    async fn pass(&self, mut guest: TcpStream, mut server: TcpStream, first: First) -> Result<(), Broken> {
        let ((from_guest, to_guest), (from_server, to_server)) = (guest.split(), server.split());
        let (tell, told) = oneshot::channel();
        let both = async {
            match first {
                First::Tls { hello, bytes } => {
                    tokio::try_join!(
                        self.greeted(from_guest, to_server, hello, bytes, told),
                        self.down(from_server, to_guest, Ear::Second(tell)),
                    )
                }
                First::Http { requests, step } => {
                    let ear = if matches!(step, Step::Upgrade(_)) { Ear::Agrees(tell) } else { Ear::Deaf };
                    tokio::try_join!(
                        self.asked(from_guest, to_server, requests, step, told),
                        self.down(from_server, to_guest, ear),
                    )
                }
            }
        };
        tokio::select! {
            done = both => done.map(drop),
            () = self.idle() => Ok(()),
        }
    }

    async fn idle(&self) {
        loop {
            let until = self.last.get() + IDLE;
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }

    async fn send(&self, to: &mut WriteHalf<'_>, bytes: &[u8], count: &Cell<u64>) -> io::Result<()> {
        to.write_all(bytes).await?;
        count.set(count.get() + bytes.len() as u64);
        self.last.set(Instant::now());
        Ok(())
    }

    /// Reads what there is, at least a byte; an empty one is the end.
    async fn read(&self, from: &mut ReadHalf<'_>) -> io::Result<Vec<u8>> {
        loop {
            from.readable().await?;
            let mut scratch = self.desk.scratch.borrow_mut();
            match from.try_read(&mut scratch) {
                Ok(count) => return Ok(scratch[..count].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Copies the rest as it is, and the end too. Only what the other side does not take at once is kept.
    async fn copy(&self, from: &mut ReadHalf<'_>, to: &mut WriteHalf<'_>, count: &Cell<u64>) -> io::Result<()> {
        loop {
            // Nothing is read before it can be written: a slow reader holds no memory here.
            to.writable().await?;
            from.readable().await?;
            let left = {
                let mut scratch = self.desk.scratch.borrow_mut();
                let read = match from.try_read(&mut scratch) {
                    Ok(0) => break,
                    Ok(read) => read,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    Err(error) => return Err(error),
                };
                let written = match to.try_write(&scratch[..read]) {
                    Ok(written) => written,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                    Err(error) => return Err(error),
                };
                count.set(count.get() + written as u64);
                self.last.set(Instant::now());
                scratch[written..read].to_vec()
            };
            if !left.is_empty() {
                self.send(to, &left, count).await?;
            }
        }
        to.shutdown().await
    }

    /// The guest's side of TLS.
    async fn greeted(
        &self,
        mut from: ReadHalf<'_>,
        mut to: WriteHalf<'_>,
        hello: hello::Hello,
        mut bytes: Vec<u8>,
        second: oneshot::Receiver<bool>,
    ) -> Result<(), Broken> {
        self.send(&mut to, &bytes[..hello.length], &self.sent).await?;
        bytes.drain(..hello.length);
        // A server that ends without a word needs no more of the guest's.
        let Ok(second) = second.await else { return Ok(()) };
        if second {
            loop {
                match next_greeting(&bytes)? {
                    Some(name) if name == hello.name => break,
                    Some(_) => return Err(Broken::Bad(Bad::NoName)),
                    None if bytes.len() >= BEFORE_SECOND => return Err(Broken::Bad(Bad::Long)),
                    None => {}
                }
                let more = self.read(&mut from).await?;
                if more.is_empty() {
                    return Ok(());
                }
                bytes.extend(more);
            }
        }
        self.send(&mut to, &bytes, &self.sent).await?;
        drop(bytes);
        Ok(self.copy(&mut from, &mut to, &self.sent).await?)
    }

    /// The guest's side of HTTP.
    async fn asked(
        &self,
        mut from: ReadHalf<'_>,
        mut to: WriteHalf<'_>,
        mut requests: Requests,
        mut step: Step,
        agreed: oneshot::Receiver<bool>,
    ) -> Result<(), Broken> {
        loop {
            match step {
                Step::Pass(bytes) => self.send(&mut to, &bytes, &self.sent).await?,
                Step::Upgrade(bytes) => {
                    self.send(&mut to, &bytes, &self.sent).await?;
                    return self.upgraded(from, to, requests, agreed).await;
                }
                Step::More => {
                    let more = self.read(&mut from).await?;
                    if more.is_empty() {
                        to.shutdown().await?;
                        return Ok(());
                    }
                    requests.take(&more);
                }
            }
            step = requests.step()?;
        }
    }

    /// The guest's side once it has asked for a WebSocket.
    async fn upgraded(
        &self,
        mut from: ReadHalf<'_>,
        mut to: WriteHalf<'_>,
        mut requests: Requests,
        agreed: oneshot::Receiver<bool>,
    ) -> Result<(), Broken> {
        if agreed.await.unwrap_or(false) {
            self.send(&mut to, &requests.rest(), &self.sent).await?;
            return Ok(self.copy(&mut from, &mut to, &self.sent).await?);
        }
        // Where the answer ends is not followed here, so no other request may come after it.
        if !requests.rest().is_empty() || !self.read(&mut from).await?.is_empty() {
            return Err(Broken::Gone);
        }
        Ok(to.shutdown().await?)
    }

    /// The server's side.
    async fn down(&self, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, ear: Ear) -> Result<(), Broken> {
        let mut heard = Vec::new();
        let mut ear = Some(ear);
        while let Some(now) = ear.take() {
            let answer = match &now {
                Ear::Deaf => break,
                Ear::Second(_) => match hello::wants_second(&heard) {
                    Read::More => None,
                    Read::Done(second) => Some(second),
                    Read::Bad(bad) => return Err(Broken::Bad(bad)),
                },
                Ear::Agrees(_) => match http::reply(&heard) {
                    Reply::More => None,
                    Reply::Agreed => Some(true),
                    Reply::Other => Some(false),
                },
            };
            match (answer, now) {
                (Some(answer), Ear::Second(tell) | Ear::Agrees(tell)) => {
                    let _ = tell.send(answer);
                    break;
                }
                (_, again) => ear = Some(again),
            }
            let more = self.read(&mut from).await?;
            if more.is_empty() {
                to.shutdown().await?;
                return Ok(());
            }
            self.send(&mut to, &more, &self.received).await?;
            heard.extend(more);
        }
        drop(heard);
        Ok(self.copy(&mut from, &mut to, &self.received).await?)
    }
}

/// The name in a second greeting, once it is all there.
fn next_greeting(bytes: &[u8]) -> Result<Option<HostName>, Bad> {
    let before = match hello::before_second(bytes) {
        Read::Done(before) => before,
        Read::More => return Ok(None),
        Read::Bad(bad) => return Err(bad),
    };
    match hello::client_hello(&bytes[before..]) {
        Read::Done(hello) => Ok(Some(hello.name)),
        Read::More => Ok(None),
        Read::Bad(bad) => Err(bad),
    }
}

/// Says why not in what is spoken, and ends.
async fn refuse(mut guest: TcpStream, spoken: Spoken, name: Option<&HostName>, why: Barred) {
    const UNRECOGNIZED_NAME: u8 = 112;
    const DECODE_ERROR: u8 = 50;
    const INTERNAL_ERROR: u8 = 80;
    let words = match spoken {
        Spoken::Tls => {
            let alert = match why {
                Barred::Malformed | Barred::Long | Barred::Protocol => DECODE_ERROR,
                Barred::Busy | Barred::Away | Barred::Unreachable | Barred::Lookup => INTERNAL_ERROR,
                _ => UNRECOGNIZED_NAME,
            };
            vec![21, 3, 3, 0, 2, 2, alert]
        }
        Spoken::Http => {
            let status = match why {
                Barred::Malformed | Barred::Long | Barred::Protocol | Barred::NoName => "400 Bad Request",
                Barred::Busy | Barred::Away => "503 Service Unavailable",
                Barred::Unreachable | Barred::Lookup => "502 Bad Gateway",
                _ => "403 Forbidden",
            };
            let text = match name {
                Some(name) => format!("pepo: {name}: {why}\n"),
                None => format!("pepo: {why}\n"),
            };
            let length = text.len();
            format!(
                "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}"
            )
            .into_bytes()
        }
        Spoken::Else => return,
    };
    // What the guest still sends is read away for a moment: a reset would overtake the words.
    let last = async {
        guest.write_all(&words).await?;
        guest.shutdown().await?;
        let mut away = [0; 1024];
        loop {
            guest.readable().await?;
            match guest.try_read(&mut away) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err::<(), io::Error>(error),
            }
        }
    };
    let _ = tokio::time::timeout(LAST_WORDS, last).await;
}

/// Where a redirected connection was going.
pub fn original(stream: &TcpStream) -> io::Result<SocketAddrV4> {
    let to = rustix::net::sockopt::ip_original_dst(stream)?;
    // A connection made to the relay itself was going nowhere.
    let own = stream.local_addr()?;
    if own == to.into() || *to.ip() == Ipv4Addr::UNSPECIFIED {
        Err(io::ErrorKind::AddrNotAvailable.into())
    } else {
        Ok(to)
    }
}

#[cfg(test)]
mod tests;
