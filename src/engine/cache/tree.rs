//! Matching, inserting and locking.

use super::{Cache, CacheError, Inserted, Match, Namespace, Node, NodeId};
use crate::engine::ids::{PageId, SlotId};

/// How far a walk came.
struct Walk {
    /// Nodes whose whole edge matched, first to last, without the root.
    path: Vec<NodeId>,
    /// A child that matched in part, and how many tokens of its edge (at least one page).
    partial: Option<(NodeId, usize)>,
    /// Tokens matched, whole pages.
    tokens: usize,
}

// === impl Cache ===

impl Cache {
    /// What is cached of `tokens`, with a state at a boundary of at most `limit`. Changes no LRU
    /// order.
    pub fn peek(&self, namespace: &Namespace, tokens: &[u32], limit: usize) -> Match {
        let walk = self.walk(namespace, tokens);
        let usable = walk.path.iter().rev().find_map(|id| {
            let node = self.node(*id);
            node.state
                .filter(|_| node.end <= limit)
                .map(|slot| (*id, node.end, slot))
        });
        let kv_node = walk
            .partial
            .map(|(id, _)| id)
            .or_else(|| walk.path.last().copied());
        Match {
            boundary: usable.map_or(0, |(_, end, _)| end),
            node: usable.map(|(id, ..)| id),
            slot: usable.map(|(.., slot)| slot),
            kv_tokens: walk.tokens,
            kv_node,
        }
    }

    /// As [`Self::peek`], and marks the state found and the KV up to it as just used.
    pub fn match_prefix(&mut self, namespace: &Namespace, tokens: &[u32], limit: usize) -> Match {
        let found = self.peek(namespace, tokens, limit);
        if let Some(node) = found.node {
            self.touch(node);
        }
        found
    }

    /// Marks a node's state and the KV up to it as just used.
    pub fn touch(&mut self, id: NodeId) {
        self.clock += 1;
        let now = self.clock;
        self.unlist_state(id);
        if let Some(node) = self.nodes.get_mut(id) {
            node.state_used = now;
        }
        self.list_state(id);
        let mut at = Some(id);
        while let Some(id) = at {
            self.unlist_leaf(id);
            let Some(node) = self.nodes.get_mut(id) else {
                break;
            };
            node.used = now;
            at = node.parent;
            self.list_leaf(id);
        }
    }

    /// Inserts the KV of `tokens`. `pages` hold tokens `[start, tokens.len())`; those before must
    /// be cached. Pages of tokens that are cached already stay the caller's (the first
    /// [`Inserted::duplicates`] of them), all others become the cache's.
    ///
    /// # Errors
    ///
    /// [`CacheError::NotWholePages`], [`CacheError::PageCount`], [`CacheError::Gap`]; then nothing
    /// has changed.
    pub fn insert(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        start: usize,
        pages: &[PageId],
    ) -> Result<Inserted, CacheError> {
        let size = self.page_size;
        let whole = tokens.len().is_multiple_of(size) && start.is_multiple_of(size);
        if tokens.is_empty() || start > tokens.len() || !whole {
            return Err(CacheError::NotWholePages {
                tokens: tokens.len(),
                start,
            });
        }
        let expected = (tokens.len() - start) / size;
        if pages.len() != expected {
            return Err(CacheError::PageCount {
                expected,
                got: pages.len(),
            });
        }
        let walk = self.walk(namespace, tokens);
        if walk.tokens < start {
            return Err(CacheError::Gap {
                cached: walk.tokens,
                start,
            });
        }
        let duplicates = (walk.tokens - start) / size;
        let mut node = match (walk.partial, walk.path.last()) {
            (Some((child, len)), _) => self.split(child, len),
            (None, Some(last)) => *last,
            (None, None) => self.root(namespace),
        };
        let (_, rest) = tokens.split_at(walk.tokens);
        let (_, new) = pages.split_at(duplicates);
        if !rest.is_empty() {
            node = self.add_leaf(node, rest, new);
        }
        self.touch(node);
        Ok(Inserted { node, duplicates })
    }

    /// Gives a node a state.
    ///
    /// # Errors
    ///
    /// The slot, if the node has a state already or is gone.
    pub fn set_state(&mut self, id: NodeId, slot: SlotId) -> Result<(), SlotId> {
        if self
            .nodes
            .get(id)
            .is_none_or(|node| node.state.is_some() || node.parent.is_none())
        {
            return Err(slot);
        }
        self.unlist_leaf(id);
        self.node_mut(id).state = Some(slot);
        self.counts.slots += 1;
        self.list_leaf(id);
        self.list_state(id);
        self.touch(id);
        Ok(())
    }

    /// Takes a node's state out of the cache, if it has one and nobody pins it.
    pub fn take_state(&mut self, id: NodeId) -> Option<SlotId> {
        let node = self.nodes.get(id)?;
        if node.pins > 0 {
            return None;
        }
        node.state?;
        self.unlist_state(id);
        self.unlist_leaf(id);
        let slot = self.node_mut(id).state.take();
        self.counts.slots -= 1;
        self.list_leaf(id);
        slot
    }

