//! Pins and labels that people give to snapshots.
//!
//! A mark belongs to the conversation of its snapshot, whose record keeps it. It is no name: whoever
//! deletes the turn deletes the snapshot with its mark. A pin keeps it from eviction and retention.

use super::{ConversationKey, Conversations};
use crate::types::SnapshotId;

/// What somebody noted of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Mark {
    /// It is kept from eviction.
    pub pinned: bool,
    /// For people.
    pub label: Option<Box<str>>,
}

// === impl Mark ===

impl Mark {
    /// It says nothing.
    pub fn is_empty(&self) -> bool {
        !self.pinned && self.label.is_none()
    }
}

// === impl Conversations ===

impl Conversations {
    /// What is noted of the snapshot.
    pub fn mark_of(&self, snapshot: SnapshotId) -> Option<&Mark> {
        let key = self.marked.get(&snapshot)?;
        self.all.get(key)?.marks.get(&snapshot)
    }

    /// Where that is noted.
    pub fn marked_in(&self, snapshot: SnapshotId) -> Option<&ConversationKey> {
        self.marked.get(&snapshot)
    }

    /// Notes it, in `key` unless it is noted elsewhere. Returns what was noted before, and where it is
    /// now.
    pub fn set_mark(
        &mut self,
        key: &ConversationKey,
        snapshot: SnapshotId,
        mark: Mark,
    ) -> (Mark, ConversationKey) {
        let key = self.marked.get(&snapshot).unwrap_or(key).clone();
        let marks = &mut self.all.entry(key.clone()).or_default().marks;
        let before = match mark.is_empty() {
            true => marks.remove(&snapshot),
            false => marks.insert(snapshot, mark.clone()),
        };
        match mark.is_empty() {
            true => self.marked.remove(&snapshot),
            false => self.marked.insert(snapshot, key.clone()),
        };
        self.dirty.insert(key.clone());
        self.drop_if_empty(&key);
        (before.unwrap_or_default(), key)
    }

    /// Takes all marks of a conversation away, but for those of snapshots that another one names:
    /// these go there. Returns the snapshots that were pinned and are no longer.
    pub fn unmark_all(&mut self, key: &ConversationKey) -> Vec<SnapshotId> {
        let marks = self
            .all
            .get_mut(key)
            .map(|it| std::mem::take(&mut it.marks));
        let mut unpinned = Vec::new();
        for (id, mark) in marks.unwrap_or_default() {
            self.marked.remove(&id);
            let other = self
                .named_by(id)
                .iter()
                .find(|other| *other != key)
                .cloned();
            match other {
                Some(other) => {
                    self.set_mark(&other, id, mark);
                }
                None if mark.pinned => unpinned.push(id),
                None => {}
            }
        }
        self.drop_if_empty(key);
        unpinned
    }

    /// The snapshot is gone.
    pub(super) fn lose_mark(&mut self, snapshot: SnapshotId) {
        if let Some(key) = self.marked.remove(&snapshot)
            && let Some(conversation) = self.all.get_mut(&key)
        {
            conversation.marks.remove(&snapshot);
            self.dirty.insert(key.clone());
            self.drop_if_empty(&key);
        }
    }
}
