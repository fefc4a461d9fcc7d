//! A guest that breaks each rule in turn, and the host that must say so: within its deadline, without memory, and
//! without leaving anything open.

#![allow(clippy::unwrap_used, clippy::panic)] // all of it is a test

mod lying;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use pepo_sandbox::guest::{Connector, Error, Guest, InputEnd, Output};
use pepo_sandbox::proto::{self, *};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use lying::*;

#[tokio::test]
async fn an_honest_program_is_let_through() {
    use Channel::{Err, Out};
    let said = vec![
        ACCEPTED,
        started(),
        data(Out, 0, b"ab"),
        data(Err, 2, b"c"),
        Frame::Gap { from: 3, to: 10 },
        data(Out, 10, b"d"),
        eof(Err, 11),
        data(Out, 11, b"e"),
        eof(Out, 12),
        exited(),
    ];
    let outputs = run(program(false, None), said).await.unwrap();
    assert_eq!(outputs.len(), 9);
    assert!(matches!(outputs[8], Output::End(_)));
}

#[tokio::test]
async fn a_program_out_of_order_is_refused() {
    use Channel::{Err, In, Out};
    let small = Some(PtySize { cols: 80, rows: 24 });
    let lies: Vec<(&str, proto::Exec, Vec<Frame>)> = vec![
        ("data before accepted", program(false, None), vec![data(Out, 0, b"a")]),
        ("event before accepted", program(false, None), vec![started()]),
        ("gap before accepted", program(false, None), vec![Frame::Gap { from: 0, to: 1 }]),
        ("eof before accepted", program(false, None), vec![eof(Out, 0)]),
        ("an end before accepted", program(false, None), vec![exited()]),
        ("done before accepted", program(false, None), vec![DONE]),
        ("accepted twice", program(false, None), vec![ACCEPTED, ACCEPTED]),
        (
            "a request",
            program(false, None),
            vec![ACCEPTED, Frame::Request(Request { op: OP, operation: Operation::Ping, paced: None })],
        ),
        ("a hole", program(false, None), vec![ACCEPTED, data(Out, 0, b"a"), data(Out, 2, b"b")]),
        ("an overlap", program(false, None), vec![ACCEPTED, data(Out, 0, b"ab"), data(Out, 1, b"b")]),
        ("offsets per channel", program(false, None), vec![ACCEPTED, data(Out, 0, b"ab"), data(Err, 0, b"b")]),
        ("an offset from nowhere", program(false, None), vec![ACCEPTED, data(Out, u64::MAX, b"ab")]),
        (
            "an offset that overflows",
            program(false, None),
            vec![ACCEPTED, Frame::Gap { from: 0, to: u64::MAX }, data(Out, u64::MAX, b"ab")],
        ),
        ("data after eof", program(false, None), vec![ACCEPTED, eof(Out, 0), data(Out, 0, b"a")]),
        ("eof twice", program(false, None), vec![ACCEPTED, eof(Err, 0), eof(Err, 0)]),
        ("eof elsewhere", program(false, None), vec![ACCEPTED, data(Out, 0, b"a"), eof(Out, 0)]),
        ("output on input", program(true, None), vec![ACCEPTED, data(In, 0, b"a")]),
        ("eof on input", program(true, None), vec![ACCEPTED, eof(In, 0)]),
        ("standard error of a terminal", program(true, small), vec![ACCEPTED, data(Err, 0, b"a")]),
        ("a gap ahead", program(false, None), vec![ACCEPTED, Frame::Gap { from: 1, to: 2 }]),
        ("a gap behind", program(false, None), vec![ACCEPTED, data(Out, 0, b"abc"), Frame::Gap { from: 1, to: 9 }]),
        (
            "a gap after all output",
            program(false, None),
            vec![ACCEPTED, eof(Out, 0), eof(Err, 0), Frame::Gap { from: 0, to: 1 }],
        ),
        ("started twice", program(false, None), vec![ACCEPTED, started(), started()]),
        ("input of a program without", program(false, None), vec![ACCEPTED, input(0)]),
        ("input that goes back", program(true, None), vec![ACCEPTED, input(5), input(4)]),
        ("an event of another operation", program(false, None), vec![ACCEPTED, hello(1)]),
        ("entries", program(false, None), vec![ACCEPTED, Frame::Event(Event::Entries(vec![stat()]))]),
        ("done", program(false, None), vec![ACCEPTED, DONE]),
    ];
    for (what, exec, said) in lies {
        let result = run(exec, said).await;
        assert!(is_protocol(&result), "{what}: {result:?}");
    }
}

