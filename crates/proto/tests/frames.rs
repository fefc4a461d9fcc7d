//! The codec against everything that can lie on a stream: every frame, cut anywhere, and what is not a frame at all.

#![allow(clippy::unwrap_used, clippy::panic)] // all of it is a test

mod any;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use pepo_proto::{Channel, Error, Event, Frame, Frames, HEADER, MAX_BODY, MAX_DATA, OpId, Operation, Outcome, Request};
use proptest::prelude::*;
use tokio_util::codec::{Decoder, Encoder};

/// What a decoder may allocate for one frame beyond the bytes it was given. The most that 64 KiB can become is a
/// listing of the smallest entries there are, 8 bytes on the wire and 104 in memory, in a vector that doubles.
const MOST_ALLOCATED: u64 = 4 * 1024 * 1024;

fn encoded(frames: &[Frame]) -> BytesMut {
    let mut bytes = BytesMut::new();
    for frame in frames {
        Frames::new().encode(frame.clone(), &mut bytes).unwrap();
    }
    bytes
}

/// Every frame in `bytes`, given to the decoder in parts that end at `cuts`.
fn decoded(bytes: &[u8], cuts: &[usize]) -> Result<Vec<Frame>, Error> {
    let (mut codec, mut buffer, mut frames) = (Frames::new(), BytesMut::new(), Vec::new());
    let mut from = 0;
    for to in cuts.iter().copied().chain([bytes.len()]) {
        buffer.extend_from_slice(&bytes[from..to]);
        from = to;
        while let Some(frame) = codec.decode(&mut buffer)? {
            frames.push(frame);
        }
    }
    match codec.decode_eof(&mut buffer)? {
        Some(_) => panic!("a frame was left in the buffer"),
        None => Ok(frames),
    }
}

/// A frame of this kind with this body, right or wrong.
fn raw(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.put_u32_le(body.len() as u32 + 1);
    bytes.put_u8(kind);
    bytes.put_slice(body);
    bytes
}

proptest! {
    #[test]
    fn what_is_written_is_read(frames in proptest::collection::vec(any::frame(), 1..6)) {
        prop_assert_eq!(decoded(&encoded(&frames), &[]).unwrap(), frames);
    }

    #[test]
    fn a_cut_at_any_byte_changes_nothing(frames in proptest::collection::vec(any::frame(), 1..3)) {
        let bytes = encoded(&frames);
        for cut in 0..=bytes.len() {
            prop_assert_eq!(&decoded(&bytes, &[cut]).unwrap(), &frames);
        }
        let every: Vec<usize> = (0..=bytes.len()).collect();
        prop_assert_eq!(decoded(&bytes, &every).unwrap(), frames);
    }

    #[test]
    fn a_stream_that_ends_early_says_so(frame in any::frame(), at in any::<prop::sample::Index>()) {
        let bytes = encoded(&[frame]);
        let kept = 1 + at.index(bytes.len() - 1);
        prop_assert!(matches!(decoded(&bytes[..kept], &[]), Err(Error::Truncated)));
    }

    #[test]
    fn bytes_after_a_message_are_refused(frame in any::frame(), more in proptest::collection::vec(any::<u8>(), 1..9)) {
        prop_assume!(!matches!(frame, Frame::Data { .. }));
        let bytes = encoded(&[frame]);
        let mut body = bytes[HEADER..].to_vec();
        body.extend(more);
        prop_assert!(decoded(&raw(bytes[4], &body), &[]).is_err());
    }

    #[test]
    fn a_flipped_bit_never_panics_nor_allocates(frame in any::frame(), at in any::<prop::sample::Index>(), bit in 0..8) {
        let mut bytes = encoded(&[frame]);
        let at = at.index(bytes.len());
        bytes[at] ^= 1_u8 << bit;
        bounded(&bytes);
    }

    #[test]
    fn noise_never_panics_nor_allocates(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        bounded(&bytes);
    }

    #[test]
    fn noise_in_a_message_never_panics_nor_allocates(
        kind in prop_oneof![Just(1_u8), Just(6), Just(7)],
        head in proptest::collection::vec(any::<u8>(), 0..200),
        fill in any::<u8>(),
        filled in 0..MAX_BODY - 200,
    ) {
        let mut body = head;
        body.resize(body.len() + filled, fill);
        bounded(&raw(kind, &body));
    }
}

