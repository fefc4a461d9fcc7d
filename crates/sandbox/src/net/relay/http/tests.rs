use proptest::prelude::*;

use super::*;

/// What a server gets of these bytes when they come in parts of that size, and how it ends.
fn passed(bytes: &[u8], part: usize) -> (Vec<u8>, Result<(), Bad>, Option<String>) {
    let (mut requests, mut out) = (Requests::new(80), Vec::new());
    for part in bytes.chunks(part.max(1)) {
        requests.take(part);
        loop {
            match requests.step() {
                Ok(Step::Pass(bytes)) => out.extend(bytes),
                Ok(Step::Upgrade(bytes)) => {
                    out.extend(bytes);
                    break;
                }
                Ok(Step::More) => break,
                Err(bad) => return (out, Err(bad), requests.name().map(ToString::to_string)),
            }
        }
    }
    (out, Ok(()), requests.name().map(ToString::to_string))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn good(request: &str) -> String {
    let (out, end, name) = passed(request.as_bytes(), usize::MAX);
    assert_eq!(end, Ok(()), "{request}");
    assert_eq!(name.as_deref(), Some("a.example.com"), "{request}");
    text(&out)
}

fn bad(request: &str) -> Bad {
    let (out, end, _) = passed(request.as_bytes(), usize::MAX);
    assert!(!text(&out).contains("evil"), "{request} passed {}", text(&out));
    end.expect_err(request)
}

#[test]
fn a_request_is_written_anew() {
    assert_eq!(
        good("GET /x?y HTTP/1.1\r\nUser-Agent: t\r\nhost:  A.example.com:80 \r\nX-Y:  z \r\n\r\n"),
        "GET /x?y HTTP/1.1\r\nHost: A.example.com:80\r\nUser-Agent: t\r\nX-Y: z\r\n\r\n"
    );
    assert_eq!(
        good("GET http://a.example.com/x HTTP/1.1\r\nHost: a.example.com\r\n\r\n"),
        "GET /x HTTP/1.1\r\nHost: a.example.com\r\n\r\n"
    );
    assert_eq!(
        good("GET http://a.example.com?q HTTP/1.0\r\nHost: a.example.com.\r\nConnection: close, X-Secret\r\n\r\n"),
        "GET /?q HTTP/1.0\r\nHost: a.example.com.\r\nConnection: close\r\n\r\n"
    );
    assert_eq!(
        good("OPTIONS * HTTP/1.1\r\nHost: a.example.com\r\nContent-Length: 0\r\n\r\n"),
        "OPTIONS * HTTP/1.1\r\nHost: a.example.com\r\nContent-Length: 0\r\n\r\n"
    );
    // What would make another protocol of it is left out, and the server answers as to anybody.
    assert_eq!(
        good(
            "GET / HTTP/1.1\r\nHost: a.example.com\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
        ),
        "GET / HTTP/1.1\r\nHost: a.example.com\r\n\r\n"
    );
}

#[test]
fn bodies_end_where_they_end() {
    let one = "POST / HTTP/1.1\r\nHost: a.example.com\r\nContent-Length: 5\r\n\r\nhello";
    let two = "POST /2 HTTP/1.1\r\nHost: a.example.com\r\nTransfer-Encoding: Chunked\r\n\r\n5;x=y\r\nhello\r\n00A\r\n0123456789\r\n0\r\nX: y\r\n\r\n";
    let three = "GET /3 HTTP/1.1\r\nHost: a.example.com\r\n\r\n";
    let whole = format!("{one}\r\n{two}{three}");
    let expected = "POST / HTTP/1.1\r\nHost: a.example.com\r\nContent-Length: 5\r\n\r\nhello\
        POST /2 HTTP/1.1\r\nHost: a.example.com\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\na\r\n0123456789\r\n0\r\n\r\n\
        GET /3 HTTP/1.1\r\nHost: a.example.com\r\n\r\n";
    for part in 1..=whole.len() {
        let (out, end, _) = passed(whole.as_bytes(), part);
        assert_eq!((text(&out).as_str(), end), (expected, Ok(())), "in parts of {part}");
    }
}

#[test]
fn every_request_of_a_connection_is_for_its_name() {
    let first = "GET / HTTP/1.1\r\nHost: a.example.com\r\n\r\n";
    let other = "GET / HTTP/1.1\r\nHost: evil.example.net\r\n\r\n";
    assert_eq!(bad(&format!("{first}{other}")), Bad::NoName);
    // Hidden in a body it is body.
    let hidden = format!("POST / HTTP/1.1\r\nHost: a.example.com\r\nContent-Length: {}\r\n\r\n{other}", other.len());
    assert!(good(&hidden).ends_with(other));
    // Behind a body it is a request.
    let behind = format!("POST / HTTP/1.1\r\nHost: a.example.com\r\nContent-Length: 3\r\n\r\nabc{other}");
    assert_eq!(bad(&behind), Bad::NoName);
    let behind =
        format!("POST / HTTP/1.1\r\nHost: a.example.com\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{other}");
    assert_eq!(bad(&behind), Bad::NoName);
}

#[test]
fn what_two_readers_read_differently_is_refused() {
    let with = |headers: &str| format!("POST / HTTP/1.1\r\nHost: a.example.com\r\n{headers}\r\n0\r\n\r\nGET / evil");
    for headers in [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 4\r\nContent-Length: 5\r\n",
        "Content-Length: 4\r\nContent-Length: 4\r\n",
        "Content-Length: +4\r\n",
        "Content-Length: 4, 4\r\n",
        "Content-Length: 0x4\r\n",
        "Content-Length: 99999999999999999999\r\n",
        "Content-Length: \r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: \x0bchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Content_Length: 4\r\n",
        "Transfer_Encoding: chunked\r\n",
        "X: y\r\n Transfer-Encoding: chunked\r\n",
        "X: y\rTransfer-Encoding: chunked\r\n",
        "X\0: y\r\n",
        "Host: evil.example.net\r\n",
    ] {
        assert_eq!(bad(&with(headers)), Bad::Malformed, "{headers:?}");
    }
    for request in [
        "GET http://evil.example.net/ HTTP/1.1\r\nHost: a.example.com\r\n\r\n",
        "GET http://a.example.com@evil.example.net/ HTTP/1.1\r\nHost: a.example.com\r\n\r\n",
        "GET https://a.example.com/ HTTP/1.1\r\nHost: a.example.com\r\n\r\n",
        "GET evil HTTP/1.1\r\nHost: a.example.com\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example.com:8080\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example.com, evil.example.net\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: \r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example.com#evil\r\n\r\n",
        "GET /\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: a.example.com\r\nTransfer-Encoding: chunked\r\n\r\n",
    ] {
        assert_eq!(bad(request), Bad::Malformed, "{request:?}");
    }
    assert_eq!(bad("GET / HTTP/1.1\r\nX: y\r\n\r\n"), Bad::NoName);
    assert_eq!(bad("GET / HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n"), Bad::NoName);
    assert_eq!(bad("CONNECT a.example.com:80 HTTP/1.1\r\nHost: a.example.com\r\n\r\n"), Bad::Protocol);
    let chunks =
        |body: &str| format!("POST / HTTP/1.1\r\nHost: a.example.com\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
    for body in [
        "-1\r\n",
        "\r\n",
        "g\r\n",
        " 5\r\nhello\r\n",
        "5\nhello",
        "5\r\nhelloX\r\n",
        "1\r\na\n",
        "ffffffffffffffffff\r\n",
    ] {
        assert!(passed(chunks(body).as_bytes(), 9999).1.is_err(), "{body:?}");
    }
    assert_eq!(bad(&chunks(&"1".repeat(300))), Bad::Long);
    assert_eq!(bad(&format!("GET / HTTP/1.1\r\nX: {}", "y".repeat(HEAD_BYTES))), Bad::Long);
    assert_eq!(bad(&format!("GET / HTTP/1.1\r\n{}", "X: y\r\n".repeat(200))), Bad::Long);
    assert_eq!(bad(&chunks(&format!("0\r\n{}", "X: y\r\n".repeat(2000)))), Bad::Long);
}

#[test]
fn a_websocket_begins_when_its_server_agrees() {
    let ask = "GET /chat HTTP/1.1\r\nHost: a.example.com\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Key: x\r\n\r\n";
    let other = "GET / HTTP/1.1\r\nHost: evil.example.net\r\n\r\n";
    let mut requests = Requests::new(80);
    requests.take(format!("{ask}{other}").as_bytes());
    let Ok(Step::Upgrade(out)) = requests.step() else { panic!("no upgrade") };
    assert_eq!(
        text(&out),
        "GET /chat HTTP/1.1\r\nHost: a.example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
    );
    // Nothing more passes by itself.
    assert_eq!(requests.step(), Ok(Step::More));
    assert_eq!(text(&requests.rest()), other);
    // Not after another request.
    let first = "GET / HTTP/1.1\r\nHost: a.example.com\r\n\r\n";
    assert_eq!(bad(&format!("{first}{ask}")), Bad::Protocol);

    let yes = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n";
    let early = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n";
    for end in 0..yes.len() {
        assert_eq!(reply(&yes.as_bytes()[..end]), Reply::More, "at {end}");
    }
    assert_eq!(reply(yes.as_bytes()), Reply::Agreed);
    assert_eq!(reply(format!("{early}{yes}").as_bytes()), Reply::Agreed);
    assert_eq!(reply(format!("{early}HTTP/1.1 200 OK\r\n\r\n").as_bytes()), Reply::Other);
    assert_eq!(reply(b"HTTP/1.1 404 Not Found\r\n\r\n"), Reply::Other);
    assert_eq!(reply(b"nonsense\r\n"), Reply::Other);
}

proptest! {
    #[test]
    fn any_bytes_in_any_parts_are_read_alike(
        bytes in proptest::collection::vec(any::<u8>(), 0..300), cut in 1usize..40,
    ) {
        let mut request = b"POST / HTTP/1.1\r\nHost: a.example.com\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        request.extend(bytes);
        let (whole, end, name) = passed(&request, usize::MAX);
        let (parts, other_end, other_name) = passed(&request, cut);
        // Where it fails, it fails at the same place or a little later, never with more passed on.
        prop_assert_eq!(end.is_err(), other_end.is_err());
        prop_assert_eq!(name, other_name);
        if end.is_ok() {
            prop_assert_eq!(whole, parts);
        }
    }

    #[test]
    fn whatever_is_mixed_in_no_other_name_gets_through(
        pieces in proptest::collection::vec(
            prop_oneof![
                Just("GET / HTTP/1.1\r\n"), Just("Host: a.example.com\r\n"), Just("Host: evil.example.net\r\n"),
                Just("Content-Length: 5\r\n"), Just("Transfer-Encoding: chunked\r\n"), Just("\r\n"), Just("0\r\n\r\n"),
                Just("5\r\nhello\r\n"), Just("hello"), Just("Connection: close\r\n"), Just("X: y\r\n"), Just("\n"), Just("\r"),
            ],
            0..24,
        ),
    ) {
        let (out, ..) = passed(pieces.concat().as_bytes(), usize::MAX);
        // Read once more, what was passed on names one name and ends where it ends.
        let (again, end, name) = passed(&out, usize::MAX);
        prop_assert!(end.is_ok());
        prop_assert_eq!(&again, &out);
        if name.as_deref() == Some("a.example.com") {
            prop_assert!(!heads(&out).iter().any(|head| head.contains("Host: evil")));
        }
    }
}

/// The heads in what was passed on, as a server finds them.
fn heads(bytes: &[u8]) -> Vec<String> {
    let mut heads = Vec::new();
    let mut requests = Requests::new(80);
    requests.take(bytes);
    while !requests.input.is_empty() {
        if requests.body == Body::None
            && let Ok(Some(head)) = head(&requests.input, 80)
        {
            heads.push(text(&head.bytes));
            requests.input.drain(..head.length);
            requests.body = head.body;
            continue;
        }
        let mut out = Vec::new();
        match &mut requests.body {
            Body::None => break,
            Body::Length(left) => {
                let part = requests.input.len().min(*left as usize);
                requests.input.drain(..part);
                *left -= part as u64;
                if *left == 0 {
                    requests.body = Body::None;
                } else {
                    break;
                }
            }
            Body::Chunked(chunk) => {
                let before = (requests.input.len(), chunk.clone());
                match chunked(chunk, &mut requests.input, &mut out) {
                    Ok(true) => requests.body = Body::None,
                    Ok(false) if (requests.input.len(), chunk.clone()) == before => break,
                    Ok(false) => {}
                    Err(_) => break,
                }
            }
        }
    }
    heads
}
