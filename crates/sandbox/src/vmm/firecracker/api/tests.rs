//! A double of Firecracker's API: a server on a Unix socket that records what it is told, checks it, and fails as asked.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use serde_json::json;

use super::super::tests::{Facts, boot};
use super::super::{configuration, configure, start, statistics};
use super::*;

/// Far more than a call takes, and short enough for a test of silence.
const SOON: Duration = Duration::from_secs(20);

/// What the double does with a call.
#[derive(Clone, Debug)]
enum Does {
    /// Takes it.
    Takes,
    /// Sends these bytes.
    Says(Vec<u8>),
    /// Sends these bytes one at a time.
    Dribbles(Vec<u8>),
    /// Takes it after the test says so.
    Waits,
    /// Ends without an answer.
    Dies,
    /// Ends in the middle of one.
    DiesSpeaking,
}

struct Double {
    calls: Receiver<Call>,
    go: Sender<()>,
    server: JoinHandle<()>,
    _place: tempfile::TempDir,
}

/// A double that does the `n`th call as `does` says, and the API connected to it.
fn double(does: impl Fn(usize) -> Does + Send + 'static) -> (Api, Double) {
    let place = tempfile::tempdir().expect("directory");
    let path = place.path().join("api.sock");
    let listener = UnixListener::bind(&path).expect("bind");
    let (record, calls) = channel();
    let (go, wait) = channel();
    let server = std::thread::spawn(move || {
        let (stream, _) = listener.accept().expect("accept");
        serve(stream, &does, &record, &wait);
    });
    let api = Api::new(UnixStream::connect(&path).expect("connect")).expect("api");
    (api, Double { calls, go, server, _place: place })
}

