//! A tree of the host's as a file system of the guest: the kernel's requests go out on a stream, answers come in.
//!
//! Two threads pass messages on, apart from the agent's own, so that the agent may use the mount like any program. What
//! they understand of them is told in [`here`] and [`ahead`]. The mount's end is told by nothing: where the stream ends,
//! the kernel's connection is broken, and every use of the mount fails from then on; it is never an empty directory.
//!
//! ```text
//!   /dev/fuse --a request--> whole, in pieces that streams take --> host     (from the host's first word on)
//!             <-- done ----- a file that is closed
//!   /dev/fuse <--an answer, in one piece--- whole <---------------- host
//!                         is anybody there? --> yes (and not to the kernel)
//! ```
//! Called by `agent`, in a guest only.

mod ahead;
mod here;

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bytes::BytesMut;
use pepo_proto::{FailureCode, Outcome, Share};
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use crate::fuse::{ANSWER_HEAD, MESSAGE, REQUEST_HEAD, done, op, operation, word};
use crate::stream::{MAX_WRITE, failed};
use ahead::{Ahead, Mounted, Pages, Runs};
use here::{By, Here};

/// Mounts the tree. The kernel's side of it is the descriptor; nothing is asked of the host before it is read. The other
/// is what reads its directories.
///
/// # Errors
/// What the host is to be told.
pub fn mount_tree(share: &Share) -> Result<(OwnedFd, impl Pages + use<>), Outcome> {
    let plain = share.path.starts_with('/')
        && share.path.len() > 1
        && share.path[1..].split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    if !plain {
        return Err(failed(FailureCode::Invalid, format!("{:?} is no place for a tree", share.path)));
    }
    let told = |what: &str, error: io::Error| failed(FailureCode::Io, format!("{what} {}: {error}", share.path));
    fs::create_dir_all(&share.path).map_err(|error| told("make", error))?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let fuse = rustix::fs::open("/dev/fuse", flags, Mode::empty())
        .map_err(|error| failed(FailureCode::Io, format!("this kernel has no FUSE (/dev/fuse: {error})")))?;
    // The kernel checks permissions by what the files say, for every user.
    let options =
        format!("fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other", fuse.as_raw_fd());
    let options = CString::new(options).map_err(|error| told("mount", error.into()))?;
    let path = CString::new(&*share.path).map_err(|error| told("mount", error.into()))?;
    let mut how = MountFlags::NOSUID | MountFlags::NODEV;
    if share.read_only {
        how |= MountFlags::RDONLY;
    }
    mount("workspace", &*path, "fuse", how, Some(options.as_c_str())).map_err(|error| told("mount", error.into()))?;
    let pages = Mounted::at(path).map_err(|error| told("look at", error.into()))?;
    Ok((fuse, pages))
}

/// Passes messages on until either side has gone. `input` is what was read of the stream already.
pub fn pump(fuse: OwnedFd, pages: impl Pages, stream: OwnedFd, input: BytesMut) {
    let Ok((stopped, stop)) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) else { return };
    if rustix::io::ioctl_fionbio(&stream, false).is_err() {
        return;
    }
    let Ok(begun) = rustix::event::eventfd(0, EventfdFlags::CLOEXEC) else { return };
    let runs = Arc::<Mutex<Runs>>::default();
    let ahead = Ahead::new(runs.clone(), pages);
    let link = Link { fuse, stream, writing: Mutex::new(()), begun };
    std::thread::scope(|scope| {
        let (link, stopped) = (&link, &stopped);
        let requests = std::thread::Builder::new().name("requests".to_owned()).stack_size(128 << 10);
        if requests
            .spawn_scoped(scope, move || {
                link.requests(stopped, ahead);
                // Unmounted, or the stream takes no more: whoever waits for answers need not.
                let _ = rustix::net::shutdown(&link.stream, rustix::net::Shutdown::Both);
            })
            .is_ok()
        {
            link.answers(input, &runs);
        }
        drop(stop);
    });
    // The last descriptor of the kernel's side goes here: what still waits there fails.
}

struct Link {
    fuse: OwnedFd,
    stream: OwnedFd,
    /// One message at a time.
    writing: Mutex<()>,
    /// Readable, and never read, once the host has spoken.
    begun: OwnedFd,
}

