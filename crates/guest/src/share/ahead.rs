//! Names read ahead: where a program looks at one file of a directory after the other, the rest of it is asked for by
//! the page, as `ls -l` would, so that the kernel knows the next ones before it is asked.
//!
//! The kernel reads by itself only for whoever reads the directory; most programs that look at many files have their
//! names already. Each look that had to ask the host is worth one page of some 24 names, from the eighth in one directory
//! on: so it costs at the most as many messages again where none of them is wanted, and nothing where a directory is
//! larger than is worth it. What is learned so holds as long as what was asked for, by the kernel's own rules.
//!
//! ```text
//!   LOOKUP out ---> asked ---> is this a run? --> a page of its directory, through the mount, on a thread of its own
//!   LOOKUP in  ---> answered: another one found
//! ```

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, RawDir, StatxFlags, statx};

use crate::fuse::{ANSWER_HEAD, long, node, number};
use crate::sys;

/// Files found in one directory before the rest of it is read.
const RUN: u32 = 8;

/// Directories that are kept in mind, those where something was found last.
const RUNS: usize = 4;

/// Pages of one directory: some 6,000 names.
const PAGES: u32 = 256;

/// How long nothing may be found for a run to go on, and for its directory to stay open.
const PAUSE: Duration = Duration::from_secs(1);

/// Requests on their way of which it is known that they look for a name.
const ASKED: usize = 16;

/// Room for what the kernel tells of a directory in one go.
const ROOM: usize = 32 << 10;

/// What reads directories of the mount.
pub trait Pages: Send + 'static {
    /// Reads the next page of the directory, or its `first`.
    fn page(&mut self, directory: u64, first: bool) -> Page;

    /// Closes what is open.
    fn rest(&mut self);
}

/// What came of reading one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// Names.
    Some,
    /// None any more.
    End,
    /// It cannot be read.
    Failed,
}

/// Where a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    /// So many pages.
    Pages(u32),
    /// One is being read.
    Now(u32),
    /// All of it; known until then.
    Whole(Instant),
    /// As much as will be.
    Enough,
}

/// Files found in one directory, one after the other.
#[derive(Debug)]
struct Run {
    directory: u64,
    found: u32,
    last: Instant,
    /// How long the last name may be trusted.
    holds: Duration,
    read: Read,
}

/// The directories in which files are being found.
#[derive(Debug, Default)]
pub struct Runs {
    runs: Vec<Run>,
    /// Number of the request and directory.
    asked: [(u64, u64); ASKED],
    next: usize,
}

impl Runs {
    /// A name is looked for. Whether the next page of its directory, or its first, is to be read now.
    fn asked(&mut self, request: &[u8]) -> Option<bool> {
        let directory = node(request);
        self.asked[self.next] = (number(request), directory);
        self.next = (self.next + 1) % ASKED;
        let run = self.runs.iter_mut().find(|run| run.directory == directory && run.found >= RUN)?;
        let Read::Pages(read) = run.read else { return None };
        run.read = Read::Now(read);
        Some(read == 0)
    }

    /// Looks at an answer: whether it is a name's that was found.
    pub fn answered(&mut self, answer: &[u8], now: Instant) {
        // Node, generation, and for how long the name and the attributes hold: 8 bytes each; the attributes are 104.
        const ENTRY: usize = ANSWER_HEAD + 128;
        if answer.len() != ENTRY || long(answer, ANSWER_HEAD) == 0 {
            return;
        }
        let Some(asked) = self.asked.iter_mut().find(|asked| asked.0 == number(answer) && asked.0 != 0) else { return };
        let directory = std::mem::take(asked).1;
        let holds = Duration::from_secs(long(answer, ANSWER_HEAD + 16));
        self.found(directory, holds, now);
    }

    fn found(&mut self, directory: u64, holds: Duration, now: Instant) {
        let new = || Run { directory, found: 0, last: now, holds, read: Read::Pages(0) };
        let mut run = match self.runs.iter().position(|run| run.directory == directory) {
            Some(at) => self.runs.remove(at),
            None => new(),
        };
        let over = match run.read {
            Read::Pages(_) => now.duration_since(run.last) > PAUSE,
            Read::Whole(until) => now > until,
            Read::Now(_) | Read::Enough => false,
        };
        if over {
            run = new();
        }
        (run.found, run.last, run.holds) = (run.found + 1, now, holds);
        self.runs.insert(0, run);
        self.runs.truncate(RUNS);
    }

    /// What came of reading a directory.
    fn read(&mut self, directory: u64, page: Page, now: Instant) {
        let Some(run) = self.runs.iter_mut().find(|run| run.directory == directory) else { return };
        let Read::Now(read) = run.read else { return };
        run.read = match page {
            Page::Some if read + 1 < PAGES => Read::Pages(read + 1),
            Page::Some | Page::Failed => Read::Enough,
            Page::End => Read::Whole(now + run.holds),
        };
    }
}

