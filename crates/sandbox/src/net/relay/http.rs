//! The names in HTTP/1 requests. Pure: bytes of a client in, bytes for its server and names out.
//!
//! ```text
//! Head ──▶ Body ──▶ Head ──▶ …        every request of a connection, each with the one name it was opened for
//!   └────▶ Asked for a WebSocket: nothing more passes until the server has said yes
//! ```
//! Nothing is passed on as it came. A head is taken apart and written anew, a chunked body is cut anew, and whatever two
//! readers could take for two different things is refused: so where a request ends is where its server thinks it ends, and
//! no second one, with another name, hides in its body.

use crate::net::HostName;

use super::hello::Bad;

/// The longest head taken, bytes.
pub const HEAD_BYTES: usize = 32 * 1024;

/// The most header lines in it.
const HEADERS: usize = 128;

/// The longest line with the size of a chunk, its extensions included.
const CHUNK_LINE: usize = 256;

/// The longest trailer, which is dropped.
const TRAILER: usize = 8 * 1024;

/// A request's head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Whom it is for.
    pub name: HostName,
    /// How it is written for the server.
    pub bytes: Vec<u8>,
    /// Whether it asks for a WebSocket.
    pub upgrade: bool,
    body: Body,
    length: usize,
}

/// What follows a head.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Body {
    /// The next head.
    None,
    /// So many bytes, then the next head.
    Length(u64),
    /// Chunks.
    Chunked(Chunk),
}

/// Where in a chunked body.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Chunk {
    /// In a line with a size.
    Size,
    /// In data.
    Data(u64),
    /// Before the end of the line after data.
    End,
    /// In lines after the last one; so many bytes of them.
    Trailer(usize),
}

/// Whether a first byte begins a request.
pub fn is_http(first: u8) -> bool {
    first.is_ascii_uppercase()
}

/// Reads a request's head, meant for that port. [`None`]: there must be more.
///
/// # Errors
/// It is none that could be understood in one way only.
fn head(bytes: &[u8], port: u16) -> Result<Option<Head>, Bad> {
    let mut space = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut space);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length <= HEAD_BYTES => length,
        Ok(httparse::Status::Complete(_)) => return Err(Bad::Long),
        Ok(httparse::Status::Partial) if bytes.len() >= HEAD_BYTES => return Err(Bad::Long),
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(Bad::Long),
        Err(_) => return Err(Bad::Malformed),
    };
    let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version) else {
        return Err(Bad::Malformed);
    };
    if method == "CONNECT" {
        return Err(Bad::Protocol);
    }
    let mut headers = Headers::default();
    for header in request.headers.iter() {
        headers.take(header)?;
    }
    let host = headers.host.ok_or(Bad::NoName)?;
    let (name, target) = (authority(host, port)?, target_for(method, target, host, port)?);
    let body = match (headers.length, headers.chunked) {
        (Some(_), true) => return Err(Bad::Malformed),
        (None, true) if minor == 0 => return Err(Bad::Malformed),
        (None, true) => Body::Chunked(Chunk::Size),
        (Some(length), false) if length > 0 => Body::Length(length),
        _ => Body::None,
    };
    let asks = headers.websocket && headers.upgrade;
    let upgrade = asks && method == "GET" && minor == 1 && body == Body::None;
    let mut out = Vec::with_capacity(length + 32);
    out.extend_from_slice(format!("{method} {target} HTTP/1.{minor}\r\nHost: {host}\r\n").as_bytes());
    if upgrade {
        out.extend_from_slice(b"Connection: Upgrade\r\nUpgrade: websocket\r\n");
    } else if headers.close {
        out.extend_from_slice(b"Connection: close\r\n");
    } else if headers.keep_alive {
        out.extend_from_slice(b"Connection: keep-alive\r\n");
    }
    match body {
        Body::Chunked(_) => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        Body::Length(_) | Body::None => {
            if let Some(length) = headers.length {
                out.extend_from_slice(format!("Content-Length: {length}\r\n").as_bytes());
            }
        }
    }
    for header in request.headers.iter().filter(|header| !is_ours(header.name)) {
        out.extend_from_slice(header.name.as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(header.value);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"\r\n");
    Ok(Some(Head { name, bytes: out, upgrade, body, length }))
}

/// Headers that are written anew, or are between a client and whom it is connected to.
fn is_ours(name: &str) -> bool {
    const OURS: [&str; 10] = [
        "host",
        "connection",
        "upgrade",
        "http2-settings",
        "content-length",
        "transfer-encoding",
        "te",
        "trailer",
        "keep-alive",
        "proxy-connection",
    ];
    OURS.iter().any(|own| name.eq_ignore_ascii_case(own))
}

