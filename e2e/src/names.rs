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
                if let Some(answer) = by.answer(&buffer[..length]) {
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
    /// The answer to a question for one name: it ends where the question's first section does.
    fn answer(&self, packet: &[u8]) -> Option<Vec<u8>> {
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
        let question = packet.get(12..at + 4)?;
        let wants_address = packet.get(at..at + 2)? == [0, 1];
        let mut name = labels.join(".");
        lock(&self.asked).push(name.clone());
        let (mut records, mut count) = (Vec::new(), 0_u16);
        let mut add = |name: &str, kind: u16, data: &[u8]| {
            records.extend(wire(name));
            records.extend(kind.to_be_bytes());
            records.extend([0, 1, 0, 0, 0, 60]);
            records.extend((data.len() as u16).to_be_bytes());
            records.extend(data);
            count += 1;
        };
        let names = lock(&self.names);
        for _ in 0..4 {
            match names.get(&name) {
                Some(Has::Alias(to)) => {
                    add(&name, 5, &wire(to));
                    name.clone_from(to);
                }
                Some(Has::Addresses(addresses)) if wants_address => {
                    addresses.iter().for_each(|address| add(&name, 1, &address.octets()));
                    break;
                }
                _ => break,
            }
        }
        let known = names.contains_key(&name);
        let mut answer = packet.get(..2)?.to_vec();
        answer.extend([0x81, if known { 0x80 } else { 0x83 }, 0, 1]);
        answer.extend(count.to_be_bytes());
        answer.extend([0; 4]);
        answer.extend(question);
        answer.extend(records);
        Some(answer)
    }
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