/// The side that asks: reads on where a run is.
pub struct Ahead<P> {
    runs: Arc<Mutex<Runs>>,
    /// Until a page is wanted for the first time.
    pages: Option<P>,
    /// From then on, where its thread could be started.
    reader: Option<SyncSender<(u64, bool)>>,
}

impl<P: Pages> Ahead<P> {
    /// Nothing is read before there is a run.
    pub fn new(runs: Arc<Mutex<Runs>>, pages: P) -> Self {
        Ahead { runs, pages: Some(pages), reader: None }
    }

    /// A name is looked for: its request goes out next.
    pub fn asked(&mut self, request: &[u8]) {
        let due = self.runs.lock().unwrap_or_else(PoisonError::into_inner).asked(request);
        let Some(first) = due else { return };
        let wanted = (node(request), first);
        if self.reader().is_none_or(|reader| reader.try_send(wanted).is_err()) {
            // It cannot keep up with all of them, or there is none.
            self.runs.lock().unwrap_or_else(PoisonError::into_inner).read(wanted.0, Page::Failed, Instant::now());
        }
    }

    fn reader(&mut self) -> Option<&SyncSender<(u64, bool)>> {
        if let Some(pages) = self.pages.take() {
            let (wanted, wants) = sync_channel(RUNS);
            let runs = self.runs.clone();
            let thread = std::thread::Builder::new().name("ahead".to_owned()).stack_size(128 << 10);
            // Not waited for at the end: where it stands in the mount, the mount's end ends that.
            self.reader = thread.spawn(move || read(pages, &wants, &runs)).is_ok().then_some(wanted);
        }
        self.reader.as_ref()
    }
}

