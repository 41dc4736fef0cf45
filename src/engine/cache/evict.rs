//! The two LRU orders, and giving back.

use super::{Cache, CacheError, EvictedLeaf, Flushed, NodeId};
use crate::engine::ids::SlotId;

// === impl Cache ===

impl Cache {
    /// Evicts the state that was not used for the longest time; its node becomes a tombstone.
    pub fn evict_state(&mut self) -> Option<SlotId> {
        let (_, id) = self.states.first().copied()?;
        self.take_state(id)
    }

    /// Evicts one unlocked leaf: one that has no state if there is any, otherwise the one that was
    /// not used for the longest time.
    pub fn evict_leaf(&mut self) -> Option<EvictedLeaf> {
        let (.., id) = self.leaves.pop_first()?;
        self.unlist_state(id);
        let node = self.nodes.remove(id).expect("listed leaves are live");
        self.counts.pages -= node.pages.len();
        self.counts.evictable_pages -= node.pages.len();
        self.counts.slots -= usize::from(node.state.is_some());
        let parent = node.parent.expect("a root is never a leaf");
        let key = self.key_of(&node.tokens);
        self.node_mut(parent).children.remove(key);
        if self.node(parent).parent.is_none() && self.node(parent).children.is_empty() {
            self.nodes.remove(parent);
            self.roots.retain(|_, root| *root != parent);
        } else {
            self.list_leaf(parent);
        }
        Some(EvictedLeaf {
            pages: node.pages,
            slot: node.state,
        })
    }

    /// Empties the cache.
    ///
    /// # Errors
    ///
    /// [`CacheError::Locked`] if anything is locked or pinned; then nothing has changed.
    pub fn flush(&mut self) -> Result<Flushed, CacheError> {
        if self
            .nodes
            .values()
            .any(|node| node.locks > 0 || node.pins > 0)
        {
            return Err(CacheError::Locked);
        }
        let mut flushed = Flushed::default();
        for (_, node) in self.nodes.drain() {
            flushed.pages.extend(node.pages);
            flushed.slots.extend(node.state);
        }
        *self = Self {
            clock: self.clock,
            ..Self::new(self.page_size)
        };
        Ok(flushed)
    }

    /// Puts a node's state into the LRU order if it belongs there.
    pub(super) fn list_state(&mut self, id: NodeId) {
        let Some(node) = self.nodes.get(id) else {
            return;
        };
        if node.state.is_some() && node.pins == 0 && self.states.insert((node.state_used, id)) {
            self.counts.evictable_slots += 1;
        }
    }

    /// Takes a node's state out of the LRU order.
    pub(super) fn unlist_state(&mut self, id: NodeId) {
        let Some(node) = self.nodes.get(id) else {
            return;
        };
        if self.states.remove(&(node.state_used, id)) {
            self.counts.evictable_slots -= 1;
        }
    }

    /// Puts a node into the order of leaves if it belongs there.
    pub(super) fn list_leaf(&mut self, id: NodeId) {
        let Some(node) = self.nodes.get(id) else {
            return;
        };
        if node.children.is_empty() && node.locks == 0 && node.parent.is_some() {
            self.leaves.insert((node.state.is_some(), node.used, id));
        }
    }

    /// Takes a node out of the order of leaves.
    pub(super) fn unlist_leaf(&mut self, id: NodeId) {
        let Some(node) = self.nodes.get(id) else {
            return;
        };
        self.leaves.remove(&(node.state.is_some(), node.used, id));
    }

    fn key_of<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        tokens.get(..self.page_size).unwrap_or(tokens)
    }
}