    /// Keeps the KV from the root to a node.
    pub fn lock(&mut self, id: NodeId) {
        let mut at = Some(id);
        while let Some(id) = at {
            self.unlist_leaf(id);
            let node = self.node_mut(id);
            node.locks += 1;
            at = node.parent;
            if node.locks == 1 {
                self.counts.evictable_pages -= self.node(id).pages.len();
            }
        }
    }

    /// Undoes one [`Self::lock`].
    ///
    /// # Panics
    ///
    /// If the node is not locked.
    pub fn unlock(&mut self, id: NodeId) {
        let mut at = Some(id);
        while let Some(id) = at {
            let node = self.node_mut(id);
            node.locks = node
                .locks
                .checked_sub(1)
                .expect("every unlock follows its lock");
            at = node.parent;
            if node.locks == 0 {
                self.counts.evictable_pages += self.node(id).pages.len();
            }
            self.list_leaf(id);
        }
    }

    /// Keeps a node's state. Only for a node that the caller has locked as well.
    pub fn pin_state(&mut self, id: NodeId) {
        self.unlist_state(id);
        self.node_mut(id).pins += 1;
    }

    /// Undoes one [`Self::pin_state`].
    ///
    /// # Panics
    ///
    /// If the state is not pinned.
    pub fn unpin_state(&mut self, id: NodeId) {
        let node = self.node_mut(id);
        node.pins = node
            .pins
            .checked_sub(1)
            .expect("every unpin follows its pin");
        self.list_state(id);
    }

    fn walk(&self, namespace: &Namespace, tokens: &[u32]) -> Walk {
        let mut walk = Walk {
            path: Vec::new(),
            partial: None,
            tokens: 0,
        };
        let Some(mut at) = self.roots.get(namespace).copied() else {
            return walk;
        };
        let mut rest = tokens;
        while let Some(first) = rest.get(..self.page_size) {
            let Some(child) = self.node(at).children.get(first).copied() else {
                break;
            };
            let edge = &self.node(child).tokens;
            let pairs = edge
                .chunks_exact(self.page_size)
                .zip(rest.chunks_exact(self.page_size));
            let same = pairs.take_while(|(a, b)| a == b).count() * self.page_size;
            walk.tokens += same;
            if same < edge.len() {
                walk.partial = Some((child, same));
                break;
            }
            walk.path.push(child);
            at = child;
            rest = rest.split_at(same).1;
        }
        walk
    }

    fn root(&mut self, namespace: &Namespace) -> NodeId {
        if let Some(root) = self.roots.get(namespace) {
            return *root;
        }
        let root = self.nodes.insert(Node::default());
        self.roots.insert(namespace.clone(), root);
        root
    }

    fn add_leaf(&mut self, parent: NodeId, tokens: &[u32], pages: &[PageId]) -> NodeId {
        self.unlist_leaf(parent);
        let end = self.node(parent).end + tokens.len();
        let leaf = self.nodes.insert(Node {
            parent: Some(parent),
            tokens: tokens.to_vec(),
            pages: pages.to_vec(),
            end,
            ..Node::default()
        });
        let key = self.key(tokens);
        self.node_mut(parent).children.insert(key, leaf);
        self.counts.pages += pages.len();
        self.counts.evictable_pages += pages.len();
        self.list_leaf(leaf);
        leaf
    }

    /// Cuts `len` tokens off the front of a node's edge into a new node above it, a tombstone.
    /// The node itself keeps its id, state, pins and locks.
    fn split(&mut self, id: NodeId, len: usize) -> NodeId {
        let pages = len / self.page_size;
        let lower = self.node_mut(id);
        let rest = lower.tokens.split_off(len);
        let tokens = std::mem::replace(&mut lower.tokens, rest);
        let rest = lower.pages.split_off(pages);
        let upper = Node {
            parent: lower.parent,
            end: lower.end - lower.tokens.len(),
            pages: std::mem::replace(&mut lower.pages, rest),
            locks: lower.locks,
            used: lower.used,
            ..Node::default()
        };
        let upper_key = self.key(&tokens);
        let lower_key = self.key(&self.node(id).tokens);
        let parent = upper.parent.expect("a node with an edge has a parent");
        let upper = self.nodes.insert(upper);
        self.node_mut(parent).children.insert(upper_key, upper);
        self.node_mut(id).parent = Some(upper);
        let node = self.node_mut(upper);
        node.tokens = tokens;
        node.children.insert(lower_key, id);
        upper
    }

    /// The key of an edge in its parent: its first page.
    fn key(&self, tokens: &[u32]) -> Box<[u32]> {
        tokens.get(..self.page_size).unwrap_or(tokens).into()
    }
}
