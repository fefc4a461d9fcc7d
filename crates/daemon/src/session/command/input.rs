//! Feeding a command: input that came with it, and input that is sent later, each byte once.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pepo_sandbox::guest::{self, InputEnd, Output};

use super::{Command, Commands};
use crate::session::{Error, Session};

impl Commands {
    /// Sends input that begins at `offset` (where it stands, if that is absent), and then ends it if asked so.
    ///
    /// # Errors
    /// A hole before `offset`, a command that takes no input, and what a guest can answer.
    pub async fn feed(
        &self,
        session: &Session,
        command: &Arc<Command>,
        offset: Option<u64>,
        mut body: impl futures_util::Stream<Item = Result<Bytes, Error>> + Unpin,
        eof: bool,
    ) -> Result<pepo_api::StdinAnswer, Error> {
        use futures_util::StreamExt as _;
        let _one = command.input.lock().await;
        let serving = session.serving_still(command.activation, Duration::from_secs(10)).await?;
        let end = if eof { InputEnd::Close } else { InputEnd::Keep };
        let mut joined = serving.guest.input(command.op(), end).await?;
        let Some(mut input) = joined.take_input() else {
            return Ok(pepo_api::StdinAnswer { next_offset: 0, open: false });
        };
        let mut at = offset.unwrap_or(input.next());
        let mut next = input.next();
        let mut open = input.is_open();
        while open && let Some(bytes) = body.next().await {
            let bytes = bytes?;
            let length = bytes.len() as u64;
            match input.send(at, bytes).await {
                Ok(()) => at += length,
                Err(guest::Error::Ended | guest::Error::Lost(_)) => open = false,
                Err(error) => return Err(error.into()),
            }
            next = input.next();
        }
        if open {
            match input.eof().await {
                Ok(()) => open = !eof,
                Err(guest::Error::Ended | guest::Error::Lost(_)) => open = false,
                Err(error) => return Err(error.into()),
            }
        }
        // Only then has the guest taken all of it.
        while let Some(output) = joined.next().await {
            match output {
                Ok(Output::Input { next: stands, open: takes }) => (next, open) = (next.max(stands), open && takes),
                Ok(Output::Left) | Err(guest::Error::Lost(_)) => break,
                Ok(Output::End(_)) => {
                    open = false;
                    break;
                }
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(pepo_api::StdinAnswer { next_offset: next, open })
    }
}

/// Gives a command the input that came with it.
pub(super) async fn feed(session: Session, command: Arc<Command>, mut input: guest::Input, bytes: Bytes, more: bool) {
    let _one = command.input.lock().await;
    let sent = async {
        input.send(0, bytes.clone()).await?;
        if more { Ok(()) } else { input.eof().await }
    };
    if sent.await.is_ok() || command.is_over() {
        return;
    }
    // The stream went with its caller; the input goes on by a stream of its own.
    drop(_one);
    let body = futures_util::stream::iter([Ok(bytes)]);
    if let Err(error) = session.commands().feed(&session, &command, Some(0), body, !more).await {
        tracing::debug!(command = %command.id, %error, "input was cut short");
    }
}
