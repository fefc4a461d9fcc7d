//! A tree of one file, served by this program to its own kernel: what a mount of the host's asks of the guest, done once
//! before anybody waits for it. Called by the agent's Ready.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::fuse::{ANSWER_HEAD, MESSAGE, REQUEST_HEAD, node, op, operation, word};
use crate::share::send;

/// The file in it, which says the same.
pub const FILE: &str = "rehearsal";

/// Serves the tree on the host's end of a stream until that ends.
///
/// # Errors
/// The stream's.
pub fn serve(stream: &OwnedFd) -> io::Result<()> {
    // The host's first word: is anybody there?
    let mut first = [0; ANSWER_HEAD];
    first[..4].copy_from_slice(&(ANSWER_HEAD as u32).to_le_bytes());
    send(stream, &first)?;
    let (mut buffer, mut held) = (vec![0; MESSAGE], 0);
    loop {
        while held < REQUEST_HEAD || held < word(&buffer, 0) as usize {
            match rustix::io::read(stream, &mut buffer[held..]) {
                Ok(0) => return Ok(()),
                Ok(read) => held += read,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let length = (word(&buffer, 0) as usize).max(REQUEST_HEAD);
        if let Some(answer) = answer(&buffer[..length]) {
            send(stream, &answer)?;
        }
        buffer.copy_within(length..held, 0);
        held -= length;
    }
}

/// What a request is answered, if it is.
fn answer(request: &[u8]) -> Option<Vec<u8>> {
    let body = match operation(request) {
        op::INIT => {
            // major, minor, max_readahead, flags, max_background and congestion_threshold, max_write, time_gran; no more.
            let words = [7_u32, 31, 1 << 17, 0, 16 | (12 << 16), 1 << 17, 1];
            Ok([words.map(u32::to_le_bytes).concat(), vec![0; 36]].concat())
        }
        op::LOOKUP if request[REQUEST_HEAD..].starts_with(FILE.as_bytes()) => {
            // The node's number and generation, and for how long its name and attributes hold.
            Ok([[2_u64, 0, 0, 0, 0].map(u64::to_le_bytes).concat(), attributes(2)].concat())
        }
        op::LOOKUP => Err(Errno::NOENT),
        op::GETATTR => Ok([[0_u64; 2].map(u64::to_le_bytes).concat(), attributes(node(request))].concat()),
        op::OPEN => Ok(vec![0; 16]),
        op::READ => Ok(FILE.into()),
        op::FLUSH | op::RELEASE | op::DESTROY => Ok(Vec::new()),
        op::FORGET | op::BATCH_FORGET | op::INTERRUPT | op::HERE => return None,
        _ => Err(Errno::NOSYS),
    };
    let (error, body) = match body {
        Ok(body) => (0, body),
        Err(error) => (-error.raw_os_error(), Vec::new()),
    };
    let length = (ANSWER_HEAD + body.len()) as u32;
    Some([&length.to_le_bytes()[..], &error.to_le_bytes(), &request[8..16], &body].concat())
}

/// `struct fuse_attr` of the top, or of the file.
fn attributes(node: u64) -> Vec<u8> {
    let (mode, size) = if node == 1 { (0o040_755, 0) } else { (0o100_644, FILE.len() as u64) };
    // Number, size, blocks, three times; their parts of a second; mode, links, owner, group, device, block size, flags.
    let long = [node, size, 1, 0, 0, 0].map(u64::to_le_bytes).concat();
    let short = [0_u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0].map(u32::to_le_bytes).concat();
    [long, short].concat()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn request(operation: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let length = (REQUEST_HEAD + body.len()) as u32;
        let mut bytes = [length, operation].map(u32::to_le_bytes).concat();
        bytes.extend([7, node, 0, 0].map(u64::to_le_bytes).concat());
        bytes.extend(body);
        bytes
    }

    fn heard(kernel: &mut UnixStream) -> (i32, Vec<u8>) {
        let mut head = [0; ANSWER_HEAD];
        kernel.read_exact(&mut head).expect("an answer");
        assert_eq!(head[8..], 7_u64.to_le_bytes(), "another request's");
        let mut body = vec![0; word(&head, 0) as usize - ANSWER_HEAD];
        kernel.read_exact(&mut body).expect("all of it");
        (word(&head, 4) as i32, body)
    }

    #[test]
    fn one_file_is_found_and_read_and_nothing_else_is_there() {
        let (mut kernel, ours) = UnixStream::pair().expect("pair");
        kernel.set_read_timeout(Some(std::time::Duration::from_secs(20))).expect("deadline");
        let serving = std::thread::spawn(move || serve(&ours.into()));
        let mut first = [1; ANSWER_HEAD];
        kernel.read_exact(&mut first).expect("the first word");
        assert!(first[0] == ANSWER_HEAD as u8 && first[4..].iter().all(|byte| *byte == 0), "{first:?}");
        let name = [FILE.as_bytes(), b"\0"].concat();
        // Those without an answer first, all in one piece, and then in two.
        let all = [request(op::HERE, 0, b""), request(op::FORGET, 2, &[0; 8]), request(op::INIT, 0, &[0; 16])].concat();
        kernel.write_all(&all[..50]).expect("half");
        kernel.write_all(&all[50..]).expect("the rest");
        let (error, init) = heard(&mut kernel);
        assert_eq!((error, init.len(), word(&init, 0), word(&init, 4)), (0, 64, 7, 31));
        for (operation, node, body, error, length) in [
            (op::LOOKUP, 1, &name[..], 0, 128),
            (op::LOOKUP, 1, b"other\0", -Errno::NOENT.raw_os_error(), 0),
            (op::GETATTR, 1, &[0; 16], 0, 104),
            (op::OPEN, 2, &[0; 8], 0, 16),
            (op::READ, 2, &[0; 40], 0, FILE.len()),
            (op::RELEASE, 2, &[0; 24], 0, 0),
            (9, 1, b"", -Errno::NOSYS.raw_os_error(), 0),
            (op::DESTROY, 0, b"", 0, 0),
        ] {
            kernel.write_all(&request(operation, node, body)).expect("ask");
            let (said, answer) = heard(&mut kernel);
            assert_eq!((said, answer.len()), (error, length), "{operation}");
        }
        drop(kernel);
        assert!(serving.join().expect("it ends").is_ok(), "the stream's end is its own");
    }
}
