//! Conversations on disk: what is written of them, and how they come back.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::core::{Core, Record};
use super::{ConversationKey, Conversations, Turn};
use crate::index::Pin;
use crate::proto::channel::layout::Finish;
use crate::store::{ConversationRef, TurnRef};
use crate::types::SnapshotId;
use crate::util::id_map::IdMap;

/// Turns that are written of one conversation: the last so many.
const MAX_TURNS: usize = 50_000;

/// Branches that one conversation may have.
pub const MAX_BRANCHES: usize = 4096;

// === impl Core ===

impl Core {
    /// A conversation as it is written down: it names durable snapshots only, so a turn whose own
    /// snapshot is not durable yet names the nearest ancestor that is. `None`: nothing durable
    /// bears its name.
    pub fn stored(&self, key: &ConversationKey) -> Option<ConversationRef> {
        let conversation = self.conversations.get(key)?;
        // The way up is walked only for the few that are not durable yet.
        let durable = |(id, boundary): (SnapshotId, u32)| match self.is_durable(&id) {
            true => Some((id, boundary)),
            false => self.ancestor(&id, Self::is_durable),
        };
        let skip = conversation.turns.len().saturating_sub(MAX_TURNS);
        let turns = conversation.turns.iter().skip(skip).map(|turn| {
            let found = turn
                .snapshot
                .map(|id| (id, turn.boundary))
                .and_then(durable);
            let found = found.filter(|(_, boundary)| *boundary <= turn.total_tokens);
            TurnRef {
                turn: turn.number,
                snapshot: found.map(|(id, _)| id),
                boundary: found.map_or(0, |(_, boundary)| boundary),
                total_tokens: turn.total_tokens,
                rid: turn.rid.to_string(),
                finished: turn.finished,
                finish: turn.finish.to_owned(),
            }
        });
        let turns: Vec<TurnRef> = turns.collect();
        let branches = conversation
            .branches
            .iter()
            .filter(|(_, id)| self.is_durable(id));
        let branches: BTreeMap<String, SnapshotId> =
            branches.map(|(name, id)| (name.clone(), *id)).collect();
        if branches.is_empty() && turns.iter().all(|turn| turn.snapshot.is_none()) {
            return None;
        }
        let tenant = key.tenant.as_deref().map(str::to_owned);
        let mut stored = ConversationRef::new(tenant, key.name.to_string(), conversation.updated);
        stored.turns = turns;
        stored.branches = branches;
        Some(stored)
    }

    /// A conversation comes back. Snapshots that did not are forgotten.
    pub fn recall(&mut self, stored: ConversationRef) {
        let mut stored = stored;
        let turns = std::mem::take(&mut stored.turns);
        let Self {
            conversations,
            records,
            ..
        } = self;
        let key = conversations.recall(&stored, turns, |id| records.contains_key(id));
        for turn in conversations.get(&key).map_or(&[][..], |it| &it.turns) {
            name_record(records, &key, turn);
        }
        self.name_branches(&stored);
    }

    /// Every record learns the conversation and the request that it belongs to; names of snapshots
    /// that did not come back are forgotten.
    pub fn name_records(&mut self) {
        let Self {
            conversations,
            records,
            ..
        } = self;
        let mut lost = Vec::new();
        for (key, conversation) in conversations.iter() {
            for turn in &conversation.turns {
                if !name_record(records, key, turn) {
                    lost.extend(turn.snapshot);
                }
            }
        }
        for id in lost {
            conversations.lost(id, None);
        }
        // What was just read need not be written.
        conversations.take_dirty();
    }

    /// The branches of a conversation come back.
    pub fn name_branches(&mut self, stored: &ConversationRef) {
        let key = ConversationKey::new(stored.tenant.as_deref(), &stored.conversation);
        for (name, id) in &stored.branches {
            if self.index.pin(id, Pin::Named) {
                self.conversations
                    .set_branch(&key, name, *id, stored.updated);
            }
        }
        self.conversations.take_dirty();
    }
}

// === impl Conversations ===

impl Conversations {
    /// Makes room for the turns of so many snapshots.
    pub fn reserve(&mut self, snapshots: usize) {
        self.names.reserve(snapshots);
        self.rids.reserve(snapshots);
    }

    /// A conversation comes back, without its branches. Snapshots that are not `known` are
    /// forgotten.
    pub fn recall(
        &mut self,
        stored: &ConversationRef,
        turns: Vec<TurnRef>,
        known: impl Fn(&SnapshotId) -> bool,
    ) -> ConversationKey {
        let key = ConversationKey::new(stored.tenant.as_deref(), &stored.conversation);
        for turn in turns {
            let snapshot = turn.snapshot.filter(&known);
            let turn = Turn {
                number: turn.turn,
                snapshot,
                boundary: snapshot.map_or(0, |_| turn.boundary),
                total_tokens: turn.total_tokens,
                rid: Arc::from(turn.rid),
                finished: turn.finished,
                finish: finish_name(&turn.finish),
            };
            self.put_turn(&key, turn);
        }
        // What was just read need not be written.
        self.dirty.remove(&key);
        key
    }
}

/// A turn's snapshot learns whose it is; whether it is known, if there is one.
fn name_record(
    records: &mut IdMap<SnapshotId, Record>,
    key: &ConversationKey,
    turn: &Turn,
) -> bool {
    let Some(id) = turn.snapshot else {
        return true;
    };
    let Some(record) = records.get_mut(&id) else {
        return false;
    };
    record.conversation.get_or_insert_with(|| key.clone());
    record.rid.get_or_insert_with(|| Arc::clone(&turn.rid));
    true
}

/// The name as the wire has it; `error` for one that it does not have.
fn finish_name(name: &str) -> &'static str {
    let known = Finish::ALL
        .into_iter()
        .find(|finish| finish.as_str() == name);
    known.unwrap_or(Finish::Error).as_str()
}