/// Decodes, whatever comes of it, and measures.
fn bounded(bytes: &[u8]) {
    let used = allocation_counter::measure(|| {
        let mut buffer = BytesMut::from(bytes);
        let mut codec = Frames::new();
        while let Ok(Some(_)) = codec.decode(&mut buffer) {}
        assert!(buffer.capacity() <= bytes.len().max(HEADER + MAX_BODY) * 2, "{} bytes of buffer", buffer.capacity());
    });
    assert!(used.bytes_max <= bytes.len() as u64 + MOST_ALLOCATED, "{} bytes allocated", used.bytes_max);
}

#[test]
fn a_hostile_length_is_refused_before_anything_is_allocated() {
    for length in [0, MAX_BODY as u32 + 2, 1 << 20, 1 << 24, u32::MAX / 2, u32::MAX] {
        let mut buffer = BytesMut::from(&length.to_le_bytes()[..]);
        let used = allocation_counter::measure(|| {
            assert!(matches!(Frames::new().decode(&mut buffer), Err(Error::Length(told)) if told == length as usize));
        });
        assert_eq!(used.bytes_total, 0, "for a length of {length}");
    }
}

#[test]
fn the_longest_frame_passes_and_one_byte_more_does_not() {
    let longest = Frame::Data { channel: Channel::Out, offset: 0, bytes: Bytes::from(vec![7; MAX_DATA]) };
    let bytes = encoded(std::slice::from_ref(&longest));
    assert_eq!(bytes.len(), HEADER + MAX_BODY);
    assert_eq!(decoded(&bytes, &[]).unwrap(), [longest]);

    let longer = Frame::Data { channel: Channel::Out, offset: 0, bytes: Bytes::from(vec![7; MAX_DATA + 1]) };
    let refused = Frames::new().encode(longer, &mut BytesMut::new());
    assert!(matches!(refused, Err(Error::TooLarge { what: "data", .. })));
    assert!(matches!(decoded(&raw(3, &vec![0; MAX_BODY + 1]), &[]), Err(Error::Length(_))));
}

#[test]
fn a_message_of_ours_that_fits_no_frame_is_refused_and_leaves_nothing_behind() {
    let exec = pepo_proto::Exec::new(["x".repeat(MAX_BODY)]);
    let mut bytes = BytesMut::new();
    let request = Frame::Request(Request { op: OpId([0; 16]), operation: Operation::Exec(exec), paced: None });
    assert!(matches!(Frames::new().encode(request, &mut bytes), Err(Error::TooLarge { what: "request", .. })));
    assert!(bytes.is_empty());
}

#[test]
fn what_is_not_a_frame_is_named() {
    let of = |kind: u8, body: &[u8]| decoded(&raw(kind, body), &[]).unwrap_err();
    assert!(matches!(of(0, b""), Error::Kind(0)));
    assert!(matches!(of(8, b""), Error::Kind(8)));
    assert!(matches!(of(2, b"x"), Error::Malformed("accepted")));
    assert!(matches!(of(3, &[1; 9]), Error::Malformed("data")), "data without a byte");
    assert!(matches!(of(3, &[3; 12]), Error::Channel(3)));
    assert!(matches!(of(4, &[1; 8]), Error::Malformed("eof")));
    assert!(matches!(of(4, &[9; 9]), Error::Channel(9)));
    assert!(matches!(of(5, &[0; 16]), Error::Malformed("gap")), "a gap of nothing");
    assert!(matches!(of(5, &[0; 15]), Error::Malformed("gap")));
    assert!(matches!(of(6, b""), Error::Message { what: "event", .. }));
    assert!(matches!(of(7, &[0xff]), Error::Message { what: "end", .. }));
    assert!(matches!(of(1, &[0x82, 0x41, 0]), Error::Message { what: "request", .. }), "an operation id of one byte");
}

