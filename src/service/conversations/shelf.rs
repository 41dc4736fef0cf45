//! What was said in conversations, and what of it stays in memory.
//!
//! Tails and messages are the only parts of a conversation that grow with what is said. Those of
//! conversations that were longest unchanged are *shelved*: left to their records on disk, and put
//! back when somebody asks or when the record has to be written again. Without a disk they are
//! forgotten.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{ConversationKey, Conversations, Tail};
use crate::store::ConversationRef;

/// Bytes of tails and messages that stay in memory.
pub const IN_RAM: usize = 64 << 20;

/// Messages of turns that are not over yet, in bytes.
const EARLY_BYTES: usize = 16 << 20;

/// Longest messages of one turn, in bytes.
pub const MAX_SAID: usize = 2 << 20;

/// What was said in a turn: a JSON list of messages.
pub type Said = Arc<str>;

/// Messages that came before their turn's end.
#[derive(Debug, Default)]
pub struct Early {
    waiting: VecDeque<(ConversationKey, Arc<str>, Said)>,
    bytes: usize,
}

// === impl Early ===

impl Early {
    fn put(&mut self, key: &ConversationKey, rid: &Arc<str>, said: Said) {
        self.take(key, rid);
        self.bytes += said.len();
        self.waiting.push_back((key.clone(), Arc::clone(rid), said));
        while self.bytes > EARLY_BYTES
            && let Some((_, _, oldest)) = self.waiting.pop_front()
        {
            self.bytes -= oldest.len();
        }
    }

    pub(super) fn take(&mut self, key: &ConversationKey, rid: &Arc<str>) -> Option<Said> {
        let mut all = self.waiting.iter();
        let at = all.position(|(other, its, _)| other == key && its == rid)?;
        let (_, _, said) = self.waiting.remove(at)?;
        self.bytes -= said.len();
        Some(said)
    }
}

// === impl Conversations ===

impl Conversations {
    /// Messages of the turn that the request became, or becomes.
    pub fn note(&mut self, key: &ConversationKey, rid: &Arc<str>, said: Said) {
        let conversation = self.all.get_mut(key);
        let turns = conversation.into_iter().flat_map(|it| &mut it.turns);
        let Some(turn) = turns.rev().find(|turn| turn.rid == *rid) else {
            self.said.put(key, rid, said);
            return;
        };
        let before = turn.weight();
        turn.said = Some(said);
        let after = turn.weight();
        self.weigh(before, after);
        self.dirty.insert(key.clone());
    }

    /// Leaves what was said to the disk, or forgets it, until at most `most` bytes are in memory.
    /// `kept`: it is on disk.
    pub fn shelve(&mut self, most: usize, kept: bool) {
        if self.weight <= most {
            return;
        }
        let idle = |key: &ConversationKey, it: &super::Conversation| {
            !it.shelved && it.live.is_empty() && (!kept || !self.dirty.contains(key))
        };
        let all = self.all.iter().filter(|(key, it)| idle(key, it));
        let mut all: Vec<_> = all.map(|(key, it)| (it.updated, key.clone())).collect();
        all.sort_unstable();
        for (_, key) in all {
            // A little below, so that not every turn begins it anew.
            if self.weight <= most - most / 8 {
                return;
            }
            let Some(conversation) = self.all.get_mut(&key) else {
                continue;
            };
            let mut weight = 0;
            for turn in &mut conversation.turns {
                weight += turn.weight();
                (turn.tail, turn.said) = (None, None);
            }
            conversation.shelved = kept && weight > 0;
            self.weigh(weight, 0);
        }
    }

    /// What was said is on disk alone.
    pub fn is_shelved(&self, key: &ConversationKey) -> bool {
        self.all.get(key).is_some_and(|it| it.shelved)
    }

    /// What was said comes back from disk; `None`: the disk has it no longer.
    pub fn unshelve(&mut self, key: &ConversationKey, stored: Option<ConversationRef>) {
        let Some(conversation) = self.all.get_mut(key).filter(|it| it.shelved) else {
            return;
        };
        conversation.shelved = false;
        let (mut before, mut after) = (0, 0);
        for stored in stored.map(|it| it.turns).unwrap_or_default() {
            let Some(turn) = conversation.turn_mut(stored.turn) else {
                continue;
            };
            if *turn.rid != *stored.rid || turn.total_tokens != stored.total_tokens {
                continue;
            }
            before += turn.weight();
            if let Some(rest) = stored.tail.map(|tail| Tail::new(stored.boundary, tail)) {
                turn.tail = Some(match turn.tail.take() {
                    Some(head) => head.followed_by(rest),
                    None => rest,
                });
                turn.shrink_tail();
            }
            turn.said = turn.said.take().or(stored.said);
            after += turn.weight();
        }
        self.weigh(before, after);
    }
}
