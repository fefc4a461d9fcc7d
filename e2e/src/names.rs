//! A resolver for the internet of a test: says what it is told to say, and remembers what it was asked.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// What a name has.
#[derive(Clone, Debug)]
pub enum Has {
    /// These addresses.
    Addresses(Vec<Ipv4Addr>),
    /// Another name.
    Alias(String),
    /// This address, for no time at all.
    Brief(Ipv4Addr),
    /// At each question the next of these.
    Turns(Vec<Ipv4Addr>),
    /// Before the true answer one with a wrong number, and one for another name, that tell this lie.
    Forged {
        /// What the forged ones say.
        lie: Ipv4Addr,
        /// What the true one says.
        truth: Ipv4Addr,
    },
}

#[derive(Default)]
struct Shared {
    names: Mutex<BTreeMap<String, Has>>,
    asked: Mutex<Vec<String>>,
    stop: AtomicBool,
}

/// It answers until it is dropped.
pub struct Names {
    shared: Arc<Shared>,
    answering: Option<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("lock")
}

impl Names {
    /// Answers on that socket.
    pub fn new(socket: UdpSocket) -> Self {
        socket.set_read_timeout(Some(Duration::from_millis(50))).expect("timeout");
        let shared = Arc::new(Shared::default());
        let by = Arc::clone(&shared);
        let answering = std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            while !by.stop.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut buffer) else { continue };
                for answer in by.answers(&buffer[..length]) {
                    let _ = socket.send_to(&answer, from);
                }
            }
        });
        Names { shared, answering: Some(answering) }
    }

    /// Says this of a name from now on.
    pub fn say(&self, name: &str, has: Has) {
        lock(&self.shared.names).insert(name.to_owned(), has);
    }

    /// Every name that was asked for, in order.
    pub fn asked(&self) -> Vec<String> {
        lock(&self.shared.asked).clone()
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(answering) = self.answering.take() {
            let _ = answering.join();
        }
    }
}

impl Shared {
    /// Everything that is sent for a question.
    fn answers(&self, packet: &[u8]) -> Vec<Vec<u8>> {
        let Some((name, wants_address, question)) = asked_for(packet) else { return Vec::new() };
        lock(&self.asked).push(name.clone());
        let reply = |lie| self.reply(&name, wants_address, packet, &question, lie);
        let lie = match lock(&self.names).get(&name) {
            Some(Has::Forged { lie, .. }) => Some(*lie),
            _ => None,
        };
        let mut packets = Vec::new();
        if let Some(lie) = lie {
            let mut wrong_number = reply(Some(lie));
            wrong_number[1] ^= 1;
            let mut wrong_name = reply(Some(lie));
            // The first letter of the question.
            wrong_name[13] ^= 1;
            packets.extend([wrong_number, wrong_name]);
        }
        packets.push(reply(None));
        packets
    }

    /// The answer to a question for one name, or a lie in its form.
    fn reply(&self, name: &str, wants_address: bool, packet: &[u8], question: &[u8], lie: Option<Ipv4Addr>) -> Vec<u8> {
        let mut name = name.to_owned();
        let (mut records, mut count) = (Vec::new(), 0_u16);
        let mut add = |name: &str, kind: u16, seconds: u8, data: &[u8]| {
            records.extend(wire(name));
            records.extend(kind.to_be_bytes());
            records.extend([0, 1, 0, 0, 0, seconds]);
            records.extend((data.len() as u16).to_be_bytes());
            records.extend(data);
            count += 1;
        };
        let mut names = lock(&self.names);
        for _ in 0..4 {
            match names.get_mut(&name) {
                Some(Has::Alias(to)) => {
                    add(&name, 5, 60, &wire(to));
                    name.clone_from(to);
                    continue;
                }
                Some(_) if !wants_address => {}
                Some(Has::Addresses(addresses)) => {
                    addresses.iter().for_each(|address| add(&name, 1, 60, &address.octets()));
                }
                Some(Has::Brief(address)) => add(&name, 1, 0, &address.octets()),
                Some(Has::Turns(addresses)) => {
                    add(&name, 1, 0, &addresses[0].octets());
                    addresses.rotate_left(1);
                }
                Some(Has::Forged { truth, .. }) => add(&name, 1, 60, &lie.unwrap_or(*truth).octets()),
                None => {}
            }
            break;
        }
        let known = names.contains_key(&name);
        let mut answer = packet[..2].to_vec();
        answer.extend([0x81, if known { 0x80 } else { 0x83 }, 0, 1]);
        answer.extend(count.to_be_bytes());
        answer.extend([0; 4]);
        answer.extend(question);
        answer.extend(records);
        answer
    }
}

/// The one name that a packet asks for, whether for its addresses, and the question itself.
fn asked_for(packet: &[u8]) -> Option<(String, bool, Vec<u8>)> {
    let (mut at, mut labels) = (12, Vec::new());
    loop {
        let length = usize::from(*packet.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(packet.get(at..at + length)?).to_ascii_lowercase());
        at += length;
    }
    let wants_address = packet.get(at..at + 2)? == [0, 1];
    Some((labels.join("."), wants_address, packet.get(12..at + 4)?.to_vec()))
}

/// A name as it lies in a packet.
fn wire(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes
}