#[tokio::test]
async fn short_operations_out_of_order_are_refused() {
    let path = || "/f".to_owned();
    let tar = || TarOut { path: path(), user: None };
    let read = || Read { path: path(), offset: 0, length: None, user: None };
    for said in [
        vec![ACCEPTED, exited()],
        vec![ACCEPTED, data(Channel::Out, 0, b"a")],
        vec![ACCEPTED, hello(1), DONE],
        vec![ACCEPTED, Frame::Gap { from: 0, to: 1 }],
        vec![ACCEPTED, eof(Channel::Out, 0)],
    ] {
        let (guest, _directory) = parrot(PATIENT, said.clone());
        assert!(is_protocol(&guest.ping().await), "{said:?}");
        assert!(is_protocol(&guest.cancel(OP).await), "{said:?}");
    }
    for said in [vec![ACCEPTED, DONE], vec![ACCEPTED, hello(1), hello(1)], vec![ACCEPTED, hello(2), DONE]] {
        let (guest, _directory) = parrot(PATIENT, said.clone());
        assert!(is_protocol(&guest.hello().await), "{said:?}");
        assert!(is_protocol(&guest.stats().await), "{said:?}");
    }
    let reported = || Frame::Event(Event::Stat(stat()));
    for said in [
        vec![ACCEPTED, DONE],
        vec![ACCEPTED, data(Channel::Out, 0, b"a")],
        vec![ACCEPTED, eof(Channel::Out, 0), DONE],
        vec![ACCEPTED, Frame::Event(Event::Entries(vec![])), DONE],
    ] {
        let (guest, _directory) = parrot(PATIENT, said.clone());
        let result = guest.read(read()).await.map(|_| ());
        assert!(is_protocol(&result), "{said:?}: {result:?}");
    }
    // A file that ends without saying that it is whole, and one that says it where it is not.
    for said in [
        vec![ACCEPTED, reported(), data(Channel::Out, 0, b"ab"), DONE],
        vec![ACCEPTED, reported(), data(Channel::Out, 0, b"ab"), Frame::Gap { from: 2, to: 3 }],
        vec![ACCEPTED, reported(), data(Channel::Err, 0, b"ab")],
        vec![ACCEPTED, reported(), reported()],
        vec![ACCEPTED, reported(), data(Channel::Out, 0, b"ab"), eof(Channel::Out, 1)],
    ] {
        let (guest, _directory) = parrot(PATIENT, said.clone());
        let (_, mut download) = guest.read(read()).await.unwrap();
        let mut last = Ok(Bytes::new());
        while let Some(next) = download.next().await {
            last = next;
        }
        assert!(is_protocol(&last), "{said:?}: {last:?}");
    }
    let (guest, _directory) = parrot(PATIENT, vec![ACCEPTED, reported()]);
    assert!(is_protocol(&guest.tar_out(tar()).await.map(|_| ())));
}

#[tokio::test]
async fn an_attachment_out_of_order_is_refused() {
    let attach = |from, input| Attach { target: OP, from, input, keep_input: true, sole: None };
    for (attach, said) in [
        (attach(Some(5), false), vec![ACCEPTED, data(Channel::Out, 0, b"a")]),
        (attach(Some(5), false), vec![ACCEPTED, Frame::Gap { from: 0, to: 6 }]),
        (attach(Some(5), false), vec![ACCEPTED, DONE]),
        (attach(Some(0), true), vec![ACCEPTED, data(Channel::Out, 0, b"a")]),
        (attach(Some(0), true), vec![ACCEPTED, started()]),
        (attach(None, true), vec![ACCEPTED, input(0), data(Channel::Out, 0, b"a")]),
        (attach(None, true), vec![ACCEPTED, input(3), input(2)]),
    ] {
        let (guest, _directory) = parrot(PATIENT, said.clone());
        let result = async { outputs(guest.attach(attach).await?).await }.await;
        assert!(is_protocol(&result), "{said:?}: {result:?}");
    }
    let (guest, _directory) =
        parrot(PATIENT, vec![ACCEPTED, Frame::Gap { from: 5, to: 9 }, data(Channel::Err, 9, b"x")]);
    let mut exec = guest.attach(attach(Some(5), false)).await.unwrap();
    assert_eq!(exec.next().await.unwrap().unwrap(), Output::Gap { from: 5, to: 9 });
    assert!(matches!(exec.next().await.unwrap().unwrap(), Output::Data { offset: 9, .. }));
    assert_eq!(exec.offset(), 10);
}

