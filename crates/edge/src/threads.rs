//! The threads that serve connections.
//!
//! Each has a runtime of its own, and whatever serves a connection stays on one thread: its requests, their way to pepod,
//! their timers. Where threads share a runtime, every other request wakes one that has nothing to do for it, which costs more
//! than reading the request and passing it on. The price: what keeps a thread (a signature takes well below a millisecond)
//! keeps the connections on it too; so a connection goes to the thread that has the fewest.

use std::io;
use std::sync::Arc;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// The threads. Dropping them cuts what they serve.
pub struct Threads(Vec<Thread>);

struct Thread {
    runtime: Handle,
    /// One is here, the others are with the connections.
    count: Arc<()>,
    _end: oneshot::Sender<()>,
}

/// A connection counts on its thread as long as it has this.
pub struct Counted {
    _count: Arc<()>,
}

impl Threads {
    /// Starts so many, one at least.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start(many: usize) -> io::Result<Self> {
        (0..many.max(1)).map(|_| Thread::start()).collect::<io::Result<_>>().map(Threads)
    }

    /// Serves a connection on the thread that has the fewest.
    pub fn serve<F: Future<Output = ()> + Send + 'static>(&self, connection: impl FnOnce(Counted) -> F) {
        if let Some(thread) = self.0.iter().min_by_key(|thread| Arc::strong_count(&thread.count)) {
            thread.runtime.spawn(connection(Counted { _count: thread.count.clone() }));
        }
    }
}

impl Thread {
    fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel::<()>();
        let serve = move || {
            let _ = runtime.block_on(ended);
        };
        std::thread::Builder::new().name("pepo-edge".into()).spawn(serve)?;
        Ok(Thread { runtime: handle, count: Arc::default(), _end: end })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Mutex;
    use std::thread::ThreadId;
    use std::time::Duration;

    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn connections_are_spread_and_end_with_their_threads() {
        let threads = Threads::start(3).expect("threads");
        let (on, leave) = (Arc::new(Mutex::new(HashMap::<ThreadId, usize>::new())), Arc::new(Notify::new()));
        let serve = |stays: bool| {
            let (on, leave) = (on.clone(), leave.clone());
            threads.serve(move |counted| async move {
                *on.lock().expect("lock").entry(std::thread::current().id()).or_default() += 1;
                if stays {
                    std::future::pending::<()>().await;
                }
                leave.notified().await;
                drop(counted);
            });
        };
        let until = async |all: usize| {
            let have = || on.lock().expect("lock").values().sum::<usize>() == all;
            while !have() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        for stays in [false, true, true, false, true, true] {
            serve(stays);
        }
        until(6).await;
        let mut each: Vec<usize> = on.lock().expect("lock").values().copied().collect();
        assert_eq!(each, [2, 2, 2]);
        // The first and the fourth share a thread: when they have left it has none, and the next two are its.
        leave.notify_waiters();
        while threads.0.iter().all(|thread| Arc::strong_count(&thread.count) > 1) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        serve(true);
        serve(true);
        until(8).await;
        each = on.lock().expect("lock").values().copied().collect();
        each.sort_unstable();
        assert_eq!(each, [2, 2, 4]);
        drop(threads);
        while Arc::strong_count(&on) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
