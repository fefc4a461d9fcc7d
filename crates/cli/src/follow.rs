//! An attached command and the caller's own input and output, until one of them ends.
//!
//! ```text
//!   stdin  --thread--> queue --> Attachment --> queue --thread--> stdout, stderr
//!   signals, window size ----------^   |
//!                                      `--> Exit: its code is ours
//! ```
//!
//! Reading and writing block on threads of their own, with short queues between: a slow reader of ours holds the command
//! back, nothing is collected. One thread writes both outputs, so that their order on one terminal is the command's. A
//! first signal is the command's to handle; a second one of those that ask for an end means that the caller has lost
//! patience, and [`Ending::Impatient`] says so.

use std::io::{Read, Write};
use std::time::Duration;

use bytes::Bytes;
use pepo_api::client::{AttachEvent, AttachInput, Attachment, Client, ClientError, Input};
use pepo_api::{Command, CommandEnd, CommandId, CommandLimits, Reason, SendSignal};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use crate::fail::{self, CLOSED_PIPE, Failure, Outcome, note};
use crate::interrupt::{Caught, Interrupts};
use crate::terminal;

/// Where a command's input comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdin {
    /// From nowhere.
    None,
    /// Ours, as it is.
    Bytes,
    /// Our terminal's keys, raw.
    Keys,
}

/// What the keys `Ctrl-P Ctrl-Q` do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detach {
    /// They are the command's.
    Never,
    /// They leave the command alone.
    ByKeys,
}

/// Where output goes; a seam for tests.
pub struct Outputs {
    /// The command's standard output, or its terminal's.
    pub stdout: Box<dyn Write + Send>,
    /// Its error output.
    pub stderr: Box<dyn Write + Send>,
}

impl Outputs {
    /// Our own, unbuffered: what the command wrote is seen when it wrote it.
    pub fn own() -> Outcome<Self> {
        use std::os::fd::AsFd;
        let same = |fd: std::os::fd::BorrowedFd<'_>| -> std::io::Result<Box<dyn Write + Send>> {
            Ok(Box::new(Patient(std::fs::File::from(fd.try_clone_to_owned()?))))
        };
        Ok(Outputs { stdout: same(std::io::stdout().as_fd())?, stderr: same(std::io::stderr().as_fd())? })
    }
}

/// A file that may be non-blocking, because whoever shares it made it so.
struct Patient(std::fs::File);

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        use rustix::event::{PollFd, PollFlags, poll};
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], None)?;
                }
                other => return other,
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The command that is followed, for what goes beside its attachment.
#[derive(Clone, Debug)]
pub struct Followed {
    /// The client.
    pub client: Client,
    /// The Session's id or name.
    pub session: String,
    /// The command.
    pub id: CommandId,
}

impl Followed {
    /// Passes a signal on: what a terminal sends to all of its foreground, to all that the command started. On a request
    /// of its own, so that it passes while input and output are stuck, and nothing here waits for it.
    fn signal(&self, caught: Caught) {
        let this = self.clone();
        tokio::spawn(async move {
            let body = SendSignal { signal: caught.name.into(), tree: caught.is_for_all() };
            // One that ended meanwhile needs none; whether it is heard shows in what the command does.
            let _ = this.client.command_signal(&this.session, this.id, &body).await;
        });
    }
}

/// How following ended.
#[derive(Debug)]
pub enum Ending {
    /// The command ended.
    Exited(Box<Command>),
    /// The caller asked for an end twice.
    Impatient(Caught),
    /// Nobody reads our output any more.
    ClosedPipe,
    /// The caller left with the keys.
    Detached,
    /// The attachment failed.
    Failed(ClientError),
}