#[tokio::test]
async fn what_is_no_frame_ends_the_stream() {
    let long = {
        let mut bytes = encoded(&[ACCEPTED]);
        bytes.put_u32_le(u32::MAX);
        bytes
    };
    let unknown = [&encoded(&[ACCEPTED])[..], &[1, 0, 0, 0, 99]].concat();
    let trailing = [&encoded(&[ACCEPTED])[..], &[3, 0, 0, 0, 2, 0, 0]].concat();
    let garbage = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
    for bytes in [long.to_vec(), unknown, trailing, garbage] {
        let told = Bytes::from(bytes);
        let (guest, _directory) = guest(PATIENT, move |mut end| {
            let told = told.clone();
            async move {
                end.request().await;
                end.bytes(&told).await;
                end.closed().await;
            }
        });
        let result = tokio::time::timeout(AT_MOST, guest.ping()).await.unwrap();
        assert!(matches!(result, Err(Error::Protocol(_))), "{result:?}");
    }
}

#[tokio::test]
async fn a_stream_without_end_is_unknown_not_done() {
    for cut in [0, 3, 5, 7] {
        let (guest, _directory) = guest(PATIENT, move |mut end| async move {
            end.request().await;
            end.bytes(&encoded(&[ACCEPTED, DONE])[..cut]).await;
        });
        let result = tokio::time::timeout(AT_MOST, guest.ping()).await.unwrap();
        assert!(matches!(result, Err(Error::Lost(_))), "cut at {cut}: {result:?}");
    }
}

#[tokio::test]
async fn silence_is_a_timeout() {
    let began = Instant::now();
    let (mute, _directory) = parrot(HASTY, vec![]);
    let (stuck, _other) = parrot(HASTY, vec![ACCEPTED]);
    let read = || Read { path: "f".into(), offset: 0, length: None, user: None };
    let list = || List { path: "d".into(), user: None };
    let attach = Attach { target: OP, from: None, input: true, keep_input: true, sole: None };
    for guest in [&mute, &stuck] {
        for result in [
            guest.hello().await.map(|_| ()),
            guest.ping().await,
            guest.cancel(OP).await,
            guest.ops().await.map(|_| ()),
            guest.sync(HASTY.control).await,
            guest.list(list(), 10).await.map(|_| ()),
            guest.read(read()).await.map(|_| ()),
            guest.attach(attach.clone()).await.map(|_| ()),
        ] {
            assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
        }
    }
    assert!(matches!(mute.exec(OP, program(false, None)).await, Err(Error::Timeout { .. })));
    assert!(began.elapsed() < AT_MOST);
}

#[tokio::test]
async fn dripping_is_silence() {
    let (guest, _directory) = guest(HASTY, |mut end| async move {
        end.request().await;
        end.say(&[ACCEPTED]).await;
        // Progress for ever, an end never.
        while end.stream.write_all(&encoded(&[Frame::Event(Event::Entries(vec![]))])).await.is_ok() {
            tokio::task::yield_now().await;
        }
    });
    let began = Instant::now();
    let result = guest.list(List { path: "d".into(), user: None }, 10).await;
    assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
    assert!(began.elapsed() < AT_MOST);
}

#[tokio::test]
async fn endless_answers_are_cut_off() {
    // More operations than a guest keeps.
    let (guest, _directory) = guest(PATIENT, |mut end| async move {
        if end.request().await.operation != Operation::Ops {
            return;
        }
        end.say(&[ACCEPTED]).await;
        let one = OpSummary { op: OP, state: OpState::Ended, detached: false, kept_from: 0, next: 0, outcome: None };
        let some = encoded(&[Frame::Event(Event::Ops(vec![one; 1000]))]);
        while end.stream.write_all(&some).await.is_ok() {}
    });
    assert!(is_protocol(&guest.ops().await));
}

