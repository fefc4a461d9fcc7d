//! A stream that becomes a guest's file system: asked for here, served by somebody else.

use std::os::fd::OwnedFd;

use pepo_proto::{Keep, Operation, Share};

use super::{Error, Guest, Leaving, new_op};

impl Guest {
    /// Has the guest mount a tree of the host's. What comes back is the stream on which its kernel asks for the tree's files
    /// as soon as it hears the first word there; it is not this guest's any more, and does not count among its streams.
    ///
    /// # Errors
    /// [`Error::Failed`]: the guest did not mount it.
    pub async fn share(&self, share: Share) -> Result<OwnedFd, Error> {
        let mut talk = self.open(new_op(), Operation::Share(share)).await?;
        if talk.reader.has_more() {
            return Err(Error::Protocol(pepo_proto::Error::Order("a word before it was spoken to")));
        }
        let stream = talk.reader.wire().hand_over().map_err(|error| Error::Lost(Some(error)))?;
        talk.leave.leaving = Leaving::Handed;
        Ok(stream)
    }

    /// Has the guest keep some paths in a mounted tree.
    ///
    /// # Errors
    /// [`Error::Failed`]: it could not.
    pub async fn keep(&self, keep: Keep) -> Result<(), Error> {
        self.plain(Operation::Keep(keep)).await
    }
}