#[test]
fn arrays_that_claim_to_be_endless_are_refused_cheaply() {
    // Event::Entries with an array of 2^64 - 1 entries, an endless array, and one nested as deep as a frame is long.
    let endless: [Vec<u8>; 4] = [
        [vec![0x82, 4, 0x81, 0x9b], vec![0xff; 8]].concat(),
        vec![0x82, 4, 0x81, 0x9f],
        [vec![0x82, 4], vec![0x81; MAX_BODY - 2]].concat(),
        [vec![0x82, 4], vec![0x9f; MAX_BODY - 2]].concat(),
    ];
    for body in endless {
        bounded(&raw(6, &body));
        assert!(decoded(&raw(6, &body), &[]).is_err());
    }
    // A field we do not know is skipped; one that nests without end must not take the stack or the heap with it.
    for filler in [0x81, 0x9f, 0xbf, 0xd8, 0xa1, 0x5f] {
        let body = [vec![0x82, 1, 0x82, 7], vec![filler; MAX_BODY - 4]].concat();
        bounded(&raw(6, &body));
    }
}

#[test]
fn the_fullest_listing_stays_within_the_bound() {
    // As many of the smallest entries as one frame holds.
    let entry = [0x88, 0x40, 0, 0, 0, 0, 0, 0, 0xf6];
    let count = (MAX_BODY - 8) / entry.len();
    let mut body = vec![0x82, 4, 0x81, 0x99];
    body.extend((count as u16).to_be_bytes());
    body.extend(entry.repeat(count));
    bounded(&raw(6, &body));
    match &decoded(&raw(6, &body), &[]).unwrap()[..] {
        [Frame::Event(Event::Entries(entries))] => assert_eq!(entries.len(), count),
        other => panic!("{other:?}"),
    }
}

#[test]
fn later_fields_are_passed_over_and_earlier_ones_may_be_missing() {
    // Event::Started with a second field that this release does not know.
    let later = decoded(&raw(6, &[0x82, 1, 0x82, 0x18, 42, 0x63, b'n', b'e', b'w']), &[]).unwrap();
    assert_eq!(later, [Frame::Event(Event::Started { pid: 42 })]);
    // An Attach as the first release of this generation wrote it: without `sole`.
    let mut body = vec![0x82, 0x50];
    body.extend([5; 16]);
    body.extend([0x82, 3, 0x81, 0x84, 0x50]);
    body.extend([6; 16]);
    body.extend([0, 0xf4, 0xf4]);
    match &decoded(&raw(1, &body), &[]).unwrap()[..] {
        [Frame::Request(Request { operation: Operation::Attach(attach), .. })] => {
            assert_eq!((attach.from, attach.sole), (Some(0), None));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_layout_of_payload_frames_is_what_it_was() {
    let data = Frame::Data { channel: Channel::Err, offset: 0x0102, bytes: Bytes::from_static(b"hi") };
    assert_eq!(encoded(&[data])[..], [12, 0, 0, 0, 3, 2, 2, 1, 0, 0, 0, 0, 0, 0, b'h', b'i']);
    let eof = Frame::Eof { channel: Channel::Out, offset: 1 };
    assert_eq!(encoded(&[eof])[..], [10, 0, 0, 0, 4, 1, 1, 0, 0, 0, 0, 0, 0, 0]);
    let gap = Frame::Gap { from: 1, to: 3 };
    assert_eq!(encoded(&[gap])[..], [17, 0, 0, 0, 5, 1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(encoded(&[Frame::Accepted])[..], [1, 0, 0, 0, 2]);
    assert_eq!(encoded(&[Frame::End(Outcome::Done)])[..], [4, 0, 0, 0, 7, 0x82, 0, 0x80]);
}

#[test]
fn payload_is_not_copied() {
    let mut buffer = encoded(&[Frame::Data { channel: Channel::Out, offset: 0, bytes: Bytes::from(vec![1; 4096]) }]);
    let lies_at = buffer.as_ptr() as usize + HEADER + 9;
    let Some(Frame::Data { mut bytes, .. }) = Frames::new().decode(&mut buffer).unwrap() else { panic!("no data") };
    assert_eq!(bytes.as_ptr() as usize, lies_at);
    bytes.advance(1);
}
