//! Which names a snapshot has, and how names go.

use super::{ConversationKey, Conversations, Origin, Owner, Pace, SavingRules};
use crate::types::{Millis, SnapshotId};

// === impl Conversations ===

impl Conversations {
    /// Gives a snapshot a name in a conversation. Returns what had that name before.
    pub fn set_branch(
        &mut self,
        key: &ConversationKey,
        branch: &str,
        snapshot: SnapshotId,
        now: Millis,
    ) -> Option<SnapshotId> {
        let conversation = self.all.entry(key.clone()).or_default();
        conversation.updated = conversation.updated.max(now);
        let old = conversation.branches.insert(branch.to_owned(), snapshot);
        self.name(snapshot, key);
        let old = old.filter(|old| *old != snapshot);
        if let Some(old) = old {
            self.unname(old, key);
        }
        self.dirty.insert(key.clone());
        old
    }

    /// Notes where a conversation parted from another.
    pub fn set_origin(&mut self, key: &ConversationKey, origin: Origin) {
        if let Some(conversation) = self.all.get_mut(key) {
            conversation.origin = Some(origin);
            self.dirty.insert(key.clone());
        }
    }

    /// The turn that an open request is, or will be, and whether it calls a tool.
    pub fn turn_of(&self, owner: Owner, key: &ConversationKey) -> (u32, bool) {
        let key = self.home(owner, key);
        let Some(conversation) = self.all.get(&key) else {
            return (1, false);
        };
        let live = conversation.live.get(&owner);
        let number = live.and_then(|live| live.turn);
        let number = number.unwrap_or_else(|| conversation.next_number());
        (number, live.is_some_and(|live| live.tool_call))
    }

    /// An open request calls a tool.
    pub fn calls_tool(&mut self, owner: Owner) {
        let conversation = self.open.get(&owner).and_then(|key| self.all.get_mut(key));
        if let Some(live) = conversation.and_then(|it| it.live.get_mut(&owner)) {
            live.tool_call = true;
        }
    }

    /// The open requests of this rid call a tool.
    pub fn note_tool_call(&mut self, key: &ConversationKey, rid: &str) {
        let conversation = self.all.get_mut(key);
        for live in conversation.into_iter().flat_map(|it| it.live.values_mut()) {
            live.tool_call |= *live.rid == *rid;
        }
    }

    /// The conversation's own rules of saving.
    pub fn rules(&self, key: &ConversationKey) -> Option<SavingRules> {
        self.all.get(key)?.rules
    }

    /// Gives the conversation rules of its own, or takes them away.
    pub fn set_rules(&mut self, key: &ConversationKey, rules: Option<SavingRules>, now: Millis) {
        let conversation = self.all.entry(key.clone()).or_default();
        conversation.rules = rules;
        conversation.updated = conversation.updated.max(now);
        self.dirty.insert(key.clone());
        self.drop_if_empty(key);
    }

    /// When something of the conversation was let be written.
    pub fn pace(&self, key: &ConversationKey) -> Pace {
        self.all.get(key).map(|it| it.pace).unwrap_or_default()
    }

    /// Something of the conversation is let be written.
    pub fn set_pace(&mut self, key: &ConversationKey, pace: Pace) {
        if let Some(conversation) = self.all.get_mut(key) {
            conversation.pace = pace;
        }
    }

    /// Some conversation names it.
    pub fn is_named(&self, snapshot: SnapshotId) -> bool {
        self.names.contains_key(&snapshot)
    }

    /// A branch of some conversation names it.
    pub fn is_branch(&self, snapshot: SnapshotId) -> bool {
        self.named_by(snapshot).iter().any(|key| {
            let conversation = self.all.get(key);
            conversation.is_some_and(|it| it.branches.values().any(|id| *id == snapshot))
        })
    }

    /// The conversations that name it.
    pub fn named_by(&self, snapshot: SnapshotId) -> &[ConversationKey] {
        self.names
            .get(&snapshot)
            .map_or(&[], |keys| keys.as_slice())
    }

    /// How many turns and branches name it.
    pub fn count_names(&self, snapshot: SnapshotId) -> usize {
        let named = self.named_by(snapshot).iter();
        named
            .filter_map(|key| self.all.get(key))
            .map(|it| {
                let turns = it.turns.iter().filter(|t| t.snapshot == Some(snapshot));
                let branches = it.branches.values().filter(|id| **id == snapshot);
                turns.count() + branches.count()
            })
            .sum()
    }

