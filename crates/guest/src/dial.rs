//! A TCP port on the guest's loopback, as a stream of the host's.
//!
//! Bytes go both ways, each way ended by its `Eof`, and neither runs ahead of the other side's reading. Called by
//! `agent`.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::{Buf, Bytes};
use pepo_proto::{Channel, Error, FailureCode, Frame, MAX_DATA, Outcome};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::stream::{Stream, failed};

/// How long a program on the same machine may take to accept.
const CONNECT: Duration = Duration::from_secs(10);

/// Connects to `port`: IPv4 first, then IPv6.
pub async fn connect(port: u16) -> Result<TcpStream, Outcome> {
    if port == 0 {
        return Err(failed(FailureCode::Invalid, "port 0 is no port"));
    }
    let mut reason = io::Error::from(io::ErrorKind::ConnectionRefused);
    for address in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        match timeout(CONNECT, TcpStream::connect(SocketAddr::new(address, port))).await {
            Ok(Ok(socket)) => {
                // Small writes are the host's to gather; only latency is lost where this fails.
                let _ = socket.set_nodelay(true);
                return Ok(socket);
            }
            Ok(Err(error)) => reason = error,
            Err(_) => reason = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(failed(FailureCode::Refused, format!("port {port}: {reason}")))
}

/// Passes bytes both ways. `None` where the stream was lost.
pub async fn pass(stream: &mut Stream, socket: TcpStream) -> Option<Outcome> {
    match pump(stream, socket).await {
        Ok(outcome) => Some(outcome),
        Err(Error::Io(_) | Error::Truncated) => None,
        Err(error) => Some(failed(FailureCode::Invalid, error.to_string())),
    }
}

async fn pump(stream: &mut Stream, mut socket: TcpStream) -> Result<Outcome, Error> {
    stream.accept()?;
    let (mut receiver, mut sender) = stream.halves();
    let (from, to) = socket.split();
    let mut buffer = vec![0; MAX_DATA];
    let mut upward = Bytes::new();
    let (mut received, mut sent) = (0_u64, 0_u64);
    // Each way: open until its Eof.
    let (mut up, mut down) = (true, true);
    let mut shut = false;
    loop {
        if let Some(told) = receiver.due() {
            sender.queue(told)?;
        }
        let clear = sender.try_flush()?;
        if clear && !up && !down && upward.is_empty() {
            return Ok(Outcome::Done);
        }
        if !up && upward.is_empty() && !shut {
            shut = true;
            // The program has closed already: what it wrote is still passed on.
            let _ = rustix::net::shutdown(to.as_ref(), rustix::net::Shutdown::Write);
        }
        tokio::select! {
            frame = receiver.receive(), if upward.is_empty() => match frame? {
                None => return Err(Error::Truncated),
                Some(Frame::Data { channel: Channel::In, offset, mut bytes }) if offset <= received && up => {
                    let end = offset.saturating_add(bytes.len() as u64);
                    if end > received {
                        bytes.advance((received - offset) as usize);
                        received = end;
                        upward = bytes;
                    }
                }
                Some(Frame::Eof { channel: Channel::In, offset }) if offset == received => up = false,
                Some(_) => return Err(Error::Malformed("data")),
            },
            result = to.writable(), if !upward.is_empty() => {
                result?;
                match to.try_write(&upward) {
                    Ok(written) => upward.advance(written),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // The program takes no more. What it says is still passed on; what is sent is dropped.
                    Err(_) => upward.clear(),
                }
            }
            result = sender.writable(), if !clear => result?,
            result = from.readable(), if clear && down => {
                result?;
                match from.try_read(&mut buffer) {
                    Ok(0) => {
                        down = false;
                        sender.queue(Frame::Eof { channel: Channel::Out, offset: sent })?;
                    }
                    Ok(read) => {
                        let bytes = Bytes::copy_from_slice(&buffer[..read]);
                        sender.queue(Frame::Data { channel: Channel::Out, offset: sent, bytes })?;
                        sent += read as u64;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        sender.queue(Frame::Eof { channel: Channel::Out, offset: sent })?;
                        return Ok(failed(FailureCode::Io, format!("the connection broke: {error}")));
                    }
                }
            }
        }
    }
}
