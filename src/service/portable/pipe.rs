//! Between a thread that blocks and a connection: neither waits for the other for ever.

use std::io::{self, Read};

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::STALL;

/// Chunks of a body, or why there are no more.
pub(super) type Body = mpsc::Receiver<io::Result<Bytes>>;

/// A body, for a thread that blocks.
#[derive(Debug)]
pub(super) struct Reader {
    body: Body,
    runtime: Handle,
    rest: Bytes,
}

/// Nobody reads any more.
#[derive(Debug)]
pub(super) struct Closed;

// === impl Reader ===

impl Reader {
    pub(super) fn new(body: Body, runtime: Handle) -> Self {
        Self {
            body,
            runtime,
            rest: Bytes::new(),
        }
    }
}

impl Read for Reader {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            let next = async { tokio::time::timeout(STALL, self.body.recv()).await };
            match self.runtime.block_on(next) {
                Ok(Some(chunk)) => self.rest = chunk?,
                Ok(None) => return Ok(0),
                Err(_) => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
        let now = self.rest.split_to(room.len().min(self.rest.len()));
        if let Some(room) = room.get_mut(..now.len()) {
            room.copy_from_slice(&now);
        }
        Ok(now.len())
    }
}

/// Sends from a thread that blocks.
pub(super) fn send<T>(runtime: &Handle, to: &mpsc::Sender<T>, thing: T) -> Result<(), Closed> {
    let sent = async { tokio::time::timeout(STALL, to.send(thing)).await };
    match runtime.block_on(sent) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(Closed),
    }
}