/// Follows the command until its end or ours.
///
/// Without `followed` it only looks: signals are not passed on, and the first that asks for an end is obeyed.
pub async fn follow(
    followed: Option<&Followed>,
    mut attached: Attachment,
    stdin: Stdin,
    detach: Detach,
    outputs: Outputs,
    interrupts: &mut Interrupts,
) -> Outcome<Ending> {
    let input = attached.input();
    let (to_writer, for_writer) = mpsc::channel(4);
    let (closed, mut pipe_closed) = oneshot::channel();
    let writer = std::thread::spawn(move || write(for_writer, outputs, closed));

    let raw = match stdin {
        Stdin::Keys => Some(terminal::Raw::enter().map_err(|e| Failure::new(format!("the terminal: {e}")))?),
        _ => None,
    };
    let mut keys_left = None;
    if stdin != Stdin::None {
        let (left, told) = oneshot::channel();
        keys_left = Some(told);
        read(input.clone(), detach, left);
    }
    let mut window = signal(SignalKind::window_change())?;
    let mut continued = signal(SignalKind::from_raw(rustix::process::Signal::CONT.as_raw()))?;
    let mut asked = false;
    let mut pending = None;

    let ending = loop {
        tokio::select! {
            biased;
            caught = interrupts.next() => {
                let enough = followed.is_none() || asked;
                if caught.ends() && enough {
                    break Ending::Impatient(caught);
                }
                asked |= caught.ends();
                if let Some(followed) = followed {
                    followed.signal(caught);
                }
            }
            _ = window.recv(), if raw.is_some() => {
                let size = terminal::size();
                let resize = Input::Resize { cols: size.cols, rows: size.rows };
                // Not for ever: while the connection is being made again there is room for a few only.
                let _ = tokio::time::timeout(Duration::from_millis(200), input.send(resize)).await;
            }
            _ = continued.recv(), if raw.is_some() => {
                if let Some(raw) = &raw {
                    raw.again();
                }
            }
            true = left(&mut keys_left) => break Ending::Detached,
            _ = &mut pipe_closed => break Ending::ClosedPipe,
            // Room first, then the next event: signals count while the reader of our output is slow.
            room = to_writer.reserve(), if pending.is_some() => match (room, pending.take()) {
                (Ok(room), Some(piece)) => room.send(piece),
                _ => break Ending::ClosedPipe,
            },
            event = attached.next(), if pending.is_none() => match event {
                None => break Ending::Failed(ClientError::Lost("the command".into())),
                Some(Err(error)) => break Ending::Failed(error),
                Some(Ok(AttachEvent::Exit(command))) => break Ending::Exited(command),
                Some(Ok(AttachEvent::Start(_))) => {}
                Some(Ok(AttachEvent::Stdout(bytes))) => pending = Some(Piece::Stdout(bytes)),
                Some(Ok(AttachEvent::Stderr(bytes))) => pending = Some(Piece::Stderr(bytes)),
                Some(Ok(AttachEvent::Gap(missing))) => {
                    let text = format!("{missing} bytes of output are missing here: they were no longer kept");
                    pending = Some(Piece::Note(text));
                }
                Some(Ok(AttachEvent::Reconnecting)) => {
                    pending = Some(Piece::Note("the connection to the daemon is lost; attaching again".into()));
                }
                Some(Ok(AttachEvent::Reconnected)) => pending = Some(Piece::Note("attached again".into())),
            },
        }
    };
    drop(raw);
    drop(to_writer);
    if matches!(ending, Ending::Exited(_) | Ending::Failed(_)) {
        // All of its output is on its way; an impatient caller can still cut that short.
        let written = tokio::task::spawn_blocking(move || writer.join());
        if let Err(caught) = interrupts.unless(written).await {
            return Ok(Ending::Impatient(caught));
        }
        if pipe_closed.try_recv().is_ok() {
            return Ok(Ending::ClosedPipe);
        }
    }
    Ok(ending)
}

async fn left(keys: &mut Option<oneshot::Receiver<()>>) -> bool {
    match keys {
        None => std::future::pending().await,
        Some(told) => {
            let left = told.await.is_ok();
            *keys = None;
            left
        }
    }
}

enum Piece {
    Stdout(Bytes),
    Stderr(Bytes),
    Note(String),
}

fn write(mut pieces: mpsc::Receiver<Piece>, mut outputs: Outputs, closed: oneshot::Sender<()>) {
    while let Some(piece) = pieces.blocking_recv() {
        let written = match piece {
            Piece::Stdout(bytes) => outputs.stdout.write_all(&bytes),
            // Without a place for errors the command still works.
            Piece::Stderr(bytes) => outputs.stderr.write_all(&bytes).or(Ok(())),
            Piece::Note(text) => {
                note(text);
                Ok(())
            }
        };
        if let Err(error) = written {
            if error.kind() != std::io::ErrorKind::BrokenPipe {
                note(format!("cannot write the command's output: {error}"));
            }
            let _ = closed.send(());
            return;
        }
    }
}

/// Reads standard input on a thread that is left behind at the end: a read cannot be taken back.
fn read(input: AttachInput, detach: Detach, left: oneshot::Sender<()>) {
    let runtime = tokio::runtime::Handle::current();
    std::thread::spawn(move || {
        let mut keys = Keys::default();
        let mut buffer = vec![0; 64 << 10];
        let mut stdin = std::io::stdin().lock();
        loop {
            let read = match stdin.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    use rustix::event::{PollFd, PollFlags, poll};
                    let _ = poll(&mut [PollFd::new(&std::io::stdin(), PollFlags::IN)], None);
                    continue;
                }
                Err(_) => break,
            };
            let bytes = match detach {
                Detach::Never => Some(Bytes::copy_from_slice(&buffer[..read])),
                Detach::ByKeys => keys.feed(&buffer[..read]),
            };
            let Some(bytes) = bytes else {
                let _ = left.send(());
                return;
            };
            if !bytes.is_empty() && !runtime.block_on(input.send(Input::Bytes(bytes))) {
                return;
            }
        }
        runtime.block_on(input.send(Input::Eof));
    });
}

/// Watches for `Ctrl-P Ctrl-Q`. A `Ctrl-P` that something else follows is passed on with it.
#[derive(Default)]
struct Keys {
    held: bool,
}