/// What the headers say that matters here.
#[derive(Default)]
struct Headers<'a> {
    host: Option<&'a str>,
    length: Option<u64>,
    chunked: bool,
    websocket: bool,
    upgrade: bool,
    close: bool,
    keep_alive: bool,
}

impl<'a> Headers<'a> {
    fn take(&mut self, header: &httparse::Header<'a>) -> Result<(), Bad> {
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        let text = || std::str::from_utf8(header.value).map(|text| text.trim_matches([' ', '\t']));
        let text = || text().map_err(|_| Bad::Malformed);
        if is("host") {
            if self.host.replace(text()?).is_some() {
                return Err(Bad::Malformed);
            }
        } else if is("content-length") {
            let digits = text()?;
            let plain = !digits.is_empty() && digits.len() <= 18 && digits.bytes().all(|byte| byte.is_ascii_digit());
            let length = plain.then(|| digits.parse().ok()).flatten().ok_or(Bad::Malformed)?;
            if self.length.replace(length).is_some() {
                return Err(Bad::Malformed);
            }
        } else if is("transfer-encoding") {
            if self.chunked || !text()?.eq_ignore_ascii_case("chunked") {
                return Err(Bad::Malformed);
            }
            self.chunked = true;
        } else if is("upgrade") {
            self.websocket |= text()?.eq_ignore_ascii_case("websocket");
        } else if is("connection") {
            for token in text()?.split(',').map(str::trim) {
                self.upgrade |= token.eq_ignore_ascii_case("upgrade");
                self.close |= token.eq_ignore_ascii_case("close");
                self.keep_alive |= token.eq_ignore_ascii_case("keep-alive");
            }
        } else if header.name.contains('_') && is_ours(&header.name.replace('_', "-")) {
            // Some servers take `Content_Length` for the real thing.
            return Err(Bad::Malformed);
        }
        Ok(())
    }
}

/// The name in `name` or `name:port`.
fn authority(text: &str, port: u16) -> Result<HostName, Bad> {
    let name = match text.rsplit_once(':') {
        Some((name, said)) if said == port.to_string() => name,
        Some(_) => return Err(Bad::Malformed),
        None => text,
    };
    // An address is understood, and names nobody.
    let is_address = name.parse::<std::net::IpAddr>().is_ok();
    HostName::new(name).map_err(|_| if is_address { Bad::NoName } else { Bad::Malformed })
}

/// The target as its own server is asked for it. One that has an authority must have that of the header.
fn target_for(method: &str, target: &str, host: &str, port: u16) -> Result<String, Bad> {
    if target.starts_with('/') || (target == "*" && method == "OPTIONS") {
        return Ok(target.to_owned());
    }
    let scheme = target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://")).ok_or(Bad::Malformed)?;
    let rest = &target[scheme.len()..];
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (named, path) = rest.split_at(end);
    if authority(named, port)? != authority(host, port)? {
        return Err(Bad::Malformed);
    }
    Ok(if path.starts_with('/') { path.to_owned() } else { format!("/{path}") })
}

/// Requests of one connection.
#[derive(Debug)]
pub struct Requests {
    port: u16,
    name: Option<HostName>,
    input: Vec<u8>,
    body: Body,
    upgrade: bool,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Pass these on, and go on reading.
    Pass(Vec<u8>),
    /// Pass these on; nothing more until the server has agreed to speak otherwise.
    Upgrade(Vec<u8>),
    /// Read more.
    More,
}

impl Requests {
    /// Those of a connection to that port.
    pub fn new(port: u16) -> Self {
        Requests { port, name: None, input: Vec::new(), body: Body::None, upgrade: false }
    }

    /// Whom they are for, once the first head is there.
    pub fn name(&self) -> Option<&HostName> {
        self.name.as_ref()
    }

