//! The newest states of conversations that are not written: kept in RAM for a while.
//!
//! Bounded: together they hold at most so many bytes, then those that came first are let go. What is
//! let go may leave RAM as soon as something else needs the room.

use std::collections::{HashMap, VecDeque};

use super::conversations::ConversationKey;
use crate::types::{Millis, SnapshotId};

/// One of them.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Held {
    /// The state.
    pub snapshot: SnapshotId,
    /// It is kept until then.
    pub until: Millis,
    /// What it takes of RAM.
    pub bytes: u64,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Unsaved {
    newest: HashMap<ConversationKey, Held>,
    /// The order in which they came; some may have gone or been replaced.
    order: VecDeque<(ConversationKey, SnapshotId)>,
    bytes: u64,
}

// === impl Unsaved ===

impl Unsaved {
    /// A new state of a conversation takes the place of its last one. Returns what is to be let go;
    /// the new one itself if it alone is more than `most` bytes.
    pub fn hold(&mut self, key: &ConversationKey, new: Held, most: u64, now: Millis) -> Vec<Held> {
        let mut gone = Vec::new();
        gone.extend(self.take(key).filter(|old| old.snapshot != new.snapshot));
        self.bytes = self.bytes.saturating_add(new.bytes);
        self.newest.insert(key.clone(), new);
        self.order.push_back((key.clone(), new.snapshot));
        while let Some((key, snapshot)) = self.order.front() {
            let key = key.clone();
            let its = self.newest.get(&key);
            let its = its.filter(|held| held.snapshot == *snapshot).copied();
            match its {
                None => {}
                Some(held) if held.until <= now || self.bytes > most => {
                    self.take(&key);
                    gone.push(held);
                }
                Some(_) => break,
            }
            self.order.pop_front();
        }
        gone
    }

    /// The conversation's is written, or gone.
    pub fn take(&mut self, key: &ConversationKey) -> Option<Held> {
        let held = self.newest.remove(key)?;
        self.bytes = self.bytes.saturating_sub(held.bytes);
        Some(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(until: u64, bytes: u64) -> Held {
        Held {
            snapshot: SnapshotId::new(),
            until: Millis(until),
            bytes,
        }
    }

    fn key(name: &str) -> ConversationKey {
        ConversationKey::new(None, name)
    }

    #[test]
    fn only_the_newest_of_a_conversation_is_held() {
        let mut it = Unsaved::default();
        let (a, b, c) = (held(100, 10), held(100, 10), held(100, 10));
        assert_eq!(it.hold(&key("x"), a, 100, Millis(1)), []);
        assert_eq!(it.hold(&key("y"), b, 100, Millis(1)), []);
        assert_eq!(it.hold(&key("x"), c, 100, Millis(1)), [a]);
        // The same again is no other.
        assert_eq!(it.hold(&key("x"), c, 100, Millis(2)), []);
        assert_eq!((it.bytes, it.newest.len()), (20, 2));
        assert_eq!(it.take(&key("x")), Some(c));
        assert_eq!(it.take(&key("x")), None);
        assert_eq!(it.bytes, 10);
    }

    #[test]
    fn those_that_came_first_go_when_there_are_too_many_or_their_time_is_over() {
        let mut it = Unsaved::default();
        let (a, b, c) = (held(50, 40), held(90, 40), held(90, 40));
        it.hold(&key("a"), a, 100, Millis(1));
        it.hold(&key("b"), b, 100, Millis(1));
        assert_eq!(it.hold(&key("c"), c, 100, Millis(1)), [a]);
        let d = held(90, 1000);
        assert_eq!(it.hold(&key("d"), d, 100, Millis(2)), [b, c, d]);
        assert_eq!((it.bytes, it.newest.len(), it.order.len()), (0, 0, 0));
        it.hold(&key("a"), a, 100, Millis(3));
        assert_eq!(it.hold(&key("b"), b, 100, Millis(60)), [a]);
    }
}
