//! The name in a TLS greeting. Pure: bytes in, a name or a reason out.
//!
//! ```text
//! record 22 | version | length     handshake 1 | length (3)     version random resumption ciphers compressions extensions
//!   greeting may lie in several records, cut anywhere; nothing else may lie between or behind in them
//! ```
//! One name, said once, is what counts; with an encrypted greeting inside it is the outer one. A server may ask for a
//! second greeting, which may not say another name: [`wants_second`] tells.

use crate::net::HostName;

/// The longest greeting taken, bytes with its records. With post-quantum keys they have 2 KiB; browsers' largest were seen
/// below 4.
pub const HELLO_BYTES: usize = 16 * 1024;

/// What bytes so far say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read<T> {
    /// Not yet enough.
    More,
    /// This.
    Done(T),
    /// They are none.
    Bad(Bad),
}

/// Why a connection's first words name nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bad {
    /// Not what is spoken here.
    Protocol,
    /// Malformed, ambiguous, or not as the standard has it.
    Malformed,
    /// Longer than anybody needs.
    Long,
    /// It says no name.
    NoName,
}

/// A greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The name it says.
    pub name: HostName,
    /// Whether another greeting is encrypted in it.
    pub encrypted: bool,
    /// How many of the bytes it is.
    pub length: usize,
}

const ALERT: u8 = 21;
const CHANGE_CIPHER: u8 = 20;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;
const CLIENT_HELLO: u8 = 1;
const SERVER_HELLO: u8 = 2;
const SERVER_NAME: u16 = 0;
const ENCRYPTED_HELLO: u16 = 0xfe0d;

/// The random of a server's hello that asks for a second greeting (RFC 8446, 4.1.3).
const SECOND: [u8; 32] = [
    0xCF, 0x21, 0xAD, 0x74, 0xE5, 0x9A, 0x61, 0x11, 0xBE, 0x1D, 0x8C, 0x02, 0x1E, 0x65, 0xB8, 0x91, 0xC2, 0xA2, 0x11,
    0x16, 0x7A, 0xBB, 0x8C, 0x5E, 0x07, 0x9E, 0x09, 0xE2, 0xC8, 0xA8, 0x33, 0x9C,
];

/// Whether a first byte begins a TLS record of a handshake.
pub fn is_tls(first: u8) -> bool {
    first == HANDSHAKE
}

/// Joins the handshake's bytes out of the records until `enough` says how many there must be; returns them and how many
/// bytes of records they took.
fn join(bytes: &[u8], enough: impl Fn(&[u8]) -> Option<usize>) -> Read<(Vec<u8>, usize)> {
    let (mut joined, mut at) = (Vec::new(), 0);
    loop {
        let other = if at == 0 { Bad::Protocol } else { Bad::Malformed };
        let Some(head) = bytes.get(at..at + 5) else {
            // What is there of it must be a record's already.
            let begins = bytes.get(at).is_none_or(|kind| *kind == HANDSHAKE);
            let version = bytes.get(at + 1).is_none_or(|major| *major == 3);
            return if begins && version { Read::More } else { Read::Bad(other) };
        };
        let length = usize::from(u16::from_be_bytes([head[3], head[4]]));
        if head[0] != HANDSHAKE || head[1] != 3 {
            return Read::Bad(other);
        }
        if length == 0 || length > 1 << 14 {
            return Read::Bad(Bad::Malformed);
        }
        let end = bytes.len().min(at + 5 + length);
        joined.extend_from_slice(&bytes[at + 5..end]);
        if let Some(enough) = enough(&joined)
            && joined.len() >= enough
        {
            return Read::Done((joined, at + 5 + length));
        }
        if end < at + 5 + length {
            return Read::More;
        }
        at = end;
    }
}