#[tokio::test]
async fn a_long_listing_stops_at_its_limit_and_is_cancelled() {
    let (asked, mut cancelled) = mpsc::unbounded_channel();
    let (guest, _directory) = guest(PATIENT, move |mut end| {
        let asked = asked.clone();
        async move {
            let request = end.request().await;
            match request.operation {
                Operation::Cancel(cancel) => {
                    asked.send(cancel.target).unwrap();
                    end.say(&[ACCEPTED, DONE]).await;
                }
                _ => {
                    asked.send(request.op).unwrap();
                    end.say(&[ACCEPTED]).await;
                    let some = encoded(&[Frame::Event(Event::Entries(vec![stat(); 100]))]);
                    while end.stream.write_all(&some).await.is_ok() {}
                }
            }
        }
    });
    let listing = guest.list(List { path: "d".into(), user: None }, 250).await.unwrap();
    assert_eq!((listing.entries.len(), listing.more), (250, true));
    let op = cancelled.recv().await.unwrap();
    assert_eq!(tokio::time::timeout(AT_MOST, cancelled.recv()).await.unwrap(), Some(op));
}

#[tokio::test]
async fn a_dropped_download_is_cancelled_and_a_dropped_program_is_left() {
    let (seen, mut events) = mpsc::unbounded_channel();
    let (guest, _directory) = guest(PATIENT, move |mut end| {
        let seen = seen.clone();
        async move {
            let request = end.request().await;
            match request.operation {
                Operation::Cancel(cancel) => {
                    end.say(&[ACCEPTED, DONE]).await;
                    seen.send(("cancel", cancel.target)).unwrap();
                }
                Operation::Leave(leave) => {
                    end.say(&[ACCEPTED, DONE]).await;
                    seen.send(("leave", leave.stream)).unwrap();
                }
                Operation::Exec(_) => {
                    end.say(&[ACCEPTED, started()]).await;
                    end.closed().await;
                    seen.send(("closed", request.op)).unwrap();
                }
                _ => {
                    end.say(&[ACCEPTED, data(Channel::Out, 0, b"part")]).await;
                    end.closed().await;
                    seen.send(("closed", request.op)).unwrap();
                }
            }
        }
    });
    let mut next = async || tokio::time::timeout(AT_MOST, events.recv()).await.unwrap().unwrap();
    let download = guest.tar_out(TarOut { path: "d".into(), user: None }).await.unwrap();
    let op = download.op();
    drop(download);
    assert_eq!(next().await, ("cancel", op));
    assert_eq!(next().await, ("closed", op));

    let exec = guest.exec(OP, program(false, None)).await.unwrap();
    drop(exec);
    assert_eq!(next().await, ("leave", OP), "the program is left alone");
    assert_eq!(next().await, ("closed", OP));
    guest.cancel(OP).await.unwrap();
    assert_eq!(next().await, ("cancel", OP));
}

#[tokio::test]
async fn the_receiver_of_end_closes_even_when_the_handle_lives() {
    let (seen, mut closed) = mpsc::unbounded_channel();
    let (guest, _directory) = guest(PATIENT, move |mut end| {
        let seen = seen.clone();
        async move {
            end.request().await;
            end.say(&[ACCEPTED, started(), exited()]).await;
            end.closed().await;
            seen.send(()).unwrap();
        }
    });
    let mut exec = guest.exec(OP, program(true, None)).await.unwrap();
    let mut stdin = exec.take_input().unwrap();
    while exec.next().await.is_some() {}
    tokio::time::timeout(AT_MOST, closed.recv()).await.unwrap().unwrap();
    let after = stdin.send(0, Bytes::from_static(b"late")).await;
    assert!(matches!(after, Err(Error::Ended)), "{after:?}");
    drop(exec);
}

#[tokio::test]
async fn a_refusal_is_a_failure_and_its_text_is_harmless() {
    let evil = "\u{1b}]0;owned\u{7}".repeat(500);
    let no = Frame::End(Outcome::Failed(Failure { code: FailureCode::NotFound, message: evil }));
    for said in [vec![no.clone()], vec![ACCEPTED, no]] {
        let (guest, _directory) = parrot(PATIENT, said);
        let Err(error) = guest.tar_out(TarOut { path: "/x".into(), user: None }).await else { panic!("no failure") };
        assert!(matches!(&error, Error::Failed(failure) if failure.code == FailureCode::NotFound));
        let text = error.to_string();
        assert!(text.len() < 2000 && !text.contains('\u{1b}') && !text.contains('\u{7}'), "{text}");
    }
}