    /// Takes what the client sent.
    pub fn take(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// What of it can be passed on.
    ///
    /// # Errors
    /// The connection has to end: it is not understood, or it names somebody else ([`Bad::NoName`]).
    pub fn step(&mut self) -> Result<Step, Bad> {
        let mut out = Vec::new();
        loop {
            if self.upgrade {
                return Ok(Step::More);
            }
            let before = (self.input.len(), out.len(), self.body.clone());
            match &mut self.body {
                Body::None => {
                    // Empty lines before a request are tolerated by all, and passed on to none.
                    let blank = self.input.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
                    self.input.drain(..blank);
                    if !self.input.is_empty()
                        && let Some(head) = head(&self.input, self.port)?
                    {
                        if self.name.as_ref().is_some_and(|name| *name != head.name) {
                            return Err(Bad::NoName);
                        }
                        if head.upgrade && self.name.is_some() {
                            // Answers to earlier requests would be taken for the answer to this one.
                            return Err(Bad::Protocol);
                        }
                        self.name = Some(head.name);
                        self.input.drain(..head.length);
                        self.body = head.body;
                        out.extend(head.bytes);
                        if head.upgrade {
                            self.upgrade = true;
                            return Ok(Step::Upgrade(out));
                        }
                    }
                }
                Body::Length(left) => {
                    let part = self.input.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    out.extend(self.input.drain(..part));
                    *left -= part as u64;
                    if *left == 0 {
                        self.body = Body::None;
                    }
                }
                Body::Chunked(chunk) => {
                    if chunked(chunk, &mut self.input, &mut out)? {
                        self.body = Body::None;
                    }
                }
            }
            if (self.input.len(), out.len(), self.body.clone()) == before {
                return Ok(if out.is_empty() { Step::More } else { Step::Pass(out) });
            }
        }
    }

    /// What came after a request to speak otherwise, once the server has agreed.
    pub fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.input)
    }

    /// Whether the client may end here.
    pub fn is_between(&self) -> bool {
        self.body == Body::None && self.input.is_empty()
    }
}

/// One step through a chunked body; whether it has ended.
fn chunked(chunk: &mut Chunk, input: &mut Vec<u8>, out: &mut Vec<u8>) -> Result<bool, Bad> {
    match chunk {
        Chunk::Size => {
            let Some(line) = line(input, CHUNK_LINE)? else { return Ok(false) };
            let digits = line.split(|byte| matches!(byte, b';' | b' ' | b'\t')).next().unwrap_or_default();
            let plain = (1..=15).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
            let text = std::str::from_utf8(digits).map_err(|_| Bad::Malformed)?;
            let size = u64::from_str_radix(text, 16).ok().filter(|_| plain).ok_or(Bad::Malformed)?;
            if size == 0 {
                *chunk = Chunk::Trailer(0);
            } else {
                out.extend_from_slice(format!("{size:x}\r\n").as_bytes());
                *chunk = Chunk::Data(size);
            }
            Ok(false)
        }
        Chunk::Data(left) => {
            let part = input.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
            out.extend(input.drain(..part));
            *left -= part as u64;
            if *left == 0 {
                *chunk = Chunk::End;
            }
            Ok(false)
        }
        Chunk::End => match line(input, 2)? {
            Some(line) if line.is_empty() => {
                out.extend_from_slice(b"\r\n");
                *chunk = Chunk::Size;
                Ok(false)
            }
            Some(_) => Err(Bad::Malformed),
            None => Ok(false),
        },
        Chunk::Trailer(taken) => {
            let Some(line) = line(input, TRAILER)? else { return Ok(false) };
            *taken += line.len() + 2;
            if *taken > TRAILER {
                return Err(Bad::Long);
            }
            if line.is_empty() {
                out.extend_from_slice(b"0\r\n\r\n");
            }
            Ok(line.is_empty())
        }
    }
}

/// Takes a line that ends with CR LF and has neither in it; [`None`]: there must be more.
fn line(input: &mut Vec<u8>, most: usize) -> Result<Option<Vec<u8>>, Bad> {
    let Some(end) = input.iter().position(|byte| *byte == b'\n') else {
        return if input.len() > most { Err(Bad::Long) } else { Ok(None) };
    };
    if end > most {
        return Err(Bad::Long);
    }
    let mut line: Vec<u8> = input.drain(..=end).collect();
    line.pop();
    match line.pop() {
        Some(b'\r') if !line.contains(&b'\r') => Ok(Some(line)),
        _ => Err(Bad::Malformed),
    }
}

/// What a server says to a request for a WebSocket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Not all there yet.
    More,
    /// It agrees.
    Agreed,
    /// It does not, or says something else altogether.
    Other,
}

/// Reads the beginning of what a server says.
pub fn reply(mut bytes: &[u8]) -> Reply {
    loop {
        let mut space = [httparse::EMPTY_HEADER; HEADERS];
        let mut response = httparse::Response::new(&mut space);
        match response.parse(bytes) {
            Ok(httparse::Status::Complete(length)) => match response.code {
                Some(101) => return Reply::Agreed,
                Some(100..200) => bytes = &bytes[length..],
                _ => return Reply::Other,
            },
            Ok(httparse::Status::Partial) if bytes.len() < HEAD_BYTES => return Reply::More,
            _ => return Reply::Other,
        }
    }
}

#[cfg(test)]
mod tests;