/// Reads until nobody can want anything any more.
fn read(mut pages: impl Pages, wants: &Receiver<(u64, bool)>, runs: &Mutex<Runs>) {
    let mut rests = true;
    loop {
        let wanted = match rests {
            true => wants.recv().map_err(RecvTimeoutError::from),
            false => wants.recv_timeout(PAUSE),
        };
        match wanted {
            Ok((directory, first)) => {
                rests = false;
                let page = pages.page(directory, first);
                runs.lock().unwrap_or_else(PoisonError::into_inner).read(directory, page, Instant::now());
            }
            Err(RecvTimeoutError::Timeout) => {
                rests = true;
                pages.rest();
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Directories of a mounted tree, opened by their nodes.
#[derive(Debug)]
pub struct Mounted {
    path: CString,
    device: (u32, u32),
    begun: bool,
    open: Vec<(u64, OwnedFd)>,
}

impl Mounted {
    /// Those of what is mounted at this path.
    ///
    /// # Errors
    /// The kernel's.
    pub fn at(path: CString) -> rustix::io::Result<Self> {
        let device = device(&path)?;
        Ok(Mounted { path, device, begun: false, open: Vec::new() })
    }

    fn open(&mut self, node: u64) -> std::io::Result<OwnedFd> {
        if !self.begun {
            // From here on this thread's place is its own.
            sys::own_place()?;
            self.begun = true;
        }
        rustix::process::chdir(&*self.path)?;
        // What somebody mounted over it has other nodes.
        let ours = device(c".").is_ok_and(|device| device == self.device);
        let opened = match ours {
            true => sys::open_node(node),
            false => Err(std::io::ErrorKind::NotFound.into()),
        };
        rustix::process::chdir("/")?;
        opened
    }
}

/// The device of a mount, of which nobody is asked anything.
fn device(path: &std::ffi::CStr) -> rustix::io::Result<(u32, u32)> {
    let seen = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    Ok((seen.stx_dev_major, seen.stx_dev_minor))
}

impl Pages for Mounted {
    fn page(&mut self, directory: u64, first: bool) -> Page {
        if first {
            self.open.retain(|(node, _)| *node != directory);
            let Ok(opened) = self.open(directory) else { return Page::Failed };
            self.open.insert(0, (directory, opened));
            self.open.truncate(RUNS);
        }
        let Some(at) = self.open.iter().position(|(node, _)| *node == directory) else { return Page::Failed };
        let mut room = [MaybeUninit::uninit(); ROOM];
        let mut names = RawDir::new(&self.open[at].1, &mut room);
        let page = match names.next() {
            Some(Ok(_)) => Page::Some,
            None => Page::End,
            Some(Err(_)) => Page::Failed,
        };
        if page != Page::Some {
            self.open.remove(at);
        }
        page
    }

    fn rest(&mut self) {
        self.open.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuse::{REQUEST_HEAD, op};

    const SECOND: Duration = Duration::from_secs(1);

    fn request(number: u64, directory: u64) -> Vec<u8> {
        let mut bytes = [(REQUEST_HEAD + 2) as u32, op::LOOKUP].map(u32::to_le_bytes).concat();
        bytes.extend([number, directory, 0, 0].map(u64::to_le_bytes).concat());
        bytes.extend(b"x\0");
        bytes
    }

    fn answer(number: u64, node: u64) -> Vec<u8> {
        let mut bytes = [144_u32, 0].map(u32::to_le_bytes).concat();
        bytes.extend([number, node, 0, 1].map(u64::to_le_bytes).concat());
        bytes.resize(144, 0);
        bytes
    }

    /// Looks for so many names in a directory, all of which are there, and says what was to be read meanwhile.
    fn look(runs: &mut Runs, directory: u64, names: u64, now: Instant) -> Vec<bool> {
        let one = |number| {
            let due = runs.asked(&request(number, directory));
            runs.answered(&answer(number, 1000 + number), now);
            due
        };
        (1..=names).filter_map(one).collect()
    }

    #[test]
    fn a_run_is_read_page_by_page_until_the_end_and_again_when_it_is_forgotten() {
        let (mut runs, now) = (Runs::default(), Instant::now());
        assert_eq!(look(&mut runs, 7, 8, now), []);
        assert_eq!(look(&mut runs, 7, 3, now), [true], "one at a time");
        runs.read(7, Page::Some, now);
        assert_eq!(look(&mut runs, 7, 3, now), [false]);
        runs.read(7, Page::End, now);
        assert_eq!(look(&mut runs, 7, 30, now + SECOND / 2), [], "it is known");
        assert_eq!(look(&mut runs, 7, 9, now + SECOND * 2), [true], "it was known for a second");
    }

    #[test]
    fn what_is_not_there_is_no_run_nor_is_a_slow_one_or_one_of_many_directories() {
        let (mut runs, now) = (Runs::default(), Instant::now());
        for number in 1..100 {
            assert_eq!(runs.asked(&request(number, 7)), None);
            // Not there; not there, and remembered so; an answer to something else.
            runs.answered(&answer(number, 1)[..ANSWER_HEAD], now);
            runs.answered(&answer(number, 0), now);
            runs.answered(&answer(number + 1000, 9), now);
        }
        for directory in 10..200 {
            assert_eq!(look(&mut runs, directory, 7, now), []);
        }
        for n in 0..100 {
            assert_eq!(look(&mut runs, 7, 1, now + SECOND * 2 * n), []);
        }
        assert!(runs.runs.len() <= RUNS);
    }

    #[test]
    fn a_large_directory_and_one_that_cannot_be_read_are_left_alone() {
        let (mut runs, now) = (Runs::default(), Instant::now());
        look(&mut runs, 7, 8, now);
        let pages = (0..10_000).filter(|_| {
            let due = !look(&mut runs, 7, 1, now).is_empty();
            runs.read(7, Page::Some, now);
            due
        });
        assert_eq!(pages.count(), PAGES as usize);
        assert_eq!(look(&mut runs, 7, 100, now + SECOND * 100), []);
        assert_eq!(look(&mut runs, 8, 9, now), [true]);
        runs.read(8, Page::Failed, now);
        assert_eq!(look(&mut runs, 8, 100, now), []);
    }

    #[test]
    fn the_reader_reads_what_is_asked_and_ends_with_whoever_asks() {
        struct Told(std::sync::mpsc::Sender<(u64, bool)>);
        impl Pages for Told {
            fn page(&mut self, directory: u64, first: bool) -> Page {
                let _ = self.0.send((directory, first));
                Page::Some
            }
            fn rest(&mut self) {
                let _ = self.0.send((0, false));
            }
        }
        let (told, reads) = std::sync::mpsc::channel();
        let runs = Arc::new(Mutex::new(Runs::default()));
        let mut ahead = Ahead::new(runs.clone(), Told(told));
        let mut look = |names: u64| {
            for number in 1..=names {
                ahead.asked(&request(number, 7));
                runs.lock().expect("runs").answered(&answer(number, 1000), Instant::now());
            }
        };
        let wait = || reads.recv_timeout(SECOND * 20).expect("something is read");
        look(9);
        assert_eq!(wait(), (7, true));
        while runs.lock().expect("runs").runs[0].read != Read::Pages(1) {
            std::thread::sleep(Duration::from_millis(1));
        }
        look(1);
        assert_eq!(wait(), (7, false));
        assert_eq!(wait(), (0, false), "after a pause what is open is closed");
        drop(ahead);
        assert!(reads.recv_timeout(SECOND * 20).is_err(), "the reader stays");
    }

    #[test]
    fn a_run_for_which_nobody_can_read_is_left_alone() {
        struct Stands(Receiver<()>);
        impl Pages for Stands {
            fn page(&mut self, _: u64, _: bool) -> Page {
                let _ = self.0.recv();
                Page::Some
            }
            fn rest(&mut self) {}
        }
        let (_stands, until) = sync_channel(1);
        let runs = Arc::new(Mutex::new(Runs::default()));
        let mut ahead = Ahead::new(runs.clone(), Stands(until));
        let mut left = 0;
        for directory in 1..50 {
            for number in 1..=9 {
                ahead.asked(&request(number, directory));
                runs.lock().expect("runs").answered(&answer(number, 1000), Instant::now());
            }
            left += u32::from(runs.lock().expect("runs").runs[0].read == Read::Enough);
        }
        assert!(left >= 40, "{left} of 49");
    }
}