#[tokio::test]
async fn input_sent_again_arrives_once_and_a_hole_is_refused() {
    let got = Arc::new(Mutex::new(Vec::new()));
    let kept = got.clone();
    let (guest, _directory) = guest(PATIENT, move |mut end| {
        let got = kept.clone();
        async move {
            end.request().await;
            end.say(&[ACCEPTED, input(2)]).await;
            loop {
                match end.frame().await {
                    Some(Frame::Data { channel: Channel::In, offset, bytes }) => {
                        assert_eq!(offset, 2 + got.lock().unwrap().len() as u64);
                        got.lock().unwrap().extend_from_slice(&bytes);
                    }
                    Some(Frame::Eof { channel: Channel::In, offset }) => {
                        assert_eq!(offset, 2 + got.lock().unwrap().len() as u64);
                        end.say(&[DONE]).await;
                        return end.closed().await;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    });
    let mut exec = guest.input(OP, InputEnd::Keep).await.unwrap();
    let mut input = exec.take_input().unwrap();
    assert_eq!((input.next(), input.is_open()), (2, true));
    input.send(0, Bytes::from_static(b"abc")).await.unwrap();
    input.send(1, Bytes::from_static(b"bcde")).await.unwrap();
    input.send(0, Bytes::from_static(b"ab")).await.unwrap();
    let hole = input.send(9, Bytes::from_static(b"x")).await;
    assert!(matches!(hole, Err(Error::Failed(Failure { code: FailureCode::Invalid, .. }))), "{hole:?}");
    let long: Vec<u8> = (0..300_000).map(|n| n as u8).collect();
    input.send(5, Bytes::from(long.clone())).await.unwrap();
    input.eof().await.unwrap();
    assert!(matches!(input.send(5, Bytes::new()).await, Err(Error::Ended)));
    let outputs = outputs(exec).await.unwrap();
    assert_eq!(outputs, [Output::Input { next: 2, open: true }, Output::Left]);
    assert_eq!(got.lock().unwrap()[..], [b"cde".to_vec(), long].concat());
}

#[tokio::test]
async fn a_guest_that_takes_no_input_holds_the_sender_back_and_nothing_else() {
    let (guest, _directory) = guest(PATIENT, |mut end| async move {
        match end.request().await.operation {
            Operation::Cancel(_) => end.say(&[ACCEPTED, DONE]).await,
            _ => {
                end.say(&[ACCEPTED, started()]).await;
                std::future::pending::<()>().await;
            }
        }
    });
    let mut exec = guest.exec(OP, program(true, None)).await.unwrap();
    let mut stdin = exec.take_input().unwrap();
    let mut sent = 0_u64;
    let piece = Bytes::from(vec![0; 64 * 1024]);
    // The first send that does not pass within a second is the one that waits; memory is what the socket holds.
    while tokio::time::timeout(Duration::from_secs(1), stdin.send(sent, piece.clone())).await.is_ok() {
        sent += piece.len() as u64;
        assert!(sent < 16 << 20, "no backpressure");
    }
    tokio::time::timeout(AT_MOST, exec.cancel()).await.unwrap().unwrap();
}

fn taken(bytes: u64) -> Frame {
    Frame::Event(Event::Taken { bytes })
}

/// A guest that counts the bytes it gets, from the request's first on, and says for each word of `say` how much it took.
fn counting(say: mpsc::UnboundedReceiver<u64>) -> (Guest, Arc<Mutex<u64>>, tempfile::TempDir) {
    let (got, say) = (Arc::new(Mutex::new(0)), Arc::new(tokio::sync::Mutex::new(say)));
    let count = got.clone();
    let (guest, directory) = guest(PATIENT, move |mut end| {
        let (got, say) = (count.clone(), say.clone());
        async move {
            let request = encoded(&[Frame::Request(end.request().await)]).len();
            *got.lock().unwrap() = (request + end.buffer.len()) as u64;
            end.say(&[taken(0), ACCEPTED, input(0), started()]).await;
            let mut say = say.lock().await;
            let mut bytes = vec![0; 100_000];
            loop {
                tokio::select! {
                    read = end.stream.read(&mut bytes) => match read {
                        Ok(0) | Err(_) => return,
                        Ok(read) => *got.lock().unwrap() += read as u64,
                    },
                    Some(bytes) = say.recv() => end.say(&[taken(bytes)]).await,
                }
            }
        }
    });
    (guest, got, directory)
}

#[tokio::test]
async fn no_more_is_under_way_than_a_guest_has_room_for() {
    let (say, said) = mpsc::unbounded_channel();
    let (guest, got, _directory) = counting(said);
    let still = async || {
        let mut before = u64::MAX;
        loop {
            let now = *got.lock().unwrap();
            if now == before {
                return now;
            }
            before = now;
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    };
    // Nobody reads this stream but the sender itself, and that only while it waits.
    let mut joined = guest.input(OP, InputEnd::Keep).await.unwrap();
    let mut input = joined.take_input().unwrap();
    let sending = tokio::spawn(async move {
        input.send(0, Bytes::from(vec![1; 1_000_000])).await?;
        Ok::<_, Error>(input)
    });
    assert_eq!(still().await, WINDOW);
    say.send(10_000).unwrap();
    assert_eq!(still().await, WINDOW + 10_000);
    say.send(WINDOW).unwrap();
    assert_eq!(still().await, 2 * WINDOW);
    for step in 3..7 {
        say.send((step - 1) * WINDOW).unwrap();
        still().await;
    }
    let input = tokio::time::timeout(AT_MOST, sending).await.unwrap().unwrap().unwrap();
    assert_eq!(input.next(), 1_000_000);
    // What came meanwhile is there for whoever reads.
    let first = tokio::time::timeout(AT_MOST, async { (joined.next().await, joined.next().await) }).await.unwrap();
    assert!(matches!(first, (Some(Ok(Output::Input { next: 0, .. })), Some(Ok(Output::Started { .. })))), "{first:?}");
}

#[tokio::test]
async fn a_sender_that_waits_keeps_some_of_what_comes_and_loses_none() {
    const FRAMES: u64 = 40;
    let go = Arc::new(tokio::sync::Notify::new());
    let wait = go.clone();
    let (guest, _directory) = guest(PATIENT, move |mut end| {
        let go = wait.clone();
        async move {
            end.request().await;
            let said = (0..FRAMES).map(|n| data(Channel::Out, n, b"x"));
            let said: Vec<Frame> = [taken(0), ACCEPTED, started()].into_iter().chain(said).collect();
            end.say(&said).await;
            go.notified().await;
            end.say(&[taken(1000)]).await;
            end.closed().await;
        }
    });
    let mut exec = guest.exec(OP, program(true, None)).await.unwrap();
    let mut stdin = exec.take_input().unwrap();
    // With the request and the heads of frames it is more than may be under way: the sender waits, and reads meanwhile.
    let sending = tokio::spawn(async move { stdin.send(0, Bytes::from(vec![1; WINDOW as usize])).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!sending.is_finished(), "more than there is room for was sent");
    let mut next = 0;
    let reading = async {
        assert!(matches!(exec.next().await, Some(Ok(Output::Started { .. }))));
        while next < FRAMES {
            let output = exec.next().await;
            assert!(matches!(output, Some(Ok(Output::Data { offset, .. })) if offset == next), "{output:?} at {next}");
            next += 1;
        }
    };
    tokio::time::timeout(AT_MOST, reading).await.unwrap();
    assert!(!sending.is_finished());
    go.notify_one();
    tokio::time::timeout(AT_MOST, sending).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_guest_that_lies_about_what_it_took_is_not_believed() {
    let outputs = |said: Vec<Frame>| run(program(true, None), said);
    assert!(outputs(vec![taken(1), ACCEPTED, taken(2), started(), exited()]).await.is_ok());
    // More than there was; less than before; unasked.
    assert!(is_protocol(&outputs(vec![taken(1 << 40), ACCEPTED, exited()]).await));
    assert!(is_protocol(&outputs(vec![ACCEPTED, taken(2), taken(1), exited()]).await));
    assert!(is_protocol(&run(program(false, None), vec![ACCEPTED, taken(1), exited()]).await));
}

#[tokio::test]
async fn an_upload_is_told_early_that_the_disk_is_full() {
    let (guest, _directory) = guest(PATIENT, |mut end| async move {
        end.request().await;
        end.say(&[ACCEPTED]).await;
        end.frame().await;
        end.say(&[failed(FailureCode::NoSpace)]).await;
        // It reads no further, so the sender would wait for ever if it did not listen.
        while end.stream.readable().await.is_ok() {
            tokio::task::yield_now().await;
            if end.stream.peer_cred().is_err() {
                return;
            }
        }
    });
    let mut upload = guest.write(Write { path: "f".into(), mode: None, parents: false, user: None }).await.unwrap();
    let sending = async {
        loop {
            upload.send(Bytes::from(vec![0; 256 * 1024])).await?;
        }
    };
    let result: Result<(), Error> = tokio::time::timeout(AT_MOST, sending).await.unwrap();
    assert!(matches!(result, Err(Error::Failed(Failure { code: FailureCode::NoSpace, .. }))), "{result:?}");
}

#[tokio::test]
async fn an_upload_that_is_not_taken_times_out() {
    let (guest, _directory) = guest(HASTY, |mut end| async move {
        end.request().await;
        end.say(&[ACCEPTED]).await;
        std::future::pending::<()>().await;
    });
    let mut upload = guest.tar_in(TarIn { path: "d".into(), user: None }).await.unwrap();
    let sending = async {
        loop {
            upload.send(Bytes::from(vec![0; 256 * 1024])).await?;
        }
    };
    let result: Result<(), Error> = tokio::time::timeout(AT_MOST, sending).await.unwrap();
    assert!(matches!(result, Err(Error::Timeout { what: "take bytes", .. })), "{result:?}");
}

#[tokio::test]
async fn a_connection_passes_bytes_both_ways_and_each_way_ends_by_itself() {
    let (guest, _directory) = guest(PATIENT, |mut end| async move {
        end.request().await;
        end.say(&[ACCEPTED, data(Channel::Out, 0, b"welcome"), eof(Channel::Out, 7)]).await;
        let mut got = Vec::new();
        loop {
            match end.frame().await {
                Some(Frame::Data { bytes, .. }) => got.extend_from_slice(&bytes),
                Some(Frame::Eof { offset, .. }) => break assert_eq!(offset, got.len() as u64),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(got, vec![5; 200_000]);
        end.say(&[DONE]).await;
        end.closed().await;
    });
    let mut dialed = guest.dial(80).await.unwrap();
    let mut down = Vec::new();
    dialed.read_to_end(&mut down).await.unwrap();
    assert_eq!(down, b"welcome");
    dialed.write_all(&vec![5; 200_000]).await.unwrap();
    dialed.shutdown().await.unwrap();
    assert_eq!(dialed.read(&mut [0; 8]).await.unwrap(), 0);
    drop(dialed);

    let (refusing, _directory) = parrot(PATIENT, vec![failed(FailureCode::Refused)]);
    let refused = refusing.dial(81).await;
    assert!(matches!(refused, Err(Error::Failed(Failure { code: FailureCode::Refused, .. }))), "{refused:?}");

    let (lying, _directory) = parrot(PATIENT, vec![ACCEPTED, data(Channel::Out, 1, b"x")]);
    let error = lying.dial(82).await.unwrap().read(&mut [0; 8]).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
}

#[tokio::test]
async fn full_is_an_answer_and_leaves_room_for_what_is_urgent() {
    // Both ends of each stream are in this process.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let open = Arc::new(AtomicUsize::new(0));
    let count = open.clone();
    let (guest, _directory) = guest(PATIENT, move |mut end| {
        let count = count.clone();
        async move {
            let request = end.request().await;
            match request.operation {
                Operation::Exec(_) => {
                    count.fetch_add(1, Ordering::SeqCst);
                    end.say(&[ACCEPTED, started()]).await;
                    end.closed().await;
                }
                Operation::Attach(_) => {
                    end.say(&[ACCEPTED]).await;
                    end.closed().await;
                }
                _ => end.say(&[ACCEPTED, DONE]).await,
            }
        }
    });
    let ordinary = MAX_STREAMS - URGENT_STREAMS;
    let mut running = Vec::new();
    for n in 0..ordinary {
        running.push(guest.exec(OpId((n as u128).to_le_bytes()), program(false, None)).await.unwrap());
    }
    assert!(matches!(guest.exec(OP, program(false, None)).await, Err(Error::Busy)));
    assert!(matches!(guest.dial(1).await, Err(Error::Busy)));
    let attach = Attach { target: OP, from: Some(0), input: false, keep_input: true, sole: None };
    let mut attached = Vec::new();
    let full = loop {
        match guest.attach(attach.clone()).await {
            Ok(exec) => attached.push(exec),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, Error::Busy), "{full:?}");
    assert_eq!(attached.len(), URGENT_STREAMS / 2);
    guest.ping().await.unwrap();
    guest.cancel(OP).await.unwrap();
    assert_eq!(open.load(Ordering::SeqCst), ordinary);
    // A dropped handle gives its place back, once the guest has heard of it.
    running.pop();
    let again = async {
        loop {
            match guest.exec(OP, program(false, None)).await {
                Err(Error::Busy) => tokio::time::sleep(Duration::from_millis(5)).await,
                other => break other,
            }
        }
    };
    running.push(tokio::time::timeout(AT_MOST, again).await.unwrap().unwrap());
}

#[tokio::test]
async fn nobody_there_is_unreachable() {
    let guest = Guest::new(Connector::socket("/nonexistent/agent"));
    assert!(matches!(guest.ping().await, Err(Error::Unreachable(_))));
}

#[tokio::test]
async fn the_vsock_greeting_is_read_with_care() {
    let long = "OK ".to_owned() + &"1".repeat(100);
    let greetings: [(&str, bool); 8] = [
        ("OK 1073741824\n", true),
        ("OK \n", false),
        ("OK 12a\n", false),
        ("NO 5\n", false),
        ("\n", false),
        ("OK 5\nmore", false),
        (long.as_str(), false),
        ("", false),
    ];
    for (greeting, good) in greetings {
        let greeting = greeting.to_owned();
        let connector = Connector::vsock(move || {
            let greeting = greeting.clone();
            async move {
                let (host, device) = std::os::unix::net::UnixStream::pair()?;
                device.set_nonblocking(true)?;
                let device = UnixStream::from_std(device)?;
                tokio::spawn(async move {
                    let mut end = End { stream: device, buffer: BytesMut::new() };
                    let mut line = [0; 13];
                    end.stream.read_exact(&mut line).await.unwrap();
                    assert_eq!(&line, b"CONNECT 1024\n");
                    end.bytes(greeting.as_bytes()).await;
                    if greeting.starts_with("OK 1") && greeting.ends_with('\n') {
                        end.request().await;
                        end.say(&[ACCEPTED, DONE]).await;
                        end.closed().await;
                    }
                });
                Ok(OwnedFd::from(host))
            }
        });
        let result = Guest::with_deadlines(connector, PATIENT).ping().await;
        match good {
            true => result.unwrap(),
            false => assert!(matches!(result, Err(Error::Unreachable(_))), "{result:?}"),
        }
    }

    // A device that takes the call and never answers.
    let kept = Arc::new(Mutex::new(Vec::new()));
    let silent = Connector::vsock(move || {
        let kept = kept.clone();
        async move {
            let (host, device) = std::os::unix::net::UnixStream::pair()?;
            kept.lock().unwrap().push(device);
            Ok(OwnedFd::from(host))
        }
    });
    let result = Guest::with_deadlines(silent, HASTY).ping().await;
    assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
}

/// A flood of output, of any size, passes through a few blocks of memory.
#[test]
fn output_that_is_not_kept_takes_no_memory() {
    const BLOCK: usize = 60_000;
    const BLOCKS: u64 = 1500;
    let flood = async {
        let (guest, _directory) = guest(PATIENT, |mut end| async move {
            end.request().await;
            end.say(&[ACCEPTED]).await;
            let block = Bytes::from(vec![9; BLOCK]);
            for n in 0..BLOCKS {
                let frame = Frame::Data { channel: Channel::Out, offset: n * BLOCK as u64, bytes: block.clone() };
                end.say(&[frame]).await;
            }
            end.say(&[exited()]).await;
            end.closed().await;
        });
        let mut exec = guest.exec(OP, program(false, None)).await.unwrap();
        let mut seen = 0;
        while let Some(output) = exec.next().await {
            if let Output::Data { bytes, .. } = output.unwrap() {
                seen += bytes.len() as u64;
            }
        }
        assert_eq!(seen, BLOCKS * BLOCK as u64);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let used = allocation_counter::measure(|| runtime.block_on(flood));
    assert!(used.bytes_max < 2 << 20, "{} bytes at once", used.bytes_max);
}