impl Keys {
    /// What to pass on; nothing when the keys came.
    fn feed(&mut self, typed: &[u8]) -> Option<Bytes> {
        const P: u8 = 0x10;
        const Q: u8 = 0x11;
        let mut pass = Vec::with_capacity(typed.len() + 1);
        for &key in typed {
            match (std::mem::take(&mut self.held), key) {
                (true, Q) => return None,
                (held, key) => {
                    if held {
                        pass.push(P);
                    }
                    if key == P {
                        self.held = true;
                    } else {
                        pass.push(key);
                    }
                }
            }
        }
        Some(pass.into())
    }
}

/// The exit code for a command's end, with its cause on standard error where the code alone does not tell.
pub fn exit_code(command: &Command, memory_mib: Option<u32>) -> u8 {
    let Some(end) = &command.end else { return 125 };
    if let Some(cause) = cause(end, memory_mib, command.limits) {
        note(cause);
    }
    code(end)
}

fn code(end: &CommandEnd) -> u8 {
    let by_signal = || end.signal_number.and_then(|n| u8::try_from(n + 128).ok());
    match end.reason {
        Reason::Exit => end.exit_code.and_then(|c| u8::try_from(c & 0xff).ok()).unwrap_or(125),
        Reason::Timeout => 124,
        Reason::Signal => by_signal().unwrap_or(137),
        _ => 137,
    }
}

fn cause(end: &CommandEnd, memory_mib: Option<u32>, limits: Option<CommandLimits>) -> Option<String> {
    let more = |mib: u32| crate::render::mebibytes(mib.saturating_mul(2).next_power_of_two());
    match end.reason {
        Reason::Exit => None,
        // A shell is silent about its own SIGINT and SIGPIPE, and loud about crashes.
        Reason::Signal => match (&end.signal, end.signal_number) {
            (_, Some(2 | 13)) => None,
            (Some(name), _) => Some(format!("ended by {name}")),
            (None, Some(number)) => Some(format!("ended by signal {number}")),
            (None, None) => None,
        },
        Reason::Timeout => Some("killed: its time was over".into()),
        Reason::Killed => Some("killed".into()),
        Reason::OutOfMemory => Some(match (limits.and_then(|limits| limits.memory_mib), memory_mib) {
            (Some(mib), _) => {
                format!("killed: out of memory (limit {mib} MiB of the command); try --limit memory={}", more(mib))
            }
            (None, Some(mib)) => format!("killed: out of memory (limit {mib} MiB); try --memory {}", more(mib)),
            (None, None) => "killed: out of memory; try a Session with more --memory".into(),
        }),
        other => Some(format!("killed: {}", fail::reason(other))),
    }
}

/// What `main` returns for an ending that is not the command's own.
pub fn code_of(ending: &Ending) -> Option<u8> {
    match ending {
        Ending::Impatient(caught) => Some(caught.exit_code()),
        Ending::ClosedPipe => Some(CLOSED_PIPE),
        Ending::Detached => Some(0),
        Ending::Exited(_) | Ending::Failed(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(reason: Reason) -> CommandEnd {
        CommandEnd {
            reason,
            exit_code: None,
            signal: None,
            signal_number: None,
            cwd: None,
            at: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    #[test]
    fn exit_codes_are_a_shells() {
        let exit = |code| CommandEnd { exit_code: Some(code), ..end(Reason::Exit) };
        assert_eq!([0, 3, 255].map(|c| code(&exit(c))), [0, 3, 255]);
        let signal = CommandEnd { signal: Some("SIGSEGV".into()), signal_number: Some(11), ..end(Reason::Signal) };
        assert_eq!((code(&signal), cause(&signal, None, None).as_deref()), (139, Some("ended by SIGSEGV")));
        assert_eq!((code(&end(Reason::Timeout)), code(&end(Reason::Killed))), (124, 137));
        let panic = end(Reason::GuestPanic);
        assert_eq!(
            (code(&panic), cause(&panic, None, None).as_deref()),
            (137, Some("killed: the guest's kernel panicked"))
        );
    }

    #[test]
    fn running_out_of_memory_says_what_to_try() {
        let oom = end(Reason::OutOfMemory);
        assert_eq!(
            cause(&oom, Some(512), None).as_deref(),
            Some("killed: out of memory (limit 512 MiB); try --memory 1G")
        );
        assert_eq!(code(&oom), 137);
    }

    #[test]
    fn a_commands_own_limit_is_named_as_its_own() {
        let limits = CommandLimits { memory_mib: Some(64), ..CommandLimits::default() };
        assert_eq!(
            cause(&end(Reason::OutOfMemory), Some(512), Some(limits)).as_deref(),
            Some("killed: out of memory (limit 64 MiB of the command); try --limit memory=128M")
        );
    }

    #[test]
    fn the_keys_that_detach_are_found_across_reads() {
        let mut keys = Keys::default();
        assert_eq!(keys.feed(b"a\x10b"), Some(Bytes::from_static(b"a\x10b")));
        assert_eq!(keys.feed(b"c\x10"), Some(Bytes::from_static(b"c")));
        assert_eq!(keys.feed(b"\x10"), Some(Bytes::from_static(b"\x10")));
        assert_eq!(keys.feed(b"\x11"), None);
        let mut keys = Keys::default();
        assert_eq!(keys.feed(b"x\x11"), Some(Bytes::from_static(b"x\x11")));
    }
}