fn serve(mut stream: UnixStream, does: &dyn Fn(usize) -> Does, record: &Sender<Call>, wait: &Receiver<()>) {
    let mut from = BufReader::new(stream.try_clone().expect("clone"));
    for n in 0.. {
        let Some(call) = receive(&mut from) else { return };
        let read = call.method == "GET";
        record.send(call).expect("the test is gone");
        let taken = if read {
            let body = r#"{"total_memory":1000,"free_memory":10,"target_pages":0}"#;
            format!("HTTP/1.1 200 \r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        } else {
            "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n".to_owned()
        };
        let sent = match does(n) {
            Does::Takes => stream.write_all(taken.as_bytes()),
            Does::Says(bytes) => stream.write_all(&bytes),
            Does::Dribbles(bytes) => bytes.iter().try_for_each(|byte| stream.write_all(&[*byte])),
            Does::Waits => {
                // The other end going is the end of the test.
                let _ = wait.recv();
                stream.write_all(taken.as_bytes())
            }
            Does::Dies => return,
            Does::DiesSpeaking => {
                let _ = stream.write_all(&taken.as_bytes()[..taken.len() / 2]);
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// One call, by the rules of the real server: short lines, a length for every body, no other form of body.
fn receive(from: &mut impl BufRead) -> Option<Call> {
    let mut line = String::new();
    if from.read_line(&mut line).ok()? == 0 {
        return None;
    }
    assert!(line.len() < 1024 && line.ends_with(" HTTP/1.1\r\n"), "{line:?}");
    let (method, path) = line.split_once(' ').expect("a path");
    let method = if method == "PUT" { "PUT" } else { "GET" };
    let path = path.trim_end().trim_end_matches(" HTTP/1.1").to_owned();
    let mut length = None;
    loop {
        let mut header = String::new();
        from.read_line(&mut header).expect("a header");
        assert!(header.len() < 1024 && header.ends_with("\r\n"), "{header:?}");
        let header = header.trim_end().to_ascii_lowercase();
        assert!(!header.starts_with("transfer-encoding") && !header.starts_with("expect"), "{header}");
        if let Some(value) = header.strip_prefix("content-length:") {
            length = Some(value.trim().parse::<usize>().expect("a length"));
        }
        if header.is_empty() {
            break;
        }
    }
    let body = length.map(|length| {
        assert!(length <= LONGEST_CALL, "{length}");
        let mut body = vec![0; length];
        from.read_exact(&mut body).expect("the body");
        serde_json::from_slice(&body).expect("JSON")
    });
    Some(Call { method, path, body })
}

fn refusal(status: u16, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} \r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

#[test]
fn everything_is_said_once_in_order_and_as_the_release_takes_it() {
    let (mut api, double) = double(|_| Does::Takes);
    configure(&mut api, &boot(), SOON).expect("configured");
    api.call(&start(), SOON).expect("started");
    let memory = api.call(&statistics(), SOON).expect("statistics");
    assert_eq!(memory["total_memory"], 1000);
    drop(api);
    double.server.join().expect("the double");
    let said: Vec<Call> = double.calls.iter().collect();
    let mut wanted = configuration(&boot());
    wanted.extend([start(), statistics()]);
    assert_eq!(said, wanted);
    let facts = Facts::new();
    for call in said {
        assert_eq!(facts.faults(&call), [""; 0], "{call:?}");
    }
}

#[test]
fn a_vmm_that_dies_between_any_two_calls_or_in_one_is_told_at_once() {
    let calls = configuration(&boot()).len() + 1;
    for last in 0..calls {
        for how in [Does::Dies, Does::DiesSpeaking] {
            let does = how.clone();
            let (mut api, double) = double(move |n| if n == last { does.clone() } else { Does::Takes });
            let begun = Instant::now();
            let done = configure(&mut api, &boot(), SOON).and_then(|()| api.call(&start(), SOON).map(drop));
            let error = done.expect_err("a dead VMM took a call");
            assert!(matches!(error, Error::Closed { .. }), "{last} {how:?}: {error}");
            assert!(begun.elapsed() < SOON, "the deadline was waited for");
            double.server.join().expect("the double");
            // Nothing more is said to it, and what was under way is named.
            let said: Vec<Call> = double.calls.iter().collect();
            assert_eq!(said.len(), last + 1);
            assert!(error.to_string().contains(&said[last].path), "{error}");
            assert!(matches!(api.call(&start(), SOON), Err(Error::Closed { .. })), "it is asked again");
        }
    }
}

#[test]
fn each_refusal_ends_the_configuration_and_is_told_in_its_words() {
    let calls = configuration(&boot()).len();
    for refused in 0..calls {
        let does = move |n| match n == refused {
            true => Does::Says(refusal(400, r#"{"fault_message":"no \u001b[2J room"}"#)),
            false => Does::Takes,
        };
        let (mut api, double) = double(does);
        let error = configure(&mut api, &boot(), SOON).expect_err("a refusal was passed over");
        let Error::Refused { status: 400, reason, .. } = &error else { panic!("{error}") };
        assert!(reason.starts_with("no ") && reason.ends_with("room") && !reason.chars().any(char::is_control));
        drop(api);
        double.server.join().expect("the double");
        assert_eq!(double.calls.iter().count(), refused + 1);
    }
}

#[test]
fn every_kind_of_error_is_its_own() {
    let once = |bytes: Vec<u8>| {
        let (mut api, _double) = double(move |_| Does::Says(bytes.clone()));
        api.call(&start(), SOON).expect_err("taken")
    };
    for status in [400, 413, 500, 503, 302] {
        assert!(matches!(once(refusal(status, "{}")), Error::Refused { status: told, .. } if told == status));
    }
    // The parser's own errors have a raw line end in what should be JSON.
    let raw = once(refusal(400, "{ \"error\": \"The request\nwas bad\" }"));
    assert!(matches!(&raw, Error::Refused { reason, .. } if reason.contains("was bad")), "{raw}");
    let endless = once(refusal(400, &"x".repeat(10_000)));
    assert!(endless.to_string().len() < 1000, "{}", endless.to_string().len());
    for garbage in [
        "SMTP ready\r\n\r\n".to_owned(),
        "HTTP/1.1 abc\r\n\r\n".to_owned(),
        "HTTP/1.1 204\r\nno colon\r\n\r\n".to_owned(),
        "HTTP/1.1 200\r\nContent-Length: -1\r\n\r\n".to_owned(),
        "HTTP/1.1 200\r\nContent-Length: 99999999999\r\n\r\n".to_owned(),
        format!("HTTP/1.1 200\r\nX: {}\r\n", "x".repeat(2 * HEAD)),
    ] {
        let error = once(garbage.clone().into_bytes());
        assert!(matches!(error, Error::Garbage { .. }), "{garbage:.40}: {error}");
    }
}

#[test]
fn an_answer_may_come_in_pieces_late_or_never() {
    let (mut api, _double) = double(|_| Does::Dribbles(b"HTTP/1.1 204 \r\nServer: Firecracker API\r\n\r\n".to_vec()));
    api.call(&start(), SOON).expect("in pieces");
    let (mut api, _double) =
        double(|_| Does::Says(b"HTTP/1.1 100 \r\n\r\nHTTP/1.1 204 \r\nContent-Length: 0\r\n\r\n".to_vec()));
    api.call(&start(), SOON).expect("after a provisional answer");

    let (mut api, slow) = double(|_| Does::Waits);
    let within = Duration::from_millis(30);
    let error = api.call(&start(), within).expect_err("an answer from nowhere");
    assert!(matches!(&error, Error::TimedOut { .. }), "{error}");
    assert!(error.to_string().contains("30 ms") && error.to_string().contains("PUT /actions"), "{error}");
    drop((api, slow));

    // One that is asked without waiting: not yet, then there.
    let (mut api, double) = double(|_| Does::Waits);
    api.ask(&statistics(), SOON).expect("asked");
    double.calls.recv().expect("it arrived");
    assert!(api.take(&statistics()).expect("no fault").is_none(), "an answer before it was given");
    double.go.send(()).expect("go");
    let deadline = Instant::now() + SOON;
    let answer = loop {
        match api.take(&statistics()).expect("no fault") {
            Some(answer) => break answer,
            None => assert!(Instant::now() < deadline, "no answer"),
        }
        std::thread::yield_now();
    };
    assert_eq!(answer["free_memory"], 10);
    // The next call goes over the same connection.
    double.go.send(()).expect("go");
    api.call(&Call { method: "PUT", path: "/x".into(), body: Some(json!({})) }, SOON).expect("again");
}

proptest::proptest! {
    #[test]
    fn no_answer_panics_or_is_longer_than_it_may_be(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
        if let Ok(Some((answer, length))) = parse(&bytes) {
            proptest::prop_assert!(length <= bytes.len() && answer.body.len() <= BODY);
        }
        let mut framed = b"HTTP/1.1 200 OK\r\n".to_vec();
        framed.extend(&bytes);
        let _ = parse(&framed);
    }
}
