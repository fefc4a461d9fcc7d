//! The log's lines on their way out. There is one for each request, and a call to the kernel for each would cost more than
//! much of the request; so they are gathered for a moment. What warns goes out at once, with all before it.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// How long a line waits for others.
const GATHERED_FOR: Duration = Duration::from_millis(50);

/// Lines that wait; more go out at once.
const MOST: usize = 64 * 1024;

/// Where lines go.
#[derive(Clone)]
pub struct Lines(Arc<Inner>);

struct Inner {
    held: Mutex<Held>,
    some: Notify,
}

struct Held {
    bytes: Vec<u8>,
    out: Box<dyn Write + Send>,
}

impl Lines {
    /// Lines that go there.
    pub fn to(out: impl Write + Send + 'static) -> Self {
        let held = Mutex::new(Held { bytes: Vec::new(), out: Box::new(out) });
        Lines(Arc::new(Inner { held, some: Notify::new() }))
    }

    /// Writes what waits. Whoever does not read our log does not stop us either: what cannot be written is let go.
    pub fn flush(&self) {
        let mut held = self.0.held.lock().unwrap_or_else(PoisonError::into_inner);
        let Held { bytes, out } = &mut *held;
        let _ = out.write_all(bytes).and_then(|()| out.flush());
        bytes.clear();
    }

    /// Writes what waits, again and again, for ever.
    pub async fn follow(self) {
        loop {
            self.0.some.notified().await;
            tokio::time::sleep(GATHERED_FOR).await;
            self.flush();
        }
    }
}

/// One event's line.
pub struct Line {
    lines: Lines,
    at_once: bool,
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut held = self.lines.0.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.bytes.extend_from_slice(bytes);
        self.at_once |= held.bytes.len() > MOST;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        match self.at_once {
            true => self.lines.flush(),
            false => self.lines.0.some.notify_one(),
        }
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { lines: self.clone(), at_once: true }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Line {
        Line { lines: self.clone(), at_once: *event.level() <= Level::WARN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Out(Arc<Mutex<Vec<u8>>>);

    impl Write for Out {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("lock").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn lines_are_gathered_in_order_and_a_warning_waits_for_nobody() {
        let out = Out::default();
        let lines = Lines::to(out.clone());
        let said = || String::from_utf8(out.0.lock().expect("lock").clone()).expect("text");
        let log = tracing_subscriber::fmt().with_writer(lines.clone()).with_ansi(false).without_time().finish();
        let _log = tracing::subscriber::set_default(log);
        tracing::info!("one");
        tracing::info!("two");
        assert_eq!(said(), "");
        tracing::warn!("three");
        let all = said();
        let places = ["one", "two", "three"].map(|word| all.find(word).expect(word));
        assert!(places.is_sorted() && all.lines().count() == 3, "{all}");
        tracing::info!("four");
        let following = tokio::spawn(lines.follow());
        let came = async {
            while !said().contains("four") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), came).await.expect("it goes out by itself");
        following.abort();
    }

    #[test]
    fn what_waits_is_bounded() {
        let out = Out::default();
        let lines = Lines::to(out.clone());
        for _ in 0..2 * MOST / 100 {
            let mut line = Line { lines: lines.clone(), at_once: false };
            line.write_all(&[b'x'; 100]).expect("write");
        }
        assert!(out.0.lock().expect("lock").len() >= MOST);
    }
}
