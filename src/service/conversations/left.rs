//! Answers that nobody waited for.
//!
//! How far a server came before it noticed that a client was gone is chance. So such a turn is kept and
//! can be named, but without a word no turn goes on from it: the next one goes on from the last answer
//! that was whole. That is decided when the client goes, wherever the answer is by then: still unknown
//! here, under way, or recorded.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{ConversationKey, Conversations, Turn};

/// How such a turn ends.
pub const LEFT: &str = "abort";

/// Requests that are remembered.
const MOST: usize = 1024;

/// Requests whose clients went away before a worker told of them.
#[derive(Debug, Default)]
pub struct Left(VecDeque<(ConversationKey, Arc<str>)>);

// === impl Left ===

impl Left {
    fn put(&mut self, key: &ConversationKey, rid: &Arc<str>) {
        if self.0.len() >= MOST {
            self.0.pop_front();
        }
        self.0.push_back((key.clone(), Arc::clone(rid)));
    }

    pub(super) fn take(&mut self, key: &ConversationKey, rid: &Arc<str>) -> bool {
        let its = |(other, name): &(ConversationKey, Arc<str>)| other == key && name == rid;
        let at = self.0.iter().position(its);
        at.and_then(|at| self.0.remove(at)).is_some()
    }
}

// === impl Turn ===

impl Turn {
    /// Its answer was not whole when its client went, or was told to stop.
    pub fn is_left(&self) -> bool {
        self.finish == LEFT
    }
}

// === impl Conversations ===

impl Conversations {
    /// The client of a request went away before its answer was whole.
    pub fn leave(&mut self, key: &ConversationKey, rid: &Arc<str>) {
        let Some(conversation) = self.all.get_mut(key) else {
            return self.left.put(key, rid);
        };
        let known = conversation.has(rid);
        let mut live = conversation.live.values_mut();
        if let Some(live) = live.find(|it| it.rid == *rid) {
            live.left = true;
        }
        let mut turns = conversation.turns.iter_mut().rev();
        if let Some(turn) = turns.find(|it| it.rid == *rid) {
            turn.finish = LEFT;
            self.dirty.insert(key.clone());
        }
        if !known {
            self.left.put(key, rid);
        }
    }

    /// A request of this id begins anew.
    pub fn come_back(&mut self, key: &ConversationKey, rid: &Arc<str>) {
        self.left.take(key, rid);
    }

    /// What a request under way goes on from is deleted: nothing of it is recorded.
    pub(super) fn forget_live(&mut self, key: &ConversationKey) {
        let conversation = self.all.get_mut(key);
        for live in conversation.into_iter().flat_map(|it| it.live.values_mut()) {
            // One that is a turn already is deleted, or not, as that.
            if live.turn.is_none() {
                live.forgotten = true;
                live.snapshot = None;
                live.boundary = 0;
            }
        }
    }

    /// Nothing of the request is recorded.
    pub fn is_forgotten(&self, owner: super::Owner) -> bool {
        self.request(owner).is_some_and(|live| live.forgotten)
    }
}