impl Link {
    fn requests(&self, stopped: &OwnedFd, mut ahead: Ahead<impl Pages>) {
        let mut buffer = vec![0; MESSAGE];
        let mut here = Here::default();
        // Before the host has spoken nothing is sent: it may still be on its way to whoever serves.
        if !either(stopped, &self.begun) {
            return;
        }
        while either(stopped, &self.fuse) {
            match rustix::io::read(&self.fuse, &mut buffer) {
                Ok(0) => return,
                Ok(read) => {
                    if self.request(&mut buffer[..read], &mut here, &mut ahead).is_err() {
                        return;
                    }
                }
                // One that was interrupted before it was read.
                Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
                // Unmounted.
                Err(_) => return,
            }
        }
    }

    fn request(&self, request: &mut [u8], here: &mut Here, ahead: &mut Ahead<impl Pages>) -> io::Result<()> {
        let by = here.by(request);
        if by != By::Host {
            self.tell(&done(request))?;
        }
        if by == By::Both {
            number_none(request);
        }
        if operation(request) == op::LOOKUP {
            // Before its answer can be here.
            ahead.asked(request);
        }
        if by != By::Us {
            self.send(request)?;
        }
        Ok(())
    }

    /// Tells the kernel.
    fn tell(&self, message: &[u8]) -> io::Result<()> {
        match rustix::io::write(&self.fuse, message) {
            // Of the second kind: whoever asked was killed meanwhile, or the kernel knows nothing of what a notice is about.
            Ok(_) | Err(Errno::NOENT | Errno::INTR | Errno::INVAL | Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let _one = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        send(&self.stream, bytes)
    }

    fn answers(&self, input: BytesMut, runs: &Mutex<Runs>) {
        let mut buffer = vec![0; MESSAGE + (64 << 10)];
        let (mut from, mut to) = (0, input.len().min(MESSAGE));
        buffer[..to].copy_from_slice(&input[..to]);
        drop(input);
        loop {
            while to - from >= 4 {
                let length = word(&buffer, from) as usize;
                if !(ANSWER_HEAD..=MESSAGE).contains(&length) {
                    return;
                }
                if to - from < length {
                    break;
                }
                let message = &buffer[from..from + length];
                let to_us = length == ANSWER_HEAD && message[4..].iter().all(|byte| *byte == 0);
                if to_us {
                    // It counts the host's questions, of which there is one in some seconds.
                    if rustix::io::write(&self.begun, &1_u64.to_ne_bytes()).is_err() {
                        return;
                    }
                    let mut here = [0; REQUEST_HEAD];
                    here[..4].copy_from_slice(&(REQUEST_HEAD as u32).to_le_bytes());
                    here[4..8].copy_from_slice(&op::HERE.to_le_bytes());
                    if self.send(&here).is_err() {
                        return;
                    }
                } else {
                    runs.lock().unwrap_or_else(PoisonError::into_inner).answered(message, Instant::now());
                    if self.tell(message).is_err() {
                        return;
                    }
                }
                from += length;
            }
            if from > 0 && (from == to || buffer.len() - from < MESSAGE) {
                buffer.copy_within(from..to, 0);
                (from, to) = (0, to - from);
            }
            match rustix::io::read(&self.stream, &mut buffer[to..]) {
                Ok(0) => return,
                Ok(read) => to += read,
                Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

/// Takes the number from a request: whoever has it then answers nobody.
fn number_none(request: &mut [u8]) {
    if let Some(number) = request.get_mut(8..16) {
        number.fill(0);
    }
}

/// Waits until there is something of the second; `false` where the first ends it.
fn either(stopped: &OwnedFd, wanted: &OwnedFd) -> bool {
    loop {
        let mut fds = [PollFd::new(stopped, PollFlags::IN), PollFd::new(wanted, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => return fds[0].revents().is_empty(),
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Writes all of it, in pieces that streams take.
///
/// # Errors
/// The stream's.
pub fn send(stream: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(stream, &bytes[..bytes.len().min(MAX_WRITE)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::fuse::op;

    /// Directories that nobody reads.
    struct Unread;

    impl Pages for Unread {
        fn page(&mut self, _: u64, _: bool) -> ahead::Page {
            ahead::Page::Failed
        }

        fn rest(&mut self) {}
    }

    /// A pipe of packets in the place of the kernel's side.
    fn linked() -> (UnixStream, OwnedFd, std::thread::JoinHandle<()>) {
        let (host, ours) = UnixStream::pair().expect("pair");
        let (kernel, device) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .expect("pair");
        rustix::io::ioctl_fionbio(&device, true).expect("nonblocking");
        let pumping = std::thread::spawn(move || pump(device, Unread, ours.into(), BytesMut::new()));
        host.set_read_timeout(Some(std::time::Duration::from_secs(20))).expect("deadline");
        (host, kernel, pumping)
    }

    fn message(length: u32, fill: u8) -> Vec<u8> {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.resize(length as usize, fill);
        bytes
    }

    fn question() -> Vec<u8> {
        let mut bytes = message(16, 0);
        bytes[4..].fill(0);
        bytes
    }

    #[test]
    fn nothing_is_sent_before_the_host_speaks_and_each_message_arrives_whole() {
        let (mut host, kernel, pumping) = linked();
        let request = message(150_000, 7);
        rustix::net::send(&kernel, &request, rustix::net::SendFlags::empty()).expect("ask");
        host.set_nonblocking(true).expect("nonblocking");
        assert_eq!(host.read(&mut [0; 1]).expect_err("spoke first").kind(), io::ErrorKind::WouldBlock);
        host.set_nonblocking(false).expect("blocking");
        host.write_all(&question()).expect("question");
        let mut here = [0; REQUEST_HEAD];
        host.read_exact(&mut here).expect("here");
        assert_eq!(here[4..8], op::HERE.to_le_bytes());
        let mut got = vec![0; request.len()];
        host.read_exact(&mut got).expect("request");
        assert_eq!(got, request);
        // Answers in odd pieces are put together.
        let answers = [message(16, 1), message(5000, 2), message(77, 3)];
        for piece in answers.concat().chunks(1234) {
            host.write_all(piece).expect("answer");
        }
        let mut buffer = vec![0; 8192];
        for answer in &answers {
            let (read, _) =
                rustix::net::recv(&kernel, &mut buffer[..], rustix::net::RecvFlags::empty()).expect("answer");
            assert_eq!(&buffer[..read], &answer[..]);
        }
        drop(host);
        pumping.join().expect("it ends with the stream");
    }

    #[test]
    fn a_close_is_answered_at_once_and_the_host_told_of_the_handle_alone() {
        let (mut host, kernel, pumping) = linked();
        host.write_all(&question()).expect("question");
        host.read_exact(&mut [0; REQUEST_HEAD]).expect("here");
        let request = |operation: u32, number: u64, body: u8| {
            let mut bytes = message(64, body);
            bytes[4..8].copy_from_slice(&operation.to_le_bytes());
            bytes[8..16].copy_from_slice(&number.to_le_bytes());
            bytes
        };
        for (operation, number) in [(op::FLUSH, 21), (op::RELEASE, 22), (op::RELEASEDIR, 23), (op::READ, 24)] {
            rustix::net::send(&kernel, &request(operation, number, 9), rustix::net::SendFlags::empty()).expect("ask");
        }
        // No answer of the host's is needed for the first three.
        for number in 21..24_u64 {
            let mut answer = [1; 64];
            let (read, _) =
                rustix::net::recv(&kernel, &mut answer[..], rustix::net::RecvFlags::empty()).expect("answer");
            assert_eq!(answer[..read], *[&16_u32.to_le_bytes()[..], &[0; 4], &number.to_le_bytes()].concat());
        }
        for (operation, number) in [(op::RELEASE, 0), (op::RELEASEDIR, 0), (op::READ, 24)] {
            let mut got = [0; 64];
            host.read_exact(&mut got).expect("request");
            assert_eq!(got[..], request(operation, number, 9));
        }
        drop(host);
        pumping.join().expect("it ends with the stream");
    }

    #[test]
    fn a_host_that_sends_no_messages_ends_it() {
        for bad in [0_u32, 15, MESSAGE as u32 + 1, u32::MAX] {
            let (mut host, _kernel, pumping) = linked();
            host.write_all(&[&bad.to_le_bytes()[..], &[0; 64]].concat()).expect("write");
            pumping.join().expect("ended");
        }
    }

    #[test]
    fn the_kernels_end_ends_it() {
        let (mut host, kernel, pumping) = linked();
        host.write_all(&question()).expect("question");
        drop(kernel);
        pumping.join().expect("ended");
        let mut rest = Vec::new();
        host.read_to_end(&mut rest).expect("closed");
    }
}