    /// The snapshot is gone: turns and requests fall back to `instead` (an ancestor and its
    /// boundary), branches lose it.
    pub fn lost(&mut self, snapshot: SnapshotId, instead: Option<(SnapshotId, u32)>) {
        self.lose_mark(snapshot);
        for key in self.names.swap_remove(&snapshot).unwrap_or_default() {
            let Some(conversation) = self.all.get_mut(&key) else {
                continue;
            };
            let mut turned = false;
            for turn in &mut conversation.turns {
                if turn.snapshot == Some(snapshot) {
                    turn.snapshot = instead.map(|(id, _)| id);
                    turn.boundary = instead.map_or(0, |(_, boundary)| boundary);
                    turned = true;
                }
            }
            conversation.branches.retain(|_, id| *id != snapshot);
            if let Some((id, _)) = instead.filter(|_| turned) {
                self.name(id, &key);
            }
            self.dirty.insert(key);
        }
        for (owner, key) in &self.open {
            let conversation = self.all.get_mut(key);
            let live = conversation.and_then(|it| it.live.get_mut(owner));
            if let Some(live) = live.filter(|live| live.snapshot == Some(snapshot)) {
                live.snapshot = instead.map(|(id, _)| id);
                live.boundary = instead.map_or(0, |(_, boundary)| boundary);
            }
        }
    }

    /// Deletes one turn. Returns its snapshot if no name is left for it.
    pub fn delete_turn(&mut self, key: &ConversationKey, number: u32) -> Option<SnapshotId> {
        let conversation = self.all.get_mut(key)?;
        let at = conversation
            .turns
            .iter()
            .position(|turn| turn.number == number)?;
        let latest = at + 1 == conversation.turns.len();
        let turn = conversation.turns.remove(at);
        for live in conversation
            .live
            .values_mut()
            .filter(|it| it.turn == Some(number))
        {
            live.forgotten = true;
            (live.turn, live.snapshot, live.boundary) = (None, None, 0);
        }
        if !conversation.has(&turn.rid) {
            self.forget_rid(key, &turn.rid);
        }
        self.prints.forget(key, &turn);
        self.weigh(turn.weight(), 0);
        self.dirty.insert(key.clone());
        if latest {
            self.forget_live(key);
        }
        if let Some(id) = turn.snapshot {
            self.unname(id, key);
        }
        self.drop_if_empty(key);
        turn.snapshot.filter(|id| !self.is_named(*id))
    }

    /// Deletes one branch. Returns its snapshot if no name is left for it.
    pub fn delete_branch(&mut self, key: &ConversationKey, branch: &str) -> Option<SnapshotId> {
        let id = self.all.get_mut(key)?.branches.remove(branch)?;
        self.dirty.insert(key.clone());
        self.unname(id, key);
        self.drop_if_empty(key);
        Some(id).filter(|id| !self.is_named(*id))
    }

    /// Deletes all turns and branches; requests under way stay. Returns how many names went, and
    /// the snapshots that have none left.
    pub fn delete_all(&mut self, key: &ConversationKey) -> (usize, Vec<SnapshotId>) {
        let Some(conversation) = self.all.get_mut(key) else {
            return (0, Vec::new());
        };
        let ids = conversation.snapshots();
        let names = conversation.turns.len() + conversation.branches.len();
        let turns = std::mem::take(&mut conversation.turns);
        conversation.branches.clear();
        conversation.rules = None;
        for live in conversation.live.values_mut() {
            live.forgotten = true;
            (live.turn, live.snapshot, live.boundary) = (None, None, 0);
        }
        for turn in &turns {
            self.prints.forget(key, turn);
            self.weigh(turn.weight(), 0);
        }
        let mut rids: Vec<_> = turns.into_iter().map(|turn| turn.rid).collect();
        let left = self.all.get(key);
        rids.retain(|rid| left.is_none_or(|it| !it.has(rid)));
        for rid in rids {
            self.forget_rid(key, &rid);
        }
        for id in &ids {
            self.unname(*id, key);
        }
        self.dirty.insert(key.clone());
        self.drop_if_empty(key);
        let gone = ids.into_iter().filter(|id| !self.is_named(*id));
        (names, gone.collect())
    }
}