/// The name in what a client says first.
pub fn client_hello(bytes: &[u8]) -> Read<Hello> {
    let whole = |joined: &[u8]| {
        let head = joined.get(..4)?;
        Some(4 + (usize::from(head[1]) << 16 | usize::from(head[2]) << 8 | usize::from(head[3])))
    };
    let read = join(bytes, whole);
    let (joined, taken) = match read {
        Read::Done(done) => done,
        Read::More if bytes.len() >= HELLO_BYTES => return Read::Bad(Bad::Long),
        Read::More => return Read::More,
        Read::Bad(bad) => return Read::Bad(bad),
    };
    if joined[0] != CLIENT_HELLO {
        return Read::Bad(Bad::Malformed);
    }
    // Nothing may follow in the same record; a record that is not all there yet has something behind.
    if whole(&joined) != Some(joined.len()) || taken > bytes.len() {
        return Read::Bad(Bad::Malformed);
    }
    if taken > HELLO_BYTES {
        return Read::Bad(Bad::Long);
    }
    match name(&joined[4..]) {
        Ok((name, encrypted)) => Read::Done(Hello { name, encrypted, length: taken }),
        Err(bad) => Read::Bad(bad),
    }
}

/// A slice that is taken from the front.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Bad> {
        let (front, rest) = self.0.split_at_checked(count).ok_or(Bad::Malformed)?;
        self.0 = rest;
        Ok(front)
    }

    fn number(&mut self, bytes: usize) -> Result<usize, Bad> {
        Ok(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    /// What has its length in that many bytes before it.
    fn vector(&mut self, bytes: usize) -> Result<Rest<'a>, Bad> {
        let length = self.number(bytes)?;
        self.take(length).map(Rest)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn name(body: &[u8]) -> Result<(HostName, bool), Bad> {
    let mut body = Rest(body);
    // version, random
    body.take(2 + 32)?;
    let resumption = body.vector(1)?;
    let ciphers = body.vector(2)?;
    let compressions = body.vector(1)?;
    if resumption.0.len() > 32 || ciphers.is_empty() || ciphers.0.len() % 2 != 0 || compressions.is_empty() {
        return Err(Bad::Malformed);
    }
    if body.is_empty() {
        return Err(Bad::NoName);
    }
    let mut extensions = body.vector(2)?;
    if !body.is_empty() {
        return Err(Bad::Malformed);
    }
    let (mut name, mut encrypted) = (None, false);
    while !extensions.is_empty() {
        let kind = extensions.number(2)?;
        let content = extensions.vector(2)?;
        match u16::try_from(kind) {
            Ok(SERVER_NAME) if name.is_some() => return Err(Bad::Malformed),
            Ok(SERVER_NAME) => name = Some(server_name(content)?),
            Ok(ENCRYPTED_HELLO) => encrypted = true,
            _ => {}
        }
    }
    Ok((name.ok_or(Bad::NoName)?, encrypted))
}

/// One name of the one kind there is.
fn server_name(mut content: Rest<'_>) -> Result<HostName, Bad> {
    let mut list = content.vector(2)?;
    if !content.is_empty() {
        return Err(Bad::Malformed);
    }
    let kind = list.number(1)?;
    let name = list.vector(2)?;
    if kind != 0 || !list.is_empty() {
        return Err(Bad::Malformed);
    }
    let text = std::str::from_utf8(name.0).map_err(|_| Bad::Malformed)?;
    HostName::new(text).map_err(|_| Bad::Malformed)
}

/// Whether what a server says first asks its client for a second greeting.
pub fn wants_second(bytes: &[u8]) -> Read<bool> {
    match bytes.first() {
        None => return Read::More,
        // It has ended the handshake.
        Some(&ALERT) => return Read::Done(false),
        Some(_) => {}
    }
    // type, length, version, random
    match join(bytes, |_| Some(4 + 2 + 32)) {
        Read::Done((joined, _)) => Read::Done(joined[0] == SERVER_HELLO && joined[6..38] == SECOND),
        Read::More => Read::More,
        // Whatever it speaks, it is no TLS that asks again.
        Read::Bad(_) => Read::Done(false),
    }
}

/// How many bytes of what a client says after the first greeting stand before the second one: the record that keeps old
/// middle boxes quiet, and data it sent in advance, which no server reads any more.
pub fn before_second(bytes: &[u8]) -> Read<usize> {
    const QUIET: [u8; 6] = [CHANGE_CIPHER, 3, 3, 0, 1, 1];
    let mut at = 0;
    loop {
        let length = match bytes.get(at) {
            Some(&HANDSHAKE) => return Read::Done(at),
            Some(&(CHANGE_CIPHER | DATA)) | None => match bytes.get(at..at + 5) {
                Some(head) => 5 + usize::from(u16::from_be_bytes([head[3], head[4]])),
                None => return Read::More,
            },
            Some(_) => return Read::Bad(Bad::Malformed),
        };
        let Some(record) = bytes.get(at..at + length) else { return Read::More };
        if record[0] == CHANGE_CIPHER && record != QUIET {
            return Read::Bad(Bad::Malformed);
        }
        at += length;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A greeting as a client of today makes it, in one record.
    pub fn greeting(name: Option<&str>, more: &[(u16, Vec<u8>)]) -> Vec<u8> {
        let extension = |kind: u16, content: &[u8]| {
            let mut bytes = kind.to_be_bytes().to_vec();
            bytes.extend((content.len() as u16).to_be_bytes());
            bytes.extend(content);
            bytes
        };
        let mut extensions = extension(0x2b, &[2, 3, 4]);
        if let Some(name) = name {
            let mut list = vec![0];
            list.extend((name.len() as u16).to_be_bytes());
            list.extend(name.as_bytes());
            let mut content = (list.len() as u16).to_be_bytes().to_vec();
            content.extend(list);
            extensions.extend(extension(0, &content));
        }
        for (kind, content) in more {
            extensions.extend(extension(*kind, content));
        }
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.push(32);
        body.extend([9; 32]);
        body.extend([0, 4, 0x13, 1, 0x13, 2, 1, 0]);
        body.extend((extensions.len() as u16).to_be_bytes());
        body.extend(extensions);
        let mut message = vec![1, 0];
        message.extend((body.len() as u16).to_be_bytes());
        message.extend(body);
        records(&message, 1 << 14)
    }

    /// A handshake's bytes in records of that size.
    pub fn records(message: &[u8], size: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for part in message.chunks(size) {
            bytes.extend([22, 3, 1]);
            bytes.extend((part.len() as u16).to_be_bytes());
            bytes.extend(part);
        }
        bytes
    }

    fn name_of(bytes: &[u8]) -> Read<String> {
        match client_hello(bytes) {
            Read::Done(hello) => Read::Done(hello.name.to_string()),
            Read::More => Read::More,
            Read::Bad(bad) => Read::Bad(bad),
        }
    }

    #[test]
    fn a_greeting_says_its_name_wherever_it_is_cut() {
        let whole = greeting(Some("API.example.com"), &[(0x33, vec![5; 1300])]);
        for end in 0..whole.len() {
            assert_eq!(name_of(&whole[..end]), Read::More, "at {end}");
        }
        assert_eq!(name_of(&whole), Read::Done("api.example.com".to_owned()));
        let mut early = whole.clone();
        early.extend([23, 3, 3, 0, 1, 0]);
        assert!(matches!(client_hello(&early), Read::Done(hello) if hello.length == whole.len()));
        // In records of every size down to one byte, and each of those cut everywhere.
        for size in [1, 2, 3, 7, 100, 500] {
            let cut = records(&whole[5..], size);
            assert_eq!(name_of(&cut), Read::Done("api.example.com".to_owned()), "records of {size}");
            for end in (0..cut.len()).step_by(13) {
                assert_eq!(name_of(&cut[..end]), Read::More, "records of {size}, at {end}");
            }
        }
    }

    #[test]
    fn what_says_no_single_name_is_refused() {
        let list = |names: &[(u8, &str)]| {
            let mut list = Vec::new();
            for (kind, name) in names {
                list.push(*kind);
                list.extend((name.len() as u16).to_be_bytes());
                list.extend(name.as_bytes());
            }
            let mut content = (list.len() as u16).to_be_bytes().to_vec();
            content.extend(list);
            content
        };
        let bad = |bytes: &[u8]| match client_hello(bytes) {
            Read::Bad(bad) => bad,
            other => panic!("{other:?}"),
        };
        assert_eq!(bad(&greeting(None, &[])), Bad::NoName);
        assert_eq!(bad(&greeting(Some("a.example.com"), &[(0, list(&[(0, "b.example.com")]))])), Bad::Malformed);
        assert_eq!(bad(&greeting(None, &[(0, list(&[(0, "a.example.com"), (0, "b.example.com")]))])), Bad::Malformed);
        assert_eq!(bad(&greeting(None, &[(0, list(&[(1, "a.example.com")]))])), Bad::Malformed);
        assert_eq!(bad(&greeting(None, &[(0, list(&[]))])), Bad::Malformed);
        for name in ["", "1.2.3.4", "a b", "a\0.example.com", "[::1]"] {
            assert_eq!(bad(&greeting(Some(name), &[])), Bad::Malformed, "{name:?}");
        }
        assert_eq!(bad(b"GET / HTTP/1.1\r\n"), Bad::Protocol);
        assert_eq!(bad(b"SSH-2.0-x"), Bad::Protocol);
        assert_eq!(bad(&[22, 2, 0, 0, 1]), Bad::Protocol);
        assert_eq!(bad(&[22, 3, 1, 0, 0]), Bad::Malformed);
        // A server's word, and something after the greeting in its record.
        assert_eq!(bad(&records(&[2, 0, 0, 0], 9)), Bad::Malformed);
        let mut message = greeting(Some("a.example.com"), &[])[5..].to_vec();
        message.extend([1, 0, 0, 0]);
        assert_eq!(bad(&records(&message, 1 << 14)), Bad::Malformed);
        // Announced as longer than anybody waits for.
        let mut long = vec![1, 0xff, 0xff, 0xff];
        long.extend(vec![0; 3 * HELLO_BYTES]);
        assert_eq!(bad(&records(&long, 1 << 14)), Bad::Long);
    }

    #[test]
    fn an_encrypted_greeting_counts_by_its_outer_name() {
        let outer = greeting(Some("public.example.com"), &[(ENCRYPTED_HELLO, vec![0; 200])]);
        match client_hello(&outer) {
            Read::Done(hello) => assert!(hello.encrypted && hello.name.as_str() == "public.example.com"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_server_that_asks_again_is_noticed() {
        let answer = |random: [u8; 32]| {
            let mut message = vec![2, 0, 0, 38, 3, 3];
            message.extend(random);
            message.extend([0, 0x13, 1, 0]);
            message
        };
        let again = answer(SECOND);
        for size in [1, 5, 100] {
            let bytes = records(&again, size);
            assert_eq!(wants_second(&bytes), Read::Done(true));
        }
        let bytes = records(&again, 100);
        for end in 0..5 + 38 {
            assert_eq!(wants_second(&bytes[..end]), Read::More, "at {end}");
        }
        assert_eq!(wants_second(&records(&answer([1; 32]), 100)), Read::Done(false));
        assert_eq!(wants_second(&[21, 3, 3, 0, 2, 2, 40]), Read::Done(false));
        assert_eq!(wants_second(b"HTTP/1.1 400 Bad"), Read::Done(false));
        assert_eq!(before_second(&[20, 3, 3, 0, 1, 1, 22]), Read::Done(6));
        assert_eq!(before_second(&[22, 3]), Read::Done(0));
        assert_eq!(before_second(&[20, 3]), Read::More);
        assert_eq!(before_second(&[23, 3, 3, 0, 2, 8, 8, 20, 3, 3, 0, 1, 1, 22]), Read::Done(13));
        assert_eq!(before_second(&[23, 3, 3, 0, 2, 8]), Read::More);
        assert_eq!(before_second(&[21, 3, 3, 0, 2, 8, 8]), Read::Bad(Bad::Malformed));
        assert_eq!(before_second(&[20, 3, 3, 0, 1, 2]), Read::Bad(Bad::Malformed));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(mut bytes in proptest::collection::vec(any::<u8>(), 0..400), tls in any::<bool>()) {
            if tls && bytes.len() > 9 {
                bytes[..3].copy_from_slice(&[22, 3, 1]);
                bytes[5] = 1;
            }
            let _ = client_hello(&bytes);
            let _ = wants_second(&bytes);
        }

        #[test]
        fn one_byte_changed_never_makes_another_name_of_two(at in 0usize..120, to in any::<u8>()) {
            let mut bytes = greeting(Some("aaaa.example.com"), &[]);
            let at = at % bytes.len();
            bytes[at] = to;
            if let Read::Done(hello) = client_hello(&bytes) {
                prop_assert!(hello.length <= bytes.len());
            }
        }
    }
}
