//! The kernel's two network interfaces for programs, synchronously: one socket, one request, its answer.
//!
//! `route` makes links, addresses, routes and queues, `tables` changes and reads the elements of nftables, `connections`
//! forgets what a Sandbox left in the table of connections. A socket belongs to the namespace of the thread that opened it,
//! and stays there: a slot's sockets are opened once inside it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

pub mod connections;
pub mod route;
pub mod tables;

/// How long the kernel may take to answer. It answers before `send` returns, but for a transaction that others delay.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Longest datagram of an answer: the kernel fills pages.
const DATAGRAM: usize = 64 * 1024;

/// A socket to one of the kernel's families.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    sequence: u32,
    /// What of a datagram has not been looked at yet.
    pending: Vec<u8>,
}

impl Socket {
    fn open(protocol: Option<Protocol>, groups: u32) -> io::Result<Self> {
        let fd = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        rustix::net::bind(&fd, &SocketAddrNetlink::new(0, groups))?;
        // One error or acknowledgement for each message of a transaction; the kernel drops what does not fit, and then we
        // would wait in vain.
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&fd, 1 << 20);
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&fd, 1 << 20);
        Ok(Socket { fd, sequence: 0, pending: Vec::new() })
    }

    fn next(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        // Whatever an earlier request left unread is not an answer to this one.
        self.pending.clear();
        let sent = rustix::io::retry_on_intr(|| rustix::net::send(&self.fd, bytes, SendFlags::empty()))?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// One request that the kernel acknowledges.
    fn ask<T: NetlinkSerializable + NetlinkDeserializable>(&mut self, payload: T, flags: u16) -> io::Result<()> {
        let sequence = self.next();
        let bytes = framed(payload, NLM_F_REQUEST | NLM_F_ACK | flags, sequence);
        self.send(&bytes)?;
        loop {
            let message: NetlinkMessage<T> = self.message()?;
            if message.header.sequence_number != sequence {
                continue;
            }
            if let NetlinkPayload::Error(answer) = message.payload {
                return answer.code.map_or(Ok(()), |_| Err(answer.to_io()));
            }
        }
    }

    /// One request that the kernel answers with messages.
    fn dump<T: NetlinkSerializable + NetlinkDeserializable>(&mut self, payload: T, flags: u16) -> io::Result<Vec<T>> {
        let sequence = self.next();
        let bytes = framed(payload, NLM_F_REQUEST | flags, sequence);
        self.send(&bytes)?;
        let mut all = Vec::new();
        loop {
            let message: NetlinkMessage<T> = self.message()?;
            if message.header.sequence_number != sequence {
                continue;
            }
            match message.payload {
                NetlinkPayload::Done(_) => return Ok(all),
                NetlinkPayload::Error(answer) => return answer.code.map_or(Ok(all), |_| Err(answer.to_io())),
                NetlinkPayload::InnerMessage(inner) => {
                    all.push(inner);
                    if flags & NLM_F_DUMP == 0 {
                        return Ok(all);
                    }
                }
                _ => {}
            }
        }
    }

    /// The next message, waited for.
    fn message<T: NetlinkDeserializable>(&mut self) -> io::Result<NetlinkMessage<T>> {
        if self.pending.is_empty() {
            let time = Timespec { tv_sec: ANSWER_WITHIN.as_secs() as i64, tv_nsec: 0 };
            let ready = rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&time)))?;
            if ready == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut buffer = vec![0; DATAGRAM];
            let (got, _) =
                rustix::io::retry_on_intr(|| rustix::net::recv(&self.fd, &mut buffer[..], RecvFlags::empty()))?;
            buffer.truncate(got);
            self.pending = buffer;
        }
        let length = self.pending.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes) as usize);
        if length < HEADER || length > self.pending.len() {
            self.pending.clear();
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that is cut"));
        }
        let message = NetlinkMessage::deserialize(&self.pending[..length]).map_err(io::Error::other);
        self.pending.drain(..length.next_multiple_of(4).min(self.pending.len()));
        message
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Length of a message's header.
const HEADER: usize = 16;

/// One message as it is sent.
fn framed<T: NetlinkSerializable>(payload: T, flags: u16, sequence: u32) -> Vec<u8> {
    let mut message = NetlinkMessage::new(Default::default(), NetlinkPayload::InnerMessage(payload));
    message.header.flags = flags;
    message.header.sequence_number = sequence;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len().next_multiple_of(4)];
    message.serialize(&mut bytes);
    bytes
}
