//! What the daemon has to say to a worker, in order, while the channel may be full.

use std::collections::VecDeque;

use crate::proto::channel::msg::Down;
use crate::proto::channel::{Broken, PushError, Writer};

/// Messages that may wait. Each answers something that the worker said, so a worker that lets so
/// many wait does not read at all.
const LIMIT: usize = 1 << 16;

/// Messages that found no room yet.
#[derive(Debug, Default)]
pub struct Outbox {
    waiting: VecDeque<Down>,
}

/// Why nothing more can be said.
#[derive(Debug, thiserror::Error)]
pub enum OutboxError {
    /// The worker does not read.
    #[error("{LIMIT} messages wait to be read")]
    NotRead,
    /// A message that no channel of this size takes.
    #[error("a {message} of {bytes} bytes is too large for the channel")]
    TooLarge {
        /// Its name.
        message: &'static str,
        /// Its size.
        bytes: u64,
    },
    /// The worker breaks the protocol.
    #[error(transparent)]
    Broken(#[from] Broken),
}

// === impl Outbox ===

impl Outbox {
    /// Says something now, or as soon as there is room.
    pub fn say(&mut self, tx: &mut Writer<Down>, message: Down) -> Result<(), OutboxError> {
        if self.waiting.len() >= LIMIT {
            return Err(OutboxError::NotRead);
        }
        self.waiting.push_back(message);
        self.flush(tx)
    }

    /// Says what waits, as far as there is room.
    pub fn flush(&mut self, tx: &mut Writer<Down>) -> Result<(), OutboxError> {
        while let Some(message) = self.waiting.front() {
            match tx.push(message) {
                Ok(()) => {
                    self.waiting.pop_front();
                }
                Err(PushError::Full) => return Ok(()),
                Err(PushError::TooLarge(bytes)) => {
                    return Err(OutboxError::TooLarge {
                        message: message.name(),
                        bytes,
                    });
                }
                Err(PushError::Broken(broken)) => return Err(broken.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::shm::SharedMap;
    use crate::proto::channel::layout::DeclineReason;
    use crate::proto::channel::msg::Decline;
    use crate::proto::channel::{Capacities, DaemonEnd, WorkerEnd};

    #[test]
    fn order_is_kept_over_a_full_channel_and_the_wait_is_bounded() {
        let capacities = Capacities {
            up: 4096,
            down: 4096,
        };
        let map = Arc::new(SharedMap::anonymous(capacities.bytes()).unwrap());
        let mut daemon = DaemonEnd::create(&map, capacities, [1; 16], [2; 16]).unwrap();
        let mut worker = WorkerEnd::open(&map).unwrap();
        let mut outbox = Outbox::default();
        let decline = |save| {
            Down::from(Decline {
                save,
                reason: DeclineReason::NoRoom,
            })
        };
        for save in 0..1000 {
            outbox.say(&mut daemon.tx, decline(save)).unwrap();
        }
        assert!(!outbox.waiting.is_empty());
        for save in 0..1000 {
            let message = worker.rx.pop().unwrap().unwrap();
            assert_eq!(message, decline(save));
            outbox.flush(&mut daemon.tx).unwrap();
        }
        assert!(outbox.waiting.is_empty());
        let refused = (0..2 * LIMIT as u64)
            .find_map(|save| outbox.say(&mut daemon.tx, decline(save)).err())
            .unwrap();
        assert!(matches!(refused, OutboxError::NotRead), "{refused}");
    }
}
