//! What the daemon has to say to a worker, in order, while the channel may be full.
//!
//! Answers about pieces that follow each other become one, as long as they wait here.

use std::collections::VecDeque;

use crate::proto::channel::msg::Down;
use crate::proto::channel::run::Run;
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
    /// Says something with the next flush, or as soon as there is room after it.
    pub fn say(&mut self, message: Down) -> Result<(), OutboxError> {
        if let Some(last) = self.waiting.back_mut()
            && join(last, &message)
        {
            return Ok(());
        }
        if self.waiting.len() >= LIMIT {
            return Err(OutboxError::NotRead);
        }
        self.waiting.push_back(message);
        Ok(())
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

/// Makes one answer of two, if the second one is about the pieces that follow.
fn join(last: &mut Down, next: &Down) -> bool {
    let (mut run, next, count) = match (last, next) {
        (Down::Filled(last), Down::Filled(next))
            if (last.lease, last.status) == (next.lease, next.status) =>
        {
            (Run::from(&*last), Run::from(next), &mut last.count)
        }
        (Down::Drained(last), Down::Drained(next))
            if (last.save, last.status) == (next.save, next.status) =>
        {
            (Run::from(&*last), Run::from(next), &mut last.count)
        }
        _ => return false,
    };
    let joined = run.join(next);
    *count = run.count;
    joined
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::shm::SharedMap;
    use crate::proto::channel::layout::{DeclineReason, Piece, Status};
    use crate::proto::channel::msg::{Decline, Drained, Filled};
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
            outbox.say(decline(save)).unwrap();
            outbox.flush(&mut daemon.tx).unwrap();
        }
        assert!(!outbox.waiting.is_empty());
        for save in 0..1000 {
            let message = worker.rx.pop().unwrap().unwrap();
            assert_eq!(message, decline(save));
            outbox.flush(&mut daemon.tx).unwrap();
        }
        assert!(outbox.waiting.is_empty());
        let refused = (0..2 * LIMIT as u64)
            .find_map(|save| outbox.say(decline(save)).err())
            .unwrap();
        assert!(matches!(refused, OutboxError::NotRead), "{refused}");
    }
    #[test]
    fn answers_about_pieces_that_follow_each_other_are_one() {
        let mut outbox = Outbox::default();
        let filled = |lease, piece, index, status| {
            Down::from(Filled {
                lease,
                piece,
                index,
                count: 1,
                status,
            })
        };
        let drained = |save, index, status| {
            Down::from(Drained {
                save,
                piece: Piece::Kv,
                index,
                count: 1,
                status,
            })
        };
        let ok = Status::Ok;
        for message in [
            filled(1, Piece::State, 0, ok),
            filled(1, Piece::Kv, 0, ok),
            filled(1, Piece::Kv, 1, ok),
            filled(1, Piece::Kv, 2, Status::Lost),
            filled(1, Piece::Kv, 3, Status::Lost),
            filled(2, Piece::Kv, 4, Status::Lost),
            filled(2, Piece::Kv, 6, Status::Lost),
            drained(2, 7, ok),
            drained(2, 8, ok),
            drained(2, 8, ok),
        ] {
            outbox.say(message).unwrap();
        }
        let counts = outbox.waiting.iter().map(|message| match message {
            Down::Filled(filled) => (filled.index, filled.count),
            Down::Drained(drained) => (drained.index, drained.count),
            other => panic!("{other:?}"),
        });
        let runs = [(0, 1), (0, 2), (2, 2), (4, 1), (6, 1), (7, 2), (8, 1)];
        assert_eq!(counts.collect::<Vec<_>>(), runs);
    }
}
