//! The relay's side of its control stream: one question, one answer; pepod may come back as another process.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::codec::{Framed, LinesCodec};

use super::{Barred, By, CONNECTIONS, MESSAGE, Verdict, Word};
use crate::net::HostName;

/// How long a connection waits for pepod: it may be starting again, or asking upstream.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Who can be asked.
#[derive(Default)]
pub struct Control {
    out: RefCell<Option<mpsc::Sender<Word>>>,
    waiting: RefCell<HashMap<u32, oneshot::Sender<Result<Ipv4Addr, Barred>>>>,
    next: Cell<u32>,
    here: Notify,
    again: Notify,
}

impl Control {
    /// Takes whoever connects: the newest is pepod, the one before is gone or will be.
    pub async fn listen(self: Rc<Self>, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (out, queue) = mpsc::channel(CONNECTIONS);
                    *self.out.borrow_mut() = Some(out);
                    // Whoever waits for an answer of the one before asks again by its deadline, or is told.
                    self.waiting.borrow_mut().clear();
                    self.here.notify_waiters();
                    tokio::task::spawn_local(Rc::clone(&self).talk(stream, queue));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    async fn talk(self: Rc<Self>, stream: UnixStream, mut queue: mpsc::Receiver<Word>) {
        let (mut to, mut from) = Framed::new(stream, LinesCodec::new_with_max_length(MESSAGE)).split::<String>();
        loop {
            tokio::select! {
                word = queue.recv() => {
                    // Replaced by another.
                    let Some(word) = word else { return };
                    let Ok(line) = serde_json::to_string(&word) else { continue };
                    if to.send(line).await.is_err() {
                        return;
                    }
                }
                line = from.next() => {
                    let Some(Ok(line)) = line else { return };
                    let (seq, answer) = match serde_json::from_str(&line) {
                        Ok(Verdict::Go { seq, address }) => (seq, Ok(address)),
                        Ok(Verdict::No { seq, why }) => (seq, Err(why)),
                        Ok(Verdict::Again) => {
                            self.again.notify_waiters();
                            continue;
                        }
                        Err(_) => return,
                    };
                    let waiting = self.waiting.borrow_mut().remove(&seq);
                    waiting.map(|waiting| waiting.send(answer));
                }
            }
        }
    }

    fn sender(&self) -> Option<mpsc::Sender<Word>> {
        self.out.borrow().as_ref().filter(|out| !out.is_closed()).cloned()
    }

    /// Asks where a connection may go.
    pub async fn ask(&self, name: &HostName, to: Ipv4Addr, port: u16, by: By) -> Result<Ipv4Addr, Barred> {
        let asked = async {
            loop {
                // Before looking, so that one who comes meanwhile is not missed.
                let here = self.here.notified();
                let Some(out) = self.sender() else {
                    here.await;
                    continue;
                };
                let seq = self.next.get();
                self.next.set(seq.wrapping_add(1));
                let (answer, waiting) = oneshot::channel();
                self.waiting.borrow_mut().insert(seq, answer);
                let _row = Row(self, seq);
                if out.send(Word::Ask { seq, name: name.clone(), to, port, by }).await.is_err() {
                    continue;
                }
                match waiting.await {
                    Ok(answer) => return answer,
                    // Another pepod came: it is asked.
                    Err(_) => continue,
                }
            }
        };
        tokio::time::timeout(ANSWER_WITHIN, asked).await.unwrap_or(Err(Barred::Away))
    }

    /// Returns when what was allowed has to be asked again.
    pub async fn again(&self) {
        self.again.notified().await;
    }

    /// Tells what nobody waits for, if there is room.
    pub fn tell(&self, word: Word) {
        if let Some(out) = self.sender() {
            let _ = out.try_send(word);
        }
    }
}

/// A question that is forgotten with whoever asked it.
struct Row<'a>(&'a Control, u32);

impl Drop for Row<'_> {
    fn drop(&mut self) {
        self.0.waiting.borrow_mut().remove(&self.1);
    }
}
