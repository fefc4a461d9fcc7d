//! A tree of the host's as a file system of the guest: the kernel's requests go out on a stream, answers come in.
//!
//! Nothing is understood here but the length in front of each message. Two threads pass them on, apart from the agent's
//! own, so that the agent may use the mount like any program. The mount's end is told by nothing: where the stream ends,
//! the kernel's connection is broken, and every use of the mount fails from then on; it is never an empty directory.
//!
//! ```text
//!   /dev/fuse --a request--> whole, in pieces that streams take --> host     (from the host's first word on)
//!   /dev/fuse <--an answer, in one piece--- whole <---------------- host
//!                         is anybody there? --> yes (and not to the kernel)
//! ```
//! Called by `agent`, in a guest only.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use bytes::BytesMut;
use pepo_proto::{FailureCode, Keep, Outcome, Share};
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_bind};

use crate::stream::{MAX_WRITE, failed};
use crate::user::User;

/// The longest message: what the kernel sends and takes at the most.
pub const MESSAGE: usize = (1 << 20) + 4096;

/// Bytes before an answer's own.
pub const ANSWER_HEAD: usize = 16;

/// Bytes before a request's own.
pub const REQUEST_HEAD: usize = 40;

/// The operation that says that somebody is here.
pub const HERE: u32 = u32::MAX;

/// Mounts the tree. The kernel's side of it is the descriptor; nothing is asked of the host before it is read.
///
/// # Errors
/// What the host is to be told.
pub fn mount_tree(share: &Share) -> Result<OwnedFd, Outcome> {
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
    let options = std::ffi::CString::new(options).map_err(|error| told("mount", error.into()))?;
    let mut how = MountFlags::NOSUID | MountFlags::NODEV;
    if share.read_only {
        how |= MountFlags::RDONLY;
    }
    mount("workspace", &*share.path, "fuse", how, Some(options.as_c_str()))
        .map_err(|error| told("mount", error.into()))?;
    Ok(fuse)
}

