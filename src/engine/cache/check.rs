//! The cache's account of itself, recomputed from nothing.

use std::collections::{BTreeSet, HashSet};

use super::{Cache, CacheCounts, NodeId};
use crate::engine::ids::{PageId, SlotId};

// === impl Cache ===

impl Cache {
    /// All pages and slots that the cache holds.
    pub fn holdings(&self) -> (Vec<PageId>, Vec<SlotId>) {
        let pages = self
            .nodes
            .values()
            .flat_map(|node| node.pages.iter().copied())
            .collect();
        let slots = self.nodes.values().filter_map(|node| node.state).collect();
        (pages, slots)
    }

    /// Recomputes every count and order from the tree and compares.
    ///
    /// # Errors
    ///
    /// What does not fit, in words.
    pub fn sanity_check(&self) -> Result<(), String> {
        let mut counts = CacheCounts::default();
        let mut states = BTreeSet::new();
        let mut leaves = BTreeSet::new();
        for (id, node) in &self.nodes {
            if node.parent.is_none() != self.roots.values().any(|root| *root == id) {
                return Err(format!(
                    "{id:?}: roots are exactly the nodes without a parent"
                ));
            }
            self.check_edge(id)?;
            counts.pages += node.pages.len();
            counts.slots += usize::from(node.state.is_some());
            if node.locks == 0 {
                counts.evictable_pages += node.pages.len();
            }
            if node.pins > 0 && (node.locks == 0 || node.state.is_none()) {
                return Err(format!(
                    "{id:?}: a pinned state exists and its KV is locked"
                ));
            }
            if node.state.is_some() && node.pins == 0 {
                counts.evictable_slots += 1;
                states.insert((node.state_used, id));
            }
            if node.children.is_empty() && node.parent.is_some() && node.locks == 0 {
                leaves.insert((node.state.is_some(), node.used, id));
            }
        }
        if counts != self.counts {
            return Err(format!(
                "counts are {:?}, should be {counts:?}",
                self.counts
            ));
        }
        if states != self.states || leaves != self.leaves {
            return Err("an LRU order misses a node or has one too many".to_owned());
        }
        let (pages, slots) = self.holdings();
        let unique = pages.iter().collect::<HashSet<_>>().len() == pages.len()
            && slots.iter().collect::<HashSet<_>>().len() == slots.len();
        if !unique {
            return Err("a page or a slot is held twice".to_owned());
        }
        Ok(())
    }

    fn check_edge(&self, id: NodeId) -> Result<(), String> {
        let node = self.node(id);
        if node.tokens.len() != node.pages.len() * self.page_size {
            return Err(format!("{id:?}: the edge is not whole pages"));
        }
        let Some(parent) = node.parent.and_then(|parent| self.nodes.get(parent)) else {
            let is_root = node.tokens.is_empty() && node.state.is_none();
            return if is_root && !node.children.is_empty() {
                Ok(())
            } else {
                Err(format!("{id:?}: a root has children and nothing else"))
            };
        };
        let key = node
            .tokens
            .get(..self.page_size)
            .ok_or("an edge is empty")?;
        if parent.children.get(key) != Some(&id) || parent.end + node.tokens.len() != node.end {
            return Err(format!("{id:?}: not where its parent says"));
        }
        let below: u32 = node
            .children
            .values()
            .map(|child| self.node(*child).locks)
            .sum();
        if node.locks < below {
            return Err(format!("{id:?}: {} locks, {below} below", node.locks));
        }
        Ok(())
    }
}