/// Passes messages on until either side has gone. `input` is what was read of the stream already.
pub fn pump(fuse: OwnedFd, stream: OwnedFd, input: BytesMut) {
    let Ok((stopped, stop)) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) else { return };
    if rustix::io::ioctl_fionbio(&stream, false).is_err() {
        return;
    }
    let Ok(begun) = rustix::event::eventfd(0, EventfdFlags::CLOEXEC) else { return };
    let link = Link { fuse, stream, writing: Mutex::new(()), begun };
    std::thread::scope(|scope| {
        let (link, stopped) = (&link, &stopped);
        let requests = std::thread::Builder::new().name("requests".to_owned()).stack_size(128 << 10);
        if requests
            .spawn_scoped(scope, move || {
                link.requests(stopped);
                // Unmounted, or the stream takes no more: whoever waits for answers need not.
                let _ = rustix::net::shutdown(&link.stream, rustix::net::Shutdown::Both);
            })
            .is_ok()
        {
            link.answers(input);
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
    fn requests(&self, stopped: &OwnedFd) {
        let mut buffer = vec![0; MESSAGE];
        // Before the host has spoken nothing is sent: it may still be on its way to whoever serves.
        if !either(stopped, &self.begun) {
            return;
        }
        while either(stopped, &self.fuse) {
            loop {
                match rustix::io::read(&self.fuse, &mut buffer) {
                    Ok(0) => return,
                    Ok(read) => {
                        if self.send(&buffer[..read]).is_err() {
                            return;
                        }
                    }
                    // One that was interrupted before it was read.
                    Err(Errno::NOENT | Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    // Unmounted.
                    Err(_) => return,
                }
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let _one = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        send(&self.stream, bytes)
    }

    fn answers(&self, input: BytesMut) {
        let mut buffer = vec![0; MESSAGE + (64 << 10)];
        let (mut from, mut to) = (0, input.len().min(MESSAGE));
        buffer[..to].copy_from_slice(&input[..to]);
        drop(input);
        loop {
            while to - from >= 4 {
                let word = |at: usize| u32::from_le_bytes([buffer[at], buffer[at + 1], buffer[at + 2], buffer[at + 3]]);
                let length = word(from) as usize;
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
                    here[4..8].copy_from_slice(&HERE.to_le_bytes());
                    if self.send(&here).is_err() {
                        return;
                    }
                } else {
                    match rustix::io::write(&self.fuse, message) {
                        // Of the second kind: whoever asked was killed meanwhile, or the kernel knows nothing of what a
                        // notice is about.
                        Ok(_) | Err(Errno::NOENT | Errno::INTR | Errno::INVAL | Errno::AGAIN) => {}
                        Err(_) => return,
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

/// Keeps paths in a mounted tree: each has its like below `top`, bound over its place. What is at the place already, and
/// not kept yet, is where keeping begins.
///
/// # Errors
/// What the host is to be told.
pub fn keep(keep: &Keep, user: &User) -> Result<(), Outcome> {
    let top = Path::new(&keep.top);
    for path in &keep.paths {
        let wrong = || failed(FailureCode::Invalid, format!("{path:?} cannot be kept"));
        let place = match path.strip_prefix("~/") {
            Some(rest) => Path::new(&user.home).join(rest),
            None => PathBuf::from(path),
        };
        let parts: Vec<_> = place.components().skip(1).collect();
        let plain = parts.iter().all(|part| matches!(part, std::path::Component::Normal(_)));
        if !place.is_absolute() || parts.is_empty() || !plain || place.starts_with(top) || top.starts_with(&place) {
            return Err(wrong());
        }
        let told = |what: &str, error: io::Error| failed(FailureCode::Io, format!("{what} {path}: {error}"));
        let kept = top.join(place.strip_prefix("/").map_err(|_| wrong())?);
        let is_file = match (fs::symlink_metadata(&kept), fs::metadata(&place)) {
            (Ok(kept), _) => kept.is_file(),
            (Err(_), Ok(place)) => place.is_file(),
            (Err(_), Err(_)) => false,
        };
        let above = |path: &Path| path.parent().map(Path::to_owned).unwrap_or_default();
        directories(&above(&kept), user).map_err(|error| told("make", error))?;
        if fs::symlink_metadata(&kept).is_err() {
            begin(&place, &kept, is_file, user).map_err(|error| told("begin to keep", error))?;
        }
        directories(&above(&place), user).map_err(|error| told("make", error))?;
        if fs::metadata(&place).is_err() {
            let made = if is_file { fs::File::create(&place).map(drop) } else { fs::create_dir(&place) };
            made.and_then(|()| own(&place, user)).map_err(|error| told("make", error))?;
        }
        mount_bind(&kept, &place).map_err(|error| told("bind", error.into()))?;
    }
    Ok(())
}

/// The first content of what is kept: that of its place.
fn begin(place: &Path, kept: &Path, is_file: bool, user: &User) -> io::Result<()> {
    if is_file {
        match fs::copy(place, kept) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::File::create(kept).map(drop)?,
            done => drop(done?),
        }
        return own(kept, user);
    }
    fs::create_dir(kept)?;
    own(kept, user)?;
    let entries = match fs::read_dir(place) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let (from, to) = (entry.path(), kept.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_symlink() {
            symlink(fs::read_link(&from)?, &to)?;
        } else {
            begin(&from, &to, !kind.is_dir(), user)?;
            fs::set_permissions(&to, fs::metadata(&from)?.permissions())?;
        }
    }
    Ok(())
}

fn own(path: &Path, user: &User) -> io::Result<()> {
    std::os::unix::fs::lchown(path, Some(user.uid), Some(user.gid))
}

/// Makes what is missing of a path, each part the user's.
fn directories(path: &Path, user: &User) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(above) = path.parent() {
        directories(above, user)?;
    }
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        done => done?,
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    own(path, user)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

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
        let pumping = std::thread::spawn(move || pump(device, ours.into(), BytesMut::new()));
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
        assert_eq!(here[4..8], HERE.to_le_bytes());
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
